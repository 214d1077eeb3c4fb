"""Flow matching as families train and sample it. sigma 0 = data, 1 = noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.config.sections import ObjectiveConfig
from trainer.models.objectives import (
    Batch,
    Example,
    Loss,
    Shift,
    ShiftLine,
    add_noise,
    draw_sigma,
    squared_error,
    total_loss,
    velocity,
)
from trainer.rng import SampleRng


def flow_loss(
    objective: ObjectiveConfig,
    shift: Shift,
    batch: Batch,
    num_tokens: int,
    rng: SampleRng,
    predict: Callable[[Tensor, Tensor], Tensor],
) -> Loss:
    """The error of the predicted velocity at one timestep per item.

    objective, shift: the family's.  batch: "latents" (B, ..., h, w), "weight" (B,) and perhaps "mask" (B, h, w).
    num_tokens: tokens per image, on which the shift depends.  predict: (noisy latents, sigma (B,)) -> velocity, shaped
    as the latents.
    """
    latents = batch["latents"]
    sigma = draw_sigma(objective, shift, num_tokens, rng)
    noise = rng.normal("noise", latents.shape[1:])
    prediction = predict(add_noise(latents, noise, sigma), sigma)
    return total_loss(squared_error(prediction, velocity(latents, noise), batch.get("mask")), batch["weight"])


def euler_scheduler(
    config: Mapping[str, Any], num_steps: int, device: torch.device, mu: float | None = None, **sigmas: Any
) -> Any:
    """diffusers' flow-matching Euler scheduler, ready for `denoise`.

    mu: logarithm of the shift, where the config asks for a dynamic one.  sigmas: `sigmas=spaced_sigmas(num_steps)`
    for models whose pipeline gives the noise levels before the shift itself; else the scheduler spaces them.
    """
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(config))
    scheduler.set_timesteps(num_steps, mu=mu, device=device, **sigmas)
    scheduler.set_begin_index(0)
    return scheduler


def linear_mu_of(config: Mapping[str, Any], num_tokens: int) -> float:
    """Logarithm of the shift in the scheduler's own config, linear in the tokens per image."""
    names = {"few": "base_image_seq_len", "many": "max_image_seq_len", "low": "base_shift", "high": "max_shift"}
    return ShiftLine(**{ours: config[theirs] for ours, theirs in names.items() if theirs in config}).mu(num_tokens)


def spaced_sigmas(num_steps: int) -> Any:
    """Equally spaced noise levels from 1 to 1 / num_steps: (num_steps,) of numpy."""
    return np.linspace(1.0, 1 / num_steps, num_steps)


def denoise(scheduler: Any, noise: Tensor, predict: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """From noise to latents, step by step. predict: (latents (1, ...), sigma (1,)) -> velocity, shaped like latents."""
    latents = noise
    for timestep in scheduler.timesteps:
        prediction = predict(latents, timestep.expand(1) / 1000)
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]
    return latents


def asked(text: Example, negative: Example | None, guidance: float) -> list[Example]:
    """What each step of classifier-free guidance asks the model for: the negative prompt only where it counts."""
    return [text] if negative is None or guidance <= 1 else [text, negative]


def guided(predictions: Sequence[Tensor], guidance: float) -> Tensor:
    """Classifier-free guidance (arXiv 2207.12598) of the predictions for `asked`."""
    if len(predictions) == 1:
        return predictions[0]
    positive, negative = predictions
    return negative + guidance * (positive - negative)


def write_euler_scheduler(folder: Path, config: Mapping[str, Any]) -> None:
    """The scheduler of a tiny model."""
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    FlowMatchEulerDiscreteScheduler(**config).save_pretrained(folder)
