"""The numbers of a step are read late: what that changes, which is only when, and what the host waits for."""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_ranks
from tests.runs import Outcome, difference, make_pictures, make_run, run_config, steps_of, train
from trainer.benchmark import worker
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.rng import Draw
from trainer.run.events import AnyEvent, EventReader, SampleEvent, StepEvent, ValidationEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer
from trainer.train.numbers import LateRead

BUSY: dict[str, Any] = {
    "optim__ema": 0.9,
    "data__validation": 2,
    "data__validation_every": 2,
    "checkpoint__every": 3,
    "sample": {"every": 2, "prompts": ["one"], "size": [32, 32], "steps": 1},
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("numbers") / "pictures")


@contextmanager
def a_busy_device() -> Iterator[None]:
    """Inside, the numbers of a step are never there when it ends, as on a GPU that has much to do."""
    with mock.patch.object(LateRead, "is_ready", False):
        yield


def train_late(world: World, cfg: RunConfig, run: RunDir) -> Outcome:
    with a_busy_device():
        return train(world, cfg, run)


def train_unevenly(world: World, cfg: RunConfig, run: RunDir) -> Outcome:
    """Each rank reads at times of its own."""
    draws = random.Random(world.rank)
    with mock.patch.object(LateRead, "is_ready", property(lambda self: draws.random() < 0.5)):
        return train(world, cfg, run)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(2, {"parallel__strategy": "full", **BUSY}, marks=pytest.mark.slow),
        pytest.param(
            *(2, {"parallel__strategy": "full", "parallel__cpu_offload": True, "optim__ema": 0.9}),
            marks=pytest.mark.slow,
        ),
        (1, {"optim__type": "schedulefree"}),
        (1, {"adapter__type": "none", "train__micro_batch": 2}),
    ],
    ids=["busy", "offloaded", "an optimizer that cannot skip", "full"],
)
def test_a_run_whose_numbers_are_read_late_is_the_same_bit_for_bit(
    pictures: Path, tmp_path: Path, ranks: int, changes: dict[str, Any]
) -> None:
    cfg = run_config(pictures, parallel__devices=ranks, **changes)
    prompt = run_ranks(ranks, train, cfg, make_run(tmp_path, cfg, "prompt"))[0]
    for how in (train_late, train_unevenly)[:ranks]:
        late = run_ranks(ranks, how, cfg, make_run(tmp_path, cfg, how.__name__))[0]
        assert late.losses == prompt.losses and late.grad_norms == prompt.grad_norms
        assert difference(late.weights, prompt.weights) == 0.0
        assert said(late.events) == said(prompt.events)


def said(events: list[AnyEvent]) -> list[tuple[object, ...]]:
    """What the events of training say, in their order, without when."""
    kinds = StepEvent, ValidationEvent, SampleEvent
    return [
        (type(event).__name__, event.step, event.loss if isinstance(event, StepEvent | ValidationEvent) else None)
        for event in events
        if isinstance(event, kinds)
    ]


class _Reads(TorchFunctionMode):
    """Notes from which file the host reads a tensor."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu):
            frame = sys._getframe(1)
            self.files.append(Path(frame.f_code.co_filename).name)
        return function(*args, **(kwargs or {}))


class _Scalars(TorchDispatchMode):
    """Counts the operations that hand one number to the host: float(), bool(), item() and what asks so in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.count += 1
        return function(*args, **(kwargs or {}))


def reads_of_a_step(world: World, cfg: RunConfig, run: RunDir) -> tuple[int, list[str], list[int]]:
    """The scalars and the files of the third step, and the steps whose events came until the end of each."""
    events: list[AnyEvent] = []
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", events.append)
    seen = []
    with a_busy_device():
        for _ in range(2):
            trainer.train_step()
            seen.append(len(steps_of(events)))
        with _Reads() as reads, _Scalars() as scalars:
            trainer.train_step()
        seen.append(len(steps_of(events)))
    trainer.close()
    return scalars.count, reads.files, seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_reads_the_device_once_in_a_step_and_what_it_reads_is_of_the_step_before(
    pictures: Path, tmp_path: Path, ranks: int
) -> None:
    changes: dict[str, Any] = {"optim__ema": 0.9, "train__micro_batch": 1, "parallel__devices": ranks}
    cfg = run_config(pictures, parallel__strategy="full", **changes)
    for scalars, files, seen in run_ranks(ranks, reads_of_a_step, cfg, make_run(tmp_path, cfg, "reads")):
        assert scalars == 0
        # That of world.py is of the flags, which never were on the device.
        assert files == ["numbers.py", "world.py"]
        assert seen == [0, 1, 2]


def compared(world: World, cfg: RunConfig, run: RunDir) -> list[int]:
    """The steps of a variant's events."""
    with a_busy_device():
        worker.measure(run, world, run.path.parent / "cache")
    return [event.step for event in steps_of(EventReader(run.events_file).read())]


