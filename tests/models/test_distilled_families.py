"""Distilled models are drawn as their own pipelines draw them: in few steps, with one call of the network in each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    EulerDiscreteScheduler,
    Flux2KleinPipeline,
    FluxPipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    ZImagePipeline,
)

from tests.models.common import IMAGES, assert_same_picture, edit_json, load, make, model_of, without_bar
from trainer.config.sections import SampleConfig
from trainer.rng import SampleRng

SIZE = {"width": 64, "height": 32}


def klein(folder: Path, cache: Path) -> Any:
    """As the published folder of a distilled klein says it."""
    copy = shutil.copytree(make("flux2", cache).folder, folder / "klein")
    edit_json(copy / "model_index.json", is_distilled=True)
    return make("flux2", cache, str(copy))


def sdxl(folder: Path, cache: Path) -> Any:
    """As the published folder of SDXL-Turbo says it."""
    copy = shutil.copytree(make("sdxl", cache).folder, folder / "turbo")
    edit_json(copy / "unet" / "config.json", sample_size=64)
    edit_json(copy / "scheduler" / "scheduler_config.json", timestep_spacing="trailing")
    return make("sdxl", cache, str(copy))


MODELS = {
    "klein": (klein, Flux2KleinPipeline, 4, {"max_sequence_length": 48, "text_encoder_out_layers": (1, 2, 3)}),
    "schnell": (
        lambda _, cache: make("flux1", cache, architecture="schnell"),
        FluxPipeline,
        4,
        {"guidance_scale": 0.0, "max_sequence_length": 32},
    ),
    "z-image-turbo": (
        lambda _, cache: make("z_image", cache, architecture="z-image-turbo"),
        ZImagePipeline,
        8,
        {"guidance_scale": 0.0, "max_sequence_length": 48},
    ),
    "sd35-large-turbo": (
        lambda _, cache: make("sd3", cache, architecture="sd35-large", distilled=True),
        StableDiffusion3Pipeline,
        4,
        {"guidance_scale": 0.0, "max_sequence_length": 32},
    ),
    "sdxl-turbo": (sdxl, StableDiffusionXLPipeline, 4, {"guidance_scale": 0.0}),
    "qwen-image-lightning": (
        lambda _, cache: make("qwen_image", cache, distilled=True),
        QwenImagePipeline,
        8,
        {"true_cfg_scale": 1.0, "max_sequence_length": 48},
    ),
}
"""{name: how the family is made, the pipeline, its published steps, what else its published example says}. Captions are
cut to the length of the tiny tokenizers."""


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of the pipeline's own scheduler
@pytest.mark.parametrize("name", MODELS)
def test_a_distilled_model_is_drawn_as_its_pipeline_draws_it_with_one_call_per_step(
    name: str, tmp_path: Path, cache: Path
) -> None:
    making, pipeline_class, steps, settings = MODELS[name]
    family = making(tmp_path, cache)
    encoder, vae, model = family.text_encoder(load), family.image_encoder(load), model_of(family)
    text, negative = family.encode_text(encoder, "a fox"), family.encode_text(encoder, "")
    calls: list[Any] = []
    model[family.components[0]].register_forward_hook(lambda *_: calls.append(None))
    sample = SampleConfig(size=(SIZE["width"], SIZE["height"]), guidance=4.0)
    ours = family.sample(model, vae, text, negative, sample, SampleRng(3, [2]))
    pipeline = without_bar(pipeline_class.from_pretrained(family.folder, local_files_only=True))
    if name == "sdxl-turbo":  # without the noise that its ancestral sampler adds in each step
        pipeline.scheduler = EulerDiscreteScheduler.from_config(pipeline.scheduler.config)
    theirs = pipeline(
        prompt="a fox", num_inference_steps=steps, generator=torch_generator(3, 2), **SIZE, **settings
    ).images[0]
    assert len(calls) == steps
    assert_same_picture(ours, theirs)


def torch_generator(seed: int, number: int) -> torch.Generator:
    (generator,) = SampleRng(seed, [number]).generators("sample")
    return generator


def test_a_base_model_is_drawn_as_before_where_steps_and_guidance_are_empty(cache: Path) -> None:
    for name in IMAGES:
        family = make(name, cache)
        drawn = family.complete_sample(SampleConfig(negative="grey", seed=3))
        assert (drawn.steps, drawn.guidance, drawn.negative, drawn.seed) == (28, 4.0, "grey", 3)
        assert not family.is_distilled
