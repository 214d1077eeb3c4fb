"""Measures one step from inside: bytes that a rank sends, keeps for backward, and gathers. See DECISIONS 105."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.metrics.memory import local_bytes
from trainer.parallel.strategy import ring_share


class Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside its context it watches every operation of a step.

    Attributes:
        sent: Bytes that this rank sends to others, by ring algorithms.
        activations: Bytes that the module's forward left for backward, in the pass that left most.
        gathered: Most bytes of weights that were unsharded at once in forward, in addition to the allocated shards.
        gradients: Bytes that the optimizer got.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent = 0.0
        self.activations = 0
        self.gathered = 0
        self.gradients = 0
        self._module = module
        self._units = [*units, module]
        self._optimizer = optimizer
        self._allocated = {_local_storage(p).data_ptr() for p in module.parameters()}
        self._new: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for unit in self._units:
            # After FSDP's own hook, which puts itself first: what the unit needs is gathered.
            self._hooks.callback(unit.register_forward_pre_hook(self._before_unit).remove)
        self._hooks.callback(self._module.register_forward_hook(self._after_forward).remove)
        self._hooks.callback(self._optimizer.register_step_pre_hook(self._before_update).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.sent += sent_bytes(func._schema.name, args)
            for storage in _storages(args):
                self._new.pop(id(storage), None)  # not an activation, though the backend's thread may hold it
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage.data_ptr() not in given:  # else a view, or changed in place
                self._new[id(storage)] = weakref.ref(storage)
        return result

    def _before_unit(self, unit: nn.Module, inputs: Any) -> None:
        if unit is self._module:
            self._new.clear()  # what earlier passes left are gradients
        self.gathered = max(self.gathered, sum(storage.nbytes() for storage in self._whole()))

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        weights = {storage.data_ptr() for storage in self._whole()}
        alive = [storage for reference in self._new.values() if (storage := reference()) is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in alive}
        kept = sum(size for address, size in sizes.items() if address not in weights)
        self.activations = max(self.activations, kept)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self.gradients = local_bytes(p.grad for p in parameters if p.grad is not None)

    def _whole(self) -> list[torch.UntypedStorage]:
        """Storages of the weights that are gathered now, without those that are allocated anyway."""
        storages = [_local_storage(p) for p in self._module.parameters()]
        return list({s.data_ptr(): s for s in storages if s.data_ptr() not in self._allocated}.values())


def sent_bytes(operation: str, arguments: Iterable[Any]) -> float:
    """Bytes this rank sends in an operation of `c10d`, by ring algorithms; 0 unless it is a known collective."""
    first, *rest = arguments
    groups = [_group_size(item) for item in rest if isinstance(item, torch.ScriptObject)]
    share = ring_share(max(groups, default=1))
    match operation:
        case "c10d::_allgather_base_":  # (unsharded, mine, group)
            return share * _bytes(first)
        case "c10d::_reduce_scatter_base_":  # (mine, unsharded, group)
            return share * _bytes(rest[0])
        case "c10d::allreduce_":  # ([tensor], group)
            return 2 * share * sum(map(_bytes, first))
        case _:
            return 0.0


def _local_storage(parameter: Tensor) -> torch.UntypedStorage:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.untyped_storage()


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = (value for value in tree_leaves(values) if isinstance(value, Tensor) and not isinstance(value, DTensor))
    return [tensor.untyped_storage() for tensor in tensors]


def _group_size(item: torch.ScriptObject) -> int:
    try:
        return dist.ProcessGroup.unbox(item).size()
    except RuntimeError:  # another object of torch, the kind of reduction
        return 1


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
