"""Text for a causal language model, read as a stream: pieces of documents, or rows packed with several documents.

The order is a function of the seed and the epoch. A StreamPosition goes into the checkpoint, and from there the stream
continues exactly. Every rank reads the same stream and takes its own rows, so that the number of ranks may change.

See DECISIONS 83.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainer.data.text.packing import best_fit
from trainer.data.text.text_documents import Document, Encoder, Reader
from trainer.data.text.text_files import TextFolder
from trainer.data.text.text_mixture import Cursor, Mixture, random_order
from trainer.system.errors import InputError

PADDING = -1

Packing = Literal["whole", "split"]
TooLong = Literal["drop", "cut"]


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive tokens of one document, at least two.

    Attributes:
        tokens: (N,) ids.
        loss_mask: (N,) which of them are in the loss; never the first.
        second: As in `Document`.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    second: int = 0


@dataclass(frozen=True, eq=False)
class PackedRow:
    """Pieces one after the other. Attention stays within a piece, and positions count from 0 in each.

    Attributes:
        tokens: (length,) ids; padding is end-of-text.
        loss_mask: (length,) which of them are in the loss; no first token of a piece, no prompt, no padding.
        documents: (length,) index of the piece in the row, from 0; PADDING for padding. The two answers of a preference
            count as two, so that pair n has 2n and 2n + 1.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    documents: NDArray[np.int64]


@dataclass(frozen=True)
class StreamPosition:
    """Where a stream continues.

    Attributes:
        epoch: The epoch, from 0.
        window: Index of the window in the epoch.
        cursors: Where the window begins in each folder; empty for the beginning.
        document: The next document in the shuffled window; the number of documents when the window is used up.
        token: Where the next piece of that document begins.
        row: With whole packing, the next row of the window, instead of document and token.
    """

    epoch: int = 0
    window: int = 0
    cursors: tuple[Cursor, ...] = ()
    document: int = 0
    token: int = 0
    row: int = 0

    def as_place(self) -> dict[str, int]:
        """The position as manifests hold it (`Progress.place`): zeros of what only mixtures and whole packing use are
        left out, and folders after the first have their number in the names."""
        place = {"epoch": self.epoch, "window": self.window, "document": self.document, "token": self.token}
        optional = {"row": self.row}
        for number, cursor in enumerate(self.cursors or (Cursor(),)):
            suffix = f".{number}" if number else ""
            place |= {f"file{suffix}": cursor.file, f"offset{suffix}": cursor.offset}
            optional |= {f"turn{suffix}": cursor.turn, f"number{suffix}": cursor.number}
        return place | {name: value for name, value in optional.items() if value}

    @classmethod
    def from_place(cls, place: Mapping[str, int]) -> StreamPosition:
        """The position that `as_place` returned."""
        count_of = sum(name.partition(".")[0] == "file" for name in place)
        cursors = []
        for number in range(count_of):
            suffix = f".{number}" if number else ""
            cursors.append(Cursor(**{name: place.get(f"{name}{suffix}", 0) for name in Cursor.__dataclass_fields__}))
        own = {name: place.get(name, 0) for name in ("epoch", "window", "document", "token", "row")}
        return cls(cursors=tuple(cursors), **own)


START = StreamPosition()

LeftOut = Callable[[int, str, str], None]
"""Takes a document that is left out, or not used in full: its epoch, where it is, and why. Held-out text has an epoch,
too."""


@dataclass(frozen=True, eq=False)
class _Window:
    """Documents that are packed together.

    Attributes:
        begin: Where it begins, and which of its rows is the next.
        num_documents: Number of its documents.
        pieces: What is packed, tokenized when it is taken.
    """

    begin: StreamPosition
    num_documents: int
    pieces: Iterator[Piece]


