"""A run in stages: which one is under way, and the process that starts one torchrun after the other.

`launch` starts this module in place of torchrun, with what every rank executes: `python -m trainer.stages NODE -m
trainer RUN_DIR`. It lives as long as the run does.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pydantic import TypeAdapter

from trainer import launch
from trainer.config import files, yaml12
from trainer.config.load import dump_config, load_config_text, stage_config
from trainer.config.schema import RunConfig
from trainer.events import EventWriter, StageEvent, StatusEvent
from trainer.rundir import RunDir, weights_of
from trainer.signals import LEAVE

HANDOVER = "handover.json"
_FIELDS: TypeAdapter[dict[str, str | None]] = TypeAdapter(dict[str, str | None])
WAIT_S = 1.0


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


def main() -> int:
    """Start a torchrun for each stage that is left. Returns the exit code of the last one."""
    node, command = int(sys.argv[1]), sys.argv[2:]
    run = RunDir(Path(command[-1]))
    supervisor = _Supervisor()
    run.make_folders(run.config())  # one that was deleted, so that its stage is trained again
    while True:
        cfg = run.config()
        stage = current(run, cfg)
        mark = stage.mark(node * cfg.parallel.devices)
        mark.unlink(missing_ok=True)
        if node == 0:
            with EventWriter(run.events_file) as events:
                events.write(StageEvent(step=stage.before, name=stage.name, number=stage.number, count=stage.count))
                message = f"stage {stage.number} of {stage.count}, {stage.name}"
                events.write(StatusEvent(state="starting", step=stage.before, message=message))
        if cfg.parallel.nodes == 1:
            launch.clear_stores(run)
        code = supervisor.run(launch.torchrun_argv(stage.config.parallel, run, command[1], node))
        if code or stage.is_last or not mark.exists():
            return code
        # Rank 0 writes the weights after the others have gone.
        while not weights_of(stage.folder).exists():
            if not launch.alive(run):
                return 1
            time.sleep(WAIT_S)
        if supervisor.is_asked:
            return 0


class _Supervisor:
    """Hands the signals that ask a run to leave on to the torchrun that is there."""

    def __init__(self) -> None:
        self.is_asked = False
        self._torchrun: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, *LEAVE):
            signal.signal(number, self._hand_on)

    def run(self, argv: Sequence[str]) -> int:
        """Start a torchrun and wait for its end."""
        self._torchrun = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        return self._torchrun.wait()

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self.is_asked = True
        if self._torchrun is not None and self._torchrun.poll() is None:
            self._torchrun.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
