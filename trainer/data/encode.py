"""Encodes images and captions into cached examples. Encoders are loaded and freed here."""

from __future__ import annotations

import gc
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

from trainer.config.schema import RunConfig
from trainer.config.size import Size
from trainer.data.cache import ExampleCache, RankGroup, content_keys, encode_missing, key_of, key_of_all, missing
from trainer.data.encoded_memory import Encoded, EncodedMemory
from trainer.data.images import image_warnings
from trainer.data.images.buckets import Buckets, kept_part
from trainer.data.images.captions import measure
from trainer.data.images.image_files import CaptionedImage, Dataset
from trainer.data.images.image_io import (
    WHOLE,
    Framing,
    ImageFile,
    highest_level,
    inner_size,
    is_invisible,
    load_bordered_mask,
    load_mask,
    load_resized,
    load_rgb,
)
from trainer.data.images.image_source import EncodedData, EncodedImage, EncodedPrompt, Pixels, with_trigger
from trainer.data.images.known_files import KnownFiles
from trainer.data.images.scan_memory import ScanMemory
from trainer.data.prompts import CACHE_VERSION, Prompt, Seen, encode_prompt, origin_of, prompt_keys
from trainer.distributed.context import RankContext
from trainer.distributed.world import World
from trainer.models.base import ImageFamily, LoadModule
from trainer.models.objectives.base import Example
from trainer.run.events import Emit, StatusEvent, WarningEvent
from trainer.system.errors import InputError
from trainer.system.files import make_private_if_new
from trainer.system.index import Index

T = TypeVar("T")

LEAST_WHITE = 0.01
"""Share of an image below which its mask is probably empty, inverted, or of a program that writes 1 for white."""
MOST_GREY = 127
"""Highest level of a mask that probably holds numbers of classes, and no white."""
PROGRESS_S = 0.25
"""Shortest time between two events about the number of encoded items; the last one is always written."""


def require_same(world: World, found: object) -> None:
    """Raise InputError on all ranks if their data differ. found: says what a rank has found. Collective."""
    everyone = world.gather(found)
    differing = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if differing:
        raise InputError(
            f"data: rank {differing[0]} has found other images or captions than rank 0; copy the dataset to all "
            "machines again, or start again when its files no longer change"
        )


class StopRequested(Exception):
    """Raised on all ranks when a stop is requested while encoding. Encoded examples stay in the cache."""


def encode_data(
    family: ImageFamily, load: LoadModule, context: RankContext, others: Sequence[ImageFile] = ()
) -> EncodedData:
    """Encode everything a run needs that is not cached yet: each image and each caption once, by one of the ranks.

    Collective.

    Args:
        family: Encodes images and captions.
        load: Loads an encoder of the family.
        context: This rank's part of the run.
        others: Images without captions that are encoded too.

    Raises:
        StopRequested: A stop was requested; raised on every rank.
        InputError: An image cannot be decoded and `data.bad_image` is not warn.
    """
    references = [(file,) for file in context.cfg.sample.references]
    return _DataEncoder(family, load, context, ExampleCache(context.cache / "examples"), references).encode(others)


def encode_samples(
    family: ImageFamily, load: LoadModule, context: RankContext, references: Sequence[Sequence[str]]
) -> EncodedData:
    """Encode what the prompts of `sample` need that is not cached yet, and no data. Collective.

    Args:
        family: As for `encode_data`, as are `load` and `context`.
        references: Reference images of each prompt, in the order of `sample.prompts`; they replace `sample.references`.

    Raises:
        InputError: A reference image cannot be read.
    """
    encoder = _DataEncoder(family, load, context, ExampleCache(context.cache / "examples"), references)
    return encoder.with_prompts((), (), ())


