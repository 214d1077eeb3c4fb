"""What a notebook does with runs, captions and plans, and the dashboard that follows a run, without a browser."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from markupsafe import Markup
from PIL import Image
from safetensors.torch import save_file

from app import notebook
from app.notebook import dashboard_widget, panels
from app.notebook.dashboard_widget import Dashboard
from app.runs.monitor import Follower
from tests.app.browser import recorded
from tests.captioning.models import write_qwen2_5_vl
from tests.runs import awaited, make_pictures, run_config, step_event, write, write_preset
from trainer.config.load import ConfigError
from trainer.plan.simulate.phases import memory_kind
from trainer.run import process
from trainer.run.events import (
    ErrorEvent,
    ExportEvent,
    SampleEvent,
    StatusEvent,
    WarningEvent,
)
from trainer.run.folder import RunDir
from trainer.run.manifest import Wanted
from trainer.system import gpus
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu, support
from trainer.system.gpus.support import Build
from trainer.view.colors import MEMORY_KINDS

PATIENCE_S = 20
PICTURE_BYTES = 120_000
SHOUT = "<script>alert(1)</script>"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def run(runs: Path) -> RunDir:
    """A run that was never started."""
    return RunDir.create(runs, run_config(runs, train__steps=100), runs / "one")


def test_a_notebook_loads_neither_torch_nor_the_page():
    program = "import sys, app.notebook; sys.exit(str({'torch', 'gradio', 'diffusers'} & set(sys.modules) or ''))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert told.stderr.strip() == ""


def test_a_config_is_a_preset_by_name_or_a_file_with_overrides(tmp_path: Path):
    assert notebook.config("quickstart", "train.steps=40").config.train.steps == 40
    assert notebook.config(notebook.preset_file("quickstart")).config.name == "quickstart"
    own = write_preset(tmp_path / "own.yaml", make_pictures(tmp_path / "pictures", count=2), steps=7)
    assert notebook.config(own).config.train.steps == 7
    assert notebook.config(str(own), "train.steps=8").config.train.steps == 8


def test_a_config_that_is_wrong_says_everything_at_once(tmp_path: Path):
    with pytest.raises(InputError, match="no preset 'quikstart'; did you mean 'quickstart'"):
        notebook.config("quikstart")
    with pytest.raises(InputError, match="no preset 'zzz'; there are quickstart, "):
        notebook.config("zzz")
    with pytest.raises(ConfigError, match="no such file"):
        notebook.config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError) as wrong:
        notebook.config("quickstart", "adapter.rnk=3", "optim.lr=fast")
    assert [problem.field for problem in wrong.value.problems] == ["adapter.rnk", "optim.lr"]


def test_a_run_is_attached_to_by_name_by_folder_or_as_the_latest(runs: Path, tmp_path: Path):
    with pytest.raises(InputError, match="no run was started here"):
        notebook.attach(runs=runs)
    one, other = (RunDir.create(runs, run_config(tmp_path), runs / name) for name in ("one", "other"))
    time.sleep(0.01)
    (one.logs / "launch-1.log").touch()
    assert notebook.attach("other", runs) == notebook.attach(other.path) == notebook.attach(str(other.path)) == other
    assert notebook.attach(runs=runs) == one
    with pytest.raises(InputError, match="gone: not a run folder"):
        notebook.attach("gone", runs)


def test_a_wrong_run_writes_nothing(runs: Path, tmp_path: Path):
    preset = write_preset(tmp_path / "own.yaml", make_pictures(tmp_path / "pictures", count=2))
    with pytest.raises(ConfigError, match="no folder '/none'"):
        notebook.start(notebook.config(preset, "data.path=/none"), runs)
    assert not runs.exists()


def test_waiting_for_a_run_that_failed_raises_what_went_wrong(run: RunDir):
    write(run, ErrorEvent(step=3, rank=1, message="boom", remedy="rest"), StatusEvent(state="failed", step=3))
    with pytest.raises(RuntimeError, match="error: rank 1, step 3: boom\n  what to do: rest"):
        awaited(notebook.ended(run))


def test_an_ended_run_is_continued_with_other_fields(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = []
    monkeypatch.setattr("trainer.launcher.torchrun.start", lambda config, run: started.append(config.train.steps))
    run = RunDir.create(runs, run_config(make_pictures(tmp_path / "pictures")), runs / "one")
    assert notebook.resume(run, "train.steps=9") == run
    assert started == [9]


def test_an_export_is_awaited_and_one_that_fails_says_why(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    codes = [0, 2]
    begun = []

    def begin(run: RunDir, cfg: Any, wanted: Wanted) -> subprocess.Popen[bytes]:
        begun.append((cfg.export.what, cfg.export.format, wanted))
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({codes.pop(0)})"])

    monkeypatch.setattr("trainer.launcher.commands.begin_export", begin)
    write(run, ExportEvent(path="export/merged", what="merged", format="auto"))
    (run.logs / "export-answer.txt").write_text("no checkpoint yet\n")
    assert awaited(notebook.export(run, "merged")) == run.path / "export" / "merged"
    with pytest.raises(InputError, match="no checkpoint yet"):
        awaited(notebook.export(run, "adapter", step="best"))
    assert begun == [("merged", "auto", "newest"), ("adapter", "auto", "best")]
    with pytest.raises(InputError, match=r"export\.format: single_file"):
        awaited(notebook.export(run, "adapter", format="single_file"))


class Shown:
    """What a cell shows, as the notebook would keep it: the first is the live widget, the second what stays."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def display(self, output: Any, raw: bool = False, display_id: bool = False) -> Handle:
        self.outputs.append(output)
        return Handle(self, len(self.outputs) - 1)


