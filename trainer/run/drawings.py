"""Drawings: a prompt drawn with and without what a run has trained, by a process of its own. Imports no torch.

`drawings/<time>/` in the run folder holds the two images (or texts) and `drawing.json`, which is written last.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trainer.config import families
from trainer.config.schema import RunConfig
from trainer.config.sections import SampleConfig, fill_trigger, has_trigger_place
from trainer.run import manifest, stages
from trainer.run.events import EventReader, ExportEvent
from trainer.run.folder import RunDir
from trainer.run.prompts import check_prompt, prompts_in_force
from trainer.run.samples import SampleKind, kind_of
from trainer.system import files
from trainer.system.errors import InputError

RECORD = "drawing.json"


@dataclass(frozen=True)
class DrawingRequest:
    """The settings of a drawing. A setting that is None is the run's own, in its section `sample`.

    Attributes:
        prompt: The prompt; [trigger] is replaced as in `sample.prompts`.
        seed: Seed of the noise.
        size: Width and height in pixels.
    """

    prompt: str
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = None
    size: tuple[int, int] | None = None

    def arguments(self) -> list[str]:
        """The request as options of `python -m trainer.train.draw`."""
        size = None if self.size is None else [str(side) for side in self.size]
        given = {"seed": self.seed, "steps": self.steps, "guidance": self.guidance}
        options = [f"--{name}={value}" for name, value in given.items() if value is not None]
        return [f"--prompt={self.prompt}", *options, *(["--size", *size] if size else [])]

    def sample(self, cfg: RunConfig) -> SampleConfig:
        """Return the section `sample` to draw with, whose only prompt is that of the request.

        Raises:
            InputError: The prompt or a setting cannot be used with this model.
        """
        check_prompt(self.prompt, "prompt")
        if has_trigger_place(self.prompt) and not cfg.data.trigger:
            raise InputError("prompt: [trigger] stands for data.trigger, which is empty in this run; write the word")
        given = {"seed": self.seed, "steps": self.steps, "guidance": self.guidance, "size": self.size}
        changes = {name: value for name, value in given.items() if value is not None}
        known = families.of(cfg.model.family)
        unread = [name for name in changes if known is not None and name not in known.sample_fields]
        if unread:
            raise InputError(f"{unread[0]}: has no effect for {cfg.model.family}; leave it out")
        values = {**cfg.sample.model_dump(), **changes, "prompts": (self.prompt,), "references": ()}
        try:
            sample = SampleConfig.model_validate(values)
        except ValidationError as error:
            raise InputError(files.first_problem(error)) from error
        multiple = 1 if known is None else known.size_multiple
        if self.size is not None and any(side % multiple for side in self.size):
            raise InputError(f"size: {self.size[0]} x {self.size[1]} is not in multiples of {multiple} pixels")
        problem = next(families.refused(cfg.model_copy(update={"sample": sample})), None)
        if problem is not None:
            raise InputError(str(problem))
        return sample


@dataclass(frozen=True)
class Drawing:
    """A finished drawing, as `drawing.json` describes it. Paths are relative to the run folder.

    Attributes:
        prompt: The prompt, with the trigger filled in.
        seed: Seed of the noise.
        number: Number of the prompt, which the noise also depends on: that of the same prompt among the run's own, so
            that it is the noise of the run's samples; else 0.
        source: The checkpoint or exported file that the trained weights were read from.
        trained, base: The files drawn with and without the trained weights.
        seconds: Time it took, with reading the model.
        size: `Size.values` of an image or clip; None for a text.
        steps, guidance: Settings of an image or clip; None for a text.
        time: When it was finished, Unix seconds.
    """

    prompt: str
    seed: int
    number: int
    source: str
    trained: str
    base: str
    seconds: float
    size: tuple[int, ...] | None
    steps: int | None
    guidance: float | None
    time: float

    @property
    def kind(self) -> SampleKind:
        return kind_of(self.trained)


_DRAWING = TypeAdapter(Drawing)


def drawings(run: RunDir) -> Iterator[Drawing]:
    """Yield the finished drawings of a run, newest first. Damaged records are left out.

    The paths in a record may be anything where the run folder is a stranger's: open them by `RunDir.own_file`.
    """
    found = []
    for record in (run.path / "drawings").glob(f"*/{RECORD}"):
        try:
            found.append(files.read_json(record, _DRAWING))
        except (InputError, OSError):  # a folder of a stranger, or one that is being removed
            continue
    return iter(sorted(found, key=lambda drawing: drawing.time, reverse=True))


def new_folder(run: RunDir) -> Path:
    """Make the folder of a new drawing, named by the time."""
    above = run.path / "drawings"
    above.mkdir(exist_ok=True)
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = above / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError


def write_record(folder: Path, drawing: Drawing) -> None:
    """Write `drawing.json`, which makes a drawing complete."""
    files.create(folder / RECORD, json.dumps(asdict(drawing), ensure_ascii=False, indent=1))


def trained_weights(run: RunDir) -> Path:
    """Return the newest complete checkpoint of a run, else its newest exported adapter.

    Raises:
        InputError: There is neither; FormatError, another version wrote the newest checkpoint.
    """
    if saved := manifest.newest(run.checkpoints):
        return saved
    exports = [event for event in EventReader(run.events_file).read() if isinstance(event, ExportEvent)]
    for event in reversed(exports):
        file = run.own_file(event.path)
        if event.what == "adapter" and file.exists():
            return file
    if exports and not any(run.own_file(event.path).exists() for event in exports):
        raise InputError(f"{run.path}: has no complete checkpoint, and its exported adapter is gone")
    if exports:
        raise InputError(
            f"{run.path}: has no complete checkpoint, and its export is a whole model; name that as model.path of "
            "a new run to draw with it"
        )
    raise InputError(f"{run.path}: has no complete checkpoint and no exported adapter yet; save a checkpoint first")


def number_of(run: RunDir, prompt: str) -> int:
    """Return the number of a prompt among those of the run, or 0. prompt: with the trigger filled in."""
    cfg = stages.current(run, run.config()).config
    for own in (prompts_in_force(EventReader(run.events_file).read(), cfg), cfg.sample.prompts):
        texts = [fill_trigger(text, cfg.data.trigger) for text in own]
        if prompt in texts:
            return texts.index(prompt)
    return 0


def check_request(run: RunDir, request: DrawingRequest) -> RunConfig:
    """Return the config to draw with: that of the run's current stage, with the sample that was requested.

    Raises:
        InputError: Nothing was trained yet, or the request cannot be drawn.
    """
    cfg = stages.current(run, run.config()).config
    if cfg.data.has_references:
        raise InputError(
            f"{run.path.name}: was trained to change reference images, which drawings do not have; "
            "request samples of the run instead"
        )
    sample = request.sample(cfg)
    trained_weights(run)
    return cfg.model_copy(update={"sample": sample})
