"""Run folders, checkpoints, caches and queues of another version are refused in one sentence, which changes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from app.runs.run_screen import LogWish
from app.runs.run_table import Summaries
from app.studio import Studio
from app.web.pages import files as files_page
from app.web.pages import run as run_page
from tests.app.browser import recorded
from tests.commands import launch_py
from tests.run.test_hostile_folders import COMMANDS
from tests.runs import alone, make_pictures, make_run, run_config
from trainer.checkpoint.restore import newest_intact
from trainer.launcher import preflight
from trainer.launcher.queue import Queue
from trainer.plan import calibration
from trainer.plan.calibration import Measured
from trainer.run import manifest
from trainer.run.drawings import trained_weights
from trainer.run.folder import RunDir
from trainer.run.manifest import MANIFEST, sealed
from trainer.system.errors import InputError

READS = "and this version of ShardStudio reads format 1"
RUN_REMEDY = "continue the run with the version that made it"
FORMATS = {"format 2": "format: 2\n", "no format": None}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of one image with an empty checkpoint, and another run next to it."""
    recorded(tmp_path / "runs", "mine")
    run = make_run(tmp_path / "runs", run_config(make_pictures(tmp_path / "photos", 1)), "fox")
    checkpoint = run.checkpoints / "step-000001"
    checkpoint.mkdir()
    (checkpoint / MANIFEST).write_bytes(sealed({"step": 1, "files": {}}))
    return run


