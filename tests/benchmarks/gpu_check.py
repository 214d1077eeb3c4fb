"""One command, under ten minutes, for a machine with a GPU: does everything work there, how fast, in how much memory.

    python -m tests.benchmarks.gpu_check                        needs CUDA and 12 GB in TMPDIR; no network, no weights
    python -m tests.benchmarks.gpu_check --device cpu --tiny    the same way on any machine, in small

Each measurement is a process of its own: one that fails is a row that says so, and the others go on. The table comes
last; as JSON it is written to the folder that the environment's OUT names, if it names one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from tests.benchmarks.gpu_plan import CASES, measure
from tests.benchmarks.step_time import hand_written
from tests.benchmarks.workload import KLEIN_4B, TINY, Bench, Workload, prepare
from trainer.distributed.world import World, connect
from trainer.metrics.memory import MemoryMeter
from trainer.models import families
from trainer.models.build import build_model, load_model
from trainer.run.process import worker_environment
from trainer.weights.quantization import FORMATS

TOTAL_S = 570
PART_S = 240
WARM_UP, STEPS = 3, 15
GIB = 2**30
# Forward and backward of one 1024 px image with 512 text tokens, rank 16, recomputation not counted.
KLEIN_4B_TFLOP = 76.3
# Dense bf16 TFLOP/s of the data sheets.
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "RTX 4090": 165, "RTX 5090": 210}

PLAN_LIMIT = 0.05
"""Largest error of the plan against PyTorch's allocator, as a share."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One line of the table. limit: as text; empty where there is none."""

    name: str
    figure: str
    limit: str = ""
    passed: bool = True


@dataclass(frozen=True)
class Place:
    """Where to measure and what."""

    device: str
    tiny: bool
    folder: Path

    @property
    def workload(self) -> Workload:
        return TINY if self.tiny else KLEIN_4B

    @property
    def bench(self) -> Bench:
        return Bench(self.folder, self.workload)

    @property
    def part_s(self) -> int:
        """Seconds a part may take. The tiny model is for the tests, which share a CPU's cores with others."""
        return 3 * PART_S if self.tiny else PART_S

    def figures(self, part: str) -> Path:
        """Where a part leaves what it measured."""
        return self.folder / f"{part}.json"


