import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors.torch import save_file
from transformers import CLIPTextModel

from tests.models.common import (
    SAME,
    assert_diffusers_reads_the_layout,
    assert_original_file_is_read,
    assert_same_picture,
    batch_of,
    edit_json,
    examples,
    load,
    make,
    model_of,
    picture,
    recorded_decodes,
    refusal,
    sampled_times,
    without_bar,
)
from trainer.config.sections import ObjectiveConfig, SampleConfig
from trainer.models.families.flux1 import ARCHITECTURES, Flux1, image_ids
from trainer.models.objectives.flow_matching import Shift, add_noise, draw_sigma, shift_factor
from trainer.models.parts.image.images import pack, patchify, unpack, unpatchify
from trainer.rng import SampleRng

CAPTIONS = ["a red fox", "", "a long caption of many words " * 10]


@pytest.fixture(scope="module")
def dev(cache) -> Flux1:
    return make("flux1", cache)


@pytest.fixture(scope="module")
def schnell(cache) -> Flux1:
    return make("flux1", cache, architecture="schnell")


def pipeline_of(family: Flux1) -> FluxPipeline:
    return without_bar(FluxPipeline.from_pretrained(family.folder, local_files_only=True))


@pytest.fixture(scope="module")
def pipeline(dev) -> FluxPipeline:
    return pipeline_of(dev)


@pytest.fixture
def copied(dev, tmp_path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(dev.folder, tmp_path / "model"))


# Recipe: equal to diffusers' own pipeline


def test_tokens_of_latents_equal_the_pipelines_and_come_back():
    latents = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    tokens = pack(patchify(latents))
    assert tokens.equal(FluxPipeline._pack_latents(latents, 2, 4, 6, 8))
    assert unpatchify(unpack(tokens, 3, 4)).equal(latents)


def test_image_ids_equal_the_pipelines():
    assert image_ids(3, 5).equal(FluxPipeline._prepare_latent_image_ids(1, 3, 5, "cpu", torch.int64))


@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_encoded_image_is_the_mean_of_the_posterior_shifted_and_scaled(dev, pipeline, size):
    image = picture(*size)
    ours = dev.encode_image(dev.image_encoder(load), image)["latents"]
    with torch.no_grad():
        mean = pipeline.vae.encode(pipeline.image_processor.preprocess(image)).latent_dist.mean[0]
    torch.testing.assert_close(ours, (mean - 0.1159) * 0.3611, **SAME)
    assert ours.shape == (4, size[1] // 8, size[0] // 8)


@pytest.mark.parametrize("tokens", [None, 16])
@pytest.mark.parametrize("caption", CAPTIONS)
def test_embeddings_of_a_caption_equal_the_pipelines(cache, pipeline, caption, tokens):
    family = make("flux1", cache, max_tokens=tokens)
    ours = family.encode_text(family.text_encoder(load), caption)
    with torch.no_grad():
        words, pooled, _ = pipeline.encode_prompt(caption, max_sequence_length=tokens or 32)
    torch.testing.assert_close(ours["prompt_embeds"], words[0], **SAME)
    torch.testing.assert_close(ours["pooled_embeds"], pooled[0], **SAME)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sample_equals_the_pipelines_for_the_same_noise(cache, name):
    family = make("flux1", cache, architecture=name)
    pipeline, vae = pipeline_of(family), family.image_encoder(load)
    text = family.encode_text(family.text_encoder(load), "a fox")
    cfg, rng = SampleConfig(size=(64, 48), steps=4, guidance=2.5), SampleRng(3, [0])
    decoded = recorded_decodes(vae), recorded_decodes(pipeline.vae)
    image = family.sample(model_of(family), vae, text, text, cfg, rng)
    expected = pipeline(
        prompt_embeds=text["prompt_embeds"].unsqueeze(0),
        pooled_prompt_embeds=text["pooled_embeds"].unsqueeze(0),
        latents=pack(patchify(rng.normal("sample", (4, 6, 8)))),
        width=64,
        height=48,
        num_inference_steps=4,
        guidance_scale=2.5,
    ).images[0]
    torch.testing.assert_close(decoded[0][-1], decoded[1][-1], atol=1e-6, rtol=1e-6)
    assert_same_picture(image, expected)


def test_dev_draws_shifted_noise_levels_and_schnell_equally_spaced_ones(dev, schnell):
    shift = math.exp(0.5)  # at 256 tokens
    shifted = [shift * s / (1 + (shift - 1) * s) for s in (1, 0.75, 0.5, 0.25)]
    assert sampled_times(dev, "timestep", 256, steps=4) == pytest.approx(shifted, abs=1e-5)
    assert sampled_times(schnell, "timestep", 256, steps=4) == pytest.approx([1, 0.75, 0.5, 0.25])


# Loss


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_loss_is_the_error_of_the_transformers_velocity_at_the_drawn_timestep(cache, guidance):
    family = make("flux1", cache, objective=ObjectiveConfig(guidance=guidance))
    items, model, rng = examples(family, 2), model_of(family), SampleRng(5, [8, 9])
    loss = family.loss(model, batch_of(family, items), rng)
    latents = torch.stack([item["latents"] for item in items])
    noise, sigma = rng.normal("noise", (4, 4, 8)), draw_sigma(ObjectiveConfig(shift="linear"), Shift(), 2 * 4, rng)
    predicted = model["transformer"](
        hidden_states=FluxPipeline._pack_latents(add_noise(latents, noise, sigma), 2, 4, 4, 8),
        encoder_hidden_states=torch.stack([item["prompt_embeds"] for item in items]),
        pooled_projections=torch.stack([item["pooled_embeds"] for item in items]),
        timestep=sigma,
        guidance=torch.full((2,), guidance),
        img_ids=FluxPipeline._prepare_latent_image_ids(2, 2, 4, "cpu", torch.float32),
        txt_ids=torch.zeros(32, 3),
    ).sample
    errors = (predicted - FluxPipeline._pack_latents(noise - latents, 2, 4, 4, 8)).square().mean(dim=(1, 2))
    torch.testing.assert_close(loss.total, errors.sum(), atol=1e-5, rtol=0)
    assert loss.weight.item() == 2


def test_training_timesteps_of_a_1024_pixel_image_are_shifted_by_e_to_the_1_15(dev):
    assert shift_factor(dev.objective, dev.shift, 64 * 64) == pytest.approx(math.exp(1.15))


def test_guidance_which_schnell_is_never_told_is_refused(cache):
    assert refusal("flux1", cache, architecture="schnell", objective=ObjectiveConfig(guidance=3.5)).startswith(
        "objective.guidance: is not used by this kind of model; leave it out. It reads objective.density, "
    )


# Model


@pytest.mark.parametrize(("name", "billions"), [("dev", 11.901), ("schnell", 11.891)])
def test_published_architectures_have_their_published_size(name, billions):
    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=ARCHITECTURES[name].guidance_embeds)
    assert len(model.transformer_blocks) == ARCHITECTURES[name].num_layers
    assert len(model.single_transformer_blocks) == ARCHITECTURES[name].num_single_layers
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == billions


