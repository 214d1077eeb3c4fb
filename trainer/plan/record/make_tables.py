"""Makes tables of traced passes, for one run or for all models whose tables come with the program.

See DECISIONS 168.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.config.sections import ADAPTERS, family_names
from trainer.plan.simulate.sizes import input_of
from trainer.plan.simulate.tables import PASS_KINDS, Encoders, PassKind, PassTable, encode, num_ranks
from trainer.plan.store import PASS_DONE, SHIPPED, encoders_key_of, key_of, known_parts, name_of, read, table_file
from trainer.system import files
from trainer.system.files import make_private_if_new
from trainer.system.installation import PRESETS
from trainer.system.terminal import complain, say

if TYPE_CHECKING:
    from trainer.plan.record.trace import PassTraces

HALVES: tuple[tuple[PassKind, ...], ...] = (("kept", "drawn"), ("selective", "recomputed"))
"""Two groups of kinds of passes that take about the same time to trace."""
PARTS = 5
"""Most processes for one model: two halves for each rank of an adapter, and one for the encoders."""
FORMATS = ("int8", "nf4", "fp8")
USUAL: tuple[dict[str, Any], ...] = (
    *({"quantize": {"format": name}} for name in FORMATS),
    *({"quantize": {"format": name, "encoders": True}} for name in FORMATS),
    # Exported merged: not every family's own format carries every method.
    *({"adapter": {"type": name}, "export": {"what": "merged"}} for name in ADAPTERS if name != "none"),
    {"adapter": {"type": "none"}},
)
"""Loras on a base of 8 and 4 bits, with and without quantized encoders, and all methods on one of 16."""


def add_missing_tables(cfg: RunConfig, cache: Path) -> None:
    """Trace one run's model and write its tables, unless they exist. cache: folder shared by runs."""
    table, encoders = known_parts(cfg, cache)
    jobs = min(PARTS, os.cpu_count() or 1)
    with _pool(jobs) as pool:
        tables = {} if table else _submit_tables([cfg], cache, pool, jobs > num_ranks(cfg), is_told=True)
        others = {} if encoders else _submit_encoders([cfg], cache, pool)
        for key, wait in tables.items():
            write(table_file(name_of(cfg), cache, key), {key: wait()}, {})
        for key, wait_for_encoders in others.items():
            write(table_file(name_of(cfg), cache, key), {}, {key: wait_for_encoders()})


def _submit_tables(
    cfgs: Sequence[RunConfig], cache: Path, pool: Executor, halve: bool, is_told: bool
) -> dict[str, Callable[[], PassTable]]:
    """Start to trace the denoisers of runs.

    Args:
        cfgs: The runs.
        cache: Folder shared by runs.
        pool: Processes.
        halve: Trace each rank of an adapter in two processes: faster where cores are free, slower elsewhere, since each
            builds the model.
        is_told: Write a line to stdout after each pass.

    Returns:
        {key: function that waits for the table}.
    """
    by_key = {key_of(cfg): cfg for cfg in reversed(cfgs)}
    parts = HALVES if halve else (PASS_KINDS,)
    ranks = {
        key: [
            [pool.submit(_trace_rank, cfg, number, kinds, cache, is_told) for kinds in parts]
            for number in range(num_ranks(cfg))
        ]
        for key, cfg in by_key.items()
    }
    return {key: partial(_wait_for_table, by_key[key], found) for key, found in ranks.items()}


def _submit_encoders(cfgs: Sequence[RunConfig], cache: Path, pool: Executor) -> dict[str, Callable[[], Encoders]]:
    """Start to trace the encoders of runs. Returns {key: function that waits for them}."""
    by_key = {encoders_key_of(cfg): cfg for cfg in reversed(cfgs)}
    return {key: pool.submit(_trace_encoders, cfg, cache).result for key, cfg in by_key.items()}


def _wait_for_table(cfg: RunConfig, ranks: Sequence[Sequence[Future[PassTraces]]]) -> PassTable:
    from trainer.plan.record.trace import join_traces, make_table

    return make_table(cfg, [join_traces([part.result() for part in parts]) for parts in ranks])


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, get_context("spawn"), _end_with_parent)


