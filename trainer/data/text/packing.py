"""Packs pieces of text into rows of equal length. See DECISIONS 159."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Put pieces into as few rows as the rule of best fit, decreasing, finds.

    The largest piece comes first, and pieces of one size in their order; each goes into the row that it fills best, or
    into a new one. It needs little more than 11/9 of the fewest possible rows at worst (Johnson, 1973).

    Args:
        sizes: Size of each piece, at most `room`.
        room: Size of a row.

    Returns:
        The indices of the pieces of each row.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # by the room that is left
    rooms: list[int] = []  # the keys of `open_rows`, ascending
    for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        size = sizes[index]
        at = bisect_left(rooms, size)
        if at == len(rooms):
            row, left = len(rows), room
            rows.append([])
        else:
            left = rooms[at]
            row = open_rows[left].pop()
            if not open_rows[left]:
                del open_rows[left], rooms[at]
        rows[row].append(index)
        left -= size
        if left and left not in open_rows:
            insort(rooms, left)
        if left:
            open_rows.setdefault(left, []).append(row)
    return rows
