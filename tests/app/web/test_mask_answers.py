"""The functions that the dialog Mask calls, as a browser calls them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app.form.draft import Draft, check
from app.studio import Studio
from app.web.answers import answering
from app.web.pages import data, mask
from tests.app.data.test_masks import painted, png
from tests.runs import make_pictures, write_preset
from trainer.system.installation import PRESETS


class Window:
    """A window of the page: three images of data.path, and two folders of one image each."""

    def __init__(self, folder: Path) -> None:
        self.images = make_pictures(folder / "images", 3)
        for name in ("first", "second"):
            make_pictures(folder / name, 1)
            for file in list((folder / name).iterdir()):
                file.rename(file.with_stem(name))
        preset = write_preset(folder / "runs" / "presets" / "own.yaml", self.images)
        folders = f"folders: [{{path: {folder}/first}}, {{path: {folder}/second, weight: 2}}]"
        preset.write_text(preset.read_text().replace("resolution: 64", f"resolution: 64, {folders}"))
        self.studio = Studio(folder / "runs")
        self.studio.save_draft(Draft(preset))
        calls = [data.calls(self.studio), mask.calls(self.studio)]
        self._functions = answering(calls)

    def ask(self, name: str, /, **values: Any) -> dict[str, Any]:
        """Return the answer as it travels: {"value": ...} or {"error": ...}."""
        return json.loads(json.dumps(self._functions[name](values), allow_nan=False))

    def call(self, name: str, /, **values: Any) -> Any:
        answer = self.ask(name, **values)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def save(self, image: Path, before: str = "", sent: bytes | None = None) -> Any:
        content = sent or png(painted())
        return self.call("mask_save", image=str(image), sent=base64.b64encode(content).decode(), before=before)

    @property
    def values(self) -> dict[str, Any]:
        return dict(self.studio.draft().values)


@pytest.fixture
def window(tmp_path: Path) -> Window:
    return Window(tmp_path)


def test_the_first_mask_of_a_folder_names_its_folder_of_masks_in_the_draft(window: Window, tmp_path: Path):
    window.save(tmp_path / "second" / "second.png")
    expected = [
        {"path": f"{tmp_path}/first"},
        {"path": f"{tmp_path}/second", "weight": 2.0, "masks": f"{tmp_path}/second-masks"},
    ]
    assert window.values == {"data.folders": expected}
    window.save(window.images / "00.png")
    assert window.values == {"data.folders": expected, "data.masks": f"{tmp_path}/images-masks"}
    config = check(window.studio.draft())
    assert not config.errors
    cards = {card["name"]: card["mask"] for card in window.call("data_view")["cards"]}
    assert [name for name, stamp in cards.items() if stamp] == ["00.png", "second.png"]


def test_a_removed_last_mask_takes_its_folder_out_of_the_draft(window: Window, tmp_path: Path):
    second = tmp_path / "second" / "second.png"
    digest = window.save(second)["digest"]
    answer = window.call("mask_save", image=str(second), sent=None, before=digest)
    assert answer == {"digest": "", "num_former": 1}
    assert "masks" not in {key for folder in window.values["data.folders"] for key, value in folder.items() if value}
    assert window.call("mask_load", image=str(second))["num_former"] == 1
    assert window.call("mask_former", image=str(second), number=0)["mask"].startswith("data:image/png;base64,")
    assert window.call("mask_overlay", image=str(second)) == ""


def test_masks_of_the_programs_own_images_are_not_painted(window: Window):
    window.studio.save_draft(Draft(PRESETS / "quickstart.yaml"))
    image = next(iter(sorted((PRESETS / "quickstart").glob("*.png"))))
    sent = base64.b64encode(png(painted())).decode()
    for name, values in (("mask_load", {}), ("mask_save", {"sent": sent, "before": ""})):
        refusal = window.ask(name, image=str(image), **values)["error"]
        assert refusal.endswith("images of the program itself, which stay as they are; put yours into a new folder")
    assert not (PRESETS / "quickstart-masks").exists()


def test_what_a_browser_never_sends_is_refused_with_a_sentence(window: Window, tmp_path: Path):
    image = str(window.images / "00.png")
    for values, wrong in (
        ({"sent": "%%%", "before": ""}, "the mask is not base64"),
        ({"sent": "A" * 5_000_000, "before": ""}, "String should have at most"),
        ({"sent": base64.b64encode(b"GIF89a").decode(), "before": ""}, "the mask is not a PNG file"),
    ):
        assert wrong in window.ask("mask_save", image=image, **values)["error"]
    for path in ("/etc/passwd", "../x.png", str(tmp_path / "away.png"), str(tmp_path / "runs" / "x.png")):
        for name in ("mask_load", "mask_overlay"):
            assert "no such image" in window.ask(name, image=path)["error"]
    Image.new("RGB", (8, 8)).save(tmp_path / "foreign.png")
    small = base64.b64encode(png(painted((8, 8)))).decode()
    for sent in (None, small):
        refused = window.ask("mask_save", image=str(tmp_path / "foreign.png"), sent=sent, before="")["error"]
        assert "not an image that is trained with a mask" in refused
    asked = {"image": image, "model": "--help", "points": [[1, 1, True]]}
    assert "is not the path of a model" in window.ask("mask_find", **asked)["error"]
    assert "mask_find: points" in window.ask("mask_find", **(asked | {"points": [[1, 1, True]] * 101}))["error"]
    assert not (tmp_path / "images-masks").exists()
    assert window.values == {}


def test_a_removed_mask_of_a_folder_that_no_run_reads_leaves_the_draft_as_it_is(window: Window, tmp_path: Path):
    folder = tmp_path / "images-masks"
    folder.mkdir()
    for name in ("00.png", "01.png"):
        Image.new("L", (64, 64) if name == "00.png" else (96, 48)).save(folder / name)
    image = str(window.images / "00.png")
    found = window.call("mask_load", image=image)
    assert (found["is_set"], found["file"], bool(found["digest"])) == (False, str(folder / "00.png"), True)
    window.call("mask_save", image=image, sent=None, before=found["digest"])
    assert window.values == {}
