"""A sample of a run is drawn again in diffusers by what trainer/export/README.md says."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image

from tests.models.common import assert_same_picture, without_bar
from tests.readme import readme
from tests.runs import alone, make_pictures, make_run, run_config
from trainer.export.export import export
from trainer.train.loop import Trainer


def test_the_readmes_lines_draw_the_last_sample_of_a_run_with_its_exported_lora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = {"every": 100, "prompts": ["[trigger] at sea"], "size": (64, 32), "steps": 3, "seed": 5}
    cfg = run_config(
        make_pictures(tmp_path / "pictures", 3),
        data__trigger="TOK",
        optim__lr=3e-2,
        train__steps=3,
        sample=sample,
        export={"dtype": "fp32"},
    )
    run = make_run(tmp_path / "runs", cfg, "first")
    trainer = Trainer(cfg, run, alone(), tmp_path / "cache", lambda event: None)
    try:
        trainer.train()
        file = export(cfg, run, tmp_path / "cache", trainer.trained_weights())[0].path
    finally:
        trainer.close()
    pipeline = without_bar(Flux2KleinPipeline.from_pretrained(trainer.family.folder, local_files_only=True))
    # The tiny text encoder has neither as many layers nor as long captions as the published ones.
    names: dict[str, Any] = {
        "torch": torch,
        "pipe": partial(pipeline, max_sequence_length=48, text_encoder_out_layers=(1, 2, 3)),
    }
    text = readme("trainer/export").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(import hashlib\n.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(lines, names)
    without = names["image"]
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    exec(lines, names)
    ours = Image.open(run.samples / "step-000003-0.png")
    assert_same_picture(ours, names["image"])
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(without, dtype=int)).max() > 8
