"""`launch.py --fit`, as it is typed."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.launcher.test_plan_command import PRESETS, ROOT, UNKNOWN
from tests.plan.common import NOWHERE
from trainer.config.load import load_config, stage_configs
from trainer.plan.hardware import named
from trainer.plan.memory import MemoryPlan
from trainer.plan.search.choices import KEPT, kept_fields
from trainer.plan.search.fit import Target, fit
from trainer.plan.search.fixes import planned
from trainer.system.amounts import GIB
from trainer.view.numbers import format_duration
from trainer.weights.forms import READ

LIMIT_S = 2.0
"""Cold, on a machine with nothing else to do; CPU time of a busy one is up to twice that."""
WITHOUT_TORCH = "import sys, launch; code = launch.main(sys.argv[1:]); assert 'torch' not in sys.modules; exit(code)"


def answer(runs: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "--runs", str(runs), "--fit", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def children_s() -> float:
    """CPU seconds of the commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def file_of(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1].removeprefix("written: "))


def plans(file: Path, machine: str) -> list[MemoryPlan]:
    found = [planned(part, named(machine).card, NOWHERE) for part in stage_configs(load_config(file).config)]
    return [plan for plan in found if plan is not None]


def test_the_fastest_configs_are_printed_with_what_they_take_and_cost(tmp_path: Path) -> None:
    done = answer(tmp_path, "presets/flux2-dev-lora-4gpu.yaml", "--gpus", "4x24gb", "--price", "0.5")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[:3] == [
        "flux2-dev-lora on 4 x 24 GB (RTX 4090), 4 samples per step: the fastest configs that fit, by their plans",
        "(the middle of a step's time with full overlap and without; at most 92% of the memory)",
        "",
    ]
    hardware = named("4x24gb")
    cfg = load_config(ROOT / "presets" / "flux2-dev-lora-4gpu.yaml").config
    best = fit(cfg, Target(hardware.card, 4, kept_fields(KEPT)), NOWHERE).proposals[0]
    assert lines[3].startswith(
        f"1  {best.seconds:.3g} s per step, {4 / best.seconds:.3g} images/s, {best.plan.need / GIB:.1f} of 24.0 GiB on "
    )
    length = format_duration(1500 * best.seconds)
    assert lines[3].endswith(f", 1,500 steps in {length} for {best.seconds * 1500 / 3600 * 0.5 * best.plan.ranks:.2f}")
    assert lines[4:6] == [f"   {best}", "   computing decides, by an assumed speed"]
    assert [line[0] for line in lines if re.match(r"\d  ", line)] == ["1", "2", "3"]
    assert any(re.fullmatch(r" +[\d.]+ GiB of host memory on each machine", line) for line in lines)
    faster = r"faster: .+ would take [\d.]+ s, but needs [\d.]+ of 24\.0 GiB(, more than 92%)?"
    assert re.fullmatch(faster, lines[-2])


def test_the_fastest_is_written_as_a_preset_that_plans_as_was_said(tmp_path: Path) -> None:
    file = file_of(answer(tmp_path, "presets/flux2-dev-lora-4gpu.yaml", "--gpus", "4x24gb", "train.steps=50"))
    assert file == tmp_path / "presets" / "flux2-dev-lora-4gpu-fit-4x24gb.yaml"
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# flux2-dev-lora-4gpu.yaml for 4 x 24 GB (RTX 4090), as --fit chose it by its plans.\n")
    assert re.search(r"\n# [\d.]+ s per step, [\d.]+ GiB on each GPU\n# changed: [a-z_.]+ .+ -> .+\n", text)
    assert re.search(r"\n  format: (none|int8)  # nf4, int8 or fp8 store the frozen base in fewer bits\n", text)
    before, cfg = load_config(ROOT / "presets" / "flux2-dev-lora-4gpu.yaml").config, load_config(file).config
    assert cfg.train.steps == 50 and cfg.data == before.data
    (plan,) = plans(file, "4x24gb")
    assert plan.time is not None
    assert plan.verdict == "fits" and f"\n# {plan.time.middle:.3g} s per step, {plan.need / GIB:.1f} GiB " in text


def test_no_file_is_replaced(tmp_path: Path) -> None:
    argv = ("presets/flux2-klein-4b-lora-1gpu.yaml", "--gpus", "1x24gb", "--write", str(tmp_path / "own.yaml"))
    first, second = file_of(answer(tmp_path, *argv)), file_of(answer(tmp_path, *argv))
    assert (first.name, second.name) == ("own.yaml", "own-2.yaml")
    assert load_config(first).config == load_config(second).config


