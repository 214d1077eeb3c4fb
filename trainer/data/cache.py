"""The cache of encoded examples on disk, which ranks fill together."""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from trainer.data.images.known_files import KnownFiles
from trainer.models.objectives.base import Example
from trainer.run.folder import CACHE_FORMAT
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.files import make_private_if_new

T = TypeVar("T")

SUM = "blake2b"
NO_SUM = "0" * 32
PARTS = ".parts"
"""Folder of examples that are being written. It holds few files, so leftovers of killed runs are found quickly."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks that share a cache folder, seen from one of these ranks.

    Attributes:
        index: This rank's index in the group.
        size: Number of ranks in the group.
        gather: gather(x) returns the x of all ranks of the run, other groups included, in rank order; a collective.
    """

    index: int
    size: int
    gather: Callable[[Any], list[Any]]


class ExampleCache:
    """Examples by key, one safetensors file each. Keys are hexadecimal digests.

    Attributes:
        folder: Folder of the files, below the cache that runs share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        """The file of the example with this key, whether it exists or not."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        """Whether there is a complete file for this key. A torn file counts as missing; `write` replaces it."""
        try:
            with safe_open(self.path(key), framework="pt"):
                return True
        except (FileNotFoundError, SafetensorError):
            return False

    def read(self, key: str) -> Example:
        """The example, on the CPU. A damaged file is removed, or the next start would find it again.

        Raises:
            InputError: The file is missing or damaged; the message names it.
        """
        file = self.path(key)
        with self._damage_reported(key):
            data = file.read_bytes()
            example = load(data)
            if _sum_inside(data) != _sum_of(data):
                file.unlink(missing_ok=True)
                raise SafetensorError("checksum")
            return example

    def shapes(self, key: str) -> Example:
        """The example on the meta device, in fp32, from the header of its file alone. Raises InputError as `read`."""
        with self._damage_reported(key), safe_open(self.path(key), framework="pt") as stored:
            names = list(stored.keys())
            return {name: torch.empty(stored.get_slice(name).get_shape(), device="meta") for name in names}

    def write(self, key: str, example: Example) -> None:
        """Store an example atomically: afterwards there is the complete new file, or the previous one.

        Raises:
            OSError: The file cannot be written; the message names it.
        """
        target = self.path(key)
        part = self.folder / PARTS / f"{key}.{uuid.uuid4().hex}"
        try:
            make_private_if_new(self.folder.parent)
            self.folder.mkdir(exist_ok=True)
            if not (self.folder / files.FORMAT_FILE).exists():  # `guard_cache` has refused one of another version
                files.write_folder_format(self.folder, CACHE_FORMAT)
            for folder in (target.parent, part.parent):
                folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.contiguous() for name, tensor in example.items()}
            part.write_bytes(_with_sum(save(tensors, {SUM: NO_SUM})))
            self._name(part, target)
        except OSError as error:
            part.unlink(missing_ok=True)
            reason = f"{error.strerror}; make room, or set data.cache to another disk"
            raise OSError(error.errno, reason, str(target)) from error

    def _name(self, part: Path, target: Path) -> None:
        """Rename a part to its example's file, and remove parts of the same example that killed runs left.

        `files.rename` syncs: otherwise a power cut could leave the new name on a file of zeros of the right length.
        """
        try:
            files.rename(part, target)
        except FileNotFoundError:  # another run wrote the same example first, and removed this part as a leftover
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
                f"{self.path(key)}: missing or damaged since it was cached; start again to encode it again"
            ) from error


def _with_sum(data: bytes) -> bytes:
    """Put the checksum of a safetensors file in the place of NO_SUM in its header."""
    end = 8 + _header_size(data)
    return b"".join((data[:end].replace(NO_SUM.encode(), _sum_of(data).encode(), 1), memoryview(data)[end:]))


def _sum_of(data: bytes) -> str:
    """Checksum of the tensors' bytes in a safetensors file, without the header, which holds the sum."""
    return hashlib.blake2b(memoryview(data)[8 + _header_size(data) :], digest_size=16).hexdigest()


def _sum_inside(data: bytes) -> str | None:
    """The checksum in a file's header; None without one."""
    header = json.loads(data[8 : 8 + _header_size(data)])
    checksum: str | None = header.get("__metadata__", {}).get(SUM)
    return checksum


