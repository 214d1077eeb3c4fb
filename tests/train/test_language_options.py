"""What is trained of a language model besides its adapter's layers, and the folders of peft that hold it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bench import Bench
from tests.runs import alone, make_text, text_config
from trainer.config.schema import RunConfig
from trainer.export import export
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

TOLERANCE = 1e-6
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("options")
    return Bench(root, make_text(root / "text"), text_config, {})


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


def untied(bench: Bench) -> dict[str, Any]:
    return {"model__options": {"architecture": "qwen3-8b"}}


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
    merged = export(cfg.exporting("merged", None, None), run, bench.root / "cache")[0].path
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), expected, atol=2e-5, rtol=0)
