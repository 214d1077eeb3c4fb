"""Two pages on one folder of runs: nothing that one of them saved is lost by the other."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from app.data import captions as caption_files
from app.data.captions import Captions, Card
from app.data.thumbnails import Thumbnails
from app.form import draft as form
from app.form.draft import Draft
from app.runs import run_table
from app.studio import Studio
from app.web.served_files import Downloads
from trainer.config.load import ConfigError, load_config, load_config_text
from trainer.run.folder import FORMAT
from trainer.system.errors import InputError
from trainer.system.files import write_folder_format

TAGGER = """
from pathlib import Path; from app.runs import run_table; import sys
print("ready", flush=True); input()
for number in range(20): run_table.change_tags(Path(sys.argv[1]), [f"{sys.argv[2]}-{number}"], "tag")
"""
WRITER = """
from pathlib import Path; from app.data.captions import Captions, Card; import sys
captions = Captions(Path(sys.argv[1]) / "drafts" / "captions.jsonl")
print("ready", flush=True); input()
for number in range(20): captions.write(Card(Path(sys.argv[1]) / f"{sys.argv[2]}.png", ""), f"caption {number}")
"""
SAVER = """
from pathlib import Path; from app.form import draft as form; from app.form.draft import Draft
from app.studio import Studio; import sys
from trainer.system.errors import InputError
studio = Studio(Path(sys.argv[1])); checked = form.check(Draft(studio.presets()["quickstart"])); saved = []
print("ready", flush=True); input()
for number in range(20):
    try: studio.save_preset(checked, f"p{number}"); saved.append(number)
    except InputError: pass
