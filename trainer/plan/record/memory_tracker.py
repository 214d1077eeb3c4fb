"""Counts bytes by purpose: every tensor that is made on a device is tracked until it is freed. See DECISIONS 89."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.plan.record.fake_device import fake_tensors
from trainer.plan.record.fake_mode import Watch
from trainer.plan.simulate.steps import grains
from trainer.weights.quantization import FORMATS, piece_rows

ACTIVATIONS, GATHERED, REDUCED = "activations", "gathered", "reduced"
_SHAPE_ONLY = ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")


class _Allocation:
    def __init__(self, size: int, what: str) -> None:
        self.size, self.what = size, what


class MemoryTracker:
    """Bytes on one type of device, by purpose, and floating-point operations.

    Args:
        device: Type of the device.
        watch: Called with each operation that runs.

    Attributes:
        device: Type of the device.
        what: Purpose of the tensors that are made from now on.
        current: {purpose: bytes} now.
        total: Bytes now.
        peak: Most bytes since `reset_peak`.
        peak_of: {purpose: most bytes since `reset_peak`}.
        highest: Most bytes since `reset`.
        at_peak: {purpose: bytes} when `highest` was reached.
        flops: Floating-point operations since `reset`.
        sent: {collective: bytes} since `reset`.
    """

    def __init__(self, device: str, watch: Watch | None = None) -> None:
        self.device, self.what = device, ACTIVATIONS
        self.current: Counter[str] = Counter()
        self.total = self.peak = self.highest = 0
        self.at_peak: dict[str, int] = {}
        self.peak_of: Counter[str] = Counter()
        self.flops = 0
        self.sent: Counter[str] = Counter()
        self._allocations: dict[int, _Allocation] = {}
        self._is_off = False
        self._watch = watch
        self._undo: list[Any] = []

    def __enter__(self) -> Self:
        self._watch_resizes()
        for name in _SHAPE_ONLY:
            if hasattr(ShardingPropagator, name):
                self._ignore_inside(name)
        return self

    def __exit__(self, *error: Any) -> None:
        for holder, name, original in reversed(self._undo):
            setattr(holder, name, original)
        self._undo.clear()

    @contextmanager
    def making(self, what: str) -> Iterator[None]:
        """Inside, new tensors count for the purpose `what`."""
        before, self.what = self.what, what
        try:
            yield
        finally:
            self.what = before

    def reset(self) -> None:
        """Start `highest`, `flops` and `sent` anew."""
        self.highest, self.at_peak, self.flops = self.total, dict(self.current), 0
        self.sent.clear()

    def reset_peak(self) -> None:
        """Measure `peak` and `peak_of` from here."""
        self.peak = self.total
        self.peak_of = Counter(self.current)

    def track(self, tensor: Tensor, what: str) -> None:
        """Track a tensor, or change the purpose of a tracked one."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        allocation = self._allocations.get(storage._cdata)
        if allocation is None:
            allocation = self._allocations[storage._cdata] = _Allocation(0, what)
            weakref.finalize(storage, self._free, storage._cdata, allocation)
        if allocation.what != what:
            self._add(allocation.what, -allocation.size)
            self._add(what, allocation.size)
            allocation.what = what
        self._resize(allocation, storage.nbytes())

    def observe(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Track the tensors that an operation made. For `fake_device.fake_tensors`."""
        if self._is_off or func.namespace == "prim":
            return
        if self._watch:
            self._watch(func, args, kwargs, out)
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor) or tensor.device.type != self.device:
                continue
            if tensor.untyped_storage()._cdata not in self._allocations:
                self.track(tensor, self.what)
        if not _allocates_only(func):
            self._count(func, args, kwargs, out)

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count what an operation computes, sends, and allocates and frees."""
        self.flops += operations(func, args, kwargs, out)
        self._count_sent(func, args)
        if func._overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_backward:
            self._use_briefly(args[1].numel() * 4)  # the gradient of the queries is summed in fp32
        elif is_quantized(func):
            # An operator on quantized weights decodes the weight and multiplies.
            records, format, inputs, dtype = decoding(func._opname, args)
            decoded = 0 if func._opname == "decoded" else grains(records.shape[0] * inputs * dtype.itemsize)
            self._use_briefly(decoded + decoding_bytes(records, format, inputs, dtype))

    def _use_briefly(self, num_bytes: int) -> None:
        """Count bytes that are allocated and freed within one operator."""
        self._add(self.what, grains(num_bytes))
        self._add(self.what, -grains(num_bytes))

    def _count_sent(self, func: Any, args: Any) -> None:
        if func.namespace != "c10d":
            return
        name = func._opname
        if name.startswith("_allgather_base"):
            self.sent["gathered"] += args[0].nbytes
        elif name.startswith("_reduce_scatter_base"):
            self.sent["scattered"] += args[1].nbytes
        elif name.startswith("allreduce"):
            self.sent["reduced"] += sum(tensor.nbytes for tensor in args[0])

    def _resize(self, allocation: _Allocation, num_bytes: int) -> None:
        size = grains(num_bytes)
        self._add(allocation.what, size - allocation.size)
        allocation.size = size

    def _free(self, key: int, allocation: _Allocation) -> None:
        self._add(allocation.what, -allocation.size)
        if self._allocations.get(key) is allocation:
            del self._allocations[key]

    def _add(self, what: str, num_bytes: int) -> None:
        self.current[what] += num_bytes
        self.total += num_bytes
        self.peak = max(self.peak, self.total)
        if self.current[what] > self.peak_of[what]:
            self.peak_of[what] = self.current[what]
        if self.total > self.highest:
            self.highest, self.at_peak = self.total, dict(self.current)

    def _watch_resizes(self) -> None:
        """Follow FSDP, which frees and reallocates the storage of gathered tensors by resizing it."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = original(storage, size)
            allocation = self._allocations.get(storage._cdata)
            if allocation is not None:
                self._resize(allocation, storage.nbytes())
            return out

        self._replace(torch.UntypedStorage, "resize_", resize)

    def _ignore_inside(self, name: str) -> None:
        """Count nothing inside a method of DTensor, which finds shapes by running operators on whole tensors."""
        original = getattr(ShardingPropagator, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._is_off = self._is_off, True
            try:
                return original(*args, **kwargs)
            finally:
                self._is_off = before

        self._replace(ShardingPropagator, name, run)

    def _replace(self, holder: Any, name: str, value: Any) -> None:
        self._undo.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)


@cache
def _allocates_only(func: Any) -> bool:
    """Whether an operation computes and sends nothing, and frees nothing of what it allocates."""
    packet = func._overloadpacket
    known = packet in flop_registry or packet in (
        torch.ops.aten._grouped_mm,
        torch.ops.aten._scaled_dot_product_flash_attention_backward,
    )
    return not known and func.namespace != "c10d" and not is_quantized(func)


QUANTIZED = frozenset({"decoded", "linear", "linear_backward", "experts", "experts_backward"})


def is_quantized(func: Any) -> bool:
    """Whether an operation is one on quantized weights, which are opaque to torch."""
    return func.namespace == "shardstudio" and func._opname in QUANTIZED


def operations(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the floating-point operations of an operation, whose arguments are those of `fake_mode.Watch`."""
    packet = func._overloadpacket
    if packet in flop_registry:
        found: int = flop_registry[packet](*args, **kwargs, out_val=out)
        return found
    if packet is torch.ops.aten._grouped_mm:  # each token by one expert of several
        return int(2 * args[0].numel() * args[1].shape[-1])
    if is_quantized(func) and func._opname != "decoded":
        x, records = args[:2]
        inputs = decoding(func._opname, args)[2]
        return int(2 * x.numel() // x.shape[-1] * records.shape[-2] * inputs)  # each token by one expert of several
    return 0


def decoding(name: str, args: Any) -> tuple[Tensor, str, int, torch.dtype]:
    """Return what an operator on quantized weights, opaque to torch, decodes.

    Args:
        name: Of the operator.
        args: Its arguments.

    Returns:
        Records (rows, row bytes), their format, the numbers of a row, and the type of the decoded weight.
    """
    if name == "decoded":
        records, format, inputs, dtype = args[:4]
        return records, format, inputs, dtype
    x, records = args[:2]
    format, inputs = (args[2], args[3]) if name == "linear_backward" else (args[3], args[4])
    return records.flatten(0, -2), format, inputs, x.dtype


def decoding_bytes(records: Tensor, format: str, inputs: int, dtype: torch.dtype) -> int:
    """Return the most bytes that decoding of records takes in addition to the weight."""
    rows = min(records.shape[0], piece_rows(records.device, inputs))
    return _decoding_bytes(rows, format, inputs, dtype, records.device)


@cache
def _decoding_bytes(rows: int, format: str, inputs: int, dtype: torch.dtype, device: torch.device) -> int:
    kind, tracker = FORMATS[format], MemoryTracker(device.type)
    with fake_tensors(device, tracker.observe):
        table = kind.table().to(device)
        piece = torch.empty(rows, kind.row_bytes(inputs), dtype=torch.uint8, device=device)
        weight = torch.empty(rows, inputs, dtype=dtype, device=device)
        tracker.reset()
        before = tracker.total
        kind.decode_into(piece, weight, table)
        return tracker.highest - before
