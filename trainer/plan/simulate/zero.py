"""Bytes that a rank holds and sends under each sharding strategy: the arithmetic of ZeRO, for FSDP2.

Source of the stages: ZeRO (arXiv 1910.02054), sections 5 and 7. `ddp` keeps everything on every rank, `grad_op` is its
P_os+g, `full` its P_os+g+p, `hybrid` is `full` inside groups of ranks that are copies of each other (MiCS, arXiv
2205.00119). Unlike ZeRO's, the shards of `grad_op` hold the weights too: they are unsharded only during a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.parallel.strategy import ring_share


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of one unsharded copy of a model.

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
        weights, optimizer_state: Allocated from step to step.
        gradients: Allocated at the end of backward.
        gathered: Most weights that are unsharded at once in forward, in addition to the allocated ones.
        sent: To other ranks in a step, by ring algorithms.
    """

    weights: float
    gradients: float
    optimizer_state: float
    gathered: float
    sent: float

    @property
    def allocated(self) -> float:
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
    unsharded = model.root + model.block if frees_blocks else model.computed
    # Blocks freed after forward are gathered again in backward; the root is not freed.
    gathers = model.computed + (model.computed - model.root if frees_blocks else 0)
    inside = ring_share(shards) * (passes * gathers + reductions * model.gradients)
    between = 2 * ring_share(ranks // shards) * model.gradients / shards
    return RankBytes(
        weights=model.weights / shards,
        gradients=model.gradients / shards,
        optimizer_state=model.optimizer_state / shards,
        gathered=0.0 if strategy == "none" else unsharded,
        sent=inside + between,
    )
