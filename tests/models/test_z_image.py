import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel

from tests.models.common import (
    SAME,
    assert_captions_of_any_length_share_a_batch,
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
from trainer.models.families.z_image import ARCHITECTURES, ZImage
from trainer.models.objectives.flow_matching import Shift, add_noise, draw_sigma
from trainer.rng import SampleRng

CAPTIONS = ["a red fox", "", "a long caption of many words " * 10]


@pytest.fixture(scope="module")
def family(cache) -> ZImage:
    return make("z_image", cache)


@pytest.fixture(scope="module")
def pipeline(family) -> ZImagePipeline:
    return without_bar(ZImagePipeline.from_pretrained(family.folder, local_files_only=True))


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
    torch.testing.assert_close(ours, (mean - 0.1159) * 0.3611, **SAME)
    assert ours.shape == (4, size[1] // 8, size[0] // 8)


@pytest.mark.parametrize("tokens", [48, 16])
@pytest.mark.parametrize("caption", CAPTIONS)
def test_embeddings_of_a_caption_equal_those_the_pipeline_keeps_of_the_padded_one(cache, pipeline, caption, tokens):
    family = make("z_image", cache, max_tokens=tokens)
    embeds = family.encode_text(family.text_encoder(load), caption)["prompt_embeds"]
    with torch.no_grad():
        (theirs,), _ = pipeline.encode_prompt(caption, max_sequence_length=tokens, do_classifier_free_guidance=False)
    torch.testing.assert_close(embeds, theirs, atol=5e-6, rtol=0)
    assert len(embeds) <= tokens


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_sample_equals_the_pipelines_for_the_same_noise_and_one_less_guidance(family, pipeline, guidance):
    vae, encoder = family.image_encoder(load), family.text_encoder(load)
    text, negative = family.encode_text(encoder, "a fox in the snow"), family.encode_text(encoder, "")
    cfg, rng = SampleConfig(size=(64, 48), steps=4, guidance=guidance), SampleRng(3, [0])
    decoded = recorded_decodes(vae), recorded_decodes(pipeline.vae)
    image = family.sample(model_of(family), vae, text, negative, cfg, rng)
    expected = pipeline(
        prompt_embeds=[text["prompt_embeds"]],
        negative_prompt_embeds=[negative["prompt_embeds"]],
        latents=rng.normal("sample", (4, 6, 8)),
        width=64,
        height=48,
        num_inference_steps=4,
        guidance_scale=guidance - 1,
    ).images[0]
    # The model's time is of order 1 and enters its sinusoids 1000-fold: the last bit of 1 - sigma is seen.
    torch.testing.assert_close(decoded[0][-1], decoded[1][-1], atol=5e-4, rtol=0)
    assert_same_picture(image, expected)


@pytest.mark.parametrize(
    ("architecture", "times"), [("z-image", [0.0, 0.05263, 0.14286, 0.33333]), ("z-image-turbo", [0.0, 0.1, 0.25, 0.5])]
)
def test_samples_are_drawn_at_times_from_noise_to_data_shifted_by_6_and_of_turbo_by_3(cache, architecture, times):
    assert sampled_times(make("z_image", cache, architecture=architecture), "t", 32, steps=4) == times


# Loss


def test_loss_is_the_error_of_the_negated_prediction_at_the_drawn_time(family):
    items, model, rng = examples(family, 2), model_of(family), SampleRng(5, [8, 9])
    loss = family.loss(model, batch_of(family, items), rng)
    latents = torch.stack([item["latents"] for item in items])
    sigma = draw_sigma(ObjectiveConfig(shift="constant", shift_factor=3.0), Shift(), 2 * 4, rng)
    noise = rng.normal("noise", (4, 4, 8))
    predicted = model["transformer"](
        list(add_noise(latents, noise, sigma).unsqueeze(2)), 1 - sigma, [item["prompt_embeds"] for item in items]
    ).sample
    errors = (-torch.stack(predicted).squeeze(2) - (noise - latents)).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(loss.total, errors.sum(), atol=1e-5, rtol=0)
    assert loss.weight.item() == 2


def test_captions_of_any_length_share_a_batch_and_cost_what_they_cost_alone(family):
    assert_captions_of_any_length_share_a_batch(family)


def test_every_weight_of_the_tiny_transformer_gets_a_gradient(family):
    model = model_of(family).requires_grad_(True)
    family.loss(model, batch_of(family, examples(family, 1)), SampleRng(0, [0])).total.backward()
    assert [name for name, weight in model.named_parameters() if not weight.grad.abs().sum() > 0] == []


# Model


def test_the_published_architecture_has_its_published_size(family):
    with torch.device("meta"):
        model = ZImageTransformer2DModel()
    config, published = model.config, ARCHITECTURES["z-image"]
    assert (config.n_layers, config.n_refiner_layers, config.dim) == (
        published.num_layers,
        published.num_refiners,
        published.width,
    )
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == 6.155


def test_all_linear_layers_of_the_blocks_but_their_modulation_are_adapted(family):
    layers = [
        name for name, module in family.build("transformer").named_modules() if isinstance(module, torch.nn.Linear)
    ]
    patterns = family.adapter_targets["transformer"]
    left = [name for name in layers if not any(re.fullmatch(pattern, name) for pattern in patterns)]
    assert left == [
        "all_x_embedder.2-1",
        "all_final_layer.2-1.linear",
        "all_final_layer.2-1.adaLN_modulation.1",
        "noise_refiner.0.adaLN_modulation.0",
        "t_embedder.mlp.0",
        "t_embedder.mlp.2",
        "cap_embedder.1",
        "layers.0.adaLN_modulation.0",
        "layers.1.adaLN_modulation.0",
    ]


def test_a_single_file_by_the_layout_is_read_by_diffusers_as_the_same_weights(family, tmp_path):
    assert_diffusers_reads_the_layout(family, ZImageTransformer2DModel, tmp_path)


def test_a_single_file_in_the_original_layout_is_the_same_model(family, tmp_path):
    assert_original_file_is_read(family, tmp_path)


# Errors


def test_a_model_that_reads_features_of_other_pictures_is_refused(cache, copied):
    edit_json(copied / "transformer" / "config.json", siglip_feat_dim=32)
    assert refusal("z_image", cache, str(copied)) == (
        f"model.path {copied}: the transformer reads SigLIP features of other images; "
        "only text-to-image models are trained, use Z-Image or Z-Image-Turbo"
    )


def test_parts_of_different_models_are_refused(cache, copied):
    edit_json(copied / "text_encoder" / "config.json", hidden_size=64)
    assert refusal("z_image", cache, str(copied)) == (
        f"model.path {copied}: the transformer reads 4 latent channels and 32 text features, "
        "but vae and text_encoder give 4 and 64; download the folder again"
    )


def test_a_model_of_another_family_is_refused(cache, copied):
    edit_json(copied / "transformer" / "config.json", _class_name="SD3Transformer2DModel")
    assert refusal("z_image", cache, str(copied)) == (
        f"model.path {copied}: transformer/config.json describes a SD3Transformer2DModel, "
        "not a ZImageTransformer2DModel; set model.family to the family of that model"
    )


def test_an_architecture_that_the_folder_does_not_hold_is_refused(cache, copied):
    assert refusal("z_image", cache, str(copied), architecture="z-image-turbo") == (
        "model.options.architecture: z-image-turbo has 30 + 2 x 2 blocks of width 3840, "
        f"but {copied} has 2 + 2 x 1 blocks of width 24; leave it empty or set model.path to z-image-turbo"
    )


def test_the_fingerprint_follows_the_encoders_and_the_length_of_captions(cache, copied):
    first = make("z_image", cache, str(copied)).fingerprint()
    assert make("z_image", cache, str(copied), max_tokens=64).fingerprint() != first
    edit_json(copied / "text_encoder" / "config.json", hidden_act="silu", rms_norm_eps=1e-5)
    assert make("z_image", cache, str(copied)).fingerprint() != first
