"""tdrussell's diffusion-pipe: a TOML file, and the TOML file of its dataset.

Facts from examples/*.toml, docs/supported_models.md, train.py and utils/dataset.py.
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
    reasons,
    switch,
    word,
)

MOST_RANK = 1e4
"""A rank above every layer's width stands for full matrices of a LoKr there."""


def _part(tree: Any) -> Part | None:
    if not isinstance(tree, dict):
        return None
    if isinstance(tree.get("directory"), list):
        return "data"
    model = tree.get("model")
    is_run = isinstance(model, dict) and "type" in model and "family" not in model
    return "run" if is_run and {"dataset", "optimizer", "micro_batch_size_per_gpu"} & tree.keys() else None


def _given(files: Mapping[Part, Any]) -> dict[str, Any]:
    found = flat(files["run"])
    found.setdefault("adapter.type", "none")  # a run without the section trains the model itself
    return found


def _rows(files: Mapping[Part, Any]) -> list[Row]:
    data = files.get("data") or {}
    shared = {"enable_ar_bucket": False} | {key: value for key, value in data.items() if key != "directory"}
    rows = [row for row in data.get("directory", ()) if isinstance(row, dict)]
    return [(f"directory[{at}]", shared | row) for at, row in enumerate(rows)]


def _rank(value: Any, given: Given) -> Any:
    if number(value) > MOST_RANK:
        return {"adapter.full_matrix": True}
    return number(value)


def _batch(value: Any, given: Given) -> Any:
    if isinstance(value, list):  # [[512, 4], [1024, 1]]: a size for each resolution
        return Changed(
            min(number(pair[1]) for pair in value), "one size for all resolutions; folders may have their own"
        )
    return number(value)


def _accumulated(value: Any, given: Given) -> Any:
    size = _batch(given.get("micro_batch_size_per_gpu", 1), given)
    return number(value) * (size.value if isinstance(size, Changed) else size)


def _stages(value: Any, given: Given) -> Any:
    if number(value) == 1:
        raise LeftOut("one GPU, as here")
    return Changed(number(value), "the GPUs share each layer here (parallel.strategy) instead of one after another's")


def _aspect(value: Any, given: Given) -> Any:
    if not is_on(given.get("enable_ar_bucket", False)):
        return Changed(1.0, "without buckets every image is cropped to one shape")
    return max(number(given.get("max_ar", 2.0)), 1 / number(given.get("min_ar", 0.5)))


def _shift(value: Any, given: Given) -> dict[str, Any]:
    return {"objective.shift": "constant", "objective.shift_factor": number(value)}


FIELDS = {
    "adapter.type": To("adapter.type", words.adapter_kind),
    "adapter.rank": To("adapter.rank", _rank),
    "adapter.dropout": To("adapter.dropout", empty_is_off),
    "adapter.decompose_factor": To("adapter.factor"),
    "adapter.init_from_existing": To("adapter.start", empty_is_off),
    "model.transformer_dtype": To("quantize.format", words.quantized),
    "model.diffusion_model_dtype": To("quantize.format", words.quantized),
    "model.dtype": To("train.precision", word(words.PRECISIONS, "this number type is not built in")),
    "optimizer.type": To("optim.type", words.optimizer),
    "optimizer.lr": To("optim.lr", words.rate),
    "model.unet_lr": To("optim.lr", words.rate),
    "force_constant_lr": To("optim.lr", empty_is_off),
    "optimizer.betas": To("optim.beta1", words.betas),
    "optimizer.weight_decay": To("optim.weight_decay"),
    "optimizer.eps": To("optim.eps"),
    "lr_scheduler": To("optim.schedule", word(words.SCHEDULES, "this schedule is not built in")),
    "warmup_steps": To("optim.warmup"),
    "gradient_clipping": To("optim.clip_norm", words.clip),
    "epochs": To("train.epochs"),
    "max_steps": To("train.steps", empty_is_off),
    "micro_batch_size_per_gpu": To("train.micro_batch", _batch),
    "gradient_accumulation_steps": To("train.batch_size", _accumulated),
    "activation_checkpointing": To("train.checkpointing", lambda value, given: "full" if value else "none"),
    "compile": To("train.compile", switch(True)),
    "blocks_to_swap": To("parallel.offload_blocks", empty_is_off),
    "pipeline_stages": To("parallel.devices", _stages),
    "uncond_fraction": To("data.caption_dropout", empty_is_off),
    "model.timestep_sample_method": To(
        "objective.density",
        word({"logitnormal": "logit_normal", "uniform": "uniform"}, "this way to draw timesteps is not built in"),
    ),
    "model.sigmoid_scale": To("objective.logit_std"),
    "model.flux_shift": To("objective.shift", switch("linear", "none")),
    "model.shift": To("objective.shift_factor", _shift),
    "model.guidance": To("objective.guidance"),
    "model.min_snr_gamma": To("objective.min_snr_gamma", empty_is_off),
    "model.v_pred": To("objective.prediction", switch("v_prediction")),
    "model.max_sequence_length": To("model.options.max_tokens", empty_is_off),
    "save_every_n_steps": To("checkpoint.every", empty_is_off),
    "save_dtype": To("export.dtype", word(words.SAVED, "exports are bf16 by default")),
    "eval_every_n_steps": To("data.validation_every", empty_is_off),
    "monitoring.enable_wandb": To("trackers.wandb", switch(True)),
    "monitoring.wandb_tracker_name": To("trackers.project", words.name),
    "monitoring.wandb_run_name": To("name", empty_is_off),
}

