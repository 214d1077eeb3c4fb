"""FLUX.2: dev (Mistral text encoder, guidance embedding) and klein (Qwen3), trained by flow matching.

Example and Batch keys: "latents" (C, H/16, W/16) fp32, patchified and normalised, C = 128 for the published models;
"prompt_embeds" (L, D), stacked hidden states in the text encoder's type, L = 512 with padding, which the model
attends to; "reference_0", "reference_1" and so on, the latents of reference images. A Batch adds a batch dim in front.

See DECISIONS 32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from torch import Tensor, nn

from trainer.config.families import Distilled
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models.base import FLOW_FIELDS, LoadModule, TextLength, references_of
from trainer.models.flow_transformer import FlowTransformer, Index
from trainer.models.objectives.base import Batch, Example
from trainer.models.objectives.flow_matching import empirical_mu
from trainer.models.parts.chat.chat_template import rendered
from trainer.models.parts.folder import check_architecture, write_random
from trainer.models.parts.image import flux_blocks
from trainer.models.parts.image.euler import euler_scheduler, spaced_sigmas
from trainer.models.parts.image.images import pack, unpack
from trainer.models.parts.image.packed_vae import PACKED_AUTOENCODER, PACKED_VAE, tiny_packed_vae
from trainer.models.parts.image.text_encoder import (
    NO_LAYER_TYPES,
    QWEN3_4B,
    QWEN3_8B,
    TINY_SPECIAL,
    TextEncoder,
    hidden_states,
    language_model_config,
    load_language_model,
    load_tokenizer,
    max_tokens,
    stacked_layers,
    text_lengths,
    tiny_language_model,
    write_tiny_tokenizer,
)
from trainer.models.parts.layout import numbered, tensors_of
from trainer.parallel.parallelize import ShardSpec
from trainer.system.pinned import send
from trainer.weights.files import Fused


@dataclass(frozen=True)
class Architecture:
    """The sizes in which the published transformers differ. encoder: type of the language model of its text encoder."""

    num_layers: int
    num_single_layers: int
    guidance_embeds: bool
    encoder: str

    def __str__(self) -> str:
        guidance = "with" if self.guidance_embeds else "without"
        return f"{self.num_layers} + {self.num_single_layers} blocks {guidance} guidance embedding"


ARCHITECTURES = {
    "dev": Architecture(8, 48, guidance_embeds=True, encoder="mistral"),
    "klein-4b": Architecture(5, 20, guidance_embeds=False, encoder="qwen3"),
    "klein-9b": Architecture(8, 24, guidance_embeds=False, encoder="qwen3"),
}
DEFAULT_ARCHITECTURE = "klein-4b"
MISTRAL_SMALL = {
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LANGUAGE_MODELS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "dev": (MISTRAL_SMALL, 48),
    "klein-4b": (QWEN3_4B | NO_LAYER_TYPES, 24),
    "klein-9b": (QWEN3_8B | NO_LAYER_TYPES, 32),
}
"""{architecture: (sizes of its language model, attention heads of the transformer)}."""
MAX_TOKENS = 512
REFERENCE_TIME = 10
"""Distance in time between consecutive images, the noisy image first, as in diffusers' pipelines."""


def _messages_dev(caption: str) -> list[dict[str, Any]]:
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    # [IMG] would announce an image to the tokenizer's template.
    texts = (("system", SYSTEM_MESSAGE), ("user", caption.replace("[IMG]", "")))
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]


def _template_dev(tokenizer: Any, caption: str) -> str:
    return rendered(tokenizer, _messages_dev(caption))


def _tokenize_dev(tokenizer: Any, caption: str, max_tokens: int) -> Mapping[str, Tensor]:
    tokens: Mapping[str, Tensor] = tokenizer(
        _template_dev(tokenizer, caption),
        add_special_tokens=False,
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=max_tokens,
    )
    return tokens


def _template_klein(tokenizer: Any, caption: str) -> str:
    messages = [{"role": "user", "content": caption}]
    return rendered(tokenizer, messages, add_generation_prompt=True, enable_thinking=False)


def _tokenize_klein(tokenizer: Any, caption: str, max_tokens: int) -> Mapping[str, Tensor]:
    tokens: Mapping[str, Tensor] = tokenizer(
        _template_klein(tokenizer, caption),
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=max_tokens,
    )
    return tokens


TEXT_RECIPES = {"mistral": (_tokenize_dev, _template_dev), "qwen3": (_tokenize_klein, _template_klein)}
"""{text encoder: ((tokenizer, caption, max_tokens) -> tokens, (tokenizer, caption) -> the caption in its template)}."""


