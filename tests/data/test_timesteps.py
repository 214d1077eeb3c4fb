"""What noise a config's images are trained at, as a process of its own tells it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import make_pictures, run_config
from trainer.config.load import dump_config
from trainer.data.timesteps import NUM_BINS, bucket_timesteps, main
from trainer.models.objectives.flow_matching import empirical_mu
from trainer.run.process import worker_environment


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return make_pictures(tmp_path / "pictures")


def test_each_bucket_has_its_images_and_the_shift_of_its_tokens(pictures: Path):
    rows = bucket_timesteps(run_config(pictures, objective__shift="empirical", data__resolution=64))
    assert [(row.width, row.height, row.images) for row in rows] == [(48, 80, 2), (64, 64, 3), (80, 48, 3)]
    assert [row.shift for row in rows] == pytest.approx([2.718281828 ** empirical_mu(n, 50) for n in (15, 16, 15)])


def test_the_shift_moves_the_drawn_timesteps_toward_noise(pictures: Path):
    plain, moved = (
        bucket_timesteps(run_config(pictures, objective__shift="constant", objective__shift_factor=factor))[0].timesteps
        for factor in (1.0, 5.0)
    )
    assert len(plain) == NUM_BINS
    assert sum(plain) == pytest.approx(1, abs=1e-3)
    assert plain == pytest.approx(plain[::-1], abs=1e-3)
    assert sum(moved[NUM_BINS // 2 :]) > 0.9


def test_discrete_diffusion_draws_evenly(pictures: Path):
    [row, *_] = bucket_timesteps(run_config(pictures, model__family="sdxl"))
    assert row.shift == 1
    assert row.timesteps == pytest.approx([1 / NUM_BINS] * NUM_BINS, abs=1e-3)


@pytest.mark.slow
def test_the_command_prints_it_or_says_what_is_wrong(pictures: Path, tmp_path: Path, monkeypatch, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(run_config(pictures)))
    argv = [sys.executable, "-m", "trainer.data.timesteps", str(file)]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, env=worker_environment())
    assert sum(row["images"] for row in json.loads(told.stdout)) == 8
    file.write_text(dump_config(run_config(tmp_path / "none")))
    monkeypatch.setattr(sys, "argv", argv[2:])
    assert main() == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"data.path: {tmp_path}/none: no such folder; ")
