"""`--import FILE`: a preset from a config of another trainer, and what was taken, changed and left out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from trainer.config.foreign.imported import further_files, imported
from trainer.config.foreign.reading import MAX_LENGTH
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.installation import program
from trainer.system.terminal import say


def write(source: Path, overrides: Sequence[str], to: Path | None) -> int:
    """Write the preset and print the lists. Returns the exit code.

    Args:
        source: The config. Files that it names are read from the same folder.
        overrides: `key=value` of our fields, which replace those of the config.
        to: The file to write; None for a free name in the current folder.

    Raises:
        InputError: The config cannot be imported, or `to` exists.
    """
    if to is not None and to.exists():
        raise InputError(f"--write: {to} exists; name another file")
    texts = {str(source): _text(source)}
    for name in further_files(*next(iter(texts.items()))):
        further = source.parent / name
        if further.is_file() and not further.is_symlink():
            texts[str(further)] = _text(further)
    found = imported(texts, source.absolute().parent, overrides)
    for title, lines in found.lists().items():
        say(f"{title} ({len(lines)})")
        for line in lines:
            say(f"  {line}")
    for number in itertools.count(1):
        file = to or Path(f"{source.stem}-imported{'' if number == 1 else f'-{number}'}.yaml")
        try:
            files.create(file, found.file())
        except FileExistsError as error:
            if to is not None:
                raise InputError(f"--write: {to} exists; name another file") from error
            continue
        break
    say(f"written: {file}, from a config of {found.tool}; train it with {program()} --headless {file}")
    return 0


def _text(file: Path) -> str:
    if file.is_dir():
        raise InputError(f"{file}: is a folder; name a config file in it")
    try:
        return files.read(file, 4 * MAX_LENGTH).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8; save the file as UTF-8") from error
