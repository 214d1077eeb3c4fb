"""Uses of a run's result: a drawing with it, a film of its samples, an upload to the hub."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MaxLen

from app.data import pairs
from app.data.thumbnails import FULL
from app.data.upload.given_references import MOST_SENT, GivenReferences
from app.runs import exports
from app.runs.results import Kind, Results
from app.studio import Studio
from app.web.answers import Calls
from app.web.served_files import address
from trainer.config.families import trains_on
from trainer.config.schema import RunConfig
from trainer.launcher import preflight
from trainer.launcher.fit_command import check_price
from trainer.launcher.jobs import uploads
from trainer.run import manifest
from trainer.run.drawings import MOST_REFERENCES, Drawing, DrawingRequest, Picture, progress
from trainer.run.folder import RunDir
from trainer.run.samples import IMAGE, Film, FilmedPrompt, film_of
from trainer.system.errors import InputError

MOST_DRAWINGS = 12
MOST_SHOWN_TEXT = 20_000
MOST_OFFERED = 24
"""References of a run's samples, and pairs held out, that a drawing can be given."""
Sent = Annotated[str, MaxLen(MOST_SENT * 4 // 3 + 4)]


def calls(studio: Studio) -> Calls:
    """Return the functions of the script."""
    given = GivenReferences(studio.runs / "drafts" / "references")
    functions: list[Callable[..., Any]] = [
        drawings,
        held_out,
        checkpoints,
        make_film,
        show_film,
        start_upload,
        upload_state,
        stop,
    ]
    calls = {f"result_{function.__name__}": partial(function, studio, studio.results) for function in functions}
    calls |= {"result_draw": partial(draw, studio, studio.results, given)}
    calls |= {"result_add_reference": partial(add_reference, studio, given)}
    return calls | {"result_upload_question": partial(upload_question, studio)}


def draw(
    studio: Studio,
    results: Results,
    given: GivenReferences,
    run: str,
    prompts: list[str],
    seed: int | None = None,
    size: tuple[int, int] | None = None,
    checkpoints: tuple[int, ...] = (),
    strengths: tuple[float, ...] = (1.0,),
    references: Annotated[list[str], MaxLen(MOST_REFERENCES)] | None = None,
) -> None:
    """Start to sample prompts without and with what the run has trained.

    references: Of those that `drawings`, `held_out` and `add_reference` return, by their names; no other path of the
        machine is read.
    """
    found = studio.run(run)
    known = _own_references(studio, found)
    if any(Path(name).is_absolute() for name in references or ()):
        known |= {str(file): file for pair in _pairs(studio, found.config()) for file in pair.references}
    files = [str(known[name] if name in known else given.file(name)) for name in references or ()]
    request = DrawingRequest(
        tuple(prompts),
        seed,
        size=size,
        checkpoints=checkpoints,
        strengths=strengths,
        references=None if references is None else tuple(files),
    )
    results.draw(found, request)


def add_reference(studio: Studio, given: GivenReferences, content: Sent) -> dict[str, str]:
    """Keep an image, in base64, for drawings. Returns its name for `draw`, and the address at which it is shown."""
    if closed := studio.uploads.closed or studio.unwritable:
        raise InputError(closed)
    try:
        id = given.add(base64.b64decode(content, validate=True))
    except binascii.Error as error:
        raise InputError("reference: it did not arrive whole; choose its file again") from error
    return {"name": id, "image": address(studio.thumbnails.of(given.file(id)))}


def _own_references(studio: Studio, run: RunDir) -> dict[str, Path]:
    """{name: copy in the run folder} of the references of the run's samples, those of the first prompt first."""
    found: dict[str, Path] = {}
    for sample in sorted(studio.follower(run).view().samples, key=lambda sample: (sample.index, -sample.step)):
        for path in sample.references:
            with suppress(InputError, OSError, ValueError):  # a stranger's event names any file
                if path not in found and (file := run.own_file(path)).is_file():
                    found[path] = file
    return found


def held_out(studio: Studio, results: Results, run: str) -> list[dict[str, Any]]:
    """Return the pairs that the run is not trained on: captions, and references as `drawings` returns them."""
    shown = []
    for pair in _pairs(studio, studio.run(run).config()):
        with suppress(InputError):  # one that cannot be read is not offered
            images = [{"name": str(file), "image": address(studio.thumbnails.of(file))} for file in pair.references]
            shown.append({"caption": pair.caption, "references": images})
    return shown


def _pairs(studio: Studio, config: RunConfig) -> list[pairs.HeldOut]:
    if not (config.data.has_references and config.data.validation):
        return []
    found = studio.scans.of(config)
    if not found.is_complete:
        raise InputError("The images of the run's data are still being read; try again when that is done")
    return pairs.held_out(config, found, MOST_OFFERED)


def stop(studio: Studio, results: Results, run: str, kind: Kind) -> None:
    """End the drawing, film or upload that is running."""
    results.stop(kind, studio.run(run))


def drawings(studio: Studio, results: Results, run: str) -> dict[str, Any]:
    """Return the state of the drawing that was started last, and all drawings."""
    found = studio.run(run)
    finished = [_drawing(studio, found, drawing) for drawing in results.drawings(found)[:MOST_DRAWINGS]]
    config = found.config()
    is_text = trains_on(config) == "text"
    state = results.drawing(found)
    reads_references = not is_text and preflight.reads_references(config.model)
    return {
        "reads_references": reads_references,
        "references": _offered(studio, found) if reads_references else [],
        "has_held_out": reads_references and config.data.has_references and bool(config.data.validation),
        "state": asdict(state) | {"share": progress(found) if state.is_running else None},
        "drawings": finished,
        "seed": config.sample.seed,
        "is_text": is_text,
        "size": None if is_text else config.sample.size,
        "prompts": [prompt.replace("[trigger]", config.data.trigger) for prompt in config.sample.prompts],
    }


def _offered(studio: Studio, run: RunDir) -> list[dict[str, Any]]:
    """Return the references that the run's samples have; those of its first prompt are chosen at first."""
    samples = studio.follower(run).view().samples
    first = min(samples, key=lambda sample: (sample.index, -sample.step), default=None)
    shown = []
    for name, file in list(_own_references(studio, run).items())[:MOST_OFFERED]:
        with suppress(InputError):
            image = address(studio.thumbnails.of(file))
            shown.append({"name": name, "image": image, "is_chosen": first is not None and name in first.references})
    return shown


def checkpoints(studio: Studio, results: Results, run: str) -> list[dict[str, Any]]:
    """Return the checkpoints that can be drawn with, newest first."""
    return [
        {"step": one.step, "is_newest": one.is_newest, "is_best": one.is_best}
        for one in exports.checkpoints(studio.run(run), is_alive=False, exporting=None)
        if one.is_usable
    ]


def _drawing(studio: Studio, run: RunDir, drawing: Drawing) -> dict[str, Any]:
    return {
        "prompt": drawing.prompt,
        "seed": drawing.seed,
        "seconds": drawing.seconds,
        "time": drawing.time,
        "references": references_shown(studio, run, drawing.references),
        "pictures": [_picture(studio, run, picture) for picture in drawing.pictures],
    }


def references_shown(studio: Studio, run: RunDir, paths: Sequence[str]) -> list[str]:
    """Return the addresses of reference images in the run folder; "" where one cannot be shown."""
    shown = []
    for path in paths[:MOST_REFERENCES]:
        try:
            shown.append(address(studio.thumbnails.of(run.own_file(path))))
        except (InputError, OSError, ValueError):
            shown.append("")
    return shown


def _picture(studio: Studio, run: RunDir, picture: Picture) -> dict[str, Any]:
    """Return a picture: what it was drawn with, and its text or the address of its image; neither where it is gone."""
    kind = picture.kind
    text = image = ""
    with suppress(InputError, OSError, ValueError):  # shown as missing
        if kind.is_text:
            text = run.own_file(picture.path).read_text(encoding="utf-8", errors="replace")[:MOST_SHOWN_TEXT]
        elif shown := kind.picture(picture.path):
            image = address(studio.thumbnails.of(run.own_file(shown), FULL))
        else:
            text = picture.path
    made = {"source": _source(picture), "strength": picture.strength}
    return made | {"is_text": kind.is_text, "text": text, "image": image}


def _source(picture: Picture) -> str:
    if not picture.source:
        return "without"
    checkpoint = Path(picture.source)
    if manifest.is_name(checkpoint.name):
        return f"step {manifest.step_of(checkpoint):,}"
    return checkpoint.name


def make_film(studio: Studio, results: Results, run: str, price: float | None = None) -> None:
    """Start to make the film of a run's samples. price: Of a GPU-hour in dollars; no run on a CPU costs it."""
    check_price(price, "price")
    found = studio.run(run)
    results.make_film(found, None if found.config().parallel.device == "cpu" else price)


def show_film(studio: Studio, results: Results, run: str) -> dict[str, Any]:
    """Return the state of the film that was started last, and the film itself: its prompts and what was left out.

    `is_old` says that there are samples which are not in it.
    """
    found = studio.run(run)
    film = film_of(found)
    images = [sample for sample in studio.follower(found).view().samples if sample.kind is IMAGE]
    last = {(one.index, one.prompt): one.steps[-1] for one in film.prompts if one.steps}
    return {
        "state": asdict(results.film(found)),
        "prompts": [_filmed(studio, found, film, one) for one in film.prompts],
        "notes": film.notes if film.prompts else (),
        "is_old": any(sample.step > last.get((sample.index, sample.prompt), -1) for sample in images),
        "folder": str(found.film),
    }


def _filmed(studio: Studio, run: RunDir, film: Film, one: FilmedPrompt) -> dict[str, Any]:
    """Return the film of a prompt: names of its files, and the address of its sheet; a sentence where one is gone."""
    facts = {"prompt": one.prompt, "number": one.index + 1, "num_frames": len(one.steps)}
    try:
        loop, sheet = film.file(run, one.loop), film.file(run, one.sheet)
        sizes = {"loop": loop.stat().st_size, "sheet": sheet.stat().st_size}
        sizes |= {"video": film.file(run, one.video).stat().st_size} if one.video else {}
        shown = address(studio.thumbnails.of(sheet, FULL))
    except (InputError, OSError) as error:
        return facts | {"problem": str(error)}
    names = {kind: {"name": getattr(one, kind), "size": size} for kind, size in sizes.items()}
    return facts | {"files": names, "sheet": shown}


def upload_question(studio: Studio, run: str, repo: str, is_private: bool, overwrites: bool) -> dict[str, Any]:
    """Return what would be uploaded, who would see it, and the model card."""
    asked = uploads.question(studio.run(run), repo, is_private, overwrites)
    return {"text": asked.question, "card": asked.card}


def start_upload(
    studio: Studio,
    results: Results,
    run: str,
    repo: str,
    is_private: bool,
    overwrites: bool,
) -> None:
    """Upload the run's exported files. The user has agreed to what `upload_question` said."""
    results.upload(studio.run(run), repo, is_private, overwrites)


def upload_state(studio: Studio, results: Results, run: str) -> dict[str, Any]:
    """Return how the upload that was started last is doing."""
    return asdict(results.uploaded(studio.run(run)))
