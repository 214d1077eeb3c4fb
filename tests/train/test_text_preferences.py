"""Preferences between answers: DPO as the paper and peft compute it, on any number of ranks, in rows of whole pairs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.bench import TOLERANCE, Bench
from tests.benchmarks.preference_time import learn
from tests.distributed import run_ranks
from tests.runs import alone, make_run, make_text, run_config, step_with_gradients, steps_of
from trainer.adapters import initial_value, switched_off
from trainer.checkpoint.config_changes import changes, refused
from trainer.config.schema import RunConfig
from trainer.data.text.text_files import check_preferences
from trainer.data.text.text_source import encoder_of
from trainer.distributed.world import World
from trainer.models import families
from trainer.models.objectives.preferences import Answers
from trainer.run.events import ValidationEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.train.loop import Trainer

BETA = 0.5
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "qlora": {"quantize__format": "nf4"},
    "dora": {"adapter__type": "dora"},
}


def pairs(count: int) -> list[dict[str, Any]]:
    """Questions about numbers, of which the right answer is chosen; every third one is a conversation."""
    rows: list[dict[str, Any]] = []
    for i in range(count):
        question, right, wrong = f"Is {i} even?", "yes, it is" if i % 2 == 0 else "no", f"maybe {i * i}"
        if i % 3 == 2:
            before = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
            asked = [*before, {"role": "user", "content": question}]
            chosen, rejected = ([{"role": "assistant", "content": answer}] for answer in (right, wrong))
            rows.append({"prompt": asked, "chosen": chosen, "rejected": rejected})
        else:
            rows.append({"prompt": f"{question} ", "chosen": right, "rejected": wrong})
    return rows


def said(*turns: str) -> list[dict[str, str]]:
    """Messages of roles and contents in turn."""
    return [{"role": role, "content": content} for role, content in zip(turns[::2], turns[1::2], strict=True)]


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def pairs_config(data: Path, **changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"family": "causal_lm"},
        "data": {"path": str(data), "length": 256, "shuffle_window": 16},
        "objective": {"dpo_beta": BETA},
    }
    return run_config(data, **base | changes)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("text-preferences")
    return Bench(root, write_rows(root / "pairs.jsonl", pairs(40)), pairs_config, KINDS)


def reference_model(trainer: Trainer) -> Any:
    """The same model with the same LoRA, by transformers and peft alone."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(trainer.family.folder, dtype=torch.float32, attn_implementation="eager")
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=4, target_modules=layers))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            ours = name.removeprefix("base_model.model.")
            parameter.data = initial_value(f"language_model.{ours}", parameter.shape, trainer.cfg.train.seed)
    return model.eval()


def score(model: Any, ids: list[int], num_prompt: int) -> Tensor:
    """Log-probability of the tokens after the prompt, one document alone."""
    tokens = torch.tensor(ids)
    logits = model(input_ids=tokens[None]).logits[0, :-1]
    found = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return found[num_prompt - 1 :].sum()


def loss_of_the_paper(model: Any, pair: dict[str, Any], beta: float) -> Tensor:
    """arXiv 2305.18290, eq. 7, of one pair given as lists of ids."""
    with torch.no_grad(), model.disable_adapter():
        before = [score(model, pair[key], pair["num_prompt"]) for key in ("chosen", "rejected")]
    now = [score(model, pair[key], pair["num_prompt"]) for key in ("chosen", "rejected")]
    ratio = (now[0] - before[0]) - (now[1] - before[1])
    return -torch.log(torch.sigmoid(beta * ratio))


def tokenized(trainer: Trainer, row: dict[str, Any]) -> dict[str, Any]:
    """The ids of a pair of strings: prompt and answer as bytes, and the end of the text."""
    tokenizer = trainer.family.tokenizer
    prompt = tokenizer(row["prompt"])["input_ids"]
    answers = {
        key: [*prompt, *tokenizer(row[key])["input_ids"], tokenizer.eos_token_id] for key in ("chosen", "rejected")
    }
    return answers | {"num_prompt": len(prompt)}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
