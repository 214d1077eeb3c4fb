"""Conversations as a language model reads them: rendered by a chat template, with the assistant's tokens known.

Templates are jinja and run in transformers' sandbox (`ImmutableSandboxedEnvironment`), which gives them no access to
files, modules or attributes of Python objects. Neither torch nor transformers is imported before a tokenizer is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.config.errors import InputError, not_one_of
from trainer.config.sections import TEMPLATE_SUFFIX, half_character
from trainer.models.parts.messages import CALL, as_read, checked_variables, with_objects

TEMPLATES = Path(__file__).parents[1] / "chat_templates"
"""Templates of our own, which `data.chat_template` names."""
MARKER = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")
END_MARKER = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")
"""The marks in a template around what the assistant writes."""
OPEN, CLOSE = "\ue0f0", "\ue0f1"
"""Private characters around the numbers of sentinels; no published text holds them."""
MOST_KEPT = 8
"""Values for variables of a template whose conversations stay prepared."""
THINKING, END_OF_THINKING = "<think>", "</think>"
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
OTHER_ROLES = ("function", "ipython", "observation", "environment")
"""Other names for the result of a tool, as some templates write them."""

Message = Mapping[str, Any]
"""A message as in transformers: `role`, `content`, and for assistants optionally `tool_calls`."""
Span = tuple[int, int]
"""Characters of a text, [start, stop)."""
Encoded = tuple[list[int], list[bool]]
"""The ids of a text, and which of them are learned."""


def template_names() -> tuple[str, ...]:
    """The names of our own templates, as `chatml`."""
    return tuple(sorted(file.stem for file in TEMPLATES.glob(f"*{TEMPLATE_SUFFIX}")))


def read_template(named: str) -> str:
    """Read a chat template. named: one of `template_names`, or a .jinja file.

    Raises:
        InputError: The template is not one of ours, or the file is missing.
    """
    file = Path(named).expanduser() if named.endswith(TEMPLATE_SUFFIX) else TEMPLATES / f"{named}{TEMPLATE_SUFFIX}"
    if not named.endswith(TEMPLATE_SUFFIX) and named not in template_names():
        raise InputError(f"data.chat_template: {not_one_of(named, (*template_names(), f'a {TEMPLATE_SUFFIX} file'))}")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"data.chat_template: {file} cannot be read ({error}); name another {TEMPLATE_SUFFIX} file"
        ) from error


def without_marks(template: str) -> str:
    """The same template without the marks of the assistant's turns, for programs that do not know them."""
    # Comments remove the same blanks around them.
    return END_MARKER.sub(r"{#\1 \2#}", MARKER.sub(r"{#\1 \2#}", template))


def check_template(named: str) -> None:
    """Check that a chat template can be read and is jinja. named: as for `read_template`.

    Raises:
        InputError: It cannot be used.
    """
    _check_jinja(named, read_template(named))


def _check_jinja(named: str, template: str) -> None:
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # The marks are a tag that transformers adds; here a block of jinja's own stands for it.
    source = END_MARKER.sub("{% endif %}", MARKER.sub("{% if 1 %}", template))
    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateSyntaxError as error:
        raise InputError(
            f"data.chat_template: {named} is not a jinja template (line {error.lineno}: {error.message}); correct it, "
            f"or name one of {', '.join(template_names())}"
        ) from error


def encode_spans(tokenizer: Any, text: str, spans: Sequence[Span]) -> Encoded:
    """Tokenize a text as a whole, without special tokens. A token is learned if a letter of it is in a span.

    Args:
        tokenizer: A fast tokenizer of transformers.
        text: The text.
        spans: The learned parts of it, in order.
    """
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    learned, number = [], 0
    for start, stop in found["offset_mapping"]:
        # Some tokenizers leave blanks out of the offsets: those of a blank token are then (stop, stop).
        first = start if start < stop else stop - 1
        while number < len(spans) and spans[number][1] <= first:
            number += 1
        learned.append(number < len(spans) and max(first, spans[number][0]) < stop)
    return list(found["input_ids"]), learned


