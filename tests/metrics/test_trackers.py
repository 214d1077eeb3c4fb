"""TensorBoard, wandb and trackio show a run, read back with their own readers; and none of them costs a run."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from PIL import Image, UnidentifiedImageError

from tests.runs import make_pictures, run_config, write_preset
from trainer.config.load import load_config
from trainer.config.sections import TrackersConfig
from trainer.launcher import preflight, torchrun
from trainer.metrics.trackers import short, shown_config
from trainer.metrics.trackers.feed import Feed, Figures, Item, Note, Position, SampleImage
from trainer.metrics.trackers.follow import FOLLOW_SECONDS, Sender, Trackers
from trainer.run import process as processes
from trainer.run.events import (
    AnyEvent,
    ErrorEvent,
    EventReader,
    EventWriter,
    RankLine,
    SampleEvent,
    State,
    StatusEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
)
from trainer.run.folder import RunDir
from trainer.system.errors import InputError

NAMES = ("tensorboard", "wandb", "trackio")
WANDB = Path(sys.executable).with_name("wandb")
FIGURES = {
    "loss", "lr", "grad_norm", "seconds", "seconds_data", "seconds_forward", "seconds_backward", "seconds_optimizer",
    "seconds_communication", "images_per_second",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is logged in, and trackio's folder is the test's own."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, run_config(tmp_path))


def step(number: int, loss: float) -> StepEvent:
    return StepEvent(
        step=number, loss=loss, lr=1e-4, grad_norm=0.5, seconds=0.1, seconds_data=0.01, seconds_forward=0.02,
        seconds_backward=0.03, seconds_optimizer=0.04, seconds_communication=float("nan"), images_per_second=40.0,
    )  # fmt: skip


def sample(run: RunDir, number: int) -> SampleEvent:
    path = f"samples/step-{number:06d}-0.png"
    Image.new("RGB", (4, 4), (255, 0, 0)).save(run.path / path)
    return SampleEvent(step=number, prompt="a fox", index=0, path=path)


def status(state: State, number: int = 0) -> StatusEvent:
    return StatusEvent(step=number, state=state)


def memory(run: RunDir, rank: int, number: int, peak: int) -> None:
    with EventWriter(run.rank_file(rank)) as writer:
        writer.write(RankLine(rank=rank, step=number, phase="training", allocated=1, reserved=2, peak=peak, limit=1000))


def write(run: RunDir, *events: AnyEvent) -> None:
    with EventWriter(run.events_file) as writer:
        for event in events:
            writer.write(event)


def warnings(run: RunDir) -> list[str]:
    return [event.message for event in EventReader(run.events_file).read() if isinstance(event, WarningEvent)]


def send(run: RunDir, name: str) -> None:
    """Give a tracker what is there, as a person does by hand."""
    argv = [sys.executable, "-m", "trainer.metrics.trackers", str(run.path), name]
    done = subprocess.run(argv, env=processes.worker_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


Shown = dict[str, list[tuple[int, object]]]
"""{figure: (step, value) of each point}"""


def in_tensorboard(run: RunDir) -> Shown:
    accumulated = accumulate(run)
    tags = accumulated.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in accumulated.Scalars(tag)] for tag in tags}


def accumulate(run: RunDir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run.path / "tensorboard")).Reload()


def texts(run: RunDir) -> list[str]:
    return [point.tensor_proto.string_val[0].decode() for point in accumulate(run).Tensors("events")]


def in_wandb(run: RunDir) -> Shown:
    return points((row["step"], row) for row in (record["item"] for record in wandb_records(run, "history")))


def wandb_records(run: RunDir, kind: str) -> list[dict]:
    """The records of one kind in the run's files, as wandb's own viewer reads them."""
    found = []
    for file in sorted((run.path / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_ctime):
        argv = [WANDB, "leet", "inspect", "--json", file]
        lines = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
        found += [record[kind] for record in map(json.loads, lines) if record["type"] == kind]
    return found


def in_trackio(run: RunDir) -> Shown:
    rows = trackio_rows(run, "select step, metrics from metrics order by id")
    return points((step, json.loads(values)) for step, values in rows)


def trackio_rows(run: RunDir, query: str) -> list[tuple]:
    database = sqlite3.connect(run.path.parent / "trackio" / "shardstudio.db")
    try:
        return database.execute(query).fetchall()
    finally:
        database.close()


def points(rows) -> Shown:
    found: Shown = {}
    for number, values in rows:
        for name, value in values.items():
            if name != "step" and not name.startswith("_"):
                found.setdefault(name, []).append((number, value))
    return found


READERS: dict[str, Callable[[RunDir], Shown]] = {
    "tensorboard": in_tensorboard,
    "wandb": in_wandb,
    "trackio": in_trackio,
}


@pytest.mark.parametrize(
    "name", ["tensorboard", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "tensorboard")]
)
def test_a_run_and_its_resumption_are_one_run_with_every_step_once(run: RunDir, name: str) -> None:
    memory(run, 0, 1, 700)
    memory(run, 1, 1, 800)
    write(run, status("training"), step(1, 3.0), step(2, 2.5), ValidationEvent(step=2, loss=2.75), sample(run, 2))
    send(run, name)
    memory(run, 1, 1, 800)
    memory(run, 1, 2, 900)
    again = (step(2, 2.5), ValidationEvent(step=2, loss=2.75), sample(run, 2))
    write(run, status("starting"), status("training", 1), *again, step(3, float("nan")), status("finished", 3))
    send(run, name)
    found = READERS[name](run)
    assert found["loss"][:2] == [(1, 3.0), (2, 2.5)]
    assert [number for number, _ in found["loss"]] == [1, 2, 3]
    assert found["validation_loss"] == [(2, 2.75)]
    assert found["memory/rank0"] == [(1, 700)]
    assert found["memory/rank1"] == [(1, 800), (2, 900)]
    assert found.keys() >= FIGURES


def test_tensorboard_has_the_pictures_the_config_and_what_happened(run: RunDir) -> None:
    write(run, status("training"), sample(run, 2), WarningEvent(message="hot", step=2))
    write(run, ErrorEvent(message="lost rank 1", remedy="resume", step=2))
    send(run, "tensorboard")
    accumulated = accumulate(run)
    assert accumulated.Tags()["images"] == ["0 a fox"]
    [picture] = accumulated.Images("0 a fox")
    assert (picture.step, picture.width, picture.height) == (2, 4, 4)
    assert texts(run) == ["**state** training", "**warning** hot", "**error** lost rank 1. resume"]
    [config] = accumulated.Tensors("config")
    text = config.tensor_proto.string_val[0].decode()
    assert "    name: tiny\n" in text
    assert "cluster" not in text


@pytest.mark.slow
def test_wandb_without_login_writes_files_for_wandb_sync_and_says_so(run: RunDir) -> None:
    write(run, sample(run, 2), WarningEvent(message="hot", step=2))
    send(run, "wandb")
    [opened] = wandb_records(run, "run")
    [_, said] = warnings(run)
    files = run.path / "wandb" / f"*run-*-{opened['run_id']}"
    assert said == (
        "trackers.wandb writes offline: No API key configured. Use `wandb login` to log in. "
        f"Send it later with: wandb sync {files}"
    )
    assert (opened["project"], opened["display_name"]) == ("shardstudio", run.path.name)
    [row] = [record["item"] for record in wandb_records(run, "history")]
    assert row["samples/0.caption"] == "a fox"
    assert next(record["line"] for record in wandb_records(run, "output_logger")) == "step 2, warning: hot\n"
    config = wandb_records(run, "config")[0]["update"]
    assert config["optim"]["lr"] == 1e-4
    assert "cluster" not in config


@contextmanager
def server(answer: bytes | None) -> Iterator[int]:
    """Yield the port of a server that sends every request the same answer; without one, it never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        open_ones: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    open_ones.append(listening.accept()[0])
                    if answer is not None:
                        open_ones[-1].recv(1 << 16)
                        open_ones[-1].sendall(answer)
                        open_ones[-1].close()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        for one in open_ones:
            one.close()


