"""The table of all runs, with tags, comparison and deletion. The page displays it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from app import form
from app.monitor import Follower, RunView, explained
from app.studio import Studio
from trainer.config import files
from trainer.config.errors import InputError
from trainer.config.fields import all_names, shown
from trainer.run import process
from trainer.run.events import ENDS, SampleEvent, State
from trainer.run.folder import RunDir, is_run
from trainer.run.report import Line

MOST_COMPARED = 5
_TAGS = TypeAdapter(dict[str, tuple[str, ...]])


@dataclass(frozen=True)
class Summary:
    """A row of the table.

    Attributes:
        started: Unix seconds; 0 for never.
        problem: A sentence about files that cannot be read and are left out; "" when all can.
    """

    name: str
    state: State | Literal["damaged"]
    step: int
    num_steps: int
    loss: float | None
    started: float
    model: str
    adapter: str
    tags: tuple[str, ...] = ()
    problem: str = ""


class Summaries:
    """The rows of all runs. A run that has ended is read once."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._ended: dict[Path, tuple[int, Summary]] = {}

    def all(self) -> list[Summary]:
        """Return all rows, newest start first, including damaged runs. No row has tags if their file is damaged."""
        try:
            tags = read_tags(self._studio.runs)
        except InputError:  # `tags_problem` names it
            tags = {}
        found = [self._summary(run) for run in self._studio.find_runs()]
        return [replace(summary, tags=tags.get(summary.name, ())) for summary in found if summary is not None]

    def _summary(self, run: RunDir) -> Summary | None:
        try:
            changed = run.events_file.stat().st_mtime_ns if run.events_file.exists() else 0
            known, summary = self._ended.get(run.path, (0, None))
            if summary is not None and known == changed:
                return summary
            summary = _summary(self._studio.follower(run) if process.alive(run) else Follower(run))
        except (InputError, OSError) as error:
            if not is_run(run.path):  # deleted a moment ago
                return None
            return Summary(run.path.name, "damaged", 0, 0, None, 0.0, "", "", problem=explained(error))
        if summary.state in ENDS:
            self._ended[run.path] = changed, summary
        return summary


def _summary(follower: Follower) -> Summary:
    view, events = follower.view(), follower.events()
    return Summary(
        name=view.path.name,
        state=view.state,
        step=view.step,
        num_steps=view.num_steps,
        loss=view.loss,
        started=events[0].time if events else 0.0,
        model=Path(follower.config.model.path).name,
        adapter=follower.config.adapter.type,
        problem="; ".join(view.problems),
    )


def read_tags(runs: Path) -> dict[str, tuple[str, ...]]:
    """Return {run: tags}. Raises InputError when the file is damaged."""
    file = runs / "tags.json"
    try:
        return files.read_json(file, _TAGS)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(explained(error)) from error


def tags_problem(runs: Path) -> str:
    """Return why tags cannot be read, or "" when they can."""
    try:
        read_tags(runs)
    except InputError as error:
        return str(error)
    return ""


def set_tags(runs: Path, name: str, text: str) -> None:
    """Set a run's tags from comma-separated text. Raises InputError as `read_tags` does."""
    with files.locked(files.make_private(runs / "drafts") / "tags.lock"):
        tags = read_tags(runs) | {name: tuple(tag.strip() for tag in text.split(",") if tag.strip())}
        files.replace(runs / "tags.json", json.dumps(tags, indent=1), mode=files.private_mode(runs))


def delete(run: RunDir) -> None:
    """Delete a run's folder. Raises InputError while the run is running."""
    if process.alive(run):
        raise InputError(f"{run.path.name}: is running; stop it first")
    shutil.rmtree(run.path)


def size(run: RunDir) -> int:
    """Return the bytes of a run's folder, without the targets of links."""
    return sum(file.lstat().st_size for file in run.path.rglob("*") if file.is_file())


def overlaid(followers: Sequence[Follower], chart: str = "Loss", label: str = "each step") -> list[Line]:
    """Return one smoothed line per run: the line `label` of the chart, labelled with the run's name."""
    return [
        replace(line, label=follower.run.path.name, look="smoothed")
        for follower in followers
        for line in follower.lines(chart)
        if line.label == label
    ]


def differing(followers: Sequence[Follower]) -> dict[str, tuple[str, ...]]:
    """Return {field: value in each run} of the fields in which the runs differ."""
    dumped = [follower.config.model_dump(mode="json") for follower in followers]
    rows = {name: tuple(shown(form.value_at(values, name)) for values in dumped) for name in all_names()}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def same_prompts(views: Sequence[RunView]) -> dict[str, list[SampleEvent | None]]:
    """Return {prompt: its last sample in each run} of the prompts that more than one run has."""
    latest = [{sample.prompt: sample for sample in sorted(view.samples, key=lambda s: s.step)} for view in views]
    prompts = dict.fromkeys(prompt for found in latest for prompt in found)
    rows = {prompt: [found.get(prompt) for found in latest] for prompt in prompts}
    return {prompt: samples for prompt, samples in rows.items() if sum(s is not None for s in samples) > 1}
