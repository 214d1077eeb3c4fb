"""Every image is trained as often as `train.epochs` says: alone in its shape, at each of several resolutions, with
references of many shapes, as a regularization image."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.bench import TOLERANCE, Bench
from tests.distributed import run_ranks
from tests.runs import alone, difference, run_config, steps_of, train
from trainer.run.events import LengthEvent
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

SHAPES = {(64, 64): 10, (80, 48): 4, (48, 80): 3, (128, 32): 2, (32, 128): 1}
"""{size of pictures: their number}"""
REGULARIZATION = {(64, 64): 2, (32, 96): 1}
CASES: dict[str, dict[str, Any]] = {
    "shapes": {"train__batch_size": 8, "train__epochs": 3},
    "resolutions": {"train__batch_size": 16, "train__epochs": 1, "data__resolutions": [32, 64]},
    "references": {"train__batch_size": 8, "train__epochs": 1, "data__references": "references"},
    "regularization": {"train__batch_size": 16, "train__epochs": 1, "data__regularization": "regularization"},
}
SLOW = [case for case in CASES if case != "references"]
RANKS: dict[int, dict[str, Any]] = {
    1: {"parallel__strategy": "none"},
    2: {"parallel__devices": 2, "parallel__strategy": "full"},
    4: {"parallel__devices": 4, "parallel__strategy": "hybrid", "parallel__shard_size": 2},
}


def make_shapes(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    folder.mkdir()
    numbers = torch.Generator().manual_seed(len(sizes))
    for number, (width, height) in enumerate(sizes):
        blocks = (torch.rand(height // 16, width // 16, 3, generator=numbers) * 255).byte()
        Image.fromarray(blocks.numpy()).resize((width, height)).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"picture number {number}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("every-image")
    sizes = [size for size, count in SHAPES.items() for _ in range(count)]
    pictures = make_shapes(root / "pictures", sizes)
    make_shapes(root / "references", [sizes[7 * number % len(sizes)] for number in range(len(sizes))])
    make_shapes(root / "regularization", [size for size, count in REGULARIZATION.items() for _ in range(count)])

    def config(data: Path, **changes: Any) -> Any:
        folders = {
            field: str(root / value) for field, value in changes.items() if value in ("references", "regularization")
        }
        alike = {"data__max_aspect": 4.0, "data__caption_dropout": 0.2, "train__micro_batch": 4}
        return run_config(data, **alike | RANKS[1] | changes | folders)

    return Bench(root, pictures, config, {})


def times_trained(trainer: Trainer) -> Counter[bytes]:
    """{latents of an image in one of its sizes: how often they are trained with weight}"""
    parts = [part for step in range(trainer.num_steps) for part in trainer.loader.micro_batches(step)]
    weighted = (pair for part in parts for pair in zip(part.examples, part.weights, strict=True))
    return Counter(example["latents"].numpy().tobytes() for example, weight in weighted if weight)


@pytest.mark.parametrize("case", ["references", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_a_run_in_epochs_trains_every_image_as_often_as_they_say(bench: Bench, case: str) -> None:
    cfg, run = bench.run(f"counts-{case}", **CASES[case])
    events: list[Any] = []
    trainer = Trainer(cfg, run, alone(), bench.root / "cache", events.append)
    counts = sorted(times_trained(trainer).values())
    trainer.close()
    epochs = int(cfg.train.epochs or 0)
    expected = {
        "shapes": [epochs] * 20,
        "resolutions": [1] * 40,
        "references": [1] * 20,
        "regularization": [1] * 20 + [7] * 3,  # together as often as the others, rounded
    }
    assert counts == expected[case]
    (length,) = [event for event in events if isinstance(event, LengthEvent)]
    assert length.steps == -(-sum(counts) // cfg.train.batch_size)
    assert length.epoch_steps == sum(counts) / epochs / cfg.train.batch_size


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_and_four_ranks_train_what_one_trains_and_a_resume_at_any_step_goes_on_bit_for_bit(
    bench: Bench, case: str
) -> None:
    cfg, run = bench.run(f"one-{case}", **CASES[case], checkpoint__every=1, checkpoint__keep=100)
    straight = train(alone(), cfg, run)
    assert len(straight.losses) > 2
    for ranks in (2, 4):
        found = bench.trained(f"{ranks}-{case}", ranks, **CASES[case] | RANKS[ranks])
        assert found.losses == pytest.approx(straight.losses, abs=TOLERANCE, rel=0)
        assert difference(found.weights, straight.weights) <= TOLERANCE
    for step in range(1, len(straight.losses)):
        part = bench.root / f"from-{step}-{case}"
        shutil.copytree(run.path, part)
        for saved in (part / "checkpoints").iterdir():
            if int(saved.name.removeprefix("step-")) > step:
                shutil.rmtree(saved)
        rest = train(alone(), cfg, RunDir.open(part))
        assert rest.losses == straight.losses[step:]
        assert all(torch.equal(rest.weights[name], straight.weights[name]) for name in straight.weights)
        shutil.rmtree(part)


@pytest.mark.slow
def test_two_ranks_go_on_with_four_and_another_batch_size_over_the_images_that_are_left(bench: Bench) -> None:
    cfg, run = bench.run("changing", **CASES["shapes"] | RANKS[2], checkpoint__every=1, checkpoint__keep=100)
    run_ranks(2, train, cfg, run)
    for saved in run.checkpoints.iterdir():
        if int(saved.name.removeprefix("step-")) > 3:
            shutil.rmtree(saved)
    other = bench.config(**CASES["shapes"] | RANKS[4] | {"train__batch_size": 6})
    rest = run_ranks(4, train, other, run)[0]
    assert [step.step for step in steps_of(rest.events)] == list(range(4, 10))  # 60 images: 3 steps of 8, 6 of 6
    cfg, run = bench.run("ended", **CASES["shapes"] | {"train__epochs": 1})
    train(alone(), cfg, run)  # its last step has 4 images
    longer = Trainer(bench.config(**CASES["shapes"]), run, alone(), bench.root / "cache", lambda event: None)
    assert set(times_trained(longer).values()) == {3}
    longer.close()
