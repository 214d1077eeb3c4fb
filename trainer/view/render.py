"""HTML from templates. What a run, a file or a user wrote is always escaped: `autoescape` is on, and no template may
switch it off (`tests/test_architecture.py`; DECISIONS 130). No torch.

A page is one file of HTML, which loads nothing from a server and holds no scripts.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trainer.system.amounts import GIB
from trainer.view.colors import LINES, MEMORY_KINDS, both_variables
from trainer.view.numbers import format_seconds

FOLDER = Path(__file__).with_name("templates")
COLORS = both_variables()
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The Content-Security-Policy of a page: inline style and embedded images only, no scripts and no network."""


class Templates:
    """The templates of a folder, and those of this room: all may include and import them."""

    def __init__(self, folder: Path) -> None:
        self._environment = Environment(
            loader=FileSystemLoader([folder, FOLDER]),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals |= {"colors": Markup(COLORS), "memory_kinds": MEMORY_KINDS}
        self._environment.globals |= {"num_lines": len(LINES), "policy": POLICY}
        self._environment.filters |= {
            "gib": lambda num_bytes: f"{num_bytes / GIB:.2f}",
            "seconds": format_seconds,
            "sentence": lambda text: f"{text[0].upper()}{text[1:]}.",
        }

    def page(self, template: str, **values: object) -> str:
        """Return a template, filled."""
        return self._environment.get_template(template).render(**values)

    def part(self, template: str, macro: str, *values: object) -> Markup:
        """Return a macro of a template, filled, without the empty lines around it."""
        filled: Markup = getattr(self._environment.get_template(template).module, macro)(*values)
        return filled.strip()


VIEW = Templates(FOLDER)
"""The templates of this room."""
