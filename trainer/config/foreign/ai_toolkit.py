"""ostris' ai-toolkit: one YAML file with a job. Facts from config/examples and toolkit/config_modules.py."""

from __future__ import annotations

import re
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

CONTROLS = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")
"""Images that a sample is made from."""


def _part(tree: Any) -> Part | None:
    config = tree.get("config") if isinstance(tree, dict) and "job" in tree else None
    return "run" if isinstance(config, dict) and isinstance(config.get("process"), list) else None


def _given(files: Mapping[Part, Any]) -> dict[str, Any]:
    config = files["run"]["config"]
    first, *others = [process for process in config["process"] if isinstance(process, dict)] or [{}]
    found = flat({key: value for key, value in first.items() if key != "datasets"})
    found |= {"name": config.get("name"), "job": files["run"]["job"]}
    if not any(key.startswith("network.") for key in found):
        found["network.type"] = "none"  # the model itself is trained
    found |= {f"process[{at}]": "" for at, _ in enumerate(others, 1)}
    found |= {f"meta.{key}": "" for key in files["run"].get("meta") or {} if key not in ("name", "version")}
    return found


def _rows(files: Mapping[Part, Any]) -> list[Row]:
    first = next((one for one in files["run"]["config"]["process"] if isinstance(one, dict)), {})
    return [(f"datasets[{at}]", row) for at, row in enumerate(first.get("datasets") or ()) if isinstance(row, dict)]


def _kinds(given: Given) -> list[object]:
    flags = [
        key.removeprefix("model.is_") for key, value in given.items() if key.startswith("model.is_") and is_on(value)
    ]
    return [given.get("model.arch"), *flags]


def _kind(value: Any, given: Given) -> Any:
    if plain(value) == "lora" and number(given.get("network.conv") or 0):
        return words.adapter_kind("locon", given)
    return words.adapter_kind(value, given)


def _sized(value: Any, given: Given) -> Any:
    if plain(given.get("network.type")) == "lokr" and is_on(given.get("network.lokr_full_rank", True)):
        raise LeftOut("full matrices have no rank: adapter.full_matrix")
    return number(value)


def _only_lokr(conversion: Any) -> Any:
    def convert(value: Any, given: Given) -> Any:
        if plain(given.get("network.type")) != "lokr":
            raise LeftOut("it is for another kind of adapter")
        return conversion(value, given)

    return convert


def _quantized(value: Any, given: Given) -> Any:
    if not is_on(given.get("model.quantize", False)):
        raise LeftOut("the base stays in bf16, as here")
    return words.quantized(str(value).partition("|")[0], given)


def _timesteps(value: Any, given: Given) -> Any:
    table = {
        "sigmoid": {"objective.density": "logit_normal", "objective.shift": "none"},
        "linear": {"objective.density": "uniform", "objective.shift": "none"},
        "shift": {"objective.density": "uniform", "objective.shift": "linear"},
    }
    if value in table:
        return table[value]
    raise LeftOut("this way to draw timesteps is not built in; the model's own recipe takes its place")


def _sample_size(value: Any, given: Given) -> list[Any]:
    return [number(given.get(f"sample.{key}", 512)) for key in ("width", "height")]


def _prompts(samples: list[Any], given: Given) -> dict[str, Changed]:
    """Prompts and the images that they change. Settings stand behind a text, as in `a cat --ctrl_img before.png`."""
    rows: list[dict[str, Any]] = []
    for sample in samples:
        if isinstance(sample, dict):
            rows.append(sample)
            continue
        text, *settings = re.split(r"\s+--(?=\w)", str(sample))
        named = (one.partition(" ") for one in settings)
        rows.append({"prompt": text.strip(), **{name: value.strip() for name, _, value in named}})
    rows = [row for row in rows if row.get("prompt")]
    images = [[str(row[name]) for name in CONTROLS if row.get(name)] for row in rows]
    whys = []
    if any(row.keys() - {"prompt", *CONTROLS} for row in rows):
        whys.append("settings of single prompts are left out, since samples share theirs")
    if any(images) and not all(images):
        whys.append("no image to change is taken, since some prompts have none")
    found = {"sample.prompts": Changed([str(row["prompt"]) for row in rows], "; ".join(whys))}
    if rows and all(images):
        why = "the first image of each prompt" if any(own[1:] for own in images) else ""
        found["sample.references"] = Changed([first for first, *_ in images], why)
    return found


