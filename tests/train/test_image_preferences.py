"""Preferences between images: the loss of Diffusion-DPO for flow matching and discrete diffusion, on any ranks."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from pydantic import ValidationError
from torch import Tensor, nn

from tests.bench import TOLERANCE, Bench
from tests.distributed import run_ranks
from tests.models.common import batch_of, model_of
from tests.runs import alone, graphs_of, make_pictures, make_run, run_config, step_with_gradients, steps_of, train
from trainer.config.families import refused
from trainer.config.schema import RunConfig
from trainer.data.images.image_files import scan
from trainer.data.loader import ImageItem
from trainer.models.objectives.base import Example
from trainer.rng import SampleRng
from trainer.run.events import ValidationEvent
from trainer.system.errors import InputError
from trainer.train.loop import Trainer

BETA = 4.0
"""Small: rounding of the errors, about 1e-7, is multiplied by it in the loss."""
PAIRS: dict[str, Any] = {"objective__dpo_beta": BETA, "optim__lr": 1e-4}
KINDS: dict[str, dict[str, Any]] = {"lora": PAIRS, "qlora": PAIRS | {"quantize__format": "nf4"}}


def make_rejected(pictures: Path, folder: Path) -> Path:
    """The negative of each picture, turned: of another size, and of another shape unless it is a square."""
    folder.mkdir()
    for file in pictures.glob("*.png"):
        with Image.open(file) as image:
            ImageOps.invert(image.convert("RGB")).rotate(90, expand=True).save(folder / file.name)
    return folder


def pairs_config(pictures: Path, **changes: Any) -> RunConfig:
    return run_config(pictures, **{"data__rejected": str(pictures.parent / "rejected")} | changes)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("image-preferences")
    pictures = make_pictures(root / "pictures")
    make_rejected(pictures, root / "rejected")
    return Bench(root, pictures, pairs_config, KINDS)


def errors_of(trainer: Trainer, model: nn.ModuleDict, example: Example, index: int) -> tuple[Tensor, Tensor]:
    """Squared error of the preferred and of the rejected image of an example, each alone."""
    found = []
    for latents in (example["latents"], example["rejected"]):
        item = {key: tensor for key, tensor in example.items() if key != "rejected"} | {"latents": latents}
        loss = trainer.family.loss(model, batch_of(trainer.family, [item]), SampleRng(trainer.cfg.train.seed, (index,)))
        found.append(loss.total)
    return found[0], found[1]


def loss_of_the_paper(now: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor], beta: float) -> Tensor:
    """Diffusion-DPO, eq. 14: of errors of the preferred and rejected image by the model, and by its reference."""
    inside = (now[0] - before[0]) - (now[1] - before[1])
    return torch.log1p(torch.exp(beta / 2 * inside))


@pytest.mark.parametrize("family", ["flux2", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_three_steps_have_the_losses_and_gradients_of_a_loop_over_single_images(bench: Bench, family: str) -> None:
    cfg, run = bench.run(
        f"steps-{family}",
        model__family=family,
        train__batch_size=3,
        train__micro_batch=2,
        optim__clip_norm=None,
        **PAIRS,
    )
    trainer = Trainer(cfg, run, alone(), bench.root / "cache", lambda event: None)
    base = model_of(trainer.family).requires_grad_(False)
    try:
        for _ in range(3):
            losses = []
            for part in trainer.loader.micro_batches(trainer.step):
                for example, index, weight in zip(part.examples, part.indices, part.weights, strict=True):
                    before = errors_of(trainer, base, example, index)
                    losses.append(
                        weight * loss_of_the_paper(errors_of(trainer, trainer.model, example, index), before, BETA)
                    )
            expected = torch.stack(losses).sum() / cfg.train.batch_size
            gradients = torch.autograd.grad(expected, trainer.parameters)
            numbers, seen = step_with_gradients(trainer)
            assert numbers.loss == pytest.approx(float(expected.detach()), abs=TOLERANCE)
            for found, gradient in zip(seen.values(), gradients, strict=True):
                torch.testing.assert_close(found, gradient, atol=TOLERANCE, rtol=0)
    finally:
        trainer.close()


def test_the_first_step_costs_log_2_and_the_preferred_images_win_after_some(bench: Bench) -> None:
    found = bench.trained_here("wins", train__steps=12, **PAIRS | {"optim__lr": 3e-3})
    first, *_, last = steps = steps_of(found.events)
    assert first.loss == pytest.approx(math.log(2), abs=1e-7)
    assert first.metrics == {"margins": 0.0, "accuracies": 0.0}
    assert fmean(step.metrics["accuracies"] for step in steps[-6:]) > 0.5
    assert fmean(step.loss for step in steps[-6:]) < math.log(2)
    assert last.images_per_second == pytest.approx(2 * 4 / last.seconds)  # both of each pair


@pytest.mark.slow
def test_a_compiled_block_has_a_second_graph_for_the_reference_and_no_break(bench: Bench) -> None:
    compiled = {"train__compile": True, "train__compile_backend": "aot_eager", "data__max_aspect": 1}
    plain = compiled | {"objective__dpo_beta": None, "data__rejected": None, "train__micro_batch": 2}
    ((own, *others), breaks) = run_ranks(1, graphs_of, *bench.run("compiled", **plain), 3)[0]
    assert (others, breaks) == ([own, own], {})
    assert run_ranks(1, graphs_of, *bench.run("compiled-pairs", **PAIRS | compiled), 3)[0] == ([2 * own] * 3, {})


def test_a_rejected_image_is_encoded_at_the_size_of_the_preferred_one(bench: Bench) -> None:
    cfg, run = bench.run("sizes", **PAIRS)
    trainer = Trainer(cfg, run, alone(), bench.root / "cache", lambda event: None)
    trainer.close()
    for number in range(8):
        example = trainer.data.example(ImageItem(number, False))
        assert example["rejected"].shape == example["latents"].shape
        assert not torch.equal(example["rejected"], example["latents"])


def test_margins_and_accuracies_of_held_out_pairs_are_logged_and_no_perplexity(bench: Bench) -> None:
    found = bench.trained_here("held", data__validation=3, data__validation_every=2, train__steps=2, **PAIRS)
    (event,) = (event for event in found.events if isinstance(event, ValidationEvent))
    assert event.metrics.keys() == {"margins", "accuracies"}
    assert event.metrics["accuracies"] * 3 == pytest.approx(round(event.metrics["accuracies"] * 3))
    assert math.isnan(event.perplexity)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"adapter__type": "none"},
            "objective.dpo_beta: compares the model with itself without its adapter, but adapter.type is none; set a "
            "type, or leave this out",
        ),
        (
            {"model__train": {"transformer": "adapter", "text_encoder": "full"}},
            "model.train.text_encoder: full would change the model that objective.dpo_beta compares with; use adapter "
            "or frozen",
        ),
        (
            {"data__masks": "masks"},
            "data.masks: cannot be combined with objective.dpo_beta, which compares whole images of pairs; leave it "
            "out",
        ),
        (
            {"data__regularization": "others"},
            "data.regularization: cannot be combined with objective.dpo_beta, which compares whole images of pairs; "
            "leave it out",
        ),
        (
            {"objective__dpo_beta": None},
            "data.rejected: has no effect without objective.dpo_beta; set it, for example to 2000",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(bench: Bench, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        bench.config(**PAIRS | changes)
    assert message in str(caught.value)


def test_a_beta_without_rejected_images_is_refused(bench: Bench) -> None:
    cfg = bench.config(**PAIRS | {"data__rejected": None})
    assert [f"{problem.field}: {problem.message}" for problem in refused(cfg)] == [
        "objective.dpo_beta: needs data.rejected, the folder with the images that are not preferred; name it"
    ]


def test_each_image_needs_a_rejected_one_and_other_shapes_are_named(bench: Bench, tmp_path: Path) -> None:
    pictures = make_pictures(tmp_path / "pictures", 4)
    rejected = make_rejected(pictures, tmp_path / "rejected")
    data = pairs_config(pictures, **PAIRS).data
    assert scan(data).warnings == (
        f"data.rejected: 2 of 4 images are cropped to another aspect ratio, that of the preferred image, "
        f"first {rejected / '01.png'}",
    )
    (rejected / "02.png").rename(rejected / "spare.png")
    with pytest.raises(InputError) as caught:
        scan(data)
    assert str(caught.value) == (
        f"data.rejected: 1 of 4 images have no rejected image, first {pictures / '02.png'}; add {rejected / '02'}.png"
    )


def tinted(folder: Path, pictures: Path, tint: tuple[float, float, float]) -> Path:
    """The pictures in shades of one colour, with their captions."""
    folder.mkdir()
    for file in sorted(pictures.glob("*.png"))[:12]:
        with Image.open(file) as image:
            grey = np.asarray(image.convert("L"), dtype=float)[..., None]
        Image.fromarray((grey * np.array(tint)).round().astype(np.uint8)).save(folder / file.name)
        (folder / f"{file.stem}.txt").write_text(file.with_suffix(".txt").read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def warmth(picture: Path) -> float:
    """Mean red minus mean blue, of 255."""
    with Image.open(picture) as image:
        red, _, blue = np.asarray(image.convert("RGB"), dtype=float).mean((0, 1))
    return float(red - blue)


@pytest.mark.slow
def test_samples_of_the_demo_model_move_from_the_rejected_to_the_preferred_colour(tmp_path: Path) -> None:
    """It draws in warm colours; the same pictures in blue are preferred to them in orange."""
    pictures = Path(__file__).parents[2] / "presets" / "quickstart"
    preferred = tinted(tmp_path / "preferred", pictures, (0.4, 0.85, 1.0))
    rejected = tinted(tmp_path / "rejected", pictures, (1.0, 0.85, 0.4))
    cfg = run_config(
        preferred,
        model={"family": "flux2", "path": "demo"},
        adapter={"type": "lora", "rank": 8},
        data__rejected=str(rejected),
        objective__dpo_beta=10,
        optim__lr=4e-3,
        train__steps=24,
        train__micro_batch=4,
        sample={"every": 24, "prompts": ["fox face", "sun"], "size": (64, 64), "steps": 12, "guidance": 1.5},
    )
    run = make_run(tmp_path, cfg, "run")
    found = train(alone(), cfg, run)
    assert steps_of(found.events)[-1].metrics["accuracies"] == 1.0
    for index in range(2):
        before, after = (warmth(run.samples / f"step-{step:06d}-{index}.png") for step in (0, 24))
        assert before > 60
        assert after < before - 30
