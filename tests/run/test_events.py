"""Events as lines of a file: what is written is read back, and damage stays where it is."""

import json
import math
import multiprocessing
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.run.events import (
    CheckpointEvent,
    ErrorEvent,
    EventReader,
    EventWriter,
    ExportEvent,
    LossyWriter,
    PromptsEvent,
    RankLine,
    RankReader,
    SampleEvent,
    StatusEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
    last_state,
    latest_steps,
)
from trainer.view.numbers import default_decay, format_duration, smoothed
from trainer.view.steps import seconds_waited, step_parts

WARNING = WarningEvent(time=1.0, message="ok")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def step_event(step: int, loss: float = 0.5) -> StepEvent:
    return StepEvent(
        step=step,
        time=100.0 + step,
        loss=loss,
        lr=1e-4,
        grad_norm=2.0,
        seconds=0.5,
        seconds_data=0.01,
        seconds_forward=0.1,
        seconds_backward=0.2,
        seconds_optimizer=0.04,
        seconds_communication=0.05,
        images_per_second=8.0,
    )


def write(file: Path, *records: object) -> None:
    with EventWriter(file) as writer:
        for record in records:
            writer.write(record)


@pytest.mark.parametrize(
    "event",
    [
        StatusEvent(time=1.0, state="encoding", message="captions", done=3, total=36),
        step_event(7),
        SampleEvent(time=1.0, step=100, prompt="a »fox«\n", index=1, path="samples/step-000100-1.png"),
        PromptsEvent(time=1.0, step=100, prompts=("a [trigger]", "b"), instead_of=("c",)),
        ValidationEvent(time=1.0, step=100, loss=0.25),
        CheckpointEvent(time=1.0, step=100, path="checkpoints/step-000100"),
        ExportEvent(time=1.0, step=100, path="export/run.safetensors", what="adapter", format="diffusers"),
        WARNING,
        ErrorEvent(time=1.0, step=9, message="boom", remedy="rest", rank=1, log="logs/1", exit_code=2),
    ],
    ids=lambda event: event.type,
)
def test_an_event_is_read_back_as_it_was_written(file, event):
    write(file, event)
    assert EventReader(file).read() == [event]


def test_a_step_line_has_the_documented_fields_and_no_others(file):
    write(file, step_event(7))
    assert json.loads(file.read_text()) == {
        "type": "step",
        "step": 7,
        "time": 107.0,
        "loss": 0.5,
        "lr": 1e-4,
        "grad_norm": 2.0,
        "seconds": 0.5,
        "seconds_data": 0.01,
        "seconds_forward": 0.1,
        "seconds_backward": 0.2,
        "seconds_optimizer": 0.04,
        "seconds_communication": 0.05,
        "images_per_second": 8.0,
        "tokens_per_second": None,
        "losses": {},
        "metrics": {},
    }


def test_a_rank_line_has_the_documented_fields_and_is_read_back(file):
    line = RankLine(rank=1, step=3, time=5.0, phase="training", allocated=10, reserved=20, peak=15, limit=100)
    write(file, line)
    assert json.loads(file.read_text()) == {
        "rank": 1,
        "step": 3,
        "time": 5.0,
        "phase": "training",
        "allocated": 10,
        "reserved": 20,
        "peak": 15,
        "limit": 100,
    }
    assert RankReader(file).read() == [line]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_null_in_the_file_and_nan_when_read(file, loss):
    write(file, step_event(1, loss))
    assert json.loads(file.read_text())["loss"] is None
    [event] = EventReader(file).read()
    assert math.isnan(event.loss)


def test_each_line_is_read_once_and_a_second_reader_sees_them_all(file):
    reader = EventReader(file)
    assert reader.read() == []
    write(file, step_event(1))
    assert reader.read() == [step_event(1)]
    write(file, step_event(2))
    assert reader.read() == [step_event(2)]
    assert reader.read() == []
    assert EventReader(file).read() == [step_event(1), step_event(2)]


