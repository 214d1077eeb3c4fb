"""The benchmarks in small, with room for a busy machine: what fails here is a real loss, not noise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks import memory, quantized_base, startup, step_time
from tests.benchmarks.gpu_check import PARTS
from tests.benchmarks.gpu_report import read
from tests.benchmarks.step_time import Ratio
from tests.benchmarks.workload import KLEIN_SMALL, LITTLE, Bench, prepare
from tests.distributed import run_ranks
from tests.runs import alone
from trainer.run import process

STEP_LIMIT = 1.15


def ratios_until_within(folder: Path, measure: Callable[[Bench], Ratio]) -> list[Ratio]:
    """Of up to three measurements, the last of which counts: a neighbour may slow ours in each pair of one."""
    ratios: list[Ratio] = []
    while len(ratios) < 3 and not (ratios and ratios[-1].cpu <= STEP_LIMIT):
        ratios.append(measure(prepare(folder / str(len(ratios)), LITTLE)))
    return ratios


# Without instructions for bf16 a CPU takes 27 times as long for it.
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_costs_at_most_15_percent_more_than_one_written_by_hand(tmp_path: Path, precision: str) -> None:
    ratios = ratios_until_within(
        tmp_path, lambda bench: step_time.compare_with_hand_written(alone(), bench, precision, pairs=7)
    )
    assert ratios[-1].cpu <= STEP_LIMIT, ratios


@pytest.mark.slow
def test_a_step_on_two_ranks_costs_at_most_15_percent_more_than_one_written_by_hand(tmp_path: Path) -> None:
    ratios = ratios_until_within(
        tmp_path, lambda bench: run_ranks(2, step_time.compare_with_hand_written, bench, "fp32", 7)[0]
    )
    assert ratios[-1].cpu <= STEP_LIMIT, ratios


@pytest.mark.slow
def test_loading_on_two_ranks_takes_at_most_60_percent_of_the_models_bytes(tmp_path: Path) -> None:
    bench = prepare(tmp_path, KLEIN_SMALL)
    for loading in run_ranks(2, memory.measure_loading, bench):
        assert 0.4 <= loading.peak / loading.full_bytes <= memory.PEAK_LIMIT
        assert loading.share <= memory.SHARE_LIMITS[2]


@pytest.mark.slow
def test_loading_a_quantized_base_holds_no_more_than_it_keeps_and_what_is_being_encoded(tmp_path: Path) -> None:
    bench = prepare(tmp_path, KLEIN_SMALL)
    for loading in run_ranks(2, memory.measure_loading, bench, "nf4"):
        assert loading.allocated < loading.peak
        assert loading.is_lean, loading


def test_the_run_folder_and_its_first_event_are_there_at_once(tmp_path: Path) -> None:
    preset, waits = startup.make_preset(tmp_path), []
    for number in range(3):  # neighbours only add to it: the shortest is what it takes
        started, seconds = startup.wait_for_run_folder(preset, f"run-{number}")
        waits.append(seconds - started.seconds_without_processor())
        started.kill()
    assert min(waits) <= 3 * startup.FIRST_EVENT_LIMIT_S, waits


@pytest.mark.slow
def test_a_lora_on_fewer_bits_ends_at_nearly_the_loss_of_one_on_all(tmp_path: Path) -> None:
    plain = quantized_base.losses_on(tmp_path / "none", "none", "fp32")
    for format, limit in quantized_base.LIMITS.items():
        found = quantized_base.losses_on(tmp_path / format, format, "fp32")
        assert abs(quantized_base.excess(found, plain)) <= limit, format


def command(folder: Path, *parts: str) -> list[str]:
    """The check for GPUs, some of its parts on this CPU and in small."""
    argv = [sys.executable, "-m", "tests.benchmarks.gpu_check", "--device", "cpu", "--tiny"]
    return [*argv, "--folder", str(folder), "--parts", ",".join(parts)]


def check(folder: Path, *parts: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end. variables: of its environment."""
    env = process.worker_environment() | variables
    return subprocess.run(command(folder, *parts), env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_the_check_for_gpus_runs_to_its_end_on_a_cpu(tmp_path: Path, part: str) -> None:
    done = check(tmp_path, part)
    rows, is_done = read(tmp_path / f"{part}.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert is_done and rows and all(row.passed for row in rows)
    assert "skipped" not in rows[-1].figure


@pytest.mark.slow
def test_the_check_for_gpus_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    parts = ("copies", "attention", "machine")
    with subprocess.Popen(
        command(tmp_path, *parts), env=process.worker_environment(), start_new_session=True
    ) as started:
        until = time.monotonic() + 120
        while not read(tmp_path / "attention.json")[0] and time.monotonic() < until:
            time.sleep(0.01)
        os.killpg(started.pid, signal.SIGKILL)
    before, is_done = read(tmp_path / "attention.json")
    written = (tmp_path / "copies.json").stat().st_mtime_ns
    assert before and not is_done
    done = check(tmp_path, *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "copies.json").stat().st_mtime_ns == written
    assert read(tmp_path / "attention.json")[1]


@pytest.mark.slow
def test_a_package_that_is_missing_is_a_row_of_the_check(tmp_path: Path) -> None:
    (tmp_path / "diffusers.py").write_text("raise ModuleNotFoundError('No module named diffusers')", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), process.worker_environment().get("PYTHONPATH", "")])
    done = check(tmp_path / "found", "copies", "klein", PYTHONPATH=path)
    assert done.returncode == 1
    assert read(tmp_path / "found" / "copies.json")[1]
    rows, is_done = read(tmp_path / "found" / "klein.json")
    assert not is_done
    assert rows[-1].figure == "FAILED: ModuleNotFoundError: No module named diffusers"


@pytest.mark.slow
def test_weights_that_were_half_drawn_when_the_check_was_killed_are_drawn_again(tmp_path: Path) -> None:
    (tmp_path / "dev-blocks.part" / "model" / "transformer").mkdir(parents=True)
    done = check(tmp_path, "blocks")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "dev-blocks.part").exists()
