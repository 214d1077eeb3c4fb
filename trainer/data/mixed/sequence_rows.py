"""The rows of `data.questions`: questions, conversations and sequences of text and images. Imports no torch.

A row is a JSON object in one of these forms:

    {"image": "a.png", "question": "What is it?", "answer": "A fox."}
    {"image": ["a.png", "b.png"], "conversations": [{"from": "human", "value": "<image><image> Which one is red?"},
                                                    {"from": "gpt", "value": "The first."}]}
    {"images": ["a.png"], "messages": [{"role": "user", "content": "<image>What is it?"},
                                       {"role": "assistant", "content": "A fox."}]}
    {"sequence": [{"image": "a.png", "as": "both"}, {"text": "Make it red."}, {"image": "b.png", "as": "drawn"}]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trainer.config.sections import half_character
from trainer.data.images.image_io import ImageFile
from trainer.data.row_forms import as_json, folded, present, unread_except
from trainer.models.parts.chat.chat_texts import REASONING
from trainer.models.parts.chat.conversation import is_read_only
from trainer.system.errors import InputError, not_one_of

Pick = Callable[[int], int]
"""pick(n) returns a random index below n; each call draws another."""
ReadImage = Callable[[str], ImageFile]
"""Reads the header of an image, by its path in the row. Raises InputError."""
Way = Literal["seen", "clean", "both", "drawn"]
"""How an image is part of a sequence: looked at, as clean latents, as clean latents and then looked at (the source of
an edit), or drawn."""
PLACEHOLDER = "<image>"
QUESTION = ("image", "question", "answer")
IN_LOSS = {"gpt": True, "human": False, "assistant": True, "user": False, "system": False}
"""{speaker of a turn: whether the turn is in the loss}."""
UNREAD = (*REASONING, "reasoning_details", "tool_calls", "function_call", "name")
"""Keys of a turn that have a place in the chat templates of language models, but none in these sequences."""
UNREAD_OF_ROW = (*REASONING, "reasoning_details", "tools", "chat_template_kwargs")
FORMS = "question with image and answer, conversations or messages, or sequence"
EDITS_AHEAD = 2
"""Most edits of a chain that one sample makes."""


class ImageProblem(InputError):
    """An image of a row cannot be read."""


@dataclass(frozen=True)
class TextPart:
    """A text.

    Attributes:
        texts: One of these is chosen for each sample.
        in_loss: Whether it is in the loss.
        kept: Whether it is never left out.
    """

    texts: tuple[str, ...]
    in_loss: bool = False
    kept: bool = False


@dataclass(frozen=True)
class ImagePart:
    """An image."""

    image: ImageFile
    way: Way
    kept: bool = False


Part = TextPart | ImagePart


@dataclass(frozen=True)
class Row:
    """A row that is one sequence.

    Attributes:
        parts: Its texts and images, in their order.
        unread: The keys that hold texts which are not among its parts. Not in its repr, of which digests are made.
    """

    parts: tuple[Part, ...]
    unread: tuple[str, ...] = field(default=(), repr=False)

    @property
    def images(self) -> tuple[ImageFile, ...]:
        """All images of the row."""
        return tuple(part.image for part in self.parts if isinstance(part, ImagePart))

    @property
    def encoded(self) -> tuple[ImageFile, ...]:
        """The images whose latents are needed."""
        return tuple(part.image for part in self.parts if isinstance(part, ImagePart) and part.way != "seen")

    def sequence(self, pick: Pick) -> tuple[Part, ...]:
        """The sequence of a sample, with one text for each text."""
        return tuple(_chosen(part, pick) if isinstance(part, TextPart) else part for part in self.parts)


@dataclass(frozen=True)
class EditChain:
    """Images, each made from the one before by one of several instructions: a row of edits as published.

    Attributes:
        images: At least two.
        instructions: The alternatives for each image but the first.
    """

    images: tuple[ImageFile, ...]
    instructions: tuple[tuple[str, ...], ...]

    @property
    def encoded(self) -> tuple[ImageFile, ...]:
        """The images whose latents are needed."""
        return self.images

    def sequence(self, pick: Pick) -> tuple[Part, ...]:
        """The sequence of a sample: one or two edits from any image of the chain on.

        Two edits are made one after the other, or half of the time at once, by both instructions; then, as published,
        not to the last image of the chain.
        """
        first = pick(len(self.images) - 1)
        last = first + 1 + pick(min(EDITS_AHEAD, len(self.images) - 1 - first))
        parts: list[Part] = [ImagePart(self.images[first], "both")]
        if last - first > 1 and pick(2):
            last -= last == len(self.images) - 1
            texts = [self._instruction(number, pick) for number in range(first + 1, last + 1)]
            return (*parts, TextPart((" ".join(f"{text}." for text in texts),)), ImagePart(self.images[last], "drawn"))
        for number in range(first + 1, last + 1):
            parts += [TextPart((self._instruction(number, pick),)), ImagePart(self.images[number], "drawn")]
            if number < last:
                parts.append(ImagePart(self.images[number], "both"))
        return tuple(parts)

    def _instruction(self, number: int, pick: Pick) -> str:
        choices = self.instructions[number - 1]
        return choices[pick(len(choices))]


AnyRow = Row | EditChain


def _chosen(part: TextPart, pick: Pick) -> TextPart:
    number = pick(len(part.texts)) if len(part.texts) > 1 else 0
    return TextPart((part.texts[number],), part.in_loss, part.kept)


def is_of_a_form(row: Any) -> bool:
    """Whether a row of JSON is meant as one of the forms. A question may lack one of its keys: `parsed` names it."""
    if not isinstance(row, dict):
        return False
    return (
        any(key in row for key in ("sequence", "conversations", "messages")) or sum(key in row for key in QUESTION) > 1
    )


def parsed(line: str, read_image: ReadImage) -> Row:
    """Parse a row of a .jsonl. Raises InputError with the reason and the remedy, without file and line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not a JSON object ({error}); each line is one: a {FORMS}") from error
    if isinstance(row, dict):
        row = present(row)
    if not isinstance(row, dict):
        return _question(row, read_image)
    _refuse_unread(row, UNREAD_OF_ROW, "the texts")
    if "sequence" in row:
        unread = unread_except(row, ("system", "sequence"))
        return _checked(Row((*_system(row), *_sequence(row["sequence"], read_image)), tuple(unread)))
    for name, speaker, said in (("conversations", "from", "value"), ("messages", "role", "content")):
        if name in row:
            parts = (*_system(row), *_conversation(row, name, (speaker, said), read_image))
            return _checked(Row(parts, tuple(_unread_of_conversation(row, name, (speaker, said)))))
    question = _question(row, read_image)
    unread = unread_except(row, ("system", *QUESTION))
    return Row((*_system(row), *question.parts), tuple(unread))


