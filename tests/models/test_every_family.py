"""What every family keeps to, whichever model it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.distributed.pool import run_ranks
from tests.models.common import IMAGES, batch_of, examples, load, make, model_of, picture, refusal
from tests.runs import make_pictures, make_run, run_config, train
from trainer.config.sections import ModelOptions, ObjectiveConfig
from trainer.distributed.world import World
from trainer.export.export import export
from trainer.models import families
from trainer.models.base import FLOW_FIELDS
from trainer.models.build import encoder_loader
from trainer.models.objectives import flow_matching
from trainer.models.objectives.base import Batch, Example
from trainer.models.objectives.flow_matching import Shift, draw_sigma
from trainer.models.objectives.kinds import fields_of
from trainer.parallel.fsdp_rules import weight_problems
from trainer.parallel.parallelize import blocks_of
from trainer.rng import SampleRng
from trainer.weights.files import stored_tensors

NAMES = families.names()
OBJECTIVE: dict[str, Any] = {
    "density": "uniform",
    "logit_mean": 0.5,
    "logit_std": 2.0,
    "mode_scale": 1.0,
    "shift": "none",
    "shift_factor": 2.0,
    "prediction": "epsilon",
    "zero_terminal_snr": "on",
    "min_snr_gamma": 5.0,
    "guidance": 3.5,
    "mse_weight": 2.0,
    "text_weight": 2.0,
    "router_weight": 0.01,
    "token_weight": "sqrt",
    "dpo_beta": 0.1,
}
OPTIONS: dict[str, Any] = {
    "architecture": "huge",
    "text_layers": (1,),
    "max_tokens": 16,
    "text_windows": 2,
    "without": ("text_encoder",),
    "blocks": "Block",
    "attention": "eager",
    "new_tokens": ("<tool>",),
    "distilled": True,
}
"""Every field, with a value that is not its default."""


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest, cache: Path) -> Any:
    return make(request.param, cache)


@pytest.fixture(scope="module", params=IMAGES)
def image_family(request: pytest.FixtureRequest, cache: Path) -> Any:
    """One that draws."""
    return make(request.param, cache)


def test_live_components_are_built_on_the_meta_device_with_the_names_of_their_files(family: Any) -> None:
    for component in family.live:
        model = family.build(component)
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert set(family.weights(component).entries) == set(stored_tensors(model))


def test_adapter_targets_of_a_component_are_linear_layers_and_none_is_named_in_vain(family: Any) -> None:
    for component, patterns in family.adapter_targets.items():
        modules = dict(family.build(component).named_modules())
        for pattern in patterns:
            matched = {name for name in modules if re.fullmatch(pattern, name)}
            assert {type(modules[name]) for name in matched} <= {nn.Linear}
    assert family.adapter_targets.keys() <= set(family.components)


def test_blocks_that_are_sharded_one_by_one_are_part_of_a_component(family: Any) -> None:
    found = {type(m).__name__ for component in family.components for m in family.build(component).modules()}
    assert found >= set(family.shard.blocks)


def test_the_layout_names_every_tensor_of_the_denoiser_once(image_family: Any) -> None:
    layout = image_family.layout(image_family.components[0])
    if image_family.is_concluded:
        assert layout == ()  # no names but diffusers' are known
        return
    parts = [part for tensor in layout for part in tensor.parts]
    assert sorted(parts) == sorted(image_family.build(image_family.components[0]).state_dict())
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
    torch.testing.assert_close(padded.total, torch.stack(alone).sum(), atol=1e-5, rtol=1e-6)
    weights = [float(loss([item], [1.0], [index]).weight) for index, item in enumerate(items)]
    assert padded.weight.item() == sum(weights) >= 2


def test_fsdp2_can_follow_every_call_of_the_model_in_training(family: Any) -> None:
    train = {name: "full" for name in family.trained_names()}
    model_config = family.config.model_copy(update={"train": train})
    whole = type(family)(model_config, ObjectiveConfig(), family.cache)
    model = model_of(whole).requires_grad_(True)
    batch = batch_of(whole, examples(whole, 1))
    for component in model.values():
        units = blocks_of(component, whole.shard.blocks)
        assert units
        assert weight_problems(component, units, lambda: whole.loss(model, batch, SampleRng(0, [0]))) == []


def test_a_token_has_as_many_pixels_a_side_as_the_family_says(
    image_family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown of a config's shift (`trainer.data.timesteps`) rests on it."""
    seen: list[int] = []

    def draw(objective: ObjectiveConfig, shift: Shift, num_tokens: int, rng: SampleRng) -> torch.Tensor:
        seen.append(num_tokens)
        return draw_sigma(objective, shift, num_tokens, rng)

    monkeypatch.setattr(flow_matching, "draw_sigma", draw)
    image_family.loss(model_of(image_family), batch_of(image_family, examples(image_family, 1)), SampleRng(0, [0]))
    side = image_family.token_side or image_family.size_multiple
    num_tokens = (64 // side) * (32 // side)
    assert seen == [num_tokens] * (image_family.objective_fields >= FLOW_FIELDS)


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


def test_a_mask_weights_the_errors_of_its_pixels(image_family: Any) -> None:
    batch, model, rng = batch_of(image_family, examples(image_family, 1)), model_of(image_family), SampleRng(0, [0])
    whole = image_family.loss(model, batch, rng).total
    height, width = batch["latents"].shape[-2:]
    halves = [torch.zeros(1, height, width), torch.zeros(1, height, width)]
    halves[0][:, :1], halves[1][:, 1:] = 1, 1
    parts = [image_family.loss(model, {**batch, "mask": half}, rng).total for half in halves]
    torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=0)
    assert min(parts) > 0


