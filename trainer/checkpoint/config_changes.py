"""Changes of the config when a run continues: every change is logged, and some are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from trainer.config.schema import RunConfig
from trainer.system.errors import Problem

_NEW_ADAPTER = "start a new run, with adapter.start to begin from what this one exported"
FIXED = {
    "adapter.dropout": "",
    "adapter.start": "",
    "adapter": f"the checkpoint holds an adapter of that kind and size; {_NEW_ADAPTER}",
    "model.family": "the checkpoint holds what was trained into another model; start a new run",
    "model.train": "the checkpoint holds what was trained so far, no more and no less; start a new run",
    "model.options": "the model that is trained would be another one; start a new run",
    "optim.type": "the checkpoint holds the state of that optimizer; start a new run",
    "optim.decay_norms": "the checkpoint holds the optimizer's state in other groups; start a new run",
}
"""{field or section: why a checkpoint does not fit another value}; the first match counts, "" means that it fits."""

EFFECTS = {
    "train.batch_size": "the data go on at the next sample, and none is skipped or repeated; "
    "optim.lr and train.steps stay as they are",
}
"""{field: the effect of another value, where the field's help does not say it}"""


@dataclass(frozen=True)
class Change:
    """A field of the config whose value changed. was_there: whether the former config had such a field."""

    field: str
    before: Any
    after: Any
    was_there: bool = True

    def __str__(self) -> str:
        effect = f" ({EFFECTS[self.field]})" if self.field in EFFECTS else ""
        return f"{self.field}: {_shown(self.before)} -> {_shown(self.after)}{effect}"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The fields that differ between two configs, given as `RunConfig.model_dump(mode="json")`.

    A field that the former lacks was new in a later version: it had its default.
    """
    former, now = dict(_leaves(_completed(before))), dict(_leaves(after))
    # A field that one of them still lacks belongs to another kind of adapter.
    return [
        Change(field, former.get(field), now.get(field), any(f"{field}.".startswith(f"{known}.") for known in former))
        for field in dict.fromkeys([*former, *now])
        if former.get(field) != now.get(field)
    ]


def refused(changed: Iterable[Change], step: int) -> Iterator[Problem]:
    """A problem for each change that cannot be made after `step` steps."""
    for change in changed:
        why = next((FIXED[field] for field in FIXED if f"{change.field}.".startswith(f"{field}.")), "")
        if change.field == "objective.dpo_beta" and not (change.before and change.after):
            why = f"the data and their position are of another kind; {_NEW_ADAPTER}"
        if change.field == "optim.ema" and not (change.before and change.after):
            why = "the checkpoint holds an average or it does not; start a new run"
        # A field that the former config lacks belongs to another kind of adapter.
        if why and change.was_there:
            yield Problem(
                change.field,
                f"{_shown(change.before)} in the checkpoint of step {step}, not {_shown(change.after)}: {why}",
            )


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the defaults of the fields that it lacks; as it is where today's schema does not take it."""
    try:
        return RunConfig.model_validate(config).model_dump(mode="json")
    except ValidationError:
        return config


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            # An empty value is written in different ways.
            yield f"{prefix}{key}", None if value in ({}, []) else value


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)
