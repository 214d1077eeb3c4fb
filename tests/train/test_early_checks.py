"""The rows of every stage's text are read before the first stage trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.runs import alone, text_config
from trainer.config.schema import RunConfig
from trainer.data.encode import StopRequested
from trainer.distributed.context import RankContext
from trainer.distributed.world import World
from trainer.run.events import AnyEvent
from trainer.system.errors import InputError
from trainer.train import early_checks
from trainer.train.early_checks import check_rows

GOOD = [{"prompt": f"Double {number}: ", "completion": f"{2 * number}."} for number in range(40)]
PAIRS = [{"prompt": f"q {number}", "chosen": "good", "rejected": "bad"} for number in range(40)]


def write_lines(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    from pyarrow import Table
    from pyarrow.parquet import write_table

    write_table(Table.from_pylist(rows), file)
    return file


def context(cache: Path, emit: Callable[[AnyEvent], None] = lambda event: None, stop: bool = False) -> RankContext:
    return RankContext(text_config(cache), alone(), cache, emit, lambda: stop)


@pytest.mark.parametrize(
    ("rows", "changes", "why"),
    [
        ([*GOOD, {"prompt": "5"}], {}, ':41: has only "prompt"; a row has text, '),
        ([*GOOD, {"text": 5}], {}, ':41: "text" is not a string; write it in quotes'),
        (
            [*PAIRS, {"text": "a"}],
            {"objective": {"dpo_beta": 0.1}},
            ':41: not a pair, as the rows before are: no "chosen" and "rejected"; remove it, or complete it',
        ),
        (
            [*GOOD, {"messages": [{"role": "user"}]}],
            {"data__chat_template": "chatml"},
            ":41: message 1",
        ),
    ],
    ids=["incomplete", "not a text", "not a pair", "a message"],
)
def test_a_row_at_the_end_of_a_later_stages_file_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], why: str
) -> None:
    first = text_config(write_lines(tmp_path / "good.jsonl", GOOD))
    file = write_lines(tmp_path / "last.jsonl", rows)
    with pytest.raises(InputError) as caught:
        check_rows([("warm", first), ("last", text_config(file, **changes))], context(tmp_path))
    assert str(caught.value).startswith(f"stage last: {file}{why}")


def test_a_row_of_a_table_or_of_held_out_texts_is_refused(tmp_path: Path) -> None:
    table = write_parquet(tmp_path / "a.parquet", [*GOOD, {"prompt": "5", "completion": None}])
    good, held_out = write_lines(tmp_path / "good.jsonl", GOOD), tmp_path / "held_out.jsonl"
    held_out.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    for cfg, why in (
        (text_config(table), f'{table}: row 41: has only "prompt"; a row has text, '),
        (text_config(good, data__validation=str(held_out)), f"{held_out}:2: byte 24 of the file (0xff) is not UTF-8"),
    ):
        with pytest.raises(InputError) as caught:
            check_rows([("", cfg)], context(tmp_path))
        assert str(caught.value).startswith(why)


def test_a_row_of_a_csv_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("question,solution\na,b\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        check_rows([("", text_config(file))], context(tmp_path))
    assert str(caught.value).startswith(f"{file}")


def test_rows_that_were_read_are_not_read_again_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(tmp_path / "a.jsonl", GOOD)
    check_rows([("", text_config(file))], context(tmp_path))
    monkeypatch.setattr(early_checks, "read_documents", lambda *args: 1 / 0)
    check_rows([("", text_config(file))], context(tmp_path))
    monkeypatch.undo()
    write_lines(file, [*GOOD, {"no": "text"}])
    with pytest.raises(InputError, match=r"a\.jsonl:41: "):
        check_rows([("", text_config(file))], context(tmp_path))


def test_what_is_read_is_shown_and_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_checks, "TURN_S", 0.0)
    events: list[AnyEvent] = []
    stages = [("warm", text_config(write_lines(tmp_path / "a.jsonl", GOOD)))]
    with pytest.raises(StopRequested):
        check_rows(stages, context(tmp_path, events.append, stop=True))
    assert [event.message for event in events] == ["stage warm: reading rows: 1"]  # type: ignore[union-attr]
    check_rows(stages, context(tmp_path, events.append))
    assert events[-1].message == "stage warm: reading rows: 40"  # type: ignore[union-attr]


def test_of_a_large_file_only_the_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_lines(tmp_path / "a.jsonl", [*GOOD, {"no": "text"}])
    monkeypatch.setattr(early_checks, "MOST_CHECKED", file.stat().st_size // 2)
    check_rows([("", text_config(file))], context(tmp_path))


def on_two_ranks(world: World, cfg: RunConfig, cache: Path) -> str:
    try:
        check_rows([("last", cfg)] if world.rank == 0 else [], RankContext(cfg, world, cache, lambda event: None))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_every_rank_is_given_the_sentence(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [*GOOD, {"no": "text"}])
    answers = run_ranks(2, on_two_ranks, text_config(file), tmp_path)
    assert len(set(answers)) == 1 and answers[0].startswith(f"stage last: {file}:41: has only ")
