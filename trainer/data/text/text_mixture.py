"""The documents of an epoch: each folder's as often as its weight says, evenly interleaved.

A folder is read in passes over its files, each in another order: one pass for each whole number in its weight, and one
in which only a share of the documents is taken. Where each folder continues is a Cursor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from trainer.data.epochs import occurrences
from trainer.data.text.text_documents import Encoder, Reader, read_documents
from trainer.data.text.text_files import TextFolder, sizes
from trainer.rng import generator


@dataclass(frozen=True)
class Cursor:
    """Where the next document of a folder begins in an epoch.

    Attributes:
        turn: Number of the pass over the files.
        file: Index of the file in the order of the pass.
        offset: As `read_documents` counts.
        number: Documents of the file before it, in a pass that takes a share of them; else 0.
    """

    turn: int = 0
    file: int = 0
    offset: int = 0
    number: int = 0


Entry = tuple[Reader, tuple[Cursor, ...]]
"""A document, and where each folder continues after it."""


class Mixture:
    """The documents of some folders.

    Args:
        folders: The folders, at least one.
        encoder: How documents become tokens.
        seed: Seed of the order of the files.
    """

    def __init__(self, folders: Sequence[TextFolder], encoder: Encoder, seed: int) -> None:
        self._folders = [_Folder(folder, number, encoder, seed) for number, folder in enumerate(folders)]
        self.start = (Cursor(),) * len(folders)

    @property
    def is_plain(self) -> bool:
        """Whether there is one folder, each of whose documents occurs once per epoch."""
        return len(self._folders) == 1 and self._folders[0].turns == (1.0,)

    @property
    def empty_epochs(self) -> int:
        """Number of epochs in a row that may lack documents where there are some: less than one occurs per epoch."""
        most = max(sum(folder.turns) for folder in self._folders)
        return 0 if most >= 1 else math.ceil(1 / most)

    def documents(self, epoch: int, cursors: tuple[Cursor, ...]) -> Iterator[Entry]:
        """The documents of an epoch, from the cursors on: always one of the folder of which the least was read."""
        if len(self._folders) == 1:
            for reader, cursor, _ in self._folders[0].documents(epoch, cursors[0]):
                yield reader, (cursor,)
            return
        streams = [folder.documents(epoch, cursor) for folder, cursor in zip(self._folders, cursors, strict=True)]
        heads = [next(stream, None) for stream in streams]
        current = list(cursors)
        while waiting := [(head[2], number) for number, head in enumerate(heads) if head]:
            number = min(waiting)[1]
            head = heads[number]
            assert head is not None
            current[number], heads[number] = head[1], next(streams[number], None)
            yield head[0], tuple(current)

    def files(self, epoch: int, cursor: Cursor) -> Iterator[tuple[Cursor, Iterator[Entry]]]:
        """Each file of a plain mixture, from a cursor on, with the cursor at which it begins."""
        folder = self._folders[0]
        for file in range(cursor.file, folder.num_files):
            begin = cursor if file == cursor.file else Cursor(file=file)
            yield begin, ((reader, (after,)) for reader, after, _ in folder.of_file(epoch, begin))


class _Folder:
    def __init__(self, folder: TextFolder, index: int, encoder: Encoder, seed: int) -> None:
        self._files, self._index, self._encoder, self._seed = folder.files, index, encoder, seed
        whole, part = divmod(folder.weight, 1)
        self.turns = (1.0,) * int(whole) + ((part,) if part else ())
        self.num_files = len(folder.files)
        self._sizes: tuple[int, ...] = ()
        self._orders: dict[tuple[int, int], list[int]] = {}

    def documents(self, epoch: int, cursor: Cursor) -> Iterator[tuple[Reader, Cursor, float]]:
        """Each document, where the folder continues after it, and the share of the epoch that was read then."""
        if not self._sizes:
            found = sizes(self._files)
            self._sizes = tuple(found[file] + 1 for file in self._files)  # an empty file counts, too
        total = sum(self._sizes)
        for turn in range(cursor.turn, len(self.turns)):
            before = [0, *accumulate(self._sizes[one] for one in self._order(epoch, turn))]
            for file in range(cursor.file if turn == cursor.turn else 0, self.num_files):
                begin = cursor if (turn, file) == (cursor.turn, cursor.file) else Cursor(turn, file)
                for reader, after, share in self.of_file(epoch, begin):
                    read = (before[file] + share * (before[file + 1] - before[file])) / total
                    done = sum(self.turns[:turn]) + self.turns[turn] * read
                    yield reader, after, done / sum(self.turns)

    def of_file(self, epoch: int, begin: Cursor) -> Iterator[tuple[Reader, Cursor, float]]:
        """Each document of a file that occurs in a pass, where its file continues, and the share that was read."""
        index, number, part = self._order(epoch, begin.turn)[begin.file], begin.number, self.turns[begin.turn]
        for reader, offset, share in read_documents(self._files[index], begin.offset, self._encoder):
            number += part < 1
            if part == 1 or _is_taken(part, epoch, index + number):
                yield reader, Cursor(begin.turn, begin.file, offset, number), share

    def _order(self, epoch: int, turn: int) -> list[int]:
        if (epoch, turn) not in self._orders:
            other = (self._index, turn) if self._index or turn else ()
            self._orders = {(epoch, turn): random_order(self.num_files, self._seed, "text files", epoch, *other)}
        return self._orders[epoch, turn]


def _is_taken(part: float, epoch: int, number: int) -> bool:
    """Whether a document occurs in an epoch's pass over a share: over the epochs as often, rounded up or down."""
    return occurrences(part, number, epoch + 1) > occurrences(part, number, epoch)


def random_order(number: int, *purpose: int | str) -> list[int]:
    """The indices 0 to `number` - 1 in an order that the purpose determines."""
    order: list[int] = torch.randperm(number, generator=generator(*purpose)).tolist()
    return order
