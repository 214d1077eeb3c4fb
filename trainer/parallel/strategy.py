"""Bytes that each sharding strategy keeps on a rank and sends in a step: the arithmetic of ZeRO, for FSDP2.

Source of the stages: ZeRO (arXiv 1910.02054), sections 5 and 7. `ddp` keeps everything on every rank, `grad_op` is its
P_os+g, `full` its P_os+g+p, `hybrid` is `full` inside groups of ranks that are copies of each other (MiCS, arXiv
2205.00119). Unlike ZeRO's, the shards of `grad_op` hold the weights too: they are whole only during a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.sections import ParallelConfig

Strategy = Literal["full", "grad_op", "hybrid", "ddp", "none"]

# Share of memory that `auto` may fill with weights, gradients and optimizer state: the rest is for activations.
RESIDENT_SHARE = 0.6
# Bytes per trained parameter: fp32 master, its gradient and two moments of AdamW.
TRAINED_BYTES = 16
REDUCED_BYTES = 4
"""Per gradient, in fp32 whatever computes."""
LITTLE = 2**30
"""Most bytes of gradients that are reduced together at the end of a backward: over PCIe they take 0.1 s."""


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of one whole copy of a model.

    Attributes:
        weights: In the types they are stored in.
        gradients, optimizer_state: For the trained parameters.
        computed: The weights that are gathered, in the compute type: all of them, or the trained ones where every rank
            has a copy.
        root: The part of `computed` that is in no block's own group.
        block: The part of `computed` in the largest group of a block.
    """

    weights: int
    gradients: int
    optimizer_state: int
    computed: int
    root: int
    block: int

    @classmethod
    def of_parameters(cls, number: int) -> ModelBytes:
        """A model trained in full by Adam in mixed precision, without regard to blocks.

        2 bytes of weights, 2 of gradients, 12 of optimizer state (fp32 weights and two moments) per parameter, as in
        ZeRO, section 3.1.
        """
        return cls(2 * number, 2 * number, 12 * number, 2 * number, 0, 0)


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank.

    Attributes:
        weights, optimizer_state: Held from step to step.
        gradients: Held at the end of backward.
        gathered: Most weights that are whole at once in forward, in addition to the held ones.
        sent: To other ranks in a step, by ring algorithms.
    """

    weights: float
    gradients: float
    optimizer_state: float
    gathered: float
    sent: float

    @property
    def held(self) -> float:
        """Weights, gradients and optimizer state, which ZeRO shards."""
        return self.weights + self.gradients + self.optimizer_state


def expected(
    model: ModelBytes, strategy: str, ranks: int, shard_size: int, passes: int = 1, reductions: int = 1
) -> RankBytes:
    """Compute the bytes of one rank under a strategy.

    Args:
        shard_size: Ranks in a group of `hybrid`.
        passes: Forward and backward passes of a step.
        reductions: Number of passes that reduce gradients to their shards.
    """
    shards = {"ddp": 1, "none": 1, "grad_op": ranks, "full": ranks, "hybrid": shard_size}[strategy]
    frees_blocks = strategy != "grad_op"
    # FSDP2 also computes on copies of trained weights where a group is a single rank, as in ddp.
    whole = model.root + model.block if frees_blocks else model.computed
    # Blocks freed after forward are gathered again in backward; the root is not freed.
    gathers = model.computed + (model.computed - model.root if frees_blocks else 0)
    inside = ring_share(shards) * (passes * gathers + reductions * model.gradients)
    between = 2 * ring_share(ranks // shards) * model.gradients / shards
    return RankBytes(
        weights=model.weights / shards,
        gradients=model.gradients / shards,
        optimizer_state=model.optimizer_state / shards,
        gathered=0.0 if strategy == "none" else whole,
        sent=inside + between,
    )


def is_little(trained: int) -> bool:
    """Whether so many trained numbers are reduced at once, where each rank has the whole model."""
    return trained * REDUCED_BYTES <= LITTLE


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
    """
    if cfg.strategy != "auto":
        return cfg.strategy
    if ranks == 1:
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
