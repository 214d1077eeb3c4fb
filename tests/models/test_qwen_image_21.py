"""What only Qwen-Image-2.1 does; the rest is the contract of test_flow_transformers.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_dimensions

from tests.audit.families import QwenImage21 as Reference
from tests.models.common import (
    assert_they_cost_together_what_they_cost_alone,
    batch_of,
    examples,
    load,
    make,
    model_of,
    picture,
    refusal,
)
from tests.runs import run_config
from trainer.config.sections import ObjectiveConfig, ParallelConfig, SampleConfig, TrainConfig
from trainer.config.size import Size
from trainer.models import editing
from trainer.models.families.qwen_image_21 import QwenImage21
from trainer.models.parts.image.seeing import IMAGE
from trainer.parallel.parallelize import parallelize
from trainer.rng import SampleRng

GIVEN = (picture(64, 96, seed=7), picture(96, 32, seed=8))


@pytest.fixture(scope="module")
def family(cache: Path) -> QwenImage21:
    made: QwenImage21 = make("qwen_image_21", cache)
    return made


# Text with images


@pytest.mark.parametrize("caption", ["a red fox", ""])
@pytest.mark.parametrize("count", [1, 2])
def test_the_states_of_text_with_images_and_their_places_equal_the_pipelines(
    family: QwenImage21, count: int, caption: str
) -> None:
    expected = Reference(family.folder, {}).text(caption, GIVEN[:count])
    ours = family.encode_edit(family.text_encoder(load), caption, GIVEN[:count])
    assert ours.keys() == expected.keys()
    assert ours["prompt_images"].tolist() == expected["prompt_images"].tolist()
    torch.testing.assert_close(ours["prompt_embeds"], expected["prompt_embeds"], atol=5e-6, rtol=0)
    alone = family.encode_text(family.text_encoder(load), caption)["prompt_embeds"]
    assert (ours["prompt_embeds"][-1] - alone[-1]).abs().max() > 1e-3, "text after an image sees it"


def test_states_are_those_before_the_last_norm(family: QwenImage21) -> None:
    """transformers 5 names the normalised ones last: the pipeline takes the norm away."""
    encoder = family.text_encoder(load)
    ours = family.encode_text(encoder, "a fox")["prompt_embeds"]
    normalised = encoder.model.language_model.norm(ours)
    assert (normalised - ours).abs().max() > 0.1
    torch.testing.assert_close(ours, Reference(family.folder, {}).text("a fox")["prompt_embeds"], atol=5e-6, rtol=0)


def test_a_caption_announces_no_image_that_there_is_not(family: QwenImage21) -> None:
    encoder = family.text_encoder(load)
    nested = f"a {IMAGE[:5]}{IMAGE}{IMAGE[5:]}fox"
    for images in ((), GIVEN):
        plain, *announced = (family.encode_edit(encoder, text, images) for text in ("a fox", f"a {IMAGE}fox", nested))
        assert all(one["prompt_embeds"].equal(plain["prompt_embeds"]) for one in announced)


@pytest.mark.parametrize("size", [(384, 384), (1600, 900), (300, 900)])
@pytest.mark.parametrize("resolution", [512, 1024])
def test_an_image_is_seen_in_the_pipelines_size_for_the_resolution_of_training(
    cache: Path, size: tuple[int, int], resolution: int
) -> None:
    family = make("qwen_image_21", cache)
    family.follow(run_config(Path(), data__resolution=resolution))
    expected = calculate_dimensions(resolution * resolution, size[0] / size[1])[:2]
    assert family.seen_size(Size(*size)).frame == expected


# The sequence


def edit(family: QwenImage21, caption: str, seed: int) -> dict[str, Any]:
    vae, encoder = family.image_encoder(load), family.text_encoder(load)
    references = {f"reference_{i}": family.encode_image(vae, image)["latents"] for i, image in enumerate(GIVEN)}
    latents = family.encode_image(vae, picture(64, 32, seed))
    return {**latents, **family.encode_edit(encoder, caption, GIVEN), **references}


def test_edits_with_captions_of_any_length_share_a_batch_and_cost_what_they_cost_alone(family: QwenImage21) -> None:
    """diffusers' pipeline gives the images of a batch one position, behind the longest caption."""
    model = model_of(family)
    items = [edit(family, caption, seed) for seed, caption in enumerate(("fox", "a red fox in the deep snow", ""))]
    assert_they_cost_together_what_they_cost_alone(family, model, items)


def test_padding_is_read_by_no_token(family: QwenImage21) -> None:
    model = model_of(family)
    items = [edit(family, caption, 0) for caption in ("fox", "a red fox in the deep snow")]
    batch = batch_of(family, items)
    before = family.loss(model, batch, SampleRng(0, [4, 5])).total
    batch["prompt_embeds"][0, len(items[0]["prompt_embeds"]) :] = 1e3
    torch.testing.assert_close(family.loss(model, batch, SampleRng(0, [4, 5])).total, before, atol=1e-5, rtol=0)


