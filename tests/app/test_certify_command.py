"""`launch.py --certify`: a base is examined on real ranks, and nothing is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

import launch
from tests.audit.run import write_picture
from trainer.run.events import EventReader, StepEvent
from trainer.run.folder import RunDir
from trainer.view import certificate

SIZE = (64, 64)


def preset(folder: Path, model: str) -> Path:
    for name in ("data", "before"):
        for number, colour in enumerate(("red", "blue")):
            write_picture(folder / name / f"{number}.png", SIZE, f"a {colour} square", seed=number + 7 * len(name))
    file = folder / "edit.yaml"
    file.write_text(
        f"name: edit\nmodel: {model}\n"
        f"data: {{path: {folder / 'data'}, references: {folder / 'before'}, resolution: 64}}\n"
        "adapter: {type: lora}\ntrain: {steps: 5, precision: fp32}\nsample: {size: [64, 64], steps: 6}\n"
        "parallel: {device: cpu, devices: 2}\n"
    )
    return file


@pytest.mark.slow
def test_two_ranks_certify_what_one_process_certified(tmp_path, capsys):
    file = preset(tmp_path, "{family: flux1, path: tiny, options: {architecture: kontext}}")
    assert launch.main(["--certify", str(file), "--runs", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out.count("certificate: no fault found in flux1 kontext tiny") == 1
    (folder,) = (tmp_path / "runs").glob("edit-certificate-*")
    found = certificate.read(folder / certificate.FILE)
    (other,) = (one for one in certificate.recorded() if one.base == found.base)
    assert other.conditions == found.conditions  # it was compared
    steps = [event for event in EventReader(RunDir(folder).events_file).read() if isinstance(event, StepEvent)]
    assert not steps and not list((folder / "checkpoints").glob("*"))


@pytest.mark.slow
def test_a_fault_is_told_and_ends_with_1(tmp_path, capsys):
    file = preset(tmp_path, "{family: flux2, path: tiny}")
    argv = ["--certify", str(file), "--runs", str(tmp_path / "runs"), "parallel.devices=1"]
    assert launch.main([*argv, "objective.shift=constant", "objective.shift_factor=9", f"name={'e' * 64}"]) == 1
    printed = "".join(capsys.readouterr())
    assert printed.count("certificate, shift: objective.shift: constant is a factor of 9 at 64 x 64") == 1


def test_models_of_text_are_refused(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("words")
    file = tmp_path / "text.yaml"
    file.write_text(f"name: t\nmodel: {{family: causal_lm}}\ndata: {{path: {tmp_path}}}\n")
    assert launch.main(["--certify", str(file), "--runs", str(tmp_path / "runs")]) == 2
    assert "model.family: causal_lm is not certified; models that draw images alone are" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