def main() -> int:
    """Returns 0 when every part ran and every figure is within its limit."""
    options = _parser().parse_args()
    if options.part:
        place = Place(options.device, options.tiny, options.folder)
        place.figures(options.part).write_text(json.dumps(PARTS[options.part](place)), encoding="utf-8")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: torch.cuda.is_available() is false; see launch.py --doctor", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        rows = _check(Place(options.device, options.tiny, Path(folder)))
    _tell(rows)
    return int(not all(row.passed for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a megabyte instead of FLUX.2 klein-4B")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def _check(place: Place) -> list[Row]:
    deadline = time.monotonic() + TOTAL_S / PART_S * place.part_s
    rows = [Row("machine", _machine(place.device))]
    rows.append(_tests(place, deadline))
    found: dict[str, Figures] = {}
    for part in PARTS:
        outcome = _run_part(part, place, deadline)
        if isinstance(outcome, Row):
            rows.append(outcome)
        else:
            found[part] = outcome
    return [*rows, *_rows(found, place)]


def _machine(device: str) -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if device == "cpu":
        return f"CPU, {os.cpu_count()} cores, {versions}"
    properties = torch.cuda.get_device_properties(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, {versions}, NCCL {nccl}"


def _tests(place: Place, deadline: float) -> Row:
    """The tests that need a device. Warnings are no failures: this machine's versions are not ours to choose."""
    argv = ["-m", "pytest", "tests/train/test_device.py", "-m", "gpu", "--device", place.device]
    lines, failure = _run("tests", [*argv, "-q", "-W", "default", "-p", "no:cacheprovider"], place, deadline)
    return failure or Row("tests", lines[-1].strip("= "))


def _run_part(part: str, place: Place, deadline: float) -> Figures | Row:
    """The figures of a part, or the row that says why there are none."""
    argv = ["-m", "tests.benchmarks.gpu_check", "--part", part, "--device", place.device, "--folder", str(place.folder)]
    _, failure = _run(part, argv + ["--tiny"] * place.tiny, place, deadline)
    if failure:
        return failure
    figures: Figures = json.loads(place.figures(part).read_text(encoding="utf-8"))
    return figures


def _run(name: str, argv: list[str], place: Place, deadline: float) -> tuple[list[str], Row | None]:
    """Run a process, its output shown as it comes. Returns its lines that are not empty, and the row of a failure."""
    left = min(place.part_s, deadline - time.monotonic())
    if left < 1:
        return [], Row(name, f"not run: {TOTAL_S} s are over", passed=False)
    print(f"--- {name}", flush=True)
    command = ["timeout", "--kill-after", "10", f"{left:.0f}", sys.executable, *argv]
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env=worker_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines += [line.strip()] if line.strip() else []
    code = process.wait()
    if code == 0:
        return lines, None
    reason = f"longer than {left:.0f} s" if code in (124, 137) else (lines or ["no output"])[-1]
    return lines, Row(name, f"FAILED: {reason}", passed=False)


def _prepare(place: Place) -> Figures:
    """Draw the model's weights on the device and write them to disk."""
    began = time.perf_counter()
    bench = prepare(place.folder, place.workload, place.device)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "bytes": sum(file.stat().st_size for file in bench.model.rglob("*.safetensors"))}


def _load(place: Place) -> Figures:
    """Read the model from files that the page cache still holds."""
    cfg = place.bench.config(parallel={"device": place.device, "strategy": "none"})
    with connect(cfg.parallel) as world:
        family = families.make(cfg, place.folder / "cache")
        began = time.perf_counter()
        loaded = load_model(build_model(cfg, family), cfg, family, world)
        _synchronize(world)
        return {"seconds": time.perf_counter() - began, "bytes": loaded.bytes_read}


def _by_hand(place: Place) -> Figures:
    """The loop of `step_time`."""
    cfg = place.bench.config(parallel={"device": place.device})
    with connect(cfg.parallel) as world:
        step = hand_written(place.bench, place.bench.examples(cfg, world), world, "bf16")
        return _time(step, world)


def _ours(name: str, strategy: str, checkpointing: str, base: str = "none") -> Callable[[Place], Figures]:
    def measure(place: Place) -> Figures:
        parallel = {"device": place.device, "strategy": strategy}
        train, quantize = {"checkpointing": checkpointing}, {"format": base}
        cfg = place.bench.config(train=train, parallel=parallel, quantize=quantize)
        with connect(cfg.parallel) as world:
            trainer = place.bench.trainer(name, cfg, world)
            try:
                return _time(trainer.train_step, world)
            finally:
                trainer.close()

    return measure


def _time(step: Callable[[], object], world: World) -> Figures:
    """Median seconds of a step, and the peak of memory in bytes."""
    for _ in range(WARM_UP):
        step()
    seconds = []
    for _ in range(STEPS):
        _synchronize(world)
        began = time.perf_counter()
        step()
        _synchronize(world)
        seconds.append(time.perf_counter() - began)
    return {"seconds": statistics.median(seconds), "bytes": MemoryMeter(world).read().peak}


def _synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _planned(name: str, place: Place) -> Figures:
    """The plan of a run against what it takes."""
    return measure(CASES[name], place.device, place.folder / "cache")


STEP_PARTS: dict[str, Callable[[Place], Figures]] = {
    "by-hand": _by_hand,
    "plain": _ours("plain", "none", "none"),
    "checkpointing": _ours("checkpointing", "none", "full"),
    "sharded": _ours("sharded", "full", "none"),
    **{base: _ours(base, "none", "none", base) for base in FORMATS},
    "nf4, sharded": _ours("nf4-sharded", "full", "full", "nf4"),
}
PLAN_PARTS: dict[str, Callable[[Place], Figures]] = {name: partial(_planned, name) for name in CASES}
PARTS: dict[str, Callable[[Place], Figures]] = {"prepare": _prepare, "load": _load, **STEP_PARTS, **PLAN_PARTS}
# A part, what it is compared with, and how much longer it may take.
LIMITS = (("plain", "by-hand", 1.03), ("sharded", "plain", 1.03))


def _rows(found: Mapping[str, Figures], place: Place) -> Iterator[Row]:
    for part, verb in (("prepare", "drawn and written"), ("load", "loaded")):
        if part in found:
            size, seconds = found[part]["bytes"] / GIB, found[part]["seconds"]
            yield Row(part, f"{size:.2f} GiB {verb} in {seconds:.1f} s, {size / seconds:.2f} GiB/s")
    for part in STEP_PARTS:
        if part in found:
            yield Row(part, _speed(found[part], place))
    for part in PLAN_PARTS:
        if part in found:
            yield _plan_row(part, found[part], place)
    for part, other, limit in LIMITS:
        if part in found and other in found:
            ratio = found[part]["seconds"] / found[other]["seconds"]
            # Steps of a tiny model are all overhead.
            yield Row(f"{part} : {other}", f"{ratio:.3f}", f"<= {limit}", place.tiny or ratio <= limit)


def _plan_row(part: str, figures: Figures, place: Place) -> Row:
    planned, allocated, reserved = (figures[name] / GIB for name in ("planned", "allocated", "reserved"))
    error = allocated / planned - 1
    text = (
        f"{planned:.2f} GiB planned, {allocated:.2f} allocated ({error:+.1%}), {reserved:.2f} reserved "
        f"(x {reserved / allocated:.2f}), {figures['used'] / GIB:.2f} used, {figures['seconds']:.2f} s/step"
    )
    # A tiny model's step is libraries' own small change.
    return Row(part, text, f"within {PLAN_LIMIT:.0%}", place.tiny or abs(error) <= PLAN_LIMIT)


def _speed(figures: Figures, place: Place) -> str:
    seconds = figures["seconds"]
    parts = [f"{seconds:.4f} s/step", f"{1 / seconds:.2f} images/s", f"peak {figures['bytes'] / GIB:.2f} GiB"]
    peak = _peak_tflops(place)
    if peak:
        parts.append(f"MFU {KLEIN_4B_TFLOP / seconds / peak:.1%}")
    return ", ".join(parts)


def _peak_tflops(place: Place) -> float | None:
    """Of a known device with the model whose operations are known."""
    if place.tiny or place.device == "cpu":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def _tell(rows: list[Row]) -> None:
    width = max(len(row.name) for row in rows)
    print("---", flush=True)
    for row in rows:
        print(
            f"{row.name:{width}}  {row.figure}  {row.limit}{'' if row.passed else '  OVER' * bool(row.limit)}".rstrip()
        )
    out = os.environ.get("OUT")
    if out:
        report = json.dumps([asdict(row) for row in rows], indent=1)
        (Path(out) / "gpu_check.json").write_text(report, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
