"""Prints a line of JSON for each comparison: simulated steps against whole ones, and shipped tables against today's.

python -m tests.plan.shallow FOLDER [MODEL ...]
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tests.plan.common import MODELS, run
from trainer.config.schema import RunConfig
from trainer.config.sections import ADAPTERS, ModelConfig
from trainer.models import families
from trainer.models.parts.published import published_folder
from trainer.plan.record import fake_device
from trainer.plan.record.encoders import trace_captions, trace_encoders
from trainer.plan.record.make_tables import FORMATS
from trainer.plan.record.trace import on_this_machine, trace_passes, trace_sampling, trace_step
from trainer.plan.simulate.phases import captions, over_all, while_sampling
from trainer.plan.simulate.sizes import sharding_of
from trainer.plan.simulate.steps import ModelPass, PassInput, lengthen
from trainer.plan.simulate.tables import KIND_OF, PASS_KINDS, RANKS, PassKind, PassTable, traced_inputs
from trainer.plan.simulate.timeline import simulate, simulate_forward
from trainer.plan.store import key_of, read

SIZE = PassInput(512 * 512, 1)
METHODS = [method for method in ADAPTERS if method not in ("none", "lora")]
BLOCKS = {"num_layers": 1, "num_single_layers": 5}
CASES: tuple[tuple[str, ...], ...] = (
    (),
    ("train.checkpointing=full", "parallel.cpu_offload=true"),
    ("adapter.type=none", "parallel.strategy=grad_op", "train.checkpointing=full"),
    ("quantize.format=nf4", "parallel.devices=2", "train.checkpointing=full"),
    ("adapter.type=dora", "parallel.strategy=hybrid", "parallel.shard_size=2"),
    ("adapter.type=loha", "parallel.strategy=none", "parallel.devices=1"),
    ("train.checkpointing=selective",),
    ("quantize.format=nf4", "parallel.devices=1", "parallel.strategy=none", "train.checkpointing=selective"),
    ("adapter.type=none", "parallel.strategy=grad_op", "train.checkpointing=selective"),
    ("adapter.type=dora", "quantize.format=int8", "train.checkpointing=selective"),
    ("parallel.offload_blocks=0.5",),
    (
        *("quantize.format=nf4", "parallel.strategy=none", "parallel.devices=1", "train.checkpointing=full"),
        "parallel.offload_blocks=1.0",
    ),
    ("adapter.type=dora", "parallel.strategy=hybrid", "parallel.shard_size=2", "parallel.offload_blocks=2"),
)


def main(cache: Path, models: Sequence[str]) -> None:
    """Compare the tables of models, or without models the cases."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for model in models:
        print(json.dumps({"model": model, "is_equal": _is_equal(model, MODELS[model], cache)}), flush=True)
    if not models:
        folder = _shallow(cache)
        cases = [(folder, fields) for fields in CASES] + [(Path("demo"), ("train.precision=fp32",))]
        compared = itertools.chain(*(_compared(*case, cache) for case in cases), _captions(folder, cache))
        for case, planned, traced in compared:
            print(json.dumps({"case": case, "planned": planned, "traced": traced}), flush=True)


def _shallow(cache: Path) -> Path:
    """The configs of a published model with fewer blocks of their real width."""
    published = published_folder(ModelConfig(family="flux2", options={"architecture": "klein-4b"}), cache)  # type: ignore[arg-type]
    folder = shutil.copytree(published, cache / "shallow")
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | BLOCKS))
    return folder


def _compared(folder: Path, fields: tuple[str, ...], cache: Path) -> Iterator[tuple[str, float, float]]:
    """Yield (case, planned, traced): most bytes in training, and for a lora when a sample is drawn."""
    given = (*fields, f"model.path={folder}", "model.options.architecture=null", "train.batch_size=4")
    cfg = run("flux2 klein-4b", *given)
    family, device = families.make(cfg, cache), fake_device.install()
    trained = KIND_OF[cfg.train.checkpointing]  # type: ignore[index]
    drawn: tuple[PassKind, ...] = ("drawn",) if cfg.adapter.type == "lora" else ()
    found = trace_passes(cfg, family, device, [SIZE], (*drawn, trained))

    def model_pass(kind: PassKind) -> ModelPass:
        units, marks = lengthen(found.units, found.marks[kind][0], found.runs)
        blocks = [number for number, unit in enumerate(units) if kind == "drawn" or not unit.is_root]
        again = frozenset[int]() if kind == "kept" else frozenset(blocks)
        return ModelPass(tuple(units), tuple(marks), found.buffers, again)

    sharding = sharding_of(cfg, cfg.parallel.strategy)  # type: ignore[arg-type]
    training = simulate(model_pass(trained), sharding)
    yield f"training {' '.join(fields)}", training.peak, trace_step(cfg, family, device, SIZE).peak
    if drawn:
        spread = while_sampling(cfg, model_pass("drawn"), sharding)
        drawing = simulate_forward(model_pass("drawn"), replace(spread, optimizer_bytes=0.0), {})
        yield f"drawing {' '.join(fields)}", drawing.peak, trace_sampling(cfg, family, device, SIZE)


def _captions(folder: Path, cache: Path) -> Iterator[tuple[str, float, float]]:
    """The same of encoding captions, on one rank and on four."""
    fields = (f"model.path={folder}", "model.options.architecture=null")
    cfgs = [run("flux2 klein-4b", *fields, f"parallel.devices={ranks}") for ranks in (1, 4)]
    family, device = families.make(cfgs[0], cache), fake_device.install()
    found = trace_encoders(cfgs[0], family, device)
    for cfg in cfgs:
        planned = captions(found, over_all(cfg)).peak
        yield f"captions {cfg.parallel.devices}", planned, trace_captions(cfg, family, device)


def _is_equal(model: str, file: Path, cache: Path) -> bool:
    """Whether the smallest passes allocate what the shipped tables say: with a lora on each traced format, and with one
    other method, so that all models together have each method more than once."""
    family, _, architecture = model.partition("-")
    fields = ["export.what=merged"]  # the methods of a family are more than those that its own format carries
    if architecture == "demo":
        fields += ["model.path=demo", "model.options.architecture=null", "train.precision=fp32"]
    tables = read(file)[0]
    method = METHODS[list(MODELS).index(model) % len(METHODS)]
    runs = [*((f"adapter.rank={RANKS[0]}", f"quantize.format={name}") for name in FORMATS), (f"adapter.type={method}",)]
    cfgs = [run(f"{family} {architecture}", *fields, *of_run) for of_run in [(f"adapter.rank={RANKS[0]}",), *runs]]
    known = [cfg for cfg in cfgs if key_of(cfg) in tables]
    assert cfgs[0] in known and cfgs[-1] in known, model
    return all(_is_equal_to(tables[key_of(cfg)], on_this_machine(cfg, cache), cache) for cfg in known)


def _is_equal_to(table: PassTable, cfg: RunConfig, cache: Path) -> bool:
    found = trace_passes(cfg, families.make(cfg, cache), fake_device.install(), traced_inputs(table.sides)[:1])
    return all(
        [(m.change, m.peak, m.flops) for m in found.marks[kind][0]]
        == [(f.change[0], f.peak[0], f.flops[0]) for f in table.by_rank[0].figures[kind]]
        for kind in PASS_KINDS
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
