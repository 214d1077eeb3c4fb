"""A folder of a language model as transformers loads it, which decides itself what is tied, drawn anew or dropped.

See DECISIONS 208.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.models.parts.language.stored_names import first_names

MOST_BYTES = 8 * 2**30
"""Largest folder whose numbers are loaded. Tensors in the type of config.json stay in the mapped file, so that they
take no memory; others, and experts that are joined, do."""


def loaded_tensors(kind: Any, folder: Path, numbers: bool = True) -> Mapping[str, Tensor]:
    """Load a folder with `from_pretrained`, in the type that its config.json names.

    Args:
        kind: transformers' class of the model.
        folder: The folder.
        numbers: Whether numbers are loaded; else no file but the configs and the headers is read.

    Returns:
        {name in the model: tensor}; tensors that the model shares are one object. On the meta device without numbers,
        and for a folder above MOST_BYTES.

    Raises:
        RuntimeError: transformers cannot load it, finds no value for a tensor, or one of another shape.
    """
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    place = {} if numbers and num_bytes <= MOST_BYTES else {"device_map": "meta"}
    try:
        model, found = kind.from_pretrained(
            folder,
            dtype="auto",
            output_loading_info=True,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="eager",  # config.json may name one whose package is not here
            **place,
        )
    except (ImportError, OSError, ValueError) as error:  # a shard without its index, an adapter's files next to it
        reason = str(error).partition("\n")[0]
        raise RuntimeError(
            f"{folder}: transformers cannot load it ({reason}); give a folder as save_pretrained writes it"
        ) from error
    if found["missing_keys"]:
        raise RuntimeError(f"{folder}: transformers finds no '{min(found['missing_keys'])}' in it and draws it anew")
    tensors: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    return tensors


def check_tied(model: Any, loaded: Mapping[str, Tensor], folder: Path) -> None:
    """Compare what a model shares with what transformers shares of the folder that it loaded.

    Args:
        model: The model, on the meta device.
        loaded: The result of `loaded_tensors`, by the names in the model.
        folder: The folder.

    Raises:
        RuntimeError: They differ.
    """
    for name, first in first_names(model).items():
        if name not in loaded or first not in loaded:
            continue
        one, other = loaded[name], loaded[first]
        # Both are in the files, whose numbers were compared when they were opened.
        if one is not other and not one.is_meta and not torch.equal(one, other):
            raise RuntimeError(
                f"{folder}: '{name}' is '{first}' in the model that was trained, but transformers loads two tensors; "
                "correct tie_word_embeddings in config.json"
            )
