"""What the page knows and does, whatever shows it: presets, the draft, runs and the queue of one folder of runs."""

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from app import form
from app.caption_lengths import Lengths
from app.form import Checked, Draft
from app.monitor import Follower, explained, find_runs
from app.plan_preview import Preflight, Preflights
from app.scans import Scans
from app.web.served_files import Downloads, Thumbnails
from trainer.config import files
from trainer.config.errors import InputError
from trainer.config.installation import PRESETS
from trainer.config.load import dump_config, load_config
from trainer.config.presets import FIRST_PRESET, find_presets
from trainer.config.sections import NAME_HELP, NAME_PATTERN
from trainer.launcher import commands, preflight, torchrun
from trainer.launcher.queue import POLL_S, Entry, Queue
from trainer.metrics import gpus
from trainer.metrics.gpus import Gpu
from trainer.run import process as processes
from trainer.run.folder import RunDir, is_run

PRIVATE = ("drafts", "thumbnails", "downloads", "queue", "presets")
"""Folders of the runs folder that only their owner looks into: they hold copies of pictures, captions and configs."""
GPUS_EVERY_S = 3.0
MOST_FOLLOWED = 16
"""Runs whose steps are kept in memory: those that were asked for last."""

SAME_CLICK_S = 5.0
"""A second start of the same draft within this time is the second half of a double click."""


@dataclass(frozen=True)
class _Start:
    draft: Draft
    at: float
    run: RunDir


@dataclass(frozen=True)
class _Kept:
    """What `draft.json` holds."""

    preset: str
    values: dict[str, Any]


_KEPT = TypeAdapter(_Kept)


