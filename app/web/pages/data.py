"""The screen Data: the draft's images with captions to edit, their shapes, and what is wrong with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from app.data import caption_texts, dataset, looks, masks
from app.data import captions as caption_files
from app.data.caption_lengths import LengthsResult
from app.data.captions import Captions, Card, ChangedElsewhere
from app.data.dataset import Filter, Item, Show
from app.data.scans import ScanResult
from app.data.thumbnails import FULL, stamp
from app.form import draft as form
from app.studio import Studio
from app.web.answers import Calls
from app.web.served_files import address
from trainer.config import families, titles
from trainer.config.schema import RunConfig
from trainer.system.errors import InputError

ANOTHER_FOLDER = "New run has another folder meanwhile, which is shown now; nothing was"
MOST_SHOWN = 8
"""Held-out images and files of text in the summary, and captions that a change of all leaves."""


def calls(studio: Studio) -> Calls:
    """Return the functions of the screen's script."""
    captions = Captions(studio.runs / "drafts" / "captions.jsonl")
    editing: list[Callable[..., Any]] = [view, save, replace, extend, rename, undo]
    others: list[Callable[..., Any]] = [thumbnail, timesteps]
    functions = {f"data_{function.__name__}": partial(function, studio, captions) for function in editing}
    return functions | {f"data_{function.__name__}": partial(function, studio) for function in others}


def view(
    studio: Studio,
    captions: Captions,
    show: Show = "all",
    search: str = "",
    page: int = 0,
    is_fresh: bool = False,
    mark: str = "",
    tag: str = "",
    find: str = "",
    after: str = "",
) -> dict[str, Any]:
    """Return a page of the draft's images and the figures of all of them.

    Args:
        show: Which images, as `dataset.Filter` has it; also `search` and `tag`.
        page: Its number, from 0.
        is_fresh: Read the files again, because they may have changed.
        mark: Only images that a closer look has marked, as `looks.marked` has it; "" for all.
        find: Text of the tags that are counted.
        after: An image; the page is then that of the next one, which is `next` of the answer.
    """
    draft = studio.draft()
    config = form.check(draft).config
    is_typed = studio.half_typed.holds(draft.values)  # a path that is half there is not read
    found = ScanResult(0, is_complete=False) if is_typed else studio.scans.of(config, is_fresh)
    state = _summary(config, found)
    if not found.is_complete:
        if is_fresh:
            studio.lengths.forget()
        return state
    lengths = _lengths(studio, config, found, is_fresh)
    cut = lengths.cut if lengths else {}
    only = looks.marked(studio.looks.of(config), found, mark) if mark else None
    following = Path(after) if after else None
    seen = dataset.view(config.data, found, cut, Filter(show, search, only, tag), page, following, find)
    roots = dataset.folders(config.data)
    images = [image for image in found.images if image in found.held_out][:MOST_SHOWN] if found.held_out else []
    return state | {
        "cards": [_card(item, config, found, cut.get(str(item.image))) for item in seen.items],
        "first": seen.first,
        "next": str(seen.next) if seen.next else None,
        "per_page": dataset.PER_PAGE,
        "num_chosen": seen.num_chosen,
        "num_replaceable": seen.num_replaceable,
        "counts": asdict(seen.counts) if seen.counts else None,
        "held_out": [_shown(image, roots) for image in images],
        "lengths": _measured(lengths),
        **_undo(captions, config),
    }


def save(studio: Studio, captions: Captions, image: str, before: str | None, caption: str) -> dict[str, Any]:
    """Save an edited caption.

    Args:
        before: The text of its file when it was loaded, None where there was none.

    Returns:
        {"saved": text of the file now}, or {"changed": its text} where it was changed elsewhere meanwhile.
    """
    text = caption.strip()
    try:
        captions.save(dataset.image_at(image), before, text)
    except ChangedElsewhere as error:
        return {"changed": error.text}
    config = form.check(studio.draft()).config
    # The next view reads what has changed: captions that are typed one after another do not wait for it.
    if bool(before) != bool(text):
        studio.scans.outdate(config)
    studio.lengths.outdate(config)
    return {"saved": caption_files.saved(Path(image)), **_undo(captions, config)}


def replace(studio: Studio, captions: Captions, key: str, search: str, replacement: str) -> dict[str, Any]:
    """Replace a text in all captions. key: of the folders that the window shows.

    Returns:
        As `_edit`.
    """
    return _edit(studio, captions, key, lambda caption: caption.replace(search, replacement) if search else caption)


def extend(studio: Studio, captions: Captions, key: str, text: str, is_behind: bool) -> dict[str, Any]:
    """Put a text in front of all captions or behind them, as `caption_texts.extended` does. Returns as `_edit`."""
    if not text.strip():
        raise InputError("Write the text that is put into all captions")
    return _edit(studio, captions, key, lambda caption: caption_texts.extended(caption, text, is_behind))


def rename(studio: Studio, captions: Captions, key: str, tag: str, name: str) -> dict[str, Any]:
    """Rename a tag in all captions; an empty name removes it. Returns as `_edit`."""
    return _edit(studio, captions, key, lambda caption: caption_texts.renamed(caption, tag, name))


def _edit(studio: Studio, captions: Captions, key: str, change: Callable[[str], str]) -> dict[str, Any]:
    """Change all captions of the folders that the window shows.

    Returns:
        {"changed": number of captions, "kept": sentences on those that were left, "num_kept": their number}.
    """
    config = form.check(studio.draft()).config
    require_shown(config, key)
    found = studio.scans.of(config)
    if not found.is_complete:
        raise InputError("The images are still being read; try again when that is done")
    items = dataset.editable(found)
    cards = [(Card(item.image, item.caption), item.saved) for item in items if not item.problem]
    changed, kept = captions.edit(cards, change)
    kept = [item.problem for item in items if item.problem] + kept
    roots = dataset.folders(config.data)
    return {
        "changed": changed,
        "kept": [_shortened(sentence, roots) for sentence in kept[:MOST_SHOWN]],
        "num_kept": len(kept),
    }


