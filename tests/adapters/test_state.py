"""From trained parameters to `LayerAdapter` and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from tests.adapters.nets import BOTH, CONFIGS, Adapted, net
from trainer.adapters.layer import LayerAdapter
from trainer.adapters.state import TrainedAdapter, parameters_of
from trainer.config.sections import (
    AdapterSection,
    BoftAdapter,
    DiagOftAdapter,
    DoraAdapter,
    LoconAdapter,
    LohaAdapter,
    LokrAdapter,
    LoraAdapter,
)
from trainer.system.errors import InputError


def restored(adapted: Adapted, name: str, layer: LayerAdapter) -> dict[str, Tensor]:
    shapes = adapted.injected.parameters
    return parameters_of(name, layer, adapted.cfg, shapes, lambda name: adapted.base[f"{name}.weight"])


@pytest.mark.parametrize("case", CONFIGS)
def test_parameters_survive_the_way_to_tensors_and_back(case: str) -> None:
    adapted = net(CONFIGS[case])
    found: dict[str, Tensor] = {}
    for name, layer in adapted.trained().items():
        found |= restored(adapted, name, layer)
    parameters = dict(adapted.model.named_parameters())
    assert found.keys() == adapted.injected.parameters.keys()
    assert all(torch.allclose(tensor, parameters[name], rtol=0, atol=1e-6) for name, tensor in found.items())


@pytest.mark.parametrize("case", ["lora", "locon", "dora", "loha", "lokr", "lokr, both decomposed", "lokr, whole"])
def test_a_file_of_another_scale_gives_the_same_update(case: str) -> None:
    adapted = net(CONFIGS[case])
    for name, layer in adapted.trained().items():
        other = LayerAdapter(layer.kind, layer.tensors, 3 * layer.scale)
        weights = restored(adapted, name, other)
        again = TrainedAdapter(weights, adapted.cfg, lambda name: adapted.base[f"{name}.weight"])[name]
        assert torch.allclose(again.update(), other.update(), rtol=1e-5, atol=1e-6)


def test_the_magnitude_is_the_base_rows_length_plus_what_was_trained() -> None:
    adapted = net(CONFIGS["dora"])
    trained = adapted.model["net"].linear.lora_magnitude_vector["default"].weight
    expected = adapted.base["net.linear.weight"].norm(dim=1) + trained
    assert torch.equal(adapted.trained()["net.linear"].tensors["magnitude"], expected)


class Counted(Mapping[str, Tensor]):
    """Tensors of which each reading is noted."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def test_only_the_layer_that_is_asked_for_is_read() -> None:
    adapted = net(CONFIGS["locon"])
    weights = Counted(dict(adapted.model.named_parameters()))
    trained = TrainedAdapter(weights, adapted.cfg, lambda name: adapted.base[name])
    assert list(trained) == ["net.linear", "net.conv"]
    assert len(trained) == 2
    assert "net.conv" in trained
    assert "net.other" not in trained
    assert weights.read == []
    assert trained["net.conv"].tensors.keys() == {"down", "up"}
    assert weights.read == ["net.conv.lora_A.default.weight", "net.conv.lora_B.default.weight"]
    with pytest.raises(KeyError):
        trained["net.other"]


