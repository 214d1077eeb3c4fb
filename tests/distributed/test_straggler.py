"""The rank that all others wait for is named, and one slow step names nobody."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.distributed import run_ranks
from tests.runs import make_pictures, make_run, run_config
from trainer.config.schema import RunConfig
from trainer.distributed.straggler import STEPS, Stragglers
from trainer.distributed.world import World
from trainer.run.events import AnyEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

HOSTS = ["node-a", "node-a", "node-b"]


def test_a_rank_is_named_once_when_it_becomes_slow_and_again_when_it_was_quick_in_between() -> None:
    stragglers = Stragglers(HOSTS)
    quick, slow = (1.0, 1.1, 1.2), (1.0, 1.1, 2.0)
    said = [
        stragglers.add(seconds) for seconds in (*[quick] * STEPS, *[slow] * STEPS, *[quick] * STEPS, *[slow] * STEPS)
    ]
    assert [number // STEPS for number, sentence in enumerate(said) if sentence] == [1, 3]
    sentence = next(filter(None, said))
    assert sentence.startswith("rank 2 on node-b is slow, and the others wait for it: ")


@pytest.mark.parametrize("outlier", [(9.0, 1.0, 1.0), (0.001, 0.002, 0.009)])
def test_a_slow_step_or_a_few_milliseconds_name_nobody(outlier: tuple[float, ...]) -> None:
    stragglers = Stragglers(HOSTS)
    steps = [outlier] + [(1.0, 1.0, 1.0)] * STEPS if outlier[0] > 1 else [outlier] * 2 * STEPS
    assert not any(map(stragglers.add, steps))


@pytest.mark.slow
def test_a_rank_whose_blocks_take_longer_is_found_in_a_real_run(tmp_path: Path) -> None:
    changes = {"parallel__devices": 2, "parallel__strategy": "full", "train__steps": 50, "train__batch_size": 2}
    cfg = run_config(make_pictures(tmp_path / "pictures", count=4), **changes)
    warnings, _ = run_ranks(2, train_with_a_slow_rank, cfg, make_run(tmp_path, cfg, "slow"))
    [warning] = warnings
    assert warning.startswith("rank 1 on ")


def train_with_a_slow_rank(world: World, cfg: RunConfig, run: RunDir) -> list[str]:
    """A block of rank 1 takes a twentieth of a second more. Returns the warnings."""
    said: list[AnyEvent] = []
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", said.append)
    if world.rank == 1:
        block = trainer.model["transformer"].transformer_blocks[0]
        forward = block.forward

        def slow_forward(*arguments: object, **named: object) -> object:
            time.sleep(0.05)
            return forward(*arguments, **named)

        block.forward = slow_forward
    for _ in range(STEPS + 2):
        trainer.train_step()
    trainer.close()
    return [event.message for event in said if isinstance(event, WarningEvent)]
