"""Run folders of strangers: nothing is written, sent or deleted through what lies in them."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from app.runs import run_trash
from app.runs.monitor import Follower, explained
from app.runs.run_table import Summaries
from app.studio import Studio
from app.web.pages import runs as runs_page
from tests.app.browser import recorded
from trainer.launcher import commands, preflight, torchrun
from trainer.launcher.jobs import uploads
from trainer.launcher.queue import Queue
from trainer.run import process
from trainer.run.drawings import DrawingRequest
from trainer.run.events import EventWriter
from trainer.run.folder import LINK, TRASH, RunDir
from trainer.run.manifest import sealed
from trainer.system.errors import InputError

PLACES = (
    "config.yaml", "launch.json", "events.jsonl", ".identity", "notes.md", "report.html", "stores", "wandb", "trackers",
    "ranks", "ranks/rank0.jsonl", "logs", "logs/export-answer.txt", "logs/export.log", "logs/stacks/rank0.txt",
    "logs/launch-1.log", "samples", "samples/step-000040-0.png", "checkpoints", "checkpoints/step-000040",
    "checkpoints/step-000040/manifest.json", "requests", "requests/stop", "export", "export/assistant/merges.txt",
    "stages/1-tune/checkpoints", "drawings",
)  # fmt: skip
COMMANDS: Mapping[str, Callable[[RunDir], object]] = {
    "open": lambda run: RunDir.open(run.path),
    "follow": Follower,
    "resume": lambda run: commands.resume(run.path, ()),
    "join": lambda run: commands.join(run.path, (), 1),
    "continue": lambda run: preflight.continued_run(run, ()),
    "start": lambda run: torchrun.start(run.config(), run),
    "export": lambda run: commands.export(run.path, "auto", None, None),
    "draw": lambda run: commands.begin_drawing(run, DrawingRequest(("a cat",))),
    "upload": lambda run: uploads.begin(run, "me/fox", False, False),
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs: fox, of a stranger, and mine."""
    for name in ("fox", "mine"):
        run = recorded(tmp_path / "runs", name)
        (run.checkpoints / "step-000040").mkdir()
        (run.checkpoints / "step-000040" / "manifest.json").write_bytes(sealed({"step": 1, "files": {}}))
    return tmp_path / "runs"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    return make_home(tmp_path / "home")


def make_home(folder: Path) -> Path:
    """Make a folder of the user's, which nothing may change: with a file, and another below."""
    (folder / "papers").mkdir(parents=True)
    (folder / ".bashrc").write_text("alias ll='ls -l'\n")
    (folder / "papers" / "thesis.txt").write_text("years of work\n")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put_link(run: RunDir, place: str, victim: Path) -> Path:
    """Lay a link into the place of a file or folder of the run."""
    path = run.path / place
    is_folder = path.is_dir() or path.suffix == ""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(victim / "papers" if is_folder else victim / ".bashrc")
    return path


@pytest.mark.parametrize("place", PLACES)
def test_a_run_folder_with_a_link_is_named_at_every_door_and_harms_nothing(
    runs: Path, victim: Path, place: str
) -> None:
    before, mine = content(victim), content(runs / "mine")
    run, studio = RunDir(runs / "fox"), Studio(runs)
    odd = put_link(run, place, victim)
    sentence = f"{odd}: {LINK}"
    # The config is read through its link where the door is that of a function that is given it.
    for door in COMMANDS if place != "config.yaml" else COMMANDS.keys() - {"start"}:
        with pytest.raises(InputError) as refused:
            COMMANDS[door](run)
        assert (door, str(refused.value)) == (door, sentence)
    for call in (lambda: studio.resume(run), lambda: studio.run("fox")):
        with pytest.raises(InputError) as refused:
            call()
        assert str(refused.value) == sentence
    rows = {row.name: (row.state, row.problem) for row in Summaries(studio).all()}
    assert rows == {"mine": ("finished", ""), "fox": ("damaged", sentence.removeprefix(f"{run.path}/"))}
    assert studio.live.views() == []
    assert (content(victim), content(runs / "mine")) == (before, mine)


