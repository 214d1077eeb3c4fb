import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLFlux2, ClassifierFreeGuidance, Flux3Transformer2DModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.modular_pipelines.flux3.before_denoise import Flux3TextRoPEInputsStep, _prepare_image_ids
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep, Flux3VaeEncoderStep
from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3AutoBlocks
from diffusers.modular_pipelines.flux3.modular_pipeline import Flux3ModularPipeline
from PIL import Image
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

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
from tests.runs import alone, run_config
from trainer.config.sections import ObjectiveConfig, SampleConfig
from trainer.data.encode import encode_data
from trainer.data.images.image_source import batch_keys
from trainer.data.loader import BatchSizes, Choices, ImageBatchSampler
from trainer.distributed.context import RankContext
from trainer.models import families
from trainer.models.build import encoder_loader
from trainer.models.families.flux3 import ARCHITECTURES, Flux3, image_ids, text_ids
from trainer.models.objectives.flow_matching import Shift, add_noise, draw_sigma
from trainer.models.parts.image.images import pack
from trainer.models.parts.image.packed_vae import latent_statistics
from trainer.rng import SampleRng

CAPTIONS = ["a red fox", "", "a long caption of many words " * 10]
TWO_WINDOWS = "a caption of many words " * 6


@dataclass
class Processor:
    """What the pipeline asks of a processor that also reads pictures; a real one needs torchvision."""

    tokenizer: Any

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer.apply_chat_template(*args, **kwargs)


@pytest.fixture(scope="module")
def family(cache) -> Flux3:
    return make("flux3", cache)


@pytest.fixture(scope="module")
def pipeline(family) -> Flux3ModularPipeline:
    blocks = Flux3AutoBlocks()
    blocks.sub_blocks.pop("prompt_upsampler")
    pipeline = blocks.init_pipeline()
    pipeline.update_components(
        transformer=Flux3Transformer2DModel.from_pretrained(family.folder, subfolder="transformer"),
        vae=AutoencoderKLFlux2.from_pretrained(family.folder, subfolder="vae"),
        text_encoder=Qwen3VLForConditionalGeneration.from_pretrained(family.folder / "text_encoder"),
        tokenizer=Processor(AutoTokenizer.from_pretrained(family.folder / "tokenizer")),
    )
    return without_bar(pipeline)


@pytest.fixture
def copied(family, tmp_path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(family.folder, tmp_path / "model"))


def from_disk(cache: Path, folder: Path, **options: Any) -> Flux3:
    return make("flux3", cache, str(folder), **options)


def drawn(pipeline: Flux3ModularPipeline, guidance: float, **inputs: Any) -> Image.Image:
    pipeline.update_components(guider=ClassifierFreeGuidance(guidance_scale=guidance))
    images = pipeline(text_encoder_out_layers=(1, 2), max_sequence_length=160, num_inference_steps=4, **inputs)
    return images.get("images")[0]


# Recipe: equal to diffusers' own pipeline


@pytest.mark.parametrize("number", [0, 1, 2])
def test_image_and_text_ids_equal_the_pipelines(number):
    assert image_ids(3, 5, -number).equal(_prepare_image_ids(3, 5, 0.5, -number))
    assert text_ids(7).equal(Flux3TextRoPEInputsStep._prepare_text_ids(torch.zeros(1, 7, 8)).long())


