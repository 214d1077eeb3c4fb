"""The plan against a GPU: the step of a published model with random weights, on rank 0 of a fake process group.

    python -m tests.benchmarks.gpu_plan NAME DEVICE FOLDER      one case, its figures as JSON in the last line

One GPU stands for any number of ranks: it holds what rank 0 of them holds, and gathers what it would gather, with
whatever values. What travels between GPUs, and NCCL's buffers, are not in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.gpu_report import GIB, Place, Report, Row
from trainer.config.load import load_config_text
from trainer.config.schema import RunConfig
from trainer.models import families
from trainer.models.build import blocks_to_offload, build_model, materialize, offload, shard_model
from trainer.optim import make_optimizer
from trainer.parallel.mesh import device_mesh
from trainer.parallel.strategy import Strategy
from trainer.plan.record import fake_device
from trainer.plan.record.trace import batch_of, on_this_machine, trace_step
from trainer.plan.search.fixes import planned
from trainer.plan.simulate.sizes import input_of
from trainer.rng import SampleRng
from trainer.run.process import worker_environment

STEPS = 3
"""The first makes the optimizer's state; its gradients are garbage by design."""

ROOT = Path(__file__).parents[2]
RECOMPUTED, NF4 = ("train.checkpointing=full",), ("quantize.format=nf4",)
HALF = ("parallel.offload_blocks=0.5",)


@dataclass(frozen=True)
class Case:
    """A run. model: family and architecture.  ranks: of the fake process group."""

    model: str
    ranks: int
    fields: tuple[str, ...] = RECOMPUTED

    @property
    def is_text(self) -> bool:
        """Whether it trains a language model."""
        return self.model.startswith("causal_lm ")

    def config(self, device: str) -> RunConfig:
        """The run on a device; on a CPU of a tiny model, and smaller pictures."""
        family, architecture = self.model.split()
        strategy = "full" if self.ranks > 1 else "none"
        path = "published/model" if device == "cuda" else "tiny"
        lines = [f"model.family={family}", f"model.options.architecture={architecture}", f"model.path={path}"]
        lines += [f"parallel.devices={self.ranks}", f"parallel.strategy={strategy}", f"parallel.device={device}"]
        lines += [f"train.batch_size={self.ranks}"]
        if self.is_text:
            lines += [f"data.length={4096 if device == 'cuda' else 64}"]
        elif device == "cpu":
            lines += ["data.resolution=64"]
        return load_config_text("data: {path: .}", (*lines, *self.fields), Path("case.yaml")).config


CASES: Mapping[str, Case] = {
    "plan flux2-dev, 4 ranks": Case("flux2 dev", 4),
    "plan flux2-dev, 8 ranks": Case("flux2 dev", 8),
    "plan flux2-dev nf4, 2 ranks": Case("flux2 dev", 2, (*RECOMPUTED, *NF4)),
    "plan flux2-klein-4b, 1 rank": Case("flux2 klein-4b", 1, ()),
    "plan flux2-klein-4b, selective, 1 rank": Case("flux2 klein-4b", 1, ("train.checkpointing=selective",)),
    "plan flux2-dev nf4, half offloaded, 1 rank": Case("flux2 dev", 1, (*RECOMPUTED, *NF4, *HALF)),
    "plan flux2-klein-4b, half offloaded, 2 ranks": Case("flux2 klein-4b", 2, (*RECOMPUTED, *HALF)),
    "plan flux1-dev, 4 ranks": Case("flux1 dev", 4),
    "plan sd35-large, 2 ranks": Case("sd3 sd35-large", 2),
    "plan sdxl, 1 rank": Case("sdxl base", 1),
    "plan qwen3-1.7b, 1 rank": Case("causal_lm qwen3-1.7b", 1, ()),
    "plan qwen3-8b nf4, 1 rank": Case("causal_lm qwen3-8b", 1, (*RECOMPUTED, *NF4)),
}
LIMIT = 0.05
"""Largest error of the plan against PyTorch's allocator, as a share."""
AT_ONCE = 3
"""Cases that share the device: what counts is what each takes of it, not how long."""
CASE_S = 240


