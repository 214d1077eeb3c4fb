"""Samples by prompt and step, what is missing of them, and the zip of all."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from app.runs import samples
from app.runs.monitor import Follower
from app.runs.samples import SampleRow
from tests.app.browser import recorded
from tests.runs import write
from trainer.run.events import EventWriter, SampleEvent
from trainer.run.folder import RunDir
from trainer.system.errors import InputError


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two prompts at steps 20 and 40."""
    return recorded(tmp_path / "runs", "drawn")


def rows_of(run: RunDir) -> list[SampleRow]:
    return samples.rows(run, Follower(run).view().samples)


def test_a_row_has_all_steps_of_a_prompt_and_marks_those_whose_file_is_missing(run: RunDir):
    (run.samples / "step-000020-1.png").unlink()
    assert rows_of(run) == [
        SampleRow(0, "a cat", "image", (20, 40), ()),
        SampleRow(1, "a dog", "image", (20, 40), (20,)),
    ]


def test_samples_before_a_change_of_the_prompts_keep_a_row_of_their_own(run: RunDir):
    Image.new("RGB", (64, 64)).save(run.samples / "step-000060-0.png")
    write(run, SampleEvent(step=60, prompt="a fox", index=0, path="samples/step-000060-0.png"))
    assert [(row.index, row.prompt, row.steps) for row in rows_of(run)] == [
        (0, "a cat", (20, 40)),
        (0, "a fox", (60,)),
        (1, "a dog", (20, 40)),
    ]


def test_a_sample_outside_of_the_run_folder_counts_as_missing(run: RunDir):
    outside = run.path.parent / "other.png"
    Image.new("RGB", (64, 64)).save(outside)
    with EventWriter(run.events_file) as events:
        for index, path in enumerate(("../other.png", str(outside))):
            events.write(SampleEvent(step=60, prompt="a fox", index=2 + index, path=path))
    assert [row.missing for row in rows_of(run)[2:]] == [(60,), (60,)]


def test_the_version_changes_with_a_new_sample_and_with_a_file_that_is_gone(run: RunDir):
    follower = Follower(run)
    first = samples.version(run, follower.view())
    assert samples.version(run, follower.view()) == first
    (run.samples / "step-000020-1.png").unlink()
    second = samples.version(run, follower.view())
    write(run, SampleEvent(step=60, prompt="a fox", index=0, path="samples/step-000060-0.png"))
    assert len({first, second, samples.version(run, follower.view())}) == 3


def test_the_zip_holds_the_runs_own_samples_and_nothing_that_is_linked_or_unfinished(run: RunDir):
    (run.path.parent / "key").write_text("private")
    (run.samples / "link.png").symlink_to(run.path.parent / "key")
    (run.samples / "folder").symlink_to(run.path.parent)
    (run.samples / "config.png").symlink_to(run.config_file)
    (run.samples / ".1-2.part").write_bytes(b"half")
    (run.samples / "a\\..\\evil.txt").write_text("text")
    with zipfile.ZipFile(io.BytesIO(b"".join(samples.zipped(run)))) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["drawn/a_.._evil.txt"] + [
            f"drawn/step-0000{step}-{index}.png" for step in (20, 40) for index in (0, 1)
        ]
        assert archive.read("drawn/step-000040-1.png") == (run.samples / "step-000040-1.png").read_bytes()


def test_a_folder_of_samples_that_is_a_link_elsewhere_gives_nothing(run: RunDir):
    run.samples.rename(run.path.parent / "samples")
    run.samples.symlink_to(run.path.parent / "samples")
    with pytest.raises(InputError, match="drawn: has no files of samples"):
        samples.zipped(run)


@pytest.mark.parametrize("name", ["../config.yaml", "..", "", ".hidden", "link.png", "not-there.png"])
def test_only_a_sample_can_be_had_alone(run: RunDir, name: str):
    (run.samples / ".hidden").write_text("")
    (run.samples / "link.png").symlink_to(run.config_file)
    with pytest.raises(InputError, match="not a sample of drawn"):
        samples.own_file(run, name)
    assert samples.own_file(run, "step-000020-0.png") == run.samples / "step-000020-0.png"
