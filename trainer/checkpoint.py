"""Checkpoints: every rank writes its shards in the background; the folder gets its name only when it is complete.

`checkpoints/.step-000100/` is being written. When the files of all ranks are on the disk, rank 0 writes `manifest.json`
with their sizes and checksums into it and renames it to `step-000100`. A folder without the dot is therefore complete,
whatever moment the run was killed at, and one that is removed loses its name first. The state is copied to host memory
during the forward and backward pass of the next step, which only read it; training waits for what is left of the copy
before it changes the state.
"""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import logging
import math
import os
import pickle
import re
import shutil
import time
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from trainer import contents, ferry
from trainer.config import files
from trainer.config.errors import InputError
from trainer.contents import ATTACK, CONTENTS, Chunk, Contents, Piece, StoredTensor
from trainer.run.manifest import (
    MANIFEST,
    REMEDY,
    Progress,
    complete,
    defect,
    manifest_of,
    name_of,
    named,
    part,
    progress_of,
)
from trainer.snapshot import Snapshots
from trainer.world import World

log = logging.getLogger(__name__)
TRAINABLE_ONLY = StateDictOptions(ignore_frozen_params=True)


@dataclass(frozen=True)
class TrainState:
    """What a run needs to go on as if it had never stopped.

    trainables: sharded parameters by name.  evaluation: the weights to sample and export with, where they are not
    the trainables themselves (moving average, schedule-free).  The data position and all random numbers follow from
    the steps and their batch sizes.
    """

    model: nn.Module
    trainables: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    evaluation: Mapping[str, Tensor]


