"""How long a run will take, as measured in earlier runs of the same kind in the folder of runs.

Configs and the ends of events are read by a thread, newest runs first, and again only when they change; an answer looks
into what is known. See DECISIONS 150.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from app.runs.monitor import find_runs
from trainer.config import families
from trainer.config.load import stage_configs
from trainer.config.schema import RunConfig
from trainer.run.events import AnyEvent, EventReader, StatusEvent, StepEvent, since_start
from trainer.run.folder import RunDir
from trainer.run.process import Launch
from trainer.system.errors import InputError

LOOK_EVERY_S = 10.0
"""Seconds between two looks at the folder of runs, while a form asks."""
MOST_RUNS = 500
"""Runs that are looked at: those that were started last."""
HEAD_BYTES = TAIL_BYTES = 256 * 1024
"""How much is read of the beginning and of the end of a run's events: the start, and the last 500 steps or so."""
REST_S = 0.01
"""Pause of the thread after a run, so that answers do not wait for it."""
LEAST_STEPS = 3
"""A run with fewer steps says nothing: its first one also warms up."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one run.

    Attributes:
        began: Unix seconds of its first event.
        host: The machine that trained it; "" for this one.
        start: Until the first step, without samples.
        passes: Of a step, the part that grows with the passes of a step.
        update: Of a step, the rest, including what validation and checkpoints add on average.
        sampling: Of one set of samples; None where it has none.
        end: After the last step, without samples.
    """

    began: float
    host: str
    start: float
    passes: float
    update: float
    sampling: float | None
    end: float


@dataclass(frozen=True)
class Estimate:
    """The time of a run that was not started.

    Attributes:
        seconds: From start to end.
        step_s: Of one step.
        run: Name of the folder of the run that it was measured in.
        name: Name of that run.
        began: Unix seconds of its start.
        host: Its machine; "" for this one.
        has_samples: Whether the time of samples is known, or there are none.
    """

    seconds: float
    step_s: float
    run: str
    name: str
    began: float
    host: str
    has_samples: bool


@dataclass(frozen=True)
class _Entry:
    stamp: tuple[int, ...]
    config: RunConfig | None = None
    kind: str = ""
    timing: Timing | None = None


