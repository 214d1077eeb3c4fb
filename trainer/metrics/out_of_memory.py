"""Which block a rank is in, named when its memory runs out. See DECISIONS 104."""

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
from trainer.metrics.memory import MemoryMeter, MemoryReading
from trainer.metrics.step_time import OPTIMIZER
from trainer.run.failure import OUT_OF_MEMORY
from trainer.system.amounts import GIB


class OutOfMemoryError(RuntimeError):
    """Memory ran out on this rank. The message says where, and how much there was."""


class OomContext:
    """The phase and block a pass is in, for the message when memory runs out; also beats the heartbeat at every block.

    Known by hooks on each block and on the gradient of its output, which take a few microseconds a pass. Hooks would
    become part of a compiled block's graph: what torch compiled is wrapped instead.

    Args:
        blocks: Class names.
        is_compiled: Whether steps may compile, during which a rank does not move.
    """

    def __init__(self, model: nn.Module, blocks: Collection[str], is_compiled: bool, heartbeat: Heartbeat) -> None:
        self._phase, self._block = "", ""
        self._heartbeat = heartbeat
        self._moves = not is_compiled
        for name, module in model.named_modules():
            if type(module).__name__.removeprefix("FSDP") not in blocks:
                continue
            if module._compiled_call_impl is not None:
                module._compiled_call_impl = self._around(name, module._compiled_call_impl)
            else:
                # Before the sharded block gathers its weights, which may be what does not fit.
                module.register_forward_pre_hook(partial(self._enter, name), prepend=True)
                module.register_forward_hook(partial(self._watch_gradient, name))

    def enter(self, phase: str) -> None:
        """Note that another phase begins, for example "forward"; it is in no block yet."""
        self._phase, self._block = phase, ""
        self._heartbeat.enter(phase, self._moves)
        if phase == OPTIMIZER:
            self._moves = True  # compiled by now

    def __str__(self) -> str:
        return f"{self._phase} of {self._block}" if self._block else self._phase

    def _enter(self, name: str, *_: Any) -> None:
        self._block = name
        self._heartbeat.enter(str(self))

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._enter(name)
            output = call(*args, **kwargs)
            self._watch_gradient(name, None, None, output)
            return output

        return run

    def _watch_gradient(self, name: str, module: object, arguments: object, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._enter, name))  # type: ignore[no-untyped-call]


@contextmanager
def explain_out_of_memory(
    context: OomContext, meter: MemoryMeter, allocated: Callable[[], Mapping[str, int]] = dict
) -> Iterator[None]:
    """Inside, any error that says that memory ran out becomes an OutOfMemoryError with block, peak and shares.

    Args:
        allocated: Bytes that are known by kind; the rest are activations, gathered blocks and memory of libraries.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        lines = str(error).splitlines() or [type(error).__name__]
        said = next((line for line in lines if re.search(OUT_OF_MEMORY, line)), None)
        if said is None and not isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        memory = meter.read()
        raise OutOfMemoryError(
            f"out of memory in {context}: peak {memory.peak / GIB:.2f} of {memory.limit / GIB:.2f} GiB"
            f"{_shares(allocated(), memory.peak)}{_unused(memory)} ({said or lines[0]})"
        ) from error


def _unused(memory: MemoryReading) -> str:
    """Memory that torch has reserved and does not use; omitted below a twentieth of the memory."""
    unused = memory.reserved - memory.peak  # by now less is allocated than when it failed
    if unused < memory.limit / 20:
        return ""
    return f"; {unused / GIB:.2f} GiB more were taken, in pieces that did not fit"


def _shares(allocated: Mapping[str, int], peak: int) -> str:
    if not allocated:
        return ""
    named = [f"{name} {size / GIB:.2f}" for name, size in allocated.items()]
    rest = (peak - sum(allocated.values())) / GIB
    return f": {', '.join(named)}, activations, gathered blocks and the rest {rest:.2f} GiB"
