"""Every rank reads its own rows of the safetensors files: no rank ever holds the whole model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.config import InputError
from trainer.weights import TensorEntry, WeightFiles


def load_weights(model: nn.Module, files: WeightFiles, skip: Iterable[str] = ()) -> int:
    """Fill parameters and persistent buffers from disk, cast to their types. Returns the bytes read on this rank.

    skip: names that are not in the files, as an adapter's. Names inside the model may carry `.base_layer`.
    Raises InputError for a tensor that is missing or has another shape, naming file, tensor and both shapes.
    """
    skipped = set(skip)
    wanted = {name.replace(".base_layer.", "."): t for name, t in model.state_dict().items() if name not in skipped}
    check_weights({name: tuple(tensor.shape) for name, tensor in wanted.items()}, files)
    total = 0
    with torch.no_grad():
        for file, names in _by_file(files, wanted).items():
            try:
                with safe_open(file, "pt") as stream:
                    for name in names:
                        entry = files.entries[name]
                        total += _copy_rows(wanted[name], entry, stream.get_slice(entry.key))
            except (SafetensorError, OSError) as error:
                raise InputError(f"{file}: cannot be read ({error}); download it again") from error
    return total


def check_weights(wanted: dict[str, tuple[int, ...]], files: WeightFiles) -> None:
    """Raises InputError unless every wanted tensor is in the files with its shape."""
    missing = sorted(wanted.keys() - files.entries.keys())
    if missing:
        where = next(iter(files.entries.values())).file.parent if len(files) else "the weight files"
        raise InputError(
            f"{where}: {len(missing)} of {len(wanted)} tensors are missing, first '{missing[0]}'; "
            "the weights belong to another model, or the download is incomplete: download the folder again"
        )
    for name, shape in wanted.items():
        entry = files.entries[name]
        if entry.shape != shape:
            raise InputError(
                f"{entry.file}: '{entry.key}' has shape {list(entry.shape)}, the model needs {list(shape)}; "
                "the weights and the config.json beside them belong to different models: download the folder again"
            )


def fill_rows(target: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of a full tensor into a parameter, sharded or not."""
    for rows, local in _own_rows(target):
        local.copy_(full[rows] if target.dim() else full)


def _by_file(files: WeightFiles, wanted: Iterable[str]) -> dict[Path, list[str]]:
    grouped: dict[Path, list[str]] = defaultdict(list)
    for name in wanted:
        entry: TensorEntry = files.entries[name]
        grouped[entry.file].append(name)
    return grouped


def _copy_rows(target: Tensor, entry: TensorEntry, stored: Any) -> int:
    total = 0
    for rows, local in _own_rows(target):
        source = entry.rows(stored, rows.start, rows.stop) if target.dim() else stored[()]
        local.copy_(source)
        total += source.numel() * source.element_size()
    return total


def _own_rows(target: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of dim 0 that this rank holds, with the local tensor; nothing for an empty shard."""
    if not isinstance(target, DTensor):
        yield slice(0, len(target) if target.dim() else 1), target
        return
    local = target.to_local()
    if local.numel() == 0:
        return
    _, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    yield slice(offset[0], offset[0] + local.shape[0]), local
