"""A run as the page and the notebook see it, from nothing but its folder."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from app.notebook import panels
from app.runs import monitor
from app.runs.monitor import CHARTS, DRAWN_STEPS, Follower
from tests.runs import run_config, step_event, write
from trainer.run.events import (
    AnyEvent,
    ErrorEvent,
    EventWriter,
    ExportEvent,
    LengthEvent,
    PromptsEvent,
    RankLine,
    SampleEvent,
    StatusEvent,
    ValidationEvent,
)
from trainer.run.folder import RunDir
from trainer.system.gpus.load import GpuLoad, Load


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", run_config(tmp_path, train__steps=100), tmp_path / "runs" / "one")


def test_a_run_that_was_never_started_says_so(run: RunDir):
    view = Follower(run).view()
    assert (view.state, view.sentence, view.is_running) == ("created", "Not started yet", False)


def test_a_run_in_epochs_shows_them_until_its_steps_are_known_and_then_both(tmp_path: Path, living: None):
    run = RunDir.create(tmp_path / "runs", run_config(tmp_path, train__epochs=4), tmp_path / "runs" / "epochs")
    write(run, StatusEvent(state="starting"), StatusEvent(state="training"), step_event(1), step_event(2))
    view = Follower(run).view()
    assert (view.num_steps, view.length, view.epoch, view.eta_s) == (0, "4 epochs", "", None)
    assert view.sentence == "Training: step 2 of 4 epochs, 8.00 images/s"
    write(run, LengthEvent(step=2, steps=1200, epoch_steps=300, epoch=2 / 300), step_event(340))
    view = Follower(run).view()
    assert (view.num_steps, view.length, view.epoch) == (1200, "1,200", "epoch 1.1 of 4")
    assert view.sentence.startswith("Training: step 340 of 1,200, epoch 1.1 of 4, 8.00 images/s, about ")
    shown = str(panels.status(view))
    assert "340 / 1,200" in shown and "1.1 of 4" in shown and 'aria-valuemax="1200"' in shown


def test_of_a_stopped_run_no_time_is_left_while_its_process_ends(run: RunDir, living: None):
    write(run, StatusEvent(state="training"), step_event(1), step_event(2))
    assert Follower(run).view().eta_s is not None
    write(run, StatusEvent(state="stopped", step=2))
    view = Follower(run).view()
    assert (view.eta_s, view.is_running, view.is_alive) == (None, False, True)


def test_samples_keep_the_prompt_that_they_were_drawn_from(run: RunDir):
    old, new = (SampleEvent(step=5, prompt=prompt, index=0, path=f"samples/{prompt}.png") for prompt in ("old", "new"))
    again = SampleEvent(step=5, prompt="new", index=0, path="samples/new.png", time=1.0)
    write(run, old, PromptsEvent(step=5, prompts=("new [trigger]",)), new, again)
    view = Follower(run).view()
    assert view.samples == (again, old)
    assert view.prompts == ("new [trigger]",)


@pytest.mark.usefixtures("living")
def test_a_training_run_tells_step_speed_and_time_left(run: RunDir):
    follower = Follower(run)
    write(run, StatusEvent(state="encoding", done=3, total=8))
    assert follower.view().sentence == "Encoding 3 of 8"
    write(run, StatusEvent(state="training"), *(step_event(number) for number in range(1, 11)))
    view = follower.view()
    assert view.sentence == "Training: step 10 of 100, 8.00 images/s, about 1 min 21 s left"
    assert (view.step, view.loss, view.speed) == (10, pytest.approx(1.0), (8.0, "images"))
    assert dict(view.seconds) == pytest.approx(
        {"data": 0.1, "forward": 0.2, "backward": 0.4, "optimizer": 0.05, "other": 0.15}
    )
    assert (view.step_s, view.waited_s) == (pytest.approx(0.9), pytest.approx(0.15))


def test_the_curves_of_a_long_run_are_drawn_anew_when_it_is_seen(run: RunDir, living):
    follower = Follower(run)
    write(run, *(step_event(number, 1.0) for number in range(1, 3 * DRAWN_STEPS + 1)))
    drawn = [follower.view().curves]
    for number in range(3):
        write(run, step_event(3 * DRAWN_STEPS + 1 + number, 1.0))
        drawn.append(follower.view().curves)
    assert [one == drawn[0] for one in drawn] == [True, True, True, False]
    write(run, step_event(3 * DRAWN_STEPS + 4, 1.0), StatusEvent(state="finished"))
    assert follower.view().curves == (3 * DRAWN_STEPS + 4, 0)


@pytest.mark.usefixtures("living")
def test_only_what_is_new_is_read_and_a_repeated_step_counts_once(run: RunDir):
    follower = Follower(run)
    write(run, *(step_event(number, 1.0) for number in range(1, 6)))
    before = follower.view().curves
    assert follower.view().curves == before
    write(run, StatusEvent(state="starting"), step_event(3, 2.0), step_event(4, 3.0))
    assert follower.view().curves != before
    [losses, *_] = follower.lines("Loss")
    assert losses.points == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 3.0)]


@pytest.mark.usefixtures("living")
def test_curves_have_every_step_with_its_minutes(run: RunDir):
    follower = Follower(run)
    write(run, *(step_event(number, loss=number % 7, time=1000.0 + 6 * number) for number in range(1, 2001)))
    write(run, ValidationEvent(step=2000, loss=0.5, time=1000.0 + 12000))
    follower.view()
    each, validation = follower.lines("Loss")
    assert (each.label, each.look, each.decay) == ("each step", "noisy", 0.81)
    assert (each.points[:2], each.points[-1]) == ([(1, 1), (2, 2)], (2000, 5))
    assert (each.minutes[0], each.minutes[-1]) == (0, pytest.approx(199.9))
    assert (validation.points, validation.look) == ([(2000, 0.5)], "dots")
    assert validation.minutes == [pytest.approx(199.9)]
    assert list(follower.charts()) == ["Loss", "Learning rate", "Gradient norm", "Speed", "Seconds per step"]
    assert [line.label for line in follower.lines("Speed")] == ["images per second"]
    assert [line.label for line in follower.lines("Seconds per step")] == [
        *("whole step", "data", "forward", "backward", "optimizer", "other", "waiting for other ranks")
    ]


@pytest.mark.usefixtures("living")
def test_the_loss_that_is_named_is_the_last_of_the_smoothed_curve(run: RunDir):
    follower = Follower(run)
    write(run, *(step_event(number, loss=1 / number) for number in range(1, 1201)))
    [each, *_] = follower.lines("Loss")
    assert follower.view().loss == pytest.approx(each.means[-1][1], rel=1e-9)


@pytest.mark.usefixtures("living")
def test_each_ranks_memory_and_the_age_of_its_last_word(run: RunDir):
    for rank, peak in ((0, 300), (1, 100)):
        with EventWriter(run.rank_file(rank)) as writer:
            for at in (5, 6):
                line = RankLine(
                    rank=rank, step=at, phase="training", allocated=50, reserved=80, peak=peak, limit=1000, time=0.0
                )
                writer.write(line)
    zero, one = Follower(run).view().ranks
    assert (zero.rank, zero.step, zero.phase) == (0, 6, "training")
    assert (zero.allocated, zero.reserved, zero.peak, zero.limit, one.peak) == (50, 80, 300, 1000, 100)
    assert zero.age_s > 1e6
    assert Follower(run).view().imbalance == 1.5


@pytest.mark.usefixtures("living")
def test_a_run_that_falls_silent_is_called_stuck_with_the_silent_rank(run: RunDir):
    long_ago = time.time() - 200
    write(run, StatusEvent(state="training", time=long_ago), step_event(4, time=long_ago))
    for rank, at in ((0, long_ago + 15), (1, long_ago)):
        with EventWriter(run.rank_file(rank)) as writer:
            writer.write(
                RankLine(rank=rank, step=4, phase="training", allocated=1, reserved=1, peak=1, limit=9, time=at)
            )
    view = Follower(run).view()
    assert view.is_stuck
    assert view.sentence in [f"No step for {s} s in state training; silent: rank 0, 1" for s in (185, 186)]


def test_a_process_that_is_gone_without_a_word_has_failed_and_says_what_to_do(run: RunDir):
    (run.logs / "launch-1.log").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    run.launch_file.write_text('{"pid": 1, "create_time": 0.0, "argv": ["none"]}')
    write(run, StatusEvent(state="starting"), StatusEvent(state="training"), step_event(7))
    view = Follower(run).view()
    assert (view.state, view.is_running) == ("failed", False)
    assert view.sentence == "Failed at step 7: torch.OutOfMemoryError: CUDA out of memory."
    assert view.error and "train.micro_batch" in view.error.remedy


def test_an_error_names_its_rank_and_a_new_start_forgets_it(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    write(run, ErrorEvent(step=3, rank=1, message="boom"), StatusEvent(state="failed", step=3))
    follower = Follower(run)
    assert follower.view().sentence == "Failed on rank 1 at step 3: boom"
    monkeypatch.setattr("trainer.run.process.alive", lambda run: True)
    write(run, StatusEvent(state="starting"))
    assert (follower.view().error, follower.view().sentence) == (None, "Starting")


def test_a_finished_run_names_its_export_and_keeps_each_sample_once(run: RunDir):
    samples = [SampleEvent(step=at, prompt=f"p{index}", index=index, path="x") for at in (0, 5) for index in (0, 1)]
    exported = ExportEvent(step=100, path="export/one.safetensors", what="adapter", format="auto")
    write(run, *samples, samples[0], step_event(100), exported, StatusEvent(state="finished", step=100))
    view = Follower(run).view()
    assert view.sentence == "Finished after 100 steps; exported export/one.safetensors"
    assert [(sample.index, sample.step) for sample in view.samples] == [(0, 0), (0, 5), (1, 0), (1, 5)]


def test_runs_are_found_with_the_latest_start_first(tmp_path: Path):
    made = [RunDir.create(tmp_path, run_config(tmp_path), tmp_path / name) for name in ("a", "b", "c")]
    for at, run in enumerate((made[2], made[0], made[1])):
        (run.logs / "launch-1.log").touch()
        os.utime(run.logs, (at, at))
    (tmp_path / "queue").mkdir()
    assert [run.path.name for run in monitor.find_runs(tmp_path)] == ["b", "a", "c"]


def test_a_log_is_read_from_its_end_by_level_and_then_only_what_was_appended(tmp_path: Path):
    file = tmp_path / "stderr.log"
    assert monitor.read_log(file, "all") == monitor.LogPart()
    file.write_text("\n".join([f"line {n}" for n in range(20000)] + ["UserWarning: look", "RuntimeError: boom", "en"]))
    first = monitor.read_log(file, "all")
    assert first.is_fresh
    assert first.text.endswith("\nUserWarning: look\nRuntimeError: boom\n")
    assert first.text.startswith("line ")
    assert len(first.text) <= monitor.LOG_BYTES
    assert (first.rest, first.offset) == ("en", file.stat().st_size - 2)
    with file.open("a") as log:
        log.write("d\n 10 %\r 50 %\r100 %\nlast")
    second = monitor.read_log(file, "all", first.offset)
    assert (second.text, second.rest, second.is_fresh) == ("end\n100 %\n", "last", False)
    assert monitor.read_log(file, "all", second.offset).text == ""
    assert monitor.read_log(file, "warnings").text == "UserWarning: look\nRuntimeError: boom\n"
    assert monitor.read_log(file, "errors").text == "RuntimeError: boom\n"


def test_a_log_that_was_replaced_or_grew_beyond_what_is_shown_is_read_anew(tmp_path: Path):
    file = tmp_path / "stderr.log"
    file.write_text("a long first line\n")
    offset = monitor.read_log(file, "all").offset
    file.write_text("new\n")
    assert monitor.read_log(file, "all", offset) == monitor.LogPart("new\n", "", 4, is_fresh=True)
    file.write_text("new\n" + "x" * monitor.LOG_BYTES + "\nend\n")
    assert monitor.read_log(file, "all", 4) == monitor.LogPart("end\n", "", file.stat().st_size, is_fresh=True)


def test_a_run_has_run_for_its_time_without_the_pause_before_it_was_resumed(run: RunDir, living):
    times = [("starting", 100.0), ("training", 160.0), ("stopped", 200.0), ("starting", 9000.0), ("training", 9010.0)]
    write(run, *(StatusEvent(state=state, time=at) for state, at in times))
    view = Follower(run).view()
    assert (view.duration_s, view.last_event_s) == (110.0, 9010.0)


@pytest.mark.parametrize("end", [StatusEvent(state="finished", time=400.0), ErrorEvent(message="killed", time=400.0)])
def test_what_is_written_after_the_end_takes_no_time_of_the_run(run: RunDir, living, end: AnyEvent):
    during = ExportEvent(what="adapter", path="a.safetensors", format="peft", step=9, dtype="fp32", time=390.0)
    later = ExportEvent(what="merged", path="merged", format="diffusers", step=9, dtype="fp32", time=90_000.0)
    write(
        run, StatusEvent(state="starting", time=100.0), StatusEvent(state="exporting", time=300.0), during, end, later
    )
    view = Follower(run).view()
    assert (view.duration_s, view.last_event_s) == (300.0, 400.0)
    write(run, StatusEvent(state="starting", time=100_000.0), StatusEvent(state="training", time=100_050.0))
    assert Follower(run).view().duration_s == 350.0


def test_an_export_of_a_run_that_was_killed_takes_no_time_of_it(run: RunDir, living):
    export = ExportEvent(what="adapter", path="a.safetensors", format="peft", step=9, dtype="fp32", time=90_000.0)
    write(run, StatusEvent(state="starting", time=100.0), StatusEvent(state="training", time=160.0), export)
    assert (Follower(run).view().duration_s, Follower(run).view().last_event_s) == (60.0, 160.0)


def test_the_logs_are_those_of_the_latest_start(run: RunDir):
    for number in (1, 2, 10):
        (run.logs / f"launch-{number}.log").touch()
        for rank in (0, 1):
            folder = run.logs / f"one-{number}_x" / "attempt_0" / str(rank)
            folder.mkdir(parents=True)
    files = monitor.log_files(run)
    assert list(files) == ["torchrun", "rank 0", "rank 0, output", "rank 1", "rank 1, output"]
    assert files["torchrun"].name == "launch-10.log"


def test_a_full_disk_is_not_called_a_file_that_cannot_be_read(tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        with open(tmp_path / "a", "wb", buffering=0) as stream, pytest.raises(OSError, match="too large") as full:
            assert stream.write(bytes(11)) == 10
            stream.write(b"1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert monitor.explained(full.value) == "a file: cannot be written (File too large); free some space"


def write_loads(run: RunDir, node: int, *loads: Load) -> None:
    with EventWriter(run.machine_file(node)) as writer:
        for load in loads:
            writer.write(load)


@pytest.mark.usefixtures("living")
def test_what_the_machines_did_is_drawn_over_the_steps_of_that_time(run: RunDir):
    follower = Follower(run)
    write(run, StatusEvent(state="training"), *(step_event(number, time=1000.0 + 60 * number) for number in (1, 2, 3)))
    assert "GPU load" not in follower.charts() and "Host memory" not in follower.charts()
    before = follower.view().curves
    hot = GpuLoad(0, 97.0, 88.0, 299.0, 300.0, 1400.0, ("heat",))
    unknown = GpuLoad(1, 50.0)
    times = (1000.0, 1070.0, 1130.0, 1150.0)  # before the first step, in the first, and two in the second
    write_loads(run, 0, *(Load(2**30 * at, 2**34, (hot, unknown), time) for at, time in enumerate(times)))
    assert follower.view().curves != before
    machine = [chart for chart in follower.charts() if chart not in CHARTS]
    assert machine == ["GPU load", "GPU temperature", "GPU power", "GPU clock", "Host memory"]
    drawn = {chart: [(line.label, line.points) for line in follower.lines(chart)] for chart in machine}
    assert drawn["GPU load"] == [("GPU 0", [(1, 97.0), (2, 97.0)]), ("GPU 1", [(1, 50.0), (2, 50.0)])]
    assert drawn["GPU power"] == [("GPU 0", [(1, 299.0), (2, 299.0)])]  # the other one does not report it
    assert drawn["Host memory"] == [("in use", [(1, 1.0), (2, 3.0)])]
    assert follower.lines("Host memory")[0].minutes == pytest.approx([10 / 60, 90 / 60])
    assert follower.view().slow == (
        "GPU 0 is slowed down by its temperature (88 °C): improve its cooling, or lower its power limit.",
    )
    write_loads(run, 1, Load(2**30, 2**34, (unknown,), 1130.0))
    assert [line.label for line in follower.lines("GPU load")] == ["node 0 GPU 0", "node 0 GPU 1", "node 1 GPU 1"]
    assert follower.view().slow[0].startswith("node 0: GPU 0 is slowed down")
    write(run, StatusEvent(state="finished", step=3))
    assert follower.view().slow == ()


@pytest.mark.usefixtures("living")
def test_a_load_that_no_machine_has_is_left_out_and_said(run: RunDir):
    write(run, StatusEvent(state="training"), step_event(1, time=1000.0))
    good = '{"host_used": 1, "host_total": 2, "gpus": [], "time": 1001.0}'
    wrong = (
        good.replace("1001.0", "1e999"),
        good.replace("[]", '[{"index": 0, "busy": 1e300}]'),
        good.replace("[]", str([{"index": 0}] * 65).replace("'", '"')),
        good.replace(": 1,", ": -1,"),
    )
    run.machine_file(0).write_text("\n".join((*wrong, good, "")))
    follower = Follower(run)
    assert follower.view().problems == (
        f"{run.machine_file(0)}: 4 lines are damaged or of a later version, and are left out; remove them",
    )
    assert [line.points for line in follower.lines("Host memory")] == [[(1, 1 / 2**30)]]
