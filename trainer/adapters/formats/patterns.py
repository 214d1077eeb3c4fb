"""Matches the patterns of an untrusted adapter file in bounded time.

peft gives layers their rank and alpha by regular expressions that are stored in the file. Files hold names of layers,
alternatives and repeated letters (`.*to_k`, `layers.\\d+.(q|k)_proj`); these are read here, and others are refused.
Python's own matcher backtracks: `(a|a|a|aa)+$` on a name of 40 letters takes it more than a second. See DECISIONS 129.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Set
from functools import lru_cache

LONGEST = 1000
"""Most letters of a pattern, which may name a layer with every dot escaped."""
_BAR = re.compile(r"\|(?![^()]*\))")  # outside of groups, which do not nest
_TOKEN = re.compile(
    r"""(?x)
    \( (?:\?:)? (?P<group> [^()]* ) \)
    | (?P<anchor> [$^] )
    | (?P<letter> \[ [\w.^-]+ \] | \\ [dDwWsS\W] | [^\\()\[\]{}|*+?^$] ) (?P<repeat> [*+?]? ) \??
    """
)
_Token = Callable[[str, Set[int]], Set[int]]
"""Takes a name and the positions in it that were reached, and returns those that are reached by one more token."""


def find_pattern(patterns: Iterable[str], name: str) -> str | None:
    """Return the first pattern that matches a layer's name or the part of the name after a dot, or None.

    Raises:
        ValueError: A pattern has more than LONGEST letters, or more than letters, sets of letters, their repetitions
            and groups of alternatives in it.
    """
    begins = {0} | {position + 1 for position, letter in enumerate(name) if letter == "."}
    return next((one for one in patterns if len(name) in _pattern(one)(name, begins)), None)


@lru_cache(maxsize=4096)
def _pattern(pattern: str) -> _Token:
    if len(pattern) > LONGEST:
        raise ValueError(f"the pattern {pattern!r:.60} has more than {LONGEST} letters")
    alternatives = []
    for alternative in _BAR.split(pattern):
        tokens = list(_TOKEN.finditer(alternative))
        if "".join(token[0] for token in tokens) != alternative:
            raise ValueError(f"the pattern {pattern!r:.60} has more than letters, their repetitions and alternatives")
        alternatives.append([_token(token) if token["group"] is None else _pattern(token["group"]) for token in tokens])

    def ends(name: str, begins: Set[int]) -> Set[int]:
        found: set[int] = set()
        for tokens in alternatives:
            reached = begins
            for token in tokens:
                reached = token(name, reached)
                if not reached:
                    break
            found |= reached
        return found

    return ends


def _token(token: re.Match[str]) -> _Token:
    if token["anchor"]:
        return lambda name, begins: begins & {0 if token["anchor"] == "^" else len(name)}
    try:
        fits, repeat = re.compile(token["letter"]).fullmatch, token["repeat"]
    except re.error as error:
        raise ValueError(f"{token['letter']} is not a set of letters ({error})") from error

    def ends(name: str, begins: Set[int]) -> Set[int]:
        once = {at + 1 for at in begins if at < len(name) and fits(name[at])}
        found = once if repeat in ("", "+") else {*begins, *once}
        while repeat in ("*", "+") and once:
            once = {at + 1 for at in once if at < len(name) and fits(name[at])} - found
            found = found | once
        return found

    return ends
