"""One rank of a run, started by torchrun: `python -m trainer RUN_DIR`. With `--export`, one process that exports."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, NoReturn

from trainer.system.imports import quick_imports

with quick_imports():
    import torch
    from torch import Tensor
    from torch.distributed.elastic.multiprocessing.errors import record

    from trainer.config.schema import RunConfig
    from trainer.distributed.attach import RankRun, attach
    from trainer.metrics.trackers.follow import Trackers
    from trainer.run import process, stages
    from trainer.run.events import Emit, EventWriter, ExportEvent, State, StatusEvent, WarningEvent
    from trainer.run.folder import RunDir, shared_cache
    from trainer.run.manifest import steps_in, to_export
    from trainer.run.preemption import Preemption, catch_preemption
    from trainer.system.errors import InputError
    from trainer.system.process_exit import run_and_exit
    from trainer.system.terminal import complain, say
    from trainer.view.report import write_report

if TYPE_CHECKING:
    from trainer.distributed.world import World


def main() -> NoReturn:
    """Exit code 0: done or stopped; 1: failed (raised, as torch's `record` wants it); 2: the user's mistake."""
    arguments = _parser().parse_args()
    if not arguments.export:
        run_and_exit(partial(_train_with_trackers, RunDir(arguments.run_dir.absolute())))
    run_and_exit(partial(_export_again, arguments))


def _train_with_trackers(run: RunDir) -> int:
    trackers, code = Trackers(), 1
    try:
        code = _work(run, lambda run: _train(run, trackers))
        return code
    finally:
        trackers.end(code)  # last: neither the other ranks nor the record of an error wait for them


def _export_again(arguments: argparse.Namespace) -> int:
    run = RunDir.open(arguments.run_dir)
    try:
        stage = stages.current(run, run.config())
        cfg = stage.config.exporting(arguments.export, arguments.format, arguments.dtype)
        checkpoint = to_export(run, arguments.step or "newest")
        for path in _export(cfg, run, stage.before, checkpoint=checkpoint):
            say(path)
    except InputError as error:
        say(error)  # stderr is full of what libraries log while they load
        return 2
    return 0


def on_every_rank(run: RunDir, work: Callable[[RunDir], None]) -> NoReturn:
    """Do the work of this rank and end it. Exit code 2 is the user's mistake, recorded in the run folder."""
    run_and_exit(partial(_work, run, work))


def _work(run: RunDir, work: Callable[[RunDir], None]) -> int:
    try:
        work(run)
    except InputError as error:
        process.record_mistake(run, int(os.environ.get("RANK", 0)), str(error))
        return 2
    return 0


@record
def _train(run: RunDir, trackers: Trackers) -> None:
    with quick_imports():
        from trainer.distributed.watchdog import Watchdog
        from trainer.distributed.world import connect, connect_gpus, find_rendezvous
        from trainer.metrics.debug_log import debug_log
        from trainer.train.log import emitter

    rendezvous = find_rendezvous(run)
    attached = attach(run.path, rendezvous)
    run, cfg = attached.run, attached.config
    # Signals are only noted once the ranks have met: before, a rank that waits for a dead one must simply end.
    with (
        connect(cfg.parallel, rendezvous, attached.is_remote) as world,
        catch_preemption() as preemption,
        debug_log(cfg.trackers, run, world.rank),
    ):
        emit = emitter(run, world, attached.stage.before)
        if world.rank == 0:
            trackers.start(cfg.trackers, run, emit)
        answer = partial(_start_again_with, run, emit)
        with Watchdog(world, run, cfg.parallel.timeout, preemption, answer) as watchdog:
            connect_gpus(world)
            end = _train_on(attached, world, emit, preemption, watchdog.request)
    stage = attached.stage
    if end.state == "finished" and not stage.is_last and world.local_rank == 0:
        stage.mark_ended(world.rank, end.step)
    if world.rank:
        return
    # The other ranks have left: the export of a large model takes minutes, and nobody needs to wait for it.
    if end.state == "finished" and not stage.is_last:
        emit(StatusEvent(state="exporting", step=end.step, message="weights for the next stage"))
        # The next stage begins once these weights exist.
        from trainer.export.export import hand_over

        torch.set_num_threads(os.cpu_count() or 1)
        hand_over(stage, run, shared_cache(stage.config, run.path.parent), end.weights)
        return
    if end.state == "finished" and cfg.export_what != "none":
        emit(StatusEvent(state="exporting", step=end.step))
        _export(cfg, run, attached.stage.before, end.weights)
    emit(StatusEvent(state=end.state, step=end.step))
    write_report(run)


@dataclass(frozen=True)
class _End:
    """How training ended.

    Attributes:
        weights: Those of the live model on rank 0, to verify the export with; empty where they are many.
    """

    state: State
    step: int
    weights: Mapping[str, Tensor]


def _start_again_with(run: RunDir, emit: Emit, request: str) -> None:
    """Change the config, on rank 0 for a rank that ran out of memory: the ranks that torchrun starts next read it.
    request: lines `key=value`."""
    changes = request.splitlines()
    try:
        run.replace_config(stages.changed(run.config(), run.current_stage, changes))
        emit(WarningEvent(message=f"memory ran out; the ranks are started again with {', '.join(changes)}"))
    except (InputError, OSError) as error:
        emit(WarningEvent(message=f"memory ran out, and {', '.join(changes)} could not be set: {error}"))


def _train_on(
    attached: RankRun, world: World, emit: Emit, preemption: Preemption, request: Callable[[str], None]
) -> _End:
    with quick_imports():
        from trainer.data.encode import StopRequested
        from trainer.distributed.context import RankContext
        from trainer.metrics.out_of_memory import OutOfMemoryError
        from trainer.models import families
        from trainer.run.manifest import newest_step
        from trainer.train.early_checks import check_rows
        from trainer.train.loop import Trainer
        from trainer.train.setup import stop_requested

        cfg, run = attached.config, attached.run
        families.get(cfg.model.family)
    try:
        untrained = stages.remaining(run, attached.stage) if world.rank == 0 else []
        is_stopping = partial(stop_requested, run, world, preemption, os.getppid())
        check_rows(untrained, RankContext(cfg, world, attached.cache, emit, is_stopping))
        trainer = Trainer(cfg, run, world, attached.cache, emit, preemption, attached.stage.before)
    except StopRequested:
        return _End("stopped", newest_step(run.checkpoints), {})
    try:
        state = trainer.train()
        # A model that is trained in full may not fit on one host: its export is verified with the checkpoint.
        small = state == "finished" and "full" not in map(cfg.mode, trainer.model)
        return _End(state, trainer.step, trainer.trained_weights() if small else {})
    except OutOfMemoryError as error:
        if cfg.train.out_of_memory == "retry" and world.restarts_left:
            complain(error)
            clear_frames(error.__cause__.__traceback__ if error.__cause__ else None)  # the tensors that filled memory
            if changes := trainer.log.less_memory(trainer.cfg, attached.cache, str(error)):
                request("\n".join(changes))
        raise
    finally:
        trainer.close()


def _export(
    cfg: RunConfig,
    run: RunDir,
    before: int,
    weights: Mapping[str, Tensor] | None = None,
    checkpoint: Path | None = None,
) -> list[Path]:
    """Export a checkpoint, or the newest. Returns the paths, the main one last: scripts read the last line printed."""
    from trainer.export.export import export

    # The launcher gives each process one thread, as ranks share the cores. By now the other ranks have left.
    torch.set_num_threads(os.cpu_count() or 1)
    checkpoint = checkpoint or to_export(run)
    exported = export(cfg, run, shared_cache(cfg, run.path.parent), weights, checkpoint=checkpoint)[::-1]
    step = before + steps_in(checkpoint)
    with EventWriter(run.events_file) as events:
        for file in exported:
            path = str(file.path.relative_to(run.path))
            events.write(
                ExportEvent(
                    step=step,
                    path=path,
                    what=cfg.export_what,
                    format=cfg.export.format,
                    difference=file.difference,
                    dtype=cfg.export.dtype,
                )
            )
    return [file.path for file in exported]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run folder")
    parser.add_argument("--export", choices=("adapter", "merged", "full"), help="export a checkpoint instead")
    parser.add_argument("--step", type=int, help="step of the checkpoint; the newest without it")
    parser.add_argument("--format", help="layout of the export")
    parser.add_argument("--dtype", help="number type of the export")
    return parser
