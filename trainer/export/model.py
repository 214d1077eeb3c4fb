"""Writes a whole model: diffusers' folder of shards, or the single file in the model's original layout."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from trainer.adapters.formats import writer
from trainer.adapters.state import Factors
from trainer.config.schema import RunConfig
from trainer.config.sections import SINGLE_FILES
from trainer.export.drafts import Exported, draft
from trainer.export.metadata import model_metadata
from trainer.export.stream import FileSpec, TensorSpec, num_bytes, write_stream
from trainer.models.base import ModelFamily
from trainer.models.parts.folder import copy_files
from trainer.models.state_dict import BaseWeights, TrainedModel
from trainer.weights.composed import value_of
from trainer.weights.files import Fused, WeightFiles, read_tensor, stored_tensors
from trainer.weights.tensors import TensorEntry

DTYPES = writer.DTYPES | {"fp8": torch.float8_e4m3fn}
# One rounding to the file's type, relative to the tensor's norm.
TOLERANCE = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-6, "fp8": 5e-2}
# Numbers near zero are rounded to a multiple of the type's smallest number, whatever their size.
SMALLEST_STEP = {name: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for name, dtype in DTYPES.items()}
MAX_SHARD_BYTES = 5 * 10**9
PIECE = 1 << 20  # numbers compared at a time
ENCODER_STEM = "model"


def export_model(
    cfg: RunConfig,
    folder: Path,
    family: ModelFamily,
    weights: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    initial: Factors | None = None,
) -> Exported:
    """Write base + adapter, or all weights of a full fine-tune, and compare the files with `reference`.

    Memory: the few copies of one tensor that merging takes.

    Args:
        cfg: The run's config.
        folder: Folder to write to.
        family: The run's family.
        weights: {parameter: trained value} to write.
        reference: {parameter: trained value} to compare with.
        initial: As for `TrainedAdapter`.

    Returns:
        A folder that diffusers loads (with one folder per component where several are trained), or a single file.
    """
    base = BaseWeights(family)
    model, expected = (TrainedModel(cfg, base, of, initial) for of in (weights, reference))
    name = f"{cfg.name}-{cfg.export_what}"
    if cfg.export.format in SINGLE_FILES:
        tensors = _original_tensors(family)
        ending = "-fp8" if cfg.export.dtype == "fp8" else ""
        # A draft gets its name when this block ends: a file that differs from the trained weights never has it.
        with draft(folder / f"{name}{ending}.safetensors") as file:
            _write_single_file(file, cfg, family, model, base, tensors)
            difference = _verify_single_file(file, cfg, expected, tensors)
        return Exported(folder / f"{name}{ending}.safetensors", difference)
    with draft(folder / name) as path:
        difference = _write_folder(path, cfg, family, model, base, expected)
    return Exported(folder / name, difference)


def _original_tensors(family: ModelFamily) -> list[tuple[str, Fused]]:
    """Return (component, tensor) of the family's original single file."""
    parts = family.single_file or family.components[:1]
    return [(component, fused) for component in parts for fused in family.layout(component)]


def _write_folder(
    path: Path, cfg: RunConfig, family: ModelFamily, model: TrainedModel, base: BaseWeights, expected: TrainedModel
) -> float:
    """Write the folder. Returns the largest relative difference of a reloaded tensor."""
    differences = []
    trained = [component for component in family.live if family.modes(cfg, component) != {"frozen"}]
    for component in trained:
        folder = path if len(trained) == 1 else path / component
        folder.mkdir(parents=True)
        source = family.component_folder(component)
        dtype = DTYPES[cfg.export.dtype]
        if (source / "config.json").is_file():  # a family may read folders without one
            _write_config(family, component, folder / "config.json", dtype)
        copy_files(source, family.companion_files, folder)
        family.write_tokenizer(folder)
        stem = family.weights_stem if component == family.components[0] else ENCODER_STEM
        if family.keeps_layout:
            file, tensors = folder / f"{stem}.safetensors", _original_tensors(family)
            _write_single_file(file, cfg, family, model, base, tensors)
            differences.append(_verify_single_file(file, cfg, expected, tensors))
            continue
        written = family.written(component)
        if written:
            specs = {name: (dtype, tuple(made.shape)) for name, made in written.items()}
            _write_shards(folder, stem, specs, _converted(written, partial(model.tensor, component)))
        else:
            specs = {name: (dtype, shape) for name, shape in base.shapes(component).items()}
            _write_shards(folder, stem, specs, partial(model.tensor, component))
        differences.append(_verify_component(folder, component, cfg, family, expected))
    for name, config in family.changed_configs.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return max(differences)


def _write_config(family: ModelFamily, component: str, file: Path, dtype: torch.dtype) -> None:
    """Write the component's config with the number type of the export in place of that of the base's files."""
    source = family.component_folder(component) / "config.json"
    config = json.loads(source.read_text("utf-8"))
    exported = family.exported_config(component, config)
    written = {key: value for key, value in exported.items() if key != "quantization_config"}
    written |= {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if written.get(key)}
    if written == config:
        shutil.copyfile(source, file)
    else:
        file.write_text(json.dumps(written, indent=2) + "\n", "utf-8")


