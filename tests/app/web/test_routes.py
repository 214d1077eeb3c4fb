"""Addresses that send files of a run: samples as a zip or alone, and the report."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from app.studio import Studio
from app.web import routes
from tests.app.browser import recorded
from tests.runs import write
from trainer.run.events import StatusEvent
from trainer.run.folder import LINK, RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return recorded(tmp_path / "runs", "drawn")


@pytest.fixture
def client(run: RunDir) -> TestClient:
    app = FastAPI()
    routes.add(app, Studio(run.path.parent))
    return TestClient(app)


def test_all_samples_are_sent_as_a_zip_to_be_kept(client: TestClient):
    answer = client.get("/runs/drawn/samples.zip")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/zip")
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''drawn-samples.zip"
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert len(archive.namelist()) == 4


@pytest.mark.parametrize("name", ["a\r\nset-cookie: x=1", 'a"; filename=b.html', "\u00fc \U0001f98a", "\udcff", "a/b"])
def test_no_name_leaves_the_header_that_holds_it(name: str):
    header = routes.attachment(name)["content-disposition"]
    prefix, encoded = header[: len("attachment; filename*=UTF-8''")], header[len("attachment; filename*=UTF-8''") :]
    assert prefix == "attachment; filename*=UTF-8''"
    assert encoded.isascii()
    assert not set(encoded) & set('\r\n"; /')


def test_a_hostile_name_of_a_folder_is_refused(client: TestClient, run: RunDir):
    run.path.rename(run.path.with_name('a"\r\nb'))
    for name in ("a%22%0D%0Ab", "..", "%2e%2e", "drawn"):
        for rest in ("samples.zip", "report", "samples/step-000020-0.png"):
            assert client.get(f"/runs/{name}/{rest}").status_code == 404


def test_one_sample_is_sent_as_it_is_in_the_run_folder(client: TestClient, run: RunDir):
    answer = client.get("/runs/drawn/samples/step-000020-0.png")
    assert answer.content == (run.samples / "step-000020-0.png").read_bytes()
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''drawn-step-000020-0.png"
    assert client.get("/runs/drawn/samples/..%2Fconfig.yaml").status_code == 404
    assert client.get("/runs/drawn/samples/none.png").text == "none.png: not a sample of drawn\n"


def test_the_report_is_sent_in_a_sandbox_and_written_anew_when_there_are_newer_events(client: TestClient, run: RunDir):
    answer = client.get("/runs/drawn/report")
    assert answer.headers["content-security-policy"].startswith("sandbox; default-src 'none';")
    assert answer.headers["content-type"].startswith("text/html")
    assert "<dd>finished</dd>" in answer.text
    written = run.report.stat().st_mtime_ns
    assert client.get("/runs/drawn/report").text == answer.text
    assert run.report.stat().st_mtime_ns == written
    write(run, StatusEvent(state="stopped", step=40))
    os.utime(run.report, (0, 0))
    assert "<dd>stopped</dd>" in client.get("/runs/drawn/report").text


def test_a_report_that_is_a_link_elsewhere_is_not_sent(client: TestClient, run: RunDir):
    key = run.path.parent / "key"
    key.write_text("private")
    run.report.symlink_to(key)
    os.utime(key, (2**31, 2**31))
    answer = client.get("/runs/drawn/report")
    assert (answer.status_code, answer.text) == (404, f"{run.report}: {LINK}\n")
    assert key.read_text() == "private"


def test_a_report_of_a_damaged_run_is_refused_by_a_sentence(client: TestClient, run: RunDir):
    run.config_file.write_text("[")
    answer = client.get("/runs/drawn/report")
    assert (answer.status_code, "config.yaml" in answer.text) == (404, True)
