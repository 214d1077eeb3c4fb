"""Preflight checks: the one place that decides if a run can start, for the command line, page, notebooks and queue."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.checkpoint import config_changes
from trainer.config import families
from trainer.config.fields import all_names
from trainer.config.load import ConfigFile, load_config, similar_name
from trainer.config.schema import RunConfig
from trainer.config.sections import (
    HUB_ID,
    MODEL_WORDS,
    CompleteSample,
    LowRankAdapter,
    ModelConfig,
    NoAdapter,
    RankAdapter,
    SampleConfig,
)
from trainer.data.images import image_files, image_io
from trainer.data.images.image_tables import TABLES
from trainer.data.images.scan_memory import Keep, checked
from trainer.data.mixed import question_files
from trainer.data.row_files import rows_of
from trainer.data.row_forms import standard
from trainer.data.text import text_files
from trainer.launcher import capacity, network
from trainer.metrics import trackers
from trainer.models import distilled, editing, recognition
from trainer.models.parts.chat import chat_template
from trainer.run import manifest, process, stages
from trainer.run.branch import branch
from trainer.run.events import EventReader
from trainer.run.folder import RunDir, guard_cache, shared_cache
from trainer.run.length import RunLength
from trainer.run.manifest import Progress, Wanted
from trainer.system import files
from trainer.system.errors import InputError, Problem
from trainer.system.installation import missing_package
from trainer.weights.headers import PEFT_FILE, read_header
from trainer.weights.hub import find_folder

COPIED = frozenset({".json", ".txt", ".model", ".jinja"})
"""Suffixes of the small files of a model's folder that are copied into exports."""
BY_NAME = (".masks", ".references", ".rejected")
"""Ends of the fields of folders whose images are found by their names."""
OF_LAYERS = frozenset(
    {
        *(f"adapter.{name}" for name in ("targets", "modules_to_save", "rank_pattern", "conv_rank", "factor")),
        *("adapter.block_size", "adapter.num_stages", "quantize.keep", "quantize.formats"),
        *("objective.zero_terminal_snr", "objective.router_weight", "objective.dpo_beta"),
        *("model.options.blocks", "model.options.new_tokens", "model.options.attention", "model.options.text_layers"),
        "model.train",
    }
)
"""Fields whose values only the built model can refuse."""
USUAL_LENGTH = 2048
"""Tokens of a row up to which published language models take them."""
USUAL_RANK, SMALL_RANK = 64, 16
"""Ranks up to which layers take them, of published models and of small ones."""
BYTES_OF_A_TOKEN = 2
"""Fewer than almost all tokens have. Where they have fewer, a rank finds rows that are too long."""
ROWS_MEASURED = 20
"""First rows of text of which one shows that not all are too long."""
SMALL_SIDE = 512
"""Pixels of a side up to which small models sample."""


def new_run(
    loaded: ConfigFile, runs: Path, at: Path | None = None, is_here: bool = True, gpus: Sequence[int] = ()
) -> RunDir:
    """Check a config and make the folder of a new run, without starting it.

    Args:
        loaded: The config.
        runs: Folder in which the run folder is made.
        at: Exact path of the run folder, instead.
        is_here: Whether this machine trains it. False for a scheduler's job: other machines have its GPUs.
        gpus: Indices of the GPUs that it may use; empty for all.

    Raises:
        InputError: The config, its files or its images are wrong. Nothing was written.
    """
    folder = at.absolute().parent if at else runs
    scans = check(loaded, cache=shared_cache(loaded.config, folder))
    if is_here:
        loaded.refuse(list(capacity.problems(loaded.config, folder, chosen=gpus)))
    _prepare_cache(loaded, folder)
    run = RunDir.create(runs, loaded.config, at)
    files.make_private_if_new(shared_cache(loaded.config, run.path.parent))  # it holds encoded images and captions
    for keep in scans:
        keep()
    return run


