"""Which layers an adapter changes, how large it is there, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.nets import NET_TARGETS, Net, family_targets
from trainer import adapters
from trainer.adapters import Injected, Targets
from trainer.config.sections import (
    AdapterSection,
    BoftAdapter,
    DiagOftAdapter,
    DoraAdapter,
    LoconAdapter,
    LohaAdapter,
    LokrAdapter,
    LoraAdapter,
    ModelConfig,
    ObjectiveConfig,
)
from trainer.models import families
from trainer.models.base import ModelFamily
from trainer.system.errors import InputError


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


def make(name: str, cache: Path) -> ModelFamily:
    return families.get(name)(ModelConfig(family=name), ObjectiveConfig(), cache)


def inject(name: str, cache: Path, cfg: AdapterSection) -> tuple[nn.ModuleDict, Injected]:
    """The family's denoiser on the meta device with the adapter."""
    family = make(name, cache)
    model = nn.ModuleDict({family.components[0]: family.build(family.components[0])})
    return model, adapters.inject(model, cfg, family_targets(family), name)


def refusal(name: str, cache: Path, cfg: AdapterSection) -> str:
    with pytest.raises(InputError) as caught:
        inject(name, cache, cfg)
    return str(caught.value)


def net_shapes(cfg: AdapterSection) -> dict[str, tuple[int, ...]]:
    """{parameter: shape} of the adapter on `Net`: 96 x 48 and a 3 x 3 convolution 32 x 24."""
    with torch.device("meta"):
        model = nn.ModuleDict({"net": Net()})
    shapes = adapters.inject(model, cfg, NET_TARGETS, "net").parameters
    return {name.removeprefix("net.").replace(".default", "").removesuffix(".weight"): s for name, s in shapes.items()}


def net_refusal(cfg: AdapterSection) -> str:
    with pytest.raises(InputError) as caught:
        net_shapes(cfg)
    return str(caught.value)


@pytest.mark.parametrize("cfg", [LoraAdapter(), DoraAdapter(), LohaAdapter(), LokrAdapter(), BoftAdapter()])
def test_the_familys_own_targets_are_every_linear_layer_of_its_blocks(cache: Path, cfg: AdapterSection) -> None:
    _, injected = inject("flux2", cache, cfg)
    plain = make("flux2", cache).build("transformer")
    assert injected.layers == tuple(
        f"transformer.{name}"
        for name, module in plain.named_modules()
        if isinstance(module, nn.Linear) and "transformer_blocks." in name
    )


@pytest.mark.parametrize("cfg", [LoraAdapter(), DoraAdapter(), LohaAdapter(), LokrAdapter(), DiagOftAdapter()])
def test_only_the_adapter_is_trained_and_is_fp32_on_meta_over_a_bf16_base(cfg: AdapterSection) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"net": Net().to(torch.bfloat16)})
    injected = adapters.inject(model, cfg, NET_TARGETS, "net")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained.keys() == injected.parameters.keys()
    assert all(parameter.dtype == torch.float32 and parameter.is_meta for parameter in trained.values())


def test_targets_match_by_the_end_of_a_name_and_by_regular_expression(cache: Path) -> None:
    targets = ("attn.to_q", r"single_transformer_blocks\.[01]\.attn\.to_out", "transformer.x_embedder")
    _, injected = inject("flux2", cache, LoraAdapter(rank=4, targets=targets))
    assert injected.layers == (
        "transformer.x_embedder",
        "transformer.transformer_blocks.0.attn.to_q",
        "transformer.single_transformer_blocks.0.attn.to_out",
        "transformer.single_transformer_blocks.1.attn.to_out",
    )


def test_a_target_that_matches_nothing_names_the_nearest_layer(cache: Path) -> None:
    assert refusal("flux2", cache, LoraAdapter(targets=("attn.to_qq",))) == (
        "adapter.targets: 'attn.to_qq' matches no layer of flux2; nearest: 'attn.to_q' (1 layer)"
    )


