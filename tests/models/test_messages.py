"""The usual spellings of one conversation become the same tokens, whatever its template reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.text.test_text_stream import plain
from tests.models.test_chat import SPECIAL, chat, show
from trainer.data.text.text_documents import Encoder
from trainer.data.text.text_files import TextFolder, find_files
from trainer.data.text.text_stream import TextStream
from trainer.models.parts.chat.conversation import checked_messages
from trainer.models.parts.image.text_encoder import TINY_CHAT_TEMPLATE, train_tokenizer
from trainer.system.errors import InputError

ARGUMENTS = {"city": "Köln", "days": [1, None], "unit": {"name": "C"}}
TEMPLATE = """\
{%- if enable_thinking is defined and enable_thinking is false %}{{ 'OFF' }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}{% set call = call.function or call %}{{ '<call>' + call.name + ' ' }}ARGS
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
JSON = '{"city": "Köln", "days": [1, null], "unit": {"name": "C"}}'
WAYS = {
    "as JSON": ("{{ call.arguments | tojson }}", JSON),
    "as JSON unless it is a text": (
        "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}",
        JSON,
    ),
    "item by item": (
        "{% for key, value in call.arguments.items() %}{{ key }}={{ value if value is string else value | tojson }};"
        "{% endfor %}",
        'city=Köln;days=[1, null];unit={"name": "C"};',
    ),
    "joined to a text": ("{{ '(' + call.arguments + ')' }}", f"({JSON})"),
    "as it is": ("{{ call.arguments }}", JSON),
    "as part of the call": ("{{ call | tojson }}", f'{{"name": "sky", "arguments": {JSON}}}'),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["hello you how so well"] * 3, 300, 4096, SPECIAL, TINY_CHAT_TEMPLATE)


def called(**function: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "sky", **function}}
    return [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("way", WAYS)
def test_arguments_as_an_object_and_as_its_json_are_the_same_tokens_in_every_template(
    tokenizer: Any, tmp_path: Path, way: str
) -> None:
    source, expected = WAYS[way]
    made = chat(tokenizer, tmp_path, TEMPLATE.replace("ARGS", source))
    compact = json.dumps(ARGUMENTS, separators=(",", ":"))
    spellings = [called(arguments=one) for one in (ARGUMENTS, JSON, compact)]
    single = {"role": "assistant", "function_call": {"name": "sky", "arguments": compact}}
    flat = {"role": "assistant", "tool_calls": [{"name": "sky", "arguments": compact}]}
    in_tables = spellings[0][1] | {"tool_calls": json.dumps(spellings[0][1]["tool_calls"])}
    conversations = [*spellings, *([spellings[0][0], one] for one in (single, flat, in_tables))]
    encoded = {tuple(map(tuple, made.encode(one))) for one in conversations}
    assert len(encoded) == 1
    [(ids, loss_mask)] = encoded
    assert tokenizer.decode(ids).endswith(f"assistant\n<call>sky {expected}<|im_end|>\n")
    assert tokenizer.decode([one for one, in_loss in zip(ids, loss_mask, strict=True) if in_loss]) == (
        f"<call>sky {expected}<|im_end|>"
    )


def test_a_result_that_writes_the_arguments_as_python_does_not_change_how_they_are_read(
    tokenizer: Any, tmp_path: Path
) -> None:
    made = chat(tokenizer, tmp_path, TEMPLATE.replace("ARGS", "{{ call.arguments | tojson }}"))
    result = {"role": "tool", "content": f"sky({ARGUMENTS})"}
    ids, _ = made.encode([*called(arguments=ARGUMENTS), result, {"role": "assistant", "content": "So."}])
    assert f"<call>sky {JSON}<|im_end|>" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("", {}),
        ("{}", {}),
        ("print(1)", "print(1)"),
        ('"Paris"', '"Paris"'),
        ("[1]", "[1]"),
        ("{" * 5000, "{" * 5000),
        ({"unit": None}, {"unit": None}),
        ('{"unit": null}', {"unit": None}),
    ],
)
def test_arguments_that_are_no_json_of_an_object_stay_and_empty_ones_are_none(given: Any, read: Any) -> None:
    [_, message] = checked_messages(called(arguments=given))
    assert message["tool_calls"][0]["function"]["arguments"] == read


