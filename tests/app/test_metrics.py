"""What an objective measures besides its loss is shown wherever the loss is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.runs.monitor import CHARTS, Follower
from app.web.pages import run as run_page
from tests.runs import run_config, step_event, write
from trainer.launcher.console import StepSummary, sentence
from trainer.metrics.trackers.feed import Feed, Figures, Position
from trainer.run.events import EventReader, ValidationEvent
from trainer.run.folder import RunDir
from trainer.run.length import RunLength
from trainer.view.report import write_report

HELD_OUT = ValidationEvent(step=2, loss=0.6, metrics={"margins": 0.2, "accuracies": 0.75})


def a_run(folder: Path, *metrics: dict[str, float]) -> RunDir:
    run = RunDir.create(folder / "runs", run_config(folder, train__steps=10), folder / "runs" / "one")
    write(run, *(step_event(number, 0.5, metrics=measured) for number, measured in enumerate(metrics, 1)))
    write(run, *([HELD_OUT] if any(metrics) else []))
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return a_run(tmp_path, {"margins": 0.1, "accuracies": 0.5}, {"margins": 0.3, "accuracies": 1.0})


def test_the_page_has_a_chart_of_each_metric_with_its_validation(run: RunDir) -> None:
    follower = Follower(run)
    each, held_out = follower.lines("Margins")
    assert each.points == [(1, 0.1), (2, 0.3)]
    assert (held_out.points, held_out.look) == ([(2, 0.2)], "dots")
    curves = run_page._curves(follower, follower.view()).make()
    assert curves.keys() == {"Margins", "Accuracies", *CHARTS}
    assert json.loads(curves["Accuracies"])["lines"][0]["values"] == [0.5, 1.0]


def test_a_run_without_metrics_has_no_chart_of_them(tmp_path: Path) -> None:
    follower = Follower(a_run(tmp_path, {}, {}))
    assert run_page._curves(follower, follower.view()).make().keys() == CHARTS.keys()


def test_the_report_has_their_charts_and_last_values(run: RunDir) -> None:
    report = write_report(run).read_text(encoding="utf-8")
    assert "Margins by step. Last: each step 0.3, smoothed 0.2" in report
    assert "<dt>Accuracies, smoothed</dt>" in report


def test_the_terminal_names_them_after_the_loss(run: RunDir) -> None:
    assert sentence(HELD_OUT) == "step 2: validation loss 0.6000, margins 0.2000, accuracies 0.7500"
    summary = StepSummary(RunLength(run.config()))
    for event in EventReader(run.events_file).read():
        summary.add(event)
    assert str(summary).startswith("loss 0.5000, margins 0.2")


def test_trackers_get_them_by_name(run: RunDir) -> None:
    figures = [
        item.values for item in Feed(run, Position(run.path / "place.json")).items() if isinstance(item, Figures)
    ]
    assert [values["accuracies"] for values in figures if "loss" in values] == [0.5, 1.0]
    assert figures[-1] == {"validation_loss": 0.6, "validation_margins": 0.2, "validation_accuracies": 0.75}
