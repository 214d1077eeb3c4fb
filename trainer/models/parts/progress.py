"""How far a sample is, told by the loop that makes it to whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Tell = Callable[[float], None]
"""Takes the share of a sample that is done, 0 to 1."""
_LISTENER: ContextVar[Tell | None] = ContextVar("listener", default=None)


@contextmanager
def told(tell: Tell) -> Iterator[None]:
    """Inside, `tell` is called before each step of a sample."""
    before = _LISTENER.set(tell)
    try:
        yield
    finally:
        _LISTENER.reset(before)


def counted(steps: Sequence[T]) -> Iterator[T]:
    """Yield the denoising steps or the tokens of a sample, and tell how many are done before each."""
    tell = _LISTENER.get()
    for number, step in enumerate(steps):
        if tell is not None:
            tell(number / len(steps))
        yield step
