"""Static facts about the model families, available without importing them (and torch).

`make schema` writes families.json from the families' classes; a test compares the two. See DECISIONS 11.
"""

from __future__ import annotations

import functools
import json
import keyword
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from trainer.config.schema import RunConfig, nothing_frozen
from trainer.config.sections import PORTABLE, SINGLE_FILES, AdapterSection, Section, family_names
from trainer.system.errors import InputError, Problem, not_one_of

FACTS = Path(__file__).with_suffix(".json")


REFERENCES = (
    "data.references",
    "data.reference_columns",
    "data.pair_suffixes",
    "data.reference_dropout",
    "sample.references",
)


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
class Edits:
    """A published model that edits images, in a family whose other models read text alone.

    Attributes:
        model: Its hub id.
        architecture: Its name in `model.options.architecture`.
        references: Most reference images of an example.
        sees: Whether its text encoder sees them, with the caption.
        marks: {JSON file of its folder: {key: value}} that no other model of the family has; a missing key counts as
            false.
        draws: Whether it is also made to draw from captions alone.
    """

    model: str
    architecture: str
    references: int
    sees: bool
    marks: Mapping[str, Mapping[str, Any]]
    draws: bool = False


@dataclass(frozen=True)
class FamilyFacts:
    """The class attributes of a `ModelFamily` that have the same names.

    Attributes:
        components: The keys of `model.train`.
        architectures: {architecture: those of `conditional_fields` that its model reads}.
        only_peft: Whether only peft reads the family's adapters.
    """

    trains_on: Literal["images", "text"]
    components: tuple[str, ...]
    optional_encoders: tuple[str, ...]
    architectures: Mapping[str, tuple[str, ...]]
    default_architecture: str
    conditional_fields: Mapping[str, tuple[str, str, bool]]
    objective_fields: tuple[str, ...]
    options_read: tuple[str, ...]
    data_fields: tuple[str, ...]
    sample_fields: tuple[str, ...]
    sample_guidance: float
    reads_references: bool
    size_multiple: int
    in_buckets: bool
    longest_side: int | None
    is_concluded: bool
    frames: tuple[int, ...]
    distilled: tuple[Distilled, ...]
    edits: tuple[Edits, ...]
    model_files: Mapping[str, tuple[str, str]]
    only_peft: bool
    kohya_by_path: bool

    def reads(self, field: str) -> bool:
        """Whether models of this family use a field of the config, for example `objective.shift`."""
        section, _, name = field.rpartition(".")
        if section == "objective":
            return name in self.objective_fields
        if field == "train.neftune_alpha":
            return self.trains_on == "text"
        if field == "sample.frames" and len(self.frames) == 1:
            return False
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

    def objective_read(self, conditional: Collection[str]) -> list[str]:
        """Return the fields of `objective` that a model reads. conditional: those of `conditional_fields` it reads."""
        unread = {field for field in self.conditional_fields if field not in conditional}
        return [name for name in self.objective_fields if f"objective.{name}" not in unread]


def trains_on(cfg: RunConfig) -> Literal["images", "text"]:
    """Return whether a run trains on images or text. An unknown family counts as images."""
    known = of(cfg.model.family)
    return known.trains_on if known else "images"


def size_field(cfg: RunConfig) -> str:
    """The field with the size of an example: `data.resolution` in pixels, or `data.length` in tokens for text."""
    return {"images": "data.resolution", "text": "data.length"}[trains_on(cfg)]


def refused(cfg: RunConfig) -> Iterator[Problem]:
    """Yield what a config asks of its family, and the family does not have, does not support or would ignore.

    See DECISIONS 209.
    """
    known = of(cfg.model.family)
    if known is None:
        return
    yield from _unknown_names(cfg, known)
    yield from unread("model.options", cfg.model.options, known.options_read)
    # The architecture of a real model is in its files, which are not read here: all its conditional fields pass.
    conditional = tuple(known.conditional_fields)
    if cfg.model.path == "tiny":
        architecture = cfg.model.options.architecture or known.default_architecture
        conditional = known.architectures.get(architecture, conditional)
    yield from unread("objective", cfg.objective, known.objective_read(conditional))
    yield from wrong_sizes(cfg, known.longest_side, known.size_multiple)
    if "frames" in known.sample_fields and cfg.sample.frames not in known.frames:
        near = min(known.frames, key=lambda frames: abs(frames - cfg.sample.frames))
        yield Problem("sample.frames", f"{cfg.model.family} has no samples of {cfg.sample.frames} frames; use {near}")
    if cfg.objective.compares_pairs and "rejected" in known.data_fields and not cfg.data.rejected:
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
        for name in _set_but_unread(section, given, read):
            yield Problem(
                f"{section}.{name}",
                f"has no effect for {cfg.model.family}, which is trained on {known.trains_on}; leave it out",
            )
    for field, value in reference_fields(cfg):
        if (
            value
            and not known.reads_references
            and field.partition(".")[2] in (*known.data_fields, *known.sample_fields)
        ):
            yield Problem(field, f"models of family {cfg.model.family} read no reference images; remove the field")
    if cfg.model.train and all(cfg.mode(name) == "full" for name in known.components):
        yield from nothing_frozen(cfg)
    yield from unwritable(cfg)


