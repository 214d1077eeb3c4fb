"""The counts behind the roofline, and what the elementwise passes of a block may move."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.benchmarks import kernel_count
from tests.benchmarks.counted import TINY
from tests.benchmarks.kernel_count import BACKWARD, FORWARD, KernelCounter, StepCount
from trainer import adapters
from trainer.adapters import Targets
from trainer.config.sections import LoraAdapter
from trainer.plan.record.fake_device import fake_tensors
from trainer.weights.files import give_storage

ROOT = Path(__file__).parents[2]
slice_backward = torch.ops.aten.slice_backward
MOST_ELEMENTWISE = {
    "double, forward": 2_826_339_328,
    "double, backward": 4_921_320_448,
    "single, forward": 2_563_443_200,
    "single, backward": 4_828_348_928,
}
"""Bytes that elementwise passes over one block of FLUX.2 klein-4B read and write: 4608 tokens, 3072 wide, a LoRA of
rank 16, without recompute and torch.compile. Lower them where a pass is saved."""
MARGIN = 1.01
"""A pass over a block's output reads and writes 57 MB: 1.4 % of forward."""


def counted(*argv: str) -> Any:
    """Return what `counted` prints, run in a process of its own since the fake device cannot be removed."""
    command = [sys.executable, "-m", "tests.benchmarks.counted", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_elementwise_passes_of_a_block_move_no_more_than_measured_and_one_more_pass_would_be_seen(
    tmp_path: Path,
) -> None:
    found = counted("blocks", str(tmp_path))
    for part, most in MOST_ELEMENTWISE.items():
        assert found["found"][part] <= MARGIN * most, part
    assert found["with a pass"].keys() < MOST_ELEMENTWISE.keys()
    for part, num_bytes in found["with a pass"].items():
        assert num_bytes == found["found"][part] + 2 * 4608 * 3072 * 2
        assert num_bytes > MARGIN * MOST_ELEMENTWISE[part], part


@pytest.mark.slow
@pytest.mark.parametrize("models", [("flux2",), tuple(name for name in TINY if name != "flux2")])
def test_matrix_products_convolutions_and_attention_of_a_step_are_those_that_torch_counts_of_a_real_one(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    for of_model in counted("flops", str(tmp_path), *models):
        ours, name = of_model["ours"], of_model["model"]
        forward, backward = (
            sum(ours.get(kind, 0) for kind in kinds)
            for kinds in (
                (kernel_count.ATTENTION, kernel_count.MASKED),
                (kernel_count.ATTENTION_BACKWARD, kernel_count.MASKED_BACKWARD),
            )
        )
        assert backward == 2.5 * forward > 0, name
        products = sum(ours.values()) - forward - backward - ours["useful"]
        assert products + forward + 2 * forward == of_model["torch"], name  # written out, nothing is computed again
        assert ours["useful"] == of_model["torch"], name


def lora_layer(tokens: int, inputs: int, outputs: int, rank: int) -> StepCount:
    """The kernels of a linear layer with a LoRA, in bf16, whose input needs a gradient."""
    counter = KernelCounter(torch.device("cpu"))
    with torch.device("meta"):
        model = nn.ModuleDict({"net": nn.ModuleDict({"linear": nn.Linear(inputs, outputs, bias=False)})})
    model.requires_grad_(False)
    adapters.inject(model, LoraAdapter(rank=rank, alpha=2 * rank), Targets({"net": ("linear",)}, {}, ()), "flux2")
    layer = model.to(torch.bfloat16).get_submodule("net.linear")
    with fake_tensors(torch.device("cpu"), counter.tracker.observe):
        give_storage(layer, torch.device("cpu"))
        x = torch.empty(tokens, inputs, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.empty(tokens, outputs, dtype=torch.bfloat16)
        counter.kernels.clear()
        layer(x).backward(gradient)
        return StepCount(counter.kernels.copy())


def test_bytes_and_operations_of_a_layer_with_a_lora_are_those_counted_by_hand() -> None:
    tokens, inputs, outputs, rank = 4608, 3072, 9216, 16
    x, y, h = tokens * inputs, tokens * outputs, tokens * rank
    weight, down, up = inputs * outputs, inputs * rank, rank * outputs
    by_hand = {
        (FORWARD, kernel_count.MATRIX): (1, x + weight + y, weight),
        (FORWARD, kernel_count.SMALL): (2, (x + down + h) + (h + up + y + y), down + up),  # the second adds
        (FORWARD, kernel_count.ELEMENTWISE): (1, h + h, 0),  # the scale
        (BACKWARD, kernel_count.MATRIX): (1, y + weight + x, weight),
        # the gradients of B, of its input, of A, of the layer's input
        (BACKWARD, kernel_count.SMALL): (4, 2 * (y + h + up) + 2 * (h + x + down), 2 * (down + up)),
        (BACKWARD, kernel_count.ELEMENTWISE): (2, (h + h) + (x + x + x), 0),
    }  # fmt: skip
    found = lora_layer(tokens, inputs, outputs, rank).by(lambda kernel: f"{kernel.phase}/{kernel.kind}")
    assert {tuple(name.split("/")): (of.launches, of.num_bytes, of.flops) for name, of in found.items()} == {
        name: (launches, 2 * numbers, 2 * tokens * products) for name, (launches, numbers, products) in by_hand.items()
    }


def watched(run: Any) -> list[tuple[str, int, int]]:
    """(name, bytes, launches) of the kernels of some operations on tensors of fp32, (8, 16) and (16,)."""
    counter = KernelCounter(torch.device("cpu"))
    with fake_tensors(torch.device("cpu"), counter.tracker.observe):
        x, scale = torch.empty(8, 16), torch.empty(16)
        counter.kernels.clear()
        run(x, scale)
    return [(kernel.name, kernel.num_bytes, kernel.launches) for kernel in counter.kernels]


@pytest.mark.parametrize(
    ("run", "kernels"),
    [
        (lambda x, _: x.view(16, 8).t()[1:].unbind(), []),
        (lambda x, _: torch.empty_like(x), []),
        (lambda x, scale: x * scale, [("mul", 4 * (128 + 16 + 128), 1)]),
        (lambda x, scale: x * scale.expand(8, 16), [("mul", 4 * (128 + 16 + 128), 1)]),
        (lambda x, _: x * x, [("mul", 4 * (128 + 128), 1)]),
        (lambda x, _: torch.cat([x, x[:2]]), [("cat", 4 * (128 + 32 + 160), 1)]),
        (lambda x, _: torch.zeros_like(x), [("zeros_like", 4 * 128, 1)]),
        (lambda x, _: x.add_(1), [("add_", 4 * (128 + 128), 1)]),
        (lambda x, _: x.zero_(), [("zero_", 4 * 128, 1)]),
        (lambda x, _: x[:4].copy_(x[4:]), [("copy_", 4 * (64 + 64), 1)]),
        (lambda x, _: x[torch.empty(2, dtype=torch.long)], [("index", 4 * (32 + 32) + 2 * 8, 1)]),
        (lambda x, _: slice_backward(x[:4], [8, 16], 0, 0, 4, 1), [("slice_backward", 4 * (64 + 128 + 64), 2)]),
        (lambda x, _: torch._foreach_mul_([x, *x[:4]], 2.0), [("_foreach_mul_", 8 * (128 + 64), 1)]),
        (lambda x, _: torch._foreach_mul_(x.flatten().split(1), 2.0), [("_foreach_mul_", 8 * 128, 2)]),
    ],
)
def test_a_kernel_reads_and_writes_each_tensor_once_and_views_cost_nothing(
    run: Any, kernels: list[tuple[str, int, int]]
) -> None:
    assert watched(run) == kernels
