"""Captions that are edited where they lie, and taken back; what is said of the images."""

from __future__ import annotations

from pathlib import Path

import pytest

from app import dataset
from app.dataset import Captions
from tests.runs import make_pictures, run_config
from trainer.config import InputError


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return make_pictures(tmp_path / "pictures", count=3)


def captions_of(folder: Path) -> list[str]:
    return [card.caption for card in dataset.cards(folder)]


def test_a_change_is_taken_back_also_by_a_page_that_was_started_again(pictures: Path, tmp_path: Path):
    first, *_ = dataset.cards(pictures)
    Captions(tmp_path / "log" / "captions.jsonl").write(first, "another")
    assert captions_of(pictures)[0] == "another"
    again = Captions(tmp_path / "log" / "captions.jsonl")
    assert again.undo() == 1
    assert captions_of(pictures)[0] == "picture number 0"
    assert again.undo() == 0


def test_a_caption_that_was_not_there_is_gone_after_it_is_taken_back(pictures: Path, tmp_path: Path):
    (pictures / "00.txt").unlink()
    captions = Captions(tmp_path / "captions.jsonl")
    captions.write(dataset.cards(pictures)[0], "new")
    captions.undo()
    assert not (pictures / "00.txt").exists()


def test_replaced_captions_are_taken_back_together(pictures: Path, tmp_path: Path):
    captions = Captions(tmp_path / "captions.jsonl")
    assert captions.replace(dataset.cards(pictures), "picture", "drawing") == 3
    assert captions_of(pictures) == ["drawing number 0", "drawing number 1", "drawing number 2"]
    assert captions.replace(dataset.cards(pictures), "", "x") == 0
    assert captions.undo() == 3
    assert captions_of(pictures) == ["picture number 0", "picture number 1", "picture number 2"]


def test_problems_are_a_sentence_per_file_and_buckets_are_counted(pictures: Path):
    config = run_config(pictures)
    assert dataset.problems(config) == []
    assert dataset.bucket_counts(config) == {(48, 80): 1, (64, 64): 1, (80, 48): 1}
    (pictures / "01.png").write_bytes(b"none")
    [problem] = [line for line in dataset.problems(config) if "01.png" in line]
    assert str(pictures) in problem or "01.png" in problem


def test_a_folder_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=f"no folder '{tmp_path}/none'"):
        dataset.cards(tmp_path / "none")
