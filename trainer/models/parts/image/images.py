"""Converts between images, pixels, latents and tokens."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def pixels_of(image: Image.Image, device: torch.device) -> Tensor:
    """Convert an RGB image to the input of an autoencoder: (1, 3, H, W) fp32 in [-1, 1]."""
    levels = torch.from_numpy(np.array(image, dtype=np.float32)[None])
    return levels.permute(0, 3, 1, 2).to(device) / 255 * 2 - 1


def image_of(pixels: Tensor) -> Image.Image:
    """Convert pixels (1, 3, H, W), clamped to [-1, 1], to an RGB image."""
    levels = ((pixels[0] / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).cpu().numpy())


def patchify(latents: Tensor) -> Tensor:
    """Turn 2 x 2 latent pixels into channels: (B, C, H, W) -> (B, 4C, H/2, W/2)."""
    return nn.functional.pixel_unshuffle(latents, 2)


def unpatchify(latents: Tensor) -> Tensor:
    """Undo `patchify`: (B, 4C, H, W) -> (B, C, 2H, 2W)."""
    return nn.functional.pixel_shuffle(latents, 2)


def pack(latents: Tensor) -> Tensor:
    """Turn pixels into tokens, row by row: (B, C, h, w) -> (B, h * w, C)."""
    return latents.flatten(2).transpose(1, 2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Undo `pack`: (B, h * w, C) -> (B, C, h, w)."""
    return tokens.transpose(1, 2).reshape(tokens.shape[0], -1, height, width)