def test_a_comparison_of_variants_has_the_last_step_too(pictures: Path, tmp_path: Path) -> None:
    cfg = run_config(pictures, train__steps=4)
    assert run_ranks(1, compared, cfg, make_run(tmp_path, cfg, "compared"))[0] == [1, 2, 3, 4]


def steps_over_nan(world: World, cfg: RunConfig, run: RunDir) -> tuple[list[float], list[str], list[bool], float]:
    """Four steps, of which the second has no finite loss. Returns losses, warnings, which steps moved the weights, and
    the step that the optimizer counts."""
    events: list[AnyEvent] = []
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", events.append)
    factor = lambda: math.nan if trainer.step == 1 else 1.0  # noqa: E731
    hook = lambda model, arguments, output: (output[0] * factor(),)  # noqa: E731
    trainer.model["transformer"].register_forward_hook(hook)
    moved = []
    with a_busy_device():
        for _ in range(4):
            before = [parameter.detach().clone() for parameter in trainer.parameters]
            trainer.train_step()
            moved.append(not all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True)))
        trainer.flush_metrics()
    counted = next(iter(trainer.optimizer.state.values()))["step"]
    trainer.close()
    warnings = [event.message for event in events if isinstance(event, WarningEvent)]
    return [event.loss for event in steps_of(events)], warnings, moved, float(counted)


def test_the_device_itself_skips_a_step_that_is_not_finite(pictures: Path, tmp_path: Path) -> None:
    cfg = run_config(pictures, train__non_finite="skip", optim__ema=0.9)
    losses, warnings, moved, counted = run_ranks(1, steps_over_nan, cfg, make_run(tmp_path, cfg, "skip"))[0]
    assert [math.isnan(loss) for loss in losses] == [False, True, False, False]
    assert warnings == ["step 2: the loss is not finite on 1 of 1 ranks; step skipped, 1 in this run so far"]
    assert moved == [True, False, True, True]
    assert counted == 3


def until_nan(world: World, cfg: RunConfig, run: RunDir) -> tuple[str, list[int], list[str]]:
    """The error of a run whose second step has no finite loss, the steps of its events and its checkpoints."""
    events: list[AnyEvent] = []
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", events.append)
    factor = lambda: math.nan if trainer.step == 1 else 1.0  # noqa: E731
    hook = lambda model, arguments, output: (output[0] * factor(),)  # noqa: E731
    trainer.model["transformer"].register_forward_hook(hook)
    try:
        with a_busy_device(), pytest.raises(FloatingPointError) as error:
            trainer.train()
    finally:
        trainer.close()
    return str(error.value), [event.step for event in steps_of(events)], [p.name for p in run.checkpoints.iterdir()]


@pytest.mark.parametrize("every", [0, 2])
def test_a_loss_that_is_not_finite_ends_the_run_before_anything_is_saved_of_it(
    pictures: Path, tmp_path: Path, every: int
) -> None:
    cfg = run_config(pictures, checkpoint__every=every)
    found = run_ranks(1, until_nan, cfg, make_run(tmp_path, cfg, "stop"))[0]
    assert found == ("step 2: the loss is not finite on 1 of 1 ranks", [1], [])


def requested(world: World, cfg: RunConfig, run: RunDir) -> tuple[int, str]:
    """The step at which a run stops that is asked to in the middle of its second step, and how it ends."""
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    ask = lambda *_: run.request("stop") if trainer.step == 1 and world.rank == 0 else None  # noqa: E731
    trainer.model["transformer"].register_full_backward_hook(ask)
    try:
        with a_busy_device():
            state = trainer.train()
    finally:
        trainer.close()
    return trainer.step, state


def test_a_request_is_answered_at_the_latest_a_step_later(pictures: Path, tmp_path: Path) -> None:
    cfg = run_config(pictures, parallel__devices=2, parallel__strategy="full", train__steps=9, train__micro_batch=4)
    for step, state in run_ranks(2, requested, cfg, make_run(tmp_path, cfg, "asked")):
        assert 2 <= step <= 3 and state == "stopped"


def draws_of_the_main_thread(world: World, cfg: RunConfig, run: RunDir) -> list[int]:
    """How many numbers the main thread draws in each of five steps."""
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    drawn: list[str] = []
    numbers = Draw.numbers

    def noting(draw: Draw, source: torch.Generator) -> torch.Tensor:
        drawn.append(threading.current_thread().name)
        return numbers(draw, source)

    counts = []
    with mock.patch.object(Draw, "numbers", noting):
        for _ in range(5):
            drawn.clear()
            trainer.train_step()
            counts.append(drawn.count(threading.main_thread().name))
    trainer.close()
    return counts


def test_the_noise_of_a_step_is_drawn_while_the_one_before_is_trained(pictures: Path, tmp_path: Path) -> None:
    cfg = run_config(pictures, train__batch_size=1)
    counts = run_ranks(1, draws_of_the_main_thread, cfg, make_run(tmp_path, cfg, "draws"))[0]
    assert counts[0] == 2, "noise and timestep: nothing is known of this kind of pass yet"
    assert counts[-1] == 0
