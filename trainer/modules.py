"""A run's model and its encoders: built on meta, adapters injected, sharded, then loaded slice by slice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from trainer import adapters
from trainer.adapters import Injected
from trainer.adapters.files import read_adapter
from trainer.adapters.state import parameters_of
from trainer.config import InputError, NoAdapter, RunConfig
from trainer.families.base import LoadModule, ModelFamily
from trainer.parallel.load import fill_rows, load_weights
from trainer.parallel.memory import full_bytes
from trainer.parallel.mesh import Strategy, device_mesh, resolve_strategy
from trainer.parallel.shard import COMPUTE_DTYPE, blocks_of, offload_policy, parallelize, shard_units
from trainer.trained import BaseWeights, layer_shapes, naming
from trainer.weights import WeightFiles
from trainer.world import World

# fp32 master, its gradient and two moments of AdamW.
TRAINED_BYTES = 16


@dataclass(frozen=True)
class LoadedModel:
    """The sharded model with its weights. trainables: parameters that are trained, by name, in model order.

    module: the live components by name.  shards_gradients: whether no rank may hold the whole gradient, because it is
    as large as the sharded model.  notes: what a user should know of the adapter's choices per layer.
    """

    module: nn.ModuleDict
    strategy: Strategy
    mesh: DeviceMesh | None
    trainables: dict[str, nn.Parameter]
    bytes_read: int
    shards_gradients: bool
    notes: tuple[str, ...]


def load_model(cfg: RunConfig, family: ModelFamily, world: World) -> LoadedModel:
    """Build -> inject -> checkpointing -> compile -> shard -> load -> initialise adapters. Collective.

    Each live component is sharded by itself, with a root of its own.
    """
    model = nn.ModuleDict({name: family.build(name) for name in family.live})
    injected = _make_trainable(model, cfg, family)
    strategy = resolve_strategy(cfg.parallel, world, _state_bytes(model), min(world.gather(world.memory)))
    mesh = device_mesh(cfg.parallel, world, strategy)
    for name, module in model.items():
        methods = family.forward_methods if name == family.components[0] else ()
        parallelize(module, cfg.train, cfg.parallel, strategy, mesh, family.shard_blocks, methods)
    _materialize(model, cfg, world)
    bytes_read = sum(_load(model, name, family.weights(name), injected.parameters) for name in model)
    parameters = dict(model.named_parameters())
    notes = injected.notes + _start_adapter(parameters, injected, cfg, family)
    model.train()
    trainables = {name: p for name, p in parameters.items() if p.requires_grad}
    shards_gradients = "full" in map(cfg.mode, model) and strategy in ("full", "grad_op", "hybrid")
    return LoadedModel(model, strategy, mesh, trainables, bytes_read, shards_gradients, notes)


def encoder_loader(cfg: RunConfig, world: World) -> LoadModule:
    """How families load their encoders: frozen, in the run's compute type; sharded over all ranks if they have blocks.

    A module without block names is replicated and fp32: it is small, and an autoencoder's bf16 shows in pictures.
    """

    def load(module: nn.Module, files: WeightFiles, blocks: Sequence[str]) -> nn.Module:
        module.requires_grad_(False).eval()
        if blocks:
            module.to(COMPUTE_DTYPE[cfg.train.precision])
        if blocks and (world.size > 1 or cfg.parallel.cpu_offload):
            mesh = device_mesh(cfg.parallel, world, "full")
            assert mesh is not None
            offload = offload_policy(cfg.parallel)
            shard_units(module, blocks_of(module, blocks), mesh, True, torch.float32, offload)
            _materialize(module, cfg, world)
        else:
            module.to_empty(device=world.device)
        load_weights(module, files)
        return module

    return load


def reshard(module: nn.Module) -> None:
    """Free what is gathered: weights were changed outside of forward and backward."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def sync_gradients(loaded: LoadedModel, last: bool) -> None:
    """Prepare the next backward of a step: gradients are reduced over the ranks in the last one, and added up before.

    Where no rank may hold the whole gradient it is reduced to shards in each backward, and only these are added up.
    """
    for component in loaded.module.values():
        if isinstance(component, FSDPModule):
            component.set_requires_gradient_sync(last or loaded.shards_gradients)
            component.set_requires_all_reduce(last)
            # A frozen unit has nothing to add up, and one that no input reached (blocks for reference images) torch
            # cannot ask for it.
            for unit in component.modules():
                if isinstance(unit, FSDPModule) and not any(p.requires_grad for p in unit.parameters()):
                    unit.set_requires_gradient_sync(True, recurse=False)


