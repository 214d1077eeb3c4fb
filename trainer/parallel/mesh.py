"""The device mesh: which ranks share a copy of the model. See DECISIONS 12."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config.sections import ParallelConfig
from trainer.distributed.world import World
from trainer.parallel.strategy import Strategy, choose_strategy, shard_ranks

REPLICATE, SHARD = "replicate", "shard"


def resolve_strategy(cfg: ParallelConfig, world: World, state_bytes: int, memory: int) -> Strategy:
    """Decide `parallel.strategy` for these ranks where it is `auto`, as `choose_strategy` does."""
    return choose_strategy(cfg, world.size, world.local_size, state_bytes, memory)


def device_mesh(cfg: ParallelConfig, world: World, strategy: Strategy) -> DeviceMesh | None:
    """Make the mesh: None for `none`; (shard,) for full and grad_op; (replicate, shard) for hybrid and ddp.

    `ddp` is a mesh of world x 1: every rank is a shard group of its own, and gradients are all-reduced.
    """
    if strategy == "none":
        return None
    device = world.device.type
    if strategy in ("full", "grad_op"):
        return init_device_mesh(device, (world.size,), mesh_dim_names=(SHARD,))
    shard = shard_ranks(cfg, strategy, world.size)
    return init_device_mesh(device, (world.size // shard, shard), mesh_dim_names=(REPLICATE, SHARD))
