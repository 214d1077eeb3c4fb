"""Runs to plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.config.load import load_config_text
from trainer.config.schema import RunConfig
from trainer.plan.memory import MemoryPlan, plan_of
from trainer.plan.simulate.tables import PassTable
from trainer.plan.store import SHIPPED, known_model, read

NOWHERE = Path("nowhere")
"""A cache that does not exist: what is planned with it comes with the program."""
MODELS = {file.name.removesuffix(".json.gz"): file for file in sorted(SHIPPED.glob("*.json.gz"))}


def shipped() -> list[tuple[str, str, PassTable]]:
    """(model, key, table) of everything that comes with the program."""
    return [(name, key, table) for name, file in MODELS.items() for key, table in read(file)[0].items()]


def every_table() -> list[Any]:
    """The tables as parameters: in the quick half the first one of each model, and of each method on each base."""
    params, seen = [], set[str]()
    for model, key, table in shipped():
        is_first = not seen >= {model, key}
        seen |= {model, key}
        marks = () if is_first else pytest.mark.slow
        params.append(pytest.param(table, id=f"{model} {key}", marks=marks))
    return params


def run(model: str, *fields: str) -> RunConfig:
    """A run of a published model, `flux2 dev`, with one image per rank and pass."""
    family, architecture = model.split()
    named = [f"model.family={family}", f"model.options.architecture={architecture}"]
    usual = ["model.path=published/model", "parallel.strategy=full", "parallel.devices=4"]
    given = {field.partition("=")[0] for field in fields}
    lines = [field for field in (*named, *usual) if field.partition("=")[0] not in given]
    return load_config_text("data: {path: .}", (*lines, *fields), Path("run.yaml")).config


def planned(model: str, *fields: str) -> MemoryPlan:
    """The plan of such a run, from what comes with the program."""
    cfg = run(model, *fields)
    model = known_model(cfg, NOWHERE)
    assert model is not None
    return plan_of(cfg, model, None)
