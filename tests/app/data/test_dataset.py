"""The images of a draft as the page shows them: filters, figures, pages, and the part that a bucket keeps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app.data import dataset
from app.data.captions import Captions, Card
from app.data.dataset import Filter, View
from app.data.scans import Flaw, ScanResult, Scans
from tests.runs import make_pictures, run_config
from trainer.config.schema import RunConfig
from trainer.config.size import Size
from trainer.system.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight images; the last two are held out, 02 has no caption, 03 is not an image, 04 is wide."""
    folder = make_pictures(tmp_path / "images")
    (folder / "02.txt").unlink()
    (folder / "03.png").write_bytes(b"none")
    Image.new("RGB", (320, 32)).save(folder / "04.png")
    return folder


def config_of(folder: Path, **changes: Any) -> RunConfig:
    return run_config(folder, **{"data__validation": 2} | changes)


def scanned(config: RunConfig) -> ScanResult:
    scans, deadline = Scans(), time.monotonic() + 20
    while not (found := scans.of(config)).is_complete:
        assert time.monotonic() < deadline
    return found


def seen(config: RunConfig, chosen: Filter, truncated: tuple[str, ...] = (), page: int = 0) -> View:
    return dataset.view(config.data, scanned(config), truncated, chosen, page)


def names(view: View) -> list[str]:
    return [item.image.stem for item in view.items]


def test_a_folder_with_problems_has_its_shapes_what_will_be_held_out_and_what_is_wrong(folder: Path):
    found = scanned(config_of(folder))
    assert [problem.partition(":")[0] for problem in found.problems] == [f"{folder}/03.png", f"{folder}/02.png"]
    assert {image.stem for image in found.held_out} == {"06", "07"}
    assert found.buckets == {Size(48, 80): 2, Size(64, 64): 1, Size(80, 48): 2}
    assert {image.stem: flaw for image, flaw in found.flaws.items()} == {
        "03": Flaw("cannot be used", is_error=True),
        "04": Flaw("17% kept"),
    }
    assert found.cropped[Size(64, 64)] == 0.0 and 0.4 < found.cropped[Size(80, 48)] < 0.6


def test_what_is_held_out_is_the_same_before_and_after_the_problems_are_solved(folder: Path):
    before = scanned(config_of(folder, data__missing_caption="empty"))
    (folder / "03.png").unlink()
    after = scanned(config_of(folder, data__missing_caption="empty"))
    assert before.problems and not after.problems
    assert before.held_out == after.held_out and before.buckets == after.buckets
    other = make_pictures(folder.parent / "other", 2)
    own = scanned(config_of(folder, data__missing_caption="empty", data__validation=str(other)))
    (folder / "00.txt").write_bytes(b"\xff")
    broken = scanned(config_of(folder, data__missing_caption="empty", data__validation=str(other)))
    assert broken.problems and own.held_out == broken.held_out == {other / "00.png", other / "01.png"}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (Filter(), "00 01 02 03 04 05 06 07"),
        (Filter("uncaptioned"), "02"),
        (Filter("problems"), "02 03 04 05"),
        (Filter("held_out"), "06 07"),
        (Filter(search="NUMBER 1"), "01"),
        (Filter("held_out", search="7"), "07"),
        (Filter("uncaptioned", search="picture"), ""),
    ],
    ids=str,
)
def test_a_filter_chooses(folder: Path, chosen: Filter, expected: str):
    view = seen(config_of(folder), chosen, truncated=(str(folder / "05.png"),))
    assert names(view) == expected.split() and view.num_chosen == len(expected.split())


def test_figures_count_all_images_whatever_is_chosen(folder: Path):
    (folder / "00.txt").write_text("A [trigger] fox's den, a Fox")
    (folder / "01.txt").write_bytes(b"\xff\xfe")
    view = seen(config_of(folder), Filter("held_out", search="picture"))
    assert view.counts is not None
    assert (view.counts.captions, view.counts.uncaptioned, view.counts.problems) == (6, 2, 4)
    assert view.counts.words == (
        ("number", 5), ("picture", 5), ("[trigger]", 1), ("den", 1), ("fox", 1), ("fox's", 1)
    )  # fmt: skip
    assert view.num_replaceable == 5
    (wrong,) = [item for item in seen(config_of(folder), Filter()).items if item.problem]
    assert wrong.image.stem == "01" and "01.txt: cannot be read" in wrong.problem


def test_captions_of_metadata_are_shown_and_replaced_until_a_file_has_another(tmp_path: Path):
    folder = make_pictures(tmp_path / "images", 2)
    (folder / "00.txt").unlink()
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "00.png", "text": "a picture of a boat"}) + "\n")
    config = run_config(folder)
    found = scanned(config)
    first, second = dataset.view(config.data, found, (), Filter(), 0).items
    assert (first.caption, first.saved, second.saved) == ("a picture of a boat", None, "picture number 1")
    captions = Captions(tmp_path / "drafts" / "captions.jsonl")
    cards = [(Card(item.image, item.caption), item.saved) for item in dataset.editable(found)]
    assert captions.edit(cards, lambda caption: caption.replace("picture", "drawing")) == (2, [])
    assert (folder / "00.txt").read_text() == "a drawing of a boat\n"
    assert captions.undo() == 2 and not (folder / "00.txt").exists()


def test_pages_end_with_the_last_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = run_config(make_pictures(tmp_path / "images", 5))
    monkeypatch.setattr(dataset, "PER_PAGE", 2)
    assert [names(seen(config, Filter(), page=page)) for page in (0, 1, 2, 9, -1)] == [
        ["00", "01"], ["02", "03"], ["04"], ["04"], ["00", "01"],
    ]  # fmt: skip
    assert seen(config, Filter(), page=9).first == 4
    found = scanned(config)
    for at, expected in [(0, (0, 1)), (1, (2, 2)), (4, (2, None))]:  # page 1 is asked for
        view = dataset.view(config.data, found, (), Filter(), 1, found.images[at])
        assert (view.first, view.next) == (expected[0], None if expected[1] is None else found.images[expected[1]])


def test_of_very_many_images_only_the_captions_of_the_page_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dataset, "MOST_COUNTED", 3)
    plain, chosen = seen(config_of(folder), Filter("held_out")), seen(config_of(folder), Filter(search="number 1"))
    assert names(plain) == ["06", "07"] and plain.counts is None
    assert names(chosen) == ["01"] and chosen.counts is None
    with pytest.raises(InputError, match="among at most 3 images"):
        seen(config_of(folder), Filter("alike"))


def test_the_part_that_a_bucket_keeps_is_known(folder: Path):
    framed = scanned(config_of(folder)).framed
    wide = dataset.shape(folder / "04.png", framed[folder / "04.png"])
    assert (wide.width, wide.height, wide.sizes) == (320, 32, ((80, 48),))
    assert wide.kept == (pytest.approx(32 * 80 / 48 / 320), 1.0)
    assert wide.start == (pytest.approx((1 - wide.kept[0]) / 2), 0.0)
    with pytest.raises(InputError, match=r"03\.png: cannot be read"):
        dataset.shape(folder / "03.png", framed.get(folder / "03.png"))


@pytest.mark.parametrize("path", ["00.txt", "none.png", "../images", "00.png\0"])
def test_only_images_are_named(folder: Path, path: str):
    assert dataset.image_at(str(folder / "00.png")) == folder / "00.png"
    for wrong in (str(folder / path), path):
        with pytest.raises(InputError, match="no such image"):
            dataset.image_at(wrong)
