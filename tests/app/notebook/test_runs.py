"""What a notebook reads from a run's folder, without training anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from app import notebook
from tests.runs import awaited, make_pictures, make_run, run_config
from trainer.run import process
from trainer.run.events import AnyEvent, EventWriter, ExportEvent, SampleEvent, StatusEvent, StepEvent
from trainer.run.folder import RunDir
from trainer.system import gpus
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu, support
from trainer.system.gpus.support import Build


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, run_config(make_pictures(tmp_path / "pictures", 1)), "run")


def write(run: RunDir, *events: AnyEvent) -> None:
    with EventWriter(run.events_file) as writer:
        for event in events:
            writer.write(event)


def step(number: int) -> StepEvent:
    parts = ("data", "forward", "backward", "optimizer", "communication")
    seconds = {f"seconds_{part}": 0.1 for part in parts}
    return StepEvent(step=number, loss=1.0, lr=1e-4, grad_norm=1.0, seconds=0.5, images_per_second=8.0, **seconds)


@pytest.mark.parametrize(("found", "device"), [(0, "cpu"), (1, "cpu"), (2, "cuda"), (8, "cuda")])
def test_two_ranks_take_gpus_where_each_can_have_one(found, device, monkeypatch):
    monkeypatch.setattr(support, "installed", lambda: Build("2.13.0+cu130", cuda="13.0"))
    monkeypatch.setattr(gpus, "read", lambda: [Gpu(index, "H200", 141_000, 0, 0, 40) for index in range(found)])
    assert notebook.device(2) == device


def test_a_driver_that_does_not_answer_leaves_the_cpu(monkeypatch):
    def fail():
        raise InputError("nvidia-smi does not answer")

    monkeypatch.setattr(gpus, "read", fail)
    assert notebook.device(1) == "cpu"


def test_samples_are_told_by_step_in_the_order_of_the_prompts(run):
    drawn = [(0, 1, "a dog"), (0, 0, "a cat"), (50, 0, "a cat")]
    write(run, *(SampleEvent(step=at, prompt=text, index=index, path=f"{at}-{index}.png") for at, index, text in drawn))
    assert notebook.samples(run) == {
        "step 0": {"a cat": run.path / "0-0.png", "a dog": run.path / "0-1.png"},
        "step 50": {"a cat": run.path / "50-0.png"},
    }
    assert list(notebook.samples(run)["step 0"]) == ["a cat", "a dog"]


def test_exports_are_told_in_their_order(run):
    assert notebook.exports(run) == ()
    adapter = ExportEvent(path="export/run.safetensors", what="adapter", format="auto", difference=1e-3)
    merged = ExportEvent(path="export/run-merged", what="merged", format="auto", difference=0.0)
    write(run, adapter, merged)
    assert notebook.exports(run) == (adapter, merged)
    assert notebook.exported(run) == run.path / "export/run-merged"


def test_a_step_is_waited_for_no_longer_than_the_run_lasts(run, monkeypatch):
    monkeypatch.setattr(process, "alive", lambda run: True)
    write(run, StatusEvent(state="training"), step(1), step(2), step(3))
    assert awaited(notebook.reached(run, 2)) == 3
    write(run, StatusEvent(state="finished", step=3))
    assert awaited(notebook.reached(run, 10)) == 3


def test_a_run_that_waits_for_no_other_node_cannot_be_joined(run):
    with pytest.raises(InputError, match="is a single-node run"):
        notebook.join(run)
