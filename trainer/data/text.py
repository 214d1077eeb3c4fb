"""Text to train a language model on: streamed from files, cut into documents, packed into rows of equal length.

What a run reads is a function of the files and the seed. Where it stands is a `Place`, a few numbers that go into a
checkpoint: from there on the stream is what the uninterrupted one would have been. Every rank reads the same stream and
takes its own rows; to cut text into tokens takes a small part of the time it takes to train on them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.config import InputError
from trainer.rng import generator

Tokenize = Callable[[str], list[int]]
"""A text to its token ids, without special tokens."""
KINDS = (".txt", ".jsonl", ".npy")
"""A whole file is one document; one document per line, an object with `text`, or with `prompt` and `completion`, of
which only the completion is learned; token ids, in which each document ends with the end of text."""


@dataclass(frozen=True)
class Piece:
    """Tokens of one document. tokens: (n,) ids.  learned: (n,) whether each is predicted, never the first."""

    tokens: NDArray[np.int64]
    learned: NDArray[np.bool_]


@dataclass(frozen=True)
class Row:
    """Several pieces. tokens, learned: (length,).  documents: (length,) the piece's number, -1 for padding."""

    tokens: NDArray[np.int64]
    learned: NDArray[np.bool_]
    documents: NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """Where to read on. file: in the epoch's order.  offset: where the window begins in it, in bytes, or tokens of an
    .npy file.  document: in the window's order.  token: first one of it that is to be given."""

    epoch: int = 0
    file: int = 0
    offset: int = 0
    document: int = 0
    token: int = 0


@dataclass(frozen=True)
class TextFormat:
    """How text becomes tokens. end: id of the end of text, after every document.  vocabulary: number of ids."""

    tokenize: Tokenize
    end: int
    vocabulary: int


def find_texts(path: Path) -> tuple[Path, ...]:
    """The file, or the files of KINDS in the folder and below it, by name. Raises InputError where there is none."""
    if path.is_file() and path.suffix in KINDS:
        return (path,)
    found = tuple(sorted(file for file in path.rglob("*") if file.suffix in KINDS and file.is_file()))
    if not found:
        raise InputError(f"data.path: {path} holds no text; name a file or folder of {', '.join(KINDS)}")
    return found


def digest_of(files: Sequence[Path]) -> str:
    """Changes when the name, size or time of change of a file does. Nothing is read."""
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


