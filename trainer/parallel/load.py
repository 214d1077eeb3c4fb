"""Every rank reads its own rows of the safetensors files: no rank ever holds the unsharded model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.distributed.threads import worker_threads
from trainer.distributed.world import World
from trainer.system.errors import InputError
from trainer.weights.files import WeightFiles, stored_tensors
from trainer.weights.tensors import OpenFiles, TensorEntry

PIECE = 1 << 18
"""Numbers that are read and encoded at a time: their fp32 copies stay in a core's cache."""


@dataclass(frozen=True)
class Coded:
    """A parameter of bytes that are made from a stored weight, row by row.

    Attributes:
        stored: Name of the stored weight.
        shape: Shape of the stored weight.
        format: Name of the encoding; it changes when equal weights give other bytes.
        encode: (some rows, the scale they are stored with if they are 8-bit floats) -> rows of the parameter. Raises
            ValueError for numbers that cannot be encoded.
    """

    stored: str
    shape: tuple[int, ...]
    format: str
    encode: Callable[[Tensor, float | None], Tensor]


@dataclass(frozen=True)
class Loading:
    """How weights are read.

    Attributes:
        device: Where they are encoded.
        threads: How many read at a time.
        on_progress: Called again and again with (bytes read, bytes to read) of this rank.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    threads: int = 1
    on_progress: Callable[[int, int], None] = lambda done, total: None


def load_weights(
    model: nn.Module,
    files: WeightFiles,
    skip: Iterable[str] = (),
    coded: Mapping[str, Coded] | None = None,
    loading: Loading | None = None,
) -> int:
    """Fill parameters and persistent buffers from disk, cast to their types.

    Args:
        skip: Names that are not in the files, such as an adapter's. Names in the model may contain `.base_layer`.
        coded: Parameters that are made from stored weights, by name.

    Returns:
        The bytes read on this rank.

    Raises:
        InputError: A tensor is missing or has another shape; names file, tensor and both shapes.
    """
    loading = loading or Loading()
    parts = [part for source in _sources(model, files, skip, coded).values() for part in source.parts()]
    opened = OpenFiles()
    done, total = 0, sum(part.num_bytes for part in parts)
    # Reading and encoding release the GIL. A failure cancels what is still queued.
    with worker_threads(loading.threads, "load", loading.device) as pool:
        for part, _ in zip(parts, pool.map(lambda part: part.load(opened, loading.device), parts), strict=True):
            done += part.num_bytes
            loading.on_progress(done, total)
    return done


def check_same_weights(
    model: nn.Module, files: WeightFiles, skip: Iterable[str], coded: Mapping[str, Coded] | None, world: World
) -> None:
    """Compare some rows of every tensor of each rank with the files that the next rank sees. Collective.

    These are the first, middle and last row of each rank. Where machines hold different files, torch would shard and
    train a mixture of both models. A single rank compares with its own files, as `coded` may come from the cache. The
    arguments are those of `load_weights`.

    Raises:
        InputError: Rows differ; raised on every rank.
    """
    sources, opened = _sources(model, files, skip, coded), OpenFiles()
    held = {name: {row: tensor_digest(at) for row, at in _samples(source.tensor)} for name, source in sources.items()}
    other = (world.rank + 1) % world.size
    wrong = None
    for name, rows in world.gather(held)[other].items():
        source = sources[name]
        own = torch.empty(1, *source.tensor.shape[1:], dtype=source.tensor.dtype)
        for row, expected in rows.items():
            part = _Part(source.entry, row, row + 1, own, source.coded)
            if _is_stack(source.tensor):
                part = replace(part, into=own[:, :1], inside=(0, 1))
            part.load(opened, own.device)
            if wrong is None and tensor_digest(part.into) != expected:
                wrong = (
                    f"row {row} of '{name}' on rank {other} is not what rank {world.rank} finds in {source.entry.file}"
                )
    # Found above, raised here: a rank that left the loop early would keep the others waiting in this gather.
    found = next(filter(None, world.gather(wrong)), None)
    if found:
        raise InputError(f"{found}; give every machine the same files, and remove the folder of quantize.cache")


def _samples(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (number in the unsharded tensor, row) for some of this rank's rows. A scalar counts as a row.

    Of a matrix in a stack it is the first row.
    """
    for rows, local in own_rows(tensor):
        if tensor.dim() == 0:
            yield 0, local
            continue
        for row in sorted({0, len(local) // 2, len(local) - 1}):
            found = local[row : row + 1]
            yield rows.start + row, found[:, :1] if _is_stack(tensor) else found


def tensor_digest(tensor: Tensor) -> bytes:
    """A digest of the tensor's bytes."""
    raw = tensor.detach().cpu().flatten().view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class _Part:
    """Some rows of a tensor that this rank holds.

    Attributes:
        begin, end: Rows of the unsharded tensor.
        into: Where they go.
        inside: Begin and end of the rows in a matrix, where the part is of one matrix of a stack.
    """

    entry: TensorEntry
    begin: int
    end: int
    into: Tensor
    coded: Coded | None
    inside: tuple[int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are read from the file."""
        begin, end = self.inside or (0, 1)
        share = (end - begin) / self.entry.shape[1] if self.inside else 1
        return int(self.entry.stored_bytes(self.end - self.begin) * share)

    def load(self, files: OpenFiles, device: torch.device) -> None:
        """Read the rows. Raises InputError for a file that cannot be read, or numbers that cannot be encoded."""
        entry = self.entry
        try:
            with torch.no_grad():
                rows = self._read(files)
                self.into.copy_(self.coded.encode(rows.to(device), entry.scale(files)) if self.coded else rows)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{entry.file}: cannot be read ({error}); download it again") from error
        except ValueError as error:
            raise InputError(f"{entry.file}: '{entry.key}' {error}; download it again") from error

    def _read(self, files: OpenFiles) -> Tensor:
        if self.inside:
            return self.entry.rows_of_matrix(files, self.begin, *self.inside)
        return self.entry.rows(files, self.begin, self.end) if self.entry.shape else self.entry.whole(files)


def _is_stack(tensor: Tensor) -> bool:
    """Whether a tensor is a stack of large matrices, as experts are, each of which is read some rows at a time."""
    return tensor.dim() == 3 and math.prod(tensor.shape[1:]) > PIECE


@dataclass(frozen=True)
class _Source:
    """A tensor of the model and its entry in the files."""

    tensor: Tensor
    entry: TensorEntry
    coded: Coded | None

    def parts(self) -> Iterator[_Part]:
        """Split this rank's rows into pieces of about PIECE numbers."""
        if _is_stack(self.tensor):
            yield from self._parts_of_stack()
            return
        step = max(1, PIECE // max(1, math.prod(self.entry.shape[1:])))
        for rows, local in own_rows(self.tensor):
            for begin in range(rows.start, rows.stop, step):
                end = min(begin + step, rows.stop)
                into = local[begin - rows.start : end - rows.start] if self.tensor.dim() else local
                yield _Part(self.entry, begin, end, into, self.coded)

    def _parts_of_stack(self) -> Iterator[_Part]:
        num_rows, step = self.entry.shape[1], max(1, PIECE // max(1, self.entry.shape[2]))
        for matrices, local in own_rows(self.tensor):
            for index in range(matrices.start, matrices.stop):
                for begin in range(0, num_rows, step):
                    end = min(begin + step, num_rows)
                    into = local[index - matrices.start, begin:end].unsqueeze(0)
                    yield _Part(self.entry, index, index + 1, into, self.coded, (begin, end))


def _sources(
    model: nn.Module, files: WeightFiles, skip: Iterable[str], coded: Mapping[str, Coded] | None
) -> dict[str, _Source]:
    """{name without an adapter's `.base_layer`: source}. Raises InputError as `load_weights` does."""
    skipped, coded = set(skip), coded or {}
    held = stored_tensors(model)
    wanted = {name.replace(".base_layer.", "."): tensor for name, tensor in held.items() if name not in skipped}
    stored = {name: coded[name].stored if name in coded else name for name in wanted}
    shapes = {stored[n]: coded[n].shape if n in coded else tuple(tensor.shape) for n, tensor in wanted.items()}
    check_weights(shapes, files)
    return {name: _Source(tensor, files.entries[stored[name]], coded.get(name)) for name, tensor in wanted.items()}


def check_weights(wanted: dict[str, tuple[int, ...]], files: WeightFiles) -> None:
    """Raise InputError unless every wanted tensor is in the files with its shape."""
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
                "the weights and the config.json next to them belong to different models: download the folder again"
            )


def fill_rows(target: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of a full tensor into a parameter, sharded or not."""
    for rows, local in own_rows(target):
        local.copy_(full[rows] if target.dim() else full)


def own_rows(target: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of dim 0 that this rank holds, with the local tensor; nothing for an empty shard."""
    if not isinstance(target, DTensor):
        yield slice(0, len(target) if target.dim() else 1), target
        return
    local = target.to_local()
    if local.numel() == 0:
        return
    _, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    yield slice(offset[0], offset[0] + local.shape[0]), local
