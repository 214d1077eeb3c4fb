"""Whether a model on this machine is one that its family loads, by the names of a folder's configs. Imports no torch.

The families list these files (`ModelFamily.model_files`, repeated in config/families.json). The loaders read more.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config import families
from trainer.config.families import FamilyFacts
from trainer.config.schema import RunConfig
from trainer.config.sections import DEMO, MODEL_WORDS, ModelConfig, family_names
from trainer.system import files
from trainer.system.errors import InputError, Problem
from trainer.weights import forms
from trainer.weights.headers import StoredTensor, read_header
from trainer.weights.hub import find_folder

DENOISER_CONFIG = "transformer/config.json"
MOST_BYTES = 2**20
"""A config is a few kilobytes; a longer file is left to the loader."""
MOST_TOKENIZER_BYTES = 2**27
"""The largest published tokenizer.json has 33 MB."""
_COMPONENT_FILE = re.compile(r"(diffusion_pytorch_model|model)(-\d+-of-\d+)?\.safetensors")
"""The names that diffusers and transformers give the files of a component; others in its folder are not read."""
_OTHER_FILE = "only .safetensors and .sft are read as single files; convert it, or name a folder"


def refused(model: ModelConfig) -> Iterator[Problem]:
    """Yield why the model is not one of its family. Opens one or a few small files.

    Raises:
        InputError: A hub id is not on this machine.
    """
    known = families.of(model.family)
    if known is None or model.path in MODEL_WORDS:
        return
    wrong = list(wrong_files(model))
    if wrong:
        yield from wrong
        return
    field, path = ("model.base", model.base) if model.base else ("model.path", model.path)
    folder = find_folder(field, path)
    reason = _reason(folder, known)
    if not reason and known.is_concluded and not known.model_files[DENOISER_CONFIG][1]:
        reason = known_family(folder, model.family)
    if reason:
        yield Problem(field, f"{path}: {reason}")


def wrong_files(model: ModelConfig) -> Iterator[Problem]:
    """Yield why a file in place of a folder is not taken: a single file that lacks its folder, or another format."""
    if model.is_single_file and model.base is None:
        yield Problem(
            "model.path",
            f"{model.path}: a single .safetensors or .sft file holds neither configs nor tokenizers; "
            "set model.base to the diffusers folder of the model it was made from",
        )
    elif not model.is_single_file and os.path.isfile(model.path):
        kind = "GGUF is not read; " + forms.READ if model.path.lower().endswith(".gguf") else _OTHER_FILE
        yield Problem("model.path", f"{model.path}: {kind}")
    if model.base and os.path.isfile(model.base):
        yield Problem("model.base", f"{model.base}: a file; name the diffusers folder that model.path was made from")


def unread(cfg: RunConfig, folder: Path | None = None) -> Iterator[Problem]:
    """Yield fields that are set, and that this model does not read though others of its family do.

    Args:
        cfg: The config.
        folder: The model's diffusers folder. None looks for the one that the config names; `families.refused` knows of
            `tiny`.

    Raises:
        InputError: A hub id is not on this machine.
    """
    known, model = families.of(cfg.model.family), cfg.model
    if known is None or (folder is None and model.path == "tiny"):
        return
    if folder is None and model.path == "demo":
        folder = DEMO / model.family
    folder = folder or find_folder(*(("model.base", model.base) if model.base else ("model.path", model.path)))
    conditional = known.conditional_fields.items()
    read = known.objective_read(
        [field for field, (name, key, usual) in conditional if json_of(folder, name).get(key, usual)]
    )
    for problem in families.unread("objective", cfg.objective, read):
        if problem.field in known.conditional_fields:
            yield problem


def unread_weights(model: ModelConfig) -> Iterator[Problem]:
    """Yield that a file of the model stores weights in a form that is not read. Reads the files' headers.

    Raises:
        InputError: A hub id is not on this machine, or a file is not a sound safetensors file.
    """
    known = families.of(model.family)
    if known is None or model.path in MODEL_WORDS:
        return
    field, path = ("model.base", model.base) if model.base else ("model.path", model.path)
    folder = find_folder(field, path)
    unused = set(model.options.without)
    if model.base:
        yield from _unread_form("model.path", model.path, [Path(model.path)], {})
        unused |= {name.rpartition("/")[0] for name in known.model_files}
    try:
        configs = sorted([*folder.glob("config.json"), *folder.glob("*/config.json")])
    except OSError:  # no folder can have this name, which others say
        return
    for config in configs:
        part = config.parent
        if part == folder or part.name not in unused:
            paths = [file for file in sorted(part.glob("*.safetensors")) if _COMPONENT_FILE.fullmatch(file.name)]
            yield from _unread_form(field, str(part), paths, json_of(part, config.name))


def _unread_form(field: str, named: str, paths: Iterable[Path], config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield that weights are in a form that is not read. named: the file or folder, for the message."""
    tensors: dict[str, StoredTensor] = {}
    described: dict[str, forms.LayerForm] = {}
    for path in paths:
        header = read_header(path)
        tensors |= header.tensors
        described |= forms.read_forms(path, header)
    found = next(forms.unread(tensors, described), None)
    named_by_config = config.get("quantization_config")
    method = str(named_by_config.get("quant_method", "")) if isinstance(named_by_config, Mapping) else ""
    if found:
        key, form = found
        yield Problem(field, forms.refusal(named, key, f"{form} ({method} by its config.json)" if method else form))
    elif method and method not in forms.METHODS and (not tensors or forms.has_integers(tensors)):
        yield Problem(field, f"{named}: the weights are in {method} by config.json, which is not read; {forms.READ}")


