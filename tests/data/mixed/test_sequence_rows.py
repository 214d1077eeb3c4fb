"""Rows with text and images: what each form becomes, and what is said of one that cannot be used."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from PIL import Image

from trainer.config.sections import DataConfig
from trainer.data.images.image_io import load_resized, read_header
from trainer.data.mixed import question_files
from trainer.data.mixed.question_files import Questions
from trainer.data.mixed.sequence_rows import EditChain, Part, TextPart
from trainer.system.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in (("a", (64, 48)), ("b", (32, 32))):
        Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
    return tmp_path


def read(file: Path, **changes: Any) -> Questions:
    return question_files.of_config(DataConfig(questions=str(file), **changes))


def written(folder: Path, *rows: Any) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def described(parts: Sequence[Part]) -> list[tuple[str, ...]]:
    """Each text with whether it is in the loss and kept, each image with its way."""
    return [
        (part.texts[0], *(["in the loss"] if part.in_loss else []), *(["kept"] if part.kept else []))
        if isinstance(part, TextPart)
        else (part.image.path.name, part.way, *(["kept"] if part.kept else []))
        for part in parts
    ]


def first(choices: int) -> int:
    return 0


def test_every_form_of_a_row_becomes_a_sequence(folder: Path) -> None:
    file = written(
        folder,
        {"image": "a.png", "question": " What is it? ", "answer": "A fox."},
        {
            "image": ["a.png", "b.png"],
            "conversations": [
                {"from": "human", "value": "<image>\n<image> Which is red?"},
                {"from": "gpt", "value": "The first."},
                {"from": "human", "value": "Sure?"},
                {"from": "gpt", "value": "Yes."},
            ],
        },
        {
            "images": ["b.png"],
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Look: <image>"},
                {"role": "assistant", "content": "Red."},
            ],
        },
        {
            "sequence": [
                {"text": "Think.", "keep": True},
                {"image": "a.png", "as": "both"},
                {"text": ["Make it blue.", "Blue, please."]},
                {"text": "It becomes blue.", "learned": True},
                {"image": "b.png", "as": "drawn"},
                {"image": "b.png", "as": "clean", "keep": True},
                {"image": "b.png"},
            ]
        },
        {"sequence": [{"text": "Only text.", "learned": True}]},
    )
    assert [described(row.sequence(first)) for row in read(file).train] == [
        [("a.png", "seen"), ("What is it?",), ("A fox.", "in the loss")],
        [
            ("a.png", "seen"),
            ("b.png", "seen"),
            ("Which is red?",),
            ("The first.", "in the loss"),
            ("Sure?",),
            ("Yes.", "in the loss"),
        ],
        [("Be brief.",), ("Look:",), ("b.png", "seen"), ("Red.", "in the loss")],
        [
            ("Think.", "kept"),
            ("a.png", "both"),
            ("Make it blue.",),
            ("It becomes blue.", "in the loss"),
            ("b.png", "drawn"),
            ("b.png", "clean", "kept"),
            ("b.png", "seen"),
        ],
        [("Only text.", "in the loss")],
    ]


def test_nulls_of_a_table_and_line_ends_of_windows_change_no_sequence(folder: Path) -> None:
    answer = {"from": "gpt", "value": "A.\r\nB.", "name": None, "weight": None}
    file = written(
        folder,
        {
            "sequence": [
                {"text": None, "image": "a.png", "as": None},
                {"text": "x\r\ny", "image": None, "learned": True},
            ]
        },
        {
            "system": "Be\r\nkind.",
            "sequence": None,
            "messages": None,
            "conversations": json.dumps([answer]),
            "tools": [],
        },
        {"system": "Hm.", "image": "a.png", "question": "Q", "answer": "A"},
    )
    with file.open("ab") as stream:  # two files joined, the second with a byte order mark
        stream.write(b"\xef\xbb\xbf\n\xef\xbb\xbf" + file.read_bytes().splitlines()[2])
    assert [described(row.sequence(first)) for row in read(file).train] == [
        [("a.png", "seen"), ("x\ny", "in the loss")],
        [("Be\nkind.",), ("A.\nB.", "in the loss")],
        [("Hm.",), ("a.png", "seen"), ("Q",), ("A", "in the loss")],
        [("Hm.",), ("a.png", "seen"), ("Q",), ("A", "in the loss")],
    ]


@pytest.mark.parametrize(
    "form", [("messages", "role", "content", "assistant"), ("conversations", "from", "value", "gpt")]
)
@pytest.mark.parametrize(
    "extra",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"thinking": "hm"},
        {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"function_call": {"name": "f"}},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"name": "Ada"},
    ],
)
def test_what_a_turn_holds_and_no_sequence_has_a_place_for_is_named(
    folder: Path, form: tuple[str, ...], extra: dict[str, Any]
) -> None:
    name, speaker, said, assistant = form
    turn = {speaker: assistant, said: "A fox."}
    file = written(folder, {name: [turn | dict.fromkeys(extra)]}, {name: [turn | extra]})
    with pytest.raises(InputError) as error:
        read(file)
    assert str(error.value) == (
        f'{file}:2: turn 1 of {name}: "{next(iter(extra))}" is not read by this kind of model; write it into "{said}", '
        "or remove it"
    )


ASKED = {"image": "a.png", "question": "What is it?", "answer": "A fox."}
SAID = {"messages": [{"role": "assistant", "content": "A fox."}]}
SHOWN = {"sequence": [{"text": "A fox.", "learned": True}]}


@pytest.mark.parametrize("row", [ASKED, SAID, SHOWN])
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "reasoning_details", "tools"])
def test_reasoning_and_tools_of_a_whole_row_are_refused(folder: Path, row: dict[str, Any], key: str) -> None:
    file = written(folder, row | {key: None}, row | {key: "It has a tail."})
    with pytest.raises(InputError) as error:
        read(file)
    assert str(error.value) == (
        f'{file}:2: "{key}" is not read by this kind of model; write it into the texts, or remove it'
    )


def test_the_system_message_of_a_row_is_the_first_text_of_every_form(folder: Path) -> None:
    rows = read(written(folder, *({"system": "You are a pirate."} | row for row in (SHOWN, SAID, ASKED)))).train
    assert [described(row.sequence(first)) for row in rows] == [
        [("You are a pirate.",), ("A fox.", "in the loss")],
        [("You are a pirate.",), ("A fox.", "in the loss")],
        [("You are a pirate.",), ("a.png", "seen"), ("What is it?",), ("A fox.", "in the loss")],
    ]
    with pytest.raises(InputError, match='"system" is not a text; write it in quotes'):
        read(written(folder, {"system": 5} | SHOWN))
    with pytest.raises(InputError, match="nothing in it is in the loss"):
        read(written(folder, {"system": "You are a pirate.", "sequence": []}))


def test_texts_of_rows_that_are_not_read_are_named_once_for_a_file(folder: Path) -> None:
    turn = {"role": "assistant", "content": "A fox.", "weight": 1, "critique": "Too short."}
    file = written(
        folder,
        ASKED | {"id": "7", "source": "LLaVA", "hint": ""},
        ASKED | {"rationale": "It has a tail.", "context": "What is it?"},
        ASKED | {"rationale": "It is red.", "text": "What is it? A fox."},
        SHOWN | {"hint": "Look at the tail."},
        {"image": [], "messages": [turn, turn], "options": ["a fox", "a cat"]},
    )
    found = read(file)
    assert len(found.train) == 5
    assert found.warnings == (
        f"{file}:2: the first row with texts that are not read, under rationale (2 rows), text (1 row), hint (1 row), "
        "options (1 row), messages.critique (1 row); move what matters into what is read",
    )


def test_a_row_all_of_whose_texts_are_read_is_not_named(folder: Path) -> None:
    asked = {"from": "human", "value": "<image> What is it?"}
    turns = [asked, {"from": "gpt", "value": "A fox."}]
    rows = ({"images": ["a.png"], "conversations": one} for one in (turns, json.dumps(turns)))
    assert read(written(folder, ASKED, SAID, SHOWN, *rows)).warnings == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [], "tools": [{"name": "f"}]},
            '"tools" is not read by this kind of model; write it into the texts',
        ),
        (
            {"messages": [], "chat_template_kwargs": {"a": 1}},
            '"chat_template_kwargs" is not read by this kind of model',
        ),
        ({"messages": "hm"}, '"messages" is not JSON (Expecting value); correct it'),
        ({"messages": [], "system": 5}, '"system" is not a text; write it in quotes'),
        ({"image": "c.png", "conversations": [{"from": "human", "value": "<image>?"}]}, "c.png: cannot be read"),
        (
            {"image": ["a.png", "b.png"], "conversations": [{"from": "human", "value": "<image>?"}]},
            "2 images, but 1 <image>; write one where each image belongs",
        ),
        (
            {"image": "a.png", "conversations": [{"from": "human", "value": "<image><image>"}]},
            "turn 1 has more <image> than the row has images, 1",
        ),
        (
            {"conversations": [{"from": "robot", "value": "hm"}]},
            "turn 1 of conversations: needs from, one of gpt, human, assistant, user, system, and value, a text",
        ),
        ({"video": "a.mp4", "conversations": []}, "videos are not read; give its frames as images"),
        ({"messages": [{"role": "user", "content": "hm"}]}, "nothing in it is in the loss"),
        ({"sequence": [{"text": "hm"}]}, "nothing in it is in the loss"),
        ({"sequence": [{"text": "hm", "image": "a.png"}]}, "part 1 of sequence: needs either text or image"),
        ({"sequence": [{"image": "a.png", "as": "paint"}]}, "part 1 of sequence: as: 'paint' is not one of seen"),
        ({"sequence": [{"image": "a.png", "way": "seen"}]}, "part 1 of sequence: 'way' is not one of as, image, keep"),
        ({"sequence": [{"text": "a", "learned": 1}]}, "part 1 of sequence: learned is true or false, not 1"),
        ({"sequence": [{"text": []}]}, "part 1 of sequence: text is not a text or a list of alternatives"),
        ({"sequence": "a"}, '"sequence" is not a list of parts with text or image'),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_file_and_line(folder: Path, row: Any, message: str) -> None:
    file = written(folder, {"sequence": [{"text": "good", "learned": True}]}, row)
    with pytest.raises(InputError) as error:
        read(file)
    assert str(error.value).startswith(f"{file}:2: ")
    assert message in str(error.value)


def test_a_conversation_whose_image_is_missing_may_be_left_out(folder: Path) -> None:
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "Red."}]
    file = written(folder, *({"image": f"{name}.png", "conversations": turns} for name in "ca"))
    found = read(file, bad_image="warn")
    assert len(found.train) == 1
    assert found.warnings[0].startswith(f"left out: {file}:1: ")


def bytes_of(color: str, size: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, "PNG")
    return stream.getvalue()


def parquet(file: Path, **columns: list[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=2)
    return file


def test_published_parquet_files_hold_edits_and_captioned_images(tmp_path: Path) -> None:
    colors = ("red", "green", "blue")
    parquet(
        tmp_path / "edits.parquet",
        image_list=[[bytes_of(color, (16 + n, 16)) for color in colors] for n in range(3)],
        instruction_list=[[["make it green", "green"], ["make it blue"]]] * 3,
    )
    parquet(
        tmp_path / "images.parquet",
        image=[bytes_of("red", (20, 16)), bytes_of("blue", (24, 16))],
        captions=[json.dumps({"short": "red", "long": "all red"}), "{}"],
    )
    found = read(tmp_path).train
    assert [type(row).__name__ for row in found] == ["EditChain"] * 3 + ["Row"] * 2
    last = found[2]
    assert isinstance(last, EditChain)
    assert [image.width for image in last.images] == [18, 18, 18]
    assert described(last.sequence(first)) == [("0", "both"), ("make it green",), ("1", "drawn")]
    assert load_resized(last.images[1], (2, 2)).getpixel((0, 0)) == (0, 128, 0)
    assert described(found[3].sequence(lambda count: count - 1)) == [("all red",), ("0", "drawn")]
    assert described(found[4].sequence(first)) == [(" ",), ("0", "drawn")]


def test_a_folder_of_questions_is_read_whole_and_files_of_other_kinds_are_counted(folder: Path) -> None:
    parquet(folder / "a.parquet", image=[bytes_of("red", (16, 16))], captions=['{"a": "all red"}'])
    (folder / "sub").mkdir()
    for name in ("rows.jsonl", "sub/c.JSONL"):
        (folder / name).write_text(json.dumps(SHOWN))
    assert [len(row.parts) for row in read(folder).train] == [2, 1, 1]
    assert read(folder).warnings == ()
    for name in ("d.json", "sub/e.csv", "f.jsonl.gz", "g.tar", "h.tsv", "dataset_info.json", "README.md"):
        (folder / name).write_text("{}")
    (found,) = read(folder).warnings
    assert found == (
        f"data.questions: {folder}: 5 files: d.json, f.jsonl.gz, g.tar, h.tsv, e.csv are not read; write their rows "
        "into .jsonl or .parquet files"
    )


def test_files_next_to_the_parquet_files_of_a_folder_that_hold_no_questions_are_left_out(folder: Path) -> None:
    parquet(folder / "a.parquet", image=[bytes_of("red", (16, 16))], captions=['{"a": "all red"}'])
    (folder / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a red square"}')
    (folder / "metadata.csv").write_text("file_name,text\na.png,a red square\n")
    (folder / "parquet_info").mkdir()
    (folder / "parquet_info" / "edits.json").write_text('{"a.parquet": {"num_row_groups": 1}}')
    assert (len(read(folder).train), read(folder).warnings) == (1, ())
    for name, line in (("b.jsonl", '{"image": "a.png", "text": "a red square"}'), ("c.jsonl", "[1]")):
        (folder / name).write_text(line)
    found = read(folder)
    assert len(found.train) == 1
    assert found.warnings == (
        f"data.questions: {folder}: 2 files: b.jsonl, c.jsonl are not read, since their first rows are of another "
        "form; where they are to be trained, write each row as a question with image and answer, conversations or "
        "messages, or sequence",
    )


@pytest.mark.parametrize(
    "line", ['{"image": "a.png", "question": "What?"}', "{", '{"conversations": []}'], ids=["no answer", "cut", "empty"]
)
def test_a_wrong_first_row_of_questions_is_refused_in_a_folder_too(folder: Path, line: str) -> None:
    parquet(folder / "a.parquet", image=[bytes_of("red", (16, 16))], captions=['{"a": "all red"}'])
    (folder / "b.jsonl").write_text(line)
    with pytest.raises(InputError, match=r"b\.jsonl:1: "):
        read(folder)


@pytest.mark.parametrize("name", ["metadata.jsonl", "b.jsonl"])
def test_rows_of_another_form_are_refused_where_nothing_else_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text('{"file_name": "a.png", "text": "a red square"}')
    for place in (folder, folder / name):
        with pytest.raises(InputError) as error:
            read(place)
        assert str(error.value) == (
            f'{folder}/{name}:1: no "image"; each line is a JSON object with image, question, answer, all texts, or '
            "with conversations, messages or sequence"
        )


def test_hidden_folders_and_runs_hold_no_questions(folder: Path) -> None:
    run = folder / "first-run"
    for place in (folder, folder / ".trash", run):
        place.mkdir(exist_ok=True)
        (place / "rows.jsonl").write_text(json.dumps(SHOWN))
    (folder / ".hidden.json").write_text("[]")
    (run / "config.yaml").write_text("name: first\n")
    (run / "logs").mkdir()
    found = read(folder)
    assert (len(found.train), found.warnings) == (1, ())


def test_a_folder_without_questions_is_refused(folder: Path) -> None:
    (folder / "rows.csv").write_text("question,answer\n")
    with pytest.raises(InputError) as error:
        read(folder)
    assert str(error.value) == (
        f"data.questions: {folder}: no .jsonl or .parquet files in this folder; write questions into such files"
    )


def test_texts_of_columns_that_are_not_read_are_named_once_for_a_file(tmp_path: Path) -> None:
    image = bytes_of("red", (16, 16))
    edits = parquet(
        tmp_path / "edits.parquet",
        image_list=[[image] * 2],
        instruction_list=[["make it red"]],
        rationale=["It was not red."],
        id=["7"],
    )
    drawn = parquet(tmp_path / "drawn.parquet", image=[image], captions=['{"a": "all red"}'], text=["It is red."])
    read_whole = parquet(tmp_path / "read.parquet", image=[image], captions=['{"a": "all red"}'], text=["all red"])
    assert read(edits).warnings == (f"{edits}: rows hold texts that are not read, under rationale; move what matters",)
    assert read(drawn).warnings == (f"{drawn}: rows hold texts that are not read, under text; move what matters",)
    assert read(read_whole).warnings == ()


def test_the_samples_of_a_chain_of_edits_are_those_of_the_published_program(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "0.png")
    image = read_header(tmp_path / "0.png")
    chain = EditChain((image,) * 4, (("one",), ("two",), ("three",)))
    counts = Counter(texts_of(chain, first, more) for first in range(3) for more in product_of(first))
    # From each image: one edit; two edits one after the other; two at once, but not to the last image.
    assert counts == {
        ("one",): 1,
        ("one", "two"): 1,
        ("one. two.",): 1,
        ("two",): 1,
        ("two", "three"): 1,
        ("two.",): 1,
        ("three",): 1,
    }


def product_of(first: int) -> list[tuple[int, ...]]:
    """The further picks: the number of edits, and whether two are made at once."""
    return [(0,), (1, 0), (1, 1)] if first < 2 else [(0,)]


def texts_of(chain: EditChain, first: int, more: Sequence[int]) -> tuple[str, ...]:
    """The instructions of the sample with these picks; there is one alternative of each."""
    numbers = iter((first, *more))
    parts = chain.sequence(lambda choices: next(numbers, 0))
    return tuple(part.texts[0] for part in parts if isinstance(part, TextPart))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("instruction_list", [[[5]]], "row 1: an instruction in instruction_list is not a text; write it"),
        ("instruction_list", [[[None]]], "row 1: 2 images in image_list and 1 instructions in instruction_list"),
        ("instruction_list", ["x"], "row 1: 2 images in image_list and 0 instructions in instruction_list"),
        ("image_list", ["x"], "its column image_list holds no lists of images; write one list for each row"),
        ("captions", ['{"a": "\\ud800"}'], 'row 1: "captions" holds \\ud800, which is half a character'),
        ("captions", [b"\xff"], "row 1: a text cannot be read ('utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_row_of_a_parquet_file_that_cannot_be_used_is_named(
    tmp_path: Path, column: str, value: list[Any], message: str
) -> None:
    image = bytes_of("red", (16, 16))
    edits: dict[str, Any] = {"image_list": [[image, image]], "instruction_list": [["x"]]}
    columns = {"image": [image]} if column == "captions" else edits
    if isinstance(value[0], bytes):
        value = pyarrow.array(value, pyarrow.binary()).cast(pyarrow.string(), safe=False)
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns | {column: value}), file)
    with pytest.raises(InputError) as error:
        read(file)
    assert str(error.value).startswith(f"{file}: {message}")


def test_nulls_and_empty_texts_among_the_alternatives_of_an_instruction_are_left_out(tmp_path: Path) -> None:
    image = bytes_of("red", (16, 16))
    (row,) = read(parquet(tmp_path / "A.PARQUET", image_list=[[image] * 2], instruction_list=[[["x", None, ""]]])).train
    assert isinstance(row, EditChain)
    assert row.instructions == (("x",),)


def test_a_parquet_file_of_another_kind_is_refused_with_its_columns(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", picture=[b"a"], text=["b"])
    with pytest.raises(InputError) as error:
        read(file)
    assert str(error.value) == (
        f"{file}: has the columns picture, text; expected image_list and instruction_list or image and captions"
    )
    with pytest.raises(InputError, match=r"row 1: 2 images in image_list and 2 instructions"):
        image = bytes_of("red", (16, 16))
        read(parquet(tmp_path / "b.parquet", image_list=[[image, image]], instruction_list=[["a", "b"]]))
    broken = tmp_path / "c.parquet"
    broken.write_text("no parquet")
    with pytest.raises(InputError, match="not a parquet file, or damaged"):
        read(broken)