class TextStream:
    """Rows of `length` tokens from files, epoch after epoch.

    window: documents that are read and shuffled together; no more are held. A .txt file is one document.  epochs: None
    for no end.

    Each epoch's files are shuffled, and the documents of each window in them. Rows are filled: where a document does
    not fit, it goes on in the next row, beginning with the last token it gave, so that each token but a document's
    first is predicted once. Raises InputError, when it is reached, for what cannot be read, with file and line.
    """

    def __init__(
        self,
        files: Sequence[Path],
        format: TextFormat,
        length: int,
        seed: int,
        window: int = 1024,
        epochs: int | None = None,
    ) -> None:
        self._files = files
        self._format = format
        self._length = length
        self._seed = seed
        self._size = window
        self._epochs = epochs
        self._latest: tuple[tuple[int, int, int], _Window] | None = None

    def rows(self, place: Place = Place()) -> Iterator[tuple[Row, Place]]:
        """(row, where to read on after it), from a place on."""
        pieces: list[Piece] = []
        while True:
            left = self._length - sum(len(piece.tokens) for piece in pieces)
            found = self._piece(place, left) if left >= 2 else None
            if found is not None:
                piece, place = found
                pieces.append(piece)
            elif pieces:
                yield self._packed(pieces), place
                pieces = []
            else:
                return

    def pieces(self, place: Place = Place()) -> Iterator[tuple[Piece, Place]]:
        """(piece, where to read on after it): each document by itself, cut where it is longer than a row."""
        while (found := self._piece(place, self._length)) is not None:
            piece, place = found
            yield piece, place

    def _piece(self, place: Place, most: int) -> tuple[Piece, Place] | None:
        """The next tokens of one document, at most so many; None after the last epoch."""
        found = self._document(place)
        if found is None:
            return None
        document, place = found
        end = min(place.token + most, len(document.tokens))
        learned = document.learned[place.token : end].copy()
        learned[0] = False
        # What is left begins with the last token given; one that ends here leaves nothing to predict.
        is_done = end == len(document.tokens)
        after = replace(place, document=place.document + 1, token=0) if is_done else replace(place, token=end - 1)
        return Piece(document.tokens[place.token : end], learned), after

    def _document(self, place: Place) -> tuple[Piece, Place] | None:
        """The document at a place, or at the next that has one; None after the last epoch."""
        first = place.epoch
        while self._epochs is None or place.epoch < self._epochs:
            order = self._file_order(place.epoch)
            if place.file == len(order):
                if place.epoch > first:
                    raise InputError(f"data.path: {self._files[0]} and what is beside it hold no text of two tokens")
                place = Place(place.epoch + 1)
                continue
            window = self._window_at(order[place.file], place.offset, place.epoch)
            for number in range(place.document, len(window.documents)):
                document = window.document(number)
                if len(document.tokens) >= 2:
                    return document, replace(place, document=number)
            next_file = Place(place.epoch, place.file + 1)
            place = next_file if window.end is None else Place(place.epoch, place.file, window.end)
        return None

    def _file_order(self, epoch: int) -> list[int]:
        order: list[int] = torch.randperm(
            len(self._files), generator=generator(self._seed, "text files", epoch)
        ).tolist()
        return order

    def _window_at(self, number: int, offset: int, epoch: int) -> _Window:
        """Documents of a file. The window read last is kept: it is asked for again for each of its pieces."""
        key = (number, offset, epoch)
        if self._latest is None or self._latest[0] != key:
            file = self._files[number]
            documents, end = _READERS[file.suffix](file, offset, self._size, self._format)
            order = torch.randperm(len(documents), generator=generator(self._seed, "documents", *key))
            self._latest = (key, _Window([documents[number] for number in order.tolist()], end))
        return self._latest[1]

    def _packed(self, pieces: Sequence[Piece]) -> Row:
        padding = self._length - sum(len(piece.tokens) for piece in pieces)
        numbers = [np.full(len(piece.tokens), number) for number, piece in enumerate(pieces)]
        return Row(
            np.concatenate([*(piece.tokens for piece in pieces), np.full(padding, self._format.end)]),
            np.concatenate([*(piece.learned for piece in pieces), np.zeros(padding, dtype=bool)]),
            np.concatenate([*numbers, np.full(padding, -1)]),
        )


Make = Callable[[], Piece]
"""A document's tokens, made when it is asked for."""


class _Window:
    """Documents in their order. end: where the next window begins, None at the end of the file."""

    def __init__(self, documents: Sequence[Make], end: int | None) -> None:
        self.documents = documents
        self.end = end
        self._made: tuple[int, Piece] | None = None

    def document(self, number: int) -> Piece:
        """Made once while it is asked for again and again, as a long one is."""
        if self._made is None or self._made[0] != number:
            self._made = (number, self.documents[number]())
        return self._made[1]


def _read_txt(file: Path, offset: int, count: int, format: TextFormat) -> tuple[list[Make], int | None]:
    def make() -> Piece:
        try:
            return _document_of([(file.read_text(encoding="utf-8"), True)], format)
        except UnicodeDecodeError as error:
            raise InputError(f"{file}: is not UTF-8 (byte {error.start}); convert it") from error

    return [make], None


