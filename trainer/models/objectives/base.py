"""Training objectives: timestep densities, timestep shift and the losses of flow matching and discrete diffusion.

Flow matching has one convention: `sigma` in [0, 1] is the share of noise, 0 = data and 1 = noise. Discrete diffusion
has `alpha_bar` in [0, 1], the data's share of the variance at an integer timestep: 1 = data and 0 = noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.config.sections import ObjectiveConfig
from trainer.rng import SampleRng

Example = dict[str, Tensor]
"""One encoded sample, on the CPU, without batch dim. The family documents the keys."""
Batch = dict[str, Tensor]
"""Stacked examples. The family documents the keys; "weight" (B,) is the weight of each item, 0 for padding."""
Prediction = Literal["epsilon", "v_prediction"]
"""The target that a model of discrete diffusion predicts, as named by diffusers' schedulers."""


@dataclass(frozen=True)
class Loss:
    """The loss of one pass.

    The loss of a step is the sum of `total` over all ranks and passes divided by the sum of `weight`: an item with a
    smaller weight moves the model less, whatever else is in its batch. For a family with `loss_weights` it is the sum
    of weight x mean over its losses, each mean the sum of the first column of `parts` divided by that of the second.

    Attributes:
        total: Sum of weighted item losses, a scalar with gradient.
        weight: Number of items without padding, a scalar.
        parts: (number of losses, 2) for a family with several losses: sum of each loss and number of its items or
            tokens, both without the weight of the loss. The sums have gradients. None for other families.
        errors: (B,) error of each item before its weight, with gradient, for models of images.
        metrics: (number of metrics, 2) for an objective that measures more than its loss: sum of each metric and number
            of its items.
        tokens: Number of learned tokens, where `weight` counts something else.
    """

    total: Tensor
    weight: Tensor
    parts: Tensor | None = None
    errors: Tensor | None = None
    metrics: Tensor | None = None
    tokens: Tensor | None = None

    def parts_with(self, shares: Tensor) -> Tensor:
        """The sum of the losses of `parts`, a scalar with gradient. shares: (number of losses,) weight of each sum."""
        assert self.parts is not None, "a family with loss_weights returns parts"
        return self.parts[:, 0] @ shares


@dataclass(frozen=True)
class ShiftLine:
    """Logarithm of the shift, linear in the tokens per image: `low` at `few` tokens, `high` at `many`.

    The defaults are those of FLUX.1's reference sampler.
    """

    few: int = 256
    many: int = 4096
    low: float = 0.5
    high: float = 1.15

    def mu(self, num_tokens: int) -> float:
        """Logarithm of the shift at `num_tokens` tokens; the line extends beyond the two points."""
        return self.low + (self.high - self.low) * (num_tokens - self.few) / (self.many - self.few)


@dataclass(frozen=True)
class Shift:
    """The timestep shift in a family's recipe.

    Attributes:
        line: The line that `objective.shift: linear` follows.
        constant: The factor that `auto` uses; None lets `auto` follow `line`.
    """

    line: ShiftLine = ShiftLine()
    constant: float | None = None


def perplexity_of(loss: float) -> float:
    """Perplexity, exp(loss): the number of equally likely tokens. loss: mean cross-entropy of a token."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def draw_sigma(cfg: ObjectiveConfig, shift: Shift, num_tokens: int, rng: SampleRng) -> Tensor:
    """Draw the training timestep of each item from the density of `cfg`, shifted for the image size.

    Args:
        cfg: Density and shift.
        shift: The family's shift.
        num_tokens: Latent tokens per image.
        rng: Random numbers of the items.

    Returns:
        (B,) in [0, 1], fp32.
    """
    return shift_sigma(sigma_at(cfg, rng.uniform("timestep")), shift_factor(cfg, shift, num_tokens))


def sigma_at(cfg: ObjectiveConfig, quantile: Tensor) -> Tensor:
    """Turn uniform numbers into timesteps: quantiles of the timestep density, before the shift.

    With the mode density sigma falls with the quantile; with the others it rises.
    Source: Scaling Rectified Flow Transformers (arXiv 2403.03206), sec. 3.1.

    Args:
        cfg: The density.
        quantile: (B,) in [0, 1), fp32.

    Returns:
        (B,) in [0, 1].
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


def shift_factor(cfg: ObjectiveConfig, shift: Shift, num_tokens: int) -> float:
    """The factor of `shift_sigma` for images of `num_tokens` latent tokens; 1 = no shift. shift: the family's."""
    match cfg.shift:
        case "auto" if shift.constant is not None:
            return shift.constant
        case "auto" | "linear":
            return math.exp(shift.line.mu(num_tokens))
        case "empirical":
            return math.exp(empirical_mu(num_tokens, num_steps=50))
        case "constant":
            return cfg.shift_factor
        case "none":
            return 1.0


def shift_sigma(sigma: Tensor, factor: float) -> Tensor:
    """Move timesteps toward noise (factor > 1) or data (< 1); 0 and 1 do not move.

    Source: Scaling Rectified Flow Transformers (arXiv 2403.03206), sec. 5.3.2.

    Args:
        sigma: Any shape, in [0, 1].
        factor: `shift_factor`.

    Returns:
        The shape and range of `sigma`.
    """
    return factor * sigma / (1 + (factor - 1) * sigma)


def empirical_mu(num_tokens: int, num_steps: int) -> float:
    """Logarithm of the shift in FLUX.2's reference sampler for images of `num_tokens` in `num_steps` steps.

    Two lines in the number of tokens were fitted, for 10 and for 200 steps; other numbers of steps lie on the
    straight line between them. Above 4300 tokens the 200-step line is used for any number of steps.
    """
    mu_200 = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return mu_200
    mu_10 = 8.73809524e-05 * num_tokens + 1.89833333
    return mu_200 + (mu_200 - mu_10) * (num_steps - 200) / 190


def add_noise(latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """The point at `sigma` on the straight line from data to noise.

    Args:
        latents: (B, ...).
        noise: (B, ...).
        sigma: (B,) in [0, 1].

    Returns:
        (B, ...).
    """
    sigma = _per_item(sigma, latents)
    return (1 - sigma) * latents + sigma * noise


def velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """The target of flow matching: the direction from data to noise, d add_noise / d sigma."""
    return noise - latents


def squared_error(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean squared error of each item, in fp32 for inputs of any type.

    Args:
        prediction: (B, C, ..., h, w).
        target: (B, C, ..., h, w).
        mask: (B, h, w) weights of the pixels. The mean is still over all pixels, so that an image with a small mask
            counts less than one without a mask.

    Returns:
        (B,).
    """
    assert prediction.shape == target.shape, "an error of other shapes would be broadcast"
    errors = (prediction.float() - target.float()).square()
    if mask is not None:
        assert mask.shape == (errors.shape[0], *errors.shape[-2:])
        errors = errors * mask.view(mask.shape[0], *[1] * (errors.dim() - 3), *mask.shape[1:])
    return errors.flatten(1).mean(dim=1)


def total_loss(errors: Tensor, weight: Tensor) -> Loss:
    """Sum the weighted errors of the items.

    Args:
        errors: (B,).
        weight: (B,), 0 for padding.
    """
    return Loss(total=(errors * weight).sum(), weight=weight.count_nonzero(), errors=errors)


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
    alpha_bar = _per_item(alpha_bar, latents)
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
    alpha_bar = _per_item(alpha_bar, latents)
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


def _per_item(values: Tensor, like: Tensor) -> Tensor:
    """Reshape (B,) to (B, 1, ...), to multiply a tensor of items."""
    return values.view(-1, *[1] * (like.dim() - 1))
