"""Writes tiny folders of pipelines of diffusers that no family here names, as complete as published ones."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from trainer.models.parts.folder import write_model_index, write_random
from trainer.models.parts.image.clip import tiny_clip, write_tiny_clip, write_tiny_clip_tokenizer
from trainer.models.parts.image.qwen import TINY_QWEN_VAE
from trainer.models.parts.image.t5 import tiny_t5, write_tiny_t5, write_tiny_t5_tokenizer
from trainer.models.parts.image.text_encoder import (
    TINY_CHAT_TEMPLATE,
    TINY_SPECIAL,
    names_of_things,
    tiny_language_model,
    tiny_qwen3_vl,
    train_tokenizer,
)
from trainer.models.parts.image.vae import tiny_vae

Part = tuple[str, str, Callable[[Path], None]]
"""A component: its library, its class, and what writes its folder."""

LETTERS = string.ascii_letters + string.digits + string.punctuation
WIDTH = 32
VOCABULARY = 512
AXES = [4, 6, 6]
HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
FLUX_SIZES = HEADS | {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "joint_attention_dim": WIDTH,
    "axes_dims_rope": AXES,
}
"""Those of the transformers that are built as FLUX.1's."""
FLUX_SHIFT = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}

COGVIEW_SHIFT = {"use_dynamic_shifting": True, "time_shift_type": "linear", "base_shift": 0.25, "max_shift": 0.75}
COGVIEW_SIZES = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "text_embed_dim": WIDTH,
    "time_embed_dim": WIDTH,
    "condition_dim": 8,
}
"""Those of the transformers of CogView and GLM-Image."""


def write(name: str, folder: Path) -> Path:
    """Write the folder of the pipeline class `name`, and return it."""
    FOLDERS[name](folder)
    return folder


