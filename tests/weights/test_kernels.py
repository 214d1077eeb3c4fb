"""Decoding in one pass: the kernels against their references, what they move, and runs where they do not work."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._triton import has_triton_package

from tests.benchmarks.kernel_count import traffic
from trainer.weights import quantization
from trainer.weights.quantization import FORMATS, QuantLinear, decode_records, decoded, decoding_note

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SLOWER = "quantized layers are decoded piece by piece, which takes longer: Triton's kernel failed "


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, each tensor once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num_bytes += traffic(func, args, kwargs or {}, out) or 0
        return out


@pytest.mark.parametrize(
    ("format", "kernel", "pieces"),
    [("nf4", 2.53, 22.73), ("int8", 3.03, 19.2), ("fp8", 3.0, 31.0)],
)
def test_the_bytes_that_a_decoded_weight_moves_by_a_kernel_and_piece_by_piece(
    format: str, kernel: float, pieces: float
) -> None:
    records = FORMATS[format].encode(torch.randn(64, 3072))
    found = []
    for decode in (decoded, decode_records):  # the first is one operation, as the kernel is
        with Traffic() as counted:
            decode(records, format, 3072, torch.bfloat16)
        found.append(counted.num_bytes / (64 * 3072))
    assert found == pytest.approx([kernel, pieces], abs=0.05)
    assert found[0] <= 3.1


def write_triton(root: Path, init: str) -> None:
    package = root / "triton"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    (package / "language.py").write_text("")


WITHOUT_COMPILER = """
class Kernel:
    def __init__(self, function):
        pass

    def __getitem__(self, grid):
        raise OSError("Failed to find C compiler.\\nPlease specify one.")


jit = Kernel


def cdiv(a, b):
    return -(-a // b)
"""
WRONG = WITHOUT_COMPILER.replace(
    'raise OSError("Failed to find C compiler.\\nPlease specify one.")', "return lambda *args: args[1].zero_()"
)


@pytest.fixture
def other_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels serve on this device, and are imported anew."""
    has_triton_package()  # torch asks once per process, and would remember the package of a test
    monkeypatch.setattr(quantization, "KERNEL_DEVICES", ("cpu",))
    before = take_modules()
    quantization._kernel.cache_clear()
    yield
    quantization._kernel.cache_clear()
    take_modules()
    sys.modules.update(before)


def take_modules() -> dict[str, Any]:
    """Take Triton, and what was made with it, from the modules that are imported."""
    names = [name for name in sys.modules if name.partition(".")[0] == "triton" or name == "trainer.weights.kernels"]
    return {name: sys.modules.pop(name) for name in names}


def step(layer: QuantLinear) -> tuple[Tensor, ...]:
    x = torch.linspace(-1, 1, 300).view(3, 100).requires_grad_()
    y = layer(x)
    return layer.weight, y, *torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize(
    ("init", "reason"),
    [
        (None, "(ModuleNotFoundError: import of triton halted; None in sys.modules)"),
        ("raise ImportError('libcuda.so.1: cannot open shared object file')", "(ImportError: libcuda.so.1: cannot "),
        (WITHOUT_COMPILER, "(OSError: Failed to find C compiler.)"),
        (WRONG, "(it does not give the bits that it should)"),
    ],
    ids=["missing", "broken", "no compiler", "wrong bits"],
)
def test_without_a_kernel_that_works_layers_are_decoded_piece_by_piece_and_one_sentence_says_why(
    init: str | None, reason: str, other_triton: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = QuantLinear.of(nn.Linear(100, 129), FORMATS["nf4"])
    with monkeypatch.context() as without:
        without.setattr(quantization, "KERNEL_DEVICES", ())
        expected = step(layer)
    quantization._kernel.cache_clear()
    if init is None:
        sys.modules["triton"] = None  # type: ignore[assignment]  # importing it fails then
    else:
        write_triton(tmp_path, init)
        monkeypatch.syspath_prepend(tmp_path)
    assert decoding_note(["nf4"], torch.float32, CPU).startswith(SLOWER + reason)
    assert all(torch.equal(*pair) for pair in zip(step(layer), expected, strict=True))


def test_a_cpu_has_no_kernel_and_nothing_to_say() -> None:
    assert decoding_note(FORMATS, torch.bfloat16, CPU) == ""
    assert decoding_note([], torch.bfloat16, torch.device("cuda")) == ""


def run(case: str, is_interpreted: bool, tmp_path: Path) -> str:
    """Run one of `triton_cases`. Returns what it printed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: make eightbit")
    settings = {"TRITON_INTERPRET": "1"} if is_interpreted else {"TRITON_CACHE_DIR": str(tmp_path)}
    argv = [sys.executable, "-m", "tests.weights.triton_cases", case]
    done = subprocess.run(argv, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_kernels_give_the_bits_of_their_references_in_the_interpreter(tmp_path: Path) -> None:
    assert run("bits", True, tmp_path) == "294"


@pytest.mark.slow
def test_a_layer_that_the_kernel_decodes_computes_the_same(tmp_path: Path) -> None:
    assert run("layer", True, tmp_path) == "3"


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_from_turing_to_blackwell(tmp_path: Path) -> None:
    assert run("compile", False, tmp_path) == "72"
