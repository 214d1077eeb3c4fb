"""Captions that a model does not read whole. No torch and no numpy, as in `images`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CutCaption:
    """A caption whose end no encoder reads token by token.

    image: its file.  encoder: the component that reads most of it.  needed, read: tokens.  before: the last of what is
    read.  rest: what is not.
    """

    image: str
    encoder: str
    needed: int
    read: int
    before: str
    rest: str


@dataclass(frozen=True)
class Measured:
    """The captions that are cut, in order, and what a user should know before training, a sentence each: also which
    texts of the section `sample` are cut."""

    cut: tuple[CutCaption, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """An answer of `trainer.data.captions`. measured: None where nothing was found; failure then says why."""

    measured: Measured | None = None
    failure: str = ""
