"""Every field of every JSON file of a run folder, of a wrong type: that run is named, and all others are there."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.studio import Studio
from app.web.answers import answering
from app.web.pages import files, frame, queue, results, run, runs, samples
from tests.app.browser import recorded
from tests.fuzz.target import num_values, with_wrong_type
from tests.runs import write
from trainer.run.drawings import Drawing
from trainer.run.events import (
    CheckpointEvent,
    ErrorEvent,
    ExportEvent,
    LengthEvent,
    PromptsEvent,
    StageEvent,
    StatusEvent,
    ValidationEvent,
    WarningEvent,
)
from trainer.run.folder import RunDir
from trainer.run.manifest import sealed
from trainer.run.process import HIGHEST_PID, Launch

WRONG: tuple[Any, ...] = (
    *("x", "", "1e999", -1, 10**400, 2**63, 1e308, True, None),
    *([], [None], {}, {"a": [{}]}, [[]] * 3),
)
SHARE = 0.01
"""Part of all wrong values in `make test`."""


def make_runs(folder: Path) -> Path:
    """Two runs. The one that is attacked has ended without a word, and has a file of each kind."""
    found = folder / "runs"
    mine = recorded(found, "mine")
    run = recorded(found, "attacked", [StatusEvent(state="training", step=40)])
    write(
        run,
        StageEvent(name="tune", number=1, count=2),
        LengthEvent(steps=40, epoch_steps=4.0, epoch=1.0),
        ValidationEvent(step=40, loss=0.5, perplexity=1.5, losses={"a": 0.1}, metrics={"b": 0.1}),
        PromptsEvent(prompts=("a cat",), instead_of=("a dog",)),
        CheckpointEvent(path="checkpoints/step-000040"),
        ExportEvent(path="export/a.safetensors", what="adapter", format="peft", difference=0.1, dtype="bf16"),
        WarningEvent(message="look"),
        ErrorEvent(message="it broke", rank=0, log="logs/launch-1.log"),
        StatusEvent(state="training", step=40, done=1, total=2),
    )
    short = f"name: tiny\nmodel: {{family: flux2}}\ndata: {{path: {folder / 'pictures'}, resolution: 64}}\n"
    for one in (mine, run):
        one.config_file.write_text(short)  # read faster than with all defaults
    Launch(HIGHEST_PID, 1.0, ["python", "-m", "trainer", str(run.path)], since_boot=1.0).write(run)
    (run.logs / "launch-1.log").write_text("a line\n")
    attempt = run.logs / f"{run.path.name}-1_x" / "attempt_0" / "0"
    attempt.mkdir(parents=True)
    (attempt / "error.json").write_text(json.dumps({"message": {"message": "no", "extraInfo": {"timestamp": "1"}}}))
    (run.export / "a.safetensors").write_bytes(b"weights")
    (run.requests / "prompts.json").write_text(json.dumps(["a fox"]))
    checkpoint = run.checkpoints / "step-000040"
    checkpoint.mkdir()
    facts = {"step": 40, "files": {"a": 1}, "checksums": {"a": "0"}, "optimizer": "adamw", "samples_seen": 3}
    facts |= {"skipped": 0, "validation_loss": 0.5, "config": {"name": "x"}, "data": "y", "place": {"a": 1}}
    (checkpoint / "manifest.json").write_bytes(sealed(facts | {"batch_sizes": [[4, 40]]}))
    (checkpoint / "a").write_text("a")
    drawing = run.path / "drawings" / "20260101-000000"
    drawing.mkdir(parents=True)
    (drawing / "drawing.json").write_text(json.dumps({name: 1 for name in Drawing.__dataclass_fields__}))
    lines = {json.loads(line)["type"]: line for line in run.events_file.read_text().splitlines()}
    run.events_file.write_text("".join(f"{line}\n" for line in lines.values()))  # one of each kind
    Studio(found).queue.add(run.config())
    taken = found / "queue" / "taken" / "000001.json"
    taken.write_text(
        (found / "queue" / "waiting" / "000001.json").read_text().replace('"run": ""', '"run": "attacked"')
    )
    return found


def spots(folder: Path) -> list[tuple[Path, float]]:
    """All values in the JSON files of the run: the file, and the share of its values that stand before."""
    found = []
    for file in sorted([*folder.rglob("*.json"), *folder.rglob("*.jsonl")]):
        values = [json.loads(line) for line in file.read_text().splitlines()] if file.suffix == ".jsonl" else []
        count = num_values(values or [json.loads(file.read_text())])
        found += [(file, (at + 0.5) / count) for at in range(count)]
    return found


def faults(folder: Path) -> list[str]:
    """What the page answers wrongly: a fault instead of a sentence, no answer that can be sent, or no other run."""
    studio = Studio(folder)
    groups = [module.calls(studio) for module in (frame, runs, run, samples, files, queue, results)]
    answer = answering(groups)
    found = []
    asked: dict[str, dict[str, Any]] = {
        "runs_list": {}, "live": {}, "queue_state": {}, "compare_show": {"runs": ["attacked", "mine"]},
        "run_view": {"name": "attacked", "known": {}, "log": {}}, "files_list": {"name": "attacked"},
        "samples_list": {"name": "attacked"}, "result_drawings": {"run": "attacked"},
        "result_checkpoints": {"run": "attacked"},
    }  # fmt: skip
    sent = {}
    for name, values in asked.items():
        given = answer[name](values)
        if "a fault of ShardStudio" in given.get("error", ""):
            found.append(f"{name}: {given['error']}")
        try:
            sent[name] = orjson.dumps(given, option=orjson.OPT_SERIALIZE_NUMPY).decode()
        except (TypeError, ValueError) as error:
            found.append(f"{name}: cannot be sent: {error}")
    rows = {row["name"]: row["state"] for row in answer["runs_list"]({}).get("value", {}).get("rows", [])}
    if rows.get("mine") != "finished" or "attacked" not in rows:
        found.append(f"the list is {rows}")
    if '"mine"' not in sent.get("compare_show", ""):
        found.append("mine is not compared")
    return found


def attacked(folder: Path, file: Path, where: float, wrong: Any) -> list[str]:
    """The faults with one wrong value. The folder is as before afterwards."""
    before = {path: path.read_bytes() for path in (file, folder / "attacked" / "events.jsonl")}
    content = with_wrong_type(before[file], where, wrong)
    if file.name == "manifest.json" and isinstance(facts := json.loads(content), dict):
        checksum = json.loads(before[file])["checksum"]
        is_own = facts.get("checksum") == checksum  # else the checksum itself is the wrong value
        content = sealed({name: part for name, part in facts.items() if name != "checksum"}) if is_own else content
    file.write_bytes(content)
    try:
        return [f"{file} at {where:.4f} = {str(wrong)[:20]}: {fault}" for fault in faults(folder)]
    finally:
        for path, former in before.items():
            path.write_bytes(former)
        shutil.rmtree(folder / "drafts", ignore_errors=True)


@pytest.mark.parametrize(
    "part", [f"1/{int(1 / SHARE)}", *(pytest.param(f"{part}/4", marks=pytest.mark.slow) for part in range(4))]
)
def test_no_wrong_type_in_any_file_of_a_run_hides_another_run(tmp_path: Path, part: str) -> None:
    folder = make_runs(tmp_path)
    assert faults(folder) == []
    every = [(*spot, wrong) for spot in spots(folder / "attacked") for wrong in WRONG]
    random.Random(0).shuffle(every)
    first, step = map(int, part.split("/"))
    assert [fault for one in every[first::step] for fault in attacked(folder, *one)] == []


ODD_NAMES: dict[str, Callable[[RunDir], Path]] = {
    "an attempt that is no number": lambda run: run.logs / f"{run.path.name}-1_x" / "attempt_x",
    "an attempt of 200 digits": lambda run: run.logs / f"{run.path.name}-1_x" / f"attempt_{'9' * 200}",
    "a rank that is no number": lambda run: run.logs / f"{run.path.name}-1_x" / "attempt_0" / "zero" / "error.json",
    "a checkpoint of 200 digits": lambda run: run.checkpoints / f"step-{'1' * 200}",
    "a stage of 200 digits": lambda run: run.path / "stages" / f"{'1' * 200}-x",
    "a rank file of 200 digits": lambda run: run.ranks / f"rank{'1' * 200}.jsonl",
    "a launch of 200 digits": lambda run: run.logs / f"launch-{'1' * 200}.log",
    "a sample that is not UTF-8": lambda run: run.samples / "\udcff.png",
}


@pytest.mark.parametrize("kind", ODD_NAMES)
def test_an_odd_name_in_a_run_folder_hides_no_other_run(tmp_path: Path, kind: str) -> None:
    folder = make_runs(tmp_path)
    path = ODD_NAMES[kind](RunDir(folder / "attacked"))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix:
        path.write_text('{"message": {"message": ["a list"]}}\n')
    else:
        path.mkdir()
        (path / "manifest.json").write_text("{}")
    assert faults(folder) == []