def _write(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parts = PIPELINES[name]
    for component, part in parts.items():
        if part:
            part[2](folder / component)
    write_model_index(folder, name, SETTINGS.get(name), **{key: part and part[:2] for key, part in parts.items()})


def _saved(library: str, name: str, make: Callable[[], Any]) -> Part:
    return library, name, lambda folder: make().save_pretrained(folder)


def _scheduler(name: str, **config: Any) -> Part:
    return _saved("diffusers", name, lambda: _class("diffusers", name)(**config))


def _flow(**config: Any) -> Part:
    return _scheduler("FlowMatchEulerDiscreteScheduler", **config)


def _each(value: int, names: str) -> dict[str, Any]:
    """The sizes of these names, which have one value."""
    return dict.fromkeys(names.split(), value)


def _solver(**config: Any) -> Part:
    """The solver of PixArt's models and Sana's."""
    return _scheduler("DPMSolverMultistepScheduler", **({"beta_end": 0.02, "solver_order": 2} | config))


def _network(name: str, **config: Any) -> Part:
    """A denoiser or an autoencoder."""
    return "diffusers", name, lambda folder: write_random(folder, lambda: _class("diffusers", name)(**config))


def _vae(**config: Any) -> Part:
    """The usual autoencoder, with the scaling of FLUX.1's if none is given."""
    return _network("AutoencoderKL", **tiny_vae(**({"latent_channels": 4, "scaling_factor": 0.3611} | config)))


FLUX_VAE = _vae(shift_factor=0.1159)
QWEN_VAE = _network("AutoencoderKLQwenImage", **TINY_QWEN_VAE)
SDXL_VAE = _vae(scaling_factor=0.13025)


def _encoder(name: str, **config: Any) -> Part:
    """A text encoder of transformers."""

    def build() -> Any:
        kind = _class("transformers", name)
        return kind(kind.config_class(**config))

    return "transformers", name, lambda folder: write_random(folder, build)


def _language_model(name: str, **changes: Any) -> Part:
    sizes = tiny_language_model(WIDTH, VOCABULARY, num_layers=2)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return _encoder(name, **(sizes | {"head_dim": WIDTH // 4} | special | changes))


def _qwen2_5_vl(num_layers: int = 2) -> Part:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    text = tiny_language_model(WIDTH, VOCABULARY, num_layers) | {"rope_parameters": rope}
    sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
    vision = sizes | {"fullatt_block_indexes": [0]}
    return _encoder("Qwen2_5_VLForConditionalGeneration", text_config=text, vision_config=vision)


def _t5_tokenizer(max_tokens: int) -> Part:
    return "transformers", "T5TokenizerFast", partial(write_tiny_t5_tokenizer, max_tokens=max_tokens)


def _clip(name: str, num_tokens: int) -> tuple[Part, Part]:
    """A text encoder of CLIP, and its tokenizer."""

    def write_encoder(folder: Path) -> None:
        write_tiny_clip(folder, tiny_clip(WIDTH, num_tokens), _class("transformers", name))

    tokenizer = partial(write_tiny_clip_tokenizer, num_tokens=num_tokens)
    return ("transformers", name, write_encoder), ("transformers", "CLIPTokenizer", tokenizer)


CLIP = _clip("CLIPTextModel", 77)
LONG_CLIP = _clip("CLIPTextModelWithProjection", 248)
T5 = "transformers", "T5EncoderModel", partial(write_tiny_t5, config=tiny_t5(WIDTH))


def _qwen_tokenizer(max_tokens: int = 4096) -> Part:
    return _saved("transformers", "Qwen2TokenizerFast", lambda: _bytes(max_tokens))


QWEN_PROCESSOR = _qwen_tokenizer()
"""In the place of the published processor of text and images, which transformers loads only with torchvision."""


def _fast_tokenizer(**options: Any) -> Part:
    """A tokenizer without a class of its own, as Llama 3's and GLM's."""
    name = "PreTrainedTokenizerFast"
    special = {"pad_token": TINY_SPECIAL[0], "eos_token": TINY_SPECIAL[0], "bos_token": TINY_SPECIAL[1]} | options
    return _saved(
        "transformers",
        name,
        lambda: _class("transformers", name)(
            tokenizer_object=_bytes().backend_tokenizer, model_max_length=4096, add_bos_token=True, **special
        ),
    )


def _gemma_tokenizer(**options: Any) -> Part:
    """Gemma's tokenizer, which knows letters only."""
    pieces = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *LETTERS)
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    name = "GemmaTokenizerFast"
    return _saved(
        "transformers",
        name,
        lambda: _class("transformers", name)(vocab=vocabulary, merges=[], add_bos_token=True, **options),
    )


GEMMA_TOKENIZER = _gemma_tokenizer()


def _bert_tokenizer() -> Any:
    """BERT's tokenizer of letters, at the beginning of a word and within it."""
    pieces = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS))
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return _class("transformers", "BertTokenizer")(vocab=vocabulary, model_max_length=77)


def _bytes(max_tokens: int = 4096) -> Any:
    return train_tokenizer(names_of_things(), VOCABULARY, max_tokens, TINY_SPECIAL, TINY_CHAT_TEMPLATE)


def _t5gemma(folder: Path) -> None:
    """Write the encoder with the config of the whole model, as published."""
    from transformers import T5GemmaConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    sizes = tiny_language_model(WIDTH, VOCABULARY, num_layers=2) | {"head_dim": WIDTH // 4}
    config = T5GemmaConfig(encoder=sizes, decoder=sizes, vocab_size=VOCABULARY)
    write_random(folder, lambda: T5GemmaEncoder(config.encoder))
    config.save_pretrained(folder)


GLM_IMAGE = ("<|dit_start|>", "<|dit_end|>")


def _glm_processor() -> Any:
    """The processor of text and images, with tokens around the grid of an image's tokens."""
    from transformers import GlmImageProcessor, PreTrainedTokenizerFast
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

    marks = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    special = (*TINY_SPECIAL, *GLM_IMAGE, *marks.values())
    learned = train_tokenizer(names_of_things(), VOCABULARY, 4096, special, TINY_CHAT_TEMPLATE)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=learned.backend_tokenizer,
        pad_token=special[0],
        bos_token=GLM_IMAGE[0],
        eos_token=GLM_IMAGE[1],
        extra_special_tokens=marks,
    )
    return GlmImageProcessor(GlmImageImageProcessorPil(), tokenizer, chat_template=TINY_CHAT_TEMPLATE)


GLM_ENCODER = {
    "text_config": tiny_language_model(WIDTH, VOCABULARY, num_layers=2)
    | {"vision_vocab_size": 64, "pad_token_id": 0, "eos_token_id": 100}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "vision_config": {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "image_size": 256},
    "vq_config": {"embed_dim": 16, "num_embeddings": 64, "latent_channels": 16},
    **{"image_start_token_id": 3, "image_end_token_id": 4, "image_token_id": 5},
}


def _class(library: str, name: str) -> Any:
    return getattr(import_module(library), name)


BYT5 = _encoder("T5EncoderModel", **(tiny_t5(WIDTH) | {"vocab_size": 384}))
BYT5_TOKENIZER = _saved("transformers", "ByT5Tokenizer", lambda: _class("transformers", "ByT5Tokenizer")())

PIPELINES: dict[str, dict[str, Part | None]] = {
    "Lumina2Pipeline": {
        "scheduler": _flow(shift=6.0),
        "transformer": _network(
            "Lumina2Transformer2DModel",
            **_each(WIDTH, "hidden_size cap_feat_dim"),
            **_each(2, "num_layers num_refiner_layers num_attention_heads"),
            in_channels=4,
            num_kv_heads=1,
            multiple_of=32,
            axes_dim_rope=AXES,
            axes_lens=[300, 512, 512],
        ),
        "vae": FLUX_VAE,
        "text_encoder": _language_model("Gemma2Model"),
        "tokenizer": GEMMA_TOKENIZER,
    },
    "AuraFlowPipeline": {
        "scheduler": _flow(shift=1.73),
        "transformer": _network(
            "AuraFlowTransformer2DModel",
            **_each(2, "num_mmdit_layers num_single_dit_layers"),
            **_each(WIDTH, "joint_attention_dim caption_projection_dim"),
            **HEADS,
        ),
        "vae": SDXL_VAE,
        "text_encoder": _encoder("UMT5EncoderModel", **tiny_t5(WIDTH)),
        "tokenizer": _t5_tokenizer(512),
    },
    "OvisImagePipeline": {
        "scheduler": _flow(**FLUX_SHIFT),
        "transformer": _network("OvisImageTransformer2DModel", **FLUX_SIZES, out_channels=16),
        "vae": FLUX_VAE,
        "text_encoder": _language_model("Qwen3Model"),
        "tokenizer": _qwen_tokenizer(),
    },
    "BriaPipeline": {
        "scheduler": _flow(**FLUX_SHIFT),
        "transformer": _network("BriaTransformer2DModel", **FLUX_SIZES),
        "vae": SDXL_VAE,
        "text_encoder": T5,
        "tokenizer": _t5_tokenizer(512),
    },
    "LongCatImagePipeline": {
        "scheduler": _flow(**FLUX_SHIFT),
        "transformer": _network(
            "LongCatImageTransformer2DModel",
            **(FLUX_SIZES | {"in_channels": 64, "pooled_projection_dim": WIDTH}),  # the pipeline has 16 latent channels
        ),
        "vae": _vae(latent_channels=16, shift_factor=0.1159),
        "text_encoder": _qwen2_5_vl(),
        "tokenizer": _qwen_tokenizer(),
        "text_processor": QWEN_PROCESSOR,
    },
    "CogView4Pipeline": {
        "scheduler": _flow(**COGVIEW_SHIFT),
        "transformer": _network("CogView4Transformer2DModel", **COGVIEW_SIZES),
        "vae": _vae(scaling_factor=1.0, shift_factor=0.0),
        "text_encoder": _language_model("GlmModel"),
        "tokenizer": _fast_tokenizer(padding_side="left"),
    },
    "Kandinsky5T2IPipeline": {
        "scheduler": _flow(shift=3.0),
        "transformer": _network(
            "Kandinsky5Transformer3DModel",
            **_each(4, "in_visual_dim out_visual_dim"),
            **_each(WIDTH, "in_text_dim in_text_dim2 time_dim model_dim"),
            **_each(2, "num_text_blocks num_visual_blocks"),
            ff_dim=2 * WIDTH,
            axes_dims=AXES,
        ),
        "vae": FLUX_VAE,
        "text_encoder": _qwen2_5_vl(),
        "tokenizer": QWEN_PROCESSOR,
        "text_encoder_2": CLIP[0],
        "tokenizer_2": CLIP[1],
    },
    "PRXPipeline": {
        "scheduler": _flow(shift=3.0),
        "transformer": _network(
            "PRXTransformer2DModel",
            **_each(WIDTH, "context_in_dim hidden_size"),
            **_each(2, "num_heads depth"),
            in_channels=4,
            axes_dim=[8, 8],
        ),
        "vae": FLUX_VAE,
        "text_encoder": ("transformers", "T5GemmaEncoder", _t5gemma),
        "tokenizer": _gemma_tokenizer(model_max_length=256),
    },
    "NucleusMoEImagePipeline": {
        "scheduler": _flow(**FLUX_SHIFT),
        "transformer": _network(
            "NucleusMoEImageTransformer2DModel",
            **_each(4, "out_channels num_experts"),
            **_each(WIDTH, "joint_attention_dim moe_intermediate_dim"),
            **HEADS,
            in_channels=16,
            num_layers=6,  # the first three and the last are dense
            num_key_value_heads=1,
            axes_dims_rope=AXES,
            mlp_ratio=8.0,
            capacity_factors=2.0,
        ),
        "vae": QWEN_VAE,
        # The eighth hidden state from the end is read.
        "text_encoder": _encoder("Qwen3VLForConditionalGeneration", **tiny_qwen3_vl(WIDTH, VOCABULARY, num_layers=8)),
        "processor": QWEN_PROCESSOR,
    },
    "HiDreamImagePipeline": {
        "scheduler": _flow(shift=3.0),
        "transformer": _network(
            "HiDreamImageTransformer2DModel",
            **_each(2, "patch_size num_layers num_single_layers num_attention_heads num_activated_experts"),
            **_each(4, "in_channels num_routed_experts"),
            attention_head_dim=8,
            caption_channels=[WIDTH, WIDTH],
            text_emb_dim=2 * WIDTH,
            axes_dims_rope=[4, 2, 2],
            max_resolution=[32, 32],
            llama_layers=[0, 1, 1, 1],
        ),
        "vae": FLUX_VAE,
        "text_encoder": LONG_CLIP[0],
        "tokenizer": LONG_CLIP[1],
        "text_encoder_2": LONG_CLIP[0],
        "tokenizer_2": LONG_CLIP[1],
        "text_encoder_3": T5,
        "tokenizer_3": _t5_tokenizer(512),
        "text_encoder_4": _language_model("LlamaForCausalLM"),
        "tokenizer_4": _fast_tokenizer(),
    },
    "HunyuanImagePipeline": {
        "scheduler": _flow(shift=5.0),
        "transformer": _network(
            "HunyuanImageTransformer2DModel",
            **_each(4, "in_channels out_channels"),
            **_each(2, "num_layers num_single_layers num_refiner_layers"),
            **HEADS,
            text_embed_dim=WIDTH,
            text_embed_2_dim=WIDTH,  # has 4 million weights of a fixed size
            rope_axes_dim=[8, 8],
        ),
        "vae": _network(
            "AutoencoderKLHunyuanImage",
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=[32] * 6,
            layers_per_block=1,
            spatial_compression_ratio=32,
            sample_size=384,
            scaling_factor=0.75289,
        ),
        "text_encoder": _qwen2_5_vl(num_layers=4),
        "tokenizer": _qwen_tokenizer(),
        "text_encoder_2": BYT5,
        "tokenizer_2": BYT5_TOKENIZER,
        "guider": _scheduler("AdaptiveProjectedMixGuidance"),
        "ocr_guider": _scheduler("AdaptiveProjectedMixGuidance"),
    },
    "BriaFiboPipeline": {
        "scheduler": _flow(**FLUX_SHIFT),
        "transformer": _network(
            "BriaFiboTransformer2DModel",
            **(FLUX_SIZES | {"in_channels": 4, "joint_attention_dim": 16, "text_encoder_dim": 8}),
        ),
        "vae": _network(
            "AutoencoderKLWan",
            **TINY_QWEN_VAE,
            decoder_base_dim=8,
            is_residual=True,
            patch_size=2,
            in_channels=12,
            out_channels=12,
            scale_factor_spatial=16,
        ),
        # An empty prompt is token 128000.
        "text_encoder": _language_model(
            "SmolLM3ForCausalLM",
            vocab_size=128001,
            hidden_size=8,
            intermediate_size=16,
            head_dim=2,
            num_hidden_layers=4,
        ),
        "tokenizer": _fast_tokenizer(),
    },
    "SanaPipeline": {
        "scheduler": _solver(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        "transformer": _network(
            "SanaTransformer2DModel",
            **_each(4, "in_channels out_channels num_attention_heads"),
            **_each(2, "num_layers num_cross_attention_heads"),
            **_each(WIDTH, "cross_attention_dim caption_channels"),
            attention_head_dim=8,
            cross_attention_head_dim=16,
        ),
        "vae": _network(
            "AutoencoderDC",
            latent_channels=4,
            attention_head_dim=8,
            encoder_block_types=["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
            decoder_block_types=["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
            encoder_block_out_channels=[8, 8, 8, 16, 16, 16],
            decoder_block_out_channels=[8, 8, 8, 16, 16, 16],
            encoder_layers_per_block=[1] * 6,
            decoder_layers_per_block=[1] * 6,
            encoder_qkv_multiscales=[[], [], [], [5], [5], [5]],
            decoder_qkv_multiscales=[[], [], [], [5], [5], [5]],
            downsample_block_type="Conv",
            upsample_block_type="interpolate",
            scaling_factor=0.41407,
        ),
        "text_encoder": _language_model("Gemma2Model"),
        "tokenizer": GEMMA_TOKENIZER,
    },
    "GlmImagePipeline": {
        "scheduler": _flow(**COGVIEW_SHIFT),
        "transformer": _network("GlmImageTransformer2DModel", **COGVIEW_SIZES, prior_vq_quantizer_codebook_size=64),
        "vae": _vae(scaling_factor=1.0, latents_mean=[0.1, -0.1, 0.2, 0.0], latents_std=[0.9, 1.1, 1.0, 1.2]),
        "text_encoder": BYT5,
        "tokenizer": BYT5_TOKENIZER,
        "vision_language_encoder": _encoder("GlmImageForConditionalGeneration", **GLM_ENCODER),
        "processor": _saved("transformers", "GlmImageProcessor", _glm_processor),
    },
    "CogView3PlusPipeline": {
        "scheduler": _scheduler(
            "CogVideoXDDIMScheduler",
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            snr_shift_scale=4.0,
            timestep_spacing="trailing",
        ),
        "transformer": _network("CogView3PlusTransformer2DModel", **COGVIEW_SIZES),
        "vae": SDXL_VAE,
        "text_encoder": T5,
        "tokenizer": _t5_tokenizer(226),
    },
    "LuminaPipeline": {
        "scheduler": _flow(),
        "transformer": _network(
            "LuminaNextDiT2DModel",
            **_each(WIDTH, "hidden_size cross_attention_dim"),
            **_each(2, "num_layers num_attention_heads"),
            in_channels=4,
            num_kv_heads=1,
            multiple_of=32,
        ),
        "vae": SDXL_VAE,
        "text_encoder": _language_model("GemmaModel"),
        "tokenizer": GEMMA_TOKENIZER,
    },
    "PixArtSigmaPipeline": {
        "scheduler": _solver(),
        "transformer": _network(
            "PixArtTransformer2DModel",
            **_each(WIDTH, "cross_attention_dim caption_channels"),
            **HEADS,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            use_additional_conditions=False,
        ),
        "vae": SDXL_VAE,
        "text_encoder": T5,
        "tokenizer": _t5_tokenizer(300),
    },
    "HunyuanDiTPipeline": {
        "scheduler": _scheduler(
            "DDPMScheduler",
            beta_start=0.00085,
            beta_end=0.018,
            beta_schedule="scaled_linear",
            clip_sample=False,
            prediction_type="v_prediction",
            steps_offset=1,
        ),
        "transformer": _network(
            "HunyuanDiT2DModel",
            **_each(4, "in_channels num_layers"),
            **_each(WIDTH, "hidden_size cross_attention_dim cross_attention_dim_t5 pooled_projection_dim"),
            **HEADS,
            patch_size=2,
            sample_size=128,
            mlp_ratio=2.0,
            use_style_cond_and_image_meta_size=False,
        ),
        "vae": SDXL_VAE,
        "text_encoder": _encoder(
            "BertModel",
            **_each(2, "num_hidden_layers num_attention_heads"),
            vocab_size=2 * len(LETTERS) + 5,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=77,
        ),
        "tokenizer": _saved("transformers", "BertTokenizer", _bert_tokenizer),
        "text_encoder_2": T5,
        "tokenizer_2": _t5_tokenizer(256),
        "safety_checker": None,
        "feature_extractor": None,
    },
}
SETTINGS: dict[str, Mapping[str, Any]] = {"HunyuanDiTPipeline": {"requires_safety_checker": False}}
"""Arguments of pipelines other than their components."""

FOLDERS: dict[str, Callable[[Path], None]] = {name: partial(_write, name) for name in PIPELINES}
"""Pipeline class -> writes its folder."""
