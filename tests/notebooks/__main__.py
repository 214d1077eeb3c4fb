"""Write the .ipynb of every notebook from its .py: `make notebooks`."""

from __future__ import annotations

import sys

from tests.notebooks.pairs import EditedError, scripts, write


def main() -> int:
    """Returns 2 when a notebook was edited in Jupyter; it is left as it is, and the others are written."""
    code = 0
    for script in scripts():
        try:
            write(script)
        except EditedError as error:
            print(error, file=sys.stderr)
            code = 2
    return code


if __name__ == "__main__":
    sys.exit(main())
