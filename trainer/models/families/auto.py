"""Models that no family here knows: a diffusers folder whose transformer, latents and scheduler are of known kinds.

What is needed is concluded from the folder, see `trainer/models/observed_transformer.py`. The tiny model is an
Ovis-Image, and so are the sizes for plans before a download.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers.models.transformers.transformer_ovis_image import OvisImageTransformer2DModel

from trainer.models.flow_transformer import Index
from trainer.models.observed_transformer import ObservedTransformer
from trainer.models.parts.folder import write_random
from trainer.models.parts.image.text_encoder import (
    NO_LAYER_TYPES,
    QWEN3_4B,
    tiny_language_model,
    write_tiny_tokenizer,
)
from trainer.models.parts.image.vae import published_vae, tiny_vae

ARCHITECTURE = "ovis-image-7b"
QWEN3_1_7B = QWEN3_4B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
MAX_TOKENS = 284
"""Of its prompt with the words around it."""


class Auto(ObservedTransformer):
    network = OvisImageTransformer2DModel
    architectures = (ARCHITECTURE,)
    default_architecture = ARCHITECTURE

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        return {
            "transformer": {
                "in_channels": 64,
                "out_channels": 64,
                "num_layers": 6,
                "num_single_layers": 27,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": QWEN3_1_7B["hidden_size"],
                "axes_dims_rope": [16, 56, 56],
            },
            "vae": published_vae(latent_channels=16),
            "text_encoder": QWEN3_1_7B | NO_LAYER_TYPES,
            "tokenizer": {"model_max_length": MAX_TOKENS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        text = tiny_language_model(TINY_WIDTH, TINY_VOCABULARY, num_layers=2)
        return {
            "transformer": TINY_TRANSFORMER,
            "vae": tiny_vae(latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159),
            "text_encoder": text | {"model_type": "qwen3", "head_dim": TINY_WIDTH // 4},
            "scheduler": {"shift": 3.0, "use_dynamic_shifting": True},
        }

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from transformers import Qwen3Config, Qwen3Model

        write_random(folder / "text_encoder", lambda: Qwen3Model(Qwen3Config(**configs["text_encoder"])))
        write_tiny_tokenizer(folder / "tokenizer", TINY_VOCABULARY, MAX_TOKENS)
        return "OvisImagePipeline", {
            "text_encoder": ("transformers", "Qwen3Model"),
            "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        }


FAMILY = Auto


# The model of `model.path: tiny`.

TINY_WIDTH = 32
TINY_VOCABULARY = 512
TINY_TRANSFORMER = {
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": TINY_WIDTH,
    "axes_dims_rope": [4, 6, 6],
}
