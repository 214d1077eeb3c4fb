"""Where the tensors of a model lie on disk: safetensors files, read by header only until a slice is asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainer.system.errors import InputError
from trainer.system.files import read
from trainer.weights.forms import LayerForm, read_forms, refusal, unread
from trainer.weights.headers import PREFIXES, Header, read_header
from trainer.weights.tensors import OpenFiles, TensorEntry, without_codings

ORIGINAL_PREFIX = PREFIXES[0]
"""Prefix of the denoiser's names in original files that also hold other parts."""


@dataclass(frozen=True)
class WeightFiles:
    """{parameter or buffer name in the module: its place on disk}."""

    entries: Mapping[str, TensorEntry]

    @classmethod
    def read(cls, files: Iterable[Path], rename: Callable[[str], str | None] = lambda key: key) -> WeightFiles:
        """Index the tensors of some safetensors files.

        Args:
            rename: Key in the file -> name in the module, or None for a tensor that the module does not have.

        Raises:
            InputError: A file is missing, truncated or not a safetensors file, or stores weights in a form that is not
                read.
        """
        stored: dict[str, TensorEntry] = {}
        forms: dict[str, LayerForm] = {}
        for file in files:
            header = _read_header(file)
            stored |= {key: TensorEntry(file, key, *found) for key, found in header.tensors.items()}
            forms |= read_forms(file, header)
        for key, form in unread({key: (entry.shape, entry.dtype) for key, entry in stored.items()}, forms):
            raise InputError(refusal(stored[key].file if key in stored else file, key, form))
        named = ((rename(key), entry) for key, entry in without_codings(stored, forms).items())
        return cls({name: entry for name, entry in named if name is not None})

    def by_our_names(self, layout: Iterable[Fused], shapes: Mapping[str, tuple[int, ...]]) -> WeightFiles:
        """Give the tensors of a file in its original layout diffusers' names; files in diffusers' layout do not change.

        Args:
            shapes: Those of the model's tensors, by diffusers' names.

        Raises:
            InputError: A tensor has another shape.
        """
        renamed = {fused.name.removeprefix(ORIGINAL_PREFIX): fused for fused in layout}
        # Some original files also hold encoders; then only the denoiser's tensors have the prefix.
        prefix = next((prefix for prefix in PREFIXES if any(key.startswith(prefix) for key in self.entries)), "")
        denoiser = {key: entry for key, entry in self.entries.items() if prefix and key.startswith(prefix)}
        stored = {key.removeprefix(prefix): entry for key, entry in (denoiser or self.entries).items()}
        if not stored.keys() & (renamed.keys() - shapes.keys()):
            return WeightFiles(stored) if denoiser else self
        entries = {name: entry for name, entry in stored.items() if name not in renamed}
        for name in stored.keys() & renamed.keys():
            entries |= _parts(renamed[name], stored[name], shapes)
        return WeightFiles(entries)

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True)
class Fused:
    """One tensor of a model's original layout, made of tensors of diffusers' layout.

    Attributes:
        name: In the original file.
        parts: Names in diffusers; their rows, stacked in this order, are the tensor.
        halves_swapped: The two halves of the rows change places (scale and shift of an output norm).
        transposed: The original is a matrix that is multiplied from the other side.
        pointwise: The original stores a linear layer as a convolution of one pixel, (out, in, 1, 1).
        flattened: The original has the numbers of all rows one after another, (rows * columns,).
    """

    name: str
    parts: tuple[str, ...]
    halves_swapped: bool = False
    transposed: bool = False
    pointwise: bool = False
    flattened: bool = False

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Make the original tensor from its parts."""
        whole = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        if self.halves_swapped:
            whole = torch.cat(whole.chunk(2)[::-1])
        if self.pointwise:
            return whole[:, :, None, None]
        if self.flattened:
            return whole.flatten()
        return whole.T if self.transposed else whole

    def split(self, whole: Tensor, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """Split an original tensor into its parts. rows: number of rows of each."""
        stacked = whole.T if self.transposed else whole
        if self.pointwise:
            stacked = stacked[:, :, 0, 0]
        if self.halves_swapped:
            stacked = torch.cat(stacked.chunk(2)[::-1])
        if self.flattened:
            stacked = stacked.reshape(sum(rows), -1)
        return torch.split(stacked, list(rows))

    def shape(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of the original tensor, given those of its parts."""
        stacked = (sum(part[0] for part in parts), *parts[0][1:])
        if self.pointwise:
            return (*stacked, 1, 1)
        if self.flattened:
            return (math.prod(stacked),)
        return stacked[::-1] if self.transposed else stacked


def give_storage(module: nn.Module, device: torch.device, on_host: Iterable[nn.Parameter] = ()) -> None:
    """Give a module on the meta device uninitialized storage, parameters in `on_host` in host memory.

    A parameter that several modules share, such as an embedding and a head, stays one: `nn.Module.to_empty` would give
    each of them its own. See DECISIONS 24.
    """
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            holders.setdefault(parameter, []).append((part, name))
    host = {id(parameter) for parameter in on_host}
    # As `to_empty` does, which takes one device.
    module._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device="cpu" if id(tensor) in host else device)
    )
    for (first, first_name), *others in holders.values():
        for part, name in others:
            setattr(part, name, getattr(first, first_name))


def set_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Set buffers of a module. buffers: by their names in it."""
    for path, value in buffers.items():
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, value)


def stored_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, as a file of the module stores them.

    A tensor with several names has only its first. All are detached, as in `state_dict`.
    """
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def read_tensor(entry: TensorEntry) -> Tensor:
    """Read the whole tensor, on the CPU, in the type it is stored in."""
    return entry.whole(OpenFiles())


def _parts(fused: Fused, entry: TensorEntry, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    """The entry of each part of an original tensor."""
    needed = fused.shape([shapes[part] for part in fused.parts])
    if entry.shape != needed:
        raise InputError(
            f"{entry.file}: '{entry.key}' has shape {list(entry.shape)}, the model needs {list(needed)}; "
            "the file and the folder's config.json belong to different models"
        )
    start = needed[0] // 2 if fused.halves_swapped else 0
    parts: dict[str, TensorEntry] = {}
    for part in fused.parts:
        parts[part] = replace(
            entry, shape=shapes[part], start=start, transposed=fused.transposed, flattened=fused.flattened
        )
        start += shapes[part][0]
    return parts


def safetensors_in(folder: Path, stem: str) -> list[Path]:
    """Find the safetensors files of one component: those of `stem.safetensors.index.json`, or `stem.safetensors`.

    Raises InputError, naming the folder and the files that were looked for.
    """
    index = folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(read(index))["weight_map"].values()))
            files = [folder / name for name in names]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise InputError(f"{index}: not a safetensors index; download the folder again") from error
        outside = next((name for name in names if Path(name).name != name), None)
        if outside is not None:
            raise InputError(f"{index}: {outside!r} is not the name of a file next to it; download the folder again")
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise InputError(f"{folder}: {len(missing)} of {len(files)} weight files are missing, first {missing[0]}")
        return files
    single = folder / f"{stem}.safetensors"
    if single.is_file():
        return [single]
    raise InputError(f"{folder}: neither {stem}.safetensors nor {index.name}; expected the weights of this component")


def _read_header(file: Path) -> Header:
    """Read the header of a file whose types, shapes and offsets agree, and leave no byte over."""
    header = read_header(file)
    try:
        with safe_open(file, "pt"):
            pass
    except SafetensorError as error:
        raise InputError(f"{file}: not a sound safetensors file ({error}); convert or download it again") from error
    return header
