"""What is known of a model family without importing it, and torch with it.

`make schema` writes families.json from the families' own classes; a test compares the two.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from trainer.config.errors import Problem
from trainer.config.schema import RunConfig
from trainer.config.sections import FORMER_DEFAULTS, Section

FACTS = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Distilled:
    """A published model that was distilled to draw in few steps without guidance.

    names: its own at the hub, and those of its single files.  base: hub id of the model to train in its place.  steps:
    it draws in.  marks: {JSON file of its folder: {key: value}} that no base model of the family has; a key that is
    not there counts as false.  architecture: its name in `model.options.architecture`, empty where it has none.
    """

    names: tuple[str, ...]
    base: str
    steps: int
    marks: Mapping[str, Mapping[str, Any]]
    architecture: str = ""


@dataclass(frozen=True)
class FamilyFacts:
    """The class attributes of the same names of a `ModelFamily`; components: names allowed in `model.train`."""

    trains_on: Literal["images", "text"]
    components: tuple[str, ...]
    optional_encoders: tuple[str, ...]
    objective_fields: tuple[str, ...]
    options_read: tuple[str, ...]
    data_fields: tuple[str, ...]
    sample_fields: tuple[str, ...]
    reads_references: bool
    size_multiple: int
    longest_side: int | None
    distilled: tuple[Distilled, ...]

    def reads(self, field: str) -> bool:
        """Whether a field of the config, as `objective.shift`, means something to models of this family."""
        section, _, name = field.rpartition(".")
        if section == "objective":
            return name in self.objective_fields
        if field == "model.options.without":
            return bool(self.optional_encoders)
        if section == "model.options":
            return name in self.options_read
        if (
            section in ("data", "sample")
            and name not in {"data": self.data_fields, "sample": self.sample_fields}[section]
        ):
            return False
        return self.reads_references or field not in ("data.references", "sample.references")


def trains_on(cfg: RunConfig) -> Literal["images", "text"]:
    """What a run feeds to its model; images where the family is none."""
    known = of(cfg.model.family)
    return known.trains_on if known else "images"


def size_field(cfg: RunConfig) -> str:
    """The field that says how large an example is: pixels of an image's side, or tokens of a row."""
    return {"images": "data.resolution", "text": "data.length"}[trains_on(cfg)]


def refused(cfg: RunConfig) -> Iterator[Problem]:
    """What is set in the sections `data` and `sample` and is more than the family can do, or means nothing to it and
    would be ignored."""
    known = of(cfg.model.family)
    if known is None:
        return
    yield from _too_large(cfg, known.longest_side)
    sections: tuple[tuple[str, Section, tuple[str, ...]], ...] = (
        ("data", cfg.data, known.data_fields),
        ("sample", cfg.sample, known.sample_fields),
    )
    for section, given, read in sections:
        for name, value in given:
            field = f"{section}.{name}"
            unset = (type(given).model_fields[name].default, FORMER_DEFAULTS.get(field))
            if name not in read and value not in unset:
                yield Problem(
                    field,
                    f"means nothing to {cfg.model.family}, which is trained on {known.trains_on}; leave it out",
                )


def _too_large(cfg: RunConfig, longest: int | None) -> Iterator[Problem]:
    for field, side in (("data.resolution", cfg.data.resolution), ("sample.size", max(cfg.sample.size))):
        if longest is not None and side > longest:
            yield Problem(field, f"{side} is more than the {longest} pixels {cfg.model.family} can draw; lower it")


@functools.cache
def of(family: str) -> FamilyFacts | None:
    """The facts of a family, None for a name that is none."""
    values = json.loads(FACTS.read_text(encoding="utf-8")).get(family)
    if values is None:
        return None
    return TypeAdapter(FamilyFacts).validate_python(values)
