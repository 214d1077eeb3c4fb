"""FLUX.1: dev (guidance embedding), Kontext (dev that edits images) and schnell (distilled to a few steps), trained by
flow matching.

Example and Batch keys: "latents" (16, H/8, W/8) fp32, normalised; "prompt_embeds" (L, D) of T5 with padding, which the
model attends to, L = 512, and 256 for schnell; "pooled_embeds" (P,) of CLIP; for Kontext "reference_0", the latents of
the image before the edit. A Batch adds a batch dim in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn

from trainer.config.families import Distilled, Edits
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models.base import FLOW_FIELDS, LoadModule, TextLength, references_of
from trainer.models.editing import kind_of
from trainer.models.flow_transformer import FlowTransformer, Index
from trainer.models.objectives.base import Batch, Example
from trainer.models.parts.folder import check_architecture
from trainer.models.parts.image import flux_blocks
from trainer.models.parts.image.clip import (
    CLIP_L,
    CLIP_TOKENS,
    CLIP_TYPES,
    clip_pooled,
    load_clip,
    tiny_clip,
    write_tiny_clip,
    write_tiny_clip_tokenizer,
)
from trainer.models.parts.image.images import pack, patchify, unpack, unpatchify
from trainer.models.parts.image.t5 import (
    T5_TYPES,
    T5_XXL,
    load_t5,
    t5_states,
    tiny_t5,
    write_tiny_t5,
    write_tiny_t5_tokenizer,
)
from trainer.models.parts.image.text_encoder import TextEncoder, load_tokenizer, max_tokens, text_lengths
from trainer.models.parts.image.vae import published_vae, tiny_vae
from trainer.models.parts.layout import numbered, tensors_of
from trainer.parallel.parallelize import ShardSpec
from trainer.system.errors import InputError
from trainer.system.pinned import send
from trainer.weights.files import Fused


@dataclass(frozen=True)
class Architecture:
    """The sizes in which the published transformers differ."""

    num_layers: int
    num_single_layers: int
    guidance_embeds: bool
    edits: bool = False

    def __str__(self) -> str:
        guidance = "with" if self.guidance_embeds else "without"
        reads = ", and edits images" if self.edits else ""
        return f"{self.num_layers} + {self.num_single_layers} blocks {guidance} guidance embedding{reads}"


ARCHITECTURES = {
    "dev": Architecture(19, 38, guidance_embeds=True),
    "kontext": Architecture(19, 38, guidance_embeds=True, edits=True),
    "schnell": Architecture(19, 38, guidance_embeds=False),
}
DEFAULT_ARCHITECTURE = "dev"
MAX_TOKENS = {"dev": 512, "kontext": 512, "schnell": 256}
EDITS = "FluxKontextPipeline"
"""diffusers' pipeline of Kontext, whose other files say the same as dev's."""


@dataclass(frozen=True)
class TextEncoders:
    """The encoders of a caption: CLIP gives one vector of it, T5 a state per token."""

    clip: TextEncoder
    t5: TextEncoder


class Flux1(FlowTransformer):
    network = FluxTransformer2DModel
    lora_loader = "FluxLoraLoaderMixin"
    has_separate_alphas = True
    encoder_folders = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae")
    shard = ShardSpec(
        blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        returns_views=("FluxSingleTransformerBlock", "FluxTransformer2DModel"),
    )
    adapter_targets: Mapping[str, tuple[str, ...]] = {"transformer": flux_blocks.TARGETS}
    halves_swapped = (r"norm_out\.linear",)
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", FluxTransformer2DModel.__name__)}
    distilled = (
        Distilled(
            ("FLUX.1-schnell", "flux1-schnell"),
            base="black-forest-labs/FLUX.1-dev",
            steps=4,
            marks={"transformer/config.json": {"guidance_embeds": False}},
            architecture="schnell",
        ),
    )
    reads_references = True
    edits = (
        Edits(
            "black-forest-labs/FLUX.1-Kontext-dev",
            architecture="kontext",
            references=1,
            sees=False,
            marks={"model_index.json": {"_class_name": EDITS}},
        ),
    )
    objective_fields = FLOW_FIELDS | {"guidance"}
    conditional_fields: ClassVar = {"objective.guidance": ("transformer/config.json", "guidance_embeds", False)}
    options_read = frozenset({"architecture", "distilled", "max_tokens"})
    longest_text = 512
    reads_negative = False

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._folder.encoder_config("text_encoder", *CLIP_TYPES)
        self._folder.encoder_config("text_encoder_2", *T5_TYPES)
        self._folder.read("tokenizer/tokenizer_config.json")
        config = self._architecture
        self._edits = kind_of(model, self._folder.path) is not None
        own = Architecture(config.num_layers, config.num_single_layers, config.guidance_embeds, self._edits)
        check_architecture(model, self._folder, ARCHITECTURES, own)
        self._check_inputs()
        self._max_tokens = max_tokens(model, self._folder, "tokenizer_2", MAX_TOKENS[self._kind])

    @property
    def model_spec(self) -> str:
        return f"flux-1-{self._kind}"

    def layout(self, component: str) -> tuple[Fused, ...]:
        model = self.build(component)
        double = numbered("double_blocks", "transformer_blocks", model, DOUBLE_BLOCK)
        single = numbered("single_blocks", "single_transformer_blocks", model, SINGLE_BLOCK)
        return tensors_of(model, (*MODULES, *double, *single))

    def text_encoder(self, load: LoadModule) -> TextEncoders:
        from transformers import CLIPTextModel

        return TextEncoders(
            load_clip(load, self._folder, "text_encoder", "tokenizer", CLIPTextModel),
            load_t5(load, self._folder, "text_encoder_2", "tokenizer_2"),
        )

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoders, caption: str) -> Example:
        return {
            "prompt_embeds": t5_states(encoder.t5, caption, self._max_tokens)[0].cpu(),
            "pooled_embeds": clip_pooled(encoder.clip, caption)[0].cpu(),
        }

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        """Measure for T5 only. CLIP gives one vector of the first 77 tokens, in training as in every pipeline."""
        tokenizer = load_tokenizer(self._folder, "tokenizer_2")
        return [(length,) for length in text_lengths("text_encoder_2", tokenizer, captions, self._max_tokens)]

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        return {
            "prompt_embeds": torch.zeros(self._max_tokens, self._architecture.joint_attention_dim, dtype=dtype),
            "pooled_embeds": torch.zeros(self._architecture.pooled_projection_dim, dtype=dtype),
        }

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        return {
            "transformer": {
                "in_channels": 64,
                "num_layers": sizes.num_layers,
                "num_single_layers": sizes.num_single_layers,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": T5_XXL["d_model"],
                "pooled_projection_dim": CLIP_L["hidden_size"],
                "axes_dims_rope": [16, 56, 56],
            },
            "vae": published_vae(latent_channels=16),
            "text_encoder": CLIP_L,
            "text_encoder_2": T5_XXL,
            "tokenizer": {"model_max_length": CLIP_TOKENS},
            "tokenizer_2": {"model_max_length": MAX_TOKENS[architecture]},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        published = ARCHITECTURES[architecture or DEFAULT_ARCHITECTURE]
        return {
            "transformer": _tiny_transformer(published.guidance_embeds),
            "vae": tiny_vae(latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159),
            "text_encoder": tiny_clip(TINY_WIDTH, TINY_TOKENS),
            "text_encoder_2": tiny_t5(TINY_WIDTH),
            "scheduler": {"shift": 3.0, "use_dynamic_shifting": True} if published.guidance_embeds else {"shift": 1.0},
        }

    @property
    def latent_channels(self) -> int:
        return int(self._architecture.in_channels) // 4

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from transformers import CLIPTextModel

        write_tiny_clip(folder / "text_encoder", configs["text_encoder"], CLIPTextModel)
        write_tiny_t5(folder / "text_encoder_2", configs["text_encoder_2"])
        write_tiny_clip_tokenizer(folder / "tokenizer", TINY_TOKENS)
        write_tiny_t5_tokenizer(folder / "tokenizer_2", TINY_TOKENS)
        return EDITS if self.config.options.architecture == "kontext" else "FluxPipeline", {
            "text_encoder": ("transformers", "CLIPTextModel"),
            "text_encoder_2": ("transformers", "T5EncoderModel"),
            "tokenizer": ("transformers", "CLIPTokenizer"),
            "tokenizer_2": ("transformers", "T5TokenizerFast"),
        }

    @property
    def _kind(self) -> str:
        if self._edits:
            return "kontext"
        return "dev" if self._architecture.guidance_embeds else "schnell"

    def _check_inputs(self) -> None:
        """Refuse Fill, Depth and Canny, which read other images in addition to the latents."""
        needed = 4 * self._vae["latent_channels"]
        if self._architecture.in_channels != needed:
            raise InputError(
                f"{self._folder.field} {self.folder}: the transformer reads {self._architecture.in_channels} channels, "
                f"the autoencoder gives {needed}; only dev, Kontext and schnell are trained"
            )

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        # The tokens of the image before the edit follow those of the noisy one; the predictions for them are not used.
        images = [patchify(image) for image in (latents, *references_of(batch))]
        height, width = images[0].shape[-2:]
        positions = [flux_blocks.image_ids(x.shape[-2], x.shape[-1], number) for number, x in enumerate(images)]
        ids = send(torch.cat(positions), latents.device)
        packed = model["transformer"](
            hidden_states=torch.cat([pack(image) for image in images], dim=1),
            encoder_hidden_states=batch["prompt_embeds"].to(latents.dtype),
            pooled_projections=batch["pooled_embeds"].to(latents.dtype),
            timestep=sigma,
            guidance=torch.full_like(sigma, guidance) if self._architecture.guidance_embeds else None,
            img_ids=ids,
            # Integers, as for the image: bf16 is exact only up to 256.
            txt_ids=ids.new_zeros(batch["prompt_embeds"].shape[1], 3),
            return_dict=False,
        )[0]
        return unpatchify(unpack(packed[:, : height * width].float(), height, width))


FAMILY = Flux1


MODULES = (
    Fused("img_in", ("x_embedder",)),
    Fused("txt_in", ("context_embedder",)),
    Fused("time_in.in_layer", ("time_text_embed.timestep_embedder.linear_1",)),
    Fused("time_in.out_layer", ("time_text_embed.timestep_embedder.linear_2",)),
    Fused("vector_in.in_layer", ("time_text_embed.text_embedder.linear_1",)),
    Fused("vector_in.out_layer", ("time_text_embed.text_embedder.linear_2",)),
    Fused("guidance_in.in_layer", ("time_text_embed.guidance_embedder.linear_1",)),
    Fused("guidance_in.out_layer", ("time_text_embed.guidance_embedder.linear_2",)),
    Fused("final_layer.linear", ("proj_out",)),
    Fused("final_layer.adaLN_modulation.1", ("norm_out.linear",), halves_swapped=True),
)
"""The modules under their names in BFL's file; the tables below hold the modules of the blocks."""
DOUBLE_BLOCK = {"img_mod.lin": ("norm1.linear",), "txt_mod.lin": ("norm1_context.linear",), **flux_blocks.DOUBLE}
SINGLE_BLOCK = {"modulation.lin": ("norm.linear",), **flux_blocks.SINGLE}


# The model of `model.path: tiny`.

TINY_WIDTH = 32
TINY_TOKENS = 32


def _tiny_transformer(guidance_embeds: bool) -> dict[str, Any]:
    return {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TINY_WIDTH,
        "pooled_projection_dim": TINY_WIDTH,
        "guidance_embeds": guidance_embeds,
        "axes_dims_rope": [4, 6, 6],
    }
