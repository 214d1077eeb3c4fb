"""The autoencoders and the prompt of Qwen's image models, which other models share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import AutoencoderKLQwenImage21
from PIL import Image
from torch import Tensor, nn

from trainer.models.parts.folder import write_random
from trainer.models.parts.image.images import device_of, image_of, pixels_of
from trainer.models.parts.image.vae import Autoencoder

BEFORE_CAPTION = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
AFTER_CAPTION = "<|im_end|>\n<|im_start|>assistant\n"
"""The text that the models were trained to see around a caption, copied from diffusers' pipelines."""
TOKENS_BEFORE, TOKENS_AFTER = 34, 5
"""Their tokens. The states of those before the caption are left out."""


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


QWEN_AUTOENCODER = Autoencoder(
    AutoencoderKLQwenImage.__name__, 8, _build_vae, _encode, _decode, write_tiny=_write_tiny_vae
)


def published_qwen_vae() -> dict[str, Any]:
    """Sizes of the published autoencoder, which are the defaults of its class."""
    published = inspect.signature(AutoencoderKLQwenImage.__init__).parameters
    names = ("base_dim", "z_dim", "dim_mult", "num_res_blocks", "latents_mean", "latents_std")
    return {name: published[name].default for name in names}


def _build_rgba(config: Mapping[str, Any]) -> nn.Module:
    with torch.device("meta"):
        vae: nn.Module = AutoencoderKLQwenImage21.from_config(dict(config))
    return vae


def _encode_rgba(vae: Any, image: Image.Image) -> Tensor:
    pixels = pixels_of(image, device_of(vae))
    opaque = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)
    mean, std = _latent_statistics(vae)
    latents: Tensor = (vae.encode(opaque.unsqueeze(2)).latent_dist.mode().squeeze(2) - mean) / std
    return latents


def _decode_rgba(vae: Any, latents: Tensor) -> Image.Image:
    """Decode to an image on white, as images with transparent pixels are trained."""
    mean, std = _latent_statistics(vae)
    pixels = vae.decode((latents * std + mean).unsqueeze(2), return_dict=False)[0].squeeze(2)
    alpha = (pixels[:, 3:] / 2 + 0.5).clamp(0, 1)
    return image_of(pixels[:, :3].clamp(-1, 1) * alpha + (1 - alpha))


def _write_tiny_rgba(folder: Path, config: Mapping[str, Any]) -> None:
    write_random(folder, lambda: AutoencoderKLQwenImage21(**config))


QWEN_RGBA_AUTOENCODER = Autoencoder(
    AutoencoderKLQwenImage21.__name__, 16, _build_rgba, _encode_rgba, _decode_rgba, write_tiny=_write_tiny_rgba
)
"""It has 16 pixels per latent and reads and gives a fourth channel, which is opaque for an RGB image."""


def published_rgba_vae() -> dict[str, Any]:
    """Sizes of the published one, which are the defaults of its class."""
    published = inspect.signature(AutoencoderKLQwenImage21.__init__).parameters
    names = ("base_dim", "decoder_base_dim", "z_dim", "dim_mult", "num_res_blocks", "latents_mean", "latents_std")
    return {name: published[name].default for name in names}


TINY_QWEN_VAE = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "latents_mean": [-0.1, 0.0, 0.1, 0.2],
    "latents_std": [0.12, 0.14, 0.16, 0.18],
}
TINY_RGBA_VAE = TINY_QWEN_VAE | {
    "decoder_base_dim": 8,
    "z_dim": 8,
    "dim_mult": [1, 1, 1, 1, 1],
    "latents_mean": [-0.1, 0.0, 0.1, 0.2, -0.2, 0.3, 0.05, -0.05],
    "latents_std": [0.12, 0.14, 0.16, 0.18, 0.13, 0.15, 0.17, 0.19],
}
