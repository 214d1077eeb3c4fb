"""Tiny vision-language models of transformers' own classes with random weights, as folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.models.parts.image.text_encoder import names_of_things, train_tokenizer

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
FLORENCE2_SPECIAL = ("<pad>", "<s>", "</s>", "<image>", *(f"<loc_{number}>" for number in range(8)))
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif %}"""
VOCABULARY = 400
WIDTH = 32
SCALE = 4.0
"""Weights are this much larger than transformers draws them, so that answers depend on the image."""


def write_qwen2_5_vl(folder: Path) -> Path:
    """Its head is its embedding, as in the published model of 3B."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = _text() | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    vision = {
        **{"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": WIDTH},
        **{"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_ids(True))
    return _write(folder, Qwen2_5_VLForConditionalGeneration(config), 14)


def write_qwen3_vl(folder: Path) -> Path:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 1e4}
    text = _text() | {"rope_parameters": rope, "head_dim": 8}
    vision = {
        **{"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": WIDTH},
        **{"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **_ids(False))
    return _write(folder, Qwen3VLForConditionalGeneration(config), 16)


def write_florence2(folder: Path) -> Path:
    from transformers import CLIPImageProcessorPil, Florence2Config, Florence2ForConditionalGeneration

    vision = {
        **{"embed_dim": (8, 16, 16, 32), "num_heads": (1, 2, 2, 4), "num_groups": (1, 2, 2, 4), "depths": (1, 1, 1, 1)},
        **{"window_size": 2, "projection_dim": WIDTH, "max_position_embeddings": 10},
    }
    text = {
        **{"d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2},
        **{"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": VOCABULARY},
        **{"max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        **{"decoder_start_token_id": 2, "forced_eos_token_id": 2},
    }
    config = Florence2Config(vision_config=vision, text_config=text, image_token_id=3, tie_word_embeddings=True)
    folder = _write(folder, Florence2ForConditionalGeneration(config), None, FLORENCE2_SPECIAL)
    size = {"height": 64, "width": 64}
    processor = CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False, image_seq_length=5)
    processor.save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"image_token": "<image>", "image_token_id": 3, "extra_special_tokens": {"image_token": "<image>"}}
    tokenizer |= {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def _text() -> dict[str, Any]:
    return {
        **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0},
    }


def _ids(is_tied: bool) -> dict[str, Any]:
    return {
        **{"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4},
        "tie_word_embeddings": is_tied,
    }


def _write(folder: Path, model: Any, patch: int | None, special: Sequence[str] = SPECIAL) -> Path:
    from transformers import Qwen2VLImageProcessorPil

    folder.mkdir(parents=True)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=numbers) * SCALE / parameter.shape[-1] ** 0.5)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    train_tokenizer(names_of_things(), VOCABULARY, 512, special, TEMPLATE if patch else "").save_pretrained(folder)
    if patch:
        processor = Qwen2VLImageProcessorPil(patch_size=patch, min_pixels=(2 * patch) ** 2, max_pixels=(6 * patch) ** 2)
        processor.save_pretrained(folder)
    return folder