def test_three_steps_are_those_of_a_loop_over_single_answers_in_transformers_and_peft(tmp_path: Path) -> None:
    """The own loop gets each step's pairs from the rows of ours, but tokens, scores, loss and optimizer are its own."""
    rows = [row for row in pairs(60) if isinstance(row["prompt"], str)]
    changes = {"train__batch_size": 2, "data__length": 160, "optim__clip_norm": None, "optim__lr": 1e-3}
    cfg = pairs_config(write_rows(tmp_path / "pairs.jsonl", rows), **changes)
    trainer = Trainer(cfg, make_run(tmp_path, cfg, "run"), alone(), tmp_path / "cache", lambda event: None)
    model = reference_model(trainer)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    by_chosen = {tuple(one["chosen"]): one for one in (tokenized(trainer, row) for row in rows)}
    try:
        for _ in range(3):
            parts = trainer.loader.micro_batches(trainer.step)
            found = [pair for part in parts for row in part.examples for pair in pairs_in(row)]
            losses = [loss_of_the_paper(model, by_chosen[pair[0]], BETA) for pair in found]
            assert all(list(other) == by_chosen[own]["rejected"] for own, other in found)
            assert len(found) > cfg.train.batch_size
            expected = torch.stack(losses).mean()
            optimizer.zero_grad()
            expected.backward()  # type: ignore[no-untyped-call]
            numbers, seen = step_with_gradients(trainer)
            assert numbers.weight == len(found)
            assert numbers.loss == pytest.approx(float(expected.detach()), abs=TOLERANCE)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    ours = seen[f"language_model.{name.removeprefix('base_model.model.')}"]
                    torch.testing.assert_close(ours, parameter.grad, atol=TOLERANCE, rtol=0)
            optimizer.step()
    finally:
        trainer.close()


