"""What a pipeline of diffusers does around its transformer, found by running it without weights.

The pipeline of a folder runs whole, but its models are stand-ins that answer with chosen numbers and note what they are
given. Numbers that come back in other places tell how latents become the transformer's input, how its prediction
becomes a velocity, and what the autoencoder gets. Refused by name is what does more than move, scale and shift numbers,
and a time that is not linear in the noise level.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from trainer.config.size import Size
from trainer.models.parts.folder import ModelFolder
from trainer.models.parts.image.text_encoder import from_folder
from trainer.system.errors import InputError
from trainer.weights.files import read_tensor, set_buffers

INDEX = "model_index.json"
DENOISER, AUTOENCODER, SCHEDULER = "transformer", "vae", "scheduler"
PIPELINE = "the pipeline"
LIBRARIES = ("diffusers", "transformers")
"""Libraries whose classes a folder may name."""
EULER = "FlowMatchEulerDiscreteScheduler"
SIZES = Size(256, 128), Size(320, 256)
"""Sizes of the images of the runs."""
FEW, STEPS = 2, 5
"""Steps of a run, and of one that compares noise levels."""
NEAR = 1e-5
"""Largest relative difference between numbers that are equal but for rounding."""
GUIDANCE, NO_GUIDANCE = 3.0, 1.0
GUIDANCE_NAMES = ("true_cfg_scale", "guidance_scale")
"""What pipelines call the factor of guidance; with the first, the other is one that the transformer embeds."""
PROMPTS = "a red apple on a table", "two blue birds"


class Unknown(InputError):
    """A part of a folder or of its pipeline that is none of the known kinds."""


@dataclass(frozen=True)
class Rearrangement:
    """Numbers in other places: result = scale * source[index] + offset, each (n,), for one item.

    Attributes:
        shape: Of the result, without batch dim.
    """

    index: Tensor
    scale: Tensor
    offset: Tensor
    shape: tuple[int, ...]

    @classmethod
    def between(cls, probes: Sequence[Tensor], results: Sequence[Tensor], what: str) -> Rearrangement:
        """The rearrangement that made `results` of `probes`, the result of `probes_of`.

        Raises:
            Unknown: There is none. what: names it.
        """
        zero, one, number, random = (result.detach().double().flatten() for result in results)
        source, scale = probes[-1].double().flatten(), one - zero
        index = ((number - zero) / torch.where(scale == 0, 1.0, scale)).round().long().clamp(0, len(source) - 1)
        expected = scale * source[index] + zero
        if bool((scale == 0).any()) or bool(((random - expected).abs() > NEAR * (1 + expected.abs())).any()):
            raise Unknown(f"{what} are not its numbers in other places, with a scale and an offset")
        return cls(index, scale.float(), zero.float(), tuple(results[0].shape[1:]))

    @property
    def factor(self) -> float | None:
        """The one scale of all numbers; None where they differ, or have an offset."""
        is_one = torch.allclose(self.scale, self.scale[:1]) and not bool(self.offset.any())
        return round(float(self.scale[0]), 6) if is_one else None


def probes_of(shape: Sequence[int]) -> list[Tensor]:
    """Zeros, ones, the number of each place, and random numbers."""
    random = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(math.prod(shape), dtype=torch.float32).view(*shape)
    return [torch.zeros(*shape), torch.ones(*shape), numbers, random]


@dataclass
class Trace:
    """What one run of a pipeline did.

    Attributes:
        calls: The arguments of each call of the transformer, by name.
        predictions: What the scheduler was given in each step.
        samples: The latents in each step.
        decoded: What the autoencoder was given; None where the run stopped before.
        encoding: The arguments of `encode_prompt`.
        text: Its result.
        mu: Logarithm of the shift that the scheduler was given, if any.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)
    predictions: list[Tensor] = field(default_factory=list)
    samples: list[Tensor] = field(default_factory=list)
    decoded: Tensor | None = None
    encoding: dict[str, Any] = field(default_factory=dict)
    text: Any = None
    mu: float | None = None


class _Enough(Exception):
    """A run has shown what was looked for."""