@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_encoded_image_equals_the_pipelines_normalised_latents(family, pipeline, size):
    image = picture(*size)
    ours = family.encode_image(family.image_encoder(load), image)["latents"]
    with torch.no_grad():
        mode = pipeline.vae.encode(VaeImageProcessor().preprocess(image)).latent_dist.mode()
    mean, std = latent_statistics(pipeline.vae)
    theirs = (Flux3VaeEncoderStep._patchify_latents(mode) - mean) / std
    torch.testing.assert_close(ours, theirs[0], **SAME)
    assert ours.shape == (16, size[1] // 16, size[0] // 16)


@pytest.mark.parametrize("layers", [(1, 2), (0, 3)], ids=["tiny's layers", "embeddings and normed last"])
@pytest.mark.parametrize(("caption", "windows"), list(zip(CAPTIONS, [1, 1, 2], strict=True)))
def test_embeddings_of_a_caption_and_its_padding_equal_the_pipelines(cache, pipeline, layers, caption, windows):
    family = make("flux3", cache, text_layers=layers)
    embeds = family.encode_text(family.text_encoder(load), caption)["prompt_embeds"]
    with torch.no_grad():
        theirs = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
            pipeline.text_encoder, pipeline.tokenizer, caption, max_sequence_length=160, hidden_states_layers=layers
        )
    torch.testing.assert_close(embeds, theirs[0], **SAME)
    assert embeds.shape == (80 * windows, 64)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_sample_equals_the_pipelines_for_the_same_noise(family, pipeline, guidance):
    vae, encoder = family.image_encoder(load), family.text_encoder(load)
    long, short = family.encode_text(encoder, CAPTIONS[2]), family.encode_text(encoder, "")
    cfg, rng = SampleConfig(size=(64, 48), steps=4, guidance=guidance), SampleRng(3, [0])
    decoded = recorded_decodes(vae), recorded_decodes(pipeline.vae)
    image = family.sample(model_of(family), vae, long, short, cfg, rng)
    noise = rng.normal("sample", (16, 3, 4))
    expected = drawn(pipeline, guidance, prompt=CAPTIONS[2], negative_prompt="", latents=noise, width=64, height=48)
    torch.testing.assert_close(decoded[0][-1], decoded[1][-1], atol=1e-5, rtol=1e-5)
    assert_same_picture(image, expected)


@pytest.mark.parametrize("count", [1, 2])
def test_sample_from_reference_images_equals_the_pipelines(family, pipeline, count):
    vae, encoder = family.image_encoder(load), family.text_encoder(load)
    images = [picture(64, 64, seed) for seed in range(count)]
    references = {f"reference_{i}": family.encode_image(vae, image)["latents"] for i, image in enumerate(images)}
    text, negative = family.encode_text(encoder, "a fox"), family.encode_text(encoder, "")
    cfg, rng = SampleConfig(size=(64, 48), steps=4, guidance=3.0), SampleRng(3, [0])
    image = family.sample(model_of(family), vae, text | references, negative, cfg, rng)
    noise = rng.normal("sample", (16, 3, 4))
    inputs = {"prompt": "a fox", "negative_prompt": "", "latents": noise, "width": 64, "height": 48}
    assert_same_picture(image, drawn(pipeline, 3.0, image=images, **inputs))


def test_samples_are_drawn_at_noise_levels_shifted_as_the_pipelines(family, pipeline):
    assert pipeline.scheduler.config.shift == family.shift.constant == 6.93
    assert sampled_times(family, "timestep", 32, steps=4) == [1.0, 0.95411, 0.87390, 0.69789]


# Loss


def test_loss_is_the_error_of_the_transformers_velocity_at_the_drawn_timestep(family):
    items, model, rng = examples(family, 2), model_of(family), SampleRng(5, [8, 9])
    loss = family.loss(model, batch_of(family, items), rng)
    latents = torch.stack([item["latents"] for item in items])
    sigma = draw_sigma(ObjectiveConfig(shift="constant", shift_factor=6.93), Shift(), 2 * 4, rng)
    noise = rng.normal("noise", (16, 2, 4))
    predicted = model["transformer"](
        hidden_states=pack(add_noise(latents, noise, sigma)),
        encoder_hidden_states=torch.stack([item["prompt_embeds"] for item in items]),
        timestep=sigma,
        img_ids=_prepare_image_ids(2, 4, 0.5),
        txt_ids=Flux3TextRoPEInputsStep._prepare_text_ids(torch.zeros(2, 80, 64)),
    ).sample
    errors = (predicted - pack(noise - latents)).square().mean(dim=(1, 2))
    torch.testing.assert_close(loss.total, errors.sum(), atol=1e-5, rtol=0)
    assert loss.weight.item() == 2


