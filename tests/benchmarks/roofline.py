"""What a training step computes and moves, kernel by kernel, and the time that takes at stated rates.

python -m tests.benchmarks.roofline PRESET [--gpus 80gb 24gb] [FIELD=VALUE ...]     a minute; no weights, no GPU
python -m tests.benchmarks.roofline all                                             writes ROOFLINE.md, five minutes

The trainer's own step runs on the plan's fake device, where `kernel_count` counts it.
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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
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
from trainer.plan.record.trace import versions
from trainer.plan.simulate.sizes import sharding_of

ROOT = Path(__file__).parents[2]
REPORT = Path(__file__).with_name("ROOFLINE.md")
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


@dataclass(frozen=True)
class Measured:
    """A step of FLUX.2 klein-4B that was measured on an H100 (RESULTS.md, GPU).

    Attributes:
        name: There.
        fields: Differences from the preset.
        seconds: Of a step.
        idle: Share of it in which the GPU had nothing to do, where it was measured.
    """

    name: str
    fields: tuple[str, ...]
    seconds: float
    idle: float | None = None


PRESETS = (
    "flux2-klein-4b-lora-1gpu",
    "flux2-dev-lora-4gpu",
    "flux1-dev-lora-2gpu",
    "sd35-large-lora-2gpu",
    "sdxl-lora-1gpu",
    "qwen-image-lora-2gpu",
    "qwen3-1.7b-base-to-chat-2x24gb",
    "qwen3-8b-qlora-1x24gb",
)
MEASURED = (
    Measured("ours, no recompute", ("train.checkpointing=none",), 0.294),
    Measured("recompute", (), 0.408, 0.176),
    Measured("sharded on one rank", ("train.checkpointing=none", "parallel.strategy=full"), 0.307, 0.115),
)
OTHERS_MEASURED = "by hand 0.286 s, by hand and compiled 0.176 s, ours compiled 0.204 s"
ABOUT = """Kernels, operations and bytes are counted: the trainer's own step (forward, recompute, backward,
clipping, optimizer) runs on the plan's fake device, as rank 0 of the preset's ranks and without torch.compile. A view
costs nothing; a kernel reads and writes each tensor once. Times are computed from these counts, not measured."""
RATES = """Rates, as shares of a card's bf16 operations per second: {shares}. Of its memory bandwidth: {memory:.0%}; but
nf4 is decoded at {nf4:.0f} GB/s. The shortest kernel: {launch:.1f} µs. A kernel takes as long as its operations, its
bytes or its launch, whichever is longest, and kernels run one after another. The shares of fp32, small matrix products
and convolutions and the shortest kernel are guesses; the others were measured on one H100 (RESULTS.md) and are assumed
for all cards."""
READING = """MFU counts forward and backward once: neither recomputed blocks nor the attention scores that backward
computes again. What a rank receives is assumed to overlap with computing: the time is that of the slower of the two.
`*`: by the plan, the run does not fit the card. Small matrix products have a side of at most 64: those of adapters,
and those of one row."""
COMPILING = """Elementwise bytes are given twice: eager, and with blocks that torch.compile compiles (in brackets the
ratio), as `python -m tests.benchmarks.compiled_count` counts them: Inductor lowers each block for a GPU, its scheduler
fuses, and the kernels that it would generate read and write each tensor once. What is outside of the blocks stays
eager. All other columns are without torch.compile. `+`: torch.compile left a part of the blocks uncompiled."""
LIMITS = """Also measured: {others}.

The computed times are too low, for two reasons. The host launches kernels one after another and waits for the GPU a few
times a step, which is not counted; and kernels that are not plain copies (`cat`, `slice_backward`, broadcast products,
narrow matrix products) do not reach the bandwidth of a copy. So these times are optimistic: read them as bounds, not as
predictions. What the GPU check's memory cases took is not compared: three processes shared the GPU then. The split is
what the figures are for: of {whole:.3f} s without recompute, {rest:.3f} s would remain if every
elementwise pass were free. Our compiled step takes 0.204 s, the host's part included."""


@dataclass(frozen=True)
class Step:
    """An optimizer step of a preset on rank 0.

    Attributes:
        name: The preset's.
        about: A line about the run.
        count: Its kernels.
        local: Bytes that the rank receives from others on its machine.
        remote: Bytes that it receives from other machines.
        need: Bytes of the GPU that the run takes at its fullest, by the plan.
    """

    name: str
    about: str
    count: StepCount
    local: float
    remote: float
    need: float

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
        cfg, need = decided_by_plan(cfg, Path(cache))
        count = count_step(cfg, Path(cache))
    about = f"{describe(cfg)}, strategy {cfg.parallel.strategy}, checkpointing {cfg.train.checkpointing}"
    passes = f", {cfg.micro_steps} passes" if cfg.micro_steps > 1 else ""
    return Step(preset.stem, about + passes, count, *received(cfg, count.sent), need)


@dataclass(frozen=True)
class Compiled:
    """What the elementwise passes of a step with compiled blocks move.

    Attributes:
        num_bytes: Read and written.
        is_partly: Whether torch.compile left a part of the blocks uncompiled.
    """

    num_bytes: int
    is_partly: bool


