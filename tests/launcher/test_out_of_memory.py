"""A run whose ranks run out of memory, under a limit of their address space, goes down the ladder until it fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plan.common import NOWHERE
from tests.runs import make_pictures, make_run
from trainer.config.load import dump_config, load_config, load_config_text
from trainer.launcher import torchrun
from trainer.plan.hardware import like
from trainer.plan.search.fixes import planned
from trainer.plan.search.ladder import CPU
from trainer.run import process
from trainer.run.events import EventReader, WarningEvent, latest_steps
from trainer.system.amounts import GIB
from trainer.system.installation import PRESETS

WORKER = '''
"""The trainer, whose training may take so many bytes in addition to what the process has by then."""
import resource, sys
from pathlib import Path
from trainer import __main__ as trainer
from trainer.train.loop import Trainer

ROOM = 400 * 2**20
train = Trainer.train

def limited(self):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, resource.RLIM_INFINITY))
    return train(self)

Trainer.train = limited
sys.exit(trainer.main())
'''
FIELDS = (
    "data.resolution=256",
    "data.validation=0",
    "train.micro_batch=16",
    "train.batch_size=32",
    "train.steps=2",
    "optim.warmup=0",
    "sample.every=0",
    "checkpoint.every=1",
    "export.what=none",
    "train.out_of_memory=retry",
    "parallel.max_restarts=6",
)


@pytest.mark.slow
def test_ranks_that_run_out_of_memory_start_again_with_less_until_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pictures = make_pictures(tmp_path / "pictures", count=4)
    cfg = load_config(PRESETS / "quickstart.yaml", (f"data.path={pictures}", *FIELDS)).config
    run = make_run(tmp_path, cfg, "limited")
    torchrun.start(cfg, run, module="worker")
    try:
        assert process.wait(run, timeout_s=300) == "finished"
    finally:
        process.terminate(run)
    events = EventReader(run.events_file).read()
    said = "memory ran out; the ranks are started again with "
    changes = [
        re.split(r", (?=[\w.]+=)", event.message.removeprefix(said))  # a mixture of checkpointing has commas
        for event in events
        if isinstance(event, WarningEvent) and event.message.startswith(said)
    ]
    assert changes
    configs = [cfg]
    for change in changes:
        configs.append(load_config_text(dump_config(configs[-1]), change, Path("run.yaml")).config)
    plans = [planned(one, like(CPU, 4 * GIB), NOWHERE) for one in configs]
    needs = [plan.training.need for plan in plans if plan]
    assert len(needs) == len(changes) + 1
    assert needs == sorted(needs, reverse=True) and len({*needs}) == len(needs)
    last = run.config()
    assert (last.data.resolution, last.train.batch_size, last.quantize.format) == (256, 32, "none")
    assert latest_steps(events)[-1].step == 2
