"""Builds a run's model and encoders on meta, injects adapters, shards, then loads the weights slice by slice.

See DECISIONS 20, 36.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from trainer import adapters
from trainer.adapters import Injected
from trainer.adapters.state import Factors
from trainer.config.recompute import modes_of
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.distributed.world import World
from trainer.metrics.memory import full_bytes
from trainer.models.base import LoadModule, ModelFamily, TextFamily
from trainer.models.parts.language.neftune import add_noise
from trainer.models.pissa import (
    DOWN,
    parameters_of_factors,
    residual_files,
    start_factors,
    starts_from_singular_values,
)
from trainer.models.saved_modules import is_inside, saved_names
from trainer.models.sharding import check_sharding
from trainer.models.state_dict import BaseWeights
from trainer.parallel.fsdp_rules import Entry, entries
from trainer.parallel.load import Coded, Loading, check_same_weights, fill_rows, load_weights
from trainer.parallel.mesh import device_mesh, resolve_strategy
from trainer.parallel.offload import OffloadedBlocks, frozen_slots, has_frozen
from trainer.parallel.offload_order import offloaded_blocks
from trainer.parallel.parallelize import COMPUTE_DTYPE, blocks_of, offload_policy, parallelize, shard_units
from trainer.parallel.quantized_cache import QuantizedCache
from trainer.parallel.strategy import TRAINED_BYTES, Strategy
from trainer.system.amounts import memory_size
from trainer.system.errors import InputError
from trainer.system.pinned import pin
from trainer.weights.files import WeightFiles, give_storage, set_buffers
from trainer.weights.quantization import FORMATS, VERSION, Format, decoding_note, quantize_layers, quantized_layers
from trainer.weights.quantized_experts import (
    encode_experts,
    fused_experts,
    is_quantizable,
    quantize_experts,
    quantized_experts,
)


@dataclass(frozen=True)
class Listener:
    """Callbacks for the progress of loading a model.

    Attributes:
        read: read(bytes read, bytes to read) by this rank.
        note: note(sentence).
        warn: warn(sentence).
    """

    read: Callable[[int, int], None] = lambda done, total: None
    note: Callable[[str], None] = lambda sentence: None
    warn: Callable[[str], None] = lambda sentence: None


@dataclass(frozen=True)
class LoadedModel:
    """The sharded model with its weights.

    Attributes:
        module: The live components by name.
        trainables: Parameters that are trained, by name, in model order.
        bytes_read: Bytes read on this rank.
        adapter: The injected adapter's layers and parameters.
        offloaded: The blocks whose frozen weights are in host memory, if there are any.
    """

    module: nn.ModuleDict
    strategy: Strategy
    mesh: DeviceMesh | None
    trainables: dict[str, nn.Parameter]
    bytes_read: int
    adapter: Injected
    offloaded: OffloadedBlocks | None


@dataclass(frozen=True)
class BuiltModel:
    """The live components on the meta device, with the adapter injected.

    Attributes:
        module: The live components by name.
        adapter: The injected adapter's layers and parameters.
        notes: Sentences for the log.
    """

    module: nn.ModuleDict
    adapter: Injected
    notes: tuple[str, ...] = ()

    @property
    def trainables(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}


def build_model(cfg: RunConfig, family: ModelFamily) -> BuiltModel:
    """Build -> quantize -> inject, without a byte of weights.

    The base is in eval mode from here on, in training too: whatever its architecture draws from torch's own generator
    (dropout, LayerDrop, jitter of a router) would depend on rank and pass, and differ in a recompute. The adapter's
    layers, `SampleDropout` among them, are in training mode.

    Raises InputError for an adapter that does not fit the model, patterns that match no layer, and a network that FSDP2
    cannot shard.
    """
    notes = (*family.notes, *check_sharding(cfg, family)) if isinstance(family, TextFamily) else ()
    model = nn.ModuleDict({name: family.build(name) for name in family.live})
    _freeze_base(model, cfg, family)
    if cfg.quantize.format != "none":
        formats = _stored_formats(model, cfg, family)
        # Quantized before the adapter is injected, so that an adapter's layer finds the layer of bytes as its base.
        # Experts that share one tensor are no `nn.Linear`, and have a module of their own.
        experts = {name for name in formats if is_quantizable(model.get_submodule(name))}
        for name in experts:
            quantize_experts(model.get_submodule(name), formats[name])
        quantize_layers(model, {name: format for name, format in formats.items() if name not in experts})
        notes += _whole_experts(model)
    model.eval()
    built = BuiltModel(model, _inject_adapter(model, cfg, family), notes)
    for name, why in family.must_train.items():
        if name not in built.trainables:
            raise InputError(
                f"adapter.modules_to_save: {name.removesuffix('.weight')} must be trained, as {why}; name it here"
            )
    wanted = cfg.parallel.offload_blocks
    if not isinstance(wanted, str) and wanted and not blocks_to_offload(model, cfg, family):
        raise InputError(
            f"parallel.offload_blocks: {wanted} is for blocks with frozen weights, but none has any; train less "
            "(model.train), or set 0"
        )
    if cfg.train.neftune_alpha:
        assert isinstance(family, TextFamily)
        add_noise(family.embedding(model), cfg.train.neftune_alpha)
    return built


def load_model(
    built: BuiltModel,
    cfg: RunConfig,
    family: ModelFamily,
    world: World,
    cache: Path | None = None,
    listener: Listener | None = None,
    initial: Path | None = None,
) -> LoadedModel:
    """Checkpointing -> compile -> shard -> load -> initialise adapters. Collective.

    Each live component is sharded by itself, with a root of its own.

    Args:
        built: The model on meta.
        cfg: The config.
        family: The model family.
        world: The ranks.
        cache: Folder shared by runs.
        listener: Takes progress and messages.
        initial: The file with what `adapter.init: pissa` starts from, which is written if it is missing.
    """
    model, injected = built.module, built.adapter
    state_bytes = full_bytes(p for p in model.parameters() if not p.requires_grad)
    state_bytes += TRAINED_BYTES * sum(p.numel() for p in built.trainables.values())
    strategy = resolve_strategy(cfg.parallel, world, state_bytes, min(world.gather(world.memory)))
    mesh = device_mesh(cfg.parallel, world, strategy)
    shard_model(model, cfg, family, strategy, mesh)
    chosen = blocks_to_offload(model, cfg, family)
    materialize(model, cfg, world.device, chosen)
    listener = listener or Listener()
    factors: Factors = {}
    if starts_from_singular_values(cfg):
        ranks = {name: injected.parameters[f"{name}.{DOWN}"][0] for name in injected.layers}
        factors = start_factors(cfg, BaseWeights(family), ranks, world, initial, listener.note)
    # The cache would be of the whole base.
    loader = Loader(cfg, world, None if factors else cache, listener)
    bytes_read = 0
    for name in model:
        stored = family.weights(name)
        stored = residual_files(stored, name, factors, cfg) if factors else stored
        prefix = f"{name}."
        added = {full.removeprefix(prefix) for full in injected.parameters if full.startswith(prefix)}
        bytes_read += loader.load(model[name], stored, added)
    for name, module in model.items():
        set_buffers(module, {key: value.to(world.device) for key, value in family.computed_buffers(name).items()})
    offloaded = offload(model, chosen, family, world.device)
    if offloaded:
        size = memory_size(offloaded.num_bytes)
        listener.note(f"the frozen weights of {len(chosen)} blocks are in host memory, {size} on this rank")
    formats = {layer.format.name for layer in quantized_layers(model).values()}
    formats |= {experts.format.name for experts in quantized_experts(model).values()}
    slower = decoding_note(formats, COMPUTE_DTYPE[cfg.train.precision], world.device)
    if slower:
        listener.note(slower)
    parameters, values = dict(model.named_parameters()), parameters_of_factors(factors)
    with torch.no_grad():
        for name in injected.parameters:
            drawn = adapters.initial_value(name, parameters[name].shape, cfg.train.seed)
            fill_rows(parameters[name], values.get(name, drawn))
    return LoadedModel(model, strategy, mesh, built.trainables, bytes_read, injected, offloaded)


def shard_model(
    model: nn.ModuleDict, cfg: RunConfig, family: ModelFamily, strategy: Strategy, mesh: DeviceMesh | None
) -> None:
    """Checkpointing -> compile -> shard each live component, on the meta device. Without a mesh nothing is sharded."""
    if cfg.train.compile is True:
        adapters.add_apart(model)
    blocks = {name: len(blocks_of(module, family.shard.blocks)) for name, module in model.items()}
    modes, lean = iter(modes_of(cfg.train.checkpointing, sum(blocks.values()))), adapters.saves_no_activations(model)
    for name, module in model.items():
        is_encoder = name != family.components[0]
        spec = replace(family.shard, methods=(), has_hooked_states=True) if is_encoder else family.shard
        recompute = list(islice(modes, blocks[name]))
        parallelize(module, spec, cfg.train, cfg.parallel, strategy, mesh, recompute, lean)


def blocks_to_offload(model: nn.ModuleDict, cfg: RunConfig, family: ModelFamily) -> list[nn.Module]:
    """Return the blocks that `parallel.offload_blocks` chooses, of all live components."""
    if cfg.parallel.cpu_offload:
        return []
    blocks = [block for module in model.values() for block in blocks_of(module, family.shard.blocks)]
    blocks = [block for block in blocks if has_frozen(block)]
    return [blocks[number] for number in offloaded_blocks(cfg.parallel.offload_blocks, len(blocks))]


def offload(
    model: nn.ModuleDict, chosen: Sequence[nn.Module], family: ModelFamily, device: torch.device
) -> OffloadedBlocks | None:
    """Offload the frozen weights of the chosen blocks of a loaded model. Returns None without such blocks."""
    if not chosen:
        return None
    found: list[Entry] = []
    units: list[nn.Module] = []
    for name, module in model.items():
        blocks = blocks_of(module, family.shard.blocks)
        found += entries(module, blocks, family.shard.methods if name == family.components[0] else ())
        units += blocks
    return OffloadedBlocks(model, units, chosen, found, device, partial(pin, device=device))


def encoder_loader(
    cfg: RunConfig, world: World, cache: Path | None = None, listener: Listener | None = None
) -> LoadModule:
    """Return the function that families load their encoders with: frozen, in the run's compute type, sharded over all
    ranks if they have blocks.

    A module without block names is replicated and fp32: it is small, and bf16 in an autoencoder is visible in images.
    With `quantize.encoders` the linear layers of the blocks are stored in `quantize.format`.
    """
    loader = Loader(cfg, world, cache, listener or Listener())

    def load(module: nn.Module, files: WeightFiles, blocks: Sequence[str]) -> nn.Module:
        prepare_encoder(module, cfg, blocks)
        is_sharded = blocks and (world.size > 1 or cfg.parallel.cpu_offload)
        mesh = device_mesh(cfg.parallel, world, "full") if is_sharded else None
        place_encoder(module, cfg, blocks, mesh, world.device)
        loader.load(module, files)
        return module

    return load


def prepare_encoder(module: nn.Module, cfg: RunConfig, blocks: Sequence[str]) -> None:
    """Freeze -> quantize an encoder on the meta device. blocks: as for `encoder_loader`."""
    format = FORMATS.get(cfg.quantize.format) if cfg.quantize.encoders else None
    module.requires_grad_(False).eval()
    if blocks:
        module.to(COMPUTE_DTYPE[cfg.train.precision])
    if blocks and format:
        quantize_layers(module, dict.fromkeys(block_layers(module, blocks), format))


def place_encoder(
    module: nn.Module, cfg: RunConfig, blocks: Sequence[str], mesh: DeviceMesh | None, device: torch.device
) -> None:
    """Shard a prepared encoder and give it storage, uninitialized. Without a mesh it is not sharded."""
    if mesh is None:
        give_storage(module, device)
        return
    shard_units(module, blocks_of(module, blocks), mesh, True, torch.float32, offload_policy(cfg.parallel))
    materialize(module, cfg, device)


def materialize(module: nn.Module, cfg: RunConfig, device: torch.device, offloaded: Sequence[nn.Module] = ()) -> None:
    """Give a meta module uninitialized storage: parameters on the host if they are offloaded, buffers never.

    Args:
        offloaded: Blocks whose frozen weights are offloaded.
    """
    on_host = [parameter for slots in frozen_slots(module, offloaded) for parameter in slots]
    give_storage(module, torch.device("cpu") if cfg.parallel.cpu_offload else device, on_host)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, because weights were changed outside of forward and backward."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def sync_gradients(model: nn.ModuleDict, last: bool, shards_gradients: bool) -> None:
    """Prepare the next backward of a step: gradients accumulate, and the last backward reduces them over the ranks.

    Args:
        model: The live components.
        last: Whether it is the last backward of the step.
        shards_gradients: Reduce the gradients to shards in each backward, and accumulate only the shards.
    """
    for component in model.values():
        if isinstance(component, FSDPModule):
            component.set_requires_gradient_sync(last or shards_gradients)
            component.set_requires_all_reduce(last)
            # A frozen unit has nothing to accumulate, and torch cannot read the state of one that no input reached
            # (blocks for reference images).
            for unit in component.modules():
                if isinstance(unit, FSDPModule) and not any(p.requires_grad for p in unit.parameters()):
                    unit.set_requires_gradient_sync(True, recurse=False)


def _freeze_base(model: nn.ModuleDict, cfg: RunConfig, family: ModelFamily) -> None:
    """Unfreeze or freeze each component; frozen parameters get the run's compute type."""
    dtype = COMPUTE_DTYPE[cfg.train.precision]
    saved = saved_names(model, cfg, family)
    whole = {name for name, _ in model.named_modules() if family.mode(cfg, name) == "full" or is_inside(name, saved)}
    # A tied weight is trained if one of its modules is.
    trained = {id(p) for name in whole for p in model.get_submodule(name).parameters(recurse=False)}

    def stored(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and id(tensor) not in trained else tensor

    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(id(parameter) in trained)
        if name not in whole:
            # Not `to`: the method of diffusers warns of an empty list of modules to keep in fp32.
            module._apply(stored, recurse=False)
    for part in model.values():
        for name, parameter in part.named_parameters():
            if any(re.fullmatch(pattern, name) for pattern in family.never_trained):
                parameter.requires_grad_(False)


def _whole_experts(model: nn.Module) -> tuple[str, ...]:
    """Say which experts could not become bytes."""
    modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in fused_experts(model)}
    whole = {name: module for name, module in modules.items() if not is_quantizable(module)}
    if not whole:
        return ()
    name, module = next(iter(whole.items()))
    return (
        f"{len(whole)} weights of fused experts are not stored in fewer bits, as '{name}': a {type(module).__name__} "
        "computes with whole weights",
    )