@dataclass(frozen=True)
class _DataEncoder:
    """references: files of each sample prompt; empty where no prompt has any."""

    family: ImageFamily
    load: LoadModule
    context: RankContext
    cache: ExampleCache
    references: Sequence[Sequence[str]]

    @cached_property
    def _rank_group(self) -> RankGroup:
        return _rank_group(self.context.world, self.context.cache)

    @cached_property
    def _known(self) -> KnownFiles:
        return KnownFiles(Index(self.context.cache))

    def encode(self, others: Sequence[ImageFile]) -> EncodedData:
        scans = ScanMemory.of_launcher(self.context.cfg.data, self.context.cache)
        dataset = scans.scan(lambda: self._known)
        memory = EncodedMemory(self.cache, Index(self.context.cache), scans.digest, self._way)
        encoded = memory.recalled(dataset)
        # Encoding is collective: one rank that lacks an answer has all of them look for it.
        are_known = all(self.context.world.gather(encoded is not None))
        if encoded is not None and are_known:
            self._warn(encoded.warnings)
        else:
            encoded = self._encode_dataset(dataset, memory)
        return self.with_prompts(encoded.train, encoded.validation, others)

    def with_prompts(
        self, train: tuple[EncodedImage, ...], validation: tuple[EncodedImage, ...], others: Sequence[ImageFile]
    ) -> EncodedData:
        """Encode the sample prompts, their references and `others`, and return them with the encoded images."""
        known = map(Prompt, ("", self.context.cfg.sample.negative))
        texts = self._encode_texts([*known, *self._sample_prompts])
        shown = chain.from_iterable(self._samples)
        alone = {image.path: self._picture(image, self._largest) for image in (*shown, *others)}
        latents, _ = self._encode_images(list(alone.values()))
        return EncodedData(
            self.cache,
            train,
            validation,
            self._encoded_prompts(texts, {file: latents.get(picture) for file, picture in alone.items()}),
            texts[Prompt("")],
            self.family.dropped_text,
            self._origin,
            self.family.reads_original_size,
            {image.path: key for image in others if (key := latents.get(alone[image.path]))},
        )

    def _warn(self, warnings: Iterable[str]) -> None:
        for warning in warnings:
            self.context.emit(WarningEvent(message=warning))

    @property
    def _way(self) -> tuple[object, ...]:
        """Settings that decide, in addition to the scan, the examples, their keys and the warnings."""
        cfg, family = self.context.cfg, self.family
        own = family.drawn_size(Size(1000, 1000), self._largest)
        own_size = own.values if own else None
        (text_key,) = prompt_keys(cfg, self._origin, [Prompt("")]).values()
        sizes = (family.size_multiple, family.longest_side, own_size)
        return (text_key, *sizes, cfg.sample.prompts, cfg.sample.negative, family.sees_references)

    def _encode_dataset(self, dataset: Dataset, memory: EncodedMemory) -> Encoded:
        """Encode what the cache lacks of the images and captions of a dataset."""
        images = (*dataset.train, *dataset.validation)
        # Else a rank would encode, and meet the others for, something that they do not have.
        require_same(self.context.world, key_of_all((len(dataset.train), *(image.captions for image in images))))
        encoded, is_whole = self._encode_all(dataset)
        # What could not be encoded is tried again, and named, by the next start.
        if self._rank_group.index == 0 and is_whole:
            memory.keep(dataset, encoded)
        return encoded

    def _encode_all(self, dataset: Dataset) -> tuple[Encoded, bool]:
        """Encode what the cache lacks. Returns all examples, and whether none of them was left out."""
        images = (*dataset.train, *dataset.validation)
        train, validation = (self._wanted(images) for images in (dataset.train, dataset.validation))
        wanted = (*train, *validation)
        # Every rank has all captions. The cache does not hold their lengths, but tokenizing again is cheap.
        measured = measure(self.family, self.context.cfg, images).warnings if self.context.world.rank == 0 else ()
        warnings = (*self._warnings(dataset, wanted), *measured)
        self._warn(warnings)
        seen = self._seen([image.references for image in images])
        read = {image: self._prompts_of(image, shown) for image, shown in zip(images, seen, strict=True)}
        texts = self._encode_texts([*self._sample_prompts, *(prompt for one in read.values() for prompt in one.all)])
        latents, invisible = self._encode_images([picture for one in wanted for picture in one.pictures])
        masks = self._encode_masks(wanted, latents)
        faint = tuple(self._of_faint_masks(masks))
        self._warn(faint)
        encoded = Encoded(
            tuple(filter(None, (one.encoded(latents, masks, read[one.image], texts) for one in train))),
            tuple(filter(None, (one.encoded(latents, masks, read[one.image], texts) for one in validation))),
            (*warnings, *invisible, *faint),
        )
        return encoded, len(encoded.train) + len(encoded.validation) == len(wanted)

    def _wanted(self, images: Sequence[CaptionedImage]) -> list[_Wanted]:
        """The images in each of their sizes, without those that would lose too much."""
        return [
            _Wanted(
                image,
                size,
                self._framed(image, size, image.focus),
                # Cropped as the image: an edit keeps its place.
                tuple(self._picture(one, side, image.focus) for one in image.references),
            )
            for image in images
            for side, size in self._sized(image)
        ]

    def _sized(self, image: CaptionedImage) -> tuple[tuple[int, Size], ...]:
        """(resolution, size) of each time that an image is trained."""
        if own := self._own_size(image, self._largest):
            return ((self._largest, own),)
        return self._buckets.of_image(image, image.sides)

    def _framed(self, image: ImageFile, size: Size, focus: tuple[float, float]) -> Framing:
        """How an image is brought to a size; its focus counts along a side that is cropped."""
        data, framing = self.context.cfg.data, WHOLE
        if self._own_size(image, self._largest) is None:
            kept = kept_part(image.size, size)
            middle = tuple(0.5 if whole >= 1 else point for point, whole in zip(focus, kept, strict=True))
            is_padded = data.fit == "pad" and inner_size(image.width, image.height, size.frame) != size.frame
            framing = Framing(WHOLE.focus if is_padded else (middle[0], middle[1]), is_padded)
        return replace(framing, background=data.background)

    def _picture(self, image: ImageFile, side: int, focus: tuple[float, float] = WHOLE.focus) -> _Picture:
        """An image without a caption in its size at a resolution."""
        size = self._own_size(image, side) or self._buckets.nearest(image, side)
        return _Picture.of(image, size, self._framed(image, size, focus))

    def _warnings(self, dataset: Dataset, wanted: Sequence[_Wanted]) -> Iterator[str]:
        """Findings in the files, and the images that are enlarged, cropped much or left out."""
        sized: list[tuple[ImageFile, Size]] = [(one.image, one.size) for one in wanted]
        sized += [(picture.file, picture.size) for one in wanted for picture in one.references]
        in_buckets = [(image, size) for image, size in sized if self._own_size(image, self._largest) is None]
        data = self.context.cfg.data
        used = {one.image.location for one in wanted}
        left_out = [image.location for image in (*dataset.train, *dataset.validation) if image.location not in used]
        yield from dataset.warnings
        yield from image_warnings.of_buckets(in_buckets, data.fit == "pad")
        yield from image_warnings.of_left_out(left_out, data.most_cropped)

    @cached_property
    def _origin(self) -> str:
        return origin_of(self.context.cfg, self.family)

    @cached_property
    def _samples(self) -> list[tuple[ImageFile, ...]]:
        """The references of each sample prompt."""
        given = self.references or [()] * len(self.context.cfg.sample.prompts)
        return [tuple(self._known.header(Path(file)) for file in files) for files in given]

    @cached_property
    def _sample_prompts(self) -> tuple[Prompt, ...]:
        """The prompts of `sample`, then as often the negative one, with the references that the text encoder sees.
        Collective."""
        cfg = self.context.cfg
        texts = with_trigger(cfg.sample.prompts, cfg.data)
        seen = self._seen(self._samples)
        return (*map(Prompt, texts, seen), *(Prompt(cfg.sample.negative, one) for one in seen))

    def _encoded_prompts(
        self, texts: Mapping[Prompt, str], latents: Mapping[Path, str | None]
    ) -> tuple[EncodedPrompt, ...]:
        keys: list[tuple[str, ...]] = []
        for files in self._samples:
            found = [(file, latents[file.path]) for file in files]
            if lost := [file.path for file, key in found if key is None]:
                raise InputError(f"sample.references: {lost[0]} cannot be read; replace it")
            keys.append(tuple(key for _, key in found if key is not None))
        count = len(self._sample_prompts) // 2
        prompts, negative = self._sample_prompts[:count], self._sample_prompts[count:]
        return tuple(
            EncodedPrompt(one.text, texts[one], texts[other], references, files, one.seen)
            for one, other, references, files in zip(prompts, negative, keys, self._samples, strict=True)
        )

    def _seen(self, references: Sequence[Sequence[ImageFile]]) -> list[tuple[Seen, ...]]:
        """Each image's references as the text encoder sees them; none where it sees none."""
        if not self.family.sees_references:
            return [()] * len(references)
        files = list(dict.fromkeys(one for images in references for one in images))
        digests = content_keys([one.location for one in files], self._rank_group, self._known)
        background = self.context.cfg.data.background
        seen = {
            one: Seen(ImageFile(**one.values), digest, self.family.seen_size(one.size), background)
            for one, digest in zip(files, digests, strict=True)
        }
        return [tuple(seen[one] for one in images) for images in references]

    def _prompts_of(self, image: CaptionedImage, seen: tuple[Seen, ...]) -> _Prompts:
        data = self.context.cfg.data
        captions = tuple(Prompt(caption, seen) for caption in image.captions)
        if not seen:
            return _Prompts(captions)
        alone = tuple(map(Prompt, image.captions)) if data.reference_dropout else ()
        return _Prompts(captions, Prompt("", seen) if image.caption_dropout else None, alone)

    def _encode_texts(self, prompts: Sequence[Prompt]) -> dict[Prompt, str]:
        """Encode prompts. Returns {prompt: key}."""
        keys = prompt_keys(self.context.cfg, self._origin, prompts)
        prompts_by_key = {key: prompt for prompt, key in keys.items()}
        work = {key: prompts_by_key[key] for key in missing(prompts_by_key, self.cache, self._rank_group)}
        if work:
            self._announce("captions")
            encoder = self.family.text_encoder(self.load)
            # Only images pass through a vision tower, whose shards all ranks must gather together: at any time, either
            # all of them read prompts with images or none does.
            for has_images in (True, False):
                part = {key: prompt for key, prompt in work.items() if bool(prompt.seen) == has_images}
                if part:
                    self._encode_with(partial(self._read_prompt, encoder), "captions", part)
            del encoder
            self._release()
        return keys

    def _read_prompt(self, encoder: Any, prompt: Prompt) -> Example:
        return encode_prompt(self.family, encoder, prompt, self._known)

    @cached_property
    def _buckets(self) -> Buckets:
        return Buckets.of(self.context.cfg.data, self.family.size_multiple, self.family.longest_side)

    @cached_property
    def _largest(self) -> int:
        """The largest resolution, at which images are encoded that belong to none of the data."""
        return self.context.cfg.data.all_sides[-1]

    def _own_size(self, image: ImageFile, side: int) -> Size | None:
        return self.family.drawn_size(image.size, side)

    def _scaling(self, picture: _Picture) -> tuple[object, ...]:
        """The part of a key for images that are not cropped around their middle, on white; for images in their own
        sizes, which are not cropped, "whole"."""
        own = self._own_size(picture.file, self._largest) is not None
        return (*["whole"] * own, *picture.framing.content)

    def _encode_images(self, pictures: Sequence[_Picture]) -> tuple[dict[_Picture, str], tuple[str, ...]]:
        """Encode images. Returns {image: key} of those that can be used, and what was said of them."""
        if not pictures:
            return {}, ()
        distinct = list(dict.fromkeys(pictures))
        digests = content_keys([picture.file.location for picture in distinct], self._rank_group, self._known)
        keys = {
            picture: key_of(
                self._origin,
                "image",
                digest,
                picture.size.values,
                *self._scaling(picture),
            )
            for digest, picture in zip(digests, distinct, strict=True)
        }
        lacking = set(missing(keys.values(), self.cache, self._rank_group))
        work = {key: picture for picture, key in keys.items() if key in lacking}
        failures: dict[str, str] = {}
        warnings: tuple[str, ...] = ()
        if work:
            self._announce("images")
            contents = {picture.file.location: digest for digest, picture in zip(digests, distinct, strict=True)}
            invisible: list[Path] = []
            failures = self._encode_with(
                partial(self._load_and_encode, self.family.image_encoder(self.load), contents, invisible),
                "images",
                work,
            )
            self._release()
            _report_failures(failures, self.context.cfg, self.context.emit)
            warnings = tuple(self._of_invisible(invisible))
            self._warn(warnings)
        return {picture: key for picture, key in keys.items() if key not in failures}, warnings

    def _load_and_encode(
        self, encoder: Any, contents: Mapping[str, str], invisible: list[Path], picture: _Picture
    ) -> Example:
        """Encode an image. Images without a visible pixel are added to `invisible`.

        contents: {file: digest of its bytes}, from which the keys of its examples were made. Raises InputError for a
        file whose bytes have changed since.
        """
        image, size, framing = picture.file, picture.size.frame, picture.framing
        is_framed = self._own_size(image, self._largest) is None
        pixels = load_rgb(image, size, framing) if is_framed else load_resized(image, size, framing.background)
        is_unseen = is_invisible(image, pixels)
        self._known.require_unchanged(image.path, contents[image.location])
        if is_unseen:
            invisible.append(image.path)
        return self.family.encode_image(encoder, pixels)

    def _of_invisible(self, files: Sequence[Path]) -> Iterator[str]:
        """Warn of fully transparent images. files: the ones that this rank encoded. Collective."""
        invisible = sorted({file for part in self.context.world.gather(files) for file in part})
        if invisible:
            count = image_warnings.counted(len(invisible), "image is", "images are")
            colour = self.context.cfg.data.background
            seen = "white" if colour == WHOLE.background else colour
            yield f"{count} fully transparent and trained as {seen}: first {invisible[0]}; remove it"

    def _encode_masks(self, wanted: Sequence[_Wanted], latents: Mapping[_Picture, str]) -> dict[_Mask, str]:
        """Encode masks where any of the data have them; an image without a mask is in the loss as a whole.

        Returns {mask: key} of the usable ones.
        """
        data = self.context.cfg.data
        if not data.has_masks:
            return {}
        masks: dict[_Mask, tuple[int, int]] = {}
        for one in wanted:
            for picture, mask in zip(one.own, one.masks, strict=True):
                if picture in latents:
                    height, width = self.cache.shapes(latents[picture])["latents"].shape[-2:]
                    masks[mask] = (width, height)
        files = list(dict.fromkeys(mask.file.location for mask in masks if mask.file))
        digests = dict(zip(files, content_keys(files, self._rank_group, self._known), strict=True))
        keys, work = {}, {}
        for mask, (width, height) in masks.items():
            content = (digests[mask.file.location], data.mask_background) if mask.file else ("whole",)
            keys[mask] = key_of(CACHE_VERSION, "mask", width, height, *content, *mask.content)
            work[keys[mask]] = (mask, (width, height))
        failures = self._encode_with(partial(self._load_mask, digests), "masks", work)
        _report_failures(failures, self.context.cfg, self.context.emit)
        return {mask: key for mask, key in keys.items() if key not in failures}

    def _of_faint_masks(self, masks: Mapping[_Mask, str]) -> Iterator[str]:
        """Warn of masks that leave almost nothing to learn, or little of all. masks: {mask: its key}. Collective."""
        outside = self.context.cfg.data.mask_background
        if outside == 1:
            return
        own = {mask.file.location: (mask, key) for mask, key in masks.items() if mask.file}
        group, places = self._rank_group, list(own)
        measured: dict[str, tuple[float, int]] = {}
        for place in places[group.index :: group.size]:
            mask, key = own[place]
            weights = self.cache.read(key)["mask"]
            share = (float(weights.mean()) / mask.area - outside) / (1 - outside)
            # Thin lines are white too, though the mean of no area is: only the file itself has its levels.
            is_grey = (float(weights.max()) - outside) / (1 - outside) * 255 < MOST_GREY + 1
            measured[place] = share, highest_level(mask.file) if is_grey and mask.file else 255
        found = {place: values for part in group.gather(measured) for place, values in part.items()}
        faint = [place for place in places if found[place][0] < LEAST_WHITE]
        if faint:
            count = f"{len(faint)} of {len(places)} masks {'is' if len(faint) == 1 else 'are'}"
            yield (
                f"{count} white in less than {LEAST_WHITE:.0%} of the image, whose other parts have weight "
                f"{outside:g}: first {faint[0]}; paint the part in the loss white, which is 255 and not 1, or opaque"
            )
        grey = [place for place in places if found[place][0] >= LEAST_WHITE and found[place][1] <= MOST_GREY]
        if grey:
            yield (
                f"{len(grey)} of {len(places)} masks {'has' if len(grey) == 1 else 'have'} no level above {MOST_GREY}, "
                f"as those of class numbers, and white is 255: first {grey[0]}, with levels up to {found[grey[0]][1]}; "
                "multiply them, or paint the part in the loss white or opaque"
            )

    def _load_mask(self, contents: Mapping[str, str], item: tuple[_Mask, tuple[int, int]]) -> Example:
        mask = item[0].file
        found = _encode_mask(self.context.cfg.data.mask_background, item)
        if mask is not None:
            self._known.require_unchanged(mask.path, contents[mask.location])
        return found

    def _announce(self, what: str) -> None:
        self.context.emit(StatusEvent(state="encoding", message=f"loading the encoder of {what}"))

    @torch.no_grad()
    def _encode_with(self, encode: Callable[[T], Example], what: str, work: Mapping[str, T]) -> dict[str, str]:
        """Encode the missing keys of `work`. Returns {key: why it cannot be used}."""

        shown_at = -math.inf

        def progress(done: int, total: int) -> None:
            nonlocal shown_at
            if done == total or time.monotonic() - shown_at >= PROGRESS_S:
                shown_at = time.monotonic()
                self.context.emit(StatusEvent(state="encoding", message=what, done=done, total=total))
            if any(self.context.world.gather(self.context.is_stopping())):
                raise StopRequested

        return encode_missing(work, self.cache, encode, self._rank_group, progress)

    def _release(self) -> None:
        """Return the memory of a freed encoder to the device."""
        gc.collect()
        if self.context.world.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class _Picture:
    """An image file in the form that it is encoded in."""

    file: ImageFile
    size: Size
    framing: Framing

    @classmethod
    def of(cls, image: ImageFile, size: Size, framing: Framing) -> _Picture:
        """Without what a captioned image has in addition to its file, so that equal pictures are equal."""
        return cls(ImageFile(**image.values), size, framing)

    @property
    def mirrored(self) -> _Picture:
        return replace(self, framing=replace(self.framing, is_mirrored=True))


