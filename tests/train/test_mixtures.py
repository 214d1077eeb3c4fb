"""Runs of mixtures on a quantized base: the experts of a layer, which are one tensor, become bytes as layers do."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.benchmarks.architectures import write_model
from tests.distributed import run_ranks
from tests.distributed.test_quantized import load_unlike
from tests.runs import (
    Outcome,
    alone,
    difference,
    make_run,
    make_text,
    text_config,
    train,
)
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.export.export import export
from trainer.models import families
from trainer.models.build import build_model, load_model
from trainer.parallel import load
from trainer.run.drawings import DrawingRequest, check_request
from trainer.run.folder import RunDir
from trainer.train.draw import draw, on_one_device
from trainer.weights.quantization import FORMATS, quantized_layers
from trainer.weights.quantized_experts import quantized_experts

KINDS = ["mixtral", "gpt_oss"]
"""Their weights have the rows of outputs, and of inputs."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixtures")
    make_text(root / "text")
    for kind in KINDS:
        write_model(kind, root / kind)
    return root


def config(root: Path, kind: str = "mixtral", **changes: Any) -> RunConfig:
    # Where a gradient is nearly 0, AdamW with its usual eps makes a step of the sign that rounding gives it.
    base = {"model__path": str(root / kind), "quantize__format": "nf4", "train__steps": 3, "optim__eps": 1e-4}
    return text_config(root / "text", **base | changes)


def trained(root: Path, name: str, kind: str = "mixtral", ranks: int = 1, **changes: Any) -> Outcome:
    strategy = "none" if ranks == 1 else "full"
    cfg = config(root, kind, parallel__devices=ranks, parallel__strategy=strategy, **changes)
    return run_ranks(ranks, train, cfg, make_run(root, cfg, name))[0]


def stored(root: Path, **changes: Any) -> dict[str, str]:
    """{module of experts: its format} of those that are bytes."""
    cfg = config(root, **changes)
    model = build_model(cfg, families.make(cfg, root / "cache")).module
    return {name: experts.format.name for name, experts in quantized_experts(model).items()}


def write_decoded(root: Path, kind: str, format: str) -> Path:
    """A model that holds the weights which the bytes of another stand for."""
    cfg, coding = config(root, kind, quantize__format=format), FORMATS[format]
    built = build_model(cfg, families.make(cfg, root / "cache")).module
    prefix = "language_model."
    names = [f"{name.removesuffix('.base_layer')}.weight" for name in quantized_layers(built)]
    names += [f"{name}.{weight}" for name, experts in quantized_experts(built).items() for weight in experts.shapes]
    model = AutoModelForCausalLM.from_pretrained(root / kind)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in names:
            weight = weights[name.removeprefix(prefix)]
            rows = weight.flatten(0, -2)
            records = coding.encode(rows)
            weight.copy_(coding.decode(records, rows.shape[1], torch.float32, coding.table()).view(weight.shape))
    folder = root / f"{kind}-{format}"
    model.save_pretrained(folder)
    for file in (root / kind).iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(("kind", "format"), [("mixtral", "nf4"), ("gpt_oss", "int8")])
def test_a_run_on_bytes_is_the_run_on_a_base_that_holds_the_decoded_weights(root: Path, kind: str, format: str) -> None:
    cfg = config(root, kind, quantize__format=format)
    found = train(alone(), cfg, make_run(root, cfg, f"bytes-{kind}"))
    plain = config(root, kind, quantize__format="none", model__path=str(write_decoded(root, kind, format)))
    expected = train(alone(), plain, make_run(root, plain, f"plain-{kind}"))
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert difference(found.weights, expected.weights) < 1e-6


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_ranks_train_what_one_trains_also_where_they_do_not_divide_the_experts(root: Path, kind: str) -> None:
    one = trained(root, f"{kind}-1", kind, train__batch_size=6)
    for ranks in (2, 3):
        found = trained(root, f"{kind}-{ranks}", kind, ranks, train__batch_size=6)
        assert found.losses == pytest.approx(one.losses, rel=1e-6)
        assert difference(found.weights, one.weights) < 1e-6
        assert found.local_bytes < 0.8 * one.local_bytes


@pytest.mark.slow
def test_bytes_that_are_kept_on_disk_give_the_same_run(root: Path) -> None:
    first, second = (trained(root, f"kept-{i}", ranks=2, quantize__cache=True) for i in range(2))
    (file,) = (root / "cache" / "base").glob("*.safetensors")
    assert any("experts.gate_up_proj_records" in name for name in load_file(file))
    assert second.losses == first.losses == trained(root, "not-kept", ranks=2).losses
    assert difference(second.weights, first.weights) == 0


