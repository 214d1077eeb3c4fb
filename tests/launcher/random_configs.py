"""Random configs of image families, as they may be typed: every value is valid by itself."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.config.families import FamilyFacts, of
from trainer.config.load import ConfigFile, load_config_text
from trainer.config.sections import family_names
from trainer.system.errors import InputError

FAMILIES = tuple(
    name for name in family_names() if (facts := of(name)) and facts.trains_on == "images" and facts.in_buckets
)
CHOICES: dict[str, tuple[Any, ...]] = {
    "adapter.type": ("lora", "locon", "dora", "loha", "lokr", "diag-oft", "boft", "none"),
    "adapter.rank": (1, 4, 8),
    "adapter.alpha": (1, 8.0),
    "adapter.dropout": (0.1,),
    "adapter.conv_rank": (2,),
    "adapter.init": ("pissa",),
    "adapter.rank_stabilized": (True,),
    "adapter.full_matrix": (True,),
    "adapter.decompose_both": (True,),
    "adapter.factor": (2, 4),
    "adapter.block_size": (4,),
    "data.caption_dropout": (0.5,),
    "data.fit": ("pad", "drop"),
    "data.flip": (True,),
    "data.length": (64,),
    "data.max_aspect": (1, 4),
    "data.packing": ("whole",),
    "data.resolution": (48, 64, 2048),
    "data.resolutions": ([32, 64],),
    "data.system": ("Be brief.",),
    "data.trigger": ("ohwx",),
    "data.vision_dropout": (0.5,),
    "export.dtype": ("bf16", "fp16", "fp32", "fp8"),
    "export.format": ("auto", "diffusers", "comfyui", "kohya", "lycoris", "peft", "single_file"),
    "export.what": ("auto", "none", "adapter", "merged", "full"),
    "model.options.attention": ("eager",),
    "model.options.blocks": ("Block",),
    "model.options.distilled": (True, False),
    "model.options.max_tokens": (16, 64),
    "model.options.new_tokens": (["<new>"],),
    "model.options.text_windows": (2,),
    "model.options.without": (["text_encoder_3"], ["text_encoder"]),
    "objective.density": ("uniform", "mode", "cosmap"),
    "objective.dpo_beta": (2000,),
    "objective.guidance": (3.5,),
    "objective.logit_mean": (0.5,),
    "objective.min_snr_gamma": (5,),
    "objective.mode_scale": (0.5,),
    "objective.mse_weight": (2,),
    "objective.prediction": ("epsilon", "v_prediction"),
    "objective.router_weight": (0.01,),
    "objective.shift": ("linear", "empirical", "constant", "none"),
    "objective.shift_factor": (2,),
    "objective.text_weight": (0.5,),
    "objective.zero_terminal_snr": ("on", "off"),
    "optim.ema": (0.9,),
    "optim.schedule": ("cosine", "linear"),
    "optim.type": ("adamw8bit", "schedulefree"),
    "optim.warmup": (1,),
    "parallel.cpu_offload": (True,),
    "parallel.offload_blocks": (1, 0.5, "auto"),
    "parallel.strategy": ("full", "none", "ddp", "grad_op"),
    "quantize.encoders": (True,),
    "quantize.format": ("nf4", "int8", "fp8"),
    "sample.chat": ("on",),
    "sample.guidance": (1, 7),
    "sample.negative": ("blurred",),
    "sample.scheduler": ("euler",),
    "sample.size": ([64, 64], [40, 64], [48, 48]),
    "sample.temperature": (0.5,),
    "train.checkpointing": ("selective", "full", 2, "full 1, selective"),
    "train.epochs": (1,),
    "train.neftune_alpha": (5,),
    "train.precision": ("bf16",),
}
"""{field: values to choose from}"""
MOST_CHANGES = 7


def random_fields(seed: int, family: str) -> dict[str, Any]:
    """The fields of a random config, without those that every one has."""
    draw = random.Random(f"{family} {seed}")
    names = draw.sample(sorted(CHOICES), draw.randint(1, MOST_CHANGES))
    fields = {name: draw.choice(CHOICES[name]) for name in names}
    components = known(family).components
    if draw.random() < 0.4:
        chosen = draw.sample(components, draw.randint(1, min(2, len(components))))
        fields["model.train"] = {name: draw.choice(("adapter", "full", "frozen")) for name in chosen}
    return fields


def known(family: str) -> FamilyFacts:
    facts = of(family)
    assert facts is not None
    return facts


def load(family: str, fields: dict[str, Any], pictures: Path) -> ConfigFile:
    """A tiny model of the family that is trained on the pictures for two steps. Raises InputError as `load_config`."""
    usual = {
        "data.path": str(pictures),
        "data.resolution": 64,
        "adapter.rank": 4,
        "train.steps": 2,
        "train.precision": "fp32",
        "parallel.device": "cpu",
        "parallel.devices": 1,
        "sample.prompts": ["a picture"],
        "sample.size": [64, 64],
        "sample.steps": 1,
        "checkpoint.every": 0,
    }
    kind = fields.get("adapter.type", "lora")
    if kind in ("diag-oft", "boft", "none"):
        del usual["adapter.rank"]
    lines = [f"{name}={json.dumps(value)}" for name, value in (usual | fields).items()]
    return load_config_text(f"model: {{family: {family}, path: tiny}}\n", lines, Path("preset.yaml"))


def valid(count: int, pictures: Path) -> Iterator[tuple[str, dict[str, Any], ConfigFile]]:
    """Yield (family, fields, config) of as many configs of each family that are valid without their family."""
    for family in FAMILIES:
        found = seed = 0
        while found < count:
            fields, seed = random_fields(seed, family), seed + 1
            try:
                loaded = load(family, fields, pictures)
            except InputError:
                continue
            found += 1
            yield family, fields, loaded