FIELDS = {
    "name": To("name"),
    "trigger_word": To("data.trigger", empty_is_off),
    "network.type": To("adapter.type", _kind),
    "network.rank": To("adapter.rank", _sized),
    "network.linear": To("adapter.rank", _sized),
    "network.alpha": To("adapter.alpha", _sized),
    "network.linear_alpha": To("adapter.alpha", _sized),
    "network.conv": To("adapter.conv_rank", _sized),
    "network.dropout": To("adapter.dropout", empty_is_off),
    "network.lokr_full_rank": To("adapter.full_matrix", _only_lokr(switch(True, False))),
    "network.lokr_factor": To("adapter.factor", _only_lokr(lambda value, given: number(value))),
    "network.pretrained_lora_path": To("adapter.start", empty_is_off),
    "model.lora_path": To("adapter.start", empty_is_off),
    "model.qtype": To("quantize.format", _quantized),
    "model.quantize_te": To("quantize.encoders", switch(True)),
    "model.is_v_pred": To("objective.prediction", switch("v_prediction")),
    "model.layer_offloading": To("parallel.offload_blocks", switch("auto")),
    "model.compile": To("train.compile", switch(True)),
    "train.steps": To("train.steps"),
    "train.batch_size": To("train.micro_batch"),
    "train.gradient_accumulation_steps": To(
        "train.batch_size", lambda value, given: number(value) * number(given.get("train.batch_size", 1))
    ),
    "train.gradient_accumulation": To(
        "train.batch_size", lambda value, given: number(value) * number(given.get("train.batch_size", 1))
    ),
    "train.optimizer": To("optim.type", words.optimizer),
    "train.lr": To("optim.lr", words.rate),
    "train.unet_lr": To("optim.lr", words.rate),
    "train.optimizer_params.weight_decay": To("optim.weight_decay"),
    "train.optimizer_params.betas": To("optim.beta1", words.betas),
    "train.optimizer_params.eps": To("optim.eps"),
    "train.lr_scheduler": To("optim.schedule", word(words.SCHEDULES, "this schedule is not built in")),
    "train.lr_scheduler_params.num_warmup_steps": To("optim.warmup"),
    "train.max_grad_norm": To("optim.clip_norm", words.clip),
    "train.ema_config.ema_decay": To("optim.ema", words.average("train.ema_config.use_ema")),
    "train.dtype": To("train.precision", word(words.PRECISIONS, "this number type is not built in")),
    "train.gradient_checkpointing": To("train.checkpointing", switch("full", "none")),
    "train.train_text_encoder": To("text_encoders", switch(True)),
    "train.min_snr_gamma": To("objective.min_snr_gamma", empty_is_off),
    "train.snr_gamma": To("objective.min_snr_gamma", empty_is_off),
    "train.timestep_type": To("objective.density", _timesteps),
    "train.prompt_dropout_prob": To("data.caption_dropout", empty_is_off),
    "train.reg_weight": To("data.regularization_weight"),
    "train.seed": To("train.seed"),
    "sample.sample_every": To(
        "sample.every", lambda value, given: 0 if is_on(given.get("train.disable_sampling", False)) else number(value)
    ),
    "sample.prompts": To("sample.prompts", _prompts),
    "sample.samples": To("sample.prompts", _prompts),
    "sample.neg": To("sample.negative", empty_is_off),
    "sample.width": To("sample.size", _sample_size),
    "sample.seed": To("sample.seed"),
    "sample.guidance_scale": To("sample.guidance"),
    "sample.sample_steps": To("sample.steps"),
    "save.save_every": To("checkpoint.every"),
    "save.max_step_saves_to_keep": To("checkpoint.keep"),
    "save.dtype": To("export.dtype", word(words.SAVED, "exports are bf16 by default")),
    "logging.use_wandb": To("trackers.wandb", switch(True)),
    "logging.project_name": To("trackers.project", words.name),
}

