"""Captioning jobs as real processes: written captions, kills, stops, several ranks, and who may overwrite what."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from PIL import Image

from app.data import captions as caption_files
from app.data.captioning import Captioning, Progress, choose
from app.data.captions import Captions, Card
from tests.captioning.models import write_florence2, write_qwen2_5_vl
from tests.commands import LAUNCH, launch_py
from tests.runs import alone, make_pictures
from trainer.captioning.work import caption_job
from trainer.distributed.store import KeyValueStore
from trainer.run import process
from trainer.run.captioning import Applied, Asked, CaptionJob, CaptionRequest, Written, jobs
from trainer.run.folder import RunDir, is_run
from trainer.run.process import Launch
from trainer.system import files
from trainer.system.errors import InputError

TOKENS = 16
LONG = 200
"""Tokens of an answer that takes a part of a second."""
WAIT_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2_5_vl(tmp_path_factory.mktemp("models") / "vl")


def uncaptioned(folder: Path, count: int = 6) -> Path:
    make_pictures(folder, count)
    for file in folder.glob("*.txt"):
        file.unlink()
    return folder


def request(folder: Path, model: Path | str = "/model", **changes: Any) -> CaptionRequest:
    given = {"folder": str(folder), "model": str(model), "precision": "fp32", "device": "cpu", "tokens": TOKENS}
    return CaptionRequest.checked(given | changes)


def until(captioning: Captioning, job: CaptionJob, condition: Callable[[Progress], bool]) -> Progress:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        progress = captioning.follow(job)
        if condition(progress):
            return progress
        assert progress.state != "failed", progress.error
        time.sleep(0.02)
    raise AssertionError(f"not within {WAIT_S} s: {progress}")


def texts(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.glob("**/*.txt"))}


def command(root: Path, model: Path, *more: object) -> Any:
    options = ("--model", model, "--device", "cpu", "--dtype", "fp32", "--tokens", TOKENS)
    return launch_py(root, "--caption", "pictures", *options, *more)


# --- without processes: the answers are in the job's folder already ---------------------------------------------------


def made(root: Path, folder: Path, **changes: Any) -> CaptionJob:
    """A job whose model has written a caption of every image, and said so by its end."""
    asked = request(folder, **changes)
    job = CaptionJob.create(root / "runs", asked, choose(asked, {}))
    for image in job.images():
        job.add(Written(image.name, f"words about {image.name}"))
    return job


def test_captions_are_written_next_to_the_images_once_and_taken_back_together(tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 3)
    (folder / "00.txt").write_text("a person's\n", encoding="utf-8")
    job, captioning = made(tmp_path, folder), Captioning(tmp_path / "runs")
    assert [image.name for image in job.images()] == ["01.png", "02.png"]
    assert captioning.follow(job).written == 2
    assert captioning.follow(job).written == 2
    after = {"00.txt": "a person's\n", "01.txt": "words about 01.png\n", "02.txt": "words about 02.png\n"}
    assert texts(folder) == after
    assert Captioning(tmp_path / "runs").follow(job).written == 2, "another page"
    assert captioning.undo(job) == (2, 0)
    assert texts(folder) == {"00.txt": "a person's\n"}
    assert Captioning(tmp_path / "runs").follow(job).written == 2, "what was taken back is not written again"
    assert texts(folder) == {"00.txt": "a person's\n"}


def test_a_person_who_types_meanwhile_wins_and_is_named(tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 3)
    job, captioning = made(tmp_path, folder), Captioning(tmp_path / "runs")
    Captions(tmp_path / "runs" / "drafts" / "captions.jsonl").save(folder / "01.png", None, "typed meanwhile")
    progress = captioning.follow(job)
    assert progress.kept == (f"{folder / '01.txt'}: was written meanwhile; left as it is",)
    assert progress.written == 2 and texts(folder)["01.txt"] == "typed meanwhile\n"
    assert captioning.undo(job) == (2, 0) and texts(folder) == {"01.txt": "typed meanwhile\n"}


def test_undo_of_a_job_leaves_what_was_typed_before_between_and_after(tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 4)
    editor = Captions(tmp_path / "runs" / "drafts" / "captions.jsonl")
    asked = request(folder)
    job = CaptionJob.create(tmp_path / "runs", asked, choose(asked, {}))
    captioning = Captioning(tmp_path / "runs")
    editor.save(folder / "03.png", None, "before")
    job.add(Written("00.png", "first"))
    captioning.follow(job)
    editor.save(folder / "00.png", "first", "corrected")
    job.add(Written("01.png", "second"))
    job.add(Written("02.png", "third"))
    captioning.follow(job)
    editor.save(folder / "02.png", "third", "after")
    assert captioning.undo(job) == (1, 2), "two were changed since"
    assert texts(folder) == {"00.txt": "corrected\n", "02.txt": "after\n", "03.txt": "before\n"}
    assert editor.undo() == 1 and texts(folder)["02.txt"] == "third\n", "one change at a time, as before"
    assert editor.undo() == 1 and texts(folder)["00.txt"] == "first\n"
    assert editor.undo() == 1 and "03.txt" not in texts(folder)


def test_what_was_written_before_a_crash_is_neither_lost_nor_written_twice(tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 3)
    job = made(tmp_path, folder)
    (folder / "00.txt").write_text("words about 00.png\n", encoding="utf-8")  # written, but not noted
    with (job.path / "captions.jsonl").open("ab") as torn:
        torn.write(b'{"name": "02.png", "capt')
    job.add(Written("03.png", "an image that was not asked for"))
    progress = Captioning(tmp_path / "runs").follow(job)
    assert progress.written == 3 and progress.kept == ()
    assert sorted(texts(folder)) == ["00.txt", "01.txt", "02.txt"]
    lines = (job.path / "captions.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines[-2] == '{"name": "02.png", "capt' and '"03.png"' in lines[-1]


def test_only_images_without_a_caption_are_chosen_unless_more_is_asked_for(tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 6)
    (folder / "00.txt").write_text("a person's\n", encoding="utf-8")
    (folder / "01.txt").write_text("\n", encoding="utf-8")
    (folder / "02.txt").write_text("a model's\n", encoding="utf-8")
    (folder / "03.txt").write_bytes(b"\xff\xfe not UTF-8")
    (folder / "metadata.jsonl").write_text('{"file_name": "04.png", "text": "listed"}\n', encoding="utf-8")
    (folder / "05.webp").write_bytes((folder / "05.png").read_bytes())
    earlier = {Path(os.path.realpath(folder / name)): "a model's" for name in ("00.txt", "02.txt")}
    assert choose(request(folder), earlier) == [Asked("01.png", ""), Asked("05.png")]
    assert [asked.name for asked in choose(request(folder, overwrite="model"), earlier)] == [
        "01.png",
        "02.png",
        "05.png",
    ]
    everything = choose(request(folder, overwrite="all"), {})
    assert [asked.name for asked in everything] == ["00.png", "01.png", "02.png", "04.png", "05.png"]
    assert everything[0].before == "a person's"


def test_images_of_archives_and_those_with_a_caption_in_a_table_are_left_out_and_only_a_folder_is_taken(tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 2)
    archives = tmp_path / "archives"
    archives.mkdir()
    with tarfile.open(archives / "a.tar", "w") as archive:
        archive.add(folder / "00.png", "inside.png")
    inside = f"--caption {archives}: its images are inside of tables or archives, where no captions are written; unpack"
    with pytest.raises(InputError, match=inside):
        choose(request(archives, overwrite="all"), {})
    for path, why in ((archives / "a.tar", "not a folder"), (tmp_path / "none", "no such folder")):
        with pytest.raises(InputError, match=f"--caption {path}: {why}; name a folder of images"):
            choose(request(path), {})
    (folder / "metadata.csv").write_text("file_name,text\n00.png,a caption of a table\n", encoding="utf-8")
    assert choose(request(folder), {}) == [Asked("01.png")]


def test_a_folder_that_was_renamed_is_missing_although_captions_wait_for_it(tmp_path, model):
    folder = uncaptioned(tmp_path / "pictures", 2)
    made(tmp_path, folder)
    folder.rename(tmp_path / "renamed")
    with pytest.raises(InputError, match=f"--caption {folder}: no such folder; name a folder of images"):
        Captioning(tmp_path / "runs").start(request(folder, model))
    (tmp_path / "renamed").rename(folder)
    assert Captioning(tmp_path / "runs").start(request(folder, model)) is None
    assert sorted(texts(folder)) == ["00.txt", "01.txt"]


def test_folders_that_are_set_apart_as_masks_get_no_captions(tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 1)
    for other in (folder / "masks" / "of_people", folder / "masks2", tmp_path / "regularization"):
        uncaptioned(other, 1)
    apart = (folder / "masks", folder, tmp_path, tmp_path / "regularization")
    assert choose(request(folder), {}, apart) == [Asked("00.png"), Asked("masks2/00.png")]


def test_a_folder_without_images_is_refused_in_words_of_captions(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as refused:
        choose(request(tmp_path / "empty"), {})
    assert str(refused.value) == f"--caption: {tmp_path}/empty: the folder is empty; put images into it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user for a moment")
def test_a_folder_that_cannot_be_written_to_is_refused_before_a_model_is_loaded(tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 1)
    uncaptioned(folder / "below", 1)
    for above in (folder, *folder.parents):
        above.chmod(above.stat().st_mode | 0o055)
    folder.chmod(0o777)
    os.seteuid(65534)
    try:
        with pytest.raises(InputError, match=f"--caption {folder}: no captions can be written into {folder}/below;"):
            choose(request(folder), {})
    finally:
        os.seteuid(0)


def test_undo_of_a_folder_goes_back_job_by_job_past_those_that_wrote_nothing(tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 2)
    (folder / "00.txt").write_text("a person's\n", encoding="utf-8")
    captioning = Captioning(tmp_path / "runs")
    captioning.follow(made(tmp_path, folder))
    everything = request(folder, overwrite="all")
    second = CaptionJob.create(tmp_path / "runs", everything, choose(everything, {}))
    second.add(Written("00.png", "other words"))
    captioning.follow(second)
    CaptionJob.create(tmp_path / "runs", everything, choose(everything, {}))  # failed before its first answer
    assert captioning.undo_latest(folder) == (1, 0)
    assert texts(folder) == {"00.txt": "a person's\n", "01.txt": "words about 01.png\n"}
    assert captioning.undo_latest(folder) == (1, 0)
    assert texts(folder) == {"00.txt": "a person's\n"}
    with pytest.raises(InputError, match=f"{folder}: no captions of a model are left to take back"):
        captioning.undo_latest(folder)


def test_undo_of_a_job_restores_captions_whose_changes_the_editors_log_has_dropped(tmp_path, monkeypatch):
    folder = uncaptioned(tmp_path / "pictures", 8)
    for number in range(6):
        (folder / f"0{number}.txt").write_text(f"a person's {number}\n", encoding="utf-8")
    before = texts(folder)
    job, captioning = made(tmp_path, folder, overwrite="all"), Captioning(tmp_path / "runs")
    assert captioning.follow(job).written == 8
    log = tmp_path / "runs" / "drafts" / "captions.jsonl"
    (folder / "01.txt").write_text("changed since\n", encoding="utf-8")
    monkeypatch.setattr(caption_files, "MOST_HISTORY", log.stat().st_size)
    other = uncaptioned(tmp_path / "other", 1) / "00.png"
    for number in range(3):
        Captions(log).write(Card(other, ""), f"typed {number}")
    assert len(log.read_text(encoding="utf-8").splitlines()) < 8
    assert captioning.undo(job) == (7, 1)
    assert texts(folder) == before | {"01.txt": "changed since\n"}


def test_a_stopped_job_is_not_continued_once_a_later_one_has_answers(tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 3)
    runs, everything = tmp_path / "runs", request(folder, overwrite="all")
    captioning = Captioning(runs)
    first = CaptionJob.create(runs, everything, choose(everything, {}))
    first.add(Written("00.png", "words"))
    assert captioning._unfinished(everything) == first
    tags = request(folder, style="tags")
    second = CaptionJob.create(runs, tags, choose(tags, {}))
    assert captioning._unfinished(everything) == first, "the second wrote nothing"
    assert captioning._unfinished(tags) == second
    second.add(Written("01.png", "tag"))
    assert captioning._unfinished(everything) is None, "what the second one wrote is to be written anew"


def test_a_persons_caption_that_is_overwritten_on_request_comes_back(tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 2)
    (folder / "00.txt").write_text("a person's\n", encoding="utf-8")
    job, captioning = made(tmp_path, folder, overwrite="all"), Captioning(tmp_path / "runs")
    captioning.follow(job)
    assert texts(folder)["00.txt"] == "words about 00.png\n"
    assert captioning.undo(job) == (2, 0) and texts(folder) == {"00.txt": "a person's\n"}


def test_captions_of_an_earlier_job_are_known_as_a_models(tmp_path, model):
    folder = uncaptioned(tmp_path / "pictures", 2)
    captioning = Captioning(tmp_path / "runs")
    captioning.follow(made(tmp_path, folder))
    (folder / "01.txt").write_text("corrected by a person\n", encoding="utf-8")
    earlier = captioning._earlier(request(folder, overwrite="model"))
    assert [asked.name for asked in choose(request(folder, overwrite="model"), earlier)] == ["00.png"]


def test_a_jobs_folder_is_private_and_no_run(tmp_path):
    job = made(tmp_path, uncaptioned(tmp_path / "pictures", 1))
    assert job.path.stat().st_mode & 0o077 == job.path.parent.stat().st_mode & 0o077 == 0
    assert not is_run(job.path.parent) and job.path.parent.name == "captioning"
    (job.path / "request.json").write_text("{", encoding="utf-8")
    assert [*jobs(tmp_path / "runs")] == []


@pytest.mark.parametrize("name", ["../other/00.png", "/etc/00.png", "a/../../00.png", "a\0.png"])
def test_a_job_of_a_stranger_writes_nothing_outside_of_the_folder_of_images(name, tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 1)
    job = made(tmp_path, folder)
    files.replace(job.path / "images.json", json.dumps([{"name": name, "before": None}]))
    job.add(Written(name, "words"))
    with pytest.raises(InputError, match="is outside of the folder; remove the job"):
        Captioning(tmp_path / "runs").follow(job)
    assert [file.name for file in tmp_path.rglob("*.txt")] == []


def test_a_caption_file_that_is_a_folder_is_named_and_the_others_are_written(tmp_path):
    folder = uncaptioned(tmp_path / "pictures", 2)
    job, captioning = made(tmp_path, folder), Captioning(tmp_path / "runs")
    (folder / "00.txt").mkdir()
    progress = captioning.follow(job)
    assert progress.written == 1 and len(progress.kept) == 1
    assert progress.kept[0].startswith(f"{folder / '00.txt'}: not a regular file")
    assert (folder / "01.txt").read_text(encoding="utf-8") == "words about 01.png\n"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere", "--model /nowhere: no config.json; name a folder of transformers with a model"),
        ("owner/name", "--model owner/name: neither a folder nor complete in the local Hugging Face cache"),
        ("code", "brings code of its own (auto_map), which is never run"),
    ],
)
def test_a_model_that_is_missing_or_brings_code_starts_no_process(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "config.json").write_text('{"auto_map": {}}', encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(message)):
        Captioning(tmp_path / "runs").start(request(uncaptioned(tmp_path / "pictures", 1), path))
    assert not (tmp_path / "runs").exists()


# --- a rank in this process -------------------------------------------------------------------------------------------


def answered(root: Path, folder: Path, model: Path, **changes: Any) -> Progress:
    """A job whose images one rank has captioned, after its captions were written."""
    asked = request(folder, model, **changes)
    job = CaptionJob.create(root / "runs", asked, choose(asked, {}))
    caption_job(job, replace(alone(), store=KeyValueStore(dist.HashStore())), root / "cache")
    return Captioning(root / "runs").follow(job)


def test_images_are_looked_at_upright_on_white_and_bad_ones_are_named_while_the_job_goes_on(tmp_path, model):
    folder = uncaptioned(tmp_path / "pictures", 1)
    upright = Image.open(folder / "00.png").convert("RGB").resize((90, 60))
    upright.save(folder / "a.png")
    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown turned by 90 degrees
    upright.transpose(Image.Transpose.ROTATE_90).save(folder / "b.png", exif=turned)
    (folder / "c.png").write_bytes(b"not an image")
    whole = (folder / "00.png").read_bytes()
    (folder / "d.png").write_bytes(whole[: len(whole) // 2])
    upright.resize((10, 4000)).save(folder / "e.png")
    glass = Image.new("RGBA", (90, 60), (255, 0, 0, 0))
    glass.paste((0, 0, 255, 255), (0, 0, 45, 60))
    glass.save(folder / "f.png")
    white = Image.new("RGB", (90, 60), "white")
    white.paste((0, 0, 255), (0, 0, 45, 60))
    white.save(folder / "g.png")
    upright.convert("CMYK").save(folder / "h.jpg")
    for number, size in enumerate(((1, 1), (3, 100), (100, 3), (100, 1))):
        upright.resize(size).save(folder / f"i{number}.png")
    progress = answered(tmp_path, folder, model, trigger=True, tokens=6)
    assert (progress.state, progress.answered, progress.total) == ("finished", 13, 13)
    found = texts(folder)
    assert found["a.txt"] == found["b.txt"] != found["f.txt"] == found["g.txt"]
    assert all(text.startswith("[trigger], ") and text.endswith("\n") for text in found.values()) and len(found) == 10
    assert [problem.partition(": ")[0] for problem in progress.problems] == [f"{folder}/{name}.png" for name in "cde"]
    assert progress.problems[2].endswith(
        "(absolute aspect ratio must be smaller than 200, got 400.0); crop or remove it"
    )
    again = answered(tmp_path, folder, model, trigger=True, tokens=6, overwrite="all")
    assert again.written == 10 and texts(folder) == found, "the same captions again"


def test_a_prompt_that_the_model_cannot_be_asked_is_refused_and_an_omission_it_cannot_heed_is_said(tmp_path, model):
    folder = uncaptioned(tmp_path / "pictures", 1)
    florence = write_florence2(tmp_path / "florence")
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "chat_template.jinja").write_text("{{ raise_exception('texts only') }}", encoding="utf-8")
    refusal = f"{broken}: its chat template cannot be used (texts only); download the model again"
    with pytest.raises(InputError, match=f"^{re.escape(refusal)}$"):
        answered(tmp_path, folder, broken)
    refusal = f"--prompt: {florence} cannot be asked so (Task token <OD> should be the only content in the prompt.)"
    with pytest.raises(InputError, match=re.escape(refusal)):
        answered(tmp_path, folder, florence, prompt="<OD> and dogs")
    warned = (f"{florence}: does not follow instructions, so captions may name what --omit lists",)
    assert answered(tmp_path, folder, florence, omit="dog").warnings == warned
    assert answered(tmp_path, folder, florence, overwrite="all", style="tags", omit="dog").warnings == ()


# --- with processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_captions_a_folder_names_bad_images_and_takes_all_back(tmp_path, model):
    folder = uncaptioned(tmp_path / "pictures", 4)
    (folder / "00.txt").write_text("a person's\n", encoding="utf-8")
    (folder / "bad.png").write_bytes(b"not an image")
    done = command(tmp_path, model, "--trigger")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"captions by {model}, job {tmp_path}/runs/captioning/pictures-")
    # A model this small may be loaded between two looks at the job: then nothing is said of it.
    assert re.fullmatch(r"1/4  01\.png  \[trigger\], .+", lines[1 + (lines[1] == "loading the model")]), lines
    assert lines[-1] == "3 captions written; --caption pictures --undo takes them back"
    assert done.stderr == (
        f"1 got no caption:\n{folder}/bad.png: cannot be read (not an image of a known format); replace or remove it\n"
    )
    written = texts(folder)
    assert written.pop("00.txt") == "a person's\n"
    assert sorted(written) == ["01.txt", "02.txt", "03.txt"] and len(set(written.values())) > 1
    assert all(text.startswith("[trigger], ") for text in written.values())
    back = launch_py(tmp_path, "--caption", "pictures", "--undo")
    assert (back.returncode, back.stdout) == (0, "3 captions taken back\n")
    assert texts(folder) == {"00.txt": "a person's\n"}


def rank_of(job: CaptionJob) -> psutil.Process:
    """A rank's process, below torchrun."""
    launch = Launch.read(job.run)
    assert launch is not None
    return psutil.Process(launch.pid).children()[0]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "shard"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("victim", ["rank", "torchrun"])
