"""Finds the tables of a run's model: those of published models come with the program, others are traced once and kept.

No torch: tracing runs in a process of its own (`python -m trainer.plan record`).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.config.schema import RunConfig
from trainer.config.sections import ModelConfig, RankAdapter
from trainer.models import recognition
from trainer.parallel.strategy import Strategy
from trainer.plan.simulate.tables import (
    PASS_KINDS,
    Encoders,
    Model,
    PassTable,
    encoders_of,
    has_rank,
    num_ranks,
    sides_of,
    table_of,
    texts_of,
    traced_inputs,
)
from trainer.run.process import worker_environment
from trainer.system import files
from trainer.system.errors import InputError, Problem
from trainer.weights.hub import find_folder

SHIPPED = Path(__file__).parent / "recorded"
TRACE_TIMEOUT_S = 600
USUAL_TRACE_S = 20.0
"""Seconds that a trace takes on two cores; said until its own first passes have taken some."""
PASS_DONE = "pass"
"""The line that the traces' process writes after each pass."""
MOST_DECODED = 8
"""Tables that are kept in memory, at 0.3 to 2 MB each: of the run at work, and of what it is compared with."""
FORMAT = 3
"""Part of the names of cached files: raise it when the content of tables changes."""


Report = Callable[[float, float], None]
"""Called while a model is traced, with the share that is done and about how many seconds are left."""


def find_model(
    cfg: RunConfig,
    cache: Path,
    say: Callable[[str], None] = lambda sentence: None,
    report: Report = lambda share, left_s: None,
) -> Model:
    """Return the tables of a run's model, adapter, format and encoders; trace them first if necessary.

    Args:
        cfg: The run's config.
        cache: Folder shared by runs.
        say: Called with sentences before and during tracing.
        report: Called during tracing.

    Raises:
        InputError: The model is neither known nor on this machine, or cannot be built.
    """
    known = known_model(cfg, cache)
    if known is None:
        said = 0

        def traced(share: float, left_s: float) -> None:
            nonlocal said
            report(share, left_s)
            if said < (quarter := int(4 * share)) < 4:
                said = quarter
                say(f"{25 * said} % of it traced, about {left_s:.0f} s more")

        say(f"tracing once what {name_of(cfg)} allocates with this adapter and format: about {USUAL_TRACE_S:.0f} s")
        _run_planner("record", cfg, cache, traced)
        known = known_model(cfg, cache)
        assert known is not None
    return known


def known_model(cfg: RunConfig, cache: Path) -> Model | None:
    """Return the tables if they exist, in milliseconds, else None. Raises InputError when the model is not known."""
    table, encoders = known_parts(cfg, cache)
    return Model(table, encoders) if table and encoders else None


def unread_weights(model: ModelConfig) -> list[Problem]:
    """Return the weights of a model in a form that is not read, as a run refuses them. A plan needs no weights: there
    are none where they are not on this machine, or not sound."""
    try:
        return list(recognition.unread_weights(model))
    except InputError:
        return []


def known_parts(cfg: RunConfig, cache: Path) -> tuple[PassTable | None, Encoders | None]:
    """Return the table and the encoders, each if it exists. Raises InputError when the model is not known."""
    name, key, encoders_key = name_of(cfg), key_of(cfg), encoders_key_of(cfg)
    shipped = SHIPPED / f"{name}.json.gz"
    # A file that is not there yet is not remembered as one without the table.
    tables = (_table(file, key) for file in (shipped, table_file(name, cache, key)) if file.is_file())
    encoders = (
        _encoders(file, encoders_key) for file in (shipped, table_file(name, cache, encoders_key)) if file.is_file()
    )
    return next(filter(None, tables), None), next(filter(None, encoders), None)


def recorded_formats(cfg: RunConfig) -> list[dict[str, Any]]:
    """Return values of `quantize` with formats per layer for which a table of the run's model and adapter comes with
    the program. Raises InputError when the model is not known."""
    found: list[dict[str, Any]] = []
    for key in _texts(SHIPPED / f"{name_of(cfg)}.json.gz")[0]:
        adapter, format, _, *rest = key.split(" ", 3)
        values = json.loads(rest[0]).get("quantize") if rest else None
        if values and adapter == cfg.adapter.type:
            layers = {"keep": tuple(values.get("keep", ())), "formats": values.get("formats", {})}
            found.append({"format": format, **layers})
    return found


def name_of(cfg: RunConfig) -> str:
    """Return the model's name: family and architecture of a published one, else the family and a hash of its configs.

    Raises:
        InputError: The model is neither named by its architecture nor on this machine.
    """
    model = cfg.model
    if model.path == "demo":
        return f"{model.family}-demo"
    if model.path == "tiny":
        return f"{model.family}-tiny-{model.options.architecture or 'default'}"
    if model.options.architecture:
        return f"{model.family}-{model.options.architecture}"
    named = ("model.base", model.base) if model.base else ("model.path", model.path)
    try:
        folder = find_folder(*named)
    except InputError as error:
        raise InputError(f"{error}; or name model.options.architecture, to plan without the files") from error
    try:
        configs = sorted([*folder.glob("*config.json"), *folder.glob("*/config.json")])
        texts = [files.read(config).decode() for config in configs]
    except (OSError, UnicodeDecodeError) as error:  # a name that is too long, no right to read, or not a model's file
        raise InputError(f"{named[0]} {folder}: cannot be read ({error}); expected a folder with a model") from error
    if not texts:
        raise InputError(f"{named[0]} {folder}: no config.json of it or its parts; expected a folder with a model")
    return f"{model.family}-{_digest(texts)}"


