"""The end of a run as files that other programs load: an adapter, or a whole model.

The worker's last act and `launch.py --export` call the same function. It reads the newest checkpoint and the base's
files on one process without any rank, writes beside the final name, reads the result back with a reader that shares
nothing with the writer, and only then gives it its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from trainer import checkpoint, families, manifest
from trainer.config import InputError, RunConfig
from trainer.export.adapter import export_adapter
from trainer.export.check import check_export
from trainer.export.drafts import Exported
from trainer.export.model import export_model
from trainer.rundir import RunDir


def export(cfg: RunConfig, run: RunDir, cache: Path, reference: Mapping[str, Tensor] | None = None) -> list[Exported]:
    """Write and verify the trained weights of the newest checkpoint, as the section `export` says.

    reference: the live model's trained weights, where there is one; else those of the checkpoint. Returns the files
    and folders, the main one first. Raises InputError when there is no checkpoint or the format does not fit the
    family; RuntimeError, and leaves no file, when what is read back differs from the trained weights.
    """
    saved = manifest.complete(run.checkpoints)
    if not saved:
        raise InputError(f"{run.path}: has no complete checkpoint to export; resume the run first")
    family = families.make(cfg, cache)
    weights = checkpoint.StoredWeights(saved[-1])
    if cfg.export_what == "adapter":
        return export_adapter(cfg, run.export, family, weights, reference or weights, manifest.steps_in(saved[-1]))
    return [export_model(cfg, run.export, family, weights, reference or weights)]


__all__ = ["Exported", "check_export", "export"]
