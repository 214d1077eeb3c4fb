"""What the trainer must know about one kind of model.

A family is one module in this folder with a class derived from `ModelFamily`, named by `FAMILY = <class>` at its end.
It knows nothing of sharding, adapters or files of a run; it is given a way to load its encoders and returns tensors.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from trainer.config.errors import InputError, not_one_of
from trainer.config.families import Distilled
from trainer.config.schema import RunConfig
from trainer.config.sections import CompleteSample, DataConfig, ModelConfig, ObjectiveConfig, SampleConfig, Section
from trainer.models import distilled
from trainer.models.objectives import Batch, Example, Loss, Shift
from trainer.models.parts.dropout import asked_dropout, dropout_warning
from trainer.models.parts.folder import DIFFUSERS_STEM, ModelFolder
from trainer.parallel.parallelize import ShardSpec
from trainer.rng import SampleRng
from trainer.weights.files import Fused, WeightFiles

LoadModule = Callable[[nn.Module, WeightFiles, Sequence[str]], nn.Module]
"""(module on the meta device, its weights, class names of its shardable blocks) -> the module, frozen, in eval mode,
on this rank's device. With block names it is sharded and in the run's compute type, and every rank must call it
equally often; without it is whole and in its own type. Buffers that are in no file are undefined afterwards."""

FLOW_FIELDS = frozenset({"density", "logit_mean", "logit_std", "mode_scale", "shift", "shift_factor"})
"""What a family trained by flow matching reads of the section `objective`; "guidance" besides where it is told one."""
DIFFUSION_FIELDS = frozenset({"prediction", "zero_terminal_snr", "min_snr_gamma"})
"""What a family trained by discrete diffusion reads of it."""
DIFFUSION_SAMPLE = frozenset({"scheduler"})
"""Fields of the section `sample` that only mean something to such a family."""
TEXT_DATA = frozenset({"length", "shuffle_window"})
"""Fields of the section `data` that only mean something to language models."""
TEXT_SAMPLE = frozenset({"tokens", "temperature"})
"""Fields of the section `sample`, likewise."""
QUESTION_DATA = frozenset({"questions", "question_share"})
"""Fields of the section `data` that only mean something to models that answer questions about images."""
QUESTION_SAMPLE = frozenset({"questions", "images"})
"""Fields of the section `sample`, likewise."""
Mode = Literal["frozen", "adapter", "full"]
"""How something of a model is trained."""


@dataclass(frozen=True)
class TextLength:
    """How much of a text one encoder reads.

    encoder: its component.  needed: tokens of the whole text, with the encoder's template, beginning and end.  read: at
    most so many of them.  rest: the end of the text that is not read.
    """

    encoder: str
    needed: int
    read: int
    rest: str

    @property
    def is_cut(self) -> bool:
        """Whether the encoder reads less than the text. Where only the template's end is left out, `rest` is empty."""
        return self.needed > self.read


