"""Models that no family here knows: a diffusers folder whose transformer, latents and scheduler are of known kinds.

What is needed is concluded from the folder, see `trainer/models/observed_transformer.py`. Its tiny model is a
Lumina-Image-2.0, and so are the sizes for planning before a download.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers.models.transformers.transformer_lumina2 import Lumina2Transformer2DModel

from trainer.models.flow_transformer import Index
from trainer.models.observed_transformer import ObservedTransformer
from trainer.models.parts.folder import write_random
from trainer.models.parts.image.text_encoder import tiny_language_model, write_tiny_tokenizer
from trainer.models.parts.image.vae import published_vae, tiny_vae

ARCHITECTURE = "lumina-image-2.0"
GEMMA2_2B = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "layer_types": None,
}
"""Sizes of its text encoder; the types of the layers follow from their number."""
MAX_TOKENS = 256


class Auto(ObservedTransformer):
    network = Lumina2Transformer2DModel
    architectures = (ARCHITECTURE,)
    default_architecture = ARCHITECTURE

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        return {
            "transformer": {
                "in_channels": 16,
                "hidden_size": 2304,
                "num_layers": 26,
                "num_refiner_layers": 2,
                "num_attention_heads": 24,
                "num_kv_heads": 8,
                "multiple_of": 256,
                "axes_dim_rope": [32, 32, 32],
                "axes_lens": [300, 512, 512],
                "cap_feat_dim": GEMMA2_2B["hidden_size"],
            },
            "vae": published_vae(latent_channels=16),
            "text_encoder": GEMMA2_2B,
            "tokenizer": {"model_max_length": MAX_TOKENS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        return {
            "transformer": TINY_TRANSFORMER,
            "vae": tiny_vae(latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159),
            "text_encoder": tiny_language_model(TINY_WIDTH, TINY_VOCABULARY, num_layers=3)
            | {"head_dim": TINY_WIDTH // 4, "sliding_window": MAX_TOKENS},
            "scheduler": {"shift": 6.0},
        }

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from transformers import Gemma2Config, Gemma2Model

        write_random(folder / "text_encoder", lambda: Gemma2Model(Gemma2Config(**configs["text_encoder"])))
        write_tiny_tokenizer(folder / "tokenizer", TINY_VOCABULARY, MAX_TOKENS)
        return "Lumina2Pipeline", {
            "text_encoder": ("transformers", "Gemma2Model"),
            "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        }


FAMILY = Auto


# The model of `model.path: tiny`.

TINY_WIDTH = 32
TINY_VOCABULARY = 512
TINY_TRANSFORMER = {
    "in_channels": 4,
    "hidden_size": 48,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 3,
    "num_kv_heads": 3,
    "multiple_of": 16,
    "axes_dim_rope": [4, 6, 6],
    "axes_lens": [300, 64, 64],
    "cap_feat_dim": TINY_WIDTH,
}
