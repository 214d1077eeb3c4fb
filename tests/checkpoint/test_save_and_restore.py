"""Checkpoints on disk: complete or not there, the newest few kept, refused when they hold something else."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed import run_ranks
from tests.runs import alone
from trainer.checkpoint.restore import StoredWeights, newest_intact, restore
from trainer.checkpoint.save import Checkpointer, TrainState
from trainer.distributed.world import World
from trainer.run.folder import RunDir
from trainer.run.manifest import Progress, complete, defect, named, progress_of, to_export, wrong_sum
from trainer.system.errors import InputError


def make_state(width: int = 8, seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return TrainState(model, dict(model.named_parameters()), optimizer, {})


def save(folder: Path, state: TrainState, *steps: int, keep: int = 3) -> Checkpointer:
    saver = Checkpointer(folder, alone(), keep)
    for step in steps:
        saver.save(Progress(step), state)
        saver.wait()
    return saver


def test_a_checkpoint_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, alone(), 3)
    saver.save(Progress(5), make_state())
    assert complete(tmp_path) == []
    assert saver.writing
    assert saver.wait() == tmp_path / "step-000005"
    assert not saver.writing
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]
    manifest = json.loads((tmp_path / "step-000005" / "manifest.json").read_text())
    assert manifest["step"] == 5
    assert all((tmp_path / "step-000005" / name).stat().st_size == size for name, size in manifest["files"].items())


def test_the_manifest_tells_how_far_the_run_is_and_sums_up_every_file(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, alone(), 3)
    progress = Progress(5, samples_seen=20, skipped=1, validation_loss=0.5, config={"name": "fox"}, data="abc", lr=1e-3)
    saver.save(progress, make_state())
    path = saver.wait()
    assert path is not None
    assert progress_of(path) == progress
    content = (path / "manifest.json").read_bytes()
    manifest = json.loads(content)
    unsealed = content.replace(manifest["checksum"].encode(), b"0" * 32)
    assert manifest["checksum"] == hashlib.blake2b(unsealed, digest_size=16).hexdigest()
    files = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "manifest.json"}
    assert manifest["checksums"] == {
        name: hashlib.blake2b(data, digest_size=16).hexdigest() for name, data in files.items()
    }


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "contents.json", "manifest.json"])
def test_a_checkpoint_with_a_flipped_bit_is_neither_exported_nor_resumed(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path)
    save(run.checkpoints, make_state(), 1)
    save(run.checkpoints, make_state(seed=1), 2)
    newest = run.checkpoints / "step-000002"
    sound = (newest / name).read_bytes()
    for place in random.Random(name).sample(range(8 * len(sound)), 24):
        flipped = bytearray(sound)
        flipped[place // 8] ^= 1 << place % 8
        (newest / name).write_bytes(bytes(flipped))
        with pytest.raises(InputError, match="remove this checkpoint, so that the one before it is taken") as refused:
            StoredWeights(to_export(run))
        assert f"step-000002: {name}" in str(refused.value), place
        assert defect(newest) or wrong_sum(newest), place
    (newest / name).write_bytes(sound)
    assert to_export(run) == newest
    assert {*StoredWeights(newest)} == {"weight", "bias"}


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "name", "complaint"),
    [
        (flip_a_bit, "__0_0.distcp", "__0_0.distcp has changed since it was written: its checksum differs"),
        (cut_short, "__0_0.distcp", "__0_0.distcp has {0} bytes, {1} were written"),
        (flip_a_bit, ".metadata", ".metadata has changed since it was written: its checksum differs"),
        (cut_short, "manifest.json", "manifest.json: damaged (Invalid JSON: "),
        (Path.unlink, "manifest.json", "FileNotFoundError: "),
    ],
)
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], None], name: str, complaint: str
) -> None:
    save(tmp_path, make_state(), 1, 2)
    file = tmp_path / "step-000002" / name
    size = file.stat().st_size
    damage(file)
    found, (problem,) = newest_intact(tmp_path, alone())
    assert found == tmp_path / "step-000001"
    expected = f"step-000002 is damaged and was put aside as damaged-step-000002: {complaint.format(size - 1, size)}"
    assert problem.startswith(expected)
    assert (tmp_path / "damaged-step-000002").is_dir()
    save(tmp_path, make_state(), 2)
    assert newest_intact(tmp_path, alone()) == (tmp_path / "step-000002", [])


def test_two_ranks_agree_on_the_newest_checkpoint_that_is_intact(tmp_path: Path) -> None:
    run_ranks(2, save_from_ranks, tmp_path)
    flip_a_bit(tmp_path / "step-000002" / "__1_0.distcp")
    outcomes = run_ranks(2, intact_name, tmp_path)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == "step-000001"


def save_from_ranks(world: World, folder: Path) -> None:
    """Two checkpoints, a file of each rank in both."""
    saver = Checkpointer(folder, world, 3)
    mesh = init_device_mesh("cpu", (world.size,))
    for step in (1, 2):
        state = make_state()
        average = {"part": distribute_tensor(torch.arange(64.0), mesh, [Shard(0)])}
        saver.save(Progress(step), TrainState(state.model, state.trainables, state.optimizer, average))
        saver.wait()


def intact_name(world: World, folder: Path) -> tuple[str | None, list[str]]:
    found, problems = newest_intact(folder, world)
    return found and found.name, problems


def test_the_best_are_kept_besides_the_newest(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, alone(), keep=1, keep_best=2)
    losses = {1: 0.5, 2: 0.1, 3: 0.3, 4: math.nan, 5: 0.9, 6: 0.4}
    for step, loss in losses.items():
        saver.save(Progress(step, validation_loss=loss), make_state())
        saver.wait()
    assert [path.name for path in complete(tmp_path)] == ["step-000002", "step-000003", "step-000006"]


def test_what_training_changes_after_save_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    state = make_state(width=2_000)  # its copy takes longer than to come back from `save`
    before = state.model.weight.detach().clone()
    saver = Checkpointer(tmp_path, alone(), 3)
    saver.save(Progress(1), state)
    saver.wait_for_copy()
    with torch.no_grad():
        for parameter in state.trainables.values():
            parameter.zero_()
    path = saver.wait()
    assert path is not None
    assert torch.equal(StoredWeights(path)["weight"], before)


def test_a_state_that_cannot_be_copied_ends_the_rank(tmp_path: Path) -> None:
    state = make_state()
    nowhere = {"weight": torch.empty(4, device="meta")}
    for _ in range(20):  # the copy fails before or after `save` comes back
        saver = Checkpointer(tmp_path, alone(), 3)
        saver.save(Progress(1), TrainState(state.model, state.trainables, state.optimizer, nowhere))
        with pytest.raises(NotImplementedError, match="meta tensor"):
            saver.wait_for_copy()
        with pytest.raises(NotImplementedError, match="meta tensor"):
            saver.wait()
    assert complete(tmp_path) == []


def test_a_folder_that_was_being_written_when_the_run_was_killed_is_passed_over_and_replaced(tmp_path: Path) -> None:
    save(tmp_path, make_state(), 1)
    torn = tmp_path / ".step-000002"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")
    assert [path.name for path in complete(tmp_path)] == ["step-000001"]
    save(tmp_path, make_state(), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_saving_leaves_a_checkpoint_of_another_version_alone(tmp_path: Path) -> None:
    save(tmp_path, make_state(), 1, 2)
    (tmp_path / "step-000001" / "manifest.json").write_text('{"format": 2}')
    save(tmp_path, make_state(), 3, keep=1)
    assert [path.name for path in named(tmp_path)] == ["step-000001", "step-000003"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, make_state(), 1, 2, 3, 10, keep=2)
    assert [path.name for path in complete(tmp_path)] == ["step-000003", "step-000010"]


def test_the_newest_is_the_one_with_the_highest_number_of_steps(tmp_path: Path) -> None:
    save(tmp_path, make_state(), 999_999, 1_000_000, keep=1)
    assert [path.name for path in complete(tmp_path)] == ["step-1000000"]


def test_what_a_killed_run_left_half_written_is_gone_when_it_starts_again(tmp_path: Path) -> None:
    (tmp_path / ".step-000007").mkdir()
    (tmp_path / ".step-000007" / "__0_0.distcp").write_bytes(b"half")
    Checkpointer(tmp_path, alone(), 3)
    assert list(tmp_path.iterdir()) == []


def test_saving_twice_at_one_step_leaves_the_first_where_it_is(tmp_path: Path) -> None:
    save(tmp_path, make_state(), 1)
    before = (tmp_path / "step-000001").stat().st_ino
    save(tmp_path, make_state(), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert (tmp_path / "step-000001").stat().st_ino == before


def save_where_a_file_is_in_the_way(world: World, folder: Path) -> tuple[str, str | None]:
    """The error of a checkpoint that rank 0 cannot give its name, and the name of the next one."""
    saver, state = Checkpointer(folder, world, 3), make_state()
    saver.save(Progress(1), state)
    with pytest.raises(OSError, match="checkpoint of step 1 could not be written") as error:
        saver.wait()
    saver.save(Progress(2), state)
    path = saver.wait()
    return str(error.value), path.name if path else None


def test_all_ranks_hear_that_rank_0_could_not_name_a_checkpoint_and_the_next_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "step-000001").write_text("a file in the way")
    outcomes = run_ranks(2, save_where_a_file_is_in_the_way, tmp_path)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0].endswith("fix its cause; the checkpoints before it are untouched")
    assert [path.name for path in complete(tmp_path)] == [outcomes[0][1]] == ["step-000002"]
    assert not (tmp_path / ".step-000001").exists()


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, make_state(), 1)
    path, state = tmp_path / "step-000001", make_state()
    other = TrainState(state.model, state.trainables, torch.optim.SGD(state.model.parameters()), {})
    with pytest.raises(InputError) as error:
        restore(path, other)
    assert str(error.value) == (
        f"{path}: holds the state of AdamW, the config's optimizer is SGD; "
        "resume with the optim.type of the run, or start a new run"
    )


def test_restoring_gives_weights_and_optimizer_back(tmp_path: Path) -> None:
    saved, other = make_state(seed=1), make_state(seed=2)
    save(tmp_path, saved, 7)
    assert restore(tmp_path / "step-000007", other).step == 7
    assert all(torch.equal(saved.trainables[name], other.trainables[name]) for name in saved.trainables)
    for mine, theirs in zip(saved.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(saved.optimizer.state[mine]["exp_avg"], other.optimizer.state[theirs]["exp_avg"])
        assert float(other.optimizer.state[theirs]["step"]) == 1


def test_a_learning_rate_changed_in_the_config_wins_over_the_stored_one(tmp_path: Path) -> None:
    save(tmp_path, make_state(), 1)
    other = make_state()
    other.optimizer.param_groups[0]["weight_decay"] = 0.5
    restore(tmp_path / "step-000001", other)
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_a_checkpoint_of_another_shape_is_refused_with_the_tensor_and_both_shapes(tmp_path: Path) -> None:
    save(tmp_path, make_state(width=8), 1)
    path = tmp_path / "step-000001"
    with pytest.raises(InputError) as error:
        restore(path, make_state(width=4))
    assert str(error.value) == (
        f"{path}: holds 2 trainables tensors, the config needs 2; first difference 'bias' ((8,) stored, (4,) needed); "
        "resume with the adapter and optimizer settings of the run, or start a new run"
    )


def test_evaluation_weights_are_what_is_exported_where_there_are_any(tmp_path: Path) -> None:
    state = make_state()
    average = {name: torch.full_like(parameter, 2.0) for name, parameter in state.trainables.items()}
    save(tmp_path, TrainState(state.model, state.trainables, state.optimizer, average), 1)
    weights = StoredWeights(tmp_path / "step-000001")
    assert set(weights) == {"weight", "bias"}
    assert weights["bias"].tolist() == [2.0] * 8
