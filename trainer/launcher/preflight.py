"""Whether a run can start: the one place that says so, for the command line, the page, notebooks and the queue."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.checkpoint import config_changes
from trainer.config import families, files
from trainer.config.errors import InputError, Problem
from trainer.config.load import ConfigFile, load_config, similar_name, stage_config, stage_configs
from trainer.config.schema import RunConfig, start_rules
from trainer.config.sections import HUB_ID, MODEL_WORDS, NoAdapter
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
    check(loaded, is_new=not saved)
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
    loaded.refuse(list(config_changes.refused(changed, saved.step)))


def check(loaded: ConfigFile, is_new: bool = True) -> None:
    """Raises InputError for whatever keeps a run of this config from starting here.

    That is: fields that a new run may not combine, and each file, folder, image, model, tracker and port that is wrong.

    is_new: False for a run that goes on from a checkpoint, which holds what became of the file its adapter starts from.
    """
    check_named(loaded, is_new)
    for index in range(len(loaded.config.stages)):
        _check_stage(loaded, index)
    _check_data(loaded.config)
    _check_model(loaded)
    _check_trackers(loaded)
    network.require_free_port(loaded.config.parallel)


def check_named(loaded: ConfigFile, is_new: bool = True) -> None:
    """The part of `check` that opens no file, so that a form can call it while its user types.

    Raises ConfigError with every problem at once. is_new: as for `check`.
    """
    cfg = loaded.config
    problems = [*_new_run_rules(cfg), *_missing_start(cfg)] if is_new else []
    loaded.refuse([*problems, *_missing_paths(cfg)])


def check_rules(loaded: ConfigFile) -> None:
    """The part of `check` that looks at nothing but the config: what a new run may not combine."""
    loaded.refuse(_new_run_rules(loaded.config))


def _new_run_rules(cfg: RunConfig) -> list[Problem]:
    return list(dict.fromkeys(problem for part in (cfg, *stage_configs(cfg)) for problem in start_rules(part)))


def _check_stage(loaded: ConfigFile, index: int) -> None:
    """Raises InputError for files or data of a stage that are wrong."""
    name = loaded.config.stages[index].name
    try:
        stage = replace(loaded, config=stage_config(loaded.config, index), source=Path(f"stage {name}"), places={})
        stage.refuse(_missing_paths(stage.config))
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
    loaded.refuse(list(distilled.refused(model)))


def _check_trackers(loaded: ConfigFile) -> None:
    """Raises InputError with the command that installs a tracker's package."""
    for problem in trackers.missing(loaded.config.trackers):
        raise InputError(f"{loaded.where(problem.field)}: {problem}")


def _missing_paths(cfg: RunConfig) -> list[Problem]:
    """Folders, files and models that are named and do not exist, or that the family cannot use."""
    return [*families.refused(cfg), *_missing_folders(cfg), *_missing_files(cfg), *_missing_models(cfg)]


def _missing_start(cfg: RunConfig) -> Iterator[Problem]:
    start = None if isinstance(cfg.adapter, NoAdapter) else cfg.adapter.start
    if start is not None and not os.path.exists(start):
        hint = similar_name(Path(start)) or "; name an adapter's .safetensors file or a folder of peft"
        yield Problem("adapter.start", f"no file '{start}'{hint}")


def _missing_folders(cfg: RunConfig) -> Iterator[Problem]:
    data = cfg.data
    folders = {"data.path": data.path}
    folders |= {f"data.folders[{index}].path": folder.path for index, folder in enumerate(data.folders)}
    folders["data.validation"] = None if isinstance(data.validation, int) else data.validation
    folders |= {f"data.{name}": folder for name, folder in data.companions.items()}
    for field, folder in folders.items():
        if not folder:
            continue
        if families.trains_on(cfg) == "text":
            if not os.path.exists(folder):
                yield Problem(
                    field, f"no file or folder '{folder}'{similar_name(Path(folder)) or '; name one with text'}"
                )
        elif os.path.isfile(folder):
            yield Problem(field, f"'{folder}' is a file; name the folder that holds the images")
        elif not os.path.isdir(folder):
            hint = similar_name(Path(folder)) or "; name one that holds the images"
            yield Problem(field, f"no folder '{folder}'{hint}")


def _missing_files(cfg: RunConfig) -> Iterator[Problem]:
    for field, named in (("references", cfg.sample.references), ("images", cfg.sample.images)):
        for index, file in enumerate(named):
            if not os.path.isfile(file):
                hint = similar_name(Path(file)) or "; name an image"
                yield Problem(f"sample.{field}[{index}]", f"no file '{file}'{hint}")
    questions = cfg.data.questions
    if questions and not os.path.isfile(questions):
        hint = similar_name(Path(questions)) or "; name a .jsonl file"
        yield Problem("data.questions", f"no file '{questions}'{hint}")


def _missing_models(cfg: RunConfig) -> Iterator[Problem]:
    models = {"model.path": cfg.model.path} if cfg.model.path not in MODEL_WORDS else {}
    if cfg.model.base:
        models["model.base"] = cfg.model.base
    for field, model in models.items():
        if not os.path.exists(model) and not HUB_ID.fullmatch(model):
            hint = similar_name(Path(model)) or "; name a diffusers folder, a .safetensors file or a hub id as org/name"
            yield Problem(field, f"no file or folder '{model}'{hint}")
