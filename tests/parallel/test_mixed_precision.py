"""bf16 compute on fp32 masters means the same arithmetic with and without FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.distributed import run_ranks
from tests.models.common import batch_of, load, make, model_of
from tests.pairs.array import covering
from tests.runs import Outcome, alone, difference, graphs_of, make_pictures, make_run, run_config, train
from trainer.adapters.lora import LoraLinear
from trainer.config.schema import RunConfig
from trainer.config.sections import ParallelConfig, TrainConfig
from trainer.distributed.world import World
from trainer.parallel.parallelize import parallelize
from trainer.rng import SampleRng
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

BF16 = {"train__precision": "bf16", "train__steps": 3, "parallel__strategy": "none"}
COMPILED = {"train__compile": True, "train__compile_backend": "aot_eager"}
# torch's tracer looks at the gradients of its inputs.
COMPILER = (pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"))
CHECKPOINTED = {"train__checkpointing": "full"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("bf16") / "pictures", 4)


@pytest.fixture(scope="module", params=["lora", "none"])
def adapter(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def plain(pictures: Path, adapter: str) -> Outcome:
    return outcome(pictures, adapter, "plain", {})


def outcome(pictures: Path, adapter: str, name: str, changes: dict[str, Any]) -> Outcome:
    """A run in bf16 on one rank."""
    cfg = run_config(pictures, adapter__type=adapter, **(BF16 | changes))
    return train(alone(), cfg, make_run(pictures.parent, cfg, f"{name}-{adapter}"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sharded", {"parallel__strategy": "full"}),
        ("checkpointed", CHECKPOINTED),
        pytest.param("compiled", COMPILED, marks=COMPILER),
        pytest.param("compiled-checkpointed", COMPILED | CHECKPOINTED, marks=COMPILER),
    ],
)
def test_bf16_is_bit_for_bit_the_same_run(
    pictures: Path, adapter: str, plain: Outcome, name: str, changes: dict[str, Any]
) -> None:
    changed, expected = outcome(pictures, adapter, name, changes), plain
    if "train__compile" in changes:  # where a compiled LoRA is a plain sum, which rounds once more than one in place
        with mock.patch.object(LoraLinear, "adds_in_place", False):
            expected = outcome(pictures, adapter, f"apart-{name}", {})
    assert changed.losses == expected.losses
    assert difference(changed.weights, expected.weights) == 0


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"adapter__type": "dora"},
    "lokr": {"adapter": {"type": "lokr", "rank": 2, "factor": 4}},
    "boft": {"adapter": {"type": "boft", "block_size": 4}},
    "dropout": {"adapter__dropout": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision", "checkpointing", "base", "kind"),
    covering(("none", "full"), ("bf16", "fp32"), ("none", "selective", "full"), ("none", "nf4"), ADAPTERS),
)
def test_every_class_of_blocks_is_compiled_without_a_break(
    pictures: Path, strategy: str, precision: str, checkpointing: str, base: str, kind: str
) -> None:
    changes = {"train__precision": precision, "train__checkpointing": checkpointing, "parallel__strategy": strategy}
    cfg = run_config(pictures, **COMPILED, **changes, **ADAPTERS[kind], quantize__format=base, data__max_aspect=1)
    run = make_run(pictures.parent, cfg, f"graphs-{strategy}-{precision}-{checkpointing}-{base}-{kind}")
    ((first, *_, graphs), breaks) = run_ranks(1, graphs_of, cfg, run, 3)[0]
    assert breaks == {}
    # FLUX.2 has two classes, and the input of the first block needs no gradient.
    assert 2 <= graphs <= 3
    assert graphs == first, "other seeds of dropout are no reason to compile anew"


def compiled_steps(world: World, cfg: RunConfig, run: RunDir) -> tuple[int, dict[str, int]]:
    """Train and evaluate. Returns the number of graphs and the breaks; raises where torch would not compile more."""
    torch._dynamo.reset()
    counters.clear()
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for _ in range(4):
                trainer.train_step()
            trainer.validate()
    finally:
        trainer.close()
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.slow
def test_more_shapes_of_images_make_no_more_graphs(tmp_path: Path) -> None:
    """The second shape makes a graph for any other: the buckets after it compile nothing."""
    counts = []
    for number in (4, 7):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        for i in range(number):
            Image.new("RGB", (64 + 16 * i, 64)).save(folder / f"{i}.png")
        shapes = {"data__max_aspect": 3, "data__missing_caption": "empty", "train__batch_size": 1}
        cfg = run_config(folder, **COMPILED, **shapes)
        graphs, breaks = run_ranks(1, graphs_of, cfg, make_run(tmp_path, cfg, f"buckets-{number}"), 2 * number)[0]
        assert breaks == {}
        counts.append(graphs[-1])
    assert counts == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_blocks_of_sdxl_are_all_compiled(pictures: Path, checkpointing: str) -> None:
    """Its classes of blocks come in many shapes, more than torch's own limit of 8 graphs."""
    changes = {"train__checkpointing": checkpointing, "model__family": "sdxl", "data__validation": 2}
    cfg = run_config(pictures, **(BF16 | COMPILED | changes))
    run = make_run(pictures.parent, cfg, f"sdxl-{checkpointing}")
    graphs, breaks = run_ranks(1, compiled_steps, cfg, run)[0]
    assert breaks == {}
    assert graphs > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        {"family": "ernie_image"},
        {"family": "flux1"},
        {"family": "ideogram4"},
        {"family": "krea2"},
        {"family": "qwen_image"},
        {"family": "qwen_image_21"},
        {"family": "sd3"},
        {"family": "sdxl", "train": {"unet": "full", "text_encoder": "full", "text_encoder_2": "full"}},
    ],
    ids=lambda model: model["family"],
)
def test_full_fine_tuning_in_bf16_is_bit_for_bit_the_same_with_frozen_parameters_and_inputs_of_many_blocks(
    pictures: Path, model: dict[str, Any]
) -> None:
    one, sharded = (
        outcome(pictures, "none", f"{model['family']}-{strategy}", {"model": model, "parallel__strategy": strategy})
        for strategy in ("none", "full")
    )
    assert sharded.grad_norms == one.grad_norms
    assert difference(sharded.weights, one.weights) == 0


