"""The loop: what a step computes, and what it refuses."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from tests.runs import alone, difference, make_pictures, make_run, run_config, steps_of, train
from trainer.checkpoint.staging import Stager
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.metrics.out_of_memory import OutOfMemoryError
from trainer.rng import SampleRng
from trainer.run.events import AnyEvent, LengthEvent, SampleEvent, StatusEvent, ValidationEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.run.length import RunLength
from trainer.run.manifest import progress_of
from trainer.system.errors import InputError
from trainer.train.loop import Trainer


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("train") / "pictures")


def make_trainer(cfg: RunConfig, run: RunDir, events: list[AnyEvent] | None = None) -> Trainer:
    say = (lambda event: None) if events is None else events.append
    return Trainer(cfg, run, alone(), run.path.parent / "cache", say)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": {"type": "lora", "rank": 4, "targets": ["attn.to_qq"]}}, "adapter.targets: 'attn.to_qq'"),
        ({"adapter": {"type": "boft", "block_size": 1024}}, "adapter.block_size"),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_anything_is_encoded(
    pictures: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    cfg = run_config(pictures, **changes)
    events: list[AnyEvent] = []
    with pytest.raises(InputError, match=re.escape(message)):
        make_trainer(cfg, make_run(tmp_path, cfg, "run"), events)
    assert events == []


def noise_of_a_step(world: World, cfg: RunConfig, run: RunDir) -> dict[int, tuple[float, float]]:
    """{global sample index: (timestep draw, noise sum)} of this rank's part of step 2."""
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    drawn = {}
    for part in trainer.loader.micro_batches(2):
        rng = SampleRng(cfg.train.seed, part.indices)
        values = zip(
            rng.uniform("timestep").tolist(), rng.normal("noise", (16, 4, 4)).sum((1, 2, 3)).tolist(), strict=True
        )
        drawn.update(dict(zip(part.indices, values, strict=True)))
    trainer.close()
    return drawn


def test_one_two_and_four_ranks_draw_the_same_noise(pictures: Path) -> None:
    drawn = []
    for ranks in (1, 2, 4):
        cfg = run_config(pictures, parallel__devices=ranks, parallel__strategy="none" if ranks == 1 else "full")
        parts = run_ranks(ranks, noise_of_a_step, cfg, make_run(pictures.parent, cfg, f"noise-{ranks}"))
        drawn.append({index: value for part in parts for index, value in part.items()})
    assert drawn[0] == drawn[1] == drawn[2]
    assert sorted(drawn[0]) == [8, 9, 10, 11]


@pytest.mark.slow
def test_a_run_that_goes_on_with_another_batch_size_takes_the_next_images_and_noise(
    pictures: Path, tmp_path: Path
) -> None:
    alike = {"train__micro_batch": 8, "parallel__strategy": "none"}
    run = make_run(tmp_path, run_config(pictures, **alike), "parts")
    events: list[AnyEvent] = []
    found: list[tuple[int, torch.Tensor]] = []
    for size, until in ((4, 3), (8, 5), (2, 7)):
        cfg = run_config(pictures, train__batch_size=size, train__steps=until, **alike)
        trainer = make_trainer(cfg, run, events)
        for step in range(trainer.step, until):
            found += samples_of(trainer, step)
        trainer.train()
        trainer.close()
    ones = make_trainer(run_config(pictures, train__batch_size=1, **alike), make_run(tmp_path, cfg, "ones"))
    straight = [sample for step in range(32) for sample in samples_of(ones, step)]
    ones.close()
    assert [index for index, _ in found] == [index for index, _ in straight] == list(range(32))
    for shape in {latents.shape for _, latents in straight}:
        ours, theirs = ([one for _, one in samples if one.shape == shape] for samples in (found, straight))
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=False))
    saved = progress_of(run.checkpoints / "step-000007")
    assert (saved.batch_sizes, saved.samples_seen) == (((4, 3), (8, 2), (2, 2)), 32)
    notes = [
        event.message for event in events if isinstance(event, StatusEvent) and "train.batch_size" in event.message
    ]
    assert [message.partition(" (")[0] for message in notes] == [
        "changed since it was saved: train.steps: 3 -> 5; train.batch_size: 4 -> 8",
        "changed since it was saved: train.steps: 5 -> 7; train.batch_size: 8 -> 2",
    ]


def samples_of(trainer: Trainer, step: int) -> list[tuple[int, torch.Tensor]]:
    """(global index, which decides the noise; latents) of each sample of a step."""
    parts = trainer.loader.micro_batches(step)
    found = [one for part in parts for one in zip(part.indices, part.examples, strict=True)]
    return [(index, example["latents"]) for index, example in sorted(found, key=itemgetter(0))]


