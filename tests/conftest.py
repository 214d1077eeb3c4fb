"""Options of the whole suite. See DECISIONS 142."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.distributed.pool import IMPORTED, leave_process_group

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

LONGEST = ("tests/benchmarks/test_limits.py", "tests/notebooks/", "tests/pairs/")
pytest.register_assert_rewrite("tests.bench", "tests.notebooks.lessons")
# A shell starts a command with `&` so that it ignores Ctrl-C, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Runs of tests tell nobody of their end: a developer's own notices are elsewhere.
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir()) / "shardstudio-tests-without-config")
gc.disable()  # until everything is collected: tests that are read leave no garbage, and looking for it takes 8 s


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="where the tests marked gpu train")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: each is one process's, and the last one would keep the other waiting."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish() -> None:
    """Take what is imported out of the collector's sight: encoding collects garbage twice a run, over all objects."""
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def the_same_numbers() -> None:
    """What a test draws without a seed of its own is the same in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left() -> Iterator[None]:
    """The next file makes its own."""
    yield
    leave_process_group()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """`--device`; a test that asks for CUDA where there is none is skipped."""
    name: str = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return name


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    """One of a process can be at work."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Browser:
    """One Chromium for all tests of the page."""
    from tests.app.browser import start_chromium

    return start_chromium(playwright)
