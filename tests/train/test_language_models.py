"""Runs of language models: as one process trains them, continued, sampled, and loaded by transformers and peft."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.bench import TOLERANCE, Bench
from tests.benchmarks.text_time import learn
from tests.distributed import run_ranks
from tests.runs import (
    alone,
    logits,
    make_run,
    make_text,
    steps_of,
    text_config,
    train,
    trained_logits,
)
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.export.export import export
from trainer.models import families
from trainer.models.build import build_model
from trainer.rng import SampleRng
from trainer.run.events import AnyEvent, SampleEvent, ValidationEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.train.loop import Trainer
from trainer.weights.quantization import quantized_layers

KINDS: dict[str, dict[str, Any]] = {
    "full": {"adapter__type": "none"},
    "lora": {},
    "qlora": {"quantize__format": "nf4"},
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("language")
    return Bench(root, make_text(root / "text"), text_config, KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4))])
def test_any_number_of_ranks_trains_what_one_process_trains(bench: Bench, ranks: int, kind: str) -> None:
    checkpointing = "full" if ranks == 2 else "none"
    bench.assert_same_as_reference(
        kind, parallel__devices=ranks, parallel__strategy="full", train__checkpointing=checkpointing
    )


def test_the_size_of_a_pass_changes_nothing(bench: Bench) -> None:
    bench.assert_same_as_reference("full", train__micro_batch=3)


def test_a_step_follows_the_gradient_of_the_mean_over_the_tokens_it_learns_and_tells_their_speed(bench: Bench) -> None:
    cfg, run = bench.run("one-step", train__steps=1, optim__clip_norm=None, **KINDS["full"])
    events: list[AnyEvent] = []
    trainer = Trainer(cfg, run, alone(), run.path.parent / "cache", events.append)
    summed, tokens = torch.zeros(()), 0.0
    for part in trainer.loader.micro_batches(0):
        batch = {**trainer.family.collate(part.examples), "weight": torch.tensor(part.weights)}
        loss = trainer.family.loss(trainer.model, batch, SampleRng(cfg.train.seed, part.indices))
        summed, tokens = summed + loss.total, tokens + float(loss.weight)
    gradients = torch.autograd.grad(summed / tokens, trainer.parameters)
    trainer.train_step()
    trainer.close()
    (event,) = steps_of(events)
    assert tokens > cfg.train.batch_size
    assert event.grad_norm == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-5)
    assert event.tokens_per_second == pytest.approx(tokens / event.seconds)


def test_a_base_in_four_bits_holds_the_linear_layers_of_the_blocks(bench: Bench) -> None:
    cfg = bench.config(quantize__format="nf4")
    model = build_model(cfg, families.make(cfg, bench.root / "cache")).module
    layers = quantized_layers(model)
    assert len(layers) == 4 * 7  # blocks, and linear layers of each
    assert all(".layers." in name for name in layers)


# Continued


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_that_stop_and_go_on_end_bit_for_bit_where_they_would_have(bench: Bench, kind: str) -> None:
    bench.assert_goes_on_bit_for_bit(kind, train__steps=6)


def test_the_place_in_the_text_is_in_the_checkpoint_and_is_where_the_rows_go_on(bench: Bench) -> None:
    cfg, run = bench.run("place", train__steps=3)
    train(alone(), cfg, run)
    manifest = json.loads((run.checkpoints / "step-000003" / "manifest.json").read_text())
    assert manifest["place"].keys() == {"epoch", "window", "file", "offset", "document", "token", "row"}
    longer = bench.config(train__steps=5)
    trainer = Trainer(longer, run, alone(), bench.root / "cache", lambda event: None)
    fresh = Trainer(longer, make_run(bench.root, longer, "fresh"), alone(), bench.root / "cache", lambda event: None)
    try:
        for step in (3, 4):
            ours, theirs = (t.loader.micro_batches(step)[0].examples[0]["tokens"] for t in (trainer, fresh))
            assert torch.equal(ours, theirs)
    finally:
        trainer.close()
        fresh.close()


def test_a_run_that_goes_on_with_another_batch_size_takes_the_next_rows_and_numbers(bench: Bench) -> None:
    cfg, run = bench.run("batches", train__steps=3)
    train(alone(), cfg, run)
    found: list[tuple[int, torch.Tensor]] = []
    straight: list[tuple[int, torch.Tensor]] = []
    for size, into, steps, at in ((8, found, (3,), run), (4, straight, (3, 4), make_run(bench.root, cfg, "fours"))):
        longer = bench.config(train__batch_size=size, train__micro_batch=8)
        trainer = Trainer(longer, at, alone(), bench.root / "cache", lambda event: None)
        for step in steps:
            (part,) = trainer.loader.micro_batches(step)
            into += [(index, one["tokens"]) for index, one in zip(part.indices, part.examples, strict=True)]
        trainer.close()
    assert [index for index, _ in found] == [index for index, _ in straight] == list(range(12, 20))
    assert all(torch.equal(row, other) for (_, row), (_, other) in zip(found, straight, strict=True))


def test_a_step_whose_rows_hold_nothing_that_is_learned_changes_no_weight(bench: Bench, tmp_path: Path) -> None:
    """As those of split packing from the middle of a long prompt."""
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "p" * 200, "completion": "c"}) + "\n", encoding="utf-8")
    changes = {"data__path": str(file), "data__validation": str(file), "data__packing": "split", "data__length": 64}
    found = bench.trained_here("nothing", **changes, train__batch_size=1, train__steps=4, optim__weight_decay=0)
    losses = [event.loss for event in steps_of(found.events)]
    assert [loss > 0 for loss in losses] == [False, False, False, True]
    assert losses[:3] == [0.0] * 3


def test_other_text_is_told_and_read_from_its_next_epoch(bench: Bench, tmp_path: Path) -> None:
    text = make_text(tmp_path / "text")
    cfg = text_config(text, train__steps=2)
    run = make_run(tmp_path, cfg, "run")
    train(alone(), cfg, run)
    (text / "c.txt").write_text("And a third file.")
    found = train(alone(), text_config(text, train__steps=4), run)
    assert [event.message for event in found.events if isinstance(event, WarningEvent)] == [
        "the text files have changed since the checkpoint: training continues with their next epoch"
    ]
    assert len(found.losses) == 2


def ranks_with_other_text(world: World, cfg: RunConfig, other: RunConfig, run: RunDir) -> str:
    try:
        Trainer(other if world.rank else cfg, run, world, run.path.parent / "cache", lambda event: None)
    except InputError as error:
        return str(error)
    return ""


def test_ranks_that_find_other_text_refuse_to_train(bench: Bench, tmp_path: Path) -> None:
    other = bench.config(data__path=str(make_text(tmp_path / "text", count=39)), parallel__devices=2)
    found = run_ranks(
        2,
        ranks_with_other_text,
        *bench.run("other", parallel__devices=2)[:1],
        other,
        make_run(bench.root, other, "other-run"),
    )
    assert found[0] == ("data.path: b.jsonl differs between rank 1 and rank 0; give every machine the same files")


# What a run tells


def test_perplexity_and_speed_are_those_of_tokens_and_samples_are_texts(bench: Bench, tmp_path: Path) -> None:
    held = make_text(tmp_path / "held", count=9)
    changes = {"data__validation": str(held), "data__validation_every": 2, "train__steps": 2}
    samples = {"sample__every": 2, "sample__prompts": ["All the ", ""], "sample__tokens": 12}
    cfg, run = bench.run("logged", **changes, **samples)
    found = train(alone(), cfg, run)
    validation = next(event for event in found.events if isinstance(event, ValidationEvent))
    assert validation.perplexity == math.exp(validation.loss)
    assert steps_of(found.events)[0].speed[1] == "tokens"
    assert math.isnan(steps_of(found.events)[0].images_per_second)
    drawn = [event for event in found.events if isinstance(event, SampleEvent)]
    assert [event.step for event in drawn] == [0, 0, 2, 2]
    assert all((run.path / event.path).read_text(encoding="utf-8") == event.text for event in drawn)
    assert drawn[0].text.startswith("All the ")


def test_the_validation_loss_is_the_mean_over_all_tokens_on_any_number_of_ranks(bench: Bench, tmp_path: Path) -> None:
    held = make_text(tmp_path / "held", count=9)
    changes = {"data__validation": str(held), "data__validation_every": 1, "train__steps": 1}
    losses = [
        next(e.loss for e in bench.trained(f"held-{ranks}", ranks, **changes).events if isinstance(e, ValidationEvent))
        for ranks in (1, 2)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)


# Read by other programs


def test_an_exported_model_is_the_trained_one_in_transformers(bench: Bench) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    cfg, run = bench.run("whole", adapter__type="none", export__dtype="fp32")
    expected = trained_logits(cfg, run)
    folder = export(cfg, run, bench.root / "cache")[0].path
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(model), expected, atol=TOLERANCE, rtol=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert AutoTokenizer.from_pretrained(folder).decode([35, 0]) == "C<|endoftext|>"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_config_of_an_exported_model_says_how_its_weights_are_stored(bench: Bench, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    cfg, run = bench.run(f"whole-{dtype}", adapter__type="none", export__dtype=dtype, train__steps=1)
    train(alone(), cfg, run)
    folder = export(cfg, run, bench.root / "cache")[0].path
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize(
    "adapter", ["lora", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dora", "loha", "lokr"))]
)
def test_an_exported_adapter_is_the_trained_one_in_peft(bench: Bench, adapter: str) -> None:
    from peft import AutoPeftModelForCausalLM

    cfg, run = bench.run(f"adapter-{adapter}", adapter__type=adapter, export__dtype="fp32", optim__lr=1e-2)
    expected = trained_logits(cfg, run)
    folder = export(cfg, run, bench.root / "cache")[0].path
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "adapter",
    [{"type": "lora", "rank": 4}, {"type": "boft"}, pytest.param({"type": "diag-oft"}, marks=pytest.mark.slow)],
)
def test_a_merged_model_is_the_trained_one_in_transformers(bench: Bench, adapter: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    changes = {"export__what": "merged", "export__dtype": "fp32", "optim__lr": 1e-2}
    cfg, run = bench.run(f"merged-{adapter['type']}", adapter=adapter, **changes)
    expected = trained_logits(cfg, run)
    folder = export(cfg, run, bench.root / "cache")[0].path
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder)), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"adapter": {"type": "boft"}},
            "export.format: peft cannot carry a boft adapter; use export.what: merged",
        ),
        (
            {"export__format": "comfyui"},
            "export.format: comfyui is for programs that do not support this model; use auto or peft, which does",
        ),
        (
            {"adapter__type": "none", "export__format": "single_file"},
            "export.format: models of causal_lm have no single_file; use auto",
        ),
        (
            {"data__length": 5000},
            "data.length: 5000 tokens, but the model was made for 4096 at most; lower it",
        ),
        (
            {"data__resolution": 512},
            "data.resolution: has no effect for causal_lm, which is trained on text; leave it out",
        ),
        (
            {"data__validation": 3},
            "data.validation: 3 is for images; name a file or folder of text that is not trained on",
        ),
        (
            {"model__options": {"blocks": "Block"}},
            "model.options.blocks: 'Block' is not one of ",
        ),
    ],
)
def test_what_does_not_go_with_a_language_model_is_refused(
    bench: Bench, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    cfg = bench.config(**changes)
    with pytest.raises(InputError) as caught:
        Trainer(cfg, make_run(tmp_path, cfg, "run"), alone(), bench.root / "cache", lambda event: None)
    assert str(caught.value).startswith(message)


def test_an_adapter_on_a_head_that_is_also_the_embedding_is_refused(bench: Bench, tmp_path: Path) -> None:
    cfg = bench.config(adapter__targets=["lm_head"])
    with pytest.raises(InputError) as caught:
        Trainer(cfg, make_run(tmp_path, cfg, "run"), alone(), bench.root / "cache", lambda event: None)
    assert "language_model.model.embed_tokens shares its weight" in str(caught.value)


# Folders and random weights


def test_random_weights_in_the_sizes_of_a_folder_are_trained_from(bench: Bench, tmp_path: Path) -> None:
    tiny = families.make(bench.config(), bench.root / "cache").folder
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny / name, base / name)
    found = bench.trained_here("random", model__path="random", model__base=str(base), adapter__type="none")
    assert found.losses[-1] < found.losses[0]


def test_random_weights_need_sizes(bench: Bench) -> None:
    with pytest.raises(InputError, match=r"random needs the sizes of the model; set model.options.architecture"):
        bench.trained_here("no-sizes", model__path="random")


# From nothing


@pytest.mark.slow
def test_a_tiny_model_learns_plain_text_to_less_than_half_of_its_bytes_entropy(tmp_path: Path) -> None:
    found = learn(tmp_path)
    assert found.loss < found.entropy / 2
    assert found.held_out < found.entropy
    assert found.seconds < 3 * 60
