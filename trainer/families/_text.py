"""Language models as text encoders, and tiny tokenizers."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.config import InputError
from trainer.families._images import device_of
from trainer.families.base import LoadModule
from trainer.weights import WeightFiles

MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")
"""Of what tokenizers make, that which language models read."""


def language_model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an encoder's config.json that concerns text, with the type its weights are computed in."""
    text: dict[str, Any] = config.get("text_config", config)
    return text | {"dtype": config.get("dtype") or config.get("torch_dtype") or "float32"}


def language_model_key(key: str) -> str | None:
    """Name without head, vision tower and the prefixes that transformers' versions put before it."""
    found = re.fullmatch(
        r"(?:model\.language_model\.|language_model\.model\.|model\.)?((?:embed_tokens|layers|norm)\..+)", key
    )
    return found[1] if found else None


def load_language_model(
    load: LoadModule, classes: tuple[Any, Any], config: Mapping[str, Any], num_layers: int, files: WeightFiles
) -> Any:
    """A language model without head, frozen and sharded layer by layer.

    classes: its config and model, as (Qwen3Config, Qwen3Model).  config: `language_model_config`'s.  num_layers: it
    is cut after so many; the deepest one's output passes the norm.  files: by the names of `language_model_key`.
    """
    empty = _build_language_model(*classes, config, min(num_layers, config["num_hidden_layers"]))
    model: Any = load(empty, files, sorted({type(layer).__name__ for layer in empty.layers}))
    # The rotary frequencies are in no file: what the meta device lost is computed again.
    model.rotary_emb = type(model.rotary_emb)(model.config).to(device_of(model))
    return model


def hidden_states(model: Any, tokens: Mapping[str, Tensor], layers: Sequence[int]) -> list[Tensor]:
    """Hidden states of a language model, each (1, L, D): 0 is the embeddings, the last one is normalised.

    tokens: "input_ids", "attention_mask" and perhaps "position_ids", each (1, L).
    Taken by hooks on the layers: transformers finds its own by the model's class, which sharding replaces.
    """
    outputs: dict[int, Tensor] = {}

    def keep(number: int) -> Callable[..., None]:
        return lambda module, arguments, output: outputs.update({number: output})

    hooks = [model.embed_tokens.register_forward_hook(keep(0))]
    hooks += [layer.register_forward_hook(keep(number)) for number, layer in enumerate(model.layers, 1)]
    try:
        device = device_of(model)
        inputs = {name: tokens[name].to(device) for name in MODEL_INPUTS if name in tokens}
        last = model(**inputs, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    outputs[len(model.layers)] = last
    return [outputs[layer] for layer in layers]


def check_text_layers(layers: Sequence[int], config: Mapping[str, Any], needed: int, folder: Path) -> None:
    """Refuse hidden states that the encoder does not have, or that do not fill the transformer's input when stacked.

    config: `language_model_config`'s.  needed: features per token the transformer reads.  folder: for messages.
    """
    depth, width = config["num_hidden_layers"], config["hidden_size"]
    if not all(0 <= layer <= depth for layer in layers):
        raise InputError(
            f"model.options.text_layers: {list(layers)} is not within 0 to {depth}, the hidden states of {folder}"
        )
    if len(layers) * width != needed:
        raise InputError(
            f"model.options.text_layers: {list(layers)} gives {len(layers)} x {width} = {len(layers) * width} "
            f"features per token, but the transformer reads {needed}; name {needed / width:g} hidden states"
        )


def write_tiny_bpe(
    folder: Path,
    tokenizer: Any,
    vocabulary: int,
    special: Sequence[str],
    chat_template: str,
    corpus: Sequence[str] = (),
) -> None:
    """A byte-level tokenizer trained on `corpus` and 256 Unicode names of animals and things.

    tokenizer: class made from vocabulary and merges, as Qwen2TokenizerFast.  special: tokens that are never split,
    numbered from 0.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([*corpus, *names_of_things()], trainer)
    model = json.loads(trained.to_str())["model"]
    made = tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        extra_special_tokens=list(special[1:]),
        chat_template=chat_template,
    )
    made.save_pretrained(folder)


def names_of_things() -> list[str]:
    """A small corpus that every machine has: `red apple`, `crocodile` and 254 others."""
    return [unicodedata.name(chr(point)).lower() for point in range(0x1F400, 0x1F500)]


def _build_language_model(config_class: Any, model_class: Any, config: Mapping[str, Any], num_layers: int) -> Any:
    truncated = {**config, "num_hidden_layers": num_layers}
    if config.get("layer_types"):
        truncated["layer_types"] = config["layer_types"][:num_layers]
    settings = config_class.from_dict(truncated)
    with torch.device("meta"):
        return model_class(settings).to(settings.dtype)