def test_each_stage_is_searched_and_written(tmp_path: Path) -> None:
    done = answer(tmp_path, "presets/single_node_8gpu.yaml", "--gpus", "4x80gb")
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("1  ")]
    seconds = [f"{plan.time.middle:.3g}" for plan in plans(file_of(done), "4x80gb") if plan.time]
    assert len(found) == 2 and found == seconds
    assert [line for line in done.stdout.splitlines() if line.startswith("stage ")] == [
        "stage 1 of 2, pretrain:",
        "stage 2 of 2, tune:",
    ]


def test_where_nothing_fits_the_way_out_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    argv = ("presets/flux2-klein-9b-lora-2gpu.yaml", "--gpus", "1x12gb")
    done = answer(tmp_path, *argv, "--keep", "format,rank,resolution,cpu_offload,offload_blocks")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(
        "flux2-klein-9b-lora does not fit 1 x 12 GB (RTX 4070): would fit with parallel.cpu_offload=true: allow it "
        "with --keep format,rank,resolution,offload_blocks\n"
    )
    assert not list(tmp_path.rglob("*.yaml"))
    assert answer(tmp_path, *argv, "--keep", "rank,resolution,cpu_offload,offload_blocks").returncode == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--gpus", "4x24gb", "--keep", "rnk"), "--keep: 'rnk' is not a field; did you mean 'rank'?\n"),
        (("--gpus", "four"), f"--gpus: 'four' {UNKNOWN}\n"),
        (
            ("--gpus", "4x24gb", "--price", "-1"),
            "--price: -1 is not the price of a GPU-hour; give a number of 0 or more\n",
        ),
        (
            ("--gpus", "4x24gb", "parallel.devices=8"),
            "command line: parallel.devices: 8 are asked for, each machine has 4; leave it out, or set 4 or fewer\n",
        ),
        (
            ("--gpus", "4x24gb", "--write", "presets"),
            "--write: presets is a folder; name a file in it, presets/fits.yaml\n",
        ),
        (
            ("--gpus", "4x24gb", "--write", "nowhere/own.yaml"),
            "--write: nowhere is not a folder; make it, or name another file\n",
        ),
    ],
)
def test_wrong_input_is_said_in_a_sentence_before_anything_runs(
    argv: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = answer(tmp_path, "presets/flux2-dev-lora-4gpu.yaml", *argv)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_weights_in_a_form_that_is_not_read_are_named_before_a_search(tmp_path: Path) -> None:
    save_file({"a.SCB": torch.ones(1)}, file := tmp_path / "model.safetensors")
    model = (f"model.path={file}", f"model.base={tmp_path}")
    done = answer(tmp_path, "presets/flux2-klein-4b-lora-1gpu.yaml", *model, "--gpus", "1x24gb")
    sentence = f"command line: model.path: {file}: 'a.SCB' is stored as bitsandbytes' int8, which is not read; {READ}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)


def test_a_preset_without_data_or_a_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("model: {family: flux2, path: no/model}\n", encoding="utf-8")
    done = answer(tmp_path, str(file), "--gpus", "1x24gb")
    assert done.returncode == 2
    assert "data.path: no images or text given; name a folder" in done.stderr
    done = answer(tmp_path, str(file), "--gpus", "1x24gb", "data.path=.")
    assert (done.returncode, done.stdout) == (2, "")
    assert "or name model.options.architecture, to plan without the files" in done.stderr


def test_the_answer_comes_at_once(tmp_path: Path) -> None:
    began = children_s()
    assert answer(tmp_path, "presets/large_scale_8x8.yaml", "--gpus", "8x80gb").returncode == 0
    assert children_s() - began < 2 * LIMIT_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "machine"),
    [(preset, ("1x24gb", "8x80gb")[number % 2]) for number, preset in enumerate(PRESETS)],
    ids=lambda value: Path(value).stem,
)
def test_every_preset_is_fitted_and_written_as_it_was_planned(preset: Path, machine: str, tmp_path: Path) -> None:
    began = children_s()
    done = answer(tmp_path, str(preset), "--gpus", machine)
    assert children_s() - began < 2 * LIMIT_S
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("1  ")]
    assert found == [f"{plan.time.middle:.3g}" for plan in plans(file_of(done), machine) if plan.time]
