import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file

from tests.models.common import (
    assert_captions_of_any_length_share_a_batch,
    assert_diffusers_reads_the_layout,
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
from trainer.models.families.qwen_image import ARCHITECTURES, TEMPLATE, TEMPLATE_TOKENS, QwenImage
from trainer.models.objectives.flow_matching import Shift, add_noise, draw_sigma
from trainer.models.parts.image.images import pack, patchify
from trainer.rng import SampleRng

CAPTIONS = ["a red fox", "", "a long caption of many words " * 10]


@pytest.fixture(scope="module")
def family(cache) -> QwenImage:
    return make("qwen_image", cache)


@pytest.fixture(scope="module")
def pipeline(family) -> QwenImagePipeline:
    return without_bar(QwenImagePipeline.from_pretrained(family.folder, local_files_only=True))


@pytest.fixture
def copied(family, tmp_path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(family.folder, tmp_path / "model"))


# Recipe: equal to diffusers' own pipeline


def test_the_template_and_its_length_are_the_pipelines(pipeline):
    assert pipeline.prompt_template_encode == TEMPLATE
    assert pipeline.prompt_template_encode_start_idx == TEMPLATE_TOKENS


@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_encoded_image_is_the_mean_of_the_posterior_normalised_by_channel(family, pipeline, size):
    image = picture(*size)
    ours = family.encode_image(family.image_encoder(load), image)["latents"]
    with torch.no_grad():
        film = pipeline.image_processor.preprocess(image).unsqueeze(2)
        mean = pipeline.vae.encode(film).latent_dist.mean[0, :, 0]
    center, scale = (torch.tensor(pipeline.vae.config[f"latents_{name}"]).view(4, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(ours, (mean - center) / scale, atol=1e-5, rtol=0)
    assert ours.shape == (4, size[1] // 8, size[0] // 8)


@pytest.mark.parametrize("tokens", [48, 16])
@pytest.mark.parametrize("caption", CAPTIONS)
def test_embeddings_of_a_caption_equal_the_pipelines(cache, pipeline, caption, tokens):
    family = make("qwen_image", cache, max_tokens=tokens)
    embeds = family.encode_text(family.text_encoder(load), caption)["prompt_embeds"]
    with torch.no_grad():
        theirs, mask = pipeline.encode_prompt(caption, max_sequence_length=tokens)
    torch.testing.assert_close(embeds, theirs[0], atol=5e-6, rtol=0)
    assert mask is None
    assert len(embeds) <= tokens


def test_the_language_model_is_found_in_files_and_configs_of_both_ages(cache, family, copied):
    """Those of the published folder name the tower `visual`, and its config is flat."""
    before = family.encode_text(family.text_encoder(load), "a fox")["prompt_embeds"]
    file = copied / "text_encoder" / "model.safetensors"
    state = {name.replace("model.visual.", "visual."): tensor for name, tensor in load_file(file).items()}
    save_file({name.replace("model.language_model.", "model."): tensor for name, tensor in state.items()}, file)
    config = family.tiny()["text_encoder"]["text_config"]
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    flat = {name: value for name, value in config.items() if name != "rope_parameters"} | rope
    edit_json(copied / "text_encoder" / "config.json", **flat)
    (copied / "text_encoder" / "config.json").write_text(
        (copied / "text_encoder" / "config.json").read_text().replace('"text_config"', '"unread"')
    )
    old = make("qwen_image", cache, str(copied))
    assert old.encode_text(old.text_encoder(load), "a fox")["prompt_embeds"].equal(before)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_sample_equals_the_pipelines_for_the_same_noise(family, pipeline, guidance):
    vae, encoder = family.image_encoder(load), family.text_encoder(load)
    text, negative = family.encode_text(encoder, "a fox in the snow"), family.encode_text(encoder, "")
    cfg, rng = SampleConfig(size=(64, 48), steps=4, guidance=guidance), SampleRng(3, [0])
    decoded = recorded_decodes(vae), recorded_decodes(pipeline.vae)
    image = family.sample(model_of(family), vae, text, negative, cfg, rng)
    expected = pipeline(
        prompt_embeds=text["prompt_embeds"].unsqueeze(0),
        negative_prompt_embeds=negative["prompt_embeds"].unsqueeze(0),
        latents=pack(patchify(rng.normal("sample", (4, 6, 8)))),
        width=64,
        height=48,
        num_inference_steps=4,
        true_cfg_scale=guidance,
    ).images[0]
    torch.testing.assert_close(decoded[0][-1], decoded[1][-1], atol=1e-5, rtol=1e-5)
    assert_same_picture(image, expected)


@pytest.mark.parametrize(("steps", "levels"), [(4, [1.0, 0.74461, 0.42667, 0.02]), (1, [1.0])])
def test_samples_end_at_the_schedulers_terminal_noise_level_unless_there_is_one_step(family, steps, levels):
    # At 256 tokens the shift is e^0.5; 0.35466 at the end of four steps is stretched to 0.02.
    assert sampled_times(family, "timestep", 256, steps) == levels


# Loss


@pytest.mark.parametrize("shift", ["auto", "constant"])
def test_loss_is_the_error_of_the_transformers_velocity_at_the_drawn_timestep(cache, shift):
    family = make("qwen_image", cache, objective=ObjectiveConfig(shift=shift, shift_factor=5.0))
    items, model, rng = examples(family, 2), model_of(family), SampleRng(5, [8, 9])
    loss = family.loss(model, batch_of(family, items), rng)
    latents = torch.stack([item["latents"] for item in items])
    line = math.exp(0.5 + (0.9 - 0.5) * (2 * 4 - 256) / (8192 - 256))
    factor = {"auto": line, "constant": 5.0}[shift]
    sigma = draw_sigma(ObjectiveConfig(shift="constant", shift_factor=factor), Shift(), 2 * 4, rng)
    noise = rng.normal("noise", (4, 4, 8))
    predicted = model["transformer"](
        hidden_states=QwenImagePipeline._pack_latents(add_noise(latents, noise, sigma), 2, 4, 4, 8),
        encoder_hidden_states=torch.stack([item["prompt_embeds"] for item in items]),
        timestep=sigma,
        img_shapes=[[(1, 2, 4)]] * 2,
    ).sample
    errors = (predicted - QwenImagePipeline._pack_latents(noise - latents, 2, 4, 4, 8)).square().mean(dim=(1, 2))
    torch.testing.assert_close(loss.total, errors.sum(), atol=1e-5, rtol=0)
    assert loss.weight.item() == 2


def test_captions_of_any_length_share_a_batch_and_cost_what_they_cost_alone(family):
    assert_captions_of_any_length_share_a_batch(family)


def test_every_weight_gets_a_gradient_but_those_of_the_last_blocks_text_which_are_never_trained(family):
    model = model_of(family).requires_grad_(True)
    family.loss(model, batch_of(family, examples(family, 1)), SampleRng(0, [0])).total.backward()
    gradients = {name: weight.grad for name, weight in model["transformer"].named_parameters()}
    silent = [name for name, gradient in gradients.items() if gradient is None or not gradient.abs().sum() > 0]
    assert silent == [name for name in gradients if any(re.fullmatch(p, name) for p in family.never_trained)]
    assert len(silent) == 9


# Model


def test_the_published_architecture_has_its_published_size():
    with torch.device("meta"):
        model = QwenImageTransformer2DModel()
    published = ARCHITECTURES["qwen-image"]
    assert (model.config.num_layers, model.config.num_attention_heads) == (published.num_layers, published.num_heads)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == 20.43


def test_all_linear_layers_of_the_blocks_but_their_modulation_are_adapted(family):
    modules = family.build("transformer").transformer_blocks.named_modules()
    layers = [f"transformer_blocks.{name}" for name, module in modules if isinstance(module, torch.nn.Linear)]
    patterns = family.adapter_targets["transformer"]
    left = [name for name in layers if not any(re.fullmatch(pattern, name) for pattern in patterns)]
    assert left == [f"transformer_blocks.{number}.{name}.1" for number in (0, 1) for name in ("img_mod", "txt_mod")]


def test_a_single_file_by_the_layout_is_read_by_diffusers_as_the_same_weights(family, tmp_path):
    assert_diffusers_reads_the_layout(family, QwenImageTransformer2DModel, tmp_path)


# Errors


def test_a_model_that_reads_other_pictures_besides_is_refused(cache, copied):
    edit_json(copied / "transformer" / "config.json", use_additional_t_cond=True)
    assert refusal("qwen_image", cache, str(copied)) == (
        f"model.path {copied}: the transformer also reads other images or layers; "
        "only text-to-image models are trained, use Qwen-Image"
    )


def test_parts_of_different_models_are_refused(cache, copied):
    edit_json(copied / "vae" / "config.json", z_dim=8)
    assert refusal("qwen_image", cache, str(copied)) == (
        f"model.path {copied}: the transformer reads 16 latent channels and 32 text features, "
        "but vae and text_encoder give 32 and 32; download the folder again"
    )


def test_a_model_of_another_family_is_refused(cache, copied):
    edit_json(copied / "transformer" / "config.json", _class_name="QwenImage21Transformer2DModel")
    assert refusal("qwen_image", cache, str(copied)) == (
        f"model.path {copied}: transformer/config.json describes a QwenImage21Transformer2DModel, "
        "not a QwenImageTransformer2DModel; set model.family to the family of that model"
    )


def test_an_architecture_that_the_folder_does_not_hold_is_refused(cache, copied):
    assert refusal("qwen_image", cache, str(copied), architecture="qwen-image") == (
        "model.options.architecture: qwen-image has 60 blocks of 24 heads, "
        f"but {copied} has 2 blocks of 2 heads; leave it empty or set model.path to qwen-image"
    )


def test_the_fingerprint_follows_the_encoders_and_the_length_of_captions(cache, copied):
    first = make("qwen_image", cache, str(copied)).fingerprint()
    assert make("qwen_image", cache, str(copied), max_tokens=64).fingerprint() != first
    edit_json(copied / "vae" / "config.json", latents_mean=[0.0, 0.0, 0.0, 0.0])
    assert make("qwen_image", cache, str(copied)).fingerprint() != first
