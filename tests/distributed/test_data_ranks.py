"""Ranks that work on the same samples: loader, sums, loss scale, validation and samples count each of them once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.runs import (
    Outcome,
    alone,
    difference,
    make_pictures,
    make_run,
    make_text,
    run_config,
    text_config,
    train,
)
from tests.train.test_bagel import both_config, make_questions
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.run.events import SampleEvent, ValidationEvent
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

MakeConfig = Callable[..., RunConfig]
IMAGES: dict[str, Any] = {
    "train__batch_size": 6,
    "train__micro_batch": 2,
    "data__validation": 2,
    "data__validation_every": 2,
    "sample__every": 4,
    "sample__prompts": ["a fox", "a hare", "an owl"],
    "sample__steps": 2,
}


def images_config(folder: Path, **changes: Any) -> RunConfig:
    return run_config(make_pictures(folder / "pictures"), **IMAGES | changes)


def texts_config(folder: Path, **changes: Any) -> RunConfig:
    return text_config(make_text(folder / "text"), **changes)


def drawn_and_answered_config(folder: Path, **changes: Any) -> RunConfig:
    make_questions(make_pictures(folder / "pictures"))
    return both_config(folder / "pictures", **changes)


def train_together(world: World, cfg: RunConfig, run: RunDir, ranks_per_sample: int) -> Outcome:
    return train(replace(world, ranks_per_sample=ranks_per_sample), cfg, run)


def counted(world: World, cfg: RunConfig, run: RunDir, ranks_per_sample: int) -> tuple[float, float]:
    """(weight, tokens) of all ranks in the last of the steps."""
    trainer = Trainer(cfg, run, replace(world, ranks_per_sample=ranks_per_sample), run.path.parent / "cache", print)
    try:
        trainer.train()
        assert trainer.numbers is not None
        return trainer.numbers.weight, trainer.numbers.tokens
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("ranks", "together", "config"),
    [
        (4, 2, texts_config),
        pytest.param(2, 2, texts_config, marks=pytest.mark.slow),
        pytest.param(2, 2, images_config, marks=pytest.mark.slow),
        pytest.param(4, 2, images_config, marks=pytest.mark.slow),
        pytest.param(4, 2, drawn_and_answered_config, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_their_samples_train_what_one_process_trains(
    tmp_path: Path, ranks: int, together: int, config: MakeConfig
) -> None:
    cfg = config(tmp_path, train__steps=4)
    expected = train(alone(), cfg, make_run(tmp_path, cfg, "alone"))
    cfg = cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update={"devices": ranks, "strategy": "full"})})
    found = run_ranks(ranks, train_together, cfg, make_run(tmp_path, cfg, "together"), together)[0]
    assert found.losses == pytest.approx(expected.losses, abs=1e-6, rel=0)
    assert found.grad_norms == pytest.approx(expected.grad_norms, abs=1e-5, rel=1e-5)
    assert difference(found.weights, expected.weights) <= 1e-6
    for kind in (ValidationEvent, SampleEvent):
        assert len(of_kind(found, kind)) == len(of_kind(expected, kind))
    assert [event.loss for event in of_kind(found, ValidationEvent)] == pytest.approx(
        [event.loss for event in of_kind(expected, ValidationEvent)], abs=1e-6, rel=0
    )


def test_ranks_that_share_their_samples_count_them_once(tmp_path: Path) -> None:
    cfg = texts_config(tmp_path, train__steps=2, parallel__devices=2, parallel__strategy="full")
    apart, together = (
        run_ranks(2, counted, cfg, make_run(tmp_path, cfg, f"by-{number}"), number)[0] for number in (1, 2)
    )
    assert together == apart


def of_kind(outcome: Outcome, kind: type[Any]) -> list[Any]:
    return [event for event in outcome.events if isinstance(event, kind)]
