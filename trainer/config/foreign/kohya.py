"""kohya's sd-scripts: `--config_file` (TOML), `--dataset_config` (TOML), and the file of sample prompts.

Facts from docs/config_README-en.md, docs/*_train_network.md and the arguments of library/train_util.py. Sections of
the config file have no meaning there: keys are read wherever they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
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

MOST_FOLDERS = 1000
MARKS = ("network_module", "optimizer_type", "train_batch_size", "max_train_steps", "output_name", "train_data_dir")
"""Keys of which a config of sd-scripts has one beside its base model."""


def _part(tree: Any) -> Part | None:
    if not isinstance(tree, dict):
        is_list = bool(tree) and all(isinstance(row, dict) and "prompt" in row for row in tree)
        return "prompts" if is_list else None
    datasets = tree.get("datasets")
    if isinstance(datasets, list) and any(isinstance(one, dict) and "subsets" in one for one in datasets):
        return "data"
    keys = _keys(tree)
    is_run = "pretrained_model_name_or_path" in keys and "model_family" not in keys
    return "run" if is_run and any(key in keys for key in MARKS) else None


def _keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key.rpartition(".")[2]: value for key, value in flat(tree).items()}


def _given(files: Mapping[Part, Any]) -> dict[str, Any]:
    found = {"network_module": "none"} | _keys(files["run"])  # without one, the model itself is trained
    for key in [key for key in ("network_args", "optimizer_args") if isinstance(found.get(key), list)]:
        found |= {f"{key}.{name}": value for name, value in words.key_values(found.pop(key, None)).items()}
    for prompt in _prompts(files.get("prompts")):
        found.setdefault("sample_prompts.prompt", []).append(prompt.pop("prompt"))
        found |= {f"sample_prompts.{key}": value for key, value in prompt.items() if key != "prompt"}
    data = files.get("data") or {}
    for dataset in data.get("datasets", ()):
        found |= {key: dataset[key] for key in ("batch_size", "enable_bucket") if key in dataset}
    if "batch_size" in found:
        found["train_batch_size"] = found.pop("batch_size")
    return found


def _prompts(text: Any) -> Iterator[dict[str, Any]]:
    """Yield the prompts of a file: a section each in JSON, else a line, as `a cat --n blurry --w 1024 --s 28 --l 4`."""
    if isinstance(text, list):
        yield from ({"prompt": row["prompt"]} for row in text if isinstance(row, dict) and row.get("prompt"))
        return
    for line in str(text or "").splitlines():
        prompt, *flags = line.strip().split(" --")
        if prompt and not prompt.startswith("#"):
            yield {"prompt": prompt.strip(), **{flag[0]: flag[1:].strip() for flag in flags if flag[1:2] == " "}}


def _rows(files: Mapping[Part, Any]) -> list[Row]:
    data, run = files.get("data") or {}, _given(files)
    rows: list[Row] = []
    general = data.get("general", {})
    for number_of, dataset in enumerate(data.get("datasets", ())):
        above = {key: value for key, value in (general | dataset).items() if key not in ("subsets", "batch_size")}
        for at, subset in enumerate(dataset.get("subsets", ())):
            rows.append((f"datasets[{number_of}].subsets[{at}]", above | subset))
    for key, is_reg in (("train_data_dir", False), ("reg_data_dir", True)):
        if not rows or is_reg:
            rows += [
                (key, {"image_dir": path, "num_repeats": repeats, "is_reg": is_reg})
                for path, repeats in _folders_of(run.get(key))
            ]
    return rows


def _folders_of(path: Any) -> list[tuple[str, int]]:
    """The folders of a DreamBooth layout with their repeats, 10 of `10_sks dog`; the folder itself without any."""
    if not isinstance(path, str) or not path:
        return []
    try:
        with os.scandir(os.path.expanduser(path)) as entries:
            names = [entry.name for entry, _ in zip(entries, range(MOST_FOLDERS), strict=False)]
    except OSError:  # it is on another machine
        names = []
    found = [(name, int(match[1])) for name in sorted(names) if (match := re.fullmatch(r"(\d{1,4})_.+", name))]
    return [(f"{path}/{name}", repeats) for name, repeats in found if repeats] or [(path, 1)]


def _kinds(given: Given) -> list[object]:
    module = str(given.get("network_module", "")).rpartition("networks.lora")
    return [module[2].strip("_")] if module[1] else []


def _warmup(value: Any, given: Given) -> Any:
    if 0 < number(value) < 1:
        steps = number(given.get("max_train_steps", 1600))
        return Changed(round(number(value) * steps), "a share of the steps there, a number of steps here")
    return number(value)


def _sampling(value: Any, given: Given) -> dict[str, Any]:
    density = {"sigma": "uniform", "uniform": "uniform", "sigmoid": "logit_normal", "shift": "logit_normal"}
    shifted = {"shift": "constant", "sigma": "constant"}  # the scheduler of sigma is shifted too
    if str(value).endswith("_shift"):  # by the number of image tokens
        return {"objective.density": "logit_normal", "objective.shift": "linear"}
    if value not in density:
        raise LeftOut("this way to draw timesteps is not built in")
    return {"objective.density": density[value], "objective.shift": shifted.get(value, "none")}


def _weighting(value: Any, given: Given) -> Any:
    if given.get("timestep_sampling", "sigma") != "sigma":
        raise LeftOut("it counts with timestep_sampling sigma alone")
    names = {"logitnormal": "logit_normal", "mode": "mode", "cosmap": "cosmap", "uniform": "uniform", "none": "uniform"}
    return word(names, "this weighting is not built in")(value, given)


def _kind(value: Any, given: Given) -> Any:
    if plain(value).startswith("lycoris"):
        return words.adapter_kind(given.get("network_args.algo", "lora"), given)
    name = plain(str(value).rpartition(".")[2])
    if is_on(given.get("network_args.dora_wd", False)):
        return words.adapter_kind("dora", given)
    if name.startswith("lora"):
        return words.adapter_kind("locon" if "network_args.conv_dim" in given else "lora", given)
    return words.adapter_kind(name, given)


def _of_shift(value: Any, given: Given) -> float:
    if given.get("timestep_sampling", "sigma") not in ("shift", "sigma"):
        raise LeftOut("it counts with timestep_sampling shift and sigma alone")
    return number(value)


FIELDS = {
    "network_module": To("adapter.type", _kind),
    "network_dim": To("adapter.rank"),
    "network_alpha": To("adapter.alpha"),
    "network_dropout": To("adapter.dropout", empty_is_off),
    "network_weights": To("adapter.start", empty_is_off),
    "network_args.conv_dim": To("adapter.conv_rank"),
    "network_args.factor": To("adapter.factor"),
    "network_args.full_matrix": To("adapter.full_matrix", switch(True)),
    "network_args.decompose_both": To("adapter.decompose_both", switch(True)),
    "network_args.rs_lora": To("adapter.rank_stabilized", switch(True)),
    "network_train_unet_only": To("text_encoders", switch(False, True)),
    "optimizer_type": To("optim.type", words.optimizer),
    "use_8bit_adam": To("optim.type", switch("adamw8bit")),
    "learning_rate": To("optim.lr", words.rate),
    "unet_lr": To("optim.lr", words.rate),
    "optimizer_args.weight_decay": To("optim.weight_decay", lambda value, given: number(value)),
    "optimizer_args.betas": To("optim.beta1", words.betas),
    "optimizer_args.eps": To("optim.eps", lambda value, given: number(value)),
    "lr_scheduler": To("optim.schedule", word(words.SCHEDULES, "this schedule is not built in")),
    "lr_warmup_steps": To("optim.warmup", _warmup),
    "max_grad_norm": To("optim.clip_norm", words.clip),
    "max_train_steps": To("train.steps"),
    "max_train_epochs": To("train.epochs", empty_is_off),
    "train_batch_size": To("train.micro_batch"),
    "gradient_accumulation_steps": To(
        "train.batch_size", lambda value, given: number(value) * number(given.get("train_batch_size", 1))
    ),
    "seed": To("train.seed", empty_is_off),
    "mixed_precision": To("train.precision", word(words.PRECISIONS, "this number type is not built in")),
    "gradient_checkpointing": To("train.checkpointing", switch("full", "none")),
    "torch_compile": To("train.compile", switch(True)),
    "fp8_base": To("quantize.format", switch("fp8")),
    "fp8_base_unet": To("quantize.format", switch("fp8")),
    "blocks_to_swap": To("parallel.offload_blocks", empty_is_off),
    "resolution": To("data.resolution", words.side),
    "enable_bucket": To(
        "data.max_aspect",
        switch(2.0, Changed(1.0, "without buckets every image is cropped to one shape")),
    ),
    "caption_dropout_rate": To("data.caption_dropout"),
    "flip_aug": To("data.flip", switch(True)),
    "prior_loss_weight": To("data.regularization_weight"),
    "max_token_length": To(
        "model.options.text_windows", word({"225": 3, "150": 2, "75": 1}, "captions have 75 tokens, as here")
    ),
    "t5xxl_max_token_length": To("model.options.max_tokens", empty_is_off),
    "min_snr_gamma": To("objective.min_snr_gamma", empty_is_off),
    "zero_terminal_snr": To("objective.zero_terminal_snr", switch("on")),
    "v_parameterization": To("objective.prediction", switch("v_prediction")),
    "guidance_scale": To("objective.guidance"),
    "timestep_sampling": To("objective.density", _sampling),
    "weighting_scheme": To("objective.density", _weighting),
    "discrete_flow_shift": To("objective.shift_factor", _of_shift),
    "sigmoid_scale": To("objective.logit_std"),
    "logit_mean": To("objective.logit_mean"),
    "logit_std": To("objective.logit_std"),
    "mode_scale": To("objective.mode_scale"),
    "sample_every_n_steps": To("sample.every", empty_is_off),
    "sample_prompts.prompt": To("sample.prompts", words.prompts),
    "sample_prompts.n": To("sample.negative"),
    "sample_prompts.w": To(
        "sample.size", lambda value, given: [number(value), number(given.get("sample_prompts.h", value))]
    ),
    "sample_prompts.d": To("sample.seed"),
    "sample_prompts.s": To("sample.steps"),
    "sample_prompts.l": To("sample.guidance"),
    "sample_prompts.g": To("sample.guidance"),
    "save_every_n_steps": To("checkpoint.every", empty_is_off),
    "save_precision": To("export.dtype", word(words.SAVED, "exports are bf16 by default")),
    "output_name": To("name"),
    "log_with": To(
        "trackers.wandb",
        lambda value, given: {f"trackers.{name}": True for name in ("tensorboard", "wandb") if value in (name, "all")},
    ),
    "log_tracker_name": To("trackers.project", words.name),
}

ROW_FIELDS = {
    "image_dir": To("path"),
    "num_repeats": To("weight"),
    "is_reg": To("regularization", switch(True)),
    "resolution": To("resolutions", lambda value, given: words.sides([value], given)),
    "flip_aug": To("flip", switch(True, False)),
    "caption_dropout_rate": To("caption_dropout"),
    "caption_prefix": To("caption_prefix", lambda value, given: str(value).strip()),
    "class_tokens": To(
        "data.missing_caption",
        lambda value, given: Changed(
            "empty", f"images without a caption file were called '{value}' there; write it with the form's captions"
        ),
    ),
    "conditioning_data_dir": To("masks"),
}

LEFT_OUT = words.SHARED | reasons(
    {
        "captions are .txt files, a metadata.jsonl or a table": "caption_extension metadata_file in_json"
        " caption_extention",
        words.ATTENTION: "xformers sdpa mem_eff_attn dynamo_backend",
        words.MANY_RATES: "text_encoder_lr learning_rate_te* block_lr network_args.loraplus_* network_args.*_lr",
        words.STEPS_ONLY: "save_every_n_epochs save_n_epoch_ratio sample_every_n_epochs",
        words.STATE: "resume save_state save_state_on_train_end initial_epoch initial_step skip_until_initial_step",
        words.COMPONENTS: "vae ae clip_l clip_g t5xxl",
        words.PUBLISH: "huggingface_* async_upload save_state_to_huggingface resume_from_huggingface",
        words.HOUSE: "max_data_loader_n_workers persistent_data_loader_workers highvram lowram log_prefix log_config "
        "log_tracker_config wandb_run_name training_comment no_metadata metadata_* ddp_*",
        words.SAMPLER: "sample_sampler sample_prompts.ss",
        "a sample before the first step is always drawn": "sample_at_first",
        "exports are safetensors files": "save_model_as use_safetensors",
        "checkpoint.keep counts checkpoints": "save_last_n_epochs save_last_n_steps save_last_n_epochs_state "
        "save_last_n_steps_state",
        "trained weights are fp32, and computed with in bf16": "full_bf16 full_fp16 no_half_vae",
        "the last layers of CLIP are read as the model was published": "clip_skip",
        "a weight of the loss is not built in": "masked_loss alpha_mask",
        "it is chosen by the model's own recipe": "model_prediction_type apply_t5_attn_mask training_shift "
        "apply_lg_attn_mask model_type v2",
        "the schedule has no such setting": "lr_scheduler_* lr_decay_steps",
        "the optimizer has no such setting": "optimizer_args.* fused_backward_pass optimizer_schedulefree_wrapper",
        "the adapter has no such setting": "network_args.* scale_weight_norms dim_from_weights base_weights*",
        "held-out images are a number or a folder here: data.validation": "validation_split validation_seed "
        "validate_every_n_steps validate_every_n_epochs max_validation_steps",
        "text encoders alone are not trained": "network_train_text_encoder_only",
        "train.checkpointing and parallel.offload_blocks save memory": "cpu_offload_checkpointing split_mode "
        "disable_mmap_load_safetensors",
        "folders are in data.path or data.folders": "train_data_dir reg_data_dir dataset_repeats dataset_class",
        "it is the name of the file with folders or prompts": "dataset_config sample_prompts config_file",
        "it is no list of key=value": "network_args optimizer_args",
        "it is read with what it belongs to": "sample_prompts.h",
        "each row has its own": "custom_attributes",
    }
)

KOHYA = Tool(
    name="sd-scripts (kohya)",
    part=_part,
    given=_given,
    rows=_rows,
    model=BaseModel(path=("pretrained_model_name_or_path",), kinds=_kinds),
    fields=FIELDS,
    row_fields=ROW_FIELDS,
    left_out=LEFT_OUT,
    defaults={
        "network_dim": 4,
        "network_alpha": 1,
        "max_train_steps": 1600,
        "gradient_accumulation_steps": 1,
        "network_train_unet_only": False,
    },
    files={"dataset_config": "data", "sample_prompts": "prompts"},
)
