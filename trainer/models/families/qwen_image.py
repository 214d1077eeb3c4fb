"""Qwen-Image, trained by flow matching.

Example keys: "latents" (16, H/8, W/8) fp32, normalised; "prompt_embeds" (L, D), the last hidden states of the
caption's own tokens in the text encoder's type. A Batch adds a batch dim in front and pads captions to the longest;
if their lengths differ, "prompt_mask" (B, L) is true for a caption's own tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from PIL import Image
from torch import Tensor, nn

from trainer.config.families import Distilled
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models.base import LoadModule, TextLength
from trainer.models.flow_transformer import FlowTransformer, Index, masked_captions
from trainer.models.objectives.base import Batch, Example
from trainer.models.objectives.flow_matching import Shift, ShiftLine
from trainer.models.parts.folder import check_architecture, check_inputs, write_random
from trainer.models.parts.image.euler import euler_scheduler, guided, linear_mu_of, spaced_sigmas
from trainer.models.parts.image.images import device_of, image_of, pack, patchify, pixels_of, unpack, unpatchify
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
from trainer.models.parts.image.vae import Autoencoder
from trainer.parallel.parallelize import ShardSpec
from trainer.system.errors import InputError
from trainer.weights.files import Fused, WeightFiles


@dataclass(frozen=True)
class Architecture:
    """The sizes of a transformer."""

    num_layers: int
    num_heads: int

    def __str__(self) -> str:
        return f"{self.num_layers} blocks of {self.num_heads} heads"


ARCHITECTURES = {"qwen-image": Architecture(60, 24)}
DEFAULT_ARCHITECTURE = "qwen-image"
MAX_TOKENS = 512
QWEN2_5_VL_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "layer_types": None,
    "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 1000000.0, "rope_type": "default"},
}
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""The text that the model was trained to see around a caption, copied from diffusers' pipeline."""
TEMPLATE_TOKENS = 34
"""Tokens of the template before the caption, whose states are left out."""


def _build_vae(config: Mapping[str, Any]) -> nn.Module:
    with torch.device("meta"):
        vae: nn.Module = AutoencoderKLQwenImage.from_config(dict(config))
    return vae


def _encode(vae: Any, image: Image.Image) -> Tensor:
    # The autoencoder belongs to a video model: an image is a film of one frame.
    film = vae.encode(pixels_of(image, device_of(vae)).unsqueeze(2)).latent_dist.mode()
    mean, std = _latent_statistics(vae)
    latents: Tensor = (film.squeeze(2) - mean) / std
    return latents


def _decode(vae: Any, latents: Tensor) -> Image.Image:
    mean, std = _latent_statistics(vae)
    film = vae.decode((latents * std + mean).unsqueeze(2), return_dict=False)[0]
    return image_of(film.squeeze(2))


