"""The plan against full traces: every block of the published model through the trainer's own step, on fake tensors.

python -m tests.benchmarks.plan [--only TEXT]     about 15 minutes; exit code 1 when a limit is exceeded
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from trainer.config.load import load_config_text
from trainer.config.schema import RunConfig
from trainer.plan.memory import plan_of
from trainer.plan.simulate.phases import CAPTIONS, SAMPLING, TRAINING, captions, over_all
from trainer.plan.simulate.sizes import input_of, rank_of, sharding_of
from trainer.plan.simulate.timeline import simulate_forward
from trainer.plan.store import find_model

USUAL, WORST = 0.01, 0.03
"""Largest error, as a share of the traced peak: of all but UNUSUAL, and of any."""
UNUSUAL = 2
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A run of a published model. ranks: on one machine.  fields: overrides.  part: of the run."""

    family: str
    architecture: str
    ranks: int
    fields: tuple[str, ...]
    part: str = TRAINING

    def __str__(self) -> str:
        return f"{self.part} {self.family} {self.architecture}, {self.ranks} ranks, {' '.join(self.fields)}"

    def config(self) -> RunConfig:
        """The run, one image per rank and pass unless it says otherwise."""
        strategy = "full" if self.ranks > 1 else "none"
        fields = (
            f"model.family={self.family}",
            "model.path=published/model",
            f"model.options.architecture={self.architecture}",
            f"parallel.devices={self.ranks}",
            f"parallel.strategy={strategy}",
            f"train.batch_size={self.ranks}",
        )
        given = {field.partition("=")[0] for field in self.fields}
        usual = [field for field in fields if field.partition("=")[0] not in given]
        return load_config_text("data: {path: .}", (*usual, *self.fields), Path("case.yaml")).config


@dataclass(frozen=True)
class Outcome:
    """Bytes on rank 0 at its fullest, and floating-point operations of a step: traced, and planned."""

    case: Case
    traced: int
    planned: float
    traced_flops: int = 0
    planned_flops: float = 0.0

    @property
    def error(self) -> float:
        return self.planned / self.traced - 1

    def __str__(self) -> str:
        flops = f", FLOP {100 * (self.planned_flops / self.traced_flops - 1):+.2f} %" if self.traced_flops else ""
        sizes = f"{self.traced / GIB:7.2f} GiB traced, {self.planned / GIB:7.2f} planned"
        return f"{100 * self.error:+6.2f} %  {sizes}{flops}: {self.case}"


