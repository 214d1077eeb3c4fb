"""The page as its users meet it: a server of its own process, Chromium, and run folders that are there already."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import psutil
from playwright.sync_api import APIResponse, Browser, Error, Page, Playwright, Route, expect

from tests.runs import make_pictures, run_config, step_event, write
from trainer.config.schema import RunConfig
from trainer.run.events import AnyEvent, EventWriter, RankLine, SampleEvent, StatusEvent, ValidationEvent
from trainer.run.folder import RunDir
from trainer.run.process import Launch

Scheme = Literal["light", "dark"]
ROOT = Path(__file__).parents[2]
STARTED_WITHIN_S = 120
PATIENCE_S = 90
"""For whatever the page is to show: only a page that never shows it takes so long."""
BEYOND = 3
"""Tests fail at this multiple of a limit: other work shares the cores."""
TRAINED_WITHIN_S = 240
"""A real run of two ranks, or what it does between two answers."""
LONG_AGO_S = 36_000
HANDLERS = "**/calls/*"
"""Where the page asks the server."""
CORE = """() => {
  const script = document.querySelector('script[src^="/scripts/"]').src;
  return import(script.replace(/[^/]*$/, 'core.js')).then(core => { window.studio = core; });
}"""
EXPLAINED_WITHIN_S = 5
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@dataclass
class Server:
    """`launch.py` serving a page. runs: the folder it shows.  program: that or another which does the same."""

    runs: Path
    options: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: free_port())
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    program: Path = ROOT / "launch.py"

    @property
    def origin(self) -> str:
        """Where it listens; what opens it is `url`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The address that it printed last, which opens the page: with its token, if it asks for no password."""
        return re.findall(r"^http://\S+", self.log, re.MULTILINE)[-1]

    def start(self) -> float:
        """Returns the seconds until it answered."""
        began = time.monotonic()
        argv = [sys.executable, str(self.program), "--runs", str(self.runs), "--port", str(self.port)]
        with self._log_file.open("ab") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.environment}
            self.process = subprocess.Popen(
                [*argv, *self.options],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        while time.monotonic() - began < STARTED_WITHIN_S:
            try:
                httpx.get(self.origin, timeout=5)
            except httpx.TransportError:
                assert self.process.poll() is None, self.log
                time.sleep(0.1)
            else:
                return time.monotonic() - began
        raise AssertionError(f"no answer from {self.origin}: {self.log}")

    def kill(self) -> None:
        """As a power cut would: nothing of it is asked to end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @property
    def log(self) -> str:
        return self._log_file.read_text()

    @property
    def _log_file(self) -> Path:
        """One of its own: another server may show the same folder."""
        return self.runs.with_name(f"{self.runs.name}-{self.port}.log")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def serving(runs: Path, *options: str, **values: Any) -> Iterator[Server]:
    """A server, and no process of its runs afterwards. values: of the server's fields."""
    server = Server(runs, options, **values)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        for process in psutil.process_iter():
            try:
                if any(str(runs) in part for part in process.cmdline()):
                    process.kill()
            except psutil.Error:
                continue


def start_chromium(playwright: Playwright, *flags: str) -> Browser:
    """Debian's Chromium: nothing is downloaded."""
    return playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*FLAGS, *flags])


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """The page in a browser context of its own, which knows nothing of the others. options: those of `visited`."""
    with closing(browser.new_context()) as context, visited(context.new_page(), url, **options) as page:
        yield page


@contextmanager
def visited(tab: Page, url: str, width: int = 1280, height: int = 900, scheme: Scheme = "light") -> Iterator[Page]:
    """The page in a tab. Afterwards: no error of its scripts, no request to another host, and the tab is empty."""
    tab.set_viewport_size({"width": width, "height": height})
    tab.emulate_media(color_scheme=scheme)
    try:
        with faultless(tab, url):
            tab.goto(url if "#" in url else f"{url}#/new")  # without runs, the page begins elsewhere
            look_settled(tab)
            yield tab
    finally:
        if not tab.is_closed():
            tab.goto("about:blank")


