"""Gradient checkpointing: a block keeps some of its activations, and backward recomputes the others.

`full` keeps a block's inputs, by torch's own checkpointing. `selective` also keeps the expensive outputs: those of
linear layers, convolutions and attention. Backward recomputes the cheap operations: norms, modulation, rotary
embeddings, activation functions, concatenations. No matrix product of the base and no attention runs twice.

torch's selective checkpointing does this by a dispatch mode, which costs the host 26 us per operation. It serves
where torch.compile traces the mode away. Elsewhere a `_Pass` sees layers instead of operations. See DECISIONS 176, 181.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts_by

from trainer.parallel.compile import for_class
from trainer.weights import quantized_experts

Forward = Callable[..., Any]
Slot = tuple[dict[str, nn.Parameter | None], str]
"""A parameter's place in its module, where a copy may stand for it during a forward."""
Shapes = frozenset[tuple[int, ...]]
aten = torch.ops.aten

ATTENTION = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
REMEDY = "set train.checkpointing: full"


@cache
def _expensive_functions() -> tuple[tuple[Any, str], ...]:
    """(module, name) of functions whose results are kept as those of layers are: attention, and products with the
    weights of experts.

    Other functions stand there while a pass runs. A mode of torch for functions would see them too, and every other
    function and each shape that is asked for: it takes the host half as long again as the whole step.
    """
    from torch.nn.attention import varlen  # for a run that recomputes selectively: it takes 0.1 s to import

    experts = (torch, "_grouped_mm"), (quantized_experts, "_grouped")
    return (F, "scaled_dot_product_attention"), (varlen, "varlen_attn"), *experts


@cache
def _expensive_operators() -> frozenset[Any]:
    """The same where torch.compile traces a block."""
    from torch.nn.attention import varlen  # noqa: F401 - registers its operator

    return frozenset({*ATTENTION, aten._grouped_mm, torch.ops.torch_attn._varlen_attn})


def recompute_cheap(units: Sequence[nn.Module], inputs_only: Collection[nn.Module], is_compiled: bool) -> None:
    """Recompute the cheap operations of each unit, in place.

    Args:
        units: The blocks.
        inputs_only: Adapted layers, and parts of them, that save only their inputs: their own output is kept
            instead of the base layer's.
        is_compiled: Whether torch.compile traces the units.
    """
    if is_compiled:
        # The shapes of the base's weights as they are multiplied with: an adapter's halves have others.
        layers = [layer for unit in units for layer in _expensive_layers(unit, ())]
        linear = {(layer.in_features, layer.out_features) for layer in layers if isinstance(layer, nn.Linear)}
        policy = partial(
            _policy,
            frozenset({*linear, *(tuple(layer.weight.shape) for layer in layers if isinstance(layer, nn.Conv2d))}),
        )
        for unit in units:
            unit.forward = for_class(type(unit), _traced(unit.forward, policy))
        return
    for unit in units:
        for layer in _expensive_layers(unit, inputs_only):
            slots = [(module._parameters, name) for module in layer.modules() for name in module._parameters]
            layer.forward = _kept(layer.forward, slots)
        unit.forward = _in_pass(unit.forward)


def recompute_all(unit: nn.Module) -> None:
    """Keep nothing but a unit's inputs, in place."""
    unit.forward = for_class(type(unit), _by_torch(unit.forward))


