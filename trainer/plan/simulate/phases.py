"""Computes the memory of each part of a run on each GPU, from the first caption to the export. No torch.

See DECISIONS 92.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from trainer.config.schema import RunConfig
from trainer.models.distilled import complete_sample
from trainer.parallel.strategy import stays_gathered
from trainer.plan.simulate.sizes import rank_of, sample_input_of
from trainer.plan.simulate.steps import ModelPass
from trainer.plan.simulate.tables import Encoders, Model
from trainer.plan.simulate.timeline import Memory, Sharding, in_words, simulate_forward
from trainer.view.colors import MEMORY_KINDS

CAPTIONS, IMAGES, TRAINING, SAMPLING, EXPORT = "encoding captions", "encoding images", "training", "sampling", "export"
"""The parts of a run."""


@dataclass(frozen=True)
class Reserve:
    """Memory that the allocator and the driver take in addition to tensors.

    Attributes:
        share: Share of the tensors' bytes, for gaps between allocations.
        context: Bytes of CUDA's context and libraries.
        communication: Bytes of NCCL's buffers, with several ranks.
        is_measured: Whether the numbers were measured on this kind of GPU.
    """

    share: float = 0.06
    context: int = 600 * 2**20
    communication: int = 400 * 2**20
    is_measured: bool = False

    def of(self, allocated: float, ranks: int) -> float:
        """Return the bytes in addition to `allocated`."""
        return self.share * allocated + self.context + (self.communication if ranks > 1 else 0)


ASSUMED = Reserve()


@dataclass(frozen=True)
class Item:
    """A part of the memory of one rank, or of a run's files.

    Attributes:
        name: Name of the part.
        size: Bytes.
        sentence: Explains the part.
    """

    name: str
    size: float
    sentence: str


@dataclass(frozen=True)
class Phase:
    """A part of a run, at its fullest moment on each rank. Sizes in bytes.

    Attributes:
        name: Name of the part.
        items: Parts of the memory, which add up to `need`.
        peak: Bytes of tensors.
        need: Bytes including those of the allocator and the driver.
        when: The moment.
    """

    name: str
    items: tuple[Item, ...]
    peak: float
    need: float
    when: str


AUTOENCODER, GUIDES = "autoencoder", "guiding transformer"
_SENTENCES = {
    "weights": "the base and what is trained, {share}",
    "text encoders": "which make embeddings of captions, {share}",
    GUIDES: "a second one, which only samples use, spread over all ranks",
    AUTOENCODER: "which turns images into latents and back, unsharded on each rank in fp32",
    "optimizer": "what the optimizer remembers of each trained weight, {share}",
    "averaged weights": "the trained weights put aside while their average is used",
    "gradients": "of the trained weights, in fp32, {share}",
    "gathered blocks": "unsharded weights of the current block and of prefetched ones",
    "gradients being reduced": "of the block whose gradients are summed over the ranks",
    "activations": "what a pass keeps for backward, and what the block at work needs",
    "buffers": "tables of the model that are not weights, such as positions",
    "gathered weights": "the largest trained tensor, unsharded",
}
_KINDS: Mapping[str, str] = {
    "weights": "weights",
    "text encoders": "weights",
    AUTOENCODER: "weights",
    GUIDES: "weights",
    "optimizer": "optimizer",
    "averaged weights": "optimizer",
    "gradients": "optimizer",
    "gathered blocks": "gathered",
    "gathered weights": "gathered",
    "gradients being reduced": "gathered",
    "activations": "activations",
    "buffers": "reserve",
}
"""{part of the memory: its kind, of `colors.MEMORY_KINDS`}"""


def memory_kind(part: str) -> str:
    """Return the kind of a part of the memory: it has the same colour in every plan. A part that is not listed, as what
    the allocator and the driver take, is "reserve"."""
    return _KINDS.get(part, "reserve")


def by_kind(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return {kind: bytes} of {part: bytes}, in the order of `colors.MEMORY_KINDS`; 0 for a kind without a part."""
    found = dict.fromkeys(MEMORY_KINDS, 0.0)
    for part, size in sizes.items():
        found[memory_kind(part)] += size
    return found


def phases_of(
    cfg: RunConfig, model: Model, model_pass: ModelPass, sharding: Sharding, training: Memory, reserve: Reserve
) -> tuple[Phase, ...]:
    """Compute the parts of a run.

    Args:
        cfg: The run's config.
        model: The tables of its model.
        model_pass: A training pass.
        sharding: How it is spread.
        training: The simulated memory of `model_pass`.
        reserve: Memory of the allocator and the driver.
    """
    return tuple(
        _phase(name, memory, shards, reserve, cfg.parallel.world_size)
        for name, memory, shards in _memories(cfg, model, model_pass, sharding, training)
    )


