"""Everything that is checked before a run is started: the same for the command line, the page and the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainer.checkpoint import config_changes
from trainer.config import families, files
from trainer.config.errors import InputError
from trainer.config.load import ConfigFile, check_files, check_start, load_config, refuse, stage_config
from trainer.config.schema import RunConfig
from trainer.data import image_files, question_files, text_files
from trainer.launcher import network
from trainer.metrics import trackers
from trainer.models import distilled
from trainer.run import manifest, process, stages
from trainer.run.folder import RunDir, shared_cache
from trainer.run.manifest import Progress
from trainer.weights.hub import find_folder


def new_run(loaded: ConfigFile, runs: Path, at: Path | None = None) -> RunDir:
    """The folder of a new run below `runs`, or `at`. Nothing is started.

    Raises InputError before anything is written when the config, its files or its images are wrong.
    """
    check_start(loaded)
    check(loaded)
    _make_named_cache(loaded)
    run = RunDir.create(runs, loaded.config, at)
    files.make_private_if_new(shared_cache(loaded.config, run.path.parent))  # of encoded pictures and captions
    return run


def continued_run(run: RunDir, overrides: Sequence[str]) -> ConfigFile:
    """The config an ended run is to be continued with, saved in its folder where fields were changed.

    Raises InputError as `new_run` does, when the run is running, and for a change that its checkpoint does not allow.
    """
    process.require_ended(run)
    loaded = load_config(run.config_file, overrides)
    saved = manifest.complete(run.checkpoints)
    if saved:
        _check_changes(loaded, stages.current(run, loaded.config).config, manifest.progress_of(saved[-1]))
    else:  # a checkpoint holds what became of the file
        check_start(loaded)
    check(loaded)
    _make_named_cache(loaded)
    if overrides:
        run.replace_config(loaded.config)
    return loaded


def _make_named_cache(loaded: ConfigFile) -> None:
    """Make the folder `data.cache`, where there is one. Raises InputError where it cannot be a folder."""
    if loaded.config.data.cache is None:
        return
    cache = Path(loaded.config.data.cache)
    try:
        files.make_private_if_new(cache)
    except OSError as error:
        raise InputError(
            f"{loaded.where('data.cache')}: data.cache: {cache} cannot be made a folder ({error.strerror}); name "
            "another place, or remove what is there"
        ) from error


def _check_changes(loaded: ConfigFile, config: RunConfig, saved: Progress) -> None:
    """Raises InputError for every field that must be what it was when the run was saved. config: of the stage."""
    changed = config_changes.changes(saved.config, config.model_dump(mode="json")) if saved.config else []
    refuse(loaded, list(config_changes.refused(changed, saved.step)))


def check(loaded: ConfigFile) -> None:
    """Raises InputError for every file, folder, image, model, tracker or port of the config that is wrong."""
    check_files(loaded)
    for index in range(len(loaded.config.stages)):
        _check_stage(loaded, index)
    _check_data(loaded.config)
    _check_model(loaded)
    _check_trackers(loaded)
    network.require_free_port(loaded.config.parallel)


def _check_stage(loaded: ConfigFile, index: int) -> None:
    """Raises InputError for files or data of a stage that are wrong."""
    name = loaded.config.stages[index].name
    try:
        stage = replace(loaded, config=stage_config(loaded.config, index), source=Path(f"stage {name}"), places={})
        check_files(stage)
        _check_data(stage.config)
        _check_model(stage)
    except InputError as error:
        raise InputError(f"{loaded.source}: {error}") from error


def _check_data(cfg: RunConfig) -> None:
    """Raises InputError for images or text that cannot be trained on."""
    if families.trains_on(cfg) == "images":
        image_files.scan(cfg.data)
        question_files.of_config(cfg.data)
    else:
        text_files.of_config(cfg.data)


def _check_model(loaded: ConfigFile) -> None:
    """Raises InputError with the download command for a hub id that is not in the local cache, and where
    `model.options.distilled` contradicts the model's folder."""
    model = loaded.config.model
    field, path = ("model.base", model.base) if model.base else ("model.path", model.path)
    try:
        find_folder(field, path)
    except InputError as error:
        raise InputError(f"{loaded.where(field)}: {error}") from error
    refuse(loaded, list(distilled.refused(model)))


def _check_trackers(loaded: ConfigFile) -> None:
    """Raises InputError with the command that installs a tracker's package."""
    for problem in trackers.missing(loaded.config.trackers):
        raise InputError(f"{loaded.where(problem.field)}: {problem}")
