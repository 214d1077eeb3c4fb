"""The references that the page gives a drawing: those of the run's samples and files of the user, and no others."""

from __future__ import annotations

import base64
import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app.data.upload.given_references import KEPT_S, MOST_KEPT, MOST_SENT, GivenReferences
from app.studio import Studio
from app.web.answers import answering
from app.web.pages import results, runs, samples
from tests.app.browser import recorded
from tests.runs import make_pictures
from trainer.run.drawings import DrawingRequest
from trainer.run.events import EventWriter, SampleEvent
from trainer.run.folder import RunDir
from trainer.system.errors import InputError


def png_of(colour: str, size: tuple[int, int] = (32, 24)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


class Page:
    """The page's functions about drawings, of a run whose draws are recorded in place of started."""

    def __init__(self, runs: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.run = recorded(runs, "edit", sample__prompts=["as a fox", "as a cat"], **changes)
        self.studio, self.requests = Studio(runs), list[DrawingRequest]()
        monkeypatch.setattr(self.studio.results, "draw", lambda run, request: self.requests.append(request))
        self._functions = answering([results.calls(self.studio)])

    def ask(self, name: str, **values: Any) -> Any:
        """The answer of a function, or the sentence with which it refuses."""
        answer = self._functions[f"result_{name}"](values)
        return answer["value"] if "value" in answer else answer["error"]

    def sampled(self, index: int, *references: str, step: int = 40) -> None:
        with EventWriter(self.run.events_file) as events:
            path = f"samples/step-{step:06d}-{index}.png"
            events.write(SampleEvent(step=step, prompt="a", index=index, path=path, references=references))

    def draw(self, *names: str) -> Any:
        return self.ask("draw", run="edit", prompts=["as a dog"], references=list(names))


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    return Page(tmp_path / "runs", monkeypatch)


def add(page: Page, content: bytes) -> Any:
    return page.ask("add_reference", content=base64.b64encode(content).decode())


def copied(run: RunDir, name: str, colour: str) -> str:
    (run.samples / name).write_bytes(png_of(colour))
    return f"samples/{name}"


def test_the_references_of_the_samples_are_offered_and_those_of_the_first_prompt_chosen(page: Page) -> None:
    red, green = copied(page.run, "reference-a-1.png", "red"), copied(page.run, "reference-b-2.png", "green")
    page.sampled(1, green)
    page.sampled(0, red, green)
    page.sampled(0, green, step=20)
    found = page.ask("drawings", run="edit")
    assert found["reads_references"] is True
    assert [(one["name"], one["is_chosen"]) for one in found["references"]] == [(red, True), (green, True)]
    assert all(Path(one["image"].partition("file=")[2]).is_file() for one in found["references"])
    assert page.draw(green, red) is None
    assert page.draw() is None
    assert page.ask("draw", run="edit", prompts=["as a dog"]) is None
    files = tuple(str(page.run.path / path) for path in (green, red))
    assert [request.references for request in page.requests] == [files, (), None]


def test_pairs_that_are_held_out_are_offered_with_their_captions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, before, unseen = tmp_path / "pictures", tmp_path / "before", tmp_path / "unseen"
    make_pictures(data, count=2)
    before.mkdir()
    unseen.mkdir()
    for name in ("00", "01", "new_0", "new_1"):
        (before / f"{name}.png").write_bytes(png_of("red"))
    (unseen / "new.png").write_bytes(png_of("green"))
    (unseen / "new.txt").write_text("a hat\nof [trigger]")
    sections = {"validation": str(unseen), "references": str(before), "trigger": "TOK"}
    page = Page(tmp_path / "runs", monkeypatch, **{f"data__{name}": value for name, value in sections.items()})
    assert page.ask("drawings", run="edit")["has_held_out"] is True
    (pair,) = page.ask("held_out", run="edit")
    names = [str(before / "new_0.png"), str(before / "new_1.png")]
    assert (pair["caption"], [one["name"] for one in pair["references"]]) == ("a hat of TOK", names)
    assert all(Path(one["image"].partition("file=")[2]).is_file() for one in pair["references"])
    assert page.draw(*names) is None
    assert page.requests[0].references == tuple(names)
    assert page.draw(str(before / "00.png")) == "reference: this image is no longer kept; choose its file again"


def test_a_run_without_held_out_pairs_offers_none(page: Page) -> None:
    assert page.ask("drawings", run="edit")["has_held_out"] is False
    assert page.ask("held_out", run="edit") == []


def test_a_sample_is_answered_with_what_went_in_and_nothing_of_elsewhere(page: Page, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(png_of("red"))
    page.sampled(0, copied(page.run, "reference-a-1.png", "red"), str(tmp_path / "secret.png"), "samples/gone.png")
    copied(page.run, "step-000040-0.png", "green")
    rows = answering([samples.calls(page.studio)])["samples_list"]({"name": "edit"})["value"]["rows"]
    shown = {row["prompt"]: [bool(one) for one in row["references"]] for row in rows}
    assert shown == {"a": [True, False, False], "as a fox": [], "as a cat": []}


def test_compared_samples_are_answered_with_what_went_into_each(page: Page) -> None:
    page.sampled(0, copied(page.run, "reference-a-1.png", "red"))
    recorded(page.studio.runs, "plain", sample__prompts=["a"])
    compare = answering([runs.calls(page.studio)])["compare_show"]
    (row,) = compare({"runs": ["edit", "plain"]})["value"]["samples"]
    assert [list(map(bool, cell.get("references", ()))) for cell in row["cells"]] == [[True], []]


def test_a_given_image_is_decoded_and_written_anew(page: Page) -> None:
    added = add(page, png_of("blue") + b"<script>")
    assert page.draw(added["name"]) is None
    assert page.requests[0].references is not None
    (file,) = map(Path, page.requests[0].references)
    assert file.is_relative_to(page.studio.runs / "drafts")
    assert b"script" not in file.read_bytes()
    with Image.open(file) as image:
        assert (image.size, image.getpixel((3, 3))) == ((32, 24), (0, 0, 255))
    assert Path(added["image"].partition("file=")[2]).is_file()


@pytest.mark.parametrize("name", ["/etc/hostname", "../../secret.png", "drafts/secret", "0" * 32, "samples/gone.png"])
def test_no_path_of_the_machine_is_taken_from_a_browser(page: Page, name: str) -> None:
    assert page.draw(name) == "reference: this image is no longer kept; choose its file again"
    assert page.requests == []


def test_a_run_of_a_stranger_offers_no_file_outside_of_it(page: Page, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(png_of("red"))
    page.sampled(0, str(secret), "../../secret.png", "samples/none.png", "a\0b", "config.yaml")
    assert page.ask("drawings", run="edit")["references"] == []
    for name in (str(secret), "../../secret.png"):
        assert page.draw(name) == "reference: this image is no longer kept; choose its file again"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no image", "reference: cannot be read (not an image of a known format); replace or remove it"),
        (b"0" * (MOST_SENT + 1), "reference: 2,900,001 bytes are more than 2,900,000; make the image smaller"),
    ],
)
def test_what_is_no_image_or_too_large_is_refused(page: Page, content: bytes, reason: str) -> None:
    assert add(page, content) == reason
    assert list((page.studio.runs / "drafts").glob("references/*")) == []


def test_a_page_that_takes_no_uploads_takes_no_references(page: Page) -> None:
    page.studio.uploads.closed = "no uploads here"
    assert add(page, png_of("blue")) == "no uploads here"
    page.studio.uploads.closed = ""
    reason = page.ask("add_reference", content="*" * 8)
    assert reason == "reference: it did not arrive whole; choose its file again"


def test_given_images_are_removed_after_a_week_or_when_there_are_many(tmp_path: Path) -> None:
    given = GivenReferences(tmp_path / "references")
    old = given.add(png_of("red"))
    os.utime(given.file(old), (0, time.time() - KEPT_S - 60))
    new = given.add(png_of("green"))
    with pytest.raises(InputError, match="no longer kept"):
        given.file(old)
    os.utime(given.file(new), (0, time.time() - 60))
    for side in range(MOST_KEPT):
        given.add(png_of("blue", (side + 1, 8)))
    assert len(list(tmp_path.glob("references/*"))) == MOST_KEPT
    with pytest.raises(InputError, match="no longer kept"):
        given.file(new)