class Checkpointer:
    """Saves the checkpoints of one run, and removes what a run that was killed left half written.

    keep: how many of the newest stay.  keep_best: how many stay besides, of those with the lowest validation loss.
    `save` and `wait` are called by all ranks.
    """

    def __init__(self, folder: Path, world: World, keep: int, keep_best: int = 0) -> None:
        self._folder = folder
        self._world = world
        self._keep, self._keep_best = keep, keep_best
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None
        self._copied: Future[dict[str, Any]] | None = None
        self._snapshots = Snapshots()
        if world.rank == 0 or world.rank in world.guest_leaders:
            for left in folder.glob(".step-*"):
                shutil.rmtree(left, ignore_errors=True)

    def save(self, progress: Progress, state: TrainState) -> None:
        """Begin to write the state; `wait_for_copy` before it changes. The checkpoint before was waited for."""
        assert self._pending is None
        draft = self._folder / f".{name_of(progress.step)}"
        self._copied = self._snapshots.take(_tensors(state))
        facts = {**asdict(progress), "optimizer": type(state.optimizer).__name__, "world_size": self._world.size}
        self._pending = self._thread.submit(self._write, draft, facts, self._copied)

    def wait_for_copy(self) -> None:
        """Wait until the state may change: what was to be saved of it is copied."""
        if self._copied is None:
            return
        began = time.perf_counter()
        copied, self._copied = self._copied, None
        copied.result()
        log.debug("waited %.3f s for the copy of the state", time.perf_counter() - began)

    def wait(self) -> Path | None:
        """Wait for the checkpoint being written and return it, None if there was none.

        Raises OSError on every rank, naming the folder, when a rank could not write (disk full).
        """
        self.wait_for_copy()
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    @property
    def done(self) -> bool:
        """Whether the checkpoint being written has its name, or failed; True if none is being written."""
        return self._pending is None or self._pending.done()

    @property
    def writing(self) -> bool:
        """Whether a checkpoint was begun that has not been waited for."""
        return self._pending is not None

    def _write(self, draft: Path, facts: dict[str, Any], copied: Future[dict[str, Any]]) -> Path:
        """On a thread of every rank: when all have written, rank 0 gives the checkpoint its name."""
        tensors = copied.result()  # no room for the copy ends the rank; the others wait within the writing
        files = _SumsFileSystem()
        writer = dcp.FileSystemWriter(draft)
        writer.fs = files
        failure, table = None, None
        try:
            table = dcp.save(tensors, storage_writer=writer, process_group=self._world.background)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - the other ranks wait to hear of it
            failure = _described(error)
        outcomes = self._gather((failure, files.sums))
        failures = [failure for failure, _ in outcomes if failure]
        if self._world.guests and not failures:
            brought = self._bring(draft, [part for _, part in outcomes])
            failures = [failure for failure in self._gather(brought) if failure]
        if not failures:
            facts["checksums"] = {name: digest for _, part in outcomes for name, digest in part.items()}
            # The manifest may not fit on the disk either: rank 0 alone would know.
            failures = [failure for failure in self._gather(self._name_draft(draft, facts, table)) if failure]
        if failures:
            if self._world.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            self._gather(None)  # now there is room for what the ranks write about the failure
            raise OSError(
                f"{draft}: checkpoint of step {facts['step']} could not be written "
                f"({failures[0]}); {_remedy(failures[0])}; the checkpoints before it are untouched"
            )
        log.debug("checkpoint of step %d: complete", facts["step"])
        return draft.with_name(name_of(facts["step"]))

    def _bring(self, draft: Path, sums: list[dict[str, str]]) -> str | None:
        """Have rank 0 write what others wrote on machines that do not see its folder. Returns what failed."""
        failure, group = None, self._world.background
        for rank in self._world.guests:
            for name in sorted(sums[rank]):
                try:
                    if self._world.rank == rank:
                        ferry.send(draft / name, 0, group)
                    elif self._world.rank == 0:
                        ferry.receive(draft / name, rank, group)
                except OSError as error:
                    failure = _described(error)
        if self._world.rank in self._world.guests:
            for name in sums[self._world.rank]:  # and not the folder: another rank of this machine may still send
                (draft / name).unlink(missing_ok=True)
            with suppress(OSError):
                draft.rmdir()
        return failure

    def _gather(self, value: Any) -> list[Any]:
        """`value` of every rank, beside what the ranks tell each other about the step they train."""
        if self._world.size == 1:
            return [value]
        values: list[Any] = [None] * self._world.size
        dist.all_gather_object(values, value, group=self._world.background)
        return values

    def _name_draft(self, draft: Path, facts: dict[str, Any], table: Any) -> str | None:
        """On rank 0: give what all ranks have written its name, and remove what is too old. Returns what failed.

        table: torch's table of contents.
        """
        if self._world.rank:
            return None
        try:
            _finish(draft, facts, table)
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
            return _described(error)
        try:
            for old in _too_old(complete(self._folder), self._keep, self._keep_best):
                _remove(old)
        except OSError as error:  # the new one is there all the same, and the next one tries again
            log.warning("an old checkpoint could not be removed: %s", error)
        return None


