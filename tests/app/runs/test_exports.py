"""What is listed of a run's exports and checkpoints, how it was verified, and what may be deleted."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import psutil
import pytest

from app.runs import exports
from app.runs.exports import Checkpoint
from app.runs.monitor import Follower, RunView
from tests.app.browser import recorded
from tests.runs import make_pictures, run_config, write
from trainer.run.events import EventWriter, ExportEvent, StatusEvent
from trainer.run.folder import RunDir
from trainer.run.manifest import sealed
from trainer.run.process import Launch
from trainer.system.errors import InputError


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return recorded(tmp_path / "runs", "run", [StatusEvent(state="stopped", step=40)])


def view_of(run: RunDir) -> RunView:
    return Follower(run).view()


def save_checkpoint(run: RunDir, step: int, loss: float | None = None, written: int = 5) -> Path:
    folder = run.checkpoints / f"step-{step:06d}"
    folder.mkdir()
    (folder / "weights").write_bytes(b"x" * written)
    facts = {"step": step, "files": {"weights": 5}, "config": {}, "validation_loss": loss}
    (folder / "manifest.json").write_bytes(sealed(facts))
    return folder


def by_step(run: RunDir, is_alive: bool = False, exporting: Path | None = None) -> dict[int, Checkpoint]:
    return {one.step: one for one in exports.checkpoints(run, is_alive, exporting)}


def test_an_export_that_is_still_being_written_is_neither_listed_nor_offered(run: RunDir):
    (run.export / "lora.safetensors").write_bytes(b"weights")
    (run.export / "draft-lora.safetensors").write_bytes(b"wei")
    (run.export / "draft-merged").mkdir()
    (run.export / "draft-merged" / "config.json").write_text("{}")
    (run.export / "merged.former").mkdir()
    (run.export / "merged.former" / "config.json").write_text("{}")
    view = view_of(run)
    [listed] = exports.listed(run, view, is_exporting=False)
    assert (listed.name, listed.size, listed.is_being_replaced) == ("lora.safetensors", 7, True)
    assert [(one.name, one.size) for one in exports.unfinished(run, view)] == [("lora.safetensors", 3), ("merged", 2)]
    for name in ("draft-lora.safetensors", "draft-merged/config.json", "merged.former/config.json"):
        with pytest.raises(InputError, match="is not an exported file of run"):
            exports.file_of(run, view, name)


def test_an_interrupted_export_is_not_taken_for_one_that_goes_on(run: RunDir):
    (run.export / "lora.safetensors").write_bytes(b"weights")
    (run.export / "draft-lora.safetensors").write_bytes(b"wei")
    os.utime(run.export / "draft-lora.safetensors", (0, time.time() - 1000))
    view = view_of(run)
    assert [file.is_being_replaced for file in exports.listed(run, view, is_exporting=False)] == [False]
    assert [file.is_being_replaced for file in exports.listed(run, view, is_exporting=True)] == [True]
    assert [one.is_recent for one in exports.unfinished(run, view)] == [False]


def test_an_interrupted_export_with_a_date_to_come_was_written_when_it_was_copied(run: RunDir):
    """Else it would be taken for one that goes on until that day."""
    draft = run.export / "draft-lora.safetensors"
    draft.write_bytes(b"wei")
    os.utime(draft, (4e9, 4e9))
    (one,) = exports.unfinished(run, view_of(run))
    assert one.written == draft.stat().st_ctime < time.time()


def test_a_finished_export_of_a_run_that_is_called_draft_is_listed(run: RunDir):
    (run.export / "draft-one.safetensors").write_bytes(b"weights")
    write(run, ExportEvent(path="export/draft-one.safetensors", what="adapter", format="auto"))
    assert [file.name for file in exports.listed(run, view_of(run), is_exporting=False)] == ["draft-one.safetensors"]
    assert exports.unfinished(run, view_of(run)) == []


def test_the_check_of_an_export_is_that_of_its_last_event_and_holds_for_a_folders_files(run: RunDir):
    (run.export / "merged").mkdir()
    (run.export / "merged" / "model.safetensors").write_bytes(b"weights")
    (run.export / "own.txt").write_text("notes")
    with EventWriter(run.events_file) as events:
        for difference in (0.3, 2.1e-3):
            event = ExportEvent(path="export/merged", what="merged", format="diffusers", difference=difference)
            events.write(event)
    found = {file.name: file for file in exports.listed(run, view_of(run), is_exporting=False)}
    assert found["merged/model.safetensors"].check == "verified: reloaded and equal within rounding (2.1e-03)"
    assert (found["merged/model.safetensors"].what, found["own.txt"].what, found["own.txt"].check) == ("merged", "", "")
    assert (found["merged/model.safetensors"].is_verified, found["own.txt"].is_verified) == (True, False)


@pytest.mark.parametrize(
    ("difference", "dtype", "words"),
    [
        (1.3e-3, "bf16", "verified: reloaded and equal within bf16 rounding (1.3e-03)"),
        (1.3e-3, "", "verified: reloaded and equal within rounding (1.3e-03)"),
        (0.0, "fp32", "verified: reloaded and exactly equal"),
        (math.nan, "fp32", ""),
        (0.4, "bf16", "reloaded, it differs from what was trained by 4.0e-01: do not use it"),
    ],
)
def test_a_check_is_said_in_words(difference: float, dtype: str, words: str):
    event = ExportEvent(path="a", what="adapter", format="auto", difference=difference, dtype=dtype)
    assert exports.check_in_words(event) == words


def test_only_what_the_config_supports_can_be_chosen(tmp_path: Path):
    images = make_pictures(tmp_path / "images", count=1)
    found = exports.choices(run_config(images))
    assert list(found) == ["adapter", "merged"]
    assert found["adapter"]["kohya"] == ("bf16", "fp16", "fp32")
    assert found["merged"] == {
        "auto": ("bf16", "fp16", "fp32"),
        "diffusers": ("bf16", "fp16", "fp32"),
        "comfyui": ("bf16", "fp16", "fp32", "fp8"),
        "single_file": ("bf16", "fp16", "fp32", "fp8"),
    }
    assert list(exports.choices(run_config(images, adapter__type="none"))) == ["full"]
    assert list(exports.choices(run_config(images, adapter={"type": "boft"}))["adapter"]) == [
        "auto",
        "comfyui",
        "lycoris",
    ]


def test_the_name_of_a_file_can_be_any_bytes(run: RunDir):
    Path(os.fsdecode(os.fsencode(run.export) + b"/\xff.safetensors")).write_bytes(b"weights")
    [file] = exports.listed(run, view_of(run), is_exporting=False)
    assert file.name == "\N{REPLACEMENT CHARACTER}.safetensors"
    assert exports.file_of(run, view_of(run), file.name).read_bytes() == b"weights"


def test_checkpoints_are_listed_newest_first_with_what_their_deletion_means(run: RunDir):
    save_checkpoint(run, 20, loss=0.1)
    save_checkpoint(run, 30, loss=0.3)
    save_checkpoint(run, 40, loss=0.2)
    save_checkpoint(run, 50, written=4)
    found = by_step(run)
    assert list(found) == [50, 40, 30, 20]
    assert found[50].problem == "weights has 4 bytes, 5 were written"
    assert found[50].consequence == "Neither a resume nor an export can use it."
    assert found[40].consequence == (
        "It is the newest: without it, a resume goes on from step 30, and an export takes the weights of that step. "
        "The 10 steps after it would be lost."
    )
    assert found[20].consequence == (
        "A resume does not need it: that takes step 40. Nothing of step 20 can be exported then. It has the lowest "
        "validation loss."
    )
    assert [(one.step, one.is_newest, one.is_best) for one in found.values() if one.is_usable] == [
        (40, True, False),
        (30, False, False),
        (20, False, True),
    ]
    assert (found[40].validation_loss, found[50].validation_loss) == (0.2, None)
    assert {one.refusal for one in found.values()} == {""}


def test_the_newest_checkpoint_of_a_running_run_and_that_of_an_export_stay(run: RunDir):
    first = save_checkpoint(run, 20)
    newest = save_checkpoint(run, 40)
    process = psutil.Process()
    Launch(process.pid, process.create_time(), process.cmdline()).write(run)
    assert by_step(run, is_alive=True)[20].refusal == by_step(run, exporting=first)[40].refusal == ""
    assert by_step(run, exporting=first)[20].refusal == "It is being exported. Wait until that is done."
    with pytest.raises(InputError, match=r"step-000040 is not deleted\. The run is running"):
        exports.delete_checkpoint(run, "checkpoints/step-000040", None)
    exports.delete_checkpoint(run, "checkpoints/step-000020", None)
    assert list(run.checkpoints.iterdir()) == [newest]


def test_what_is_not_a_checkpoint_of_the_run_is_never_deleted(run: RunDir, tmp_path: Path):
    outside = tmp_path / "step-000060"
    save_checkpoint(run, 60).rename(outside)
    (run.checkpoints / "step-000060").symlink_to(outside)
    os.mkfifo(run.checkpoints / "step-000070")
    for name in ("checkpoints/step-000060", "checkpoints/step-000070"):
        with pytest.raises(InputError, match="Remove it by hand"):
            exports.delete_checkpoint(run, name, None)
    for name in ("checkpoints", ".", "../run/checkpoints/step-000060", "checkpoints/step-000099"):
        with pytest.raises(InputError, match="not a checkpoint of run"):
            exports.delete_checkpoint(run, name, None)
    assert outside.is_dir()
    assert by_step(run)[60].refusal


def test_checkpoints_of_stages_that_are_done_are_listed_as_not_needed(run: RunDir):
    for stage in ("1-first", "2-second"):
        (run.path / "stages" / stage / "checkpoints").mkdir(parents=True)
    (run.path / "stages" / "not-a-stage").mkdir()
    save_checkpoint(run, 20)
    (run.path / "stages" / "1-first" / "weights").mkdir()
    save_checkpoint(run, 5)
    found = exports.checkpoints(run, is_alive=True, exporting=None)
    assert [(one.name, one.stage) for one in found] == [
        ("stages/2-second/checkpoints/step-000005", "2-second"),
        ("stages/1-first/checkpoints/step-000020", "1-first"),
    ]
    assert (bool(found[0].refusal), found[1].refusal) == (True, "")
    assert found[1].consequence == "Its stage is done: neither a resume nor an export needs it."


def test_a_checkpoint_whose_deletion_was_interrupted_is_not_in_the_way_of_the_next(run: RunDir):
    save_checkpoint(run, 20)
    left = run.checkpoints / ".step-000020.deleted"
    left.mkdir()
    (left / "weights").write_bytes(b"x")
    exports.delete_checkpoint(run, "checkpoints/step-000020", None)
    assert list(run.checkpoints.iterdir()) == []
