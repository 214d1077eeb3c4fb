"""Tensors that are composed of stored ones, as a fused matrix of experts is: nothing is read until rows are asked for.

A `LazyTensor` goes through any function of torch in place of a tensor, and records what was done to it. What only moves
numbers (cat, stack, split, slice, transpose, reshape) is followed backwards when rows are read, so that of each stored
tensor only these rows are read. Any other function reads its whole arguments, one result at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from trainer.weights.tensors import OpenFiles, TensorEntry

Box = tuple[tuple[int, int], ...]
"""Begin and end in each dim."""
Read = Callable[[Any, Box], Tensor]
"""(what a leaf stands for, box) -> its numbers in the box."""
DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
aten = torch.ops.aten


@dataclass(frozen=True)
class Node:
    """A tensor by how it is made."""

    shape: tuple[int, ...]

    def read(self, read: Read, box: Box) -> Tensor:
        """Read the numbers in the box."""
        raise NotImplementedError

    def leaves(self) -> Iterator[Any]:
        """Yield what the leaves stand for."""
        for part in _nodes([getattr(self, field.name) for field in fields(self)]):
            yield from part.leaves()

    def identity(self) -> tuple[object, ...]:
        """Return what determines the numbers, without the files' places."""
        values = [getattr(self, field.name) for field in fields(self)]
        return (type(self).__name__, *(str(tree_map(_identity, value)) for value in values))


@dataclass(frozen=True)
class Leaf(Node):
    """A tensor that is given. of: an entry, or a name."""

    of: Any

    def read(self, read: Read, box: Box) -> Tensor:
        return read(self.of, box)

    def leaves(self) -> Iterator[Any]:
        yield self.of

    def identity(self) -> tuple[object, ...]:
        return self.of.identity() if isinstance(self.of, TensorEntry) else (self.of,)


@dataclass(frozen=True)
class _Cat(Node):
    parts: tuple[Node, ...]
    dim: int

    def read(self, read: Read, box: Box) -> Tensor:
        begin, end = box[self.dim]
        found, start = [], 0
        for part in self.parts:
            size = part.shape[self.dim]
            inside = (max(begin - start, 0), min(end - start, size))
            if inside[0] < inside[1]:
                found.append(part.read(read, _with(box, self.dim, inside)))
            start += size
        return torch.cat(found, self.dim) if found else torch.empty([b - a for a, b in box])


@dataclass(frozen=True)
class _Slice(Node):
    part: Node
    dim: int
    start: int

    def read(self, read: Read, box: Box) -> Tensor:
        begin, end = box[self.dim]
        return self.part.read(read, _with(box, self.dim, (begin + self.start, end + self.start)))


@dataclass(frozen=True)
class _Permuted(Node):
    part: Node
    dims: tuple[int, ...]

    def read(self, read: Read, box: Box) -> Tensor:
        inner: list[tuple[int, int]] = [(0, 0)] * len(box)
        for outer, dim in enumerate(self.dims):
            inner[dim] = box[outer]
        return self.part.read(read, tuple(inner)).permute(self.dims)


@dataclass(frozen=True)
class _Reshaped(Node):
    part: Node

    def read(self, read: Read, box: Box) -> Tensor:
        if not self.shape:
            return self.part.read(read, _whole(self.part.shape)).reshape(())
        row = math.prod(self.shape[1:])
        first, last = box[0]
        pieces = [self.part.read(read, inner).reshape(-1) for inner in _boxes(self.part.shape, first * row, last * row)]
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        rows = flat.reshape(last - first, *self.shape[1:])
        return rows[(slice(None), *(slice(a, b) for a, b in box[1:]))]


@dataclass(frozen=True)
class _Cast(Node):
    part: Node
    dtype: torch.dtype

    def read(self, read: Read, box: Box) -> Tensor:
        return self.part.read(read, box).to(self.dtype)


@dataclass(frozen=True)
class _Computed(Node):
    """Any other function: its arguments are read whole."""

    function: Any
    arguments: Any
    named: Any
    index: int | None

    def read(self, read: Read, box: Box) -> Tensor:
        def value(node: Node) -> Tensor:
            return node.read(read, _whole(node.shape)).contiguous()

        arguments, named = tree_map_only(Node, value, (self.arguments, self.named))
        with torch.no_grad():
            made = self.function(*arguments, **named)
        found: Tensor = made if self.index is None else made[self.index]
        return found[tuple(slice(a, b) for a, b in box)]