def test_a_batch_that_the_ranks_do_not_divide_trains_what_one_process_trains(pictures: Path) -> None:
    alike = {"train__batch_size": 5, "train__steps": 3}
    cfg = run_config(pictures, parallel__strategy="none", **alike)
    expected = train(alone(), cfg, make_run(pictures.parent, cfg, "five-1"))
    cfg = run_config(pictures, parallel__devices=2, parallel__strategy="full", **alike)
    found = run_ranks(2, train, cfg, make_run(pictures.parent, cfg, "five-2"))[0]
    assert found.losses == pytest.approx(expected.losses, abs=1e-6, rel=0)
    assert difference(found.weights, expected.weights) <= 1e-6


def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_weights_move(pictures: Path) -> None:
    cfg = run_config(pictures, parallel__devices=2, parallel__strategy="full")
    found = run_ranks(2, train_on_nan, cfg, make_run(pictures.parent, cfg, "nan"))
    assert found == [("step 2: the loss is not finite on 1 of 2 ranks", 0.0)] * 2


def train_on_nan(world: World, cfg: RunConfig, run: RunDir) -> tuple[str, float]:
    """Rank 1's model predicts what is not a number in the second step. Returns the error and how far weights moved."""
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    trainer.train_step()
    before = {name: p.detach().clone() for name, p in trainer.trainables.items()}
    if world.rank == 1:
        transformer = trainer.model["transformer"]
        transformer.register_forward_hook(lambda model, arguments, output: (output[0] * float("nan"),))
    try:
        trainer.train_step()
    except FloatingPointError as error:
        moved = max(float((before[n] - p.detach()).abs().max()) for n, p in trainer.trainables.items())  # type: ignore[union-attr]
        return str(error), moved
    finally:
        trainer.close()
    return "trained on", 0.0


def test_a_loaded_weight_that_is_not_finite_ends_all_ranks_with_its_name(pictures: Path) -> None:
    for strategy in ("full", "hybrid"):
        cfg = run_config(pictures, parallel__devices=2, parallel__strategy=strategy, train__non_finite="skip")
        found = run_ranks(2, train_on_damage, cfg, make_run(pictures.parent, cfg, f"damaged-{strategy}"))
        assert found[0] == found[1]
        assert found[0].startswith("model.path: transformer.")
        assert "holds numbers that are not finite, so that no loss is; the file is damaged, or" in found[0]


def train_on_damage(world: World, cfg: RunConfig, run: RunDir) -> str:
    """A weight of rank 1's part of the frozen model is not a number. Returns the error."""
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    frozen = next(p for p in trainer.model.parameters() if not p.requires_grad)
    if world.rank == 1:
        (frozen.to_local() if isinstance(frozen, DTensor) else frozen).detach().view(-1)[-1] = math.nan
    try:
        trainer.train_step()
        trainer.flush_metrics()
    except InputError as error:
        return str(error)
    finally:
        trainer.close()
    return "trained on"


def test_a_step_that_is_not_finite_is_skipped_and_counted_where_that_is_allowed(
    pictures: Path,
) -> None:
    changes = {"parallel__devices": 2, "parallel__strategy": "full", "train__non_finite": "skip", "train__steps": 30}
    cfg = run_config(pictures, **changes)
    outcomes = run_ranks(2, train_over_nan, cfg, make_run(pictures.parent, cfg, "skipped"))
    for moved, saved, losses, warnings, end in outcomes:
        assert moved == [True, False, True]
        assert saved == (1, 3 * 4)
        assert [math.isnan(loss) for loss in losses[:3]] == [False, True, False]
        assert warnings[0] == "step 2: the loss is not finite on 1 of 2 ranks; step skipped, 1 in this run so far"
        assert end == "step 23: the loss is not finite on 1 of 2 ranks, as in the 19 steps before"


def test_gradients_that_are_not_finite_move_no_weight_though_the_loss_is(pictures: Path, tmp_path: Path) -> None:
    cfg = run_config(pictures, parallel__strategy="none", train__non_finite="skip")
    events: list[AnyEvent] = []
    trainer = make_trainer(cfg, make_run(tmp_path, cfg, "gradients"), events)
    trainer.parameters[0].register_hook(lambda gradient: gradient * math.inf)
    before = [parameter.detach().clone() for parameter in trainer.parameters]
    trainer.train_step()
    trainer.close()
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.parameters, strict=True))
    (event,) = steps_of(events)
    assert math.isfinite(event.loss)
    assert not math.isfinite(event.grad_norm)
    assert [event.message for event in events if isinstance(event, WarningEvent)] == [
        f"step 1: the gradient norm is {event.grad_norm}, the loss {event.loss}; step skipped, 1 in this run so far"
    ]


