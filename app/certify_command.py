"""`--certify PRESET`: examines the base of a run before it starts (`trainer.view.certificate`)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from trainer.config import families
from trainer.config.load import ConfigFile
from trainer.config.schema import RunConfig
from trainer.config.sections import SampleConfig
from trainer.launcher import commands, preflight, torchrun
from trainer.run.events import EventReader
from trainer.run.folder import shared_cache
from trainer.run.process import worker_environment
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.terminal import complain, say
from trainer.view import certificate

MOST_NAME = 52
"""Letters of the preset's name in that of the run, which has at most 64."""


def certify(loaded: ConfigFile, runs: Path, new_family: str | None = None) -> int:
    """Load the model on the ranks of the run, let it draw eight prompts, and examine it. Nothing is trained.

    Args:
        loaded: The config of the run that is to come.
        runs: Folder of the runs.
        new_family: Name of the family whose file is written if a model without one is called rightly.

    Returns:
        The exit code: 0 without a fault, 1 with one; else as `commands.train`.

    Raises:
        InputError: As `preflight.new_run`, the model does not train on images, or it has a family already.
    """
    cfg = loaded.config
    if cfg.stages:
        raise InputError("stages: a run in stages is certified by its own first stage, when it starts")
    if (
        (known := families.of(cfg.model.family)) is None
        or known.trains_on != "images"
        or "questions" in known.data_fields
    ):
        raise InputError(f"model.family: {cfg.model.family} is not certified; models that draw images alone are")
    if new_family is not None:
        families.check_new_name(new_family)
        if not known.is_concluded:
            raise InputError(
                f"--write-family {new_family}: {cfg.model.family} has a file already; use model.family: auto"
            )
    given = {"prompts": certificate.PROMPTS, "seed": 0, "every": cfg.sample.every or 1, "references": ()}
    if cfg.data.has_references:
        given["references"] = (str(certificate.PICTURE),) * len(certificate.PROMPTS)
    sample = SampleConfig.model_validate(cfg.sample.model_dump() | given)
    export = cfg.export.model_copy(update={"what": "none"})
    changed = cfg.model_copy(update={"sample": sample, "name": f"{cfg.name[:MOST_NAME]}-certificate", "export": export})
    run = preflight.new_run(replace(loaded, config=changed), runs)
    files.replace(run.certify_file, "")
    handle = torchrun.start(changed, run)
    code = commands.watch(changed, run, EventReader(run.events_file))
    handle.process.wait()
    if code:
        return code
    try:
        found = certificate.read(run.path / certificate.FILE)
    except FileNotFoundError as error:
        raise InputError(f"{run.path}: no sample was drawn, so that nothing was examined; free disk space") from error
    if new_family is not None and found.miswired:
        complain(f"--write-family {new_family}: not written, because of the fault above")
    elif new_family is not None:
        _write_family(new_family, changed, runs)
    return 0 if found.is_green else 1


def _write_family(name: str, cfg: RunConfig, runs: Path) -> None:
    """Write the file of a family in a process of its own, which loads torch."""
    argv = [sys.executable, "-m", "trainer.models", "--write-family", name, "--cache", str(shared_cache(cfg, runs))]
    done = subprocess.run(
        argv, input=cfg.model_dump_json(), capture_output=True, text=True, env=worker_environment(), check=False
    )
    if done.returncode:
        raise InputError((done.stderr.strip().splitlines() or ["--write-family ended without a word"])[-1])
    say(done.stdout.strip())
