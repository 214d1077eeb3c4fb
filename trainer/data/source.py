"""What a run feeds to its model and draws with it: one kind for models of images, others for those of text or both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from torch import nn

from trainer.data.loader import BatchSizes, Plan
from trainer.models.objectives import Example
from trainer.rng import SampleRng
from trainer.run.manifest import Progress

Draw = Callable[[nn.ModuleDict, int, SampleRng], bytes]
"""(live components, number of the prompt, its random numbers) -> the file of a sample. Calls the model equally often
for every prompt of a group of `Source.alike`, so that ranks that share a sharded model stay together."""


class Source(ABC):
    """Everything a run trains on, validates with and draws from. Every rank has its own, and all are the same.

    prompts: of the samples.  digest: of what is trained and in which order.  num_held_out: examples of the validation.
    """

    unit: ClassVar[Literal["images", "tokens"]]
    """What the speed of a run is counted in."""
    is_changed: ClassVar[str]
    """What to say where a run goes on with another digest."""

    prompts: tuple[str, ...]
    digest: str
    num_held_out: int

    @abstractmethod
    def follow_recipe(self, recipe: int) -> None:
        """Feed and draw by the recipe that a resumed run began with (`manifest.RECIPE`). Called before `plan`."""

    @abstractmethod
    def plan(self, sizes: BatchSizes, saved: Progress | None) -> Plan[Any]:
        """The batches of the run. saved: where it goes on."""

    @abstractmethod
    def example(self, item: Any) -> Example:
        """The example of an item of the plan. Called on a thread."""

    def loss_weight(self, item: Any) -> float:
        """The weight of an item's loss, > 0."""
        return 1.0

    def place(self, step: int) -> Mapping[str, int]:
        """Where the data go on after `step` steps, where the number of steps does not tell. Of one of the last steps.

        For `Progress.place`.
        """
        return {}

    @abstractmethod
    def held_out(self, index: int) -> Example:
        """One validation example."""

    @abstractmethod
    def suffix(self, index: int) -> str:
        """Of the file of a sample: .png, or .txt."""

    @property
    def alike(self) -> tuple[range, ...]:
        """All samples, in groups of those that call the model equally often, which ranks may draw side by side."""
        return (range(len(self.prompts)),)

    @abstractmethod
    def drawing(self) -> Draw:
        """How samples are drawn. Collective: what is needed besides the model is loaded."""
