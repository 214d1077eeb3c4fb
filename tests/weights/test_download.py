"""The download of a model: a process, against a hub on localhost."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.weights.hub_server import COMMIT, PIECE, Hub, HubServer, sha256
from trainer.config.models import published_models
from trainer.system.errors import InputError
from trainer.weights.download import CHUNK, DownloadState, RemoteFile, require_plain
from trainer.weights.hub import cached, find_folder

FLUX2 = "black-forest-labs/FLUX.2-dev"
MIB = 2**20
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
FILES = {
    "model_index.json": b'{"_class_name": "Pipe", "transformer": ["d", "T"]}',
    "transformer/config.json": b'{"_class_name": "Flux2Transformer2DModel"}',
    WEIGHTS: random.Random(0).randbytes(6 * MIB),
    "vae/diffusion_pytorch_model.safetensors": b"v" * 1000,
    "flux2-dev.safetensors": b"the same again",
    "README.md": b"read",
}
TOTAL = sum(len(FILES[name]) for name in FILES if published_models()[FLUX2].needs(name))
TOKEN = "hf_averysecrettoken"


@dataclass
class Here:
    """A folder with an empty cache and a server."""

    folder: Path
    server: HubServer

    @property
    def cache(self) -> Path:
        return self.folder / "hub"

    @property
    def progress(self) -> Path:
        return self.folder / "progress.json"

    @property
    def hub(self) -> Hub:
        return self.server.hub

    @property
    def parts(self) -> list[Path]:
        return [*(self.cache / f"models--{FLUX2.replace('/', '--')}" / "blobs").glob("*.incomplete")]

    def sizes(self) -> list[int]:
        """Of the parts, without one that is renamed meanwhile."""
        sizes = []
        for part in self.parts:
            with suppress(FileNotFoundError):
                sizes.append(part.stat().st_size)
        return sizes

    def start(self, *, limit_bytes: int | None = None, **environment: str) -> subprocess.Popen[str]:
        def limited() -> None:
            if limit_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

        argv = [sys.executable, "-m", "trainer.weights.download", FLUX2, "--progress", str(self.progress)]
        own = {"HF_ENDPOINT": self.server.url, "HF_HOME": str(self.folder), "HF_HUB_OFFLINE": "0", **environment}
        return subprocess.Popen(
            argv,
            env={**os.environ, **own},
            preexec_fn=limited,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def end(self, process: subprocess.Popen[str]) -> tuple[int, DownloadState, str]:
        """(exit code, the last progress, what it printed)"""
        printed = "".join(process.communicate(timeout=60))
        state = DownloadState.read(self.progress)
        assert state is not None
        return process.returncode, state, printed


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with HubServer(Hub(FLUX2, dict(FILES))) as server:
        yield Here(tmp_path, server)


def until(is_so: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_only_the_files_that_are_needed_are_downloaded(here):
    code, state, printed = here.end(here.start())
    assert (code, state) == (0, DownloadState("done", TOTAL, TOTAL, 0.0, "Downloaded and checked."))
    assert printed == "Downloaded and checked.\n"
    folder = find_folder("model.path", FLUX2)
    assert folder.name == COMMIT
    for name, content in FILES.items():
        assert ((folder / name).is_file() and (folder / name).read_bytes() == content) is published_models()[
            FLUX2
        ].needs(name)
    assert here.parts == [] and cached(FLUX2).is_complete
    assert here.end(here.start())[:2] == (code, state), "a second start has nothing to do"
    assert here.hub.bytes_sent == len(FILES[WEIGHTS]) + 1000


def test_a_download_that_was_killed_continues_where_it_was(here):
    here.hub.hold_after = 3 * MIB
    process = here.start()
    until(lambda: max(here.sizes(), default=0) >= 2 * MIB)
    process.kill()
    process.communicate()
    # A small file may have been begun, too.
    [begin] = [size for size in here.sizes() if size >= 2 * MIB]
    assert cached(FLUX2).num_bytes_here >= begin and not cached(FLUX2).is_complete
    here.hub.hold_after, here.hub.bytes_sent = None, 0
    here.hub.released.set()
    here.hub.ranges.clear()
    code, state, _ = here.end(here.start())
    assert (code, state.state, state.num_bytes) == (0, "done", TOTAL)
    assert [asked for asked in here.hub.ranges if asked] == [f"bytes={begin}-"]  # small files come whole
    # Beside the rest, what the connections of the killed process had left, and small files that it had not finished.
    assert here.hub.bytes_sent - (6 * MIB - begin) <= PIECE + 2 * (TOTAL - 6 * MIB)
    assert (find_folder("model.path", FLUX2) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


@pytest.mark.slow
def test_the_progress_file_says_how_far_it_is_and_how_fast(here):
    here.hub.hold_after = 0
    process = here.start()
    until(here.progress.exists)
    first = DownloadState.read(here.progress)
    assert first == DownloadState("waiting", 0, 113 * 10**9, 0.0, "Asking the hub for the list of files.")
    until(lambda: DownloadState.read(here.progress).state == "downloading")
    here.hub.hold_after = 3 * MIB
    here.hub.released.set()
    here.hub.released.clear()
    until(lambda: DownloadState.read(here.progress).num_bytes > 2 * MIB)
    state = DownloadState.read(here.progress)
    assert (state.state, state.total_bytes, state.message) == ("downloading", TOTAL, "")
    assert MIB / 4 < state.bytes_per_s < 30 * MIB
    here.hub.released.set()
    assert here.end(process)[1].state == "done"


@pytest.mark.slow
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT])
def test_it_is_paused_by_a_signal(here, ends):
    here.hub.hold_after = 3 * MIB
    process = here.start()
    until(lambda: max(here.sizes(), default=0) >= 2 * MIB)
    process.send_signal(ends)
    code, state, printed = here.end(process)
    assert (code, state.state, state.bytes_per_s) == (130, "paused", 0.0)
    assert 2 * MIB < state.num_bytes < 4 * MIB
    assert state.message == "Paused. Start it again: it continues where it was." and printed == f"{state.message}\n"


@pytest.mark.slow
def test_a_connection_that_breaks_is_made_again_and_nothing_is_sent_twice(here):
    here.hub.breaks_after = 3 * MIB
    assert here.end(here.start())[:1] == (0,)
    assert len(here.hub.ranges) == 3 and here.hub.bytes_sent < TOTAL + CHUNK


@pytest.mark.slow
def test_a_server_that_only_sends_whole_files_is_no_reason_to_fail(here):
    here.hub.ignores_ranges = True
    blobs = here.cache / f"models--{FLUX2.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(FILES[WEIGHTS])}.incomplete").write_bytes(FILES[WEIGHTS][:MIB])
    assert here.end(here.start())[0] == 0
    assert (find_folder("model.path", FLUX2) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


@pytest.mark.slow
def test_a_part_that_is_damaged_is_removed_and_not_taken_for_the_model(here):
    blobs = here.cache / f"models--{FLUX2.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(FILES[WEIGHTS])}.incomplete").write_bytes(b"x" * 2 * MIB)
    code, state, _ = here.end(here.start())
    assert (code, state.state) == (1, "failed")
    assert state.message == f"{WEIGHTS} arrived damaged and was removed; start the download again."
    assert here.end(here.start())[0] == 0


@pytest.mark.slow
def test_a_part_that_is_longer_than_its_file_is_begun_again(here):
    blobs = here.cache / f"models--{FLUX2.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(FILES[WEIGHTS])}.incomplete").write_bytes(b"x" * 7 * MIB)
    assert here.end(here.start())[0] == 0


def failure(here: Here, process: subprocess.Popen[str]) -> str:
    code, state, printed = here.end(process)
    assert (code, state.state) == (1, "failed") and printed == f"{state.message}\n"
    return state.message


def test_a_gated_model_without_a_login_names_the_licence_and_the_command(here):
    here.hub.is_gated = True
    assert failure(here, here.start()) == (
        "FLUX.2 dev needs a login: accept its licence on https://huggingface.co/black-forest-labs/FLUX.2-dev, "
        "log in with `hf auth login`, and start again."
    )
    assert here.hub.bytes_sent == 0


def test_a_login_that_did_not_accept_the_licence_is_refused_and_its_token_is_written_nowhere(here):
    here.hub.is_gated = True
    assert failure(here, here.start(HF_TOKEN=TOKEN)) == (
        "The account that is logged in may not download FLUX.2 dev: accept its licence on "
        "https://huggingface.co/black-forest-labs/FLUX.2-dev, or log in with another by `hf auth login`, "
        "and start again."
    )
    assert f"Bearer {TOKEN}" in here.hub.tokens
    assert TOKEN not in "".join(file.read_text(errors="replace") for file in here.folder.rglob("*") if file.is_file())


@pytest.mark.slow
def test_a_login_that_accepted_the_licence_downloads_and_its_token_stays_with_the_hub(here):
    here.hub.is_gated = True
    assert here.end(here.start(HF_TOKEN=here.hub.token))[0] == 0
    assert here.hub.tokens_of_cdn == []


def test_a_model_that_the_hub_does_not_have(here):
    here.hub.model_id = "someone/else"
    assert failure(here, here.start()) == (
        "The hub has no model black-forest-labs/FLUX.2-dev, or it needs a login (`hf auth login`). "
        "Its page is https://huggingface.co/black-forest-labs/FLUX.2-dev."
    )


def test_a_hub_that_cannot_be_reached(here):
    assert failure(here, here.start(HF_ENDPOINT="http://127.0.0.1:9")) == (
        "The hub cannot be reached. Check the network and HF_ENDPOINT, and start again: it continues where it was."
    )


@pytest.mark.slow
def test_a_hub_that_is_out_of_order(here):
    here.hub.is_down = True
    assert failure(here, here.start()) == (
        "The hub answered with an error (503). Start again in a while: it continues where it was."
    )


@pytest.mark.slow
def test_an_environment_without_network(here):
    assert failure(here, here.start(HF_HUB_OFFLINE="1")) == (
        "HF_HUB_OFFLINE is set, so nothing is downloaded; unset it."
    )


def test_a_disk_that_is_too_small_is_noticed_before_the_weights(here):
    here.hub.sizes = {WEIGHTS: 10**18}
    message = failure(here, here.start())
    assert message.startswith("FLUX.2 dev needs 1000000000.0 GB more, and ")
    assert message.endswith(f" GB are free in {here.cache}; make room, or set HF_HOME to a folder on a larger disk.")
    assert here.hub.bytes_sent == 0


@pytest.mark.slow
def test_a_disk_that_fills_up_keeps_what_is_there(here):
    message = failure(here, here.start(limit_bytes=4 * MIB))
    assert message == (
        f"{here.cache}: cannot be written (File too large). Make room, and start again: it continues where it was."
    )
    assert here.sizes() == [4 * MIB]
    here.hub.ranges.clear()
    assert here.end(here.start())[0] == 0
    assert here.hub.ranges == [f"bytes={4 * MIB}-"]


@pytest.mark.slow
def test_two_processes_do_not_download_the_same_model(here):
    here.hub.hold_after = 3 * MIB
    first = here.start()
    until(lambda: bool(here.parts))
    second = here.start()
    printed = second.communicate(timeout=30)[1]
    assert second.returncode == 1
    assert printed == f"Another process is downloading it into {here.cache} already.\n"
    here.hub.released.set()
    assert here.end(first)[0] == 0


def test_a_model_that_is_not_published_is_refused(tmp_path):
    argv = [sys.executable, "-m", "trainer.weights.download", "demo", "--progress", str(tmp_path / "p.json")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and done.stderr.startswith("'demo' is not one of black-forest-labs/FLUX.2-dev, ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "checksum"),
    [
        (WEIGHTS, "../../../../outside"), (WEIGHTS, "/tmp/outside"), (WEIGHTS, "A" * 64), (WEIGHTS, "0" * 63),
        (WEIGHTS, f"{'0' * 64}\n"), ("../outside", "0" * 64), ("/tmp/outside", ""), ("a//b", ""), ("a/\0b", ""),
    ],
)  # fmt: skip
def test_a_file_that_the_hub_never_lists_is_refused(path, checksum):
    """Both become names in the cache."""
    with pytest.raises(InputError, match="which the hub never does"):
        require_plain(RemoteFile(path, 1, checksum))
    require_plain(RemoteFile(WEIGHTS, 1, sha256(b"")))
    require_plain(RemoteFile("model_index.json", 1, ""))


@pytest.mark.slow  # three processes
@pytest.mark.parametrize("checksum", ["../../../../outside"])
def test_a_checksum_that_is_none_names_no_file(here, checksum):
    """It is the name of the file in the cache."""
    here.hub.checksums = {WEIGHTS: checksum}
    code, state, _ = here.end(here.start())
    assert (code, state.state) == (1, "failed")
    assert state.message.startswith(f"The server lists '{WEIGHTS}' with the checksum '{checksum}', which the hub never")
    assert files_outside(here) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["transformer/../../../../../outside.json", "transformer/../../../../../outside.safetensors"]
)
def test_a_name_in_the_listing_leads_out_of_no_folder(here, name):
    here.hub.files = {**FILES, name: b"{}"}
    code, state, _ = here.end(here.start())
    assert (code, state.state) == (1, "failed")
    assert "cannot contain a '..'" in state.message or state.message.startswith(f"The server lists '{name}' with")
    assert files_outside(here) == set()


def files_outside(here: Here) -> set[str]:
    """Files that are not in the folder of the model, of its locks, or of the test itself."""
    own = [
        here.cache / f"models--{FLUX2.replace('/', '--')}",
        here.cache / ".locks",
        here.cache / "CACHEDIR.TAG",
        here.progress,
    ]
    files = [file for file in here.folder.rglob("*") if file.is_file()]
    return {str(file) for file in files if not any(file.is_relative_to(place) for place in own)}


@pytest.mark.slow
def test_a_commit_that_the_server_names_leads_out_of_no_folder(here):
    here.hub.commit = "../../../../outside"
    code, state, _ = here.end(here.start())
    assert (code, state.state, files_outside(here)) == (1, "failed", set())
