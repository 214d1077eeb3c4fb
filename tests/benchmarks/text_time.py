"""How long a tiny byte-level model takes to learn our documents from nothing.

`python -m tests.benchmarks.text_time`. The first nine tenths are trained on, the last is held out.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.commands import takes_no_arguments
from tests.readme import prose
from tests.runs import alone, make_run, text_config
from trainer.run.events import AnyEvent, StepEvent, ValidationEvent
from trainer.train.loop import Trainer

SMOOTHED = 10
"""Steps over which the loss is averaged."""
MOST_STEPS = 2000


@dataclass(frozen=True)
class Learned:
    """nats per byte: entropy of the single bytes, losses on what was trained on and on what was held out.

    start_s: until the first step.  seconds: from there until the training loss was below half of the entropy.
    """

    entropy: float
    loss: float
    held_out: float
    steps: int
    start_s: float
    seconds: float


def learn(root: Path) -> Learned:
    """Train until the loss is below half of the entropy, for MOST_STEPS at most."""
    text = prose().encode()
    cut = len(text) * 9 // 10
    (root / "text").mkdir()
    (root / "text" / "train.txt").write_text(text[:cut].decode(errors="ignore"), encoding="utf-8")
    (root / "held.txt").write_text(text[cut:].decode(errors="ignore"), encoding="utf-8")
    cfg = text_config(
        root / "text",
        adapter__type="none",
        data__length=256,
        data__validation=str(root / "held.txt"),
        optim__lr=4e-3,
        optim__beta2=0.95,
        train__steps=MOST_STEPS,
        train__batch_size=4,
        train__micro_batch=4,
    )
    events: list[AnyEvent] = []
    began = time.perf_counter()
    trainer = Trainer(cfg, make_run(root, cfg, "run"), alone(), root / "cache", events.append)
    start_s = time.perf_counter() - began
    half = entropy(text[:cut]) / 2
    losses: list[float] = []
    began = time.perf_counter()
    try:
        while len(losses) < MOST_STEPS and not (len(losses) >= SMOOTHED and _mean(losses) < half):
            trainer.train_step()
            losses = [event.loss for event in events if isinstance(event, StepEvent)]
        seconds = time.perf_counter() - began
        trainer.validate()
    finally:
        trainer.close()
    held_out = next(event.loss for event in events if isinstance(event, ValidationEvent))
    return Learned(2 * half, _mean(losses), held_out, len(losses), start_s, seconds)


def entropy(text: bytes) -> float:
    """Of the single bytes, in nats: what a model that only knows how often each occurs would lose."""
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log(share) for share in shares)


def _mean(losses: list[float]) -> float:
    return sum(losses[-SMOOTHED:]) / len(losses[-SMOOTHED:])


def main() -> None:
    """Print it."""
    with tempfile.TemporaryDirectory() as folder:
        found = learn(Path(folder))
    print(
        f"single bytes {found.entropy / math.log(2):.3f} bits; after {found.steps} steps in {found.seconds:.1f} s "
        f"(and {found.start_s:.1f} s to start) {found.loss / math.log(2):.3f}, held out "
        f"{found.held_out / math.log(2):.3f} bits per byte"
    )


if __name__ == "__main__":
    takes_no_arguments(__doc__)
    main()
