"""Every method on every family, strategy and number of ranks, compared with one process.

`python -m tests.distributed.matrix` runs the whole matrix and writes it to tests/benchmarks/PARITY.md.

See DECISIONS 16.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tests.distributed.pool import run_ranks
from tests.runs import difference, make_pictures, make_run, run_config, steps_of
from trainer.config import families
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.run.events import AnyEvent
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

RESULTS = Path(__file__).parents[1] / "benchmarks" / "PARITY.md"
STEPS = 4
EPS = 1e-6
"""AdamW divides a gradient by its own size: with the usual 1e-8 the last bit of a sum decides the step of a weight
whose gradient is nearly zero, and machines differ in that bit."""
TOGETHER = 16
FAMILIES = ("flux2", "flux1", "sd3", "sdxl")
OTHERS = (
    *("auto", "chroma", "ernie_image", "flux3", "ideogram4", "krea2", "qwen_image", "z_image"),
    *("flux1 kontext", "qwen_image qwen-image-edit-2509", "qwen_image qwen-image-edit-2511"),
    "qwen_image_21 qwen-image-2.1",
)
"""Families, and architectures of one, of which every method is trained on two ranks: edit models with references."""
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"type": "lora", "rank": 4},
    "locon": {"type": "locon", "rank": 4},
    "dora": {"type": "dora", "rank": 4},
    "loha": {"type": "loha", "rank": 2, "conv_rank": 2},
    "lokr": {"type": "lokr", "rank": 2, "conv_rank": 2, "factor": 4},
    "diag-oft": {"type": "diag-oft", "block_size": 4},
    "boft": {"type": "boft", "block_size": 4},
    "full": {"type": "none"},
}
ON_BF16 = ("dora", "diag-oft", "boft")
"""Methods that also run on a bf16 base: they read the base's weights, or multiply by what they made of fp32 masters."""
STRATEGIES = {2: ("full", "grad_op", "ddp"), 4: ("full", "grad_op", "hybrid", "ddp")}
EXACT: dict[str, Any] = {"train__batch_size": 2, "optim__clip_norm": None}
"""Fields of cells on a bf16 base: two gradients add up alike in any order, and no norm is taken over shards. Otherwise
a last bit of fp32 may turn a rounding to bf16, on some processors and not on others, and a loss be 1.3e-4 off."""
FORMATS = ("nf4", "int8", "fp8")
"""Formats in which the frozen base is also stored, under every method that leaves it frozen."""
VARIANTS: dict[str, dict[str, Any]] = {
    "hybrid": {"parallel__shard_size": 2},
    "offload": {"parallel__strategy": "full", "parallel__cpu_offload": True},
    "checkpointing": {"parallel__strategy": "full", "train__checkpointing": "full"},
}
"""Fields that a strategy's name sets in addition to `parallel.strategy`."""
SAVINGS: dict[str, dict[str, Any]] = {
    "selective": {"train__checkpointing": "selective"},
    "mixed": {"train__checkpointing": "full 1, selective 1"},
    "offloaded": {"parallel__offload_blocks": 1.0},
}
"""Fields by which a run saves memory on each rank."""
ADAPTERS = [method for method in METHODS if method != "full"]
PLACES = [(strategy, ranks) for ranks, strategies in STRATEGIES.items() for strategy in strategies]
QUANTIZED: tuple[Sequence[Any], ...] = (
    ADAPTERS,
    FORMATS,
    [(strategy, ranks) for ranks, own in STRATEGIES.items() for strategy in (*own, "offload", "checkpointing")],
)
"""Axes: adapter, format of the base, and everything that moves its bytes."""
SAVING: tuple[Sequence[Any], ...] = (
    list(SAVINGS),
    ADAPTERS,
    [("bf16", "none"), ("fp32", "nf4")],
    [("none", 1), *PLACES],
)
"""Axes: way of saving, adapter, precision and format of the base, strategy and ranks."""
TOLERANCE = {"sdxl": 1e-5}
"""Largest absolute difference of a weight or a loss where it is not 1e-6: convolutions add up in another order."""


