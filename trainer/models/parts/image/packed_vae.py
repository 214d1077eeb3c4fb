"""The autoencoder with packed latents: 2 x 2 latent pixels are one token, normalised by batch-norm statistics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from trainer.models.parts.folder import fill_random, save_module
from trainer.models.parts.image.images import device_of, image_of, patchify, pixels_of, unpatchify
from trainer.models.parts.image.vae import Autoencoder
from trainer.rng import generator

if TYPE_CHECKING:
    from diffusers import AutoencoderKLFlux2


def build_packed_vae(config: Mapping[str, Any]) -> AutoencoderKLFlux2:
    """Build the autoencoder on the meta device."""
    from diffusers import AutoencoderKLFlux2  # most starts have all latents, and need no autoencoder

    with torch.device("meta"):
        return AutoencoderKLFlux2.from_config(dict(config))


def encode_packed(vae: Any, image: Image.Image, eps: float | None = None) -> Tensor:
    """Encode an RGB image to normalised latents (1, 4C, H/16, W/16), the mean of the posterior, not a sample. eps: as
    for `latent_statistics`."""
    latents = patchify(vae.encode(pixels_of(image, device_of(vae))).latent_dist.mode())
    mean, std = latent_statistics(vae, eps)
    return (latents - mean) / std


def decode_packed(vae: Any, latents: Tensor, eps: float | None = None) -> Image.Image:
    """Decode normalised latents (1, 4C, h, w) to an image. eps: as for `latent_statistics`."""
    mean, std = latent_statistics(vae, eps)
    return image_of(vae.decode(unpatchify(latents * std + mean), return_dict=False)[0])


def latent_statistics(vae: Any, eps: float | None = None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the patchified latents, each (1, 4C, 1, 1): the VAE's batch-norm statistics.

    eps: added to the variances; None takes that of the VAE's config.
    """
    mean, variance = (value.view(1, -1, 1, 1) for value in (vae.bn.running_mean, vae.bn.running_var))
    return mean, torch.sqrt(variance + (vae.config.batch_norm_eps if eps is None else eps))


PACKED_VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 32,
    "norm_num_groups": 32,
}
"""Sizes of the published autoencoder, which replace a tiny one's."""


def tiny_packed_vae() -> dict[str, Any]:
    """Config of a tiny autoencoder, whose packed latents have 16 channels."""
    return {"block_out_channels": [8, 8, 16, 16], "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4}


def write_tiny_packed_vae(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a tiny autoencoder with random weights.

    Its batch-norm statistics are those of coloured squares, so that normalised latents have about unit variance.
    """
    vae = build_packed_vae(config)
    fill_random(vae, "vae")
    vae.bn.momentum = 1.0
    squares = torch.rand(16, 3, 8, 8, generator=generator("vae", "squares")) * 2 - 1
    with torch.no_grad():
        vae.bn(patchify(vae.encode(nn.functional.interpolate(squares, scale_factor=8)).latent_dist.mode()))
    save_module(folder, vae)


PACKED_AUTOENCODER = Autoencoder(
    "AutoencoderKLFlux2", 16, build_packed_vae, encode_packed, decode_packed, write_tiny=write_tiny_packed_vae
)