ROW_FIELDS = {
    "folder_path": To("path"),
    "dataset_path": To("path"),
    "num_repeats": To("weight"),
    "is_reg": To("regularization", switch(True)),
    "resolution": To("resolutions", words.sides),
    "flip_x": To("flip", switch(True, False)),
    "caption_dropout_rate": To("caption_dropout"),
    "trigger_word": To("data.trigger", empty_is_off),
    "mask_path": To("masks", empty_is_off),
    "mask_min_value": To("data.mask_background"),
    "control_path": To("data.references", empty_is_off),
    "default_caption": To(
        "data.missing_caption",
        lambda value, given: (
            Changed("empty", "images without a caption had a default one there; write it with the form's captions")
            if value
            else empty_is_off(value, given)
        ),
    ),
    "batch_size": To("micro_batch", empty_is_off),
}

LEFT_OUT = words.SHARED | reasons(
    {
        "captions are .txt files, a metadata.jsonl or a table": "caption_ext caption_type",
        words.TAGS: "shuffle_tokens token_dropout_rate replacements random_triggers* use_short_captions",
        words.LOOKS: "flip_y augments augmentations shuffle_augmentations random_scale scale poi standardize_images",
        words.BUCKETS: "buckets bucket_tolerance square_crop",
        words.CACHED: "cache_latents cache_tensors_to_disk train.cache_text_embeddings train.unload_text_encoder",
        words.PLACES: "training_folder sqlite_db_path",
        words.PUBLISH: "save.push_to_hub save.hf_repo_id save.hf_private",
        words.NOISE: "train.noise_offset train.dynamic_noise_offset train.*noise*",
        words.LOSSES: "train.loss_type train.loss_target train.content_or_style* train.linear_timesteps* "
        "train.learnable_snr_gos train.min_denoising_steps train.max_denoising_steps train.do_* train.diff_output_* "
        "train.inverted_mask_prior* train.blank_prompt_* loss_multiplier train.num_train_timesteps",
        words.MANY_RATES: "train.text_encoder_lr train.refiner_lr train.embedding_lr train.adapter_lr network_weight "
        "network.conv_alpha",
        words.SAMPLER: "sample.sampler train.noise_scheduler sample.guidance_rescale",
        "a sample before the first step is always drawn": "train.skip_first_sample train.force_first_sample "
        "sample.sample_start_step",
        "all sets of samples start from the same noise": "sample.walk_seed sample.network_multiplier",
        "the switch is read with what it is for": "model.quantize train.ema_config.use_ema train.disable_sampling "
        "sample.height",
        "parallel.offload_blocks saves memory": "model.low_vram model.layer_offloading_* network.layer_offloading",
        "text encoders have the format of the base": "model.qtype_te",
        "a quantization is not repaired by an adapter": "model.accuracy_recovery_adapter model.assistant_lora_path",
        "what is trained is in model.train": "train.train_unet train.train_refiner network.transformer_only",
        "guidance is an input in training: objective.guidance": "train.bypass_guidance_embedding train.do_cfg "
        "train.cfg_*",
        words.ATTENTION: "train.xformers train.sdp train.attention_backend",
        "the base is loaded in bf16": "model.dtype model.vae_dtype model.te_dtype",
        words.COMPONENTS: "model.vae_path model.te_name_or_path model.unet_path",
        "the schedule has no such setting": "train.lr_scheduler_params.*",
        "the optimizer has no such setting": "train.optimizer_params.*",
        "the adapter has no such setting": "network.*",
        "images alone are trained": "num_frames shrink_video_to_frames fps do_i2v do_audio controls sample.num_frames "
        "sample.fps",
        words.HOUSE: "device performance_log_every logging.* job type num_workers prefetch_factor sample.format "
        "save.save_format train.switch_boundary_every model.model_kwargs.* model.model_kwargs model.split_model_*",
        "only the first process of a job is a run": "process*",
        "notes are not kept": "meta.*",
        "full images of the edit are scaled to data.resolution": "full_size_control_images",
    }
)

AI_TOOLKIT = Tool(
    name="ai-toolkit",
    part=_part,
    given=_given,
    rows=_rows,
    model=BaseModel(
        path=("model.name_or_path",),
        base=("model.extras_name_or_path",),
        kinds=_kinds,
        kind_keys=("model.arch", "model.is_*"),
    ),
    fields=FIELDS,
    row_fields=ROW_FIELDS,
    left_out=LEFT_OUT,
    defaults={
        "network.linear": 4,
        "network.linear_alpha": 1.0,
        "train.gradient_accumulation": 1,
        "model.qtype": "qfloat8",
        "train.gradient_checkpointing": True,
        "train.timestep_type": "sigmoid",
    },
)
