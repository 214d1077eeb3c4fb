"""Requests to a model, and its answers: instructions of each style, and the cleaning of texts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping

from trainer.config.sections import TRIGGER_PLACE, has_trigger_place
from trainer.run.captioning import CaptionRequest, Style

INSTRUCTIONS: Mapping[Style, str] = {
    "sentence": (
        "Write a caption for this image in one or two plain sentences: the subject, what it does, the surroundings, "
        "the light and the kind of image. Describe only what can be seen. Answer with the caption alone."
    ),
    "detailed": (
        "Describe this image in one paragraph: the subject and its looks, what it does, the surroundings, the "
        "composition, the colours, the light and the kind of image. Describe only what can be seen, without guesses "
        "and without praise. Answer with the description alone."
    ),
    "tags": (
        "List 10 to 30 short tags for this image, separated by commas, the most important first: subject, looks, "
        "action, surroundings, composition, colours, light, kind of image. Answer with the tags alone."
    ),
}
_ENDS = ".!?\u3002\uff01\uff1f"
"""Marks after a sentence, those of Chinese and Japanese included."""
_KIND = r"(?:image|picture|photo|photograph|scene)"
"""Words that say nothing of the image. A painting or a drawing stays: that is its kind."""
_OPENINGS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?:sure|certainly|of course|okay|ok)[,!.:]\s+",
        r"here(?:'s| is| are)\s+(?:a|an|the|some)\s[^:\n]{0,60}:\s*",
        r"(?:caption|description|tags|answer)\s*:\s*",
        rf"(?:the|this)\s+{_KIND}\s+(?:shows|depicts|displays|features|captures|portrays|presents)\s+(?:us\s+)?",
        rf"in (?:the|this)\s+{_KIND},?\s+(?:we can see|we see|you can see|one can see)\s+",
        rf"in (?:the|this)\s+{_KIND},?\s+",
    )
)
"""How answers begin that say nothing of the image."""
_THINKING = re.compile(r"\A.*</think>|<think>.*\Z", re.DOTALL)
"""A model's reasoning; the mark before it may be in the chat template."""
_QUOTES = {'"': '"', "'": "'", "\u201c": "\u201d", "\u2018": "\u2019", "\u00ab": "\u00bb", "`": "`", "[": "]"}
_SENTENCE_END = re.compile(rf"(?:(?<=[{_ENDS}])|(?<=[{_ENDS}][\"'\u201d\u2019)]))\s+")
_FENCE = re.compile(r"\A\s*```\w*\s*\n|\n\s*```\s*\Z")
"""Marks of code, between which some models put a list."""
_HEADING = re.compile(r"\A#{1,6}\s+[^\n]{0,60}\n+")
_JOINERS = "\u200c\u200d"
"""Invisible characters that belong to words of Persian or Hindi, and to emoji of several people."""
_BULLET = re.compile(r"^\s*(?:[-*\u2022]|\d{1,3}[.)])\s+", re.MULTILINE)


def instruction(request: CaptionRequest) -> str:
    """Return what the model is asked: the user's prompt or the style's instruction, with what is not to be named."""
    text = request.prompt.strip() or INSTRUCTIONS[request.style]
    omitted = ", ".join(split_list(request.omit))
    if not omitted:
        return text
    end = "" if text.endswith((*_ENDS, ":")) else "."
    return f"{text}{end} Do not mention: {omitted}."


def split_list(text: str) -> list[str]:
    """Return the parts of a list that is separated by commas, semicolons or line breaks, without empty ones.

    Chinese and Japanese commas count.
    """
    return [part for part in (part.strip() for part in re.split(r"[,;\n\u3001\uff0c\uff1b]", text)) if part]


def cleaned(answer: str, request: CaptionRequest, is_complete: bool, most_bytes: int) -> str:
    """Make a caption of a model's answer; empty where nothing is left of it.

    Openings such as "The image shows", quotes, markup, line breaks and repetitions are removed. An answer that was cut
    off loses its last, incomplete sentence or tag, unless it has only one.

    Args:
        answer: What the model wrote.
        request: Its style, what is omitted and whether the trigger is put in front.
        is_complete: Whether the model ended it by itself.
        most_bytes: Longest caption.
    """
    text = _THINKING.sub("", answer)
    text = "".join(letter if _is_shown(letter) else " " for letter in text.replace("\ufffd", ""))
    text = _HEADING.sub("", _FENCE.sub("", text))
    text = _BULLET.sub("\n" if request.style == "tags" else "", text.strip())
    text = _opened(text.replace("**", "").strip())
    front = f"{TRIGGER_PLACE}, " if request.trigger and not has_trigger_place(text) else ""
    kept = most_bytes - len(front.encode())
    if request.style == "tags":
        parts = [part.strip(" .\"'*") for part in split_list(text)]
        omitted = {part.casefold() for part in split_list(request.omit)}
        caption = _shortened([part for part in parts if part.casefold() not in omitted], ", ", is_complete, kept)
    else:
        sentences = _SENTENCE_END.split(" ".join(text.split()))
        caption = _shortened(sentences, " ", is_complete, kept)
        caption = caption[:1].upper() + caption[1:]
    return f"{front}{caption}" if caption else ""


def _is_shown(letter: str) -> bool:
    """Whether a letter may stand in a caption. The joiners are controls by their category, and are parts of emoji."""
    return letter in f"\n{_JOINERS}" or not unicodedata.category(letter).startswith("C")


def _opened(text: str) -> str:
    """Remove quotes around a text and openings that say nothing, in any order."""
    before = None
    while before != text:
        before = text
        if len(text) > 1 and _QUOTES.get(text[0]) == text[-1] and text[0] not in text[1:-1]:
            text = text[1:-1].strip()
        for opening in _OPENINGS:
            text = opening.sub("", text, count=1) if opening.match(text) else text
    return text


def _shortened(parts: Iterable[str], between: str, is_complete: bool, most_bytes: int) -> str:
    """Join parts, each once, as many as fit; the last one of an answer that was cut off only where it is the only."""
    first: dict[str, str] = {}
    for part in filter(None, parts):
        first.setdefault(part.casefold(), part)
    different = list(first.values())
    if not is_complete and len(different) > 1:
        different.pop()
    joined = different[0] if different else ""
    size = len(joined.encode())
    for part in different[1:]:
        size += len(f"{between}{part}".encode())
        if size > most_bytes:
            break
        joined += f"{between}{part}"
    cut = joined.encode()[:most_bytes].decode(errors="ignore")
    is_between = joined[len(cut) : len(cut) + 1] in ("", " ")
    return (cut if is_between else cut.rpartition(" ")[0] or cut).strip()
