"""Matches the patterns of an untrusted adapter file in bounded time.

peft gives layers their rank and alpha by regular expressions that are stored in the file. Python's own matcher
backtracks: `(a|a|a|aa)+$` on a name of 40 letters takes more than a second. This matcher keeps the set of positions
that can be reached and continues from each of them only once. See DECISIONS 129.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence, Set
from functools import lru_cache
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

LONGEST = 1000
"""Most letters of a pattern, which may name a layer with every dot escaped."""
DEEPEST = 2
"""Deepest nesting of repetitions; each level multiplies the time by the letters of the name."""

_CATEGORIES: dict[Any, Callable[[str], object]] = {
    codes.CATEGORY_DIGIT: re.compile(r"\d").match,
    codes.CATEGORY_NOT_DIGIT: re.compile(r"\D").match,
    codes.CATEGORY_WORD: re.compile(r"\w").match,
    codes.CATEGORY_NOT_WORD: re.compile(r"\W").match,
    codes.CATEGORY_SPACE: re.compile(r"\s").match,
    codes.CATEGORY_NOT_SPACE: re.compile(r"\S").match,
}


def find_pattern(patterns: Iterable[str], name: str) -> str | None:
    """Return the first pattern that matches a layer's name or the part of the name after a dot, or None.

    Raises:
        ValueError: A pattern is not a regular expression, or is not supported here: it has more than LONGEST letters,
            references, lookaheads or lookbehinds, or repetitions nested more than DEEPEST deep.
    """
    begins = {0} | {position + 1 for position, letter in enumerate(name) if letter == "."}
    return next((one for one in patterns if len(name) in _ends(_parsed(one), name, begins)), None)


@lru_cache(maxsize=4096)
def _parsed(pattern: str) -> Sequence[Any]:
    if len(pattern) > LONGEST:
        raise ValueError(f"the pattern {pattern!r:.60} has more than {LONGEST} letters")
    try:
        parsed = parser.parse(pattern)
        if parsed.state.flags & ~re.UNICODE.value:
            raise re.error("it has flags")
        _check(parsed, 0)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r:.60} cannot be used ({error})") from error
    return list(parsed)


def _check(nodes: Iterable[Any], depth: int) -> None:
    """Raise re.error for nodes that `_ends` does not support."""
    for code, argument in nodes:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            if depth == DEEPEST:
                raise re.error(f"repetitions are more than {DEEPEST} deep")
            _check(argument[2], depth + 1)
        elif code is codes.SUBPATTERN and not any(argument[1:3]):
            _check(argument[3], depth)
        elif code is codes.BRANCH:
            for branch in argument[1]:
                _check(branch, depth)
        elif code is codes.AT:
            if argument not in _ANCHORS:
                raise re.error("it looks at the neighbours of a letter")
        elif code not in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            raise re.error("it refers to other parts of itself or of the name")


_ANCHORS: dict[Any, Callable[[int, str], bool]] = {
    codes.AT_BEGINNING: lambda position, name: position == 0,
    codes.AT_BEGINNING_STRING: lambda position, name: position == 0,
    codes.AT_END: lambda position, name: position == len(name),
    codes.AT_END_STRING: lambda position, name: position == len(name),
}


def _ends(nodes: Iterable[Any], name: str, begins: Set[int]) -> Set[int]:
    """Return the positions where a match may end that begins at one of these positions."""
    for code, argument in nodes:
        if not begins:
            break
        if code is codes.BRANCH:
            begins = set().union(*(_ends(branch, name, begins) for branch in argument[1]))
        elif code is codes.SUBPATTERN:
            begins = _ends(argument[3], name, begins)
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, repeated = argument
            begins = _repeated(least, most, repeated, name, begins)
        elif code is codes.AT:
            begins = {position for position in begins if _ANCHORS[argument](position, name)}
        else:
            begins = {at + 1 for at in begins if at < len(name) and _fits(code, argument, name[at])}
    return begins


def _repeated(least: int, most: int, nodes: Iterable[Any], name: str, begins: Set[int]) -> Set[int]:
    """Return `_ends` of nodes that are repeated."""
    count = 0
    while count < least and begins:
        after = _ends(nodes, name, begins)
        if after == begins:  # more repetitions change nothing either
            break
        begins, count = after, count + 1
    found, new, count = set(begins), begins, least
    while new and count < most:
        new = _ends(nodes, name, new) - found
        found |= new
        count += 1
    return found


def _fits(code: Any, argument: Any, letter: str) -> bool:
    """Whether a node of a pattern that matches one letter matches this one."""
    if code is codes.ANY:
        return letter != "\n"
    if code is codes.LITERAL:
        return bool(ord(letter) == argument)
    if code is codes.NOT_LITERAL:
        return bool(ord(letter) != argument)
    is_negated = bool(argument) and argument[0][0] is codes.NEGATE
    return is_negated != any(_is_in(kind, value, letter) for kind, value in argument if kind is not codes.NEGATE)


def _is_in(kind: Any, value: Any, letter: str) -> bool:
    if kind is codes.LITERAL:
        return bool(ord(letter) == value)
    if kind is codes.RANGE:
        return bool(value[0] <= ord(letter) <= value[1])
    return _CATEGORIES[value](letter) is not None
