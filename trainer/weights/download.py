"""Download a published model into the Hugging Face cache: `python -m trainer.weights.download ID --progress FILE`.

The process can be ended at any time: the next one continues where it was. The hub's own library cannot do that since
version 1.31 (it writes each file under a new name and removes it on failure), so weights are appended here to
`<sha256>.incomplete` in the cache, checked, and given their final name; the library adds the rest. Imports no torch.

See DECISIONS 146.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from trainer.config.models import PublishedModel, downloadable
from trainer.system import files
from trainer.system.amounts import GB
from trainer.system.errors import InputError, not_one_of
from trainer.system.terminal import complain, say
from trainer.weights.hub import cached, repository_folder

MODULE = "trainer.weights.download"
State = Literal["waiting", "downloading", "done", "failed", "paused"]
EXIT_CODES: dict[State, int] = {"done": 0, "failed": 1, "paused": 130}
INTERVAL_S = 1.0
"""Seconds between two writes of the progress file."""
SPEED_WINDOW_S = 10.0
NUM_PARALLEL = 4
"""Files that are downloaded at a time: one connection rarely fills a fast line."""
RESERVE = GB
"""Bytes that a download leaves free on the disk: runs write their checkpoints there."""
CHUNK = 2**20
"""Bytes that are written at a time. With the library's 10 MB, a slow line seems to stand still."""
WEIGHTS = ".safetensors"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CONTINUES = "it continues where it was"


@dataclass(frozen=True)
class DownloadState:
    """The contents of the progress file.

    Attributes:
        state: "waiting" until the hub has listed the files.
        num_bytes: Bytes of the needed files that are here.
        total_bytes: Size of all of them; from the catalogue while it waits.
        bytes_per_s: Speed over the last ten seconds.
        message: One sentence for the user: how it ended and what to do, or what it waits for.
    """

    state: State
    num_bytes: int
    total_bytes: int
    bytes_per_s: float = 0.0
    message: str = ""

    @property
    def is_running(self) -> bool:
        return self.state in ("waiting", "downloading")

    @classmethod
    def read(cls, file: Path) -> DownloadState | None:
        """Read a progress file; None if there is none. Raises InputError if it is damaged, OSError if unreadable."""
        try:
            return files.read_json(file, _STATE, "remove it, and start the download again")
        except FileNotFoundError:
            return None

    def write(self, file: Path) -> None:
        files.replace(file, json.dumps(asdict(self)))


_STATE = TypeAdapter(DownloadState)


@dataclass(frozen=True)
class RemoteFile:
    """A file of the repository that is needed. sha256: of a file of weights; empty for a small file."""

    path: str
    num_bytes: int
    sha256: str