class StandIn(nn.Module):
    """In place of a text encoder: states in the shapes of its config, all of one number that the tokens make.

    It also stands for the parts of encoders that pipelines call by name.
    """

    PARTS = ("model", "language_model", "text_model", "encoder")
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, kind: Any, config: Any) -> None:
        super().__init__()
        self.config = config
        self.gives_pooled_first = kind.__name__.endswith("WithProjection")
        text = config.get_text_config()
        self.width, self.depth = int(text.hidden_size), int(text.num_hidden_layers)
        self.pooled = int(config.to_dict().get("projection_dim") or self.width)
        self.tokens: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return self if name in self.PARTS else super().__getattr__(name)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling
        from transformers.models.clip.modeling_clip import CLIPTextModelOutput

        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.tokens = input_ids[0][kept[0].bool()].tolist()
        number = (input_ids * kept).sum(1).remainder(997) / 997 + 1
        states = number[:, None, None].repeat(1, input_ids.shape[1], self.width)
        pooled = number[:, None].repeat(1, self.pooled)
        all_states = (states,) * (self.depth + 1)
        if self.gives_pooled_first:
            return CLIPTextModelOutput(pooled, states, all_states)
        return BaseModelOutputWithPooling(states, pooled, all_states)


class ParametersOnMeta(TorchFunctionMode):
    """Builds modules whose parameters take no memory, and whose computed tensors are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **place})


def computed_tensors(build: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a module on the meta device, fp32.

    Returns:
        The module, and its computed buffers that no file holds, by name, on the CPU.
    """
    with ParametersOnMeta(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors without numbers, which are not initialized
        module = build()
    stored = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in stored and not buffer.is_meta}
    moved: dict[nn.Parameter, nn.Parameter] = {}  # what several modules share stays one
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            own = moved.setdefault(parameter, nn.Parameter(parameter.detach().to("meta", torch.float32)))
            part.register_parameter(name, own)
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to("meta"))
    return module, buffers


def take_no_memory(module: nn.Module, dtype: torch.dtype) -> None:
    """Give a module on the meta device tensors on the CPU that are one number each, NaN."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            value = torch.full((), math.nan, dtype=dtype).expand(parameter.shape)
            part.register_parameter(name, nn.Parameter(value, requires_grad=False))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.full((), math.nan).to(buffer.dtype).expand(buffer.shape))


class Parts:
    """The classes of a folder's parts.

    Raises:
        Unknown: One is none of diffusers' or transformers' classes, or the pipeline is not made of one transformer, an
            autoencoder, text encoders, tokenizers and diffusers' Euler scheduler.
    """

    def __init__(self, folder: ModelFolder) -> None:
        from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

        self.folder = folder
        index = folder.read(INDEX)
        self.pipeline = _class_of("diffusers", str(index.get("_class_name")), PIPELINE)
        named = {key: value for key, value in index.items() if _is_class(value)}
        self.settings = {key: value for key, value in index.items() if key not in named and not key.startswith("_")}
        self.missing = [key for key, value in named.items() if value[0] is None]
        classes = {
            key: _class_of(str(named[key][0]), str(named[key][1]), key) for key in sorted(named.keys() - self.missing)
        }
        models = {key: kind for key, kind in classes.items() if issubclass(kind, ModelMixin)}
        self.encoders = {key: kind for key, kind in classes.items() if issubclass(kind, PreTrainedModel)}
        # A processor of images and text has a tokenizer, which is all that text alone needs.
        tokenizers = (PreTrainedTokenizerBase, ProcessorMixin)
        self.tokenizers = [key for key, kind in classes.items() if issubclass(kind, tokenizers)]
        known = {DENOISER, AUTOENCODER, SCHEDULER, *self.encoders, *self.tokenizers}
        for key in sorted({DENOISER, AUTOENCODER} - models.keys()):
            raise Unknown(f"{self.name} has no {key}")
        accepted = inspect.signature(self.pipeline.__init__).parameters
        for key in sorted(classes.keys() - known):
            if key in models or key not in accepted or accepted[key].default is not None:
                raise Unknown(f"{self.name} also has {key}, a {classes[key].__name__}, whose use is not known")
            self.missing.append(key)  # the pipeline also works without it, as without a guider
        if not self.encoders:
            raise Unknown(f"{self.name} has no text encoder")
        scheduler = classes[SCHEDULER].__name__ if SCHEDULER in classes else "missing"
        if scheduler != EULER:
            raise Unknown(f"its scheduler is {scheduler}, not {EULER}")
        self.network, self.vae = models[DENOISER], models[AUTOENCODER]

    @property
    def name(self) -> str:
        return str(self.pipeline.__name__)


def _is_class(value: Any) -> bool:
    """Whether an entry of the index is [library, class], or [null, null] for a part that is not there."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str | None) for part in value)


