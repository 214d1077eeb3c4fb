"""The kinds of samples: how a sample is written, and what others show of it.

Whoever generates a sample names its kind; whoever shows one asks the kind of its file. A further kind has a line in
`KINDS` and, where none of its fields says how it is shown, a field that does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainer.config.size import Size
from trainer.system import files

SHOWN_TEXT = 4000
"""Characters of a text that its event holds; the file holds all."""


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
