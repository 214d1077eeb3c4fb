"""Adapter and weight files of strangers: one sentence that names the file, in bounded time and memory."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tests.adapters.examples import Example, cached_example
from tests.commands import launch_py
from trainer.adapters.formats.patterns import find_pattern
from trainer.system.errors import InputError
from trainer.weights.files import WeightFiles, safetensors_in

LAYER = "transformer.transformer_blocks.0.attn.to_k"
DOWN, UP, ALPHA = f"{LAYER}.lora_down.weight", f"{LAYER}.lora_up.weight", f"{LAYER}.alpha"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def flux2(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return cached_example("flux2", tmp_path_factory.mktemp("models"))


def lora(**changes: Any) -> Tensors:
    """A sound lora of one layer, with other tensors for some."""
    tensors = {DOWN: torch.ones(4, 64), UP: torch.ones(64, 4), ALPHA: torch.tensor(4.0)}
    return tensors | {{"down": DOWN, "up": UP, "alpha": ALPHA}[name]: tensor for name, tensor in changes.items()}


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[Any], *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


SOUND = {DOWN: entry("F32", [4, 64], 0, 1024), UP: entry("F32", [64, 4], 1024, 2048)}
FILES: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "length of 2^64": raw(SOUND, bytes(2048), 2**64 - 1),
    "length of 10 GB": raw(SOUND, bytes(2048), 10**10),
    "header is not JSON": raw(b"{]", bytes(16)),
    "header is not text": raw(b"\xff\xfe", bytes(16)),
    "header is a list": raw([1, 2]),
    "header is deep": raw(b"[" * 100_000),
    "header is deep inside": raw(b'{"a":' * 100_000),
    "entry is a number": raw({DOWN: 3}),
    "no offsets": raw({DOWN: {"dtype": "F32", "shape": [4, 64]}}),
    "truncated": raw(SOUND, bytes(2000)),
    "bytes appended": raw(SOUND, bytes(2049)),
    "gap": raw({DOWN: entry("F32", [4], 0, 16), UP: entry("F32", [4], 32, 48)}, bytes(48)),
    "overlap": raw({DOWN: entry("F32", [4, 64], 0, 1024), UP: entry("F32", [64, 4], 0, 1024)}, bytes(1024)),
    "backwards": raw({DOWN: entry("F32", [4, 64], 1024, 0)}, bytes(1024)),
    "negative": raw({DOWN: entry("F32", [-4, -64], 0, 1024)}, bytes(1024)),
    "negative offset": raw({DOWN: entry("F32", [4, 64], -1024, 0)}, bytes(1024)),
    "fractions": raw({DOWN: entry("F32", [4.5, 64], 0, 1024)}, bytes(1024)),
    "dtype lies": raw({DOWN: entry("F64", [4, 64], 0, 1024)}, bytes(1024)),
    "unknown dtype": raw({DOWN: entry("F31", [4, 64], 0, 1024)}, bytes(1024)),
    "shape lies": raw({DOWN: entry("F32", [2**32, 2**32], 0, 1024)}, bytes(1024)),
    "metadata is not text": raw({"__metadata__": {"a": 1}, **SOUND}, bytes(2048)),
    "metadata is a list": raw({"__metadata__": [], **SOUND}, bytes(2048)),
}
ADAPTERS: dict[str, tuple[Tensors, str]] = {
    "zero rank": (lora(down=torch.ones(0, 64), up=torch.ones(64, 0)), "down is float32 (0 x 64), not floats"),
    "whole numbers": (lora(down=torch.ones(4, 64).int()), "down is int32 (4 x 64), not floats"),
    "eight bits": (lora(up=torch.ones(64, 4).to(torch.float8_e4m3fn)), "not floats of 16 to 64 bits; save it in bf16"),
    "complex": (lora(up=torch.ones(64, 4, dtype=torch.complex64)), "up is complex64 (64 x 4), not floats"),
    "alpha is NaN": (lora(alpha=torch.tensor(torch.nan)), "alpha (one) is not one finite number"),
    "alpha is endless": (lora(alpha=torch.tensor(torch.inf)), "alpha (one) is not one finite number"),
    "two alphas": (lora(alpha=torch.ones(2)), "alpha (2) is not one finite number"),
    "no alpha": (lora(alpha=torch.ones(0)), "alpha (0) is not one finite number"),
    "vector": (lora(up=torch.ones(64)), "up (64) has another form"),
    "three dims": (lora(up=torch.ones(64, 4, 1, 2)), "cannot be multiplied"),
    "huge rank": (lora(down=torch.ones(4096, 64)), "cannot be multiplied"),
    "no down": ({UP: torch.ones(64, 4)}, "has lora_up.weight but no lora_down.weight"),
    "no up": ({DOWN: torch.ones(4, 64)}, "has lora_down.weight but no lora_up.weight"),
    "alpha alone": ({ALPHA: torch.ones(())}, "has an alpha and nothing else"),
    "long name": ({f"{'a' * 10**6}.alpha": torch.ones(())}, "is not understood"),
    "line break": ({f"a\nb.{'lora_up.weight'}": torch.ones(2, 2)}, "is not understood"),
    "blocks": ({f"{LAYER}.oft_blocks": torch.ones(0, 4, 4)}, "blocks is float32 (0 x 4 x 4), not floats"),
    "blocks of one stage": (
        {f"{LAYER}.oft_blocks": torch.ones(7, 16, 4, 4)},
        "blocks (7 x 16 x 4 x 4) has another form",
    ),
    "lokr": (
        {f"{LAYER}.lokr_w1": torch.ones(8, 8, 1), f"{LAYER}.lokr_w2": torch.ones(8, 8)},
        "w1 (8 x 8 x 1) has another form",
    ),
    "loha": (
        {
            **{f"{LAYER}.hada_{w}_a": torch.ones(64, 4) for w in ("w1", "w2")},
            f"{LAYER}.hada_w1_b": torch.ones(4, 64),
            f"{LAYER}.hada_w2_b": torch.ones(4, 32),
        },
        "w1_b (4 x 64) and w2_b (4 x 32) are of different layers",
    ),
}


def refusal(act: Callable[[], object], file: Path) -> str:
    """The sentence that an act on a file ends with, in bounded time."""
    began = time.monotonic()
    with pytest.raises(InputError) as error:
        act()
    assert time.monotonic() - began < 5
    sentence = str(error.value)
    assert sentence.startswith(str(file))
    assert "\n" not in sentence
    assert len(sentence) < 1000
    return sentence


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_lies_about_itself_is_refused_by_every_reader(flux2: Example, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(FILES[kind])
    refusal(lambda: flux2.read(file), file)
    refusal(lambda: WeightFiles.read([file]), file)


def test_what_is_not_a_regular_file_is_refused_at_once(flux2: Example, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe", "zero", "folder"):
        file = tmp_path / f"{name}.safetensors"
        refusal(lambda file=file: flux2.read(file), file)
        refusal(lambda file=file: WeightFiles.read([file]), file)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_that_is_none_is_refused_with_its_layer(flux2: Example, tmp_path: Path, kind: str) -> None:
    tensors, complaint = ADAPTERS[kind]
    file = tmp_path / "adapter.safetensors"
    save_file(tensors, file)
    assert complaint in refusal(lambda: flux2.read(file), file)


CONFIG = {"r": 4, "lora_alpha": 4}


@pytest.mark.parametrize(
    "config",
    [
        {**CONFIG, "rank_pattern": {"(a|a|a|aa)+$": 4, "((.*)*)*x": 2}},
        {**CONFIG, "rank_pattern": {"(": 4}},
        {**CONFIG, "rank_pattern": {"(?=a)": 4}},
        {**CONFIG, "rank_pattern": ["to_k"]},
        {**CONFIG, "rank_pattern": {"to_k": "4"}},
        {**CONFIG, "alpha_pattern": {".*to_k": None}},
        {**CONFIG, "r": 0},
        {**CONFIG, "r": -1, "use_rslora": True},
        {**CONFIG, "lora_alpha": 10**400},
        {**CONFIG, "lora_alpha": float("nan")},
        {"lora_alpha": 4},
        [],
        b"[" * 100_000,
        b"\xff",
    ],
    ids=lambda config: str(config)[:50],
)
@pytest.mark.parametrize("where", ["config", "metadata"])
def test_settings_of_peft_that_are_wrong_are_refused(flux2: Example, tmp_path: Path, config: Any, where: str) -> None:
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    tensors = {"lora_A.weight": torch.ones(4, 64), "lora_B.weight": torch.ones(64, 4)}
    if where == "config":
        file = tmp_path / "adapter_model.safetensors"
        save_file({f"base_model.model.{LAYER.partition('.')[2]}.{end}": t for end, t in tensors.items()}, file)
        (tmp_path / "adapter_config.json").write_bytes(text)
    else:
        file = tmp_path / "adapter.safetensors"
        settings_of = (
            {f"transformer.{key}": value for key, value in config.items()} if isinstance(config, dict) else None
        )
        metadata = json.dumps(settings_of) if settings_of else text.decode("latin-1")
        save_file({f"{LAYER}.{end}": t for end, t in tensors.items()}, file, {"lora_adapter_metadata": metadata})
    refusal(lambda: flux2.read(file), tmp_path)


def test_a_pattern_that_python_would_try_for_ever_is_matched_at_once_or_refused() -> None:
    began = time.thread_time()
    hostile = [f"{'a*' * 300}$", f"{'(a|a)' * 150}$", f"{'.*' * 20}{'(a|aa|)' * 100}c$"]
    assert find_pattern(hostile, f"{'a' * 200}b") is None
    for pattern in ("(a|a|a|aa)+$", "((a|a)*b?)*c", "a{1,1000}", "(?=a)", "(?i)a", r"(a)\1", "[b-a]", "a" * 1001):
        with pytest.raises(ValueError, match="letters"):
            find_pattern([pattern], "a" * 40)
    assert time.thread_time() - began < 1


PIECES = st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", "1", "^", "$", r"\w", "[a-c.]", "|"])
REPEATED = st.tuples(PIECES, st.sampled_from(["", "", "*", "+", "?", "*?"])).map("".join)
GROUPS = st.sampled_from(["(a|ab)", "(?:b|)", "(a*|^b.)"])


@settings(max_examples=300, deadline=None)
@given(pattern=st.lists(REPEATED | GROUPS, max_size=6).map("".join), name=st.text("ab.1", min_size=1, max_size=8))
def test_patterns_match_as_peft_matches_them(pattern: str, name: str) -> None:
    try:
        matches = re.match(rf"(.*\.)?({pattern})$", name) is not None
    except re.error:
        return
    assert (find_pattern([pattern], name) is not None) == matches


STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 64]}


@pytest.mark.parametrize(
    ("state", "changes"),
    [
        ({"blocksize": 0}, {}),
        ({"blocksize": -64}, {}),
        ({"shape": [8]}, {}),
        ({"shape": [0, 64]}, {}),
        ({"shape": [10**9, 10**9]}, {}),
        ({"shape": "8 x 64"}, {}),
        ({"nested_blocksize": 0}, {}),
        ({"nested_blocksize": 256}, {}),
        ({}, {"a.weight.quant_map": torch.ones(3)}),
        ({}, {"a.weight.absmax": torch.ones(2)}),
        ({}, {"a.weight.absmax": torch.ones(())}),
        ({}, {"a.weight": torch.ones(3, 1, dtype=torch.uint8)}),
        ({}, {"a.weight": torch.ones(256, 1, dtype=torch.int64)}),
        ({}, {"a.weight.quant_state.bitsandbytes__nf4": torch.ones(9, dtype=torch.bfloat16)}),
        (b"{", {}),
        (b"[" * 100_000, {}),
        (b"", {}),
    ],
    ids=str,
)
def test_four_bits_that_lie_are_refused(tmp_path: Path, state: Any, changes: Tensors) -> None:
    text = state if isinstance(state, bytes) else json.dumps(STATE | state).encode()
    tensors = {
        "a.weight": torch.zeros(256, 1, dtype=torch.uint8),
        "a.weight.quant_map": torch.ones(16),
        "a.weight.absmax": torch.ones(8),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }
    file = tmp_path / "model.safetensors"
    save_file(tensors | changes, file)
    refusal(lambda: WeightFiles.read([file]), file)


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model" / "a.safetensors.index.json"
    index.parent.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    for text in (json.dumps({"weight_map": {"a": "../secret.safetensors"}}), "[" * 100_000, '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        refusal(lambda: safetensors_in(index.parent, "a"), index)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes appended", "header is deep", "overlap"])
def test_an_extract_of_a_hostile_file_ends_in_one_sentence(flux2: Example, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "tuned.safetensors"
    file.write_bytes(FILES[kind])
    to = tmp_path / "lora.safetensors"
    for tuned, base in ((file, flux2.family.folder), (flux2.family.folder, file)):
        done = launch_py(tmp_path, "--extract", tuned, "--base", base, "--family", "flux2", "--rank", 4, "--to", to)
        assert done.returncode == 2
        assert str(file) in done.stderr
        assert done.stderr.count("\n") == 1
        assert not to.exists()
