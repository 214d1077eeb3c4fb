"""Weights & Biases, online or offline as the user set it up (WANDB_MODE, `wandb login`). Its files lie in the run
folder."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import wandb

from trainer.config.schema import RunConfig
from trainer.metrics.trackers import short, shown_config
from trainer.metrics.trackers.feed import Figures, Note, Position, SampleImage
from trainer.run.events import WarningEvent
from trainer.run.folder import RunDir


def connect(run: RunDir, cfg: RunConfig, position: Position, emit: Callable[[WarningEvent], None]) -> Wandb:
    """Create or continue the run at wandb. Without a login or network it is written to files for `wandb sync`."""
    position.run = position.run or secrets.token_hex(4)
    position.command = f"wandb sync {run.path}/wandb/*run-*-{position.run}"
    try:
        opened = _open(run, cfg, position, None)
    except wandb.Error as error:
        wandb.teardown()  # else the run that could not be opened still holds the id
        opened = _open(run, cfg, position, "offline")
        reason = short(str(error).partition("\n")[0])
        emit(WarningEvent(message=f"trackers.wandb writes offline: {reason} Send it later with: {position.command}"))
    # Rows have numbers of our own and are drawn over their steps: the memory of a step comes after the step itself.
    opened.define_metric("step", hidden=True)
    opened.define_metric("*", step_metric="step")
    opened.config.update(shown_config(cfg), allow_val_change=True)
    return Wandb(opened, position)


def _open(run: RunDir, cfg: RunConfig, position: Position, mode: Any) -> wandb.Run:
    settings = wandb.Settings(
        console="off",
        disable_git=True,
        save_code=False,
        x_disable_machine_info=True,  # no host's hardware, no command line
        x_save_requirements=False,
    )
    return wandb.init(
        project=cfg.trackers.project,
        id=position.run,
        name=run.path.name,
        dir=str(run.path),
        resume="allow",
        mode=mode,
        settings=settings,
    )


class Wandb:
    """A Tracker."""

    def __init__(self, run: wandb.Run, position: Position) -> None:
        self._run = run
        self._position = position

    def figures(self, item: Figures) -> None:
        self._log({**item.values}, item.step)

    def image(self, item: SampleImage) -> None:
        self._log({f"samples/{item.index}": wandb.Image(item.image(), caption=item.prompt)}, item.step)

    def note(self, item: Note) -> None:
        self._run.write_logs(f"step {item.step}, {item.kind}: {item.text}")

    def flush(self) -> None:
        """wandb sends by itself."""

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        wandb.teardown()  # else its exit handler waits for the server, without a limit

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._run.log({"step": step, **values}, step=self._position.given, commit=True)
