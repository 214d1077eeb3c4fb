"""Messages in their usual spellings, made one before a chat template renders them. Imports no torch.

The arguments of a tool call are an object, as in transformers and most templates, or the JSON text of one, as in the
API of OpenAI. A template reads one of them; conversations may have either.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.system.errors import InputError
from trainer.system.terminal import shortened

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
CALL = "function_call"
"""Key of a single call, which `tool_calls` replaced in OpenAI's API."""


def with_objects(message: Message) -> Message:
    """The message with its tool calls as a list, and their arguments as objects; what is not JSON stays as it is."""
    if CALL in message and not message.get("tool_calls"):
        called = {"type": "function", "function": message[CALL]}
        message = {key: value for key, value in message.items() if key != CALL} | {"tool_calls": [called]}
    if isinstance(message.get("tool_calls"), str):  # as in tables
        message = {**message, "tool_calls": _as_list(message["tool_calls"])}
    if "tool_calls" in message and message["tool_calls"] in (
        [],
        None,
    ):  # some templates ask for the key, not for what it holds
        message = {key: value for key, value in message.items() if key != "tool_calls"}
    return _with_arguments(message, _as_object)


def as_read(messages: Sequence[Message], render: Render) -> Sequence[Message]:
    """The messages with the arguments of tool calls in the spelling that a template reads.

    Args:
        messages: A conversation with arguments as objects.
        render: Renders a conversation. Raises InputError where the template refuses it.
    """
    given = [arguments for message in messages for arguments in _arguments_of(message) if isinstance(arguments, dict)]
    if not given:
        return messages
    texts = [_with_arguments(message, _as_text) for message in messages]
    try:
        text = render(messages)
    except InputError:
        try:  # a template that joins texts
            render(texts)
        except InputError:
            return messages
        return texts
    # A template that writes arguments as they are writes an object as Python does; so may a result of a tool.
    said = "\n".join(message.get("content") or "" for message in messages)
    is_python = any(arguments and str(arguments) in text and str(arguments) not in said for arguments in given)
    return texts if is_python else messages


def checked_variables(variables: object, template: str, apply: Callable[..., Any]) -> Mapping[str, Any]:
    """Check values for variables of a chat template.

    Args:
        variables: {name: value}.
        template: Its source.
        apply: The function of transformers that renders it, which takes arguments of its own by name, too.

    Raises:
        InputError: They are not an object, the template does not read one of them, or it is not for data to set.
    """
    if not isinstance(variables, dict):
        raise InputError('"chat_template_kwargs" is not an object; write {"name of a variable": value}')
    reserved = {"messages", *inspect.signature(apply).parameters}
    for name in variables:
        if name in reserved or not re.search(rf"\b{re.escape(name)}\b", template):
            why = "is not for rows to set" if name in reserved else "is not read by the chat template"
            raise InputError(f'"chat_template_kwargs": "{shortened(name, 40)}" {why}; remove it')
    return variables


def _calls_of(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _arguments_of(message: Message) -> list[Any]:
    """The arguments of each call, which may stand in its `function` or in the call itself."""
    functions = [call.get("function", call) for call in _calls_of(message) if isinstance(call, dict)]
    return [function["arguments"] for function in functions if isinstance(function, dict) and "arguments" in function]


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    if not _arguments_of(message):
        return message
    return {**message, "tool_calls": [_changed(call, change) for call in _calls_of(message)]}


def _changed(call: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(call, dict):
        return call
    if "arguments" in call:
        return {**call, "arguments": change(call["arguments"])}
    return {**call, "function": _changed(call["function"], change)} if "function" in call else call


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):  # a program, as some tools take
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_list(calls: str) -> Any:
    try:
        found = json.loads(calls) if calls.strip() else []
    except (ValueError, RecursionError):
        return calls
    return found if isinstance(found, list) else [] if found is None else [found]


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
