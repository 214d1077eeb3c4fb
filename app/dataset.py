"""The captions of a draft's images: read, edited, searched. Nothing here shows them.

Every change of a caption is noted in a log before it is made, so that it can be taken back, also after a restart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config import InputError
from trainer.data.images import MAX_CAPTION, too_long


@dataclass(frozen=True)
class Card:
    """One image. caption: as it stands in its file, empty without one."""

    image: Path
    caption: str

    @property
    def file(self) -> Path:
        return self.image.with_suffix(".txt")


@dataclass(frozen=True)
class Change:
    """One edit of one caption. before: None where there was no file.  batch: edits that were made together."""

    file: str
    before: str | None
    after: str
    batch: int


def cards(images: Iterable[Path]) -> list[Card]:
    """The images with their captions. Raises InputError for a caption that cannot be read or is too long to show."""
    return [Card(image, _caption(image.with_suffix(".txt"))) for image in images]


def _caption(file: Path) -> str:
    text = _read(file) or ""
    if (size := len(text.encode())) > MAX_CAPTION:
        raise InputError(f"{file}: {too_long(size)}")
    return text


class Captions:
    """Changes captions and takes changes back. log: file the changes are noted in."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def write(self, card: Card, caption: str) -> None:
        """Give an image another caption."""
        self._apply([(card, caption)])

    def replace(self, cards: Sequence[Card], search: str, replacement: str) -> int:
        """Replace a text in all captions. Returns in how many it stood."""
        found = [
            (card, card.caption.replace(search, replacement)) for card in cards if search and search in card.caption
        ]
        self._apply(found)
        return len(found)

    def undo(self) -> int:
        """Take the latest change back, or all that were made together. Returns how many captions that were."""
        changes = self._changes()
        if not changes:
            return 0
        latest = [change for change in changes if change.batch == changes[-1].batch]
        for change in reversed(latest):
            file = Path(change.file)
            if change.before is None:
                file.unlink(missing_ok=True)
            else:
                _write(file, change.before)
        self._keep([change for change in changes if change.batch != changes[-1].batch])
        return len(latest)

    def _apply(self, captions: Sequence[tuple[Card, str]]) -> None:
        changes = self._changes()
        batch = changes[-1].batch + 1 if changes else 1
        new = [Change(str(card.file), _read(card.file), caption, batch) for card, caption in captions]
        self._keep([*changes, *new])
        for card, caption in captions:
            _write(card.file, caption)

    def _changes(self) -> list[Change]:
        lines = (_read(self._log) or "").splitlines()
        return [Change(**json.loads(line)) for line in lines if line]

    def _keep(self, changes: Sequence[Change]) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        _write(self._log, "\n".join(json.dumps(asdict(change)) for change in changes))


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({error}); save it as UTF-8") from error


def _write(file: Path, text: str) -> None:
    draft = file.with_name(f".{file.name}.part")
    try:
        draft.write_text(f"{text}\n", encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        raise InputError(
            f"{file}: cannot be written ({error.strerror}); free some space, or change its owner"
        ) from error
