"""Versions of packages that passed the tests: `make lock` writes `requirements.lock`, `make .venv` installs by it.

Runs before anything is installed, so it needs nothing but Python.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).parent.parent / "requirements.lock"
DATE = re.compile(r"passed the tests on (\d{4}-\d{2}-\d{2})")
HEAD = """\
# Versions that passed the tests on {date} with Python {python}. `make .venv` installs them; `make lock` renews them,
# within the ranges of pyproject.toml.
"""


def content(python: Path, today: datetime.date) -> str:
    """The lock of what is installed for `python`, without this project.

    A local version such as 2.13.0+cpu is one build of a version, which another machine has another build of.
    """
    listed = subprocess.run(
        [python, "-m", "pip", "freeze", "--all", "--exclude-editable"], capture_output=True, text=True, check=True
    )
    pins = sorted((re.sub(r"\+.*", "", line) for line in listed.stdout.splitlines()), key=str.lower)
    unpinned = [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.!]+", pin)]
    if unpinned:
        raise ValueError(f"{unpinned[0]}: not a version of a package index; install it from one")
    return HEAD.format(date=today, python=platform.python_version()) + "\n".join(pins) + "\n"


def age(text: str, today: datetime.date) -> str:
    """How old a lock is, in a sentence."""
    found = DATE.search(text)
    if found is None:
        return f"{LOCK.name} has no date; `make lock` renews it"
    days = (today - datetime.date.fromisoformat(found[1])).days
    return f"packages as in {LOCK.name}, whose versions passed the tests {days} days ago; `make lock` renews them"


def main() -> None:
    """Write the lock of the Python that runs this, or say how old it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--age", action="store_true", help="say how old the lock is")
    today = datetime.datetime.now(datetime.UTC).date()
    if parser.parse_args().age:
        print(age(LOCK.read_text(encoding="utf-8"), today))
        return
    LOCK.write_text(content(Path(sys.executable), today), encoding="utf-8")
    print(f"wrote {LOCK.name}")


if __name__ == "__main__":
    main()