def known_family(folder: Path, family: str) -> str:
    """Say which other family knows the model of a folder; "" where none does. family: one that concludes."""
    network = json_of(folder, DENOISER_CONFIG).get("_class_name")
    for name in family_names():
        known = families.of(name) if name != family else None
        if known and known.model_files.get(DENOISER_CONFIG) == ("_class_name", network):
            return f"holds a {network}, which {name} knows; set model.family: {name}"
    return ""


def _reason(folder: Path, known: FamilyFacts) -> str:
    """Why a folder is not one of the family's models; "" where it is one as far as its configs say."""
    for name, (key, value) in known.model_files.items():
        try:
            config = json.loads(files.read(folder / name, MOST_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            kind = "a diffusers folder" if value else "the folder of such a model"
            return f"no {name}; expected {kind}. Download it or set model.path: tiny"
        except (InputError, OSError, ValueError, RecursionError):  # the loader says what is wrong with the file
            continue
        found = config.get(key) if isinstance(config, dict) else None
        if key and found is None:
            return f"{name} has no {key}; expected {'a ' + value if value else 'the config of a model'}"
        if value and found != value:
            return f"{name} describes a {found}, not a {value}; set model.family to the family of that model"
    return ""


def without_row(model: ModelConfig) -> Iterator[Problem]:
    """Yield that a language model has no row for the token that ends each text, as where it was added to the tokenizer
    only. Reads the tokenizer's file, up to half a second.

    Raises:
        InputError: A hub id is not on this machine.
    """
    known = families.of(model.family)
    if known is None or known.trains_on != "text" or model.path in MODEL_WORDS or model.options.new_tokens:
        return
    folder = find_folder("model.path", model.path)
    try:
        config = json.loads(files.read(folder / "config.json", MOST_BYTES))
        end = json.loads(files.read(folder / "tokenizer_config.json", MOST_BYTES))["eos_token"]
        tokens = json.loads(files.read(folder / "tokenizer.json", MOST_TOKENIZER_BYTES))
        rows = config.get("vocab_size") or config["text_config"]["vocab_size"]
        token = end if isinstance(end, str) else end["content"]
        numbers = [added["id"] for added in tokens["added_tokens"] if added["content"] == token]
        if numbers and numbers[0] >= rows:
            yield Problem("model.path", no_row(model.path, token, numbers[0], rows))
    except (InputError, OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return  # the loader says what is wrong with a file


def no_row(model: str, token: str, number: int, rows: int) -> str:
    """Say that the model has no row for a token of its tokenizer. model: its path, with or without the field."""
    return (
        f"{model}: '{token}' is token {number} of the tokenizer, but the model knows 0 to {rows - 1}: the tokenizer "
        f"was extended and the model was not. Set model.options.new_tokens to ['{token}'], which adds the rows, or "
        "remove the token from texts and tokenizer"
    )


def folder_of(model: ModelConfig) -> Path | None:
    """The diffusers folder that the config names; None for one of our words or where it is not on this machine."""
    if model.base is None and model.path in MODEL_WORDS:
        return None
    try:
        return find_folder(*(("model.base", model.base) if model.base else ("model.path", model.path)))
    except InputError:
        return None


def has_marks(marks: Mapping[str, Mapping[str, Any]], folder: Path | None) -> bool:
    """Whether the folder says what only a kind of model says.

    Args:
        marks: {JSON file: {key: value}}; a missing key counts as false. Without any, no folder has them.
        folder: The model's folder; None has no marks.
    """
    found = {name: json_of(folder, name) for name in marks}
    same = [found[name].get(key, False) == value for name, keys in marks.items() for key, value in keys.items()]
    return bool(marks) and all(found.values()) and all(same)


def json_of(folder: Path | None, name: str) -> Mapping[str, Any]:
    """A JSON file of the folder; empty where it cannot be read, about which the loader says more."""
    try:
        config = json.loads(files.read(folder / name, MOST_BYTES)) if folder else {}
    except (InputError, OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
