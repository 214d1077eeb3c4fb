"""Language models of any class that transformers makes: refused before the data where FSDP2 cannot shard them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.commands import launch_py
from tests.distributed import run_ranks
from tests.runs import alone, difference, make_run, make_text, text_config, train
from trainer.config.schema import RunConfig
from trainer.models import families
from trainer.models.build import build_model
from trainer.models.parts.language.random_language_models import write_byte_tokenizer
from trainer.system.errors import InputError

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
SHARED_BLOCK: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "hybrid_layer_ids": [1, 3],
    "num_mem_blocks": 1,
    "ffn_hidden_size": 64,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    "adapter_rank": 4,
    "mamba_d_state": 8,
    "n_mamba_heads": 4,
    "mamba_headdim": 16,
    "chunk_size": 8,
}
"""One transformer block that two layers share."""
TRAINED: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},  # blocks that return views
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},  # keeps its last state on itself
}
"""Kinds that gave on two ranks the gradients of one process."""
ALONE = "or train it on one device (parallel.devices: 1, parallel.strategy: none) without parallel.cpu_offload"


def folder_of(folder: Path, model_type: str, **sizes: Any) -> Path:
    """A folder with the config of a model, random weights and a tokenizer of bytes."""
    config = AutoConfig.for_model(model_type, **SIZES | sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if not hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = 4096
    write_byte_tokenizer(folder, config)
    return folder


def config_of(folder: Path, text: Path, **changes: Any) -> RunConfig:
    """Of a run on two devices."""
    return text_config(text, **{"model__path": str(folder), "adapter__type": "none", "parallel__devices": 2, **changes})


def build(cfg: RunConfig, cache: Path) -> nn.ModuleDict:
    return build_model(cfg, families.make(cfg, cache)).module


def refusal(cfg: RunConfig, cache: Path) -> str:
    with pytest.raises(InputError) as caught:
        build(cfg, cache)
    return str(caught.value)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("shared"), "zamba2", **SHARED_BLOCK)


class Reading(LlamaForCausalLM):  # type: ignore[misc]
    """The head is a weight of the first block, read from outside."""

    def forward(self, **inputs: Any) -> Any:
        found = super().forward(**inputs)
        found.logits = found.logits + self.model.layers[0].mlp.up_proj.weight.mean()
        return found


class ReadingConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "reading"


@pytest.fixture
def reading() -> Iterator[str]:
    """The name of that kind of model while transformers knows it."""
    Reading.config_class = ReadingConfig
    AutoConfig.register("reading", ReadingConfig)
    AutoModelForCausalLM.register(ReadingConfig, Reading)
    yield "reading"
    del CONFIG_MAPPING._extra_content["reading"], MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[ReadingConfig]


NESTED = "a Zamba2MambaDecoderLayer is inside a Zamba2HybridLayer, and both are blocks"


def test_a_model_whose_blocks_are_inside_others_is_sharded_by_those_that_can_be(shared: Path, tmp_path: Path) -> None:
    cfg = config_of(shared, tmp_path)
    family = families.make(cfg, tmp_path)
    built = build_model(cfg, family)
    assert family.shard.blocks == ("Zamba2MambaDecoderLayer",)
    assert built.notes[-1] == f"the Zamba2ForCausalLM is sharded by its Zamba2MambaDecoderLayer, because {NESTED}"


def test_named_blocks_of_which_one_is_inside_another_are_refused_with_those_that_can_be(
    shared: Path, tmp_path: Path
) -> None:
    named = {"blocks": "Zamba2MambaDecoderLayer, Zamba2HybridLayer"}
    assert refusal(config_of(shared, tmp_path, model__options=named), tmp_path) == (
        f"model.path {shared}: FSDP2 cannot shard a Zamba2ForCausalLM: {NESTED}; "
        f"set model.options.blocks: Zamba2MambaDecoderLayer, {ALONE}"
    )


def test_weights_that_two_blocks_share_are_refused(shared: Path, tmp_path: Path) -> None:
    found = refusal(config_of(shared, tmp_path, model__options={"blocks": "Zamba2HybridLayer"}), tmp_path)
    assert found == (
        f"model.path {shared}: FSDP2 cannot shard a Zamba2ForCausalLM: model.layers.1.shared_transformer."
        "input_layernorm.weight is used while model.layers.3 (Zamba2HybridLayer), whose weights are gathered only "
        f"then, does not run; {ALONE.removeprefix('or ')}"
    )


def test_an_embedding_that_is_declared_a_block_and_is_the_head_too_is_none(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "bert", is_decoder=True)
    cfg = config_of(folder, tmp_path)
    family = families.make(cfg, tmp_path)
    assert build_model(cfg, family).notes[-1] == (
        "the BertLMHeadModel is sharded by its BertLayer, because bert.embeddings.word_embeddings.weight is used while "
        "bert.embeddings (BertEmbeddings), whose weights are gathered only then, does not run"
    )
    assert family.shard.blocks == ("BertLayer",)


def test_values_that_modules_compute_are_those_of_a_model_that_was_made_for_real(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "bert", is_decoder=True)
    made = AutoModelForCausalLM.from_pretrained(folder)
    found = families.make(config_of(folder, tmp_path), tmp_path).computed_buffers("language_model")
    expected = {name: buffer for name, buffer in made.named_buffers() if name not in made.state_dict()}
    assert found.keys() == expected.keys() == {"bert.embeddings.position_ids", "bert.embeddings.token_type_ids"}
    assert all(torch.equal(found[name], buffer) for name, buffer in expected.items())


@pytest.mark.parametrize("changes", [{}, {"parallel__devices": 1, "parallel__cpu_offload": True}])
def test_a_class_that_reads_a_weight_of_a_block_is_sharded_as_one_unit(
    reading: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = folder_of(tmp_path / "model", reading)
    why = (
        "model.layers.0.mlp.up_proj.weight is used while model.layers.0 (LlamaDecoderLayer), whose weights are "
        "gathered only then, does not run"
    )
    cfg = config_of(folder, tmp_path, **changes)
    assert build_model(cfg, families.make(cfg, tmp_path)).notes == (
        f"the Reading is sharded as one unit, which every rank gathers whole in each pass, because {why}",
    )
    named = config_of(folder, tmp_path, **changes, model__options={"blocks": "LlamaDecoderLayer"})
    assert refusal(named, tmp_path) == (
        f"model.path {folder}: FSDP2 cannot shard a Reading: {why}; {ALONE.removeprefix('or ')}"
    )


def test_what_cannot_be_sharded_is_built_for_one_device(shared: Path, tmp_path: Path) -> None:
    assert build(config_of(shared, tmp_path, parallel__devices=1), tmp_path)


@pytest.mark.parametrize("kind", TRAINED)
def test_what_trains_is_not_refused(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainer")
    folder = folder_of(tmp_path / "model", kind, **TRAINED[kind])
    assert build(config_of(folder, tmp_path), tmp_path)
    assert [record for record in caplog.records if record.name.startswith("trainer")] == []


def test_a_forward_pass_that_needs_values_is_not_looked_at_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainer")
    folder = folder_of(tmp_path / "model", "jetmoe", kv_channels=8)  # sizes its experts' parts by `tolist`
    assert build(config_of(folder, tmp_path), tmp_path)
    (record,) = [record for record in caplog.records if record.name.startswith("trainer")]
    assert record.getMessage().startswith("JetMoeForCausalLM was not checked for sharding: without values it does not ")


@pytest.mark.slow
def test_with_the_blocks_that_the_refusal_names_two_ranks_train_what_one_process_trains(
    shared: Path, tmp_path: Path
) -> None:
    text = make_text(tmp_path / "text")
    cfg = config_of(
        shared,
        text,
        model__options={"blocks": "Zamba2MambaDecoderLayer"},
        parallel__strategy="full",
        train__steps=2,
    )
    found = run_ranks(2, train, cfg, make_run(tmp_path, cfg, "two"))[0]
    single = config_of(shared, text, parallel__devices=1, train__steps=2)
    expected = train(alone(), single, make_run(tmp_path, single, "one"))
    assert found.losses == pytest.approx(expected.losses, abs=1e-6, rel=0)
    assert difference(found.weights, expected.weights) <= 1e-6


@pytest.mark.slow
def test_a_run_of_such_a_model_ends_with_the_sentence_and_code_2(shared: Path, tmp_path: Path) -> None:
    text = make_text(tmp_path / "text")
    (tmp_path / "preset.yaml").write_text(
        f"model: {{family: causal_lm, path: {shared}, options: {{blocks: Zamba2HybridLayer}}}}\n"
        f"data: {{path: {text}, length: 48}}\nadapter: {{type: none}}\n"
        "train: {steps: 1, batch_size: 2, precision: fp32}\nparallel: {device: cpu, devices: 2, strategy: full}\n",
        encoding="utf-8",
    )
    done = launch_py(tmp_path, "--headless", "preset.yaml")
    assert done.returncode == 2
    assert f"model.path {shared}: FSDP2 cannot shard a Zamba2ForCausalLM: " in done.stderr
    assert "Traceback" not in done.stderr