@dataclass(frozen=True)
class Turns:
    """The text that a template writes around the content of a question and of its answer.

    Attributes:
        header: The text before an answer that is yet to come.
        end: The text after an answer, without blanks at its end.
    """

    header: str
    end: str

    @property
    def stop(self) -> str:
        """The text after which an answer is complete; empty if nothing tells."""
        return self.end.split()[0] if self.end else ""


class Chat:
    """Conversations for one tokenizer.

    Args:
        tokenizer: A tokenizer of transformers.
        named: `data.chat_template`; None takes the tokenizer's own template.
        system: Text of the system message that conversations without one get; empty for none.
        variables: Values for variables of the template.
    """

    def __init__(
        self, tokenizer: Any, named: str | None = None, system: str = "", variables: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._named = named
        self._system = system
        self._variables = variables or {}
        self._others: dict[str, Chat] = {}

    @cached_property
    def template(self) -> str:
        """The source of the template.

        Raises:
            InputError: There is none, it is not jinja, or the tokenizer cannot tell which letters a token holds.
        """
        if self._named is None and not self._tokenizer.chat_template:
            raise InputError(
                "data.chat_template: the model's tokenizer has no chat template, which conversations need; "
                f"name one of {', '.join(template_names())}, or a {TEMPLATE_SUFFIX} file"
            )
        if not self._tokenizer.is_fast:
            raise InputError(
                "model.path: its tokenizer cannot tell which letters a token holds, which conversations need; "
                "use a model with a tokenizer.json"
            )
        text: str = read_template(self._named) if self._named else self._own_template()
        _check_jinja(self._named or "the model's own", text)
        return text

    def _own_template(self) -> str:
        """The tokenizer's template; of several with names, the one named default."""
        try:
            return str(self._tokenizer.get_chat_template())
        except ValueError as error:
            raise InputError(
                f"data.chat_template: the model's tokenizer has several chat templates ({error}); name one of "
                f"{', '.join(template_names())}, or a {TEMPLATE_SUFFIX} file"
            ) from error

    @cached_property
    def turns(self) -> Turns:
        """Beginning and end of an answer, from a conversation of one question; empty if the template refuses it."""
        question, answer = f"{OPEN}0{CLOSE}", f"{OPEN}1{CLOSE}"
        asked: list[Message] = [{"role": "user", "content": question}]
        try:
            plain, open_end = self._render(asked, None), self._render(asked, None, is_open=True)
            whole = self._render([*asked, {"role": ASSISTANT, "content": answer}], None)
        except InputError:
            return Turns("", "")
        header = open_end[len(plain) :] if open_end.startswith(plain) else ""
        header = header or open_end.partition(question)[2]
        return Turns(header, whole.partition(answer)[2].rstrip())

    def encode(self, messages: object, tools: object = None, variables: object = None) -> Encoded:
        """Tokenize a conversation. Learned are the assistant's turns, each with the token that ends it.

        Turns with `weight: 0` or `train: false` are read only. Messages after the last learned turn are left out:
        nothing is learned from them.

        Args:
            messages: The conversation, as in transformers.
            tools: Descriptions of the tools the assistant may call, as in transformers; None for none.
            variables: Values for variables of the template, as TRL's `chat_template_kwargs`; None for none.

        Returns:
            No tokens if nothing is learned.

        Raises:
            InputError: The conversation cannot be used, or the template does not tell what the assistant wrote. The
                message names no file.
        """
        if variables:
            return self._with(variables).encode(messages, tools)
        checked = checked_messages(messages)
        self._check_roles(checked)
        spoken = [number for number, message in enumerate(checked) if message["role"] == ASSISTANT]
        learned = [number for number in spoken if not is_read_only(checked[number], number + 1)]
        if not learned:
            return [], []
        conversation = self._with_system(checked[: learned[-1] + 1])
        described = checked_tools(tools)
        self._check_reads(conversation, described)
        return self._encoded(as_read(conversation, lambda one: self._render(one, described)), described)

    def _with(self, variables: object) -> Chat:
        """The same conversations with values for variables of the template; those of the last rows are kept."""
        known = checked_variables(variables, self.template, self._tokenizer.apply_chat_template)
        key = json.dumps(known, sort_keys=True, default=str)
        if key not in self._others:
            for old in list(self._others)[: 1 - MOST_KEPT]:
                del self._others[old]
            self._others[key] = Chat(self._tokenizer, self._named, self._system, known)
        return self._others[key]

    def text(self, messages: Sequence[Message]) -> str:
        """Render a conversation. Raises InputError if there is no template, or if it refuses the conversation."""
        return self._render(messages, None)

    def prompt(self, question: str) -> list[int]:
        """Tokenize a question from the user, up to where the assistant's answer begins."""
        text = self._render(self._with_system([{"role": "user", "content": question}]), None, is_open=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def answer(self, text: str) -> str:
        """The part of a generated text before the end of the assistant's turn."""
        return text.partition(self.turns.stop)[0] if self.turns.stop else text

    def _encoded(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Encoded:
        whole = self._render(messages, tools)
        self._check_written(messages, tools, whole)
        if MARKER.search(self.template) and (encoded := self._by_marks(messages, tools, whole)):
            return encoded
        spans = self._by_prefixes(messages, tools, whole) or self._by_sentinels(messages, tools, whole)
        if not _hold(messages, whole, spans):
            raise InputError(
                "the chat template changes what the assistant says, so that its tokens cannot be identified; "
                "set data.chat_template to a template with {% generation %} marks"
            )
        return self._with_end(encode_spans(self._tokenizer, whole, _learned_spans(messages, spans)))

    def _by_marks(self, messages: Sequence[Message], tools: Sequence[Any] | None, whole: str) -> Encoded | None:
        """By the template's own marks; None where they do not hold what the assistant says."""
        found = self._apply(
            messages,
            tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        written = [bool(one) for one in found["assistant_masks"]]
        spans = _runs(found["offset_mapping"], written)
        if not _hold(messages, whole, spans):
            return None
        chosen = _learned_spans(messages, spans)
        offsets = zip(found["offset_mapping"], written, strict=True)
        learned = [one and any(a <= start and stop <= b for a, b in chosen) for (start, stop), one in offsets]
        return self._with_end((list(found["input_ids"]), learned))

    def _by_prefixes(self, messages: Sequence[Message], tools: Sequence[Any] | None, whole: str) -> list[Span]:
        """Where the text of the first messages is the beginning of the whole: turn by turn; else nothing."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            if number == 0:
                return []
            try:
                before = self._render(messages[:number], tools, is_open=True)
                after = self._render(messages[: number + 1], tools)
            except InputError:
                return []
            if not (whole.startswith(after) and after.startswith(before)):
                return []
            spans.append((len(before), self._end_of(after)))
        return spans

    def _by_sentinels(self, messages: Sequence[Message], tools: Sequence[Any] | None, whole: str) -> list[Span]:
        """By marks in the contents of the messages around each turn, for templates that treat the last turn otherwise.

        The turn begins after the header that follows the content before it, and ends with the last end of a turn before
        the content after it.
        """
        begins, ends = self._contents(messages, tools, whole)
        header, end = self.turns.header, self.turns.end
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            floor = ends[number - 1] if number else 0
            ceiling = begins[number + 1] if number + 1 < len(messages) else len(whole)
            start = _after(whole, header, floor, ceiling)
            start = begins[number] if start < 0 else start
            stop = _until(whole, end, max(start, ends[number]), ceiling) if end else ends[number]
            if start < 0 or stop < 0:
                raise InputError(
                    f"message {number + 1}: the chat template does not tell where this turn of the assistant begins "
                    "or ends; set data.chat_template to a template with {% generation %} marks"
                )
            spans.append((start, stop))
        return spans

    def _contents(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, whole: str
    ) -> tuple[list[int], list[int]]:
        """Where the content of each message begins and ends in the whole text, -1 where that is not known.

        Raises:
            InputError: The template leaves out the content of a message that is not the assistant's.
        """
        begins, ends = [], []
        for number, message in enumerate(messages):
            content = message.get("content") or ""
            begin, end = len(content) - len(content.lstrip()), len(content.rstrip())
            begins.append(self._position(messages, tools, number, begin, whole))
            ends.append(self._position(messages, tools, number, end, whole))
            if message["role"] != ASSISTANT and content.strip() and begins[-1] < 0 and ends[-1] < 0:
                raise InputError(
                    f"message {number + 1}: the chat template leaves out or changes what the {message['role']} says, "
                    "so that the assistant's tokens cannot be identified; set data.chat_template to a template that "
                    "keeps every message"
                )
        return begins, ends

    def _position(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, number: int, at: int, whole: str
    ) -> int:
        """The position in the whole text of letter `at` of a message's content, by a sentinel in its place; else -1."""
        content, sentinel = messages[number].get("content") or "", f"{OPEN}{number}{CLOSE}"
        marked = {**messages[number], "content": content[:at] + sentinel + content[at:]}
        try:
            text = self._render([*messages[:number], marked, *messages[number + 1 :]], tools)
        except InputError:
            return -1
        before, found, after = text.partition(sentinel)
        return len(before) if found and before + after == whole else -1

    def _end_of(self, text: str) -> int:
        """The end of the last turn of a text: blanks after the token that ends it are not learned."""
        return len(text.rstrip()) if self.turns.end else len(text)

    def _with_end(self, encoded: Encoded) -> Encoded:
        """End a conversation of a template without an end of turns with end-of-text: else answers have no end."""
        end = self._tokenizer.eos_token_id
        if self.turns.end or end is None or encoded[0][-1:] == [end]:
            return encoded
        return [*encoded[0], int(end)], [*encoded[1], True]

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not self._system or any(message["role"] in ("system", "developer") for message in messages):
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    def _check_reads(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        """Refuse tools and their calls for a template that would leave them out."""
        remedy = "set data.chat_template to one that does, or remove them"
        if tools and "tools" not in self.template:
            raise InputError(f"the chat template does not write tools; {remedy}")
        if "tool_calls" not in self.template:
            for number, message in enumerate(messages):
                if message.get("tool_calls"):
                    raise InputError(f"message {number + 1}: the chat template does not write tool_calls; {remedy}")

    def _check_roles(self, messages: Sequence[Message]) -> None:
        """Refuse roles that are not usual ones and that the template does not name, as `gpt`."""
        for number, message in enumerate(messages, 1):
            role = message["role"]
            if role in (*ROLES, *OTHER_ROLES) or f"'{role}'" in self.template or f'"{role}"' in self.template:
                continue
            raise InputError(f'message {number}: "role": {not_one_of(role, ROLES)}')

    def _check_written(self, messages: Sequence[Message], tools: Sequence[Any] | None, whole: str) -> None:
        """Refuse a message that the template leaves out, as templates without system messages do.

        whole: The text of the conversation. A template may change a content, as it does with results of tools: then a
        sentinel in it must be written.
        """
        shift = messages[0].get("content") == self._system
        for number, message in enumerate(messages):
            content = message.get("content") or ""
            if message["role"] == ASSISTANT or not content.strip() or content.strip() in whole:
                continue
            sentinel = f"{OPEN}{number}{CLOSE}"
            marked = {**message, "content": f"{sentinel}{content}"}
            try:
                text = self._render([*messages[:number], marked, *messages[number + 1 :]], tools)
            except InputError:  # its content is not any text, so it is read
                continue
            if sentinel not in text:
                named = "data.system" if not number and content == self._system else f"message {number + 1 - shift}"
                raise InputError(
                    f"{named}: the chat template leaves out what the {message['role']} says; set data.chat_template to "
                    "one that writes it, or remove it"
                )

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, is_open: bool = False) -> str:
        text: str = self._apply(messages, tools, tokenize=False, add_generation_prompt=is_open)
        return text

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any] | None, **options: Any) -> Any:
        template = self.template
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools or None, chat_template=template, **options, **self._variables
            )
        except Exception as error:  # a template is a program, which may raise anything
            raise InputError(f"the chat template refuses this conversation ({error})") from error


def checked_messages(messages: object) -> list[Message]:
    """Check a conversation, and join contents that are lists of texts.

    Raises:
        InputError: It is not a conversation of texts; the message names neither file nor line.
    """
    if not isinstance(messages, list):
        raise InputError('"messages" is not a list; give a list of objects with "role" and "content"')
    checked: list[Message] = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f'message {number}: not an object with a "role"; write {{"role": "user", "content": ...}}')
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_text_of(part, number) for part in content)
        if content is not None and not isinstance(content, str):
            raise InputError(f'message {number}: "content" is not a string; write it in quotes')
        if content is None and not message.get("tool_calls") and not message.get(CALL):
            raise InputError(f'message {number}: has no "content"; write it, or remove the message')
        if half := half_character(json.dumps(message, ensure_ascii=False, default=str)):
            raise InputError(f"message {number}: {half}")
        checked.append(with_objects({**message, "content": content}))
    return checked


