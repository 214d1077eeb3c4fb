"""Records tables, for one run or for all models that come with the program."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer import configfile
from trainer.config import RunConfig, family_names
from trainer.plan.store import SHIPPED, key_of, name_of
from trainer.plan.tables import Table, encode

PRESETS = Path(__file__).parents[2] / "presets"
USUAL: tuple[dict[str, Any], ...] = ({}, {"quantize": {"format": "nf4"}}, {"adapter": {"type": "none"}})
"""A lora, one on a base in 4 bits, and a full fine-tune."""


def recorded(cfg: RunConfig, cache: Path) -> Table:
    """The table of a run. With torch."""
    _quieten()
    from trainer.plan import virtual
    from trainer.plan.record import on_this_machine, tabulate

    return tabulate(on_this_machine(cfg, cache), cache, virtual.install())


def traced(cfg: RunConfig, cache: Path) -> int:
    """Bytes on rank 0 at most in a step of the whole model. With torch. cfg: `parallel.strategy` decided."""
    _quieten()
    from trainer import families
    from trainer.plan import virtual
    from trainer.plan.memory import size_of
    from trainer.plan.record import on_this_machine, trace

    cfg = on_this_machine(cfg, cache)
    return trace(cfg, families.make(cfg, cache), virtual.install(), size_of(cfg)).peak


def _quieten() -> None:
    """Of what packages warn nobody who plans can change anything."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def write(file: Path, tables: dict[str, Table]) -> None:
    """Others see the whole file or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_bytes(encode(tables))
    os.replace(beside, file)


def record_published(names: Sequence[str], jobs: int) -> int:
    """Record published models, all without names. Returns an exit code."""
    models = _published()
    unknown = sorted(set(names) - models.keys())
    if unknown:
        print(f"{unknown[0]} is not one of {', '.join(models)}", file=sys.stderr)
        return 2
    # A device is registered once per process, and a model's memory must not stay.
    with TemporaryDirectory() as cache, ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        found = {
            name: {key: pool.submit(recorded, cfg, Path(cache)) for key, cfg in models[name].items()}
            for name in names or models
        }
        for name, tables in found.items():
            write(SHIPPED / f"{name}.json.gz", {key: future.result() for key, future in tables.items()})
            print(f"{name}: {', '.join(tables)}", flush=True)
    return 0


def _published() -> dict[str, dict[str, RunConfig]]:
    """{model: {key: a run}} of what is recorded: what the presets do, and of each published model what is usual."""
    from trainer import families

    found: dict[str, dict[str, RunConfig]] = {}
    presets = [configfile.load(preset).config for preset in sorted(PRESETS.glob("*.yaml"))]
    cfgs = [cfg for cfg in presets if cfg.model.options.architecture or cfg.model.path == "demo"]
    for family in family_names():
        for architecture in families.get(family).architectures:
            model = {"family": family, "path": "published/model", "options": {"architecture": architecture}}
            cfgs += [RunConfig.model_validate({"model": model, "data": {"path": "."}} | other) for other in USUAL]
    for cfg in cfgs:
        found.setdefault(name_of(cfg), {}).setdefault(key_of(cfg), cfg)
    return found