def train_over_nan(
    world: World, cfg: RunConfig, run: RunDir
) -> tuple[list[bool], tuple[int, int], list[float], list[str], str]:
    """Rank 1 predicts what is not a number in the second step, and from the fourth on in each.

    Returns which of three steps moved the weights, what the checkpoint after them tells of (skipped, samples seen),
    the losses, the warnings and the error at the end.
    """
    events: list[AnyEvent] = []
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", events.append)
    if world.rank == 1:
        factor = lambda: float("nan") if trainer.step == 1 or trainer.step >= 3 else 1.0  # noqa: E731
        hook = lambda model, arguments, output: (output[0] * factor(),)  # noqa: E731
        trainer.model["transformer"].register_forward_hook(hook)
    moved = []
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in trainer.parameters]
        trainer.train_step()
        now = zip(before, trainer.parameters, strict=True)
        differ = sum(float((a - b.detach()).abs().sum()) for a, b in now)  # type: ignore[misc]
        moved.append(differ > 0)
    trainer.save()
    path = trainer.checkpointer.wait()
    assert path is not None
    saved = progress_of(path)
    try:
        trainer.train()
    except FloatingPointError as error:
        losses = [event.loss for event in steps_of(events)]
        warnings = [event.message for event in events if isinstance(event, WarningEvent)]
        return moved, (saved.skipped, saved.samples_seen), losses, warnings, str(error)
    finally:
        trainer.close()
    raise AssertionError("trained to the end")


def test_validation_uses_the_same_noise_every_time_and_any_number_of_ranks(pictures: Path) -> None:
    losses = []
    for ranks in (1, 4):
        strategy = "none" if ranks == 1 else "full"
        cfg = run_config(
            pictures, data__validation=3, data__validation_every=1, train__steps=2, parallel__devices=ranks,
            parallel__strategy=strategy, optim__lr=1e-12,
        )  # fmt: skip
        found = run_ranks(ranks, train, cfg, make_run(pictures.parent, cfg, f"validation-{ranks}"))[0]
        losses += [event.loss for event in found.events if isinstance(event, ValidationEvent)]
    assert len(losses) == 4
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-6, rel=0)


def test_samples_come_from_the_same_noise_at_every_step_and_change_with_the_weights(pictures: Path) -> None:
    cfg = run_config(
        pictures, sample__every=1, sample__prompts=("[trigger] one", "two"), sample__size=(32, 48), sample__steps=2,
        data__trigger="ohwx", train__steps=1, optim__lr=1e-1,
    )  # fmt: skip
    run = make_run(pictures.parent, cfg, "samples")
    events: list[AnyEvent] = []
    trainer = make_trainer(cfg, run, events)
    first = [path.read_bytes() for path in trainer.generate_samples()]
    again = [path.read_bytes() for path in trainer.generate_samples()]
    trainer.train_step()
    later = [path.read_bytes() for path in trainer.generate_samples()]
    trainer.close()
    assert first == again
    assert first != later
    assert [event.prompt for event in events if isinstance(event, SampleEvent)] == ["ohwx one", "two"] * 3
    assert (run.samples / "step-000001-1.png").read_bytes() == later[1]


def test_sampling_in_the_middle_changes_nothing_of_the_training(pictures: Path) -> None:
    alike = {
        "optim__ema": 0.5, "adapter__dropout": 0.2, "parallel__devices": 2, "parallel__strategy": "grad_op",
    }  # fmt: skip
    cfg = run_config(pictures, **alike)
    plain = run_ranks(2, train, cfg, make_run(pictures.parent, cfg, "plain"))[0]
    cfg = run_config(
        pictures, sample__every=2, sample__prompts=("one",), sample__size=(32, 32), sample__steps=2,
        data__validation_every=2, checkpoint__every=2, **alike,
    )  # fmt: skip
    busy = run_ranks(2, train, cfg, make_run(pictures.parent, cfg, "busy"))[0]
    assert busy.losses == plain.losses
    assert difference(busy.weights, plain.weights) == 0.0


def test_requests_are_answered_once(pictures: Path) -> None:
    cfg = run_config(pictures, sample__prompts=("one",), sample__size=(32, 32), sample__steps=1)
    run = make_run(pictures.parent, cfg, "requests")
    trainer = make_trainer(cfg, run)
    run.request("save")
    run.request("sample")
    run.request("stop")
    assert trainer.train() == "stopped"
    trainer.close()
    assert trainer.step == 1
    assert [path.name for path in run.samples.iterdir()] == ["step-000001-0.png"]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]
    assert list(run.requests.iterdir()) == []


