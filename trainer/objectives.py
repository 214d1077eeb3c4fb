"""What a step minimizes: timestep densities, timestep shift and the flow-matching loss.

One convention everywhere: `sigma` in [0, 1] is the share of noise, 0 = data and 1 = noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import ObjectiveConfig
from trainer.rng import SampleRng

Example = dict[str, Tensor]
"""One encoded sample, on the CPU, without batch dim. The family documents the keys."""
Batch = dict[str, Tensor]
"""Stacked examples. The family documents the keys; "weight" (B,) is the weight of each item, 0 for padding."""


@dataclass(frozen=True)
class Loss:
    """total: sum of weighted item losses, a scalar with gradient.  weight: sum of the items' weights, a scalar.

    The loss of a step is the sum of `total` over all ranks and passes divided by the sum of `weight`.
    """

    total: Tensor
    weight: Tensor


def draw_sigma(cfg: ObjectiveConfig, num_tokens: int, rng: SampleRng) -> Tensor:
    """The training timestep of each item: the density of `cfg`, shifted for `num_tokens` latent tokens per image.

    Returns (B,) in [0, 1], fp32.
    """
    return shift_sigma(sigma_at(cfg, rng.uniform("timestep")), shift_factor(cfg, num_tokens))


def sigma_at(cfg: ObjectiveConfig, quantile: Tensor) -> Tensor:
    """Quantiles of the timestep density, before the shift: uniform numbers in, timesteps out.

    quantile: (B,) in [0, 1), fp32.  Returns (B,) in [0, 1]. The mode density falls where the others rise.
    Source: SD3 paper (arXiv 2403.03206), sec. 3.1.
    """
    match cfg.density:
        case "logit_normal":
            return torch.sigmoid(cfg.logit_mean + cfg.logit_std * torch.special.ndtri(quantile))
        case "uniform":
            return quantile
        case "mode":
            bend = torch.cos(math.pi / 2 * quantile).square() - 1 + quantile
            return 1 - quantile - cfg.mode_scale * bend
        case "cosmap":
            return 1 - 1 / (torch.tan(math.pi / 2 * quantile) + 1)


def shift_factor(cfg: ObjectiveConfig, num_tokens: int) -> float:
    """How strongly `cfg` moves timesteps toward noise for images of `num_tokens` latent tokens; 1 = not at all."""
    match cfg.shift:
        case "linear":
            return math.exp(linear_mu(num_tokens))
        case "empirical":
            return math.exp(empirical_mu(num_tokens, num_steps=50))
        case "constant":
            return cfg.shift_factor
        case "none":
            return 1.0


def shift_sigma(sigma: Tensor, factor: float) -> Tensor:
    """Move timesteps toward noise (factor > 1) or data (< 1); 0 and 1 stay where they are.

    sigma: any shape, in [0, 1].  Returns the same shape and range.
    Source: SD3 paper (arXiv 2403.03206), sec. 5.3.2.
    """
    return factor * sigma / (1 + (factor - 1) * sigma)


def linear_mu(num_tokens: int) -> float:
    """Logarithm of the shift, linear in the tokens per image: 0.5 at 256, 1.15 at 4096.

    Source: FLUX.1's reference sampler.
    """
    return 0.5 + (1.15 - 0.5) * (num_tokens - 256) / (4096 - 256)


def empirical_mu(num_tokens: int, num_steps: int) -> float:
    """Logarithm of the shift FLUX.2's reference sampler uses for images of `num_tokens` in `num_steps` steps.

    Two lines in the number of tokens were fitted, for 10 and for 200 steps; other numbers of steps lie on the
    straight line between them. Above 4300 tokens the 200-step line is used for any number of steps.
    """
    mu_200 = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return mu_200
    mu_10 = 8.73809524e-05 * num_tokens + 1.89833333
    return mu_200 + (mu_200 - mu_10) * (num_steps - 200) / 190


def add_noise(latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """The point on the straight line from data to noise.

    latents, noise: (B, ...).  sigma: (B,).  Returns (B, ...).
    """
    sigma = sigma.view(-1, *[1] * (latents.dim() - 1))
    return (1 - sigma) * latents + sigma * noise


def velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """What a flow-matching model predicts: the direction from data to noise, d add_noise / d sigma."""
    return noise - latents


def squared_error(prediction: Tensor, target: Tensor, weight: Tensor) -> Loss:
    """Mean squared error of each item, in fp32 whatever the inputs' type.

    prediction, target: (B, ...).  weight: (B,), 0 for padding.
    """
    errors = (prediction.float() - target.float()).square().flatten(1).mean(dim=1)
    return Loss(total=(errors * weight).sum(), weight=weight.sum())