def checked_tools(tools: object) -> list[Any] | None:
    """Check the descriptions of tools. Raises InputError if they are not a list of objects."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError('"tools" is not a list of objects; describe each tool as a JSON schema')
    if half := half_character(json.dumps(tools, ensure_ascii=False, default=str)):
        raise InputError(f'"tools" {half}')
    return tools


def is_read_only(message: Message, number: int) -> bool:
    """Whether a message of the assistant has `weight: 0` or `train: false`, so that it is not learned.

    Args:
        message: A message of the assistant.
        number: Its number in the conversation, from 1, for errors.

    Raises:
        InputError: The message has another weight, or `train` is neither true nor false.
    """
    weight, train = message.get("weight"), message.get("train")
    if weight not in (None, 0, 1):
        shown = json.dumps(weight, default=str)
        raise InputError(f'message {number}: "weight" is {shown}; use 0 or 1, or leave it out')
    if train is not None and not isinstance(train, bool):
        raise InputError(f'message {number}: "train" is {json.dumps(train, default=str)}; use true or false')
    return weight == 0 or train is False


def _learned_spans(messages: Sequence[Message], spans: Sequence[Span]) -> list[Span]:
    """The spans of the turns that are learned. spans: one for each turn of the assistant, in order."""
    spoken = [message for message in messages if message["role"] == ASSISTANT]
    return [span for message, span in zip(spoken, spans, strict=True) if not is_read_only(message, 0)]


def _text_of(part: object, number: int) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        text: str = part["text"]
        return text
    kind = part.get("type", "something else") if isinstance(part, dict) else type(part).__name__
    raise InputError(f'message {number}: "content" holds {kind}; a language model reads texts only, remove it')


def _after(text: str, header: str, floor: int, ceiling: int) -> int:
    """The end of the first `header` in a part of a text; -1 without one.

    Templates that open the thinking of an answer drop that of earlier turns: there the header ends before it.
    """
    for wanted in (header, header.partition(THINKING)[0]):
        found = text.find(wanted, floor, ceiling) if wanted else -1
        if found >= 0:
            return found + len(wanted)
    return -1


def _until(text: str, end: str, floor: int, ceiling: int) -> int:
    """The end of the last `end` of a turn in a part of a text; -1 without one.

    Templates that end a whole conversation with a token of its own end other turns with the first part of `end`.
    """
    for wanted in (end, end.split()[0]):
        found = text.rfind(wanted, floor, ceiling)
        if found >= 0:
            return found + len(wanted)
    return -1


def _hold(messages: Sequence[Message], text: str, spans: Collection[Span]) -> bool:
    """Whether there is a span for each turn of the assistant, in order, that holds what it says."""
    spoken = [message for message in messages if message["role"] == ASSISTANT]
    if len(spans) != len(spoken):
        return False
    for message, (start, stop) in zip(spoken, spans, strict=True):
        # Templates may drop what the assistant thought before it answered.
        said = (message.get("content") or "").rpartition(END_OF_THINKING)[2].strip()
        if said not in text[start:stop]:
            return False
    return True


def _runs(offsets: Sequence[Span], learned: Sequence[bool]) -> list[Span]:
    """The characters of each run of learned tokens."""
    runs: list[Span] = []
    was_learned = False
    for (start, stop), is_learned in zip(offsets, learned, strict=True):
        if is_learned and was_learned:
            runs[-1] = (runs[-1][0], stop)
        elif is_learned:
            runs.append((start, stop))
        was_learned = is_learned
    return runs
