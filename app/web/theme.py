"""Colours of the page, light and dark, and the theme of gradio's own parts, of which the page shows none."""

from __future__ import annotations

import gradio as gr

from trainer.view.colors import variables
from trainer.view.render import VIEW

FONTS = ("system-ui", "sans-serif")
MONO = ("ui-monospace", "monospace")


def theme() -> gr.Theme:
    """Return a theme with fonts of the system: gradio's own are loaded from elsewhere."""
    return gr.themes.Base(font=list(FONTS), font_mono=list(MONO))


def css() -> str:
    """Return the colours as CSS variables, light and dark, and the style of the picture that Python draws."""
    return (
        f":root {{ color-scheme: light; {variables(is_dark=False)} }}\n"
        f".dark {{ color-scheme: dark; {variables(is_dark=True)} }}\n"
        f"{VIEW.page('step_memory.css')}\n"
    )
