"""Scripts and styles of the page, which the browser gets as one script and one style sheet."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("assets")
SCREENS: tuple[str, ...] = (
    "charts",
    "lightbox",
    "step",
    "fit",
    "form",
    "run",
    "samples",
    "files",
    "results",
    "runs",
    "queue",
    "captioning",
    "upload",
    "look",
    "mask",
    "data",
    "machine",
)
"""Screens with a script and a style sheet of their own."""
SCRIPTS = ("core", "frame", *SCREENS)
STYLES = ("page", *SCREENS)


def script() -> str:
    """Return all scripts as one, which defines `studio`."""
    return "\n".join(_read(f"{name}.js") for name in SCRIPTS)


def style() -> str:
    """Return all style sheets as one."""
    return "\n".join(_read(f"{name}.css") for name in STYLES)


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
