"""Run folders: two runs, of which a file of the first, of the queue or of what the page keeps is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from PIL import Image

from app import run_screen, run_table
from app.monitor import CHARTS
from app.run_screen import LogWish
from app.studio import Studio
from tests.app.browser import recorded
from tests.fuzz import target
from tests.fuzz.target import CHANGES, ODD_BYTES, Target, changed, refusals
from tests.runs import alone, make_pictures, make_run, run_config, train
from trainer.checkpoint.restore import StoredWeights
from trainer.launcher import preflight
from trainer.run import process, report
from trainer.run.events import EventWriter, SampleEvent, StatusEvent
from trainer.run.folder import RunDir
from trainer.run.manifest import complete

OTHER = "other"
VALUES = st.tuples(
    st.floats(0, 1, exclude_max=True),
    st.one_of(
        st.tuples(st.just("bytes"), CHANGES),
        st.tuples(st.just("whole"), ODD_BYTES),
        st.tuples(st.just("place"), target.KINDS),
    ),
)


@contextmanager
def _prepared(folder: Path) -> Iterator[Callable[[Any], None]]:
    whole, runs = folder / "whole", folder / "runs"
    _fill(whole)
    files = sorted(file.relative_to(whole) for file in whole.rglob("*") if _is_attacked(file.relative_to(whole), file))

    def answer(value: Any) -> None:
        where, (kind, change) = value
        shutil.rmtree(runs, ignore_errors=True)
        shutil.copytree(whole, runs)
        file = runs / files[int(where * len(files))]
        content = file.read_bytes()
        if kind == "place":
            target.put(file, change)
        else:
            file.write_bytes(change if kind == "whole" else changed(content, change))
        _look(Studio(runs))

    yield answer


def _is_attacked(name: Path, file: Path) -> bool:
    return file.is_file() and name.parts[0] not in (OTHER, "pictures", "cache")


def _fill(runs: Path) -> None:
    """A run with a real checkpoint and one without, entries of the queue, a draft, tags, a preset and captions."""
    pictures = make_pictures(runs / "pictures", count=4)
    config = run_config(pictures, train__steps=2, checkpoint__every=1, sample__prompts=[], export__what="none")
    run = make_run(runs, config, "attacked")
    train(alone(), config, run)
    with EventWriter(run.events_file) as events:
        for state in ("starting", "finished"):
            events.write(StatusEvent(state=state, step=2))
        events.write(SampleEvent(step=2, prompt="a boat", index=0, path="samples/1.png"))
    Image.new("RGB", (32, 32)).save(run.samples / "1.png")
    process.Launch(2**22, 1.0, ["python", "-m", "trainer", str(run.path)]).write(run)
    (run.logs / "launch-1.log").write_text("a line\n")
    recorded(runs, OTHER)
    studio = Studio(runs)
    for _ in range(2):
        studio.queue.add(config)
    studio.queue.change(studio.queue.settings)
    studio.save_draft(studio.draft())
    run_table.change_tags(runs, [OTHER], "good, old")


def _look(studio: Studio) -> None:
    """What the page does for both runs, and the command line for the damaged one. The other one is always there."""
    for name in ("attacked", OTHER):
        with refusals():
            _watch(studio, studio.run(name))
    with refusals():
        assert OTHER in [run.path.name for run in studio.find_runs()]
    with refusals():
        assert OTHER in [summary.name for summary in run_table.Summaries(studio).all()]
    with refusals():
        assert len(studio.queue.waiting()) <= 2
        assert isinstance(studio.queue.settings.noted, int)
    with refusals():
        studio.draft()
    run = RunDir(studio.runs / "attacked")
    with refusals():
        process.require_ended(RunDir.open(run.path))
        preflight.continued_run(run, ())
    with refusals():
        for checkpoint in complete(run.checkpoints):
            for weight in StoredWeights(checkpoint).values():
                assert weight.numel()


def _watch(studio: Studio, run: RunDir) -> None:
    follower = studio.follower(run)
    view = follower.view()
    assert view.sentence
    for chart in CHARTS:
        follower.lines(chart)
    for source in run_screen.log(run, LogWish())["sources"]:
        run_screen.log(run, LogWish(source))
    parts = {"head": run_screen.head(follower, view), **run_screen.overview(studio, follower, view, {})}
    run_screen.changes(parts, {})
    report.write_report(run)


RUN_FOLDERS = Target("run folders", VALUES, _prepared)
