"""Exported files and checkpoints of a run: which are complete, how they were verified, what may be deleted.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from app.runs.monitor import RunView
from trainer.config.schema import RunConfig, export_formats
from trainer.config.sections import ExportConfig
from trainer.run import manifest, process
from trainer.run.events import ExportEvent
from trainer.run.folder import DRAFT, FORMER, RunDir
from trainer.system import files
from trainer.system.errors import InputError

DTYPES = get_args(ExportConfig.model_fields["dtype"].annotation)
LARGEST_ROUNDING = 5e-2
"""Relative difference that storing weights in fp8 may make, which is the coarsest type of an export."""
RESUMED = "The run is running: this is where it would go on after an interruption. Stop it first."
EXPORTED = "It is being exported. Wait until that is done."
WRITTEN_WITHIN_S = 120.0
"""An unfinished export that was written to within this time is taken for one that is going on."""
Choices = Mapping[str, Mapping[str, tuple[str, ...]]]
"""{what: {format: dtypes}}"""


@dataclass(frozen=True)
class ExportedFile:
    """A complete file below `export`.

    Attributes:
        name: Its path below `export`.
        size: Bytes.
        written: Unix seconds.
        what: adapter, merged or full; empty when no event names the file.
        format: `export.format`; empty likewise.
        dtype: `export.dtype`; empty likewise.
        step: Optimizer steps of the weights; None likewise.
        check: How it was verified, in words; empty without a record.
        is_verified: Whether reloading it gave what was trained.
        is_being_replaced: Whether a newer file of this name is being written.
    """

    name: str
    size: int
    written: float
    what: str
    format: str
    dtype: str
    step: int | None
    check: str
    is_verified: bool
    is_being_replaced: bool


@dataclass(frozen=True)
class Unfinished:
    """An export that is being written or was interrupted. It is never offered.

    Attributes:
        name: The name that it will have.
        size: Bytes so far.
        written: When it was last written to, unix seconds.
    """

    name: str
    size: int
    written: float

    @property
    def is_recent(self) -> bool:
        return time.time() - self.written < WRITTEN_WITHIN_S


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run.

    Attributes:
        name: Its path below the run folder.
        stage: Name of the folder of its stage; empty without stages.
        step: Optimizer steps, within the stage.
        size: Bytes.
        saved: Unix seconds.
        validation_loss: Loss of the held-out images; None if not measured.
        is_best: Whether it has the lowest validation loss of several.
        is_newest: Whether the run goes on from it.
        is_usable: Whether it can be exported and drawn with: it is complete, and of the stage that the run is in.
        problem: Why this version cannot read it; empty when it can.
        consequence: What its deletion means for a resume and an export, as sentences.
        refusal: Why it cannot be deleted now; empty when it can.
    """

    name: str
    stage: str
    step: int
    size: int
    saved: float
    validation_loss: float | None
    is_best: bool
    is_newest: bool
    is_usable: bool
    problem: str
    consequence: str
    refusal: str


def choices(config: RunConfig) -> Choices:
    """Return what can be exported: all combinations that the config supports."""
    kinds = ("full",) if config.adapter.type == "none" else ("adapter", "merged")
    return {
        what: {
            format: tuple(dtype for dtype in DTYPES if _is_possible(config, what, format, dtype))
            for format in export_formats(config.adapter.type, what)
        }
        for what in kinds
    }


def _is_possible(config: RunConfig, what: str, format: str, dtype: str) -> bool:
    try:
        config.exporting(what, format, dtype)
    except InputError:
        return False
    return True


def exported(run: RunDir, events: Iterable[ExportEvent] = ()) -> list[Path]:
    """Return the complete exported files of a run, sorted by name.

    Left out are links to files outside the folder and what is still being written.

    Args:
        run: The run.
        events: Its exports. A file that they name is complete, whatever its name.
    """
    home, recorded = run.export.resolve(), {Path(event.path).name for event in events}
    return sorted(
        file
        for file in run.export.rglob("*")
        if file.is_file()
        and file.resolve().is_relative_to(home)
        and not _is_unfinished(file.relative_to(run.export).parts[0], recorded)
    )


