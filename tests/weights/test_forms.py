"""Weights in the forms of ComfyUI and other programs: read as the numbers that these read, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.weights.comfy import FORMS, SCALED_FP8, described, description, note, stored
from trainer.config.sections import ModelConfig
from trainer.models.recognition import unread_weights
from trainer.system.errors import InputError
from trainer.weights.files import Fused, WeightFiles, read_tensor
from trainer.weights.forms import READ, ROTATIONS
from trainer.weights.tensors import OpenFiles

INT8 = torch.zeros(4, 16, dtype=torch.int8)
FP8 = INT8.to(torch.float8_e4m3fn)
BYTES = INT8.to(torch.uint8)


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(48, 1024, generator=torch.Generator().manual_seed(1)) * 0.02


@pytest.mark.parametrize("place", ["tensor", "header", "header without prefix"])
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_of_comfyui_is_read_as_comfyui_reads_it(tmp_path: Path, weight: Tensor, form: str, place: str) -> None:
    tensors, expected = stored("model.diffusion_model.qk", weight, form)
    name = "qk" if place == "header without prefix" else "model.diffusion_model.qk"
    metadata = {"_quantization_metadata": json.dumps({"layers": {name: description(form)}})}
    if place == "tensor" or form == SCALED_FP8:
        metadata, tensors = {}, tensors | described("model.diffusion_model.qk", form)
    others = {"qk.input_scale": torch.tensor(1.0), "scaled_fp8": torch.zeros(2), "norm.weight": torch.ones(48)}
    tensors |= {f"model.diffusion_model.{key}": tensor for key, tensor in others.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    files = WeightFiles.read([tmp_path / "model.safetensors"])
    assert sorted(files.entries) == ["model.diffusion_model.norm.weight", "model.diffusion_model.qk.weight"]
    parts = (("q.weight", 16), ("k.weight", 32))
    shapes = {name: (rows, 1024) for name, rows in parts} | {"norm.weight": (48,)}
    entries = files.by_our_names([Fused("qk.weight", tuple(name for name, _ in parts))], shapes).entries
    assert torch.equal(torch.cat([read_tensor(entries[name]) for name, _ in parts]), expected)
    assert torch.equal(entries["k.weight"].rows(OpenFiles(), 5, 6), expected[21:22])


@pytest.mark.parametrize("group", ROTATIONS)
def test_rows_that_were_rotated_are_near_the_weight_that_they_were_made_of(
    tmp_path: Path, weight: Tensor, group: int
) -> None:
    tensors, expected = stored("a", weight, "int8-rotated", group)
    given = {"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": group}}
    save_file(tensors | {"a.comfy_quant": note(given)}, tmp_path / "model.safetensors")
    found = read_tensor(WeightFiles.read([tmp_path / "model.safetensors"]).entries["a.weight"])
    assert torch.equal(found, expected)
    assert float((found - weight).norm() / weight.norm()) < 0.01


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_whose_rows_are_columns_in_the_file_is_decoded_before_it_is_turned(
    tmp_path: Path, weight: Tensor, form: str
) -> None:
    tensors, expected = stored("theirs", weight, form)
    save_file(tensors | described("theirs", form), tmp_path / "model.safetensors")
    layout = [Fused("theirs.weight", ("ours.weight",), transposed=True)]
    files = WeightFiles.read([tmp_path / "model.safetensors"]).by_our_names(layout, {"ours.weight": (1024, 48)})
    assert torch.equal(files.entries["ours.weight"].rows(OpenFiles(), 7, 300), expected.T[7:300])


@pytest.mark.parametrize(
    ("tensors", "key", "form"),
    [
        ({"a.weight": INT8, "a.SCB": torch.ones(4)}, "a.SCB", "bitsandbytes' int8"),
        ({"a.weight": BYTES, "a.weight_scale": FP8, "a.weight_scale_2": torch.ones(1)}, "a.weight_scale_2", "nvfp4"),
        (
            {"a.weight": BYTES, "a.weight_scale": FP8, "a.comfy_quant": note({"format": "nvfp4"})},
            "a.weight",
            "ComfyUI's nvfp4",
        ),
        ({"a.weight": FP8, "a.comfy_quant": note({"format": "mxfp8"})}, "a.weight", "ComfyUI's mxfp8"),
        ({"a.weight": INT8, "a.comfy_quant": note({"format": "convrot_w4a4"})}, "a.weight", "ComfyUI's convrot_w4a4"),
        (
            {"a.weight": INT8, "a.comfy_quant": note({"format": "int8_blockwise"})},
            "a.weight",
            "ComfyUI's int8_blockwise",
        ),
        (
            {"a.weight": FP8, "a.weight_scale": torch.ones(2, 2)},
            "a.weight_scale",
            "F8_E4M3 [4, 16] with scales F32 [2, 2]",
        ),
        ({"a.weight": FP8, "a.weight_scale": BYTES}, "a.weight_scale", "F8_E4M3 [4, 16] with scales U8 [4, 16]"),
        ({"a.weight_scale": torch.ones(4)}, "a.weight_scale", "no codes with scales F32 [4]"),
        (
            {
                "a.weight": INT8,
                "a.weight_scale": torch.ones(4, 1),
                "a.comfy_quant": note({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 8}),
            },
            "a.weight_scale",
            "I8 [4, 16] with scales F32 [4, 1], rotated by 8",
        ),
        ({"a.weight": FP8, "a.weight_scale_inv": torch.ones(1, 1)}, "a.weight_scale_inv", "fp8 with a scale per block"),
        (
            {"a.weight": FP8, "a.pre_quant_scale": torch.ones(16)},
            "a.pre_quant_scale",
            "F8_E4M3 [4, 16] with 'pre_quant_scale' [16]",
        ),
        ({"a.weight": INT8}, "a.weight", "I8 [4, 16] without scales"),
        (
            {"a.weight": INT8, "a.weight_scales": torch.ones(4)},
            "a.weight_scales",
            "I8 [4, 16] with 'weight_scales' [4]",
        ),
        (
            {"a.weight_packed": INT8.int(), "a.weight_scale": torch.ones(4)},
            "a.weight_packed",
            "compressed-tensors' integers",
        ),
        ({"a.qweight": INT8, "a.wscales": torch.ones(4, 4)}, "a.wscales", "SVDQuant (nunchaku)"),
        ({"a.qweight": INT8.int(), "a.g_idx": torch.zeros(16).int()}, "a.g_idx", "GPTQ"),
        ({"a.qweight": INT8.int(), "a.qzeros": INT8.int()}, "a.qzeros", "AWQ"),
        ({"a.qweight": INT8.int()}, "a.qweight", "GPTQ or AWQ"),
        ({"a.W_q": BYTES, "a.scale": torch.ones(4, 1)}, "a.W_q", "HQQ"),
        ({"a.weight._data": INT8, "a.weight._scale": torch.ones(4, 1)}, "a.weight._scale", "quanto"),
        ({"a._weight_qdata": INT8, "a._weight_scale": torch.ones(4, 1)}, "a._weight_qdata", "torchao"),
        ({"a.up_proj_blocks": BYTES, "a.up_proj_scales": BYTES}, "a.up_proj_blocks", "mxfp4"),
        ({"a.weight": INT8.to(torch.uint32), "a.biases": torch.ones(4)}, "a.biases", "MLX"),
    ],
)
def test_a_form_that_is_not_read_is_named_with_those_that_are(
    tmp_path: Path, tensors: dict[str, Tensor], key: str, form: str
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors.items()} | {"b.weight": torch.ones(2)}, file)
    sentence = f"{file}: '{key}' is stored as {form}, which is not read; {READ}"
    with pytest.raises(InputError) as caught:
        WeightFiles.read([file])
    assert str(caught.value) == sentence


@pytest.mark.slow
def test_what_bitsandbytes_and_torchao_write_today_is_named(tmp_path: Path) -> None:
    import bitsandbytes
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False).to("cpu")
    plain = torch.nn.Sequential(torch.nn.Linear(64, 32))
    quantize_(plain, Int8WeightOnlyConfig())
    written = {"bitsandbytes' int8": (layer.state_dict(), {}), "torchao": flatten_tensor_state_dict(plain.state_dict())}
    for form, (tensors, metadata) in written.items():
        save_file({f"a.{name}": tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "a", metadata)
        with pytest.raises(InputError, match=f" is stored as {form}, which is not read; name the original model"):
            WeightFiles.read([tmp_path / "a"])


def test_the_scale_of_a_weight_may_lie_in_another_file_of_the_model(tmp_path: Path, weight: Tensor) -> None:
    tensors, expected = stored("a", weight, "int8-rows")
    paths = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    save_file({"a.weight": tensors["a.weight"]}, paths[0])
    save_file({"a.weight_scale": tensors["a.weight_scale"]}, paths[1])
    assert torch.equal(read_tensor(WeightFiles.read(paths).entries["a.weight"]), expected)
    with pytest.raises(InputError, match=r"one\.safetensors: 'a\.weight' is stored as I8 \[48, 1024\] without scales"):
        WeightFiles.read(paths[:1])


@pytest.mark.parametrize("text", ["[1]", "{", '{"format": 1}', '{"format": "int8_tensorwise", "convrot_groupsize": 0}'])
def test_a_damaged_description_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.ones(2, 2), "a.comfy_quant": torch.tensor(list(text.encode())).byte()}, file)
    with pytest.raises(InputError, match=r"'a\.comfy_quant' is (damaged|not JSON of ComfyUI).*; download it again$"):
        WeightFiles.read([file])
    save_file({"a.weight": torch.ones(2, 2)}, file, {"_quantization_metadata": f'{{"layers": {{"a": {text}}}}}'})
    with pytest.raises(InputError, match=r"'_quantization_metadata' is .*; download it again$"):
        WeightFiles.read([file])


def reasons(**model: Any) -> list[str]:
    return [f"{problem.field}: {problem.message}" for problem in unread_weights(ModelConfig(**model))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config for each component, and weights that are read."""
    for name in ("transformer", "text_encoder"):
        (tmp_path / "base" / name).mkdir(parents=True)
        (tmp_path / "base" / name / "config.json").write_text("{}")
        save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "base" / name / "model.safetensors")
    return tmp_path / "base"


