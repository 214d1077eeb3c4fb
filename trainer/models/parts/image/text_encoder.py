"""Language models as text encoders, and tiny tokenizers."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.config.sections import ModelConfig
from trainer.models.base import LoadModule, TextLength
from trainer.models.parts.folder import TRANSFORMERS_STEM, ModelFolder
from trainer.models.parts.image.images import device_of
from trainer.system.errors import InputError

MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")
"""The outputs of a tokenizer that language models read."""


@dataclass(frozen=True)
class TextEncoder:
    """A frozen text model without a head, and its tokenizer."""

    model: Any
    tokenizer: Any


def load_tokenizer(folder: ModelFolder, name: str, kind: Any = None) -> Any:
    """Load the tokenizer in the subfolder `name`, for example `tokenizer_2`, or `processor` with that of images.

    kind: its class of transformers; None takes the folder's.

    Raises:
        InputError: It has tokens that its encoder has no row for.
    """
    from transformers import AutoTokenizer

    tokenizer = from_folder(kind or AutoTokenizer, folder.path / name)
    encoder = name.replace("tokenizer", "text_encoder").replace("processor", "text_encoder")
    if (folder.path / encoder / "config.json").is_file():
        config = folder.read(f"{encoder}/config.json")
        check_rows(folder, name, tokenizer, config.get("text_config", config).get("vocab_size"))
    return tokenizer


def check_rows(folder: ModelFolder, name: str, tokenizer: Any, rows: int | None) -> None:
    """Raise InputError for a tokenizer with tokens that its model has no row for. rows: of the model, if known."""
    token, last = max(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    if rows is not None and last >= rows:
        raise InputError(
            f"{folder.field} {folder.path}: '{token}' is token {last} of {name}, but its model knows 0 to {rows - 1}; "
            "remove the tokens that were added to the tokenizer, or download the folder again"
        )


def from_folder(kind: Any, folder: Path, file: str = "") -> Any:
    """Load an object of a transformers class from a model's folder, without running code in that folder.

    Args:
        kind: Class of transformers with `from_pretrained`.
        folder: The model's folder.
        file: The file that is read, for the message.

    Raises:
        InputError: The model needs the code in the folder.
    """
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise InputError(
            f"{folder / file}: brings code of its own (auto_map), which is never run; "
            "name a model that transformers knows"
        ) from error


COUNTED = 1024
"""Number of texts that are tokenized at once."""


def text_lengths(
    encoder: str,
    tokenizer: Any,
    captions: Sequence[str],
    read: int,
    template: Callable[[str], str] = str,
    special: bool = True,
) -> list[TextLength]:
    """Measure how much of each caption an encoder reads.

    Args:
        encoder: Name of the encoder.
        tokenizer: Its tokenizer.
        captions: The captions.
        read: Most tokens that the encoder reads.
        template: Puts the model's text around a caption.
        special: Whether the tokenizer adds its own beginning and end to the result.
    """
    lengths = []
    for start in range(0, len(captions), COUNTED):
        some = captions[start : start + COUNTED]
        texts = [template(caption) for caption in some]
        counted = tokenizer(texts, add_special_tokens=special, verbose=False).input_ids
        for caption, text, ids in zip(some, texts, counted, strict=True):
            rest = _unread(tokenizer, caption.strip(), text, read, special) if len(ids) > read else ""
            lengths.append(TextLength(encoder, len(ids), read, rest))
    return lengths


def _unread(tokenizer: Any, caption: str, text: str, read: int, special: bool) -> str:
    """The end of the caption inside `text` that is cut when the text is cut to `read` tokens."""
    spans = tokenizer(
        text, truncation=True, max_length=read, add_special_tokens=special, return_offsets_mapping=True
    ).offset_mapping
    end = max(stop for _, stop in spans)
    # A template may drop parts of a caption.
    return caption[max(0, end - text.rindex(caption)) :] if caption in text else text[end:]


def language_model_config(folder: ModelFolder, *model_types: str) -> dict[str, Any]:
    """The part of text_encoder/config.json for text.

    Args:
        folder: The model's folder.
        model_types: As for `encoder_config`.

    Raises:
        InputError: The model has another type, or its sizes are missing.
    """
    config = folder.encoder_config("text_encoder", *model_types)
    text: dict[str, Any] = config.get("text_config", config)
    missing = sorted({"num_hidden_layers", "hidden_size"} - text.keys())
    if missing:
        raise InputError(
            f"{folder.field} {folder.path}: text_encoder/config.json has no {missing[0]}; download the folder again"
        )
    return text


def language_model_key(key: str) -> str | None:
    """The name of a tensor without the prefixes of transformers' versions; None for head and vision tower."""
    match = re.fullmatch(
        r"(?:(?:model\.)?language_model\.(?:model\.)?|model\.)?((?:embed_tokens|layers|norm)\..+)", key
    )
    return match[1] if match else None


def load_language_model(
    load: LoadModule, folder: ModelFolder, classes: tuple[Any, Any], config: Mapping[str, Any], layers: Sequence[int]
) -> TextEncoder:
    """Load the language model of `text_encoder`, frozen and sharded layer by layer, without layers that are not used.

    Args:
        load: Loads and shards the module.
        folder: The model's folder.
        classes: Classes of config and model, as (Qwen3Config, Qwen3Model).
        config: The result of `language_model_config`.
        layers: The hidden states that are used, numbered as in `hidden_states`.
    """
    # One layer more than the deepest state needs, because the last layer's output is normalised.
    empty = _build_language_model(*classes, config, min(max(layers) + 1, config["num_hidden_layers"]))
    files = folder.weights("text_encoder", TRANSFORMERS_STEM, language_model_key)
    model: Any = load(empty, files, sorted({type(layer).__name__ for layer in empty.layers}))
    # No file holds the rotary frequencies, and the meta device lost them: they are computed again.
    model.rotary_emb = type(model.rotary_emb)(model.config).to(device_of(model))
    return TextEncoder(model, load_tokenizer(folder, "tokenizer"))


