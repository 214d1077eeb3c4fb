"""OneTrainer: the JSON of a config or preset, with its concepts and samples in it or in files of their own.

Facts from modules/util/config/*.py, modules/util/enum/*.py and training_presets. A preset names only what differs
from OneTrainer's defaults; a saved config names everything.
"""

from __future__ import annotations

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

DENOISERS = ("transformer", "unet", "prior")
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def _part(tree: Any) -> Part | None:
    if isinstance(tree, dict) and "model_type" in tree and {"training_method", "base_model_name"} & tree.keys():
        return "run"
    rows = [row for row in tree if isinstance(row, dict)] if isinstance(tree, list) else []
    if rows and all("path" in row and {"image", "text", "balancing"} & row.keys() for row in rows):
        return "data"
    return "prompts" if rows and all("prompt" in row and "diffusion_steps" in row for row in rows) else None


def _given(files: Mapping[Part, Any]) -> dict[str, Any]:
    run = files["run"]
    found = flat({key: value for key, value in run.items() if key not in ("concepts", "samples", "optimizer_defaults")})
    if isinstance(run.get("optimizer"), str):  # until version 1
        found["optimizer.optimizer"] = found.pop("optimizer")
    samples = [row for row in files.get("prompts") or run.get("samples") or () if isinstance(row, dict)]
    shown = [row for row in samples if row.get("enabled", True) and row.get("prompt")]
    if shown:
        found |= {f"samples.{key}": value for key, value in flat(shown[0]).items()}
        found["samples.prompt"] = [row["prompt"] for row in shown]
    return found


def _rows(files: Mapping[Part, Any]) -> list[Row]:
    concepts = files.get("data") or files["run"].get("concepts") or ()
    return [(f"concepts[{at}]", flat(row)) for at, row in enumerate(concepts) if isinstance(row, dict)]


def _kind(value: Any, given: Given) -> Any:
    if value != "LORA":
        if value == "FINE_TUNE":
            return "none"
        raise LeftOut("this method is not built in")
    kind = plain(given.get("peft_type", "LORA"))
    if kind == "lora" and is_on(given.get("lora_decompose", False)):
        return "dora"
    return "diag-oft" if kind.startswith("oft") else words.adapter_kind(kind, given)


def _of_kind(kind: str) -> Any:
    def convert(value: Any, given: Given) -> Any:
        if plain(given.get("peft_type", "LORA")).startswith("lokr") != (kind == "lokr"):
            raise LeftOut("it is for another kind of adapter")
        return value

    return convert


def _steps(unit: str) -> Any:
    def convert(value: Any, given: Given) -> Any:
        if plain(given.get(unit, "")) == "never":
            return 0
        if plain(given.get(unit, "")) != "step":
            raise LeftOut(words.STEPS_ONLY)
        return number(value)

    return convert


def _warmup(value: Any, given: Given) -> Any:
    if 0 < number(value) <= 1:
        raise LeftOut("a share of the steps there, a number of steps here, which are known once the data are read")
    return number(value)


def _checkpointing(value: Any, given: Given) -> Any:
    if plain(value) == "cpuoffloaded":
        return Changed("full", "activations are not kept in host memory; they are recomputed")
    return "none" if plain(value) in ("off", "false") else "full"


def _density(value: Any, given: Given) -> dict[str, Any]:
    if plain(value) not in ("uniform", "logitnormal", "cosmap"):
        raise LeftOut("this density is not built in; the model's own recipe takes its place")
    shift = "linear" if is_on(given.get("dynamic_timestep_shifting", False)) else "none"
    shift = "constant" if shift == "none" and number(given.get("timestep_shift", 1)) != 1 else shift
    names = {"uniform": "uniform", "logitnormal": "logit_normal", "cosmap": "cosmap"}
    return {"objective.density": names[plain(value)], "objective.shift": shift}


def _only_logit_normal(value: Any, given: Given) -> float:
    if plain(given.get("timestep_distribution")) != "logitnormal":
        raise LeftOut("it counts with timestep_distribution LOGIT_NORMAL")
    return number(value)


def _min_snr(value: Any, given: Given) -> float:
    if plain(given.get("loss_weight_fn")) != "minsnrgamma":
        raise LeftOut("it counts with loss_weight_fn MIN_SNR_GAMMA")
    return number(value)


def _weight(value: Any, given: Given) -> Any:
    if plain(given.get("balancing_strategy", "REPEATS")) != "repeats":
        raise LeftOut("it is a number of images per epoch there; weights count repeats")
    return number(value)


def _captions(value: Any, given: Given) -> Any:
    if value == "sample":
        raise LeftOut("captions are .txt files beside the images here too")
    return Changed(
        "empty", "captions are .txt files, a metadata.jsonl or a table; file names and one file of prompts are not read"
    )