def test_a_job_that_is_killed_and_continued_writes_the_captions_of_an_undisturbed_one(
    victim, ranks, shard, tmp_path, model
):
    whole = uncaptioned(tmp_path / "whole" / "pictures")
    captioning = Captioning(tmp_path / "runs")
    undisturbed = captioning.start(request(whole, model, tokens=LONG))
    assert undisturbed is not None
    until(captioning, undisturbed, lambda progress: progress.state == "finished")
    folder = uncaptioned(tmp_path / "killed" / "pictures")
    job = captioning.start(request(folder, model, tokens=LONG, ranks=ranks, shard=shard))
    assert job is not None
    until(captioning, job, lambda progress: progress.answered >= 2)
    launch = Launch.read(job.run)
    assert launch is not None
    os.kill(rank_of(job).pid if victim == "rank" else launch.pid, signal.SIGKILL)
    process.wait(job.run, WAIT_S)
    again = Captioning(tmp_path / "runs")
    assert again.follow(job).state == "failed"
    assert again.start(request(folder, model, tokens=LONG, ranks=ranks, shard=shard)) == job
    until(again, job, lambda progress: progress.state == "finished")
    assert texts(folder) == texts(whole) and len(texts(whole)) == 6


@pytest.mark.slow
def test_a_job_is_stopped_refuses_a_second_one_and_is_continued_by_the_same_request(tmp_path, model):
    folder = uncaptioned(tmp_path / "pictures", 6)
    captioning = Captioning(tmp_path / "runs")
    job = captioning.start(request(folder, model))
    assert job is not None
    inside = folder / "more"
    inside.mkdir()
    (inside / "a.png").write_bytes((folder / "00.png").read_bytes())
    assert captioning.start(request(folder, model, ranks=2)) == job, "the same request follows it"
    for other in (folder, inside, tmp_path):
        with pytest.raises(InputError, match=f"is being captioned already, by {job.path.name}; stop that first"):
            captioning.start(request(other, model, style="tags"))
    with pytest.raises(InputError, match="is running; stop it first"):
        captioning.undo(job)
    captioning.stop(job)
    progress = until(captioning, job, lambda progress: not progress.is_running)
    assert progress.state == "stopped" and progress.answered < 6
    assert captioning.start(request(folder, model, ranks=2)) == job
    progress = until(captioning, job, lambda progress: not progress.is_running)
    assert (progress.state, progress.written, progress.total) == ("finished", 6, 6)
    assert {line.rank for line in job.captions().read()} <= {0, 1}


