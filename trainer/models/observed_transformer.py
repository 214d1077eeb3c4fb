"""The base of families without a file of their own: all is concluded from the folder and diffusers' pipeline of it.

`parts/image/observed.py` runs that pipeline without weights. In training and in samples the pipeline itself prepares
what the transformer is called with; only its latents and its time are ours.

Example keys: "latents" (C, h, w) fp32, normalised; "text_0" and so on, the tensors that `encode_prompt` returns,
without batch dim but for those that a batch shares.
"""

from __future__ import annotations

import dataclasses
import math
import re
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.loaders.peft import PeftAdapterMixin
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from trainer.config.schema import RunConfig
from trainer.config.size import Size
from trainer.models import recognition
from trainer.models.base import LoadModule, TextLength
from trainer.models.flow_transformer import FlowTransformer, Index
from trainer.models.objectives.base import Batch, Example
from trainer.models.objectives.flow_matching import Shift, ShiftLine
from trainer.models.parts.folder import TRANSFORMERS_STEM
from trainer.models.parts.image.images import device_of, image_of, pixels_of
from trainer.models.parts.image.observed import (
    AUTOENCODER,
    DENOISER,
    INDEX,
    SIZES,
    Observed,
    Parts,
    Unknown,
    computed_tensors,
)
from trainer.models.parts.image.vae import AUTOENCODER_KL, Autoencoder
from trainer.parallel.parallelize import ShardSpec
from trainer.system.errors import InputError
from trainer.weights.files import Fused, WeightFiles, safetensors_in, set_buffers, stored_tensors

PROBED = Size(512, 512)
"""A third size, at which the line through the shifts of the other two is checked."""
NOT_ADAPTED = r"(?!.*(?:norm|mod|ada|router|gate$|scale_shift|time))"
"""Names in a block whose layers make its modulation, or choose experts: adapters leave them alone."""
PREFIXES = r"(?:^|(?<=\.))(?:model|language_model|text_model)\."
"""Levels of names that come and go between versions of transformers."""
TOKEN_PIXELS = 16 * 16
"""Pixels that count as one token, for the shift."""
FILLER = " a"
"""A word that makes a caption longer."""


@dataclass(frozen=True)
class Conclusions:
    """What the folder and its pipeline say.

    Attributes:
        pipeline: Class of diffusers.
        network: Class of the transformer.
        autoencoder: Class of the autoencoder.
        blocks: Class names of the transformer's blocks.
        lists: Names of the lists that hold them.
        pixels: Pixels along a side of a latent.
        channels: Channels of the latents.
        time: (argument, scale, offset): the transformer's time is scale * sigma + offset.
        sign: 1 where it predicts the direction from data to noise, -1 for the opposite.
        shift: The timestep shift.
        in_fp32: Arguments that stay fp32 where the model computes in bf16.
        guides_plainly: Whether guided samples are of the two predictions alone.
    """

    pipeline: str
    network: str
    autoencoder: str
    blocks: tuple[str, ...]
    lists: tuple[str, ...]
    pixels: int
    channels: int
    time: tuple[str, float, float]
    sign: float
    shift: Shift
    in_fp32: tuple[str, ...]
    guides_plainly: bool

    def __str__(self) -> str:
        argument, scale, offset = self.time
        time = f"{scale:g} * sigma" + (f" + {offset:g}" if offset else "")
        shift = f"{self.shift.constant:g}" if self.shift.constant is not None else "by its tokens"
        toward = "noise" if self.sign > 0 else "data"
        other = f". {self.pipeline} does more with guidance than samples here, which are of the two predictions alone"
        return (
            f"{self.network} as {self.pipeline} calls it: blocks {', '.join(self.blocks)}; latents of {self.channels} "
            f"channels and {self.pixels} pixels a side, from {self.autoencoder}; {argument} = {time}; predicts the "
            f"direction to {toward}; shift {shift}{'' if self.guides_plainly else other}"
        )


