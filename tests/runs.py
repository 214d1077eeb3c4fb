"""Small real runs for tests: pictures on disk, a tiny model, a trainer in this process or on several ranks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import signal
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from trainer.config.schema import RunConfig
from trainer.distributed.world import World, joined
from trainer.run.events import AnyEvent, EventWriter, StepEvent
from trainer.run.folder import RunDir
from trainer.run.manifest import MANIFEST, sealed
from trainer.train.loop import Trainer
from trainer.train.step_log import StepNumbers

T = TypeVar("T")
SIZES = ((64, 64), (96, 48), (48, 96))


def make_pictures(folder: Path, count: int = 8) -> Path:
    """`count` captioned pictures of three aspect ratios, each of its own colours."""
    folder.mkdir(parents=True)
    numbers = torch.Generator().manual_seed(0)
    for i in range(count):
        width, height = SIZES[i % len(SIZES)]
        blocks = (torch.rand(height // 16, width // 16, 3, generator=numbers) * 255).byte()
        Image.fromarray(blocks.numpy()).resize((width, height)).save(folder / f"{i:02d}.png")
        (folder / f"{i:02d}.txt").write_text(f"picture number {i}", encoding="utf-8")
    return folder


def write_preset(file: Path, pictures: Path, steps: int = 20) -> Path:
    """A preset of these pictures, named as its file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f"name: {file.stem}\nmodel: {{family: flux2}}\ndata: {{path: {pictures}, resolution: 64}}\n"
        f"train: {{steps: {steps}}}\n",
        encoding="utf-8",
    )
    return file


