"""The table of another trainer: its keys, our field for each, the conversion, and why a key has none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Given = Mapping[str, Any]
"""{dotted key: value} of a config of another trainer."""
Conversion = Callable[[Any, Given], Any]
"""(value, the whole config) -> our value, {our field: value} or `Changed`; raises `LeftOut`."""
Part = Literal["run", "data", "prompts", "adapter"]
"""What a file of another trainer holds."""
Row = tuple[str, dict[str, Any]]
"""A folder of images: where it stands in the config, and {key: value} of its own."""


class LeftOut(ValueError):
    """Raised for a value that ShardStudio has no counterpart of. The text says why."""


@dataclass(frozen=True)
class Changed:
    """Our value where it does not mean the same as theirs. why: one sentence."""

    value: Any
    why: str


@dataclass(frozen=True)
class To:
    """Our field for a key. Without a conversion the value is the same."""

    field: str
    conversion: Conversion | None = None


@dataclass(frozen=True)
class BaseModel:
    """How a trainer names its base model.

    Attributes:
        path: Keys of its hub id, folder or file: the first one that is given counts.
        base: Keys of the folder with its other components, where `path` is a file.
        kinds: Returns words for its architecture, the most specific one first.
        kind_keys: Keys that these are made of; a last `*` stands for anything.
    """

    path: tuple[str, ...]
    base: tuple[str, ...] = ()
    kinds: Callable[[Given], Iterable[object]] = lambda given: ()
    kind_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tool:
    """Another trainer.

    Attributes:
        name: Its name.
        part: Returns what a parsed file of it holds; None for a file of something else.
        given: Returns the keys of a run by their names in `fields`, from {part: parsed file}. Folders are not in it.
        rows: Returns the folders of images, in the order of the config.
        model: How it names the base model.
        fields: {key: our field}. Of two keys for one field, the later one counts.
        row_fields: {key of a folder: field of `DataFolder` or of the config, or "role", "regularization", "off"}.
        left_out: {key: why it has no counterpart}; a last `*` stands for anything.
        defaults: {key: value} that a config without the key means, where ours means another.
        files: {key that names a further file: what that file holds}
    """

    name: str
    part: Callable[[Any], Part | None]
    given: Callable[[Mapping[Part, Any]], dict[str, Any]]
    rows: Callable[[Mapping[Part, Any]], list[Row]]
    model: BaseModel
    fields: Mapping[str, To]
    row_fields: Mapping[str, To]
    left_out: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Part] = field(default_factory=dict)


def reasons(sentences: Mapping[str, str]) -> dict[str, str]:
    """Return {key: why} of {why: keys, separated by spaces}."""
    return {key: why for why, keys in sentences.items() for key in keys.split()}


def plain(word: object) -> str:
    """Return a word in lower case, without what separates its parts: `AdamW_8bit` is `adamw8bit`."""
    return re.sub(r"[^a-z0-9]", "", str(word).lower())


def flat(tree: Mapping[str, Any], above: str = "", depth: int = 0) -> dict[str, Any]:
    """Return {dotted key: value}; lists are values."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{str(key).removeprefix('--')}"
        found |= flat(value, f"{name}.", depth + 1) if isinstance(value, dict) and value else {name: value}
    return found


def is_on(value: object) -> bool:
    """Whether a switch is on, also one that is written as text."""
    return str(value).lower() in ("true", "yes", "on", "1")


def number(value: object) -> float:
    """Return a number, also one that is written as text. Raises LeftOut."""
    try:
        found = math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise LeftOut("its value is not a number")
    return int(found) if found == int(found) else found


def switch(on: Any, off: Any = None) -> Conversion:
    """Return the conversion of a switch; without `off`, one that is off means nothing."""

    def convert(value: Any, given: Given) -> Any:
        if is_on(value):
            return on
        if off is None:
            raise LeftOut("it is off, as here")
        return off

    return convert


def word(table: Mapping[str, Any], otherwise: str) -> Conversion:
    """Return the conversion of a word.

    Args:
        table: {word as `plain` makes it: our value, `Changed`, or a `LeftOut`}.
        otherwise: Why any other word is left out.
    """

    def convert(value: Any, given: Given) -> Any:
        found = table.get(plain(value), LeftOut(otherwise))
        if isinstance(found, LeftOut):
            raise LeftOut(*found.args)
        return found

    return convert


def empty_is_off(value: Any, given: Given) -> Any:
    """Convert a value of which 0, "" or null means none."""
    if value in (None, "", 0, "0"):
        raise LeftOut("it is empty")
    return value
