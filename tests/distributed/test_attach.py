"""How a rank finds its run."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.runs import make_run, run_config
from trainer.distributed import attach as attaching
from trainer.distributed.attach import attach
from trainer.distributed.world import Rendezvous
from trainer.run.folder import RunDir


def test_a_rank_that_is_faster_than_rank_0_is_not_remote_in_a_folder_that_it_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, run_config(tmp_path / "pictures", parallel__devices=2, parallel__strategy="ddp"), "run")
    identity = attaching._identity

    def slow(run: RunDir) -> str:
        time.sleep(0.3)
        return identity(run)

    monkeypatch.setattr(attaching, "_identity", slow)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        first, second = (ranks.submit(attach, run.path, Rendezvous(store, rank, 2)) for rank in (0, 1))
    assert (first.result().is_remote, second.result().is_remote) == (False, False)
    assert second.result().run == first.result().run == run
    assert not list(run.path.glob("remote-*"))
