"""What a person writes about a run: notes, kept as `notes.md` in its folder, and its name, kept as `title.txt`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from trainer.config.sections import half_character
from trainer.run.folder import MOST_TITLE, RunDir, one_line
from trainer.system import files
from trainer.system.errors import InputError

MOST_CHARACTERS = 100_000


@dataclass(frozen=True)
class Notes:
    """The notes as they are on the disk.

    Attributes:
        text: The text; empty without notes.
        version: Changes with the text.
    """

    text: str
    version: str

    @classmethod
    def of(cls, text: str) -> Notes:
        return cls(text, hashlib.sha256(text.encode()).hexdigest()[:16])


@dataclass(frozen=True)
class Saved:
    """The answer to a text that was to be saved.

    Attributes:
        is_saved: False if the notes were changed meanwhile, by another window or an editor. Nothing is written then.
        notes: The notes as they are now.
    """

    is_saved: bool
    notes: Notes


def read(run: RunDir) -> Notes:
    """Read the notes of a run. Raises InputError when the file cannot be read."""
    file = run.path / "notes.md"
    if file.is_symlink():
        file = run.own_file("notes.md")
    try:
        content = files.read(file, 4 * MOST_CHARACTERS)
    except FileNotFoundError:
        return Notes.of("")
    except OSError as error:
        raise files.unreadable(file, error) from error
    return Notes.of(content.decode("utf-8", errors="replace"))


def save(run: RunDir, text: str, version: str) -> Saved:
    """Save the notes, unless they were changed since `version`.

    Args:
        run: The run.
        text: The new text.
        version: The version of the notes that the text was made from.

    Raises:
        InputError: The text is too long or is not valid Unicode, or the notes cannot be read.
        OSError: They cannot be written.
    """
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"notes: {len(text):,} characters; shorten them to {MOST_CHARACTERS:,}")
    if problem := half_character(text):
        raise InputError(f"notes: {problem}")
    with files.locked(run.path / ".notes.lock"):
        now = read(run)
        if now.version == version:
            files.replace(run.path / "notes.md", text)
            return Saved(True, Notes.of(text))
    return Saved(now.text == text, now)


def give_title(run: RunDir, text: str) -> None:
    """Give a run another name, at any time. Its folder, its config and what it has exported keep theirs.

    Args:
        run: The run.
        text: The name; empty for the run's own.

    Raises:
        InputError: The name is too long or is not valid Unicode.
        OSError: It cannot be written.
    """
    if problem := half_character(text):
        raise InputError(f"name: {problem}")
    title = one_line(text)
    if len(title) > MOST_TITLE:
        raise InputError(f"name: {len(title):,} characters; shorten it to {MOST_TITLE}")
    files.replace(run.title_file, f"{title or run.own_title}\n")
