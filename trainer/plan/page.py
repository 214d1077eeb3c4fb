"""Writes a plan as a page in one HTML file: memory over a training step, the parts of the run, and what would fit.

The file loads nothing from a server and has no scripts, so it can be mailed or archived. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from markupsafe import Markup

from trainer.plan.memory import MemoryPlan, verdict
from trainer.plan.picture import Limit, draw, outline
from trainer.plan.simulate.phases import Phase, by_kind, memory_kind, moment
from trainer.plan.simulate.timeline import Point
from trainer.system import files
from trainer.system.amounts import GIB
from trainer.system.errors import InputError
from trainer.view.render import VIEW

FIRST_LINE = "<!doctype html><!-- a memory plan of ShardStudio: --html replaces this file -->"
"""Only files that begin with it are replaced."""


@dataclass(frozen=True)
class Section:
    """The plan of a run or of one of its stages.

    Attributes:
        name: Name of the stage; "" for a run without stages.
        title: Method, base, size and ranks in a line.
        plan: The plan.
        facts: (name, text) of host memory, disk, links and time.
        points: The moments of a training step.
        ways: Changes with which it fits, each as a sentence.
        remarks: Sentences to know before the run.
    """

    name: str
    title: str
    plan: MemoryPlan
    facts: Sequence[tuple[str, str]]
    points: Sequence[Point]
    ways: Sequence[str]
    remarks: Sequence[str]


def refuse(file: Path) -> None:
    """Raise InputError if a page cannot be written to a file, or would replace a file of another kind."""
    if not file.parent.is_dir():
        raise InputError(f"--html {file}: the folder {file.parent} does not exist; make it, or name another file")
    if file.is_dir():
        raise InputError(f"--html {file}: a folder; name a file in it, for example {file / 'plan.html'}")
    if file.is_symlink() or (file.exists() and not _is_ours(file)):
        raise InputError(f"--html {file}: exists and is not the page of a plan; move it, or name another file")
    try:
        with TemporaryFile(dir=file.parent):
            pass  # a right to write is not enough: the file system may be read-only or full
    except OSError as error:
        sentence = f"the folder {file.parent} cannot be written ({error.strerror}); name another file"
        raise InputError(f"--html {file}: {sentence}") from error


def _is_ours(file: Path) -> bool:
    """Whether a regular file begins as the pages do."""
    try:
        with files.opened(file) as stream:
            return stream.readline(len(FIRST_LINE) + 1).decode(errors="replace").rstrip("\n") == FIRST_LINE
    except (OSError, InputError):  # no right to read it, or not a file: it is not replaced
        return False


def write(file: Path, name: str, whole: str, sections: Sequence[Section]) -> None:
    """Write the page of a plan.

    Args:
        file: Where to write it.
        name: Name of the run.
        whole: Length of all stages as a sentence; "" without stages.
        sections: The run, or its stages.

    Raises:
        InputError: It cannot be written.
    """
    refuse(file)  # a plan may take minutes, in which others write files too
    page = VIEW.page("plan.html", first_line=Markup(FIRST_LINE), name=name, whole=whole, sections=map(_shown, sections))
    try:
        files.replace(file, page)
    except OSError as error:
        raise InputError(f"--html {file}: cannot be written ({error.strerror}); name another file") from error


def _shown(one: Section) -> dict[str, Any]:
    """Return what the template shows of a section."""
    plan, limit, fullest = one.plan, Limit.of(one.plan), one.plan.fullest
    return {
        "name": one.name,
        "title": one.title,
        "mood": (plan.verdict or "").replace(" ", "-"),
        "verdict": verdict(plan),
        "picture": draw(outline(one.points), limit),
        "explained": _explained(plan, limit),
        "largest": [vars(item) | {"kind": memory_kind(item.name)} for item in fullest.items if item.size >= GIB / 100],
        "need": fullest.need,
        "moment": moment(fullest),
        "card": plan.card if plan.card and plan.card.memory else None,
        "scale": max(plan.need, plan.card.memory if plan.card else 0.0),
        "phases": [{"name": phase.name, "need": phase.need, "parts": _parts(phase)} for phase in plan.phases],
        "ways": one.ways,
        "facts": one.facts,
        "remarks": one.remarks,
    }


def _explained(plan: MemoryPlan, limit: Limit) -> str:
    is_drawn = limit.seen(plan.training.peak).reserve > 0
    where = "The pale band on top is" if is_drawn else f"Not drawn is, with {limit.reserve / GIB:.2f} GiB,"
    what = next((item.sentence for item in plan.training.items if item.name == "reserve"), "")
    return (
        "Each block is drawn at its fullest moment; its width is its share of the computing, not of the time. "
        f"{where} the reserve: {what}."
    )


def _parts(phase: Phase) -> list[tuple[str, float]]:
    """Return the (kind, bytes) of a bar."""
    sizes = by_kind({item.name: item.size for item in phase.items})
    return [(kind, size) for kind, size in sizes.items() if size]