FIELDS = {
    "training_method": To("adapter.type", _kind),
    "lora_rank": To("adapter.rank", _of_kind("")),
    "lora_alpha": To("adapter.alpha", lambda value, given: number(value)),
    "dropout_probability": To("adapter.dropout", empty_is_off),
    "lokr_dim": To("adapter.rank", _of_kind("lokr")),
    "lokr_decompose_factor": To("adapter.factor", _of_kind("lokr")),
    "lokr_decompose_both": To("adapter.decompose_both", _of_kind("lokr")),
    "lokr_full_matrix": To("adapter.full_matrix", _of_kind("lokr")),
    "oft_block_size": To("adapter.block_size"),
    "lora_model_name": To("adapter.start", empty_is_off),
    **{f"{part}.weight_dtype": To("quantize.format", words.quantized) for part in DENOISERS},
    **{f"{part}.train": To(f"text_encoders.{part}", switch(True, False)) for part in ENCODERS},
    "optimizer.optimizer": To("optim.type", words.optimizer),
    "learning_rate": To("optim.lr", words.rate),
    **{
        f"{part}.learning_rate": To("optim.lr", lambda value, given: number(empty_is_off(value, given)))
        for part in DENOISERS
    },
    "optimizer.beta1": To("optim.beta1", empty_is_off),
    "optimizer.beta2": To("optim.beta2", empty_is_off),
    "optimizer.eps": To("optim.eps", empty_is_off),
    "optimizer.weight_decay": To("optim.weight_decay", empty_is_off),
    "learning_rate_scheduler": To("optim.schedule", word(words.SCHEDULES, "this schedule is not built in")),
    "learning_rate_warmup_steps": To("optim.warmup", _warmup),
    "clip_grad_norm": To("optim.clip_norm", lambda value, given: words.clip(value or 0, given)),
    "ema": To("optim.ema", lambda value, given: 0.0 if value == "OFF" else number(given.get("ema_decay", 0.999))),
    "epochs": To("train.epochs"),
    "batch_size": To("train.micro_batch"),
    "gradient_accumulation_steps": To(
        "train.batch_size", lambda value, given: number(value) * number(given.get("batch_size", 1))
    ),
    "train_dtype": To("train.precision", word(words.PRECISIONS, "this number type is not built in")),
    "gradient_checkpointing": To("train.checkpointing", _checkpointing),
    **{f"{part}.gradient_checkpointing": To("train.checkpointing", _checkpointing) for part in DENOISERS},
    "layer_offload_fraction": To("parallel.offload_blocks", empty_is_off),
    **{f"{part}.offload_fraction": To("parallel.offload_blocks", empty_is_off) for part in DENOISERS},
    "compile": To("train.compile", switch(True)),
    "resolution": To("data.resolutions", words.sides),
    "aspect_ratio_bucketing": To(
        "data.max_aspect", switch(2.0, Changed(1.0, "without buckets every image is cropped to a square"))
    ),
    "unmasked_weight": To("data.mask_background", lambda value, given: number(value)),
    "timestep_distribution": To("objective.density", _density),
    "timestep_shift": To(
        "objective.shift_factor", lambda value, given: empty_is_off(0 if number(value) == 1 else number(value), given)
    ),
    "noising_bias": To("objective.logit_mean", _only_logit_normal),
    "noising_weight": To("objective.logit_std", lambda value, given: _only_logit_normal(value, given) + 1),
    "loss_weight_strength": To("objective.min_snr_gamma", _min_snr),
    "rescale_noise_scheduler_to_zero_terminal_snr": To("objective.zero_terminal_snr", switch("on")),
    "force_v_prediction": To("objective.prediction", switch("v_prediction")),
    "force_epsilon_prediction": To("objective.prediction", switch("epsilon")),
    "transformer.guidance_scale": To("objective.guidance"),
    "text_encoder_2_sequence_length": To("model.options.max_tokens", empty_is_off),
    "samples.prompt": To("sample.prompts", words.prompts),
    "samples.negative_prompt": To("sample.negative", empty_is_off),
    "samples.width": To(
        "sample.size", lambda value, given: [number(value), number(given.get("samples.height", value))]
    ),
    "samples.seed": To("sample.seed"),
    "samples.diffusion_steps": To("sample.steps"),
    "samples.cfg_scale": To("sample.guidance"),
    "sample_after": To("sample.every", _steps("sample_after_unit")),
    "save_every": To("checkpoint.every", _steps("save_every_unit")),
    "save_after": To("checkpoint.every", _steps("save_after_unit")),
    "backup_after": To("checkpoint.every", _steps("backup_after_unit")),
    "rolling_backup_count": To("checkpoint.keep"),
    "output_dtype": To("export.dtype", word(words.SAVED, "exports are bf16 by default")),
    "save_filename_prefix": To("name", empty_is_off),
    "tensorboard": To("trackers.tensorboard", switch(True)),
}

