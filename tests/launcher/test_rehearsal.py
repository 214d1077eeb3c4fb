"""Rehearsals: the config that is built of a run's, what is refused, and a whole one as a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import LAUNCH
from tests.runs import make_pictures, make_text, run_config, text_config
from trainer.config.load import ConfigFile, dump_config, load_config
from trainer.config.schema import RunConfig
from trainer.data.images.image_files import scan
from trainer.launcher import commands, rehearsal
from trainer.launcher.queue import Queue
from trainer.launcher.torchrun import RunHandle
from trainer.run import process
from trainer.run.folder import RunDir
from trainer.run.samples import film_of
from trainer.system.errors import InputError

REAL: dict[str, Any] = {
    "name": "my-photos",
    "model__family": "flux1",
    "model__path": "black-forest-labs/FLUX.1-dev",
    "data__resolutions": [512, 768],
    "data__trigger": "ohwx",
    "sample__prompts": ["[trigger] on a table", "a dog"],
    "sample__size": [832, 1216],
    "train__epochs": 20,
    "quantize__format": "nf4",
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("rehearsal") / "pictures")


def loaded(cfg: RunConfig) -> ConfigFile:
    return ConfigFile(cfg, Path("my.yaml"), (), {})


def value(cfg: RunConfig, field: str) -> Any:
    section, _, name = field.partition(".")
    return getattr(getattr(cfg, section), name) if name else getattr(cfg, section)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"name": "my-photos-rehearsal", "data.trigger": "ohwx", "data.max_images": 64}),
        ({}, {"data.resolution": 64, "data.resolutions": (), "model.path": "demo", "quantize.format": "none"}),
        ({}, {"sample.size": (48, 80), "train.epochs": None, "train.time_limit": rehearsal.TRAINED_S}),
        ({}, {"export.what": "none", "parallel.device": "cpu", "parallel.devices": 1, "checkpoint.every": 0}),
        ({}, {"sample.prompts": ("[trigger] on a table", "a dog", "on a table")}),
        ({"name": "n" * 64}, {"name": f"{'n' * 54}-rehearsal"}),
        ({"data__fit": "pad", "data__flip": True, "data__max_aspect": 1.0}, {"data.fit": "pad", "data.flip": True}),
        ({"data__max_aspect": 1.0}, {"data.max_aspect": 1.0, "sample.size": (64, 64)}),
        (
            {"data__masks": "/masks", "data__mask_background": 0.2},
            {"data.masks": "/masks", "data.mask_background": 0.2},
        ),
        ({"data__caption_dropout": 0.3, "data__caption_lines": True}, {"data.caption_dropout": 0.3}),
        ({"data__max_images": 5, "data__validation": 2}, {"data.max_images": 5, "data.validation": 2}),
        ({"data__trigger": "", "sample__prompts": ["a dog"]}, {"sample.prompts": ("a dog",)}),
        ({"sample__prompts": ["a", "b", "c", "d"]}, {"sample.prompts": ("a", "b", "c")}),
        ({"sample__prompts": ["[trigger]"]}, {"sample.prompts": ("[trigger]",)}),
        (
            {"sample__prompts": []},
            {"sample.prompts": (*(f"[trigger], picture number {i}" for i in range(3)), "picture number 0")},
        ),
        ({"sample__prompts": [], "data__validation": 1}, {"sample.prompts": ("[trigger], picture number 7",)}),
    ],
)
def test_a_rehearsal_has_the_data_and_prompts_of_the_run_and_the_demo_model(
    pictures: Path, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    built = rehearsal.config_of(run_config(pictures, **REAL | changes))
    found = {field: value(built, field) for field in expected}
    if changes.get("data__validation") and "sample.prompts" in expected:
        found["sample.prompts"] = found["sample.prompts"][:1]
    assert found == expected


def test_what_the_demo_model_is_not_trained_with_is_left_out(pictures: Path) -> None:
    real = run_config(
        pictures,
        **REAL,
        data__folders=[{"path": str(pictures), "resolutions": [512], "micro_batch": 2, "caption_prefix": "at sea"}],
    )
    edits = run_config(pictures, model__family="flux2", data__references=str(pictures.parent))
    (folder,) = rehearsal.config_of(real).data.folders
    assert (folder.resolutions, folder.micro_batch, folder.caption_prefix) == ((), None, "at sea")
    assert rehearsal.config_of(edits).data.references is None
    open_place = make_pictures(pictures.parent / "open", count=1)
    (open_place / "00.txt").write_text("[trigger], a cat")
    assert rehearsal.config_of(run_config(open_place)).sample.prompts == ("a cat",)
    assert len(scan(rehearsal.config_of(real).data).train) == 16


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (lambda folder: text_config(make_text(folder / "text")), "trains on text, and a rehearsal shows pictures"),
        (lambda folder: run_config(folder, model__family="bagel", data__path=None, data__questions="q"), "data.path"),
    ],
)
def test_a_run_without_captioned_pictures_is_not_rehearsed(tmp_path: Path, cfg: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rehearsal.config_of(cfg(tmp_path))


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals of a second."""
    monkeypatch.setattr(rehearsal, "TRAINED_S", 1)