def undo(studio: Studio, captions: Captions, key: str) -> int:
    """Undo the latest change in the folders that the window shows. Returns the number of restored captions."""
    config = form.check(studio.draft()).config
    require_shown(config, key)
    return captions.undo(dataset.folders(config.data))


def require_shown(config: RunConfig, key: str) -> None:
    """Raise InputError where another window has chosen other folders: captions that are not seen are not changed."""
    if key != folders_key(config):
        raise InputError(f"{ANOTHER_FOLDER} changed")


def thumbnail(studio: Studio, image: str, is_full: bool = False) -> str:
    """Return the address of a copy of an image; small, or large enough for a screen."""
    file = dataset.image_at(image)
    return address(studio.thumbnails.of(file, FULL) if is_full else studio.thumbnails.of(file))


def timesteps(studio: Studio) -> list[dict[str, Any]]:
    """Return the effective shift and the distribution of timesteps of each bucket; none for text."""
    return studio.timesteps(studio.draft())


def _summary(config: RunConfig, found: ScanResult) -> dict[str, Any]:
    roots = dataset.folders(config.data)
    return {
        "name": config.name,
        "folders": [str(folder) for folder in roots],
        "key": folders_key(config),
        "trigger": config.data.trigger,
        "resolution": titles.size_title(config.data.all_sides),
        "background": config.data.background,
        "needs_captions": config.data.missing_caption == "stop",
        "is_text": families.trains_on(config) == "text",
        "is_complete": found.is_complete,
        "num_files": found.num_files,
        "num_images": len(found.images) if found.is_complete else 0,
        "num_trained": sum(found.buckets.values()),
        "num_held_out": len(found.held_out),
        "num_questions": found.num_questions,
        "texts": [[file.name, size] for file, size in list(found.texts.items())[:MOST_SHOWN]],
        "num_texts": len(found.texts),
        "text_bytes": sum(found.texts.values()),
        "num_documents": found.num_documents,
        "conversation": [list(message) for message in found.conversation],
        "shapes": [[*size.frame, count, found.cropped[size]] for size, count in found.buckets.items()],
        "problems": [_shortened(problem, roots) for problem in found.problems],
        "warnings": [_shortened(warning, roots) for warning in found.warnings],
    }


def folders_key(config: RunConfig) -> str:
    """Return what says which folders are shown. A path itself may hold what JSON cannot."""
    return hashlib.sha256(repr(dataset.folders(config.data)).encode()).hexdigest()[:16]


def _shortened(sentence: str, roots: list[Path]) -> str:
    """A sentence with its files named below their folder, which stands at the top of the page."""
    for root in roots:
        sentence = sentence.replace(f"{root}/", "")
    return sentence


def _card(item: Item, config: RunConfig, found: ScanResult, cut: dict[str, Any] | None) -> dict[str, Any]:
    flaw = found.flaws.get(item.image)
    card: dict[str, Any] = {
        **_shown(item.image, dataset.folders(config.data)),
        "saved": item.saved,
        "caption": item.caption,
        "problem": item.problem,
        "is_fixed": item.is_fixed,
        "like": _shortened(str(item.like), dataset.folders(config.data)) if item.like else "",
        "flaw": asdict(flaw) if flaw else None,
        "is_held_out": item.image in found.held_out,
        "cut": cut,
        "shape": None,
        "references": _references(item.image, config, found),
        "mask": masks.shown(config.data, found, item.image),
    }
    try:
        card["shape"] = asdict(dataset.shape(item.image, found.framed.get(item.image), config.data.fit == "pad"))
    except InputError as error:
        card["problem"] = item.problem or str(error)
    card["problem"] = _shortened(card["problem"], dataset.folders(config.data))
    return card


def _references(image: Path, config: RunConfig, found: ScanResult) -> list[dict[str, str]]:
    """The images that an image is made from in edit training."""
    framed, roots = found.framed.get(image), dataset.folders(config.data)
    if framed is None:
        return []
    if config.data.references:
        roots = [*roots, Path(config.data.references).expanduser()]
    return [_shown(one, roots) for one in framed.references]


def _shown(image: Path, roots: list[Path]) -> dict[str, str]:
    """How an image is named, and what tells it from a later one of its name, for which the page asks anew."""
    try:
        present = stamp(image)
    except OSError:
        present = ""
    return {"image": str(image), "name": _shortened(str(image), roots), "stamp": present}


def _lengths(studio: Studio, config: RunConfig, found: ScanResult, is_fresh: bool) -> LengthsResult | None:
    if found.problems or not found.images:
        return None
    return studio.lengths.of(config, is_fresh)


def _measured(lengths: LengthsResult | None) -> Mapping[str, Any] | None:
    """The lengths of all captions; None where they are not measured."""
    if lengths is None:
        return None
    sentences = lengths.measured.warnings if lengths.measured else ()
    return {"is_waiting": lengths.is_waiting, "failure": lengths.failure, "sentences": list(sentences)}


def _undo(captions: Captions, config: RunConfig) -> dict[str, Any]:
    """The changes to undo in the config's folders, and the problem of their list."""
    try:
        count = captions.undoable(dataset.folders(config.data))
    except (InputError, OSError) as error:
        return {"num_undoable": 0, "history_problem": str(error)}
    return {"num_undoable": count, "history_problem": captions.problem}