def test_a_dropped_caption_costs_what_the_pipelines_empty_prompt_does_in_the_window_of_its_caption(family, pipeline):
    encoder, model, rng = family.text_encoder(load), model_of(family), SampleRng(5, [8, 9])
    empty, long = (family.encode_text(encoder, caption) for caption in ("", TWO_WINDOWS))
    dropped = family.dropped_text(empty, {key: tensor.to("meta") for key, tensor in long.items()})
    items = [item | text for item, text in zip(examples(family, 2), (long, dropped), strict=True)]
    assert len({family.batch_key(item) for item in items}) == 1
    loss = family.loss(model, batch_of(family, items), rng)
    with torch.no_grad():
        embeds = [
            Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
                pipeline.text_encoder, pipeline.tokenizer, prompt, pad_multiple=160, hidden_states_layers=(1, 2)
            )
            for prompt in (TWO_WINDOWS, "")
        ]
    torch.testing.assert_close(dropped["prompt_embeds"], embeds[1][0], **SAME)
    latents = torch.stack([item["latents"] for item in items])
    sigma = draw_sigma(ObjectiveConfig(shift="constant", shift_factor=6.93), Shift(), 2 * 4, rng)
    noise = rng.normal("noise", (16, 2, 4))
    predicted = pipeline.transformer(
        hidden_states=pack(add_noise(latents, noise, sigma)),
        encoder_hidden_states=torch.cat(embeds),
        timestep=sigma,
        img_ids=_prepare_image_ids(2, 4, 0.5),
        txt_ids=Flux3TextRoPEInputsStep._prepare_text_ids(embeds[0]),
    ).sample
    errors = (predicted - pack(noise - latents)).square().mean(dim=(1, 2))
    torch.testing.assert_close(loss.total, errors.sum(), atol=1e-5, rtol=0)


def test_every_weight_gets_a_gradient_but_those_of_reference_images_which_are_never_trained(family):
    (item,) = examples(family, 1)

    def silent(**references: torch.Tensor) -> list[str]:
        model = model_of(family).requires_grad_(True)
        family.loss(model, batch_of(family, [item | references]), SampleRng(0, [0])).total.backward()
        parameters = model["transformer"].named_parameters()
        return [name for name, weight in parameters if weight.grad is None or not weight.grad.abs().sum() > 0]

    names = [name for name, _ in family.build("transformer").named_parameters()]
    frozen = [name for name in names if any(re.fullmatch(pattern, name) for pattern in family.never_trained)]
    assert silent() == frozen
    assert len(frozen) == 11
    assert silent(reference_0=item["latents"]) == []


def test_queries_and_keys_are_normalised_in_fp32_by_weights_of_any_type(family):
    attention = family.build("transformer").single_transformer_blocks[0].attn.to_empty(device="cpu")
    for norm in (attention.norm_q, attention.norm_k):
        weight = torch.linspace(0.5, 2, 16)
        norm.weight = torch.nn.Parameter(weight.bfloat16())
        x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
        expected = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * weight.bfloat16().float()
        torch.testing.assert_close(norm(x), expected, **SAME)


def test_captions_share_a_batch_when_they_fill_as_many_windows_of_80_tokens_and_have_equal_references(family):
    encoder, latents = family.text_encoder(load), torch.zeros(16, 4, 4)
    fox, rat, long = (
        {"latents": latents, **family.encode_text(encoder, caption)} for caption in ("a red fox", "rat", CAPTIONS[2])
    )
    assert family.batch_key(fox) == family.batch_key(rat) != family.batch_key(long)
    assert family.batch_key(fox | {"reference_0": latents}) != family.batch_key(fox)


# Model


def test_the_published_architecture_has_its_published_size():
    with torch.device("meta"):
        model = Flux3Transformer2DModel()
    config, published = model.config, ARCHITECTURES["flux3"]
    assert (config.num_layers, config.num_single_layers) == (published.num_layers, published.num_single_layers)
    assert config.num_attention_heads == published.num_heads
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == 5.538