class LazyTensor(Tensor):
    """A tensor without numbers that records what is done to it. Make one of an entry or a name by `lazy`."""

    node: Node

    @staticmethod
    def __new__(cls, node: Node, dtype: torch.dtype) -> LazyTensor:
        made: LazyTensor = Tensor._make_wrapper_subclass(cls, node.shape, dtype=dtype, device=torch.device("cpu"))
        made.node = node
        return made

    def __init__(self, node: Node, dtype: torch.dtype) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        meta_args, meta_kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
        shaped = func(*meta_args, **{k: v for k, v in meta_kwargs.items() if k != "device"})
        make = _MAKERS.get(func)
        if isinstance(shaped, list | tuple):
            return [cls(_made(make, func, args, kwargs, one, i), one.dtype) for i, one in enumerate(shaped)]
        return cls(_made(make, func, args, kwargs, shaped, None), shaped.dtype)


def lazy(of: Any, shape: Sequence[int], dtype: torch.dtype) -> LazyTensor:
    """Make the tensor that stands for an entry, or for a name."""
    return LazyTensor(Leaf(tuple(shape), of), dtype)


def lazy_entry(entry: TensorEntry) -> LazyTensor:
    """Make the tensor that stands for a stored one. Codes of 4 bits are decoded to fp32."""
    return lazy(entry, entry.shape, DTYPES.get(entry.dtype, torch.float32))


def entry_of(tensor: Tensor) -> TensorEntry:
    """Make the entry that reads a composed tensor."""
    assert isinstance(tensor, LazyTensor)
    entries = list(dict.fromkeys(id(entry) for entry in tensor.node.leaves()))
    first: TensorEntry = next(iter(tensor.node.leaves()))
    if isinstance(tensor.node, Leaf):
        return first
    key = first.key if len(entries) == 1 else f"{first.key}' with {len(entries) - 1} other tensors as '{first.key}"
    return ComposedEntry(first.file, key, tuple(tensor.shape), first.dtype, node=tensor.node)


def value_of(tensor: Tensor, get: Callable[[Any], Tensor]) -> Tensor:
    """Compute the whole tensor. get: returns the whole tensor of a leaf."""

    def read(of: Any, box: Box) -> Tensor:
        return get(of)[tuple(slice(a, b) for a, b in box)]

    assert isinstance(tensor, LazyTensor)
    return tensor.node.read(read, _whole(tensor.node.shape)).contiguous()


@dataclass(frozen=True, kw_only=True)
class ComposedEntry(TensorEntry):
    """A tensor that is composed of stored ones. `file` and `key` are those of the first."""

    node: Node

    def rows(self, files: OpenFiles, begin: int, end: int) -> Tensor:
        box = ((begin, end), *((0, size) for size in self.shape[1:]))
        return self._read(files, box)

    def rows_of_matrix(self, files: OpenFiles, index: int, begin: int, end: int) -> Tensor:
        return self._read(files, ((index, index + 1), (begin, end), (0, self.shape[2])))

    def whole(self, files: OpenFiles) -> Tensor:
        return self._read(files, _whole(self.shape)).contiguous()

    def _read(self, files: OpenFiles, box: Box) -> Tensor:
        return self.node.read(lambda entry, inner: _stored(entry, files, inner), box)

    def scale(self, files: OpenFiles) -> float | None:
        return None

    def sources(self) -> frozenset[Path]:
        return frozenset(entry.file for entry in self.node.leaves())

    def identity(self) -> tuple[object, ...]:
        return ("ComposedEntry", *self.node.identity())


def _stored(entry: TensorEntry, files: OpenFiles, box: Box) -> Tensor:
    if not entry.shape:
        return entry.whole(files)
    if type(entry) is TensorEntry and not entry.transposed and not entry.start:
        stored = files.slice(entry.file, entry.key)
        if tuple(stored.get_shape()) == entry.shape:
            found: Tensor = stored[tuple(slice(a, b) for a, b in box)]
            return found
    rows = entry.rows(files, *box[0])
    return rows[(slice(None), *(slice(a, b) for a, b in box[1:]))]


def _made(make: Any, func: Any, args: Any, kwargs: Any, shaped: Tensor, index: int | None) -> Node:
    node = make(args, kwargs, tuple(shaped.shape), index) if make else None
    if node is not None:
        found: Node = node
        return found
    nodes_args, nodes_kwargs = tree_map_only(LazyTensor, lambda tensor: tensor.node, (args, kwargs))
    return _Computed(tuple(shaped.shape), func, nodes_args, nodes_kwargs, index)


