"""Whatever became of a file below runs/, it harms that one thing, which is named; everything else still answers."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app.data.captions import Captions, Card
from app.form import draft as form
from app.form.draft import Draft
from app.runs import monitor
from app.runs import run_table as all_runs
from app.runs.run_screen import LogWish
from app.studio import Studio
from app.web.answers import Calls
from app.web.pages import files, queue, runs, samples
from app.web.pages import run as watch
from tests.runs import step_event
from trainer.config.load import ConfigError, load_config_text
from trainer.launcher.queue import Entry, Queue
from trainer.run.events import EventWriter, ExportEvent, RankLine, SampleEvent, StatusEvent
from trainer.run.folder import RunDir
from trainer.run.manifest import sealed
from trainer.run.process import Launch
from trainer.system.errors import InputError

PATIENCE_S = 5
CONFIG = '{{"name": "tiny", "model": {{"family": "flux2"}}, "data": {{"path": "{0}", "resolution": 64}}}}\n'


def make_run(runs: Path, name: str) -> RunDir:
    """A run that has finished, with all that a run leaves."""
    cfg = load_config_text(CONFIG.format(runs.parent / "pictures"), (), runs / "preset.yaml").config
    run = RunDir.create(runs, cfg, runs / name)
    run.config_file.write_text(CONFIG.format(runs.parent / "pictures"))  # shorter than with all defaults
    argv = ["python", "-m", "trainer.launcher.agent", "-m", "trainer", str(run.path)]
    Launch(2**22 - 1, 1.0, argv, since_boot=1.0).write(run)
    with EventWriter(run.events_file) as events:
        events.write(StatusEvent(state="starting"))
        for step in (1, 2):
            events.write(step_event(step))
            Image.new("RGB", (64, 64), (step, 0, 0)).save(run.samples / f"{step}.png")
            events.write(SampleEvent(step=step, prompt=f"a boat of {name}", index=0, path=f"samples/{step}.png"))
        events.write(ExportEvent(step=2, path="export/adapter.safetensors", what="adapter", format="peft"))
        events.write(StatusEvent(step=2, state="finished"))
    with EventWriter(run.rank_file(0)) as ranks:
        ranks.write(RankLine(rank=0, step=2, phase="idle", allocated=1, reserved=2, peak=3, limit=4))
    (run.logs / "launch-1.log").write_text(f"the words of {name}\n")
    (run.export / "adapter.safetensors").write_bytes(b"weights")
    checkpoint = run.checkpoints / "step-000002"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_bytes(sealed({"step": 2, "files": {}, "config": {}}))
    run.identity_file.write_text("a word")
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with two of each thing, made once."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "pictures").mkdir()
    Image.new("RGB", (64, 64)).save(folder / "pictures" / "a.png")
    (folder / "pictures" / "a.txt").write_text("a caption\n")
    studio = Studio(folder / "runs")
    (folder / "runs").mkdir()
    for name in ("good", "harmed"):
        make_run(studio.runs, name)
        studio.save_preset(_checked(studio), f"{name}-preset")
        all_runs.change_tags(studio.runs, [name], f"tag of {name}")
    text = RunDir(studio.runs / "good").config_file.read_text()
    for number, name in enumerate(("good", "harmed"), 1):
        _entry(studio.queue, "taken", Entry(number, f"{name}-taken", text, run=name))
        _entry(studio.queue, "waiting", Entry(number + 2, f"{name}-waits", text))
    studio.queue.change(studio.queue.settings)
    studio.save_draft(Draft(studio.presets()["quickstart"], {"train.steps": 7}))
    Captions(studio.runs / "drafts" / "captions.jsonl").write(Card(folder / "pictures" / "a.png", ""), "another one")
    return folder


def _checked(studio: Studio) -> Any:
    return form.check(Draft(studio.presets()["quickstart"]))


def _entry(queue: Queue, place: str, entry: Entry) -> None:
    folder = queue.runs / "queue" / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{entry.number:06d}.json").write_text(json.dumps({"format": 1, **asdict(entry)}))


def _put(content: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(content) and None


def _text(change: Callable[[str], str]) -> Callable[[Path], None]:
    def harm(file: Path) -> None:
        text = file.read_bytes().decode(errors="surrogateescape")
        file.write_bytes(change(text).encode(errors="surrogateescape"))

    return harm


def _replaced(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def harm(file: Path) -> None:
        file.unlink()
        make(file)

    return harm


def _first_value(text: str, change: Callable[[dict[str, Any]], Any]) -> str:
    """The same file with another first object, of JSON or of YAML, which reads JSON."""
    try:
        values = json.loads(text.splitlines()[0]) if text.startswith("{") and "\n{" in text else json.loads(text)
    except ValueError:
        return text
    return json.dumps(change(values)) + "\n"


def _without_first(values: dict[str, Any]) -> Any:
    return dict(list(values.items())[1:])


DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "empty": _put(b""),
    "garbage": _put(b"\xff\xfe{{[ not a word \x01\n"),
    "zeros": _put(b"\0" * 4096),
    "a list": _put(b"[]\n"),
    "null": _put(b"null\n"),
    "a field missing": _text(lambda text: _first_value(text, _without_first)),
    "a later field": _text(lambda text: _first_value(text, lambda values: {**values, "of_a_later_version": 1})),
    "format 2": _text(lambda text: _first_value(text, lambda values: {**values, "format": 2})),
    "wrong types": _text(lambda text: _first_value(text, lambda values: {key: [{}] for key in values})),
    "half": _text(lambda text: text[: len(text) // 2]),
    "deep": _put(b"[" * 100_000),
    "a folder": _replaced(Path.mkdir),
    "a pipe": _replaced(os.mkfifo),
    "endless": _replaced(lambda file: file.symlink_to("/dev/zero")),
    "a link to itself": _replaced(lambda file: file.symlink_to(file)),
}
FILES = {
    "harmed/config.yaml": "harmed",
    "harmed/launch.json": "harmed",
    "harmed/events.jsonl": "harmed",
    "harmed/ranks/rank0.jsonl": "harmed",
    "harmed/logs/launch-1.log": "harmed",
    "harmed/checkpoints/step-000002/manifest.json": "harmed",
    "harmed/samples/1.png": "harmed",
    "harmed/export/adapter.safetensors": "harmed",
    "harmed/.identity": "harmed",
    "queue/settings.json": "",
    "queue/waiting/000004.json": "",
    "queue/taken/000002.json": "",
    "drafts/draft.json": "",
    "drafts/captions.jsonl": "",
    "tags.json": "",
    "presets/harmed-preset.yaml": "",
}
STRANGE = ("a pipe", "endless", "a link to itself")
"""Damages that no version leaves: a run folder with one is refused as a whole."""
# Where nothing has to be said: text that may be anything, a field that is not needed, or what only a command reads.
FINE = {
    "harmed/config.yaml": {"a field missing"},
    "harmed/launch.json": {"a later field", "format 2"},
    "harmed/events.jsonl": {"empty", "a field missing", "a later field", "format 2", "half", "deep"},
    "harmed/ranks/rank0.jsonl": {"empty", "a later field", "half", "deep"},
    "harmed/logs/launch-1.log": set(list(DAMAGES)[:11]),
    "harmed/checkpoints/step-000002/manifest.json": set(DAMAGES) - {"format 2"},
    "harmed/samples/1.png": {"a field missing", "a later field", "format 2", "wrong types"},
    "harmed/export/adapter.safetensors": set(DAMAGES),
    "harmed/.identity": set(DAMAGES),
    "queue/settings.json": {"a field missing", "a later field"},
    "queue/waiting/000004.json": {"a field missing", "a later field"},
    "queue/taken/000002.json": {"a field missing", "a later field"},
    "drafts/draft.json": {"a later field", "format 2"},
    "drafts/captions.jsonl": {"empty", "a later field", "format 2"},
    "tags.json": {"a field missing", "a later field"},
    "presets/harmed-preset.yaml": {"a field missing", "a later field", "format 2", "wrong types", "half"},
}


class NoAnswerError(Exception):
    """No OSError, which a handler may rightly catch."""


@contextmanager
def in_time() -> Iterator[None]:
    """The block ends by NoAnswerError after PATIENCE_S, and may take 4 GiB, threads and all."""

    def give_up(*_: object) -> None:
        raise NoAnswerError(f"no answer within {PATIENCE_S} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    former = signal.signal(signal.SIGALRM, give_up)
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**32, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, former)


def answers(studio: Studio) -> dict[str, str]:
    """What the page shows in all places, by place."""
    listed = runs.calls(studio)["runs_list"]
    while '"unread"' in (table := json.dumps(listed())):  # one answer reads only so long
        pass
    found = {
        "runs": table,
        "queue": asked(queue.calls(studio), "queue_state"),
        "names": " ".join(run.path.name for run in studio.find_runs()),
        "presets": " ".join(studio.presets()),
    }
    for name in ("good", "harmed"):
        found[f"watch {name}"] = watched(studio, name)
        found[f"samples {name}"] = asked(samples.calls(studio), "samples_list", name=name)
        cells = [samples.Cell(0, f"a boat of {name}", step) for step in (1, 2)]
        found[f"images {name}"] = asked(samples.calls(studio), "samples_images", name=name, cells=cells)
        found[f"exports {name}"] = asked(files.calls(studio), "files_list", name=name)
    draft, said = studio.draft(), studio.draft_problem
    found["draft"] = f"{draft.values} {said}"
    captions = Captions(studio.runs / "drafts" / "captions.jsonl")
    captions.write(Card(studio.runs.parent / "pictures" / "a.png", ""), "after the damage")
    found["history"] = captions.problem
    found["caption"] = (studio.runs.parent / "pictures" / "a.txt").read_text()
    found["undo"] = f"{captions.undo()} {captions.undo()} {captions.problem}"
    try:
        found["preset"] = str(_checked_preset(studio))
    except ConfigError as error:
        found["preset"] = str(error)
    return found


def asked(calls: Calls, function: str, **values: Any) -> str:
    """What a script of the page is answered, as text."""
    try:
        return str(calls[function](**values))
    except (InputError, OSError) as error:
        return monitor.explained(error)


def _checked_preset(studio: Studio) -> Any:
    return form.check(Draft(studio.preset("harmed-preset"))).config.name


def untouched(found: Mapping[str, str], is_run_whole: bool) -> list[str]:
    """What is not said any more of the things that nothing happened to."""
    wanted = {
        "runs": ['"name": "good", "state": "finished"', "harmed"],
        "queue": ["good-taken", "good-waits"],
        "names": ["good", "harmed"],
        "presets": ["good-preset", "harmed-preset", "quickstart"],
        "watch good": ["Finished after 2 steps", "the words of good"],
        "samples good": ["a boat of good"],
        "exports good": ["adapter.safetensors"],
        "caption": ["after the damage"],
    }
    if is_run_whole:
        wanted |= {"watch harmed": ["Finished after 2 steps"], "exports harmed": ["adapter.safetensors", "step-000002"]}
    return [f"{text} in {place}" for place, texts in wanted.items() for text in texts if text not in found[place]]


def watched(studio: Studio, name: str) -> str:
    """What the screen of a run shows."""
    wish = LogWish()
    return asked(watch.calls(studio), "run_view", name=name, known={}, log=wish)


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_a_power_cut_emptied_or_a_stranger_made_harms_one_thing_that_is_named(
    whole: Path, tmp_path: Path, file: str
):
    assert "\n".join(not_as_wanted(whole, tmp_path, file, ("empty", "a pipe"))) == ""


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_harms_one_thing_that_is_named_and_all_others_answer(whole: Path, tmp_path: Path, file: str):
    assert "\n".join(not_as_wanted(whole, tmp_path, file, DAMAGES)) == ""


def not_as_wanted(whole: Path, tmp_path: Path, file: str, damages: Iterable[str]) -> list[str]:
    """A line per damage and thing that is not shown as it is without, and per damage that is not named."""
    wrong = []
    for number, damage in enumerate(damages):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        history = folder / "runs/drafts/captions.jsonl"
        history.write_text(history.read_text().replace(str(whole), str(folder)))
        DAMAGES[damage](folder / "runs" / file)
        studio = Studio(folder / "runs")
        try:
            with in_time():
                found = answers(studio)
        except Exception as error:  # noqa: BLE001 - whatever leaves a handler is an empty page
            wrong.append(f"{damage}: {type(error).__name__}: {str(error)[:80]}")
            continue
        is_run_whole = "/checkpoints/" in file and damage not in STRANGE
        wrong += [f"{damage}: no {missing}" for missing in untouched(found, is_run_whole)]
        name = Path(file).name
        if damage not in FINE.get(file, set()) and not any(re.search(f"{name}:", text) for text in found.values()):
            wrong.append(f"{damage}: {Path(file).name} is not named")
    return wrong
