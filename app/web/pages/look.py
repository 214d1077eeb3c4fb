"""A closer look at images on the screen Data: their crops, near copies and edit pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from app.data import dataset, looks, pairs
from app.data.focus import FocusPoints
from app.data.looks import Group, LookResult
from app.data.scans import ScanResult
from app.form import draft as form
from app.studio import Studio
from app.web.answers import Calls
from app.web.pages.data import ANOTHER_FOLDER, require_shown
from app.web.served_files import address
from trainer.config.schema import RunConfig
from trainer.system.errors import InputError

PREVIEW = 1024
"""Longer side of the image in the dialog of its crop, pixels."""
MOST_GROUPS = 40
MOST_IN_GROUP = 12
MOST_LISTED = 60
"""Blurred, flat or enlarged images that are shown in the panel; all of them are shown by its filter."""


def calls(studio: Studio) -> Calls:
    """Return the functions of the panels' script."""
    points = FocusPoints(studio.runs / "drafts" / "focus.json")
    on_points: list[Callable[..., Any]] = [crop, focus, undo]
    others: list[Callable[..., Any]] = [start, stop, state, suggestion, use]
    functions = {f"look_{function.__name__}": partial(function, studio, points) for function in on_points}
    return functions | {f"look_{function.__name__}": partial(function, studio) for function in others}


def crop(studio: Studio, points: FocusPoints, image: str) -> dict[str, Any]:
    """Return how an image is cropped at each of its sizes, and why its focus cannot be set, if so."""
    config, found = _scanned(studio)
    path = _own(image, found)
    return _cropped(points, config, found, path) | {
        "address": address(studio.thumbnails.of(path, PREVIEW)),
        "background": config.data.background,
    }


def focus(studio: Studio, points: FocusPoints, image: str, point: tuple[float, float] | None) -> dict[str, Any]:
    """Save the focus point of an image, or its middle for None. Returns how it is cropped then."""
    config, found = _scanned(studio)
    path = _own(image, found)
    if problem := _fixed(path, config, found):
        raise InputError(problem)
    studio.uploads.folders.require_changeable(path.parent.resolve())
    root = _root(path, config)
    points.set(path, root, point)
    studio.scans.refocus(config, path, points.of(path, root))
    return _cropped(points, config, found, path)


def undo(studio: Studio, points: FocusPoints, key: str) -> str:
    """Undo the latest change of a focus point in the folders that the window shows. Returns its image, "" for none."""
    config = form.check(studio.draft()).config
    require_shown(config, key)
    image = points.undo(dataset.folders(config.data))
    if image is None:
        return ""
    studio.scans.refocus(config, image, points.of(image, _root(image, config)))
    return str(image)


def start(studio: Studio, key: str) -> None:
    """Begin to look at all images of the folders that the window shows."""
    config, found = _scanned(studio)
    require_shown(config, key)
    studio.looks.start(config, found)


def stop(studio: Studio) -> None:
    """End the look at the draft's images."""
    studio.looks.stop(form.check(studio.draft()).config)


def state(studio: Studio) -> dict[str, Any] | None:
    """Return how far the look at the draft's images is, and what it found; None where none was started."""
    config = form.check(studio.draft()).config
    result = studio.looks.of(config)
    if result is None:
        return None
    progress = {
        "is_running": result.is_running,
        "num_done": result.num_done,
        "num_images": len(result.images),
        "is_complete": result.is_complete,
        "problem": result.problem,
        "seconds": result.seconds,
    }
    return progress if result.is_running else progress | _found(config, studio.scans.of(config), result)


def suggestion(studio: Studio) -> dict[str, Any] | None:
    """Return a folder next to the draft's that probably has the images before the edit; None where there is none."""
    config, found = _scanned(studio)
    pair = pairs.suggested(config, found)
    return None if pair is None else asdict(pair) | {"folder": str(pair.folder), "name": pair.folder.name}


def use(studio: Studio, folder: str) -> None:
    """Train the draft's images as edits of those in the suggested folder."""
    config, found = _scanned(studio)
    pair = pairs.suggested(config, found)
    if pair is None or str(pair.folder) != folder:
        raise InputError(f"{ANOTHER_FOLDER} changed")
    studio.change_draft(lambda draft: draft.typed("data.references", folder))


def _scanned(studio: Studio) -> tuple[RunConfig, ScanResult]:
    config = form.check(studio.draft()).config
    found = studio.scans.of(config)
    if not found.is_complete:
        raise InputError("The images are still being read; try again when that is done")
    return config, found


def _own(image: str, found: ScanResult) -> Path:
    path = dataset.image_at(image)
    if path not in found.framed:
        raise InputError(f"{image[:500]}: not an image of the draft; read the data again")
    return path


def _root(image: Path, config: RunConfig) -> Path:
    """The innermost of the config's folders that an image is in."""
    return max(
        (root for root in dataset.folders(config.data) if image.is_relative_to(root)), key=lambda at: len(at.parts)
    )


def _fixed(image: Path, config: RunConfig, found: ScanResult) -> str:
    """Why the focus of an image cannot be set; "" where it can."""
    if dataset.is_in_table(image, found):
        return "An image in a table has no focus point: it is cropped around its middle."
    if config.data.fit == "pad":
        return "With data.fit: pad nothing is cropped, so the focus point has no effect."
    return ""


def _cropped(points: FocusPoints, config: RunConfig, found: ScanResult, image: Path) -> dict[str, Any]:
    framed, fit = found.framed[image], config.data.fit
    fixed = _fixed(image, config, found)
    if not fixed:
        try:
            framed = replace(framed, focus=points.of(image, _root(image, config)))
        except InputError as error:
            fixed = str(error)
    return {
        **asdict(dataset.crop(image, framed, fit == "pad")),
        "fit": fit,
        "most_cropped": config.data.most_cropped,
        "fixed": fixed,
        "undo": points.undoable(dataset.folders(config.data)),
    }


def _found(config: RunConfig, scanned: ScanResult, result: LookResult) -> dict[str, Any]:
    roots = dataset.folders(config.data)
    enlarged = looks.enlarged(scanned)
    listed = {"blurred": result.blurred, "flat": result.flat, "enlarged": enlarged, "failed": list(result.failed)}
    groups = [_described(group, scanned, roots) for group in result.groups[:MOST_GROUPS]]
    return {
        "is_outdated": scanned.is_complete and scanned.images != result.images,
        "groups": groups,
        "num_groups": len(result.groups),
        "num_leaks": sum(group.leaks for group in result.groups),
        "num_copies": sum(len(group.images) for group in result.groups),
        "lists": {
            mark: {"count": len(images), "images": [_named(image, roots) for image in images[:MOST_LISTED]]}
            for mark, images in listed.items()
        },
        "failure": next(iter(result.failed.values()), ""),
    }


def _described(group: Group, scanned: ScanResult, roots: Iterable[Path]) -> dict[str, Any]:
    return {
        "leaks": group.leaks,
        "count": len(group.images),
        "images": [
            _named(image, roots)
            | {
                "is_mirrored": image in group.mirrored,
                "is_held_out": image in scanned.held_out,
                "is_own": image not in scanned.framed or scanned.framed[image].is_own,
            }
            for image in group.images[:MOST_IN_GROUP]
        ],
    }


def _named(image: Path, roots: Iterable[Path]) -> dict[str, Any]:
    name = next((str(image.relative_to(root)) for root in roots if image.is_relative_to(root)), str(image))
    return {"image": str(image), "name": name}