def _stored_formats(model: nn.ModuleDict, cfg: RunConfig, family: ModelFamily) -> dict[str, Format]:
    """{layer: format} of the frozen layers that are quantized, fused experts among them.

    These are the experts and the linear layers of the sharded blocks that the family recommends to adapters, which
    excludes norms and modulation, and the layers that `quantize.formats` names.
    """
    quantize = cfg.quantize
    saved = saved_names(model, cfg, family)

    def frozen(kind: Callable[[nn.Module], bool]) -> list[str]:
        names = block_layers(model, family.blocks, kind)
        return [name for name in names if family.mode(cfg, name) != "full" and not is_inside(name, saved)]

    linear, experts = frozen(adapters.is_linear), frozen(is_quantizable)
    formats = dict.fromkeys([*filter(family.is_target, linear), *experts], quantize.format)
    layers = linear + experts
    for pattern, format in quantize.formats.items():
        named = adapters.match_names(layers, (pattern,), "quantize.formats", cfg.model.family)
        formats |= dict.fromkeys(named, format)
    kept = adapters.match_names(layers, quantize.keep, "quantize.keep", cfg.model.family)
    stored = {name: FORMATS[format] for name, format in formats.items() if format != "none" and name not in kept}
    if not stored and not quantize.encoders:
        raise InputError(
            f"quantize.format: {quantize.format} is for frozen layers, but none is left to store; "
            "train less (model.train), keep less (quantize.keep), or set none"
        )
    return stored


