"""Folders with the configs of published models, for what must be known of them before they are downloaded."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from trainer.config.errors import InputError, not_one_of
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models import families
from trainer.models.parts.folder import write_once


def published_folder(model: ModelConfig, cache: Path) -> Path:
    """A diffusers folder under `cache` that describes the published model `model.options.architecture`.

    None is the family's default. Its files of weights hold no tensors, and the words of its tokenizers are those of a
    tiny model: for building on the meta device only. Raises InputError for an architecture that the family does not
    have.
    """
    family = families.get(model.family)
    architecture = model.options.architecture or family.default_architecture
    if architecture not in family.architectures:
        raise InputError(f"model.options.architecture: {not_one_of(architecture, family.architectures)}")
    published = family.published(architecture)
    options = model.options.model_copy(update={"architecture": architecture})
    tiny = model.model_copy(update={"path": "tiny", "base": None, "options": options})
    source = family(tiny, ObjectiveConfig(), cache).folder
    key = hashlib.sha256(json.dumps([source.name, published], sort_keys=True).encode()).hexdigest()[:12]

    def write(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        for weights in folder.rglob("*.safetensors"):
            save_file({}, weights)
        for part, values in published.items():
            name = "tokenizer_config.json" if part.startswith("tokenizer") else "config.json"
            _replace(folder / part if part.endswith(".json") else folder / part / name, values)

    return write_once(cache / f"published-{model.family}-{architecture}-{key}", write)


def _replace(file: Path, values: dict[str, Any]) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    text = config.get("text_config", config)  # of encoders that also read pictures
    text |= values
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