class ModelFamily(ABC):
    """One kind of model. Made once per process from the config; holds no weights itself.

    model: the config's section.  objective: the config's section.  cache: a folder shared between runs, where a
    `tiny` model is written as a diffusers folder.  Raises InputError when `model.path` does not hold such a model, or
    a section asks for what the family does not have.
    """

    components: ClassVar[tuple[str, ...]]
    """Names allowed in `model.train`, as diffusers names the parts of its pipeline. The first is the denoiser, or the
    language model, which is trained by default; the others are text encoders."""
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Of a first component whose parts are trained each in its own way: {name in `model.train`, in place of the
    component's: regular expressions of the modules it consists of}. Together they are all modules with weights."""
    losses: ClassVar[tuple[str, ...]] = ()
    """Names of the losses whose weighted sum is trained, where there are several."""
    trains_on: ClassVar[Literal["images", "text"]]
    """What a run feeds to the model."""
    data_fields: ClassVar[frozenset[str]]
    """Fields of the section `data` that mean something to it; the others must keep their defaults."""
    sample_fields: ClassVar[frozenset[str]]
    """Fields of the section `sample`, likewise."""
    reads_references: ClassVar[bool] = False
    """Whether the model can be given other images to make its own from (`data.references`)."""
    size_multiple: ClassVar[int] = 1
    """Width and height of images are multiples of this many pixels."""
    longest_side: ClassVar[int | None] = None
    """Pixels of the longest side an image may have; None for any."""
    weights_stem: ClassVar[str] = DIFFUSERS_STEM
    """Name of the first component's files of weights, without number and ending."""
    shard: ShardSpec
    """What is sharded one by one, and how the denoiser is entered."""
    adapter_targets: Mapping[str, tuple[str, ...]]
    """{component: regular expressions (full match on module names) of the linear layers adapters change by default}."""
    conv_targets: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The same for convolutions, which adapters with a `conv_rank` change besides."""
    halves_swapped: ClassVar[tuple[str, ...]] = ()
    """Layers (regular expressions) whose output halves stand in the other order in original files. A low-rank update
    survives that; what depends on whole rows (dora, diag-oft, boft) does not, and leaves them alone."""
    objective_fields: ClassVar[frozenset[str]] = FLOW_FIELDS
    """Fields of the section `objective` that the family reads; the others must keep their defaults."""
    options_read: ClassVar[frozenset[str]] = frozenset({"architecture"})
    """Fields of the section `model.options` that it reads, likewise."""
    optional_encoders: ClassVar[tuple[str, ...]] = ()
    """Text encoders that `model.options.without` may name."""
    architectures: ClassVar[tuple[str, ...]]
    """Published models, as `model.options.architecture` names them."""
    default_architecture: ClassVar[str]
    """The one that is meant where none is named."""
    distilled: ClassVar[tuple[Distilled, ...]] = ()
    """Published models that were distilled to draw in few steps without guidance. The first is meant where only
    `model.options.distilled` tells."""
    single_file: ClassVar[tuple[str, ...]] = ()
    """Parts of the pipeline that the original single file holds, each with a `layout`. Empty: the denoiser alone."""
    diffusers_adapters: ClassVar[frozenset[str]] = frozenset({"lora", "locon", "dora"})
    """Adapter types whose own tensors diffusers' loader reads for this model."""

    beside_weights: ClassVar[tuple[str, ...]] = ()
    """Files of the model's folder that go with an export of the whole model."""
    keeps_layout: ClassVar[bool] = False
    """Whether such an export holds one file in the original layout, as the published folder does."""

    kohya_prefixes: ClassVar[Mapping[str, str]] = {"transformer": "lora_unet"}
    """{component: what stands before its layers' names in kohya's files}."""
    kohya_by_path: ClassVar[bool] = False
    """Whether kohya's names are built from diffusers' paths (which all its readers accept), not from `layout`."""

    _folder: ModelFolder
    """Where the model lies: a family opens it when it is made."""

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        _check_names("model.train", model.train, self.trained_names())
        check_unread("model.options", model.options, self.options_read)
        _check_names("model.options.without", model.options.without, self.optional_encoders)
        check_unread("objective", objective, self.objective_fields)
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
        """Components that are part of the model in training: the denoiser, and every other that is not frozen.

        A frozen text encoder is run once per caption, when data are encoded.
        """
        train = self.config.train
        return tuple(c for c in self.components if c == self.components[0] or train.get(c, "frozen") != "frozen")

    @property
    def never_trained(self) -> tuple[str, ...]:
        """Parameters (regular expressions) that get no gradient in this kind of training: frozen in a full fine-tune,
        and left alone by adapters."""
        return ()

    @property
    def folder(self) -> Path:
        """The diffusers folder with the model's configs; for `tiny` a folder under `cache`, written when missing."""
        return self._folder.path

    @property
    def file_markers(self) -> tuple[str, ...]:
        """Empty tensors by which other programs know how a model in its original layout was trained."""
        return ()

    @property
    def file_metadata(self) -> Mapping[str, str]:
        """What the header of exported files says besides of this kind of model."""
        return {}

    @property
    def changed_configs(self) -> Mapping[str, Mapping[str, Any]]:
        """{path in the model's folder: config} of what was trained with other values than the folder has."""
        return {}

    @property
    def peft_fields(self) -> Mapping[str, str] | None:
        """What peft's config says of the model, where peft alone reads its adapters."""
        return None

    @property
    def adapter_metadata(self) -> Mapping[str, str]:
        """Strings in the header of exported adapters, in addition to those of every family."""
        return {}

    def warnings(self, cfg: RunConfig) -> tuple[str, ...]:
        """Sentences about this model and config that a user should read before training; the run starts anyway.

        A family that has more to say adds to these.
        """
        configs = {self.component_folder(name) / "config.json": self.component_config(name) for name in self.live}
        asked = {file: asked_dropout(config) for file, config in configs.items()}
        return tuple(dropout_warning(file, fields) for file, fields in asked.items() if fields)

    def component_folder(self, component: str) -> Path:
        """Where the component's config.json lies."""
        return self.folder / component

    def component_config(self, component: str) -> Mapping[str, Any]:
        """Everything that the published configs say of the component."""
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
        """A component on the meta device: architecture only, fp32 parameters."""

    def weights(self, component: str) -> WeightFiles:
        """Where the weights of `build(component)` lie, by diffusers names."""
        return self._folder.denoiser_weights(component, self.build(component), self.layout(component))

    def computed_buffers(self, component: str) -> Mapping[str, Tensor]:
        """What `build(component)` computes when it is made and no file holds, by name, on the CPU."""
        return {}

    @abstractmethod
    def layout(self, component: str) -> tuple[Fused, ...]:
        """The component's tensors as its original single file has them."""

    @abstractmethod
    def batch_key(self, example: Example) -> Hashable:
        """Examples with equal keys may share a batch: same image size, same text length, same references."""

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Examples of one batch key, stacked."""
        return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}

    def sample_rows(self, batch: Batch) -> Mapping[str, Tensor]:
        """Which item each row belongs to, for layers whose input is one matrix with the rows of all items.

        batch: on the CPU. Returns {pattern of layers: (rows,) number of the item}; other layers get one entry per item.
        """
        return {}

    @abstractmethod
    def loss(self, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        """The training loss of one micro-batch.

        model: the live components by name.  batch["weight"]: (B,) weight of each item, 0 for padding;
        batch["mask"]: (B, h, w) weights of the latent pixels, where the data have masks.
        Timestep and noise come from `rng`; each component is called exactly once.
        """

    @classmethod
    @abstractmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        """What the configs of a published model's parts have in place of a tiny one's: {folder or file: {key: value}}.

        architecture: one of `architectures`. Tokenizers by their `model_max_length`.
        """

    @classmethod
    @abstractmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        """Architecture of a model that trains in seconds on a CPU: {component: its config}."""


class ImageFamily(ModelFamily):
    """A model that draws pictures from captions, trained on latents and embeddings that frozen encoders make."""

    trains_on = "images"
    shift: ClassVar[Shift] = Shift()
    """What `objective.shift` means for it, in flow matching."""
    reads_original_size: ClassVar[bool] = False
    """Whether a training example holds "original_size" (2,) int64: height and width in pixels of the image's file."""
    longest_text: ClassVar[int] = 0
    """Tokens to which `model.options.max_tokens` can be raised and diffusers' pipeline still reads all of them."""
    data_fields = frozenset(DataConfig.model_fields) - TEXT_DATA - QUESTION_DATA
    sample_fields = frozenset(SampleConfig.model_fields) - TEXT_SAMPLE - QUESTION_SAMPLE - DIFFUSION_SAMPLE

    @property
    def is_distilled(self) -> bool:
        """Whether the model was distilled to draw in few steps without guidance, by its folder or the config."""
        return bool(distilled.found(self.config, self.folder))

    def drawn_with(self, sample: SampleConfig) -> CompleteSample:
        """The section with steps and guidance as this model draws."""
        return distilled.drawn_with(self.config, sample, self.folder)

    def warnings(self, cfg: RunConfig) -> tuple[str, ...]:
        return (*super().warnings(cfg), *distilled.warnings(cfg, self.folder))

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the encoders or how they are used change: part of the key of everything cached."""

    @abstractmethod
    def text_encoder(self, load: LoadModule) -> Any:
        """The frozen text encoder(s) with tokenizer, ready for `encode_text`. Collective when `load` shards."""

    @abstractmethod
    def image_encoder(self, load: LoadModule) -> Any:
        """The autoencoder, ready for `encode_image` and `sample`. Replicated: no rank waits for another in it."""

    @abstractmethod
    def encode_text(self, encoder: Any, caption: str) -> Example:
        """One caption, on the CPU, without batch dim: embeddings of frozen encoders, token ids for live ones.

        Collective when the encoder is sharded.
        """

    def dropped_text(self, empty: Example, caption: Example) -> Example:
        """What is trained in place of a caption that is dropped: `empty`, in a shape that may share its batch.

        empty: what `encode_text` made of the empty caption.  caption: the shapes of what it made of this one, on the
        meta device.
        """
        return empty

    @abstractmethod
    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        """How much of each caption is read, by each encoder that gives the model states of its tokens.

        An encoder that gives the model one vector of the whole caption does not count: no token of the caption depends
        on what it reads. Empty where captions of any length are read whole. Loads tokenizers, but no encoder.
        """

    def longer_text(self, length: TextLength) -> str | None:
        """The setting with which more of such a text is read, all of it if possible, as a preset has it; None without
        one."""
        tokens = min(length.needed, self.longest_text)
        return f"model.options.max_tokens: {tokens}" if tokens > length.read else None

    @abstractmethod
    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        """One RGB image whose sides are multiples of `size_multiple`, on the CPU, without batch dim.

        "latents" (..., h, w); a mask of the loss is (h, w).
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
        """One picture. `encoder` is `image_encoder`'s. Calls the model a number of times that depends on `cfg` only.

        text, negative: what `encode_text` made; text may also hold references, as a training example does.
        """
        return self.draw(model, encoder, text, negative, self.drawn_with(cfg), rng)

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
        """`sample` with all of the section decided."""

    @abstractmethod
    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        """Load an adapter file into the components of `build` through the code a diffusers user runs.

        The base may stay on the meta device; the adapter's tensors are real afterwards.
        """

    @abstractmethod
    def blank_example(self, width: int, height: int, text_tokens: int, dtype: torch.dtype) -> Example:
        """Zeros in the shapes and types of what `encode_image` and `encode_text` give together.

        width, height: of the image, in pixels.  text_tokens: of the caption, where captions are not padded to a length
        of their own.  dtype: of the text encoders.
        """


class MultimodalFamily(ImageFamily):
    """A model that draws pictures from captions and answers questions about pictures, in one network.

    An example is what `encode_image` and `encode_text` give together, or what `encode_question` gives.
    """

    data_fields = frozenset(DataConfig.model_fields) - TEXT_DATA
    sample_fields = frozenset(SampleConfig.model_fields) - DIFFUSION_SAMPLE
    losses = ("images", "text")
    diffusers_adapters = frozenset()

    @abstractmethod
    def seen_size(self, width: int, height: int, resolution: int) -> tuple[int, int]:
        """Width and height in pixels that a picture is looked at in. resolution: `data.resolution`."""

    @abstractmethod
    def encode_question(self, image: Image.Image, question: str, answer: str) -> Example:
        """One example of an answer about an RGB image of `seen_size`. Called on a thread."""

    @abstractmethod
    def answer(self, model: nn.ModuleDict, image: Image.Image, question: str, cfg: SampleConfig, rng: SampleRng) -> str:
        """An answer about an RGB image of `seen_size`. Calls the model a number of times that depends on `cfg` only."""

    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        raise InputError(f"{file}: diffusers has no loader for adapters of this model")


class TextFamily(ModelFamily):
    """A language model, trained on rows of tokens.

    An example holds "tokens", "learned" and "documents", each (`data.length`,), as `data.text.Row` has them.
    """

    trains_on = "text"
    any_network: ClassVar[bool] = False
    """Whether the config's model may be of any class of a library. What FSDP2 cannot follow of it is found when it is
    built; of our own networks, in the tests."""
    data_fields = frozenset({"path", "validation", "validation_every", "cache"}) | TEXT_DATA
    sample_fields = frozenset({"every", "prompts", "seed"}) | TEXT_SAMPLE

    @property
    @abstractmethod
    def longest(self) -> int | None:
        """Most tokens of a row, None for any number."""

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
    def write_on(self, model: nn.ModuleDict, prompt: str, cfg: SampleConfig, rng: SampleRng) -> str:
        """What follows a prompt. Calls the model a number of times that depends on `cfg` only."""

    def batch_key(self, example: Example) -> Hashable:
        """Rows are of one length."""
        return None

    def sample_rows(self, batch: Batch) -> Mapping[str, Tensor]:
        """Some models flatten all tokens into one matrix before a layer, as before experts."""
        count, length = batch["tokens"].shape
        return {".+": torch.arange(count).repeat_interleave(length)}

    def blank_row(self, length: int) -> Example:
        """An example of that many tokens, of one document."""
        learned = torch.ones(length, dtype=torch.bool)
        learned[0] = False
        tokens = torch.zeros(length, dtype=torch.int64)
        return {"tokens": tokens, "learned": learned, "documents": tokens.clone()}


def check_unread(section: str, given: Section, read: Collection[str]) -> None:
    """Refuse what would be ignored: fields of a section that are set though they are not among those read."""
    for field, value in given:
        if field not in read and value != type(given).model_fields[field].default:
            raise InputError(
                f"{section}.{field}: is not used by this kind of model; leave it out. "
                f"It reads {', '.join(f'{section}.{name}' for name in sorted(read)) or 'nothing of this section'}"
            )


def references_of(example: Example | Batch) -> list[Tensor]:
    """Latents of the reference images, in order: "reference_0", "reference_1" and so on."""
    count = sum(key.startswith("reference_") for key in example)
    return [example[f"reference_{number}"] for number in range(count)]


def _check_names(field: str, named: Iterable[str], choices: tuple[str, ...]) -> None:
    for name in named:
        if name not in choices:
            raise InputError(f"{field}: {not_one_of(name, choices)}")
