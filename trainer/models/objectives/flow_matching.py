"""Flow matching: timestep densities, timestep shift, noisy latents, their target and the loss.

`sigma` in [0, 1] is the share of noise, 0 = data and 1 = noise. See DECISIONS 29.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config.sections import ObjectiveConfig
from trainer.models.objectives.base import Batch, Loss, per_item, squared_error, total_loss
from trainer.rng import SampleRng


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
        unshifted: Tokens per image at which the factor of `auto` is 1, where it grows with their square root, as the
            side of the image does.
    """

    line: ShiftLine = ShiftLine()
    constant: float | None = None
    unshifted: int | None = None


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
        case "auto" if shift.unshifted is not None:
            return math.sqrt(num_tokens / shift.unshifted)
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
    sigma = per_item(sigma, latents)
    return (1 - sigma) * latents + sigma * noise


def velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """The target of flow matching: the direction from data to noise, d add_noise / d sigma."""
    return noise - latents


def flow_loss(
    objective: ObjectiveConfig,
    shift: Shift,
    batch: Batch,
    num_tokens: int,
    rng: SampleRng,
    predict: Callable[[Tensor, Tensor], Tensor],
) -> Loss:
    """The error of the predicted velocity at one timestep per item.

    Args:
        objective: The section of the config.
        shift: The family's shift.
        batch: "latents" (B, ..., h, w), "weight" (B,) and optionally "mask" (B, h, w).
        num_tokens: Tokens per image, for the shift.
        rng: Random numbers of the items.
        predict: (noisy latents, sigma (B,)) -> velocity, in the shape of the latents.
    """
    latents = batch["latents"]
    sigma = draw_sigma(objective, shift, num_tokens, rng)
    noise = rng.normal("noise", latents.shape[1:])
    prediction = predict(add_noise(latents, noise, sigma), sigma)
    return total_loss(squared_error(prediction, velocity(latents, noise), batch.get("mask")), batch["weight"])
