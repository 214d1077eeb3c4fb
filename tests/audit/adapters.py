"""Adapters against fp64 formulas of the weight that each publication gives a layer.

A formula makes the whole weight, and autograd the gradients; `trainer` computes neither that way. LoRA arXiv
2106.09685, DoRA 2402.09353, LoHa 2108.06098, LoKr 2309.14859, OFT 2306.07280, BOFT 2311.06243. The last two publish
rotations of a layer's inputs; rotated here are its outputs, by Cayley's transform, as LyCORIS stores them. The formulas
are themselves checked by finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.audit.check import Check
from trainer import adapters
from trainer.adapters import Targets
from trainer.adapters.state import TrainedAdapter
from trainer.config.sections import (
    AdapterSection,
    BoftAdapter,
    DiagOftAdapter,
    DoraAdapter,
    LoconAdapter,
    LohaAdapter,
    LokrAdapter,
    LoraAdapter,
    RankAdapter,
)
from trainer.weights.quantization import FORMATS, QuantLinear, quantize_layers

Tensors = Mapping[str, Tensor]
Formula = Callable[[Tensor, Tensors, Tensors, float], Tensor]
"""(weight (out, in[, kh, kw]), parameters, the point where constants are taken, alpha / rank) -> the adapted weight.

Parameters go by the names of peft and LyCORIS. Where a publication has backward take something for a constant, it is
computed at that point, so that finite differences see a constant too.
"""


def low_rank(weight: Tensor, p: Tensors, at: Tensors, scale: float) -> Tensor:
    """LoRA, eq. 3. A convolution is followed by one of 1 x 1 (LyCORIS)."""
    return weight + scale * (p["lora_B"].flatten(1) @ p["lora_A"].flatten(1)).view_as(weight)


def dora(weight: Tensor, p: Tensors, at: Tensors, scale: float) -> Tensor:
    """DoRA: rows of trained length. The length they are divided by is a constant in backward (sec. 4.3).

    The parameter is the length's difference from that of the row of `weight`.
    """
    magnitude = weight.norm(dim=1) + p["lora_magnitude_vector"]
    length = low_rank(weight, at, at, scale).norm(dim=1)
    return (magnitude / length)[:, None] * low_rank(weight, p, at, scale)


def loha(weight: Tensor, p: Tensors, at: Tensors, scale: float) -> Tensor:
    """FedPara, proposition 1: the Hadamard product of two products of rank r."""
    first, second = (p[f"hada_{name}_a"] @ p[f"hada_{name}_b"] for name in ("w1", "w2"))
    return weight + scale * (first * second).view_as(weight)


def lokr(weight: Tensor, p: Tensors, at: Tensors, scale: float) -> Tensor:
    """LyCORIS: the Kronecker product of two factors, each whole or a product of rank r.

    LyCORIS scales by 1 where both are whole, since nothing has a rank then.
    """

    def factor(name: str) -> Tensor:
        return p[name] if name in p else p[f"{name}_a"] @ p[f"{name}_b"]

    kernel = weight.shape[2:]
    w1, w2 = factor("lokr_w1"), factor("lokr_w2")
    update = torch.kron(w1.view(*w1.shape, *[1] * len(kernel)), w2.reshape(len(w2), -1, *kernel))
    return weight + (1.0 if {"lokr_w1", "lokr_w2"} <= p.keys() else scale) * update


def diag_oft(weight: Tensor, p: Tensors, at: Tensors, scale: float) -> Tensor:
    """OFT: a block-diagonal rotation, transposed as in LyCORIS."""
    return turned(torch.block_diag(*map(cayley, p["oft_blocks"])).T, weight)


def boft(weight: Tensor, p: Tensors, at: Tensors, scale: float) -> Tensor:
    """BOFT: a product of butterfly factors, each a permuted block-diagonal rotation.

    Factor i pairs rows that are 2^i * b / 2 apart: LyCORIS' order, the nearest rows first.
    """
    num_rows, b = len(weight), p["oft_blocks"].shape[-1]
    for i, blocks in enumerate(p["oft_blocks"]):
        apart = 2**i * b // 2
        row = torch.arange(num_rows)
        group, half, within = row // (2 * apart), row // apart % 2, row % apart
        # Where each row stands while the blocks turn: the two halves of a group take turns.
        permutation = F.one_hot(group * 2 * apart + 2 * within + half, num_rows).double().T
        weight = turned(permutation.T @ torch.block_diag(*map(cayley, blocks)) @ permutation, weight)
    return weight


def turned(rotation: Tensor, weight: Tensor) -> Tensor:
    """The rows of a weight, rotated."""
    return (rotation @ weight.flatten(1)).view_as(weight)


def cayley(block: Tensor) -> Tensor:
    """(I + Q) (I - Q)^-1 with Q = B - B^T: the Cayley transform of OFT."""
    skew, identity = block - block.T, torch.eye(len(block), dtype=block.dtype)
    return (identity + skew) @ torch.linalg.inv(identity - skew)


@dataclass(frozen=True)
class Case:
    """An adapter on one layer. subject: its name in the table.  is_conv: on a strided 3 x 3 convolution."""

    subject: str
    cfg: AdapterSection
    formula: Formula
    is_conv: bool = False

    @property
    def scale(self) -> float:
        """alpha / rank, where there is a rank."""
        if not isinstance(self.cfg, RankAdapter):
            return 1.0
        return 1.0 if self.cfg.alpha is None else self.cfg.alpha / self.cfg.rank


CASES = (
    Case("lora", LoraAdapter(rank=4, alpha=2), low_rank),
    Case("locon, linear", LoconAdapter(rank=4, alpha=2), low_rank),
    Case("locon, convolution", LoconAdapter(rank=4, alpha=2, conv_rank=3), low_rank, is_conv=True),
    Case("dora", DoraAdapter(rank=4, alpha=2), dora),
    Case("loha, as rank 4^2", LohaAdapter(rank=4, alpha=2), loha),
    Case("loha, dense", LohaAdapter(rank=8, alpha=2), loha),
    Case("loha, convolution, as rank 4^2", LohaAdapter(rank=4, alpha=2, conv_rank=4), loha, is_conv=True),
    Case("loha, convolution, dense", LohaAdapter(rank=8, alpha=2, conv_rank=8), loha, is_conv=True),
    Case("lokr", LokrAdapter(rank=2, alpha=1, factor=4), lokr),
    Case("lokr, decompose_both", LokrAdapter(rank=3, alpha=2, decompose_both=True), lokr),
    Case("lokr, full_matrix", LokrAdapter(rank=4, alpha=1, full_matrix=True), lokr),
    Case("lokr, factors whole by their rank", LokrAdapter(rank=16, alpha=4), lokr),
    Case("lokr, convolution", LokrAdapter(rank=2, alpha=1, conv_rank=2), lokr, is_conv=True),
    Case("lokr, convolution, decompose_both", LokrAdapter(rank=1, conv_rank=1, decompose_both=True), lokr, True),
    Case("lokr, convolution, full_matrix", LokrAdapter(conv_rank=4, full_matrix=True), lokr, is_conv=True),
    Case("diag-oft, blocks of 8", DiagOftAdapter(block_size=8), diag_oft),
    Case("diag-oft, convolution, blocks of 4", DiagOftAdapter(block_size=4), diag_oft, is_conv=True),
    Case("boft, blocks of 6", BoftAdapter(block_size=6), boft),
    Case("boft, blocks of 12, 2 stages", BoftAdapter(block_size=12, num_stages=2), boft),
    Case("boft, blocks of 24", BoftAdapter(block_size=24), boft),
    Case("boft, convolution, blocks of 4", BoftAdapter(block_size=4), boft, is_conv=True),
    Case("boft, convolution, blocks of 8, 1 stage", BoftAdapter(block_size=8, num_stages=1), boft, is_conv=True),
)


@dataclass(frozen=True)
class Adapted:
    """A layer with the trainer's adapter. parameters: {the name that formulas use: parameter}, e.g. `lora_A`."""

    case: Case
    layer: nn.Module
    names: Mapping[str, str]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {short: self.layer.get_parameter(name) for short, name in self.names.items()}

    def merged(self, weight: Tensor) -> Tensor:
        """The layer's weight as the trainer exports it. weight: that of the layer without adapter."""
        parameters = {f"net.layer.{name}": self.layer.get_parameter(name).detach() for name in self.names.values()}
        return TrainedAdapter(parameters, self.case.cfg, lambda _: weight)["net.layer"].merged(weight)


