"""Documents of a language model in files: one reader per kind of file, which tokenizes a document when it is needed.

Files hold texts, prompts with completions, or conversations; .npy files hold token ids.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.sections import half_character
from trainer.data.row_files import FoundRow, reading, remedy_of_separator, rows_of, suffix_of, utf8
from trainer.data.row_forms import (
    CHAT,
    KEYS,
    PAIR,
    PREFERENCE,
    folded,
    is_known,
    kind_of,
    standard,
    without_answers,
)
from trainer.system.errors import InputError
from trainer.system.files import MIB, opened
from trainer.system.terminal import shortened

SHARD_CHUNK = 2**16
MOST_TEXT = 1024 * MIB
"""Limit for a .txt, bytes: it is one document and read whole."""
NOT_A_PAIR = 'not a pair, as the rows before are: no "chosen" and "rejected"; remove it, or complete it'
A_PAIR = (
    'a pair, with "chosen" and "rejected", among other rows; set objective.dpo_beta and give pairs only, or remove it'
)

Tokenize = Callable[[str], list[int]]
"""The ids of a text, with no special token added."""
Encoded = tuple[list[int], list[bool]]
"""Ids, and the loss mask over them."""
EncodePair = Callable[[str, str], Encoded]
"""(prompt, completion) -> the ids of both as one text, with no special token added."""
EncodeChat = Callable[[object, object, object], Encoded]
"""(messages, tools, variables of the template) -> the ids of a conversation, none if the assistant says nothing. Raises
InputError."""


@dataclass(frozen=True, eq=False)
class Document:
    """One document.

    Attributes:
        tokens: (N,) ids, of a text and of a prompt with end-of-text last; those of a shard keep the width they are
            stored in.
        loss_mask: (N,) which of them are in the loss; the first never is, since no token precedes it.
        is_text: Whether it is plain text, which may be cut anywhere.
        second: Index of the first token of the rejected answer, in a pair of a preference; 0 for other documents. The
            two answers do not see each other.
        where: Returns the file, with the line or row, for messages.
    """

    tokens: NDArray[np.integer[Any]]
    loss_mask: NDArray[np.bool_]
    is_text: bool
    where: Callable[[], str]
    second: int = 0


Reader = Callable[[], Document]
"""Reads one document."""
Found = tuple[Reader, int, float]
"""A document, the offset after it in its file, and the share of the file that lies before that offset."""


@dataclass(frozen=True)
class Encoder:
    """How documents become tokens.

    Attributes:
        tokenize: Turns text into ids.
        end_of_text: The id that ends a document.
        vocabulary: Number of ids the model knows; those of a .npy must be below it.
        begin: Ids that are put before each document, but not in a .npy, whose tokens are used unchanged, nor in
            conversations, whose template writes them.
        pair: Tokenizes a prompt with its completion; None tokenizes the two apart.
        chat: Tokenizes a conversation; None where there can be none.
        compares: Whether rows are pairs of answers (preference training), else there are none.
        notes: Returns what users should know of the documents read since the last call.
    """

    tokenize: Tokenize
    end_of_text: int
    vocabulary: int
    begin: tuple[int, ...] = ()
    pair: EncodePair | None = None
    chat: EncodeChat | None = None
    compares: bool = False
    notes: Callable[[], Sequence[str]] = list

    def text(self, text: str, where: Callable[[], str]) -> Document:
        """Tokenize a text, all of which is in the loss."""
        ids = self.tokenize(text)
        return self._document(ids, [True] * len(ids), True, where)

    def row(self, values: Mapping[str, Any], where: Callable[[], str]) -> Document:
        """Tokenize a row of a file. Raises InputError with the reason but without file and line."""
        # Sets of preferences often hold a conversation as well, which can be trained on without them.
        if kind_of(values) == PREFERENCE and not self.compares and is_known(others := without_answers(values)):
            values = others
        kind = kind_of(values)
        if self.compares != (kind == PREFERENCE):
            raise InputError(NOT_A_PAIR if self.compares else A_PAIR)
        if not is_known(values):
            keys = shortened(", ".join(f'"{key}"' for key in values), 200)
            lists = [
                key for key, value in values.items() if isinstance(value, list) and value and isinstance(value[0], dict)
            ]
            remedy = (
                f'; if the rows are in "{lists[0]}", write that list alone' if lists else remedy_of_separator(values)
            )
            raise InputError(f"{f'has only {keys}' if keys else 'holds nothing'}; a row has {KEYS}{remedy}")
        values = standard(values)
        if self.compares:
            return self._preference(values, where)
        if kind == CHAT:
            ids, loss_mask = self._chat(values["messages"], values)
            return Document(np.array(ids, dtype=np.int64), np.array(loss_mask, dtype=np.bool_), False, where)
        if kind != PAIR:
            return self.text(_string(values, "text"), where)
        prompt, completion = _string(values, "prompt"), _string(values, "completion")
        if not completion:
            return self._document([], [], False, where)
        return self._document(*(self.pair or self._apart)(prompt, completion), False, where)

    def _chat(self, messages: object, values: Mapping[str, Any]) -> Encoded:
        if self.chat is None:
            raise InputError("a conversation, which this run does not read; remove it")
        return self.chat(messages, values.get("tools"), values.get("chat_template_kwargs"))

    def _preference(self, values: Mapping[str, Any], where: Callable[[], str]) -> Document:
        """Tokenize a prompt with its two answers, the chosen one first.

        What both begin with adds equally to both log-probabilities, and is not in the loss: of a conversation also the
        turns of the assistant before its answer.
        """
        if values["chosen"] == values["rejected"]:
            raise InputError('"chosen" and "rejected" are equal, so that neither is preferred; remove the row')
        if isinstance(values["chosen"], list) and isinstance(values["rejected"], list):
            _check_beginnings(_conversation(values, "chosen"), _conversation(values, "rejected"))
        chosen, rejected = (self._answer(values, key) for key in ("chosen", "rejected"))
        # Number of tokens that both begin with.
        length = min(len(chosen.tokens), len(rejected.tokens))
        differ = np.flatnonzero(chosen.tokens[:length] != rejected.tokens[:length])
        shared = int(differ[0]) if len(differ) else length
        if shared == len(chosen.tokens) == len(rejected.tokens):
            raise InputError('"chosen" and "rejected" have equal tokens, so that neither is preferred; remove the row')
        for key, answer in (("chosen", chosen), ("rejected", rejected)):
            answer.loss_mask[: max(shared, 1)] = False  # no token precedes the first
            if not answer.loss_mask.any():
                raise InputError(f'the other answer begins with all that is in the loss of "{key}"; remove the row')
        tokens = np.concatenate([chosen.tokens, rejected.tokens])
        loss_mask = np.concatenate([chosen.loss_mask, rejected.loss_mask])
        return Document(tokens, loss_mask, False, where, second=len(chosen.tokens))

    def _answer(self, values: Mapping[str, Any], key: str) -> Document:
        """Tokenize one answer with its prompt."""
        answer = values[key]
        if isinstance(answer, str):
            before, after = _string(values, "prompt") if "prompt" in values else "", _string(values, key)
            ids, loss_mask = (self.pair or self._apart)(before, after)
            return self._document(ids, loss_mask, False, str)
        if not isinstance(answer, list):
            raise InputError(f'"{key}" is neither a string nor a list of messages')
        ids, loss_mask = self._chat(_conversation(values, key), values)
        if not ids:
            raise InputError(f'"{key}" has no message of the assistant that is in the loss')
        return Document(np.array(ids, dtype=np.int64), np.array(loss_mask, dtype=np.bool_), False, str)

    def _apart(self, prompt: str, completion: str) -> Encoded:
        before, after = self.tokenize(prompt), self.tokenize(completion)
        return before + after, [False] * len(before) + [True] * len(after)

    def _document(self, ids: list[int], loss_mask: list[bool], is_text: bool, where: Callable[[], str]) -> Document:
        """Put beginning and end around ids; the end is always in the loss."""
        if ids:
            ids, loss_mask = [*self.begin, *ids], [False] * len(self.begin) + loss_mask
        tokens = np.array([*ids, self.end_of_text], dtype=np.int64)
        return Document(tokens, np.array([*loss_mask, True]), is_text, where)


def read_documents(path: Path, offset: int, encoder: Encoder) -> Iterator[Found]:
    """The documents of a file, from an offset on.

    Args:
        path: The file.
        offset: Where a document begins: in tokens of a .npy, as `rows_of` counts in others; 0 in a .txt, or more after
            its end.
        encoder: How documents become tokens.

    Raises:
        InputError: The file cannot be used. A document raises it when it is read.
    """
    return READERS.get(suffix_of(path), _read_rows)(path, offset, encoder)


def _read_text(path: Path, offset: int, encoder: Encoder) -> Iterator[Found]:
    if not offset:
        yield partial(_text_document, path, encoder), 1, 1.0


def _text_document(path: Path, encoder: Encoder) -> Document:
    with reading(path), opened(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_TEXT:
            wrong = f"{path}: longer than {MOST_TEXT // MIB} MiB"
            raise InputError(f"{wrong}; a .txt is one document: cut it into several files")
        data = file.read()
    return encoder.text(folded(utf8(data, path, 0)), lambda: str(path))


def _read_rows(path: Path, offset: int, encoder: Encoder) -> Iterator[Found]:
    for row in rows_of(path, offset):
        yield partial(_row_document, row, encoder), row.after, row.share


def _row_document(row: FoundRow, encoder: Encoder) -> Document:
    values = row.values()
    try:
        return encoder.row(values, row.where)
    except InputError as error:
        raise InputError(f"{row.where()}: {error}") from error


def _conversation(values: Mapping[str, Any], key: str) -> list[Any]:
    """The messages of an answer with those of its prompt, which may be among the answer's, as in published datasets."""
    answer, prompt = values[key], values.get("prompt", "")
    if isinstance(prompt, str):
        before = list(takewhile(lambda message: _read(message)[0] != "assistant", answer))
        if not prompt or any(str(_read(message)[1]).strip() == prompt.strip() for message in before):
            return list(answer)
        if before:
            raise InputError(
                f'"prompt" is not among the messages before the answer in "{key}"; leave out either of them'
            )
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise InputError('"prompt" is neither a string nor a list of messages')
    is_repeated = [_read(message) for message in answer[: len(prompt)]] == [_read(message) for message in prompt]
    return list(answer) if is_repeated else [*prompt, *answer]


