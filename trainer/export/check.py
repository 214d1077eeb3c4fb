"""Whether a run's export can be written, known before its first step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from trainer.adapters.formats import adapter_files
from trainer.adapters.state import TrainedAdapter
from trainer.config import SINGLE_FILES, NoAdapter, RunConfig
from trainer.export.model import original_tensors
from trainer.families.base import ModelFamily
from trainer.trained import layer_shapes, naming


def check_export(cfg: RunConfig, family: ModelFamily, trainables: Mapping[str, nn.Parameter]) -> None:
    """Raises InputError when `export.format` does not fit the family or the adapter's sizes.

    The files are made of tensors without data: what the writer refuses it refuses here.
    """
    if cfg.export_what in ("merged", "full") and cfg.export.format in SINGLE_FILES:
        original_tensors(family)
    if cfg.export_what != "adapter":
        return
    assert not isinstance(cfg.adapter, NoAdapter)
    shapes = layer_shapes(family)
    with torch.device("meta"):
        weights = {name: torch.empty(p.shape) for name, p in trainables.items()}
        layers = TrainedAdapter(weights, cfg.adapter, lambda name: torch.empty(shapes[name]))
        adapter_files(layers, cfg.export.format, naming(family), lambda name: torch.empty(shapes[name]), torch.float32)