def base_layer(case: Case) -> nn.Linear | nn.Conv2d:
    """48 -> 96, or 24 -> 32 channels, with bias; the same each time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Conv2d(24, 32, 3, stride=2, padding=1) if case.is_conv else nn.Linear(48, 96)


def inputs_of(case: Case) -> tuple[Tensor, Tensor]:
    """An input and a gradient of the output."""
    numbers = torch.Generator().manual_seed(1)
    shapes = ((2, 24, 9, 8), (2, 32, 5, 4)) if case.is_conv else ((2, 5, 48), (2, 5, 96))
    x, gradient = (torch.randn(shape, generator=numbers) for shape in shapes)
    return x, gradient


def adapted(case: Case, layer: nn.Linear | nn.Conv2d, at_start: bool = False) -> Adapted:
    """The layer with the adapter, as training begins with it or with numbers that change it as much as it does."""
    model = nn.ModuleDict({"net": nn.ModuleDict({"layer": layer})})
    cfg = case.cfg.model_copy(update={"targets": ("layer",)})
    shapes = adapters.inject(model, cfg, Targets({}, {}, ()), "audit").parameters
    numbers = torch.Generator().manual_seed(2)
    for name, shape in shapes.items():
        spread = 0.2 * shape[-1] ** -0.5 if "oft_blocks" in name else max(10, math.prod(shape[1:])) ** -0.5
        value = adapters.initial_value(name, shape, 0) if at_start else spread * torch.randn(shape, generator=numbers)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(value))
    names = {name.split(".")[2]: name.removeprefix("net.layer.") for name in shapes}
    return Adapted(case, model.get_submodule("net.layer"), names)


def results(layer: Adapted) -> dict[str, Tensor]:
    """The trainer's output as "forward", the gradient of the input as "input", and that of each parameter."""
    x, gradient = inputs_of(layer.case)
    y = layer.layer(x.requires_grad_())
    y.backward(gradient)
    return {"forward": y.detach(), "input": x.grad} | {name: p.grad for name, p in layer.parameters.items()}


