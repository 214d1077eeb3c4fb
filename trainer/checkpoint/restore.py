"""Resume: each rank reads its shards of the newest intact checkpoint. Nothing in its files is executed."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import (
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from trainer.checkpoint import contents
from trainer.checkpoint.contents import ATTACK, Chunk, Contents, Piece, StoredTensor
from trainer.checkpoint.save import TRAINABLE_ONLY, TrainState, tensors_of
from trainer.distributed import transfer
from trainer.distributed.world import World
from trainer.run.manifest import (
    REMEDY,
    Progress,
    damaged,
    defect,
    manifest_of,
    named,
    part,
    progress_of,
    wrong_sum,
)
from trainer.system import files
from trainer.system.errors import InputError


def newest_intact(folder: Path, world: World) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint whose files are as they were written. Collective.

    Damaged ones are renamed to `damaged-step-000100`, so that a new one can take their name.

    Returns:
        The checkpoint, or None; and a sentence about each newer one that is damaged.
    """
    problems: list[str] = []
    # The ranks that see the files divide them among each other.
    readers = [rank for rank in range(world.size) if rank not in world.remote_ranks]
    # A network file system may still show a removed folder, or not yet show a new one: the list of rank 0 counts.
    for name in world.gather([path.name for path in named(folder)[::-1]])[0]:
        checkpoint = folder / name
        mine = None
        if world.rank in readers:
            mine = defect(checkpoint) or wrong_sum(checkpoint, readers.index(world.rank), len(readers))
        found = next(filter(None, world.gather(mine)), None)
        if found is None:
            _send_to_remote_ranks(checkpoint, world)
            return checkpoint, problems
        outcome = world.gather(_put_aside(checkpoint) if world.rank == 0 else None)[0]
        problems.append(f"{checkpoint.name} is damaged and {outcome}: {found}")
    return None, problems


def _put_aside(checkpoint: Path) -> str:
    """Free its name for a new checkpoint. Returns the outcome in words."""
    numbers = itertools.count(2)
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    while aside.exists():
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}-{next(numbers)}")
    try:
        checkpoint.rename(aside)
    except OSError as error:
        return f"could not be put aside ({error.strerror})"
    return f"was put aside as {aside.name}"


def _send_to_remote_ranks(checkpoint: Path, world: World) -> None:
    """Send a checkpoint to each machine that does not see it, where it stays until `restore` read it. Collective."""
    here = sorted(checkpoint.iterdir()) if world.rank == 0 else []
    own = [path.name for path in here if path.is_file() and not path.is_symlink()]
    names = world.gather(own)[0]
    for leader in world.remote_leaders:
        for name in names:
            if world.rank == 0:
                transfer.send(checkpoint / name, leader, world.background)
            elif world.rank == leader:
                checkpoint.mkdir(parents=True, exist_ok=True)
                transfer.receive(checkpoint / name, 0, world.background)
    world.barrier()


def restore(checkpoint: Path, state: TrainState) -> Progress:
    """Load a checkpoint into the state, resharding as needed. Returns its progress. Collective.

    Nothing in the files is executed.

    Raises:
        InputError: The checkpoint holds other tensors than the run trains, the state of another optimizer, or data
            that no checkpoint holds.
    """
    tensors = tensors_of(state)
    stored = contents.read(checkpoint)
    _check_same_optimizer(checkpoint, state.optimizer)
    _check_same_tensors(checkpoint, stored, tensors)
    settings = [{k: v for k, v in group.items() if k in _CONFIGURED} for group in state.optimizer.param_groups]
    try:
        dcp.load(tensors, storage_reader=_Reader(checkpoint, stored), planner=_Planner(checkpoint))
    except CheckpointException as error:
        raise InputError(_refusal(checkpoint, error)) from error
    set_optimizer_state_dict(state.model, state.optimizer, tensors["optimizer"], options=TRAINABLE_ONLY)
    for group, values in zip(state.optimizer.param_groups, settings, strict=True):
        group.update(values)
    return progress_of(checkpoint)


