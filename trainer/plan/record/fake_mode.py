"""torch's mode for tensors without values, which finds the shapes that an operation makes once for each kind of input.

torch's own cache takes 110 us of Python per operation, most of it to name the input; a table takes 100,000 of them.
See DECISIONS 241.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Watch = Callable[[Any, Any, Any, Any], None]
"""Called with each operation: its function, arguments, keyword arguments, and result."""

_DEVICE = torch.ops.prim.device.default
_SIMPLE = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Types of arguments that are equal where what they do is equal."""
_REAL = "a tensor with values"


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that an operation returns.

    Attributes:
        base: Number of the tensor among the arguments whose storage it has; None where it has one of its own.
        is_base: Whether it is that argument itself.
        shape, stride, offset, dtype, device: As of the tensor.
    """

    base: int | None
    is_base: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Outputs:
    """All that an operation returns. many: list or tuple; None for a single value."""

    values: tuple[_Output | int | None, ...]
    many: type | None


_KNOWN: dict[tuple[Any, ...], _Outputs | None] = {}
"""{operation and its input: what it returns, of all modes of this process; None where it must run}"""


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Inside, tensors have shapes and devices, but no values. watch: called with each operation."""

    avoid_device_init = True
    """Otherwise the mode really copies tensors with values to the device."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False
        self._watch = watch
        self._is_inside = False
        self._states: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to say so takes 5 us per operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Report an operation to `watch`, but not those that torch decomposes it into: a GPU runs one kernel."""
        if func is _DEVICE:
            return args[0].device
        kwargs = kwargs or {}
        if self._is_inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensors: list[FakeTensor] = []
        key = self._key(func, args, kwargs, tensors)
        known = _KNOWN.get(key) if key else None
        if known:
            out = self._make(known, tensors)
        else:
            storages = _storages(tensors)
            self._is_inside = True
            try:
                out = super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._is_inside = False
            if out is NotImplemented:  # a DTensor dispatches again for its local part
                return out
            if key and key not in _KNOWN:
                is_changed = _storages(tensors) != storages or self._key(func, args, kwargs, []) != key
                _KNOWN[key] = None if is_changed else _outputs(out, tensors)
        self._watch(func, args, kwargs, out)
        return out

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> tuple[Any, ...] | None:
        """Return all that decides what an operation makes; None where that is not only types and shapes.

        tensors: those among the arguments are appended.
        """
        key: list[Any] = [id(func), torch.get_default_dtype()]
        if not self._describe(args, key, tensors):
            return None
        for name, value in kwargs.items():
            key.append(name)
            if not self._describe((value,), key, tensors):
                return None
        if _REAL in key and (not tensors or func._schema.is_mutable or func.is_view):
            return None  # its result shares memory with what torch makes of the real tensor
        return tuple(key)

    def _describe(self, values: Iterable[Any], key: list[Any], tensors: list[FakeTensor]) -> bool:
        """Append to a key what matters of some values, and to `tensors` those among them. Returns whether it can."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                dtype = value.dtype
                # Complex tensors have a bit that says that they are conjugated.
                if value.constant is not None or value.fake_mode is not self or dtype.is_complex:
                    return False
                key += (value.shape, value.stride(), value.storage_offset(), dtype, value.fake_device)
                tensors.append(value)
            elif kind in _SIMPLE:
                key += (kind, value)
            elif kind is Tensor and value.device.type == "cpu":
                key += (_REAL, value.shape, value.stride(), value.dtype)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(value, key, tensors):
                    return False
            else:
                return False
        return True

    def _make(self, outputs: _Outputs, tensors: list[FakeTensor]) -> Any:
        """Make the outputs of an operation whose arguments' tensors are these."""
        made: list[Any] = []
        for output in outputs.values:
            if not isinstance(output, _Output):
                made.append(output)
                continue
            if output.is_base:
                assert output.base is not None
                made.append(tensors[output.base])
                continue
            if output.base is None:
                elem = _empty(output)
            else:
                elem = torch.empty(0, dtype=output.dtype, device="meta")
                elem.set_(tensors[output.base].untyped_storage(), output.offset, output.shape, output.stride)
            made.append(self._fake(elem, output.device))
        return made[0] if outputs.many is None else outputs.many(made)

    def _fake(self, elem: Tensor, device: torch.device) -> FakeTensor:
        """Return `FakeTensor(self, elem, device)`, whose checks and attributes take 20 us, in 3."""
        if device not in self._states:
            self._states[device] = dict(vars(FakeTensor(self, elem, device)))
        fake = Tensor._make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device)
        vars(fake).update(self._states[device])
        return fake


def _outputs(out: Any, tensors: list[FakeTensor]) -> _Outputs | None:
    """Return how to make an operation's outputs again; None where they are not only new tensors and views."""
    is_many = isinstance(out, (list, tuple))
    bases, new = _storages(tensors), set[int]()
    found: list[_Output | int | None] = []
    for value in out if is_many else (out,):
        if value is None or type(value) is int:
            found.append(value)
            continue
        if type(value) is not FakeTensor or value.constant is not None or value.dtype.is_complex:
            return None
        storage = value.untyped_storage()
        same = next((number for number, tensor in enumerate(tensors) if tensor is value), None)
        base = bases.index(storage._cdata) if same is None and storage._cdata in bases else same
        shape, stride, offset = tuple(value.shape), value.stride(), int(value.storage_offset())
        made = _Output(base, same is not None, shape, stride, offset, value.dtype, value.fake_device)
        if base is None:
            # Outputs that share a new storage, or use a part of it, are not made again.
            if storage._cdata in new or offset or _empty(made).untyped_storage().nbytes() != storage.nbytes():
                return None
            new.add(storage._cdata)
        found.append(made)
    return _Outputs(tuple(found), (list if isinstance(out, list) else tuple) if is_many else None)


def _storages(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def _empty(output: _Output) -> Tensor:
    return torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