@contextmanager
def faultless(tab: Page, url: str) -> Iterator[None]:
    """Afterwards: no error of a tab's scripts, and no request to another host than the address's."""
    tab.set_default_timeout(PATIENCE_S * 1e3)
    expect.set_options(timeout=PATIENCE_S * 1e3)  # its own is 5 s, which a busy machine may take
    wrong: list[str] = []
    listeners: dict[Any, Any] = {
        "pageerror": lambda error: wrong.append(f"error: {error}"),
        "request": lambda request: wrong.extend(_foreign(request.url, url)),
        "websocket": lambda socket: wrong.extend(_foreign(socket.url, url)),
    }
    for event, listener in listeners.items():
        tab.on(event, listener)
    try:
        with death_explained(tab):
            yield
    finally:
        for event, listener in listeners.items():
            tab.remove_listener(event, listener)
    assert not wrong, wrong


@contextmanager
def death_explained(tab: Page) -> Iterator[None]:
    """When a tab's process dies, say by which signal, and close the tab. Playwright says only that it crashed."""
    assert tab.context.browser is not None
    devtools, deaths = tab.context.browser.new_browser_cdp_session(), []
    devtools.on("Target.targetCrashed", lambda death: deaths.append(death))
    devtools.send("Target.setDiscoverTargets", {"discover": True})
    try:
        yield
    except Error as error:
        if "crashed" not in error.message:
            raise
        deadline = time.monotonic() + EXPLAINED_WITHIN_S
        while not deaths and time.monotonic() < deadline:
            devtools.send("Browser.getVersion")  # messages that wait are read meanwhile
        tab.close()
        how = (
            ", ".join(f"{death['status']}, {_signal(death['errorCode'])}" for death in deaths)
            or "Chromium does not say how"
        )
        free = psutil.virtual_memory().available >> 20
        raise AssertionError(f"the tab's process died ({how}); {free} MiB of memory are free") from error
    finally:
        devtools.detach()


