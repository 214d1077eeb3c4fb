"""heavy_ball: SGD with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.config.sections import OptimConfig

# In optim.py:


def _heavy_ball(groups: Sequence[dict[str, Any]], cfg: OptimConfig) -> Optimizer:
    return torch.optim.SGD(groups, cfg.lr, momentum=cfg.beta1, weight_decay=cfg.weight_decay)