class Download(threading.Thread):
    """The download, in a thread that ends with its process.

    Attributes:
        total_bytes: Size of the needed files.
        is_listed: Whether the hub has listed the files, so that `total_bytes` is exact.
        failure: One sentence, if it has failed.
    """

    def __init__(self, model: PublishedModel) -> None:
        super().__init__(name=f"download of {model.id}", daemon=True)
        self.total_bytes = model.num_bytes
        self.is_listed = False
        self.failure = ""
        self._model = model
        self._folder = repository_folder(model.id)
        self._files: tuple[RemoteFile, ...] = ()
        self._snapshot = self._folder

    def run(self) -> None:
        try:
            lock = self._folder.parent / ".locks" / self._folder.name / "shardstudio.lock"
            lock.parent.mkdir(parents=True, exist_ok=True)
            refusal = f"Another process is downloading it into {self._folder.parent} already."
            with files.locked_by_one(lock, refusal):
                self._download()
        except Exception as error:  # noqa: BLE001 - whatever ends it, the user is shown why
            self.failure = explain(self._model, error)

    @property
    def num_bytes(self) -> int:
        """Bytes of the needed files that are here."""
        if not self.is_listed:
            return min(cached(self._model.id).num_bytes_here, self.total_bytes)
        return sum(self._num_bytes_of(file) for file in self._files)

    def _download(self) -> None:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        constants.DOWNLOAD_CHUNK_SIZE = CHUNK
        include = list(self._model.include)
        # Small files first: a gated model is refused here.
        self._snapshot = Path(
            snapshot_download(self._model.id, allow_patterns=include, ignore_patterns=[f"*{WEIGHTS}"])
        )
        self._files = _needed_files(self._model, self._snapshot.name)
        self.total_bytes = sum(file.num_bytes for file in self._files)
        self.is_listed = True
        self._require_space()
        self._download_weights()
        # Names the weights in the snapshot; they are not downloaded again.
        snapshot_download(self._model.id, revision=self._snapshot.name, allow_patterns=include)

    def _require_space(self) -> None:
        """Raise InputError if the disk has too little space for what is missing."""
        free, missing = shutil.disk_usage(self._folder).free, self.total_bytes - self.num_bytes
        if missing and free < missing + RESERVE:
            raise InputError(
                f"{self._model.name} needs {missing / GB:.1f} GB more, and {free / GB:.1f} GB are free in "
                f"{self._folder.parent}; make room, or set HF_HOME to a folder on a larger disk."
            )

    def _download_weights(self) -> None:
        weights = {file.sha256: file for file in self._files if file.sha256}
        (self._folder / "blobs").mkdir(exist_ok=True)
        pool = ThreadPoolExecutor(NUM_PARALLEL)
        done, _ = wait(
            [pool.submit(self._download_file, file) for file in weights.values()], return_when=FIRST_EXCEPTION
        )
        pool.shutdown(wait=False, cancel_futures=True)  # after a failure the process ends, in the middle of the others
        for future in done:
            future.result()

    def _download_file(self, file: RemoteFile) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        blob, part = self._blob(file), self._part(file)
        if blob.is_file():
            return
        # The address of the hub, not the one that it leads to: that is signed, and valid for an hour.
        url = hf_hub_url(self._model.id, file.path, revision=self._snapshot.name)
        with part.open("ab") as stream:
            if stream.tell() > file.num_bytes:
                stream.truncate(0)
            begin = stream.seek(0, os.SEEK_END)
            http_get(url, stream, resume_size=begin, headers=build_hf_headers(), expected_size=file.num_bytes)
        with part.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != file.sha256:
            part.unlink()
            raise InputError(f"{file.path} arrived damaged and was removed; start the download again.")
        files.rename(part, blob)

    def _blob(self, file: RemoteFile) -> Path:
        return self._folder / "blobs" / file.sha256

    def _part(self, file: RemoteFile) -> Path:
        return self._folder / "blobs" / f"{file.sha256}.incomplete"

    def _num_bytes_of(self, file: RemoteFile) -> int:
        for place in (self._blob(file), self._part(file)) if file.sha256 else (self._snapshot / file.path,):
            try:
                return place.stat().st_size
            except FileNotFoundError:  # a part may get its final name between two looks
                continue
        return 0


def _needed_files(model: PublishedModel, commit: str) -> tuple[RemoteFile, ...]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    listed = HfApi().list_repo_tree(model.id, recursive=True, revision=commit)
    needed = [file for file in listed if isinstance(file, RepoFile) and model.needs(file.path)]
    # Other large files, as a tokenizer's, take seconds: the library downloads them.
    found = tuple(
        RemoteFile(file.path, file.size, file.lfs.sha256 if file.lfs and file.path.endswith(WEIGHTS) else "")
        for file in needed
    )
    for file in found:
        require_plain(file)
    return found


def require_plain(file: RemoteFile) -> None:
    """Raise InputError for a file whose path or checksum would name a place outside of the cache's folders.

    Both come from the server that HF_ENDPOINT names.
    """
    parts = file.path.split("/")
    is_inside = not {"", ".", ".."} & set(parts) and file.path.isprintable()
    if not is_inside or not re.fullmatch(r"([0-9a-f]{64})?", file.sha256):
        raise InputError(
            f"The server lists {file.path!r} with the checksum {file.sha256!r}, which the hub never does: it was not "
            "downloaded. Check HF_ENDPOINT, and start again."
        )


