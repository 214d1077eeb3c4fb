"""Checkpoints: every rank writes its shards in the background; the folder gets its name only when it is complete.

`checkpoints/.step-000100/` is being written. When the files of all ranks are on the disk, rank 0 writes `manifest.json`
with their sizes and checksums into it and renames it to `step-000100`. A folder without the dot is therefore complete,
whatever moment the run was killed at, and one that is removed loses its name first. The state is copied to host memory
during the forward and backward pass of the next step, which only read it; training waits for what is left of the copy
before it changes the state. See DECISIONS 99.
"""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    Metadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from trainer.checkpoint import contents
from trainer.checkpoint.contents import CONTENTS
from trainer.checkpoint.staging import Stager
from trainer.distributed import transfer
from trainer.distributed.threads import worker_threads
from trainer.distributed.world import World
from trainer.run.manifest import (
    MANIFEST,
    Progress,
    by_loss,
    checksum,
    name_of,
    sealed,
    validation_losses,
)
from trainer.system import files

log = logging.getLogger(__name__)
TRAINABLE_ONLY = StateDictOptions(ignore_frozen_params=True)


@dataclass(frozen=True)
class TrainState:
    """Everything that a run needs to continue as if it had never stopped.

    The position in the data and all random numbers follow from the steps and their batch sizes.

    Attributes:
        trainables: Sharded parameters by name.
        evaluation: Weights to sample and export with, where they are not the trainables themselves (moving average,
            schedule-free).
    """

    model: nn.Module
    trainables: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    evaluation: Mapping[str, Tensor]


class Checkpointer:
    """Saves the checkpoints of one run, and removes those that a killed run left half written.

    `save` and `wait` are collective.

    Args:
        keep: Number of the newest checkpoints that stay.
        keep_best: Number that also stay, of those with the lowest validation loss.
    """

    def __init__(self, folder: Path, world: World, keep: int, keep_best: int = 0) -> None:
        self._folder = folder
        self._world = world
        self._keep, self._keep_best = keep, keep_best
        self._thread = worker_threads(1, "checkpoint", world.device)
        self._pending: Future[Path] | None = None
        self._copied: Future[dict[str, Any]] | None = None
        self._stager = Stager(world.device)
        if world.rank == 0 or world.rank in world.remote_leaders:
            for left in folder.glob(".step-*"):
                shutil.rmtree(left, ignore_errors=True)

    def save(self, progress: Progress, state: TrainState) -> None:
        """Begin to write the state. Call `wait` before, for the previous one, and `wait_for_copy` before it changes."""
        assert self._pending is None
        draft = self._folder / f".{name_of(progress.step)}"
        self._copied = self._stager.take(tensors_of(state))
        facts = {**asdict(progress), "optimizer": type(state.optimizer).__name__, "world_size": self._world.size}
        self._pending = self._thread.submit(self._write, draft, facts, self._copied)

    def wait_for_copy(self) -> None:
        """Wait until the state is copied and may change."""
        if self._copied is None:
            return
        began = time.perf_counter()
        copied, self._copied = self._copied, None
        copied.result()
        log.debug("waited %.3f s for the copy of the state", time.perf_counter() - began)

    def wait(self) -> Path | None:
        """Wait for the checkpoint that is being written and return it, or None if there was none.

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
        """Write this rank's part, on a thread; when all ranks have written, rank 0 gives the checkpoint its name."""
        tensors = copied.result()  # without room for the copy this rank ends, and the others wait while they write
        files = _SumsFileSystem()
        writer = _Writer(draft)
        writer.fs = files
        failure, table = None, None
        try:
            table = dcp.save(tensors, storage_writer=writer, process_group=self._world.background)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - the other ranks wait for the outcome
            failure = described(_cause(error, draft))
        outcomes = self._gather((failure, files.sums))
        failures = [failure for failure, _ in outcomes if failure]
        if self._world.remote_ranks and not failures:
            failed = self._collect_from_remote_ranks(draft, [part for _, part in outcomes])
            failures = [failure for failure in self._gather(failed) if failure]
        if not failures:
            facts["checksums"] = {name: digest for _, part in outcomes for name, digest in part.items()}
            # The manifest may not fit on the disk either: rank 0 alone would know.
            failures = [failure for failure in self._gather(self._name_draft(draft, facts, table)) if failure]
        if failures:
            if self._world.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            self._gather(None)  # the draft is gone: there is room for the events about the failure
            raise OSError(
                f"{draft}: checkpoint of step {facts['step']} could not be written "
                f"({failures[0]}); {_remedy(failures[0])}; the checkpoints before it are untouched"
            )
        log.debug("checkpoint of step %d: complete", facts["step"])
        return draft.with_name(name_of(facts["step"]))

    def _collect_from_remote_ranks(self, draft: Path, sums: list[dict[str, str]]) -> str | None:
        """Have rank 0 write the files of ranks that do not see its folder. Returns the failure, if there was one."""
        failure, group = None, self._world.background
        for rank in self._world.remote_ranks:
            for name in sorted(sums[rank]):
                try:
                    if self._world.rank == rank:
                        transfer.send(draft / name, 0, group)
                    elif self._world.rank == 0:
                        transfer.receive(draft / name, rank, group)
                except OSError as error:
                    failure = described(error)
        if self._world.rank in self._world.remote_ranks:
            for name in sums[self._world.rank]:  # not the whole folder: another rank of this machine may still send
                (draft / name).unlink(missing_ok=True)
            with suppress(OSError):
                draft.rmdir()
        return failure

    def _gather(self, value: Any) -> list[Any]:
        """Gather `value` of every rank, in a group apart from that of the step that is being trained."""
        if self._world.size == 1:
            return [value]
        values: list[Any] = [None] * self._world.size
        dist.all_gather_object(values, value, group=self._world.background)
        return values

    def _name_draft(self, draft: Path, facts: dict[str, Any], table: Any) -> str | None:
        """Give the complete checkpoint its name and remove old ones, on rank 0. Returns the failure, if there was one.

        Args:
            table: torch's table of contents.
        """
        if self._world.rank:
            return None
        try:
            _finish(draft, facts, table)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
            return described(error)
        try:
            # Kept are the newest and those of lowest validation loss.
            losses = validation_losses(self._folder)
            best = by_loss(losses)[: self._keep_best]
            for old in [checkpoint for checkpoint in list(losses)[: -self._keep] if checkpoint not in best]:
                # Its name goes first: if the run is killed half way, the rest must not pass for a complete one.
                shutil.rmtree(old.rename(old.with_name(f".{old.name}")), ignore_errors=True)
        except OSError as error:  # the new one exists all the same, and the next one tries again
            log.warning("an old checkpoint could not be removed: %s", error)
        return None


