"""Causal language models of several kinds: made without memory, packed, sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed import run_ranks
from tests.distributed.gradients import whole_gradients
from trainer.config.sections import ParallelConfig, TrainConfig
from trainer.distributed.world import World
from trainer.models.parts.language.next_token import (
    block_names,
    build_language_model,
    computed_buffers,
    continue_text,
    restarting_positions,
)
from trainer.models.parts.language.tiny_configs import tiny_config
from trainer.parallel.fsdp_rules import weight_problems
from trainer.parallel.load import fill_rows
from trainer.parallel.mesh import device_mesh
from trainer.parallel.parallelize import ShardSpec, blocks_of, parallelize
from trainer.rng import SampleRng, generator
from trainer.system.errors import InputError
from trainer.weights.files import give_storage

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 3},
    "gemma3_text": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
}


def config_of(kind: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **SIZES, **KINDS[kind])


def fill(model: nn.Module) -> None:
    """The same weights every time, whole or this rank's rows, on the CPU, with what is in no file."""
    buffers = computed_buffers(model.config)
    give_storage(model, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill_rows(parameter, torch.randn(parameter.shape, generator=generator("weights", name)) / 5)
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])


def made(kind: str) -> Any:
    model = build_language_model(config_of(kind))
    fill(model)
    return model.train()


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_model_made_without_memory_gives_the_logits_of_one_that_transformers_made(kind: str) -> None:
    from transformers import AutoModelForCausalLM

    ours, tokens = made(kind), torch.arange(12)[None]
    theirs = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation="sdpa")
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_a_tied_head_stays_tied_where_storage_is_given() -> None:
    model = made("llama")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert made("qwen3").lm_head.weight is not made("qwen3").model.embed_tokens.weight


LENGTHS = [5, 2, 9, 4]
"""Of documents; a row of 24 holds them and four tokens of padding."""


def documents() -> list[Tensor]:
    return [torch.randint(0, 96, (length,), generator=generator("document", length)) for length in LENGTHS]


def packed() -> dict[str, Tensor]:
    """One row with all documents."""
    tokens, numbers = torch.zeros(24, dtype=torch.long), torch.full((24,), -1)
    loss_mask = torch.zeros(24, dtype=torch.bool)
    begin = 0
    for number, document in enumerate(documents()):
        end = begin + len(document)
        tokens[begin:end], numbers[begin:end], loss_mask[begin + 1 : end] = document, number, True
        begin = end
    return {"tokens": tokens[None], "documents": numbers[None], "loss_mask": loss_mask[None]}


def unpacked(document: Tensor) -> dict[str, Tensor]:
    loss_mask = torch.ones(1, len(document), dtype=torch.bool)
    loss_mask[:, 0] = False
    return {
        "tokens": document[None],
        "documents": torch.zeros(1, len(document), dtype=torch.long),
        "loss_mask": loss_mask,
    }


