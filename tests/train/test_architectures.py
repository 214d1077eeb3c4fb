"""Runs of language models of many classes: as plain transformers trains them, each document alone, on any ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.benchmarks.architectures import plain_loss, write_model
from tests.distributed import run_ranks
from tests.models.common import batch_of, model_of
from tests.models.test_unknown_networks import folder_of as plain_folder
from tests.runs import Outcome, alone, difference, make_run, text_config, train
from trainer.config.schema import RunConfig
from trainer.export.export import export
from trainer.models import families
from trainer.models.build import build_model
from trainer.models.families import causal_lm
from trainer.models.parts.language.next_token import restarting_positions
from trainer.rng import SampleRng
from trainer.system.errors import InputError
from trainer.train.loop import Trainer
from trainer.weights.quantization import quantized_layers

KINDS = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "mixtral", "qwen2_moe"]
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("architectures")
    (root / "text").mkdir()
    lines = "".join(f'{{"text": "{i} says {i * i}."}}\n' for i in range(60))
    (root / "text" / "short.jsonl").write_text(lines, "utf-8")
    return root


def folder_of(root: Path, kind: str) -> Path:
    """A tiny model as transformers saves it, with sharp weights: what must not be seen would show."""
    folder = root / kind
    if not folder.is_dir():
        write_model(kind, folder)
    return folder


def config_of(root: Path, kind: str, **changes: Any) -> RunConfig:
    # Where a gradient is nearly 0, AdamW with its usual eps makes a step of the sign that rounding gives it.
    base = {"model__path": str(folder_of(root, kind)), "adapter__type": "none", "train__steps": 3, "optim__eps": 1e-4}
    return text_config(root / "text", **base | changes)


def trained(root: Path, name: str, kind: str, ranks: int = 1, **changes: Any) -> Outcome:
    strategy = "none" if ranks == 1 else "full"
    cfg = config_of(root, kind, parallel__devices=ranks, parallel__strategy=strategy, **changes)
    return run_ranks(ranks, train, cfg, make_run(root, cfg, name))[0]


def first_rows(cfg: RunConfig, root: Path) -> list[dict[str, Tensor]]:
    trainer = Trainer(
        cfg, make_run(root, cfg, f"rows-{len(list(root.iterdir()))}"), alone(), root / "cache", lambda e: None
    )
    try:
        return [example for part in trainer.loader.micro_batches(0) for example in part.examples]
    finally:
        trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_is_that_of_transformers_and_any_number_of_ranks_trains_the_same(root: Path, kind: str) -> None:
    one = trained(root, f"{kind}-1", kind)
    rows = first_rows(config_of(root, kind), root)
    assert max(int(row["documents"].max()) for row in rows) > 0
    assert one.losses[0] == pytest.approx(plain_loss(folder_of(root, kind), rows), abs=TOLERANCE, rel=0)
    for ranks in (2, 4):
        found = trained(root, f"{kind}-{ranks}", kind, ranks)
        assert found.losses == pytest.approx(one.losses, abs=TOLERANCE, rel=0)
        assert difference(found.weights, one.weights) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["opt", "mamba", "bloom", "roberta"])
def test_documents_that_would_see_each_other_have_the_loss_they_have_alone(root: Path, kind: str) -> None:
    one, two = trained(root, f"{kind}-1", kind), trained(root, f"{kind}-2", kind, 2)
    rows = first_rows(config_of(root, kind), root)
    assert {int(row["documents"].max()) for row in rows} == {0}
    assert one.losses[0] == pytest.approx(plain_loss(folder_of(root, kind), rows), abs=TOLERANCE, rel=0)
    assert two.losses == pytest.approx(one.losses, abs=TOLERANCE, rel=0)


def test_a_model_that_reads_both_ways_is_refused(root: Path, tmp_path: Path) -> None:
    cfg = text_config(root / "text", model__path=str(plain_folder(tmp_path / "model", "bert")))
    with pytest.raises(InputError) as caught:
        build_model(cfg, families.make(cfg, root / "cache"))
    assert str(caught.value) == (
        f"{tmp_path / 'model' / 'config.json'}: in a BertLMHeadModel of this config a token sees those after it, so "
        "nothing is left to predict; set is_decoder or causal to true there, if the model has such a field, or name a "
        "causal language model"
    )


# Attention


def test_a_class_without_sdpa_gets_eager_and_the_log_says_so(root: Path) -> None:
    cfg = config_of(root, "gpt_oss")
    family = families.make(cfg, root / "cache")
    built = build_model(cfg, family)
    assert built.module["language_model"].config._attn_implementation == "eager"
    assert built.notes[0] == (
        "a GptOssForCausalLM has no sdpa attention in transformers; eager is used, which needs memory for all pairs of "
        "tokens of a row"
    )
    with pytest.raises(InputError, match=r"config.json: model.options.attention: sdpa: transformers cannot build"):
        families.make(config_of(root, "gpt_oss", model__options={"attention": "sdpa"}), root / "cache")


def test_eager_attention_may_be_asked_for(root: Path) -> None:
    cfg = config_of(root, "llama", model__options={"attention": "eager"})
    built = build_model(cfg, families.make(cfg, root / "cache"))
    assert built.module["language_model"].config._attn_implementation == "eager"


# Exports


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(torch.arange(1, 40)[None]).logits
    return found


def exported(root: Path, kind: str, **changes: Any) -> tuple[Path, Tensor]:
    """The path of the export, and the logits of the live model at the end of the run."""
    cfg = config_of(root, kind, export__dtype="fp32", optim__lr=1e-2, train__steps=2, **changes)
    run = make_run(root, cfg, f"{kind}-{len(list(root.iterdir()))}")
    trainer = Trainer(cfg, run, alone(), root / "cache", lambda event: None)
    try:
        trainer.train()
        expected = logits(trainer.model["language_model"])
    finally:
        trainer.close()
    return export(cfg, run, root / "cache")[0].path, expected


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"adapter__type": "lora", "export__what": "merged"}])
@pytest.mark.parametrize("kind", ["mixtral", "gpt2", "gpt_neox", "qwen2_moe", "gemma3"])
def test_a_whole_model_is_written_under_the_names_of_its_folder(root: Path, kind: str, changes: dict[str, Any]) -> None:
    folder, expected = exported(root, kind, **changes)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=0)
    names, had = (
        load_file(folder / "model.safetensors").keys(),
        load_file(folder_of(root, kind) / "model.safetensors").keys(),
    )
    if kind == "gemma3":
        assert type(model).__name__ == "Gemma3ForCausalLM"
        assert not any("vision" in name or "language_model" in name for name in names)
    else:
        assert names == had


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt2", "gemma3"])
def test_an_exported_adapter_is_the_trained_one_in_peft(root: Path, kind: str, adapter: str) -> None:
    from peft import AutoPeftModelForCausalLM

    folder, expected = exported(root, kind, adapter__type=adapter)
    model = AutoPeftModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=0)


# Adapters


def adapted(cfg: RunConfig, root: Path) -> Any:
    return build_model(cfg, families.make(cfg, root / "cache"))


def test_layers_whose_weights_are_turned_take_adapters_and_codes(root: Path) -> None:
    cfg = config_of(root, "gpt2", adapter__type="lora", quantize__format="nf4")
    built = adapted(cfg, root)
    ends = {name.partition(".h.")[2].partition(".")[2] for name in built.adapter.layers}
    assert ends == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert len(quantized_layers(built.module)) == 8
    named = config_of(root, "gpt2", adapter__type="lora", adapter__targets=["attn.c_attn"])
    assert len(adapted(named, root).adapter.layers) == 2


@pytest.mark.parametrize("adapter", ["loha", "lokr"])
def test_an_adapter_that_peft_has_not_for_turned_layers_is_refused(root: Path, adapter: str) -> None:
    with pytest.raises(InputError) as caught:
        families.make(config_of(root, "gpt2", adapter__type=adapter), root / "cache")
    assert str(caught.value) == (
        f"adapter.type: peft has no {adapter} for this model's layers, whose weights are (inputs, outputs); "
        "use lora or dora, or export.what: merged"
    )
    families.make(config_of(root, "gpt2", adapter__type=adapter, export__what="merged"), root / "cache")


def test_a_full_fine_tune_keeps_turned_layers_as_its_checkpoints_had_them(root: Path) -> None:
    built = adapted(config_of(root, "gpt2"), root)
    weight = built.trainables["language_model.transformer.h.0.attn.c_attn.weight"]
    assert weight.shape == (64, 192)


@pytest.mark.parametrize(
    ("kind", "router"),
    [
        ("qwen2_moe", "shared_expert_gate"),
        ("jetmoe", "router.layer"),
        ("mamba", "dt_proj"),
        ("bart", "encoder_attn.q_proj"),
    ],
)
def test_routers_and_layers_that_the_class_never_calls_are_no_default_targets(
    root: Path, kind: str, router: str
) -> None:
    built = adapted(config_of(root, kind, adapter__type="lora"), root)
    assert built.adapter.layers
    assert not any(name.endswith(router) for name in built.adapter.layers)
    assert any(name.endswith(f"{router}.weight") for name, _ in built.module.named_parameters())


def test_experts_in_one_tensor_stay_frozen_and_the_log_says_so(root: Path) -> None:
    built = adapted(config_of(root, "mixtral", adapter__type="lora"), root)
    assert built.notes == (
        "4 weights of fused experts stay as they are, as 'model.layers.0.mlp.experts.gate_up_proj': adapters change "
        "linear layers; adapter.type: none trains them",
    )
    assert not any("experts" in name for name in built.trainables)


# Mixtures of experts


def write_mixture(folder: Path, experts: int, **changes: Any) -> None:
    """A Mixtral of one expert per token."""
    write_model("mixtral", folder)
    config = AutoModelForCausalLM.from_pretrained(folder).config
    config.num_local_experts, config.num_experts_per_tok = experts, 1
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["num_local_experts"] == experts


def used_experts(folder: Path, row: dict[str, Tensor]) -> set[int]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found = model(row["tokens"][None], output_router_logits=True, use_cache=False).router_logits
    return {int(expert) for expert in found[0].argmax(dim=-1)}


@pytest.mark.slow
@pytest.mark.parametrize("experts", [8, 3, 1])
def test_experts_that_a_rank_never_uses_and_that_no_rank_divides_train_as_in_one_process(
    root: Path, experts: int
) -> None:
    folder = root / f"mixture-{experts}"
    write_mixture(folder, experts)
    text = root / f"letters-{experts}"
    text.mkdir()
    (text / "a.jsonl").write_text("".join(f'{{"text": "{letter * 46}"}}\n' for letter in "abcdefgh"), "utf-8")
    changes = {
        "model__path": str(folder),
        "data__path": str(text),
        "train__batch_size": 2,
        "objective__router_weight": 0.1,
    }
    one = trained(root, f"mixture-{experts}-1", "mixtral", 1, **changes)
    first, second = first_rows(config_of(root, "mixtral", **changes), root)
    if experts == 8:
        assert used_experts(folder, first) - used_experts(folder, second)
        assert used_experts(folder, second) - used_experts(folder, first)
    for ranks in (2, 4):
        found = trained(root, f"mixture-{experts}-{ranks}", "mixtral", ranks, **changes)
        assert found.losses == pytest.approx(one.losses, abs=TOLERANCE, rel=0)
        assert difference(found.weights, one.weights) <= TOLERANCE


def loss_of(root: Path, kind: str, rows: list[dict[str, Tensor]], **changes: Any) -> tuple[float, Any]:
    cfg = config_of(root, kind, **changes)
    family = families.make(cfg, root / "cache")
    with torch.no_grad():
        loss = family.loss(model_of(family), batch_of(family, rows), SampleRng(0, list(range(len(rows)))))
    return float(loss.total / loss.weight), family


def test_the_loss_of_the_routers_of_a_row_is_that_of_transformers_and_is_weighed_by_learned_tokens(root: Path) -> None:
    rows = first_rows(config_of(root, "mixtral"), root)
    plain, _ = loss_of(root, "mixtral", rows)
    found, _ = loss_of(root, "mixtral", rows, objective__router_weight=0.5)
    model = AutoModelForCausalLM.from_pretrained(folder_of(root, "mixtral")).eval()
    total = weight = 0.0
    for row in rows:
        inside = (row["documents"] >= 0)[None]
        with torch.no_grad():
            expected = model(
                row["tokens"][None],
                position_ids=restarting_positions(row["documents"][None]),
                output_router_logits=True,
                use_cache=False,
            )
        balance = load_balancing_loss_func(expected.router_logits, 4, 2, inside)
        in_loss = float(row["loss_mask"].sum())
        total, weight = total + float(balance) * in_loss, weight + in_loss
    assert found - plain == pytest.approx(0.5 * total / weight, abs=2e-6)


def test_the_weight_of_the_routers_is_that_of_the_config_if_it_asks_for_it(root: Path) -> None:
    folder = root / "asks"
    write_mixture(folder, 4, output_router_logits=True, router_aux_loss_coef=0.02)
    rows = first_rows(config_of(root, "mixtral"), root)
    path = {"model__path": str(folder)}
    plain, _ = loss_of(root, "mixtral", rows, **path, objective__router_weight=0.0)
    given, _ = loss_of(root, "mixtral", rows, **path, objective__router_weight=0.02)
    asked, _ = loss_of(root, "mixtral", rows, **path)
    assert asked == given > plain


@pytest.mark.parametrize(("asks", "weight"), [(False, 0.5), (True, 0.5), (True, 0.0)])
def test_the_loss_of_the_routers_is_the_same_where_documents_are_attended_to_by_themselves(
    root: Path, asks: bool, weight: float
) -> None:
    folder = root / f"asks-{asks}"
    write_mixture(folder, 8, output_router_logits=asks, router_aux_loss_coef=0.02)
    rows = first_rows(config_of(root, "mixtral"), root)
    found = []
    for is_within in (True, False):
        with mock.patch.object(causal_lm, "can_attend", return_value=is_within):
            loss, family = loss_of(root, "mixtral", rows, model__path=str(folder), objective__router_weight=weight)
        assert family._keeps_apart
        found.append(loss)
    assert found[0] == pytest.approx(found[1], abs=TOLERANCE, rel=0)


def test_a_model_without_routers_has_no_weight_for_them(root: Path) -> None:
    with pytest.raises(InputError) as caught:
        families.make(config_of(root, "llama", objective__router_weight=0.01), root / "cache")
    assert str(caught.value) == (
        "objective.router_weight: a LlamaForCausalLM has no routers that transformers balances; leave it out"
    )


def test_a_folder_without_a_prefix_trains_as_the_one_with_it(root: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder_of(root, "gpt2"), tmp_path / "hub"))
    stored = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}, folder / "model.safetensors"
    )
    rows = first_rows(config_of(root, "gpt2"), root)
    assert loss_of(root, "gpt2", rows)[0] == loss_of(root, "gpt2", rows, model__path=str(folder))[0]
