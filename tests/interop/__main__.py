"""`make interop`: what each program makes of every file this one writes, as a table.

A figure is the worst ||W_read - W_merged|| / ||W_merged - W_base|| over the layers of all files that are meant for the
program, in whatever format. Exit code 1 when one is too large, or a program does not read a file.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from tests.adapters.consumers import CONSUMERS, ourselves
from tests.adapters.examples import KINDS, Example, cached_example, relative
from tests.interop import comfyui, flux1_width
from trainer.adapters.formats.writer import AdapterFile
from trainer.adapters.layer import LayerAdapter
from trainer.models import families
from trainer.system.errors import InputError
from trainer.weights.files import ORIGINAL_PREFIX

FORMATS = ("auto", "diffusers", "comfyui", "kohya", "lycoris", "peft")
LIMIT = 1e-5
PROGRAMS = ("ourselves", "diffusers", "comfyui", "lycoris", "peft")


@dataclass(frozen=True)
class ComfyModel:
    """ComfyUI's class for a family, and its config from that of diffusers."""

    kind: str
    config: Callable[[Any], dict[str, Any]]


def _flux(config: Any) -> dict[str, Any]:
    return {
        "depth": config.num_layers,
        "depth_single_blocks": config.num_single_layers,
        "hidden_size": _width(config),
    }


def _width(config: Any) -> int:
    return int(config.num_attention_heads * config.attention_head_dim)


def _unet(config: Any) -> dict[str, Any]:
    depths = config.transformer_layers_per_block
    depths = depths if isinstance(depths, list | tuple) else [depths] * len(config.down_block_types)
    depths = [d if "Attn" in kind else 0 for d, kind in zip(depths, config.down_block_types, strict=True)]
    blocks = config.layers_per_block
    return {
        "num_res_blocks": [blocks] * len(depths),
        "channel_mult": [1] * len(depths),
        "transformer_depth": [depth for depth in depths for _ in range(blocks)],
        "transformer_depth_output": [depth for depth in depths for _ in range(blocks + 1)],
        "transformer_depth_middle": depths[-1],
    }


COMFY_MODELS = {
    "chroma": ComfyModel("Chroma", _flux),
    "ernie_image": ComfyModel("ErnieImage", lambda config: {}),
    "flux1": ComfyModel("Flux", _flux),
    "flux2": ComfyModel("Flux", _flux),
    "ideogram4": ComfyModel("Ideogram4", lambda config: {}),
    "krea2": ComfyModel("Krea2", lambda config: {}),
    # ComfyUI takes 64 times the depth for the width, as it is in all published models.
    "sd3": ComfyModel("SD3", lambda config: {"depth": _width(config) / 64, "num_blocks": config.num_layers}),
    "sdxl": ComfyModel("SDXL", _unet),
    "z_image": ComfyModel(
        "Lumina2",
        lambda config: {
            "n_layers": config.n_layers,
            "dim": config.dim,
            "n_refiner_layers": config.n_refiner_layers,
        },
    ),
    "qwen_image": ComfyModel("QwenImage", lambda config: {}),
    # Its class of 2.1 is derived from that of Qwen-Image.
    "qwen_image_21": ComfyModel("QwenImage", lambda config: {}),
}


@dataclass(frozen=True)
class Written:
    """A file of ours with what it was written from."""

    family: str
    adapter: str
    format: str
    file: AdapterFile
    path: Path
    model: Example = field(repr=False)
    layers: Mapping[str, LayerAdapter] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.family}, {self.adapter}, {self.format}{self.file.suffix}"


@dataclass(frozen=True)
class Figure:
    """What a program made of a file. error: nan when it did not read it, for the reason in `why`."""

    written: Written
    program: str
    error: float
    why: str = ""

    @property
    def is_wrong(self) -> bool:
        return not self.error <= LIMIT


def write_all(folder: Path, names: list[str]) -> Iterator[Written]:
    """Every format that can carry it, for each adapter and family, each file once."""
    for family in names:
        model = cached_example(family, folder / "models")
        for adapter in KINDS:
            layers = model.adapter(adapter, model.family.components)
            seen: list[tuple[set[str], Mapping[str, str]]] = []
            for format in FORMATS:
                try:
                    files = model.files(layers, format)
                except InputError:
                    continue
                for file in files:
                    if (contents := (set(file.tensors), file.metadata)) not in seen:
                        seen.append(contents)
                        at = folder / "files" / family / adapter / format
                        at.mkdir(parents=True, exist_ok=True)
                        path = file.path(at, "adapter")
                        file.write(path, {})
                        yield Written(family, adapter, format, file, path, model, layers)


def in_this_process(written: Written) -> Iterator[Figure]:
    """The figures of the programs that are Python packages, and of our own reader."""
    readers = {name: CONSUMERS[name] for name in written.file.readers if name in CONSUMERS}
    if not written.file.peft_config:
        readers["ourselves"] = ourselves
    for name, reader in readers.items():
        try:
            yield Figure(written, name, reader(written.model, written.path, written.layers))
        except Exception as error:  # noqa: BLE001  whatever a program raises is a line of the table
            yield Figure(written, name, float("nan"), f"{type(error).__name__}: {error}")