class StoredWeights(Mapping[str, Tensor]):
    """The trained weights of a checkpoint for export, by name: each is read whole when it is looked up.

    One process, no collectives. Nothing is kept, so a model larger than memory can be iterated over.

    Raises:
        InputError: A file is not as it was written.
        OSError: There is no manifest.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        found = wrong_sum(checkpoint)
        if found is not None:
            raise damaged(checkpoint, found)
        tensors = contents.read(checkpoint).tensors
        self._part = "evaluation." if any(name.startswith("evaluation.") for name in tensors) else "trainables."
        self._entries = _part(tensors, self._part)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        whole = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
        for chunk in entry.chunks:
            block = whole[
                tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.shape, strict=True))
            ]
            block.copy_(_loaded_chunk(self._checkpoint, f"{self._part}{name}", entry, chunk))
        return whole

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


# The settings of an optimizer that the config decides: on resume they win over the stored ones.
_CONFIGURED = frozenset({"lr", "betas", "eps", "weight_decay"})


class _Reader(dcp.FileSystemReader):
    """Reads for torch's loader by our own table of contents; the base class reads nothing."""

    def __init__(self, checkpoint: Path, stored: Contents) -> None:
        super().__init__(checkpoint)
        self._checkpoint, self._stored = checkpoint, stored
        self._chunks = {
            (name, chunk.offsets): (entry, chunk) for name, entry in stored.tensors.items() for chunk in entry.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: TensorStorageMetadata(
                TensorProperties(getattr(torch, entry.dtype)),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in entry.chunks],
            )
            for name, entry in self._stored.tensors.items()
        }
        return Metadata(entries | {name: BytesStorageMetadata() for name in self._stored.values}, storage_data={})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        for item in plan.items:
            index = item.storage_index
            if item.type == LoadItemType.BYTE_IO:
                assert isinstance(planner, _Planner)
                planner.take(item, _loaded(self._checkpoint, index.fqn, self._stored.values[index.fqn]))
                continue
            entry, chunk = self._chunks[index.fqn, tuple(index.offset or ())]
            piece = _loaded_chunk(self._checkpoint, index.fqn, entry, chunk)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece if piece.size(dim) == length else piece.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


