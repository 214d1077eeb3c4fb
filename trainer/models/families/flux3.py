"""FLUX.3 klein, trained by flow matching from the base checkpoint, which is not step-distilled.

Example and Batch keys: "latents" (C, H/16, W/16) fp32, patchified and normalised, C = 128 for the published model;
"prompt_embeds" (L, D), stacked hidden states in the text encoder's type, L a multiple of 80 with padding, which the
model attends to; "reference_0", "reference_1" and so on, the latents of reference images. A Batch adds a batch dim in
front. See DECISIONS 37.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_flux3 import Flux3Attention, Flux3Transformer2DModel
from torch import Tensor, nn

from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models.base import LoadModule, TextLength, references_of
from trainer.models.flow_transformer import FlowTransformer, Index
from trainer.models.objectives.base import Batch, Example
from trainer.models.objectives.flow_matching import Shift
from trainer.models.parts.chat.chat_template import rendered
from trainer.models.parts.folder import check_architecture, write_random
from trainer.models.parts.image.images import pack, unpack
from trainer.models.parts.image.packed_vae import PACKED_AUTOENCODER, PACKED_VAE, tiny_packed_vae
from trainer.models.parts.image.text_encoder import (
    QWEN3_VL_4B,
    TextEncoder,
    hidden_states,
    language_model_config,
    load_language_model,
    load_tokenizer,
    max_tokens,
    stacked_layers,
    text_lengths,
    tiny_qwen3_vl,
    write_tiny_tokenizer,
)
from trainer.models.parts.layout import numbered, tensors_of
from trainer.parallel.parallelize import ShardSpec
from trainer.system.errors import InputError
from trainer.system.pinned import send
from trainer.weights.files import Fused


@dataclass(frozen=True)
class Architecture:
    """The sizes of a transformer."""

    num_layers: int
    num_single_layers: int
    num_heads: int

    def __str__(self) -> str:
        return f"{self.num_layers} + {self.num_single_layers} blocks of {self.num_heads} heads"


ARCHITECTURES = {"flux3": Architecture(5, 28, 24)}
DEFAULT_ARCHITECTURE = "flux3"
SAMPLER_SHIFT = 6.93
"""The constant shift of diffusers' pipeline, which has no scheduler folder."""
WINDOW = 80
"""Captions are padded to multiples of this many tokens."""
MAX_TOKENS = 8192
ROPE_SCALE = 0.5
"""Distance between neighbouring tokens of an image in the rotary positions."""


