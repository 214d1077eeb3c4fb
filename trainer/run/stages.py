"""A run in stages: which one is under way, and what the next one begins with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from trainer.config import files, yaml12
from trainer.config.load import dump_config, load_config_text, stage_config
from trainer.config.schema import RunConfig
from trainer.run.folder import RunDir, weights_of

HANDOVER = "handover.json"
_FIELDS: TypeAdapter[dict[str, str | None]] = TypeAdapter(dict[str, str | None])


@dataclass(frozen=True)
class Stage:
    """One stage of a run, or the whole of a run without stages.

    number, count: from 1.  name: empty without stages.  config: of the stage, which begins with the weights of the one
    before.  before: optimizer steps of the stages before.  folder: what it keeps.
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
        """A file that says that the ranks from this one on, those of its machine, have finished the stage."""
        return self.folder / f"ended-{rank}"

    def mark_ended(self, rank: int) -> None:
        self.mark(rank).touch()


def current(run: RunDir, cfg: RunConfig) -> Stage:
    """The stage that is under way, or was the last. cfg: of the run."""
    if not cfg.stages:
        return Stage(1, 1, "", cfg, 0, run.path)
    folders, at = run.stage_folders, run.current_stage
    given = [f"{field}={json.dumps(value)}" for field, value in _handed_over(folders[at - 1]).items()] if at else []
    config = stage_config(cfg, at, given)
    return Stage(at + 1, len(cfg.stages), cfg.stages[at].name, config, sum(cfg.stage_steps[:at]), folders[at])


def changed(cfg: RunConfig, at: int, change: str) -> RunConfig:
    """The config of a run with another value, in the stage `at` where it has stages. change: as `key=value`.

    Raises ConfigError where it does not go with the others.
    """
    if not cfg.stages:
        return load_config_text(dump_config(cfg), (change,), Path("config.yaml")).config
    field, _, value = change.partition("=")
    stage = cfg.stages[at]
    others = stage.model_copy(update={"set": stage.set | {field: yaml12.parse(value).value}})
    with_it = cfg.model_copy(update={"stages": (*cfg.stages[:at], others, *cfg.stages[at + 1 :])})
    stage_config(with_it, at)
    return with_it


def write_handover(folder: Path, fields: dict[str, str | None]) -> None:
    """What the next stage begins with. fields: of the config; paths within `folder` relative to it."""
    files.replace(folder / HANDOVER, json.dumps(fields, indent=1))


def _handed_over(stage: Path) -> dict[str, str | None]:
    folder = weights_of(stage)
    fields = files.read_json(folder / HANDOVER, _FIELDS, "remove the folder of this stage to train it again")
    return {field: value and str(folder / value) for field, value in fields.items()}
