"""Where recorded tables lie: those of published models come with the program, others are recorded once and kept.

No torch: what must be recorded is recorded by a process of its own (`python -m trainer.plan record`).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache as remembered
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.config.sections import RankAdapter
from trainer.parallel.strategy import Strategy
from trainer.plan.tables import Encoders, Model, Table, decode, has_rank
from trainer.run.process import worker_environment
from trainer.weights.hub import find_folder

SHIPPED = Path(__file__).parent / "recorded"
RECORDING_S = 600
RECORDED = 3
"""Part of the names of files that are kept: raise it when other things are recorded."""


def find_model(cfg: RunConfig, cache: Path, say: Callable[[str], None] = lambda sentence: None) -> Model:
    """What was recorded of a run's model, adapter, format and encoders. cache: folder shared by runs.

    say: told before something is recorded, which takes minutes. Raises InputError when the model is not known and not
    on this machine, or cannot be built.
    """
    known = known_model(cfg, cache)
    if known is None:
        say(f"recording what {name_of(cfg)} allocates, once: half a minute to a few")
        _asked("record", cfg, cache)
        known = known_model(cfg, cache)
        assert known is not None
    return known


def known_model(cfg: RunConfig, cache: Path) -> Model | None:
    """The same if it is there already, in milliseconds. Raises InputError when the model is not known."""
    table, encoders = known_parts(cfg, cache)
    return Model(table, encoders) if table and encoders else None


def known_parts(cfg: RunConfig, cache: Path) -> tuple[Table | None, Encoders | None]:
    """What there is of it. Raises InputError when the model is not known."""
    name, key, encoders_key = name_of(cfg), key_of(cfg), encoders_key_of(cfg)
    shipped = SHIPPED / f"{name}.json.gz"
    tables = (_read(file)[0].get(key) for file in (shipped, kept_file(name, cache, key)))
    encoders = (_read(file)[1].get(encoders_key) for file in (shipped, kept_file(name, cache, encoders_key)))
    return next(filter(None, tables), None), next(filter(None, encoders), None)


def name_of(cfg: RunConfig) -> str:
    """Name of the model: of a published one its family and architecture, else what its configs are told apart by.

    Raises InputError for a model that is neither named by its architecture nor on this machine.
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
    configs = sorted([*folder.glob("*config.json"), *folder.glob("*/config.json")])
    if not configs:
        raise InputError(f"{named[0]} {folder}: no config.json of it or its parts; expected a folder with a model")
    return f"{model.family}-{_digest([config.read_text(encoding='utf-8') for config in configs])}"


def key_of(cfg: RunConfig) -> str:
    """What decides what is allocated, beside sizes, ranks and how the run is sharded: `lora nf4 bf16`."""
    parts = [cfg.adapter.type, cfg.quantize.format, cfg.train.precision]
    adapter = cfg.adapter.model_dump(exclude_defaults=True, exclude={"type", "alpha", "start"})
    if has_rank(cfg):
        adapter.pop("rank", None)
    if isinstance(cfg.adapter, RankAdapter) and adapter.pop("dropout", 0):
        adapter["dropout"] = True
    quantize = cfg.quantize.model_dump(include={"keep", "formats"}, exclude_defaults=True)
    options = _recorded_options(cfg)
    more: dict[str, Any] = {"adapter": adapter, "quantize": quantize, "train": cfg.model.train, "options": options}
    rest = {name: value for name, value in more.items() if value}
    return " ".join([*parts, json.dumps(rest, sort_keys=True)] if rest else parts)


def encoders_key_of(cfg: RunConfig) -> str:
    """What decides what the encoders allocate, likewise: `nf4 bf16`."""
    parts = [cfg.quantize.format if cfg.quantize.encoders else "none", cfg.train.precision]
    options = _recorded_options(cfg)
    more = {"train": cfg.model.train, "options": options}
    rest = {name: value for name, value in more.items() if value}
    return " ".join([*parts, json.dumps(rest, sort_keys=True)] if rest else parts)


def _recorded_options(cfg: RunConfig) -> dict[str, Any]:
    """Those that change what is allocated; the architecture is part of the model's name."""
    return cfg.model.options.model_dump(exclude_defaults=True, exclude={"architecture", "distilled"})


def kept_file(name: str, cache: Path, key: str) -> Path:
    """Where something is kept that was recorded of a model. name: `name_of`.  key: `key_of` or `encoders_key_of`."""
    return cache / "plans" / f"{name}-{RECORDED}-{_digest([key])}.json.gz"


def traced_peak(cfg: RunConfig, strategy: Strategy, cache: Path) -> int:
    """Bytes of tensors on rank 0 at most, from a step of the whole model as it is: no table, a process of its own.

    Takes half a minute, more for many blocks. strategy: `parallel.strategy` decided. Raises InputError as `find_model`.
    """
    parallel = cfg.parallel.model_copy(update={"strategy": strategy})
    answer = _asked("trace", cfg.model_copy(update={"parallel": parallel}), cache)
    return int(json.loads(answer.splitlines()[-1]))


def _asked(command: str, cfg: RunConfig, cache: Path) -> str:
    """What `python -m trainer.plan` prints."""
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(cfg.model_dump_json(), encoding="utf-8")
        argv = [sys.executable, "-m", "trainer.plan", command, str(config), str(cache)]
        try:
            done = subprocess.run(
                argv, env=worker_environment(), capture_output=True, text=True, check=False, timeout=RECORDING_S
            )
        except subprocess.TimeoutExpired as error:
            raise InputError(f"the plan: {name_of(cfg)} was not recorded within {RECORDING_S} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"the plan: {name_of(cfg)} could not be recorded: {last}")
    return done.stdout


def _read(file: Path) -> tuple[dict[str, Table], dict[str, Encoders]]:
    return _decoded(file) if file.is_file() else ({}, {})


@remembered
def _decoded(file: Path) -> tuple[dict[str, Table], dict[str, Encoders]]:
    return decode(file.read_bytes())


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