class Flux3(FlowTransformer):
    network = Flux3Transformer2DModel
    autoencoder = PACKED_AUTOENCODER
    lora_loader = "Flux3LoraLoaderMixin"
    fixed_scheduler: ClassVar = {"shift": SAMPLER_SHIFT}
    shard = ShardSpec(
        blocks=("Flux3ModeTransformerBlock", "Flux3SingleTransformerBlock"),
        fp32_inputs=frozenset({"img_ids", "image_cond_ids"}),
    )
    # Adapters skip the blocks that only reference images pass through, since most runs have no such images.
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"(mode_blocks\.image|txt_mode_blocks|single_transformer_blocks)\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0)",
            r"(mode_blocks\.image|txt_mode_blocks|single_transformer_blocks)\.\d+\.ff\.(linear_in|linear_out)",
        )
    }
    halves_swapped = (r"norm_out\.linear",)
    never_trained = (r"(x_embedders|early_stream_modulations|single_stream_modulations|mode_blocks)\.image_cond\..+",)
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", Flux3Transformer2DModel.__name__)}
    options_read = frozenset({"architecture", "text_layers", "max_tokens"})
    longest_text = 4096  # the option's own limit
    shift = Shift(constant=SAMPLER_SHIFT)
    reads_references = True

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._vae = self._folder.config("vae", self.autoencoder.name)
        self._language_model = language_model_config(self._folder, "qwen3_vl")
        self._max_tokens = max_tokens(model, self._folder, "tokenizer", MAX_TOKENS)
        check_architecture(model, self._folder, ARCHITECTURES, self._own_architecture())
        self._check_transformer()
        needed = self._architecture.joint_attention_dim
        self._text_layers = stacked_layers(model, self._language_model, needed, self._folder)

    @property
    def model_spec(self) -> str:
        return "Flux.3-klein" if self._own_architecture() == ARCHITECTURES["flux3"] else "Flux.3-tiny"

    @property
    def text_recipe(self) -> str:
        return f"{self._text_layers} {self._max_tokens}"

    def build(self, component: str) -> nn.Module:
        model = super().build(component)
        with torch.device("meta"):
            _widen_norms(model)
        return model

    def layout(self, component: str) -> tuple[Fused, ...]:
        model = self.build(component)
        blocks = (block for theirs, ours in BLOCKS.items() for block in numbered(theirs, ours, model, BLOCK))
        return tensors_of(model, (*MODULES, *blocks))

    def text_encoder(self, load: LoadModule) -> TextEncoder:
        from transformers import Qwen3VLTextConfig, Qwen3VLTextModel

        classes = (Qwen3VLTextConfig, Qwen3VLTextModel)
        return load_language_model(load, self._folder, classes, self._language_model, self._text_layers)

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoder, caption: str) -> Example:
        tokens = _tokenize(encoder.tokenizer, caption, self._max_tokens)
        states = hidden_states(encoder.model, tokens, self._text_layers)
        return {"prompt_embeds": torch.cat(states, dim=-1)[0].cpu()}

    def dropped_text(self, empty: Example, caption: Example) -> Example:
        """The empty caption, padded to as many windows as the caption, so that both may share a batch.

        Padding follows the text, has one position and sees only the text: all its states are equal, in a window of any
        length. The chat template never fills a window, so the last state of the empty caption is padding.
        """
        states = empty["prompt_embeds"]
        missing = caption["prompt_embeds"].shape[0] - states.shape[0]
        return {"prompt_embeds": torch.cat([states, states[-1:].expand(missing, -1)])}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        tokenizer = load_tokenizer(self._folder, "tokenizer")
        template = partial(_templated, tokenizer)
        return [(length,) for length in text_lengths("text_encoder", tokenizer, captions, self._max_tokens, template)]

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        tokens = min(math.ceil(num_tokens / WINDOW) * WINDOW, self._max_tokens)
        return {"prompt_embeds": torch.zeros(tokens, self._architecture.joint_attention_dim, dtype=dtype)}

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        return {
            "transformer": {
                "in_channels": 128,
                "cond_in_channels": 128,
                "num_layers": sizes.num_layers,
                "num_single_layers": sizes.num_single_layers,
                "attention_head_dim": 128,
                "num_attention_heads": sizes.num_heads,
                "joint_attention_dim": 8 * QWEN3_VL_4B["hidden_size"],
                "timestep_channels": 256,
                "axes_dims_rope": [32, 32, 32, 32],
            },
            "vae": PACKED_VAE,
            "text_encoder": QWEN3_VL_4B,
            "tokenizer": {"model_max_length": MAX_TOKENS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        return {
            "transformer": _tiny_transformer(),
            "vae": tiny_packed_vae(),
            "text_encoder": tiny_qwen3_vl(TINY_WIDTH, TINY_VOCABULARY, TINY_LAYERS[-1] + 1),
        }

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        height, width = latents.shape[-2:]
        text, references = batch["prompt_embeds"], references_of(batch)
        conditions: dict[str, Tensor] = {}
        if references:
            ids = [image_ids(x.shape[-2], x.shape[-1], -number) for number, x in enumerate(references, 1)]
            conditions["image_cond_hidden_states"] = torch.cat([pack(image) for image in references], dim=1)
            conditions["image_cond_ids"] = send(torch.cat(ids), latents.device)
        packed = model["transformer"](
            hidden_states=pack(latents),
            encoder_hidden_states=text.to(latents.dtype),
            timestep=sigma,
            img_ids=send(image_ids(height, width), latents.device),
            txt_ids=send(text_ids(text.shape[1]), latents.device),
            return_dict=False,
            **conditions,
        )[0]
        return unpack(packed.float(), height, width)

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

        def text_encoder() -> Any:
            return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**configs["text_encoder"]))

        write_random(folder / "text_encoder", text_encoder)
        write_tiny_tokenizer(folder / "tokenizer", TINY_VOCABULARY, TINY_TOKENS)
        return "", {}

    def _own_architecture(self) -> Architecture:
        config = self._architecture
        return Architecture(config.num_layers, config.num_single_layers, config.num_attention_heads)

    def _check_transformer(self) -> None:
        config = self._architecture
        if config.flow_map:
            raise InputError(
                f"{self._folder.field} {self.folder}: the transformer is step-distilled (flow_map); train the model it "
                "was made from, black-forest-labs/flux-3-image-klein-base"
            )


