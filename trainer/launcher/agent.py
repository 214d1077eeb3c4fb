"""torchrun, started more quickly: `python -m trainer.launcher.agent ARGUMENTS` is `python -m torch.distributed.run
ARGUMENTS`.

The ranks start when torchrun has imported torch, of which it uses only the parts that start and watch processes. It
does without the search for garbage while it imports, and without the operators' rules for tensors without data, the
export of graphs and nested tensors, which take two fifths of the time. Ranks import all of torch.

It ends with its run folder, the last argument: without one, ranks can report nothing, and torchrun waits for ever. When
the ranks have ended, it tells whoever wants to know (`notices`). Meanwhile it writes the load of its machine into the
run folder (DECISIONS 226).
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import psutil

from trainer.system.imports import quick_imports
from trainer.system.installation import notices_file
from trainer.system.terminal import complain

LEFT_OUT = ("torch._meta_registrations", "torch.export", "torch.nested")
LOOKS_EVERY_S = 3
LOAD_EVERY_S, WRITTEN_TOGETHER, DETAILED = 5.0, 12, 120
"""Seconds between two looks at the machine's load. After so many lines, ten minutes, one has the mean of twelve looks:
a day takes 1,440 lines."""
MOST_MISSED = 3
"""Looks after which a missing folder is gone: a network share may lose it for a moment."""


def main() -> None:
    """Run torchrun with the arguments of this process."""
    if os.path.isdir(sys.argv[-1]):  # else another machine has it
        threading.Thread(target=_end_with, args=(sys.argv[-1],), daemon=True).start()
    if os.path.isdir(os.path.join(sys.argv[-1], "ranks")):
        threading.Thread(target=_write_load, args=(sys.argv[-1],), daemon=True).start()
    sys.modules.update({name: ModuleType(name) for name in LEFT_OUT})
    with quick_imports():
        torchrun = importlib.import_module("torch.distributed.run")
    code = 0
    try:
        torchrun.main()
    except Exception as error:  # noqa: BLE001 - why the ranks failed; printed as Python does, for `run.failure`
        traceback.print_exception(error)
        code = 1
    tell_of_the_end(*sys.argv[-2:])
    sys.exit(code)


def tell_of_the_end(module: str, run: str) -> None:
    """Send the notices of a run, where the user has set any. Most have not, and nothing is imported for them.

    Args:
        module: What the ranks executed. Captions and trials, `trainer.captioning` and the like, are not told of.
        run: The run folder.
    """
    file = notices_file()
    if file is not None and file.exists() and not module.startswith("trainer."):
        from trainer.launcher.notices import tell

        tell(run)


def _end_with(run: str) -> None:
    """Kill the ranks and this process when the run folder is gone."""
    missed = 0
    while missed < MOST_MISSED:
        time.sleep(LOOKS_EVERY_S)
        missed = missed + 1 if _is_gone(run) else 0
    for rank in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has found the folder gone, too
            rank.kill()
    os._exit(1)


def _write_load(run: str) -> None:
    """Write what this machine does into the run folder every few seconds, without a step that waits for it.

    Where the disk is full lines are lost, as heartbeats are.
    """
    time.sleep(LOAD_EVERY_S)  # the imports would delay the start of the ranks
    from trainer.run.events import EventWriter
    from trainer.run.folder import RunDir
    from trainer.system.errors import InputError
    from trainer.system.gpus import load

    node = sys.argv[sys.argv.index("--node-rank") + 1] if "--node-rank" in sys.argv else "0"
    try:
        writer = EventWriter(RunDir(Path(run)).machine_file(int(node)))
    except (OSError, InputError) as error:
        complain(f"the load of this machine is not written: {error}")
        return
    looks, num_lines = [], 0
    while True:
        looks.append(load.read())
        if num_lines < DETAILED or len(looks) == WRITTEN_TOGETHER:
            with suppress(OSError):
                writer.write(load.mean(looks))
            looks, num_lines = [], num_lines + 1
        time.sleep(LOAD_EVERY_S)


def _is_gone(run: str) -> bool:
    """Whether there is nothing of this name. A share that does not answer comes back, and ranks can wait for it."""
    try:
        os.stat(run)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


if __name__ == "__main__":
    main()
