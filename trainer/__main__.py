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
from trainer.config import InputError, RunConfig
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
        print(error, file=sys.stderr)
        if not arguments.export:
            launch.record_mistake(run, int(os.environ.get("RANK", 0)), str(error))
        return 2
    return 0


def cache_folder(cfg: RunConfig, run: RunDir) -> Path:
    """Where encoded data and tiny models are shared by runs: `data.cache`, or `cache` beside the run folders."""
    return Path(cfg.data.cache) if cfg.data.cache else run.path.parent / "cache"


@record
def _train(run: RunDir) -> None:
    from trainer.train import Trainer, speaker
    from trainer.world import connect

    cfg = run.config()
    with connect(cfg.parallel) as world:
        say = speaker(run, world)
        trainer = Trainer(cfg, run, world, cache_folder(cfg, run), say)
        try:
            end = trainer.train()
            weights = trainer.trained_weights() if end == "finished" else {}
        finally:
            trainer.close()
    if world.rank == 0:
        # The other ranks have gone: an export takes minutes for a large model, and nobody need wait for it.
        if end == "finished" and cfg.export_what != "none":
            _export(cfg, run, cfg.export_what, weights)
        say(StatusEvent(state=end, step=trainer.step))
        write_report(run)


def _export(cfg: RunConfig, run: RunDir, what: str, weights: Mapping[str, Tensor] | None = None) -> Path:
    from trainer.export import export

    with EventWriter(run.events_file) as events:
        events.write(StatusEvent(state="exporting", step=cfg.train.steps))
        path = export(cfg, run, what, cache_folder(cfg, run), weights)
        relative = str(path.relative_to(run.path))
        events.write(ExportEvent(step=cfg.train.steps, path=relative, what=what, format=cfg.export.format))
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run folder")
    parser.add_argument("--export", choices=("adapter", "merged", "full"), help="export the newest checkpoint instead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
