"""State and actions of the page, without its HTML: presets, the draft, runs and the queue of one folder of runs.

See DECISIONS 118.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from app.data.caption_lengths import Lengths
from app.data.data_folders import DataFolders
from app.data.folders import HalfTyped, Picker, Recent
from app.data.looks import Looks
from app.data.scans import ScanResult, Scans
from app.data.thumbnails import Thumbnails
from app.data.upload.uploads import Uploads
from app.form import draft as form
from app.form.draft import Checked, Draft
from app.form.earlier_runs import EarlierRuns
from app.form.fit_preview import FitPreviews, Question
from app.form.model_choices import ModelChoice, ModelChoices
from app.form.plan_preview import PlanPreview, PlanPreviews
from app.machine import Machine
from app.runs.live import Live
from app.runs.monitor import Follower, explained, find_runs
from app.runs.results import Results
from app.web.served_files import Downloads
from trainer.config.fields import all_names, label
from trainer.config.foreign.base_models import nearest_preset
from trainer.config.load import ConfigError, dump_config, load_config, stage_configs
from trainer.config.presets import FIRST_PRESET, find_presets
from trainer.config.sections import NAME_HELP, NAME_PATTERN
from trainer.launcher import commands, preflight, rehearsal, torchrun
from trainer.launcher.jobs.downloads import Downloads as ModelDownloads
from trainer.launcher.queue import POLL_S, Entry, Queue
from trainer.run import manifest
from trainer.run import process as processes
from trainer.run.folder import RunDir, guard_cache, is_run, shared_cache
from trainer.run.manifest import Wanted
from trainer.system import files, gpus
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu, visible
from trainer.system.installation import PRESETS

PRIVATE = ("drafts", "thumbnails", "downloads", "queue", "presets")
"""Subfolders of the runs folder with mode 0700: they hold copies of images, captions and configs."""
GPUS_EVERY_S = 3.0
MOST_FOLLOWED = 16
"""Runs whose steps are kept in memory: those requested last."""

SAME_CLICK_S = 5.0
"""A second start of the same draft within this time is taken for a double click."""


@dataclass(frozen=True)
class _Start:
    draft: Draft
    at: float
    run: RunDir


@dataclass(frozen=True)
class _Export:
    """An export that was started here."""

    checkpoint: Path
    process: subprocess.Popen[bytes]


@dataclass(frozen=True)
class _Kept:
    """The content of `draft.json`."""

    preset: str
    values: dict[str, Any]


def _by_field(problems: Sequence[str]) -> dict[str, str]:
    """The problems of a scan by the field that a sentence begins with, or that of the images."""
    found: dict[str, list[str]] = {}
    for sentence in problems:
        field, _, rest = sentence.partition(": ")
        name, text = (field, rest) if field in all_names() else ("data.path", sentence)
        found.setdefault(name, []).append(text)
    return {name: "\n".join(texts) for name, texts in found.items()}


def _path(draft: Draft) -> object:
    return draft.values.get("data.path")


_KEPT = TypeAdapter(_Kept)


class Studio:
    """One folder of runs. Several pages and commands may use it at once.

    Attributes:
        unwritable: Why nothing can be written to the folder; "" when it can.
        queue_problem: Why the queue's runs cannot be started; "" when they can.
        draft_problem: Why the saved draft could not be read; "" when it could.
    """

    def __init__(self, runs: Path, presets: Path = PRESETS) -> None:
        self.runs = runs.absolute()
        self.queue = Queue(self.runs)
        self.thumbnails = Thumbnails(self.runs / "thumbnails")
        self.downloads = Downloads(self.runs / "downloads")
        self.unwritable = ""
        self.scans = Scans()
        self.lengths = Lengths(self.runs)
        self.looks = Looks(self.runs)
        self.earlier = EarlierRuns(self.runs)
        self.plan_previews = PlanPreviews(self.runs)
        self.fits = FitPreviews(self.runs)
        self._shipped = presets
        self.own_presets = self.runs / "presets"
        self.models = ModelChoices(self.runs)
        self.results = Results()
        self.model_downloads = ModelDownloads(self.runs / "drafts" / "models")
        self.picker = Picker((Path.home(), Path.cwd(), self.runs.parent))
        self.uploads = Uploads(DataFolders(self.picker, self.runs), self.runs / "drafts" / "uploads")
        self.half_typed = HalfTyped()
        self._typed: tuple[Draft, Draft] | None = None  # before its folder of images was typed, and so far
        self.recent = Recent(self.runs / "drafts" / "folders.json")
        self._drafts = self.runs / "drafts"
        self._lock = threading.Lock()
        self._followers: dict[Path, Follower] = {}
        self._exports: dict[Path, _Export] = {}
        self._last_start: _Start | None = None
        self._unsaved: Draft | None = None
        self._last_formed: tuple[tuple[Path, int, int, str], Checked] | None = None
        self._draft_lock = threading.Lock()
        self._gpus: tuple[float, list[Gpu]] = (-math.inf, [])
        self.live = Live(self.runs, self.follower)
        self.machine = Machine(self.runs)
        self.queue_problem = ""
        self.draft_problem = ""

    def prepare(self) -> None:
        """Create the private folders and restrict them to their owner. Sets `unwritable` when that fails."""
        try:
            for folder in PRIVATE:
                files.make_private(self.runs / folder)
            files.make_private_if_new(self.runs / "cache")  # one that exists may be shared on purpose
            tags = self.runs / "tags.json"
            if tags.exists() and tags.stat().st_uid == os.geteuid():
                tags.chmod(files.private_mode(self.runs))
            files.replace(self._drafts / "probe", b"x")
        except OSError as error:
            self.unwritable = (
                f"{error.filename or self.runs} cannot be written ({error.strerror}): "
                "runs can be viewed, but nothing is saved or started; "
                "make it writable, or free some space, and start the page again."
            )
            self._scratch = tempfile.TemporaryDirectory(prefix="shardstudio-")  # removed when this process ends
            self.thumbnails = Thumbnails(Path(self._scratch.name) / "thumbnails")
            self.downloads = Downloads(Path(self._scratch.name) / "downloads")
        else:
            (self._drafts / "probe").unlink()
            processes.remove_deleted(self.runs)

    def presets(self) -> dict[str, Path]:
        """Return {name: file}: the quickstart first, then those saved here, then the others."""
        return find_presets(self.own_presets, self._shipped)

    def save_preset(self, checked: Checked, name: str) -> Path:
        """Save a config as a preset and return its file. Raises InputError for a name that is invalid or taken."""
        if not re.fullmatch(NAME_PATTERN, name):
            raise InputError(f"'{name}' is not {NAME_HELP}")
        file = self.own_presets / f"{name}.yaml"
        if name in self.presets():
            raise InputError(f"'{name}' is already the name of a preset; choose another")
        try:
            files.create(files.make_private(self.own_presets) / file.name, dump_config(checked.config))
        except FileExistsError as error:
            raise InputError(f"'{name}' is already the name of a preset; choose another") from error
        return file

    def name_of(self, preset: Path) -> str:
        """Return the name of a preset file, or of the run whose config it is."""
        return preset.stem if preset in self.presets().values() else preset.parent.name

    def preset(self, name: str) -> Path:
        """Return the file of a preset, or the config of a run. Raises InputError when `name` is neither."""
        return self.presets().get(name) or self.run(name).settings_file

    def draft(self) -> Draft:
        """Return the saved draft, or the quickstart where there is none or it cannot be read (see `draft_problem`)."""
        if self._unsaved is not None:
            return self._unsaved
        self.draft_problem = ""
        try:
            kept = files.read_json(self._drafts / "draft.json", _KEPT)
            draft = Draft(self.preset(kept.preset), kept.values)
            self._formed(draft)
        except FileNotFoundError:
            return Draft(self.presets()[FIRST_PRESET])
        except (InputError, OSError) as error:  # damaged, or made from a run or version that no longer exists
            self.draft_problem = f"The saved form cannot be read: {explained(error)}"
            return Draft(self.presets()[FIRST_PRESET])
        return draft

    def change_draft(self, change: Callable[[Draft], Draft]) -> Draft:
        """Change the draft that all windows share, and save it.

        Where it cannot be saved, it is kept in memory and `draft_problem` says so.
        """
        with self._draft_lock, contextlib.ExitStack() as stack:
            if not self.unwritable:
                with contextlib.suppress(OSError):  # the save below says why
                    stack.enter_context(files.locked(files.make_private(self._drafts) / "draft.lock"))
            draft = change(self.draft())
            self._save_draft(draft)
        return draft

    def model_choices(self) -> list[ModelChoice]:
        """Return the base models to choose from, with their presets judged for this machine."""
        return self.models.all(self.presets(), self.own_presets, self.gpus())

    def change_images(self, change: Callable[[Draft], Draft], is_typing: bool = False) -> dict[str, str]:
        """Change the draft as `change_draft` does; companions of former images go with these.

        Args:
            change: The change.
            is_typing: The folder of images may be half typed: its former companions stay until it is not.

        Returns:
            {field: path} of the companions that went.
        """
        gone: dict[str, str] = {}

        def changed(draft: Draft) -> Draft:
            before, half_typed = self._typed or (draft, draft)
            if (draft.preset, _path(draft)) != (half_typed.preset, _path(half_typed)):  # changed by something else
                before = draft
            after = change(draft)
            # Another window may type the folder while this one changes something else.
            if is_typing or self.half_typed.holds({"data.path": _path(after)}):
                self._typed = before, after
                return after
            self._typed = None
            kept, found = form.without_companions(after, before)
            gone.update(found)
            return kept

        self.change_draft(changed)
        return gone

    def save_draft(self, draft: Draft) -> None:
        """Replace the draft, as `change_draft` does."""
        self.change_draft(lambda _: draft)

    def draft_without(self, run: RunDir) -> Draft | None:
        """Return the draft as edits of a preset where it begins with the settings of a run, else None.

        Without the run, which is to be deleted, it could not be read, and what was typed in it would be lost.
        """
        draft = self.draft()
        if draft.preset.parent != run.path:
            return None
        checked = form.check(draft)
        presets = self.presets()
        file = presets.get(nearest_preset(checked.config.model), presets[FIRST_PRESET])
        same = self.from_yaml(form.check(Draft(file)), dump_config(checked.config))
        wrong = {name: value for name, value in draft.values.items() if name in checked.errors}
        return Draft(file, {**same.values, **wrong})

    def undo(self, former: Draft) -> dict[str, Any]:
        """Return what `new_run.restore` takes to bring a former draft back."""
        return {"preset": self.name_of(former.preset), "values": dict(former.values)}

    def _save_draft(self, draft: Draft) -> None:
        kept = _KEPT.dump_json(_Kept(self.name_of(draft.preset), dict(draft.values)))
        self._unsaved = draft
        if self.unwritable:
            return
        try:
            if (self._drafts / "draft.json").is_dir():
                files.put_aside(self._drafts / "draft.json")
            files.replace(self._drafts / "draft.json", kept)
        except OSError as error:
            self.draft_problem = f"The form cannot be saved ({error.strerror}): free some space."
        else:
            self._unsaved, self.draft_problem = None, ""

    def from_yaml(self, checked: Checked, text: str) -> Draft:
        """Return the draft of a config in YAML. Raises ConfigError, which names the lines."""
        return form.from_yaml(checked, text, files.make_private(self._drafts) / "config.yaml")

    def check(self, draft: Draft, is_fresh: bool = False, is_typing: bool = False) -> Checked:
        """Check a draft, its files, this machine and its images.

        Args:
            is_fresh: Read the images again, because they may have changed.
            is_typing: A path is being typed: its folder is not read yet.

        Raises:
            ConfigError: The preset itself is wrong.
        """
        named = form.check_with_files(self._formed(draft))
        checked = form.check_machine(named, self.runs, self._listed_gpus(), self.plan_previews.unplaced)
        if any(name.startswith("data.") for name in checked.errors):
            return checked
        if is_typing:
            return replace(checked, waiting="The folder is read when you leave its field.")
        found = self.scans.of(checked.config, is_fresh)
        if not found.is_complete:
            return replace(checked, waiting=f"Reading the images: {found.num_files} files so far.")
        return replace(checked, errors=_by_field(found.problems) | dict(checked.errors), is_scanned=True)

    def check_with_images(self, draft: Draft) -> tuple[Checked, ScanResult]:
        """Check a draft, and return what was found in its folder too: nothing complete while that is typed."""
        is_typing = self.half_typed.holds(draft.values)
        checked = self.check(draft, is_typing=is_typing)
        return checked, ScanResult(0, is_complete=False) if is_typing else self.scans.of(checked.config)

    def _formed(self, draft: Draft) -> Checked:
        """`form.check`, done once for a draft that is looked at again. Raises ConfigError as it does."""
        try:
            stat = draft.preset.stat()
        except OSError:
            return form.check(draft)  # it says why
        # 1, 1.0 and true are equal, but not equally valid.
        key = draft.preset, stat.st_mtime_ns, stat.st_size, repr(draft.values)
        known = self._last_formed
        if known is None or known[0] != key:
            self._last_formed = known = key, form.check(draft)
        return known[1]

    def plan(self, checked: Checked, target: str) -> PlanPreview:
        """Return the memory plan of a config for one of `plan_preview.TARGETS`."""
        return self.plan_previews.of(checked.config, target, self.gpus())

    def fit_question(self, draft: Draft, target: str) -> tuple[Question | None, str]:
        """Return what a search for settings that fit would be about, and why it is not possible; "" where it is.

        Args:
            draft: The form.
            target: One of `plan_preview.TARGETS`.
        """
        formed = self._formed(draft)
        question = self.fits.question(formed.config, target, self.gpus())
        if formed.config.stages:
            return question, "This run has stages: launch.py --fit finds the settings of each."
        if formed.errors:
            return question, "Correct the errors of the form first."
        if question and not self.plan_previews.of(formed.config, target, self.gpus()).plan:
            return question, "The memory of this combination is not known yet."
        return question, ""

    def planned_seconds(self, checked: Checked, target: str, steps: Sequence[int | None]) -> tuple[float, float] | None:
        """Return the least and most seconds of all steps; None where a length or the time of a step is not known.

        Args:
            checked: The config.
            target: One of `plan_preview.TARGETS`.
            steps: Steps of each stage; None where they are not known.
        """
        low = high = 0.0
        for part, number in zip(stage_configs(checked.config), steps, strict=True):
            found = None if number is None else self.plan_previews.of(part, target, self.gpus()).plan
            if number is None or found is None or found.time is None:
                return None
            low, high = low + number * found.time.low, high + number * found.time.high
        return low, high

    def verify_plan(self, checked: Checked, target: str) -> None:
        """Start comparing the plan with a trace of the whole model."""
        self.plan_previews.verify(checked.config, target, self.gpus())

    def timesteps(self, draft: Draft) -> list[dict[str, Any]]:
        """Run `trainer.data.timesteps` in a separate process and return its rows. Raises InputError when it fails."""
        file = files.make_private(self._drafts) / "timesteps.yaml"
        files.replace(file, dump_config(form.check(draft).config))
        argv = [sys.executable, "-m", "trainer.data.timesteps", str(file)]
        answer = subprocess.run(argv, capture_output=True, text=True, check=False, env=processes.worker_environment())
        if answer.returncode:
            lines = answer.stderr.strip().splitlines() or ["the process ended without a message"]
            raise InputError(f"The timesteps cannot be computed: {lines[-1]}")
        rows: list[dict[str, Any]] = json.loads(answer.stdout)
        return rows

    def enqueue(self, draft: Draft, cards: str) -> Entry:
        """Add a run of the draft to the queue.

        Args:
            cards: Comma-separated indices of GPUs; empty for all.

        Raises:
            InputError: The draft or `cards` is wrong.
        """
        if not re.fullmatch(r"\s*(\d+\s*(,\s*\d+\s*)*)?", cards):
            raise InputError(f"GPUs: '{cards}' is not a list of numbers; write 0,1 or leave it empty for all")
        loaded = load_config(draft.preset, draft.overrides)
        guard_cache(shared_cache(loaded.config, self.runs))
        preflight.check(loaded)
        return self.queue.add(loaded.config, [int(gpu) for gpu in cards.split(",") if gpu.strip()])

    def start(self, draft: Draft) -> RunDir:
        """Start a run of the draft. A double click starts only one. Raises InputError when the draft is wrong."""
        with self._lock:
            last = self._last_start
            is_again = last and last.draft == draft and time.monotonic() - last.at < SAME_CLICK_S
            if last and is_again and last.run.path.is_dir():
                return last.run
            run = preflight.new_run(load_config(draft.preset, draft.overrides), self.runs)
            config = run.config()
            torchrun.start(config, run)
            self._last_start = _Start(draft, time.monotonic(), run)
            if config.data.path:
                with contextlib.suppress(OSError):  # the run is under way; the list of folders is only a convenience
                    self.recent.add(config.data.path)
            return run

    def rehearse(self, draft: Draft) -> RunDir:
        """Rehearse a draft with the demo model; a second click shows the first one's rehearsal.

        Raises:
            InputError: As `rehearsal.begin`, or what is typed for it is wrong.
        """
        with self._lock:
            checked = form.check(draft)
            typed = [name for name in checked.errors if name.startswith("data.") or name == "sample.prompts"]
            if typed:
                raise InputError("\n".join(f"{label(name)}: {checked.errors[name]}" for name in typed))
            running = rehearsal.running(self.runs)
            if running and files.read(running.rehearsed_file) == dump_config(checked.config).encode():
                return running
            try:
                return rehearsal.begin(checked.loaded, self.runs).run
            except ConfigError as error:  # without the lines of a file, which the page has not shown
                raise InputError("\n".join(map(str, error.problems)) or str(error)) from error

    def resume(self, run: RunDir) -> None:
        """Continue an ended run. Raises InputError when it is running or cannot be continued."""
        with self._lock:
            torchrun.start(preflight.continued_run(run, ()).config, run)

    def extend(self, run: RunDir, steps: int) -> None:
        """Let a run that has ended go on for more steps, in its last stage where it has stages.

        Raises:
            InputError: It is running or cannot go on.
        """
        if steps < 1:
            raise InputError(f"{steps} steps; give at least 1 more")
        with self._lock:
            torchrun.start(preflight.continued_run(run, [_with_more_steps(run, steps)]).config, run)

    def branch(self, run: RunDir, step: int, changes: Sequence[str]) -> RunDir:
        """Let a new run go on from a checkpoint of a run, and return it.

        Args:
            run: The run that has the checkpoint. It stays as it is.
            step: Step of the checkpoint.
            changes: Fields of its config to change, as `key=value`.

        Raises:
            InputError: The checkpoint is missing, or does not allow these changes.
        """
        with self._lock:
            new, loaded = preflight.branched_run(run, step, changes)
            torchrun.start(loaded.config, new)
            return new

    def find_runs(self) -> list[RunDir]:
        """Return all runs, newest start first."""
        return find_runs(self.runs)

    def run(self, name: str | None) -> RunDir:
        """Return the run of this name. Raises InputError when there is no such run, or as `RunDir.guard` does."""
        run = self.found(name)
        run.guard()
        return run

    def found(self, name: str | None) -> RunDir:
        """Return the run of this name, whatever is in its folder. Raises InputError when there is none."""
        if not name or Path(name).name != name or name.startswith((".", "-")) or not name.isprintable():
            raise InputError(f"{name!r} is not the name of a run")
        if not is_run(self.runs / name):
            raise InputError(f"{self.runs / name}: not a run folder; name one of the runs in {self.runs}")
        return RunDir(self.runs / name)

    def follower(self, run: RunDir) -> Follower:
        """Return the follower of a run, which all browsers share."""
        with self._lock:
            follower = self._followers.pop(run.path, None)
            if follower is None or follower.is_outdated():
                follower = Follower(run)
            self._followers[run.path] = follower
            for path in list(self._followers)[:-MOST_FOLLOWED]:
                del self._followers[path]
            return follower

    def export(self, run: RunDir, what: str, format: str, dtype: str, wanted: Wanted = "newest") -> None:
        """Start exporting a checkpoint. Raises InputError for a combination that is not supported."""
        with self._lock:
            if self.exporting(run) is not None:
                raise InputError(f"{run.path.name} is being exported; wait until it is done")
            cfg = run.config().exporting(what, format, dtype)
            checkpoint = manifest.to_export(run, wanted)
            process = commands.begin_export(run, cfg, manifest.steps_in(checkpoint))
            self._exports[run.path] = _Export(checkpoint, process)

    def exporting(self, run: RunDir) -> Path | None:
        """Return the checkpoint of an export that this process started and that goes on; None without one."""
        export = self._exports.get(run.path)
        return export.checkpoint if export is not None and export.process.poll() is None else None

    def at_work(self) -> list[tuple[RunDir, str, float | None]]:
        """Return what this process knows to go on for runs that have ended: the run, a word, and the share that is
        done, if it is known."""
        exports = [(RunDir(path), "exporting", None) for path in list(self._exports) if self.exporting(RunDir(path))]
        return [*self.results.running(), *exports]

    def export_state(self, run: RunDir) -> str:
        """Return the state of the run's export as a sentence, "" without one. Raises InputError when it failed."""
        export = self._exports.get(run.path)
        if export is None:
            return ""
        step = f"step {manifest.step_of(export.checkpoint):,}"
        code = export.process.poll()
        if code is None:
            return f"Exporting {step}; the file is verified before it gets its name."
        if code:
            raise InputError(commands.export_output(run, code))
        return f"Exported {step}, and verified."

    def gpus(self) -> list[Gpu]:
        """Return the state of the GPUs that runs started here may use. Empty where nvidia-smi does not answer."""
        with contextlib.suppress(InputError):  # CUDA_VISIBLE_DEVICES is wrong: the form shows it
            return visible.visible(self._listed_gpus())
        return []

    def _listed_gpus(self) -> list[Gpu]:
        """Return the state of all GPUs of the machine, read at most every GPUS_EVERY_S."""
        with self._lock:
            read_at, states = self._gpus
            if time.monotonic() - read_at < GPUS_EVERY_S:
                return states
            self._gpus = (time.monotonic(), states)  # reading may take seconds: other threads get the last states
        states = []
        with contextlib.suppress(InputError):  # the page Machine shows what is wrong
            states = gpus.read()
        self._gpus = (time.monotonic(), states)
        return states

    def run_queue(self) -> threading.Thread:
        """Start the queue's runs in the background for as long as this process lives (see `queue_problem`)."""
        worker = threading.Thread(target=self._work_queue, name="queue", daemon=True)
        worker.start()
        return worker

    def _work_queue(self) -> None:
        while True:
            try:
                with self.queue.starting() as may_start:
                    while may_start:
                        self.queue.start_next()
                        self.queue_problem = ""
                        time.sleep(POLL_S)
            except Exception as error:  # noqa: BLE001 - shown on the page, and retried: the disk may have been full
                self.queue_problem = str(error) or type(error).__name__
            time.sleep(POLL_S)


def _with_more_steps(run: RunDir, steps: int) -> str:
    """Return the change `key=value` that gives a run more steps; of a run given in epochs, more than it has trained."""
    config = run.config()
    planned = config.stage_steps[-1]
    more = steps + (manifest.newest_step(run.checkpoints) if planned is None else planned)
    if not config.stages:
        return f"train.steps={more}"
    parts = [stage.model_dump(mode="json") for stage in config.stages]
    parts[-1]["set"] = {key: value for key, value in parts[-1]["set"].items() if key != "train.epochs"}
    parts[-1]["set"] |= {"train.steps": more}
    return f"stages={json.dumps(parts)}"
