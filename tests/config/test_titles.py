"""Names of models and methods."""

from __future__ import annotations

import pytest

from trainer.config.fields import slot
from trainer.config.titles import METHODS, model_title


def test_every_method_of_training_has_a_name():
    assert set(METHODS) == set(slot(("adapter", "type")).words)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("demo", "Demo model"),
        ("black-forest-labs/FLUX.2-dev", "FLUX.2 dev"),
        ("tiny", "Tiny model (sdxl)"),
        ("/models/own/", "own"),
        ("somebody/Finetune-XL", "Finetune-XL"),
    ],
)
def test_a_model_has_one_name_on_all_screens(path: str, name: str):
    assert model_title(path, "sdxl") == name