def _is_unfinished(name: str, recorded: set[str]) -> bool:
    """Whether a name in `export/` is that of a draft or of a former file, which `unfinished` lists."""
    return name not in recorded and (name.startswith((DRAFT, ".")) or name.endswith(FORMER))


def listed(run: RunDir, view: RunView, is_exporting: bool) -> list[ExportedFile]:
    """Return the complete exported files with their checks.

    Args:
        run: The run.
        view: Its state, for the events of its exports.
        is_exporting: Whether an export is known to be going on.
    """
    events = {run.path / event.path: event for event in view.exports}
    replaced = {one.name for one in unfinished(run, view) if is_exporting or view.is_running or one.is_recent}
    return [_listed(run, file, events, replaced) for file in exported(run, view.exports)]


def _listed(run: RunDir, file: Path, events: Mapping[Path, ExportEvent], replaced: set[str]) -> ExportedFile:
    event = next((events[place] for place in (file, *file.parents) if place in events), None)
    status, relative = file.stat(), file.relative_to(run.export)
    return ExportedFile(
        name=shown_name(relative),
        size=status.st_size,
        written=status.st_mtime,
        what=event.what if event else "",
        format=event.format if event else "",
        dtype=event.dtype if event else "",
        step=event.step if event else None,
        check=check_in_words(event) if event else "",
        is_verified=event is not None and event.difference <= LARGEST_ROUNDING,
        is_being_replaced=shown_name(Path(relative.parts[0])) in replaced,
    )


def check_in_words(event: ExportEvent) -> str:
    """Return how an export was verified, in words; empty when it was not."""
    if math.isnan(event.difference):
        return ""
    if event.difference == 0:
        return "verified: reloaded and exactly equal"
    if event.difference > LARGEST_ROUNDING:
        return f"reloaded, it differs from what was trained by {event.difference:.1e}: do not use it"
    rounding = f"{event.dtype} rounding" if event.dtype else "rounding"
    return f"verified: reloaded and equal within {rounding} ({event.difference:.1e})"


def unfinished(run: RunDir, view: RunView) -> list[Unfinished]:
    """Return the exports that are being written or were interrupted."""
    recorded = {Path(event.path).name for event in view.exports}
    drafts = sorted(path for path in run.export.glob(f"{DRAFT}*") if path.name not in recorded)
    return [_unfinished(draft) for draft in drafts]


def _unfinished(draft: Path) -> Unfinished:
    states = [path.lstat() for path in (draft, *draft.rglob("*"))]
    size = sum(state.st_size for state in states if stat.S_ISREG(state.st_mode))
    return Unfinished(shown_name(Path(draft.name.removeprefix(DRAFT))), size, max(map(files.written, states)))


def shown_name(path: Path) -> str:
    """Return a path as text that JSON can hold: names of files may be any bytes."""
    return os.fsencode(path).decode("utf-8", "replace")


def file_of(run: RunDir, view: RunView, name: str) -> Path:
    """Return a complete exported file by the name that `listed` gave it. Raises InputError when there is none."""
    found = {shown_name(file.relative_to(run.export)): file for file in exported(run, view.exports)}
    if name not in found:
        raise InputError(f"'{name}' is not an exported file of {run.path.name}")
    return found[name]


def checksum(file: Path) -> str:
    """Return the SHA-256 of a file. Raises InputError for anything but a regular file."""
    with files.opened(file) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def checkpoints(run: RunDir, is_alive: bool, exporting: Path | None) -> list[Checkpoint]:
    """Return the checkpoints of all stages, newest first.

    Args:
        run: The run.
        is_alive: Whether the run is running.
        exporting: The checkpoint that an export is reading; None without one.
    """
    folders = [folder / "checkpoints" for folder in run.stage_folders] or [run.checkpoints]
    current = run.checkpoints
    needed = dict.fromkeys(manifest.complete(current)[-1:] if is_alive else (), RESUMED)
    needed |= {exporting: EXPORTED} if exporting else {}
    return [
        checkpoint
        for folder in reversed(folders)
        for checkpoint in _checkpoints_in(run, folder, folder == current, needed)
    ]


