"""Sample images over several ranks."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from tests.distributed import run_ranks
from trainer.data.images.image_io import png
from trainer.distributed.world import World
from trainer.train.sampling import generate_all


def draw_colours(world: World, count: int) -> tuple[list[tuple[int, ...]], int]:
    """Colours of the pictures this rank gets, and how often it drew. Every drawing waits for all ranks."""
    drawn: list[int] = []

    def draw(index: int) -> bytes:
        drawn.append(index)
        world.barrier()
        return png(Image.new("RGB", (2, 2), (index, 0, 0)))

    pictures = [Image.open(io.BytesIO(file)) for file in generate_all(range(count), draw, world).values()]
    return [picture.getpixel((0, 0)) for picture in pictures], len(drawn)  # type: ignore[misc]


@pytest.mark.parametrize(("count", "draws"), [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_every_rank_draws_equally_often_and_rank_0_has_all_pictures_in_order(count: int, draws: int) -> None:
    first, second = run_ranks(2, draw_colours, count)
    assert first == ([(index, 0, 0) for index in range(count)], draws)
    assert second == ([], draws)
