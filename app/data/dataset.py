"""The images of a draft with their captions: filtered, counted, and one page of them. The page Data shows them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from app.data import caption_texts, captions
from app.data.scans import Framed, ScanResult
from trainer.config.sections import DataConfig
from trainer.config.size import Size
from trainer.data.images import image_warnings
from trainer.data.images.buckets import kept_part
from trainer.data.images.image_io import IMAGE_SUFFIXES, WHOLE, ImageFile, crop_start, inner_size, read_header
from trainer.data.images.image_members import file_of, is_member
from trainer.system.errors import InputError

PER_PAGE = 48
MOST_COUNTED = 5000
"""Images whose captions are read for every view, in about 0.3 s. Of more, only those on the page are, unless a filter
needs all."""
NUM_WORDS = 24
NUM_TAGS = 60
WORD = re.compile(r"\[trigger\]|\w[\w'\u2019-]+")
COMMON = frozenset(
    (
        *("an", "the", "of", "in", "on", "at", "to", "and", "or", "with", "by"),
        *("for", "from", "is", "are", "it", "its", "as", "his", "her", "their"),
    )
)
"""Words that say nothing about an image, left out of the most frequent ones."""
Show = Literal["all", "uncaptioned", "problems", "held_out", "alike"]


@dataclass(frozen=True)
class Item:
    """An image with its caption.

    Attributes:
        saved: The text of its caption file; None where there is none, or it cannot be read.
        caption: That, else the caption of a metadata.jsonl, else "".
        problem: Why the caption cannot be read.
        is_fixed: Whether the caption stands in a table, in which it is edited.
        like: The first image with nearly the same caption, where such images are shown.
    """

    image: Path
    saved: str | None
    caption: str
    problem: str = ""
    is_fixed: bool = False
    like: Path | None = None


@dataclass(frozen=True)
class Filter:
    """Which images are shown; all conditions hold for each.

    Attributes:
        show: "alike" are those with nearly the same caption as another one, in groups.
        search: Text that the caption contains, in upper or lower case.
        only: The images to choose from; None for all.
        tag: A tag of the caption; "" for all.
    """

    show: Show = "all"
    search: str = ""
    only: Collection[Path] | None = None
    tag: str = ""

    @property
    def needs_captions(self) -> bool:
        return self.show in ("uncaptioned", "problems", "alike") or bool(self.search or self.tag)


@dataclass(frozen=True)
class Counts:
    """Numbers of images, and words and tags with the number of captions that contain them, most frequent first.

    Attributes:
        tags: At most NUM_TAGS of those that are asked for, of `num_tags`; none where no caption has a comma.
    """

    captions: int
    uncaptioned: int
    problems: int
    words: tuple[tuple[str, int], ...]
    tags: tuple[tuple[str, int], ...] = ()
    num_tags: int = 0


@dataclass(frozen=True)
class View:
    """One page of the images that a filter chooses.

    Attributes:
        first: Index of the first item among the chosen ones.
        num_chosen: Chosen images on all pages.
        num_replaceable: Captions that contain the search text as it is written.
        counts: None for more than MOST_COUNTED images.
        next: The chosen image after the one that was asked for; None where it is the last.
    """

    items: tuple[Item, ...]
    first: int
    num_chosen: int
    num_replaceable: int
    counts: Counts | None
    next: Path | None = None


@dataclass(frozen=True)
class Shape:
    """The size of an image, and what is trained of it.

    Attributes:
        width: Pixels of the upright image.
        height: Pixels of the upright image.
        sizes: (width, height) that it is trained at, one for each resolution; none where it is left out.
        start: Where the crop begins, as shares of width and height.
        kept: The shares of width and height that the crop keeps; above 1 for the side with borders.
        focus: The point (x, y) around which it is cropped, as shares of width and height.
    """

    width: int
    height: int
    sizes: tuple[tuple[int, int], ...]
    start: tuple[float, float]
    kept: tuple[float, float]
    focus: tuple[float, float]


@dataclass(frozen=True)
class Frame:
    """The part of an image that is trained at one size.

    Attributes:
        size: (width, height) that it is trained at.
        start: Where the crop begins, as shares of width and height.
        kept: The shares of width and height that it keeps; above 1 for the side with borders.
        scale: How much the image is enlarged.
        cut: The share of its pixels that is cut off.
        is_left_out: Whether it is not trained at this size, since too much would be cut off.
    """

    size: tuple[int, int]
    start: tuple[float, float]
    kept: tuple[float, float]
    scale: float
    cut: float
    is_left_out: bool = False


@dataclass(frozen=True)
class Crop:
    """The parts of an image that are trained.

    Attributes:
        width, height: Of the image, in pixels.
        focus: Its focus point, in shares of width and height.
        is_set: Whether somebody has set it.
        frames: At each size.
    """

    width: int
    height: int
    focus: tuple[float, float]
    is_set: bool
    frames: list[Frame]


def view(
    data: DataConfig,
    found: ScanResult,
    truncated: Collection[str],
    chosen: Filter,
    page: int,
    after: Path | None = None,
    find: str = "",
) -> View:
    """Return a page of images, the first one being 0.

    Args:
        data: The config's section.
        found: The images, completely read.
        truncated: Images whose caption the model does not read to its end.
        chosen: Which images to show.
        page: Number of the page; the last one where there are fewer.
        after: In place of the page, the one that has the next image after this one, if there is one.
        find: Text of the tags that are counted, in upper or lower case; "" for all.

    Raises:
        InputError: Nearly equal captions are asked for of more than MOST_COUNTED images.
    """
    is_counted = len(found.images) <= MOST_COUNTED
    # Reading the captions of 100,000 images takes seconds: only those of the page are read.
    if not is_counted and not chosen.needs_captions:
        images = [
            image
            for image in found.images
            if (chosen.show == "all" or image in found.held_out) and (chosen.only is None or image in chosen.only)
        ]
        first, next_image = _place(images, found.images, page, after)
        return View(tuple(items(images[first : first + PER_PAGE], found)), first, len(images), 0, None, next_image)
    if not is_counted and chosen.show == "alike":
        raise InputError(f"Nearly equal captions are found among at most {MOST_COUNTED:,} images")
    everything = list(items(found.images, found))
    flawed = {item.image for item in everything if _is_flawed(item, data, found, truncated)}
    shown = [item for item in everything if _is_chosen(item, chosen, found, flawed)]
    if chosen.show == "alike":
        groups = caption_texts.alike([item.caption for item in shown])
        shown = [replace(shown[at], like=shown[group[0]].image) for group in groups for at in group]
    first, next_image = _place([item.image for item in shown], found.images, page, after)
    return View(
        tuple(shown[first : first + PER_PAGE]),
        first,
        len(shown),
        sum(chosen.search in item.caption and not item.is_fixed for item in everything) if chosen.search else 0,
        _counts(everything, len(flawed), find) if is_counted else None,
        next_image,
    )


def items(images: Iterable[Path], found: ScanResult) -> Iterator[Item]:
    """Yield images with their captions as they are on the disk now."""
    for image in images:
        if is_member(image) or image in found.fixed:
            yield Item(image, None, found.listed.get(image, ""), is_fixed=True)
            continue
        try:
            saved = captions.saved(image)
        except InputError as error:
            yield Item(image, None, "", str(error))
        else:
            yield Item(image, saved, found.listed.get(image, "") if saved is None else saved)


def editable(found: ScanResult) -> list[Item]:
    """Return the images whose captions do not stand in a table, with those that cannot be read."""
    return [item for item in items(found.images, found) if not item.is_fixed]


def shape(image: Path, framed: Framed | None, is_padded: bool = False) -> Shape:
    """Return what is trained of an image, at its largest size. Raises InputError when it cannot be read.

    Args:
        image: The image.
        framed: Its sizes and its focus; None where they are not known, or it is trained in its own size.
        is_padded: Whether it is whole, with borders.
    """
    file = read_header(image)
    sizes, focus = (framed.sizes, framed.focus) if framed else ((file.size,), WHOLE.focus)
    frame = _frame(file, sizes[-1] if sizes else file.size, focus, is_padded)
    return Shape(file.width, file.height, tuple(size.frame for size in sizes), frame.start, frame.kept, focus)


def is_in_table(image: Path, found: ScanResult) -> bool:
    """Whether a row of a table holds an image or its caption, so that neither can be changed here."""
    return is_member(image) or image in found.fixed


def crop(image: Path, framed: Framed, is_padded: bool) -> Crop:
    """Return what is trained of an image at all of its sizes. Raises InputError when it cannot be read."""
    file, focus = read_header(image), framed.focus
    return Crop(file.width, file.height, focus, focus != WHOLE.focus, frames(file, framed, is_padded))


def frames(file: ImageFile, framed: Framed, is_padded: bool = False) -> list[Frame]:
    """Return what is trained of an image at each of its sizes, and what would be at those where it is left out."""
    kept = [_frame(file, size, framed.focus, is_padded) for size in framed.sizes]
    left_out = (_frame(file, size, framed.focus, is_padded) for size in framed.left_out)
    return [*kept, *(replace(frame, is_left_out=True) for frame in left_out)]


def _frame(file: ImageFile, size: Size, focus: tuple[float, float], is_padded: bool) -> Frame:
    scale, share = image_warnings.fit(file, size, is_padded)
    if is_padded:
        inner = inner_size(file.width, file.height, size.frame)
        kept = size.width / inner[0], size.height / inner[1]
        start = (1 - kept[0]) / 2, (1 - kept[1]) / 2
    else:
        kept = kept_part(file.size, size)
        start = crop_start(focus[0], kept[0]), crop_start(focus[1], kept[1])
    return Frame(size.frame, start, kept, scale, 1 - share)


def image_at(path: str) -> Path:
    """Return the image file of this path. Raises InputError for everything else."""
    file = Path(path)
    if "\ufffd" in path:  # as `answers` writes what is not UTF-8
        raise InputError(f"{path[:500]!r}: its name is not UTF-8; rename the file")
    is_image = is_member(file) or file.suffix.lower() in IMAGE_SUFFIXES
    if not is_image or not file.is_absolute() or not file_of(file).is_file():
        raise InputError(f"{path[:500]!r}: no such image; it may have been moved or deleted")
    return file


def folders(data: DataConfig) -> list[Path]:
    """Return the folders of images that the config names."""
    named = [data.path, *(folder.path for folder in data.folders), data.regularization]
    if isinstance(data.validation, str):
        named.append(data.validation)
    return [Path(os.path.abspath(Path(path).expanduser())) for path in named if path]


def words(caption: str) -> set[str]:
    """Return the words of a caption in lower case. `[trigger]` is one."""
    return set(WORD.findall(caption.lower()))


def _place(shown: Sequence[Path], everything: Sequence[Path], page: int, after: Path | None) -> tuple[int, Path | None]:
    """Return the index of the first image of a page, and the image that follows `after`."""
    following = None
    if after is not None:
        if after in shown:
            at = shown.index(after) + 1
        else:  # it was captioned meanwhile, and the filter leaves it out
            before = set(everything[: everything.index(after)]) if after in everything else set()
            at = sum(image in before for image in shown)
        if at < len(shown):
            following, page = shown[at], at // PER_PAGE
    last = max(0, len(shown) - 1) // PER_PAGE
    return PER_PAGE * min(max(0, page), last), following


def _is_flawed(item: Item, data: DataConfig, found: ScanResult, truncated: Collection[str]) -> bool:
    is_missing = not item.caption and data.missing_caption == "stop"
    return bool(item.problem) or is_missing or item.image in found.flaws or str(item.image) in truncated


def _is_chosen(item: Item, chosen: Filter, found: ScanResult, flawed: Collection[Path]) -> bool:
    by_show = {
        "all": True,
        "uncaptioned": not item.caption,
        "problems": item.image in flawed,
        "held_out": item.image in found.held_out,
        "alike": bool(item.caption),
    }
    has_text = chosen.search.casefold() in item.caption.casefold()
    has_tag = not chosen.tag or chosen.tag in caption_texts.tags(item.caption)
    return by_show[chosen.show] and has_text and has_tag and (chosen.only is None or item.image in chosen.only)


def _counts(everything: Sequence[Item], num_flawed: int, find: str) -> Counts:
    num_captions = sum(bool(item.caption) for item in everything)
    frequent = _ranked(word for item in everything for word in words(item.caption) - COMMON)
    is_tagged = any("," in item.caption for item in everything)
    tags = _ranked(tag for item in everything if is_tagged for tag in caption_texts.tags(item.caption))
    asked = [(tag, count) for tag, count in tags if find.casefold() in tag.casefold()]
    return Counts(
        num_captions,
        len(everything) - num_captions,
        num_flawed,
        tuple(frequent[:NUM_WORDS]),
        tuple(asked[:NUM_TAGS]),
        len(asked),
    )


def _ranked(texts: Iterable[str]) -> list[tuple[str, int]]:
    return sorted(Counter(texts).items(), key=lambda entry: (-entry[1], entry[0]))
