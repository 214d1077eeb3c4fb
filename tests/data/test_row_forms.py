"""What the rows of published datasets become: one text, prompt, conversation or pair of answers, whatever its form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.row_forms import COLUMNS, kind_of, kinds_of, present, standard, unread
from trainer.data.text.text_documents import Encoder
from trainer.models.parts.chat.conversation import checked_messages
from trainer.system.errors import InputError

NAMES = st.sampled_from(
    [*COLUMNS, "role", "content", "from", "value", "name", "arguments", "function", "tool_calls", "id"]
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=5),
    st.sampled_from(["user", "gpt", "function_call", "[{}]"]),
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


def said(*turns: str, **extra: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} | extra for role, content in zip(turns[::2], turns[1::2], strict=True)]


QA = said("user", "Q", "assistant", "A")
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param({"text": "a", "prompt": "b", "completion": "c"}, {"text": "a"}, id="text"),
        pytest.param({"prompt": "b", "completion": "c", "id": 1}, {"prompt": "b", "completion": "c"}, id="pair"),
        pytest.param({"messages": QA, "text": "Q A"}, {"messages": QA}, id="messages before the text of them"),
        pytest.param(
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A", "weight": 0}]},
            {"messages": [QA[0], QA[1] | {"weight": 0}]},
            id="ShareGPT",
        ),
        pytest.param(
            {
                "system": "S",
                "tools": '[{"name": "f", "default": null}]',
                "conversations": [
                    {"from": "human", "value": "Q"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "2"},
                    {"from": "gpt", "value": "A"},
                ],
            },
            {
                "messages": [
                    *said("system", "S", "user", "Q"),
                    {"role": "assistant", "tool_calls": [CALL]},
                    *said("tool", "2", "assistant", "A"),
                ],
                "tools": [{"name": "f", "default": None}],
            },
            id="ShareGPT with a tool",
        ),
        pytest.param({"conversation": QA}, {"messages": QA}, id="conversation"),
        pytest.param(
            {"messages": [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}], "system": "T"},
            {"messages": said("system", "S", "user", "Q")},
            id="ShareGPT's turns as messages, whose own system message counts",
        ),
        pytest.param(
            {"messages": '[{"role": "user", "content": "Q", "name": null}]'}, {"messages": QA[:1]}, id="JSON in a table"
        ),
        pytest.param(
            {"instruction": "I", "input": "", "output": "O"}, {"messages": said("user", "I", "assistant", "O")}
        ),
        pytest.param(
            {"instruction": "I", "input": "J", "output": "O", "system": "S", "history": [["P", "R"]]},
            {"messages": said("system", "S", "user", "P", "assistant", "R", "user", "I\nJ", "assistant", "O")},
            id="alpaca",
        ),
        pytest.param(
            {"instruction": "I", "context": "C", "response": "O", "category": "qa"},
            {"messages": said("user", "I\nC", "assistant", "O")},
            id="dolly",
        ),
        pytest.param({"question": "Q", "answer": "A"}, {"messages": QA}, id="question"),
        pytest.param(
            {"prompt": said("user", "Q", "assistant", "A", "user", "R"), "completion": said("assistant", "B")},
            {"messages": [QA[0], QA[1] | {"train": False}, *said("user", "R", "assistant", "B")]},
            id="TRL, whose prompt is not learned",
        ),
        pytest.param(
            {"prompt": said("user", "Q"), "completion": "A", "chat_template_kwargs": {"enable_thinking": False}},
            {"messages": QA, "chat_template_kwargs": {"enable_thinking": False}},
            id="TRL with variables of the template",
        ),
        pytest.param(
            {"prompt": json.dumps(said("user", "Q")), "completion": json.dumps(said("assistant", "A"))},
            {"messages": QA},
            id="TRL's lists as JSON texts",
        ),
        pytest.param(
            {"prompt": json.dumps(said("user", "Q")), "completion": "A"}, {"messages": QA}, id="a list in a table"
        ),
        pytest.param(
            {"prompt": '[{"x": 1}] is', "completion": "[]"}, {"prompt": '[{"x": 1}] is', "completion": "[]"}, id="code"
        ),
        pytest.param(
            {"prompt": '[{"x": 1}]', "completion": "[{]"}, {"prompt": '[{"x": 1}]', "completion": "[{]"}, id="data"
        ),
        *(
            pytest.param(row, row, id=f"JSON that is learned as text, {number}")
            for number, row in enumerate(
                (
                    {"prompt": "The flights", "completion": '[{"from": "Paris", "to": "London"}]'},
                    {"prompt": "Who", "completion": '[{"name": "Ann Lee", "role": "CEO"}]'},
                    {"prompt": "Who", "completion": '[{"role": "CEO", "content": "Ann Lee"}]'},
                    {"prompt": json.dumps(QA), "completion": "safe"},
                )
            )
        ),
    ],
)
def test_a_row_is_read_in_the_form_of_its_dataset(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert standard(row) == expected
    assert kind_of(row) == kind_of(expected)
    assert standard(expected) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Q", "chosen": "A", "rejected": "B", "score": 1}, {"prompt": "Q", "chosen": "A", "rejected": "B"}),
        (
            {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "A"}}
            | {"rejected": {"from": "gpt", "value": "B"}},
            {"prompt": QA[:1], "chosen": QA[1:], "rejected": said("assistant", "B")},
        ),
        (
            {"prompt": "Q", "chosen": [{"from": "gpt", "value": "A"}], "rejected": [{"from": "gpt", "value": "B"}]},
            {"prompt": "Q", "chosen": QA[1:], "rejected": said("assistant", "B")},
        ),
        (
            {"system": "S", "question": "Q", "chosen": "A", "rejected": "B"},
            {"prompt": said("system", "S", "user", "Q"), "chosen": QA[1:], "rejected": said("assistant", "B")},
        ),
        (
            {"instruction": "Q", "input": "R", "chosen": "A", "rejected": "B"},
            {"prompt": said("user", "Q\nR"), "chosen": QA[1:], "rejected": said("assistant", "B")},
        ),
        ({"messages": QA, "chosen": QA, "rejected": QA[:1]}, {"chosen": QA, "rejected": QA[:1]}),
        (
            {"prompt": "Who", "chosen": '[{"role": "CEO", "content": "Ann"}]', "rejected": "[]"},
            {"prompt": "Who", "chosen": '[{"role": "CEO", "content": "Ann"}]', "rejected": "[]"},
        ),
        (
            {"chosen": json.dumps(QA), "rejected": json.dumps(said("user", "Q", "assistant", "B"))},
            {"chosen": QA, "rejected": said("user", "Q", "assistant", "B")},
        ),
    ],
)
def test_two_answers_are_read_in_the_form_of_their_dataset(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert standard(row) == expected
    assert kind_of(row) == "preference"
    assert ("chat" in kinds_of(row)) == isinstance(expected["chosen"], list)


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"messages": "Q and A"}, '"messages" is not JSON (Expecting value); correct it'),
        ({"messages": 5}, '"messages" is not a list; give a list of objects with "role" and "content"'),
        ({"messages": QA, "tools": "{"}, '"tools" is not JSON (Expecting property name enclosed in double quotes)'),
        ({"instruction": 5, "output": "a"}, '"instruction" is not a string; write it in quotes'),
        ({"question": "a", "answer": ["b"]}, '"answer" is not a string; write it in quotes'),
        ({"prompt": [QA[0]], "completion": 5}, '"completion" is neither a string nor a list of messages'),
        (
            {"prompt": str(QA[:1]), "completion": str(QA[1:])},
            '"prompt" holds messages as Python prints them, not JSON; write them with json.dumps',
        ),
        (
            {"prompt": "a", "chosen": "[{'content': 'b', 'role': 'assistant'}]", "rejected": "c"},
            '"chosen" holds messages as Python prints them, not JSON; write them with json.dumps',
        ),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, '"history" is not a list of pairs; write [question,'),
        (
            {"conversations": [{"from": "function_call", "value": "f(x)"}]},
            'turn 1 of conversations: function_call is not JSON with "name" and "arguments"',
        ),
    ],
)
def test_a_row_that_is_wrong_is_named_by_its_key(row: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InputError) as caught:
        standard(row)
    assert str(caught.value).startswith(wrong)


def test_a_text_of_a_row_is_unread_unless_it_is_part_of_what_is_read() -> None:
    row = {"question": "Who is it?", "answer": "A fox.", "context": "The fox is red.", "id": "a b".replace(" ", "")}
    assert unread(row) == ["context"]
    assert unread(row | {"context": None, "options": ["the fox", "the cat"]}) == ["options"]
    assert unread({"text": "Who is it? A fox.", "question": "Who is it?", "answer": "A fox."}) == []
    assert unread({"instruction": "Do it.", "input": "to this", "output": "Done it.", "system": "Be kind."}) == []
    assert unread({"prompt": "Who is it?", "completion": "A fox.", "system": "Be kind."}) == ["system"]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": "Who is it?", "chosen": "A fox.", "rejected": "A cat.", "system": "Be kind."}, ["system"]),
        ({"question": "Who is it?", "chosen": "A fox.", "rejected": "A cat.", "system": "Be kind."}, []),
        ({"messages": [*said("system", "Be brief."), *QA], "system": "Be kind."}, ["system"]),
        ({"messages": [*said("system", "Be kind."), *QA], "system": "Be kind."}, []),
        ({"messages": QA, "system": "Be kind."}, []),
        ({"prompt": said("system", "Be brief."), "completion": "a", "system": "Be kind."}, ["system"]),
    ],
)
def test_a_system_message_that_a_row_does_not_read_is_unread(row: dict[str, Any], keys: list[str]) -> None:
    assert unread(row) == keys


def test_texts_of_scripts_without_blanks_are_texts() -> None:
    for text in ("首先我们计算结果再说明原因", "ก่อนอื่นเราคำนวณ", "まず結果を計算します"):
        assert unread({"question": "Q", "answer": "A", "reasoning": text}) == ["reasoning"]
    assert unread({"question": "Q", "answer": "A", "subject": "数学", "id": "wiki-000017-zh"}) == []


@given(st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=5), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_row_is_read_or_refused_by_a_sentence(row: dict[str, Any], compares: bool) -> None:
    def chat(messages: object, tools: object, variables: object) -> tuple[list[int], list[bool]]:
        return [1, 2][: len(checked_messages(messages))], [True, True][: len(checked_messages(messages))]

    encoder = Encoder(lambda text: list(text.encode()), 0, 300, chat=chat, compares=compares)
    known = present(row)
    unread(known)
    assert kinds_of(known) >= {kind_of(known)}
    try:
        document = encoder.row(known, lambda: "row")
    except InputError as error:
        assert str(error)
    else:
        assert len(document.tokens) == len(document.loss_mask)
