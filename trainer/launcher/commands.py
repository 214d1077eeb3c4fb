"""Train from the command line: check everything, start the run, show how it goes, say how it ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from trainer.config.errors import InputError
from trainer.config.load import ConfigFile, load_config, load_config_text
from trainer.config.schema import RunConfig
from trainer.config.sections import ParallelConfig, family_names
from trainer.config.terminal import complain, say
from trainer.launcher import network, preflight, schedulers, torchrun
from trainer.launcher.console import Face, Told, choose_face
from trainer.launcher.schedulers import Scheduler
from trainer.launcher.torchrun import RunHandle
from trainer.run import failure, process
from trainer.run.events import (
    ErrorEvent,
    EventReader,
    ExportEvent,
    RankReader,
    State,
    StepEvent,
)
from trainer.run.folder import RunDir
from trainer.run.preemption import PREEMPTION_SIGNALS

if TYPE_CHECKING:
    pass

EXIT_CODES: dict[State, int] = {"finished": 0, "failed": 1, "stopped": 130}
POLL_S = 0.2


def train(preset: Path, overrides: Sequence[str], runs: Path, at: Path | None) -> int:
    """Train a preset in a new run folder below `runs`, or in `at`. Returns 0 done, 1 or 2 failed, or 130 stopped.

    Raises InputError before anything is started or written when the config, its files or its images are wrong, and
    on a node that a scheduler gave another number than 0.
    """
    loaded = load_config(preset, overrides)
    node_rank = network.dealt_node_rank() or 0
    if loaded.config.parallel.nodes > 1 and node_rank:
        raise InputError(
            f"this is node {node_rank}, and the run folder is made on node 0: start --headless there alone, "
            f"and here --join RUN_DIR; or let --slurm write the job"
        )
    run = preflight.new_run(loaded, runs, at)
    return _run(loaded, run)


def resume(path: Path, overrides: Sequence[str], node_rank: int | None = None) -> int:
    """Continue a run from its newest checkpoint, with some fields changed. Returns what `train` returns.

    node_rank: None takes the number that a scheduler gave this node, 0 without one. So a scheduler may give the same
    command to every node: those above 0 join. Raises InputError as `train` does, and when the run is running.
    """
    run = RunDir.open(path)
    number = (network.dealt_node_rank() or 0) if node_rank is None else node_rank
    if number:
        cfg = load_config(run.config_file, overrides).config
        if cfg.parallel.nodes > 1 or node_rank:
            return _join(cfg.parallel, run, number)
    return _run(preflight.continued_run(run, overrides), run)


def join(path: Path, overrides: Sequence[str], node_rank: int | None = None) -> int:
    """Be one more node of a run that another one starts, until it ends. Returns what `attend` returns.

    overrides: fields of `parallel`, where this machine does not see the run folder.  node_rank: None takes the number
    that a scheduler gave this node.  Raises InputError as `torchrun.join` does.
    """
    run = RunDir(path.absolute())
    parallel = _parallel(run, overrides)
    number = network.dealt_node_rank() if node_rank is None else node_rank
    if number is None:
        raise InputError("--join needs the number of this node: --node-rank 1, on the next one 2, and so on")
    return _join(parallel, run, number)


def _parallel(run: RunDir, overrides: Sequence[str]) -> ParallelConfig:
    """How the ranks are laid out: as the run folder says, or where this machine does not see it, as was typed."""
    if run.config_file.is_file():
        if overrides:
            raise InputError(f"{overrides[0]}: {run.path} has its config; leave it out, or change it on the first node")
        return run.config().parallel
    if not overrides:
        raise InputError(
            f"{run.path}: not a run folder (it has no config.yaml); where this machine does not see that of the first "
            "node, add parallel.nodes=N parallel.devices=N parallel.rendezvous=HOST:PORT as they are there"
        )
    given = [text.removeprefix("parallel.") for text in overrides]
    for text, field in zip(overrides, given, strict=True):
        if field.partition("=")[0].strip() not in ParallelConfig.model_fields:
            raise InputError(f"{text}: is not a field of parallel; --join takes only those, as parallel.nodes=2")
    # A config needs a family and data, which do not matter here.
    preset = f"model: {{family: {family_names()[0]}}}\ndata: {{path: /}}"
    return load_config_text(preset, [f"parallel.{field}" for field in given], Path("command line")).config.parallel


def _join(parallel: ParallelConfig, run: RunDir, node_rank: int) -> int:
    handle = torchrun.join(parallel, run, node_rank)
    say(f"node {node_rank} of {parallel.nodes} of {run.path}, meeting at {parallel.rendezvous}")
    return attend(handle, torchrun.node_log(run, node_rank))


def attend(handle: RunHandle, log: Path) -> int:
    """Wait until a node that joined a run has ended; Ctrl-C stops all nodes, a second one ends this one.

    Returns 0, 1 when it failed here, or 130 when it was ended by that second one.
    """
    run = handle.run
    with _AskedToEnd() as asked:
        while handle.process.poll() is None:
            if asked.count >= 2:
                process.end_family(handle.process.pid)
                complain("ended this node; the others notice that it is gone")
                return EXIT_CODES["stopped"]
            if asked.count == 1 and not asked.is_answered:
                asked.is_answered = True
                if run.config_file.is_file():
                    run.request("stop")
                else:  # the ranks tell each other
                    handle.process.terminate()
                say("stopping all nodes after this step; Ctrl-C again ends this one at once")
            time.sleep(POLL_S)
    if handle.process.returncode:
        complain(f"error: {failure.last_line(log)}\n  log: {log}")
        return 1
    say("done; node 0 tells how the run ended")
    return 0


def write_job(preset: Path, overrides: Sequence[str], runs: Path, at: Path | None, scheduler: Scheduler) -> int:
    """Make the run folder of a preset and write the file that starts it in it. Returns 0.

    The last line on stdout is the command that submits the job. Raises InputError as `train` does.
    """
    loaded = schedulers.load(preset, overrides, scheduler)
    schedulers.check_place(loaded, at or runs, scheduler)
    run = preflight.new_run(loaded, runs, at)
    file = schedulers.write(run, scheduler)
    say(f"run folder: {run.path}")
    say(schedulers.submission(file, scheduler))
    return 0


def export(path: Path, what: str, format: str | None, dtype: str | None) -> int:
    """Export the newest checkpoint of a run in a process of its own. Returns that process's exit code.

    what: `auto` writes what the run's config says.  format, dtype: None takes the run's own where they can carry that.
    Raises InputError when that is nothing, or the three do not go together.
    """
    run = RunDir.open(path)
    cfg = run.config().exporting(what, format, dtype)
    if cfg.export_what == "none":
        raise InputError(f"{run.config_file}: export.what is none; say what to write with --what")
    code = begin_export(run, cfg).wait()
    say(export_said(run, code), sys.stderr if code else sys.stdout)
    return code if code in (0, 2) else 1


_EXPORT_LOG, _EXPORT_ANSWER = "export.log", "export-answer.txt"


def begin_export(run: RunDir, cfg: RunConfig) -> subprocess.Popen[bytes]:
    """Export in a process of its own, as the config says. It ends with code 2 for a mistake of the user.

    Raises InputError when a folder of the run is missing and cannot be made.
    """
    run.complete_folders(cfg)
    argv = [sys.executable, "-m", "trainer", str(run.path)]
    argv += ["--export", cfg.export_what, "--format", cfg.export.format, "--dtype", cfg.export.dtype]
    # What libraries print while they load is of no use to a person.
    with (run.logs / _EXPORT_LOG).open("ab") as libraries, (run.logs / _EXPORT_ANSWER).open("wb") as answer:
        return subprocess.Popen(argv, env=process.worker_environment(), stdout=answer, stderr=libraries)


def export_said(run: RunDir, code: int) -> str:
    """What the last export of a run wrote, a file per line, or what went wrong. code: the exit code of its process."""
    if code in (0, 2):
        return (run.logs / _EXPORT_ANSWER).read_text(encoding="utf-8").strip()
    log = run.logs / _EXPORT_LOG
    return f"the export failed: {failure.last_line(log)}\nlog: {log}"


def _run(loaded: ConfigFile, run: RunDir) -> int:
    cfg = loaded.config
    for note in loaded.notes:
        complain(f"note: {note}")
    events = EventReader(run.events_file)
    events.read()  # a run that continues does not tell its past again
    handle = torchrun.start(cfg, run)
    if network.must_be_joined(cfg.parallel):
        parallel = cfg.parallel
        say(f"on each other node: {torchrun.joining(run, parallel.nodes)}")
        say(
            f"  where it does not see that folder, add: parallel.nodes={parallel.nodes} "
            f"parallel.devices={parallel.devices} parallel.rendezvous={parallel.rendezvous}"
        )
    code = watch(cfg, run, events)
    handle.process.wait()
    return code


def watch(cfg: RunConfig, run: RunDir, events: EventReader) -> int:
    """Show a started run until it ends; Ctrl-C stops it. Returns what `train` returns.

    The last line on stdout is the path of the export, or of the run folder when nothing was to be exported.
    """
    say(f"run folder: {run.path}")
    with _AskedToEnd() as asked, choose_face(sum(cfg.stage_steps)) as face:
        told = _follow(cfg, run, events, face, asked)
    return _conclude(run, told)


def _follow(cfg: RunConfig, run: RunDir, events: EventReader, face: Face, asked: _AskedToEnd) -> list[Told]:
    """Show what happens until the run has ended. Returns everything but the steps."""
    ranks = [RankReader(run.rank_file(rank)) for rank in range(cfg.parallel.world_size)]
    told: list[Told] = []
    while process.alive(run):
        told += _show_new(events, ranks, face)
        _answer(asked, run, face)
        time.sleep(POLL_S)
    _attempt(run.events_file, lambda: process.settle(run))
    return told + _show_new(events, ranks, face)


def _show_new(events: EventReader, ranks: Sequence[RankReader], face: Face) -> list[Told]:
    told: list[Told] = []
    for reader in ranks:
        for line in reader.read()[-1:]:
            face.figures.peaks[line.rank] = line.peak
    for event in events.read():
        if not isinstance(event, ErrorEvent):  # told once, at the end
            face.show(event)
        if not isinstance(event, StepEvent):
            told.append(event)
    return told


def _answer(asked: _AskedToEnd, run: RunDir, face: Face) -> None:
    if asked.count >= 2:
        process.terminate(run)
    elif asked.count == 1 and not asked.is_answered:
        asked.is_answered = True  # the trainer forgets the request when it begins to stop: never ask again
        run.request("stop")
        face.say("stopping after this step, with a checkpoint; Ctrl-C again ends it at once, without one")


def _conclude(run: RunDir, told: Sequence[Told]) -> int:
    """Write the report, say how the run ended, and return the exit code."""
    from trainer.run.report import write_report

    _attempt(run.report, lambda: write_report(run))
    state = process.status(run)
    if state == "failed":
        errors = [event for event in told if isinstance(event, ErrorEvent)] or [failure.diagnose(run, told)]
        complain(explain(errors[-1], run))
        return errors[-1].exit_code
    exports = [event for event in told if isinstance(event, ExportEvent)]
    if state == "stopped":
        complain(f"stopped; continue with --resume {run.path}")
    else:
        say(run.path / exports[-1].path if exports else run.path)
    return EXIT_CODES[state]


def _attempt(file: Path, write: Callable[[], object]) -> None:
    """Write a file that tells about the run. A full disk, or a damaged file, must not hide what follows."""
    try:
        write()
    except OSError as error:
        complain(f"warning: {file} could not be written: {error.strerror}")
    except InputError as error:
        complain(f"warning: {file} could not be written: {error}")


def explain(error: ErrorEvent, run: RunDir) -> str:
    """The error as a person should read it: where, what, the remedy and the log.

    The user's mistake is the same on every rank, and its message says where it is.
    """
    where = "" if error.rank is None or error.exit_code == 2 else f"rank {error.rank}, step {error.step}: "
    lines = [f"error: {where}{error.message}"]
    if error.remedy:
        lines.append(f"  what to do: {error.remedy}")
    if error.log:
        lines.append(f"  log: {run.path / error.log}")
    return "\n".join(lines)


class _AskedToEnd:
    """Counts Ctrl-C instead of raising KeyboardInterrupt in the middle of something.

    What schedulers and containers ask to leave by counts once: it comes again shortly before SIGKILL.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_answered = False

    def __enter__(self) -> Self:
        self._former = {number: signal.signal(number, self._add) for number in (signal.SIGINT, *PREEMPTION_SIGNALS)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _add(self, number: int, _frame: FrameType | None) -> None:
        self.count = self.count + 1 if number == signal.SIGINT else max(self.count, 1)