def continued_run(run: RunDir, overrides: Sequence[str]) -> ConfigFile:
    """Check that a run can continue, and return its config. `torchrun.start` saves it where overrides change it.

    Raises:
        InputError: As `new_run`; or the run is running; or its checkpoint does not allow a change.
    """
    run.guard()
    process.require_ended(run)
    loaded = load_config(run.config_file, overrides)
    loaded.refuse(list(_too_late(loaded.config, run)))
    saved = manifest.newest(run.checkpoints)
    if saved:
        stage, progress = stages.current(run, loaded.config), manifest.progress_of(saved)
        # Some fields must equal the saved ones: other weights, or another meaning of a step.
        changed = (
            config_changes.changes(progress.config, stage.config.model_dump(mode="json")) if progress.config else []
        )
        loaded.refuse(list(config_changes.refused(changed, progress.step)))
        loaded.refuse(list(_too_short(loaded, run, stage, progress)))
    scans = check(loaded, is_new=not saved, cache=shared_cache(loaded.config, run.path.parent))
    loaded.refuse(list(capacity.gpu_problems(loaded.config)))
    _prepare_cache(loaded, run.path.parent)
    for keep in scans:
        keep()
    return loaded


def branched_run(run: RunDir, wanted: Wanted, overrides: Sequence[str]) -> tuple[RunDir, ConfigFile]:
    """Make a run that goes on from a checkpoint of another one, and return it with its config.

    Raises:
        InputError: As `branch` and `continued_run`; no run is made.
    """
    new = branch(run, wanted)
    try:
        return new, continued_run(new, overrides)
    except BaseException:
        shutil.rmtree(new.path)
        raise


def _prepare_cache(loaded: ConfigFile, runs: Path) -> None:
    """Make the folder `data.cache`, if it is set. Raises InputError if that or `cache` in `runs` cannot be a folder."""
    cache = shared_cache(loaded.config, runs)
    if loaded.config.data.cache is None:
        if os.path.lexists(cache) and not cache.is_dir():
            raise InputError(f"{cache}: not a folder; remove it, or set data.cache")
        if runs.is_dir() and not cache.exists() and not os.access(runs, os.W_OK):
            raise InputError(f"{cache}: the folder cannot be made; make {runs} writable, or set data.cache")
        return
    try:
        files.make_private_if_new(cache)
    except OSError as error:
        raise InputError(
            f"{loaded.where('data.cache')}: data.cache: the folder {cache} cannot be made ({error.strerror}); choose "
            "another path, or remove what is there"
        ) from error


def _too_late(cfg: RunConfig, run: RunDir) -> Iterator[Problem]:
    """A problem for every field that changes in a stage which has ended: nothing would follow it."""
    ended = run.current_stage
    if not ended:
        return
    try:
        before = run.config().stages[:ended]
    except InputError:  # something else in it is wrong, which this change mends
        return
    for at, (stage, former) in enumerate(zip(cfg.stages, before, strict=False)):
        for field in sorted(stage.set.keys() | former.set.keys()):
            if stage.set.get(field) != former.set.get(field):
                yield Problem(f"stages[{at}].set.{field}", f"stage {stage.name} has ended; leave the change out")


def _too_short(loaded: ConfigFile, run: RunDir, stage: stages.Stage, saved: Progress) -> Iterator[Problem]:
    """A problem if a run is to end before the step that it has reached: training does not go back."""
    train, former = stage.config.train, saved.config["train"].get("epochs") if saved.config else None
    trained = f"{saved.step} steps"
    if train.epochs is None:
        is_short = train.steps < saved.step
    else:
        reached = RunLength.of(loaded.config, EventReader(run.events_file).read()).epoch(stage.before + saved.step)
        reached = min(reached or 0.0, former or math.inf)  # the last step may be a short one
        is_short, trained = train.epochs < reached, f"{reached:.3g} epochs"
    if is_short:
        field, value = ("train.steps", train.steps) if train.epochs is None else ("train.epochs", train.epochs)
        yield Problem(field, f"{value:g} is less than the {trained} that are trained; raise it, or start a new run")


