"""One rank of a comparison of variants, started by torchrun: `python -m trainer.benchmark.worker RUN_DIR`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.benchmark.probe import Probe
from trainer.distributed.world import World, connect, find_rendezvous
from trainer.launcher.jobs import variants as trials
from trainer.launcher.jobs.variants import Cost, RankMemory
from trainer.metrics.memory import full_bytes, local_bytes
from trainer.metrics.out_of_memory import explain_out_of_memory
from trainer.optim import state_tensors
from trainer.parallel.parallelize import COMPUTE_DTYPE, blocks_of
from trainer.plan.simulate.zero import ModelBytes, RankBytes, expected
from trainer.run.events import StatusEvent
from trainer.run.folder import RunDir, shared_cache
from trainer.train.log import emitter
from trainer.train.loop import Trainer
from trainer.train.rank import on_every_rank
from trainer.view.report import write_report


def main() -> NoReturn:
    """Exit codes are those of `python -m trainer`."""
    on_every_rank(RunDir.open(Path(sys.argv[1])), _measure_all)


@record
def _measure_all(run: RunDir) -> None:
    with connect(run.config().parallel, find_rendezvous(run)) as world:
        emit = emitter(run, world)
        variants = trials.folders(run)
        for number, (label, trial) in enumerate(variants.items()):
            emit(StatusEvent(state="training", message=label, done=number, total=len(variants)))
            cost = measure(trial, world, shared_cache(run.config(), run.path.parent))
            if world.rank == 0:
                trials.write(cost, trial)
        emit(StatusEvent(state="finished", done=len(variants), total=len(variants)))


def measure(run: RunDir, world: World, cache: Path) -> Cost:
    """Train a run to its end and return what it cost; no checkpoint is kept. Collective."""
    emit = emitter(run, world)
    trainer = Trainer(run.config(), run, world, cache, emit)
    try:
        with explain_out_of_memory(trainer.oom_context, trainer.log.meter, trainer.allocated):
            cost = replace(_train(trainer), memory=tuple(world.gather(_memory(trainer))))
        emit(StatusEvent(state="finished", step=trainer.step))
    finally:
        trainer.close()
        gc.collect()  # hooks and their modules refer to each other: the next trial needs the memory
    if world.rank == 0:
        write_report(run)
    return cost


def _train(trainer: Trainer) -> Cost:
    if trainer.data.num_held_out:
        trainer.validate()
    trainer.train_step()  # the first step allocates what later ones reuse
    cost = _watched_step(trainer)
    while trainer.step < trainer.num_steps:
        trainer.train_step()
    trainer.flush_metrics()
    if trainer.data.num_held_out:
        trainer.validate()
    if trainer.cfg.sample.every:
        trainer.generate_samples()
    return cost


def _memory(trainer: Trainer) -> RankMemory:
    reading, device = trainer.log.meter.read(), trainer.world.device
    if device.type != "cuda":
        return RankMemory(reading.peak, reading.reserved, 0)
    free, total = torch.cuda.mem_get_info(device)
    return RankMemory(reading.peak, torch.cuda.max_memory_reserved(device), total - free)


def _watched_step(trainer: Trainer) -> Cost:
    cfg, world, loaded = trainer.cfg, trainer.world, trainer.loaded
    module = loaded.module[trainer.family.components[0]]
    with Probe(module, blocks_of(module, trainer.family.shard.blocks), trainer.optimizer) as probe:
        trainer.train_step()
    trainer.flush_metrics()
    passes = cfg.micro_steps
    # Activations are those of one pass, so that the images of one pass are what they are for.
    images = cfg.train.batch_size // world.data_size // passes
    model = _whole(trainer)
    shards = loaded.mesh.size(-1) if loaded.mesh else 1
    mine = RankBytes(
        weights=local_bytes(loaded.module.parameters()),
        gradients=probe.gradients,
        optimizer_state=local_bytes(state_tensors(trainer.optimizer)),
        gathered=probe.gathered,
        sent=probe.sent,
    )
    reductions = passes if cfg.shards_gradients(loaded.strategy) else 1
    return Cost(
        strategy=loaded.strategy,
        shard_size=shards,
        images=images,
        num_parameters=sum(p.numel() for p in loaded.module.parameters()),
        num_trained=sum(p.numel() for p in trainer.parameters),
        is_offloaded=cfg.parallel.cpu_offload,
        model=model,
        ranks=tuple(world.gather(mine)),
        activations=tuple(world.gather(probe.activations)),
        formula=expected(model, loaded.strategy, world.size, shards, passes, reductions),
    )


def _whole(trainer: Trainer) -> ModelBytes:
    """Bytes of the unsharded model, from its shapes alone."""
    module = trainer.loaded.module
    dtype = COMPUTE_DTYPE[trainer.cfg.train.precision]
    blocks = blocks_of(module, trainer.family.shard.blocks)

    def computed(parameters: Iterable[Tensor]) -> int:
        return sum(p.numel() * dtype.itemsize for p in parameters if isinstance(p, DTensor))

    unsharded = computed(module.parameters())
    sizes = [computed(block.parameters()) for block in blocks if isinstance(block, FSDPModule)]
    return ModelBytes(
        weights=full_bytes(module.parameters()),
        gradients=full_bytes(trainer.parameters),
        optimizer_state=full_bytes(state_tensors(trainer.optimizer)),
        computed=unsharded,
        root=unsharded - sum(sizes),
        block=max(sizes, default=0),
    )


if __name__ == "__main__":
    main()