@pytest.mark.slow  # wandb itself tries for ten seconds
@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", None],
    ids=["no network", "the key is refused", "no answer"],
)
def test_wandb_without_a_server_that_takes_it_writes_files_too(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    write(run, step(1, 3.0))
    with server(answer) as port:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        send(run, "wandb")
    assert in_wandb(run)["loss"] == [(1, 3.0)]
    [said] = warnings(run)
    assert said.startswith("trackers.wandb writes offline: ")
    assert "a" * 40 not in "".join(file.read_text(errors="replace") for file in run.path.rglob("*") if file.is_file())


def test_wandb_that_is_switched_off_is_asked_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write(run, step(1, 3.0))
    send(run, "wandb")
    assert warnings(run) == []
    assert wandb_records(run, "history") == []


def test_trackio_has_the_pictures_the_config_and_what_happened(run: RunDir) -> None:
    write(run, status("training"), sample(run, 2), WarningEvent(message="hot", step=2))
    send(run, "trackio")
    assert trackio_rows(run, "select title, text, level, step from alerts order by id") == [
        ("state", "training", "info", 0),
        ("warning", "hot", "warn", 2),
    ]
    [(number, picture)] = in_trackio(run)["samples/0"]
    assert (number, picture["caption"]) == (2, "a fox")
    [(name, config)] = trackio_rows(run, "select run_name, config from configs")
    assert name == run.path.name
    assert json.loads(config)["optim"]["lr"] == 1e-4
    assert "cluster" not in json.loads(config)


def test_what_trackio_cannot_send_is_told_once_and_without_its_token(run: RunDir, monkeypatch) -> None:
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9/?write_token=abcdef")
    write(run, step(1, 3.0), step(2, 2.0))
    send(run, "trackio")
    [said] = warnings(run)
    assert said.startswith("trackers.trackio: trackio.init() could not ")
    assert "abcdef" not in said


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "GET https://me:pw@host/?write_token=abc&x=1\nfailed, api_key: abc",
            "GET https://***host/?write_token=***&x=1 failed, api_key: ***",
        ),
        ('{"api_key": "abc", "name": "fox"}', '{"api_key": "***", "name": "fox"}'),
        (json.dumps('{"api_key": "abc"}'), '"{\\"api_key\\": \\"***\\"}"'),
        ("Authorization: Bearer abc", "Authorization: Bearer ***"),
        ("{'authorization': 'Basic abc'}", "{'authorization': 'Basic ***'}"),
        (f"no access with hf_{'aB3' * 11}.", "no access with ***."),
        (f"the key {'0a' * 20} is unknown", "the key *** is unknown"),
        ("KeyError: 'loss'", "KeyError: 'loss'"),
        ("hf_hub_download at https://host//path", "hf_hub_download at https://host//path"),
    ],
)
def test_what_looks_like_a_secret_is_not_repeated(text: str, shown: str) -> None:
    assert short(text) == shown


