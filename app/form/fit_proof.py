"""`--prove`: a few real steps of the configs that a search found, until one stays within memory. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.config.families import trains_on
from trainer.config.load import ConfigFile, dump_config, load_config_text
from trainer.config.schema import RunConfig
from trainer.config.sections import TrackersConfig
from trainer.launcher import commands, preflight
from trainer.launcher.fit_command import Found
from trainer.launcher.jobs import variants as trials
from trainer.launcher.jobs.variants import WARM_UP_STEPS, Trial
from trainer.plan.calibration import Measured, keep, tells_speed
from trainer.plan.search.decide import TIGHT
from trainer.plan.search.fit import Proposal
from trainer.run import process
from trainer.run.events import ErrorEvent, EventReader
from trainer.run.failure import OUT_OF_MEMORY
from trainer.run.folder import RunDir, shared_cache
from trainer.system import files
from trainer.system.amounts import memory_size
from trainer.system.errors import InputError
from trainer.system.terminal import say

STEPS = 3
"""Steps that are timed."""
SHORT = (
    f"train.steps={WARM_UP_STEPS + STEPS}",
    "train.out_of_memory=stop",
    "optim.schedule=constant",
    "optim.warmup=0",
    "data.validation=0",
    "sample.every=0",
    *(f"trackers.{name}=false" for name in TrackersConfig.packages),
)
"""Overrides for a run of a few steps, whose memory and time are those of any other step."""
MADE_IMAGES = 16
PAIRS_PER_ROW = 8
"""Pairs of answers that are made for each row, which they share."""
MOST_OF_NAME = 58
"""Letters of a run's name that fit before `-proof`."""


@dataclass(frozen=True)
class Proof:
    """The measurement of a few steps of a config.

    Attributes:
        proposal: The config and its plan.
        failure: Why it does not stay within memory; empty if it does.
        trial: The steps; None where they failed.
    """

    proposal: Proposal
    failure: str = ""
    trial: Trial | None = None


def prove(found: Found, runs: Path, limit: float | None = None) -> Found:
    """Train each proposal for a few steps, the fastest first, until one stays within memory; say what they took.

    Weights and data are those of the config. Missing data are made; a language model without its weights gets random
    ones.

    Args:
        found: The proposals of a run without stages.
        runs: Folder of the runs.
        limit: Bytes that a rank may take. None: the share of the GPU's memory within which a plan fits.

    Returns:
        The proposals without those that did not stay within memory.

    Raises:
        InputError: The run has stages, or cannot be started on this machine.
    """
    if found.loaded.config.stages:
        raise InputError("--prove: the run has stages; prove a preset of one stage, or leave --prove out")
    (one,) = found.fits
    proposals = list(one.proposals)
    # The fastest comes first, so that the first one that holds is the answer.
    while proposals:
        proof = _prove_one(proposals[0], found, runs, limit)
        if not proof.failure:
            break
        say(f"{proof.proposal}: {proof.failure}" + ("; the next is tried" if proposals[1:] else ""))
        proposals.pop(0)
    return replace(found, fits=(replace(one, proposals=tuple(proposals)),))


def _prove_one(proposal: Proposal, found: Found, runs: Path, limit: float | None) -> Proof:
    with _runnable(found.loaded, proposal.config) as config:
        run = trials.create(config, {"proof": ()}, runs)
        trials.start(run)
        try:
            process.wait(run)
        except BaseException:
            process.terminate(run)
            raise
        process.record_end(run)
        trial = next(iter(trials.read(run)), None)
    if trial is None:
        return Proof(proposal, _failed(run))
    taken = max(rank.used or rank.allocated for rank in trial.cost.memory)
    most = limit if limit is not None else TIGHT * found.hardware.card.memory
    if taken > most:
        return Proof(proposal, f"took {memory_size(taken)}, more than {memory_size(most)}")
    say(
        f"proved: {STEPS} steps took {trial.seconds:.3g} s each, {proposal.seconds:.3g} planned, and "
        f"{memory_size(taken)} on the fullest rank, {memory_size(proposal.plan.need)} planned"
    )
    _learn(trial, proposal, found, shared_cache(found.loaded.config, runs))
    return Proof(proposal, trial=trial)