def in_comfyui(all_written: list[Written], tree: Path, folder: Path) -> list[Figure]:
    """The figures of ComfyUI, all in one process."""
    meant = [w for w in all_written if "comfyui" in w.file.readers and w.family in COMFY_MODELS]
    plain = [w for w in all_written if w.adapter == "dora" and w.format == "lycoris" and w.family in COMFY_MODELS]
    jobs = []
    for number, written in enumerate((*meant, *plain)):
        state = folder / f"{written.family}.safetensors"
        if not state.exists():
            save_file(original_state(written.model, {}), state)
        model = COMFY_MODELS[written.family]
        config = model.config(written.model.family.build(written.model.family.components[0]).config)
        to = folder / f"comfyui-{number}.safetensors"
        jobs.append(
            {"model": str(state), "kind": model.kind, "config": config, "adapter": str(written.path), "to": str(to)}
        )
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    subprocess.run([sys.executable, comfyui.__file__, str(tree), str(folder / "jobs.json")], check=True)
    figures = [_comfy_figure(written, Path(job["to"])) for written, job in zip(meant, jobs, strict=False)]
    _tell_dora([_comfy_figure(w, Path(job["to"])) for w, job in zip(plain, jobs[len(meant) :], strict=True)])
    return figures


def _tell_dora(plain: list[Figure]) -> None:
    worst = max(figure.error for figure in plain)
    verdict = (
        "divides a dora by ||W||: `dora_scale` corrected for it is right"
        if worst > LIMIT
        else "divides a dora by ||W + dW||: REMOVE the correction of `dora_scale`"
    )
    print(f"ComfyUI in this tree {verdict} (a plain `dora_scale` is off by {worst:.2g})\n")


def _comfy_figure(written: Written, file: Path) -> Figure:
    with safe_open(file, "pt") as stored:
        why = stored.metadata()["error"]
    if why:
        return Figure(written, "comfyui", float("nan"), why)
    found = load_file(file)
    before, merged = original_state(written.model, {}), original_state(written.model, written.layers)
    changed = {name for name in merged if not torch.equal(merged[name], before[name])}
    if found.keys() != changed:
        name = sorted(found.keys() ^ changed)[0]
        return Figure(written, "comfyui", float("nan"), f"changes {len(found)} of {len(changed)} weights, not {name}")
    return Figure(written, "comfyui", max(relative(found[name], merged[name], before[name]) for name in changed))


def original_state(model: Example, layers: Mapping[str, LayerAdapter]) -> dict[str, Tensor]:
    """The weights of all layers under the names of ComfyUI, with adapters merged in."""

    def weight(layer: str) -> Tensor:
        base = model.weight(layer)
        return layers[layer].merged(base) if layer in layers else base

    denoiser, *encoders = model.family.components
    own = [name for name in model.shapes if name.startswith(f"{denoiser}.")]
    state = {f"diffusion_model.{name.partition('.')[2]}.weight": weight(name) for name in own}
    if model.naming.layouts[denoiser]:
        state = {}
        for fused in model.naming.layouts[denoiser]:
            parts = [f"{denoiser}.{part.removesuffix('.weight')}" for part in fused.parts]
            if model.shapes.keys() >= set(parts):
                joined = fused.join([weight(part) for part in parts])
                state[f"diffusion_model.{fused.name.removeprefix(ORIGINAL_PREFIX)}"] = joined
    for encoder, name in zip(encoders, ("clip_l", "clip_g"), strict=False):
        for layer in model.targets(convs=False):
            if layer.startswith(f"{encoder}."):
                path = layer.removeprefix(f"{encoder}.").removeprefix("text_model.")
                state[f"{name}.transformer.text_model.{path}.weight"] = weight(layer)
    return {name: tensor.contiguous() for name, tensor in state.items()}


def print_table(figures: list[Figure], has_comfyui: bool) -> None:
    rows = dict.fromkeys((f.written.family, f.written.adapter) for f in figures)
    print(f"{'':30}" + "".join(f"{program:>12}" for program in PROGRAMS))
    for family, adapter in rows:
        cells = []
        for program in PROGRAMS:
            mine = [
                f for f in figures if (f.written.family, f.written.adapter, f.program) == (family, adapter, program)
            ]
            cells.append(_cell(mine) if mine else "-" if has_comfyui or program != "comfyui" else "skipped")
        print(f"{family:14}{adapter:16}" + "".join(f"{cell:>12}" for cell in cells))


def _cell(figures: list[Figure]) -> str:
    if any(figure.is_wrong for figure in figures):
        return "WRONG"
    return f"{max(figure.error for figure in figures):.0e}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interop", description=__doc__)
    parser.add_argument("--comfyui", type=Path, help="source tree of ComfyUI, of 2026-01 or later")
    parser.add_argument("--families", nargs="*", default=list(families.names()))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bar()
    logging.disable(logging.WARNING)  # diffusers and peft tell of every dora_scale and every missing text encoder
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        written = list(write_all(folder, options.families))
        figures = [figure for item in written for figure in in_this_process(item)]
        if options.comfyui:
            figures += in_comfyui(written, options.comfyui, folder)
        print_table(figures, has_comfyui=options.comfyui is not None)
        wide = list(flux1_width.figures(folder)) if "flux1" in options.families else []
    for what, error in wide:
        print(f"flux1 at its published width, {what}: diffusers {'WRONG' if error > LIMIT else f'{error:.0e}'}")
    wrong = [figure for figure in figures if figure.is_wrong]
    for figure in wrong:
        print(f"WRONG {figure.program}: {figure.written}: {figure.why or f'{figure.error:.2g}'}")
    print(f"\n{len(figures)} files read, {len(wrong)} wrong")
    meant = [item for item in written if "comfyui" in item.file.readers]
    unread = len([item for item in meant if not options.comfyui or item.family not in COMFY_MODELS])
    if unread:
        print(f"{unread} of {len(meant)} files for ComfyUI were not read by it: {_unread_reason(options.comfyui)}")
    return 1 if wrong or any(error > LIMIT for _, error in wide) else 0


def _unread_reason(tree: Path | None) -> str:
    return "it does not know the model" if tree else "name its source tree with COMFYUI=path"


if __name__ == "__main__":
    sys.exit(main())
