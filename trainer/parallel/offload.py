"""Offload the frozen weights of some blocks to host memory, and copy each block's to the device ahead of its use.

Nothing is copied back, as nothing changes frozen weights. A weight's storage on the device is emptied and filled again,
as FSDP2 does with gathered ones, so that what autograd has saved stays valid. Every strategy has the same mechanism:
where FSDP gathers frozen weights, it moves this rank's shards around the moment at which FSDP reads them; where FSDP
leaves them alone, or does not wrap the model, it moves them around the block's forward and backward.

FSDP2's own `CPUOffloadPolicy`, set for single parameters, was not chosen: it copies inside each all-gather, at most one
block ahead, and in the compute stream where a group has a single rank, as in `ddp`; and without FSDP there is none.

Streams: memory is taken and freed in the compute stream. A copy waits for the compute that was given before it, as its
memory may have been freed by that, and whoever reads a weight waits for the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from trainer.parallel.fsdp_rules import Entry
from trainer.parallel.offload_order import BlockResidency, Direction

Slot = tuple[nn.Module, str]
"""A module and the name of a parameter of it."""


def has_frozen(unit: nn.Module) -> bool:
    """Whether a block has weights that can be offloaded."""
    return any(not parameter.requires_grad for parameter in unit.parameters())


def frozen_slots(model: nn.Module, units: Sequence[nn.Module]) -> list[dict[nn.Parameter, list[Slot]]]:
    """Return the frozen parameters of each block with the places that hold them, without those that others share."""
    owners = {id(module): number for number, unit in enumerate(units) for module in unit.modules()}
    slots: dict[nn.Parameter, list[Slot]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                slots.setdefault(parameter, []).append((module, name))
    found: list[dict[nn.Parameter, list[Slot]]] = [{} for _ in units]
    for parameter, places in slots.items():
        users = {owners.get(id(module)) for module, _ in places}
        if len(users) == 1 and (owner := users.pop()) is not None:
            found[owner][parameter] = places
    return found


@dataclass
class _Weights:
    """The frozen weights of a block on this rank.

    Attributes:
        tensors: (on the device, on the host) of each; the storage on the device is empty while they are not present.
        copied: Event after the last copy.
    """

    tensors: list[tuple[Tensor, Tensor]]
    copied: Any = None

    @property
    def num_bytes(self) -> int:
        return sum(host.nbytes for _, host in self.tensors)


class OffloadedBlocks:
    """The offloaded blocks of a model whose weights are loaded.

    Args:
        model: The model. The frozen weights of `chosen` may be on the host already.
        units: All blocks, in the order in which they run.
        chosen: Those that are offloaded, in this order.
        entries: Methods other than `forward` through which blocks are entered.
        device: Where they compute.
        pin: Copies a CPU tensor to host memory that the device reads by itself.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        chosen: Sequence[nn.Module],
        entries: Sequence[Entry],
        device: torch.device,
        pin: Callable[[Tensor], Tensor],
    ) -> None:
        self._handle: Any = torch.get_device_module(device)
        self._stream = self._handle.Stream()
        self._current: int | None = None  # in backward, where FSDP leaves the weights alone
        groups = [_group_of(unit) for unit in chosen]
        self._groups = groups if None not in groups else [None] * len(groups)
        self._order = BlockResidency(len(chosen), all(group is None or _gathers_again(group) for group in self._groups))
        self._weights: list[_Weights] = []
        if None in self._groups:
            self._weights = [_to_host(slots, device, pin) for slots in frozen_slots(model, chosen)]
            numbers = {unit: number for number, unit in enumerate(chosen)}
            for unit in units:
                self._watch(unit, numbers.get(unit), [method for module, method in entries if module is unit])
        for number, group in enumerate(filter(None, self._groups)):
            self._weights.append(_shards_to_host(group, device, pin))
            group.__class__ = _OffloadedGroup
            group.blocks, group.number = self, number  # type: ignore[attr-defined]

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory on this rank, without what torch rounds up."""
        return sum(weights.num_bytes for weights in self._weights)

    @property
    def present(self) -> list[int]:
        """Numbers of the blocks on the device."""
        return sorted(self._order.present)

    @contextmanager
    def all_present(self) -> Iterator[None]:
        """Inside, all weights are on the device, for code that reads them outside of forward, such as `state_dict`."""
        for number in range(len(self._weights)):
            if number not in self._order.present:
                self._copy(number)
            self.wait(number, self._handle.current_stream())
        try:
            yield
        finally:
            for number in range(len(self._weights)):
                self._free(number)
            self._order.clear()

    def begin(self, number: int, direction: Direction) -> None:
        """Give the device a block's weights, and begin to copy those of the next one."""
        busy = [other for other, group in enumerate(self._groups) if group is not None and _is_pending(group)]
        moves = self._order.begin(number, direction, torch.is_grad_enabled(), busy)
        try:
            for other in moves.frees:
                self._free(other)
            for other in moves.copies:
                self._copy(other)
        except BaseException:
            self._clear()
            raise

    def wait(self, number: int, stream: Any) -> None:
        """Let a stream wait for the copy of a block that is present."""
        stream.wait_event(self._weights[number].copied)

    def end(self, number: int) -> None:
        """End the use of a block in the compute stream."""
        if self._order.end(number):
            self._free(number)

    def _copy(self, number: int) -> None:
        weights = self._weights[number]
        for tensor, host in weights.tensors:
            tensor.untyped_storage().resize_(host.nbytes)
        self._stream.wait_stream(self._handle.current_stream())
        with self._handle.stream(self._stream), torch.no_grad():
            for tensor, host in weights.tensors:
                tensor.copy_(host, non_blocking=True)
            weights.copied = self._stream.record_event()

    def _free(self, number: int) -> None:
        # It may not have been used: its memory must not be given to others while the copy still writes to it.
        self.wait(number, self._handle.current_stream())
        for tensor, _ in self._weights[number].tensors:
            tensor.untyped_storage().resize_(0)

    def _clear(self) -> None:
        """Free all blocks after an error, whatever has come of their copies."""
        self._handle.synchronize()
        for weights in self._weights:
            for tensor, _ in weights.tensors:
                tensor.untyped_storage().resize_(0)
        self._order.clear()

    def _watch(self, unit: nn.Module, number: int | None, methods: Collection[str]) -> None:
        """Where FSDP leaves the weights alone: notice when a block begins and ends, outside of what is compiled."""
        if unit._compiled_call_impl is not None:
            unit._compiled_call_impl = self._around(unit._compiled_call_impl, number)
        else:
            methods = ["forward", *methods]
        for method in methods:
            setattr(unit, method, self._around(getattr(unit, method), number))

    def _around(self, method: Callable[..., Any], number: int | None) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._end_backward()
            if number is not None:
                self.begin(number, "forward")
                self.wait(number, self._handle.current_stream())
            output = method(*args, **kwargs)
            if number is not None:
                self.end(number)
            if torch.is_grad_enabled():
                # An input that is returned as it is gets its gradient in the backward of an earlier block.
                inputs = {id(tensor) for tensor in tree_leaves((args, kwargs))}
                for tensor in tree_leaves(output):
                    if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in inputs:
                        tensor.register_hook(partial(self._before_backward, number))  # type: ignore[no-untyped-call]
            return output

        return run

    def _before_backward(self, number: int | None, _: Tensor) -> None:
        """Begin the backward of a block, whose outputs have their gradients.

        Autograd runs what was computed later first: the block whose backward came before is done.
        """
        if number == self._current and number is not None:  # another output of the same block
            return
        self._end_backward()
        self._current = number
        if number is not None:
            self.begin(number, "backward")
            self.wait(number, self._handle.current_stream())

    def _end_backward(self) -> None:
        """End the use of the block whose backward began last: that of another has begun, or a forward."""
        if self._current is not None:
            self.end(self._current)
            self._current = None


