"""Shard a model: activation checkpointing, then compile, then `fully_shard` block by block, then the root."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from trainer.config.recompute import Recompute, modes_of
from trainer.config.sections import ParallelConfig, TrainConfig
from trainer.parallel.compile import compile_blocks, for_class
from trainer.parallel.fsdp_rules import entries
from trainer.parallel.older_fsdp import let_bytes_be_sharded
from trainer.parallel.recompute import recompute_all, recompute_cheap
from trainer.parallel.strategy import (
    Strategy,
    has_few_parameters,
    reshard_after_forward,
    shard_ranks,
    stays_gathered,
)

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def blocks_of(model: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """The modules of the named classes, in the order of definition, which is the order they run in.

    `fully_shard` puts FSDP before the name of a module's class.
    """
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in class_names]


@dataclass(frozen=True)
class ShardSpec:
    """How the models of a family are sharded.

    Attributes:
        blocks: Class names of the modules that are sharded one by one, in all components.
        methods: Entry points other than `forward`: of the denoiser, for example `encode`, and of its blocks, for
            example `Layer.encode`. Never one that `forward` calls.
        fp32_inputs: Arguments of the denoiser's `forward` that must not be rounded to bf16, for example a timestep
            whose sines the model computes in fp32.
        returns_views: Class names of blocks and components in third-party code whose `forward` returns a view. FSDP2
            cannot follow a view that is changed in place, and gets a copy.
        has_hooked_states: Whether hooks on blocks take what a component computes, as of text encoders. A gradient that
            does not come through what its `forward` returns is noticed by the group of a block only.
    """

    blocks: tuple[str, ...]
    methods: tuple[str, ...] = ()
    fp32_inputs: frozenset[str] = frozenset()
    returns_views: tuple[str, ...] = ()
    has_hooked_states: bool = False


def parallelize(
    model: nn.Module,
    spec: ShardSpec,
    train: TrainConfig,
    parallel: ParallelConfig,
    strategy: Strategy,
    mesh: DeviceMesh | None,
    recompute: Sequence[Recompute] | None = None,
    inputs_only: Collection[nn.Module] = (),
) -> nn.Module:
    """Make a model on the meta device ready to be materialized and loaded, in place.

    Floating arguments of `forward` are cast to the compute type, except `spec.fp32_inputs`.

    Args:
        mesh: None shards nothing.
        recompute: What backward computes again in each block. None: as `train.checkpointing` says of these blocks.
        inputs_only: As in `recompute.recompute_cheap`.

    Raises:
        ValueError: `spec.methods` names a method that `forward` calls.
    """
    units = blocks_of(model, spec.blocks)
    registered = entries(model, units, spec.methods)
    dtype = COMPUTE_DTYPE[train.precision]
    if dtype != torch.float32:
        for method in ("forward", *(name for module, name in registered if module is model)):
            setattr(model, method, _on_cast_inputs(getattr(model, method), dtype, spec.fp32_inputs))
    if mesh is None and dtype != torch.float32:
        _compute_in(model, units, dtype)
    recompute = modes_of(train.checkpointing, len(units)) if recompute is None else recompute
    is_compiled = train.compile is True  # "auto" is decided before a model is built
    checkpoint_activations(units, recompute, inputs_only, is_compiled)
    if is_compiled:
        compile_blocks(units, train.compile_backend)
    for module in (*units, model) if mesh or parallel.offload_blocks else ():
        if type(module).__name__ in spec.returns_views:
            module.register_forward_hook(_own_storage)
    if mesh is None:
        return model
    groups = units
    may_be_one = parallel.nodes == 1 and not parallel.cpu_offload and not spec.has_hooked_states
    if may_be_one and trains_few_parameters(model, mesh, dtype):
        groups = []
        for unit in units:
            unit.forward = for_class(type(unit), _on_own_inputs(unit.forward))
    shard_units(model, groups, mesh, reshard_after_forward(parallel, strategy), dtype, offload_policy(parallel))
    prefetch(groups, parallel.prefetch_forward, parallel.prefetch_backward)
    for module, method in registered:
        register_fsdp_forward_method(module, method)
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

    Units do not cast their inputs: rotary embeddings stay fp32, as in diffusers. Gradients are reduced in fp32
    whatever the compute type.
    """
    compute = None if dtype == torch.float32 else dtype
    let_bytes_be_sharded()
    left = set() if isinstance(offload, CPUOffloadPolicy) else unsharded_weights(model, mesh, dtype)
    common: dict[str, Any] = {"mesh": mesh, "offload_policy": offload, "ignored_params": left}
    common["mp_policy"] = MixedPrecisionPolicy(compute, torch.float32 if compute else None, cast_forward_inputs=False)
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard, **common)
    # Backward begins with the root: freed after forward, it would be gathered again at once.
    fully_shard(model, reshard_after_forward=False, **common)


@contextmanager
def gathered_for_samples(model: nn.Module, parallel: ParallelConfig, strategy: Strategy, ranks: int) -> Iterator[None]:
    """Inside, a small model's blocks stay gathered from their first forward on, as `stays_gathered` says.

    Args:
        model: The live components.
        parallel: The run's section `parallel`.
        strategy: How it is sharded.
        ranks: All ranks of the run.
    """
    reshard = reshard_after_forward(parallel, strategy)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if not stays_gathered(parallel, shard_ranks(parallel, strategy, ranks), reshard, size):
        yield
        return
    components = [component for component in model.children() if isinstance(component, FSDPModule)]
    for component in components:
        component.set_reshard_after_forward(False)
    yield
    for component in components:
        component.set_reshard_after_forward(True)
        component.set_reshard_after_forward(False, recurse=False)  # the root's, as `shard_units` has it


