"""SimpleTuner: config.json, with or without `--` before its keys, multidatabackend.json and lycoris_config.json.

Facts from documentation/OPTIONS.md, documentation/DATALOADER.md and the fields of its server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.config.foreign import words
from trainer.config.foreign.table import (
    BaseModel,
    Changed,
    Given,
    LeftOut,
    Part,
    Row,
    To,
    Tool,
    empty_is_off,
    flat,
    is_on,
    number,
    plain,
    reasons,
    switch,
    word,
)

ROLES = {"image": "train", "video": "off", "audio": "off", "eval": "validation"}


def _part(tree: Any) -> Part | None:
    if isinstance(tree, dict):
        keys = {str(key).removeprefix("--") for key in tree}
        if "algo" in keys and keys & {"linear_dim", "linear_alpha", "factor", "multiplier"}:
            return "adapter"
        return "run" if "model_family" in keys else None
    rows = [row for row in tree if isinstance(row, dict)] if isinstance(tree, list) else []
    kinds = {"instance_data_dir", "dataset_type", "type"}
    return "data" if rows and all("id" in row and kinds & row.keys() for row in rows) else None


def _given(files: Mapping[Part, Any]) -> dict[str, Any]:
    lycoris = {f"lycoris.{key}": value for key, value in flat(files.get("adapter") or {}).items()}
    return flat(files["run"]) | lycoris


def _rows(files: Mapping[Part, Any]) -> list[Row]:
    data = [row for row in files.get("data") or () if isinstance(row, dict)]
    shared = {key: value for key, value in _given(files).items() if key in ("resolution_type", "instance_prompt")}
    return [(f"multidatabackend[{at}]", shared | flat(row)) for at, row in enumerate(data)]


def _kind(value: Any, given: Given) -> Any:
    if plain(value) == "full":
        return "none"
    if plain(value) != "lora":
        raise LeftOut("this kind of training is not built in")
    if plain(given.get("lora_type")) == "lycoris":
        return words.adapter_kind(given.get("lycoris.algo", value), given)
    return words.adapter_kind("dora" if is_on(given.get("use_dora", False)) else value, given)


def _side(value: Any, given: Given) -> Any:
    kind = plain(given.get("resolution_type", "pixel_area"))
    if kind == "area":
        return round(math.sqrt(number(value)) * 1024)
    if kind == "pixel":
        return Changed(number(value), "it is the shorter side there; here it is the side of a square of the same area")
    return number(value)


def _shift(value: Any, given: Given) -> dict[str, Any]:
    if not number(value or 0):
        return {"objective.shift": "none"}
    return {"objective.shift": "constant", "objective.shift_factor": number(value)}


def _role(value: Any, given: Given) -> str:
    if plain(value) in ROLES:
        return ROLES[plain(value)]
    if plain(value) == "conditioning":
        return "masks" if plain(given.get("conditioning_type")) == "mask" else "references"
    return "off"


def _captions(value: Any, given: Given) -> Any:
    if plain(value) == "textfile":
        raise LeftOut("captions are .txt files beside the images here too")
    return Changed("empty", "captions are .txt files, a metadata.jsonl or a table; file names are not read")


FIELDS = {
    "model_type": To("adapter.type", _kind),
    "lora_rank": To("adapter.rank"),
    "lora_alpha": To("adapter.alpha", empty_is_off),
    "lora_dropout": To("adapter.dropout", empty_is_off),
    "lycoris.linear_dim": To("adapter.rank"),
    "lycoris.linear_alpha": To("adapter.alpha"),
    "lycoris.factor": To("adapter.factor"),
    "lycoris.full_matrix": To("adapter.full_matrix", switch(True, False)),
    "init_lora": To("adapter.start", empty_is_off),
    "base_model_precision": To("quantize.format", words.quantized),
    "text_encoder_1_precision": To("quantize.encoders", lambda value, given: bool(words.quantized(value, given))),
    "train_text_encoder": To("text_encoders", switch(True)),
    "optimizer": To("optim.type", words.optimizer),
    "learning_rate": To("optim.lr", words.rate),
    "optimizer_beta1": To("optim.beta1", empty_is_off),
    "optimizer_beta2": To("optim.beta2", empty_is_off),
    "adam_beta1": To("optim.beta1"),
    "adam_beta2": To("optim.beta2"),
    "adam_weight_decay": To("optim.weight_decay"),
    "adam_epsilon": To("optim.eps"),
    "lr_scheduler": To("optim.schedule", word(words.SCHEDULES, "this schedule is not built in")),
    "lr_warmup_steps": To("optim.warmup"),
    "max_grad_norm": To("optim.clip_norm", words.clip),
    "ema_decay": To("optim.ema", words.average("use_ema")),
    "max_train_steps": To("train.steps", empty_is_off),
    "num_train_epochs": To("train.epochs", empty_is_off),
    "train_batch_size": To("train.micro_batch"),
    "gradient_accumulation_steps": To(
        "train.batch_size", lambda value, given: number(value) * number(given.get("train_batch_size", 1))
    ),
    "seed": To("train.seed", empty_is_off),
    "mixed_precision": To("train.precision", word(words.PRECISIONS, "this number type is not built in")),
    "gradient_checkpointing": To("train.checkpointing", switch("full", "none")),
    "gradient_checkpointing_interval": To("train.checkpointing", empty_is_off),
    "musubi_blocks_to_swap": To("parallel.offload_blocks", empty_is_off),
    "resolution": To("data.resolution", _side),
    "caption_dropout_probability": To("data.caption_dropout", lambda value, given: number(value)),
    "instance_prompt": To("data.trigger", empty_is_off),
    "snr_gamma": To("objective.min_snr_gamma", empty_is_off),
    "prediction_type": To(
        "objective.prediction",
        word({"epsilon": "epsilon", "vprediction": "v_prediction"}, "the model says what it predicts"),
    ),
    "rescale_betas_zero_snr": To("objective.zero_terminal_snr", switch("on")),
    "flow_use_uniform_schedule": To("objective.density", switch("uniform", "logit_normal")),
    "flow_sigmoid_scale": To("objective.logit_std"),
    "flow_schedule_shift": To("objective.shift_factor", _shift),
    "flow_schedule_auto_shift": To("objective.shift", switch("linear")),
    "flux_guidance_value": To("objective.guidance"),
    "tokenizer_max_length": To("model.options.max_tokens", empty_is_off),
    "validation_prompt": To("sample.prompts", lambda value, given: words.prompts([empty_is_off(value, given)], given)),
    "validation_negative_prompt": To("sample.negative"),
    "validation_step_interval": To("sample.every"),
    "validation_steps": To("sample.every"),
    "validation_resolution": To("sample.size", words.size),
    "validation_guidance": To("sample.guidance"),
    "validation_num_inference_steps": To("sample.steps"),
    "validation_seed": To("sample.seed", empty_is_off),
    "checkpoint_step_interval": To("checkpoint.every"),
    "checkpointing_steps": To("checkpoint.every"),
    "checkpoints_total_limit": To("checkpoint.keep"),
    "report_to": To(
        "trackers.wandb",
        lambda value, given: {f"trackers.{name}": True for name in ("tensorboard", "wandb") if value in (name, "all")},
    ),
    "tracker_project_name": To("trackers.project", words.name),
    "tracker_run_name": To("name"),
}

ROW_FIELDS = {
    "instance_data_dir": To("path"),
    "dataset_type": To("role", _role),
    "disabled": To("off", switch(True, False)),
    "disable": To("off", switch(True, False)),
    "is_regularisation_data": To("regularization", switch(True, False)),
    "is_regularization_data": To("regularization", switch(True, False)),
    "repeats": To("weight", lambda value, given: number(value) + 1),
    "resolution": To("resolutions", lambda value, given: words.sides([_plain_side(value, given)], given)),
    "maximum_aspect_ratio": To("data.max_aspect"),
    "crop_aspect": To(
        "data.max_aspect",
        word({"square": Changed(1.0, "every image is cropped to a square")}, "shapes follow from the images"),
    ),
    "caption_strategy": To("data.missing_caption", _captions),
    "instance_prompt": To("data.trigger", empty_is_off),
    "train_batch_size": To("micro_batch", empty_is_off),
}


def _plain_side(value: Any, given: Given) -> Any:
    found = _side(value, given)
    return found.value if isinstance(found, Changed) else found


LEFT_OUT = words.SHARED | reasons(
    {
        words.STATE: "resume_from_checkpoint",
        words.STEPS_ONLY: "validation_epoch_interval checkpoint_epoch_interval validation_epochs",
        words.LOSSES: "use_soft_min_snr loss_type flow_*",
        words.SAMPLER: "validation_noise_scheduler validation_guidance_rescale validation_*",
        words.COMPONENTS: "pretrained_* vae_*",
        words.CACHED: "cache_* compress_disk_cache text_embeds image_embeds vae_cache_* write_batch_size "
        "preserve_data_backend_cache skip_file_discovery text_cache_* metadata_backend default",
        words.BUCKETS: "crop crop_style minimum_image_size maximum_image_size target_downsample_size "
        "minimum_aspect_ratio disable_bucket_pruning resolution_type aspect_* delete_*",
        words.TAGS: "caption_shuffle.* prepend_instance_prompt only_instance_prompt disable_multiline_split "
        "caption_filter_list",
        words.PUBLISH: "push_* hub_* publishing_config modelspec_comment",
        words.HOUSE: "quantize_via id disable_benchmark tracker_* attention_mechanism fuse_qkv_projections "
        "allow_tf32 torch_num_threads num_eval_images eval_* dataloader_* max_workers offload_* keep_vae_loaded "
        "quantize_activations print_* strict_epoch_limit override_dataset_config webhook_*",
        "images are read from this machine": "type aws_* csv_* parquet.* config.* huggingface.* dataset_name",
        "the optimizer has no such setting": "optimizer_* grad_clip_method lion_*",
        "the schedule has no such setting": "lr_* ",
        "the adapter has no such setting": "lycoris.* lora_type lora_format lora_init_type peft_lora_target_modules "
        "flux_lora_target lycoris_config use_dora",
        "it is read with what it belongs to": "use_ema conditioning_* source_dataset_id",
        "the average is taken after every step": "ema_*",
        "quantize.format has no further settings": "sdnq_*",
        "train.checkpointing and parallel.offload_blocks save memory": "gradient_checkpointing_* group_offload* "
        "enable_group_offload ramtorch* musubi_* low_vram",
        "the base is loaded in bf16": "base_model_default_dtype",
        "text encoders have the format of the base": "text_encoder_*",
        "guidance is one value in training: objective.guidance": "flux_guidance_*",
        "every folder is drawn as often as it has images, times its weight": "probability data_backend_sampling "
        "ignore_epochs max_samples",
        "a method of its own, which is not built in": "controlnet* crepa_* urepa_* irepa_* tread_* distillation_* "
        "diff2flow_* mixflow_* scheduled_sampling_* layersync_* twinflow_*",
        "it is the name of the file with folders": "data_backend_config",
    }
)

SIMPLETUNER = Tool(
    name="SimpleTuner",
    part=_part,
    given=_given,
    rows=_rows,
    model=BaseModel(
        path=(
            "pretrained_transformer_model_name_or_path",
            "pretrained_unet_model_name_or_path",
            "pretrained_model_name_or_path",
        ),
        base=("pretrained_model_name_or_path",),
        kinds=lambda given: [
            f"{given.get('model_family')}{given.get('model_flavour') or ''}",
            given.get("model_family"),
        ],
        kind_keys=("model_family", "model_flavour"),
    ),
    fields=FIELDS,
    row_fields=ROW_FIELDS,
    left_out=LEFT_OUT,
    defaults={"gradient_accumulation_steps": 1},
    files={"data_backend_config": "data", "lycoris_config": "adapter"},
)
