"""What is trained of a language model besides its adapter's layers, and the folders of peft that hold it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bench import TOLERANCE, Bench
from tests.runs import (
    alone,
    difference,
    logits,
    make_pictures,
    make_run,
    make_text,
    run_config,
    text_config,
    train,
    trained_logits,
)
from trainer.export.export import export
from trainer.models import families
from trainer.models.build import build_model
from trainer.models.parts.language.neftune import EmbeddingNoise
from trainer.models.state_dict import BaseWeights
from trainer.plan.record.trace import units_of
from trainer.plan.store import key_of
from trainer.run.events import SampleEvent, ValidationEvent
from trainer.system.errors import InputError
from trainer.weights.tensors import OpenFiles

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


# Folders of peft


@pytest.mark.parametrize(
    ("targets", "suffixes"),
    [
        ([], ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        pytest.param(
            [r".*layers\.[02]\.mlp\.up_proj", "q_proj"],
            ["0.mlp.up_proj", "2.mlp.up_proj", "q_proj"],
            marks=pytest.mark.slow,
        ),
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


@pytest.mark.slow
def test_a_rank_stabilized_adapter_is_the_trained_one_in_peft(bench: Bench) -> None:
    from peft import AutoPeftModelForCausalLM

    adapter = {"type": "lora", "rank": 4, "alpha": 6, "rank_stabilized": True, "rank_pattern": {"q_proj": 2}}
    cfg, run = bench.run("rslora", adapter=adapter, export__dtype="fp32", optim__lr=1e-2)
    expected = trained_logits(cfg, run)
    folder = export(cfg, run, bench.root / "cache")[0].path
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), expected, atol=2e-5, rtol=0)


# Modules that are trained whole


@pytest.mark.parametrize(
    ("architecture", "modules"),
    [
        ("qwen3-1.7b", ["lm_head"]),
        ("qwen3-8b", ["embed_tokens", "lm_head", r"model\.norm"]),
        pytest.param("qwen3-1.7b", ["embed_tokens"], marks=pytest.mark.slow),
        pytest.param("qwen3-1.7b", ["embed_tokens", "lm_head", r"model\.norm"], marks=pytest.mark.slow),
        pytest.param("qwen3-8b", ["embed_tokens"], marks=pytest.mark.slow),
        pytest.param("qwen3-8b", ["lm_head"], marks=pytest.mark.slow),
    ],
)
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
        f"adapter.start: {folder} holds 'language_model.lm_head.weight', which this run does not train; name its "
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


@pytest.mark.parametrize("format", ["auto", *(pytest.param(f, marks=pytest.mark.slow) for f in ("comfyui", "kohya"))])
def test_formats_without_a_place_for_whole_modules_are_refused_before_training(tmp_path: Path, format: str) -> None:
    adapter = {"type": "lora", "rank": 4, "modules_to_save": ["norm_out"]}
    cfg = run_config(make_pictures(tmp_path / "pictures", 2), adapter=adapter, export__format=format)
    with pytest.raises(InputError) as caught:
        families.make(cfg, tmp_path / "cache")
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


@pytest.mark.slow
def test_a_module_of_bagel_is_saved_whole_under_its_published_name(tmp_path: Path) -> None:
    adapter = {"type": "lora", "rank": 4, "modules_to_save": ["text_embedding"]}
    cfg = run_config(make_pictures(tmp_path / "pictures", 2), model__family="bagel", adapter=adapter, train__steps=1)
    run = make_run(tmp_path, cfg, "run")
    weights = train(alone(), cfg, run).weights
    (file,) = export(cfg, run, tmp_path / "cache", weights)
    stored = load_file(file.path / "adapter_model.safetensors")
    (trained,) = (weights[name] for name in weights if name.endswith("text_embedding.weight"))
    assert torch.equal(stored["base_model.model.language_model.model.embed_tokens.weight"], trained.bfloat16())
    settings = json.loads((file.path / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["embed_tokens"]


def test_the_plan_counts_modules_that_are_trained_whole(bench: Bench) -> None:
    counts = []
    for adapter in ({"type": "lora", "rank": 4}, WHOLE):
        cfg = bench.config(adapter=adapter)
        family = families.make(cfg, bench.root / "cache")
        units = units_of(build_model(cfg, family).module, family.shard.blocks, torch.bfloat16)
        counts.append(sum(p.numbers for unit in units for p in unit.parameters if p.is_trained))
    assert counts[1] - counts[0] == BYTES * 64
    assert key_of(bench.config(adapter={"type": "lora", "rank": 4})) != key_of(cfg)


# New tokens


NEW = ["<tool>", "</tool>", "<think>"]
BYTES = 257
"""Tokens of the tiny model: bytes, and the end of a text."""


def with_new_tokens(**options: Any) -> dict[str, Any]:
    return {"model__options": {"new_tokens": NEW, **options}, "adapter": WHOLE, "export__dtype": "fp32"}


def test_rows_of_new_tokens_begin_at_the_mean_of_the_others(bench: Bench) -> None:
    families_of = [families.make(bench.config(**changes), bench.root / "cache") for changes in ({}, with_new_tokens())]
    old, new = (BaseWeights(family).tensor("language_model", "model.embed_tokens.weight") for family in families_of)
    assert old.shape == (BYTES, 64)
    assert new.shape == (BYTES + 3, 64)
    assert torch.equal(new[:BYTES], old)
    torch.testing.assert_close(new[BYTES:], old.double().mean(dim=0).float().expand(3, 64))
    files = families_of[1].weights("language_model").entries["model.embed_tokens.weight"]
    pieces = [files.rows(OpenFiles(), *ends) for ends in ((0, 7), (7, BYTES + 1), (BYTES + 1, BYTES + 3))]
    assert torch.equal(torch.cat(pieces), new)


def test_rows_that_a_model_holds_in_reserve_are_used_for_new_tokens(bench: Bench, tmp_path: Path) -> None:
    """As Qwen's, whose 151,936 rows are more than its tokenizer's tokens."""
    tiny = families.make(bench.config(), bench.root / "cache").folder
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": BYTES + 7}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    spare = torch.arange(7 * 64).view(7, 64).to(stored[name].dtype)
    save_file(stored | {name: torch.cat([stored[name], spare])}, folder / "model.safetensors", {"format": "pt"})
    cfg = bench.config(**with_new_tokens(), model__path=str(folder))
    rows = BaseWeights(families.make(cfg, bench.root / "cache")).tensor("language_model", name)
    assert torch.equal(rows[:BYTES], stored[name])
    torch.testing.assert_close(rows[BYTES : BYTES + 3], stored[name].double().mean(dim=0).float().expand(3, 64))
    assert torch.equal(rows[BYTES + 3 :], spare[3:])


def test_a_token_that_the_tokenizer_knows_keeps_its_row_and_stays_special(bench: Bench) -> None:
    plain: Any = families.make(bench.config(), bench.root / "cache")
    end = plain.tokenizer.eos_token
    known = with_new_tokens() | {"model__options": {"new_tokens": [end]}}
    family: Any = families.make(bench.config(**known), bench.root / "cache")
    assert len(family.tokenizer) == len(plain.tokenizer) == family.vocabulary
    assert family.must_train == {}
    assert family.tokenizer.decode(family.tokenize(f"a{end}"), skip_special_tokens=True) == "a"
    some = known | {"model__options": {"new_tokens": [end, "<tool>", "<tool>"]}}
    both: Any = families.make(bench.config(**some), bench.root / "cache")
    rows = BaseWeights(both).tensor("language_model", "model.embed_tokens.weight")
    assert torch.equal(rows[:BYTES], BaseWeights(plain).tensor("language_model", "model.embed_tokens.weight"))
    assert len(rows) == BYTES + 1


@pytest.mark.parametrize(
    ("architecture", "what"),
    [
        ("qwen3-8b", "adapter"),
        pytest.param("qwen3-1.7b", "adapter", marks=pytest.mark.slow),
        *(pytest.param(f"qwen3-{s}b", w, marks=pytest.mark.slow) for s in ("1.7", "8") for w in ("merged", "full")),
    ],
)
def test_an_export_with_new_tokens_is_the_trained_model(bench: Bench, architecture: str, what: str) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    changes = with_new_tokens(architecture=architecture) | {"export__what": what, "optim__lr": 1e-2}
    changes |= {"adapter": {"type": "none"}} if what == "full" else {}
    cfg, run = bench.run(f"new-{architecture}-{what}", **changes)
    expected = trained_logits(cfg, run)
    assert expected.shape[-1] == BYTES + 3
    folder = export(cfg, run, bench.root / "cache")[0].path
    loader = AutoPeftModelForCausalLM if what == "adapter" else AutoModelForCausalLM
    torch.testing.assert_close(logits(loader.from_pretrained(folder)), expected, atol=2e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a<tool>b</tool>", add_special_tokens=False)["input_ids"][1::2] == [BYTES, BYTES + 1]
    assert tokenizer.decode([BYTES + 2]) == "<think>"


@pytest.mark.slow
def test_documents_are_read_with_the_new_tokens_and_their_rows_are_trained(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("<tool>one</tool> and <tool>two</tool>. " * 40, encoding="utf-8")
    cfg, run = bench.run("read", **with_new_tokens(), data__path=str(tmp_path / "text"), optim__lr=1e-2)
    weights = train(alone(), cfg, run).weights["language_model.model.embed_tokens.weight"]
    base = BaseWeights(families.make(cfg, bench.root / "cache")).tensor("language_model", "model.embed_tokens.weight")
    moved = (weights - base).abs().amax(dim=1)
    assert float(moved[BYTES : BYTES + 2].min()) > 1e-2


@pytest.mark.parametrize("modules", [[], ["embed_tokens"]])
def test_new_tokens_whose_rows_are_not_trained_are_refused(bench: Bench, modules: list[str]) -> None:
    adapter = {"type": "lora", "rank": 4, "modules_to_save": modules}
    missing = "lm_head" if modules else "model.embed_tokens"
    with pytest.raises(InputError) as caught:
        bench.trained_here(f"frozen-{len(modules)}", **with_new_tokens(**UNTIED) | {"adapter": adapter})
    assert str(caught.value) == (
        f"adapter.modules_to_save: language_model.{missing} must be trained, as it has the rows of "
        "model.options.new_tokens; name it here"
    )


# NEFTune


def test_noise_on_embeddings_is_uniform_by_the_length_of_each_document() -> None:
    noise = EmbeddingNoise(5.0)
    documents = torch.tensor([[0] * 90 + [1] * 10, [3] * 100])
    zeros = torch.zeros(2, 100, 64)
    assert torch.equal(noise(zeros), zeros)
    noise.set_samples(3, (7, 8), documents, "cpu")
    found = noise(zeros)
    for row, columns, length in ((0, slice(0, 90), 90), (0, slice(90, 100), 10), (1, slice(0, 100), 100)):
        limit = 5 / (length * 64) ** 0.5
        part = found[row, columns]
        assert 0.98 * limit < float(part.abs().max()) <= limit
        assert float(part.var()) == pytest.approx(limit**2 / 3, rel=0.1)
        assert abs(float(part.mean())) < 0.1 * limit
    noise.set_samples(3, (8,), documents[1:], "cpu")
    assert torch.equal(noise(zeros[1:]), found[1:])
    assert torch.equal(noise.eval()(zeros[1:]), zeros[1:])


def test_noise_changes_training_and_neither_validation_nor_samples(bench: Bench, tmp_path: Path) -> None:
    held = make_text(tmp_path / "held", count=5)
    changes: dict[str, Any] = {"data__validation": str(held), "data__validation_every": 1, "train__steps": 1}
    changes |= {"optim__lr": 1e-30, "sample__every": 1, "sample__prompts": ["All the "], "sample__tokens": 6}
    plain, noisy = (
        bench.trained_here(f"noise-{alpha}", **changes, train__neftune_alpha=alpha) for alpha in (0.0, 50.0)
    )
    assert abs(plain.losses[0] - noisy.losses[0]) > 1e-3
    for kind, field in ((ValidationEvent, "loss"), (SampleEvent, "text")):
        first, second = (
            [getattr(event, field) for event in run.events if isinstance(event, kind)] for run in (plain, noisy)
        )
        assert first == second != []


def test_noise_on_the_embeddings_of_an_image_model_is_refused(tmp_path: Path) -> None:
    cfg = run_config(make_pictures(tmp_path / "pictures", 1), train__neftune_alpha=5.0)
    with pytest.raises(InputError) as caught:
        train(alone(), cfg, make_run(tmp_path, cfg, "run"))
    assert str(caught.value) == "train.neftune_alpha: has no effect for flux2, which is not trained on text; set 0"
