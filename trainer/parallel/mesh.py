"""Which ranks share a copy of the model."""

from __future__ import annotations

from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import ParallelConfig
from trainer.world import World

Strategy = Literal["full", "grad_op", "hybrid", "ddp", "none"]

REPLICATE, SHARD = "replicate", "shard"
# What `auto` may fill with weights, gradients and optimizer state: the rest is for activations.
RESIDENT_SHARE = 0.6


def resolve_strategy(cfg: ParallelConfig, world: World, state_bytes: int, memory: int) -> Strategy:
    """`parallel.strategy` with `auto` decided.

    state_bytes: weights, gradients and optimizer state of the whole model.  memory: bytes that the smallest rank may
    fill; the same number on every rank, or each would decide for itself. On one node `auto` keeps a copy on every rank
    where that fits (no gathers: fastest), and shards over all ranks otherwise.

    On several nodes it shards inside each node where a copy fits there, even if it would fit on every rank: what is
    sent between nodes decides, over a network that is many times slower than the links inside. With a copy per rank
    all gradients cross it from every rank; with one per node each rank sends only those of its own shard, once per
    step, and the weights never. Sharded over all nodes, the weights cross it in forward and in backward too.
    """
    if cfg.strategy != "auto":
        return cfg.strategy
    if world.size == 1:
        return "full" if cfg.cpu_offload else "none"
    room = RESIDENT_SHARE * memory
    if cfg.nodes > 1 and world.local_size > 1 and state_bytes / world.local_size <= room:
        return "hybrid"
    if state_bytes <= room and not cfg.cpu_offload:
        return "ddp"
    return "full"


def device_mesh(cfg: ParallelConfig, world: World, strategy: Strategy) -> DeviceMesh | None:
    """None for `none`; (shard,) for full and grad_op; (replicate, shard) for hybrid and ddp.

    `ddp` is a mesh of world x 1: every rank is a shard group of its own, gradients are all-reduced.
    """
    if strategy == "none":
        return None
    device = world.device.type
    if strategy in ("full", "grad_op"):
        return init_device_mesh(device, (world.size,), mesh_dim_names=(SHARD,))
    shard = 1 if strategy == "ddp" else cfg.shard_size or cfg.devices
    return init_device_mesh(device, (world.size // shard, shard), mesh_dim_names=(REPLICATE, SHARD))
