"""Changes the text of a preset so that it holds another config, and keeps its comments."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config import yaml12
from trainer.config.fields import slot
from trainer.config.load import ConfigError, dump_config, load_config_text
from trainer.config.schema import RunConfig
from trainer.config.yaml12 import Loc

EDITOR_LINE = re.compile(r"# yaml-language-server:.*\n")
"""Names a schema next to the file, which is not next to a changed one."""
MOST_EDITS = 100
"""Edits after which a text is given up and the config written without its comments."""


def rewritten(text: str, config: RunConfig, path: Path) -> str:
    """Return the text changed such that a file with it at `path` loads as `config`.

    Values that the text does not write as one field per line, as in `data: {path: .}`, are not changed in place: the
    whole config is written then, with the comments above the text's first line only.

    Args:
        text: A preset's text.
        config: The wanted config.
        path: Where the file will be, which decides its relative paths.
    """
    found, wanted = text, config.model_dump(mode="json")
    for _ in range(MOST_EDITS):
        try:
            now = load_config_text(found, (), path).config
        except ConfigError as error:  # what the text lacks was given elsewhere
            fields = [tuple(problem.field.split(".")) for problem in error.problems]
            edited = _edited(found, [(loc, _at(wanted, loc)) for loc in fields])
        else:
            if now == config:
                return found
            edited = _edited(found, _different(now.model_dump(mode="json"), wanted, ()))
        if edited is None or edited == found:
            break
        found = edited
    return "".join(itertools.takewhile(_is_comment, text.splitlines(keepends=True))) + dump_config(config)


def _is_comment(line: str) -> bool:
    return line.startswith("#")


def _at(values: Any, loc: Loc) -> Any:
    """Return the value at a location; None where there is none."""
    for key in loc:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _edited(text: str, changes: Iterable[tuple[Loc, Any]]) -> str | None:
    """Return the text with other values; None where one cannot be changed in place. changes: (location, value)."""
    for loc, value in changes:
        changed = _with_value(text, loc, value)
        if changed is None:
            return None
        text = changed
    return text


def _different(now: Mapping[str, Any], wanted: Mapping[str, Any], above: Loc) -> Iterator[tuple[Loc, Any]]:
    """Yield (location, wanted value) of each field that differs."""
    for key, value in wanted.items():
        loc = (*above, key)
        here = slot(loc)
        if key in now and now[key] == value:
            continue
        if here and here.sections and isinstance(now.get(key), dict) and isinstance(value, dict):
            yield from _different(now[key], value, loc)
        else:
            yield loc, value


def _with_value(text: str, loc: Loc, value: Any) -> str | None:
    """Return the text with the value of one field; None where its line cannot be found or added."""
    places, lines = yaml12.parse(text).lines, text.splitlines()
    *above, key = loc
    if loc in places:
        at = places[loc] - 1
        found = re.fullmatch(rf"(\s*){re.escape(str(key))}:(?:\s(?P<value>.*?))?(?P<comment>\s+#.*)?", lines[at])
        if found is None:
            return None
        comment = found["comment"] or ""
        lines[at : _end(lines, at)] = _written(found[1], str(key), value, comment)
    elif not above:
        lines += ["", *_written("", str(key), value)]
    elif tuple(above) in places:
        below = [line for place, line in places.items() if place[:-1] == tuple(above)]
        section = places[tuple(above)] - 1
        if not below or min(below) - 1 == section:
            return None
        last = max(below) - 1
        indent = lines[last][: len(lines[last]) - len(lines[last].lstrip())]
        lines[_end(lines, last) : _end(lines, last)] = _written(indent, str(key), value)
    elif len(above) == 1:
        lines += ["", f"{above[0]}:", *_written("  ", str(key), value)]
    else:
        return None
    return "\n".join(lines) + "\n"


def _end(lines: list[str], at: int) -> int:
    """Return the line after the value that begins in line `at`, without blank lines and comments that follow it."""
    indent = len(lines[at]) - len(lines[at].lstrip())
    end = last = at + 1
    while last < len(lines):
        line = lines[last]
        inner = len(line) - len(line.lstrip())
        is_item = inner == indent and line.lstrip().startswith("- ")
        if line.strip() and not line.lstrip().startswith("#"):
            if inner <= indent and not is_item:
                break
            end = last + 1
        last += 1
    return end


def _written(indent: str, key: str, value: Any, comment: str = "") -> list[str]:
    """Write a field: a list or mapping at the top over several lines, anything else in one."""
    if not indent and isinstance(value, dict | list) and value:
        return yaml12.dump({key: value}).splitlines()
    return [f"{indent}{key}: {_in_line(value)}{comment}"]


def _in_line(value: Any) -> str:
    if isinstance(value, str):
        return yaml12.dump([value]).removeprefix("- ").rstrip("\n") if "\n" not in value else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)
