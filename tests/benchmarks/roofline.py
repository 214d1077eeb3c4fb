"""What a training step computes and moves, kernel by kernel, and the time that takes at stated rates.

python -m tests.benchmarks.roofline PRESET [--gpus 80gb 24gb] [FIELD=VALUE ...]     a minute; no weights, no GPU

The trainer's own step runs on the plan's fake device, where `kernel_count` counts it: as rank 0 of the preset's ranks
and without torch.compile. A view costs nothing; a kernel reads and writes each tensor once.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import kernel_count
from tests.benchmarks.kernel_count import (
    DECODING,
    ELEMENTWISE,
    HOST,
    KINDS,
    PHASES,
    Kernel,
    StepCount,
    count_step,
    decided_by_plan,
)
from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.parallel.strategy import ring_share
from trainer.plan.hardware import NETWORK, Card, named
from trainer.plan.memory import describe
from trainer.plan.simulate.sizes import sharding_of

GPUS = ("80gb", "141gb", "24gb")
SHARES = {
    kernel_count.MATRIX: 0.78,
    kernel_count.MATRIX_FP32: 0.05,
    kernel_count.SMALL: 0.78,
    kernel_count.ATTENTION: 0.63,
    kernel_count.ATTENTION_BACKWARD: 0.54,
    kernel_count.MASKED: 0.30,
    kernel_count.MASKED_BACKWARD: 0.29,
    kernel_count.CONVOLUTION: 0.50,
}
"""Share of a card's bf16 operations per second that a kind of kernel reaches: measured on one H100 (RESULTS.md,
GPU), but for fp32, small products and convolutions, which are guesses."""
MEMORY_SHARE = 0.89
"""Share of a card's memory bandwidth, measured on the same H100 by a copy."""
NF4_BYTES_PER_S = 1.8e12
"""Codes read and weights written, measured on an H200: the kernel looks up, and does not wait for memory."""
LAUNCH_S = 2.5e-6
"""The least time of a kernel, however small: a guess."""
OTHERS, SHOWN = "others", 0.02
"""Elementwise passes with a smaller share of the step's bytes are added up."""
RATES = """Rates, as shares of a card's bf16 operations per second: {shares}. Of its memory bandwidth: {memory:.0%}; but
nf4 is decoded at {nf4:.0f} GB/s. The shortest kernel: {launch:.1f} µs. A kernel takes as long as its operations, its
bytes or its launch, whichever is longest, and kernels run one after another. The shares of fp32, small matrix products
and convolutions and the shortest kernel are guesses; the others were measured on one H100 (RESULTS.md) and are assumed
for all cards."""
READING = """MFU counts forward and backward once: neither recomputed blocks nor the attention scores that backward
computes again. What a rank receives is assumed to overlap with computing: the time is that of the slower of the two.
Small matrix products have a side of at most 64: those of adapters, and those of one row. Read the times as bounds: the
host's launches are not counted, and few kernels reach the bandwidth of a copy. FLUX.2 klein-4B took 1.5 times as long
on an H100."""


@dataclass(frozen=True)
class Step:
    """An optimizer step of a preset on rank 0.

    Attributes:
        name: The preset's.
        about: A line about the run.
        count: Its kernels.
        local: Bytes that the rank receives from others on its machine.
        remote: Bytes that it receives from other machines.
    """

    name: str
    about: str
    count: StepCount
    local: float
    remote: float

    def receiving_s(self, card: Card) -> float:
        """Return the time of what is received."""
        return self.local / card.link + self.remote / NETWORK

    def seconds(self, card: Card) -> float:
        """Return the time of a step, in which all receiving hides behind computing or the other way round."""
        return max(computing_s(self.count, card), self.receiving_s(card))

    def utilization(self, card: Card) -> float:
        """Return the share of the card's operations that are useful ones."""
        return self.count.useful_flops / (self.seconds(card) * card.tflops * 1e12)


def computing_s(count: StepCount, card: Card) -> float:
    """Return the time of kernels, one after another."""
    return sum(times * seconds(kernel, card) for kernel, times in count.kernels.items())


def seconds(kernel: Kernel, card: Card) -> float:
    """Return the time of a kernel: of its operations, its bytes or its launches, whichever takes longest."""
    if kernel.kind == HOST:
        return kernel.num_bytes / card.host_link
    is_nf4 = kernel.kind == DECODING and kernel.name == "nf4"
    moving = kernel.num_bytes / (NF4_BYTES_PER_S if is_nf4 else card.bandwidth * MEMORY_SHARE)
    computing = kernel.flops / (card.tflops * 1e12 * SHARES[kernel.kind]) if kernel.flops else 0.0
    return max(computing, moving, kernel.launches * LAUNCH_S)


