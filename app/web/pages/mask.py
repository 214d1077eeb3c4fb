"""The dialog Mask of the screen Data: which part of an image counts in the loss, painted on the page."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from annotated_types import MaxLen
from PIL import Image
from pydantic import FiniteFloat

from app.data import dataset, masks
from app.data.mask_models import MaskModels
from app.data.masks import ChangedElsewhere, Masks, Place
from app.data.scans import ScanResult
from app.data.thumbnails import FULL, SMALL
from app.form import draft as form
from app.form.draft import Draft
from app.studio import Studio
from app.web.answers import Calls
from app.web.served_files import address
from trainer.config.schema import RunConfig
from trainer.system.errors import InputError

PATIENCE = 10
"""How often a scan that is not complete is asked for again, each time for `scans.PATIENCE_S`."""
MOST_POINTS = 100
_PNG = "data:image/png;base64,"
Point = tuple[FiniteFloat, FiniteFloat, bool]
"""x and y of a click, and whether it belongs to the object."""
Sent = Annotated[str, MaxLen(masks.MOST_SENT * 4 // 3 + 4)]


def calls(studio: Studio) -> Calls:
    """Return the functions of the dialog's script."""
    editor = Masks(studio.runs / "drafts" / "masks")
    functions: list[Callable[..., Any]] = [load, save, former, overlay]
    calls = {f"mask_{function.__name__}": partial(function, studio, editor) for function in functions}
    return calls | {"mask_find": partial(find, studio, MaskModels(studio.runs))}


def load(studio: Studio, editor: Masks, image: str) -> dict[str, Any]:
    """Return an image to paint on, with its mask. Raises InputError where none may be written."""
    config, place = _writable(studio, image)
    size, (width, height) = masks.sizes(place)
    return {
        "image": address(studio.thumbnails.of(place.image, FULL)),
        "width": width,
        "height": height,
        "size": list(size),
        "file": str(place.file),
        "is_set": place.is_set,
        "background": float(config.data.mask_background),
        **_state(editor, place),
    }


def save(studio: Studio, editor: Masks, image: str, sent: Sent | None, before: str) -> dict[str, Any]:
    """Write a painted mask, and name its folder in the draft where none is named; no longer after its last mask.

    Args:
        sent: A PNG in base64, as `Masks.save` takes it; None removes the mask.
        before: Digest of the mask when it was loaded, "" where there was none.

    Returns:
        {"digest": of the mask now}, or {"changed": what is there} where it was changed elsewhere meanwhile.
    """
    config, place = _writable(studio, image)
    try:
        digest = editor.save(place, None if sent is None else _bytes(sent), before)
    except ChangedElsewhere:
        return {"changed": _state(editor, place)}
    if digest and not place.is_set:
        config = form.check(studio.change_draft(partial(_with_folder, place, str(place.folder)))).config
    elif not digest and place.is_set and masks.is_empty(place.folder):  # an empty folder would stop a run
        config = form.check(studio.change_draft(partial(_with_folder, place, None))).config
    studio.scans.of(config, is_fresh=not before or not digest)  # the number of images without a mask has changed
    return {"digest": digest, "num_former": editor.num_former(place)}


def former(studio: Studio, editor: Masks, image: str, number: int) -> dict[str, Any]:
    """Return a former mask of an image, 0 being the newest. Nothing is written."""
    _, place = _chosen(studio, image)
    return {"mask": masks.data_url(editor.former(place, number))}


def overlay(studio: Studio, editor: Masks, image: str) -> str:
    """Return a small black image, opaque where the image is not in the loss, as a data URL; "" without a mask."""
    _, place = _chosen(studio, image)
    mask = editor.mask_of(place)
    if mask is None:
        return ""
    levels = mask.levels
    levels.thumbnail((SMALL, SMALL))
    dark = Image.new("LA", levels.size)
    dark.putalpha(levels.point(lambda level: 255 - level))
    return masks.data_url(dark)


def find(
    studio: Studio,
    models: MaskModels,
    image: str,
    model: str,
    points: Annotated[list[Point], MaxLen(MOST_POINTS)],
    box: tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat] | None = None,
) -> dict[str, str]:
    """Return what a model takes for the object at some points, or in a box, in pixels of the page's copy of an image.

    Nothing is written. The model runs in a process of its own.
    """
    _, place = _chosen(studio, image)
    copy = studio.thumbnails.of(place.image, FULL)
    return {"mask": f"{_PNG}{models.find(model, {'image': str(copy), 'points': points, 'box': box})}"}


def _chosen(studio: Studio, image: str) -> tuple[RunConfig, Place]:
    """The draft's config, and the place of an image's mask."""
    config = form.check(studio.draft()).config
    found = _scanned(studio, config)
    return config, masks.place_of(config.data, found, dataset.image_at(image))


def _writable(studio: Studio, image: str) -> tuple[RunConfig, Place]:
    """The same, of a mask that may be written. Raises InputError for a folder of the program itself."""
    config, place = _chosen(studio, image)
    studio.uploads.folders.require_changeable(place.folder.resolve())
    return config, place


def _scanned(studio: Studio, config: RunConfig) -> ScanResult:
    for _ in range(PATIENCE):
        found = studio.scans.of(config)
        if found.is_complete:
            return found
    raise InputError("The images are still being read; try again when that is done")


def _state(editor: Masks, place: Place) -> dict[str, Any]:
    mask = editor.mask_of(place)
    return {
        "mask": masks.data_url(mask.levels) if mask else "",
        "digest": mask.digest if mask else "",
        "num_former": editor.num_former(place),
    }


def _with_folder(place: Place, folder: str | None, draft: Draft) -> Draft:
    """The draft with the folder of masks that a place is in, or without it."""
    if place.field == "data.masks":
        return draft.typed(place.field, folder or "")
    folders = [one.model_dump(mode="json", exclude_defaults=True) for one in form.check(draft).config.data.folders]
    number = int(place.field.split(".")[2])
    folders[number] = {**folders[number], "masks": folder}
    return replace(draft, values={**draft.values, "data.folders": folders})


def _bytes(sent: str) -> bytes:
    try:
        return base64.b64decode(sent, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError("the mask is not base64; reload the page") from error
