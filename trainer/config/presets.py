"""Presets by name: those that come with the program and those saved beside the runs."""

from __future__ import annotations

import difflib
from pathlib import Path

from trainer.config.errors import InputError
from trainer.config.installation import PRESETS

FIRST_PRESET = "quickstart"
MOST_NEAR = 8
"""Names that are suggested for an unknown one."""


def find_presets(own: Path, shipped: Path = PRESETS) -> dict[str, Path]:
    """{name: file}: the quickstart first, then what was saved in the folder `own`, then the others."""
    files = [*sorted(own.glob("*.yaml")), *sorted(shipped.glob("*.yaml"))]
    named = {file.stem: file for file in reversed(files)}
    return dict(sorted(named.items(), key=lambda item: (item[0] != FIRST_PRESET, item[1].parent != own, item)))


def preset_file(preset: str | Path, own: Path) -> Path:
    """The file that is named, or the one of a preset of that name.

    A file that exists wins, also `NAME.yaml` in the current folder. What looks like a path is returned as it is.

    Args:
        preset: A file, or the name of a preset.
        own: The folder of saved presets.

    Raises:
        InputError: For a word that is neither a file nor the name of a preset.
    """
    file, name = Path(preset), str(preset)
    if file.is_file() or len(file.parts) != 1 or file.suffix in (".yaml", ".yml"):
        return file
    if (local := Path(f"{name}.yaml")).is_file():
        return local
    presets = find_presets(own)
    if name in presets:
        return presets[name]
    near = [known for known in presets if name in known] or difflib.get_close_matches(name, presets, 1)
    raise InputError(f"no preset '{name}'; {_suggestion(near if len(near) <= MOST_NEAR else [], list(presets))}")


def _suggestion(near: list[str], known: list[str]) -> str:
    if not near:
        return f"there are {', '.join(known)}"
    *others, last = [f"'{name}'" for name in near]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