def test_the_noise_reaches_nothing_before_the_noisy_image(family: QwenImage21) -> None:
    model, batch = model_of(family), batch_of(family, [edit(family, "a fox", 0)])
    seen: list[torch.Tensor] = []
    for block in model["transformer"].transformer_blocks:
        block.register_forward_hook(lambda module, given, output: seen.append(output))
    for sigma in (0.2, 0.9):
        family.predict(model, batch["latents"], torch.tensor([sigma]), batch, 1.0)
    noisy = batch["latents"][0, 0].numel()
    for low, high in zip(seen[:2], seen[2:], strict=True):
        assert low[:, :-noisy].equal(high[:, :-noisy])
        assert (low[:, -noisy:] - high[:, -noisy:]).abs().max() > 1e-3


def test_an_image_sees_what_is_before_it_and_itself_and_not_what_follows(family: QwenImage21) -> None:
    model, item = model_of(family), edit(family, "a fox", 0)
    seen: list[torch.Tensor] = []
    model["transformer"].transformer_blocks[-1].register_forward_hook(lambda m, given, output: seen.append(output))
    changed = item | {"reference_1": item["reference_1"] + 1}
    for one in (item, changed):
        batch = batch_of(family, [one])
        family.predict(model, batch["latents"], torch.tensor([0.5]), batch, 1.0)
    begin = int(item["prompt_images"][1]) + item["reference_0"][0].numel()
    assert seen[0][:, :begin].equal(seen[1][:, :begin])
    assert ((seen[0] - seen[1])[:, begin:].abs().amax(dim=-1) > 1e-5).all()


def test_in_bf16_the_model_reads_the_time_that_was_drawn(family: QwenImage21) -> None:
    model, batch = model_of(family), batch_of(family, examples(family, 1))
    parallelize(model["transformer"], family.shard, TrainConfig(precision="bf16"), ParallelConfig(), "none", None)
    seen: list[torch.Tensor] = []
    model["transformer"].time_text_embed.time_proj.register_forward_pre_hook(lambda m, given: seen.append(given[0]))
    family.predict(model, batch["latents"], torch.tensor([0.123456]), batch, 1.0)
    assert torch.tensor(0.123456).bfloat16() != torch.tensor(0.123456)
    assert seen[0].tolist() == torch.tensor([0.123456, 0.0]).tolist()


def test_with_references_every_weight_gets_a_gradient(family: QwenImage21) -> None:
    model = model_of(family).requires_grad_(True)
    family.loss(model, batch_of(family, [edit(family, "a fox", 0)]), SampleRng(0, [0])).total.backward()
    weights = dict(model["transformer"].named_parameters())
    assert [name for name, weight in weights.items() if weight.grad is None or not weight.grad.abs().sum() > 0] == []


# Images, samples, what is said and refused


def test_a_transparent_pixel_of_a_sample_is_white(family: QwenImage21) -> None:
    vae: Any = family.image_encoder(load)
    with torch.no_grad():
        vae.decoder.conv_out.weight.zero_()
        vae.decoder.conv_out.bias.copy_(torch.tensor([1.0, -1.0, -1.0, 1.0]))
        opaque = family.autoencoder.decode(vae, torch.zeros(1, 8, 2, 2))
        vae.decoder.conv_out.bias[3] = -1
        transparent = family.autoencoder.decode(vae, torch.zeros(1, 8, 2, 2))
    assert opaque.getpixel((0, 0)) == (255, 0, 0)
    assert transparent.getpixel((0, 0)) == (255, 255, 255)


def test_samples_have_no_guidance_where_the_config_names_none(family: QwenImage21) -> None:
    assert family.complete_sample(SampleConfig()).guidance == 1.0
    assert family.complete_sample(SampleConfig(guidance=3.0)).guidance == 3.0


def test_without_references_nothing_is_said_and_with_them_mirrored_images_are_refused(family: QwenImage21) -> None:
    model = {"model__family": "qwen_image_21", "model__path": str(family.folder)}
    assert editing.warnings(run_config(Path(), **model)) == ()
    (problem,) = editing.refused(run_config(Path(), **model, data__references="before", data__flip=True))
    assert (problem.field, problem.message) == (
        "data.flip",
        "the text encoder of Qwen/Qwen-Image-2.1 would see references that are not mirrored; set false",
    )


def test_a_folder_without_the_processor_of_images_is_refused(family: QwenImage21, cache: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(family.folder, tmp_path / "model"))
    (folder / "processor" / "preprocessor_config.json").unlink()
    assert refusal("qwen_image_21", cache, str(folder), objective=ObjectiveConfig()) == (
        f"model.path {folder}: no processor/preprocessor_config.json; the text encoder of Qwen/Qwen-Image-2.1 sees "
        "images that it prepares; download the folder again"
    )
