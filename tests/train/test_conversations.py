"""Runs on conversations: what is in the loss, on any number of ranks, continued, and sampled through the template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.bench import Bench
from tests.distributed import run_ranks
from tests.runs import alone, make_run, text_config, train
from trainer.config.schema import RunConfig
from trainer.data.text.text_source import TextSource
from trainer.distributed.world import World
from trainer.export.export import export
from trainer.models import families
from trainer.run.events import AnyEvent, SampleEvent, ValidationEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.train.loop import Trainer

TALK = {"chat": {}}


def talk(number: int) -> list[dict[str, str]]:
    """A conversation of one turn or two."""
    turns = [
        {"role": "user", "content": f"{number} + 1"},
        {"role": "assistant", "content": f"It is {number + 1}."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    return turns[: 2 + 2 * (number % 2)]


def make_talks(folder: Path, count: int = 24) -> Path:
    """Conversations in a .jsonl and a .parquet, and plain text in a folder of its own."""
    (folder / "talks").mkdir(parents=True)
    lines = "".join(f"{json.dumps({'messages': talk(number)})}\n" for number in range(count // 2))
    (folder / "talks" / "a.jsonl").write_text(lines, encoding="utf-8")
    rows = [{"messages": talk(number)} for number in range(count // 2, count)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "talks" / "b.parquet", row_group_size=5)
    (folder / "texts").mkdir()
    texts = "".join(f"{json.dumps({'text': f'Number {number} is a number.'})}\n" for number in range(count))
    (folder / "texts" / "c.jsonl").write_text(texts, encoding="utf-8")
    return folder


def talk_config(root: Path, **changes: Any) -> RunConfig:
    mixture = [{"path": str(root / "texts"), "weight": 0.5}]
    base = {
        "data__path": str(root / "talks"),
        "data__folders": mixture,
        "data__length": 256,
        "data__shuffle_window": 16,
    }
    return text_config(root, **base | {"train__micro_batch": 2} | changes)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("talks")
    return Bench(root, make_talks(root / "data"), talk_config, TALK)


def rows_at(trainer: Trainer, step: int) -> list[torch.Tensor]:
    return [one["tokens"] for part in trainer.loader.micro_batches(step) for one in part.examples]


def rows_of_a_part(world: World, cfg: RunConfig, run: RunDir, steps: int) -> list[tuple[int, bytes]]:
    """Train to a step and save. Returns the rows of each step from where the run began, of this rank."""
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    found = []
    while trainer.step < steps:
        rows = rows_at(trainer, trainer.step)
        found += [(trainer.step, row.numpy().tobytes()) for row in rows]
        trainer.train_step()
    trainer._save_last()
    trainer.close()
    return found


@pytest.mark.slow
def test_a_mixture_of_conversations_and_texts_goes_on_bit_for_bit_at_any_step_on_any_number_of_ranks(
    bench: Bench,
) -> None:
    cfg, run = bench.run("straight", train__steps=9)
    straight = rows_of_a_part(alone(), cfg, run, 9)
    parts = make_run(bench.root, cfg, "parts")
    found: list[tuple[int, bytes]] = []
    for ranks, until in ((1, 2), (2, 5), (1, 9)):
        own = bench.config(train__steps=9, parallel__devices=ranks, parallel__strategy="full")
        of_ranks = run_ranks(ranks, rows_of_a_part, own, parts, until)
        found += sorted((row for rows in of_ranks for row in rows), key=lambda row: row[0])
    assert found == straight


def test_only_what_the_assistant_says_is_learned(bench: Bench) -> None:
    cfg, run = bench.run("learned", data__folders=[], data__chat_template="chatml", data__system="Add.")
    trainer = Trainer(cfg, run, alone(), bench.root / "cache", lambda event: None)
    example = trainer.loader.micro_batches(0)[0].examples[0]
    trainer.close()
    tokenizer = trainer.family.tokenizer  # type: ignore[attr-defined]
    first = example["documents"] == 0
    text = tokenizer.decode(example["tokens"][first].tolist())
    in_loss = tokenizer.decode(example["tokens"][first & example["loss_mask"]].tolist())
    assert text.startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n")
    said = [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>assistant\n")[1:]]
    assert in_loss == "".join(f"{part}<|im_end|>" for part in said)
    assert "It is" in in_loss


# Samples


@pytest.mark.parametrize(("chat", "is_answer"), [("auto", True), ("on", True), ("off", False)])
def test_samples_of_a_run_on_conversations_are_answers(bench: Bench, chat: str, is_answer: bool) -> None:
    samples = {"sample__every": 1, "sample__prompts": ["1 + 1"], "sample__tokens": 8, "sample__chat": chat}
    cfg, run = bench.run(f"samples-{chat}", train__steps=1, **samples)
    trainer = Trainer(cfg, run, alone(), bench.root / "cache", (events := []).append)
    asked: list[str] = []
    continued = trainer.family._continued  # type: ignore[attr-defined]

    def listening(model: Any, ids: list[int], *others: Any) -> str:
        asked.append(trainer.family.tokenizer.decode(ids))  # type: ignore[attr-defined]
        return str(continued(model, ids, *others))

    trainer.family._continued = listening  # type: ignore[attr-defined]
    trainer.generate_samples()
    trainer.close()
    (drawn,) = [event for event in events if isinstance(event, SampleEvent)]
    assert asked == ["<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n" if is_answer else "1 + 1"]
    assert (run.path / drawn.path).read_text(encoding="utf-8") == drawn.text
    assert drawn.text.startswith("1 + 1\n\n" if is_answer else "1 + 1")


def test_an_exported_model_brings_the_chat_template_it_was_trained_with(bench: Bench) -> None:
    from transformers import AutoTokenizer

    changes = {"adapter__type": "none", "data__chat_template": "llama-3", "data__length": 512, "train__steps": 1}
    cfg, run = bench.run("exported", **changes)
    train(alone(), cfg, run)
    tokenizer = AutoTokenizer.from_pretrained(export(cfg, run, bench.root / "cache")[0].path)
    text = tokenizer.apply_chat_template(talk(0), tokenize=False)
    assert text == (
        "<|start_header_id|>user<|end_header_id|>\n\n0 + 1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nIt is 1.<|eot_id|>"
    )
    assert "{% generation %}" not in tokenizer.chat_template


# What is left out


def warnings_of(events: list[AnyEvent]) -> list[str]:
    """The warnings after the first one: the tiny tokenizer has no token for the end that its template writes."""
    first, *others = (event.message for event in events if isinstance(event, WarningEvent))
    assert first.startswith("the tokenizer's chat template ends an answer with '<|im_end|>', which is not a token")
    return others


def test_conversations_that_are_left_out_are_warnings_of_the_run(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": talk(n) * (9 if n < 12 else 1)}) + "\n" for n in range(24)), encoding="utf-8"
    )
    cfg = text_config(tmp_path / "a.jsonl", data__length=200, data__shuffle_window=64, train__steps=6)
    run = make_run(tmp_path, cfg, "run")
    found = warnings_of(train(alone(), cfg, run).events)
    assert [message.partition("a.jsonl:")[2][2:].lstrip(":0123456789 ") or message for message in found] == [
        "this document is left out: longer than data.length 200",
        "10 documents are left out so far: longer than data.length 200",
        "12 documents are left out of each epoch: longer than data.length 200",
    ]


def test_texts_that_the_template_leaves_out_are_counted_warnings_of_the_run(bench: Bench, tmp_path: Path) -> None:
    turns = [[talk(n)[0] | ({"name": "Ada"} if n > 2 else {}), *talk(n)[1:]] for n in range(15)]
    turns[9][1] = turns[9][1] | {"source": "a forum"}
    lines = [json.dumps({"messages": one}) for one in turns]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(lines[5], encoding="utf-8")
    held_out = {"data__validation": str(tmp_path / "b.jsonl"), "data__shuffle_window": 1, "train__steps": 12}
    cfg = text_config(tmp_path / "a.jsonl", data__length=200, train__epochs=None, **held_out)
    found = warnings_of(train(alone(), cfg, make_run(tmp_path, cfg, "run")).events)
    name = 'the chat template does not write "name" of messages of the user'
    source = 'the chat template does not write "source" of messages of the assistant'
    assert found[0] == f"{tmp_path}/b.jsonl:1: {name}"
    first = [message for message in found[1:] if message.endswith(name)]
    assert first[1:] == [f"10 conversations so far: {name}", f"12 conversations of each epoch: {name}"]
    assert first[0] in [f"{tmp_path}/a.jsonl:{line}: {name}" for line in range(4, 16)]
    assert [message for message in found if message.endswith(source)] == [
        f"{tmp_path}/a.jsonl:10: {source}",
        f"1 conversations of each epoch: {source}",
    ]


def test_held_out_conversations_are_packed_like_those_that_are_trained(bench: Bench, tmp_path: Path) -> None:
    changes = {"data__validation": str(bench.data / "talks"), "data__validation_every": 1, "train__steps": 1}
    cfg, run = bench.run("held-out", **changes)
    found = train(alone(), cfg, run)
    assert len([event for event in found.events if isinstance(event, ValidationEvent)]) == 1
    source = TextSource(cfg, families.make(cfg, bench.root / "cache"), alone())  # type: ignore[arg-type]
    in_loss = sum(int(source.held_out(index)["loss_mask"].sum()) for index in range(source.num_held_out))
    said = [m["content"] for number in range(24) for m in talk(number) if m["role"] == "assistant"]
    assert in_loss == sum(len(text) + len("<|im_end|>") for text in said)


def test_a_config_whose_conversations_cannot_be_read_is_refused(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk(1)}) + "\n", encoding="utf-8")
    for changes, message in (
        ({"data__length": 16}, "every document is left out (1 longer than data.length 16"),
        ({"data__chat_template": "alpaca"}, f"{tmp_path}/a.jsonl:1: data.chat_template: 'alpaca' is not one of "),
    ):
        cfg = text_config(tmp_path / "a.jsonl", **changes)
        with pytest.raises(InputError) as caught:
            train(alone(), cfg, make_run(tmp_path, cfg, next(iter(changes))))
        assert message in str(caught.value)


def test_an_empty_name_of_a_template_is_none(bench: Bench, tmp_path: Path) -> None:
    empty, none = (families.make(bench.config(data__chat_template=named), bench.root / "cache") for named in ("", None))
    for family, folder in ((empty, tmp_path / "empty"), (none, tmp_path / "none")):
        folder.mkdir()
        family.write_tokenizer(folder)
    written = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("empty", "none")]
    assert written[0] == written[1] != {}


def test_held_out_prompts_that_are_all_too_long_stop_a_run(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "a" * 300, "completion": "b"}), encoding="utf-8")
    cfg = bench.config(data__validation=str(tmp_path / "held.jsonl"))
    family: Any = families.make(cfg, bench.root / "cache")
    with pytest.raises(InputError, match=r"held\.jsonl: every document is left out \(1 longer than data\.length 256"):
        TextSource(cfg, family, alone())
