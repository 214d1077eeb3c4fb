"""ERNIE-Image and its distilled Turbo, trained by flow matching.

Example keys: "latents" (C, H/16, W/16) fp32, patchified and normalised, C = 128 for the published model;
"prompt_embeds" (L, D), one hidden state of the caption's own tokens in the text encoder's type. A Batch adds a batch
dim in front and pads captions to the longest; "prompt_tokens" (B,) holds their lengths. The transformer reads no
padding, and the first of an image's three positions is the length of its own caption.

The prompt enhancer of diffusers' pipeline is not used: images are trained on captions as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_ernie_image import ErnieImageTransformer2DModel
from torch import Tensor, nn

from trainer.config.families import Distilled
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models.base import LoadModule, TextLength
from trainer.models.flow_transformer import FlowTransformer, Index, pad_captions
from trainer.models.objectives.base import Batch, Example
from trainer.models.objectives.flow_matching import Shift
from trainer.models.parts.folder import check_architecture, check_inputs, write_random
from trainer.models.parts.image.packed_vae import (
    PACKED_AUTOENCODER,
    PACKED_VAE,
    decode_packed,
    encode_packed,
    tiny_packed_vae,
)
from trainer.models.parts.image.text_encoder import (
    TextEncoder,
    hidden_states,
    language_model_config,
    load_language_model,
    load_tokenizer,
    max_tokens,
    text_lengths,
    tiny_language_model,
    write_tiny_tokenizer,
)
from trainer.parallel.parallelize import ShardSpec
from trainer.weights.files import Fused


@dataclass(frozen=True)
class Architecture:
    """The sizes of a transformer."""

    num_layers: int
    width: int

    def __str__(self) -> str:
        return f"{self.num_layers} blocks of width {self.width}"


ARCHITECTURES = {"ernie-image": Architecture(36, 4096)}
"""Turbo has the same transformer."""
DEFAULT_ARCHITECTURE = "ernie-image"
SHIFT = 4.0
"""Of scheduler/scheduler_config.json of baidu/ERNIE-Image."""
LATENTS_EPS = 1e-5
"""Added to the variances of the latents as the model was trained, and as diffusers' pipeline decodes; the published
config of the autoencoder says 1e-4."""
MAX_TOKENS = 2048
MINISTRAL_3B = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


class ErnieImage(FlowTransformer):
    network = ErnieImageTransformer2DModel
    autoencoder = replace(
        PACKED_AUTOENCODER,
        encode=partial(encode_packed, eps=LATENTS_EPS),
        decode=partial(decode_packed, eps=LATENTS_EPS),
    )
    lora_loader = "ErnieImageLoraLoaderMixin"
    shard = ShardSpec(
        blocks=("ErnieImageSharedAdaLNBlock",),
        fp32_inputs=frozenset({"timestep"}),
        returns_views=("ErnieImageTransformer2DModel",),
    )
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"layers\.\d+\.self_attention\.(to_q|to_k|to_v|to_out\.0)",
            r"layers\.\d+\.mlp\.(gate_proj|up_proj|linear_fc2)",
        )
    }
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", ErnieImageTransformer2DModel.__name__)}
    distilled = (Distilled(("ERNIE-Image-Turbo", "ernie-image-turbo"), base="baidu/ERNIE-Image", steps=8, marks={}),)
    options_read = frozenset({"architecture", "distilled", "max_tokens"})
    longest_text = MAX_TOKENS
    shift = Shift(constant=SHIFT)

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._language_model = language_model_config(self._folder, "mistral")
        self._max_tokens = max_tokens(model, self._folder, "tokenizer", MAX_TOKENS)
        config = self._architecture
        check_architecture(model, self._folder, ARCHITECTURES, Architecture(config.num_layers, config.hidden_size))
        given = (4 * self._vae["latent_channels"], self._language_model["hidden_size"])
        check_inputs(self._folder, (config.in_channels, config.text_in_dim), given)

    @property
    def model_spec(self) -> str:
        return "ernie-image"

    def layout(self, component: str) -> tuple[Fused, ...]:
        """Original files have diffusers' names."""
        return tuple(Fused(name, (name,)) for name in self.build(component).state_dict())

    def text_encoder(self, load: LoadModule) -> TextEncoder:
        from transformers import MistralConfig, MistralModel

        classes = (MistralConfig, MistralModel)
        return load_language_model(load, self._folder, classes, self._language_model, self._text_layers)

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoder, caption: str) -> Example:
        """Encode to the second-to-last hidden state, without a template and without padding."""
        ids = encoder.tokenizer(caption, truncation=True, max_length=self._max_tokens).input_ids
        # An empty caption has no token where the tokenizer adds none of its own.
        tokens = torch.tensor([ids or [encoder.tokenizer.bos_token_id or 0]])
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        (states,) = hidden_states(encoder.model, inputs, self._text_layers)
        return {"prompt_embeds": states[0].cpu()}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        tokenizer = load_tokenizer(self._folder, "tokenizer")
        return [(length,) for length in text_lengths("text_encoder", tokenizer, captions, self._max_tokens)]

    def batch_key(self, example: Example) -> Hashable:
        # The model masks its own padding: captions of any length share a batch.
        return tuple(example["latents"].shape[-2:])

    def collate(self, examples: Sequence[Example]) -> Batch:
        batch, lengths = pad_captions(examples)
        return batch | {"prompt_tokens": torch.tensor(lengths)}

    def sample_rows(self, batch: Batch) -> Mapping[str, Tensor]:
        # These layers get all tokens of the first place, one of each item, then those of the second.
        num_tokens = self.num_tokens(batch["latents"]) + batch["prompt_embeds"].shape[1]
        return {r"layers\.\d+\.mlp\..+|final_linear": torch.arange(len(batch["latents"])).expand(num_tokens, -1)}

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        return {
            "prompt_embeds": torch.zeros(min(num_tokens, self._max_tokens), self._architecture.text_in_dim, dtype=dtype)
        }

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        return {
            "transformer": {
                "hidden_size": sizes.width,
                "num_attention_heads": sizes.width // 128,
                "num_layers": sizes.num_layers,
                "ffn_hidden_size": 12288,
                "in_channels": 128,
                "out_channels": 128,
                "text_in_dim": MINISTRAL_3B["hidden_size"],
                "rope_axes_dim": [32, 48, 48],
            },
            "vae": PACKED_VAE,
            "text_encoder": MINISTRAL_3B,
            "tokenizer": {"model_max_length": MAX_TOKENS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        text = tiny_language_model(TINY_WIDTH, TINY_VOCABULARY, num_layers=3)
        vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        return {
            "transformer": TINY_TRANSFORMER,
            "vae": tiny_packed_vae(),
            "text_encoder": {
                "model_type": "mistral3",
                "text_config": text | {"model_type": "mistral", "head_dim": TINY_WIDTH // 4},
                "vision_config": vision | {"num_attention_heads": 2, "head_dim": 8, "image_size": 32, "patch_size": 16},
            },
            "scheduler": {"shift": SHIFT},
        }

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        predicted: Tensor = model["transformer"](
            hidden_states=latents,
            timestep=sigma * 1000,
            text_bth=batch["prompt_embeds"].to(latents.dtype),
            text_lens=batch["prompt_tokens"],
            return_dict=False,
        )[0]
        return predicted.float()

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from transformers import Mistral3Config, Mistral3Model

        write_random(folder / "text_encoder", lambda: Mistral3Model(Mistral3Config(**configs["text_encoder"])))
        write_tiny_tokenizer(folder / "tokenizer", TINY_VOCABULARY, TINY_TOKENS)
        return "ErnieImagePipeline", {
            "text_encoder": ("transformers", "Mistral3Model"),
            "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        }

    @property
    def _text_layers(self) -> tuple[int]:
        return (self._language_model["num_hidden_layers"] - 1,)


FAMILY = ErnieImage


# The model of `model.path: tiny`.

TINY_TOKENS = 48
TINY_WIDTH = 32
TINY_VOCABULARY = 512
TINY_TRANSFORMER = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "in_channels": 16,
    "out_channels": 16,
    "text_in_dim": TINY_WIDTH,
    "rope_axes_dim": [4, 6, 6],
}