def _class_of(library: str, name: str, part: str) -> Any:
    if library not in LIBRARIES:
        raise Unknown(f"{part} is {library}.{name}, code that the folder brings, which is never run")
    try:
        found = getattr(importlib.import_module(library), name)
    except AttributeError:
        found = None
    if not isinstance(found, type) or (part == PIPELINE and not issubclass(found, DiffusionPipeline)):
        raise Unknown(f"{part} is {name}, which this version of {library} does not have; install a newer one")
    return found


@dataclass(frozen=True)
class Layout:
    """How the latents of one size, (C, h, w) and normalised, are given to the transformer and come back.

    Attributes:
        latents: (C, h, w).
        into: Which latent is in each place of the transformer's input, (n,).
        input: Shape of that input, without batch dim.
        output: Shape of its prediction.
        back: Which number of the prediction belongs to each latent, (C * h * w,).
        sign: 1 where the prediction runs from data to noise, -1 where from noise to data.
        scale: The autoencoder's latents are latents * scale + offset, each (C, h, w).
        offset: See `scale`.
        has_frames: Whether the autoencoder is one of clips.
    """

    latents: tuple[int, int, int]
    into: Tensor
    input: tuple[int, ...]
    output: tuple[int, ...]
    back: Tensor
    sign: float
    scale: Tensor
    offset: Tensor
    has_frames: bool

    def given(self, latents: Tensor) -> Tensor:
        """The transformer's input, (B, *input), of latents (B, C, h, w)."""
        return latents.flatten(1)[:, self.into.to(latents.device)].view(-1, *self.input)

    def velocity(self, prediction: Tensor) -> Tensor:
        """The velocity, (B, C, h, w), of the transformer's prediction."""
        return self.sign * prediction.flatten(1)[:, self.back.to(prediction.device)].view(-1, *self.latents)


