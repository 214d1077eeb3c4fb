"""A thread on every rank that notices when training hangs, reports which rank waits for what, and ends the run.

Ranks may wait for each other, a machine may be gone, a process frozen. The collectives themselves would only time out,
each rank by itself and without a word about the others. See DECISIONS 101, 102.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import math
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

from trainer.distributed.world import World
from trainer.run.events import ErrorEvent, EventWriter, RankLine, WarningEvent
from trainer.run.failure import remedy_for
from trainer.run.folder import RunDir
from trainer.run.preemption import Preemption
from trainer.system.errors import InputError
from trainer.system.files import opened_to_append
from trainer.system.terminal import complain

log = logging.getLogger(__name__)
POLL_EVERY_S = 0.5
HEARTBEAT_EVERY_S = 10.0
"""How often a rank that is long in one phase, such as reading weights, repeats its heartbeat to show that it lives."""
ANSWER_WITHIN_S = 10.0
"""How long a rank that hangs waits for the reports of the others."""
LIFE_EVERY_S = 5.0
"""How often a rank shows the others that it is not frozen and that its machine is there."""
LEAVE_WITHIN_S = 30.0
"""How long a rank that received a signal to leave may hang: another rank may have died and never come."""
STACKS = signal.SIGUSR2
"""The signal on which a rank writes its stacks, even where Python itself is blocked."""


@dataclass(frozen=True)
class Report:
    """The state of one rank while the run hangs.

    Attributes:
        where: Phase and block, for example "forward of blocks.0".
        waits_in: The collective it is in and who called it; empty when it is in none.
        stalled_s: Seconds since it last moved on.
        stacks: Those of all its threads.
        ended_by: The error it failed with, if it did.
    """

    rank: int
    host: str
    where: str
    waits_in: str
    stalled_s: float
    stacks: str
    ended_by: str = ""

    def __str__(self) -> str:
        if self.ended_by:
            return f"on {self.host} ended by {self.ended_by}"
        where = f" ({self.where})" if self.where else ""
        return f"waits in {self.waits_in}{where}" if self.waits_in else f"is busy with {self.where or 'nothing known'}"


class Watchdog:
    """Watches this rank and reads the reports of the others: a context manager around all that the rank does.

    Construction is collective.

    Args:
        limit_s: How long a rank may hang in a collective or a step.
        preemption: Whether this process received a signal to leave.
        answer: Does on rank 0 what a rank requests, on a thread of its own.
        end: Ends the process, given its exit code.
    """

    def __init__(
        self,
        world: World,
        run: RunDir,
        limit_s: float,
        preemption: Preemption,
        answer: Callable[[str], None] = lambda request: None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._world, self._run, self._limit_s, self._end = world, run, limit_s, end
        self._preemption = preemption
        self._heartbeat = world.heartbeat
        self._training_thread = threading.get_ident()
        # Machines may have the same name: only children of one torchrun are certainly processes of one machine.
        self._processes: list[tuple[str, int, int]] = world.gather((socket.gethostname(), os.getppid(), os.getpid()))
        self._collective: tuple[str, float] = "", 0.0  # the one seen last, and since when
        self._line: tuple[dict[str, Any] | None, float] = None, 0.0  # the heartbeat seen last, and since when
        self._channel = _ControlChannel(world, run, answer)
        self._closed = threading.Event()
        self._files = ExitStack()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Self:
        with suppress(OSError, InputError):  # a full disk: this file is for the worst case only
            folder = self._run.logs / "stacks"
            folder.mkdir(parents=True, exist_ok=True)
            file = opened_to_append(folder / f"rank{self._world.rank}.txt")
            stacks = self._files.enter_context(open(file, "a", encoding="utf-8"))
            faulthandler.register(STACKS, stacks, all_threads=True)
            self._files.callback(faulthandler.unregister, STACKS)
        self._channel.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._closed.set()
        if error is not None and self._world.local_size < self._world.size:
            # torchrun on the other machines does not learn of the error, and their ranks would wait.
            mine = replace(self._report(), where="", waits_in="", ended_by=f"{type(error).__name__}: {error}")
            self._channel.report(mine.rank, asdict(mine))
        self._channel.stop()
        self._thread.join()
        self._files.close()

    def request(self, request: str) -> None:
        """Have rank 0 do something before this rank fails. Waits for its acknowledgement, but not for long."""
        self._channel.request(request)
        self._channel.acknowledged.wait(ANSWER_WITHIN_S)

    def _watch(self) -> None:
        preempted_at: float | None = None
        while not self._closed.wait(POLL_EVERY_S):
            self._repeat_heartbeat()
            if self._preemption and preempted_at is None:
                preempted_at = time.monotonic()
            stalled_s = self._stalled_s()
            # While ranks save or encode, one may wait for another for long: only silence tells that it never comes.
            is_lost = self._channel.silent_s > self._limit_s + ANSWER_WITHIN_S
            if stalled_s > self._limit_s or is_lost or self._channel.alarm:
                self._end_run()
                return
            if preempted_at is not None and min(stalled_s, time.monotonic() - preempted_at) > LEAVE_WITHIN_S:
                preempted_at = None
                if self._has_lost_others():
                    complain(f"received {self._preemption.by} while other ranks had already exited; exiting")
                    self._end(1)
                    return

    def _repeat_heartbeat(self) -> None:
        """Repeat the last heartbeat where the rank has not written one for a while."""
        with self._heartbeat.writing:
            line, now = self._heartbeat.line, time.monotonic()
            if line is not self._line[0]:
                self._line = line, now
            elif line and now - self._line[1] > HEARTBEAT_EVERY_S:
                repeated = {**line, "time": time.time()}
                self._heartbeat.line, self._line = repeated, (repeated, now)
                with suppress(OSError), EventWriter(self._run.rank_file(self._world.rank)) as file:
                    file.write(RankLine(**repeated))

    def _stalled_s(self) -> float:
        """Seconds without progress where there should be some: in one collective, or in a step; 0 elsewhere."""
        now, collective = time.monotonic(), self._waits_in()
        if collective != self._collective[0]:
            self._collective = collective, now
        since = max(self._heartbeat.at, self._collective[1]) if collective else self._heartbeat.at
        return now - since if collective or self._heartbeat.moves else 0.0

    def _waits_in(self) -> str:
        """The collective this rank is in, empty when it is in none."""
        own = {thread.ident for thread in threading.enumerate()}
        with _other_threads() as frames:
            main = _collective(frames.get(self._training_thread))
            if not main and self._heartbeat.waits_in:
                return self._heartbeat.waits_in
            # With an accelerator, backward runs on threads of torch.
            others = (_collective(frame) for number, frame in frames.items() if number not in own)
            return main or next(filter(None, others), "")

    def _has_lost_others(self) -> bool:
        """Whether torchrun or another rank of this machine is gone, or the store of the attempt does not answer."""
        torchrun = self._processes[self._world.rank][1]
        here = [pid for _, parent, pid in self._processes if parent == torchrun]
        return (
            torchrun != os.getppid() or not all(_is_child(pid, torchrun) for pid in here) or not self._channel.is_alive
        )

    def _report(self) -> Report:
        stalled_s = time.monotonic() - self._heartbeat.at
        host = self._processes[self._world.rank][0]
        return Report(self._world.rank, host, self._heartbeat.where, self._waits_in(), stalled_s, _all_stacks())

    def _end_run(self) -> None:
        """Report to the other ranks, have one of them write the event, and end this process."""
        mine = self._report()
        message = f"rank {mine.rank} on {mine.host} {mine}; nothing moved for {mine.stalled_s:.0f} s"
        log.debug(message)
        complain(f"{mine.stacks}\n{message}")
        self._channel.report(mine.rank, asdict(mine))
        self._channel.has_all.wait(ANSWER_WITHIN_S)
        reports = {rank: Report(**note) for rank, note in dict(self._channel.reports).items()}
        # Rank 0 may be the one that hangs: then the lowest other rank of its machine writes, as the network may be cut.
        if self._world.rank == min(reports) and self._processes[0][:2] == self._processes[self._world.rank][:2]:
            self._write_event(reports)
            self._channel.confirm_event()
        # The event has to be written before torchrun ends its writer for the failure of another rank.
        self._channel.event_written.wait(ANSWER_WITHIN_S)
        self._kill_frozen(reports)
        self._end(1)

    def _write_event(self, reports: Mapping[int, Report]) -> None:
        """Write the event, and all stacks in one file. Only one rank does this."""
        hosts = [host for host, _, _ in self._processes]
        hang = describe_hang(reports.values(), hosts)
        file = self._run.logs / f"standstill-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        texts = [f"== rank {rank} on {one.host}: {one}\n{one.stacks}\n" for rank, one in sorted(reports.items())]
        with suppress(OSError):
            file.write_text(f"{hang}\n\n" + "\n".join(texts), encoding="utf-8")
        message = f"step {self._heartbeat.step}: {hang}"
        event: WarningEvent | ErrorEvent
        if self._world.restarts_left:
            event = WarningEvent(step=self._heartbeat.step, message=f"{message}; the ranks are started again")
        else:
            path = str(file.relative_to(self._run.path))
            event = ErrorEvent(step=self._heartbeat.step, message=message, remedy=remedy_for(message), log=path)
        with suppress(OSError), EventWriter(self._run.events_file) as events:
            events.write(event)

    def _kill_frozen(self, reports: Mapping[int, Report]) -> None:
        """Kill ranks of this machine that sent no report, after they wrote their stacks: torchrun waits for them."""
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
    """Messages between ranks through the store, on a thread of its own, which may wait for a machine that is gone.

    Keys: `request` (to rank 0) and `acknowledged`; `alarm` (some rank hangs or failed), `report/<rank>` and
    `event_written`; `line/<rank>`, the heartbeat of a rank that does not see the run folder; `life/<rank>`, another
    number every few seconds, and None once the rank has left.

    Attributes:
        silent_s: On rank 0, how long another rank has shown no life; 0 elsewhere.
        alarm: Whether some rank hangs or failed.
        reports: {rank: its report}, as far as they have arrived.
        has_all: Set when every rank has reported.
        event_written: Set when the event about the hang is in the run folder.
        acknowledged: Set when rank 0 has done what was requested.
    """

    def __init__(self, world: World, run: RunDir, answer: Callable[[str], None]) -> None:
        self.alarm = False
        self.silent_s = 0.0
        self._shown_at = -math.inf
        self._looks: dict[int, tuple[Any, int]] = {}  # {rank: (the life seen last, looks since then)}
        self.event_written, self.has_all, self.acknowledged = threading.Event(), threading.Event(), threading.Event()
        self._answer = answer if world.rank == 0 else None
        self._ended = threading.Event()
        self._answered_at = time.monotonic()
        self.reports: dict[int, dict[str, Any]] = {}
        self._world, self._run, self._store = world, run, world.store
        self._ranks = tuple(range(world.size))
        self._lines: dict[int, Any] = {}
        self._messages: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._exchange, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send what is left and end. A thread that is inside the store when Python ends aborts the process."""
        self._ended.set()
        self._messages.put((f"life/{self._world.rank}", None))
        self._messages.put(None)
        self._thread.join(ANSWER_WITHIN_S)

    def report(self, rank: int, report: dict[str, Any]) -> None:
        """Report what this rank does and raise the alarm, as soon as the store can be reached."""
        self.alarm = True
        self.reports[rank] = report
        self._messages.put((f"report/{rank}", report))
        self._messages.put(("alarm", True))

    def confirm_event(self) -> None:
        """Let the other ranks know that the event is written."""
        self._messages.put(("event_written", True))

    def request(self, request: str) -> None:
        """Send a request to rank 0, which answers one per attempt."""
        self._messages.put(("request", request))

    @property
    def is_alive(self) -> bool:
        """Whether the store of this attempt answered the latest call, not long ago."""
        return self._thread.is_alive() and time.monotonic() - self._answered_at < 2 * ANSWER_WITHIN_S

    def _exchange(self) -> None:
        more = True
        while more:
            try:
                more = self._send_messages()
                if more:
                    self._show_life()
                self._read_messages()
                self._answered_at = time.monotonic()
            except RuntimeError as error:  # it is gone with its machine, or slow: whoever waits has a limit of its own
                log.debug("the store of the ranks does not answer: %s", error)
                more = more and not self._ended.wait(POLL_EVERY_S)

    def _send_messages(self) -> bool:
        """Send what waits. Returns False after the end."""
        wait_s = 0.1 if self.alarm else POLL_EVERY_S
        with suppress(queue.Empty):
            while True:
                message = self._messages.get(timeout=wait_s)
                if message is None:
                    return False
                self._store.set(*message)
                wait_s = 0.0
        return True

    def _show_life(self) -> None:
        """Show that this rank lives, and have rank 0 count its looks at others that show nothing new.

        Looks are counted, not seconds: this thread may itself have waited for the store.
        """
        now = time.monotonic()
        if now - self._shown_at < LIFE_EVERY_S:
            return
        self._shown_at = now
        self._store.set(f"life/{self._world.rank}", now)
        for rank in self._ranks[1:] if self._world.rank == 0 else ():
            life = self._store.get(f"life/{rank}")
            seen, looks = self._looks.get(rank, (None, 0))
            self._looks[rank] = life, looks + 1 if life is not None and life == seen else 0
        self.silent_s = LIFE_EVERY_S * max((looks for _, looks in self._looks.values()), default=0)

    def _read_messages(self) -> None:
        self._forward_heartbeats()
        if self._store.get("acknowledged"):
            self.acknowledged.set()
        elif self._answer and (request := self._store.get("request")) is not None:
            self._answer(request)
            self._store.set("acknowledged", True)
        if not self.alarm:
            self.alarm = self._store.get("alarm") is not None
            return
        for rank in self._ranks:
            if rank not in self.reports and (note := self._store.get(f"report/{rank}")) is not None:
                self.reports[rank] = note
        if len(self.reports) == len(self._ranks):
            self.has_all.set()
        if self._store.get("event_written"):
            self.event_written.set()

    def _forward_heartbeats(self) -> None:
        """Have rank 0 write the heartbeats of ranks that do not see its folder."""
        rank, line = self._world.rank, self._world.heartbeat.line
        if rank in self._world.remote_ranks and line != self._lines.get(rank):
            self._store.set(f"line/{rank}", line)
            self._lines[rank] = line
        for remote in self._world.remote_ranks if rank == 0 else ():
            line = self._store.get(f"line/{remote}")
            if line and line != self._lines.get(remote):
                with suppress(OSError), EventWriter(self._run.rank_file(remote)) as file:
                    file.write(RankLine(**line))
                self._lines[remote] = line


