"""A thread on every rank that sees when training stands still, says who waits for what, and ends the run.

Ranks that wait for each other, a machine that is gone, a process that was frozen: the collectives themselves would
only time out, each rank by itself and without a word about the others.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

import psutil
import torch

from trainer.config.terminal import complain
from trainer.distributed.world import World
from trainer.run.events import ErrorEvent, EventWriter, RankLine, WarningEvent
from trainer.run.failure import remedy_for
from trainer.run.folder import RunDir
from trainer.run.preemption import Preemption

log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.5
HEARTBEAT_EVERY_S = 10.0
"""A rank that is long in one thing, as reading weights, shows so often that it lives."""
ANSWER_WITHIN_S = 10.0
"""How long the others are waited for when one rank has found that nothing moves."""
LEAVE_WITHIN_S = 30.0
"""How long a rank that was told to leave may stand still: another one may have died, and will not come."""
STACKS = signal.SIGUSR2
"""What makes a rank write its stacks even where Python itself stands still."""


@dataclass(frozen=True)
class Report:
    """Where one rank stands. waits_in: a collective and who called it, empty when it is in none.

    still_s: seconds since it moved.  stacks: of all its threads.  ended_by: what it failed with, if it did.
    """

    rank: int
    host: str
    where: str
    waits_in: str
    still_s: float
    stacks: str
    ended_by: str = ""

    def __str__(self) -> str:
        if self.ended_by:
            return f"on {self.host} ended by {self.ended_by}"
        where = f" ({self.where})" if self.where else ""
        return f"waits in {self.waits_in}{where}" if self.waits_in else f"is busy with {self.where or 'nothing known'}"


class Watchdog:
    """Watches this rank and hears of the others, as a context manager around all that the rank does.

    limit_s: how long a rank may stand still in a collective or a step.  grant: does on rank 0 what a rank asks for;
    on a thread of its own.  end: what ends the process, given its exit code.  Construction is collective.
    """

    def __init__(
        self,
        world: World,
        run: RunDir,
        limit_s: float,
        told: Preemption,
        grant: Callable[[str], None] = lambda request: None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._world, self._run, self._limit_s, self._told, self._end = world, run, limit_s, told, end
        self._heartbeat = world.heartbeat
        self._trains = threading.get_ident()
        # Machines may bear the same name: only children of one torchrun are processes of one machine for certain.
        self._processes: list[tuple[str, int, int]] = world.gather((socket.gethostname(), os.getppid(), os.getpid()))
        self._entered: tuple[str, float] = "", 0.0
        self._beaten: tuple[dict[str, Any] | None, float] = None, 0.0
        self._channel = _ControlChannel(world, run, grant)
        self._over = threading.Event()
        self._files = ExitStack()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Self:
        with suppress(OSError):  # a full disk: this file is for the worst case only
            folder = self._run.logs / "stacks"
            folder.mkdir(parents=True, exist_ok=True)
            stacks = self._files.enter_context((folder / f"rank{self._world.rank}.txt").open("a"))
            faulthandler.register(STACKS, stacks, all_threads=True)
            self._files.callback(faulthandler.unregister, STACKS)
        self._channel.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if error is not None and self._world.local_size < self._world.size:
            # torchrun on the other machines knows nothing of it, and their ranks would wait.
            mine = replace(self._report(), where="", waits_in="", ended_by=f"{type(error).__name__}: {error}")
            self._channel.report(mine.rank, asdict(mine))
        self._channel.stop()
        self._thread.join()
        self._files.close()

    def ask(self, request: str) -> None:
        """Have rank 0 do something before this rank fails. Waits until it is done, but not for long."""
        self._channel.ask(request)
        self._channel.granted.wait(ANSWER_WITHIN_S)

    def _watch(self) -> None:
        told_at: float | None = None
        while not self._over.wait(LOOK_EVERY_S):
            self._beat()
            if self._told and told_at is None:
                told_at = time.monotonic()
            still_s = self._still_s()
            if still_s > self._limit_s or self._channel.alarm:
                self._give_up()
                return
            if told_at is not None and min(still_s, time.monotonic() - told_at) > LEAVE_WITHIN_S:
                told_at = None
                if self._is_left_alone():
                    complain(f"told to leave by {self._told.by}, and others have gone")
                    self._end(1)
                    return

    def _beat(self) -> None:
        """Repeat the last heartbeat where the rank has not written one for a while."""
        line, now = self._heartbeat.line, time.monotonic()
        if line is not self._beaten[0]:
            self._beaten = line, now
        elif line and now - self._beaten[1] > HEARTBEAT_EVERY_S:
            self._beaten = line, now
            with suppress(OSError), EventWriter(self._run.rank_file(self._world.rank)) as file:
                file.write(RankLine(**{**line, "time": time.time()}))
            self._heartbeat.line = {**line, "time": time.time()}

    def _still_s(self) -> float:
        """Seconds that this rank has stood still where it should not: in one collective, or in a step."""
        now, collective = time.monotonic(), self._waits_in()
        if collective != self._entered[0]:
            self._entered = collective, now
        since = max(self._heartbeat.at, self._entered[1]) if collective else self._heartbeat.at
        return now - since if collective or self._heartbeat.moves else 0.0

    def _waits_in(self) -> str:
        """The collective this rank is in, empty when it is in none."""
        own = {thread.ident for thread in threading.enumerate()}
        with _other_threads() as frames:
            main = _collective(frames.get(self._trains))
            if not main and self._heartbeat.waits_in:
                return self._heartbeat.waits_in
            # Backward runs on threads of torch's where there is an accelerator.
            others = (_collective(frame) for number, frame in frames.items() if number not in own)
            return main or next(filter(None, others), "")

    def _is_left_alone(self) -> bool:
        """Whether torchrun or another rank of this machine is gone, or the store of the attempt cannot be reached."""
        torchrun = self._processes[self._world.rank][1]
        here = [pid for _, parent, pid in self._processes if parent == torchrun]
        return (
            torchrun != os.getppid() or not all(_is_child(pid, torchrun) for pid in here) or not self._channel.is_alive
        )

    def _report(self) -> Report:
        still_s = time.monotonic() - self._heartbeat.at
        host = self._processes[self._world.rank][0]
        return Report(self._world.rank, host, self._heartbeat.where, self._waits_in(), still_s, _all_stacks())

    def _give_up(self) -> None:
        """Tell the others, let rank 0 tell the user, and end this process."""
        mine = self._report()
        message = f"rank {mine.rank} on {mine.host} {mine}; nothing moved for {mine.still_s:.0f} s"
        log.debug(message)
        complain(f"{mine.stacks}\n{message}")
        self._channel.report(mine.rank, asdict(mine))
        self._channel.has_all.wait(ANSWER_WITHIN_S)
        reports = {rank: Report(**note) for rank, note in dict(self._channel.reports).items()}
        # Rank 0 may be the one that does not answer. The machine it is on tells: the network between may be cut.
        if self._world.rank == min(reports) and self._processes[0][:2] == self._processes[self._world.rank][:2]:
            self._tell(reports)
            self._channel.tell()
        # Rank 0 has to write before torchrun ends it for the failure of another.
        self._channel.told.wait(ANSWER_WITHIN_S)
        self._end_frozen(reports)
        self._end(1)

    def _tell(self, reports: Mapping[int, Report]) -> None:
        """On one rank: the event, and all stacks in one file."""
        hosts = [host for host, _, _ in self._processes]
        message = stand_still(reports.values(), hosts)
        file = self._run.logs / f"standstill-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        texts = [f"== rank {rank} on {one.host}: {one}\n{one.stacks}\n" for rank, one in sorted(reports.items())]
        with suppress(OSError):
            file.write_text(f"{message}\n\n" + "\n".join(texts), encoding="utf-8")
        said = f"step {self._heartbeat.step}: {message}"
        event: WarningEvent | ErrorEvent
        if self._world.restarts_left:
            event = WarningEvent(step=self._heartbeat.step, message=f"{said}; the ranks are started again")
        else:
            path = str(file.relative_to(self._run.path))
            event = ErrorEvent(step=self._heartbeat.step, message=said, remedy=remedy_for(said), log=path)
        with suppress(OSError), EventWriter(self._run.events_file) as events:
            events.write(event)

    def _end_frozen(self, reports: Mapping[int, Report]) -> None:
        """End ranks of this machine that do not answer: torchrun would wait for them. First they write their stacks."""
        here = os.getppid()
        silent = [
            pid for rank, (_, parent, pid) in enumerate(self._processes) if rank not in reports and parent == here
        ]
        frozen = [pid for pid in silent if _is_child(pid, here)]
        for signal_number in (STACKS, signal.SIGKILL):
            for pid in frozen:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal_number)
            if frozen:
                time.sleep(0.5)


class _ControlChannel:
    """Reads and writes the store on a thread of its own, which may wait for a machine that is gone."""

    def __init__(self, world: World, run: RunDir, grant: Callable[[str], None]) -> None:
        self.alarm = False
        self.told, self.has_all, self.granted = threading.Event(), threading.Event(), threading.Event()
        self._grant = grant if world.rank == 0 else None
        self._ended = threading.Event()
        self._answered = time.monotonic()
        self.reports: dict[int, dict[str, Any]] = {}
        self._world, self._run, self._store = world, run, world.store
        self._ranks = tuple(range(world.size))
        self._lines: dict[int, Any] = {}
        self._messages: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._carry, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send what is left and end. A thread that is inside the store when Python ends aborts the process."""
        self._ended.set()
        self._messages.put(None)
        self._thread.join(ANSWER_WITHIN_S)

    def report(self, rank: int, report: dict[str, Any]) -> None:
        """Say where this rank stands, and ask the others; as soon as the store can be reached."""
        self.alarm = True
        self.reports[rank] = report
        self._messages.put((f"report/{rank}", report))
        self._messages.put(("alarm", True))

    def tell(self) -> None:
        """Say that the user was told."""
        self._messages.put(("told", True))

    def ask(self, request: str) -> None:
        """Ask rank 0 for something, which it does once in an attempt."""
        self._messages.put(("request", request))

    @property
    def is_alive(self) -> bool:
        """Whether the store of this attempt answered the last time it was asked, and not long ago."""
        return self._thread.is_alive() and time.monotonic() - self._answered < 2 * ANSWER_WITHIN_S

    def _carry(self) -> None:
        more = True
        while more:
            try:
                more = self._send_messages()
                self._look()
                self._answered = time.monotonic()
            except RuntimeError as error:  # it is gone with its machine, or slow: whoever waits has limits of his own
                log.debug("the store of the ranks does not answer: %s", error)
                more = more and not self._ended.wait(LOOK_EVERY_S)

    def _send_messages(self) -> bool:
        """Send what waits. Returns False after the end."""
        wait_s = 0.1 if self.alarm else LOOK_EVERY_S
        with suppress(queue.Empty):
            while True:
                message = self._messages.get(timeout=wait_s)
                if message is None:
                    return False
                self._store.set(*message)
                wait_s = 0.0
        return True

    def _pass_on_lines(self) -> None:
        """Rank 0 writes the heartbeats of ranks that do not see its folder."""
        rank, line = self._world.rank, self._world.heartbeat.line
        if rank in self._world.guests and line != self._lines.get(rank):
            self._store.set(f"line/{rank}", line)
            self._lines[rank] = line
        for guest in self._world.guests if rank == 0 else ():
            line = self._store.get(f"line/{guest}")
            if line and line != self._lines.get(guest):
                with suppress(OSError), EventWriter(self._run.rank_file(guest)) as file:
                    file.write(RankLine(**line))
                self._lines[guest] = line

    def _look(self) -> None:
        self._pass_on_lines()
        if self._store.get("granted"):
            self.granted.set()
        elif self._grant and (request := self._store.get("request")) is not None:
            self._grant(request)
            self._store.set("granted", True)
        if not self.alarm:
            self.alarm = self._store.get("alarm") is not None
            return
        for rank in self._ranks:
            if rank not in self.reports and (note := self._store.get(f"report/{rank}")) is not None:
                self.reports[rank] = note
        if len(self.reports) == len(self._ranks):
            self.has_all.set()
        if self._store.get("told"):
            self.told.set()