def _checkpoints_in(run: RunDir, folder: Path, is_current: bool, needed: Mapping[Path, str]) -> list[Checkpoint]:
    named = manifest.named(folder)
    problems = {path: manifest.problem(path) or "" for path in named}
    complete = [path for path in named if not problems[path]]
    losses = {path: manifest.progress_of(path).validation_loss for path in complete}
    best = manifest.by_loss(losses)[:1] if len(complete) > 1 else []
    found = []
    for path in reversed(named):
        words = [_consequence(path, complete, is_current, problems[path])]
        words += ["It has the lowest validation loss."] if path in best else []
        found.append(
            Checkpoint(
                name=shown_name(path.relative_to(run.path)),
                stage=folder.parent.name if folder.parent != run.path else "",
                step=manifest.step_of(path),
                size=sum(file.lstat().st_size for file in path.rglob("*") if file.is_file()),
                saved=path.lstat().st_mtime,
                validation_loss=losses[path] if path in losses and math.isfinite(losses[path]) else None,
                is_best=path in best,
                is_newest=is_current and path in complete[-1:],
                is_usable=is_current and path in complete,
                problem=problems[path] if is_current and path == named[-1] else _removable(problems[path]),
                consequence=" ".join(words),
                refusal=_why_not_ours(run, path) or needed.get(path, ""),
            )
        )
    return found


def _removable(problem: str) -> str:
    """The problem of a checkpoint after which there is another one: that one is taken with or without it."""
    return problem.replace(manifest.REMEDY, "remove this checkpoint")


def _consequence(path: Path, complete: list[Path], is_current: bool, problem: str) -> str:
    if problem:
        return "Neither a resume nor an export can use it."
    if not is_current:
        return "Its stage is done: neither a resume nor an export needs it."
    if path != complete[-1]:
        return (
            f"A resume does not need it: that takes step {manifest.step_of(complete[-1]):,}. Nothing of step "
            f"{manifest.step_of(path):,} can be exported then."
        )
    if len(complete) == 1:
        return "It is the only one: without it, a resume starts again from step 0, and nothing can be exported."
    former = manifest.steps_in(complete[-2])
    return (
        f"It is the newest: without it, a resume goes on from step {former:,}, and an export takes the weights of that "
        f"step. The {manifest.steps_in(path) - former:,} steps after it would be lost."
    )


def _why_not_ours(run: RunDir, path: Path) -> str:
    """Why a path must not be removed from here: what it leads to may belong to something else."""
    try:
        is_own = run.own_file(str(path.relative_to(run.path))) == run.path.resolve() / path.relative_to(run.path)
    except InputError:
        is_own = False
    if is_own and path.is_dir():
        return ""
    return "It is not a folder of this run folder, or reached by a link. Remove it by hand."


def delete_checkpoint(run: RunDir, name: str, exporting: Path | None) -> None:
    """Delete a checkpoint, its name first: an interrupted deletion leaves nothing that passes for a complete one.

    Raises:
        InputError: The run has no such checkpoint, or it is needed.
        OSError: It cannot be removed.
    """
    with run.locked():  # no other process starts the run meanwhile
        found = {one.name: one for one in checkpoints(run, process.alive(run), exporting)}
        if name not in found:
            raise InputError(f"{name}: not a checkpoint of {run.path.name}; it may have been removed")
        if found[name].refusal:
            raise InputError(f"{name} is not deleted. {found[name].refusal}")
        path = run.path / name
        nameless = path.with_name(f".{path.name}.deleted")  # the next start of the run removes what is left of it
        if nameless.exists():
            shutil.rmtree(nameless)
        files.rename(path, nameless)
    shutil.rmtree(nameless)