ROW_FIELDS = {
    "path": To("path"),
    "enabled": To("off", switch(False, True)),
    "type": To(
        "role", word({"validation": "validation", "priorprediction": "regularization", "standard": "train"}, "")
    ),
    "balancing": To("weight", _weight),
    "image.enable_random_flip": To("flip", switch(True, False)),
    "image.resolution_override": To(
        "resolutions",
        lambda value, given: (
            words.sides(value, given)
            if is_on(given.get("image.enable_resolution_override", False))
            else empty_is_off("", given)
        ),
    ),
    "text.prompt_source": To("data.missing_caption", _captions),
}

LEFT_OUT = words.SHARED | reasons(
    {
        words.LOOKS: "image.*",
        words.TAGS: "text.*",
        words.NOISE: "offset_noise_weight generalized_offset_noise perturbation_noise_weight min_noising_strength "
        "max_noising_strength",
        words.LOSSES: "mse_strength mae_strength log_cosh_strength huber_strength huber_delta vb_loss_strength "
        "loss_weight_fn loss_scaler loss_weight",
        words.CACHED: "latent_caching clear_cache_before_training only_cache image_variations text_variations",
        words.PLACES: "workspace_dir cache_dir debug_dir output_model_destination huggingface_cache_dir",
        words.COMPONENTS: "vae.* effnet_encoder.* decoder.* decoder_*",
        words.MANY_RATES: "text_encoder*.learning_rate embedding_learning_rate learning_rate_scaler",
        words.STATE: "continue_last_backup",
        words.ATTENTION: "attention_mechanism",
        words.HOUSE: "debug_mode tensorboard_* dataloader_threads train_device temp_device device_indexes offline_mode "
        "async_offloading enable_* fused_* async_* gradient_reduce_precision cloud.* include_train_config "
        "prevent_overwrites concept_stats.* concept_stats name __version custom_conditioning_image",
        "more GPUs are parallel.devices": "multi_gpu",
        "layers to adapt are named otherwise: adapter.targets": "layer_filter* quantization.*",
        "the adapter has no such setting": "lora_* lokr_* oft_* bundle_additional_embeddings peft_type",
        "the optimizer has no such setting": "optimizer.* optimizer_*",
        "the schedule has no such setting": "learning_rate_cycles learning_rate_min_factor scheduler_params "
        "custom_learning_rate_scheduler",
        "embeddings are not trained": "embedding.* additional_embeddings embedding_weight_dtype "
        "preserve_embedding_norm",
        "masks are a folder here: data.masks": "masked_training unmasked_probability normalize_masked_area_loss "
        "masked_prior_preservation_weight",
        "trained weights are fp32": "fallback_train_dtype weight_dtype",
        "the last layers of CLIP are read as the model was published": "text_encoder_*layer_skip",
        "what is trained is in model.train": "*.train *.stop_training_after* *.include *.train_embedding "
        "*.attention_mask *.dropout_probability",
        "text encoders are encoded with once; quantize.encoders has their format": "text_encoder*.weight_dtype "
        "text_encoder*",
        "it is read with what it belongs to": "*_unit ema_decay dynamic_timestep_shifting balancing_strategy seed "
        "samples.height samples.enabled",
        "the average is taken after every step, and samples are drawn with it": "ema_update_step_interval "
        "non_ema_sampling",
        "images alone are trained": "frames",
        "held-out images are a number or a folder here: data.validation": "validation validate_after",
        "folders and prompts are given with the config": "concept_file_name sample_definition_file_name",
        words.SAMPLER: "samples.*",
        "a sample before the first step is always drawn": "sample_skip_first samples_to_tensorboard sample_*_format",
        "checkpoints are kept by checkpoint.keep": "rolling_backup backup_before_save save_skip_first",
        "exports are safetensors files": "output_model_format force_circular_padding",
        "folders are read with all that are in them": "include_subdirectories",
        "the switch is read with its strength": "transformer.* unet.* prior.*",
        "it is not a part of the model here": "unconditional_transformer.*",
    }
)

ONETRAINER = Tool(
    name="OneTrainer",
    part=_part,
    given=_given,
    rows=_rows,
    model=BaseModel(
        path=("transformer.model_name", "unet.model_name", "prior.model_name", "base_model_name"),
        base=("base_model_name",),
        kinds=lambda given: [given.get("model_type")],
        kind_keys=("model_type",),
    ),
    fields=FIELDS,
    row_fields=ROW_FIELDS,
    left_out=LEFT_OUT,
    defaults={
        "lora_rank": 16,
        "lora_alpha": 1.0,
        "epochs": 100,
        "gradient_accumulation_steps": 1,
        "resolution": "512",
        "learning_rate_warmup_steps": 200,
        "gradient_checkpointing": "ON",
        "timestep_distribution": "UNIFORM",
        "training_method": "FINE_TUNE",
        "text_encoder.train": True,
        "text_encoder_2.train": True,
    },
    files={"concept_file_name": "data", "sample_definition_file_name": "prompts"},
)
