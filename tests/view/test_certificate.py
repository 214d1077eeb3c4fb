"""Certificates of other runs: which are compared, and what a difference is called."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainer.run.folder import RunDir
from trainer.view.certificate import FILE, Certificate, Finding, compared, earlier, write

STAGES = {
    "schedule": {"shift": 3.0},
    "text": {"prompt_embeds count": 100.0, "prompt_embeds mean": 0.0, "prompt_embeds size": 1.0},
    "targets": {"share": 1.0},
    "losses": {"sigma 0.2": 1.0},
}


def certificate(settings: str = "", **stages: Mapping[str, float]) -> Certificate:
    return Certificate("flux2 base", {"size": "64x64"}, "none", STAGES | stages, settings=settings)


def kinds(found: Certificate) -> list[str]:
    return [finding.kind for finding in found.findings]


def test_the_first_stage_that_differs_is_named_alone():
    mine = certificate(schedule={"shift": 2.0}, losses={"sigma 0.2": 9.0})
    found = compared(mine, [certificate()])
    assert kinds(found) == ["schedule"]
    assert found.lines() == (
        "certificate, schedule: shift is 2 where a certificate of this base has 3; look at the timestep shift or the "
        "sampler's noise levels",
    )
    assert compared(certificate(), [certificate()]).is_green


def test_shift_and_targets_are_the_choice_of_each_run_and_settings_must_be_equal():
    mine = certificate(schedule={"shift": 2.0}, targets={"share": 0.2})
    assert compared(mine, (), [certificate()]).is_green
    other = certificate(losses={"sigma 0.2": 9.0})
    assert kinds(compared(other, (), [certificate()])) == ["losses"]
    assert compared(other, (), [certificate(settings="quantized encoders")]).is_green


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_a_number_that_is_none_is_never_the_expected_one(value: float):
    for mine, other in (({"sigma 0.2": value}, STAGES["losses"]), (STAGES["losses"], {"sigma 0.2": value})):
        assert kinds(compared(certificate(losses=mine), [certificate(losses=other)])) == ["losses"]


def test_only_certificates_without_a_fault_of_own_folders_are_known(tmp_path: Path):
    for name, findings in (("green", ()), ("faulty", (Finding("shift", "is wrong"),)), ("damaged", ())):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("")
        made = Certificate("flux2 base", {}, "none", {}, findings=findings)
        write(RunDir(folder), made)
    (tmp_path / "runs" / "damaged" / FILE).write_text("{")
    outside = tmp_path / "outside.json"
    (tmp_path / "runs" / "green" / FILE).rename(outside)
    assert not list(earlier(tmp_path / "runs"))
    (tmp_path / "runs" / "green" / FILE).symlink_to(outside)
    assert not list(earlier(tmp_path / "runs"))
    (tmp_path / "runs" / "green" / FILE).unlink()
    outside.rename(tmp_path / "runs" / "green" / FILE)
    assert len(list(earlier(tmp_path / "runs"))) == 1