@dataclass(frozen=True)
class Cell:
    """One training. family: its name, or its name and architecture.  base: `quantize.format`.

    precision: of the base and of the compute; trained weights are fp32.  saving: one of SAVINGS, or "".
    """

    method: str
    family: str
    strategy: str
    ranks: int
    precision: str = "fp32"
    base: str = "none"
    saving: str = ""

    @property
    def reference(self) -> Cell:
        """The same on one process, saving no memory."""
        return replace(self, strategy="none", ranks=1, saving="")

    @property
    def tolerance(self) -> float:
        return TOLERANCE.get(self.family, 1e-6)

    def __str__(self) -> str:
        family = self.family.rpartition(" ")[2]
        base = "-bf16" if self.precision == "bf16" else ""
        base += f"-{self.base}" if self.base != "none" else ""
        saving = f"-{self.saving}" if self.saving else ""
        return f"{self.method}{base}-{family}-{self.strategy}-{self.ranks}{saving}"

    def config(self, pictures: Path, before: Path) -> RunConfig:
        """pictures: the images that are trained.  before: those before an edit, for a model that edits."""
        family, _, architecture = self.family.partition(" ")
        known = families.of(family)
        assert known is not None
        edits = any(kind.architecture == architecture for kind in known.edits)
        return run_config(
            pictures,
            model={"family": family, "options": {"architecture": architecture or None}},
            adapter=METHODS[self.method],
            quantize__format=self.base,
            **{
                "train__steps": STEPS,
                "optim__eps": EPS,
                "train__precision": self.precision,
                **(EXACT if self.precision == "bf16" else {}),
                "parallel__strategy": self.strategy,
                "parallel__devices": self.ranks,
                "export__what": "none",
                **({"data__references": str(before), "data__caption_dropout": 0.3} if edits else {}),
                **VARIANTS.get(self.strategy, {}),
                **SAVINGS.get(self.saving, {}),
            },
        )


@dataclass(frozen=True)
class Trained:
    """weights: the trained ones, whole.  losses: of all steps.  moved: the farthest any weight went from its start,
    where that was asked."""

    weights: dict[str, Tensor]
    losses: list[float]
    moved: float

    def difference(self, other: Trained) -> float:
        """The largest of a weight or a loss."""
        pairs = zip(self.losses, other.losses, strict=True)
        return max(difference(self.weights, other.weights), *(abs(mine - its) for mine, its in pairs))


