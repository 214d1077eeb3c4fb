"""Drawings: a prompt drawn without and with what a run has trained, by a process of its own. Imports no torch.

`drawings/<time>/` in the run folder holds the images (or texts) of a prompt, and `drawing.json`, which names those that
are complete.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from trainer.config import families
from trainer.config.schema import RunConfig
from trainer.config.sections import SampleConfig, fill_trigger, has_trigger_place
from trainer.run import manifest, stages
from trainer.run.events import EventReader, ExportEvent, SampleEvent
from trainer.run.folder import RunDir
from trainer.run.prompts import check_prompt, prompts_in_force
from trainer.run.samples import SampleKind, kind_of
from trainer.system import files
from trainer.system.errors import InputError

RECORD = "drawing.json"
PROGRESS = "draw-progress.json"
"""Name of the file in the run's logs with the share of a drawing that is done."""
MOST_STRENGTH = 2.0
MOST_PICTURES = 100
MOST_REFERENCES = 10
"""Most reference images of a drawing, for a model that names no number: FLUX.2 [dev] is published for up to 10."""


@dataclass(frozen=True)
class DrawingRequest:
    """The settings of a drawing. A setting that is None is the run's own, in its section `sample`.

    Attributes:
        prompts: The prompts; [trigger] is replaced as in `sample.prompts`.
        seed: Seed of the noise.
        size: Width and height in pixels.
        checkpoints: Steps of the checkpoints to draw with, of the run's current stage; () is the newest.
        strengths: Factors of what was trained: 0 would be the base, which is always drawn, and 1 is all of it.
        references: Reference images that are shown with every prompt; () shows none. None shows with each prompt those
            of the run's sample that starts from the same noise.
    """

    prompts: tuple[str, ...]
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = None
    size: tuple[int, int] | None = None
    checkpoints: tuple[int, ...] = ()
    strengths: tuple[float, ...] = (1.0,)
    references: tuple[str, ...] | None = None

    @property
    def num_pictures(self) -> int:
        """Number of images or texts that are drawn."""
        return len(self.prompts) * (1 + max(1, len(self.checkpoints)) * len(self.strengths))

    def arguments(self) -> list[str]:
        """The request as options of `python -m trainer.train.draw`."""
        size = None if self.size is None else [str(side) for side in self.size]
        given = {"seed": self.seed, "steps": self.steps, "guidance": self.guidance}
        options = [f"--{name}={value}" for name, value in given.items() if value is not None]
        many = {"prompt": self.prompts, "checkpoint": self.checkpoints, "strength": self.strengths}
        many["reference"] = self.references or ()
        options += [f"--{name}={value}" for name, values in many.items() for value in values]
        options += ["--without-references"] if self.references == () else []
        return [*options, *(["--size", *size] if size else [])]

    def check_strengths(self, cfg: RunConfig) -> None:
        """Raise InputError for strengths that cannot be drawn, or too many pictures."""
        if not self.strengths:
            raise InputError("strength: none; 1 draws with all of what was trained")
        for strength in self.strengths:
            if not 0 < strength <= MOST_STRENGTH:
                raise InputError(f"strength: {strength:g} is not above 0 and at most {MOST_STRENGTH:g}")
        if cfg.adapter.takes_from_base and set(self.strengths) != {1.0}:
            raise InputError(
                "strength: an adapter of adapter.init: pissa takes its start out of the base, so it is drawn at 1 "
                "only; export it, and other programs take any strength of that file"
            )
        if self.num_pictures > MOST_PICTURES:
            raise InputError(
                f"{self.num_pictures} pictures, as each prompt is drawn with each checkpoint at each strength and once "
                f"without; leave some out, {MOST_PICTURES} are drawn at once"
            )

    def sample(self, cfg: RunConfig) -> SampleConfig:
        """Return the section `sample` to draw with, whose prompts are those of the request.

        Raises:
            InputError: A prompt or a setting cannot be used with this model.
        """
        if not self.prompts:
            raise InputError("prompt: none; write what the sample should show")
        for number, prompt in enumerate(self.prompts, 1):
            name = "prompt" if len(self.prompts) == 1 else f"prompt {number}"
            check_prompt(prompt, name)
            if has_trigger_place(prompt) and not cfg.data.trigger:
                raise InputError(
                    f"{name}: [trigger] stands for data.trigger, which is empty in this run; write the word"
                )
        given = {"seed": self.seed, "steps": self.steps, "guidance": self.guidance, "size": self.size}
        changes = {name: value for name, value in given.items() if value is not None}
        known = families.of(cfg.model.family)
        unread = [name for name in changes if known is not None and name not in known.sample_fields]
        if unread:
            raise InputError(f"{unread[0]}: has no effect for {cfg.model.family}; leave it out")
        values = {**cfg.sample.model_dump(), **changes, "prompts": self.prompts, "references": ()}
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
class Picture:
    """One image or text of a drawing. Paths are relative to the run folder.

    Attributes:
        path: The file.
        source: The checkpoint or exported file that the trained weights were read from; "" for the base.
        strength: Factor of what was trained; 0 for the base.
    """

    path: str
    source: str = ""
    strength: float = 0.0

    @property
    def kind(self) -> SampleKind:
        return kind_of(self.path)


