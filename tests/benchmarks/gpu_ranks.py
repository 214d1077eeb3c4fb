"""What can be shown of several ranks on one device: NCCL by itself, and two ranks that talk over gloo."""

from __future__ import annotations

import datetime
import faulthandler
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

from tests.benchmarks.gpu_report import Place, Report, Row
from tests.runs import difference, make_pictures, make_run, run_config, steps_of
from trainer.config.schema import RunConfig
from trainer.distributed.world import World, joined
from trainer.run.events import AnyEvent
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

RANKS = 2
CLOSE = 1e-5
"""Largest difference of a loss or weight in fp32: the ranks add up in another order."""
LIMIT = datetime.timedelta(seconds=120)
CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "nf4": {"train__checkpointing": "full", "quantize__format": "nf4"},
    "full": {"adapter__type": "none"},
    "offloaded": {"parallel__cpu_offload": True},
    "offloaded blocks": {"parallel__offload_blocks": 1.0},
}


def ranks(place: Place, report: Report) -> None:
    """Collectives of one rank, then runs of two ranks on this device against one."""
    with report.measuring("collectives"):
        _collectives(place, report)
    pictures = make_pictures(place.folder / "ranks" / "pictures")
    found = [_outcomes(count, pictures, place) for count in (1, RANKS)]
    for name in CASES:
        with report.measuring(f"two ranks, {name}"):
            if failed := [outcome[name] for outcome in found if isinstance(outcome[name], Exception)]:
                raise failed[0]
            one, two = (outcomes[name] for outcomes in found)
            losses = max(abs(a - b) for a, b in zip(one["losses"], two["losses"], strict=True))
            weights = difference(one["weights"], two["weights"])
            figure = f"losses differ by {losses:.1e}, weights by {weights:.1e} from one rank"
            report.add(Row(f"two ranks, {name}", figure, f"<= {CLOSE}", max(losses, weights) <= CLOSE))


def _collectives(place: Place, report: Report) -> None:
    """One rank gathers and reduces over its own backend. Bytes must come back as they were, whatever they mean."""
    backend = "nccl" if place.device == "cuda" else "gloo"
    with _group(backend, dist.HashStore(), 0, 1):
        mine = torch.randint(0, 256, (2**20,), dtype=torch.uint8, device=place.here)  # as bf16, many are NaN
        whole = torch.empty_like(mine)
        dist.all_gather_into_tensor(whole, mine)
        numbers = torch.randn(2**20, device=place.here)
        share = torch.empty_like(numbers)
        dist.reduce_scatter_tensor(share, numbers)
        dist.all_reduce(total := numbers.clone())
        place.synchronize()
        found = {"bytes": torch.equal(whole, mine), "shares": torch.equal(share, numbers)}
        found["sums"] = torch.equal(total, numbers)
        wrong = [name for name, is_equal in found.items() if not is_equal]
        figure = f"{backend}, one rank: " + (
            f"other {', '.join(wrong)}" if wrong else "bytes, shares and sums are equal"
        )
        report.add(Row("collectives", figure, "equal", not wrong))


def _outcomes(count: int, pictures: Path, place: Place) -> dict[str, Any]:
    """{case: losses and weights of a tiny run in fp32, or what stopped its ranks}. One rank shards nothing."""
    configs = {}
    for name, changes in CASES.items():
        fields = changes if count > 1 else {key: value for key, value in changes.items() if "offload" not in key}
        strategy = "full" if count > 1 else "none"
        configs[name] = run_config(pictures, **fields, parallel__strategy=strategy, parallel__device=place.device)
    found: dict[str, Any] = {}
    while configs:
        failure = None
        with tempfile.TemporaryDirectory(dir=place.folder / "ranks") as root:
            try:
                mp.spawn(_train, (count, configs, place.device, Path(root)), nprocs=count)
            except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
                failure = error
            for name in list(configs):
                file = Path(root) / f"{name}.pt"
                if file.exists():
                    found[name] = torch.load(file, weights_only=True)
                    del configs[name]
        if failure:  # of the first case that left nothing; the others get new ranks
            stopped = next(iter(configs))
            found[stopped] = failure
            del configs[stopped]
    return found


def _train(rank: int, count: int, configs: dict[str, RunConfig], device: str, root: Path) -> None:
    """One rank, in a process of its own. Rank 0 leaves losses and weights in a file for each case."""
    faulthandler.enable()
    here = torch.device(device, 0) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    with _group("gloo", dist.FileStore(str(root / "store"), count), rank, count):
        world = joined(here, rank, count)
        for name, cfg in configs.items():
            if rank == 0:
                print(f"  {count} ranks, {name}", flush=True)
                make_run(root, cfg, name)
            world.barrier()
            outcome = _outcome(world, cfg, RunDir(root / name))
            if rank == 0:
                draft = root / f"{name}.part"
                torch.save(outcome, draft)
                draft.rename(root / f"{name}.pt")


def _outcome(world: World, cfg: RunConfig, run: RunDir) -> dict[str, Any]:
    """Losses and weights of a run. Weights are put together here: over gloo, DTensor gathers those of a GPU with a
    segmentation fault (torch 2.11), and NCCL takes no two ranks on one GPU."""
    events: list[AnyEvent] = []
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", events.append)
    try:
        trainer.train()
        weights = {}
        for name, parameter in trainer.trainables.items():
            mine = parameter.detach()
            is_sharded = isinstance(mine, DTensor)
            mine = (mine.to_local() if is_sharded else mine).cpu()
            weights[name] = torch.cat(world.gather(mine)) if is_sharded else mine
        return {"losses": [event.loss for event in steps_of(events)], "weights": weights}
    finally:
        trainer.close()


@contextmanager
def _group(backend: str, store: dist.Store, rank: int, count: int) -> Iterator[None]:
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()
