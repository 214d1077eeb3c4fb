"""Whole packing, mixtures and parquet files of a language model, and that each goes on where it was left."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.text.test_text_stream import END, KEYS, VOCABULARY, plain, show, tokenize, write_jsonl
from trainer.config.sections import DataConfig, DataFolder
from trainer.data.text.packing import best_fit
from trainer.data.text.text_documents import Encoder
from trainer.data.text.text_files import TextFolder, find_files, folders_of, kinds
from trainer.data.text.text_stream import PADDING, START, PackedRow, StreamPosition, TextStream
from trainer.system.errors import InputError


def pair(prompt: str, completion: str) -> tuple[list[int], list[bool]]:
    return tokenize(prompt + completion), [False] * len(prompt) + [True] * len(completion)


def chat(messages: Any, tools: Any, variables: Any) -> tuple[list[int], list[bool]]:
    """One letter for each role, then the content; nothing where no assistant speaks."""
    if not any(message["role"] == "assistant" for message in messages):
        return [], []
    text = [(message["role"][0] + message["content"], message["role"] == "assistant") for message in messages]
    return [token for part, _ in text for token in tokenize(part)], [own for part, own in text for _ in part]


ENCODER = Encoder(tokenize, END, VOCABULARY, pair=pair, chat=chat)


def stream(
    folders: Sequence[TextFolder] | Path, length: int = 16, shuffle_window: int = 100, **options: Any
) -> TextStream:
    if isinstance(folders, Path):
        folders = [TextFolder(find_files(folders))]
    options = {"epochs": 1, "packing": "whole"} | options
    return TextStream(folders, ENCODER, 3, length, shuffle_window, **options)


def rows_of(texts: TextStream) -> list[PackedRow]:
    return [row for row, _ in texts.rows()]


def documents_of(rows: Sequence[PackedRow]) -> list[str]:
    """The text of each piece of some rows."""
    found = []
    for row in rows:
        for number in range(row.documents.max() + 1):
            tokens = row.tokens[row.documents == number].tolist()
            found.append("".join("|" if token == END else chr(token) for token in tokens))
    return found


def refusal(texts: TextStream) -> str:
    with pytest.raises(InputError) as caught:
        list(texts.rows())
    return str(caught.value)


# Best fit


@given(st.lists(st.integers(1, 20), max_size=60))
@settings(max_examples=30, deadline=None)
def test_best_fit_puts_every_piece_into_one_row_that_holds_it(sizes: list[int]) -> None:
    rows = best_fit(sizes, 20)
    assert sorted(index for row in rows for index in row) == list(range(len(sizes)))
    filled = [sum(sizes[index] for index in row) for row in rows]
    assert all(size <= 20 for size in filled)
    # No two rows would fit into one, or the smaller's pieces would have gone into the larger.
    assert all(one + other > 20 for number, one in enumerate(filled) for other in filled[:number])


def reference(sizes: Sequence[int], room: int) -> list[int]:
    """The rooms left by best fit, decreasing, as textbooks have it."""
    left: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [one for one in left if one >= size]
        if fitting:
            left.remove(min(fitting))
        left.append((min(fitting) if fitting else room) - size)
    return sorted(left)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_leaves_the_rooms_that_the_textbooks_rule_leaves(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 100) for _ in range(300)]
    rows = best_fit(sizes, 100)
    assert sorted(100 - sum(sizes[index] for index in row) for row in rows) == reference(sizes, 100)


# Whole documents


@pytest.mark.parametrize("seed", [0, 1])
def test_of_2000_documents_of_300_tokens_none_is_cut_and_less_than_one_percent_is_padding(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    sizes = [max(2, min(2048, round(draw.lognormvariate(5.5, 0.6)))) for _ in range(2000)]
    assert 250 < sum(sizes) / len(sizes) < 350
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "completion": "c" * (size - 2)} for size in sizes])
    rows = rows_of(stream(tmp_path, length=2048, shuffle_window=1024))
    pieces = Counter(int((row.documents == n).sum()) for row in rows for n in range(row.documents.max() + 1))
    assert pieces == Counter(sizes)
    padding = sum(int((row.documents == PADDING).sum()) for row in rows) / (2048 * len(rows))
    assert padding < 0.01


def test_rows_hold_whole_documents_wherever_they_are_shuffled_to(tmp_path: Path) -> None:
    texts = ["abcdefg", "hijkl", "mnop", "qrs", "tu"]
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": text[0], "completion": text[1:]} for text in texts])
    rows = rows_of(stream(tmp_path, length=14))
    assert sorted(documents_of(rows)) == [f"{text}|" for text in texts]
    assert sorted(int((row.documents == PADDING).sum()) for row in rows) == [0, 2]
    assert all(show(row)[1].count("^") == sum(row.documents >= 0) - row.documents.max() - 1 for row in rows)


def test_plain_text_that_is_longer_than_a_row_fills_rows_and_its_rest_is_packed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "abcdefghij"}, {"text": "kl"}])
    assert sorted(documents_of(rows_of(stream(tmp_path, length=8)))) == ["abcdefgh", "hij|", "kl|"]
    assert len(rows_of(stream(tmp_path, length=8))) == 2


@pytest.mark.parametrize(
    ("too_long", "kept", "reported"),
    [
        ("drop", ["xy|"], [("a.jsonl:1", "longer than data.length 8"), ("a.jsonl:1", "longer than data.length 8")]),
        ("cut", ["abcdefgh", "xy|"], [("a.jsonl:2", "longer than data.length 8 before its first token in the loss")]),
    ],
)
def test_a_prompt_or_conversation_that_is_longer_than_a_row_is_left_out_or_cut(
    tmp_path: Path, too_long: str, kept: list[str], reported: list[tuple[str, str]]
) -> None:
    rows = [
        {"prompt": "abc", "completion": "defghij"},
        {"messages": [{"role": "user", "content": "klmnopqrs"}, {"role": "assistant", "content": "t"}]},
        {"prompt": "x", "completion": "y"},
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    left: list[tuple[str, str]] = []

    def left_out(epoch: int, where: str, why: str) -> None:
        left.append((where.removeprefix(f"{tmp_path}/"), why))

    found = rows_of(stream(tmp_path, length=8, shuffle_window=1, too_long=too_long, left_out=left_out))
    assert sorted(documents_of(found)) == kept
    assert left == reported


def test_what_teaches_nothing_is_left_out_and_reported(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "a"}]
    rows = [{"messages": []}, {"messages": asked}, {"prompt": "a", "completion": ""}, {"text": "bc"}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    for packing in ("whole", "split"):
        left: list[str] = []
        texts = stream(tmp_path, packing=packing, left_out=lambda epoch, where, why, left=left: left.append(why))
        assert documents_of(rows_of(texts)) == ["bc|"]
        assert left == ["no token in the loss"] * 3


@pytest.mark.parametrize(
    ("prompt", "remedies"),
    [
        ("abc", "raise data.length, set data.too_long: cut, or correct the files"),
        ("abcdefgh", "raise data.length, or correct the files"),  # cut, it would hold no answer
    ],
)
def test_files_of_which_everything_is_left_out_are_refused(tmp_path: Path, prompt: str, remedies: str) -> None:
    rows = [{"prompt": prompt, "completion": "i" * 8}, {"prompt": "a", "completion": ""}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    assert refusal(stream(tmp_path, length=8, shuffle_window=1)) == (
        f"{tmp_path}/a.jsonl: every document is left out (1 longer than data.length 8, the first {tmp_path}/a.jsonl:1; "
        f"1 no token in the loss, the first {tmp_path}/a.jsonl:2); {remedies}"
    )


def test_where_nothing_is_learned_no_other_length_is_advised(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": ""}])
    assert refusal(stream(tmp_path)) == (
        f"{tmp_path}/a.jsonl: every document is left out (1 no token in the loss, the first {tmp_path}/a.jsonl:1); "
        "correct the files"
    )


def test_every_epoch_packs_otherwise_and_equal_seeds_the_same(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": letter * 4} for letter in "abcdefghijkl"])
    both = documents_of(rows_of(stream(tmp_path, epochs=2)))
    assert sorted(both[:12]) == sorted(both[12:])
    assert both[:12] != both[12:]
    assert both == documents_of(rows_of(stream(tmp_path, epochs=2)))


# Where it goes on


def write_mixture(root: Path) -> list[TextFolder]:
    for name, count in (("a", 9), ("b", 20), ("c", 5)):
        (root / name).mkdir()
        rows = [{"prompt": name, "completion": f"{number:02d}" + "." * (number % 5)} for number in range(count)]
        write_jsonl(root / name / "1.jsonl", rows[:4])
        pq.write_table(pa.Table.from_pylist(rows[4:]), root / name / "2.parquet", row_group_size=3)
    weights = (1.5, 1.0, 0.5)
    return [TextFolder(find_files(root / name), weight) for name, weight in zip("abc", weights, strict=True)]


def test_documents_occur_as_often_as_the_weight_of_their_folder_says(tmp_path: Path) -> None:
    texts = stream(write_mixture(tmp_path), epochs=4)
    found: dict[int, Counter[str]] = {}
    for row, place in texts.rows():
        found.setdefault(place.epoch, Counter()).update(documents_of([row]))
    for counts in found.values():
        a, b, c = ([n for text, n in counts.items() if text.startswith(name)] for name in "abc")
        assert set(a) == {1, 2} and 12 <= sum(a) <= 15  # 9 documents, each once, and half of them twice
        assert b == [1] * 20
        assert set(c) == {1} and 2 <= sum(c) <= 3
    whole = sum(found.values(), Counter())
    # Over four epochs, a document of weight 1.5 occurs 6 times, and one of weight 0.5 twice.
    assert {text[0]: n for text, n in whole.items()} == {"a": 6, "b": 4, "c": 2}
    assert all(n == {"a": 6, "b": 4, "c": 2}[text[0]] for text, n in whole.items())


def test_folders_are_interleaved_evenly_over_an_epoch(tmp_path: Path) -> None:
    for name, count in (("a", 300), ("b", 100)):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "1.jsonl", [{"prompt": name, "completion": "12345"}] * count)
    folders = [TextFolder(find_files(tmp_path / name)) for name in "ab"]
    order = "".join(text[0] for text in documents_of(rows_of(stream(folders, length=8, shuffle_window=1))))
    assert len(order) == 400
    assert {order[begin : begin + 40].count("b") for begin in range(0, 400, 40)} == {10}


def test_path_and_folders_are_read_together(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "1.jsonl", [{"text": name}])
    one, other = str(tmp_path / "a"), str(tmp_path / "b")
    both = DataConfig(path=one, folders=(DataFolder(path=other, weight=2.0),))
    assert [(folder.files[0].parent.name, folder.weight) for folder in folders_of(both)] == [("a", 1.0), ("b", 2.0)]
    alone = DataConfig(folders=(DataFolder(path=other),))
    assert folders_of(alone) == (TextFolder((tmp_path / "b" / "1.jsonl",), 1.0),)
    gone = DataConfig(folders=(DataFolder(path=str(tmp_path / "c")),))
    with pytest.raises(InputError, match=r"^data\.folders\[0\]\.path: .*/c: no such file or folder"):
        folders_of(gone)


# Parquet


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], **options: Any) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, **options)


def test_only_the_row_groups_and_columns_that_are_needed_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    rows = [{"text": f"row {number}", "image": b"p" * 1000} for number in range(40)]
    write_parquet(file, rows, row_group_size=10)
    content = bytearray(file.read_bytes())
    for group in (0, 1):  # what was read before is not read again
        column = pq.ParquetFile(file).metadata.row_group(group).column(0)
        begin = column.dictionary_page_offset or column.data_page_offset
        content[begin : begin + column.total_compressed_size] = bytes(column.total_compressed_size)
    file.write_bytes(content)
    after = StreamPosition.from_place({"epoch": 0, "window": 2, "file": 0, "offset": 20, "document": 0, "token": 0})
    found = documents_of([row for row, _ in stream(tmp_path, shuffle_window=10).rows(after)])
    assert sorted(found) == sorted(f"row {number}|" for number in range(20, 40))
    assert refusal(stream(tmp_path)).startswith(f"{file}: not a parquet file, or damaged (")


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"text": 5}, '"text" is not a string; write it in quotes'),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "{"}, '"tools" is not JSON ('),
    ],
)
def test_a_row_of_a_parquet_file_that_cannot_be_used_is_named(tmp_path: Path, row: dict[str, Any], wrong: str) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file, [row])
    assert refusal(stream(tmp_path)).startswith(f"{file}: row 1: {wrong}")


def test_a_parquet_file_without_a_column_that_is_read_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [{"prompt": "a", "caption": "b"}])
    assert refusal(stream(tmp_path)) == f"{tmp_path}/a.parquet: has the columns prompt, caption; a row has {KEYS}"


def test_a_value_of_a_parquet_file_that_cannot_be_read_is_named_with_its_row(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    broken = pa.array([b"good", b"\xff"], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": broken}), file)
    assert refusal(stream(tmp_path)).startswith(f"{file}: row 2: a value cannot be read ('utf-8' codec can't decode")
    pq.write_table(pa.table({"text": broken[1:]}), file)
    with pytest.raises(InputError, match="row 1: a value cannot be read"):
        kinds(find_files(tmp_path))


@pytest.mark.parametrize("keys", [("messages",), ("chosen", "rejected"), ("prompt", "completion")])
def test_keys_that_are_null_are_not_there_in_lines_as_in_tables(tmp_path: Path, keys: tuple[str, ...]) -> None:
    rows = [{"text": "some text"} | dict.fromkeys(keys), {"text": "more"} | dict.fromkeys(keys)]
    for name in ("lines", "table"):
        (tmp_path / name).mkdir()
    write_jsonl(tmp_path / "lines" / "a.jsonl", rows)  # type: ignore[arg-type]
    write_parquet(tmp_path / "table" / "a.parquet", rows)
    lines, table = ([plain(row) for row in rows_of(stream(tmp_path / name))] for name in ("lines", "table"))
    assert lines == table != []
    assert kinds(find_files(tmp_path)) == {"text"}


def test_the_first_row_of_a_file_shows_what_it_holds(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}]
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    assert kinds(find_files(tmp_path)) == {"text"}
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b"}])
    assert kinds(find_files(tmp_path)) == {"text", "pair"}
    write_parquet(tmp_path / "c.parquet", [{"messages": talk}])
    assert kinds(find_files(tmp_path)) == {"text", "pair", "chat"}
    (tmp_path / "d.jsonl").write_text("\n{broken\n")
    (tmp_path / "e.txt").write_text("a")
    assert kinds([tmp_path / "d.jsonl", tmp_path / "e.txt"]) == {"text"}


def test_a_conversation_that_cannot_be_used_is_named_with_its_line(tmp_path: Path) -> None:
    def refuse(messages: Any, tools: Any, variables: Any) -> tuple[list[int], list[bool]]:
        raise InputError("the reason")

    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"messages": ["b"]}])  # type: ignore[list-item]
    encoder = Encoder(tokenize, END, VOCABULARY, chat=refuse)
    texts = TextStream([TextFolder(find_files(tmp_path))], encoder, 0, 8, epochs=1)
    assert refusal(texts) == f"{tmp_path}/a.jsonl:2: the reason"
    assert START.as_place() == {"epoch": 0, "window": 0, "document": 0, "token": 0, "file": 0, "offset": 0}


def test_an_epoch_may_be_empty_where_less_than_one_document_occurs_in_it(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "ab"}])
    for packing in ("whole", "split"):
        texts = stream([TextFolder(find_files(tmp_path), 0.25)], length=4, packing=packing, epochs=12)
        assert documents_of(rows_of(texts)) == ["ab|"] * 3
    (tmp_path / "a.jsonl").write_text("")
    assert "no document holds any text" in refusal(stream([TextFolder(find_files(tmp_path), 0.25)], epochs=None))


def test_the_next_window_is_tokenized_little_by_little(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "abcdefg"}] * 60)
    counts: list[int] = []

    def counted(text: str) -> list[int]:
        counts[-1] += 1
        return tokenize(text)

    folders = [TextFolder(find_files(tmp_path))]
    texts = TextStream(folders, Encoder(counted, END, VOCABULARY), 0, 16, 20, epochs=2, packing="whole")
    rows = texts.rows()
    for _ in range(60):
        counts.append(0)
        next(rows)
    # 20 documents fill 10 rows: the first window at once, each later one 2 documents per row, the last none.
    assert counts == [20, *[2] * 9, *[2] * 40, 2, *[0] * 9]


def test_a_pair_of_preferences_among_other_rows_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n{"prompt": "b", "chosen": "c", "rejected": "d"}\n')
    assert refusal(TextStream([TextFolder((file,))], ENCODER, 0, 16, epochs=1)) == (
        f'{file}:2: a pair, with "chosen" and "rejected", among other rows; set objective.dpo_beta and give pairs '
        "only, or remove it"
    )