def step_of(preset: Path, fields: Sequence[str]) -> Step:
    """Count the step of a preset. fields: overrides."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    cfg = load_config(preset, tuple(fields)).config
    with tempfile.TemporaryDirectory() as cache:
        cfg = decided_by_plan(cfg, Path(cache))
        count = count_step(cfg, Path(cache))
    about = f"{describe(cfg)}, strategy {cfg.parallel.strategy}, checkpointing {cfg.train.checkpointing}"
    passes = f", {cfg.micro_steps} passes" if cfg.micro_steps > 1 else ""
    return Step(preset.stem, about + passes, count, *received(cfg, count.sent))


def received(cfg: RunConfig, sent: Counter[str]) -> tuple[float, float]:
    """Return the bytes that a rank receives by ring algorithms, from its machine and from others.

    sent: as in `MemoryTracker`.
    """
    sharding, parallel = sharding_of(cfg, cfg.parallel.strategy), cfg.parallel
    shards = ring_share(sharding.ranks) * (sent["gathered"] + sent["scattered"])
    replicas = 2 * ring_share(sharding.replicas) * sent["reduced"]
    remote = shards * (sharding.ranks > parallel.devices) + replicas * (parallel.nodes > 1)
    return shards + replicas - remote, remote


def tables(step: Step, cards: Sequence[Card]) -> str:
    """Return what a step costs as Markdown: by kind of kernel, then by phase."""
    by_kind = step.count.by(_kind_of(step.count))
    kinds = sorted(by_kind, key=lambda name: (_place(name), -by_kind[name].num_bytes))
    by_phase = step.count.by(lambda kernel: kernel.phase)
    rows = [_row(name, by_kind[name], cards) for name in kinds]
    rows.append(_row("**all**", step.count, cards))
    if step.local + step.remote:
        times = " | ".join(f"{1e3 * step.receiving_s(card):.1f}" for card in cards)
        rows.append(f"| received from other ranks | | | {(step.local + step.remote) / 1e9:.1f} | {times} |")
    used = " | ".join(f"{step.utilization(card):.1%}" for card in cards)
    rows.append(f"| useful; MFU | | {step.count.useful_flops / 1e12:.2f} | | {used} |")
    phases = [_row(phase, by_phase[phase], cards) for phase in PHASES if phase in by_phase]
    return "\n".join([step.about, "", *_head(cards), *rows, "", *_head(cards), *phases])


def _kind_of(count: StepCount) -> Callable[[Kernel], str]:
    """Return what names the row of a kernel: its kind, and of elementwise passes that move much also the name."""
    least = SHOWN * count.num_bytes
    of_name = count.by(lambda kernel: kernel.name if kernel.kind == ELEMENTWISE else "")
    shown = {name for name, part in of_name.items() if part.num_bytes >= least}

    def label(kernel: Kernel) -> str:
        if kernel.kind != ELEMENTWISE:
            return kernel.kind
        return f"{ELEMENTWISE}: {kernel.name if kernel.name in shown else OTHERS}"

    return label


def _place(row: str) -> tuple[int, bool]:
    return KINDS.index(row.partition(": ")[0]), row.endswith(OTHERS)


def _head(cards: Sequence[Card]) -> list[str]:
    names = " | ".join(f"{card.name}, ms" for card in cards)
    return [f"| | kernels | TFLOP | GB | {names} |", "|---" * (4 + len(cards)) + "|"]


def _row(name: str, count: StepCount, cards: Sequence[Card]) -> str:
    times = " | ".join(f"{1e3 * computing_s(count, card):.1f}" for card in cards)
    tflop = f"{count.flops / 1e12:.2f}" if count.flops else ""
    return f"| {name} | {count.launches:,} | {tflop} | {count.num_bytes / 1e9:.1f} | {times} |"


def rates() -> str:
    """Say with which rates times are computed."""
    shares = "; ".join(f"{kind}: {share:.0%}" for kind, share in SHARES.items())
    return RATES.format(shares=shares, memory=MEMORY_SHARE, nf4=NF4_BYTES_PER_S / 1e9, launch=LAUNCH_S * 1e6)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def main(argv: Sequence[str]) -> int:
    """Count a preset's step and print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.roofline")
    parser.add_argument("preset", type=Path, help="a preset's file")
    parser.add_argument("fields", nargs="*", help="FIELD=VALUE that differ from the preset's")
    parser.add_argument("--gpus", nargs="+", default=GPUS, help="cards, as launch.py --plan names them")
    options = parser.parse_args(argv)
    cards = [named(name).card for name in options.gpus]
    print(tables(step_of(options.preset, options.fields), cards), *map(_wrapped, (rates(), READING)), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