def stand_still(reports: Iterable[Report], hosts: Sequence[str]) -> str:
    """A sentence about all ranks. hosts: of each rank; one without a report does not answer."""
    known = {report.rank: report for report in reports}
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        groups[str(known[rank]) if rank in known else f"on {host} does not answer"].append(rank)
    said = [f"{_ranks(ranks)} {what}" for what, ranks in groups.items()]
    longest = max((report.still_s for report in known.values()), default=0.0)
    return f"nothing moved for {longest:.0f} s: " + "; ".join(said)


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    is_row = numbers[-1] - numbers[0] == len(numbers) - 1 and len(numbers) > 2
    return "each of ranks " + (f"{numbers[0]}-{numbers[-1]}" if is_row else ", ".join(map(str, numbers)))


def _is_child(pid: int, parent: int) -> bool:
    try:
        return psutil.Process(pid).ppid() == parent
    except psutil.NoSuchProcess:
        return False


_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
_FSDP = os.path.join("torch", "distributed", "fsdp", "")
_OWN = str(Path(__file__).parents[1])
_PASS_THROUGH = ("step_time.py", "world.py")
"""Ours, but not what wanted the collective."""


@contextmanager
def _other_threads() -> Iterator[dict[int, FrameType]]:
    """The frames of all threads, by their numbers, which may be walked inside the block.

    `f_back` makes an object, for which Python 3.11 may collect garbage. A finalizer may then hand over to the thread
    that is walked, which returns from the very frame: the process ended by SIGSEGV.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def _collective(frame: FrameType | None) -> str:
    """The collective a thread is in and the line of ours that called it, empty when it is in none."""
    called = ""
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith(_C10D) or (_FSDP in file and not called):
            # The outermost is what was asked for: all_gather_object, and not the all_gather it is made of.
            called = function
        elif called and file.startswith(_OWN) and Path(file).name not in _PASS_THROUGH:
            return f"{called}, called by {Path(file).name}:{frame.f_lineno} {function}"
        frame = frame.f_back
    return called


def _all_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    with _other_threads() as frames:
        for number, frame in frames.items():
            lines = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(number, number)}:\n{lines}")
    return "\n".join([*parts, *_nccl()])


def _nccl() -> Iterator[str]:
    """What NCCL's own recorder knows of collectives that are under way: the host does not wait in them."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    with suppress(ImportError, RuntimeError):
        from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]  # CUDA builds only

        yield f"NCCL: {_dump_nccl_trace_json(True, True).decode()}"
