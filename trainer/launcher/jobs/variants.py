"""Variants of one run, trained one after the other by the same ranks, to compare their costs.

Each has a run folder of its own, below `trials/` of the run that holds them. torchrun starts `benchmark.worker`.

See DECISIONS 124.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from trainer.config.load import ConfigFile, dump_config, load_config_text
from trainer.config.schema import RunConfig
from trainer.launcher import preflight, torchrun
from trainer.plan.simulate.zero import ModelBytes, RankBytes
from trainer.run.events import EventReader, ValidationEvent, latest_steps
from trainer.run.folder import RunDir
from trainer.system import files
from trainer.system.errors import InputError

MODULE = "trainer.benchmark.worker"
WARM_UP_STEPS = 2
"""Steps at the start of a trial that its step time leaves out: the first allocates, the second is probed."""


@dataclass(frozen=True)
class RankMemory:
    """Memory that the steps of a trial took on a rank, in bytes.

    Attributes:
        allocated: Most bytes of tensors; on a CPU, of the process.
        reserved: Most bytes that the allocator held.
        used: Bytes of the GPU in use by all processes; 0 on a CPU.
    """

    allocated: int
    reserved: int
    used: int


@dataclass(frozen=True)
class Cost:
    """The measured cost of one trial.

    Attributes:
        shard_size: Ranks that share one copy of the model.
        images: Per rank and pass.
        num_trained: Number of trained parameters.
        is_offloaded: Whether the shards lie in the host's memory.
        model: Bytes of the whole model.
        ranks: Bytes of each rank.
        activations: Bytes of each rank that forward left for backward.
        formula: What `trainer.parallel.strategy` expects for a rank.
        memory: Of each rank.
    """

    strategy: str
    shard_size: int
    images: int
    num_parameters: int
    num_trained: int
    is_offloaded: bool
    model: ModelBytes
    ranks: tuple[RankBytes, ...]
    activations: tuple[int, ...]
    formula: RankBytes
    memory: tuple[RankMemory, ...] = ()


@dataclass(frozen=True)
class Trial:
    """A trained variant.

    Attributes:
        seconds: Median of a step.
        losses: One per step.
        validation: Losses on the held-out images.
    """

    label: str
    run: RunDir
    cost: Cost
    seconds: float
    losses: tuple[float, ...]
    validation: tuple[float, ...]


def create(config: ConfigFile, variants: Mapping[str, Sequence[str]], runs: Path) -> RunDir:
    """Create a run folder that holds one for each variant. Nothing is started.

    Args:
        variants: {label: overrides as `key=value`}.

    Raises:
        InputError: As `preflight.new_run` raises it, and for variants that need different numbers of ranks.
    """
    size = config.config.parallel.world_size
    if config.config.train.epochs is not None:
        raise InputError(
            f"{config.where('train.epochs')}: train.epochs: {config.config.train.epochs:g}; variants are compared over "
            "equally many steps: set train.steps"
        )
    if config.config.train.steps <= WARM_UP_STEPS:
        raise InputError(
            f"{config.where('train.steps')}: train.steps: {config.config.train.steps} steps are too few to compare; "
            f"set {WARM_UP_STEPS + 1} or more"
        )
    # All are checked before a folder is made: a wrong variant must leave nothing behind.
    checked = {label: _variant(config, overrides) for label, overrides in variants.items()}
    for label, variant in checked.items():
        if variant.parallel.world_size != size:
            raise InputError(
                f"variant '{label}': {variant.parallel.world_size} ranks, but the others have {size}; "
                "compare them in a run of their own"
            )
    run = preflight.new_run(config, runs)
    for number, (label, variant) in enumerate(checked.items(), 1):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "trial"
        RunDir.create(run.path, variant, run.path / "trials" / f"{number:02d}-{name}")
    files.replace(run.path / "trials" / "labels.json", _LABELS.dump_json(list(variants)))
    return run


def _variant(config: ConfigFile, overrides: Sequence[str]) -> RunConfig:
    loaded = load_config_text(dump_config(config.config), overrides, config.source)
    preflight.check(loaded)
    return loaded.config


def start(run: RunDir) -> None:
    """Train the variants of a run that `create` made, in the background."""
    torchrun.start(run.config(), run, MODULE)


def folders(run: RunDir) -> dict[str, RunDir]:
    """{label: run folder} of the variants."""
    labels = files.read_json(run.path / "trials" / "labels.json", _LABELS)
    found = sorted(path for path in (run.path / "trials").iterdir() if path.is_dir())
    return {label: RunDir(path) for label, path in zip(labels, found, strict=True)}


def read(run: RunDir) -> list[Trial]:
    """Read the trials that are finished, in their order."""
    return [_read(label, trial) for label, trial in folders(run).items() if cost_file(trial).is_file()]


def cost_file(trial: RunDir) -> Path:
    return trial.path / "cost.json"


def write(cost: Cost, trial: RunDir) -> None:
    """Write the cost of a trial into its folder."""
    files.replace(cost_file(trial), _COST.dump_json(cost, indent=1))


def _read(label: str, trial: RunDir) -> Trial:
    events = EventReader(trial.events_file).read()
    steps = latest_steps(events)
    return Trial(
        label=label,
        run=trial,
        cost=files.read_json(cost_file(trial), _COST),
        seconds=statistics.median(step.seconds for step in steps[WARM_UP_STEPS:]),
        losses=tuple(step.loss for step in steps),
        validation=tuple(event.loss for event in events if isinstance(event, ValidationEvent)),
    )


_COST = TypeAdapter(Cost)
_LABELS = TypeAdapter(list[str])
