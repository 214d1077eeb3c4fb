"""Asks a model where an object is, in a side process that loads torch. No gradio."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.run.process import worker_environment
from trainer.system import files
from trainer.system.errors import InputError

IDLE_S = 300.0
"""How long the process lives without a question: it holds the model."""
ENDED_WITHIN_S = 10.0
MOST_PATH = 4096


class MaskModels:
    """The process of the model that was asked last. One question is answered at a time."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._model = ""
        self._idle: threading.Timer | None = None

    def find(self, model: str, question: Mapping[str, Any]) -> str:
        """Return an object's mask as a PNG in base64, white on black. Waits for the model, seconds at first.

        Args:
            model: A folder, or a hub id in the local Hugging Face cache.
            question: As `trainer.models.segmentation.Question` has it.

        Raises:
            InputError: The model cannot be used; says why.
        """
        if not model.strip() or len(model) > MOST_PATH or not model.isprintable() or model.startswith("-"):
            raise InputError(f"{model[:200]!r} is not the path of a model; name a folder of SAM 2, or a hub id")
        with self._lock:
            process = self._running(model.strip())
            answer = self._ask(process, question)
            self._wait_for_more()
        if "error" in answer:
            raise InputError(answer["error"])
        return answer["mask"]

    def _running(self, model: str) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None or self._model != model:
            self._end()
            argv = [sys.executable, "-m", "trainer.models.segmentation", str(Path(model).expanduser())]
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=worker_environment()
                )
            self._model = model
        return self._process

    def _ask(self, process: subprocess.Popen[str], question: Mapping[str, Any]) -> dict[str, str]:
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):  # it has exited, and its output ends
            process.stdin.write(f"{json.dumps(question)}\n")
            process.stdin.flush()
        if line := process.stdout.readline():
            answer: dict[str, str] = json.loads(line)
            return answer
        process.wait()
        return {"error": f"{self._model}: the process of the model exited; see {self._log}"}

    def _wait_for_more(self) -> None:
        if self._idle:
            self._idle.cancel()
        self._idle = threading.Timer(IDLE_S, self.end)
        self._idle.daemon = True
        self._idle.start()

    def end(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            try:
                self._process.communicate(timeout=ENDED_WITHIN_S)  # its input ends, and so does it
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
            self._process = None

    @property
    def _log(self) -> Path:
        return files.make_private(self._runs / "drafts") / "mask-model.log"