FAMILY = Flux3


class _WideNorm(nn.RMSNorm):
    """A norm of fp32 activations with weights of any type. nn.RMSNorm warns of bf16 weights and has no fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def _widen_norms(model: nn.Module) -> None:
    """Make the norms of queries and keys compute in fp32, whatever type the model computes in."""
    for attention in [module for module in model.modules() if isinstance(module, Flux3Attention)]:
        for name in ("norm_q", "norm_k"):
            norm = attention.get_submodule(name)
            assert isinstance(norm, nn.RMSNorm)
            setattr(attention, name, _WideNorm(attention.head_dim, eps=norm.eps))


def _templated(tokenizer: Any, caption: str) -> str:
    """Put the caption into the chat template."""
    return rendered(tokenizer, [{"role": "user", "content": caption}], add_generation_prompt=True)


def _tokenize(tokenizer: Any, caption: str, max_tokens: int) -> Mapping[str, Tensor]:
    """Tokenize the caption in the chat template, padded to the next multiple of WINDOW or cut to `max_tokens`."""
    text = _templated(tokenizer, caption)
    length = len(tokenizer(text, truncation=True, max_length=max_tokens).input_ids)
    window = min(math.ceil(length / WINDOW) * WINDOW, max_tokens)
    tokens = tokenizer(
        text, return_tensors="pt", padding="max_length", padding_side="right", truncation=True, max_length=window
    )
    # The model was trained with all padding at position 1, and it attends to padding.
    positions = torch.arange(window)[None].masked_fill(tokens["attention_mask"] == 0, 1)
    return {**tokens, "position_ids": positions}


def image_ids(height: int, width: int, image: int = 0) -> Tensor:
    """Positions (time, row, column, image) of an image's tokens, (h * w, 4). image: below 0 for reference images."""
    ids = torch.cartesian_prod(torch.zeros(1).long(), torch.arange(height), torch.arange(width), torch.tensor([image]))
    return ids * torch.tensor([1, ROPE_SCALE, ROPE_SCALE, 1])


def text_ids(num_tokens: int) -> Tensor:
    """Positions of the text tokens, (L, 4); only the last column differs. Integers: bf16 is exact only up to 256."""
    zero = torch.zeros(1, dtype=torch.int64)
    return torch.cartesian_prod(zero, zero, zero, torch.arange(num_tokens))


MODES = ("image", "image_cond", "txt")
MODULES = (
    Fused("time_in.in_layer", ("timestep_embedder.linear_1",)),
    Fused("time_in.out_layer", ("timestep_embedder.linear_2",)),
    Fused("txt_in", ("context_embedder",)),
    *(Fused(f"emb_in.{mode}", (f"x_embedders.{mode}",)) for mode in MODES),
    *(
        Fused(f"{stage}_stream_modulations.{mode}.lin", (f"{stage}_stream_modulations.{mode}.linear",))
        for stage in ("early", "single")
        for mode in MODES
    ),
    Fused("final_layer.image.linear", ("proj_out",)),
    Fused("final_layer.image.adaLN_modulation.1", ("norm_out.linear",), halves_swapped=True),
)
"""The modules under their names in BFL's file; the tables below hold the modules of the blocks."""
BLOCKS = {
    "content_mode_blocks.image": "mode_blocks.image",
    "content_mode_blocks.image_cond": "mode_blocks.image_cond",
    "txt_mode_blocks": "txt_mode_blocks",
    "single_blocks": "single_transformer_blocks",
}
BLOCK = {
    "q_proj": ("attn.to_q",),
    "k_proj": ("attn.to_k",),
    "v_proj": ("attn.to_v",),
    "attn_out": ("attn.to_out.0",),
    "norm.query_norm": ("attn.norm_q",),
    "norm.key_norm": ("attn.norm_k",),
    "mlp_in": ("ff.linear_in",),
    "mlp_out": ("ff.linear_out",),
}


# The model of `model.path: tiny`.

TINY_LAYERS = (1, 2)
TINY_TOKENS = 2 * WINDOW
TINY_WIDTH = 32
TINY_VOCABULARY = 512


def _tiny_transformer() -> dict[str, Any]:
    return {
        "in_channels": 16,
        "cond_in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TINY_WIDTH * len(TINY_LAYERS),
        "timestep_channels": 32,
        "axes_dims_rope": [4, 4, 4, 4],
    }