class Handle:
    def __init__(self, shown: Shown, place: int) -> None:
        self.shown, self.place = shown, place

    def update(self, output: Any, raw: bool) -> None:
        self.shown.outputs[self.place] = output


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    monkeypatch.setattr(dashboard_widget, "display", shown.display)
    monkeypatch.setattr(dashboard_widget, "POLL_S", 0.02)
    return shown


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_dashboard_of_an_ended_run_is_a_picture_at_once(runs: Path, shown: Shown):
    Dashboard(recorded(runs, "one"), "one")._ipython_display_()
    [picture] = shown.outputs
    page = picture["text/html"]
    assert "Finished after 40 steps" in page
    assert picture["text/plain"] == "Run one: Finished after 40 steps"
    assert (page.count("<svg"), page.count('data-rank="'), page.count("data:image/webp;base64,")) == (1, 2, 4)
    newer, older = page.index("<h3>Step 40</h3>"), page.index("<h3>Step 20</h3>")  # a row for each
    assert newer < page.index("<figcaption>a cat</figcaption>") < older
    assert " id=" not in page, "several stand in one notebook"


def test_the_picture_of_ten_thousand_steps_and_eight_samples_is_small(run: RunDir, shown: Shown):
    write(run, *(step_event(number, random.random()) for number in range(1, 10_001)))
    for index in range(9):
        file = run.samples / f"{index}.png"
        Image.frombytes("RGB", (96, 96), random.randbytes(96 * 96 * 3)).save(file)  # nothing compresses worse
        write(run, SampleEvent(step=10_000, prompt="a cat", index=index, path=f"samples/{index}.png"))
    write(run, StatusEvent(state="finished", step=10_000))
    Dashboard(run, "one")._ipython_display_()
    page = shown.outputs[0]["text/html"]
    assert page.count("<img") == 8
    assert len(page.encode()) <= PICTURE_BYTES


def test_a_dashboard_follows_the_run_and_leaves_a_picture_when_it_ends(run: RunDir, shown: Shown, living: set[str]):
    write(run, StatusEvent(state="encoding", done=3, total=8))
    board = Dashboard(run, "one")
    board._ipython_display_()
    [live, kept] = shown.outputs
    assert live["text/plain"].startswith("Widgets are not shown here. Run this cell in JupyterLab")
    assert live["application/vnd.jupyter.widget-view+json"]["model_id"] == board.widget.model_id
    assert "notebook.dashboard(notebook.attach('one'))" in kept["text/plain"]
    assert "Encoding 3 of 8" in board.status.value
    assert not any(button.disabled for button in board.buttons.values())
    sent: list[str] = []
    board.loss.observe(lambda change: sent.append(change.new), "value")
    write(run, StatusEvent(state="training"), step_event(1), step_event(2))
    until(lambda: "step 2 of 100" in board.status.value)
    until(lambda: bool(sent))
    time.sleep(0.1)
    assert len(sent) == 1, "what has not changed is not sent again"
    assert shown.outputs == [live, kept], "what stays in the notebook is not changed meanwhile"
    write(run, step_event(3), StatusEvent(state="finished", step=3))
    living.clear()
    until(lambda: shown.outputs[1] is not kept)
    until(lambda: shown.outputs[0] is not live)
    assert shown.outputs[0] == {"text/html": ""}
    assert "Finished after 3 steps" in shown.outputs[1]["text/html"]
    assert all(button.disabled for button in board.buttons.values())


def test_a_dashboard_is_shown_as_often_as_one_likes(run: RunDir, shown: Shown, living: set[str]):
    board = Dashboard(run, "one")
    write(run, StatusEvent(state="training"))
    for _ in range(2):
        board._ipython_display_()
    assert len(shown.outputs) == 4
    write(run, StatusEvent(state="stopped"))
    living.clear()
    until(lambda: not any("Widgets are not shown" in output.get("text/plain", "") for output in shown.outputs))
    board._ipython_display_()
    assert shown.outputs[4] == shown.outputs[3] == shown.outputs[1]


