"""Plans beside the form whose tables are traced first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from app.form.plan_preview import THIS_MACHINE, PlanPreview, PlanPreviews
from tests.plan.simulate.test_references import edit
from trainer.config.load import load_config_text
from trainer.config.schema import RunConfig
from trainer.weights.forms import READ

TRACED_WITHIN_S = 240


def run(method: str) -> RunConfig:
    fields = ("model.family=flux2", "model.path=tiny", f"adapter.type={method}")
    return load_config_text("data: {path: .}", fields, Path("run.yaml")).config


def test_weights_in_a_form_that_is_not_read_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    model = f"model={{family: flux2, options: {{architecture: dev}}, path: '{file}', base: '{tmp_path}'}}"
    cfg = load_config_text("data: {path: .}", (model,), Path("run.yaml")).config
    save_file({"a.weight": torch.ones(1)}, file)
    assert PlanPreviews(tmp_path).of(cfg, "24gb", ()).plan is not None
    save_file({"a.SCB": torch.ones(1)}, file)
    note = f"model.path: {file}: 'a.SCB' is stored as bitsandbytes' int8, which is not read; {READ}"
    assert PlanPreviews(tmp_path).of(cfg, "24gb", ()) == PlanPreview(note=note)


def test_a_plan_counts_references_that_were_added_since(tmp_path: Path) -> None:
    for folder in ("after", "before/1", "before/2"):
        (tmp_path / folder).mkdir(parents=True)
    cfg = edit(tmp_path, "parallel.strategy=none")
    previews = PlanPreviews(tmp_path)
    two = previews.of(cfg, "80gb", ()).plan
    (tmp_path / "before" / "3").mkdir()
    three = previews.of(cfg, "80gb", ()).plan
    assert two is not None and three is not None and two.training.peak < three.training.peak


@pytest.mark.slow
def test_of_combinations_that_wait_only_the_last_is_traced(tmp_path: Path) -> None:
    previews = PlanPreviews(tmp_path)
    first, passed, last = cfgs = run("lora"), run("lokr"), run("loha")

    def seen(cfg: RunConfig) -> PlanPreview:
        return previews.of(cfg, THIS_MACHINE, ())

    assert all(seen(cfg).can_record for cfg in cfgs)
    for cfg in cfgs:
        previews.record(cfg)
        assert seen(cfg).is_waiting and not seen(cfg).can_record
    shares = []
    began = time.monotonic()
    while seen(last).is_waiting and time.monotonic() - began < TRACED_WITHIN_S:
        shares.append((seen(first).share, seen(last).share))
        time.sleep(0.1)
    assert seen(first).plan is not None and seen(last).plan is not None
    assert seen(passed).can_record and not seen(passed).has_failed
    assert [one for _, one in shares] == sorted(one for _, one in shares)
    assert 0 < max(one for one, _ in shares) <= 1 and 0 < max(one for _, one in shares) <= 1
