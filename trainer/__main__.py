"""What torchrun starts on every rank: `python -m trainer RUN_DIR`. Also one process without ranks that exports."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from trainer import launch
from trainer.config import InputError, RunConfig, TrackersConfig
from trainer.events import EventWriter, ExportEvent, StatusEvent
from trainer.report import write_report
from trainer.rundir import RunDir


def main() -> int:
    """Exit code 0 done or stopped, 1 failed (by torch's record), 2 the user's mistake."""
    arguments = _parser().parse_args()
    run = RunDir.open(arguments.run_dir)
    try:
        if arguments.export:
            print(_export(run.config(), run, arguments.export))
        else:
            _train(run)
    except InputError as error:
        if arguments.export:
            print(error)  # stderr is full of what libraries log while they load
        else:
            launch.record_mistake(run, int(os.environ.get("RANK", 0)), str(error))
        return 2
    return 0


def cache_folder(cfg: RunConfig, run: RunDir) -> Path:
    """Where encoded data and tiny models are shared by runs: `data.cache`, or `cache` beside the run folders."""
    return Path(cfg.data.cache) if cfg.data.cache else run.path.parent / "cache"


@record
def _train(run: RunDir) -> None:
    from trainer.trackers import following
    from trainer.train import Trainer, speaker
    from trainer.world import connect

    cfg = run.config()
    with connect(cfg.parallel) as world:
        say = speaker(run, world)
        trackers = cfg.trackers if world.rank == 0 else TrackersConfig()
        with following(trackers, run, say):
            trainer = Trainer(cfg, run, world, cache_folder(cfg, run), say)
            try:
                end = trainer.train()
                weights = trainer.trained_weights() if end == "finished" else {}
            finally:
                trainer.close()
    if world.rank == 0:
        # The other ranks have gone: an export takes minutes for a large model, and nobody need wait for it.
        if end == "finished" and cfg.export_what != "none":
            say(StatusEvent(state="exporting", step=trainer.step))
            _export(cfg, run, cfg.export_what, weights)
        say(StatusEvent(state=end, step=trainer.step))
        write_report(run)


def _export(cfg: RunConfig, run: RunDir, what: str, weights: Mapping[str, Tensor] | None = None) -> Path:
    from trainer.checkpoint import newest_step
    from trainer.export import export

    path = export(cfg, run, what, cache_folder(cfg, run), weights)
    relative = str(path.relative_to(run.path))
    with EventWriter(run.events_file) as events:
        event = ExportEvent(step=newest_step(run.checkpoints), path=relative, what=what, format=cfg.export.format)
        events.write(event)
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run folder")
    parser.add_argument("--export", choices=("adapter", "merged", "full"), help="export the newest checkpoint instead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