@pytest.mark.parametrize("cfg", [LoconAdapter(rank=4), LohaAdapter(rank=4, conv_rank=2)])
def test_convolutions_of_the_familys_blocks_are_changed_too(cache: Path, cfg: AdapterSection) -> None:
    model, injected = inject("sdxl", cache, cfg)
    kinds = [type(adapters.adapted_layers(model)[name].get_base_layer()) for name in injected.layers]
    family = make("sdxl", cache)
    convs = [name for name, m in family.build("unet").named_modules() if isinstance(m, nn.Conv2d)]
    wanted = [name for name in convs if any(re.fullmatch(p, name) for p in family.conv_targets["unet"])]
    assert kinds.count(nn.Conv2d) == len(wanted) > 0
    assert kinds.count(nn.Linear) > 0


@pytest.mark.parametrize("cfg", [LoraAdapter(rank=4), LohaAdapter(rank=4), LokrAdapter(), DoraAdapter(rank=4)])
def test_convolutions_are_left_alone_by_default(cache: Path, cfg: AdapterSection) -> None:
    model, _ = inject("sdxl", cache, cfg)
    layers = adapters.adapted_layers(model).values()
    assert {type(layer.get_base_layer()) for layer in layers} == {nn.Linear}


def test_a_conv_rank_means_nothing_to_a_family_without_convolutions(cache: Path) -> None:
    with_rank, without = (inject("flux2", cache, LohaAdapter(conv_rank=rank))[1] for rank in (8, None))
    assert with_rank == without


WHOLE_ROWS = "original files swap the halves of its rows, which {} does not survive"


@pytest.mark.parametrize("cfg", [DoraAdapter(rank=4), DiagOftAdapter(), BoftAdapter()])
def test_adapters_of_whole_rows_leave_out_layers_whose_halves_are_swapped(cache: Path, cfg: AdapterSection) -> None:
    _, injected = inject("flux2", cache, cfg.model_copy(update={"targets": ("norm_out.linear", "attn.to_q")}))
    assert injected.layers == ("transformer.transformer_blocks.0.attn.to_q",)
    reason = WHOLE_ROWS.format(cfg.type)
    assert injected.notes == (f"adapter.targets: 1 layer left out, as 'transformer.norm_out.linear': {reason}",)


def test_a_low_rank_adapter_takes_them(cache: Path) -> None:
    _, injected = inject("flux2", cache, LoraAdapter(rank=4, targets=("norm_out.linear",)))
    assert injected.layers == ("transformer.norm_out.linear",)


@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        (
            DoraAdapter(targets=("conv",)),
            "adapter.targets: 1 layer left out, as 'net.conv': dora changes linear layers only; "
            "no layer remains, so name others",
        ),
        (
            LokrAdapter(targets=("conv",)),
            "adapter.targets: 1 layer left out, as 'net.conv': convolutions need adapter.conv_rank; "
            "no layer remains, so name others",
        ),
        (
            LoraAdapter(rank=64),
            "adapter.rank: 64 is too large for 'net.linear', whose weight is 96 x 48; at most 48. "
            "Lower it, or give such layers their own in adapter.rank_pattern",
        ),
        (
            LoconAdapter(rank=4, conv_rank=40),
            "adapter.conv_rank: 40 is too large for 'net.conv', whose weight is 32 x 216; at most 32. "
            "Lower it, or give such layers their own in adapter.rank_pattern",
        ),
        (
            LoraAdapter(rank=4, rank_pattern={"lin.*": 50}),
            "adapter.rank_pattern.lin.*: 50 is too large for 'net.linear', whose weight is 96 x 48; at most 48. "
            "Lower it, or give such layers their own in adapter.rank_pattern",
        ),
        (
            LoraAdapter(rank=4, rank_pattern={"conv": 2}),
            "adapter.rank_pattern: 'conv' matches no layer of the adapter; nearest: 'linear' (1 layer)",
        ),
        (
            DiagOftAdapter(block_size=128),
            "adapter.block_size: 128 is too large for 'net.linear' with 96 outputs; "
            "the nearest that work are 32, 48, 96",
        ),
        (
            BoftAdapter(block_size=97),
            "adapter.block_size: 97 is too large for 'net.linear' with 96 outputs; "
            "the nearest that work are 24, 48, 96",
        ),
        (
            BoftAdapter(num_stages=5),
            "adapter.num_stages: 5 is too many for 'net.linear': its 96 outputs in blocks of 12 have 4; "
            "lower it or adapter.block_size, or leave it empty for as many as each layer has",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.type,
)
def test_what_does_not_fit_a_layer_is_refused_with_what_would(cfg: AdapterSection, text: str) -> None:
    assert net_refusal(cfg) == text