def test_the_last_words_of_a_run_are_in_its_picture(run: RunDir, shown: Shown, monkeypatch: pytest.MonkeyPatch):
    """They may be written between what was read and the look at the process."""

    def gone(run: RunDir) -> bool:
        if not Path(run.path / "said").exists():
            (run.path / "said").touch()
            write(run, WarningEvent(message="the last word"))
        return False

    monkeypatch.setattr("trainer.run.process.alive", gone)
    write(run, StatusEvent(state="stopped"))
    Dashboard(run, "one")._ipython_display_()
    assert "the last word" in shown.outputs[0]["text/html"]


def test_what_keeps_a_dashboard_from_reading_is_shown_until_it_reads_again(
    run: RunDir, shown: Shown, living: set[str], monkeypatch: pytest.MonkeyPatch
):
    write(run, StatusEvent(state="training"))
    board = Dashboard(run, "one")
    board._ipython_display_()
    with monkeypatch.context() as patched:
        patched.setattr(Follower, "view", lambda self: (_ for _ in ()).throw(OSError("no such disk")))
        until(lambda: "no such disk" in board.problem.value)
    until(lambda: board.problem.value == "")
    write(run, step_event(5))
    until(lambda: "step 5 of 100" in board.status.value)


def test_a_button_asks_the_trainer_and_says_what_follows(run: RunDir, shown: Shown, living: set[str]):
    write(run, StatusEvent(state="training"))
    board = Dashboard(run, "one")
    board._ipython_display_()
    for what, button in board.buttons.items():
        button.click()
        assert run.requested(what)
        assert panels.CONFIRMATIONS[what] in board.message.value
    living.clear()
    board.buttons["stop"].click()
    assert "is not running" in board.message.value


def test_what_a_run_says_cannot_become_a_script(runs: Path, shown: Shown):
    error = ErrorEvent(message=SHOUT, remedy=SHOUT, log=SHOUT)
    end = [WarningEvent(message=SHOUT), error, StatusEvent(state="failed")]
    run = recorded(runs, "one", end, sample__prompts=[SHOUT])
    Dashboard(run, SHOUT)._ipython_display_()
    page = shown.outputs[0]["text/html"]
    assert page.count("&lt;script&gt;") >= 6
    assert "<script" not in page


@pytest.mark.slow
def test_a_comparison_whose_cell_is_interrupted_trains_no_longer(runs: Path, tmp_path: Path):
    preset = write_preset(tmp_path / "own.yaml", make_pictures(tmp_path / "pictures", count=2), steps=5000)
    compared = notebook.compare(notebook.config(preset), {"as it is": (), "again": ()}, runs)
    with pytest.raises(TimeoutError):
        awaited(compared, timeout_s=12)
    run = notebook.attach(runs=runs)
    assert not process.alive(run)
    assert Follower(run).view().state == "stopped"


def test_a_plan_shows_what_each_gpu_holds_and_what_would_make_it_fit():
    config = notebook.config("flux2-dev-lora-4gpu")
    found = notebook.plan(config, "2x24gb")
    assert found.plan.ranks == 2
    shown = found._repr_html_()
    assert 'data-verdict="does not fit"' in shown
    assert "<li>fits with parallel.cpu_offload=true: " in shown
    assert "fits with" not in notebook.plan(config, "8x80gb")._repr_html_()


def test_a_plan_names_weights_in_a_form_that_is_not_read(tmp_path: Path):
    save_file({"a.SCB": torch.ones(1)}, file := tmp_path / "model.safetensors")
    config = notebook.config("flux2-dev-lora-4gpu", f"model.path={file}", f"model.base={tmp_path}")
    with pytest.raises(InputError, match=r"model\.safetensors: 'a\.SCB' is stored as bitsandbytes' int8, which is not"):
        notebook.plan(config, "2x24gb")


def test_what_fits_is_shown_fastest_first_and_can_be_started():
    config = notebook.config("flux2-dev-lora-4gpu", "train.steps=100")
    found = notebook.fit(config, "4x24gb", price=0.5)
    seconds = [proposal.seconds for proposal in found.proposals]
    assert seconds == sorted(seconds)
    assert f"1  {seconds[0]:.3g} s per step, " in repr(found)
    assert f" for {found.proposals[0].price(100, 0.5):.2f}\n" in repr(found)
    assert Markup("<pre>{}</pre>").format(repr(found)) in found._repr_html_()
    chosen = found.config.config
    assert (chosen.quantize.format, chosen.train.steps) == ("int8", 100)
    assert notebook.plan(found.config, "4x24gb").plan.verdict == "fits"
    with pytest.raises(InputError, match="would fit with"):
        _ = notebook.fit(config, "1x12gb", keep=["resolution", "format", "cpu_offload", "rank"]).config