def make_text(folder: Path, count: int = 40) -> Path:
    """A folder with a .txt, and a .jsonl of `count` documents, of which every third has a prompt."""
    folder.mkdir(parents=True)
    lines = []
    for i in range(count):
        text = {"text": f"Sentence {i} says {i * i}."}
        lines.append({"prompt": f"Double {i}: ", "completion": f"{2 * i}."} if i % 3 == 0 else text)
    (folder / "b.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    (folder / "a.txt").write_text("All the words of one long document, one after the other. " * 8, encoding="utf-8")
    return folder


def text_config(text: Path, **changes: Any) -> RunConfig:
    """A run of seconds of a tiny language model, fp32, lr 1e-4. changes: as `run_config` has them."""
    base: dict[str, Any] = {
        "model": {"family": "causal_lm"},
        "data": {"path": str(text), "length": 48, "shuffle_window": 16},
    }
    return run_config(text, **base | changes)


def run_config(pictures: Path, **changes: Any) -> RunConfig:
    """A run of seconds: tiny FLUX.2, fp32, lr 1e-4. changes: dotted fields with __ for the dot."""
    values: dict[str, Any] = {
        "name": "tiny",
        "model": {"family": "flux2"},
        "adapter": {"type": "lora", "rank": 4},
        "data": {"path": str(pictures), "resolution": 64},
        "train": {"steps": 5, "batch_size": 4, "micro_batch": 1, "precision": "fp32", "seed": 3, "compile": False},
        "optim": {"lr": 1e-4},
        "parallel": {"device": "cpu"},
        "checkpoint": {"every": 0},
    }
    for field, value in changes.items():
        section = values
        *parents, leaf = field.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    if values["adapter"].get("type") == "none":
        values["adapter"] = {"type": "none"}
    return RunConfig.model_validate(values)


@dataclass(frozen=True)
class Outcome:
    """What a run came to. weights: as exported, on rank 0.  local_bytes, full_bytes: of all parameters."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    events: list[AnyEvent]
    local_bytes: int
    full_bytes: int


def alone(device: torch.device | None = None) -> World:
    """The one rank of a process group of this process. device: the CPU, if none is given."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return joined(device or torch.device("cpu"), 0, 1)


def make_run(root: Path, cfg: RunConfig, name: str) -> RunDir:
    """A run folder below `root`, which also holds the cache that runs share."""
    return RunDir.create(root, cfg, at=root / name)


def write(run: RunDir, *events: AnyEvent) -> None:
    """Append events to a run's log, as its trainer does."""
    with EventWriter(run.events_file) as writer:
        for event in events:
            writer.write(event)


def step_event(step: int, loss: float = 1.0, **more: Any) -> StepEvent:
    """A step of 0.9 s, of which 0.4 s are the backward pass, with 8 images per second. more: other values."""
    split = {"data": 0.1, "forward": 0.2, "backward": 0.4, "optimizer": 0.05, "communication": 0.15}
    seconds = {f"seconds_{part}": value for part, value in split.items()}
    values = {"lr": 1e-4, "grad_norm": 2.0, "seconds": 0.9, "images_per_second": 8.0, **seconds}
    return StepEvent(step=step, loss=loss, **values | more)


def train(world: World, cfg: RunConfig, run: RunDir) -> Outcome:
    """Run the trainer to its end in a run folder that exists; the cache lies beside it."""
    from trainer.metrics.memory import full_bytes, local_bytes

    events: list[AnyEvent] = []
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", events.append)
    parameters = list(trainer.model.parameters())
    try:
        trainer.train()
        return Outcome(
            [event.loss for event in steps_of(events)],
            [event.grad_norm for event in steps_of(events)],
            trainer.trained_weights(),
            events,
            local_bytes(parameters),
            full_bytes(parameters),
        )
    finally:
        trainer.close()


def seal(checkpoint: Path) -> None:
    """Let the manifest of a checkpoint give the sizes and checksums that its files have now."""
    regular = [path for path in sorted(checkpoint.iterdir()) if path.is_file() and not path.is_symlink()]
    contents = {path.name: path.read_bytes() for path in regular if path.name != MANIFEST}
    change_manifest(
        checkpoint,
        files={name: len(content) for name, content in contents.items()},
        checksums={name: hashlib.blake2b(data, digest_size=16).hexdigest() for name, data in contents.items()},
    )


def change_manifest(checkpoint: Path, **changes: Any) -> None:
    """Give fields of the manifest of a checkpoint other values, and the manifest the checksum that goes with them."""
    file = checkpoint / MANIFEST
    facts = json.loads(file.read_text(encoding="utf-8"))
    del facts["checksum"]
    file.write_bytes(sealed(facts | changes))


def steps_of(events: Sequence[AnyEvent]) -> list[StepEvent]:
    """The step events."""
    return [event for event in events if isinstance(event, StepEvent)]


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest absolute difference of two sets of tensors with equal names."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def awaited(waiting: Coroutine[Any, Any, T], timeout_s: float = 120) -> T:
    """What a coroutine returns. In a thread of its own: where a browser is driven, this one has a loop already.

    Raises TimeoutError when it takes longer.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, asyncio.wait_for(waiting, timeout_s)).result()


def step_numbers(trainer: Trainer) -> StepNumbers:
    """Do one step, and wait for its numbers."""
    trainer.train_step()
    trainer.flush_metrics()
    assert trainer.numbers is not None
    return trainer.numbers


def step_with_gradients(trainer: Trainer) -> tuple[StepNumbers, dict[str, Tensor]]:
    """Do a step, and return the gradients that the optimizer was given."""
    seen: dict[str, Tensor] = {}

    def note(*_: object) -> None:
        seen.update({name: p.grad.clone() for name, p in trainer.trainables.items() if p.grad is not None})

    hook = trainer.optimizer.register_step_pre_hook(note)
    numbers = step_numbers(trainer)
    hook.remove()
    return numbers, seen


def stopped_after(world: World, cfg: RunConfig, run: RunDir, steps: int) -> list[float]:
    """Train some steps and save. Returns their losses."""
    events: list[AnyEvent] = []
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", events.append)
    for _ in range(steps):
        trainer.train_step()
    trainer._save_last()
    trainer.close()
    return [event.loss for event in steps_of(events)]


def in_two_parts(world: World, cfg: RunConfig, run: RunDir, first: int = 3) -> tuple[list[float], Outcome]:
    """Train `first` steps and save, then go on in another trainer. Returns the first losses, and the second part."""
    return stopped_after(world, cfg, run, first), train(world, cfg, run)


def graphs_of(world: World, cfg: RunConfig, run: RunDir, steps: int) -> tuple[list[int], dict[str, int]]:
    """Number of compiled graphs after each of some steps, and of graph breaks by reason."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    graphs = []
    for _ in range(steps):
        trainer.train_step()
        graphs.append(counters["stats"]["unique_graphs"])
    trainer.close()
    return graphs, dict(counters["graph_break"])


def logits(model: Any) -> Tensor:
    """After some bytes, the tokens of the tiny language model."""
    with torch.no_grad():
        found: Tensor = model.eval()(torch.arange(1, 60)[None]).logits
    return found


def trained_logits(cfg: RunConfig, run: RunDir) -> Tensor:
    """The logits of the live language model at the end of its run."""
    trainer = Trainer(cfg, run, alone(), run.path.parent / "cache", lambda event: None)
    try:
        trainer.train()
        return logits(trainer.model["language_model"])
    finally:
        trainer.close()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow, as on a full disk."""
    former, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)
