"""How images look: near copies of each other, blurred and flat ones. Imports neither torch nor, until it measures,
numpy.

An image is decoded small. Its hash is a perceptual hash of the discrete cosine transform: the signs of its 64 lowest
frequencies (C. Zauner, Implementation and Benchmarking of Perceptual Image Hash Functions, 2010, sec. 3.1.1, with zero
in place of the median, so that the hash of the mirrored image follows from the same numbers). Its sharpness is the
variance of the Laplacian (J. Pech-Pacheco et al., Diatom autofocusing in brightfield microscopy, 2000).
"""

from __future__ import annotations

import base64
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import PIL
from PIL import Image

from trainer.data.images.image_io import load_grey, read_header
from trainer.data.images.known_files import FileMemory
from trainer.system.index import Index

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = 1
"""Version of the stored records: raise it when `measure` finds something else in the same file."""
KIND = f"look {FORMAT} {PIL.__version__}"
"""Of the records in the index."""
SIDE = 512
"""Longer side in pixels at which sharpness and contrast are measured; smaller images keep their size."""
HASHED = 32
"""Side in pixels of the square that is transformed for the hash."""
FREQUENCIES = 9
"""The 64 lowest frequencies are among as many per side."""
SIGNATURE = 12
"""Side in pixels of the copy by which candidates are compared."""
UNCERTAIN = 0.05
"""Frequencies below this share of the root mean square count as zero: their sign is noise, as in a symmetric image."""

MOST_BITS = 12
"""Bits in which the hashes of near copies may differ. Of 150 scenes of noise with the spectrum of photos, other ones
differ in 16 or more."""
LEAST_ALIKE = 0.92
"""Correlation of the brightness of near copies. A crop of 4 % reaches 0.93, other scenes at most 0.9."""
FLAT = 4.0
"""Contrast below which an image is not compared: all of it is noise."""
BANDS = 5
"""Parts of a hash. Of hashes with MOST_BITS others, one part differs in at most two bits."""
MOST_PAIRS = 2**22
"""Pairs that are compared at a time, which take 200 MB."""

BLURRED = 20.0
"""Sharpness below which an image counts as blurred in any set."""
LOW_CONTRAST = 12.0
"""Contrast, of 255 levels, below which an image counts as low in any set."""
FEWEST = 20
"""Images from which on one is compared with the others."""
FAR = 3.5
"""Distance from the median in standard deviations, estimated by the median absolute deviation (B. Iglewicz and
D. Hoaglin, How to Detect and Handle Outliers, 1993), from which on an image differs from the others."""


class Look(NamedTuple):
    """How an image looks.

    Attributes:
        hash: 64 bits, alike for near copies.
        mirrored: The hash of the mirrored image.
        sharpness: Variance of the Laplacian, at SIDE pixels.
        contrast: Standard deviation of the brightness, in levels from 0 to 255.
        signature: Brightness of SIGNATURE x SIGNATURE pixels, base64.
    """

    hash: int
    mirrored: int
    sharpness: float
    contrast: float
    signature: str


@dataclass(frozen=True)
class Copies:
    """Images that are near copies of each other.

    Attributes:
        members: Their indices, at least two, in order.
        mirrored: Those that are mirrored copies of the first.
    """

    members: tuple[int, ...]
    mirrored: frozenset[int]

    def leak(self, held_out: Collection[int]) -> bool:
        """Whether one is held out and another is trained on: the validation loss then measures memory."""
        return 0 < sum(member in held_out for member in self.members) < len(self.members)


def measure(path: Path) -> Look:
    """Look at an image. Raises InputError when it cannot be read, or has too many pixels to be shown."""
    import numpy as np

    grey = load_grey(read_header(path), SIDE)
    pixels = np.asarray(grey, dtype=np.float32)
    forward, backward = _hashes(grey)
    small = grey.resize((SIGNATURE, SIGNATURE), Image.Resampling.LANCZOS)
    return Look(
        forward,
        backward,
        round(_sharpness(pixels), 3),
        round(float(pixels.std()), 3),
        base64.b64encode(small.tobytes()).decode(),
    )


