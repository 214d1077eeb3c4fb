"""How long a person waits: for the run folder, for the first step with cold and warm caches, for an attached view.

python -m tests.benchmarks.startup          about a minute; exit code 1 when a limit is exceeded
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tests.commands import PRESET, TIMEOUT_S, Started, takes_no_arguments
from tests.runs import make_pictures
from trainer.run import process
from trainer.run.events import EventReader, EventWriter, StatusEvent, StepEvent
from trainer.run.folder import RunDir

FIRST_EVENT_LIMIT_S = 0.5
REPEATS = 5
LONG_RUN = 10_000


@dataclass(frozen=True)
class Waits:
    """Seconds from the start of `launch.py --headless`. run_folder: until it and the first event are on disk."""

    run_folder: float
    first_step: float


def make_preset(folder: Path) -> Path:
    """A run of one step on two ranks in `folder`, with its pictures."""
    make_pictures(folder / "pictures", 4)
    preset = folder / "fox.yaml"
    preset.write_text(PRESET.replace("steps: 2", "steps: 1"), encoding="utf-8")
    return preset


def wait_for_run_folder(preset: Path, name: str) -> tuple[Started, float]:
    """Start a run; the seconds until its first event is on disk."""
    began = time.perf_counter()
    run = preset.parent / name
    started = Started(preset.parent, "--headless", preset, "--run-dir", run, run=run)
    started.wait_for(StatusEvent)
    return started, time.perf_counter() - began


def wait_for_run(preset: Path, name: str, within: float = TIMEOUT_S) -> Waits:
    """Start a run, and see it to its end. within: seconds until its first step."""
    began = time.perf_counter()
    started, run_folder = wait_for_run_folder(preset, name)
    started.wait_for(StepEvent, within)
    first_step = time.perf_counter() - began
    code, _, errors = started.end()
    assert code == 0, errors
    return Waits(run_folder, first_step)


def attach(run: RunDir) -> float:
    """Seconds until a reader that comes later knows the state and all steps of a run."""
    began = time.perf_counter()
    process.status(run)
    EventReader(run.events_file).read()
    return time.perf_counter() - began


def write_long_run(run: RunDir) -> None:
    """Add LONG_RUN steps to a run's events, each like its last one."""
    last = [event for event in EventReader(run.events_file).read() if isinstance(event, StepEvent)][-1]
    with EventWriter(run.events_file) as events:
        for step in range(last.step + 1, last.step + 1 + LONG_RUN):
            events.write(replace(last, step=step))


def main() -> int:
    """Print the medians. Returns 1 when the run folder comes too late."""
    with tempfile.TemporaryDirectory() as name:
        preset = make_preset(Path(name))
        cold = wait_for_run(preset, "cold")
        warm = [wait_for_run(preset, f"warm-{number}") for number in range(REPEATS)]
        run = RunDir.open(Path(name) / "cold")
        write_long_run(run)
        attached = statistics.median(attach(run) for _ in range(REPEATS))
    run_folder = statistics.median(waits.run_folder for waits in warm)
    print(f"run folder and first event  {run_folder:.2f} s (limit {FIRST_EVENT_LIMIT_S} s)")
    print(f"first step, nothing cached  {cold.first_step:.2f} s")
    print(f"first step, all cached      {statistics.median(waits.first_step for waits in warm):.2f} s")
    print(f"attach to {LONG_RUN:,} steps     {attached:.2f} s")
    return int(run_folder > FIRST_EVENT_LIMIT_S)


if __name__ == "__main__":
    takes_no_arguments(__doc__)
    sys.exit(main())
