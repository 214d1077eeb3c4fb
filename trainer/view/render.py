"""Pages in one file of HTML, which load nothing from a server and hold no scripts: templates, filled. No torch.

See DECISIONS 130.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trainer.view.colors import both_variables

COLORS = both_variables()
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The Content-Security-Policy of the file: inline style and embedded images only, no scripts and no network."""


def render(template: str, **values: object) -> str:
    """Fill a template of `templates/`. All values are escaped but `Markup`, which is HTML of our own."""
    return _environment().get_template(template).render(colors=Markup(COLORS), policy=POLICY, **values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
