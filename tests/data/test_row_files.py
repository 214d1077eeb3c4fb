"""Every kind of file with rows is read as the .jsonl of the same rows, goes on exactly, and has its bounds."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.text.test_text_packing import refusal, rows_of, stream
from tests.data.text.test_text_stream import END, KEYS, plain, plain_all
from trainer.config.sections import DataConfig
from trainer.data import row_files
from trainer.data.row_files import MOST_LINE
from trainer.data.row_files import rows_of as rows_in
from trainer.data.row_forms import kinds_of
from trainer.data.text import text_files
from trainer.data.text.text_files import TextFolder, count_documents, find_files, kinds, warnings_of
from trainer.data.text.text_stream import StreamPosition
from trainer.system.errors import InputError
from trainer.system.files import MIB

ROWS = [{"text": f"{number} is" + " a number" * (number % 5)} for number in range(30)]


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def as_table(rows: Sequence[dict[str, Any]]) -> bytes:
    keys = dict.fromkeys(key for row in rows for key in row)
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([keys | row for row in rows]), file, row_group_size=7)
    return file.getvalue()


WRITERS: dict[str, Callable[[Sequence[dict[str, Any]]], str]] = {
    "a.jsonl": as_lines,
    "lines.json": as_lines,
    "list.json": json.dumps,
    "indented.json": lambda rows: json.dumps(rows, indent=2),
    "objects.json": lambda rows: "\n".join(json.dumps(row, indent=2) for row in rows),
    "a.csv": as_csv,
}
NAMES = [*WRITERS, *(f"{name}.gz" for name in WRITERS), "a.parquet"]
QUICK = ("list.json", "a.csv", "a.jsonl.gz", "a.parquet")
each_name = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)


def write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> Path:
    content = as_table(rows) if name == "a.parquet" else WRITERS[name.removesuffix(".gz")](rows).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder / name


@each_name
def test_every_kind_of_file_is_read_as_the_lines_of_the_same_rows(tmp_path: Path, name: str) -> None:
    lines, other = (write(tmp_path / folder, one, ROWS) for folder, one in (("lines", "a.jsonl"), ("other", name)))
    for packing in ("whole", "split"):
        expected, found = (
            [plain(row) for row in rows_of(stream(one.parent, packing=packing))] for one in (lines, other)
        )
        assert found == expected
    assert kinds([other]) == {"text"}
    assert count_documents(other) == 30


@each_name
@pytest.mark.parametrize("packing", ["whole", "split"])
def test_a_mixture_with_any_kind_of_file_goes_on_from_any_place_as_if_uninterrupted(
    tmp_path: Path, name: str, packing: str
) -> None:
    write(tmp_path / "a", name, ROWS)
    write(tmp_path / "b", "a.jsonl", [{"text": letter * 9} for letter in "abcdefgh"])
    folders = [TextFolder(find_files(tmp_path / "a"), 1.5), TextFolder(find_files(tmp_path / "b"))]
    texts = stream(folders, shuffle_window=7, packing=packing, length=40)
    straight = list(texts.rows())
    parts = plain_all(iter(straight))
    for number in range(1, len(straight), 5):
        place = StreamPosition.from_place(json.loads(json.dumps(straight[number - 1][1].as_place())))
        assert plain_all(texts.rows(place)) == parts[number:]


@each_name
def test_the_share_that_was_read_grows_with_each_row_and_is_the_same_wherever_reading_begins(
    tmp_path: Path, name: str
) -> None:
    rows = [{"text": "é" * 500 + str(number)} for number in range(3000)]
    found = [(row.after, row.share) for row in rows_in(write(tmp_path, name, rows))]
    shares = [share for _, share in found]
    assert all(abs(share - number / 3000) < 0.01 for number, share in enumerate(shares))
    assert shares == sorted(shares)
    for number in (1, 2000, 2999):
        assert [(row.after, row.share) for row in rows_in(tmp_path / name, found[number - 1][0])] == found[number:]


def test_all_kinds_of_files_in_a_folder_are_read_and_others_named_once(tmp_path: Path) -> None:
    for number, name in enumerate(("a.jsonl", "list.json", "a.csv", "b.jsonl.gz")):
        given = name.replace("b.", "a.")
        write(tmp_path / str(number), given, [{"text": f"file {number}"}])
    names = ["notes.docx", "0/more.md", "README.md", "LICENSE", "dataset_info.json", ".hidden", "e.tsv"]
    for name in names:
        (tmp_path / name).write_bytes(b"something")
    (tmp_path / "0" / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "the same"}'))
    found = rows_of(stream(tmp_path, length=100))
    assert sum(int(row.documents.max()) + 1 for row in found) == 4
    assert list(warnings_of(DataConfig(path=str(tmp_path)))) == [
        f"{tmp_path}: 4 files: a.jsonl.gz, more.md, e.tsv, notes.docx are not read (of a packed file that also lies "
        "there unpacked, only the unpacked one is read); convert what is to be trained: give a .txt, .jsonl, .json, "
        ".csv, .parquet or .npy file; .jsonl, .json and .csv may be packed as .gz"
    ]
    assert list(warnings_of(DataConfig(path=str(tmp_path / "1")))) == []


def test_the_folder_of_a_run_within_the_data_is_not_data(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", ROWS)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    for name in ("config.yaml", "launch.json", "events.jsonl", "samples.csv"):
        (tmp_path / "run" / name).write_text("{}")
    assert find_files(tmp_path) == (tmp_path / "a.jsonl",)
    assert list(warnings_of(DataConfig(path=str(tmp_path)))) == []


def test_texts_of_rows_that_are_not_read_are_named_once(tmp_path: Path) -> None:
    row = {"text": "a text with a part", "part": "with a part", "id": "17", "context": "what it is about"}
    write(tmp_path, "a.jsonl", [row] * 3)
    write(tmp_path, "a.csv", [row])
    write(tmp_path, "a.parquet", [row])
    assert list(warnings_of(DataConfig(path=str(tmp_path)))) == [
        f"{tmp_path}/a.csv and 2 other files: rows hold texts that are not read, under context; move what matters"
    ]


def test_a_table_with_a_broken_value_in_what_is_not_read_is_trained(tmp_path: Path) -> None:
    titles = pa.array([b"one", b"caf\xe9"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": ["a fox", "a hare"], "title": titles}), tmp_path / "a.parquet")
    assert list(warnings_of(DataConfig(path=str(tmp_path)))) == []
    assert len(rows_of(stream(tmp_path, length=100))) > 0


@pytest.mark.parametrize("name", QUICK)
def test_texts_of_later_rows_that_are_not_read_are_named(tmp_path: Path, name: str) -> None:
    row = {"question": "Who is it?", "answer": "A fox."}
    write(tmp_path, name, [row, row | {"reasoning": "It is red."}])
    assert list(warnings_of(DataConfig(path=str(tmp_path)))) == [
        f"{tmp_path}/{name}: rows hold texts that are not read, under reasoning; move what matters"
    ]


@pytest.mark.parametrize(
    ("name", "content", "wrong"),  # their bytes name the tests: packed ones must hold no time
    [
        (
            "a.json",
            b'[{"text": "a"}, 5]',
            f":1: not a JSON object, nor a list of them; each row is an object with {KEYS}",
        ),
        ("a.json", b'[{"text": "a"},\n {"text": "b"', ":2: not JSON (Expecting ',' delimiter); write the file again"),
        ("a.json", b'[{"text": "a"}\n', ":2: the list has no end, so that the file was cut short; write it again"),
        (
            "a.json",
            b'\n{"version": 2, "data": [{"text": "a"}]}',
            f':2: has only "version", "data"; a row has {KEYS}; if the rows are in "data", write that list alone',
        ),
        ("a.json", b'[{"text": "a\xff"}]', ": not UTF-8 (byte 0xff); save the file as UTF-8"),
        ("a.json", b'[{"a":' + b"[" * 100_000, ":1: not a JSON object (maximum recursion depth exceeded"),
        ("a.csv", b"text,other\na,b,c\n", ":2: 3 cells for 2 columns; quote cells with commas"),
        ("a.csv", b'text\n"a', ":2: not a row of a csv file (unexpected end of data); write it again"),
        ("a.csv", b"text,text\na,b\n", ": two columns have one name; rename one of text, text"),
        (
            "a.csv",
            b"text;id\na;1\n",
            f':2: has only "text;id"; a row has {KEYS}, or save the file with commas between its fields',
        ),
        ("a.csv", b"text\n\xff\n", ": not UTF-8 (byte 0xff); save the file as UTF-8"),
        ("a.jsonl.gz", b"no gzip", ": not a file of gzip, or cut short ("),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], ": not a file of gzip, or cut short ("),
        ("a.csv.gz", gzip.compress(b"text\na\n", mtime=0) + b"rest", ": not a file of gzip, or cut short ("),
        *(("a.parquet", content, ": not a parquet file, or damaged (") for content in (b"", b"text", b"PAR1" * 9)),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n\n{"text": 5}\n', mtime=0),
            ':3: "text" is not a string; write it in quotes',
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_line(
    tmp_path: Path, name: str, content: bytes, wrong: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert refusal(stream(tmp_path)).startswith(f"{tmp_path}/{name}{wrong}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
@pytest.mark.parametrize("begin", [b'{"text": "', b'text\n"'])
def test_a_packed_file_that_unpacks_without_an_end_is_refused_in_bounded_memory(
    tmp_path: Path, name: str, begin: bytes
) -> None:
    with gzip.open(tmp_path / name, "wb", compresslevel=1) as stream_of:
        stream_of.write(begin)
        for _ in range(300):
            stream_of.write(bytes([97]) * 2**20)
    tracemalloc.start()
    try:
        message = refusal(stream(tmp_path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "64 MiB" in message or "field larger than field limit" in message or "not a JSON object" in message
    assert peak < 6 * MOST_LINE


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
def test_a_packed_file_of_blank_lines_without_an_end_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "MOST_UNPACKED", 2**20)
    (tmp_path / name).write_bytes(gzip.compress(b"\n" * 2**24))
    message = f"{tmp_path}/{name}: unpacks to more than 200 times its size, as no text does; unpack it and look into it"
    assert refusal(stream(tmp_path)) == message
    with pytest.raises(InputError, match="unpacks to more than 200 times its size"):
        kinds(find_files(tmp_path))


def test_empty_cells_are_not_there_but_where_they_are_the_only_answer(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,prompt,completion\r\nab,,\r\n,p,q\r\n,,\r\n,p,\r\n", encoding="utf-8-sig")
    left_out: list[str] = []
    texts = stream(tmp_path, left_out=lambda epoch, where, why: left_out.append(f"{where}: {why}"))
    assert sorted(t for row in rows_of(texts) for t in row.tokens[row.documents >= 0].tolist()) == sorted(
        [*b"ab", END, *b"pq", END]
    )
    assert left_out == [f"{tmp_path}/a.csv:5: no token in the loss"]
    assert kinds(find_files(tmp_path)) == {"text", "pair"}


def test_a_line_that_is_only_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    lines = mark + b'{"text": "ab"}\n' + mark + b"\r\n" + mark + b'{"text": "cd"}\n' + mark
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(lines)
        assert [row.values() for row in rows_in(tmp_path / name)] == [{"text": "ab"}, {"text": "cd"}]
        assert [row.where()[-1] for row in rows_in(tmp_path / name)] == ["1", "3"]


def test_line_ends_of_windows_are_read_as_those_of_others_in_every_text(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a\r\nb"}, {"role": "assistant", "content": "c\r\nd\re"}]
    rows = [{"text": "x\r\ny"}, {"prompt": "p\r\n", "completion": "\r\nq"}, {"messages": talk}]
    for name, end in (("windows", "\r\n"), ("others", "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_bytes(f"one{end}two".encode())
        lines = end.join(
            json.dumps(row).replace("\\r\\n", end.replace("\r", "\\r").replace("\n", "\\n")) for row in rows
        )
        (tmp_path / name / "b.jsonl").write_bytes(lines.encode())
        (tmp_path / name / "c.csv").write_bytes(f'text{end}"u{end}v"{end}'.encode())
    windows, others = ([plain(row) for row in rows_of(stream(tmp_path / name))] for name in ("windows", "others"))
    assert windows == others
    letters = [token for row in windows for token in row["tokens"]]
    assert letters.count(13) == 1  # that of d\re


# The kinds of documents in files


TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize("name", ["a.jsonl", "list.json", "a.csv", "a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (PAIR, "pair"),
        (TALK, "chat"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "chat"),
        ({"instruction": "a", "output": "b"}, "chat"),
        ({"question": "a", "answer": "b"}, "chat"),
    ],
)
def test_one_row_of_another_kind_among_texts_is_found_wherever_it_stands(
    tmp_path: Path, name: str, last: dict[str, Any], kind: str
) -> None:
    table = name.startswith("a.csv")
    written = {key: json.dumps(value) if table and isinstance(value, list) else value for key, value in last.items()}
    rows = [{"text": f'the "question" {number}'} for number in range(2000)]
    rows.insert(1500, written)
    assert kinds([write(tmp_path, name, rows)]) == {"text", kind}


def test_a_key_of_another_kind_within_a_row_does_not_change_the_kind_of_the_row(tmp_path: Path) -> None:
    row = {"text": 'it has {"messages": [1]} in it', "meta": {"messages": [], "question": "q", "answer": "a"}}
    assert kinds([write(tmp_path, "a.jsonl", [row] * 9)]) == {"text"}
    assert kinds([write(tmp_path, "list.json", [row] * 9)]) == {"text"}


def test_a_conversation_behind_prompts_is_found_and_files_are_looked_at_again_when_they_change(tmp_path: Path) -> None:
    listed = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    assert kinds([write(tmp_path, "a.jsonl", [PAIR] * 9)]) == {"pair"}
    assert kinds([write(tmp_path, "a.jsonl", [*[PAIR] * 9, listed])]) == {"pair", "chat"}
    assert kinds([write(tmp_path, "a.jsonl", [PAIR, {"chosen": [], "rejected": []}])]) == {"pair", "chat", "preference"}


def test_a_chunk_border_within_a_line_hides_no_conversation(tmp_path: Path) -> None:
    padding = {"text": "a" * (2**20 - 30)}
    rows = [padding, {"text": "b"}, TALK, padding]
    for shift in range(0, 40, 5):
        rows[1] = {"text": "b" * shift}
        assert kinds([write(tmp_path, "a.jsonl", rows)]) == {"text", "chat"}


def test_documents_of_split_and_whole_packing_are_those_of_the_encoder(tmp_path: Path) -> None:
    """A last look at the whole way: three forms in three files, all of them learned."""
    write(tmp_path, "a.csv", [{"question": "a", "answer": "b"}])
    write(tmp_path, "list.json", [{"instruction": "a", "input": "x", "output": "b"}])
    write(tmp_path, "a.jsonl.gz", [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}])
    found = ["".join(map(chr, row.tokens[row.documents >= 0].tolist())) for row in rows_of(stream(tmp_path, length=9))]
    assert sorted("".join(found).split("u")) == ["", "a\nxab", "aab", "aab"]


def one_value(value: str, rows: int, **others: str) -> pa.Table:
    """A table of equal rows, which a file stores once. others: {further column: its text}."""
    columns = {"text": value, **others}
    zeros = pa.array([0] * rows, pa.int32())
    return pa.table({name: pa.DictionaryArray.from_arrays(zeros, pa.array([one])) for name, one in columns.items()})


def test_a_text_that_a_parquet_file_stores_once_for_many_rows_does_not_fill_the_memory(tmp_path: Path) -> None:
    table = one_value("a " * 2**22, 500)
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", store_schema=False)
    del table
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in islice(rows_in(tmp_path / "a.parquet"), 70)]
    assert len(held) == 70 and max(held) < 300 * MIB


def test_the_kinds_of_a_parquet_file_are_found_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = one_value("a " * 2**22, 200, prompt="b", completion="c")
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", store_schema=False)
    del table
    before, held = pa.total_allocated_bytes(), [0]

    def watched(row: dict[str, Any]) -> Any:
        held.append(pa.total_allocated_bytes() - before)
        return kinds_of(row)

    monkeypatch.setattr(text_files, "kinds_of", watched)
    assert kinds([tmp_path / "a.parquet"]) == {"text"}
    assert len(held) > 2 and max(held) < 300 * MIB


@pytest.mark.parametrize(
    ("compression", "wrong"),
    [
        ("none", "row 2: the row is longer than 64 MiB; shorten or remove it"),
        (
            "zstd",
            "row group 1 of the column text has 0.0 MiB that become 65; texts do not shrink so much, write the file "
            "again",
        ),
    ],
)
def test_a_row_of_a_parquet_file_that_is_too_long_is_refused(tmp_path: Path, compression: str, wrong: str) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b" * (MOST_LINE + MIB)]}), file, compression=compression)
    with pytest.raises(InputError) as refused:
        list(rows_in(file))
    assert str(refused.value) == f"{file}: {wrong}"
