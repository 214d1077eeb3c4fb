"""What lies below the runs folder: closed to other users, and looked at where nothing can be written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser

from tests.app.browser import ROOT, Server, opened, recorded, serving, visit, watch
from tests.app.web.screens import screens
from tests.runs import make_pictures, run_config
from trainer.config.load import dump_config, load_config
from trainer.launcher import preflight

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root takes the place of another user, or mounts")
FULL_MIB = 2


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