def newest_intact(folder: Path, world: World) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose files are what was written, and what is wrong with newer ones. Collective.

    The damaged ones are put aside as `damaged-step-000100`, so that a new one can take their place. None without one.
    """
    problems: list[str] = []
    # A network file system may show a node what is already gone, or not yet what is there: rank 0's list counts.
    for name in world.gather([path.name for path in named(folder)[::-1]])[0]:
        checkpoint = folder / name
        defects = world.gather(None if world.rank in world.guests else _damage(checkpoint, world))
        found = next(filter(None, defects), None)
        if found is None:
            _hand_out(checkpoint, world)
            return checkpoint, problems
        where = world.gather(_put_aside(checkpoint) if world.rank == 0 else None)[0]
        problems.append(f"{checkpoint.name} is damaged and {where}: {found}")
    return None, problems


def _put_aside(checkpoint: Path) -> str:
    """Give its name free for a new one. Returns what became of it."""
    numbers = itertools.count(2)
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    while aside.exists():
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}-{next(numbers)}")
    try:
        checkpoint.rename(aside)
    except OSError as error:
        return f"could not be put aside ({error.strerror})"
    return f"was put aside as {aside.name}"


def _damage(checkpoint: Path, world: World) -> str | None:
    """What this rank finds wrong: the ranks that see the files share their reading."""
    readers = [rank for rank in range(world.size) if rank not in world.guests]
    return defect(checkpoint) or _wrong_sum(checkpoint, readers.index(world.rank), len(readers))


def _hand_out(checkpoint: Path, world: World) -> None:
    """Send a checkpoint to each machine that does not see it, where it lies until `restore` has read it. Collective."""
    here = sorted(checkpoint.iterdir()) if world.rank == 0 else []
    own = [path.name for path in here if path.is_file() and not path.is_symlink()]
    names = world.gather(own)[0]
    for leader in world.guest_leaders:
        for name in names:
            if world.rank == 0:
                ferry.send(checkpoint / name, leader, world.background)
            elif world.rank == leader:
                checkpoint.mkdir(parents=True, exist_ok=True)
                ferry.receive(checkpoint / name, 0, world.background)
    world.barrier()


def restore(checkpoint: Path, state: TrainState) -> Progress:
    """Load a checkpoint into the state, resharding as needed. Returns how far it is. Collective.

    Nothing in the files is executed. Raises InputError when the checkpoint holds other tensors than the run trains,
    another optimizer's state, or what is not a checkpoint's.
    """
    tensors = _tensors(state)
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
    """The trained weights of a checkpoint that are to be exported, by name: each read whole when it is asked for.

    One process, no collectives; nothing is kept, so that a model larger than memory can be walked through.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
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


# Of an optimizer's group, what the config decides: a changed setting must win over the stored one on resume.
_CONFIGURED = frozenset({"lr", "betas", "eps", "weight_decay"})


def _tensors(state: TrainState) -> dict[str, Any]:
    return {
        "trainables": {name: parameter.detach() for name, parameter in state.trainables.items()},
        "evaluation": dict(state.evaluation),
        "optimizer": get_optimizer_state_dict(state.model, state.optimizer, options=TRAINABLE_ONLY),
    }


class _Reader(dcp.FileSystemReader):
    """Gives torch's loader what our table of contents names. Of the base class, only what has no part in reading."""

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
    """torch's own would unpickle settings of the optimizer with whatever program is in them."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def take(self, item: ReadItem, value: object) -> None:
        """Put a setting where the state has it. Raises InputError for one of another kind."""
        name = item.dest_index.fqn
        present = self.state_dict[name]
        if not _may_replace(value, present):
            raise InputError(f"{self._checkpoint}: '{name}' is {value!r:.80}, not like {present!r:.80}; {REMEDY}")
        place: Any = self.original_state_dict
        *above, last = self.mappings[name]
        for key in above:
            place = place[key]
        place[last] = value


def _may_replace(value: object, present: object) -> bool:
    """Whether a stored setting is of the kind of the present one. A switch may be on, off or left to torch; names are
    those of the parameters."""
    if isinstance(present, list):
        return isinstance(value, list) and sorted(map(repr, value)) == sorted(map(repr, present))
    if isinstance(present, tuple):
        if not isinstance(value, tuple) or len(value) != len(present):
            return False
        return all(_may_replace(one, other) for one, other in zip(value, present, strict=True))
    return isinstance(value, str if isinstance(present, str) else (bool, int, float, type(None)))


def _loaded_chunk(checkpoint: Path, name: str, entry: StoredTensor, chunk: Chunk) -> Tensor:
    """A block of a tensor, on the CPU. Raises InputError where it is not what the table of contents says."""
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
    """What `torch.save` wrote as a piece of a file. Raises InputError for anything but tensors, numbers and names."""
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
        except Exception as error:  # the bytes of a stranger may be wrong in any way
            raise _wrong(checkpoint, name, piece, "is not a file of torch") from error


class _Window(io.RawIOBase):
    """Some bytes of an open file, as a file of their own."""

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
    """What the ranks could not read."""
    first, _ = next(iter(error.failures.values()))
    if isinstance(first, InputError):
        return str(first)
    if isinstance(first, RuntimeError | ValueError):  # torch's words for an entry that is missing or of another size
        return f"{checkpoint}: {first}; resume with the optimizer settings of the run, or start a new run"
    raise error


def _part(tensors: Mapping[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
    """Those of a part of the state, by their names in it."""
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


def _checksum(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)


class _SumsFileSystem(FileSystem):
    """Files whose checksums are known when they are written. sums: {file name: digest}."""

    def __init__(self) -> None:
        self.sums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            summed = _SummedStream(stream)
            yield summed
        self.sums[Path(path).name.removesuffix(".tmp")] = summed.digest()  # torch writes its table under such a name


class _SummedStream(io.BufferedIOBase):
    """Writes to a file and sums up what it writes, in its order."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream: Any = stream
        self._sum = _checksum()

    def write(self, data: Any) -> int:
        self._sum.update(data)
        written: int = self._stream.write(data)
        return written

    def tell(self) -> int:
        position: int = self._stream.tell()
        return position

    def fileno(self) -> int:
        """For fsync, which torch calls without flushing the end of the file."""
        self._stream.flush()
        descriptor: int = self._stream.fileno()
        return descriptor

    def writable(self) -> bool:
        return True

    def digest(self) -> str:
        return self._sum.hexdigest()


