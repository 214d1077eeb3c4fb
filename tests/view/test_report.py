"""The report is one file with everything in it, whatever the run went through."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trainer.config.schema import RunConfig
from trainer.config.sections import DataConfig, LoraAdapter, ModelConfig, ParallelConfig
from trainer.run.events import (
    ErrorEvent,
    EventWriter,
    ExportEvent,
    RankLine,
    SampleEvent,
    StatusEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
)
from trainer.run.folder import RunDir
from trainer.view import svg
from trainer.view.chart import Chart, Line, thin
from trainer.view.colors import LINES, MEMORY_KINDS, TOKENS
from trainer.view.report import write_report

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c6360f8cf000001010100"
    "1a36e1c50000000049454e44ae426082"
)
PROMPT = "a <script>alert(1)</script> fox"


def step_event(step: int, loss: float = 0.5) -> StepEvent:
    return StepEvent(
        step=step,
        time=1000.0 + step,
        loss=loss,
        lr=1e-4,
        grad_norm=2.0,
        seconds=1.0,
        seconds_data=0.1,
        seconds_forward=0.3,
        seconds_backward=0.4,
        seconds_optimizer=0.1,
        seconds_communication=0.1,
        images_per_second=4.0,
    )


@pytest.fixture
def run(tmp_path) -> RunDir:
    cfg = RunConfig(
        name="fox",
        model=ModelConfig(family="flux2"),
        data=DataConfig(path=str(tmp_path)),
        parallel=ParallelConfig(devices=2),
    )
    return RunDir.create(tmp_path, cfg, at=tmp_path / "fox")


def record(run: RunDir, *events) -> None:
    with EventWriter(run.events_file) as writer:
        for event in events:
            writer.write(event)


def page(run: RunDir, *add_remedy: Callable[[RunDir, ErrorEvent], ErrorEvent]) -> ElementTree.Element:
    """The report, parsed: it is well-formed but for the void tags of HTML."""
    text = write_report(run, *add_remedy).read_text(encoding="utf-8").removeprefix("<!doctype html>")
    for void in ("meta", "img", "br"):
        pieces = text.split(f"<{void}")
        text = f"<{void}".join([pieces[0], *(piece.replace(">", "/>", 1) for piece in pieces[1:])])
    return ElementTree.fromstring(text)


def text_of(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


@pytest.mark.parametrize("damage", [Path.mkdir, os.mkfifo, lambda file: file.symlink_to(file)], ids=["d", "p", "l"])
def test_a_rank_s_file_that_cannot_be_read_is_named_in_the_report(run, damage):
    record(run, StatusEvent(time=1000.0, state="starting"), step_event(1), step_event(2))
    damage(run.rank_file(0))
    with EventWriter(run.rank_file(1)) as writer:
        writer.write(
            RankLine(rank=1, step=1, phase="training", allocated=2**30, reserved=2**30, peak=2**30, limit=2**31)
        )
    said = text_of(page(run))
    assert f"{run.rank_file(0)}: not a regular file; remove it, or put a file in its place" in said
    assert "Memory allocated" in said


def facts_of(report: ElementTree.Element) -> dict[str, str]:
    return {text_of(row[0]): text_of(row[1]) for row in report.find(".//dl[@class='facts']")}


def test_the_report_of_a_run_shows_its_facts_curves_samples_and_config(run):
    (run.samples / "1.png").write_bytes(PIXEL)
    (run.export / "fox.safetensors").write_bytes(bytes(1_234_567))
    exported = ExportEvent(step=10, time=1050.0, path="export/fox.safetensors", what="adapter", format="auto")
    record(
        run,
        StatusEvent(time=1000.0, state="starting"),
        *(step_event(step) for step in range(1, 11)),
        ValidationEvent(step=10, time=1010.0, loss=0.25),
        SampleEvent(step=10, time=1010.0, prompt=PROMPT, index=0, path="samples/1.png"),
        exported,
        StatusEvent(step=10, time=1165.0, state="finished"),
    )
    with EventWriter(run.rank_file(1)) as writer:
        line = RankLine(rank=1, step=10, phase="training", allocated=2**30, reserved=2**31, peak=2**31, limit=2**34)
        writer.write(line)
    report = page(run)
    facts = facts_of(report)
    assert facts.pop("Started").startswith("1970-01-01")
    assert facts == {
        "State": "finished",
        "Steps": "10 of 1,000",
        "Duration": "2 min 45 s",
        "Loss, smoothed": "0.5",
        "Lowest validation loss": "0.25 at step 10",
        "Images per second": "4",
        "Exported": "export/fox.safetensors, 1.2 MB",
    }
    titles = [text_of(title) for title in report.iterfind(".//svg/title")]
    assert titles == [
        "Loss by step. Last: each step 0.5, smoothed 0.5, validation 0.25",
        "Learning rate by step. Last: learning rate 0.0001",
        "Gradient norm by step. Last: before clipping 2, smoothed 2",
        "Seconds per step by step. Last: whole step 1, smoothed 1, data 0.1, forward 0.3, backward 0.4, optimizer 0.1, "
        "other 0.1, waiting for other ranks 0.1",
        "Memory allocated by step. Last: rank 1 1",
    ]
    said = " ".join(text_of(report.find(".//div[@class='split']")).split())
    assert said == (
        "data 0.10 s forward 0.30 s backward 0.40 s optimizer 0.10 s other 0.10 s "
        "of which waiting for other ranks 0.10 s"
    )
    [picture] = report.iterfind(".//img")
    assert picture.get("src").startswith("data:image/png;base64,iVBORw0KGgo")
    assert picture.get("alt") == f"{PROMPT}, step 10"
    order = [
        element.get("class") for element in report.iter() if element.get("class") in ("facts", "samples", "charts")
    ]
    assert order == ["facts", "samples", "charts"], "samples are above the charts"


def test_the_head_of_the_report_names_model_method_and_data(tmp_path):
    images = tmp_path / "foxes"
    images.mkdir()
    for name in ("a.png", "b.JPG", "a.txt"):
        (images / name).write_bytes(PIXEL)
    data = DataConfig(path=str(images), trigger="fxx")
    cfg = RunConfig(name="fox", model=ModelConfig(family="flux2", path="demo"), data=data, adapter=LoraAdapter(rank=8))
    head = page(RunDir.create(tmp_path, cfg, at=tmp_path / "fox")).find(".//header/p")
    assert text_of(head) == "Demo model · LoRA rank 8 · 2 images of foxes, trigger fxx · 1 rank"


def test_the_report_opens_with_what_differs_from_the_defaults_and_folds_the_rest(run):
    report = page(run)
    rows = {text_of(row[0]): text_of(row[1]) for row in report.find(".//table[@class='config']")}
    assert rows == {
        "Method adapter.type": "LoRA",
        "Folder data.path": str(run.path.parent),
        "Model family model.family": "flux2",
        "Name name": "fox",
        "GPUs per machine (ranks) parallel.devices": "2",
    }
    folded = report.find(".//details")
    assert folded.get("open") is None
    assert folded.find("pre").text == run.config_file.read_text()


def test_a_sample_or_export_whose_file_is_gone_is_marked_as_missing(run):
    exported = ExportEvent(path="export/gone.safetensors", what="adapter", format="auto")
    record(run, exported, SampleEvent(step=1, prompt="a fox", index=0, path="samples/gone.png"))
    report = page(run)
    mark = report.find(".//span[@class='missing']")
    assert (text_of(mark), mark.get("title")) == ("missing", "samples/gone.png")
    assert facts_of(report)["Exported"] == "export/gone.safetensors, missing"
    assert "Errno" not in text_of(report)


def test_the_report_asks_no_server_and_runs_no_script(run):
    record(run, SampleEvent(prompt=PROMPT, index=0, path="samples/none.png"), WarningEvent(message=PROMPT))
    report = page(run)
    assert {element.tag for element in report.iter()}.isdisjoint({"script", "link", "iframe", "object"})
    assert not [value for element in report.iter() for value in element.attrib.values() if "://" in value]
    assert "url(" not in report.find(".//style").text
    assert text_of(report.find(".//p[@class='warning']")) == f"Warning, step 0: {PROMPT}"


def test_a_failed_run_says_why_in_its_report(run):
    error = ErrorEvent(step=7, rank=1, message="RuntimeError: <boom>", remedy="rest")
    record(run, error, StatusEvent(state="failed"))
    assert text_of(page(run).find(".//p[@class='error']")) == "Error, rank 1, step 7: RuntimeError: <boom>rest"


def test_the_report_adds_the_remedy_of_the_error_that_ended_the_run_and_of_no_earlier_one(run):
    def add_remedy(run, error):
        return replace(error, remedy=f"{error.remedy}; sleep")

    retried = ErrorEvent(step=3, message="out of memory", remedy="rest")
    record(run, retried, StatusEvent(state="starting"), ErrorEvent(step=7, message="out of memory", remedy="rest"))
    record(run, StatusEvent(state="failed"))
    shown = [(error.text, error.find("br").tail) for error in page(run, add_remedy).findall(".//p[@class='error']")]
    assert shown == [("Error, step 3: out of memory", "rest"), ("Error, step 7: out of memory", "rest; sleep")]
    record(run, StatusEvent(state="starting"), StatusEvent(state="finished"))
    assert "sleep" not in text_of(page(run, add_remedy))


def test_a_start_that_failed_without_a_word_has_not_the_remedy_of_the_start_before(run):
    record(run, ErrorEvent(step=3, message="out of memory", remedy="rest"), StatusEvent(state="failed"))
    record(run, StatusEvent(state="starting"), StatusEvent(state="failed"))
    report = page(run, lambda run, error: replace(error, remedy="sleep"))
    assert [error.find("br").tail for error in report.findall(".//p[@class='error']")] == ["rest"]


def test_a_run_that_never_started_has_a_report_without_charts(run):
    report = page(run)
    assert report.find(".//svg") is None
    assert facts_of(report)["State"] == "created"


def test_pauses_between_two_starts_do_not_count_as_duration(run):
    record(
        run,
        StatusEvent(time=100.0, state="starting"),
        StatusEvent(time=160.0, state="stopped"),
        StatusEvent(time=9000.0, state="starting"),
        StatusEvent(time=9060.0, state="finished"),
    )
    record(run, ExportEvent(time=99_000.0, what="merged", path="export/merged", format="diffusers", step=0))
    assert facts_of(page(run))["Duration"] == "2 min"


def test_samples_are_a_matrix_of_prompts_and_at_most_eight_steps(run):
    for step in range(0, 200, 10):
        for index in range(2):
            (run.samples / f"{step}-{index}.png").write_bytes(PIXEL)
            record(
                run, SampleEvent(step=step, prompt=f"prompt {index}", index=index, path=f"samples/{step}-{index}.png")
            )
    report = page(run)
    columns = [text_of(head) for head in report.iterfind(".//th[@scope='col']")]
    assert columns == [f"step {step}" for step in (0, 30, 50, 80, 110, 140, 160, 190)]
    assert [picture.get("alt") for picture in report.iterfind(".//img")] == [
        f"prompt {index}, {step}" for index in range(2) for step in columns
    ]


def test_references_of_a_prompt_are_shown_at_its_samples_and_nothing_from_outside_the_run(run, tmp_path):
    (tmp_path / "private.png").write_bytes(PIXEL)
    (run.samples / "reference-fox.png").write_bytes(PIXEL)
    (run.samples / "0.png").write_bytes(PIXEL)
    references = ("samples/reference-fox.png", "samples/gone.png", str(tmp_path / "private.png"), "../private.png")
    record(run, SampleEvent(step=0, prompt="a fox", index=0, path="samples/0.png", references=references))
    (row,) = page(run).iterfind(".//table[@class='samples']/tr/th[@scope='row']")
    assert [image.get("alt") for image in row.iterfind(".//img")] == ["reference"]
    names = ["reference", "reference gone.png", "reference private.png", "reference private.png"]
    assert [text_of(one) for one in row.iterfind(".//figcaption")] == names


def test_a_prompt_that_was_changed_has_a_row_of_its_own(run):
    for step, prompt in ((0, "old"), (10, "old"), (20, "new")):
        (run.samples / f"{step}.png").write_bytes(PIXEL)
        record(run, SampleEvent(step=step, prompt=prompt, index=0, path=f"samples/{step}.png"))
    report = page(run)
    rows = [text_of(head) for head in report.iterfind(".//table/tr/th[@scope='row']")]
    assert [row for row in rows if row in ("old", "new")] == ["old", "new"]
    assert [picture.get("alt") for picture in report.iterfind(".//img")] == [
        "old, step 0",
        "old, step 10",
        "new, step 20",
    ]


def test_a_long_line_keeps_its_spike_in_at_most_600_points():
    points = [(step, 1.0) for step in range(100_000)]
    points[77_777] = (77_777, 9.0)
    thinned = thin(points)
    assert len(thinned) <= 600
    assert (77_777, 9.0) in thinned
    assert thinned == sorted(thinned)


def drawn(title: str, lines: list[Line], unit: str = "") -> ElementTree.Element:
    return ElementTree.fromstring(svg.draw(Chart(title, lines, unit)))


def paths(figure: ElementTree.Element) -> dict[str, str]:
    """{class: d} of the lines, without the grid."""
    return {path.get("class"): path.get("d") for path in figure.iterfind(".//path") if path.get("class") != "grid"}


def test_a_chart_scales_its_points_between_the_axes_and_leaves_a_gap_at_nan():
    figure = drawn("Loss", [Line("loss", [(0, 0.0), (50, 1.0), (75, math.nan), (100, 0.5)])])
    assert paths(figure) == {"c0 line": "M80.0 194.0h0L354.0 20.7M628.0 107.3h0"}


def test_a_constant_value_is_drawn_above_zero_with_labels_that_fit_before_the_axis():
    figure = drawn("Learning rate", [Line("lr", [(3, 1e-4)])])
    assert paths(figure) == {"c0 line": "M80.0 20.7h0"}
    labels = [text_of(text) for text in figure.iterfind(".//svg/text[@x='72.0']")]
    assert labels[0] == "0" and labels[-1] == "0.0001" and max(map(len, labels)) <= 6


def test_a_noisy_line_is_drawn_faintly_under_its_smoothed_mean_and_a_spike_does_not_flatten_it():
    points = [(step, float(step % 2)) for step in range(1, 201)]
    points[99] = (100, 1e6)
    spiked = paths(drawn("Loss", [Line("each step", points, "noisy", 0.0)]))
    assert list(spiked) == ["c0 raw", "c0 smoothed"]
    assert spiked["c0 raw"] == spiked["c0 smoothed"], "a decay of 0 smooths nothing"
    steady = paths(drawn("Loss", [Line("each step", points[:99], "noisy", 0.99)]))
    heights = [float(point.split()[1]) for point in steady["c0 smoothed"].split("L")[60:]]
    assert max(heights) - min(heights) < 5


def test_axes_of_a_chart_have_titles_and_separators_and_no_label_is_cut():
    figure = drawn("Seconds per step", [Line("each", [(0, 1.0), (10_000, 2.0)], "dots")], "seconds")
    texts = {text_of(text): text for text in figure.iterfind(".//svg/text")}
    assert {"step", "seconds", "2,000", "10,000"} <= set(texts)
    assert texts["10,000"].get("text-anchor") == "end"
    assert len(figure.findall(".//circle")) == 2


def test_a_chart_without_a_finite_value_is_left_out():
    assert svg.draw(Chart("Loss", [Line("loss", [(0, math.nan)]), Line("none", [])])) == ""


def test_text_has_contrast_on_all_surfaces_and_bars_can_be_told_apart_from_them():
    for mode in (0, 1):
        for surface in ("--bg", "--panel", "--sunk"):
            for ink in ("--ink", "--ink2", "--ink3", "--acc", "--ok", "--warn", "--bad"):
                assert contrast(TOKENS[ink][mode], TOKENS[surface][mode]) >= 4.5, (ink, surface, mode)
        for color in [*(TOKENS[f"--{kind}"] for kind in MEMORY_KINDS), *LINES]:
            assert contrast(color[mode], TOKENS["--panel"][mode]) >= 3


def contrast(one: str, other: str) -> float:
    """Of WCAG 2, between 1 and 21."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
