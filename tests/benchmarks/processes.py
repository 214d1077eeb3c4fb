"""Fresh processes for measurements: what a used one holds in memory or has imported is no part of the figure."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from trainer.run.process import worker_environment


def run_ranks_afresh(ranks: int, module: str, *arguments: str) -> Any:
    """Start `python -m module arguments` under torchrun on new ranks. Returns what rank 0 printed last, a JSON value.

    Raises CalledProcessError when a rank fails; its own output is then on stderr.
    """
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    argv += ["-m", module, *arguments]
    done = subprocess.run(argv, env=worker_environment(), stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])
