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

from trainer.config import InputError, RankAdapter, RunConfig
from trainer.hub import find_folder
from trainer.launch import worker_environment
from trainer.plan.tables import Table, decode
from trainer.zero import Strategy

SHIPPED = Path(__file__).parent / "recorded"
RECORDING_S = 600
UNRANKED = ("lokr",)
"""Adapters with a rank whose sizes do not lie on a line over it."""


def find_table(cfg: RunConfig, cache: Path, say: Callable[[str], None] = lambda sentence: None) -> Table:
    """The table of a run's model, adapter and format. cache: folder shared by runs.

    say: told before something is recorded, which takes half a minute. Raises InputError when the model is not known and
    not on this machine, or cannot be built.
    """
    known = known_table(cfg, cache)
    if known:
        return known
    say(f"recording what {name_of(cfg)} allocates, once: about half a minute")
    kept = _kept(cfg, cache)
    _record(cfg, cache, kept)
    return _read(kept)[key_of(cfg)]


def known_table(cfg: RunConfig, cache: Path) -> Table | None:
    """The table if it is there already, in milliseconds. Raises InputError when the model is not known."""
    key = key_of(cfg)
    for file in (SHIPPED / f"{name_of(cfg)}.json.gz", _kept(cfg, cache)):
        if file.is_file() and key in _read(file):
            return _read(file)[key]
    return None


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
    configs = sorted(folder.glob("*/config.json"))
    if not configs:
        raise InputError(f"{named[0]} {folder}: no config.json of its parts; expected a diffusers folder")
    return f"{model.family}-{_digest([config.read_text(encoding='utf-8') for config in configs])}"


def key_of(cfg: RunConfig) -> str:
    """What decides what is allocated, beside sizes, ranks and how the run is sharded: `lora nf4 bf16`."""
    parts = [cfg.adapter.type, cfg.quantize.format, cfg.train.precision]
    adapter = cfg.adapter.model_dump(exclude_defaults=True, exclude={"type", "alpha", "start"})
    if isinstance(cfg.adapter, RankAdapter):
        if cfg.adapter.type not in UNRANKED:
            adapter.pop("rank", None)
        if adapter.pop("dropout", 0):
            adapter["dropout"] = True
    quantize = cfg.quantize.model_dump(include={"keep", "formats"}, exclude_defaults=True)
    options = cfg.model.options.model_dump(exclude_defaults=True, exclude={"architecture"})
    more: dict[str, Any] = {"adapter": adapter, "quantize": quantize, "train": cfg.model.train, "options": options}
    rest = {name: value for name, value in more.items() if value}
    return " ".join([*parts, json.dumps(rest, sort_keys=True)] if rest else parts)


def _kept(cfg: RunConfig, cache: Path) -> Path:
    return cache / "plans" / f"{name_of(cfg)}-{_digest([key_of(cfg)])}.json.gz"


def traced_peak(cfg: RunConfig, strategy: Strategy, cache: Path) -> int:
    """Bytes of tensors on rank 0 at most, from a step of the whole model as it is: no table, a process of its own.

    Takes half a minute, more for many blocks. strategy: `parallel.strategy` decided. Raises InputError as `find_table`.
    """
    parallel = cfg.parallel.model_copy(update={"strategy": strategy})
    answer = _asked("trace", cfg.model_copy(update={"parallel": parallel}), cache)
    return int(json.loads(answer.splitlines()[-1]))


def _record(cfg: RunConfig, cache: Path, file: Path) -> None:
    _asked("record", cfg, cache, str(file))


def _asked(command: str, cfg: RunConfig, cache: Path, *arguments: str) -> str:
    """What `python -m trainer.plan` prints."""
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(cfg.model_dump_json(), encoding="utf-8")
        argv = [sys.executable, "-m", "trainer.plan", command, str(config), str(cache), *arguments]
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


@remembered
def _read(file: Path) -> dict[str, Table]:
    return decode(file.read_bytes())


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
