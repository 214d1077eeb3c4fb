"""What a notebook does with runs: configure, plan, start, watch, wait for, continue and export them.

Nothing here blocks the kernel: runs are processes of their own, which go on when the kernel ends, and what waits for
one is awaited, so that the buttons of its dashboard answer meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from markupsafe import Markup

from app.html import in_notebook, plan_bar
from app.monitor import Follower, find_runs
from app.notebook import dashboard_widget
from app.notebook.dashboard_widget import Dashboard
from app.notebook.form_widget import Form
from app.notebook.lessons import Table, exercise, gallery
from trainer import plan as plans
from trainer.benchmark import variants as trials
from trainer.benchmark.variants import Trial
from trainer.config.errors import InputError
from trainer.config.installation import CHECKOUT
from trainer.config.load import ConfigFile, load_config
from trainer.config.presets import preset_file
from trainer.config.terminal import say
from trainer.launcher import commands, preflight, torchrun
from trainer.launcher.torchrun import RunHandle
from trainer.metrics import gpus
from trainer.plan import hardware as hardware_of
from trainer.plan.fixes import Fix, fixes
from trainer.plan.hardware import GIB
from trainer.plan.memory import MemoryPlan
from trainer.run import process as processes
from trainer.run.events import ENDS, EventReader, ExportEvent, SampleEvent, State, StatusEvent
from trainer.run.folder import RunDir, shared_cache

RUNS = (CHECKOUT or Path.cwd()) / "runs"
"""The folder of runs that the page shows too: that of the checkout, or where ShardStudio is installed by pip, `runs` in
the current folder."""
LESSONS = CHECKOUT / "notebooks" if CHECKOUT else Path(__file__).parents[1] / "notebooks"
"""The folder of the notebooks that come with the program; copy them before you change one that pip installed."""
POLL_S = 0.2


def device(ranks: int) -> Literal["cuda", "cpu"]:
    """What `parallel.device` may be on this machine: cuda where each of the ranks can have a GPU of its own."""
    try:
        return "cuda" if len(gpus.read()) >= ranks else "cpu"
    except InputError:  # a driver that does not answer: `launch.py --doctor` tells
        return "cpu"


def config(preset: str | Path, *overrides: str) -> ConfigFile:
    """The config of a preset, by its name, or of a file, with `key=value` overrides.

    Raises ConfigError with every problem there is, and InputError for a word that is not the name of a preset.
    """
    return load_config(preset_file(preset, RUNS / "presets"), overrides)


def form(preset: str | Path = "quickstart", *overrides: str) -> Form:
    """The same as a form, whose `config` is what it shows: as the last line of a cell it is shown below it."""
    return Form(preset_file(preset, RUNS / "presets"), overrides, named=str(preset))


@dataclass(frozen=True)
class Planned:
    """A plan as the last line of a cell shows it. ways: what would make the run fit."""

    plan: MemoryPlan
    ways: tuple[Fix, ...]

    def _repr_html_(self) -> Markup:
        way = Markup("<li>fits with {}: {:.2f} GiB</li>")
        ways = Markup().join(way.format(fix, fix.plan.need / GIB) for fix in self.ways)
        return in_notebook(plan_bar(self.plan) + (Markup("<ul>{}</ul>").format(ways) if ways else ""))


def plan(config: ConfigFile, gpus: str | None = None, runs: Path = RUNS) -> Planned:
    """What the run takes on each GPU, before it is started. gpus: as `4x24gb`; None: this machine's, if it has any.

    Raises InputError for a model that is neither known nor on this machine. One that is not known is recorded first.
    """
    hardware = hardware_of.named(gpus) if gpus else hardware_of.detected()
    cfg = config.config
    if gpus and hardware and hardware.count:
        cfg = cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update={"devices": hardware.count})})
    cache = shared_cache(cfg, runs)
    card = hardware.card if hardware else None
    found = plans.plan(cfg, card, cache, say)
    return Planned(found, tuple(fixes(cfg, card, cache)) if card else ())


def start(config: ConfigFile, runs: Path = RUNS) -> RunDir:
    """Start a new run below `runs` and return at once. Raises InputError before anything is written when the config,
    its files or its images are wrong."""
    run = preflight.new_run(config, runs)
    _launch(config, run)
    return run


def _launch(config: ConfigFile, run: RunDir) -> None:
    for note in config.notes:
        say(f"note: {note}")
    torchrun.start(config.config, run)


def attach(run: str | Path | None = None, runs: Path = RUNS) -> RunDir:
    """A run that was started before, by its name or its folder; None is the one below `runs` that was started last.

    Raises InputError when there is none.
    """
    if run is not None:
        named = runs / run
        return RunDir.open(named if named.is_dir() else Path(run))
    found = find_runs(runs)
    if not found:
        raise InputError(f"{runs}: no run was started here; start one with notebook.start(config)")
    return found[0]


def resume(run: RunDir, *overrides: str) -> RunDir:
    """Continue an ended run from its newest checkpoint, with some fields changed, and return at once.

    Raises InputError as `start` does, and when the run is running.
    """
    _launch(preflight.continued_run(run, overrides), run)
    return run


def join(run: RunDir, node_rank: int = 1) -> RunHandle:
    """Start this machine's ranks of a run on several nodes that the first one starts, and return at once.

    What they say goes into the run's logs. Raises InputError as `torchrun.join` does.
    """
    return torchrun.join(run.config().parallel, run, node_rank)


def dashboard(run: RunDir) -> Dashboard:
    """What the run does, live: as the last line of a cell it is shown below it."""
    is_found_by_name = run.path.parent == RUNS
    return Dashboard(run, run.path.name if is_found_by_name else str(run.path))


async def reached(run: RunDir, step: int) -> int:
    """Wait until the run has done as many steps, or has ended. Returns how many it has done."""
    follower = Follower(run)
    while (view := follower.view()).step < step and view.state not in ENDS:
        await asyncio.sleep(POLL_S)
    return view.step


async def ended(run: RunDir) -> State:
    """Wait until the run has ended: `await notebook.ended(run)`. Raises RuntimeError with the cause when it failed."""
    while processes.alive(run):
        await asyncio.sleep(POLL_S)
    processes.settle(run)
    await asyncio.sleep(2 * dashboard_widget.POLL_S)  # what the notebook keeps of a dashboard is its last look
    view = Follower(run).view()
    if view.state == "failed" and view.error is not None:
        raise RuntimeError(commands.explain(view.error, run))
    return view.state


def samples(run: RunDir) -> dict[str, dict[str, Path]]:
    """{"step 50": {prompt: picture}} of what the run has drawn, for `gallery`."""
    drawn: dict[str, dict[str, Path]] = {}
    for sample in _samples(run):
        if not sample.is_text:
            drawn.setdefault(f"step {sample.step}", {})[sample.prompt] = run.path / sample.path
    return drawn


def texts(run: RunDir) -> dict[str, list[tuple[str, str]]]:
    """{"step 50": [(prompt or question, text)]} of what the run has written, in the order of the config."""
    written: dict[str, list[tuple[str, str]]] = {}
    for sample in _samples(run):
        if sample.is_text:
            text = (run.path / sample.path).read_text(encoding="utf-8")
            written.setdefault(f"step {sample.step}", []).append((sample.prompt, text))
    return written


def _samples(run: RunDir) -> list[SampleEvent]:
    return sorted(Follower(run).view().samples, key=lambda sample: (sample.step, sample.index))


def exports(run: RunDir) -> tuple[ExportEvent, ...]:
    """What the run has exported, the latest last."""
    return Follower(run).view().exports


def exported(run: RunDir) -> Path:
    """What the run exported last. Raises InputError when that is nothing."""
    view = Follower(run).view()
    if not view.exports:
        raise InputError(f"{run.path}: nothing was exported, and the run is {view.state}; see notebook.export")
    return run.path / view.exports[-1].path


async def export(run: RunDir, what: str, format: str | None = None, dtype: str | None = None) -> Path:
    """Export the newest checkpoint: `await notebook.export(run, "merged")`. Returns the file or folder.

    format, dtype: None takes the run's own where they can carry that. Raises InputError when the three do not go
    together or the export failed.
    """
    process = commands.begin_export(run, run.config().exporting(what, format, dtype))
    while process.poll() is None:
        await asyncio.sleep(POLL_S)
    if process.returncode:
        raise InputError(commands.export_output(run, process.returncode))
    return exported(run)


async def compare(config: ConfigFile, variants: Mapping[str, Sequence[str]], runs: Path = RUNS) -> list[Trial]:
    """Train variants of a config one after the other, by the same ranks: `await notebook.compare(config, {...})`.

    variants: {label: overrides as `key=value`}. Says which one it is at. Raises InputError before anything starts when
    a variant is wrong, and RuntimeError with the cause when one failed.
    """
    run = trials.create(config, variants, runs)
    trials.start(run)
    try:
        await _told(run)
        await ended(run)
    except BaseException:  # the cell was interrupted: nobody waits for the rest
        processes.terminate(run)
        raise
    return trials.read(run)


async def _told(run: RunDir) -> None:
    """Print what a run says of its progress, until it has ended."""
    reader = EventReader(run.events_file)
    while processes.alive(run):
        for event in reader.read():
            if isinstance(event, StatusEvent) and event.total and event.done < event.total:
                say(f"{event.done + 1} of {event.total}: {event.message}")
        await asyncio.sleep(POLL_S)


__all__ = ["Table", "exercise", "gallery"]
