"""Trained adapters of every type on every family, and the formats that carry them.

`python -m tests.exports` proves every cell and writes the table of trainer/adapters/README.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.distributed.matrix import METHODS
from tests.models.common import IMAGES
from tests.readme import write_section
from tests.runs import alone, make_pictures, make_run, run_config
from trainer.config.schema import RunConfig
from trainer.config.sections import ADAPTER_FILES
from trainer.export.export import export
from trainer.rng import generator
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.train.loop import Trainer

ADAPTERS = tuple(method for method in METHODS if METHODS[method]["type"] != "none")
LETTERS = {"diffusers": "D", "comfyui": "C", "kohya": "K", "lycoris": "L", "peft": "P"}
MODEL_LETTERS = {"diffusers": "F", "single_file": "S"}


@dataclass(frozen=True)
class Finished:
    """A run with a checkpoint. weights: the live model's trained weights."""

    cfg: RunConfig
    run: RunDir
    cache: Path
    weights: dict[str, Tensor]

    def export(self, what: str, format: str, dtype: str = "fp32", name: str = "") -> list[Path]:
        """Export and verify; raises what the exporter raises."""
        section = {"what": what, "format": format, "dtype": dtype}
        changed = self.cfg.model_dump() | {"export": section} | ({"name": name} if name else {})
        exported = export(RunConfig.model_validate(changed), self.run, self.cache, self.weights)
        return [file.path for file in exported]


class Runs:
    """Finished runs below one folder, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pictures = make_pictures(root / "pictures", 1)
        self._made: dict[str, Finished] = {}

    def of(self, method: str, family: str, **changes: Any) -> Finished:
        """A run whose trained weights are random numbers, far enough from the start that a mistake would show."""
        asked = f"{method} {family} {changes}"
        if asked not in self._made:
            settings = {
                "model": {"family": family},
                "adapter": METHODS[method],
                "parallel__strategy": "none",
                **changes,
            }
            cfg = run_config(self._pictures, name=method, **settings)
            self._made[asked] = _finish(cfg, make_run(self._root, cfg, f"{method}-{family}-{len(self._made)}"))
        return self._made[asked]


def _finish(cfg: RunConfig, run: RunDir) -> Finished:
    cache = run.path.parent / "cache"
    trainer = Trainer(cfg, run, alone(), cache, lambda event: None)
    try:
        with torch.no_grad():
            for name, parameter in trainer.trainables.items():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator("trained", name))
        trainer.train_step()  # an optimizer without state is not saved
        trainer.save()
        trainer.checkpointer.wait()
        return Finished(cfg, run, cache, trainer.trained_weights())
    finally:
        trainer.close()


def formats_of(runs: Runs, method: str, family: str) -> str:
    """Letters of the formats that carry what the method trains; each is written, read back and compared."""
    finished = runs.of(method, family)
    if method == "full":
        return _letters(finished, "full", MODEL_LETTERS)
    finished.export("adapter", "auto")
    return f"{_letters(finished, 'adapter', LETTERS)} · {_letters(finished, 'merged', MODEL_LETTERS)}"


def _letters(finished: Finished, what: str, letters: dict[str, str]) -> str:
    return " ".join(letter for format, letter in letters.items() if _carries(finished, what, format))


def _carries(finished: Finished, what: str, format: str) -> bool:
    try:
        finished.export(what, format)
    except (InputError, ValueError):
        return False
    return True


def table(names: Iterable[str]) -> str:
    """Markdown: a row per adapter, a column per family."""
    columns = list(names)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        for method in METHODS:
            cells = [formats_of(runs, method, family) for family in columns]
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Write the table."""
    write_section("trainer/adapters", "formats", table(IMAGES))
    return 0


if __name__ == "__main__":
    assert set(LETTERS) | {"auto"} == set(ADAPTER_FILES)
    sys.exit(main())
