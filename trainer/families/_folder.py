"""A model's folder on disk: found, read, fingerprinted and, for tiny models, written once."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from trainer.config import InputError
from trainer.rng import generator

DIGEST_BYTES = 1 << 20


def read_json(field: str, folder: Path, name: str) -> dict[str, Any]:
    """One of the folder's JSON files, as `transformer/config.json`.

    field: the config field that named the folder. Raises InputError when the file is missing or no JSON object.
    """
    file = folder / name
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            f"{field} {folder}: no {name}; expected a diffusers folder. Download it or set model.path: tiny"
        ) from error
    except ValueError as error:
        raise InputError(f"{file}: not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: holds no JSON object; download it again")
    return content


def digest(folders: Iterable[Path]) -> str:
    """Changes when a file of the folders changes: hex digits from names, sizes, first and last MiB of each.

    Reading 48 GB of weights takes minutes. Training changes all of a file, so its ends tell as much.
    """
    total = hashlib.sha256()
    for folder in folders:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            size = file.stat().st_size
            total.update(f"{file.relative_to(folder.parent)} {size}\n".encode())
            with file.open("rb") as stream:
                total.update(stream.read(DIGEST_BYTES))
                stream.seek(max(0, size - DIGEST_BYTES))
                total.update(stream.read(DIGEST_BYTES))
    return total.hexdigest()


def write_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """`folder`, filled by `write(empty folder)` unless it exists.

    Other processes see the whole folder or none: it is written beside its place and renamed. When several write it
    at once the first one's stays.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        write(made)
        try:
            os.rename(made, folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def fill_random(module: nn.Module, name: str) -> None:
    """Give a module on the meta device CPU weights drawn from (name, parameter name): the same on every machine.

    Matrices and convolutions keep the variance of their input; vectors are 0 for biases and means, 1 for the rest.
    """
    module.to_empty(device="cpu")
    with torch.no_grad():
        for key, tensor in module.state_dict().items():
            if tensor.dim() < 2:
                tensor.fill_(0 if key.endswith(("bias", "mean")) else 1)
            else:
                fan_in = math.prod(tensor.shape[1:])
                tensor.copy_(torch.randn(tensor.shape, generator=generator(name, key)) / math.sqrt(fan_in))