def check(loaded: ConfigFile, is_new: bool = True, cache: Path | None = None) -> list[Keep]:
    """Check that a run of this config can start on this machine: its fields, files, images, model, trackers and port.

    Args:
        loaded: The config.
        is_new: False for a run that continues from a checkpoint. It no longer needs the file in `adapter.start`.
        cache: The folder that runs share, which knows images that earlier runs read.

    Returns:
        Functions that keep in `cache` what was read of the images, for the ranks and later runs. Nothing was written.

    Raises:
        InputError: The run cannot start.
    """
    if cache:
        guard_cache(cache)
    check_named(loaded, is_new)
    scans = [_check_stage(loaded, index, is_new, cache) for index in range(len(loaded.config.stages))]
    scans.append(_check_data(loaded.config, cache))
    check_machine(loaded, is_new)
    if is_new:
        _check_built(loaded, cache)
    return scans


def check_named(loaded: ConfigFile, is_new: bool = True) -> None:
    """The part of `check` that opens no file, so that a form can call it while its user types.

    Args:
        loaded: The config.
        is_new: As for `check`.

    Raises:
        ConfigError: It holds every problem.
    """
    loaded.refuse(list(_missing_paths(loaded.config, is_new)))


def check_machine(loaded: ConfigFile, is_new: bool = True) -> None:
    """The part of `check` that looks at this machine: the model, packages that are not always installed and the port.

    Args:
        loaded: The config.
        is_new: As for `check`.

    Raises:
        InputError: Something is missing.
    """
    _check_model(loaded)
    _check_packages(loaded)
    if is_new:
        _check_start(loaded)
    network.require_free_port(loaded.config.parallel)


def has_model(model: ModelConfig) -> bool:
    """Whether the model is on this machine, as one that its family loads."""
    try:
        return not any(recognition.refused(model))
    except InputError:
        return False


def reads_references(model: ModelConfig) -> bool:
    """Whether the model takes reference images; of a family with some that do, whether it is known as one of those."""
    known = families.of(model.family)
    if known is None or not known.reads("data.references"):
        return False
    return not known.edits or editing.kind_of(model) is not None


def advice(cfg: RunConfig) -> tuple[str, ...]:
    """Return what to read about a run's model before the start. It does not prevent the start."""
    return (*distilled.warnings(cfg), *editing.warnings(cfg))


def sample_settings(model: ModelConfig, sample: SampleConfig) -> CompleteSample:
    """Return the section `sample` with the model's own steps and guidance where it has none."""
    return distilled.complete_sample(model, sample)


def _check_stage(loaded: ConfigFile, index: int, is_new: bool, cache: Path | None) -> Keep:
    """Raise InputError if files or data of a stage are wrong. is_new: as for `check`."""
    name = loaded.config.stages[index].name
    try:
        stage = replace(
            loaded, config=stages.before_handover(loaded.config, index), source=Path(f"stage {name}"), origins={}
        )
        stage.refuse(_missing_paths(stage.config, is_new))
        scan = _check_data(stage.config, cache)
        _check_model(stage)
        _check_packages(stage)
        if is_new:
            _check_start(stage)
    except InputError as error:
        raise InputError(f"{loaded.source}: {error}") from error
    return scan


def needs_model(cfg: RunConfig) -> bool:
    """Whether a run without stages has fields that are checked with the layers or the tokenizer of its model."""
    sections = (("adapter", cfg.adapter), ("quantize", cfg.quantize), ("objective", cfg.objective))
    for section, given in (*sections, ("model", cfg.model), ("model.options", cfg.model.options)):
        for name, value in given:
            if f"{section}.{name}" in OF_LAYERS and value != type(given).model_fields[name].default:
                return True
    if not isinstance(cfg.adapter, NoAdapter) and cfg.adapter.start is not None:
        return True
    is_small = cfg.model.path in ("tiny", "demo")
    if is_small and cfg.sample.every and max(cfg.sample.size) > SMALL_SIDE:
        return True
    if isinstance(cfg.adapter, RankAdapter) and cfg.adapter.rank > (SMALL_RANK if is_small else USUAL_RANK):
        return True
    if families.trains_on(cfg) == "text" and (cfg.data.length > USUAL_LENGTH or _may_be_too_long(cfg)):
        return True
    is_low_rank = isinstance(cfg.adapter, LowRankAdapter)
    return cfg.export_what == "adapter" and cfg.export.format != "auto" and not is_low_rank


