"""What this machine is good for, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.launcher.doctor import Check
from trainer.metrics.gpus import Gpu


def headline(checks: Sequence[Check], gpus: Sequence[Gpu]) -> str:
    """Return whether runs can start here, and on what.

    Args:
        checks: Results of the doctor's checks.
        gpus: This machine's GPUs.
    """
    failed = [check.what for check in checks if check.verdict == "fail"]
    if failed:
        return f"Runs may not start: see {', '.join(failed)}."
    advice = sum(check.verdict == "warn" for check in checks)
    more = "" if not advice else f" {advice} remark{'s' if advice > 1 else ''} below."
    if not gpus:
        return f"CPU only: the demo model trains here, and small language models; FLUX.2 and its kind need GPUs.{more}"
    smallest = min(gpus, key=lambda gpu: gpu.memory)
    count = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    each = "" if len(gpus) == 1 else " each"
    return f"{count}, {smallest.memory / 1024:.0f} GiB{each}: runs can start. New run says which models fit.{more}"