class TextStream:
    """The documents of some folders, epoch after epoch, each in another order.

    The files of an epoch are shuffled, and so is each window of consecutive documents. A window is held in memory as in
    the file; a .txt is one document and read whole, a .npy stays on the disk. With split packing, windows of one folder
    end with a file, and documents are tokenized one by one; with whole packing two windows are held, one of them as
    tokens. Empty documents are skipped, and so are those with an empty completion.

    A StreamPosition is valid for the same arguments and unchanged files (equal `text_files.digest`). Iterating raises
    InputError naming the file, and the line of a .jsonl, when something cannot be used or nothing is in the loss.

    Args:
        folders: Files with the weights of their documents.
        encoder: How documents become tokens.
        seed: Seed of the order.
        length: Tokens of a row, and the most tokens of a piece, >= 2.
        shuffle_window: Number of documents that are shuffled among themselves, >= 1.
        epochs: Number of epochs; None for no end.
        packing: Whether documents are kept whole or cut at the end of a row.
        is_shared: Whether documents share rows. If not, the rest of a document's row is padding.
        too_long: What happens, with whole packing, to a prompt or conversation longer than a row.
        left_out: Called for each document that is left out.
        noted: Called for each document that is not used in full.
    """

    def __init__(
        self,
        folders: Sequence[TextFolder],
        encoder: Encoder,
        seed: int,
        length: int,
        shuffle_window: int = 1024,
        epochs: int | None = None,
        packing: Packing = "split",
        is_shared: bool = True,
        too_long: TooLong = "drop",
        left_out: LeftOut = lambda epoch, where, why: None,
        noted: LeftOut = lambda epoch, where, why: None,
    ) -> None:
        assert folders
        assert length >= 2
        assert shuffle_window >= 1
        self._folders = tuple(folders)
        self._mixture = Mixture(folders, encoder, seed)
        self._end_of_text = encoder.end_of_text
        self._seed = seed
        self._length = length
        self._shuffle_window = shuffle_window
        self._epochs = epochs
        self._packing = packing
        self._is_shared = is_shared
        self._too_long = too_long
        self._left_out = left_out
        self._noted = noted
        self._notes = encoder.notes
        self._reasons: dict[str, tuple[str, int]] = {}  # why: (the first document, how many)
        self._remedies: set[str] = set()  # what would have kept some of them

    def pieces(self, position: StreamPosition = START) -> Iterator[tuple[Piece, StreamPosition]]:
        """Each document in pieces of `length` tokens, the last one shorter, with the position to continue after each.

        The last token of a piece is the first of the next: every token but a document's first is predicted once.
        """
        for document, at in self._documents(position):
            after = at
            while after.document == at.document:
                piece, after = _cut(document, after, self._length)
                yield piece, after

    def rows(self, position: StreamPosition = START) -> Iterator[tuple[PackedRow, StreamPosition]]:
        """Rows filled with documents, with the position to continue after each.

        Whole packing: as `_whole_rows`. Split packing: a document that does not fit is cut at the end of the row and
        goes on in the next, again with one token in common. Padding is a last single token, for which no piece is small
        enough, and the end of the last row.
        """
        return self._whole_rows(position) if self._packing == "whole" else self._split_rows(position)

    def _split_rows(self, position: StreamPosition) -> Iterator[tuple[PackedRow, StreamPosition]]:
        pieces: list[Piece] = []
        room = self._length
        after = position
        for document, at in self._documents(position):
            after = at
            while after.document == at.document:
                piece, after = _cut(document, after, room)
                pieces.append(piece)
                room -= len(piece.tokens)
                if room < 2 or not self._is_shared:
                    yield self._packed(pieces), after
                    pieces, room = [], self._length
        if pieces:
            yield self._packed(pieces), after

    def _whole_rows(self, position: StreamPosition) -> Iterator[tuple[PackedRow, StreamPosition]]:
        """Rows of whole documents: those of a window by best fit, then in random order.

        A plain text that is longer than a row fills rows, and its rest is packed; of a prompt or conversation that is
        longer, `too_long` decides.
        """
        windows = self._whole_windows(position)
        current: _Window | None = next(windows, None)
        pieces: list[Piece] = []
        epoch, num_empty, is_empty = position.epoch, 0, position == replace(START, epoch=position.epoch)
        while current:
            begin = current.begin
            if begin.epoch != epoch:
                epoch, num_empty, is_empty = begin.epoch, self._empty(num_empty, is_empty), True
            pieces += current.pieces
            lengths = [len(piece.tokens) for piece in pieces]
            rows = best_fit(lengths, self._length) if self._is_shared else [[index] for index in range(len(pieces))]
            order = random_order(len(rows), self._seed, "text rows", epoch, begin.window)
            # The next window is tokenized little by little, as rows are taken: at once, it would keep a step waiting.
            following, ahead = next(windows, None), list[Piece]()
            for number in range(begin.row, len(rows)):
                is_empty = False
                row = self._packed([pieces[index] for index in rows[order[number]]])
                yield row, replace(begin, row=number + 1, document=0, token=0)
                if following:
                    ahead += islice(following.pieces, math.ceil(following.num_documents / len(rows)))
            current, pieces = following, ahead
        self._empty(num_empty, is_empty)

    def _whole_windows(self, position: StreamPosition) -> Iterator[_Window]:
        """The windows of all epochs, shuffled; at least one of each epoch, which may be empty."""
        for epoch, start in self._epochs_from(position):
            begin: StreamPosition | None = None
            for window, begin in self._windows(start):
                order = random_order(len(window), self._seed, "text window", epoch, begin.window)
                readers = [window[number] for number in order]
                yield _Window(begin, len(readers), self._pieces_of(readers, epoch))
            if begin is None:
                yield _Window(start, 0, iter(()))

    def _pieces_of(self, readers: Sequence[Reader], epoch: int) -> Iterator[Piece]:
        for reader in readers:
            yield from self._fitting(self._read(reader, epoch), epoch)

    def _read(self, reader: Reader, epoch: int) -> Document:
        document = reader()
        for note in self._notes():
            self._noted(epoch, document.where(), note)
        return document

    def _fitting(self, document: Document, epoch: int) -> Iterator[Piece]:
        """The pieces of a document for whole packing; none if it is left out."""
        if not self._teaches(document, epoch):
            return
        if len(document.tokens) <= self._length or document.is_text:
            after = START
            while after.document == 0:
                piece, after = _cut(document, after, self._length)
                yield piece
            return
        why = f"longer than data.length {self._length}"
        piece, _ = _cut(document, START, self._length)
        teaches = bool(piece.loss_mask.any()) and not document.second
        if self._too_long == "cut" and teaches:
            yield piece
        else:
            self._remedies |= {"raise data.length"} | ({"set data.too_long: cut"} if teaches else set())
            self._leave_out(
                epoch, document, why if self._too_long == "drop" else f"{why} before its first token in the loss"
            )

    def _teaches(self, document: Document, epoch: int) -> bool:
        """Whether something of a document is in the loss; that of a prompt or conversation without is reported."""
        if len(document.tokens) < 2 and document.is_text:
            return False
        if not document.is_text and not document.loss_mask[1:].any():
            self._leave_out(epoch, document, "no token in the loss")
            return False
        return True

    def _leave_out(self, epoch: int, document: Document, why: str) -> None:
        first, number = self._reasons.get(why) or (document.where(), 0)
        self._reasons[why] = first, number + 1
        self._left_out(epoch, first, why)

    def _packed(self, pieces: Sequence[Piece]) -> PackedRow:
        tokens = np.full(self._length, self._end_of_text, dtype=np.int64)
        loss_mask = np.zeros(self._length, dtype=np.bool_)
        documents = np.full(self._length, PADDING, dtype=np.int64)
        start = number = 0
        for piece in pieces:
            stop = start + len(piece.tokens)
            tokens[start:stop] = piece.tokens
            loss_mask[start:stop] = piece.loss_mask
            documents[start:stop] = number
            if piece.second:
                number += 1
                documents[start + piece.second : stop] = number
            start, number = stop, number + 1
        return PackedRow(tokens, loss_mask, documents)

    def _documents(self, position: StreamPosition) -> Iterator[tuple[Document, StreamPosition]]:
        """Documents with at least two unused tokens from `position` on, each with the position of its first one."""
        num_empty = 0
        for epoch, start in self._epochs_from(position):
            is_empty = start == replace(START, epoch=epoch)
            for document, at in self._epoch(start):
                is_empty = False
                yield document, at
            num_empty = self._empty(num_empty, is_empty)

    def _epochs_from(self, position: StreamPosition) -> Iterator[tuple[int, StreamPosition]]:
        """Each epoch from that of `position` on, with the position to start at."""
        for epoch in count(position.epoch) if self._epochs is None else range(position.epoch, self._epochs):
            yield epoch, position if epoch == position.epoch else replace(START, epoch=epoch)

    def _empty(self, num_empty: int, is_empty: bool) -> int:
        """Number of empty epochs in a row after one more epoch. Raises InputError where there is nothing to learn."""
        num_empty = num_empty + 1 if is_empty else 0
        if num_empty > self._mixture.empty_epochs:
            raise self._nothing()
        return num_empty

    def _nothing(self) -> InputError:
        files = [file for folder in self._folders for file in folder.files]
        others = f" and {len(files) - 1} other files" if len(files) > 1 else ""
        if not self._reasons:
            return InputError(f"{files[0]}{others}: no document holds any text; write some, or give others")
        left_out = "; ".join(f"{number} {why}, the first {first}" for why, (first, number) in self._reasons.items())
        remedies = ", ".join([*sorted(self._remedies), f"{'or ' if self._remedies else ''}correct the files"])
        return InputError(f"{files[0]}{others}: every document is left out ({left_out}); {remedies}")

    def _epoch(self, position: StreamPosition) -> Iterator[tuple[Document, StreamPosition]]:
        for window, start in self._windows(position):
            order = random_order(len(window), self._seed, "text window", start.epoch, start.window)
            for number in range(start.document, len(window)):
                document = self._read(window[order[number]], start.epoch)
                at = start if number == start.document else replace(start, document=number, token=0)
                if self._teaches(document, start.epoch) and len(document.tokens) - at.token >= 2:
                    yield document, at

    def _windows(self, position: StreamPosition) -> Iterator[tuple[Sequence[Reader], StreamPosition]]:
        """The windows of the epoch, beginning with the one of `position`, each with the position to start at."""
        cursors = position.cursors or self._mixture.start
        position = replace(position, cursors=cursors)
        if self._packing == "split" and self._mixture.is_plain:
            yield from self._windows_of_files(position)
            return
        window: list[Reader] = []
        for reader, after in self._mixture.documents(position.epoch, cursors):
            window.append(reader)
            if len(window) == self._shuffle_window:
                yield window, position
                window, position = [], StreamPosition(position.epoch, position.window + 1, after)
        if window:
            yield window, position

    def _windows_of_files(self, position: StreamPosition) -> Iterator[tuple[Sequence[Reader], StreamPosition]]:
        """The windows of a plain mixture, each within one file."""
        for begin, documents in self._mixture.files(position.epoch, position.cursors[0]):
            position = replace(position, cursors=(begin,))
            window: list[Reader] = []
            for reader, after in documents:
                window.append(reader)
                if len(window) == self._shuffle_window:
                    yield window, position
                    window, position = [], StreamPosition(position.epoch, position.window + 1, after)
            # A file that ends with a window has an empty one after it: the numbers of later windows seed their orders.
            yield window, position
            position = StreamPosition(position.epoch, position.window + 1)


def _cut(document: Document, at: StreamPosition, room: int) -> tuple[Piece, StreamPosition]:
    """The next tokens of a document, at most `room` >= 2, and the position after them, which leaves none or >= 2."""
    stop = min(at.token + room, len(document.tokens))
    loss_mask = document.loss_mask[at.token : stop].copy()
    loss_mask[0] = False
    piece = Piece(document.tokens[at.token : stop].astype(np.int64), loss_mask, document.second)
    if stop == len(document.tokens):
        return piece, replace(at, document=at.document + 1, token=0)
    return piece, replace(at, token=stop - 1)
