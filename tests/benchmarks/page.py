"""What the page costs: `python -m tests.benchmarks.page`. Exits with 1 beyond a limit.

How soon a first sample and the first point are drawn, what ten thousand points cost the browser, what the page's
process takes of memory and of a core with one viewer, and whether a run's steps take longer while it is watched.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

from tests.app.browser import Server, in_training, opened, recorded, serving, start_chromium, until, watch
from tests.commands import takes_no_arguments
from tests.runs import make_pictures, run_config
from trainer.launcher import torchrun
from trainer.run import process as processes
from trainer.run.events import EventReader, EventWriter, StatusEvent, StepEvent
from trainer.run.folder import RunDir

FIRST_SAMPLE_S, FIRST_POINT_S = 20.0, 2.5
REFRESH_MS = 100.0
PAGE_MB = 250.0
CORE_PERCENT = 5.0
POINTS = 10_000
STEPS = 1500
HOUR_ROUNDS = 1800
ROUND = "async () => { await studio.call('live'); await studio.screens.run.tick(studio.place()); }"
"""What a window that shows a run asks every two seconds."""


@dataclass(frozen=True)
class Cost:
    """refresh_ms: main thread of the browser per second of watching.  page_mb: resident memory of the page's process.

    core_percent: of one core, with one viewer.  hour_mb: page_mb after as many answers as an hour of watching takes.
    """

    refresh_ms: float
    page_mb: float
    core_percent: float
    hour_mb: float


def long_run(browser: Browser, server: Server, seconds: int) -> Cost:
    """Watch a run of POINTS steps that makes a step a second, for so long."""
    run = recorded(server.runs, "long", [StatusEvent(state="training", step=POINTS)], train__steps=POINTS)
    with in_training(run), opened(browser, server.url) as page:
        watch(page, "long")
        until(page, "document.querySelector('#chart-loss canvas').dataset.n > 500")
        return _watched(page, server, run, seconds)


def _watched(page: Page, server: Server, run: RunDir, seconds: int) -> Cost:
    assert server.process is not None
    serving_process = psutil.Process(server.process.pid)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    with EventWriter(run.events_file) as events:
        before, cpu, began = _task_seconds(session), sum(serving_process.cpu_times()[:2]), time.monotonic()
        for number in range(seconds):
            events.write(_step(POINTS + 1 + number))
            page.wait_for_timeout(1000)
        spent = time.monotonic() - began
        used = sum(serving_process.cpu_times()[:2]) - cpu
        busy = _task_seconds(session) - before
        page_mb = serving_process.memory_info().rss / 1e6
        for number in range(HOUR_ROUNDS):
            events.write(_step(POINTS + seconds + 1 + number))
            page.evaluate(ROUND)
    return Cost(1000 * busy / spent, page_mb, 100 * used / spent, serving_process.memory_info().rss / 1e6)


def _task_seconds(session) -> float:  # type: ignore[no-untyped-def]  # playwright's session has no generic type
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))


def _step(number: int) -> StepEvent:
    return StepEvent(
        step=number, loss=0.5, lr=1e-4, grad_norm=1.0, seconds=0.5, seconds_data=0.02, seconds_forward=0.13,
        seconds_backward=0.3, seconds_optimizer=0.02, seconds_communication=0.1, images_per_second=8.0,
    )  # fmt: skip


def first_sample_and_point_s(browser: Browser, server: Server) -> tuple[float, float]:
    """Of a run of the quickstart that is started by the page: from the click to a sample on the page, and from the
    first StepEvent to a point on its chart."""
    with opened(browser, server.url) as page:
        page.locator("#start:enabled").click()
        began = time.monotonic()
        until(page, "[...document.querySelectorAll('#newest img')].some(image => image.naturalWidth > 0)", 120)
        sample = time.monotonic() - began
        until(page, "document.querySelector('#chart-loss canvas').dataset.n > 0", 120)
        drawn = time.time()
        page.locator("#stop").click()
        [run] = [RunDir(file.parent) for file in server.runs.glob("quickstart-*/config.yaml")]
        processes.wait(run, 60)
        events = EventReader(run.events_file).read()
        return sample, drawn - next(event.time for event in events if isinstance(event, StepEvent))


def cpu_per_step(browser: Browser, server: Server, name: str, is_watched: bool) -> float:
    """CPU seconds of the ranks per step of a small run."""
    pictures = server.runs.parent / "pictures"
    if not pictures.exists():
        make_pictures(pictures)
    config = run_config(pictures, train__steps=STEPS)
    run = RunDir.create(server.runs, config, at=server.runs / name)
    handle = torchrun.start(config, run)
    if not is_watched:
        return _cpu_of(run, handle)
    with opened(browser, server.url) as page:
        watch(page, name)
        return _cpu_of(run, handle)


def _cpu_of(run: RunDir, handle: torchrun.RunHandle) -> float:
    """Between the 100th step and the last heartbeat before the end."""
    events, steps = EventReader(run.events_file), 0
    process = psutil.Process(handle.process.pid)
    started: tuple[int, float] | None = None
    latest = (0, 0.0)
    while processes.alive(run):
        steps = max([steps, *(event.step for event in events.read() if isinstance(event, StepEvent))])
        try:
            ranks = [child for child in process.children() if "RANK" in child.environ()]
            used = sum(sum(rank.cpu_times()[:2]) for rank in ranks)
        except psutil.Error:
            break
        if ranks and steps >= 100:
            started, latest = started or (steps, used), (steps, used)
        time.sleep(0.1)
    assert started is not None, run.path
    return (latest[1] - started[1]) / (latest[0] - started[0])


def main() -> int:
    """Print every figure beside its limit."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = start_chromium(playwright)
        with serving(Path(folder) / "runs") as server:
            sample, point = first_sample_and_point_s(browser, server)
            print(f"first sample {sample:.1f} s after Start, limit {FIRST_SAMPLE_S} s")
            print(f"first point {point:.2f} s after the first step, limit {FIRST_POINT_S} s", flush=True)
            cost = long_run(browser, server, seconds=20)
            print(f"{POINTS} points: {cost.refresh_ms:.0f} ms of the browser a second, limit {REFRESH_MS:.0f} ms")
            print(f"page: {cost.page_mb:.0f} MB, limit {PAGE_MB:.0f}; {cost.core_percent:.1f} % of a core, limit 5 %")
            print(f"after as many answers as in an hour: {cost.hour_mb:.0f} MB, limit {PAGE_MB:.0f}", flush=True)
            ratios = []
            for pair in range(3):
                alone = cpu_per_step(browser, server, f"alone-{pair}", is_watched=False)
                watched = cpu_per_step(browser, server, f"watched-{pair}", is_watched=True)
                ratios.append(watched / alone)
                print(f"CPU seconds of a step: {alone:.5f} alone, {watched:.5f} watched", flush=True)
            ratio = statistics.median(ratios)
            print(f"a step that is watched to one that is not: {ratio:.3f}, median of {len(ratios)}")
    is_soon = sample <= FIRST_SAMPLE_S and point <= FIRST_POINT_S
    is_small = cost.refresh_ms <= REFRESH_MS and cost.hour_mb <= PAGE_MB and cost.core_percent <= CORE_PERCENT
    return int(not (is_soon and is_small and ratio <= 1.05))


if __name__ == "__main__":
    takes_no_arguments(__doc__)
    sys.exit(main())
