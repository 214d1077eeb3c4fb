"""What to do after memory ran out, on the command line and on the page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from app.form.draft import check, from_overrides
from tests.runs import make_run
from trainer.config.load import load_config, stage_config
from trainer.launcher.remedy import with_remedy
from trainer.run import stages
from trainer.run.events import ErrorEvent, EventWriter, RankLine, StatusEvent
from trainer.run.folder import RunDir
from trainer.system.amounts import GIB
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu
from trainer.system.installation import PRESETS

SAID = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 23.50 GiB"


def failed(tmp_path: Path, preset: str, limit: float, *fields: str) -> RunDir:
    """A run of a preset whose ranks had so many GiB and ran out of memory while they trained."""
    cfg = load_config(PRESETS / f"{preset}.yaml", fields).config
    run = make_run(tmp_path, cfg, "failed")
    with EventWriter(run.events_file) as events:
        for state in ("loading", "training", "failed"):
            events.write(StatusEvent(state=state))
    for rank in range(cfg.parallel.world_size if limit else 0):
        with EventWriter(run.rank_file(rank)) as lines:
            memory = int(limit * GIB)
            lines.write(RankLine(rank=rank, step=3, phase="training", allocated=1, reserved=1, peak=1, limit=memory))
    return run


def test_the_retry_holds_both_decided_fields_and_says_what_it_takes(tmp_path: Path) -> None:
    run = failed(tmp_path, "flux2-dev-lora-nf4-1x24gb", 23.50)
    error = ErrorEvent(message=SAID, remedy="save memory")
    found = with_remedy(run, error, [])
    assert [setting.partition("=")[0] for setting in found.retry] == ["train.checkpointing", "parallel.offload_blocks"]
    first, second = found.retry
    assert found.remedy.startswith(f"continue with --resume and '{first}' {second}: by the plan this takes ")
    assert found.remedy.endswith(" of 23.5 GiB; the result stays the same")
    load_config(PRESETS / "flux2-dev-lora-nf4-1x24gb.yaml", found.retry)


def test_the_gpus_of_this_machine_are_asked_where_no_rank_has_said_what_it_has(tmp_path: Path) -> None:
    run = failed(tmp_path, "flux2-dev-lora-nf4-1x24gb", 0)
    error = ErrorEvent(message=SAID, remedy="save memory")
    assert with_remedy(run, error, []) == error
    gpu = Gpu(0, "NVIDIA GeForce RTX 4090", 24564, 0, 0, 0, "8.9")
    assert "of 24.0 GiB" in with_remedy(run, error, [gpu]).remedy


def test_where_nothing_is_left_it_is_said_what_else_there_is(tmp_path: Path) -> None:
    smallest = ("train.checkpointing=full", "adapter.rank=4", "data.resolution=512", "parallel.strategy=full")
    offloaded = ("parallel.cpu_offload=true", "parallel.offload_blocks=0")
    run = failed(tmp_path, "flux1-dev-lora-nf4-1x12gb", 1, *smallest, *offloaded)
    found = with_remedy(run, ErrorEvent(message=SAID, remedy="save memory"), [])
    assert found.retry == ()
    assert found.remedy == "nothing that is searched makes it fit: take more GPUs, larger ones, or a smaller model"


@pytest.mark.parametrize("message", ["RuntimeError: shapes differ", "killed by SIGKILL"])
def test_another_error_keeps_its_remedy(tmp_path: Path, message: str) -> None:
    error = ErrorEvent(message=message, remedy="read the end of the log", retry=("optim.lr=1e-5",))
    assert with_remedy(failed(tmp_path, "quickstart", 2), error, []) == error


def test_a_damaged_run_keeps_its_remedy(tmp_path: Path) -> None:
    run = failed(tmp_path, "flux2-dev-lora-nf4-1x24gb", 23.50)
    run.config_file.write_text("train: 5\n")
    error = ErrorEvent(message=SAID, remedy="save memory")
    assert with_remedy(run, error, []) == error


def test_an_amount_that_no_machine_has_is_not_read_from_a_strangers_message(tmp_path: Path) -> None:
    run = failed(tmp_path, "qwen3-1.7b-base-to-chat-2x24gb", 5, "data.length=512")
    usual = with_remedy(run, ErrorEvent(message=SAID, remedy="save memory"), [])
    huge = SAID.replace("2.00", "9" * 400)
    assert huge != SAID
    assert with_remedy(run, ErrorEvent(message=huge, remedy="save memory"), []).retry != ()
    assert usual.retry != ()


def test_stages_that_are_not_those_of_the_config_keep_the_remedy(tmp_path: Path) -> None:
    run = failed(tmp_path, "qwen3-1.7b-base-to-chat-2x24gb", 5, "data.length=512")
    shutil.rmtree(run.path / "stages")
    error = ErrorEvent(message=SAID, remedy="save memory")
    assert with_remedy(run, error, []) == error
    with pytest.raises(InputError, match=r"has 0 folders, but config\.yaml 3 stages"):
        stages.current(run, run.config())


def in_last_stage(run: RunDir) -> RunDir:
    """The run, with every stage before the last one done."""
    for folder in run.stage_folders[:-1]:
        handed = folder / "weights"
        handed.mkdir()
        stages.write_handover(handed, {"model.path": "model"})
    return run


@pytest.mark.parametrize(
    ("own", "changed"),
    [
        # Only the last stage has an adapter: the others refuse a rounded base.
        (("parallel.cpu_offload=true", "parallel.strategy=full", "train.checkpointing=full", "data.length=512"), "nf4"),
        # The last stage has its own micro-batch, which wins over that of the run.
        (("data.length=512", "stages.preferences.train.micro_batch=8"), "micro_batch"),
    ],
)
def test_in_a_run_with_stages_the_remedy_changes_the_stage_that_failed(
    tmp_path: Path, own: tuple[str, ...], changed: str
) -> None:
    run = in_last_stage(failed(tmp_path, "qwen3-1.7b-base-to-chat-2x24gb", 5, *own))
    found = with_remedy(run, ErrorEvent(message=SAID, remedy="save memory"), [])
    assert any(changed in setting for setting in found.retry)
    assert found.remedy.startswith(f"continue with --resume and {' '.join(found.retry)}: by the plan")
    before, after = run.config(), load_config(run.config_file, found.retry).config
    assert [stage_config(after, at) for at in (0, 1)] == [stage_config(before, at) for at in (0, 1)]
    bare = [setting.removeprefix("stages.preferences.") for setting in found.retry]
    assert stage_config(after, 2) == stage_config(before, 2, bare) != stage_config(before, 2)
    assert stages.changed(before, 2, bare) == after  # as the retry without asking does
    form = check(from_overrides(run.config_file, found.retry))
    assert (form.loaded.config, form.errors) == (after, {})
