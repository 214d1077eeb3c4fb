"""Conversations as a language model reads them: rendered by a chat template, with the assistant's tokens known.

Templates are jinja and run in the sandbox of `chat_sandbox`, which gives them no access to files, modules or attributes
of Python objects, and limits their steps and memory. Neither torch nor transformers is imported before a tokenizer is
used. See DECISIONS 158.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainer.config.sections import TEMPLATE_SUFFIX, half_character
from trainer.models.parts.chat.chat_sandbox import Sandbox, Span
from trainer.models.parts.chat.chat_template import check_jinja, read_template, template_names
from trainer.models.parts.chat.chat_texts import (
    CLOSE,
    OPEN,
    REASONING,
    SENTINEL,
    Message,
    Sentinels,
    Text,
    positions,
    written,
)
from trainer.models.parts.chat.messages import as_read, checked_variables, with_objects
from trainer.system.errors import InputError, not_one_of
from trainer.system.terminal import shortened

MOST_KEPT = 8
"""Values for variables of a template whose conversations stay prepared."""
THINKING, END_OF_THINKING = "<think>", "</think>"
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
OTHER_ROLES = ("function", "ipython", "observation", "environment")
"""Other names for the result of a tool, as some templates write them."""

NO_TOOLS = "the chat template does not write tools; set data.chat_template to one that does, or remove them"

Encoded = tuple[list[int], list[bool]]
"""The ids of a text, and the loss mask over them."""


def encode_spans(tokenizer: Any, text: str, spans: Sequence[Span]) -> Encoded:
    """Tokenize a text as a whole, without special tokens. A token is in the loss if a letter of it is in a span.

    Args:
        tokenizer: A fast tokenizer of transformers.
        text: The text.
        spans: The parts of it that are in the loss, in order.
    """
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    loss_mask, number = [], 0
    for start, stop in found["offset_mapping"]:
        # Some tokenizers leave blanks out of the offsets: those of a blank token are then (stop, stop).
        first = start if start < stop else stop - 1
        while number < len(spans) and spans[number][1] <= first:
            number += 1
        loss_mask.append(number < len(spans) and max(first, spans[number][0]) < stop)
    return list(found["input_ids"]), loss_mask


@dataclass(frozen=True)
class Turns:
    """The text that a template writes around the content of a question and of its answer.

    Attributes:
        header: The text before an answer that is yet to come.
        end: The text after an answer, without blanks at its end.
        question_end: The text after a question, without blanks at its end.
        is_prompted: Whether the answer follows the prompt for an answer.
    """

    header: str = ""
    end: str = ""
    question_end: str = ""
    is_prompted: bool = True

    @property
    def stop(self) -> str:
        """The text after which an answer is complete; empty if nothing tells."""
        return self.end.split()[0] if self.end else ""

    @property
    def ends(self) -> tuple[str, ...]:
        """The ends that an answer may have: templates that end a whole conversation with a token of its own end other
        answers with the first part of that, or as they end questions."""
        return tuple(one for one in dict.fromkeys((self.end, self.stop, self.question_end)) if one) if self.end else ()


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
        self._notes: dict[str, None] = {}
        self._left_out: set[tuple[str, str, str, bool, bool]] = set()  # kinds of texts that are known to be left out

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
        check_jinja(self._named or "the model's own", text)
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
    def _sandbox(self) -> Sandbox:
        return Sandbox(self.template)

    @cached_property
    def turns(self) -> Turns:
        """Beginning and end of an answer, from a conversation of one question; empty if the template refuses it."""
        question, answer = f"{OPEN}0{CLOSE}", f"{OPEN}1{CLOSE}"
        asked: list[Message] = [{"role": "user", "content": question}]
        try:
            plain, open_end = self._render(asked, None), self._render(asked, None, is_open=True)
            whole = self._render([*asked, {"role": ASSISTANT, "content": answer}], None)
        except InputError:
            return Turns()
        header = open_end[len(plain) :] if open_end.startswith(plain) else ""
        question_end = plain.partition(question)[2].rstrip() if header else ""
        header = header or open_end.partition(question)[2]
        return Turns(header, whole.partition(answer)[2].rstrip(), question_end, whole.startswith(open_end))

    def encode(self, messages: object, tools: object = None, variables: object = None) -> Encoded:
        """Tokenize a conversation. In the loss are the assistant's turns, each with the token that ends it.

        Turns with `weight: 0` or `train: false` are read only. Messages after the last turn in the loss are
        left out: nothing predicts them. `take_notes` has what else of the conversation is not used.

        Args:
            messages: The conversation, as in transformers.
            tools: Descriptions of the tools the assistant may call, as in transformers; None for none.
            variables: Values for variables of the template, as TRL's `chat_template_kwargs`; None for none.

        Returns:
            No tokens if nothing is in the loss.

        Raises:
            InputError: The conversation cannot be used, the template leaves out something that should be in the loss or
                read, or does not tell what the assistant wrote. The message names no file.
        """
        if variables:
            return self._with(variables).encode(messages, tools)
        checked = checked_messages(messages)
        self._check_roles(checked)
        spoken = [number for number, message in enumerate(checked) if message["role"] == ASSISTANT]
        in_loss = [number for number in spoken if not is_read_only(checked[number], number + 1)]
        if not in_loss:
            return [], []
        conversation = self._with_system(checked[: in_loss[-1] + 1])
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

    def take_notes(self) -> list[str]:
        """Return notes on the conversations encoded since the last call: texts that are neither in the loss nor read,
        and answers that do not end as they should."""
        notes, self._notes = list(self._notes), {}
        return [*notes, *(note for other in self._others.values() for note in other.take_notes())]

    def prompt(self, question: str) -> list[int]:
        """Tokenize a question from the user, up to where the assistant's answer begins."""
        text = self._render(self._with_system([{"role": "user", "content": question}]), None, is_open=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def answer(self, text: str) -> str:
        """The part of a generated text before the end of the assistant's turn."""
        return text.partition(self.turns.stop)[0] if self.turns.stop else text

    def _encoded(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Encoded:
        whole, marked = self._rendered(messages, tools)
        texts, lost = self._check_written(messages, tools, whole)
        spans = _joined(marked)
        if _hold(messages, whole, spans, lost):
            spans = self._with_marked_ends(whole, spans)
        else:
            spans = self._by_rendering(messages, tools, whole)
        if not _hold(messages, whole, spans, lost):
            raise InputError(
                "the chat template changes what the assistant says, so that its tokens cannot be identified; "
                "set data.chat_template to a template with {% generation %} marks"
            )
        # {index of a message: its span}, of the turns in the loss. spans: one for each turn of the assistant.
        spoken = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
        pairs = zip(spoken, spans, strict=True)
        by_message = {index: span for index, span in pairs if not is_read_only(messages[index], 0)}
        for text, at in texts:
            start, stop = by_message.get(text.message, (at, at + 1))
            if not start <= at < stop:
                self._note(f'"{text.key}" of the assistant is outside of what the chat template marks as its turn')
        self._check_prompt(messages, tools, whole)
        return self._with_end(encode_spans(self._tokenizer, whole, list(by_message.values())))

    def _with_marked_ends(self, whole: str, spans: Sequence[Span]) -> list[Span]:
        """The spans of the template's own marks, each with the end of its turn, which some leave out."""
        found = []
        for start, stop in spans:
            after = len(whole) - len(whole[stop:].lstrip())
            end = next((one for one in self.turns.ends if whole.startswith(one, after)), "")
            if end and not whole[start:stop].rstrip().endswith(self.turns.ends):
                stop = after + len(end)
                self._note(
                    f"the {{% generation %}} marks leave out {end}, which ends a turn; it is in the loss as well"
                )
            found.append((start, stop))
        return found

    def _by_rendering(self, messages: Sequence[Message], tools: Sequence[Any] | None, whole: str) -> list[Span]:
        """By rendering the messages up to each turn; for turns that are rendered otherwise when they are the last, by
        marks in the contents."""
        spans: list[Span] = []
        places: tuple[list[int], list[int]] | None = None
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            span = self._by_prefix(messages, tools, whole, number)
            if span is None:
                places = places or self._contents(messages, tools, whole)
                ends = (self._own_end(messages[: number + 1], tools), *self.turns.ends)
                span = self._by_contents(number, whole, ends, *places)
            start, stop = span
            end = "" if self.turns.end else next((one for one in self._added if whole.startswith(one, stop)), "")
            if number + 1 < len(messages) and not self.turns.end and not end:
                self._note("the chat template writes nothing after an answer: those before the last have no end")
            spans.append((start, stop + len(end)))
        return spans

    def _by_prefix(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, whole: str, number: int
    ) -> Span | None:
        """A turn, where the text of the messages up to it is the beginning of the whole; else None."""
        if number == 0:
            return None
        try:
            before = self._render(messages[:number], tools, is_open=True)
            after = self._render(messages[: number + 1], tools)
        except InputError:
            return None
        if not (whole.startswith(after) and after.startswith(before)):
            return None
        # Blanks after the token that ends a turn are not in the loss.
        return len(before), len(after.rstrip()) if self.turns.end else len(after)

    def _own_end(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        """The token that ends a turn where it is the last: that of a call may be one of its own."""
        try:
            text = self._render(messages, tools).rstrip()
        except InputError:
            return ""
        return next((mark for mark in self._added if text.endswith(mark)), "")

    def _by_contents(
        self, number: int, whole: str, ending: Sequence[str], begins: Sequence[int], ends: Sequence[int]
    ) -> Span:
        """A turn, by where the contents of all messages begin and end.

        It begins after the header that follows the content before it, and ends with the last end of a turn (`ending`)
        before the content after it.
        """
        floor = ends[number - 1] if number else 0
        ceiling = begins[number + 1] if number + 1 < len(begins) else len(whole)
        start = _after(whole, self.turns.header, floor, ceiling)
        start = begins[number] if start < 0 else start
        ending = [end for end in ending if end]
        stop = _until(whole, ending, max(start, ends[number]), ceiling) if ending else ends[number]
        if start < 0 or stop < 0:
            raise InputError(
                f"message {number + 1}: the chat template does not tell where this turn of the assistant begins "
                "or ends; set data.chat_template to a template with {% generation %} marks"
            )
        return start, stop

    def _contents(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, whole: str
    ) -> tuple[list[int], list[int]]:
        """Where the content of each message begins and ends in the whole text, -1 where that is not known.

        Raises:
            InputError: The template changes the content of a message that is not the assistant's.
        """
        begins, ends = [], []
        for number, message in enumerate(messages):
            content = message.get("content") or ""
            begin, end = len(content) - len(content.lstrip()), len(content.rstrip())
            begins.append(self._position(messages, tools, number, begin, whole))
            ends.append(self._position(messages, tools, number, end, whole))
            if message["role"] != ASSISTANT and content.strip() and begins[-1] < 0 and ends[-1] < 0:
                raise InputError(
                    f"message {number + 1}: the chat template changes what the {message['role']} says, so that the "
                    "assistant's tokens cannot be identified; set data.chat_template to a template that keeps every "
                    "message"
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

    @cached_property
    def _added(self) -> list[str]:
        """The tokens that were added to the tokenizer, which templates end turns with, the longest first."""
        added = {token.content for token in self._tokenizer.added_tokens_decoder.values()}
        return sorted(filter(str.strip, added), key=len, reverse=True)

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
        if tools and "tools" not in self.template:
            raise InputError(NO_TOOLS)
        if "tool_calls" not in self.template:
            for number, message in enumerate(messages):
                if message.get("tool_calls"):
                    raise InputError(
                        f"message {number + 1}: the chat template does not write tool_calls; set data.chat_template to "
                        "one that does, or remove them"
                    )

    def _check_roles(self, messages: Sequence[Message]) -> None:
        """Refuse roles that are not usual ones and that the template does not name, as `gpt`."""
        for number, message in enumerate(messages, 1):
            role = message["role"]
            if role in (*ROLES, *OTHER_ROLES) or f"'{role}'" in self.template or f'"{role}"' in self.template:
                continue
            raise InputError(f'message {number}: "role": {not_one_of(role, ROLES)}')

    def _check_written(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, whole: str
    ) -> tuple[list[tuple[Text, int]], list[Text]]:
        """Check that the template writes every text, by rendering the conversation with a sentinel in each.

        Returns:
            The texts with their positions in the whole text, none where sentinels change what the template writes; and
            the texts that it leaves out.

        Raises:
            InputError: It leaves out what should be in the loss, or what the answers are about.
        """
        marked = Sentinels(messages, tools)
        try:
            text = self._render(marked.messages, marked.tools)
        except InputError:  # of a text that is not any text; each is tried alone
            text = ""
        found, lost = written(text), []
        for number, one in enumerate(marked.texts):
            calls = one.message >= 0 and bool(messages[one.message].get("tool_calls"))
            kind = (one.role, one.key, one.mark, calls, one.message == len(messages) - 1)
            if number in found or (kind not in self._left_out and self._writes(messages, tools, number)):
                continue
            if kind not in self._left_out and _is_needed(one) and not self._writes_last(messages, tools, number, one):
                self._refuse(messages, one)
            self._left_out.add(kind)
            lost.append(one)
            self._note(_omission(one))
        if SENTINEL.sub("", text) != whole:
            return [], lost
        return [(marked.texts[number], at) for number, at in positions(text)], lost

    def _writes(self, messages: Sequence[Message], tools: Sequence[Any] | None, number: int) -> bool:
        """Whether the template writes a text of a conversation, by its number among its texts."""
        marked = Sentinels(messages, tools, only=number)
        try:
            return number in written(self._render(marked.messages, marked.tools))
        except InputError:  # it is not any text, so it is read
            return True

    def _writes_last(self, messages: Sequence[Message], tools: Sequence[Any] | None, number: int, text: Text) -> bool:
        """Whether the template writes a text of the assistant where its turn is the last, as those that leave out what
        was thought before earlier answers."""
        if text.role != ASSISTANT or text.message == len(messages) - 1:
            return False
        marked = Sentinels(messages[: text.message + 1], tools, only=number)
        try:
            return number in written(self._render(marked.messages, marked.tools))
        except InputError:
            return False

    def _refuse(self, messages: Sequence[Message], text: Text) -> None:
        """Raise InputError for a text that the template leaves out."""
        if text.message < 0:
            raise InputError(NO_TOOLS)
        has_own = self._system and messages[0].get("content") == self._system
        number = text.message + 1 - bool(has_own)
        who = f"message {number}" if number else "data.system"
        if text.role != ASSISTANT:
            raise InputError(
                f"{who}: the chat template leaves out what the {text.role} says; set data.chat_template to one that "
                "writes it, or remove it"
            )
        part = f" ({shortened(text.value, 60)})" if text.key == "content" else ""
        raise InputError(
            f'{who}: the chat template leaves out "{text.key}"{part} of the assistant, which would not be in the loss; '
            "set data.chat_template to one that writes it, or remove it"
        )

    def _check_prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None, whole: str) -> None:
        """Note a prompt for an answer that no answer follows, as where the template opens thinking that it removes."""
        if self.turns.is_prompted:
            return
        try:
            prompt = self._render(messages[:-1], tools, is_open=True)
        except InputError:  # nothing was asked before the answer
            return
        if not whole.startswith(prompt):
            self._note(f"the prompt for an answer ends with {self.turns.header!r}, which the answer does not follow")

    def _note(self, note: str) -> None:
        self._notes[note] = None

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, is_open: bool = False) -> str:
        return self._rendered(messages, tools, is_open)[0]

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, is_open: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of a conversation as `apply_chat_template` renders it, and the parts that the template marks."""
        variables = {
            **self._tokenizer.special_tokens_map,
            **self._variables,
            "messages": [_as_read(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": is_open,
        }
        sandbox = self._sandbox
        try:
            rendered = sandbox.render(variables, len(str(messages)))
        except Exception as error:  # a template is a program, which may raise anything
            raise InputError(f"the chat template refuses this conversation ({error})") from error
        return rendered


def _as_read(message: Message) -> dict[str, Any]:
    """A message as templates read it: without empty keys, what was thought under each of the keys they know."""
    made = {key: value for key, value in message.items() if value is not None}
    thought = next((made[key] for key in REASONING if key in made), None)
    return made if thought is None else {"thinking": thought, **made, "reasoning_content": thought}


def _is_needed(text: Text) -> bool:
    """Whether a conversation is not the same without a text: what is said, thought and called, and names of tools."""
    if text.message < 0:
        return text.key == "name"
    return text.key in ("content", "tool_calls") or text.key in REASONING


def _omission(text: Text) -> str:
    """The note about a text that the template leaves out."""
    if text.message < 0:
        return f'the chat template does not write "{text.key}" of tools'
    if _is_needed(text):
        part = 'a part of "content"' if text.key == "content" else f'"{text.key}"'
        return f"the chat template leaves {part} of the assistant out of turns before the last"
    return f'the chat template does not write "{text.key}" of messages of the {text.role}'


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
        if half := half_character(json.dumps(message, ensure_ascii=False, default=str)):
            raise InputError(f"message {number}: {half}")
        made = with_objects({**message, "content": content})
        if content is None and not made.get("tool_calls"):
            raise InputError(f'message {number}: has no "content"; write it, or remove the message')
        checked.append(made)
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
    """Whether a message of the assistant has `weight: 0` or `train: false`, so that it is not in the loss.

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


def _until(text: str, ends: Sequence[str], floor: int, ceiling: int) -> int:
    """The end of the last end of a turn in a part of a text, of the first of `ends` that it holds; -1 without one."""
    for wanted in ends:
        found = text.rfind(wanted, floor, ceiling)
        if found >= 0:
            return found + len(wanted)
    return -1


def _hold(messages: Sequence[Message], text: str, spans: Collection[Span], lost: Collection[Text]) -> bool:
    """Whether there is a span for each turn of the assistant, in order, that holds what it says; but for lost texts."""
    spoken = [(index, message) for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    if len(spans) != len(spoken):
        return False
    left_out = {(one.message, one.value) for one in lost}
    for (index, message), (start, stop) in zip(spoken, spans, strict=True):
        # Templates may drop what the assistant thought before it answered.
        said = (message.get("content") or "").rpartition(END_OF_THINKING)[2].strip()
        if said not in text[start:stop] and (index, said) not in left_out:
            return False
    return True


def _joined(spans: Sequence[Span]) -> list[Span]:
    """The marked parts of a text, those that follow each other as one."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return joined
