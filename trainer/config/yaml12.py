"""Read YAML text into values with line numbers, and write it, with YAML 1.2's rules for unquoted words.

PyYAML follows YAML 1.1, which reads `1e-4` as text, `1:30` as 90 and `on` as true. A config means none of these.

See DECISIONS 6.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import yaml

Loc = tuple[str | int, ...]
"""Keys and list positions that lead to a value: `("data", "folders", 0, "path")`."""

MAX_DEPTH = 20
MAX_LENGTH = 2**17
"""Longest config in characters: room for some 1,500 prompts, or 5,000 folders."""
FAST: type[Any] = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""With libyaml parsing is ten times as fast, which counts because the page reads the configs of all runs."""
INT = re.compile(r"[-+]?[0-9]{1,30}")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class YamlError(ValueError):
    """A text is not valid YAML. `line` is counted from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Parsed:
    """A parsed YAML document.

    Attributes:
        value: Nested dict, list, str, int, float, bool and None; keys are text.
        lines: {location: line} of each key and list item, counted from 1.
        repeated: (location, line) of every key that repeats one in the same mapping; the first one counts.
    """

    value: Any
    lines: dict[Loc, int] = field(default_factory=dict)
    repeated: tuple[tuple[Loc, int], ...] = ()


def parse(text: str) -> Parsed:
    """Read one YAML document. Raises YamlError."""
    node = _compose(text)
    if node is None:
        return Parsed(None)
    lines: dict[Loc, int] = {}
    repeated: list[tuple[Loc, int]] = []
    value = _value(node, (), lines, repeated)
    return Parsed(value, lines, tuple(repeated))


def dump(value: Any) -> str:
    """Return the value as YAML. `parse` reads it back as an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _compose(text: str) -> yaml.Node | None:
    if len(text) > MAX_LENGTH:
        raise YamlError(1, f"longer than {MAX_LENGTH} characters; a config is shorter, remove what is not part of it")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a shell's argument may hold bytes that are not UTF-8
        line = text.count("\n", 0, error.start) + 1
        raise YamlError(line, f"not UTF-8: holds {text[error.start]!a}; write it as UTF-8, or remove it") from error
    if FAST is not yaml.SafeLoader:
        with suppress(yaml.YAMLError):  # the slow loader below has the better error messages
            return _composed(text, FAST)
    try:
        return _composed(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        if "'\\t'" in str(error.problem):
            raise YamlError(line, "tab in the indentation; indent with spaces") from error
        raise YamlError(line, f"not YAML: {', '.join(filter(None, [error.context, error.problem]))}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(line, "control character, which YAML does not allow; remove it") from error


def _composed(text: str, loader: type[Any]) -> yaml.Node | None:
    _check_events(text, loader)
    return yaml.compose(text, Loader=loader)


def _check_events(text: str, loader: type[Any]) -> None:
    """Refuse a file that would expand or recurse without bound, before any value is built from it."""
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise YamlError(line, f"nested deeper than {MAX_DEPTH} levels; a config is flatter than that")
        if isinstance(event, yaml.AliasEvent):
            raise YamlError(line, "aliases (*name) are not supported; write the value again")


def _value(node: yaml.Node, loc: Loc, lines: dict[Loc, int], repeated: list[tuple[Loc, int]]) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style else _plain(node.value)
    if isinstance(node, yaml.SequenceNode):
        lines.update({(*loc, index): item.start_mark.line + 1 for index, item in enumerate(node.value)})
        return [_value(item, (*loc, index), lines, repeated) for index, item in enumerate(node.value)]
    mapping: dict[str, Any] = {}
    for key, item in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise YamlError(line, "a list or mapping as a key; keys must be words")
        at = (*loc, key.value)
        if at in lines:
            repeated.append((at, line))
        else:
            lines[at] = line
            mapping[key.value] = _value(item, at, lines, repeated)
    return mapping


def _plain(word: str) -> str | int | float | bool | None:
    """Return the value of an unquoted word."""
    if word in ("", "~", "null", "Null", "NULL"):
        return None
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if INT.fullmatch(word):
        return int(word)
    return float(re.sub(r"\.(?=[a-z])", "", word.lower())) if FLOAT.fullmatch(word) else word


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_plain` would read as a number."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"({FLOAT.pattern})$"), list("-+.0123456789"))
