"""The steps that a page shows of a run before it is started."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.data.scans import Scans
from app.form.planned_steps import planned_steps
from tests.runs import make_pictures, make_text, run_config, text_config
from trainer.config.schema import RunConfig


def settled(ask: Callable[[], list[int | None]]) -> list[int | None]:
    """The answer once the images were read."""
    deadline = time.monotonic() + 30
    while None in (answer := ask()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"train__steps": 70}, [70]),
        ({"train__epochs": 3}, [6]),  # 8 images, 4 a step
        ({"train__epochs": 1.1, "data__repeats": 2}, [5]),  # 17.6 images
        ({"train__epochs": 3, "data__validation": 3}, [4]),
        ({"train__epochs": 2, "stages": [{"name": "a", "set": {}}, {"name": "b", "set": {"train.steps": 9}}]}, [4, 9]),
    ],
    ids=str,
)
def test_images_are_counted(tmp_path: Path, changes: dict[str, Any], steps: list[int]) -> None:
    cfg = run_config(make_pictures(tmp_path / "pictures"), **changes)
    scans = Scans()
    assert settled(lambda: planned_steps(scans, cfg)) == steps


def test_text_and_images_that_are_not_there_are_not_counted(tmp_path: Path) -> None:
    scans = Scans()

    def planned(cfg: RunConfig) -> list[int | None]:
        return planned_steps(scans, cfg)

    assert planned(text_config(make_text(tmp_path / "text"), train__epochs=2)) == [None]
    assert planned(text_config(tmp_path / "text", train__steps=7)) == [7]
    assert planned(run_config(tmp_path / "nowhere", train__epochs=2)) == [None]