def test_a_time_limit_ends_a_run_as_its_last_step_does(pictures: Path, tmp_path: Path) -> None:
    sample = {"every": 100_000, "prompts": ["a"], "steps": 1, "size": (32, 32)}
    cfg = run_config(pictures, train__steps=100_000, train__time_limit=1, sample=sample)
    events: list[AnyEvent] = []
    run = make_run(tmp_path, cfg, "limited")
    trainer = make_trainer(cfg, run, events)
    began = time.monotonic()
    assert trainer.train() == "finished"
    assert time.monotonic() - began >= 1
    trainer.close()
    last = trainer.step
    assert 0 < last < 100_000 and [event.step for event in steps_of(events)][-1] == last
    assert progress_of(run.checkpoints / f"step-{last:06d}").step == last
    assert {event.step for event in events if isinstance(event, SampleEvent)} == {0, last}
    lengths = [event.steps for event in events if isinstance(event, LengthEvent)]
    assert lengths[0] == 100_000 and lengths[-1] == last
    assert RunLength.of(cfg, [event for event in events if isinstance(event, LengthEvent)]).num_steps == last


def test_a_request_for_samples_without_prompts_is_answered_with_a_warning(pictures: Path) -> None:
    cfg = run_config(pictures, train__steps=1)
    run = make_run(pictures.parent, cfg, "no-prompts")
    events: list[AnyEvent] = []
    trainer = make_trainer(cfg, run, events)
    run.request("sample")
    assert trainer.train() == "finished"
    trainer.close()
    warnings = [event.message for event in events if isinstance(event, WarningEvent)]
    assert warnings == ["no samples are generated: sample.prompts is empty"]
    assert list(run.requests.iterdir()) == []


def test_a_step_event_says_where_the_time_went(pictures: Path) -> None:
    cfg = run_config(pictures, parallel__devices=2, parallel__strategy="full", train__steps=2)
    found = run_ranks(2, train, cfg, make_run(pictures.parent, cfg, "times"))[0]
    for event in steps_of(found.events):
        parts = (event.seconds_data, event.seconds_forward, event.seconds_backward, event.seconds_optimizer)
        assert all(part > 0 for part in parts)
        assert sum(parts) == pytest.approx(event.seconds)
        assert 0 < event.seconds_communication < event.seconds
        assert event.images_per_second == pytest.approx(4 / event.seconds)


def test_a_run_that_cannot_draw_its_last_samples_has_saved_its_last_step(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = run_config(
        pictures, train__steps=1, sample__every=5, sample__prompts=("one",), sample__size=(32, 32), sample__steps=1
    )
    run = make_run(pictures.parent, cfg, "undrawn")
    trainer = make_trainer(cfg, run)

    def out_of_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no room for the picture")

    monkeypatch.setattr(trainer.family, "sample", out_of_memory)
    trainer.train_step()
    with pytest.raises(OutOfMemoryError, match="no room for the picture"):
        trainer.train()
    trainer.close()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]


def test_the_time_of_copies_that_reduce_among_themselves_is_not_claimed_to_be_known(pictures: Path) -> None:
    cfg = run_config(pictures, parallel__devices=2, parallel__strategy="ddp", train__steps=1)
    found = run_ranks(2, train, cfg, make_run(pictures.parent, cfg, "copies"))[0]
    assert [math.isnan(event.seconds_communication) for event in steps_of(found.events)] == [True]


def evaluate(trainer: Trainer) -> None:
    with trainer._evaluating():
        time.sleep(3)


@pytest.mark.slow
@pytest.mark.parametrize("change", [Trainer.train_step, evaluate])
def test_training_waits_until_what_it_changes_is_copied(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Trainer], object]
) -> None:
    copy = Stager._copy

    def slow_copy(*args: Any) -> dict[str, Any]:
        time.sleep(2)
        return copy(*args)

    monkeypatch.setattr(Stager, "_copy", slow_copy)
    cfg = run_config(pictures, parallel__strategy="none", optim__ema=0.5, optim__lr=1e-2)
    trainer = make_trainer(cfg, make_run(tmp_path, cfg, "run"))
    trainer.train_step()
    saved = state_of(trainer)
    trainer.save()
    change(trainer)
    trainer.checkpointer.wait()
    trainer.close()
    again = make_trainer(cfg, trainer.run)
    assert again.step == 1
    assert difference(state_of(again), saved) == 0.0
    again.close()


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of the trained weights and of their average."""
    assert trainer.ema
    average = {f"average of {name}": tensor.clone() for name, tensor in trainer.ema.average.items()}
    return average | {name: parameter.detach().clone() for name, parameter in trainer.trainables.items()}