def _check_beginnings(chosen: Sequence[Any], rejected: Sequence[Any]) -> None:
    """Raise InputError for conversations that differ before an answer of the assistant."""
    pairs = zip(map(_read, chosen), map(_read, rejected), strict=False)
    for number, (one, other) in enumerate(pairs, 1):
        if one != other:
            if (one[0], other[0]) != ("assistant", "assistant"):
                raise InputError(
                    f'"chosen" and "rejected" differ in message {number}, which is not the answer of the assistant in '
                    "both; give both the same messages before it"
                )
            return


def _read(message: Any) -> tuple[Any, ...]:
    """The values of a message that templates read."""
    return tuple(message.get(key) for key in ("role", "content", "tool_calls")) if isinstance(message, dict) else (0, 0)


def _string(values: Mapping[str, object], key: str) -> str:
    value = values[key]
    if not isinstance(value, str):
        raise InputError(f'"{key}" is not a string; write it in quotes')
    if half := half_character(value):
        raise InputError(f'"{key}" {half}')
    return value


def _read_shard(path: Path, offset: int, encoder: Encoder) -> Iterator[Found]:
    shard = _open_shard(path)
    start, size = offset, len(shard)
    for first in range(offset, size, SHARD_CHUNK):
        for end in np.flatnonzero(shard[first : first + SHARD_CHUNK] == encoder.end_of_text).tolist():
            stop = first + end + 1
            yield partial(_shard_document, path, shard, start, stop, encoder), stop, stop / size
            start = stop
    if start < size:
        yield partial(_shard_document, path, shard, start, size, encoder), size, 1.0


