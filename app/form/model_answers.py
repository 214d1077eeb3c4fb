"""The base models as JSON, for the page's script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.form.form_answers import kinds
from app.form.model_choices import ModelChoice, PresetChoice
from trainer.config.models import published_models
from trainer.config.sections import ModelConfig
from trainer.config.titles import model_title
from trainer.launcher import preflight


def model(choice: ModelChoice, image: str = "") -> dict[str, Any]:
    """Return a model with its facts, whether it is on this machine, and its presets. image: address of its picture."""
    known = published_models().get(choice.path)
    return {
        "path": choice.path,
        "family": choice.family,
        "name": model_title(choice.path, choice.family),
        "is_known": known is not None,
        "parameters": known.num_parameters if known else 0,
        "bytes": known.num_bytes if known else 0,
        "licence": known.licence if known else "",
        "licence_note": known.licence_note if known else "",
        "page": known.page if known else "",
        "is_gated": bool(known and known.is_gated),
        "download": known.download_command if known else "",
        "advice": known.login_advice if known else "",
        "is_built_in": choice.is_built_in,
        "is_here": choice.is_built_in
        or preflight.has_model(ModelConfig(family=choice.family, path=choice.path, base=choice.base)),
        "fits": choice.fits,
        "image": image,
        "blocks": _whole([preset.blocks for preset in choice.presets if preset.blocks]),
        "presets": [_preset(preset) for preset in choice.presets],
    }


def _whole(found: Sequence[tuple[tuple[str, int, int], ...]]) -> tuple[tuple[str, int, int], ...]:
    """The blocks of the model alone, without text encoders that are trained, and not packed as a quantized base."""
    return max(found, key=lambda blocks: (-sum(count for _, count, _ in blocks), blocks[0][2]), default=())


def _preset(preset: PresetChoice) -> dict[str, Any]:
    plan = preset.plan
    return {
        "name": preset.name,
        "title": preset.title,
        "needs": preset.needs,
        "cost": preset.cost,
        "verdict": preset.verdict,
        "is_own": preset.is_own,
        "kinds": kinds(plan) if plan else [],
        "limit": plan.card.memory if plan and plan.card else None,
        "need": plan.need if plan else None,
    }
