"""Models of transformers that answer in words about an image: read by our own readers, whole, sharded or quantized."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.models.build import Listener, Loader, block_layers, place_encoder
from trainer.models.parts.chat.chat_template import rendered
from trainer.models.parts.folder import TRANSFORMERS_STEM, ModelFolder
from trainer.models.parts.image.seeing import PilImageProcessor
from trainer.models.parts.image.text_encoder import from_folder
from trainer.models.parts.language.language_configs import first_line
from trainer.models.parts.language.next_token import ATTENTIONS, block_names, parameters_on_meta
from trainer.models.parts.language.stored_names import read_names
from trainer.parallel.mesh import device_mesh
from trainer.parallel.parallelize import COMPUTE_DTYPE
from trainer.rng import derived_seed
from trainer.system.errors import InputError
from trainer.weights.files import WeightFiles, safetensors_in, set_buffers
from trainer.weights.hub import find_folder
from trainer.weights.quantization import FORMATS, quantize_layers
from trainer.weights.quantized_experts import is_quantizable, quantize_experts

EXPECTS = "a folder of transformers with a model that describes images"
TEXT_PARTS = ("language_model.", "text_model.")
"""Parts of names by which transformers calls the language model inside a model that also sees."""
TASKS: Mapping[str, Mapping[str, str]] = {
    "florence2": {"sentence": "<CAPTION>", "detailed": "<MORE_DETAILED_CAPTION>", "tags": "<OD>"},
}
"""{model type: {style: prompt}} of models that were trained on fixed prompts and have no chat template."""
PLACE = re.compile(r"<loc_\d+>")
"""A token of Florence-2 for a place in the image."""
BUILD_ERRORS = (ValueError, TypeError, AttributeError, ImportError, KeyError, RuntimeError, AssertionError)


@dataclass(frozen=True)
class Decoding:
    """How an answer is generated.

    Attributes:
        tokens: Most tokens of it.
        temperature: 0 takes the likeliest token each time.
        seed: Of the random numbers, with the name of the image.
    """

    tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """The text that the model wrote. is_complete: whether it ended by itself, before `Decoding.tokens`."""

    text: str
    is_complete: bool


class VisionLanguageFolder:
    """A folder with such a model: its class, its processor and what it is asked with. Holds no weights.

    Raises:
        InputError: The folder is missing or incomplete, brings code of its own, or holds another kind of model.
    """

    def __init__(self, path: str) -> None:
        self.folder = ModelFolder("--model", find_folder("--model", path), expects=EXPECTS)
        stored = self.folder.read("config.json")
        if "auto_map" in stored:
            raise InputError(
                f"{self.folder.path / 'config.json'}: brings code of its own (auto_map), which is never run; name a "
                "copy for transformers, as florence-community/Florence-2-base is for Florence-2"
            )
        self.config = self._config()
        self._kind = self._class()

    @cached_property
    def processor(self) -> Any:
        """The processor of images and texts to the model's inputs, with Pillow alone: torchvision is not installed."""
        from transformers import AutoImageProcessor, AutoTokenizer
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

        path = self.folder.path
        if type(self.config) not in PROCESSOR_MAPPING:
            raise InputError(
                f"{path}: transformers has no processor for a {self.config.model_type}; name another model"
            )
        kind = _without_other_senses(PROCESSOR_MAPPING[type(self.config)])
        made = {"tokenizer": AutoTokenizer, "image_processor": PilImageProcessor(AutoImageProcessor)}
        try:
            fields, unused = kind.get_processor_dict(path, local_files_only=True)
            parts = [from_folder(made[name], path) if name in made else None for name in kind.get_attributes()]
            processor = kind.from_args_and_dict(parts, fields, **unused)
        except InputError:
            raise
        except (OSError, *BUILD_ERRORS) as error:
            if "torchvision" in str(error).lower():
                raise InputError(
                    f"{path}: images for a {self.config.model_type} are prepared by torchvision alone, which "
                    "this program does not use; name another model"
                ) from error
            raise InputError(
                f"{path}: its processor or tokenizer cannot be read ({first_line(error)}); download the folder again"
            ) from error
        return processor

    @property
    def is_instructed(self) -> bool:
        """Whether it follows instructions; else it was trained on fixed prompts."""
        return self._template is not None

    def prompt(self, style: str, instruction: str, own: str = "") -> str:
        """Return what the model is asked with: the instruction, or the fixed prompt of a model that has those.

        Args:
            style: The style of captions.
            instruction: For a model that follows instructions.
            own: What a person wants a model with fixed prompts to be asked instead of the style's, as `<OCR>`.

        Raises:
            InputError: The model can be asked nothing: it has no chat template.
        """
        if self._template:
            return instruction
        tasks = TASKS.get(self.config.model_type)
        if tasks is None:
            raise InputError(
                f"{self.folder.path}: its processor has no chat template, so it cannot be asked for a caption; name a "
                "model that follows instructions, for example Qwen/Qwen2.5-VL-3B-Instruct"
            )
        return own.strip() or tasks.get(style, instruction)

    @property
    def _template(self) -> str | None:
        template: str = self.processor.chat_template or self.processor.tokenizer.chat_template or ""
        return template or None

    def inputs(self, image: Image.Image, prompt: str) -> dict[str, Any]:
        """Return the model's inputs for one image (RGB), on the CPU."""
        if self._template is None:
            return dict(self.processor(images=image, text=prompt, return_tensors="pt"))
        quiet = {"enable_thinking": False} if "enable_thinking" in self._template else {}
        content = [{"type": "image", "image": image}, {"type": "text", "text": prompt}]
        messages = [{"role": "user", "content": content}]
        # The processor renders without a budget, so a template that would never end is found here.
        rendered(self.processor.tokenizer, messages, self._template, add_generation_prompt=True, **quiet)
        encoded = self.processor.apply_chat_template(
            messages,
            chat_template=self._template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **quiet,
        )
        return dict(encoded)

    def build(self) -> Any:
        """Build the model on the meta device, fp32, in eval mode. Raises InputError where transformers cannot."""
        try:
            with torch.device("meta"):
                return self._construct().eval().requires_grad_(False)
        except BUILD_ERRORS as error:
            raise InputError(
                f"{self.folder.path / 'config.json'}: transformers cannot build this {self.config.model_type} "
                f"({first_line(error)}); download the folder again"
            ) from error

    def weights(self, model: Any) -> WeightFiles:
        """Find the model's tensors on disk."""
        return WeightFiles(read_names(model, safetensors_in(self.folder.path, TRANSFORMERS_STEM)).entries)

    def computed_buffers(self) -> dict[str, Tensor]:
        """Buffers that no file holds, as rotary frequencies: by name, on the CPU."""
        with parameters_on_meta():
            model = self._construct()
        kept = model.state_dict().keys()
        return {name: one for name, one in model.named_buffers(remove_duplicate=False) if name not in kept}

    def generation_config(self) -> Any:
        """Return the folder's own settings of generation, or None."""
        from transformers import GenerationConfig

        if not (self.folder.path / "generation_config.json").is_file():
            return None
        return from_folder(GenerationConfig, self.folder.path, "generation_config.json")

    def _config(self) -> Any:
        from transformers import AutoConfig

        try:
            config = from_folder(AutoConfig, self.folder.path, "config.json")
        except InputError:
            raise
        except (ValueError, KeyError) as error:
            raise InputError(
                f"{self.folder.path / 'config.json'}: not a model that transformers knows ({first_line(error)})"
            ) from error
        if hasattr(config, "quantization_config"):  # the readers see in the files how weights are stored
            del config.quantization_config
        return config

    def _class(self) -> Any:
        from transformers import AutoModelForImageTextToText

        table = AutoModelForImageTextToText._model_mapping
        if type(self.config) not in table:
            raise InputError(
                f"{self.folder.path / 'config.json'}: describes a {self.config.model_type}, which does not describe "
                "images; name a vision-language model, for example Qwen/Qwen2.5-VL-3B-Instruct"
            )
        return table[type(self.config)]

    def _construct(self) -> Any:
        for name in ATTENTIONS:
            try:
                # A config of its own: transformers notes the attention in it.
                config = copy.deepcopy(self.config)
                return self._kind._from_config(config, attn_implementation=name, dtype=torch.float32)
            except ValueError as error:
                if name == ATTENTIONS[-1] or "does not support" not in str(error):
                    raise
        raise AssertionError(ATTENTIONS)


