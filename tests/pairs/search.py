"""The configs of a covering array, tried one after the other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tests.distributed import run_ranks
from tests.pairs.array import Array, Row
from tests.pairs.choices import Kind, kinds
from tests.pairs.data import make_data
from tests.pairs.trials import OnRanks, Outcome, tried
from trainer.config.schema import RunConfig
from trainer.system.errors import InputError
from trainer.train.early_checks import check_model


@dataclass(frozen=True)
class Tried:
    """What came of a row.

    Attributes:
        name: The name of its run.
        row: All its values.
        chosen: Those that are not the plain ones.
    """

    name: str
    row: Row
    chosen: Row
    outcome: Outcome
    why: str
    seconds: float

    def __str__(self) -> str:
        chosen = ", ".join(f"{name}: {value}" for name, value in self.chosen.items())
        return f"{self.outcome}: {self.name}, {self.seconds:.1f} s ({chosen})\n{self.why}"


@dataclass
class Search:
    """The configs of a seed.

    Attributes:
        root: Folder of data, runs and cache.
        seed: The seed of the rows.
        on_ranks: Runs a function on a number of ranks, as `run_ranks`.
        kinds: The kinds of data by name.
        counts: {kind of data: how many rows and pairs it has}, of those whose rows were made.
    """

    root: Path
    seed: int = 0
    on_ranks: OnRanks = run_ranks
    kinds: dict[str, Kind] = field(init=False)
    counts: dict[str, str] = field(default_factory=dict)
    _refusals: dict[str, str | None] = field(default_factory=dict)
    _rows: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.kinds = kinds(make_data(self.root / "data"))

    def array(self, kind: str) -> Array:
        """The array of a kind of data, without rows."""
        one = self.kinds[kind]
        choices = {name: list(values) for name, values in one.choices.items()}
        return Array(choices, one.refusal, lambda row: self._refusal(one.config(row)), self.seed)

    def rows(self, kind: str) -> list[dict[str, str]]:
        """The rows for a kind of data, and one for each reason why a model is refused."""
        if kind not in self._rows:
            array = self.array(kind)
            total = len(array.uncovered)
            rows = list(array.rows())
            self._rows[kind] = rows + array.examples
            covered, examples = total - len(array.refused), len(array.examples)
            self.counts[kind] = (
                f"{len(rows)} configs hold {covered} pairs; {len(array.refused)} are refused, {examples} configs try it"
            )
        return self._rows[kind]

    def _refusal(self, cfg: RunConfig) -> str | None:
        """The sentence with which the model of a config is refused, or None."""
        asked = cfg.model_dump(include={"model", "adapter", "quantize", "objective", "sample", "export"})
        key = json.dumps([asked, cfg.data.rejected, cfg.data.questions, cfg.data.references], sort_keys=True)
        if key not in self._refusals:
            try:
                check_model(cfg, self.root / "runs" / "cache")
                self._refusals[key] = None
            except InputError as error:
                self._refusals[key] = str(error)
        return self._refusals[key]

    def trials(self, kind: str, share: int = 1, shares: int = 1, only: Row = MappingProxyType({})) -> Iterator[Tried]:
        """Try the configs of a kind of data.

        Args:
            kind: The kind of data.
            share: Which of the shares, from 1 on.
            shares: The number of shares.
            only: Values that the configs have.
        """
        for number, row in enumerate(self.rows(kind), 1):
            if (number - share) % shares == 0 and only.items() <= row.items():
                yield self.trial(kind, row, f"{kind}-{number}")

    def trial(self, kind: str, row: Row, name: str) -> Tried:
        """Try a row."""
        began = time.monotonic()
        cfg, plain = (self.kinds[kind].config(row, is_plain) for is_plain in (False, True))
        trial = tried(cfg, plain, self.root, name, self.on_ranks)
        plain_values = {choice: next(iter(values)) for choice, values in self.kinds[kind].choices.items()}
        chosen = {choice: row[choice] for choice in plain_values if row.get(choice) not in (None, plain_values[choice])}
        return Tried(name, row, chosen, trial.outcome, trial.why, time.monotonic() - began)