def test_all_linear_layers_of_the_blocks_are_adapted_but_those_only_reference_images_pass_through(family):
    modules = family.build("transformer").named_modules()
    layers = [name for name, module in modules if isinstance(module, torch.nn.Linear) and "_blocks." in name]
    patterns = family.adapter_targets["transformer"]
    left = [name for name in layers if not any(re.fullmatch(pattern, name) for pattern in patterns)]
    assert left == [name for name in layers if "image_cond" in name]
    assert len(left) == 6


def test_a_single_file_by_the_layout_is_read_by_diffusers_as_the_same_weights(family, tmp_path):
    assert_diffusers_reads_the_layout(family, Flux3Transformer2DModel, tmp_path)


def test_a_single_file_in_the_original_layout_is_the_same_model(family, tmp_path):
    assert_original_file_is_read(family, tmp_path)


# Errors


def test_a_step_distilled_model_is_refused(cache, copied):
    edit_json(copied / "transformer" / "config.json", flow_map=True)
    assert refusal("flux3", cache, str(copied)) == (
        f"model.path {copied}: the transformer is step-distilled (flow_map); train the model it "
        "was made from, black-forest-labs/flux-3-image-klein-base"
    )


def test_a_text_encoder_of_another_kind_is_refused(cache, copied):
    edit_json(copied / "text_encoder" / "config.json", model_type="qwen3")
    assert refusal("flux3", cache, str(copied)) == (
        f"model.path {copied}: text_encoder/config.json describes a qwen3 text encoder, expected qwen3_vl; "
        "download the folder again"
    )


def test_text_layers_beyond_the_encoder_or_that_do_not_fill_the_transformers_input_are_refused(cache, copied):
    assert refusal("flux3", cache, str(copied), text_layers=(4, 8)) == (
        f"model.options.text_layers: [4, 8] is not within 0 to 3, the hidden states of {copied}/text_encoder"
    )
    assert refusal("flux3", cache, text_layers=(1,)) == (
        "model.options.text_layers: [1] gives 1 x 32 = 32 features per token, but the transformer reads 64; "
        "name 2 hidden states"
    )


def test_an_architecture_that_the_folder_does_not_hold_is_refused(cache, copied):
    assert refusal("flux3", cache, str(copied), architecture="flux3") == (
        "model.options.architecture: flux3 has 5 + 28 blocks of 24 heads, "
        f"but {copied} has 1 + 2 blocks of 2 heads; leave it empty or set model.path to flux3"
    )


def test_the_fingerprint_follows_the_encoders_and_their_use(cache, copied):
    first = from_disk(cache, copied).fingerprint()
    assert from_disk(cache, copied, max_tokens=80).fingerprint() != first
    assert make("flux3", cache, str(copied), text_layers=(2, 1)).fingerprint() != first
    edit_json(copied / "vae" / "config.json", batch_norm_eps=1e-3)
    assert from_disk(cache, copied).fingerprint() != first


# Dropped captions


def test_dropped_captions_are_mixed_with_long_ones_and_fill_no_batch(tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(20):
        picture(64, 64, number).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text(f"{TWO_WINDOWS}, number {number}", encoding="utf-8")
    cfg = run_config(pictures, model__family="flux3", data__caption_dropout=0.1, train__batch_size=8)
    flux3, world = families.make(cfg, tmp_path), alone()
    data = encode_data(flux3, encoder_loader(cfg, world), RankContext(cfg, world, tmp_path, lambda event: None))
    sampler = ImageBatchSampler(
        batch_keys(flux3, data), [1.0] * 20, BatchSizes(8), cfg.train.seed, [Choices(cfg.data.caption_dropout)] * 20
    )
    dropped = [sum(item.dropped for item in sampler.batch(step)) for step in range(400)]
    assert {len(data.example(item)["prompt_embeds"]) for item in sampler.batch(399)} == {160}
    assert (sum(count == 8 for count in dropped), sum(0 < count < 8 for count in dropped)) == (0, 225)
