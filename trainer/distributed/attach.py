"""Attach a rank to its run: to rank 0's folder, or to a folder of its own where its machine does not see that one.

Every rank trains by rank 0's config, which it gets through the rendezvous store. A network file system that still shows
an older config, or a change that a rank requested before a restart, therefore means the same for all.
"""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from trainer.config.load import dump_config, load_config_text
from trainer.config.schema import RunConfig
from trainer.distributed.world import Rendezvous
from trainer.run import stages
from trainer.run.folder import RunDir, guard_cache, shared_cache
from trainer.run.stages import Stage
from trainer.system import files
from trainer.system.errors import InputError


@dataclass(frozen=True)
class RankRun:
    """The run as one rank sees it.

    Attributes:
        stage: The stage that is trained, or the whole of a run without stages.
        cache: Folder for encoded data.
        is_remote: No other machine sees the files of `run`.
    """

    run: RunDir
    stage: Stage
    cache: Path
    is_remote: bool

    @property
    def config(self) -> RunConfig:
        """The config that this rank trains by."""
        return self.stage.config


def attach(path: Path, rendezvous: Rendezvous) -> RankRun:
    """Find the run folder and the config of this rank.

    Args:
        path: The run folder of rank 0.

    Raises:
        InputError: The run folder does not exist, or its config is damaged; or the cache leads elsewhere.
    """
    if rendezvous.rank == 0:
        run = RunDir.open(path)
        stage = stages.current(run, run.config())
        cache = shared_cache(stage.config, run.path.parent)
        guard_cache(cache)
        rendezvous.store.set("config", dump_config(stage.config))
        rendezvous.store.set("stage", json.dumps([stage.number, stage.count, stage.name, stage.before]))
        rendezvous.store.set("folder", _identity(run))
        return RankRun(run, stage, cache, False)
    run = RunDir(path.absolute())
    cfg = load_config_text(rendezvous.store.get("config").decode(), (), run.config_file).config
    cache = shared_cache(cfg, run.path.parent)
    guard_cache(cache)  # that of another machine, which the launcher did not see
    number, count, name, before = json.loads(rendezvous.store.get("stage"))
    identity = rendezvous.store.get("folder")  # before looking for the file, which rank 0 writes first
    if run.identity_file.is_file() and files.read(run.identity_file) == identity:
        folder = run.stage_folder(number, name) if name else run.path
        return RankRun(run, Stage(number, count, name, cfg, before, folder), cache, False)
    if count > 1:
        raise InputError(
            f"stages: {socket.gethostname()} does not see {run.path}, through which a stage gets the weights of "
            "the one before; put the run folder where all machines see it"
        )
    # Named after the machine: if the folder is shared after all and only slow to appear, nothing is overwritten.
    remote = RunDir(run.path / f"remote-{socket.gethostname()}")
    remote.make_folders()
    return RankRun(remote, Stage(1, 1, "", cfg, 0, remote.path), cache, True)


def _identity(run: RunDir) -> str:
    """A random word in the folder: only a rank that sees this very folder finds it."""
    if not run.identity_file.exists():
        files.replace(run.identity_file, secrets.token_hex(16))
    return files.read(run.identity_file).decode()
