"""Start, pause and follow downloads of published models, each a process of its own. Imports no torch.

A download goes on when the page that started it is closed; any page on the same folder shows it. Whether it is alive is
derived from its process, as for a run.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from trainer.config.models import downloadable
from trainer.run.process import Launch, worker_environment
from trainer.system import files
from trainer.system.errors import InputError, not_one_of
from trainer.weights.download import CONTINUES, MODULE, DownloadState
from trainer.weights.hub import CachedModel, cached

__all__ = ["CachedModel", "DownloadState", "Downloads", "cached"]

PAUSE_TIMEOUT_S = 10.0
"""Seconds that a process has to end by itself. It may be killed: nothing is lost but the last moment's bytes."""
MAX_SILENCE_S = 60.0
"""After this long without a write, a download on another machine or in another container counts as ended."""


class Downloads:
    """The downloads of a folder: for each model its process, its progress and its log.

    Args:
        folder: Where they are kept. It is made by the first download.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def start(self, model_id: str) -> None:
        """Start the download of a model, or continue one that was paused or has failed. Returns at once.

        The process uses the network even if HF_HUB_OFFLINE is set: the user asks for it here.

        Raises:
            InputError: It is not a published model that can be downloaded, is here already, or its download is running.
            OSError: The folder cannot be written.
        """
        if model_id not in downloadable():
            raise InputError(f"{not_one_of(model_id, downloadable())}; download another one with `hf download`")
        folder = self._folder_of(model_id)
        files.make_private_if_new(self.folder)
        files.make_private_if_new(folder)
        with files.locked(folder / "lock"):
            here, total = cached(model_id), downloadable()[model_id].num_bytes
            # Else a newer revision would take its place, which an interruption leaves in part. First, because a process
            # that is done lives for another moment.
            if here.is_complete:
                raise InputError(f"{model_id}: is here already")
            if self._is_alive(model_id):
                raise InputError(f"{model_id}: is being downloaded already")
            waiting = DownloadState("waiting", min(here.num_bytes_here, total), total, message="Starting.")
            waiting.write(self._progress(model_id))
            argv = [sys.executable, *self._arguments(model_id)]
            process = _spawn(argv, self.log(model_id))
            Launch.of(process, argv).write_file(self._launch(model_id))
        # Somebody must wait for the process, or it stays as a zombie after its end.
        threading.Thread(target=process.wait, name=f"end of {model_id}", daemon=True).start()

    def ensure(self, model_id: str) -> None:
        """Start or continue the download of a model, unless another window has done so just before.

        Raises:
            InputError, OSError: As `start`, but for a model that is here or on its way.
        """
        try:
            self.start(model_id)
        except InputError:
            found = self.state(model_id)
            if found is None or found.state in ("failed", "paused"):
                raise

    def pause(self, model_id: str) -> None:
        """End the process of a download and return when it has ended. What is here stays, and `start` continues it.

        Does nothing if it is not running, and for one that another machine runs.

        Raises:
            InputError: The record of its process is damaged.
        """
        process = self._process(model_id)
        if process is None:
            return
        process.terminate()
        _, alive = psutil.wait_procs([process], timeout=PAUSE_TIMEOUT_S)
        for slow in alive:
            slow.kill()
        psutil.wait_procs(alive, timeout=PAUSE_TIMEOUT_S)
        left = DownloadState.read(self._progress(model_id))
        if left is None or left.is_running:  # it was killed, or had just started
            num_bytes, total = (left.num_bytes, left.total_bytes) if left else (0, 0)
            paused = DownloadState("paused", num_bytes, total, message=f"Paused. Start it again: {CONTINUES}.")
            paused.write(self._progress(model_id))

    def state(self, model_id: str) -> DownloadState | None:
        """Return where the latest download of a model is; None if there was none, or its model was deleted since.

        A process that is gone without saying how it ended has failed.
        """
        try:
            is_alive, left = self._is_alive(model_id), DownloadState.read(self._progress(model_id))
        except (InputError, OSError) as error:
            return DownloadState("failed", 0, downloadable()[model_id].num_bytes, message=str(error))
        if left is None or (left.state == "done" and not cached(model_id).is_complete):
            return None
        if is_alive or not left.is_running:
            return left
        message = f"The download was killed, the machine restarted, or the disk is full. Start it again: {CONTINUES}."
        return DownloadState("failed", left.num_bytes, left.total_bytes, message=message)

    def all(self) -> dict[str, DownloadState]:
        """Return the latest download of each model, by its id."""
        known = [model_id for model_id in downloadable() if self._folder_of(model_id).is_dir()]
        states = {model_id: self.state(model_id) for model_id in known}
        return {model_id: state for model_id, state in states.items() if state is not None}

    def running(self) -> list[str]:
        """Return the ids of the models that are being downloaded."""
        return [model_id for model_id in downloadable() if self._is_running(model_id)]

    def log(self, model_id: str) -> Path:
        """Return the file with the output of the latest start."""
        return self._folder_of(model_id) / "log.txt"

    def _is_running(self, model_id: str) -> bool:
        state = self.state(model_id)
        return state is not None and state.is_running

    def _is_alive(self, model_id: str) -> bool:
        """Raises InputError if the record of its process is damaged."""
        launch = self._read_launch(model_id)
        if launch is None or launch.is_here:
            return self._process(model_id) is not None
        try:
            return time.time() - self._progress(model_id).stat().st_mtime < MAX_SILENCE_S
        except FileNotFoundError:
            return False

    def _process(self, model_id: str) -> psutil.Process | None:
        """The process of a download, if it is alive here. Another one that the record may name is none of ours."""
        launch = self._read_launch(model_id)
        is_own = launch is not None and launch.argv[1:] == self._arguments(model_id)
        return launch.process() if launch and is_own else None

    def _arguments(self, model_id: str) -> list[str]:
        return ["-m", MODULE, model_id, "--progress", str(self._progress(model_id))]

    def _folder_of(self, model_id: str) -> Path:
        return self.folder / model_id.replace("/", "--")

    def _progress(self, model_id: str) -> Path:
        return self._folder_of(model_id) / "progress.json"

    def _launch(self, model_id: str) -> Path:
        return self._folder_of(model_id) / "launch.json"

    def _read_launch(self, model_id: str) -> Launch | None:
        return Launch.read_file(self._launch(model_id), "remove it if the download has ended")


def _spawn(argv: list[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**worker_environment(), "HF_HUB_OFFLINE": "0"},
            start_new_session=True,
        )
