"""The headers of safetensors files: names, shapes and types of what they hold. Imports no torch."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.system.errors import InputError
from trainer.system.files import opened

MAX_HEADER_BYTES = 100_000_000
PEFT_FILE = "adapter_model.safetensors"
"""The file of an adapter in a folder of peft."""
PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""Prefixes of a denoiser's names in single files: of those that also hold other parts, and of some programs."""
StoredTensor = tuple[tuple[int, ...], str]
"""(shape, type by safetensors' name)"""


@dataclass(frozen=True)
class Header:
    """A file's header.

    Attributes:
        tensors: By name.
        places: {name: offsets in the file at which the tensor begins and ends}.
        metadata: What its writer says of it.
    """

    tensors: Mapping[str, StoredTensor]
    places: Mapping[str, tuple[int, int]]
    metadata: Mapping[str, str]


def read_header(file: Path) -> Header:
    """Read a file's header, and check the file's length against its offsets.

    Raises:
        InputError: The file is missing, truncated or not a safetensors file.
    """
    try:
        with opened(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(MAX_HEADER_BYTES, size):
                raise ValueError(f"{length} bytes of header")
            header = json.loads(stream.read(length))
        metadata = header.pop("__metadata__", None) or {}
        tensors = {key: (tuple(value["shape"]), str(value["dtype"])) for key, value in header.items()}
        offsets = {key: value["data_offsets"] for key, value in header.items()}
        places = {key: (8 + length + int(begin), 8 + length + int(end)) for key, (begin, end) in offsets.items()}
        found = Header(tensors, places, {str(key): str(value) for key, value in metadata.items()})
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such weight file; download it again") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); make it readable or name another file") from error
    except (struct.error, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InputError(f"{file}: not a safetensors file; convert it to .safetensors, or download it again") from error
    end = max((end for _, end in places.values()), default=8 + length)
    if end > size:
        raise InputError(f"{file}: truncated, {size} of {end} bytes; download it again")
    return found


def read_bytes(file: Path, header: Header, key: str) -> bytes:
    """Read the bytes of one tensor."""
    begin, end = header.places[key]
    with opened(file) as stream:
        stream.seek(begin)
        return stream.read(end - begin)
