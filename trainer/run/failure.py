"""Diagnose why a run failed, from the output and error files of torchrun and its ranks. See DECISIONS 95."""

from __future__ import annotations

import errno
import glob
import json
import math
import os
import re
import resource
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from trainer.config.load import stage_configs
from trainer.run.events import AnyEvent, ErrorEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.run.stages import of_stage
from trainer.system.errors import InputError
from trainer.system.files import opened, write_problem

MOST_DIGITS = 10
"""Numbers of ranks and attempts have fewer."""
UNKNOWN = "read the end of the log"
"""The remedy for an error that is not known."""
LAST_BYTES = 2**20
"""How much of the end of a log is read. It holds the last message and torchrun's table of failures."""


def launches(run: RunDir) -> int:
    """Return how often this run was started."""
    return len(list(run.logs.glob("launch-*.log")))


def output_file(run: RunDir, number: int) -> Path:
    """Return the file with torchrun's output of a start, numbered from 1."""
    return run.logs / f"launch-{number}.log"


def diagnose(run: RunDir, events: Sequence[AnyEvent]) -> ErrorEvent:
    """Return why the latest start of a run failed, from torchrun's output and the ranks' error files.

    The rank that failed first is named. Ranks that torchrun ended, or that only lost their connection to another rank,
    come last: they are consequences, even if they were recorded first.

    Args:
        run: The run.
        events: The events since that start.
    """
    number = launches(run)
    output = output_file(run, number)
    attempts = _last_attempts(run, number)
    failures = [*_reported(output, attempts), *_recorded(attempts)]
    last = last_line(output)
    torchrun_itself = _Failure(None, last or "torchrun exited without a message", math.inf, output, is_cut=not last)
    cause = min(failures, key=lambda failure: (failure.is_consequence, failure.when), default=torchrun_itself)
    # What reports a failure lies on the disk that may be the cause.
    if cause.is_cut:
        cause = replace(cause, message=write_trouble(run) or _warned(events) or cause.message)
    elif remedy_for(cause.message) == UNKNOWN and (trouble := write_trouble(run)):
        cause = replace(cause, message=f"{cause.message}; {trouble}")
    return ErrorEvent(
        message=cause.message,
        remedy=remedy_for(cause.message),
        retry=_retry(cause.message, run),
        rank=cause.rank,
        step=max((event.step for event in events), default=0),
        log=os.path.relpath(cause.log, run.path),
    )


def write_trouble(run: RunDir) -> str:
    """Return why nothing can be written into a run folder, found by writing there; empty if it can.

    Whoever runs in a terminal can say it when the run cannot.
    """
    if not run.path.is_dir():
        return f"{run.path}: the run folder was deleted or moved away"
    found = write_problem(run.path)
    if found is not None and found.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {run.path} is full ({found.strerror})"
    if found is not None:
        return f"{run.path}: cannot be written ({found.strerror})"
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)  # the ranks have inherited that of this process
    files = (run.events_file, *run.ranks.glob("*.jsonl"), *run.logs.rglob("*.log"))
    largest = max((file for file in files if file.is_file()), key=lambda file: file.stat().st_size, default=None)
    if limit != resource.RLIM_INFINITY and largest is not None and largest.stat().st_size >= limit:
        return f"{largest}: has reached the largest size of a file here, {limit:,} bytes (File too large)"
    return ""


_NOT_WRITTEN = re.compile(r"No space left on device|Disk quota exceeded|Read-only file system|File too large")


def _warned(events: Sequence[AnyEvent]) -> str:
    """The last warning that a file could not be written: there may be space again since then."""
    texts = (event.message for event in reversed(events) if isinstance(event, WarningEvent))
    found = next(filter(_NOT_WRITTEN.search, texts), "")
    return found and f"exited while writing its error file, after this warning: {found}"


_LOST_ANOTHER_RANK = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|pair closure|remote process exited"
    r"|ncclRemoteError|killed by SIG(TERM|USR1)"
)


@dataclass(frozen=True)
class _Failure:
    """How one rank failed.

    Attributes:
        rank: The rank; None if only its number on its node is known.
        message: Its error.
        when: Unix seconds.
        log: File with the details.
        is_cut: Whether the error could not be written.
    """

    rank: int | None
    message: str
    when: float
    log: Path
    is_cut: bool = False

    @property
    def is_consequence(self) -> bool:
        return _LOST_ANOTHER_RANK.search(self.message) is not None


