"""Teaching aids of the notebooks: tables, bars, image galleries, and exercises that check answers."""

from __future__ import annotations

import base64
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from app.data.thumbnails import webp
from app.notebook.panels import TEMPLATES
from trainer.system.terminal import say

NUMBER = re.compile(r"[-+\u2212~≈]?\s*[.\d]")
"""The beginning of a cell that holds a number, with or without unit."""
NOTHING = frozenset({"", "-", "—"})

COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#db2777")
"""Visible in light and dark themes: contrast of at least 3.3 to 1 against white and against near black."""


class Table:
    """Rows of texts and numbers below a head, for `print` and the end of a cell. The first column names the rows.

    Raises:
        ValueError: A row is longer or shorter than the head.
    """

    def __init__(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self._rows = [list(head), *([str(cell) for cell in row] for row in rows)]
        columns = list(zip(*self._rows, strict=True))
        self._widths = [max(map(len, column)) for column in columns]
        self._is_number = [index > 0 and _holds_numbers(cells) for index, (_, *cells) in enumerate(columns)]

    def __repr__(self) -> str:
        head, *rows = [self._line(row) for row in self._rows]
        rule = "  ".join("-" * width for width in self._widths)
        return "\n".join([head, rule, *rows])

    def _repr_html_(self) -> Markup:
        head, *rows = self._rows
        sides = ["right" if is_number else "left" for is_number in self._is_number]
        return TEMPLATES.part("lessons.html", "table", head, rows, sides)

    def _line(self, row: Sequence[str]) -> str:
        cells = zip(row, self._widths, self._is_number, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()


class Bars:
    """Stacked bars of {label: {part: amount}}. Amounts are divided by `scale` and shown in `unit`."""

    def __init__(self, bars: Mapping[str, Mapping[str, float]], scale: float, unit: str) -> None:
        self._bars = {label: {part: amount / scale for part, amount in parts.items()} for label, parts in bars.items()}
        self._parts = list(dict.fromkeys(part for parts in bars.values() for part in parts))
        self._most = max((sum(parts.values()) for parts in self._bars.values()), default=0.0)
        self._unit = unit

    def __repr__(self) -> str:
        head = ["", *self._parts, f"together, {self._unit}"]
        rows = [
            [label, *(f"{parts.get(part, 0):.2f}" for part in self._parts), f"{sum(parts.values()):.2f}"]
            for label, parts in self._bars.items()
        ]
        return repr(Table(head, rows))

    def _repr_html_(self) -> Markup:
        colours = dict(zip(self._parts, itertools.cycle(COLOURS)))
        return TEMPLATES.part("lessons.html", "bars", self._bars, colours, self._most or 1.0, self._unit)


class Gallery:
    """Images with captions; small copies are saved in the notebook itself. See `gallery`."""

    def __init__(self, rows: Mapping[str, Mapping[str, Path]], size: int) -> None:
        self._rows = {label: dict(row) for label, row in rows.items()}
        self._columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        self._small = {file: data_url(file, size) for row in rows.values() for file in row.values()}
        self._size = size

    def __repr__(self) -> str:
        cells = [f"{_named(label, column)}: {row[column]}" for label, row in self._rows.items() for column in row]
        return "\n".join(cells)

    def _repr_html_(self) -> Markup:
        small = {
            label: {column: (self._small[file], _named(label, column)) for column, file in row.items()}
            for label, row in self._rows.items()
        }
        macro = "matrix" if len(small) > 1 else "row"
        return TEMPLATES.part("lessons.html", macro, small, self._columns, self._size)


def gallery(rows: Mapping[str, Mapping[str, Path]], size: int = 96) -> Gallery:
    """Return images side by side, shown below a cell that ends with them.

    Args:
        rows: {label of a row: {caption: file}}. Several rows become a table with a column per caption, in which a row
            may have gaps; a single row is wrapped.
        size: Longer side of the copies, in pixels.

    Raises:
        InputError: A file is not an image.
    """
    return Gallery(rows, size)


def exercise(answer: object, right: float | str, hint: str, tolerance: float = 0.02) -> None:
    """Print whether the answer to a question is right, and the hint when it is not.

    Args:
        answer: None or `...` for no answer yet; a number may be given as text.
        tolerance: Relative tolerance of a number.
    """
    if answer is None or answer is ...:
        say(f"Not answered yet. {hint}")
    elif _is_right(answer, right, tolerance):
        say("Right.")
    else:
        say(f"Not yet: {hint}")


def _holds_numbers(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell.strip() not in NOTHING]
    return bool(filled) and all(NUMBER.match(cell) for cell in filled)


def data_url(file: Path, size: int) -> str:
    """Return a small copy of an image as a data URL.

    Args:
        size: Longer side of the copy, in pixels.

    Raises:
        InputError: The file is not an image.
    """
    return f"data:image/webp;base64,{base64.b64encode(webp(file, size, 65)).decode()}"


def _named(label: str, column: str) -> str:
    return ", ".join(filter(None, [label, column]))


def _is_right(answer: object, right: float | str, tolerance: float) -> bool:
    if isinstance(right, str):
        return str(answer).strip().casefold() == right.strip().casefold()
    try:
        return math.isclose(float(answer), right, rel_tol=tolerance)  # type: ignore[arg-type]
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ):  # not a number; RuntimeError is raised by a tensor of two
        return False
