"""Prompts that are changed while a run trains: encoded on one CPU, drawn by all ranks, kept when the run is resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import nn

from tests.distributed import run_ranks
from tests.runs import alone, make_pictures, make_run, make_text, run_config, text_config
from trainer.config.schema import RunConfig
from trainer.data.prompts import within_host_memory
from trainer.distributed.world import World
from trainer.run.events import AnyEvent, EventReader, EventWriter, PromptsEvent, SampleEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.run.prompts import REQUEST, request_prompts
from trainer.system.errors import InputError
from trainer.train.loop import Trainer
from trainer.weights.files import WeightFiles

SAMPLES: dict[str, Any] = {
    "sample__every": 1,
    "sample__prompts": ("an old [trigger]", "another old one"),
    "sample__size": (32, 32),
    "sample__steps": 2,
    "data__trigger": "fox",
}
RANKS = (pytest.param(1, marks=pytest.mark.slow), 2)
TEXTS: dict[str, Any] = {"sample__every": 1, "sample__prompts": ("Sentence", "Double"), "sample__tokens": 4}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("prompts") / "pictures", count=4)


def steps(world: World, cfg: RunConfig, run: RunDir, *requests: tuple[str, ...] | None) -> list[tuple[int, str]]:
    """Train a step per entry of `requests` and draw after each, from its prompts if it has some. Saves at the end.

    Events go to the run's file, on rank 0. Returns (number of the prompt, its text) of what was drawn last.
    """
    writer = EventWriter(run.events_file)
    emit = (lambda event: None) if world.rank else writer.write
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", emit)
    try:
        for prompts in requests:
            if prompts is not None and world.rank == 0:
                request_prompts(run, prompts)
            trainer.train_step()
            trainer.generate_samples()
        trainer.save()
        trainer._finish_checkpoint()
        return list(enumerate(trainer.sampler.prompts))
    finally:
        trainer.close()
        writer.close()


def read(run: RunDir, kind: type[Any]) -> list[Any]:
    events: list[AnyEvent] = EventReader(run.events_file).read()
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("ranks", RANKS)
def test_requested_prompts_are_drawn_from_then_on_by_any_number_of_ranks(
    pictures: Path, tmp_path: Path, ranks: int
) -> None:
    cfg = run_config(pictures, parallel__devices=ranks, parallel__strategy="none" if ranks == 1 else "full", **SAMPLES)
    run = make_run(tmp_path, cfg, "run")
    drawn = run_ranks(ranks, steps, cfg, run, None, ("a new [trigger]", "a second", "a third"), None)
    assert drawn == [[(0, "a new fox"), (1, "a second"), (2, "a third")]] * ranks
    found = [(event.step, event.index, event.prompt) for event in read(run, SampleEvent)]
    old = [(1, 0, "an old fox"), (1, 1, "another old one")]
    new = [(step, index, prompt) for step in (2, 3) for index, prompt in drawn[0]]
    assert found == old + new
    assert all((run.path / event.path).stat().st_size for event in read(run, SampleEvent))
    (change,) = read(run, PromptsEvent)
    assert (change.step, change.prompts) == (2, ("a new [trigger]", "a second", "a third"))
    assert not (run.requests / REQUEST).exists()
    assert run.config().sample.prompts == cfg.sample.prompts
    assert read(run, WarningEvent) == []


@pytest.mark.slow
def test_an_image_of_a_requested_prompt_is_that_of_a_configured_one(pictures: Path, tmp_path: Path) -> None:
    cfg = run_config(pictures, **SAMPLES)
    run, other = make_run(tmp_path / "a", cfg, "run"), make_run(tmp_path / "b", cfg, "run")
    configured = cfg.with_prompts(("a new one",))
    steps(alone(), cfg, run, ("a new one",))
    steps(alone(), configured, other, None)
    images = [(one.samples / "step-000001-0.png").read_bytes() for one in (run, other)]
    assert images[0] == images[1]
    caches = [{file.name for file in one.path.parent.rglob("examples/*/*.safetensors")} for one in (run, other)]
    assert caches[1] < caches[0]  # the same key, so that no later run encodes it again


@pytest.mark.slow
def test_a_resumed_run_draws_the_prompts_that_were_requested_last_and_overwrites_no_other_sample(
    pictures: Path, tmp_path: Path
) -> None:
    cfg = run_config(pictures, checkpoint__every=1, **SAMPLES)
    run = make_run(tmp_path, cfg, "run")
    steps(alone(), cfg, run, None)
    first = (run.samples / "step-000001-0.png").read_bytes()
    steps(alone(), cfg, run, ("new [trigger]",))
    resumed = steps(alone(), cfg, run)
    assert resumed == [(0, "new fox")]
    for checkpoint in run.checkpoints.iterdir():  # the run goes on from its beginning, and comes to step 1 again
        checkpoint.rename(run.path / checkpoint.name)
    steps(alone(), cfg, run, None)
    assert (run.samples / "step-000001-0.png").read_bytes() == first
    again = read(run, SampleEvent)[-1]
    assert (again.step, again.prompt) == (1, "new fox")
    assert again.path.startswith("samples/step-000001-0-")
    steps(alone(), cfg.with_prompts(("of the config",)), make_run(tmp_path / "other", cfg, "run"))
    assert steps(alone(), cfg.with_prompts(("of the config",)), run) == [(0, "of the config")]


@pytest.mark.parametrize("ranks", RANKS)
def test_prompts_that_cannot_be_encoded_leave_the_former_ones_and_the_run(
    pictures: Path, tmp_path: Path, ranks: int
) -> None:
    cfg = run_config(pictures, parallel__devices=ranks, parallel__strategy="none" if ranks == 1 else "full", **SAMPLES)
    run = make_run(tmp_path, cfg, "run")
    drawn = run_ranks(ranks, without_its_encoder, cfg, run)
    assert drawn == [("an old fox", "another old one")] * ranks
    (warning,) = read(run, WarningEvent)
    assert warning.message.startswith("the samples keep their prompts: ")
    assert len(read(run, SampleEvent)) == 2
    assert read(run, PromptsEvent) == []


def without_its_encoder(world: World, cfg: RunConfig, run: RunDir) -> tuple[str, ...]:
    """Draw after the text encoder was removed from the model's folder and another prompt was requested."""
    writer = EventWriter(run.events_file)
    emit = (lambda event: None) if world.rank else writer.write
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", emit)
    if world.rank == 0:
        (trainer.family.folder / "text_encoder" / "model.safetensors").unlink()
        request_prompts(run, ("new",))
    trainer.train_step()
    trainer.generate_samples()
    trainer.close()
    return trainer.sampler.prompts


