"""A whole model as files: diffusers' folder of shards, or the single file in the model's original layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.config import SINGLE_FILES, InputError, RunConfig
from trainer.export.drafts import draft
from trainer.export.metadata import model_metadata
from trainer.export.stream import write_stream
from trainer.families.base import ModelFamily
from trainer.trained import BaseWeights, TrainedModel
from trainer.weights import Fused, TensorEntry, WeightFiles, read_tensor

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
# One rounding to the file's type, relative to the tensor's norm.
TOLERANCE = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-6, "fp8": 5e-2}
# Numbers near zero are rounded to a multiple of the type's smallest number, whatever their size.
SMALLEST_STEP = {name: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for name, dtype in DTYPES.items()}
MAX_SHARD_BYTES = 5 * 10**9
DENOISER_STEM = "diffusion_pytorch_model"
ENCODER_STEM = "model"


def export_model(
    cfg: RunConfig, folder: Path, family: ModelFamily, weights: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> Path:
    """Write base + adapter, or all weights of a full fine-tune, and compare what was written with `reference`.

    Returns a folder that diffusers loads (with one folder per component where several are trained), or a single file.
    Memory: one shard and one tensor.
    """
    base = BaseWeights(family)
    model, expected = (TrainedModel(cfg, base, of) for of in (weights, reference))
    name = f"{cfg.name}-{cfg.export_what}"
    if cfg.export.format in SINGLE_FILES:
        tensors = original_tensors(family)
        ending = "-fp8" if cfg.export.dtype == "fp8" else ""
        with draft(folder / f"{name}{ending}.safetensors") as file:
            _write_single_file(file, cfg, family, model, base, tensors)
            _verify_single_file(file, cfg, expected, tensors)
        return folder / f"{name}{ending}.safetensors"
    with draft(folder / name) as path:
        _write_folder(path, cfg, family, model, base, expected)
    return folder / name


def original_tensors(family: ModelFamily) -> list[tuple[str, Fused]]:
    """(component, tensor) of the family's original single file. Raises InputError where there is no such layout."""
    parts = family.single_file or family.components[:1]
    found = [(component, fused) for component in parts for fused in family.layout(component)]
    if not found:
        raise InputError(
            f"export.format: this kind of model ({family.model_spec}) has no single-file layout; use diffusers"
        )
    return found


def _write_folder(
    path: Path, cfg: RunConfig, family: ModelFamily, model: TrainedModel, base: BaseWeights, expected: TrainedModel
) -> None:
    trained = [component for component in family.live if cfg.mode(component) != "frozen"]
    for component in trained:
        place = path if len(trained) == 1 else path / component
        place.mkdir(parents=True)
        shutil.copyfile(family.folder / component / "config.json", place / "config.json")
        stem = DENOISER_STEM if component == family.components[0] else ENCODER_STEM
        tensors = ((name, model.tensor(component, name)) for name in base.names(component))
        _write_shards(place, stem, tensors, DTYPES[cfg.export.dtype])
        _verify_component(place, component, cfg, family, expected)


def _write_shards(folder: Path, stem: str, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """Shards of at most MAX_SHARD_BYTES with an index; one tensor more than a shard is held at a time."""
    shard: dict[str, Tensor] = {}
    files: list[tuple[Path, list[str]]] = []
    size = total = 0
    for name, tensor in tensors:
        tensor = tensor.to(dtype).contiguous()
        if size + tensor.nbytes > MAX_SHARD_BYTES and shard:
            files.append(_write_shard(folder, len(files), shard))
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    files.append(_write_shard(folder, len(files), shard))
    _name_shards(folder, stem, files, total)


def _write_shard(folder: Path, number: int, tensors: dict[str, Tensor]) -> tuple[Path, list[str]]:
    path = folder / f"part-{number}.safetensors"
    save_file(tensors, path, {"format": "pt"})
    return path, list(tensors)


def _name_shards(folder: Path, stem: str, files: list[tuple[Path, list[str]]], total: int) -> None:
    """diffusers' names, which hold the number of shards."""
    if len(files) == 1:
        files[0][0].rename(folder / f"{stem}.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(files, 1):
        name = f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _verify_component(
    folder: Path, component: str, cfg: RunConfig, family: ModelFamily, expected: TrainedModel
) -> None:
    """Compare the folder's tensors with the model its config.json describes, and each with the trained one.

    Tensor by tensor: a model that fills several GPUs need not fit into this host's memory.
    """
    wanted = family.build(component).state_dict()
    written = WeightFiles.read(sorted(folder.glob("*.safetensors"))).entries
    for name, tensor in wanted.items():
        found = written[name].shape if name in written else None
        if found != tuple(tensor.shape):
            raise RuntimeError(f"{folder}: '{name}' is {found}, but the model of its config.json has {tensor.shape}")
    for name, entry in written.items():
        _compare(folder, name, read_tensor(entry), expected.tensor(component, name), cfg.export.dtype)


def _write_single_file(
    file: Path,
    cfg: RunConfig,
    family: ModelFamily,
    model: TrainedModel,
    base: BaseWeights,
    tensors: list[tuple[str, Fused]],
) -> None:
    plan = {fused.name: _planned(fused, base.shapes(component), cfg.export.dtype) for component, fused in tensors}
    made = (fused.join([model.tensor(component, part) for part in fused.parts]) for component, fused in tensors)
    write_stream(file, plan, made, model_metadata(cfg, family))


def _planned(fused: Fused, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Type and shape of a tensor in the file. fp8 is for the layers' weights: the rest is small, and would show."""
    shape = fused.shape([shapes[part] for part in fused.parts])
    kept = torch.bfloat16 if dtype == "fp8" and len(shape) not in (2, 4) else DTYPES[dtype]
    return kept, shape


def _verify_single_file(file: Path, cfg: RunConfig, expected: TrainedModel, tensors: list[tuple[str, Fused]]) -> None:
    """Take the stored tensors apart again, by the layout, and compare each part with the trained tensor."""
    written: Mapping[str, TensorEntry] = WeightFiles.read([file]).entries
    for component, fused in tensors:
        parts = [expected.tensor(component, part) for part in fused.parts]
        stored = fused.split(read_tensor(written[fused.name]), [part.shape[0] for part in parts])
        for name, found, trained in zip(fused.parts, stored, parts, strict=True):
            _compare(file, name, found, trained, cfg.export.dtype)


def _compare(file: Path, name: str, found: Tensor, trained: Tensor, dtype: str) -> None:
    size = float(trained.float().norm())
    error = float((found.float() - trained.float()).norm())
    if not error <= TOLERANCE[dtype] * size + SMALLEST_STEP[dtype] * trained.numel() ** 0.5:
        raise RuntimeError(f"{file}: '{name}' differs from the trained tensor by {error:.3g}, whose norm is {size:.3g}")
