"""Weights that other programs stored in fewer bits: read as numbers, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.weights import recorded
from tests.weights.recorded import SHAPE, dequantized, stored
from trainer.system.errors import InputError
from trainer.weights.files import Fused, WeightFiles, read_tensor
from trainer.weights.quantization import FORMATS
from trainer.weights.tensors import OpenFiles


@pytest.mark.slow
def test_what_was_recorded_is_what_bitsandbytes_does_today() -> None:
    found = recorded.record()
    expected = load_file(recorded.FILE)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


@pytest.mark.parametrize("case", [case for case in recorded.CASES if case != "ragged"])
def test_a_layer_in_four_bits_of_bitsandbytes_is_read_as_bitsandbytes_reads_it(tmp_path: Path, case: str) -> None:
    save_file(stored(case, "a") | {"a.bias": torch.ones(48)}, tmp_path / "model.safetensors")
    entries = WeightFiles.read([tmp_path / "model.safetensors"]).entries
    assert list(entries) == ["a.bias", "a.weight"]
    expected = dequantized(case)
    assert torch.equal(read_tensor(entries["a.weight"]), expected)
    rows = entries["a.weight"].rows(OpenFiles(), 5, 19)  # no block begins with these
    assert torch.equal(rows, expected[5:19])


def test_a_row_that_ends_within_a_block_of_bitsandbytes_is_read_with_the_right_scales(tmp_path: Path) -> None:
    """bitsandbytes 0.50 itself does not, on a CPU: its error is 0.28 here."""
    weight = recorded.original("ragged").float()
    assert float((dequantized("ragged") - weight).norm() / weight.norm()) > 0.25
    save_file(stored("ragged", "a"), tmp_path / "model.safetensors")
    entry = WeightFiles.read([tmp_path / "model.safetensors"]).entries["a.weight"]
    assert float((read_tensor(entry) - weight).norm() / weight.norm()) < 0.094
    assert torch.equal(entry.rows(OpenFiles(), 5, 19), read_tensor(entry)[5:19])


def test_parts_of_a_fused_layer_in_four_bits_are_its_own_rows(tmp_path: Path) -> None:
    tensors = stored("fused", "qk") | stored("small", "norm")
    save_file(tensors, tmp_path / "model.safetensors")
    layout = (
        Fused("qk.weight", ("q.weight", "k.weight")),
        Fused("norm.weight", ("norm_out.weight",), halves_swapped=True),
    )
    shapes = {"q.weight": (16, 128), "k.weight": (32, 128), "norm_out.weight": (32, 64)}
    parts = WeightFiles.read([tmp_path / "model.safetensors"]).by_our_names(layout, shapes).entries
    assert torch.equal(read_tensor(parts["k.weight"]), dequantized("fused")[16:])
    halves = dequantized("small").chunk(2)
    assert torch.equal(read_tensor(parts["norm_out.weight"]), torch.cat(halves[::-1]))
    assert torch.equal(parts["norm_out.weight"].rows(OpenFiles(), 10, 20), torch.cat(halves[::-1])[10:20])


@pytest.mark.parametrize("case", ["nf4-64", "nf4-64-nested"])
def test_nf4_made_of_nf4_keeps_its_codes(tmp_path: Path, case: str) -> None:
    tensors = stored(case, "a")
    save_file(tensors, tmp_path / "model.safetensors")
    entry = WeightFiles.read([tmp_path / "model.safetensors"]).entries["a.weight"]
    records = FORMATS["nf4"].encode(read_tensor(entry))
    assert torch.equal(records[:, :64], tensors["a.weight"].view(48, 64))


@pytest.mark.parametrize("key", ["weight_scale", "scale_weight"])
def test_fp8_with_a_scale_is_read_by_diffusers_names_with_or_without_fused_layers(tmp_path: Path, key: str) -> None:
    codes = torch.randn(*SHAPE).mul(100).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.02)
    tensors = {
        "qk.weight": codes,
        f"qk.{key}": scale,
        "qk.input_scale": torch.tensor(1.0),
        "scaled_fp8": torch.zeros(2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    layout = (Fused("qk.weight", ("q.weight", "k.weight")),)
    files = WeightFiles.read([tmp_path / "model.safetensors"])
    assert list(files.entries) == ["qk.weight"]
    parts = files.by_our_names(layout, {"q.weight": (16, 128), "k.weight": (32, 128)}).entries
    assert torch.equal(read_tensor(parts["k.weight"]), codes[16:].float() * scale)
    assert parts["k.weight"].scale(OpenFiles()) == pytest.approx(0.02)


@pytest.mark.parametrize("dims", [1, 2])
def test_fp8_with_a_scale_per_row_is_read_whole_in_parts_and_with_halves_swapped(tmp_path: Path, dims: int) -> None:
    codes, scales = torch.randn(48, 16).to(torch.float8_e4m3fn), torch.rand(48) + 0.5
    decoded = codes.float() * scales[:, None]
    stored = {"qk.weight": codes, "qk.weight_scale": scales if dims == 1 else scales[:, None]}
    save_file(stored, tmp_path / "model.safetensors")
    files = WeightFiles.read([tmp_path / "model.safetensors"])
    assert torch.equal(read_tensor(files.entries["qk.weight"]), decoded)
    shapes = {"q.weight": (16, 16), "k.weight": (32, 16), "swapped.weight": (48, 16)}
    parts = files.by_our_names((Fused("qk.weight", ("q.weight", "k.weight")),), shapes).entries
    assert torch.equal(read_tensor(parts["k.weight"]), decoded[16:])
    assert torch.equal(parts["k.weight"].rows(OpenFiles(), 3, 7), decoded[19:23])
    swapped = files.by_our_names((Fused("qk.weight", ("swapped.weight",), halves_swapped=True),), shapes).entries
    assert torch.equal(read_tensor(swapped["swapped.weight"]), torch.cat([decoded[24:], decoded[:24]]))
    # Codes with several scales are not those of our format.
    assert parts["k.weight"].scale(OpenFiles()) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_without_a_scale_is_read_as_its_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.randn(*SHAPE).to(dtype)
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    entry = WeightFiles.read([tmp_path / "model.safetensors"]).entries["a.weight"]
    assert torch.equal(read_tensor(entry).float(), weight.float())
    # Only codes of e4m3 are those of our format.
    assert entry.scale(OpenFiles()) == (1.0 if dtype == torch.float8_e4m3fn else None)
    records = FORMATS["int8"].encode(read_tensor(entry), entry.scale(OpenFiles()))
    assert torch.equal(records, FORMATS["int8"].encode(weight.float()))


def error_of(tmp_path: Path, tensors: dict[str, Tensor]) -> str:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError) as caught:
        WeightFiles.read([tmp_path / "model.safetensors"])
    return str(caught.value).replace(str(tmp_path), "")


def test_a_layer_in_four_bits_without_its_scales_is_refused(tmp_path: Path) -> None:
    torn = stored("small", "a")
    del torn["a.weight.absmax"]
    assert error_of(tmp_path, torn) == (
        "/model.safetensors: 'a.weight' is in bitsandbytes' 4 bits, but 'a.weight.absmax' is missing; download it again"
    )