def _memories(
    cfg: RunConfig, model: Model, model_pass: ModelPass, sharding: Sharding, training: Memory
) -> Iterator[tuple[str, Memory, int]]:
    """Yield (name, memory, number of ranks over which it is sharded) of each part that the run has."""
    encoders, shards = model.encoders, sharding.ranks
    if encoders.text.units or encoders.whole:
        sharded = over_all(cfg)
        yield CAPTIONS, captions(encoders, sharded), sharded.ranks if encoders.text.units else 1
    if encoders.image:
        activations = encoders.of_image(encoders.encoding, cfg.data.all_sides[-1] ** 2)
        items = {AUTOENCODER: float(encoders.image), "activations": activations}
        yield IMAGES, Memory(peak=sum(items.values()), items=items), 1
    yield TRAINING, training, shards
    if drawing := sampling(cfg, model, model_pass, sharding):
        yield SAMPLING, drawing, shards
    if cfg.export_what != "none":
        yield EXPORT, _export(model_pass, sharding, _averaged(cfg, model_pass, sharding)), shards


def sampling(cfg: RunConfig, model: Model, model_pass: ModelPass, sharding: Sharding) -> Memory | None:
    """Return the memory while samples are generated; None for a run without samples.

    Args:
        cfg, model, model_pass, sharding: As for `phases_of`.
    """
    if not (cfg.sample.every and cfg.sample.prompts):
        return None
    encoders = model.encoders
    drawing = model.table.sampling(sample_input_of(cfg), rank_of(cfg))
    autoencoder = {AUTOENCODER: encoders.image} if encoders.image else {}
    constant = {**autoencoder, **_guides(cfg, encoders), **_averaged(cfg, model_pass, sharding)}
    decoding = encoders.of_image(encoders.decoding, cfg.sample.full_size.pixels)
    return simulate_forward(drawing, while_sampling(cfg, drawing, sharding), constant, decoding)


def _guides(cfg: RunConfig, encoders: Encoders) -> dict[str, float]:
    """Return the components that guide samples, which are spread as encoders are: over all ranks, or in host memory."""
    if not encoders.guides or complete_sample(cfg.model, cfg.sample).guidance <= 1:
        return {}
    return {GUIDES: 0.0 if cfg.parallel.cpu_offload else encoders.guides / over_all(cfg).ranks}


def while_sampling(cfg: RunConfig, drawing: ModelPass, sharding: Sharding) -> Sharding:
    """Return how a model is spread while it generates samples: as in training, but that a small one stays gathered."""
    stored = sum(p.numbers * p.stored for unit in drawing.units for p in unit.parameters)
    is_kept = stays_gathered(cfg.parallel, sharding.ranks, sharding.reshard, stored)
    return replace(sharding, reshard=False) if is_kept else sharding


def over_all(cfg: RunConfig) -> Sharding:
    """Return how encoders are spread: over all ranks."""
    ranks, offload = cfg.parallel.world_size, cfg.parallel.cpu_offload
    return Sharding(ranks, is_sharded=ranks > 1 or offload, offload=offload, optimizer_bytes=0.0)


@lru_cache(64)
def captions(encoders: Encoders, sharding: Sharding) -> Memory:
    """Return the memory while captions are encoded."""
    memory = simulate_forward(encoders.text, sharding, {"text encoders": encoders.whole})
    weights = memory.items.pop("weights", 0.0)
    memory.items["text encoders"] = memory.items.get("text encoders", 0.0) + weights
    return memory


def _export(model_pass: ModelPass, sharding: Sharding, allocated: Mapping[str, float]) -> Memory:
    """Return the memory of the export, in which each trained tensor is gathered, copied to the host and freed."""
    sizes = [p.rows * p.row * 4 for unit in model_pass.units for p in unit.parameters if p.is_trained]
    gathered = max(sizes, default=0) if sharding.ranks > 1 else 0
    return simulate_forward(model_pass.at_rest, sharding, {**allocated, "gathered weights": gathered})


def _averaged(cfg: RunConfig, model_pass: ModelPass, sharding: Sharding) -> dict[str, float]:
    """Return the weights that are put aside while a schedule-free optimizer's average replaces them."""
    if cfg.optim.type != "schedulefree" or cfg.optim.ema:
        return {}
    numbers = sum(
        p.count * p.shard_rows(sharding.ranks) * p.row for u in model_pass.units for p in u.parameters if p.is_trained
    )
    return {"averaged weights": 4.0 * numbers}


def _phase(name: str, memory: Memory, shards: int, reserve: Reserve, ranks: int) -> Phase:
    share = f"1/{shards} on each rank" if shards > 1 else "unsharded"
    items = [
        Item(what, memory.items[what], sentence.format(share=share))
        for what, sentence in _SENTENCES.items()
        if memory.items.get(what, 0) >= 1
    ]
    reserved = reserve.of(memory.peak, ranks)
    what = "gaps of the allocator, CUDA's context" + (", NCCL's buffers" if ranks > 1 else "")
    origin = "as measured here" if reserve.is_measured else "an assumption"
    items.append(Item("reserve", reserved, f"{what}; {origin}"))
    return Phase(name, tuple(items), memory.peak, memory.peak + reserved, _when(name, memory))


def moment(phase: Phase) -> str:
    """Name the fullest moment: `training, forward of transformer.transformer_blocks.7`."""
    return f"{phase.name}, {phase.when}" if phase.when else phase.name


def _when(name: str, memory: Memory) -> str:
    """Name the moment within the part; empty where memory does not change."""
    moment, unit = memory.when
    if name == SAMPLING and moment == "end":
        return "decoding the image"
    if not unit:
        return "backward" if name == TRAINING else ""
    return in_words(moment, unit)
