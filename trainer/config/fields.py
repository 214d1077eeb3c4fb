"""The schema of RunConfig by location: which values each location accepts, and messages for those it does not.

A location is a tuple of keys and list positions, `("data", "folders", 0, "path")`; its name is
`data.folders[0].path`. This module does not deal with files.
"""

from __future__ import annotations

import difflib
import functools
import operator
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from trainer.config.schema import RunConfig
from trainer.config.sections import Section
from trainer.config.yaml12 import Loc
from trainer.system.errors import not_one_of

SCALARS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class Limit:
    """A bound of a number, for example `>= 1`."""

    symbol: str
    bound: Any

    def allows(self, value: float) -> bool:
        return bool(COMPARE[self.symbol](value, self.bound))

    def __str__(self) -> str:
        return f"{self.symbol} {self.bound}"


@dataclass(frozen=True)
class Slot:
    """The values that one location accepts.

    Attributes:
        annotation: The type, without Annotated.
        limits: Bounds of a number.
        unit: Unit of a number.
        path: "file", "folder", "model", "template" or empty, as in `sections.option`.
        help: The field's description.
        title: The field's name in words; empty where its key reads well.
        keywords: Other words for it, by which it is searched for.
    """

    annotation: Any
    limits: tuple[Limit, ...] = ()
    unit: str = ""
    path: str = ""
    help: str = ""
    title: str = ""
    keywords: str = ""

    @functools.cached_property
    def options(self) -> tuple[Any, ...]:
        """The members of a union except None; for any other type, the type itself."""
        members = get_args(self.annotation) if get_origin(self.annotation) in (Union, types.UnionType) else ()
        return tuple(_bare(member) for member in members if member is not type(None)) or (self.annotation,)

    @property
    def is_text(self) -> bool:
        """Whether only text is accepted."""
        return self.options == (str,)

    @property
    def may_be_empty(self) -> bool:
        """Whether null is accepted."""
        return type(None) in get_args(self.annotation)

    @property
    def sections(self) -> tuple[type[Section], ...]:
        """The section at this location: several if `type` selects one of them, none if this is a value."""
        return tuple(kind for kind in self.options if isinstance(kind, type) and issubclass(kind, Section))

    @property
    def tags(self) -> dict[str, type[Section]]:
        """{value of `type`: section} if `type` selects one of several sections, else empty."""
        return {kind.model_fields["type"].default: kind for kind in self.sections if len(self.sections) > 1}

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all sections that are accepted here."""
        return tuple(dict.fromkeys(key for kind in self.sections for key in kind.model_fields))

    @property
    def words(self) -> tuple[str, ...]:
        """The words that a Literal accepts."""
        return tuple(word for kind in self.options if get_origin(kind) is Literal for word in get_args(kind))

    def child(self, key: str | int) -> Slot | None:
        """Return the slot at `key` below this one, or None if there is none."""
        if key == "type" and self.tags:
            return Slot(functools.reduce(operator.or_, (Literal[tag] for tag in self.tags)))
        for kind in self.sections:
            if isinstance(key, str) and key in kind.model_fields:
                return _slot_of(kind.model_fields[key])
        arguments = get_args(self.options[0])
        if get_origin(self.options[0]) is (dict if isinstance(key, str) else tuple):
            item = arguments[1] if isinstance(key, str) else arguments[0]
            return Slot(_bare(item), _limits(_metadata(item)), path=self.path)
        return None

    def reason(self, value: object) -> str:
        """Return why `value` is not accepted here, with the remedy. It must be a value that is not accepted."""
        if value is None:
            return f"is empty; give it {self.needs}, or remove it"
        if _is_number(value) and not all(limit.allows(value) for limit in self.limits):
            return f"is {value}, must be {' and '.join(map(str, self.limits))} {self.unit}".rstrip()
        if isinstance(value, str) and self.words and all(get_origin(kind) is Literal for kind in self.options):
            return not_one_of(value, self.words)
        quotes = "; put it in quotes" if self.is_text and isinstance(value, int | float) else ""
        return f"needs {self.needs}, not {shown(value)}{quotes}"

    @property
    def needs(self) -> str:
        """The accepted values in words: `none, full or a whole number`."""
        if self.tags:
            return f"a section with type: {' or '.join(self.tags)}"
        kinds = [_kind(kind) for kind in self.options if get_origin(kind) is not Literal]
        *first, last = [*self.words, *kinds]
        return f"{', '.join(first)} or {last}" if first else last


ROOT = Slot(RunConfig)


@functools.lru_cache(maxsize=1024)
def slot(loc: Loc) -> Slot | None:
    """Return the slot at `loc` in a config, or None for a field that does not exist.

    Where `type` selects one of several sections, the fields of all of them exist.
    """
    here: Slot | None = ROOT
    for key in loc:
        here = here.child(key) if here else None
    return here


def name(loc: Loc) -> str:
    """Return the location as text: `data.folders[0].path`. A key that a terminal would not show is quoted."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{_visible(key)}" for key in loc).removeprefix(".")