def unsharded_weights(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> set[nn.Parameter]:
    """Return the weights that stay outside of FSDP, because it would copy them twice a step for nothing.

    They are frozen, each rank of the mesh has them unsharded, and they are stored in the type that computes.

    Args:
        model: The model.
        mesh: Its last dim are the ranks that share a copy of the model.
        dtype: The compute type; fp32 casts nothing.

    See DECISIONS 182.
    """
    if mesh.size(mesh.ndim - 1) > 1:
        return set()
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return {p for p in frozen if dtype in (torch.float32, p.dtype) or not p.is_floating_point()}


def trains_few_parameters(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> bool:
    """Whether the ranks share all that a model trains as one group: its frozen weights stay outside of FSDP, and its
    gradients are few.

    A group of each block would reduce while backward goes on, which saves less than its own work in every block costs
    the host: on an H200, eagerly, a step of a LoRA of FLUX.2 klein-4B took 0.276 s with 26 groups, 0.221 s with one and
    0.217 s without any.

    Args:
        model: The model.
        mesh, dtype: As in `unsharded_weights`.

    See DECISIONS 189.
    """
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return has_few_parameters(trained) and bool(unsharded_weights(model, mesh, dtype))


def _own_storage(unit: nn.Module, arguments: Any, output: Any) -> Any:
    """Return copies in place of views: a backward hook on a view, FSDP2's or that of offloaded blocks, is lost when the
    view is changed in place."""
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor._is_view() else tensor, output)


def offload_policy(parallel: ParallelConfig) -> OffloadPolicy:
    """The policy for where shards lie between uses. Pinned host memory needs an accelerator, or torch refuses it."""
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if parallel.cpu_offload else OffloadPolicy()


def prefetch(units: Sequence[nn.Module], forward: int, backward: int) -> None:
    """Gather `forward` blocks ahead in forward and `backward` in backward; 0 leaves torch's own order."""
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for i, unit in enumerate(sharded):
        if forward:
            unit.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + forward])
        if backward:
            unit.set_modules_to_backward_prefetch(sharded[max(0, i - backward) : i][::-1])


def checkpoint_activations(
    units: Sequence[nn.Module], recompute: Sequence[Recompute], inputs_only: Collection[nn.Module], is_compiled: bool
) -> None:
    """Recompute blocks in backward, inside the sharded unit, so that a recompute gathers nothing again.

    Args:
        units: The blocks.
        recompute: The mode of each block.
        inputs_only: As in `recompute.recompute_cheap`.
        is_compiled: Whether torch.compile traces the blocks.

    See DECISIONS 15.
    """
    modes = list(zip(units, recompute, strict=True))
    for unit in (unit for unit, mode in modes if mode == "full"):
        recompute_all(unit)
    recompute_cheap([unit for unit, mode in modes if mode == "selective"], inputs_only, is_compiled)


def _on_cast_inputs(method: Callable[..., Any], dtype: torch.dtype, kept: Collection[str]) -> Callable[..., Any]:
    """Wrap a method: its floating inputs are cast to `dtype`, except those named in `kept`. See DECISIONS 14."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        rest = {name: value for name, value in kwargs.items() if name not in kept}
        return method(*tree_map_only(Tensor, cast, args), **(kwargs | tree_map_only(Tensor, cast, rest)))

    return run


def _compute_in(model: nn.Module, units: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Do mixed precision as FSDP does it, without FSDP: each unit runs on copies of its fp32 masters in `dtype`.

    Every strategy thus rounds alike, and activations are `dtype` throughout: autocast would also keep norms and adapter
    inputs in fp32. See DECISIONS 13.
    """
    inside = {id(module) for unit in units for module in unit.modules()}
    for unit in units:
        unit.forward = for_class(type(unit), _on_copies(unit, list(unit.modules()), dtype))
    rest = [module for module in model.modules() if id(module) not in inside]
    model.forward = _on_copies(model, rest, dtype)


class _Body(nn.Module):
    """A unit's own forward, below the one that replaces it. Hooks of the unit are not called again."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit, self._forward = unit, unit.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _on_copies(unit: nn.Module, modules: Sequence[nn.Module], dtype: torch.dtype) -> Callable[..., Any]:
    """Wrap the unit's forward: the fp32 parameters of `modules`, which are inside it, are replaced by copies, through
    which gradients flow back.

    They are replaced by torch's own means, because torch.compile leaves a recomputed block uncompiled that changes a
    module by itself.
    """
    body = _Body(unit)
    paths = {module: f"{path}." if path else "" for path, module in body.named_modules()}
    # Slots, not parameters: the parameters themselves are replaced when the model leaves the meta device.
    slots = {
        f"{paths[module]}{name}": (module._parameters, name)
        for module in modules
        for name, p in module._parameters.items()
        if p is not None and p.is_floating_point() and p.dtype != dtype
    }

    def run(*args: Any, **kwargs: Any) -> Any:
        copies = {path: parameters[name].to(dtype) for path, (parameters, name) in slots.items()}  # type: ignore[union-attr]
        return functional_call(body, copies, _summed_alone(args), _summed_alone(kwargs), tie_weights=False)

    return run


def _on_own_inputs(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a unit's forward that FSDP does not: its inputs are nodes of their own in the graph, as there."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return method(*_summed_alone(args), **_summed_alone(kwargs))

    return run


def _summed_alone(inputs: Any) -> Any:
    """Make the inputs nodes of their own in the graph.

    The unit's gradients of one input are then summed before others are added, as in FSDP, whose hooks are such nodes.
    In bf16 another order of the sum would round differently.
    """
    return tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor) if tensor.requires_grad else tensor, inputs)
