"""Tensors composed of stored ones: the numbers of the same functions of torch, and only the rows that are needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.weights.composed import ComposedEntry, entry_of, lazy, lazy_entry, value_of
from trainer.weights.files import WeightFiles
from trainer.weights.tensors import OpenFiles, TensorEntry

Get = Callable[[str], Tensor]
COMPOSED: dict[str, Callable[[Get], Tensor]] = {
    "experts side by side": lambda get: torch.cat(
        [torch.stack([get(f"gate{i}") for i in range(3)]), torch.stack([get(f"up{i}") for i in range(3)])], dim=1
    ),
    "a third": lambda get: torch.chunk(get("fused"), 3, dim=0)[1].contiguous(),
    "parts of own sizes": lambda get: torch.split(get("fused"), [10, 6, 8])[2],
    "turned": lambda get: get("fused").T.contiguous(),
    "turned inside": lambda get: torch.transpose(get("cube"), 1, 2),
    "interleaved": lambda get: get("cube").reshape(5, 4, 2, 3).transpose(1, 2).reshape(5, 8, 3),
    "rotary": lambda get: get("fused").view(3, 4, 2, 4).transpose(1, 2).reshape(24, 4),
    "one of a list": lambda get: torch.unbind(get("cube"))[3],
    "some rows": lambda get: get("fused")[5:17],
    "from the end": lambda get: get("fused")[-3:],
    "in another type": lambda get: get("fused").to(torch.bfloat16),
    "with a dim of one": lambda get: torch.chunk(get("cube"), 5)[2].squeeze(0).unsqueeze(1),
    "computed": lambda get: get("fused") * 2 + 1,
    "picked": lambda get: get("cube")[:, [0, 3]].flatten(0, 1),
}


def numbers() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"fused": (24, 4), "cube": (5, 8, 3)} | {f"{name}{i}": (6, 4) for name in ("gate", "up") for i in range(3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def entries(tmp_path: Path) -> Any:
    save_file(numbers(), tmp_path / "model.safetensors")
    return WeightFiles.read([tmp_path / "model.safetensors"]).entries


@pytest.mark.parametrize("kind", COMPOSED)
def test_any_rows_are_those_of_the_same_function_of_whole_tensors(kind: str, entries: Any) -> None:
    expected = COMPOSED[kind](lambda name: numbers()[name])
    entry = entry_of(COMPOSED[kind](lambda name: lazy_entry(entries[name])))  # type: ignore[arg-type]
    files = OpenFiles()
    assert entry.shape == tuple(expected.shape)
    assert torch.equal(entry.whole(files), expected)
    rows = range(len(expected) + 1)
    assert all(torch.equal(entry.rows(files, a, b), expected[a:b]) for a in rows for b in rows if a < b)


class Counting(OpenFiles):
    """Notes which tensors are read, and how many numbers of each."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, int] = {}

    def slice(self, file: Path, key: str) -> Any:
        stored = super().slice(file, key)
        outer = self

        class Slice:
            def get_shape(self) -> list[int]:
                shape: list[int] = stored.get_shape()
                return shape

            def __getitem__(self, index: Any) -> Tensor:
                found: Tensor = stored[index]
                outer.read[key] = outer.read.get(key, 0) + found.numel()
                return found

        return Slice()


@pytest.mark.parametrize(
    ("kind", "rows", "read"),
    [
        ("experts side by side", (1, 2), {"gate1": 24, "up1": 24}),
        ("a third", (2, 5), {"fused": 12}),
        ("turned", (1, 2), {"fused": 24}),
        ("interleaved", (4, 5), {"cube": 24}),
    ],
)
def test_only_the_numbers_of_the_rows_are_read(
    kind: str, rows: tuple[int, int], read: dict[str, int], entries: Any
) -> None:
    files = Counting()
    entry_of(COMPOSED[kind](lambda name: lazy_entry(entries[name]))).rows(files, *rows)  # type: ignore[arg-type]
    assert files.read == read


def test_what_is_composed_differently_has_another_identity(entries: Any) -> None:
    made = [entry_of(COMPOSED[kind](lambda name: lazy_entry(entries[name]))) for kind in COMPOSED]  # type: ignore[arg-type]
    assert len({entry.identity() for entry in made}) == len(COMPOSED)
    assert all(entry.sources() == {entries["fused"].file} for entry in made)


def test_a_tensor_that_is_only_renamed_keeps_its_entry(entries: Any) -> None:
    entry = entry_of(lazy_entry(entries["fused"]))
    assert entry is entries["fused"]
    assert type(entry) is TensorEntry
    assert isinstance(entry_of(lazy_entry(entries["fused"]).t()), ComposedEntry)  # type: ignore[arg-type]


def test_a_tensor_made_of_names_is_computed_of_what_they_stand_for() -> None:
    parts = [lazy(name, (6, 4), torch.float32) for name in ("gate0", "up0")]
    made = torch.cat(parts)  # type: ignore[arg-type]
    assert torch.equal(value_of(made, lambda name: numbers()[name]), torch.cat([numbers()["gate0"], numbers()["up0"]]))  # type: ignore[arg-type]
