"""What a rank holds while and after a model is loaded, against loading it whole.

Anonymous memory is read from /proc every 5 ms: the files' own pages are mapped, cost nothing and count nowhere.

    python -m tests.benchmarks.memory           about 2 minutes; exit code 1 when a limit is exceeded
"""

from __future__ import annotations

import argparse
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

from tests.benchmarks.processes import run_ranks_afresh
from tests.benchmarks.workload import KLEIN_MEDIUM, Bench, Workload, prepare
from trainer import families
from trainer.config import ParallelConfig
from trainer.modules import load_model
from trainer.parallel.memory import full_bytes, local_bytes
from trainer.world import connect

PERIOD_S = 0.005
SHARE_LIMITS = {2: 0.51, 4: 0.26}
"""Largest share of the parameters' bytes on one rank, by number of ranks."""
PEAK_LIMIT = 0.6
"""Largest peak while loading on two ranks, as a share of the peak while loading whole."""


@dataclass(frozen=True)
class Loading:
    """The rank that took most. peak: growth of anonymous memory in bytes.  share: of the parameters' bytes."""

    peak: int
    share: float
    seconds: float


class AnonymousPeak:
    """The highest growth of this process's anonymous memory inside `watching`, bytes."""

    def __init__(self) -> None:
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


def load(root: Path, workload: Workload, ranks: int) -> Loading:
    """Load the model of a bench on fresh ranks: whole on one, fully sharded on several."""
    return Loading(
        **run_ranks_afresh(ranks, "tests.benchmarks.memory", "--load", str(root), json.dumps(asdict(workload)))
    )


def _load_here(root: Path, workload: Workload) -> None:
    """On every rank; rank 0 prints the largest figures."""
    bench = Bench(root, workload)
    with connect(ParallelConfig(device="cpu")) as world:
        strategy = "full" if world.size > 1 else "none"
        cfg = bench.config(parallel={"device": "cpu", "devices": world.size, "strategy": strategy})
        family = families.make(cfg, root / "cache")
        peak, began = AnonymousPeak(), time.perf_counter()
        with peak.watching():
            model = load_model(cfg, family, world).module
        seconds = time.perf_counter() - began
        parameters = list(model.parameters())
        share = local_bytes(parameters) / full_bytes(parameters)
        everyone = world.gather(Loading(peak.growth, share, seconds))
    if world.rank == 0:
        worst = Loading(*(max(figures) for figures in zip(*(asdict(one).values() for one in everyone), strict=True)))
        print(json.dumps(asdict(worst)))


def main() -> int:
    """Print one row per number of ranks. Returns 1 when one is over its limit."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.memory", description=__doc__)
    parser.add_argument("--load", nargs=2, metavar=("FOLDER", "WORKLOAD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        _load_here(Path(options.load[0]), Workload(**json.loads(options.load[1])))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), KLEIN_MEDIUM)
        loadings = {ranks: load(Path(folder), KLEIN_MEDIUM, ranks) for ranks in (1, 2, 4)}
    whole = loadings[1].peak
    print("ranks   seconds   peak MiB   of whole   limit   local bytes   limit")
    for ranks, loading in loadings.items():
        limits = (PEAK_LIMIT if ranks > 1 else 1.0, SHARE_LIMITS.get(ranks, 1.0))
        print(
            f"{ranks:5}{loading.seconds:10.2f}{loading.peak / 2**20:11.0f}{loading.peak / whole:11.3f}{limits[0]:8.2f}"
            f"{loading.share:14.4f}{limits[1]:8.2f}"
        )
    within = all(loadings[ranks].share <= limit for ranks, limit in SHARE_LIMITS.items())
    return int(not within or loadings[2].peak > PEAK_LIMIT * whole)


if __name__ == "__main__":
    sys.exit(main())