def test_experts_are_kept_or_stored_otherwise_by_pattern(root: Path) -> None:
    names = [f"language_model.model.layers.{i}.mlp.experts" for i in range(2)]
    assert stored(root) == dict.fromkeys(names, "nf4")
    assert stored(root, quantize__keep=["experts"]) == {}
    assert stored(root, quantize__formats={"experts": "int8"}) == dict.fromkeys(names, "int8")


def test_experts_of_a_class_that_computes_with_whole_weights_are_named_in_the_log(root: Path) -> None:
    write_model("llama4_text", root / "llama4_text")
    cfg = config(root, "llama4_text")
    built = build_model(cfg, families.make(cfg, root / "cache"))
    assert built.notes[-1] == (
        "4 weights of fused experts are not stored in fewer bits, as "
        "'language_model.model.layers.0.feed_forward.experts.gate_up_proj': a Llama4TextExperts computes with whole "
        "weights"
    )
    assert not quantized_experts(built.module)
    kept = config(root, quantize__keep=["experts"])  # by its user
    assert not any("fewer bits" in note for note in build_model(kept, families.make(kept, root / "cache")).notes)


@pytest.mark.slow
def test_a_merged_model_has_the_experts_of_its_folder_not_the_bytes(root: Path) -> None:
    cfg = config(root, export__what="merged", train__precision="bf16")
    run = make_run(root, cfg, "merged")
    train(alone(), cfg, run)
    folder = export(cfg, run, root / "cache")[0].path
    found, expected = (load_file(path / "model.safetensors") for path in (folder, root / "mixtral"))
    experts = [name for name in expected if ".experts." in name]
    assert experts
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in experts)


def test_what_is_drawn_later_is_drawn_on_the_base_that_the_run_had(root: Path) -> None:
    samples = {"sample__every": 1, "sample__prompts": ["1 says"], "sample__tokens": 24, "sample__temperature": 0.0}
    texts = []
    for keep in ([], ["experts"]):
        cfg = config(root, train__steps=1, quantize__keep=keep, **samples)
        run = make_run(root, cfg, f"drawn-{len(keep)}")
        train(alone(), cfg, run)
        texts.append((run.samples / "step-000001-0.txt").read_text())
        request = DrawingRequest(("1 says",))
        folder = draw(run, on_one_device(run, check_request(run, request)), alone(), request)[0]
        assert (folder / "1.txt").read_text() == texts[-1]
    assert texts[0] != texts[1]


def loaded(root: Path, format: str) -> dict[str, torch.Tensor]:
    cfg = config(root, quantize__format=format)
    family = families.make(cfg, root / "cache")
    model = load_model(build_model(cfg, family), cfg, family, alone()).module
    return {name: tensor for name, tensor in model.state_dict().items() if ".experts." in name}


@pytest.mark.parametrize("format", ["none", "nf4"])
def test_experts_that_are_read_some_rows_at_a_time_are_the_same(
    root: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = loaded(root, format)
    monkeypatch.setattr(load, "PIECE", 64 * 5)  # five rows of a matrix
    assert difference(loaded(root, format), whole) == 0


def load_unlike_in_parts(world: World, cfgs: list[RunConfig], runs: list[RunDir]) -> str:
    """The error when rank 1 has other experts, of which only the first row of some is compared."""
    with patch.object(load, "PIECE", 64 * 5):  # not for the tests that this rank runs later
        return load_unlike(world, cfgs, runs)


def test_a_rank_with_other_experts_is_named_before_the_first_step(root: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(root / "mixtral", tmp_path / "other"))
    weights = load_file(copy / "model.safetensors")
    changed = [name for name in weights if re.search(r"layers\.1\..*experts\.\d\.w2", name)]
    for name in changed:
        weights[name] += 0.5
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    same = config(root, parallel__devices=2, parallel__strategy="full")
    other = config(root, parallel__devices=2, parallel__strategy="full", model__path=str(copy))
    runs = [make_run(root, cfg, f"unlike-{rank}") for rank, cfg in enumerate((same, other))]
    assert changed
    for said in run_ranks(2, load_unlike_in_parts, [same, other], runs):
        assert "model.layers.1.mlp.experts.down_proj_records' on rank" in said
        assert said.endswith("give every machine the same files, and remove the folder of quantize.cache")
