"""Weights as bytes: what is lost, what is multiplied, and what is kept for backward."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.adapters.nets import CONFIGS
from tests.weights import recorded
from trainer import adapters
from trainer.config.sections import AdapterSection
from trainer.system.errors import InputError
from trainer.weights import quantization
from trainer.weights.nf4 import NF4_LEVELS
from trainer.weights.quantization import FORMATS, QuantLinear, decoded, quantize_layers, quantized_layers

ERROR = {"nf4": 0.094, "int8": 0.0065, "fp8": 0.027}
"""Error for weights of N(0, 1), relative to the norm."""
BYTES = {"nf4": 0.27, "int8": 0.52, "fp8": 0.52}
"""Relative to bf16."""
DTYPES = (torch.float32, torch.bfloat16)
RAGGED = (129, 100)
"""Outputs and inputs that no block and no number of ranks divides."""


def decode(records: Tensor, format: str, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return FORMATS[format].decode(records, inputs, dtype, FORMATS[format].table())


def quantized(format: str, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> QuantLinear:
    return QuantLinear.of(nn.Linear(inputs, outputs, dtype=dtype), FORMATS[format])


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_format_loses_and_what_it_takes(format: str) -> None:
    weight = torch.randn(1024, 1536)
    records = FORMATS[format].encode(weight)
    assert float((decode(records, format, 1536) - weight).norm() / weight.norm()) <= ERROR[format]
    assert records.numel() <= BYTES[format] * 2 * weight.numel()


def test_a_version_of_the_format_gives_the_same_bytes_for_ever() -> None:
    """Raise VERSION where this changes: caches of the base are named after it."""
    weight = torch.randn(*RAGGED, generator=torch.Generator().manual_seed(0))
    found = {
        name: hashlib.sha256(format.encode(weight).numpy().tobytes()).hexdigest()[:8]
        for name, format in FORMATS.items()
    }
    assert (quantization.VERSION, found) == (
        1,
        {"nf4": "d78e979d", "int8": "31614692", "fp8": "e3198fe4"},
    )


@pytest.mark.parametrize("case", ["nf4-64", "fused"])
def test_nf4_codes_are_those_of_bitsandbytes(case: str) -> None:
    """Of a weight in bf16, and of one in fp32."""
    codes = recorded.stored(case, "a")["a.weight"]
    assert torch.equal(FORMATS["nf4"].encode(recorded.original(case))[:, :64], codes.view(48, 64))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_encoded_by_themselves(format: str) -> None:
    weight = torch.randn(*RAGGED)
    whole = FORMATS[format].encode(weight)
    parts = [FORMATS[format].encode(rows) for rows in weight.split(43)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_is_the_same_whatever_type_it_is_asked_for_in_and_in_pieces(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = quantized(format, *RAGGED)
    monkeypatch.setitem(quantization.PIECE, "cpu", 700)
    for dtype in DTYPES:
        pieces = decoded(layer.qweight, format, 100, dtype)
        assert torch.equal(pieces, decode(layer.qweight, format, 100).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_each_code_is_its_level_times_the_scale(format: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    if format == "nf4":
        levels = torch.tensor(NF4_LEVELS)[torch.stack([codes >> 4, codes & 15], 1).int().flatten()]
    elif format == "int8":
        levels = codes.view(torch.int8).float()
    else:
        codes = codes[(codes & 0x7F) != 0x7F]  # NaN
        levels = codes.view(torch.float8_e4m3fn).float()
    for scale in (0.0, 2.0**-133, 1.17e-38, 0.0123, 1.0, 3.0e35):
        stored = torch.tensor([scale]).bfloat16()
        scales = stored.expand(FORMATS[format].num_blocks(len(levels))).contiguous().view(torch.uint8)
        found = decode(torch.cat([codes, scales])[None], format, len(levels), dtype)
        assert torch.equal(found, (levels * stored.float()).to(dtype)[None])


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_zeros_and_tiny_numbers_stay_what_they_are(format: str) -> None:
    weight = torch.zeros(3, 128)
    weight[1] = 1e-38
    weight[2, 5] = -3.0
    found = decode(FORMATS[format].encode(weight), format, 128)
    assert torch.equal(found[0], weight[0])
    assert torch.isfinite(found).all()
    assert torch.equal(found[2] != 0, weight[2] != 0)
    assert float(found[2, 5]) == pytest.approx(-3, rel=2**-8)  # a scale has 8 bits


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused(number: float) -> None:
    weight = torch.ones(2, 64)
    weight[1, 3] = number
    for format in FORMATS.values():
        with pytest.raises(ValueError, match="holds numbers that are not finite"):
            format.encode(weight)


def test_a_code_of_fp8_that_is_no_number_is_refused() -> None:
    weight = torch.tensor([[1.0, torch.nan, 2.0]])
    with pytest.raises(ValueError, match="not finite"):
        FORMATS["fp8"].encode(weight, 0.5)


def test_layers_that_share_a_weight_share_its_bytes() -> None:
    first, second, other = (nn.Linear(64, 8) for _ in range(3))
    second.weight = first.weight
    model = nn.ModuleDict({"first": first, "second": second, "other": other})
    quantize_layers(model, {"first": FORMATS["nf4"], "second": FORMATS["int8"], "other": FORMATS["nf4"]})
    layers = quantized_layers(model)
    assert layers["second"].qweight is layers["first"].qweight
    assert torch.equal(layers["second"].weight, layers["first"].weight)
    assert layers["other"].qweight is not layers["first"].qweight
    assert torch.equal(layers["second"].bias, second.bias)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_that_begins_at_an_odd_byte_is_decoded(format: str) -> None:
    weight = torch.randn(5, 63)
    records = FORMATS[format].encode(weight)
    assert torch.equal(decode(records[3:4], format, 63), decode(records, format, 63)[3:4])


def test_fp8_keeps_the_codes_of_what_was_stored_in_fp8_with_any_scale() -> None:
    codes = torch.randn(64, 96).mul(100).to(torch.float8_e4m3fn)
    for scale in (1.0, 0.0123):
        records = FORMATS["fp8"].encode(codes.float() * scale, scale)
        assert torch.equal(records[:, :96], codes.view(torch.uint8))
        assert torch.equal(decode(records, "fp8", 96), codes.float() * torch.tensor(scale).bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_forward_and_backward_are_those_of_the_decoded_weight_bit_for_bit(format: str, dtype: torch.dtype) -> None:
    layer = quantized(format, *RAGGED, dtype=dtype)
    x = torch.randn(2, 7, 100, dtype=dtype, requires_grad=True)
    output, expected = layer(x), F.linear(x, layer.weight, layer.bias)
    assert torch.equal(output, expected)
    gradient = torch.randn_like(output)
    found, wanted = (torch.autograd.grad(y, x, gradient)[0] for y in (output, expected))
    assert torch.equal(found, wanted)


def test_the_gradient_of_the_input_is_the_derivative() -> None:
    layer = quantized("nf4", 6, 70, torch.float64)
    assert torch.autograd.gradcheck(layer, torch.randn(3, 70, dtype=torch.float64, requires_grad=True))


def saved(run: Callable[[], Tensor]) -> list[Tensor]:
    """The tensors that a forward pass keeps for backward."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return kept


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("format", FORMATS)
def test_no_adapter_keeps_a_decoded_weight_for_backward(format: str, cfg: AdapterSection) -> None:
    outputs, inputs = 96, 128
    model = nn.ModuleDict({"transformer": nn.Sequential(nn.Linear(inputs, outputs))}).requires_grad_(False)
    quantize_layers(model, {"transformer.0": FORMATS[format]})
    adapters.inject(model, cfg, adapters.Targets({"transformer": ("0",)}, {}, ()), "test")
    (layer,) = quantized_layers(model).values()
    added = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in added.items():
        values = nn.Parameter(adapters.initial_value(name, parameter.shape, seed=0))
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._parameters[leaf] = values
    x = torch.randn(5, inputs, requires_grad=True)
    kept = saved(lambda: model["transformer"](x))
    assert any(tensor is layer.qweight for tensor in kept)
    assert [tuple(t.shape) for t in kept if t.is_floating_point() and t.numel() >= outputs * inputs] == []


