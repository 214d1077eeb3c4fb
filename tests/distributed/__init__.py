"""Real ranks for tests: `run_ranks(n, fn, ...)` runs a function on n processes that form a gloo process group."""

from tests.distributed.pool import run_ranks

__all__ = ["run_ranks"]