@pytest.mark.parametrize("calls", ["null", "[]", "", [], None])
def test_an_answer_without_calls_has_no_key_of_them(calls: Any) -> None:
    """Some templates ask whether there is the key."""
    [message] = checked_messages([{"role": "assistant", "content": "a", "tool_calls": calls}])
    assert message == {"role": "assistant", "content": "a"}
    with pytest.raises(InputError, match=r'^message 1: has no "content"; write it, or remove the message$'):
        checked_messages([{"role": "assistant", "content": None, "tool_calls": calls}])


@pytest.mark.parametrize(
    "calls", [5, ["call"], [{"function": "f"}], [{"function": {"name": "f"}}], [{"arguments": 5}], {"arguments": "{}"}]
)
def test_calls_of_another_shape_are_left_to_the_template(calls: Any) -> None:
    [message] = checked_messages([{"role": "assistant", "content": "a", "tool_calls": calls}])
    assert message["tool_calls"] == calls


def test_a_template_that_takes_neither_spelling_says_why(tokenizer: Any, tmp_path: Path) -> None:
    source = TEMPLATE.replace("ARGS", "{{ raise_exception('no calls') }}")
    with pytest.raises(InputError, match=r"the chat template refuses this conversation \(no calls\)"):
        chat(tokenizer, tmp_path, source).encode(called(arguments=ARGUMENTS))


def test_rows_of_lines_and_of_tables_in_either_spelling_train_bit_for_bit_the_same(
    tokenizer: Any, tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "sky", "parameters": {"type": "object"}}}
    source = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE.replace("ARGS", "{{ call.arguments | tojson }}")
    made = chat(tokenizer, tmp_path, source)
    rows = [
        {"messages": called(arguments={"city": "Ulm"}), "tools": [tool]},
        {"messages": called(arguments={"unit": "C"}), "tools": [tool]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    ]
    (tmp_path / "table").mkdir()
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "table" / "a.parquet")
    texts = [row | ({"tools": json.dumps(row["tools"])} if "tools" in row else {}) for row in rows]
    for row in texts[:2]:
        message = row["messages"][1]
        function = message["tool_calls"][0]["function"]
        as_text = {"type": "function", "function": function | {"arguments": json.dumps(function["arguments"])}}
        row["messages"] = [row["messages"][0], message | {"tool_calls": [as_text]}]
    for name, written in (("objects", rows), ("nulls", table.to_pylist()), ("texts", texts)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in written))
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "a.json").write_text(json.dumps(table.to_pylist()))
    encoder = Encoder(lambda text: [], 0, 1, chat=made.encode)
    found = [
        [
            plain(row)
            for row, _ in TextStream([TextFolder(find_files(tmp_path / name))], encoder, 0, 200, epochs=1).rows()
        ]
        for name in ("table", "objects", "nulls", "texts", "list")
    ]
    assert all(one == found[0] != [] for one in found)
    assert "null" not in tokenizer.decode([token for row in found[0] for token in row["tokens"]])


def test_variables_of_the_template_are_given_to_it(tokenizer: Any, tmp_path: Path) -> None:
    made = chat(tokenizer, tmp_path, TEMPLATE.replace("ARGS", ""))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    plain_text = show(tokenizer, made.encode(turns))
    assert show(tokenizer, made.encode(turns, None, {"enable_thinking": True})) == plain_text
    assert show(tokenizer, made.encode(turns, None, {"enable_thinking": False})) == f"OFF{plain_text}"
    assert show(tokenizer, made.encode(turns, None, {})) == plain_text


@pytest.mark.parametrize(
    ("variables", "wrong"),
    [
        ({"think": True}, '"chat_template_kwargs": "think" is not read by the chat template; remove it'),
        ({"enable": True}, '"chat_template_kwargs": "enable" is not read by the chat template; remove it'),
        ({"messages": []}, '"chat_template_kwargs": "messages" is not for rows to set; remove it'),
        ({"tokenizer_kwargs": True}, '"chat_template_kwargs": "tokenizer_kwargs" is not for rows to set; remove it'),
        ({"tokenize": True}, '"chat_template_kwargs": "tokenize" is not for rows to set; remove it'),
        ([1], '"chat_template_kwargs" is not an object; write {"name of a variable": value}'),
    ],
)
def test_variables_that_the_template_does_not_read_are_refused_by_name(
    tokenizer: Any, tmp_path: Path, variables: Any, wrong: str
) -> None:
    made = chat(tokenizer, tmp_path, TEMPLATE.replace("ARGS", ""))
    with pytest.raises(InputError) as caught:
        made.encode([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], None, variables)
    assert str(caught.value) == wrong
