"""Generated presets and overrides: each gives a config that dumps and loads to itself, or sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.config.fields import ROOT, Slot, all_names, slot
from trainer.config.load import ConfigError, dump_config, load_config_text, stage_config
from trainer.config.schema import RunConfig
from trainer.config.sections import family_names
from trainer.launcher import preflight

PRESET = Path("preset.yaml")
QUICK = settings(
    max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
THOROUGH = settings(QUICK, max_examples=2000)
LINE = re.compile(r"(preset\.yaml(:\d+)?|command line|stages\[\d+\]): \S.*")
"""A sentence with its place."""
WORDS = st.one_of(
    st.sampled_from(["", "a", "tiny", "null", "true", "1e-4", "07", "attn.to_q", "[trigger]", "(", "~", "a: b", "é\n"]),
    st.text(max_size=8),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "rank", "path", "x"]), inner),
    max_leaves=4,
)


def value_of(here: Slot) -> st.SearchStrategy[Any]:
    """Mostly what may stand there, and now and then something else."""
    if here.tags:
        return st.one_of(*(section(kind, value_of, type=st.just(tag)) for tag, kind in here.tags.items()), ANYTHING)
    if here.sections:
        return st.one_of(section(here.sections[0], value_of), ANYTHING)
    return st.one_of(*[allowed(here)] * 3, ANYTHING)


def allowed(here: Slot) -> st.SearchStrategy[Any]:
    """What may stand there."""
    if here.tags:
        return st.one_of(*(section(kind, allowed, type=st.just(tag)) for tag, kind in here.tags.items()))
    if here.sections:
        return section(here.sections[0], allowed)
    kinds = [_of_kind(kind, here) for kind in here.options]
    return st.one_of(*kinds, st.none()) if here.may_be_empty else st.one_of(*kinds)


def section(
    kind: Any, below: Callable[[Slot], st.SearchStrategy[Any]], **fixed: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    """Up to four of a section's fields, with those of `fixed`."""
    here = Slot(kind)
    children = {key: child for key in here.keys if key not in fixed and (child := here.child(key))}
    chosen = st.lists(st.sampled_from(sorted(children)), max_size=4, unique=True) if children else st.just([])
    return chosen.flatmap(lambda keys: st.fixed_dictionaries({**fixed, **{key: below(children[key]) for key in keys}}))


def _of_kind(kind: Any, here: Slot) -> st.SearchStrategy[Any]:
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return st.sampled_from(arguments)
    if get_origin(kind) is tuple:
        item = here.child(0)
        sizes = {"max_size": 3} if Ellipsis in arguments else {"min_size": len(arguments), "max_size": len(arguments)}
        return st.lists(allowed(item) if item else ANYTHING, **sizes)
    if get_origin(kind) is dict:
        item = here.child("key")
        keys = st.sampled_from(["transformer", "attn.to_q", "x.y", "gpus-per-node", *FIELDS])
        return st.dictionaries(keys, allowed(item) if item else ANYTHING, max_size=3)
    if kind is bool:
        return st.booleans()
    if kind in (int, float):
        return _numbers(kind, here)
    return WORDS


def _numbers(kind: type, here: Slot) -> st.SearchStrategy[Any]:
    low = max((limit.bound for limit in here.limits if limit.symbol.startswith(">")), default=-10)
    high = min((limit.bound for limit in here.limits if limit.symbol.startswith("<")), default=1000)
    if kind is int:
        return st.integers(math.ceil(low), min(math.floor(high), math.ceil(low) + 8))
    return st.floats(low, high)


FIELDS = all_names()
PLACES = sorted({*FIELDS, *(key for key in ROOT.keys), "model.options", "data.folders", "stages"})
ODD_KEYS = [
    "",
    ".",
    "a..b",
    "train.",
    ".train",
    "train.steps.x",
    "data.folders.0.path",
    "data.folders[0].path",
    "a b",
    "adapter.rank_pattern.attn.to_q",
    "stages[0].set",
    "cluster.slurm.time",
    "train[0]",
    "data.folders.x",
]
TREES = st.one_of(section(RunConfig, value_of), st.dictionaries(WORDS, ANYTHING, min_size=1, max_size=3))


@st.composite
def sensible(draw: st.DrawFn) -> dict[str, Any]:
    """A preset that a user might write: a family, data and some fields with values that may stand there."""
    tree: dict[str, Any] = {"model": {"family": draw(st.sampled_from(family_names()))}, "data": {"path": "/photos"}}
    for field in draw(st.lists(st.sampled_from(FIELDS), max_size=5)):
        *above, key = field.split(".")
        here, place = slot((*above, key)), tree
        for part in above:
            place = place.setdefault(part, {})
        if here:
            place.setdefault(key, draw(allowed(here)))
    return tree


@st.composite
def presets(draw: st.DrawFn) -> str:
    """A preset's text, most of them sensible."""
    tree = draw(st.one_of(*[sensible()] * 5, TREES))
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=draw(st.booleans()))
    if draw(st.integers(0, 9)) == 9:  # a line that is not where it belongs, or twice
        lines = text.splitlines(keepends=True)
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from([*lines, "  x: 1\n", "\t\n", "- a\n"])))
        text = "".join(lines)
    return text


@st.composite
def overrides(draw: st.DrawFn) -> str:
    """An override, most of them of a field or section that exists by a value that may stand there."""
    key = draw(st.one_of(*[st.sampled_from(PLACES)] * 4, st.sampled_from(ODD_KEYS), WORDS))
    here = slot(tuple(key.split(".")))
    value = draw((value_of if draw(st.integers(0, 3)) == 3 else allowed)(here) if here else ANYTHING)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("\n...\n")
    return draw(st.sampled_from([*[f"{key}={text.strip()}"] * 5, f"{key} = {value}", key]))


def check(text: str, given: list[str]) -> None:
    """Raises whatever but a ConfigError comes of it, which would be a traceback."""
    try:
        loaded = load_config_text(text, given, PRESET)
    except ConfigError as error:
        assert str(error)
        assert all(LINE.fullmatch(line) for line in str(error).split("\n")), str(error)
        return
    config = loaded.config
    again = load_config_text(dump_config(config), [], PRESET)
    assert again.config == config
    for index in range(len(config.stages)):
        stage_config(config, index)
    try:
        preflight.check_named(loaded)
    except ConfigError as error:
        assert str(error)


@QUICK
@given(presets(), st.lists(overrides(), max_size=3))
def test_a_generated_preset_with_overrides_is_a_config_or_sentences(text: str, given: list[str]) -> None:
    check(text, given)


@pytest.mark.slow
@THOROUGH
@given(presets(), st.lists(overrides(), max_size=3))
def test_two_thousand_generated_presets_with_overrides_are_configs_or_sentences(text: str, given: list[str]) -> None:
    check(text, given)
