"""torch.compile block by block, and what came of it. See DECISIONS 183."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.sections import TrainConfig

GRAPHS_OF_A_CLASS = 64
"""Most graphs of one class of blocks: by shape, by whether inputs need gradients, in training and in evaluation. Past
torch's own limit of 8, further shapes of a U-Net's blocks would run uncompiled without a word. Where shapes differ in
the number of tokens alone, torch makes two graphs for all of them: one for the first, and one for any other."""


@dataclass(eq=False)
class _Compiled:
    """torch.compile's backend for one class of blocks. What it cannot compile runs as torch has traced it.

    Attributes:
        kind: Name of the class.
        backend: As `train.compile_backend`.
        graphs: Graphs that were traced.
        problems: {first line of the reason why something was left uncompiled: how often}.
    """

    kind: str
    backend: str
    graphs: int = 0
    problems: dict[str, int] = field(default_factory=dict)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        try:
            made: Callable[..., Any] = torch._dynamo.lookup_backend(self.backend)(graph, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - of a compiler, or whatever it calls
            self.left(f"{type(error).__name__}: {error}")
            return graph.forward
        return made

    def left(self, reason: str) -> None:
        """Note that something was left uncompiled."""
        line = reason.strip().partition("\n")[0]
        self.problems[line] = self.problems.get(line, 0) + 1

    def watch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled call of a block, to notice what torch leaves uncompiled in it without an error."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = _left_uncompiled()
            try:
                return call(*args, **kwargs)
            finally:
                if sum(before.values()) < sum((after := _left_uncompiled()).values()):
                    for reason in after:
                        if after[reason] > before.get(reason, 0):
                            self.left(reason)

        return run


_classes: dict[tuple[str, str], _Compiled] = {}
"""Compiled blocks of this process, by class and backend. torch keeps graphs for as long."""


def compile_blocks(units: Sequence[nn.Module], backend: str) -> None:
    """Compile each block when it first runs. backend: `train.compile_backend`."""
    torch._dynamo.config.recompile_limit = max(GRAPHS_OF_A_CLASS, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.suppress_errors = True  # of the tracer itself: the code runs uncompiled, which is said
    for unit in units:
        name = type(unit).__name__
        compiled = _classes.setdefault((name, backend), _Compiled(name, backend))
        unit.compile(backend=compiled)
        unit._compiled_call_impl = compiled.watch(unit._compiled_call_impl)  # type: ignore[arg-type]


def compiles(train: TrainConfig, device: torch.device, before: bool | None) -> bool:
    """Whether a run compiles its blocks, if it can.

    Args:
        train: The run's section `train`.
        device: Where it trains.
        before: Whether it compiled them until its last checkpoint; None in a new run. `auto` keeps to that, as compiled
            blocks round differently.
    """
    return train.compiles_on(device.type) and (train.compile != "auto" or before is not False)


def compiler_problem(device: torch.device, backend: str) -> str:
    """Return why nothing can be compiled for a GPU here, as one sentence; empty if it can.

    A kernel of one line is compiled and run: a compiler, Python's headers, Triton and a driver that fit each other show
    by nothing else. On a CPU nothing is tried: without a compiler each block falls back by itself.
    """
    if device.type != "cuda" or backend != "inductor":
        return ""
    try:
        with torch.no_grad():
            torch.compile(_one_line, backend=backend)(torch.ones(8, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - of a compiler, or whatever it calls
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        return f"blocks are not compiled, which makes steps slower: torch.compile does not work here ({reason})"
    return ""


def _one_line(tensor: Tensor) -> Tensor:
    return tensor * 2 + 1


def for_class(kind: type[nn.Module], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function that wraps the forward of a block, with a code object for each class of blocks.

    torch.compile keeps its graphs at the code object of what it compiles: all classes would share one limit.

    See DECISIONS 174.
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
    graphs = sum(compiled.graphs for compiled in _classes.values())
    said = f"compiled the blocks into {graphs} graph{'s' * (graphs != 1)}"
    left = [compiled for compiled in _classes.values() if compiled.problems]
    if not left:
        return said, "" if graphs else "torch.compile compiled no block: none has run"
    count = sum(sum(compiled.problems.values()) for compiled in left)
    reason = next(iter(left[0].problems))
    kinds = ", ".join(compiled.kind for compiled in left)
    places = f"{count} place{'s' * (count != 1)}"
    return said, f"torch.compile left code uncompiled in {places} of {kinds}, which run as without it: {reason}"


def _left_uncompiled() -> dict[str, int]:
    """Return {reason: how often torch has left something uncompiled} in this process."""
    from torch._dynamo.utils import counters

    frames = counters["frames"]
    failed = frames["total"] - frames["ok"] - sum(counters["unimplemented"].values())
    reasons = dict(counters["graph_break"]) | dict(counters["unimplemented"])
    return reasons | ({"an error in torch's tracer; see the log of the rank": failed} if failed > 0 else {})
