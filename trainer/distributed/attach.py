"""Where a rank finds its run: in the folder of rank 0, or in a folder of its own where its machine does not see that.

Every rank trains by rank 0's config, which comes through the store they meet at: what a network file system still
shows of an older one, and what a rank asked to be changed before a restart, is the same for all.
"""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from trainer.config import files
from trainer.config.errors import InputError
from trainer.config.load import dump_config, load_config_text
from trainer.config.schema import RunConfig
from trainer.distributed.world import Rendezvous
from trainer.run import stages
from trainer.run.folder import RunDir, shared_cache
from trainer.run.stages import Stage


@dataclass(frozen=True)
class RankRun:
    """What a rank works with. cache: for encoded data.  is_guest: no other machine sees the files of `run`.

    stage: the one that is trained, or the whole of a run without stages.
    """

    run: RunDir
    stage: Stage
    cache: Path
    is_guest: bool

    @property
    def config(self) -> RunConfig:
        """What this rank trains by."""
        return self.stage.config


def cache_folder(cfg: RunConfig, run: RunDir) -> Path:
    """Where encoded data and tiny models are shared by runs: `data.cache`, or `cache` beside the run folders."""
    return shared_cache(cfg, run.path.parent)


def attach(path: Path, rendezvous: Rendezvous) -> RankRun:
    """The run folder and the config of this rank. path: the run folder of rank 0.

    Raises InputError when there is none, or its config was damaged.
    """
    if rendezvous.rank == 0:
        run = RunDir.open(path)
        stage = stages.current(run, run.config())
        rendezvous.store.set("config", dump_config(stage.config))
        rendezvous.store.set("stage", json.dumps([stage.number, stage.count, stage.name, stage.before]))
        rendezvous.store.set("folder", _identity(run))
        return RankRun(run, stage, cache_folder(stage.config, run), False)
    run = RunDir(path.absolute())
    cfg = load_config_text(rendezvous.store.get("config").decode(), (), run.config_file).config
    cache = cache_folder(cfg, run)
    number, count, name, before = json.loads(rendezvous.store.get("stage"))
    if run.identity_file.is_file() and files.read(run.identity_file) == rendezvous.store.get("folder"):
        folder = run.stage_folder(number, name) if name else run.path
        return RankRun(run, Stage(number, count, name, cfg, before, folder), cache, False)
    if count > 1:
        raise InputError(
            f"stages: {socket.gethostname()} does not see {run.path}, through which a stage gets the weights of "
            "the one before; put the run folder where all machines see it"
        )
    # Named after the machine: should the folder be shared after all, and only be slow to show, nothing is overwritten.
    guest = RunDir(run.path / f"guest-{socket.gethostname()}")
    guest.make_folders()
    return RankRun(guest, Stage(1, 1, "", cfg, 0, guest.path), cache, True)


def _identity(run: RunDir) -> str:
    """A word that only those find who see this very folder."""
    if not run.identity_file.exists():
        files.replace(run.identity_file, secrets.token_hex(16))
    return files.read(run.identity_file).decode()
