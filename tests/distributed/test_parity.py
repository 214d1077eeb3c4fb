"""Any number of ranks and any strategy train what one process trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.pairs.array import covering
from tests.runs import Outcome, difference, make_pictures, make_run, run_config, train

TOLERANCE = 1e-6
ADAPTER = {"adapter__type": "lora"}
FULL = {"adapter__type": "none"}
TRAINED = {"lora": ADAPTER, "full": FULL}
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {"parallel__strategy": "full"},
    "grad_op": {"parallel__strategy": "grad_op"},
    "ddp": {"parallel__strategy": "ddp"},
    "offload": {"parallel__strategy": "full", "parallel__cpu_offload": True},
    "prefetch": {"parallel__strategy": "full", "parallel__prefetch_forward": 2, "parallel__prefetch_backward": 2},
    "checkpointing": {"parallel__strategy": "full", "train__checkpointing": "full"},
    "every_second_block": {"parallel__strategy": "full", "train__checkpointing": 2},
    "compile": {"parallel__strategy": "full", "train__compile": True, "train__compile_backend": "aot_eager"},
}
HYBRID = {"parallel__strategy": "hybrid", "parallel__shard_size": 2}


@dataclass(frozen=True)
class Bench:
    """Runs of this module: one folder, one cache, one reference per kind of training."""

    root: Path
    pictures: Path
    references: dict[str, Outcome]

    def config(self, trained: str, **changes: Any) -> Any:
        return run_config(self.pictures, **TRAINED[trained], **changes)

    def reference(self, trained: str, optimizer: str) -> Outcome:
        """One process, by kind of training and optimizer."""
        name = f"reference-{trained}-{optimizer}"
        if name not in self.references:
            cfg = self.config(trained, parallel__strategy="none", optim__type=optimizer)
            (self.references[name],) = run_ranks(1, train, cfg, make_run(self.root, cfg, name))
        return self.references[name]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("parity")
    return Bench(root, make_pictures(root / "pictures"), {})


def compare(bench: Bench, ranks: int, trained: str, name: str, changes: dict[str, Any]) -> Outcome:
    cfg = bench.config(trained, parallel__devices=ranks, **changes)
    run = make_run(bench.root, cfg, f"{name}-{trained}-{ranks}")
    found = run_ranks(ranks, train, cfg, run)
    expected = bench.reference(trained, cfg.optim.type)
    assert found[0].losses == pytest.approx(expected.losses, abs=TOLERANCE, rel=0)
    assert found[0].grad_norms == pytest.approx(expected.grad_norms, abs=0, rel=1e-4)
    assert difference(found[0].weights, expected.weights) <= TOLERANCE
    return found[0]


@pytest.mark.parametrize("trained", TRAINED)
def test_two_ranks_train_what_one_process_trains(bench: Bench, trained: str) -> None:
    compare(bench, 2, trained, "full", STRATEGIES["full"])


@pytest.mark.parametrize("trained", [pytest.param("lora", marks=pytest.mark.slow), "full"])
def test_four_ranks_in_hybrid_groups_train_what_one_process_trains(bench: Bench, trained: str) -> None:
    compare(bench, 4, trained, "hybrid", HYBRID)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "trained"), covering(STRATEGIES, (1, 2, 4), TRAINED))
def test_every_strategy_trains_what_one_process_trains(bench: Bench, name: str, ranks: int, trained: str) -> None:
    compare(bench, ranks, trained, f"matrix-{name}", STRATEGIES[name])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full", "ddp"])
def test_schedule_free_trains_on_two_ranks_what_it_trains_on_one(bench: Bench, strategy: str) -> None:
    changes = {"parallel__strategy": strategy, "optim__type": "schedulefree"}
    compare(bench, 2, "full", f"schedulefree-{strategy}", changes)
