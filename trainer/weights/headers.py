"""The headers of safetensors files: names, shapes and types of what they hold. Imports no torch."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from trainer.system.errors import InputError
from trainer.system.files import opened

MAX_HEADER_BYTES = 100_000_000
PEFT_FILE = "adapter_model.safetensors"
"""The file of an adapter in a folder of peft."""


def read_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Read {key: (shape, dtype)}, and check the file's length against the header's offsets.

    Raises:
        InputError: The file is missing, truncated or not a safetensors file.
    """
    try:
        header, start, size = _read_json(file)
        tensors = {key: (tuple(value["shape"]), str(value["dtype"])) for key, value in header.items()}
        end = start + max((int(value["data_offsets"][1]) for value in header.values()), default=0)
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such weight file; download it again") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); make it readable or name another file") from error
    except (struct.error, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InputError(f"{file}: not a safetensors file; convert it to .safetensors, or download it again") from error
    if end > size:
        raise InputError(f"{file}: truncated, {size} of {end} bytes; download it again")
    return tensors


def _read_json(file: Path) -> tuple[dict[str, Any], int, int]:
    """Read the header's tensors, the offset at which the data begin, and the file's size in bytes."""
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > min(MAX_HEADER_BYTES, size):
            raise ValueError(f"{length} bytes of header")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length, size
