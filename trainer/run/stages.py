"""Runs in stages: which stage is current, and what it takes over from the one before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from trainer.config.load import dump_config, load_config_text, stage_config
from trainer.config.schema import RunConfig
from trainer.config.sections import ModelConfig
from trainer.run.folder import RunDir, weights_of
from trainer.run.manifest import complete, newest_step
from trainer.system import files
from trainer.system.errors import InputError

HANDOVER = "handover.json"
_FIELDS: TypeAdapter[dict[str, str | None]] = TypeAdapter(dict[str, str | None])


@dataclass(frozen=True)
class Stage:
    """One stage of a run. A run without stages counts as one stage.

    Attributes:
        number: Number of the stage, from 1.
        count: Number of stages.
        name: Name of the stage; empty for a run without stages.
        config: Config of the stage. It begins with the weights of the stage before.
        before: Optimizer steps of all stages before.
        folder: Folder of the stage.
    """

    number: int
    count: int
    name: str
    config: RunConfig
    before: int
    folder: Path

    @property
    def is_last(self) -> bool:
        return self.number == self.count

    def mark(self, rank: int) -> Path:
        """Return the file which marks that the ranks of a node have finished the stage. `rank` is the node's first."""
        return self.folder / f"ended-{rank}"

    def mark_ended(self, rank: int, steps: int) -> None:
        """Create that file. It holds the optimizer steps of the stage, for the stages after it."""
        files.replace(self.mark(rank), str(steps))


def current(run: RunDir, cfg: RunConfig) -> Stage:
    """Return the current stage of a run, or its last one once all are done. `cfg` is the config of the run.

    Raises InputError where the run's folders are not those of the config's stages.
    """
    if not cfg.stages:
        return Stage(1, 1, "", cfg, 0, run.path)
    folders, at = run.stage_folders, run.current_stage
    if at >= min(len(folders), len(cfg.stages)):
        found = f"has {len(folders)} folders, but config.yaml {len(cfg.stages)} stages"
        raise InputError(f"{run.path}/stages: {found}; restore the folder")
    given = [f"{field}={json.dumps(value)}" for field, value in _taken_over(folders, at).items()]
    config = stage_config(cfg, at, given)
    before = sum(_steps_of(cfg, number, folders[number]) for number in range(at))
    return Stage(at + 1, len(cfg.stages), cfg.stages[at].name, config, before, folders[at])


def remaining(run: RunDir, stage: Stage) -> list[tuple[str, RunConfig]]:
    """Return (name, config) of the stages of which nothing was trained yet. stage: the current one."""
    untrained = [] if complete(run.checkpoints) else [(stage.name, stage.config)]
    cfg = run.config()
    later = range(stage.number, stage.count)
    return untrained + [(cfg.stages[at].name, before_handover(cfg, at, stage.config.model)) for at in later]


def before_handover(cfg: RunConfig, at: int, model: ModelConfig | None = None) -> RunConfig:
    """Return the config of a stage that is handed nothing yet.

    Args:
        cfg: Config of the run.
        at: Index of the stage.
        model: The model that stands for the one it will be handed; None is that of the first stage.
    """
    if at == 0:
        return stage_config(cfg, 0)
    model = model or stage_config(cfg, 0).model
    taken = {"path": model.path, "base": model.base, "options.architecture": model.options.architecture}
    return stage_config(cfg, at, [f"model.{name}={json.dumps(value)}" for name, value in taken.items()])


def _steps_of(cfg: RunConfig, at: int, folder: Path) -> int:
    """Optimizer steps of a stage that has ended: those in its mark, for the config may have changed since.

    Without a mark they are those of the config, or for epochs of its newest checkpoint.
    """
    with suppress(FileNotFoundError, ValueError):
        return int(files.read(folder / "ended-0"))
    if (steps := cfg.stage_steps[at]) is not None:
        return steps
    return newest_step(folder / "checkpoints")


def base_stage(run: RunDir, config: RunConfig) -> str | None:
    """Return the name of the stage whose result is the base model; None for a model from outside of the run.

    Args:
        run: A run.
        config: Config of its current stage.
    """
    stages = run.stage_folders
    weights = {weights_of(folder): folder.name.partition("-")[2] for folder in stages}
    return next((name for path, name in weights.items() if Path(config.model.path).is_relative_to(path)), None)


def changed(cfg: RunConfig, at: int, changes: Sequence[str]) -> RunConfig:
    """Return the config of a run with some fields changed.

    Args:
        cfg: Config of the run.
        at: Index of the stage in which they change; ignored for a run without stages.
        changes: Each `key=value`.

    Raises:
        ConfigError: A value cannot be combined with the other fields.
    """
    return load_config_text(dump_config(cfg), of_stage(cfg, at, changes), Path("config.yaml")).config


def of_stage(cfg: RunConfig, at: int, changes: Sequence[str]) -> tuple[str, ...]:
    """Return `key=value` changes of a stage as those of its run; as they are for a run without stages."""
    above = f"stages.{cfg.stages[at].name}." if cfg.stages else ""
    return tuple(f"{above}{change}" for change in changes)


def write_handover(folder: Path, fields: dict[str, str | None]) -> None:
    """Write the config fields that the next stage takes over. Paths within `folder` are relative to it."""
    files.replace(folder / HANDOVER, json.dumps(fields, indent=1))


def _taken_over(folders: Sequence[Path], at: int) -> dict[str, str | None]:
    """Return the fields that a stage takes from those before it: a stage that went on with an adapter hands over only
    that, and its model is the one that it was given itself."""
    fields: dict[str, str | None] = {}
    for folder in folders[:at]:
        handed = _handed_over(folder)
        if "model.path" in handed:  # a whole model, with every adapter before in it
            fields.pop("adapter.start", None)
        fields |= handed
    return fields


def _handed_over(stage: Path) -> dict[str, str | None]:
    """{field: path} that a finished stage sets in those after it; the file holds paths relative to its folder."""
    folder = weights_of(stage)
    fields = files.read_json(folder / HANDOVER, _FIELDS, "remove the folder of this stage to train it again")
    return {field: value and str(folder / value) for field, value in fields.items()}
