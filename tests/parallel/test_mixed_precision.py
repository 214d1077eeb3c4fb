"""bf16 compute on fp32 masters means the same arithmetic with and without FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runs import Outcome, alone, difference, make_pictures, make_run, run_config, train
from trainer.train import Trainer

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
    changed = outcome(pictures, adapter, name, changes)
    assert changed.losses == plain.losses
    assert difference(changed.weights, plain.weights) == 0


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
