"""The demo model's autoencoder, trained from nothing on glyphs in many colours.

A later style must come through it, so it sees more than the pictures: other grounds, other colours, inverted, three
inks, outlines, moved and mirrored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CONFIG = {
    "block_out_channels": [16, 32, 64, 96],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "latent_channels": 32,
    "norm_num_groups": 4,
    "sample_size": 64,
}
BATCH = 12
LR = 7e-4
PLAIN_UNTIL, CHANGED_FROM = 0.1, 0.3
"""Shares of the training: until the first the pictures are plain, from the second on half of them are changed."""
LATENT_NOISE = 0.05
"""Noise on the latents in training, so that the decoder forgives what a denoiser gets wrong."""
KL_WEIGHT = 1e-7
EDGE_WEIGHT = 1.0
AVERAGE = 0.999


def train_autoencoder(pixels: Tensor, steps: int, seed: int, say: Callable[[str], None]) -> Any:
    """An AutoencoderKLFlux2 that draws the pictures. pixels: (N, 4, H, W) RGBA, 0 to 1, fp32.

    Loss: absolute difference of the pictures and of their horizontal and vertical differences. Weights are averaged
    over the last thousand steps, and the batch norm of the latents holds the statistics of the training pictures. It
    trains on a GPU where there is one.
    """
    from diffusers import AutoencoderKLFlux2

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    vae: Any = AutoencoderKLFlux2.from_config(CONFIG)
    _start_linear(vae)
    vae.to(device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_cosine(step, steps))
    averaged = torch.optim.swa_utils.AveragedModel(
        vae, avg_fn=lambda average, new, _: torch.lerp(average, new, 1 - AVERAGE)
    )
    began, shown = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        changed = (step / steps - PLAIN_UNTIL) / (CHANGED_FROM - PLAIN_UNTIL)
        chosen = pixels[torch.randint(len(pixels), (BATCH,))]
        pictures = augmented(chosen, 0.5 * min(1.0, max(0.0, changed))).to(device)
        with torch.autocast(device, torch.bfloat16):
            posterior = vae.encode(pictures).latent_dist
            latents = posterior.mode()
            latents = latents + LATENT_NOISE * latents.detach().std() * torch.randn_like(latents)
            drawn = vae.decode(latents, return_dict=False)[0].float()
        error = nn.functional.l1_loss(drawn, pictures)
        loss = error + EDGE_WEIGHT * _edges(drawn, pictures) + KL_WEIGHT * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        averaged.update_parameters(vae)
        shown = error.item() if step == 1 else 0.99 * shown + 0.01 * error.item()
        if step % 200 == 0 or step == steps:
            seconds = time.perf_counter() - began
            say(f"autoencoder: step {step} of {steps}, mean absolute error {shown:.4f}, {seconds:.0f} s")
    best: Any = averaged.module.cpu().eval()
    _set_statistics(best, pixels)
    return best


@torch.no_grad()
def _start_linear(vae: Any) -> None:
    """Start every residual branch at zero and let shortcuts and resampling keep what they are given.

    diffusers' own start loses the colours on the way: after 450 steps the error was twice this one's.
    """
    for name, layer in vae.named_modules():
        if name.endswith(".conv2"):
            nn.init.zeros_(layer.weight)
        elif name.endswith(".conv_shortcut"):
            nn.init.orthogonal_(layer.weight)
        elif "downsamplers" in name and isinstance(layer, nn.Conv2d):
            outs, ins = layer.weight.shape[:2]
            block = nn.init.orthogonal_(torch.empty(outs, ins * 4), gain=1.5)
            nn.init.zeros_(layer.weight)
            layer.weight[:, :, :2, :2] = block.view(outs, ins, 2, 2)
        elif "upsamplers" in name and isinstance(layer, nn.Conv2d):
            tent = torch.tensor([0.25, 0.5, 0.25])
            turned = nn.init.orthogonal_(torch.empty(layer.weight.shape[:2]))
            layer.weight.mul_(0.5).add_(turned[:, :, None, None] * torch.outer(tent, tent))
        else:
            continue
        nn.init.zeros_(layer.bias)


def augmented(glyphs: Tensor, changed_share: float = 0.5) -> Tensor:
    """RGB pictures (B, 3, H, W) from -1 to 1 of RGBA glyphs: plain on white, and a share of them changed at random."""
    count = len(glyphs)
    colour, alpha = glyphs[:, :3], glyphs[:, 3:]
    turned = torch.rand(count) < 0.5
    colour = torch.where(turned.view(-1, 1, 1, 1), colour.flip(-1), colour)
    alpha = torch.where(turned.view(-1, 1, 1, 1), alpha.flip(-1), alpha)
    plain = (torch.rand(count, 1, 1, 1) >= changed_share).float()
    ground = plain + (1 - plain) * torch.rand(count, 3, 1, 1)
    pictures = colour * alpha + ground * (1 - alpha)
    changed = torch.stack([_changed(picture) for picture in pictures])
    return (plain * pictures + (1 - plain) * changed) * 2 - 1


def _changed(picture: Tensor) -> Tensor:
    """One picture (3, H, W) from 0 to 1 in another look."""
    kind = int(torch.randint(5, ()))
    if kind == 0:
        picture = picture[torch.randperm(3)]
    elif kind == 1:
        picture = 1 - picture
    elif kind == 2:
        picture = _inked(picture.mean(0))
    elif kind == 3:
        edges = _outline(picture)
        inks = torch.rand(2, 3, 1, 1)
        picture = inks[0] * edges + inks[1] * (1 - edges)
    shift = [int(value) for value in torch.randint(-6, 7, (2,))]
    contrast, brightness = 0.6 + 0.4 * torch.rand(()), 0.4 * torch.rand(())
    picture = picture * contrast + (1 - contrast) * brightness
    return picture.roll(shift, (1, 2))


def _inked(brightness: Tensor) -> Tensor:
    """A picture (3, H, W) in up to four random inks by brightness (H, W)."""
    inks = torch.rand(4, 3)
    stops = torch.linspace(0, 1, 4)
    below = (brightness.unsqueeze(0) >= stops[1:-1].view(-1, 1, 1)).sum(0)
    share = ((brightness - stops[below]) / (stops[1] - stops[0])).clamp(0, 1)
    mixed = inks[below] * (1 - share.unsqueeze(-1)) + inks[below + 1] * share.unsqueeze(-1)
    return mixed.permute(2, 0, 1)


def _outline(picture: Tensor) -> Tensor:
    """Where the picture changes, 0 to 1: (1, H, W)."""
    across = picture.diff(dim=2).abs().amax(0)
    down = picture.diff(dim=1).abs().amax(0)
    both = nn.functional.pad(across, (0, 1)) + nn.functional.pad(down, (0, 0, 0, 1))
    return (both * 3).clamp(0, 1).unsqueeze(0)


def _edges(drawn: Tensor, pictures: Tensor) -> Tensor:
    """Mean absolute difference of the pictures' differences between neighbouring pixels."""
    error = drawn - pictures
    return error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()


def _warm_cosine(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps)) + 1e-3


@torch.no_grad()
def _set_statistics(vae: Any, pixels: Tensor) -> None:
    """Make the batch norm hold mean and variance of the packed latents of the plain pictures."""
    parts = (augmented(pixels[first : first + 64], 0.0) for first in range(0, len(pixels), 64))
    latents = torch.cat([vae.encode(part).latent_dist.mode() for part in parts])
    packed = nn.functional.pixel_unshuffle(latents, 2)
    vae.bn.running_mean.copy_(packed.mean((0, 2, 3)))
    vae.bn.running_var.copy_(packed.var((0, 2, 3)))
