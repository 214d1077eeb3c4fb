"""The base classes of model families: everything the trainer must know about one kind of model.

A family is one module in `families` with a class derived from `ModelFamily`, named by `FAMILY = <class>` at its end.
It knows nothing of sharding, adapters or files of a run; it gets a function that loads encoders, and returns tensors.

See DECISIONS 18, 35.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from trainer.config.families import Distilled, Edits
from trainer.config.schema import RunConfig
from trainer.config.sections import (
    ADAPTERS,
    CompleteSample,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    SampleConfig,
)
from trainer.config.size import Size
from trainer.models import distilled, editing
from trainer.models.objectives.base import Batch, Example, Loss
from trainer.models.objectives.flow_matching import Shift
from trainer.models.parts.dropout import configured_dropout, dropout_warning
from trainer.models.parts.folder import DIFFUSERS_STEM, ModelFolder, copy_files
from trainer.models.parts.language.document_attention import document_begins
from trainer.parallel.parallelize import ShardSpec
from trainer.rng import SampleRng
from trainer.system.errors import InputError
from trainer.weights.files import Fused, WeightFiles

LoadModule = Callable[[nn.Module, WeightFiles, Sequence[str]], nn.Module]
"""(module on the meta device, its weights, class names of its shardable blocks) -> the module, frozen, in eval mode,
on this rank's device. With block names the module is sharded and in the run's compute type, and every rank must call it
equally often; without, it is whole and in its own type. Buffers that no file holds are undefined afterwards."""

FLOW_FIELDS = frozenset({"density", "logit_mean", "logit_std", "mode_scale", "shift", "shift_factor"})
"""Fields of `objective` that flow matching reads; models with a guidance embedding also read "guidance"."""
DIFFUSION_FIELDS = frozenset({"prediction", "zero_terminal_snr", "min_snr_gamma"})
"""Fields of `objective` that discrete diffusion reads."""
DIFFUSION_SAMPLE = frozenset({"scheduler"})
"""Fields of `sample` that only discrete diffusion reads."""
TEXT_DATA = frozenset({"length", "shuffle_window", "chat_template", "system", "packing", "too_long"})
"""Fields of `data` that only language models read."""
TEXT_SAMPLE = frozenset({"tokens", "temperature"})
"""Fields of `sample` that only models that write text read."""
CHAT_SAMPLE = frozenset({"chat"})
"""Fields of `sample` that only language models read."""
REJECTED_DATA = frozenset({"rejected"})
"""Fields of `data` that only models which are trained on preferences between images read."""
Weigh = Callable[[Tensor], Tensor]
"""(losses of tokens (n,), fp32, without gradient) -> the weight of each, (n,)."""
FRAMED_DATA = frozenset({"resolutions", "at_resolutions", "fit", "most_cropped", "flip"})
"""Fields of `data` that only models read which draw in buckets."""
QUESTION_DATA = frozenset(
    {"questions", "question_share", "seen_resolution", "latents_dropout", "vision_dropout", "pack_tokens"}
)
"""Fields of `data` that only models that draw and answer read."""
QUESTION_SAMPLE = frozenset({"questions", "images", "image_guidance"})
"""Fields of `sample` that only models that draw and answer read."""
Mode = Literal["frozen", "adapter", "full"]
"""How a component, module or parameter is trained."""


@dataclass(frozen=True)
class TextLength:
    """How much of a text one encoder reads.

    Attributes:
        encoder: The encoder's component.
        needed: Tokens of the whole text, with the encoder's template, beginning and end.
        read: Most tokens that the encoder reads.
        rest: The end of the text that is not read.
    """

    encoder: str
    needed: int
    read: int
    rest: str

    @property
    def is_cut(self) -> bool:
        """Whether the encoder reads less than the text. If only the template's end is cut, `rest` is empty."""
        return self.needed > self.read


