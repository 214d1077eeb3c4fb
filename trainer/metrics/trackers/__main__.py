"""Send what a tracker has not received of a run yet: `python -m trainer.metrics.trackers RUN_DIR NAME`."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

from trainer.config.sections import TrackersConfig
from trainer.metrics.trackers import require, without_secrets
from trainer.metrics.trackers.follow import Sender
from trainer.run.events import LossyWriter, WarningEvent
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.system.terminal import complain


def main() -> int:
    """Exit code 0: everything was sent; 1: failed; 2: the user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m trainer.metrics.trackers", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run folder")
    parser.add_argument("tracker", choices=tuple(TrackersConfig.packages))
    arguments = parser.parse_args()
    try:
        run = RunDir.open(arguments.run_dir)
        require(TrackersConfig.model_validate({arguments.tracker: True}))
        events = LossyWriter(run.events_file)

        def emit(event: WarningEvent) -> None:
            events.write(event)
            complain(event.message)

        Sender(run, arguments.tracker, emit).send()
    except InputError as error:
        complain(error)
        return 2
    except Exception as error:  # noqa: BLE001 - whatever a tracker raises; its message may hold a key
        complain(without_secrets("".join(traceback.format_exception(error))).rstrip())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
