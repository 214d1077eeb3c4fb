"""Where a rank is in its step, told when its memory runs out."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.distributed.heartbeat import Heartbeat
from trainer.metrics.memory import MemoryMeter
from trainer.metrics.step_time import OPTIMIZER
from trainer.run.failure import OUT_OF_MEMORY

GIB = 2**30


class OutOfMemoryError(RuntimeError):
    """Memory ran out on this rank: where, and how much there was."""


class OomContext:
    """The block a pass is in. blocks: class names.  heartbeat: beats at every block.

    Hooks on each block and on the gradient of its output, a few microseconds a pass. A compiled block has none: they
    would become part of its graph.
    """

    def __init__(self, model: nn.Module, blocks: Collection[str], is_compiled: bool, heartbeat: Heartbeat) -> None:
        self._what, self._block = "", ""
        self._heartbeat = heartbeat
        self._moves = not is_compiled
        for name, module in model.named_modules():
            if type(module).__name__.removeprefix("FSDP") in blocks and not is_compiled:
                # Before the sharded block gathers its weights, which may be what does not fit.
                module.register_forward_pre_hook(partial(self._enter, name), prepend=True)
                module.register_forward_hook(partial(self._watch_gradient, name))

    def enter(self, what: str) -> None:
        """From now on the rank does something else, as "forward"; no block yet."""
        self._what, self._block = what, ""
        self._heartbeat.enter(what, self._moves)
        if what == OPTIMIZER:
            self._moves = True  # compiled by now

    def __str__(self) -> str:
        return f"{self._what} of {self._block}" if self._block else self._what

    def _enter(self, name: str, *_: Any) -> None:
        self._block = name
        self._heartbeat.enter(str(self))

    def _watch_gradient(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._enter, name))  # type: ignore[no-untyped-call]


@contextmanager
def explain_out_of_memory(
    place: OomContext, meter: MemoryMeter, held: Callable[[], Mapping[str, int]] = dict
) -> Iterator[None]:
    """Raises OutOfMemoryError, which tells place, peak and what held the memory, for any error that says it ran out.

    held: bytes of what is known by name; the rest are activations, gathered blocks and what libraries take.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        first = str(error).partition("\n")[0] or type(error).__name__
        if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or re.search(OUT_OF_MEMORY, first)):
            raise
        memory = meter.read()
        raise OutOfMemoryError(
            f"out of memory in {place}: peak {memory.peak / GIB:.2f} of {memory.limit / GIB:.2f} GiB"
            f"{_shares(held(), memory.peak)} ({first})"
        ) from error


def _shares(held: Mapping[str, int], peak: int) -> str:
    if not held:
        return ""
    named = [f"{name} {size / GIB:.2f}" for name, size in held.items()]
    return (
        f": {', '.join(named)}, activations, gathered blocks and the rest {(peak - sum(held.values())) / GIB:.2f} GiB"
    )
