"""Components that guide samples are sharded over all ranks, which draw what one process draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.distributed import run_ranks
from tests.models.common import assert_same_picture
from tests.runs import alone, make_pictures, make_run, run_config
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

PROMPTS = ["a fox", "a hare in the snow", "an owl"]


def drawn(world: World, cfg: RunConfig, run: RunDir) -> list[Path]:
    """The samples after a step, on rank 0. Another step follows: training goes on."""
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    try:
        trainer.train_step()
        paths = trainer.generate_samples()
        trainer.train_step()
        return paths
    finally:
        trainer.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"parallel__cpu_offload": True}, marks=pytest.mark.slow),
        pytest.param({"train__precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"quantize__format": "nf4", "quantize__encoders": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_guided_samples_of_two_ranks_are_those_of_one_process(tmp_path: Path, changes: dict[str, Any]) -> None:
    fields = {"sample__prompts": PROMPTS, "sample__size": (48, 32), "sample__steps": 3, "sample__guidance": 4.0}
    pictures = make_pictures(tmp_path / "pictures", 4)
    of_both = {key: value for key, value in changes.items() if not key.startswith("parallel")}
    cfg = run_config(pictures, model__family="ideogram4", parallel__strategy="none", **fields, **of_both)
    expected = drawn(alone(), cfg, make_run(tmp_path, cfg, "alone"))
    sharded: dict[str, Any] = {"parallel__devices": 2, "parallel__strategy": "full"}
    cfg = run_config(pictures, model__family="ideogram4", **sharded, **fields, **changes)
    found = run_ranks(2, drawn, cfg, make_run(tmp_path, cfg, "together"))[0]
    assert len(found) == len(expected) == len(PROMPTS)
    for ours, theirs in zip(found, expected, strict=True):
        with Image.open(ours) as image, Image.open(theirs) as reference:
            assert np.asarray(reference).std() > 1
            assert_same_picture(image.convert("RGB"), reference.convert("RGB"))
