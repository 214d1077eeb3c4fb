"""Reads the images or text files of drafts in the background, so that a million files do not block a page.

See DECISIONS 120.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.config import families
from trainer.config.schema import RunConfig
from trainer.config.size import Size
from trainer.data import row_files, row_forms
from trainer.data.images import image_warnings
from trainer.data.images.buckets import Buckets, images_per_bucket
from trainer.data.images.image_files import CaptionedImage, Dataset, Watcher, scan
from trainer.data.images.image_io import ImageFile
from trainer.data.mixed import question_files
from trainer.data.text import text_files
from trainer.system.errors import InputError
from trainer.system.terminal import shortened

PATIENCE_S = 0.5
"""How long `Scans.of` waits for a scan; few folders take longer."""

FORGOTTEN_S = 5.0
"""A scan that was not requested for this long ends early: its folder may be half of a path that was being typed."""

MOST_MESSAGES, MOST_LETTERS = 6, 500
"""Messages of a conversation, and letters of each, that are shown."""

MOST_KEPT = 8
MOST_AT_ONCE = 4
"""Scans that run at a time: on a disk that does not answer a scan never ends."""

THREADS = "images"
_Sizes = Mapping[tuple[Path, tuple[int, ...]], tuple[tuple[int, Size], ...]]
"""{(image, resolutions of its folder): (resolution, bucket) of each time that it is trained}."""
DEFAULT_MULTIPLE = 16


@dataclass(frozen=True)
class Flaw:
    """A flaw of an image, in a few words. is_error: whether it cannot be trained on."""

    text: str
    is_error: bool = False


@dataclass(frozen=True)
class Framed:
    """The sizes that an image is trained at.

    Attributes:
        sizes: Its buckets, one for each resolution; none where it is left out.
        focus: The point (x, y) around which it is cropped, as in `Framing`.
        left_out: The sizes at which its crop would be larger than `data.most_cropped` allows.
        scale: Its enlargement at its largest size; 0 where it is left out.
        references: The images that it is made from in edit training.
        is_own: Whether it shows the subject to train; False for a regularization image.
    """

    sizes: tuple[Size, ...]
    focus: tuple[float, float]
    left_out: tuple[Size, ...] = ()
    scale: float = 0.0
    references: tuple[Path, ...] = ()
    is_own: bool = True


@dataclass(frozen=True, slots=True)  # there may be a million
class Named:
    """By what the mask of an image is found.

    Attributes:
        field: The field of the config that names the image's folder, such as `data.path`.
        name: The image's path below the folder, without suffix; of an image in a table, what the table calls it.
    """

    field: str
    name: str


@dataclass(frozen=True)
class ScanResult:
    """The data of a config, as far as it was scanned.

    Attributes:
        num_files: Files seen so far.
        images: Images with captions, including unreadable ones, folder by folder.
        texts: {file of a language model's data: bytes}.
        num_documents: Documents in them; None if they were not counted.
        conversation: (role, content) of the first conversation in them.
        problems: Errors that prevent a run, a sentence per file.
        buckets: {bucket: number of training images, once for each resolution they are trained at}.
        num_questions: Training questions about images.
        epoch_images: Images of one pass over the data, each as often as its weight; 0 where they are not known.
        framed: The images whose header was read, with what they are trained at; empty where `data.resolution` is wrong.
        cropped: {bucket: mean share of the pixels that the crop to it removes}.
        held_out: Images that are not trained on. As long as there are problems: those that will be held out.
        flaws: Images that cannot be used, are enlarged much, or lose much to the crop.
        listed: {image: caption} of every metadata.jsonl and table.
        fixed: The images whose captions stand in a table.
        named: The images that may have a mask.
    """

    num_files: int
    is_complete: bool = True
    images: tuple[Path, ...] = ()
    texts: Mapping[Path, int] = field(default_factory=dict)
    num_documents: int | None = None
    conversation: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    buckets: Mapping[Size, int] = field(default_factory=dict)
    num_questions: int = 0
    epoch_images: float = 0.0
    framed: Mapping[Path, Framed] = field(default_factory=dict)
    cropped: Mapping[Size, float] = field(default_factory=dict)
    held_out: frozenset[Path] = frozenset()
    flaws: Mapping[Path, Flaw] = field(default_factory=dict)
    listed: Mapping[Path, str] = field(default_factory=dict)
    fixed: frozenset[Path] = frozenset()
    named: Mapping[Path, Named] = field(default_factory=dict)


class Scans:
    """Scans of the configs that were requested last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scans: dict[str, _Scan] = {}
        self._threads: list[threading.Thread] = []

    def of(self, config: RunConfig, is_fresh: bool = False) -> ScanResult:
        """Return the scan of a config's data.

        The result is incomplete when the scan takes longer than PATIENCE_S or too many others are running; ask again.

        Args:
            is_fresh: Scan again, because the files may have changed.
        """
        key = _key(config)
        with self._lock:
            known = self._scans.pop(key, None)
            if known is None or is_fresh or known.is_forgotten:
                if known is not None:
                    known.forget()
                known = self._begin(config)
            if known is None:
                return ScanResult(0, is_complete=False)
            self._scans[key] = known
            for old in list(self._scans)[:-MOST_KEPT]:
                self._scans.pop(old).forget()
        return known.result()

    def outdate(self, config: RunConfig) -> None:
        """Have a config's data scanned again when it is asked for next, because its files have changed."""
        with self._lock:
            if known := self._scans.pop(_key(config), None):
                known.forget()

    def refocus(self, config: RunConfig, image: Path, focus: tuple[float, float]) -> None:
        """Change the focus point of an image in a complete scan of a config. Its files are not read again."""
        with self._lock:
            if known := self._scans.get(_key(config)):
                known.refocus(image, focus)

    def _begin(self, config: RunConfig) -> _Scan | None:
        """Start a scan on its own thread. Returns None while MOST_AT_ONCE are running."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= MOST_AT_ONCE:
            return None
        scan = _Scan(config)
        self._threads.append(threading.Thread(target=scan.run, name=THREADS, daemon=True))
        self._threads[-1].start()
        return scan


def _key(config: RunConfig) -> str:
    """Key of a scan."""
    return config.data.model_dump_json() + config.model.family


class _Forgotten(Exception):
    pass


class _Scan(Watcher):
    """One pass over the files."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._num_files = 0
        self._images: list[Path] = []
        self._files: list[CaptionedImage] = []
        self._bad: list[Path] = []
        self._listed: dict[Path, str] = {}
        self._fixed: set[Path] = set()
        self._named: dict[Path, Named] = {}
        self._asked_at = time.monotonic()
        self._is_dropped = False
        self._result: Future[ScanResult] = Future()

    @property
    def is_forgotten(self) -> bool:
        return self._result.done() and isinstance(self._result.exception(), _Forgotten)

    def result(self) -> ScanResult:
        """Return the result, waiting at most PATIENCE_S."""
        self._asked_at = time.monotonic()
        try:
            return self._result.result(PATIENCE_S)
        except (TimeoutError, _Forgotten):
            return ScanResult(self._num_files, is_complete=False)

    def refocus(self, image: Path, focus: tuple[float, float]) -> None:
        """Change the focus point of an image in the result. Does nothing where the scan is not complete."""
        if not self._result.done() or self._result.exception() is not None:
            return
        found = self._result.result()
        if framed := found.framed.get(image):
            changed: Future[ScanResult] = Future()
            changed.set_result(replace(found, framed={**found.framed, image: replace(framed, focus=focus)}))
            self._result = changed

    def forget(self) -> None:
        """End at the next file, because the result is not needed any more."""
        self._is_dropped = True

    def found(self, file: Path) -> None:
        self._num_files += 1
        self._require_needed()

    def reading(self, image: Path) -> None:
        self._images.append(image)
        self._require_needed()

    def named(self, image: Path, field: str, name: str) -> None:
        self._named[image] = Named(field, name)

    def read(self, image: CaptionedImage) -> None:
        self._files.append(image)

    def bad(self, image: Path) -> None:
        self._bad.append(image)

    def listed(self, captions: Mapping[Path, str], is_fixed: bool = False) -> None:
        self._listed |= captions
        self._fixed |= captions.keys() if is_fixed else set()

    def _require_needed(self) -> None:
        if self._is_dropped or time.monotonic() - self._asked_at > FORGOTTEN_S:
            raise _Forgotten

    def run(self) -> None:
        """Read the files and set the result."""
        try:
            self._result.set_result(self._read())
        except Exception as error:  # noqa: BLE001 - `result` raises it
            self._result.set_exception(error)

    def _read(self) -> ScanResult:
        if families.trains_on(self._config) == "text":
            return self._read_text()
        try:
            dataset, questions = scan(self._config.data, self), question_files.of_config(self._config.data)
            buckets = _buckets(self._config)
        except InputError as error:
            problems = tuple(str(error).split("\n"))
            buckets = None
            with suppress(InputError):  # a wrong resolution, which is named when the images are in order
                buckets = _buckets(self._config)
            return replace(self._measured(buckets, self._sizes(buckets), self._to_hold_out()), problems=problems)
        sizes = self._sizes(buckets)
        trained = frozenset(image.path for image in dataset.train)
        found = self._measured(buckets, sizes, frozenset(image.path for image in dataset.validation), trained)
        return replace(
            found,
            warnings=(*dataset.warnings, *self._warnings(dataset, buckets, sizes), *questions.warnings),
            num_questions=len(questions.train),
            epoch_images=math.fsum(
                image.weight * len(found.framed[image.path].sizes if image.path in found.framed else (1,))
                for image in dataset.train
            ),
        )

    def _sizes(self, buckets: Buckets | None) -> _Sizes:
        """The sizes of each image that was read; nothing for a model without buckets."""
        if buckets is None:
            return {}
        return {(image.path, image.sides): buckets.of_image(image, image.sides) for image in self._files}

    def _warnings(self, dataset: Dataset, buckets: Buckets | None, sizes: _Sizes) -> Iterator[str]:
        """Warnings of enlarged, cropped and omitted images, as a run gives them."""
        if buckets is None:
            return
        data, images = self._config.data, (*dataset.train, *dataset.validation)
        sized = [(image, sizes[image.path, image.sides]) for image in images]
        yield from image_warnings.of_buckets(_each_size(sized, buckets), data.fit == "pad")
        left_out = [image.path for image, found in sized if not found]
        yield from image_warnings.of_left_out(left_out, data.most_cropped)

    def _measured(
        self,
        buckets: Buckets | None,
        sized: _Sizes,
        held_out: frozenset[Path],
        trained: frozenset[Path] | None = None,
    ) -> ScanResult:
        """The images that were read, with their buckets and what is wrong with them.

        trained: Those that are trained on; None for all that are not held out.
        """
        flaws = {image: Flaw("cannot be used", is_error=True) for image in self._bad}
        kept: dict[Size, list[float]] = {}
        framed: dict[Path, Framed] = {}
        is_padded = self._config.data.fit == "pad"
        for image in self._files if buckets else ():
            assert buckets is not None
            sizes = tuple(size for _, size in sized[image.path, image.sides])
            framed[image.path] = _framed(image, sizes, buckets, is_padded)
            fits = [image_warnings.fit(image, size, is_padded) for size in sizes]
            flaw = Flaw("left out: crop too large") if not fits else _flaw(fits[-1][0], fits[-1][1])
            if flaw:
                flaws[image.path] = flaw
            if image.path not in held_out and (trained is None or image.path in trained):
                for size, (_, share) in zip(sizes, fits, strict=True):
                    kept.setdefault(size, []).append(share)
        counted = images_per_bucket(kept, buckets.sizes if buckets else ())
        return ScanResult(
            self._num_files,
            images=tuple(self._images),
            buckets={size: len(kept[size]) for size in counted},
            framed=framed,
            cropped={size: 1 - sum(kept[size]) / len(kept[size]) for size in counted},
            held_out=held_out,
            flaws=flaws,
            listed=self._listed,
            fixed=frozenset(self._fixed),
            named=self._named,
        )

    def _to_hold_out(self) -> frozenset[Path]:
        """The images that will be held out when all problems are solved."""
        data = self._config.data
        if isinstance(data.validation, str):
            folder = _absolute(data.validation)
            return frozenset(file.path for file in self._files if file.path.is_relative_to(folder))
        others = _absolute(data.regularization) if data.regularization else None
        own = [file.path for file in self._files if others is None or not file.path.is_relative_to(others)]
        return frozenset(own[len(own) - data.validation :] if data.validation < len(own) else ())

    def _read_text(self) -> ScanResult:
        try:
            files = text_files.of_config(self._config.data)[0]
            text_files.check_preferences(files, self._config.objective.compares_pairs)
            texts, counts = text_files.sizes(files), []
            for file in files:
                self.found(file)
                counts.append(text_files.count_documents(file))
            conversation = next(filter(None, map(_conversation, files)), ())
            warnings = tuple(text_files.warnings_of(self._config.data))
        except InputError as error:
            return ScanResult(0, problems=(str(error),))
        num_documents = None if None in counts else sum(filter(None, counts))
        return ScanResult(
            len(texts), texts=texts, num_documents=num_documents, conversation=conversation, warnings=warnings
        )


def _conversation(file: Path) -> tuple[tuple[str, str], ...]:
    """(role, content) of the first messages of a file's first row, shortened; () for other rows."""
    with row_files.reading(file):
        row = row_files.first_row(file) or {}
    try:
        messages = row_forms.standard(row).get("messages")
    except InputError:  # it is named when it is trained
        return ()
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return ()
    shown = messages[:MOST_MESSAGES]
    return tuple(
        (shortened(str(message.get("role")), 40), shortened(_said(message), MOST_LETTERS)) for message in shown
    )


def _said(message: Mapping[str, object]) -> str:
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return str(content) if content else f"calls {calls}" if calls else ""


def _buckets(config: RunConfig) -> Buckets | None:
    """The buckets; None for a model without. Raises InputError for a resolution below the model's."""
    known = families.of(config.model.family)
    if known and not known.in_buckets:
        return None
    multiple = known.size_multiple if known else DEFAULT_MULTIPLE
    return Buckets.of(config.data, multiple, known.longest_side if known else None)


def _each_size(
    sized: Iterable[tuple[CaptionedImage, tuple[tuple[int, Size], ...]]], buckets: Buckets
) -> Iterator[tuple[ImageFile, Size]]:
    """Images with each of their sizes, and then their references with theirs."""
    references: list[tuple[ImageFile, Size]] = []
    for image, sizes in sized:
        for side, size in sizes:
            yield image, size
            references += [(one, buckets.nearest(one, side)) for one in image.references]
    yield from references


def _framed(image: CaptionedImage, sizes: tuple[Size, ...], buckets: Buckets, is_padded: bool) -> Framed:
    all_sizes = replace(buckets, least_kept=0.0).of_image(image, image.sides) if buckets.least_kept else ()
    return Framed(
        sizes,
        image.focus,
        left_out=tuple(size for _, size in all_sizes if size not in sizes),
        scale=image_warnings.fit(image, sizes[-1], is_padded)[0] if sizes else 0.0,
        references=tuple(reference.path for reference in image.references),
        is_own=image.is_own,
    )


def _flaw(scale: float, kept: float) -> Flaw | None:
    if scale > image_warnings.MOST_ENLARGED:
        return Flaw(f"enlarged × {scale:.1f}")
    return Flaw(f"{kept:.0%} kept") if kept < image_warnings.LEAST_KEPT else None


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))
