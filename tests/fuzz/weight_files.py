"""safetensors files: adapters of all kinds and layers in 8 bits, damaged in their headers and their bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from tests.adapters.examples import KINDS as ADAPTERS
from tests.adapters.examples import cached_example
from tests.fuzz import target
from tests.fuzz.target import CHANGES, ODD_BYTES, Target, changed, refusals
from tests.weights.comfy import FORMS, described, description, stored
from trainer.weights.files import WeightFiles, read_tensor

NUM_LAYERS = 2
HEADER_VALUES = st.one_of(
    st.integers(-1, 2**64),
    st.sampled_from(["F32", "I64", "F4", "BOOL", "U8", "", "(a|a|a|aa)+$", "{}", "NaN"]),
    st.lists(st.integers(-1, 2**40), max_size=4),
    st.none(),
    st.builds(dict),
)
KEYS = st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "extra"])
HEADERS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), KEYS, HEADER_VALUES), min_size=1, max_size=3)
LENGTHS = st.sampled_from([0, 1, 7, 2**31, 2**63, 2**64 - 1])
VALUES = st.tuples(
    st.floats(0, 1, exclude_max=True),
    st.one_of(
        st.tuples(st.just("bytes"), CHANGES),
        st.tuples(st.just("header"), HEADERS),
        st.tuples(st.just("length"), LENGTHS),
        st.tuples(st.just("alpha"), st.sampled_from([float("nan"), float("inf"), -1.0, 0.0, 1e38])),
        st.tuples(st.just("whole"), ODD_BYTES),
        st.tuples(st.just("place"), target.KINDS),
    ),
)


@contextmanager
def _prepared(folder: Path) -> Iterator[Callable[[Any], None]]:
    example = cached_example("flux2", folder / "cache")
    whole = []
    for adapter in ADAPTERS:
        layers = dict(list(example.adapter(adapter).items())[:NUM_LAYERS])
        for file in example.files(layers, "auto"):
            path = file.path(folder, adapter)
            path.parent.mkdir(parents=True, exist_ok=True)
            file.write(path, {"modelspec.title": "x"})
            whole.append(path.read_bytes())
    for form in FORMS:
        tensors, _ = stored("diffusion_model.a", torch.linspace(-1, 1, 2048).view(8, 256), form)
        metadata = {"_quantization_metadata": json.dumps({"layers": {"a": description(form)}})}
        whole += [save(tensors | described("diffusion_model.a", form)), save(tensors, metadata)]

    def answer(value: Any) -> None:
        place, (kind, change) = value
        content = whole[int(place * len(whole))]
        file = _fresh(folder / "attacked")
        if kind == "place":
            target.put(file, change)
        else:
            file.write_bytes(_damaged(content, kind, change))
        with refusals():
            example.read(file)
        with refusals():
            for entry in WeightFiles.read([file]).entries.values():
                read_tensor(entry)

    yield answer


def _fresh(folder: Path) -> Path:
    """The file of a folder, which is empty."""
    folder.mkdir(exist_ok=True)
    file = folder / "adapter.safetensors"
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    file.unlink(missing_ok=True)
    return file


def _damaged(content: bytes, kind: str, change: Any) -> bytes:
    match kind:
        case "bytes":
            return changed(content, change)
        case "header":
            return _with_header(content, change)
        case "length":
            return struct.pack("<Q", change) + content[8:]
        case "alpha":
            return _with_alpha(content, change)
        case _:
            return bytes(change)


def _with_header(content: bytes, changes: Any) -> bytes:
    """Values of its header replaced: of a tensor, or of the whole."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    for where, key, value in changes:
        name = sorted(header)[int(where * len(header))]
        inside = header[name] if isinstance(header[name], dict) and key != "__metadata__" else header
        inside[key] = value
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def _with_alpha(content: bytes, alpha: float) -> bytes:
    """All its alphas replaced, where it has some."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    data = bytearray(content)
    for name, facts in header.items():
        if name.endswith("alpha") and facts["dtype"] == "F32":
            begin = 8 + length + facts["data_offsets"][0]
            data[begin : begin + 4] = struct.pack("<f", alpha)
    return bytes(data)


WEIGHTS = Target("weight files", VALUES, _prepared)
