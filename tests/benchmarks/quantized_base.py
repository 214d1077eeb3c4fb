"""What a base in fewer bits costs a LoRA: the demo model in each format, the same pictures, noise and order.

    python -m tests.benchmarks.quantized_base       writes the table of the README; exit code 1 beyond a limit

Style is measured as in `tests.benchmarks.style_transfer`, with the adapter on the base it was trained on.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from tests.benchmarks.style_transfer import Outcome, learn
from tests.readme import write_section
from trainer.quantize import FORMATS

LIMITS = {"int8": 0.01, "nf4": 0.05}
"""Largest difference of the final loss to that on the base in bf16, relative to it."""
LAST_STEPS = 20
"""The final loss is their mean."""


def train_on(formats: Iterable[str]) -> dict[str, Outcome]:
    """A LoRA on the base in bf16 (`none`) and in each of the formats."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: learn(Path(folder) / name, ("train.precision=bf16", f"quantize.format={name}"))
            for name in ("none", *formats)
        }


def final_loss(outcome: Outcome) -> float:
    """Mean over the last steps."""
    return statistics.mean(outcome.losses[-LAST_STEPS:])


def excess(found: dict[str, Outcome], name: str) -> float:
    """By how much the final loss differs from that on the bf16 base, relative to it."""
    return final_loss(found[name]) / final_loss(found["none"]) - 1


def table(found: dict[str, Outcome]) -> str:
    """Markdown: a row per format."""
    lines = [
        "| base | bits per weight | error of the weights | final loss | | to the style, before | after |",
        "|---" * 7 + "|",
    ]
    weight = torch.randn(3072, 3072, generator=torch.Generator().manual_seed(0))
    for name, outcome in found.items():
        bits, error = (16.0, 0.0) if name == "none" else _cost(name, weight)
        lines.append(
            f"| {'bf16' if name == 'none' else name} | {bits:.2f} | {100 * error:.2f} % | {final_loss(outcome):.4f} "
            f"| {100 * excess(found, name):+.2f} % | {outcome.before.to_style:.3f} | {outcome.after.to_style:.3f} |"
        )
    return "\n".join(lines)


def _cost(name: str, weight: torch.Tensor) -> tuple[float, float]:
    """Bits per weight, and the relative error of normally distributed ones."""
    format = FORMATS[name]
    records = format.encode(weight)
    decoded = format.decode(records, weight.shape[1], torch.float32, format.table())
    return 8 * records.numel() / weight.numel(), float((decoded - weight).norm() / weight.norm())


def main() -> int:
    """Train on every format, write the table, and return 1 where a loss is beyond its limit."""
    found = train_on(FORMATS)
    print(table(found))
    write_section("quantized", table(found))
    return int(any(abs(excess(found, name)) > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