print(*saved)
"""


def two(program: str, folder: Path) -> list[str]:
    """What two processes print that run a program at the same time."""
    processes = [
        subprocess.Popen([sys.executable, "-c", program, folder, name], stdin=-1, stdout=-1, text=True)
        for name in ("a", "b")
    ]
    assert [process.stdout and process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return printed


def test_two_pages_that_tag_runs_lose_no_tag(tmp_path: Path):
    two(TAGGER, tmp_path)
    assert len(run_table.read_tags(tmp_path)) == 40


def test_two_pages_that_write_captions_lose_none_of_what_can_be_taken_back(tmp_path: Path):
    two(WRITER, tmp_path)
    assert len((tmp_path / "drafts" / "captions.jsonl").read_text().splitlines()) == 40
    captions = Captions(tmp_path / "drafts" / "captions.jsonl")
    assert [captions.undo() for _ in range(41)] == [1] * 40 + [0]
    assert not (tmp_path / "a.txt").exists() and not (tmp_path / "b.txt").exists()


def test_of_two_pages_that_save_a_preset_of_one_name_one_is_refused(tmp_path: Path):
    first, second = (set(numbers.split()) for numbers in two(SAVER, tmp_path))
    assert first | second == {str(number) for number in range(20)} and not first & second
    assert [file.name for file in (tmp_path / "presets").glob(".*")] == []


def change(number: int) -> str:
    return json.dumps({"file": f"/x/{number}.txt", "before": "word " * 60, "after": "x", "batch": number}) + "\n"


def test_a_keystroke_after_thirty_thousand_others_is_as_fast_as_the_first(tmp_path: Path):
    log = tmp_path / "drafts" / "captions.jsonl"
    log.parent.mkdir()
    log.write_text("".join(map(change, range(1, 30_001))))
    began, read = time.process_time(), log.stat().st_size
    Captions(log).write(Card(tmp_path / "a.png", ""), "a boat")
    assert time.process_time() - began < 0.1
    assert log.stat().st_size - read < 200


def test_what_can_be_undone_in_a_folder_is_known_soon_after_thirty_thousand_changes_in_others(tmp_path: Path):
    log = tmp_path / "drafts" / "captions.jsonl"
    captions = Captions(log)
    captions.write(Card(tmp_path / "a.png", ""), "a boat")
    with log.open("a") as lines:
        lines.writelines(map(change, range(2, 30_002)))
    began = time.process_time()
    assert captions.undoable([tmp_path]) == 1
    assert time.process_time() - began < 0.2
    assert captions.undo([tmp_path]) == 1 and captions.undoable() == 1
    assert len(log.read_text().splitlines()) == 30_000


def test_a_long_history_loses_its_older_half_and_keeps_what_was_changed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(caption_files, "MOST_HISTORY", 40_000)
    captions = Captions(tmp_path / "captions.jsonl")
    together = [(Card(tmp_path / f"{number}.png", "word"), None) for number in range(200)]
    assert captions.edit(together, lambda _: "a boat") == (200, [])
    size = (tmp_path / "captions.jsonl").stat().st_size
    for number in range(250):
        captions.write(Card(tmp_path / "a.png", ""), f"caption {number}")
        size = max(size, (tmp_path / "captions.jsonl").stat().st_size)
    assert size < 45_000
    undone = []
    while count := captions.undo():
        undone.append(count)
    assert set(undone[:-1]) == {1} and undone[-1] in (1, 200)
    assert captions.problem == ""


def test_damaged_lines_of_the_history_are_passed_over_and_named(tmp_path: Path):
    log = tmp_path / "captions.jsonl"
    captions = Captions(log)
    captions.write(Card(tmp_path / "a.png", ""), "one")
    with log.open("a") as lines:
        lines.write('{"half of a li')
    captions.write(Card(tmp_path / "a.png", ""), "two")
    assert captions.undo() == 1 and (tmp_path / "a.txt").read_text() == "one\n"
    assert captions.undo() == 1 and not (tmp_path / "a.txt").exists()
    assert captions.problem == f"{log}: 1 line is damaged and skipped; remove the file to clear the history"


@pytest.mark.parametrize("name", ["queue", "drafts", "presets", "cache", "thumbnails", "downloads"])
def test_a_folder_next_to_the_runs_is_never_a_run_and_cannot_be_deleted(tmp_path: Path, name: str):
    (tmp_path / name / "logs").mkdir(parents=True)
    (tmp_path / name / "config.yaml").write_text("name: x\n")
    studio = Studio(tmp_path)
    with pytest.raises(InputError, match="not a run folder; name one of the runs"):
        studio.run(name)
    assert studio.find_runs() == []


def test_what_the_page_keeps_can_be_read_by_its_owner_only(tmp_path: Path):
    for name in ("queue", "drafts", "presets", "thumbnails", "downloads"):  # as a user may have made them
        (tmp_path / name).mkdir(mode=0o755)
    Image.new("RGB", (64, 64)).save(tmp_path / "private.png")
    (tmp_path / "tags.json").write_text("{}")
    studio = Studio(tmp_path)
    checked = form.check(Draft(studio.presets()["quickstart"]))
    studio.save_preset(checked, "mine")
    studio.save_draft(checked.draft)
    studio.queue.add(checked.config)
    run_table.change_tags(tmp_path, ["a"], "tag")
    Thumbnails(tmp_path / "thumbnails").of(tmp_path / "private.png")  # as a notebook does
    Downloads(tmp_path / "downloads").offer((tmp_path / "private.png").rename(tmp_path / "settings.json"))
    modes = {file.name: oct(stat.S_IMODE(file.stat().st_mode)) for file in tmp_path.iterdir()}
    folders = dict.fromkeys(("queue", "drafts", "presets", "thumbnails", "downloads"), "0o700")
    assert modes == folders | {"tags.json": "0o600", "settings.json": modes["settings.json"]}


def lines(head: str, line: str, count: int) -> str:
    return head + "".join(line.format(number) for number in range(count))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (lines("model: {family: flux2}\n", "trane_{}: 1\n", 3000), "trane_0: unknown field"),
        (lines("train:\n", "  stepz{}: 1\n", 3000), "train.stepz0: unknown field; did you mean 'train.steps'?"),
        (lines("data:\n  folders:\n", "    - pathh: {}\n", 5000), "data.folders[0].path: is needed"),
        (lines("stages:\n", "  - {{name: a{}, set: {{train.steps: 3}}}}\n", 2500), "stages: has 2500 stages"),
        ("# " + "x" * 2**17, "longer than 131072 characters; a config is shorter, remove what is not part of it"),
        ("a: " + "[" * 2000, "nested deeper than 20 levels; a config is flatter than that"),
    ],
    ids=["unknown fields", "in a section", "folders", "stages", "long", "deep"],
)
def test_any_config_is_answered_within_a_second(text: str, said: str):
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config_text(f"{text}\n", ("data.path=/", "model.family=flux2") if "stages" in said else (), Path("x"))
    assert said in str(caught.value)
    assert time.process_time() - began < 1.5  # of a core that other work slows down


def test_a_config_that_is_a_pipe_or_endless_is_named_at_once(tmp_path: Path):
    import os

    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "endless.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "endless.yaml"):
        with pytest.raises(ConfigError, match=f"{name}: not a regular file; remove it"):
            load_config(tmp_path / name)


def sentences(argv: Sequence[str], cwd: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[3] / "launch.py"), *argv],
        capture_output=True, text=True, check=False, cwd=cwd, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stderr.strip()


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "[]", "\0" * 100, '{"later": 1}'])
def test_the_command_line_names_a_damaged_file_and_ends_with_code_2(tmp_path: Path, content: str):
    run = tmp_path / "runs" / "a"
    (run / "logs").mkdir(parents=True)
    write_folder_format(run, FORMAT)
    (run / "config.yaml").write_text(content)
    for mode in ("--resume", "--export"):
        code, said = sentences([mode, str(run)], tmp_path)
        assert code == 2 and all("config.yaml" in line for line in said.splitlines()), said  # a line per problem
    (tmp_path / "runs" / "queue").mkdir()
    (tmp_path / "runs" / "queue" / "settings.json").write_text(content if content != '{"later": 1}' else "null")
    code, said = sentences(["--queue", "--runs", str(tmp_path / "runs")], tmp_path)
    assert code == 2 and "settings.json: damaged (" in said and said.count("\n") == 0, said


EDITOR = """
from pathlib import Path; from app.studio import Studio; import sys
studio = Studio(Path(sys.argv[1])); field = {"a": "train.seed", "b": "sample.every"}[sys.argv[2]]
print("ready", flush=True); input()
for number in range(1, 16): studio.change_draft(lambda draft: draft.typed(field, str(number)))
"""


def test_two_pages_whose_users_edit_different_fields_lose_no_edit(tmp_path: Path):
    Studio(tmp_path).prepare()
    two(EDITOR, tmp_path)
    assert Studio(tmp_path).draft().values == {"train.seed": 15, "sample.every": 15}
