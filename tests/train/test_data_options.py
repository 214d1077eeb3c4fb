"""The effects of masks, regularization images and reference images on a run."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.distributed import run_ranks
from tests.models.common import IMAGES
from tests.runs import (
    SIZES,
    Outcome,
    alone,
    difference,
    make_pictures,
    make_run,
    run_config,
    step_numbers,
    steps_of,
    train,
)
from trainer.config.schema import RunConfig
from trainer.data.loader import ImageItem
from trainer.models import families
from trainer.models.objectives.flow_matching import velocity
from trainer.rng import SampleRng
from trainer.run.events import AnyEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.train.loop import Trainer

ONE_RANK = {"parallel__devices": 1, "parallel__strategy": "none"}
RANKS = {
    2: {"parallel__devices": 2, "parallel__strategy": "full"},
    4: {"parallel__devices": 4, "parallel__strategy": "hybrid", "parallel__shard_size": 2},
}


@dataclasses.dataclass(frozen=True)
class Data:
    """Folders of images: the data, three that are not of the data, and what goes with the data."""

    root: Path
    pictures: Path
    others: Path
    left_black: Path
    black: Path
    white: Path
    before: Path

    def run(self, name: str, **changes: Any) -> tuple[RunConfig, RunDir]:
        cfg = run_config(self.pictures, **{"train__steps": 2, **changes})
        return cfg, make_run(self.root / "runs", cfg, name)

    def train(self, name: str, **changes: Any) -> Outcome:
        """A run on `parallel.devices` ranks."""
        cfg, run = self.run(name, **{**ONE_RANK, **changes})
        ranks = cfg.parallel.devices
        return train(alone(), cfg, run) if ranks == 1 else run_ranks(ranks, train, cfg, run)[0]

    def trainer(self, name: str, **changes: Any) -> Trainer:
        cfg, run = self.run(name, **{**ONE_RANK, **changes})
        return Trainer(cfg, run, alone(), run.path.parent / "cache", lambda event: None)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    root = tmp_path_factory.mktemp("data_options")
    made = Data(root, *(root / field.name for field in dataclasses.fields(Data)[1:]))
    make_pictures(made.pictures)
    make_pictures(made.others, 3)
    for folder in (made.left_black, made.black, made.before):
        folder.mkdir()
    for photo in sorted(made.pictures.glob("*.png")):
        with Image.open(photo) as image:
            size = image.size
        mask = Image.new("L", size, 255)
        mask.paste(0, (0, 0, size[0] // 2, size[1]))
        mask.save(made.left_black / photo.name)
        Image.new("L", size, 0).save(made.black / photo.name)
        for number in range(1 + int(photo.stem) % 2):
            colour = (30 * int(photo.stem), 120 * number, 90)
            Image.new("RGB", size[::-1], colour).save(made.before / f"{photo.stem}_{number}.png")
    made.white.mkdir()
    for name in ("00.png", "03.png"):
        Image.new("L", SIZES[0], 255).save(made.white / name)
    return made


# Masks


def test_what_is_masked_adds_nothing_to_the_loss_and_gets_no_gradient(data: Data) -> None:
    # Squares of 4 x 4 latents, so that no latent lies on the border of the mask.
    trainer = data.trainer("half", data__masks=str(data.left_black), data__max_aspect=1, train__batch_size=1)
    (part,) = trainer.loader.micro_batches(0)
    predicted: list[Tensor] = []
    gradients: list[Tensor] = []

    def watch(module: object, arguments: object, output: tuple[Tensor]) -> None:
        predicted.append(output[0].detach())
        output[0].register_hook(gradients.append)

    trainer.model["transformer"].register_forward_hook(watch)
    numbers = step_numbers(trainer)
    trainer.close()
    latents, rng = part.examples[0]["latents"], SampleRng(3, part.indices)
    target = velocity(latents, rng.normal("noise", latents.shape)[0])
    errors = (predicted[0][0].T.reshape(latents.shape) - target).square()
    learned = latents.shape[-1] // 2
    assert latents.shape[-2:] == (4, 4)
    assert numbers.loss == pytest.approx(float(errors[..., learned:].sum()) / errors.numel(), abs=1e-6)
    gradient = gradients[0][0].T.reshape(latents.shape)
    assert gradient[..., :learned].abs().max() == 0
    assert gradient[..., learned:].abs().min() > 0


def test_masks_of_one_half_everywhere_halve_the_loss_exactly(data: Data) -> None:
    alike = {"data__validation": 2, "data__validation_every": 1, "train__steps": 1}
    plain, dim = (
        data.trainer("plain", **alike),
        data.trainer("dim", data__masks=str(data.black), data__mask_background=0.5, **alike),
    )
    assert dim.validate() == plain.validate() / 2
    assert step_numbers(dim).loss == step_numbers(plain).loss / 2
    plain.close()
    dim.close()


def test_white_masks_and_none_at_all_change_nothing_but_a_warning(data: Data) -> None:
    plain = data.train("unmasked")
    white = data.train("white", data__masks=str(data.white), data__mask_background=0.2)
    assert white.losses == plain.losses
    assert difference(white.weights, plain.weights) == 0.0
    assert [event.message for event in white.events if isinstance(event, WarningEvent)] == [
        f"data.masks: 6 of 8 images have no mask and are in the loss as a whole, first {data.pictures}/01.png"
    ]


# Regularization


def test_loss_and_gradient_of_a_step_are_means_of_those_of_its_images_times_their_weights(data: Data) -> None:
    weighed = {"data__regularization": str(data.others), "data__regularization_weight": 0.25}
    trainer = data.trainer("weighed", **weighed, train__batch_size=6)
    parts = trainer.loader.micro_batches(0)
    weights = [weight for part in parts for weight in part.weights]
    assert set(weights) == {1.0, 0.25}
    expected = 0.0
    for part, weight in zip(parts, weights, strict=True):
        batch = trainer.family.collate(part.examples) | {"weight": torch.tensor([weight / len(weights)])}
        total = trainer.family.loss(trainer.model, batch, SampleRng(3, part.indices)).total
        total.backward()
        expected += float(total.detach())
    norm = torch.stack([parameter.grad.norm() for parameter in trainer.parameters]).norm()
    trainer.optimizer.zero_grad()
    events: list[AnyEvent] = []
    trainer.log.emit = events.append
    trainer.train_step()
    trainer.close()
    (step,) = steps_of(events)
    assert step.loss == pytest.approx(expected, abs=1e-6)
    assert step.grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_a_regularization_image_counts_by_its_weight_where_it_is_alone_in_its_step_too(data: Data) -> None:
    found = {
        weight: data.train(
            f"alone-{weight}",
            data__regularization=str(data.others),
            data__regularization_weight=weight,
            train__batch_size=1,
            train__steps=6,
            optim__lr=1e-12,
        )
        for weight in (1, 0.25)
    }
    ratios = [
        (loss / whole, norm / whole_norm)
        for loss, norm, whole, whole_norm in zip(
            found[0.25].losses, found[0.25].grad_norms, found[1].losses, found[1].grad_norms, strict=True
        )
    ]
    assert {(round(loss, 5), round(norm, 5)) for loss, norm in ratios} == {(1.0, 1.0), (0.25, 0.25)}


def test_regularization_images_are_half_of_what_is_trained(data: Data) -> None:
    trainer = data.trainer("half-of-it", data__regularization=str(data.others), data__regularization_weight=0.25)
    weights = [w for step in range(40) for part in trainer.loader.micro_batches(step) for w in part.weights]
    trainer.close()
    assert len(weights) == 160
    assert abs(weights.count(0.25) - 80) <= 8


def test_captions_of_regularization_images_are_not_dropped(data: Data) -> None:
    weighed = {"data__regularization": str(data.others), "data__regularization_weight": 0.25}
    cfg, run = data.run("kept-captions", **ONE_RANK, **weighed, data__caption_dropout=1.0, train__steps=1)
    train(alone(), cfg, run)
    assert dropped_in(cfg, run) == {(1.0, True), (0.25, False)}


def dropped_in(cfg: RunConfig, run: RunDir) -> set[tuple[float, bool]]:
    """(weight, whether the caption is dropped) of the next samples of a run."""
    trainer = Trainer(cfg, run, alone(), run.path.parent / "cache", lambda event: None)
    empty = trainer.data.data.cache.read(trainer.data.data.empty)["prompt_embeds"]
    parts = [part for step in range(1, 11) for part in trainer.loader.micro_batches(step)]
    trainer.close()
    return {
        (weight, example["prompt_embeds"].equal(empty))
        for part in parts
        for weight, example in zip(part.weights, part.examples, strict=True)
    }


# References


def test_references_change_what_is_predicted_and_drawn(data: Data) -> None:
    drawing = {"sample__prompts": ("one",), "sample__size": (48, 32), "sample__steps": 2}
    plain = data.trainer("no-reference", **drawing)
    edit = data.trainer(
        "edit", data__references=str(data.before), sample__references=(str(data.before / "01_0.png"),), **drawing
    )
    pictures = [trainer.generate_samples()[0].read_bytes() for trainer in (plain, edit)]
    losses = [step_numbers(trainer).loss for trainer in (plain, edit)]
    plain.close()
    edit.close()
    assert pictures[0] != pictures[1]
    assert abs(losses[0] - losses[1]) > 1e-4


def test_a_dropped_caption_keeps_its_references(data: Data) -> None:
    trainer = data.trainer("dropped", data__references=str(data.before), data__caption_dropout=1.0)
    found = [example for part in trainer.loader.micro_batches(0) for example in part.examples]
    empty = trainer.data.data.cache.read(trainer.data.data.empty)["prompt_embeds"]
    trainer.close()
    assert all(example["prompt_embeds"].equal(empty) and "reference_0" in example for example in found)


def test_a_dropped_reference_leaves_the_caption(data: Data) -> None:
    trainer = data.trainer("alone", data__references=str(data.before), data__reference_dropout=1.0)
    found = [example for part in trainer.loader.micro_batches(0) for example in part.examples]
    trainer.close()
    assert found and not any(key.startswith("reference") for example in found for key in example)
    half = data.trainer("half-alone", data__references=str(data.before), data__reference_dropout=0.5)
    items = [item for step in range(50) for item in half.loader._batch_sampler.batch(step)]
    half.close()
    assert 0.4 < sum(item.without_references for item in items) / len(items) < 0.6


EDIT: dict[str, Any] = {"model__family": "qwen_image", "model__options__architecture": "qwen-image-edit-2509"}
"""A model whose text encoder sees the references."""


def test_a_prompt_is_encoded_with_its_references_and_kept_by_them(data: Data, tmp_path: Path) -> None:
    dropped = {"data__caption_dropout": 0.5, "data__reference_dropout": 0.5}

    def kept(name: str, before: Path) -> list[list[Tensor]]:
        """For each image: the embeddings of caption and empty caption with the references, and without."""
        trainer = data.trainer(name, **EDIT, **dropped, data__references=str(before))
        found = trainer.data.data
        trainer.close()
        return [
            [
                found.example(ImageItem(index, is_dropped, without_references=is_alone))["prompt_embeds"]
                for is_alone in (False, True)
                for is_dropped in (False, True)
            ]
            for index in range(len(found.train))
        ]

    first = kept("seen", data.before)
    changed = Path(shutil.copytree(data.before, tmp_path / "before"))
    Image.new("RGB", (64, 64), (5, 250, 5)).save(changed / "01_1.png")
    second = kept("seen-changed", changed)
    for index, (old, new) in enumerate(zip(first, second, strict=True)):
        assert len({tuple(one.flatten().tolist()) for one in old}) == 4
        same = [one.shape == other.shape and bool(one.equal(other)) for one, other in zip(old, new, strict=True)]
        assert same == [index != 1, index != 1, True, True]


def test_samples_of_an_edit_are_guided_by_a_negative_prompt_that_shows_its_reference(data: Data) -> None:
    drawing = {"sample__prompts": ("one", "one"), "sample__negative": "grey", "sample__size": (48, 32)}
    files = tuple(str(data.before / name) for name in ("01_0.png", "01_1.png"))
    trainer = data.trainer("edits", **EDIT, **drawing, sample__steps=2, sample__references=files)
    prompts = trainer.data.data.prompts
    read = [[trainer.data.data.cache.read(key)["prompt_embeds"] for key in (p.key, p.negative)] for p in prompts]
    pictures = {path.read_bytes() for path in trainer.generate_samples()}
    # Prompts that change during a run keep their references.
    trainer.sampler.change_prompts(("two", "one"))
    again = trainer.sampler._data.prompts
    trainer.close()
    assert len(pictures) == 2
    assert not any(one.equal(other) for one, other in zip(*read, strict=True))
    assert [p.negative for p in again] == [p.negative for p in prompts] and again[1].key == prompts[1].key
    assert again[0].key not in {p.key for p in prompts}


def test_prompts_stay_when_their_references_are_no_longer_the_images_of_the_start(data: Data, tmp_path: Path) -> None:
    """Else the cache would keep the new image's embeddings under the former one's digest."""
    file = Path(shutil.copy(data.before / "01_0.png", tmp_path))
    drawing = {"sample__prompts": ("one",), "sample__size": (48, 32), "sample__references": (str(file),)}
    trainer = data.trainer("replaced", **EDIT, **drawing)
    with Image.open(file) as image:
        Image.new("RGB", image.size, (5, 250, 5)).save(file)
    with pytest.raises(InputError, match=f"{file}: has changed while images were encoded"):
        trainer.sampler.change_prompts(("never encoded",))
    trainer.close()


@pytest.mark.parametrize("version", ["2509", pytest.param("2511", marks=pytest.mark.slow)])
def test_edits_on_two_ranks_are_those_on_one(data: Data, tmp_path: Path, version: str) -> None:
    changes = EDIT | {"model__options__architecture": f"qwen-image-edit-{version}", "train__batch_size": 5}
    changes |= {"data__references": str(data.before), "data__caption_dropout": 0.3, "data__reference_dropout": 0.3}
    # Each with a cache of its own: the ranks encode prompts with and without images with a sharded encoder.
    own = [dataclasses.replace(data, root=tmp_path / name) for name in ("one", "two")]
    one, two = (each.train(version, **changes, **ranks) for each, ranks in zip(own, (ONE_RANK, RANKS[2]), strict=True))
    assert two.losses == pytest.approx(one.losses, abs=1e-6, rel=0)
    assert difference(two.weights, one.weights) <= 1e-6


@pytest.mark.slow
def test_no_image_waits_for_others_whose_references_have_its_shape(tmp_path: Path) -> None:
    """Twenty images with references of twenty shapes, in batches of four: each is trained once an epoch."""
    for number in range(20):
        longer = 2 ** (number / 9.5 - 1)  # from 1 to 4 to 4 to 1
        for folder, size in (("images", (256, 256)), ("before", (round(256 * longer), round(256 / longer)))):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.new("RGB", size, (12 * number, 99, 30)).save(tmp_path / folder / f"{number:02}.png")
        (tmp_path / "images" / f"{number:02}.txt").write_text(f"number {number}")
    changes = {"data__references": str(tmp_path / "before"), "data__resolution": 256, "data__max_aspect": 4}
    changes |= {"train__steps": 10, "train__batch_size": 4, "train__micro_batch": 4}

    def outcome(name: str, **ranks: Any) -> Outcome:
        cfg = run_config(tmp_path / "images", **changes, **ranks)
        run = make_run(tmp_path / "runs", cfg, name)
        return run_ranks(2, train, cfg, run)[0] if ranks else train(alone(), cfg, run)

    one, two = outcome("one"), outcome("two", **RANKS[2])
    cfg = run_config(tmp_path / "images", **changes)
    trainer = Trainer(cfg, make_run(tmp_path / "runs", cfg, "looked"), alone(), tmp_path / "cache", lambda event: None)
    items = [item.index for step in range(10) for item in trainer.loader._batch_sampler.batch(step)]
    keys = {trainer.data.batch_key(ImageItem(index, dropped=False)) for index in range(20)}
    trainer.close()
    assert sorted(items) == sorted([*range(20)] * 2)
    assert len(keys) == 20
    assert two.losses == pytest.approx(one.losses, abs=1e-6, rel=0)
    assert difference(two.weights, one.weights) <= 1e-6


def test_a_family_that_reads_no_references_refuses_them(data: Data) -> None:
    blind = next(name for name in IMAGES if not families.get(name).reads_references)
    for field, value in (("data__references", str(data.before)), ("sample__references", ("a.png",))):
        cfg, run = data.run(f"blind-{field}", model__family=blind, sample__prompts=("one",), **{field: value})
        with pytest.raises(InputError) as caught:
            Trainer(cfg, run, alone(), run.path.parent / "cache", lambda event: None)
        name = field.replace("__", ".")
        assert str(caught.value) == f"{name}: models of family {blind} read no reference images; remove the field"


# Everything together


@pytest.fixture(scope="module")
def everything(data: Data) -> dict[str, Any]:
    return {
        "data__masks": str(data.left_black),
        "data__mask_background": 0.1,
        "data__regularization": str(data.others),
        "data__regularization_weight": 0.3,
        "data__references": str(data.before),
        "data__caption_dropout": 0.3,
        "train__batch_size": 5,
        "train__micro_batch": 2,
        "train__steps": 6,
    }


@pytest.fixture(scope="module")
def reference(data: Data, everything: dict[str, Any]) -> Outcome:
    return data.train("one-rank", **everything)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_ranks_trains_what_one_trains(
    data: Data, everything: dict[str, Any], reference: Outcome, ranks: int
) -> None:
    found = data.train(f"ranks-{ranks}", **everything, **RANKS[ranks])
    assert found.losses == pytest.approx(reference.losses, abs=1e-6, rel=0)
    assert found.grad_norms == pytest.approx(reference.grad_norms, abs=1e-5, rel=0)
    assert difference(found.weights, reference.weights) <= 1e-6


def test_a_run_that_goes_on_reads_and_weighs_what_it_would_have(
    data: Data, everything: dict[str, Any], reference: Outcome
) -> None:
    cfg, run = data.run("in-two", **{**ONE_RANK, **everything, "train__steps": 3})
    first = train(alone(), cfg, run)
    whole = run_config(data.pictures, **{**ONE_RANK, **everything})
    second = train(alone(), whole, run)
    assert first.losses + second.losses == reference.losses
    assert difference(second.weights, reference.weights) == 0.0
