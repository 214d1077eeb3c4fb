"""The samples of a run: by prompt and step, which of their files are missing, and all of them as one zip.

Imports no torch. The page shows them, and its routes send the files.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from app.runs.monitor import RunView
from trainer.config.schema import RunConfig
from trainer.launcher import preflight
from trainer.run.events import SampleEvent
from trainer.run.folder import RunDir
from trainer.system import files
from trainer.system.errors import InputError

CHUNK_BYTES = 2**20
"""Most that is held in memory of a zip."""
UNSAFE_IN_NAMES = {ord(letter): "_" for letter in '\\:*?"<>|'} | {code: "_" for code in (*range(32), 127)}
"""Characters that are part of a name here and lead elsewhere, or are refused, where a zip is unpacked."""


@dataclass(frozen=True)
class SampleRow:
    """The samples of one prompt.

    Attributes:
        index: Position of the prompt in `sample.prompts`. After a change of the prompts, several rows have the same.
        prompt: The prompt.
        kind: Name of the kind of the samples.
        steps: Steps at which it was generated, ascending.
        missing: Those of the steps whose picture is not in the run folder.
        references: Copies in the run folder of the reference images that the model was shown.
    """

    index: int
    prompt: str
    kind: str
    steps: tuple[int, ...]
    missing: tuple[int, ...]
    references: tuple[str, ...] = ()


def rows(run: RunDir, samples: Iterable[SampleEvent]) -> list[SampleRow]:
    """Return a row per index and prompt, so that the samples before a change of the prompts stay."""
    present = {entry.name for entry in _entries(run)}
    found: dict[tuple[int, str], dict[int, SampleEvent]] = {}
    for sample in samples:
        found.setdefault((sample.index, sample.prompt), {})[sample.step] = sample
    made = []
    for (index, prompt), at in sorted(found.items(), key=lambda item: (item[0][0], min(item[1]))):
        steps = sorted(at)
        missing = tuple(step for step in steps if not _is_present(run, at[step], present))
        newest = at[steps[-1]]
        made.append(SampleRow(index, prompt, newest.kind.name, tuple(steps), missing, newest.references))
    return made


def _entries(run: RunDir) -> list[os.DirEntry[str]]:
    """The regular files directly in the folder of samples; none when it cannot be read."""
    try:
        with os.scandir(run.samples) as found:
            return [entry for entry in found if entry.is_file(follow_symlinks=False)]
    except OSError:  # no samples yet, or the folder was removed: each sample is then shown as missing
        return []


def _is_present(run: RunDir, sample: SampleEvent, present: set[str]) -> bool:
    if sample.kind.is_text:  # its event holds what is shown
        return True
    path = sample.picture or sample.path
    folder, _, name = path.rpartition("/")
    if folder == run.samples.name and name in present:
        return True
    try:
        return run.own_file(path).is_file()
    except (InputError, OSError, ValueError):
        return False


def find(samples: Iterable[SampleEvent], index: int, prompt: str, step: int) -> SampleEvent:
    """Return a sample. Raises InputError when there is none."""
    wanted = (index, prompt, step)
    for sample in samples:
        if (sample.index, sample.prompt, sample.step) == wanted:
            return sample
    raise InputError(f"prompt {index + 1} has no sample of step {step}")


def version(run: RunDir, view: RunView) -> str:
    """Return a word that changes when there are more, fewer or other samples."""
    try:
        changed = run.samples.stat().st_mtime_ns
    except OSError:  # see _entries
        changed = 0
    return f"{len(view.samples)} {changed} {view.length} {view.is_running}"


def num_bytes(run: RunDir) -> int:
    """Return the size of all files directly in the folder of samples."""
    return sum(entry.stat(follow_symlinks=False).st_size for entry in _entries(run))


def settings(config: RunConfig, is_text: bool) -> str:
    """Return how all samples of a run are generated, as a sentence."""
    sample = preflight.sample_settings(config.model, config.sample)
    if is_text:
        ending = f"temperature {sample.temperature:g}, seed {sample.seed}."
        return f"All continue with at most {sample.tokens} tokens, {ending}"
    return (
        f"All start from the same noise: {sample.steps} denoising steps, guidance {sample.guidance:g}, "
        f"seed {sample.seed}."
    )


def own_files(run: RunDir) -> list[Path]:
    """Return the files in the folder of samples, sorted, without links that lead out of it and unfinished files."""
    try:
        home = run.own_file(run.samples.name)
    except InputError:  # the folder itself is a link that leads elsewhere
        return []
    return [file for file in sorted(home.rglob("*")) if not file.name.startswith(".") and _is_inside(file, home)]


def own_file(run: RunDir, name: str) -> Path:
    """Return a file of `own_files` by its name in the folder. Raises InputError when there is none."""
    home = run.own_file(run.samples.name)
    file = home / name
    if name != Path(name).name or name.startswith(".") or not _is_inside(file, home):
        raise InputError(f"{name}: not a sample of {run.path.name}")
    return file


def _is_inside(file: Path, home: Path) -> bool:
    return file.is_file() and file.resolve().is_relative_to(home)


def zipped(run: RunDir) -> Iterator[bytes]:
    """Write all samples into a zip, without compression, as a stream: at most CHUNK_BYTES of it are in memory.

    Raises:
        InputError: There are no samples.
        OSError: While it is read: a file cannot be read. What was sent until then is not a whole zip.
    """
    found = own_files(run)
    if not found:
        raise InputError(f"{run.path.name}: has no files of samples")
    return _zip_stream(run, found)


def _zip_stream(run: RunDir, found: Iterable[Path]) -> Iterator[bytes]:
    home, sink = run.own_file(run.samples.name), _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
        for file in found:
            name = f"{run.path.name}/{file.relative_to(home)}".translate(UNSAFE_IN_NAMES)
            try:
                source = files.opened(file)
            except FileNotFoundError:  # removed a moment ago
                continue
            with source:
                size = os.fstat(source.fileno()).st_size
                info = zipfile.ZipInfo.from_file(file, name, strict_timestamps=False)
                info.file_size = size
                with archive.open(info, "w") as target:
                    while size and (chunk := source.read(min(size, CHUNK_BYTES))):
                        target.write(chunk)
                        size -= len(chunk)
                        yield sink.take()
    yield sink.take()


class _Sink:
    """A file that cannot seek, from which what was written is taken in pieces."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""

    def take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken
