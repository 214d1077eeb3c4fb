"""Presets by name: the built-in ones and those the user saved next to the runs."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from trainer.system.errors import InputError
from trainer.system.installation import PRESETS

FIRST_PRESET = "quickstart"
MOST_NEAR = 3
"""Largest number of names that are suggested for an unknown one; more that hold it are listed."""


def find_presets(own: Path, shipped: Path = PRESETS) -> dict[str, Path]:
    """Return {name: file}: the quickstart first, then the presets saved in the folder `own`, then the others."""
    files = [*sorted(own.glob("*.yaml")), *sorted(shipped.glob("*.yaml"))]
    named = {file.stem: file for file in reversed(files)}
    return dict(sorted(named.items(), key=lambda item: (item[0] != FIRST_PRESET, item[1].parent != own, item)))


def preset_file(preset: str | Path, own: Path) -> Path:
    """Return the file of a preset, given as a file or by name.

    An existing file wins; then come presets, then `NAME.yaml` in the current folder. Anything that looks like a path,
    or exists without being a file, is returned unchanged: reading it says what is wrong.

    Args:
        preset: A file, or the name of a preset.
        own: The folder of saved presets.

    Raises:
        InputError: It is neither a file nor the name of a preset.
    """
    file, name = Path(preset), str(preset)
    # What has folders or a suffix is meant as a path: a missing one must not become a preset of that name.
    if file.is_file() or len(file.parts) != 1 or file.suffix in (".yaml", ".yml"):
        return file
    presets = find_presets(own)
    if name in presets:
        return presets[name]
    if (local := Path(f"{name}.yaml")).is_file():
        return local
    if os.path.lexists(file):
        return file
    near = [known for known in presets if name in known] or difflib.get_close_matches(name, presets, 1)
    if not 0 < len(near) <= MOST_NEAR:
        raise InputError(f"no preset '{name}'; there are {', '.join(near or presets)}")
    *others, last = [f"'{known}'" for known in near]
    raise InputError(f"no preset '{name}'; did you mean {', '.join(others)}{' or ' if others else ''}{last}?")
