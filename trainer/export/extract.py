"""Extracts a lora from the difference of two checkpoints: `python -m trainer.export.extract`, run by `--extract`."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from trainer.adapters.formats.reader import read_adapter
from trainer.adapters.formats.writer import DTYPES, adapter_files
from trainer.adapters.layer import LayerAdapter
from trainer.config.sections import ModelConfig, ObjectiveConfig, family_names
from trainer.models import families
from trainer.models.base import ModelFamily
from trainer.models.state_dict import naming
from trainer.rng import generator
from trainer.system.errors import InputError, not_one_of
from trainer.system.files import rename
from trainer.system.terminal import complain, say
from trainer.weights.files import WeightFiles, read_tensor, safetensors_in
from trainer.weights.hub import find_folder
from trainer.weights.tensors import TensorEntry

TOLERANCE = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-5}
"""Rounding to the file's type, relative to the norm of a layer's update."""
DENOISER_STEM, ENCODER_STEM = "diffusion_pytorch_model", "model"
FORMATS = ("auto", "diffusers", "comfyui", "kohya", "lycoris")
GAIN = 1e-4
"""The search for the nearest matrix ends when a round adds less than this share of the difference."""
MAX_ROUNDS = 20


@dataclass(frozen=True)
class Extracted:
    """The lora of one layer.

    Attributes:
        adapter: The lora.
        difference: Norm of the difference of the two weights.
        kept: Share of that norm which the lora has, 0 to 1.
    """

    adapter: LayerAdapter
    difference: float
    kept: float


class Checkpoints:
    """The tensors of both checkpoints, by the module's names, read one at a time.

    Args:
        tuned: Path or hub name of the tuned checkpoint.
        base: Path or hub name of the checkpoint it was tuned from.
        family: Name of the family.
        cache: Folder for downloads and files shared by runs.

    Raises:
        InputError: One of them is not a checkpoint of the family, or their tensors differ in name or shape.
    """

    def __init__(self, tuned: str, base: str, family: str, cache: Path) -> None:
        self._tuned = find_folder("--extract", tuned)
        self._base = find_folder("--base", base)
        self.family = self._family(family, cache)
        denoiser, *encoders = self.family.components
        in_both = [name for name in encoders if all((path / name).is_dir() for path in (self._base, self._tuned))]
        self._entries = {component: self._pairs(component) for component in (denoiser, *in_both)}

    def layers(self) -> list[str]:
        """Return the layers that adapters of the family change by default."""
        return [layer for layer in self.layer_shapes() if self._is_target(layer)]

    def others(self) -> list[str]:
        """Return the names of all other tensors."""
        changed = {f"{layer}.weight" for layer in self.layers()}
        return [name for name in self._names() if name not in changed]

    def difference(self, name: str) -> Tensor:
        """Return tuned - base, fp32."""
        tuned, base = self._pair(name)
        return read_tensor(tuned).float() - read_tensor(base).float()

    def base_layer(self, layer: str) -> Tensor:
        """Return the weight of a layer before tuning."""
        return read_tensor(self._pair(f"{layer}.weight")[1])

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return {layer: shape of its weight}."""
        return {
            name.removesuffix(".weight"): self._pair(name)[1].shape
            for name in self._names()
            if name.endswith(".weight") and len(self._pair(name)[1].shape) in (2, 4)
        }

    def _is_target(self, layer: str) -> bool:
        component, _, path = layer.partition(".")
        targets = (self.family.adapter_targets, self.family.conv_targets)
        patterns = (pattern for by_component in targets for pattern in by_component.get(component, ()))
        return any(re.fullmatch(pattern, path) for pattern in patterns)

    def _names(self) -> Iterator[str]:
        return (f"{component}.{name}" for component, pairs in self._entries.items() for name in pairs)

    def _pair(self, name: str) -> tuple[TensorEntry, TensorEntry]:
        component, _, inside = name.partition(".")
        return self._entries[component][inside]

    def _family(self, name: str, cache: Path) -> ModelFamily:
        """Make the family from the checkpoint that is a diffusers folder: its configs define the layers."""
        kind = families.get(name)
        denoiser = kind.components[0]
        for path in (self._base, self._tuned):
            if (path / denoiser / "config.json").is_file():
                return kind(ModelConfig(family=name, path=str(path)), ObjectiveConfig(), cache)
        raise InputError(
            f"--base {self._base}: no {denoiser}/config.json, nor has {self._tuned}; "
            "one of the two must be a diffusers folder, whose configs define the layers"
        )

    def _pairs(self, component: str) -> dict[str, tuple[TensorEntry, TensorEntry]]:
        tuned, base = (self._read(path, component) for path in (self._tuned, self._base))
        for name in {**base, **tuned}:
            theirs, ours = (_shape(entries.get(name)) for entries in (tuned, base))
            if theirs != ours:
                raise InputError(
                    f"--extract {self._tuned}: '{component}.{name}' is {theirs}, in {self._base} it is {ours}; "
                    "both must be checkpoints of the same model"
                )
        return {name: (tuned[name], base[name]) for name in base}

    def _read(self, path: Path, component: str) -> dict[str, TensorEntry]:
        """Read a component from a pipeline's folder, a folder with the denoiser alone, or a single file."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.family.build(component).state_dict().items()}
        if component != self.family.components[0]:
            stored = WeightFiles.read(safetensors_in(path / component, ENCODER_STEM)).entries
            keys = {name: entry.key for name, entry in self.family.weights(component).entries.items()}
            entries = {name: stored[key] for name, key in keys.items() if key in stored}
        else:
            folder = path / component if (path / component).is_dir() else path
            files = [path] if path.is_file() else safetensors_in(folder, DENOISER_STEM)
            entries = dict(WeightFiles.read(files).by_our_names(self.family.layout(component), shapes).entries)
        return {name: entries[name] for name in shapes if name in entries}


def _shape(entry: TensorEntry | None) -> str:
    """The shape as the message shows it, of both sides."""
    return "missing" if entry is None else " x ".join(map(str, entry.shape))


def extract(checkpoints: Checkpoints, rank: int) -> Iterator[tuple[str, Extracted]]:
    """Yield (layer, its lora) for each layer that adapters change by default and that differs. Memory: one layer."""
    for layer in checkpoints.layers():
        difference = checkpoints.difference(f"{layer}.weight")
        norm = float(difference.norm())
        if norm:
            down, up = nearest(difference.flatten(1), rank, layer)
            kept = float((up @ down).norm()) / norm
            shape = difference.shape
            kernel = [1] * (len(shape) - 2)
            tensors = {"down": down.view(-1, *shape[1:]), "up": up.view(*up.shape, *kernel)}
            yield layer, Extracted(LayerAdapter("lora", tensors), norm, kept)


def nearest(matrix: Tensor, rank: int, seed: str) -> tuple[Tensor, Tensor]:
    """Find the product of rank `rank` that is nearest to a matrix, by subspace iteration (arXiv 0909.4061, algorithm
    4.4).

    It starts from twice as many random columns as the rank and ends when a round adds less than GAIN. The distance is
    within 1e-3 of the matrix's norm of the best one; exact where the rank is at least half the smaller side.
    See DECISIONS 65.

    Args:
        matrix: (out, in), fp32.
        rank: Rank of the product.
        seed: Seed of the random columns.

    Returns:
        (down (rank, in), up (out, rank)), with about the same norm.
    """
    width = min(2 * rank + 8, *matrix.shape)
    basis = matrix @ torch.randn(matrix.shape[1], width, generator=generator("extract", seed))
    found = 0.0
    for _ in range(MAX_ROUNDS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ torch.linalg.qr(basis).Q).Q).Q
        left, sizes, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
        now = float(sizes[:rank].norm())
        if now <= found * (1 + GAIN):
            break
        found = now
    roots = sizes[:rank].sqrt()
    return roots.unsqueeze(1) * right[:rank], basis @ left[:, :rank] * roots


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns an exit code: 0 done, 2 the user's mistake."""
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except InputError as error:
        complain(error)
        return 2


