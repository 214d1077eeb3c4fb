"""Runs that go on from any checkpoint of another run, which stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import alone, make_pictures, make_run, run_config, steps_of
from trainer.config.schema import RunConfig
from trainer.launcher import preflight
from trainer.run import process
from trainer.run.branch import branch
from trainer.run.events import CheckpointEvent, EventReader, EventWriter, SampleEvent, ValidationEvent
from trainer.run.folder import RunDir
from trainer.run.manifest import complete
from trainer.system.errors import InputError
from trainer.train.loop import Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Four steps with a checkpoint and a sample at each."""
    root = tmp_path_factory.mktemp("branch")
    cfg = run_config(
        make_pictures(root / "pictures", 4),
        name="fox",
        optim__lr=1e-2,
        train__steps=4,
        checkpoint={"every": 1, "keep": 10},
        sample={"every": 1, "prompts": ["a"], "size": [32, 32], "steps": 1},
    )
    run = make_run(root, cfg, "first")
    with_events(cfg, run)
    return run


def with_events(cfg: RunConfig, run: RunDir) -> list[float]:
    """Train to the end with the events in the run's file, as a rank does. Returns the losses."""
    with EventWriter(run.events_file) as writer:
        trainer = Trainer(cfg, run, alone(), run.path.parent / "cache", writer.write)
        try:
            trainer.train()
        finally:
            trainer.close()
    return [event.loss for event in steps_of(EventReader(run.events_file).read())]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_goes_on_from_an_older_checkpoint_as_the_first_did_from_there(run: RunDir) -> None:
    before = tree(run.path)
    new, loaded = preflight.branched_run(run, 2, ())
    assert new.path.parent == run.path.parent
    assert [path.name for path in complete(new.checkpoints)] == ["step-000002"]
    events = EventReader(new.events_file).read()
    assert [event.step for event in steps_of(events)] == [1, 2]
    assert process.status(new) == "stopped"
    assert all((new.path / event.path).is_file() for event in events if isinstance(event, SampleEvent))
    assert {event.step for event in events if isinstance(event, CheckpointEvent)} == {1, 2}
    losses = with_events(loaded.config, new)
    assert losses == [event.loss for event in steps_of(EventReader(run.events_file).read())]
    assert tree(run.path) == before


def test_of_what_a_stranger_calls_a_sample_only_samples_are_copied(run: RunDir, tmp_path: Path) -> None:
    first = branch(run, 1)
    (first.path / "launch.json").write_text("{}")
    with EventWriter(first.events_file) as writer:
        for path in ("launch.json", "samples/../launch.json", "../tiny/config.yaml", "samples/gone.png"):
            writer.write(SampleEvent(step=1, prompt="a", index=0, path=path))
        writer.write(CheckpointEvent(step=1, path="checkpoints/step-000001"))
    with pytest.raises(InputError, match="not a file of"):
        branch(first, 1)
    lines = first.events_file.read_text().splitlines()
    first.events_file.write_text("\n".join(line for line in lines if "../tiny" not in line) + "\n")
    new = branch(first, 1)
    assert not (new.path / "launch.json").exists()
    assert {file.name for file in new.samples.iterdir()} == {file.name for file in first.samples.iterdir()}


def test_settings_may_change_and_what_cannot_go_on_leaves_no_run(run: RunDir) -> None:
    _, loaded = preflight.branched_run(run, 3, ["optim.lr=5e-5", "train.steps=9"])
    assert (loaded.config.optim.lr, loaded.config.train.steps) == (5e-5, 9)
    before = sorted(run.path.parent.iterdir())
    for wanted, change, message in (
        (2, ["adapter.rank=8"], "adapter.rank: 4 in the checkpoint of step 2, not 8"),
        (3, ["train.steps=2"], "train.steps"),
        (9, [], "has no checkpoint of step 9; name one of the steps 1, 2, 3 and 4"),
        ("best", [], "no checkpoint has a validation loss"),
    ):
        with pytest.raises(InputError, match=message):
            preflight.branched_run(run, wanted, change)
    assert sorted(run.path.parent.iterdir()) == before


def test_a_copy_of_a_damaged_checkpoint_is_none(run: RunDir, tmp_path: Path) -> None:
    new = branch(run, 1)
    file = next(file for file in sorted((new.checkpoints / "step-000001").iterdir()) if file.suffix == ".distcp")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    before = sorted(run.path.parent.iterdir())
    with pytest.raises(InputError, match="has changed since it was written"):
        branch(new, 1)
    assert sorted(run.path.parent.iterdir()) == before


def test_each_validation_that_is_the_best_so_far_saves_a_checkpoint(tmp_path: Path) -> None:
    cfg = run_config(
        make_pictures(tmp_path / "pictures", 6),
        optim__lr=3e-2,
        train__steps=6,
        data__validation=2,
        data__validation_every=1,
        checkpoint={"every": 0, "keep": 10, "keep_best": 1},
    )
    for parts in ([6], [3, 6]):  # at once, and resumed
        run = make_run(tmp_path, cfg, f"run-{len(parts)}")
        for steps in parts:
            part = cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": steps})})
            with_events(part, run)
        losses = {e.step: e.loss for e in EventReader(run.events_file).read() if isinstance(e, ValidationEvent)}
        best = {step for step in losses if losses[step] == min(losses[s] for s in losses if s <= step)}
        saved = {event.step for event in EventReader(run.events_file).read() if isinstance(event, CheckpointEvent)}
        assert saved == best | set(parts)
        assert len(best) > 1