def test_a_file_and_a_folder_are_looked_at_before_the_run(folder: Path) -> None:
    assert reasons(family="flux1", path=str(folder)) == []
    file = folder.parent / "single.safetensors"
    tensors, _ = stored("a", torch.ones(4, 4), "int8")
    save_file(tensors, file)
    assert reasons(family="flux1", path=str(file), base=str(folder)) == []
    save_file({"a.SCB": torch.ones(1)}, file)
    sentence = f"'a.SCB' is stored as bitsandbytes' int8, which is not read; {READ}"
    assert reasons(family="flux1", path=str(file), base=str(folder)) == [f"model.path: {file}: {sentence}"]
    for name in ("transformer", "text_encoder"):
        save_file({"a.SCB": torch.ones(1)}, folder / name / "model.safetensors")
    encoder, transformer = (f"{folder / name}: {sentence}" for name in ("text_encoder", "transformer"))
    assert reasons(family="flux1", path=str(folder)) == [f"model.path: {encoder}", f"model.path: {transformer}"]
    # The single file takes the transformer's place, and an encoder may be left out.
    save_file({"a.weight": torch.ones(1)}, file)
    assert reasons(family="flux1", path=str(file), base=str(folder)) == [f"model.base: {encoder}"]
    options = {"without": ("text_encoder",)}
    assert reasons(family="flux1", path=str(file), base=str(folder), options=options) == []


def test_the_method_that_a_config_names_is_said(folder: Path) -> None:
    part = folder / "transformer"
    (part / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    named = f"model.path: {part}: the weights are in awq by config.json, which is not read; {READ}"
    # Weights that were decoded since are read.
    assert reasons(family="flux1", path=str(folder)) == []
    save_file({"a.codes": BYTES}, part / "model.safetensors")
    assert reasons(family="flux1", path=str(folder)) == [named]
    (part / "model.safetensors").rename(part / "model.bin")
    assert reasons(family="flux1", path=str(folder)) == [named]
    save_file({"a.qweight": INT8.int()}, part / "model.safetensors")
    assert reasons(family="flux1", path=str(folder)) == [
        f"model.path: {part}: 'a.qweight' is stored as GPTQ or AWQ (awq by its config.json), which is not read; {READ}"
    ]
