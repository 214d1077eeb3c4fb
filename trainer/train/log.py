"""What a run says of itself: its events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.distributed.world import World
from trainer.run.events import (
    Emit,
    LossyWriter,
)
from trainer.run.folder import RunDir


def speaker(run: RunDir, world: World, before: int = 0) -> Emit:
    """Rank 0's events go to the run folder, other ranks' nowhere: every rank says the same.

    before: optimizer steps of the stages before, which are added to those of the events.
    """
    if world.rank:
        return lambda event: None
    write = LossyWriter(run.events_file).write

    def say(event: Any) -> None:
        write(replace(event, step=event.step + before))

    return say
