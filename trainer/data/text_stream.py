"""Text for a causal language model, read as a stream: pieces of documents, or rows packed with several documents.

The order is a function of the seed and the epoch. A StreamPosition goes into the checkpoint, and from there the stream
continues exactly. Every rank reads the same stream and takes its own rows, so that the number of ranks may change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.config.errors import InputError
from trainer.config.files import MIB, opened
from trainer.config.sections import half_character
from trainer.data.text_files import reading
from trainer.rng import generator

PADDING = -1
SHARD_CHUNK = 2**16
LINE_CHUNK = 2**20
MOST_LINE = 64 * MIB
"""Limit for a document in a .jsonl, bytes: some 16 million tokens."""
MOST_TEXT = 1024 * MIB
"""Limit for a .txt, bytes: it is one document and read whole."""
ROW_KEYS = "each line is a JSON object with text, or with prompt and completion"

Tokenize = Callable[[str], list[int]]
"""The ids of a text, with no special token added."""


@dataclass(frozen=True, eq=False)
class Document:
    """One document.

    Attributes:
        tokens: (N,) ids with end-of-text last; those of a shard keep the width they are stored in.
        learned: (N,) which of them are predicted; the first never is, since no token precedes it.
    """

    tokens: NDArray[np.integer[Any]]
    learned: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive tokens of one document, at least two.

    Attributes:
        tokens: (N,) ids.
        learned: (N,) which of them are predicted; never the first.
    """

    tokens: NDArray[np.int64]
    learned: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PackedRow:
    """Pieces one after the other. Attention stays within a piece, and positions count from 0 in each.

    Attributes:
        tokens: (length,) ids; padding is end-of-text.
        learned: (length,) which of them are predicted; no first token of a piece, no prompt, no padding.
        documents: (length,) index of the piece in the row, from 0; PADDING for padding.
    """

    tokens: NDArray[np.int64]
    learned: NDArray[np.bool_]
    documents: NDArray[np.int64]


@dataclass(frozen=True)
class StreamPosition:
    """Where a stream continues. Manifests hold it as JSON: `dataclasses.asdict`, and `StreamPosition(**values)`.

    Attributes:
        epoch: The epoch, from 0.
        window: Index of the window in the epoch.
        file: Index of the file in the epoch's order.
        offset: Where the window begins: in bytes of a .jsonl, in tokens of a .npy, 0 in a .txt.
        document: The next document in the shuffled window; the number of documents when the window is used up.
        token: Where the next piece of that document begins.
    """

    epoch: int
    window: int
    file: int
    offset: int
    document: int
    token: int


START = StreamPosition(epoch=0, window=0, file=0, offset=0, document=0, token=0)


