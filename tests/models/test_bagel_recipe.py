"""BAGEL's losses, sizes and pictures against the formulas of the publication's program, written out here."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.audit import bagel as published
from tests.audit.reference import Draws, seed_of
from tests.models.common import batch_of, edit_json, load, make, model_of, picture, recorded_decodes
from trainer.config.sections import DataConfig, ObjectiveConfig, SampleConfig
from trainer.config.size import Size
from trainer.models.base import MultimodalFamily, SequencePart
from trainer.models.objectives.base import Example
from trainer.models.parts.bagel.bagel_packing import ConditioningPiece, DrawnPiece, GapPiece, Marks, TextPiece, pack
from trainer.models.parts.bagel.bagel_sequences import size_within
from trainer.rng import SampleRng
from trainer.system.errors import InputError

SEED = 5
ANSWER, MORE = "two red ones and a blue one", "no"


def latents_of(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(4, 2 * rows, 2 * columns, generator=torch.Generator().manual_seed(seed))


SOURCE, TARGET, SECOND = latents_of(2, 3, 0), latents_of(3, 2, 1), latents_of(2, 2, 2)
VIEW, OTHER = picture(24, 16, seed=3), picture(16, 32, seed=4)
PARTS: list[list[SequencePart]] = [
    [SequencePart("text", "a red fox"), SequencePart("drawn", TARGET)],
    # Two edits, one after the other.
    [
        SequencePart("clean", SOURCE),
        SequencePart("conditioning", VIEW),
        SequencePart("text", "make it blue"),
        SequencePart("drawn", TARGET),
        SequencePart("clean", TARGET),
        SequencePart("conditioning", OTHER),
        SequencePart("text", "and larger"),
        SequencePart("drawn", SECOND),
    ],
    # An edit without the view of its source, after thinking.
    [
        SequencePart("text", "think first"),
        SequencePart("clean", SOURCE),
        SequencePart("gap"),
        SequencePart("text", "make it blue"),
        SequencePart("target", "it becomes blue"),
        SequencePart("drawn", SECOND),
    ],
    # Two images and two turns, and text before the image.
    [
        SequencePart("text", "look"),
        SequencePart("conditioning", VIEW),
        SequencePart("conditioning", OTHER),
        SequencePart("text", "how many?"),
        SequencePart("target", ANSWER),
        SequencePart("text", "and dogs?"),
        SequencePart("target", MORE),
    ],
    [SequencePart("text", "hello"), SequencePart("target", "good day")],
]
INDICES = (12, 40, 7, 8, 9)


def expected_losses(reference: published.Bagel) -> list[published.Losses]:
    """The losses of each sequence of PARTS."""
    found = []
    for index, parts in zip(INDICES, PARTS, strict=True):
        described: list[published.Part] = []
        num_drawn = 0
        for part in parts:
            content: Any = part.content
            if part.kind == "drawn":
                seed = SEED if not num_drawn else seed_of(SEED, "image", num_drawn)
                content, num_drawn = reference.noisy(content, Draws(seed, index)), num_drawn + 1
            described.append((part.kind, content))
        found.append(reference.losses(described))
    return found


def means(losses: Sequence[published.Losses], token_weight: str) -> tuple[float, float]:
    """The published means over all latent tokens and all labels; ce_loss_reweighting is `sqrt`."""
    images = torch.cat([one.images for one in losses])
    texts = [text for one in losses for text in one.texts]
    if token_weight == "sqrt":
        weights = torch.cat([torch.full((len(text),), 1 / math.sqrt(len(text))) for text in texts])
        return float(images.mean()), float((torch.cat(texts) * weights).sum() / weights.sum())
    return float(images.mean()), float(torch.cat(texts).mean())


@pytest.mark.parametrize("token_weight", ["token", "sqrt"])
def test_a_packed_batch_of_drawing_editing_and_conversation_costs_what_the_published_formula_says(
    cache: Path, token_weight: Any
) -> None:
    family = make("bagel", cache, objective=ObjectiveConfig(token_weight=token_weight))
    packed, alone = examples_of(family)
    batch = batch_of(family, [packed, alone])
    parts = family.loss(model_of(family), batch, SampleRng(SEED, [0, INDICES[-1]])).parts
    assert parts is not None
    expected = means(expected_losses(published.Bagel(family.folder)), token_weight)
    assert (parts[:, 0] / parts[:, 1]).tolist() == pytest.approx(expected, rel=1e-6)
    counts = [family.loss_counts(example) for example in (packed, alone)]
    assert parts[:, 1].tolist() == pytest.approx([sum(column) for column in zip(*counts, strict=True)])


def examples_of(family: MultimodalFamily) -> tuple[Example, Example]:
    """A pack of all sequences but the last, and the last."""
    encoded = [family.encode_sequence(parts) for parts in PARTS]
    return family.pack_examples(dict(zip(INDICES[:-1], encoded[:-1], strict=True))), encoded[-1]


def test_where_every_item_counts_the_same_a_short_answer_weighs_as_much_as_a_long_one(cache: Path) -> None:
    family = make("bagel", cache, objective=ObjectiveConfig(token_weight="item"))
    batch = batch_of(family, examples_of(family))
    parts = family.loss(model_of(family), batch, SampleRng(SEED, [0, INDICES[-1]])).parts
    losses = expected_losses(published.Bagel(family.folder))
    texts = torch.stack([text.mean() for one in losses for text in one.texts])
    assert parts is not None and parts[:, 1].tolist() == pytest.approx([4, 4])
    assert float(parts[1, 0] / 4) == pytest.approx(float(texts.mean()), rel=1e-6)


def test_clean_latents_are_seen_and_drawn_ones_take_no_position() -> None:
    family_sizes, marks = published_sizes(), Marks(60, 61, 62, 63)
    tensor = torch.zeros(4, 2, 2)
    pieces = [
        DrawnPiece(tensor, torch.zeros(()), clean=True),
        GapPiece(),
        TextPiece(torch.zeros(0, dtype=torch.int64)),
        DrawnPiece(tensor, torch.ones(())),
        ConditioningPiece(torch.zeros(3, 8, 8)),
    ]
    found = pack([pieces], marks, family_sizes).arguments
    # Marks of the clean image, text, marks of the drawn and of the conditioning image; patch; latents, clean, drawn.
    assert found["positions"].tolist() == [0, 0, 2, 3, 4, 4, 4, 4, 4, 0, 4]
    whole = torch.zeros(11, 11, dtype=torch.int64)
    (rows,), (mask,) = found["rows"], found["mask"]
    whole[rows[:, None], rows[None]] = mask.long()
    assert ["".join(map(str, row)) for row in whole[[0, 3, 5, 6]].tolist()] == [
        "11000000010",
        "11110000010",
        "11111100011",
        "11110011110",
    ]


def published_sizes() -> Any:
    from trainer.models.families.bagel import TINY

    return TINY


SEEN, DRAWN = (980, 378, 14, 2_007_040), (1024, 512, 16, math.inf)


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [
        ((1920, 1080), SEEN, (980, 546)),
        ((1024, 1024), SEEN, (980, 980)),
        ((256, 256), SEEN, (378, 378)),
        ((4000, 300), SEEN, (980, 70)),
        ((1920, 1080), DRAWN, (1024, 576)),
        ((2400, 800), DRAWN, (1024, 336)),
        ((400, 300), DRAWN, (688, 512)),
        ((1920, 1080), (980, 378, 14, 2_007_040 / 6), (616, 336)),
    ],
)
def test_images_have_the_published_sizes(
    size: tuple[int, int], limits: tuple[int, int, int, float], expected: tuple[int, int]
) -> None:
    assert size_within(Size(*size), *limits) == Size(*expected)


def test_both_sizes_follow_the_config(cache: Path) -> None:
    family = make("bagel", cache)
    assert family.drawn_size(Size(400, 300), 1024) == Size(688, 512)
    assert family.drawn_size(Size(400, 300), 64) == Size(64, 48)
    # The grid of the tiny model's encoder has 16 patches of 8 pixels.
    assert family.conditioning_size(Size(1920, 1080), DataConfig()) == Size(128, 72)
    assert family.conditioning_size(Size(20, 20), DataConfig(seen_resolution=64)) == Size(24, 24)


STEPS, GUIDANCE = 7, 4.0
"""The last of the six steps is below the share of noise at which prompts are guided."""


def guided_latents(reference: published.Bagel, noise: Tensor, source: bool, image_guidance: float) -> Tensor:
    """The published sampler: `num_timesteps` counts both ends, times shifted by 3, text guidance then image guidance.

    A prompt is guided above 0.4, and the whole velocity is never longer than the unguided one; an edit is guided
    everywhere, and each token of the text guidance is never longer than the unguided one.
    """
    times = torch.linspace(1, 0, STEPS)
    times = 3 * times / (1 + 2 * times)
    latents = noise
    picture_parts: list[published.Part] = [("clean", SOURCE), ("conditioning", VIEW)] if source else []
    words: list[published.Part] = [("text", "make it blue")]

    def velocity(parts: list[published.Part], time: Tensor) -> Tensor:
        drawn = published.Noisy(latents, latents, time[None])
        pieces = [reference.piece(*part) for part in [*parts, ("drawn", drawn)]]
        return reference.velocity(reference.run(pieces)[-len(pieces[-1].tokens) :])

    for time, following in pairwise(times):
        found = velocity([*picture_parts, *words], time)
        if source or time > 0.4:
            without_text = velocity(picture_parts, time)
            without_image = velocity(words, time)
            by_text = without_text + GUIDANCE * (found - without_text)
            if source:
                by_text = by_text * (found.norm(dim=-1, keepdim=True) / by_text.norm(dim=-1, keepdim=True)).clamp(max=1)
            guided = without_image + image_guidance * (by_text - without_image)
            if not source:
                guided = guided * (found.norm() / guided.norm()).clamp(max=1)
            found = guided
        rows, columns = (side // 2 for side in latents.shape[1:])
        image = found.reshape(rows, columns, 2, 2, -1).permute(4, 0, 2, 1, 3).reshape(latents.shape)
        latents = latents - image * (time - following)
    return latents


@pytest.mark.slow
@pytest.mark.parametrize(("source", "image_guidance"), [(False, 1.5), (True, 2.0)])
def test_a_sample_is_the_picture_of_the_published_app_at_the_same_numbers(
    cache: Path, source: bool, image_guidance: float
) -> None:
    family = make("bagel", cache)
    vae, rng = family.image_encoder(load), SampleRng(SEED, [0])
    decoded = recorded_decodes(vae)
    text = family.encode_text(None, "make it blue")
    if source:
        text |= {"reference_0": SOURCE, "conditioning_0": family.encode_conditioning(VIEW)}
    sample = SampleConfig(size=(48, 32), steps=STEPS, guidance=GUIDANCE)
    image = family.sample(model_of(family), vae, text, family.encode_text(None, ""), sample, rng)
    assert image.size == (48, 32)
    noise = Draws(SEED, 0).normal("sample", (4, 4, 6))
    with torch.no_grad():
        expected = guided_latents(published.Bagel(family.folder), noise, source, image_guidance)
    scale, shift = vae.config.scaling_factor, vae.config.shift_factor
    torch.testing.assert_close((decoded[0][0] - shift) * scale, expected, atol=2e-5, rtol=0)


def refused(cache: Path, folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        family = make("bagel", cache, str(folder))
        family.weights(family.components[0])
    return str(caught.value)


def copied(cache: Path, folder: Path, change: Callable[[Path], object]) -> Path:
    copy = Path(shutil.copytree(make("bagel", cache).folder, folder))
    change(copy)
    return copy


def test_the_original_checkpoint_folder_needs_no_config_json(cache: Path, tmp_path: Path) -> None:
    folder = copied(cache, tmp_path / "original", lambda copy: (copy / "config.json").unlink())
    # Without it the model has the published autoencoder, whose 16 channels the tiny one lacks.
    family = make("bagel", cache, str(folder))
    assert family.sizes.latent_numbers == 64 and family.sizes.vision.max_side == 70
    folder = copied(cache, tmp_path / "other", lambda copy: [(copy / name).unlink() for name in CONFIGS])
    assert "no config.json; expected a folder of BAGEL with llm_config.json, vit_config.json" in refused(cache, folder)


CONFIGS = ("config.json", "llm_config.json")


def test_a_config_of_the_encoder_that_lacks_the_last_layer_already_is_explained(cache: Path, tmp_path: Path) -> None:
    layers = json.loads((make("bagel", cache).folder / "vit_config.json").read_text())["num_hidden_layers"]
    folder = copied(
        cache, tmp_path / "cut", lambda copy: edit_json(copy / "vit_config.json", num_hidden_layers=layers - 1)
    )
    message = refused(cache, folder)
    assert f"num_hidden_layers is {layers - 1}, and ema.safetensors has all of these layers" in message
    assert f"set num_hidden_layers to {layers} if the last layer was left out of both" in message
