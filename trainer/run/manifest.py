"""What a checkpoint says of itself: its manifest, read without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from trainer.config import files
from trainer.config.errors import InputError

MANIFEST = "manifest.json"
RECIPE = 2
"""Recipe of a new run or stage. One that is resumed keeps the recipe it began with, so that an older checkpoint stays
the model that it was. In recipe 1, a lokr layer of two whole matrices is scaled by alpha / rank, `data.caption_dropout`
also drops captions of regularization images, models that read the original size of an image get the size of its bucket
for enlarged images, and samples are drawn with Euler's method whatever sampler the model's folder names."""
REMEDY = "remove this checkpoint, so that the one before it is taken"
_NAME = re.compile(r"step-\d{6,}")


@dataclass(frozen=True)
class Progress:
    """How far a run is: what the manifest of a checkpoint tells beside the tensors.

    step: optimizer steps.  samples_seen: images, in all parts of the run.  skipped: steps that were passed over because
    a number was not finite.  validation_loss: of these weights; NaN if not measured.
    config: the run's config when it was saved.  data: digest of the data.  place: where they go on, as
    `data.text.Place` has it, where the number of steps does not tell.  recipe: see `RECIPE`; 1 where a checkpoint has
    none.  batch_sizes: (batch size, optimizer steps) of the parts of the run in order, the position in the data; empty
    where a checkpoint has none.
    """

    step: int
    samples_seen: int = 0
    skipped: int = 0
    validation_loss: float = math.nan
    config: Mapping[str, Any] = field(default_factory=dict)
    data: str = ""
    place: Mapping[str, int] = field(default_factory=dict)
    recipe: int = 1
    batch_sizes: tuple[tuple[int, int], ...] = ()


class _Manifest(BaseModel, extra="allow"):
    """What every manifest must hold to be read; the rest is that of `Progress`."""

    step: Annotated[int, Field(strict=True)]
    files: dict[str, int]
    checksums: dict[str, str] = {}
    optimizer: str = ""


_MANIFEST, _PROGRESS = TypeAdapter(_Manifest), TypeAdapter(Progress)


def name_of(step: int) -> str:
    """The name of a complete checkpoint's folder."""
    return f"step-{step:06d}"


def named(folder: Path) -> list[Path]:
    """Everything that has the name of a complete checkpoint, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    # By number: step-1000000 comes before step-999999 in the alphabet.
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints` folder, oldest first. One that was cut short is none."""
    return [path for path in named(folder) if defect(path) is None]


def defect(checkpoint: Path) -> str | None:
    """What its manifest and the sizes of its files tell about a checkpoint that is not complete."""
    try:
        facts = manifest_of(checkpoint)
        if progress_of(checkpoint).step != facts["step"] or name_of(facts["step"]) != checkpoint.name:
            return f"its manifest is of step {facts['step']}"
        for name, size in facts["files"].items():
            found = part(checkpoint, name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, {size} were written"
    except InputError as error:
        return str(error).removeprefix(f"{checkpoint}/")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def part(checkpoint: Path, name: str) -> Path:
    """A file of a checkpoint. Raises InputError for a name that leads out of its folder, or not to a regular file."""
    file = checkpoint / name
    is_name = name == Path(name).name and name not in ("", ".", "..")
    if not (is_name and file.is_file() and file.resolve().parent == checkpoint.resolve()):
        raise InputError(f"{name!r} is not a file in this folder")
    return file


def progress_of(checkpoint: Path) -> Progress:
    """What the manifest of a checkpoint tells. Raises as `manifest_of` does."""
    stored = manifest_of(checkpoint)
    told = {one.name: stored[one.name] for one in fields(Progress) if stored.get(one.name) is not None}
    try:
        return _PROGRESS.validate_python(told)
    except ValidationError as error:
        raise InputError(f"{checkpoint / MANIFEST}: damaged ({files.first_problem(error)}); {REMEDY}") from error


def steps_in(checkpoint: Path) -> int:
    """Optimizer steps that a checkpoint holds."""
    return progress_of(checkpoint).step


def newest_step(folder: Path) -> int:
    """Optimizer steps of the newest complete checkpoint in a run's `checkpoints` folder, 0 without one."""
    found = complete(folder)
    return steps_in(found[-1]) if found else 0


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """The manifest as it was written. Raises OSError where it is missing, and InputError where it is damaged."""
    return files.read_json(checkpoint / MANIFEST, _MANIFEST, REMEDY).model_dump()
