"""Errors about a config or an input, with messages for the user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem with a config.

    Attributes:
        field: The dotted field it concerns.
        message: What is wrong and the remedy, without the field.
        depends_on: Other fields that make it a problem. While one of them is invalid itself, this problem is not
            reported.
    """

    field: str
    message: str
    depends_on: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class InputError(ValueError):
    """The user's config or files are wrong. Commands that raise it exit with code 2 and start nothing."""


class RuleError(InputError):
    """Fields that are each valid but cannot be combined; `problems` holds one per combination."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[RuleError], tuple[tuple[Problem, ...]]]:
        """Arrive from another process as it left."""
        return type(self), (self.problems,)


def not_one_of(value: object, choices: Iterable[str]) -> str:
    """Return the message for a value that is not one of the choices; it names the most similar choice, if any."""
    names = tuple(choices)
    near = difflib.get_close_matches(str(value), names, 1)
    return f"'{value}' is not one of {', '.join(names)}" + (f"; did you mean '{near[0]}'?" if near else "")
