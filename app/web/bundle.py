"""Scripts and styles of the page, which the browser gets as one script and one style sheet."""

from __future__ import annotations

from pathlib import Path

from app.web.panels import PANELS

FOLDER = Path(__file__).with_name("assets")
SCRIPTS = ("core", *(name for names in PANELS.values() for name in names))
STYLES = ("page", *(name for name in SCRIPTS if (FOLDER / f"{name}.css").is_file()))


def script() -> str:
    """Return all scripts as one, which defines `studio`."""
    return "\n".join(_read(f"{name}.js") for name in SCRIPTS)


def style() -> str:
    """Return all style sheets as one."""
    return "\n".join(_read(f"{name}.css") for name in STYLES)


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
