"""Who holds how many bytes: every tensor that is made on a device is written down until it is freed."""

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

from trainer.plan.fake_device import fake_tensors
from trainer.plan.steps import grains
from trainer.weights.quantization import FORMATS, piece_rows

ACTIVATIONS, GATHERED, REDUCED = "activations", "gathered", "reduced"
_SHAPE_ONLY = ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")


class _Entry:
    def __init__(self, size: int, what: str) -> None:
        self.size, self.what = size, what


class Ledger:
    """Bytes on one kind of device, by what they are for; and the floating-point operations.

    device: type of the device.  what: for what is made from now on.  peak: the most there was of all together since
    `mark`, and peak_of: of each.  at_peak: what there was when `highest`, the most ever, was reached.
    """

    def __init__(self, device: str) -> None:
        self.device, self.what = device, ACTIVATIONS
        self.current: Counter[str] = Counter()
        self.total = self.peak = self.highest = 0
        self.at_peak: dict[str, int] = {}
        self.peak_of: Counter[str] = Counter()
        self.flops = 0
        self.sent: Counter[str] = Counter()
        self._entries: dict[int, _Entry] = {}
        self._is_off = False
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
        """Inside, what is made is for `what`."""
        before, self.what = self.what, what
        try:
            yield
        finally:
            self.what = before

    def begin(self) -> None:
        """Forget what was highest, computed and sent."""
        self.highest, self.at_peak, self.flops = self.total, dict(self.current), 0
        self.sent.clear()

    def mark(self) -> None:
        """Measure peaks from here."""
        self.peak = self.total
        self.peak_of = Counter(self.current)

    def hold(self, tensor: Tensor, what: str) -> None:
        """Write down a tensor, or that it is for something else."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)
        if entry is None:
            entry = self._entries[storage._cdata] = _Entry(0, what)
            weakref.finalize(storage, self._free, storage._cdata, entry)
        if entry.what != what:
            self._add(entry.what, -entry.size)
            self._add(what, entry.size)
            entry.what = what
        self._resize(entry, storage.nbytes())

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Write down what an operation made. For `fake_device.fake_tensors`."""
        if self._is_off or func.namespace == "prim":
            return
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        self._count_sent(func, args)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self._see(tensor)
        if packet is torch.ops.aten._scaled_dot_product_flash_attention_backward:
            self._use(args[1].numel() * 4)  # the gradient of the queries is summed in fp32
        elif func.namespace == "shardstudio":
            self._see_quantized(func._opname, args)

    def _see_quantized(self, name: str, args: Any) -> None:
        """An operator of `weights.quantization`, in which torch sees nothing: the weight is decoded and multiplied."""
        if name == "decoded":
            records, format, inputs, dtype = args[:4]
            self._use(decoding_bytes(records, format, inputs, dtype))
            return
        x, records = args[:2]
        format, inputs = (args[3], args[4]) if name == "linear" else (args[2], args[3])
        self.flops += 2 * x.numel() // x.shape[-1] * records.shape[0] * inputs
        weight = grains(records.shape[0] * inputs * x.dtype.itemsize)
        self._use(weight + decoding_bytes(records, format, inputs, x.dtype))

    def _use(self, num_bytes: int) -> None:
        """Taken and given back within one operator."""
        self._add(self.what, grains(num_bytes))
        self._add(self.what, -grains(num_bytes))

    def _see(self, tensor: Tensor) -> None:
        if tensor.device.type == self.device and tensor.untyped_storage()._cdata not in self._entries:
            self.hold(tensor, self.what)

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

    def _resize(self, entry: _Entry, num_bytes: int) -> None:
        size = grains(num_bytes)
        self._add(entry.what, size - entry.size)
        entry.size = size

    def _free(self, key: int, entry: _Entry) -> None:
        self._add(entry.what, -entry.size)
        if self._entries.get(key) is entry:
            del self._entries[key]

    def _add(self, what: str, num_bytes: int) -> None:
        self.current[what] += num_bytes
        self.total += num_bytes
        self.peak = max(self.peak, self.total)
        if self.current[what] > self.peak_of[what]:
            self.peak_of[what] = self.current[what]
        if self.total > self.highest:
            self.highest, self.at_peak = self.total, dict(self.current)

    def _watch_resizes(self) -> None:
        """FSDP frees and takes again the storage of what it gathers."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = original(storage, size)
            entry = self._entries.get(storage._cdata)
            if entry is not None:
                self._resize(entry, storage.nbytes())
            return out

        self._replace(torch.UntypedStorage, "resize_", resize)

    def _ignore_inside(self, name: str) -> None:
        """DTensor finds shapes by running operators on whole tensors, which never exist."""
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


def decoding_bytes(records: Tensor, format: str, inputs: int, dtype: torch.dtype) -> int:
    """Bytes taken at most while records are decoded, beside the weight."""
    rows = min(records.shape[0], piece_rows(records.device, inputs))
    return _decoding_bytes(rows, format, inputs, dtype, records.device)


@cache
def _decoding_bytes(rows: int, format: str, inputs: int, dtype: torch.dtype, device: torch.device) -> int:
    kind, ledger = FORMATS[format], Ledger(device.type)
    with fake_tensors(device, ledger.see):
        table = kind.table().to(device)
        piece = torch.empty(rows, kind.row_bytes(inputs), dtype=torch.uint8, device=device)
        ledger.begin()
        before = ledger.total
        kind.decode(piece, inputs, dtype, table)
        return ledger.highest - before
