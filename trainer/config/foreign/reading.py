"""Text of a stranger's file to values: TOML, YAML or JSON by its content, with limits on size and depth."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from trainer.config import yaml12
from trainer.config.yaml12 import MAX_DEPTH
from trainer.system.errors import InputError

MAX_LENGTH = 2**20
"""Characters of a file: OneTrainer writes all its settings and all folders, some 200,000 characters."""
HEADER = re.compile(r"\s*\[{1,2}[\w.\s\"'-]+\]{1,2}\s*(#|$)")
"""A section of TOML, which may look like a list of JSON."""
ASSIGNMENT = re.compile(r"^\s*(\[[^\]\n]*\]+|[\w.\"'-]+\s*=.*)$", re.MULTILINE)
"""A line of TOML that no YAML has first."""


def parsed(name: str, text: str) -> Any:
    """Return the values of a file. name: for the message. Raises InputError, which shows nothing of the content."""
    if len(text) > MAX_LENGTH:
        raise InputError(f"{name}: longer than {MAX_LENGTH:,} characters, which no trainer's config is")
    text = text.removeprefix("\ufeff")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise InputError(f"{name}: is empty")
    try:
        if lines[0].lstrip()[0] in "[{" and not HEADER.match(lines[0]):
            kind, value = "JSON", json.loads(text)
        elif ASSIGNMENT.match(lines[0]):
            kind, value = "TOML", tomllib.loads(text)
        else:
            kind, value = "YAML", yaml12.parse(text).value
    except yaml12.YamlError as error:
        raise InputError(f"{name}:{error.line}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{name}: not TOML: {error}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{name}:{error.lineno}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise InputError(f"{name}: nested deeper than {MAX_DEPTH} levels; a config is flatter than that") from error
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{name}: holds a value that is no number of a config") from error
    if not isinstance(value, dict | list):
        raise InputError(f"{name}: is not a config; it holds one value of {kind}")
    _require_flat(name, value)
    return value


def _require_flat(name: str, value: Any) -> None:
    """Raise InputError for values that are nested deeper than any config, before anything walks through them."""
    layer = [value]
    for _ in range(MAX_DEPTH):
        layer = [
            inner
            for one in layer
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return
    raise InputError(f"{name}: nested deeper than {MAX_DEPTH} levels; a config is flatter than that")
