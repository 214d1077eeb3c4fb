"""Samples prompts without and with what a run has trained: `python -m trainer.train.draw RUN --prompt TEXT`.

One process, on one device. The model is built as for training, with the run's adapter and quantization, and sampled as
the base is, and then with the weights of each checkpoint (or of the exported adapter) at each strength.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from trainer import adapters
from trainer.checkpoint.restore import StoredWeights
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.data.drawn_references import check_drawing
from trainer.data.open import open_samples
from trainer.distributed.context import RankContext
from trainer.distributed.world import World, connect
from trainer.models import families
from trainer.models.base import ImageFamily, ModelFamily
from trainer.models.build import LoadedModel, build_model, encoder_loader, load_model
from trainer.models.parts.progress import reporting_to
from trainer.models.pissa import initial_file, read_factors
from trainer.models.start import continue_adapter
from trainer.parallel.load import fill_rows, own_rows
from trainer.rng import SampleRng
from trainer.run import manifest, process
from trainer.run.drawings import (
    Drawing,
    DrawingRequest,
    Picture,
    new_folder,
    number_of,
    references_of,
    write_progress,
    write_record,
)
from trainer.run.drawings import sources as drawn_from
from trainer.run.folder import RunDir, guard_cache, shared_cache
from trainer.run.samples import Sample, reference_name
from trainer.system.errors import InputError
from trainer.system.process_exit import run_and_exit
from trainer.system.terminal import say

PROGRESS_EVERY_S = 0.5


def main() -> int:
    """Exit code 0: drawn, the last line of the output is the folder; 2: the user's mistake, which is the output."""
    arguments = _parser().parse_args()
    request = asked(arguments)
    # The launcher gives each process one thread, as ranks share the cores. This process is alone.
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        run = RunDir.open(arguments.run_dir)
        cfg = on_one_device(run, check_drawing(run, request), arguments.device, arguments.offload)
        with connect(cfg.parallel) as world:
            say(draw(run, cfg, world, request)[-1])
    except InputError as error:
        say(error)  # stderr is full of what libraries log while they load
        return 2
    except torch.OutOfMemoryError as error:
        first = str(error).partition(". ")[0]
        say(f"the model does not fit on one GPU ({first}); add --offload, which keeps its weights in host memory")
        return 2
    return 0


def asked(arguments: argparse.Namespace) -> DrawingRequest:
    """Return the request of a command line."""
    return DrawingRequest(
        prompts=tuple(arguments.prompt),
        seed=arguments.seed,
        steps=arguments.steps,
        guidance=arguments.guidance,
        size=None if arguments.size is None else tuple(arguments.size),
        checkpoints=tuple(arguments.checkpoint),
        strengths=tuple(arguments.strength or (1.0,)),
        references=() if arguments.without_references else tuple(arguments.reference) or None,
    )


def on_one_device(run: RunDir, cfg: RunConfig, device: str | None = None, offload: bool = False) -> RunConfig:
    """Return the config of a run for a process without other ranks.

    Args:
        device: `parallel.device`; None is the run's own.
        offload: Keep the weights in host memory.

    Raises:
        InputError: The GPU is taken by the run itself.
    """
    wanted = device or cfg.parallel.device
    if wanted != "cpu" and torch.cuda.is_available() and process.alive(run):
        raise InputError(
            f"{run.path.name}: is still training and uses its GPU; sample when it has ended, or with --device cpu"
        )
    offloads = offload or cfg.parallel.cpu_offload
    changes = {"device": wanted, "devices": 1, "nodes": 1, "rendezvous": None, "shard_size": None}
    changes |= {"strategy": "full" if offloads else "none", "cpu_offload": offloads}
    changes |= {"offload_blocks": 0} if offloads else {}
    parallel = cfg.parallel.model_copy(update=changes)
    train = cfg.train.model_copy(update={"compile": False, "checkpointing": "none"})
    return cfg.model_copy(update={"parallel": parallel, "train": train})


def draw(run: RunDir, cfg: RunConfig, world: World, request: DrawingRequest) -> list[Path]:
    """Sample the prompts of `sample.prompts`, each once as the base is and then as `request` says.

    Returns the folder of each prompt. A record names what is complete, so that a drawing that is stopped keeps that.

    Raises:
        InputError: Weights are missing, damaged or of another model; or the cache leads elsewhere.
    """
    began, cache = time.perf_counter(), shared_cache(cfg, run.path.parent)
    guard_cache(cache)
    sources, references = drawn_from(run, request), references_of(run, request, cfg)
    write_progress(run, None)
    family = families.make(cfg, cache)
    built = build_model(cfg, family)
    context, load = RankContext(cfg, world, cache, lambda event: None), encoder_loader(cfg, world, cache)
    sampler = open_samples(family, load, context, [list(map(str, files)) for files in references])
    read_factors(cfg, initial_file(run))
    loaded = load_model(built, cfg, family, world, cache, initial=initial_file(run))
    for dropout in adapters.dropouts(loaded.module):
        dropout.eval()
    pages = [
        _Page(run, cfg, family, prompt, files, began) for prompt, files in zip(sampler.prompts, references, strict=True)
    ]
    progress = _Progress(run, request.num_pictures)
    with torch.no_grad():
        generate = sampler.prepare()

        def picture_all(source: Path | None, strength: float) -> None:
            for index, page in enumerate(pages):
                with reporting_to(progress.update):
                    sample = generate(loaded.module, index, SampleRng(cfg.sample.seed, (page.number,), world.device))
                page.add(sample, source, strength)
                progress.next()

        picture_all(None, 0.0)
        # What is trained whole is mixed with the base's values; an adapter is scaled as it is applied.
        whole = _trained_whole(loaded) if set(request.strengths) != {1.0} else []
        start = [rows.to("cpu", copy=True) for rows in whole]
        for source in sources:
            _take_trained_weights(loaded, cfg, family, source)
            end = [rows.to("cpu", copy=True) for rows in whole]
            for strength in request.strengths:
                for rows, first, last in zip(whole, start, end, strict=True):
                    rows.copy_(torch.lerp(first, last, strength))
                with adapters.at_strength(loaded.module, strength):
                    picture_all(source, strength)
    return [page.folder for page in pages]


