"""The table of all runs, with their tags and sizes, and their deletion. The page displays it.

A run is read again only when its files have changed, and what was read is kept on disk, so that the table of hundreds
of runs costs little after the first time. Sizes are counted in the background.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from app.runs.monitor import Follower, RunView, explained, last_start
from app.studio import Studio
from trainer.config.schema import RunConfig
from trainer.config.sections import half_character
from trainer.config.titles import model_title
from trainer.run import process
from trainer.run.events import State
from trainer.run.folder import RunDir, is_run
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.index import Index
from trainer.view.numbers import smoothed

CURVE_POINTS = 40
"""Most points of the small loss curve of a row."""
REASON_CHARS = 300
TEXT_CHARS = 160
READ_S = 0.2
"""How long one answer reads runs that are not known yet; the next answers read the others."""
RETRY_S = 10.0
"""A run with a damaged file is read again after this time: a file may be mended without a change of its stamp."""
LOOK_EVERY_S = 10.0
"""Seconds between two looks at all files that rows are read from."""
COUNT_EVERY_S = 30.0
"""Seconds between two looks at the sizes of all runs."""
COUNT_NEW_S = 1.0
"""The same where a run's size is not known yet."""
_TAGS = TypeAdapter(dict[str, tuple[str, ...]])
FORMAT = 2
"""Version of the rows in the index: increased when rows are read differently, so that those are read again."""
ROWS, SIZES = f"row {FORMAT}", f"size {FORMAT}"
"""Kinds of records in the index, by name of the run."""
MOST_KEPT = 10_000

STAMPED = ("launch.json", "title.txt", "events.jsonl", "config.yaml")
"""Files that a row is read from."""
NUM_WATCHED = 2
"""Those of them, from the first on, that change with each start or by a person, and are looked at each time."""
SIZED = (".", "events.jsonl", "checkpoints", "export", "samples", "stages", "logs")
"""Folders whose time changes when the run folder grows or shrinks, and a file that grows."""
Stamp = tuple[int, ...]
"""Times and sizes of files; zeros for those that do not exist."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A row of the table.

    Attributes:
        name: Name of its folder.
        title: Its name for people, as `RunDir.title` has it.
        id: `RunDir.title_id`.
        state: The run's state; "unread" for a run that is read in a moment; "damaged" for one that cannot be read.
        num_steps: Planned steps; 0 while they are not known.
        length: Planned steps in words: "1,200", or "3 epochs" while they are not known.
        loss: Smoothed training loss of the last step.
        started: Unix seconds of the first start; 0 for never.
        launched: Unix seconds of the last start; for a run that was never started, of its making.
        model: Name of the model, as `model_title` has it.
        adapter: The method in words: "LoRA 16, int8".
        best: (loss, step) of the lowest validation loss.
        curve: Smoothed training loss in up to CURVE_POINTS equal parts of all planned steps, as far as the run came.
        duration_s: Seconds that the run has been running.
        is_stuck: Whether a running trainer has not written anything for a while.
        reason: Why the run failed.
        sample: Path of the last sample image in the run folder; "" for none.
        text: Beginning of the last sample, for a model that writes text.
        problem: A sentence about files that cannot be read and are left out; "" when all can.
        size: Bytes of the run folder; None until they are counted.
    """

    name: str
    state: State | Literal["unread", "damaged"]
    title: str
    id: str
    step: int = 0
    num_steps: int = 0
    length: str = ""
    loss: float | None = None
    started: float = 0.0
    launched: float = 0.0
    model: str = ""
    adapter: str = ""
    best: tuple[float, int] | None = None
    curve: tuple[float, ...] = ()
    duration_s: float = 0.0
    eta_s: float | None = None
    is_stuck: bool = False
    reason: str = ""
    sample: str = ""
    text: str = ""
    problem: str = ""
    tags: tuple[str, ...] = ()
    size: int | None = None


@dataclass(frozen=True)
class Changes:
    """Changes of the table since a token.

    Attributes:
        token: Names the moment of this answer.
        is_whole: Whether `rows` are all rows, because the token was of another process or empty.
        rows: The rows that are new or changed, newest start first.
        gone: Names of runs that were deleted since.
        num_unread: Runs that are to be read by the next calls.
    """

    token: str
    is_whole: bool
    rows: tuple[Summary, ...]
    gone: tuple[str, ...]
    num_unread: int