def compiled_of(preset: Path) -> Compiled:
    """Count the elementwise passes of a preset's step with compiled blocks."""
    from tests.benchmarks.compiled_count import compiled_step_of  # Inductor, which nothing else here needs

    step = compiled_step_of(preset)
    return Compiled(step.elementwise, bool(step.problem))


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


def summary(steps: Sequence[Step], cards: Sequence[Card], compiled: Sequence[Compiled]) -> str:
    """Return a row for each step. compiled: the same steps with compiled blocks."""
    names = " | ".join(f"{card.name}, s; MFU" for card in cards)
    lines = [f"| | kernels | TFLOP | GB | elementwise, {cards[0].name} | elementwise, GB: eager, compiled | {names} |"]
    lines.append("|---" * (6 + len(cards)) + "|")
    for step, with_blocks in zip(steps, compiled, strict=True):
        count = step.count
        share = computing_s(_elementwise(count), cards[0]) / computing_s(count, cards[0])
        cells = " | ".join(_time(step, card) for card in cards)
        sums = f"{count.launches:,} | {count.flops / 1e12:,.1f} | {count.num_bytes / 1e9:,.0f}"
        moved = _elementwise(count).num_bytes
        ratio = f"{moved / 1e9:,.0f}, {with_blocks.num_bytes / 1e9:,.0f} ({with_blocks.num_bytes / moved:.2f})"
        lines.append(f"| {step.name} | {sums} | {share:.0%} | {ratio}{' +' * with_blocks.is_partly} | {cells} |")
    return "\n".join(lines)


def _elementwise(count: StepCount) -> StepCount:
    return count.by(lambda kernel: kernel.kind)[ELEMENTWISE]


def _time(step: Step, card: Card) -> str:
    return f"{step.seconds(card):.3f}; {step.utilization(card):.0%}{' *' if step.need > card.memory else ''}"


def compared(steps: Sequence[Step], card: Card) -> str:
    """Return the table of measured steps. steps: of MEASURED."""
    lines = ["| klein-4B | this roofline, s | measured | off | the GPU at work | off |", "|---|---|---|---|---|---|"]
    for step, measured in zip(steps, MEASURED, strict=True):
        found = computing_s(step.count, card)
        busy = None if measured.idle is None else measured.seconds * (1 - measured.idle)
        at_work = f"{busy:.3f} | {found / busy - 1:+.0%}" if busy else "not measured | "
        off = found / measured.seconds - 1
        lines.append(f"| {measured.name} | {found:.3f} | {measured.seconds:.3f} | {off:+.0%} | {at_work} |")
    return "\n".join(lines)


def report(steps: Sequence[Step], measured: Sequence[Step], cards: Sequence[Card], compiled: Sequence[Compiled]) -> str:
    """Return ROOFLINE.md. measured: the steps of MEASURED. compiled: as in `summary`."""
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    whole = computing_s(measured[0].count, cards[0])
    rest = whole - computing_s(_elementwise(measured[0].count), cards[0])
    parts = [
        "# Roofline",
        f"Written by `python -m tests.benchmarks.roofline all` with {packages}. {ABOUT}",
        rates(),
        READING,
        COMPILING,
        summary(steps, cards, compiled),
        "## Against what was measured",
        "FLUX.2 klein-4B, steps in a row on one H100 on 2026-11-26 with torch 2.11 ([RESULTS.md](RESULTS.md#gpu)). "
        "At work: the step without the time in which the GPU was idle.",
        compared(measured, cards[0]),
        LIMITS.format(others=OTHERS_MEASURED, whole=whole, rest=rest),
        *(part for step in steps for part in (f"## {step.name}", tables(step, cards))),
    ]
    return "\n\n".join(map(wrapped, parts)) + "\n"


def wrapped(text: str) -> str:
    """Return the text with lines of at most 120 characters; tables stay as they are."""
    if "|" in text:
        return text
    paragraphs = text.split("\n\n")
    return "\n\n".join(textwrap.fill(p, 120, break_long_words=False, break_on_hyphens=False) for p in paragraphs)


def write_report(cards: Sequence[Card]) -> None:
    """Count all presets of the report, two at a time, and write it."""
    folder = ROOT / "presets"
    jobs = [(folder / f"{name}.yaml", ()) for name in PRESETS]
    jobs += [(folder / f"{PRESETS[0]}.yaml", measured.fields) for measured in MEASURED]
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
        compiled = pool.map(compiled_of, [preset for preset, _ in jobs[: len(PRESETS)]])
        steps = list(pool.map(step_of, *zip(*jobs, strict=True)))
        text = report(steps[: len(PRESETS)], steps[len(PRESETS) :], cards, list(compiled))
    REPORT.write_text(text, encoding="utf-8")
    print(f"{REPORT}: written")


def main(argv: Sequence[str]) -> int:
    """Count a preset and print it, or all of the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.roofline")
    parser.add_argument("preset", help="a preset's file, or all")
    parser.add_argument("fields", nargs="*", help="FIELD=VALUE that differ from the preset's")
    parser.add_argument("--gpus", nargs="+", default=GPUS, help="cards, as launch.py --plan names them")
    options = parser.parse_args(argv)
    cards = [named(name).card for name in options.gpus]
    if options.preset == "all":
        write_report(cards)
    else:
        print(tables(step_of(Path(options.preset), options.fields), cards), wrapped(rates()), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
