"""The texts of a conversation: a sentinel in each shows which of them its rendering holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
"""A message as in transformers: `role`, `content`, and for assistants optionally `tool_calls`."""

OPEN, CLOSE = "\ue0f0", "\ue0f1"
"""Private characters around the numbers of sentinels; no published text holds them."""
SENTINEL = re.compile(rf"(?:{OPEN}|\\ue0f0)(\d+)(?:{CLOSE}|\\ue0f1)")
"""A sentinel as it is, or in a text that writes such characters by their numbers, as JSON may."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Usual keys of what an assistant thinks before it answers. Templates read the first, some of them the last."""
NOT_TEXTS = frozenset({"role", "type", "id", "tool_call_id", "index", "weight", "train"})
"""Keys of messages and calls whose values say how to read the others, or which of them belong together."""
DESCRIBES = frozenset({"description", "title", "enum", "default", "examples"})
"""Keys of a JSON schema whose texts are for its reader."""
MARKS = re.compile(
    r"</?(?:think|thinking|thought|reasoning|analysis|answer)>|<\|[^<>|\s]{1,40}\|?>|<[a-z_]{1,40}\|>"
    r"|<\uff5c[^<>\s]{1,40}\uff5c>|\[/?THINK\]"
)
"""Marks of models inside a content, between which a template may leave out parts."""


@dataclass(frozen=True)
class Text:
    """A text of a conversation.

    Attributes:
        message: Index of its message; -1 in the descriptions of tools.
        role: The role of the message; empty in the descriptions of tools.
        key: Its key, of a call of a tool `tool_calls`.
        value: The text; of arguments their names.
        mark: The mark that follows it in a content, as `</think>`; empty at the end.
    """

    message: int
    role: str
    key: str
    value: str
    mark: str = ""


class Sentinels:
    """Writes sentinels into copies of a conversation.

    Args:
        messages: The conversation.
        tools: Descriptions of tools.
        only: Number of the only text that gets its sentinel; None for all.

    Attributes:
        messages, tools: The copies.
        texts: The texts, by the number of their sentinel. Blank ones are left out.
    """

    def __init__(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, only: int | None = None
    ) -> None:
        self.texts: list[Text] = []
        self._only = only
        self.messages = [self._message(index, message) for index, message in enumerate(messages)]
        self.tools = None if tools is None else [self._tool(tool) for tool in tools]

    def _message(self, index: int, message: Message) -> Message:
        role = message["role"]
        made: dict[str, Any] = {}
        for key, value in message.items():
            if key == "content" and isinstance(value, str):
                made[key] = self._content(index, role, value)
            elif key == "tool_calls" and isinstance(value, list):
                made[key] = [self._call(index, role, call) for call in value]
            else:
                made[key] = value if key in NOT_TEXTS else self._any(index, role, key, value)
        return made

    def _content(self, index: int, role: str, content: str) -> str:
        """Each part of a content between marks has a sentinel: a template may leave out what was thought."""
        parts, start = [], 0
        for found in MARKS.finditer(content):
            parts += [self._text(index, role, "content", content[start : found.start()], found[0]), found[0]]
            start = found.end()
        return "".join([*parts, self._text(index, role, "content", content[start:])])

    def _call(self, index: int, role: str, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(index, role, call["function"])}
        made = dict(call)
        for key in ("name", "arguments", "parameters"):
            value = call.get(key)
            if isinstance(value, str):
                made[key] = self._text(index, role, "tool_calls", value)
            elif isinstance(value, Mapping) and value:
                made[key] = {self._text(index, role, "tool_calls", name): one for name, one in value.items()}
        return made

    def _tool(self, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(tool.get("function"), Mapping):
            return {**tool, "function": self._tool(tool["function"])}
        named = {"name": self._text(-1, "", "name", tool["name"])} if isinstance(tool.get("name"), str) else {}
        return {**self._schema(tool), **named}

    def _schema(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._schema(one) for one in value]
        if not isinstance(value, Mapping):
            return value
        made = {
            key: self._any(-1, "", key, one) if key in DESCRIBES and not isinstance(one, Mapping) else self._schema(one)
            for key, one in value.items()
        }
        if isinstance(value.get("properties"), Mapping):
            names = {name: self._text(-1, "", "properties", name) for name in value["properties"]}
            made["properties"] = {names[name]: one for name, one in made["properties"].items()}
            if isinstance(value.get("required"), list):
                made["required"] = [
                    names.get(name, name) if isinstance(name, str) else name for name in value["required"]
                ]
        return made

    def _any(self, index: int, role: str, key: str, value: Any) -> Any:
        """The texts in a value of any kind, under the key of the whole."""
        if isinstance(value, str):
            return self._text(index, role, key, value)
        if isinstance(value, Mapping):
            return {inner: self._any(index, role, key, one) for inner, one in value.items()}
        return [self._any(index, role, key, one) for one in value] if isinstance(value, list) else value

    def _text(self, index: int, role: str, key: str, text: str, mark: str = "") -> str:
        if not text.strip():
            return text
        # In the middle: templates look for marks at both ends.
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        middle = (begin + end) // 2
        number = len(self.texts)
        self.texts.append(Text(index, role, key, text.strip(), mark))
        return f"{text[:middle]}{OPEN}{number}{CLOSE}{text[middle:]}" if self._only in (None, number) else text


def written(text: str) -> frozenset[int]:
    """The numbers of the sentinels in a rendering."""
    return frozenset(int(number) for number in SENTINEL.findall(text))


def positions(text: str) -> Iterator[tuple[int, int]]:
    """(number, where it stands in the text without sentinels) of each sentinel in a rendering."""
    removed = 0
    for found in SENTINEL.finditer(text):
        yield int(found[1]), found.start() - removed
        removed += len(found[0])
