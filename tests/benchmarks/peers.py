"""Whole programs in turns: our command line, loops written by hand, and diffusers' training example.

Each is started as a person starts it and ended after a few steps. What is read of it from outside: CPU seconds of its
process tree per step, seconds from its launch to the end of its first step with warm caches, and the highest resident
memory (VmHWM) of the largest of its processes. Limits are on CPU seconds: wall time on shared cores depends on the
neighbours, and is printed next to them.

    python -m tests.benchmarks.peers [--rows ROW ...] [--pairs 9] [--diffusers train_dreambooth_lora_flux2_klein.py]

About 10 minutes per row with 9 pairs; exit code 1 when a limit is exceeded. Nothing is fetched: a checkout of diffusers
has the example in examples/dreambooth, and it needs torchvision.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from tests.benchmarks.workload import KLEIN_SMALL, Bench, Workload, prepare
from tests.commands import LAUNCH
from tests.runs import alone
from trainer.models.families.flux2 import Flux2, image_ids, text_ids

PAIRS = 9
WARM_UP = 3
STEPS = 12
POLL_S = 0.02
TIMEOUT_S = 300
TICKS = os.sysconf("SC_CLK_TCK")
BARE_LOOP = Path(__file__).with_name("bare_loop.py")
OURS, BARE, DIFFUSERS = "ours", "by hand", "diffusers"

LIMITS: Mapping[str, Mapping[str, float]] = {
    "bf16": {"step": 1.0, "start": 1.05},
    "fp32": {"step": 1.0, "start": 1.05},
    "ddp": {"step": 1.0},
    "grad_op": {"step": 1.0},
    "nf4": {"step": 1.1},
}
"""{row: {figure: largest ratio to the loop by hand}}; of nf4 to bf16."""
DIFFUSERS_LIMITS = {"start": 0.65, "memory": 1.0}
ONE_PROCESS = ("bf16", "fp32")
"""Rows in which diffusers' example takes part."""


@dataclass(frozen=True)
class Reading:
    """What was read of one program.

    Attributes:
        start_cpu: CPU seconds of its process tree until the end of its first step.
        start: Seconds until then.
        step_cpu: CPU seconds of the tree per step.
        step: Seconds per step.
        memory: VmHWM of its largest process, MiB.
    """

    start_cpu: float
    start: float
    step_cpu: float
    step: float
    memory: float


@dataclass(frozen=True)
class Program:
    """A program to measure.

    Attributes:
        argv: Its command; {number} stands for the number of the measurement.
        progress: The file, with the same mark, that shows how far it is.
        finished: finished(text of that file) is the number of its finished steps.
        folder: Its working directory.
    """

    argv: Sequence[str]
    progress: str
    finished: Callable[[str], int]
    folder: Path

    def measure(self, number: int) -> Reading:
        """Run it until WARM_UP + STEPS steps are done. Raises RuntimeError with the end of its output if it fails."""
        argv = [part.replace("{number}", str(number)) for part in self.argv]
        progress = self.folder / self.progress.replace("{number}", str(number))
        output = self.folder / f"output-{number}"
        with output.open("wb") as file:
            began = time.perf_counter()
            process = subprocess.Popen(argv, cwd=self.folder, env=_environment(), stdout=file, stderr=subprocess.STDOUT)
        try:
            marks = [self._wait(process, progress, output, at) for at in (1, WARM_UP, WARM_UP + STEPS)]
            memory = max(_high_water(member) for member in _tree(process.pid))
        finally:
            _end(process)
        first, begin, end = marks
        per_step = [(last - start) / STEPS for last, start in zip(end, begin, strict=True)]
        return Reading(first[0], first[1] - began, *per_step, memory)

    def _wait(self, process: subprocess.Popen[bytes], progress: Path, output: Path, steps: int) -> tuple[float, float]:
        """CPU seconds of the tree and the clock when so many steps are done."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if progress.exists() and self.finished(progress.read_text(encoding="utf-8", errors="replace")) >= steps:
                return sum(map(_cpu_seconds, _tree(process.pid))), time.perf_counter()
            if process.poll() is not None:
                break
            time.sleep(POLL_S)
        text = output.read_text(encoding="utf-8", errors="replace")
        errors = re.findall(r"^\w+(?:Error|Exception): .+", text, re.MULTILINE)
        raise RuntimeError(errors[0] if errors else f"no step {steps} after {TIMEOUT_S} s; code {process.poll()}")


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _cpu_seconds(process: psutil.Process) -> float:
    """Seconds of a process and of those of its children that have ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS
    return 0.0


