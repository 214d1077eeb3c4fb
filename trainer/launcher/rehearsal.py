"""A rehearsal: the demo model trains for a minute on the pictures of a run that is to come, so that its crops, masks,
captions and trigger word are judged before a GPU is paid for.

It is a run of its own kind: its folder also holds the config of the run that it rehearses. See DECISIONS 228.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer.config import families
from trainer.config.load import ConfigFile, dump_config, load_config, load_config_text, stage_configs
from trainer.config.schema import RunConfig
from trainer.config.sections import (
    DEMO,
    TRIGGER_PLACE,
    DataConfig,
    ModelConfig,
    ModelOptions,
    fill_trigger,
    has_trigger_place,
)
from trainer.config.size import Size
from trainer.data.images.buckets import bucket_sizes, choose_bucket
from trainer.data.images.image_files import scan
from trainer.launcher import preflight, torchrun
from trainer.launcher.torchrun import RunHandle
from trainer.run import process
from trainer.run.folder import RunDir, freeing, is_run
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.installation import PRESETS

SECONDS = 60
"""A whole rehearsal, of up to MOST_IMAGES small images on one core of 2.5 GHz."""
TRAINED_S = 50
"""What is left of it for training and the samples in between. It takes 4 s until torch is loaded on the rank, and 2 s
each for the samples before the first step and after the last."""
NICENESS = 10
"""Other work on the same cores gets nine times as much of them (Linux, sched(7))."""
SIDE = 64
"""Pixels, of the demo model's images."""
MOST_IMAGES, MOST_PROMPTS, MOST_STEPS = 64, 3, 400
SAMPLED_EVERY = 20
MOST_TOKENS, MOST_LETTERS = 40, 80
"""Of a caption that are read, and letters of a usual one. The demo model itself was made for 12; each costs time."""
SUFFIX = "-rehearsal"
LEFT: dict[str, str] = {
    "resolutions": "Several resolutions: each picture is trained at one.",
    "references": "The images before the edit: it trains on those after it alone.",
    "reference_columns": "The images before the edit: it trains on those after it alone.",
    "rejected": "The rejected images: it trains on the preferred ones alone.",
    "questions": "Questions and sequences: it trains on the captioned pictures alone.",
}
"""{field of `data` that the demo model is not trained with: what that means}"""
OF_THE_DEMO = ("resolution", "at_resolutions", "validation_every", "max_images")
"""Further fields of `data` that a rehearsal has values of its own for."""


def config_of(cfg: RunConfig) -> RunConfig:
    """Return the config of the rehearsal of a run; of a run in stages, of its first stage.

    It has the run's images, captions, masks, trigger word and prompts, and all else of the quickstart. It exports
    nothing.

    Raises:
        InputError: The run has no captioned images, or they cannot be read for their prompts.
    """
    demo = load_config(PRESETS / "quickstart.yaml").config
    cfg = stage_configs(cfg)[0]
    if families.trains_on(cfg) == "text":
        raise InputError(f"model.family: {cfg.model.family} trains on text, and a rehearsal shows pictures; start it")
    if not cfg.data.path and not cfg.data.folders:
        raise InputError("data.path: is empty; name the folder of captioned pictures to rehearse")
    known = families.of(demo.model.family)
    assert known is not None, "the demo model's family is one of ours"
    left = (*LEFT, *OF_THE_DEMO)
    taken = {name: value for name, value in cfg.data if name in known.data_fields and name not in left}
    folders = [one.model_copy(update={"resolutions": (), "micro_batch": None}) for one in cfg.data.folders]
    most = min(MOST_IMAGES, cfg.data.max_images or MOST_IMAGES)
    data = DataConfig(**{**taken, "folders": tuple(folders), "resolution": SIDE, "max_images": most})
    shapes = bucket_sizes(SIDE, known.size_multiple, data.max_aspect)
    sample = {
        "every": SAMPLED_EVERY,
        "prompts": tuple(_prompts(cfg, data)),
        "size": choose_bucket(Size(*cfg.sample.size), shapes).frame,
        "seed": cfg.sample.seed,
        "steps": demo.sample.steps and demo.sample.steps // 2,
    }
    train = {"steps": MOST_STEPS, "time_limit": TRAINED_S, "seed": cfg.train.seed}
    changed = {
        "name": f"{cfg.name[: 64 - len(SUFFIX)]}{SUFFIX}",
        "model": demo.model.model_copy(update={"options": ModelOptions(max_tokens=MOST_TOKENS)}),
        "data": data,
        "sample": demo.sample.model_copy(update=sample),
        "train": demo.train.model_copy(update=train),
        # The pace, and so the last step, is not known when the rate would have to begin to fall.
        "optim": demo.optim.model_copy(update={"schedule": "constant", "lr": demo.optim.lr / 2}),
        "parallel": demo.parallel.model_copy(update={"devices": 1, "strategy": "none"}),
        "checkpoint": demo.checkpoint.model_copy(update={"every": 0, "keep_best": 0}),
        "export": demo.export.model_copy(update={"what": "none"}),
    }
    return load_config_text(dump_config(demo.model_copy(update=changed)), (), Path("rehearsal")).config


