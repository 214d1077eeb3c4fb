"""Language models with random weights: the published and the tiny sizes, and how their folders are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.models.parts.folder import TRANSFORMERS_STEM, random_weight
from trainer.models.parts.image.text_encoder import TINY_CHAT_TEMPLATE, train_tokenizer
from trainer.weights.files import stored_tensors

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
SHARD_NUMBERS = 1 << 30

# Sizes from each publisher's config.json; the tests hold the numbers of parameters.
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "mistral-7b-v0.3": {
        "model_type": "mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
}
SIZES = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Fields of a config that identify the architecture."""
TINY: Mapping[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}


def sizes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config that identify the architecture."""
    return {name: config.get(name) for name in SIZES}


def config_of(sizes: Mapping[str, Any]) -> Any:
    """Make transformers' config of a model with these sizes, `model_type` among them."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**sizes)


def write_byte_tokenizer(folder: Path, config: Any) -> None:
    """Write a tokenizer whose tokens are bytes, and a generation config."""
    from transformers import GenerationConfig

    tokenizer = train_tokenizer([], NUM_BYTES + 1, config.max_position_embeddings, (END_OF_TEXT,), TINY_CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id).save_pretrained(folder)


def write_random_weights(folder: Path, model: nn.Module) -> None:
    """Write random weights in bf16, one file at a time: all together may not fit into memory."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in stored_tensors(model).items():
        if sum(other.numel() for other in shards[-1].values()) + tensor.numel() > SHARD_NUMBERS:
            shards.append({})
        shards[-1][name] = tensor
    names = [
        f"{TRANSFORMERS_STEM}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    for name, shard in zip(names, shards, strict=True):
        drawn = {key: random_weight("causal-lm", key, tensor.shape).bfloat16() for key, tensor in shard.items()}
        save_file(drawn, folder / name, {"format": "pt"})
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{TRANSFORMERS_STEM}.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
