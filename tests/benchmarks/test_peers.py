"""How whole programs are measured."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from tests.benchmarks import peers
from tests.benchmarks.peers import Program

STEPS = """\
import sys, time
for number in range(1000):
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    print(0.5, flush=True)
"""


def test_a_program_is_measured_per_step_and_ended(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS, encoding="utf-8")
    lines = partial(peers._lines_matching, r"\d\.\d+")
    reading = Program([sys.executable, "steps.py"], "output-{number}", lines, tmp_path).measure(3)
    assert 0.03 < reading.step_cpu < 0.08
    assert reading.start_cpu > 0.05
    assert reading.step >= 0.045
    assert 5 < reading.memory < 100
    written = (tmp_path / "output-3").read_text()
    assert peers.WARM_UP + peers.STEPS <= lines(written) < 1000


def test_a_program_that_fails_is_named_by_its_first_error(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text("raise ValueError('no torchvision')", encoding="utf-8")
    program = Program([sys.executable, "steps.py"], "output-{number}", lambda text: 0, tmp_path)
    with pytest.raises(RuntimeError, match=r"^ValueError: no torchvision$"):
        program.measure(0)


def test_the_steps_of_the_example_are_read_from_its_progress_bar() -> None:
    bar = "Steps:   0%|          | 0/20 [00:00<?, ?it/s]\rSteps:  10%|#         | 2/20 [00:02<00:18, 1.0s/it, loss=1]"
    assert peers._last_of_progress_bar(bar) == 2
    assert peers._last_of_progress_bar("Caching latents: 50%|##  | 2/4 [00:00<00:00]") == 0
