"""Gradients of several passes per step: reduced as late as memory allows."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from tests.runs import Outcome, alone, difference, make_pictures, make_run, run_config, train
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.models import families
from trainer.models.build import build_model, load_model, sync_gradients
from trainer.rng import SampleRng

LORA, FULL = {"adapter__type": "lora"}, {"adapter__type": "none"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("accumulation") / "pictures")


def sharded_gradients_after_a_first_pass(world: World, cfg: RunConfig, cache: Path) -> float:
    """Share of the trained parameters whose gradient is a shard between two passes; the others' is whole."""
    family = families.make(cfg, cache)
    loaded = load_model(build_model(cfg, family), cfg, family, world)
    sync_gradients(loaded.module, False, cfg.shards_gradients(loaded.strategy))
    config = loaded.module["transformer"].config
    batch = {
        "latents": torch.ones(1, config.in_channels, 4, 4),
        "prompt_embeds": torch.ones(1, 8, config.joint_attention_dim),
        "weight": torch.ones(1),
    }
    family.loss(loaded.module, batch, SampleRng(0, (0,))).total.backward()
    return statistics.fmean(isinstance(p.grad, DTensor) for p in loaded.trainables.values())


@pytest.mark.parametrize(("trained", "share"), [(LORA, 0.0), (FULL, 1.0)], ids=["lora", "full"])
def test_between_passes_an_adapters_gradient_is_whole_and_that_of_a_sharded_model_is_not(
    tmp_path: Path, trained: dict[str, Any], share: float
) -> None:
    cfg = run_config(tmp_path, parallel__devices=2, parallel__strategy="full", **trained)
    assert run_ranks(2, sharded_gradients_after_a_first_pass, cfg, tmp_path) == [share, share]


@pytest.mark.parametrize(
    "parallel", [{"strategy": "full"}, pytest.param({"strategy": "hybrid", "shard_size": 2}, marks=pytest.mark.slow)]
)
def test_a_full_fine_tune_in_several_passes_trains_what_one_process_trains(
    pictures: Path, parallel: dict[str, Any]
) -> None:
    alike = FULL | {"train__batch_size": 8, "train__steps": 2}
    expected = reference(pictures, alike)
    cfg = run_config(
        pictures, parallel__devices=4, **{f"parallel__{key}": value for key, value in parallel.items()}, **alike
    )
    found = run_ranks(4, train, cfg, make_run(pictures.parent, cfg, parallel["strategy"]))[0]
    assert found.losses == pytest.approx(expected.losses, abs=1e-6, rel=0)
    assert difference(found.weights, expected.weights) <= 1e-6


def reference(pictures: Path, changes: dict[str, Any]) -> Outcome:
    cfg = run_config(pictures, parallel__strategy="none", **changes)
    return train(alone(), cfg, make_run(pictures.parent, cfg, f"one-{len(list(pictures.parent.iterdir()))}"))
