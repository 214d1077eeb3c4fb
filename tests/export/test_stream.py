"""Safetensors files written tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trainer.export.stream import write_stream

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor([1.5, -2.0, 3.25]),
    "scalar": torch.tensor(7.0),
    "transposed": torch.arange(6, dtype=torch.float32).view(2, 3).T,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_streamed_file_holds_what_the_library_would_have_written(tmp_path: Path, dtype: torch.dtype) -> None:
    plan = {name: (dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}
    write_stream(tmp_path / "ours", plan, TENSORS.values(), {"format": "pt", "title": "ä"})
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in TENSORS.items()}, tmp_path / "theirs")
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == dtype for name in ours)
    with safe_open(tmp_path / "ours", "pt") as stored:
        assert stored.metadata() == {"format": "pt", "title": "ä"}


def test_numbers_beyond_the_range_of_fp8_become_its_largest(tmp_path: Path) -> None:
    numbers = torch.tensor([[1.0, 500.0], [-1000.0, 0.5]])
    write_stream(tmp_path / "file", {"x": (torch.float8_e4m3fn, (2, 2))}, [numbers], {})
    assert load_file(tmp_path / "file")["x"].float().tolist() == [[1.0, 448.0], [-448.0, 0.5]]


def test_a_tensor_of_another_shape_than_announced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x: \[2, 2\] was announced as \[4\]"):
        write_stream(tmp_path / "file", {"x": (torch.float32, (4,))}, [torch.zeros(2, 2)], {})
