"""Text as rows of tokens: what is learned how often, in which order, and where reading goes on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.config import InputError
from trainer.data.text import Piece, Place, Row, TextFormat, TextStream, digest_of, find_texts

END = 256


def to_bytes(text: str) -> list[int]:
    return list(text.encode())


FORMAT = TextFormat(to_bytes, END, 257)
TEXTS = ["a", "bcd", "efghijklmnopqrstuvwxyz", "", "012345678", "AB", "CDEFGHIJKLMNOPQRS"]


def write_lines(file: Path, *lines: Any) -> Path:
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def write_corpus(folder: Path, kind: str) -> tuple[Path, ...]:
    """TEXTS as files of a kind: all as lines, all as ids, one file each, or some of each."""
    folder.mkdir()
    if kind in ("jsonl", "mixed"):
        write_lines(folder / "a.jsonl", *({"text": text} for text in TEXTS[:4]))
    if kind in ("npy", "mixed"):
        ids = [token for text in TEXTS[4:6] if text for token in [*to_bytes(text), END]]
        np.save(folder / "b.npy", np.array(ids, dtype=np.uint16))
    if kind == "jsonl":
        write_lines(folder / "c.jsonl", *({"text": text} for text in TEXTS[4:]))
    if kind == "npy":
        rest = [*TEXTS[:4], *TEXTS[6:]]
        ids = [token for text in rest if text for token in [*to_bytes(text), END]]
        np.save(folder / "c.npy", np.array(ids[:-1], dtype=np.int32))  # the last lacks its end
    for number, text in enumerate(TEXTS if kind == "txt" else TEXTS[6:] if kind == "mixed" else []):
        (folder / f"{number}.txt").write_text(text)
    return find_texts(folder)


@pytest.fixture(params=["txt", "jsonl", "npy", "mixed"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, ...]:
    return write_corpus(tmp_path / "corpus", request.param)


def stream(files: tuple[Path, ...], length: int = 8, **options: Any) -> TextStream:
    return TextStream(files, FORMAT, length, **{"seed": 0, "window": 2, **options})


def learned_pairs(part: Piece | Row) -> list[tuple[int, int]]:
    """(token before, token) of each that is predicted."""
    return [(int(part.tokens[i - 1]), int(part.tokens[i])) for i in np.flatnonzero(part.learned)]


def expected_pairs(files: tuple[Path, ...]) -> Counter[tuple[int, int]]:
    pairs: Counter[tuple[int, int]] = Counter()
    for text in TEXTS:
        tokens = [*to_bytes(text), END] if text else []
        if any(file.name == "c.npy" for file in files) and text == TEXTS[6]:
            tokens = tokens[:-1]
        pairs.update(pairwise(tokens))
    return pairs


@pytest.mark.parametrize("length", [2, 3, 8, 100])
def test_every_token_but_a_documents_first_is_learned_once_per_epoch(files: tuple[Path, ...], length: int) -> None:
    rows = [row for row, _ in stream(files, length, epochs=1).rows()]
    pieces = [piece for piece, _ in stream(files, length, epochs=1).pieces()]
    expected = expected_pairs(files)
    assert Counter(pair for row in rows for pair in learned_pairs(row)) == expected
    assert Counter(pair for piece in pieces for pair in learned_pairs(piece)) == expected
    twice = [row for row, _ in stream(files, length, epochs=2).rows()]
    assert Counter(pair for row in twice for pair in learned_pairs(row)) == {
        pair: 2 * n for pair, n in expected.items()
    }


def test_rows_have_one_length_and_number_their_pieces(files: tuple[Path, ...]) -> None:
    for row, _ in stream(files, epochs=1).rows():
        assert len(row.tokens) == len(row.learned) == len(row.documents) == 8
        numbers = [number for number in row.documents.tolist() if number >= 0]
        assert numbers == sorted(numbers)
        assert set(numbers) == set(range(len(set(numbers))))
        firsts = np.flatnonzero(np.diff(row.documents, prepend=-2))
        assert not row.learned[firsts].any()
        assert all(np.sum(row.documents == number) >= 2 for number in numbers)
        padding = row.documents == -1
        assert (row.tokens[padding] == END).all() and not row.learned[padding].any()


def as_lists(rows: Any) -> list[Any]:
    return [[part.tolist() for part in (row.tokens, row.learned, row.documents)] for row in rows]


def test_reading_goes_on_from_the_place_after_any_row(files: tuple[Path, ...]) -> None:
    whole = list(islice(stream(files).rows(), 25))
    for number in range(24):
        place = Place(**json.loads(json.dumps(asdict(whole[number][1]))))
        rest = list(islice(stream(files).rows(place), 24 - number))
        assert as_lists(row for row, _ in rest) == as_lists(row for row, _ in whole[number + 1 :])
        assert [after for _, after in rest] == [after for _, after in whole[number + 1 :]]


def test_equal_seeds_give_equal_orders_and_each_epoch_another(files: tuple[Path, ...]) -> None:
    def order(seed: int, epoch: int) -> list[Any]:
        found = [(piece, place) for piece, place in stream(files, 100, seed=seed, epochs=epoch + 1).pieces()]
        return [piece.tokens.tolist() for piece, _ in found][epoch * len(found) // (epoch + 1) :]

    assert order(0, 0) == order(0, 0)
    orders = [order(seed, epoch) for seed in range(4) for epoch in range(2)]
    assert len({json.dumps(one) for one in orders}) > 2


def test_the_order_does_not_depend_on_where_the_folder_lies(tmp_path: Path) -> None:
    first, second = (write_corpus(tmp_path / name, "mixed") for name in ("here", "there"))
    assert as_lists(row for row, _ in islice(stream(first).rows(), 20)) == as_lists(
        row for row, _ in islice(stream(second).rows(), 20)
    )


def test_of_prompt_and_completion_only_the_completion_is_learned(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "cd"})
    ((row, _),) = stream((file,), epochs=1).rows()
    assert row.tokens.tolist() == [*b"abcd", END, END, END, END]
    assert row.learned.tolist() == [False, False, True, True, True, False, False, False]
    assert row.documents.tolist() == [0, 0, 0, 0, 0, -1, -1, -1]


def test_no_more_than_a_window_is_read_ahead_and_a_document_is_cut_into_tokens_when_its_turn_comes(
    tmp_path: Path,
) -> None:
    seen: list[str] = []

    def tokenize(text: str) -> list[int]:
        seen.append(text)
        return to_bytes(text)

    file = write_lines(tmp_path / "a.jsonl", *({"text": f"document {number}"} for number in range(1000)))
    rows = TextStream((file,), TextFormat(tokenize, END, 257), 8, 0, window=10).rows()
    _, place = next(rows)
    assert len(seen) == 1
    assert place.offset == 0
    for _ in range(20):
        _, place = next(rows)
    assert len(seen) < 30
    assert place.offset > 0


def refusal(*files: Path, format: TextFormat = FORMAT) -> str:
    with pytest.raises(InputError) as caught:
        list(TextStream(files, format, 8, 0, epochs=1).rows())
    return str(caught.value)


def test_a_line_that_is_no_document_is_named_with_its_number(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"text": "good"}, "", "{not json")
    assert refusal(file) == (
        f"{file}:3: not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); "
        "correct the line"
    )
    for line in ({"caption": "x"}, {"text": 3}, ["text"], {"prompt": "alone"}):
        write_lines(file, {"text": "good"}, line)
        assert refusal(file) == (
            f"{file}:2: is no object with the string text, or with prompt and completion; correct the line"
        )


def test_files_that_hold_no_text_or_no_tokens_are_named(tmp_path: Path) -> None:
    text, ids = tmp_path / "a.txt", tmp_path / "b.npy"
    text.write_bytes(b"ab\xff")
    assert refusal(text) == f"{text}: is not UTF-8 (byte 2); convert it"
    np.save(ids, np.zeros((2, 2), dtype=np.int64))
    assert refusal(ids) == f"{ids}: holds int64 of shape (2, 2), not a row of token ids"
    np.save(ids, np.array([1, 2, 300]))
    assert refusal(ids) == (f"{ids}: token 2 is 300, but the model's are 0 to 256; it was made with another tokenizer")
    ids.write_bytes(b"no array")
    assert refusal(ids).startswith(f"{ids}: is no .npy file of numbers (")
    np.save(ids, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert refusal(ids).startswith(f"{ids}: is no .npy file of numbers (Array can't be memory-mapped")


def test_a_folder_without_texts_is_refused_and_other_files_in_it_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("hello")
    with pytest.raises(InputError) as caught:
        find_texts(tmp_path)
    assert str(caught.value) == f"data.path: {tmp_path} holds no text; name a file or folder of .txt, .jsonl, .npy"
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    assert [file.name for file in find_texts(tmp_path)] == ["a.txt", "b.txt"]
    assert find_texts(tmp_path / "a.txt") == (tmp_path / "a.txt",)


def test_texts_of_nothing_are_refused_instead_of_searched_for_ever(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"text": ""}, {"text": ""})
    with pytest.raises(InputError) as caught:
        next(stream((file,)).rows())
    assert str(caught.value) == f"data.path: {file} and what is beside it hold no text of two tokens"
    assert list(stream((file,), epochs=1).rows()) == []


def test_the_digest_changes_with_the_files(files: tuple[Path, ...]) -> None:
    before = digest_of(files)
    assert digest_of(files) == before
    assert digest_of(files[1:]) != before
    files[0].write_bytes(files[0].read_bytes() + b" ")
    assert digest_of(files) != before