def _hashes(grey: Image.Image) -> tuple[int, int]:
    """The hash of an image, and that of the mirrored image."""
    import numpy as np

    square = np.asarray(grey.resize((HASHED, HASHED), Image.Resampling.LANCZOS), dtype=np.float64)
    waves, rows, columns = _waves()
    found = (waves @ square @ waves.T)[rows, columns]
    limit = UNCERTAIN * math.sqrt(float(np.mean(found**2)))
    signs = np.where(columns % 2 == 1, -1.0, 1.0)  # mirrored, waves of odd frequency change their sign
    return _as_number(found > limit), _as_number(found * signs > limit)


@functools.cache
def _waves() -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The cosines of each frequency, and (vertical, horizontal) of the 64 lowest pairs without the mean."""
    import numpy as np

    places = (2 * np.arange(HASHED) + 1) * np.pi / (2 * HASHED)
    waves = np.cos(np.arange(FREQUENCIES)[:, None] * places[None])
    pairs = [(v, u) for v in range(FREQUENCIES) for u in range(FREQUENCIES) if v + u > 0]
    lowest = np.array(sorted(pairs, key=lambda pair: (sum(pair), abs(pair[0] - pair[1]), pair))[:64])
    return waves, lowest[:, 0], lowest[:, 1]


def _as_number(bits: NDArray[np.bool_]) -> int:
    return sum(1 << place for place, bit in enumerate(bits.tolist()) if bit)


def _sharpness(pixels: NDArray[np.float32]) -> float:
    if min(pixels.shape) < 3:
        return 0.0
    around = pixels[:-2, 1:-1] + pixels[2:, 1:-1] + pixels[1:-1, :-2] + pixels[1:-1, 2:]
    return float((around - 4 * pixels[1:-1, 1:-1]).var())


def known_looks(cache: Path) -> FileMemory[Look]:
    """Return what was measured of images. cache: the folder that runs share."""
    return FileMemory(Index(cache), KIND, Look, measure)


def copies(looks: Sequence[Look], is_stopped: Callable[[], bool] = lambda: False) -> list[Copies]:
    """Find near copies: scaled, compressed, brightened, cropped by a few percent, or mirrored.

    Images that are linked through others are in one group. Flat images are left out.

    Args:
        looks: Of all images.
        is_stopped: Asked now and then; once it says so, only what was found so far is returned.
    """
    import numpy as np

    compared = [index for index, look in enumerate(looks) if look.contrast >= FLAT]
    if len(compared) < 2:
        return []
    all_hashes = np.array([looks[index].hash for index in compared], dtype=np.uint64)
    shapes = _shapes([looks[index].signature for index in compared])
    owners = list(range(len(compared)))
    _, firsts, same = np.unique(all_hashes, return_index=True, return_inverse=True)
    _join_alike(owners, firsts[same], np.arange(len(compared)), shapes, shapes)  # thousands may have one hash
    firsts = np.sort(firsts)
    mirrored = np.array([looks[compared[place]].mirrored for place in firsts.tolist()], dtype=np.uint64)
    hashes = all_hashes[firsts]
    for queries, compared_with in ((hashes, shapes), (mirrored, shapes[:, :, ::-1])):
        for ones, others in _near(hashes, queries, is_stopped):
            _join_alike(owners, firsts[ones], firsts[others], shapes, compared_with)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for place in range(len(compared)):
        groups[_owner(owners, place)].append(compared[place])
    return [_group(looks, members) for members in groups.values() if len(members) > 1]


def _join_alike(
    owners: list[int],
    ones: NDArray[np.int64],
    others: NDArray[np.int64],
    shapes: NDArray[np.float32],
    compared_with: NDArray[np.float32],
) -> None:
    """Put the pairs whose shapes are alike into one group."""
    import numpy as np

    alike = np.einsum("nij,nij->n", shapes[ones], compared_with[others]) >= LEAST_ALIKE
    for one, other in zip(ones[alike].tolist(), others[alike].tolist(), strict=True):
        _join(owners, one, other)


def _group(looks: Sequence[Look], members: Sequence[int]) -> Copies:
    first = looks[members[0]]
    turned = (
        index
        for index in members
        if (first.hash ^ looks[index].mirrored).bit_count() < (first.hash ^ looks[index].hash).bit_count()
    )
    return Copies(tuple(members), frozenset(turned))


def _shapes(signatures: Sequence[str]) -> NDArray[np.float32]:
    """The signatures with mean 0 and length 1, so that a sum of products is a correlation."""
    import numpy as np

    size = SIGNATURE * SIGNATURE
    content = b"".join(base64.b64decode(signature)[:size].ljust(size, b"\0") for signature in signatures)
    shapes = np.frombuffer(content, dtype=np.uint8).reshape(-1, size).astype(np.float32)
    shapes -= shapes.mean(axis=1, keepdims=True)
    shapes /= np.maximum(np.sqrt((shapes**2).sum(axis=1, keepdims=True)), 1e-6)
    return shapes.reshape(-1, SIGNATURE, SIGNATURE)


def _near(
    hashes: NDArray[np.uint64], queries: NDArray[np.uint64], is_stopped: Callable[[], bool]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(i, j) with i < j of hashes[i] and queries[j] that differ in at most MOST_BITS; some pairs come several times.

    By the pigeonhole principle one of the BANDS differs in at most MOST_BITS // BANDS bits: only images in which one
    does are compared (M. Norouzi et al., Fast Search in Hamming Space with Multi-Index Hashing, 2012).
    """
    import numpy as np

    for band in range(BANDS):
        low, high = 64 * band // BANDS, 64 * (band + 1) // BANDS
        width, cut = high - low, np.uint64((1 << (high - low)) - 1)
        keys = ((hashes >> np.uint64(low)) & cut).astype(np.int64)
        asked = ((queries >> np.uint64(low)) & cut).astype(np.int64)
        order = np.argsort(keys, kind="stable")
        begins = np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=1 << width))))
        for mask in _masks(width, MOST_BITS // BANDS):
            first = begins[asked ^ mask]
            for some in _parts(begins[(asked ^ mask) + 1] - first):
                if is_stopped():
                    return
                ones, others = _expanded(order, first, begins[(asked ^ mask) + 1] - first, some)
                is_near = np.bitwise_count(hashes[ones] ^ queries[others]) <= MOST_BITS
                yield ones[is_near], others[is_near]


def _masks(width: int, most: int) -> list[int]:
    """All numbers of `width` bits of which at most `most` are set."""
    return [sum(1 << bit for bit in bits) for count in range(most + 1) for bits in combinations(range(width), count)]


def _parts(counts: NDArray[np.int64]) -> Iterator[slice]:
    """Ranges of queries that have about MOST_PAIRS pairs together."""
    import numpy as np

    ends = np.cumsum(counts)
    begin = 0
    while begin < len(counts):
        done = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + MOST_PAIRS, side="right")))
        yield slice(begin, end)
        begin = end


