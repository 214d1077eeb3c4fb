"""Sample images as a collective: prompts are spread over the ranks, and idle ranks draw along."""

from __future__ import annotations

import io
from collections.abc import Callable

from PIL import Image

from trainer.world import World


def draw_all(count: int, draw: Callable[[int], Image.Image], world: World) -> list[bytes]:
    """PNG bytes of pictures 0..count-1, on rank 0; an empty list elsewhere.

    draw(i): makes picture i; it may call a sharded model, so every rank calls it equally often: a rank without a
    picture of its own draws one again and drops it. An error ends this rank at once, and torchrun the others: were it
    agreed first, ranks inside the model would wait for this one in vain.
    """
    pictures: dict[int, bytes] = {}
    for first in range(0, count, world.size):
        index = first + world.rank
        image = draw(index % count)
        mine = {index: _png(image)} if index < count else {}
        for drawn in world.gather(mine):
            pictures |= drawn
    return [pictures[i] for i in range(count)] if world.rank == 0 else []


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
