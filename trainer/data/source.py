"""The two halves of a run's data: what the model is trained on, and what samples are generated from.

See DECISIONS 74.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn

from trainer.data.loader import BatchSampler, BatchSizes
from trainer.distributed.context import RankContext
from trainer.models.objectives.base import Example
from trainer.rng import SampleRng
from trainer.run.manifest import Progress
from trainer.run.samples import Sample, SampleKind

Generate = Callable[[nn.ModuleDict, int, SampleRng], Sample]
"""(live components, index of the prompt, its random numbers) -> the content of the sample's file. Calls the model
equally often for every prompt of a group of `Sampler.groups`, so that ranks that share a sharded model stay
together."""


class DataSource(ABC):
    """Everything a run trains on and validates with. Every rank has its own, and all are equal.

    Attributes:
        unit: The unit that the speed of a run is counted in.
        changed_message: The warning when a resumed run finds data with another digest.
        digest: Digest of the training examples and their order.
        num_held_out: Number of validation examples.
    """

    unit: ClassVar[Literal["images", "tokens"]]
    changed_message: ClassVar[str]

    digest: str
    num_held_out: int

    @abstractmethod
    def batch_sampler(self, sizes: BatchSizes, saved: Progress | None) -> BatchSampler[Any]:
        """The batches of the run. saved: the checkpoint to continue from."""

    @abstractmethod
    def num_samples(self, epochs: float, context: RankContext) -> int:
        """Number of samples of the first `epochs` passes over the data of a run, at least 1. Collective.

        Raises:
            StopRequested: A stop was requested while they were counted.
        """

    @property
    def samples_of_an_epoch(self) -> float:
        """Mean number of samples of a pass over the data; NaN where it was not counted."""
        return math.nan

    @abstractmethod
    def example(self, item: Any) -> Example:
        """The example of an item of a batch. Called on a thread."""

    def loss_weight(self, item: Any) -> float:
        """The weight of an item's loss, > 0."""
        return 1.0

    def micro_batch(self, item: Any) -> int | None:
        """Most examples of a pass with this item; None for `train.micro_batch`."""
        return None

    def batch_key(self, item: Any) -> Hashable:
        """Items with equal keys may share a pass."""
        return None

    def position(self, step: int) -> Mapping[str, int]:
        """Where the data continue after `step` steps, for `Progress.place`; empty where the step count determines it.

        `step` must be one of the last steps.
        """
        return {}

    @abstractmethod
    def held_out(self, index: int) -> Example:
        """One validation example."""


class Sampler(ABC):
    """The prompts of a run's samples, and how samples are generated. Every rank has its own, and all are equal.

    Attributes:
        prompts: The prompt of each sample.
    """

    prompts: tuple[str, ...]

    @abstractmethod
    def change_prompts(self, prompts: Sequence[str]) -> None:
        """Generate from other prompts from now on. Collective.

        Args:
            prompts: Those that replace `sample.prompts`, checked by `run.prompts.check_prompts`.

        Raises:
            InputError: They cannot be encoded; raised on every rank. The former prompts stay.
        """

    @property
    def groups(self) -> tuple[range, ...]:
        """All samples, in groups that call the model equally often: ranks may generate those of a group in parallel."""
        return (range(len(self.prompts)),)

    def references(self, index: int) -> tuple[Path, ...]:
        """The reference images of a sample."""
        return ()

    @abstractmethod
    def kind(self, index: int) -> SampleKind:
        """The kind of a sample, which names its file before it exists."""

    @abstractmethod
    def prepare(self) -> Generate:
        """Load what sampling needs in addition to the model, and return the function that generates. Collective."""
