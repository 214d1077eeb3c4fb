"""torch.compile block by block, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

GRAPHS_OF_A_CLASS = 64
"""Most graphs of one class of blocks: by shape, by whether inputs need gradients, in training and in evaluation. Past
torch's own limit of 8, further shapes of a U-Net's blocks would run uncompiled without a word."""


def compile_blocks(units: Sequence[nn.Module], backend: str) -> None:
    """Compile each block when it first runs. backend: `train.compile_backend`."""
    torch._dynamo.config.recompile_limit = max(GRAPHS_OF_A_CLASS, torch._dynamo.config.recompile_limit)
    for unit in units:
        unit.compile(backend=backend)


def for_class(kind: type[nn.Module], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function that wraps the forward of a block, with a code object for each class of blocks.

    torch.compile keeps its graphs at the code object of what it compiles: all classes would share one limit.
    """
    assert isinstance(wrapper, FunctionType)
    code = _code_for(wrapper.__code__, kind.__name__)
    return FunctionType(code, wrapper.__globals__, code.co_name, wrapper.__defaults__, wrapper.__closure__)


@cache
def _code_for(code: CodeType, name: str) -> CodeType:
    return code.replace(co_name=f"{code.co_name}_{name}")


def describe_compiled() -> tuple[str, str]:
    """(what torch.compile has compiled in this process, what it has left uncompiled; empty if nothing).

    torch itself goes on uncompiled without a word.
    """
    from torch._dynamo.utils import counters

    graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"] + counters["unimplemented"]
    compiled = f"compiled the blocks into {graphs} graph{'s' * (graphs != 1)}"
    if not breaks and graphs:
        return compiled, ""
    reason = next(iter(breaks), "no block was compiled").partition("\n")[0]
    count = sum(breaks.values())
    return compiled, f"torch.compile left code uncompiled in {count} places, which run as without it: {reason}"