def test_boft_has_no_blocks_for_an_odd_number_of_outputs() -> None:
    with pytest.raises(InputError) as caught:
        adapters.inject(nn.ModuleDict({"net": nn.Linear(4, 7)}), BoftAdapter(targets=("net",)), NET_TARGETS, "net")
    assert str(caught.value) == (
        "adapter.block_size: 'net' has 7 outputs, which no block size divides; leave it out in adapter.targets"
    )


def test_a_rank_pattern_changes_the_rank_of_its_layers_and_keeps_alpha_over_rank(cache: Path) -> None:
    model, _ = inject("flux2", cache, LoraAdapter(rank=4, alpha=2, rank_pattern={"attn.to_q": 8}))
    layers = adapters.adapted_layers(model)
    ranks = {name: layer.lora_A[adapters.ADAPTER].out_features for name, layer in layers.items()}
    assert {name for name, rank in ranks.items() if rank == 8} == {"transformer.transformer_blocks.0.attn.to_q"}
    assert set(ranks.values()) == {4, 8}
    assert {layer.scaling[adapters.ADAPTER] for layer in layers.values()} == {0.5}


@pytest.mark.parametrize(
    ("cfg", "shapes"),
    [
        (LoraAdapter(rank=3), {"linear.lora_A": (3, 48), "linear.lora_B": (96, 3)}),
        (
            LoconAdapter(rank=3, conv_rank=2),
            {
                "linear.lora_A": (3, 48),
                "linear.lora_B": (96, 3),
                "conv.lora_A": (2, 24, 3, 3),
                "conv.lora_B": (32, 2, 1, 1),
            },
        ),
        (LoconAdapter(rank=3, targets=("conv",)), {"conv.lora_A": (3, 24, 3, 3), "conv.lora_B": (32, 3, 1, 1)}),
        (
            DoraAdapter(rank=3),
            {"linear.lora_A": (3, 48), "linear.lora_B": (96, 3), "linear.lora_magnitude_vector": (96,)},
        ),
        (
            LohaAdapter(rank=3, conv_rank=2, targets=("conv",)),
            {
                "conv.hada_w1_a": (32, 2),
                "conv.hada_w1_b": (2, 216),
                "conv.hada_w2_a": (32, 2),
                "conv.hada_w2_b": (2, 216),
            },
        ),
        (LokrAdapter(rank=2), {"linear.lokr_w1": (8, 6), "linear.lokr_w2_a": (12, 2), "linear.lokr_w2_b": (2, 8)}),
        (LokrAdapter(rank=16), {"linear.lokr_w1": (8, 6), "linear.lokr_w2": (12, 8)}),
        (
            LokrAdapter(rank=2, factor=5),
            {"linear.lokr_w1": (4, 4), "linear.lokr_w2_a": (24, 2), "linear.lokr_w2_b": (2, 12)},
        ),
        (
            LokrAdapter(rank=2, decompose_both=True),
            {
                "linear.lokr_w1_a": (8, 2),
                "linear.lokr_w1_b": (2, 6),
                "linear.lokr_w2_a": (12, 2),
                "linear.lokr_w2_b": (2, 8),
            },
        ),
        (LokrAdapter(rank=2, full_matrix=True), {"linear.lokr_w1": (8, 6), "linear.lokr_w2": (12, 8)}),
        (
            LokrAdapter(rank=2, conv_rank=1, targets=("conv",)),
            {"conv.lokr_w1": (4, 4), "conv.lokr_w2_a": (8, 1), "conv.lokr_w2_b": (1, 54)},
        ),
        (DiagOftAdapter(block_size=5), {"linear.oft_blocks": (16, 6, 6)}),
        (DiagOftAdapter(block_size=5, targets=("conv",)), {"conv.oft_blocks": (4, 8, 8)}),
        (BoftAdapter(block_size=5), {"linear.oft_blocks": (5, 16, 6, 6)}),
        (BoftAdapter(block_size=7, num_stages=2), {"linear.oft_blocks": (2, 8, 12, 12)}),
    ],
    ids=lambda value: value.type if isinstance(value, AdapterSection) else "",
)
def test_options_decide_the_shapes(cfg: AdapterSection, shapes: dict[str, Any]) -> None:
    assert net_shapes(cfg) == shapes


