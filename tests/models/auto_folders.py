"""Tiny folders of diffusers' pipelines that no family here knows, as complete as published ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import transformers

from trainer.models.parts.folder import write_model_index, write_random
from trainer.models.parts.image.clip import tiny_clip, write_tiny_clip, write_tiny_clip_tokenizer
from trainer.models.parts.image.t5 import tiny_t5, write_tiny_t5, write_tiny_t5_tokenizer
from trainer.models.parts.image.text_encoder import tiny_language_model, write_tiny_tokenizer
from trainer.models.parts.image.vae import tiny_vae

Json = dict[str, Any]
WIDTH, VOCABULARY, TOKENS = 32, 512, 512
LANGUAGE = tiny_language_model(WIDTH, VOCABULARY, num_layers=3) | {"head_dim": 8, "pad_token_id": 0}
VAE = tiny_vae(latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159)
HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
DYNAMIC = {"shift": 3.0, "use_dynamic_shifting": True}


@dataclass(frozen=True)
class Folder:
    """A pipeline's folder.

    Attributes:
        transformer: (class, config).
        encoders: {component: writes it, and returns its class}.
        tokenizers: The same.
        vae: (class, config).
        scheduler: (class, config).
        settings: Arguments of the pipeline other than its parts.
    """

    transformer: tuple[str, Json]
    encoders: Mapping[str, Callable[[Path], str]]
    tokenizers: Mapping[str, Callable[[Path], str]]
    vae: tuple[str, Json] = ("AutoencoderKL", VAE)
    scheduler: tuple[str, Json] = ("FlowMatchEulerDiscreteScheduler", DYNAMIC)
    settings: Json = field(default_factory=dict)


def encoder(name: str, config: str, values: Json) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        write_random(folder, lambda: getattr(transformers, name)(getattr(transformers, config)(**values)))
        return name

    return write


def bytes_of(folder: Path) -> str:
    write_tiny_tokenizer(folder, VOCABULARY, TOKENS)
    return "Qwen2TokenizerFast"


def t5(folder: Path) -> str:
    write_tiny_t5(folder, tiny_t5(WIDTH))
    return "T5EncoderModel"


def t5_tokenizer(folder: Path) -> str:
    write_tiny_t5_tokenizer(folder, TOKENS)
    return "T5TokenizerFast"


def clip(kind: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        write_tiny_clip(folder, tiny_clip(WIDTH, 77), getattr(transformers, kind))
        return kind

    return write


def clip_tokenizer(folder: Path) -> str:
    write_tiny_clip_tokenizer(folder, 77)
    return "CLIPTokenizer"


def qwen_vl(folder: Path) -> str:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
    values = {"text_config": LANGUAGE | {"rope_parameters": rope}, "vision_config": vision}
    return encoder("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", values)(folder)


GEMMA = encoder("Gemma2Model", "Gemma2Config", LANGUAGE | {"sliding_window": TOKENS})
FLUX_SIZES = HEADS | {"in_channels": 16, "joint_attention_dim": WIDTH, "axes_dims_rope": [4, 6, 6]}
FLUX_SIZES |= {"num_layers": 2, "num_single_layers": 2}
TEXT = {"tokenizer": bytes_of}

FOLDERS: dict[str, Folder] = {
    "Lumina2Pipeline": Folder(
        (
            "Lumina2Transformer2DModel",
            {
                "in_channels": 4,
                "hidden_size": 48,
                "num_layers": 2,
                "num_refiner_layers": 2,
                "num_attention_heads": 3,
                "num_kv_heads": 3,
                "multiple_of": 16,
                "axes_dim_rope": [4, 6, 6],
                "axes_lens": [300, 64, 64],
                "cap_feat_dim": WIDTH,
            },
        ),
        {"text_encoder": GEMMA},
        TEXT,
        scheduler=("FlowMatchEulerDiscreteScheduler", {"shift": 6.0}),
    ),
    "AuraFlowPipeline": Folder(
        (
            "AuraFlowTransformer2DModel",
            HEADS
            | {
                "sample_size": 32,
                "in_channels": 4,
                "out_channels": 4,
                "num_mmdit_layers": 2,
                "num_single_dit_layers": 2,
                "joint_attention_dim": WIDTH,
                "caption_projection_dim": 32,
                "pos_embed_max_size": 1024,
            },
        ),
        {"text_encoder": encoder("UMT5EncoderModel", "UMT5Config", tiny_t5(WIDTH) | {"model_type": "umt5"})},
        {"tokenizer": t5_tokenizer},
        scheduler=("FlowMatchEulerDiscreteScheduler", {"shift": 1.73}),
    ),
    "OvisImagePipeline": Folder(
        ("OvisImageTransformer2DModel", FLUX_SIZES | {"out_channels": 16}),
        {"text_encoder": encoder("Qwen3Model", "Qwen3Config", LANGUAGE)},
        TEXT,
    ),
    "BriaPipeline": Folder(("BriaTransformer2DModel", FLUX_SIZES), {"text_encoder": t5}, {"tokenizer": t5_tokenizer}),
    "BriaFiboPipeline": Folder(
        ("BriaFiboTransformer2DModel", FLUX_SIZES | {"joint_attention_dim": 2 * WIDTH, "text_encoder_dim": WIDTH}),
        {"text_encoder": encoder("SmolLM3ForCausalLM", "SmolLM3Config", LANGUAGE | {"vocab_size": 128256})},
        TEXT,
        vae=(
            "AutoencoderKLWan",
            {
                "base_dim": 4,
                "z_dim": 16,
                "dim_mult": [1, 1, 1, 1],
                "num_res_blocks": 1,
                "is_residual": True,
                "patch_size": 2,
                "in_channels": 12,
                "out_channels": 12,
                "latents_mean": [0.1] * 16,
                "latents_std": [1.5] * 16,
            },
        ),
    ),
    "LongCatImagePipeline": Folder(
        ("LongCatImageTransformer2DModel", FLUX_SIZES | {"in_channels": 64, "pooled_projection_dim": WIDTH}),
        {"text_encoder": qwen_vl},
        {"tokenizer": bytes_of, "text_processor": bytes_of},
        vae=("AutoencoderKL", tiny_vae(latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159)),
    ),
    "CogView4Pipeline": Folder(
        (
            "CogView4Transformer2DModel",
            HEADS
            | {
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "text_embed_dim": WIDTH,
                "time_embed_dim": 16,
                "condition_dim": 8,
                "rope_axes_dim": [64, 64],
            },
        ),
        {"text_encoder": encoder("GlmModel", "GlmConfig", LANGUAGE)},
        TEXT,
        scheduler=(
            "FlowMatchEulerDiscreteScheduler",
            {"base_shift": 0.25, "max_shift": 0.75, "use_dynamic_shifting": True, "time_shift_type": "linear"},
        ),
    ),
    "HunyuanImagePipeline": Folder(
        (
            "HunyuanImageTransformer2DModel",
            HEADS
            | {
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "num_single_layers": 2,
                "num_refiner_layers": 1,
                "patch_size": [1, 1],
                "text_embed_dim": WIDTH,
                "text_embed_2_dim": WIDTH,
                "rope_axes_dim": [8, 8],
            },
        ),
        {"text_encoder": qwen_vl, "text_encoder_2": t5},
        {"tokenizer": bytes_of, "tokenizer_2": t5_tokenizer},
        vae=(
            "AutoencoderKLHunyuanImage",
            {
                "in_channels": 3,
                "out_channels": 3,
                "latent_channels": 4,
                "block_out_channels": [32, 32, 32, 32, 32, 32],
                "layers_per_block": 1,
                "spatial_compression_ratio": 32,
                "sample_size": 128,
                "scaling_factor": 0.75,
            },
        ),
        scheduler=("FlowMatchEulerDiscreteScheduler", {"shift": 5.0}),
    ),
    "PRXPipeline": Folder(
        (
            "PRXTransformer2DModel",
            {
                "in_channels": 4,
                "patch_size": 2,
                "context_in_dim": WIDTH,
                "hidden_size": 32,
                "num_heads": 2,
                "depth": 2,
                "axes_dim": [8, 8],
            },
        ),
        {"text_encoder": GEMMA},
        TEXT,
        scheduler=("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    ),
    "HiDreamImagePipeline": Folder(
        (
            "HiDreamImageTransformer2DModel",
            HEADS
            | {
                "patch_size": 2,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "num_single_layers": 2,
                "caption_channels": [WIDTH, WIDTH],
                "text_emb_dim": 2 * WIDTH,
                "num_routed_experts": 2,
                "num_activated_experts": 1,
                "axes_dims_rope": [8, 4, 4],
                "max_resolution": [64, 64],
                "llama_layers": [0, 1, 2, 2],
            },
        ),
        {
            "text_encoder": clip("CLIPTextModelWithProjection"),
            "text_encoder_2": clip("CLIPTextModelWithProjection"),
            "text_encoder_3": t5,
            "text_encoder_4": encoder("LlamaForCausalLM", "LlamaConfig", LANGUAGE),
        },
        {
            "tokenizer": clip_tokenizer,
            "tokenizer_2": clip_tokenizer,
            "tokenizer_3": t5_tokenizer,
            "tokenizer_4": bytes_of,
        },
        scheduler=("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    ),
    "SanaPipeline": Folder(
        (
            "SanaTransformer2DModel",
            {
                "in_channels": 4,
                "out_channels": 4,
                "num_attention_heads": 2,
                "attention_head_dim": 16,
                "num_layers": 2,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 16,
                "cross_attention_dim": 32,
                "caption_channels": WIDTH,
            },
        ),
        {"text_encoder": GEMMA},
        TEXT,
        scheduler=(
            "DPMSolverMultistepScheduler",
            {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
        ),
    ),
    "PixArtSigmaPipeline": Folder(
        (
            "PixArtTransformer2DModel",
            HEADS
            | {
                "in_channels": 4,
                "out_channels": 8,
                "num_layers": 2,
                "cross_attention_dim": 32,
                "caption_channels": WIDTH,
                "sample_size": 32,
            },
        ),
        {"text_encoder": t5},
        {"tokenizer": t5_tokenizer},
        scheduler=("DPMSolverMultistepScheduler", {}),
    ),
    "OmniGenPipeline": Folder(
        (
            "OmniGenTransformer2DModel",
            {
                "in_channels": 4,
                "hidden_size": 32,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "intermediate_size": 64,
                "num_layers": 2,
                "vocab_size": VOCABULARY,
                "pad_token_id": 0,
                "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
            },
        ),
        {},
        TEXT,
        scheduler=("FlowMatchEulerDiscreteScheduler", {"invert_sigmas": True, "num_train_timesteps": 1}),
    ),
    "Kandinsky5T2IPipeline": Folder(
        (
            "Kandinsky5Transformer3DModel",
            {
                "in_visual_dim": 4,
                "in_text_dim": WIDTH,
                "in_text_dim2": WIDTH,
                "time_dim": 32,
                "out_visual_dim": 4,
                "model_dim": 32,
                "ff_dim": 64,
                "num_text_blocks": 2,
                "num_visual_blocks": 2,
                "axes_dims": [4, 6, 6],
                "visual_cond": False,
            },
        ),
        {"text_encoder": qwen_vl, "text_encoder_2": clip("CLIPTextModel")},
        {"tokenizer": bytes_of, "tokenizer_2": clip_tokenizer},
        scheduler=("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    ),
}
"""{pipeline: its folder}."""


def write(name: str, folder: Path) -> Path:
    """Write the folder of a pipeline. Returns it."""
    found = FOLDERS[name]
    network, config = found.transformer
    write_random(folder / "transformer", lambda: getattr(diffusers, network)(**config))
    write_random(folder / "vae", lambda: getattr(diffusers, found.vae[0])(**found.vae[1]))
    getattr(diffusers, found.scheduler[0])(**found.scheduler[1]).save_pretrained(folder / "scheduler")
    parts: dict[str, tuple[str, str] | None] = {
        "transformer": ("diffusers", network),
        "vae": ("diffusers", found.vae[0]),
        "scheduler": ("diffusers", found.scheduler[0]),
    }
    for component, make in (found.encoders | found.tokenizers).items():
        parts[component] = ("transformers", make(folder / component))
    accepted = inspect.signature(getattr(diffusers, name).__init__).parameters
    parts |= dict.fromkeys(accepted.keys() - parts.keys() - found.settings.keys() - {"self"})
    write_model_index(folder, name, found.settings, **parts)
    return folder
