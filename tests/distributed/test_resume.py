"""A run that stopped and went on ends where the run that never stopped ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.runs import Outcome, difference, make_pictures, make_run, run_config, steps_of, train
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.run.events import AnyEvent
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora_with_dropout_and_average": {"adapter__dropout": 0.2, "optim__ema": 0.9, "data__caption_dropout": 0.3},
    "full": {"adapter__type": "none"},
    "dora": {"adapter__type": "dora"},
    "boft": {"adapter": {"type": "boft"}},
    "lora_on_nf4": {"quantize": {"format": "nf4"}},
    "schedulefree": {"optim__type": "schedulefree"},
    "adamw8bit": {"optim__type": "adamw8bit", "adapter__rank": 64},
}
STEPS, STOP_AT = 6, 3


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("resume") / "pictures")


def train_in_two_parts(world: World, cfg: RunConfig, run: RunDir) -> Outcome:
    """Train to STOP_AT as if stopped by request there, then again from the checkpoint."""
    interrupt(world, cfg, run)
    return train(world, cfg, run)


def interrupt(world: World, cfg: RunConfig, run: RunDir) -> None:
    """Train until the stop request of step STOP_AT is answered."""
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    try:
        while trainer.step < STOP_AT - 1:
            trainer.train_step()
        if world.rank == 0:
            run.request("stop")
        world.barrier()
        assert trainer.train() == "stopped"
        assert trainer.step == STOP_AT
    finally:
        trainer.close()


@pytest.mark.parametrize(
    "kind",
    [
        *("lora_on_nf4", "schedulefree"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("lora_with_dropout_and_average", "full", "lora", "dora", "boft")
        ),
    ],
)
def test_two_ranks_that_stop_and_go_on_end_bit_for_bit_where_they_would_have(pictures: Path, kind: str) -> None:
    compare_two_parts(pictures, kind)


@pytest.mark.slow  # torchao compiles its step: 30 s of C++ compiler
def test_eight_bit_adamw_goes_on_bit_for_bit(pictures: Path) -> None:
    compare_two_parts(pictures, "adamw8bit")


def compare_two_parts(pictures: Path, kind: str) -> None:
    cfg = config(pictures, 2, kind)
    straight = straight_run(pictures, kind)
    parts = run_ranks(2, train_in_two_parts, cfg, make_run(pictures.parent, cfg, f"parts-{kind}"))[0]
    assert parts.losses == straight.losses[STOP_AT:]
    assert parts.grad_norms == straight.grad_norms[STOP_AT:]
    assert all(torch.equal(parts.weights[name], straight.weights[name]) for name in straight.weights)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("full", 1),
        pytest.param("lora", 1, marks=pytest.mark.slow),
        pytest.param("lora", 4, marks=pytest.mark.slow),
        pytest.param("full", 4, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_two_ranks_goes_on_on_another_number(pictures: Path, kind: str, ranks: int) -> None:
    straight = straight_run(pictures, kind)
    cfg = config(pictures, 2, kind)
    run = make_run(pictures.parent, cfg, f"moved-{kind}-{ranks}")
    run_ranks(2, interrupt, cfg, run)
    moved = run_ranks(ranks, train, config(pictures, ranks, kind), run)[0]
    assert moved.losses == pytest.approx(straight.losses[STOP_AT:], abs=1e-6, rel=0)
    assert difference(moved.weights, straight.weights) <= 1e-6


MOVES = {
    "2_4_1": ((2, "full"), (4, "full"), (1, "none")),
    "full_grad_op_ddp": ((2, "full"), (2, "grad_op"), (2, "ddp")),
}
"""{name: ranks and strategy of each third of the run}"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moves"),
    [
        ("lora_with_dropout_and_average", "2_4_1"),
        ("lora_with_dropout_and_average", "full_grad_op_ddp"),
        ("full", "2_4_1"),
        ("full", "full_grad_op_ddp"),
        ("dora", "2_4_1"),
        ("boft", "full_grad_op_ddp"),
    ],
)
def test_a_run_that_moves_twice_ends_where_one_that_stayed_does(pictures: Path, kind: str, moves: str) -> None:
    straight = straight_run(pictures, kind)
    run = make_run(pictures.parent, config(pictures, 2, kind), f"{moves}-{kind}")
    losses: list[float] = []
    for number, (ranks, strategy) in enumerate(MOVES[moves], 1):
        cfg = config(pictures, ranks, kind, strategy)
        part, weights = run_ranks(ranks, train_until, cfg, run, number * STEPS // 3)[0]
        losses += part
    assert losses == pytest.approx(straight.losses, abs=1e-6, rel=0)
    assert difference(weights, straight.weights) <= 1e-6


def train_until(world: World, cfg: RunConfig, run: RunDir, step: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train up to this step and save, wherever the run was. Returns the losses, and the weights on rank 0."""
    events: list[AnyEvent] = []
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", events.append)
    try:
        while trainer.step < step:
            trainer.train_step()
        trainer.save()
        trainer.checkpointer.wait()
        return [event.loss for event in steps_of(events)], trainer.trained_weights()
    finally:
        trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_bf16_full_fine_tune_goes_on_on_another_number_of_ranks(pictures: Path, ranks: int) -> None:
    changes = {"adapter__type": "none", "train__precision": "bf16", "train__steps": STEPS}
    cfg = run_config(pictures, parallel__devices=2, parallel__strategy="full", **changes)
    straight = run_ranks(2, train, cfg, make_run(pictures.parent, cfg, f"bf16-straight-{ranks}"))[0]
    run = make_run(pictures.parent, cfg, f"bf16-moved-{ranks}")
    run_ranks(2, interrupt, cfg, run)
    elsewhere = run_config(pictures, parallel__devices=ranks, parallel__strategy="full", **changes)
    moved = run_ranks(ranks, train, elsewhere, run)[0]
    assert difference(moved.weights, straight.weights) <= 2e-4


def straight_run(pictures: Path, kind: str) -> Outcome:
    """The uninterrupted run of two ranks."""
    cfg = config(pictures, 2, kind)
    run = pictures.parent / f"uninterrupted-{kind}"
    if not run.exists():
        _STRAIGHT[run] = run_ranks(2, train, cfg, make_run(pictures.parent, cfg, run.name))[0]
    return _STRAIGHT[run]


_STRAIGHT: dict[Path, Outcome] = {}


def config(pictures: Path, ranks: int, kind: str, strategy: str = "") -> RunConfig:
    strategy = strategy or ("none" if ranks == 1 else "full")
    changes = {"train__steps": STEPS, "parallel__devices": ranks, "parallel__strategy": strategy}
    return run_config(pictures, **changes, **KINDS[kind])