def test_a_lora_in_bf16_is_bit_for_bit_the_same_where_all_that_it_trains_is_one_group(pictures: Path) -> None:
    changes = {"model__family": "sdxl", "train__steps": 2}
    one, grouped = (
        outcome(pictures, "lora", f"grouped-{strategy}", changes | {"parallel__strategy": strategy})
        for strategy in ("none", "ddp")
    )
    assert grouped.grad_norms == one.grad_norms
    assert difference(grouped.weights, one.weights) == 0


def test_layers_compute_in_bf16_while_masters_and_gradients_stay_fp32(pictures: Path, adapter: str) -> None:
    cfg = run_config(pictures, adapter__type=adapter, **BF16)
    trainer = Trainer(
        cfg, make_run(pictures.parent, cfg, f"types-{adapter}"), alone(), pictures.parent / "cache", print
    )
    seen: set[tuple[torch.dtype, torch.dtype]] = set()
    for module in trainer.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda layer, inputs: seen.add((inputs[0].dtype, layer.weight.dtype)))
    before = trainer.trained_weights()
    gradients: set[torch.dtype] = set()
    for parameter in trainer.parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: gradients.add(p.grad.dtype))
    trainer.train_step()
    trainer.close()
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    assert gradients == {torch.float32}
    assert {parameter.dtype for parameter in trainer.parameters} == {torch.float32}
    assert difference(trainer.trained_weights(), before) > 0


@pytest.mark.parametrize(
    ("family", "embedding"),
    [
        pytest.param("ernie_image", "time_proj", marks=pytest.mark.slow),
        pytest.param("sd3", "time_text_embed.time_proj", marks=pytest.mark.slow),
        pytest.param("sdxl", "time_proj", marks=pytest.mark.slow),
        pytest.param("ideogram4", "t_embedding", marks=pytest.mark.slow),
        pytest.param("krea2", "time_embed", marks=pytest.mark.slow),
        pytest.param("z_image", "t_embedder", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("strategy", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_models_that_embed_their_timestep_in_fp32_see_in_bf16_the_one_that_was_drawn(
    pictures: Path, family: str, embedding: str, strategy: str
) -> None:
    def seen(name: str, **changes: Any) -> list[float]:
        """The timesteps of one training step and of a sample."""
        drawn = {"sample__prompts": ["a fox"], "sample__size": (32, 32), "sample__steps": 3, "sample__guidance": 1}
        cfg = run_config(pictures, model__family=family, **drawn, **changes)
        run = make_run(pictures.parent, cfg, f"{family}-{strategy}-{name}")
        trainer = Trainer(cfg, run, alone(), pictures.parent / "cache", lambda event: None)
        timesteps: list[float] = []
        denoiser = trainer.model[trainer.family.components[0]]
        denoiser.get_submodule(embedding).register_forward_pre_hook(
            lambda module, inputs: timesteps.extend(inputs[0].tolist())
        )
        trainer.train_step()
        trainer.generate_samples()
        trainer.close()
        return timesteps

    exact = seen("exact", parallel__strategy="none")
    assert len(exact) == 4 + 3
    assert torch.tensor(exact).bfloat16().tolist() != exact
    assert seen("bf16", **(BF16 | {"parallel__strategy": strategy})) == exact


@pytest.mark.parametrize(
    ("name", "latents"), [("flux1", (4, 2, 528)), ("flux2", (16, 1, 264)), ("flux3", (16, 1, 264))]
)
def test_positions_of_an_image_of_more_than_256_tokens_a_side_are_not_rounded(
    tmp_path: Path, name: str, latents: tuple[int, ...]
) -> None:
    family = make(name, tmp_path)
    model = model_of(family)
    example = {"latents": torch.zeros(latents), **family.encode_text(family.text_encoder(load), "a fox")}
    if family.reads_references:
        example["reference_0"] = torch.zeros(latents)
    seen: list[Tensor] = []
    model["transformer"].pos_embed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    family.loss(model, batch_of(family, [example]), SampleRng(0, [0]))
    exact = [ids.double() for ids in seen]
    seen.clear()
    bf16 = TrainConfig(precision="bf16")
    parallelize(model["transformer"], family.shard, bf16, ParallelConfig(), "none", None)
    family.loss(model, batch_of(family, [example]), SampleRng(0, [0]))
    assert max(ids.max() for ids in exact) > 128
    assert [ids.double().tolist() for ids in seen] == [ids.tolist() for ids in exact]
