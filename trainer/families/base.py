"""What the trainer must know about one kind of model.

A family is one module in this folder with a class derived from `ModelFamily`, named by `FAMILY = <class>` at its end.
It knows nothing of sharding, adapters or files of a run; it is given a way to load its encoders and returns tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image
from torch import nn

from trainer.config import InputError, ModelConfig, ObjectiveConfig, SampleConfig, not_one_of
from trainer.objectives import Batch, Example, Loss
from trainer.rng import SampleRng
from trainer.weights import WeightFiles

LoadModule = Callable[[nn.Module, WeightFiles, Sequence[str]], nn.Module]
"""(module on the meta device, its weights, class names of its shardable blocks) -> the module, frozen, in eval mode,
on this rank's device and in its own types, sharded when block names are given. Every rank must then call it equally
often. Buffers that are in no file are undefined afterwards."""


class ModelFamily(ABC):
    """One kind of model. Made once per process from the config; holds no weights itself.

    model: the config's section.  objective: the config's section.  cache: a folder shared between runs, where a
    `tiny` model is written as a diffusers folder.  Raises InputError when `model.path` does not hold such a model, or
    `model.train` names a component it does not have.
    """

    components: ClassVar[tuple[str, ...]]
    """Names allowed in `model.train`; the first is the one that is trained by default and returned by `build`."""
    shard_blocks: ClassVar[tuple[str, ...]]
    """Class names of the modules that are sharded one by one."""
    adapter_targets: ClassVar[tuple[str, ...]]
    """Regular expressions (full match on module names) of the layers an adapter changes by default."""
    forward_methods: ClassVar[tuple[str, ...]] = ()
    """Entry points of the model besides `forward`. Never one that `forward` calls."""
    size_multiple: ClassVar[int]
    """Width and height of images are multiples of this many pixels."""
    export_prefix: ClassVar[str]
    """Prefix of adapter keys in a diffusers file, as `transformer.`."""
    model_spec: ClassVar[str]
    """Name of the model in the metadata of exported files (modelspec.architecture)."""

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        for component in model.train:
            if component not in self.components:
                raise InputError(f"model.train: {not_one_of(component, self.components)}")
        self.config = model
        self.objective = objective
        self.cache = cache

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The diffusers folder with the model's configs; for `tiny` a folder under `cache`, written when missing."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The model on the meta device: architecture only, fp32 parameters."""

    @abstractmethod
    def weights(self) -> WeightFiles:
        """Where the weights of `build()` lie."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the encoders or how they are used change: part of the key of everything cached."""

    @abstractmethod
    def text_encoder(self, load: LoadModule) -> Any:
        """The text encoder(s) with tokenizer, ready for `encode_text`. Collective when `load` shards."""

    @abstractmethod
    def image_encoder(self, load: LoadModule) -> Any:
        """The autoencoder, ready for `encode_image` and `sample`. Replicated: no rank waits for another in it."""

    @abstractmethod
    def encode_text(self, encoder: Any, caption: str) -> Example:
        """Text embeddings of one caption, on the CPU, without batch dim. Collective when the encoder is sharded."""

    @abstractmethod
    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        """Latents of one RGB image whose sides are multiples of `size_multiple`, on the CPU, without batch dim."""

    @abstractmethod
    def batch_key(self, example: Example) -> Hashable:
        """Examples with equal keys may share a batch: same image size, same text length."""

    @abstractmethod
    def collate(self, examples: Sequence[Example]) -> Batch:
        """Examples of one batch key, stacked."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, rng: SampleRng) -> Loss:
        """The training loss of one micro-batch. batch["weight"]: (B,) weight of each item, 0 for padding.

        Timestep and noise come from `rng`; the model is called exactly once.
        """

    @abstractmethod
    def sample(
        self, model: nn.Module, encoder: Any, text: Example, negative: Example | None, cfg: SampleConfig, rng: SampleRng
    ) -> Image.Image:
        """One picture. `encoder` is `image_encoder`'s. Calls the model a number of times that depends on `cfg` only."""

    @abstractmethod
    def load_adapter_file(self, model: nn.Module, file: Path) -> None:
        """Load an exported adapter into `build()`'s model through the code a diffusers user runs.

        The base may stay on the meta device; the adapter's tensors are real afterwards.
        """

    @classmethod
    @abstractmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        """Architecture of a model that trains in seconds on a CPU: {component: its config}."""
