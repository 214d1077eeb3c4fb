"""What only ERNIE-Image does; the rest is the contract of test_flow_transformers.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLFlux2
from safetensors.torch import load_file, save_file

from tests.audit.families import REFERENCES
from tests.models.common import (
    assert_padding_is_read_by_no_token,
    edit_json,
    load,
    make,
    model_of,
    picture,
    recorded_decodes,
)
from trainer.config.sections import SampleConfig
from trainer.models.objectives.flow_matching import shift_factor
from trainer.rng import SampleRng


@pytest.fixture
def copied(cache: Path, tmp_path: Path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(make("ernie_image", cache).folder, tmp_path / "model"))


def test_both_models_are_trained_at_the_shift_of_the_base_models_sampler(cache: Path, copied: Path) -> None:
    """That of scheduler/scheduler_config.json of baidu/ERNIE-Image, for images of any size."""
    edit_json(copied / "scheduler" / "scheduler_config.json", shift=1.0)
    for family in (make("ernie_image", cache), make("ernie_image", cache, str(copied), distilled=True)):
        assert [shift_factor(family.objective, family.shift, tokens) for tokens in (64, 4096)] == [4.0, 4.0]


def test_captions_of_unequal_length_are_drawn_as_the_pipeline_draws_them_in_one_pass(cache: Path) -> None:
    """The pipeline pads the shorter one of prompt and negative prompt, and runs the transformer on both at once."""
    family = make("ernie_image", cache)
    encoder, vae = family.text_encoder(load), family.image_encoder(load)
    prompt, negative = "a red fox in the snow of a long winter", "grey"
    text, other = (family.encode_text(encoder, caption) for caption in (prompt, negative))
    assert len(text["prompt_embeds"]) > len(other["prompt_embeds"])
    reference = REFERENCES["ernie_image"](family.folder, {})
    rng, ours, theirs = SampleRng(3, [0]), recorded_decodes(vae), recorded_decodes(reference.pipeline.vae)
    family.sample(model_of(family), vae, text, other, SampleConfig(size=(64, 48), steps=3, guidance=2.0), rng)
    call = {"prompt": prompt, "negative_prompt": negative, "num_inference_steps": 3, "guidance_scale": 2.0}
    reference.picture(rng.normal("sample", (16, 3, 4))[0], 64, 48, call)
    torch.testing.assert_close(ours[-1], theirs[-1], atol=1e-5, rtol=1e-5)


def test_padding_to_the_longest_caption_of_a_batch_is_read_by_no_token_and_moves_no_image(cache: Path) -> None:
    family = make("ernie_image", cache)
    model = model_of(family)
    noisy, sigma, batch, after = assert_padding_is_read_by_no_token(family, model, (16, 4, 4))
    # The image's first position is the length of its caption: one token more in front changes the prediction.
    batch["prompt_tokens"][0] += 1
    assert (family.predict(model, noisy, sigma, batch, 1.0)[0] - after[0]).abs().max() > 1e-3


@pytest.mark.parametrize(("bos", "first"), [(None, 0), ("<|im_start|>", 1)])
def test_an_empty_caption_is_one_token(cache: Path, copied: Path, bos: str | None, first: int) -> None:
    edit_json(copied / "tokenizer" / "tokenizer_config.json", bos_token=bos)
    family = make("ernie_image", cache, str(copied))
    encoder = family.text_encoder(load)
    seen: list[list[int]] = []
    encoder.model.embed_tokens.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].tolist()[0]))
    assert family.encode_text(encoder, "")["prompt_embeds"].shape == (1, 32)
    assert seen == [[first]]


def test_latents_are_normalised_as_the_model_was_trained_whatever_the_autoencoders_config_says(
    cache: Path, copied: Path
) -> None:
    image, config = picture(64, 64), AutoencoderKLFlux2.load_config(copied / "vae")
    assert config["batch_norm_eps"] == 1e-4
    families = [make("ernie_image", cache, str(copied))]
    edit_json(copied / "vae" / "config.json", batch_norm_eps=1e-5)
    families.append(make("ernie_image", cache, str(copied)))
    first, second = (family.encode_image(family.image_encoder(load), image)["latents"] for family in families)
    assert first.equal(second)


def test_a_single_file_of_comfyui_with_a_prefix_is_read(cache: Path, tmp_path: Path) -> None:
    """Its names after the prefix are those of diffusers."""
    family = make("ernie_image", cache)
    tensors = load_file(family.folder / "transformer" / "diffusion_pytorch_model.safetensors")
    file = tmp_path / "checkpoint.safetensors"
    others = {"vae.bn.running_mean": torch.zeros(16)}
    save_file({f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()} | others, file)
    made = make("ernie_image", cache, str(file), base=str(family.folder))
    assert made.weights("transformer").entries.keys() == tensors.keys()
