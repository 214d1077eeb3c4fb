"""The manifest of a checkpoint, read without torch."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from trainer.run.folder import RunDir
from trainer.system import files
from trainer.system.errors import InputError

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of a checkpoint: raise it when this version writes what version 0.1.0 misreads."""
REMEDY = "remove this checkpoint, so that the one before it is taken"
SUM_THREADS = 4
"""Files whose checksums are compared at once: one core sums 1 GB/s, which disks exceed."""
Wanted = int | Literal["newest", "best"]
"""Which checkpoint of a run: that of a step, the newest, or the one of lowest validation loss."""
_NAME = re.compile(r"step-[0-9]{6,15}")
_OWN_SUM = re.compile(rb'"checksum": "([^"]*)"')
_NO_SUM = b"0" * 32
_CHANGED = "has changed since it was written: its checksum differs"


@dataclass(frozen=True)
class Progress:
    """Progress of a run at a checkpoint, from its manifest.

    Attributes:
        step: Optimizer steps.
        samples_seen: Samples, over all parts of the run.
        skipped: Steps that were skipped because a loss or gradient was not finite.
        validation_loss: Validation loss of these weights; NaN if not measured.
        config: The run's config when the checkpoint was saved.
        data: Digest of the data.
        place: Position in a stream of text, where it does not follow from the steps (see `data.text.text_stream`).
        batch_sizes: (batch size, optimizer steps) of the parts of the run in order, which give the position in the
            data.
        lr: Learning rate of the last step; NaN before the first.
    """

    step: int
    samples_seen: int = 0
    skipped: int = 0
    validation_loss: float = math.nan
    config: Mapping[str, Any] = field(default_factory=dict)
    data: str = ""
    place: Mapping[str, int] = field(default_factory=dict)
    batch_sizes: tuple[tuple[int, int], ...] = ()
    lr: float = math.nan


class _Manifest(BaseModel, extra="allow"):
    """The fields that every manifest must have; the others are those of `Progress`.

    `checksum` is that of the manifest itself, with zeros in its own place.
    """

    step: Annotated[int, Field(strict=True)]
    files: dict[str, int]
    checksums: dict[str, str] = {}
    optimizer: str = ""
    checksum: str


_MANIFEST, _PROGRESS = TypeAdapter(_Manifest), TypeAdapter(Progress)


def name_of(step: int) -> str:
    """Return the folder name of a complete checkpoint."""
    return f"step-{step:06d}"


def is_name(name: str) -> bool:
    """Whether a name is that of a complete checkpoint."""
    return _NAME.fullmatch(name) is not None


def step_of(checkpoint: Path) -> int:
    """Return the optimizer steps of a checkpoint by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def named(folder: Path) -> list[Path]:
    """Return all paths that are named like a complete checkpoint, oldest first."""
    paths = [path for path in folder.glob("step-*") if is_name(path.name)]
    # By number: alphabetically, step-1000000 would come before step-999999.
    return sorted(paths, key=step_of)


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a run's `checkpoints` folder that this version reads, oldest first."""
    return [path for path in named(folder) if problem(path) is None]


def newest(folder: Path) -> Path | None:
    """Return the checkpoint that a run continues from: the newest complete one, or None.

    Raises FormatError: another version wrote a newer one.
    """
    return next((path for path in reversed(named(folder)) if defect(path) is None), None)


def validation_losses(folder: Path) -> dict[Path, float]:
    """Return {complete checkpoint: its validation loss, NaN if not measured} of a folder, oldest first."""
    return {path: progress_of(path).validation_loss for path in complete(folder)}


def by_loss(losses: Mapping[Path, float]) -> list[Path]:
    """Return the checkpoints whose validation loss was measured, the lowest first, the oldest of equals."""
    return sorted((path for path in losses if math.isfinite(losses[path])), key=losses.__getitem__)


def to_export(run: RunDir, wanted: Wanted = "newest") -> Path:
    """Return a checkpoint of a run; of a run with stages, one of its current stage.

    Raises:
        InputError: The checkpoint is missing or damaged.
    """
    saved = named(run.checkpoints)
    if not saved:
        raise InputError(f"{run.path}: has no complete checkpoint to export; resume the run first")
    if wanted == "best":
        measured = by_loss(validation_losses(run.checkpoints))
        if not measured:
            raise InputError(
                f"{run.path}: no checkpoint has a validation loss, which takes held-out data "
                f"(data.validation_split); name {_steps(saved)}"
            )
        chosen = measured[0]
    elif wanted == "newest":
        chosen = saved[-1]
    else:
        chosen = run.checkpoints / name_of(wanted)
        if chosen not in saved:
            raise InputError(f"{run.path}: has no checkpoint of step {wanted}; name {_steps(saved)}")
    found = defect(chosen)
    if found is not None:
        raise damaged(chosen, found)
    return chosen


