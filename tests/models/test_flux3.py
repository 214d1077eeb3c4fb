from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.flux3.before_denoise import Flux3TextRoPEInputsStep, _prepare_image_ids
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep

from tests.audit.families import REFERENCES
from tests.models.common import SAME, assert_same_picture, batch_of, examples, load, make, model_of, picture
from tests.runs import alone, run_config
from trainer.config.sections import ObjectiveConfig, SampleConfig
from trainer.data.encode import encode_data
from trainer.data.images.image_source import batch_keys
from trainer.data.loader import BatchSizes, Choices, ImageBatchSampler
from trainer.distributed.context import RankContext
from trainer.models import families
from trainer.models.build import encoder_loader
from trainer.models.families.flux3 import Flux3
from trainer.models.objectives.flow_matching import Shift, add_noise, draw_sigma
from trainer.models.parts.image.images import pack
from trainer.rng import SampleRng

CAPTIONS = ["a red fox", "", "a long caption of many words " * 10]
TWO_WINDOWS = "a caption of many words " * 6


@pytest.fixture(scope="module")
def family(cache) -> Flux3:
    return make("flux3", cache)


@pytest.fixture(scope="module")
def reference(family) -> Any:
    return REFERENCES["flux3"](family.folder, {})


@pytest.fixture(scope="module")
def pipeline(reference) -> Any:
    return reference.pipeline


# Recipe: equal to diffusers' own pipeline


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


@pytest.mark.parametrize("count", [1, 2])
def test_sample_from_reference_images_equals_the_pipelines(family, reference, count):
    vae, encoder = family.image_encoder(load), family.text_encoder(load)
    images = [picture(64, 64, seed) for seed in range(count)]
    references = {f"reference_{i}": family.encode_image(vae, image)["latents"] for i, image in enumerate(images)}
    text, negative = family.encode_text(encoder, "a fox"), family.encode_text(encoder, "")
    cfg, rng = SampleConfig(size=(64, 48), steps=4, guidance=3.0), SampleRng(3, [0])
    image = family.sample(model_of(family), vae, text | references, negative, cfg, rng)
    call = {"prompt": "a fox", "negative_prompt": "", "image": images, "guidance_scale": 3.0, "num_inference_steps": 4}
    assert_same_picture(image, reference.picture(rng.normal("sample", (16, 3, 4))[0], 64, 48, call))


# Loss


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


def test_with_a_reference_image_every_weight_gets_a_gradient(family):
    (item,) = examples(family, 1)
    model = model_of(family).requires_grad_(True)
    batch = batch_of(family, [item | {"reference_0": item["latents"]}])
    family.loss(model, batch, SampleRng(0, [0])).total.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model["transformer"].parameters())


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
