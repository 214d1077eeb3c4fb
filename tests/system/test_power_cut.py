"""What a power cut finds: every file that is replaced was on the disk before it got its name, and the name after it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Records in a process of its own when files are opened for writing, flushed and renamed, by their paths at the time.
RECORDER = """
import json, os, sys
from pathlib import Path
calls = []
fsync, replace, rename, link = os.fsync, os.replace, os.rename, os.link
def path_of(descriptor): return os.readlink(f"/proc/self/fd/{descriptor}")
def opened(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)) and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        calls.append(("write", os.path.abspath(os.fsdecode(arguments[0])), ""))
def flushed(descriptor):
    fsync(descriptor)
    calls.append(("flush", path_of(descriptor), ""))
def named(act):
    def call(draft, final, **options):
        calls.append(("name", os.path.abspath(draft), os.path.abspath(final)))
        act(draft, final, **options)
    return call
os.fsync, os.replace, os.rename, os.link = flushed, named(replace), named(rename), named(link)
sys.addaudithook(opened)
"""
SAVES = """
from app.form import draft as form
from app.data.captions import Captions, Card
from app.form.draft import Draft
from app.runs.run_table import change_tags
from app.studio import Studio
from trainer.export.drafts import draft
from trainer.view.report import write_report
from trainer.run.folder import RunDir
folder = Path(sys.argv[1])
studio = Studio(folder / "runs")
checked = form.check(Draft(studio.presets()["quickstart"]))
run = RunDir.create(studio.runs, checked.config)
run.replace_config(checked.config)
write_report(run)
studio.save_preset(checked, "mine")
studio.save_draft(checked.draft)
studio.queue.add(checked.config)
studio.queue.change(studio.queue.settings)
change_tags(studio.runs, [run.path.name], "one, two")
Captions(studio.runs / "drafts" / "captions.jsonl").write(Card(folder / "a.png", ""), "a boat")
for _ in range(2):
    with draft(run.export / "model") as place:
        (place / "inner").mkdir(parents=True)
        (place / "inner" / "config.json").write_text("{}")
        (place / "weights.safetensors").write_bytes(b"w" * 2**20)
"""


def calls_of(program: str, folder: Path) -> list[tuple[str, str, str]]:
    """(kind, path, new name of it) of all that a program writes below a folder, in order."""
    file = folder.parent / "calls.json"
    end = f"\nPath({str(file)!r}).open('w').write(json.dumps(calls))"
    subprocess.run([sys.executable, "-c", RECORDER + program + end, folder], check=True, cwd=Path(__file__).parents[2])
    found = json.loads(file.read_text())
    return [(kind, path, new) for kind, path, new in found if Path(path).is_relative_to(folder)]


def unsafe(calls: list[tuple[str, str, str]]) -> list[str]:
    """What a power cut could lose: names of files that were not flushed since they were written, or names not flushed.

    A lock and a log that is appended to have no new name.
    """
    found = []
    dirty: set[str] = set()
    for at, (kind, path, new) in enumerate(calls):
        if kind == "write":
            dirty.add(path)
        elif kind == "flush":
            dirty.discard(path)
        else:
            found += [f"{file} was not flushed before {new}" for file in dirty if Path(file).is_relative_to(path)]
            above = str(Path(new).parent)
            if ("flush", above, "") not in calls[at + 1 :]:
                found.append(f"the name {new} was not flushed")
    return found


def test_all_that_the_page_saves_is_on_the_disk_before_it_has_its_name(tmp_path: Path):
    (tmp_path / "work").mkdir()
    calls = calls_of(SAVES, tmp_path / "work")
    named = sorted({Path(new).name for kind, _, new in calls if kind == "name"})
    assert named == [
        "000001.json", "a.txt", "config-1.yaml", "config.yaml", "draft.json", "format", "mine.yaml", "model",
        "model.former", "report.html", "settings.json", "tags.json",
    ]  # fmt: skip
    assert unsafe(calls) == []


@pytest.mark.parametrize(
    ("calls", "findings"),
    [
        ([("write", "/a/x", ""), ("name", "/a/x", "/a/y")], ["/a/x was not flushed before /a/y", "the name /a/y was"]),
        ([("write", "/a/x", ""), ("flush", "/a/x", ""), ("name", "/a/x", "/a/y")], ["the name /a/y was"]),
        ([("write", "/a/d/x", ""), ("name", "/a/d", "/a/y"), ("flush", "/a", "")], ["/a/d/x was not flushed before"]),
        ([("write", "/a/x", ""), ("flush", "/a/x", ""), ("name", "/a/x", "/a/y"), ("flush", "/a", "")], []),
    ],
)
def test_what_was_not_flushed_is_found(calls: list[tuple[str, str, str]], findings: list[str]):
    found = unsafe(calls)
    assert len(found) == len(findings)
    assert all(one.startswith(start) for one, start in zip(found, findings, strict=True))
