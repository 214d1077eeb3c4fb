"""tsv: rows of cells with tabs between them, after a row with the names of the columns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trainer.data.row_files import FoundRow, _Text
from trainer.data.row_forms import present

# In row_files.py:


def _tabs(path: Path, offset: int) -> Iterator[FoundRow]:
    """Rows of a .tsv, whose first row has the names of the columns."""
    with _Text(path) as text:
        names = next(text).rstrip("\r\n").split("\t")
        for number, line in enumerate(text, 1):
            text.num_letters = 0
            if number > offset:
                values = dict(zip(names, line.rstrip("\r\n").split("\t"), strict=False))
                where = partial("{}:{}".format, path, number + 1)
                yield FoundRow(partial(present, values), where, number, text.share_of_lines)
