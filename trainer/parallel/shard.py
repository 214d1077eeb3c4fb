"""Wrap a model: activation checkpointing, then compile, then `fully_shard` block by block, then the root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from trainer.config import ParallelConfig, TrainConfig
from trainer.parallel.mesh import Strategy

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def blocks_of(model: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """The modules of the named classes, in the order they are defined, which is the order they run in."""
    return [module for module in model.modules() if type(module).__name__ in class_names]


def parallelize(
    model: nn.Module,
    train: TrainConfig,
    parallel: ParallelConfig,
    strategy: Strategy,
    mesh: DeviceMesh | None,
    blocks: Sequence[str],
    methods: Sequence[str] = (),
) -> nn.Module:
    """The model, ready to be materialized and loaded; changed in place.

    blocks: class names of the modules that are sharded one by one.  methods: entry points besides `forward`.
    Without a mesh nothing is sharded.
    """
    units = blocks_of(model, blocks)
    dtype = COMPUTE_DTYPE[train.precision]
    if mesh is None and dtype != torch.float32:
        _compute_in(model, units, dtype)
    _checkpoint_activations(units, train)
    if train.compile:
        for unit in units:
            unit.compile(backend=train.compile_backend)
    if mesh is None:
        return model
    offload = offload_policy(parallel)
    shard_units(model, units, mesh, reshard_after_forward(parallel, strategy), dtype, offload)
    prefetch(units, parallel.prefetch_forward, parallel.prefetch_backward)
    for method in methods:
        register_fsdp_forward_method(model, method)
    return model


def shard_units(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    reshard: bool | int,
    dtype: torch.dtype,
    offload: OffloadPolicy,
) -> None:
    """`fully_shard` each unit, then the root with what remains.

    Blocks do not cast their inputs: rotary embeddings stay fp32, as in diffusers. The root casts what the caller
    gives it. Gradients are reduced in fp32 whatever the compute type.
    """
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    inner = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
    for unit in (*units, model):
        unit.register_forward_hook(_own_storage)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=inner, offload_policy=offload)
    # Backward begins with the root: freed after forward, it would be gathered again at once.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)


def _own_storage(unit: nn.Module, arguments: Any, output: Any) -> Any:
    """FSDP2's backward hooks are lost when a view that has one is changed in place: no unit returns a view."""
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor._is_view() else tensor, output)


def offload_policy(parallel: ParallelConfig) -> OffloadPolicy:
    """Where shards live between uses. Pinned host memory needs an accelerator; without one torch refuses it."""
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if parallel.cpu_offload else OffloadPolicy()


def reshard_after_forward(parallel: ParallelConfig, strategy: Strategy) -> bool | int:
    """What `fully_shard` is told: the config's value, else what the strategy means."""
    if parallel.reshard_after_forward is not None:
        return parallel.reshard_after_forward
    return strategy in ("full", "hybrid")


def prefetch(units: Sequence[nn.Module], forward: int, backward: int) -> None:
    """Gather `forward` blocks ahead in forward and `backward` in backward; 0 leaves torch's own order."""
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for i, unit in enumerate(sharded):
        if forward:
            unit.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + forward])
        if backward:
            unit.set_modules_to_backward_prefetch(sharded[max(0, i - backward) : i][::-1])


def _checkpoint_activations(units: Sequence[nn.Module], train: TrainConfig) -> None:
    """Recompute every n-th block in backward. Inside the sharded unit, so that a recompute gathers nothing again."""
    if train.checkpointing == "none":
        return
    every = 1 if train.checkpointing == "full" else train.checkpointing
    for unit in units[::every]:
        unit.forward = _recomputed(unit.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # No dropout draws from torch's own generator here (see trainer.adapters), so its state need not be kept.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _compute_in(model: nn.Module, units: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """What FSDP's mixed precision does, without FSDP: each unit runs on copies of its fp32 masters in `dtype`.

    The root casts what the caller gives it. Every strategy thus rounds alike, and activations are `dtype` throughout:
    autocast would keep norms and adapter inputs in fp32 besides.
    """
    inside = {id(module) for unit in units for module in unit.modules()}
    for unit in units:
        unit.forward = _on_copies(unit.forward, list(unit.modules()), dtype)
    rest = [module for module in model.modules() if id(module) not in inside]
    forward = _on_copies(model.forward, rest, dtype)

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*(_cast(arg, dtype) for arg in args), **{key: _cast(v, dtype) for key, v in kwargs.items()})

    model.forward = run


def _on_copies(forward: Callable[..., Any], modules: Sequence[nn.Module], dtype: torch.dtype) -> Callable[..., Any]:
    """`forward` while the modules' trained parameters are replaced by copies, through which gradients flow back."""
    # By place: the parameters themselves are replaced when the model leaves the meta device.
    places = [
        (m._parameters, name) for m in modules for name, p in m._parameters.items() if p is not None and p.requires_grad
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        masters = [parameters[name] for parameters, name in places]
        for (parameters, name), master in zip(places, masters, strict=True):
            parameters[name] = master.to(dtype)  # type: ignore[assignment, union-attr]
        try:
            return forward(*args, **kwargs)
        finally:
            for (parameters, name), master in zip(places, masters, strict=True):
                parameters[name] = master

    return run


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
