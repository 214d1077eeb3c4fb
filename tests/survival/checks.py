"""What must hold of a run folder after a kill, looked at without the code that wrote it. Every answer is a sentence."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from trainer.run.events import AnyEvent, EventReader, StepEvent, ValidationEvent, latest_steps
from trainer.run.folder import RunDir

CHANGING = ("modelspec.date",)
"""Of an export's metadata, what is another at every export."""

LOSS = re.compile("damaged|could not be written|were lost|order differs|next epoch")
"""Warnings that tell of something lost. A kill must cost none."""


@dataclass(frozen=True)
class Reference:
    """The run that nobody killed, with a checkpoint of every step."""

    run: RunDir

    @cached_property
    def events(self) -> list[AnyEvent]:
        return EventReader(self.run.events_file).read()

    @cached_property
    def numbers(self) -> dict[tuple[str, int], tuple[float, ...]]:
        """{(kind of event, step): its numbers}"""
        return {
            key: numbers for event in self.events if (numbers := _numbers(event)) for key in [(event.type, event.step)]
        }

    @property
    def cache(self) -> Path:
        return self.run.path.parent / "cache"


def file_problems(run: RunDir, reference: Reference, seen: set[str]) -> Iterator[str]:
    """What is wrong with the files of a run that was killed, and of its cache.

    seen: marks of checkpoints that were compared with the reference before; those compared now are added.
    """
    for checkpoint in sorted(run.checkpoints.glob("[!.]*")):
        yield from _checkpoint_problems(checkpoint)
        if (mark := f"{checkpoint.name} {checkpoint.stat().st_ino}") not in seen:
            seen.add(mark)
            yield from _state_problems(checkpoint, reference)
    for example in sorted((run.path.parent / "cache" / "examples").glob("[0-9a-f]*/*.safetensors")):
        twin = reference.cache / example.relative_to(run.path.parent / "cache")
        if not twin.exists() or example.read_bytes() != twin.read_bytes():
            yield f"{example}: is not what the reference cached"
    for picture in sorted(run.samples.glob("*.png")):
        yield from _picture_problems(picture, reference)
    for exported in sorted(run.export.iterdir()):
        if not exported.name.startswith("draft-"):
            yield from _export_problems(exported, reference)
    run.config()
    json.loads(run.launch_file.read_text(encoding="utf-8"))
    for file in (run.events_file, *run.ranks.glob("*.jsonl")):
        yield from _line_problems(file)


def story_problems(events: Sequence[AnyEvent], before: int, reference: Reference) -> Iterator[str]:
    """What is wrong with what one start told. events: since it.  before: steps of the newest checkpoint there was."""
    messages = [event.message for event in events if event.type == "status"]
    resumed = [message for message in messages if message.startswith("resumed from ")]
    loaded = any(message.startswith("the model is loaded: ") for message in messages)
    if resumed != ([f"resumed from step-{before:06d}"] if before else []) and (loaded or resumed):
        yield f"began with {resumed or 'nothing'}, the newest checkpoint was that of step {before}"
    steps = [event.step for event in events if isinstance(event, StepEvent)]
    if steps != list(range(before + 1, before + 1 + len(steps))):
        yield f"trained the steps {steps} after a checkpoint of step {before}"
    for event in events:
        numbers, expected = _numbers(event), reference.numbers.get((event.type, event.step), ())
        if numbers != expected and numbers:
            yield f"{event.type} of step {event.step}: {numbers}, the reference has {expected}"
        if event.type == "warning" and LOSS.search(event.message):
            yield f"warned: {event.message}"


def end_problems(run: RunDir, reference: Reference, steps: int) -> Iterator[str]:
    """What is wrong with a run that was killed and has now come to its end."""
    events = EventReader(run.events_file).read()
    losses = [(event.step, event.loss, event.grad_norm) for event in latest_steps(events)]
    expected = [(event.step, event.loss, event.grad_norm) for event in latest_steps(reference.events)]
    if losses != expected:
        yield "the losses are not those of the reference"
    if not (run.checkpoints / f"step-{steps:06d}").is_dir():
        yield f"there is no checkpoint of step {steps}"
    for missing in sorted(_lasting(reference.run) - _lasting(run)):
        yield f"{missing} is missing"
    for foreign in sorted(_lasting(run) - _lasting(reference.run)):
        yield f"{foreign} was left behind"


