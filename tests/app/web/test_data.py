"""The functions that the script of the screen Data calls, as a browser calls them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from app.form.draft import Draft
from app.studio import Studio
from app.web.answers import answering
from app.web.pages import data
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
        self._functions = answering([data.calls(self.studio)])

    def ask(self, name: str, /, **values: Any) -> dict[str, Any]:
        """Return the answer as it travels: {"value": ...} or {"error": ...}."""
        return json.loads(json.dumps(self._functions[f"data_{name}"](values), allow_nan=False))

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


@pytest.fixture
def window(tmp_path: Path) -> Window:
    return Window(tmp_path)


def test_every_image_is_either_in_a_bucket_or_named_as_held_out(window: Window):
    seen = window.view()
    assert (seen["num_images"], seen["counts"]["captions"], len(seen["shapes"])) == (14, 12, 3)
    assert sum(count for _, _, count, _ in seen["shapes"]) == seen["num_trained"] == 10
    assert [image["name"] for image in seen["held_out"]] == ["10.png", "11.png", "12.png", "13.png"]
    assert (len(seen["cards"]), seen["num_chosen"]) == (12, 14)
    assert [card["name"] for card in window.view(page=1)["cards"]] == ["12.png", "13.png"]
    assert [card["name"] for card in window.view(show="uncaptioned")["cards"]] == ["02.png", "03.png"]


def test_a_caption_that_another_window_saved_is_not_overwritten(window: Window):
    assert window.save("02.png", None, " a boat \n") == {"saved": "a boat", "num_undoable": 1, "history_problem": ""}
    assert window.save("02.png", None, "a ship") == {"changed": "a boat"}
    assert (window.images / "02.txt").read_text() == "a boat\n"
    assert window.save("02.png", "a boat", "a ship")["saved"] == "a ship"
    (window.images / "02.txt").unlink()
    assert window.save("02.png", "a ship", "a whale") == {"changed": None}


def test_the_number_of_replaced_captions_is_known_before_and_undone_at_once(window: Window):
    assert window.view(search="picture")["num_replaceable"] == 12
    assert window.view(search="PICTURE")["num_replaceable"] == 0
    assert window.view()["num_undoable"] == 0
    key = window.view()["key"]
    assert window.call("replace", key=key, search="picture", replacement="drawing") == 12
    assert window.view()["num_undoable"] == 12 == window.call("undo", key=key)
    assert (window.images / "00.txt").read_text() == "picture number 0\n"
    assert window.view()["num_undoable"] == 0


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
    assert window.call("replace", key=seen["key"], search="picture", replacement="drawing") == 3
    assert window.call("undo", key=seen["key"]) == 3
    window.studio.change_draft(lambda draft: draft.typed("data.path", str(window.images)))
    assert window.view()["num_undoable"] == 1 == window.call("undo", key=former)
    assert (window.images / "00.txt").read_text() == "picture number 0\n"


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
