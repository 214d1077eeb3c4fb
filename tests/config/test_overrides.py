"""Overrides of whole sections and fields, in every shape that YAML has: each gives a config or sentences."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config.test_generated_configs import LINE, QUICK, THOROUGH
from trainer.config.fields import all_names
from trainer.config.load import ConfigError, load_config_text

PRESETS = [
    "model: {family: flux2}\ndata: {path: /photos}\nadapter: {type: lora, rank: 4, rank_pattern: {attn.to_q: 8}}\n",
    "model: {family: causal_lm}\ndata: {path: /text}\nstages: [{name: a, set: {train.steps: 3}}]\n",
    "model: {family: flux2}\ndata: {path: /photos, folders: [{path: /more}]}\nquantize: {format: nf4}\n",
]
SECTIONS = sorted(
    {part for field in all_names() for part in itertools.accumulate(field.split(".")[:-1], "{}.{}".format)}
)
LISTS = ["stages", "data.folders", "sample.prompts", "adapter.targets", "train", "adapter"]
INSIDE = [
    "[0]",
    "[0].path",
    "[0].set",
    "[0].name",
    "[0].set.train.steps",
    ".0",
    ".0.path",
    "[x]",
    "[-1]",
    "[99999]",
    "[]",
]
ODD = ["\udcff", "adapter.\udcff", *(f"{field}{item}" for field in LISTS for item in INSIDE)]
SHAPES = [
    "{type: boft, block_size: 4}",
    "{type: lora, rank: 4}",
    "{rank: 4}",
    "{unknown: 1}",
    "{type: {type: lora}}",
    "{type: [lora]}",
    "{type: null}",
    "{type: 3}",
    "{path: {a: 1}}",
    "{a: {b: {c: 1}}}",
    "{a: 1, a: 2}",
    "{type: lora, type: dora}",
    "{type: lora, type: {a: 1}}",
    "{train.steps: 3}",
    "{1: 2, true: 3, null: 4, '': 5}",
    "{<<: {a: 1}}",
    "{[1, 2]: 3}",
    "{}",
    "[]",
    "[1, a]",
    "[null]",
    "[[1], {a: [2]}]",
    "[{path: /a, path: /b}]",
    "[{name: a, set: [1]}, {name: b, set: {adapter: {type: boft}}}]",
    "3",
    "-1",
    "0.5",
    ".inf",
    "9" * 40,
    "true",
    "2024-01-01",
    "word",
    "null",
    "",
    "'lora'",
    '"two\\nlines"',
    "a: 1\nb: 2",
    "|\n one\n two",
    "- 1\n- 2",
    "{a: ",
    "&a [*a]",
    "*a",
    "!!python/object:x {}",
    "\0",
    "\ud800",
]


def check(text: str, *overrides: str) -> None:
    """Raises whatever but a ConfigError comes of it, which would be a traceback."""
    try:
        load_config_text(text, overrides, Path("preset.yaml"))
    except ConfigError as error:
        assert all(LINE.fullmatch(line) for line in str(error).split("\n")), str(error)


@pytest.mark.parametrize("key", SECTIONS)
def test_any_value_of_a_section_is_a_config_or_sentences(key: str) -> None:
    for shape in SHAPES:
        check(PRESETS[0], f"{key}={shape}")


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted({*SECTIONS, *all_names(), *ODD, *(f"{section}.type" for section in SECTIONS)}))
def test_any_value_of_any_field_is_a_config_or_sentences(key: str) -> None:
    """In each preset that gives the field's section, so that file and command line meet, or else in one."""
    given = [text for text in PRESETS if f"{re.split(r'[.[]', key)[0]}:" in text]
    for text, shape in itertools.product(given or PRESETS[:1], SHAPES):
        check(text, f"{key}={shape}")


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, ...]:
    """A section and a field of it, in either order, each by any value."""
    section = draw(st.sampled_from(SECTIONS))
    field = draw(st.sampled_from([field for field in (*all_names(), *ODD) if field.startswith(f"{section}.")]))
    given = [f"{key}={draw(st.sampled_from(SHAPES))}" for key in (section, field)]
    return tuple(draw(st.permutations(given)))


@QUICK
@given(st.sampled_from(PRESETS), pairs())
def test_a_section_with_one_of_its_fields_is_a_config_or_sentences(text: str, given: tuple[str, ...]) -> None:
    check(text, *given)


@pytest.mark.slow
@THOROUGH
@given(st.sampled_from(PRESETS), pairs(), pairs())
def test_two_thousand_pairs_of_them_are_configs_or_sentences(
    text: str, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    check(text, *first, *second)


@pytest.mark.parametrize("override", ["name=\udcff", "sample={prompts: [\udcff]}"])
def test_bytes_of_the_command_line_that_are_not_utf8_are_a_sentence(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text(PRESETS[0], [override], Path("preset.yaml"))
    key = override.partition("=")[0]
    assert str(caught.value) == (f"command line: {key}: not UTF-8: holds '\\udcff'; write it as UTF-8, or remove it")
