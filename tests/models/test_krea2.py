"""What only Krea 2 does; the rest is the contract of test_flow_transformers.py."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm
from safetensors.torch import load_file, save_file

from tests.models.common import (
    assert_padding_is_read_by_no_token,
    edit_json,
    load,
    make,
    model_of,
    refusal,
    sampled_times,
)
from trainer.models.objectives.flow_matching import shift_factor

INDEX = "model_index.json"


@pytest.fixture
def copied(cache: Path, tmp_path: Path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(make("krea2", cache).folder, tmp_path / "model"))


def test_raw_and_turbo_are_trained_at_the_shift_of_raws_sampler(cache: Path, copied: Path) -> None:
    """Of scheduler/scheduler_config.json of krea/Krea-2-Raw: from 0.5 at 256 tokens to 1.15 at 6400."""
    edit_json(copied / INDEX, is_distilled=True)
    for family in (make("krea2", cache), make("krea2", cache, str(copied))):
        shifts = [shift_factor(family.objective, family.shift, tokens) for tokens in (256, 4096, 6400)]
        assert shifts == pytest.approx([math.exp(0.5), math.exp(0.90625), math.exp(1.15)])


def test_turbo_is_drawn_at_one_shift_and_raw_at_that_of_the_images_size(cache: Path, copied: Path) -> None:
    edit_json(copied / INDEX, is_distilled=True)
    turbo, raw = make("krea2", cache, str(copied)), make("krea2", cache)
    assert sampled_times(turbo, "timestep", 32, 2) == sampled_times(turbo, "timestep", 256, 2) == [1.0, 0.75951]
    assert sampled_times(raw, "timestep", 256, 2) == [1.0, 0.62246]


def test_a_caption_keeps_the_end_of_the_template_however_long_it_is(cache: Path) -> None:
    family = make("krea2", cache, max_tokens=16)
    encoder = family.text_encoder(load)
    for caption in ("", "fox", "fox " * 50):
        own = encoder.tokenizer(caption).input_ids[:11]
        assert family.encode_text(encoder, caption)["prompt_embeds"].shape == (len(own) + 5, 2, 32)
    (short,), (long,) = family.text_lengths(["fox", "fox " * 50])
    assert not short.is_cut
    assert (long.read, long.is_cut) == (34 + 11, True)
    assert long.rest
    assert ("fox " * 50).strip().endswith(long.rest)
    assert family.longer_text(long) == f"model.options.max_tokens: {long.needed - 34 + 5}"


def test_padding_to_the_longest_caption_of_a_batch_is_read_by_no_token(cache: Path) -> None:
    family = make("krea2", cache)
    assert_padding_is_read_by_no_token(family, model_of(family), (4, 8, 8))


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_the_language_model_is_found_in_files_of_the_encoder_with_and_without_a_head(
    cache: Path, copied: Path, prefix: str
) -> None:
    """The pipeline saves a Qwen3VLModel. In files of Qwen3VLForConditionalGeneration, names begin with `model.`."""
    family = make("krea2", cache)
    before = family.encode_text(family.text_encoder(load), "a fox")["prompt_embeds"]
    file = copied / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("language_model.layers.") for name in tensors)
    save_file({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, file)
    found = make("krea2", cache, str(copied))
    assert found.encode_text(found.text_encoder(load), "a fox")["prompt_embeds"].equal(before)


def test_without_an_entry_in_the_index_the_pipelines_twelve_hidden_states_are_read(cache: Path, copied: Path) -> None:
    (copied / INDEX).write_text("{}")
    assert "[2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35]" in refusal("krea2", cache, str(copied))


def test_a_norm_with_bf16_weights_adds_1_in_fp32(cache: Path) -> None:
    model = make("krea2", cache).build("transformer")
    assert not any(isinstance(module, Krea2RMSNorm) for module in model.modules())
    exact = Krea2RMSNorm(64)
    torch.nn.init.constant_(exact.weight, 1.0078125 * 2**-6)  # exact in bf16, while 1 more is not
    ours = model.transformer_blocks[0].norm1.to_empty(device="cpu").bfloat16()
    ours.load_state_dict(exact.state_dict())
    x = torch.randn(3, 64)
    assert ours(x).equal(exact(x))
    assert (exact.weight.bfloat16() + 1).float().ne(exact.weight + 1).all()
