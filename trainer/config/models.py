"""Static facts about the models that presets train or that write captions: name, size, licence, files on the hub.

They are in models.yaml. The page shows them, and everything that downloads a model or asks for one reads them here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trainer.config.yaml12 import parse

FACTS = Path(__file__).with_suffix(".yaml")
WILDCARD = "*"


@dataclass(frozen=True)
class PublishedModel:
    """A model that a preset trains, or that writes captions.

    Attributes:
        id: Its hub id, or the word of `model.path` for a model that comes with the program.
        name: The name that people use.
        num_parameters: Parameters of what is trained, without text encoders and autoencoder.
        num_bytes: Size of the files to download, rounded. 0 for a model that comes with the program.
        licence: Name of its licence; empty if it is not known.
        licence_meaning: The licence in one line.
        licence_id: The licence as model cards on the hub name it; empty if it is not known.
        licence_file: Its text in the repository, for a licence that the hub does not list.
        is_gated: Whether the hub asks for a login, and for consent to the licence on the model's page.
        include: Patterns of the files that are needed, as `hf download --include` takes them. A repository often has
            the same weights a second time, in one file or in another precision.
        optional: Folders that a run can do without, by `model.options.without`.
        known_as: What other trainers call it or its architecture, and parts of the names of its files.
        is_captioner: Whether it writes captions; no preset trains it.
    """

    id: str
    name: str
    num_parameters: int
    num_bytes: int = 0
    licence: str = ""
    licence_meaning: str = ""
    licence_id: str = ""
    licence_file: str = ""
    is_gated: bool = False
    include: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    known_as: tuple[str, ...] = ()
    is_captioner: bool = False

    @property
    def is_built_in(self) -> bool:
        """Whether it comes with the program, so that nothing is downloaded."""
        return not self.include

    @property
    def page(self) -> str:
        """The model's page on the hub; empty if it is built in."""
        return "" if self.is_built_in else f"https://huggingface.co/{self.id}"

    @property
    def download_command(self) -> str:
        """The shell command that downloads what is needed, and no more; empty if it is built in."""
        if self.is_built_in:
            return ""
        quoted = (f'"{pattern}"' if WILDCARD in pattern else pattern for pattern in self.include)
        return " ".join([f"hf download {self.id}", *(f"--include {pattern}" for pattern in quoted)])

    @property
    def login_advice(self) -> str:
        """A sentence on what a gated model needs before its download; empty for any other."""
        if not self.is_gated:
            return ""
        return f"It is gated: accept its licence on {self.page}, and log in with `hf auth login`."

    @property
    def licence_note(self) -> str:
        """The licence with its meaning, as `Apache 2.0: free to use, commercially too`; empty if it is not known."""
        return f"{self.licence}: {self.licence_meaning}" if self.licence else ""

    @property
    def card_licence(self) -> dict[str, str]:
        """The fields of a model card that name the licence; empty if it is not known.

        The hub refuses a card whose `license` is not in its list: others are `other`, with a name and a link.
        """
        if not self.licence_file:
            return {"license": self.licence_id} if self.licence_id else {}
        link = f"{self.page}/blob/main/{self.licence_file}"
        return {"license": "other", "license_name": self.licence_id, "license_link": link}

    def needs(self, path: str) -> bool:
        """Whether a file of the repository is needed. path: as `transformer/config.json`."""
        return any(fnmatchcase(path, pattern) for pattern in self.include)


def published_models() -> dict[str, PublishedModel]:
    """Return the models that the presets train, by `PublishedModel.id`: the built-in one first."""
    return _of_kind(False)


def captioners() -> dict[str, PublishedModel]:
    """Return the models that are offered for captions, by `PublishedModel.id`, the smallest first."""
    return _of_kind(True)


def downloadable() -> dict[str, PublishedModel]:
    """Return all models that can be downloaded, by `PublishedModel.id`."""
    return {model.id: model for model in _read().values() if not model.is_built_in}


@functools.cache
def _of_kind(is_captioner: bool) -> dict[str, PublishedModel]:
    return {model.id: model for model in _read().values() if model.is_captioner == is_captioner}


@functools.cache
def _read() -> dict[str, PublishedModel]:
    facts: dict[str, dict[str, Any]] = parse(FACTS.read_text(encoding="utf-8")).value
    named = {model_id: {"id": model_id, **values} for model_id, values in facts.items()}
    return TypeAdapter(dict[str, PublishedModel]).validate_python(named)
