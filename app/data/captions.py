"""Reads, edits and searches the captions of a draft's images. The page displays them.

Every change is written to a log first, so that it can be undone, also after a restart. See DECISIONS 137.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import TypeAdapter, ValidationError

from trainer.config.sections import half_character
from trainer.data.images.image_files import MAX_CAPTION, too_long
from trainer.system import files
from trainer.system.errors import InputError

MOST_HISTORY = 16 * files.MIB
"""Bytes of the log of changes; the older half of a longer log is dropped."""
MOST_LINE = 2 * files.MIB
"""Bytes of one change: two captions of 64 KiB, each byte of which JSON may escape as six."""
BLOCK = 64 * 1024
"""Bytes of the log per read, from its end."""


@dataclass(frozen=True)
class Card:
    """An image with its caption, which is empty where the image has no caption file."""

    image: Path
    caption: str

    @property
    def file(self) -> Path:
        return self.image.with_suffix(".txt")


@dataclass(frozen=True)
class Change:
    """One edit of one caption.

    Attributes:
        before: None where there was no file.
        batch: Number shared by the edits that were made together.
    """

    file: str
    before: str | None
    after: str
    batch: int


_CHANGE = TypeAdapter(Change)


class ChangedElsewhere(InputError):
    """A caption's file is not what it was when it was loaded.

    Attributes:
        text: What the file holds now; None where it is gone.
    """

    def __init__(self, file: Path, text: str | None) -> None:
        super().__init__(f"{file}: changed elsewhere since it was loaded; left unchanged")
        self.text = text


def saved(image: Path) -> str | None:
    """Return the text of an image's caption file, None where there is none.

    Raises:
        InputError: It cannot be read, is not UTF-8, or is too long to show.
    """
    file = image.with_suffix(".txt")
    text = _read(file)
    if text is not None and (size := len(text.encode())) > MAX_CAPTION:
        raise InputError(f"{file}: {too_long(size)}")
    return text


class Captions:
    """Writes captions and undoes changes. Several pages may write at once.

    Attributes:
        problem: What is wrong with the log, as of its last read; captions are written anyway.
    """

    def __init__(self, log: Path) -> None:
        """Create the editor. `log` is the file of changes, one per line."""
        self._log = log
        self.problem = ""

    def write(self, card: Card, caption: str) -> None:
        """Replace the caption of an image."""
        _check(card.file, caption)
        with self._opened() as log:
            self._write_all(log, [(card, caption)])

    def save(self, image: Path, before: str | None, caption: str) -> None:
        """Write a caption that a person has edited. Does nothing where the file holds it already.

        Args:
            before: The text of its file when it was loaded; None where there was no file.

        Raises:
            ChangedElsewhere: The file has another text now, which is kept.
        """
        card = Card(image, "")
        _check(card.file, caption)
        with self._opened() as log:
            now = _read(card.file)
            if now == caption:
                return
            if now != before:
                raise ChangedElsewhere(card.file, now)
            self._write_all(log, [(card, caption)])

    def edit(self, captions: Sequence[tuple[Card, str | None]], change: Callable[[str], str]) -> tuple[int, list[str]]:
        """Change captions, which `undo` takes back together. Images without a caption get none.

        Args:
            captions: (image with its caption, text of its file when it was read; None where there was no file).
            change: Returns the new caption of a caption.

        Returns:
            The number of captions that were changed, and why others were not: each is written only where its file is
            what it was when it was read.

        Raises:
            InputError: A file cannot be written. Those before it are.
        """
        new = {
            card.file: (card, before, caption)  # which two images may share
            for card, before in captions
            if card.caption and (caption := change(card.caption)) != card.caption
        }
        kept = [why for why in self.fill([*new.values()]) if why]
        return len(new) - len(kept), kept

    def fill(self, captions: Sequence[tuple[Card, str | None, str]], batch: int | None = None) -> list[str]:
        """Write captions that a program made, each only where its file is what the program knew it to be.

        Args:
            captions: (image, text of its file when the program began, None where there was none; the new caption).
            batch: Number of the changes in the log; calls with the same number are undone together by `undo_batch`.
                None: a new one, so that they are the latest, which `undo` takes back together.

        Returns:
            For each caption, why it was not written; empty where the file holds it now.

        Raises:
            InputError: A file cannot be written. Those before it are.
        """
        with self._opened() as log:
            kept = [_kept(card.file, before, caption) for card, before, caption in captions]
            new = [
                (card, caption)
                for (card, _, caption), why in zip(captions, kept, strict=True)
                if not why and _read(card.file) != caption
            ]
            if new:
                self._write_all(log, new, batch)
        return kept

    def undo_batch(self, batch: int, known: Iterable[Change] = ()) -> tuple[int, int]:
        """Undo all changes of a batch, wherever they are in the log.

        Args:
            batch: Its number.
            known: Changes that it made, some of which the log may have dropped.

        Returns:
            The number of captions that were restored, and of those that were changed elsewhere since and are left.
        """
        with self._opened() as log:
            changes = [change for change in self._all(log) if change.batch == batch]
            logged = {change.file for change in changes}
            dropped = [change for change in known if change.file not in logged and not _is_undone(change)]
            restored = sum(_undone(change) for change in (*dropped, *reversed(changes)))
            if changes:
                self._remove(log, {change.at for change in changes})
        return restored, len(changes) + len(dropped) - restored

    def undoable(self, folders: Sequence[Path] | None = None) -> int:
        """Return the number of captions that `undo` would restore; 0 where nothing was changed."""
        if not os.path.lexists(self._log):
            return 0
        with self._opened() as log:
            return len(self._latest(log, folders))

    def undo(self, folders: Sequence[Path] | None = None) -> int:
        """Undo the latest batch of changes.

        Args:
            folders: Only of captions below these; None for all. Other changes can be undone later.

        Returns:
            The number of captions in the batch.

        Raises:
            InputError: Some captions were changed elsewhere since; names the first. They are left unchanged, and the
                next call undoes the batch before.
        """
        with self._opened() as log:
            changes = self._latest(log, folders)
            kept = [change.file for change in reversed(changes) if not _undone(change)]
            if changes:
                self._remove(log, {change.at for change in changes})
        if kept:
            others = f" and {len(kept) - 1} more" if kept[1:] else ""
            raise InputError(f"{kept[0]}{others}: changed elsewhere since; left unchanged")
        return len(changes)

    def _write_all(self, log: BinaryIO, captions: Sequence[tuple[Card, str]], batch: int | None = None) -> None:
        if batch is None:
            latest = self._latest(log)
            # Larger than any other, also where a batch of `fill`, which began long ago, is the latest.
            batch = max(latest[-1].batch + 1 if latest else 1, int(1000 * time.time()))
        new = [Change(str(card.file), _read(card.file), caption, batch) for card, caption in captions]
        end = log.seek(0, os.SEEK_END)
        is_torn = end > 0 and os.pread(log.fileno(), 1, end - 1) != b"\n"
        lines = [f"{json.dumps(asdict(change))}\n".encode() for change in new]
        log.write((b"\n" if is_torn else b"") + b"".join(lines))
        log.flush()
        os.fsync(log.fileno())
        for number, (card, caption) in enumerate(captions):
            try:
                _write(card.file, caption)
            except InputError as error:
                log.truncate(end + is_torn + sum(map(len, lines[:number])))  # what was not written is not undone
                raise InputError(f"{error}{_so_far(number, len(captions))}") from error
        self._shorten(log)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """Open the log under a lock. A file that cannot be a log is renamed first."""
        folder = files.make_private(self._log.parent)
        self.problem = ""
        with files.locked(folder / f"{self._log.name}.lock"):
            try:
                if os.path.lexists(self._log) and not _is_log(self._log):
                    aside = files.put_aside(self._log)
                    self.problem = f"{self._log}: cannot be read; it was renamed to {aside.name}, remove it"
                self._log.touch(0o600)
                log = self._log.open("a+b")
            except OSError as error:
                raise InputError(f"{self._log}: cannot be written ({error.strerror}); remove it") from error
            with log:
                yield log

    def _latest(self, log: BinaryIO, folders: Sequence[Path] | None = None) -> list[_Noted]:
        """Return the latest batch of changes. Reads only as much of the log's end as it needs."""
        size, damaged = log.seek(0, os.SEEK_END), 0
        found: list[_Noted] = []
        own = None if folders is None else tuple(_start(f"{folder}/".replace("//", "/")) for folder in folders)
        for at, line in _lines_backwards(log, size):
            if not found and size - at > MOST_HISTORY:
                break
            if not line or (own is not None and line.startswith(_start("")) and not line.startswith(own)):
                continue
            try:
                change = _CHANGE.validate_json(line)
            except ValidationError:
                damaged += 1
                continue
            if found and change.batch != found[-1].batch:
                break
            found.append(_Noted(**vars(change), at=at))
        if damaged:
            lines = "1 line is" if damaged == 1 else f"{damaged} lines are"
            self.problem = f"{self._log}: {lines} damaged and skipped; remove the file to clear the history"
        return found[::-1]

    def _all(self, log: BinaryIO) -> Iterator[_Noted]:
        """Yield all changes that can be read, the first one first."""
        at = log.seek(0)
        for line in log:
            with suppress(ValidationError):
                yield _Noted(**vars(_CHANGE.validate_json(line)), at=at)
            at += len(line)

    def _remove(self, log: BinaryIO, places: Collection[int]) -> None:
        """Drop the lines that begin at these bytes of the log."""
        first = min(places)
        log.seek(first)
        kept, at = [], first
        for line in log:
            if at not in places:
                kept.append(line)
            at += len(line)
        if not kept:
            log.truncate(first)
            os.fsync(log.fileno())
            return
        log.seek(0)
        files.replace(self._log, log.read(first) + b"".join(kept))

    def _shorten(self, log: BinaryIO) -> None:
        """Drop the older half of a log that is too long, but never a change of the latest batch."""
        size = log.seek(0, os.SEEK_END)
        if size <= MOST_HISTORY:
            return
        latest = self._latest(log)
        if not latest or latest[0].at <= size // 2:
            return
        log.seek(size // 2)
        log.readline()  # the rest of a line; below, the rest of its batch
        begin = log.tell()
        batch = _batch(log.readline())
        while begin < latest[0].at and batch is not None:
            begin = log.tell()
            if _batch(log.readline()) != batch:
                break
        log.seek(begin)
        files.replace(self._log, log.read())


@dataclass(frozen=True)
class _Noted(Change):
    """A change with the byte of the log where its line begins."""

    at: int


def _start(file: str) -> bytes:
    """Return what the line of a change begins with, up to the end of what is given of its file's path."""
    return b'{"file": ' + json.dumps(file)[:-1].encode()


def _so_far(number: int, count: int) -> str:
    if count == 1:
        return ""
    return f". {number} of {count} captions were changed; Undo restores them" if number else ". No caption was changed"


def _undone(change: Change) -> bool:
    """Restore a caption. Returns False when it is not what the change had made of it, and leaves it unchanged."""
    file = Path(change.file)
    try:
        if _read(file) != change.after.strip():
            return False
    except InputError:
        return False
    if change.before is None:
        file.unlink(missing_ok=True)
    else:
        _write(file, change.before)
    return True


def _is_undone(change: Change) -> bool:
    """Whether a caption is what it was before a change."""
    try:
        return _read(Path(change.file)) == change.before
    except InputError:
        return False


def _kept(file: Path, before: str | None, caption: str) -> str:
    """Return why a caption may not replace what a file holds; empty where it may."""
    try:
        _check(file, caption)
        now = _read(file)
    except InputError as error:
        return str(error)
    if now in (before, caption):
        return ""
    return f"{file}: was {'removed' if now is None else 'written'} meanwhile; left as it is"


def _check(file: Path, caption: str) -> None:
    """Raise InputError for a caption that could not be read again, and for a file that somebody made read-only or whose
    name the log cannot hold."""
    if half_character(str(file)):
        raise InputError(f"{file}: its name is not UTF-8, so that nothing could be undone; rename it")
    if (half := half_character(caption)) is not None:
        raise InputError(f"{file}: the caption {half}")
    if (size := len(caption.encode())) > MAX_CAPTION:
        raise InputError(f"{file}: {too_long(size)}")
    with suppress(OSError):  # there is none yet, or reading it says why
        if not file.stat().st_mode & 0o222:
            raise InputError(f"{file}: is read-only; make it writable, or keep its caption")


def _is_log(file: Path) -> bool:
    return stat.S_ISREG(file.lstat().st_mode) and os.access(file, os.R_OK | os.W_OK)


def _batch(line: bytes) -> int | None:
    try:
        return _CHANGE.validate_json(line).batch
    except ValidationError:
        return None


def _lines_backwards(log: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield (byte where it begins, line) of each line, the last one first."""
    tail, end = b"", size
    while end > 0:
        begin = max(0, end - BLOCK)
        tail = os.pread(log.fileno(), end - begin, begin) + tail
        first, *lines = tail.split(b"\n")
        at = begin + len(tail)
        for line in reversed(lines):
            at -= len(line)
            yield at, line
            at -= 1
        if len(first) > MOST_LINE:
            yield begin, b"endless"
            first = b""
        tail, end = first, begin
    if tail:
        yield 0, tail


def _read(file: Path) -> str | None:
    try:
        return files.read(file).decode("utf-8").removeprefix("\ufeff").strip()  # as the trainer reads it
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({error}); save it as UTF-8") from error


def _write(file: Path, text: str) -> None:
    try:
        files.replace(file, f"{text}\n")
    except OSError as error:
        raise InputError(
            f"{file}: cannot be written ({error.strerror}); free some space, or change its owner"
        ) from error
