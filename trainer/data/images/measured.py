"""Captions that a model cuts. Imports neither torch nor numpy: the page imports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CutCaption:
    """A caption whose end no encoder reads.

    Attributes:
        image: The image's file.
        encoder: The component that reads the largest part.
        needed: Tokens of the whole caption.
        read: Tokens that `encoder` reads.
        before: The last characters that are read.
        rest: The text that is not read.
    """

    image: str
    encoder: str
    needed: int
    read: int
    before: str
    rest: str


@dataclass(frozen=True)
class Measured:
    """The result of comparing captions with the lengths that a model reads.

    Attributes:
        cut: The captions that are cut, in order.
        warnings: Sentences to show before training, also about texts of the section `sample` that are cut.
    """

    cut: tuple[CutCaption, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """An answer of `trainer.data.images.captions`.

    Attributes:
        measured: The result; None if measuring failed.
        failure: The reason of the failure.
    """

    measured: Measured | None = None
    failure: str = ""
