"""What a config asks of its family, and the family does not have, is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import run_config
from trainer.models import families
from trainer.system.errors import InputError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__train": {"vae": "adapter"}}, "model.train: 'vae' is not one of transformer"),
        (
            {"model__options": {"without": ["text_encoder_3"]}},
            "model.options.without: is not used by this kind of model; leave it out. It reads "
            "model.options.architecture, model.options.distilled, model.options.max_tokens, model.options.text_layers",
        ),
        (
            {"objective__min_snr_gamma": 5, "model__options": {"architecture": "dev"}},
            "objective.min_snr_gamma: is not used by this kind of model; leave it out. It reads objective.density, "
            "objective.dpo_beta, objective.guidance, objective.logit_mean, objective.logit_std, objective.mode_scale, "
            "objective.shift, objective.shift_factor",
        ),
        (
            {"objective__guidance": 3.5},
            "objective.guidance: is not used by this kind of model; leave it out. It reads objective.density, "
            "objective.dpo_beta, objective.logit_mean, objective.logit_std, objective.mode_scale, objective.shift, "
            "objective.shift_factor",
        ),
        ({"sample__size": (100, 70)}, "sample.size: 100 x 70 is not in multiples of 16 pixels; use 96 x 64"),
    ],
)
def test_what_the_family_does_not_have_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        families.make(run_config(tmp_path, **changes), tmp_path)
    assert str(error.value) == message
