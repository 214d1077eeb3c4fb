"""Run folders: two runs, of which a file of the first, of the queue or of what the page keeps is damaged."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from PIL import Image

from app.runs import run_screen, run_table, run_trash
from app.runs.monitor import Follower
from app.runs.run_screen import LogWish
from app.studio import Studio
from tests.app.browser import recorded
from tests.fuzz import target
from tests.fuzz.target import CHANGES, ODD_BYTES, Target, changed, refusals
from tests.runs import alone, make_pictures, make_run, run_config, train
from trainer.checkpoint.restore import StoredWeights
from trainer.launcher import commands, preflight
from trainer.run import process
from trainer.run.events import EventWriter, SampleEvent, StatusEvent
from trainer.run.folder import RunDir
from trainer.run.manifest import complete
from trainer.view import report

OTHER, ATTACKED = "other", "attacked"


def _lay_link(run: RunDir) -> None:
    run.samples.rename(run.path / "former-samples")
    run.samples.symlink_to(run.path.parent.parent / "home")


ACTIONS: Mapping[str, Callable[[RunDir], object]] = {
    "delete": run_trash.delete,
    "record_end": process.record_end,
    "look": lambda run: Follower(run).view(),
    "resume": lambda run: preflight.continued_run(run, ("train.steps=5",)),
    "export": lambda run: commands.begin_export(run, run.config().exporting("adapter", None, None)).kill(),
    "list": lambda run: run_table.Summaries(Studio(run.path.parent)).all(),
    "move away": lambda run: run.path.rename(run.path.with_name(f".moved-{threading.get_ident()}")),
    "lay a link": _lay_link,
}
"""What two windows and a file manager may do to the attacked run at the same moment."""
VALUES = st.tuples(
    st.floats(0, 1, exclude_max=True),
    st.one_of(
        st.tuples(st.just("bytes"), CHANGES),
        st.tuples(st.just("whole"), ODD_BYTES),
        st.tuples(st.just("place"), target.KINDS),
        st.tuples(st.just("wrong"), st.tuples(target.SCALE, target.WRONG)),
        st.tuples(st.just("link"), st.sampled_from([".", "secret", "folder", "folder/secret", "nothing"])),
        st.tuples(st.just("race"), st.lists(st.sampled_from(sorted(ACTIONS)), min_size=2, max_size=4)),
    ),
)


@contextmanager
def _prepared(folder: Path) -> Iterator[Callable[[Any], None]]:
    whole, runs, home = folder / "whole", folder / "runs", folder / "home"
    _fill(whole)
    (home / "folder").mkdir(parents=True)
    for file in (home / "secret", home / "folder" / "secret"):
        file.write_text("nothing may change or read this")
    names = sorted(path.relative_to(whole) for path in whole.rglob("*") if _is_attacked(path.relative_to(whole)))
    files = [name for name in names if (whole / name).is_file()]
    in_run = [name for name in names if name.parts[0] == ATTACKED and len(name.parts) > 1]
    before = _content(home), _content(whole / OTHER)

    def answer(value: Any) -> None:
        where, (kind, change) = value
        while runs.exists():  # a thread of the studio before this one may still write into its drafts, also later
            shutil.rmtree(runs, ignore_errors=True)
        shutil.copytree(whole, runs, dirs_exist_ok=True)
        studio = Studio(runs)
        if kind == "race":
            _at_once(RunDir(runs / ATTACKED), change)
        elif kind == "link":
            _put_link(runs / in_run[int(where * len(in_run))], home / change)
        else:
            _damage(runs / files[int(where * len(files))], kind, change)
        _look(studio)
        assert (_content(home), _content(runs / OTHER)) == before

    yield answer


def _is_attacked(name: Path) -> bool:
    return name.parts[0] not in (OTHER, "pictures", "cache")


def _content(folder: Path) -> dict[str, bytes]:
    """{path: content} of the files in a folder, but for the report, which looking writes."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "report.html")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def _damage(file: Path, kind: str, change: Any) -> None:
    content = file.read_bytes()
    match kind:
        case "place":
            target.put(file, change)
        case "whole":
            file.write_bytes(change)
        case "wrong":
            file.write_bytes(target.with_wrong_type(content, *change))
        case _:
            file.write_bytes(changed(content, change))


def _put_link(path: Path, leads_to: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to(leads_to)


def _at_once(run: RunDir, actions: Sequence[str]) -> None:
    """Do all of them at the same moment. Each succeeds, or is refused by a sentence."""
    found: list[BaseException] = []
    begin = threading.Barrier(len(actions))

    def act(name: str) -> None:
        begin.wait()
        try:
            with suppress(OSError), refusals():  # the page shows the words of the system
                ACTIONS[name](run)
        except BaseException as error:  # noqa: BLE001 - raised where the threads have ended
            found.append(error)

    threads = [threading.Thread(target=act, args=(name,)) for name in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if found:
        raise found[0]
    shutil.rmtree(run.path.parent / "cache", ignore_errors=True)


def _fill(runs: Path) -> None:
    """A run with a real checkpoint and one without, entries of the queue, a draft, tags, a preset and captions."""
    pictures = make_pictures(runs / "pictures", count=4)
    config = run_config(pictures, train__steps=2, checkpoint__every=1, sample__prompts=[], export__what="none")
    run = make_run(runs, config, ATTACKED)
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
    for name in (ATTACKED, OTHER):
        with refusals():
            _watch(studio, studio.run(name))
    with refusals():
        assert OTHER in [run.path.name for run in studio.find_runs()]
    with refusals():
        assert OTHER in [summary.name for summary in run_table.Summaries(studio).all()]
    with refusals():
        studio.live.views()
    with refusals():
        assert len(studio.queue.waiting()) <= 2
        assert isinstance(studio.queue.settings.noted, int)
    with refusals():
        studio.draft()
    run = RunDir(studio.runs / ATTACKED)
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
    for chart in follower.charts():
        follower.lines(chart)
    for source in run_screen.log(run, LogWish())["sources"]:
        run_screen.log(run, LogWish(source))
    parts = {"head": run_screen.head(follower, view), **run_screen.overview(studio, follower, view, {})}
    run_screen.changes(parts, {})
    report.write_report(run)


RUN_FOLDERS = Target("run folders", VALUES, _prepared)