def _failed(run: RunDir) -> str:
    """Return that the run was out of memory. Raises InputError for another failure."""
    errors = [event for event in EventReader(run.events_file).read() if isinstance(event, ErrorEvent)]
    if errors and re.search(OUT_OF_MEMORY, errors[-1].message):
        return f"ran out of memory: {errors[-1].message}"
    cause = commands.explain(errors[-1], run) if errors else f"the steps ended without a result; see {run.logs}"
    raise InputError(f"--prove: {cause}")


def _learn(trial: Trial, proposal: Proposal, found: Found, cache: Path) -> None:
    """Keep what the steps took on this machine's GPUs, for later plans."""
    memory, plan = trial.cost.memory[0], proposal.plan
    if found.host is None or not memory.used:  # other GPUs were named, or the ranks had none
        return
    measured = Measured(
        gpu=found.hardware.card.name,
        ranks=plan.ranks,
        planned=plan.training.peak,
        allocated=memory.allocated,
        reserved=memory.reserved,
        used=memory.used,
        seconds=trial.seconds,
        flops=plan.flops if tells_speed(proposal.config, plan.strategy) else 0.0,
        is_compiled=proposal.config.train.compiles_on("cuda"),
    )
    keep(cache, measured)


@contextmanager
def _runnable(loaded: ConfigFile, cfg: RunConfig) -> Iterator[ConfigFile]:
    """Yield the config as one of a few steps, with weights and data that are on this machine."""
    text = dump_config(cfg)
    with TemporaryDirectory() as folder:
        changes = [f"name={cfg.name[:MOST_OF_NAME]}-proof", *SHORT]
        changes += [] if _has_data(cfg) else _made_data(cfg, Path(folder))
        if trains_on(cfg) == "text" and not preflight.has_model(cfg.model):
            changes.append("model.path=random")
        yield load_config_text(text, changes, loaded.source)


def _has_data(cfg: RunConfig) -> bool:
    paths = [cfg.data.path, *(folder.path for folder in cfg.data.folders), cfg.data.questions]
    return all(Path(path).exists() for path in paths if path)


def _made_data(cfg: RunConfig, folder: Path) -> Sequence[str]:
    """Make images, or texts, of the config's size, and return the overrides that name them."""
    make: Callable[[RunConfig, Path], None] = _make_images if trains_on(cfg) == "images" else _make_texts
    make(cfg, folder)
    return f"data.path={folder}", "data.folders=[]", "data.questions=null"


def _make_images(cfg: RunConfig, folder: Path) -> None:
    from PIL import Image

    side = cfg.data.all_sides[-1]
    for number in range(MADE_IMAGES):
        colour = (16 * number % 256, 255 - 16 * number % 256, 128)
        Image.new("RGB", (side, side), colour).save(folder / f"{number}.png")
        files.replace(folder / f"{number}.txt", f"square {number}")


def _make_texts(cfg: RunConfig, folder: Path) -> None:
    rows = 2 * cfg.train.batch_size * (WARM_UP_STEPS + STEPS)
    line = " ".join(str(number) for number in range(cfg.data.length))
    if not cfg.objective.compares_pairs:
        files.replace(folder / "texts.txt", "\n\n".join([line] * rows))
        return
    short = line[: cfg.data.length // PAIRS_PER_ROW]  # a token has one character or more
    pair = json.dumps({"prompt": "Count.", "chosen": short, "rejected": short[::-1]})
    files.replace(folder / "pairs.jsonl", f"{pair}\n" * rows * PAIRS_PER_ROW)
