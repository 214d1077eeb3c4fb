"""Names and values of FSDP1 and of other trainers: our equivalent, or why there is none."""

from __future__ import annotations

import re
from collections.abc import Mapping

KEYS = {
    "sharding_strategy": "parallel.strategy",
    "num_gpus": "parallel.devices",
    "gpus": "parallel.devices",
    "forward_prefetch": "parallel.prefetch_forward",
    "backward_prefetch": "parallel.prefetch_backward",
    "gradient_checkpointing": "train.checkpointing",
    "mixed_precision": "train.precision",
    "learning_rate": "optim.lr",
    "num_train_epochs": "train.epochs",
    "max_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
}
"""{key of another trainer, in any section: our equivalent field}"""

VALUES: Mapping[str, Mapping[str, str | int]] = {
    "parallel.strategy": {
        "full_shard": "full",
        "shard_grad_op": "grad_op",
        "hybrid_shard": "hybrid",
        "_hybrid_shard_zero2": "hybrid",
        "no_shard": "ddp",
    },
    "parallel.prefetch_forward": {"true": 1, "false": 0},
    "parallel.prefetch_backward": {"backward_pre": 1, "backward_post": 0, "none": 0},
    "train.checkpointing": {"true": "full", "false": "none"},
    "train.precision": {
        "bf16-mixed": "bf16",
        "bf16-true": "bf16",
        "bfloat16": "bf16",
        "32": "fp32",
        "32-true": "fp32",
        "float32": "fp32",
    },
    "optim.type": {"adamw_8bit": "adamw8bit"},
}
"""{our field: {value of another trainer, in lower case: our value}}"""

ALSO = {("parallel.strategy", "_hybrid_shard_zero2"): ("parallel.reshard_after_forward", False)}
"""{(field, foreign value): (second field, value)}: a foreign value that also sets a second field, unless that field is
given."""

_FP16 = "overflows above 65504 and needs loss scaling; use bf16"

REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "train.precision": dict.fromkeys(("fp16", "fp16-mixed", "16", "16-mixed", "16-true", "float16", "half"), _FP16),
    "optim.type": {
        "muon": "gives results that differ by 1.5e-3 from one process if sharded; use adamw",
        "adafactor": "raises an error on sharded weights (DTensors) in torch; use adamw8bit",
        "prodigy": "is not built in; use schedulefree, which needs no schedule either",
        "lion": "is not built in; use adamw, or adamw8bit for smaller state",
    },
}
"""{our field: {value of another trainer, in lower case: why it is refused, and what to use instead}}"""

REFUSED_KEYS = (
    (r"limit_all_gathers", "FSDP2 limits its all-gathers by itself; remove it"),
    (r"use_orig_params", "FSDP2 always keeps the original parameters; remove it"),
    (r"sync_module_states|cpu_ram_efficient_loading", "every rank reads only its own slices; remove it"),
    (r"sync_batch_?norm", "no model here has batch norm to train; remove it"),
    (r"split_model_over_gpus", "is what parallel.strategy: full does over all GPUs; set that"),
    (
        r".*blocks?_(to_)?swap.*|swap_blocks|low_?vram|medvram|layer_offloading.*",
        "use parallel.offload_blocks: auto, or a number of blocks, for frozen weights; train.checkpointing: full for "
        "activations; parallel.cpu_offload: true with parallel.strategy: full where the whole model is trained",
    ),
)
"""(pattern of a key of another trainer, in any section; why it is refused)"""


def field_of(key: str) -> str | None:
    """Return our field for a key of another trainer, or None."""
    return KEYS.get(_plain(key))


def refused_key(key: str) -> str | None:
    """Return why a key of another trainer is refused, or None for a key that is not in REFUSED_KEYS."""
    return next((answer for pattern, answer in REFUSED_KEYS if re.fullmatch(pattern, _plain(key))), None)


def values_of(field: str, value: object) -> dict[str, str | int]:
    """Return {our field: our value} for a foreign `value` of our `field`; empty for a value that is not foreign.

    The first key is `field`. A second one, from ALSO, applies only if the config does not set it.
    """
    text = str(value).lower()
    if text not in VALUES.get(field, {}):
        return {}
    return {field: VALUES[field][text], **dict([ALSO[field, text]] if (field, text) in ALSO else [])}


def refused_value(field: str, value: object) -> str | None:
    """Return why a foreign `value` of our `field` is refused, or None."""
    return REFUSED_VALUES.get(field, {}).get(str(value).lower())


def _plain(key: str) -> str:
    """Return the key in lower case, without accelerate's prefix for FSDP options."""
    return key.lower().removeprefix("fsdp_")
