"""Reference images of FLUX.2 go into the model as in diffusers' own pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from tests.models.common import (
    assert_same_picture,
    batch_of,
    examples,
    load,
    make,
    model_of,
    picture,
    recorded_decodes,
    without_bar,
)
from trainer.config.sections import ObjectiveConfig, SampleConfig
from trainer.models.families.flux2 import Flux2
from trainer.models.objectives.base import Example
from trainer.models.objectives.flow_matching import add_noise, draw_sigma
from trainer.rng import SampleRng

# Smaller ones are refused by the pipelines, and these are left at their size.
REFERENCES = (picture(64, 96, seed=7), picture(80, 64, seed=8))


@pytest.fixture(scope="module")
def klein(cache: Path) -> Flux2:
    return make("flux2", cache)


@pytest.fixture(scope="module")
def dev(cache: Path) -> Flux2:
    return make("flux2", cache, architecture="dev")


def pipeline_of(kind: Any, family: Flux2) -> Any:
    """The pipeline with everything but the text encoder."""
    pipeline = kind(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(family.folder, subfolder="scheduler"),
        vae=AutoencoderKLFlux2.from_pretrained(family.folder, subfolder="vae"),
        text_encoder=None,
        tokenizer=None,
        transformer=Flux2Transformer2DModel.from_pretrained(family.folder, subfolder="transformer"),
    )
    return without_bar(pipeline)


def encoded(family: Flux2, *images: Image.Image) -> Example:
    vae = family.image_encoder(load)
    return {f"reference_{i}": family.encode_image(vae, image)["latents"] for i, image in enumerate(images)}


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_klein_sample_from_a_reference_equals_the_pipelines(klein: Flux2, guidance: float) -> None:
    encoder, pipeline = klein.text_encoder(load), pipeline_of(Flux2KleinPipeline, klein)
    text, negative = klein.encode_text(encoder, "a fox"), klein.encode_text(encoder, "")
    embeds = {
        "prompt_embeds": text["prompt_embeds"].unsqueeze(0),
        "negative_prompt_embeds": negative["prompt_embeds"].unsqueeze(0),
    }
    cfg = SampleConfig(size=(64, 48), steps=4, guidance=guidance)
    assert_sample_equals_the_pipelines(klein, pipeline, text, negative, cfg, embeds, [REFERENCES[0]])


def test_dev_sample_from_two_references_equals_the_pipelines(dev: Flux2) -> None:
    text = dev.encode_text(dev.text_encoder(load), "a fox")
    embeds, cfg = (
        {"prompt_embeds": text["prompt_embeds"].unsqueeze(0)},
        SampleConfig(size=(64, 48), steps=4, guidance=4.0),
    )
    assert_sample_equals_the_pipelines(dev, pipeline_of(Flux2Pipeline, dev), text, None, cfg, embeds, [*REFERENCES])


def assert_sample_equals_the_pipelines(
    family: Flux2,
    pipeline: Any,
    text: Example,
    negative: Example | None,
    cfg: SampleConfig,
    embeds: dict[str, torch.Tensor],
    references: list[Image.Image],
) -> None:
    """The same latents are decoded to the same picture, and without the references to another."""
    vae, model, rng = family.image_encoder(load), model_of(family), SampleRng(3, [0])
    decoded, expected = recorded_decodes(vae), recorded_decodes(pipeline.vae)
    image = family.sample(model, vae, text | encoded(family, *references), negative, cfg, rng)
    theirs = pipeline(
        image=references,
        latents=rng.normal("sample", (16, 3, 4)),
        width=64,
        height=48,
        num_inference_steps=cfg.steps,
        guidance_scale=cfg.guidance,
        **embeds,
    ).images[0]
    torch.testing.assert_close(decoded[-1], expected[-1], atol=1e-6, rtol=1e-6)
    assert_same_picture(image, theirs)
    family.sample(model, vae, text, negative, cfg, rng)
    assert (decoded[-1] - decoded[-2]).abs().max() > 1e-3


def test_loss_with_a_reference_is_the_error_of_the_velocity_of_the_noisy_tokens_alone(klein: Flux2) -> None:
    (item,) = examples(klein, 1)
    item |= encoded(klein, REFERENCES[0])
    model, rng = model_of(klein), SampleRng(5, [8])
    loss = klein.loss(model, batch_of(klein, [item]), rng)
    latents, noise = item["latents"].unsqueeze(0), rng.normal("noise", (16, 2, 4))
    sigma = draw_sigma(ObjectiveConfig(), klein.shift, 8, rng)
    images = [add_noise(latents, noise, sigma), item["reference_0"].unsqueeze(0)]
    ids = [Flux2Pipeline._prepare_latent_ids(latents), Flux2Pipeline._prepare_image_ids(images[1:])]
    predicted = model["transformer"](
        hidden_states=torch.cat([Flux2Pipeline._pack_latents(image) for image in images], dim=1),
        encoder_hidden_states=item["prompt_embeds"].unsqueeze(0),
        timestep=sigma,
        img_ids=torch.cat(ids, dim=1),
        txt_ids=Flux2Pipeline._prepare_text_ids(torch.zeros(1, 48, 96)),
    ).sample[:, :8]
    error = (predicted - Flux2Pipeline._pack_latents(noise - latents)).square().mean()
    torch.testing.assert_close(loss.total, error, atol=1e-6, rtol=0)


def test_examples_share_a_batch_where_their_references_are_of_equal_sizes_in_equal_order(klein: Flux2) -> None:
    (item,) = examples(klein, 1)
    given = [(), REFERENCES[:1], REFERENCES, REFERENCES[::-1]]
    assert [klein.batch_key({**item, **encoded(klein, *images)}) for images in given] == [
        (2, 4, 48),
        (2, 4, 48, (6, 4)),
        (2, 4, 48, (6, 4), (4, 5)),
        (2, 4, 48, (4, 5), (6, 4)),
    ]
