"""The fastest settings that fit as JSON, for the page's script: each with what it takes and changes, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.form.fit_preview import Allowed, Question
from app.form.form_answers import field_in_words
from app.form.plan_preview import THIS_MACHINE
from trainer.config.families import size_field, trains_on
from trainer.config.fields import label
from trainer.config.schema import RunConfig
from trainer.config.sections import RankAdapter
from trainer.plan.search.choices import can_lose_bits
from trainer.plan.search.fit import FASTER, Fit, Proposal
from trainer.system.amounts import GIB

ALLOWS: dict[str, Allowed] = {
    "quantize.format": "format",
    "data.resolution": "resolution",
    "data.length": "resolution",
    "adapter.rank": "rank",
}
"""{field: what has to be allowed for its change}"""


def offer(question: Question | None, why_not: str, target: str) -> dict[str, Any] | None:
    """Return the button that starts a search; None without GPUs to fit.

    Args:
        question: What the search would be about.
        why_not: Why it is not possible; "" where it is.
        target: One of `plan_preview.TARGETS`.
    """
    if question is None:
        return None
    many, size = question.count > 1, f"{question.hardware.card.memory / GIB:.0f} GB"
    words = f"Fit to my GPU{'s' if many else ''}"
    if target != THIS_MACHINE:
        words = f"Fit to {question.count} × {size}" if many else f"Fit to {size}"
    return {"words": words, "why_not": why_not, "key": question.key}


def searching(question: Question) -> dict[str, Any]:
    """Return the answer while a search is running."""
    return {"made_for": question.key, "is_running": True}


def changed(key: str) -> dict[str, Any]:
    """Return the answer about a search whose form or GPUs were changed meanwhile. key: `made_for` of the search."""
    return {"made_for": key, "is_running": False, "is_changed": True}


def result(question: Question, found: Fit, steps: int | None) -> dict[str, Any]:
    """Return what was found.

    Args:
        question: What was searched.
        found: The result.
        steps: Steps of the run; None where they are not known.
    """
    cfg, card = question.cfg, question.hardware.card
    machines = f" on each of {cfg.parallel.nodes} machines" if cfg.parallel.nodes > 1 else ""
    needed = found.needed or {}
    return {
        "made_for": question.key,
        "is_running": False,
        "gpus": f"{question.count} × {card.name}{machines}",
        "samples": cfg.train.batch_size,
        "trains_on": trains_on(cfg),
        "steps": steps,
        "host": question.host,
        "proposals": [_proposal(one, steps) for one in found.proposals],
        "reason": _reason(found.proposals[0]) if found.proposals else "",
        "needed": [_value(field, value) for field, value in needed.items()],
        "allow": [ALLOWS[field] for field in needed if field in ALLOWS],
        "may": [[allowed, words] for allowed, words in _may(cfg)],
        "notes": list(found.notes),
    }


def _may(cfg: RunConfig) -> Iterator[tuple[Allowed, str]]:
    """Yield what can be allowed although it changes the result, in words."""
    if can_lose_bits(cfg):
        yield "format", "4 bits"
    yield "resolution", "shorter texts" if size_field(cfg) == "data.length" else "smaller images"
    if isinstance(cfg.adapter, RankAdapter):
        yield "rank", "a lower rank"


def _proposal(one: Proposal, steps: int | None) -> dict[str, Any]:
    plan = one.plan
    assert plan.card is not None and plan.time is not None
    changes = [
        {"field": field, "label": label(field), "old": field_in_words(field, _plain(old)), "new": _value(field, new)[1]}
        for field, (old, new) in one.changes.items()
    ]
    return {
        "seconds": one.seconds,
        "per_second": one.per_second,
        "whole": one.hours(steps) * 3600 if steps else None,
        "need": plan.need,
        "limit": plan.card.memory,
        "host": one.host if any(item.name == "offloaded" for item in plan.host) else 0,
        "changes": changes,
    }


def _reason(fastest: Proposal) -> str:
    """Say what keeps the fastest settings from being faster. The search does not plan all that cannot fit."""
    assert fastest.plan.time is not None
    faster = fastest.faster
    if faster is None:
        return (
            "No planned setting that does not fit would save "
            f"{100 * FASTER:.0f} % of the time or more. "
            f"The longest part of a step is {fastest.plan.time.bound_by}."
        )
    values = ", ".join(" ".join(_value(field, value)) for field, value in faster.changes.items())
    return f"Faster than the first one: {values}. It takes {faster.seconds:.3g} s per step, but {faster.lack}."


def _value(field: str, value: Any) -> tuple[str, str]:
    """Return the label of a field and its value in words."""
    return label(field), field_in_words(field, _plain(value))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