class ModelFamily(ABC):
    """One kind of model. An instance is made once per process from the config and holds no weights.

    Args:
        model: The config's section `model`.
        objective: The config's section `objective`.
        cache: A folder shared by runs, where a `tiny` model is written as a diffusers folder.

    Raises:
        InputError: `model.path` does not hold such a model.
    """

    components: ClassVar[tuple[str, ...]]
    """Names allowed in `model.train`, as diffusers names the parts of its pipeline. The first is the denoiser, or the
    language model, which is trained by default; the others are text encoders."""
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Parts of the first component that are trained separately: {name in `model.train`, instead of the component's
    name: regular expressions of the part's modules}. Together the parts cover all modules with weights."""
    losses: ClassVar[tuple[str, ...]] = ()
    """Names of the losses whose weighted sum is trained, if there are several."""
    loss_weights: tuple[float, ...] = ()
    """Weight of each of `losses`: the loss of a step is the sum of weight x mean, each mean over all that has this loss
    in the whole step. Empty: a step has one mean, of `Loss.total`."""
    trains_on: ClassVar[Literal["images", "text"]]
    """The kind of data that a run feeds to the model."""
    data_fields: ClassVar[frozenset[str]]
    """Fields of the section `data` that the family reads; the others must keep their defaults."""
    sample_fields: ClassVar[frozenset[str]]
    """Fields of the section `sample` that the family reads; the others must keep their defaults."""
    sample_guidance: ClassVar[float] = distilled.GUIDANCE
    """Guidance of samples where the config has none, as the models' publisher recommends."""
    reads_references: ClassVar[bool] = False
    """Whether models of the family can take reference images (`data.references`) as input."""
    edits: ClassVar[tuple[Edits, ...]] = ()
    """Published models that edit images, where the family's other models read no reference images."""
    size_multiple: ClassVar[int] = 1
    """Width and height of images are multiples of this many pixels."""
    token_side: ClassVar[int | None] = None
    """Pixels along a side of a latent token; None for `size_multiple`."""
    in_buckets: ClassVar[bool] = True
    """Whether images are cropped to the buckets of `data.resolution`; else `ImageFamily.drawn_size` scales each."""
    longest_side: int | None = None
    """Most pixels of the longest side of an image; None for no limit. The class has that of the published models."""
    is_concluded: ClassVar[bool] = False
    """Whether how the model is called was concluded of its folder: its certificate then decides whether it trains."""
    frames: ClassVar[tuple[int, ...]] = (1,)
    """The numbers of frames of what it trains on and draws, from few to many; 1 for stills."""
    weights_stem: ClassVar[str] = DIFFUSERS_STEM
    """Name of the first component's weight files, without number and suffix."""
    shard: ShardSpec
    """The blocks that are sharded one by one, and the entry points of the denoiser."""
    adapter_targets: Mapping[str, tuple[str, ...]]
    """{component: regular expressions (full match on module names) of the linear layers adapters change by default}."""
    conv_targets: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The same for convolutions, which adapters with a `conv_rank` also change."""
    halves_swapped: ClassVar[tuple[str, ...]] = ()
    """Layers (regular expressions) whose output halves have the other order in original files. A low-rank update
    survives that; adapters that depend on whole rows (dora, diag-oft, boft) do not, and skip these layers."""
    objective_fields: ClassVar[frozenset[str]] = FLOW_FIELDS
    """Fields of the section `objective` that the family reads, whichever the objective."""
    options_read: ClassVar[frozenset[str]] = frozenset({"architecture"})
    """Fields of the section `model.options` that the family reads; the others must keep their defaults."""
    conditional_fields: ClassVar[Mapping[str, tuple[str, str, bool]]] = {}
    """Fields of `objective` that only some of the family's models read: {field: (JSON file of the folder, the key in it
    that is true in those models, its value where the file has no such key)}."""
    optional_encoders: ClassVar[tuple[str, ...]] = ()
    """Text encoders that `model.options.without` may name."""
    architectures: ClassVar[tuple[str, ...]]
    """Published models, as `model.options.architecture` names them."""
    default_architecture: ClassVar[str]
    """The architecture that is used if none is named."""
    distilled: ClassVar[tuple[Distilled, ...]] = ()
    """Published models that were distilled to sample in few steps without guidance. The first one is assumed if
    `model.options.distilled` is the only indication."""
    single_file: ClassVar[tuple[str, ...]] = ()
    """Parts of the pipeline in the original single file, each with a `layout`. Empty: only the denoiser."""
    diffusers_adapters: ClassVar[frozenset[str]] = frozenset(
        name for name, adapter in ADAPTERS.items() if adapter.in_diffusers
    )
    """Adapter types whose own tensors diffusers' loader reads for this model."""

    model_files: ClassVar[Mapping[str, tuple[str, str]]]
    """{JSON file that every folder of such a model has: (key in it, its value)}. An empty value stands for any, an
    empty key for a file that names nothing."""
    companion_files: ClassVar[tuple[str, ...]] = ()
    """Files of the model's folder that an export of the whole model copies."""
    tokenizer_files: ClassVar[tuple[str, ...]] = ()
    """Files of the model's folder with the tokenizer and its chat template, for folders of whole models and of peft."""
    keeps_layout: ClassVar[bool] = False
    """Whether an export of the whole model is one file in the original layout, as in the published folder."""

    kohya_prefixes: ClassVar[Mapping[str, str]] = {"transformer": "lora_unet"}
    """{component: prefix of its layers' names in kohya's files}."""
    kohya_by_path: ClassVar[bool] = False
    """Whether kohya's names are built from diffusers' paths (which all readers of kohya's files accept), not from
    `layout`."""

    _folder: ModelFolder
    """The model's folder; the family's constructor opens it."""

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        self.config = model
        self.objective = objective
        self.cache = cache

    @classmethod
    def trained_names(cls) -> tuple[str, ...]:
        """Names allowed in `model.train`."""
        return (*cls.parts, *cls.components[1:]) if cls.parts else cls.components

    def mode(self, cfg: RunConfig, name: str) -> Mode:
        """How a component, module or parameter is trained. name: with its component."""
        component, _, inside = name.partition(".")
        if component == self.components[0]:
            for part, patterns in self.parts.items():
                if any(re.fullmatch(rf"({pattern})(\..+)?", inside) for pattern in patterns):
                    return cfg.mode(part)
        return cfg.mode(component)

    def modes(self, cfg: RunConfig, component: str) -> frozenset[Mode]:
        """How the parts of a component are trained."""
        parts = self.parts if component == self.components[0] else {}
        return frozenset(cfg.mode(part) for part in parts or (component,))

    @property
    def live(self) -> tuple[str, ...]:
        """Components that are part of the model in training: the denoiser, and all others that are not frozen.

        A frozen text encoder runs once per caption, when the data are encoded.
        """
        train = self.config.train
        return tuple(c for c in self.components if c == self.components[0] or train.get(c, "frozen") != "frozen")

    @property
    def never_trained(self) -> tuple[str, ...]:
        """Parameters (regular expressions) that get no gradient in this kind of training: they are frozen in a full
        fine-tune, and adapters skip them."""
        return ()

    @property
    def folder(self) -> Path:
        """The diffusers folder with the model's configs; for `tiny` a folder under `cache`, written if missing."""
        return self._folder.path

    @property
    def file_markers(self) -> tuple[str, ...]:
        """Empty tensors that tell other programs how a model in its original layout was trained."""
        return ()

    @property
    def file_metadata(self) -> Mapping[str, str]:
        """Additional strings in the header of exported files."""
        return {}

    @property
    def changed_configs(self) -> Mapping[str, Mapping[str, Any]]:
        """{path in the model's folder: config} of configs with other values in training than in the folder."""
        return {}

    @property
    def peft_fields(self) -> Mapping[str, str | bool] | None:
        """Fields of peft's adapter config, for models whose adapters only peft reads; None for others."""
        return None

    @property
    def adapter_metadata(self) -> Mapping[str, str]:
        """Strings in the header of exported adapters, in addition to those of every family."""
        return {}

    @property
    def must_train(self) -> Mapping[str, str]:
        """{parameter that must be trained: why}. Names with the component."""
        return {}

    @property
    def stops_of_its_own(self) -> tuple[str, ...]:
        """The tokens that end an answer and at which the base's files stop no program."""
        return ()

    def exported_config(self, component: str, config: dict[str, Any]) -> dict[str, Any]:
        """The config.json of an exported component. config: that of the model's folder."""
        return config

    def write_tokenizer(self, folder: Path) -> None:
        """Write `tokenizer_files` to the folder of an exported language model or adapter, and what else programs read
        of how its texts begin and end."""
        copy_files(self.folder, self.tokenizer_files, folder)

    def warnings(self, cfg: RunConfig) -> tuple[str, ...]:
        """Sentences about this model and config to show before training; the run starts anyway.

        A family may add its own.
        """
        configs = {self.component_folder(name) / "config.json": self.component_config(name) for name in self.live}
        dropouts = {file: configured_dropout(config) for file, config in configs.items()}
        return tuple(dropout_warning(file, fields) for file, fields in dropouts.items() if fields)

    def component_folder(self, component: str) -> Path:
        """The folder of the component's config.json."""
        return self.folder / component

    def component_config(self, component: str) -> Mapping[str, Any]:
        """The published config of the component."""
        config: dict[str, Any] = json.loads((self.component_folder(component) / "config.json").read_text("utf-8"))
        return config

    def is_target(self, layer: str) -> bool:
        """Whether adapters change the linear layer by default. layer: with its component, `transformer.proj_out`."""
        component, _, inside = layer.partition(".")
        return any(re.fullmatch(pattern, inside) for pattern in self.adapter_targets.get(component, ()))

    @property
    @abstractmethod
    def model_spec(self) -> str:
        """Name of the model in the metadata of exported files (modelspec.architecture), as `Flux.2-dev`."""

    @abstractmethod
    def build(self, component: str) -> nn.Module:
        """Build a component on the meta device: architecture only, fp32 parameters."""

    def weights(self, component: str) -> WeightFiles:
        """The files with the weights of `build(component)`, by diffusers names."""
        return self._folder.denoiser_weights(component, self.build(component), self.layout(component))

    def written(self, component: str) -> Mapping[str, Tensor]:
        """{name in the files of a whole model: how it is made of the module's tensors}, where the folder has other
        names than the module; empty where the names are the module's."""
        return {}

    def read_export(self, component: str, files: Sequence[Path]) -> WeightFiles:
        """The tensors of an export's files by the names of `build(component)`."""
        return WeightFiles.read(files)

    def loaded_by_users(self, component: str, folder: Path, numbers: bool = True) -> Mapping[str, Tensor]:
        """The tensors of a whole model's folder as users' programs load it, by the names of `build(component)`, where
        their library decides more than names and numbers of the files tell. Empty where it does not, for a folder too
        large to load, and without `numbers`: then only which tensors there are is compared.

        Raises:
            RuntimeError: What they load is another model.
        """
        return {}

    @property
    def blocks(self) -> tuple[str, ...]:
        """Class names of the blocks whose linear layers are stored in fewer bits."""
        return self.shard.blocks

    def follow(self, cfg: RunConfig) -> None:
        """Take what depends on other sections of the config; nothing by default. Called once, by `families.make`."""
        return

    def computed_buffers(self, component: str) -> Mapping[str, Tensor]:
        """Buffers that `build(component)` computes on construction and no file holds, by name, on the CPU."""
        return {}

    @abstractmethod
    def layout(self, component: str) -> tuple[Fused, ...]:
        """The component's tensors under the names of its original single file."""

    def modules_in_peft(self, component: str) -> Collection[str]:
        """The names of all modules of the component, as the model has them that peft loads."""
        layout = self.layout(component)
        if self.peft_fields is None or not layout:
            return [name for name, _ in self.build(component).named_modules()]
        paths = [tensor.name.split(".")[:-1] for tensor in layout]
        return {".".join(path[:count]) for path in paths for count in range(1, len(path) + 1)}

    @abstractmethod
    def batch_key(self, example: Example) -> Hashable:
        """Examples with equal keys may share a batch: same image size, same text length, same references."""

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Stack examples with equal batch keys."""
        return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}

    def sample_rows(self, batch: Batch) -> Mapping[str, Tensor]:
        """Which item each row belongs to, for layers whose input has the rows of all items, not items first.

        Args:
            batch: A batch on the CPU.

        Returns:
            {pattern of layers: index of the item of each row, in the shape of the input without its features: (rows,)
            for a matrix}; other layers get one entry per item, or as many of each, all of an item before those of the
            next.
        """
        return {}

    @abstractmethod
    def loss(self, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        """The training loss of one micro-batch. Each component is called exactly once.

        Args:
            model: The live components by name.
            batch: A batch with "weight" (B,), the weight of each item, 0 for padding, and, if the data have masks,
                "mask" (B, h, w), weights of the latent pixels.
            rng: Source of timestep and noise.
        """

    def loss_counts(self, example: Example) -> tuple[float, ...]:
        """How much an example adds to the denominator of each mean of `losses`, for a family with `loss_weights`."""
        return ()

    @classmethod
    @abstractmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        """Config values of a published model that replace those of a tiny one: {folder or file: {key: value}}.

        architecture: one of `architectures`. For tokenizers, the value is their `model_max_length`.
        """

    @classmethod
    @abstractmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        """The configs of a model that trains in seconds on a CPU: {component: its config}.

        Under "model_index.json" are arguments of diffusers' pipeline other than its components, if it needs some.
        """


class ImageFamily(ModelFamily):
    """A model that generates images from captions, trained on latents and embeddings of frozen encoders."""

    trains_on = "images"
    shift: Shift = Shift()
    """The meaning of `objective.shift`, in flow matching."""
    reads_original_size: ClassVar[bool] = False
    """Whether a training example holds "original_size" (2,) int64: height and width in pixels of the image's file."""
    longest_text: ClassVar[int] = 0
    """The highest `model.options.max_tokens` of which diffusers' pipeline still reads all tokens."""
    data_fields = frozenset(DataConfig.model_fields) - TEXT_DATA - QUESTION_DATA
    sample_fields = (
        frozenset(SampleConfig.model_fields) - TEXT_SAMPLE - QUESTION_SAMPLE - DIFFUSION_SAMPLE - CHAT_SAMPLE
    )

    @classmethod
    def tokens_of(cls, size: Size) -> int:
        """Number of latent tokens of an image of this size."""
        side = cls.token_side or cls.size_multiple
        return (size.width // side) * (size.height // side)

    @property
    def is_distilled(self) -> bool:
        """Whether the model was distilled to sample in few steps without guidance, by its folder or the config."""
        return bool(distilled.matches(self.config, self.folder))

    def complete_sample(self, sample: SampleConfig) -> CompleteSample:
        """Complete the section `sample` with the steps and guidance of this model."""
        return distilled.complete_sample(self.config, sample, self.folder)

    def warnings(self, cfg: RunConfig) -> tuple[str, ...]:
        known = (*distilled.warnings(cfg, self.folder), *editing.warnings(cfg, self.folder))
        return (*super().warnings(cfg), *known)

    @abstractmethod
    def fingerprint(self) -> str:
        """A digest that changes with the encoders and how they are used; part of the key of everything cached."""

    @abstractmethod
    def text_encoder(self, load: LoadModule) -> Any:
        """Load the frozen text encoder(s) with tokenizer, for `encode_text`. Collective when `load` shards."""

    @abstractmethod
    def image_encoder(self, load: LoadModule) -> Any:
        """Load the autoencoder, for `encode_image` and `sample`. It is replicated: ranks do not wait for each other."""

    def guides(self, load: LoadModule) -> Mapping[str, nn.Module]:
        """Load the frozen components that predict what samples with guidance are pushed away from, by name, for models
        that have some in place of a negative prompt. Only samples use them. Collective when `load` shards."""
        return {}

    @abstractmethod
    def encode_text(self, encoder: Any, caption: str) -> Example:
        """Encode one caption, on the CPU, without batch dim: embeddings of frozen encoders, token ids for live ones.

        Collective when the encoder is sharded.
        """

    @property
    def sees_references(self) -> bool:
        """Whether the text encoder sees the reference images with the caption."""
        return False

    def seen_size(self, size: Size) -> Size:
        """The size in which the text encoder sees a reference image of this size, for models where it does."""
        raise NotImplementedError(f"{type(self).__name__} reads captions alone")

    def encode_edit(self, encoder: Any, caption: str, images: Sequence[Image.Image]) -> Example:
        """`encode_text` of a caption with reference images (RGB, in `seen_size`), for models that see them."""
        raise NotImplementedError(f"{type(self).__name__} reads captions alone")

    def dropped_text(self, empty: Example, caption: Example) -> Example:
        """The replacement of a dropped caption: `empty`, in a shape that may share the caption's batch.

        Args:
            empty: The result of `encode_text` for the empty caption.
            caption: The result of `encode_text` for this caption, on the meta device (only shapes).
        """
        return empty

    @abstractmethod
    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        """Measure how much of each caption is read, by each encoder that gives the model states of its tokens.

        An encoder that gives the model only one vector of the whole caption does not count. The result of a caption is
        empty if captions of any length are read whole. Loads tokenizers, but no encoder.
        """

    def drawn_size(self, size: Size, resolution: int) -> Size | None:
        """The size to which an image of this size is scaled, for models that have a size for each image; None for
        models that train in the buckets of `data.resolution`."""
        return None

    def longer_text(self, length: TextLength) -> str | None:
        """The setting, as in a preset, that makes the encoder read more of the text, all of it if possible; None if
        there is none."""
        tokens = min(length.needed, self.longest_text)
        return f"model.options.max_tokens: {tokens}" if tokens > length.read else None

    @abstractmethod
    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        """Encode one RGB image whose sides are multiples of `size_multiple`, on the CPU, without batch dim.

        Returns "latents" (..., h, w); a mask of the loss is (h, w).
        """

    def sample(
        self,
        model: nn.ModuleDict,
        encoder: Any,
        text: Example,
        negative: Example | None,
        cfg: SampleConfig,
        rng: SampleRng,
    ) -> Image.Image:
        """Generate one image. The number of calls of the model depends only on `cfg`.

        Args:
            model: The live components by name, and with guidance those of `guides`.
            encoder: The result of `image_encoder`.
            text: The result of `encode_text`; may also hold references, as in a training example.
            negative: The result of `encode_text` for the negative prompt.
            cfg: The section `sample` of the config; `full_size` is the size to generate.
            rng: Random numbers of this sample.
        """
        return self.draw(model, encoder, text, negative, self.complete_sample(cfg), rng)

    @abstractmethod
    def draw(
        self,
        model: nn.ModuleDict,
        encoder: Any,
        text: Example,
        negative: Example | None,
        cfg: CompleteSample,
        rng: SampleRng,
    ) -> Image.Image:
        """`sample` with a complete section."""

    @abstractmethod
    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        """Load an adapter file into the components of `build` through the code that a diffusers user runs.

        The base may be on the meta device; the adapter's tensors are real afterwards.
        """

    @abstractmethod
    def blank_example(self, size: Size, text_tokens: int, dtype: torch.dtype) -> Example:
        """Zeros in the shapes and types of the joint results of `encode_image` and `encode_text`.

        Args:
            size: Size of the image.
            text_tokens: Tokens of the caption, unless captions are padded to a fixed length.
            dtype: Type of the text encoders.
        """


PartKind = Literal["text", "target", "conditioning", "clean", "drawn", "gap"]
"""Prompt text, target text, conditioning image, clean latents, latents to noise, and the gap of a dropped image."""


@dataclass(frozen=True)
class SequencePart:
    """A part of a sequence of text and images.

    Attributes:
        content: The text or its token ids, the RGB conditioning image in `conditioning_size`, or the latents of
            `encode_image`; None for a gap. To count tokens, an image is its size.
    """

    kind: PartKind
    content: str | Image.Image | Tensor | Size | None = None


class MultimodalFamily(ImageFamily):
    """A model that generates images and text, in one network that reads sequences of both.

    An example is the joint result of `encode_image` and `encode_text`, the result of `encode_sequence`, or that of
    `pack_examples`; an example of one drawn image may also hold "mask". The inputs of a sample may hold, for each image
    before the edit, its latents as "reference_0" and so on, and the result of `encode_conditioning` as
    "conditioning_0" and so on.
    """

    data_fields = frozenset(DataConfig.model_fields) - TEXT_DATA - REJECTED_DATA - FRAMED_DATA - {"reference_dropout"}
    sample_fields = frozenset(SampleConfig.model_fields) - DIFFUSION_SAMPLE - CHAT_SAMPLE
    losses = ("images", "text")
    diffusers_adapters = frozenset()

    @abstractmethod
    def drawn_size(self, size: Size, resolution: int) -> Size: ...

    @abstractmethod
    def conditioning_size(self, size: Size, cfg: DataConfig, count: int = 1) -> Size:
        """The size of a conditioning image.

        Args:
            size: Size of the image.
            cfg: The config's section `data`.
            count: Number of images that the sequence holds, if it draws none.
        """

    @abstractmethod
    def encode_conditioning(self, image: Image.Image) -> Tensor:
        """Encode an RGB image of `conditioning_size`, on the CPU."""

    @abstractmethod
    def encode_sequence(self, parts: Sequence[SequencePart]) -> Example:
        """Encode a sequence as an example. Called on a thread."""

    @abstractmethod
    def count_tokens(self, parts: Sequence[SequencePart]) -> int:
        """Tokens of a sequence, with all marks."""

    @abstractmethod
    def pack_examples(self, examples: Mapping[int, Example]) -> Example:
        """Join the examples of several samples into one. examples: {global sample index: example}."""

    @abstractmethod
    def answer(self, model: nn.ModuleDict, image: Image.Image, question: str, cfg: SampleConfig, rng: SampleRng) -> str:
        """Answer a question about an RGB image of `conditioning_size`. Only `cfg` decides how often the model runs."""

    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        raise InputError(f"{file}: diffusers has no loader for adapters of this model")


class TextFamily(ModelFamily):
    """A language model, trained on rows of tokens.

    An example holds "tokens", "loss_mask" and "documents", each (`data.length`,), as `text_stream.PackedRow` has them.
    A batch also holds "predicted" (n,), see `collate`.
    """

    trains_on = "text"
    any_network: ClassVar[bool] = False
    """Whether the config's model may be of any class of a library. What FSDP2 cannot follow of it is found when it is
    built; of our own networks, in the tests."""
    data_fields = frozenset({"path", "folders", "validation", "validation_every", "cache"}) | TEXT_DATA
    sample_fields = frozenset({"every", "prompts", "seed"}) | TEXT_SAMPLE | CHAT_SAMPLE

    @abstractmethod
    def embedding(self, model: nn.ModuleDict) -> nn.Module:
        """The module that embeds tokens. model: the live components."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the log about what is special in training this model."""
        return ()

    def chat_warnings(self, cfg: RunConfig) -> tuple[str, ...]:
        """Sentences about answers that programs would not end as this run teaches it. cfg: one that trains
        conversations."""
        return ()

    def shard_by(self, blocks: tuple[str, ...]) -> None:
        """Shard the model by these blocks."""
        self.shard = replace(self.shard, blocks=blocks)

    @property
    @abstractmethod
    def longest(self) -> int | None:
        """Most tokens of a row; None for no limit."""

    @property
    def packs_documents(self) -> bool:
        """Whether documents may share a row without seeing each other. Raises InputError if tokens see later ones."""
        return True

    @property
    @abstractmethod
    def begin_of_text(self) -> tuple[int, ...]:
        """The tokens before each document."""

    @property
    @abstractmethod
    def end_of_text(self) -> int:
        """The token after each document."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids the model knows."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, with no special token added."""

    @abstractmethod
    def weighted_loss(self, model: nn.ModuleDict, batch: Batch, weights: Tensor | Weigh) -> Tensor:
        """The weighted sum of the losses of the predicted tokens, a scalar. Each component is called exactly once.

        Args:
            model: The live components by name.
            batch: A batch of rows.
            weights: (n,), of the n tokens that follow those of "predicted"; or a function that returns them.
        """

    @abstractmethod
    def encode_chat(
        self, messages: object, tools: object = None, variables: object = None
    ) -> tuple[list[int], list[bool]]:
        """Tokenize a conversation with the chat template of the model or of `data.chat_template`.

        Args:
            messages: A list of {"role", "content"}, as in transformers, with optional `tool_calls`.
            tools: A list of descriptions of the tools that the assistant may call; None for none.
            variables: Values for variables of the template, as `enable_thinking`; None for none.

        Returns:
            The ids, and for each whether it is in the loss: the assistant's turns, with the token that ends each. What
            follows the last of them is left out; without any, there are no ids.

        Raises:
            InputError: The conversation or the template cannot be used; the message names neither file nor line.
        """

    def take_notes(self) -> list[str]:
        """Sentences about the conversations encoded since the last call: what of them is not used."""
        return []

    @abstractmethod
    def encode_pair(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        """Tokenize a prompt with its completion as one text.

        Returns:
            The ids without special tokens, and the loss mask: the tokens that hold a letter of the completion.
        """

    @abstractmethod
    def generate(self, model: nn.ModuleDict, prompt: str, cfg: SampleConfig, rng: SampleRng) -> str:
        """Generate the continuation of a prompt. The number of calls of the model depends only on `cfg`."""

    @abstractmethod
    def reply(self, model: nn.ModuleDict, question: str, cfg: SampleConfig, rng: SampleRng) -> str:
        """Generate the answer to a question of a user, by the chat template. It calls the model as `generate` does."""

    def batch_key(self, example: Example) -> Hashable:
        """Return one key: all rows have one length."""
        return None

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Stack examples, and number the tokens that are followed by one in the loss, row after row, in "predicted".

        There is at least one, so that every rank computes a loss. "begins" are as `document_begins` returns them.
        """
        batch = super().collate(examples)
        follows = torch.zeros_like(batch["loss_mask"])
        follows[:, :-1] = batch["loss_mask"][:, 1:]
        predicted = follows.flatten().nonzero().flatten()
        predicted = predicted if len(predicted) else torch.zeros(1, dtype=torch.int64)
        return {**batch, "predicted": predicted, "begins": document_begins(batch["documents"])}

    def sample_rows(self, batch: Batch) -> Mapping[str, Tensor]:
        """The item of each token, for models that flatten all tokens into one matrix before a layer, as for experts."""
        count, length = batch["tokens"].shape
        return {".+": torch.arange(count).repeat_interleave(length)}

    def blank_row(self, length: int) -> Example:
        """An example of `length` tokens in one document."""
        loss_mask = torch.ones(length, dtype=torch.bool)
        loss_mask[0] = False
        tokens = torch.zeros(length, dtype=torch.int64)
        return {"tokens": tokens, "loss_mask": loss_mask, "documents": tokens.clone()}


def references_of(example: Example | Batch) -> list[Tensor]:
    """Latents of the reference images, in order: "reference_0", "reference_1" and so on."""
    count = sum(key.startswith("reference_") for key in example)
    return [example[f"reference_{number}"] for number in range(count)]