def block_layers(
    module: nn.Module, blocks: Sequence[str], kind: Callable[[nn.Module], bool] = adapters.is_linear
) -> list[str]:
    """Names of the layers of a kind inside the sharded blocks, in model order."""
    inside = {id(layer) for block in blocks_of(module, blocks) for layer in block.modules()}
    return [name for name, layer in module.named_modules() if id(layer) in inside and kind(layer)]


def _inject_adapter(model: nn.ModuleDict, cfg: RunConfig, family: ModelFamily) -> Injected:
    if isinstance(cfg.adapter, NoAdapter):
        return Injected((), {}, ())
    changed = nn.ModuleDict({name: module for name, module in model.items() if "adapter" in family.modes(cfg, name)})
    others = [pattern for part, patterns in family.parts.items() if cfg.mode(part) != "adapter" for pattern in patterns]
    others += [re.escape(name.partition(".")[2]) for name in saved_names(changed, cfg, family)]
    targets = adapters.Targets(
        family.adapter_targets, family.conv_targets, family.halves_swapped, family.never_trained, others
    )
    trained = [parameter for parameter in changed.parameters() if parameter.requires_grad]
    injected = adapters.inject(changed, cfg.adapter, targets, cfg.model.family)
    for parameter in trained:  # of parts and modules that are trained whole
        parameter.requires_grad_(True)
    return injected


