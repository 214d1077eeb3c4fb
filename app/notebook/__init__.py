"""The notebooks' interface to runs: configure, plan, start, watch, await, continue and export them.

Nothing here blocks the kernel: runs are separate processes, which outlive the kernel, and functions that wait for a run
are coroutines, so that the buttons of its dashboard keep working. See DECISIONS 122.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from markupsafe import Markup

from app.notebook import captions, dashboard_widget, panels
from app.notebook.dashboard_widget import Dashboard
from app.notebook.form_widget import Form
from app.notebook.lessons import Table, exercise, gallery
from app.runs.monitor import Follower, find_runs
from trainer import plan as plans
from trainer.config import presets
from trainer.config.load import ConfigFile, load_config
from trainer.launcher import capacity, commands, fit_command, preflight, torchrun
from trainer.launcher.fit_command import Found
from trainer.launcher.jobs import variants as trials
from trainer.launcher.jobs.variants import Trial
from trainer.launcher.torchrun import RunHandle
from trainer.plan import hardware as hardware_of
from trainer.plan.memory import MemoryPlan
from trainer.plan.search.fit import Proposal
from trainer.plan.search.ladder import Rung, ways_to_fit
from trainer.plan.store import unread_weights
from trainer.run import process as processes
from trainer.run.events import ENDS, EventReader, ExportEvent, SampleEvent, State, StatusEvent
from trainer.run.folder import RunDir, shared_cache
from trainer.run.manifest import Wanted
from trainer.system.errors import InputError
from trainer.system.gpus import support, visible
from trainer.system.installation import CHECKOUT
from trainer.system.terminal import say

RUNS = (CHECKOUT or Path.cwd()) / "runs"
"""The folder of runs, shared with the page: the checkout's, or `runs` in the current folder of an installation."""
LESSONS = CHECKOUT / "notebooks" if CHECKOUT else Path(__file__).parents[1] / "notebooks"
"""The folder of the notebooks that come with the program; copy them before you change one that pip installed."""
POLL_S = 0.2


def device(ranks: int) -> Literal["cuda", "cpu"]:
    """Return a value for `parallel.device`: cuda if this machine has a GPU for each rank that trains in bf16 too."""
    try:
        given = visible.for_run()
        is_usable = not support.unusable(given, support.installed()) and not any(map(support.lacks_bf16, given))
        return "cuda" if len(given) >= ranks and is_usable else "cpu"
    except InputError:  # the driver does not answer: `launch.py --doctor` shows why
        return "cpu"


def preset_file(preset: str | Path) -> Path:
    """Return the file of a preset, given as a file or by name. Raises InputError if there is none of that name."""
    return presets.preset_file(preset, RUNS / "presets")


def config(preset: str | Path, *overrides: str) -> ConfigFile:
    """Load the config of a preset name or a file, with `key=value` overrides.

    Raises:
        ConfigError: The config has problems; names every one.
        InputError: There is no preset of that name.
    """
    return load_config(preset_file(preset), overrides)


def form(preset: str | Path = "quickstart", *overrides: str, runs: Path = RUNS) -> Form:
    """Return the form of a run, shown below a cell that ends with it: model, pictures, method, and what they take.

    Its button Start starts the run below `runs` and shows it; `run` is that run then, and `config` what the form shows.
    *Rehearse* shows a rehearsal of it. A queued run is started by this kernel or a page, as long as one of them lives.
    """
    return Form(preset_file(preset), overrides, runs, named=str(preset))


@dataclass(frozen=True)
class Planned:
    """A memory plan, shown below a cell that ends with it, and the fixes that would make the run fit."""

    plan: MemoryPlan
    fixes: tuple[Rung, ...]

    def _repr_html_(self) -> Markup:
        return panels.plan(self.plan, self.fixes)


def plan(config: ConfigFile, gpus: str | None = None, runs: Path = RUNS) -> Planned:
    """Plan the memory of a run per GPU. A model without a recording is recorded first.

    Args:
        gpus: For example `4x24gb`; None for this machine's GPUs, if it has any.

    Raises:
        InputError: The model has no recording and is not on this machine, or its weights are in a form that is not
            read.
    """
    hardware = hardware_of.named(gpus) if gpus else hardware_of.detected()
    cfg = config.config
    config.refuse(unread_weights(cfg.model))
    if gpus and hardware and hardware.count:
        cfg = cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update={"devices": hardware.count})})
    cache = shared_cache(cfg, runs)
    card = hardware.card if hardware else None
    found = plans.plan(cfg, card, cache, say)
    return Planned(found, tuple(ways_to_fit(cfg, card, cache, found)) if card else ())