def _high_water(process: psutil.Process) -> float:
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0
    return 0.0


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        family = _tree(process.pid)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)
    process.wait()


def ours(
    bench: Bench, name: str, precision: str, ranks: int = 1, strategy: str = "none", base: str = "none"
) -> Program:
    """`launch.py --headless` on a preset, with the images and captions already encoded."""
    cfg = bench.config(
        data={"cache": str(bench.root / "cache")},
        train={"batch_size": ranks, "precision": precision},
        parallel={"device": "cpu", "devices": ranks, "strategy": strategy},
        quantize={"format": base},
    )
    bench.examples(cfg, alone())
    preset = bench.root / f"{name}.yaml"
    preset.write_text(cfg.model_dump_json(exclude_unset=True), encoding="utf-8")
    run = f"{name}-{{number}}"
    argv = [sys.executable, str(LAUNCH), "--headless", str(preset), "--run-dir", run]
    return Program(argv, f"{run}/events.jsonl", lambda text: text.count('"type": "step"'), bench.root)


def by_hand(bench: Bench, precision: str, way: str) -> Program:
    """The bare loop. way: `one`, or on two ranks `ddp` or `fsdp`."""
    start = [sys.executable]
    if way != "one":
        start += ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        start += ["--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    argv = [*start, str(BARE_LOOP), str(bench.root), precision, way]
    return Program(argv, "output-{number}", partial(_lines_matching, r"\d\.\d+"), bench.root)


def diffusers_example(bench: Bench, script: Path, precision: str) -> Program:
    """diffusers' example, unchanged; it encodes the one caption and the images at each start."""
    argv = [
        sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
        "--mixed_precision", "no" if precision == "fp32" else precision, "--dynamo_backend", "no", str(script),
        "--pretrained_model_name_or_path", str(bench.root / "whole"),
        "--instance_data_dir", str(bench.root / "images"),
        "--instance_prompt", "image number 1", "--output_dir", str(bench.root / "example"),
        "--resolution", str(bench.workload.pixels), "--max_sequence_length", str(bench.workload.text_tokens),
        "--mixed_precision", "no" if precision == "fp32" else precision, "--cache_latents", "--rank", "16",
        "--train_batch_size", "1", "--max_train_steps", "1000", "--checkpointing_steps", "100000",
        "--report_to", "tensorboard", "--skip_final_inference", "--learning_rate", "1e-4", "--guidance_scale", "1",
        "--text_encoder_out_layers", "9", "18", "27",
    ]  # fmt: skip
    return Program(argv, "output-{number}", _last_of_progress_bar, bench.root)


def _lines_matching(pattern: str, text: str) -> int:
    return sum(re.fullmatch(pattern, line) is not None for line in text.splitlines())


def _last_of_progress_bar(text: str) -> int:
    done = re.findall(r"Steps:[^\r\n]*?\| (\d+)/\d+ \[", text)
    return int(done[-1]) if done else 0


def prepared(folder: Path, workload: Workload) -> Bench:
    """A folder with everything that any of the programs reads."""
    bench = prepare(folder, workload)
    cfg = bench.config(data={"cache": str(folder / "cache")})
    data = bench.examples(cfg, alone())
    examples = [data.cache.read(photo.pixels.latents) | data.cache.read(photo.texts[0]) for photo in data.train]
    side = workload.pixels // Flux2.size_multiple
    tensors = {name: torch.stack([example[name] for example in examples]) for name in ("latents", "prompt_embeds")}
    positions = {"img_ids": image_ids(side, side), "txt_ids": text_ids(workload.text_tokens)}
    save_file({**tensors, **positions}, folder / "examples.safetensors")
    targets = "|".join(f"(?:{pattern})" for pattern in Flux2.adapter_targets["transformer"])
    (folder / "targets.txt").write_text(targets, encoding="utf-8")
    return bench


def add_what_the_example_reads(bench: Bench) -> None:
    """A whole diffusers folder: the same transformer with a small text encoder and autoencoder; images alone."""
    from diffusers import AutoencoderKLFlux2
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    whole = bench.root / "whole"
    whole.mkdir()
    for name in ("transformer", "tokenizer", "scheduler"):
        (whole / name).symlink_to(bench.model / name)
    width = bench.workload.text_width // 3
    encoder = Qwen3Config(
        vocab_size=len(AutoTokenizer.from_pretrained(bench.model / "tokenizer")) + 64, hidden_size=width,
        num_hidden_layers=28, num_attention_heads=2, num_key_value_heads=1, head_dim=64, intermediate_size=2 * width,
    )  # fmt: skip
    Qwen3ForCausalLM(encoder).save_pretrained(whole / "text_encoder")
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    AutoencoderKLFlux2(**kinds, block_out_channels=(32,) * 4, layers_per_block=1).save_pretrained(whole / "vae")
    classes = {
        "transformer": ["diffusers", "Flux2Transformer2DModel"], "vae": ["diffusers", "AutoencoderKLFlux2"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"], "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }  # fmt: skip
    index = {"_class_name": "Flux2KleinPipeline", "_diffusers_version": "0.40.0", **classes}
    (whole / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    images = bench.root / "images"
    images.mkdir()
    for file in (bench.root / "pictures").glob("*.png"):
        (images / file.name).symlink_to(file)


def programs(bench: Bench, row: str, example: Path | None) -> dict[str, Program]:
    """{name: program} of a row; the first two are compared."""
    if row == "nf4":
        sharded = partial(ours, bench, precision="bf16", ranks=2, strategy="full")
        return {OURS: sharded(name="nf4", base="nf4"), "bf16": sharded(name="full")}
    if row in ("ddp", "grad_op"):
        way = "ddp" if row == "ddp" else "fsdp"
        return {OURS: ours(bench, row, "bf16", 2, row), BARE: by_hand(bench, "bf16", way)}
    found = {OURS: ours(bench, row, row), BARE: by_hand(bench, row, "one")}
    return found | ({DIFFUSERS: diffusers_example(bench, example, row)} if example else {})


def in_turns(programs: Mapping[str, Program], pairs: int) -> Iterator[dict[str, Reading]]:
    """Measure all of them `pairs` times, in changing order, after one run that fills caches and does not count."""
    names = list(programs)
    numbers = iter(range(10**6))
    for name in names:
        programs[name].measure(next(numbers))
    for pair in range(pairs):
        order = names[pair % len(names) :] + names[: pair % len(names)]
        readings = {name: programs[name].measure(next(numbers)) for name in order}
        yield {name: readings[name] for name in names}


def main() -> int:
    """Print one line per figure. Returns 1 when one is over its limit or a program fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument(
        "--diffusers", type=Path, metavar="FILE", help="diffusers' train_dreambooth_lora_flux2_klein.py"
    )
    options = parser.parse_args()
    print(f"{'':26}{'ours':>9}{'theirs':>9}{'ratio':>8}{'limit':>7}{'wall':>8}   [lowest-highest ratio]", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = prepared(Path(folder), KLEIN_SMALL)
        if options.diffusers:
            add_what_the_example_reads(bench)
        rows = [_row(bench, row, options.pairs, options.diffusers) for row in options.rows]
    return int(not all(rows))


def _row(bench: Bench, row: str, pairs: int, example: Path | None) -> bool:
    """Measure and print the figures of a row; whether all are within their limits."""
    found = programs(bench, row, example.absolute() if example else None)
    fine = True
    if DIFFUSERS in found:
        try:
            found[DIFFUSERS].measure(-1)
        except RuntimeError as error:
            print(f"{row + ' diffusers':26}could not run: {error}", flush=True)
            del found[DIFFUSERS]
            fine = False
    elif row in ONE_PROCESS:
        print(f"{row + ' diffusers':26}not given: name its example with --diffusers FILE", flush=True)
    readings = list(in_turns(found, pairs))
    for other in list(found)[1:]:
        limits = DIFFUSERS_LIMITS if other == DIFFUSERS else LIMITS[row]
        for figure in ("step", "start", "memory"):
            fine = _line(f"{row} {figure} / {other}", readings, figure, other, limits.get(figure)) and fine
    return fine


def _line(title: str, readings: Sequence[Mapping[str, Reading]], figure: str, other: str, limit: float | None) -> bool:
    """Print the medians of a figure and of its ratios; whether it is within its limit."""
    counted = figure if figure == "memory" else f"{figure}_cpu"
    mine, theirs = ([vars(pair[name])[counted] for pair in readings] for name in (OURS, other))
    ratios = [one / two for one, two in zip(mine, theirs, strict=True)]
    wall = statistics.median(vars(pair[OURS])[figure] / vars(pair[other])[figure] for pair in readings)
    ratio = statistics.median(ratios)
    digits = 0 if figure == "memory" else 3
    within = limit is None or ratio <= limit
    print(
        f"{title:26}{statistics.median(mine):>9.{digits}f}{statistics.median(theirs):>9.{digits}f}{ratio:>8.3f}"
        f"{limit if limit is not None else '':>7}{wall:>8.3f}   [{min(ratios):.3f}-{max(ratios):.3f}]"
        f"{'' if within else ' over'}",
        flush=True,
    )
    return within


if __name__ == "__main__":
    sys.exit(main())