@dataclass
class _Entry:
    """A run as it was last read.

    Attributes:
        stamp: Stamp of STAMPED when it was read; () for never.
        summary: Its row, without tags and size.
        is_settled: Whether it changes only along with its stamp. A run whose process lives is read each time.
        read_at: Monotonic seconds.
        row: Its row as it was last answered.
        version: Number of the change that made `row`.
    """

    stamp: Stamp
    summary: Summary
    is_settled: bool = False
    read_at: float = -math.inf
    row: Summary | None = None
    version: int = 0

    @property
    def is_due(self) -> bool:
        """Whether it is to be read although its stamp is the same."""
        is_damaged = self.summary.problem != "" and time.monotonic() - self.read_at > RETRY_S
        return is_damaged or not self.is_settled


_ROW = TypeAdapter(tuple[Stamp, Summary])
_SIZE = TypeAdapter(tuple[Stamp, int])
"""Bytes of a run folder, and the stamp of SIZED when they were counted."""


class Summaries:
    """The rows of all runs. Thread-safe."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._index = Index(studio.runs / "drafts")
        self._lock = threading.Lock()
        self._process = secrets.token_hex(4)
        self._version = 0
        self._gone: dict[str, int] = {}
        self._entries: dict[str, _Entry] = {}
        self._sizes: dict[str, tuple[Stamp, int]] = {}
        self._unsaved: set[str] = set()
        self._is_loaded = False
        self._counter: threading.Thread | None = None
        self._counted_at = self._looked_at = -math.inf

    def all(self) -> list[Summary]:
        """Return all rows, newest start first, including damaged runs. No row has tags if their file is damaged."""
        return list(self.changes(budget_s=math.inf).rows)

    def changes(self, token: str = "", budget_s: float = READ_S) -> Changes:
        """Return what changed since an earlier answer.

        Args:
            token: Token of that answer; "" for all rows.
            budget_s: Seconds after which no more runs are read.
        """
        with self._lock:
            self._load()
            self._renew(time.monotonic() + budget_s, is_thorough=not token)
            self._count_in_background()
            process_id, _, number = token.partition("-")
            since = int(number) if process_id == self._process and number.isdecimal() else -1
            changed = [entry.row for entry in self._entries.values() if entry.row and entry.version > since]
            return Changes(
                token=f"{self._process}-{self._version}",
                is_whole=since < 0,
                rows=tuple(sorted(changed, key=lambda row: row.launched, reverse=True)),
                gone=tuple(name for name, version in self._gone.items() if version > since >= 0),
                num_unread=sum(entry.summary.state == "unread" for entry in self._entries.values()),
            )

    def sample(self, name: str) -> Path | None:
        """Return the file of a run's last sample image; None without one. It need not exist.

        Raises:
            InputError: The run's events name a file outside its folder.
            ValueError: They name what cannot be a file.
        """
        with self._lock:
            entry = self._entries.get(name)
        if entry is None or not entry.summary.sample:
            return None
        return RunDir(self._studio.runs / name).own_file(entry.summary.sample)

    def _renew(self, deadline: float, is_thorough: bool) -> None:
        """Read the runs that changed, those that were started last first, and update the rows."""
        there, stale = self._listed(is_thorough)
        for name in set(self._entries) - there:
            self._drop(name)
        for run in sorted(stale, key=lambda run: last_start(run.path), reverse=True):
            self._read(run, deadline)
        tags = self._tags()
        for name, entry in self._entries.items():
            counted, own = self._sizes.get(name), tags.get(name, ())
            size = counted[1] if counted else None
            if entry.row is None or (entry.row.size, entry.row.tags) != (size, own):
                self._version += 1
                entry.row, entry.version = replace(entry.summary, tags=own, size=size), self._version
                self._gone.pop(name, None)

    def _listed(self, is_thorough: bool) -> tuple[set[str], list[RunDir]]:
        """Return the names of all runs, and the runs to be read.

        A run that has ended changes when it is started again or renamed, which is looked for each time. Other changes,
        such as an export or an edited config, are looked for when `is_thorough`, and every LOOK_EVERY_S.
        """
        if is_thorough or time.monotonic() - self._looked_at > LOOK_EVERY_S:
            self._looked_at, num_checked = time.monotonic(), len(STAMPED)
        else:
            num_checked = NUM_WATCHED
        there, stale = set(), []
        folders = self._studio.runs.iterdir() if self._studio.runs.is_dir() else ()
        for path in folders:
            run, known = RunDir(path), self._entries.get(path.name)
            stamp = _stamps(path, STAMPED[:num_checked])
            is_known = known is not None and known.stamp[: len(stamp)] == stamp and not known.is_due
            if is_known or is_run(path):
                there.add(path.name)
            if not is_known and path.name in there:
                stale.append(run)
        return there, stale

    def _drop(self, name: str) -> None:
        self._entries.pop(name, None)
        self._unsaved.add(name)
        self._version += 1
        self._gone[name] = self._version

    def _tags(self) -> dict[str, tuple[str, ...]]:
        try:
            return read_tags(self._studio.runs)
        except InputError:  # `tags_problem` names it
            return {}

    def _read(self, run: RunDir, deadline: float) -> None:
        """Read a run, unless it is too late for one that can wait."""
        name, now, known = run.path.name, time.monotonic(), self._entries.get(run.path.name)
        stamp = _stamps(run.path, STAMPED)
        if half_character(name):
            problem = "The name of this folder is not UTF-8: rename it."
            self._entries[name] = _Entry(stamp, _bare(run, "damaged", problem), is_settled=True, read_at=now)
            return
        if now > deadline and (known is None or known.is_settled):
            self._entries.setdefault(name, _Entry((), _bare(run, "unread"), is_settled=True))
            return
        try:
            with run.boundary():
                run.guard()
                is_alive = process.alive(run)
                summary = summarized(self._studio.follower(run) if is_alive else Follower(run))
        except (InputError, OSError) as error:
            if not is_run(run.path):  # deleted a moment ago
                self._drop(name)
                return
            is_alive, summary = False, _bare(run, "damaged", _shortened(run, explained(error)))
        entry = _Entry(stamp, summary, is_settled=not is_alive, read_at=now)
        if entry.is_settled:
            self._unsaved.add(name)
        if known and known.summary == summary:
            entry.row, entry.version = known.row, known.version
        self._entries[name] = entry

    def _load(self) -> None:
        """Take over what an earlier process read. Rows that are missing or damaged are read again."""
        if self._is_loaded:
            return
        self._is_loaded = True
        for name, row in self._index.all(ROWS).items():
            with suppress(ValidationError):
                self._entries[os.fsdecode(name)] = _Entry(*_ROW.validate_json(row), is_settled=True)
        for name, row in self._index.all(SIZES).items():
            with suppress(ValidationError):
                self._sizes[os.fsdecode(name)] = _SIZE.validate_json(row)

    def _save(self) -> None:
        with self._lock:
            if not self._unsaved or self._studio.unwritable:
                return
            rows = dict.fromkeys(self._unsaved, b"")  # of deleted runs nothing is kept
            sizes: dict[str, bytes] = {}
            for name in self._unsaved:
                entry = self._entries.get(name)
                if entry and entry.is_settled and not entry.summary.problem:
                    rows[name] = _ROW.dump_json((entry.stamp, entry.summary))
                    sizes |= {name: _SIZE.dump_json(self._sizes[name])} if name in self._sizes else {}
            self._unsaved.clear()
        self._index.put(ROWS, rows, MOST_KEPT)
        self._index.put(SIZES, sizes, MOST_KEPT)

    def _count_in_background(self) -> None:
        now = time.monotonic()
        is_counting = self._counter is not None and self._counter.is_alive()
        has_new = any(name not in self._sizes for name in self._entries)
        if is_counting or now - self._counted_at < (COUNT_NEW_S if has_new else COUNT_EVERY_S):
            return
        self._counted_at = now
        self._counter = threading.Thread(target=self._count, name="sizes", daemon=True)
        self._counter.start()

    def _count(self) -> None:
        """Count the bytes of all runs whose folders changed, then keep what is known on disk."""
        for run in self._studio.find_runs():
            stamp, known = _stamps(run.path, SIZED), self._sizes.get(run.path.name)
            if known is None or known[0] != stamp:
                counted = (stamp, size(run))
                with self._lock:
                    self._sizes[run.path.name] = counted
                    self._unsaved.add(run.path.name)
        self._save()


def _bare(run: RunDir, state: Literal["unread", "damaged"], problem: str = "") -> Summary:
    return Summary(
        name=run.path.name,
        title=run.title,
        id=run.title_id,
        state=state,
        launched=last_start(run.path),
        problem=problem,
    )


def _shortened(run: RunDir, text: str) -> str:
    """The text with files of the run named from its folder on."""
    return text.replace(f"{run.path}/", "")


def _stamps(folder: Path, names: Iterable[str]) -> Stamp:
    found: list[int] = []
    for name in names:
        try:
            stat = os.stat(f"{folder}/{name}")
        except OSError:
            found += (0, 0)
        else:
            found += (stat.st_mtime_ns, stat.st_size)
    return tuple(found)


def summarized(follower: Follower) -> Summary:
    """Return the row of a run. Raises InputError or OSError as `Follower` does."""
    view, events, config = follower.view(), follower.events(), follower.config
    last = max(view.samples, key=lambda sample: sample.step, default=None)
    return Summary(
        name=view.path.name,
        title=follower.run.title,
        id=follower.run.title_id,
        state=view.state,
        step=view.step,
        num_steps=view.num_steps,
        length=view.length,
        loss=_finite(view.loss),
        started=events[0].time if events else 0.0,
        launched=last_start(view.path),
        model=model_title(config.model.path, config.model.family),
        adapter=method(config),
        best=best_validation(follower),
        curve=_curve(follower, view.num_steps),
        duration_s=view.duration_s,
        eta_s=_finite(view.eta_s) if view.is_running else None,
        is_stuck=view.is_stuck,
        reason=_reason(view),
        sample=last.picture if last else "",
        text=last.text[:TEXT_CHARS] if last else "",
        problem=_shortened(follower.run, "; ".join(view.problems)),
    )


def method(config: RunConfig) -> str:
    """Return how a run trains, in words: "LoRA 16, int8"."""
    adapter = config.adapter
    found = f"{adapter.title} {adapter.size}" if adapter.size else adapter.title
    return found if config.quantize.format == "none" else f"{found}, {config.quantize.format}"


def best_validation(follower: Follower) -> tuple[float, int] | None:
    """Return (loss, step) of the lowest validation loss; None where none was measured."""
    return min(((event.loss, event.step) for event in follower.validations if math.isfinite(event.loss)), default=None)


def _reason(view: RunView) -> str:
    if view.state != "failed" or view.error is None:
        return ""
    text = " ".join(view.error.message.split())
    return text if len(text) <= REASON_CHARS else f"{text[: REASON_CHARS - 1]}…"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _curve(follower: Follower, num_steps: int) -> tuple[float, ...]:
    """The smoothed loss at the end of each of up to CURVE_POINTS equal parts of all steps, as far as there are any."""
    num_steps = num_steps or max((step.step for step in follower.steps), default=1)
    num_parts = min(CURVE_POINTS, num_steps)
    values: dict[int, float] = {}
    means = smoothed((step.loss for step in follower.steps), follower.decay)
    for step, mean in zip(follower.steps, means, strict=True):
        if math.isfinite(mean):
            values[min(num_parts - 1, (step.step - 1) * num_parts // num_steps)] = float(f"{mean:.4g}")
    return tuple(values.values())


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


def change_tags(runs: Path, names: Iterable[str], added: str = "", removed: str = "") -> None:
    """Add tags to runs and remove others, both from comma-separated text. Raises InputError as `read_tags` does."""
    with files.locked(files.make_private(runs / "drafts") / "tags.lock"):
        tags = read_tags(runs)
        for name in names:
            kept = [tag for tag in tags.get(name, ()) if tag != removed and tag not in _split(removed)]
            tags[name] = tuple(dict.fromkeys([*kept, *_split(added)]))
        files.replace(runs / "tags.json", json.dumps(tags, indent=1), mode=files.private_mode(runs))


def _split(text: str) -> tuple[str, ...]:
    return tuple(tag.strip() for tag in text.split(",") if tag.strip())


def size(run: RunDir) -> int:
    """Return the bytes of a run's folder, without the targets of links. What cannot be read does not count."""
    total = 0
    for folder, _, names in os.walk(run.path):
        for name in names:
            with suppress(OSError):  # deleted a moment ago
                total += os.lstat(f"{folder}/{name}").st_size
    return total
