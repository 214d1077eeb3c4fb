"""A door of the program, and what is demanded of it: an answer in time and within memory, and refusals in sentences."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from trainer.system.errors import InputError

LIMIT_S = 5.0
MOST_MEMORY = 2**30
"""Bytes the process may take altogether; half of it on top, where it took more than half before."""
LONGEST_LINE = 2000
QUIET = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink)
)


@dataclass(frozen=True)
class Target:
    """One door.

    values: what is put to it.  prepare: makes, in an empty folder, what answers one value. An answer that no user may
    meet is an exception.
    """

    name: str
    values: SearchStrategy[Any]
    prepare: Callable[[Path], AbstractContextManager[Callable[[Any], None]]]


@dataclass
class Count:
    """What a series came to. slowest: seconds of one value.  peak: bytes of the process."""

    values: int = 0
    slowest: float = 0.0
    peak: int = 0


def attack(answer: Callable[[Any], None], target: Target, examples: int, number: int, note: Path, count: Count) -> None:
    """Put so many values to a target, in the order that the number gives. Raises what its answers raise.

    note: a file that holds the value which is being answered, for whoever has to end a process that hangs.
    """
    _forget_peak()
    most = max(MOST_MEMORY, peak_of() + MOST_MEMORY // 2)

    @seed(number)
    @settings(QUIET, max_examples=examples)
    @given(target.values)
    def one(value: Any) -> None:
        note.write_text(f"{value!r}\n", encoding="utf-8", errors="backslashreplace")
        _forget_peak()
        began = time.monotonic()
        answer(value)
        took, peak = time.monotonic() - began, peak_of()
        count.values, count.slowest, count.peak = count.values + 1, max(count.slowest, took), max(count.peak, peak)
        assert took <= LIMIT_S, f"answered after {took:.1f} s"
        assert peak <= most, f"took {peak / 2**20:.0f} MiB"

    one()


@contextmanager
def refusals() -> Iterator[None]:
    """The block may refuse, in sentences. Any other exception is not for a user."""
    try:
        yield
    except InputError as error:
        check_sentences(str(error))


def check_sentences(text: str) -> None:
    """Raises AssertionError for what is not a list of sentences."""
    lines = text.split("\n")
    assert all(line.strip() for line in lines), f"an empty line: {text!r}"
    assert max(map(len, lines)) <= LONGEST_LINE, f"a line of {max(map(len, lines))} characters: {text[:200]!r}"
    assert "Traceback" not in text, text


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_of(process: int | str = "self") -> int:
    """Bytes of memory a process had at most, and this one since `_forget_peak`."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


ODD_BYTES = st.sampled_from(
    [
        b"", b"\0" * 64, b"[]", b"null", b"{}", b'"x"', b"1", b"\xff\xfe\xff", b"\xef\xbb\xbf{}", b"[" * 20_000,
        b'{"a":' * 5_000, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"x" * 200_000, b"1e999", b"9" * 5_000,
        b'{"step": 1e400}', b"\x80\x04c__builtin__\neval\n.", b"\n" * 1000,
    ]
)  # fmt: skip
"""Whole files that are not what their names say."""
KINDS = st.sampled_from(["folder", "pipe", "endless", "loop", "missing", "unreadable"])
"""What may lie in the place of a file."""
WRONG = st.recursive(
    st.sampled_from([None, True, -1, 0, 2**63, 10**400, 1e308, "", "x", "1e999", "../../home", "/dev/zero"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=4,
)
"""Values of JSON that are hardly of the right type anywhere."""
NUMBERS = st.sampled_from([b"-1", b"0", b"1e999", b"9" * 20, b"null", b'"x"', b"[]"])
SCALE = st.floats(0, 1, exclude_max=True)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("cut"), SCALE),
        st.tuples(st.just("flip"), SCALE, st.integers(0, 255)),
        st.tuples(st.just("insert"), SCALE, st.one_of(st.binary(max_size=16), ODD_BYTES)),
        st.tuples(st.just("drop"), SCALE, st.integers(1, 64)),
        st.tuples(st.just("repeat"), SCALE, st.integers(1, 64)),
        st.tuples(st.just("number"), SCALE, NUMBERS),
    ),
    min_size=1,
    max_size=4,
)
"""Changes of a file that was whole."""


def changed(content: bytes, changes: Sequence[Sequence[Any]]) -> bytes:
    """The content after the changes, in their order."""
    for kind, where, *more in changes:
        at = int(where * len(content))
        match kind:
            case "cut":
                content = content[:at]
            case "flip" if content:
                content = content[:at] + bytes([content[at] ^ more[0]]) + content[at + 1 :]
            case "insert":
                content = content[:at] + more[0] + content[at:]
            case "drop":
                content = content[:at] + content[at + more[0] :]
            case "repeat":
                content = content[:at] + content[at : at + more[0]] * 2 + content[at + more[0] :]
            case "number":
                found = [*re.finditer(rb"-?\d+(\.\d+)?", content[:100_000])]
                if found:
                    one = found[int(where * len(found))]
                    content = content[: one.start()] + more[0] + content[one.end() :]
    return content


def with_wrong_type(content: bytes, where: float, wrong: Any) -> bytes:
    """A file of JSON, or of lines of JSON, with another value in the place of one. Anything else stays as it is."""
    lines = content.splitlines()
    try:
        values = [json.loads(line) for line in lines]
        is_lines = len(lines) > 1
    except ValueError:
        try:
            values, is_lines = [json.loads(content)], False
        except ValueError:
            return content
    holders = [(part, key) for part in _parts(values) for key in _keys(part)]
    if not holders:
        return content
    holder, key = holders[int(where * len(holders))]
    holder[key] = wrong
    texts = [json.dumps(value) for value in values]
    return ("\n".join(texts) + "\n" if is_lines else texts[0]).encode()


def num_values(values: Any) -> int:
    """How many values of a JSON value `with_wrong_type` may replace."""
    return sum(len(_keys(part)) for part in _parts(values))


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []


def _parts(value: Any) -> Iterator[Any]:
    """A value of JSON and all objects and lists in it."""
    if isinstance(value, dict | list):
        yield value
        for key in _keys(value):
            yield from _parts(value[key])


def put(file: Path, kind: str) -> None:
    """Lay something else into the place of a file. kind: one of KINDS."""
    file.unlink(missing_ok=True)
    match kind:
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "endless":
            file.symlink_to("/dev/zero")
        case "loop":
            file.symlink_to(file.name)
        case "unreadable":
            file.symlink_to("/proc/self/mem")