def _open_shard(path: Path) -> NDArray[np.integer[Any]]:
    remedy = "save the token ids with numpy.save as one dimension of integers"
    with reading(path):
        opened(path).close()
        try:
            # Unlike numpy.load, it never unpickles and accepts no archive.
            shard = np.lib.format.open_memmap(path, mode="r")
        except OSError:
            raise
        except Exception as error:  # a header is read as Python, whose parser raises all kinds
            raise InputError(f"{path}: not an array of numbers, or cut short; {remedy}") from error
    if shard.ndim != 1 or not np.issubdtype(shard.dtype, np.integer):
        raise InputError(f"{path}: an array of {shard.dtype} in {shard.ndim} dimensions; {remedy}")
    return shard


def _shard_document(path: Path, shard: NDArray[np.integer[Any]], start: int, stop: int, encoder: Encoder) -> Document:
    """A document of a shard, with no token added: the last document of a shard may continue in the next shard."""
    tokens = shard[start:stop]
    if tokens.min() < 0 or tokens.max() >= encoder.vocabulary:
        index = int(np.flatnonzero((tokens < 0) | (tokens >= encoder.vocabulary))[0])
        raise InputError(
            f"{path}: token {start + index} is {tokens[index]}, but the model knows 0 to {encoder.vocabulary - 1}; "
            "write the file with the tokenizer of the model"
        )
    return Document(tokens, np.broadcast_to(np.True_, tokens.shape), True, lambda: f"{path}: token {start}")


READERS: Mapping[str, Callable[[Path, int, Encoder], Iterator[Found]]] = {
    ".txt": _read_text,
    ".npy": _read_shard,
}
