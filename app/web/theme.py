"""Theme of the page, light and dark."""

from __future__ import annotations

import gradio as gr
from gradio.themes.utils import colors

from trainer.run.colors import variables

FONTS = ("system-ui", "sans-serif")
MONO = ("ui-monospace", "monospace")


def theme() -> gr.Theme:
    """Return a theme of greys and one blue on which white text is readable."""
    return gr.themes.Base(primary_hue=colors.blue, neutral_hue=colors.zinc, font=list(FONTS), font_mono=list(MONO)).set(
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_text_color="white",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        block_label_text_color="*neutral_700",
        block_label_text_color_dark="*neutral_200",
        block_title_text_color="*neutral_700",
        block_title_text_color_dark="*neutral_200",
        input_placeholder_color="*neutral_600",
        input_placeholder_color_dark="*neutral_300",
    )


def css() -> str:
    """Return the colours as CSS variables, light and dark."""
    return (
        f":root {{ color-scheme: light; {variables(is_dark=False)} }}\n"
        f".dark {{ color-scheme: dark; {variables(is_dark=True)} }}\n"
    )
