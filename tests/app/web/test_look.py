"""The functions of the closer look on the screen Data, as a browser calls them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from app.web.answers import answering
from app.web.pages import look
from tests.app.web.test_data import SCANNED_WITHIN_S, Window
from tests.runs import make_pictures


class Looking(Window):
    """The window of test_data with its panels of the closer look."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._functions |= {f"data_{name}": call for name, call in answering([look.calls(self.studio)]).items()}
        self.view()

    def look(self, name: str, **values: Any) -> Any:
        return self.call(f"look_{name}", **values)

    def wrong(self, name: str, **values: Any) -> str:
        return str(self.ask(f"look_{name}", **values)["error"])

    def looked(self) -> dict[str, Any]:
        """Look at all images and return what was found."""
        self.look("start", key=self.view(is_fresh=True)["key"])
        deadline = time.monotonic() + SCANNED_WITHIN_S
        while (state := self.look("state"))["is_running"]:
            assert time.monotonic() < deadline
        return dict(state)

    def typed(self, name: str, value: str) -> None:
        self.studio.change_draft(lambda draft: draft.typed(name, value))
        self.view(is_fresh=True)


@pytest.fixture
def window(tmp_path: Path) -> Looking:
    return Looking(tmp_path)


def test_a_focus_point_moves_the_frames_of_the_dialog_and_of_the_card(window: Looking):
    image = str(window.images / "01.png")
    before = window.look("crop", image=image)
    assert (before["focus"], before["is_set"], before["undo"], before["fixed"]) == ([0.5, 0.5], False, "", "")
    assert before["address"].startswith("/gradio_api/file=")
    after = window.look("focus", image=image, point=[0.0, 1.0])
    (frame,), (former,) = after["frames"], before["frames"]
    assert after["is_set"] and after["undo"] == image and frame["size"] == former["size"]
    side = frame["kept"].index(min(frame["kept"]))
    assert frame["start"][side] == pytest.approx((0.0, 1 - frame["kept"][1])[side]) != former["start"][side]
    for is_fresh in (False, True):
        cards = {card["image"]: card for card in window.view(is_fresh=is_fresh)["cards"]}
        assert cards[image]["shape"]["focus"] == [0, 1], "known without reading the files, and read from them"
    card = cards[image]
    assert (card["shape"]["start"], card["shape"]["focus"]) == (frame["start"], [0, 1])
    assert window.look("undo", key=window.view()["key"]) == image
    assert window.look("crop", image=image) == before
    assert window.look("undo", key=window.view()["key"]) == ""
    assert not (window.images / "metadata.jsonl").exists()


def test_with_borders_the_frame_is_larger_than_the_image_and_no_focus_is_set(window: Looking):
    Image.new("RGB", (200, 60)).save(window.images / "00.png")
    window.typed("data.fit", "pad")
    window.typed("data.background", "#204080")
    image = str(window.images / "00.png")
    shown = window.look("crop", image=image)
    (frame,) = shown["frames"]
    assert min(frame["kept"]) >= 1 < max(frame["kept"]) and min(frame["start"]) < 0 and frame["cut"] == 0
    assert (shown["fit"], shown["background"]) == ("pad", "#204080") and "has no effect" in shown["fixed"]
    card = next(card for card in window.view()["cards"] if card["image"] == image)
    assert (card["shape"]["start"], card["shape"]["kept"]) == (frame["start"], frame["kept"])
    assert "has no effect" in window.wrong("focus", image=image, point=[0, 0])


def test_what_is_left_out_by_its_crop_says_so(window: Looking):
    Image.new("RGB", (400, 20)).save(window.images / "00.png")
    window.typed("data.fit", "drop")
    shown = window.look("crop", image=str(window.images / "00.png"))
    assert [frame["is_left_out"] for frame in shown["frames"]] == [True] and shown["frames"][0]["cut"] > 0.5


