"""Forward passes over micro-batches: their batch, their random numbers, their loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from trainer import adapters
from trainer.data.loader import MicroBatch, Prepared
from trainer.distributed.world import World
from trainer.metrics.step_time import StepTimer
from trainer.models.base import ModelFamily
from trainer.models.objectives.base import Example, Loss, Objective
from trainer.models.parts.language.neftune import noises
from trainer.rng import Draw, SampleRng
from trainer.system.pinned import pin, send
from trainer.train.numbers import Sums


class Passes:
    """The passes of one rank, in training and in validation.

    Args:
        model: The loaded components.

    Attributes:
        regularizers: The modules that draw in training mode only: dropout of the adapter, noise on embeddings.
    """

    def __init__(
        self, family: ModelFamily, objective: Objective, model: nn.ModuleDict, world: World, clock: StepTimer
    ) -> None:
        self._family, self._objective, self._model, self._world = family, objective, model, world
        self._clock = clock
        self._dropouts, self._noises = adapters.dropouts(model), noises(model)
        self.regularizers: tuple[nn.Module, ...] = (*self._dropouts, *self._noises)
        self._asked: defaultdict[Hashable, set[Draw]] = defaultdict(set)  # by a pass with a batch of these shapes

    def prepare(
        self, seed: int, examples: Sequence[Example], weights: Sequence[float], indices: Sequence[int]
    ) -> Prepared:
        """Collate examples that share a batch key; the weight of padding is 0. The loader calls it ahead of time."""
        device = self._world.device
        # Keyed by the global index of each sample, never by rank: any number of ranks draws the same noise.
        examples, weights, rng = self._objective.items(examples, weights, SampleRng(seed, indices, device))
        batch = {**self._family.collate(examples), "weight": torch.tensor(weights)}
        shapes = tuple((name, tensor.shape) for name, tensor in batch.items())
        rng = rng.ahead(self._asked[shapes])
        return Prepared({name: pin(tensor, device) for name, tensor in batch.items()}, rng)

    def loss(self, prepared: Prepared) -> Loss:
        """Run the model. Collective where it is sharded."""
        batch, rng, device = prepared.batch, prepared.rng, self._world.device
        if self._dropouts:
            rows = self._family.sample_rows(batch)
            adapters.set_samples(self._dropouts, rng.seed, rng.indices, rows, device)
        for noise in self._noises:
            noise.set_samples(rng.seed, rng.indices, batch["documents"], device)
        on_device = {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
        return self._objective.loss(self._family, self._model, on_device, rng)

    def sums(self, dtype: torch.dtype = torch.float32) -> Sums:
        """The sums of no pass yet, on the device."""
        num_parts = len(self._family.losses) + len(self._objective.metrics)
        return Sums.zero(num_parts, torch.empty(0, dtype=dtype, device=self._world.device))

    def shares(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Weight of each sum of `Loss.parts` in the loss of the step, for a family with `loss_weights`. Collective.

        Each mean is over the whole step, so its denominator must be known before the first backward. It follows from
        the examples, which a rank has read only for itself: one more small reduction, for such families alone.
        """
        weights = self._family.loss_weights
        if not weights:
            return None
        counts = torch.zeros(len(weights), dtype=torch.float64)
        for micro_batch in micro_batches:
            for example, weight in zip(micro_batch.examples, micro_batch.weights, strict=True):
                if weight:
                    counts += torch.tensor(self._family.loss_counts(example), dtype=torch.float64)
        with self._clock.communication():
            self._world.sum_over_data(counts)
        shares = [weight / total if total else 0.0 for weight, total in zip(weights, counts.tolist(), strict=True)]
        return send(torch.tensor(shares), self._world.device)