def tensors_of(state: TrainState) -> dict[str, Any]:
    """The tensors of a checkpoint, by torch's names."""
    return {
        "trainables": {name: parameter.detach() for name, parameter in state.trainables.items()},
        "evaluation": dict(state.evaluation),
        "optimizer": get_optimizer_state_dict(state.model, state.optimizer, options=TRAINABLE_ONLY),
    }


class _Writer(dcp.FileSystemWriter):
    """Notes where everything lies in the table that `dcp.save` returns, as torch does since 2.13."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {one.index: one.storage_data for part in results for one in part}
        super().finish(metadata, results)


class _SumsFileSystem(FileSystem):
    """Files whose checksums are computed while they are written. sums: {file name: digest}."""

    def __init__(self) -> None:
        self.sums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            summed = _SummedStream(stream)
            yield summed
        self.sums[Path(path).name.removesuffix(".tmp")] = summed.digest()  # torch writes its table under such a name


class _SummedStream(io.BufferedIOBase):
    """Writes to a file and updates a checksum with everything it writes, in order."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream: Any = stream
        self._sum = checksum()

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
    """What to do, by the number in the text of an error: that of another rank arrives as text."""
    found = re.search(r"\[Errno (\d+)\]", failure)
    remedies = {errno.ENOSPC: "free disk space", errno.EDQUOT: "free disk space", errno.EFBIG: "raise ulimit -f"}
    remedies |= {errno.EROFS: "make the folder writable", errno.EACCES: "make the folder writable"}
    return remedies.get(int(found[1]) if found else 0, "fix its cause")


def _cause(error: BaseException, draft: Path) -> BaseException:
    """The error of the disk behind one that names none: torch's writer counts bytes that were not written."""
    found = _unwrapped(error)
    return found if isinstance(found, OSError) else files.write_problem(draft.parent) or found


def described(error: BaseException) -> str:
    """An error of any rank in one line."""
    found = _unwrapped(error)
    return f"{type(found).__name__}: {found}"


def _unwrapped(error: BaseException) -> BaseException:
    """The first error of a rank, which torch wraps in a CheckpointException."""
    if isinstance(error, CheckpointException) and error.failures:
        error, _ = next(iter(error.failures.values()))
    return error


def _finish(draft: Path, facts: dict[str, Any], table: Metadata) -> None:
    final = draft.with_name(name_of(facts["step"]))
    if (final / MANIFEST).is_file():
        # Saved at this step before: the state is the same, and replacing it would leave a moment without a checkpoint.
        shutil.rmtree(draft)
        return
    ours = contents.write(contents.from_torch(table))
    files.replace(draft / CONTENTS, ours)
    facts["checksums"][CONTENTS] = checksum(ours).hexdigest()
    facts["files"] = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
    if not math.isfinite(facts["validation_loss"]):
        facts["validation_loss"] = None
    files.replace(draft / MANIFEST, sealed(facts))
    files.rename(draft, final)
