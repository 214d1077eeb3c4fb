"""Runs that fail for real, as the page shows them: memory, a killed rank, a loss that is not finite."""

from __future__ import annotations

import contextlib
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Page
from safetensors.torch import load_file

from tests.app.browser import TRAINED_WITHIN_S, Server, state_is, until, watch
from tests.runs import make_pictures, run_config
from trainer.data.cache import ExampleCache
from trainer.launcher import torchrun
from trainer.run import process as processes
from trainer.run.events import AnyEvent, EventReader, StatusEvent, StepEvent
from trainer.run.folder import RunDir

HEADROOM = 160 * 2**20
"""Bytes: less than the activations of a step, more than a thread."""


def start(server: Server, name: str, pictures: Path, **fields: Any) -> torchrun.RunHandle:
    """A run of two ranks in the page's folder."""
    config = run_config(pictures, parallel__devices=2, train__steps=100_000, **fields)
    return torchrun.start(config, RunDir.create(server.runs, config, at=server.runs / name))


def wait_for(run: RunDir, wanted: Callable[[AnyEvent], bool]) -> None:
    events, deadline = EventReader(run.events_file), time.monotonic() + TRAINED_WITHIN_S
    while not any(map(wanted, events.read())):
        assert time.monotonic() < deadline, run.path
        time.sleep(0.01)


def rank(run: RunDir, number: int) -> psutil.Process:
    """The process of a rank."""
    started = processes.Launch.read(run)
    assert started is not None
    return next(p for p in psutil.Process(started.pid).children() if p.environ().get("RANK") == str(number))


@pytest.fixture(scope="module")
def failed(server: Server) -> Iterator[dict[str, RunDir]]:
    """{why: run that failed for it}"""
    few = make_pictures(server.runs.parent / "few", count=4)
    handles = {"killed": start(server, "killed", few)}
    handles["memory"] = start(server, "memory", few, train__micro_batch=64, train__batch_size=128, data__resolution=512)
    runs = {name: handle.run for name, handle in handles.items()}
    try:
        wait_for(runs["killed"], lambda event: isinstance(event, StepEvent))
        rank(runs["killed"], 1).kill()
        poisoned = poison(server.runs / "cache", server.runs.parent / "poisoned")
        handles["numbers"] = start(server, "numbers", few, data__cache=str(poisoned))
        wait_for(runs["memory"], lambda event: isinstance(event, StatusEvent) and "are trained" in event.message)
        starve(rank(runs["memory"], 1), handles["memory"])
        for handle in handles.values():
            handle.process.wait(TRAINED_WITHIN_S)
        yield {name: handle.run for name, handle in handles.items()}
    finally:
        for handle in handles.values():
            processes.terminate(handle.run)


def starve(process: psutil.Process, handle: torchrun.RunHandle) -> None:
    """Leave a rank no more memory than it has between two steps, until its run ends."""
    limit, deadline = resource.RLIM_INFINITY, time.monotonic() + TRAINED_WITHIN_S
    while handle.process.poll() is None:
        assert time.monotonic() < deadline, handle.run.path
        with contextlib.suppress(psutil.NoSuchProcess):
            used = process.memory_info().vms + HEADROOM
            limit = used if limit == resource.RLIM_INFINITY else min(limit, used)
            process.rlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        time.sleep(0.02)


def poison(cache: Path, copy: Path) -> Path:
    """A copy of the cache whose latents are not numbers."""
    shutil.copytree(cache, copy)
    examples = ExampleCache(copy / "examples")
    for file in examples.folder.rglob("*.safetensors"):
        tensors = load_file(file)
        if "latents" in tensors:
            examples.write(file.stem, tensors | {"latents": tensors["latents"] * float("nan")})
    return copy


@pytest.mark.slow
def test_a_lack_of_memory_tells_rank_step_and_block_and_offers_a_config_that_needs_less(failed, page: Page):
    watch(page, failed["memory"].path.name)
    state_is(page, "failed")
    card = page.locator("#run-error")
    assert card.locator("h2").inner_text() == "Failed on rank 1 at step 0"
    for words in ("out of memory in ", " of transformer.", " GiB"):
        assert words in card.inner_text()
    card.locator("#retry", has_text="train.checkpointing=full").wait_for()


@pytest.mark.slow
def test_a_killed_rank_is_named_with_what_probably_killed_it_and_its_log_is_shown(failed, page: Page):
    watch(page, failed["killed"].path.name)
    state_is(page, "failed")
    card = page.locator("#run-error[role=alert]")
    for words in ("on rank 1", "killed by SIGKILL", "ran out of host memory", "stderr.log"):
        assert words in card.inner_text()
    card.locator("#error-log").click()
    until(page, "document.querySelector('#log-of').value === 'rank 1'")


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_told_with_a_lower_learning_rate(failed, page: Page):
    watch(page, failed["numbers"].path.name)
    state_is(page, "failed")
    assert "the loss is not finite on" in page.locator("#run-error").inner_text()
    page.locator("#retry", has_text="optim.lr=1e-05").wait_for()