@pytest.mark.slow
def test_captions_that_cannot_be_written_stop_a_commands_job_and_wait_for_a_page(tmp_path, model):
    folder = uncaptioned(tmp_path / "pictures", 12)
    log = tmp_path / "runs" / "drafts"
    log.parent.mkdir(mode=0o700)
    log.write_text("not a folder", encoding="utf-8")
    done = command(tmp_path, model, "--tokens", LONG)
    assert done.returncode == 2 and str(log) in done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("captions by ")]
    assert said in ([], ["loading the model"]), "no traceback, and no word of what was not written"  # not each is seen
    assert "The job was stopped; the same command continues it" in done.stderr
    (job,) = jobs(tmp_path / "runs")
    process.wait(job.run, WAIT_S)
    assert process.status(job.run) == "stopped" and texts(folder) == {}
    captioning = Captioning(tmp_path / "runs")
    log.unlink()
    captioning.resume(job)
    log.write_text("not a folder", encoding="utf-8")
    captioning.attend(job)
    deadline = time.monotonic() + WAIT_S
    while len(job.captions().read()) < 12:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    log.unlink()
    while len(texts(folder)) < 12:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_model_without_weights_is_the_users_mistake(tmp_path, model):
    uncaptioned(tmp_path / "pictures", 1)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    done = command(tmp_path, broken)
    assert done.returncode == 2
    assert f"error: {broken}: neither model.safetensors nor model.safetensors.index.json" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGKILL]])
