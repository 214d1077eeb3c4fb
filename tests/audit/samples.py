"""Samples of each family with a trained LoRA, against diffusers' own pipelines with the exported file loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from tests.audit.check import Check
from tests.audit.families import REFERENCES, SCHEDULER, ZERO_TERMINAL
from tests.audit.reference import Draws, levels_apart
from tests.audit.run import Model, started, write_picture
from trainer.export.export import export

SIZE = (96, 64)
"""Width and height."""
PROMPT, NEGATIVE = "a red fox", "grey & dull"
SEED = 5
LIMIT = 1.0
"""Levels of 255, that a last bit may move in rounding."""
LEAST_EFFECT = 8.0
"""Levels by which the LoRA must change the picture: a file that is not loaded would otherwise go unseen."""


@dataclass(frozen=True)
class Drawing:
    """A picture drawn twice. sample: the run's section `sample`.  call: arguments of the pipeline's call.

    An entry that neither side names is left at its default. edits: the model is trained and drawn with an image before
    the edit.
    """

    model: Model
    sample: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    is_quick: bool = False
    edits: bool = False


SIX = {"steps": 6, "guidance": 4.5, "negative": NEGATIVE}
STEPS = {"num_inference_steps": 6}
NEGATED = STEPS | {"negative_prompt": NEGATIVE}
GUIDED = NEGATED | {"guidance_scale": 4.5}
ZERO_SNR = {SCHEDULER: ZERO_TERMINAL}
DISTILLED = {"model_index.json": {"is_distilled": True}}

DRAWINGS = (
    Drawing(Model("chroma", "chroma"), SIX, GUIDED),
    Drawing(Model("ernie_image", "ernie_image"), SIX, GUIDED),
    # Models with guidance embedding, or distilled from guidance, read no negative prompt.
    Drawing(Model("flux1 dev", "flux1", "dev"), SIX, STEPS | {"guidance_scale": 4.5}),
    Drawing(
        Model("flux1 kontext", "flux1", "kontext"), SIX, STEPS | {"guidance_scale": 4.5}, is_quick=True, edits=True
    ),
    # Distilled models at our defaults, and as their publishers draw.
    Drawing(Model("flux1 schnell", "flux1", "schnell"), {}, {"num_inference_steps": 4, "guidance_scale": 0.0}),
    Drawing(Model("flux2 dev", "flux2", "dev"), SIX, STEPS | {"guidance_scale": 4.5}),
    Drawing(Model("flux2 klein", "flux2", "klein-4b"), SIX, GUIDED, is_quick=True),
    Drawing(Model("flux2 klein, distilled", "flux2", "klein-4b", edits=DISTILLED), {}, {"num_inference_steps": 4}),
    Drawing(Model("flux3", "flux3"), SIX, GUIDED),
    # A second transformer is in place of the negative prompt.
    Drawing(Model("ideogram4", "ideogram4"), SIX, STEPS | {"guidance_scale": 4.5}),
    # Its pipeline counts guidance from 0.
    Drawing(Model("krea2", "krea2"), SIX, NEGATED | {"guidance_scale": 3.5}),
    Drawing(Model("krea2, distilled", "krea2", edits=DISTILLED), {}, {"num_inference_steps": 8, "guidance_scale": 0.0}),
    Drawing(Model("sd3 medium", "sd3", "sd3-medium"), SIX, GUIDED),
    Drawing(Model("sd3.5 medium", "sd3", "sd35-medium"), SIX, GUIDED),
    Drawing(Model("sdxl epsilon", "sdxl"), SIX, GUIDED, is_quick=True),
    Drawing(Model("sdxl velocity, zero-terminal", "sdxl", edits=ZERO_SNR), SIX, GUIDED),
    Drawing(Model("qwen_image", "qwen_image"), SIX, NEGATED | {"true_cfg_scale": 4.5}),
    Drawing(Model("qwen_image_21", "qwen_image_21"), SIX, NEGATED | {"true_cfg_scale": 4.5}),
    # As its publisher draws, without guidance.
    Drawing(Model("qwen_image_21, edit", "qwen_image_21"), {"steps": 6}, STEPS, is_quick=True, edits=True),
    # Its pipeline counts guidance from 0.
    Drawing(Model("z_image", "z_image", "z-image"), SIX, NEGATED | {"guidance_scale": 3.5}),
    Drawing(
        Model("z_image turbo", "z_image", "z-image-turbo"),
        {},
        {"num_inference_steps": 8, "guidance_scale": 0.0},
    ),
)


def apart(drawing: Drawing, folder: Path) -> float:
    """Largest difference of the two pictures, in levels of 255. The LoRA is that of two steps."""
    model = drawing.model
    write_picture(folder / "data" / "0.png", (64, 64), "a blue square", seed=0)
    path = model.write(folder / "cache")
    data, sample, call = {}, {}, {}
    if drawing.edits:
        before = folder / "before"
        write_picture(before / "0.png", (64, 64), "a red square", seed=1)
        data, sample = {"references": str(before)}, {"references": [str(before / "0.png")]}
        with Image.open(before / "0.png") as image:
            call = {"image": image.convert("RGB")}
    sections = {
        "data": {"path": str(folder / "data"), "resolution": 64} | data,
        "train": {"batch_size": 1},
        "optim": {"lr": 0.03},
        "sample": {"prompts": [PROMPT], "size": SIZE, "seed": SEED, **sample, **drawing.sample},
        "export": {"dtype": "fp32"},
    }
    with started(model, path, folder, sections) as trainer:
        trainer.train()
        with Image.open(trainer.generate_samples()[0]) as image:
            ours = image.convert("RGB")
        file = export(trainer.cfg, trainer.run, folder / "cache", trainer.trained_weights())[0].path
    reference = REFERENCES[model.family](path, model.objective)
    channels, rows, columns = reference.latents(Image.new("RGB", SIZE)).shape
    noise = Draws(SEED, 0).normal("sample", (channels, rows, columns))
    draw = partial(reference.picture, noise, *SIZE, {"prompt": PROMPT, **call, **drawing.call})
    with warnings.catch_warnings():
        # diffusers' Euler scheduler gives numpy 2 a tensor to copy.
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        before = draw()
        reference.pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
        theirs = draw()
    assert levels_apart(before, theirs) >= LEAST_EFFECT, f"{model.name}: the LoRA changes nothing"
    return levels_apart(ours, theirs)


CHECKS = tuple(
    Check(drawing.model.name, "sample, of 255 levels", LIMIT, partial(apart, drawing), drawing.is_quick)
    for drawing in DRAWINGS
)
