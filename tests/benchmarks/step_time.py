"""Our training step, with everything it records, against the loop a good engineer writes by hand.

Both live in one process and take turns, so that the noise of a shared machine meets both. What counts is CPU seconds
of the whole process, threads included: wall time on shared cores tells more of the neighbours than of the code.

Steps on a quantized base are compared with steps on bf16, and steps that recompute with steps that keep everything.

    python -m tests.benchmarks.step_time [TOPIC ...]    about 15 minutes; exit code 1 when a limit is exceeded
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.benchmarks import bare_loop
from tests.benchmarks.bare_loop import DTYPES, training_step
from tests.benchmarks.processes import run_ranks_afresh
from tests.benchmarks.workload import KLEIN_SMALL, Bench, prepare
from trainer.config.schema import RunConfig
from trainer.config.sections import ParallelConfig
from trainer.data.images.image_source import EncodedData
from trainer.distributed.world import World, connect
from trainer.models.families.flux2 import Flux2, image_ids, text_ids
from trainer.models.objectives.base import Batch

PAIRS = 11
WARM_UP = 3
MODULE = "tests.benchmarks.step_time"

Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A comparison.

    Attributes:
        limit: Largest ratio; None: it is only shown.
        fields: {section: fields} of a run that is compared with one without them. Empty: with the loop by hand.
    """

    ranks: int
    precision: str
    limit: float | None
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


TOPICS: dict[str, dict[str, Case]] = {
    "by-hand": {
        f"{ranks} x {precision}": Case(ranks, precision, limit)
        for ranks, limit in ((1, 1.03), (2, 1.05))
        for precision in DTYPES
    },
    "recompute": {
        f"{mode}, {precision}": Case(1, precision, limit, {"train": {"checkpointing": mode}})
        for mode, limit in (("selective", 1.06), ("full", None))
        for precision in DTYPES
    },
    "quantized": {format: Case(2, "bf16", 1.00, {"quantize": {"format": format}}) for format in ("nf4", "int8", "fp8")},
}


@dataclass(frozen=True)
class Ratio:
    """Medians of interleaved pairs of steps. ours, by_hand: CPU seconds of one rank.

    cpu, wall: median over the pairs of our seconds / theirs.
    """

    ours: float
    by_hand: float
    cpu: float
    wall: float


@dataclass(frozen=True)
class Seconds:
    """Of one step, mean of the ranks."""

    cpu: float
    wall: float


def compare(ours: Step, by_hand: Step, world: World, pairs: int = PAIRS) -> Ratio:
    """Run both in turns, each first in every second pair, and compare. Collective; seconds are means of the ranks."""
    for _ in range(WARM_UP):
        ours()
        by_hand()
    measured: list[tuple[Seconds, Seconds]] = []
    for pair in range(pairs):
        if pair % 2:
            hand, mine = _time(by_hand, world), _time(ours, world)
        else:
            mine, hand = _time(ours, world), _time(by_hand, world)
        measured.append((mine, hand))
    return Ratio(
        statistics.median(mine.cpu for mine, _ in measured),
        statistics.median(hand.cpu for _, hand in measured),
        statistics.median(mine.cpu / hand.cpu for mine, hand in measured),
        statistics.median(mine.wall / hand.wall for mine, hand in measured),
    )


def compare_configs(
    world: World, bench: Bench, name: str, cfgs: tuple[RunConfig, RunConfig], pairs: int = PAIRS
) -> Ratio:
    """Compare steps of two trainers in this process, the first with the second. Collective. name: of their folders."""
    trainers = [bench.trainer(f"{name}-{number}", cfg, world) for number, cfg in enumerate(cfgs)]
    try:
        return compare(trainers[0].train_step, trainers[1].train_step, world, pairs)
    finally:
        for trainer in trainers:
            trainer.close()


def _time(step: Step, world: World) -> Seconds:
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    spent = world.sum([time.process_time() - cpu, time.perf_counter() - wall])
    return Seconds(*(seconds / world.size for seconds in spent))


def compare_with_hand_written(world: World, bench: Bench, precision: str, pairs: int = PAIRS) -> Ratio:
    """Our trainer and the loop by hand on these ranks: sharded fully on several, not at all on one. Collective."""
    strategy = "full" if world.size > 1 else "none"
    cfg = bench.config(
        train={"batch_size": world.size, "precision": precision},
        parallel={"device": "cpu", "devices": world.size, "strategy": strategy},
    )
    trainer = bench.trainer(f"{precision}-{world.size}", cfg, world)
    try:
        return compare(trainer.train_step, hand_written(bench, trainer.data.data, world, precision), world, pairs)
    finally:
        trainer.close()


