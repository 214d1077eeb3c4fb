"""Presets and overrides: texts that are nearly YAML, and overrides of every field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.config.test_generated_configs import ANYTHING, FIELDS
from tests.fuzz.target import CHANGES, ODD_BYTES, Target, changed, refusals
from trainer.config.load import load_config
from trainer.launcher import preflight

PRESETS = Path(__file__).parents[2] / "presets"
LINES = st.sampled_from(
    ["a: &a [*a]", "a: &a [x]\nb: *a", "? [x]", "<<: {a: 1}", "!!python/object:os.system {}", "- - - -", "\t", "{",
     "|\n x", "train: {steps: 1e999}", "%YAML 3", "---", "..."]
)  # fmt: skip
TEXTS = st.one_of(
    st.tuples(st.sampled_from(sorted(file.name for file in PRESETS.glob("*.yaml"))), CHANGES),
    st.tuples(st.just(""), st.one_of(ODD_BYTES, LINES.map(str.encode), st.text(max_size=200).map(str.encode))),
)
OVERRIDES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(FIELDS), ANYTHING).map(lambda pair: f"{pair[0]}={pair[1]}"),
        st.tuples(st.sampled_from(FIELDS), LINES).map("=".join),
        st.text(max_size=40),
    ),
    max_size=4,
)


@contextmanager
def _prepared(folder: Path) -> Iterator[Callable[[Any], None]]:
    file = folder / "presets" / "preset.yaml"  # `..` is a folder of its own, not that of all temporary files
    file.parent.mkdir()

    def answer(value: Any) -> None:
        (name, content), overrides = value
        file.write_bytes(changed((PRESETS / name).read_bytes(), content) if name else content)
        with refusals():
            loaded = load_config(file, overrides)
            preflight.check(loaded)

    yield answer


CONFIGS = Target("configs", st.tuples(TEXTS, OVERRIDES), _prepared)