def _read_jsonl(file: Path, offset: int, count: int, format: TextFormat) -> tuple[list[Make], int | None]:
    with file.open("rb") as lines:
        lines.seek(offset)
        begins: list[int] = []
        read: list[bytes] = []
        for _ in range(count):
            begin = lines.tell()
            line = lines.readline()
            if not line:
                return [
                    partial(_line, file, begin, line, format) for begin, line in zip(begins, read, strict=True)
                ], None
            if line.strip():
                begins.append(begin)
                read.append(line)
        end = lines.tell()
    return [partial(_line, file, begin, line, format) for begin, line in zip(begins, read, strict=True)], end


def _line(file: Path, begin: int, line: bytes, format: TextFormat) -> Piece:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InputError(f"{_place_of(file, begin)}: not valid JSON ({error}); correct the line") from error
    texts = _texts_of(found)
    if texts is None:
        raise InputError(
            f"{_place_of(file, begin)}: is no object with the string text, or with prompt and completion; "
            "correct the line"
        )
    return _document_of(texts, format)


def _texts_of(found: Any) -> list[tuple[str, bool]] | None:
    """The line's texts, each with whether it is learned."""
    for keys in (("text",), ("prompt", "completion")):
        if isinstance(found, dict) and all(isinstance(found.get(key), str) for key in keys):
            return [(found[key], key != "prompt") for key in keys]
    return None


def _place_of(file: Path, begin: int) -> str:
    """`file:line` of the line that begins at a byte."""
    with file.open("rb") as lines:
        number, at = 1, 0
        while at < begin:
            at += len(lines.readline())
            number += 1
    return f"{file}:{number}"


def _document_of(texts: Sequence[tuple[str, bool]], format: TextFormat) -> Piece:
    """An empty one where there is no text."""
    parts = [(format.tokenize(text), learned) for text, learned in texts]
    if not any(ids for ids, _ in parts):
        return Piece(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
    ids = [*(token for tokens, _ in parts for token in tokens), format.end]
    learned = [*(is_learned for tokens, is_learned in parts for _ in tokens), parts[-1][1]]
    return Piece(np.array(ids, dtype=np.int64), np.array(learned, dtype=bool))


FIRST_READ = 1 << 20
"""Tokens of an .npy file that are looked through at a time."""


def _read_npy(file: Path, offset: int, count: int, format: TextFormat) -> tuple[list[Make], int | None]:
    tokens = _opened(file)
    size = FIRST_READ
    while True:
        chunk = tokens[offset : offset + size]
        ends = np.flatnonzero(chunk == format.end)[:count] + 1
        if len(ends) or offset + size >= len(tokens):
            break
        size *= 2
    is_all = offset + size >= len(tokens) and len(ends) < count
    if is_all and (len(ends) == 0 or ends[-1] < len(chunk)):
        ends = np.append(ends, len(chunk))  # the last document of the file lacks its end
    borders: list[int] = [0, *ends.tolist()]
    makes: list[Make] = [partial(_stored, file, chunk[a:b], offset + a, format) for a, b in itertools.pairwise(borders)]
    after = offset + borders[-1]
    return makes, None if after >= len(tokens) else after


def _opened(file: Path) -> NDArray[Any]:
    try:
        tokens: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(f"{file}: is no .npy file of numbers ({error}); write it with numpy.save") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError(f"{file}: holds {tokens.dtype} of shape {tokens.shape}, not a row of token ids")
    return tokens


def _stored(file: Path, chunk: NDArray[Any], begin: int, format: TextFormat) -> Piece:
    ids = np.asarray(chunk, dtype=np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= format.vocabulary))
    if len(wrong):
        raise InputError(
            f"{file}: token {begin + int(wrong[0])} is {ids[wrong[0]]}, but the model's are 0 to "
            f"{format.vocabulary - 1}; it was made with another tokenizer"
        )
    return Piece(ids, np.ones(len(ids), dtype=bool))


_READERS: dict[str, Callable[[Path, int, int, TextFormat], tuple[list[Make], int | None]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".npy": _read_npy,
}