def mark(folder: Path, text: str | None) -> Path:
    """Let a folder say a format, or none. Returns the path that a refusal names."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "format"
    if text is not None:
        file.write_text(text)
        return file
    file.unlink(missing_ok=True)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("has", FORMATS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_folder_of_another_version_is_refused_by_every_command(run: RunDir, command: str, has: str) -> None:
    named = mark(run.path, FORMATS[has])
    before = contents(run.path)
    with pytest.raises(InputError) as caught:
        COMMANDS[command](run)
    assert str(caught.value) == f"{named}: has {has}, {READS}; {RUN_REMEDY}"
    assert contents(run.path) == before


@pytest.mark.parametrize("text", ["", "format: two", "format: " + "9" * 5000, "\0" * 100], ids=range(4))
def test_a_file_that_says_no_number_is_shown(run: RunDir, text: str) -> None:
    (run.path / "format").write_text(text)
    with pytest.raises(InputError) as caught:
        run.guard()
    assert str(caught.value).endswith(f", {READS}; {RUN_REMEDY}")
    assert len(str(caught.value).removeprefix(str(run.path))) < 200 and str(caught.value).isprintable()


@pytest.mark.parametrize("has", FORMATS)
def test_the_list_of_runs_shows_a_run_of_another_version_with_the_sentence(run: RunDir, has: str) -> None:
    mark(run.path, FORMATS[has])
    rows = {row.name: row for row in Summaries(Studio(run.path.parent)).changes(budget_s=60).rows}
    assert (rows["fox"].state, rows["mine"].problem) == ("damaged", "")
    assert f"has {has}, {READS}" in rows["fox"].problem


@pytest.mark.parametrize("has", FORMATS)
@pytest.mark.parametrize("command", ["resume", "continue", "export"])
def test_a_checkpoint_of_another_version_is_refused_and_stays(run: RunDir, command: str, has: str) -> None:
    file = run.checkpoints / "step-000001" / MANIFEST
    facts = json.loads(file.read_text())
    file.write_bytes(sealed(facts | {"format": 2} if FORMATS[has] else facts).replace(b' "format": 1,\n', b""))
    with pytest.raises(InputError) as caught:
        COMMANDS[command](run)
    assert str(caught.value) == (
        f"{file}: has {has}, {READS}; use the version that wrote it, or remove this checkpoint, so that the one before "
        "it is taken"
    )
    assert file.is_file()


def with_another(run: RunDir, foreign: int) -> None:
    """Give the run a second checkpoint, and one of the two the format 2."""
    for step in (1, 2):
        checkpoint = run.checkpoints / f"step-{step:06d}"
        checkpoint.mkdir(exist_ok=True)
        content = sealed({"step": step, "files": {}, **({"format": 2} if step == foreign else {})})
        (checkpoint / MANIFEST).write_bytes(content)


@pytest.mark.parametrize("foreign", [1, 2])
def test_the_page_shows_and_deletes_a_checkpoint_of_another_version(run: RunDir, foreign: int) -> None:
    with_another(run, foreign)
    studio = Studio(run.path.parent)
    page = files_page.calls(studio)
    run_page.calls(studio)["run_view"](name="fox", known={}, log=LogWish())
    rows = {row["step"]: row for row in page["files_list"]("fox")["checkpoints"]}
    remedy = "use the version that wrote it, or remove this checkpoint"
    effect = ", so that the one before it is taken" if foreign == 2 else ""
    assert rows[foreign]["problem"] == f"{MANIFEST}: has format 2, {READS}; {remedy}{effect}"
    assert rows[foreign]["consequence"] == "Neither a resume nor an export can use it."
    assert rows[3 - foreign]["problem"] == ""
    page["files_delete_checkpoint"]("fox", rows[foreign]["name"])
    assert [path.name for path in manifest.named(run.checkpoints)] == [f"step-{3 - foreign:06d}"]


def test_a_newest_checkpoint_is_taken_though_an_older_one_is_of_another_version(run: RunDir) -> None:
    with_another(run, 1)
    preflight.continued_run(run, ())
    assert newest_intact(run.checkpoints, alone()) == (run.checkpoints / "step-000002", [])
    assert manifest.to_export(run) == trained_weights(run) == run.checkpoints / "step-000002"


def test_an_older_checkpoint_is_not_taken_for_a_newest_one_of_another_version(run: RunDir) -> None:
    with_another(run, 2)
    before = contents(run.path)
    for take in (
        lambda: preflight.continued_run(run, ()),
        lambda: newest_intact(run.checkpoints, alone()),
        lambda: manifest.to_export(run),
        lambda: trained_weights(run),
    ):
        with pytest.raises(InputError, match=f"step-000002/{MANIFEST}: has format 2, {READS}"):
            take()
    assert contents(run.path) == before


@pytest.mark.parametrize("has", FORMATS)
def test_a_cache_of_another_version_is_refused(run: RunDir, has: str) -> None:
    examples = run.path.parent / "cache" / "examples"
    (examples / "ab").mkdir(parents=True)
    named = mark(examples, FORMATS[has])
    with pytest.raises(InputError) as caught:
        preflight.continued_run(run, ())
    assert str(caught.value) == (
        f"{named}: has {has}, {READS}; remove {examples}, to encode the images again, or set data.cache to another "
        "folder"
    )


def test_a_folder_with_much_else_becomes_a_cache(run: RunDir) -> None:
    (run.path.parent / "cache" / "examples" / "of mine").mkdir(parents=True)
    preflight.check(preflight.load_config(run.config_file, ()), cache=run.path.parent / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["run", "checkpoint"])
@pytest.mark.parametrize("option", ["--resume", "--export"])
def test_the_command_line_refuses_in_one_line(run: RunDir, tmp_path: Path, place: str, option: str) -> None:
    if place == "run":
        mark(run.path, "format: 2\n")
    else:
        (run.checkpoints / "step-000001" / MANIFEST).write_text(json.dumps({"format": 2}))
    done = launch_py(tmp_path, option, run.path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"has format 2, {READS}; " in done.stderr


@pytest.mark.parametrize("format", [2, None])
def test_a_queued_run_of_another_version_is_named_and_the_others_wait(run: RunDir, format: int | None) -> None:
    queue = Queue(run.path.parent)
    for _ in range(2):
        queue.add(run.config())
    file = queue.runs / "queue" / "waiting" / "000001.json"
    file.write_text(json.dumps(asdict(queue.waiting()[0]) | ({} if format is None else {"format": format})))
    has = "no format" if format is None else "format 2"
    assert queue.problems() == [f"{file}: has {has}, {READS}; use the version that wrote it, or remove it"]
    assert [entry.number for entry in queue.waiting()] == [2]


def test_measurements_of_another_version_are_not_used(tmp_path: Path) -> None:
    known = Measured("card", 1, 1.0, 1, 1, 1, 1.0)
    calibration.keep(tmp_path, known)
    file = tmp_path / "plans" / "measured.jsonl"
    line = json.loads(file.read_text())
    with file.open("a") as lines:
        lines.write(json.dumps(line | {"format": 2}) + "\n" + json.dumps(asdict(replace(known, ranks=2))) + "\n")
    assert list(calibration._read(file)) == [known]
