import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

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
    without_bar,
)
from trainer.config.sections import ObjectiveConfig, SampleConfig
from trainer.models.families.sd3 import ARCHITECTURES, Sd3
from trainer.models.objectives.flow_matching import Shift, add_noise, draw_sigma, shift_sigma
from trainer.rng import SampleRng

CAPTIONS = ["a red fox", "", "a long caption of many words " * 10]


@pytest.fixture(scope="module")
def family(cache) -> Sd3:
    return make("sd3", cache)


@pytest.fixture(scope="module")
def pipeline(family) -> StableDiffusion3Pipeline:
    return pipeline_of(family)


def pipeline_of(family: Sd3, **changes) -> StableDiffusion3Pipeline:
    return without_bar(StableDiffusion3Pipeline.from_pretrained(family.folder, local_files_only=True, **changes))


@pytest.fixture
def copied(family, tmp_path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(family.folder, tmp_path / "model"))


# Recipe: equal to diffusers' own pipeline


@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_encoded_image_is_the_mean_of_the_posterior_shifted_and_scaled(family, pipeline, size):
    image = picture(*size)
    ours = family.encode_image(family.image_encoder(load), image)["latents"]
    with torch.no_grad():
        mean = pipeline.vae.encode(pipeline.image_processor.preprocess(image)).latent_dist.mean[0]
    torch.testing.assert_close(ours, (mean - 0.0609) * 1.5305, **SAME)
    assert ours.shape == (4, size[1] // 8, size[0] // 8)


@pytest.mark.parametrize("tokens", [None, 16])
@pytest.mark.parametrize("caption", CAPTIONS)
def test_embeddings_of_a_caption_equal_the_pipelines(cache, pipeline, caption, tokens):
    assert_embeddings_equal(make("sd3", cache, max_tokens=tokens), pipeline, caption, tokens or 32)


def test_without_the_third_text_encoder_its_embeddings_are_zeros_as_in_the_pipeline(cache, family):
    pipeline = pipeline_of(family, text_encoder_3=None, tokenizer_3=None)
    assert_embeddings_equal(make("sd3", cache, without=("text_encoder_3",)), pipeline, "a red fox", 32)


def test_a_folder_without_third_text_encoder_is_read_as_one_that_leaves_it_out(cache, family, copied):
    shutil.rmtree(copied / "text_encoder_3")
    shutil.rmtree(copied / "tokenizer_3")
    pipeline = pipeline_of(family, text_encoder_3=None, tokenizer_3=None)
    assert_embeddings_equal(make("sd3", cache, str(copied)), pipeline, "a red fox", 256)


def assert_embeddings_equal(family: Sd3, pipeline: StableDiffusion3Pipeline, caption: str, tokens: int) -> None:
    ours = family.encode_text(family.text_encoder(load), caption)
    with torch.no_grad():
        states, _, pooled, _ = pipeline.encode_prompt(
            caption, None, None, max_sequence_length=tokens, do_classifier_free_guidance=False
        )
    torch.testing.assert_close(ours["prompt_embeds"], states[0], **SAME)
    torch.testing.assert_close(ours["pooled_embeds"], pooled[0], **SAME)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sample_equals_the_pipelines_for_the_same_noise(cache, name, guidance):
    family = make("sd3", cache, architecture=name)
    pipeline, vae, encoder = pipeline_of(family), family.image_encoder(load), family.text_encoder(load)
    text, negative = family.encode_text(encoder, "a fox"), family.encode_text(encoder, "grey")
    cfg, rng = SampleConfig(size=(64, 48), steps=5, guidance=guidance), SampleRng(3, [0])
    decoded = recorded_decodes(vae), recorded_decodes(pipeline.vae)
    image = family.sample(model_of(family), vae, text, negative, cfg, rng)
    expected = pipeline(
        prompt_embeds=text["prompt_embeds"].unsqueeze(0),
        pooled_prompt_embeds=text["pooled_embeds"].unsqueeze(0),
        negative_prompt_embeds=negative["prompt_embeds"].unsqueeze(0),
        negative_pooled_prompt_embeds=negative["pooled_embeds"].unsqueeze(0),
        latents=rng.normal("sample", (4, 6, 8)),
        width=64,
        height=48,
        num_inference_steps=5,
        guidance_scale=guidance,
    ).images[0]
    torch.testing.assert_close(decoded[0][-1], decoded[1][-1], atol=1e-5, rtol=1e-5)
    assert_same_picture(image, expected)


# Loss


def test_loss_is_the_error_of_the_transformers_velocity_at_the_drawn_timestep(family):
    items, model, rng = examples(family, 2), model_of(family), SampleRng(5, [8, 9])
    loss = family.loss(model, batch_of(family, items), rng)
    latents = torch.stack([item["latents"] for item in items])
    objective = ObjectiveConfig(shift="constant", shift_factor=3.0)
    noise, sigma = rng.normal("noise", (4, 4, 8)), draw_sigma(objective, Shift(), 8, rng)
    assert sigma.equal(shift_sigma(draw_sigma(ObjectiveConfig(shift="none"), Shift(), 8, rng), 3.0))
    predicted = model["transformer"](
        hidden_states=add_noise(latents, noise, sigma),
        encoder_hidden_states=torch.stack([item["prompt_embeds"] for item in items]),
        pooled_projections=torch.stack([item["pooled_embeds"] for item in items]),
        timestep=sigma * 1000,
    ).sample
    errors = (predicted - (noise - latents)).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(loss.total, errors.sum(), atol=1e-5, rtol=0)
    assert loss.weight.item() == 2


def test_only_what_the_last_block_asks_for_the_text_gets_no_gradient_and_is_never_trained(family):
    model = model_of(family).requires_grad_(True)
    family.loss(model, batch_of(family, examples(family, 1)), SampleRng(0, [0])).total.backward()
    gradients = {name: weight.grad for name, weight in model["transformer"].named_parameters()}
    silent = [name for name, gradient in gradients.items() if not gradient.abs().sum() > 0]
    last = "transformer_blocks.1.attn"
    assert silent == [f"{last}.add_q_proj.weight", f"{last}.add_q_proj.bias", f"{last}.norm_added_q.weight"]
    assert silent == [name for name in gradients if any(re.fullmatch(p, name) for p in family.never_trained)]


# Model


@pytest.mark.parametrize(
    ("name", "dual", "positions", "billions"),
    [("sd3-medium", (), 192, 2.028), ("sd35-medium", tuple(range(13)), 384, 2.243), ("sd35-large", (), 192, 8.057)],
)
def test_published_architectures_have_their_published_size(name, dual, positions, billions):
    published = ARCHITECTURES[name]
    with torch.device("meta"):
        model = SD3Transformer2DModel(
            num_layers=published.num_layers,
            num_attention_heads=published.num_layers,
            caption_projection_dim=64 * published.num_layers,
            dual_attention_layers=dual,
            qk_norm="rms_norm" if published.qk_norm else None,
            pos_embed_max_size=positions,
        )
    assert len(dual) == published.num_dual_layers
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == billions


def test_a_folder_is_known_by_its_architecture_and_named_by_it_in_exported_files(cache, copied):
    blocks = {"num_layers": 24, "dual_attention_layers": list(range(13))}
    edit_json(copied / "transformer" / "config.json", **blocks)
    family = make("sd3", cache, str(copied), architecture="sd35-medium")
    assert family.model_spec == "stable-diffusion-3-5-medium"


def test_position_embeddings_are_read_from_the_file(family):
    weights = model_of(family)["transformer"].state_dict()["pos_embed.pos_embed"]
    assert weights.shape == (1, 32 * 32, 32)
    assert weights.equal(
        SD3Transformer2DModel.from_pretrained(family.folder, subfolder="transformer").pos_embed.pos_embed
    )


@pytest.mark.parametrize("name", ["sd3-medium", "sd35-medium"])
def test_a_single_file_by_the_layout_is_read_by_diffusers_as_the_same_weights(cache, tmp_path, name):
    family = make("sd3", cache, architecture=name)
    assert_diffusers_reads_the_layout(family, SD3Transformer2DModel, tmp_path)


def test_a_single_file_in_the_original_layout_is_the_same_model(family, tmp_path):
    assert_original_file_is_read(family, tmp_path)


# Errors


def test_a_model_of_another_family_is_refused(cache, copied):
    edit_json(copied / "transformer" / "config.json", _class_name="FluxTransformer2DModel")
    assert refusal("sd3", cache, str(copied)) == (
        f"model.path {copied}: transformer/config.json describes a FluxTransformer2DModel, "
        "not a SD3Transformer2DModel; set model.family to the family of that model"
    )


def test_an_architecture_that_the_folder_does_not_hold_is_refused(cache, copied):
    assert refusal("sd3", cache, str(copied), architecture="sd35-large") == (
        "model.options.architecture: sd35-large has 38 blocks, 0 of them with two attentions, with query-key norm, "
        f"but {copied} has 2 blocks, 1 of them with two attentions, with query-key norm; "
        "leave it empty or set model.path to sd35-large"
    )


def test_only_the_third_text_encoder_can_be_left_out(cache):
    assert refusal("sd3", cache, without=("text_encoder",)) == (
        "model.options.without: 'text_encoder' is not one of text_encoder_3; did you mean 'text_encoder_3'?"
    )


def test_the_fingerprint_follows_the_encoders_and_what_is_left_out(cache, copied):
    first = make("sd3", cache, str(copied)).fingerprint()
    assert make("sd3", cache, str(copied), without=("text_encoder_3",)).fingerprint() != first
    config = copied / "text_encoder_2" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()), indent=4))
    assert make("sd3", cache, str(copied)).fingerprint() != first