def test_a_half_written_last_line_waits_for_its_end(file):
    write(file, WARNING)
    whole = file.read_bytes()
    reader = EventReader(file)
    file.write_bytes(whole[:20])
    assert reader.read() == []
    file.write_bytes(whole)
    assert reader.read() == [WARNING]


def test_a_line_torn_by_a_crash_is_passed_over_and_the_next_writer_starts_a_new_one(file):
    write(file, WARNING)
    file.write_bytes(file.read_bytes() + b'{"type": "ste')
    write(file, WARNING)
    assert EventReader(file).read() == [WARNING, WARNING]


def test_types_and_fields_of_a_later_version_are_passed_over(file):
    lines = [
        {"type": "telemetry", "time": 1.0, "step": 0},
        {"type": "warning", "time": 1.0, "step": 0, "message": "ok", "severity": 3},
        {"type": "warning", "time": 1.0, "step": 0},
        ["no", "object"],
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert EventReader(file).read() == [WARNING]


@pytest.mark.parametrize("field", ["time", "step"])
@pytest.mark.parametrize("value", ["-1", "1e999", "NaN", "1" + "0" * 30])
def test_a_time_or_step_that_cannot_be_is_a_damaged_line(file, field, value):
    write(file, WARNING)
    line = json.loads(file.read_text())
    line[field] = "value"
    with file.open("a") as lines:
        lines.write(json.dumps(line).replace('"value"', value) + "\n")
    reader = EventReader(file)
    assert reader.read() == [WARNING]
    assert reader.num_skipped == 1


def test_one_of_several_losses_may_be_no_number(file):
    write(file, ValidationEvent(step=1, loss=1.0, losses={"images": math.nan, "text": 2.0}, time=1.0))
    [event] = EventReader(file).read()
    assert math.isnan(event.losses["images"])
    assert event.losses["text"] == 2.0


def write_many(file: Path, name: str) -> None:
    write(file, *[WarningEvent(message=name * 2000) for _ in range(200)])


def test_lines_of_two_processes_never_mix(file):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write_many, args=(file, name)) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    messages = [event.message for event in EventReader(file).read()]
    assert sorted(messages) == ["a" * 2000] * 200 + ["b" * 2000] * 200


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_error_and_spoils_no_line_before_or_after(file):
    with EventWriter(file) as writer:
        writer.write(WARNING)
        with (
            file_size_limit(file.stat().st_size + 10),
            pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device$"),
        ):
            writer.write(WARNING)
        writer.write(WARNING)
    assert len(file.read_bytes().splitlines()) == 3
    assert EventReader(file).read() == [WARNING, WARNING]


def test_a_run_goes_on_while_the_disk_is_full_and_says_how_many_events_were_lost(file):
    writer = LossyWriter(file)
    writer.write(WARNING)
    with file_size_limit(file.stat().st_size + 10):
        writer.write(step_event(4))
        writer.write(step_event(5))
    for step in (6, 7):
        writer.write(step_event(step))
    said = EventReader(file).read()
    assert [(event.type, event.step) for event in said] == [("warning", 0), ("warning", 6), ("step", 6), ("step", 7)]
    assert said[1].message == "2 events before this one were lost: disk full"


def test_steps_repeated_after_a_resume_count_once_with_their_last_values():
    events = [step_event(1, 0.9), step_event(2, 0.8), step_event(3, 0.7), WARNING, step_event(2, 0.6)]
    assert latest_steps(events) == [step_event(1, 0.9), step_event(2, 0.6)]


def test_the_last_status_is_the_state_and_a_run_without_one_is_created():
    assert last_state([StatusEvent(state="loading"), StatusEvent(state="training"), WARNING]) == "training"
    assert last_state([WARNING]) == "created"


