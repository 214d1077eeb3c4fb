"""What is trained of a language model besides its adapter's layers, and the folders of peft that hold it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.bench import Bench
from tests.distributed import run_ranks
from tests.runs import alone, difference, make_pictures, make_run, make_text, run_config, text_config, train
from tests.train.test_language_models import in_two_parts
from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.export import check_export, export
from trainer.models import families
from trainer.models.build import build_model
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

TOLERANCE = 1e-6
UNTIED = {"architecture": "qwen3-8b"}
WHOLE = {"type": "lora", "rank": 4, "modules_to_save": ["embed_tokens", "lm_head"]}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"adapter": WHOLE},
    "untied": {"adapter": WHOLE, "model__options": UNTIED},
    "nf4": {"adapter": WHOLE, "quantize__format": "nf4"},
}
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("options")
    return Bench(root, make_text(root / "text"), text_config, KINDS)


def logits(model: Any) -> Tensor:
    """After some bytes, the tokens of the tiny model."""
    with torch.no_grad():
        found: Tensor = model.eval()(torch.arange(1, 60)[None]).logits
    return found


def trained_logits(cfg: RunConfig, run: RunDir) -> Tensor:
    """The logits of the live model at the end of its run."""
    trainer = Trainer(cfg, run, alone(), run.path.parent / "cache", lambda event: None)
    try:
        trainer.train()
        return logits(trainer.model["language_model"])
    finally:
        trainer.close()


# Folders of peft


@pytest.mark.parametrize(
    ("targets", "suffixes"),
    [
        ([], ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        ([r".*layers\.[02]\.mlp\.up_proj", "q_proj"], ["0.mlp.up_proj", "2.mlp.up_proj", "q_proj"]),
    ],
)
def test_a_folder_of_peft_names_its_layers_by_their_ends_and_holds_the_tokenizer(
    bench: Bench, targets: list[str], suffixes: list[str]
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    cfg, run = bench.run(f"ends-{len(targets)}", adapter__targets=targets, export__dtype="fp32", train__steps=1)
    expected = trained_logits(cfg, run)
    folder = export(cfg, run, bench.root / "cache")[0].path
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == suffixes
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), expected, atol=2e-5, rtol=0)


def test_a_rank_stabilized_adapter_is_the_trained_one_in_peft(bench: Bench) -> None:
    from peft import AutoPeftModelForCausalLM

    adapter = {"type": "lora", "rank": 4, "alpha": 6, "rank_stabilized": True, "rank_pattern": {"q_proj": 2}}
    cfg, run = bench.run("rslora", adapter=adapter, export__dtype="fp32", optim__lr=1e-2)
    expected = trained_logits(cfg, run)
    folder = export(cfg, run, bench.root / "cache")[0].path
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), expected, atol=2e-5, rtol=0)


# Modules that are trained whole


@pytest.mark.parametrize("architecture", ["qwen3-1.7b", "qwen3-8b"])
@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head", r"model\.norm"]])
def test_modules_trained_whole_are_exported_as_peft_does_and_merged(
    bench: Bench, architecture: str, modules: list[str]
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    adapter = {"type": "lora", "rank": 4, "modules_to_save": modules}
    options = {"architecture": architecture}
    name = f"whole-{architecture}-{len(modules)}{modules[0]}"
    cfg, run = bench.run(name, adapter=adapter, model__options=options, export__dtype="fp32", optim__lr=1e-2)
    expected = trained_logits(cfg, run)
    folder = export(cfg, run, bench.root / "cache")[0].path
    found = AutoPeftModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(found), expected, atol=2e-5, rtol=0)
    base = AutoModelForCausalLM.from_pretrained(families.make(cfg, bench.root / "cache").folder)
    for name in ("embed_tokens", "lm_head"):
        (ours, theirs) = (
            next(p for n, p in model.named_parameters(remove_duplicate=False) if name in n and "original" not in n)
            for model in (found, base)
        )
        is_tied = architecture == "qwen3-1.7b"
        assert torch.equal(ours, theirs) == (name not in modules and not is_tied)
    merged = export(cfg.exporting("merged", None, None), run, bench.root / "cache")[0].path
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), expected, atol=2e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_whole_modules_as_one_process_does(bench: Bench, kind: str) -> None:
    found = bench.trained(f"{kind}-2", 2, parallel__strategy="full", **KINDS[kind])
    expected = bench.reference(kind)
    names = {name for name in expected.weights if ".lora_" not in name}
    assert names == {"language_model.model.embed_tokens.weight"} | (
        {"language_model.lm_head.weight"} if kind == "untied" else set()
    )
    assert found.losses == pytest.approx(expected.losses, abs=TOLERANCE, rel=0)
    assert difference(found.weights, expected.weights) <= TOLERANCE


@pytest.mark.slow
def test_two_ranks_that_stop_and_go_on_end_with_whole_modules_bit_for_bit(bench: Bench) -> None:
    changes = KINDS["nf4"] | {"parallel__devices": 2, "parallel__strategy": "full", "train__steps": 6}
    straight = bench.trained("straight", 2, **changes)
    begin, rest = run_ranks(2, in_two_parts, *bench.run("parts", **changes))[0]
    assert begin + rest.losses == straight.losses
    assert all(torch.equal(rest.weights[name], straight.weights[name]) for name in straight.weights)


def test_a_folder_of_peft_with_whole_modules_is_gone_on_from(bench: Bench, tmp_path: Path) -> None:
    cfg, run = bench.run("begun", **KINDS["untied"], export__dtype="fp32", optim__lr=1e-2)
    weights = train(alone(), cfg, run).weights
    folder = export(cfg, run, bench.root / "cache")[0].path
    adapter = WHOLE | {"start": str(folder)}
    changes = {"adapter": adapter, "model__options": UNTIED, "optim__lr": 1e-30}
    assert difference(bench.trained_here("gone-on", **changes).weights, weights) <= TOLERANCE
    changes["adapter"] = {"type": "lora", "rank": 4, "start": str(folder)}
    with pytest.raises(InputError) as caught:
        bench.trained_here("without", **changes)
    assert str(caught.value) == (
        f"adapter.start {folder}: holds 'language_model.lm_head.weight', which this run does not train; name its "
        "module in adapter.modules_to_save"
    )


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            {"type": "lora", "modules_to_save": ["lm_haed"]},
            "adapter.modules_to_save: 'lm_haed' matches no layer of causal_lm; nearest: 'lm_head' (1 layer)",
        ),
        (
            {"type": "lora", "modules_to_save": ["lm_head"], "targets": ["q_proj", "layers.0.mlp"]},
            "adapter.targets: 'layers.0.mlp' matches no layer",
        ),
    ],
)
def test_modules_that_do_not_exist_are_refused(bench: Bench, adapter: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        bench.trained_here("refused-" + str(len(message)), adapter=adapter)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("format", ["auto", "comfyui", "kohya", "diffusers"])
def test_formats_without_a_place_for_whole_modules_are_refused_before_training(tmp_path: Path, format: str) -> None:
    adapter = {"type": "lora", "rank": 4, "modules_to_save": ["norm_out"]}
    cfg = run_config(make_pictures(tmp_path / "pictures", 2), adapter=adapter, export__format=format)
    family = families.make(cfg, tmp_path / "cache")
    with pytest.raises(InputError) as caught:
        check_export(cfg, family, build_model(cfg, family).trainables)
    assert str(caught.value) == (
        f"export.format: {format} has no place for whole modules, which adapter.modules_to_save trains; "
        "use peft, or export.what: merged"
    )


@pytest.mark.slow
@pytest.mark.parametrize("format", ["peft", "merged"])
def test_whole_modules_of_an_image_model_are_exported(tmp_path: Path, format: str) -> None:
    adapter = {"type": "lora", "rank": 4, "modules_to_save": ["norm_out"]}
    what = {"export__format": "peft"} if format == "peft" else {"export__what": "merged"}
    cfg = run_config(make_pictures(tmp_path / "pictures", 2), adapter=adapter, train__steps=2, **what)
    run = make_run(tmp_path, cfg, "run")
    weights = train(alone(), cfg, run).weights
    (file,) = export(cfg, run, tmp_path / "cache", weights)
    stored = load_file(next(file.path.glob("*.safetensors")))
    (name,) = (name for name in weights if "norm_out.linear.weight" in name)
    prefix = "base_model.model." if format == "peft" else ""
    assert torch.equal(stored[f"{prefix}norm_out.linear.weight"], weights[name].bfloat16())