def test_larger_blocks_than_requested_are_noted_once_per_width(cache: Path) -> None:
    _, injected = inject("flux2", cache, BoftAdapter(block_size=8))
    layer = "transformer.transformer_blocks.0.ff.linear_in"
    single = "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj"
    assert injected.notes == (
        f"adapter.block_size: 12 instead of 8 in 2 layers with 384 outputs, as '{layer}'",
        f"adapter.block_size: 18 instead of 8 in 2 layers with 576 outputs, as '{single}'",
    )


def test_a_rank_of_lokr_that_leaves_its_factor_whole_is_noted(cache: Path) -> None:
    _, injected = inject("flux2", cache, LokrAdapter(rank=4))
    name = "transformer.transformer_blocks.0.attn.to_q"
    assert injected.notes == (
        f"adapter.rank: has no effect in 8 layers, as '{name}': they are so small that all of their second factor is "
        "trained",
    )
    assert inject("flux2", cache, LokrAdapter(rank=3))[1].notes == ()
    assert inject("flux2", cache, LokrAdapter(full_matrix=True))[1].notes == ()


def test_a_component_without_recommended_layers_needs_targets() -> None:
    with pytest.raises(InputError) as caught:
        adapters.inject(nn.ModuleDict({"net": Net()}), LoraAdapter(), Targets({}, {}, ()), "flux2")
    assert str(caught.value) == (
        "adapter.targets: flux2 recommends no layers of net, which is to be trained by the adapter; "
        "name some, or set model.train.net: frozen"
    )


def test_targets_that_leave_out_a_component_are_refused() -> None:
    model = nn.ModuleDict({"net": Net(), "text_encoder": Net()})
    with pytest.raises(InputError) as caught:
        adapters.inject(model, LoraAdapter(targets=("net.linear",)), NET_TARGETS, "flux2")
    assert str(caught.value) == (
        "adapter.targets: names no layer of text_encoder, which is to be trained by the adapter; "
        "name some, or set model.train.text_encoder: frozen"
    )


class Experts(nn.Module):
    """Layers as models with experts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(32, 4, bias=False)
        self.scaled = Scaled(32, 32)
        self.shared = nn.Linear(32, 32)
        self.gate = nn.Linear(32, 1)


class Router(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).topk(2)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


EXPERTS = Targets({"net": (".+",)}, {}, ())


@pytest.mark.parametrize(
    ("cfg", "changed"),
    [
        (LoraAdapter(rank=4), ["scaled", "shared"]),
        (LoraAdapter(rank=1), ["scaled", "shared", "gate"]),
        (LoraAdapter(rank=4, rank_pattern={"gate": 1}), ["scaled", "shared", "gate"]),
        (LokrAdapter(rank=4), ["scaled", "shared", "gate"]),
        (BoftAdapter(block_size=4), ["scaled", "shared"]),
    ],
)
def test_a_router_that_chooses_is_no_linear_layer_and_a_gate_of_one_output_is_left_out_where_nothing_fits_it(
    cfg: AdapterSection, changed: list[str]
) -> None:
    injected = adapters.inject(nn.ModuleDict({"net": Experts()}), cfg, EXPERTS, "net")
    assert injected.layers == tuple(f"net.{name}" for name in changed)
    if "gate" not in changed:
        said = f"adapter.targets: 1 layer left out, as 'net.gate': it has one output, which {cfg.type} of this size"
        assert f"{said} does not fit" in injected.notes


def test_a_gate_of_one_output_that_is_asked_for_is_refused_where_the_rank_does_not_fit() -> None:
    with pytest.raises(InputError, match=r"adapter.rank: 4 is too large for 'net.gate', whose weight is 1 x 32"):
        adapters.inject(nn.ModuleDict({"net": Experts()}), LoraAdapter(rank=4, targets=["gate"]), EXPERTS, "net")
