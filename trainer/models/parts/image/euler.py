"""Sampling of flow matching with Euler's method, and classifier-free guidance. sigma 0 = data, 1 = noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.models.objectives.base import Example
from trainer.models.objectives.flow_matching import ShiftLine
from trainer.models.parts.progress import counted


def euler_scheduler(
    config: Mapping[str, Any], num_steps: int, device: torch.device, mu: float | None = None, **sigmas: Any
) -> Any:
    """Make diffusers' flow-matching Euler scheduler, ready for `denoise`.

    Args:
        config: Content of scheduler_config.json.
        num_steps: Number of sampling steps.
        device: Device of its tensors.
        mu: Logarithm of the shift, where the config asks for a dynamic shift.
        sigmas: `sigmas=spaced_sigmas(num_steps)` for models whose pipeline passes the noise levels before the shift;
            else the scheduler spaces them.
    """
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    # A single step starts at pure noise: stretching to the scheduler's last level would compute 0 / 0.
    ends = {"shift_terminal": None} if num_steps == 1 else {}
    scheduler = FlowMatchEulerDiscreteScheduler.from_config({**config, **ends})
    scheduler.set_timesteps(num_steps, mu=mu, device=device, **sigmas)
    scheduler.set_begin_index(0)
    return scheduler


def linear_mu_of(config: Mapping[str, Any], num_tokens: int) -> float:
    """Logarithm of the shift in the scheduler's own config, linear in the tokens per image."""
    names = {"few": "base_image_seq_len", "many": "max_image_seq_len", "low": "base_shift", "high": "max_shift"}
    return ShiftLine(**{ours: config[theirs] for ours, theirs in names.items() if theirs in config}).mu(num_tokens)


def spaced_sigmas(num_steps: int) -> Any:
    """Equally spaced noise levels from 1 to 1 / num_steps: a numpy array (num_steps,)."""
    return np.linspace(1.0, 1 / num_steps, num_steps)


def logit_normal_sigmas(num_steps: int, mean: float, std: float) -> Any:
    """Noise levels at equally spaced quantiles of a logit-normal distribution, from the highest: a numpy array
    (num_steps,). Their logits are clamped to -7.5 and 9, which are log SNRs of 15 and -18.
    """
    quantiles = torch.linspace(1.0, 0.0, num_steps + 1, dtype=torch.float64)[:-1]
    logits = mean + std * torch.special.ndtri(quantiles)
    return torch.sigmoid(logits.clamp(-7.5, 9.0)).numpy()


def denoise(scheduler: Any, noise: Tensor, predict: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Denoise to latents step by step. predict: (latents (1, ...), sigma (1,)) -> velocity, shaped like latents."""
    latents = noise
    for timestep in counted(scheduler.timesteps):
        prediction = predict(latents, timestep.expand(1) / 1000)
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]
    return latents


def guidance_inputs(text: Example, negative: Example | None, guidance: float) -> list[Example]:
    """The texts that each step of classifier-free guidance runs the model on; the negative one only with guidance."""
    return [text] if negative is None or guidance <= 1 else [text, negative]


def guided(predictions: Sequence[Tensor], guidance: float) -> Tensor:
    """Combine the predictions for `guidance_inputs` by classifier-free guidance (arXiv 2207.12598)."""
    if len(predictions) == 1:
        return predictions[0]
    positive, negative = predictions
    return negative + guidance * (positive - negative)


def write_euler_scheduler(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the scheduler of a tiny model."""
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    FlowMatchEulerDiscreteScheduler(**config).save_pretrained(folder)