class Observed:
    """The pipeline of a folder, run on stand-ins."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.signature = inspect.signature(parts.network.forward)
        self.latents_name = next(name for name in self.signature.parameters if name != "self")
        self.device = torch.device("cpu")
        self._layouts: dict[Size, Layout] = {}
        with self._known("made"):
            config = parts.folder.config(DENOISER, parts.network.__name__)
            self.transformer: Any = computed_tensors(partial(parts.network.from_config, config))[0]
            config = parts.folder.read(f"{AUTOENCODER}/config.json")
            self.vae: Any = computed_tensors(partial(parts.vae.from_config, config))[0]
            for model in (self.transformer, self.vae):
                take_no_memory(model, torch.float32)
            stored = parts.folder.weights(AUTOENCODER).entries
            of_vae = {name: buffer.dtype for name, buffer in self.vae.named_buffers() if name in stored}
            # What some latents are normalised with.
            set_buffers(self.vae, {name: read_tensor(stored[name]).to(dtype) for name, dtype in of_vae.items()})
            folder = parts.folder.path
            configs = {key: kind.config_class.from_pretrained(folder / key) for key, kind in parts.encoders.items()}
            self.pipeline = self.assemble(
                {key: StandIn(parts.encoders[key], config) for key, config in configs.items()}
            )

    def assemble(self, encoders: Mapping[str, Any]) -> Any:
        """Make diffusers' pipeline with these text encoders, and a transformer and an autoencoder without weights."""
        from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
        from transformers import AutoTokenizer

        folder = self.parts.folder
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(folder.read("scheduler/scheduler_config.json"))
        models = {DENOISER: self.transformer, AUTOENCODER: self.vae, SCHEDULER: scheduler}
        place = property(lambda _: self.device)  # a pipeline is where its models are, and these are nowhere
        kind = type(self.parts.name, (self.parts.pipeline,), {"_execution_device": place, "device": place})
        with self._known("made"):
            tokenizers = {key: from_folder(AutoTokenizer, folder.path / key) for key in self.parts.tokenizers}
            made = kind(**dict.fromkeys(self.parts.missing), **self.parts.settings, **models, **tokenizers, **encoders)
        made.set_progress_bar_config(disable=True)
        return made

    def run(
        self,
        size: Size,
        steps: int,
        *,
        prompts: Sequence[str] = PROMPTS[:1],
        negative: str | None = None,
        text: Any = None,
        answer: Tensor | Callable[[dict[str, Any]], Tensor] | None = None,
        latents: Tensor | None = None,
    ) -> Trace:
        """Run the pipeline until it decodes, or calls its transformer.

        Args:
            size: Size of the image.
            steps: Steps.
            prompts: A batch of them.
            negative: What is guided away from; None for no guidance.
            text: What `encode_prompt` is made to return, for as many prompts.
            answer: The transformer's prediction, or what makes it of its arguments; without it, the run ends at the
                first call.
            latents: What each step is made to end with.

        Raises:
            Unknown: It stops with an error.
        """
        trace, pipe = Trace(), self.pipeline

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = self.signature.bind(None, *args, **kwargs).arguments
            trace.calls.append({**bound.pop("kwargs", {}), **{k: v for k, v in bound.items() if k != "self"}})
            if answer is None:
                raise _Enough
            return _Answer(answer if isinstance(answer, Tensor) else answer(trace.calls[-1]))

        def step(prediction: Tensor, timestep: Any, sample: Tensor, *_: Any, **__: Any) -> Any:
            trace.predictions.append(prediction)
            trace.samples.append(sample)
            return _Answer(sample if latents is None else latents)

        def decode(given: Tensor, *_: Any, **__: Any) -> Any:
            trace.decoded = given
            raise _Enough

        @functools.wraps(pipe.scheduler.set_timesteps)  # pipelines look at its signature
        def set_timesteps(*args: Any, **kwargs: Any) -> Any:
            trace.mu = kwargs.get("mu")
            return type(pipe.scheduler).set_timesteps(pipe.scheduler, *args, **kwargs)

        def encode(*args: Any, **kwargs: Any) -> Any:
            if not trace.encoding:
                bound = inspect.signature(self.parts.pipeline.encode_prompt).bind(None, *args, **kwargs)
                trace.encoding = {key: value for key, value in bound.arguments.items() if key != "self"}
                trace.text = type(pipe).encode_prompt(pipe, *args, **kwargs) if text is None else text
                return trace.text
            return type(pipe).encode_prompt(pipe, *args, **kwargs)

        accepted = inspect.signature(self.parts.pipeline.__call__).parameters
        guidance = next((name for name in GUIDANCE_NAMES if name in accepted), "")
        options: dict[str, Any] = {
            guidance: NO_GUIDANCE if negative is None else GUIDANCE,
            "prompt": list(prompts),
            "negative_prompt": negative,
            "height": size.height,
            "width": size.width,
            "num_inference_steps": steps,
            "use_resolution_binning": False,  # sizes and prompts stay as they are
            "enable_prompt_rewrite": False,
            "output_type": "pt",
            "generator": torch.Generator(),  # the run's own random numbers stay as they are
        }
        changed = [
            (self.transformer, "forward", forward),
            (self.vae, "decode", decode),
            (pipe, "encode_prompt", encode),
        ]
        changed += [(pipe.scheduler, "step", step), (pipe.scheduler, "set_timesteps", set_timesteps)]
        with self._known("run"), contextlib.ExitStack() as stack, contextlib.suppress(_Enough):
            for owner, name, function in changed:
                vars(owner)[name] = function
                stack.callback(vars(owner).pop, name)
            pipe(**{key: value for key, value in options.items() if key in accepted})
        return trace

    def arguments(self, leaves: Sequence[Any], size: Size, count: int, device: torch.device) -> dict[str, Any]:
        """What the transformer is called with, with other latents and at another time.

        Args:
            leaves: Of what `encode_prompt` returns for `count` prompts.
            size: Size of the images.
            count: Images in the batch.
            device: Where the text is, and the result.
        """
        is_plan = any(isinstance(leaf, FakeTensor) for leaf in leaves)  # of a device that need not be here
        self.device = torch.device("cpu") if is_plan else device
        if is_plan:
            with unset_fake_temporarily():
                leaves = tree_map_only(FakeTensor, _zeros_like, list(leaves))
        text = tree_unflatten(list(leaves), tree_flatten(self._example.text)[1])
        found: dict[str, Any] = self.run(size, FEW, prompts=[""] * count, text=text).calls[0]
        placed: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.to(device), found)
        return placed

    def encode(self, pipeline: Any, prompt: str) -> list[Any]:
        """The leaves of what `encode_prompt` of a pipeline returns for one prompt. pipeline: a result of `assemble`."""
        given = {**self.encoding, "prompt": [prompt] if isinstance(self.encoding["prompt"], list) else prompt}
        if "device" in given:
            given["device"] = self.device
        with self._known("asked for a text") if pipeline is self.pipeline else _quiet():
            leaves: list[Any] = tree_flatten(pipeline.encode_prompt(**given))[0]
        return leaves

    @cached_property
    def _example(self) -> Trace:
        return self.run(SIZES[0], FEW)

    @property
    def example(self) -> dict[str, Any]:
        """The arguments of the transformer in a run."""
        return self._example.calls[0]

    @cached_property
    def encoding(self) -> dict[str, Any]:
        """The arguments of `encode_prompt` without guidance."""
        found = self._example.encoding
        if "prompt" not in found:
            raise Unknown(f"{self.parts.name} does not give its prompt to encode_prompt")
        return found

    @cached_property
    def shared(self) -> list[bool]:
        """For each leaf of a text, whether a batch has only one of it."""
        one, two = (tree_flatten(self.run(SIZES[0], FEW, prompts=[PROMPTS[0]] * count).text)[0] for count in (1, 2))
        if len(one) != len(two):
            raise Unknown(f"{self.parts.name}.encode_prompt gives a list with a tensor for each prompt")
        found = []
        for number, (single, pair) in enumerate(zip(one, two, strict=True)):
            if isinstance(single, Tensor):
                is_shared = single.shape == pair.shape
                if not is_shared and (single.shape[0] != 1 or pair.shape != (2, *single.shape[1:])):
                    raise Unknown(f"{self.parts.name}.encode_prompt gives result {number} without a batch dimension")
                found.append(is_shared)
            else:
                found.append(True)
        return found

    @cached_property
    def example_text(self) -> list[Any]:
        """The leaves of a text."""
        return tree_flatten(self._example.text)[0]

    def layout(self, size: Size) -> Layout:
        """How latents of this size are given to the transformer and come back."""
        if size not in self._layouts:
            self.device = torch.device("cpu")
            with unset_fake_temporarily():
                self._layouts[size] = self._observe(size)
        return self._layouts[size]

    def _observe(self, size: Size) -> Layout:
        name, given = self.parts.name, self.run(size, FEW).calls[0].get(self.latents_name)
        if not isinstance(given, Tensor):
            raise Unknown(f"{name} gives its latents as a {type(given).__name__}")
        # Some transformers also predict a variance, in as many channels more.
        for shape in (given.shape, (given.shape[0], 2 * given.shape[1], *given.shape[2:])):
            with contextlib.suppress(Unknown):
                first = self.run(size, FEW, answer=torch.zeros(shape))
                if first.predictions[0].shape == first.samples[0].shape:
                    break
        else:
            self.run(size, FEW, answer=torch.zeros(given.shape))  # raises what is unknown, if it is that
            raise Unknown(f"{name} makes a prediction of another size than its latents")
        probes, outputs = probes_of(first.samples[0].shape), probes_of(shape)
        traces = [
            self.run(size, FEW, answer=output, latents=probe) for probe, output in zip(probes, outputs, strict=True)
        ]
        if any(len(trace.calls) != FEW or trace.decoded is None for trace in traces):
            raise Unknown(f"{name} calls its transformer not once a step without guidance, or decodes nothing")
        into = Rearrangement.between(
            probes, [trace.calls[1][self.latents_name] for trace in traces], "the latents that the transformer gets"
        )
        back = Rearrangement.between(outputs, [trace.predictions[1] for trace in traces], "its predictions")
        decoded = [trace.decoded for trace in traces if trace.decoded is not None]
        out = Rearrangement.between(probes, decoded, "the latents that the autoencoder gets")
        if into.factor != 1 or back.factor not in (1, -1):
            raise Unknown(f"{name} scales the latents by {into.factor}, and the prediction by {back.factor}")
        has_frames = decoded[0].ndim == 5
        channels, height, width = out.shape[0], *out.shape[-2:]
        if decoded[0].ndim not in (4, 5) or math.prod(out.shape) != channels * height * width:
            raise Unknown(f"{name} decodes latents of shape {list(decoded[0].shape)}")
        if sorted(out.index.tolist()) != list(range(probes[0].numel())):
            raise Unknown(f"{name} decodes others than all of its latents")
        scale, offset = (values.view(channels, height, width) for values in (out.scale, out.offset))
        place = torch.empty_like(out.index).scatter_(0, out.index, torch.arange(len(out.index)))
        return Layout(
            (channels, height, width),
            place[into.index],
            into.shape,
            tuple(shape[1:]),
            back.index[out.index],
            float(back.factor),
            scale,
            offset,
            has_frames,
        )

    def block_lists(self) -> dict[str, list[str]]:
        """{list of the transformer: class names of the blocks in it}: of those that diffusers keeps whole, if it names
        some.

        Raises:
            Unknown: There is none.
        """
        network = self.parts.network
        named = {*(network._no_split_modules or ()), *(network._repeated_blocks or ())}
        lists = {
            name: sorted({type(block).__name__ for block in module})
            for name, module in self.transformer.named_children()
            if isinstance(module, nn.ModuleList) and any(isinstance(part, nn.Linear) for part in module.modules())
        }
        lists = {name: kinds for name, kinds in lists.items() if named.issuperset(kinds)} or lists
        if not lists:
            raise Unknown(f"{network.__name__} has no list of blocks")
        return lists

    def encoded_shape(self, size: Size) -> tuple[int, ...]:
        """(C, h, w) of the latents that the autoencoder makes of an image."""
        frames = [1] * self.layout(size).has_frames
        with torch.device("meta"), self._known("asked for latents"):
            vae = self.parts.vae.from_config(self.parts.folder.read(f"{AUTOENCODER}/config.json"))
            found = vae.encode(torch.empty(1, 3, *frames, size.height, size.width))
        latents = found.latent_dist.mode() if "latent_dist" in found else found.latent
        return (latents.shape[1], *latents.shape[-2:])

    @cached_property
    def time(self) -> tuple[str, float, float]:
        """(argument, scale, offset) of the time that the transformer is given: scale * sigma + offset."""
        trace = self.run(SIZES[0], STEPS, answer=torch.zeros(1, *self.layout(SIZES[0]).output))
        sigmas = [float(sigma) for sigma in self.pipeline.scheduler.sigmas[:STEPS]]
        if sigmas[0] <= sigmas[-1]:
            raise Unknown("its scheduler counts noise levels upward (invert_sigmas)")
        tensors = {key for key, value in trace.calls[0].items() if isinstance(value, Tensor)} - {self.latents_name}
        changing = [key for key in sorted(tensors) if not torch.equal(trace.calls[0][key], trace.calls[-1][key])]
        if len(changing) != 1 or trace.calls[0][changing[0]].numel() != 1:
            raise Unknown(f"{self.parts.name} changes {changing or 'nothing'} from step to step, not one time")
        times = [float(call[changing[0]]) for call in trace.calls]
        scale = (times[0] - times[-1]) / (sigmas[0] - sigmas[-1])
        offset = times[0] - scale * sigmas[0]
        near = NEAR * max(abs(scale), abs(offset))
        if any(abs(scale * sigma + offset - time) > near for sigma, time in zip(sigmas, times, strict=True)):
            raise Unknown(f"{self.parts.name} gives a {changing[0]} that is not linear in the noise level")
        levels = self.pipeline.scheduler.timesteps[:STEPS] / 1000
        if not torch.allclose(levels.double(), torch.tensor(sigmas).double(), atol=NEAR):
            raise Unknown("the scheduler's timesteps are not 1000 times its noise levels")
        pair = self.run(SIZES[0], FEW, prompts=[PROMPTS[0]] * 2).calls[0][changing[0]]
        if pair.numel() != 2:
            raise Unknown(f"{self.parts.name} gives one {changing[0]} for a whole batch")
        return changing[0], round(scale, 4), round(offset, 4) + 0.0

    def sampler(self, size: Size, steps: int, device: torch.device) -> Any:
        """diffusers' scheduler as the pipeline sets it for an image of this size."""
        self.device = device
        own = self.pipeline.scheduler
        ends = own.config.get("shift_terminal")
        if steps == 1:  # a single step starts at pure noise: stretching to the last level would compute 0 / 0
            own.register_to_config(shift_terminal=None)
        try:
            self.run(size, steps)
        finally:
            own.register_to_config(shift_terminal=ends)
        scheduler = copy.deepcopy(own)  # later runs set their own steps
        scheduler.set_begin_index(0)
        return scheduler

    def shift(self, size: Size) -> float:
        """The factor of the timestep shift of this size."""
        mu, config = self.run(size, STEPS).mu, self.pipeline.scheduler.config
        if not config.get("use_dynamic_shifting"):
            if not (factor := float(config.get("shift", 1.0))) > 0:
                raise Unknown(f"its scheduler has a shift of {factor}")
            return factor
        if mu is None:
            raise Unknown(f"{self.parts.name} gives no shift to a scheduler that needs one")
        return math.exp(mu) if config.get("time_shift_type", "exponential") == "exponential" else float(mu)

    @cached_property
    def in_fp32(self) -> frozenset[str]:
        """The arguments that stay fp32 where the models compute in bf16."""
        leaves = [leaf.bfloat16() if _is_floating(leaf) else leaf for leaf in self.example_text]
        take_no_memory(self.transformer, torch.bfloat16)
        try:
            found = self.arguments(leaves, SIZES[0], 1, torch.device("cpu"))
        finally:
            take_no_memory(self.transformer, torch.float32)
        tensors = {key: tree_flatten(value)[0] for key, value in found.items()}
        return frozenset(key for key, all_ in tensors.items() if any(_is_floating(t, torch.float32) for t in all_))

    @cached_property
    def guides_plainly(self) -> bool:
        """Whether guided samples are of the sum that every family uses, and negative prompts read like others."""
        prompt, negative = PROMPTS
        plain = [self.run(SIZES[0], FEW, prompts=[text]).calls[0] for text in (prompt, negative)]
        layout = self.layout(SIZES[0])
        numbers = [key for key, value in plain[0].items() if _is_floating(value) and key != self.latents_name]
        read = [key for key in numbers if not torch.equal(plain[0][key], plain[1][key])]

        def items(call: Mapping[str, Any]) -> Iterator[int]:
            """Of which of both texts each item of a call is; -1 for neither."""
            for item in range(len(call[self.latents_name])):
                same = [all(torch.equal(call[key][item : item + 1], text[key]) for key in read) for text in plain]
                yield same.index(True) if same.count(True) == 1 else -1

        def answer(call: dict[str, Any]) -> Tensor:
            values = torch.tensor([(5.0, 2.0, 0.0)[which] for which in items(call)])
            return values.view(-1, *[1] * len(layout.output)).expand(-1, *layout.output)

        try:
            guided = self.run(SIZES[0], FEW, prompts=[prompt], negative=negative, answer=answer)
        except Unknown:
            return False
        of = [which for call in guided.calls for which in items(call)]
        expected = layout.sign * (2.0 + GUIDANCE * (5.0 - 2.0))
        return sorted(of) == [0] * FEW + [1] * FEW and all(
            bool((prediction - expected).abs().max() < NEAR * abs(expected)) for prediction in guided.predictions
        )

    @contextlib.contextmanager
    def _known(self, what: str) -> Iterator[None]:
        """Turn any error of the pipeline's code into Unknown."""
        try:
            with _quiet(), unset_fake_temporarily():  # a plan has tensors without numbers, and runs depend on them
                yield
        except (_Enough, InputError):
            raise
        except NameError as error:  # of what diffusers imports only where it is installed
            raise Unknown(f"{self.parts.name} needs {error.name}, which is not installed") from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise Unknown(f"{self.parts.name} cannot be {what} without weights: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Run a pipeline's code without gradients, and without its warnings."""
    from diffusers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


class _Answer(tuple[Tensor]):
    """The result of a transformer or a scheduler, which pipelines read by name or as a tuple."""

    def __new__(cls, tensor: Tensor) -> _Answer:
        return super().__new__(cls, (tensor,))

    @property
    def sample(self) -> Tensor:
        return self[0]

    prev_sample = sample


def _zeros_like(tensor: Tensor) -> Tensor:
    """Zeros on the CPU, where a fake tensor is of a device that need not be here."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _is_floating(value: Any, dtype: torch.dtype | None = None) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and dtype in (None, value.dtype)
