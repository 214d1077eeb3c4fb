"""Find a model's folder: local, or in the Hugging Face cache. Uses no network and imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.config.models import WILDCARD, PublishedModel, downloadable, published_models
from trainer.config.sections import HUB_ID
from trainer.system import files
from trainer.system.amounts import GB
from trainer.system.errors import InputError

INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class CachedModel:
    """How much of a published model is in the local Hugging Face cache.

    Attributes:
        num_bytes_here: Of the files that are needed, parts that a download can continue included.
        is_complete: Whether no file that is needed is missing.
    """

    num_bytes_here: int
    is_complete: bool


def cached(model_id: str) -> CachedModel:
    """Return how much of a published model is here. Looks at names and sizes only.

    Args:
        model_id: A key of `published_models()` or `captioners()`. One that comes with the program is complete.

    Raises:
        KeyError: There is no such model.
    """
    model = downloadable().get(model_id) or published_models()[model_id]
    if model.is_built_in:
        return CachedModel(0, is_complete=True)
    snapshot = _snapshot(model_id)
    named = {file: file.resolve() for file in snapshot.rglob("*") if file.is_file()} if snapshot else {}
    here = [file for file in named if snapshot and model.needs(file.relative_to(snapshot).as_posix())]
    # A file that was just downloaded, or in part, has no name in the snapshot yet.
    here += [file for file in _blobs(model_id) if file.resolve() not in named.values()]
    is_complete = snapshot is not None and not _missing(model, snapshot)
    return CachedModel(sum(file.stat().st_size for file in here), is_complete)


def repository_folder(model_id: str) -> Path:
    """Return the folder of a hub id in the local Hugging Face cache. It may not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{model_id.replace('/', '--')}"


def find_folder(field: str, path: str) -> Path:
    """Find the folder that a config field names: a local one, or a hub id's snapshot in the local Hugging Face cache.

    Nothing is downloaded. A local folder that does not exist is left to `read_json`, whose error says what was expected
    in it. Which files a model needs that is not among the published ones is known to its family, whose loader names a
    missing one.

    Raises:
        InputError: A hub id is not cached, or its download was interrupted. Says how to download it.
    """
    if os.path.exists(path) or not HUB_ID.fullmatch(path):
        return Path(path)
    snapshot, model = _snapshot(path), downloadable().get(path)
    if model is None:
        if snapshot is None:
            raise InputError(f"{field} {path}: {_ABSENT}. Download it with `hf download {path}`, {_OTHERWISE}")
        return snapshot
    absent = _missing(model, snapshot) if snapshot else []
    missing = [name for name in absent if snapshot and not _is_left_out(model, snapshot, name)]
    if snapshot is None or missing:
        raise InputError(f"{field} {path}: {_how_much(path, missing)}. {_how_to_get(model)}, or {_OTHERWISE}")
    return snapshot


_ABSENT = "neither a folder nor in the local Hugging Face cache"
_OTHERWISE = "name a diffusers folder, or set model.path: tiny"


def _how_much(model_id: str, missing: list[str]) -> str:
    if not missing:
        return _ABSENT
    here = cached(model_id).num_bytes_here / GB
    more = f"and {len(missing) - 1} more files are" if len(missing) > 1 else "is"
    return f"only {here:.1f} GB of it are in the local Hugging Face cache; {missing[0]} {more} missing"


def _how_to_get(model: PublishedModel) -> str:
    licence = f" Its licence is {model.licence_note}." if model.licence else ""
    first = f"{model.login_advice} Then download" if model.is_gated else "Download"
    return (
        f"{model.name} is a download of {model.num_bytes / GB:g} GB.{licence} "
        f"{first} it with `{model.download_command}`"
    )


def _snapshot(model_id: str) -> Path | None:
    """The folder of the cached main revision, complete or not; None if there is none."""
    folder = repository_folder(model_id)
    try:
        commit = files.read(folder / "refs" / "main", at_most=100).decode("ascii").strip()
    except (OSError, InputError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if commit.isalnum() and snapshot.is_dir() else None


def _blobs(model_id: str) -> Iterator[Path]:
    """The stored files, and the parts that `weights.download` continues. Parts with a dot in their stem are another
    program's, which does not continue them."""
    folder = repository_folder(model_id) / "blobs"
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.is_file() and (not file.suffix or (file.suffix == ".incomplete" and not Path(file.stem).suffix)):
            yield file


def _missing(model: PublishedModel, snapshot: Path) -> list[str]:
    """Paths in the repository that are needed and not here."""
    listing = snapshot.parents[1] / "trees" / f"{snapshot.name}.json"
    try:
        # The listing of the repository, which the hub's library keeps since version 1.31.
        names = json.loads(files.read(listing))["files"]
        expected = [name for name in names if model.needs(name)]
    except (OSError, ValueError, LookupError, TypeError):
        expected = [*_expected(model, snapshot)]
    return [name for name in expected if not (snapshot / name).is_file()]


def _expected(model: PublishedModel, snapshot: Path) -> Iterator[str]:
    """The files that must be here, as far as those that are here say so: without a listing of the repository."""
    yield from (pattern for pattern in model.include if WILDCARD not in pattern)
    components = _json(snapshot / "model_index.json")
    for component in components:
        folder = snapshot / component
        if any(pattern.startswith(f"{component}/") for pattern in model.include) and not folder.is_dir():
            yield f"{component}/config.json"
    for config in (*snapshot.glob("config.json"), *snapshot.glob("*/config.json")):
        if not any(config.parent.glob("*.safetensors")):
            yield (config.parent / "*.safetensors").relative_to(snapshot).as_posix()
    for index in (*snapshot.glob(f"*{INDEX}"), *snapshot.glob(f"*/*{INDEX}")):
        shards = _json(index).get("weight_map")
        for name in sorted(set(shards.values())) if isinstance(shards, dict) else ():
            shard = (index.parent / str(name)).relative_to(snapshot).as_posix()
            if model.needs(shard):
                yield shard


def _json(file: Path) -> dict[str, object]:
    """A JSON file of a snapshot; empty if it cannot be read, which its loader reports."""
    try:
        value = json.loads(files.read(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_left_out(model: PublishedModel, snapshot: Path, name: str) -> bool:
    """Whether a file belongs to a component that is not here at all, and that a run can do without."""
    component = name.partition("/")[0]
    return component in model.optional and not (snapshot / component).exists()
