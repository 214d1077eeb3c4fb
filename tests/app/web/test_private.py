"""What lies below the runs folder: closed to other users, and looked at where nothing can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from PIL import Image
from playwright.sync_api import Browser

from app.data.thumbnails import Thumbnails
from app.runs import run_table as all_runs
from app.studio import Studio
from app.web.served_files import Downloads
from tests.app.browser import ROOT, Server, opened, recorded, serving, visit, watch
from tests.app.web.screens import screens
from tests.runs import make_pictures, run_config
from trainer.config.load import dump_config, load_config
from trainer.launcher import preflight

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root takes the place of another user, or mounts")
STRANGER = 65534
FULL_MIB = 2


def readable_by_a_stranger(folder: Path) -> list[str]:
    """The files below a folder that another user of this machine reads."""
    program = (
        "import os, sys\n"
        "for folder, _, names in os.walk(sys.argv[1]):\n"
        "    for name in names:\n"
        "        if os.access(os.path.join(folder, name), os.R_OK): print(name)\n"
    )
    argv = ["/usr/bin/python3", "-c", program, str(folder)]
    return subprocess.run(
        argv, user=STRANGER, group=STRANGER, check=True, capture_output=True, text=True
    ).stdout.split()


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A runs folder that others may enter, as below many a home."""
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o755)
    return runs


@as_root
def test_another_user_reads_nothing_that_the_page_keeps_below_the_runs_folder(open_folder: Path):
    picture = open_folder.parent / "private.png"
    Image.new("RGB", (64, 64)).save(picture)
    exported = open_folder.parent / "lora.safetensors"
    exported.write_bytes(b"weights")
    for name in ("drafts", "queue", "thumbnails", "downloads"):  # a cache stays as open as it was
        (open_folder / name).mkdir(parents=True)
        (open_folder / name / "of-before.json").write_text("private")
    (open_folder / "tags.json").write_text("{}")
    studio = Studio(open_folder)
    studio.prepare()
    studio.thumbnails.of(picture)
    studio.downloads.offer(exported)
    studio.save_draft(studio.draft())
    studio.queue.add(run_config(make_pictures(open_folder.parent / "pictures")))
    all_runs.change_tags(open_folder, ["run"], "secret project")
    assert readable_by_a_stranger(open_folder) == []


@as_root
def test_another_user_reads_no_thumbnail_that_a_notebook_made(open_folder: Path):
    picture = open_folder.parent / "private.png"
    Image.new("RGB", (64, 64)).save(picture)
    Thumbnails(open_folder / "thumbnails").of(picture)
    Downloads(open_folder / "downloads").offer(picture.rename(picture.with_name("settings.json")))
    assert readable_by_a_stranger(open_folder) == []


def test_the_cache_of_a_run_is_made_for_its_owner_only(tmp_path: Path):
    file = tmp_path / "preset.yaml"
    file.write_text(dump_config(run_config(make_pictures(tmp_path / "pictures"))))
    preflight.new_run(load_config(file, ()), tmp_path / "runs")
    assert (tmp_path / "runs" / "cache").stat().st_mode & 0o777 == 0o700


def look(browser: Browser, server: Server, reason: str) -> None:
    """The runs are shown with their samples, the reason is said, and nothing ends in an error of the program."""
    with opened(browser, server.url) as page:
        assert f"cannot be written ({reason})" in page.locator("#unwritable").text_content()
        watch(page, "old")
        assert "finished" in page.locator("#run").get_attribute("data-state")
        visit(page, "runs", "old", "samples")
        shown = page.locator("#page-run img:visible").first
        shown.wait_for()
        picture = shown.get_attribute("src")
        cookies = {cookie["name"]: cookie["value"] for cookie in page.context.cookies()}
        assert httpx.get(f"{server.origin}{picture}", cookies=cookies).headers["content-type"] == "image/webp"
        for screen in screens("old", "old").values():
            visit(page, *screen.place)
            page.wait_for_timeout(300)
    assert "Traceback" not in server.log


@as_root
@pytest.mark.slow
def test_runs_on_a_read_only_disk_are_looked_at(browser: Browser, tmp_path: Path):
    runs = tmp_path / "runs"
    recorded(runs, "old")
    inside = f"mount --bind {runs} {runs} && mount -o remount,ro,bind {runs} && exec {sys.executable} {ROOT}/launch.py"
    with serving(runs, program=in_a_namespace(tmp_path, inside)) as server:
        look(browser, server, "Read-only file system")


@as_root
@pytest.mark.slow
def test_runs_on_a_full_disk_are_looked_at(browser: Browser, tmp_path: Path):
    runs = tmp_path / "runs"
    recorded(tmp_path / "kept", "old")
    runs.mkdir()
    inside = (
        f"mount -t tmpfs -o size={FULL_MIB}m tmpfs {runs} && cp -a {tmp_path}/kept/. {runs} && "
        f"(dd if=/dev/zero of={runs}/filled bs=4k 2> /dev/null; true) && exec {sys.executable} {ROOT}/launch.py"
    )
    with serving(runs, program=in_a_namespace(tmp_path, inside)) as server:
        look(browser, server, "No space left on device")


def in_a_namespace(folder: Path, command: str) -> Path:
    """A program that does what a shell does where it alone sees what it mounts, then becomes the page."""
    program = folder / "page.py"
    script = f'{command} "$@"'
    program.write_text(
        f"import os, sys\nos.execvp('unshare', ['unshare', '-m', 'sh', '-c', {script!r}, 'sh', *sys.argv[1:]])\n"
    )
    return program
