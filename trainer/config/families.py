"""Static facts about the model families, available without importing them (and torch).

`make schema` writes families.json from the families' classes; a test compares the two.
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


REFERENCES = ("data.references", "data.reference_columns", "sample.references")


@dataclass(frozen=True)
class Distilled:
    """A published model that was distilled to generate in few steps without guidance.

    Attributes:
        names: Its names on the hub and those of its single files.
        base: Hub id of the model to train instead.
        steps: Denoising steps it was made for.
        marks: {JSON file of its folder: {key: value}} that no base model of the family has; a missing key counts as
            false.
        architecture: Its name in `model.options.architecture`; empty if it has none.
    """

    names: tuple[str, ...]
    base: str
    steps: int
    marks: Mapping[str, Mapping[str, Any]]
    architecture: str = ""


@dataclass(frozen=True)
class FamilyFacts:
    """The class attributes of a `ModelFamily` that have the same names. `components` are the keys of `model.train`."""

    trains_on: Literal["images", "text"]
    components: tuple[str, ...]
    optional_encoders: tuple[str, ...]
    objective_fields: tuple[str, ...]
    options_read: tuple[str, ...]
    data_fields: tuple[str, ...]
    sample_fields: tuple[str, ...]
    reads_references: bool
    size_multiple: int
    in_buckets: bool
    longest_side: int | None
    distilled: tuple[Distilled, ...]
    model_files: Mapping[str, tuple[str, str]]

    def reads(self, field: str) -> bool:
        """Whether models of this family use a field of the config, for example `objective.shift`."""
        section, _, name = field.rpartition(".")
        if section == "objective":
            return name in self.objective_fields
        if field == "train.neftune_alpha":
            return self.trains_on == "text"
        if field == "model.options.without":
            return bool(self.optional_encoders)
        if section == "model.options":
            return name in self.options_read
        if (
            section in ("data", "sample")
            and name not in {"data": self.data_fields, "sample": self.sample_fields}[section]
        ):
            return False
        return self.reads_references or field not in REFERENCES


def trains_on(cfg: RunConfig) -> Literal["images", "text"]:
    """Return whether a run trains on images or text. An unknown family counts as images."""
    known = of(cfg.model.family)
    return known.trains_on if known else "images"


def size_field(cfg: RunConfig) -> str:
    """The field with the size of an example: `data.resolution` in pixels, or `data.length` in tokens for text."""
    return {"images": "data.resolution", "text": "data.length"}[trains_on(cfg)]


def refused(cfg: RunConfig) -> Iterator[Problem]:
    """Yield values in the sections `data` and `sample` that the family does not support or would ignore."""
    known = of(cfg.model.family)
    if known is None:
        return
    yield from _too_large(cfg, known.longest_side)
    if cfg.objective.dpo_beta is not None and "rejected" in known.data_fields and not cfg.data.rejected:
        yield Problem(
            "objective.dpo_beta", "needs data.rejected, the folder with the images that are not preferred; name it"
        )
    if cfg.train.neftune_alpha and not known.reads("train.neftune_alpha"):
        yield Problem(
            "train.neftune_alpha", f"has no effect for {cfg.model.family}, which is not trained on text; set 0"
        )
    yield from _unread_of_folders(cfg, known)
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
                    f"has no effect for {cfg.model.family}, which is trained on {known.trains_on}; leave it out",
                )


READ_WITH = {"micro_batch": "resolutions", "caption_prefix": "caption_lines"}
"""{field of a folder: the field of `data` that is read by the same families}, where they differ in name."""


def _unread_of_folders(cfg: RunConfig, known: FamilyFacts) -> Iterator[Problem]:
    for number, folder in enumerate(cfg.data.folders):
        for name in folder.settings:
            if READ_WITH.get(name, name) not in known.data_fields:
                yield Problem(f"data.folders.{number}.{name}", f"has no effect for {cfg.model.family}; leave it out")


def _too_large(cfg: RunConfig, longest: int | None) -> Iterator[Problem]:
    several = [("data.resolutions", side) for side in cfg.data.resolutions]
    for number, folder in enumerate(cfg.data.folders):
        several += [(f"data.folders.{number}.resolutions", side) for side in folder.resolutions]
    own = [] if cfg.data.resolutions else [("data.resolution", cfg.data.resolution)]
    for field, side in (*own, *several, ("sample.size", max(cfg.sample.size))):
        if longest is not None and side > longest:
            yield Problem(field, f"{side} is more than the {longest} pixels that {cfg.model.family} supports; lower it")


@functools.cache
def of(family: str) -> FamilyFacts | None:
    """Return the facts of a family, or None for an unknown name."""
    values = json.loads(FACTS.read_text(encoding="utf-8")).get(family)
    if values is None:
        return None
    return TypeAdapter(FamilyFacts).validate_python(values)
