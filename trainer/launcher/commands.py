"""The commands of the command line: check a config, start or join a run, show its progress, report how it ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from trainer.config import families
from trainer.config.load import ConfigFile, load_config, load_config_text
from trainer.config.schema import RunConfig
from trainer.config.sections import ParallelConfig, family_names
from trainer.data.drawn_references import check_drawing
from trainer.launcher import capacity, network, preflight, schedulers, torchrun
from trainer.launcher.console import MessageEvent, ProgressDisplay, progress_display
from trainer.launcher.jobs import side_process
from trainer.launcher.remedy import with_remedy
from trainer.launcher.schedulers import Scheduler
from trainer.launcher.torchrun import RunHandle
from trainer.run import failure, manifest, process
from trainer.run.drawings import DrawingRequest
from trainer.run.events import (
    ErrorEvent,
    EventReader,
    ExportEvent,
    RankReader,
    State,
    StepEvent,
)
from trainer.run.folder import RunDir
from trainer.run.length import RunLength
from trainer.run.preemption import PREEMPTION_SIGNALS
from trainer.system.errors import InputError, RuleError
from trainer.system.terminal import complain, say

EXIT_CODES: dict[State, int] = {"finished": 0, "failed": 1, "stopped": 130}
POLL_S = 0.2
SILENT_S = 10
"""A run that writes nothing for so long is asked whether it can."""


def train(preset: Path, overrides: Sequence[str], runs: Path, at: Path | None) -> int:
    """Train a preset in a new run folder.

    Args:
        preset: The config file.
        overrides: `key=value` changes to it.
        runs: Folder in which the run folder is made.
        at: Exact path of the run folder, instead.

    Returns:
        The exit code: 0 finished, 1 failed, 2 failed by the user's mistake, 130 stopped.

    Raises:
        InputError: The config, its files or its images are wrong, or a scheduler gave this node another number than 0.
            Nothing was started or written.
    """
    loaded = load_config(preset, overrides)
    node_rank = network.scheduled_node_rank() or 0
    if loaded.config.parallel.nodes > 1 and node_rank:
        raise InputError(
            f"this is node {node_rank}, but the run folder is made on node 0: use --headless only there, "
            f"and --join RUN_DIR here; or let --slurm write the job"
        )
    run = preflight.new_run(loaded, runs, at)
    return _run(loaded, run)


def resume(
    path: Path, overrides: Sequence[str], node_rank: int | None = None, wanted: manifest.Wanted | None = None
) -> int:
    """Continue a run from its newest checkpoint, or from another one as a run of its own.

    Args:
        path: The run folder.
        overrides: Fields to change, as `key=value`.
        node_rank: Number of this node. None: the number that a scheduler gave it, or 0. A scheduler can therefore run
            the same command on every node: those above 0 join.
        wanted: The checkpoint from which a new run goes on; None is the newest, in the same folder.

    Returns:
        The exit code, as `train`.

    Raises:
        InputError: As `train`, and if the run is already running.
    """
    run = RunDir.open(path)
    number = (network.scheduled_node_rank() or 0) if node_rank is None else node_rank
    if wanted is not None:
        if number:
            raise InputError("--step makes a new run folder: use it on node 0, and --join here, with that folder")
        new, loaded = preflight.branched_run(run, wanted, overrides)
        return _run(loaded, new)
    if number:
        cfg = load_config(run.config_file, overrides).config
        if cfg.parallel.nodes > 1 or node_rank:
            return _join(cfg.parallel, run, number)
    return _run(preflight.continued_run(run, overrides), run)


def join(path: Path, overrides: Sequence[str], node_rank: int | None = None) -> int:
    """Join a run that another node starts, and wait until it ends.

    Args:
        path: The run folder.
        overrides: Fields of `parallel`, needed only if this machine does not see the run folder.
        node_rank: Number of this node. None: the number that a scheduler gave it.

    Returns:
        The exit code, as `attend`.

    Raises:
        InputError: As `torchrun.join`, and if the node has no number.
    """
    run = RunDir(path.absolute())
    run.guard()
    parallel = _parallel(run, overrides)
    number = network.scheduled_node_rank() if node_rank is None else node_rank
    if number is None:
        raise InputError("--join needs the number of this node: --node-rank 1, --node-rank 2 on the next, and so on")
    return _join(parallel, run, number)


def _parallel(run: RunDir, overrides: Sequence[str]) -> ParallelConfig:
    """The section `parallel` of a run: from the run folder, or from the overrides if this machine does not see it."""
    if run.config_file.is_file():
        if overrides:
            raise InputError(
                f"{overrides[0]}: {run.path} already has a config; leave it out, or change it on the first node"
            )
        return run.config().parallel
    if not overrides:
        raise InputError(
            f"{run.path}: not a run folder (it has no config.yaml); if this machine does not see the first node's run "
            "folder, add parallel.nodes=N parallel.devices=N parallel.rendezvous=HOST:PORT with its values"
        )
    given = [text.removeprefix("parallel.") for text in overrides]
    for text, field in zip(overrides, given, strict=True):
        if field.partition("=")[0].strip() not in ParallelConfig.model_fields:
            raise InputError(
                f"{text}: is not a field of parallel; --join takes only those, for example parallel.nodes=2"
            )
    # A config needs a family and data, which do not matter here.
    preset = f"model: {{family: {family_names()[0]}}}\ndata: {{path: /}}"
    return load_config_text(preset, [f"parallel.{field}" for field in given], Path("command line")).config.parallel


def _join(parallel: ParallelConfig, run: RunDir, node_rank: int) -> int:
    handle = torchrun.join(parallel, run, node_rank)
    say(f"joining {run.path} as node {node_rank} of {parallel.nodes}, rendezvous at {parallel.rendezvous}")
    return attend(handle, torchrun.node_log(run, node_rank))


def attend(handle: RunHandle, log: Path) -> int:
    """Wait until a node that joined a run has ended. Ctrl-C stops all nodes; a second Ctrl-C stops this one at once.

    Returns:
        The exit code: 0 finished, 1 failed on this node, 130 stopped by a second Ctrl-C.
    """
    run = handle.run
    with StopRequests() as stops:
        while handle.process.poll() is None:
            if stops.count >= 2:
                process.end_family(handle.process.pid)
                complain("stopped this node; the other nodes will detect it and exit")
                return EXIT_CODES["stopped"]
            if stops.count == 1 and not stops.is_handled:
                stops.is_handled = True
                if run.config_file.is_file():
                    run.request("stop")
                else:  # the signal reaches the ranks of this node, which agree with all others on a stop
                    handle.process.terminate()
                say("stopping all nodes after this step; Ctrl-C again stops this node at once")
            time.sleep(POLL_S)
    if handle.process.returncode:
        complain(f"error: {failure.last_line(log)}\n  log: {log}")
        return 1
    say("done; node 0 reports how the run ended")
    return 0


def write_job(preset: Path, overrides: Sequence[str], runs: Path, at: Path | None, scheduler: Scheduler) -> int:
    """Make the run folder of a preset, with the job file that starts the run. Returns 0.

    The last line on stdout is the command that submits the job.

    Raises:
        InputError: As `train`, and if the job lacks something that the scheduler needs.
    """
    loaded = schedulers.load(preset, overrides, scheduler)
    schedulers.check_run_folder_path(loaded, at or runs, scheduler)
    run = preflight.new_run(loaded, runs, at, is_here=False)
    file = schedulers.write(run, scheduler)
    say(f"run folder: {run.path}")
    say(schedulers.submission(file, scheduler))
    return 0


def export(path: Path, what: str, format: str | None, dtype: str | None, wanted: manifest.Wanted = "newest") -> int:
    """Export a checkpoint of a run in a separate process.

    Args:
        path: The run folder.
        what: `export.what`; `auto` takes it from the run's config.
        format: `export.format`; None takes the run's own if it can carry `what`.
        dtype: `export.dtype`; None takes the run's own if it can carry `what`.
        wanted: The checkpoint.

    Returns:
        The exit code: 0 exported, 1 failed, 2 failed by the user's mistake.

    Raises:
        InputError: There is nothing to export, or the three cannot be combined.
    """
    run = RunDir.open(path)
    cfg = run.config().exporting(what, format, dtype)
    if cfg.export_what == "none":
        raise InputError(f"{run.config_file}: export.what is none; choose what to export with --what")
    code = begin_export(run, cfg, wanted).wait()
    say(export_output(run, code), sys.stderr if code else sys.stdout)
    return code if code in (0, 2) else 1


def begin_export(run: RunDir, cfg: RunConfig, wanted: manifest.Wanted = "newest") -> subprocess.Popen[bytes]:
    """Start an export, as `cfg.export` says, in a separate process. Its exit code is 2 for the user's mistake.

    Raises:
        InputError: The run has no such checkpoint, a folder of it is missing and cannot be made, or its family has no
            file of this format.
    """
    if problems := tuple(families.unwritable(cfg)):
        raise RuleError(problems)
    run.guard()
    if run.is_rehearsal:
        raise InputError(
            f"{run.path.name}: is a rehearsal, whose adapter fits the demo model alone; start the real run, and export "
            "that"
        )
    run.complete_folders(cfg)
    step = manifest.steps_in(manifest.to_export(run, wanted))
    argv = [sys.executable, "-m", "trainer", str(run.path), f"--step={step}"]
    argv += ["--export", cfg.export_what, "--format", cfg.export.format, "--dtype", cfg.export.dtype]
    return side_process.begin(run, "export", argv)


def export_output(run: RunDir, code: int) -> str:
    """Return what the last export of a run wrote, one file per line, or why it failed.

    Args:
        run: The run.
        code: Exit code of the export's process.
    """
    return side_process.answer(run, "export", code, "export")


def begin_drawing(run: RunDir, request: DrawingRequest, device: str | None = None) -> subprocess.Popen[bytes]:
    """Start to sample a prompt with and without what a run has trained, in a separate process.

    Its exit code is 2 for the user's mistake. `drawings.drawings` reads what it writes.

    Args:
        run: The run.
        request: The prompt and its settings.
        device: auto, cuda or cpu; None is the run's own.

    Raises:
        InputError: Nothing was trained yet, or the request cannot be sampled.
    """
    run.guard()
    run.complete_folders(check_drawing(run, request))
    argv = [sys.executable, "-m", "trainer.train.draw", str(run.path), *request.arguments()]
    argv += [f"--device={device}"] if device else []
    return side_process.begin(run, "draw", argv)


def drawing_output(run: RunDir, code: int) -> str:
    """Return the folder of the last drawing of a run, or why it failed. code: exit code of its process."""
    return side_process.answer(run, "draw", code, "drawing")


def _run(loaded: ConfigFile, run: RunDir) -> int:
    cfg = loaded.config
    for note in loaded.notes:
        complain(f"note: {note}")
    for warning in capacity.warnings(cfg, run.path.parent):
        complain(f"warning: {warning}")
    events = EventReader(run.events_file)
    events.read()  # the events before this start are not shown again
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
    """Show the progress of a started run until it ends. Ctrl-C stops it.

    The last line on stdout is the path of the export, or of the run folder if nothing was exported.

    Args:
        cfg: Config of the run.
        run: The run.
        events: A reader that has read the events before this start.

    Returns:
        The exit code, as `train`.
    """
    say(f"run folder: {run.path}")
    former = EventReader(run.events_file).read() if None in cfg.stage_steps else []
    with StopRequests() as stops, progress_display(RunLength.of(cfg, former)) as display:
        launch = process.Launch.read(run)
        shown = _follow(cfg, run, events, display, stops)
    # The folder was deleted under the run: its ranks are still there, and there is no log to conclude from.
    if not run.path.is_dir():
        if launch is not None and launch.is_here and launch.process() is not None:
            process.end_family(launch.pid)
        trouble = failure.write_trouble(run)
        complain(explain(ErrorEvent(message=trouble, remedy=failure.remedy_for(trouble)), run))
        return 1
    return _conclude(run, shown)


def _follow(
    cfg: RunConfig, run: RunDir, events: EventReader, display: ProgressDisplay, stops: StopRequests
) -> list[MessageEvent]:
    """Show events until the run has ended. Returns all of them but the steps."""
    ranks = [RankReader(run.rank_file(rank)) for rank in range(cfg.parallel.world_size)]
    shown: list[MessageEvent] = []
    silence = _Silence(run, display)
    while process.alive(run):
        shown += _show_new(events, ranks, display)
        silence.look()
        if stops.count >= 2:
            process.terminate(run)
        elif stops.count == 1 and not stops.is_handled:
            stops.is_handled = True  # the trainer clears the request when it begins to stop: never request it again
            run.request("stop")
            display.say("stopping after this step, with a checkpoint; Ctrl-C again ends it at once, without one")
        time.sleep(POLL_S)
    if not run.path.is_dir():
        return shown
    _attempt(run.events_file, lambda: process.record_end(run))
    return shown + _show_new(events, ranks, display)


class _Silence:
    """Says why a run falls silent: it reports by files in its folder, whose disk may be full, read-only or gone."""

    def __init__(self, run: RunDir, display: ProgressDisplay) -> None:
        self._run, self._display = run, display
        self._written = 0
        self._heard_at = time.monotonic()
        self._said = ""

    def look(self) -> None:
        """Write into the folder where the run has written nothing for a while, and say what prevents it."""
        try:  # by size: a write that fails for want of space changes the time of a file too
            written = self._run.events_file.stat().st_size
        except OSError:  # it is gone
            written = self._written
        if written != self._written or time.monotonic() - self._heard_at < SILENT_S:
            self._heard_at = time.monotonic() if written != self._written else self._heard_at
            self._written = written
            return
        self._heard_at, trouble = time.monotonic(), failure.write_trouble(self._run)
        if trouble and trouble != self._said:
            remedy = failure.remedy_for(trouble).partition(", then")[0]
            self._display.say(
                f"warning: the run has written nothing for {SILENT_S} s: {trouble}. What it reports is lost; {remedy}"
            )
        self._said = trouble


def _show_new(events: EventReader, ranks: Sequence[RankReader], display: ProgressDisplay) -> list[MessageEvent]:
    new: list[MessageEvent] = []
    for reader in ranks:
        for line in reader.read()[-1:]:
            display.summary.peaks[line.rank] = line.peak
    for event in events.read():
        if not isinstance(event, ErrorEvent):  # shown once, at the end
            display.show(event)
        if not isinstance(event, StepEvent):
            new.append(event)
    return new


def _conclude(run: RunDir, events: Sequence[MessageEvent]) -> int:
    """Write the report, print how the run ended, and return the exit code. `events` are those since the start."""
    from trainer.view.report import write_report

    _attempt(run.report, lambda: write_report(run, with_remedy))
    state = process.status(run)
    if state == "failed":
        errors = [event for event in events if isinstance(event, ErrorEvent)] or [failure.diagnose(run, events)]
        complain(explain(with_remedy(run, errors[-1]), run))
        return errors[-1].exit_code
    exports = [event for event in events if isinstance(event, ExportEvent)]
    if state == "stopped":
        complain(f"stopped; continue with --resume {run.path}")
    else:
        say(run.path / exports[-1].path if exports else run.path)
    return EXIT_CODES[state]


def _attempt(file: Path, write: Callable[[], object]) -> None:
    """Call `write`, which writes `file`; print a warning if it fails, so that how the run ended is still shown."""
    try:
        write()
    except OSError as error:
        complain(f"warning: {file} could not be written: {error.strerror}")
    except InputError as error:
        complain(f"warning: {file} could not be written: {error}")


def explain(error: ErrorEvent, run: RunDir) -> str:
    """Return the error for a person: rank and step, message, remedy and log.

    The user's own mistake (exit code 2) shows no rank: it is the same on all, and its message names the place.
    """
    where = "" if error.rank is None or error.exit_code == 2 else f"rank {error.rank}, step {error.step}: "
    lines = [f"error: {where}{error.message}"]
    if error.remedy:
        lines.append(f"  what to do: {error.remedy}")
    if error.log:
        lines.append(f"  log: {run.path / error.log}")
    return "\n".join(lines)


class StopRequests:
    """Counts Ctrl-C instead of raising KeyboardInterrupt at an arbitrary point.

    Preemption signals of schedulers and containers count once only: they are sent again shortly before SIGKILL.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_handled = False

    def __enter__(self) -> Self:
        self._former = {number: signal.signal(number, self._add) for number in (signal.SIGINT, *PREEMPTION_SIGNALS)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _add(self, number: int, _frame: FrameType | None) -> None:
        self.count = self.count + 1 if number == signal.SIGINT else max(self.count, 1)
