"""Writes the focus points of images into the `metadata.jsonl` files that list them, and undoes the latest change.

Only the number pair of one row changes: all other rows, and the other fields of that row, stay byte for byte.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from trainer.data.images.image_files import METADATA, focus_of
from trainer.data.images.image_io import WHOLE
from trainer.data.images.image_members import is_member
from trainer.system import files
from trainer.system.errors import InputError

Point = tuple[float, float]
NAME = METADATA[0]
MOST_BYTES = 256 * files.MIB
"""Longest metadata.jsonl that is changed: it is written anew as a whole."""
MOST_CHANGES = 100
"""Latest changes that can be undone."""
DIGITS = 4
"""Decimals of a focus point: a tenth of a pixel of an image with 1000."""
_UNLISTED = ("file_name", "focus")
"""Fields of a row that this module has added."""


@dataclass(frozen=True)
class Change:
    """One change of one row.

    Attributes:
        file: The metadata.jsonl.
        image: The image of the row.
        root: The folder of the data that it is in.
        before: The row without its line break; None where it was added.
        after: The row now; None where it was removed.
        number: Index of its line.
    """

    file: str
    image: str
    root: str
    before: str | None
    after: str | None
    number: int


_CHANGES = TypeAdapter(list[Change])


class FocusPoints:
    """Sets focus points, one writer at a time. Several pages may write at once."""

    def __init__(self, log: Path) -> None:
        """Create the editor. `log` is the file of the latest changes."""
        self._log = log

    def set(self, image: Path, root: Path, point: Point | None) -> None:
        """Save where an image is cropped.

        Args:
            image: The image.
            root: The folder of the data that it is in: rows of no folder above it are changed.
            point: (x, y), shares of width and height; None for the middle.

        Raises:
            InputError: The image is in a table or behind a link out of the folder, or a file is damaged. Nothing is
                changed then.
        """
        _require_own(image, root)
        with files.locked(files.make_private(self._log.parent) / f"{self._log.name}.lock"):
            changes = self._changes()
            change = _change(image, root, point)
            if change is None:
                return
            self._save([*changes[1 - MOST_CHANGES :], change])
            try:
                _apply(change.file, change.number, change.before, change.after)
            except InputError:
                self._save(changes)
                raise

    def of(self, image: Path, root: Path) -> Point:
        """Return the focus point of an image, as its files have it now. Raises InputError as `set` does."""
        _require_own(image, root)
        rows = [
            row for file in _metadata_files(image, root) for row in _rows_of(image, file) if _has(row.text, "focus")
        ]
        if not rows:
            return WHOLE.focus
        return focus_of(json.loads(rows[-1].text.removeprefix("\ufeff"))["focus"], image.name)

    def undoable(self, folders: Sequence[Path]) -> str:
        """Return the image below these folders whose focus was changed last; "" where there is none."""
        return next((change.image for change in reversed(self._changes()) if _is_below(change, folders)), "")

    def undo(self, folders: Sequence[Path]) -> Path | None:
        """Undo the latest change below these folders. Returns its image.

        Raises:
            InputError: The row was changed elsewhere since. It is left unchanged, and the next call undoes the change
                before.
        """
        with files.locked(files.make_private(self._log.parent) / f"{self._log.name}.lock"):
            changes = self._changes()
            latest = next((change for change in reversed(changes) if _is_below(change, folders)), None)
            if latest is None:
                return None
            changes.remove(latest)
            self._save(changes)
            _require_own(Path(latest.image), Path(latest.root))
            _apply(latest.file, latest.number, latest.after, latest.before)
        return Path(latest.image)

    def _changes(self) -> list[Change]:
        try:
            return files.read_json(self._log, _CHANGES)
        except FileNotFoundError:
            return []
        except InputError:  # damaged: only the way back is lost
            return []

    def _save(self, changes: Sequence[Change]) -> None:
        files.replace(self._log, json.dumps([asdict(change) for change in changes]), 0o600)


@dataclass(frozen=True)
class _Row:
    """A row that lists an image: its file, the index of its line, and its text."""

    file: Path
    number: int
    text: str


@dataclass(frozen=True)
class _Member:
    """A field of a JSON object, and where it stands in the text."""

    key: str
    start: int
    value: int
    end: int


def _is_below(change: Change, folders: Sequence[Path]) -> bool:
    return any(Path(change.image).is_relative_to(folder) for folder in folders)


def _require_own(image: Path, root: Path) -> None:
    """Raise InputError for an image whose folder's metadata.jsonl is not this page's to change."""
    if is_member(image):
        raise InputError(f"{image}: an image in a table has no focus point; put the image into a folder to set one")
    if not image.is_relative_to(root):
        raise InputError(f"{image}: not in the folder {root}; read the data again")
    real = Path(os.path.realpath(image.parent))
    if not real.is_relative_to(os.path.realpath(root)):
        raise InputError(f"{image}: behind a link out of {root}; set its focus where it is, in {real}")


def _change(image: Path, root: Path, point: Point | None) -> Change | None:
    """The change of a row that sets the focus of an image; None where nothing is to be changed."""
    rows = [row for file in _metadata_files(image, root) for row in _rows_of(image, file)]
    with_focus = [row for row in rows if _has(row.text, "focus")]
    if point is None and not with_focus:
        return None
    if not rows:
        assert point is not None
        file = image.parent / NAME
        added = json.dumps({"file_name": image.name, "focus": _rounded(point)}, ensure_ascii=False)
        return Change(str(file), str(image), str(root), None, added, len(_lines(file)))
    row = (with_focus or rows)[-1]  # a later row replaces an earlier one
    after = _without_focus(row.text) if point is None else _with_focus(row.text, point)
    if after == row.text:
        return None
    return Change(str(row.file), str(image), str(root), row.text, after, row.number)


def _metadata_files(image: Path, root: Path) -> list[Path]:
    """The metadata.jsonl in the folders of an image up to the root, in the order in which a scan reads them."""
    folders = [folder for folder in image.parents if folder.is_relative_to(root)]
    found = [folder / NAME for folder in folders if os.path.lexists(folder / NAME)]
    return sorted(found, key=str)


def _rows_of(image: Path, file: Path) -> Iterator[_Row]:
    """The rows of a file that list an image. Raises InputError, with the line, when any of its rows is damaged."""
    for number, line in enumerate(_lines(file)):
        if not line.strip():
            continue
        place = f"{file}:{number + 1}"
        try:
            text = line.decode().rstrip("\r\n")
            row = json.loads(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place}: not a JSON object ({error}); correct it first, nothing was changed") from error
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
            raise InputError(f'{place}: no "file_name"; correct it first, nothing was changed')
        if Path(os.path.normpath(file.parent / row["file_name"])) == image:
            yield _Row(file, number, text)


def _lines(file: Path) -> list[bytes]:
    """The lines of a file with their line breaks; none where the file is missing."""
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise InputError(f"{file}: a link, or not a regular file; put a file in its place to set focus points")
        content = files.read(file, MOST_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise files.unreadable(file, error) from error
    *lines, last = content.split(b"\n")
    return [line + b"\n" for line in lines] + ([last] if last else [])


def _apply(name: str, number: int, before: str | None, after: str | None) -> None:
    """Replace a row of a file; from None: add it, to None: remove it.

    Args:
        name: The file.
        number: Index of the row's line, where it has not moved.
        before: The row.
        after: What it becomes.

    Raises:
        InputError: The row is not what it was, or the file cannot be written.
    """
    file = Path(name)
    lines = _lines(file)
    if before is None:
        assert after is not None
        if 0 < number >= len(lines) and not lines[-1].endswith(b"\n"):
            lines[-1] += b"\n"
        lines.insert(number, after.encode() + b"\n")
    else:
        # Rows may have moved since: the line is looked for by its text, first at its former number.
        same = [at for at, line in enumerate(lines) if line.rstrip(b"\r\n") == before.encode()]
        at = number if number in same else same[-1] if same else None
        if at is None:
            raise InputError(f"{file}: changed elsewhere since; left unchanged")
        ending = lines[at][len(before.encode()) :]
        lines[at : at + 1] = [] if after is None else [after.encode() + ending]
    try:
        if lines:
            files.replace(file, b"".join(lines))
        else:  # all of it was one row that this module had added
            file.unlink()
    except OSError as error:
        raise InputError(
            f"{file}: cannot be written ({error.strerror}); free some space, or change its owner"
        ) from error


def _with_focus(text: str, point: Point) -> str:
    """The row with this focus, in place of its former one or as its last field."""
    members = _members(text)
    value = json.dumps(_rounded(point))
    former = [member for member in members if member.key == "focus"]
    if former:  # of several, JSON takes the last one
        return text[: former[-1].value] + value + text[former[-1].end :]
    end = members[-1].end
    return f'{text[:end]}, "focus": {value}{text[end:]}'


def _without_focus(text: str) -> str | None:
    """The row without its focus; None where nothing remains in it, since a row must have a caption or a focus."""
    members = _members(text)
    keys = {member.key for member in members}
    if keys <= set(_UNLISTED):
        return None
    if not keys & {"text", "caption"}:
        return _with_focus(text, WHOLE.focus)
    for index, member in reversed(list(enumerate(members))):
        if member.key == "focus" and index:
            text = text[: members[index - 1].end] + text[member.end :]
        elif member.key == "focus":
            text = text[: member.start] + text[members[1].start :]
            members = _members(text)
    return text


def _has(text: str, key: str) -> bool:
    return any(member.key == key for member in _members(text))


def _members(text: str) -> list[_Member]:
    """The fields of a JSON object in a valid text, in their order."""
    decoder, at = json.JSONDecoder(), text.index("{") + 1
    members = []
    while text[at := _after_space(text, at)] != "}":
        key, end = decoder.raw_decode(text, at)
        value = _after_space(text, text.index(":", end) + 1)
        _, stop = decoder.raw_decode(text, value)
        members.append(_Member(key, at, value, stop))
        at = _after_space(text, stop)
        at += text[at] == ","
    return members


def _after_space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _rounded(point: Point) -> list[float]:
    if not all(0 <= part <= 1 for part in point):
        raise InputError(f"focus {list(point)}: give [x, y], shares from 0 to 1 of width and height")
    return [round(part, DIGITS) for part in point]
