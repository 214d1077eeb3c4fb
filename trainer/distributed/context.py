"""What each part of a rank's work is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.run.events import Emit


def _never() -> bool:
    return False


@dataclass(frozen=True)
class RankContext:
    """A run as one rank works on it.

    cache: folder shared by runs, for encoded data and tiny models.  emit: takes events; only rank 0's reach a reader.
    is_stopping: whether this rank is asked to stop.
    """

    cfg: RunConfig
    world: World
    cache: Path
    emit: Emit
    is_stopping: Callable[[], bool] = _never