def test_events_are_never_appended_through_a_link_or_to_a_second_name(runs: Path, victim: Path) -> None:
    """The second line behind the door: an archive that is unpacked in the home can hold such a name, too."""
    before, run = content(victim), RunDir(runs / "fox")
    for make in (Path.symlink_to, Path.hardlink_to, lambda path, _: os.mkfifo(path)):
        run.events_file.unlink()
        make(run.events_file, victim / ".bashrc")
        with pytest.raises(InputError, match=r"events.jsonl: (not a regular file|has a second name)"):
            EventWriter(run.events_file)
        assert content(victim) == before
    run.events_file.unlink()
    run.events_file.symlink_to(victim / ".bashrc")
    for look in (
        process.record_end,
        process.status,
        process.terminate,
        lambda run: process.record_mistake(run, 0, "no"),
    ):
        with pytest.raises(InputError, match=r"events.jsonl: not a regular file"):
            look(run)
    assert content(victim) == before


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_is_neither_a_file_nor_a_folder_is_named(runs: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(runs / "fox")
    monkeypatch.chdir(run.logs)  # the name of a socket may have 107 characters
    if kind == "pipe":
        os.mkfifo("odd")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("odd")
    with pytest.raises(InputError) as refused:
        RunDir.open(run.path)
    assert str(refused.value) == f"{run.logs}/odd: not a regular file; remove it, or put a file in its place"


def test_links_of_wandb_and_to_the_run_folder_itself_are_no_harm(runs: Path, tmp_path: Path) -> None:
    (runs / "fox" / "wandb" / "run-1" / "logs").mkdir(parents=True)
    (runs / "fox" / "wandb" / "run-1" / "logs" / "debug-core.log").symlink_to("/var/log/core-debug.log")
    (tmp_path / "other-disk").symlink_to(runs)
    assert RunDir.open(tmp_path / "other-disk" / "fox").config().name == "tiny"


def test_a_link_that_is_taken_away_or_laid_later_is_noticed(runs: Path, victim: Path) -> None:
    run = RunDir.open(runs / "fox")
    os.utime(run.logs, (1, 1))  # as a folder that was changed long ago
    run.guard()
    link = put_link(run, "logs/export.log", victim)
    with pytest.raises(InputError):
        run.guard()
    link.unlink()
    run.guard()


def test_a_folder_that_has_not_changed_is_not_read_again(runs: Path) -> None:
    """The page asks several times a second; a run has thousands of samples."""
    run = RunDir(runs / "fox")
    for number in range(5000):
        (run.samples / f"step-{number:06d}-0.png").touch()
    for folder in (run.path, *run.path.rglob("*")):
        os.utime(folder, (1, 1))
    run.guard()
    began = time.process_time()
    for _ in range(100):
        run.guard()
    assert time.process_time() - began < 0.25  # 2 ms each; 0.1 ms when it was written, 4 ms if read again


@pytest.mark.parametrize(("around", "mode", "expected"), [(0o700, 0o755, 0o700), (0o2770, 0o2755, 0o2750)])
def test_an_unpacked_run_folder_is_closed_to_others_when_it_is_first_opened(
    runs: Path, around: int, mode: int, expected: int
) -> None:
    """Its group keeps what it may do where it shares the folder of all runs."""
    for name in ("fox", "mine"):
        (runs / name).chmod(mode)
    runs.chmod(around)
    RunDir.open(runs / "fox")
    assert {row.state for row in Summaries(Studio(runs)).all()} == {"finished"}
    assert [stat.S_IMODE((runs / name).stat().st_mode) for name in ("fox", "mine")] == [expected] * 2


@pytest.mark.parametrize("place", ["events.jsonl", "checkpoints", "launch.json"])
def test_a_strangers_run_is_deleted_and_nothing_that_it_links_to(runs: Path, victim: Path, place: str) -> None:
    before, mine = content(victim), content(runs / "mine")
    put_link(RunDir(runs / "fox"), place, victim)
    answer = runs_page.calls(Studio(runs))["runs_delete"](["fox"])
    if place == "launch.json":  # it could name a process that runs
        assert (answer["deletions"], "launch.json: damaged" in answer["refused"][0]) == ([], True)
        assert run_trash.deletions(runs) == []
    else:
        assert [path.name for path in runs.iterdir() if path.name not in ("cache", TRASH)] == ["mine"]
        assert [deleted.name for deleted in run_trash.deletions(runs)] == answer["deletions"]
        assert run_trash.empty(runs) == 1
        assert list((runs / TRASH).iterdir()) == list(runs.glob(".deleted-*")) == []
    assert (content(victim), content(runs / "mine")) == (before, mine)


def test_a_run_folder_that_is_a_link_is_left_to_its_owner(runs: Path, tmp_path: Path) -> None:
    (runs / "linked").symlink_to(runs / "mine")
    with pytest.raises(InputError, match=r"linked: is a link; remove it by hand"):
        run_trash.delete(RunDir(runs / "linked"))
    assert (runs / "linked").is_symlink()


def test_a_deletion_that_cannot_remove_a_file_names_the_folder_that_is_left(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", f"{path}/logs/.nfs1")  # as of a log that is open on NFS

    monkeypatch.setattr("shutil.rmtree", busy)
    name = run_trash.delete(RunDir(runs / "fox"))
    with pytest.raises(InputError) as error:
        run_trash.empty(runs)
    [left] = runs.glob(".deleted-*")
    assert str(error.value) == (
        f"{name}: files could not be removed (Device or resource busy: {left}/logs/.nfs1); remove the folder {left} "
        "by hand"
    )


def test_what_an_interrupted_deletion_has_left_is_removed_when_the_page_starts(runs: Path) -> None:
    (runs / "fox").rename(runs / ".deleted-1")
    studio = Studio(runs)
    assert [run.path.name for run in studio.find_runs()] == ["mine"]
    studio.prepare()
    assert not (runs / ".deleted-1").exists()


def test_a_process_that_waited_for_the_lock_of_a_deleted_run_does_nothing(runs: Path) -> None:
    """Another window deletes the run meanwhile, or a run of this name is made again."""
    run, said = RunDir(runs / "fox"), []

    def wait() -> None:
        try:
            torchrun.start(config, run)
        except InputError as error:
            said.append(str(error))

    config = run.config()
    for is_made_again in (False, True):
        waiting = threading.Thread(target=wait)
        with run.locked():
            waiting.start()
            time.sleep(0.2)
            shutil.copytree(run.path, runs / "again")
            run.path.rename(runs / f".deleted-{is_made_again}")
            if is_made_again:
                shutil.copytree(runs / "again", run.path)
        waiting.join()
        assert run.path.exists() == is_made_again
        shutil.rmtree(run.path, ignore_errors=True)
        (runs / "again").rename(run.path)
    assert said == [f"{run.path}: the run folder was deleted or moved away"] * 2
    assert not run.launch_file.exists()


def test_of_two_windows_that_delete_a_run_one_does_and_the_other_says_why_not(runs: Path) -> None:
    answers: list[dict[str, Any]] = []
    at_once = threading.Barrier(8)

    def click() -> None:
        window = runs_page.calls(Studio(runs))["runs_delete"]
        at_once.wait()
        answers.append(window(["fox"]))

    windows = [threading.Thread(target=click) for _ in range(8)]
    for window in windows:
        window.start()
    for window in windows:
        window.join()
    refused = [sentence for answer in answers for sentence in answer["refused"]]
    assert (sum(len(answer["deletions"]) for answer in answers), len(refused)) == (1, 7)
    for sentence in refused:
        assert sentence.endswith((": the run folder was deleted or moved away", f"name one of the runs in {runs}"))
    assert sorted(path.name for path in runs.iterdir()) == [TRASH, "mine"]
    assert [path.name for path in (runs / TRASH).glob("*/*")] == ["fox"]


@pytest.mark.slow  # eight starts
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.15, 0.3, 0.6, 1.0])
def test_a_run_that_is_resumed_in_one_window_and_deleted_in_another_is_never_half_deleted(
    runs: Path, delay_s: float
) -> None:
    run, studio, said = RunDir(runs / "fox"), Studio(runs), []
    before = content(run.path)

    def resume() -> None:
        try:
            studio.resume(studio.run("fox"))
        except (InputError, OSError) as error:
            said.append(explained(error))

    first = threading.Thread(target=resume)
    first.start()
    time.sleep(delay_s)
    answer = runs_page.calls(Studio(runs))["runs_delete"](["fox"])
    first.join()
    try:
        if answer["deletions"]:
            assert (len(said), run.path.exists()) == (1, False)
        else:
            assert (said, answer["refused"]) == ([], ["fox: is running; stop it first"])
            assert process.alive(run)
            assert before.keys() <= content(run.path).keys()
    finally:
        if run.path.exists():
            process.terminate(run)
    assert [path.name for path in runs.iterdir() if path.name.startswith(".deleted")] == []


def test_a_queued_run_whose_folder_was_exchanged_is_shown_as_damaged_and_not_settled(runs: Path, victim: Path) -> None:
    run, queue = RunDir(runs / "fox"), Queue(runs)
    put_link(run, "logs/launch-1.log", victim)
    entry = queue.add(run.config())
    taken = queue.runs / "queue" / "taken"
    text = (queue.runs / "queue" / "waiting" / "000001.json").read_text().replace('"run": ""', '"run": "fox"')
    (taken / "000001.json").write_text(text)
    queue.remove(entry.number)
    (entry,) = queue.taken()
    assert queue.state_of(entry) == f"damaged: {run.logs}/launch-1.log: {LINK}"
    assert queue.has_failed(entry)
    assert queue.running() == []