def _on_meta(tensor: Tensor) -> Tensor:
    """Contiguous, as every lazy tensor is: a reshape then is a view."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _cat(args: Any, kwargs: Any, shape: tuple[int, ...], index: int | None) -> Node | None:
    tensors, dim = args[0], _dim(args, kwargs, len(shape))
    parts = tuple(tensor.node for tensor in tensors if isinstance(tensor, LazyTensor))
    return _Cat(shape, parts, dim) if len(parts) == len(tensors) else None


def _stack(args: Any, kwargs: Any, shape: tuple[int, ...], index: int | None) -> Node | None:
    tensors, dim = args[0], _dim(args, kwargs, len(shape))
    one = (*shape[:dim], 1, *shape[dim + 1 :])
    parts = tuple(_Reshaped(one, tensor.node) for tensor in tensors if isinstance(tensor, LazyTensor))
    return _Cat(shape, parts, dim) if len(parts) == len(tensors) else None


def _split(args: Any, kwargs: Any, shape: tuple[int, ...], index: int | None) -> Node:
    assert index is not None
    tensor, sizes = args[:2]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % tensor.dim()
    start = sizes * index if isinstance(sizes, int) else sum(sizes[:index])
    return _Slice(shape, tensor.node, dim, start)


def _unbind(args: Any, kwargs: Any, shape: tuple[int, ...], index: int | None) -> Node:
    assert index is not None
    return _one(args[0], _dim(args, kwargs, args[0].dim()), index, shape)


def _select(args: Any, kwargs: Any, shape: tuple[int, ...], index: int | None) -> Node:
    tensor, dim, at = args
    return _one(tensor, dim % tensor.dim(), at % tensor.shape[dim], shape)


def _one(tensor: LazyTensor, dim: int, at: int, shape: tuple[int, ...]) -> Node:
    kept = (*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :])
    return _Reshaped(shape, _Slice(kept, tensor.node, dim, at))


def _slice(args: Any, kwargs: Any, shape: tuple[int, ...], index: int | None) -> Node | None:
    tensor: LazyTensor = args[0]
    given: list[Any] = list(args[1:])
    defaults: list[Any] = [0, None, None, 1]
    dim, start, _, step = given + defaults[len(given) :]
    if step != 1:
        return None
    start = start or 0
    return _Slice(shape, tensor.node, dim % tensor.dim(), start if start >= 0 else start + tensor.shape[dim])


def _transpose(args: Any, kwargs: Any, shape: tuple[int, ...], index: int | None) -> Node:
    tensor, first, second = args if len(args) > 1 else (args[0], 0, 1)
    dims = list(range(tensor.dim()))
    dims[first], dims[second] = dims[second], dims[first]
    return _Permuted(shape, tensor.node, tuple(dims))


def _permute(args: Any, kwargs: Any, shape: tuple[int, ...], index: int | None) -> Node:
    tensor, dims = args
    return _Permuted(shape, tensor.node, tuple(dim % tensor.dim() for dim in dims))


def _reshape(args: Any, kwargs: Any, shape: tuple[int, ...], index: int | None) -> Node:
    return _Reshaped(shape, args[0].node)


def _same(args: Any, kwargs: Any, shape: tuple[int, ...], index: int | None) -> Node:
    node: Node = args[0].node
    return node


def _to(args: Any, kwargs: Any, shape: tuple[int, ...], index: int | None) -> Node:
    dtype = kwargs.get("dtype")
    return args[0].node if dtype is None else _Cast(shape, args[0].node, dtype)


_MAKERS: Mapping[Any, Callable[[Any, Any, tuple[int, ...], int | None], Node | None]] = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.permute.default: _permute,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.default: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _to,
}


def _dim(args: Any, kwargs: Any, dims: int) -> int:
    dim: int = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return dim % dims


def _with(box: Box, dim: int, span: tuple[int, int]) -> Box:
    return (*box[:dim], span, *box[dim + 1 :])


def _whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def _boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Cut consecutive numbers of a tensor into boxes, in their order."""
    if not shape:
        return [()]
    inner = math.prod(shape[1:])
    if begin % inner == 0 and end % inner == 0:
        return [((begin // inner, end // inner), *_whole(shape[1:]))]
    first, last = begin // inner, (end - 1) // inner
    if first == last:
        return [((first, first + 1), *box) for box in _boxes(shape[1:], begin - first * inner, end - first * inner)]
    head, tail = -(-begin // inner) * inner, end // inner * inner
    spans = ((begin, head), (head, tail), (tail, end))
    return [box for a, b in spans if a < b for box in _boxes(shape, a, b)]


def _nodes(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, Mapping):
        yield from _nodes(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _nodes(one)


def _identity(value: Any) -> Any:
    return value.identity() if isinstance(value, Node) else value
