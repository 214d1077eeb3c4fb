"""How often a tiny byte-level model, which begins with random weights, prefers English after a minute of DPO.

`python -m tests.benchmarks.preference_time`. The chosen answer of a pair is the end of a sentence of our documents, the
rejected one has the letters of each of its words in reverse. The pairs of the last tenth are held out.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.commands import takes_no_arguments
from tests.readme import prose
from tests.runs import alone, make_run, text_config
from trainer.run.events import AnyEvent, ValidationEvent
from trainer.train.loop import Trainer

SECONDS = 60
PROMPT, ANSWER = 24, 40
"""Characters of a prompt and of an answer, about."""


@dataclass(frozen=True)
class Preferred:
    """accuracy: share of the held-out pairs whose chosen answer wins.  margin: their mean.  pairs: their number."""

    accuracy: float
    margin: float
    pairs: int
    steps: int
    seconds: float


def make_pairs(text: str) -> list[dict[str, str]]:
    """One pair of each sentence that is long enough."""
    sentences = [" ".join(one.split()) for one in re.split(r"(?<=[.;:])\s", text)]
    pairs = []
    for sentence in sentences:
        at = sentence.find(" ", PROMPT)
        prompt, answer = sentence[: at + 1], sentence[at + 1 :][:ANSWER]
        backwards = re.sub(r"[A-Za-z]+", lambda word: word[0][::-1], answer)
        if at > 0 and len(answer) > ANSWER // 2 and backwards != answer:
            pairs.append({"prompt": prompt, "chosen": answer, "rejected": backwards})
    return pairs


def learn(root: Path, seconds: float = SECONDS) -> Preferred:
    """Train for so many seconds, then measure the held-out pairs."""
    pairs = make_pairs(prose())
    cut = len(pairs) * 9 // 10
    for name, part in (("train", pairs[:cut]), ("held", pairs[cut:])):
        (root / f"{name}.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in part), encoding="utf-8")
    cfg = text_config(
        root / "train.jsonl",
        adapter__rank=32,
        data__length=512,
        data__validation=str(root / "held.jsonl"),
        objective={"dpo_beta": 0.1},
        optim__lr=3e-3,
        train__steps=100_000,
        train__batch_size=4,
        train__micro_batch=4,
    )
    events: list[AnyEvent] = []
    trainer = Trainer(cfg, make_run(root, cfg, "run"), alone(), root / "cache", events.append)
    began = time.perf_counter()
    try:
        while time.perf_counter() - began < seconds:
            trainer.train_step()
        spent = time.perf_counter() - began
        trainer.validate()
    finally:
        trainer.close()
    found = next(event.metrics for event in events if isinstance(event, ValidationEvent))
    return Preferred(found["accuracies"], found["margins"], len(pairs) - cut, trainer.step, spent)


def main() -> None:
    """Print it."""
    with tempfile.TemporaryDirectory() as folder:
        found = learn(Path(folder))
    print(
        f"after {found.steps} steps in {found.seconds:.0f} s the chosen answer wins in {found.accuracy:.1%} of "
        f"{found.pairs} held-out pairs, by {found.margin:.2f}"
    )


if __name__ == "__main__":
    takes_no_arguments(__doc__)
    main()