@pytest.mark.parametrize(("name", "tokens"), [("dev", 512), ("schnell", 256)])
def test_a_model_on_disk_reads_captions_of_its_published_length_or_its_tokenizers(cache, copied, name, tokens):
    tiny = make("flux1", cache, architecture=name)
    family = make("flux1", cache, str(shutil.copytree(tiny.folder, copied, dirs_exist_ok=True)))
    tokenizer = copied / "tokenizer_2" / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text().replace('"model_max_length": 32', '"model_max_length": 512'))
    longer = make("flux1", cache, str(copied))
    for made, length in ((family, 32), (longer, tokens)):
        assert made.encode_text(made.text_encoder(load), "a fox")["prompt_embeds"].shape == (length, 32)
    assert family.model_spec == f"flux-1-{name}"


def test_clip_weights_are_found_with_and_without_the_prefix_of_published_files(dev, copied, cache):
    file = copied / "text_encoder" / "model.safetensors"
    model = CLIPTextModel.from_pretrained(dev.folder / "text_encoder")
    save_file({f"text_model.{name}": tensor for name, tensor in model.state_dict().items()}, file)
    found = make("flux1", cache, str(copied)).text_encoder(load).clip.model
    assert all(tensor.equal(found.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_a_single_file_by_the_layout_is_read_by_diffusers_as_the_same_weights(cache, copied, tmp_path):
    """At the width that diffusers' converter is written for."""
    edit_json(
        copied / "transformer" / "config.json",
        **{"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 24, "attention_head_dim": 128},
        **{"axes_dims_rope": [16, 56, 56]},
    )
    assert_diffusers_reads_the_layout(make("flux1", cache, str(copied)), FluxTransformer2DModel, tmp_path)


def test_a_single_file_in_the_original_layout_is_the_same_model(dev, tmp_path):
    assert_original_file_is_read(dev, tmp_path)


# Errors


def test_a_model_that_reads_other_images_besides_is_refused(cache, copied):
    edit_json(copied / "transformer" / "config.json", in_channels=96)
    assert refusal("flux1", cache, str(copied)) == (
        f"model.path {copied}: the transformer reads 96 channels, the autoencoder gives 16; "
        "only text-to-image models are trained, use dev or schnell"
    )


def test_a_model_of_another_family_is_refused(cache, copied):
    edit_json(copied / "transformer" / "config.json", _class_name="SD3Transformer2DModel")
    assert refusal("flux1", cache, str(copied)) == (
        f"model.path {copied}: transformer/config.json describes a SD3Transformer2DModel, "
        "not a FluxTransformer2DModel; set model.family to the family of that model"
    )


@pytest.mark.parametrize(("component", "expected"), [("text_encoder", "clip_text_model"), ("text_encoder_2", "t5")])
def test_a_text_encoder_of_another_kind_is_refused(cache, copied, component, expected):
    edit_json(copied / component / "config.json", model_type="qwen3")
    assert refusal("flux1", cache, str(copied)) == (
        f"model.path {copied}: {component}/config.json describes a qwen3 text encoder, expected {expected}; "
        "download the folder again"
    )


def test_an_architecture_that_the_folder_does_not_hold_is_refused(cache, copied):
    assert refusal("flux1", cache, str(copied), architecture="schnell") == (
        "model.options.architecture: schnell has 19 + 38 blocks without guidance embedding, "
        f"but {copied} has 1 + 2 blocks with guidance embedding; leave it empty or set model.path to schnell"
    )


def test_a_folder_that_lacks_a_tokenizer_is_refused(cache, copied):
    (copied / "tokenizer_2" / "tokenizer_config.json").unlink()
    assert refusal("flux1", cache, str(copied)) == (
        f"model.path {copied}: no tokenizer_2/tokenizer_config.json; expected a diffusers folder. "
        "Download it or set model.path: tiny"
    )


def test_the_fingerprint_follows_the_encoders_and_the_length_of_captions(cache, copied):
    first = make("flux1", cache, str(copied)).fingerprint()
    assert make("flux1", cache, str(copied), max_tokens=64).fingerprint() != first
    config = copied / "text_encoder_2" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()), indent=4))
    assert make("flux1", cache, str(copied)).fingerprint() != first