TYPES = {"adapter.type": "Method"}
"""{field that selects a section: its name in words}"""


def label(field: str) -> str:
    """Return a field's name in words: `optim.lr` is "Learning rate"."""
    spec = slot(tuple(field.split(".")))
    title = spec.title if spec else ""
    return title or TYPES.get(field) or field.rpartition(".")[2].replace("_", " ").capitalize()


def unit(field: str) -> str:
    """Return the unit of a field's number: "" where its name in words says it, as "Steps" does."""
    spec = slot(tuple(field.split(".")))
    is_said = spec is None or spec.unit.removesuffix("s") in label(field).lower()
    return "" if spec is None or is_said else spec.unit


def label_with_unit(field: str) -> str:
    """Return a field's name in words with the unit of its number: "Samples every (steps)"."""
    return f"{label(field)} ({unit(field)})" if unit(field) else label(field)


def nearest(loc: Loc) -> Loc | None:
    """Return the field that an unknown `loc` probably means: one of the same name elsewhere, or of similar spelling."""
    above, key = slot(loc[:-1]), str(loc[-1])
    elsewhere = [tuple(field.split(".")) for field in all_names() if field.rpartition(".")[2] == key]
    similar = [(*loc[:-1], near) for near in difflib.get_close_matches(key, above.keys if above else (), 1, cutoff=0.7)]
    return next(iter([*elsewhere, *similar]), None)


@functools.cache
def all_names() -> tuple[str, ...]:
    """Return the name of every field that is not inside a list."""
    return tuple(_names_below(ROOT, ()))


def shown(value: object) -> str:
    """Return a value as a config file shows it, shortened to 80 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _visible(key: str) -> str:
    """A key of a file may hold anything: what a terminal would not show is quoted."""
    return key if key and key == key.strip() and key.isprintable() else repr(key)


def _slot_of(field: FieldInfo) -> Slot:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    return Slot(
        annotation=_bare(field.annotation),
        limits=_limits(field.metadata),
        unit=str(extra.get("unit", "")),
        path=str(extra.get("path", "")),
        help=" ".join((field.description or "").split()),  # line breaks of the source are not part of the text
        title=field.title or "",
        keywords=str(extra.get("keywords", "")),
    )


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _metadata(annotation: Any) -> list[Any]:
    """Limits of an `Annotated` item, which pydantic keeps in its `Field` or plainly."""
    entries = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return [item for entry in entries for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]


def _limits(metadata: Iterable[Any]) -> tuple[Limit, ...]:
    limits = []
    for item in metadata:
        match item:
            case Ge(bound):
                limits.append(Limit(">=", bound))
            case Gt(bound):
                limits.append(Limit(">", bound))
            case Le(bound):
                limits.append(Limit("<=", bound))
            case Lt(bound):
                limits.append(Limit("<", bound))
    return tuple(limits)


def _kind(annotation: Any) -> str:
    """Return the name of a type in words."""
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return f"a section, each value {Slot(_bare(arguments[1])).needs}"
    if get_origin(annotation) is tuple:
        length = "" if Ellipsis in arguments else f" of {len(arguments)}"
        return f"a list{length}, each {Slot(_bare(arguments[0])).needs}"
    return SCALARS.get(annotation, "a section of fields")


def _is_number(value: object) -> TypeGuard[float]:
    """`bool` is an `int` in Python, and no number to a user; a type guard needs a function."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _names_below(here: Slot, loc: Loc) -> Iterator[str]:
    for key in here.keys:
        below = here.child(key)
        if below and below.sections:
            yield from _names_below(below, (*loc, key))
        else:
            yield name((*loc, key))
