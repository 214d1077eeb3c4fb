"""Captioning jobs: a model writes captions of a folder's images, by processes of its own. Imports no torch.

A job is a folder `<runs>/captioning/<name>/`, started, stopped and diagnosed as a run folder is. In addition it holds
`request.json`, `images.json` (what is to be captioned), `captions.jsonl` (what the ranks wrote, a line per image), and
`applied.jsonl` (what became of each caption in the folder of images).
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Interval, Len
from pydantic import TypeAdapter, ValidationError

from trainer.config import families
from trainer.config.load import load_config_text
from trainer.config.schema import RunConfig
from trainer.config.sections import DEMO_CAPTIONER, family_names
from trainer.run.events import LineFollower
from trainer.run.folder import RunDir
from trainer.system import files
from trainer.system.errors import InputError

FOLDER = "captioning"
"""Name of the folder of jobs in the folder of runs."""
MODULE = "trainer.captioning"
"""Module that each rank of a job runs."""
Style = Literal["sentence", "detailed", "tags"]
Overwrite = Literal["missing", "model", "all"]
MOST_IMAGES_BYTES = 2**30
MOST_NAME = 60
"""Letters of the folder's name in a job's name."""


@dataclass(frozen=True)
class CaptionRequest:
    """The images to caption, and how.

    Attributes:
        folder: The folder of images, absolute.
        model: A folder of transformers, a hub id that is downloaded, or `demo`: the captioner that comes with the
            program.
        style: `sentence`: one or two sentences. `detailed`: a paragraph. `tags`: words between commas.
        prompt: What the model is asked instead of the style's own instruction.
        omit: What captions do not mention, between commas.
        trigger: Whether [trigger] is put in front.
        overwrite: Which images get a caption: `missing` those without one, `model` also those whose caption a model
            wrote and that is unchanged since, `all` every image.
        precision: Type that computes.
        quantize: How the language model's layers are stored.
        device: Where it computes, as `parallel.device`.
        ranks: Number of processes; each captions images of its own.
        shard: The ranks share one copy of the model, for one that fits on none of them.
        temperature: 0 takes the likeliest token each time.
        seed: Of the random numbers, together with the image's name.
        tokens: Most tokens of an answer.
        pixels: A larger image is scaled down to this many.
    """

    folder: Annotated[str, Len(1, 4096)]
    model: Annotated[str, Len(1, 4096)]
    style: Style = "sentence"
    prompt: Annotated[str, Len(0, 8000)] = ""
    omit: Annotated[str, Len(0, 2000)] = ""
    trigger: bool = False
    overwrite: Overwrite = "missing"
    precision: Literal["bf16", "fp32"] = "bf16"
    quantize: Literal["none", "int8", "fp8", "nf4"] = "none"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    ranks: Annotated[int, Interval(ge=1, le=64)] = 1
    shard: bool = False
    temperature: Annotated[float, Interval(ge=0, le=10)] = 0.0
    seed: Annotated[int, Interval(ge=0, lt=2**63)] = 0
    tokens: Annotated[int, Interval(ge=1, le=8192)] = 300
    pixels: Annotated[int, Interval(ge=1024, le=64 * 2**20)] = 2**20

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> CaptionRequest:
        """Make a request of what a person gave. Raises InputError with the field, the value and what is allowed."""
        try:
            request = _REQUEST.validate_python(dict(values))
        except ValidationError as error:
            raise InputError(f"captions: {files.first_problem(error)}") from error
        if request.shard and request.ranks == 1:
            raise InputError("--shard: one rank has no other to share a model with; set --ranks to the number of GPUs")
        return request

    @property
    def model_path(self) -> str:
        """The folder or hub id of the model."""
        return str(DEMO_CAPTIONER) if self.is_demo else self.model

    @property
    def is_demo(self) -> bool:
        """Whether the model is the captioner that comes with the program."""
        return self.model == "demo"

    @property
    def asked(self) -> CaptionRequest:
        """The request without what only says where it is computed: captions do not depend on that."""
        return replace(self, device="auto", ranks=1, shard=False)

    def config(self) -> RunConfig:
        """Return the config by which the ranks are started and the model is loaded."""
        family = next(name for name in family_names() if _is_text(name))
        values = {
            "name": FOLDER,
            "model": {"family": family, "path": self.model_path},
            "data": {"path": self.folder},
            "quantize": {"format": self.quantize},
            "train": {"precision": self.precision},
            "parallel": {"device": self.device, "devices": self.ranks},
        }
        return load_config_text(json.dumps(values), (), Path("captions")).config


def _is_text(family: str) -> bool:
    facts = families.of(family)
    return facts is not None and facts.trains_on == "text"


@dataclass(frozen=True)
class Asked:
    """An image to be captioned.

    Attributes:
        name: Its path below the folder.
        before: The text of its caption file when the job was made; None where there was no file.
    """

    name: str
    before: str | None = None


@dataclass(frozen=True)
class Written:
    """The caption of an image by a rank, a line of `captions.jsonl`.

    Attributes:
        name: The image's path below the folder.
        caption: The caption; empty where there is a problem.
        problem: Why the image has no caption.
        rank: The rank.
        seconds: Time it took.
        time: When it was done, Unix seconds.
    """

    name: str
    caption: str
    problem: str = ""
    rank: int = 0
    seconds: float = 0.0
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Applied:
    """The outcome for a caption, a line of `applied.jsonl`.

    Attributes:
        name: The image's path below the folder.
        caption: The caption that was to be written.
        kept: Why the file was left as it is; empty where the caption was written.
    """

    name: str
    caption: str
    kept: str = ""


@dataclass(frozen=True)
class _Stored:
    """The content of `request.json`."""

    request: CaptionRequest
    batch: int
    time: float


_REQUEST = TypeAdapter(CaptionRequest)
_STORED = TypeAdapter(_Stored)
_IMAGES = TypeAdapter(tuple[Asked, ...])
_WRITTEN = TypeAdapter(Written)
_APPLIED = TypeAdapter(Applied)
Line = TypeVar("Line", Written, Applied)


@dataclass(frozen=True)
class CaptionJob:
    """The folder of one job."""

    path: Path

    @classmethod
    def create(cls, runs: Path, request: CaptionRequest, images: Sequence[Asked]) -> CaptionJob:
        """Make the folder of a new job; nothing is started.

        Raises:
            InputError: The folder cannot be made.
        """
        now, name = time.time(), Path(request.folder).name[:MOST_NAME] or "images"
        path = runs.absolute() / FOLDER / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        try:
            files.make_private(path.parent)
        except OSError as error:
            raise InputError(f"{path.parent}: cannot be made ({error.strerror}); make {runs} writable") from error
        job = cls(RunDir.create(path.parent, request.config(), path).path)
        files.replace(job._images_file, json.dumps([asdict(image) for image in images]))
        job._write_request(_Stored(request, int(1000 * now), now))
        return job

    @property
    def run(self) -> RunDir:
        """The folder as that of a run, by which its processes are started, stopped and diagnosed."""
        return RunDir(self.path)

    @property
    def request(self) -> CaptionRequest:
        """The request of the job. Raises InputError where the file is damaged."""
        return self._stored.request

    @property
    def batch(self) -> int:
        """Number under which the caption editor logs this job's changes: its time in milliseconds."""
        return self._stored.batch

    @property
    def began(self) -> float:
        """When the job was made, Unix seconds."""
        return self._stored.time

    def change(self, request: CaptionRequest) -> None:
        """Replace the request by one that differs in where it is computed. The job must not be running."""
        self._write_request(replace(self._stored, request=request))

    def images(self) -> tuple[Asked, ...]:
        """Read what is to be captioned, in the order of the names.

        Raises:
            InputError: The file is damaged, or names something outside of the folder of images.
        """
        images = _read(self._images_file, _IMAGES)
        for image in images:
            parts = Path(image.name).parts
            if ".." in parts or image.name.startswith("/") or "\0" in image.name:
                raise InputError(f"{self._images_file}: {image.name[:200]!r} is outside of the folder; remove the job")
        return images

    def captions(self) -> LineFollower[Written]:
        """Return a reader of what the ranks wrote."""
        return LineFollower(self.path / "captions.jsonl", _WRITTEN, 0)

    def applied(self) -> LineFollower[Applied]:
        """Return a reader of what became of the captions."""
        return LineFollower(self.path / "applied.jsonl", _APPLIED, 0)

    def add(self, written: Written) -> None:
        """Append what a rank wrote, in one write: a process that is killed leaves a whole line or none."""
        _append(self.path / "captions.jsonl", [written])

    def add_applied(self, applied: Iterable[Applied]) -> None:
        """Append what became of captions."""
        _append(self.path / "applied.jsonl", applied)

    @property
    def is_undone(self) -> bool:
        """Whether all captions of the job were taken back. It is not continued then."""
        return (self.path / "undone").exists()

    def mark_undone(self) -> None:
        """Note that all captions of the job were taken back."""
        files.replace(self.path / "undone", b"")

    @property
    def _images_file(self) -> Path:
        return self.path / "images.json"

    @property
    def _stored(self) -> _Stored:
        return _read(self.path / "request.json", _STORED)

    def _write_request(self, stored: _Stored) -> None:
        files.replace(self.path / "request.json", json.dumps(asdict(stored), indent=1))


