"""What every family keeps to, whichever model it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.distributed.pool import run_ranks
from tests.families.common import batch_of, examples, load, make, model_of, picture, refusal
from tests.runs import run_config
from trainer import families
from trainer.modules import encoder_loader
from trainer.objectives import Batch, Example
from trainer.rng import SampleRng
from trainer.world import World

NAMES = families.names()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest, cache: Path) -> Any:
    return make(request.param, cache)


def test_live_components_are_built_on_the_meta_device_with_the_names_of_their_files(family: Any) -> None:
    for component in family.live:
        model = family.build(component)
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert set(family.weights(component).entries) == set(model.state_dict())


def test_adapter_targets_of_a_component_are_linear_layers_and_none_is_named_in_vain(family: Any) -> None:
    for component, patterns in family.adapter_targets.items():
        modules = dict(family.build(component).named_modules())
        for pattern in patterns:
            matched = {name for name in modules if re.fullmatch(pattern, name)}
            assert {type(modules[name]) for name in matched} <= {nn.Linear}
    assert family.adapter_targets.keys() <= set(family.components)


def test_blocks_that_are_sharded_one_by_one_are_part_of_a_component(family: Any) -> None:
    found = {type(m).__name__ for component in family.components for m in family.build(component).modules()}
    assert found >= set(family.shard_blocks)


def test_the_layout_names_every_tensor_of_the_denoiser_once(family: Any) -> None:
    layout = family.layout(family.components[0])
    if not layout:
        pytest.skip("no original layout")
    parts = [part for tensor in layout for part in tensor.parts]
    assert sorted(parts) == sorted(family.build(family.components[0]).state_dict())
    assert len({tensor.name for tensor in layout}) == len(layout)


def test_a_tiny_denoiser_has_less_than_half_a_million_parameters(family: Any) -> None:
    assert sum(p.numel() for p in family.build(family.components[0]).parameters()) < 500_000


def test_tiny_weights_are_the_same_in_every_cache(family: Any, tmp_path: Path) -> None:
    files = sorted(path.relative_to(family.folder) for path in family.folder.rglob("*.safetensors"))
    other = make(family.config.family, tmp_path).folder
    assert other.name == family.folder.name
    assert all((other / file).read_bytes() == (family.folder / file).read_bytes() for file in files)


def test_loss_of_a_batch_is_the_sum_of_its_items_losses_and_padding_counts_nothing(family: Any) -> None:
    items, model = examples(family, 2), model_of(family)

    def loss(items: list[Any], weight: list[float], indices: list[int]) -> Any:
        batch: Batch = {**family.collate(items), "weight": torch.tensor(weight)}
        return family.loss(model, batch, SampleRng(0, indices))

    alone = [loss([item], [1.0], [index]).total for index, item in enumerate(items)]
    padded = loss([*items, items[0]], [1.0, 1.0, 0.0], [0, 1, 0])
    torch.testing.assert_close(padded.total, torch.stack(alone).sum(), atol=1e-5, rtol=0)
    assert padded.weight.item() == 2


def test_a_few_steps_on_one_batch_lower_the_loss(family: Any) -> None:
    model = model_of(family).requires_grad_(True)
    batch, rng = batch_of(family, examples(family, 2)), SampleRng(0, [0, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = family.loss(model, batch, rng)
        losses.append(loss.total.item())
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
    assert losses[-1] < losses[0]


def test_examples_of_equal_size_share_a_batch_and_others_do_not(family: Any) -> None:
    vae, text = family.image_encoder(load), family.text_encoder(load)
    words = family.encode_text(text, "a fox")
    square, same, wide = (
        family.batch_key({**family.encode_image(vae, picture(*size, seed)), **words})
        for seed, size in enumerate([(64, 64), (64, 64), (64, 32)])
    )
    assert square == same != wide


def test_an_adapter_file_is_loaded_into_the_denoiser_through_diffusers(family: Any, tmp_path: Path) -> None:
    component = family.components[0]
    model = model_of(family)
    linear = {name: module for name, module in model[component].named_modules() if isinstance(module, nn.Linear)}
    name = next(name for name in linear if re.fullmatch(family.adapter_targets[component][0], name))
    factors = {"A": torch.ones(2, linear[name].in_features), "B": torch.ones(linear[name].out_features, 2)}
    file = tmp_path / "adapter.safetensors"
    save_file({f"{component}.{name}.lora_{factor}.weight": tensor for factor, tensor in factors.items()}, file)
    family.load_adapter_file(model, file)
    loaded = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    assert {n.split(".lora_")[0] for n in loaded} == {f"{component}.{name}"}
    assert [tensor.sum().item() for tensor in loaded.values()] == [tensor.sum() for tensor in factors.values()]


def test_text_encoders_sharded_over_two_ranks_give_the_same_embeddings(family: Any, cache: Path) -> None:
    alone = family.encode_text(family.text_encoder(load), "a red fox")
    for sharded in run_ranks(2, encode_sharded, family.config.family, cache):
        assert sharded.keys() == alone.keys()
        for key, tensor in alone.items():
            torch.testing.assert_close(sharded[key], tensor, atol=1e-5, rtol=0)


def encode_sharded(world: World, name: str, cache: Path) -> Example:
    family = make(name, cache)
    encoder = family.text_encoder(encoder_loader(run_config(cache, model__family=name), world))
    with torch.no_grad():
        return family.encode_text(encoder, "a red fox")


def test_an_unknown_architecture_is_refused(family: Any, cache: Path) -> None:
    assert refusal(family.config.family, cache, architecture="huge").startswith(
        "model.options.architecture: 'huge' is not one of "
    )
