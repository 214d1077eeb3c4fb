"""HTML of runs and plans for notebooks, and the requests that their buttons send to a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ipywidgets as widgets
from markupsafe import Markup

from app.runs.monitor import SILENT_S, RunView
from trainer.launcher.remedy import with_remedy
from trainer.plan.memory import MemoryPlan, verdict
from trainer.plan.search.ladder import Rung
from trainer.plan.simulate.phases import memory_kind, moment
from trainer.run import process
from trainer.run.events import SampleEvent
from trainer.run.folder import Request, RunDir
from trainer.system.amounts import file_size, memory_size
from trainer.system.errors import InputError
from trainer.view.numbers import format_seconds, format_speed
from trainer.view.render import Templates

TEMPLATES = Templates(Path(__file__).with_name("templates"))

WITHOUT_WIDGETS = (
    "Widgets are not shown here. Run this cell in JupyterLab with ipywidgets installed next to it, in VS Code with its "
    "Jupyter extension, or in Colab, while the kernel runs."
)
CONFIRMATIONS: Mapping[Request, str] = {
    "stop": "Stopping after this step, with a checkpoint.",
    "save": "Saving a checkpoint after this step.",
    "sample": "Generating samples after this step.",
}
"""{request: message after it was sent}"""


def request(run: RunDir, what: Request) -> str:
    """Send a request to the trainer and return its confirmation. Raises InputError when a run to stop has ended."""
    if what == "stop":
        process.stop(run)
    else:
        run.request(what)
    return CONFIRMATIONS[what]


def status(view: RunView) -> Markup:
    """Return the state as a sentence, a progress bar, and loss, speed and seconds of the last steps."""
    rate, unit = format_speed(*view.speed).split()
    facts = [("step", f"{view.step:,} / {view.length}"), (unit, rate)]
    if view.epoch:
        facts.insert(1, ("epoch", view.epoch.removeprefix("epoch ")))
    if view.loss is not None:
        facts.insert(-1, ("loss, smoothed", f"{view.loss:.4f}"))
        facts.append(("a step", format_seconds(view.step_s)))
        facts += [(part, format_seconds(seconds)) for part, seconds in view.seconds.items()]
    if view.waited_s > 0:
        facts.append(("of which waiting for ranks", format_seconds(view.waited_s)))
    is_failed = view.state == "failed"
    run = RunDir(view.path)
    error = with_remedy(run, view.error) if is_failed and view.error else None
    mood = "bad" if is_failed else "slow" if view.is_stuck else "good"
    return TEMPLATES.part("panels.html", "status", view, run.title, mood, error, facts)


def ranks(view: RunView) -> Markup:
    """Return a bar per rank with its memory and the age of its last line."""
    return TEMPLATES.part("panels.html", "ranks", view, SILENT_S) if view.ranks else Markup()


def newest(samples: Iterable[tuple[SampleEvent, str, str, list[str]]]) -> Markup:
    """Return the newest samples.

    Args:
        samples: (sample, its picture as base64 or "", why it cannot be shown or "", its references as base64).
    """
    return TEMPLATES.part("panels.html", "newest", list(samples))


def plan(plan: MemoryPlan, ways: Iterable[Rung] = ()) -> Markup:
    """Return the peak memory per GPU as a bar with its parts, and in sentences; and the changes with which it fits."""
    most = plan.fullest
    whole = max(most.need, plan.card.memory if plan.card else 0)
    parts = [(item, memory_kind(item.name)) for item in most.items if item.size >= whole / 200]
    mood = {"fits": "good", "tight": "slow", "does not fit": "bad"}.get(plan.verdict or "", "good")
    host = [(item, memory_size(item.size)) for item in plan.host]
    disk = [(item, file_size(item.size)) for item in plan.disk]
    values = (plan, verdict(plan), mood, moment(most), parts, whole, host, disk, list(ways))
    return styled(TEMPLATES.part("panels.html", "plan", *values))


def attempted(act: Callable[[], str]) -> Markup:
    """Run an action and return its message, or the InputError or OSError that it raised."""
    try:
        return TEMPLATES.part("panels.html", "note", act())
    except (InputError, OSError) as error:
        return alert(str(error))


def alert(message: str) -> Markup:
    """Return an error message, which screen readers read aloud."""
    return TEMPLATES.part("panels.html", "alert", message)


def live(widget: widgets.Widget, otherwise: str) -> dict[str, Any]:
    """Return a widget as the output of a cell, which says what to do where widgets are not shown.

    Args:
        otherwise: A further sentence then.
    """
    shown: dict[str, Any] = widget._repr_mimebundle_()
    return shown | {"text/plain": f"{WITHOUT_WIDGETS} {otherwise}"}


def styled(content: Markup, sheet: str = "") -> Markup:
    """Return HTML as the output of a cell, with its style and that of a further style sheet, a template."""
    return TEMPLATES.part("panels.html", "styled", content, sheet)
