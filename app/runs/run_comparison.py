"""Several runs next to each other: results, settings that differ in the form's language, and samples in pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.form import draft as form
from app.form.form_answers import field_in_words, in_words
from app.runs.monitor import Follower, RunView
from app.runs.run_table import best_validation
from trainer.config.fields import all_names, label_with_unit
from trainer.config.models import published_models
from trainer.config.schema import RunConfig
from trainer.config.sections import MODEL_WORDS, fill_trigger
from trainer.config.titles import METHODS, model_title
from trainer.launcher import preflight
from trainer.run.events import SampleEvent, State
from trainer.view.chart import Line

MOST_COMPARED = 5
MOST_CHARS = 80
"""Characters shown of the name of a run that is not there."""
EMPTY = in_words(None)
MODELS_OWN = "the model's own"
_NOTHING = {EMPTY, "0", "no"}
"""Values of a field that one adapter has and another lacks, which say no more than that it lacks it."""


@dataclass(frozen=True)
class Result:
    """The outcome of one run.

    Attributes:
        num_steps: Planned steps; 0 while they are not known.
        length: Planned steps in words.
        best: (loss, step) of the lowest validation loss; None where none was measured.
        peak: Bytes of the largest peak memory of a rank; 0 where it was not recorded.
        speed: Images or tokens per second; None where it was not measured.
        unit: "images" or "tokens".
    """

    state: State
    step: int
    num_steps: int
    length: str
    loss: float | None
    best: tuple[float, int] | None
    duration_s: float
    peak: int
    speed: float | None
    unit: str


@dataclass(frozen=True)
class Setting:
    """A field in which the runs differ.

    Attributes:
        label: Its name in words, with its unit.
        values: Its value in each run, in words.
    """

    field: str
    label: str
    values: tuple[str, ...]


def result(follower: Follower) -> Result:
    """Return what came of a run."""
    view = follower.view()
    speed, unit = view.speed
    return Result(
        state=view.state,
        step=view.step,
        num_steps=view.num_steps,
        length=view.length,
        loss=_finite(view.loss),
        best=best_validation(follower),
        duration_s=view.duration_s,
        peak=max((rank.peak for rank in view.ranks), default=0),
        speed=_finite(speed) or None,
        unit=unit,
    )


def overlaid(followers: Sequence[Follower], names: Sequence[str]) -> list[Line]:
    """Return the smoothed loss of each run, labelled with its name."""
    return [
        replace(line, label=name, look="smoothed")
        for follower, name in zip(followers, names, strict=True)
        for line in follower.lines("Loss")
        if line.label == "each step"
    ]


def differing(configs: Sequence[RunConfig]) -> list[Setting]:
    """Return the fields in which the runs differ, except their names."""
    dumped = [config.model_dump(mode="json") for config in configs]
    rows = []
    for field in all_names():
        values = [form.value_at(values, field) for values in dumped]
        shown = [value_in_words(field, value, config) for value, config in zip(values, configs, strict=True)]
        if field != "name" and len(set(shown)) > 1 and not set(shown) <= _NOTHING:
            rows.append(Setting(field, label_with_unit(field), tuple(shown)))
    return rows


def same_prompts(views: Sequence[RunView], configs: Sequence[RunConfig]) -> dict[str, list[SampleEvent | None]]:
    """Return {prompt: its last sample in each run} of the prompts that more than one run has.

    Prompts are paired as they were written, with [trigger] in place of each run's own trigger.
    """
    rows: dict[str, list[SampleEvent | None]] = {}
    for at, (view, config) in enumerate(zip(views, configs, strict=True)):
        for sample in sorted(view.samples, key=lambda sample: sample.step):
            # The prompt of a sample as it was written; the sample's own when the prompts were changed since.
            filled = {
                fill_trigger(prompt, config.data.trigger): prompt for prompt in (*config.sample.prompts, *view.prompts)
            }
            prompt = filled.get(sample.prompt, sample.prompt)
            rows.setdefault(prompt, [None] * len(views))[at] = sample
    return {prompt: samples for prompt, samples in rows.items() if sum(s is not None for s in samples) > 1}


def value_in_words(field: str, value: Any, config: RunConfig) -> str:
    """Return a field's value as the form writes it. Texts of a list are lines."""
    section, _, key = field.partition(".")
    if section == "adapter" and key not in type(config.adapter).model_fields:  # other sections are alike in all runs
        return EMPTY
    if field == "adapter.type":
        return METHODS[value]
    if field == "model.path" and (value in published_models() or value in MODEL_WORDS):
        return model_title(value, config.model.family)
    if value is None:
        return _empty(field, config)
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    return field_in_words(field, value)


def _empty(field: str, config: RunConfig) -> str:
    if field in ("sample.steps", "sample.guidance"):
        complete = preflight.sample_settings(config.model, config.sample)
        return f"{MODELS_OWN}, {in_words(complete.steps if field == 'sample.steps' else complete.guidance)}"
    return MODELS_OWN if field.startswith("model.options.") else EMPTY


def missing(names: Sequence[str]) -> str:
    """Return a sentence about runs that are not there; "" for none of them."""
    if not names:
        return ""
    named = ", ".join(name[:MOST_CHARS] for name in names[:MOST_COMPARED])
    more = f" and {len(names) - MOST_COMPARED} more" if len(names) > MOST_COMPARED else ""
    are = "This run is" if len(names) == 1 else "These runs are"
    return f"{are} not there: {named}{more}. Deleted or moved, or the address has a typing error."


def labels(runs: Mapping[str, str]) -> dict[str, str]:
    """Return {run: short name}. Runs of equal short names keep the rest of their own.

    Args:
        runs: {run: its name without time and random part}.
    """
    titles = list(runs.values())
    return {run: title if titles.count(title) == 1 else run for run, title in runs.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