def test_trackers_are_not_given_what_a_site_calls_its_things(tmp_path: Path) -> None:
    cfg = run_config(tmp_path, cluster__slurm={"account": "team-7"}, cluster__image="registry.example.org/s:1")
    given = shown_config(cfg)
    assert "cluster" not in given
    assert given.keys() | {"cluster"} == cfg.model_dump().keys()


class Fake:
    """A Tracker in place of TensorBoard's, which keeps what it gets. broken: done with each item, and at the end."""

    def __init__(self, broken: Callable[[], object] = lambda: None) -> None:
        self.got: list[Item] = []
        self.failed: bool | None = None
        self._broken = broken

    def figures(self, item: Item) -> None:
        self.got.append(item)
        self._broken()

    image = note = figures

    def flush(self) -> None: ...

    def finish(self, failed: bool) -> None:
        self._broken()
        self.failed = failed


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake], Fake]:
    """Put a Fake in TensorBoard's place."""

    def put(fake: Fake) -> Fake:
        connected = types.SimpleNamespace(connect=lambda *given: fake)
        monkeypatch.setitem(sys.modules, "trainer.metrics.trackers.tensorboard", connected)
        return fake

    return put


@contextmanager
def follow(run: RunDir, patience_s: float = 60, end_s: float = 60, code: int = 0) -> Iterator[None]:
    """Inside, rank 0 has a tracker; it exits with this code."""
    trackers = Trackers(patience_s, end_s)
    trackers.start(TrackersConfig(tensorboard=True), run, EventWriter(run.events_file).write)
    yield
    trackers.end(code)


def stopped(run: RunDir, reason: str) -> str:
    rest = f"python -m trainer.metrics.trackers {run.path} tensorboard"
    return f"trackers.tensorboard stopped: {reason}; send the rest with: {rest}"


def until(asked: Callable[[], object], timeout_s: float = 60):
    deadline = time.monotonic() + timeout_s
    while not (answer := asked()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)
    return answer