def _system(row: Mapping[str, Any]) -> Iterator[Part]:
    """The system message that a row may have by itself, as in ShareGPT."""
    system = row.get("system", "")
    if not isinstance(system, str):
        raise InputError('"system" is not a text; write it in quotes')
    if system.strip():
        yield TextPart((_text(system, "system"),))


def _refuse_unread(values: Mapping[str, Any], keys: Sequence[str], instead: str, where: str = "") -> None:
    """Raise InputError for a key that would be lost."""
    for key in keys:
        if values.get(key):
            raise InputError(f'{where}"{key}" is not read by this kind of model; write it into {instead}, or remove it')


def _question(row: Any, read_image: ReadImage) -> Row:
    for name in QUESTION:
        value = row.get(name) if isinstance(row, dict) else None
        if not isinstance(value, str) or not value.strip():
            raise InputError(
                f'no "{name}"; each line is a JSON object with {", ".join(QUESTION)}, all texts, or with '
                "conversations, messages or sequence"
            )
    question, answer = (_text(row[name].strip(), name) for name in QUESTION[1:])
    image = read_image(_text(row["image"], "image"))
    return Row((ImagePart(image, "seen"), TextPart((question,)), TextPart((answer,), in_loss=True)))


def _conversation(row: Mapping[str, Any], name: str, keys: tuple[str, str], read_image: ReadImage) -> Iterator[Part]:
    """The parts of a conversation, with each image where a turn has `<image>`."""
    if "video" in row:
        raise InputError("videos are not read; give its frames as images")
    given = row.get("image", row.get("images", []))
    paths = [given] if isinstance(given, str) else given
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise InputError('"image" is not a path or a list of paths')
    turns, used = as_json(row, name), 0
    if not isinstance(turns, list):
        raise InputError(f'"{name}" is not a list of turns with {" and ".join(keys)}')
    for number, turn in enumerate(turns, 1):
        speaker, said = (turn.get(key) if isinstance(turn, dict) else None for key in keys)
        if speaker not in IN_LOSS or not isinstance(said, str):
            raise InputError(
                f"turn {number} of {name}: needs {keys[0]}, one of {', '.join(IN_LOSS)}, and {keys[1]}, a text"
            )
        said = _text(said, f"turn {number}")
        _refuse_unread(turn, UNREAD, f'"{keys[1]}"', f"turn {number} of {name}: ")
        if IN_LOSS[speaker]:
            yield TextPart((said,), in_loss=not is_read_only(turn, number))
            continue
        for index, text in enumerate(said.split(PLACEHOLDER)):
            if index:
                if used == len(paths):
                    raise InputError(f"turn {number} has more {PLACEHOLDER} than the row has images, {len(paths)}")
                yield ImagePart(read_image(paths[used]), "seen")
                used += 1
            if text.strip():
                yield TextPart((text.strip() if PLACEHOLDER in said else said,))
    if used < len(paths):
        raise InputError(f"{len(paths)} images, but {used} {PLACEHOLDER}; write one where each image belongs")


