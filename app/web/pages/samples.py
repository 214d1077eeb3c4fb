"""The samples of a run: rows per prompt, and thumbnails of those that are shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from annotated_types import MaxLen

from app.data.thumbnails import FULL, SMALL
from app.runs import samples
from app.studio import Studio
from app.web.answers import Calls
from app.web.pages.results import references_shown
from app.web.served_files import address
from trainer.run.events import SampleEvent
from trainer.run.folder import RunDir
from trainer.run.samples import TEXT
from trainer.system.errors import InputError


@dataclass(frozen=True)
class Cell:
    """A sample that a script asks for."""

    index: int
    prompt: str
    step: int


def calls(studio: Studio) -> Calls:
    """Return the functions of the script of the tab Samples."""

    def samples_list(name: str, known: str = "") -> dict[str, Any] | None:
        run = studio.run(name)
        follower = studio.follower(run)
        view = follower.view()
        version = samples.version(run, view)
        if version == known:
            return None
        rows = samples.rows(run, view.samples)
        return {
            "version": version,
            "rows": [asdict(row) | {"references": references_shown(studio, run, row.references)} for row in rows],
            "num_steps": view.num_steps,
            "length": view.length,
            "is_running": view.is_running,
            "size": samples.num_bytes(run),
            "seed": follower.config.sample.seed,
            "settings": samples.settings(follower.config, any(row.kind == TEXT.name for row in rows)) if rows else "",
        }

    def samples_images(
        name: str, cells: Annotated[list[Cell], MaxLen(64)], is_full: bool = False
    ) -> list[dict[str, str]]:
        run = studio.run(name)
        view = studio.follower(run).view()
        wanted = {(cell.index, cell.prompt, cell.step) for cell in cells}
        found = {
            key: sample for sample in view.samples if (key := (sample.index, sample.prompt, sample.step)) in wanted
        }
        return [_shown(studio, run, found.get((cell.index, cell.prompt, cell.step)), is_full) for cell in cells]

    return {"samples_list": samples_list, "samples_images": samples_images}


def _shown(studio: Studio, run: RunDir, sample: SampleEvent | None, is_full: bool) -> dict[str, str]:
    """Return what is shown of a sample.

    Returns:
        {"text": ...}, {"src": address of its picture}, {} for one that is only heard, or {"problem": sentence}; with
        "file", its name, where it can be downloaded, and "played", its media type, where that is played.
    """
    if sample is None:
        return {"problem": "there is no such sample any more"}
    name = sample.path.rpartition("/")[2]
    try:
        samples.own_file(run, name)
        download = {"file": name} | ({"played": sample.kind.mime} if sample.kind.is_played else {})
    except (InputError, OSError, ValueError):
        download = {}
    if sample.kind.is_text:
        return {"text": sample.text, **download}
    if not sample.picture and download:
        return download
    try:
        file = run.own_file(sample.picture or sample.path)
        if not file.is_file():
            return {"problem": f"{sample.path}: not in the run folder any more"}
        return {"src": address(studio.thumbnails.of(file, FULL if is_full else SMALL)), **download}
    except (InputError, OSError, ValueError) as error:
        return {"problem": str(error), **download}