@dataclass(frozen=True)
class ObservedEncoders:
    """The text encoders in their pipeline."""

    pipeline: Any
    models: tuple[nn.Module, ...]


class ObservedTransformer(FlowTransformer):
    """A family whose class is the folder's own.

    Raises:
        InputError: Another family knows this transformer, something of it is not known, or the folder says something
            else than the family's file.
    """

    stated: ClassVar[Conclusions | None] = None
    """What the family's file says, for families that were written from a folder."""
    model_files: ClassVar = {INDEX: ("_class_name", ""), recognition.DENOISER_CONFIG: ("_class_name", "")}
    architectures: ClassVar[tuple[str, ...]] = ()
    default_architecture = ""
    is_concluded = True
    size_multiple = 32
    token_side = 16

    def look(self) -> None:
        self.refuse_known()
        try:
            self.conclusions = self._conclude()
        except Unknown as unknown:
            raise InputError(
                f"model.family: {self.config.family} cannot take {self._folder.path}: {unknown}. Such a model needs a "
                "family of its own, see trainer/RECIPES.md"
            ) from unknown
        if self.stated is not None and self.conclusions != self.stated:
            raise InputError(_difference(self.config.family, self._folder.path, self.stated, self.conclusions))
        found, parts = self.conclusions, self._observed.parts
        self.network, self.shift = parts.network, found.shift
        returns_views = (parts.network.__name__, *found.blocks)
        self.shard = ShardSpec(found.blocks, fp32_inputs=frozenset(found.in_fp32), returns_views=returns_views)
        self.adapter_targets = {DENOISER: (self._targets(),)}
        self.autoencoder = Autoencoder(
            found.autoencoder,
            found.pixels,
            lambda config: parts.vae.from_config(dict(config)),
            self._encoded,
            self._decoded,
            AUTOENCODER_KL.write_tiny,
        )

    def _targets(self) -> str:
        """The linear layers of the blocks, but those of NOT_ADAPTED."""
        lists = "|".join(self.conclusions.lists)
        linear = [name for name, part in self._observed.transformer.named_modules() if isinstance(part, nn.Linear)]
        found = [re.fullmatch(rf"(?:{lists})\.\d+\.({NOT_ADAPTED}.+)", name) for name in linear]
        inside = sorted({re.escape(match[1]) for match in found if match})
        return rf"({lists})\.\d+\.({'|'.join(inside)})"

    def refuse_known(self) -> None:
        """Raise InputError for a model of which another family has a file."""
        known = recognition.known_family(self._folder.path, self.config.family)
        if known and self.stated is None:
            raise InputError(f"model.family: {self.config.family}, but {self._folder.path} {known}")

    def _conclude(self) -> Conclusions:
        self._observed = observed = Observed(Parts(self._folder))
        layouts = [observed.layout(size) for size in SIZES]
        pixels = SIZES[0].height // layouts[0].latents[1]
        for size, layout in zip(SIZES, layouts, strict=True):
            if (size.height, size.width) != tuple(pixels * side for side in layout.latents[1:]):
                raise Unknown(f"{observed.parts.name} has latents of {layout.latents} for {size.width} x {size.height}")
        if any("guidance" in name for name, value in observed.example.items() if isinstance(value, Tensor)):
            raise Unknown(f"{observed.parts.network.__name__} embeds its guidance")
        if (encoded := observed.encoded_shape(SIZES[0])) != layouts[0].latents:
            raise Unknown(f"{observed.parts.vae.__name__} encodes to {encoded}, and decodes {layouts[0].latents}")
        lists = observed.block_lists()
        observed.shared  # noqa: B018 raises Unknown
        return Conclusions(
            pipeline=observed.parts.name,
            network=observed.parts.network.__name__,
            autoencoder=observed.parts.vae.__name__,
            blocks=tuple(dict.fromkeys(kind for kinds in lists.values() for kind in kinds)),
            lists=tuple(lists),
            pixels=pixels,
            channels=layouts[0].latents[0],
            time=observed.time,
            sign=layouts[0].sign,
            shift=_shift(observed),
            in_fp32=tuple(sorted(observed.in_fp32)),
            guides_plainly=observed.guides_plainly,
        )

    @property
    def model_spec(self) -> str:
        return self.conclusions.network

    @property
    def latent_channels(self) -> int:
        return self.conclusions.channels

    @property
    def text_recipe(self) -> str:
        return repr(self.conclusions)

    def build(self, component: str) -> nn.Module:
        return computed_tensors(partial(self.network.from_config, self._transformer))[0]

    def computed_buffers(self, component: str) -> Mapping[str, Tensor]:
        return computed_tensors(partial(self.network.from_config, self._transformer))[1]

    def layout(self, component: str) -> tuple[Fused, ...]:
        return ()  # no other program has names of its own for this model

    def warnings(self, cfg: RunConfig) -> tuple[str, ...]:
        concluded = f"model.family: {cfg.model.family} concluded of {self._folder.path}: {self.conclusions}"
        unseen = ". Nothing examines it in a run without samples; launch.py --certify does"
        is_drawn = cfg.sample.every and cfg.sample.prompts
        return (*super().warnings(cfg), concluded if is_drawn else concluded + unseen)

    def follow(self, cfg: RunConfig) -> None:
        super().follow(cfg)
        shapes = [self._text_shapes(self._encode(self._observed.pipeline, FILLER * count)) for count in (1, 40)]
        if cfg.data.caption_dropout and cfg.train.micro_batch > 1 and shapes[0] != shapes[1]:
            raise InputError(
                f"data.caption_dropout: {cfg.data.caption_dropout} needs train.micro_batch: 1 here, since "
                f"{self.conclusions.pipeline} does not pad captions: a dropped one cannot share a batch with others"
            )

    def fingerprint(self) -> str:
        self.encoder_folders = (*self._observed.parts.encoders, *self._observed.parts.tokenizers, AUTOENCODER)
        return super().fingerprint()

    def image_encoder(self, load: LoadModule) -> nn.Module:
        built = computed_tensors(partial(self._observed.parts.vae.from_config, self._vae))
        return _loaded(load, built, self._folder.weights(AUTOENCODER), ())

    def _encoded(self, vae: Any, image: Image.Image) -> Tensor:
        layout, pixels = self._observed.layout(Size(*image.size)), pixels_of(image, device_of(vae))
        found = vae.encode(pixels[:, :, None] if layout.has_frames else pixels)
        whole: Tensor = found.latent_dist.mode() if "latent_dist" in found else found.latent
        return (whole.view(1, *layout.latents) - layout.offset.to(whole)) / layout.scale.to(whole)

    def _decoded(self, vae: Any, latents: Tensor) -> Image.Image:
        layout = self._observed.layout(self._size(latents))
        whole = latents * layout.scale.to(latents) + layout.offset.to(latents)
        pixels = vae.decode(whole[:, :, None] if layout.has_frames else whole, return_dict=False)[0]
        return image_of(pixels[:, :, 0] if layout.has_frames else pixels)

    def text_encoder(self, load: LoadModule) -> ObservedEncoders:
        models = {}
        for component, kind in self._observed.parts.encoders.items():
            build = partial(_tied, kind, kind.config_class.from_pretrained(self._folder.path / component))
            # One that sees parts of captions alone, as what is in quotes, is not called equally often by every rank.
            is_called = bool(self._seen(FILLER)[component])
            blocks = sorted(kind._no_split_modules or ()) if is_called else []
            built = computed_tensors(build)
            models[component] = _loaded(load, built, self._encoder_weights(component, built[0]), blocks)
        return ObservedEncoders(self._observed.assemble(models), tuple(models.values()))

    def _encoder_weights(self, component: str, empty: nn.Module) -> WeightFiles:
        """The tensors of a text encoder, whatever levels the version that wrote the file had in its names."""
        files = safetensors_in(self._folder.path / component, TRANSFORMERS_STEM)
        names = {re.sub(PREFIXES, "", name): name for name in stored_tensors(empty)}
        return WeightFiles.read(files, lambda key: names.get(re.sub(PREFIXES, "", key)))

    @torch.no_grad()
    def encode_text(self, encoder: ObservedEncoders, caption: str) -> Example:
        self._observed.device = device_of(encoder.models[0])
        return {key: value.cpu() for key, value in self._encode(encoder.pipeline, caption).items()}

    def _encode(self, pipeline: Any, caption: str) -> Example:
        leaves = self._observed.encode(pipeline, caption)
        found = {}
        for number, (leaf, one, is_shared) in enumerate(
            zip(leaves, self._observed.example_text, self._observed.shared, strict=True)
        ):
            if isinstance(leaf, Tensor) and isinstance(one, Tensor):
                found[f"text_{number}"] = leaf if is_shared else leaf[0]
            elif leaf is not None and (isinstance(leaf, Tensor) or leaf != one):
                raise InputError(
                    f"model.family: {self.config.family}: {self.conclusions.pipeline}.encode_prompt gives another kind "
                    f"of result {number} for '{caption[:40]}' than for others; such a model needs a family of its own"
                )
        return found

    @staticmethod
    def _text_shapes(example: Example) -> Hashable:
        return tuple((key, *value.shape) for key, value in example.items() if key.startswith("text_"))

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        """The most tokens that an encoder is given are those it is given of a text without end."""
        pipeline = self._observed.pipeline
        most = {key: len(ids) for key, ids in self._seen(FILLER * 10_000).items()}
        found: list[list[TextLength]] = [[] for _ in captions]
        # Some encoders are given parts of captions alone, as what is in quotes.
        for encoder, read in ((key, count) for key, count in most.items() if count):
            own = encoder.replace("text_encoder", "tokenizer")
            tokenizer = pipeline.components[own if own in pipeline.components else self._observed.parts.tokenizers[0]]
            ids = tokenizer([FILLER, *captions], add_special_tokens=False, verbose=False).input_ids
            around = len(self._seen(FILLER)[encoder]) - len(ids[0])
            for caption, count, lengths in zip(captions, map(len, ids[1:]), found, strict=True):
                rest = self._unread(caption, encoder) if count + around > read else ""
                lengths.append(TextLength(encoder, count + around, read, rest))
        return [tuple(lengths) for lengths in found]

    def _unread(self, caption: str, encoder: str) -> str:
        """The end of a caption without which an encoder is given the same tokens."""
        whole = self._seen(caption)[encoder]
        same = bisect_left(range(len(caption) + 1), True, key=lambda n: self._seen(caption[:n])[encoder] == whole)
        return caption[same:]

    def _seen(self, caption: str) -> dict[str, list[int]]:
        """The tokens of a caption that each encoder is given."""
        pipeline = self._observed.pipeline
        for key in self._observed.parts.encoders:
            pipeline.components[key].tokens = []
        self._observed.encode(pipeline, caption)
        return {key: pipeline.components[key].tokens for key in self._observed.parts.encoders}

    def batch_key(self, example: Example) -> Hashable:
        return (*example["latents"].shape[-2:], self._text_shapes(example))

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        with unset_fake_temporarily():  # the pipeline's code depends on tokens
            blank = self._encode(self._observed.pipeline, FILLER * num_tokens)
        return {
            key: torch.zeros(value.shape, dtype=dtype if value.is_floating_point() else value.dtype)
            for key, value in blank.items()
        }

    def num_tokens(self, latents: Tensor) -> int:
        return latents.shape[-2] * latents.shape[-1] * self.autoencoder.pixels**2 // TOKEN_PIXELS

    def sampler(self, noise: Tensor, num_steps: int) -> Any:
        return self._observed.sampler(self._size(noise), num_steps, noise.device)

    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        denoiser: Any = model[DENOISER]
        if not isinstance(denoiser, PeftAdapterMixin):
            raise InputError(f"{file}: diffusers has no loader for adapters of this model")
        denoiser.load_lora_adapter(file.parent, weight_name=file.name, local_files_only=True, low_cpu_mem_usage=True)

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        observed, count = self._observed, len(latents)
        size = self._size(latents)
        layout = observed.layout(size)
        leaves = list(observed.example_text)
        for number in range(len(leaves)):
            if f"text_{number}" in batch:
                value = batch[f"text_{number}"]
                value = value.to(latents.dtype) if value.is_floating_point() else value
                leaves[number] = value[0] if observed.shared[number] else value
            elif isinstance(leaves[number], Tensor):
                leaves[number] = None  # such as the mask of a caption without padding
        arguments = observed.arguments(leaves, size, count, latents.device)
        name, scale, offset = observed.time
        time = (scale * sigma + offset).view(arguments[name].shape)
        arguments |= {observed.latents_name: layout.given(latents), name: time}
        predicted = model[DENOISER](**arguments)[0].float()
        if predicted.shape[1:] != layout.output:
            raise InputError(
                f"model.family: {self.config.family}: {self.conclusions.network} predicts {list(predicted.shape[1:])} "
                f"where {list(layout.output)} was concluded; such a model needs a family of its own"
            )
        return layout.velocity(predicted)

    def _size(self, latents: Tensor) -> Size:
        """The size in pixels of the image of these latents, (..., h, w)."""
        height, width = (side * self.autoencoder.pixels for side in latents.shape[-2:])
        return Size(width, height)

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        raise InputError(f"{cls.__name__} has no published sizes; write them into its file")

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        raise InputError(f"model.path: tiny is not known of {cls.__name__}; write it into its file, or name a folder")

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        raise NotImplementedError(f"{type(self).__name__} has no tiny model")