def explain(model: PublishedModel, error: BaseException) -> str:
    """Return one sentence on why a download failed and what to do. Holds no token and no signed address.

    Args:
        model: The model.
        error: What ended the download; the hub's library often keeps the reason in its cause.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    chain = [error]
    # The hub's library wraps errors, and the reason is often in the cause.
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    if isinstance(error, InputError):
        return str(error)
    if any(isinstance(link, OfflineModeIsEnabled) for link in chain):
        return "HF_HUB_OFFLINE is set, so nothing is downloaded; unset it."
    for link in chain:
        if isinstance(link, HfHubHTTPError):
            return _refusal(model, link.response.status_code)
    if isinstance(error, LocalEntryNotFoundError) or any(isinstance(link, HTTPError) for link in chain):
        return f"The hub cannot be reached. Check the network and HF_ENDPOINT, and start again: {CONTINUES}."
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        where = repository_folder(model.id).parent
        return f"{where}: cannot be written ({error.strerror}). Make room, and start again: {CONTINUES}."
    first_line = (str(error).splitlines() or [""])[0]
    return f"The download broke off ({type(error).__name__}: {first_line}). Start it again: {CONTINUES}."


def _refusal(model: PublishedModel, status: int) -> str:
    """The sentence for an HTTP status with which the hub refused."""
    if status == 401 and model.is_gated:
        return (
            f"{model.name} needs a login: accept its licence on {model.page}, log in with `hf auth login`, "
            "and start again."
        )
    if status == 403:
        return (
            f"The account that is logged in may not download {model.name}: accept its licence on {model.page}, "
            "or log in with another by `hf auth login`, and start again."
        )
    if status in (401, 404):
        return f"The hub has no model {model.id}, or it needs a login (`hf auth login`). Its page is {model.page}."
    return f"The hub answered with an error ({status}). Start again in a while: {CONTINUES}."


class _Progress:
    """Writes the progress file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._history: deque[tuple[float, int]] = deque()

    def write(self, download: Download, state: State, message: str = "") -> None:
        num_bytes = download.num_bytes
        speed = self._speed(num_bytes) if state == "downloading" else 0.0
        DownloadState(state, num_bytes, download.total_bytes, speed, message).write(self._file)

    def _speed(self, num_bytes: int) -> float:
        now = time.monotonic()
        self._history.append((now, num_bytes))
        while now - self._history[0][0] > SPEED_WINDOW_S:
            self._history.popleft()
        begin, before = self._history[0]
        return max(0.0, (num_bytes - before) / (now - begin)) if now > begin else 0.0


def _follow(download: Download, progress: _Progress) -> tuple[State, str]:
    """Write the progress of a download until it ends, or SIGTERM or Ctrl-C does so. Returns how it ended."""
    try:
        while download.is_alive():
            waits = "" if download.is_listed else "Asking the hub for the list of files."
            progress.write(download, "waiting" if waits else "downloading", waits)
            download.join(INTERVAL_S)
    except KeyboardInterrupt:
        return "paused", f"Paused. Start it again: {CONTINUES}."
    return ("failed", download.failure) if download.failure else ("done", "Downloaded and checked.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Download a model. Returns the exit code: 0 done, 1 failed, 2 wrong arguments, 130 paused."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.weights.download", description="Download a published model."
    )
    parser.add_argument("id", help="hub id of a published model")
    parser.add_argument("--progress", type=Path, required=True, metavar="FILE", help="JSON, written once a second")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    model = downloadable().get(given.id)
    if model is None:
        complain(not_one_of(given.id, downloadable()))
        return 2
    download, progress = Download(model), _Progress(given.progress)
    download.start()
    state, message = _follow(download, progress)
    (complain if state == "failed" else say)(message)
    progress.write(download, state, message)
    return EXIT_CODES[state]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without waiting for the connections that a pause or a failure leaves open
