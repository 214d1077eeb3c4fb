"""Stricter than a sharded run: whether our own networks call their parts in a way that FSDP2 can follow.

A sharded run asks `trainer.parallel.fsdp_rules.weight_problems`, which refuses only what surely fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.parallel.fsdp_rules import Watch, entries, tensors_in


def check_calls(
    model: nn.Module,
    units: Sequence[nn.Module],
    methods: Sequence[str],
    run: Callable[[], object],
    copied: Sequence[str] = (),
) -> None:
    """Run a forward pass of the model before it is sharded. Raises ValueError naming all that FSDP2 cannot follow.

    run: calls the model as training does; on the meta device it costs no memory.  units: modules that are to be
    sharded one by one.  methods: as in `entries`.  copied: class names of modules whose outputs are copied where they
    are views (see `parallelize.parallelize`).

    Refused are: an entry point that `forward` calls; a unit called past the model; a weight used while its unit does
    not run, as by an entry point that is not listed, or by code that reads it; an output that is a view, in which a
    change in place loses FSDP2's hook; and one that is kept on a module, or inside an object, where no hook finds it.
    """
    watch = _OutputWatch(model, units, copied)
    with watch.doors(entries(model, units, methods)), watch:
        run()
    if watch.problems:
        raise ValueError("\n".join(watch.problems))


class _OutputWatch(Watch):  # type: ignore[no-untyped-call]
    """Sees besides what comes out of a unit, and what stays."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], copied: Sequence[str]) -> None:
        super().__init__(model, units)
        self._copied = copied

    def run(self, module: nn.Module, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        kept_before = {id(tensor) for tensor in _kept(module, args, kwargs)}
        output = super().run(module, method, original, args, kwargs)
        self._check_output(module, method, output)
        if any(tensor.requires_grad and id(tensor) not in kept_before for tensor in _kept(module, args, kwargs)):
            self.refuse(
                f"{self.called(module)} keeps a tensor it computed on itself or in an object it was given, as a cache "
                "of keys and values does, where FSDP2's hooks do not find it; return it instead, or turn the cache off",
            )
        return output

    def _check_output(self, module: nn.Module, method: str, output: Any) -> None:
        is_copied = method == "forward" and type(module).__name__ in self._copied
        if not is_copied and any(tensor._is_view() for tensor in tensors_in(output)):
            self.refuse(
                f"{self.called(module)} returns a view from {method}: changed in place by its caller it loses "
                "FSDP2's hook, and backward finds the weights freed; return a .clone() of it",
            )
        for hidden in _hidden(output):
            self.refuse(
                f"{self.called(module)} returns tensors inside a {type(hidden).__name__}, where FSDP2's hooks do "
                "not find them; return tensors, tuples or dicts",
            )


def _hidden(value: Any) -> Iterator[Any]:
    """Objects in an output that hold tensors where FSDP2's hooks do not find them."""
    return (leaf for leaf in tree_leaves(value) if not isinstance(leaf, Tensor) and any(True for _ in _inside(leaf)))


def _inside(value: Any, seen: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Tensors in an object, at any depth; callables are not searched."""
    if isinstance(value, Tensor):
        yield value
        return
    if callable(value) or id(value) in seen:  # modules too are callable
        return
    leaves = [leaf for leaf in tree_leaves(value) if leaf is not value]
    for part in leaves or (vars(value).values() if hasattr(value, "__dict__") else ()):
        yield from _inside(part, seen | {id(value)})


def _kept(module: nn.Module, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Tensors that outlive a call: on the module and its children, and in the objects it is given."""
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_modules"):
                yield from _inside(value)
    for argument in (*args, *kwargs.values()):
        for hidden in _hidden(argument):
            yield from _inside(hidden)
