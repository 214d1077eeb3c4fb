"""Whether FSDP2 can shard a network that a user's config names, found out before anything is read or encoded."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.models.base import TextFamily
from trainer.parallel.fsdp_rules import weight_problems
from trainer.parallel.parallelize import blocks_of
from trainer.rng import SampleRng
from trainer.system.errors import InputError

log = logging.getLogger(__name__)
ALONE = "train it on one device (parallel.devices: 1, parallel.strategy: none) without parallel.cpu_offload"
LENGTH = 8
"""Tokens of the row that is looked at."""


def check_sharding(cfg: RunConfig, family: TextFamily) -> tuple[str, ...]:
    """Find blocks that FSDP2 can shard one by one, where the run shards the model.

    Blocks that a model declares are not always such: then the most of them are taken, or none. Blocks that the user
    names are not changed.

    One forward pass of a bf16 copy on the meta device is watched, in every process: 0.3 to 0.6 s for 32 blocks, too
    little for a cache. Our own networks are watched by the tests.

    Returns:
        Sentences for the log about blocks that the model does not declare.

    Raises:
        InputError: FSDP2 cannot follow how the model uses its weights.

    See DECISIONS 19.
    """
    parallel = cfg.parallel
    is_whole = parallel.world_size == 1 and parallel.strategy in ("none", "auto") and not parallel.cpu_offload
    if is_whole or not family.any_network:
        return ()
    name = family.components[0]
    problems = _problems(family, family.shard.blocks)
    if not problems:
        return ()
    kind, others = type(family.build(name)).__name__, _other_blocks(family)
    # Blocks that the model declares may be replaced; those that the user names are refused, with ones that fit.
    if cfg.model.options.blocks is None and others is not None:
        family.shard_by(others)
        how = f"by its {', '.join(others)}" if others else "as one unit, which every rank gathers whole in each pass"
        return (f"the {kind} is sharded {how}, because {problems[0].partition('; ')[0]}",)
    named = f"set model.options.blocks: {', '.join(others)}, or {ALONE}" if others else ALONE
    raise InputError(
        f"model.path {family.folder}: FSDP2 cannot shard a {kind}: {problems[0].partition('; ')[0]}; {named}"
    )


def _problems(family: TextFamily, blocks: Sequence[str]) -> list[str]:
    """Sentences about what FSDP2 cannot follow. Empty where the forward pass needs values, which meta tensors lack."""
    name = family.components[0]
    # In bf16: grouped matrix products of experts have no other type on the meta device.
    network = nn.ModuleDict({name: family.build(name)}).to(torch.bfloat16).eval()
    row = family.collate([family.blank_row(LENGTH)]) | {"weight": torch.ones(1)}
    batch = {key: tensor.to("meta") for key, tensor in row.items()}
    try:
        units = blocks_of(network[name], blocks)
        return weight_problems(network[name], units, lambda: family.loss(network, batch, SampleRng(0, [0])))
    except (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError) as error:
        log.info(
            f"{type(network[name]).__name__} was not checked for sharding: without values it does not run: {error}"
        )
        return []


def _other_blocks(family: TextFamily) -> tuple[str, ...] | None:
    """Most of the blocks with which FSDP2 can follow the model; None where it cannot even without blocks."""
    blocks = family.shard.blocks
    for count in range(len(blocks) - 1, -1, -1):
        for rest in itertools.combinations(blocks, count):
            if not _problems(family, rest):
                return rest
    return None