class Matrix:
    """Cells of one folder with its pictures and cache. Each is trained once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pictures = make_pictures(root / "pictures", 4)
        self._before = root / "before"
        self._before.mkdir()
        for file in sorted(self._pictures.glob("*.png")):
            with Image.open(file) as image:
                image.rotate(90, expand=True).save(self._before / file.name)
        self._references: dict[Cell, Trained] = {}
        self._found: dict[Cell, float] = {}

    def differences(self, cells: Sequence[Cell]) -> dict[Cell, float]:
        """Largest difference of each cell to its reference. One process group per number of ranks.

        Raises AssertionError for a reference that did not train: it would agree with anything.
        """
        needed = dict.fromkeys(cell.reference for cell in cells)
        missing = [cell for cell in needed if cell not in self._references]
        for cell, trained in self._train(missing):
            assert trained.moved > 1e-5, f"{cell} moved no weight"
            self._references[cell] = trained
        new = [cell for cell in cells if cell not in self._found]
        for ranks in sorted({cell.ranks for cell in new}):
            for cell, trained in self._train([cell for cell in new if cell.ranks == ranks]):
                self._found[cell] = trained.difference(self._references[cell.reference])
        return {cell: self._found[cell] for cell in cells}

    def _train(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Trained]]:
        """A few at a time: the workers must answer before the pool takes them for hung."""
        for first in range(0, len(cells), TOGETHER):
            part = cells[first : first + TOGETHER]
            configs = [cell.config(self._pictures, self._before) for cell in part]
            runs = [(cfg, make_run(self._root, cfg, str(cell))) for cell, cfg in zip(part, configs, strict=True)]
            yield from zip(part, run_ranks(part[0].ranks, train_all, runs)[0], strict=True)


def train_all(world: World, runs: Sequence[tuple[RunConfig, RunDir]]) -> list[Trained]:
    """Train each run for STEPS steps; the weights on rank 0."""
    return [_train(world, cfg, run) for cfg, run in runs]


def _train(world: World, cfg: RunConfig, run: RunDir) -> Trained:
    events: list[AnyEvent] = []
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", events.append)
    try:
        before = trainer.trained_weights() if world.size == 1 else {}
        for _ in range(STEPS):
            trainer.train_step()
        after = trainer.trained_weights()
        losses = [event.loss for event in steps_of(events)]
        return Trained(after, losses, difference(before, after) if before else 0.0)
    finally:
        trainer.close()


def whole_matrix() -> list[Cell]:
    """Every method, family, strategy and number of ranks; on a bf16 base what reads it; other families on two ranks;
    FLUX.2 on quantized bases, and with less memory on each rank."""
    return [*_plain_cells(), *other_cells(), *quantized_cells(product(*QUANTIZED)), *saving_cells(product(*SAVING))]


def other_cells() -> list[Cell]:
    """Every method on two ranks for OTHERS."""
    return [Cell(method, family, "full", 2) for family, method in product(OTHERS, METHODS)]


def quantized_cells(rows: Iterable[tuple[Any, ...]]) -> list[Cell]:
    """The cells of some rows of QUANTIZED."""
    return [Cell(method, "flux2", strategy, ranks, base=base) for method, base, (strategy, ranks) in rows]


def saving_cells(rows: Iterable[tuple[Any, ...]]) -> list[Cell]:
    """The cells of some rows of SAVING."""
    return [
        Cell(method, "flux2", strategy, ranks, precision, base, saving)
        for saving, method, (precision, base), (strategy, ranks) in rows
    ]


def _plain_cells() -> list[Cell]:
    kinds = [(method, "fp32") for method in METHODS] + [(method, "bf16") for method in ON_BF16]
    return [
        Cell(method, family, strategy, ranks, precision)
        for family, (method, precision), (strategy, ranks) in product(FAMILIES, kinds, PLACES)
    ]


def table(found: Mapping[Cell, float]) -> str:
    """Markdown: a row per family and method, a column per strategy and number of ranks."""
    columns = list(dict.fromkeys((cell.strategy, cell.ranks) for cell in found))
    rows = dict.fromkeys((cell.family, cell.method, cell.precision, cell.base, cell.saving) for cell in found)
    lines = [
        "| family | method | " + " | ".join(f"{strategy} x {ranks}" for strategy, ranks in columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for family, method, precision, base, saving in rows:
        cells = [found[Cell(method, family, *column, precision, base, saving)] for column in columns]
        stored = "bf16" if precision == "bf16" else base
        name = method if stored == "none" else f"{method}, {stored} base"
        name += f", {saving}" if saving else ""
        lines.append(f"| {family} | {name} | " + " | ".join(f"{value:.1e}" for value in cells) + " |")
    return "\n".join(lines)


def _savings() -> str:
    """A line for each of SAVINGS with its fields."""
    return "\n".join(
        f"- {name}: " + ", ".join(f"`{field.replace('__', '.')}: {value}`" for field, value in fields.items())
        for name, fields in SAVINGS.items()
    )


def main() -> int:
    """Run the matrix, write it, and return 1 if a cell is beyond its tolerance."""
    about = f"Train all cells on this CPU, a quarter of an hour, and write {RESULTS.name}."
    argparse.ArgumentParser(prog="python -m tests.distributed.matrix", description=about).parse_args()
    began = time.perf_counter()
    cells = whole_matrix()
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        found: dict[Cell, float] = {}
        for family in (*FAMILIES, *OTHERS):
            found |= matrix.differences([cell for cell in cells if cell.family == family])
            print(f"{family}: {len(found)} of {len(cells)} cells, {time.perf_counter() - began:.0f} s", flush=True)
    saving = {cell: value for cell, value in found.items() if cell.saving}
    others = {cell: found[cell] for cell in other_cells()}
    plain = {cell: found[cell] for cell in _plain_cells()}
    quantized = {cell: value for cell, value in found.items() if cell.base != "none" and not cell.saving}
    wrong = [cell for cell in cells if not found[cell] <= cell.tolerance]
    RESULTS.write_text(
        f"# Parity\n\nWritten by `make parity`: {len(cells)} cells of tiny models, torch {torch.__version__}, gloo on "
        f"CPU, {STEPS} AdamW steps at lr 1e-4, eps {EPS:g}, batch 4 (on a bf16 base 2). "
        "Each number is the largest absolute difference of "
        "a trained weight or a loss to one process that trains the same.\nLimit 1e-6, 1e-5 for sdxl. "
        f"{len(wrong)} cells are beyond it.\n\n{table(plain)}\n\n## Other families\n\n{table(others)}\n\n"
        f"## On a quantized base\n\n{table(quantized)}\n\n"
        f"## With less memory on each rank\n\n{_savings()}\n\n{table(saving)}\n",
        encoding="utf-8",
    )
    for cell in wrong:
        print(f"{cell}: {found[cell]:.2e} > {cell.tolerance:.0e}")
    print(f"{len(cells)} cells, {len(wrong)} beyond their limit, {time.perf_counter() - began:.0f} s: {RESULTS}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