def hidden_states(
    model: Any, tokens: Mapping[str, Tensor], layers: Sequence[int], norm_last: bool = True
) -> list[Tensor]:
    """Hidden states of a language model, each (1, L, D): 0 is the embeddings, the last one is normalised.

    Hooks on the layers take the states: transformers' own hooks depend on the model's class, which sharding replaces.

    Args:
        model: The language model.
        tokens: "input_ids", "attention_mask" and optionally "position_ids", each (1, L).
        layers: Numbers of the hidden states.
        norm_last: Whether the last one is normalised; else it is what the last layer gives.

    See DECISIONS 17.
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
    if norm_last:
        outputs[len(model.layers)] = last
    return [outputs[layer] for layer in layers]


def stacked_layers(model: ModelConfig, config: Mapping[str, Any], needed: int, folder: ModelFolder) -> tuple[int, ...]:
    """The hidden states that are stacked: those the config names, or evenly spaced ones, as in the published models.

    Args:
        model: The section `model` of the config.
        config: The result of `language_model_config`.
        needed: Features per token that the transformer reads.
        folder: The model's folder.

    Raises:
        InputError: The encoder does not have the states, or they do not fill the transformer's input.
    """
    depth, width = config["num_hidden_layers"], config["hidden_size"]
    wanted = needed // width
    layers = model.options.text_layers or tuple(depth * k // (wanted + 1) for k in range(1, wanted + 1))
    if not all(0 <= layer <= depth for layer in layers):
        raise InputError(
            f"model.options.text_layers: {list(layers)} is not within 0 to {depth}, the hidden states of "
            f"{folder.path / 'text_encoder'}"
        )
    if len(layers) * width != needed:
        raise InputError(
            f"model.options.text_layers: {list(layers)} gives {len(layers)} x {width} = {len(layers) * width} "
            f"features per token, but the transformer reads {needed}; name {needed / width:g} hidden states"
        )
    return layers


def max_tokens(model: ModelConfig, folder: ModelFolder, tokenizer: str, published: int) -> int:
    """The length that captions are padded or cut to: that of the config, or the published model's.

    The tokenizer's own limit counts if it is lower. tokenizer: subfolder of the tokenizer.
    """
    longest = folder.read(f"{tokenizer}/tokenizer_config.json").get("model_max_length") or published
    return model.options.max_tokens or min(published, int(longest))


def _build_language_model(config_class: Any, model_class: Any, config: Mapping[str, Any], num_layers: int) -> Any:
    truncated = {**config, "num_hidden_layers": num_layers}
    if config.get("layer_types"):
        truncated["layer_types"] = config["layer_types"][:num_layers]
    with torch.device("meta"):
        return model_class(config_class.from_dict(truncated)).float()


TINY_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TINY_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{{ message.content[0].text }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


QWEN3_4B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_8B = QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288}
_QWEN3_VL_ROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_theta": 5e6, "rope_type": "default"}
QWEN3_VL_4B = QWEN3_4B | {"rope_parameters": _QWEN3_VL_ROPE}
QWEN3_VL_8B = QWEN3_8B | {"rope_parameters": _QWEN3_VL_ROPE}
"""Sizes of published language models. Qwen3's layers are of one type, which follows from NO_LAYER_TYPES."""
NO_LAYER_TYPES = {"layer_types": None}


def tiny_language_model(width: int, vocabulary: int, num_layers: int) -> dict[str, Any]:
    """The sizes that the configs of tiny language models share."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }


def tiny_qwen3_vl(width: int, vocabulary: int, num_layers: int) -> dict[str, Any]:
    """The config of a tiny Qwen3-VL, which also reads images."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": width}
    return {
        "model_type": "qwen3_vl",
        "text_config": tiny_language_model(width, vocabulary, num_layers)
        | {"head_dim": width // 4, "rope_parameters": rope},
        "vision_config": vision | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    }


def write_tiny_tokenizer(
    folder: Path, vocabulary: int, max_tokens: int, special: Sequence[str] = TINY_SPECIAL, corpus: Sequence[str] = ()
) -> None:
    """Write a byte-level tokenizer with a chat template, trained on `corpus` and 256 Unicode names of things.

    special: tokens that are never split, numbered from 0.
    """
    texts = [*corpus, *names_of_things()]
    train_tokenizer(texts, vocabulary, max_tokens, special, TINY_CHAT_TEMPLATE).save_pretrained(folder)


def train_tokenizer(
    corpus: Sequence[str], vocabulary: int, max_tokens: int, special: Sequence[str], chat_template: str
) -> Any:
    """Train a byte-level tokenizer like Qwen's. special: tokens that are never split, numbered from 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2TokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(corpus, trainer)
    model = json.loads(trained.to_str())["model"]
    return Qwen2TokenizerFast(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        extra_special_tokens=list(special[1:]),
        chat_template=chat_template,
        model_max_length=max_tokens,
    )


def names_of_things() -> list[str]:
    """A small corpus that every machine has: `red apple`, `crocodile` and 254 others."""
    return [unicodedata.name(chr(point)).lower() for point in range(0x1F400, 0x1F500)]