@pytest.mark.parametrize("ranks", RANKS)
def test_a_language_model_continues_requested_prompts(tmp_path: Path, ranks: int) -> None:
    strategy = "none" if ranks == 1 else "full"
    cfg = text_config(make_text(tmp_path / "text"), parallel__devices=ranks, parallel__strategy=strategy, **TEXTS)
    run = make_run(tmp_path, cfg, "run")
    run_ranks(ranks, steps, cfg, run, None, ("Once",))
    last = read(run, SampleEvent)[-1]
    assert (last.prompt, last.text[:4]) == ("Once", "Once")
    assert (run.path / last.path).read_text(encoding="utf-8") == last.text


@pytest.mark.slow
def test_a_model_that_also_answers_keeps_its_questions(pictures: Path, tmp_path: Path) -> None:
    asked = {"sample__questions": ["What is it?"], "sample__images": [str(pictures / "00.png")], "sample__tokens": 2}
    cfg = run_config(pictures, model={"family": "bagel"}, **SAMPLES, **asked)
    run = make_run(tmp_path, cfg, "run")
    assert steps(alone(), cfg, run, ("new",)) == [(0, "new"), (1, "What is it?")]
    assert [Path(event.path).suffix for event in read(run, SampleEvent)] == [".png", ".txt"]


@pytest.mark.slow
def test_a_quantized_encoder_encodes_requested_prompts(pictures: Path, tmp_path: Path) -> None:
    cfg = run_config(pictures, quantize={"format": "nf4", "encoders": True}, **SAMPLES)
    run, other = make_run(tmp_path / "a", cfg, "run"), make_run(tmp_path / "b", cfg, "run")
    steps(alone(), cfg, run, ("new",))
    steps(alone(), cfg.with_prompts(("new",)), other, None)
    images = [(one.samples / "step-000001-0.png").read_bytes() for one in (run, other)]
    assert images[0] == images[1]


def test_an_encoder_that_does_not_fit_into_the_host_is_not_loaded(pictures: Path, tmp_path: Path) -> None:
    free = psutil.virtual_memory().available
    large = nn.Linear(free // 2**14, 2**14, device="meta")
    with pytest.raises(InputError, match=r"Linear, which encodes prompts, takes [\d.]+ GiB of host memory"):
        within_host_memory(lambda *_: large, run_config(pictures))(large, WeightFiles({}), ())


def test_a_damaged_request_is_reported_once(tmp_path: Path) -> None:
    cfg = text_config(make_text(tmp_path / "text"), **TEXTS)
    run = make_run(tmp_path, cfg, "run")
    (run.requests / REQUEST).write_text(json.dumps({"prompts": 1}), encoding="utf-8")
    assert steps(alone(), cfg, run, None, None) == [(0, "Sentence"), (1, "Double")]
    (warning,) = read(run, WarningEvent)
    assert "prompts.json: damaged" in warning.message


@pytest.mark.slow
def test_machines_with_caches_of_their_own_get_the_embeddings_from_rank_0(pictures: Path, tmp_path: Path) -> None:
    cfg = run_config(pictures, parallel__devices=2, parallel__strategy="full", **SAMPLES)
    run = make_run(tmp_path, cfg, "run")
    caches = run_ranks(2, apart, cfg, run)
    assert caches[0] == caches[1]
    assert [event.prompt for event in read(run, SampleEvent)] == ["new"]


def apart(world: World, cfg: RunConfig, run: RunDir) -> set[str]:
    """Draw a requested prompt with a cache for each rank. Returns the names of the cached examples."""
    machine = replace(world, local_rank=0, local_size=1)
    writer = EventWriter(run.events_file)
    emit = (lambda event: None) if world.rank else writer.write
    cache = run.path / f"cache-{world.rank}"
    trainer = Trainer(cfg, run, machine, cache, emit)
    if world.rank == 0:
        request_prompts(run, ("new",))
    world.barrier()
    trainer.generate_samples()
    trainer.close()
    return {file.name for file in cache.rglob("examples/*/*.safetensors")}