def test_only_the_draft_s_images_get_a_focus_and_only_a_point_in_them(window: Looking, tmp_path: Path):
    other = make_pictures(tmp_path / "elsewhere", 1) / "00.png"
    assert "not an image of the draft" in window.wrong("focus", image=str(other), point=[0, 0])
    assert "not an image of the draft" in window.wrong("crop", image=str(other))
    image = str(window.images / "00.png")
    for point in ([0, 2], [-1, 0]):
        assert "shares from 0 to 1" in window.wrong("focus", image=image, point=point)
    assert "reload the page" in window.wrong("focus", image=image, point=[0])
    assert "reload the page" in window.wrong("focus", image=image, point=[float("nan"), "x"])
    assert "other folder" in window.wrong("undo", key="other").replace("another", "other")
    (window.images / "metadata.jsonl").write_text("{")
    shown = window.look("crop", image=image)
    assert "metadata.jsonl:1: not a JSON object" in shown["fixed"]
    assert "metadata.jsonl:1: not a JSON object" in window.wrong("focus", image=image, point=[0, 0])
    assert (window.images / "metadata.jsonl").read_text() == "{"


def test_images_listed_in_a_table_say_that_they_have_no_focus(window: Looking, tmp_path: Path):
    table = tmp_path / "table"
    table.mkdir()
    (table / "rows.csv").write_text("file_name,text\n" + "".join(f"{window.images}/{n:02d}.png,a\n" for n in range(3)))
    window.typed("data.validation", "0")
    window.typed("data.path", str(table / "rows.csv"))
    image = str(window.images / "00.png")
    assert "An image in a table has no focus point" in window.look("crop", image=image)["fixed"]
    assert "An image in a table has no focus point" in window.wrong("focus", image=image, point=[0, 0])


def test_a_deleted_image_leaves_a_focus_row_that_is_only_a_warning(window: Looking):
    window.look("focus", image=str(window.images / "05.png"), point=[0, 0])
    for suffix in (".png", ".txt"):
        (window.images / f"05{suffix}").unlink()
    seen = window.view(is_fresh=True)
    assert [problem for problem in seen["problems"] if "metadata" in problem] == []
    for name in ("02.txt", "03.txt"):
        (window.images / name).write_text("a caption")
    assert any(
        "metadata.jsonl:1: no such image: 05.png" in warning for warning in window.view(is_fresh=True)["warnings"]
    )


def test_groups_are_shown_side_by_side_and_filter_the_cards(window: Looking):
    assert window.look("state") is None
    ImageOps.mirror(Image.open(window.images / "01.png")).save(window.images / "12.png")
    state = window.looked()
    assert (state["is_complete"], state["num_groups"], state["num_leaks"], state["is_outdated"]) == (True, 1, 1, False)
    first, second = state["groups"][0]["images"]
    assert (first["name"], first["is_held_out"], second["name"], second["is_held_out"]) == (
        "01.png",
        False,
        "12.png",
        True,
    )
    assert second["is_mirrored"] and not first["is_mirrored"]
    for mark in ("leaks", "copies", "0"):
        assert [card["name"] for card in window.view(mark=mark)["cards"]] == ["01.png", "12.png"]
    assert window.view(mark="failed")["cards"] == [] and window.view(mark="copies")["counts"]["captions"] == 12
    Image.new("RGB", (32, 32)).save(window.images / "14.png")
    window.view(is_fresh=True)
    assert window.look("state")["is_outdated"]
    state = window.looked()
    assert [image["name"] for image in state["lists"]["enlarged"]["images"]] == ["14.png"]
    assert [image["name"] for image in state["lists"]["flat"]["images"]] == ["14.png"]
    assert [card["name"] for card in window.view(mark="enlarged")["cards"]] == ["14.png"]
    json.dumps(state)


def test_a_folder_of_images_before_an_edit_is_taken_with_one_click(window: Looking, tmp_path: Path):
    assert window.look("suggestion") is None
    before = make_pictures(tmp_path / "before", 14)
    found = window.look("suggestion")
    assert found == {"folder": str(before), "name": "before", "num_matched": 14, "num_images": 14}
    assert "nothing was changed" in window.wrong("use", folder=str(tmp_path))
    window.look("use", folder=str(before))
    card = window.view(is_fresh=True)["cards"][0]
    assert [(one["image"], one["name"]) for one in card["references"]] == [(str(before / "00.png"), "00.png")]
    assert window.look("suggestion") is None
    assert window.call("thumbnail", image=str(before / "00.png")).endswith(".webp")
