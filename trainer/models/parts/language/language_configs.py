"""Configs of transformers: which part of a model is text, and its layers that are turned."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes of causal language models."""
MOST_SHOWN = 400
"""Characters of an error of transformers that are shown."""


def causal_class(config: Any) -> Any:
    """transformers' class of causal language models for this config, or None.

    The one that the config names counts too: the text part of some models is in no table of the automatic classes.
    """
    import transformers

    table = transformers.AutoModelForCausalLM._model_mapping
    if type(config) in table:
        return table[type(config)]
    for name in config.architectures or ():
        if name.endswith(CAUSAL) and hasattr(transformers, name):
            named = getattr(transformers, name)
            return named if named.config_class is type(config) else None
    return None


def text_config(config: Any) -> Any:
    """Return the config of the text part of a model that also sees or hears; others are returned as they are."""
    text = config.get_text_config(decoder=True)
    # Of a BART transformers returns a copy, which has lost the decoder's fields.
    if type(text) is type(config) or causal_class(text) is None:
        return config
    text = copy.deepcopy(text)
    # Whether the head is the embedding is for the class of the whole model to say.
    text.tie_word_embeddings = config.to_dict().get("tie_word_embeddings", text.tie_word_embeddings)
    return text


def build_whole(config: Any) -> Any:
    """Build the model that a folder holds on the meta device, text part and all; None where its class is not known."""
    import transformers

    names = [name for name in (config.architectures or ()) if hasattr(transformers, name)]
    with torch.device("meta"):
        for named in (getattr(transformers, name) for name in names):
            # A folder may name anything; only a class of models of its own config is called.
            is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
            if is_model and named.config_class is type(config):
                return named(config)
        for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM):
            if type(config) in auto._model_mapping:
                return auto.from_config(config, trust_remote_code=False)
    return None


def turned_layers(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers that multiply by a weight of (inputs, outputs)."""
    from transformers.pytorch_utils import Conv1D

    return tuple(name for name, module in model.named_modules() if isinstance(module, Conv1D))


def turn_layers(model: nn.Module) -> nn.Module:
    """Replace these layers by linear ones, whose weights are (outputs, inputs), on the meta device."""
    for name in turned_layers(model):
        inputs, outputs = model.get_parameter(f"{name}.weight").shape
        with torch.device("meta"):
            model.set_submodule(name, nn.Linear(inputs, outputs))
    return model


def first_line(error: BaseException) -> str:
    """The beginning of the message of an error of a library, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."
