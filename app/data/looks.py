"""Looks at a draft's images in the background on request: near copies, blurred images, images with little contrast.

See DECISIONS 197.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.data.scans import ScanResult
from app.runs.monitor import explained
from trainer.config.schema import RunConfig
from trainer.data.images import looks
from trainer.data.images.known_files import FileMemory
from trainer.data.images.looks import Look, known_looks
from trainer.run.folder import guard_cache, shared_cache
from trainer.system.errors import InputError
from trainer.system.files import unreadable

THREAD = "looks"
SAVED_EVERY_S = 30.0
"""A look that is stopped or killed loses at most this much."""
MOST_KEPT = 4
"""Configs whose result is kept."""
ENLARGED = 1.005
"""Enlargement from which on an image counts as smaller than its size: half a percent is rounding."""


@dataclass(frozen=True)
class Group:
    """Images that are near copies of each other.

    Attributes:
        images: In the order of the data, the first one with what it is compared to.
        mirrored: Those that are mirrored copies of the first.
        leaks: As `looks.Copies.leak` has it.
    """

    images: tuple[Path, ...]
    mirrored: frozenset[Path]
    leaks: bool


@dataclass(frozen=True)
class LookResult:
    """The findings in the images of a config.

    Attributes:
        images: The images that are looked at.
        num_done: Images that were looked at so far.
        is_running: Whether it goes on.
        is_complete: Whether all images were looked at.
        groups: Near copies; those that a held-out image is in come first.
        blurred: Blurred images, the most blurred first.
        flat: Images with little contrast, those with the least first.
        failed: {image: why it could not be looked at}.
        problem: Why the look ended early; "" otherwise.
        seconds: How long it took.
    """

    images: tuple[Path, ...]
    num_done: int = 0
    is_running: bool = False
    is_complete: bool = False
    groups: tuple[Group, ...] = ()
    blurred: tuple[Path, ...] = ()
    flat: tuple[Path, ...] = ()
    failed: Mapping[Path, str] = field(default_factory=dict)
    problem: str = ""
    seconds: float = 0.0


class Looks:
    """The looks at the images of the configs that were requested last. One runs at a time, on one core."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._passes: dict[str, _Pass] = {}

    def start(self, config: RunConfig, found: ScanResult) -> None:
        """Look at the images of a complete scan. Another look that is running is stopped, and keeps what it knows.

        Raises:
            InputError: There are no images, or the cache leads elsewhere.
        """
        if not found.images:
            raise InputError("There are no images to look at; choose a folder of images in New run")
        cache = shared_cache(config, self._runs)
        guard_cache(cache)
        with self._lock:
            for other in self._passes.values():
                other.stop()
            started = _Pass(known_looks(cache), found)
            self._passes.pop(_key(config), None)
            self._passes[_key(config)] = started
            for old in list(self._passes)[:-MOST_KEPT]:
                del self._passes[old]
        threading.Thread(target=started.run, name=THREAD, daemon=True).start()

    def stop(self, config: RunConfig) -> None:
        """End the look at a config's images after the one that is being decoded; what was measured is remembered."""
        with self._lock:
            if known := self._passes.get(_key(config)):
                known.stop()

    def of(self, config: RunConfig) -> LookResult | None:
        """Return what is known of a config's images; None where no look was started."""
        with self._lock:
            known = self._passes.get(_key(config))
        return known.result if known else None


def enlarged(found: ScanResult) -> list[Path]:
    """Return the images that are smaller than the size they are trained at, those that are enlarged most first."""
    small = [image for image, framed in found.framed.items() if framed.scale > ENLARGED]
    return sorted(small, key=lambda image: -found.framed[image].scale)


def marked(result: LookResult | None, found: ScanResult, mark: str) -> Collection[Path]:
    """Return the images of a mark: "leaks", "copies", "blurred", "flat", "enlarged", "failed", or a group's number."""
    if mark == "enlarged":
        return frozenset(enlarged(found))
    if result is None:
        return frozenset()
    if mark.isdecimal():
        return frozenset(result.groups[int(mark)].images if int(mark) < len(result.groups) else ())
    chosen: dict[str, Iterable[Path]] = {
        "leaks": (image for group in result.groups if group.leaks for image in group.images),
        "copies": (image for group in result.groups for image in group.images),
        "blurred": result.blurred,
        "flat": result.flat,
        "failed": result.failed,
    }
    return frozenset(chosen.get(mark, ()))


def _key(config: RunConfig) -> str:
    """Key of a config's images and of those held out."""
    data = config.data
    folders = [folder.path for folder in data.folders]
    return repr((data.path, folders, data.validation, data.regularization, data.cache))


class _Pass:
    """One look at all images."""

    def __init__(self, known: FileMemory[Look], found: ScanResult) -> None:
        self.result = LookResult(found.images, is_running=True)
        self._known, self._found = known, found
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        self._is_stopped.set()

    def run(self) -> None:
        """Look at all images and set the result. What was measured is remembered, also where it ends early."""
        began, problem, is_complete = time.monotonic(), "", False
        try:
            measured = self._measure()
            is_complete = not self._is_stopped.is_set()
            self._known.save()
            self._sort(measured)
        except Exception as error:  # noqa: BLE001 - the page shows it
            is_complete = False
            problem = (
                explained(error) if isinstance(error, OSError | InputError) else f"{type(error).__name__}: {error}"
            )
        seconds = time.monotonic() - began
        self.result = replace(self.result, is_running=False, is_complete=is_complete, problem=problem, seconds=seconds)

    def _measure(self) -> dict[Path, Look]:
        measured: dict[Path, Look] = {}
        saved_at = time.monotonic()
        for number, image in enumerate(dict.fromkeys(self._found.images), 1):
            if self._is_stopped.is_set():
                break
            try:
                measured[image] = self._known.read(image).value
            except (InputError, OSError) as error:
                problem = unreadable(image, error) if isinstance(error, OSError) else error
                self.result = replace(self.result, failed={**self.result.failed, image: str(problem)})
            if time.monotonic() - saved_at > SAVED_EVERY_S:
                self._known.save()
                saved_at = time.monotonic()
            self.result = replace(self.result, num_done=number)
        return measured

    def _sort(self, measured: dict[Path, Look]) -> None:
        """Find the groups and what differs from the others, in the images that were looked at."""
        images, found = list(measured), list(measured.values())
        copies = looks.copies(found, self._is_stopped.is_set)
        held_out = {index for index, image in enumerate(images) if image in self._found.held_out}
        groups = [
            Group(
                tuple(images[index] for index in copy.members),
                frozenset(images[index] for index in copy.mirrored),
                copy.leak(held_out),
            )
            for copy in copies
        ]
        blurred = sorted(looks.blurred(found), key=lambda index: found[index].sharpness)
        flat = sorted(looks.flat(found), key=lambda index: found[index].contrast)
        self.result = replace(
            self.result,
            groups=tuple(sorted(groups, key=lambda group: not group.leaks)),
            blurred=tuple(images[index] for index in blurred),
            flat=tuple(images[index] for index in flat),
        )
