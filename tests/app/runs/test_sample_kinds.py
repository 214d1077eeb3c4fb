"""One sample of each kind, through everything that shows samples."""

from __future__ import annotations

import io
import math
import struct
import wave
from pathlib import Path

import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.testclient import TestClient

from app import notebook
from app.runs.monitor import Follower
from app.runs.samples import rows
from app.studio import Studio
from app.web import routes
from app.web.pages import runs as compare_page
from app.web.pages import samples as samples_page
from tests.app.browser import recorded
from trainer.export.card import model_card, published
from trainer.metrics.trackers.feed import Feed, Note, Position, SampleImage
from trainer.run.events import EventWriter, ExportEvent, SampleEvent
from trainer.run.folder import RunDir
from trainer.run.samples import CLIP, IMAGE, KINDS, SOUND, TEXT, Sample, kind_of
from trainer.view.report import write_report

STEP = 60


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (90, 20, 60)).save(buffer, "PNG")
    return buffer.getvalue()


def sound() -> bytes:
    """A tenth of a second of 440 Hz."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 8000, 800, "NONE", ""))
        file.writeframes(
            b"".join(struct.pack("<h", round(9e3 * math.sin(2 * math.pi * 440 * t / 8e3))) for t in range(800))
        )
    return buffer.getvalue()


DRAWN = {
    "image": Sample(IMAGE, picture()),
    "text": Sample(TEXT, b"Once <b>upon</b> a time"),
    "clip": Sample(CLIP, b"\0\0\0\x18ftypmp42 a clip that no test plays", picture()),
    "sound": Sample(SOUND, sound()),
}


def drawn_kinds(runs: Path) -> RunDir:
    """A run that drew a sample of each kind."""
    run = recorded(runs, "kinds")
    (run.path / "export").mkdir(exist_ok=True)
    (run.path / "export" / "adapter.safetensors").write_bytes(b"weights")
    with EventWriter(run.events_file) as events:
        for index, (name, sample) in enumerate(DRAWN.items()):
            path = f"samples/step-{STEP:06d}-{index}{sample.kind.suffix}"
            sample.write(run.path / path)
            events.write(SampleEvent(step=STEP, prompt=f"a {name}", index=index, path=path, text=sample.text))
        events.write(ExportEvent(step=STEP, path="export/adapter.safetensors", what="adapter", format="diffusers"))
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return drawn_kinds(tmp_path / "runs")


def test_a_kind_is_known_by_its_suffix_and_has_one_of_its_own() -> None:
    assert [kind_of(f"samples/a{kind.suffix}") for kind in KINDS] == list(KINDS)
    assert len({kind.suffix for kind in KINDS}) == len({kind.name for kind in KINDS}) == len(KINDS) == len(DRAWN)
    assert kind_of("samples/a.exe") is IMAGE, "which nothing can open as one"


def test_the_file_of_another_kind_is_our_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"a\.png is not a text"):
        Sample(TEXT, b"once").write(tmp_path / "a.png")


def newest(run: RunDir) -> dict[str, SampleEvent]:
    """{kind: its sample}"""
    return {sample.kind.name: sample for sample in Follower(run).view().samples if sample.step == STEP}


def test_the_page_has_a_row_for_each_and_misses_the_poster_of_a_clip(run: RunDir) -> None:
    view = Follower(run).view()
    found = {row.prompt: row for row in rows(run, view.samples) if STEP in row.steps}
    assert [(row.kind, row.missing) for row in found.values()] == [(name, ()) for name in DRAWN]
    (run.path / newest(run)["clip"].picture).unlink()
    (run.path / newest(run)["sound"].path).unlink()
    again = rows(run, view.samples)
    assert [row.prompt for row in again if row.missing] == ["a clip", "a sound"]


def test_the_page_shows_a_text_a_picture_a_poster_and_plays_what_has_a_duration(run: RunDir) -> None:
    studio = Studio(run.path.parent)
    ask = samples_page.calls(studio)["samples_images"]
    cells = [samples_page.Cell(at, f"a {name}", STEP) for at, name in enumerate(DRAWN)]
    image, text, clip, heard = ask("kinds", cells)
    assert image.keys() == {"src", "file"} and text == {"text": "Once <b>upon</b> a time", "file": "step-000060-1.txt"}
    assert clip.keys() == {"src", "file", "played"} and clip["played"] == "video/mp4"
    assert heard == {"file": "step-000060-3.wav", "played": "audio/wav"}
    app = FastAPI()
    routes.add(app, studio)
    answer = TestClient(app).get("/runs/kinds/samples/step-000060-3.wav", headers={"range": "bytes=0-3"})
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (206, b"RIFF", "audio/wav")
    answer = TestClient(app).get("/runs/kinds/samples/step-000060-0.png")
    assert answer.headers["content-type"] == "application/octet-stream"


def test_the_comparison_of_runs_shows_each(run: RunDir) -> None:
    view, studio = Follower(run).view(), Studio(run.path.parent)
    shown = {name: compare_page._cell(studio, view, sample) for name, sample in newest(run).items()}
    assert {name: set(cell or {}) - {"step", "prompt"} for name, cell in shown.items()} == {
        "image": {"small", "full"},
        "text": {"text"},
        "clip": {"small", "full"},
        "sound": {"text"},
    }


def test_report_card_trackers_and_notebook_show_each(run: RunDir) -> None:
    report = write_report(run).read_text(encoding="utf-8")
    assert report.count("data:image/png;base64,") >= 2 and "Once &lt;b&gt;upon&lt;/b&gt; a time" in report
    assert "samples/step-000060-3.wav" in report and 'class="missing"' not in report
    card = model_card(run)
    assert '<video controls src="samples/step-000060-2.mp4"></video>' in card and "Once <b>upon</b>" in card
    assert {name for name in published(run).files(run) if name.startswith("samples/")} == {
        f"samples/step-000060-{at}{kind.suffix}" for at, kind in ((0, IMAGE), (2, CLIP), (3, SOUND))
    }
    sent = [item for item in Feed(run, Position(run.path / "position")).items() if item.step == STEP]
    pictures = [item.image().size for item in sent if isinstance(item, SampleImage)]
    assert pictures == [(64, 48), (64, 48)]
    assert [item.text for item in sent if isinstance(item, Note)] == [
        "Once <b>upon</b> a time",
        "samples/step-000060-3.wav",
    ]
    assert list(notebook.samples(run)[f"step {STEP}"]) == ["a image", "a clip"]
    assert notebook.texts(run)[f"step {STEP}"] == [("a text", "Once <b>upon</b> a time")]
