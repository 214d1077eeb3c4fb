"""Configs that fit by their plans are trained for a few steps, until one stays within memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.form.fit_proof import prove
from tests.runs import make_pictures
from trainer.config.load import load_config_text
from trainer.launcher.fit_command import Found, search
from trainer.plan.calibration import calibrate
from trainer.run.folder import shared_cache
from trainer.system.amounts import MIB
from trainer.system.errors import InputError

DEMO = """\
name: shown
model: {family: flux2, path: demo}
data: {path: /nowhere, resolution: 64}
train: {steps: 500, batch_size: 2, precision: fp32}
sample: {every: 10, prompts: [a fox], size: [64, 64]}
parallel: {device: cpu}
"""


def found_for(runs: Path, text: str = DEMO, *fields: str) -> Found:
    return search(load_config_text(text, fields, Path("demo.yaml")), runs, "1x12gb", None)


def test_a_config_is_trained_for_a_few_steps_on_made_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = found_for(tmp_path)
    assert prove(found, tmp_path) == found
    said = capsys.readouterr().out
    assert said.startswith("proved: 3 steps took ") and f"{found.fits[0].proposals[0].seconds:.3g} planned" in said
    (run,) = tmp_path.glob("shown-proof*")
    (cost,) = run.rglob("cost.json")
    assert [rank["used"] for rank in json.loads(cost.read_text(encoding="utf-8"))["memory"]] == [0]
    card = found.hardware.card
    assert calibrate(shared_cache(found.loaded.config, tmp_path), card) == calibrate(Path("nowhere"), card)


@pytest.mark.slow
def test_one_that_takes_more_than_the_limit_gives_way_to_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = DEMO.replace("/nowhere", str(make_pictures(tmp_path / "pictures", count=2)))
    found = found_for(tmp_path, text, "train.micro_batch=1")
    (one,) = found.fits
    twice = replace(found, fits=(replace(one, proposals=(one.proposals[0],) * 2),))
    assert prove(twice, tmp_path, limit=float(MIB)).fits[0].proposals == ()
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(", more than 1.00 MiB; the next is tried") and second.endswith(", more than 1.00 MiB")


@pytest.mark.slow
def test_preferences_are_made_where_the_run_learns_from_them(tmp_path: Path) -> None:
    text = """\
name: preferred
model: {family: causal_lm}
data: {path: /nowhere, length: 64}
objective: {dpo_beta: 0.1}
train: {steps: 500, batch_size: 2, precision: fp32}
parallel: {device: cpu}
"""
    found = found_for(tmp_path, text)
    assert prove(found, tmp_path) == found


def test_what_cannot_be_trained_here_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--prove: the run has stages"):
        prove(found_for(tmp_path, DEMO + "stages: [{name: one, set: {}}]\n"), tmp_path)
    published = ("model.path=no/model", "model.options.architecture=klein-4b", "train.precision=bf16")
    away = found_for(tmp_path, DEMO, *published)
    with pytest.raises(InputError, match=r"model\.path"):
        prove(away, tmp_path)
