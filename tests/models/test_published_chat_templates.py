"""The chat templates that trl publishes, with conversations of twelve kinds: no text is lost without a word.

Every text of the conversations is a word of its own that no template writes, so that each is looked for by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import distribution
from typing import Any

import pytest

from tests.models.test_chat import chat, show
from trainer.models.parts.chat.chat_texts import NOT_TEXTS
from trainer.models.parts.chat.conversation import REASONING
from trainer.models.parts.image.text_encoder import train_tokenizer
from trainer.system.errors import InputError

MARK = re.compile(r"<[|\uff5c][^<>|\uff5c'\"{}\s]{1,40}[|\uff5c]>|<\|[a-z_]+>|<[a-z_]+\|>|</?[a-z_]+>|\[/?[A-Z_]+\]")
THINKS = "<think>\n{}\n</think>\n\n{}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bafosky",
            "description": "Bafodesc.",
            "parameters": {
                "type": "object",
                "properties": {"bafocity": {"type": "string", "description": "Bafoprop."}},
                "required": ["bafocity"],
            },
        },
    }
]
USER, SURE = {"role": "user", "content": "Bafoask"}, {"role": "user", "content": "Bafosure"}
SUN, DONE = {"role": "tool", "name": "bafosky", "content": "Bafosun"}, {"role": "assistant", "content": "Bafodone"}


def says(content: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


def calls(arguments: Any = None, **others: Any) -> dict[str, Any]:
    function = {"name": "bafosky", "arguments": {"bafocity": "Bafoulm"} if arguments is None else arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}], **others}


# Gemma 4 writes what is said with a call after the result of the tool, so that it is not one turn: it is refused.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "turns": ([USER, says("Bafoone"), SURE, says("Bafotwo")], None),
    "system": ([{"role": "system", "content": "Bafokind"}, USER, says("Bafoone")], None),
    "thinking inside": (
        [USER, says(THINKS.format("Bafohm", "Bafoone")), SURE, says(THINKS.format("Bafoum", "C"))],
        None,
    ),
    **{
        key: ([USER, says("Bafoone", **{key: "Bafohm"}), SURE, says("Bafotwo", **{key: "Bafoum"})], None)
        for key in REASONING
    },
    "calls": ([USER, calls(), SUN, DONE], TOOLS),
    "calls as text": ([USER, calls('{"bafocity": "Bafoulm"}'), SUN, DONE], TOOLS),
    "calls and says": ([USER, calls(content="Bafolook"), SUN, DONE, SURE, says("Bafotwo")], TOOLS),
    "calls and thinks": ([USER, calls(reasoning_content="Bafohm"), SUN, DONE], TOOLS),
    "names": ([USER | {"name": "Bafoada"}, says("Bafoone", name="Bafobot")], None),
    "other keys": ([USER | {"source": "Bafoforum"}, says("Bafoone", weight=0), SURE, says("Bafotwo")], None),
}


def published() -> dict[str, str]:
    """{name: source} of the templates in the package trl, which is not imported."""
    package = distribution("trl")
    files = [file for file in package.files or () if file.match("trl/chat_templates/*.jinja")]
    return {file.stem: str(package.locate_file(file).read_text(encoding="utf-8")) for file in files}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    marks = dict.fromkeys(mark for source in published().values() for mark in MARK.findall(source))
    made = train_tokenizer(["hello you how so well"] * 3, 1200, 2**20, ("<|endoftext|>", "<s>", *marks), "none")
    made.bos_token = "<s>"
    return made


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, word) of each text in a conversation."""
    if isinstance(value, str):
        yield from ((key, word) for word in re.findall(r"[Bb]afo\w+", value))
        return
    for inner, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if inner not in NOT_TEXTS:
            name = "tool_calls" if key == "tool_calls" else inner if isinstance(inner, str) else key
            yield from texts_of(one, name)
            yield from ((key if key == "tool_calls" else "properties", inner) for _ in [0] if "bafo" in str(inner))


def known_texts(source: str, tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=source, tokenize=True)["input_ids"]
    except Exception as error:  # noqa: BLE001  # a template may refuse anything, with any error
        return error


@pytest.mark.slow
def test_no_text_of_a_published_template_is_lost_without_a_word(tokenizer: Any, tmp_path: Any) -> None:
    templates = published()
    assert len(templates) >= 72
    assert len(CONVERSATIONS) == 12
    trained = refused = 0
    wrong: list[str] = []
    for name, source in templates.items():
        made = chat(tokenizer, tmp_path, source)
        for kind, (messages, tools) in CONVERSATIONS.items():
            expected = known_texts(source, tokenizer, messages, tools)
            if kind == "calls as text":  # they train as objects, where the template reads those
                spelled = known_texts(source, tokenizer, *CONVERSATIONS["calls"])
                expected = expected if isinstance(spelled, Exception) else spelled
            try:
                ids, loss_mask = made.encode(messages, tools)
            except InputError as error:
                refused += 1
                made.take_notes()
                said = str(error)
                is_split = kind == "calls and says" and "gemma" in name and "does not tell where this turn" in said
                is_named = "leaves out" in said or "does not write" in said or is_split
                if not isinstance(expected, Exception) and not is_named:
                    wrong.append(f"{name}, {kind}: {said}")
                continue
            trained += 1
            end = [tokenizer.eos_token_id]
            if isinstance(expected, Exception):
                wrong.append(f"{name}, {kind}: refused by transformers")
            elif kind != "calls as text" and list(expected) not in (ids, ids[: -len(end)] if ids[-1:] == end else ids):
                wrong.append(f"{name}, {kind}: other tokens than transformers'")
            notes = "; ".join(made.take_notes())
            text = tokenizer.decode(ids)
            taught = "".join(re.findall("⟦(.*?)⟧", show(tokenizer, (ids, loss_mask)), re.DOTALL))
            for key, word in texts_of({"messages": messages, "tools": tools or []}):
                if word not in text and f'"{key}"' not in notes:
                    wrong.append(f"{name}, {kind}: {word} of {key} is lost")
            said_last = [word for _, word in texts_of(messages[-1]) if word in text]
            wrong += [
                f"{name}, {kind}: {word} is not learned" for word in said_last if word not in taught and not notes
            ]
    assert not wrong, "\n".join(wrong)
    assert trained > 500, (trained, refused)
