"""Models that edit images: recognition, and what is refused and said of their reference images. Imports no torch.

The families list these models (`ModelFamily.edits`, repeated in config/families.json).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.config import families
from trainer.config.families import Edits, reference_fields
from trainer.config.schema import RunConfig
from trainer.config.sections import ModelConfig
from trainer.models.recognition import folder_of, has_marks
from trainer.system.amounts import counted
from trainer.system.errors import Problem


def kind_of(model: ModelConfig, folder: Path | None = None) -> Edits | None:
    """Find which of its family's edit models this is; None if it is none of them, or not on this machine and not named
    by the config.

    Args:
        model: The section `model` of the config.
        folder: Its diffusers folder. None looks for the one that the config names.
    """
    known = families.of(model.family)
    folder = folder or folder_of(model)
    for kind in known.edits if known else ():
        is_named = kind.architecture == model.options.architecture or kind.model == model.path
        if has_marks(kind.marks, folder) if folder else is_named:
            return kind
    return None


def refused(cfg: RunConfig, folder: Path | None = None) -> Iterator[Problem]:
    """Yield reference images for a model that reads none or fewer. Arguments as for `kind_of`."""
    known, model = families.of(cfg.model.family), cfg.model
    if known is None or not known.edits or not (folder or folder_of(model) or model.path == "tiny"):
        return
    kind = kind_of(model, folder)
    for field, value in reference_fields(cfg):
        if value and kind is None:
            names = " or ".join(one.model for one in known.edits)
            yield Problem(
                field, f"{model.path} reads no reference images; set model.path to {names}, or remove the field"
            )
    columns = len(cfg.data.reference_columns)
    if kind and columns > kind.references:
        most = counted(kind.references, "reference image")
        yield Problem("data.reference_columns", f"{columns} columns, but {kind.model} reads {most}; name fewer")
    if kind and kind.sees and cfg.data.has_references:
        flips = {"data.flip": cfg.data.flip}
        flips |= {f"data.folders.{number}.flip": bool(one.flip) for number, one in enumerate(cfg.data.folders)}
        for field in (field for field, is_set in flips.items() if is_set):
            yield Problem(
                field, f"the text encoder of {kind.model} would see references that are not mirrored; set false"
            )


def warnings(cfg: RunConfig, folder: Path | None = None) -> tuple[str, ...]:
    """Say that a model which only edits is trained without reference images. Arguments as for `kind_of`."""
    kind = kind_of(cfg.model, folder)
    if kind is None or kind.draws or cfg.data.has_references:
        return ()
    return (
        f"model.path {cfg.model.path}: the model edits images, and data.references is empty: it is trained from "
        "captions alone. Name the folder with the images before the edit there, or train a text-to-image model",
    )