class Studio:
    """One folder of runs. Several pages and commands may use it at once."""

    def __init__(self, runs: Path, presets: Path = PRESETS) -> None:
        self.runs = runs.absolute()
        self.queue = Queue(self.runs)
        self.thumbnails = Thumbnails(self.runs / "thumbnails")
        self.downloads = Downloads(self.runs / "downloads")
        self.unwritable = ""
        self.scans = Scans()
        self.lengths = Lengths(self.runs)
        self.preflights = Preflights(self.runs)
        self._shipped = presets
        self._own = self.runs / "presets"
        self._drafts = self.runs / "drafts"
        self._lock = threading.Lock()
        self._followers: dict[Path, Follower] = {}
        self._exports: dict[Path, subprocess.Popen[bytes]] = {}
        self._last_start: _Start | None = None
        self._gpus: tuple[float, list[Gpu]] = (-math.inf, [])
        self.queue_trouble = ""
        self.draft_trouble = ""

    def claim(self) -> None:
        """Close what only the owner looks into. Where nothing can be written, `unwritable` says why afterwards."""
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
                "runs can be looked at, nothing is saved or started; "
                "make it writable, or free some space, and start the page again."
            )
            self._scratch = tempfile.TemporaryDirectory(prefix="shardstudio-")  # removed when this process ends
            self.thumbnails = Thumbnails(Path(self._scratch.name) / "thumbnails")
            self.downloads = Downloads(Path(self._scratch.name) / "downloads")
        else:
            (self._drafts / "probe").unlink()

    def presets(self) -> dict[str, Path]:
        """{name: file}: the quickstart first, then what was saved here, then the others."""
        return find_presets(self._own, self._shipped)

    def save_preset(self, checked: Checked, name: str) -> Path:
        """Keep a config as a preset. Raises InputError for no name, or one that is taken."""
        if not re.fullmatch(NAME_PATTERN, name):
            raise InputError(f"'{name}' is not {NAME_HELP}")
        file = self._own / f"{name}.yaml"
        if name in self.presets():
            raise InputError(f"'{name}' is the name of a preset already; take another")
        try:
            files.create(files.make_private(self._own) / file.name, dump_config(checked.config))
        except FileExistsError as error:
            raise InputError(f"'{name}' is the name of a preset already; take another") from error
        return file

    def name_of(self, preset: Path) -> str:
        """The name of a preset, or of the run whose config serves as one."""
        return preset.stem if preset in self.presets().values() else preset.parent.name

    def preset(self, name: str) -> Path:
        """The file of a preset, or the config of a run. Raises InputError when there is neither."""
        return self.presets().get(name) or self.run(name).config_file

    def draft(self) -> Draft:
        """What was typed last, also before a restart; the quickstart at first, and where that cannot be read.

        `draft_trouble` then says why.
        """
        self.draft_trouble = ""
        try:
            kept = files.read_json(self._drafts / "draft.json", _KEPT)
            draft = Draft(self.preset(kept.preset), kept.values)
            form.check(draft)
        except FileNotFoundError:
            return Draft(self.presets()[FIRST_PRESET])
        except (InputError, OSError) as error:  # damaged, or of a run or a version that is gone
            self.draft_trouble = f"What was typed last cannot be shown: {explained(error)}"
            return Draft(self.presets()[FIRST_PRESET])
        return draft

    def keep_draft(self, draft: Draft) -> None:
        """Save what is typed, where anything can be saved."""
        if self.unwritable:
            return
        kept = _KEPT.dump_json(_Kept(self.name_of(draft.preset), dict(draft.values)))
        folder = files.make_private(self._drafts)
        with files.locked(folder / "draft.lock"):
            if (folder / "draft.json").is_dir():
                files.put_aside(folder / "draft.json")
            files.replace(folder / "draft.json", kept)

    def from_yaml(self, checked: Checked, text: str) -> Draft:
        """The draft that is this YAML. Raises ConfigError naming the lines."""
        return form.from_yaml(checked, text, files.make_private(self._drafts) / "config.yaml")

    def look(self, draft: Draft, is_fresh: bool = False) -> Checked:
        """A draft with what is wrong with it, its files and its images. Raises ConfigError for a wrong preset.

        is_fresh: whether the images may have changed since they were read.
        """
        checked = form.check_with_files(form.check(draft))
        if checked.errors:
            return checked
        found = self.scans.of(checked.config, is_fresh)
        if not found.is_complete:
            return replace(checked, waiting=f"The images are being read: {found.num_files} files so far.")
        return replace(checked, errors={"data.path": "\n".join(found.problems)}) if found.problems else checked

    def preflight(self, checked: Checked, place: str) -> Preflight:
        """What the run takes on GPUs of this machine or others. place: one of `plan_preview.PLACES`."""
        return self.preflights.of(checked.config, place, self.gpus())

    def verify(self, checked: Checked, place: str) -> None:
        """Begin to compare that with a trace of the whole model."""
        self.preflights.verify(checked.config, place, self.gpus())

    def recipe(self, draft: Draft) -> list[dict[str, Any]]:
        """The rows of `trainer.plan.timesteps`, computed by a process of its own. Raises InputError when it fails."""
        file = files.make_private(self._drafts) / "recipe.yaml"
        files.replace(file, dump_config(form.check(draft).config))
        argv = [sys.executable, "-m", "trainer.plan.timesteps", str(file)]
        answer = subprocess.run(argv, capture_output=True, text=True, check=False, env=processes.worker_environment())
        if answer.returncode:
            lines = answer.stderr.strip().splitlines() or ["it ended without a message"]
            raise InputError(f"The recipe cannot be computed: {lines[-1]}")
        rows: list[dict[str, Any]] = json.loads(answer.stdout)
        return rows

    def enqueue(self, draft: Draft, cards: str) -> Entry:
        """Put a run of the draft into the queue. cards: indices of GPUs parted by commas, empty for all.

        Raises InputError when anything is wrong with either.
        """
        if not re.fullmatch(r"\s*(\d+\s*(,\s*\d+\s*)*)?", cards):
            raise InputError(f"GPUs: '{cards}' is no list of numbers; write 0,1 or leave it empty for all")
        loaded = load_config(draft.preset, draft.overrides)
        preflight.check(loaded)
        return self.queue.add(loaded.config, [int(gpu) for gpu in cards.split(",") if gpu.strip()])

    def start(self, draft: Draft) -> RunDir:
        """Start a run of the draft; a double click starts one. Raises InputError when anything is wrong with it."""
        with self._lock:
            last = self._last_start
            if last and last.draft == draft and time.monotonic() - last.at < SAME_CLICK_S:
                return last.run
            run = preflight.new_run(load_config(draft.preset, draft.overrides), self.runs)
            torchrun.start(run.config(), run)
            self._last_start = _Start(draft, time.monotonic(), run)
            return run

    def resume(self, run: RunDir) -> None:
        """Continue an ended run. Raises InputError when it runs or cannot be continued."""
        with self._lock:
            preflight.continued_run(run, ())
            torchrun.start(run.config(), run)

    def runs_found(self) -> list[RunDir]:
        """All runs, the one started last first."""
        return find_runs(self.runs)

    def run(self, name: str | None) -> RunDir:
        """The run of this name. Raises InputError for what is no run in this folder."""
        if not name or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise InputError(f"{name!r} is not the name of a run")
        if not is_run(self.runs / name):
            raise InputError(f"{self.runs / name}: not a run folder; name one of the runs in {self.runs}")
        return RunDir(self.runs / name)

    def follower(self, run: RunDir) -> Follower:
        """The follower of a run, shared by all who watch it."""
        with self._lock:
            follower = self._followers.pop(run.path, None) or Follower(run)
            self._followers[run.path] = follower
            for path in list(self._followers)[:-MOST_FOLLOWED]:
                del self._followers[path]
            return follower

    def export(self, run: RunDir, what: str, format: str, dtype: str) -> None:
        """Begin to export a run's newest checkpoint. Raises InputError when the three do not go together."""
        with self._lock:
            if run.path in self._exports and self._exports[run.path].poll() is None:
                raise InputError(f"{run.path.name} is being exported; wait for its end")
            self._exports[run.path] = commands.begin_export(run, run.config().exporting(what, format, dtype))

    def export_state(self, run: RunDir) -> str:
        """How the export that was begun here stands, empty when there was none. Raises InputError when it failed."""
        process = self._exports.get(run.path)
        if process is None:
            return ""
        code = process.poll()
        if code is None:
            return "Exporting; the file is read back before it gets its name."
        if code:
            raise InputError(commands.export_output(run, code))
        return "Exported and read back."

    def gpus(self) -> list[Gpu]:
        """What the GPUs do, asked at most every GPUS_EVERY_S. None where nvidia-smi does not answer."""
        with self._lock:
            asked, found = self._gpus
            if time.monotonic() - asked < GPUS_EVERY_S:
                return found
            self._gpus = (time.monotonic(), found)  # it may take seconds: the others get what was found last
        found = []
        with contextlib.suppress(InputError):  # the page Doctor tells what is wrong
            found = gpus.read()
        self._gpus = (time.monotonic(), found)
        return found

    def keep_queue_going(self) -> threading.Thread:
        """Start the queue's runs in the background for as long as this process lives.

        `queue_trouble` tells what keeps it from that.
        """
        worker = threading.Thread(target=self._work_queue, name="queue", daemon=True)
        worker.start()
        return worker

    def _work_queue(self) -> None:
        while True:
            try:
                with self.queue.starting() as may_start:
                    while may_start:
                        self.queue.start_next()
                        self.queue_trouble = ""
                        time.sleep(POLL_S)
            except Exception as error:  # noqa: BLE001 - shown on the page; it is tried again, as after a full disk
                self.queue_trouble = str(error) or type(error).__name__
            time.sleep(POLL_S)
