"""What is wrong with a config or an input, in sentences for the user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config: the dotted field it concerns and a sentence with the remedy.

    depends_on: other fields that make it a problem. While one of them is invalid itself, nothing is known.
    """

    field: str
    message: str
    depends_on: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class InputError(ValueError):
    """The user's config or files are wrong. Commands that raise it exit with code 2 and start nothing."""


class RuleError(InputError):
    """Fields that are each valid but do not go together. `problems` names every one of them."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def not_one_of(value: object, choices: Iterable[str]) -> str:
    """Sentence for a value that is none of the choices, with the nearest one where there is one."""
    names = tuple(choices)
    near = difflib.get_close_matches(str(value), names, 1)
    return f"'{value}' is not one of {', '.join(names)}" + (f"; did you mean '{near[0]}'?" if near else "")
