"""The base model of another trainer's config: which of the models that the presets train it is."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from trainer.config import families, yaml12
from trainer.config.foreign.table import Given, Tool, plain
from trainer.config.models import PublishedModel, published_models
from trainer.config.presets import find_presets
from trainer.config.sections import HUB_ID, MODEL_WORDS, WEIGHT_FILES, ModelConfig, family_names
from trainer.system.installation import PRESETS

OTHERS = ("kontext", "edit", "inpaint", "fill", "redux", "refiner", "controlnet", "video", "turbo", "distill")
"""Parts of names of models that are trained otherwise than the one they are named after."""
LEAST_LETTERS = 4
"""Of a word that may stand anywhere in a file's name."""


def found(tool: Tool, given: Given) -> tuple[str, dict[str, Any], str]:
    """Return what a config of another trainer says of its base model.

    Returns:
        The key that names it; {our field: value}, empty where it is none that ShardStudio knows; and a sentence about
        what differs, "" where nothing does.
    """
    key = next((key for key in tool.model.path if given.get(key)), "")
    path = str(given.get(key) or "")
    if edit := _edit(path):
        return key, edit, ""
    known = _by_id(path) or _by_words(path, [plain(word) for word in tool.model.kinds(given) if word])
    if known is None:
        return key, {}, ""
    section = dict(_sections()[known.id])
    if not path or path.lower() == known.id.lower():
        return key, section, ""
    section = {"model.family": section["model.family"], "model.path": path}
    if path.lower().endswith(WEIGHT_FILES):
        base = next((str(given[name]) for name in tool.model.base if given.get(name) and given[name] != path), known.id)
        return key, section | {"model.base": base}, "a single file takes configs and other components from model.base"
    if path.lower().endswith((".ckpt", ".pt", ".pth", ".gguf", ".bin")):
        return key, dict(_sections()[known.id]), "files are read as safetensors alone; this is its published model"
    return key, section, ""


def nearest_preset(model: ModelConfig) -> str:
    """Return the name of a preset of the model, else of one of its family; "" where there is none."""
    known = families.of(model.family)
    edits = {kind.model for kind in known.edits if not kind.draws} if known else set()
    of_family = [
        (name, own["model.path"]) for name, own in _of_presets().items() if own["model.family"] == model.family
    ]
    same = [name for name, path in of_family if path in (model.path, model.base)]
    published = [
        name for name, path in of_family if path in published_models().keys() - edits and path not in MODEL_WORDS
    ]
    return next(iter([*same, *published]), "")


def _edit(path: str) -> dict[str, Any]:
    """The fields of the model that edits images under this hub id; there is not a preset of each."""
    return next(
        (
            {"model.family": family, "model.path": kind.model, "model.options.architecture": kind.architecture}
            for family in family_names()
            if (known := families.of(family))
            for kind in known.edits
            if kind.model.lower() == path.lower()
        ),
        {},
    )


def _by_id(path: str) -> PublishedModel | None:
    models = published_models().values()
    return next((model for model in models if model.id.lower() == path.lower() and not model.is_built_in), None)


def _by_words(path: str, kinds: list[str]) -> PublishedModel | None:
    """The model with the longest of its names in that of the path, else with one that is exactly the word of its
    architecture."""
    models = [model for model in published_models().values() if model.known_as and model.id in _sections()]
    name = plain(path if HUB_ID.fullmatch(path) else path.replace("\\", "/").rstrip("/").rpartition("/")[2])
    inside = {model.id: [word for word in map(plain, model.known_as) if word in name] for model in models}
    others = [other for other in OTHERS if other in name]
    named = [model for model in models if all(any(other in word for word in inside[model.id]) for other in others)]
    for word in kinds:
        exact = next((model for model in models if word in map(plain, model.known_as)), None)
        if exact:
            longer = _longest([model for model in named if _family(model) == _family(exact)], name)
            return longer if others else longer or exact
    return None if kinds else _longest(named, name)


def _longest(models: list[PublishedModel], name: str) -> PublishedModel | None:
    inside = [
        (len(word), model)
        for model in models
        for word in map(plain, model.known_as)
        if len(word) >= LEAST_LETTERS and word in name
    ]
    return max(inside, key=lambda pair: pair[0])[1] if inside else None


def _family(model: PublishedModel) -> str:
    return str(_sections()[model.id]["model.family"])


@functools.cache
def _of_presets() -> Mapping[str, dict[str, Any]]:
    """{preset: its fields of `model`} of the presets that come with the program."""
    found: dict[str, dict[str, Any]] = {}
    for name, file in find_presets(PRESETS).items():
        model = yaml12.parse(file.read_text(encoding="utf-8")).value["model"]
        options = {f"model.options.{key}": value for key, value in model.get("options", {}).items()}
        found[name] = {"model.family": model["family"], "model.path": model["path"], **options}
    return found


def _sections() -> Mapping[str, dict[str, Any]]:
    """{`model.path` of a preset: its fields of `model`}."""
    return {str(model["model.path"]): model for model in reversed([*_of_presets().values()])}
