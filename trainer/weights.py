"""Where the tensors of a model lie on disk: safetensors files, read by header only until a slice is asked for."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import HUB_ID, InputError

MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """One tensor on disk. shape: its full shape.  dtype: safetensors' name, as `BF16`."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightFiles:
    """{parameter or buffer name in the module: its place on disk}."""

    entries: Mapping[str, TensorEntry]

    @classmethod
    def read(cls, files: Iterable[Path], rename: Callable[[str], str | None] = lambda key: key) -> WeightFiles:
        """Index the tensors of some safetensors files.

        rename: key in the file -> name in the module, or None for a tensor the module does not have.
        Raises InputError for a file that is missing, truncated or no safetensors file.
        """
        entries: dict[str, TensorEntry] = {}
        for file in files:
            for key, (shape, dtype) in _read_header(file).items():
                name = rename(key)
                if name is not None:
                    entries[name] = TensorEntry(file, key, shape, dtype)
        return cls(entries)

    def __len__(self) -> int:
        return len(self.entries)


def find_folder(field: str, path: str) -> Path:
    """The folder that a config field names: a local one, or a hub id's snapshot in the local Hugging Face cache.

    Nothing is downloaded. Raises InputError with the download command for a hub id that is not cached; a local
    folder that does not exist is left to `read_json`, which says what was expected in it.
    """
    if Path(path).exists() or not HUB_ID.fullmatch(path):
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise InputError(
            f"{field} {path}: neither a folder nor in the local Hugging Face cache. "
            f"Download it with `hf download {path}`, name a diffusers folder, or set model.path: tiny"
        ) from error


def safetensors_in(folder: Path, stem: str) -> list[Path]:
    """The safetensors files of one component: those named in `stem.safetensors.index.json`, or `stem.safetensors`.

    Raises InputError naming the folder and what was looked for.
    """
    index = folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [folder / name for name in names]
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise InputError(f"{index}: not a safetensors index; download the folder again") from error
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise InputError(f"{folder}: {len(missing)} of {len(files)} weight files are missing, first {missing[0]}")
        return files
    single = folder / f"{stem}.safetensors"
    if single.is_file():
        return [single]
    raise InputError(f"{folder}: neither {stem}.safetensors nor {index.name}; expected the weights of this component")


def _read_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """{key: (shape, dtype)}, with the file's length checked against the header's offsets."""
    try:
        header, start, size = _read_json_header(file)
        tensors = {key: (tuple(value["shape"]), str(value["dtype"])) for key, value in header.items()}
        end = start + max((int(value["data_offsets"][1]) for value in header.values()), default=0)
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such weight file; download it again") from error
    except (struct.error, ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(f"{file}: not a safetensors file; convert or download it again") from error
    if end > size:
        raise InputError(f"{file}: truncated, {size} of {end} bytes; download it again")
    return tensors


def _read_json_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header's tensors, where the data begin, and the file's size in bytes."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > min(MAX_HEADER_BYTES, size):
            raise ValueError(f"{length} bytes of header")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length, size
