"""The arguments that every part of a rank's work takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.run.events import Emit


@dataclass(frozen=True)
class RankContext:
    """A run and the rank that works on it.

    Attributes:
        cache: Folder shared by runs, for encoded data and tiny models.
        emit: Takes events; only rank 0's reach a reader.
        is_stopping: Whether this rank should stop.
    """

    cfg: RunConfig
    world: World
    cache: Path
    emit: Emit
    is_stopping: Callable[[], bool] = lambda: False