def describe_hang(reports: Iterable[Report], hosts: Sequence[str]) -> str:
    """A sentence that names what every rank does; one without a report does not answer.

    Args:
        hosts: That of each rank.
    """
    by_rank = {report.rank: report for report in reports}
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        groups[str(by_rank[rank]) if rank in by_rank else f"on {host} does not answer"].append(rank)
    parts = [f"{_ranks(ranks)} {state}" for state, ranks in groups.items()]
    longest = max((report.stalled_s for report in by_rank.values()), default=0.0)
    return f"nothing moved for {longest:.0f} s: " + "; ".join(parts)


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
"""Files of ours that only pass a collective on: whoever called them is named instead."""


@contextmanager
def _other_threads() -> Iterator[dict[int, FrameType]]:
    """{id of a thread: its frame}, which may be walked inside the block.

    `f_back` makes an object, for which Python 3.11 may collect garbage. A finalizer may then hand over to the thread
    that is walked, which returns from that very frame: the process ended by SIGSEGV.
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
            # The outermost is the one that was called: all_gather_object, not the all_gather it is made of.
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
    """NCCL's own record of the collectives that are under way: the host does not wait in them."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    with suppress(ImportError, RuntimeError):
        from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]  # CUDA builds only

        yield f"NCCL: {_dump_nccl_trace_json(True, True).decode()}"
