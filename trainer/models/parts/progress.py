"""Progress of a sample: the loop over its steps reports it to a listener, if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[float], None]
"""Takes the share of a sample that is done, 0 to 1."""
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def reporting_to(listener: Listener) -> Iterator[None]:
    """Inside, `listener` is called before each step of a sample."""
    before = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(before)


def counted(steps: Sequence[T]) -> Iterator[T]:
    """Yield the denoising steps or the tokens of a sample, and report before each what share is done."""
    listener = _LISTENER.get()
    for number, step in enumerate(steps):
        if listener is not None:
            listener(number / len(steps))
        yield step
