"""Counts the kernels of a training step, what they compute and what they read and write, on the plan's fake device.

For a process of its own (see `trainer.plan.record.fake_device`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainer.config.schema import RunConfig
from trainer.models import families
from trainer.models.build import build_model
from trainer.optim import scale_gradients
from trainer.plan import plan
from trainer.plan.record import fake_device
from trainer.plan.record.memory_tracker import GATHERED, REDUCED, MemoryTracker, decoding, is_quantized, operations
from trainer.plan.record.trace import Sharded, on_this_machine, sharded_model
from trainer.plan.search.decide import decided
from trainer.plan.simulate.sizes import input_of

FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER = PHASES = ("forward", "recompute", "backward", "optimizer")
MATRIX, MATRIX_FP32, SMALL = "matrix products", "matrix products of fp32", "small matrix products"
ATTENTION, ATTENTION_BACKWARD = "attention, forward", "attention, backward"
MASKED, MASKED_BACKWARD = "attention with a mask, forward", "attention with a mask, backward"
CONVOLUTION, DECODING, HOST = "convolutions", "decoding weights", "copies from and to the host"
ELEMENTWISE, COPIES = "elementwise", "copies around communication"
KINDS = (
    MATRIX,
    MATRIX_FP32,
    SMALL,
    ATTENTION,
    ATTENTION_BACKWARD,
    MASKED,
    MASKED_BACKWARD,
    CONVOLUTION,
    DECODING,
    ELEMENTWISE,
    OPTIMIZER,
    COPIES,
    HOST,
)
"""Everything that is none of the others is an elementwise pass: sums and norms too."""
SMALLEST = 64
"""A matrix product with a side of at most this length is a small one: of adapters, whose rank it is, or of one row."""
_PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm"})
# Operations without a kernel, though their result is a tensor of its own; views are known by their storage.
_NO_KERNEL = frozenset({"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# What they write over is not read.
_WRITES_ONLY = frozenset({"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "normal_", "uniform_"})
# Of the first tensor only the chosen rows are read.
_CHOOSES_ROWS = frozenset({"embedding", "index", "index_select", "gather"})
# Zeros everywhere, then the gradient over a part of them: two kernels.
_PADS = frozenset({"slice_backward", "select_backward"})
_FOREACH = ("_foreach_", "_fused_adam")
_FOREACH_TENSORS = (110, 64, 48, 36, 30)
_FOREACH_CHUNKS, _FOREACH_CHUNK = 320, 65536
"""Tensors (by lists of them), and chunks of so many numbers, per launch (ATen/native/cuda/MultiTensorApply.cuh)."""


@dataclass(frozen=True)
class Kernel:
    """An operation on the device.

    Attributes:
        phase: One of PHASES.
        kind: One of KINDS.
        name: Of torch's operator.
        flops: Floating-point operations.
        num_bytes: Read and written: each tensor once.
        launches: Kernels.
    """

    phase: str
    kind: str
    name: str
    flops: int
    num_bytes: int
    launches: int = 1


@dataclass
class StepCount:
    """An optimizer step on rank 0.

    Attributes:
        kernels: {kernel: how often}.
        sent: {collective: bytes}, as in `MemoryTracker`.
    """

    kernels: Counter[Kernel] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)

    @property
    def useful_flops(self) -> int:
        """Operations of forward and backward, without those that are repeated to save memory: by recomputed blocks, and
        by the backward of attention, a fifth of which computes the scores again."""
        share = dict.fromkeys((ATTENTION_BACKWARD, MASKED_BACKWARD), 4 / 5)
        used = ((k, times) for k, times in self.kernels.items() if k.phase in (FORWARD, BACKWARD))
        return round(sum(share.get(k.kind, 1) * k.flops * times for k, times in used))

    @property
    def launches(self) -> int:
        """Kernels."""
        return sum(kernel.launches * times for kernel, times in self.kernels.items())

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(kernel.flops * times for kernel, times in self.kernels.items())

    @property
    def num_bytes(self) -> int:
        """Bytes that kernels read and write."""
        return sum(kernel.num_bytes * times for kernel, times in self.kernels.items())

    def by(self, label: Callable[[Kernel], str]) -> dict[str, StepCount]:
        """Return the kernels by label."""
        parts: dict[str, StepCount] = {}
        for kernel, times in self.kernels.items():
            parts.setdefault(label(kernel), StepCount()).kernels[kernel] += times
        return parts

    def add(self, other: StepCount, times: int = 1) -> None:
        """Add another count so many times."""
        for mine, more in ((self.kernels, other.kernels), (self.sent, other.sent)):
            for key, value in more.items():
                mine[key] += times * value


class KernelCounter:
    """Counts operations for `MemoryTracker`.

    Attributes:
        kernels: {kernel: how often}.
        tracker: Says what tensors are made for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device.type
        self.kernels: Counter[Kernel] = Counter()
        self.tracker = MemoryTracker(self.device, self.watch)
        self._is_compiled = False

    @contextmanager
    def compiled(self, generated: Iterable[Kernel]) -> Iterator[None]:
        """Inside, a compiled graph runs: its generated kernels take the place of its elementwise operations."""
        self.kernels.update(generated)
        self._is_compiled = True
        try:
            yield
        finally:
            self._is_compiled = False

    def watch(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count one operation. Its arguments are those of `fake_mode.Watch`."""
        if func.namespace in ("c10d", "_c10d_functional", "prim", "profiler"):
            return
        if is_quantized(func):
            self._count_quantized(func, args, kwargs, out)
            return
        tensors = _tensors(args, kwargs, out)
        if not any(tensor.device.type == self.device for tensor in tensors):
            return
        num_bytes = traffic(func, args, kwargs, out)
        kind = self._kind(func, tensors)
        if num_bytes is None or (self._is_compiled and kind == ELEMENTWISE):
            return
        if kind == HOST:
            num_bytes //= 2
        name, flops = func._opname, _flops(func, args, kwargs, out)
        launches = 2 if name in _PADS else _foreach_launches(args) if name.startswith(_FOREACH) else 1
        self.kernels[Kernel(self._phase(), kind, name, flops, num_bytes, launches)] += 1

    def _kind(self, func: Any, tensors: Sequence[Tensor]) -> str:
        name, is_backward = func._opname, "backward" in func._opname
        if func.namespace == "fsdp" or self.tracker.what in (GATHERED, REDUCED):
            return COPIES
        if len({tensor.device.type for tensor in tensors}) > 1 and name in ("copy_", "_to_copy"):
            return HOST
        if self.tracker.what == OPTIMIZER:
            return OPTIMIZER
        if name in _PRODUCTS:
            return _product(tensors[-3].shape, tensors[-1])
        if "scaled_dot_product_efficient" in name:
            return MASKED_BACKWARD if is_backward else MASKED
        if "scaled_dot_product" in name:
            return ATTENTION_BACKWARD if is_backward else ATTENTION
        return CONVOLUTION if "convolution" in name else ELEMENTWISE

    def _count_quantized(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator on quantized weights as a GPU runs it: one kernel decodes, another multiplies."""
        records, format, inputs, dtype = decoding(func._opname, args)
        decoded = records.shape[0] * inputs * dtype.itemsize
        phase = self._phase(is_forward="backward" not in func._opname)
        self.kernels[Kernel(phase, DECODING, format, 0, records.nbytes + decoded)] += 1
        if func._opname != "decoded":
            x = args[0]
            num_bytes = x.nbytes + decoded + sum(tensor.nbytes for tensor in _tensors(out))
            kind = _product((x.numel() // x.shape[-1], x.shape[-1]), out)
            self.kernels[Kernel(phase, kind, func._opname, operations(func, args, kwargs, out), num_bytes)] += 1

    def _phase(self, is_forward: bool = False) -> str:
        """Return the phase of an operation. Backward runs without gradients, except where it recomputes forward.

        is_forward: Whether only forward calls it: the operators of our own run without gradients in both.
        """
        if self.tracker.what == OPTIMIZER:
            return OPTIMIZER
        if torch._C._current_graph_task_id() == -1:
            return FORWARD
        return RECOMPUTE if is_forward or torch.is_grad_enabled() else BACKWARD


def count_step(cfg: RunConfig, cache: Path, attach: Callable[[KernelCounter], str] | None = None) -> StepCount:
    """Count the second optimizer step of a run on rank 0, as it is without torch.compile.

    Args:
        cfg: The run's config, with `parallel.strategy` decided.
        cache: Folder shared by runs.
        attach: Blocks are compiled by the backend that it names; it gets the counter. None: they are not compiled.
    """
    count, size = StepCount(), input_of(cfg)
    with _counted_model(cfg, cache, attach) as (sharded, counter):
        sharded.average()
        sharded.one_pass(size, is_last=True)
        sharded.update()
        for times, is_last in _passes(cfg.micro_steps):
            with _counted(sharded, counter, count, times):
                sharded.one_pass(size, is_last)
        with _counted(sharded, counter, count, 1), sharded.tracker.making(OPTIMIZER):
            scale_gradients(list(sharded.trainables.values()), None, cfg.optim.clip_norm)
            sharded.update()
            if sharded.ema:
                sharded.ema.update(0)
    return count


def decided_by_plan(cfg: RunConfig, cache: Path) -> tuple[RunConfig, float]:
    """Return the config with what is left to the plan, which knows no GPU and recomputes all that it may, and the bytes
    of the GPU that it then takes."""
    planned = plan(cfg, None, cache)
    cfg = decided(cfg, planned.checkpointing, planned.offload_blocks)
    parallel = cfg.parallel.model_copy(update={"strategy": planned.strategy})
    return cfg.model_copy(update={"parallel": parallel}), planned.need


def count_pass(cfg: RunConfig, cache: Path) -> StepCount:
    """Count forward and backward of a run's first step. The arguments are those of `count_step`."""
    count = StepCount()
    with _counted_model(cfg, cache) as (sharded, counter), _counted(sharded, counter, count, 1):
        sharded.one_pass(input_of(cfg), is_last=True)
    return count


@contextmanager
def _counted_model(
    cfg: RunConfig, cache: Path, attach: Callable[[KernelCounter], str] | None = None
) -> Iterator[tuple[Sharded, KernelCounter]]:
    device = fake_device.install()
    counter = KernelCounter(device)
    changes = {"compile": False} if attach is None else {"compile": True, "compile_backend": attach(counter)}
    cfg = on_this_machine(cfg.model_copy(update={"train": cfg.train.model_copy(update=changes)}), cache)
    family = families.make(cfg, cache)
    with sharded_model(build_model(cfg, family), cfg, family, device, counter.watch) as sharded:
        counter.tracker = sharded.tracker
        yield sharded, counter


def _passes(number: int) -> list[tuple[int, bool]]:
    """Return (how many, whether it is the last) of the passes that differ: the first, those in between, the last."""
    return [
        (times, is_last)
        for times, is_last in ((min(number - 1, 1), False), (number - 2, False), (1, True))
        if times > 0
    ]


@contextmanager
def _counted(sharded: Sharded, counter: KernelCounter, count: StepCount, times: int) -> Iterator[None]:
    counter.kernels.clear()
    sharded.tracker.reset()
    yield
    count.add(StepCount(counter.kernels, sharded.tracker.sent), times)


def is_elementwise(func: Any) -> bool:
    """Whether an operation is neither a matrix product nor attention nor a convolution nor on quantized weights."""
    name = func._opname
    return not (is_quantized(func) or name in _PRODUCTS or "scaled_dot_product" in name or "convolution" in name)


def traffic(func: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """Return the bytes that an operation reads and writes, each tensor once. None: no kernel runs, as for a view."""
    name = func._opname
    read: dict[Any, int] = {}
    written: dict[Any, int] = {}
    storages = set()
    for position, argument in enumerate(func._schema.arguments):
        tensors = _tensors(args[position] if position < len(args) else kwargs.get(argument.name))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors:
            key, num_bytes = _key(tensor), _bytes(tensor)
            storages.add(tensor.untyped_storage()._cdata)
            if is_written:
                written[key] = num_bytes
            if not is_written or not (name in _WRITES_ONLY or argument.name == "out"):
                read[key] = num_bytes
    outputs = [tensor for tensor in _tensors(out) if tensor.untyped_storage()._cdata not in storages]
    written |= {_key(tensor): _bytes(tensor) for tensor in outputs}
    if name in _NO_KERNEL or not written:
        return None
    if name.endswith("_like") or name.startswith("new_"):
        read.clear()  # only the shape is
    if name in _CHOOSES_ROWS:
        read[_key(args[0])] = min(_bytes(args[0]), _bytes(outputs[0]))
    again = _bytes(args[0]) if name in _PADS else 0
    return sum(read.values()) + sum(written.values()) + again


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the floating-point operations. torch has no formula for products that are added to a tensor in place."""
    if func._opname == "addmm_":
        return operations(torch.ops.aten.addmm.default, args, kwargs, out)
    return operations(func, args, kwargs, out)


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of the tensor's numbers in memory: one that is expanded is not read more than once."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.dtype.itemsize * math.prod(side for side, stride in sides if stride or not side)


def _product(factor: Sequence[int], product: Tensor) -> str:
    """Return the kind of a matrix product. factor: shape of one of the factors."""
    if min(*factor[-2:], *product.shape[-2:]) <= SMALLEST:
        return SMALL
    return MATRIX_FP32 if product.dtype == torch.float32 else MATRIX


def _foreach_launches(args: Any) -> int:
    """Return the launches of an operation on lists of tensors."""
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
    chunks = sum(-(-tensor.numel() // _FOREACH_CHUNK) for tensor in lists[0])
    of_tensors = _FOREACH_TENSORS[min(len(lists), len(_FOREACH_TENSORS)) - 1]
    return max(1, -(-len(lists[0]) // of_tensors), -(-chunks // _FOREACH_CHUNKS))