def jobs(runs: Path) -> Iterator[CaptionJob]:
    """Yield the jobs in a folder of runs, newest first. Folders that are not jobs, or not complete, are left out."""
    found = []
    for request in (runs.absolute() / FOLDER).glob("*/request.json"):
        job = CaptionJob(request.parent)
        try:
            found.append((job.batch, job))
        except InputError:  # damaged, or being removed
            continue
    yield from (job for _, job in sorted(found, key=lambda one: one[0], reverse=True))


Content = TypeVar("Content")


def _read(file: Path, kind: TypeAdapter[Content]) -> Content:
    try:
        return files.read_json(file, kind, "remove the job's folder", MOST_IMAGES_BYTES)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); remove the job's folder") from error


def _append(file: Path, lines: Iterable[Written] | Iterable[Applied]) -> None:
    content = "".join(f"{json.dumps(asdict(line), ensure_ascii=False)}\n" for line in lines).encode()
    opened = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(opened).st_size
        is_torn = size > 0 and os.pread(opened, 1, size - 1) != b"\n"  # by a full disk
        whole = (b"\n" if is_torn else b"") + content
        if os.write(opened, whole) < len(whole):
            raise InputError(f"{file}: the disk is full; free some space and continue the job")
    except OSError as error:
        raise InputError(
            f"{file}: cannot be written ({error.strerror}); free some space and continue the job"
        ) from error
    finally:
        os.close(opened)
