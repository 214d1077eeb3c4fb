"""The supervisor of a run in stages: it starts one torchrun after another, and lives as long as the run.

`launcher.torchrun` starts it in place of torchrun, with the module that every rank executes: `python -m
trainer.launcher.supervisor NODE -m trainer RUN_DIR`. See DECISIONS 112.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from trainer.launcher import agent, torchrun
from trainer.run import process
from trainer.run.events import EventWriter, StageEvent, StatusEvent
from trainer.run.folder import RunDir, weights_of
from trainer.run.preemption import PREEMPTION_SIGNALS
from trainer.run.stages import current

WAIT_S = 1.0


def main() -> int:
    """Start a torchrun for each remaining stage. Returns the exit code of the last one."""
    node, command = int(sys.argv[1]), sys.argv[2:]
    run = RunDir(Path(command[-1]))
    supervisor = _Supervisor()
    run.make_folders(run.config())  # the user may have deleted a stage's folder to train it again
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
            process.clear_stores(run)
        code = supervisor.run(torchrun.torchrun_argv(stage.config.parallel, run, command[1], node))
        if code or stage.is_last or not mark.exists():
            return code
        # Rank 0 writes the weights after the other ranks have exited.
        while not weights_of(stage.folder).exists():
            if not process.alive(run):
                return 1
            time.sleep(WAIT_S)
        if supervisor.stop_requested:
            return 0


class _Supervisor:
    """Forwards stop signals to the current torchrun."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._torchrun: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, *PREEMPTION_SIGNALS):
            signal.signal(number, self._forward)

    def run(self, argv: Sequence[str]) -> int:
        """Start a torchrun and wait until it exits. Returns its exit code."""
        self._torchrun = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        return self._torchrun.wait()

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.stop_requested = True
        if self._torchrun is not None and self._torchrun.poll() is None:
            self._torchrun.send_signal(number)


if __name__ == "__main__":
    exit_code = main()
    agent.tell_of_the_end(*sys.argv[-2:])
    sys.exit(exit_code)
