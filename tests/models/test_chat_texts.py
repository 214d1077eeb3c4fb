"""No text of a conversation is lost without a word: it is learned or read, refused, or named in a note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_chat import CALLED, ENDLESS, THINKS, THOUGHT, TOOLS, TURNS, chat, refusal, show
from trainer.config.load import load_config
from trainer.launcher import preflight
from trainer.models.parts.chat.chat_template import check_marks
from trainer.models.parts.chat.chat_texts import OPEN, Sentinels, written
from trainer.models.parts.chat.conversation import Chat
from trainer.models.parts.image.text_encoder import TINY_CHAT_TEMPLATE, train_tokenizer
from trainer.system.errors import InputError

MARKS = ("im_start", "im_end", "end", "return", "call", "user", "assistant", "observation")
REMEDY = "which would not be in the loss; set data.chat_template to one that writes it, or remove it"
# As DeepSeek-R1-Distill's: it removes what was thought in every answer, opens it in the prompt, and writes no calls
# where an answer says something.
REMOVES = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.tool_calls and not message.content %}{{ message.tool_calls | tojson }}{% endif -%}
{{ (message.content or '').split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif -%}"""
# As gpt-oss': the last answer has another end than the others, and a call a third one.
TWO_ENDS = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role }}
{%- if message.tool_calls %}{{ ' calls ' + message.tool_calls[0].function | tojson + '<|call|>' }}
{%- else %}{{ ' says ' + message.content + ('<|return|>' if loop.last and message.role == 'assistant' else '<|end|>') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif -%}"""
# As GLM's: an answer ends where the next message begins.
NO_END = """\
{%- for message in messages -%}
{{ '<|' + {'tool': 'observation'}.get(message.role, message.role) + '|>' -}}
{{ message.content or (message.tool_calls[0].function | tojson) }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}"""
MARKED = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content or '' }}{% endgeneration %}{{ message.tool_calls | tojson if message.tool_calls }}
{%- else %}{{ message.content }}{% endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    special = ("<|endoftext|>", *(f"<|{mark}|>" for mark in MARKS))
    return train_tokenizer(["hello you how so well"] * 3, 300, 4096, special, TINY_CHAT_TEMPLATE)


def notes(made: Chat, messages: object, tools: object = None) -> list[str]:
    made.encode(messages, tools)
    return made.take_notes()


# Texts


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_a_template_does_not_write_is_refused(tokenizer: Any, key: str) -> None:
    thinks = [TURNS[0], TURNS[1] | {key: "o"}]  # a letter of what is written
    assert refusal(Chat(tokenizer, "chatml"), thinks) == (
        f'message 2: the chat template leaves out "{key}" of the assistant, {REMEDY}'
    )
    assert notes(Chat(tokenizer, "chatml"), [TURNS[0], TURNS[1] | {key: " "}]) == []


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_each_usual_key_is_learned_by_a_template_that_writes_it(
    tokenizer: Any, tmp_path: Path, key: str
) -> None:
    source = MARKED.replace("{{ message.content or '' }}", "{{ (message.reasoning_content or '') + message.content }}")
    found = show(tokenizer, chat(tokenizer, tmp_path, source).encode([TURNS[0], TURNS[1] | {key: "Hm"}]))
    assert "⟦HmHello, you<|im_end|>⟧" in found


def test_thinking_that_a_template_cuts_from_every_answer_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    made = chat(tokenizer, tmp_path, REMOVES)
    assert (
        refusal(made, THOUGHT) == f'message 2: the chat template leaves out "content" (Hm) of the assistant, {REMEDY}'
    )
    assert refusal(made, THOUGHT[2:]) == (
        f'message 2: the chat template leaves out "content" (well) of the assistant, {REMEDY}'
    )


def test_thinking_that_a_template_drops_from_earlier_answers_only_is_noted(tokenizer: Any, tmp_path: Path) -> None:
    made = chat(tokenizer, tmp_path, THINKS)
    note = 'the chat template leaves a part of "content" of the assistant out of turns before the last'
    for _ in range(2):  # what is known of the template changes nothing
        assert notes(made, THOUGHT) == [note]
        assert notes(made, THOUGHT[:2]) == []
    assert made.take_notes() == []


def test_what_is_known_of_dropped_thoughts_hides_no_other_loss(tokenizer: Any, tmp_path: Path) -> None:
    """The template drops the thoughts of earlier answers, and the content of every message that calls a tool."""
    source = THINKS.replace("{{ said }}", "{{ '' if message.tool_calls else said }}")
    made = chat(tokenizer, tmp_path, source)
    called = [CALLED[0], CALLED[1] | {"content": "I look first"}, *CALLED[2:]]
    why = f'message 2: the chat template leaves out "content" (I look first) of the assistant, {REMEDY}'
    assert refusal(made, called) == why
    assert len(notes(made, THOUGHT)) == 1
    assert refusal(made, called) == why


def test_a_prompt_for_an_answer_that_no_answer_follows_is_noted(tokenizer: Any, tmp_path: Path) -> None:
    made = chat(tokenizer, tmp_path, REMOVES)
    wrong = "the prompt for an answer ends with '<|im_start|>assistant\\n<think>\\n', which the answer does not follow"
    assert notes(made, TURNS) == [wrong]
    keeps = chat(tokenizer, tmp_path, REMOVES.replace(".split('</think>')[-1]", ""))
    assert notes(keeps, TURNS) == [wrong]
    assert notes(keeps, THOUGHT) == []


def test_an_answer_without_a_question_is_read_by_a_template_that_looks_at_the_first_message(
    tokenizer: Any, tmp_path: Path
) -> None:
    made = chat(tokenizer, tmp_path, "{%- if messages[0].role == 'system' %}{% endif -%}" + REMOVES)
    encoded = made.encode([{"role": "assistant", "content": "Hello"}])
    assert show(tokenizer, encoded) == "<|im_start|>assistant\n⟦Hello<|im_end|>⟧\n"


def test_calls_and_tools_that_a_template_leaves_out_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    made = chat(tokenizer, tmp_path, REMOVES)
    says = [CALLED[0], CALLED[1] | {"content": "I look."}, *CALLED[2:]]
    made.encode(CALLED)
    assert refusal(made, says) == f'message 2: the chat template leaves out "tool_calls" of the assistant, {REMEDY}'
    nameless = "{% for tool in tools or [] %}{{ tool.function.parameters | tojson }}{% endfor %}" + REMOVES
    assert refusal(chat(tokenizer, tmp_path, nameless), CALLED, TOOLS) == (
        "the chat template does not write tools; set data.chat_template to one that does, or remove them"
    )


def test_other_texts_that_a_template_leaves_out_are_noted_by_their_keys(tokenizer: Any, tmp_path: Path) -> None:
    made = Chat(tokenizer, "chatml")
    named = [TURNS[0] | {"name": "Ada", "meta": {"from": ["a forum"]}}, TURNS[1] | {"id": "x7", "weight": 1}]
    assert notes(made, named) == [
        'the chat template does not write "name" of messages of the user',
        'the chat template does not write "meta" of messages of the user',
    ]
    assert notes(made, TURNS) == []
    tools = [{"type": "function", "function": {"name": "sky", "description": "of the sky"}}]
    source = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + THINKS.split("\n", 1)[1]
    assert notes(chat(tokenizer, tmp_path, source), CALLED, tools) == [
        'the chat template does not write "description" of tools'
    ]
    properties = {"type": "object", "properties": {"in": {"type": "string", "enum": ["Ulm"]}}}
    tools = [{"type": "function", "function": {"name": "sky", "parameters": properties}}]
    assert notes(chat(tokenizer, tmp_path, source), CALLED, tools) == [
        'the chat template does not write "enum" of tools',
        'the chat template does not write "properties" of tools',
    ]


def test_what_is_written_outside_of_the_marks_is_noted(tokenizer: Any, tmp_path: Path) -> None:
    made = chat(tokenizer, tmp_path, MARKED)
    says = [CALLED[0], CALLED[1] | {"content": "I look."}, *CALLED[2:]]
    note = '"tool_calls" of the assistant is outside of what the chat template marks as its turn'
    assert note in notes(made, says)
    assert note not in notes(made, CALLED)  # nothing is marked, so that the turn is found by rendering what is before


def test_a_sentinel_stands_in_each_text_and_in_each_object_of_arguments() -> None:
    messages = [{"role": "user", "content": " a ", "name": "Ada"}, {**CALLED[1], "content": "<think>b</think>\n\nc"}]
    marked = Sentinels(messages, TOOLS)
    assert [(text.message, text.key, text.value) for text in marked.texts] == [
        (0, "content", "a"),
        (0, "name", "Ada"),
        (1, "tool_calls", "sky"),
        (1, "tool_calls", "in"),
        (1, "content", "b"),
        (1, "content", "c"),
        (-1, "name", "sky"),
    ]
    text = json.dumps([marked.messages, marked.tools])  # which writes private characters by their numbers
    assert OPEN not in text
    assert written(text) == set(range(7))
    only = Sentinels(messages, TOOLS, only=4)
    assert written(str([only.messages, only.tools])) == {4}
    assert only.texts == marked.texts


# Ends of turns


def test_an_end_that_the_marks_leave_out_is_learned_and_noted(tokenizer: Any, tmp_path: Path) -> None:
    made = chat(tokenizer, tmp_path, MARKED)
    assert show(tokenizer, made.encode(TURNS)) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello, you<|im_end|>⟧\n"
        "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n⟦So.<|im_end|>⟧\n"
    )
    note = "the {% generation %} marks leave out <|im_end|>, which ends a turn; it is in the loss as well"
    assert made.take_notes() == [note]
    assert notes(Chat(tokenizer, "chatml"), TURNS) == []


def test_each_answer_of_a_template_with_several_ends_is_learned_up_to_its_own(tokenizer: Any, tmp_path: Path) -> None:
    made = chat(tokenizer, tmp_path, TWO_ENDS)
    assert show(tokenizer, made.encode([*CALLED, *TURNS])) == (
        '<|im_start|>user says Weather?<|end|><|im_start|>assistant⟦ calls {"name": "sky", "arguments": {"in": "Ulm"}}'
        "<|call|>⟧<|im_start|>tool says sun<|end|><|im_start|>assistant⟦ says Sunny.<|end|>⟧"
        "<|im_start|>user says Hi<|end|><|im_start|>assistant⟦ says Hello, you<|end|>⟧"
        "<|im_start|>user says How?<|end|><|im_start|>assistant⟦ says So.<|return|>⟧"
    )
    assert made.take_notes() == []


def test_an_answer_that_the_next_message_ends_is_learned_with_the_mark_of_that(tokenizer: Any, tmp_path: Path) -> None:
    made = chat(tokenizer, tmp_path, NO_END)
    assert show(tokenizer, made.encode([*CALLED, *TURNS[:2]])) == (
        '<|user|>Weather?<|assistant|>⟦{"name": "sky", "arguments": {"in": "Ulm"}}<|observation|>⟧sun'
        "<|assistant|>⟦Sunny.<|user|>⟧Hi<|assistant|>⟦Hello, you<|endoftext|>⟧"
    )
    assert made.take_notes() == []


def test_answers_without_any_end_are_noted(tokenizer: Any, tmp_path: Path) -> None:
    made = chat(tokenizer, tmp_path, ENDLESS)
    assert notes(made, TURNS[:2]) == []
    assert notes(made, TURNS) == ["the chat template writes nothing after an answer: those before the last have no end"]


# Templates of our own on a tokenizer without their marks


def test_a_template_of_ours_is_refused_before_the_start_where_its_marks_are_not_tokens(
    tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TURNS}), encoding="utf-8")
    preset = tmp_path / "preset.yaml"
    preset.write_text("model: {family: causal_lm, path: model}\ndata: {path: a.jsonl, chat_template: llama-3}\n")
    marks = ["<|end_header_id|>", "<|eot_id|>", "<|start_header_id|>"]
    with pytest.raises(InputError) as caught:
        preflight.check(load_config(preset))
    assert str(caught.value) == (
        f"data.chat_template: llama-3 writes {', '.join(marks)}, which this model has not as tokens, so that other "
        "programs would not see where an answer ends; name chatml or mistral, or set model.options.new_tokens: "
        f"{json.dumps(marks)}, whose rows are trained with adapter.type: none or with adapter.modules_to_save"
    )
    preflight.check(load_config(preset, ["data.chat_template=chatml"]))
    preflight.check(load_config(preset, [f"model.options.new_tokens={json.dumps(marks)}", "adapter.type=none"]))
    check_marks("own.jinja", frozenset())
