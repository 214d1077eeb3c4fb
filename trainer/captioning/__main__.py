"""One rank of a captioning job, started by torchrun: `python -m trainer.captioning JOB`."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.system.imports import quick_imports

with quick_imports():
    import torch
    from torch.distributed.elastic.multiprocessing.errors import record

    from trainer.captioning.work import caption_job, out_of_memory
    from trainer.distributed.world import Rendezvous, connect, find_rendezvous
    from trainer.run import process
    from trainer.run.captioning import CaptionJob
    from trainer.system.errors import InputError
    from trainer.system.process_exit import run_and_exit


def main() -> int:
    """Exit code 0: done or stopped; 1: failed (raised, as torch's `record` wants it); 2: the user's mistake."""
    job = CaptionJob(Path(sys.argv[1]).absolute())
    meeting = find_rendezvous(job.run)
    try:
        _work(job, meeting)
    except InputError as error:
        process.record_mistake(job.run, meeting.rank, str(error))
        return 2
    return 0


@record
def _work(job: CaptionJob, meeting: Rendezvous) -> None:
    try:
        with connect(job.request.config().parallel, meeting) as world:
            caption_job(job, world, job.path.parents[1] / "cache")
    except torch.OutOfMemoryError as error:
        raise out_of_memory(job, error) from error


if __name__ == "__main__":
    run_and_exit(main)