def _end_with_parent() -> None:
    """End this process when the one that started it does: after a kill it would wait for work for ever."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _trace_rank(cfg: RunConfig, number: int, kinds: Sequence[PassKind], cache: Path, is_told: bool) -> PassTraces:
    _silence_packages()
    from trainer.plan.record import fake_device
    from trainer.plan.record.trace import on_this_machine, trace_rank

    def done() -> None:
        if is_told:
            os.write(1, f"{PASS_DONE}\n".encode())  # at once, as other processes write there too

    return trace_rank(on_this_machine(cfg, cache), number, kinds, cache, fake_device.install(), done)


def _trace_encoders(cfg: RunConfig, cache: Path) -> Encoders:
    _silence_packages()
    from trainer.models import families
    from trainer.plan.record import fake_device
    from trainer.plan.record.encoders import trace_encoders
    from trainer.plan.record.trace import on_this_machine

    cfg = on_this_machine(cfg, cache)
    return trace_encoders(cfg, families.make(cfg, cache), fake_device.install())


def trace_peak(cfg: RunConfig, cache: Path) -> int:
    """Return the most bytes on rank 0 in a step of the whole model. Imports torch. cfg: with a decided strategy."""
    _silence_packages()
    from trainer.models import families
    from trainer.plan.record import fake_device
    from trainer.plan.record.trace import on_this_machine, trace_step

    cfg = on_this_machine(cfg, cache)
    return trace_step(cfg, families.make(cfg, cache), fake_device.install(), input_of(cfg)).peak


def _silence_packages() -> None:
    """Silence warnings of packages: whoever plans cannot change anything about them."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def write(file: Path, tables: Mapping[str, PassTable], encoders: Mapping[str, Encoders]) -> None:
    """Write a file of tables atomically. file: in a folder of the cache that runs share."""
    make_private_if_new(file.parent.parent)
    file.parent.mkdir(exist_ok=True)
    files.replace(file, encode(tables, encoders))


def make_published_tables(names: Sequence[str], jobs: int, only_missing: bool) -> int:
    """Make the tables of published models, of all without names. Returns an exit code.

    Args:
        names: Of models, as of the files.
        jobs: Number of processes.
        only_missing: Keep the tables that are there. Each is written when it is made, so that it goes on where it was
            interrupted.
    """
    models = _published()
    unknown = sorted(set(names) - models.keys())
    if unknown:
        complain(f"{unknown[0]} is not one of {', '.join(models)}")
        return 2
    with TemporaryDirectory() as folder, _pool(jobs) as pool:
        cache = Path(folder)
        wanted = {name: models[name] for name in names or models}
        found = []
        for name, cfgs in wanted.items():
            file = SHIPPED / f"{name}.json.gz"
            there = read(file) if only_missing else ({}, {})
            tables, encoders = dict(there[0]), dict(there[1])
            new = [cfg for cfg in cfgs if key_of(cfg) not in tables]
            of_encoders = [cfg for cfg in cfgs if encoders_key_of(cfg) not in encoders]
            waits = _submit_tables(new, cache, pool, halve=False, is_told=False)
            found.append((file, tables, encoders, waits, _submit_encoders(of_encoders, cache, pool)))
        for file, tables, encoders, waits, encoder_waits in found:
            encoders |= {key: of() for key, of in encoder_waits.items()}
            for key, table in waits.items():
                tables[key] = table()
                write(file, tables, encoders)
                say(f"{file.name}: {key}")
            write(file, tables, encoders)
    return 0


def _published() -> dict[str, list[RunConfig]]:
    """Return {model: runs to trace}: those of the presets, and the usual runs of each published model."""
    from trainer.models import families

    found: dict[str, list[RunConfig]] = {}
    presets = [load_config(preset).config for preset in sorted(PRESETS.glob("*.yaml"))]
    cfgs = [cfg for cfg in presets if cfg.model.options.architecture or cfg.model.path == "demo"]
    # Methods are tried with the model of the quickstart: each on each format that it can have.
    demo = next(cfg for cfg in presets if cfg.model.path == "demo")
    for format, method in itertools.product(("none", *FORMATS), ADAPTERS):
        if format == "none" or method != "none":
            changes = {"adapter": {"type": method}, "quantize": {"format": format}}
            kept = {"model": demo.model, "train": {"precision": demo.train.precision}, "data": {"path": "."}}
            cfgs.append(RunConfig.model_validate(kept | changes))
    for family in family_names():
        for architecture in families.get(family).architectures:
            model = {"family": family, "path": "published/model", "options": {"architecture": architecture}}
            cfgs += [RunConfig.model_validate({"model": model, "data": {"path": "."}} | other) for other in USUAL]
    for cfg in cfgs:
        found.setdefault(name_of(cfg), []).append(cfg)
    return found
