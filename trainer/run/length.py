"""How long a run is, in optimizer steps: from its config, or from its events where epochs or the time decide."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Self

from trainer.config.schema import RunConfig
from trainer.run.events import AnyEvent, LengthEvent, StageEvent, is_start

TYPICAL_STEPS = 1000
"""Steps by which curves are smoothed while the length of a run is not known."""


class RunLength:
    """The length of a run as far as it is known. Take the events in order with `add`.

    Attributes:
        cfg: The config that the run was last started with. Assign another before its start is added.
    """

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg
        self._steps = list(cfg.stage_steps)
        self._epochs = list(cfg.stage_epochs)
        self._stage = 0
        self._latest: LengthEvent | None = None

    @classmethod
    def of(cls, cfg: RunConfig, events: Iterable[AnyEvent]) -> Self:
        """Return the length of a run with these events. cfg: the config that it was last started with."""
        length = cls(cfg)
        for event in events:
            length.add(event)
        return length

    def add(self, event: AnyEvent) -> None:
        """Take the next event of the run."""
        match event:
            case StageEvent():
                self._stage = event.number - 1
            case LengthEvent() if self._stage < len(self._steps):
                self._latest = event
                self._steps[self._stage] = event.steps  # it may differ: of `train.epochs`, or `train.time_limit`
            case _ if is_start(event):
                # Begin again with a config that may have changed; the stages that have ended keep their steps.
                ended, self._latest = self._steps[: self._stage], None
                self._epochs, fresh = list(self.cfg.stage_epochs), list(self.cfg.stage_steps)
                self._steps = [*ended[: len(fresh)], *fresh[len(ended) :]]

    @property
    def stages(self) -> tuple[int, ...]:
        """Steps of each stage, 0 where they are not known."""
        return tuple(steps or 0 for steps in self._steps)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; 0 while they are not known."""
        return 0 if None in self._steps else sum(self.stages)

    @property
    def typical(self) -> int:
        """The steps that are known, at least 1, or TYPICAL_STEPS where none are: for the smoothing of curves."""
        return sum(self.stages) or TYPICAL_STEPS

    def epoch(self, step: int) -> float | None:
        """Return the passes over the data up to a step of the current stage, counted over all stages' steps.

        None where the length of an epoch is not known.
        """
        if self._latest is None or not self._latest.epoch_steps > 0:
            return None
        return max(0.0, self._latest.epoch + (step - self._latest.step) / self._latest.epoch_steps)

    @property
    def epochs(self) -> float | None:
        """`train.epochs` of the current stage."""
        return self._epochs[min(self._stage, len(self._epochs) - 1)]

    def __str__(self) -> str:
        """The length in words: "1,200", "3 epochs", or "1,200 + 2 epochs" for stages."""
        if None not in self._steps:
            return f"{self.num_steps:,}"
        parts: list[str] = [f"{sum(self.stages):,}"] if any(self.stages) else []
        for steps, epochs in zip(self._steps, self._epochs, strict=True):
            if steps is None and epochs is not None:
                parts.append(in_epochs(epochs))
        return " + ".join(parts)

    def epoch_in_words(self, step: int) -> str:
        """Return where a step is in the epochs: "epoch 1.1 of 4", "epoch 1.1", or "" where it is not known."""
        epoch = self.epoch(step)
        if epoch is None or not math.isfinite(epoch):
            return ""
        epochs = self.epochs
        # The last step may be a short one.
        return f"epoch {epoch:.1f}" if epochs is None else f"epoch {min(epoch, epochs):.1f} of {epochs:g}"


def in_epochs(epochs: float) -> str:
    """Return a number of epochs in words."""
    return f"{epochs:g} epoch" + "s" * (epochs != 1)