def _materialize(module: nn.Module, cfg: RunConfig, world: World) -> None:
    """Uninitialized storage for the meta module: parameters on the host where they are offloaded, never buffers."""
    module.to_empty(device=torch.device("cpu") if cfg.parallel.cpu_offload else world.device)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(world.device))


def _make_trainable(model: nn.ModuleDict, cfg: RunConfig, family: ModelFamily) -> Injected:
    """Unfreeze or freeze each component and inject the adapter."""
    for name, module in model.items():
        module.requires_grad_(cfg.mode(name) == "full")
        if cfg.mode(name) != "full":
            # nn.Module's own `to`: diffusers' warns of an empty list of modules to keep in fp32.
            nn.Module.to(module, COMPUTE_DTYPE[cfg.train.precision])
    _freeze(model, family.never_trained)
    if isinstance(cfg.adapter, NoAdapter):
        return Injected((), {}, ())
    changed = nn.ModuleDict({name: module for name, module in model.items() if cfg.mode(name) == "adapter"})
    targets = adapters.Targets(family.adapter_targets, family.conv_targets, family.halves_swapped, family.never_trained)
    return adapters.inject(changed, cfg.adapter, targets, cfg.model.family)


def _freeze(model: nn.ModuleDict, patterns: Sequence[str]) -> None:
    for module in model.values():
        for name, parameter in module.named_parameters():
            if any(re.fullmatch(pattern, name) for pattern in patterns):
                parameter.requires_grad_(False)


def _load(model: nn.ModuleDict, component: str, files: WeightFiles, added: Iterable[str]) -> int:
    prefix = f"{component}."
    skipped = {name.removeprefix(prefix) for name in added if name.startswith(prefix)}
    return load_weights(model[component], files, skipped)


def _start_adapter(
    parameters: Mapping[str, nn.Parameter], injected: Injected, cfg: RunConfig, family: ModelFamily
) -> tuple[str, ...]:
    """Give the adapter's parameters their values. Returns what to tell of a file they come from."""
    values, notes = _start_values(injected, cfg, family)
    with torch.no_grad():
        for name in injected.parameters:
            parameter = parameters[name]
            drawn = adapters.initial_value(name, parameter.shape, cfg.train.seed) if name not in values else None
            fill_rows(parameter, values[name] if drawn is None else drawn)
    return notes


def _start_values(injected: Injected, cfg: RunConfig, family: ModelFamily) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """{parameter: value} from the file of `adapter.start`, if there is one."""
    if isinstance(cfg.adapter, NoAdapter) or cfg.adapter.start is None:
        return {}, ()
    base = BaseWeights(family)
    found = read_adapter(Path(cfg.adapter.start), layer_shapes(family), naming(family), base.layer)
    left_out = sorted(found.keys() - set(injected.layers))
    if left_out:
        raise InputError(
            f"adapter.start {cfg.adapter.start}: changes {len(left_out)} layers that this run leaves alone, first "
            f"'{left_out[0]}'; add them to adapter.targets, or to model.train"
        )
    values: dict[str, Tensor] = {}
    for name, layer in found.items():
        values |= parameters_of(name, layer, cfg.adapter, injected.parameters, base.layer)
    new = len(injected.layers) - len(found)
    rest = f"; the other {new} start unchanged" if new else ""
    return values, (f"{len(found)} layers of the adapter go on from {cfg.adapter.start}{rest}",)


def _state_bytes(module: nn.Module) -> int:
    frozen = full_bytes(p for p in module.parameters() if not p.requires_grad)
    return frozen + TRAINED_BYTES * sum(p.numel() for p in module.parameters() if p.requires_grad)
