"""PiSSA: a lora from the principal singular values, whose base holds the residual."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.bench import Bench
from tests.runs import alone, make_run, make_text, text_config, train
from tests.train.test_language_options import logits, trained_logits
from trainer.adapters.state import Factors
from trainer.config.load import ConfigError, load_config_text
from trainer.config.schema import RunConfig
from trainer.export.export import export
from trainer.models import families
from trainer.models.build import build_model, load_model
from trainer.models.pissa import (
    initial_file,
    principal_factors,
    read_factors,
    write_factors,
)
from trainer.models.start import continue_adapter
from trainer.models.state_dict import BaseWeights
from trainer.system.errors import InputError
from trainer.weights.files import WeightFiles
from trainer.weights.quantization import FORMATS, quantized_layers
from trainer.weights.tensors import OpenFiles, ReducedEntry

PISSA = {"type": "lora", "rank": 4, "alpha": 6, "init": "pissa", "rank_pattern": {"q_proj": 3}}
KINDS: dict[str, dict[str, Any]] = {"fp32": {"adapter": PISSA}, "nf4": {"adapter": PISSA, "quantize__format": "nf4"}}
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("pissa")
    return Bench(root, make_text(root / "text"), text_config, KINDS)


def base_of(bench: Bench, cfg: RunConfig) -> BaseWeights:
    return BaseWeights(families.make(cfg, bench.root / "cache"))


# One layer


@pytest.mark.parametrize("stabilized", [False, True])
def test_factors_and_residual_are_those_of_peft(tmp_path: Path, stabilized: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(48, 32))
    weight = theirs[0].weight.detach().clone()
    config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=stabilized, target_modules=["0"], init_lora_weights="pissa")
    peft.inject_adapter_in_model(config, theirs)
    scale = 6 / (2 if stabilized else 4)
    down, up = principal_factors(weight, 4, scale)
    layer = theirs[0]
    signs = torch.sign((down * layer.lora_A["default"].weight).sum(dim=1))  # a pair of singular vectors may be negated
    torch.testing.assert_close(down * signs[:, None], layer.lora_A["default"].weight.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(up * signs, layer.lora_B["default"].weight.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(weight - scale * up @ down, layer.base_layer.weight.detach(), atol=1e-5, rtol=0)


def test_rows_of_a_residual_do_not_depend_on_those_that_are_read_with_them(bench: Bench) -> None:
    files: WeightFiles = families.make(bench.config(), bench.root / "cache").weights("language_model")
    stored = files.entries["model.layers.0.mlp.up_proj.weight"]
    numbers = torch.Generator().manual_seed(0)
    down, up = torch.randn(7, 64, generator=numbers), torch.randn(128, 7, generator=numbers)
    entry = ReducedEntry(stored.file, stored.key, stored.shape, stored.dtype, stored=stored, down=down, up=up)
    whole = entry.whole(OpenFiles())
    torch.testing.assert_close(whole, stored.whole(OpenFiles()).float() - up @ down, atol=1e-5, rtol=0)
    single = torch.cat([entry.rows(OpenFiles(), row, row + 1) for row in range(128)])
    assert torch.equal(single, whole)


# Runs


def test_a_run_starts_as_its_base_and_exports_an_ordinary_lora_of_it(bench: Bench) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    changes = KINDS["fp32"] | {"export__dtype": "fp32", "optim__lr": 1e-2}
    cfg, run = bench.run("exported", **changes)
    family = families.make(cfg, bench.root / "cache")
    before = load_model(build_model(cfg, family), cfg, family, alone()).module["language_model"]
    base = AutoModelForCausalLM.from_pretrained(family.folder)
    torch.testing.assert_close(logits(before), logits(base), atol=1e-5, rtol=0)
    layer = before.model.layers[1].mlp.down_proj
    original = base_of(bench, cfg).layer("language_model.model.layers.1.mlp.down_proj").float()
    largest = torch.linalg.svdvals(original)
    torch.testing.assert_close(torch.linalg.svdvals(layer.base_layer.weight)[:60], largest[4:], atol=1e-5, rtol=0)

    expected = trained_logits(cfg, run)
    assert float((expected - logits(base)).abs().max()) > 0.1
    folder = export(cfg, run, bench.root / "cache")[0].path
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
    stored = load_file(folder / "adapter_model.safetensors")
    assert stored["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (6, 64)
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), expected, atol=5e-5, rtol=0)
    merged = export(cfg.exporting("merged", None, None), run, bench.root / "cache")[0].path
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_a_small_change_survives_the_rounding_of_an_export(bench: Bench, dtype: str) -> None:
    """The singular values, which the export subtracts, are far larger than what few steps with a small rate change."""
    cfg, run = bench.run(f"small-{dtype}", **KINDS["fp32"], export__dtype=dtype, optim__lr=1e-4, train__steps=1)
    found = train(alone(), cfg, run)
    (exported,) = export(cfg, run, bench.root / "cache", found.weights)
    assert exported.difference < 4e-3


@pytest.mark.slow
def test_an_exported_adapter_is_read_into_the_run_that_made_it(bench: Bench) -> None:
    """As samples are drawn from the export of a run whose checkpoints are gone."""
    cfg, run = bench.run("drawn", **KINDS["fp32"], export__dtype="fp32", optim__lr=1e-2)
    expected = trained_logits(cfg, run)
    folder = export(cfg, run, bench.root / "cache")[0].path
    family = families.make(cfg, bench.root / "cache")
    loaded = load_model(build_model(cfg, family), cfg, family, alone(), initial=initial_file(run))
    changes = {"adapter": cfg.adapter.model_copy(update={"start": str(folder)})}
    continue_adapter(loaded, cfg.model_copy(update=changes), family)
    torch.testing.assert_close(logits(loaded.module["language_model"]), expected, atol=5e-5, rtol=0)


@pytest.mark.slow
def test_a_base_in_four_bits_holds_the_residual_which_is_closer_to_the_weight(bench: Bench, tmp_path: Path) -> None:
    """QPiSSA. Of weights whose singular values fall, as a trained model's, less is left to round."""
    tiny = families.make(bench.config(), bench.root / "cache").folder
    folder = shutil.copytree(tiny, tmp_path / "model")

    def falling(name: str, weight: Tensor) -> Tensor:
        if weight.dim() < 2 or "layers" not in name:
            return weight
        left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
        falls = values[0] / torch.arange(1, len(values) + 1)
        return ((left * falls) @ right).to(weight.dtype).contiguous()

    weights = {name: falling(name, weight) for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    cfg = bench.config(**KINDS["nf4"], model__path=str(folder))
    family = families.make(cfg, bench.root / "cache")
    file = tmp_path / "initial.safetensors"
    model = load_model(build_model(cfg, family), cfg, family, alone(), bench.root / "cache", initial=file).module
    factors, nf4 = load_file(file), FORMATS["nf4"]
    for name, layer in quantized_layers(model).items():
        stored = name.removesuffix(".base_layer")
        weight = BaseWeights(family).layer(stored).float()
        down, up = (factors[f"{stored}.lora_{which}.default.weight"] for which in "AB")
        residual = nf4.decode(layer.qweight.detach(), layer.in_features, torch.float32, nf4.table())
        own = nf4.decode(nf4.encode(weight), layer.in_features, torch.float32, nf4.table())
        assert float((residual + 1.5 * up @ down - weight).norm()) < 0.8 * float((own - weight).norm()), name


@pytest.mark.slow
def test_a_run_whose_factors_are_gone_is_neither_resumed_nor_exported(bench: Bench, tmp_path: Path) -> None:
    cfg, run = bench.run("gone", **KINDS["fp32"], train__steps=1)
    train(alone(), cfg, run)
    initial_file(run).unlink()
    message = (
        f"{initial_file(run)}: missing; it holds what adapter.init: pissa subtracted from the base. Copy it back, or "
        "start a new run"
    )
    longer = bench.config(**KINDS["fp32"], train__steps=2)
    for act in (lambda: train(alone(), longer, run), lambda: export(cfg, run, bench.root / "cache")):
        with pytest.raises(InputError) as caught:
            act()
        assert str(caught.value) == message
    assert make_run(tmp_path, cfg, "run").config().adapter == cfg.adapter


@pytest.mark.parametrize("place", ["value", "end"])
def test_factors_that_were_damaged_on_the_disk_are_named(tmp_path: Path, place: str) -> None:
    """A flipped bit makes 6.8e36 of 0.02, which would be subtracted from what is exported."""
    cfg = text_config(make_text(tmp_path / "text"), **KINDS["fp32"])
    file, factors = tmp_path / "initial-adapter.safetensors", {"a": (torch.full((4, 8), 0.02), torch.ones(8, 4))}
    write_factors(factors, file)
    assert all(map(torch.equal, found(cfg, file)["a"], factors["a"]))
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x40
    file.write_bytes(content if place == "value" else content[:-4])
    reason = "has changed since it was written: its checksum differs" if place == "value" else "damaged"
    with pytest.raises(InputError) as caught:
        read_factors(cfg, file)
    assert str(caught.value) == (
        f"{file}: {reason}; it holds what adapter.init: pissa subtracted from the base. Copy it back, or start a new "
        "run"
    )


def found(cfg: RunConfig, file: Path) -> Factors:
    factors = read_factors(cfg, file)
    assert factors is not None
    return factors


def test_two_starts_of_an_adapter_are_refused(tmp_path: Path) -> None:
    text = "model: {family: causal_lm}\ndata: {path: text}\nadapter: {init: pissa, start: a.safetensors}\n"
    with pytest.raises(ConfigError, match=r"pissa starts from the base's singular values, not from adapter\.start"):
        load_config_text(text, (), tmp_path / "preset.yaml")
