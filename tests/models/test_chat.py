"""Conversations for language models: what a chat template makes of them, and which tokens are the assistant's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trainer.config.load import load_config
from trainer.launcher import preflight
from trainer.models.parts.chat.chat_template import (
    LINK,
    TEMPLATES,
    check_template,
    read_template,
    stored_tokens,
    template_names,
    without_marks,
)
from trainer.models.parts.chat.conversation import Chat, encode_spans
from trainer.models.parts.image.text_encoder import TINY_CHAT_TEMPLATE, train_tokenizer
from trainer.system.errors import InputError
from trainer.system.files import MIB, NOT_REGULAR

SPECIAL = (
    "<|endoftext|>",
    "<s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
)
MARK = "{% generation %} marks"
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello, you"},
    {"role": "user", "content": "How?"},
    {"role": "assistant", "content": "So."},
]
THOUGHT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nHm\n</think>\n\nHello, you"},
    {"role": "user", "content": "How?"},
    {"role": "assistant", "content": "<think>\nwell\n</think>\n\nSo."},
]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "sky", "arguments": {"in": "Ulm"}}}],
    },
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "Sunny."},
]
TOOLS = [{"type": "function", "function": {"name": "sky", "parameters": {"type": "object"}}}]

# Templates of the kinds that models bring. This one keeps what was thought only in the last turn, opens it in the
# prompt for a new answer, and writes tools and their calls.
THINKS = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{%- set said = (message.content or '').split('</think>')[-1].lstrip('\\n') -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last and '</think>' in (message.content or '') -%}
{{ message.content.split('</think>')[0] + '</think>\\n\\n' }}
{%- elif message.role == 'assistant' and loop.last -%}
{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif -%}
{{ said }}
{%- for call in message.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
FORGETS = """\
{%- for message in messages[-2:] -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}"""
SHOUTS = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content | upper + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
ENDLESS = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif -%}"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer(["hello you how so well"] * 3, 300, 4096, SPECIAL, TINY_CHAT_TEMPLATE)
    made.bos_token = "<s>"
    return made


def chat(tokenizer: Any, folder: Path, source: str, system: str = "") -> Chat:
    (folder / "own.jinja").write_text(source, encoding="utf-8")
    return Chat(tokenizer, str(folder / "own.jinja"), system)


def show(tokenizer: Any, encoded: tuple[list[int], list[bool]]) -> str:
    """The text, with what is in the loss in brackets."""
    parts = [(tokenizer.decode([one]), in_loss) for one, in_loss in zip(*encoded, strict=True)]
    return "".join(f"⟦{text}⟧" if in_loss else text for text, in_loss in parts).replace("⟧⟦", "")


SHOWN = {
    "chatml": (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello, you<|im_end|>⟧\n"
        "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n⟦So.<|im_end|>⟧\n"
    ),
    "gemma": (
        "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello, you<end_of_turn>⟧\n"
        "<start_of_turn>user\nHow?<end_of_turn>\n<start_of_turn>model\n⟦So.<end_of_turn>⟧\n"
    ),
    "llama-3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello, you<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nHow?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦So.<|eot_id|>⟧"
    ),
    "mistral": "<s>[INST] Hi [/INST]⟦ Hello, you<|endoftext|>⟧[INST] How? [/INST]⟦ So.<|endoftext|>⟧",
}


def test_each_template_of_our_own_is_shown_here() -> None:
    assert template_names() == tuple(SHOWN)
    assert [read_template(name) for name in SHOWN] == [
        (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8") for name in SHOWN
    ]


@pytest.mark.parametrize("name", SHOWN)
def test_every_turn_of_the_assistant_in_loss_with_its_end_and_nothing_else(tokenizer: Any, name: str) -> None:
    assert show(tokenizer, Chat(tokenizer, name).encode(TURNS)) == SHOWN[name]


@pytest.mark.parametrize("name", SHOWN)
def test_tokens_and_learned_ones_are_those_of_transformers(tokenizer: Any, name: str) -> None:
    ids, loss_mask = Chat(tokenizer, name).encode(TURNS)
    template = read_template(name)
    found = tokenizer.apply_chat_template(
        TURNS, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == list(found["input_ids"])
    assert loss_mask == [bool(one) for one in found["assistant_masks"]]


@pytest.mark.parametrize("name", SHOWN)
def test_without_marks_a_template_tells_the_same_by_the_beginnings_of_the_conversation(
    tokenizer: Any, tmp_path: Path, name: str
) -> None:
    source = without_marks(read_template(name))
    assert "generation" not in source.replace("add_generation_prompt", "")
    assert show(tokenizer, chat(tokenizer, tmp_path, source).encode(TURNS)) == SHOWN[name]


def test_a_template_that_drops_what_was_thought_in_earlier_turns_is_followed(tokenizer: Any, tmp_path: Path) -> None:
    made = chat(tokenizer, tmp_path, THINKS)
    assert show(tokenizer, made.encode(THOUGHT)) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello, you<|im_end|>⟧\n"
        "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nwell\n</think>\n\nSo.<|im_end|>⟧\n"
    )
    assert show(tokenizer, made.encode(TURNS)) == SHOWN["chatml"].replace("⟦So", "⟦<think>\n\n</think>\n\nSo")


@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_a_thought_that_the_prompt_opens_in_loss_from_where_the_model_goes_on(
    tokenizer: Any, tmp_path: Path, opened: str
) -> None:
    source = THINKS.replace(
        "assistant\\n' }}{% endif", f"assistant\\n{opened.encode('unicode_escape').decode()}' }}}}{{% endif"
    )
    assert show(tokenizer, chat(tokenizer, tmp_path, source).encode(THOUGHT)) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello, you<|im_end|>⟧\n"
        f"<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n{opened}⟦"
        + "<think>\nwell\n</think>\n\nSo.<|im_end|>⟧\n".removeprefix(opened)
    )


def test_calls_of_tools_are_learned_and_their_results_are_not(tokenizer: Any, tmp_path: Path) -> None:
    found = show(tokenizer, chat(tokenizer, tmp_path, THINKS).encode(CALLED, TOOLS))
    assert found == (
        '<|im_start|>system\n[{"type": "function", "function": {"name": "sky", "parameters": {"type": "object"}}}]'
        "<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<call>{"name": "sky", "arguments": {"in": "Ulm"}}</call><|im_end|>⟧\n<|im_start|>tool\nsun<|im_end|>\n'
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nSunny.<|im_end|>⟧\n"
    )


def test_answers_of_a_template_without_an_end_end_with_the_text(tokenizer: Any, tmp_path: Path) -> None:
    found = show(tokenizer, chat(tokenizer, tmp_path, ENDLESS).encode(TURNS[:2]))
    assert found == "user: Hi\nassistant: ⟦Hello, you\n<|endoftext|>⟧"


def test_what_follows_the_last_answer_is_left_out(tokenizer: Any) -> None:
    made = Chat(tokenizer, "chatml")
    assert made.encode([*TURNS, {"role": "user", "content": "And?"}]) == made.encode(TURNS)
    assert made.encode(TURNS[:1]) == ([], [])
    assert made.encode([]) == ([], [])


def test_the_system_message_is_added_where_there_is_none(tokenizer: Any) -> None:
    begun = [{"role": "system", "content": "Be kind."}, *TURNS]
    assert Chat(tokenizer, "chatml", "Be kind.").encode(TURNS) == Chat(tokenizer, "chatml").encode(begun)
    assert Chat(tokenizer, "chatml", "Be short.").encode(begun) == Chat(tokenizer, "chatml").encode(begun)


def test_a_list_of_texts_is_one_content(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]
    listed = [TURNS[0], {"role": "assistant", "content": parts}, *TURNS[2:]]
    assert Chat(tokenizer, "chatml").encode(listed) == Chat(tokenizer, "chatml").encode(TURNS)


def test_a_question_ends_where_its_answer_begins_and_an_answer_at_the_end_of_the_turn(tokenizer: Any) -> None:
    made = Chat(tokenizer, "chatml", "Be kind.")
    assert tokenizer.decode(made.prompt("Hi")) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert made.answer("Hello<|im_end|>\n<|im_start|>user\nand") == "Hello"


def refusal(made: Chat, messages: object, tools: object = None) -> str:
    with pytest.raises(InputError) as caught:
        made.encode(messages, tools)
    return str(caught.value)


@pytest.mark.parametrize(
    ("messages", "wrong"),
    [
        ({"role": "user"}, '"messages" is not a list; give a list of objects with "role" and "content"'),
        (["Hi"], 'message 1: not an object with a "role"; write {"role": "user", "content": ...}'),
        ([{"content": "Hi"}], 'message 1: not an object with a "role"; write {"role": "user", "content": ...}'),
        ([TURNS[0], {"role": "assistant"}], 'message 2: has no "content"; write it, or remove the message'),
        ([{"role": "user", "content": 5}], 'message 1: "content" is not a string; write it in quotes'),
        (
            [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image", "url": "a.png"}]}],
            'message 1: "content" holds image; a language model reads texts only, remove it',
        ),
        (
            [{"role": "Assistant", "content": "Hi"}],
            "message 1: \"role\": 'Assistant' is not one of system, developer, user, assistant, tool; "
            "did you mean 'assistant'?",
        ),
        (
            [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Hello"}],
            "message 1: \"role\": 'human' is not one of system, developer, user, assistant, tool",
        ),
        (
            [TURNS[0], {"role": "assistant", "content": "a\udfff"}],
            "message 2: holds \\udfff, which is half a character; remove it",
        ),
        (
            [TURNS[0], TURNS[1] | {"weight": 0.5}],
            'message 2: "weight" is 0.5; use 0 or 1, or leave it out',
        ),
        ([TURNS[0], TURNS[1] | {"train": 0}], 'message 2: "train" is 0; use true or false'),
        (
            [*TURNS[:2], {"role": "tool", "content": "5"}, TURNS[1]],
            "the chat template refuses this conversation (after an optional system message, user and assistant must "
            "take turns, not tool)",
        ),
        (
            CALLED,
            "message 2: the chat template does not write tool_calls; set data.chat_template to one that does, or "
            "remove them",
        ),
    ],
)
def test_what_is_no_conversation_of_texts_is_refused_with_the_message(
    tokenizer: Any, messages: object, wrong: str
) -> None:
    assert refusal(Chat(tokenizer, "gemma"), messages) == wrong


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        (
            FORGETS,
            "message 1: the chat template leaves out what the user says; set data.chat_template to one that writes it, "
            "or remove it",
        ),
        (
            SHOUTS,
            "the chat template changes what the assistant says, so that its tokens cannot be identified; "
            f"set data.chat_template to a template with {MARK}",
        ),
        ("{{ messages[0].content.__class__.__mro__ }}", "the chat template refuses this conversation (access to "),
        ("{{ messages.append(1) }}", "the chat template refuses this conversation (access to "),
        ("{{ raise_exception('never') }}", "the chat template refuses this conversation (never)"),
    ],
)
def test_a_template_that_does_not_tell_whose_words_are_whose_is_refused(
    tokenizer: Any, tmp_path: Path, source: str, wrong: str
) -> None:
    assert refusal(chat(tokenizer, tmp_path, source), TURNS).startswith(wrong)


def test_a_template_that_leaves_out_what_the_system_says_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    source = (
        "{% for message in messages if message.role != 'system' %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    end = ": the chat template leaves out what the system says; set data.chat_template to one that writes it, or "
    end += "remove it"
    without = chat(tokenizer, tmp_path, source)
    assert without.encode(TURNS) == Chat(tokenizer, "chatml").encode(TURNS)
    assert refusal(without, [{"role": "system", "content": "Be kind."}, *TURNS]) == f"message 1{end}"
    with_system = Chat(tokenizer, str(tmp_path / "own.jinja"), "Be kind.")
    assert refusal(with_system, TURNS) == f"data.system{end}"
    short = [{"role": "user", "content": "o"}, *TURNS[1:]]  # a letter of what is written
    assert refusal(chat(tokenizer, tmp_path, FORGETS), short) == f"message 1{end}".replace("system", "user")


def test_a_role_that_only_the_template_knows_and_a_content_that_it_rewrites_are_read(
    tokenizer: Any, tmp_path: Path
) -> None:
    source = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
        "{{ message.content | tojson if message.role == 'sensor' else message.content }}"
        "{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    ids, loss_mask = chat(tokenizer, tmp_path, source).encode([{"role": "sensor", "content": 'a"b'}, TURNS[1]])
    assert '"a\\"b"' in tokenizer.decode(ids)
    assert tokenizer.decode([one for one, in_loss in zip(ids, loss_mask, strict=True) if in_loss]) == (
        "Hello, you<|im_end|>"
    )


@pytest.mark.parametrize("excluded", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
@pytest.mark.parametrize("marked", [True, False])
def test_a_turn_without_weight_is_read_and_not_learned(
    tokenizer: Any, tmp_path: Path, excluded: dict[str, Any], marked: bool
) -> None:
    template = read_template("chatml")
    made = chat(tokenizer, tmp_path, template if marked else without_marks(template))
    plain = made.encode(TURNS)
    ids, loss_mask = made.encode([TURNS[0], TURNS[1] | excluded, TURNS[2], TURNS[3] | {"weight": 1, "train": True}])
    assert ids == plain[0]
    assert tokenizer.decode([one for one, in_loss in zip(ids, loss_mask, strict=True) if in_loss]) == "So.<|im_end|>"
    assert made.encode([*TURNS[:3], TURNS[3] | excluded]) == made.encode(TURNS[:2])
    assert made.encode([TURNS[0], TURNS[1] | excluded]) == ([], [])


def test_tools_for_a_template_without_them_are_refused(tokenizer: Any) -> None:
    assert refusal(Chat(tokenizer, "chatml"), TURNS, TOOLS) == (
        "the chat template does not write tools; set data.chat_template to one that does, or remove them"
    )
    assert refusal(Chat(tokenizer, "chatml"), TURNS, ["sky"]) == (
        '"tools" is not a list of objects; describe each tool as a JSON schema'
    )
    assert refusal(Chat(tokenizer, "chatml"), TURNS, [{"name": "\ud800"}]) == (
        '"tools" holds \\ud800, which is half a character; remove it'
    )


def test_a_template_that_cannot_be_used_is_named(tokenizer: Any, tmp_path: Path) -> None:
    names = ", ".join(template_names())
    broken = chat(tokenizer, tmp_path, "{% for message in messages %}")
    assert refusal(broken, TURNS).startswith(
        f"data.chat_template: {tmp_path}/own.jinja is not a jinja template (line 1: "
    )
    gone = refusal(Chat(tokenizer, str(tmp_path / "no.jinja")), TURNS)
    assert gone.startswith(f"data.chat_template: {tmp_path}/no.jinja cannot be read (")
    assert refusal(Chat(tokenizer, "chatlm"), TURNS) == (
        f"data.chat_template: 'chatlm' is not one of {names}, a .jinja file; did you mean 'chatml'?"
    )
    bare = train_tokenizer([], 257, 64, SPECIAL[:1], "")
    with pytest.raises(InputError, match=r"^data\.chat_template: the model's tokenizer has no chat template, which"):
        Chat(bare).prompt("Hi")
    assert refusal(Chat(bare), TURNS) == (
        "data.chat_template: the model's tokenizer has no chat template, which conversations need; "
        f"name one of {names}, or a .jinja file"
    )


def test_a_template_is_checked_before_a_rank_starts(tmp_path: Path) -> None:
    for name in template_names():
        check_template(name)
    (tmp_path / "own.jinja").write_text("{% generation %}\n{% for message in messages %}{% endgeneration %}")
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n')
    preset = tmp_path / "preset.yaml"
    preset.write_text("model: {family: causal_lm}\ndata: {path: a.jsonl, chat_template: own.jinja}\n")
    with pytest.raises(
        InputError, match=r"own\.jinja is not a jinja template \(line 2: Encountered unknown tag"
    ) as caught:
        preflight.check(load_config(preset))
    assert f"correct it, or name one of {', '.join(template_names())}" in str(caught.value)


def test_a_template_that_is_a_link_to_a_private_file_is_refused(tmp_path: Path) -> None:
    """It would be copied into what is exported."""
    for folder in ("home", "bundle"):
        (tmp_path / folder).mkdir()
    (tmp_path / "home" / "id_ed25519").write_text("private")
    (tmp_path / "bundle" / "own.jinja").symlink_to("../home/id_ed25519")
    (tmp_path / "bundle" / "chatml.jinja").write_text(read_template("chatml"))
    (tmp_path / "bundle" / "same.jinja").symlink_to("chatml.jinja")
    with pytest.raises(InputError) as refused:
        check_template(f"{tmp_path}/bundle/own.jinja")
    assert str(refused.value) == f"data.chat_template: {tmp_path}/bundle/own.jinja: {LINK}"
    check_template(f"{tmp_path}/bundle/same.jinja")
    (tmp_path / "own.jinja").symlink_to("home/id_ed25519")  # of a preset that was unpacked in the home itself
    with pytest.raises(InputError) as refused:
        check_template(f"{tmp_path}/own.jinja")
    assert str(refused.value) == f"data.chat_template: {tmp_path}/own.jinja: {LINK}"


def test_a_template_in_the_hugging_face_cache_is_read_through_its_link(tmp_path: Path) -> None:
    snapshot, blob = tmp_path / "snapshots" / ("0" * 40), tmp_path / "blobs" / "aa"
    for folder in (snapshot, blob.parent):
        folder.mkdir(parents=True)
    blob.write_text(read_template("chatml"))
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/aa")
    assert read_template(f"{snapshot}/chat_template.jinja") == read_template("chatml")


def test_a_template_that_was_saved_on_windows_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_bytes(read_template("chatml").replace("\n", "\r\n").encode())
    assert read_template(f"{tmp_path}/own.jinja") == read_template("chatml")


@pytest.mark.parametrize("kind", ["pipe", "long"])
def test_a_template_without_an_end_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "own.jinja"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        with file.open("wb") as stream:
            stream.truncate(2 * MIB)
    reason = NOT_REGULAR if kind == "pipe" else "longer than 1 MiB; remove it, or put a shorter one in its place"
    with pytest.raises(InputError) as refused:
        check_template(str(file))
    assert str(refused.value) == f"data.chat_template: {file}: {reason}"


def test_a_tokenizer_without_an_end_or_nested_too_deep_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("[" * 100_000)
    with pytest.raises(InputError) as refused:
        stored_tokens(tmp_path)
    assert str(refused.value) == f"{file}: nested too deep for a tokenizer; download the model again"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InputError) as refused:
        stored_tokens(tmp_path)
    assert str(refused.value) == f"{file}: {NOT_REGULAR}"
    file.unlink()
    file.write_text("[]")
    assert stored_tokens(tmp_path) is None


def test_a_token_that_holds_a_letter_of_a_span_in_loss() -> None:
    merged = train_tokenizer(["is it so yes"] * 9, 280, 64, SPECIAL[:1], "")
    ids, loss_mask = encode_spans(merged, "is it so yes", [(4, 12)])
    assert [merged.decode([one]) for one in ids] == ["is", " it", " so", " yes"]
    assert loss_mask == [False, True, True, True]
    assert encode_spans(merged, "is it so yes", [(0, 2), (6, 8)])[1] == [True, False, True, False]
    assert encode_spans(merged, "is it so yes", [])[1] == [False] * 4
