"""The loss of a language model in chunks of its tokens, against the loss of its whole logits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from tests.distributed import run_ranks
from tests.distributed.gradients import whole_gradients
from tests.models.test_causal_models import KINDS, SIZES, fill
from trainer.config.sections import ParallelConfig, TrainConfig
from trainer.distributed.world import World
from trainer.models.parts.language.chunked_loss import CHUNK, _Sum, can_split, sum_losses_in_chunks
from trainer.models.parts.language.next_token import block_names, build_language_model
from trainer.parallel.mesh import device_mesh
from trainer.parallel.parallelize import ShardSpec, parallelize

MODELS: dict[str, dict[str, Any]] = {
    **KINDS,
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "phi": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": 64},
}
"""Kinds of models with what distinguishes them: scaled and tied heads, a bias, a decoder that is called otherwise."""
WHOLE = ("opt",)
"""Models whose logits are whole: their `forward` does not call the decoder as others do."""


def model_of(kind: str) -> Any:
    from transformers import AutoConfig

    model = build_language_model(AutoConfig.for_model(kind, **SIZES, **MODELS[kind]))
    fill(model)
    return model.eval()


def inputs() -> dict[str, Any]:
    tokens = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "position_ids": torch.arange(12).expand(2, 12), "use_cache": False}


def predictions() -> dict[str, Tensor]:
    """Ten of the 24 tokens, one without weight."""
    predicted = torch.tensor([0, 1, 2, 5, 7, 9, 12, 13, 20, 22])
    targets = inputs()["input_ids"].flatten()[predicted + 1]
    weights = torch.tensor([1.0, 1.0, 2.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.5, 1.0])
    return {"predicted": predicted, "targets": targets, "token_weights": weights}


def whole_loss(model: nn.Module) -> Tensor:
    """By the definition of the cross-entropy."""
    given = predictions()
    logits = model(**inputs()).logits.flatten(0, 1)[given["predicted"]].float()
    log_shares = logits - logits.exp().sum(dim=1, keepdim=True).log()
    return -(log_shares.gather(1, given["targets"][:, None])[:, 0] * given["token_weights"]).sum()


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    total = 3 * loss(model)
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def chunked_loss(model: nn.Module) -> Tensor:
    found: Tensor = model(**inputs(), **predictions())[0]
    return found


FAST = ("llama", "granite", "opt")


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS]
)
def test_chunks_have_the_loss_and_the_gradients_of_whole_logits(kind: str) -> None:
    expected, by_whole = gradients(model_of(kind), whole_loss)
    model = model_of(kind)
    assert can_split(model) == (kind not in WHOLE)
    sum_losses_in_chunks(model, tokens=3)
    found, by_chunks = gradients(model, chunked_loss)
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-6)
    assert by_chunks.keys() == by_whole.keys()
    largest = max(float(gradient.abs().max()) for gradient in by_whole.values())
    worst = max(float((by_chunks[name] - by_whole[name]).abs().max()) for name in by_whole)
    assert worst <= 1e-6 * largest
    with torch.no_grad():
        torch.testing.assert_close(3 * chunked_loss(model), expected, atol=0, rtol=1e-6)
    assert torch.equal(model(**inputs()).logits, model_of(kind)(**inputs()).logits)


def token_losses(model: nn.Module) -> Tensor:
    given = predictions()
    logits = model(**inputs()).logits.flatten(0, 1)[given["predicted"]].float()
    return logits.exp().sum(dim=1).log() - logits.gather(1, given["targets"][:, None])[:, 0]


@pytest.mark.parametrize("kind", ["qwen3", "cohere", "opt"])
def test_weights_may_depend_on_the_losses_of_all_chunks(kind: str) -> None:
    """The derivative of the square of their sum by each loss is twice the sum."""
    expected, by_whole = gradients(model_of(kind), lambda model: token_losses(model).sum().square())
    model, seen = model_of(kind), list[Tensor]()
    sum_losses_in_chunks(model, tokens=3)

    def weigh(losses: Tensor) -> Tensor:
        seen.append(losses)
        return 2 * losses.sum().expand(len(losses))

    found, by_chunks = gradients(model, lambda model: model(**inputs(), **predictions() | {"token_weights": weigh})[0])
    torch.testing.assert_close(seen[0], token_losses(model_of(kind)).detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(found, 2 * expected, atol=0, rtol=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in by_whole.values())
    assert max(float((by_chunks[name] - by_whole[name]).abs().max()) for name in by_whole) <= 1e-6 * largest
    with torch.no_grad():
        torch.testing.assert_close(
            3 * model(**inputs(), **predictions() | {"token_weights": weigh})[0], found, atol=0, rtol=1e-6
        )


def test_no_more_logits_are_held_than_those_of_a_chunk() -> None:
    model, seen = model_of("qwen3"), list[int]()
    sum_losses_in_chunks(model, tokens=3)
    model.lm_head.register_forward_hook(lambda module, given, logits: seen.append(logits.shape[-2]))
    chunked_loss(model).backward()
    assert seen == [1, 3, 3, 3, 1]  # the first for nothing but its decoder's states


@pytest.mark.parametrize("trained", ["lora", "head", "states"])
def test_a_head_with_an_adapter_a_trained_and_a_frozen_head_get_their_gradients(trained: str) -> None:
    def prepared(chunks: bool) -> nn.Module:
        model = model_of("qwen3").requires_grad_(False)
        if trained == "lora":
            torch.manual_seed(0)
            targets = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
            peft.inject_adapter_in_model(targets, model)
        else:
            (model.lm_head if trained == "head" else model.model.layers[1]).requires_grad_(True)
        if chunks:
            sum_losses_in_chunks(model, tokens=4)
        return model

    expected, by_whole = gradients(prepared(False), whole_loss)
    found, by_chunks = gradients(prepared(True), chunked_loss)
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-6)
    assert by_chunks.keys() == by_whole.keys()
    largest = max(float(gradient.abs().max()) for gradient in by_whole.values())
    assert max(float((by_chunks[name] - by_whole[name]).abs().max()) for name in by_whole) <= 1e-6 * largest


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_in_bf16_the_gradients_are_those_of_whole_logits_within_rounding(kind: str) -> None:
    """The weights of bf16 compute exist in forward only."""

    def prepared(chunks: bool) -> nn.Module:
        model = model_of(kind)
        if chunks:
            sum_losses_in_chunks(model, tokens=5)
        spec = ShardSpec(block_names(model), fp32_inputs=frozenset({"token_weights"}))
        parallel = ParallelConfig()
        return parallelize(model, spec, TrainConfig(precision="bf16"), parallel, "none", None)

    expected, by_whole = gradients(prepared(False), whole_loss)
    found, by_chunks = gradients(prepared(True), chunked_loss)
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-5)
    for name, gradient in by_whole.items():
        assert float((by_chunks[name] - gradient).norm()) <= 2e-2 * float(gradient.norm()), name


def sharded(world: World) -> list[dict[str, Tensor]]:
    found = []
    for kind in ("llama", "qwen3"):
        parallel = ParallelConfig(devices=world.size, strategy="full")
        model = copy.deepcopy(build_language_model(model_of(kind).config))
        sum_losses_in_chunks(model, tokens=3)
        spec = ShardSpec(block_names(model), fp32_inputs=frozenset({"token_weights"}))
        train = TrainConfig(precision="fp32", checkpointing="full")
        parallelize(model, spec, train, parallel, "full", device_mesh(parallel, world, "full"))
        fill(model)
        chunked_loss(model.eval()).backward()
        found.append(whole_gradients(model))
    return found


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_whole_logits() -> None:
    for rank in run_ranks(2, sharded):
        for kind, found in zip(("llama", "qwen3"), rank, strict=True):
            model = model_of(kind)
            whole_loss(model).backward()
            expected = whole_gradients(model)
            largest = max(float(gradient.abs().max()) for gradient in expected.values())
            assert found.keys() == expected.keys()
            assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-6 * largest


def largest_sum_of_allocations(run: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator has given out at once in `run`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


@pytest.mark.slow
def test_the_loss_of_a_large_vocabulary_takes_little_memory() -> None:
    """4,096 tokens of Qwen3's 151,936: whole logits take 1.2 GiB in bf16, and 9.3 with all that their loss makes."""
    numbers = torch.Generator().manual_seed(0)
    head = (torch.randn(151_936, 64, generator=numbers) / 8).bfloat16()
    states = torch.randn(4096, 64, generator=numbers).bfloat16().requires_grad_()
    targets, weights = torch.randint(151_936, (4096,), generator=numbers), torch.ones(4096)

    def run() -> None:
        total = _Sum.apply(partial(F.linear, weight=head), states, targets, weights, CHUNK)  # type: ignore[no-untyped-call]
        total.backward()

    assert largest_sum_of_allocations(run) <= 0.6 * 2**30
