"""The thing under test: a small run of the trainer in this process, on a tiny model that a family wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from PIL import Image

from trainer.config.schema import RunConfig
from trainer.config.sections import ModelConfig, ModelOptions, ObjectiveConfig
from trainer.distributed.world import connect
from trainer.models import families
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

Sections = Mapping[str, Mapping[str, Any]]
WIDE, TALL = (96, 32), (32, 96)
"""Width and height of pictures that are buckets of every family at resolution 64, so that none is resized."""


@dataclass(frozen=True)
class Model:
    """A tiny model, and what a run says of it.

    name: a row of the table.  family, architecture: as in a config.  objective: the section of the config.
    edits: {JSON file of the model's folder: what is changed in it}.
    """

    name: str
    family: str
    architecture: str | None = None
    objective: Mapping[str, Any] = field(default_factory=dict)
    edits: Sections = field(default_factory=dict)

    def write(self, cache: Path) -> Path:
        """A diffusers folder of its own, below `cache`."""
        config = ModelConfig(family=self.family, options=ModelOptions(architecture=self.architecture))
        written = families.get(self.family)(config, ObjectiveConfig(), cache).folder
        folder = Path(shutil.copytree(written, cache / "model"))
        for name, changes in self.edits.items():
            file = folder / name
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return folder


@contextmanager
def started(model: Model, path: Path, root: Path, sections: Sections) -> Iterator[Trainer]:
    """A trainer in fp32 before its first step, whose adapter changes nothing yet.

    path: the model's folder.  root: of the run and its cache.  sections: of the config, besides.
    """
    values: dict[str, dict[str, Any]] = {
        "model": {"family": model.family, "path": str(path)},
        "objective": dict(model.objective),
        "adapter": {"type": "lora"},
        "train": {"steps": 2, "precision": "fp32", "seed": 11},
        "optim": {"lr": 1e-2},
        "parallel": {"device": "cpu", "strategy": "none"},
        "checkpoint": {"every": 0},
    }
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes}
    cfg = RunConfig.model_validate({"name": "audit", **values})
    try:
        with connect(cfg.parallel) as world:
            run = RunDir.create(root, cfg, at=root / "run")
            trainer = Trainer(cfg, run, world, root / "cache", lambda event: None)
            try:
                yield trainer
            finally:
                trainer.close()
    finally:
        if dist.is_initialized():  # after an error
            dist.destroy_process_group()


def picture_data(folder: Path) -> dict[str, Any]:
    """The section `data` for pictures of WIDE below `data` and of TALL below `unseen`, which are held out."""
    places = {"path": str(folder / "data"), "validation": str(folder / "unseen")}
    return {**places, "resolution": 64, "max_aspect": 4, "missing_caption": "empty"}


def write_picture(file: Path, size: tuple[int, int], caption: str, seed: int) -> Image.Image:
    """A picture of random pixels with its caption. size: width and height."""
    file.parent.mkdir(parents=True, exist_ok=True)
    levels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(levels)
    image.save(file)
    file.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return image


class Once:
    """A comparison that gives several figures: it is made when the first of them is asked for.

    compare: given an empty folder, returns an object with the figures.
    """

    def __init__(self, compare: Callable[[Path], Any]) -> None:
        self._compare = compare
        self._found: Any = None

    def figure(self, name: str) -> Callable[[Path], float]:
        """A check's `measure` for the figure."""
        return partial(self._figure, name)

    def _figure(self, name: str, folder: Path) -> float:
        if self._found is None:
            self._found = self._compare(folder)
        value: float = getattr(self._found, name)
        return value
