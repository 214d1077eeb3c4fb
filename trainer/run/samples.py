"""The kinds of samples: how a sample is written, and what others show of it. And the film that was made of them.

Whoever generates a sample names its kind; whoever shows one asks the kind of its file. A further kind has a line in
`KINDS` and, where none of its fields says how it is shown, a field that does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter

from trainer.config.size import Size
from trainer.run.folder import RunDir
from trainer.system import files
from trainer.system.errors import InputError

SHOWN_TEXT = 4000
"""Characters of a text that its event holds; the file holds all."""
MOST_STEM, MOST_SUFFIX = 40, 8
"""Characters that the copy of a reference image keeps of its name."""
FILM_RECORD = "film.json"
FILM_NAME = re.compile(r"prompt-[1-9]\d{0,5}(-[0-9a-f]{6})?\.(webp|mp4|jpg)")
MOST_FILM_BYTES = 2**26
"""Of one file of a film that is read."""


@dataclass(frozen=True)
class SampleKind:
    """A kind of sample.

    Attributes:
        name: Its name in the files of drawings and in answers to the page's scripts.
        suffix: Of the file.
        mime: Media type of the file.
        is_text: Whether it is read. All others have a picture, but for those that are only heard.
        is_played: Whether it has a duration: a page shows its picture, and a player on demand.
        has_poster: Whether its picture is a file of its own, a PNG, as a clip's.
    """

    name: str
    suffix: str
    mime: str
    is_text: bool = False
    is_played: bool = False
    has_poster: bool = False

    def picture(self, path: str) -> str:
        """Return the path of the image that shows the sample at `path`; empty if it has none."""
        if self.has_poster:
            return f"{path}.png"
        return "" if self.is_text or self.is_played else path


IMAGE = SampleKind("image", ".png", "image/png")
TEXT = SampleKind("text", ".txt", "text/plain", is_text=True)
CLIP = SampleKind("clip", ".mp4", "video/mp4", is_played=True, has_poster=True)
SOUND = SampleKind("sound", ".wav", "audio/wav", is_played=True)
KINDS = (IMAGE, TEXT, CLIP, SOUND)


def kind_of(path: str) -> SampleKind:
    """Return the kind of a sample by its file's name; IMAGE for another name, as a stranger's folder may have."""
    suffix = PurePosixPath(path).suffix
    return next((kind for kind in KINDS if kind.suffix == suffix), IMAGE)


def kind_of_size(size: Size) -> SampleKind:
    """Return the kind of a sample of this size."""
    return IMAGE if size.frames == 1 else CLIP


def reference_name(file: Path, mark: str) -> str:
    """Return the name of the copy of a reference image in a run folder. mark: tells it from others of its name."""
    safe = Path(re.sub(r"[^\w.-]+", "_", file.name))
    return f"reference-{safe.stem[:MOST_STEM]}-{mark}{safe.suffix[:MOST_SUFFIX].lower()}"


@dataclass(frozen=True)
class Sample:
    """A generated sample.

    Attributes:
        kind: Its kind.
        content: Of its file.
        poster: A PNG, for a kind that has one.
    """

    kind: SampleKind
    content: bytes
    poster: bytes = b""

    @property
    def text(self) -> str:
        """The beginning of a text, for its event; empty for other kinds."""
        return self.content.decode()[:SHOWN_TEXT] if self.kind.is_text else ""

    def write(self, file: Path) -> None:
        """Write the file, whose name has the kind's suffix, and first its poster. Replaces what is there."""
        assert file.suffix == self.kind.suffix, f"{file.name} is not a {self.kind.name}"
        if self.kind.has_poster:
            files.replace(Path(self.kind.picture(str(file))), self.poster)
        files.replace(file, self.content)


@dataclass(frozen=True)
class FilmedPrompt:
    """The film of one prompt. Its files are in the run's `film/`.

    Attributes:
        index: Position of the prompt, as in SampleEvent.
        prompt: The prompt.
        steps: Steps of its frames, ascending.
        loop: Name of the animated WebP.
        sheet: Name of the JPEG "before, steps, after".
        video: Name of the MP4; "" where this machine had no encoder for it.
    """

    index: int
    prompt: str
    steps: tuple[int, ...]
    loop: str
    sheet: str
    video: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its files."""
        return tuple(filter(None, (self.loop, self.video, self.sheet)))


@dataclass(frozen=True)
class Film:
    """The film of a run, as `film/film.json` describes it.

    Attributes:
        prompts: The prompts that were filmed.
        digests: {name of a file: its SHA-256}. By it our own files are told from those that somebody put there.
        notes: What was left out, in sentences.
    """

    prompts: tuple[FilmedPrompt, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def file(self, run: RunDir, name: str) -> Path:
        """Return a file of the film. Raises InputError unless it is there as it was made."""
        file = run.film / name
        if not FILM_NAME.fullmatch(name) or name not in self.digests:
            raise InputError(f"{name}: not a file of the film of {run.path.name}")
        try:
            content = files.read(file, MOST_FILM_BYTES)
        except OSError as error:
            raise InputError(f"{file}: not in the run folder any more; make the film again") from error
        if hashlib.sha256(content).hexdigest() != self.digests[name]:
            raise InputError(f"{file}: is not as it was made; remove it, and make the film again")
        return file

    def write(self, run: RunDir) -> None:
        """Write the record."""
        files.replace(run.film / FILM_RECORD, json.dumps(asdict(self), ensure_ascii=False, indent=1))


_FILM = TypeAdapter(Film)


def film_of(run: RunDir) -> Film:
    """Return the film of a run; one without prompts where there is none, or its record is damaged."""
    try:
        return files.read_json(run.film / FILM_RECORD, _FILM)
    except (InputError, OSError):  # none yet, or a folder of a stranger
        return Film()
