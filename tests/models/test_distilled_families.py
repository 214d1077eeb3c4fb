"""Distilled models are drawn as their own pipelines draw them: in few steps, with one call of the network in each."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from diffusers import EulerDiscreteScheduler

from tests.audit.families import REFERENCES
from tests.models.common import IMAGES, assert_same_picture, edit_json, load, make, model_of
from trainer.config.sections import SampleConfig
from trainer.rng import SampleRng

PLAIN = {"guidance_scale": 0.0}
TURBO = {
    "unet/config.json": {"sample_size": 64},
    "scheduler/scheduler_config.json": {"timestep_spacing": "trailing"},
}
SIGMAS = {"model_index.json": {"sample_sigmas": [1.0, 0.98, 0.95, 0.93, 0.9, 0.85, 0.7, 0.4]}}
"""Of the kind of Qwen-Image-2.1-Turbo's own noise levels."""
MODELS: dict[str, tuple[str, dict[str, Any], Mapping[str, dict[str, Any]], int, dict[str, Any]]] = {
    "klein": ("flux2", {}, {"model_index.json": {"is_distilled": True}}, 4, {}),
    "schnell": ("flux1", {"architecture": "schnell"}, {}, 4, PLAIN),
    "z-image-turbo": ("z_image", {"architecture": "z-image-turbo"}, {}, 8, PLAIN),
    "sd35-large-turbo": ("sd3", {"architecture": "sd35-large", "distilled": True}, {}, 4, PLAIN),
    "sdxl-turbo": ("sdxl", {}, TURBO, 4, PLAIN),
    "ernie-image-turbo": ("ernie_image", {"distilled": True}, {}, 8, {"guidance_scale": 1.0}),
    "krea-2-turbo": ("krea2", {}, {"model_index.json": {"is_distilled": True}}, 8, PLAIN),
    "qwen-image-2.1-turbo": ("qwen_image_21", {"distilled": True}, SIGMAS, 8, {"true_cfg_scale": 1.0}),
    "qwen-image-lightning": ("qwen_image", {"distilled": True}, {}, 8, {"true_cfg_scale": 1.0}),
}
"""{name: family, its options, what its published folder says otherwise than the tiny one, its published steps, what its
published example says of guidance}."""


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of the pipeline's own scheduler
@pytest.mark.parametrize("name", MODELS)
def test_a_distilled_model_is_drawn_as_its_pipeline_draws_it_with_one_call_per_step(
    name: str, tmp_path: Path, cache: Path
) -> None:
    kind, options, edits, steps, call = MODELS[name]
    family = make(kind, cache, **options)
    if edits:
        copy = shutil.copytree(family.folder, tmp_path / "model")
        for file, changes in edits.items():
            edit_json(copy / file, **changes)
        family = make(kind, cache, str(copy), **options)
    encoder, vae, model = family.text_encoder(load), family.image_encoder(load), model_of(family)
    text, negative = family.encode_text(encoder, "a fox"), family.encode_text(encoder, "")
    calls: list[Any] = []
    model[family.components[0]].register_forward_hook(lambda *_: calls.append(None))
    rng, sample = SampleRng(3, [2]), SampleConfig(size=(64, 32), guidance=4.0)
    ours = family.sample(model, vae, text, negative, sample, rng)
    reference = REFERENCES[kind](family.folder, {})
    if name == "sdxl-turbo":  # without the noise that its ancestral sampler adds in each step
        reference.pipeline.scheduler = EulerDiscreteScheduler.from_config(reference.pipeline.scheduler.config)
    noise = rng.normal("sample", tuple(family.encode_image(vae, ours)["latents"].shape))[0]
    theirs = reference.picture(noise, 64, 32, {"prompt": "a fox", "num_inference_steps": steps, **call})
    assert len(calls) == steps
    assert_same_picture(ours, theirs)


def test_a_base_model_is_drawn_as_before_where_steps_and_guidance_are_empty(cache: Path) -> None:
    for name in IMAGES:
        family = make(name, cache)
        drawn = family.complete_sample(SampleConfig(negative="grey", seed=3))
        guidance = {"qwen_image_21": 1.0}.get(family.config.family, 4.0)
        assert (drawn.steps, drawn.guidance, drawn.negative, drawn.seed) == (28, guidance, "grey", 3)
        assert not family.is_distilled
