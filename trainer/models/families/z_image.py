"""Z-Image and its distilled Turbo, trained by flow matching.

Example keys: "latents" (16, H/8, W/8) fp32, normalised; "prompt_embeds" (L, D), one hidden state of the caption's
own tokens in the text encoder's type. A Batch adds a batch dim in front and pads captions to the longest; if their
lengths differ, "prompt_tokens" (B,) holds them. See DECISIONS 43.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from torch import Tensor, nn

from trainer.config.families import Distilled
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models.base import LoadModule, TextLength
from trainer.models.flow_transformer import FlowTransformer, Index, pad_captions
from trainer.models.objectives.base import Batch, Example
from trainer.models.objectives.flow_matching import Shift
from trainer.models.parts.chat.chat_template import rendered
from trainer.models.parts.folder import check_architecture, check_inputs, write_random
from trainer.models.parts.image.text_encoder import (
    NO_LAYER_TYPES,
    QWEN3_4B,
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
from trainer.models.parts.image.vae import published_vae, tiny_vae
from trainer.parallel.parallelize import ShardSpec
from trainer.system.errors import InputError
from trainer.weights.files import Fused


@dataclass(frozen=True)
class Architecture:
    """The sizes of a transformer."""

    num_layers: int
    num_refiners: int
    width: int

    def __str__(self) -> str:
        return f"{self.num_layers} + 2 x {self.num_refiners} blocks of width {self.width}"


ARCHITECTURES = {"z-image": Architecture(30, 2, 3840), "z-image-turbo": Architecture(30, 2, 3840)}
"""The two cannot be distinguished by their weights."""
DEFAULT_ARCHITECTURE = "z-image"
SHIFTS = {"z-image": 6.0, "z-image-turbo": 3.0}
"""Shifts of the samplers, the only difference between the published folders."""
MAX_TOKENS = 512


class ZImage(FlowTransformer):
    """In samples, guidance is the `guidance_scale` of diffusers' pipeline plus 1, whose 0 means no guidance."""

    network = ZImageTransformer2DModel
    lora_loader = "ZImageLoraLoaderMixin"
    shard = ShardSpec(blocks=("ZImageTransformerBlock",), fp32_inputs=frozenset({"t"}))
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"(layers|noise_refiner|context_refiner)\.\d+\.attention\.(to_q|to_k|to_v|to_out\.0)",
            r"(layers|noise_refiner|context_refiner)\.\d+\.feed_forward\.(w1|w2|w3)",
        )
    }
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", ZImageTransformer2DModel.__name__)}
    distilled = (
        Distilled(
            ("Z-Image-Turbo", "z_image_turbo", "z_image_turbo_bf16"),
            base="Tongyi-MAI/Z-Image",
            steps=8,
            marks={"scheduler/scheduler_config.json": {"shift": SHIFTS["z-image-turbo"]}},
            architecture="z-image-turbo",
        ),
    )
    options_read = frozenset({"architecture", "distilled", "max_tokens"})
    longest_text = MAX_TOKENS
    shift = Shift(constant=3.0)
    diffusers_adapters = FlowTransformer.diffusers_adapters | {"lokr"}

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._language_model = language_model_config(self._folder, "qwen3")
        self._max_tokens = max_tokens(model, self._folder, "tokenizer", MAX_TOKENS)
        config = self._architecture
        own = Architecture(config.n_layers, config.n_refiner_layers, config.dim)
        check_architecture(model, self._folder, ARCHITECTURES, own)
        self._check_inputs()

    @property
    def model_spec(self) -> str:
        return "z-image"

    def layout(self, component: str) -> tuple[Fused, ...]:
        names = self.build(component).state_dict()
        return tuple(_original(name) for name in names if not name.endswith((".to_k.weight", ".to_v.weight")))

    def text_encoder(self, load: LoadModule) -> TextEncoder:
        from transformers import Qwen3Config, Qwen3Model

        classes = (Qwen3Config, Qwen3Model)
        return load_language_model(load, self._folder, classes, self._language_model, self._text_layers)

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoder, caption: str) -> Example:
        """Encode to the second-to-last hidden state, without padding: the pipeline cuts its padding off again."""
        text = _templated(encoder.tokenizer, caption)
        tokens = encoder.tokenizer(text, return_tensors="pt", truncation=True, max_length=self._max_tokens)
        (states,) = hidden_states(encoder.model, tokens, self._text_layers)
        return {"prompt_embeds": states[0].cpu()}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        tokenizer = load_tokenizer(self._folder, "tokenizer")
        template = partial(_templated, tokenizer)
        return [(length,) for length in text_lengths("text_encoder", tokenizer, captions, self._max_tokens, template)]

    def batch_key(self, example: Example) -> Hashable:
        # The model masks its own padding: captions of any length share a batch.
        return tuple(example["latents"].shape[-2:])

    def collate(self, examples: Sequence[Example]) -> Batch:
        batch, lengths = pad_captions(examples)
        # If all are equal, no lengths have to be fetched from the device to cut the captions again.
        return batch if len(set(lengths)) == 1 else batch | {"prompt_tokens": torch.tensor(lengths)}

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        return {
            "prompt_embeds": torch.zeros(
                min(num_tokens, self._max_tokens), self._architecture.cap_feat_dim, dtype=dtype
            )
        }

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        heads = sizes.width // 128
        return {
            "transformer": {
                "in_channels": 16,
                "dim": sizes.width,
                "n_layers": sizes.num_layers,
                "n_refiner_layers": sizes.num_refiners,
                "n_heads": heads,
                "n_kv_heads": heads,
                "cap_feat_dim": QWEN3_4B["hidden_size"],
                "axes_dims": [32, 48, 48],
                "axes_lens": [1536, 512, 512],
            },
            "vae": published_vae(latent_channels=16),
            "text_encoder": QWEN3_4B | NO_LAYER_TYPES,
            "tokenizer": {"model_max_length": MAX_TOKENS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        text = tiny_language_model(TINY_WIDTH, TINY_VOCABULARY, num_layers=3)
        return {
            "transformer": _tiny_transformer(),
            "vae": tiny_vae(latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159),
            "text_encoder": text | {"model_type": "qwen3", "head_dim": TINY_WIDTH // 4},
            "scheduler": {"shift": SHIFTS[architecture or DEFAULT_ARCHITECTURE]},
        }

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        """The model's time runs from noise to data, and its prediction has that direction too."""
        text = batch["prompt_embeds"].to(latents.dtype)
        lengths = batch["prompt_tokens"].tolist() if "prompt_tokens" in batch else [text.shape[1]] * len(text)
        predicted = model["transformer"](
            x=list(latents.unsqueeze(2)),
            t=1 - sigma,
            cap_feats=[caption[:length] for caption, length in zip(text, lengths, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(predicted).squeeze(2).float()

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from transformers import Qwen3Config, Qwen3Model

        write_random(folder / "text_encoder", lambda: Qwen3Model(Qwen3Config(**configs["text_encoder"])))
        write_tiny_tokenizer(folder / "tokenizer", TINY_VOCABULARY, TINY_TOKENS)
        return "ZImagePipeline", {
            "text_encoder": ("transformers", "Qwen3Model"),
            "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        }

    @property
    def _text_layers(self) -> tuple[int]:
        return (self._language_model["num_hidden_layers"] - 1,)

    def _check_inputs(self) -> None:
        """Refuse parts that do not fit together, and Omni, which also reads images."""
        config = self._architecture
        if config.siglip_feat_dim is not None:
            raise InputError(
                f"{self._folder.field} {self.folder}: the transformer reads SigLIP features of other images; "
                "only text-to-image models are trained, use Z-Image or Z-Image-Turbo"
            )
        given = (self._vae["latent_channels"], self._language_model["hidden_size"])
        check_inputs(self._folder, (config.in_channels, config.cap_feat_dim), given)


FAMILY = ZImage


def _templated(tokenizer: Any, caption: str) -> str:
    """Put the caption into the chat template."""
    messages = [{"role": "user", "content": caption}]
    return rendered(tokenizer, messages, add_generation_prompt=True, enable_thinking=True)


def _original(name: str) -> Fused:
    """The tensor of the original file whose first part is diffusers' `name`."""
    block, is_query, _ = name.rpartition(".attention.to_q.")
    if is_query:
        return Fused(f"{block}.attention.qkv.weight", tuple(f"{block}.attention.to_{part}.weight" for part in "qkv"))
    original = name.replace("all_x_embedder.2-1.", "x_embedder.").replace("all_final_layer.2-1.", "final_layer.")
    for ours, theirs in (("to_out.0", "out"), ("norm_q", "q_norm"), ("norm_k", "k_norm")):
        original = original.replace(f".attention.{ours}.", f".attention.{theirs}.")
    return Fused(original, (name,))


# The model of `model.path: tiny`.

TINY_TOKENS = 48
TINY_WIDTH = 32
TINY_VOCABULARY = 512


def _tiny_transformer() -> dict[str, Any]:
    # Most of its parameters belong to the timestep embedding, whose 1024 hidden units no config changes.
    return {
        "in_channels": 4,
        "dim": 24,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": TINY_WIDTH,
        "axes_dims": [4, 4, 4],
        "axes_lens": [256, 64, 64],
    }
