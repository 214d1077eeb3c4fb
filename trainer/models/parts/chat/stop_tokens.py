"""Tokens at which programs end a generated text: those of a model's own files, and those its chat template teaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.models.parts.chat.chat_texts import CLOSE, OPEN, Message
from trainer.models.parts.chat.conversation import ASSISTANT, Chat
from trainer.system.errors import InputError

QUESTION, ANSWER, NEXT = (f"{OPEN}{number}{CLOSE}" for number in range(3))
CALL: Message = {
    "role": ASSISTANT,
    "content": "",
    "tool_calls": [{"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {}}}],
}
RESULT: Message = {"role": "tool", "content": NEXT, "name": "f", "tool_call_id": "call00001"}


@dataclass(frozen=True)
class Ends:
    """How the assistant's turns end in a chat template.

    Attributes:
        ids: The tokens that end them, as programs can stop at.
        text: An end that is not a token of the tokenizer, so that no program stops at it; empty where there is none.
    """

    ids: tuple[int, ...] = ()
    text: str = ""


def ends_of_turns(tokenizer: Any, chat: Chat) -> Ends:
    """Find how an answer ends, and a call of a tool, which some templates end with a token of its own.

    A template may end a turn with the mark of the next role only (GLM): then that mark is where generation ends.
    """
    asked: Message = {"role": "user", "content": QUESTION}
    answer: Message = {"role": ASSISTANT, "content": ANSWER}
    marks = frozenset(tokenizer.added_tokens_decoder) | frozenset(tokenizer.all_special_ids)
    end = _rendered(chat, [asked, answer]).rpartition(ANSWER)[2].strip()
    following = end or _between(_rendered(chat, [asked, answer, {"role": "user", "content": NEXT}]), ANSWER)
    found = [_first(tokenizer, following, marks)]
    called = _rendered(chat, [asked, CALL]).rstrip()
    if called and "tool_calls" in chat.template:
        # The last token of a text, where it is special: a call itself may end with a token, as `</tool_call>`.
        last: int = tokenizer(called, add_special_tokens=False, verbose=False)["input_ids"][-1]
        added = tokenizer.added_tokens_decoder.get(last)
        found.append(last if last in tokenizer.all_special_ids or (added is not None and added.special) else None)
        after = _rendered(chat, [asked, CALL, RESULT])
        if found[-1] is None and after.startswith(called):
            found.append(_first(tokenizer, _between(after, called), marks))
    is_lost = bool(end) and found[0] is None
    return Ends(tuple(dict.fromkeys(one for one in found if one is not None)), end.split()[0] if is_lost else "")


def _rendered(chat: Chat, messages: Sequence[Message]) -> str:
    try:
        return chat.text(messages)
    except InputError:  # a template may refuse tools, for example
        return ""


def _between(text: str, before: str) -> str:
    """The text between `before` and the content of the next message."""
    return text.partition(before)[2].partition(NEXT)[0].strip()


def _first(tokenizer: Any, text: str, marks: frozenset[int]) -> int | None:
    """The first token of a text, where it is a mark."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids[0] if ids and ids[0] in marks else None
