"""The end of a run as files that other programs load: an adapter, or a whole model.

The worker's last act and `launch.py --export` call the same function. It reads the newest checkpoint and the base's
files on one process without any rank, writes beside the final name, reads the result back with a reader that shares
nothing with the writer, and only then gives it its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from trainer.checkpoint.restore import StoredWeights
from trainer.config.errors import InputError
from trainer.config.load import stage_config
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.export.adapter import export_adapter
from trainer.export.check import check_export
from trainer.export.drafts import Exported, draft
from trainer.export.model import export_model
from trainer.models import families
from trainer.run import manifest
from trainer.run.folder import RunDir, weights_of
from trainer.run.stages import Stage, write_handover


def export(
    cfg: RunConfig,
    run: RunDir,
    cache: Path,
    reference: Mapping[str, Tensor] | None = None,
    folder: Path | None = None,
) -> list[Exported]:
    """Write and verify the trained weights of the newest checkpoint, as the section `export` says.

    reference: the live model's trained weights, where there is one; else those of the checkpoint.  folder: where to;
    None takes the run's. Returns the files and folders, the main one first. Raises InputError when there is no
    checkpoint or the format does not fit the family; RuntimeError, and leaves no file, when what is read back differs
    from the trained weights.
    """
    saved = manifest.complete(run.checkpoints)
    if not saved:
        raise InputError(f"{run.path}: has no complete checkpoint to export; resume the run first")
    family = families.make(cfg, cache)
    weights, progress = StoredWeights(saved[-1]), manifest.progress_of(saved[-1])
    into = folder or run.export
    if cfg.export_what == "adapter":
        return export_adapter(cfg, into, family, weights, reference or weights, progress)
    return [export_model(cfg, into, family, weights, reference or weights, progress.recipe)]


def hand_over(stage: Stage, run: RunDir, cache: Path, reference: Mapping[str, Tensor]) -> None:
    """Write what a stage has learned where the next one begins with it, in fp32.

    An adapter goes on where the next stage has the same one; else the next stage begins with a whole model.
    """
    cfg = stage.config
    following = stage_config(run.config(), stage.number)
    family = families.make(cfg, cache)
    has_file = bool(family.layout(family.components[0]))
    if _goes_on(cfg, following):
        cfg = cfg.exporting("adapter", "auto", "fp32")
    else:
        what = "full" if isinstance(cfg.adapter, NoAdapter) else "merged"
        cfg = cfg.exporting(what, "single_file" if has_file else "auto", "fp32")
    with draft(weights_of(stage.folder)) as folder:
        folder.mkdir()
        name = export(cfg, run, cache, reference, folder)[0].path.name
        fields: dict[str, str | None] = {"adapter.start": name}
        if cfg.export_what != "adapter":
            # A single file is read with the configs of the folder it was made from.
            fields = {"model.path": name, "model.base": str(family.folder) if has_file else None}
            if not isinstance(following.adapter, NoAdapter):
                fields["adapter.start"] = None
            if cfg.model.path == "tiny":  # which only imitates an architecture
                fields["model.options.architecture"] = None
        write_handover(folder, fields)


def _goes_on(cfg: RunConfig, following: RunConfig) -> bool:
    """Whether the adapter of a stage is that of the next one, and all that is trained."""
    ours, theirs = (one.adapter.model_dump(exclude={"start", "dropout"}) for one in (cfg, following))
    is_alone = not isinstance(cfg.adapter, NoAdapter) and "full" not in cfg.model.train.values()
    return is_alone and ours == theirs and cfg.model.train == following.model.train


__all__ = ["Exported", "check_export", "export", "hand_over"]
