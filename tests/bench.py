"""The runs of a test module: one set of data, one cache, one reference of a single process per kind of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.runs import Outcome, alone, difference, in_two_parts, make_run, steps_of, train
from trainer.config.schema import RunConfig
from trainer.run.folder import RunDir

TOLERANCE = 1e-6
"""Between fp32 runs that add the same numbers in another order."""


@dataclass(frozen=True)
class Bench:
    """root: holds runs and cache.  make: (data, changes) -> config.  kinds: {name: changes} of `reference`."""

    root: Path
    data: Path
    make: Callable[..., RunConfig]
    kinds: Mapping[str, dict[str, Any]]
    references: dict[str, Outcome] = field(default_factory=dict)

    def config(self, **changes: Any) -> RunConfig:
        return self.make(self.data, **changes)

    def run(self, name: str, **changes: Any) -> tuple[RunConfig, RunDir]:
        cfg = self.config(**changes)
        return cfg, make_run(self.root, cfg, name)

    def trained(self, name: str, ranks: int = 1, **changes: Any) -> Outcome:
        return run_ranks(ranks, train, *self.run(name, **{"parallel__devices": ranks} | changes))[0]

    def trained_here(self, name: str, **changes: Any) -> Outcome:
        """In this process."""
        return train(alone(), *self.run(name, **changes))

    def reference(self, kind: str) -> Outcome:
        """One process."""
        if kind not in self.references:
            changes = {"parallel__strategy": "none"} | self.kinds[kind]
            self.references[kind] = self.trained(f"one-{kind}", **changes)
        return self.references[kind]

    def assert_same_as_reference(self, kind: str, **changes: Any) -> None:
        """However a kind is run, for example with `parallel__devices=2`, it trains what one process trains."""
        name = "-".join((kind, *(f"{field}-{value}" for field, value in changes.items())))
        found = self.trained(name, changes.get("parallel__devices", 1), **self.kinds[kind] | changes)
        expected = self.reference(kind)
        assert found.losses == pytest.approx(expected.losses, abs=TOLERANCE, rel=0)
        assert difference(found.weights, expected.weights) <= TOLERANCE
        for one, other in zip(steps_of(found.events), steps_of(expected.events), strict=True):
            assert one.metrics == pytest.approx(other.metrics, abs=1e-5)  # sums over tokens

    def assert_goes_on_bit_for_bit(self, kind: str, first: int = 3, **changes: Any) -> None:
        """Two ranks that stop after `first` steps and go on end as two that do not stop."""
        changes = {"parallel__devices": 2, "parallel__strategy": "full"} | self.kinds[kind] | changes
        straight = self.trained(f"straight-{kind}", 2, **changes)
        begin, rest = run_ranks(2, in_two_parts, *self.run(f"parts-{kind}", **changes), first)[0]
        assert begin + rest.losses == straight.losses
        assert rest.weights.keys() == straight.weights.keys()
        assert all(torch.equal(rest.weights[name], straight.weights[name]) for name in straight.weights)