def memory(place: Place, report: Report) -> None:
    """Every case, each in a process of its own."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = {name: pool.submit(in_process, "gpu_plan", name, place, worker_environment()) for name in CASES}
        for name, outcome in outcomes.items():
            with report.measuring(name):
                report.add(_row(name, outcome.result(), place))


def in_process(module: str, name: str, place: Place, env: Mapping[str, str]) -> dict[str, float]:
    """Run a case in a process of its own. Returns its figures.

    Args:
        module: Of this folder: a program that takes the name of a case, a device and a folder.
        env: Its environment.

    Raises:
        RuntimeError: The program failed. The message is the line that says why.
    """
    argv = [sys.executable, "-m", f"tests.benchmarks.{module}", name, place.device, str(place.folder / "cache")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=CASE_S, cwd=ROOT, env=env)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", flush=True)
        if "CUDA error" in done.stderr and "CUDA_LAUNCH_BLOCKING" not in env:  # once more, to see which kernel it was
            return in_process(module, name, place, env | {"CUDA_LAUNCH_BLOCKING": "1"})
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        raise RuntimeError((lines or ["no output"])[0])
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _row(name: str, figures: dict[str, float], place: Place) -> Row:
    planned, allocated, reserved = (figures[name] / GIB for name in ("planned", "allocated", "reserved"))
    error = allocated / planned - 1
    text = (
        f"{planned:.2f} GiB planned, {allocated:.2f} allocated ({error:+.1%}), {reserved:.2f} reserved "
        f"(x {reserved / allocated:.2f}), {figures['seconds']:.2f} s/step"
    )
    # A tiny model's step is libraries' own small change.
    return Row(name, text, f"within {LIMIT:.0%}", place.tiny or abs(error) <= LIMIT, figures)


def measure(case: Case, device: str, cache: Path) -> dict[str, float]:
    """Bytes planned, and given out and reserved by PyTorch's allocator on the device, and seconds of a step.

    On a CPU the plan is a trace of the tiny model, for its attention is another one than a GPU's.
    """
    cfg = case.config(device)
    here = torch.device(device)
    if device == "cuda":
        plan = planned(cfg, None, cache)
        assert plan is not None
        peak = plan.training.peak
    else:
        peak = trace_step(cfg, families.make(cfg, cache), here, input_of(cfg)).peak
    found: dict[str, float] = {"planned": peak}
    with _watched(here, found), stepping(on_this_machine(cfg, cache), here, cache) as step:
        for _ in range(STEPS):
            found["seconds"] = seconds_of(step, 1, here)  # the last counts
    return found


def seconds_of(step: Callable[[], None], times: int, device: torch.device) -> float:
    """Take steps without a pause. Returns the seconds until the device has done them."""
    began = time.perf_counter()
    for _ in range(times):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@contextmanager
def stepping(cfg: RunConfig, device: torch.device, cache: Path) -> Iterator[Callable[[], None]]:
    """Build a run's model with random weights; what it yields trains it for a step."""
    family, size = families.make(cfg, cache), input_of(cfg)
    built = build_model(cfg, family)
    strategy: Strategy = cfg.parallel.strategy  # type: ignore[assignment]
    with fake_device.ranks(cfg.parallel.world_size, device) as world:
        shard_model(built.module, cfg, family, strategy, device_mesh(cfg.parallel, world, strategy))
        chosen = blocks_to_offload(built.module, cfg, family)
        materialize(built.module, cfg, device, chosen)
        _fill(built.module)
        offload(built.module, chosen, family, device)
        optimizer = make_optimizer(built.trainables, cfg.optim)

        def step() -> None:
            batch = batch_of(family, size, torch.bfloat16, device)
            documents = batch.get("documents")
            if documents is not None:  # a row of one document needs no mask: 8 % less memory
                documents[:, documents.shape[1] // 2 :] = 1
            family.loss(built.module, batch, SampleRng(0, tuple(range(size.batch)), device)).total.backward()
            optimizer.step()
            optimizer.zero_grad()

        yield step


def _fill(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if here.is_floating_point():
                here.normal_(std=0.02)
            else:
                here.zero_()


@contextmanager
def _watched(device: torch.device, found: dict[str, float]) -> Iterator[None]:
    """Inside, memory is watched; afterwards its peaks are in `found`."""
    if device.type == "cuda":
        yield
        found["allocated"] = torch.cuda.max_memory_allocated(device)
        found["reserved"] = torch.cuda.max_memory_reserved(device)
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    found["allocated"] = max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")
    found["reserved"] = found["allocated"]


if __name__ == "__main__":
    print(json.dumps(measure(CASES[sys.argv[1]], sys.argv[2], Path(sys.argv[3]))))
