"""Whether a model calls its parts in a way that FSDP2 can follow, found out before it is sharded.

`weight_problems` asks any network, in every sharded run of one; the tests ask it of our own.

FSDP2 gathers a module's weights when its `forward`, or a method registered beside it, is entered, frees them when it
returns, and hooks itself to the tensors that come out. Parameters used outside these entry points fail
in backward, far from the cause. Which patterns fail, and how, was measured with torch 2.13.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Entry = tuple[nn.Module, str]
"""A module and the name of a method through which it is entered."""


def entries(model: nn.Module, units: Sequence[nn.Module], methods: Sequence[str]) -> list[Entry]:
    """Find the modules' entry points other than `forward`.

    Args:
        methods: Of the model by name, for example `encode`; of the units of a class, for example `Layer.encode`.

    Raises:
        ValueError: No module has the method, or the module's own `forward` calls it: its weights would be gathered and
            freed twice, one inside the other, and backward would find them freed.
    """
    found = [entry for method in methods for entry in _modules_with(model, units, method)]
    for module, method in found:
        if _calls(type(module), "forward", method):
            raise ValueError(_nested(type(module).__name__, method))
    return found


def weight_problems(model: nn.Module, units: Sequence[nn.Module], run: Callable[[], object]) -> list[str]:
    """Run a forward pass of any model and return what surely fails when it is sharded, and nothing that may train.

    Outputs are not judged: whether a view or a kept tensor fails depends on what becomes of it, and OPT, whose blocks
    return views, and Gemma 3n, whose layers share keys and values, train exactly.

    Args:
        model: On the meta device, in a copy of its own: what it keeps on itself in `run` has no values. It may ask
            tensors for values, and is given zeros.
        units: Modules that are to be sharded one by one.
        run: Calls the model as training does.
    """
    sharded = set(units)
    nested = [
        f"a {type(inner).__name__} is inside a {type(outer).__name__}, and both are blocks"
        for outer in units
        for inner in outer.modules()
        if inner is not outer and inner in sharded
    ]
    if nested:
        return list(dict.fromkeys(nested))
    watch = Watch(model, units)
    with watch.doors(()), watch:
        run()
    return watch.problems


def _modules_with(model: nn.Module, units: Sequence[nn.Module], method: str) -> list[Entry]:
    kind, _, name = method.rpartition(".")
    modules = [unit for unit in units if type(unit).__name__ == kind] if kind else [model]
    if not modules or not all(callable(inspect.getattr_static(type(module), name, None)) for module in modules):
        owner = kind or type(model).__name__
        raise ValueError(
            f"ShardSpec.methods: '{method}' is not a method of {owner}, or no sharded block is of that kind"
        )
    return [(module, name) for module in modules]


def _nested(owner: str, method: str) -> str:
    return (
        f"ShardSpec.methods: {owner}.forward calls {owner}.{method}, which is also listed: its weights would be "
        f"gathered and freed twice, one inside the other, and backward would find them freed; "
        f"call the module itself and leave '{method}' out"
    )


def _calls(owner: type, caller: str, method: str) -> bool:
    """Whether a method of a class calls another method of that class, directly or through others."""
    reached: set[str] = set()
    left = [caller]
    while left:
        name = left.pop()
        called = inspect.getattr_static(owner, name, None)
        if name not in reached and inspect.isfunction(called):
            reached.add(name)
            left += _own_attributes(called.__code__)
    return method in reached - {caller}


def _own_attributes(code: CodeType) -> set[str]:
    """The attributes of its first argument that a method reads, also by `getattr` with a constant."""
    this = code.co_varnames[:1]
    instructions = list(dis.get_instructions(code))
    read = {
        str(after.argval)
        for before, after in itertools.pairwise(instructions)
        if after.opname in ("LOAD_ATTR", "LOAD_METHOD") and _loads(before, this)
    }
    constants = {text for text in code.co_consts if isinstance(text, str)} if "getattr" in code.co_names else set()
    return read | constants


def _loads(instruction: dis.Instruction, name: tuple[str, ...]) -> bool:
    """Whether the instruction leaves the variable on top of the stack; some instructions load two at once."""
    last = instruction.argval[-1:] if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return instruction.opname.startswith("LOAD_FAST") and last == name


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which parameters every operation uses while which modules run."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problems: list[str] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._model = model
        self._gathered = list(dict.fromkeys((model, *units)))
        self._running: list[nn.Module] = []
        self._misused: set[nn.Module] = set()
        # The innermost unit that holds it; modules are listed from the outside in.
        owners = {parameter: unit for unit in self._gathered for parameter in unit.parameters()}
        self._owners = {id(parameter): owner for parameter, owner in owners.items()}
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            owner = self._owners.get(id(tensor))
            if owner is not None and owner not in self._running and owner not in self._misused:
                self._misused.add(owner)
                self.refuse(
                    f"{self._parameters[id(tensor)]} is used while {self.called(owner)}, whose weights are gathered "
                    "only then, does not run; use it inside, call the module itself, or list the method in "
                    "ShardSpec.methods",
                )
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))

    @contextmanager
    def doors(self, methods: Sequence[Entry]) -> Iterator[None]:
        """Inside, note when the model and its units are entered and left."""
        with ExitStack() as stack:
            for module in self._gathered:
                stack.enter_context(self._door(module, "forward"))
            for module, method in methods:
                stack.enter_context(self._door(module, method))
            yield

    @contextmanager
    def _door(self, module: nn.Module, method: str) -> Iterator[None]:
        """Wrap a method by an attribute of the module itself, which hides that of the class."""
        original, former = getattr(module, method), vars(module).get(method)
        setattr(module, method, wraps(original)(partial(self._enter, module, method, original)))
        try:
            yield
        finally:
            delattr(module, method)
            if former is not None:
                setattr(module, method, former)

    def _enter(self, module: nn.Module, method: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if module in self._running:
            self.refuse(_nested(type(module).__name__, method))
        elif module is not self._model and self._model not in self._running:
            self.refuse(
                f"{self.called(module)} is called past the model, which gathers its own weights first and sets FSDP2 "
                "up; call the model, and the block inside its forward",
            )
        self._running.append(module)
        try:
            return original(*args, **kwargs)
        finally:
            self._running.pop()

    def called(self, module: nn.Module) -> str:
        kind = type(module).__name__
        return kind if module is self._model else f"{self._names[module]} ({kind})"

    def refuse(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that FSDP2's hooks find in an output. Those of torch 2.13 look into dataclasses; others may not."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
