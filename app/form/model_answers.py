"""The base models as JSON, for the page's script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from app.form.form_answers import kinds
from app.form.model_choices import ModelChoice, PresetChoice
from trainer.config.models import PublishedModel, published_models
from trainer.config.sections import ModelConfig
from trainer.config.titles import model_title
from trainer.launcher import preflight
from trainer.system.amounts import rounded_size

ART = (160, 70)
"""Width and height of the drawing of a model."""
HUES = ("weights", "activations", "gathered", "optimizer")
MOODS = {"fits": "ok", "tight": "warn", "too large": "warn", "too few GPUs": "warn"}
"""{verdict on a preset: mood of its mark}"""


def models(choices: Sequence[ModelChoice], image: str) -> list[dict[str, Any]]:
    """Return the models. image: address of a picture for those that come with the program."""
    largest = max((size for choice in choices for _, _, size in blocks(choice)), default=1.0)
    return [model(choice, largest, image if choice.is_built_in else "") for choice in choices]


def model(choice: ModelChoice, largest: float, image: str = "") -> dict[str, Any]:
    """Return a model with its facts, whether it is on this machine, and its presets.

    Args:
        choice: The model.
        largest: Weights of the largest block of all models that are shown.
        image: Address of its picture; empty for a drawing of its blocks.
    """
    known = published_models().get(choice.path)
    is_here = choice.is_built_in or preflight.has_model(
        ModelConfig(family=choice.family, path=choice.path, base=choice.base)
    )
    return {
        "path": choice.path,
        "family": choice.family,
        "name": model_title(choice.path, choice.family),
        "is_known": known is not None,
        "size": _size(known) if known else "comes along, untrained" if choice.is_built_in else choice.path,
        "place": _place(choice, known, is_here),
        "badge": _badge(choice, known, is_here),
        "licence": known.licence if known else "",
        "licence_note": known.licence_note if known else "",
        "page": known.page if known else "",
        "is_gated": bool(known and known.is_gated),
        "download": known.download_command if known else "",
        "advice": known.login_advice if known else "",
        "is_here": is_here,
        "image": image,
        "art": [] if image else list(_art(blocks(choice), largest)),
        "presets": [_preset(preset) for preset in choice.presets],
    }


def _size(known: PublishedModel) -> str:
    """Its parameters and the size of its files."""
    count = known.num_parameters
    words = f"{count / 1e9:.1f}".removesuffix(".0") + " B" if count >= 1e9 else f"{count / 1e6:.0f} M"
    return f"{words} parameters" + (f" · {rounded_size(known.num_bytes)}" if known.num_bytes else "")


def _place(choice: ModelChoice, known: PublishedModel | None, is_here: bool) -> str:
    """Where the weights are."""
    if choice.is_built_in:
        return "comes with ShardStudio" if known else "no download: its weights are random"
    if is_here:
        return "is on this machine"
    if known and known.num_bytes:
        return f"{rounded_size(known.num_bytes)} to download"
    return f"is not on this machine: {choice.path}"


def _badge(choice: ModelChoice, known: PublishedModel | None, is_here: bool) -> tuple[str, str]:
    """Return the mood and the words of the mark on the tile: whether the model can be trained at once."""
    best = choice.presets[0]
    if choice.is_built_in and best.verdict == "fits":
        return "ok", "ready"
    if not choice.fits and best.verdict:
        return "warn", f"needs {best.needs}" if best.verdict == "no GPU" else f"too large: {best.needs}"
    if is_here:
        return "ok", "here"
    return "", "to download" if known and known.num_bytes else "not here"


def blocks(choice: ModelChoice) -> tuple[tuple[str, int, float], ...]:
    """Return (kind, number, weights of one) of the model's blocks in their order; none for one that is not recorded.

    They are those of the model alone, without text encoders that are trained, and not packed as a quantized base.
    """
    found = [preset.blocks for preset in choice.presets if preset.blocks]
    return max(found, key=lambda blocks: (-sum(count for _, count, _ in blocks), blocks[0][2]), default=())


def _art(blocks: Sequence[tuple[str, int, float]], largest: float) -> Iterator[tuple[str, str]]:
    """Yield a drawing of blocks in ART, as the colour and the path of each kind.

    Bars stand in the order of the blocks. Their heights grow with the cube root of their weights, on one scale for all
    models.
    """
    width, height = ART
    bars = [(name, size ** (1 / 3)) for name, count, size in blocks for _ in range(count)]
    step, scale = width / max(len(bars), 1), 0.85 * height / largest ** (1 / 3)
    for number, kind in enumerate(dict.fromkeys(name for name, _ in bars)):
        places = [((at + 0.12) * step, scale * top) for at, (name, top) in enumerate(bars) if name == kind]
        path = "".join(f"M{left:.1f} {height}v-{top:.1f}h{0.76 * step:.2f}V{height}z" for left, top in places)
        yield HUES[number % len(HUES)], path


def _preset(preset: PresetChoice) -> dict[str, Any]:
    plan, verdict = preset.plan, preset.verdict
    line = ": ".join(filter(None, (preset.needs, preset.cost)))
    return {
        "name": preset.name,
        "title": preset.title,
        "line": f"{line[0].upper()}{line[1:]}." if line else "",
        "badge": (MOODS.get(verdict, ""), "no GPU here" if verdict == "no GPU" else verdict or "not estimated"),
        "kinds": kinds(plan) if plan else [],
        "limit": plan.card.memory if plan and plan.card else None,
        "need": plan.need if plan else None,
    }
