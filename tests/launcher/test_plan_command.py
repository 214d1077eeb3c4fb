"""`launch.py --plan`, as it is typed."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.plan.common import NOWHERE
from trainer.config.load import load_config
from trainer.plan.hardware import CARDS, MEMORY
from trainer.plan.store import known_model
from trainer.weights.forms import READ

ROOT = Path(__file__).parents[2]
PRESETS = [preset for preset in sorted((ROOT / "presets").glob("*.yaml")) if preset.stem != "demo-base-cpu"]
"""All but the one whose model is made by `make demo-base`."""
UNKNOWN = (
    f"is neither a memory, {', '.join(CARDS)}, nor a card that is known here, {', '.join(MEMORY)}; name the nearest "
    "memory"
)
LIMIT_S = 1.5
"""Cold. `make bench` measures it; here only what is far beyond fails."""
WITHOUT_TORCH = "import sys, launch; code = launch.main(sys.argv[1:]); assert 'torch' not in sys.modules; exit(code)"


def answer(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "--plan", *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_plan_names_what_takes_the_memory_and_whether_it_fits() -> None:
    done = answer("presets/flux2-dev-lora-nf4-2x24gb.yaml", "--gpus", "2x24gb")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "flux2-dev-lora: lora rank 16, base in nf4, 1024 px, 1 per rank and pass, 2 ranks, strategy full, "
        "train.checkpointing full 48, selective"
    )
    sizes = [float(line.split()[0]) for line in lines if " GiB  " in line]
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=0.05)
    assert lines[-2].startswith("fits: leaves ")
    assert lines[-1].startswith("largest that fit, each by itself: data.resolution=")


def test_a_plan_that_does_not_fit_says_by_how_much_and_ends_with_1() -> None:
    done = answer("presets/flux2-dev-lora-4gpu.yaml", "train.checkpointing=none", "--gpus", "4x24gb")
    assert done.returncode == 1
    verdict, *ways = done.stdout.partition("does not fit: ")[2].splitlines()
    assert verdict.endswith(" GiB more than the 23.99 GiB of 24 GB (RTX 4090)")
    assert ways[0].startswith("  fits with train.checkpointing=auto parallel.offload_blocks=auto: ")


def test_a_plan_comes_with_the_advice_on_the_run() -> None:
    done = answer("presets/sdxl-loha-1gpu.yaml", "optim.lr=1e-4", "--gpus", "1x12gb")
    assert done.returncode == 0
    assert done.stderr == (
        "note: command line: optim.lr: 0.0001 is a usual learning rate for lora, but loha learns about ten times "
        "more slowly with it; try 10 times as much\n"
    )


def test_what_a_run_would_refuse_is_not_planned(tmp_path: Path) -> None:
    done = answer("presets/quickstart.yaml", "optim.type=schedulefree", "optim.schedule=constant", "optim.ema=0.9")
    assert (done.returncode, done.stdout) == (2, "")
    assert "optim.ema: 0.9 cannot be combined with optim.type schedulefree" in done.stderr
    (tmp_path / "model_index.json").write_text('{"is_distilled": true}')
    fields = (f"model.path={tmp_path}", "model.options.distilled=false")
    done = answer("presets/flux2-klein-4b-lora-1gpu.yaml", *fields, "--gpus", "1x24gb")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"command line: model.options.distilled: false, but {tmp_path}/model_index.json says")


def test_weights_in_a_form_that_is_not_read_are_named_and_absent_or_damaged_ones_are_not_needed(tmp_path: Path) -> None:
    preset, file = "presets/flux2-klein-4b-lora-1gpu.yaml", tmp_path / "model.safetensors"
    fields = (f"model.path={file}", f"model.base={tmp_path}", "--gpus", "1x24gb")
    for content in (None, b"not yet downloaded"):
        if content:
            file.write_bytes(content)
        done = answer(preset, *fields)
        assert (done.returncode, done.stderr) == (0, "")
    header = b'{"a.SCB": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    sentence = f"model.path: {file}: 'a.SCB' is stored as bitsandbytes' int8, which is not read; {READ}\n"
    for command in ((preset, *fields), (preset, *fields, "--json")):
        done = answer(*command)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"command line: {sentence}")


def test_a_plan_for_programs_is_json_in_bytes() -> None:
    done = answer("presets/flux2-klein-4b-lora-1gpu.yaml", "--gpus", "1x80gb", "--json")
    found = json.loads(done.stdout)
    assert found["verdict"] == "fits"
    (most,) = (phase for phase in found["phases"] if phase["name"] == found["fullest"])
    assert sum(item["size"] for item in most["items"]) == pytest.approx(found["need"])
    assert found["need"] < found["card"]["memory"]


def test_a_plan_ends_with_what_to_know_before_training() -> None:
    done = answer("presets/flux1-schnell-lora-1gpu.yaml", "--gpus", "1x80gb")
    assert done.stdout.splitlines()[-1] == (
        "warning: model.path black-forest-labs/FLUX.1-schnell: the model was distilled to generate in 4 steps without "
        "guidance, and training undoes that: images in few steps become blurred. Train black-forest-labs/FLUX.1-dev "
        "instead, and use the adapter with this model; if it is not distilled, set model.options.distilled: false"
    )


def test_the_answer_comes_at_once() -> None:
    began = time.monotonic()
    assert answer("presets/flux2-dev-lora-4gpu.yaml", "--gpus", "4x80gb").returncode == 0
    assert time.monotonic() - began < 3 * LIMIT_S


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_what_a_preset_needs_comes_with_the_program(preset: Path) -> None:
    assert known_model(load_config(preset).config, NOWHERE) is not None


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ("four", f"--gpus: 'four' {UNKNOWN}\n"),
        ("4x25gb", f"--gpus: '25gb' {UNKNOWN}\n"),
        ("0xh100", "--gpus: '0xh100' is not a number of GPUs, as 4x24gb or 8xh100\n"),
    ],
)
def test_gpus_that_are_none_are_refused(gpus: str, message: str) -> None:
    done = answer("presets/flux2-klein-4b-lora-1gpu.yaml", "--gpus", gpus)
    assert (done.returncode, done.stderr) == (2, message)


def test_a_model_that_is_not_here_must_be_named_by_its_architecture() -> None:
    done = answer("presets/flux2-klein-4b-lora-1gpu.yaml", "model.options.architecture=null", "--gpus", "1x24gb")
    assert done.returncode == 2
    assert "or name model.options.architecture, to plan without the files" in done.stderr


def test_gpus_go_with_a_plan_only() -> None:
    argv = [sys.executable, "launch.py", "--doctor", "--gpus", "1x24gb"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--gpus goes with --plan or --fit only; leave it out" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ema", [0, 0.9])
def test_a_plan_can_be_verified_by_a_trace_of_the_whole_model(ema: float) -> None:
    done = answer("presets/quickstart.yaml", f"optim.ema={ema}", "--gpus", "2x12gb", "--exactly")
    assert (done.returncode, done.stderr) == (0, "")
    pattern = r"training traced, block by block: 0\.06 GiB of tensors; planned 0\.0[67] \(([+-][\d.]+)%\)"
    said = re.fullmatch(pattern, done.stdout.splitlines()[-1])
    assert said is not None
    assert abs(float(said[1])) < 1