def _tied(kind: Any, config: Any) -> Any:
    """Build a text encoder whose head is its embedding, where the config says so."""
    model = kind(config)
    model.tie_weights()
    return model


def _loaded(
    load: LoadModule, built: tuple[nn.Module, Mapping[str, Tensor]], files: WeightFiles, blocks: Sequence[str]
) -> nn.Module:
    """Load a module with the buffers that no file holds. built: the result of `computed_tensors`."""
    empty, buffers = built
    module = load(empty, files, blocks)
    set_buffers(module, {name: value.to(device_of(module)) for name, value in buffers.items()})
    _let_states_be_recorded(module)
    return module


def _let_states_be_recorded(module: nn.Module) -> None:
    """Tell transformers of a sharded encoder's classes: it finds the layers whose states it returns by the name of the
    class that made the model, which sharding replaces."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(part)), part._can_record_outputs)


def _shift(observed: Observed) -> Shift:
    """The shift of the pipeline's samples: one factor, or one whose logarithm is linear in the tokens."""
    sizes = (*SIZES, PROBED)
    tokens = [size.width * size.height // TOKEN_PIXELS for size in sizes]
    logs = [math.log(observed.shift(size)) for size in sizes]
    if max(logs) - min(logs) < 1e-6:
        return Shift(constant=round(math.exp(logs[0]), 6))
    line = ShiftLine(tokens[0], tokens[1], round(logs[0], 6), round(logs[1], 6))
    if abs(line.mu(tokens[2]) - logs[2]) > 1e-3:
        raise Unknown(f"{observed.parts.name} shifts its noise levels by a rule that is not known")
    return Shift(line=line)


def _difference(family: str, folder: Path, stated: Conclusions, found: Conclusions) -> str:
    other = [field for field, value in dataclasses.asdict(stated).items() if value != dataclasses.asdict(found)[field]]
    field = other[0]
    return (
        f"model.family: {family} was written for {field} {getattr(stated, field)}, but {folder} and this version of "
        f"diffusers have {getattr(found, field)}; write the family anew, or name the folder it was written for"
    )