def _last_attempts(run: RunDir, number: int) -> list[Path]:
    """Return the folders with the ranks' logs, one per node: of the last attempt, if torchrun restarted the ranks.

    With several nodes, their names hold no number of the start: folders modified before the latest start are old.
    """
    name = glob.escape(run.path.name)
    nodes = [*run.logs.glob(f"{name}-{number}_*")]
    if run.launch_file.exists():
        began = run.launch_file.stat().st_mtime
        nodes += [folder for folder in run.logs.glob(f"{name}_*") if folder.stat().st_mtime >= began]
    numbered = [{number_in(folder): folder for folder in node.glob("attempt_*")} for node in nodes]
    return [folders[max(folders)] for folders in numbered if folders]


def number_in(path: Path) -> int:
    """Return the number at the end of a name of torchrun's, such as `attempt_1` or `1`; -1 for other names."""
    number = path.name.rpartition("_")[2]
    return int(number) if number.isascii() and number.isdecimal() and len(number) < MOST_DIGITS else -1


_REPORT = re.compile(
    r"^  time +: (?P<time>\S+)\n"
    r"  host +: .*\n"
    r"  rank +: (?P<rank>\d{1,9}) \(local_rank: (?P<local_rank>\d{1,9})\)\n"
    r"  exitcode +: (?P<code>-?\d{1,9}) .*\n"
    r"  error_file: (?P<error_file>.*)$",
    re.MULTILINE,
)


def _reported(output: Path, attempts: Sequence[Path]) -> Iterator[_Failure]:
    """Yield the failures of this node's ranks, from the table that torchrun prints when it exits."""
    if not output.exists():
        return
    for report in _REPORT.finditer(_end_of(output)):
        rank, error_file = int(report["rank"]), Path(report["error_file"])
        if error_file.is_file():
            yield _from_error_file(error_file, rank)
            continue
        logs = [attempt / report["local_rank"] / "stderr.log" for attempt in attempts]
        log = logs[0] if len(logs) == 1 else output
        # The table truncates times to seconds: one is added, so that a rank that left an error file comes first.
        when = datetime.strptime(report["time"], "%Y-%m-%d_%H:%M:%S").timestamp() + 1
        yield _Failure(rank, _how_it_ended(int(report["code"]), log), when, log)


def _recorded(attempts: Sequence[Path]) -> Iterator[_Failure]:
    """Yield the failures that left an error file, including those of other nodes that share the run folder.

    torchrun's table may lack the first failure, because it is written as soon as any rank has exited. The folders are
    named by the rank within its node, which is the rank of the run only if there is one node.
    """
    for attempt in attempts:
        for error_file in attempt.glob("*/error.json"):
            rank = number_in(error_file.parent) if len(attempts) == 1 else -1
            yield _from_error_file(error_file, rank if rank >= 0 else None)


def _from_error_file(file: Path, rank: int | None) -> _Failure:
    try:
        message = json.loads(_end_of(file))["message"]["message"]
        if not isinstance(message, str):
            raise TypeError(message)
        is_cut = False
    except (ValueError, KeyError, TypeError, RecursionError):
        message, is_cut = last_line(file.with_name("stderr.log")) or "exited while writing its error file", True
    return _Failure(rank, message, file.stat().st_mtime, file.with_name("stderr.log"), is_cut)


_UNCAUGHT = re.compile(r"^\[rank\d+\]: (\w[\w.]*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
"""How torch prints an error that ends a rank. What comes after it happened while it was handled: a full disk takes no
error file either."""


def _how_it_ended(code: int, log: Path) -> str:
    uncaught = _UNCAUGHT.search(_end_of(log)) if code == 1 and log.is_file() else None
    if uncaught:
        return uncaught[1]
    if code < 0:
        names = {known.value: known.name for known in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}"
    return last_line(log) or f"exited with code {code}"


_LEFT_BEHIND = re.compile(r"^nanobind: |^ - (leaked |\.\.\. skipped)|^See https://nanobind\.")
"""Lines that triton's bindings print after the error, when Python exits with their objects still there."""


def last_line(file: Path) -> str:
    """Return the last line of a log that has text; empty if there is none."""
    lines = _end_of(file).split("\n") if file.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip(" =-") and not _LEFT_BEHIND.search(line)), "")


def _end_of(log: Path) -> str:
    """Return the end of a log. Raises InputError if it is not a regular file: run folders may come from strangers."""
    with opened(log) as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - LAST_BYTES))
        return stream.read().decode(errors="replace")


