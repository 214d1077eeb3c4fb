"""Preferences between answers: DPO as the paper and peft compute it, on any number of ranks, in rows of whole pairs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.bench import Bench
from tests.distributed import run_ranks
from tests.runs import Outcome, alone, difference, make_run, make_text, run_config, steps_of, train
from trainer.adapters import initial_value
from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.models import families
from trainer.run.events import AnyEvent, ValidationEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.train.loop import Agreed, Trainer

TOLERANCE = 1e-6
BETA = 0.5
LENGTH = 96
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


def step_with_gradients(trainer: Trainer) -> tuple[Agreed, dict[str, Tensor]]:
    """Do a step, and return the gradients that the optimizer was given."""
    seen: dict[str, Tensor] = {}

    def note(*_: object) -> None:
        seen.update({name: p.grad.clone() for name, p in trainer.trainables.items() if p.grad is not None})

    hook = trainer.optimizer.register_step_pre_hook(note)
    agreed = trainer.train_step()
    hook.remove()
    return agreed, seen


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
def test_three_steps_are_those_of_a_loop_over_single_answers_in_transformers_and_peft(tmp_path: Path) -> None:
    """The own loop gets each step's pairs from the rows of ours, but tokens, scores, loss and optimizer are its own."""
    rows = [row for row in pairs(60) if isinstance(row["prompt"], str)]
    cfg = pairs_config(write_rows(tmp_path / "pairs.jsonl", rows), optim__clip_norm=None, optim__lr=1e-3)
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
            assert len(found) > 4 * len(parts[0].examples)
            expected = torch.stack(losses).mean()
            optimizer.zero_grad()
            expected.backward()  # type: ignore[no-untyped-call]
            agreed, seen = step_with_gradients(trainer)
            assert agreed.weight == len(found)
            assert agreed.loss == pytest.approx(float(expected.detach()), abs=TOLERANCE)
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
