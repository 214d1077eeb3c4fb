"""How fast published models train on one device with torch.compile: real sizes, random weights.

    python -m tests.benchmarks.gpu_models NAME DEVICE FOLDER      one case, its figures as JSON in the last line

A LoRA of rank 16 in bf16, one image a step; of its blocks as little is computed again as this device's memory allows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.benchmarks.gpu_plan import Case, in_process, seconds_of, stepping
from tests.benchmarks.gpu_report import GIB, Place, Report, Row
from trainer.config.schema import RunConfig
from trainer.plan.cards import speed_of
from trainer.plan.record.trace import on_this_machine
from trainer.plan.search.fixes import planned
from trainer.run.process import worker_environment

WARM_UP, STEPS = 3, 6
ROOM = 0.92
"""Share of the device's memory that a plan may take."""
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True)
class Target:
    """A model, and the longest that a step of it may take on one H100 or H200.

    Attributes:
        model: Family and architecture.
        pixels: Side of the image.
    """

    model: str
    pixels: int
    limit_s: float


TARGETS = {
    "flux2-dev, 1024 px": Target("flux2 dev", 1024, 1.72),
    "flux2-dev, 512 px": Target("flux2 dev", 512, 0.55),
    "qwen-image, 1024 px": Target("qwen_image qwen-image", 1024, 0.60),
    "flux2-klein-9b, 1024 px": Target("flux2 klein-9b", 1024, 0.42),
}


def models(place: Place, report: Report) -> None:
    """Every model, each in a process of its own."""
    for name, target in TARGETS.items():
        with report.measuring(name):
            found = in_process("gpu_models", name, place, worker_environment())
            report.add(_row(name, found, target, place))


def _row(name: str, found: Mapping[str, float], target: Target, place: Place) -> Row:
    recompute = RECOMPUTES[int(found["recompute"])]
    text = (
        f"{found['seconds']:.3f} s/step, recompute {recompute}, {found['allocated'] / GIB:.1f} GiB "
        f"({found['planned'] / GIB:.1f} planned), first step {found['first_s']:.0f} s"
    )
    speed = speed_of(torch.cuda.get_device_name()) if place.device == "cuda" else None
    text += f", MFU {found['flops'] / found['seconds'] / speed.tflops / 1e12:.1%}" if speed else ""
    # A tiny model on a CPU has its own time.
    return Row(name, text, f"<= {target.limit_s} s", place.tiny or found["seconds"] <= target.limit_s, dict(found))


def measure(target: Target, device: str, cache: Path) -> dict[str, float]:
    """Seconds of a step, the operations that it needs without any computed again, and bytes planned and taken."""
    here = torch.device(device)
    found: dict[str, float] = {"recompute": 0, "planned": 0, "flops": 0, "allocated": 0}
    cfg = _config(target, device, RECOMPUTES[0])
    if device == "cuda":
        room = torch.cuda.get_device_properties(here).total_memory * ROOM
        for number, recompute in enumerate(RECOMPUTES):
            cfg = _config(target, device, recompute)
            plan = planned(cfg, None, cache)
            assert plan is not None, "its tables come with the program"
            found |= {"recompute": number, "planned": plan.training.peak}
            found["flops"] = found["flops"] or plan.flops
            if plan.training.peak <= room:
                break
    with stepping(on_this_machine(cfg, cache), here, cache) as step:
        found["first_s"] = seconds_of(step, 1, here)
        seconds_of(step, WARM_UP - 1, here)
        found["seconds"] = seconds_of(step, STEPS, here) / STEPS
    if device == "cuda":
        found["allocated"] = torch.cuda.max_memory_allocated(here)
    return found


def _config(target: Target, device: str, recompute: str) -> RunConfig:
    compiler = "inductor" if device == "cuda" else "aot_eager"
    fields = (f"train.checkpointing={recompute}", "train.compile=true", f"train.compile_backend={compiler}")
    fields += (f"data.resolution={target.pixels}",) if device == "cuda" else ()
    return Case(target.model, 1, fields).config(device)


if __name__ == "__main__":
    print(json.dumps(measure(TARGETS[sys.argv[1]], sys.argv[2], Path(sys.argv[3]))))