def reference_loss(case: Case, x: Tensor, p: Tensors, at: Tensors) -> tuple[Tensor, Tensor]:
    """The formula's output, and its product with the gradient: a number whose gradients are those of `results`."""
    layer, (_, gradient) = base_layer(case).double(), inputs_of(case)
    weight, bias = case.formula(layer.weight.detach(), p, at, case.scale), layer.bias.detach()
    y = F.conv2d(x, weight, bias, stride=2, padding=1) if case.is_conv else F.linear(x, weight, bias)
    return y, (y * gradient.double()).sum()


def point_of(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Input and parameters in fp64: the same numbers that the trainer has."""
    parameters = adapted(case, base_layer(case)).parameters
    return inputs_of(case)[0].double(), {name: p.detach().double() for name, p in parameters.items()}


def reference(case: Case) -> dict[str, Tensor]:
    """`results` by the formula."""
    x, at = point_of(case)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in at.items()}
    y, loss = reference_loss(case, x.requires_grad_(), leaves, at)
    loss.backward()
    return {"forward": y.detach(), "input": x.grad} | {name: leaf.grad for name, leaf in leaves.items()}


def largest(numbers: Sequence[float]) -> float:
    """NaN where one of them is: `max` would pass over it."""
    return float(torch.tensor(numbers, dtype=torch.float64).max())


def difference_at_start(case: Case, folder: Path) -> float:
    x, _ = inputs_of(case)
    with torch.no_grad():
        return float((adapted(case, base_layer(case), at_start=True).layer(x) - base_layer(case)(x)).abs().max())


def forward_difference(case: Case, folder: Path) -> float:
    return differences(case)["forward"]


def input_gradient_difference(case: Case, folder: Path) -> float:
    return differences(case)["input"]


def parameter_gradient_difference(case: Case, folder: Path) -> float:
    return largest([difference for name, difference in differences(case).items() if name not in ("forward", "input")])


def differences(case: Case) -> dict[str, float]:
    found, expected = results(adapted(case, base_layer(case))), reference(case)
    return {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}


def merged_difference(case: Case, folder: Path) -> float:
    weight, (_, at) = base_layer(case).weight.detach(), point_of(case)
    expected = case.formula(weight.double(), at, at, case.scale)
    return float((adapted(case, base_layer(case)).merged(weight) - expected).norm() / expected.norm())


def finite_difference(case: Case, folder: Path) -> float:
    """The reference's own gradients against central differences along one direction of each tensor."""
    gradients, (x, at) = reference(case), point_of(case)
    numbers, step = torch.Generator().manual_seed(3), 4e-6
    found = []
    for name, value in {"input": x, **at}.items():
        direction = torch.randn(value.shape, generator=numbers, dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            moved = {"input": x, **at, name: value + sign * step * direction}
            losses.append(float(reference_loss(case, moved.pop("input"), moved, at)[1]))
        slope = (losses[0] - losses[1]) / (2 * step)
        # Relative to the largest slope of a direction of this length: the slope itself may be near zero.
        found.append(abs(slope - float((gradients[name] * direction).sum())) / float(gradients[name].norm()))
    return largest(found)


def quantized_difference(case: Case, format: str, folder: Path) -> float:
    """Forward and all gradients on a quantized base, against those on a base of the weights that its bytes mean."""
    model = nn.ModuleDict({"layer": base_layer(case)})
    quantize_layers(model, {"layer": FORMATS[format]})
    stored, whole = model["layer"], base_layer(case)
    assert isinstance(stored, QuantLinear)
    whole.weight.data = dequantized(stored.qweight.data, format, inputs=48)
    found, expected = results(adapted(case, stored)), results(adapted(case, whole))
    return largest([float((found[name] - expected[name]).abs().max()) for name in expected])


def dequantized(records: Tensor, format: str, inputs: int) -> Tensor:
    """The weight (out, inputs) of records as `weights.quantization` describes; NF4's levels by QLoRA, appendix E."""
    num_blocks = -(-inputs // 64)
    codes, scales = records[:, : -2 * num_blocks].int(), records[:, -2 * num_blocks :].clone().view(torch.bfloat16)
    if format == "nf4":
        levels = NF4[torch.stack([codes >> 4, codes & 15], dim=2).flatten(1)][:, :inputs]
    else:
        levels = torch.where(codes > 127, codes - 256, codes).float()
    return levels * scales.float().repeat_interleave(64, dim=1)[:, :inputs]


NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def numbers_lost_to_a_zero_row(case: Case, folder: Path) -> float:
    """How many numbers are not finite where a row of the base is zero: at the start, where the update's is too, and
    later."""
    lost = 0
    for at_start in (True, False):
        layer = base_layer(case)
        layer.weight.data[3] = 0
        weight = layer.weight.data.clone()
        found = adapted(case, layer, at_start)
        tensors = [*results(found).values(), found.merged(weight)]
        lost += sum(int((~tensor.isfinite()).sum()) for tensor in tensors)
    return lost


MERGED = 4e-7
"""fp32 rounds by 6e-8, and each of the up to five stages of boft rounds."""
CHECKS = (
    *(
        Check(case.subject, name, limit, partial(measure, case), is_quick=True)
        for case in CASES
        for name, limit, measure in (
            ("at the start, from the base", 0.0, difference_at_start),
            ("forward", 1e-6, forward_difference),
            ("gradient of the input", 1e-6, input_gradient_difference),
            ("gradients of the parameters", 1e-6, parameter_gradient_difference),
            ("merged weight", MERGED, merged_difference),
            ("formula, by finite differences", 2e-8, finite_difference),
        )
    ),
    *(
        Check(case.subject, f"on {format}, from its weights", 0.0, partial(quantized_difference, case, format), True)
        for case in CASES
        for format in ("nf4", "int8")
        if not case.is_conv
    ),
    *(
        Check(case.subject, "numbers lost to a row of zeros", 0.0, partial(numbers_lost_to_a_zero_row, case), True)
        for case in CASES
        if case.formula is dora
    ),
)
