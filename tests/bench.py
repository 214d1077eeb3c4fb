"""The runs of a test module: one set of data, one cache, one reference of a single process per kind of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.distributed import run_ranks
from tests.runs import Outcome, alone, make_run, train
from trainer.config.schema import RunConfig
from trainer.run.folder import RunDir


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
