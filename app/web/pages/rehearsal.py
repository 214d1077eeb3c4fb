"""A rehearsal on the screen of its run, and the button that starts one in New run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from app.data.trained import Trained
from app.form import draft as form
from app.form.draft import Draft
from app.runs.rehearsals import SHOWS, Rehearsal, captions_of
from app.studio import Studio
from app.web.answers import Calls
from app.web.served_files import address
from trainer.config.load import dump_config
from trainer.launcher.rehearsal import SECONDS
from trainer.system import files
from trainer.system.errors import InputError

HELP = (
    f"The demo model trains {SECONDS} s on your pictures, on the CPU: crops, masks, captions and trigger word are seen "
    "before the real run."
)
MOST_PICTURES = 12
MOST_CONFIG = 2**20


def facts() -> dict[str, Any]:
    """Return what the script needs once."""
    return {"seconds": SECONDS, "help": HELP}


def calls(studio: Studio) -> Calls:
    """Return the functions of the script."""
    functions: list[Callable[..., Any]] = [begin, is_in_form, start]
    read = Read({})
    return {
        **{f"rehearsal_{function.__name__}": partial(function, studio) for function in functions},
        "rehearsal_show": partial(show, studio, read),
        "rehearsal_pictures": partial(pictures, studio, read),
    }


@dataclass(frozen=True)
class Read:
    """{run: the pictures that `show` has read}, which `pictures` takes: to read those of a large set takes seconds."""

    pictures: dict[str, list[tuple[Trained, Trained]]]


def begin(studio: Studio) -> str:
    """Rehearse what is in the form, which stays as it is. Returns the name of the rehearsal."""
    return studio.rehearse(studio.draft()).path.name


def is_in_form(studio: Studio, run: str) -> bool:
    """Whether the form has the config of the run that a rehearsal is of."""
    found = studio.run(run)
    Rehearsal.of(found)
    in_form = dump_config(form.check(studio.draft()).config)
    return files.read(found.rehearsed_file, MOST_CONFIG) == in_form.encode()


def show(studio: Studio, read: Read, run: str) -> dict[str, Any]:
    """Return what a rehearsal shows and cannot show, and its first pictures; `problem` where they cannot be read.

    `most` is the number of pictures that it takes of more of them.
    """
    rehearsal = Rehearsal.of(studio.run(run))
    answer = {
        "name": rehearsal.real.name,
        "model": rehearsal.model,
        "shows": SHOWS,
        "cannot_show": rehearsal.cannot_show,
        "pictures": [],
        "num_pictures": 0,
        "most": None,
        "problem": "",
    }
    try:
        pairs = read.pictures[run] = rehearsal.pictures()
    except (InputError, OSError) as error:  # moved or deleted since
        return answer | {"problem": f"The pictures cannot be read any more: {str(error).splitlines()[0]}"}
    most = rehearsal.own.data.max_images
    return answer | {
        "pictures": [_facts(pair) for pair in pairs[:MOST_PICTURES]],
        "num_pictures": len(pairs),
        "most": most if sum(not own.is_held_out for _, own in pairs) == most else None,
    }


def pictures(studio: Studio, read: Read, run: str) -> list[dict[str, str]]:
    """Return the first pictures of `show`, drawn: their addresses as the real run and as the rehearsal train them, or
    what is wrong with one as `problem`. Takes a fraction of a second each."""
    rehearsal = Rehearsal.of(studio.run(run))
    pairs = read.pictures.pop(run, None) or rehearsal.pictures()
    return [_drawn(studio, rehearsal, pair) for pair in pairs[:MOST_PICTURES]]


def start(studio: Studio, run: str) -> str:
    """Start the run that was rehearsed, and return its name. Raises InputError with what prevents it."""
    found = studio.run(run)
    Rehearsal.of(found)
    return studio.start(Draft(found.rehearsed_file)).path.name


def _drawn(studio: Studio, rehearsal: Rehearsal, pair: tuple[Trained, Trained]) -> dict[str, str]:
    try:
        real, own = rehearsal.draw(pair)
        return {"real": address(studio.thumbnails.drawn(real)), "own": address(studio.thumbnails.drawn(own))}
    except InputError as error:
        return {"problem": str(error)}


def _facts(pair: tuple[Trained, Trained]) -> dict[str, Any]:
    """What is said of a picture."""
    real, own = pair
    return {
        "name": Path(real.path).name,
        "captions": captions_of(real),
        "size": list(real.size.frame) if real.size else None,
        "own_size": list(own.size.frame) if own.size else None,
        "share": real.share,
        "is_masked": real.image.mask is not None,
        "is_held_out": real.is_held_out,
    }
