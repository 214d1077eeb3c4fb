"""Maps the tensors of a model to their names in its original single file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from trainer.weights.files import Fused

SCALES = ("query_norm", "key_norm")
"""Norms whose weight is called `scale` in the original files."""


def numbered(original: str, ours: str, model: nn.Module, modules: Mapping[str, tuple[str, ...]]) -> Iterator[Fused]:
    """Map the modules of a list of equal blocks: `original.0` to `ours.0` of `model`, and so on."""
    blocks = model.get_submodule(ours)
    assert isinstance(blocks, nn.ModuleList)
    for number in range(len(blocks)):
        for name, parts in modules.items():
            yield Fused(f"{original}.{number}.{name}", tuple(f"{ours}.{number}.{part}" for part in parts))


def tensors_of(model: nn.Module, modules: Iterable[Fused]) -> tuple[Fused, ...]:
    """Map the tensors of `modules`, which may include buffers; modules that the model does not have are left out."""
    names = model.state_dict().keys()
    return tuple(tensor for module in modules for tensor in _tensors(module, names))


def _tensors(module: Fused, names: Iterable[str]) -> Iterator[Fused]:
    if module.parts[0] in names:
        yield module
    for suffix in ("weight", "bias"):
        parts = tuple(f"{part}.{suffix}" for part in module.parts)
        if parts[0] in names:
            theirs = "scale" if module.name.endswith(SCALES) else suffix
            yield Fused(f"{module.name}.{theirs}", parts, module.halves_swapped)
