"""Adapters: which layers they change, what they start from, and dropout that follows the sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trainer import adapters, families
from trainer.adapters.dropout import SampleDropout
from trainer.config import InputError, LoraAdapter, ModelConfig, ObjectiveConfig
from trainer.families.base import ModelFamily


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> ModelFamily:
    cache = tmp_path_factory.mktemp("adapters")
    return families.get("flux2")(ModelConfig(family="flux2", path="tiny"), ObjectiveConfig(), cache)


@pytest.fixture
def inject(family: ModelFamily) -> Callable[[LoraAdapter], tuple[nn.Module, list[str]]]:
    def run(cfg: LoraAdapter) -> tuple[nn.Module, list[str]]:
        model = family.build()
        return model, adapters.inject(model, cfg, family.adapter_targets, "flux2")

    return run


def test_the_familys_own_targets_are_every_linear_layer_of_its_blocks(
    family: ModelFamily, inject: Callable[[LoraAdapter], tuple[nn.Module, list[str]]]
) -> None:
    _, changed = inject(LoraAdapter())
    in_blocks = [
        name
        for name, module in family.build().named_modules()
        if isinstance(module, nn.Linear) and "transformer_blocks." in name
    ]
    assert changed == in_blocks


def test_only_the_adapter_is_trained_and_its_weights_are_fp32_on_meta(
    inject: Callable[[LoraAdapter], tuple[nn.Module, list[str]]],
) -> None:
    model, changed = inject(LoraAdapter(rank=4))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(changed)
    assert all(".lora_" in name and p.dtype == torch.float32 and p.is_meta for name, p in trained.items())


def test_a_target_that_matches_nothing_names_the_nearest_layer(
    inject: Callable[[LoraAdapter], tuple[nn.Module, list[str]]],
) -> None:
    with pytest.raises(InputError) as error:
        inject(LoraAdapter(targets=("attn.to_qq",)))
    assert (
        str(error.value) == "adapter.targets: 'attn.to_qq' matches no layer of flux2; nearest: 'attn.to_q' (1 layers)"
    )


def test_targets_match_by_the_end_of_a_name_and_by_regular_expression(
    inject: Callable[[LoraAdapter], tuple[nn.Module, list[str]]],
) -> None:
    _, changed = inject(LoraAdapter(targets=("attn.to_q", r"single_transformer_blocks\.[01]\.attn\.to_out")))
    assert changed == [
        "transformer_blocks.0.attn.to_q",
        "single_transformer_blocks.0.attn.to_out",
        "single_transformer_blocks.1.attn.to_out",
    ]


def test_a_rank_pattern_changes_the_rank_of_its_layers_and_keeps_alpha_over_rank(
    inject: Callable[[LoraAdapter], tuple[nn.Module, list[str]]],
) -> None:
    model, _ = inject(LoraAdapter(rank=4, alpha=2, rank_pattern={"attn.to_q": 8}))
    layers = adapters.adapted_layers(model)
    ranks = {name: int(layer.r[adapters.ADAPTER]) for name, layer in layers.items()}
    assert {name for name, rank in ranks.items() if rank == 8} == {"transformer_blocks.0.attn.to_q"}
    assert set(ranks.values()) == {4, 8}
    assert {layer.scaling[adapters.ADAPTER] for layer in layers.values()} == {0.5}


def test_an_adapter_starts_as_a_no_op_from_numbers_that_depend_on_seed_and_name_only() -> None:
    down, up = "blocks.0.to_q.lora_A.default.weight", "blocks.0.to_q.lora_B.default.weight"
    first = adapters.initial_value(down, (4, 64), seed=1)
    assert torch.equal(first, adapters.initial_value(down, (4, 64), seed=1))
    assert not torch.equal(first, adapters.initial_value(down, (4, 64), seed=2))
    assert not torch.equal(first, adapters.initial_value(down.replace(".0.", ".1."), (4, 64), seed=1))
    assert float(first.abs().max()) <= 1 / 8
    assert float(first.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.1)
    assert not adapters.initial_value(up, (64, 4), seed=1).any()


def masks(dropout: SampleDropout, indices: tuple[int, ...]) -> Tensor:
    dropout.set_samples(7, indices)
    return dropout(torch.ones(len(indices), 50, 40))


def test_dropout_gives_a_sample_the_same_mask_in_any_batch() -> None:
    dropout = SampleDropout(0.25, "layer")
    together = masks(dropout, (4, 9, 11))
    assert torch.equal(together[1:2], masks(dropout, (9,)))
    assert not torch.equal(together[0], together[1])


def test_dropout_drops_its_share_keeps_the_mean_and_does_nothing_in_eval_mode() -> None:
    dropout = SampleDropout(0.25, "layer")
    kept = masks(dropout, (1, 2, 3))
    assert float((kept == 0).float().mean()) == pytest.approx(0.25, abs=0.02)
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3])
    dropout.eval()
    assert torch.equal(dropout(kept), kept)


def test_dropout_refuses_a_batch_it_was_not_told_of() -> None:
    dropout = SampleDropout(0.5, "block.to_q")
    dropout.set_samples(0, (1, 2))
    with pytest.raises(RuntimeError, match=r"block\.to_q: dropout of 3 items, but 2 samples are set"):
        dropout(torch.ones(3, 4))


def test_every_changed_layer_has_its_dropout(
    family: ModelFamily, inject: Callable[[LoraAdapter], tuple[nn.Module, list[str]]], tmp_path: Path
) -> None:
    model, changed = inject(LoraAdapter(dropout=0.5))
    dropouts = adapters.dropouts(model)
    assert len(dropouts) == len(changed)
    for dropout in dropouts:
        dropout.set_samples(0, (5,))
        assert dropout(torch.ones(1, 8, 8)).eq(0).any()