@dataclass(frozen=True)
class Fitted:
    """The fastest configs that fit, shown as a table below a cell that ends with it.

    Attributes:
        found: The configs of each part of the run.
        price: Price of a GPU-hour, if it was given.
    """

    found: Found
    price: float | None

    @property
    def proposals(self) -> tuple[Proposal, ...]:
        """Those of the run, or of all its stages in order; the fastest of each first."""
        return tuple(proposal for one in self.found.fits for proposal in one.proposals)

    @property
    def config(self) -> ConfigFile:
        """The run with the fastest of them, for `start`. Raises InputError where nothing fits."""
        if not self.found.is_complete:
            raise InputError("; ".join(one.remedy for one in self.found.fits if one.remedy))
        return replace(self.found.loaded, config=self.found.best)

    def __repr__(self) -> str:
        parts = zip(self.found.parts, self.found.fits, strict=True)
        return "\n\n".join("\n".join(fit_command.lines(self.found, *part, self.price)) for part in parts)

    def _repr_html_(self) -> Markup:
        return panels.styled(panels.TEMPLATES.part("panels.html", "code", repr(self)))


def fit(
    config: ConfigFile,
    gpus: str | None = None,
    keep: Sequence[str] | None = None,
    price: float | None = None,
    runs: Path = RUNS,
) -> Fitted:
    """Find the fastest configs of a run that fit the GPUs, by their plans: nothing is tried.

    Args:
        gpus: For example `4x24gb`; None for this machine's GPUs.
        keep: Fields that stay, for example `["resolution"]`. None: resolution, rank and format, of which the last means
            that the base is not stored in fewer than 8 bits.
        price: Price of a GPU-hour.

    Raises:
        InputError: `gpus`, `keep` or `price` is wrong, or there are no GPUs.
    """
    fit_command.check_price(price, "price")
    if isinstance(keep, str):
        names = [name.strip() for name in keep.split(",")]
        raise InputError(f"keep: '{keep}' is one text; give a list of fields, for example keep={names}")
    return Fitted(fit_command.search(config, runs, gpus, keep), price)


def start(config: ConfigFile, runs: Path = RUNS) -> RunDir:
    """Start a new run below `runs` without waiting for it.

    Raises:
        InputError: The config, its files or its images are wrong. Nothing was written.
    """
    run = preflight.new_run(config, runs)
    _launch(config, run)
    return run


def _launch(config: ConfigFile, run: RunDir) -> None:
    for note in config.notes:
        say(f"note: {note}")
    for warning in capacity.warnings(config.config, run.path.parent):
        say(f"warning: {warning}")
    torchrun.start(config.config, run)


def attach(run: str | Path | None = None, runs: Path = RUNS) -> RunDir:
    """Return an earlier run by its name or folder; None for the latest run below `runs`.

    Raises:
        InputError: There is no such run.
    """
    if run is not None:
        named = runs / run
        return RunDir.open(named if named.is_dir() else Path(run))
    found = find_runs(runs)
    if not found:
        raise InputError(f"{runs}: no run was started here; start one with notebook.start(config)")
    return RunDir.open(found[0].path)


def resume(run: RunDir, *overrides: str) -> RunDir:
    """Continue an ended run from its newest checkpoint, with overrides, without waiting for it.

    Raises:
        InputError: As `start` does, or the run is running.
    """
    _launch(preflight.continued_run(run, overrides), run)
    return run


def join(run: RunDir, node_rank: int = 1) -> RunHandle:
    """Start this machine's ranks of a run on several nodes, without waiting. Their output goes to the run's logs.

    Raises:
        InputError: As `torchrun.join` does.
    """
    return torchrun.join(run.config().parallel, run, node_rank)


async def caption(folder: str | Path, model: str | Path, runs: Path = RUNS, **options: object) -> Table:
    """Let a vision-language model caption the images of a folder that have no caption, and wait for it.

    The job goes on when the cell is interrupted. The same call follows it while it runs, or continues it later.

    Args:
        folder: The folder of images.
        model: A folder of transformers, or a hub id that is downloaded.
        runs: The folder of runs.
        options: Further fields of a request, as `style="tags"`, `omit="watermark"` or `quantize="nf4"`.

    Returns:
        The captions that were written, with the names of their images.

    Raises:
        InputError: The job cannot be started, or has failed.
    """
    return await captions.caption(folder, model, runs, **options)


def undo_captions(folder: str | Path, runs: Path = RUNS) -> int:
    """Take back the captions that the newest job of a folder wrote, and return how many. Again: of the job before.

    Raises:
        InputError: No captions of a model are left, or a job of the folder is running.
    """
    return captions.undo(folder, runs)


