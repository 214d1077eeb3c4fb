"""The run folder: the only thing that the trainer, page, notebooks and command line share.

Readers follow its files and write only requests. Whether a run is alive is derived (`run.process`), never stored.

See DECISIONS 210.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
import traceback
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from trainer.config.load import dump_config, load_config
from trainer.config.schema import RunConfig
from trainer.system import files
from trainer.system.errors import InputError

Request = Literal["stop", "save", "sample"]
"""stop: stop after this step or the next, with a checkpoint.  save: save one now.  sample: write samples now."""


NOT_RUNS = frozenset({"cache", "captioning", "downloads", "drafts", "presets", "queue", "thumbnails"})
"""Names of other folders next to the run folders. None of them is ever taken for a run, whatever it holds."""
TRASH = ".trash-shardstudio"
"""Name of the folder in which deleted runs lie, next to the others, until it is emptied."""
FORMAT = 1
"""Version of a run folder: raise it when this version writes what version 0.1.0 misreads."""
CACHE_FORMAT = 1
"""Version of the examples in a cache, likewise."""
DRAFT = "draft-"
"""Start of the name of a file or folder in `export` that is not complete yet. Its final name follows."""
FORMER = ".former"
"""End of the name of an exported folder while a newer one takes its place."""


INITIAL_ADAPTER = "initial-adapter.safetensors"
"""File of a run, or of a stage, with what its adapter took out of the base at the start."""
LINK = (
    "a link. A run folder holds none: it may come from somebody else, and a run would write through it. Remove it, or "
    "put what it leads to in its place"
)
CACHE_LINK = (
    "a link out of the cache, through which a run would write, and delete files of others. Put what it leads to in its "
    "place, or set data.cache to another folder: that may be on another disk, or itself be a link"
)
CACHE_NAMES: Mapping[str, re.Pattern[str]] = {
    folder: re.compile(names, re.IGNORECASE | re.DOTALL)
    for folder, names in {
        "": r"base|examples|models|plans|\.?index.*\.sqlite.*",
        "base": r"\..*|[0-9a-f]{32}\.safetensors",
        "examples": r"\..*|format|[0-9a-f]{2}",
        "examples/.parts": ".*",
        "models": r"\.?(tiny|published)-.+-[0-9a-f]{12}(-.*)?",
        "plans": r"\..*|measured\.jsonl|.*\.json\.gz",
    }.items()
}
"""{folder of a cache: names in it under which runs write, remove or append to files}. Drafts begin with a dot. Other
names are those of the user, who may give a folder with much else. A file system may ignore case."""
LINKING = "wandb"
"""A folder in which wandb makes links to its own cache. It writes into new folders, which it names by the time."""
MOST_TITLE = 200
"""Characters of the name that a person gives to a run."""
MOST_REASON = 200
"""Longest part of an unexpected error that is shown, in characters."""
SETTLED_NS = 2 * 10**9
"""A folder that was changed longer ago has another time after its next change, on any file system."""


@dataclass(frozen=True)
class RunDir:
    """Paths and requests of one run. Made by `create` or `open`, which is the one door to a folder that exists."""

    path: Path

    @classmethod
    def create(cls, root: Path, cfg: RunConfig, at: Path | None = None) -> RunDir:
        """Make the folder of a new run, accessible to its owner only, with `config.yaml` in it.

        Args:
            root: Folder of the runs, in which `<name>-<time>-<random>` is made.
            cfg: Config of the run.
            at: Exact path of the run folder, instead.

        Raises:
            InputError: The folder is not empty or cannot be made.
        """
        path = at or root / f"{cfg.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        run = cls(path.absolute())
        is_new = not os.path.lexists(run.path)
        try:
            if run.path.exists() and any(run.path.iterdir()):
                raise InputError(
                    f"{run.path}: exists and is not empty; name a new folder, or continue it with --resume"
                )
            run.make_folders(cfg)
            run.path.chmod(0o700)  # the folder may have existed
            files.write_folder_format(run.path, FORMAT)
            files.replace(run.config_file, dump_config(cfg))
        except OSError as error:
            if is_new:
                shutil.rmtree(run.path, ignore_errors=True)
            remedy = freeing(run.path.parent) if error.errno == errno.ENOSPC else "choose another path"
            raise InputError(f"{path}: the run folder cannot be made ({error.strerror}); {remedy}") from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Return the run in an existing folder. Raises InputError if it is not a run folder, or as `guard` does."""
        run = cls(path.absolute())
        if not os.path.lexists(run.config_file):  # an unreadable config is reported when it is read
            raise InputError(f"{path}: not a run folder (it has no config.yaml); name a folder below runs/")
        run.guard()
        return run

    def guard(self) -> None:
        """Close the folder to others, and refuse one that leads elsewhere or is of another version.

        It may come from a stranger.

        Whatever reads, writes, exports, uploads or deletes in the folder calls it first. It is cheap: folders that have
        not changed are not read again. A folder that does not exist is not refused.

        Raises:
            InputError: Something in the folder is neither a file nor a folder. Through a link, a run would append to
                files of the user, replace, upload or delete them. FormatError: Another version made it.
        """
        with suppress(OSError):  # missing, or a disk that is read-only
            files.close_to_others(self.path)  # archives and copies have modes of their own
        folders = [str(self.path)]
        while folders:
            folder = folders.pop()
            try:
                changed = os.stat(folder).st_mtime_ns
            except OSError:  # removed a moment ago
                continue
            # A folder that changed just now may change again without a new time.
            is_settled = time.time_ns() - changed > SETTLED_NS
            inner, odd = (_listed if is_settled else _listed.__wrapped__)(folder, changed)
            if odd and os.path.islink(odd):
                raise InputError(f"{odd}: {LINK}")
            if odd:
                raise InputError(f"{odd}: {files.NOT_REGULAR}")
            folders += [path for path in inner if path != f"{self.path}/{LINKING}"]
        if os.path.lexists(self.config_file):
            files.check_folder_format(self.path, FORMAT, "continue the run with the version that made it")

    def make_folders(self, cfg: RunConfig | None = None) -> None:
        """Make those of the run's folders that are missing. Programs that copy a run often leave out empty folders.

        Args:
            cfg: The config; its stages have folders, too.

        Raises:
            OSError: A folder cannot be made.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.ranks, self.logs, self.samples, self.checkpoints, self.requests, self.export):
            folder.mkdir(exist_ok=True)
        for number, stage in enumerate(cfg.stages if cfg else (), 1):
            (self.stage_folder(number, stage.name) / "checkpoints").mkdir(parents=True, exist_ok=True)

    def complete_folders(self, cfg: RunConfig) -> None:
        """Do the same as `make_folders` in an existing run folder. Raises InputError if a folder cannot be made."""
        if not self.path.is_dir():
            raise InputError(self.gone)
        try:
            self.make_folders(cfg)
        except OSError as error:
            raise InputError(
                f"{error.filename}: the folder cannot be made ({error.strerror}); move away what is there, or make "
                f"{self.path} writable"
            ) from error

    def stage_folder(self, number: int, name: str) -> Path:
        """Return the folder of a stage. `number` counts from 1."""
        return self.path / "stages" / f"{number}-{name}"

    @property
    def stage_folders(self) -> list[Path]:
        """The folders of all stages, in order; empty for a run without stages."""
        numbers = {folder: folder.name.partition("-")[0] for folder in (self.path / "stages").glob("*-*")}
        numbered = [folder for folder, number in numbers.items() if number.isdecimal()]
        return sorted(numbered, key=lambda folder: int(numbers[folder]))

    @property
    def current_stage(self) -> int:
        """Index of the stage that is running, or of the last one; 0 without stages."""
        folders = self.stage_folders
        last = max(0, len(folders) - 1)
        return next((at for at, folder in enumerate(folders) if not weights_of(folder).exists()), last)

    def config(self) -> RunConfig:
        """Read the config that this run was last started with. Raises InputError if the file is damaged."""
        return load_config(self.config_file, ()).config

    def replace_config(self, cfg: RunConfig) -> Path:
        """Save another config as `config.yaml`. The former one is kept as `config-<n>.yaml`; its path is returned."""
        kept = (file.stem.partition("-")[2] for file in self.path.glob("config-*.yaml"))
        number = 1 + max((int(number) for number in kept if number.isdecimal()), default=0)
        former = self.path / f"config-{number}.yaml"
        files.replace(former, files.read(self.config_file))
        files.replace(self.config_file, dump_config(cfg))
        return former

    @property
    def config_file(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def rehearsed_file(self) -> Path:
        """The config of the run that this one rehearses with the demo model; only a rehearsal has it."""
        return self.path / "rehearsed.yaml"

    @property
    def is_rehearsal(self) -> bool:
        """Whether this run rehearses another one (`trainer.launcher.rehearsal`)."""
        return os.path.lexists(self.rehearsed_file)

    @property
    def certify_file(self) -> Path:
        """Mark of a run that ends after its certificate, before the first step."""
        return self.path / "certify-only"

    @property
    def settings_file(self) -> Path:
        """The config to begin another run with: that of the run that was rehearsed, else the run's own."""
        return self.rehearsed_file if self.is_rehearsal else self.config_file

    @property
    def title_file(self) -> Path:
        """The name that a person gave to the run. Its folder, config and files keep theirs."""
        return self.path / "title.txt"

    @property
    def own_title(self) -> str:
        """The name of the folder without the time and the random part that it ends with."""
        parts = self.path.name.rsplit("-", 3)
        is_made = len(parts) == 4 and parts[1].isdecimal() and parts[2].isdecimal()
        return parts[0] if is_made else self.path.name

    @property
    def title(self) -> str:
        """The run's name on every screen: that of `title_file`, which a stranger may have written, else its own."""
        if self.title_file.is_symlink():
            return self.own_title
        try:
            text = files.read(self.title_file, 4 * MOST_TITLE + 1)
        except (InputError, OSError):
            return self.own_title
        return one_line(text.decode("utf-8", errors="replace"))[:MOST_TITLE] or self.own_title

    @property
    def title_id(self) -> str:
        """The part of the folder's name that `title` does not say; "" where it says all."""
        return "" if self.title == self.path.name else self.path.name.removeprefix(f"{self.title}-")

    @property
    def identity_file(self) -> Path:
        """A random word, by which another node checks if it sees the same folder."""
        return self.path / ".identity"

    @property
    def launch_file(self) -> Path:
        """Process id, create time and argv of the latest start."""
        return self.path / "launch.json"

    @property
    def stores(self) -> Path:
        """Rendezvous files of the ranks on one machine: one per torchrun of the latest start, removed when it ends."""
        return self.path / "stores"

    @property
    def events_file(self) -> Path:
        """The events of the run, one JSON object per line (`trainer.run.events`)."""
        return self.path / "events.jsonl"

    @property
    def ranks(self) -> Path:
        """One file of RankLines per rank."""
        return self.path / "ranks"

    def rank_file(self, rank: int) -> Path:
        """The RankLines of one rank: memory and heartbeat."""
        return self.ranks / f"rank{rank}.jsonl"

    def machine_file(self, node: int) -> Path:
        """The loads of the machine of one node: its GPUs and host memory."""
        return self.ranks / f"machine{node}.jsonl"

    @property
    def logs(self) -> Path:
        """Output of torchrun and of every rank."""
        return self.path / "logs"

    @property
    def samples(self) -> Path:
        """Samples: images or text."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, such as `step-000100`; in a run with stages, those of the current stage."""
        folders = self.stage_folders
        return (folders[self.current_stage] if folders else self.path) / "checkpoints"

    @property
    def film(self) -> Path:
        """What was made of the samples to be shown (`trainer.run.samples.Film`)."""
        return self.path / "film"

    @property
    def requests(self) -> Path:
        """Requests to the running trainer: empty files, named as `Request`, and prompts (`trainer.run.prompts`)."""
        return self.path / "requests"

    @property
    def export(self) -> Path:
        """The exported weights."""
        return self.path / "export"

    @property
    def report(self) -> Path:
        """The report: one self-contained HTML file."""
        return self.path / "report.html"

    def own_file(self, path: str) -> Path:
        """Return a file that an event names; it need not exist. Raises InputError if it is outside the run folder."""
        try:
            file = (self.path / path).resolve()
        except RuntimeError as error:  # links in a loop
            raise InputError(f"{path}: not a file of {self.path.name}") from error
        if not file.is_relative_to(self.path.resolve()):
            raise InputError(f"{path}: not a file of {self.path.name}")
        return file

    def request(self, what: Request) -> None:
        """Send a request to the running trainer. Sending it twice is the same as once."""
        (self.requests / what).touch()

    def requested(self, what: Request) -> bool:
        """Whether there is such a request that was not cleared."""
        return (self.requests / what).exists()

    def clear(self, what: Request) -> None:
        """Remove a request, because it was handled."""
        (self.requests / what).unlink(missing_ok=True)

    @contextmanager
    def boundary(self) -> Iterator[None]:
        """Turn what the files of this run make the block raise into a sentence, so that no other run is hidden.

        Raises:
            InputError: Anything else than an InputError or OSError was raised: a file holds what no program writes.
        """
        try:
            yield
        except (InputError, OSError):
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            reason = f"{type(error).__name__}: {error}"[:MOST_REASON]
            raise InputError(f"{self.path}: holds what no program writes there ({reason}, in {where})") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this run: one process at a time starts it, derives its state or records its end.

        It is never held for long.

        Raises:
            InputError: `events.jsonl` is not a regular file, or the run was deleted.
        """
        flags = os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            lock = os.open(self.events_file, os.O_RDWR | os.O_CREAT | flags, 0o600)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP):
                raise InputError(f"{self.events_file}: {files.NOT_REGULAR}") from error
            if error.errno == errno.ENOENT:
                raise InputError(self.gone) from error
            if error.errno != errno.EROFS:
                raise
            lock = os.open(self.events_file, os.O_RDONLY | flags)  # it cannot be started, but its state can be derived
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._is_lock(lock):  # deleted, and perhaps made again, while this process waited
                raise InputError(self.gone)
            yield
        finally:
            os.close(lock)

    def _is_lock(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(self.events_file))
        except OSError:
            return False

    @property
    def gone(self) -> str:
        """The sentence about a folder that another process has deleted."""
        return f"{self.path}: the run folder was deleted or moved away"


@lru_cache(maxsize=4096)
def _listed(folder: str, changed_ns: int) -> tuple[list[str], str]:
    """Return the folders in a folder, and the first entry that is neither a folder nor a file; "" for none.

    changed_ns: When the folder was changed, with which the answer is remembered.
    """
    folders = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    return [], entry.path
    except OSError:  # removed a moment ago, or closed: whoever reads it says so
        return [], ""
    return folders, ""


def one_line(text: str) -> str:
    """Return a name as one line, without characters that move the cursor or turn the direction of writing; "" where
    nothing of it is seen."""
    line = " ".join(re.sub("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]", " ", text).split())
    is_seen = any(unicodedata.category(sign)[0] not in "CZ" and sign != "\u3164" for sign in line)
    return line if is_seen else ""


def is_run(path: Path) -> bool:
    """Whether a folder in the folder of runs is a run, whatever state its files are in."""
    if path.name in NOT_RUNS or path.name.startswith("."):
        return False
    has = {name: os.path.lexists(f"{path}/{name}") for name in ("config.yaml", "logs", "launch.json")}
    return sum(has.values()) >= 2  # two of three, so that a run is found even if one file was lost


def freeing(runs: Path) -> str:
    """Return how to free space in a folder of runs, as a part of a sentence. Deleted runs take theirs until the end."""
    try:
        has_deleted = any((runs / TRASH).iterdir())
    except OSError:
        has_deleted = False
    return (
        "free some space (the deleted runs, below the table Runs, can be emptied)" if has_deleted else "free some space"
    )


def weights_of(stage: Path) -> Path:
    """Return the folder of weights that a stage hands to the next one. It exists once the stage is done."""
    return stage / "weights"


def shared_cache(cfg: RunConfig, runs: Path) -> Path:
    """Return the folder where runs share encoded data, tiny models and plans: `data.cache`, or `cache` in `runs`."""
    return Path(cfg.data.cache) if cfg.data.cache else runs / "cache"


def guard_cache(cache: Path) -> None:
    """Refuse a cache that leads elsewhere or is of another version. It may have come with a stranger's preset.

    The cache itself may be a link, which the user made, and so may be names that no run uses. Single examples are not
    looked at, so that it is cheap.

    Args:
        cache: The folder that runs share. It need not exist.

    Raises:
        InputError: A link in it, of a name that runs use, leads out of it. FormatError: Another version made it.
    """
    for folder, names in CACHE_NAMES.items():
        with suppress(OSError), os.scandir(cache / folder) as entries:
            for entry in entries:
                is_used = entry.is_symlink() and names.fullmatch(entry.name)
                if is_used and files.leads_out(Path(entry.path), cache):
                    raise InputError(f"{entry.path}: {CACHE_LINK}")
    examples = cache / "examples"
    if any(examples.glob("[0-9a-f]" * 2)):
        remedy = f"remove {examples}, to encode the images again, or set data.cache to another folder"
        files.check_folder_format(examples, CACHE_FORMAT, remedy)
