"""The common part of diag-oft and boft: rotations of a layer's outputs, as in LyCORIS, on peft's tuner layers.

peft's own OFT and BOFT rotate the inputs, which no image generator can load. The rotation applies to W x without the
bias, since only W can be exported. Parameters are LyCORIS' `oft_blocks`; zero means no rotation. See DECISIONS 53.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from trainer.adapters.base import Kind, Reader, Shape, Shapes, Tensors
from trainer.adapters.engine import ADAPTER, BaseTunerLayer
from trainer.adapters.replace import Layer, Make
from trainer.adapters.targets import counted
from trainer.config.sections import AdapterSection, BlockAdapter
from trainer.system.errors import InputError

COLUMNS = 512
"""Columns of a weight that are rotated at a time: each stage makes copies, and small ones stay in the cache."""


def cayley_excess(blocks: Tensor) -> Tensor:
    """Return R - I for the rotations R = (I + Q) (I - Q)^-1 with Q = blocks - blocks^T, (..., b, b), in fp32.

    R - I = 2 Q (I - Q)^-1 is exact for small Q, where R itself loses digits: rounded to bf16, R is not orthogonal.
    """
    skew = (blocks - blocks.mT).float()
    identity = torch.eye(blocks.shape[-1], device=blocks.device)
    # The two factors commute, so the inverse may come first.
    excess: Tensor = torch.linalg.solve(identity - skew, 2 * skew)
    return excess


class Rotated(nn.Module, BaseTunerLayer):  # type: ignore[misc]
    """A layer with rotated outputs. shape: of `oft_blocks`."""

    base_layer: Layer
    oft_blocks: nn.ParameterDict
    adapter_layer_names = ("oft_blocks",)

    def __init__(self, layer: Layer, shape: Sequence[int]) -> None:
        super().__init__()
        self.base_layer = layer
        self.oft_blocks = nn.ParameterDict({ADAPTER: nn.Parameter(torch.empty(*shape))})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        if self.disable_adapters:
            return result
        bias = self.base_layer.bias
        if bias is None:
            return self._turned(result)
        if isinstance(self.base_layer, nn.Conv2d):
            bias = bias[:, None, None]
        plain = result - bias
        return result + (self._turned(plain) - plain)

    def _turned(self, outputs: Tensor) -> Tensor:
        dim = -1 if isinstance(self.base_layer, nn.Linear) else 1
        features_first = outputs.movedim(dim, 0)
        rows = features_first.reshape(features_first.shape[0], -1)
        turned = self.turn_rows(rows, cayley_excess(self.oft_blocks[ADAPTER]))
        return turned.view(features_first.shape).movedim(0, dim).contiguous()

    def turn_rows(self, rows: Tensor, excess: Tensor) -> Tensor:
        """Rotate the outputs.

        Args:
            rows: (out, items).
            excess: From `cayley_excess`.
        """
        raise NotImplementedError


def turn_groups(rows: Tensor, excess: Tensor) -> Tensor:
    """Return rows + excess @ rows, group by group.

    Args:
        rows: (groups, k, items).
        excess: (groups, k, k).
    """
    return torch.baddbmm(rows, excess.to(rows.dtype), rows)


def rotation(blocks: Tensor) -> Tensor:
    """Return orthogonal matrices (..., b, b), the Cayley transform of the skew parts of `blocks`.

    R = (I + Q) (I - Q)^-1 with Q = blocks - blocks^T, as in LyCORIS. In fp32: the solver supports no 16-bit type.
    """
    skew = (blocks - blocks.mT).float()
    identity = torch.eye(blocks.shape[-1], device=blocks.device)
    # The two factors commute, so the inverse may come first.
    turns: Tensor = torch.linalg.solve(identity - skew, identity + skew)
    return turns


class Rotation(Kind):
    """A kind that rotates blocks of b outputs. Tensors: blocks (..., n, b, b), n * b = out."""

    parameters: ClassVar = {"blocks": f"oft_blocks.{ADAPTER}"}
    zero = frozenset({"blocks"})
    adds = False
    whole_rows = True
    lycoris: ClassVar = {"blocks": "oft_blocks"}

    def maker(
        self, cfg: AdapterSection, layers: Mapping[str, Layer], ranks: Mapping[str, int]
    ) -> tuple[Make, tuple[str, ...]]:
        assert isinstance(cfg, BlockAdapter)
        shapes = self.shapes(layers, cfg)
        return lambda name, layer: self.layer(layer, shapes[name]), block_notes(shapes, cfg.block_size)

    @abstractmethod
    def layer(self, layer: Layer, shape: Shape) -> BaseTunerLayer:
        """Make a layer. shape: of its blocks."""

    @abstractmethod
    def shapes(self, layers: Mapping[str, Layer], cfg: BlockAdapter) -> dict[str, tuple[int, ...]]:
        """Return the shape of each layer's blocks.

        Raises:
            InputError: The requested blocks do not fit a layer.
        """

    @abstractmethod
    def turned(self, rows: Tensor, turns: Tensor) -> Tensor:
        """Rotate rows (out, ...) by orthogonal matrices (..., n, b, b)."""

    def merge(self, weight: Tensor, tensors: Tensors, scale: float) -> None:
        turns = rotation(tensors["blocks"].detach().float())
        for columns in torch.split(weight, COLUMNS, dim=1):
            columns.copy_(self.turned(columns, turns))

    def weight_size(self, shapes: Shapes) -> tuple[int]:
        return (shapes["blocks"][-3] * shapes["blocks"][-1],)


def block_notes(shapes: Mapping[str, tuple[int, ...]], requested: int) -> tuple[str, ...]:
    """Return notes for the log about layers with larger blocks than requested."""
    other: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, shape in shapes.items():
        size = shape[-1]
        if size != requested:
            other[size, shape[-3] * size].append(name)
    return tuple(
        f"adapter.block_size: {size} instead of {requested} in {counted(names)} with {outputs} outputs, as '{names[0]}'"
        for (size, outputs), names in sorted(other.items())
    )


def block_size(name: str, outputs: int, sizes: Sequence[int], requested: int) -> int:
    """Return the smallest of the sizes that is at least the requested one."""
    fitting = [size for size in sizes if size >= requested]
    if fitting:
        return fitting[0]
    if not sizes:
        raise InputError(
            f"adapter.block_size: '{name}' has {outputs} outputs, which no block size divides; "
            "leave it out in adapter.targets"
        )
    raise InputError(
        f"adapter.block_size: {requested} is too large for '{name}' with {outputs} outputs; "
        f"the nearest that work are {', '.join(str(size) for size in sizes[-3:])}"
    )


class RotationReader(Reader):
    styles = ({"oft_blocks": "blocks"},)
    complete = (("blocks",),)
    is_scaled = False

    def has_form(self, tensor: str, shape: Shape) -> bool:
        return len(shape) == 3 and shape[-1] == shape[-2]

    def size(self, tensors: Tensors) -> tuple[int, None]:
        blocks = tensors["blocks"]
        return blocks.shape[-3] * blocks.shape[-1], None

    def bounded(self, tensors: Tensors, alpha: float) -> dict[str, Tensor]:
        """Bound the norm of the skew matrices by alpha times the number of outputs, as LyCORIS does."""
        blocks = tensors["blocks"]
        skew = (blocks - blocks.mT).float()
        limit = alpha * blocks.shape[-3] * blocks.shape[-1]
        norm = float(skew.norm())
        return {"blocks": skew * (limit / norm / 2) if 0 < limit < norm else blocks}
