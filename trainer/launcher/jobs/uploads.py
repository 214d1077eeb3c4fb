"""Uploads of exported runs to the Hugging Face hub, each a process of its own. Imports no torch."""

from __future__ import annotations

import subprocess
import sys

from trainer.export import card
from trainer.export.upload import Upload, describe
from trainer.launcher.jobs import side_process
from trainer.run.folder import RunDir

MODULE = "trainer.export.upload"


def question(run: RunDir, repo: str, is_private: bool, overwrites: bool) -> str:
    """Return what would be uploaded and who would see it. Raises InputError for a wrong name, or without an export."""
    return describe(run, Upload(repo, is_private, overwrites))


def model_card(run: RunDir, repo: str) -> str:
    """Return the model card that an upload writes. Raises InputError without an export."""
    return card.model_card(run, repo or "OWNER/NAME")


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