class VisionLanguage:
    """A loaded model that is asked about images. is_sharded: whether the ranks share one copy of it."""

    def __init__(self, source: VisionLanguageFolder, model: Any, device: torch.device, is_sharded: bool) -> None:
        self.source, self.model, self.is_sharded = source, model, is_sharded
        self._device = device

    @classmethod
    def load(
        cls,
        source: VisionLanguageFolder,
        cfg: RunConfig,
        world: World,
        cache: Path | None = None,
        is_sharded: bool = False,
        listener: Listener | None = None,
    ) -> VisionLanguage:
        """Load the model. Collective.

        Args:
            source: Its folder.
            cfg: `train.precision`, `quantize` and `parallel` say how it is stored.
            world: The ranks.
            cache: Folder shared by runs, for `quantize.cache`.
            is_sharded: Whether the ranks share one copy; else each has it whole.
            listener: Hears of the progress.

        Raises:
            InputError: Weights are missing, damaged or of another model, or the model cannot be sharded.
        """
        model = source.build()
        files, blocks = source.weights(model), block_names(model)
        shares = is_sharded and world.size > 1
        if shares and source.config.is_encoder_decoder:
            raise InputError(
                f"--shard: a {type(model).__name__} is called in parts, which cannot be sharded; leave it out"
            )
        dtype = COMPUTE_DTYPE[cfg.train.precision]
        model.to(dtype)
        _quantize(model, blocks, cfg)
        mesh = device_mesh(cfg.parallel, world, "full") if shares else None
        place_encoder(model, cfg, blocks, mesh, world.device)
        Loader(cfg, world, cache, listener or Listener()).load(model, files)
        set_buffers(model, {name: value.to(world.device) for name, value in source.computed_buffers().items()})
        if shares:
            # `generate` would call the eyes by themselves, outside of the root's forward, which gathers their weights.
            model._supports_mm_encoder_outputs = lambda: False
        model.generation_config = source.generation_config() or model.generation_config
        return cls(source, model, world.device, shares)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; bytes of a quantized layer count as such."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Any], decoding: Decoding, name: str) -> Answer:
        """Generate an answer. Collective where the model is sharded: the ranks end together.

        Args:
            inputs: The result of `VisionLanguageFolder.inputs`.
            decoding: How it is generated.
            name: The image's name, on which random numbers depend; not on ranks, order or a restart.
        """
        dtype = self.model.dtype
        given = {key: _sent(value, self._device, dtype) for key, value in inputs.items()}
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if decoding.temperature > 0:
            sampling = {"do_sample": True, "temperature": decoding.temperature}
            torch.manual_seed(derived_seed(decoding.seed, name, "caption"))
        ids = self.model.generate(
            **given, **sampling, max_new_tokens=decoding.tokens, synced_gpus=self.is_sharded, num_beams=1
        )[0]
        if not self.source.config.is_encoder_decoder:
            ids = ids[given["input_ids"].shape[1] :]
        ends = self._ends
        is_complete = len(ids) < decoding.tokens or int(ids[-1]) in ends
        return Answer(decoded(self.source.processor.tokenizer, ids.tolist()), is_complete)

    @property
    def _ends(self) -> frozenset[int]:
        ends = self.model.generation_config.eos_token_id
        return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode an answer without special tokens; where it names places in the image, their names between commas.

    Florence-2 lists what it sees as `dog<loc_1><loc_2><loc_3><loc_4>tree<loc_5>...`.
    """
    groups = itertools.groupby(ids, lambda one: PLACE.fullmatch(str(tokenizer.convert_ids_to_tokens(one))) is not None)
    texts = [str(tokenizer.decode(list(group), skip_special_tokens=True)) for is_place, group in groups if not is_place]
    return ", ".join(filter(None, map(str.strip, texts))) if len(texts) > 1 else "".join(texts)


def _quantize(model: nn.Module, blocks: Sequence[str], cfg: RunConfig) -> None:
    """Store the linear layers and experts of the language model's blocks in `quantize.format`; the eyes stay whole."""
    format = FORMATS.get(cfg.quantize.format)
    if format is None:
        return
    experts = list(_of_language(block_layers(model, blocks, is_quantizable)))
    for name in experts:
        quantize_experts(model.get_submodule(name), format)
    quantize_layers(model, dict.fromkeys(_of_language(block_layers(model, blocks)), format))


def _of_language(names: Sequence[str]) -> Iterator[str]:
    """Yield the names of those layers that belong to the language model, or all where none is called so."""
    own = [name for name in names if any(part in name for part in TEXT_PARTS)]
    yield from own or names


def _sent(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def _without_other_senses(kind: Any) -> Any:
    """Return a class of processors that accepts to have none for films and sound, which need torchvision."""

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if argument is None else kind.check_argument_for_proper_class(self, name, argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check, "__module__": kind.__module__})
