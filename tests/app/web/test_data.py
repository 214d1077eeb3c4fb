"""The functions that the scripts of the screen Data call, with its closer look, as a browser calls them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from app.form.draft import Draft
from app.studio import Studio
from app.web.answers import answering
from app.web.pages import data, look
from tests.runs import make_pictures, write_preset

SCANNED_WITHIN_S = 30


class Window:
    """A window of the page that shows 14 images, two of them without a caption, the last four held out."""

    def __init__(self, folder: Path) -> None:
        self.images = make_pictures(folder / "images", 14)
        for name in ("02.txt", "03.txt"):  # the problem also keeps the captions from being measured, by another process
            (self.images / name).unlink()
        preset = write_preset(folder / "runs" / "presets" / "own.yaml", self.images)
        preset.write_text(preset.read_text().replace("resolution: 64", "resolution: 64, validation: 4"))
        self.studio = Studio(folder / "runs")
        self.studio.save_draft(Draft(preset))
        self._functions = answering([data.calls(self.studio), look.calls(self.studio)])

    def ask(self, name: str, /, **values: Any) -> dict[str, Any]:
        """Return the answer as it travels: {"value": ...} or {"error": ...}."""
        function = self._functions[name if name.startswith("look_") else f"data_{name}"]
        return json.loads(json.dumps(function(values), allow_nan=False))

    def call(self, name: str, /, **values: Any) -> Any:
        answer = self.ask(name, **values)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def view(self, **values: Any) -> dict[str, Any]:
        """Return the answer of the view when all images are read."""
        deadline = time.monotonic() + SCANNED_WITHIN_S
        while not (seen := self.call("view", **values))["is_complete"]:
            assert time.monotonic() < deadline
        return seen

    def save(self, name: str, before: str | None, caption: str) -> dict[str, Any]:
        return self.call("save", image=str(self.images / name), before=before, caption=caption)

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


@pytest.fixture
def window(tmp_path: Path) -> Window:
    window = Window(tmp_path)
    window.view()
    return window


def test_every_image_is_either_in_a_bucket_or_named_as_held_out(window: Window):
    seen = window.view()
    assert (seen["num_images"], seen["counts"]["captions"], len(seen["shapes"])) == (14, 12, 3)
    assert sum(count for _, _, count, _ in seen["shapes"]) == seen["num_trained"] == 10
    assert [image["name"] for image in seen["held_out"]] == ["10.png", "11.png", "12.png", "13.png"]
    assert (len(seen["cards"]), seen["num_chosen"]) == (14, 14)
    assert [card["name"] for card in window.view(show="uncaptioned")["cards"]] == ["02.png", "03.png"]


def test_undo_and_replace_change_only_captions_that_the_window_shows(window: Window, tmp_path: Path):
    former = window.view()["key"]
    window.save("00.png", "picture number 0", "a boat")
    other = make_pictures(tmp_path / "others", 3)
    window.studio.change_draft(lambda draft: draft.typed("data.path", str(other)).typed("data.validation", "0"))
    assert (seen := window.view())["num_undoable"] == 0
    refusal = "New run has another folder meanwhile, which is shown now; nothing was changed"
    assert window.ask("undo", key=former) == {"error": refusal}
    assert window.ask("replace", key=former, search="picture", replacement="drawing") == {"error": refusal}
    assert window.call("undo", key=seen["key"]) == 0
    changed = {"changed": 3, "kept": [], "num_kept": 0}
    assert window.call("replace", key=seen["key"], search="picture", replacement="drawing") == changed
    assert window.call("undo", key=seen["key"]) == 3
    window.studio.change_draft(lambda draft: draft.typed("data.path", str(window.images)))
    assert window.view()["num_undoable"] == 1 == window.call("undo", key=former)
    assert (window.images / "00.txt").read_text() == "picture number 0\n"


def test_texts_and_tags_are_put_into_all_captions_but_those_that_somebody_keeps(window: Window):
    key = window.view()["key"]
    texts = ["a fox, sitting", "fox, sitting, a fox", '\U0001f98a, it\'s "new", <b>', "x" * 10_000]
    for number, text in zip((0, 1, 4, 5), texts, strict=True):
        (window.images / f"{number:02d}.txt").write_text(text)
    (window.images / "06.txt").write_bytes(b"\xff\xfe")
    (window.images / "07.txt").chmod(0o444)
    kept = [
        "06.txt: cannot be read ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte); "
        "save it as UTF-8",
        "07.txt: is read-only; make it writable, or keep its caption",
    ]
    answer = window.call("extend", key=key, text="[trigger]", is_behind=False)
    assert answer == {"changed": 10, "kept": kept, "num_kept": 2}
    assert window.call("extend", key=key, text="[trigger]", is_behind=False)["changed"] == 0, "they begin with it"
    assert (window.images / "05.txt").read_text() == f"[trigger], {'x' * 10_000}\n"
    assert not (window.images / "02.txt").exists() and (window.images / "07.txt").read_text() == "picture number 7"
    counts = window.view()["counts"]
    assert counts["tags"][:3] == [["[trigger]", 10], ["a fox", 2], ["sitting", 2]]
    assert window.view(find="FOX")["counts"]["tags"] == [["a fox", 2], ["fox", 1]]
    assert [card["name"] for card in window.view(tag='it\'s "new"')["cards"]] == ["04.png"]
    assert window.call("rename", key=key, tag="a fox", name=" fox , red")["changed"] == 2
    assert (window.images / "01.txt").read_text() == "[trigger], fox, sitting, red\n", "each tag once"
    assert window.call("rename", key=key, tag="<b>", name="")["changed"] == 1
    assert (window.images / "04.txt").read_text() == '[trigger], \U0001f98a, it\'s "new"\n'
    assert [window.call("undo", key=key) for _ in range(3)] == [1, 2, 10]
    assert [(window.images / f"{number:02d}.txt").read_text().strip() for number in (0, 1, 4, 5)] == texts
    assert "Write the text" in window.ask("extend", key=key, text="  ", is_behind=True)["error"]


def test_captions_that_are_nearly_equal_are_shown_in_groups_and_the_next_of_a_filter_is_found(window: Window):
    for name, text in {
        "05": "A red fox in deep snow.",
        "09": "a red fox, in deep snow",
        "07": "picture number 13",
    }.items():
        (window.images / f"{name}.txt").write_text(text)
    cards = window.view(show="alike")["cards"]
    assert [(card["name"], card["like"]) for card in cards] == [
        ("05.png", "05.png"), ("09.png", "05.png"), ("07.png", "07.png"), ("13.png", "07.png"),
    ]  # fmt: skip
    images = str(window.images)
    for show, after, expected in [
        ("alike", "09.png", "07.png"), ("uncaptioned", "02.png", "03.png"), ("uncaptioned", "01.png", "02.png"),
        ("uncaptioned", "03.png", None), ("all", "13.png", None), ("all", "none.png", "00.png"),
    ]:  # fmt: skip
        assert window.view(show=show, after=f"{images}/{after}")["next"] == (expected and f"{images}/{expected}")


def test_an_image_whose_name_is_not_utf8_is_shown_with_what_to_do(window: Window):
    os.rename(window.images / "00.png", os.fsencode(window.images) + b"/0\xff.png")
    shown = [card["name"] for page in (0, 1) for card in window.view(is_fresh=True, page=page)["cards"]]
    assert "0\ufffd.png" in shown
    image = str(window.images / "0\ufffd.png")
    assert window.ask("thumbnail", image=image)["error"].endswith("its name is not UTF-8; rename the file")


def test_only_images_are_written_and_shown(window: Window):
    (window.images / "notes.md").write_text("secret")
    for image in (window.images / "notes.md", window.images / "none.png", Path("00.png")):
        for name, values in (("thumbnail", {}), ("save", {"before": None, "caption": "x"})):
            assert "no such image" in window.ask(name, image=str(image), **values)["error"]
    assert not (window.images / "none.txt").exists() and not (window.images / "notes.txt").exists()


def test_a_focus_point_moves_the_frames_of_the_dialog_and_of_the_card(window: Window):
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


def test_only_the_draft_s_images_get_a_focus_and_only_a_point_in_them(window: Window, tmp_path: Path):
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


def test_a_deleted_image_leaves_a_focus_row_that_is_only_a_warning(window: Window):
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


def test_groups_are_shown_side_by_side_and_filter_the_cards(window: Window):
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


def test_a_folder_of_images_before_an_edit_is_taken_with_one_click(window: Window, tmp_path: Path):
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
