"""The kernels of a quantized base without a GPU, for a process of its own, as Triton reads its settings on import:

    TRITON_INTERPRET=1 python -m tests.weights.triton_cases bits   against `Format.decode`, in Triton's interpreter
    TRITON_INTERPRET=1 python -m tests.weights.triton_cases layer  a layer that is decoded by the kernel
    python -m tests.weights.triton_cases compile                   for several generations of GPUs

Prints how many cases passed, and exits with 1 at the first that did not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget

from trainer.weights import kernels, quantization
from trainer.weights.quantization import FORMATS, QuantLinear, decoding_note

DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = (3072, 12288, 4096, 6144, 24576, 1024)
"""Inputs of layers of klein-4B, dev, and others, which have thousands of rows of them; the interpreter is slow."""
RAGGED = (1, 63, 65, 100, 1025, 3200 + 7)
TIE = 0x8000
ARCHITECTURES = (75, 80, 89, 90, 100, 120)


def main() -> int:
    cases: Mapping[str, Callable[[], int]] = {"bits": bits, "layer": layer, "compile": compile_all}
    print(cases[sys.argv[1]]())
    return 0


def bits() -> int:
    """Compare every weight with the reference, bit for bit."""
    generator, count = torch.Generator().manual_seed(0), 0
    for name in FORMATS:
        for records, inputs in records_of(name, generator):
            for dtype in DTYPES:
                check(name, records, inputs, dtype)
                count += 1
    return count


def check(name: str, records: Tensor, inputs: int, dtype: torch.dtype) -> None:
    format = FORMATS[name]
    expected = format.decode(records, inputs, dtype, format.table())
    found = torch.full_like(expected, -7)
    kernels.decode(records, found, name)
    whole = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(found.view(whole), expected.view(whole)), (name, tuple(records.shape), inputs, dtype)


def records_of(name: str, generator: torch.Generator) -> Iterator[tuple[Tensor, int]]:
    """Yield (records, inputs): weights as they are encoded, and every code with every kind of scale."""
    format = FORMATS[name]
    for inputs in (*WIDTHS, *RAGGED):
        records = format.encode(torch.randn(3, inputs, generator=generator) * 0.02)
        yield records, inputs
        yield records[:0], inputs
        yield records[1:2], inputs
        shifted = torch.empty(records.numel() + 1, dtype=torch.uint8)[1:].view_as(records)
        yield shifted.copy_(records), inputs  # at an odd address
    codes = torch.arange(256, dtype=torch.uint8).repeat(4)
    if name == "fp8":
        codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)  # NaN, which is never stored
    inputs = codes.numel() * (2 if name == "nf4" else 1)
    scales = scales_of(generator, 64)
    blocks = scales[:, None].expand(-1, format.num_blocks(inputs)).contiguous().view(torch.uint8)
    records = torch.cat([codes.expand(len(scales), -1), blocks], dim=1)
    if name != "nf4":  # whose products have more digits
        exact = format.decode(records, inputs, torch.float32, format.table()).view(torch.int32)
        assert int(((exact & 0xFFFF) == TIE).sum()) > 1000, "bf16 ties are among the cases"
    yield records, inputs


def scales_of(generator: torch.Generator, number: int) -> Tensor:
    """Zero, the smallest and largest numbers of bf16 that a block can have, and any."""
    special = torch.tensor([0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F - (9 << 7)], dtype=torch.int16)
    drawn = torch.randint(0x3000, 0x4000, (number,), generator=generator, dtype=torch.int16)
    return torch.cat([special, drawn]).view(torch.bfloat16)


def layer() -> int:
    """Decode a layer by the kernel in forward and backward, as on a GPU."""
    count = 0
    for name, format in FORMATS.items():
        made = QuantLinear.of(nn.Linear(100, 129), format)
        x = torch.randn(5, 100, requires_grad=True)
        results = []
        for devices in ((), ("cpu",)):
            quantization.KERNEL_DEVICES = devices
            quantization._kernel.cache_clear()
            assert decoding_note([name], torch.float32, torch.device("cpu")) == ""
            y = made(x)
            results.append((made.weight, y, *torch.autograd.grad(y.sum(), x)))
        assert quantization._kernel(name, torch.float32, torch.device("cpu"))[0] is kernels.decode
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        count += 1
    return count


def compile_all() -> int:
    """Compile each kernel to machine code, with sizes that are multiples of 16 and with others."""
    count = 0
    for name in FORMATS:
        for is_bf16 in (True, False):
            for multiple in (True, False):
                for architecture in ARCHITECTURES:
                    compile_one(name, is_bf16, multiple, architecture)
                    count += 1
    return count


def compile_one(name: str, is_bf16: bool, multiple: bool, architecture: int) -> None:
    types = ("*u8", "*i16" if is_bf16 else "*fp32", "*fp32", "i32", "i32", "i32", *["constexpr"] * 3)
    signature = dict(zip(kernels._decode.arg_names, types, strict=True))
    attributes = {(number,): [["tt.divisibility", 16]] for number in range(5)} if multiple else {}
    constants = {"format": name, "is_bf16": is_bf16, "blocks": kernels.BLOCKS}
    source = triton.compiler.ASTSource(kernels._decode, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    assert compiled.asm["cubin"]
    # Nothing but the product is computed in floating point, and that with numbers below the normal ones.
    assert not any(word in compiled.asm["ptx"] for word in ("fma.", ".ftz", "cvt.rn.bf16"))


if __name__ == "__main__":
    sys.exit(main())