@pytest.mark.parametrize("price", [-3.0, math.nan, math.inf])
def test_a_negative_or_infinite_price_or_nan_is_refused(price: float):
    config = notebook.config("flux2-dev-lora-4gpu")
    with pytest.raises(InputError) as caught:
        notebook.fit(config, "4x24gb", price=price)
    assert str(caught.value) == f"price: {price:g} is not the price of a GPU-hour; give a number of 0 or more"


def test_a_word_is_not_read_as_the_names_of_fields_to_keep():
    with pytest.raises(InputError) as caught:
        notebook.fit(notebook.config("flux2-dev-lora-4gpu"), "4x24gb", keep="resolution,rank")
    assert str(caught.value) == (
        "keep: 'resolution,rank' is one text; give a list of fields, for example keep=['resolution', 'rank']"
    )


def test_a_part_of_the_memory_has_the_same_colour_in_every_plan():
    colors: dict[str, set[str]] = {}
    for preset, machine in (("flux2-dev-lora-4gpu", "8x80gb"), ("qwen3-8b-qlora-1x24gb", "1x24gb")):
        page = notebook.plan(notebook.config(preset), machine)._repr_html_()
        for color, part in re.findall(r'<li title="[^"]*"><i style="background:var\(--(\w+)\)"></i>([a-z ]+) ', page):
            colors.setdefault(part, set()).add(color)
    assert colors == {part: {memory_kind(part)} for part in colors}
    assert {"weights", "activations", "reserve"} <= set(colors)
    assert set.union(*colors.values()) <= set(MEMORY_KINDS)


def test_a_sample_whose_file_is_gone_is_a_small_mark(runs: Path, shown: Shown):
    run = recorded(runs, "one")
    for file in run.samples.glob("*.png"):
        file.unlink()
    Dashboard(run, "one")._ipython_display_()
    page = shown.outputs[0]["text/html"]
    assert page.count(">missing</span>") == 4


def test_references_are_shown_with_their_samples(runs: Path, shown: Shown):
    run = recorded(runs, "one")
    Image.new("RGB", (200, 100), "red").save(run.samples / "reference-fox.png")
    Image.new("RGB", (64, 64), "blue").save(run.samples / "edited.png")
    references = ("samples/reference-fox.png", "../outside.png")
    write(run, SampleEvent(step=99, prompt="a fox", path="samples/edited.png", index=0, references=references))
    Dashboard(run, "one")._ipython_display_()
    page = shown.outputs[0]["text/html"]
    assert page.count('alt="reference"') == 1


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
    write(run, StatusEvent(state="training"), step_event(1), step_event(2), step_event(3))
    assert awaited(notebook.reached(run, 2)) == 3
    write(run, StatusEvent(state="finished", step=3))
    assert awaited(notebook.reached(run, 10)) == 3


def test_a_run_that_waits_for_no_other_node_cannot_be_joined(run):
    with pytest.raises(InputError, match="is a single-node run"):
        notebook.join(run)


@pytest.mark.slow
def test_a_cell_captions_a_folder_and_takes_all_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_qwen2_5_vl(tmp_path / "model")
    folder = make_pictures(tmp_path / "images", 3)
    for name in ("00.txt", "02.txt"):
        (folder / name).unlink()

    def captioned() -> str:
        done = notebook.caption(folder, model, tmp_path / "runs", device="cpu", trigger=True, precision="fp32")
        return repr(awaited(done))

    table = captioned()
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["00.png", "02.png"]
    assert (folder / "00.txt").read_text(encoding="utf-8").startswith("[trigger], ")
    assert (folder / "01.txt").read_text(encoding="utf-8") == "picture number 1"
    assert "1/2  00.png" in capsys.readouterr().out
    assert captioned().splitlines()[2:] == []
    assert notebook.undo_captions(folder, tmp_path / "runs") == 2
    assert sorted(file.name for file in folder.glob("*.txt")) == ["01.txt"]


def test_what_cannot_be_asked_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path / "images", 1)
    with pytest.raises(InputError, match="style"):
        awaited(notebook.caption(folder, tmp_path, tmp_path / "runs", style="poem"))
    with pytest.raises(InputError, match=r"no config\.json"):
        awaited(notebook.caption(folder, tmp_path, tmp_path / "runs"))
    with pytest.raises(InputError, match="no captioning job of this folder"):
        notebook.undo_captions(folder, tmp_path / "runs")