@pytest.fixture
def begun(pictures: Path, tmp_path: Path, brief: None) -> Iterator[RunHandle]:
    handle = rehearsal.begin(loaded(run_config(pictures, **REAL)), tmp_path / "runs")
    yield handle
    process.end_family(handle.process.pid)


@pytest.mark.slow
def test_a_rehearsal_is_a_run_of_its_own_kind_that_gives_way_and_exports_nothing(
    begun: RunHandle, pictures: Path
) -> None:
    run, runs = begun.run, begun.run.path.parent
    assert rehearsal.running(runs) == run and run.own_title == "my-photos-rehearsal"
    assert psutil.Process(begun.process.pid).nice() == rehearsal.NICENESS
    with pytest.raises(InputError, match=r"my-photos-rehearsal.* is still running; wait until it is done, or stop it"):
        rehearsal.begin(loaded(run_config(pictures, name="other")), runs)
    assert [path.name for path in runs.glob("*-rehearsal-*")] == [run.path.name]
    assert Queue(runs).blockers(Queue(runs).add(run_config(pictures))) == []
    assert begun.process.wait(120) == 0
    assert process.status(run) == "finished" and rehearsal.running(runs) is None
    assert load_config(run.settings_file).config == run_config(pictures, **REAL)
    assert list(run.export.iterdir()) == []
    with pytest.raises(InputError, match="is a rehearsal, whose adapter fits the demo model alone; start the real run"):
        commands.begin_export(run, run.config().exporting("adapter", None, None))


@pytest.mark.slow
def test_on_the_command_line_it_prints_the_film_the_captions_and_what_it_cannot_show(
    pictures: Path, tmp_path: Path
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(dump_config(run_config(pictures, **REAL)))
    short = (
        "import sys; from trainer.launcher import rehearsal; rehearsal.TRAINED_S = 1; import app.command_line as c; "
    )
    argv = ["--headless", str(file), "--rehearse", "--runs", str(tmp_path / "runs"), "data.caption_dropout=0.1"]
    done = subprocess.run(
        [sys.executable, "-c", f"{short}sys.exit(c.main(sys.argv[1:]))", *argv],
        cwd=LAUNCH.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").glob("my-photos-rehearsal-*")
    lines = done.stdout.splitlines()
    assert "01.png: 1056 x 544, 97% of it: ohwx, picture number 1; without a caption 10% of the time" in lines
    assert any(line.startswith("it cannot show: Likeness and detail") for line in lines)
    assert "it cannot show: Several resolutions: each picture is trained at one." in lines
    assert [str(folder / "film" / name) for one in film_of(RunDir(folder)).prompts for name in one.files] == lines[-9:]


def refused(cfg: RunConfig, runs: Path) -> str:
    """Why a rehearsal is not started; nothing is left of it."""
    with pytest.raises(InputError) as caught:
        rehearsal.begin(loaded(cfg), runs)
    assert not list(runs.glob("*-rehearsal-*"))
    return str(caught.value)


def test_wrong_data_are_refused_in_the_words_of_the_real_run(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path / "pictures", count=3)
    cfg = run_config(folder, **REAL, data__masks=str(tmp_path / "gone"))
    assert "my.yaml: data.masks: no folder" in refused(cfg, tmp_path / "runs")
    for text in folder.glob("*.txt"):
        text.unlink()
    assert "3 of 3 images have no caption" in refused(run_config(folder), tmp_path / "runs")
    for picture in folder.iterdir():
        picture.unlink()
    assert "data.path" in refused(run_config(folder), tmp_path / "runs")


def test_an_incomplete_demo_model_is_said_with_what_to_do(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo" / "flux2").mkdir(parents=True)
    for folder in (tmp_path / "demo", tmp_path / "none"):
        monkeypatch.setattr(rehearsal, "DEMO", folder)
        assert refused(run_config(pictures), tmp_path / "runs") == (
            f"{folder}: the demo model is not complete; install ShardStudio again, or make it with `make demo-base` in "
            "a checkout, which takes an hour"
        )


@pytest.mark.slow
def test_on_a_full_disk_a_rehearsal_is_refused_in_a_sentence(pictures: Path, tmp_path: Path) -> None:
    runs, file = tmp_path / "runs", tmp_path / "my.yaml"
    runs.mkdir()
    file.write_text(dump_config(run_config(pictures)))
    script = (
        f"mount -t tmpfs -o size=1m tmpfs {runs} && (dd if=/dev/zero of={runs}/filled bs=4k 2> /dev/null; true) && "
        f"{sys.executable} {LAUNCH} --headless {file} --rehearse --runs {runs}; code=$?; ls {runs} >&2; exit $code"
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    said, *left = done.stderr.splitlines()
    assert said.endswith("the run folder cannot be made (No space left on device); free some space")
    assert left == ["drafts", "filled"]
