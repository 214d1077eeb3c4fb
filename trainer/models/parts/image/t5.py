"""T5 text encoders."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.base import LoadModule
from trainer.models.parts.folder import TRANSFORMERS_STEM, ModelFolder, write_random
from trainer.models.parts.image.images import device_of
from trainer.models.parts.image.text_encoder import TextEncoder, load_tokenizer, names_of_things

T5_TYPES = ("t5",)
T5_BLOCKS = ("T5Block",)


def load_t5(load: LoadModule, folder: ModelFolder, component: str, tokenizer: str) -> TextEncoder:
    """Load the frozen encoder of `component`, sharded layer by layer, with the tokenizer of folder `tokenizer`."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config.from_dict(folder.encoder_config(component, *T5_TYPES))
    with torch.device("meta"):
        # Without the outer model there is one embedding, not two tied ones, which are untied on leaving meta.
        empty = T5EncoderModel(config).encoder.float()
    model = load(empty, folder.weights(component, TRANSFORMERS_STEM, _stack_key), T5_BLOCKS)
    return TextEncoder(model, load_tokenizer(folder, tokenizer))


def t5_states(encoder: TextEncoder, caption: str, num_tokens: int) -> Tensor:
    """The last hidden states of a caption, (1, num_tokens, D). Padding is not masked."""
    ids = encoder.tokenizer(
        caption, padding="max_length", max_length=num_tokens, truncation=True, return_tensors="pt"
    ).input_ids
    states: Tensor = encoder.model(input_ids=ids.to(device_of(encoder.model))).last_hidden_state
    return states


def masked_t5_states(encoder: TextEncoder, caption: str, num_tokens: int) -> Tensor:
    """The last hidden states of a caption's own tokens, at most `num_tokens`, and of one of padding if there is room
    for it: (1, L, D). No token reads the padding, which fills all `num_tokens` as in diffusers' pipelines."""
    own = encoder.tokenizer(caption, truncation=True, max_length=num_tokens).input_ids
    padding = [encoder.tokenizer.pad_token_id] * (num_tokens - len(own))
    device = device_of(encoder.model)
    ids = torch.tensor([own + padding], device=device)
    mask = torch.tensor([[1] * len(own) + [0] * len(padding)], device=device)
    states: Tensor = encoder.model(input_ids=ids, attention_mask=mask).last_hidden_state
    return states[:, : len(own) + 1]


def _stack_key(key: str) -> str | None:
    if key == "encoder.embed_tokens.weight":
        return None  # some files repeat the shared embedding under this name
    return "embed_tokens.weight" if key == "shared.weight" else key.removeprefix("encoder.")


T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "relative_attention_num_buckets": 32,
}
"""Sizes of the published encoder that image models use."""


def tiny_t5(width: int) -> dict[str, Any]:
    """Config of a tiny model for the tokenizer of `write_tiny_t5_tokenizer`."""
    return {
        "model_type": T5_TYPES[0],
        "vocab_size": len(_tiny_pieces()),
        "d_model": width,
        "d_kv": width // 2,
        "d_ff": 2 * width,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": 8,
    }


def write_tiny_t5(folder: Path, config: dict[str, Any]) -> None:
    """Write a model of `tiny_t5`'s config with random weights."""
    write_random(folder, lambda: _shared_embedding(config))


def write_tiny_t5_tokenizer(folder: Path, max_tokens: int) -> None:
    """Write T5's tokenizer with the letters and a few words."""
    from transformers import T5TokenizerFast

    T5TokenizerFast(vocab=_tiny_pieces(), extra_ids=0, model_max_length=max_tokens).save_pretrained(folder)


def _shared_embedding(config: dict[str, Any]) -> nn.Module:
    """Build the encoder with its embedding only once, as in files."""
    from transformers import T5Config, T5EncoderModel

    model: Any = T5EncoderModel(T5Config.from_dict(config))
    del model.encoder.embed_tokens
    encoder: nn.Module = model
    return encoder


def _tiny_pieces() -> list[tuple[str, float]]:
    """(piece, log probability): a word is less likely than a letter, but likelier than the sequence of its letters."""
    words = sorted({word for name in names_of_things() for word in name.split()})
    return [
        *((special, 0.0) for special in ("<pad>", "</s>", "<unk>")),
        *((letter, -6.0) for letter in ("▁", *string.ascii_letters, *string.digits, *string.punctuation)),
        *((f"▁{word}", -8.0) for word in words),
    ]
