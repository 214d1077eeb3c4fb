"""Focus points in metadata.jsonl: one row changes, everything else stays byte for byte."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from app.data.focus import FocusPoints
from tests.runs import make_pictures
from trainer.config.sections import DataConfig
from trainer.data.images.image_files import scan
from trainer.system.errors import InputError

OTHERS = (
    b'\xef\xbb\xbf{ "text":"caf\\u00e9",\t"file_name" : "00.png" , "author": {"focus": [0, 0]}}\r\n'
    b"\r\n"
    b'{"file_name": "./01.png", "text": ["a", "b"], "focus": [0.5, 0.25], "n": 1.50}\n'
    b'{"focus":[1,1],"file_name":"02.png","caption":"c"}'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = make_pictures(tmp_path / "images", 5)
    (made / "below").mkdir()
    for suffix in (".png", ".txt"):
        (made / f"04{suffix}").rename(made / "below" / f"04{suffix}")
    return made


@pytest.fixture
def points(tmp_path: Path) -> FocusPoints:
    return FocusPoints(tmp_path / "drafts" / "focus.json")


def focus_of(folder: Path, name: str) -> tuple[float, float]:
    images = scan(DataConfig(path=str(folder), missing_caption="empty")).train
    return next(image.focus for image in images if image.path == folder / name)


def test_a_focus_point_is_what_the_scan_reads_and_is_undone_step_by_step(folder: Path, points: FocusPoints):
    file = folder / "metadata.jsonl"
    points.set(folder / "03.png", folder, (0.25, 0.123456))
    assert file.read_text() == '{"file_name": "03.png", "focus": [0.25, 0.1235]}\n'
    assert focus_of(folder, "03.png") == (0.25, 0.1235)
    points.set(folder / "03.png", folder, (1, 0))
    points.set(folder / "03.png", folder, None)
    assert not file.exists() and focus_of(folder, "03.png") == (0.5, 0.5)
    assert points.undoable([folder]) == str(folder / "03.png") and points.undoable([folder / "below"]) == ""
    assert points.undo([folder]) == folder / "03.png" and focus_of(folder, "03.png") == (1, 0)
    assert points.undo([folder]) == folder / "03.png" and focus_of(folder, "03.png") == (0.25, 0.1235)
    assert points.undo([folder]) == folder / "03.png" and not file.exists()
    assert points.undo([folder]) is None


def test_all_else_in_the_file_stays_byte_for_byte(folder: Path, points: FocusPoints):
    file = folder / "metadata.jsonl"
    file.write_bytes(OTHERS)
    os.chmod(file, 0o640)
    points.set(folder / "00.png", folder, (0, 0.5))
    assert file.read_bytes() == OTHERS.replace(b"[0, 0]}}", b'[0, 0]}, "focus": [0, 0.5]}')
    points.set(folder / "00.png", folder, None)
    assert file.read_bytes() == OTHERS and file.stat().st_mode & 0o777 == 0o640
    points.set(folder / "01.png", folder, (0.1, 0.9))
    assert file.read_bytes() == OTHERS.replace(b"[0.5, 0.25]", b"[0.1, 0.9]")
    points.set(folder / "01.png", folder, None)
    assert file.read_bytes() == OTHERS.replace(b', "focus": [0.5, 0.25]', b"")
    points.undo([folder])
    points.undo([folder])
    points.set(folder / "02.png", folder, None)
    assert file.read_bytes() == OTHERS.replace(b'"focus":[1,1],', b"")
    points.undo([folder])
    points.set(folder / "below" / "04.png", folder, (0, 0))
    assert file.read_bytes() == OTHERS, "a row of the folder above lists it not: its own folder's file does"
    assert (folder / "below" / "metadata.jsonl").read_text() == '{"file_name": "04.png", "focus": [0, 0]}\n'
    points.set(folder / "03.png", folder, (0, 0))
    assert file.read_bytes() == OTHERS + b'\n{"file_name": "03.png", "focus": [0, 0]}\n'


def test_the_row_of_a_folder_above_is_changed_and_fields_without_a_caption_are_kept(folder: Path, points: FocusPoints):
    file = folder / "metadata.jsonl"
    file.write_text('{"file_name": "below/04.png", "focus": [0, 1], "source": "mine"}\n')
    points.set(folder / "below" / "04.png", folder, (0.2, 0.2))
    assert focus_of(folder, "below/04.png") == (0.2, 0.2) and not (folder / "below" / "metadata.jsonl").exists()
    points.set(folder / "below" / "04.png", folder, None)
    assert file.read_text() == '{"file_name": "below/04.png", "focus": [0.5, 0.5], "source": "mine"}\n'


def test_a_caption_listed_in_a_metadata_csv_is_kept(folder: Path, points: FocusPoints):
    (folder / "04.txt").unlink(missing_ok=True)
    (folder / "below" / "04.txt").unlink()
    (folder / "metadata.csv").write_text("file_name,text\nbelow/04.png,a tree\n")
    points.set(folder / "below" / "04.png", folder, (0, 0.5))
    image = next(image for image in scan(DataConfig(path=str(folder))).train if image.path.name == "04.png")
    assert (image.caption, image.focus) == ("a tree", (0, 0.5))


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (b'{"file_name": "00.png"', ":2: not a JSON object"),
        (b'{"text": "a"}', ':2: no "file_name"'),
        (b'{"file_name": "\xff.png"}', ":2: not a JSON object"),
    ],
)
def test_a_damaged_file_is_named_with_its_line_and_not_rewritten(folder, points, damage, wrong):
    content = b'{"file_name": "00.png", "text": "a"}\n' + damage
    (folder / "metadata.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=wrong):
        points.set(folder / "00.png", folder, (0, 0))
    assert (folder / "metadata.jsonl").read_bytes() == content and points.undoable([folder]) == ""


def test_nothing_is_written_through_a_link_or_out_of_the_folder(folder: Path, points: FocusPoints, tmp_path: Path):
    outside = make_pictures(tmp_path / "outside", 1)
    (folder / "linked").symlink_to(outside)
    with pytest.raises(InputError, match="behind a link out of"):
        points.set(folder / "linked" / "00.png", folder, (0, 0))
    (tmp_path / "rows.jsonl").write_text('{"file_name": "00.png", "text": "a"}\n')
    (folder / "metadata.jsonl").symlink_to(tmp_path / "rows.jsonl")
    for image in ("00.png", "below/04.png"):
        with pytest.raises(InputError, match="a link, or not a regular file"):
            points.set(folder / image, folder, (0, 0))
    with pytest.raises(InputError, match="in a table has no focus"):
        points.set(folder / "shard.parquet" / "0" / "image" / "0", folder, (0, 0))
    with pytest.raises(InputError, match="not in the folder"):
        points.set(outside / "00.png", folder, (0, 0))
    assert sorted(file.name for file in outside.iterdir()) == ["00.png", "00.txt"]
    assert (tmp_path / "rows.jsonl").read_text() == '{"file_name": "00.png", "text": "a"}\n'


def test_what_was_changed_elsewhere_is_not_undone(folder: Path, points: FocusPoints):
    file = folder / "metadata.jsonl"
    points.set(folder / "00.png", folder, (0, 0))
    points.set(folder / "01.png", folder, (0, 0))
    other = '{"file_name": "01.png", "text": "mine"}\n{"file_name": "00.png", "focus": [0, 0]}\n'
    file.write_text(other)
    with pytest.raises(InputError, match="changed elsewhere since"):
        points.undo([folder])
    assert file.read_text() == other
    points.undo([folder])
    assert file.read_text() == '{"file_name": "01.png", "text": "mine"}\n', "the row is found where it has moved to"


def test_writers_at_once_lose_nothing(folder: Path, points: FocusPoints, tmp_path: Path):
    names = ["00.png", "01.png", "02.png", "03.png"]
    others = [FocusPoints(tmp_path / "drafts" / "focus.json") for _ in names]
    threads = [
        threading.Thread(target=other.set, args=(folder / name, folder, (0.1 * number, 0)))
        for number, (name, other) in enumerate(zip(names, others, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    assert sorted(row["file_name"] for row in rows) == names
    (tmp_path / "drafts" / "focus.json").write_text("damaged")
    assert points.undoable([folder]) == "", "the rows are not harmed by a damaged list of changes"