def _steps(saved: Sequence[Path]) -> str:
    steps = [step_of(path) for path in saved]
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"one of the steps {', '.join(map(str, steps[:-1]))} and {steps[-1]}"


def damaged(checkpoint: Path, found: str) -> InputError:
    """Return the error for a checkpoint of which `defect` or `wrong_sum` found something."""
    return InputError(f"{checkpoint}: {found.removesuffix(f'; {REMEDY}')}; {REMEDY}")


def defect(checkpoint: Path) -> str | None:
    """Return why a checkpoint is not complete, from its manifest and the sizes of its files; None if it is complete.

    Raises FormatError: another version wrote it. It is not damaged.
    """
    try:
        facts = manifest_of(checkpoint)
        if progress_of(checkpoint).step != facts["step"] or name_of(facts["step"]) != checkpoint.name:
            return f"its manifest is of step {facts['step']}"
        for name, size in facts["files"].items():
            actual = part(checkpoint, name).stat().st_size
            if actual != size:
                return f"{name} has {actual} bytes, {size} were written"
    except files.FormatError:
        raise
    except InputError as error:
        return str(error).removeprefix(f"{checkpoint}/")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def problem(checkpoint: Path) -> str | None:
    """Return why this version cannot read a checkpoint: as `defect`, or because another version wrote it."""
    try:
        return defect(checkpoint)
    except files.FormatError as error:
        return str(error).removeprefix(f"{checkpoint}/")


def checksum(data: bytes = b"") -> hashlib.blake2b:
    """A running checksum, of the kind that the manifest holds for each file."""
    return hashlib.blake2b(data, digest_size=16)


def sealed(facts: Mapping[str, Any]) -> bytes:
    """Return the content of a manifest: its format, fields, and a checksum of all its bytes as its last field."""
    content = json.dumps({"format": FORMAT, **facts, "checksum": _NO_SUM.decode()}, indent=1).encode()
    start, _, end = content.rpartition(_NO_SUM)
    return start + checksum(content).hexdigest().encode() + end


def wrong_sum(checkpoint: Path, share: int = 0, num_shares: int = 1) -> str | None:
    """Compare the checksums of a share of a checkpoint's files, for example one rank's.

    Returns what is wrong, or None. Raises as `manifest_of`.
    """
    sums = sorted(manifest_of(checkpoint)["checksums"].items())
    with ThreadPoolExecutor(SUM_THREADS) as pool:
        found = pool.map(lambda one: _wrong_sum(checkpoint, *one), sums[share::num_shares])
        return next(filter(None, found), None)


def _wrong_sum(checkpoint: Path, name: str, expected: str) -> str | None:
    try:
        with files.opened(part(checkpoint, name)) as stream:
            is_right = hashlib.file_digest(stream, checksum).hexdigest() == expected
    except InputError as error:
        return str(error)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None if is_right else f"{name} {_CHANGED}"


def part(checkpoint: Path, name: str) -> Path:
    """Return a file of a checkpoint. Raises InputError if it is outside the folder or not a regular file."""
    file = checkpoint / name
    is_name = name == Path(name).name and name not in ("", ".", "..")
    if not (is_name and file.is_file() and file.resolve().parent == checkpoint.resolve()):
        raise InputError(f"{name!r} is not a file in this folder")
    return file


def progress_of(checkpoint: Path) -> Progress:
    """Read the progress from a checkpoint's manifest. Raises as `manifest_of`."""
    stored = manifest_of(checkpoint)
    values = {one.name: stored[one.name] for one in fields(Progress) if stored.get(one.name) is not None}
    try:
        return _PROGRESS.validate_python(values)
    except ValidationError as error:
        raise InputError(f"{checkpoint / MANIFEST}: damaged ({files.first_problem(error)}); {REMEDY}") from error


def steps_in(checkpoint: Path) -> int:
    """Return the optimizer steps of a checkpoint."""
    return progress_of(checkpoint).step


def newest_step(folder: Path) -> int:
    """Return the optimizer steps of the newest complete checkpoint in a `checkpoints` folder, or 0 if there is none."""
    checkpoints = complete(folder)
    return steps_in(checkpoints[-1]) if checkpoints else 0


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest.

    Raises:
        OSError: It is missing.
        InputError: It is damaged; FormatError, another version wrote it.
    """
    file = checkpoint / MANIFEST
    content = files.read(file)
    found = files.parsed(file, content, _MANIFEST, REMEDY, FORMAT).model_dump()
    own = [None, *_OWN_SUM.finditer(content)][-1]
    start, end = own.span(1) if own else (0, 0)
    if not own or checksum(content[:start] + _NO_SUM + content[end:]).hexdigest().encode() != own[1]:
        raise InputError(f"{file} {_CHANGED}; {REMEDY}")
    return found
