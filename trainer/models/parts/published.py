"""Folders with the configs of published models, for planning before they are downloaded. See DECISIONS 90."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models import families
from trainer.models.parts.folder import write_once
from trainer.system.errors import InputError, not_one_of


def published_folder(model: ModelConfig, cache: Path) -> Path:
    """Make a diffusers folder under `cache` that describes the published model `model.options.architecture`.

    Without an architecture, it describes the family's default. Its weight files hold no tensors, and its tokenizers
    have the vocabulary of a tiny model: it serves only for building on the meta device.

    Raises:
        InputError: The family does not have the architecture.
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
            file = folder / part if part.endswith(".json") else folder / part / name
            config = json.loads(file.read_text(encoding="utf-8"))
            text = config.get("text_config", config)  # encoders that also read images have it
            text |= {key: value for key, value in values.items() if key != "vision_config"}
            config.get("vision_config", {}).update(values.get("vision_config", {}))
            file.write_text(json.dumps(config, indent=2), encoding="utf-8")

    return write_once(cache / f"published-{model.family}-{architecture}-{key}", write)
