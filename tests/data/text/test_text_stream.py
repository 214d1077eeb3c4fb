"""What a language model reads in which order, and that it goes on exactly where it was left."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from trainer.data.text.text_documents import Encoder
from trainer.data.text.text_files import TextFolder, digest, find_files
from trainer.data.text.text_stream import PADDING, START, PackedRow, Piece, StreamPosition, TextStream
from trainer.system.errors import InputError

END = 256
VOCABULARY = 257
KINDS = ["txt", "jsonl", "npy", "mixed"]
# Of 1 to 40 bytes, so that some rows hold several and some documents fill several rows.
TEXTS = [chr(ord("a") + number) * (1 + number * 7 % 40) + str(number) for number in range(13)]
SAVE_IDS = "save the token ids with numpy.save as one dimension of integers"
KEYS = (
    "text, prompt and completion, messages or conversations, instruction and output, or question and answer; for "
    "preferences with chosen and rejected"
)
ROW_KEYS = f"each row is an object with {KEYS}"


def tokenize(text: str) -> list[int]:
    return list(text.encode())


ENCODER = Encoder(tokenize, END, VOCABULARY)


def write_txt(folder: Path, texts: Sequence[str]) -> None:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")


def write_jsonl(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_npy(path: Path, texts: Sequence[str]) -> None:
    np.save(path, np.array([token for text in texts for token in [*tokenize(text), END]], dtype=np.uint16))


def write(folder: Path, kind: str) -> tuple[Path, ...]:
    """Files of one kind, or of each, that together hold TEXTS."""
    thirds = TEXTS[:4], TEXTS[4:9], TEXTS[9:]
    first, second, third = KINDS[:3] if kind == "mixed" else [kind] * 3
    for number, (each, texts) in enumerate(zip((first, second, third), thirds, strict=True)):
        if each == "txt":
            write_txt(folder / str(number), texts)
        elif each == "jsonl":
            write_jsonl(folder / f"{number}.jsonl", [{"text": text} for text in texts])
        else:
            write_npy(folder / f"{number}.npy", texts)
    return find_files(folder)


def stream(
    files: Sequence[Path], length: int = 16, seed: int = 3, shuffle_window: int = 3, epochs: int | None = 1
) -> TextStream:
    return TextStream([TextFolder(tuple(files))], ENCODER, seed, length, shuffle_window, epochs)


def plain(part: Piece | PackedRow) -> dict[str, list[int]]:
    return {name: np.asarray(values).tolist() for name, values in vars(part).items()}


def plain_all(
    parts: Iterator[tuple[Piece, StreamPosition]] | Iterator[tuple[PackedRow, StreamPosition]],
) -> list[dict[str, list[int]]]:
    return [plain(part) for part, _ in parts]


def starts(texts: TextStream) -> list[int]:
    """First token of each piece."""
    return [int(piece.tokens[0]) for piece, _ in texts.pieces()]


def pairs_in_loss(parts: Sequence[Piece | PackedRow]) -> Counter[tuple[int, int]]:
    """Each token that is predicted, with the one before it."""
    return Counter(
        (before, token)
        for part in parts
        for (before, token), in_loss in zip(pairwise(part.tokens.tolist()), part.loss_mask[1:], strict=True)
        if in_loss
    )


def pairs_of(texts: Sequence[str]) -> Counter[tuple[int, int]]:
    return Counter(pair for text in texts for pair in pairwise([*tokenize(text), END]))


def show(row: PackedRow) -> tuple[str, str, list[int]]:
    """The text of a row with '|' for end-of-text, what of it is in the loss as '^', and its documents."""
    text = "".join("|" if token == END else chr(token) for token in row.tokens.tolist())
    return text, "".join("^" if in_loss else " " for in_loss in row.loss_mask.tolist()), row.documents.tolist()


def read_all(path: Path) -> list[tuple[PackedRow, StreamPosition]]:
    return list(stream([path]).rows())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [2, 5, 16, 100])
def test_each_token_but_a_documents_first_is_learned_once_an_epoch(tmp_path: Path, kind: str, length: int) -> None:
    texts = stream(write(tmp_path, kind), length)
    assert pairs_in_loss([piece for piece, _ in texts.pieces()]) == pairs_of(TEXTS)
    rows = [row for row, _ in texts.rows()]
    assert pairs_in_loss(rows) == pairs_of(TEXTS)
    assert all(not row.loss_mask[0] and len(row.tokens) == length for row in rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle_window", [1, 3, 100])
def test_rows_and_pieces_go_on_from_any_place_as_if_uninterrupted(
    tmp_path: Path, kind: str, shuffle_window: int
) -> None:
    texts = stream(write(tmp_path, kind), shuffle_window=shuffle_window, epochs=2)
    for read in (texts.rows, texts.pieces):
        straight = list(read())
        parts = plain_all(read())
        for number, (_, place) in enumerate(straight, start=1):
            saved = json.loads(json.dumps(place.as_place()))
            assert plain_all(read(StreamPosition.from_place(saved))) == parts[number:]


def test_an_endless_stream_goes_on_from_the_end_of_an_epoch(tmp_path: Path) -> None:
    texts = stream(write(tmp_path, "mixed"), epochs=None)
    straight = list(islice(texts.rows(), 60))
    assert straight[-1][1].epoch >= 2
    for number, (_, place) in enumerate(straight, start=1):
        resumed = [plain(row) for row, _ in islice(texts.rows(place), 60 - number)]
        assert resumed == [plain(row) for row, _ in straight[number:]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_epoch_has_another_order_and_equal_seeds_the_same(tmp_path: Path, kind: str) -> None:
    files = write(tmp_path, kind)
    epochs = [starts(stream(files, length=100, epochs=3))[begin : begin + 13] for begin in (0, 13, 26)]
    assert [sorted(epoch) for epoch in epochs] == [[ord(text[0]) for text in TEXTS]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] == starts(stream(files, length=100))
    assert epochs[0] != starts(stream(files, length=100, seed=4))


def test_the_order_of_a_seed_is_this_one(tmp_path: Path) -> None:
    assert "".join(map(chr, starts(stream(write(tmp_path, "mixed"), length=100)))) == "feghiablkjmdc"


def test_documents_are_shuffled_within_their_window_only(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": letter} for letter in "abcdefghij"])
    order = starts(stream(find_files(tmp_path), shuffle_window=4))
    windows = [order[:4], order[4:8], order[8:]]
    assert ["".join(map(chr, sorted(window))) for window in windows] == ["abcd", "efgh", "ij"]
    assert order != sorted(order)


def test_a_long_document_is_cut_into_pieces_that_share_a_token(tmp_path: Path) -> None:
    write_txt(tmp_path, ["abcdefghi"])
    pieces = [piece for piece, _ in stream(find_files(tmp_path), length=4).pieces()]
    assert [piece.tokens.tolist() for piece in pieces] == [[*b"abcd"], [*b"defg"], [*b"ghi", END]]
    assert [piece.loss_mask.tolist() for piece in pieces] == [[False, True, True, True]] * 3


def test_a_row_is_filled_with_documents_and_the_last_one_goes_on_in_the_next(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "defghijkl"}])
    rows = [row for row, _ in stream(find_files(tmp_path), length=8, shuffle_window=1).rows()]
    assert [show(row) for row in rows] == [
        ("abc|defg", " ^^^ ^^^", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("ghijkl||", " ^^^^^^ ", [0, 0, 0, 0, 0, 0, 0, PADDING]),
    ]


def test_a_single_token_at_the_end_of_a_row_and_the_rest_of_the_last_row_are_padding(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "de"}])
    rows = [row for row, _ in stream(find_files(tmp_path), length=5, shuffle_window=1).rows()]
    assert [show(row) for row in rows] == [
        ("abc||", " ^^^ ", [0, 0, 0, 0, PADDING]),
        ("de|||", " ^^  ", [0, 0, 0, PADDING, PADDING]),
    ]


def test_an_endless_stream_pads_no_row_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    write_txt(tmp_path, ["abc"])
    texts = stream(find_files(tmp_path), length=6, epochs=None)
    assert [show(row) for row, _ in islice(texts.rows(), 2)] == [
        ("abc|ab", " ^^^ ^", [0, 0, 0, 0, 1, 1]),
        ("bc|abc", " ^^ ^^", [0, 0, 0, 1, 1, 1]),
    ]


def test_of_a_prompt_and_its_completion_only_the_completion_is_learned(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "ask", "completion": "yes"}, {"prompt": "", "completion": "no"}])
    rows = [row for row, _ in stream(find_files(tmp_path), length=10, shuffle_window=1).rows()]
    assert [show(row) for row in rows] == [("askyes|no|", "   ^^^^ ^^", [0, 0, 0, 0, 0, 0, 0, 1, 1, 1])]


def test_a_prompt_cut_at_the_end_of_a_row_is_learned_in_neither(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "askme", "completion": "no"}])
    rows = [row for row, _ in stream(find_files(tmp_path), length=4).rows()]
    assert [show(row)[:2] for row in rows] == [("askm", "    "), ("meno", "  ^^"), ("o|||", " ^  ")]


def test_empty_documents_completions_and_lines_are_skipped(tmp_path: Path) -> None:
    rows = ['{"text": ""}', "", '{"prompt": "ask", "completion": ""}', "  ", '{"text": "ab"}']
    (tmp_path / "a.jsonl").write_bytes("\r\n".join(rows).encode())
    np.save(tmp_path / "b.npy", np.array([END, END, *b"cd", END, END]))
    np.save(tmp_path / "c.npy", np.zeros(0, np.uint16))
    write_txt(tmp_path, ["", "ef"])
    pieces = [piece.tokens.tolist() for piece, _ in stream(find_files(tmp_path)).pieces()]
    assert sorted(pieces) == [[*b"ab", END], [*b"cd", END], [*b"ef", END]]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "cd"}')
    assert sorted(starts(stream(find_files(tmp_path)))) == [ord("a"), ord("c")]


def test_a_shard_is_read_as_it_stands_whatever_the_size_of_its_documents(tmp_path: Path) -> None:
    documents = [[1] * 100_000, [2], [3] * 70_000]
    np.save(tmp_path / "a.npy", np.array([*documents[0], END, *documents[1], END, *documents[2]], dtype=">u4"))
    pieces = [piece for piece, _ in stream(find_files(tmp_path), length=200_000, shuffle_window=2).pieces()]
    assert Counter((int(piece.tokens[0]), len(piece.tokens)) for piece in pieces) == {
        (1, 100_001): 1,
        (2, 2): 1,
        (3, 70_000): 1,
    }
    assert {piece.tokens.dtype for piece in pieces} == {np.dtype(np.int64)}


def test_no_more_documents_are_tokenized_than_a_row_takes(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "abcdefg"}] * 20)
    calls: list[str] = []

    def counted(text: str) -> list[int]:
        calls.append(text)
        return tokenize(text)

    encoder = Encoder(counted, END, VOCABULARY)
    texts = TextStream([TextFolder(find_files(tmp_path))], encoder, seed=0, length=16, shuffle_window=10)
    place = START
    for _ in range(10):
        calls.clear()
        _, place = next(texts.rows(place))
        assert calls == ["abcdefg"] * 2


@pytest.mark.parametrize("kind", ["jsonl", "npy"])
def test_of_a_file_of_4_mb_with_a_window_of_50_documents_less_than_a_mib_is_held(tmp_path: Path, kind: str) -> None:
    texts = ["a" * 999] * 4000
    if kind == "jsonl":
        write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    else:
        write_npy(tmp_path / "a.npy", texts)
    rows = stream(find_files(tmp_path), length=1000, shuffle_window=50).rows()
    tracemalloc.start()
    try:
        num_rows = sum(1 for _ in rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_rows == 4000
    assert peak < 2**20


def test_files_are_found_below_a_folder_by_relative_path(tmp_path: Path) -> None:
    names = [
        "b/a.txt",
        "a.jsonl",
        "b.npy",
        "B.TXT",
        "README",
        "a.json",
        ".hidden/a.txt",
        "b/._a.txt",
        "c.csv",
        "d.CSV.gz",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "b" / "around").symlink_to(tmp_path)
    assert [file.relative_to(tmp_path).as_posix() for file in find_files(tmp_path)] == [
        "B.TXT",
        "a.json",
        "a.jsonl",
        "b.npy",
        "b/a.txt",
        "c.csv",
        "d.CSV.gz",
    ]
    assert find_files(tmp_path / "b" / "a.txt") == (tmp_path / "b" / "a.txt",)


def test_where_no_text_is_found_the_error_says_what_to_give(tmp_path: Path) -> None:
    other = tmp_path / "a.docx"
    other.write_bytes(b"")
    files = "a .txt, .jsonl, .json, .csv, .parquet or .npy file"
    for path, wrong in (
        (tmp_path / "b", f"no such file or folder; give {files}, or a folder of them"),
        (tmp_path, "no text in this folder; put .txt, .jsonl, .json, .csv, .parquet or .npy files into it"),
        (other, f"not a supported kind of text; give {files}; .jsonl, .json and .csv may be packed as .gz"),
    ):
        with pytest.raises(InputError) as raised:
            find_files(path)
        assert str(raised.value) == f"{path}: {wrong}"


@pytest.mark.parametrize("epochs", [1, None])
def test_files_without_any_text_are_refused(tmp_path: Path, epochs: int | None) -> None:
    write_txt(tmp_path, ["", ""])
    files = find_files(tmp_path)
    for given, others in ((files[:1], ""), (files, " and 1 other files")):
        with pytest.raises(InputError) as raised:
            next(stream(given, epochs=epochs).rows())
        assert str(raised.value) == f"{files[0]}{others}: no document holds any text; write some, or give others"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b'{"text": "a"', f"not a JSON object (Expecting ',' delimiter at column 13); {ROW_KEYS}"),
        (b"[" * 100_000, f"not a JSON object (nested too deep); {ROW_KEYS}"),
        (b'["a"]', f"not a JSON object; {ROW_KEYS}"),
        (b'{"prompt": "a"}', f'has only "prompt"; a row has {KEYS}'),
        (b'{"caption": "a", "id": 3}', f'has only "caption", "id"; a row has {KEYS}'),
        (b"{}", f"holds nothing; a row has {KEYS}"),
        (b'{"text": 5}', '"text" is not a string; write it in quotes'),
        (b'{"prompt": "a", "completion": null}', f'has only "prompt"; a row has {KEYS}'),
        (b'{"text": "a\\udc00"}', '"text" holds \\udc00, which is half a character; remove it'),
        (b'{"text": "\xff"}', "byte 45 of the file (0xff) is not UTF-8; save the file as UTF-8"),
    ],
)
@pytest.mark.parametrize("shuffle_window", [1, 100])
def test_a_line_that_cannot_be_used_is_named_with_its_number(
    tmp_path: Path, line: bytes, wrong: str, shuffle_window: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ab"}\n\n' + b'{"text": "cd"}    \n' + line + b"\n")
    with pytest.raises(InputError) as raised:
        list(stream([path], shuffle_window=shuffle_window).rows())
    assert str(raised.value) == f"{path}:4: {wrong}"


def test_a_number_that_python_does_not_read_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ab"}\n{"text": "cd", "number": ' + b"9" * 5000 + b"}\n")
    with pytest.raises(InputError) as raised:
        list(stream([path]).rows())
    assert str(raised.value).startswith(f"{path}:2: not a JSON object (Exceeds the limit (4300 digits)")


def test_a_text_that_is_not_utf_8_is_named_with_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("first\nü\n".encode() + b"ab\xffc\xff")
    with pytest.raises(InputError) as raised:
        read_all(path)
    assert str(raised.value) == f"{path}:3: byte 11 of the file (0xff) is not UTF-8; save the file as UTF-8"


@pytest.mark.parametrize(
    ("array", "wrong"),
    [
        (np.zeros((2, 3), np.int32), f"an array of int32 in 2 dimensions; {SAVE_IDS}"),
        (np.zeros(3, np.float32), f"an array of float32 in 1 dimensions; {SAVE_IDS}"),
        (np.array(["a", None], dtype=object), f"not an array of numbers, or cut short; {SAVE_IDS}"),
        (
            np.array([1, END, 2, 257, 3], dtype=np.uint16),
            "token 3 is 257, but the model knows 0 to 256; write the file with the tokenizer of the model",
        ),
        (
            np.array([1, -100, 2], dtype=np.int8),
            "token 1 is -100, but the model knows 0 to 256; write the file with the tokenizer of the model",
        ),
    ],
)
def test_a_shard_that_holds_no_ids_of_the_model_is_refused(tmp_path: Path, array: np.ndarray, wrong: str) -> None:
    path = tmp_path / "a.npy"
    np.save(path, array)
    with pytest.raises(InputError) as raised:
        read_all(path)
    assert str(raised.value) == f"{path}: {wrong}"


CUT_SHORT = (
    b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<u2', 'fortran_order': False, 'shape': (9,), }".ljust(117) + b"\n12"
)


@pytest.mark.parametrize("data", [b"", b"no numpy file", b"PK\x03\x04 an archive", CUT_SHORT])
def test_a_shard_that_numpy_did_not_save_whole_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(data)
    with pytest.raises(InputError) as raised:
        read_all(path)
    assert str(raised.value) == f"{path}: not an array of numbers, or cut short; {SAVE_IDS}"


@pytest.mark.parametrize("kind", ["txt", "jsonl", "npy"])
def test_a_file_that_is_gone_is_named(tmp_path: Path, kind: str) -> None:
    files = write(tmp_path, kind)
    files[0].unlink()
    wrong = f"{files[0]}: cannot be read (No such file or directory); put it back, or change its permissions"
    for read in (lambda: read_all(files[0]), lambda: digest(files)):
        with pytest.raises(InputError) as raised:
            read()
        assert str(raised.value) == wrong


def test_the_digest_changes_with_name_size_and_time_of_a_file_but_not_with_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    files = write(folder, "txt")
    digests = [digest(files)]
    assert digests[0] == digest(find_files(folder))
    files[0].rename(folder / "other.txt")
    digests.append(digest(find_files(folder)))
    with (folder / "other.txt").open("ab") as file:
        times = os.stat(file.name)
        file.write(b"more")
    os.utime(folder / "other.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    digests.append(digest(find_files(folder)))
    os.utime(folder / "other.txt", ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    digests.append(digest(find_files(folder)))
    assert len(set(digests)) == 4
    folder.rename(tmp_path / "b")
    assert digest(find_files(tmp_path / "b")) == digests[-1]
