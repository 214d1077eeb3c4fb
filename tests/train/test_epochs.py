"""Runs that are given in epochs: their schedule, their end, and how they go on."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.bench import Bench
from tests.commands import launch_py
from tests.distributed import run_ranks
from tests.models.test_unknown_networks import folder_of as plain_folder
from tests.runs import (
    Outcome,
    alone,
    make_pictures,
    make_run,
    make_text,
    run_config,
    steps_of,
    stopped_after,
    text_config,
    train,
)
from trainer.config.schema import RunConfig
from trainer.data.encode import StopRequested
from trainer.data.text.text_files import TextFolder
from trainer.data.text.text_rows import KIND, key_of
from trainer.data.text.text_source import encoder_of
from trainer.data.text.text_stream import TextStream
from trainer.models import families
from trainer.run.events import AnyEvent, EventReader, LengthEvent, StageEvent, StatusEvent, latest_steps
from trainer.run.folder import RunDir
from trainer.run.length import RunLength
from trainer.system.errors import InputError
from trainer.system.index import Index
from trainer.train.loop import Trainer
from trainer.view.report import write_report

COSINE = {"optim__schedule": "cosine", "optim__warmup": 2}


def rows_of(cfg: RunConfig, cache: Path) -> int:
    """Rows of one epoch, counted by hand."""
    family: Any = families.make(cfg, cache)
    folder = TextFolder(tuple(sorted(Path(str(cfg.data.path)).iterdir())))
    stream = TextStream(
        (folder,),
        encoder_of(family),
        cfg.train.seed,
        cfg.data.length,
        cfg.data.shuffle_window,
        epochs=1,
        packing="whole",
    )
    return sum(1 for _ in stream.rows())


def length_of(events: list[AnyEvent]) -> LengthEvent:
    (event,) = [event for event in events if isinstance(event, LengthEvent)]
    return event


def forget_counts(bench: Bench) -> Index:
    """Remove the counted rows of earlier tests. Returns their index."""
    index = Index(bench.root / "cache")
    index.put(KIND, {}, most=0)
    return index


def rates(events: list[AnyEvent]) -> list[float]:
    return [event.lr for event in steps_of(events)]


def cosine(steps: int, lr: float, warmup: int) -> list[float]:
    """Linear warm-up, then half a cosine to 0 at the end (SGDR, arXiv 1608.03983, equation 5, one cycle)."""
    falling = [lr / 2 * (1 + math.cos(math.pi * step / (steps - warmup))) for step in range(steps - warmup)]
    return [lr * (step + 1) / warmup for step in range(warmup)] + falling


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("epochs-text")
    return Bench(root, make_text(root / "text"), text_config, {})


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("epochs-images")
    return Bench(root, make_pictures(root / "pictures", 10), run_config, {})


def test_images_train_two_and_a_half_passes_and_the_cosine_ends_with_them(images: Bench) -> None:
    outcome = images.trained_here("cosine", train__epochs=2.5, **COSINE)
    assert (length_of(outcome.events).steps, length_of(outcome.events).epoch_steps) == (7, 2.5)  # 25 images, 4 a step
    assert rates(outcome.events) == pytest.approx(cosine(7, 1e-4, 2))
    as_steps = images.trained_here("as-steps", train__steps=7, **COSINE)
    assert outcome.losses[:-1] == as_steps.losses[:-1]
    assert outcome.losses[-1] != as_steps.losses[-1], "the last step holds the one image that is left"
    assert length_of(as_steps.events).epoch_steps == 2.5, "a run in steps has an epoch, too"


@pytest.mark.slow
def test_text_trains_two_passes_and_the_rows_are_counted_once(text: Bench) -> None:
    counts = forget_counts(text)
    cfg, run = text.run("twice", train__epochs=2, **COSINE)
    rows = rows_of(cfg, text.root / "cache" / "models")
    outcome = train(alone(), cfg, run)
    steps = math.ceil(2 * rows / 4)
    assert (length_of(outcome.events).steps, length_of(outcome.events).epoch_steps) == (steps, rows / 4)
    assert len(outcome.losses) == steps
    assert rates(outcome.events) == pytest.approx(cosine(steps, 1e-4, 2))
    ((key, count),) = counts.all(KIND).items()
    assert count == b"%d" % rows
    counts.put(KIND, {key: b"5"})
    again = Trainer(cfg, make_run(text.root, cfg, "again"), alone(), text.root / "cache", lambda event: None)
    again.close()
    assert again.num_steps == 3  # of 2 x 5 rows
    other = text.config(train__epochs=2, data__length=32)
    fresh = Trainer(other, make_run(text.root, other, "other"), alone(), text.root / "cache", lambda event: None)
    fresh.close()
    assert fresh.num_steps == math.ceil(2 * rows_of(other, text.root / "cache" / "models") / 4)
    forget_counts(text)


def test_a_damaged_count_in_the_cache_is_counted_again(text: Bench) -> None:
    counts = forget_counts(text)
    cfg, run = text.run("damaged", train__epochs=1)
    trainer = Trainer(cfg, run, alone(), text.root / "cache", lambda event: None)
    trainer.close()
    ((key, count),) = counts.all(KIND).items()
    counts.put(KIND, {key: b"{"})
    again = Trainer(cfg, make_run(text.root, cfg, "repaired"), alone(), text.root / "cache", lambda event: None)
    again.close()
    assert again.num_steps == trainer.num_steps
    assert counts.all(KIND) == {key: count}


def test_rows_are_counted_again_for_another_tokenizer_template_or_class_of_model(text: Bench, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}", encoding="utf-8")

    def key(kind: str) -> str:
        folder = tmp_path / kind
        cfg = text.config(model__path=str(folder), data__chat_template=str(template))
        family: Any = families.make(cfg, text.root / "cache")
        return key_of(cfg, family, "digest")

    plain_folder(tmp_path / "llama", "llama")
    plain_folder(tmp_path / "opt", "opt")  # in whose rows documents would see each other
    names = {file.name for file in (tmp_path / "llama").iterdir() if "token" in file.name}
    assert "tokenizer.json" in names
    for name in names:
        shutil.copy(tmp_path / "llama" / name, tmp_path / "opt" / name)
    keys = [key("llama"), key("llama"), key("opt")]
    file = tmp_path / "llama" / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    keys.append(key("llama"))
    template.write_text("{{ messages | tojson }}", encoding="utf-8")
    keys.append(key("llama"))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def test_a_warm_up_that_is_not_shorter_than_the_epochs_is_refused_once_their_steps_are_known(images: Bench) -> None:
    cfg, run = images.run("warm", train__epochs=2, optim__schedule="linear", optim__warmup=5)
    with pytest.raises(InputError) as refused:
        Trainer(cfg, run, alone(), images.root / "cache", lambda event: None)
    assert str(refused.value) == "optim.warmup: must be less than the 5 steps of train.epochs 2, not 5; lower it"


def test_a_stop_while_rows_are_counted_ends_the_run(text: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.text.text_rows.ROUND", 2)
    counts = forget_counts(text)
    cfg, run = text.run("stop", train__epochs=1)
    events: list[AnyEvent] = []
    run.request("stop")
    with pytest.raises(StopRequested):
        Trainer(cfg, run, alone(), text.root / "cache", events.append)
    said = [(event.state, event.message) for event in events if isinstance(event, StatusEvent)]
    assert said[-1] == ("encoding", "counting the rows of an epoch")
    assert counts.all(KIND) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "images"])
def test_a_run_goes_on_with_the_same_schedule_on_another_number_of_ranks(
    kind: str, request: pytest.FixtureRequest
) -> None:
    bench: Bench = request.getfixturevalue(kind)
    changes = {"train__epochs": 1.5, "parallel__devices": 2, "parallel__strategy": "full"} | COSINE
    straight = bench.trained("straight", 2, **changes)
    cfg, run = bench.run("two-then-one", **changes)
    begin = run_ranks(2, stopped_after, cfg, run, 3)[0]
    forget_counts(bench)  # counted anew, and the same
    one = cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update={"devices": 1})})
    rest: Outcome = run_ranks(1, train, one, run)[0]
    assert length_of(rest.events).steps == length_of(straight.events).steps
    assert rates(straight.events)[3:] == rates(rest.events)
    assert begin + rest.losses == pytest.approx(straight.losses, abs=1e-6)
    assert length_of(rest.events).epoch == pytest.approx(3 / length_of(straight.events).epoch_steps)


def test_another_batch_size_trains_the_samples_that_are_left(images: Bench) -> None:
    cfg, run = images.run("sizes", train__epochs=2)  # 20 images
    stopped_after(alone(), cfg, run, 3)  # of 4 each
    larger = cfg.model_copy(update={"train": cfg.train.model_copy(update={"batch_size": 3})})
    outcome = train(alone(), larger, run)
    event = length_of(outcome.events)
    assert (event.step, event.steps, event.epoch) == (3, 6, 1.2)  # 8 images are left
    assert event.epoch_steps == pytest.approx(10 / 3)
    assert [step.step for step in steps_of(outcome.events)] == [4, 5, 6]


@pytest.mark.slow
def test_stages_in_epochs_count_their_steps_one_after_the_other(tmp_path: Path) -> None:
    make_text(tmp_path / "text")
    make_text(tmp_path / "other", count=7)
    (tmp_path / "preset.yaml").write_text(
        "name: two\nmodel: {family: causal_lm}\nadapter: {type: none}\ndata: {path: text, length: 48}\n"
        "train: {epochs: 1, batch_size: 4, precision: fp32}\nparallel: {device: cpu}\ncheckpoint: {every: 0}\n"
        "stages:\n- {name: first, set: {}}\n- {name: second, set: {data.path: other, train.epochs: 2}}\n"
        "- {name: third, set: {train.steps: 3}}\n",
        encoding="utf-8",
    )
    done = launch_py(tmp_path, "--headless", "preset.yaml", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    run = RunDir.open(tmp_path / "run")
    events = EventReader(run.events_file).read()
    lengths = [event.steps for event in events if isinstance(event, LengthEvent)]
    begins = [event.step for event in events if isinstance(event, StageEvent)]
    assert begins == [0, lengths[0], lengths[0] + lengths[1]]
    assert lengths[2] == 3
    assert [step.step for step in latest_steps(events)] == list(range(1, sum(lengths) + 1))
    length = RunLength.of(run.config(), events)
    assert (length.num_steps, length.stages) == (sum(lengths), tuple(lengths))
    assert f"step {sum(lengths)}/{sum(lengths)}  " in done.stdout
    assert f"length: {lengths[0]} steps, " in done.stdout
    write_report(run)
    assert f"{sum(lengths)} of {sum(lengths)}" in run.report.read_text(encoding="utf-8")
    again = launch_py(tmp_path, "--resume", "run")
    assert again.returncode == 0, again.stderr


def test_an_epoch_without_a_document_has_no_length(tmp_path: Path) -> None:
    (tmp_path / "rare").mkdir()
    (tmp_path / "rare" / "a.txt").write_text("A text that occurs in one of a hundred epochs.", encoding="utf-8")
    folders = [{"path": str(tmp_path / "rare"), "weight": 0.01}]
    cfg = text_config(tmp_path, data={"folders": folders, "length": 48}, train__epochs=3)
    with pytest.raises(InputError) as refused:
        Trainer(cfg, make_run(tmp_path, cfg, "run"), alone(), tmp_path / "cache", lambda event: None)
    message = "train.epochs: the first epoch holds no document; raise the weights, or set train.steps"
    assert str(refused.value) == message
