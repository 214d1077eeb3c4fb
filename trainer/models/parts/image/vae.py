"""Autoencoders: what a family needs of one, and that of most latent diffusion models.

The latter has eight pixels per latent, scaled and shifted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from PIL import Image
from torch import Tensor, nn

from trainer.models.parts.folder import write_random
from trainer.models.parts.image.images import device_of, image_of, pixels_of


@dataclass(frozen=True)
class Autoencoder:
    """How images become latents, and latents images.

    Attributes:
        name: diffusers' class.
        pixels: Pixels along a side of a latent.
        build: config -> the autoencoder on the meta device.
        encode: (autoencoder, RGB image) -> normalised latents (1, C, H / pixels, W / pixels), the posterior's mean. It
            is not a sample, because latents are cached and a sample would freeze one draw of its noise into them.
        decode: (autoencoder, normalised latents (1, C, h, w)) -> image.
        write_tiny: (folder, config): writes one with random weights.
    """

    name: str
    pixels: int
    build: Callable[[Mapping[str, Any]], nn.Module]
    encode: Callable[[Any, Image.Image], Tensor]
    decode: Callable[[Any, Tensor], Image.Image]
    write_tiny: Callable[[Path, Mapping[str, Any]], None]


def build_vae(config: Mapping[str, Any]) -> AutoencoderKL:
    """Build the autoencoder on the meta device."""
    with torch.device("meta"):
        return AutoencoderKL.from_config(dict(config))


def encode_latents(vae: Any, image: Image.Image) -> Tensor:
    """Encode an RGB image to normalised latents (1, C, H/8, W/8), the mean of the posterior. See DECISIONS 31."""
    latents = vae.encode(pixels_of(image, device_of(vae))).latent_dist.mode()
    normalised: Tensor = (latents - (vae.config.shift_factor or 0)) * vae.config.scaling_factor
    return normalised


def decode_latents(vae: Any, latents: Tensor) -> Image.Image:
    """Decode normalised latents (1, C, h, w) to an image."""
    latents = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0)
    return image_of(vae.decode(latents, return_dict=False)[0])


def _write_tiny_vae(folder: Path, config: Mapping[str, Any]) -> None:
    write_random(folder, lambda: AutoencoderKL(**config))


AUTOENCODER_KL = Autoencoder(
    AutoencoderKL.__name__, 8, build_vae, encode_latents, decode_latents, write_tiny=_write_tiny_vae
)


def published_vae(latent_channels: int, has_quant_conv: bool = False) -> dict[str, Any]:
    """Sizes of the published autoencoders with eight pixels per latent, which replace a tiny one's."""
    return {
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "latent_channels": latent_channels,
        "norm_num_groups": 32,
        "sample_size": 1024,
        "use_quant_conv": has_quant_conv,
        "use_post_quant_conv": has_quant_conv,
    }


def tiny_vae(latent_channels: int, scaling_factor: float, **changes: Any) -> dict[str, Any]:
    """Config of a tiny autoencoder with the usual eight pixels per latent."""
    tiny = {"block_out_channels": [8, 8, 16, 16], "layers_per_block": 1, "norm_num_groups": 4}
    return vae_config(latent_channels, scaling_factor, **tiny, **changes)


def vae_config(latent_channels: int, scaling_factor: float, **changes: Any) -> dict[str, Any]:
    """Config of an autoencoder with the usual eight pixels per latent."""
    return {
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "latent_channels": latent_channels,
        "scaling_factor": scaling_factor,
    } | changes