@dataclass(frozen=True)
class Drawing:
    """The images or texts of a prompt, as `drawing.json` describes them.

    Attributes:
        prompt: The prompt, with the trigger filled in.
        seed: Seed of the noise.
        number: Number of the prompt, which the noise also depends on: that of the same prompt among the run's own, so
            that it is the noise of the run's samples; else 0.
        pictures: What was drawn, the base first.
        seconds: Time it took, with reading the model.
        size: `Size.values` of an image or clip; None for a text.
        steps, guidance: Settings of an image or clip; None for a text.
        time: When its last picture was finished, Unix seconds.
        references: The copies of its reference images, relative to the run folder.
    """

    prompt: str
    seed: int
    number: int
    pictures: tuple[Picture, ...]
    seconds: float
    size: tuple[int, ...] | None
    steps: int | None
    guidance: float | None
    time: float
    references: tuple[str, ...] = ()


def _of_two_pictures(values: Any) -> Any:
    """Read a record of version 0.1.0, which had one picture with and one without what was trained."""
    if not isinstance(values, dict) or not {"trained", "base", "source"} <= values.keys():
        return values
    trained, base, source = (values.pop(name) for name in ("trained", "base", "source"))
    return values | {"pictures": [{"path": base}, {"path": trained, "source": source, "strength": 1.0}]}


_DRAWING = TypeAdapter(Annotated[Drawing, BeforeValidator(_of_two_pictures)])


def drawings(run: RunDir) -> Iterator[Drawing]:
    """Yield the drawings of a run, newest first. Damaged records are left out.

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
    """Write `drawing.json`, which names the pictures that are complete."""
    files.replace(folder / RECORD, json.dumps(asdict(drawing), ensure_ascii=False, indent=1))


def write_progress(run: RunDir, share: float | None) -> None:
    """Write how much of a drawing is done, 0 to 1; None while the model is loaded."""
    files.replace(run.logs / PROGRESS, json.dumps({"share": share}))


def progress(run: RunDir) -> float | None:
    """Return how much of the latest drawing is done, 0 to 1; None while its model is loaded, or if it said nothing."""
    try:
        return files.read_json(run.logs / PROGRESS, _PROGRESS)["share"]
    except (InputError, OSError, KeyError):
        return None


_PROGRESS = TypeAdapter(dict[str, float | None])


def sources(run: RunDir, request: DrawingRequest) -> list[Path]:
    """Return what a drawing reads the trained weights from.

    Raises:
        InputError: As `trained_weights`, or the run has no such checkpoint.
    """
    if not request.checkpoints:
        return [trained_weights(run)]
    return [manifest.to_export(run, step) for step in request.checkpoints]


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


def references_of(run: RunDir, request: DrawingRequest, cfg: RunConfig) -> list[tuple[Path, ...]]:
    """Return the reference images of each prompt. Those of the run's own samples are its copies in the run folder.

    Raises:
        InputError: A sample's event names a file outside the run folder.
    """
    if request.references is not None:
        return [tuple(map(Path, request.references))] * len(request.prompts)
    events = EventReader(run.events_file).read()
    shown = {event.index: event.references for event in events if isinstance(event, SampleEvent)}
    own = {index: tuple(run.own_file(path) for path in paths) for index, paths in shown.items()}
    texts = [fill_trigger(prompt, cfg.data.trigger) for prompt in request.prompts]
    return [own.get(number_of(run, text), ()) for text in texts]


def check_request(run: RunDir, request: DrawingRequest) -> RunConfig:
    """Return the config to draw with: that of the run's current stage, with the samples that were requested.

    The reference images are checked by `data.drawn_references`, which can read them.

    Raises:
        InputError: Nothing was trained yet, or the request cannot be drawn.
    """
    cfg = stages.current(run, run.config()).config
    sample = request.sample(cfg)
    request.check_strengths(cfg)
    sources(run, request)
    return cfg.model_copy(update={"sample": sample})
