"""A run's model and its encoders: built on meta, adapters injected, sharded, then loaded slice by slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from trainer import adapters
from trainer.config import NoAdapter, RunConfig
from trainer.families.base import LoadModule, ModelFamily
from trainer.parallel.load import fill_rows, load_weights
from trainer.parallel.memory import full_bytes
from trainer.parallel.mesh import Strategy, device_mesh, resolve_strategy
from trainer.parallel.shard import COMPUTE_DTYPE, blocks_of, offload_policy, parallelize, shard_units
from trainer.weights import WeightFiles
from trainer.world import World

# fp32 master, its gradient and two moments of AdamW.
TRAINED_BYTES = 16


@dataclass(frozen=True)
class LoadedModel:
    """The sharded model with its weights. trainables: parameters that are trained, by name, in model order.

    shards_gradients: whether no rank may hold the whole gradient, because it is as large as the sharded model.
    """

    module: nn.Module
    strategy: Strategy
    mesh: DeviceMesh | None
    trainables: dict[str, nn.Parameter]
    bytes_read: int
    shards_gradients: bool


def load_model(cfg: RunConfig, family: ModelFamily, world: World) -> LoadedModel:
    """Build -> inject -> checkpointing -> compile -> shard -> load -> initialise adapters. Collective."""
    module = family.build()
    added = _make_trainable(module, cfg, family)
    strategy = resolve_strategy(cfg.parallel, world, _state_bytes(module), min(world.gather(world.memory)))
    mesh = device_mesh(cfg.parallel, world, strategy)
    parallelize(module, cfg.train, cfg.parallel, strategy, mesh, family.shard_blocks, family.forward_methods)
    _materialize(module, cfg, world)
    bytes_read = load_weights(module, family.weights(), skip=added)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name in added:
            fill_rows(parameters[name], adapters.initial_value(name, parameters[name].shape, cfg.train.seed))
    module.train()
    trainables = {name: p for name, p in parameters.items() if p.requires_grad}
    shards_gradients = isinstance(cfg.adapter, NoAdapter) and strategy in ("full", "grad_op", "hybrid")
    return LoadedModel(module, strategy, mesh, trainables, bytes_read, shards_gradients)


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
    if isinstance(loaded.module, FSDPModule):
        loaded.module.set_requires_gradient_sync(last or loaded.shards_gradients)
        loaded.module.set_requires_all_reduce(last)


def _materialize(module: nn.Module, cfg: RunConfig, world: World) -> None:
    """Uninitialized storage for the meta module: parameters on the host where they are offloaded, never buffers."""
    module.to_empty(device=torch.device("cpu") if cfg.parallel.cpu_offload else world.device)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(world.device))


def _make_trainable(module: nn.Module, cfg: RunConfig, family: ModelFamily) -> set[str]:
    """Inject the adapter or unfreeze everything. Returns the names of parameters that no weight file holds."""
    if isinstance(cfg.adapter, NoAdapter):
        module.requires_grad_(True)
        return set()
    before = {name for name, _ in module.named_parameters()}
    # nn.Module's own `to`: diffusers' warns of an empty list of modules to keep in fp32.
    nn.Module.to(module, COMPUTE_DTYPE[cfg.train.precision])
    adapters.inject(module, cfg.adapter, family.adapter_targets, cfg.model.family)
    return {name for name, _ in module.named_parameters() if name.replace(".base_layer.", ".") not in before}


def _state_bytes(module: nn.Module) -> int:
    frozen = full_bytes(p for p in module.parameters() if not p.requires_grad)
    return frozen + TRAINED_BYTES * sum(p.numel() for p in module.parameters() if p.requires_grad)
