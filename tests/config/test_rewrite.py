"""A preset's text that is changed keeps its comments, and loads as what was wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.config.load import dump_config, load_config, load_config_text
from trainer.config.rewrite import rewritten
from trainer.config.schema import RunConfig
from trainer.system.installation import PRESETS

FILE = Path("elsewhere/own.yaml")
TEXT = """\
# a run
model:
  family: flux2
data:
  path: /images  # mine

# as others do it
train:
  steps: 10  # few
  checkpointing: none

sample:
  prompts:
    - a fox  # red
    - "a [b]"

  every: 5
stages:
  - name: one
    set: {}
"""


def changed(cfg: RunConfig, **fields: Any) -> RunConfig:
    tree = cfg.model_dump()
    for field, value in fields.items():
        *above, key = field.split("__")
        section = tree
        for name in above:
            section = section[name]
        section[key] = value
    return RunConfig.model_validate(tree)


def test_values_are_changed_and_added_in_place() -> None:
    cfg = load_config_text(TEXT, (), FILE).config
    wanted = changed(cfg, train__steps=20, train__batch_size=4, parallel__devices=2, sample__prompts=("b # c",))
    assert (
        rewritten(TEXT, wanted, FILE)
        == """\
# a run
model:
  family: flux2
data:
  path: /images  # mine

# as others do it
train:
  steps: 20  # few
  checkpointing: none
  batch_size: 4

sample:
  prompts: ["b # c"]

  every: 5
stages:
  - name: one
    set: {}

parallel:
  devices: 2
"""
    )


def test_a_text_that_is_right_already_is_not_changed() -> None:
    assert rewritten(TEXT, load_config_text(TEXT, (), FILE).config, FILE) == TEXT


def test_sections_in_one_line_are_written_anew_without_comments() -> None:
    text = "# mine\ndata: {path: /images}\nmodel: {family: flux2}\n"
    wanted = changed(load_config_text(text, (), FILE).config, data__resolution=512)
    assert rewritten(text, wanted, FILE) == f"# mine\n{dump_config(wanted)}"


def test_what_the_text_lacks_is_added_and_its_comments_stay() -> None:
    text = TEXT.replace("  path: /images  # mine\n", "  resolution: 64  # mine\n")
    wanted = changed(load_config_text(text, ("data.path=/images",), FILE).config, train__steps=20)
    found = rewritten(text, wanted, FILE)
    assert load_config_text(found, (), FILE).config == wanted
    assert found.count("#") == text.count("#")


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.yaml")), ids=lambda preset: preset.stem)
def test_every_preset_can_be_changed_for_another_folder_with_its_comments(preset: Path) -> None:
    cfg = load_config(preset).config
    fields = {"train__checkpointing": 3, "sample__size": (512, 256), "parallel__prefetch_forward": 3}
    wanted = changed(cfg, **fields, optim__lr=0.25, quantize__keep=() if cfg.quantize.format == "none" else ("to_q",))
    text = rewritten(preset.read_text(encoding="utf-8"), wanted, FILE)
    assert load_config_text(text, (), FILE).config == wanted
    assert text.startswith("#")