def pairs_in(row: dict[str, Tensor]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(tokens of the chosen answer, of the rejected one) of each pair of a row."""
    documents = row["documents"]
    count = int(documents.max()) + 1
    tokens = [tuple(row["tokens"][documents == number].tolist()) for number in range(count)]
    return list(zip(tokens[::2], tokens[1::2], strict=True))


def test_the_first_step_costs_log_2_and_the_chosen_answers_win_after_some(bench: Bench) -> None:
    found = bench.trained_here("wins", train__steps=6, train__batch_size=2, optim__lr=1e-2)
    first, *_, last = steps_of(found.events)
    assert first.loss == pytest.approx(math.log(2), abs=1e-7)
    assert first.metrics == {"margins": 0.0, "accuracies": 0.0}
    assert last.metrics["accuracies"] == 1.0
    assert last.loss < 0.5 * math.log(2)
    assert last.losses == {}
    assert last.speed[1] == "tokens"


def reference_losses(world: World, cfg: RunConfig, run: RunDir) -> tuple[list[float], list[float]]:
    """The loss of each token of a rank's first row, before and after two steps, with the adapter switched off; and with
    it at the end."""
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    batch = {**trainer.family.collate(trainer.loader.micro_batches(0)[0].examples[:1]), "weight": torch.ones(1)}
    found: list[Tensor] = []

    def note(losses: Tensor) -> Tensor:
        found.append(losses)
        return losses

    with torch.no_grad():
        for steps in (2, 0):
            with switched_off(trainer.model):
                trainer.family.weighted_loss(trainer.model, batch, note)
            with torch.enable_grad():
                for _ in range(steps):
                    trainer.train_step()
        trainer.family.weighted_loss(trainer.model, batch, note)
    trainer.close()
    assert torch.equal(found[0], found[1])
    return found[1].tolist(), found[2].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_of_a_sharded_model_stays_its_base_bit_for_bit(bench: Bench, kind: str) -> None:
    changes = {"parallel__devices": 2, "parallel__strategy": "full", "optim__lr": 1e-2}
    for base, trained in run_ranks(2, reference_losses, *bench.run(f"base-{kind}", **KINDS[kind] | changes)):
        assert max(abs(one - other) for one, other in zip(base, trained, strict=True)) > 1e-3


def test_margins_and_accuracies_of_held_out_pairs_are_logged_and_no_perplexity(bench: Bench, tmp_path: Path) -> None:
    held = write_rows(tmp_path / "held.jsonl", pairs(7))
    found = bench.trained_here("held", data__validation=str(held), data__validation_every=1, train__steps=1)
    (event,) = (event for event in found.events if isinstance(event, ValidationEvent))
    assert event.metrics.keys() == {"margins", "accuracies"}
    assert event.metrics["accuracies"] * 7 == pytest.approx(round(event.metrics["accuracies"] * 7))
    assert math.isnan(event.perplexity)


# Data


def scores_of(trainer: Trainer, row: dict[str, Tensor]) -> Tensor:
    """The log-probability of each answer of a row."""
    batch = {**trainer.family.collate([row]), "weight": torch.ones(1)}
    found: list[Tensor] = []

    def note(losses: Tensor) -> Tensor:
        found.append(Answers(batch).scores(losses)[0])
        return losses

    trainer.family.weighted_loss(trainer.model, batch, note)
    return found[0]


def test_a_row_holds_whole_pairs_whose_answers_see_neither_each_other_nor_other_pairs(bench: Bench) -> None:
    cfg, run = bench.run("rows")
    trainer = Trainer(cfg, run, alone(), bench.root / "cache", lambda event: None)
    row = trainer.loader.micro_batches(0)[0].examples[0]
    trainer.close()
    assert len(pairs_in(row)) > 2
    scores = scores_of(trainer, row)
    for number in range(2 * len(pairs_in(row))):
        alone_there = {key: tensor[row["documents"] == number] for key, tensor in row.items()}
        alone_there["documents"] = torch.zeros_like(alone_there["documents"])
        torch.testing.assert_close(scores[number], scores_of(trainer, alone_there)[0], atol=1e-5, rtol=0)
    assert scores[2 * len(pairs_in(row)) :].eq(0).all()


def encoded(family: Any, row: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The texts in the loss of the chosen and of the rejected answer."""
    document = encoder_of(family, compares=True).row(row, lambda: "row")
    halves = slice(0, document.second), slice(document.second, None)
    return tuple(  # type: ignore[return-value]
        [family.tokenizer.decode(document.tokens[half][document.loss_mask[half]])] for half in halves
    )


@pytest.mark.parametrize(
    ("row", "in_loss"),
    [
        ({"prompt": "1 + 1 = ", "chosen": "2", "rejected": "three"}, ("2<|endoftext|>", "three<|endoftext|>")),
        ({"prompt": "1 + 1 = ", "chosen": "two", "rejected": "three"}, ("wo<|endoftext|>", "hree<|endoftext|>")),
        ({"prompt": "1", "chosen": "23", "rejected": "2"}, ("3<|endoftext|>", "<|endoftext|>")),
        ({"chosen": "yes", "rejected": "no"}, ("es<|endoftext|>", "o<|endoftext|>")),
        (
            {"chosen": said("user", "Q", "assistant", "A"), "rejected": said("user", "Q", "assistant", "B")},
            None,
        ),
    ],
)
def test_an_answer_is_learned_from_where_the_two_differ(
    bench: Bench, row: dict[str, Any], in_loss: tuple[str, str] | None
) -> None:
    family = families.make(bench.config(), bench.root / "cache")
    chosen, rejected = encoded(family, row)
    if in_loss is None:
        assert chosen[0][0] == "A"
        assert rejected[0][0] == "B"
        assert chosen[0][1:] == rejected[0][1:] != ""
    else:
        assert (chosen[0], rejected[0]) == in_loss


def test_a_prompt_as_text_is_the_message_of_a_user(bench: Bench) -> None:
    family = families.make(bench.config(), bench.root / "cache")
    answers = {"chosen": said("assistant", "A"), "rejected": said("assistant", "B")}
    as_text, as_messages, inside, twice, listed, *others = (
        encoder_of(family, compares=True).row(row, lambda: "row").tokens.tolist()
        for row in (
            {"prompt": "Q"} | answers,
            {"prompt": said("user", "Q")} | answers,
            {key: said("user", "Q") + answer for key, answer in answers.items()},
            # As in published datasets, whose answers begin with the prompt.
            {"prompt": " Q"} | {key: said("user", "Q") + answer for key, answer in answers.items()},
            {"prompt": said("user", "Q")} | {key: said("user", "Q") + answer for key, answer in answers.items()},
            # Other forms: as in ShareGPT, with a question, with a prompt of messages and answers of text.
            {"conversations": [{"from": "human", "value": "Q"}]}
            | {key: {"from": "gpt", "value": answer[0]["content"]} for key, answer in answers.items()},
            {"question": "Q", "chosen": "A", "rejected": "B"},
            {"prompt": said("user", "Q"), "chosen": "A", "rejected": "B"},
        )
    )
    assert as_text == as_messages == inside == twice == listed
    assert others == [as_text] * 3


def test_pairs_that_are_longer_than_a_row_are_left_out_and_counted(bench: Bench, tmp_path: Path) -> None:
    long = [{"prompt": "?", "chosen": "a" * 200, "rejected": f"b{i}"} for i in range(12)]
    fitting = [row for row in pairs(6) if isinstance(row["prompt"], str)]
    file = write_rows(tmp_path / "pairs.jsonl", [*fitting, *long])
    found = bench.trained_here("long", data__path=str(file), train__steps=3, train__batch_size=1, data__length=160)
    messages = [event.message for event in found.events if isinstance(event, WarningEvent)]
    assert messages[0].endswith("this document is left out: longer than data.length 160")
    assert "12 documents are left out of each epoch: longer than data.length 160" in messages


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            '"chosen" and "rejected" are equal, so that neither is preferred; remove the row',
        ),
        ({"prompt": "a", "chosen": 2, "rejected": 3}, '"chosen" is neither a string nor a list of messages'),
        ({"prompt": 1, "chosen": "b", "rejected": "c"}, '"prompt" is neither a string nor a list of messages'),
        (
            {"prompt": "a", "chosen": [], "rejected": said("assistant", "c")},
            '"chosen" has no message of the assistant that is in the loss',
        ),
        (
            {"prompt": "a", "chosen": [said("assistant", "b")[0] | {"weight": 0}], "rejected": said("assistant", "c")},
            '"chosen" has no message of the assistant that is in the loss',
        ),
        (
            {"chosen": said("user", "a", "assistant", "b"), "rejected": said("user", "x", "assistant", "c")},
            '"chosen" and "rejected" differ in message 1, which is not the answer of the assistant in both; give both '
            "the same messages before it",
        ),
        (
            {"prompt": "a", "chosen": said("user", "b", "assistant", "c"), "rejected": said("assistant", "d")},
            '"prompt" is not among the messages before the answer in "chosen"; leave out either of them',
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": said("assistant", "c")},
            '"chosen" and "rejected" must both be strings, or both lists of messages',
        ),
        (
            {
                "chosen": said("user", "a", "assistant", "b"),
                "rejected": said("user", "a", "assistant", "b", "user", "c", "assistant", "d"),
            },
            'the other answer begins with all that is in the loss of "chosen"; remove the row',
        ),
        (
            {"text": "a later row without two answers"},
            'not a pair, as the rows before are: no "chosen" and "rejected"; remove it, or complete it',
        ),
    ],
)
def test_a_row_that_is_no_pair_is_named(bench: Bench, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    file = write_rows(tmp_path / "pairs.jsonl", [*pairs(1), row])
    with pytest.raises(InputError) as caught:
        bench.trained_here(f"wrong-{tmp_path.name}", data__path=str(file))
    assert str(caught.value) == f"{file}:2: {message}"


def test_other_text_is_refused_with_a_beta_and_pairs_without_one(bench: Bench, tmp_path: Path) -> None:
    text = make_text(tmp_path / "text")
    with pytest.raises(InputError) as caught:
        bench.trained_here("no-pairs", data__path=str(text))
    assert str(caught.value) == (
        f"{text / 'a.txt'}: holds no pairs, which objective.dpo_beta compares; give .jsonl or .parquet files whose "
        'rows have "prompt", "chosen" and "rejected", or leave objective.dpo_beta out'
    )
    with pytest.raises(InputError) as caught:
        bench.trained_here("no-beta", objective__dpo_beta=None)
    assert str(caught.value) == (
        f'{bench.data}: its rows have "chosen" and "rejected", which only preference training reads; set '
        "objective.dpo_beta, for example to 0.1"
    )


def test_pairs_with_a_conversation_train_on_it_without_a_beta(bench: Bench, tmp_path: Path) -> None:
    """As the published splits for supervised training, whose rows have `messages` next to the two answers."""
    talk = said("user", "Q", "assistant", "A")
    row = {"prompt": "Q", "chosen": talk, "rejected": said("user", "Q", "assistant", "B"), "messages": talk}
    file = write_rows(tmp_path / "pairs.jsonl", [row])
    check_preferences([file], compares=False)
    encoder = encoder_of(families.make(bench.config(), bench.root / "cache"))  # type: ignore[arg-type]
    found, expected = (encoder.row(one, lambda: "row") for one in (row, {"messages": talk}))
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.loss_mask.tolist() == expected.loss_mask.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__packing": "split"}, "data.packing: split cannot be combined with objective.dpo_beta, which compares"),
        ({"data__too_long": "cut"}, "data.too_long: cut cannot be combined with objective.dpo_beta, which compares"),
        ({"adapter__type": "none"}, "objective.dpo_beta: compares the model with itself without its adapter, but"),
        ({"adapter__modules_to_save": ["lm_head"]}, "adapter.modules_to_save: would change the model that"),
        ({"adapter__init": "pissa"}, "adapter.init: pissa takes a part of the model that objective.dpo_beta compares"),
        ({"train__neftune_alpha": 5}, "train.neftune_alpha: would also disturb the model that objective.dpo_beta"),
    ],
)
def test_settings_that_cannot_be_combined_are_refused(bench: Bench, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        bench.config(**changes)
    assert message in str(caught.value)


def test_a_run_keeps_its_objective_when_it_goes_on(bench: Bench) -> None:
    plain, pairs_of = (cfg.model_dump(mode="json") for cfg in (bench.config(objective__dpo_beta=None), bench.config()))
    other = bench.config(objective__dpo_beta=0.1).model_dump(mode="json")
    assert [problem.field for problem in refused(changes(plain, pairs_of), 5)] == ["objective.dpo_beta"]
    assert list(refused(changes(pairs_of, other), 5)) == []


@pytest.mark.slow
def test_after_a_minute_a_tiny_model_prefers_english_in_nine_of_ten_held_out_pairs(tmp_path: Path) -> None:
    found = learn(tmp_path)
    assert found.pairs > 50
    assert found.accuracy >= 0.9
