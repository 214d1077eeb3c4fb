"""Finds captions that a draft's model truncates, in the background in a process that loads torch. No gradio."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trainer.config.load import dump_config
from trainer.config.schema import RunConfig
from trainer.data.images.measured import Answer, CutCaption, Measured
from trainer.run.process import worker_environment
from trainer.system import files

IDLE_S = 60.0
"""How long the process lives without a question: it holds half a GiB and takes seconds to start."""
MOST_KEPT = 8
MOST_REST = 600
"""Characters of what is not read that are shown."""

_ANSWER = TypeAdapter(Answer)


@dataclass(frozen=True)
class LengthsResult:
    """The truncated captions of a config.

    Attributes:
        measured: None before the first measurement, or when it failed.
        failure: Why the measurement failed; "" otherwise.
        is_waiting: Whether a measurement is running.
    """

    measured: Measured | None
    failure: str
    is_waiting: bool

    @property
    def cut(self) -> dict[str, dict[str, Any]]:
        """{image: its truncated caption as JSON, with the beginning of what is not read}"""
        return {caption.image: _shown(caption) for caption in self.measured.cut} if self.measured else {}


def _shown(caption: CutCaption) -> dict[str, Any]:
    more = "…" if len(caption.rest) > MOST_REST else ""
    return asdict(caption) | {"rest": caption.rest[:MOST_REST] + more}


@dataclass
class _Question:
    """A config whose captions are to be measured.

    Attributes:
        is_open: Whether it must be sent to the process.
        is_sent: Whether it was sent and has no answer yet.
        answer: The last answer.
    """

    config: RunConfig
    is_open: bool = True
    is_sent: bool = False
    answer: Answer = field(default_factory=Answer)


class Lengths:
    """Measurements of the configs that were requested last."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._changed = threading.Condition()
        self._questions: dict[str, _Question] = {}
        self._is_working = False

    def of(self, config: RunConfig, is_fresh: bool = False) -> LengthsResult:
        """Return what is known of a config's captions without waiting.

        Args:
            is_fresh: Measure again, because the captions may have changed.
        """
        key = _key(config)
        with self._changed:
            question = self._questions.pop(key, None) or _Question(config)
            self._questions[key] = question
            for old in list(self._questions)[:-MOST_KEPT]:
                del self._questions[old]
            question.is_open |= is_fresh
            if question.is_open and not self._is_working:
                self._is_working = True
                threading.Thread(target=self._work, name="lengths", daemon=True).start()
            self._changed.notify()
            answer = question.answer
            return LengthsResult(answer.measured, answer.failure, question.is_open or question.is_sent)

    def outdate(self, config: RunConfig) -> None:
        """Measure a config's captions again when they are asked for next, because one has changed."""
        with self._changed:
            if question := self._questions.get(_key(config)):
                question.is_open = True

    def forget(self) -> None:
        """Drop all answers, because files may have changed."""
        with self._changed:
            self._questions.clear()

    def _work(self) -> None:
        try:
            self._ask_all()
        except OSError as error:  # no process, a full disk, or the process ended before the question
            with self._changed:
                self._is_working = False
                for question in self._questions.values():
                    if question.is_open or question.is_sent:
                        question.answer, question.is_open, question.is_sent = Answer(failure=str(error)), False, False

    def _ask_all(self) -> None:
        """Send every open question to one process, until it ends or none was open for IDLE_S."""
        folder = files.make_private(self._runs / "drafts")
        argv = [sys.executable, "-m", "trainer.data.images.captions", str(self._runs)]
        with (
            (folder / "captions.log").open("w") as log,
            subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=worker_environment()
            ) as process,
        ):
            while question := self._next(process):
                answer = _answer(process, question.config, folder)
                with self._changed:
                    question.answer, question.is_sent = answer, False

    def _next(self, process: subprocess.Popen[str]) -> _Question | None:
        """Wait for an open question and take the latest. Returns None when the process has ended or after IDLE_S."""
        with self._changed:
            if process.poll() is None:
                self._changed.wait_for(self._open, IDLE_S)
            question = self._open()
            if question is None or process.poll() is not None:
                self._is_working = False
                return None
            question.is_open, question.is_sent = False, True
            return question

    def _open(self) -> _Question | None:
        return next((question for question in reversed(self._questions.values()) if question.is_open), None)


def _key(config: RunConfig) -> str:
    prompts = repr((config.sample.prompts, config.sample.negative))
    return config.model.model_dump_json() + config.data.model_dump_json() + prompts


def _answer(process: subprocess.Popen[str], config: RunConfig, folder: Path) -> Answer:
    """Write a config into the folder and return the process's answer about it."""
    assert process.stdin and process.stdout
    file = folder / "captions.yaml"
    files.replace(file, dump_config(config))
    with suppress(BrokenPipeError):  # it has exited, and its output ends
        process.stdin.write(f"{file}\n")
        process.stdin.flush()
    if line := process.stdout.readline():
        return _ANSWER.validate_json(line)
    process.wait()
    return Answer(failure=f"cannot measure captions: the process exited; see {folder / 'captions.log'}")
