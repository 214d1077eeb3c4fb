"""The forms in which datasets write texts, prompts and conversations, read as one. Imports neither torch nor numpy.

A row becomes a text, a prompt with its completion, a conversation (`messages`), or two answers (`chosen`, `rejected`),
perhaps with `tools` and `chat_template_kwargs`. See DECISIONS 206.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from trainer.models.parts.chat.conversation import ASSISTANT, OTHER_ROLES, ROLES
from trainer.system.errors import InputError

Kind = Literal["text", "pair", "chat", "preference"]
TEXT: Kind = "text"
PAIR: Kind = "pair"
CHAT: Kind = "chat"
PREFERENCE: Kind = "preference"
ANSWERS = ("chosen", "rejected")
TURNS = ("messages", "conversations", "conversation")
"""Keys of a list of turns: as in transformers, and as in ShareGPT."""
FORMS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    (PREFERENCE, ANSWERS),
    *((CHAT, (key,)) for key in TURNS),
    (TEXT, ("text",)),
    (PAIR, ("prompt", "completion")),
    (CHAT, ("instruction", "output")),  # as in alpaca
    (CHAT, ("instruction", "response")),  # as in dolly
    (CHAT, ("question", "answer")),
)
"""The keys that make a row one of a kind; the first of these that a row has counts."""
QUESTIONS = ("instruction", "question")
OPTIONS = ("tools", "chat_template_kwargs")
"""Keys that a conversation passes on to the chat template."""
BEFORE = {"instruction": ("input", "context", "history", "system"), "question": ("system",)}
"""{key of a question: keys that are read with it}."""
COLUMNS = (*dict.fromkeys(key for _, keys in FORMS for key in keys), *BEFORE["instruction"], *OPTIONS)
"""The keys of rows that are read."""
KEYS = (
    "text, prompt and completion, messages or conversations, instruction and output, or question and answer; "
    "for preferences with chosen and rejected"
)
WITHOUT_BLANKS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]{8}")
"""Letters of scripts without blanks between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
SPEAKERS = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}
"""{who speaks in a turn of ShareGPT: the role of a message}; who is not here is a role."""


PYTHON = re.compile(r"\s*\[\{'(?:\w+': .*)?(?:role|from)': '(?:system|user|assistant|human|gpt)'", re.DOTALL)
"""The beginning of a list of messages as Python prints it, and as pandas writes it into .csv files."""


def kind_of(row: Mapping[str, Any] | Collection[str]) -> Kind:
    """The kind of document in a row.

    Args:
        row: The row, or its keys. A prompt that is a list of messages makes it a conversation.
    """
    kind, keys = _form_of(row)
    if kind != PAIR or not isinstance(row, Mapping):
        return kind
    row = _with_messages(row)
    return CHAT if any(isinstance(row[key], list) for key in keys) else kind


def kinds_of(row: Mapping[str, Any]) -> frozenset[Kind]:
    """The kind of a row; of two answers also what they are, or what they can be trained as without a preference."""
    kind, others = kind_of(row), without_answers(row)
    if kind != PREFERENCE:
        return frozenset({kind})
    is_chat = not isinstance(_with_messages(row)["chosen"], str) or _question_key(others) is not None
    other = {kind_of(others)} if is_known(others) else set()
    return frozenset({PREFERENCE, *other, *([CHAT] if is_chat else [])})


def possible_kinds(columns: Collection[str]) -> frozenset[Kind]:
    """The kinds that rows of a table can have, whose cells may be empty."""
    return frozenset(kind for kind, keys in FORMS if all(key in columns for key in keys)) or frozenset({TEXT})


def is_known(row: Mapping[str, Any] | Collection[str]) -> bool:
    """Whether a row has the keys of a document."""
    return bool(_form_of(row)[1])


def completed(filled: Mapping[str, str], cells: Mapping[str, str]) -> dict[str, Any]:
    """The filled cells of a row with the empty ones of the form that it begins; all cells if it begins none."""
    for _, keys in FORMS:
        if all(key in cells for key in keys) and any(key in filled for key in keys):
            return {**filled, **{key: cells[key] for key in keys}}
    return dict(cells)


