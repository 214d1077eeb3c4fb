"""Reads the images or text files of drafts in the background, so that a million files do not block a page."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.config import families
from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.config.terminal import shortened
from trainer.data import image_warnings, question_files, text_files
from trainer.data.buckets import bucket_sizes, choose_bucket
from trainer.data.image_files import Watcher, scan
from trainer.data.image_io import ImageFile

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
DEFAULT_MULTIPLE = 16


@dataclass(frozen=True)
class Flaw:
    """What is wrong with an image, in a few words. is_error: whether it cannot be trained on."""

    text: str
    is_error: bool = False


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
        buckets: {(width, height): number of training images}.
        num_questions: Training questions about images.
        epoch_images: Images of one pass over the data, each as often as its weight; 0 where they are not known.
        sizes: (width, height) of all buckets; empty where `data.resolution` is wrong.
        cropped: {bucket: mean share of the pixels that the crop to it removes}.
        held_out: Images that are not trained on. As long as there are problems: those that will be held out.
        flaws: Images that cannot be used, are enlarged much, or lose much to the crop.
        listed: {image: caption} of every metadata.jsonl.
    """

    num_files: int
    is_complete: bool = True
    images: tuple[Path, ...] = ()
    texts: Mapping[Path, int] = field(default_factory=dict)
    num_documents: int | None = None
    conversation: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    buckets: Mapping[tuple[int, int], int] = field(default_factory=dict)
    num_questions: int = 0
    epoch_images: float = 0.0
    sizes: tuple[tuple[int, int], ...] = ()
    cropped: Mapping[tuple[int, int], float] = field(default_factory=dict)
    held_out: frozenset[Path] = frozenset()
    flaws: Mapping[Path, Flaw] = field(default_factory=dict)
    listed: Mapping[Path, str] = field(default_factory=dict)


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
        key = config.data.model_dump_json() + config.model.family
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

    def _begin(self, config: RunConfig) -> _Scan | None:
        """Start a scan on its own thread. Returns None while MOST_AT_ONCE are running."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= MOST_AT_ONCE:
            return None
        scan = _Scan(config)
        self._threads.append(threading.Thread(target=scan.run, name=THREADS, daemon=True))
        self._threads[-1].start()
        return scan


class _Forgotten(Exception):
    pass


class _Scan(Watcher):
    """One pass over the files."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._num_files = 0
        self._images: list[Path] = []
        self._files: list[ImageFile] = []
        self._bad: list[Path] = []
        self._listed: dict[Path, str] = {}
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

    def forget(self) -> None:
        """End at the next file, because the result is not needed any more."""
        self._is_dropped = True

    def found(self, file: Path) -> None:
        self._num_files += 1
        self._require_needed()

    def reading(self, image: Path) -> None:
        self._images.append(image)
        self._require_needed()

    def read(self, file: ImageFile) -> None:
        self._files.append(file)

    def bad(self, image: Path) -> None:
        self._bad.append(image)

    def listed(self, captions: Mapping[Path, str]) -> None:
        self._listed |= captions

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
        sizes: tuple[tuple[int, int], ...] = ()
        try:
            dataset, questions = scan(self._config.data, self), question_files.of_config(self._config.data)
            sizes = _sizes(self._config)
        except InputError as error:
            problems = tuple(str(error).split("\n"))
            with suppress(InputError):  # a wrong resolution, which is named when the images are in order
                sizes = _sizes(self._config)
            return replace(self._measured(sizes, self._to_hold_out()), problems=problems)
        found = self._measured(sizes, frozenset(image.path for image in dataset.validation))
        return replace(
            found,
            warnings=(
                *dataset.warnings,
                *(image_warnings.of_buckets(dataset.images, sizes) if sizes else ()),
                *questions.warnings,
            ),
            num_questions=len(questions.train),
            epoch_images=math.fsum(image.weight for image in dataset.train),
        )

    def _measured(self, sizes: tuple[tuple[int, int], ...], held_out: frozenset[Path]) -> ScanResult:
        """The images that were read, with their buckets and what is wrong with them."""
        flaws = {image: Flaw("cannot be used", is_error=True) for image in self._bad}
        kept: dict[tuple[int, int], list[float]] = {}
        for file in self._files if sizes else ():
            size = choose_bucket(file.width, file.height, sizes)
            scale, share = image_warnings.fit(file, size)
            if flaw := _flaw(scale, share):
                flaws[file.path] = flaw
            if file.path not in held_out:
                kept.setdefault(size, []).append(share)
        counted = [size for size in sizes if size in kept]
        return ScanResult(
            self._num_files,
            images=tuple(self._images),
            buckets={size: len(kept[size]) for size in counted},
            sizes=sizes,
            cropped={size: 1 - sum(kept[size]) / len(kept[size]) for size in counted},
            held_out=held_out,
            flaws=flaws,
            listed=self._listed,
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
            text_files.check_preferences(files, self._config.objective.dpo_beta is not None)
            texts, counts = text_files.sizes(files), []
            for file in files:
                self.found(file)
                counts.append(text_files.count_documents(file))
            conversation = next(filter(None, map(_conversation, files)), ())
        except InputError as error:
            return ScanResult(0, problems=(str(error),))
        num_documents = None if None in counts else sum(filter(None, counts))
        return ScanResult(len(texts), texts=texts, num_documents=num_documents, conversation=conversation)


def _conversation(file: Path) -> tuple[tuple[str, str], ...]:
    """(role, content) of the first messages of a file's first row, shortened; () for other rows."""
    with text_files.reading(file):
        messages = (text_files.first_row(file) or {}).get("messages")
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


def _sizes(config: RunConfig) -> tuple[tuple[int, int], ...]:
    """The (width, height) of all buckets; none for a model without. Raises InputError for a resolution below the
    model's."""
    data, known = config.data, families.of(config.model.family)
    if known and not known.in_buckets:
        return ()
    multiple = known.size_multiple if known else DEFAULT_MULTIPLE
    return bucket_sizes(data.resolution, multiple, data.max_aspect, known.longest_side if known else None)


def _flaw(scale: float, kept: float) -> Flaw | None:
    if scale > image_warnings.MOST_ENLARGED:
        return Flaw(f"enlarged × {scale:.1f}")
    return Flaw(f"{kept:.0%} kept") if kept < image_warnings.LEAST_KEPT else None


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))