def hand_written(bench: Bench, data: EncodedData, world: World, precision: str, compiler: str = "") -> Step:
    """One step of the minimal loop: batch in memory, diffusers' model, peft, fused AdamW.

    On several ranks `fully_shard`, on one autocast, as in diffusers' own training examples. compiler: backend of
    torch.compile, block by block.
    """
    dtype = DTYPES[precision]
    model = lora_model(bench, dtype).to(world.device)
    if world.size > 1:
        shard(model, dtype)
    model.train()
    if compiler:
        model.compile_repeated_blocks(backend=compiler)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    batches = cycle(_batches(data, world))
    side = bench.workload.pixels // Flux2.size_multiple
    positions = {"img_ids": image_ids(side, side), "txt_ids": text_ids(bench.workload.text_tokens)}
    positions = {name: ids.to(world.device) for name, ids in positions.items()}
    autocast = torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32 and world.size == 1)

    def step() -> float:
        batch = next(batches)
        return training_step(model, optimizer, parameters, batch, positions, dtype, autocast).item()

    return step


def _batches(data: EncodedData, world: World) -> list[Batch]:
    """Every example as a batch of one, in the device's memory."""
    examples = [data.cache.read(photo.pixels.latents) | data.cache.read(photo.texts[0]) for photo in data.train]
    return [{key: tensor.unsqueeze(0).to(world.device) for key, tensor in example.items()} for example in examples]


def lora_model(bench: Bench, dtype: torch.dtype) -> Flux2Transformer2DModel:
    """The transformer as diffusers loads it, frozen in `dtype`, with fp32 adapters on the layers that we adapt."""
    targets = "|".join(f"(?:{pattern})" for pattern in Flux2.adapter_targets["transformer"])
    return bare_loop.lora_model(bench.model, targets, dtype)


def shard(model: Flux2Transformer2DModel, dtype: torch.dtype) -> None:
    """`fully_shard` block by block with the mixed precision that our strategy `full` has."""
    root, inner = MixedPrecisionPolicy(), MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype != torch.float32:
        root = MixedPrecisionPolicy(dtype, torch.float32)
        inner = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        fully_shard(block, mp_policy=inner)
    fully_shard(model, mp_policy=root)


def compare_with_another(world: World, bench: Bench, name: str, case: Case) -> Ratio:
    """Steps of a run with the case's fields against steps of one without. Collective. name: of their folders."""
    base = bench.config(
        train={"batch_size": world.size, "precision": case.precision},
        parallel={"device": "cpu", "devices": world.size, "strategy": "full" if world.size > 1 else "none"},
    )
    changed = base.model_dump()
    for section, fields in case.fields.items():
        changed[section] |= fields
    return compare_configs(world, bench, name, (RunConfig.model_validate(changed), base))


def main() -> int:
    """Print one row per comparison. Returns 1 when one is over its limit."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("topics", nargs="*", metavar="topic", help=f"some of {', '.join(TOPICS)}; default: all")
    parser.add_argument("--case-of", nargs=3, metavar=("FOLDER", "TOPIC", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case_of:
        folder, topic, name = options.case_of
        _measure(Path(folder), name, TOPICS[topic][name])
        return 0
    unknown = [topic for topic in options.topics if topic not in TOPICS]
    if unknown:
        parser.error(f"{unknown[0]} is not one of {', '.join(TOPICS)}")
    is_within = True
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), KLEIN_SMALL)
        for topic in options.topics or TOPICS:
            print(f"{topic:24}{'ours':>9}{'theirs':>9}{'ratio':>8}{'limit':>7}{'wall':>8}   (CPU s per step and rank)")
            for name, case in TOPICS[topic].items():
                ratio = Ratio(**run_ranks_afresh(case.ranks, MODULE, "--case-of", folder, topic, name))
                is_within &= _row(name, ratio, case.limit)
    return int(not is_within)


def _measure(folder: Path, name: str, case: Case) -> None:
    torch.set_num_threads(1)
    bench = Bench(folder, KLEIN_SMALL)
    with connect(ParallelConfig(device="cpu", devices=case.ranks)) as world:
        if case.fields:
            ratio = compare_with_another(world, bench, name, case)
        else:
            ratio = compare_with_hand_written(world, bench, case.precision)
    if world.rank == 0:  # lines of two ranks mix
        print(json.dumps(asdict(ratio)))


def _row(name: str, ratio: Ratio, limit: float | None) -> bool:
    """Print a comparison; whether it is within its limit."""
    within = limit is None or ratio.cpu <= limit
    figures = f"{ratio.ours:>9.3f}{ratio.by_hand:>9.3f}{ratio.cpu:>8.3f}{limit or '':>7}{ratio.wall:>8.3f}"
    print(f"{name:24}{figures}{'' if within else '   over'}", flush=True)
    return within


if __name__ == "__main__":
    sys.exit(main())