class Loader:
    """Fills modules from their files, or from the cache of the quantized base, `base` in the folder shared by runs.

    If machines have separate folders, this cache is not used: no folder would hold all rows.
    """

    def __init__(self, cfg: RunConfig, world: World, cache: Path | None, listener: Listener) -> None:
        threads = max(1, (os.cpu_count() or 1) // world.local_size)
        self._loading = Loading(world.device, threads, listener.read)
        self._world, self._warn = world, listener.warn
        is_kept = cfg.quantize.cache and not world.remote_ranks
        self._cache = QuantizedCache(cache / "base", world) if cache and is_kept else None

    def load(self, module: nn.Module, files: WeightFiles, added: Iterable[str] = ()) -> int:
        """Load a module. Returns the bytes read on this rank. added: parameters that no file holds. Collective."""
        coded = _coded(module)
        cached = self._cache.find(files, coded) if self._cache and coded else None
        if cached:
            num_bytes = load_weights(module, WeightFiles({**files.entries, **cached.entries}), added, {}, self._loading)
        else:
            num_bytes = load_weights(module, files, added, coded, self._loading)
        if cached or self._world.size > 1:
            check_same_weights(module, files, added, coded, self._world)
        if self._cache and coded and not cached:
            failed = self._cache.keep(module, files, coded)
            if failed:
                self._warn(f"quantize.cache: the base could not be kept ({failed}); the next run converts it again")
        return num_bytes


def _coded(module: nn.Module) -> dict[str, Coded]:
    """How the bytes of quantized layers are made from stored weights, by name without the part that adapters add."""
    coded = {}
    for name, layer in quantized_layers(module).items():
        stored = name.removesuffix(".base_layer")
        shape = (layer.out_features, layer.in_features)
        coded[f"{stored}.qweight"] = Coded(
            f"{stored}.weight", shape, f"{layer.format.name} {VERSION}", layer.format.encode
        )
    for name, experts in quantized_experts(module).items():
        encode = partial(encode_experts, experts.format)
        for weight, whole in experts.shapes.items():
            coded[f"{name}.{weight}_records"] = Coded(
                f"{name}.{weight}", whole, f"{experts.format.name} {VERSION}", encode
            )
    return coded
