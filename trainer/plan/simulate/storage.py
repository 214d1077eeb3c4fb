"""Plans a run's host memory and files. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.config.schema import RunConfig
from trainer.plan.simulate.phases import Item
from trainer.plan.simulate.references import references_of
from trainer.plan.simulate.sizes import BITS, checkpoint_bytes, trained
from trainer.plan.simulate.steps import ModelPass, Unit
from trainer.plan.simulate.tables import Model
from trainer.plan.simulate.timeline import Memory, Sharding

EXPORTED_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


def host_of(cfg: RunConfig, model_pass: ModelPass, memory: Memory, sharding: Sharding) -> tuple[Item, ...]:
    """Return the host memory of a rank.

    Args:
        cfg: The run's config.
        model_pass: A training pass.
        memory: The simulated memory of `model_pass`.
        sharding: How it is spread.
    """
    copied = checkpoint_bytes(cfg, model_pass) / sharding.ranks
    unsharded = trained(model_pass) * 4
    what = "weights and optimizer state" if cfg.parallel.cpu_offload else "frozen weights of offloaded blocks"
    items = [
        Item("offloaded", memory.host, f"on each rank: {what}, pinned"),
        Item("checkpoint", copied, "on each rank: a copy that is written while training goes on"),
        Item("export", unsharded, "on rank 0 at the end: the trained weights, unsharded"),
    ]
    return tuple(item for item in items if item.size)


def disk_of(cfg: RunConfig, model: Model, model_pass: ModelPass) -> tuple[Item, ...]:
    """Return the files that a run writes. model_pass: a training pass."""
    encoders, pixels = model.encoders, cfg.data.all_sides[-1] ** 2
    example = (1 + references_of(cfg)) * encoders.of_image(encoders.latents, pixels) + encoders.caption
    kept = f"the last {cfg.checkpoint.keep} are kept" if cfg.checkpoint.keep > 1 else "the last one is kept"
    items = [
        Item("checkpoint", checkpoint_bytes(cfg, model_pass), f"each; {kept}"),
        Item("cached image", example, "each, with a caption of its own: latents and embeddings"),
    ]
    if cfg.quantize.cache:
        base = sum(_stored(found.units) for found in (model_pass, encoders.text))
        items.append(Item("cached base", base, f"weights in {cfg.quantize.format}, for runs to come"))
    if cfg.export_what != "none":
        numbers = trained(model_pass) if cfg.export_what == "adapter" else _numbers(cfg, model_pass)
        items.append(Item("export", numbers * EXPORTED_BYTES[cfg.export.dtype], f"in {cfg.export.dtype}"))
    return tuple(item for item in items if item.size)


def _stored(units: Iterable[Unit]) -> int:
    """Return the bytes of quantized weights."""
    return sum(p.numbers for unit in units for p in unit.parameters if p.stored == 1)


def _numbers(cfg: RunConfig, model_pass: ModelPass) -> float:
    """Count the weights of the base, including quantized ones, and of its adapter, which are comparatively few."""
    bits = BITS.get(cfg.quantize.format, 8.0)
    return sum(p.numbers * (8 / bits if p.stored == 1 else 1) for unit in model_pass.units for p in unit.parameters)
