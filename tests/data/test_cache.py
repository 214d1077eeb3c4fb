"""Encoded examples on disk, and several ranks filling the cache together. Ranks are threads here."""

from __future__ import annotations

import hashlib
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from trainer.data.cache import PARTS, ExampleCache, RankGroup, content_keys, encode_missing, missing
from trainer.models.objectives.base import Example
from trainer.system.errors import InputError

T = TypeVar("T")
HANG_S = 10.0


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


WORK = {key_of(number): number for number in range(7)}


def example_of(number: int) -> Example:
    return {"latents": torch.full((2, 3), float(number)), "ids": torch.tensor([number], dtype=torch.int32)}


class Meeting:
    """Where ranks on threads exchange values. A rank that waits in vain ends the test with BrokenBarrierError."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=HANG_S)
        self.values: list[Any] = [None] * num_ranks

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        gathered = list(self.values)
        self.barrier.wait()
        return gathered


def run_groups(sizes: list[int], act: Callable[[int, RankGroup], T]) -> list[T | Exception]:
    """What `act(group number, group)` returns or raises on each rank of groups of these sizes."""
    meeting = Meeting(sum(sizes))
    places = [(number, index, size) for number, size in enumerate(sizes) for index in range(size)]

    def run_rank(rank: int) -> T | Exception:
        number, index, size = places[rank]
        try:
            return act(number, RankGroup(index, size, lambda value: meeting.gather(rank, value)))
        except Exception as error:  # noqa: BLE001 - handed to the test
            if not isinstance(error, InputError):
                meeting.barrier.abort()  # as torchrun ends the other ranks
            return error

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(run_rank, range(len(places))))


def no_progress(done: int, total: int) -> None:
    pass


def alone() -> RankGroup:
    return RankGroup(0, 1, lambda value: [value])


def cached_numbers(cache: ExampleCache) -> set[int]:
    return {int(cache.read(key)["ids"]) for key in WORK if cache.has(key)}


def test_an_example_is_read_as_it_was_written(tmp_path: Path) -> None:
    cache = ExampleCache(tmp_path)
    written = {"a": torch.randn(3, 4).t(), "b": torch.randn(2).bfloat16(), "c": torch.tensor(True)}
    cache.write(key_of(0), written)
    read = cache.read(key_of(0))
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in written.items())


def test_nothing_but_the_example_is_left_in_a_folder_named_by_the_key(tmp_path: Path) -> None:
    ExampleCache(tmp_path).write(key_of(0), example_of(0))
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == sorted(["format", f"{key_of(0)[:2]}/{key_of(0)}.safetensors"])


def test_what_a_killed_run_left_of_an_example_goes_when_it_is_written(tmp_path: Path) -> None:
    cache = ExampleCache(tmp_path)
    cache.write(key_of(0), example_of(0))
    left = [tmp_path / PARTS / f"{key}.0123" for key in (key_of(1), key_of(2))]
    for part in left:
        part.write_bytes(b"half")
    cache.write(key_of(1), example_of(1))
    assert [part.exists() for part in left] == [False, True]


def test_two_runs_that_write_the_same_example_at_once_do_not_stumble(tmp_path: Path) -> None:
    caches = [ExampleCache(tmp_path) for _ in range(4)]
    with ThreadPoolExecutor(len(caches)) as pool:
        for _ in range(50):
            list(pool.map(lambda cache: cache.write(key_of(0), example_of(0)), caches))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {*files} == {caches[0].path(key_of(0)), tmp_path / "format"}
    assert torch.equal(caches[0].read(key_of(0))["latents"], example_of(0)["latents"])


@pytest.mark.parametrize("kept_bytes", [0, 4, 40, -1])
def test_a_torn_file_counts_as_missing_and_is_encoded_anew(tmp_path: Path, kept_bytes: int) -> None:
    cache = ExampleCache(tmp_path)
    cache.write(key_of(0), example_of(0))
    torn = cache.path(key_of(0)).read_bytes()[:kept_bytes]
    cache.path(key_of(0)).write_bytes(torn)
    assert not cache.has(key_of(0))
    with pytest.raises(InputError) as caught:
        cache.read(key_of(0))
    assert str(caught.value) == (
        f"{cache.path(key_of(0))}: missing or damaged since it was cached; start again to encode it again"
    )
    encode_missing({key_of(0): 0}, cache, example_of, alone(), no_progress)
    assert torch.equal(cache.read(key_of(0))["latents"], example_of(0)["latents"])


def test_one_wrong_bit_in_a_cached_file_is_noticed(tmp_path: Path) -> None:
    cache = ExampleCache(tmp_path)
    cache.write(key_of(0), example_of(0))
    content = cache.path(key_of(0)).read_bytes()
    cache.path(key_of(0)).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match="damaged since it was cached"):
        cache.read(key_of(0))
    assert not cache.has(key_of(0))


def test_a_write_that_fails_names_the_file_and_keeps_what_was_there(tmp_path: Path) -> None:
    cache = ExampleCache(tmp_path)
    cache.write(key_of(0), example_of(0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            cache.write(key_of(0), {"latents": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == (
        "[Errno 27] File too large; make room, or set data.cache to another disk: " + repr(str(cache.path(key_of(0))))
    )
    assert [path.name for path in cache.path(key_of(0)).parent.iterdir()] == [f"{key_of(0)}.safetensors"]
    assert int(cache.read(key_of(0))["ids"]) == 0


@pytest.mark.parametrize("sizes", [[1], [2], [3], [2, 2], [1, 3]])
def test_missing_keys_are_the_same_on_all_ranks_and_in_order(tmp_path: Path, sizes: list[int]) -> None:
    caches = [ExampleCache(tmp_path / str(number)) for number in range(len(sizes))]
    for number in (0, 3, 4):
        caches[0].write(key_of(number), example_of(number))
    for number in (3, 4, 6):
        caches[-1].write(key_of(number), example_of(number))
    found = run_groups(sizes, lambda number, group: missing(WORK, caches[number], group))
    absent = (1, 2, 5) if len(sizes) == 1 else (0, 1, 2, 5, 6)
    assert found == [tuple(key_of(number) for number in absent)] * sum(sizes)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_missing_item_is_encoded_by_one_rank_and_all_ranks_encode_equally_often(
    tmp_path: Path, num_ranks: int
) -> None:
    cache = ExampleCache(tmp_path)
    cache.write(key_of(2), example_of(2))
    encoded: list[list[int]] = [[] for _ in range(num_ranks)]
    progress: list[tuple[int, int]] = []

    def fill(number: int, group: RankGroup) -> dict[str, str]:
        def encode(item: int) -> Example:
            encoded[group.index].append(item)
            return example_of(item)

        note = (lambda done, total: progress.append((done, total))) if group.index == 0 else no_progress
        return encode_missing(WORK, cache, encode, group, note)

    assert run_groups([num_ranks], fill) == [{}] * num_ranks
    assert cached_numbers(cache) == set(range(7))
    assert {len(calls) for calls in encoded} == {6 // num_ranks}
    assert sorted(item for calls in encoded for item in calls) == [0, 1, 3, 4, 5, 6]
    assert progress == [(done, 6) for done in range(num_ranks, 7, num_ranks)]


def test_groups_that_miss_different_items_call_a_sharded_encoder_together(tmp_path: Path) -> None:
    caches = [ExampleCache(tmp_path / "node0"), ExampleCache(tmp_path / "node1")]
    for number in range(6):
        caches[0].write(key_of(number), example_of(number))
    caches[1].write(key_of(6), example_of(6))
    together = threading.Barrier(3, timeout=HANG_S)

    def fill(number: int, group: RankGroup) -> dict[str, str]:
        def encode(item: int) -> Example:
            together.wait()
            return example_of(item)

        return encode_missing(WORK, caches[number], encode, group, no_progress)

    assert run_groups([2, 1], fill) == [{}] * 3
    assert [cached_numbers(cache) for cache in caches] == [set(range(7))] * 2


@pytest.mark.parametrize("bad", [{3}, {0, 1, 2}, {1, 3, 5}, {0, 2, 3, 4, 5, 6}, set(range(7))])
def test_unusable_items_are_reported_on_all_ranks_and_leave_none_waiting_in_a_sharded_encoder(
    tmp_path: Path, bad: set[int]
) -> None:
    cache = ExampleCache(tmp_path)
    together = threading.Barrier(2, timeout=HANG_S)

    def encode(item: int) -> Example:
        if item in bad:
            raise InputError(f"{item}.png: cannot be read")
        together.wait()
        return example_of(item)

    outcome = run_groups([2], lambda number, group: encode_missing(WORK, cache, encode, group, no_progress))
    assert outcome == [{key_of(item): f"{item}.png: cannot be read" for item in sorted(bad)}] * 2
    assert cached_numbers(cache) == set(range(7)) - bad


def test_another_error_ends_its_rank_at_once(tmp_path: Path) -> None:
    cache = ExampleCache(tmp_path)

    def encode(item: int) -> Example:
        if item == 5:
            raise MemoryError("no room for the latents")
        return example_of(item)

    outcome = run_groups([2], lambda number, group: encode_missing(WORK, cache, encode, group, no_progress))
    assert [type(error) for error in outcome] == [threading.BrokenBarrierError, MemoryError]
    assert cached_numbers(cache) - {4} == {0, 1, 2, 3}  # 4 is the other rank's work of that moment


def test_an_interrupted_encoding_goes_on_where_it_stopped(tmp_path: Path) -> None:
    cache = ExampleCache(tmp_path)
    encoded: list[int] = []

    def encode(item: int) -> Example:
        encoded.append(item)
        return example_of(item)

    def interrupt(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_missing(WORK, cache, encode, alone(), interrupt)
    assert encode_missing(WORK, cache, encode, alone(), no_progress) == {}
    assert encoded == [0, 1, 2, 3, 4, 5, 6]


def test_nothing_is_encoded_when_nothing_is_missing(tmp_path: Path) -> None:
    cache = ExampleCache(tmp_path)
    encode_missing(WORK, cache, example_of, alone(), no_progress)

    def refuse(item: int) -> Example:
        raise AssertionError(f"{item} is encoded again")

    assert encode_missing(WORK, cache, refuse, alone(), no_progress) == {}


def add_files(folder: Path, contents: list[bytes]) -> list[str]:
    folder.mkdir(exist_ok=True)
    files = [folder / f"{index}.png" for index in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    return list(map(str, files))


@pytest.mark.parametrize("sizes", [[1], [2], [4], [2, 1]])
def test_content_keys_are_the_digests_of_the_bytes_whatever_the_ranks(tmp_path: Path, sizes: list[int]) -> None:
    contents = [b"one", b"two", b"one"]
    files = add_files(tmp_path, contents)
    expected = [hashlib.sha256(content).hexdigest() for content in contents]
    assert run_groups(sizes, lambda number, group: content_keys(files, group)) == [expected] * sum(sizes)


def test_a_file_that_vanished_is_named_on_all_ranks(tmp_path: Path) -> None:
    files = add_files(tmp_path, [b"one", b"two"])
    Path(files[1]).unlink()
    outcome = run_groups([2], lambda number, group: content_keys(files, group))
    assert [type(error) for error in outcome] == [InputError] * 2
    assert [str(error) for error in outcome] == [
        f"rank 1: {files[1]}: cannot be read (No such file or directory); restore or remove it"
    ] * 2


def test_machines_with_different_copies_of_the_dataset_are_refused(tmp_path: Path) -> None:
    copies = [add_files(tmp_path / "node0", [b"one", b"two"]), add_files(tmp_path / "node1", [b"one", b"new"])]
    outcome = run_groups([1, 1], lambda number, group: content_keys(copies[number], group))
    assert [str(error) for error in outcome] == [
        f"{copy[1]}: its content differs between machines; copy the dataset again" for copy in copies
    ]
