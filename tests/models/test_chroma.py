"""What only Chroma does; the rest is the contract of test_flow_transformers.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import ChromaTransformer2DModel

from tests.models.common import assert_diffusers_reads_the_layout, edit_json, load, make, model_of


def test_a_caption_is_its_own_tokens_and_one_of_padding_and_a_full_one_has_none(cache: Path) -> None:
    family = make("chroma", cache)
    encoder = family.text_encoder(load)
    for caption in ("", "a fox", "fox " * 200):
        own = encoder.tokenizer(caption, truncation=True, max_length=32).input_ids
        assert len(family.encode_text(encoder, caption)["prompt_embeds"]) == min(len(own) + 1, 32)


def test_padding_to_the_longest_caption_of_a_batch_is_read_by_no_token_and_makes_nothing_nan(cache: Path) -> None:
    family = make("chroma", cache)
    encoder, model = family.text_encoder(load), model_of(family)
    items = [
        {"latents": torch.zeros(4, 8, 8), **family.encode_text(encoder, caption)}
        for caption in ("fox", "a red fox in the snow of a long winter")
    ]
    batch = family.collate(items)
    noisy, sigma = torch.randn(2, 4, 8, 8), torch.tensor([0.3, 0.8])

    def predicted() -> torch.Tensor:
        return family.predict(model, noisy, sigma, batch, 1.0)

    before = predicted()
    batch["prompt_embeds"][0, len(items[0]["prompt_embeds"]) :] = 1e3
    after = predicted()
    assert torch.isfinite(after).all()
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    alone = family.predict(model, noisy[:1], sigma[:1], family.collate(items[:1]), 1.0)
    torch.testing.assert_close(after[:1], alone, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_single_file_by_the_layout_is_read_by_diffusers_as_the_same_weights(cache: Path, tmp_path: Path) -> None:
    """At the width that diffusers' converter is written for."""
    copied = Path(shutil.copytree(make("chroma", cache).folder, tmp_path / "model"))
    edit_json(
        copied / "transformer" / "config.json",
        **{"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 24, "attention_head_dim": 128},
        **{"axes_dims_rope": [16, 56, 56]},
    )
    assert_diffusers_reads_the_layout(make("chroma", cache, str(copied)), ChromaTransformer2DModel, tmp_path)