def _latent_statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the latents, each (1, C, 1, 1)."""
    mean, std = (
        torch.tensor(values, device=device_of(vae)).view(1, -1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std


def _write_tiny_vae(folder: Path, config: Mapping[str, Any]) -> None:
    write_random(folder, lambda: AutoencoderKLQwenImage(**config))


class QwenImage(FlowTransformer):
    network = QwenImageTransformer2DModel
    autoencoder = Autoencoder(
        AutoencoderKLQwenImage.__name__, 8, _build_vae, _encode, _decode, write_tiny=_write_tiny_vae
    )
    lora_loader = "QwenImageLoraLoaderMixin"
    shard = ShardSpec(blocks=("QwenImageTransformerBlock",), returns_views=("QwenImageTransformer2DModel",))
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
            r"transformer_blocks\.\d+\.(img_mlp|txt_mlp)\.net\.(0\.proj|2)",
        )
    }
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", QwenImageTransformer2DModel.__name__)}
    distilled = (Distilled(("Qwen-Image-Lightning",), base="Qwen/Qwen-Image", steps=8, marks={}),)
    options_read = frozenset({"architecture", "distilled", "max_tokens"})
    longest_text = 1024
    shift = Shift(ShiftLine(many=8192, high=0.9))

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._vae = self._folder.config("vae", self.autoencoder.name)
        self._language_model = language_model_config(self._folder, "qwen2_5_vl")
        self._max_tokens = max_tokens(model, self._folder, "tokenizer", MAX_TOKENS)
        config = self._architecture
        own = Architecture(config.num_layers, config.num_attention_heads)
        check_architecture(model, self._folder, ARCHITECTURES, own)
        self._check_inputs()

    @property
    def never_trained(self) -> tuple[str, ...]:
        last = self._architecture.num_layers - 1
        # Of the text in the last block, only keys and values are read.
        return (
            rf"transformer_blocks\.{last}\.(attn\.(add_q_proj|norm_added_q|to_add_out)|txt_mlp\.net\.(0\.proj|2))\..+",
        )

    @property
    def model_spec(self) -> str:
        return "qwen-image"

    @property
    def latent_channels(self) -> int:
        return int(self._vae["z_dim"])

    def build(self, component: str) -> nn.Module:
        model: Any = super().build(component)
        rope = model.pos_embed
        # Its frequencies are not buffers: nothing would restore what the meta device lost.
        model.pos_embed = type(rope)(theta=rope.theta, axes_dim=rope.axes_dim, scale_rope=rope.scale_rope)
        built: nn.Module = model
        return built

    def weights(self, component: str) -> WeightFiles:
        return self._folder.denoiser_weights(component, self.build(component))

    def layout(self, component: str) -> tuple[Fused, ...]:
        """The original file has diffusers' names."""
        return tuple(Fused(name, (name,)) for name in self.build(component).state_dict())

    def text_encoder(self, load: LoadModule) -> TextEncoder:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

        classes = (Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel)
        return load_language_model(load, self._folder, classes, self._language_model, self._text_layers)

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoder, caption: str) -> Example:
        tokens: Mapping[str, Tensor] = encoder.tokenizer(
            TEMPLATE.format(caption),
            return_tensors="pt",
            truncation=True,
            max_length=TEMPLATE_TOKENS + self._max_tokens,
        )
        (states,) = hidden_states(encoder.model, tokens, self._text_layers)
        return {"prompt_embeds": states[0, TEMPLATE_TOKENS:].cpu()}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        tokenizer, read = load_tokenizer(self._folder, "tokenizer"), TEMPLATE_TOKENS + self._max_tokens
        return [(length,) for length in text_lengths("text_encoder", tokenizer, captions, read, TEMPLATE.format)]

    def longer_text(self, length: TextLength) -> str | None:
        """`model.options.max_tokens` does not count the template before the caption."""
        needed, read = length.needed - TEMPLATE_TOKENS, length.read - TEMPLATE_TOKENS
        return super().longer_text(replace(length, needed=needed, read=read))

    def batch_key(self, example: Example) -> Hashable:
        # The model gets a mask of the padding: captions of any length share a batch.
        return tuple(example["latents"].shape[-2:])

    def collate(self, examples: Sequence[Example]) -> Batch:
        return masked_captions(examples)

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        tokens = min(num_tokens, self._max_tokens)
        return {"prompt_embeds": torch.zeros(tokens, self._architecture.joint_attention_dim, dtype=dtype)}

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        published = inspect.signature(AutoencoderKLQwenImage.__init__).parameters
        vae = ("base_dim", "z_dim", "dim_mult", "num_res_blocks", "latents_mean", "latents_std")
        return {
            "transformer": {
                "in_channels": 64,
                "out_channels": 16,
                "num_layers": sizes.num_layers,
                "attention_head_dim": 128,
                "num_attention_heads": sizes.num_heads,
                "joint_attention_dim": QWEN2_5_VL_7B["hidden_size"],
                "axes_dims_rope": [16, 56, 56],
            },
            "vae": {name: published[name].default for name in vae},
            "text_encoder": QWEN2_5_VL_7B,
            "tokenizer": {"model_max_length": TEMPLATE_TOKENS + MAX_TOKENS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        return {
            "transformer": _tiny_transformer(),
            "vae": _tiny_vae(),
            "text_encoder": _tiny_text_encoder(),
            "scheduler": _tiny_scheduler(),
        }

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        patches = patchify(latents)
        height, width = patches.shape[-2:]
        packed = model["transformer"](
            hidden_states=pack(patches),
            encoder_hidden_states=batch["prompt_embeds"].to(latents.dtype),
            encoder_hidden_states_mask=batch.get("prompt_mask"),
            timestep=sigma,
            img_shapes=[[(1, height, width)]] * len(latents),
            return_dict=False,
        )[0]
        return unpatchify(unpack(packed.float(), height, width))

    def guided(self, predictions: Sequence[Tensor], guidance: float) -> Tensor:
        """Classifier-free guidance that keeps each token's length from the prediction for the prompt."""
        if len(predictions) == 1:
            return predictions[0]
        height, width = (side // 2 for side in predictions[0].shape[-2:])
        before, after = (pack(patchify(v)).contiguous() for v in (predictions[0], guided(predictions, guidance)))
        lengths = [torch.linalg.vector_norm(tokens, dim=-1, keepdim=True) for tokens in (before, after)]
        return unpatchify(unpack(after * (lengths[0] / lengths[1]), height, width))

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

        def text_encoder() -> Any:
            return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**configs["text_encoder"]))

        write_random(folder / "text_encoder", text_encoder)
        # The tokenizer is trained on the template, so that it has its 34 tokens before the caption.
        write_tiny_tokenizer(folder / "tokenizer", TINY_VOCABULARY, TINY_TOKENS, corpus=[TEMPLATE.format("")] * 16)
        return "QwenImagePipeline", {
            "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
            "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        }

    @property
    def _text_layers(self) -> tuple[int]:
        return (self._language_model["num_hidden_layers"],)

    def _check_inputs(self) -> None:
        """Refuse parts that do not fit together, and Layered and Edit, which read more than text."""
        config = self._architecture
        if config.use_additional_t_cond or config.use_layer3d_rope or config.zero_cond_t:
            raise InputError(
                f"{self._folder.field} {self.folder}: the transformer also reads other images or layers; "
                "only text-to-image models are trained, use Qwen-Image"
            )
        given = (4 * self._vae["z_dim"], self._language_model["hidden_size"])
        check_inputs(self._folder, (config.in_channels, config.joint_attention_dim), given)

    def sampler(self, num_tokens: int, num_steps: int, device: torch.device) -> Any:
        # A single step starts at pure noise: stretching to the scheduler's last level would compute 0 / 0.
        config = {**self._scheduler, **({"shift_terminal": None} if num_steps == 1 else {})}
        mu = linear_mu_of(self._scheduler, num_tokens)
        return euler_scheduler(config, num_steps, device, mu, sigmas=spaced_sigmas(num_steps))


FAMILY = QwenImage


# The model of `model.path: tiny`.

TINY_TOKENS = 48
TINY_WIDTH = 32
TINY_VOCABULARY = 512


def _tiny_transformer() -> dict[str, Any]:
    return {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TINY_WIDTH,
        "axes_dims_rope": [4, 6, 6],
    }


def _tiny_vae() -> dict[str, Any]:
    return {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "latents_mean": [-0.1, 0.0, 0.1, 0.2],
        "latents_std": [0.12, 0.14, 0.16, 0.18],
    }


def _tiny_text_encoder() -> dict[str, Any]:
    text = tiny_language_model(TINY_WIDTH, TINY_VOCABULARY, num_layers=2) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TINY_WIDTH}
    return {
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": vision | {"fullatt_block_indexes": [0]},
    }


def _tiny_scheduler() -> dict[str, Any]:
    return {
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "max_image_seq_len": 8192,
        "shift_terminal": 0.02,
    }
