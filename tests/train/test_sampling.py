"""Sample images over several ranks."""

from __future__ import annotations

import io
from pathlib import Path
from unittest import mock

import pytest
from PIL import Image
from torch import nn

from tests.distributed import run_ranks
from tests.runs import alone, make_pictures, make_run, run_config
from trainer.data.images.image_io import png
from trainer.data.source import Generate
from trainer.distributed.world import World
from trainer.rng import SampleRng
from trainer.run.samples import Sample
from trainer.train.loop import Trainer
from trainer.train.sampling import generate_all


def draw_colours(world: World, count: int) -> tuple[list[tuple[int, ...]], int]:
    """Colours of the pictures this rank gets, and how often it drew. Every drawing waits for all ranks."""
    drawn: list[int] = []

    def draw(index: int) -> bytes:
        drawn.append(index)
        world.barrier()
        return png(Image.new("RGB", (2, 2), (index, 0, 0)))

    rounds = generate_all(range(count), draw, world)
    pictures = [Image.open(io.BytesIO(file)) for files in rounds for file in files.values()]
    return [picture.getpixel((0, 0)) for picture in pictures], len(drawn)  # type: ignore[misc]


@pytest.mark.parametrize(("count", "draws"), [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_every_rank_draws_equally_often_and_rank_0_has_all_pictures_in_order(count: int, draws: int) -> None:
    first, second = run_ranks(2, draw_colours, count)
    assert first == ([(index, 0, 0) for index in range(count)], draws)
    assert second == ([], draws)


def test_a_sample_is_on_disk_before_the_next_is_begun(tmp_path: Path) -> None:
    cfg = run_config(
        make_pictures(tmp_path / "pictures"),
        sample__prompts=("a", "b", "c"),
        sample__every=1,
        sample__steps=1,
        sample__size=(32, 32),
    )
    run, there = make_run(tmp_path, cfg, "run"), []
    trainer = Trainer(cfg, run, alone(), tmp_path / "cache", lambda event: None)
    prepare = trainer.sampler.prepare

    def prepared() -> Generate:
        generate = prepare()

        def counted(model: nn.ModuleDict, index: int, rng: SampleRng) -> Sample:
            there.append(len(list(run.samples.glob("*.png"))))
            return generate(model, index, rng)

        return counted

    with mock.patch.object(trainer.sampler, "prepare", prepared):
        paths = trainer.generate_samples()
    trainer.close()
    assert there == [0, 1, 2]
    assert [path.name for path in paths] == [f"step-000000-{index}.png" for index in range(3)]
