"""Rows of the check for GPUs: kept on disk as they come, so that what was measured before a kill is not lost."""

from __future__ import annotations

import gc
import json
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        limit: As text; empty where there is none.
        numbers: What the figure is made of, for those who compare.
    """

    name: str
    figure: str
    limit: str = ""
    passed: bool = True
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where to measure and what.

    Attributes:
        tiny: Models of a megabyte and few repetitions, for the tests.
        folder: Weights and results.
    """

    device: str
    tiny: bool
    folder: Path

    @property
    def compiler(self) -> str:
        """Backend of torch.compile: for a CPU it would build C++ for minutes, and graphs are what the tests look at."""
        return "inductor" if self.device == "cuda" else "aot_eager"

    @property
    def cache(self) -> Path:
        """Where plans read what was measured."""
        return self.folder / "cache" if self.tiny else Path("runs", "cache")

    @property
    def here(self) -> torch.device:
        """The device."""
        return torch.device(self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def results(self, part: str) -> Path:
        """Where a part leaves its rows."""
        return self.folder / f"{part}.json"


class Report:
    """The rows of one part."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.rows: list[Row] = []
        self._write(is_done=False)

    def add(self, row: Row) -> None:
        """Show a row and keep it."""
        print(as_text(row), flush=True)
        self.rows.append(row)
        self._write(is_done=False)

    def finish(self) -> None:
        """Say that the part has measured everything."""
        self._write(is_done=True)

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Inside, an error becomes a row that says so. Afterwards the device's memory is free again."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  the other measurements go on
            traceback.print_exc()
            said = (str(error).strip().splitlines() or [""])[0]
            self.add(Row(name, f"FAILED: {type(error).__name__}: {said}", passed=False))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _write(self, is_done: bool) -> None:
        content = {"done": is_done, "rows": [asdict(row) for row in self.rows]}
        scratch = self._file.with_suffix(".part")
        scratch.write_text(json.dumps(content, indent=1), encoding="utf-8")
        scratch.replace(self._file)


def read(file: Path) -> tuple[list[Row], bool]:
    """The rows of a part that ran, and whether it came to its end."""
    if not file.is_file():
        return [], False
    content = json.loads(file.read_text(encoding="utf-8"))
    return [Row(**row) for row in content["rows"]], content["done"]


def clocks(when: str) -> Row:
    """Clocks, power and what throttles them: steps on a GPU that is hot or capped are slower than it can do."""
    figure = query("clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active")
    return Row(f"clocks, power, heat, reasons to throttle, {when}", figure)


def query(fields: str) -> str:
    """Fields of the first GPU, by nvidia-smi."""
    argv = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return (done.stdout.strip() or done.stderr.strip() or "unknown").splitlines()[0]


def as_text(row: Row, width: int = 0) -> str:
    """A row as one line. width: of its name."""
    over = "  OVER" if row.limit and not row.passed else ""
    return f"{row.name:{width}}  {row.figure}  {row.limit}{over}".rstrip()
