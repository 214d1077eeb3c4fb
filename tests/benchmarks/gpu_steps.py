"""Steps of the trainer on one device: FLUX.2 klein-4B with random weights, and one block of each kind of FLUX.2 dev."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.gpu_report import GIB, Place, Report, Row, clocks
from tests.benchmarks.step_time import hand_written
from tests.benchmarks.workload import KLEIN_4B, TINY, Bench, Workload, prepare
from trainer.config.schema import RunConfig
from trainer.distributed.world import World, connect
from trainer.metrics.memory import MemoryMeter
from trainer.plan.calibration import Measured, keep, tells_speed
from trainer.plan.cards import speed_of
from trainer.plan.search.fixes import planned
from trainer.run.compiler import FOLDER
from trainer.run.process import worker_environment
from trainer.train.loop import Trainer

WARM_UP, STEPS = 3, 8
# Forward and backward of one 1024 px image with 512 text tokens, rank 16, recomputation not counted.
KLEIN_4B_TFLOP = 76.3
DEV_BLOCKS = Workload(double=1, single=1, heads=48, head_size=128, text_width=15360, text_tokens=512, pixels=1024)
"""One block of each kind at the width of FLUX.2 dev."""
MOST_OPERATIONS = 12
MOST_WAITS = 0
"""Times that the host waits for the device in a step. Not among them is the late read of the step before: torch does
not count the wait for an event."""


@dataclass(frozen=True)
class Variant:
    """A run of klein-4B.

    Attributes:
        fields: That differ from a LoRA without sharding and without recompute, by section.
        pixels: Side of the images.
        batch: Images per step.
    """

    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pixels: int = 1024
    batch: int = 1

    def config_fields(self, place: Place) -> dict[str, dict[str, Any]]:
        """As `Bench.config` takes them."""
        base: dict[str, dict[str, Any]] = {
            "train": {
                "compile": False,
                "compile_backend": place.compiler,
                "checkpointing": "none",
                "batch_size": self.batch,
                "micro_batch": self.batch,
            },
            "parallel": {"device": place.device, "strategy": "none"},
        }
        return {name: {**base.get(name, {}), **self.fields.get(name, {})} for name in {*base, *self.fields}}


RECOMPUTED: Mapping[str, Mapping[str, Any]] = {"train": {"checkpointing": "full"}}
SELECTIVE: Mapping[str, Mapping[str, Any]] = {"train": {"checkpointing": "selective"}}
SHARDED: Mapping[str, Mapping[str, Any]] = {"parallel": {"strategy": "full"}}
EAGER = {
    "plain": Variant(),
    "sharded": Variant(SHARDED),
    "ddp": Variant({"parallel": {"strategy": "ddp"}}),
    "recompute": Variant(RECOMPUTED),
    "selective": Variant(SELECTIVE),
}
SMALLER = {
    "offloaded": Variant({"parallel": {"strategy": "none", "offload_blocks": 1.0}}),
    "nf4": Variant({"quantize": {"format": "nf4"}}),
    "int8": Variant({"quantize": {"format": "int8"}}),
    "fp8": Variant({"quantize": {"format": "fp8"}}),
    "nf4, sharded, recompute": Variant({"quantize": {"format": "nf4"}, **RECOMPUTED, **SHARDED}),
}
SIZES = {
    "512 px": Variant(pixels=512),
    "512 px, 4 images": Variant(pixels=512, batch=4),
    "4 images, recompute": Variant(RECOMPUTED, batch=4),
}
COMPILED = {
    "compiled": Variant({"train": {"compile": True}}),
    "compiled, recompute": Variant({"train": {"compile": True, "checkpointing": "full"}}),
}
COMPILED_TOO = {
    "compiled, selective": Variant({"train": {"compile": True, "checkpointing": "selective"}}),
    "compiled, sharded": Variant({"train": {"compile": True}, **SHARDED}),
    "compiled, nf4": Variant({"train": {"compile": True}, "quantize": {"format": "nf4"}}),
}
LIMITS = {"plain": ("by hand", 1.03), "sharded": ("plain", 1.03), "ddp": ("plain", 1.03)}
"""{variant: (what it is compared with, how much longer it may take)}. One rank shards nothing and copies no weight."""
LEAST_MFU = {"compiled": 0.45}
"""{variant: the share of the GPU's operations that it must use}."""


def klein(place: Place, report: Report) -> None:
    """Each variant without torch.compile, and the loop that a good engineer writes by hand."""
    _measure_by_hand("by hand", _bench(place, 1024), place, report)
    _measure_each(EAGER, place, report)
    _compare(report, place)


def smaller(place: Place, report: Report) -> None:
    """A base of fewer bits, or in the machine's memory."""
    _measure_each(SMALLER, place, report)


def sizes(place: Place, report: Report) -> None:
    """Smaller images, and several at a time."""
    _measure_each(SIZES, place, report)


def compiled(place: Place, report: Report) -> None:
    """With torch.compile, as the loop that is written by hand."""
    _measure_by_hand("by hand, compiled", _bench(place, 1024), place, report, place.compiler)
    _measure_compiled(COMPILED, place, report)


def compiled_too(place: Place, report: Report) -> None:
    """With torch.compile and what changes what there is to compile."""
    _measure_compiled(COMPILED_TOO, place, report)


def starts(place: Place, report: Report) -> None:
    """The first step of a compiled run, with an empty cache of kernels and with the one that it leaves."""
    kernels = place.folder / "compiled-kernels"
    shutil.rmtree(kernels, ignore_errors=True)
    _bench(place, 1024)
    found: dict[str, float] = {}
    for cache in ("empty", "filled"):
        with report.measuring(f"first compiled step, {cache} cache"):
            argv = [sys.executable, "-m", "tests.benchmarks.gpu_steps", place.device, str(place.folder)]
            argv += ["tiny"] * place.tiny
            env = worker_environment() | {FOLDER: str(kernels)}
            done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
            found[cache] = float(done.stdout.splitlines()[-1])
            # Steps of a tiny model are not compiled to kernels.
            is_less = place.tiny or found[cache] <= found["empty"]
            limit = "" if cache == "empty" else "<= with an empty one"
            figure, numbers = f"{found[cache]:.1f} s", {"first_s": found[cache]}
            report.add(Row(f"first compiled step, {cache} cache", figure, limit, is_less, numbers))


def first_step(place: Place) -> float:
    """Seconds of the first step of a compiled run in this process."""
    with _trainer(_bench(place, 1024), COMPILED["compiled"], place) as trainer:
        began = time.perf_counter()
        trainer.train_step()
        place.synchronize()
        return time.perf_counter() - began


def blocks(place: Place, report: Report) -> None:
    """Where the time of a block goes: one of each kind of FLUX.2 dev, forward and backward."""
    bench = _kept("dev-blocks", TINY if place.tiny else DEV_BLOCKS, place)
    with report.measuring("dev blocks"), _trainer(bench, Variant(), place) as trainer:
        for _ in range(WARM_UP):
            trainer.train_step()
        busy, operations = _operations(trainer.train_step, place)
        report.add(Row("dev blocks", f"{busy * 1e3:.1f} ms on the device", numbers={"seconds": busy}))
        for name, seconds in operations:
            report.add(Row(f"dev blocks: {name}", f"{seconds * 1e3:.2f} ms", numbers={"seconds": seconds}))


def _bench(place: Place, pixels: int) -> Bench:
    """klein-4B and images of a size. The model is drawn once for all sizes."""
    whole = TINY if place.tiny else KLEIN_4B
    workload = whole if place.tiny else replace(whole, pixels=pixels)
    drawn = place.folder / f"klein-{whole.pixels}" / "model"
    return _kept(f"klein-{workload.pixels}", workload, place, drawn if drawn.is_dir() else None)


def _kept(name: str, workload: Workload, place: Place, model: Path | None = None) -> Bench:
    """A folder of this name with all that a run needs: made at first use, whole or not at all.

    Args:
        model: As `prepare` takes it.
    """
    folder = place.folder / name
    if not folder.is_dir():
        draft = place.folder / f"{name}.part"
        shutil.rmtree(draft, ignore_errors=True)
        prepare(draft, workload, place.device, model)
        draft.rename(folder)
    return Bench(folder, workload)


@contextmanager
def _trainer(bench: Bench, variant: Variant, place: Place) -> Iterator[Trainer]:
    cfg = bench.config(**variant.config_fields(place))
    name = f"run-{time.time_ns()}"
    with _world(cfg) as world:
        trainer = bench.trainer(name, cfg, world)
        try:
            yield trainer
        finally:
            trainer.close()


@contextmanager
def _world(cfg: RunConfig) -> Iterator[World]:
    """This process alone. The next measurement may begin after an error."""
    try:
        with connect(cfg.parallel) as world:
            yield world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _measure_each(variants: Mapping[str, Variant], place: Place, report: Report) -> None:
    for name, variant in variants.items():
        with report.measuring(name):
            _measure(name, variant, place, report)
            if name == "plain" and place.device == "cuda":
                report.add(clocks("after steps"))


def _measure_compiled(variants: Mapping[str, Variant], place: Place, report: Report) -> None:
    """Measure each variant, and count its graphs."""
    for name, variant in variants.items():
        with report.measuring(name):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            _measure(name, variant, place, report)
            counters = torch._dynamo.utils.counters
            graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
            # klein-4B has two classes of blocks, and the input of the first block needs no gradient. The fourth is the
            # line that is compiled to see whether anything can be.
            figure = f"{graphs} graphs, {breaks} breaks"
            report.add(Row(f"{name}: graphs", figure, "2 to 4 graphs, 0 breaks", 2 <= graphs <= 4 and not breaks))


def _measure(name: str, variant: Variant, place: Place, report: Report) -> None:
    bench = _bench(place, variant.pixels)
    began = time.perf_counter()
    with _trainer(bench, variant, place) as trainer:
        ready_s = time.perf_counter() - began
        found = _time(trainer.train_step, place)
        found |= {"ready_s": ready_s, "peak": MemoryMeter(trainer.world).read().peak}
        if place.device == "cuda":
            learn(trainer.cfg, found, torch.cuda.get_device_name(), place)
            found |= _waits(trainer.train_step)
            found["idle"] = max(0.0, 1 - _busy(trainer.train_step) / found["together_s"])
        waits = found.get("waits", 0)
        limit = f"<= {MOST_WAITS} waits" if "waits" in found else ""
        report.add(Row(name, _speed(found, variant, place), limit, waits <= MOST_WAITS, numbers=found))
        if name == "plain":
            _save(trainer, report)
    used = _utilization(found, variant, place)
    if name in LEAST_MFU and used is not None:
        least = LEAST_MFU[name]
        report.add(Row(f"{name}: MFU", f"{used:.1%}", f">= {least:.0%}", used >= least, numbers={"mfu": used}))


def learn(cfg: RunConfig, found: Mapping[str, float], gpu: str, place: Place) -> None:
    """Keep a step's speed for later plans of the same kind of GPU, if it tells one."""
    if not tells_speed(cfg, cfg.parallel.strategy):
        return
    base = {"family": "flux2", "path": "published/model", "options": {"architecture": "klein-4b"}}
    plan = planned(RunConfig.model_validate({**cfg.model_dump(exclude_unset=True), "model": base}), None, place.cache)
    assert plan is not None, "its tables come with the program"
    is_cuda = place.device == "cuda"
    reserved = torch.cuda.max_memory_reserved() if is_cuda else int(found["peak"])
    free, total = torch.cuda.mem_get_info() if is_cuda else (0, reserved)
    keep(
        place.cache,
        Measured(
            gpu=gpu,
            ranks=1,
            planned=plan.training.peak,
            allocated=int(found["peak"]),
            reserved=reserved,
            used=total - free,
            seconds=found["together_s"],
            flops=plan.flops,
            is_compiled=cfg.train.compile is True,
        ),
    )


def _measure_by_hand(name: str, bench: Bench, place: Place, report: Report, compiler: str = "") -> None:
    with report.measuring(name):
        cfg = bench.config(parallel={"device": place.device})
        with _world(cfg) as world:
            step = hand_written(bench, bench.examples(cfg, world), world, "bf16", compiler)
            found = _time(step, place) | {"peak": MemoryMeter(world).read().peak}
        report.add(Row(name, _speed(found, Variant(), place), numbers=found))


def _time(step: Callable[[], object], place: Place) -> dict[str, float]:
    """Seconds of the first step; the median of steps that the device ends before the next begins; the mean of steps
    without a pause, as a run has them."""
    began = time.perf_counter()
    step()
    place.synchronize()
    first = time.perf_counter() - began
    for _ in range(WARM_UP - 1):
        step()
    seconds = []
    for _ in range(STEPS):
        place.synchronize()
        began = time.perf_counter()
        step()
        place.synchronize()
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    place.synchronize()
    together = (time.perf_counter() - began) / STEPS
    return {"first_s": first, "seconds": statistics.median(seconds), "together_s": together}


def _waits(step: Callable[[], object]) -> dict[str, float]:
    """How often the host waits for the device in a step. Each place is printed."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchroniz" in str(w.message))
    print(f"  waits: {dict(waits)}", flush=True)
    return {"waits": sum(waits.values())}


def _busy(step: Callable[[], object]) -> float:
    """Seconds of a step that a GPU works. The host's operations are not recorded: reading them takes half a minute."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return _device_seconds(profiled)


def _device_seconds(profiled: profile) -> float:
    averages = profiled.key_averages()
    return sum(event.self_device_time_total for event in averages if event.device_type == DeviceType.CUDA) / 1e6


def _operations(step: Callable[[], object], place: Place) -> tuple[float, list[tuple[str, float]]]:
    """Seconds of a step that the device works, and those of its longest operations."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (place.device == "cuda")
    with profile(activities=activities) as profiled:
        step()
        place.synchronize()
    operations = [event for event in profiled.key_averages() if event.device_type == DeviceType.CPU]
    if place.device == "cpu":
        times = [(event.key, event.self_cpu_time_total / 1e6) for event in operations]
        busy = sum(seconds for _, seconds in times)
    else:
        times = [(event.key, event.self_device_time_total / 1e6) for event in operations]
        busy = _device_seconds(profiled)
    return busy, sorted(times, key=lambda pair: -pair[1])[:MOST_OPERATIONS]


def _save(trainer: Trainer, report: Report) -> None:
    """How long a checkpoint holds up training, and how long it takes to be on disk."""
    began = time.perf_counter()
    trainer.save()
    trainer.train_step()
    blocked = time.perf_counter() - began
    trainer.checkpointer.wait()
    written = time.perf_counter() - began
    figure = f"{blocked:.3f} s with the next step, {written:.2f} s until it is on disk"
    report.add(Row("checkpoint", figure, numbers={"blocked_s": blocked, "written_s": written}))


def _speed(found: Mapping[str, float], variant: Variant, place: Place) -> str:
    seconds = found["together_s"]
    parts = [f"{seconds:.4f} s/step (alone {found['seconds']:.4f})", f"{variant.batch / seconds:.2f} images/s"]
    parts += [f"peak {found['peak'] / GIB:.2f} GiB", f"first step {found['first_s']:.1f} s"]
    parts += [f"{found['waits']:.0f} waits"] if "waits" in found else []
    parts += [f"{found['idle']:.1%} idle"] if "idle" in found else []
    used = _utilization(found, variant, place)
    return ", ".join(parts if used is None else [*parts, f"MFU {used:.1%}"])


def _utilization(found: Mapping[str, float], variant: Variant, place: Place) -> float | None:
    """The share of the device's operations that a step uses, where both are known."""
    peak = _peak_tflops(place)
    if not peak or variant.pixels != KLEIN_4B.pixels:
        return None
    return variant.batch * KLEIN_4B_TFLOP / found["together_s"] / peak


def _compare(report: Report, place: Place) -> None:
    found = {row.name: row.numbers["together_s"] for row in report.rows if "together_s" in row.numbers}
    for name, (other, limit) in LIMITS.items():
        if name in found and other in found:
            ratio = found[name] / found[other]
            # Steps of a tiny model are all overhead.
            report.add(Row(f"{name} : {other}", f"{ratio:.3f}", f"<= {limit}", place.tiny or ratio <= limit))


def _peak_tflops(place: Place) -> float | None:
    """Of a known device with the model whose operations are known."""
    if place.tiny or place.device == "cpu":
        return None
    speed = speed_of(torch.cuda.get_device_name())
    return speed.tflops if speed else None


if __name__ == "__main__":
    print(first_step(Place(sys.argv[1], "tiny" in sys.argv[3:], Path(sys.argv[2]))))
