"""CLIP text encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.base import LoadModule
from trainer.models.parts.folder import TRANSFORMERS_STEM, ModelFolder, write_random
from trainer.models.parts.image.images import device_of
from trainer.models.parts.image.text_encoder import TextEncoder, load_tokenizer

CLIP_TYPES = ("clip_text_model",)
CLIP_BLOCKS = ("CLIPEncoderLayer",)


def build_clip(folder: ModelFolder, component: str, model_class: Any) -> nn.Module:
    """Build `component` on the meta device, fp32. model_class: CLIPTextModel or CLIPTextModelWithProjection."""
    from transformers import CLIPTextConfig
    from transformers.models.clip.modeling_clip import CLIPTextEmbeddings

    config = CLIPTextConfig.from_dict(folder.encoder_config(component, *CLIP_TYPES))
    with torch.device("meta"):
        model: nn.Module = model_class(config)
    # No file holds position_ids, and the meta device would lose them: `_run` computes them instead.
    (embeddings,) = (module for module in model.modules() if isinstance(module, CLIPTextEmbeddings))
    del embeddings.position_ids
    return model.float()


def load_clip(load: LoadModule, folder: ModelFolder, component: str, tokenizer: str, model_class: Any) -> TextEncoder:
    """Load the frozen encoder of `component`, sharded layer by layer, with the tokenizer of folder `tokenizer`."""
    empty = build_clip(folder, component, model_class)
    names = empty.state_dict().keys()
    # A model without projection is stored as the `text_model` it once was part of.
    files = folder.weights(
        component, TRANSFORMERS_STEM, lambda key: key if key in names else key.removeprefix("text_model.")
    )
    return TextEncoder(load(empty, files, CLIP_BLOCKS), load_tokenizer(folder, tokenizer))


def clip_tokens(tokenizer: Any, caption: str) -> Tensor:
    """Tokenize a caption: (1, model_max_length) ids, padded or cut."""
    ids: Tensor = tokenizer(
        caption, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
    ).input_ids
    return ids


def clip_windows(tokenizer: Any, caption: str, count: int) -> Tensor:
    """Tokenize a caption in windows, each with a beginning, an end and padding: (1, count * model_max_length) ids.

    The rest of the caption is cut. A single window equals `clip_tokens`. ComfyUI and A1111 give the encoder such
    windows too, but move a word that would be split to the next window.
    """
    length = tokenizer.model_max_length - 2
    ids = tokenizer(caption, add_special_tokens=False, verbose=False).input_ids
    begin, end, padding = tokenizer.bos_token_id, tokenizer.eos_token_id, [tokenizer.pad_token_id] * length
    windows = [
        [begin, *ids[start : start + length], end, *padding][: length + 2] for start in range(0, count * length, length)
    ]
    return torch.tensor(windows).reshape(1, -1)


def clip_pooled(encoder: TextEncoder, caption: str) -> Tensor:
    """The last state at the end of the caption: (1, D)."""
    ids = clip_tokens(encoder.tokenizer, caption).to(device_of(encoder.model))
    pooled: Tensor = _run(encoder.model, ids).pooler_output
    return pooled


def clip_states(model: Any, ids: Tensor, layer: int = -2) -> tuple[Tensor, Any]:
    """States after a layer, (B, L, D), and the model's output.

    A hook on the layer takes the states: transformers' own hooks depend on the model's class, which sharding replaces.
    """
    from transformers.models.clip.modeling_clip import CLIPEncoder

    (layers,) = (module.layers for module in model.modules() if isinstance(module, CLIPEncoder))
    states: list[Tensor] = []
    hook = layers[layer].register_forward_hook(lambda module, arguments, output: states.append(output))
    try:
        output = _run(model, ids)
    finally:
        hook.remove()
    return states[0], output


_PUBLISHED = {"vocab_size": 49408, "max_position_embeddings": 77}
CLIP_L = _PUBLISHED | {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
CLIP_G = _PUBLISHED | {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1280,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
}
"""Sizes of OpenAI's ViT-L/14 and OpenCLIP's ViT-bigG/14."""
CLIP_TOKENS = 77


def tiny_clip(width: int, num_tokens: int, **changes: Any) -> dict[str, Any]:
    """Config of a tiny model for the tokenizer of `write_tiny_clip_tokenizer`."""
    # The id of the end token is wrong, as in the published configs; the caption then ends at its highest id.
    return {
        "model_type": CLIP_TYPES[0],
        "vocab_size": 514,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "projection_dim": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": num_tokens,
        "hidden_act": "quick_gelu",
        "bos_token_id": 0,
        "eos_token_id": 2,
    } | changes


def write_tiny_clip(folder: Path, config: dict[str, Any], model_class: Any) -> None:
    """Write a model of `tiny_clip`'s config with random weights. model_class: as for `build_clip`."""
    from transformers import CLIPTextConfig

    write_random(folder, lambda: model_class(CLIPTextConfig.from_dict(config)))


def write_tiny_clip_tokenizer(folder: Path, num_tokens: int, pad_token: str = "<|endoftext|>") -> None:
    """Write CLIP's tokenizer with one token per byte."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    pieces = [*alphabet, *(f"{letter}</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[],
        pad_token=pad_token,
        model_max_length=num_tokens,
    )
    tokenizer.save_pretrained(folder)


def _run(model: Any, ids: Tensor) -> Any:
    return model(ids, position_ids=torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
