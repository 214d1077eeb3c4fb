"""The numbers of a step once the device has computed them: means, what is skipped, the step's event."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.distributed.world import World
from trainer.metrics.step_time import BACKWARD, DATA, FORWARD, OPTIMIZER, StepMarks
from trainer.parallel.compile import describe_compiled
from trainer.run.events import StepEvent
from trainer.system.errors import InputError
from trainer.train.numbers import LateRead
from trainer.train.setup import Ready

log = logging.getLogger(__name__)
SKIPS_IN_A_ROW = 20
"""A model without one finite number in so many steps is broken; further steps do not repair it."""


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step, equal on all ranks.

    Attributes:
        step: Optimizer steps until then, with this one.
        loss: Mean over the examples; NaN where it was not finite on some rank.
        weight: Examples of all ranks, without padding.
        tokens: Tokens in the loss of all ranks, for a language model.
        non_finite: Ranks whose loss was not finite.
        grad_norm: Norm of the gradients before clipping.
        losses, metrics: By name, as in `StepEvent`.
    """

    step: int
    loss: float
    weight: float
    tokens: float
    non_finite: int
    grad_norm: float
    losses: dict[str, float]
    metrics: dict[str, float]

    @property
    def is_skipped(self) -> bool:
        """Whether the weights were left as they are."""
        return bool(self.non_finite) or not math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device was given, whose numbers the host has not read.

    Attributes:
        step: As in `StepNumbers`.
        numbers: `Sums.row` of all ranks, then the gradient norm.
    """

    step: int
    lr: float
    numbers: LateRead
    marks: StepMarks


class StepLog:
    """Reads and logs the numbers of each step.

    Args:
        skipped: Steps of the run so far that left the weights as they were.

    Attributes:
        own_s: Seconds of the last step that this rank worked by itself.
    """

    def __init__(self, ready: Ready, world: World, skipped: int) -> None:
        self._cfg, self._world, self._log, self._model = ready.cfg, world, ready.log, ready.loaded.module
        self._family, self._objective = ready.family, ready.objective
        self._unit, self._batch_sizes = ready.data.unit, ready.batch_sizes
        self.skipped, self._skipped_in_a_row = skipped, 0
        self._is_first = True
        self.own_s = 0.0

    def read(self, launched: LaunchedStep) -> StepNumbers:
        """Wait for the numbers of a step and log them.

        Raises:
            FloatingPointError: A number is not finite and the step may not be skipped.
            InputError: The weights were not finite to begin with.
        """
        with self._world.heartbeat.waiting("all_reduce") if self._world.size > 1 else nullcontext():
            *row, grad_norm = launched.numbers.read()
        loss, losses, metrics = self.means(row)
        _, weight, tokens, non_finite, *_ = row
        numbers = StepNumbers(launched.step, loss, weight, tokens, int(non_finite), grad_norm, losses, metrics)
        if numbers.is_skipped:
            self._note_skipped(numbers)
        else:
            self._skipped_in_a_row = 0

        split, seconds = launched.marks.read(), launched.marks.seconds
        self.own_s = split["own"]
        log.debug("step %d: loss %.6g, gradient norm %.6g, seconds %s", launched.step, loss, grad_norm, dict(split))
        images = self._batch_sizes.of(launched.step - 1) * self._objective.images_per_example
        self._log.stepped(
            StepEvent(
                step=launched.step,
                loss=loss,
                lr=launched.lr,
                grad_norm=grad_norm,
                seconds=seconds,
                seconds_data=split[DATA],
                seconds_forward=split[FORWARD],
                seconds_backward=split[BACKWARD],
                seconds_optimizer=split[OPTIMIZER],
                seconds_communication=split["communication"],
                images_per_second=images / seconds if self._unit == "images" else math.nan,
                tokens_per_second=tokens / seconds if self._unit == "tokens" else math.nan,
                losses=losses,
                metrics=metrics,
            )
        )
        # Blocks are compiled when they first run, so that only now is known what the compiler made of them.
        if self._cfg.train.compile and self._is_first:
            compiled, left = describe_compiled()
            self._log.note("training", f"{compiled}; the first step took {seconds:.0f} s", launched.step)
            if left:
                self._log.warn(left, launched.step)
        self._is_first = False
        return numbers

    def means(self, row: Sequence[float]) -> tuple[float, dict[str, float], dict[str, float]]:
        """(loss, mean of each named loss that had items, mean of each metric). The loss is NaN where that of a rank was
        not finite.

        Args:
            row: `Sums.row`, summed over the ranks.
        """
        total, weight, _, non_finite, *parts = row
        sums = list(zip(parts[::2], parts[1::2], strict=True))
        loss = total / weight if weight else 0.0
        if shares := self._family.loss_weights:  # several losses, each a mean of its own; metrics follow them
            loss = sum(share * part / count for share, (part, count) in zip(shares, sums, strict=False) if count)
        num_losses = len(self._family.losses)
        losses, metrics = (
            {name: total / count for name, (total, count) in named if count and math.isfinite(total)}
            for named in (
                zip(self._family.losses, sums[:num_losses], strict=True),
                zip(self._objective.metrics, sums[num_losses:], strict=True),
            )
        )
        return math.nan if non_finite else loss, losses, metrics

    def _note_skipped(self, numbers: StepNumbers) -> None:
        """Count a step that left the weights unchanged, or end the run: all ranks see the same loss and norm."""
        reason = (
            f"step {numbers.step}: the loss is not finite on {numbers.non_finite} of {self._world.data_size} ranks"
            if numbers.non_finite
            else f"step {numbers.step}: the gradient norm is {numbers.grad_norm}, the loss {numbers.loss}"
        )
        if not self._skipped_in_a_row:
            _check_weights(self._model, self._world)
        if self._cfg.train.non_finite == "stop":
            raise FloatingPointError(reason)
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == SKIPS_IN_A_ROW:
            raise FloatingPointError(f"{reason}, as in the {SKIPS_IN_A_ROW - 1} steps before")
        self._log.warn(f"{reason}; step skipped, {self.skipped} in this run so far", numbers.step)


def _check_weights(model: nn.Module, world: World) -> None:
    """Raise InputError for weights that are not finite: they were loaded so. Collective."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    weights = ((name, p.detach()) for name, p in model.named_parameters() if p.dtype in kinds)
    local = ((name, one.to_local() if isinstance(one, DTensor) else one) for name, one in weights)
    own = next((name for name, one in local if not one.isfinite().all()), None)
    if broken := next(filter(None, world.gather(own)), None):
        raise InputError(
            f"model.path: {broken} holds numbers that are not finite, so that no loss is; the file is damaged, "
            "or the model was trained to that: download it again, or name another one"
        )
