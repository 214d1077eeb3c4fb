"""Caches of strangers, which come with a preset: nothing outside of them is changed through what lies in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from app.data.looks import Looks
from app.form.draft import Draft
from app.studio import Studio
from tests.app.data.test_dataset import scanned
from tests.run.test_hostile_folders import content, make_home
from tests.run.test_private_caches import measured
from tests.runs import alone, make_pictures, run_config
from trainer.config.load import ConfigFile, dump_config, load_config
from trainer.data.cache import ExampleCache
from trainer.distributed.attach import attach
from trainer.distributed.world import Rendezvous
from trainer.launcher import preflight
from trainer.models import families
from trainer.models.parts.published import published_folder
from trainer.parallel.quantized_cache import QuantizedCache
from trainer.plan import calibration
from trainer.run.folder import CACHE_LINK, CACHE_NAMES, RunDir, guard_cache
from trainer.system.errors import InputError

PLACES = (
    "base", "examples", "examples/.parts", "examples/ab", "models", "plans",
    "base/.draft", "index.sqlite", "plans/measured.jsonl", "plans/a.json.gz",
)  # fmt: skip
LONG_AGO = (10**9, 10**9)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "home")


@pytest.fixture
def preset(tmp_path: Path) -> ConfigFile:
    """A preset with its cache next to it."""
    (tmp_path / "bundle" / "cache").mkdir(parents=True)
    cfg = run_config(make_pictures(tmp_path / "pictures"), data__cache=str(tmp_path / "bundle" / "cache"))
    file = tmp_path / "bundle" / "preset.yaml"
    file.write_text(dump_config(cfg))
    return load_config(file)


def doors(preset: ConfigFile, runs: Path) -> Mapping[str, Callable[[], object]]:
    return {
        "start": lambda: preflight.new_run(preset, runs),
        "queue": lambda: Studio(runs).enqueue(Draft(preset.source), ""),
        "look": lambda: Looks(runs).start(preset.config, scanned(preset.config)),
    }


@pytest.mark.parametrize("place", PLACES)
def test_a_link_out_of_a_cache_is_named_before_anything_is_written(
    tmp_path: Path, preset: ConfigFile, home: Path, place: str
) -> None:
    link, before = tmp_path / "bundle" / "cache" / place, content(home)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home / ".bashrc" if link.suffix else home / "papers")
    for name, door in doors(preset, tmp_path / "runs").items():
        with pytest.raises(InputError) as refused:
            door()
        assert (name, str(refused.value)) == (name, f"{link}: {CACHE_LINK}")
    assert content(home) == before
    assert not any((tmp_path / "runs").glob("*/config.yaml"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_names_a_link_in_the_cache_of_its_own_machine(
    tmp_path: Path, preset: ConfigFile, home: Path, rank: int
) -> None:
    run = RunDir.create(tmp_path / "runs", preset.config)
    link = tmp_path / "bundle" / "cache" / "base"
    link.symlink_to(home)
    store = dist.HashStore()
    store.set("config", dump_config(preset.config))
    with pytest.raises(InputError) as refused:
        attach(run.path, Rendezvous(store, rank, 2))
    assert str(refused.value) == f"{link}: {CACHE_LINK}"


def test_a_link_in_a_loop_is_named(tmp_path: Path, preset: ConfigFile) -> None:
    link = tmp_path / "bundle" / "cache" / "plans"
    link.symlink_to("plans")
    with pytest.raises(InputError) as refused:
        preflight.new_run(preset, tmp_path / "runs")
    assert str(refused.value) == f"{link}: {CACHE_LINK}"


def test_a_cache_that_is_a_link_itself_and_links_within_it_are_used(tmp_path: Path, preset: ConfigFile) -> None:
    cache, disk = tmp_path / "bundle" / "cache", tmp_path / "disk"
    cache.rename(disk)
    cache.symlink_to(disk)
    (disk / "converted").mkdir()
    (disk / "base").symlink_to("converted")
    assert preflight.new_run(preset, tmp_path / "runs").config_file.is_file()


@pytest.mark.parametrize(
    "place", ("venv", ".cache", "flux", "models/flux", "models/tiny-sd", "base/sdxl", "images", "rows", "plans/a.txt")
)
def test_links_of_names_that_no_run_uses_are_left_alone(
    tmp_path: Path, preset: ConfigFile, home: Path, place: str
) -> None:
    link, before = tmp_path / "bundle" / "cache" / place, content(home)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(home / "papers")
    assert preflight.new_run(preset, tmp_path / "runs").config_file.is_file()
    assert content(home) == before


@pytest.mark.parametrize(
    "place",
    (
        "Examples", "examples/AB", "examples/.parts/a", f"base/{'a' * 32}.safetensors",
        "models/tiny-sdxl-0123456789ab", "models/published-sd3-large-0123456789ab", "models/.tiny-sdxl-0123456789ab-x",
        "index.sqlite-wal", "index-shared.sqlite-journal", ".index.sqlite.lock", "plans/.12-34.part",
    ),
)  # fmt: skip
def test_a_link_of_any_name_that_a_run_writes_is_named(tmp_path: Path, home: Path, place: str) -> None:
    link = tmp_path / "cache" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(home / "papers")
    with pytest.raises(InputError) as refused:
        guard_cache(tmp_path / "cache")
    assert str(refused.value) == f"{link}: {CACHE_LINK}"


def test_every_name_that_runs_leave_in_a_cache_is_one_that_is_guarded(tmp_path: Path, preset: ConfigFile) -> None:
    cache = tmp_path / "bundle" / "cache"
    preflight.new_run(preset, tmp_path / "runs")
    calibration.keep(cache, measured())
    families.make(preset.config, cache).folder  # noqa: B018
    published_folder(preset.config.model, cache / "models")
    ExampleCache(cache / "examples").write("ab" * 32, {"latents": torch.zeros(1)})
    made = [file.relative_to(cache) for file in cache.rglob("*") if len(file.relative_to(cache).parts) < 3]
    assert {file.parts[0] for file in made} == {"examples", "models", "plans", "index.sqlite", ".index.sqlite.lock"}
    for file in made:
        folder = "" if len(file.parts) == 1 else file.parts[0]
        assert CACHE_NAMES[folder].fullmatch(file.name), file


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to], ids=["link", "second name"])
def test_no_measurement_is_appended_to_a_file_of_the_user(
    tmp_path: Path, home: Path, link: Callable[[Path, Path], None]
) -> None:
    before = content(home)
    (tmp_path / "cache" / "plans").mkdir(parents=True)
    link(tmp_path / "cache" / "plans" / "measured.jsonl", home / ".bashrc")
    with pytest.raises(InputError, match=r"measured\.jsonl: "):
        calibration.keep(tmp_path / "cache", measured())
    assert content(home) == before


def test_only_abandoned_drafts_of_this_program_are_removed(tmp_path: Path) -> None:
    files = [tmp_path / name for name in (".bashrc", ".netrc", f".{'a' * 32}-{'b' * 8}")]
    for file in files:
        file.write_text("mine")
        os.utime(file, LONG_AGO)
    QuantizedCache(tmp_path, alone())._begin(tmp_path / ".draft", SimpleNamespace(size=16, head=b"x"))
    assert [file.exists() for file in files] == [True, True, False]
