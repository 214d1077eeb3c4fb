"""PiSSA: a lora that starts from the principal singular values of each layer (arXiv 2404.02948).

The factors A0, B0 of a layer W are sqrt(S) V^T and U sqrt(S) of its largest singular values, divided by the scale s of
the update; the frozen base holds the residual W - s B0 A0. The residual is taken before the base is quantized (QPiSSA).
An export is an ordinary lora of W with twice the rank: s ((B - B0) A + B0 (A - A0)).

The factors are computed once per run, each layer by one rank, and kept in the run's folder: a resumed run subtracts the
same numbers. See DECISIONS 165.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.adapters import lora
from trainer.adapters.layer import LayerAdapter
from trainer.adapters.state import Factors
from trainer.config.schema import RunConfig
from trainer.config.sections import RankAdapter
from trainer.distributed.world import World
from trainer.models.state_dict import BaseWeights
from trainer.run import manifest
from trainer.run.folder import INITIAL_ADAPTER, RunDir
from trainer.system import files
from trainer.system.errors import InputError
from trainer.weights.files import WeightFiles
from trainer.weights.tensors import ReducedEntry

DOWN, UP = (lora.KIND.parameters[name] for name in ("down", "up"))
SUM = "checksum"
"""Key of the checksum in the file's metadata."""
HOLDS = "it holds what adapter.init: pissa subtracted from the base. Copy it back, or start a new run"


def initial_file(run: RunDir) -> Path:
    """Return the file with the factors that a run, or its current stage, started from."""
    return run.checkpoints.parent / INITIAL_ADAPTER


def starts_from_singular_values(cfg: RunConfig) -> bool:
    return cfg.adapter.takes_from_base


def read_factors(cfg: RunConfig, file: Path) -> Factors | None:
    """Return the factors that a run started from; None for a run without PiSSA.

    Raises:
        InputError: They are gone or damaged.
    """
    if not starts_from_singular_values(cfg):
        return None
    if not file.is_file():
        raise InputError(f"{file}: missing; {HOLDS}")
    try:
        with safe_open(file, framework="pt") as stored:
            expected = (stored.metadata() or {}).get(SUM)
            weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118, not a mapping
    except SafetensorError as error:
        raise InputError(f"{file}: damaged; {HOLDS}") from error
    if expected != _sum_of(weights):
        raise InputError(f"{file}: has changed since it was written: its checksum differs; {HOLDS}")
    return factors_of(weights)


def write_factors(factors: Factors, file: Path) -> None:
    """Keep the factors that a run starts from, with a checksum."""
    weights = {name: tensor.contiguous() for name, tensor in parameters_of_factors(factors).items()}
    draft = file.with_name(f".{file.name}")
    save_file(weights, draft, {SUM: _sum_of(weights)})
    files.rename(draft, file)


def _sum_of(weights: Mapping[str, Tensor]) -> str:
    """The checksum of parameters on the CPU: of their names, shapes and bytes."""
    found = manifest.checksum()
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.view(torch.uint8).numpy().data)
    return found.hexdigest()


def factors_of(weights: Mapping[str, Tensor]) -> Factors:
    """Return {layer: (down, up)} of the parameters of a lora."""
    layers = [name.removesuffix(f".{DOWN}") for name in weights if name.endswith(f".{DOWN}")]
    return {layer: (weights[f"{layer}.{DOWN}"], weights[f"{layer}.{UP}"]) for layer in layers}


def parameters_of_factors(factors: Factors) -> dict[str, Tensor]:
    """Return {parameter: value}; the reverse of `factors_of`."""
    return {
        name: tensor
        for layer, (down, up) in factors.items()
        for name, tensor in ((f"{layer}.{DOWN}", down), (f"{layer}.{UP}", up))
    }


def start_factors(
    cfg: RunConfig,
    base: BaseWeights,
    ranks: Mapping[str, int],
    world: World,
    file: Path | None,
    note: Callable[[str], None],
) -> Factors:
    """Compute the factors of all layers, or read those that the run started from. Collective.

    Args:
        cfg: The run's config.
        base: The tensors of the base.
        ranks: {layer: its rank}.
        world: The ranks of the run. Each computes some of the layers.
        file: Where the factors are kept, on rank 0; None keeps them nowhere.
        note: Takes a sentence for the log.

    Returns:
        {layer: (down, up)}, fp32, on the CPU.

    Raises:
        InputError: The run has checkpoints, but its factors are gone; or they are damaged.
    """
    kept = file is not None and world.rank == 0 and file.is_file()
    is_resumed = file is not None and world.rank == 0 and bool(manifest.complete(file.parent / "checkpoints"))
    if world.gather(kept or is_resumed)[0]:
        return _read_by_all(cfg, world, file)
    assert isinstance(cfg.adapter, RankAdapter)
    began, layers = time.perf_counter(), list(ranks)
    found: Factors = {}
    # Each layer is decomposed by one rank, and all ranks need all factors.
    for first in range(0, len(layers), world.size):
        mine = layers[first + world.rank : first + world.rank + 1]
        factors = {
            name: principal_factors(base.layer(name).to(world.device), ranks[name], cfg.adapter.scale_at(ranks[name]))
            for name in mine
        }
        for of_rank in world.gather(factors):
            found |= of_rank
    if file is not None and world.rank == 0:
        write_factors(found, file)
    note(f"adapter.init: singular values of {len(layers)} layers in {time.perf_counter() - began:.0f} s")
    return found


def principal_factors(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return (down, up) of the largest singular values of a weight, on the CPU. Source: arXiv 2404.02948, sec. 3.

    Args:
        weight: (out, in).
        rank: Number of singular values.
        scale: Factor of the adapter's update: scale * up @ down is the principal part of the weight.
    """
    left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
    roots = (values[:rank] / scale).sqrt()
    return (roots[:, None] * right[:rank]).cpu(), (left[:, :rank] * roots).cpu()


def residual_files(stored: WeightFiles, component: str, factors: Factors, cfg: RunConfig) -> WeightFiles:
    """Return the files with the residuals of a component's layers in place of their weights."""
    assert isinstance(cfg.adapter, RankAdapter)
    reduced = {}
    for layer, (down, up) in factors.items():
        owner, _, inside = layer.partition(".")
        if owner == component:
            entry = stored.entries[f"{inside}.weight"]
            scaled = up * cfg.adapter.scale_at(down.shape[0])
            reduced[f"{inside}.weight"] = ReducedEntry(
                entry.file, entry.key, entry.shape, entry.dtype, stored=entry, down=down, up=scaled
            )
    return WeightFiles({**stored.entries, **reduced})


def trained_factors(layer: LayerAdapter) -> LayerAdapter:
    """Return what was trained of an exported layer, without what it started from."""
    down, up = layer.tensors["down"], layer.tensors["up"]
    rank = down.shape[0] // 2
    return replace(layer, tensors={"down": down[:rank], "up": up[:, :rank] + up[:, rank:]})


def _read_by_all(cfg: RunConfig, world: World, file: Path | None) -> Factors:
    problem, factors = "", None
    if world.rank == 0 and file is not None:
        try:
            factors = read_factors(cfg, file)
        except InputError as error:
            problem = str(error)
    problem, found = world.gather((problem, factors))[0]
    if problem:
        raise InputError(problem)
    assert found is not None
    return dict(found)
