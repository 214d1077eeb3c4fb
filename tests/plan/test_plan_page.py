"""`launch.py --plan PRESET --html FILE`: the page, and the files that it does not replace."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app import command_line
from tests.launcher.test_plan_command import answer
from trainer.plan.page import FIRST_LINE

PRESET = "presets/flux2-dev-lora-4gpu.yaml"


def refused(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence that a file is refused with, before anything is planned."""
    assert command_line.main(["--plan", "quickstart", "--html", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_the_page_says_what_the_text_says_and_shows_the_step(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    done = answer(PRESET, "train.checkpointing=full", "--gpus", "4x24gb", "--html", str(file))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith(f"\n\nwritten as a page: {file}\n")
    page = file.read_text(encoding="utf-8")
    text = " ".join(re.sub(r"<[^>]+>", " ", page.replace("&#39;", "'")).split())
    shown, _, rest = done.stdout.partition("\n\ndoes not fit: ")
    title, *lines = shown.splitlines()
    assert title.removeprefix("flux2-dev-lora: ") in text
    assert f"Does not fit: {rest.splitlines()[0]}." in text
    items = [line.split("GiB  ") for line in lines if line.startswith("  ")]
    assert len(items) == 6
    for size, what in items[:-1]:
        assert f"{size.strip()} GiB {what.replace(': ', ' ', 1)}" in text
    assert f"{items[-1][0].strip()} GiB in all {items[-1][1].removeprefix('on each GPU at its fullest, ')}" in text
    facts = [" ".join(line.split()) for line in lines if line and not line.startswith(("  ", "GiB by part"))]
    ways = [line.strip() for line in done.stdout.splitlines() if line.startswith("  fits with ")]
    assert len(facts) >= 9
    assert ways
    assert all(sentence in text for sentence in (*facts, *ways))
    assert re.search(r"\d GiB: backward of transformer\.single_transformer_blocks\.47 ", text)
    for name in ("encoding captions", "encoding images", "training", "sampling", "export"):
        assert re.search(rf"{name} [\d.]+ GiB", text)
    assert not re.search(r"<script|https?://(?!www\.w3\.org/2000/svg)|url\(", page)


def test_a_page_is_replaced_by_the_next_and_another_file_is_not(tmp_path: Path, capsys) -> None:
    file = tmp_path / "plan.html"
    assert command_line.main(["--plan", "quickstart", "--gpus", "2x12gb", "--html", str(file)]) == 0
    first = file.read_text(encoding="utf-8")
    assert first.startswith(f"{FIRST_LINE}\n")
    fields = ["train.steps=77", "--gpus", "2x12gb"]
    assert command_line.main(["--plan", "quickstart", *fields, "--html", str(file)]) == 0
    assert "77 steps" in file.read_text(encoding="utf-8") != first
    capsys.readouterr()
    for content in (b"", b"mine", FIRST_LINE[:-1].encode(), b"\xff" * 200):
        file.write_bytes(content)
        said = refused(file, capsys)
        assert said == f"--html {file}: exists and is not the page of a plan; move it, or name another file\n"
        assert file.read_bytes() == content


def test_what_cannot_be_written_is_refused_before_planning(tmp_path: Path, capsys) -> None:
    away = tmp_path / "away" / "plan.html"
    expected = f"--html {away}: the folder {away.parent} does not exist; make it, or name another file\n"
    assert refused(away, capsys) == expected
    expected = f"--html {tmp_path}: a folder; name a file in it, for example {tmp_path}/plan.html\n"
    assert refused(tmp_path, capsys) == expected
    link = tmp_path / "link.html"
    link.symlink_to("somewhere")
    assert "exists and is not the page of a plan" in refused(link, capsys)
    assert link.is_symlink()
    said = refused(Path("/proc/plan.html"), capsys)
    assert said.startswith("--html /proc/plan.html: the folder /proc cannot be written (")
    assert ": File name too long; " in refused(tmp_path / ("x" * 300), capsys)


def test_json_stays_json_and_every_stage_has_its_section(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    stages = "stages=[{name: small, set: {data.resolution: 64}}, {name: large, set: {data.resolution: 128}}]"
    done = answer("presets/quickstart.yaml", stages, "--gpus", "2x12gb", "--json", "--html", str(file))
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["stages"]) == ["small", "large"]
    page = file.read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.+?)</h2>", page) == ["Stage 1 of 2, small", "Stage 2 of 2, large"]
    assert page.count("<svg") == 2
    assert re.search(r"all stages: 200 steps in .+?</p>", page)


def test_the_page_goes_with_a_plan_only(capsys) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["--doctor", "--html", "x.html"])
    assert capsys.readouterr().err.endswith("--html goes with --plan only; leave it out\n")