def reference_fields(cfg: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield the fields about reference images with their values."""
    for field in REFERENCES:
        section, _, name = field.partition(".")
        yield field, getattr(getattr(cfg, section), name)


def unread(section: str, given: Section, read: Collection[str]) -> Iterator[Problem]:
    """Yield fields of a section that are set but not among those that are read, since they would be ignored."""
    for name in _set_but_unread(section, given, read):
        reads = ", ".join(f"{section}.{one}" for one in sorted(read)) or "nothing of this section"
        yield Problem(f"{section}.{name}", f"is not used by this kind of model; leave it out. It reads {reads}")


def _set_but_unread(section: str, given: Section, read: Collection[str]) -> Iterator[str]:
    for name, value in given:
        if name not in read and value != type(given).model_fields[name].default:
            yield name


def _unknown_names(cfg: RunConfig, known: FamilyFacts) -> Iterator[Problem]:
    options = cfg.model.options
    named = [("model.train", name, known.components) for name in cfg.model.train]
    if known.optional_encoders:
        named += [("model.options.without", name, known.optional_encoders) for name in options.without]
    if options.architecture is not None:
        named.append(("model.options.architecture", options.architecture, tuple(known.architectures)))
    for field, name, choices in named:
        if name not in choices:
            yield Problem(field, not_one_of(name, choices))


def unwritable(cfg: RunConfig) -> Iterator[Problem]:
    """Yield why `export.format` has no file for what the run exports, as far as that does not depend on its layers."""
    known, format, adapter = of(cfg.model.family), cfg.export.format, cfg.adapter
    if known is None:
        return
    if cfg.export_what in ("merged", "full") and format in SINGLE_FILES and known.trains_on == "text":
        yield Problem("export.format", f"models of {cfg.model.family} have no {format}; use auto")
    if cfg.export_what != "adapter" or not isinstance(adapter, AdapterSection):
        return
    if known.only_peft and format not in ("auto", "peft"):
        yield Problem(
            "export.format", f"{format} is for programs that do not support this model; use auto or peft, which does"
        )
    elif known.only_peft and "peft" not in adapter.formats:
        yield Problem("export.format", f"peft cannot carry a {adapter.type} adapter; use export.what: merged")
    elif not known.only_peft and adapter.modules_to_save and format != "peft":
        yield Problem(
            "export.format",
            f"{format} has no place for whole modules, which adapter.modules_to_save trains; use peft, or "
            "export.what: merged",
        )
    elif format == "kohya" and not known.kohya_by_path and not adapter.is_portable:
        yield Problem(
            "export.format",
            f"kohya cannot carry a {adapter.type} adapter of this kind of model, only {' and '.join(PORTABLE)}; "
            "use auto, comfyui, lycoris, peft",
        )


READ_WITH = {"micro_batch": "resolutions", "caption_prefix": "caption_lines"}
"""{field of a folder: the field of `data` that is read by the same families}, where they differ in name."""


def _unread_of_folders(cfg: RunConfig, known: FamilyFacts) -> Iterator[Problem]:
    for number, folder in enumerate(cfg.data.folders):
        for name in folder.settings:
            if READ_WITH.get(name, name) not in known.data_fields:
                yield Problem(f"data.folders.{number}.{name}", f"has no effect for {cfg.model.family}; leave it out")


def wrong_sizes(cfg: RunConfig, longest: int | None, multiple: int) -> Iterator[Problem]:
    """Yield sizes of images that a model cannot have.

    Args:
        cfg: The config.
        longest: Most pixels of the longest side; None for no limit.
        multiple: Sides are multiples of this many pixels.
    """
    several = [("data.resolutions", side) for side in cfg.data.resolutions]
    for number, folder in enumerate(cfg.data.folders):
        several += [(f"data.folders.{number}.resolutions", side) for side in folder.resolutions]
    own = [] if cfg.data.resolutions else [("data.resolution", cfg.data.resolution)]
    for field, side in (*own, *several, ("sample.size", max(cfg.sample.size))):
        if longest is not None and side > longest:
            yield Problem(field, f"{side} is more than the {longest} pixels that {cfg.model.family} supports; lower it")
        elif side < multiple:
            yield Problem(field, f"{side} is below the {multiple} pixels this model works in; raise it")
    if any(side % multiple for side in cfg.sample.size):
        given, near = (
            " x ".join(map(str, size))
            for size in (cfg.sample.size, [max(1, round(side / multiple)) * multiple for side in cfg.sample.size])
        )
        yield Problem("sample.size", f"{given} is not in multiples of {multiple} pixels; use {near}")


def check_new_name(name: str) -> None:
    """Raise InputError unless a new family may have this name, which is that of its module."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or keyword.iskeyword(name):
        raise InputError(f"--write-family {name}: not a name of small letters, digits and _, such as my_model")
    if name in family_names():
        raise InputError(f"--write-family {name}: there is a family of this name; choose another")


@functools.cache
def of(family: str) -> FamilyFacts | None:
    """Return the facts of a family, or None for an unknown name."""
    values = json.loads(FACTS.read_text(encoding="utf-8")).get(family)
    if values is None:
        return None
    return TypeAdapter(FamilyFacts).validate_python(values)
