"""Records tables, for one run or for all models that come with the program."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from trainer.config import files
from trainer.config.files import make_private_if_new
from trainer.config.installation import PRESETS
from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.config.sections import family_names
from trainer.config.terminal import complain, say
from trainer.plan.sizes import size_of
from trainer.plan.store import SHIPPED, encoders_key_of, kept_file, key_of, known_parts, name_of
from trainer.plan.tables import KINDS, Encoders, Kind, Table, encode, ranks_of

if TYPE_CHECKING:
    from trainer.plan.trace import Recording

HALVES: tuple[tuple[Kind, ...], ...] = (("kept", "drawn"), ("recomputed",))
"""Kinds of passes that take about as long."""
PARTS = 5
"""Two halves of each rank of an adapter, and the encoders: as many are recorded at once where there are cores."""
FORMATS = ("int8", "nf4")
USUAL: tuple[dict[str, Any], ...] = (
    {},
    {"adapter": {"type": "none"}},
    *({"quantize": {"format": name}} for name in FORMATS),
    *({"quantize": {"format": name, "encoders": True}} for name in FORMATS),
)
"""A lora, a full fine-tune, and loras on a base in 8 and 4 bits, with and without encoders in them."""


def record_model(cfg: RunConfig, cache: Path) -> None:
    """Record what is not known yet of one run's model, and keep it."""
    table, encoders = known_parts(cfg, cache)
    jobs = min(PARTS, os.cpu_count() or 1)
    with _pool(jobs) as pool:
        tables = {} if table else _tables([cfg], cache, pool, jobs > len(ranks_of(cfg)))
        others = {} if encoders else _encoders([cfg], cache, pool)
        for key, wait in tables.items():
            write(kept_file(name_of(cfg), cache, key), {key: wait()}, {})
        for key, wait_for_encoders in others.items():
            write(kept_file(name_of(cfg), cache, key), {}, {key: wait_for_encoders()})


def _tables(cfgs: Sequence[RunConfig], cache: Path, pool: Executor, halve: bool) -> dict[str, Callable[[], Table]]:
    """Have the denoiser of runs recorded: {key: waits for it}.

    halve: each rank of an adapter in two processes, which is sooner done where a core is free, and else later, since
    each makes the model.
    """
    by_key = {key_of(cfg): cfg for cfg in reversed(cfgs)}
    parts = HALVES if halve else (KINDS,)
    ranks = {
        key: [[pool.submit(_rank, cfg, rank, kinds, cache) for kinds in parts] for rank in ranks_of(cfg)]
        for key, cfg in by_key.items()
    }
    return {key: partial(_table, by_key[key], found) for key, found in ranks.items()}


def _encoders(cfgs: Sequence[RunConfig], cache: Path, pool: Executor) -> dict[str, Callable[[], Encoders]]:
    """Have their encoders recorded, likewise."""
    by_key = {encoders_key_of(cfg): cfg for cfg in reversed(cfgs)}
    return {key: pool.submit(_encoders_of, cfg, cache).result for key, cfg in by_key.items()}


def _table(cfg: RunConfig, ranks: Sequence[Sequence[Future[Recording]]]) -> Table:
    from trainer.plan.trace import joined, tabulated

    return tabulated(cfg, [joined([part.result() for part in parts]) for parts in ranks])


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, get_context("spawn"))


def _rank(cfg: RunConfig, rank: int, kinds: Sequence[Kind], cache: Path) -> Recording:
    _quieten()
    from trainer.plan import fake_device
    from trainer.plan.trace import on_this_machine, record_rank

    return record_rank(on_this_machine(cfg, cache), rank, kinds, cache, fake_device.install())


def _encoders_of(cfg: RunConfig, cache: Path) -> Encoders:
    _quieten()
    from trainer.models import families
    from trainer.plan import fake_device
    from trainer.plan.encoders import record_encoders
    from trainer.plan.trace import on_this_machine

    cfg = on_this_machine(cfg, cache)
    return record_encoders(cfg, families.make(cfg, cache), fake_device.install())


def traced(cfg: RunConfig, cache: Path) -> int:
    """Bytes on rank 0 at most in a step of the whole model. With torch. cfg: `parallel.strategy` decided."""
    _quieten()
    from trainer.models import families
    from trainer.plan import fake_device
    from trainer.plan.trace import on_this_machine, trace

    cfg = on_this_machine(cfg, cache)
    return trace(cfg, families.make(cfg, cache), fake_device.install(), size_of(cfg)).peak


def _quieten() -> None:
    """Of what packages warn nobody who plans can change anything."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def write(file: Path, tables: Mapping[str, Table], encoders: Mapping[str, Encoders]) -> None:
    """Others see the whole file or none. file: in a folder of the cache that runs share."""
    make_private_if_new(file.parent.parent)
    file.parent.mkdir(exist_ok=True)
    files.replace(file, encode(tables, encoders))


def record_published(names: Sequence[str], jobs: int) -> int:
    """Record published models, all without names. Returns an exit code."""
    models = _published()
    unknown = sorted(set(names) - models.keys())
    if unknown:
        complain(f"{unknown[0]} is not one of {', '.join(models)}")
        return 2
    with TemporaryDirectory() as folder, _pool(jobs) as pool:
        cache = Path(folder)
        wanted = {name: models[name] for name in names or models}
        found = {
            name: (_tables(cfgs, cache, pool, halve=False), _encoders(cfgs, cache, pool))
            for name, cfgs in wanted.items()
        }
        for name, (tables, encoders) in found.items():
            write(
                SHIPPED / f"{name}.json.gz",
                {key: table() for key, table in tables.items()},
                {key: of() for key, of in encoders.items()},
            )
            say(f"{name}: {', '.join(tables)}; encoders {', '.join(encoders)}")
    return 0


def _published() -> dict[str, list[RunConfig]]:
    """{model: runs} of what is recorded: what the presets do, and of each published model what is usual."""
    from trainer.models import families

    found: dict[str, list[RunConfig]] = {}
    presets = [load_config(preset).config for preset in sorted(PRESETS.glob("*.yaml"))]
    cfgs = [cfg for cfg in presets if cfg.model.options.architecture or cfg.model.path == "demo"]
    for family in family_names():
        for architecture in families.get(family).architectures:
            model = {"family": family, "path": "published/model", "options": {"architecture": architecture}}
            cfgs += [RunConfig.model_validate({"model": model, "data": {"path": "."}} | other) for other in USUAL]
    for cfg in cfgs:
        found.setdefault(name_of(cfg), []).append(cfg)
    return found
