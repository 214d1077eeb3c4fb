"""Uploads of exported runs to the Hugging Face hub, each a process of its own. Imports no torch."""

from __future__ import annotations

import subprocess
import sys

from trainer.export import card
from trainer.export.upload import Prepared, Upload, prepare
from trainer.launcher.jobs import side_process
from trainer.run.folder import RunDir

MODULE = "trainer.export.upload"


def question(run: RunDir, repo: str, is_private: bool, overwrites: bool) -> Prepared:
    """Return what would be uploaded, who would see it, and the model card.

    Raises:
        InputError: The name is wrong, nothing was exported, or a text holds what must stay on this machine.
    """
    return prepare(run, Upload(repo, is_private, overwrites))


def begin(run: RunDir, repo: str, is_private: bool, overwrites: bool) -> subprocess.Popen[bytes]:
    """Start an upload; the user has agreed to it. Its exit code is 2 for the user's mistake.

    Raises:
        InputError: The name is wrong, or nothing was exported.
    """
    wanted = Upload(repo, is_private, overwrites)
    run.guard()
    card.published(run)
    argv = [sys.executable, "-m", MODULE, str(run.path), *wanted.arguments(), "--yes"]
    return side_process.begin(run, "upload", argv)


def output(run: RunDir, code: int) -> str:
    """Return the address of the last upload of a run, or why it failed. code: exit code of its process."""
    return side_process.answer(run, "upload", code, "upload")
