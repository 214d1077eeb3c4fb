"""The count of the kernels that torch.compile generates."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.benchmarks.kernel_count import BACKWARD, ELEMENTWISE, FORWARD, Kernel, KernelCounter

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Inductor imports what uses torch.jit
    from tests.benchmarks.compiled_count import CountingCompiler

ROOT = Path(__file__).parents[2]
MOST = {"flux2-dev-lora-4gpu": 0.45, "flux2-klein-4b-lora-1gpu": 0.45}
"""Elementwise bytes of a compiled step with full recompute, as a share of those without torch.compile. FLUX.2 dev has
0.440. Left are passes that read the output of a matrix product and write the input of the next one. A LoRA's second
product is a tensor of its own in compiled blocks, which such a pass reads too; without torch.compile it is added in
place, which counts as a matrix product."""
BEFORE = {"flux2-dev-lora-4gpu": 1_493.1e9}
"""Elementwise bytes without torch.compile before a LoRA's passes over its layer's output were merged."""
MOST_OF_BEFORE = 0.4
ROWS, INNER, OUTER = 64, 32, 48


def three_passes_and_a_product(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Multiply, add, take the sine; then multiply by a matrix."""
    return torch.sin(x * y + x) @ weight


def test_three_pointwise_operations_are_one_kernel_that_reads_and_writes_once_and_products_are_not_counted() -> None:
    compiler = CountingCompiler(KernelCounter(torch.device("cpu")))
    inputs = [torch.randn(ROWS, INNER, requires_grad=True) for _ in range(2)]
    weight = torch.randn(INNER, OUTER)
    torch._dynamo.reset()
    compiled = torch.compile(three_passes_and_a_product, backend=compiler)(*inputs, weight)
    expected = three_passes_and_a_product(*inputs, weight)
    gradients = [torch.autograd.grad(out.sum(), inputs) for out in (compiled, expected)]
    numbers = 4 * ROWS * INNER
    assert [(graph.phase, graph.kernels) for graph in compiler.graphs] == [
        (FORWARD, (Kernel(FORWARD, ELEMENTWISE, "generated", 0, 2 * numbers + numbers),)),
        # Two inputs and the gradient of the product's factor, which is read once; the gradients of both inputs.
        (BACKWARD, (Kernel(BACKWARD, ELEMENTWISE, "generated", 0, 3 * numbers + 2 * numbers),)),
    ]
    assert torch.equal(compiled, expected)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_kernel_that_reads_a_part_of_a_buffer_is_counted_with_that_part() -> None:
    compiler = CountingCompiler(KernelCounter(torch.device("cpu")))
    torch._dynamo.reset()
    whole = torch.randn(ROWS, 4 * INNER)
    torch.compile(lambda x: torch.sin(x[:, :INNER] * 2), backend=compiler)(whole)
    torch.compile(lambda x: torch.softmax(x[:, :INNER] * 2, -1), backend=compiler)(whole)
    moved = [[kernel.num_bytes for kernel in graph.kernels] for graph in compiler.graphs]
    part = 4 * ROWS * INNER
    assert moved[0] == [part + part]
    assert sum(moved[1]) <= 2 * part + 2 * part + 4 * 4 * ROWS  # its maximum and its sum are one number a row


@pytest.mark.slow
@pytest.mark.parametrize("preset", MOST)
def test_elementwise_passes_of_a_compiled_step_move_less_than_half_of_what_they_move_without(preset: str) -> None:
    argv = [sys.executable, "-m", "tests.benchmarks.compiled_count", "--json", preset]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problem"] == ""
    assert found["compiled"] <= MOST[preset] * found["eager"]
    assert found["compiled"] <= MOST_OF_BEFORE * BEFORE.get(preset, float("inf"))
    # Forward of the first block, whose input needs no gradient, and forward and backward of both classes.
    assert len(found["graphs"]) >= 4
