"""What a base in fewer bits costs a LoRA: the demo model in each format, the same pictures, noise and order.

    python -m tests.benchmarks.quantized_base       writes the table of trainer/weights; exit code 1 beyond a limit

Style is measured as in `tests.benchmarks.style_transfer`, with the adapter on the base it was trained on.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.benchmarks.style_transfer import Outcome, learn, trainer_of
from tests.commands import takes_no_arguments
from tests.readme import write_section
from tests.runs import step_numbers
from trainer.weights.quantization import FORMATS

LIMITS = {"int8": 0.01, "nf4": 0.05}
"""Largest difference of the final loss to that on the base in bf16, relative to it."""
LAST_STEPS = 20
"""The final loss is their mean."""


def losses_on(root: Path, format: str, precision: str) -> list[float]:
    """Of each step of a LoRA on the base in this format."""
    trainer = trainer_of(root, (f"train.precision={precision}", f"quantize.format={format}"))
    try:
        return [step_numbers(trainer).loss for _ in range(trainer.cfg.train.steps)]
    finally:
        trainer.close()


def excess(losses: Sequence[float], plain: Sequence[float]) -> float:
    """By how much the final loss differs from that on the base as it is, relative to it."""
    return final_loss(losses) / final_loss(plain) - 1


def final_loss(losses: Sequence[float]) -> float:
    """Mean over the last steps."""
    return statistics.mean(losses[-LAST_STEPS:])


def table(found: Mapping[str, Outcome]) -> str:
    """Markdown: a row per format."""
    plain = found["none"].losses
    lines = [
        "| base | bits per weight | error of the weights | final loss | | to the style, before | after |",
        "|---" * 7 + "|",
    ]
    weight = torch.randn(3072, 3072, generator=torch.Generator().manual_seed(0))
    for name, outcome in found.items():
        bits, error = (16.0, 0.0) if name == "none" else _cost(name, weight)
        loss, more = final_loss(outcome.losses), excess(outcome.losses, plain)
        lines.append(
            f"| {'bf16' if name == 'none' else name} | {bits:.2f} | {100 * error:.2f} % | {loss:.4f} "
            f"| {100 * more:+.2f} % | {outcome.before.to_style:.3f} | {outcome.after.to_style:.3f} |"
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
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: learn(Path(folder) / name, ("train.precision=bf16", f"quantize.format={name}"))
            for name in ("none", *FORMATS)
        }
    print(table(found))
    write_section("trainer/weights", "quantized", table(found))
    plain = found["none"].losses
    return int(any(abs(excess(found[name].losses, plain)) > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    takes_no_arguments(__doc__)
    sys.exit(main())