def cases() -> list[Case]:
    """Families, adapters, formats, strategies, checkpointing, offload, sizes and ranks."""
    again, small, half = "train.checkpointing=full", "data.resolution=512", "data.resolution=768"
    nf4, int8, fp8 = (f"quantize.format={name}" for name in ("nf4", "int8", "fp8"))
    full = "adapter.type=none"
    lines: list[tuple[str, int, tuple[str, ...]]] = [
        ("flux2 dev", 4, ()),
        ("flux2 dev", 4, (again,)),
        ("flux2 dev", 4, (again, small)),
        ("flux2 dev", 4, (again, "parallel.cpu_offload=true")),
        ("flux2 dev", 2, (again, nf4)),
        ("flux2 dev", 4, (again, int8, "adapter.rank=64")),
        ("flux2 dev", 8, (again, half, "train.micro_batch=2", "train.batch_size=16")),
        ("flux2 dev", 8, (full, again, small)),
        ("flux2 klein-4b", 1, ()),
        ("flux2 klein-4b", 1, (again,)),
        ("flux2 klein-4b", 2, ("adapter.type=dora", small)),
        ("flux2 klein-4b", 2, ("adapter.type=loha", again)),
        ("flux2 klein-4b", 2, ("adapter.type=lokr", small)),
        ("flux2 klein-4b", 2, ("adapter.type=diag-oft", small, again)),
        ("flux2 klein-4b", 2, ("adapter.type=boft", small)),
        ("flux2 klein-4b", 1, ("adapter.type=boft", small)),
        ("flux2 klein-4b", 4, ("parallel.strategy=grad_op", small)),
        ("flux2 klein-4b", 4, ("parallel.strategy=hybrid", "parallel.shard_size=2", again)),
        ("flux2 klein-4b", 2, ("parallel.strategy=ddp", again)),
        ("flux2 klein-4b", 4, (full, again, half)),
        ("flux2 klein-4b", 4, (full, "parallel.cpu_offload=true", again)),
        ("flux2 klein-4b", 2, ("train.batch_size=8", again)),
        ("flux2 klein-4b", 2, (full, "train.batch_size=4", small)),
        ("flux2 klein-4b", 2, ("train.checkpointing=3", half)),
        ("flux2 klein-4b", 4, ("parallel.prefetch_forward=2", "parallel.prefetch_backward=2", again)),
        ("flux2 klein-9b", 2, (again,)),
        ("flux2 klein-9b", 1, (again, nf4)),
        ("flux1 dev", 2, (again,)),
        ("flux1 dev", 1, (again, nf4)),
        ("flux1 dev", 4, (small, "adapter.rank=8")),
        ("flux1 dev", 2, (again, fp8)),
        ("sd3 sd35-large", 2, ()),
        ("sd3 sd35-large", 2, (again, int8)),
        ("sd3 sd3-medium", 1, ("train.micro_batch=2", "train.batch_size=2")),
        ("sdxl base", 1, ()),
        ("sdxl base", 2, ("adapter.type=locon",)),
        ("sdxl base", 4, (full, again)),
        ("qwen_image qwen-image", 2, (again,)),
        ("qwen_image qwen-image", 4, (again, nf4, half)),
        ("z_image z-image", 1, (again,)),
        ("z_image z-image", 2, (full, again, small)),
        ("flux3 flux3", 4, (again,)),
        ("flux3 flux3", 2, (again, nf4, small)),
        ("bagel 7b-mot", 1, (again, nf4)),
        ("bagel 7b-mot", 2, (again, half)),
        ("bagel 7b-mot", 8, (full, again, small)),
    ]
    others: list[tuple[str, str, int, tuple[str, ...]]] = [
        (SAMPLING, "flux2 dev", 4, ()),
        (SAMPLING, "flux2 klein-4b", 1, (nf4,)),
        (SAMPLING, "flux1 dev", 2, ("parallel.cpu_offload=true",)),
        (SAMPLING, "sd3 sd35-large", 2, ()),
        (SAMPLING, "sdxl base", 1, ()),
        (SAMPLING, "qwen_image qwen-image", 4, ("parallel.strategy=grad_op",)),
        (CAPTIONS, "flux2 dev", 4, ()),
        (CAPTIONS, "flux2 dev", 2, (nf4, "quantize.encoders=true")),
        (CAPTIONS, "flux1 dev", 2, ()),
        (CAPTIONS, "sd3 sd35-large", 1, ()),
        (CAPTIONS, "qwen_image qwen-image", 2, ()),
        (CAPTIONS, "z_image z-image", 2, ("parallel.cpu_offload=true",)),
        (CAPTIONS, "sdxl base", 1, ()),
    ]
    training = [Case(*model.split(), ranks, fields) for model, ranks, fields in lines]
    return [*training, *(Case(*model.split(), ranks, fields, part) for part, model, ranks, fields in others)]


def compare(chosen: Sequence[Case]) -> list[Outcome]:
    """Trace and plan each case, in two processes."""
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        return list(pool.map(_outcome, chosen, [Path(cache)] * len(chosen)))


def _outcome(case: Case, cache: Path) -> Outcome:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from trainer.models import families
    from trainer.plan.record import fake_device
    from trainer.plan.record.encoders import trace_captions
    from trainer.plan.record.trace import on_this_machine, trace_sampling, trace_step

    cfg = case.config()
    model = find_model(cfg, cache)
    planned = plan_of(cfg, model, None)
    size = input_of(cfg)
    family, device = families.make(on_this_machine(cfg, cache), cache), fake_device.install()
    if case.part == CAPTIONS:
        outcome = Outcome(case, trace_captions(cfg, family, device), captions(model.encoders, over_all(cfg)).peak)
    elif case.part == SAMPLING:  # the denoiser, before anything was trained
        sharding = replace(sharding_of(cfg, planned.strategy), optimizer_bytes=0.0)
        drawing = simulate_forward(model.table.sampling(size, rank_of(cfg)), sharding, {})
        outcome = Outcome(case, trace_sampling(cfg, family, device, size), drawing.peak)
    else:
        traced = trace_step(cfg, family, device, size)
        outcome = Outcome(case, traced.peak, planned.training.peak, traced.flops, planned.flops)
    print(outcome, flush=True)
    return outcome


def main(argv: Sequence[str]) -> int:
    """Compare and judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.plan")
    parser.add_argument("--only", default="", help="cases whose line holds this text")
    options = parser.parse_args(argv)
    outcomes = compare([case for case in cases() if options.only in str(case)])
    errors = sorted(abs(outcome.error) for outcome in outcomes)
    beyond = sum(error > USUAL for error in errors)
    print(f"{len(errors)} cases, {beyond} beyond {USUAL:.0%}, largest {errors[-1]:.2%}")
    return int(beyond > UNUSUAL or errors[-1] > WORST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
