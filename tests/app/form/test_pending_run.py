"""A run that waits for its captions and its model: it starts once, also by another page, or says why it does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants
from pydantic import TypeAdapter

from app.data.captioning import Captioning
from app.form.draft import Draft
from app.form.pending_run import Pending, PendingRun
from app.studio import Studio
from tests.app.browser import in_training
from tests.captioning.models import write_qwen2_5_vl
from tests.runs import make_pictures, write
from tests.weights.hub_server import Hub, HubServer
from trainer.config.models import captioners
from trainer.run.captioning import Asked, CaptionJob, CaptionRequest, jobs
from trainer.run.events import ErrorEvent, StatusEvent
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.weights.download import DownloadState

MODEL = "black-forest-labs/FLUX.2-klein-base-4B"


class Untrained(Studio):
    """A folder of runs that notes the drafts to start, and trains none."""

    def __init__(self, runs: Path) -> None:
        super().__init__(runs)
        self.started: list[Draft] = []

        self.is_killed = False

    def start(self, draft: Draft) -> RunDir:
        self.started.append(draft)
        if self.is_killed:  # the run's processes are there, and this one is gone
            raise SystemExit
        return RunDir(self.runs / "began")


class Bench:
    """A folder of runs with images and a captioning job of them."""

    def __init__(self, folder: Path) -> None:
        self.studio = Untrained(folder / "runs")
        self.images = make_pictures(folder / "images", 12)
        self.captioning = Captioning(self.studio.runs)
        asked = [Asked(file.name) for file in sorted(self.images.glob("*.png"))]
        self.job = CaptionJob.create(self.studio.runs, CaptionRequest(str(self.images), "demo"), asked)

    def page(self) -> PendingRun:
        """A page of the folder of runs."""
        return PendingRun(self.studio, self.captioning)

    def left(self, pending: Pending) -> None:
        """It waits, as a page that has ended left it."""
        file = self.studio.runs / "drafts" / "pending.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(TypeAdapter(Pending).dump_json(pending))

    def ended(self) -> Pending:
        """What another page makes of what waits."""
        page = self.page()
        page.attend()
        until(lambda: not page.state().is_waiting)
        return page.state()

    @property
    def started(self) -> list[Draft]:
        return self.studio.started

    def wanted(self, **changes: str) -> Pending:
        values = {"data.path": str(self.images), "data.missing_caption": "empty", "name": "milo"}
        return replace(Pending("1", str(self.images), "quickstart", values), **changes)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr("app.form.pending_run.LOOKED_EVERY_S", 0.05)
    return Bench(tmp_path)


def until(is_so: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_that_waits_for_nothing_starts_at_once_and_once_for_one_id(bench: Bench):
    page = bench.page()
    begun = page.begin(bench.wanted())
    assert (begun.run, begun.problem) == ("began", "")
    assert bench.page().begin(bench.wanted()) == begun
    [draft] = bench.started
    assert draft.values["sample.prompts"] == [f"[trigger], picture number {at}" for at in (8, 9, 10, 11)]
    page.forget("1")
    assert page.state() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_page_that_is_killed_while_it_starts_the_run_leaves_no_second_start(bench: Bench, is_waiting: bool):
    bench.studio.is_killed = True
    if is_waiting:
        bench.left(bench.wanted())
        bench.page().attend()
        until(lambda: bool(bench.started))
    else:
        with pytest.raises(SystemExit):
            bench.page().begin(bench.wanted())
    bench.studio.is_killed = False
    assert bench.ended().is_uncertain and len(bench.started) == 1
    assert bench.page().begin(bench.wanted(id="2")).run == "began"


def test_a_start_that_is_refused_is_not_taken_for_one_that_was_cut_short(bench: Bench):
    refused = bench.wanted(preset="nosuch")
    with pytest.raises(InputError, match="nosuch"):
        bench.page().begin(refused)
    assert bench.page().state() is None
    bench.left(refused)
    assert "nosuch" in bench.ended().problem


def test_what_another_window_had_started_since_is_not_forgotten(bench: Bench):
    write(bench.job.run, StatusEvent(state="sampling"))
    first, second = bench.page(), bench.page()
    assert first.begin(bench.wanted()).run == "began"
    with in_training(bench.job.run):
        second.begin(bench.wanted(id="2", job=bench.job.path.name))
        first.forget("1")
        assert second.state().id == "2" and second.state().is_waiting
        second.forget("2")
    assert second.state() is None


def test_it_starts_once_with_the_captions_that_were_written_although_two_pages_look_after_it(bench: Bench):
    write(bench.job.run, StatusEvent(state="sampling"))
    first, second = bench.page(), bench.page()
    with in_training(bench.job.run):
        assert first.begin(bench.wanted(job=bench.job.path.name)).is_waiting
        second.attend()
        with pytest.raises(InputError, match="milo waits to be started; stop that first"):
            second.begin(bench.wanted(id="2"))
        time.sleep(0.3)
        assert bench.started == []
        for number, file in enumerate(sorted(bench.images.glob("*.txt"))):
            file.write_text(f"a cat by a model {number}")
        write(bench.job.run, StatusEvent(state="finished"))
    until(lambda: bench.page().state().run == "began")
    time.sleep(0.3)
    [draft] = bench.started
    assert draft.values["sample.prompts"][0] == "[trigger], a cat by a model 8"


def test_captions_that_fail_and_a_download_that_is_gone_are_said_and_nothing_starts(bench: Bench):
    write(bench.job.run, ErrorEvent(message="out of memory", rank=0), StatusEvent(state="failed"))
    with pytest.raises(InputError, match="out of memory"):
        bench.page().begin(bench.wanted(job=bench.job.path.name))
    assert bench.page().state() is None
    bench.left(bench.wanted(model=MODEL))
    assert "its download is gone; start it again" in bench.ended().problem and bench.started == []


def test_a_download_that_fails_meanwhile_is_said_after_a_restart(bench: Bench):
    folder = bench.studio.model_downloads.folder / MODEL.replace("/", "--")
    folder.mkdir(parents=True)
    bench.left(bench.wanted(job=bench.job.path.name, model=MODEL))
    DownloadState("failed", 1, 2, message="No network.").write(folder / "progress.json")
    write(bench.job.run, StatusEvent(state="finished"))
    assert bench.ended().problem == "No network." and bench.started == []


def test_what_is_forgotten_does_not_start_and_a_damaged_file_is_said_and_replaced(bench: Bench):
    write(bench.job.run, StatusEvent(state="sampling"))
    page = bench.page()
    with in_training(bench.job.run):
        page.begin(bench.wanted(job=bench.job.path.name))
        page.forget("1")
    write(bench.job.run, StatusEvent(state="finished"))
    time.sleep(0.3)
    assert bench.started == []
    (bench.studio.runs / "drafts" / "pending.json").write_text("{")
    assert "pending.json" in page.state().problem
    assert page.begin(bench.wanted()).run == "began"


def test_the_model_that_writes_captions_is_waited_for_first(bench: Bench):
    [offered, *_] = captioners()
    folder = bench.studio.model_downloads.folder / offered.replace("/", "--")
    folder.mkdir(parents=True)
    DownloadState("failed", 1, 2, message="No network.").write(folder / "progress.json")
    bench.left(bench.wanted(writer=offered))
    assert bench.ended().problem == "No network."
    assert bench.started == [] and list(jobs(bench.studio.runs)) == [bench.job]


@pytest.mark.slow  # ranks of a real model
def test_a_model_that_is_downloaded_first_writes_the_captions_of_the_prompts(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    [offered, *_] = captioners()
    model = write_qwen2_5_vl(tmp_path / "vl")
    content = {str(file.relative_to(model)): file.read_bytes() for file in model.rglob("*") if file.is_file()}
    for file in bench.images.glob("*.txt"):
        file.unlink()
    with HubServer(Hub(offered, content, hold_after=1)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        begun = bench.page().begin(bench.wanted(writer=offered))
        assert begun.is_waiting and begun.job == ""
        server.hub.released.set()
        until(lambda: bool(bench.page().state().job), 120)
        until(lambda: not bench.page().state().is_waiting, 240)
    assert bench.page().state().problem == ""
    [draft] = bench.started
    written = [file.read_text()[:20] for file in bench.images.glob("*.txt")]
    prompts = draft.values["sample.prompts"]
    assert (len(written), len(prompts)) == (12, 4) and {prompt[:20] for prompt in prompts} <= {*written}
