"""The table of what fits where in presets/README.md: `python -m tests.plan.fits` writes it.

For each model and machine a way to train a LoRA that the plan calls fitting: of those that are about the fastest the
one that rounds the base least.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.plan.common import NOWHERE, run
from tests.readme import write_section
from trainer.plan.hardware import named
from trainer.plan.memory import MemoryPlan
from trainer.plan.search.fixes import planned
from trainer.system.amounts import GIB

MODELS = {
    "FLUX.2-dev": "flux2 dev",
    "FLUX.2-klein 9B": "flux2 klein-9b",
    "FLUX.2-klein 4B": "flux2 klein-4b",
    "FLUX.1-dev": "flux1 dev",
    "FLUX.3": "flux3 flux3",
    "Qwen-Image": "qwen_image qwen-image",
    "Z-Image": "z_image z-image",
    "SD3.5-large": "sd3 sd35-large",
    "SD3.5-medium": "sd3 sd35-medium",
    "SD3-medium": "sd3 sd3-medium",
    "SDXL": "sdxl base",
    "BAGEL-7B-MoT": "bagel 7b-mot",
}
AGAIN = {"none": "", "selective": "◐", "full": "↻"}
"""{the most that a block recomputes: its mark}"""
ABOUT = 1.1
"""Times the fastest is about as fast."""
MACHINES = ("1x24gb", "1x32gb", "2x24gb", "2x32gb", "2x48gb", "4x24gb", "4x80gb", "8x80gb")


def fits_table() -> str:
    """The table, in Markdown."""
    lines = ["| | " + " | ".join(machine.replace("gb", " GB").replace("x", " x ") for machine in MACHINES) + " |"]
    lines.append("|---" * (len(MACHINES) + 1) + "|")
    for name, model in MODELS.items():
        lines.append(f"| {name} | {' | '.join(_cell(model, machine) for machine in MACHINES)} |")
    return "\n".join(lines)


def _cell(model: str, machine: str) -> str:
    ways = list(_ways(model, machine))
    fastest = min((_seconds(plan) for _, plan in ways), default=0.0)
    return next((text for text, plan in ways if _seconds(plan) <= ABOUT * fastest), "-")


def _ways(model: str, machine: str) -> Iterator[tuple[str, MemoryPlan]]:
    """How the model can be trained there, and the plans, from a base in bf16 to one in 4 bits."""
    hardware = named(machine)
    assert hardware.count is not None
    strategies = ("none",) if hardware.count == 1 else ("ddp", "full")
    formats = ("none", "int8", "nf4")
    for format, strategy, offload in itertools.product(formats, strategies, (0, "auto")):
        fields = [f"parallel.devices={hardware.count}", f"train.batch_size={hardware.count}"]
        fields += [f"parallel.strategy={strategy}", f"quantize.format={format}", "train.checkpointing=auto"]
        fields += [f"quantize.encoders={str(format != 'none').lower()}", f"parallel.offload_blocks={offload}"]
        fields += ["sample.every=250", "sample.prompts=[a fox]"]
        plan = planned(run(model, *fields), hardware.card, NOWHERE)
        if plan and plan.verdict == "fits":
            marks = AGAIN[str(plan.checkpointing).partition(" ")[0]] + ("⇅" if plan.offload_blocks else "")
            base = "bf16" if format == "none" else format
            yield f"{base}{marks} {plan.need / GIB:.1f}", plan


def _seconds(plan: MemoryPlan) -> float:
    assert plan.time is not None
    return plan.time.low + plan.time.high


if __name__ == "__main__":
    write_section("presets", "fits", fits_table())
