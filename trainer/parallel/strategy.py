"""The sharding strategies, and which one `auto` takes. No torch.

The bytes that each keeps on a rank and sends in a step are computed in `plan/simulate/zero.py`.
"""

from __future__ import annotations

from typing import Literal

from trainer.config.sections import ParallelConfig

Strategy = Literal["full", "grad_op", "hybrid", "ddp", "none"]

# Share of memory that `auto` may fill with weights, gradients and optimizer state: the rest is for activations.
RESIDENT_SHARE = 0.6
# Bytes per trained parameter: fp32 master, its gradient and two moments of AdamW.
TRAINED_BYTES = 16
REDUCED_BYTES = 4
"""Per gradient, in fp32 whatever computes."""
FEW_GRADIENT_BYTES = 2**30
"""Most bytes of gradients that are reduced together at the end of a backward: over PCIe they take 0.1 s."""

GATHERED_BYTES = 2**30
"""Most bytes of weights that stay gathered while samples are generated. It is a small part of any GPU."""


def has_few_parameters(trained: int) -> bool:
    """Whether so many trained numbers are reduced at once, where each rank has the unsharded model."""
    return trained * REDUCED_BYTES <= FEW_GRADIENT_BYTES


def ring_share(ranks: int) -> float:
    """Share of a tensor that each rank sends in a ring all-gather or reduce-scatter over `ranks`."""
    return (ranks - 1) / ranks


def choose_strategy(cfg: ParallelConfig, ranks: int, local_ranks: int, state_bytes: float, memory: float) -> Strategy:
    """Decide `parallel.strategy` where it is `auto`.

    On one node `auto` keeps a copy on every rank where that fits (no gathers: fastest), and shards over all ranks
    otherwise.

    On several nodes it shards inside each node where a copy fits there, even if it would fit on every rank: the network
    between nodes is many times slower than the links inside. With a copy per rank, every rank sends all gradients over
    it; with a copy per node, each rank sends only those of its own shard, once per step, and no weights. Sharded over
    all nodes, the weights cross it in forward and in backward too.

    Args:
        ranks: Of the run.
        local_ranks: Of each node.
        state_bytes: Weights, gradients and optimizer state of the whole model.
        memory: Bytes that the smallest rank may fill; must be equal on every rank, or their decisions may differ.

    See DECISIONS 22.
    """
    if cfg.strategy != "auto":
        return cfg.strategy
    if ranks == 1:
        # FSDP shards nothing on a single rank, but it is what keeps parameters in host memory.
        return "full" if cfg.cpu_offload else "none"
    room = RESIDENT_SHARE * memory
    if cfg.nodes > 1 and local_ranks > 1 and state_bytes / local_ranks <= room:
        return "hybrid"
    if state_bytes <= room and not cfg.cpu_offload:
        return "ddp"
    return "full"


def shard_ranks(cfg: ParallelConfig, strategy: Strategy, ranks: int) -> int:
    """Number of ranks that share one copy of the model. ranks: all ranks of the run."""
    if strategy in ("ddp", "none"):
        return 1
    return cfg.shard_size or cfg.devices if strategy == "hybrid" else ranks


def reshard_after_forward(parallel: ParallelConfig, strategy: Strategy) -> bool | int:
    """The argument of `fully_shard`: the config's value, else that of the strategy.

    It is True under ddp too: torch computes on copies of the trained weights in the compute type. Kept until backward,
    those of a model that is trained in full would take as much memory as the model again; made twice, each costs one
    pass over its bytes.
    """
    if parallel.reshard_after_forward is not None:
        return parallel.reshard_after_forward
    return strategy in ("full", "hybrid", "ddp")


def stays_gathered(parallel: ParallelConfig, ranks: int, reshard: bool | int, weight_bytes: float) -> bool:
    """Whether a model's blocks stay gathered while samples are generated.

    Each sample calls the model dozens of times, and each call would gather every block again.

    Args:
        parallel: The run's section `parallel`.
        ranks: Ranks that share a copy of the model, `shard_ranks`.
        reshard: As `reshard_after_forward` returns it.
        weight_bytes: Of all weights, as they are stored.

    See DECISIONS 227.
    """
    is_offloaded = parallel.cpu_offload or bool(parallel.offload_blocks)
    return ranks > 1 and reshard is True and not is_offloaded and weight_bytes <= GATHERED_BYTES
