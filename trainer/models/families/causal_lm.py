"""Causal language models of transformers: Llama, Qwen3, Mistral and similar ones. See DECISIONS 45."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.config.schema import RunConfig
from trainer.config.sections import MODEL_WORDS, DataConfig, ModelConfig, NoAdapter, ObjectiveConfig, SampleConfig
from trainer.models.base import TextFamily, Weigh
from trainer.models.objectives.base import Batch, Loss
from trainer.models.parts.chat.chat_template import read_template, without_marks
from trainer.models.parts.chat.conversation import Chat, Encoded, encode_spans
from trainer.models.parts.chat.stop_tokens import Ends, ends_of_turns
from trainer.models.parts.folder import (
    TRANSFORMERS_STEM,
    ModelFolder,
    check_architecture,
    copy_files,
    open_folder,
    write_random,
    write_tiny,
)
from trainer.models.parts.image.text_encoder import from_folder
from trainer.models.parts.language.attention_probe import Sight, computes_within, layer_pattern, position_ids, sight
from trainer.models.parts.language.chunked_loss import ROUTERS, sum_losses_in_chunks
from trainer.models.parts.language.document_attention import MASKED, attend_within, begins_mask, can_attend
from trainer.models.parts.language.language_configs import (
    build_whole,
    causal_class,
    first_line,
    text_config,
    turn_layers,
    turned_layers,
)
from trainer.models.parts.language.loaded import check_tied, loaded_tensors
from trainer.models.parts.language.next_token import block_names, build_language_model, computed_buffers, continue_text
from trainer.models.parts.language.random_language_models import (
    PUBLISHED,
    TINY,
    config_of,
    sizes_of,
    write_byte_tokenizer,
    write_random_weights,
)
from trainer.models.parts.language.routers import balance_loss, configured_weight, experts_per_token
from trainer.models.parts.language.stored_names import TEXT_PART, StoredNames, read_names
from trainer.models.recognition import no_row
from trainer.parallel.parallelize import COMPUTE_DTYPE, ShardSpec
from trainer.rng import SampleRng
from trainer.system.errors import InputError, not_one_of
from trainer.weights.files import Fused, WeightFiles, safetensors_in, stored_tensors
from trainer.weights.hub import find_folder
from trainer.weights.quantized_experts import fused_experts
from trainer.weights.tensors import NewRowsEntry

COMPONENT = "language_model"
FOLDER = "a folder of transformers"
SMALLEST = 8
"""Inputs and outputs of a layer from which on it has features, rather than a coefficient per head or stream."""
TINY_VERSION = 1

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
GENERATION = "generation_config.json"
COMPANION_FILES = (GENERATION, *TOKENIZER_FILES)


class CausalLM(TextFamily):
    """A folder in transformers' format: config.json, model*.safetensors, a tokenizer.

    In training the documents of a row do not see each other, and each token in the loss has equal weight on any rank.
    """

    components = (COMPONENT,)
    any_network = True
    objective_fields = frozenset({"router_weight"})
    options_read = frozenset({"architecture", "attention", "blocks", "new_tokens"})
    architectures = tuple(PUBLISHED)
    default_architecture = "qwen3-1.7b"
    model_files: ClassVar = {"config.json": ("model_type", "")}
    weights_stem = TRANSFORMERS_STEM
    diffusers_adapters = frozenset()
    kohya_prefixes: ClassVar = {}
    companion_files = (GENERATION,)
    tokenizer_files = TOKENIZER_FILES

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._folder = self._open()
        self._folder_config = _read_config(self._folder)
        self._config = text_config(self._folder_config)
        sizes = sizes_of(self._config.to_dict())
        self._new_ids = self._add_tokens()
        self._turned: tuple[str, ...] = ()
        self._is_adapted = self._is_compiled = False
        self._precision = "bf16"
        self._empty = _built(self._folder, self._config, model.options.attention)
        published = {name: sizes_of(config) for name, config in PUBLISHED.items()}
        check_architecture(model, self._folder, published, sizes)
        self._experts_per_token = experts_per_token(self._empty)
        given = objective.router_weight
        if given is not None and self._experts_per_token is None:
            raise InputError(
                f"objective.router_weight: a {type(self._empty).__name__} has no routers that transformers balances; "
                "leave it out"
            )
        own = configured_weight(self._config) if self._experts_per_token else 0.0
        self._router_weight = own if given is None else given
        self.shard = ShardSpec(block_names(self._empty, model.options.blocks), fp32_inputs=frozenset({"token_weights"}))
        self._declared_blocks = self.shard.blocks
        if not self.shard.blocks:
            raise InputError(
                f"model.options.blocks: {type(self._empty).__name__} does not say which of its modules are blocks; "
                "name their class"
            )
        self._template, self._system = DataConfig().chat_template, DataConfig().system

    def embedding(self, model: nn.ModuleDict) -> nn.Module:
        network: Any = model[COMPONENT]
        module: nn.Module = network.get_input_embeddings()
        return module

    def follow(self, cfg: RunConfig) -> None:
        """Take how conversations are encoded, and turn layers whose weights are (inputs, outputs) into linear ones if
        an adapter or codes are to change them. A full fine-tune keeps them."""
        self._template, self._system = cfg.data.chat_template or None, cfg.data.system
        if cfg.objective.compares_pairs and not self.packs_documents:
            raise InputError(
                f"objective.dpo_beta: the two answers of a pair share a row, but in a {type(self._empty).__name__} the "
                "documents of a row see each other; leave it empty, or train another model"
            )
        self._is_adapted = not isinstance(cfg.adapter, NoAdapter)
        self._precision, self._is_compiled = cfg.train.precision, cfg.train.compile is True
        if isinstance(cfg.adapter, NoAdapter) or not turned_layers(self._empty):
            return
        if cfg.export_what == "adapter" and not cfg.adapter.peft_transposes:
            raise InputError(
                f"adapter.type: peft has no {cfg.adapter.type} for this model's layers, whose weights are (inputs, "
                "outputs); use lora or dora, or export.what: merged"
            )
        self._turned = turned_layers(self._empty)
        self._empty = turn_layers(self._empty)

    @property
    def blocks(self) -> tuple[str, ...]:
        return self._declared_blocks

    @cached_property
    def adapter_targets(self) -> Mapping[str, tuple[str, ...]]:  # type: ignore[override]
        linear = _linear_layers(self._empty, self._declared_blocks)
        uncalled = self._sight.uncalled if self._sight else ()
        has_experts = bool(fused_experts(self._empty))
        names = (
            name
            for name, layer in linear.items()
            if layer_pattern(name) not in uncalled and not _is_small(name, layer, has_experts)
        )
        patterns = (re.sub(r"(?<=\.)\d+(?=\\\.)", r"\\d+", re.escape(name)) for name in names)
        return {COMPONENT: tuple(dict.fromkeys(patterns))}

    @cached_property
    def _sight(self) -> Sight | None:
        return sight(self._config, self.config.options.attention)

    @property
    def model_spec(self) -> str:
        return str(self._config.model_type)

    @property
    def longest(self) -> int | None:
        # Not in `to_dict` where a config has another name for it, as n_positions.
        return self._config.max_position_embeddings if hasattr(self._config, "max_position_embeddings") else None

    def warnings(self, cfg: RunConfig) -> tuple[str, ...]:
        return (*super().warnings(cfg), *self._text_only())

    @property
    def notes(self) -> tuple[str, ...]:
        kind, found = type(self._empty).__name__, []
        if self._empty.config._attn_implementation != "sdpa" and self.config.options.attention == "auto":
            found.append(
                f"a {kind} has no sdpa attention in transformers; eager is used, which needs memory for all pairs of "
                "tokens of a row"
            )
        if not self.packs_documents:
            found.append(
                f"in a {kind} documents of one row would see each other, so each has a row of its own, filled by "
                "padding; a data.length near that of the documents wastes least"
            )
        return (*found, *self._frozen_experts)

    @property
    def _frozen_experts(self) -> tuple[str, ...]:
        experts = fused_experts(self._empty) if self._is_adapted else []
        if not experts:
            return ()
        return (
            f"{len(experts)} weights of fused experts stay as they are, as '{experts[0]}': adapters change linear "
            "layers; adapter.type: none trains them",
        )

    def _text_only(self) -> tuple[str, ...]:
        if self._whole is None:
            return ()
        kind, part = type(self._whole).__name__, type(self._empty).__name__
        return (
            f"model.path {self.folder}: only the text part of this {kind} is trained. A merged or full export is a "
            f"{part} without the other parts; an adapter's names are those of "
            + (f"the {kind}" if self._loaded_layout else f"a {part}, which must be loaded alone"),
        )

    def chat_warnings(self, cfg: RunConfig) -> tuple[str, ...]:
        if end := self._ends_of_turns.text:
            named = f"data.chat_template: {self._template}" if self._template else "the tokenizer's chat template"
            return (
                f"{named} ends an answer with '{end}', which is not a token of this tokenizer. Programs stop at tokens "
                "only, so the exported model will write on after its answers; set model.options.new_tokens to "
                f"['{end}'], or name a template in data.chat_template whose end the tokenizer has",
            )
        if cfg.export_what == "adapter" and self.stops_of_its_own:
            return (
                f"answers end with {' or '.join(self.stops_of_its_own)}, at which the base does not stop, and programs "
                "that load an adapter stop where its base does. The adapter's README.md has the line that helps; or "
                "set export.what: merged",
            )
        return ()

    @property
    def stops_of_its_own(self) -> tuple[str, ...]:
        ids = [one for one in self._ends_of_turns.ids if one not in self._stops_of_base]
        return tuple(self.tokenizer.convert_ids_to_tokens(ids))

    @property
    def peft_fields(self) -> Mapping[str, str | bool]:
        path = self.config.path
        base = str(self.folder) if path in MODEL_WORDS else path
        turned: dict[str, str | bool] = {"fan_in_fan_out": True} if self._turned else {}
        return {"base_model_name_or_path": base, "task_type": "CAUSAL_LM", **turned}

    def component_folder(self, component: str) -> Path:
        return self.folder

    def component_config(self, component: str) -> Mapping[str, Any]:
        """The config with transformers' defaults for fields that the file leaves out."""
        config: dict[str, Any] = self._config.to_dict()
        return config

    def exported_config(self, component: str, config: dict[str, Any]) -> dict[str, Any]:
        if self._whole is not None:
            text: dict[str, Any] = self._config.to_dict()
            return {**text, "architectures": [type(self._empty).__name__], "dtype": "float32"}
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
        if self._template is not None:  # other programs ask the model as it was trained
            (folder / "chat_template.jinja").write_text(without_marks(read_template(self._template)), "utf-8")
        # Programs read here where a text ends, also for the folder of an adapter.
        written = self._generation_config
        if self._stops != _listed(written.get("eos_token_id")):
            written |= {"eos_token_id": list(self._stops) if len(self._stops) > 1 else self._stops[0]}
        (folder / GENERATION).write_text(json.dumps(written, indent=2) + "\n", "utf-8")

    @property
    def must_train(self) -> Mapping[str, str]:
        why = "it has the rows of model.options.new_tokens"
        return {f"{COMPONENT}.{name}": why for name in self._token_tensors} if self._new_ids else {}

    def _add_tokens(self) -> range:
        """Make room for `model.options.new_tokens` in the config.

        Returns the ids that the tokenizer did not have, and those up to a named token that had no row.
        """
        if not self.config.options.new_tokens:
            return range(0)
        tokenizer, new = self._tokenizer_and_new
        text = self._config.get_text_config()
        rows, named = text.vocab_size, max(tokenizer.convert_tokens_to_ids(self._named_tokens), default=-1)
        text.vocab_size = max(rows, named + 1)
        return range(min(new.start, rows), max(new.stop, named + 1)) if named >= rows else new

    @property
    def _named_tokens(self) -> list[str]:
        return [token for token in dict.fromkeys(self.config.options.new_tokens) if token]

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
        model: nn.Module = _built(self._folder, self._config, self.config.options.attention)
        if self._turned:
            model = turn_layers(model)
        if self._keeps_apart:
            attend_within(model)
        sum_losses_in_chunks(model)
        return model

    def weights(self, component: str) -> WeightFiles:
        return self._with_new_rows(WeightFiles(self._stored.entries))

    def written(self, component: str) -> Mapping[str, Tensor]:
        return self._stored.written

    def read_export(self, component: str, files: Sequence[Path]) -> WeightFiles:
        return WeightFiles(read_names(self._empty, files, None, self._transposed).entries)

    def loaded_by_users(self, component: str, folder: Path, numbers: bool = True) -> Mapping[str, Tensor]:
        source = replace(self._folder, path=folder)
        kind = causal_class(_read_config(source))
        if kind is None or "quantization_config" in source.read("config.json"):
            return {}  # it is not loaded whole; or only by a package for its codes
        tensors = loaded_tensors(kind, folder, numbers)
        loaded = {name.replace(TEXT_PART, "", 1): tensor for name, tensor in tensors.items()}
        own = stored_tensors(self._empty)
        lost = sorted(own.keys() - loaded.keys())
        if lost:
            raise RuntimeError(f"{folder}: transformers loads a {kind.__name__}, which has no '{lost[0]}'")
        if folder != self.folder:  # the numbers of tensors that are one in the model; those of the base were compared
            try:
                self.read_export(component, safetensors_in(folder, TRANSFORMERS_STEM))
            except InputError as error:
                raise RuntimeError(str(error)) from error
        check_tied(self._empty, loaded, folder)
        # Rows that are added for new tokens are not in the base's files.
        grown = self._token_tensors if folder == self.folder and self._new_ids else ()
        kept = {name: loaded[name].detach() for name in own if name not in grown and not loaded[name].is_meta}
        return {name: tensor.t() if name in self._transposed else tensor for name, tensor in kept.items()}

    @cached_property
    def _stored(self) -> StoredNames:
        files = safetensors_in(self.folder, TRANSFORMERS_STEM)
        return read_names(self._empty, files, self._whole, self._transposed)

    @cached_property
    def _whole(self) -> Any:
        """The model whose text part is trained, on the meta device; None where all of the folder is text."""
        if self._folder_config is self._config:
            return None
        return build_whole(self._folder_config)

    @property
    def _transposed(self) -> frozenset[str]:
        return frozenset(f"{name}.weight" for name in self._turned)

    def computed_buffers(self, component: str) -> Mapping[str, Tensor]:
        return computed_buffers(self._config, self.config.options.attention)

    def layout(self, component: str) -> tuple[Fused, ...]:
        """Return the layers' names in the model that peft loads, where that is more than the text part."""
        return self._loaded_layout

    def modules_in_peft(self, component: str) -> Collection[str]:
        """The modules that see or hear too: a name's end must not select their layers."""
        if self._loaded is None:
            return super().modules_in_peft(component)
        return [name for name, _ in self._loaded.named_modules()]

    @cached_property
    def _loaded(self) -> Any:
        """The model that peft loads, on the meta device, where that is more than the text part."""
        if self._whole is None or causal_class(self._folder_config) is None:
            return None
        return build_language_model(self._folder_config)

    @cached_property
    def _loaded_layout(self) -> tuple[Fused, ...]:
        if self._loaded is None:
            return ()
        own = stored_tensors(self._empty)
        pairs = {name: name.replace(TEXT_PART, "", 1) for name in self._loaded.state_dict()}
        return tuple(Fused(name, (part,)) for name, part in pairs.items() if part in own)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, a class of transformers, with `model.options.new_tokens`."""
        return self._tokenizer_and_new[0]

    @cached_property
    def _tokenizer_and_new(self) -> tuple[Any, range]:
        """The tokenizer, and the ids of those of `model.options.new_tokens` that it did not know."""
        from transformers import AddedToken, AutoTokenizer

        try:
            tokenizer = from_folder(AutoTokenizer, self.folder)
        except InputError:
            raise
        except (OSError, ValueError) as error:
            raise InputError(f"{self._folder.field} {self.folder}: no tokenizer that can be read ({error})") from error
        # A token that is added again loses its own properties, as that of being special.
        known = tokenizer.get_vocab()
        new = [token for token in self._named_tokens if token not in known]
        if not new:
            return tokenizer, range(len(tokenizer), len(tokenizer))
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in new])
        ids = tokenizer.convert_tokens_to_ids(new)
        return tokenizer, range(ids[0], ids[-1] + 1)

    @property
    def vocabulary(self) -> int:
        return int(self._empty.get_input_embeddings().num_embeddings)

    @property
    def begin_of_text(self) -> tuple[int, ...]:
        first = self.tokenizer.bos_token_id
        is_written = first is not None and self.tokenizer("")["input_ids"][:1] == [first]
        return tuple(self._with_rows([first])) if is_written else ()

    @property
    def end_of_text(self) -> int:
        end = self.tokenizer.eos_token_id
        if end is None:
            raise InputError(
                f"{self._folder.field} {self.folder}: its tokenizer has no end-of-text token; "
                "set eos_token in tokenizer_config.json"
            )
        return self._with_rows([int(end)])[0]

    def tokenize(self, text: str) -> list[int]:
        return self._with_rows(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _with_rows(self, ids: list[int]) -> list[int]:
        """Return the ids, each of which has a row in the model's table of tokens.

        Raises:
            InputError: One has none, as that of a token that was added to the tokenizer only. A GPU would stop without
                naming it.
        """
        last = max(ids, default=0)
        if last >= self.vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(last)
            raise InputError(no_row(f"{self._folder.field} {self.folder}", token, last, self.vocabulary))
        return ids

    @cached_property
    def _chat(self) -> Chat:
        return Chat(self.tokenizer, self._template, self._system)

    def encode_chat(self, messages: object, tools: object = None, variables: object = None) -> Encoded:
        ids, loss_mask = self._chat.encode(messages, tools, variables)
        return self._with_rows(ids), loss_mask

    def take_notes(self) -> list[str]:
        return self._chat.take_notes()

    def encode_pair(self, prompt: str, completion: str) -> Encoded:
        if self.tokenizer.is_fast:
            text = prompt + completion
            ids, loss_mask = encode_spans(self.tokenizer, text, [(len(prompt), len(text))])
            return self._with_rows(ids), loss_mask
        # Without offsets, the border of the two texts can only be kept by a border of tokens.
        before, after = self.tokenize(prompt), self.tokenize(completion)
        return before + after, [False] * len(before) + [True] * len(after)

    def loss(self, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        weights = (batch["loss_mask"] * batch["weight"][:, None]).flatten()[batch["predicted"] + 1]
        total, routers = self._weighted(model, batch, weights)
        loss = Loss(total, weights.sum())
        # Some sizes of a class have no layer with experts.
        return self._balanced(loss, routers, batch) if routers else loss

    def weighted_loss(self, model: nn.ModuleDict, batch: Batch, weights: Tensor | Weigh) -> Tensor:
        total, _ = self._weighted(model, batch, weights)
        return total

    def _weighted(self, model: nn.ModuleDict, batch: Batch, weights: Tensor | Weigh) -> tuple[Tensor, Sequence[Tensor]]:
        """The weighted sum of the losses, and the logits of the routers where they are trained."""
        network = model[COMPONENT]
        inputs = {"input_ids": batch["tokens"], "use_cache": False}
        # A row of one document has the positions that the class gives it, which need not begin at 0.
        if self.packs_documents:
            inputs |= position_ids(network, batch["documents"])
        if self._attends_within(batch):
            inputs["attention_mask"] = begins_mask(batch["begins"])
        if self._experts_per_token is not None:
            inputs[ROUTERS] = bool(self._router_weight)
        predicted = batch["predicted"]
        targets = batch["tokens"].flatten()[predicted + 1]
        total, routers = network(**inputs, predicted=predicted, targets=targets, token_weights=weights)
        return total, routers if self._router_weight else ()

    def _balanced(self, loss: Loss, logits: Sequence[Tensor], batch: Batch) -> Loss:
        """Add the loss of the routers: that of a row counts as often as the row has tokens in the loss."""
        assert self._experts_per_token is not None
        rows = balance_loss(logits, self._experts_per_token, batch["documents"] >= 0)
        num_tokens = batch["loss_mask"][:, 1:].sum(dim=1) * batch["weight"]
        return Loss(loss.total + self._router_weight * (rows * num_tokens).sum(), loss.weight)

    def _attends_within(self, batch: Batch) -> bool:
        """Whether rows are attended to by documents, instead of with a mask."""
        can = can_attend(batch["documents"].device, COMPUTE_DTYPE[self._precision], self._is_compiled)
        return can and self._keeps_apart

    @cached_property
    def _keeps_apart(self) -> bool:
        """Whether this class computes the same by documents as with transformers' mask."""
        is_sdpa = self._empty.config._attn_implementation == MASKED
        return is_sdpa and self.packs_documents and computes_within(self._config)

    @cached_property
    def packs_documents(self) -> bool:
        found = self._sight
        if found is not None and found.later:
            raise InputError(
                f"{self.folder / 'config.json'}: in a {type(self._empty).__name__} of this config a token sees those "
                "after it, so nothing is left to predict; set is_decoder or causal to true there, if the model has "
                "such a field, or name a causal language model"
            )
        return found is not None and not found.others

    def generate(self, model: nn.ModuleDict, prompt: str, cfg: SampleConfig, rng: SampleRng) -> str:
        ids = [*self.begin_of_text, *self.tokenize(prompt)] or [self.end_of_text]
        return self._continued(model, ids, cfg, rng)

    def reply(self, model: nn.ModuleDict, question: str, cfg: SampleConfig, rng: SampleRng) -> str:
        ids = self._with_rows(self._chat.prompt(question))
        return self._chat.answer(self._continued(model, ids, cfg, rng))

    def _continued(self, model: nn.ModuleDict, ids: Sequence[int], cfg: SampleConfig, rng: SampleRng) -> str:
        tokens = torch.tensor(ids, device=rng.device)
        is_cached = self._sight is not None and self._sight.is_cached
        generated = continue_text(model[COMPONENT], tokens, cfg.tokens, cfg.temperature, self._stops, rng, is_cached)
        return str(self.tokenizer.decode(generated.tolist()))

    @property
    def _generation_config(self) -> dict[str, Any]:
        """generation_config.json; without that file the ids that transformers then takes from config.json."""
        if (self.folder / GENERATION).is_file():
            return self._folder.read(GENERATION)
        config = self._folder.read("config.json")
        ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return {name: number for name, number in ids.items() if number is not None}

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        """The ids after which a generated text is complete: the model's own, the end of a text, and the ends of the
        turns that its chat template writes, which a base model gets to know in training."""
        return tuple(dict.fromkeys((*self._stops_of_base, *self._ends_of_turns.ids)))

    @property
    def _stops_of_base(self) -> tuple[int, ...]:
        return (*_listed(self._generation_config.get("eos_token_id")), self.end_of_text)

    @cached_property
    def _ends_of_turns(self) -> Ends:
        has_template = self.tokenizer.is_fast and (self._template is not None or bool(self.tokenizer.chat_template))
        return ends_of_turns(self.tokenizer, self._chat) if has_template else Ends()

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        config: dict[str, Any] = config_of(PUBLISHED[architecture]).to_dict()
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
        if self.config.is_single_file:
            raise InputError(f"model.path {path}: a language model is a folder with config.json and tokenizer; name it")
        return replace(open_folder(self.config, self.architectures, self._write_tiny), expects=FOLDER)

    def _write_tiny(self) -> Path:
        sizes = self.tiny(self.config.options.architecture)

        def write(folder: Path) -> None:
            config = config_of(sizes[COMPONENT])
            write_random(folder, lambda: build_language_model(config), "causal-lm")
            write_byte_tokenizer(folder, config)

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
            config = config_of({key: value for key, value in sizes.items() if key != "quantization_config"})
            write_random_weights(folder, build_language_model(config))
            config.save_pretrained(folder)
            if source is None:
                write_byte_tokenizer(folder, config)
            else:
                copy_files(source.path, COMPANION_FILES, folder)

        companions = source.digest(*COMPANION_FILES) if source else ""
        return write_tiny(self.cache, "causal-lm-random", TINY_VERSION, {"sizes": sizes, "beside": companions}, write)


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