class Flux2(FlowTransformer):
    network = Flux2Transformer2DModel
    autoencoder = PACKED_AUTOENCODER
    lora_loader = "Flux2LoraLoaderMixin"
    shard = ShardSpec(blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"))
    # `to_out` is a ModuleList in double blocks and a Linear in single ones: full names, never suffixes.
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
            r"transformer_blocks\.\d+\.(ff|ff_context)\.(linear_in|linear_out)",
            r"single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)",
        )
    }
    halves_swapped = (r"norm_out\.linear",)
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", Flux2Transformer2DModel.__name__)}
    distilled = tuple(
        Distilled(
            (f"FLUX.2-klein-{size}", f"flux-2-klein-{size}"),
            base=f"black-forest-labs/FLUX.2-klein-base-{size}",
            steps=4,
            marks={"model_index.json": {"is_distilled": True}},
        )
        for size in ("4B", "9B")
    )
    objective_fields = FLOW_FIELDS | {"guidance"}
    conditional_fields: ClassVar = {"objective.guidance": ("transformer/config.json", "guidance_embeds", True)}
    options_read = frozenset({"architecture", "distilled", "text_layers", "max_tokens"})
    longest_text = MAX_TOKENS
    reads_references = True
    diffusers_adapters = FlowTransformer.diffusers_adapters | {"lokr"}

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._language_model = language_model_config(self._folder, *TEXT_RECIPES)
        config = self._architecture
        kind = self._language_model["model_type"]
        own = Architecture(config.num_layers, config.num_single_layers, config.guidance_embeds, kind)
        check_architecture(model, self._folder, ARCHITECTURES, own)
        self._text_layers = stacked_layers(model, self._language_model, config.joint_attention_dim, self._folder)
        self._max_tokens = max_tokens(model, self._folder, "tokenizer", MAX_TOKENS)
        self._tokenize, self._template = TEXT_RECIPES[kind]

    @property
    def model_spec(self) -> str:
        config = self._architecture
        names = {(a.num_layers, a.num_single_layers): name for name, a in ARCHITECTURES.items()}
        return f"Flux.2-{names.get((config.num_layers, config.num_single_layers), 'tiny')}"

    def layout(self, component: str) -> tuple[Fused, ...]:
        model = self.build(component)
        double = numbered("double_blocks", "transformer_blocks", model, DOUBLE_BLOCK)
        single = numbered("single_blocks", "single_transformer_blocks", model, SINGLE_BLOCK)
        return tensors_of(model, (*MODULES, *double, *single))

    @property
    def reads_negative(self) -> bool:
        return not self._architecture.guidance_embeds

    @property
    def text_recipe(self) -> str:
        return f"{self._text_layers} {self._max_tokens}"

    def text_encoder(self, load: LoadModule) -> TextEncoder:
        from transformers import MistralConfig, MistralModel, Qwen3Config, Qwen3Model

        classes: Any = {"mistral": (MistralConfig, MistralModel), "qwen3": (Qwen3Config, Qwen3Model)}
        config = self._language_model
        return load_language_model(load, self._folder, classes[config["model_type"]], config, self._text_layers)

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoder, caption: str) -> Example:
        tokens = self._tokenize(encoder.tokenizer, caption, self._max_tokens)
        states = hidden_states(encoder.model, tokens, self._text_layers)
        return {"prompt_embeds": torch.cat(states, dim=-1)[0].cpu()}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        tokenizer, read = load_tokenizer(self._folder, "tokenizer"), self._max_tokens
        template = partial(self._template, tokenizer)
        # Both templates include the tokens around a caption.
        lengths = text_lengths("text_encoder", tokenizer, captions, read, template, special=False)
        return [(length,) for length in lengths]

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        return {"prompt_embeds": torch.zeros(self._max_tokens, self._architecture.joint_attention_dim, dtype=dtype)}

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        language_model, heads = LANGUAGE_MODELS[architecture]
        return {
            "transformer": {
                "in_channels": 128,
                "num_layers": sizes.num_layers,
                "num_single_layers": sizes.num_single_layers,
                "attention_head_dim": 128,
                "num_attention_heads": heads,
                "joint_attention_dim": 3 * language_model["hidden_size"],
                "timestep_guidance_channels": 256,
                "axes_dims_rope": [32, 32, 32, 32],
                "guidance_embeds": sizes.guidance_embeds,
            },
            "vae": PACKED_VAE,
            "text_encoder": language_model,
            "tokenizer": {"model_max_length": MAX_TOKENS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        published = ARCHITECTURES[architecture or DEFAULT_ARCHITECTURE]
        width = 32
        return {
            "transformer": _tiny_transformer(published.guidance_embeds, text_width=width * len(TINY_LAYERS)),
            "vae": tiny_packed_vae(),
            "text_encoder": _tiny_text_encoder(published.encoder, width),
            "scheduler": {"shift": 3.0, "use_dynamic_shifting": True, "time_shift_type": "exponential"},
        }

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

        config = configs["text_encoder"]
        write_random(folder / "text_encoder", lambda: _tiny_language_model(config))
        tokens = TINY_TOKENS[config["model_type"]]
        write_tiny_tokenizer(folder / "tokenizer", TINY_VOCABULARY, tokens, TINY_TOKENS_KEPT, [SYSTEM_MESSAGE] * 16)
        return "Flux2KleinPipeline" if config["model_type"] == "qwen3" else "Flux2Pipeline", {
            "text_encoder": ("transformers", config["architectures"][0]),
            "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        }

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        # The tokens of reference images follow those of the noisy image; the predictions for them are not used.
        height, width = latents.shape[-2:]
        images, text = [latents, *references_of(batch)], batch["prompt_embeds"]
        ids = torch.cat([image_ids(x.shape[-2], x.shape[-1], i * REFERENCE_TIME) for i, x in enumerate(images)])
        packed = model["transformer"](
            hidden_states=torch.cat([pack(image) for image in images], dim=1),
            encoder_hidden_states=text.to(latents.dtype),
            timestep=sigma,
            guidance=torch.full_like(sigma, guidance) if self._architecture.guidance_embeds else None,
            img_ids=send(ids, latents.device),
            txt_ids=send(text_ids(text.shape[1]), latents.device),
            return_dict=False,
        )[0]
        return unpack(packed[:, : height * width].float(), height, width)

    def sampler(self, noise: Tensor, num_steps: int) -> Any:
        mu = empirical_mu(self.num_tokens(noise), num_steps)
        return euler_scheduler(self._scheduler, num_steps, noise.device, mu, sigmas=spaced_sigmas(num_steps))


FAMILY = Flux2


def image_ids(height: int, width: int, time: int = 0) -> Tensor:
    """Positions (time, row, column, text) of an image's tokens, (h * w, 4); only row and column differ."""
    zero = torch.zeros(1, dtype=torch.int64)
    return torch.cartesian_prod(zero + time, torch.arange(height), torch.arange(width), zero)


def text_ids(num_tokens: int) -> Tensor:
    """Positions of the text tokens, (L, 4); only the last column differs."""
    zero = torch.zeros(1, dtype=torch.int64)
    return torch.cartesian_prod(zero, zero, zero, torch.arange(num_tokens))


MODULES = (
    Fused("img_in", ("x_embedder",)),
    Fused("txt_in", ("context_embedder",)),
    Fused("time_in.in_layer", ("time_guidance_embed.timestep_embedder.linear_1",)),
    Fused("time_in.out_layer", ("time_guidance_embed.timestep_embedder.linear_2",)),
    Fused("guidance_in.in_layer", ("time_guidance_embed.guidance_embedder.linear_1",)),
    Fused("guidance_in.out_layer", ("time_guidance_embed.guidance_embedder.linear_2",)),
    Fused("double_stream_modulation_img.lin", ("double_stream_modulation_img.linear",)),
    Fused("double_stream_modulation_txt.lin", ("double_stream_modulation_txt.linear",)),
    Fused("single_stream_modulation.lin", ("single_stream_modulation.linear",)),
    Fused("final_layer.linear", ("proj_out",)),
    Fused("final_layer.adaLN_modulation.1", ("norm_out.linear",), halves_swapped=True),
)
"""The modules under their names in BFL's file; the tables below hold the modules of the blocks."""
DOUBLE_BLOCK = {
    **flux_blocks.ATTENTION,
    "img_mlp.0": ("ff.linear_in",),
    "img_mlp.2": ("ff.linear_out",),
    "txt_mlp.0": ("ff_context.linear_in",),
    "txt_mlp.2": ("ff_context.linear_out",),
}
SINGLE_BLOCK = {
    "linear1": ("attn.to_qkv_mlp_proj",),
    "linear2": ("attn.to_out",),
    "norm.query_norm": ("attn.norm_q",),
    "norm.key_norm": ("attn.norm_k",),
}


# The model of `model.path: tiny`.

TINY_LAYERS = (1, 2, 3)
TINY_TOKENS = {"mistral3": 64, "qwen3": 48}  # dev's system message alone takes about 40
TINY_VOCABULARY = 1024
TINY_TOKENS_KEPT = (*TINY_SPECIAL, "[IMG]")


def _tiny_transformer(guidance_embeds: bool, text_width: int) -> dict[str, Any]:
    return {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": text_width,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": [4, 4, 4, 4],
        "guidance_embeds": guidance_embeds,
    }


def _tiny_text_encoder(encoder: str, width: int) -> dict[str, Any]:
    text = tiny_language_model(width, TINY_VOCABULARY, TINY_LAYERS[-1] + 1)
    text |= {"model_type": encoder, "head_dim": width // 4}
    if encoder == "qwen3":
        return text | {"architectures": ["Qwen3ForCausalLM"]}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision | {"num_attention_heads": 2, "head_dim": 8, "image_size": 32, "patch_size": 16},
        "image_token_index": TINY_TOKENS_KEPT.index("[IMG]"),
        "tie_word_embeddings": False,
    }


def _tiny_language_model(config: dict[str, Any]) -> nn.Module:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM

    classes: Any = {
        "mistral3": (Mistral3Config, Mistral3ForConditionalGeneration),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = classes[config["model_type"]]
    model: nn.Module = model_class(config_class.from_dict(config))
    return model