def _may_be_too_long(cfg: RunConfig) -> bool:
    """Whether every prompt or conversation of some text could be too long, by the bytes of what is read of it."""
    for found in text_files.of_config(cfg.data):
        if not found or text_files.has_plain_text(found):
            continue
        try:
            first = [standard(row.values()) for row in islice(rows_of(found[0]), ROWS_MEASURED)]
        except InputError:  # it is named with its line where all rows are read
            continue
        texts = (json.dumps(row, default=str, ensure_ascii=False) for row in first)
        if all(len(text.encode("utf-8", "surrogatepass")) > BYTES_OF_A_TOKEN * cfg.data.length for text in texts):
            return True
    return False


def _check_built(loaded: ConfigFile, cache: Path | None) -> None:
    """Raise InputError for what is wrong with the models, built without weights in a process of its own, or with the
    first rows of the text.

    That takes seconds. Runs in stages pay them, whose later stages would be refused after hours, and configs that name
    layers; all others are checked by their ranks.
    """
    cfg = loaded.config
    parts = [stages.before_handover(cfg, index) for index in range(len(cfg.stages))] or [cfg]
    if len(parts) == 1 and not needs_model(parts[0]):
        return
    with TemporaryDirectory() as folder:
        # Tiny models are written into the cache, but a refused run leaves nothing behind.
        used = cache if cache and cache.is_dir() else folder
        argv = [sys.executable, "-m", "trainer.train.early_checks", str(used)]
        configs = json.dumps([part.model_dump(mode="json") for part in parts])
        environment = process.worker_environment()
        done = subprocess.run(argv, input=configs, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 2:  # a crash is left to the ranks, which log it
        return
    number, _, message = done.stdout.strip().partition(" ")
    pairs = [line.partition(": ") for line in message.splitlines()]
    problems = [Problem(field, reason) for field, _, reason in pairs if field in all_names()]
    if cfg.stages:
        stage = cfg.stages[int(number)]
        message = f"{loaded.source}: stage {stage.name}: {message}"
        above = f"stages[{number}].set."
        problems = [
            Problem(above + one.field if one.field in stage.set else one.field, f"{one.message} (stage {stage.name})")
            for one in problems
        ]
    loaded.refuse(problems)
    raise InputError(message)


def _check_data(cfg: RunConfig, cache: Path | None) -> Keep:
    """Raise InputError for images or text that cannot be trained on. Returns a function that keeps what was read."""
    keep: Keep = _nothing
    if families.trains_on(cfg) == "images":
        if cache:
            edits = editing.kind_of(cfg.model) if cfg.data.has_references else None
            keep = checked(cfg.data, cache, edits.references if edits else None)
        else:
            image_files.scan(cfg.data)
        question_files.of_config(cfg.data)
        for field, named in (("references", cfg.sample.references), ("images", cfg.sample.images)):
            for index, file in enumerate(named):
                try:
                    image_io.read_header(Path(file))
                except InputError as error:
                    raise InputError(f"sample.{field}[{index}]: {error}") from error
    else:
        files, held_out = text_files.of_config(cfg.data)
        text_files.check_preferences((*files, *held_out), cfg.objective.compares_pairs)
        if cfg.data.chat_template:
            chat_template.check_template(cfg.data.chat_template)
    return keep


def _nothing() -> None:
    """Keep nothing."""


def _check_model(loaded: ConfigFile) -> None:
    """Raise InputError if a hub id is not in the local cache (with the download command), if the model's folder
    contradicts `model.options.distilled`, or if its model does not read a field."""
    model = loaded.config.model
    field, path = ("model.base", model.base) if model.base else ("model.path", model.path)
    try:
        folder = find_folder(field, path)
    except InputError as error:
        loaded.refuse([Problem(field, str(error).removeprefix(f"{field} "))])
    else:
        loaded.refuse([Problem(field, text) for text in _linked_companions(folder)])
    if (named := loaded.config.data.chat_template) and (tokens := chat_template.stored_tokens(folder)):
        chat_template.check_marks(named, tokens | set(model.options.new_tokens))
    loaded.refuse([*recognition.refused(model), *distilled.refused(model)])
    cfg = loaded.config
    loaded.refuse([*recognition.unread_weights(model), *recognition.without_row(model)])
    loaded.refuse([*recognition.unread(cfg), *editing.refused(cfg)])


def _linked_companions(folder: Path) -> Iterator[str]:
    """Problems with the small files of a model's folder that an export copies: links to files elsewhere."""
    for file in sorted(folder.glob("*")) if os.path.isdir(folder) else ():
        is_copied = file.suffix in COPIED and file.name not in ("config.json", "model_index.json")
        if is_copied and file.is_symlink() and files.leads_out_of_model(file, folder):
            yield f"{file}: {files.LEADS_OUT}"


def _check_start(loaded: ConfigFile) -> None:
    """Raise ConfigError if the file that the adapter starts from is not one of safetensors."""
    adapter = loaded.config.adapter
    if isinstance(adapter, NoAdapter) or adapter.start is None:
        return
    named = Path(adapter.start)
    try:
        read_header(named / PEFT_FILE if os.path.isdir(named) else named)
    except InputError as error:
        loaded.refuse([Problem("adapter.start", str(error))])


def _check_packages(loaded: ConfigFile) -> None:
    """Raise ConfigError with the install command if the package of a tracker or of the optimizer is missing."""
    missing = missing_package(loaded.config.optim.type)
    optimizer = [Problem("optim.type", missing)] if missing else []
    loaded.refuse([*trackers.missing(loaded.config.trackers), *optimizer])


def _missing_paths(cfg: RunConfig, is_new: bool) -> list[Problem]:
    """Problems with the folders, files and models in a config: they do not exist, or the family cannot use them."""
    start = _missing_start(cfg) if is_new else ()
    return [*start, *families.refused(cfg), *_missing_folders(cfg), *_missing_files(cfg), *_missing_models(cfg)]


def _missing_start(cfg: RunConfig) -> Iterator[Problem]:
    start = None if isinstance(cfg.adapter, NoAdapter) else cfg.adapter.start
    if start is not None and not os.path.exists(start):
        hint = similar_name(Path(start)) or "; name the .safetensors file of an adapter, or a peft folder"
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
                    field, f"no file or folder '{folder}'{similar_name(Path(folder)) or '; name one with text files'}"
                )
        elif os.path.isfile(folder):
            has_rows = folder.lower().endswith(TABLES) and not field.endswith(BY_NAME)
            if not has_rows:
                yield Problem(field, f"'{folder}' is a file; name the folder with the images")
        elif not os.path.isdir(folder):
            hint = similar_name(Path(folder)) or "; name the folder with the images"
            yield Problem(field, f"no folder '{folder}'{hint}")


def _missing_files(cfg: RunConfig) -> Iterator[Problem]:
    for field, named in (("references", cfg.sample.references), ("images", cfg.sample.images)):
        for index, file in enumerate(named):
            if not os.path.isfile(file):
                hint = similar_name(Path(file)) or "; name an image"
                yield Problem(f"sample.{field}[{index}]", f"no file '{file}'{hint}")
    questions = cfg.data.questions
    if questions and not os.path.exists(questions):
        hint = similar_name(Path(questions)) or "; name a .jsonl file"
        yield Problem("data.questions", f"no file '{questions}'{hint}")


def _missing_models(cfg: RunConfig) -> Iterator[Problem]:
    models = {"model.path": cfg.model.path} if cfg.model.path not in MODEL_WORDS else {}
    if cfg.model.base:
        models["model.base"] = cfg.model.base
    for field, model in models.items():
        if not os.path.exists(model) and not HUB_ID.fullmatch(model):
            hint = similar_name(Path(model)) or "; name a diffusers folder, a .safetensors file or a hub id (org/name)"
            yield Problem(field, f"no file or folder '{model}'{hint}")