def key_of(cfg: RunConfig) -> str:
    """Return the key of a run's table, from all settings that change allocations other than sizes, ranks and
    sharding: `lora nf4 bf16`."""
    parts = [cfg.adapter.type, cfg.quantize.format, cfg.train.precision]
    adapter = cfg.adapter.model_dump(
        exclude_defaults=True, exclude={"type", "alpha", "start", "rank_stabilized", "init"}
    )
    if has_rank(cfg):
        adapter.pop("rank", None)
    if isinstance(cfg.adapter, RankAdapter) and adapter.pop("dropout", 0):
        adapter["dropout"] = True
    quantize = cfg.quantize.model_dump(include={"keep", "formats"}, exclude_defaults=True)
    options = _traced_options(cfg)
    more: dict[str, Any] = {"adapter": adapter, "quantize": quantize, "train": cfg.model.train, "options": options}
    rest = {name: value for name, value in more.items() if value}
    return " ".join([*parts, json.dumps(rest, sort_keys=True)] if rest else parts)


def encoders_key_of(cfg: RunConfig) -> str:
    """Return the key of a run's encoders, likewise: `nf4 bf16`."""
    parts = [cfg.quantize.format if cfg.quantize.encoders else "none", cfg.train.precision]
    options = _traced_options(cfg)
    more = {"train": cfg.model.train, "options": options}
    rest = {name: value for name, value in more.items() if value}
    return " ".join([*parts, json.dumps(rest, sort_keys=True)] if rest else parts)


def _traced_options(cfg: RunConfig) -> dict[str, Any]:
    """Return the model's options that change what is allocated; the architecture is part of the model's name."""
    return cfg.model.options.model_dump(exclude_defaults=True, exclude={"architecture", "distilled", "new_tokens"})


def table_file(name: str, cache: Path, key: str) -> Path:
    """Return the cached file of a table or of encoders.

    Args:
        name: The model's name (`name_of`).
        cache: Folder shared by runs.
        key: The key of the table (`key_of`) or of the encoders (`encoders_key_of`).
    """
    return cache / "plans" / f"{name}-{FORMAT}-{_digest([key])}.json.gz"


def traced_peak(cfg: RunConfig, strategy: Strategy, cache: Path) -> int:
    """Return the most bytes of tensors on rank 0 in a step of the whole model, traced in a process of its own.

    Takes half a minute, more for many blocks.

    Args:
        cfg: The run's config.
        strategy: The decided `parallel.strategy`.
        cache: Folder shared by runs.

    Raises:
        InputError: As in `find_model`.
    """
    parallel = cfg.parallel.model_copy(update={"strategy": strategy})
    answer = _run_planner("trace", cfg.model_copy(update={"parallel": parallel}), cache)
    return int(json.loads(answer.splitlines()[-1]))


def _run_planner(command: str, cfg: RunConfig, cache: Path, report: Report = lambda share, left_s: None) -> str:
    """Run `python -m trainer.plan` and return its output."""
    passes, done, began, output = num_ranks(cfg) * len(PASS_KINDS) * len(traced_inputs(sides_of(cfg))), 0, 0.0, ""
    with TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+", errors="replace") as complaints:
        config = Path(folder) / "config.json"
        config.write_text(cfg.model_dump_json(), encoding="utf-8")
        argv = [sys.executable, "-m", "trainer.plan", command, str(config), str(cache)]
        with subprocess.Popen(
            argv, env=worker_environment(), stdout=subprocess.PIPE, stderr=complaints, text=True
        ) as planner:
            limit = threading.Timer(TRACE_TIMEOUT_S, planner.kill)
            limit.start()
            try:
                assert planner.stdout is not None
                for line in planner.stdout:
                    if line != f"{PASS_DONE}\n":
                        output += line
                        continue
                    done += 1
                    # The time before the first pass, in which the model is built, says little about the others.
                    began = began or time.monotonic()
                    left_s = (time.monotonic() - began) / (done - 1) * (passes - done) if done > 1 else USUAL_TRACE_S
                    report(done / passes, left_s)
                planner.wait()
                is_late = not limit.is_alive()
            finally:
                limit.cancel()
        complaints.seek(0)
        last = (complaints.read().strip().splitlines() or ["no message"])[-1]
    if is_late:
        raise InputError(f"the plan: {name_of(cfg)} was not traced within {TRACE_TIMEOUT_S} s")
    if planner.returncode:
        raise InputError(f"the plan: {name_of(cfg)} could not be traced: {last}")
    return output


def read(file: Path) -> tuple[dict[str, PassTable], dict[str, Encoders]]:
    """Return the tables and encoders of a file, by their keys; none where there is no file."""
    tables, encoders = _texts(file)
    decoded = {key: table_of(text) for key, text in tables.items()}
    return decoded, {key: encoders_of(text) for key, text in encoders.items()}


def _texts(file: Path) -> tuple[dict[str, str], dict[str, str]]:
    return texts_of(file.read_bytes()) if file.is_file() else ({}, {})


@lru_cache(MOST_DECODED)
def _table(file: Path, key: str) -> PassTable | None:
    text = _texts(file)[0].get(key)
    return table_of(text) if text else None


@lru_cache(MOST_DECODED)
def _encoders(file: Path, key: str) -> Encoders | None:
    text = _texts(file)[1].get(key)
    return encoders_of(text) if text else None


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
