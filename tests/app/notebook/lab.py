"""A JupyterLab of its own for tests: nothing of the user's settings, no news, and copies of the project's notebooks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import nbformat
import psutil
from nbformat import NotebookNode
from playwright.sync_api import Page

from tests.app.browser import PATIENCE_S, STARTED_WITHIN_S, free_port, until_so
from tests.notebooks.execution import set_parameters
from tests.notebooks.pairs import NOTEBOOKS

TOKEN = "secret"
GRACE_S = 10
SETTINGS = NOTEBOOKS / "lab"
"""Those of `make lab`."""
IDLE = ".jp-Notebook-ExecutionIndicator[data-status=idle]"


@dataclass(frozen=True)
class Lab:
    """A server. notebooks: the folder it shows."""

    notebooks: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, path: str) -> Any:
        """What the server says of a path of its API."""
        return httpx.get(f"{self.url}/api/{path}?token={TOKEN}", timeout=PATIENCE_S).raise_for_status().json()

    def copy(self, name: str, parameters: Mapping[str, object]) -> Path:
        """One of the project's notebooks with other parameters, set at the end of the cell of its own."""
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        set_parameters(notebook, parameters)
        file = self.notebooks / f"{name}.ipynb"
        nbformat.write(notebook, file)
        return file

    def open(self, page: Page, name: str) -> None:
        """Show a notebook alone, with its kernel ready."""
        page.goto(f"{self.url}/lab/tree/{name}?reset&token={TOKEN}")
        self.await_kernel(page)

    def await_kernel(self, page: Page) -> None:
        """Wait until the one kernel answers.

        On a busy machine JupyterLab 4.6 shows it as idle before it is connected, may end it and start another, and
        then forgets the cells that were to be run.
        """
        page.wait_for_selector(IDLE)
        until_so(page, self._is_ready)

    def _is_ready(self) -> bool:
        answer = httpx.get(f"{self.url}/api/kernels?token={TOKEN}", timeout=PATIENCE_S)
        if answer.is_error:  # the server fails on a kernel that is just being started
            return False
        return [(kernel["execution_state"], kernel["connections"]) for kernel in answer.json()] == [("idle", 1)]


def code_cells(notebook: Path) -> list[NotebookNode]:
    """Of a saved notebook."""
    return [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]


def position_of(notebook: Path, text: str) -> int:
    """Of the first code cell with this text among the code cells."""
    return next(position for position, cell in enumerate(code_cells(notebook)) if text in cell.source)


@contextmanager
def serving_lab(folder: Path, *options: str) -> Iterator[Lab]:
    """A server whose files all lie in a folder; no kernel of it afterwards."""
    lab = Lab(folder / "notebooks", free_port())
    lab.notebooks.mkdir(parents=True)
    places = {f"JUPYTER_{name.upper()}_DIR": str(folder / name) for name in ("config", "data", "runtime")}
    argv = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    argv += [f"--port={lab.port}", "--port-retries=0", f"--IdentityProvider.token={TOKEN}"]
    argv += ["--LabApp.extension_manager=readonly", f"--ServerApp.root_dir={lab.notebooks}"]
    log = folder / "lab.log"
    with log.open("ab") as output:
        server = subprocess.Popen(
            [*argv, *options],
            cwd=folder,
            env=os.environ | places | {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_CONFIG_PATH": str(SETTINGS)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _await_answer(lab, server, log)
        yield lab
    finally:
        _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """It ends its kernels when it is asked to, but for one that is just being started: then it waits for ever."""
    if server.poll() is not None:
        return
    process = psutil.Process(server.pid)
    family = [process, *process.children(recursive=True)]
    process.terminate()
    _, survivors = psutil.wait_procs(family, timeout=GRACE_S)
    for survivor in survivors:
        survivor.kill()
    server.wait()


def _await_answer(lab: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTED_WITHIN_S
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{lab.url}/api", timeout=5)
        except httpx.TransportError:
            assert server.poll() is None, log.read_text()
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"no answer from {lab.url}: {log.read_text()}")


def choose(page: Page, menu: str, entry: str) -> None:
    """Choose in one of the menus at the top."""
    page.get_by_role("menuitem", name=menu, exact=True).first.click()
    page.locator(".lm-Menu").get_by_text(entry, exact=True).click()
