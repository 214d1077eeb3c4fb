"""What a rank holds while and after a model is loaded, against loading it whole.

Anonymous memory is read from /proc every 5 ms: the files' own pages are mapped, cost nothing and count nowhere.

    python -m tests.benchmarks.memory           about 2 minutes; exit code 1 when a limit is exceeded
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from torch import nn

from tests.benchmarks.processes import run_ranks_afresh
from tests.benchmarks.workload import KLEIN_MEDIUM, Bench, prepare
from trainer.config.sections import ParallelConfig
from trainer.distributed.world import World, connect
from trainer.metrics.memory import full_bytes, local_bytes
from trainer.models import families
from trainer.models.build import build_model, load_model

PERIOD_S = 0.005
OURS, DIFFUSERS = "ours", "diffusers"
QUANTIZED = ("nf4", "int8", "fp8")
WAYS = ((1, OURS), (1, DIFFUSERS), (2, OURS), (4, OURS), *((2, format) for format in QUANTIZED), (4, "nf4"))
"""Numbers of ranks and loaders that are compared; the first is the whole. A format: ours, in that format."""
SHARE_LIMITS = {2: 0.51, 4: 0.26}
"""Largest share of the parameters' bytes on one rank, by number of ranks."""
PEAK_LIMIT = 0.6
"""Largest peak while loading on two ranks, as a share of the peak while loading whole."""
ROOM = 64 * 2**20
"""Bytes beyond what is allocated and one and a half of the largest slice in fp32 that a quantized loading may take."""


@dataclass(frozen=True)
class Loading:
    """One rank's bytes. peak: growth of anonymous memory while loading.  allocated, full_bytes: of the parameters.
    slice: the largest part of a weight that is its own, in fp32."""

    peak: int
    allocated: int
    full_bytes: int
    slice: int
    seconds: float

    @property
    def share(self) -> float:
        """Part of the parameters that this rank holds."""
        return self.allocated / self.full_bytes

    @property
    def is_lean(self) -> bool:
        """Whether no more of the model was in memory than what is kept, and what is being encoded."""
        return self.peak <= self.allocated + 1.5 * self.slice + ROOM


class AnonymousPeak:
    """The highest growth of this process's anonymous memory inside `watching`, bytes."""

    def __init__(self) -> None:
        # What was freed before and not given back would hide growth.
        ctypes.CDLL(None).malloc_trim(0)
        self._start = self._highest = anonymous_bytes()
        self._done = threading.Event()

    @property
    def growth(self) -> int:
        return self._highest - self._start

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._follow)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    def _follow(self) -> None:
        while not self._done.wait(PERIOD_S):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        self._highest = max(self._highest, anonymous_bytes())


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    assert found, "no RssAnon in /proc/self/status"
    return int(found[1]) * 1024


def measure_loading(world: World, bench: Bench, format: str = "none") -> Loading:
    """Load the model with a fresh adapter: whole on one rank, fully sharded on several. Collective.

    format: of the base.
    """
    strategy = "full" if world.size > 1 else "none"
    parallel = {"device": "cpu", "devices": world.size, "strategy": strategy}
    cfg = bench.config(parallel=parallel, quantize={"format": format})
    family = families.make(cfg, bench.root / "cache")
    peak, began = AnonymousPeak(), time.perf_counter()
    with peak.watching():
        model = load_model(build_model(cfg, family), cfg, family, world).module
    seconds = time.perf_counter() - began
    parameters = list(model.parameters())
    largest = max(layer.in_features * layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear))
    slice_bytes = 4 * largest // world.size
    return Loading(peak.growth, local_bytes(parameters), full_bytes(parameters), slice_bytes, seconds)


def measure_diffusers(bench: Bench) -> Loading:
    """Load the model whole with diffusers, and touch it: its weights are the mapped file until they are written to."""
    peak, began = AnonymousPeak(), time.perf_counter()
    with peak.watching():
        model = Flux2Transformer2DModel.from_pretrained(
            bench.model, subfolder="transformer", torch_dtype=torch.bfloat16
        )
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    seconds = time.perf_counter() - began
    size = full_bytes(model.parameters())
    return Loading(peak.growth, size, size, 0, seconds)


def main() -> int:
    """Print one row per way of loading. Returns 1 when one is over its limit."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.memory", description=__doc__)
    parser.add_argument("--rank-of", nargs=2, metavar=("FOLDER", "LOADER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        _measure(Bench(Path(options.rank_of[0]), KLEIN_MEDIUM), options.rank_of[1])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), KLEIN_MEDIUM)
        rows = {(ranks, loader): _largest(ranks, folder, loader) for ranks, loader in WAYS}
    whole = rows[1, OURS].peak
    print(f"{'':16}{'seconds':>9}{'peak MiB':>10}{'of whole':>10}{'limit':>7}{'share allocated':>17}{'limit':>7}")
    return int(not all([_row(ranks, loader, loading, whole) for (ranks, loader), loading in rows.items()]))


def _measure(bench: Bench, loader: str) -> None:
    """Print the figures of all ranks on rank 0."""
    with connect(ParallelConfig(device="cpu")) as world:
        format = loader if loader in QUANTIZED else "none"
        loading = measure_diffusers(bench) if loader == DIFFUSERS else measure_loading(world, bench, format)
        everyone = world.gather(asdict(loading))
    if world.rank == 0:
        print(json.dumps(everyone))


def _largest(ranks: int, folder: str, loader: str) -> Loading:
    """The rank with the highest peak, of ranks started for this."""
    everyone = run_ranks_afresh(ranks, "tests.benchmarks.memory", "--rank-of", folder, loader)
    return max((Loading(**values) for values in everyone), key=lambda loading: loading.peak)


def _row(ranks: int, loader: str, loading: Loading, whole: int) -> bool:
    """Print a way of loading; whether it is within its limits."""
    peak = loading.peak / whole
    start = f"{ranks} x {loader:12}{loading.seconds:>9.2f}{loading.peak / 2**20:>10.0f}{peak:>10.3f}"
    if ranks == 1:
        print(f"{start}{'':7}{loading.share:>12.4f}")
        return True
    if loader in QUANTIZED:
        limit = (loading.allocated + 1.5 * loading.slice + ROOM) / whole
        print(f"{start}{limit:>7.3f}{loading.share:>12.4f}")
        return loading.is_lean
    share_limit = SHARE_LIMITS[ranks]
    print(f"{start}{PEAK_LIMIT:>7}{loading.share:>12.4f}{share_limit:>7}")
    return peak <= PEAK_LIMIT and loading.share <= share_limit


if __name__ == "__main__":
    sys.exit(main())
