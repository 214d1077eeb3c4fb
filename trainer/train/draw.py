"""Samples a prompt with and without what a run has trained: `python -m trainer.train.draw RUN --prompt TEXT`.

One process, on one device. The model is built as for training, with the run's adapter and quantization, and sampled
twice: as the base is, and with the weights of the newest checkpoint or of the exported adapter.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainer import adapters
from trainer.checkpoint.restore import StoredWeights
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.data.cache import ExampleCache
from trainer.data.images.image_source import EncodedData, EncodedPrompt, ImageSampler, with_trigger
from trainer.data.prompts import PromptEncoder, encode_texts, origin_of, text_keys
from trainer.data.source import Sampler
from trainer.data.text.text_source import TextSampler
from trainer.distributed.context import RankContext
from trainer.distributed.world import World, connect
from trainer.models import families
from trainer.models.base import ImageFamily, ModelFamily, TextFamily
from trainer.models.build import LoadedModel, build_model, encoder_loader, load_model
from trainer.models.pissa import initial_file, read_factors
from trainer.models.start import continue_adapter
from trainer.parallel.load import fill_rows
from trainer.rng import SampleRng
from trainer.run import manifest, process
from trainer.run.drawings import (
    Drawing,
    DrawingRequest,
    check_request,
    new_folder,
    number_of,
    trained_weights,
    write_record,
)
from trainer.run.folder import RunDir, guard_cache, shared_cache
from trainer.run.samples import Sample
from trainer.system.errors import InputError
from trainer.system.process_exit import run_and_exit
from trainer.system.terminal import say


def main() -> int:
    """Exit code 0: drawn, the last line of the output is the folder; 2: the user's mistake, which is the output."""
    arguments = _parser().parse_args()
    size = None if arguments.size is None else tuple(arguments.size)
    request = DrawingRequest(arguments.prompt, arguments.seed, arguments.steps, arguments.guidance, size)
    # The launcher gives each process one thread, as ranks share the cores. This process is alone.
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        run = RunDir.open(arguments.run_dir)
        cfg = on_one_device(run, check_request(run, request), arguments.device, arguments.offload)
        with connect(cfg.parallel) as world:
            say(draw(run, cfg, world))
    except InputError as error:
        say(error)  # stderr is full of what libraries log while they load
        return 2
    except torch.OutOfMemoryError as error:
        first = str(error).partition(". ")[0]
        say(f"the model does not fit on one GPU ({first}); add --offload, which keeps its weights in host memory")
        return 2
    return 0


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


def draw(run: RunDir, cfg: RunConfig, world: World) -> Path:
    """Sample `sample.prompts` of the config, which holds one, twice. Returns the folder with the files.

    Raises:
        InputError: Weights are missing, damaged or of another model; or the cache leads elsewhere.
    """
    began, cache = time.perf_counter(), shared_cache(cfg, run.path.parent)
    guard_cache(cache)
    source = trained_weights(run)
    family = families.make(cfg, cache)
    built = build_model(cfg, family)
    sampler = _sampler(cfg, family, world, cache)
    read_factors(cfg, initial_file(run))
    loaded = load_model(built, cfg, family, world, cache, initial=initial_file(run))
    for dropout in adapters.dropouts(loaded.module):
        dropout.eval()
    numbers = SampleRng(cfg.sample.seed, (number_of(run, sampler.prompts[0]),), world.device)
    with torch.no_grad():
        generate = sampler.prepare()
        base = generate(loaded.module, 0, numbers)
        _take_trained_weights(loaded, cfg, family, source)
        trained = generate(loaded.module, 0, numbers)
    result = _Result(sampler, base, trained, numbers.indices[0], time.perf_counter() - began)
    return _write(run, cfg, family, source, result)


@dataclass(frozen=True)
class _Result:
    """Both samples."""

    sampler: Sampler
    base: Sample
    trained: Sample
    number: int
    seconds: float


def _sampler(cfg: RunConfig, family: ModelFamily, world: World, cache: Path) -> Sampler:
    """Return the sampler of the config's only prompt. For an image model it encodes the prompt first, on the device."""
    if isinstance(family, TextFamily):
        return TextSampler(cfg, family)
    if not isinstance(family, ImageFamily):
        raise TypeError(f"{type(family).__name__} is neither a text nor an image family")
    (prompt,) = with_trigger(cfg.sample.prompts, cfg.data)
    examples, origin = ExampleCache(cache / "examples"), origin_of(cfg, family)
    keys = text_keys(cfg, origin, [prompt, cfg.sample.negative, ""])
    missing = {text: key for text, key in keys.items() if not examples.has(key)}
    load = encoder_loader(cfg, world, cache)
    if missing:
        encode_texts(family, load, examples, missing)
    prompts = (EncodedPrompt(prompt, keys[prompt], None),)
    data = EncodedData(examples, (), (), prompts, keys[cfg.sample.negative], keys[""], family.dropped_text, origin)
    context = RankContext(cfg, world, cache, lambda event: None)
    return ImageSampler(cfg, family, load, data, PromptEncoder(family, context, examples, origin))


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


def _write(run: RunDir, cfg: RunConfig, family: ModelFamily, source: Path, result: _Result) -> Path:
    folder, suffix = new_folder(run), result.trained.kind.suffix
    result.trained.write(folder / f"trained{suffix}")
    result.base.write(folder / f"base{suffix}")
    drawing = Drawing(
        prompt=result.sampler.prompts[0],
        seed=cfg.sample.seed,
        number=result.number,
        source=str(source.relative_to(run.path)),
        trained=str((folder / f"trained{suffix}").relative_to(run.path)),
        base=str((folder / f"base{suffix}").relative_to(run.path)),
        seconds=round(result.seconds, 3),
        size=None,
        steps=None,
        guidance=None,
        time=time.time(),
    )
    if isinstance(family, ImageFamily):
        sample = family.complete_sample(cfg.sample)
        drawing = replace(drawing, size=sample.full_size.values, steps=sample.steps, guidance=sample.guidance)
    write_record(folder, drawing)
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.train.draw", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run folder")
    parser.add_argument("--prompt", required=True, help="prompt of the image, or the text to continue")
    parser.add_argument("--seed", type=int, help="seed of the noise; the run's own without it")
    parser.add_argument("--steps", type=int, help="denoising steps")
    parser.add_argument("--guidance", type=float, help="guidance scale")
    parser.add_argument("--size", type=int, nargs=2, metavar=("WIDTH", "HEIGHT"), help="size in pixels")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help="parallel.device; the run's own without it")
    parser.add_argument("--offload", action="store_true", help="keep the weights in host memory: needs less of the GPU")
    return parser


if __name__ == "__main__":
    run_and_exit(main)