def _run(options: argparse.Namespace) -> int:
    _check(options.to, options.rank, options.family)
    checkpoints = Checkpoints(options.extract, options.base, options.family, options.to.parent)
    layers: dict[str, LayerAdapter] = {}
    total = kept = 0.0
    for layer, found in extract(checkpoints, options.rank):
        say(f"{layer}: {found.kept:.1%} of the difference kept")
        layers[layer] = found.adapter
        total += found.difference**2
        kept += (found.kept * found.difference) ** 2
    if not layers:
        raise InputError(
            f"--extract {options.extract}: no layer differs from --base {options.base}; name a tuned model"
        )
    paths = _write(layers, checkpoints, options)
    others = math.sqrt(sum(float(checkpoints.difference(name).norm()) ** 2 for name in checkpoints.others()))
    say(f"{math.sqrt(kept / total):.1%} of the difference of {len(layers)} layers kept")
    if others:
        share = others / math.hypot(others, math.sqrt(total))
        say(f"left out: norms, biases and layers that adapters do not change, {share:.1%} of the whole difference")
    for path in paths:
        say(path)
    return 0


def _check(to: Path, rank: int, family: str) -> None:
    if family not in family_names():
        raise InputError(f"--family: {not_one_of(family, family_names())}")
    if rank < 1:
        raise InputError(f"--rank {rank}: is not a rank; expected a number from 1")
    if to.suffix != ".safetensors":
        raise InputError(f"--to {to}: expected a name that ends in .safetensors")
    if not to.parent.is_dir():
        raise InputError(f"--to {to}: the folder {to.parent} does not exist; create it")
    if to.exists():
        raise InputError(f"--to {to}: exists; remove it or name another file")