def without_answers(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without the answers of a preference."""
    return {key: value for key, value in row.items() if key not in ANSWERS}


def present(value: Any) -> Any:
    """A row, or a part of one, without keys whose value is null: tables write them where a row lacks a column."""
    if isinstance(value, dict):
        return {key: present(one) for key, one in value.items() if one is not None}
    return [present(one) for one in value] if isinstance(value, list) else value


def folded(text: str) -> str:
    """A text with the line ends of Windows as those of all others."""
    return text.replace("\r\n", "\n")


def unread(row: Mapping[str, Any]) -> list[str]:
    """The keys of a row that hold sentences which are not among what is read of it."""
    kind, keys = _form_of(row)
    read = {*keys}
    if kind == PREFERENCE:
        read |= {"prompt", *TURNS, *QUESTIONS}
    if CHAT in kinds_of(row):
        read |= {*OPTIONS, *(BEFORE["instruction"] if kind == PREFERENCE else BEFORE.get(keys[0], ()))}
        read = read - {"system"} if _has_system(row) else read | {"system"}
    return unread_except(row, read)


def unread_except(row: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """The keys of a row that hold sentences which are not among what is under the keys of `read`."""
    others = {key: [*_sentences(value)] for key, value in row.items() if key not in read}
    if not any(others.values()):
        return []
    said = json.dumps([row[key] for key in row if key in read], default=str)
    return [key for key, sentences in others.items() if any(one not in said for one in sentences)]


def standard(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row in the form of its kind; a row without the keys of any is returned as it is.

    Raises:
        InputError: The reason, without file and line.
    """
    kind, keys = _form_of(row)
    if not keys:
        return dict(row)
    row = _with_messages(row)
    for key in ("prompt", "completion", *ANSWERS):
        if isinstance(row.get(key), str) and PYTHON.match(row[key]):
            raise InputError(f'"{key}" holds messages as Python prints them, not JSON; write them with json.dumps')
    if kind_of(row) in (TEXT, PAIR):
        return {key: folded(row[key]) if isinstance(row[key], str) else row[key] for key in keys}
    options = {key: as_json(row, key) for key in OPTIONS if row.get(key) not in (None, "")}
    if kind == PREFERENCE:
        return _answers(row) | options
    if keys[0] in TURNS:
        messages = _with_system(row, _turns(row, keys[0]))
    elif keys[0] in QUESTIONS:
        messages = [*_question(row, keys[0]), {"role": ASSISTANT, "content": _text(row, keys[1])}]
    else:
        # As in TRL, only the completion is in the loss.
        read = [
            message | {"train": False} if (isinstance(message, dict) and message.get("role") == ASSISTANT) else message
            for message in _prompt(row)
        ]
        messages = _with_system(row, [*read, *_said(row, "completion", ASSISTANT)])
    return {"messages": messages, **options}


def _form_of(row: Mapping[str, Any] | Collection[str]) -> tuple[Kind, tuple[str, ...]]:
    return next(((kind, keys) for kind, keys in FORMS if all(key in row for key in keys)), (TEXT, ()))


def _question_key(row: Mapping[str, Any]) -> str | None:
    """The key of what is asked in a row of two answers, where it is not `prompt`."""
    return None if "prompt" in row else next((key for key in (*TURNS, *QUESTIONS) if key in row), None)


def _answers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Two answers: texts with a prompt that is a text, or lists of messages."""
    key = _question_key(row)
    if key is None and all(isinstance(row.get(one, ""), str) for one in ("prompt", *ANSWERS)):
        return {one: folded(row[one]) for one in ("prompt", *ANSWERS) if one in row}
    if isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
        raise InputError('"chosen" and "rejected" must both be strings, or both lists of messages')
    made: dict[str, Any] = {one: _said(row, one, ASSISTANT) for one in ANSWERS}
    if key in QUESTIONS:
        made["prompt"] = _question(row, key)
    elif key is not None and not _begins_with(made["chosen"], turns := _turns(row, key)):
        made["prompt"] = _with_system(row, turns)
    elif "prompt" in row:
        # A text stays one: it may be among the messages of the answers.
        made["prompt"] = _with_system(row, _prompt(row)) if isinstance(row["prompt"], list) else row["prompt"]
    return made


def _begins_with(messages: Sequence[Any], turns: Sequence[Any]) -> bool:
    """Whether a conversation is among the turns: many sets have both the preferred one and its copy."""
    return list(messages[: len(turns)]) == list(turns) or list(turns[: len(messages)]) == list(messages)


def _prompt(row: Mapping[str, Any]) -> list[Any]:
    return _said(row, "prompt", "user")


def _said(row: Mapping[str, Any], key: str, role: str) -> list[Any]:
    """The messages of a prompt or an answer, which may be a text, a message, or a list of them."""
    value = row[key]
    if isinstance(value, str):
        return [{"role": role, "content": folded(value)}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise InputError(f'"{key}" is neither a string nor a list of messages')
    return [_message(turn, number, key) for number, turn in enumerate(value, 1)]


def _question(row: Mapping[str, Any], key: str) -> list[Any]:
    """The question after the turns of its `history`, pairs of a question and an answer."""
    more = [_text(row, name) for name in BEFORE[key][:2] if key == "instruction" and row.get(name)]
    messages = []
    history = as_json(row, "history") if key == "instruction" and row.get("history") else []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise InputError('"history" is not a list of pairs; write [question, answer] for each turn')
    for asked, answered in history:
        messages += [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": answered}]
    messages.append({"role": "user", "content": "\n".join([_text(row, key), *more])})
    return _with_system(row, messages)


def _turns(row: Mapping[str, Any], key: str) -> list[Any]:
    turns = as_json(row, key)
    if not isinstance(turns, list):
        raise InputError(f'"{key}" is not a list; give a list of objects with "role" and "content"')
    return [_message(turn, number, key) for number, turn in enumerate(present(turns), 1)]


def _message(turn: Any, number: int, key: str) -> Any:
    """A message of a turn, which may be one of ShareGPT. What is neither is refused where messages are checked."""
    if not isinstance(turn, dict):
        return turn
    turn = {name: _folded_content(value) for name, value in turn.items()}
    if "role" in turn or not isinstance(turn.get("from"), str):
        return turn
    speaker, said = turn["from"], turn.get("value")
    kept = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if speaker == "function_call":
        return {"role": ASSISTANT, "tool_calls": list(_calls(said, number, key)), **kept}
    return {"role": SPEAKERS.get(speaker, speaker), "content": said, **kept}


def _folded_content(value: Any) -> Any:
    if isinstance(value, str):
        return folded(value)
    is_parts = isinstance(value, list) and all(isinstance(part, dict) and "text" in part for part in value)
    return [part | {"text": _folded_content(part["text"])} for part in value] if is_parts else value


def _calls(said: Any, number: int, key: str) -> Iterator[dict[str, Any]]:
    """The tool calls of a turn, the JSON of one or of a list."""
    try:
        found = json.loads(said) if isinstance(said, str) else said
    except (ValueError, RecursionError):
        found = None
    calls = found if isinstance(found, list) else [found]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise InputError(f'turn {number} of {key}: function_call is not JSON with "name" and "arguments"')
        yield {"type": "function", "function": call}


def _with_system(row: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    """The messages after the system message that a row may have by itself."""
    system = row.get("system")
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if not system or first.get("role") in ("system", "developer"):
        return messages
    return [{"role": "system", "content": _text(row, "system")}, *messages]


def _with_messages(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with the messages that texts of it hold as JSON, as in tables.

    A model may learn to write JSON: answers are messages only if all are. It may learn to judge a conversation: a
    prompt that ends with an answer, and is followed by a text, is a text too.
    """
    answers = {key: _listed(row[key]) for key in ("completion", *ANSWERS) if key in row}
    are_messages = bool(answers) and all(isinstance(answer, list) for answer in answers.values())
    found = {**row, **answers} if are_messages else dict(row)
    prompt = _listed(row.get("prompt"))
    if isinstance(prompt, list) and (are_messages or not _ends_with_answer(prompt)):
        found["prompt"] = prompt
    return found


def _listed(value: Any) -> Any:
    """The messages that a text holds as JSON; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, list) and all(map(_is_message, found)) else value


def _ends_with_answer(messages: Sequence[Any]) -> bool:
    last = messages[-1] if messages else None
    return isinstance(last, dict) and ASSISTANT in (last.get("role"), SPEAKERS.get(str(last.get("from"))))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if "from" in value:
        return "value" in value and value["from"] in (*SPEAKERS, *ROLES)
    is_said = any(key in value for key in ("content", "tool_calls", "function_call"))
    return is_said and value.get("role") in (*ROLES, *OTHER_ROLES)


def _has_system(row: Mapping[str, Any]) -> bool:
    """Whether a conversation of the row begins with a system message, which then counts."""
    row = _with_messages(row)
    turns = (_listed(row[key]) if key in TURNS else row[key] for key in ("prompt", *TURNS, *ANSWERS) if key in row)
    firsts = (one[0] for one in turns if isinstance(one, list) and one and isinstance(one[0], dict))
    return any(first.get("role", first.get("from")) in ("system", "developer") for first in firsts)


def as_json(row: Mapping[str, Any], key: str) -> Any:
    """A value that may be a JSON text, as in tables, whose columns hold objects of one shape only."""
    value = row[key]
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise InputError(f'"{key}" is not JSON ({reason}); correct it') from error


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise InputError(f'"{key}" is not a string; write it in quotes')
    return folded(value)


def _sentences(value: Any) -> Iterator[str]:
    """The texts of several words in a value, as JSON has them."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _sentences(one)
    elif isinstance(value, str) and (" " in value.strip() or WITHOUT_BLANKS.search(value)):
        yield json.dumps(value)[1:-1]
