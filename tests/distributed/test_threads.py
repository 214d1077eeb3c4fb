"""Threads of a rank."""

from __future__ import annotations

import threading

import pytest
import torch

from trainer.distributed.threads import worker_threads


def test_each_thread_of_a_rank_uses_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[int, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.update({threading.get_ident(): device}))
    met = threading.Barrier(2)
    with worker_threads(2, "read", torch.device("cuda", 3)) as pool:
        used = list(pool.map(lambda _: (met.wait(), threading.get_ident())[1], range(2)))
    assert chosen == dict.fromkeys(used, torch.device("cuda", 3))
    assert len(chosen) == 2


def test_threads_of_a_rank_on_a_cpu_leave_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("there may be no CUDA"))
    with worker_threads(1, "read", torch.device("cpu")) as pool:
        assert pool.submit(lambda: 1).result() == 1
