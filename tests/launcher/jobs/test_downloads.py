"""Downloads as the page starts, pauses and follows them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.weights.hub_server import Hub, HubServer
from tests.weights.test_download import FILES, FLUX2, MIB, TOKEN, TOTAL
from trainer.launcher.jobs.downloads import Downloads
from trainer.run.process import Launch
from trainer.system.errors import InputError
from trainer.weights.download import DownloadState


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the processes ask, with an empty cache. This process has no network, as HF_HUB_OFFLINE says."""
    with HubServer(Hub(FLUX2, dict(FILES))) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield server.hub


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of the downloads. Whatever runs when the test ends is ended."""
    yield tmp_path / "downloads"
    Downloads(tmp_path / "downloads").pause(FLUX2)


def until(is_so: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state_of(folder: Path) -> str:
    state = Downloads(folder).state(FLUX2)
    return state.state if state else ""


def test_a_download_is_followed_paused_and_continued_by_a_page_that_was_restarted(hub, folder, tmp_path):
    hub.hold_after = 3 * MIB
    downloads = Downloads(folder)
    assert downloads.state(FLUX2) is None and downloads.running() == [] and not folder.exists()
    downloads.start(FLUX2)
    assert downloads.state(FLUX2).state == "waiting" and downloads.running() == [FLUX2]
    with pytest.raises(InputError, match=f"^{FLUX2}: is being downloaded already$"):
        Downloads(folder).start(FLUX2)

    restarted = Downloads(folder)
    until(lambda: restarted.state(FLUX2).num_bytes > 2 * MIB)
    assert restarted.state(FLUX2).total_bytes == TOTAL and restarted.running() == [FLUX2]
    assert list(restarted.all()) == [FLUX2]
    restarted.pause(FLUX2)
    assert (restarted.state(FLUX2).state, restarted.running()) == ("paused", [])
    assert restarted.state(FLUX2).message == "Paused. Start it again: it continues where it was."

    hub.hold_after = None
    hub.released.set()
    restarted.start(FLUX2)
    seen: list[DownloadState] = []
    until(lambda: bool(seen.append(restarted.state(FLUX2)) or seen[-1].state == "done"))
    assert min(state.num_bytes for state in seen) > 2 * MIB, "what is here is shown from the beginning"
    with pytest.raises(InputError, match=f"^{FLUX2}: is here already$"):
        restarted.start(FLUX2)
    # The small file is asked for at the same time, before or after.
    assert max(int(asked.removeprefix("bytes=")[:-1]) for asked in hub.ranges if asked) >= 2 * MIB
    assert downloads.log(FLUX2).read_text() == "Downloaded and checked.\n"
    kept = {file.name: file.read_text() for file in folder.rglob("*") if file.is_file()}
    assert set(kept) == {"launch.json", "lock", "log.txt", "progress.json"}
    assert TOKEN not in "".join(kept.values()) and f"Bearer {TOKEN}" in hub.tokens

    shutil.rmtree(tmp_path / "hub")
    assert restarted.state(FLUX2) is None and restarted.all() == {}, "its model was deleted"


def test_a_download_that_was_killed_has_failed_and_says_what_to_do(hub, folder):
    hub.hold_after = 0
    downloads = Downloads(folder)
    downloads.start(FLUX2)
    os.kill(json.loads((folder / FLUX2.replace("/", "--") / "launch.json").read_text())["pid"], 9)
    until(lambda: state_of(folder) == "failed")
    assert downloads.state(FLUX2).message == (
        "The download was killed, the machine restarted, or the disk is full. "
        "Start it again: it continues where it was."
    )
    assert downloads.running() == []


def test_a_process_that_only_has_the_number_of_a_download_is_none(hub, folder):
    """After a restart of the machine, another process may have the number."""
    own = folder / FLUX2.replace("/", "--")
    own.mkdir(parents=True)
    DownloadState("downloading", 5, 10).write(own / "progress.json")
    launch = {"pid": os.getpid(), "create_time": 1.0, "argv": ["python"], "since_boot": 1.0}
    (own / "launch.json").write_text(json.dumps(launch))
    downloads = Downloads(folder)
    assert downloads.state(FLUX2).state == "failed" and downloads.state(FLUX2).num_bytes == 5
    downloads.pause(FLUX2)
    assert downloads.state(FLUX2).state == "failed"


def test_a_record_that_names_another_process_does_not_end_it(hub, folder):
    """Folders are copied and passed around, and anybody may write such a record."""
    own = folder / FLUX2.replace("/", "--")
    own.mkdir(parents=True)
    DownloadState("downloading", 5, 10).write(own / "progress.json")
    argv = ["sleep", "60"]
    with subprocess.Popen(argv) as other:
        Launch.of(other, argv).write_file(own / "launch.json")
        Downloads(folder).pause(FLUX2)
        assert other.poll() is None and state_of(folder) == "failed"
        other.kill()


def test_a_damaged_record_is_a_failure_that_names_the_file(hub, folder):
    own = folder / FLUX2.replace("/", "--")
    own.mkdir(parents=True)
    (own / "progress.json").write_text("{")
    state = Downloads(folder).state(FLUX2)
    assert state.state == "failed" and state.message.startswith(f"{own / 'progress.json'}: damaged (")


def test_only_published_models_are_downloaded(folder):
    for model_id in ("demo", "org/other", "../../etc"):
        with pytest.raises(InputError, match=f"^'{model_id}' is not one of black-forest-labs/FLUX.2-dev, "):
            Downloads(folder).start(model_id)
    assert not folder.exists()
