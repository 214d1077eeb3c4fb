"""Modules that are trained whole in addition to an adapter (`adapter.modules_to_save`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from trainer.adapters import match_names
from trainer.adapters.formats.writer import SavedModule
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.models.base import ModelFamily
from trainer.models.state_dict import BaseWeights


@dataclass(frozen=True)
class TrainedModule:
    """A module that is trained whole.

    Attributes:
        tensors: {name in the module: name of the tensor in the model}. A tensor of several modules has one name.
        is_tied: Whether an earlier module has all of its tensors.
    """

    tensors: Mapping[str, str]
    is_tied: bool


def saved_names(model: nn.ModuleDict, cfg: RunConfig, family: ModelFamily) -> list[str]:
    """Return the names of the modules that are trained whole, in model order.

    Args:
        model: {component: module}, without the adapter.
        cfg: The run's config.
        family: The run's family.

    Raises:
        InputError: A pattern matches no module with parameters.
    """
    if isinstance(cfg.adapter, NoAdapter) or not cfg.adapter.modules_to_save:
        return []
    modules = [
        name
        for name, module in model.named_modules()
        if "." in name and family.mode(cfg, name) == "adapter" and next(module.parameters(), None) is not None
    ]
    return match_names(modules, cfg.adapter.modules_to_save, "adapter.modules_to_save", cfg.model.family)


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Whether a module or parameter is one of the modules or inside of one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def saved_modules(cfg: RunConfig, family: ModelFamily) -> dict[str, TrainedModule]:
    """Return {module: its tensors} of the modules that are trained whole, and of those that share their weights."""
    if isinstance(cfg.adapter, NoAdapter) or not cfg.adapter.modules_to_save:
        return {}
    model = nn.ModuleDict({component: family.build(component) for component in family.live})
    names = saved_names(model, cfg, family)
    outermost = [name for name in names if not any(is_inside(name, [other]) for other in names if other != name)]
    owners: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        owners.setdefault(id(tensor), name)
    trained = {id(parameter) for name in outermost for parameter in model.get_submodule(name).parameters()}
    found: dict[str, TrainedModule] = {}
    for name, module in model.named_modules():
        shares = any(id(parameter) in trained for parameter in module.parameters(recurse=False))
        if name not in outermost and (is_inside(name, outermost) or not shares):
            continue
        tensors = {inside: owners[id(tensor)] for inside, tensor in module.state_dict(keep_vars=True).items()}
        earlier = {owner for other in found.values() for owner in other.tensors.values()}
        found[name] = TrainedModule(tensors, is_tied=earlier >= set(tensors.values()))
    return found


def saved_tensors(
    modules: Mapping[str, TrainedModule], weights: Mapping[str, Tensor], base: BaseWeights
) -> dict[str, SavedModule]:
    """Return {module: its tensors}: trained parameters, and buffers of the base."""

    def tensor(name: str) -> Tensor:
        return weights[name] if name in weights else base.tensor(*name.split(".", 1))

    return {
        name: SavedModule({inside: tensor(owner) for inside, owner in module.tensors.items()}, module.is_tied)
        for name, module in modules.items()
    }
