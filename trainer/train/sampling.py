"""Samples as a collective: prompts are spread over the ranks, and idle ranks draw along."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.distributed.world import World


def draw_all(numbers: Sequence[int], draw: Callable[[int], bytes], world: World) -> dict[int, bytes]:
    """The files of some samples, by number, on rank 0; nothing elsewhere.

    draw(i): makes sample i; it may call a sharded model, so every rank calls it equally often: a rank without a
    sample of its own draws one again and drops it. An error ends this rank at once, and torchrun the others: were it
    agreed first, ranks inside the model would wait for this one in vain.
    """
    samples: dict[int, bytes] = {}
    for first in range(0, len(numbers), world.size):
        place = first + world.rank
        number = numbers[place % len(numbers)]
        drawn = draw(number)
        mine = {number: drawn} if place < len(numbers) else {}
        for others in world.gather(mine):
            samples |= others
    return samples if world.rank == 0 else {}