def processes_of(run: RunDir) -> list[psutil.Process]:
    """torchrun and the ranks of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(run.path) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _numbers(event: AnyEvent) -> tuple[float, ...]:
    if isinstance(event, StepEvent):
        return (event.loss, event.lr, event.grad_norm)
    return (event.loss,) if isinstance(event, ValidationEvent) else ()


def _checkpoint_problems(checkpoint: Path) -> Iterator[str]:
    """A folder without a dot must hold exactly the files of its manifest, as long and with the sums it gives."""
    if not checkpoint.name.startswith("step-"):
        yield f"{checkpoint}: stands beside the checkpoints"
        return
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"{checkpoint}: its manifest cannot be read: {error}"
        return
    found = {file.name: file.read_bytes() for file in checkpoint.iterdir() if file.name != "manifest.json"}
    if {name: len(data) for name, data in found.items()} != manifest["files"]:
        yield f"{checkpoint}: its files are not those of its manifest"
    if {name: hashlib.blake2b(data, digest_size=16).hexdigest() for name, data in found.items()} != manifest[
        "checksums"
    ]:
        yield f"{checkpoint}: the checksums of its files are not those of its manifest"
    if f"step-{manifest['step']:06d}" != checkpoint.name:
        yield f"{checkpoint}: its manifest is of step {manifest['step']}"


def _state_problems(checkpoint: Path, reference: Reference) -> Iterator[str]:
    """Trained weights, average and optimizer state, bit for bit."""
    found, expected = state_of(checkpoint), state_of(reference.run.checkpoints / checkpoint.name)
    differing = [name for name in found.keys() | expected.keys() if not _same(found.get(name), expected.get(name))]
    if differing:
        count = f"{len(differing)} of {len(expected)}"
        yield f"{checkpoint}: {count} values are not the reference's, one is {min(differing)}"


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint by its dotted name."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        file = Path(folder) / "state.pt"
        dcp_to_torch_save(checkpoint, file)
        return dict(_leaves(torch.load(file, weights_only=True)))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _picture_problems(picture: Path, reference: Reference) -> Iterator[str]:
    try:
        with Image.open(picture) as opened:
            opened.load()
    except OSError as error:
        yield f"{picture}: cannot be decoded: {error}"
        return
    if picture.read_bytes() != (reference.run.samples / picture.name).read_bytes():
        yield f"{picture}: is not the reference's"


def _export_problems(exported: Path, reference: Reference) -> Iterator[str]:
    twin = reference.run.export / exported.name
    try:
        found, expected = load_file(exported), load_file(twin)
    except (OSError, ValueError) as error:
        yield f"{exported}: cannot be read: {error}"
        return
    if found.keys() != expected.keys() or not all(_same(found[name], expected[name]) for name in found):
        yield f"{exported}: its weights are not the reference's"
    if _metadata(exported) != _metadata(twin):
        yield f"{exported}: its metadata are not the reference's"


def _metadata(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return {name: value for name, value in opened.metadata().items() if name not in CHANGING}


def _line_problems(file: Path) -> Iterator[str]:
    """Every whole line is one JSON object. The last may be cut short, and is closed by the next one who writes."""
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], start=1):
        try:
            json.loads(line)
        except ValueError:
            yield f"{file}: line {number} is torn: {line!r}"


def _lasting(run: RunDir) -> set[str]:
    """The files of a run and of its cache that depend neither on how often it was started nor on a launcher."""
    root = run.path.parent
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    changing = [f"{run.path.name}/logs/", f"{run.path.name}/checkpoints/step-"]
    return {
        file for file in files if "index.sqlite" not in file and not any(file.startswith(prefix) for prefix in changing)
    }
