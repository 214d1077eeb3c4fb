"""The tensors of a model as its original single file names them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from trainer.weights.files import Fused

SCALES = ("query_norm", "key_norm")
"""Norms of the original files whose weight is called `scale`."""


def numbered(original: str, ours: str, model: nn.Module, modules: Mapping[str, tuple[str, ...]]) -> Iterator[Fused]:
    """The modules of a list of equal blocks: `original.0` is `model`'s `ours.0`, and so on."""
    blocks = model.get_submodule(ours)
    assert isinstance(blocks, nn.ModuleList)
    for number in range(len(blocks)):
        for name, parts in modules.items():
            yield Fused(f"{original}.{number}.{name}", tuple(f"{ours}.{number}.{part}" for part in parts))


def tensors_of(model: nn.Module, modules: Iterable[Fused]) -> tuple[Fused, ...]:
    """From names of modules to names of their tensors; modules that the model does not have are left out.

    modules: may hold the name of a buffer.
    """
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
