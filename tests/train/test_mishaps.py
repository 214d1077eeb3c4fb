"""Mishaps around a run: each has its message, and nothing that was saved is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image, ImageOps

from tests.commands import launch_py
from tests.runs import alone, make_pictures, make_run, run_config, steps_of
from trainer.config.schema import RunConfig
from trainer.launcher import commands, preflight, torchrun
from trainer.run import process as processes
from trainer.run.events import AnyEvent, LossyWriter, StatusEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.train.loop import Trainer

FOLDERS = ("ranks", "logs", "samples", "requests", "export")
"""Folders of a run that git, archives and hubs leave out where they are empty."""


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    """Four steps on square pictures of its own, a checkpoint after each second."""
    pictures = make_pictures(tmp_path / "pictures", count=4)
    for file in pictures.glob("*.png"):
        with Image.open(file) as image:
            square = ImageOps.fit(image, (64, 64))
        square.save(file)
    return run_config(pictures, parallel__strategy="none", train__steps=4, checkpoint__every=2)


@pytest.fixture
def run(tmp_path: Path, cfg: RunConfig) -> RunDir:
    return make_run(tmp_path, cfg, "run")


COSINE: dict[str, Any] = {"schedule": "cosine"}


def go_on(cfg: RunConfig, run: RunDir, steps: int) -> list[AnyEvent]:
    """Start or continue the run up to this step, as a process would that ends there with a checkpoint."""
    said: list[AnyEvent] = []
    trainer = Trainer(cfg, run, alone(), run.path.parent / "cache", said.append)
    try:
        while trainer.step < steps:
            trainer.train_step()
        trainer.save()
        trainer.checkpointer.wait()
    finally:
        trainer.close()
    return said


def messages(events: list[AnyEvent], kind: type[WarningEvent] | type[StatusEvent]) -> list[str]:
    return [event.message for event in events if isinstance(event, kind) and event.message]


def test_an_image_that_vanishes_costs_a_running_training_nothing_and_is_told_when_it_continues(
    cfg: RunConfig, run: RunDir, tmp_path: Path
) -> None:
    said: list[AnyEvent] = []
    trainer = Trainer(cfg, run, alone(), tmp_path / "cache", said.append)
    trainer.train_step()
    (tmp_path / "pictures" / "02.png").unlink()
    (tmp_path / "pictures" / "02.txt").unlink()
    assert trainer.train() == "finished"
    trainer.close()
    assert len(steps_of(said)) == 4
    assert messages(said, WarningEvent) == []
    longer = cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": 6})})
    assert messages(go_on(longer, run, 6), WarningEvent) == [
        "images, captions or how they are encoded have changed since the checkpoint: from here on the order differs"
    ]


def test_a_cached_example_that_changed_is_named_and_encoded_anew_by_the_next_start(
    cfg: RunConfig, run: RunDir, tmp_path: Path
) -> None:
    go_on(cfg, run, 2)
    files = sorted((tmp_path / "cache" / "examples").rglob("*.safetensors"))
    before = {file: file.read_bytes() for file in files}
    for file, data in before.items():
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(InputError) as error:
        go_on(cfg, run, 4)
    [named] = [file for file in files if str(file) in str(error.value)]
    assert str(error.value) == f"{named}: missing or damaged since it was cached; start again to encode it again"
    assert not named.exists()
    for file, data in before.items():
        if file != named:
            file.write_bytes(data)
    said = go_on(cfg, run, 4)
    assert named.read_bytes() == before[named]
    assert "resumed from step-000002" in messages(said, StatusEvent)


def test_a_checkpoint_that_was_cut_short_is_put_aside_and_the_run_continues_from_the_one_before(
    cfg: RunConfig, run: RunDir
) -> None:
    go_on(cfg, run, 2)
    go_on(cfg, run, 3)
    [part] = (run.checkpoints / "step-000003").glob("*.distcp")
    size = part.stat().st_size
    os.truncate(part, size // 2)
    said = go_on(cfg, run, 4)
    assert messages(said, WarningEvent) == [
        f"step-000003 is damaged and was put aside as damaged-step-000003: {part.name} has {size // 2} bytes, "
        f"{size} were written"
    ]
    assert "resumed from step-000002" in messages(said, StatusEvent)
    assert [event.step for event in steps_of(said)] == [3, 4]


def test_what_is_changed_when_a_run_continues_is_told_or_refused_before_a_rank_is_started(
    cfg: RunConfig, run: RunDir
) -> None:
    go_on(cfg, run, 2)
    with pytest.raises(InputError) as error:
        preflight.continued_run(run, ["adapter.rank=8", "optim.type=schedulefree"])
    assert str(error.value).splitlines() == [
        "command line: adapter.rank: 4 in the checkpoint of step 2, not 8: the checkpoint holds an adapter of that "
        "kind and size; start a new run, with adapter.start to begin from what this one exported",
        "command line: optim.type: adamw in the checkpoint of step 2, not schedulefree: the checkpoint holds the state "
        "of that optimizer; start a new run",
    ]
    changed = preflight.continued_run(run, ["optim.lr=2e-4", "train.batch_size=2"]).config
    assert (
        "changed since it was saved: optim.lr: 0.0001 -> 0.0002; train.batch_size: 4 -> 2 (the data go on at the next "
        "sample, and none is skipped or repeated; optim.lr and train.steps stay as they are)"
    ) in messages(go_on(changed, run, 3), StatusEvent)


def test_a_run_does_not_go_on_to_a_step_or_epoch_that_it_has_passed(cfg: RunConfig, run: RunDir) -> None:
    events = LossyWriter(run.events_file)
    for event in go_on(cfg, run, 3):
        events.write(event)
    kept = run.config_file.read_bytes()
    for change, said in (
        ("train.steps=2", "train.steps: 2 is less than the 3 steps that are trained; raise it, or start a new run"),
        (
            "train.epochs=2.5",
            "train.epochs: 2.5 is less than the 3 epochs that are trained; raise it, or start a new run",
        ),
    ):
        with pytest.raises(InputError) as error:
            preflight.continued_run(run, [change])
        assert str(error.value) == f"command line: {said}"
        assert run.config_file.read_bytes() == kept
    for change in ("train.steps=3", "train.epochs=3"):
        assert preflight.continued_run(run, [change]).config.optim == cfg.optim


@pytest.mark.parametrize(
    ("before", "trained", "after", "said"),
    [
        pytest.param(COSINE, 4, {"steps": 8}, ("0.000146", "0.0005", "cosine now ends at 8"), marks=pytest.mark.slow),
        pytest.param(COSINE, 3, {"steps": 400}, ("0.0005", "0.001", "cosine now ends at 400"), marks=pytest.mark.slow),
        (COSINE, 4, {"epochs": 10}, ("0.000146", "0.000655", "cosine now ends at 10")),
        pytest.param(
            {"schedule": "linear"},
            4,
            {"steps": 8},
            ("0.00025", "0.0005", "linear now ends at 8"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            COSINE,
            4,
            {"steps": 8, "schedule": "constant"},
            ("0.000146", "0.001", "is constant now"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            COSINE | {"steps": 16},
            16,
            {"steps": 20},
            (
                "9.61e-06",
                "9.55e-05",
                "cosine now ends at 20",
                "where that is too much, stop and resume with a lower optim.lr",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(COSINE, 2, {"steps": 5}, None, marks=pytest.mark.slow),  # rises by less than a tenth
        pytest.param(COSINE | {"warmup": 3}, 1, {}, None, marks=pytest.mark.slow),
        pytest.param(COSINE, 4, {"steps": 8, "lr": 2e-3}, None, marks=pytest.mark.slow),  # as was asked
        pytest.param({"schedule": "constant"}, 4, {"steps": 8}, None, marks=pytest.mark.slow),
    ],
)
def test_a_learning_rate_that_rises_when_a_run_goes_on_is_said_with_both_figures(
    cfg: RunConfig,
    run: RunDir,
    before: dict[str, Any],
    trained: int,
    after: dict[str, Any],
    said: tuple[str, ...] | None,
) -> None:
    begun = changed(cfg, before | {"lr": 1e-3})
    go_on(begun, run, trained)
    warnings = messages(go_on(changed(begun, after), run, trained + 1), WarningEvent)
    assert warnings == ([] if said is None else [rise(*said)])


def rise(before: str, after: str, why: str, remedy: str = "") -> str:
    former = f"to go on at the former rate, stop and resume with optim.schedule=constant optim.lr={before}"
    return f"the learning rate rises from {before} to {after}, because optim.schedule {why}; {remedy or former}"


def changed(cfg: RunConfig, values: dict[str, Any]) -> RunConfig:
    """The config with other values of `train` and `optim`."""
    parts = {
        name: section.model_copy(
            update={key: value for key, value in values.items() if key in type(section).model_fields}
        )
        for name, section in (("train", cfg.train), ("optim", cfg.optim))
    }
    return cfg.model_copy(update=parts)


@pytest.mark.slow
def test_a_run_that_was_brought_here_without_its_empty_folders_goes_on_and_is_exported(
    cfg: RunConfig, run: RunDir, tmp_path: Path
) -> None:
    go_on(cfg, run, 2)
    bare = tmp_path / "bare"
    shutil.copytree(run.path, bare)
    for name in FOLDERS:
        shutil.rmtree(bare / name)
    assert launch_py(tmp_path, "--resume", str(bare)).returncode == 0
    shutil.rmtree(bare / "export")
    shutil.rmtree(bare / "logs")
    exported = launch_py(tmp_path, "--export", str(bare))
    assert (exported.returncode, exported.stderr) == (0, "")
    assert Path(exported.stdout.splitlines()[-1]).is_file()


@pytest.mark.parametrize("name", [FOLDERS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FOLDERS[1:])])
def test_what_lies_where_a_folder_of_the_run_belongs_is_named_and_left_alone(
    cfg: RunConfig, run: RunDir, name: str
) -> None:
    go_on(cfg, run, 2)
    shutil.rmtree(run.path / name)
    (run.path / name).write_text("mine")
    for begin in (torchrun.start, lambda cfg, run: commands.begin_export(run, cfg)):
        with pytest.raises(InputError) as error:
            begin(cfg, run)
        assert str(error.value) == (
            f"{run.path / name}: the folder cannot be made (File exists); move away what is there, or make {run.path} "
            "writable"
        )
    assert (run.path / name).read_text() == "mine"


def test_a_clock_that_is_set_makes_no_running_process_look_dead(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(100)"]
    with subprocess.Popen(argv) as process:
        processes.Launch.of(process, argv).write(run)
        boot_time = psutil.boot_time()
        for jump in (-3600.0, 0.0, 3600.0):
            for place in (psutil, psutil._pslinux):
                monkeypatch.setattr(place, "boot_time", lambda jump=jump: boot_time + jump)
            assert processes.alive(run)
        process.kill()
    assert not processes.alive(run)