def _trained_whole(loaded: LoadedModel) -> list[torch.Tensor]:
    """Return the values of the trained parameters that are not an adapter's, this process's rows of each."""
    layers = adapters.adapted_layers(loaded.module)
    return [
        rows.detach()
        for name, parameter in loaded.trainables.items()
        if not any(name.startswith(f"{layer}.") for layer in layers)
        for _, rows in own_rows(parameter)
    ]


class _Page:
    """The folder of a prompt: its pictures and their record, which is written again with each."""

    def __init__(
        self, run: RunDir, cfg: RunConfig, family: ModelFamily, prompt: str, references: Sequence[Path], began: float
    ) -> None:
        self.folder = new_folder(run)
        copies = [self.folder / reference_name(file, str(at)) for at, file in enumerate(references, 1)]
        for file, copy in zip(references, copies, strict=True):
            shutil.copyfile(file, copy)
        self.number = number_of(run, prompt)
        self._run, self._began = run, began
        self._drawing = Drawing(
            prompt=prompt,
            seed=cfg.sample.seed,
            number=self.number,
            pictures=(),
            seconds=0.0,
            size=None,
            steps=None,
            guidance=None,
            time=0.0,
            references=tuple(str(copy.relative_to(run.path)) for copy in copies),
        )
        if isinstance(family, ImageFamily):
            sample = family.complete_sample(cfg.sample)
            self._drawing = replace(
                self._drawing, size=sample.full_size.values, steps=sample.steps, guidance=sample.guidance
            )

    def add(self, sample: Sample, source: Path | None, strength: float) -> None:
        """Write a picture, and the record with it. source: None for the base."""
        made = self._drawing.pictures
        file = self.folder / f"{len(made)}{sample.kind.suffix}"
        sample.write(file)
        name = "" if source is None else str(source.relative_to(self._run.path))
        picture = Picture(str(file.relative_to(self._run.path)), name, strength)
        seconds = round(time.perf_counter() - self._began, 3)
        self._drawing = replace(self._drawing, pictures=(*made, picture), seconds=seconds, time=time.time())
        write_record(self.folder, self._drawing)


class _Progress:
    """Writes the share of a drawing that is done, twice a second."""

    def __init__(self, run: RunDir, num_pictures: int) -> None:
        self._run, self._num_pictures = run, num_pictures
        self._done, self._written = 0, 0.0

    def update(self, share: float) -> None:
        """share: of the picture that is being made."""
        if time.monotonic() - self._written >= PROGRESS_EVERY_S:
            write_progress(self._run, (self._done + share) / self._num_pictures)
            self._written = time.monotonic()

    def next(self) -> None:
        """The picture is complete."""
        self._done += 1


def _take_trained_weights(loaded: LoadedModel, cfg: RunConfig, family: ModelFamily, source: Path) -> None:
    """Fill the trained parameters from a checkpoint, or from an exported adapter."""
    if not (source / manifest.MANIFEST).is_file():
        assert not isinstance(cfg.adapter, NoAdapter)
        adapter = cfg.adapter.model_copy(update={"start": str(source)})
        continue_adapter(loaded, cfg.model_copy(update={"adapter": adapter}), family)
        return
    weights = StoredWeights(source)
    differing = sorted(loaded.trainables.keys() ^ set(weights))
    if differing:
        raise InputError(f"{source}: holds other weights than the run's config trains, first '{differing[0]}'")
    with torch.no_grad():
        for name, parameter in loaded.trainables.items():
            fill_rows(parameter, weights[name])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.train.draw", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run folder")
    parser.add_argument(
        "--prompt", action="append", required=True, help="prompt of the image, or the text to continue; may be repeated"
    )
    parser.add_argument(
        "--checkpoint", type=int, action="append", default=[], metavar="STEP", help="one to draw with; may be repeated"
    )
    parser.add_argument(
        "--strength", type=float, action="append", help="factor of what was trained; may be repeated; default: 1"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar="FILE",
        help="image that the model changes; may be repeated; without it those of the run's own sample",
    )
    shown.add_argument("--without-references", action="store_true", help="show the model no reference image")
    parser.add_argument("--seed", type=int, help="seed of the noise; the run's own without it")
    parser.add_argument("--steps", type=int, help="denoising steps")
    parser.add_argument("--guidance", type=float, help="guidance scale")
    parser.add_argument("--size", type=int, nargs=2, metavar=("WIDTH", "HEIGHT"), help="size in pixels")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help="parallel.device; the run's own without it")
    parser.add_argument("--offload", action="store_true", help="keep the weights in host memory: needs less of the GPU")
    return parser


if __name__ == "__main__":
    run_and_exit(main)
