"""What a checkpoint says of itself: its manifest, read without torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
RECIPE = 2
"""Recipe of a new run or stage. One that is resumed keeps the recipe it began with, so that an older checkpoint stays
the model that it was. In recipe 1, a lokr layer of two whole matrices is scaled by alpha / rank, `data.caption_dropout`
also drops captions of regularization images, models that read the original size of an image get the size of its bucket
for enlarged images, and samples are drawn with Euler's method whatever sampler the model's folder names."""
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
        if name_of(facts["step"]) != checkpoint.name:
            return f"its manifest is of step {facts['step']}"
        for name, size in facts["files"].items():
            found = (checkpoint / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, {size} were written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def progress_of(checkpoint: Path) -> Progress:
    """What the manifest of a checkpoint tells."""
    stored = manifest_of(checkpoint)
    stored["batch_sizes"] = tuple((size, steps) for size, steps in stored.get("batch_sizes", ()))
    return Progress(**{one.name: stored[one.name] for one in fields(Progress) if stored.get(one.name) is not None})


def steps_in(checkpoint: Path) -> int:
    """Optimizer steps that a checkpoint holds."""
    return progress_of(checkpoint).step


def newest_step(folder: Path) -> int:
    """Optimizer steps of the newest complete checkpoint in a run's `checkpoints` folder, 0 without one."""
    found = complete(folder)
    return steps_in(found[-1]) if found else 0


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """The manifest as it was written. Raises OSError or ValueError where it is missing or damaged."""
    facts: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    return facts
