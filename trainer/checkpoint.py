"""Checkpoints: every rank writes its shards in the background; the folder gets its name only when it is complete.

`checkpoints/.step-000100/` is being written. When all ranks are done, rank 0 writes `manifest.json` into it and renames
it to `step-000100`. A folder without the dot is therefore complete, whatever moment the run was killed at, and one that
is removed loses its name first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from trainer.config import InputError
from trainer.world import World

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d{6,}")
TRAINABLE_ONLY = StateDictOptions(ignore_frozen_params=True)


@dataclass(frozen=True)
class TrainState:
    """What a run needs to go on as if it had never stopped.

    trainables: sharded parameters by name.  evaluation: the weights to sample and export with, where they are not
    the trainables themselves (moving average, schedule-free).  The data position and all random numbers follow from
    the step.
    """

    model: nn.Module
    trainables: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    evaluation: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Pending:
    step: int
    optimizer: str
    folder: Path
    future: Future[Any]


class Checkpointer:
    """Saves the checkpoints of one run, and removes what a run that was killed left half written.

    `save` and `wait` are collective.
    """

    def __init__(self, folder: Path, world: World, keep: int) -> None:
        self._folder = folder
        self._world = world
        self._keep = keep
        self._pending: _Pending | None = None
        if world.rank == 0:
            for left in folder.glob(".step-*"):
                shutil.rmtree(left, ignore_errors=True)

    def save(self, step: int, state: TrainState) -> None:
        """Begin to write the state after `step` steps; training may go on at once. The one before was waited for."""
        assert self._pending is None
        target = self._folder / f".step-{step:06d}"
        future = dcp.async_save(
            _tensors(state),
            checkpoint_id=target,
            process_group=self._world.background,
            async_stager=_SnapshotStager(),
        )
        assert isinstance(future, Future)
        self._pending = _Pending(step, type(state.optimizer).__name__, target, future)

    def wait(self) -> Path | None:
        """Wait for the checkpoint being written and give it its name. Returns it, None if there was none.

        Raises OSError on every rank, naming the folder, when a rank could not write (disk full).
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        final = pending.folder.with_name(pending.folder.name[1:])
        failures = self._world.gather(_failure(pending.future))
        if not any(failures):
            # The manifest may not fit on the disk either: rank 0 alone would know.
            failures = self._world.gather(self._name(pending, final))
        if any(failures):
            if self._world.rank == 0:
                shutil.rmtree(pending.folder, ignore_errors=True)
            self._world.barrier()  # now there is room for what the ranks write about the failure
            raise OSError(
                f"{pending.folder}: checkpoint of step {pending.step} could not be written "
                f"({next(filter(None, failures))}); free disk space; the checkpoints before it are untouched"
            )
        return final

    @property
    def done(self) -> bool:
        """Whether this rank's part of the checkpoint being written is on disk; True if none is being written."""
        return self._pending is None or self._pending.future.done()

    @property
    def writing(self) -> bool:
        """Whether a checkpoint was begun that has not been waited for."""
        return self._pending is not None

    def _name(self, written: _Pending, final: Path) -> str | None:
        """On rank 0: give what all ranks have written its name, and remove what is too old. Returns what failed."""
        if self._world.rank:
            return None
        try:
            _complete(written, final, self._world.size)
            for old in complete(self._folder)[: -self._keep]:
                _remove(old)
        except OSError as error:
            return _described(error)
        return None


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints` folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    # By number: step-1000000 comes before step-999999 in the alphabet.
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def restore(checkpoint: Path, state: TrainState) -> int:
    """Load a checkpoint into the state, resharding as needed. Returns the number of steps it holds. Collective.

    Raises InputError when the checkpoint holds other tensors than the run trains, or another optimizer's state.
    """
    tensors = _tensors(state)
    _check_same_optimizer(checkpoint, state.optimizer)
    _check_same_tensors(checkpoint, tensors)
    settings = [{k: v for k, v in group.items() if k in _CONFIGURED} for group in state.optimizer.param_groups]
    dcp.load(tensors, checkpoint_id=checkpoint)
    set_optimizer_state_dict(state.model, state.optimizer, tensors["optimizer"], options=TRAINABLE_ONLY)
    for group, values in zip(state.optimizer.param_groups, settings, strict=True):
        group.update(values)
    return steps_in(checkpoint)


def steps_in(checkpoint: Path) -> int:
    """Optimizer steps that a checkpoint holds."""
    return int(_manifest(checkpoint)["step"])


def newest_step(folder: Path) -> int:
    """Optimizer steps of the newest complete checkpoint in a run's `checkpoints` folder, 0 without one."""
    found = complete(folder)
    return steps_in(found[-1]) if found else 0


class StoredWeights(Mapping[str, Tensor]):
    """The trained weights of a checkpoint that are to be exported, by name: each read whole when it is asked for.

    One process, no collectives; nothing is kept, so that a model larger than memory can be walked through.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._reader = _Reader(checkpoint)
        stored = _stored_tensors(self._reader)
        self._part = "evaluation" if stored["evaluation"] else "trainables"
        self._entries = stored[self._part]

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({self._part: {name: tensor}}, storage_reader=self._reader, no_dist=True)
        return tensor

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
    """Reads a checkpoint's table of contents once: 50 ms for 300 tensors, and torch asks for it at each of them."""

    @cached_property
    def _contents(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._contents


def _stored_tensors(reader: _Reader) -> dict[str, dict[str, TensorStorageMetadata]]:
    """{"trainables" | "evaluation": {name: size and type}}."""
    stored = reader.read_metadata().state_dict_metadata
    return {
        part: {
            name.removeprefix(f"{part}."): entry
            for name, entry in stored.items()
            if name.startswith(f"{part}.") and isinstance(entry, TensorStorageMetadata)
        }
        for part in ("trainables", "evaluation")
    }


def _check_same_tensors(checkpoint: Path, tensors: dict[str, Any]) -> None:
    for part, entries in _stored_tensors(_Reader(checkpoint)).items():
        sizes = {name: tuple(entry.size) for name, entry in entries.items()}
        wanted = {name: tuple(tensor.shape) for name, tensor in tensors[part].items()}
        if sizes != wanted:
            name = next(n for n in sorted(sizes.keys() | wanted.keys()) if sizes.get(n) != wanted.get(n))
            raise InputError(
                f"{checkpoint}: holds {len(sizes)} {part} tensors, the config needs {len(wanted)}; first difference "
                f"'{name}' ({sizes.get(name)} stored, {wanted.get(name)} needed); "
                "resume with the adapter and optimizer settings of the run, or start a new run"
            )


def _check_same_optimizer(checkpoint: Path, optimizer: Optimizer) -> None:
    stored, wanted = _manifest(checkpoint)["optimizer"], type(optimizer).__name__
    if stored != wanted:
        raise InputError(
            f"{checkpoint}: holds the state of {stored}, the config's optimizer is {wanted}; "
            "resume with the optim.type of the run, or start a new run"
        )


def _manifest(checkpoint: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    return facts


class _SnapshotStager(BlockingAsyncStager):
    """Copies the state to the host before training changes it.

    torch's own stager clones each shard, which 8-bit optimizer states (a tensor subclass of torchao) do not support.
    """

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        copy: dict[str, Any] = tree_map_only(Tensor, _snapshot, state_dict)
        return copy


def _snapshot(tensor: Tensor) -> Tensor:
    """A copy on the host: of a plain tensor, of a DTensor's shard, of the tensors inside another wrapper."""
    if isinstance(tensor, DTensor):
        # from_local would move the shard back to the mesh's device.
        shard: Tensor = DTensor(_snapshot(tensor.to_local()), tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return shard
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.detach().to("cpu", copy=True)
    names, context = tensor.__tensor_flatten__()
    inner = {name: _snapshot(getattr(tensor, name)) for name in names}
    copy: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return copy


def _failure(future: Future[Any]) -> str | None:
    error = future.exception()
    if error is None:
        return None
    if isinstance(error, CheckpointException) and error.failures:
        error, _ = next(iter(error.failures.values()))
    return _described(error)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _complete(written: _Pending, final: Path, world_size: int) -> None:
    folder = written.folder
    if (final / MANIFEST).is_file():
        # Saved at this step before: the state is the same, and replacing it would leave a moment without any.
        shutil.rmtree(folder)
        return
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    for name in files:
        _flush(folder / name)
    manifest = folder / MANIFEST
    facts = {"step": written.step, "optimizer": written.optimizer, "world_size": world_size, "files": files}
    manifest.write_text(json.dumps(facts, indent=1), "utf-8")
    _flush(manifest)
    _flush(folder)
    folder.rename(final)
    _flush(final.parent)


def _remove(checkpoint: Path) -> None:
    """Without its name first: killed half way, the rest must not pass for a complete checkpoint.

    What cannot go because an export still reads it on a network file system goes when the run starts again.
    """
    shutil.rmtree(checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}")), ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