ROW_FIELDS = {
    "path": To("path"),
    "num_repeats": To("weight"),
    "resolutions": To("resolutions", words.sides),
    "enable_ar_bucket": To("data.max_aspect", _aspect),
    "mask_path": To("masks"),
    "control_path": To("data.references"),
    "caption_prefix": To("caption_prefix", lambda value, given: str(value).strip()),
    "skip_empty_caption": To(
        "data.missing_caption",
        switch(Changed("stop", "an image without a caption is named before the start; it is not skipped"), "empty"),
    ),
}

LEFT_OUT = words.SHARED | reasons(
    {
        words.BUCKETS: "min_ar max_ar num_ar_buckets ar_buckets size_buckets frame_buckets",
        words.TAGS: "shuffle_tags cache_shuffle_num cache_shuffle_delimiter shuffle_metadata online_captions",
        words.STEPS_ONLY: "save_every_n_epochs checkpoint_every_n_epochs checkpoint_every_n_minutes "
        "eval_every_n_epochs "
        "save_every_n_examples eval_every_n_examples",
        words.LOSSES: "pseudo_huber_c model.debiased_estimation_loss model.multiscale_loss_weight "
        "model.min_t model.max_t",
        words.COMPONENTS: "model.vae* model.llm_path model.clip_path model.t5_path model.text_encoder* model.byt5_path",
        words.CACHED: "caching_batch_size map_num_proc regenerate_cache model.cache_text_embeddings",
        words.MANY_RATES: "model.text_encoder_1_lr model.text_encoder_2_lr",
        words.STATE: "resume_from_checkpoint",
        words.HOUSE: "steps_per_print logging_steps x_axis_examples partition_* reentrant_activation_checkpointing "
        "monitoring.* subsample_ratio",
        "the adapter has no such setting": "adapter.*",
        "the optimizer has no such setting": "optimizer.*",
        "images alone are trained": "video_clip_mode image_micro_batch_size_per_gpu model.first_frame_conditioning_p "
        "image_eval_micro_batch_size_per_gpu",
        "held-out images are a number or a folder here: data.validation": "eval_*",
        "parallel.offload_blocks holds for validation too": "disable_block_swap_for_eval",
        "the base is loaded as it was published": "model.merge_adapters model.bypass_guidance_embedding "
        "model.ckpt_path",
        "it is the name of the file with folders": "dataset",
    }
)

DIFFUSION_PIPE = Tool(
    name="diffusion-pipe",
    part=_part,
    given=_given,
    rows=_rows,
    model=BaseModel(
        path=("model.transformer_path", "model.diffusion_model", "model.checkpoint_path", "model.diffusers_path"),
        base=("model.diffusers_path",),
        kinds=lambda given: [given.get("model.type")],
        kind_keys=("model.type",),
    ),
    fields=FIELDS,
    row_fields=ROW_FIELDS,
    left_out=LEFT_OUT,
    defaults={"gradient_accumulation_steps": 1, "model.flux_shift": False},
    files={"dataset": "data"},
)