def dashboard(run: RunDir) -> Dashboard:
    """Return a live view of the run, shown below a cell that ends with it."""
    is_found_by_name = run.path.parent == RUNS
    return Dashboard(run, run.path.name if is_found_by_name else str(run.path))


async def reached(run: RunDir, step: int) -> int:
    """Wait until the run has reached a step or has ended. Returns its step."""
    follower = Follower(run)
    while (view := follower.view()).step < step and view.state not in ENDS:
        await asyncio.sleep(POLL_S)
    return view.step


async def ended(run: RunDir) -> State:
    """Wait for the end of the run: `await notebook.ended(run)`. Raises RuntimeError with the cause when it failed."""
    while processes.alive(run):
        await asyncio.sleep(POLL_S)
    processes.record_end(run)
    await asyncio.sleep(2 * dashboard_widget.POLL_S)  # the dashboard's last update is what the notebook keeps
    view = Follower(run).view()
    if view.state == "failed" and view.error is not None:
        raise RuntimeError(commands.explain(view.error, run))
    return view.state


def samples(run: RunDir) -> dict[str, dict[str, Path]]:
    """Return the pictures of the run's samples as {"step 50": {prompt: file}}, for `gallery`."""
    drawn: dict[str, dict[str, Path]] = {}
    for sample in _samples(run):
        if sample.picture:
            drawn.setdefault(f"step {sample.step}", {})[sample.prompt] = run.path / sample.picture
    return drawn


def texts(run: RunDir) -> dict[str, list[tuple[str, str]]]:
    """Return the run's sample texts as {"step 50": [(prompt or question, text)]}, in the order of the config."""
    written: dict[str, list[tuple[str, str]]] = {}
    for sample in _samples(run):
        if sample.kind.is_text:
            text = (run.path / sample.path).read_text(encoding="utf-8")
            written.setdefault(f"step {sample.step}", []).append((sample.prompt, text))
    return written


def _samples(run: RunDir) -> list[SampleEvent]:
    return sorted(Follower(run).view().samples, key=lambda sample: (sample.step, sample.index))


def exports(run: RunDir) -> tuple[ExportEvent, ...]:
    """Return the exports of the run, oldest first."""
    return Follower(run).view().exports


def exported(run: RunDir) -> Path:
    """Return the run's latest export. Raises InputError when there is none."""
    view = Follower(run).view()
    if not view.exports:
        raise InputError(f"{run.path}: no exports, and the run is {view.state}; see notebook.export")
    return run.path / view.exports[-1].path


async def export(
    run: RunDir, what: str, format: str | None = None, dtype: str | None = None, step: Wanted = "newest"
) -> Path:
    """Export a checkpoint: `await notebook.export(run, "merged")`, or `step=50`, or `step="best"`.

    Args:
        what: adapter, merged or full.
        format: None for the run's own, where `what` supports it.
        dtype: None for the run's own, where `what` supports it.
        step: Step of the checkpoint; "best" is the one of lowest validation loss.

    Returns:
        The exported file or folder.

    Raises:
        InputError: The combination is not supported, or the export failed.
    """
    process = commands.begin_export(run, run.config().exporting(what, format, dtype), step)
    while process.poll() is None:
        await asyncio.sleep(POLL_S)
    if process.returncode:
        raise InputError(commands.export_output(run, process.returncode))
    return exported(run)


async def compare(config: ConfigFile, variants: Mapping[str, Sequence[str]], runs: Path = RUNS) -> list[Trial]:
    """Train variants of a config one after the other, on the same ranks: `await notebook.compare(config, {...})`.

    Prints the variant that is being trained.

    Args:
        variants: {label: `key=value` overrides}.

    Raises:
        InputError: A variant is wrong. Nothing was started.
        RuntimeError: A variant failed; the message has the cause.
    """
    run = trials.create(config, variants, runs)
    trials.start(run)
    try:
        await _print_progress(run)
        await ended(run)
    except BaseException:  # the cell was interrupted: the remaining variants are not needed
        processes.terminate(run)
        raise
    return trials.read(run)


async def _print_progress(run: RunDir) -> None:
    """Print the progress of a run until it has ended."""
    reader = EventReader(run.events_file)
    while processes.alive(run):
        for event in reader.read():
            if isinstance(event, StatusEvent) and event.total and event.done < event.total:
                say(f"{event.done + 1} of {event.total}: {event.message}")
        await asyncio.sleep(POLL_S)


__all__ = ["Table", "exercise", "gallery"]