@pytest.mark.parametrize(
    ("run", "file", "layer", "text"),
    [
        (
            LoraAdapter(rank=4),
            LoraAdapter(rank=8),
            "linear",
            "adapter.start: 'net.linear' has down 8 x 48, up 96 x 8 in the file, but "
            "down 4 x 48, up 96 x 4 in this run; set adapter.rank: 8, or adapter.rank_pattern for this layer",
        ),
        (
            LoconAdapter(rank=4, conv_rank=4),
            LoconAdapter(rank=4, conv_rank=2),
            "conv",
            "adapter.start: 'net.conv' has down 2 x 24 x 3 x 3, up 32 x 2 x 1 x 1 in the file, but "
            "down 4 x 24 x 3 x 3, up 32 x 4 x 1 x 1 in this run; set adapter.conv_rank: 2",
        ),
        (
            DoraAdapter(rank=4),
            LoraAdapter(rank=4),
            "linear",
            "adapter.start: 'net.linear' is lora in the file, but adapter.type is dora; set adapter.type: lora",
        ),
        (
            LohaAdapter(rank=4),
            LohaAdapter(rank=2),
            "linear",
            "adapter.start: 'net.linear' has w1_a 96 x 2, w1_b 2 x 48, w2_a 96 x 2, w2_b 2 x 48 in the file, but "
            "w1_a 96 x 4, w1_b 4 x 48, w2_a 96 x 4, w2_b 4 x 48 in this run; "
            "set adapter.rank: 2, or adapter.rank_pattern for this layer",
        ),
        (
            LokrAdapter(rank=2),
            LokrAdapter(rank=2, factor=4),
            "linear",
            "adapter.start: 'net.linear' has w1 4 x 4, w2_a 24 x 2, w2_b 2 x 12 in the file, but "
            "w1 8 x 6, w2_a 12 x 2, w2_b 2 x 8 in this run; set adapter.factor: 4, adapter.rank: 2",
        ),
        (
            LokrAdapter(rank=2),
            LokrAdapter(full_matrix=True),
            "linear",
            "adapter.start: 'net.linear' has w1 8 x 6, w2 12 x 8 in the file, but "
            "w1 8 x 6, w2_a 12 x 2, w2_b 2 x 8 in this run; set adapter.factor: 8, adapter.full_matrix: true",
        ),
        (
            LokrAdapter(rank=2),
            LokrAdapter(rank=2, decompose_both=True),
            "linear",
            "adapter.start: 'net.linear' has w1_a 8 x 2, w1_b 2 x 6, w2_a 12 x 2, w2_b 2 x 8 in the file, but "
            "w1 8 x 6, w2_a 12 x 2, w2_b 2 x 8 in this run; "
            "set adapter.factor: 8, adapter.rank: 2, adapter.decompose_both: true",
        ),
        (
            DiagOftAdapter(block_size=8),
            DiagOftAdapter(block_size=4),
            "linear",
            "adapter.start: 'net.linear' has blocks 24 x 4 x 4 in the file, but blocks 12 x 8 x 8 in this run; "
            "set adapter.block_size: 4",
        ),
        (
            BoftAdapter(),
            BoftAdapter(block_size=6, num_stages=2),
            "linear",
            "adapter.start: 'net.linear' has blocks 2 x 16 x 6 x 6 in the file, but "
            "blocks 4 x 8 x 12 x 12 in this run; set adapter.block_size: 6 and adapter.num_stages: 2",
        ),
    ],
    ids=lambda value: value.type if isinstance(value, AdapterSection) else "",
)
def test_a_file_that_does_not_fit_says_what_to_set(
    run: AdapterSection, file: AdapterSection, layer: str, text: str
) -> None:
    name = f"net.{layer}"
    with pytest.raises(InputError) as caught:
        restored(net(run), name, net(file).trained()[name])
    assert str(caught.value) == text


def test_a_file_of_another_model_is_refused() -> None:
    tensors = {"down": torch.zeros(4, 40), "up": torch.zeros(96, 4)}
    with pytest.raises(InputError) as caught:
        restored(net(LoraAdapter(rank=4)), "net.linear", LayerAdapter("lora", tensors))
    assert str(caught.value) == (
        "adapter.start: 'net.linear' has down 4 x 40, up 96 x 4 in the file, but down 4 x 48, up 96 x 4 in this run; "
        "the file belongs to another model"
    )


def test_a_layer_that_the_run_does_not_change_is_refused() -> None:
    adapted = net(LoconAdapter(rank=4, targets=BOTH[:1]))
    with pytest.raises(InputError) as caught:
        restored(adapted, "net.conv", net(LoconAdapter(rank=4)).trained()["net.conv"])
    assert str(caught.value) == (
        "adapter.start: 'net.conv' has an adapter in the file only; name it in adapter.targets"
    )
