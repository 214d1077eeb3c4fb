"""What tokens of a row see, found on a tiny copy of a class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from trainer.models.parts.language.attention_probe import Sight, sight

FULL_SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {},
    "gpt2": {},
    "mixtral": {},
    "opt": {},
    "bloom": {},
    "mamba": {},
    "bert": {"is_decoder": True},
}
ALONE = ("opt", "bloom", "mamba", "bert")
"""Classes whose documents would see each other in one row."""


@pytest.mark.parametrize("kind", FULL_SIZES)
def test_a_copy_of_a_full_config_tells_whether_documents_of_a_row_see_each_other(kind: str) -> None:
    config = AutoConfig.for_model(kind, **FULL_SIZES[kind])
    uncalled = frozenset({"backbone.layers.#.mixer.dt_proj"} if kind == "mamba" else ())
    assert sight(config, "auto") == Sight(later=False, others=kind in ALONE, uncalled=uncalled)


def test_a_model_that_reads_both_ways_is_known() -> None:
    found = sight(AutoConfig.for_model("bert"), "auto")
    assert found is not None
    assert found.later


def test_what_cannot_be_made_small_is_not_known() -> None:
    config = AutoConfig.for_model("llama")
    config.hidden_act = "no such activation"
    assert sight(config, "auto") is None


def test_the_random_numbers_of_the_run_are_not_drawn_from() -> None:
    torch.manual_seed(5)
    sight(AutoConfig.for_model("llama"), "auto")
    found = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(found, torch.rand(3))
