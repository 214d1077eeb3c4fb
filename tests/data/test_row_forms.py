"""What the rows of published datasets become: one text, prompt, conversation or pair of answers, whatever its form."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.errors import InputError
from trainer.data.row_forms import kind_of, kinds_of, standard, unread


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
    ],
)
def test_a_row_is_read_in_the_form_of_its_dataset(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert standard(row) == expected
    assert kind_of(row) == kind_of(expected)
    assert standard(expected) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"prompt": "Q", "chosen": "A", "rejected": "B", "score": 1},
            {"prompt": "Q", "chosen": "A", "rejected": "B"},
        ),
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