def _remedy(failure: str) -> str:
    found = re.search(r"\[Errno (\d+)\]", failure)
    remedies = {errno.ENOSPC: "free disk space", errno.EDQUOT: "free disk space", errno.EFBIG: "free disk space"}
    remedies |= {errno.EROFS: "make the folder writable", errno.EACCES: "make the folder writable"}
    return remedies.get(int(found[1]) if found else 0, "see to that")


def _described(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error, _ = next(iter(error.failures.values()))
    return f"{type(error).__name__}: {error}"


def _finish(draft: Path, facts: dict[str, Any], table: Metadata) -> None:
    final = draft.with_name(name_of(facts["step"]))
    if (final / MANIFEST).is_file():
        # Saved at this step before: the state is the same, and replacing it would leave a moment without any.
        shutil.rmtree(draft)
        return
    ours = contents.write(contents.from_torch(table))
    files.replace(draft / CONTENTS, ours)
    facts["checksums"][CONTENTS] = _checksum(ours).hexdigest()
    facts["files"] = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
    if not math.isfinite(facts["validation_loss"]):
        facts["validation_loss"] = None
    facts["config_hash"] = hashlib.sha256(json.dumps(facts["config"], sort_keys=True).encode()).hexdigest()
    files.replace(draft / MANIFEST, json.dumps(facts, indent=1))
    files.rename(draft, final)


def _too_old(checkpoints: list[Path], keep: int, keep_best: int) -> list[Path]:
    """Those to remove, oldest first: neither among the newest nor among those of lowest validation loss."""
    losses = {checkpoint: progress_of(checkpoint).validation_loss for checkpoint in checkpoints}
    measured = [checkpoint for checkpoint in checkpoints if math.isfinite(losses[checkpoint])]
    best = sorted(measured, key=losses.__getitem__)[:keep_best]
    return [checkpoint for checkpoint in checkpoints[:-keep] if checkpoint not in best]


def _wrong_sum(checkpoint: Path, rank: int, num_ranks: int) -> str | None:
    """A file of this rank's part of a checkpoint that is not what was written, however long it is."""
    sums = sorted(manifest_of(checkpoint)["checksums"].items())
    for name, digest in sums[rank::num_ranks]:
        try:
            with files.opened(part(checkpoint, name)) as stream:
                if hashlib.file_digest(stream, _checksum).hexdigest() != digest:
                    return f"{name} is not what was written: its checksum differs"
        except InputError as error:
            return str(error)
        except OSError as error:
            return _described(error)
    return None


def _remove(checkpoint: Path) -> None:
    """Without its name first: killed half way, the rest must not pass for a complete checkpoint.

    What cannot go because an export still reads it on a network file system goes when the run starts again.
    """
    shutil.rmtree(checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}")), ignore_errors=True)