class _OffloadedGroup(FSDPParamGroup):
    """FSDP's parameters of a block: its frozen shards are on the device while FSDP reads them.

    Attributes:
        blocks: All offloaded blocks.
        number: That of this one.
    """

    blocks: OffloadedBlocks
    number: int

    def unshard(self, async_op: bool = False) -> None:
        if self.is_sharded and not _is_pending(self):
            is_backward = self._training_state == TrainingState.PRE_BACKWARD
            self.blocks.begin(self.number, "backward" if is_backward else "forward")
            # FSDP copies shards in a stream of its own, which does not wait for the compute stream.
            stream, _ = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
            self.blocks.wait(self.number, stream)
        super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        reads_shards = self.is_sharded and _is_pending(self)
        if reads_shards:  # in a group of one rank they are read here
            self.blocks.wait(self.number, self.device_handle.current_stream())
        super().wait_for_unshard()
        if reads_shards:
            self.blocks.end(self.number)


def _group_of(unit: nn.Module) -> FSDPParamGroup | None:
    """Return FSDP's group of a block's parameters. None where its frozen ones are not in it."""
    group = unit._get_fsdp_state()._fsdp_param_group if isinstance(unit, FSDPModule) else None
    parameters: Sequence[Any] = group.fsdp_params if group else ()
    return group if any(not parameter.sharded_param.requires_grad for parameter in parameters) else None


def _is_pending(group: FSDPParamGroup) -> bool:
    """Whether FSDP has begun to gather a block and not yet used the result."""
    return group._all_gather_result is not None


def _gathers_again(group: FSDPParamGroup) -> bool:
    """Whether backward gathers the block from its shards again."""
    return bool(group._reshard_after_forward and not group._use_post_forward_mesh)


def _to_host(
    slots: Mapping[nn.Parameter, Sequence[Slot]], device: torch.device, pin: Callable[[Tensor], Tensor]
) -> _Weights:
    """Move weights to the host and leave parameters with empty storage on the device. Those that FSDP has stay."""
    tensors = []
    for parameter, places in slots.items():
        if isinstance(parameter, DTensor):
            continue
        moved = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
        moved.untyped_storage().resize_(0)
        for module, name in places:
            setattr(module, name, moved)
        # Not `moved` itself: autograd would take a copy into it for a change of what it has saved.
        tensors.append((moved.data, pin(parameter.data.cpu())))
    return _Weights(tensors)


def _shards_to_host(group: FSDPParamGroup, device: torch.device, pin: Callable[[Tensor], Tensor]) -> _Weights:
    """The same of the frozen shards of a block. FSDP holds each padded, and a view of its rows without padding."""
    # FSDP would look at its shards again in the first forward, when they are empty.
    group._reset_sharded_params = True
    tensors = []
    shards: Sequence[Any] = group.fsdp_params
    for shard in shards:
        if shard.sharded_param.requires_grad:
            continue
        padded, local = shard._sharded_param_data, shard._sharded_local_tensor
        moved = torch.empty_like(padded, device=device)
        rows = moved.view(shard.padded_sharded_param_size).narrow(0, 0, local.shape[0] if local.numel() else 0)
        shard.sharded_param = nn.Parameter(shard.to_sharded_dtensor(rows), requires_grad=False)
        shard._setattr_on_modules(shard.sharded_param)
        shard._sharded_param_data = moved
        moved.untyped_storage().resize_(0)
        tensors.append((moved, pin(padded.cpu())))
    return _Weights(tensors)