def _write(layers: Mapping[str, LayerAdapter], checkpoints: Checkpoints, options: argparse.Namespace) -> list[Path]:
    """Write the files, read them back, and only then give them their final names.

    Raises:
        RuntimeError: A reloaded layer differs; the message names it.
    """
    family = checkpoints.family
    files = adapter_files(layers, options.format, naming(family), checkpoints.base_layer, DTYPES[options.dtype])
    metadata = _metadata(family, options.rank, options.to.stem)
    paths = [file.path(options.to.parent, options.to.stem) for file in files]
    with TemporaryDirectory(dir=options.to.parent, prefix=f".{options.to.stem}-") as drafts:
        for file, path in zip(files, paths, strict=True):
            file.write(Path(drafts) / path.name, metadata)
            _verify(Path(drafts) / path.name, layers, checkpoints, TOLERANCE[options.dtype])
        for path in paths:
            rename(Path(drafts) / path.name, path)
    return paths


def _verify(file: Path, layers: Mapping[str, LayerAdapter], checkpoints: Checkpoints, tolerance: float) -> None:
    found = read_adapter(file, checkpoints.layer_shapes(), naming(checkpoints.family), checkpoints.base_layer)
    if found.keys() != layers.keys():
        raise RuntimeError(f"{file}: has {len(found)} layers when reloaded, {len(layers)} were written")
    for layer, adapter in layers.items():
        update = adapter.update()
        error = float((found[layer].update() - update).norm() / update.norm())
        if not error <= tolerance:
            raise RuntimeError(f"{file}: the reloaded update of '{layer}' differs by {error:.3g} of its norm")


def _metadata(family: ModelFamily, rank: int, title: str) -> dict[str, str]:
    return {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{family.model_spec}/lora",
        "modelspec.title": title,
        "modelspec.implementation": "diffusers",
        "modelspec.date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "ss_base_model_version": family.model_spec,
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(rank),
        "ss_network_alpha": str(rank),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.export.extract", description=__doc__)
    parser.add_argument("--extract", required=True, help="tuned checkpoint")
    parser.add_argument("--base", required=True, help="checkpoint it was tuned from")
    parser.add_argument("--family", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--format", choices=FORMATS, default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--to", type=Path, required=True)
    return parser


if __name__ == "__main__":
    # The launcher gives each of its processes one thread, as ranks share the cores. This process has all cores.
    torch.set_num_threads(os.cpu_count() or 1)
    sys.exit(main())