@pytest.mark.parametrize("code", [0, 1])
def test_a_tracker_gets_what_is_written_to_the_end_and_whether_the_run_failed(run: RunDir, use, code: int) -> None:
    fake = use(Fake())
    with follow(run, code=code):
        write(run, step(1, 3.0))
        until(lambda: fake.got)
        write(run, step(2, 2.0))
    assert [item.step for item in fake.got] == [1, 2]
    assert fake.failed == bool(code)
    assert warnings(run) == []


def test_a_run_whose_events_say_that_it_failed_is_sent_as_failed(run: RunDir, use) -> None:
    fake = use(Fake())
    write(run, ErrorEvent(message="rank 0 died"), status("failed", 1))
    Sender(run, "tensorboard", warnings(run).append).send()
    assert [item.text for item in fake.got] == ["rank 0 died", "failed"]
    assert fake.failed


@pytest.mark.parametrize("error", [pytest.param(ConnectionError, marks=pytest.mark.slow), SystemExit])
def test_a_tracker_that_raises_is_one_warning_without_its_key_and_passes_that_thing_over(
    run: RunDir, use, capfd, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error("401 for api_key=abcdef")

    use(Fake(fail))
    with follow(run, patience_s=1.5):
        write(run, step(1, 3.0), step(2, 2.5))
        until(lambda: warnings(run))
        time.sleep(1.5 + 2 * FOLLOW_SECONDS)  # the watch has looked as well
    assert warnings(run) == [stopped(run, f"{error.__name__}: 401 for api_key=***")]
    logged = capfd.readouterr().err
    assert "Traceback" in logged and "abcdef" not in logged
    fake = use(Fake())
    Sender(run, "tensorboard", warnings(run).append).send()
    assert [item.step for item in fake.got if isinstance(item, Figures)] == [2]


@pytest.mark.parametrize(
    ("patience_s", "reason", "code"),
    [
        (1.5, "it made no progress for 1.5 s", 0),
        (60, "it was not done 0.5 s after the end of the run", 2),
    ],
    ids=["while the run goes on", "at its end"],
)
def test_a_tracker_that_hangs_is_one_warning_and_neither_the_end_nor_exit_handlers_wait_for_it(
    run: RunDir, use, monkeypatch, patience_s: float, reason: str, code: int
) -> None:
    released, handlers = threading.Event(), []
    monkeypatch.setattr("atexit.register", lambda *handler: handlers.append(handler))
    fake = use(Fake(released.wait))
    with follow(run, patience_s, 0.5, code):
        write(run, step(1, 3.0))
        until(lambda: fake.got)
        if patience_s < 60:
            until(lambda: warnings(run))
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert warnings(run) == [stopped(run, reason)]
    assert handlers == [(os._exit, code), (sys.stdout.flush,)]
    released.set()


# A rank 0 of a few lines: it starts a tracker, says so, and ends when its input does.
RANK_0 = """
import atexit, sys, time
from pathlib import Path
from trainer.config.sections import TrackersConfig
from trainer.run.events import EventWriter
from trainer.run.folder import RunDir
from trainer.metrics.trackers.follow import Trackers
run = RunDir.open(Path(sys.argv[1]))
atexit.register(time.sleep, 1000)  # as that of a library that waits for its thread
trackers = Trackers(60, 0.5)
trackers.start(TrackersConfig(**{sys.argv[2]: True}), run, EventWriter(run.events_file).write)
print(flush=True)
sys.stdin.read()
trackers.end(0)
print("not flushed yet")
"""


def rank_0(run: RunDir, name: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", RANK_0, str(run.path), name]
    process = subprocess.Popen(
        argv, env=processes.worker_environment() | {"PYTHONUNBUFFERED": ""}, stdin=pipe, stdout=pipe, text=True
    )
    process.stdout.readline()
    until(Sender(run, name, warnings(run).append).file.exists)
    return process


def test_a_process_ends_whatever_its_tracker_waits_for(run: RunDir) -> None:
    with rank_0(run, "tensorboard") as process:
        os.mkfifo(run.samples / "pipe.png")  # whoever opens it waits for ever
        write(run, SampleEvent(step=1, prompt="a fox", index=0, path="samples/pipe.png"), status("finished"))
        process.stdin.close()
        assert (process.wait(60), process.stdout.read()) == (0, "not flushed yet\n")
    assert warnings(run) == [stopped(run, "it was not done 0.5 s after the end of the run")]


@pytest.mark.parametrize("name", ["tensorboard", pytest.param("wandb", marks=pytest.mark.slow)])
def test_what_a_killed_rank_0_has_not_sent_is_sent_by_hand_and_not_while_it_lives(run: RunDir, name: str) -> None:
    with rank_0(run, name) as process:
        write(run, step(1, 3.0))
        until(lambda: '"step": 1' in Sender(run, name, warnings(run).append).file.read_text())
        with pytest.raises(InputError, match="another process sends this run's events"):
            Sender(run, name, warnings(run).append).send()
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        until(lambda: not any(child.is_running() for child in children))
    write(run, step(2, 2.0), ErrorEvent(message="rank 0 died"), status("failed", 2))
    send(run, name)
    assert READERS[name](run)["loss"][-1] == (2, 2.0)


def test_a_package_that_is_not_installed_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pictures(tmp_path / "photos", 2)
    preset = write_preset(tmp_path / "mine.yaml", tmp_path / "photos")
    preset.write_text(preset.read_text() + "trackers: {trackio: true}\n")
    (tmp_path / "trackio").mkdir()  # a folder of that name is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(place for place in sys.path if "site-packages" not in place)])
    message = "trackers.trackio: true needs the package trackio; pip install trackio"
    with pytest.raises(InputError) as error:
        preflight.new_run(load_config(preset), tmp_path / "runs")
    assert str(error.value) == f"{preset}:5: {message}"
    assert not (tmp_path / "runs").exists()
    run = RunDir.create(tmp_path, run_config(tmp_path))
    with pytest.raises(InputError) as error:
        Trackers().start(TrackersConfig(trackio=True), run, lambda event: None)
    assert str(error.value) == message


def test_without_trackers_nothing_is_started(run: RunDir) -> None:
    before = threading.active_count()
    trackers = Trackers()
    trackers.start(TrackersConfig(), run, lambda event: None)
    assert threading.active_count() == before
    trackers.end(0)
    assert not (run.path / "trackers").exists()


def test_a_real_run_is_shown_by_all_trackers(tmp_path: Path) -> None:
    changes = {f"trackers__{name}": True for name in NAMES}
    cfg = run_config(make_pictures(tmp_path / "photos"), train__steps=3, **changes)
    run = RunDir.create(tmp_path, cfg)
    torchrun.start(cfg, run)
    assert processes.wait(run, 120) == "finished"
    for name in NAMES:
        found = READERS[name](run)
        assert [number for number, _ in found["loss"]] == [1, 2, 3]
        assert {"memory/rank0"} <= found.keys()
    assert [said for said in warnings(run) if "stopped" in said] == []


@pytest.mark.slow
def test_a_real_run_whose_tracker_waits_for_a_server_for_ever_is_finished_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = run_config(make_pictures(tmp_path / "photos"), train__steps=3, trackers__wandb=True)
    run = RunDir.create(tmp_path, cfg)
    with server(None) as port:
        for name, value in (("API_KEY", "a" * 40), ("BASE_URL", f"http://127.0.0.1:{port}"), ("INIT_TIMEOUT", "1000")):
            monkeypatch.setenv(f"WANDB_{name}", value)
        torchrun.start(cfg, run)
        assert processes.wait(run, 300) == "finished"
    [said] = warnings(run)
    assert said.startswith(
        "trackers.wandb stopped: it was not done 30 s after the end of the run; send the rest with: "
    )


def test_a_picture_outside_of_a_run_and_what_is_not_a_png_are_sent_nowhere(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, run_config(make_pictures(tmp_path / "photos", 1)), at=tmp_path / "run")
    (run.samples / "ps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with EventWriter(run.events_file) as events:
        for index, path in enumerate(("../photos/00.png", "samples/ps.png")):
            events.write(SampleEvent(step=1, index=index, prompt="a fox", path=path))
    place = Position(tmp_path / "place.json")
    outside, postscript = Feed(run, place).items()
    assert isinstance(outside, Note) and outside.text == "../photos/00.png: no image"
    assert isinstance(postscript, SampleImage)
    with pytest.raises(UnidentifiedImageError):
        postscript.image()