def test_the_smoothed_loss_starts_at_the_first_value_and_leaves_nan_out():
    assert smoothed([2.0, 4.0, math.nan], decay=0.5) == pytest.approx([2.0, 10 / 3, 10 / 3], abs=1e-12)
    assert math.isnan(smoothed([math.nan], decay=0.9)[0])


def test_the_smoothed_loss_is_the_published_mean_with_bias_correction():
    """Adam, arXiv 1412.6980, algorithm 1: m_t = d m_(t-1) + (1 - d) g_t, and m_t / (1 - d^t)."""
    decay, values, mean, expected = 0.9, [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], 0.0, []
    for t, value in enumerate(values, 1):
        mean = decay * mean + (1 - decay) * value
        expected.append(mean / (1 - decay**t))
    assert smoothed(values, decay) == pytest.approx(expected, abs=1e-12)
    with_gap = smoothed([*values[:4], math.nan, *values[4:]], decay)
    assert with_gap == pytest.approx([*expected[:4], expected[3], *expected[4:]], abs=1e-12)


def test_means_of_equal_steps_are_smoothed_as_the_steps_themselves():
    steps = [2.0] * 3 + [5.0] * 4 + [1.0]
    means = smoothed([2.0, 5.0, 1.0], 0.9, counts=[3, 4, 1])
    assert means == pytest.approx([smoothed(steps, 0.9)[at] for at in (2, 6, 7)], abs=1e-12)


def test_the_default_decay_grows_with_the_planned_steps():
    assert [default_decay(steps) for steps in (1, 60, 300, 1500, 10_000, 10**6)] == [0.5, 0.74, 0.9, 0.96, 0.99, 0.99]


@pytest.fixture(scope="module")
def trained() -> list[StepEvent]:
    """The steps of a run of the quickstart on two ranks of one machine, as they were written."""
    file = Path(__file__).parent / "assets" / "quickstart-steps.jsonl"
    return [event for event in EventReader(file).read() if isinstance(event, StepEvent)]


def test_the_parts_of_each_step_of_a_real_run_add_up_to_it(trained):
    assert len(trained) == 20
    for step in trained:
        parts = step_parts([step])
        assert tuple(parts) == ("data", "forward", "backward", "optimizer", "other")
        assert sum(parts.values()) == pytest.approx(step.seconds, abs=1e-9)
        assert 0 <= parts["other"] < 0.02 * step.seconds
        assert parts["forward"] == step.seconds_forward
        # Counted with the parts, communication would make the step longer than it was.
        assert sum(parts.values()) + step.seconds_communication > 1.2 * step.seconds
    mean = sum(step.seconds for step in trained) / 20
    assert sum(step_parts(trained).values()) == pytest.approx(mean, abs=1e-9)
    assert 0.2 * mean < seconds_waited(trained) < mean


def test_parts_longer_than_the_step_are_scaled_to_it_and_those_not_measured_are_other():
    long = replace(
        step_event(1), seconds=1.0, seconds_data=0.0, seconds_forward=0.5, seconds_backward=1.0, seconds_optimizer=0.5
    )
    assert step_parts([long]) == {"data": 0.0, "forward": 0.25, "backward": 0.5, "optimizer": 0.25, "other": 0.0}
    unknown = replace(long, seconds_backward=math.nan, seconds_optimizer=0.25, seconds_communication=math.nan)
    assert step_parts([unknown]) == {"data": 0.0, "forward": 0.5, "backward": 0.0, "optimizer": 0.25, "other": 0.25}
    assert math.isnan(seconds_waited([unknown]))
    assert step_parts([]) == dict.fromkeys(("data", "forward", "backward", "optimizer", "other"), 0.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min"), (165, "2 min 45 s"), (11_040, "3 h 4 min"), (3600, "1 h"),
     (200_000, "2 d 7 h")],
)  # fmt: skip
def test_a_duration_is_written_with_its_two_largest_units(seconds, text):
    assert format_duration(seconds) == text