def _converted(written: Mapping[str, Tensor], tensor: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Return the function that makes each tensor of the files of the model's, which it reads by `tensor`."""
    latest = lru_cache(maxsize=1)(tensor)  # the experts of a layer are parts of one tensor

    return lambda name: value_of(written[name], latest)


def _write_shards(folder: Path, stem: str, specs: FileSpec, tensor: Callable[[str], Tensor]) -> None:
    """Write files of at most MAX_SHARD_BYTES, with an index for several. tensor: returns one by its name."""
    shards = _shards(specs)
    if len(shards) == 1:
        names = [f"{stem}.safetensors"]
    else:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        _write_index(folder / f"{stem}.safetensors.index.json", dict(zip(names, shards, strict=True)))
    for name, shard in zip(names, shards, strict=True):
        write_stream(folder / name, shard, map(tensor, shard), {"format": "pt"})


def _shards(specs: FileSpec) -> list[dict[str, TensorSpec]]:
    shards: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + num_bytes(spec) > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += num_bytes(spec)
    return shards


def _write_index(file: Path, shards: Mapping[str, FileSpec]) -> None:
    """Write diffusers' index. shards: {file: its tensors}."""
    total = sum(num_bytes(spec) for shard in shards.values() for spec in shard.values())
    weight_map = {tensor: name for name, shard in shards.items() for tensor in shard}
    file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1), "utf-8")


def _verify_component(
    folder: Path, component: str, cfg: RunConfig, family: ModelFamily, expected: TrainedModel
) -> float:
    """Compare the folder's tensors with the model of its config.json, and each with the trained tensor: as stored, and
    as users' programs load them.

    Tensor by tensor: a model that fills several GPUs may not fit into this host's memory.
    """
    wanted = stored_tensors(family.build(component))
    written = family.read_export(component, sorted(folder.glob("*.safetensors"))).entries
    for name, tensor in wanted.items():
        found = written[name].shape if name in written else None
        if found != tuple(tensor.shape):
            raise RuntimeError(f"{folder}: '{name}' is {found}, but the model of its config.json has {tensor.shape}")
    stored = ((name, read_tensor(entry)) for name, entry in written.items())
    return max(
        compare(folder, name, tensor, expected.tensor(component, name), cfg.export.dtype)
        for name, tensor in chain(stored, family.loaded_by_users(component, folder).items())
    )


def _write_single_file(
    file: Path,
    cfg: RunConfig,
    family: ModelFamily,
    model: TrainedModel,
    base: BaseWeights,
    tensors: list[tuple[str, Fused]],
) -> None:
    specs = {fused.name: _spec(fused, base.shapes(component), cfg.export.dtype) for component, fused in tensors}
    made = (fused.join([model.tensor(component, part) for part in fused.parts]) for component, fused in tensors)
    markers = dict.fromkeys(family.file_markers, torch.empty(0))
    specs |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in markers.items()}
    write_stream(file, specs, chain(made, markers.values()), model_metadata(cfg, family))


def _spec(fused: Fused, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> TensorSpec:
    """Return type and shape of a tensor in the file. fp8 is for the layers' weights only: other tensors are small, and
    their rounding would be visible in the images."""
    shape = fused.shape([shapes[part] for part in fused.parts])
    is_layer = len(shape) in (2, 4) and fused.parts[0].endswith(".weight")
    kept = torch.bfloat16 if dtype == "fp8" and not is_layer else DTYPES[dtype]
    return kept, shape


def _verify_single_file(file: Path, cfg: RunConfig, expected: TrainedModel, tensors: list[tuple[str, Fused]]) -> float:
    """Split the stored tensors by the layout and compare each part with the trained tensor."""
    written: Mapping[str, TensorEntry] = WeightFiles.read([file]).entries
    differences = []
    for component, fused in tensors:
        parts = [expected.tensor(component, part) for part in fused.parts]
        stored = fused.split(read_tensor(written[fused.name]), [part.shape[0] for part in parts])
        for name, found, trained in zip(fused.parts, stored, parts, strict=True):
            differences.append(compare(file, name, found, trained, cfg.export.dtype))
    return max(differences)


def compare(file: Path, name: str, found: Tensor, trained: Tensor, dtype: str) -> float:
    """Return the distance relative to the trained tensor's norm. Raises RuntimeError beyond the tolerance."""
    size, error = _size_and_distance(trained, found)
    if not error <= TOLERANCE[dtype] * size + SMALLEST_STEP[dtype] * trained.numel() ** 0.5:
        raise RuntimeError(f"{file}: '{name}' differs from the trained tensor by {error:.3g}, whose norm is {size:.3g}")
    return error / size if size else error


def _size_and_distance(trained: Tensor, found: Tensor) -> tuple[float, float]:
    """Return the norms of the trained tensor and of the difference, in fp32: piece by piece, as both are large."""
    sizes, errors = [0.0], [0.0]
    pieces = (torch.split(tensor.flatten(), PIECE) for tensor in (trained, found))
    for one, other in zip(*pieces, strict=True):
        sizes.append(float(one.float().norm()))
        errors.append(float((other.float() - one.float()).norm()))
    return math.hypot(*sizes), math.hypot(*errors)
