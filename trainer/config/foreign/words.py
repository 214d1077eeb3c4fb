"""Words that several trainers share: optimizers, schedules, number types, adapters, and keys without a field here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.config import aliases
from trainer.config.foreign.table import Changed, Conversion, Given, LeftOut, is_on, number, plain, reasons
from trainer.config.schema import RunConfig
from trainer.config.sections import ADAPTERS, as_name

OPTIMIZERS: Mapping[str, Any] = {
    **dict.fromkeys(("adamw", "adam", "adamwoptimi", "optimiadamw", "adamwtorch", "torchadamw"), "adamw"),
    **dict.fromkeys(
        ("adamw8bit", "pagedadamw8bit", "bnbadamw8bit", "bnbadamw8bitpaged", "adamw8bitkahan"), "adamw8bit"
    ),
    **dict.fromkeys(("adamwschedulefree", "schedulefreeadamw", "radamschedulefree"), "schedulefree"),
    "adamwbf16": Changed("adamw", "its state is bf16 there, and fp32 here"),
}
OWN_RATE = ("prodigy", "dadapt", "automagic", "adafactor")
"""Optimizers that find the rate themselves, for which a learning rate is a factor: a run of adamw at 1.0 diverges."""
SCHEDULES: Mapping[str, Any] = {
    **dict.fromkeys(("constant", "constantwithwarmup"), "constant"),
    "linear": "linear",
    "cosine": "cosine",
    **dict.fromkeys(
        ("cosinewithrestarts", "cosinewithhardrestarts", "cosineannealingwarmrestarts"),
        Changed("cosine", "a schedule has no restarts here"),
    ),
    **dict.fromkeys(
        ("polynomial", "rex", "cosinewithminlr", "warmupstabledecay", "piecewiseconstant", "inversesqrt"),
        Changed("linear", "the nearest of constant, linear and cosine"),
    ),
}
PRECISIONS: Mapping[str, Any] = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "no", "float", "tfloat32"), "fp32"),
    **dict.fromkeys(("fp16", "float16"), Changed("bf16", "fp16 overflows above 65504 and needs loss scaling")),
}
SAVED: Mapping[str, Any] = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
}
ATTENTION = "the kernel is chosen by train.attention: auto takes the fastest"
CACHED = "latents and captions are always encoded once and kept on disk"
BUCKETS = "buckets follow from data.resolution and data.max_aspect"
STEPS_ONLY = "it counts epochs or minutes, and checkpoints and samples here count steps"
LOOKS = "a change of the picture's colours, scale or angle is not built in; data.flip is"
NOISE = "noise is drawn as the model was trained; an offset or a second noise is not built in"
LOSSES = "the loss is the mean squared error of the model's own recipe"
TAGS = "captions are trained as they are written; tags are not shuffled or dropped"
PLACES = "runs, checkpoints and exports lie in the run's folder"
MANY_RATES = "all that is trained has one learning rate, optim.lr"
STATE = "another trainer's state cannot be continued; adapter.start continues from the weights of an adapter"
COMPONENTS = "components come with model.path, or from model.base"
HOUSE = "logs, threads and devices are chosen here by other fields, or by the program"
PUBLISH = "nothing is published by a config"
SAMPLER = "samples are drawn by the model's own sampler"


def key_values(items: list[Any]) -> dict[str, Any]:
    """Return {key: value} of a list of `key=value`, as of optimizer arguments."""
    pairs = (str(item).partition("=") for item in items)
    return {key.strip(): value.strip() for key, _, value in pairs}


def optimizer(value: Any, given: Given) -> Any:
    """Convert the name of an optimizer; adamw takes the place of one that is not built in."""
    name = plain(value)
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    why = next(
        (why for word in (name, name.removesuffix("8bit")) if (why := aliases.refused_value("optim.type", word))), ""
    )
    return Changed("adamw", f"{value} {why.partition(';')[0] or 'is not built in'}; adamw takes its place")


def rate(value: Any, given: Given) -> Any:
    """Convert a learning rate; one of an optimizer that finds the rate itself is left out."""
    names = [
        plain(given[key])
        for key in ("optimizer_type", "train.optimizer", "optimizer", "optimizer.optimizer", "optimizer.type")
        if key in given
    ]
    if any(name.startswith(OWN_RATE) for name in names) and number(value) >= 0.01:
        raise LeftOut(
            f"{number(value):g} is a factor for {names[0]}, which finds the rate itself; adamw needs a rate such "
            "as 1e-4"
        )
    return number(value)


def betas(value: Any, given: Given) -> Any:
    """Convert [beta1, beta2], also as a text."""
    numbers = value if isinstance(value, list) else str(value).strip("()[] ").split(",")
    first, second, *_ = map(number, numbers)
    return {"optim.beta1": first, "optim.beta2": second}


def adapter_kind(value: Any, given: Given) -> Any:
    """Convert the name of a kind of adapter; a LoRA takes the place of one that is not built in."""
    default = RunConfig.model_fields["adapter"].default.type
    known = {plain(name): name for name in ADAPTERS} | {"standard": default}
    return known.get(plain(value)) or Changed(default, f"this kind is not built in; a {default} takes its place")


def name(value: Any, given: Given) -> Any:
    """Convert the name of a project."""
    return as_name(value)


def average(switch_key: str) -> Conversion:
    """Return the conversion of the decay of an average that another key switches on."""

    def convert(value: Any, given: Given) -> float:
        if not is_on(given.get(switch_key, False)):
            raise LeftOut("the average is off, as here")
        return number(value)

    return convert


def clip(value: Any, given: Given) -> Any:
    """Convert the norm that gradients are clipped to; 0 means none."""
    return number(value) or None


def side(value: Any, given: Given) -> Any:
    """Convert a resolution: a side, `1024,768`, or [1024, 768], which stands for its area."""
    parts = value if isinstance(value, list) else str(value).lower().replace("x", ",").split(",")
    sides = [number(part) for part in parts]
    if len(sides) == 1 or sides[0] == sides[1]:
        return sides[0]
    area = round(math.sqrt(sides[0] * sides[1]))
    return Changed(area, "images keep their aspect ratio, at about this value squared in pixels")


def sides(value: Any, given: Given) -> list[Any]:
    """Convert one resolution or several to sides; each may be (width, height)."""
    several = value if isinstance(value, list) else str(value).split(",")
    found = [side(one, given) for one in several]
    return [one.value if isinstance(one, Changed) else one for one in found]


def size(value: Any, given: Given) -> list[Any]:
    """Convert the size of a sample, `1024x768` or a side; of several the first."""
    width, _, height = str(value).split(",")[0].lower().partition("x")
    return [number(width), number(height or width)]


def quantized(value: Any, given: Given) -> Any:
    """Convert the number type of a frozen base."""
    name = plain(value)
    if name in ("", "none", "nochange", "bfloat16", "bf16", "float16", "fp16", "float32", "fp32", "tfloat32"):
        raise LeftOut("the base stays in bf16, as here")
    exact = {
        "nfloat4": "nf4",
        "nf4": "nf4",
        "nf4bnb": "nf4",
        "int8quanto": "int8",
        "int8torchao": "int8",
        "int8": "int8",
        "qint8": "int8",
        "float8": "fp8",
        "qfloat8": "fp8",
        "fp8": "fp8",
        "fp8quanto": "fp8",
        "fp8torchao": "fp8",
        "float8e4m3fn": "fp8",
    }
    if name in exact:
        return exact[name]
    few = any(bits in name for bits in ("2", "3", "4", "5", "6")) and "8" not in name
    near = "nf4" if few else "fp8" if "f8" in name or "fp8" in name or "floatw8" in name or "e4m3" in name else "int8"
    return Changed(near, "the nearest of nf4, int8 and fp8")


def prompts(texts: list[Any], given: Given) -> Any:
    """Convert prompts: texts, or sections with a prompt."""
    found = [text.get("prompt") if isinstance(text, dict) else text for text in texts]
    return [str(text) for text in found if text]


SHARED = reasons(
    {
        CACHED: "cache_latents cache_latents_to_disk cache_text_encoder_outputs cache_text_encoder_outputs_to_disk "
        "vae_batch_size text_encoder_batch_size skip_cache_check cache_info cache_text_embeddings",
        BUCKETS: "min_bucket_reso max_bucket_reso bucket_reso_steps bucket_no_upscale random_crop "
        "resize_interpolation aspect_bucket_rounding",
        LOOKS: "color_aug face_crop_aug_range",
        NOISE: "noise_offset noise_offset_random_strength adaptive_noise_scale multires_noise_iterations "
        "multires_noise_discount ip_noise_gamma ip_noise_gamma_random_strength perlin_noise offset_noise "
        "noise_offset_probability input_perturbation",
        LOSSES: "huber_c huber_scale huber_schedule debiased_estimation_loss scale_v_pred_loss_like_noise_pred "
        "v_pred_like_loss min_timestep max_timestep loss_type",
        TAGS: "shuffle_caption keep_tokens keep_tokens_separator secondary_separator caption_separator "
        "caption_tag_dropout_rate caption_dropout_every_n_epochs token_warmup_min token_warmup_step enable_wildcard "
        "weighted_captions caption_suffix",
        PLACES: "output_dir logging_dir tokenizer_cache_dir",
        MANY_RATES: "text_encoder_lr",
        PUBLISH: "push_to_hub hub_model_id",
    }
)
"""{key: why}, in each trainer that has it."""
