"""Prints a line of JSON for each comparison: recorded steps against whole ones, and the shipped tables against today's.

python -m tests.plan.shallow FOLDER
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.plan.common import MODELS, decode, run
from trainer import families
from trainer.config import ModelConfig
from trainer.families._published import published_folder
from trainer.plan import virtual
from trainer.plan.memory import sharding_of
from trainer.plan.record import on_this_machine, record, trace
from trainer.plan.steps import Size, Step, lengthen
from trainer.plan.store import key_of
from trainer.plan.tables import RANKS, recorded_sizes
from trainer.plan.timeline import simulate

SIZE = Size(512 * 512, 1)
BLOCKS = {"num_layers": 1, "num_single_layers": 6}
CASES: tuple[tuple[str, ...], ...] = (
    (),
    ("train.checkpointing=full", "parallel.cpu_offload=true"),
    ("adapter.type=none", "parallel.strategy=grad_op", "train.checkpointing=full"),
    ("quantize.format=nf4", "parallel.devices=2", "train.checkpointing=full"),
    ("adapter.type=dora", "parallel.strategy=hybrid", "parallel.shard_size=2"),
    ("adapter.type=loha", "parallel.strategy=none", "parallel.devices=1"),
)


def main(cache: Path, models: Sequence[str]) -> None:
    """Compare the tables of models, or without any the cases."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for model in models:
        print(json.dumps({"model": model, "is_equal": _is_equal(model, MODELS[model], cache)}), flush=True)
    if not models:
        folder = _shallow(cache)
        for fields in CASES:
            print(json.dumps(_compared(folder, fields, cache)), flush=True)


def _shallow(cache: Path) -> Path:
    """The configs of a published model with fewer blocks of their real width."""
    published = published_folder(ModelConfig(family="flux2", options={"architecture": "klein-4b"}), cache)  # type: ignore[arg-type]
    folder = shutil.copytree(published, cache / "shallow")
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | BLOCKS))
    return folder


def _compared(folder: Path, fields: tuple[str, ...], cache: Path) -> dict[str, object]:
    given = (*fields, f"model.path={folder}", "model.options.architecture=null", "train.batch_size=4")
    cfg = run("flux2 klein-4b", *given)
    family = families.make(cfg, cache)
    found = record(cfg, family, virtual.install(), [SIZE])
    units, marks = lengthen(found.units, found.marks[0], found.runs)
    blocks = [number for number, unit in enumerate(units) if not unit.is_root]
    recomputed = frozenset(blocks) if cfg.train.checkpointing == "full" else frozenset()
    step = Step(tuple(units), tuple(marks), found.buffers, recomputed)
    planned = simulate(step, sharding_of(cfg, cfg.parallel.strategy))  # type: ignore[arg-type]
    traced = trace(cfg, family, virtual.install(), SIZE)
    return {"case": " ".join(fields), "planned": planned.peak, "traced": traced.peak}


def _is_equal(model: str, file: Path, cache: Path) -> bool:
    """Whether the smallest pass with a lora allocates what the shipped table says."""
    family, _, architecture = model.partition("-")
    fields = [f"adapter.rank={RANKS[0]}"]
    if architecture == "demo":
        fields += ["model.path=demo", "model.options.architecture=null", "train.precision=fp32"]
    cfg = on_this_machine(run(f"{family} {architecture}", *fields), cache)
    table = decode(file.read_bytes())[key_of(cfg)]
    found = record(cfg, families.make(cfg, cache), virtual.install(), recorded_sizes(table.sides)[:1])
    figures = table.recorded[0].figures["kept"]
    return [(m.change, m.peak, m.flops) for m in found.marks[0]] == [
        (f.change[0], f.peak[0], f.flops[0]) for f in figures
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