def _prompts(cfg: RunConfig, data: DataConfig) -> Iterator[str]:
    """Yield the run's first prompts, else captions of held-out images, else of others; then one without the trigger."""
    prompts = list(cfg.sample.prompts)
    if not prompts:
        found = scan(data.model_copy(update={"trigger": ""}))
        captions = [image.caption for image in (*found.validation, *found.train) if image.caption]
        if data.trigger:
            prompts = [text if has_trigger_place(text) else f"{TRIGGER_PLACE}, {text}" for text in captions]
        else:
            prompts = [text for caption in captions if (text := fill_trigger(caption, "").strip(" ,"))]
    chosen = list(dict.fromkeys(prompts))[:MOST_PROMPTS]
    yield from chosen
    marked = (prompt for prompt in chosen if data.trigger and has_trigger_place(prompt))
    yield from [rest for prompt in marked if (rest := fill_trigger(prompt, "").strip(" ,"))][:1]


def begin(loaded: ConfigFile, runs: Path) -> RunHandle:
    """Start the rehearsal of a run on the CPU, as one process of low priority. Only one runs at a time.

    Args:
        loaded: The config of the run that is to come. Its model need not be on this machine.
        runs: Folder of the runs.

    Raises:
        InputError: Its data are wrong, another rehearsal is running, the demo model is missing, or the disk is full.
    """
    require_demo()
    rehearsed = replace(loaded, config=config_of(loaded.config))
    try:
        drafts = files.make_private(runs / "drafts")
        with files.locked(drafts / "rehearsal.lock"):
            if (other := running(runs)) is not None:
                raise InputError(f"{other.path.name} is still running; wait until it is done, or stop it")
            run = preflight.new_run(rehearsed, runs)
            try:
                files.replace(run.rehearsed_file, dump_config(loaded.config))
                handle = torchrun.start(rehearsed.config, run)
            except BaseException:
                shutil.rmtree(run.path, ignore_errors=True)
                raise
    except OSError as error:
        raise InputError(f"the rehearsal cannot be written in {runs} ({error.strerror}); {freeing(runs)}") from error
    with suppress(OSError):  # it has ended already
        os.setpriority(os.PRIO_PROCESS, handle.process.pid, NICENESS)
    return handle


def running(runs: Path) -> RunDir | None:
    """Return the rehearsal that is running in a folder of runs; None without one."""
    for path in runs.iterdir() if runs.is_dir() else ():
        run = RunDir(path)
        with suppress(InputError, OSError), run.boundary():  # of a stranger
            if is_run(path) and run.is_rehearsal and process.alive(run):
                return run
    return None


def require_demo() -> None:
    """Raise InputError where the demo model, which comes with the program, is not complete."""
    (family,) = (folder.name for folder in DEMO.iterdir()) if DEMO.is_dir() else ("",)
    parts = ("text_encoder", "transformer", "vae")
    is_whole = all(any((DEMO / family / part).glob("*.safetensors")) for part in parts)
    if not is_whole or not preflight.has_model(ModelConfig(family=family, path=str(DEMO / family))):
        raise InputError(
            f"{DEMO}: the demo model is not complete; install ShardStudio again, or make it with `make demo-base` in a "
            "checkout, which takes an hour"
        )