def _expanded(
    order: NDArray[np.int64], first: NDArray[np.int64], counts: NDArray[np.int64], some: slice
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(i, j), i < j, of the queries j of `some` with each i of the `counts[j]` that begin at `order[first[j]]`."""
    import numpy as np

    number = counts[some]
    others = np.repeat(np.arange(some.start, some.stop), number)
    within = np.arange(len(others)) - np.repeat(np.cumsum(number) - number, number)
    ones = order[np.repeat(first[some], number) + within]
    is_before = ones < others
    return ones[is_before], others[is_before]


def _owner(owners: list[int], place: int) -> int:
    while owners[place] != place:
        owners[place] = owners[owners[place]]
        place = owners[place]
    return place


def _join(owners: list[int], one: int, other: int) -> None:
    """Put two into one group, whose owner is its first member."""
    one, other = sorted((_owner(owners, one), _owner(owners, other)))
    owners[other] = one


def blurred(looks: Sequence[Look]) -> list[int]:
    """Return the indices of blurred images: below BLURRED, or far below the others, and a quarter of their median."""
    return _low([look.sharpness for look in looks], BLURRED, 0.25)


def flat(looks: Sequence[Look]) -> list[int]:
    """Return the indices of images with little contrast: below LOW_CONTRAST, or far below the others, and half."""
    return _low([look.contrast for look in looks], LOW_CONTRAST, 0.5)


def _low(values: Sequence[float], floor: float, share: float) -> list[int]:
    """Indices of values below the floor, or below `share` of the median and FAR from it, in their logarithms."""
    limit = floor
    if len(values) >= FEWEST:
        logs = sorted(math.log(max(value, 1e-6)) for value in values)
        middle = logs[len(logs) // 2]
        spread = 1.4826 * sorted(abs(one - middle) for one in logs)[len(logs) // 2]
        limit = max(floor, math.exp(min(middle - FAR * spread, middle + math.log(share))))
    return [index for index, value in enumerate(values) if value < limit]
