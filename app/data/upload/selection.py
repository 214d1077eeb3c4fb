"""Files that are here as a whole, such as those chosen in a notebook: they enter a folder as the page's uploads do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from app.data.upload.upload_kinds import HEAD, is_text
from app.data.upload.upload_names import METADATA, parts
from app.data.upload.uploads import MOST_CHUNK, Chosen, Placed, Uploads
from trainer.system.errors import InputError


@dataclass(frozen=True)
class Given:
    """A file. modified_ms: as of `Chosen`."""

    name: str
    content: bytes
    modified_ms: int = 0


def put(uploads: Uploads, folder: str, given: Iterable[Given]) -> Iterator[tuple[str, Placed | InputError]]:
    """Put files into a folder, and yield the name of each with its place, or with why it was refused.

    As the page's script sends them: images first, as a caption follows its image to the name that it gets, and is
    refused with it.
    """
    images: dict[str, str] = {}  # {stem as it is compared: its name in the folder, "" where it was refused}
    for file in sorted(given, key=lambda file: (is_text(file.name), file.name.lower() == METADATA)):
        is_image, stem = not is_text(file.name), parts(file.name)[0]
        image = "" if is_image else images.get(stem, "")
        head = file.content[:HEAD].hex() if is_image else ""
        chosen = Chosen(folder, file.name, len(file.content), "", image, head, file.modified_ms)
        name = ""
        try:
            if not is_image and images.get(stem) == "":
                raise InputError("not taken, because its image was refused")
            begun = uploads.begin(chosen)
            for at in range(begun.received, len(file.content), MOST_CHUNK):
                uploads.append(begun.id, at, file.content[at : at + MOST_CHUNK])
            placed = uploads.finish(chosen)
            name = placed.name
            yield file.name, placed
        except InputError as error:
            yield file.name, error
        if is_image:
            images[stem] = images.get(stem) or name