def _signal(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"code {number}"


def look_settled(page: Page) -> None:
    """Wait for the first answer, as a user does who reads before the first click. `studio` is then `core.js`."""
    page.locator("#why[data-state]").wait_for()
    page.evaluate(CORE)


def reload(page: Page) -> None:
    page.reload()
    look_settled(page)


def _foreign(asked: str, url: str) -> list[str]:
    parts = urlsplit(asked)
    is_own = parts.scheme in ("data", "blob") or parts.netloc == urlsplit(url).netloc
    return [] if is_own else [f"asked {asked}"]


def until(page: Page, condition: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for a condition in the page's language. One that fails while the page is built anew does not count."""
    script = f"() => {{ try {{ return {condition} }} catch {{ return false }} }}"
    page.wait_for_function(script, timeout=timeout_s * 1e3)


@contextmanager
def answers_held(page: Page) -> Iterator[list[tuple[Route, APIResponse]]]:
    """The server answers what the page asks meanwhile; the answers come at the end, in its order."""
    asked: list[Route] = []
    held: list[tuple[Route, APIResponse]] = []

    def hold(route: Route) -> None:
        asked.append(route)
        held.append((route, route.fetch()))

    def let_go() -> None:
        while asked:  # also what is asked meanwhile
            until_so(page, lambda: bool(held))
            route, answer = held.pop(0)
            route.fulfill(response=answer)
            asked.remove(route)

    page.route(HANDLERS, hold)
    yield held
    let_go()
    page.unroute(HANDLERS)  # what is asked from now on goes on
    let_go()  # what was asked just before


@contextmanager
def held_back(page: Page, name: str) -> Iterator[list[Route]]:
    """Requests for one handler do not reach the server meanwhile."""
    held: list[Route] = []
    page.route(HANDLERS, lambda route: held.append(route) if route.request.url.endswith(name) else route.continue_())
    yield held
    for route in held:
        route.continue_()
    page.unroute(HANDLERS)


def until_so(page: Page, is_so: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait for what is not told in the page's language; the page goes on meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        page.wait_for_timeout(50)


def state_is(page: Page, *states: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait until the run that is watched is in one of the states."""
    until(page, f"{list(states)}.includes(document.querySelector('#run').dataset.state)", timeout_s)


def ask_again(page: Page) -> None:
    """Let the page ask at once for what it shows, as it does when its window is seen again."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def visit(page: Page, *place: str) -> None:
    """Go to an address of the page, as a link does."""
    page.evaluate("place => { location.hash = '#/' + place.map(encodeURIComponent).join('/'); }", list(place))


def watch(page: Page, run: str) -> None:
    """Open the screen of a run, by its name, and wait until it tells of it and no longer of another."""
    visit(page, "runs", run)
    until(page, f"document.querySelector('#run').dataset.run === {json.dumps(run)}")


def show(page: Page, name: str) -> None:
    """Open one of the screens in the rail."""
    page.locator("#rail").get_by_role("link", name=name, exact=True).click()


@contextmanager
def data_screen(page: Page) -> Iterator[Page]:
    """Open the screen Data and wait for its first image. What the browser remembers is forgotten afterwards."""
    show(page, "Data")
    page.locator(".pc[data-name='00.png']").get_by_role("textbox").wait_for()
    yield page
    page.evaluate("localStorage.clear()")


def open_group(page: Page, name: str) -> None:
    """Open one of the groups under More."""
    group = page.locator(f"#group-{name.lower()}")
    if group.get_attribute("open") is None:
        group.locator("summary").click()


def write_over(page: Page, name: str, text: str) -> None:
    """Type into an input in place of what is there, as with a keyboard."""
    box = page.locator(f"#{name}")
    box.click()
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    box.press_sequentially(text)


def settled(page: Page) -> None:
    """Wait until what was typed has been answered."""
    until(
        page,
        "document.querySelector('#why').dataset.state && document.querySelector('#why').dataset.busy === undefined",
    )


def recorded(runs: Path, name: str, events: Sequence[AnyEvent] = (), **changes: Any) -> RunDir:
    """The folder of a run that ended some time ago, as its trainer would have left it: 2 ranks, 40 steps, 4 samples."""
    pictures = runs.parent / "pictures"
    if not pictures.exists():
        make_pictures(pictures)
    fields = {"sample__prompts": ["a cat", "a dog"], "sample__every": 20, "train__steps": 40, "parallel__devices": 2}
    config: RunConfig = run_config(pictures, **fields | changes)
    run = RunDir.create(runs, config, at=runs / name)
    write(run, *_history(run, config), *(events or [StatusEvent(state="finished", step=40)]))
    gib, steps = 2**30, config.train.steps
    for rank in range(2):
        with EventWriter(run.rank_file(rank)) as writer:
            memory = {"allocated": (6 + rank) * gib, "reserved": 9 * gib, "peak": 11 * gib, "limit": 24 * gib}
            ended = time.time() - LONG_AGO_S + steps
            writer.write(RankLine(rank=rank, step=steps, phase="training", time=ended, **memory))
    return run


@contextmanager
def in_training(run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the run's torchrun meanwhile."""
    argv = ["sleep", "1000"]
    with subprocess.Popen(argv) as process:
        Launch.of(process, argv).write(run)
        try:
            yield process
        finally:
            process.kill()


def _history(run: RunDir, config: RunConfig) -> Iterator[AnyEvent]:
    from PIL import Image

    began = time.time() - LONG_AGO_S
    yield StatusEvent(state="training", time=began)
    for step in range(1, config.train.steps + 1):
        loss = 1 / step + config.optim.lr
        parts = {"seconds_data": 0.02, "seconds_forward": 0.13, "seconds_backward": 0.3, "seconds_optimizer": 0.02}
        parts |= {"seconds_communication": 0.1, "seconds": 0.5}
        yield step_event(step, loss, lr=config.optim.lr, grad_norm=1.0, time=began + step, **parts)
        if step % 20 == 0:
            yield ValidationEvent(step=step, loss=loss, time=began + step)
            for index, prompt in enumerate(config.sample.prompts):
                path = run.samples / f"step-{step:06d}-{index}.png"
                Image.new("RGB", (64, 64), (step * 5, 90 * index, 120)).save(path)
                yield SampleEvent(
                    step=step, prompt=prompt, index=index, path=str(path.relative_to(run.path)), time=began + step
                )