def test_a_command_that_is_interrupted_or_killed_is_continued_by_the_same_command(signals, tmp_path, model):
    folder = uncaptioned(tmp_path / "pictures", 12)
    argv = [sys.executable, str(LAUNCH), "--caption", "pictures", "--model", str(model), "--device", "cpu"]
    argv += ["--dtype", "fp32", "--tokens", str(LONG)]
    with subprocess.Popen(argv, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        while not started.stdout.readline().startswith("2/12"):
            assert started.poll() is None
        for number in signals:
            started.send_signal(number)
        _, err = started.communicate(timeout=WAIT_S)
    if signal.SIGINT in signals:
        assert started.returncode == 130
        assert re.search(r"stopped at \d+ of 12 images; the same command continues", err)
        assert 2 <= len(texts(folder)) < 12
    else:
        (job,) = jobs(tmp_path / "runs")
        process.wait(job.run, WAIT_S)  # its processes go on without a terminal
        assert len(job.captions().read()) == 12 > len(texts(folder))
    again = launch_py(tmp_path, *argv[2:])
    assert again.returncode == 0, again.stderr
    assert len(texts(folder)) == 12 and len([*jobs(tmp_path / "runs")]) == 1


def test_applied_lines_are_what_a_page_reads(tmp_path):
    job = made(tmp_path, uncaptioned(tmp_path / "pictures", 1))
    Captioning(tmp_path / "runs").follow(job)
    assert job.applied().read() == [Applied("00.png", "words about 00.png")]
    assert RunDir(job.path) == job.run