def test_an_adapter_is_not_merged_into_bytes() -> None:
    model = nn.ModuleDict({"transformer": nn.Sequential(nn.Linear(64, 64))}).requires_grad_(False)
    quantize_layers(model, {"transformer.0": FORMATS["nf4"]})
    adapters.inject(model, CONFIGS["lora"], adapters.Targets({"transformer": ("0",)}, {}, ()), "test")
    (layer,) = adapters.adapted_layers(model).values()
    with pytest.raises(InputError) as error:
        layer.merge()
    assert str(error.value) == (
        "transformer.0: its weight is stored in fewer bits, and an adapter cannot be merged into that; export the run "
        "with export.what merged, which merges it into the original weights"
    )


@pytest.mark.parametrize("format", FORMATS)
def test_a_change_of_type_leaves_the_bytes_alone(format: str) -> None:
    layer = quantized(format, 96, 128)
    before, weight = layer.qweight.clone(), layer.weight
    layer.to(torch.float16).to(torch.float32)
    assert torch.equal(layer.qweight, before)
    assert torch.equal(layer.weight, weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it compiles
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", FORMATS)
def test_a_compiled_layer_computes_the_same_and_keeps_no_decoded_weight(format: str, backend: str) -> None:
    layer = quantized(format, 96, 128)
    x = torch.randn(5, 128, requires_grad=True)
    expected = layer(x)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    compiled(x)
    kept = saved(lambda: compiled(x))
    found = compiled(x)
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], wanted)
    assert [tuple(tensor.shape) for tensor in kept if tensor.is_floating_point() and tensor.numel() >= 96 * 128] == []
