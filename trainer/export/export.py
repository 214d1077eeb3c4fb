"""Exports a run as files that other programs load: an adapter, or a whole model.

The end of training and `launch.py --export` call the same function. It reads a checkpoint and the base's files in one
process without ranks, writes under a temporary name, reads the result back with a reader that shares nothing
with the writer, and only then renames it to its final name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from trainer.checkpoint.restore import StoredWeights
from trainer.config.load import stage_config
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.export.adapter import export_adapter
from trainer.export.drafts import Exported, draft
from trainer.export.model import export_model
from trainer.models import families
from trainer.models.base import ModelFamily
from trainer.models.pissa import initial_file, read_factors, starts_from_singular_values
from trainer.run import manifest
from trainer.run.folder import RunDir, weights_of
from trainer.run.stages import Stage, write_handover


def export(
    cfg: RunConfig,
    run: RunDir,
    cache: Path,
    reference: Mapping[str, Tensor] | None = None,
    folder: Path | None = None,
    checkpoint: Path | None = None,
) -> list[Exported]:
    """Write and verify the trained weights of a checkpoint, as the section `export` says.

    Args:
        cfg: The run's config.
        run: The run's folder.
        cache: Folder shared by runs.
        reference: Trained weights of the live model to compare with; None compares with the checkpoint's.
        folder: Folder to write to; None is the run's export folder.
        checkpoint: One of the run's; None is the newest. The files of an older one have its step in their names.

    Returns:
        The files and folders, the main one first.

    Raises:
        InputError: The run has no checkpoint, or the format does not fit the family.
        RuntimeError: The reloaded result differs from the trained weights; no file is left.
    """
    checkpoint = checkpoint or manifest.to_export(run)
    if checkpoint != manifest.named(run.checkpoints)[-1]:
        cfg = cfg.model_copy(update={"name": f"{cfg.name}-step{manifest.steps_in(checkpoint)}"})
    family = families.make(cfg, cache)
    weights, progress = StoredWeights(checkpoint), manifest.progress_of(checkpoint)
    into = folder or run.export
    initial = read_factors(cfg, initial_file(run))
    if cfg.export_what == "adapter":
        return export_adapter(cfg, into, family, weights, reference or weights, progress, initial)
    return [export_model(cfg, into, family, weights, reference or weights, initial)]


def hand_over(stage: Stage, run: RunDir, cache: Path, reference: Mapping[str, Tensor]) -> None:
    """Write the result of a stage in fp32 to where the next stage starts from it.

    The next stage continues the adapter if it has the same one; otherwise, and for preference training, it starts from
    a whole model.
    """
    cfg = stage.config
    following = stage_config(run.config(), stage.number)
    family = families.make(cfg, cache)
    has_file = bool(family.layout(family.components[0]))
    if _continues_adapter(cfg, following, family):
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


def _continues_adapter(cfg: RunConfig, following: RunConfig, family: ModelFamily) -> bool:
    """Whether a stage trains an adapter and nothing else, and the next stage has the same adapter.

    Modules that are trained whole are handed over with it where `export.format: auto` holds them. Preference training
    compares the model with itself without its adapter: that must be the result of this stage.
    """
    if following.objective.compares_pairs:
        return False
    if starts_from_singular_values(cfg):  # the exported adapter has another base and rank
        return False
    if not isinstance(cfg.adapter, NoAdapter) and cfg.adapter.modules_to_save and family.peft_fields is None:
        return False
    ours, theirs = (one.adapter.model_dump(exclude={"start", "dropout"}) for one in (cfg, following))
    is_alone = not isinstance(cfg.adapter, NoAdapter) and "full" not in cfg.model.train.values()
    return is_alone and ours == theirs and cfg.model.train == following.model.train
