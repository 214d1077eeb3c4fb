"""What a layer with an adapter computes: nothing new at the start, then what its merged weight and others compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import peft
import pytest
import torch
from lycoris import create_lycoris_from_weights
from lycoris.modules.lokr import LokrModule
from torch import Tensor, nn

from tests.adapters.nets import (
    CONFIGS,
    NET_TARGETS,
    WITH_DROPOUT,
    Adapted,
    Net,
    adapt,
    denoiser,
    family_targets,
    moved,
    net,
    net_inputs,
    plain_net,
    started,
)
from trainer import adapters
from trainer.adapters.boft import Boft
from trainer.adapters.dora import RowLengths
from trainer.adapters.layer import LayerAdapter
from trainer.adapters.orthogonal import cayley_excess
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
    ParallelConfig,
    TrainConfig,
)
from trainer.models import families
from trainer.models.base import ModelFamily
from trainer.models.families.flux2 import image_ids, text_ids
from trainer.parallel.parallelize import ShardSpec, parallelize
from trainer.rng import generator

cases = pytest.mark.parametrize("case", CONFIGS)


@pytest.fixture(scope="module", params=["flux2", "sdxl"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFamily:
    cache = tmp_path_factory.mktemp("layers")
    return families.get(request.param)(ModelConfig(family=request.param), ObjectiveConfig(), cache)


def family_inputs(family: ModelFamily) -> dict[str, Any]:
    """A batch of two for the denoiser of the tiny models."""
    numbers = generator("inputs")

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers)

    config: Any = family.build(family.components[0]).config
    if "joint_attention_dim" in config:
        return {
            "hidden_states": random(2, 6, config.in_channels),
            "encoder_hidden_states": random(2, 3, config.joint_attention_dim),
            "timestep": torch.tensor([0.2, 0.7]),
            "img_ids": image_ids(2, 3),
            "txt_ids": text_ids(3),
        }
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {
        "sample": random(2, config.in_channels, 8, 8),
        "encoder_hidden_states": random(2, 3, config.cross_attention_dim),
        "timestep": torch.tensor([10, 700]),
        "added_cond_kwargs": {"text_embeds": random(2, pooled), "time_ids": torch.full((2, 6), 64.0)},
    }


def outputs(model: nn.ModuleDict, inputs: Mapping[str, Any]) -> Tensor:
    (module,) = model.values()
    with torch.no_grad():
        result: Tensor = module(**inputs, return_dict=False)[0]
    return result


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


@cases
def test_an_adapter_starts_as_an_exact_no_op_on_the_whole_model(family: ModelFamily, case: str) -> None:
    inputs, model = family_inputs(family), denoiser(family)
    before = outputs(model, inputs)
    started_model = adapt(model, CONFIGS[case], family_targets(family), started).model
    assert torch.equal(outputs(started_model, inputs), before)


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@cases
def test_an_adapter_starts_as_an_exact_no_op_on_a_bf16_base(case: str, compute: torch.dtype | None) -> None:
    """compute: what mixed precision casts the fp32 masters to before a layer sees them, if it does."""
    inputs = [x.bfloat16() for x in net_inputs()]
    adapted = net(CONFIGS[case], started, torch.bfloat16)
    found = adapted.model.to(compute)["net"](*inputs)
    expected = plain_net(torch.bfloat16)["net"](*inputs)
    assert all(torch.equal(a, b) and a.dtype == torch.bfloat16 for a, b in zip(found, expected, strict=True))


@cases
def test_a_model_whose_adapter_is_switched_off_is_its_base_bit_for_bit(family: ModelFamily, case: str) -> None:
    inputs, model = family_inputs(family), denoiser(family)
    before = outputs(model, inputs)
    adapted = adapt(model, CONFIGS[case], family_targets(family), moved).model
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    with_adapter = outputs(adapted, inputs)
    with pytest.raises(KeyError), adapters.switched_off(adapted):
        assert torch.equal(outputs(adapted, inputs), before)
        assert {name for name, parameter in adapted.named_parameters() if parameter.requires_grad} == trained
        raise KeyError
    assert torch.equal(outputs(adapted, inputs), with_adapter)
    assert not torch.equal(with_adapter, before)


@pytest.mark.parametrize("strength", [0.5, 1.5])
@cases
def test_at_a_strength_each_layer_computes_with_its_weight_moved_that_far(case: str, strength: float) -> None:
    adapted, plain = net(CONFIGS[case]), plain_net()
    with torch.no_grad():
        whole = adapted.model["net"](*net_inputs())
        for name, layer in adapted.trained().items():
            weight = plain.get_submodule(name).weight
            weight += strength * (layer.merged(weight) - weight)
        expected = plain["net"](*net_inputs())
        with adapters.at_strength(adapted.model, strength):
            found = adapted.model["net"](*net_inputs())
        again = adapted.model["net"](*net_inputs())
    assert all(relative(a, b) <= 1e-5 for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))
    assert any(relative(a, b) > 1e-3 for a, b in zip(whole, expected, strict=True))


@pytest.mark.parametrize("case", [case for case in CONFIGS if case != "boft, 2 stages"])
def test_lycoris_computes_the_same_from_the_same_tensors(case: str) -> None:
    """It reads boft with all stages only."""
    adapted, plain = net(CONFIGS[case]), plain_net()
    weights: dict[str, Tensor] = {}
    for name, layer in adapted.trained().items():
        weights |= lycoris_tensors(f"lycoris_{name.replace('.', '_')}", layer)
    network, _ = create_lycoris_from_weights(1.0, None, plain, weights_sd=weights)
    network.apply_to()
    assert len(network.loras) == len(adapted.injected.layers)
    with torch.no_grad():
        found, expected = (model["net"](*net_inputs()) for model in (adapted.model, plain))
    assert all(relative(a, b) <= 1e-5 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("full_matrix", [True, False])
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_factors_of_a_lokr_are_whole_and_not_scaled_where_those_of_lycoris_are(rank: int, full_matrix: bool) -> None:
    """Without `full_matrix` both are whole at rank 16, and those of the convolution at rank 4."""
    adapted, plain = net(LokrAdapter(rank=rank, conv_rank=rank, alpha=1, full_matrix=full_matrix)), plain_net()
    for name, layer in adapted.trained().items():
        theirs = LokrModule(name, plain.get_submodule(name), lora_dim=rank, alpha=1, full_matrix=full_matrix)
        assert layer.scale == theirs.scale
        theirs.load_state_dict({f"lokr_{n}": tensor for n, tensor in layer.tensors.items()} | {"alpha": theirs.alpha})


def test_without_an_alpha_a_stabilized_scale_is_the_root_of_the_rank() -> None:
    assert LoraAdapter(rank=16, rank_stabilized=True).scale_at(16) == 4.0
    assert LoraAdapter(rank=16).scale_at(16) == 1.0


def lycoris_tensors(prefix: str, layer: LayerAdapter) -> dict[str, Tensor]:
    """A layer's adapter under LyCORIS' names, whose scale is alpha / rank."""
    tensors = layer.tensors
    match layer.kind:
        case "lora" | "dora":
            named = {"lora_down.weight": tensors["down"], "lora_up.weight": tensors["up"]}
            if layer.kind == "dora":
                named["dora_scale"] = tensors["magnitude"].unsqueeze(1)
            alpha = layer.scale * tensors["down"].shape[0]
        case "loha":
            named = {f"hada_{name}": tensor for name, tensor in tensors.items()}
            alpha = layer.scale * tensors["w1_b"].shape[0]
        case "lokr":
            named = {f"lokr_{name}": tensor for name, tensor in tensors.items()}
            alpha = layer.scale * (tensors["w2_b"].shape[0] if "w2_b" in tensors else 1)
        case _:
            named, alpha = {"oft_blocks": tensors["blocks"]}, 0.0
    return {f"{prefix}.{name}": tensor for name, tensor in (named | {"alpha": torch.tensor(alpha)}).items()}


PEFT: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=2, target_modules=["linear", "conv"]),
    "dora": lambda: peft.LoraConfig(r=4, lora_alpha=2, use_dora=True, target_modules=["linear"]),
    "loha": lambda: peft.LoHaConfig(r=2, alpha=1, target_modules=["linear", "conv"]),
    "loha, dense": lambda: peft.LoHaConfig(r=12, alpha=12, target_modules=["linear", "conv"]),
    "lokr": lambda: peft.LoKrConfig(r=2, alpha=1, decompose_factor=4, target_modules=["linear", "conv"]),
    "locon, stabilized": lambda: peft.LoraConfig(
        r=4, lora_alpha=2, use_rslora=True, target_modules=["linear", "conv"], rank_pattern={"conv": 3}
    ),
    "dora, stabilized": lambda: peft.LoraConfig(
        r=4, lora_alpha=2, use_rslora=True, use_dora=True, target_modules=["linear"]
    ),
}
STABILIZED: dict[str, AdapterSection] = {
    "locon, stabilized": LoconAdapter(rank=4, conv_rank=3, alpha=2, rank_stabilized=True),
    "dora, stabilized": DoraAdapter(rank=4, alpha=2, rank_stabilized=True),
}


@pytest.mark.parametrize("case", PEFT)
def test_outputs_and_gradients_are_those_of_pefts_own_layers(case: str) -> None:
    ours, theirs = net((CONFIGS | STABILIZED)[case]), plain_net()
    peft.inject_adapter_in_model(PEFT[case](), theirs)
    with torch.no_grad():
        for name in ours.injected.parameters:
            length = ours.base["net.linear.weight"].norm(dim=1) if "magnitude" in name else 0.0
            theirs.get_parameter(name).copy_(ours.model.get_parameter(name) + length)
    results = [model["net"](*net_inputs()) for model in (ours.model, theirs)]
    assert all(relative(found, expected) <= 1e-5 for found, expected in zip(*results, strict=True))
    for result in results:
        sum(output.square().sum() for output in result).backward()
    for name in ours.injected.parameters:
        assert relative(ours.model.get_parameter(name).grad, theirs.get_parameter(name).grad) <= 1e-5, name


@pytest.mark.parametrize("case", ["diag-oft", "boft", "boft, 2 stages"])
@pytest.mark.parametrize("size", [1e-3, 0.1, 3.0])
def test_rotations_are_orthogonal_however_far_they_turn(case: str, size: float) -> None:
    adapted = net(CONFIGS[case], lambda name, shape: size * torch.randn(*shape, generator=generator(name)))
    for layer in adapters.adapted_layers(adapted.model).values():
        outputs, _ = layer.get_base_layer().weight.flatten(1).shape
        with torch.no_grad():
            turn = layer.turn_rows(torch.eye(outputs), cayley_excess(layer.oft_blocks[adapters.ADAPTER]))
        assert float((turn @ turn.T - torch.eye(outputs)).abs().max()) <= 1e-5


def test_boft_lets_every_output_reach_every_other() -> None:
    layer = Boft(nn.Linear(4, 96, bias=False), (4, 8, 12, 12))
    with torch.no_grad():
        turn = layer.turn_rows(torch.eye(96), cayley_excess(moved("oft_blocks", (4, 8, 12, 12))))
    assert float(turn.abs().min()) > 0


@pytest.mark.parametrize("cfg", [DiagOftAdapter(block_size=16), BoftAdapter(block_size=16)])
def test_a_rotation_in_bf16_keeps_the_length_of_outputs(cfg: AdapterSection) -> None:
    """Rounded to bf16 as a whole, such matrices would make them longer by 1e-3."""
    adapted = net(cfg, lambda name, shape: 0.005 * torch.randn(*shape, generator=generator(name)), torch.bfloat16)
    layer = adapted.model["net"].linear.to(torch.bfloat16)
    layer.base_layer.bias = None
    x = torch.randn(500, 48, generator=generator("x")).bfloat16()
    with torch.no_grad():
        turned, plain = layer(x).float(), layer.base_layer(x).float()
    assert relative(turned, plain) > 0.03
    assert float(turned.norm() / plain.norm()) == pytest.approx(1, abs=2e-4)


@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
def test_the_row_lengths_of_dora_are_exact_without_building_the_weight(size: float) -> None:
    numbers = generator("rows")
    base, down, up = (torch.randn(*shape, generator=numbers) for shape in ((256, 512), (16, 512), (256, 16)))
    up *= size / 16
    lengths = RowLengths(256)
    nn.init.zeros_(lengths.weight)
    turned = (base.double() + 0.5 * up.double() @ down.double()).norm(dim=1)
    expected = base.double().norm(dim=1) / turned - 1
    layer = nn.Linear(512, 256, bias=False)
    layer.weight = nn.Parameter(base)
    found = lengths(layer, down, up, 0.5).detach().double()
    assert float((found - expected).abs().max()) <= 1e-6 * max(float(expected.abs().max()), 1e-2)


@cases
@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0)])
def test_a_layer_takes_no_rows_at_all_as_of_images_where_a_batch_has_none(case: str, shape: tuple[int, ...]) -> None:
    adapted = net(CONFIGS[case])
    x = torch.zeros(*shape, net_inputs()[0].shape[-1], requires_grad=True)
    found = adapted.model["net"].linear(x)
    assert found.shape == adapted.model["net"].linear.base_layer(x).shape
    found.sum().backward()
    assert x.grad is not None
    gradients = [adapted.model.get_parameter(name).grad for name in adapted.injected.parameters]
    assert not any(gradient.any() for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("case", WITH_DROPOUT)
def test_dropout_acts_on_the_adapters_input_only(case: str) -> None:
    cfg = CONFIGS[case].model_copy(update={"dropout": 0.5})
    start = net(cfg, started)
    set_samples(start, (1, 2))
    found, expected = (model["net"](*net_inputs()) for model in (start.model, plain_net()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # nothing is added yet
    adapted = net(cfg)
    first, again, other = (linear_output(adapted, samples) for samples in ((1, 2), (1, 2), (3, 4)))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    adapted.model.eval()
    assert torch.equal(linear_output(adapted, (1, 2)), net(CONFIGS[case]).model["net"].linear(net_inputs()[0]))


def set_samples(adapted: Adapted, samples: tuple[int, ...]) -> None:
    dropouts = adapters.dropouts(adapted.model)
    assert len(dropouts) == len(adapted.injected.layers)
    for dropout in dropouts:
        dropout.set_samples(0, samples)


def linear_output(adapted: Adapted, samples: tuple[int, ...]) -> Tensor:
    set_samples(adapted, samples)
    output: Tensor = adapted.model["net"].linear(net_inputs()[0])
    return output


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's tracer looks
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if "," in case else ()) for case in CONFIGS]
)
def test_compiled_and_recomputed_blocks_train_as_plain_ones(case: str) -> None:
    train = TrainConfig(checkpointing="full", compile=True, compile_backend="aot_eager", precision="fp32")
    plain, compiled = net(CONFIGS[case]), net(CONFIGS[case])
    parallelize(compiled.model, ShardSpec(("Net",)), train, ParallelConfig(), "none", None)
    inputs = net_inputs()
    for adapted in (plain, compiled):
        sum(output.square().sum() for output in adapted.model["net"](*inputs)).backward()
    for name in plain.injected.parameters:
        expected = plain.model.get_parameter(name).grad
        assert relative(compiled.model.get_parameter(name).grad, expected) <= 1e-6, name


@pytest.mark.parametrize("cfg", [LoraAdapter(), DoraAdapter(), LohaAdapter(), LohaAdapter(rank=64), LokrAdapter()])
def test_nothing_of_the_size_of_the_weight_is_kept_for_backward(cfg: AdapterSection) -> None:
    model = nn.ModuleDict({"net": Net()})
    model["net"].linear = nn.Linear(512, 512)
    layer = adapt(model, cfg.model_copy(update={"targets": ("linear",)}), NET_TARGETS).model["net"].linear
    weight = layer.get_base_layer().weight
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(1, 4, 512, requires_grad=True))
    own = [tensor.numel() for tensor in kept if tensor.data_ptr() != weight.data_ptr()]
    assert max(own) < weight.numel()


@pytest.mark.parametrize("case", ["lokr", "diag-oft", "boft"])
def test_an_item_gets_the_same_whatever_its_batch(case: str) -> None:
    """These reshape items and features together."""
    adapted = net(CONFIGS[case])
    tokens, pictures = net_inputs()
    with torch.no_grad():
        together = adapted.model["net"](tokens, pictures)
        alone = adapted.model["net"](tokens[1, 2], pictures[1:])
    assert torch.allclose(together[0][1, 2], alone[0], atol=1e-6)
    assert torch.allclose(together[1][1:], alone[1], atol=1e-6)
