"""Does everything work on this machine's GPU, how fast, and in how much memory: in parts, without network or weights.

    python -m tests.benchmarks.gpu_check                          every part that was not measured yet
    python -m tests.benchmarks.gpu_check --parts kernels,klein    these parts
    python -m tests.benchmarks.gpu_check --device cpu --tiny      the same way on any machine, in small

Each part is a process of its own with a time limit, and leaves its rows in the folder as they come: a part that fails
or is killed is a row that says so, and the next call goes on with the parts that are missing. Remove a part's file to
measure it again. The table comes last. It is also written to the folder that the environment's OUT names, if any.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from tests.benchmarks.gpu_report import GIB, Place, Report, Row, as_text, clocks, query, read
from trainer.run import allocator
from trainer.run.process import worker_environment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu-check"
TESTS_AT_ONCE = 12
DEVICE_TESTS = ("tests/train/test_device.py", "tests/parallel/test_offload.py")


@dataclass(frozen=True)
class Part:
    """What is measured together.

    Attributes:
        function: `module:function` of (Place, Report). Imported by the part's own process: what it needs may be
            missing on this machine.
        limit_s: Longest time on a GPU.
    """

    function: str
    limit_s: int


PARTS = {
    "machine": Part("gpu_check:machine", 60),
    "kernels": Part("gpu_kernels:matrices", 120),
    "copies": Part("gpu_kernels:copies", 60),
    "attention": Part("gpu_kernels:attention", 120),
    "decode": Part("gpu_kernels:decode", 180),
    "klein": Part("gpu_steps:klein", 300),
    "smaller": Part("gpu_steps:smaller", 300),
    "sizes": Part("gpu_steps:sizes", 180),
    "compile": Part("gpu_steps:compiled", 300),
    "compile-too": Part("gpu_steps:compiled_too", 300),
    "models": Part("gpu_models:models", 420),
    "starts": Part("gpu_steps:starts", 240),
    "blocks": Part("gpu_steps:blocks", 120),
    "captions": Part("gpu_captions:captions", 240),
    "memory": Part("gpu_plan:memory", 300),
    "ranks": Part("gpu_ranks:ranks", 240),
    "tests": Part("gpu_check:tests", 300),
}
SLOWER = 3
"""A tiny model is for the tests, which share a CPU's cores with others."""


def main() -> int:
    """Returns 0 when every part ran to its end and every figure is within its limit."""
    options = _parser().parse_args()
    place = Place(options.device, options.tiny, options.folder.resolve())
    if options.part:
        report = Report(place.results(options.part))
        with report.measuring(options.part):
            _function(PARTS[options.part])(place, report)
            report.finish()
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: torch.cuda.is_available() is false; see launch.py --doctor", file=sys.stderr)
        return 1
    place.folder.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        if not read(place.results(name))[1]:
            _run(name, place)
    return _show(options.parts, place)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a megabyte instead of FLUX.2 klein-4B")
    parser.add_argument("--parts", type=_parts, default=tuple(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="weights and results; 12 GB")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return parser


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is not one of {', '.join(PARTS)}")
    return names or tuple(PARTS)


def _function(part: Part) -> Callable[[Place, Report], None]:
    module, name = part.function.split(":")
    function: Callable[[Place, Report], None] = getattr(importlib.import_module(f"tests.benchmarks.{module}"), name)
    return function


def _run(name: str, place: Place) -> None:
    """Measure a part. What stopped it becomes its last row."""
    print(f"--- {name}", flush=True)
    limit = PARTS[name].limit_s * (SLOWER if place.tiny else 1)
    argv = [sys.executable, "-m", "tests.benchmarks.gpu_check", "--part", name, "--device", place.device]
    began = time.monotonic()
    argv += ["--folder", str(place.folder), *(["--tiny"] * place.tiny)]
    process = subprocess.Popen(argv, cwd=ROOT, env=_environment())
    try:
        code = process.wait(limit)
        problem = f"ended with exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        for started in (*psutil.Process(process.pid).children(recursive=True), process):
            started.kill()
        process.wait()
        problem = f"took longer than {limit} s"
    print(f"--- {name}: {time.monotonic() - began:.0f} s", flush=True)
    if problem:
        rows, _ = read(place.results(name))
        report = Report(place.results(name))
        for row in (*rows, Row(name, f"FAILED: {problem}", passed=False)):
            report.add(row)


def _environment() -> dict[str, str]:
    """Memory is taken as in a run."""
    names = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return worker_environment() | allocator.environment(False, names)


def _show(parts: Sequence[str], place: Place) -> int:
    """Print the table of these parts. Returns the exit code."""
    found = {name: read(place.results(name)) for name in parts}
    rows = [row for rows, _ in found.values() for row in rows]
    width = max((len(row.name) for row in rows), default=0)
    print("---", flush=True)
    for row in rows:
        print(as_text(row, width))
    missing = [name for name, (_, is_done) in found.items() if not is_done]
    if missing:
        print(f"not measured to the end: {', '.join(missing)}; the next call goes on with them")
    out = os.environ.get("OUT")
    if out:
        content = {name: [asdict(row) for row in rows] for name, (rows, _) in found.items()}
        (Path(out) / f"gpu_check-{'-'.join(parts)}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return int(bool(missing) or not all(row.passed for row in rows))


def machine(place: Place, report: Report) -> None:
    """What this is, and what an empty process takes of the device's memory."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if place.device == "cpu":
        report.add(Row("machine", f"CPU, {os.cpu_count()} cores, {versions}"))
        return
    properties = torch.cuda.get_device_properties(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    parts = [f"{properties.name}, {properties.total_memory / GIB:.1f} GiB", versions, f"NCCL {nccl}"]
    parts += [f"cuDNN {torch.backends.cudnn.version()}", f"driver {query('driver_version')}"]
    torch.empty(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    context = (total - free - torch.cuda.memory_reserved()) / GIB
    report.add(Row("machine", ", ".join(parts)))
    report.add(Row("taken by a process without tensors", f"{context:.2f} GiB", numbers={"gib": context}))
    report.add(clocks("at rest"))


def tests(place: Place, report: Report) -> None:
    """The tests that need a device. Warnings are no failures: this machine's versions are not ours to choose."""
    argv = [sys.executable, "-m", "pytest", *DEVICE_TESTS, "-m", "gpu", "--device", place.device]
    at_once = 1 if place.device == "cpu" else TESTS_AT_ONCE
    argv += ["-v", "-W", "default", "-p", "no:cacheprovider", "-n", str(at_once), "--dist", "load"]
    last = "no output"
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:  # as it comes: a part that takes too long shows what it was at
            print(line, end="", flush=True)
            last = line.strip("= \n") or last
            if line.startswith(("FAILED", "ERROR")):
                report.add(Row("tests", line.strip(), passed=False))
    report.add(Row("tests", last, passed=process.returncode == 0))


if __name__ == "__main__":
    sys.exit(main())