def _unread_of_conversation(row: Mapping[str, Any], name: str, keys: tuple[str, str]) -> Iterator[str]:
    """The keys of a conversation's row, and of its turns, that hold texts which are not read."""
    yield from unread_except(row, ("system", "image", "images", name))
    yield from dict.fromkeys(f"{name}.{key}" for turn in as_json(row, name) for key in unread_except(turn, keys))


def _sequence(parts: Any, read_image: ReadImage) -> Iterator[Part]:
    if not isinstance(parts, list):
        raise InputError('"sequence" is not a list of parts with text or image')
    for number, part in enumerate(parts, 1):
        try:
            yield _part(part, read_image)
        except ImageProblem:
            raise
        except InputError as error:
            raise InputError(f"part {number} of sequence: {error}") from error


def _part(part: Any, read_image: ReadImage) -> Part:
    if not isinstance(part, dict) or ("text" in part) == ("image" in part):
        raise InputError("needs either text or image")
    known = {"text", "learned", "keep"} if "text" in part else {"image", "as", "keep"}
    for name in part:
        if name not in known:
            raise InputError(not_one_of(name, sorted(known)))
    for name in ("learned", "keep"):
        if not isinstance(part.get(name, False), bool):
            raise InputError(f"{name} is true or false, not {json.dumps(part[name])}")
    kept = part.get("keep", False)
    if "image" in part:
        way = part.get("as", "seen")
        if way not in get_args(Way):
            raise InputError(f"as: {not_one_of(str(way), get_args(Way))}")
        if not isinstance(part["image"], str):
            raise InputError("image is not a path")
        return ImagePart(read_image(_text(part["image"], "image")), way, kept)
    texts = [part["text"]] if isinstance(part["text"], str) else part["text"]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InputError("text is not a text or a list of alternatives")
    return TextPart(tuple(_text(text, "text") for text in texts), part.get("learned", False), kept)


def _text(text: str, name: str) -> str:
    if half := half_character(text):
        raise InputError(f'"{name}" {half}')
    return folded(text)


def _checked(row: Row) -> Row:
    """The row. Raises InputError if nothing of it is in the loss."""
    if not any(part.in_loss if isinstance(part, TextPart) else part.way == "drawn" for part in row.parts):
        raise InputError(
            "nothing in it is in the loss; let it answer, set learned: true for a text or as: drawn for an image"
        )
    return row


def parquet_row(row: Mapping[str, Any], image_of: Callable[[str, int], ImageFile]) -> AnyRow:
    """The row of a parquet file.

    Args:
        row: {column: value} without the columns of images, whose numbers of images it has instead.
        image_of: image_of(column, number) reads the header of an image.

    Raises:
        InputError: The reason and the remedy, without file and row.
    """
    if "image_list" in row:
        count, instructions = row["image_list"], row["instruction_list"] or []
        choices = [_alternatives(one) for one in instructions] if isinstance(instructions, list) else []
        if count < 2 or len(choices) != count - 1 or not all(choices):
            raise InputError(
                f"{count} images in image_list and {len(choices)} instructions in instruction_list; an edit has "
                "one instruction, or a list of alternatives, for each image but the first"
            )
        return EditChain(tuple(image_of("image_list", number) for number in range(count)), tuple(choices))
    captions = _captions(row["captions"])
    return Row((TextPart(captions), ImagePart(image_of("image", 0), "drawn")))


def _alternatives(value: Any) -> tuple[str, ...]:
    """The texts of an instruction, which may be a text or a list of alternatives; nulls and empty ones are left out."""
    texts = [text for text in (value if isinstance(value, list) else [value]) if text is not None and text != ""]
    if not all(isinstance(text, str) for text in texts):
        raise InputError("an instruction in instruction_list is not a text; write it, or remove the row")
    return tuple(_text(text, "instruction_list") for text in texts)


def _captions(value: Any) -> tuple[str, ...]:
    """The captions of an image: a JSON object whose values are captions."""
    try:
        captions = json.loads(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"captions is not JSON ({error}); write an object whose values are captions") from error
    values: Sequence[Any] = list(captions.values()) if isinstance(captions, dict) else []
    if not isinstance(captions, dict) or not all(isinstance(text, str) for text in values):
        raise InputError("captions is not a JSON object whose values are captions")
    # As published: an image without captions is drawn from a blank.
    return tuple(_text(text, "captions") for text in values) or (" ",)