class TextStream:
    """The documents of some files, epoch after epoch, each in another order.

    The files of an epoch are shuffled, and so is each window of consecutive documents of a file. A window is held in
    memory as in the file and tokenized document by document; a .txt is one document and read whole, a .npy stays on
    the disk. Empty documents are skipped, and so are those with an empty completion.

    A StreamPosition is valid for the same arguments and unchanged files (equal `text_files.digest`). Iterating raises
    InputError naming the file, and the line of a .jsonl, when something cannot be used or no document holds any text.

    Args:
        files: The result of `find_files`.
        tokenize: Turns text into ids.
        end_of_text: The id that ends a document.
        vocabulary: Number of ids the model knows; those of a .npy must be below it.
        seed: Seed of the order.
        length: Tokens of a row, and the most tokens of a piece, >= 2.
        shuffle_window: Number of documents that are shuffled among themselves, >= 1.
        epochs: Number of epochs; None for no end.
        begin: Ids that are put before each document, but not in a .npy, whose tokens are used unchanged.
        is_packed: Whether documents share rows. If not, the rest of a document's row is padding.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenize: Tokenize,
        end_of_text: int,
        vocabulary: int,
        seed: int,
        length: int,
        shuffle_window: int = 1024,
        epochs: int | None = None,
        begin: Sequence[int] = (),
        is_packed: bool = True,
    ) -> None:
        assert files
        assert length >= 2
        assert shuffle_window >= 1
        self._files = tuple(files)
        self._encoder = _Encoder(tokenize, end_of_text, vocabulary, tuple(begin))
        self._seed = seed
        self._length = length
        self._shuffle_window = shuffle_window
        self._epochs = epochs
        self._is_packed = is_packed

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

        A document that does not fit is cut at the end of the row and goes on in the next, again with one token in
        common. Padding is a last single token, for which no piece is small enough, and the end of the last row.
        """
        pieces: list[Piece] = []
        room = self._length
        after = position
        for document, at in self._documents(position):
            after = at
            while after.document == at.document:
                piece, after = _cut(document, after, room)
                pieces.append(piece)
                room -= len(piece.tokens)
                if room < 2 or not self._is_packed:
                    yield self._packed(pieces), after
                    pieces, room = [], self._length
        if pieces:
            yield self._packed(pieces), after

    def _packed(self, pieces: Sequence[Piece]) -> PackedRow:
        tokens = np.full(self._length, self._encoder.end_of_text, dtype=np.int64)
        learned = np.zeros(self._length, dtype=np.bool_)
        documents = np.full(self._length, PADDING, dtype=np.int64)
        start = 0
        for number, piece in enumerate(pieces):
            stop = start + len(piece.tokens)
            tokens[start:stop] = piece.tokens
            learned[start:stop] = piece.learned
            documents[start:stop] = number
            start = stop
        return PackedRow(tokens, learned, documents)

    def _documents(self, position: StreamPosition) -> Iterator[tuple[Document, StreamPosition]]:
        """Documents with at least two unused tokens from `position` on, each with the position of its first one."""
        for epoch in count(position.epoch) if self._epochs is None else range(position.epoch, self._epochs):
            first = replace(START, epoch=epoch)
            start = position if epoch == position.epoch else first
            is_empty = start == first
            for document, at in self._epoch(start):
                is_empty = False
                yield document, at
            if is_empty:
                others = f" and {len(self._files) - 1} other files" if len(self._files) > 1 else ""
                raise InputError(f"{self._files[0]}{others}: no document holds any text; write some, or give others")

    def _epoch(self, position: StreamPosition) -> Iterator[tuple[Document, StreamPosition]]:
        for window, start in self._windows(position):
            order = _order(len(window), self._seed, "text window", start.epoch, start.window)
            for number in range(start.document, len(window)):
                document = window[order[number]]()
                at = start if number == start.document else replace(start, document=number, token=0)
                if len(document.tokens) - at.token >= 2:
                    yield document, at

    def _windows(self, position: StreamPosition) -> Iterator[tuple[Sequence[Reader], StreamPosition]]:
        """The windows of the epoch, beginning with the one of `position`, each with the position to start at."""
        order = _order(len(self._files), self._seed, "text files", position.epoch)
        while position.file < len(order):
            path = self._files[order[position.file]]
            read = READERS[path.suffix.lower()]
            window, offset = read(path, position.offset, self._shuffle_window, self._encoder)
            yield window, position
            file, offset = (position.file + 1, 0) if offset is None else (position.file, offset)
            position = StreamPosition(position.epoch, position.window + 1, file, offset, document=0, token=0)


Reader = Callable[[], Document]
"""Reads one document of a window."""


@dataclass(frozen=True)
class _Encoder:
    tokenize: Tokenize
    end_of_text: int
    vocabulary: int
    begin: tuple[int, ...]

    def document(self, parts: Iterable[tuple[str, bool]]) -> Document:
        """Tokenize consecutive texts, each with whether it is learned; end-of-text is always learned."""
        tokens: list[int] = []
        learned: list[bool] = []
        for text, is_learned in parts:
            ids = self.tokenize(text)
            tokens += ids
            learned += [is_learned] * len(ids)
        if tokens:
            tokens, learned = [*self.begin, *tokens], [False] * len(self.begin) + learned
        return Document(np.array([*tokens, self.end_of_text], dtype=np.int64), np.array([*learned, True]))


def _order(number: int, *purpose: int | str) -> list[int]:
    order: list[int] = torch.randperm(number, generator=generator(*purpose)).tolist()
    return order


def _cut(document: Document, at: StreamPosition, room: int) -> tuple[Piece, StreamPosition]:
    """The next tokens of a document, at most `room` >= 2, and the position after them, which leaves none or >= 2."""
    stop = min(at.token + room, len(document.tokens))
    learned = document.learned[at.token : stop].copy()
    learned[0] = False
    piece = Piece(document.tokens[at.token : stop].astype(np.int64), learned)
    if stop == len(document.tokens):
        return piece, replace(at, document=at.document + 1, token=0)
    return piece, replace(at, token=stop - 1)


# One reader per kind of file: it returns at most `limit` documents from an offset on, and the offset after them (None
# at the end of the file).


def _read_text(path: Path, offset: int, limit: int, encoder: _Encoder) -> tuple[Sequence[Reader], int | None]:
    return [partial(_text_document, path, encoder)], None


