"""The steps of a run that was not started: those of its config, or of its epochs where its images are counted."""

from __future__ import annotations

import math

from app.data.scans import Scans
from trainer.config import families
from trainer.config.load import stage_configs
from trainer.config.schema import RunConfig


def planned_steps(scans: Scans, cfg: RunConfig) -> list[int | None]:
    """Return the optimizer steps of each stage; None for epochs of text, and while the images are not counted."""
    return [_steps(scans, part) for part in stage_configs(cfg)]


def _steps(scans: Scans, cfg: RunConfig) -> int | None:
    epochs, data = cfg.train.epochs, cfg.data
    if epochs is None:
        return cfg.train.steps
    if families.trains_on(cfg) == "text":
        return None
    found = scans.of(cfg)
    samples = found.epoch_images or float(found.num_questions)
    if not found.is_complete or found.problems or not samples:
        return None
    if found.epoch_images and found.num_questions:
        samples /= 1 - data.question_share
    return max(1, math.ceil(samples * epochs / cfg.train.batch_size))
