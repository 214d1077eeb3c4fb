"""FSDP2 of torch before 2.13, made to shard weights that are bytes, as a quantized base has them. See DECISIONS 4."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

_torchs_own = FSDPParam.init_dtype_attrs


def let_bytes_be_sharded() -> None:
    """Change FSDP2 in the two places where it takes every weight for a floating-point number. Newer torch asks."""
    if torch.__version__ < "2.13":
        _fsdp_param.nn = SimpleNamespace(Parameter=_parameter, Module=nn.Module)  # type: ignore[assignment]
        FSDPParam.init_dtype_attrs = _init_dtype_attrs  # type: ignore[assignment]


def _parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """A shard. Each is first made with a gradient, which bytes cannot have."""
    return nn.Parameter(data, requires_grad and data.is_floating_point())


def _init_dtype_attrs(shard: FSDPParam, policy: MixedPrecisionPolicy) -> None:
    """Keep bytes from being converted to the compute type, value by value."""
    _torchs_own(shard, policy if shard.sharded_param.is_floating_point() else MixedPrecisionPolicy())
