"""Layers as bitsandbytes writes and reads them, recorded: importing it costs every rank of every test a second.

`python -m tests.weights.recorded` writes bitsandbytes.safetensors again with the installed bitsandbytes, which
`make test-all` installs; a slow test compares the two. See DECISIONS 144.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = Path(__file__).with_name("bitsandbytes.safetensors")
SHAPE = (48, 128)
CASES = {
    f"{kind}-{block}{'-nested' if nested else ''}": (SHAPE, torch.bfloat16, kind, block, nested)
    for kind, block in (("nf4", 64), ("fp4", 64), ("nf4", 128))
    for nested in (False, True)
} | {
    "ragged": ((48, 96), torch.bfloat16, "nf4", 64, False),
    "fused": (SHAPE, torch.float32, "nf4", 64, False),
    "small": ((32, 64), torch.float32, "nf4", 64, False),
}
"""{name: (shape, dtype, kind of codes, block, whether the scales are quantized too)}"""


def stored(case: str, name: str) -> dict[str, Tensor]:
    """The tensors of a layer `name` in a file that bitsandbytes wrote."""
    return {
        f"{name}.{key.removeprefix(f'{case}/stored/')}": tensor.clone()
        for key, tensor in _recorded().items()
        if key.startswith(f"{case}/stored/")
    }


def original(case: str) -> Tensor:
    """The weight before it was quantized."""
    return _recorded()[f"{case}/original"]


def dequantized(case: str) -> Tensor:
    """The weight, fp32, as bitsandbytes reads it."""
    return _recorded()[f"{case}/dequantized"]


@cache
def _recorded() -> dict[str, Tensor]:
    return load_file(FILE)


def record() -> dict[str, Tensor]:
    """All cases, by the installed bitsandbytes."""
    import bitsandbytes.functional as bitsandbytes

    tensors = {}
    for number, (case, (shape, dtype, kind, block, nested)) in enumerate(CASES.items()):
        weight = torch.randn(*shape, generator=torch.Generator().manual_seed(number)).to(dtype)
        codes, state = bitsandbytes.quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=nested)
        parts = {key: tensor.clone() for key, tensor in state.as_dict(packed=True).items()}
        again = bitsandbytes.QuantState.from_dict(dict(parts), device=torch.device("cpu"))
        again.dtype = torch.float32
        tensors |= {f"{case}/stored/weight.{key}": tensor for key, tensor in parts.items()}
        tensors[f"{case}/stored/weight"] = codes
        tensors[f"{case}/original"] = weight
        tensors[f"{case}/dequantized"] = bitsandbytes.dequantize_4bit(codes, again)
    return tensors


def four_bits(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A layer as the installed bitsandbytes stores it."""
    import bitsandbytes.functional as bitsandbytes

    codes, state = bitsandbytes.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    return {f"{name}.weight": codes} | {f"{name}.weight.{key}": t for key, t in state.as_dict(packed=True).items()}


if __name__ == "__main__":
    save_file(record(), FILE)