def _text_document(path: Path, encoder: _Encoder) -> Document:
    with reading(path), opened(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_TEXT:
            wrong = f"{path}: longer than {MOST_TEXT // MIB} MiB"
            raise InputError(f"{wrong}; a .txt is one document: cut it into several files")
        data = file.read()
    return encoder.document([(_utf8(data, path, 0), True)])


def _read_lines(path: Path, offset: int, limit: int, encoder: _Encoder) -> tuple[Sequence[Reader], int | None]:
    window: list[Reader] = []
    with reading(path), opened(path) as file:
        file.seek(offset)
        while len(window) < limit:
            start = file.tell()
            line = file.readline(MOST_LINE + 1)
            if not line:
                return window, None
            if len(line) > MOST_LINE:
                wrong = f"{path}:{_line_number(path, start)}: the line is longer than {MOST_LINE // MIB} MiB"
                raise InputError(f"{wrong}; shorten or remove it")
            if line.strip():
                window.append(partial(_line_document, path, start, line.rstrip(), encoder))
        return window, file.tell()


def _line_document(path: Path, start: int, line: bytes, encoder: _Encoder) -> Document:
    text = _utf8(line, path, start)
    try:
        parts = _line_parts(text)
    except InputError as error:
        raise InputError(f"{path}:{_line_number(path, start)}: {error}") from error
    return encoder.document(parts)


def _line_parts(line: str) -> list[tuple[str, bool]]:
    """The texts of a line, each with whether it is learned. Raises InputError with the reason but without the line."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"not a JSON object ({error.msg} at column {error.colno}); {ROW_KEYS}") from error
    except RecursionError as error:
        raise InputError(f"not a JSON object (nested too deep); {ROW_KEYS}") from error
    if not isinstance(values, dict):
        raise InputError(f"not a JSON object; {ROW_KEYS}")
    if "text" in values:
        return [(_string(values, "text"), True)]
    if "prompt" not in values or "completion" not in values:
        raise InputError(f'no "text", and no "prompt" with "completion"; {ROW_KEYS}')
    prompt, completion = _string(values, "prompt"), _string(values, "completion")
    return [(prompt, False), (completion, True)] if completion else []


def _string(values: Mapping[str, object], key: str) -> str:
    value = values[key]
    if not isinstance(value, str):
        raise InputError(f'"{key}" is not a string; write it in quotes')
    if half := half_character(value):
        raise InputError(f'"{key}" {half}')
    return value


def _line_number(path: Path, offset: int) -> int:
    """Number of the line that holds the byte at `offset`, from 1."""
    number = 1
    with reading(path), opened(path) as file:
        while offset > 0 and (chunk := file.read(min(offset, LINE_CHUNK))):
            number += chunk.count(b"\n")
            offset -= len(chunk)
    return number


def _read_shard(path: Path, offset: int, limit: int, encoder: _Encoder) -> tuple[Sequence[Reader], int | None]:
    shard = _open_shard(path)
    window: list[Reader] = []
    start = offset
    for first in range(offset, len(shard), SHARD_CHUNK):
        for end in np.flatnonzero(shard[first : first + SHARD_CHUNK] == encoder.end_of_text).tolist():
            stop = first + end + 1
            window.append(partial(_shard_document, path, shard, start, stop, encoder))
            start = stop
            if len(window) == limit:
                return window, start
    if start < len(shard):
        window.append(partial(_shard_document, path, shard, start, len(shard), encoder))
    return window, None


def _open_shard(path: Path) -> NDArray[np.integer[Any]]:
    remedy = "save the token ids with numpy.save as one dimension of integers"
    with reading(path):
        opened(path).close()
        try:
            # Unlike numpy.load, it never unpickles and accepts no archive.
            shard = np.lib.format.open_memmap(path, mode="r")
        except OSError:
            raise
        except Exception as error:  # a header is read as Python, whose parser raises all kinds
            raise InputError(f"{path}: not an array of numbers, or cut short; {remedy}") from error
    if shard.ndim != 1 or not np.issubdtype(shard.dtype, np.integer):
        raise InputError(f"{path}: an array of {shard.dtype} in {shard.ndim} dimensions; {remedy}")
    return shard


def _shard_document(path: Path, shard: NDArray[np.integer[Any]], start: int, stop: int, encoder: _Encoder) -> Document:
    """A document of a shard, with no token added: the last document of a shard may continue in the next shard."""
    tokens = shard[start:stop]
    if tokens.min() < 0 or tokens.max() >= encoder.vocabulary:
        index = int(np.flatnonzero((tokens < 0) | (tokens >= encoder.vocabulary))[0])
        raise InputError(
            f"{path}: token {start + index} is {tokens[index]}, but the model knows 0 to {encoder.vocabulary - 1}; "
            "write the file with the tokenizer of the model"
        )
    return Document(tokens, np.broadcast_to(np.True_, tokens.shape))


ReadWindow = Callable[[Path, int, int, _Encoder], tuple[Sequence[Reader], int | None]]
READERS: Mapping[str, ReadWindow] = {".txt": _read_text, ".jsonl": _read_lines, ".npy": _read_shard}


def _utf8(data: bytes, path: Path, offset: int) -> str:
    """Decode the text that begins at `offset` bytes, without the byte order mark that Windows editors write."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        byte = offset + error.start
        raise InputError(
            f"{path}:{_line_number(path, byte)}: byte {byte} of the file (0x{data[error.start]:02x}) is not UTF-8; "
            "save the file as UTF-8"
        ) from error
