"""What a run may choose, by the kind of its data: the fields that decide what it does, each with its values.

The first value of a choice is the plain one. A value is changes of a config, {field with __ for the dot: value}; one
that depends on the model or the adapter is a function of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tests.pairs.array import Row
from tests.pairs.data import MIXTURES
from trainer.config.families import refused
from trainer.config.schema import RunConfig
from trainer.models import families
from trainer.models.base import MultimodalFamily

Changes = Mapping[str, Any]
Value = Changes | Callable[[Row], Changes]
KINDS = ("images", "text", "both")
TEXT = "causal_lm"
BOTH = next(name for name in families.names() if issubclass(families.get(name), MultimodalFamily))
IMAGES = tuple(n for n in families.names() if n != BOTH and families.get(n).trains_on == "images")
PLAIN: Changes = {
    "train__checkpointing": "none",
    "train__compile": False,
    "train__micro_batch": 1,
    "parallel__strategy": "none",
    "parallel__devices": 1,
    "parallel__shard_size": None,
    "parallel__reshard_after_forward": None,
    "parallel__cpu_offload": False,
    "parallel__offload_blocks": 0,
    "sample__every": 0,
    "checkpoint__every": 0,
    "export__what": "none",
    "export__format": "auto",
    "export__dtype": "bf16",
}
"""The same run without anything that must not change what is learned."""


BASE: Changes = {
    "name": "pairs",
    "train__steps": 3,
    "train__seed": 3,
    "optim__lr": 1e-3,
    # Where a gradient is nearly 0, AdamW with its usual eps makes a step of the sign that rounding gives it.
    "optim__eps": 1e-4,
    "parallel__device": "cpu",
    "checkpoint__every": 0,
}


@dataclass(frozen=True)
class Kind:
    """What runs on one kind of data may choose. base: changes of all of them."""

    base: Changes
    choices: Mapping[str, Mapping[str, Value]]

    def changes(self, row: Row) -> dict[str, Any]:
        """The changes of a row of values."""
        found = dict(self.base)
        for name, values in self.choices.items():
            value = values[row.get(name, next(iter(values)))]
            found |= value(row) if callable(value) else value
        return found

    def config(self, row: Row, plain: bool = False) -> RunConfig:
        """The config of a row of values. plain: without what must not change its losses.

        Raises ValidationError for fields that cannot be combined.
        """
        values: dict[str, Any] = {}
        for field, value in (self.changes(row) | (PLAIN if plain else {})).items():
            *sections, last = field.split("__")
            section = values
            for name in sections:
                section = section.setdefault(name, {})
            section[last] = value
        return RunConfig.model_validate(values)

    def refusal(self, row: Row) -> str | None:
        """The sentence with which the config of a row is refused by itself, or None."""
        try:
            cfg = self.config(row)
        except ValidationError as error:
            return str(error.errors()[0])
        problems = list(refused(cfg))
        return str(problems[0]) if problems else None


def kinds(root: Path) -> dict[str, Kind]:
    """The kinds of data. root: where `make_data` wrote them."""
    pictures = {**BASE, "data__path": str(root / "pictures"), "data__resolution": 64}
    texts = {**BASE, "data__path": str(root / "texts"), "data__length": 96, "data__shuffle_window": 8}
    return {
        "images": Kind(pictures, _image_choices(root)),
        "text": Kind(texts, _text_choices(root)),
        "both": Kind({**pictures, "data__seen_resolution": 64}, _both_choices(root)),
    }


def kind_of(family: str) -> str:
    """The kind of data that a family trains on."""
    return "both" if family == BOTH else "images" if family in IMAGES else "text"


def _family(row: Row) -> str:
    model = row.get("model", "")
    return model if model in families.names() else TEXT


def _every_part(row: Row) -> Changes:
    """Every part that can be trained."""
    mode = "full" if row.get("adapter") == "none" else "adapter"
    return {"model__train": dict.fromkeys(families.get(_family(row)).trained_names(), mode)}


def _mixed_parts(row: Row) -> Changes:
    """The first part by the adapter, the last one fully; without an adapter only the last one."""
    first, *_, last = (*families.get(_family(row)).trained_names(), "")
    first_mode = "frozen" if row.get("adapter") == "none" else "adapter"
    return {"model__train": {first: first_mode} | ({last: "full"} if last else {})}


def _one_part(row: Row) -> Changes:
    """Another part than the first one, where there are several."""
    mode, names = "full" if row.get("adapter") == "none" else "adapter", families.get(_family(row)).trained_names()
    return {"model__train": {names[1 % len(names)]: mode}}


ADAPTERS: Mapping[str, Value] = {
    name: {"adapter__type": name} for name in ("lora", "locon", "dora", "loha", "lokr", "diag-oft", "boft", "none")
}
SIZES: Mapping[str, Value] = {
    "default": {},
    "alpha": {"adapter__rank": 3, "adapter__alpha": 5.0},
    "pattern": {"adapter__rank": 4, "adapter__rank_pattern": {".+(to_q|q_proj)": 2}},
    "stabilized": {"adapter__rank": 4, "adapter__alpha": 2.0, "adapter__rank_stabilized": True},
    "convolutions": {"adapter__rank": 4, "adapter__conv_rank": 2},
    "blocks": {"adapter__block_size": 4},
}
FORMS: Mapping[str, Value] = {
    "default": {},
    "pissa": {"adapter__init": "pissa"},
    "whole": {"adapter__full_matrix": True},
    "both factored": {"adapter__decompose_both": True, "adapter__factor": 4},
    "one stage": {"adapter__num_stages": 1},
}
TARGETS: Mapping[str, Value] = {
    "default": {},
    "some": {"adapter__targets": [".+(to_q|q_proj)"]},
    "saved": {
        "adapter__modules_to_save": [".*(embed_tokens|norm_out.*|proj_out|all_final_layer.*|latent_out|conv_out)"]
    },
}
RECOMPUTE: Mapping[str, Value] = {
    str(value): {"train__checkpointing": value} for value in ("none", "selective", "full", "full 1, selective", 2)
}
STRATEGIES: Mapping[str, Value] = {
    "none": {"parallel__strategy": "none"},
    "auto": {"parallel__strategy": "auto"},
    "full": {"parallel__strategy": "full", "parallel__devices": 2},
    "full kept": {"parallel__strategy": "full", "parallel__devices": 2, "parallel__reshard_after_forward": False},
    "grad_op": {"parallel__strategy": "grad_op", "parallel__devices": 2},
    "ddp": {"parallel__strategy": "ddp", "parallel__devices": 2},
    "hybrid": {"parallel__strategy": "hybrid", "parallel__devices": 4, "parallel__shard_size": 2},
}
OFFLOAD: Mapping[str, Value] = {
    "none": {},
    "a block": {"parallel__offload_blocks": 1},
    "all blocks": {"parallel__offload_blocks": 1.0},
    "all": {"parallel__cpu_offload": True},
}
OPTIMIZERS: Mapping[str, Value] = {
    "adamw": {},
    "average": {"optim__ema": 0.5},
    "schedulefree": {"optim__type": "schedulefree"},
    **({"adamw8bit": {"optim__type": "adamw8bit"}} if find_spec("torchao") else {}),
}
SCHEDULES: Mapping[str, Value] = {
    "constant": {},
    "cosine": {"optim__schedule": "cosine", "optim__warmup": 1},
    "linear": {"optim__schedule": "linear", "optim__clip_norm": None},
    "one epoch": {"train__epochs": 1, "train__steps": 1000},
}
BATCHES: Mapping[str, Value] = {
    "2 of 1": {"train__batch_size": 2, "train__micro_batch": 1},
    "1": {"train__batch_size": 1, "train__micro_batch": 1},
    "4 of 2": {"train__batch_size": 4, "train__micro_batch": 2},
    "3 of 4": {"train__batch_size": 3, "train__micro_batch": 4},
}
BASES: Mapping[str, Value] = {
    "none": {"quantize__format": "none"},
    "nf4": {"quantize__format": "nf4"},
    "int8": {"quantize__format": "int8", "quantize__cache": True},
    "fp8": {"quantize__format": "fp8"},
    "by layer": {
        "quantize__format": "nf4",
        "quantize__formats": {".*(to_q|q_proj)": "fp8"},
        "quantize__keep": [".*(to_k|k_proj)"],
    },
}
EXPORTS: Mapping[str, Value] = {
    "auto": {"export__what": "auto"},
    "merged": lambda row: {"export__what": "full" if row.get("adapter") == "none" else "merged"},
    "none": {"export__what": "none"},
}
FORMATS: Mapping[str, Value] = {
    name: {"export__format": name}
    for name in ("auto", "diffusers", "comfyui", "kohya", "lycoris", "peft", "single_file")
}
COMMON: Mapping[str, Mapping[str, Value]] = {
    "adapter": ADAPTERS,
    "adapter's size": SIZES,
    "adapter's form": FORMS,
    "adapter's dropout": {"0": {}, "0.2": {"adapter__dropout": 0.2}},
    "adapter's targets": TARGETS,
    "parts": {"default": {}, "every": _every_part, "mixed": _mixed_parts, "one": _one_part},
    "base": BASES,
    "recompute": RECOMPUTE,
    "strategy": STRATEGIES,
    "offload": OFFLOAD,
    "precision": {"fp32": {"train__precision": "fp32"}, "bf16": {"train__precision": "bf16"}},
    "compile": {"off": {}, "on": {"train__compile": True, "train__compile_backend": "aot_eager"}},
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "batch": BATCHES,
    "validation": {"off": {}, "on": {"data__validation": 2, "data__validation_every": 2}},
    "checkpoints": {"last": {}, "every": {"checkpoint__every": 1, "checkpoint__keep": 1}},
    "export": EXPORTS,
    "format": FORMATS,
    "dtype": {name: {"export__dtype": name} for name in ("bf16", "fp16", "fp32", "fp8")},
}


def _image_choices(root: Path) -> Mapping[str, Mapping[str, Value]]:
    return {
        "model": {name: {"model__family": name} for name in IMAGES},
        **COMMON,
        "options": {
            "default": {},
            "windows": {"model__options": {"text_windows": 2}},
            "tokens": {"model__options": {"max_tokens": 16}},
            "layers": lambda row: {
                "model__options": {"text_layers": [0, 1] if row.get("model") == "flux3" else [0, 1, 2]}
            },
            "without": {"model__options": {"without": ["text_encoder_3"]}},
        },
        "encoders": {"bf16": {}, "quantized": {"quantize__encoders": True}},
        "data": {
            "pictures": {},
            "folders": {
                "data__folders": [{"path": str(root / "more"), "weight": 0.5, "resolutions": [32], "flip": True}]
            },
            "table": {"data__path": str(root / "table")},
            "edits": {"data__references": str(root / "before")},
            "pairs": {"data__rejected": str(root / "rejected"), "objective__dpo_beta": 4.0},
            "usual": {"data__regularization": str(root / "usual"), "data__regularization_weight": 0.5},
        },
        "masks": {
            "none": {},
            "masks": {"data__masks": str(root / "masks"), "data__mask_background": 0.1},
            "borders": {"data__fit": "pad"},
            "crops": {"data__fit": "drop", "data__most_cropped": 0.6},
        },
        "sizes": {
            "one": {},
            "each": {"data__resolutions": [32, 64]},
            "largest": {"data__resolutions": [32, 64], "data__at_resolutions": "largest"},
            "squares": {"data__max_aspect": 1},
        },
        "captions": {
            "whole": {},
            "dropped": {"data__caption_dropout": 0.5},
            "lines": {"data__caption_lines": True, "data__trigger": "sks"},
        },
        "mirrored": {"no": {}, "yes": {"data__flip": True}},
        "objective": {
            "default": {},
            "uniform": {"objective__density": "uniform", "objective__shift": "constant"},
            "mode": {"objective__density": "mode", "objective__shift": "none"},
            "guidance": {"objective__guidance": 3.5},
            "min snr": {"objective__min_snr_gamma": 5.0},
            "velocity": {"objective__prediction": "v_prediction", "objective__zero_terminal_snr": "on"},
        },
        "samples": {"off": {}, "on": _samples({"sample__size": [64, 64], "sample__steps": 2})},
    }


def _text_choices(root: Path) -> Mapping[str, Mapping[str, Value]]:
    def of(folder: str, **changes: Any) -> Changes:
        return {"data__path": str(root / folder), **changes}

    return {
        "model": {
            "dense": {"model__family": TEXT},
            **{name: {"model__family": TEXT, "model__path": str(root / name)} for name in MIXTURES},
        },
        **COMMON,
        "options": {
            "default": {},
            "eager": {"model__options": {"attention": "eager"}},
            "new tokens": {
                "model__options": {"new_tokens": ["<tool>"]},
                "adapter__modules_to_save": ["embed_tokens", "lm_head"],
            },
        },
        "data": {
            "texts": {},
            "talks": of("talks", data__chat_template="mistral"),
            "answers": of("answers"),
            "pairs": of("pairs", objective__dpo_beta=0.5),
            "folders": of("texts", data__folders=[{"path": str(root / "answers"), "weight": 0.5}]),
        },
        "validation": {
            "off": {},
            "on": lambda row: {
                "data__validation": str(root / "held out" / row.get("data", "texts")),
                "data__validation_every": 2,
            },
        },
        "packing": {name: {"data__packing": name} for name in ("auto", "whole", "split")},
        "too long": {"drop": {}, "cut": {"data__too_long": "cut", "data__length": 64}},
        "noise": {"off": {}, "on": {"train__neftune_alpha": 5.0}},
        "router": {"default": {}, "weighted": {"objective__router_weight": 0.01}},
        "samples": {
            "off": {},
            "on": _samples({"sample__tokens": 4}),
            "answers": _samples({"sample__tokens": 4, "sample__chat": "on", "data__chat_template": "mistral"}),
        },
    }


def _both_choices(root: Path) -> Mapping[str, Mapping[str, Value]]:
    questions, sequences = (str(root / "pictures" / f"{name}.jsonl") for name in ("questions", "sequences"))
    return {
        "model": {BOTH: {"model__family": BOTH}},
        **COMMON,
        "encoders": {"bf16": {}, "quantized": {"quantize__encoders": True}},
        "data": {
            "pictures": {},
            "questions": {"data__questions": questions, "data__question_share": 0.3},
            "sequences": {"data__path": None, "data__questions": sequences},
            "edits": {"data__references": str(root / "before")},
            "usual": {"data__regularization": str(root / "usual")},
            "table": {"data__path": str(root / "table")},
        },
        "masks": {"none": {}, "masks": {"data__masks": str(root / "masks")}},
        "packs": {"off": {}, "on": {"data__pack_tokens": 300}},
        "dropped": {
            "default": {},
            "all": {"data__caption_dropout": 0.5, "data__latents_dropout": 0.9, "data__vision_dropout": 0.9},
        },
        "objective": {
            "default": {},
            "items": {"objective__token_weight": "item", "objective__text_weight": 0.25},
            "sqrt": {"objective__token_weight": "sqrt", "objective__mse_weight": 2.0},
            "uniform": {"objective__density": "uniform", "objective__shift": "constant"},
        },
        "samples": {
            "off": {},
            "on": _samples({"sample__size": [64, 64], "sample__steps": 2}),
            "questions": _samples({"sample__size": [64, 64], "sample__steps": 2, "sample__tokens": 4})
            | {"sample__questions": ["What is it?"], "sample__images": [str(root / "pictures" / "00.png")]},
        },
    }


def _samples(changes: Changes) -> Changes:
    return {"sample__every": 2, "sample__prompts": ["a picture"], **changes}
