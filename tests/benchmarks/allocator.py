"""What the plan's tracer counts, against what PyTorch's CPU allocator gave out for the same step of real tensors.

A FLUX.2 of 2 + 6 blocks (136 M parameters, bf16), 256 x 256 pixels, two ranks: traced with fake tensors, run with real
ones on rank 0 of a fake process group, and on two real gloo ranks, whose transport takes copies of its own.

    python -m tests.benchmarks.allocator        about 10 minutes; exit code 1 when a limit is exceeded
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.processes import run_ranks_afresh
from trainer.config.load import load_config_text
from trainer.config.schema import RunConfig
from trainer.config.sections import ModelConfig, ModelOptions
from trainer.distributed.world import World, connect
from trainer.models import families
from trainer.models.build import build_model, materialize, shard_model
from trainer.models.parts.published import published_folder
from trainer.optim import make_optimizer
from trainer.parallel.mesh import device_mesh
from trainer.plan.record import fake_device
from trainer.plan.record.trace import batch_of, trace_step
from trainer.plan.simulate.steps import PassInput
from trainer.rng import SampleRng

BLOCKS = {"num_layers": 2, "num_single_layers": 6, "num_attention_heads": 8, "joint_attention_dim": 7680}
SIZE = PassInput(256 * 256, 1)
LIMIT = 0.02
"""Largest error of the tracer against real tensors, as a share."""
STAGING_LIMIT = 0.15
"""Largest share that gloo's copies may add."""
CHECKPOINTING = ("none", "selective", "full", "2")
GLOO = ("none", "full")
"""Where two real ranks are measured too."""
METHODS = {
    "lora": (),
    "dora": ("adapter.type=dora",),
    "loha": ("adapter.type=loha",),
    "full": ("adapter.type=none",),
    "nf4": ("quantize.format=nf4",),
}
MIB = 2**20


def config(method: str, checkpointing: str, cache: Path) -> RunConfig:
    """The run, on two ranks."""
    model = ModelConfig(family="flux2", path="a/b", options=ModelOptions(architecture="klein-4b"))
    folder = cache / "small"
    if not folder.exists():
        shutil.copytree(published_folder(model, cache), folder)
        file = folder / "transformer" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | BLOCKS))
    fields = ("model.family=flux2", f"model.path={folder}", "parallel.devices=2", "parallel.strategy=full")
    more = ("train.batch_size=2", f"train.checkpointing={checkpointing}", "parallel.device=cpu")
    return load_config_text("data: {path: .}", (*fields, *more, *METHODS[method]), Path("run.yaml")).config


def traced(cfg: RunConfig, cache: Path) -> int:
    """Bytes by the plan's tracer, as for a CPU: its attention, and the pieces in which it decodes."""
    return trace_step(cfg, families.make(cfg, cache), torch.device("cpu"), SIZE).peak


def allocated(cfg: RunConfig, cache: Path, world: World) -> int:
    """Bytes that PyTorch gave out on this rank at most, from the sharded model to the end of the second step."""
    family = families.make(cfg, cache)
    built = build_model(cfg, family)
    mesh = device_mesh(cfg.parallel, world, "full")
    # Before: one thread computes backward, as in the tracer.
    with torch.autograd.set_multithreading_enabled(False):
        shard_model(built.module, cfg, family, "full", mesh)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            materialize(built.module, cfg, torch.device("cpu"))
            for tensor in (*built.module.parameters(), *built.module.buffers()):
                torch.nn.init.zeros_(tensor)
            optimizer = make_optimizer(built.trainables, cfg.optim)
            for _ in range(2):
                batch = batch_of(family, SIZE, torch.bfloat16, torch.device("cpu"))
                family.loss(built.module, batch, SampleRng(0, (0,), torch.device("cpu"))).total.backward()
                optimizer.step()
                optimizer.zero_grad()
    return given_out(profiled)


def given_out(profiled: profile) -> int:
    """Bytes that the CPU's allocator gave out at most while it was watched."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


def main(argv: Sequence[str]) -> int:
    """Compare and judge; with arguments, measure one case on the ranks of torchrun or of a fake process group."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if argv:
        how, method, checkpointing, cache = argv[0], argv[1], argv[2], Path(argv[3])
        cfg = config(method, checkpointing, cache)
        found = traced(cfg, cache) if how == "trace" else _run(cfg, cache, how)
        if found is not None:
            print(json.dumps(found), flush=True)
        return 0
    worst = staged = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            for checkpointing in CHECKPOINTING:
                config(method, checkpointing, Path(folder))
                case = (method, checkpointing, folder)
                plan, real = (run_ranks_afresh(1, __spec__.name, how, *case) for how in ("trace", "fake"))
                worst, ranks = max(worst, abs(plan / real - 1)), ""
                if checkpointing in GLOO:
                    gloo = run_ranks_afresh(2, __spec__.name, "gloo", *case)
                    staged = max(staged, gloo / real - 1)
                    ranks = f"; two gloo ranks {gloo / MIB:.1f} ({gloo / real - 1:+.1%} staging)"
                print(
                    f"{method:4} checkpointing {checkpointing}: {plan / MIB:.1f} MiB traced, {real / MIB:.1f} given "
                    f"out ({plan / real - 1:+.2%}){ranks}",
                    flush=True,
                )
    print(f"largest error {worst:.2%}, largest staging {staged:.1%}")
    return int(worst > LIMIT or staged > STAGING_LIMIT)


def _run(cfg: RunConfig, cache: Path, how: str) -> int | None:
    """What rank 0 was given; None on the others. It comes last: the profiler prints a line when it stops."""
    with ExitStack() as stack:
        if how == "gloo":
            world = stack.enter_context(connect(cfg.parallel))
            found = allocated(cfg, cache, world)
            world.barrier()
            return found if world.rank == 0 else None
        return allocated(cfg, cache, stack.enter_context(fake_device.ranks(2, torch.device("cpu"))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
