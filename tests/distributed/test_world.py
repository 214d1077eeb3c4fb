"""How a process joins the ranks and leaves them."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import os
from trainer.config.sections import ParallelConfig
from trainer.distributed.world import connect

def networks():
    return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")

with connect(ParallelConfig(device="cpu")):
    print(*networks())
print(*networks())
"""


def test_only_while_the_ranks_of_one_machine_are_connected_do_they_stay_on_loopback() -> None:
    environment = {**os.environ, "NCCL_SOCKET_IFNAME": "eth0"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["lo =lo", "None eth0"], "a run of several machines may follow"
