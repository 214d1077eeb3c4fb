"""A chain: one run, killed at instants of chosen kinds, continued each time, and let to its end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import psutil

from tests.runs import make_run, run_config
from tests.survival.checks import Reference, end_problems, file_problems, processes_of, story_problems
from trainer.config.schema import RunConfig
from trainer.launcher import preflight, torchrun
from trainer.run import manifest
from trainer.run import process as processes
from trainer.run.events import AnyEvent, CheckpointEvent, EventReader, State, StatusEvent, StepEvent, last_state
from trainer.run.folder import RunDir
from trainer.run.process import Launch

Aim = Literal["step", "save", "caching", "sampling", "export", "any"]
"""What a kill waits for. any: no event, only a time since the start, from the first moment on."""
Target = Literal["rank", "torchrun", "run"]
"""One rank, torchrun alone, or all processes of the run."""
Phase = Literal["start-up", "caching", "loading", "step", "save", "sampling", "export", "end"]
"""What the run was doing when it was killed. save: a checkpoint was being written, removed, or waited for."""

PHASE_OF: dict[State, Phase] = {
    "created": "start-up",
    "starting": "start-up",
    "encoding": "caching",
    "loading": "loading",
    "training": "step",
    "sampling": "sampling",
    "saving": "save",
    "exporting": "export",
    "finished": "end",
    "stopped": "end",
}
STEPS, CHECKPOINT_EVERY, SAMPLE_EVERY = 90, 5, 10
MOST_STEPS = 12
"""Steps until a kill: a run of 90 must not end before its last kills."""
PATIENCE_S = 120
"""Longest wait for anything a run does, on a machine that has other work."""
POLL_S, IDLE_POLL_S = 0.004, 0.02
"""Between two looks: while the ranks only import they need the cores themselves."""


def survival_config(pictures: Path, steps: int = STEPS) -> RunConfig:
    """A tiny run on two ranks that draws random numbers wherever a run can, and saves and samples often."""
    return run_config(
        pictures,
        adapter={"type": "lora", "rank": 4, "dropout": 0.1},
        data={"path": str(pictures), "resolution": 64, "caption_dropout": 0.2, "validation": 2, "validation_every": 10},
        train={"steps": steps, "batch_size": 2, "precision": "fp32", "seed": 3},
        optim={"lr": 1e-3, "ema": 0.9, "warmup": 5, "schedule": "cosine"},
        parallel={"device": "cpu", "devices": 2, "strategy": "full"},
        checkpoint={"every": CHECKPOINT_EVERY, "keep": 2},
        sample={"every": SAMPLE_EVERY, "prompts": ("a fox", "a hen"), "size": (64, 64), "steps": 4},
    )


@dataclass(frozen=True)
class Durations:
    """Seconds that each part of the reference took: a kill comes at a random instant within."""

    start_up: float
    caching: float
    sampling: float
    step: float
    save: float
    export: float

    @classmethod
    def of(cls, events: Sequence[AnyEvent]) -> Durations:
        states = [event for event in events if isinstance(event, StatusEvent)]

        def first(state: State) -> float:
            return next(event.time for event in states if event.state == state)

        sampled = [b.time - a.time for a, b in pairwise(states) if a.state == "sampling"]
        saved = [event.time for event in events if isinstance(event, CheckpointEvent)][-1]
        return cls(
            start_up=states[1].time - states[0].time,
            caching=first("loading") - first("encoding"),
            sampling=min(sampled),
            step=statistics.median(event.seconds for event in events if isinstance(event, StepEvent)),
            save=saved - first("saving"),
            export=first("finished") - first("exporting"),
        )


@dataclass(frozen=True)
class Kill:
    """One kill as it was. drafting: whether a checkpoint was being written, whatever else went on.

    step: the last one told.  seconds: from this start to the next.  end: what the run folder says became of the start.
    """

    aim: Aim
    phase: Phase
    target: Target
    drafting: bool
    step: int
    after_s: float
    seconds: float
    end: State


@dataclass
class Outcome:
    """What a chain came to. missed: starts that ended by themselves before they could be killed."""

    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missed: int = 0
    seconds: float = 0.0


def make_reference(folder: Path, cfg: RunConfig) -> Reference:
    """Train the config to its end in one go, with a checkpoint of every step to compare others with."""
    every_step = _saving_every_step(cfg)
    run = make_run(folder, every_step, "run")
    torchrun.start(every_step, run)
    state = processes.wait(run, PATIENCE_S)
    if state != "finished":
        raise RuntimeError(f"{run.path}: the reference {state}")
    return Reference(run)


def _saving_every_step(cfg: RunConfig) -> RunConfig:
    return RunConfig.model_validate({**cfg.model_dump(), "checkpoint": {"every": 1, "keep": 10000}})


def planned(numbers: random.Random, count: int) -> list[tuple[Aim, Target]]:
    """The kills of a chain. Those that need the end of the run come last: what was trained is not trained again."""
    endings: tuple[Aim, ...] = ("export", "sampling", "any")
    late: list[Aim] = ["export", numbers.choice(endings)]
    often: tuple[Aim, ...] = ("step", "save", "save", "caching", "sampling", "any")  # a save is short, and often missed
    early: list[Aim] = numbers.choices(often, k=max(0, count - len(late)))
    aims = (early + late)[-count:]
    return [(aim, numbers.choice(get_args(Target))) for aim in aims]


class Chain:
    """One run in `folder`, killed as `kills` says, at instants that `numbers` draws."""

    def __init__(
        self,
        folder: Path,
        cfg: RunConfig,
        reference: Reference,
        kills: Sequence[tuple[Aim, Target]],
        numbers: random.Random,
    ) -> None:
        self._cfg, self._reference, self._numbers = cfg, reference, numbers
        self._planned = list(kills)
        self._durations = Durations.of(reference.events)
        self._seen: set[str] = set()
        self.run = make_run(folder, cfg, "run")
        self.outcome = Outcome()

    def go(self) -> Outcome:
        """Kill, check and continue until all kills were made and the run has ended well."""
        began = time.monotonic()
        try:
            while self._planned:
                self._one_kill()
            self._last_start()
        finally:
            for process in processes_of(self.run):
                process.kill()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _one_kill(self) -> None:
        began = time.monotonic()
        aim, target = self._planned.pop(0)
        life = self._start(aim)
        if self._reached(aim, life):
            kill = life.kill(aim, target, self._numbers)
            end = self._after(life, torchrun_only=kill.target == "torchrun")
            self.outcome.kills.append(replace(kill, end=end, seconds=time.monotonic() - began))
            return
        self._after(life)
        self.outcome.missed += 1
        if self.outcome.missed > 20:
            raise RuntimeError(f"{self.run.path}: 20 starts ended before they could be killed")
        self._planned.append(("export", target))

    def _start(self, aim: Aim) -> Life:
        before = manifest.newest_step(self.run.checkpoints)
        told = [e.step for e in EventReader(self.run.events_file).read() if isinstance(e, CheckpointEvent)]
        if max(told, default=0) > before:
            self._problem(f"checkpoint {max(told)} was told, the newest is {before}")
        if aim == "caching":
            for example in (self.run.path.parent / "cache" / "examples").rglob("*.safetensors"):
                example.unlink()
        first = not self.run.launch_file.exists()
        cfg = self._cfg if first else preflight.continued_run(self.run, ()).config
        return Life(self.run, cfg, before)

    def _reached(self, aim: Aim, life: Life) -> bool:
        """Wait for a random instant within what is aimed at. False when the run has ended before."""
        d, numbers = self._durations, self._numbers
        match aim:
            case "step":
                wanted = numbers.randint(1, MOST_STEPS)
                within, reached = d.step, life.wait(lambda: life.count(StepEvent) >= wanted)
            case "save":
                within, reached = 0.7 * d.save, life.wait(life.drafting)
            case "caching":
                within, reached = d.caching, life.wait(lambda: last_state(life.events) == "encoding")
            case "sampling":
                within, reached = d.sampling, life.wait(lambda: last_state(life.events) == "sampling")
            case "export":
                within, reached = d.export, life.wait(lambda: last_state(life.events) == "exporting")
            case "any":
                instant = numbers.uniform(0, 1.4 * d.start_up)
                within, reached = 0.0, life.wait(lambda: life.age >= instant or life.count(StepEvent) >= MOST_STEPS)
        return reached and life.outlive(numbers.uniform(0, within))

    def _after(self, life: Life, torchrun_only: bool = False) -> State:
        """Let the run come to rest and look at everything. Returns what the run folder says of it."""
        life.wait_for_end()
        if torchrun_only:
            # Ranks without torchrun leave by themselves, unless somebody looks at the run before.
            time.sleep(self._numbers.choice((0.0, self._numbers.uniform(0, 2))))
        processes.record_end(self.run)
        self._check_no_process()
        life.read()
        for problem in story_problems(life.events, life.before, self._reference):
            self._problem(problem)
        for problem in file_problems(self.run, self._reference, self._seen):
            self._problem(problem)
        return processes.status(self.run)

    def _check_no_process(self) -> None:
        deadline = time.monotonic() + 5
        while left := processes_of(self.run):
            if time.monotonic() > deadline:
                self._problem(f"{len(left)} processes live on")
                break
            time.sleep(0.01)

    def _last_start(self) -> None:
        state = self._after(self._start("any"))
        if state != "finished":
            self._problem(f"the last start {state}")
        for problem in end_problems(self.run, self._reference, self._cfg.train.steps):
            self._problem(problem)

    def _problem(self, text: str) -> None:
        self.outcome.problems.append(f"after {len(self.outcome.kills)} kills: {text}")


class Life:
    """One start of a run, followed from outside. before: steps of the newest checkpoint it began with."""

    def __init__(self, run: RunDir, cfg: RunConfig, before: int) -> None:
        self._run, self.before = run, before
        self._reader = EventReader(run.events_file)
        self._reader.read()
        self.events: list[AnyEvent] = []
        self._began = time.monotonic()
        self._argv = torchrun.start(cfg, run).argv
        started = Launch.read(run)
        assert started is not None
        self._torchrun = psutil.Process(started.pid)

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def read(self) -> None:
        """Add what was told since to `events`."""
        self.events += self._reader.read()

    def count(self, kind: type[AnyEvent]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def drafting(self) -> bool:
        """Whether a checkpoint is being written or removed. What an earlier start left does not count."""
        trains = any(isinstance(event, StatusEvent) and event.state == "training" for event in self.events)
        return trains and any(name.startswith(".step-") for name in os.listdir(self._run.checkpoints))

    def wait(self, reached: Callable[[], bool]) -> bool:
        """Wait until something is so. False when torchrun has ended before."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            ended = not self._lives()
            self.read()
            if reached():
                return not ended
            if ended:
                return False
            time.sleep(POLL_S if len(self.events) > 1 else IDLE_POLL_S)
        raise TimeoutError(f"{self._run.path}: did not come to what was waited for within {PATIENCE_S} s")

    def outlive(self, seconds: float) -> bool:
        """Wait so long. False when torchrun has ended before."""
        time.sleep(seconds)
        return self._lives()

    def kill(self, aim: Aim, target: Target, numbers: random.Random) -> Kill:
        """Send SIGKILL. A rank that is to die may not live yet, or no more: then it is torchrun."""
        ranks = [child.pid for child in self._torchrun.children() if self._is_rank(child)]
        target = target if ranks or target == "run" else "torchrun"
        victims = {"rank": [numbers.choice(ranks or [0])], "torchrun": [self._torchrun.pid]}.get(target)
        drafting, now = self.drafting(), time.time()
        for victim in victims or [self._torchrun.pid, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        after_s = self.age
        self.read()
        told = [event for event in self.events if event.time <= now]
        phase = PHASE_OF[last_state(told)]
        phase = "save" if phase == "step" and drafting else phase
        step = max((event.step for event in told), default=0)
        return Kill(aim, phase, target, drafting, step, after_s, 0.0, "failed")

    def wait_for_end(self) -> None:
        """Wait until torchrun has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while self._lives():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._run.path}: torchrun did not end within {PATIENCE_S} s")
            time.sleep(IDLE_POLL_S)

    def _lives(self) -> bool:
        try:
            return self._torchrun.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def _is_rank(self, child: psutil.Process) -> bool:
        try:
            return child.cmdline()[-3:] == self._argv[-3:]
        except psutil.NoSuchProcess:
            return False
