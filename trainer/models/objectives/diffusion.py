"""Discrete diffusion: timesteps, noisy latents, their target and the weight of its error.

`alpha_bar` in [0, 1] is the data's share of the variance at an integer timestep: 1 = data and 0 = noise.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from trainer.models.objectives.base import per_item
from trainer.rng import SampleRng

Prediction = Literal["epsilon", "v_prediction"]
"""The target that a model of discrete diffusion predicts, as named by diffusers' schedulers."""


def draw_timestep(num_timesteps: int, rng: SampleRng) -> Tensor:
    """Draw the training timestep of each item in discrete diffusion: (B,) int64, uniform in 0..num_timesteps-1."""
    return (rng.uniform("timestep") * num_timesteps).long()


def diffuse(latents: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
    """Noisy latents, of unit variance if the latents have unit variance.

    Source: DDPM (arXiv 2006.11239), eq. 4.

    Args:
        latents: (B, ...).
        noise: (B, ...).
        alpha_bar: (B,) in [0, 1].

    Returns:
        (B, ...).
    """
    alpha_bar = per_item(alpha_bar, latents)
    return alpha_bar.sqrt() * latents + (1 - alpha_bar).sqrt() * noise


def diffusion_target(prediction: Prediction, latents: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
    """The target of discrete diffusion: the noise, or the velocity on the circle from data to noise.

    Source of the velocity: progressive distillation (arXiv 2202.00512), appendix D.

    Args:
        prediction: The kind of target.
        latents: (B, ...).
        noise: (B, ...).
        alpha_bar: (B,) in [0, 1].

    Returns:
        (B, ...).
    """
    if prediction == "epsilon":
        return noise
    alpha_bar = per_item(alpha_bar, latents)
    return alpha_bar.sqrt() * noise - (1 - alpha_bar).sqrt() * latents


def min_snr_weight(prediction: Prediction, alpha_bar: Tensor, gamma: float) -> Tensor:
    """Weight of each item's error, so that timesteps with little noise do not outweigh the others.

    An error of the predicted data has the weight min(snr, gamma). The error of the noise is snr times as large, that
    of the velocity snr + 1 times. Source: arXiv 2303.09556.

    Args:
        prediction: The kind of target.
        alpha_bar: (B,) in [0, 1).
        gamma: The largest signal-to-noise ratio that counts.

    Returns:
        (B,) in [0, 1].
    """
    snr = alpha_bar / (1 - alpha_bar)
    if prediction == "epsilon":
        # min(snr, gamma) / snr, written without 0 / 0 at a terminal timestep that has no signal.
        return (gamma / snr).clamp(max=1)
    return snr.clamp(max=gamma) / (snr + 1)
