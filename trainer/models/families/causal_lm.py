"""Causal language models of transformers: Llama, Qwen3, Mistral and similar ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config.errors import InputError, not_one_of
from trainer.config.sections import MODEL_WORDS, DataConfig, ModelConfig, ObjectiveConfig, SampleConfig
from trainer.models.base import PREFERENCE_FIELDS, TextFamily, Weigh
from trainer.models.objectives import Batch, Loss
from trainer.models.parts.chat import Chat, Encoded, encode_spans, read_template, without_marks
from trainer.models.parts.chunked_loss import sum_losses_in_chunks
from trainer.models.parts.folder import (
    TRANSFORMERS_STEM,
    ModelFolder,
    check_architecture,
    open_folder,
    random_weight,
    write_random,
    write_tiny,
)
from trainer.models.parts.next_token import (
    block_names,
    build_language_model,
    computed_buffers,
    continue_text,
    restarting_positions,
)
from trainer.models.parts.text_encoder import TINY_CHAT_TEMPLATE, from_folder, train_tokenizer
from trainer.parallel.parallelize import ShardSpec
from trainer.rng import SampleRng
from trainer.weights.files import Fused, WeightFiles, safetensors_in, stored_tensors
from trainer.weights.hub import find_folder
from trainer.weights.tensors import NewRowsEntry

COMPONENT = "language_model"
FOLDER = "a folder of transformers"
END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
SHARD_NUMBERS = 1 << 30
TINY_VERSION = 1

# Sizes from each publisher's config.json; the tests hold the numbers of parameters.
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "mistral-7b-v0.3": {
        "model_type": "mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
}
SIZES = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Fields of a config that identify the architecture."""
TINY: Mapping[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
COMPANION_FILES = ("generation_config.json", *TOKENIZER_FILES)
COMPUTED = re.compile(r".*\.(inv_freq|masked_bias)")
"""Names of buffers that older files hold and models compute themselves."""


class CausalLM(TextFamily):
    """A folder in transformers' format: config.json, model*.safetensors, a tokenizer.

    In training the documents of a row do not see each other, and each learned token of all ranks has equal weight.
    """

    components = (COMPONENT,)
    any_network = True
    objective_fields = PREFERENCE_FIELDS
    options_read = frozenset({"architecture", "blocks", "new_tokens"})
    architectures = tuple(PUBLISHED)
    default_architecture = "qwen3-1.7b"
    model_files: ClassVar = {"config.json": ("model_type", "")}
    weights_stem = TRANSFORMERS_STEM
    diffusers_adapters = frozenset()
    kohya_prefixes: ClassVar = {}
    companion_files = ("generation_config.json",)
    tokenizer_files = TOKENIZER_FILES

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._folder = self._open()
        self._config = _read_config(self._folder)
        sizes = _sizes(self._config.to_dict())
        self._new_ids = self._add_tokens()
        self._empty = _built(self._folder, self._config)
        published = {name: _sizes(config) for name, config in PUBLISHED.items()}
        check_architecture(model, self._folder, published, sizes)
        self.shard = ShardSpec(block_names(self._empty, model.options.blocks), fp32_inputs=frozenset({"token_weights"}))
        if not self.shard.blocks:
            raise InputError(
                f"model.options.blocks: {type(self._empty).__name__} does not say which of its modules are blocks; "
                "name their class"
            )
        self.adapter_targets = {COMPONENT: _linear_layers(self._empty, self.shard.blocks)}
        self.follow_data(DataConfig())

    def follow_data(self, data: DataConfig) -> None:
        self._template, self._system = data.chat_template, data.system

    def embedding(self, model: nn.ModuleDict) -> nn.Module:
        network: Any = model[COMPONENT]
        module: nn.Module = network.get_input_embeddings()
        return module

    @property
    def model_spec(self) -> str:
        return str(self._config.model_type)

    @property
    def longest(self) -> int | None:
        longest: int | None = self._config.to_dict().get("max_position_embeddings")
        return longest

    @property
    def peft_fields(self) -> Mapping[str, str]:
        path = self.config.path
        base = str(self.folder) if path in MODEL_WORDS else path
        return {"base_model_name_or_path": base, "task_type": "CAUSAL_LM"}

    @property
    def changed_files(self) -> Mapping[str, str]:
        """The chat template of the config, so that other programs ask the model as it was trained."""
        return {} if self._template is None else {"chat_template.jinja": without_marks(read_template(self._template))}

    def component_folder(self, component: str) -> Path:
        return self.folder

    def component_config(self, component: str) -> Mapping[str, Any]:
        """The config with transformers' defaults for fields that the file leaves out."""
        config: dict[str, Any] = self._config.to_dict()
        return config

    def exported_config(self, component: str, config: dict[str, Any]) -> dict[str, Any]:
        if not self._new_ids:
            return config
        size = {"vocab_size": self.vocabulary}
        inner = {"text_config": config["text_config"] | size} if "text_config" in config else {}
        return config | inner | (size if "vocab_size" in config or not inner else {})

    def write_tokenizer(self, folder: Path) -> None:
        if self._new_ids:
            self.tokenizer.save_pretrained(folder)
        else:
            super().write_tokenizer(folder)

    @property
    def must_train(self) -> Mapping[str, str]:
        why = "it has the rows of model.options.new_tokens"
        return {f"{COMPONENT}.{name}": why for name in self._token_tensors} if self._new_ids else {}

    def _add_tokens(self) -> range:
        """Make room for `model.options.new_tokens` in the config. Returns the ids that the tokenizer did not have."""
        if not self.config.options.new_tokens:
            return range(0)
        tokenizer, new = self._tokenizer_and_new
        text = self._config.get_text_config()
        text.vocab_size = max(text.vocab_size, len(tokenizer))
        return range(len(tokenizer) - new, len(tokenizer))

    @cached_property
    def _token_tensors(self) -> tuple[str, ...]:
        """Names of the tensors of the model's files that have a row per token."""
        modules = (self._empty.get_input_embeddings(), self._empty.get_output_embeddings())
        by_token = {id(p) for module in modules if module is not None for p in module.parameters(recurse=False)}
        return tuple(name for name, p in self._empty.named_parameters() if id(p) in by_token)

    def _with_new_rows(self, stored: WeightFiles) -> WeightFiles:
        """Give the files the rows of `model.options.new_tokens`."""
        if not self._new_ids:
            return stored
        rows, known, new = self.vocabulary, self._new_ids.start, len(self._new_ids)
        grown = {
            name: NewRowsEntry(
                entry.file, entry.key, (rows, *entry.shape[1:]), entry.dtype, stored=entry, known=known, new=new
            )
            for name, entry in stored.entries.items()
            if name in self._token_tensors
        }
        return WeightFiles({**stored.entries, **grown})

    def build(self, component: str) -> nn.Module:
        model: nn.Module = _built(self._folder, self._config)
        sum_losses_in_chunks(model)
        return model

    def weights(self, component: str) -> WeightFiles:
        files = safetensors_in(self.folder, TRANSFORMERS_STEM)
        own = stored_tensors(self._empty)
        # Files of a tied model may also hold the head.
        known = self._empty.state_dict().keys() - own.keys()
        stored = WeightFiles.read(files, lambda key: None if key in known or COMPUTED.fullmatch(key) else key)
        unknown = sorted(stored.entries.keys() - own.keys())
        if unknown:
            raise InputError(
                f"{files[0]}: {len(unknown)} tensors that the model does not have, first '{unknown[0]}'; "
                "the weights and config.json belong to different models"
            )
        return self._with_new_rows(stored)

    def computed_buffers(self, component: str) -> Mapping[str, Tensor]:
        return computed_buffers(self._empty)

    def layout(self, component: str) -> tuple[Fused, ...]:
        """Return nothing: the file has the names of transformers."""
        return ()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, a class of transformers, with `model.options.new_tokens`."""
        return self._tokenizer_and_new[0]

    @cached_property
    def _tokenizer_and_new(self) -> tuple[Any, int]:
        """The tokenizer, and how many of `model.options.new_tokens` it did not know."""
        from transformers import AddedToken, AutoTokenizer

        try:
            tokenizer = from_folder(AutoTokenizer, self.folder)
        except InputError:
            raise
        except (OSError, ValueError) as error:
            raise InputError(f"{self._folder.field} {self.folder}: no tokenizer that can be read ({error})") from error
        tokens = [AddedToken(token, normalized=False) for token in self.config.options.new_tokens]
        return tokenizer, int(tokenizer.add_tokens(tokens)) if tokens else 0

    @property
    def vocabulary(self) -> int:
        return int(self._empty.get_input_embeddings().num_embeddings)

    @property
    def begin_of_text(self) -> tuple[int, ...]:
        first = self.tokenizer.bos_token_id
        return (first,) if first is not None and self.tokenizer("")["input_ids"][:1] == [first] else ()

    @property
    def end_of_text(self) -> int:
        end = self.tokenizer.eos_token_id
        if end is None:
            raise InputError(
                f"{self._folder.field} {self.folder}: its tokenizer has no end-of-text token; "
                "set eos_token in tokenizer_config.json"
            )
        return int(end)

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    @cached_property
    def _chat(self) -> Chat:
        return Chat(self.tokenizer, self._template, self._system)

    def encode_chat(self, messages: object, tools: object = None) -> Encoded:
        return self._chat.encode(messages, tools)

    def encode_pair(self, prompt: str, completion: str) -> Encoded:
        if self.tokenizer.is_fast:
            return encode_spans(self.tokenizer, prompt + completion, [(len(prompt), len(prompt + completion))])
        # Without offsets, the border of the two texts can only be kept by a border of tokens.
        before, after = self.tokenize(prompt), self.tokenize(completion)
        return before + after, [False] * len(before) + [True] * len(after)

    def loss(self, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        weights = (batch["learned"] * batch["weight"][:, None]).flatten()[batch["predicted"] + 1]
        return Loss(self.weighted_loss(model, batch, weights), weights.sum())

    def weighted_loss(self, model: nn.ModuleDict, batch: Batch, weights: Tensor | Weigh) -> Tensor:
        inputs = {"input_ids": batch["tokens"], "position_ids": restarting_positions(batch["documents"])}
        predicted = batch["predicted"]
        targets = batch["tokens"].flatten()[predicted + 1]
        total: Tensor = model[COMPONENT](
            **inputs, use_cache=False, predicted=predicted, targets=targets, token_weights=weights
        )
        return total

    def generate(self, model: nn.ModuleDict, prompt: str, cfg: SampleConfig, rng: SampleRng) -> str:
        ids = [*self.begin_of_text, *self.tokenize(prompt)] or [self.end_of_text]
        return self._continued(model, ids, cfg, rng)

    def reply(self, model: nn.ModuleDict, question: str, cfg: SampleConfig, rng: SampleRng) -> str:
        return self._chat.answer(self._continued(model, self._chat.prompt(question), cfg, rng))

    def _continued(self, model: nn.ModuleDict, ids: Sequence[int], cfg: SampleConfig, rng: SampleRng) -> str:
        tokens = torch.tensor(ids, device=rng.device)
        generated = continue_text(model[COMPONENT], tokens, cfg.tokens, cfg.temperature, self._ends, rng)
        return str(self.tokenizer.decode(generated.tolist()))

    @cached_property
    def _ends(self) -> frozenset[int]:
        """The ids after which a generated text is complete: end-of-text, and those of generation_config.json."""
        file = self.folder / "generation_config.json"
        stored = self._folder.read(file.name).get("eos_token_id") if file.is_file() else None
        return frozenset({self.end_of_text, *(stored if isinstance(stored, list) else [stored])}) - {None}

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        config: dict[str, Any] = _config_of(PUBLISHED[architecture]).to_dict()
        return {"": config}

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        config = {**PUBLISHED[architecture or cls.default_architecture], **TINY}
        config.pop("rope_scaling", None)
        return {COMPONENT: config}

    def _open(self) -> ModelFolder:
        path, base = self.config.path, self.config.base
        if path == "random":
            return ModelFolder("model.base" if base else "model.path", self._write_random(), expects=FOLDER)
        if path.endswith(".safetensors"):
            raise InputError(f"model.path {path}: a language model is a folder with config.json and tokenizer; name it")
        return replace(open_folder(self.config, self.architectures, self._write_tiny), expects=FOLDER)

    def _write_tiny(self) -> Path:
        sizes = self.tiny(self.config.options.architecture)

        def write(folder: Path) -> None:
            config = _config_of(sizes[COMPONENT])
            write_random(folder, lambda: build_language_model(config), "causal-lm")
            _write_tokenizer(folder, config)

        return write_tiny(self.cache, "causal-lm", TINY_VERSION, sizes, write)

    def _write_random(self) -> Path:
        """Write a model of full size with random weights, with config and tokenizer of `model.base`.

        Without `model.base` its tokens are bytes.
        """
        architecture = self.config.options.architecture
        source = (
            ModelFolder("model.base", find_folder("model.base", self.config.base), expects=FOLDER)
            if self.config.base
            else None
        )
        if source and (architecture is None or (source.path / "config.json").is_file()):
            sizes = source.read("config.json")
        elif architecture is None:
            raise InputError(
                "model.path: random needs the sizes of the model; set model.options.architecture, or model.base to a "
                "folder with config.json and tokenizer"
            )
        elif architecture in PUBLISHED:
            sizes = dict(PUBLISHED[architecture])
        else:
            raise InputError(f"model.options.architecture: {not_one_of(architecture, PUBLISHED)}")

        def write(folder: Path) -> None:
            config = _config_of({key: value for key, value in sizes.items() if key != "quantization_config"})
            _write_weights(folder, build_language_model(config))
            config.save_pretrained(folder)
            if source is None:
                _write_tokenizer(folder, config)
            else:
                for file in (source.path / name for name in COMPANION_FILES):
                    if file.is_file():
                        shutil.copyfile(file, folder / file.name)

        companions = source.digest(*COMPANION_FILES) if source else ""
        return write_tiny(self.cache, "causal-lm-random", TINY_VERSION, {"sizes": sizes, "beside": companions}, write)


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config.get(name) for name in SIZES}


def _config_of(sizes: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**sizes)


def _read_config(folder: ModelFolder) -> Any:
    """Read transformers' config, without the storage format of the weights, which their own file holds."""
    from transformers import AutoConfig

    folder.read("config.json")
    try:
        config = from_folder(AutoConfig, folder.path, "config.json")
    except InputError:
        raise
    except (ValueError, KeyError) as error:
        raise InputError(f"{folder.path / 'config.json'}: not a model that transformers knows ({error})") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _built(folder: ModelFolder, config: Any) -> Any:
    try:
        return build_language_model(config)
    except ValueError as error:
        raise InputError(
            f"{folder.path / 'config.json'}: describes a {config.model_type}, which is not a causal language model; "
            "set model.family to the family of that model"
        ) from error


def _linear_layers(model: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    """Patterns of the linear layers inside the blocks, one pattern for all blocks of a class."""
    patterns: dict[str, None] = {}
    for block, module in model.named_modules():
        if type(module).__name__ in blocks:
            inside = (name for name, layer in module.named_modules() if isinstance(layer, nn.Linear))
            patterns |= dict.fromkeys(
                re.sub(r"(?<=\.)\d+(?=\\\.)", r"\\d+", re.escape(f"{block}.{name}")) for name in inside
            )
    return tuple(patterns)


def _write_tokenizer(folder: Path, config: Any) -> None:
    """Write a tokenizer whose tokens are bytes, and a generation config."""
    from transformers import GenerationConfig

    tokenizer = train_tokenizer([], NUM_BYTES + 1, config.max_position_embeddings, (END_OF_TEXT,), TINY_CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id).save_pretrained(folder)


def _write_weights(folder: Path, model: nn.Module) -> None:
    """Write random weights in bf16, one file at a time: all together may not fit into memory."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in stored_tensors(model).items():
        if sum(other.numel() for other in shards[-1].values()) + tensor.numel() > SHARD_NUMBERS:
            shards.append({})
        shards[-1][name] = tensor
    names = [
        f"{TRANSFORMERS_STEM}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    for name, shard in zip(names, shards, strict=True):
        drawn = {key: random_weight("causal-lm", key, tensor.shape).bfloat16() for key, tensor in shard.items()}
        save_file(drawn, folder / name, {"format": "pt"})
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{TRANSFORMERS_STEM}.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


FAMILY = CausalLM
