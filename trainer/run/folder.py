"""The run folder: the only thing the trainer, page, notebooks and command line share.

Readers follow its files and write nothing but requests. Whether a run is alive is
derived (`run.process`), never stored.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.config import files
from trainer.config.errors import InputError
from trainer.config.load import dump_config, load_config
from trainer.config.schema import RunConfig

Request = Literal["stop", "save", "sample"]
"""stop: leave after this step with a checkpoint.  save: a checkpoint now.  sample: sample images now."""


NOT_RUNS = frozenset({"cache", "downloads", "drafts", "presets", "queue", "thumbnails"})
"""Names of folders next to those of the runs. None of them is ever taken for a run, whatever it holds."""


@dataclass(frozen=True)
class RunDir:
    """Paths and requests of one run. Made by `create` or `open`."""

    path: Path

    @classmethod
    def create(cls, root: Path, cfg: RunConfig, at: Path | None = None) -> RunDir:
        """Make the folder of a new run, readable by its owner only, with `config.yaml` in it.

        root: where the runs lie; the folder is named `<name>-<time>-<random>`.  at: this very folder instead.
        Raises InputError when the folder holds something already or cannot be made.
        """
        path = at or root / f"{cfg.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        run = cls(path.absolute())
        try:
            if run.path.exists() and any(run.path.iterdir()):
                raise InputError(
                    f"{run.path}: exists and is not empty; name a new folder, or continue it with --resume"
                )
            run.make_folders(cfg)
            run.path.chmod(0o700)  # one that was there, and empty
            files.replace(run.config_file, dump_config(cfg))
        except OSError as error:
            raise InputError(f"{path}: cannot be made a run folder ({error.strerror}); name another place") from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """The run in an existing folder. Raises InputError when there is none."""
        run = cls(path.absolute())
        if not os.path.lexists(run.config_file):  # one that cannot be read is named by who reads it
            raise InputError(f"{path}: not a run folder (it has no config.yaml); name a folder below runs/")
        return run

    def make_folders(self, cfg: RunConfig | None = None) -> None:
        """Make the folder, for its owner only, and those in it, where they are not there.

        cfg: a config whose stages have folders too.

        Whoever brings a run elsewhere often leaves the empty ones behind. Raises OSError where one cannot be made.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.ranks, self.logs, self.samples, self.checkpoints, self.requests, self.export):
            folder.mkdir(exist_ok=True)
        for number, stage in enumerate(cfg.stages if cfg else (), 1):
            (self.stage_folder(number, stage.name) / "checkpoints").mkdir(parents=True, exist_ok=True)

    def complete_folders(self, cfg: RunConfig) -> None:
        """As `make_folders`. Raises InputError where one cannot be made."""
        try:
            self.make_folders(cfg)
        except OSError as error:
            raise InputError(
                f"{error.filename}: cannot be made a folder ({error.strerror}); move away what is there, or make "
                f"{self.path} writable"
            ) from error

    def stage_folder(self, number: int, name: str) -> Path:
        """What one of its stages keeps. number: from 1."""
        return self.path / "stages" / f"{number}-{name}"

    @property
    def stage_folders(self) -> list[Path]:
        """Those of all stages, in their order; none for a run without stages."""
        folders = (self.path / "stages").glob("*-*")
        return sorted(folders, key=lambda folder: int(folder.name.partition("-")[0]))

    @property
    def current_stage(self) -> int:
        """The stage that is under way, or that was the last, counted from 0; 0 without stages."""
        folders = self.stage_folders
        last = max(0, len(folders) - 1)
        return next((at for at, folder in enumerate(folders) if not weights_of(folder).exists()), last)

    def config(self) -> RunConfig:
        """The config this run was last started with. Raises InputError when the file was damaged."""
        return load_config(self.config_file, ()).config

    def replace_config(self, cfg: RunConfig) -> Path:
        """Save another config as `config.yaml` and keep the former one as `config-<n>.yaml`, whose path is returned."""
        number = 1 + len(list(self.path.glob("config-*.yaml")))
        former = self.path / f"config-{number}.yaml"
        files.replace(former, files.read(self.config_file))
        files.replace(self.config_file, dump_config(cfg))
        return former

    @property
    def config_file(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def identity_file(self) -> Path:
        """A word by which a machine knows whether it sees this very folder."""
        return self.path / ".identity"

    @property
    def launch_file(self) -> Path:
        """Process id, create time and argv of the latest start."""
        return self.path / "launch.json"

    @property
    def stores(self) -> Path:
        """Where the ranks of one machine meet: a file for each torchrun of the latest start, gone after its end."""
        return self.path / "stores"

    @property
    def events_file(self) -> Path:
        """What happened, one JSON object per line (`trainer.run.events`)."""
        return self.path / "events.jsonl"

    @property
    def ranks(self) -> Path:
        """One file of RankLines per rank."""
        return self.path / "ranks"

    def rank_file(self, rank: int) -> Path:
        """Memory and heartbeat of one rank."""
        return self.ranks / f"rank{rank}.jsonl"

    @property
    def logs(self) -> Path:
        """Output of torchrun and of every rank."""
        return self.path / "logs"

    @property
    def samples(self) -> Path:
        """Sample images."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint, as `step-000100`; of the stage that is under way, where there are stages."""
        folders = self.stage_folders
        return (folders[self.current_stage] if folders else self.path) / "checkpoints"

    @property
    def requests(self) -> Path:
        """Files named after what is asked of the running trainer."""
        return self.path / "requests"

    @property
    def export(self) -> Path:
        """The exported weights."""
        return self.path / "export"

    @property
    def report(self) -> Path:
        """The self-contained page about the run."""
        return self.path / "report.html"

    def own_file(self, path: str) -> Path:
        """A file that an event names, whether it is there or not. Raises InputError for one outside of the folder."""
        try:
            file = (self.path / path).resolve()
        except RuntimeError as error:  # links in a loop
            raise InputError(f"{path}: not a file of {self.path.name}") from error
        if not file.is_relative_to(self.path.resolve()):
            raise InputError(f"{path}: not a file of {self.path.name}")
        return file

    def request(self, what: Request) -> None:
        """Ask the running trainer for something; asking twice is asking once."""
        (self.requests / what).touch()

    def requested(self, what: Request) -> bool:
        """Whether somebody asked for it and it was not cleared since."""
        return (self.requests / what).exists()

    def clear(self, what: Request) -> None:
        """Forget a request: it was answered."""
        (self.requests / what).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time starts this run, judges it or records its end. Never held for long.

        Raises InputError for what is not a file in the place of `events.jsonl`.
        """
        try:
            lock = os.open(self.events_file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP):
                raise InputError(f"{self.events_file}: {files.NOT_REGULAR}") from error
            if error.errno != errno.EROFS:
                raise
            lock = os.open(self.events_file, os.O_RDONLY | os.O_NONBLOCK)  # nobody can start it, but it can be judged
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def is_run(path: Path) -> bool:
    """Whether a folder below the runs is one, whatever state its files are in."""
    if path.name in NOT_RUNS or path.name.startswith("."):
        return False
    has = {name: os.path.lexists(f"{path}/{name}") for name in ("config.yaml", "logs", "launch.json")}
    return sum(has.values()) >= 2  # of three, so that one that was lost hides no run


def weights_of(stage: Path) -> Path:
    """What a stage leaves to the next one; it is there when the stage is done."""
    return stage / "weights"


def shared_cache(cfg: RunConfig, runs: Path) -> Path:
    """Where runs share encoded data, tiny models and plans: `data.cache`, or `cache` beside the run folders."""
    return Path(cfg.data.cache) if cfg.data.cache else runs / "cache"