def _built(folder: ModelFolder, config: Any, attention: str) -> Any:
    file = folder.path / "config.json"
    if causal_class(config) is None:
        raise InputError(
            f"{file}: describes a {config.model_type}, which is not a causal language model; "
            "set model.family to the family of that model"
        )
    try:
        return build_language_model(config, attention)
    except (ValueError, TypeError, AttributeError, ImportError, KeyError, RuntimeError, AssertionError) as error:
        field = f"model.options.attention: {attention}: " if "does not support" in str(error) else ""
        raise InputError(
            f"{file}: {field}transformers cannot build this {config.model_type} ({first_line(error)})"
        ) from error


def _listed(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    """The ids of a field that holds one, several or none."""
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def _linear_layers(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear layers inside the blocks, by name."""
    return {
        f"{block}.{name}": layer
        for block, module in model.named_modules()
        if type(module).__name__ in blocks
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    }


def _is_small(name: str, layer: nn.Linear, has_experts: bool) -> bool:
    """Whether a layer has few numbers, or only decides which experts read a token: adapters leave it as it is."""
    parts = name.split(".")
    is_router = any("router" in part for part in parts) or (has_experts and "gate" in parts)
    return is_router or min(layer.in_features, layer.out_features) < SMALLEST


FAMILY = CausalLM