def _expensive_layers(module: nn.Module, inputs_only: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the layers whose output is kept; of an adapter's own layers only those in `inputs_only`."""
    if module in inputs_only or isinstance(module, (nn.Linear, nn.Conv2d)):
        yield module
        return
    base = module._modules.get("base_layer")  # of an adapted layer
    for child in module.children():
        if base is None or child is base:
            yield from _expensive_layers(child, inputs_only)
        else:
            yield from (part for part in child.modules() if part in inputs_only)


def _kept(forward: Forward, slots: Sequence[Slot] | None = None) -> Forward:
    """Wrap a function: within a pass of this thread its output is kept.

    Args:
        forward: The function.
        slots: Places of a layer's parameters, which it takes as well; None for a function of no layer. What such a
            function saves is kept whatever its size, as the mask that attention is given as bias.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        running = _current.running
        return running.call(forward, slots, args, kwargs) if running else forward(*args, **kwargs)

    return run


def _in_pass(forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _Pass(forward, args, kwargs).run() if torch.is_grad_enabled() else forward(*args, **kwargs)

    return run


class _Saved:
    """Stands for a tensor that autograd saves: holds the tensor, or its number where it is computed again."""

    __slots__ = ("number", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version, self.number = tensor._version, -1


@dataclass
class _Call:
    """The call of a layer in a pass.

    Attributes:
        first: Number of the first tensor that autograd saved in it.
        end: Number after the last one.
        result: What it returned, without its graph; None where nothing after it runs again.
        versions: Of the result's tensors, which an operation in place changes.
        needs_gradient: Of the result's tensors.
        is_whole: Whether all that was saved in it is kept or a view of its inputs, so that it need not run again.
        views: (number of the input, size, stride, offset) of each saved tensor that is a view of an input.
    """

    first: int
    end: int = 0
    result: Any = None
    versions: list[int] = field(default_factory=list)
    needs_gradient: list[bool] = field(default_factory=list)
    is_whole: bool = True
    views: dict[int, tuple[int, torch.Size, tuple[int, ...], int]] = field(default_factory=dict)

    @property
    def is_kept(self) -> bool:
        """Whether it need not run again."""
        return self.is_whole and (self.result is None or _versions(self.result) == self.versions)


class _EnoughError(Exception):
    """All that backward needs has been computed again."""


class _Current(threading.local):
    running: _Pass | None = None


_current = _Current()


class _Pass:
    """The forward of a block, and its second run in backward."""

    def __init__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward: Forward | None = forward
        self._args, self._kwargs, self._versions = args, kwargs, _versions((args, kwargs))
        self._kept = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        self._calls: list[_Call] = []
        self._shapes: list[tuple[torch.Size, torch.dtype] | None] = []  # of all saved tensors; None: it is kept
        self._last = -1  # of the tensors that are computed again
        self._is_again = False
        self._at = self._call_at = 0
        self._again: dict[int, Tensor] = {}

    def run(self) -> Any:
        """Run the forward, and decide what is kept."""
        assert self._forward is not None
        with saved_tensors_hooks(self._pack, self._unpack), self._running():
            out = self._forward(*self._args, **self._kwargs)
        self._kept.clear()
        for call in self._calls:
            if call.end > self._last:
                call.result = None
        return out

    def call(self, run: Forward, slots: Sequence[Slot] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer and keep its result, or return the one that was kept.

        What it calls is part of it, whether that is kept elsewhere or not: a call has one entry in both runs.
        """
        inputs = [*_tensors((args, kwargs)), *(p for of, name in slots or () if (p := of[name]) is not None)]
        _current.running = None
        try:
            if not self._is_again:
                return self._call(run, inputs, slots is not None, args, kwargs)
            call = self._calls[self._call_at]
            self._call_at += 1
            return self._give(call, inputs) if call.is_kept else run(*args, **kwargs)
        finally:
            _current.running = self

    @contextmanager
    def _running(self) -> Iterator[None]:
        before, _current.running = _current.running, self
        functions = [vars(module)[name] for module, name in _expensive_functions()]
        for (module, name), function in zip(_expensive_functions(), functions, strict=True):
            setattr(module, name, _kept(function))
        try:
            yield
        finally:
            for (module, name), function in zip(_expensive_functions(), functions, strict=True):
                setattr(module, name, function)
            _current.running = before

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._decide(saved, _storage(tensor) in self._kept)
        return saved

    def _decide(self, saved: _Saved, is_kept: bool) -> None:
        assert saved.tensor is not None
        if is_kept:
            self._shapes.append(None)
            return
        saved.number = self._last = len(self._shapes)
        self._shapes.append((saved.tensor.shape, saved.tensor.dtype))
        saved.tensor = None

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor is not None:
            if saved.tensor._version != saved.version:
                raise RuntimeError(f"a tensor that backward needs was changed in place after forward used it; {REMEDY}")
            return saved.tensor
        if self._forward is not None:
            self._run_again()
        if saved.number not in self._again:
            raise RuntimeError("backward ran twice through a block that recomputes; run forward again before it")
        return self._again.pop(saved.number)

    def _call(
        self, run: Forward, inputs: Sequence[Tensor], is_layer: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        packed: list[_Saved] = []

        def pack(tensor: Tensor) -> _Saved:
            packed.append(_Saved(tensor))
            return packed[-1]

        with saved_tensors_hooks(pack, self._unpack):
            out = run(*args, **kwargs)
        call = _Call(len(self._shapes))
        results = {_storage(tensor) for tensor in _tensors(out)}
        # In reverse, so that of inputs with one storage the first one counts.
        numbers = {(_storage(tensor), tensor.dtype): number for number, tensor in reversed([*enumerate(inputs)])}
        largest = max((tensor.nbytes for tensor in _tensors(out)), default=0) if is_layer else None
        sources = [self._source(saved, results, numbers, largest) for saved in packed]
        call.is_whole = None not in sources
        for saved, source in zip(packed, sources, strict=True):
            tensor = saved.tensor
            assert tensor is not None
            if source is not None and source >= 0:
                offset = int(tensor.storage_offset() - inputs[source].storage_offset())
                call.views[len(self._shapes)] = source, tensor.shape, tensor.stride(), offset
            is_kept = _storage(tensor) in self._kept or (source == -1 and call.is_whole)
            self._decide(saved, is_kept)
        call.end = len(self._shapes)
        if call.is_whole:
            call.result = out.detach() if isinstance(out, Tensor) else tree_map_only(Tensor, Tensor.detach, out)
            call.versions = _versions(out)
            call.needs_gradient = [tensor.requires_grad for tensor in _tensors(out)]
            self._kept |= results
        self._calls.append(call)
        return out

    def _source(
        self, saved: _Saved, results: set[int], inputs: dict[tuple[int, torch.dtype], int], largest: int | None
    ) -> int | None:
        """Return the number of the input that a saved tensor is a view of, -1 if it is kept, or None.

        Args:
            saved: The saved tensor.
            results: Storages of what the call returned.
            inputs: {(storage, type): number of the input}.
            largest: Bytes of the largest tensor that may be kept: as large as one that it returned. None: of any size.
        """
        assert saved.tensor is not None
        storage = _storage(saved.tensor)
        if storage in self._kept or storage in results:
            return -1
        is_kept = largest is None or saved.tensor.nbytes <= largest
        return inputs.get((storage, saved.tensor.dtype), -1 if is_kept else None)

    def _give(self, call: _Call, inputs: Sequence[Tensor]) -> Any:
        """Save what the call saved in forward, and return its result."""
        for number, (source, size, stride, offset) in call.views.items():
            tensor = inputs[source].detach()
            self._at = number
            self._pack_again(tensor.as_strided(size, stride, tensor.storage_offset() + offset))
        self._at = call.end
        needs_gradient = iter(call.needs_gradient)
        if isinstance(call.result, Tensor):
            return call.result.detach().requires_grad_(next(needs_gradient))
        return tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(next(needs_gradient)), call.result)

    def _run_again(self) -> None:
        assert self._forward is not None
        if _versions((self._args, self._kwargs)) != self._versions:
            raise RuntimeError(f"an input of a block that recomputes was changed in place; {REMEDY}")
        self._is_again = True
        hooks = saved_tensors_hooks(self._pack_again, _never)
        with suppress(_EnoughError), torch.enable_grad(), hooks, self._running():
            self._forward(*self._args, **self._kwargs)
        self._forward, self._args, self._kwargs = None, (), {}
        self._calls.clear()

    def _pack_again(self, tensor: Tensor) -> None:
        expected = self._shapes[self._at]
        if expected is not None:
            if expected != (tensor.shape, tensor.dtype):
                raise RuntimeError(f"forward saved {expected}, and {(tensor.shape, tensor.dtype)} when it ran again")
            self._again[self._at] = tensor.detach()
        self._at += 1
        if self._at > self._last:
            raise _EnoughError


def _never(_: object) -> Tensor:
    raise AssertionError("the graph of a second forward is never used")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in arguments or a result. Walking them here takes a tenth of torch's `tree_leaves`."""
    if isinstance(tree, Tensor):
        return [tree]
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return []
    if type(tree) in (tuple, list):
        return [tensor for item in tree for tensor in _tensors(item)]
    if type(tree) is dict:
        return [tensor for item in tree.values() for tensor in _tensors(item)]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _by_torch(forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The state of torch's own generator need not be kept, as nothing here draws from it: the base is in eval mode
        # (see trainer.models.build), and the adapter's dropout has generators of its own (see trainer.adapters).
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _traced(forward: Forward, policy: Callable[..., CheckpointPolicy]) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        contexts = partial(contexts_by, policy)  # made here: torch.compile takes no other kind of variable for it
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    return run


def _versions(tree: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(tree)]


def _policy(shapes: Shapes, _: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide about an operation that torch.compile traces."""
    packet = op._overloadpacket
    weight = {aten.mm: 1, aten.addmm: 2, aten.convolution: 1}.get(packet)
    is_expensive = (
        tuple(args[weight].shape) in shapes if weight else packet in _expensive_operators() or _is_quantized(op)
    )
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE


def _is_quantized(op: Any) -> bool:
    """Whether it is an operator of ours, which decodes the weight of a layer or of experts and multiplies."""
    return op.namespace == "shardstudio" and op._opname in ("linear", "experts")
