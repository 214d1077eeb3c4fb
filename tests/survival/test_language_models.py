"""A run of a language model whose processes are all killed goes on by --resume as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.commands import Started, launch_py
from trainer.run.events import AnyEvent, CheckpointEvent, EventReader, LengthEvent, StepEvent, latest_steps
from trainer.run.folder import RunDir
from trainer.run.manifest import complete

SAVED_EVERY = 8
LOST = 3
"""Steps after the last checkpoint that a kill waits for."""
PRESET = f"""\
model: {{family: causal_lm}}
adapter: {{rank: 4, dropout: 0.1}}
data: {{path: rows.jsonl, length: 256, shuffle_window: 16, packing: whole}}
train: {{epochs: 2.5, batch_size: 4, micro_batch: 1, precision: fp32, seed: 3}}
optim: {{lr: 1e-3, schedule: cosine, warmup: 2}}
parallel: {{device: cpu, devices: 2, strategy: full}}
checkpoint: {{every: {SAVED_EVERY}}}
"""


def conversation(number: int) -> dict[str, Any]:
    """One turn, two or three."""
    turns = range(number % 3 + 1)
    messages = [
        message
        for turn in turns
        for message in (
            {"role": "user", "content": f"{number} + {turn}"},
            {"role": "assistant", "content": f"It is {number + turn}{'!' * (number % 7)}"},
        )
    ]
    return {"messages": messages}


def pair(number: int) -> dict[str, Any]:
    right, wrong = ("yes, it is", "no") if number % 2 == 0 else ("no", "yes")
    return {"prompt": f"Is {number} even? ", "chosen": right, "rejected": f"{wrong}, or {number * number}"}


KINDS = {"conversations": (conversation, 42, ""), "pairs": (pair, 130, "objective: {dpo_beta: 0.5}\n")}
"""{name: (row of a number, number of rows, the rest of the preset)}"""


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a preset and its rows."""
    row, count, rest = KINDS[request.param]
    rows = "".join(f"{json.dumps(row(number))}\n" for number in range(count))
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    (tmp_path / "preset.yaml").write_text(f"name: talk\n{PRESET}{rest}", encoding="utf-8")
    return tmp_path


@pytest.fixture
def killed(folder: Path) -> Iterator[RunDir]:
    """A run that was killed some steps after its first checkpoint."""
    started = Started(folder, "--headless", "preset.yaml", "--run-dir", "runs/killed", run=folder / "runs" / "killed")
    try:
        saved = started.wait_for(CheckpointEvent).step
        while started.wait_for(StepEvent).step < saved + LOST:
            pass
        started.lose_power()
        yield started.run
    finally:
        started.kill()


def events_of(run: RunDir) -> list[AnyEvent]:
    return EventReader(run.events_file).read()


def numbers_of(events: list[AnyEvent]) -> dict[int, tuple[float, ...]]:
    """{step: loss, other numbers}, the last time that a step was done."""
    return {
        event.step: (event.loss, event.lr, event.grad_norm, *event.metrics.values()) for event in latest_steps(events)
    }


@pytest.mark.slow
def test_a_run_killed_with_all_its_processes_and_resumed_ends_bit_for_bit_where_it_would_have(
    folder: Path, killed: RunDir
) -> None:
    straight = launch_py(folder, "--headless", "preset.yaml", "--run-dir", "runs/straight")
    assert straight.returncode == 0, straight.stderr
    reference = RunDir.open(folder / "runs" / "straight")
    expected = numbers_of(events_of(reference))
    (length,) = (event for event in events_of(reference) if isinstance(event, LengthEvent))
    assert list(expected) == list(range(1, length.steps + 1))

    before = events_of(killed)
    done = numbers_of(before)
    assert done == {step: expected[step] for step in done}
    saved = int(complete(killed.checkpoints)[-1].name.removeprefix("step-"))
    assert saved + LOST <= max(done) < length.steps
    assert length.epoch_steps < saved, "an epoch has ended before"
    resumed = launch_py(folder, "--resume", "runs/killed")
    assert resumed.returncode == 0, resumed.stderr
    after = events_of(killed)[len(before) :]
    assert [event.step for event in after if isinstance(event, StepEvent)] == list(range(saved + 1, length.steps + 1))
    assert numbers_of(before + after) == expected

    ends, wanted = ({file.name: file for file in run.export.rglob("*.*")} for run in (killed, reference))
    assert ends.keys() == wanted.keys()
    adapters, others = (load_file(files["adapter_model.safetensors"]) for files in (ends, wanted))
    assert adapters.keys() == others.keys()
    assert all(adapters[name].equal(others[name]) for name in others)
