"""Encoded examples on disk, and the work of filling the cache shared between ranks."""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from trainer.config import files
from trainer.config.errors import InputError
from trainer.config.files import make_private_if_new, opened
from trainer.models.objectives import Example

T = TypeVar("T")

SUM = "blake2b"
PARTS = ".parts"
"""Folder of examples that are being written: few files, so that what is left of killed runs is found at once."""


@dataclass(frozen=True)
class Crew:
    """The ranks that share a cache folder, seen from one of them.

    index, size: this rank's place among them.  gather(x): the x of all ranks of the run, those of other crews too, in
    rank order; a collective.
    """

    index: int
    size: int
    gather: Callable[[Any], list[Any]]


class ExampleCache:
    """Examples by key, one safetensors file each. Keys are hexadecimal digests; runs may share a folder.

    folder: in the cache that runs share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        """Where the example of this key lies, or will lie."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        """Whether there is a whole file for this key. A torn one counts as missing, and is replaced by `write`."""
        try:
            with safe_open(self.path(key), framework="pt"):
                return True
        except (FileNotFoundError, SafetensorError):
            return False

    def read(self, key: str) -> Example:
        """The example, on the CPU. Raises InputError naming the file when it is missing or not what was cached.

        A file that is not is removed, or the next start would find it again.
        """
        file = self.path(key)
        with self._damage_reported(key):
            data = file.read_bytes()
            example = load(data)
            if _sum_inside(data) not in (None, _sum_of(data)):
                file.unlink(missing_ok=True)
                raise SafetensorError("checksum")
            return example

    def shapes(self, key: str) -> Example:
        """Tensors of the example's shapes on the meta device, from the file's header alone; all of them fp32.

        Raises InputError as `read`.
        """
        with self._damage_reported(key), safe_open(self.path(key), framework="pt") as stored:
            names = list(stored.keys())
            return {name: torch.empty(stored.get_slice(name).get_shape(), device="meta") for name in names}

    def write(self, key: str, example: Example) -> None:
        """Store an example: afterwards the whole file is there, or the one that was there before.

        Raises OSError naming the file when it cannot be written.
        """
        target = self.path(key)
        part = self.folder / PARTS / f"{key}.{uuid.uuid4().hex}"
        try:
            make_private_if_new(self.folder.parent)
            for folder in (target.parent, part.parent):
                folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.contiguous() for name, tensor in example.items()}
            part.write_bytes(save(tensors, {SUM: _sum_of(save(tensors))}))
            self._name(part, target)
        except OSError as error:
            part.unlink(missing_ok=True)
            reason = f"{error.strerror}; make room, or set data.cache to another disk"
            raise OSError(error.errno, reason, str(target)) from error

    def _name(self, part: Path, target: Path) -> None:
        """Give a part the name of its example, and remove what killed runs left of the same one.

        Without fsync a power cut could leave the new name on a file of zeros, whose length is right.
        """
        try:
            files.rename(part, target)
        except FileNotFoundError:  # another run was first with the same example, and took this for a killed one's
            if not self.has(target.stem):
                raise
        for left in part.parent.glob(f"{target.stem}.*"):
            left.unlink(missing_ok=True)

    @contextmanager
    def _damage_reported(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, SafetensorError) as error:
            raise InputError(
                f"{self.path(key)}: missing or damaged since it was cached; start again to encode it anew"
            ) from error


def _sum_of(data: bytes) -> str:
    """Of the tensors' bytes in a safetensors file, without its header, which names the sum."""
    return hashlib.blake2b(memoryview(data)[8 + _header_size(data) :], digest_size=16).hexdigest()


def _sum_inside(data: bytes) -> str | None:
    """The sum that a file names, None in one of an older version."""
    header = json.loads(data[8 : 8 + _header_size(data)])
    found: str | None = header.get("__metadata__", {}).get(SUM)
    return found


def _header_size(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def missing(keys: Iterable[str], cache: ExampleCache, crew: Crew) -> tuple[str, ...]:
    """Keys that at least one crew has not cached: the same on every rank, in the order of `keys`.

    Collective; `keys` must be the same on every rank. Each file is looked at by one rank of a crew.
    """
    keys = tuple(dict.fromkeys(keys))
    found = _on_all(crew, lambda: [key for key in keys[crew.index :: crew.size] if not cache.has(key)])
    anywhere = {key for part in found for key in part}
    return tuple(key for key in keys if key in anywhere)


def encode_missing(
    work: Mapping[str, T],
    cache: ExampleCache,
    encode: Callable[[T], Example],
    crew: Crew,
    on_progress: Callable[[int, int], None],
) -> dict[str, str]:
    """Encode and cache what is missing, each key by one rank of a crew. Returns {key: message} of unusable items.

    Collective; `work` must be the same on every rank. Every rank completes equally many calls of `encode`, so that it
    may be collective itself: a rank without an item of its own repeats one, and a rank whose item raises InputError
    encodes another. For that an InputError must depend on the item only and come before encode's first collective.
    An interrupted call leaves what it wrote, and the next one goes on from there. on_progress(done, total) is called
    after every round, on every rank.
    What else `encode` or the disk raises is raised on that rank alone, at once.
    """
    keys = missing(work, cache, crew)
    problems: dict[str, str] = {}
    rounds = max(crew.gather(math.ceil(len(keys) / crew.size)))
    for number in range(rounds):
        start = (number * crew.size + crew.index) % len(keys)
        turn = keys[start:] + keys[:start]
        _on_all(crew, partial(_encode_first_usable, turn, work, cache, encode, problems))
        on_progress(min((number + 1) * crew.size, len(keys)), len(keys))
    found = {key: message for part in crew.gather(problems) for key, message in part.items()}
    return {key: found[key] for key in keys if key in found}


def content_keys(files: Sequence[Path], crew: Crew) -> list[str]:
    """SHA-256 of each file's bytes, in order. Collective; each file is read by one rank of a crew.

    Raises InputError on all ranks for a file that cannot be read, or whose content differs between crews.
    """
    parts = _on_all(crew, lambda: {i: _digest(files[i]) for i in range(crew.index, len(files), crew.size)})
    digests: dict[int, str] = {}
    for part in parts:
        for index, digest in part.items():
            if digests.setdefault(index, digest) != digest:
                raise InputError(f"{files[index]}: its content differs between machines; copy the dataset again")
    return [digests[index] for index in range(len(files))]


def _encode_first_usable(
    keys: Sequence[str],
    work: Mapping[str, T],
    cache: ExampleCache,
    encode: Callable[[T], Example],
    problems: dict[str, str],
) -> None:
    """Encode the first key that raises no InputError; those that do are added to `problems`."""
    for key in keys:
        if key not in problems:
            try:
                example = encode(work[key])
            except InputError as error:
                problems[key] = str(error)
            else:
                cache.write(key, example)
                return


def _digest(file: Path) -> str:
    try:
        with opened(file) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); restore or remove it") from error


def _on_all(crew: Crew, attempt: Callable[[], T]) -> list[T]:
    """What `attempt` returns on each rank, in rank order. An InputError on one rank is raised on all of them.

    Any other error ends this rank at once, and torchrun the others: were it agreed first, ranks inside a sharded
    encoder would wait for this one in vain.
    """
    result, mistake = None, None
    try:
        result = attempt()
    except InputError as error:
        mistake = error
    outcomes = crew.gather((result, None if mistake is None else str(mistake)))
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            raise InputError(f"rank {rank}: {message}") from mistake
    return [result for result, _ in outcomes]


def key_of(*parts: object) -> str:
    """The name of what is made from these parts, and from nothing else."""
    text = "\x1f".join(str(part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()
