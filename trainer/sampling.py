"""Samples as a collective: prompts are spread over the ranks, and idle ranks draw along."""

from __future__ import annotations

from collections.abc import Callable

from trainer.world import World


def draw_all(count: int, draw: Callable[[int], bytes], world: World) -> list[bytes]:
    """The files of samples 0..count-1, on rank 0; an empty list elsewhere.

    draw(i): makes sample i; it may call a sharded model, so every rank calls it equally often: a rank without a
    sample of its own draws one again and drops it. An error ends this rank at once, and torchrun the others: were it
    agreed first, ranks inside the model would wait for this one in vain.
    """
    samples: dict[int, bytes] = {}
    for first in range(0, count, world.size):
        index = first + world.rank
        drawn = draw(index % count)
        mine = {index: drawn} if index < count else {}
        for others in world.gather(mine):
            samples |= others
    return [samples[i] for i in range(count)] if world.rank == 0 else []