@dataclass(frozen=True, slots=True)
class _Prompts:
    """What text encoders read for an image.

    Attributes:
        captions: Its captions, with the references where the encoders see them.
        empty: The empty caption with those; None where that is not trained, or is the same for all images.
        alone: The captions without them, if they are trained and another thing.
    """

    captions: tuple[Prompt, ...]
    empty: Prompt | None = None
    alone: tuple[Prompt, ...] = ()

    @property
    def all(self) -> tuple[Prompt, ...]:
        return (*self.captions, *filter(None, (self.empty,)), *self.alone)


@dataclass(frozen=True, slots=True)
class _Mask:
    """The weights of the loss for an image in one of its forms. file: None where the whole image is in the loss."""

    file: ImageFile | None
    image: _Picture

    @property
    def content(self) -> tuple[object, ...]:
        """The part of a key that says how it is framed; empty for what covers the image, or has no direction."""
        framing, image = self.image.framing, self.image
        if framing.is_padded:
            return (*framing.content, image.size.values, image.file.width, image.file.height)
        return framing.content if self.file else ()

    @property
    def area(self) -> float:
        """The share of the example that shows the image: all but borders."""
        image = self.image
        width, height = inner_size(image.file.width, image.file.height, image.size.frame)
        return width * height / math.prod(image.size.frame) if image.framing.is_padded else 1.0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A captioned image in one of its sizes, with its references."""

    image: CaptionedImage
    size: Size
    framing: Framing
    references: tuple[_Picture, ...]

    @property
    def own(self) -> tuple[_Picture, ...]:
        """The image as it is, and mirrored where it may be flipped."""
        picture = _Picture.of(self.image, self.size, self.framing)
        return (picture, picture.mirrored) if self.image.may_flip else (picture,)

    @property
    def masks(self) -> tuple[_Mask, ...]:
        """The mask of each of `own`."""
        return tuple(_Mask(self.image.mask, picture) for picture in self.own)

    def _rejected(self, framing: Framing) -> _Picture | None:
        return _Picture.of(self.image.rejected, self.size, framing) if self.image.rejected else None

    @property
    def pictures(self) -> Iterator[_Picture]:
        """All that is encoded for it."""
        for picture in self.own:
            yield picture
            yield from self._references(picture)
            if rejected := self._rejected(picture.framing):
                yield rejected

    def _references(self, picture: _Picture) -> tuple[_Picture, ...]:
        return tuple(one.mirrored for one in self.references) if picture.framing.is_mirrored else self.references

    def encoded(
        self,
        latents: Mapping[_Picture, str],
        masks: Mapping[_Mask, str],
        read: _Prompts,
        texts: Mapping[Prompt, str],
    ) -> EncodedImage | None:
        """With its cache keys; None if its file, mask, a reference or its rejected image cannot be used."""
        if not all(picture in latents for picture in self.pictures):
            return None
        if masks and not all(mask in masks for mask in self.masks):
            return None
        found = [
            Pixels(
                latents[picture],
                masks.get(mask),
                tuple(latents[one] for one in self._references(picture)),
                latents[rejected] if (rejected := self._rejected(picture.framing)) else None,
            )
            for picture, mask in zip(self.own, self.masks, strict=True)
        ]
        return EncodedImage(
            self.image,
            self.size,
            found[0],
            tuple(texts[prompt] for prompt in read.captions),
            found[1] if self.image.may_flip else None,
            tuple(one.size for one in self.references),
            texts[read.empty] if read.empty else None,
            tuple(texts[prompt] for prompt in read.alone),
        )


def _encode_mask(outside: float, item: tuple[_Mask, tuple[int, int]]) -> Example:
    """Weights of the loss per latent pixel, from a mask and (width, height). outside: weight where it is black."""
    mask, (width, height) = item
    image = mask.image
    if image.framing.is_padded:
        weights = load_bordered_mask(image.file, mask.file, image.size.frame, outside, image.framing)
        return {"mask": torch.from_numpy(np.array(weights.resize((width, height), Image.Resampling.BOX)))}
    if mask.file is None:
        return {"mask": torch.ones(height, width)}
    levels = torch.from_numpy(np.array(load_mask(mask.file, (width, height), image.framing))) / 255
    return {"mask": levels + (1 - levels) * outside}


def _report_failures(failures: Mapping[str, str], cfg: RunConfig, emit: Emit) -> None:
    if failures and cfg.data.bad_image == "stop":
        raise InputError(
            image_warnings.listing(f"{message}, or set data.bad_image: warn" for message in failures.values())
        )
    for message in image_warnings.folded(map(image_warnings.left_out, failures.values())):
        emit(WarningEvent(message=message))


def _rank_group(world: World, folder: Path) -> RankGroup:
    """The ranks that share the cache folder: all if every rank sees a file that rank 0 writes, else this node's."""
    token: str = world.gather(secrets.token_hex(8))[0]
    mark = folder / f".shared-{token}"
    if world.rank == 0:
        make_private_if_new(folder)
        mark.touch()
    world.barrier()
    shared = all(world.gather(mark.exists()))
    if world.rank == 0:
        mark.unlink()
    if shared:
        return RankGroup(world.rank, world.size, world.gather)
    return RankGroup(world.local_rank, world.local_size, world.gather)