OUT_OF_MEMORY = (
    r"(?i:out of memory|OutOfMemoryError|can(?:'|no)t allocate memory|bad_alloc|MemoryError|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS\w*ALLOC\w*FAILED)"
)
"""By torch, CUDA and its libraries, NCCL, Python, the system and a cgroup. NCCL says it in the last line of its error.
cuDNN's "No valid execution plans" is not here: it says so of shapes that it cannot do, too."""

_REMEDIES = (
    (
        r"FloatingPointError",
        "lower optim.lr, raise optim.warmup or set train.precision: fp32, then continue from the last checkpoint "
        "with --resume",
    ),
    (
        OUT_OF_MEMORY,
        "save memory, first where the result stays the same: set train.checkpointing and parallel.offload_blocks to "
        "auto, lower train.micro_batch, or shard over more ranks; then quantize.format; data.resolution and "
        "data.length last",
    ),
    (
        r"SIGKILL",
        "the machine probably ran out of host memory, or the process was killed; the system log shows which. Use fewer "
        "ranks per machine, lower train.micro_batch, or add memory",
    ),
    (r"torchrun exited without", "it was killed, or the machine ran out of memory: continue with --resume"),
    (r"SIGTERM|SIGUSR1|SignalException", "it was stopped from outside: continue with --resume"),
    (
        r"Read-only file system",
        "see the system log for why the disk became read-only, make it writable, then continue with --resume; finished "
        "checkpoints are intact",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "free some disk space, then continue with --resume; finished checkpoints are intact",
    ),
    (
        r"File too large",
        "raise the limit of this shell for the size of files (ulimit -f unlimited), then continue with --resume",
    ),
    (
        r"the run folder was deleted",
        "its processes were ended; start it anew, or move the folder back and continue with --resume",
    ),
    (
        r"[Aa]ddress already in use|EADDRINUSE",
        "another program uses the port: start again, or change parallel.rendezvous",
    ),
    (
        r"Rendezvous\w*Error|DistStoreError: Timed out .*waiting for clients|client socket has (timed out|failed)",
        "the nodes did not connect: check that parallel.rendezvous is host:port of the first node, that --join was "
        "started on every other node within ten minutes, and that no firewall blocks that port",
    ),
    (r"ModuleNotFoundError|ImportError", "the environment is incomplete: run --doctor"),
    (
        r"does not answer",
        "that machine, its network or the process is down or frozen: fix it, then continue with --resume",
    ),
    (
        r"nothing moved for",
        "the log shows the stack of every rank; if it was only slow, raise parallel.timeout; continue with --resume",
    ),
    (
        r"differs between ranks",
        "copies of one weight drifted apart, probably because of a faulty GPU or memory: run --doctor, and continue "
        "with --resume on other hardware",
    ),
    (
        r"CUDA driver error",
        "the driver may lack what expandable segments need: set PYTORCH_ALLOC_CONF=expandable_segments:False, else run "
        "--doctor; then continue with --resume",
    ),
    (r"CUDA|NCCL", "run --doctor; if the GPUs are fine, set NCCL_DEBUG=INFO and continue with --resume"),
)


def remedy_for(message: str) -> str:
    """Return what a person can do about an error with this message."""
    return next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, message)), UNKNOWN)


def _retry(message: str, run: RunDir) -> tuple[str, ...]:
    """Return the change to try next, as `key=value`. What saves memory is found by the plan, which this room is below:
    `trainer.plan.search.ladder` says it."""
    if not re.search("FloatingPointError", message):
        return ()
    try:
        cfg, at = run.config(), run.current_stage
        return of_stage(cfg, at, [f"optim.lr={stage_configs(cfg)[at].optim.lr / 10:g}"])
    except (InputError, IndexError):  # a damaged config, or one of other stages, which a resume names
        return ()


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_AMOUNT = rf"(\d{{1,18}}(?:\.\d+)?) ({'|'.join(_UNITS)})"
_TRIED = re.compile(rf"(?i:tried to allocate) {_AMOUNT}")
_FREE = re.compile(rf"of which {_AMOUNT} is free")


def missing_memory(message: str) -> float | None:
    """Return the bytes that were missing when memory ran out, 0 where the message does not say it; None for another
    error."""
    if not re.search(OUT_OF_MEMORY, message):
        return None
    tried, free = (
        float(found[1]) * _UNITS[found[2]] if (found := pattern.search(message)) else 0.0 for pattern in (_TRIED, _FREE)
    )
    return tried - free if tried > free else tried  # free memory in pieces that are too small is of no use