def _header_size(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def missing(keys: Iterable[str], cache: ExampleCache, group: RankGroup) -> tuple[str, ...]:
    """Find the keys that at least one group has not cached: equal on every rank, in the order of `keys`.

    Collective; `keys` must be equal on every rank. One rank of a group checks each file.
    """
    keys = tuple(dict.fromkeys(keys))
    missing_by_rank = _on_all(group, lambda: [key for key in keys[group.index :: group.size] if not cache.has(key)])
    missing_anywhere = {key for part in missing_by_rank for key in part}
    return tuple(key for key in keys if key in missing_anywhere)


def encode_missing(
    work: Mapping[str, T],
    cache: ExampleCache,
    encode: Callable[[T], Example],
    group: RankGroup,
    on_progress: Callable[[int, int], None],
) -> dict[str, str]:
    """Encode and cache the missing examples, each by one rank of a group.

    Collective; `work` must be equal on every rank. Every rank completes equally many calls of `encode`, so that
    `encode` may be collective itself: a rank without an item of its own repeats one, and a rank whose item raises
    InputError encodes another. Therefore an InputError must depend on the item only and come before the first
    collective of `encode`. Any other error of `encode` or the disk is raised on that rank alone, at once. After an
    interrupted call, the next one continues with the examples that are still missing.

    Args:
        work: {key: item to encode}.
        cache: Takes the examples.
        encode: encode(item) returns the example.
        group: The ranks that share `cache`.
        on_progress: on_progress(done, total) is called after every round, on every rank.

    Returns:
        {key: message} of the items that cannot be used.
    """
    keys = missing(work, cache, group)
    problems: dict[str, str] = {}
    rounds = max(group.gather(math.ceil(len(keys) / group.size)))
    for number in range(rounds):
        start = (number * group.size + group.index) % len(keys)
        turn = chain(islice(keys, start, None), islice(keys, start))
        _on_all(group, partial(_encode_first_usable, turn, work, cache, encode, problems))
        on_progress(min((number + 1) * group.size, len(keys)), len(keys))
    messages = {key: message for part in group.gather(problems) for key, message in part.items()}
    return {key: messages[key] for key in keys if key in messages}


def content_keys(files: Sequence[str], group: RankGroup, known: KnownFiles | None = None) -> list[str]:
    """SHA-256 of each file's bytes, in order. Collective; one rank of a group reads each file.

    Args:
        known: What was read before, which is not read again; it takes what is read now.

    Raises:
        InputError: A file cannot be read, or its content differs between groups; raised on all ranks.
    """
    known = known or KnownFiles()
    own = range(group.index, len(files), group.size)
    parts = _on_all(group, lambda: {i: known.with_digest(Path(files[i])) for i in own})
    digests: list[str | None] = [None] * len(files)
    for part in parts:
        for index, found in part.items():
            if digests[index] not in (None, found.value):
                raise InputError(f"{files[index]}: its content differs between machines; copy the dataset again")
            digests[index] = found.value
            if index not in own:
                known.add(Path(files[index]), found)
    if group.index == 0:
        known.save()
    return list(map(str, digests))


def _encode_first_usable(
    keys: Iterable[str],
    work: Mapping[str, T],
    cache: ExampleCache,
    encode: Callable[[T], Example],
    problems: dict[str, str],
) -> None:
    """Encode and cache the first key that raises no InputError; keys that raise one are added to `problems`."""
    for key in keys:
        if key not in problems:
            try:
                example = encode(work[key])
            except InputError as error:
                problems[key] = str(error)
            else:
                cache.write(key, example)
                return


def _on_all(group: RankGroup, attempt: Callable[[], T]) -> list[T]:
    """Gather the results of `attempt` in rank order. An InputError on one rank is raised on all ranks.

    Any other error ends this rank at once, and torchrun ends the others: were the error shared first, ranks inside a
    sharded encoder would wait for this one in vain.
    """
    result, mistake = None, None
    try:
        result = attempt()
    except InputError as error:
        mistake = error
    outcomes = group.gather((result, None if mistake is None else str(mistake)))
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            raise InputError(f"rank {rank}: {message}") from mistake
    return [result for result, _ in outcomes]


def key_of(*parts: object) -> str:
    """The cache key of a result that depends on these parts and on nothing else."""
    return key_of_all(parts)


def key_of_all(parts: Iterable[object]) -> str:
    """`key_of` of as many parts as there are, which are not held in memory together."""
    found, between = hashlib.sha256(), b""
    for part in parts:
        found.update(between + str(part).encode())
        between = b"\x1f"
    return found.hexdigest()
