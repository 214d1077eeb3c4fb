"""How long a plan takes: typed, beside the form, and of a model that nobody recorded yet.

python -m tests.benchmarks.plan_time          3 to 10 minutes; exit code 1 when a limit is exceeded
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from app.form.plan_preview import THIS_MACHINE, PlanPreviews
from tests.commands import takes_no_arguments
from trainer.config.load import load_config, load_config_text
from trainer.config.schema import RunConfig
from trainer.plan.hardware import CARDS
from trainer.plan.search.fixes import planned
from trainer.plan.store import find_model

ROOT = Path(__file__).parents[2]
PRESETS = [preset for preset in sorted((ROOT / "presets").glob("*.yaml")) if preset.stem != "demo-base-cpu"]
"""All but the one whose model is made by `make demo-base`."""
TYPED_LIMIT_S, PAGE_LIMIT_S, RECORDED_LIMIT_S = 1.5, 0.1, 30.0
NEW = (
    ("flux2", "klein-4b", "quantize.format=fp8"),
    ("flux1", "dev", "quantize.format=fp8"),
    ("sd3", "sd35-large", "adapter.type=dora"),
    ("sdxl", "base", "quantize.format=fp8"),
)
"""Runs of published models; no table of them in fp32 comes with the program."""


def typed_s(preset: Path) -> float:
    """Of `launch.py --plan` in a new process."""
    began = time.perf_counter()
    argv = [sys.executable, "launch.py", "--plan", str(preset), "--gpus", "4x24gb", "parallel.nodes=1"]
    subprocess.run([*argv, "train.batch_size=4", "parallel.strategy=full"], cwd=ROOT, capture_output=True, check=False)
    return time.perf_counter() - began


def page_s(cfg: RunConfig, target: str, previews: PlanPreviews) -> float:
    """Of the bar and its buttons after a change, on GPUs of a kind."""
    began = time.perf_counter()
    previews.of(cfg, target, ())
    return time.perf_counter() - began


def recorded_s(family: str, architecture: str, field: str) -> float:
    """Of what is recorded once."""
    named = (f"model.family={family}", "model.path=published/model", f"model.options.architecture={architecture}")
    cfg = load_config_text("data: {path: .}", (*named, field, "train.precision=fp32"), Path("new.yaml")).config
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        find_model(cfg, Path(cache))
        return time.perf_counter() - began


def main() -> int:
    """Measure and judge."""
    typed = {preset.stem: typed_s(preset) for preset in PRESETS}
    slowest = max(typed, key=typed.__getitem__)
    print(f"launch.py --plan, {len(typed)} presets: {min(typed.values()):.2f} to {typed[slowest]:.2f} s ({slowest})")
    gc.freeze()  # as the page's process does
    previews = PlanPreviews(Path("nowhere"))
    cfgs = [load_config(preset).config for preset in PRESETS]
    for cfg in cfgs:
        planned(cfg, None, Path("nowhere"))  # reads what was recorded
    waits = [page_s(cfg, target, previews) for cfg in cfgs for target in (THIS_MACHINE, *CARDS)]
    beyond = sum(wait > PAGE_LIMIT_S for wait in waits)
    print(f"beside the form, {len(waits)} changes: at most {1000 * max(waits):.0f} ms, {beyond} beyond the limit")
    recorded = {
        f"{family} {architecture} {field}": recorded_s(family, architecture, field)
        for family, architecture, field in NEW
    }
    for name, seconds in recorded.items():
        print(f"recorded {name}: {seconds:.0f} s")
    return int(typed[slowest] > TYPED_LIMIT_S or beyond > 0 or max(recorded.values()) > RECORDED_LIMIT_S)


if __name__ == "__main__":
    takes_no_arguments(__doc__)
    sys.exit(main())