class EarlierRuns:
    """The runs of a folder, for estimates. Thread-safe."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._entries: dict[str, _Entry] = {}
        self._thread: threading.Thread | None = None
        self._looked_at = -math.inf
        self._is_first = True

    def estimate(self, cfg: RunConfig, steps: Sequence[int | None]) -> Estimate | None:
        """Return the time of a run of this config, which is the sum over its stages.

        Args:
            cfg: Its config.
            steps: Steps of each stage; None where they are not known.

        Returns:
            None where a stage has an unknown length, or no run of its kind is known (see `is_looking`).
        """
        self._look()
        parts = []
        for part, number in zip(stage_configs(cfg), steps, strict=True):
            kind, entries = kind_of(part), self._entries.copy()
            found = [(name, entry) for name, entry in entries.items() if entry.kind == kind and entry.timing]
            if number is None or not found:
                return None
            parts.append(_estimated(part, number, *max(found, key=_rank)))
        return _sum(parts, [number for number in steps if number is not None])

    @property
    def is_looking(self) -> bool:
        """Whether the runs are still being read for the first time."""
        return self._is_first

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_EVERY_S or (self._thread and self._thread.is_alive()):
            return
        self._looked_at = now
        runs = find_runs(self._runs)[:MOST_RUNS]
        self._is_first &= bool(runs)
        self._thread = threading.Thread(target=self._read_all, args=(runs,), name="earlier runs", daemon=True)
        self._thread.start()

    def _read_all(self, runs: Sequence[RunDir]) -> None:
        measured: set[tuple[str, str]] = set()
        for run in runs:
            name, known, stamp = run.path.name, self._entries.get(run.path.name), _stamp(run)
            if known is None or known.stamp != stamp or not (known.timing or (known.kind, "") in measured):
                known = _read(run, stamp, measured)
                self._entries[name] = known
                time.sleep(REST_S)
            if known.timing:
                measured.add((known.kind, known.timing.host))
        names = {run.path.name for run in runs}
        for name in self._entries.keys() - names:
            del self._entries[name]
        self._is_first = False


def _rank(found: tuple[str, _Entry]) -> tuple[bool, float]:
    """Sort key: a run of this machine first, then the newest."""
    timing = found[1].timing
    assert timing is not None
    return not timing.host, timing.began


def kind_of(cfg: RunConfig) -> str:
    """Return what two runs must have in common for their steps to take the same time.

    The number of steps, samples and passes of a step may differ, since times are proportional to them.
    """
    model = cfg.model.model_dump(mode="json")
    sides = cfg.data.resolution if cfg.data.has_one_resolution else cfg.data.all_sides
    size = cfg.data.length if families.trains_on(cfg) == "text" else sides
    train = cfg.train.model_dump(mode="json", include={"micro_batch", "precision", "checkpointing", "compile"})
    parallel = cfg.parallel.model_dump(mode="json", exclude={"rendezvous", "max_restarts", "timeout"})
    quantize = cfg.quantize.model_dump(mode="json", exclude={"cache"})
    values = [model, cfg.adapter.type, quantize, size, train, parallel, cfg.optim.type, len(cfg.stages)]
    return json.dumps(values, sort_keys=True)


def _stamp(run: RunDir) -> tuple[int, ...]:
    stamp: list[int] = []
    for file in (run.config_file, run.events_file):
        try:
            stat = file.stat()
        except OSError:
            stamp += (0, 0)
        else:
            stamp += (stat.st_mtime_ns, stat.st_size)
    return tuple(stamp)


def _read(run: RunDir, stamp: tuple[int, ...], measured: Iterable[tuple[str, str]]) -> _Entry:
    """Read a run; its events only where no newer run of its kind was measured."""
    try:
        with run.boundary():
            config = run.config()
            if config.stages:
                return _Entry(stamp)
            launch = Launch.read(run)
            kind, host = kind_of(config), ("" if launch is None or launch.is_on_this_machine else launch.host)
            timing = None if {(kind, host), (kind, "")} & set(measured) else _timing(run, config, host)
    except (InputError, OSError):  # a damaged run, or one of a later version, measures nothing
        return _Entry(stamp)
    return _Entry(stamp, config, kind, timing)


def _timing(run: RunDir, cfg: RunConfig, host: str) -> Timing | None:
    """Measure a run by the beginning and the end of its events; None where it has too few steps."""
    head, tail = _ends(run.events_file)
    steps = [event for event in tail if isinstance(event, StepEvent)]
    if len(steps) < LEAST_STEPS or not head:
        return None
    steps = [step for step in steps[1:] if math.isfinite(step.seconds)]
    parts = [step.seconds_data + step.seconds_forward + step.seconds_backward for step in steps]
    grows = [part if 0 <= part <= step.seconds else step.seconds for part, step in zip(parts, steps, strict=True)]
    if not steps:
        return None
    samplings = _samplings(head) + ([] if head is tail else _samplings(tail))
    begin = steps[0].time - steps[0].seconds
    inside = sum(seconds for at, seconds in _samplings(tail) if begin <= at < steps[-1].time)
    others = steps[-1].time - begin - sum(step.seconds for step in steps) - inside
    step_s, pass_s = statistics.median(step.seconds for step in steps), statistics.median(grows)
    # Seconds until the first step, without samples.
    first = next((event for event in head if isinstance(event, StepEvent)), None)
    until = first.time - first.seconds if first else head[-1].time
    return Timing(
        began=head[0].time,
        host=host,
        start=max(0.0, until - head[0].time - sum(seconds for at, seconds in _samplings(head) if at < until)),
        passes=pass_s,
        update=step_s - pass_s + max(0.0, others) / len(steps),
        sampling=statistics.median(seconds for _, seconds in samplings) if samplings else None,
        end=_end(tail, steps[-1]),
    )


def _end(tail: Sequence[AnyEvent], last: StepEvent) -> float:
    """Seconds after the last step, without samples; 0 where the run did not finish."""
    if not isinstance(tail[-1], StatusEvent) or tail[-1].state != "finished":
        return 0.0
    return max(0.0, tail[-1].time - last.time - sum(s for at, s in _samplings(tail) if at >= last.time))


def _ends(file: Path) -> tuple[Sequence[AnyEvent], Sequence[AnyEvent]]:
    """The first events, and the last ones since the last start."""
    size = os.stat(file).st_size
    start = max(0, size - TAIL_BYTES)
    tail = EventReader(file, start).read()  # a line that is cut off at its beginning is skipped
    head = EventReader(file, at_most=HEAD_BYTES).read() if start else tail
    return head, since_start(tail)


def _samplings(events: Sequence[AnyEvent]) -> list[tuple[float, float]]:
    """(unix seconds, duration) of each set of samples."""
    states = [event for event in events if isinstance(event, StatusEvent)]
    return [(one.time, after.time - one.time) for one, after in pairwise(states) if one.state == "sampling"]


def _sum(parts: Sequence[Estimate], steps: Sequence[int]) -> Estimate:
    """The estimate of a run with stages: its step is the mean one, its earlier run that of the first stage."""
    trained = sum(part.step_s * number for part, number in zip(parts, steps, strict=True))
    return replace(
        parts[0],
        seconds=sum(part.seconds for part in parts),
        step_s=trained / sum(steps),
        has_samples=all(part.has_samples for part in parts),
    )


def _estimated(cfg: RunConfig, steps: int, name: str, entry: _Entry) -> Estimate:
    """Scale a run's times: steps, passes of a step and samples of the same size take their time each."""
    timing, config = entry.timing, entry.config
    assert timing is not None and config is not None
    step_s = timing.passes * cfg.micro_steps / config.micro_steps + timing.update
    sets = _sample_sets(cfg, steps)
    share = _sample_share(cfg, config) if timing.sampling is not None else None
    sampling = sets * timing.sampling * share if share is not None and timing.sampling is not None else 0.0
    seconds = timing.start + steps * step_s + sampling + timing.end
    return Estimate(seconds, step_s, name, config.name, timing.began, timing.host, not sets or share is not None)


def _sample_sets(cfg: RunConfig, steps: int) -> int:
    """Sets of samples: before the first step, every so many steps, and at the end."""
    sample = cfg.sample
    if not sample.every or not (sample.prompts or sample.questions):
        return 0
    return 1 + math.ceil(steps / sample.every)


def _sample_share(cfg: RunConfig, earlier: RunConfig) -> float | None:
    """The time of a set of samples as a share of the earlier run's; None where they are not comparable."""
    one, other = cfg.sample, earlier.sample
    same = ("size", "frames", "guidance", "negative", "scheduler", "tokens")
    if any(vars(one)[name] != vars(other)[name] for name in same) or (one.steps is None) != (other.steps is None):
        return None
    counts = [len(sample.prompts) + len(sample.questions) for sample in (one, other)]
    if not counts[1]:
        return None
    return counts[0] / counts[1] * (one.steps / other.steps if one.steps and other.steps else 1.0)
