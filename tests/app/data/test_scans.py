"""Images that are read in the background: what is found, how long an answer takes, what is read again."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from app.data import scans
from app.data.scans import ScanResult, Scans
from tests.runs import make_pictures, run_config, text_config
from trainer.config.size import Size


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return make_pictures(tmp_path / "pictures", count=3)


@pytest.fixture
def slow(pictures: Path) -> Path:
    """A file that takes half a minute to read, until it is cut short."""
    (pictures / "metadata.jsonl").write_bytes(b"\n" * 10**8)
    return pictures / "metadata.jsonl"


def complete(look: Callable[[], ScanResult]) -> ScanResult:
    deadline = time.monotonic() + 20
    while not (found := look()).is_complete:
        assert time.monotonic() < deadline, found
    return found


def test_images_with_captions_are_found_and_counted_by_bucket(pictures: Path):
    config, seen = run_config(pictures), Scans()
    found = complete(lambda: seen.of(config))
    assert [image.name for image in found.images] == ["00.png", "01.png", "02.png"]
    assert (found.num_files, found.problems, found.warnings) == (6, (), ())
    assert found.buckets == {Size(48, 80): 1, Size(64, 64): 1, Size(80, 48): 1}


def test_warnings_of_files_and_of_their_buckets_are_found_together(pictures: Path):
    (pictures / "03.png").write_bytes((pictures / "00.png").read_bytes())
    (pictures / "03.txt").write_text("a copy")
    config, seen = run_config(pictures, data__resolution=128), Scans()
    copies, enlarged = complete(lambda: seen.of(config)).warnings
    assert copies.startswith("1 image has the same bytes as another one")
    assert enlarged.startswith("4 images are enlarged more than 1.5 times to fill a bucket")


def test_a_broken_image_is_a_problem_and_seen_only_when_files_are_read_again(pictures: Path):
    config, seen = run_config(pictures), Scans()
    complete(lambda: seen.of(config))
    (pictures / "01.png").write_bytes(b"none")
    assert complete(lambda: seen.of(config)).problems == ()
    seen.of(config, is_fresh=True)
    found = complete(lambda: seen.of(config))
    [problem] = found.problems
    assert str(pictures / "01.png") in problem
    assert len(found.images) == 3


def test_a_resolution_below_the_model_s_is_a_problem(pictures: Path):
    seen, config = Scans(), run_config(pictures, model__family="sdxl", data__resolution=16)
    assert "data.resolution: 16 is below" in complete(lambda: seen.of(config)).problems[0]


def test_a_folder_that_takes_long_keeps_nobody_waiting(pictures: Path, slow: Path):
    config, seen, began = run_config(pictures), Scans(), time.monotonic()
    found = seen.of(config)
    assert time.monotonic() - began < 10 * scans.PATIENCE_S
    assert (found.is_complete, found.num_files) == (False, 7)
    os.truncate(slow, 0)
    assert complete(lambda: seen.of(config)).problems == ()


def test_however_often_a_slow_folder_is_looked_at_few_threads_read_it(pictures: Path, slow: Path, monkeypatch):
    monkeypatch.setattr(scans, "PATIENCE_S", 0.01)
    config, other, seen = run_config(pictures), run_config(pictures, data__resolution=128), Scans()
    for _ in range(20):
        assert not seen.of(config, is_fresh=True).is_complete
    assert not seen.of(other).is_complete
    reading = [thread for thread in threading.enumerate() if thread.name == scans.THREADS]
    os.truncate(slow, 0)
    assert len(reading) == scans.MOST_AT_ONCE
    assert complete(lambda: seen.of(config)).problems == ()
    assert complete(lambda: seen.of(other)).problems == ()


def test_a_pipe_among_the_files_is_a_problem_at_once(pictures: Path):
    os.mkfifo(pictures / "metadata.jsonl")
    [problem] = complete(lambda: Scans().of(run_config(pictures))).problems
    assert problem.startswith(f"{pictures}/metadata.jsonl: not a regular file")


def test_a_folder_nobody_asks_for_is_not_read_to_its_end(pictures: Path, monkeypatch: pytest.MonkeyPatch):
    config, seen = run_config(pictures), Scans()
    monkeypatch.setattr(scans, "FORGOTTEN_S", -1.0)
    found = seen.of(config)
    assert (found.is_complete, found.num_files) == (False, 1)
    monkeypatch.undo()
    assert complete(lambda: seen.of(config)).num_files == 6


def test_questions_are_read_beside_the_images_and_named_with_their_line(pictures: Path):
    row = '{"image": "00.png", "question": "What is it?", "answer": "red"}'
    asked = pictures / "questions.jsonl"
    asked.write_text(f"{row}\n{row}\n", encoding="utf-8")
    cfg = run_config(pictures, model__family="bagel", data__questions=str(asked))
    seen = Scans()
    found = complete(lambda: seen.of(cfg))
    assert (found.num_questions, len(found.images), found.problems) == (2, 3, ())
    asked.write_text("none", encoding="utf-8")
    again = Scans()
    assert complete(lambda: again.of(cfg)).problems[0].startswith(f"{asked}:1: not a JSON object")


def text_scan(root: Path) -> ScanResult:
    seen, config = Scans(), text_config(root)
    return complete(lambda: seen.of(config))


def test_text_is_counted_in_documents_and_its_first_conversation_is_shown(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hello."}]
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts}]
    lines = [json.dumps({"text": "a"}), "", json.dumps({"messages": talk}), json.dumps({"text": "b" * 900})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "b.txt").write_text("one document", encoding="utf-8")
    found = text_scan(tmp_path)
    assert (len(found.texts), found.num_documents, found.conversation) == (2, 4, ())
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "sky"}}]}
    rows = [{"messages": [*talk, {"role": "user", "content": "c" * 900}, called]}]
    (tmp_path / "c.jsonl").write_text(json.dumps(rows[0]), encoding="utf-8")
    found = text_scan(tmp_path)
    assert found.num_documents == 5
    assert found.conversation == (
        ("user", "Hi"),
        ("assistant", "Hello."),
        ("user", "c" * 250 + "…" + "c" * 249),
        ("assistant", "calls [{'function': {'name': 'sky'}}]"),
    )


def test_token_ids_are_not_counted_and_a_damaged_table_is_a_problem(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(4, np.uint16))
    assert text_scan(tmp_path).num_documents is None
    (tmp_path / "b.parquet").write_bytes(b"none")
    (problem,) = text_scan(tmp_path).problems
    assert problem.startswith(f"{tmp_path}/b.parquet: not a parquet file, or damaged (")


def test_images_of_a_model_without_buckets_are_neither_sorted_into_them_nor_called_cropped(pictures: Path):
    Image.new("RGB", (300, 20)).save(pictures / "wide.png")
    (pictures / "wide.txt").write_text("wide", encoding="utf-8")

    def found(family: str) -> ScanResult:
        cfg, seen = run_config(pictures, model__family=family), Scans()
        return complete(lambda: seen.of(cfg))

    assert any("to the crop" in warning for warning in found("flux2").warnings)
    others = found("bagel")
    assert (others.buckets, others.warnings, len(others.images)) == ({}, (), 4)