def loss_of(model: Any, row: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum, number of tokens)."""
    positions = restarting_positions(row["documents"])
    logits = model(input_ids=row["tokens"], position_ids=positions, use_cache=False).logits
    loss_mask = row["loss_mask"][0, 1:]
    return F.cross_entropy(logits[0, :-1][loss_mask], row["tokens"][0, 1:][loss_mask], reduction="sum"), loss_mask.sum()


def test_packed_documents_have_the_loss_they_have_alone(kind: str) -> None:
    model = made(kind)
    total, weight = loss_of(model, packed())
    alone = [loss_of(model, unpacked(document)) for document in documents()]
    assert weight == sum(part for _, part in alone) == sum(LENGTHS) - len(LENGTHS)
    expected = torch.stack([part for part, _ in alone]).sum()
    torch.testing.assert_close(total / weight, expected / weight, atol=1e-6, rtol=0)


def test_without_restarting_positions_documents_would_see_each_other(kind: str) -> None:
    model, row = made(kind), packed()
    one = {**row, "documents": torch.zeros_like(row["documents"])}
    assert abs(loss_of(model, one)[0] - loss_of(model, row)[0]) > 1e-2


def test_positions_begin_again_with_each_document() -> None:
    found = restarting_positions(torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1], [4, 4, 4, 4, 5, 5, 5, 5]]))
    assert found.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 1, 2, 3, 0, 1, 2, 3]]


def test_the_likeliest_text_is_the_one_transformers_writes(kind: str) -> None:
    model, tokens = made(kind).eval(), documents()[0]
    end = model.config.vocab_size - 1
    expected = model.generate(tokens[None], max_new_tokens=9, do_sample=False, eos_token_id=end)[0, len(tokens) :]
    found = continue_text(model, tokens, 9, 0.0, {end}, SampleRng(0, [0]))
    assert found.tolist() == [token for token in expected.tolist() if token != end]


@pytest.mark.parametrize("kind", ["openai-gpt", "mamba", "opt"])
def test_a_class_with_another_cache_or_none_writes_the_likeliest_text_too(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(AutoConfig.for_model(kind))).eval()
    tokens = documents()[0]
    expected = tokens
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
        for _ in range(6):
            expected = torch.cat([expected, model(input_ids=expected[None], use_cache=False).logits[0, -1:].argmax(-1)])
    assert continue_text(model, tokens, 6, 0.0, (), SampleRng(0, [0])).tolist() == expected[len(tokens) :].tolist()


def test_a_text_ends_before_its_end_and_the_model_is_called_as_often_as_without_it() -> None:
    model, tokens, calls = made("llama").eval(), documents()[0], []
    model.register_forward_hook(lambda *arguments: calls.append(1))
    whole = continue_text(model, tokens, 6, 0.0, (), SampleRng(0, [0])).tolist()
    cut = continue_text(model, tokens, 6, 0.0, {whole[3], 999}, SampleRng(0, [0])).tolist()
    assert cut == whole[: whole.index(whole[3])]
    assert len(calls) == 12


def test_drawn_text_follows_its_seed_and_a_cold_temperature_takes_the_likeliest() -> None:
    model, tokens = made("llama").eval(), documents()[0]

    def drawn(temperature: float, seed: int) -> list[int]:
        found: list[int] = continue_text(model, tokens, 8, temperature, (), SampleRng(seed, [0])).tolist()
        return found

    assert drawn(1.0, 0) == drawn(1.0, 0) != drawn(1.0, 1)
    assert drawn(1e-4, 0) == drawn(0.0, 1)


def test_the_block_class_is_found_or_named() -> None:
    model = build_language_model(config_of("llama"))
    assert block_names(model) == ("LlamaDecoderLayer",)
    assert block_names(model, "LlamaMLP, LlamaAttention") == ("LlamaMLP", "LlamaAttention")
    with pytest.raises(InputError) as caught:
        block_names(model, "LlamaDecoderLayers")
    assert str(caught.value).startswith("model.options.blocks: 'LlamaDecoderLayers' is not one of Embedding, ")
    assert str(caught.value).endswith("; did you mean 'LlamaDecoderLayer'?")


def test_fsdp2_can_follow_every_call(kind: str) -> None:
    model = made(kind)
    units = blocks_of(model, block_names(model))
    assert len(units) == SIZES["num_hidden_layers"]
    assert weight_problems(model, units, lambda: loss_of(model, packed())) == []


def rows() -> list[dict[str, Tensor]]:
    """Of four ranks, with different numbers of tokens in the loss."""
    return [packed(), *(unpacked(document) for document in documents()[:3])]


CASES = [("llama", "full", "none"), ("llama", "grad_op", "full"), ("gemma3_text", "full", "full")]


def sharded_gradients(world: World) -> list[dict[str, Tensor]]:
    found = []
    for kind, strategy, checkpointing in CASES:
        parallel = ParallelConfig(devices=world.size, strategy=strategy)  # type: ignore[arg-type]
        mesh = device_mesh(parallel, world, strategy)  # type: ignore[arg-type]
        train = TrainConfig(precision="fp32", checkpointing=checkpointing)  # type: ignore[arg-type]
        model = build_language_model(config_of(kind)).train()
        parallelize(model, ShardSpec(block_names(model)), train, parallel, strategy, mesh)  # type: ignore[arg-type]
        fill(model)
        total, weight = loss_of(model, rows()[world.rank])
        weight_of_all = sum(world.gather(float(weight)))
        (total * world.size / weight_of_all).backward()
        found.append(whole_gradients(model))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_of_tied_and_untied_models_on_several_ranks_are_those_of_one_process(ranks: int) -> None:
    results = run_ranks(ranks, sharded_gradients)
    for number, (kind, *case) in enumerate(CASES):
        model = made(kind)
        losses = [loss_of(model, row) for row in rows()[:ranks]]
        total, weight = (torch.stack(parts).sum() for parts in zip(*losses, strict=True))
        (total / weight).backward()
        expected = whole_gradients(model)
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        for rank, found in enumerate(results):
            assert found[number].keys() == expected.keys()
            worst = max(float((found[number][name] - expected[name]).abs().max()) for name in expected)
            assert worst <= 1e-6 * largest, f"rank {rank} {kind} {case}: {worst / largest:.1e}"