def test_examples_of_equal_size_share_a_batch_and_others_do_not(image_family: Any) -> None:
    vae, text = image_family.image_encoder(load), image_family.text_encoder(load)
    words = image_family.encode_text(text, "a fox")
    square, same, wide = (
        image_family.batch_key({**image_family.encode_image(vae, picture(*size, seed)), **words})
        for seed, size in enumerate([(64, 64), (64, 64), (64, 32)])
    )
    assert square == same != wide


def test_a_text_is_cut_where_its_encoder_stops_reading(image_family: Any) -> None:
    encoder = image_family.text_encoder(load)
    text = "1" * 400  # a token each
    whole = image_family.text_lengths([text])[0][-1]
    num_read = len(text) - len(whole.rest)
    texts = [text, text[:num_read], text[: num_read - 1]]
    states, same, less = (image_family.encode_text(encoder, text) for text in texts)
    assert all(states[key].equal(same[key]) for key in states)
    assert not all(states[key].equal(less[key]) for key in states)
    full, short = (lengths[-1] for lengths in image_family.text_lengths(texts[1:]))
    assert (whole.needed - full.needed, full.needed - short.needed) == (len(text) - num_read, 1)
    assert (whole.is_cut, full.rest, short.rest) == (True, "", "")


def test_an_adapter_file_is_loaded_into_the_denoiser_through_diffusers(image_family: Any, tmp_path: Path) -> None:
    component = image_family.components[0]
    model = model_of(image_family)
    linear = {name: module for name, module in model[component].named_modules() if isinstance(module, nn.Linear)}
    name = next(name for name in linear if re.fullmatch(image_family.adapter_targets[component][0], name))
    factors = {"A": torch.ones(2, linear[name].in_features), "B": torch.ones(linear[name].out_features, 2)}
    file = tmp_path / "adapter.safetensors"
    save_file({f"{component}.{name}.lora_{factor}.weight": tensor for factor, tensor in factors.items()}, file)
    image_family.load_adapter_file(model, file)
    loaded = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    assert {n.split(".lora_")[0] for n in loaded} == {f"{component}.{name}"}
    assert [tensor.sum().item() for tensor in loaded.values()] == [tensor.sum() for tensor in factors.values()]


def test_text_encoders_sharded_over_two_ranks_give_the_same_embeddings(image_family: Any, cache: Path) -> None:
    alone = image_family.encode_text(image_family.text_encoder(load), "a red fox")
    for sharded in run_ranks(2, encode_sharded, image_family.config.family, cache):
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


@pytest.mark.parametrize(
    "image_family",
    [
        "flux2",
        "sdxl",
        *(pytest.param(name, marks=pytest.mark.slow) for name in IMAGES if name not in ("flux2", "sdxl")),
    ],
    indirect=True,
)
def test_a_run_on_two_ranks_trains_samples_and_exports_every_layer_of_the_default_targets(
    image_family: Any, tmp_path: Path
) -> None:
    cfg = run_config(
        make_pictures(tmp_path / "pictures", 3),
        model__family=image_family.config.family,
        optim__lr=1e-2,
        train__steps=2,
        train__batch_size=2,
        train__precision="bf16",
        parallel__devices=2,
        parallel__strategy="full",
        sample__every=2,
        sample__prompts=["a fox"],
        sample__size=[32, 32],
        sample__steps=2,
    )
    run = make_run(tmp_path, cfg, "run")
    ours, theirs = run_ranks(2, train, cfg, run)
    assert ours.losses == theirs.losses
    assert ours.local_bytes < 0.6 * ours.full_bytes
    assert len(list(run.samples.glob("*.png"))) == 2
    component = image_family.components[0]
    layers = {
        name.rpartition(".")[0]
        for name in image_family.build(component).state_dict()
        if any(re.fullmatch(rf"{pattern}\.weight", name) for pattern in image_family.adapter_targets[component])
        if not any(re.fullmatch(pattern, name) for pattern in image_family.never_trained)
    }
    exported = load_file(export(cfg, run, tmp_path / "cache")[0].path)
    assert len({name.partition(".lora_")[0] for name in exported if ".lora_" in name}) == len(layers)


def test_what_a_family_does_not_read_is_refused(family: Any, cache: Path) -> None:
    name, used = family.config.family, "is not used by this kind of model; leave it out. It reads "
    assert OBJECTIVE.keys() == ObjectiveConfig.model_fields.keys()
    assert OPTIONS.keys() == ModelOptions.model_fields.keys()
    for field in OBJECTIVE.keys() - fields_of(type(family)):
        message = refusal(name, cache, objective=ObjectiveConfig(**{field: OBJECTIVE[field]}))
        assert message.startswith(f"objective.{field}: {used}{'objective.' if fields_of(type(family)) else 'nothing'}")
    for field in OPTIONS.keys() - family.options_read:
        message = refusal(name, cache, **{field: OPTIONS[field]})
        assert message.startswith(f"model.options.{field}: {used}model.options.architecture")