class _Planner(dcp.DefaultLoadPlanner):
    """Sets the optimizer's settings. torch's own planner would unpickle them and run any program that is in them."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def take(self, item: ReadItem, value: object) -> None:
        """Put a setting in its place in the state. Raises InputError for one of another kind."""
        name = item.dest_index.fqn
        present = self.state_dict[name]
        if not _may_replace(value, present):
            raise InputError(f"{self._checkpoint}: '{name}' is {value!r:.80}, not like {present!r:.80}; {REMEDY}")
        parent: Any = self.original_state_dict
        *above, last = self.mappings[name]
        for key in above:
            parent = parent[key]
        parent[last] = value


def _may_replace(value: object, present: object) -> bool:
    """Whether a stored setting is of the kind of the present one.

    A switch may be on, off or left to torch; a list must hold the same names of parameters.
    """
    if isinstance(present, list):
        return isinstance(value, list) and sorted(map(repr, value)) == sorted(map(repr, present))
    if isinstance(present, tuple):
        if not isinstance(value, tuple) or len(value) != len(present):
            return False
        return all(_may_replace(one, other) for one, other in zip(value, present, strict=True))
    return isinstance(value, str if isinstance(present, str) else (bool, int, float, type(None)))


def _loaded_chunk(checkpoint: Path, name: str, entry: StoredTensor, chunk: Chunk) -> Tensor:
    """Read a block of a tensor, on the CPU. Raises InputError where it differs from the table of contents."""
    found = _loaded(checkpoint, name, chunk.stored)
    if not isinstance(found, Tensor) or found.layout != torch.strided or found.device.type != "cpu":
        raise _wrong(checkpoint, name, chunk.stored, "is not a tensor")
    if tuple(found.shape) != chunk.shape:
        raise _wrong(checkpoint, name, chunk.stored, f"has shape {list(found.shape)}, not {list(chunk.shape)}")
    if found.dtype != getattr(torch, entry.dtype):
        is_type = str(found.dtype).removeprefix("torch.")
        raise _wrong(checkpoint, name, chunk.stored, f"is {is_type}, not {entry.dtype}")
    return found.detach()


def _loaded(checkpoint: Path, name: str, piece: Piece) -> object:
    """Read an object that `torch.save` wrote into a piece of a file.

    Raises InputError for anything but tensors, numbers and names.
    """
    with files.opened(part(checkpoint, piece.file)) as stream:
        window: Any = io.BufferedReader(_Window(stream, piece.start, piece.length))
        try:
            with zipfile.ZipFile(window) as archive:
                inside = archive.infolist()
            if any(one.compress_type for one in inside) or sum(one.file_size for one in inside) > piece.length:
                raise _wrong(checkpoint, name, piece, "is compressed")
            window.seek(0)
            return torch.load(window, map_location="cpu", weights_only=True)
        except (InputError, OSError):
            raise
        except pickle.UnpicklingError as error:
            what = f"'{name}' holds more than numbers, names and tensors"
            raise InputError(f"{checkpoint / piece.file}: {what}; {ATTACK}") from error
        except Exception as error:  # bytes from elsewhere may be wrong in any way
            raise _wrong(checkpoint, name, piece, "is not a file of torch") from error


class _Window(io.RawIOBase):
    """A range of bytes of an open file, as a file of its own."""

    def __init__(self, stream: io.BufferedReader, start: int, length: int) -> None:
        self._stream, self._start, self._length = stream, start, length
        self._at = 0

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(memoryview(buffer).cast("B")[: max(0, self._length - self._at)])
        self._at += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _wrong(checkpoint: Path, name: str, piece: Piece, what: str) -> InputError:
    return InputError(f"{checkpoint / piece.file}: '{name}' {what}; {REMEDY}")


def _refusal(checkpoint: Path, error: CheckpointException) -> str:
    """The message for an error that some rank met while it read."""
    first, _ = next(iter(error.failures.values()))
    if isinstance(first, InputError):
        return str(first)
    if isinstance(first, RuntimeError | ValueError):  # torch's words for an entry that is missing or of another size
        return f"{checkpoint}: {first}; resume with the optimizer settings of the run, or start a new run"
    raise error


def _part(tensors: Mapping[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
    """The tensors of one part of the state, by their names inside it."""
    return {name.removeprefix(prefix): entry for name, entry in tensors.items() if name.startswith(prefix)}


def _check_same_tensors(checkpoint: Path, stored: Contents, tensors: dict[str, Any]) -> None:
    for kind in ("trainables", "evaluation"):
        sizes = {name: entry.shape for name, entry in _part(stored.tensors, f"{kind}.").items()}
        wanted = {name: tuple(tensor.shape) for name, tensor in tensors[kind].items()}
        if sizes != wanted:
            name = next(n for n in sorted(sizes.keys() | wanted.keys()) if sizes.get(n) != wanted.get(n))
            raise InputError(
                f"{checkpoint}: holds {len(sizes)} {kind} tensors, the config needs {len(wanted)}; first difference "
                f"'{name}' ({sizes.get(name)} stored, {wanted.get(name)} needed); "
                "resume with the adapter and optimizer settings of the run, or start a new run"
            )


def _check_same_optimizer(checkpoint: Path, optimizer: Optimizer) -> None:
    stored, wanted = manifest_of(checkpoint)["optimizer"], type(optimizer).__name__
    if stored != wanted:
        raise InputError(
            f"{checkpoint}: holds the state of {stored}, the config's optimizer is {wanted}; "
            "resume with the optim.type of the run, or start a new run"
        )
