"""Output to a terminal. All printed text passes here: names and texts from strangers may contain terminal commands.

Standard library only: the command line prints before any package is found. See DECISIONS 135.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

from trainer.system.installation import CHECKOUT

# C0 except tab and line feed, DEL and C1, which move the cursor, clear the screen and retitle the window; the controls
# of writing direction, which display a line in another order (CVE-2021-42574); and surrogates, which stand for bytes of
# a file name that are not UTF-8.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with terminal commands written as escapes, as `\\x1b` or `\\u202e`; the rest is unchanged."""
    return _COMMANDS.sub(_escaped, text)


def say(text: object, stream: TextIO | None = None) -> None:
    """Print one or several lines and flush. `stream` defaults to stdout."""
    out = sys.stdout if stream is None else stream
    encoding = out.encoding or "utf-8"
    print(printable(str(text)).encode(encoding, "backslashreplace").decode(encoding), file=out, flush=True)


def complain(text: object) -> None:
    """Print one or several lines to stderr."""
    say(text, sys.stderr)


def shortened(text: str, most: int = 200) -> str:
    """Return the text if it has at most `most` characters, else its beginning and end."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"


def not_installed(error: ModuleNotFoundError) -> str:
    """Return the message for a Python that lacks a package of the project."""
    if CHECKOUT is None:
        return (
            f"{sys.executable} has no module '{error.name}', which ShardStudio needs. "
            f"Run {sys.executable} -m pip check: it names the packages to install"
        )
    return (
        f"{sys.executable} has no module '{error.name}': it is not the Python ShardStudio is installed in. "
        "Run `make .venv`, then .venv/bin/python launch.py"
    )


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00  # the byte in the file name (PEP 383)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
