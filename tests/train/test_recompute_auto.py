"""`train.checkpointing: auto` in a run."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tests.runs import alone, difference, make_pictures, make_run, run_config, train
from trainer.distributed.world import World
from trainer.run.events import StatusEvent

DEMO = {"family": "flux2", "path": "demo"}


def notes(events: list[object]) -> list[str]:
    found = [event.message for event in events if isinstance(event, StatusEvent)]
    return [message for message in found if message.startswith("auto became")]


@pytest.mark.parametrize(("mib", "decision"), [(8000, "none"), (694, "selective 3"), (100, "full")])
def test_a_run_takes_the_least_recompute_that_fits_and_says_so(tmp_path: Path, mib: int, decision: str) -> None:
    pictures = make_pictures(tmp_path / "pictures", 4)
    outcomes = []
    for value in ("none", "auto"):
        cfg = run_config(pictures, model=DEMO, train__steps=2, train__checkpointing=value, train__batch_size=1)
        with mock.patch.object(World, "memory", mib << 20):
            outcomes.append(train(alone(), cfg, make_run(tmp_path, cfg, value)))
    plain, decided = outcomes
    assert notes(plain.events) == []
    [note] = notes(decided.events)
    assert note.startswith(f"auto became train.checkpointing {decision}")
    assert f"of {mib / 1024:.2f} GiB" in note
    assert decided.losses == plain.losses
    assert difference(decided.weights, plain.weights) == 0
