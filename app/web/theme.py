"""Theme of the page, light and dark."""

from __future__ import annotations

import gradio as gr
from gradio.themes.utils import colors

from app.html import PANELS
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


_COLORS = f"""
:root {{ color-scheme: light; {variables(is_dark=False)} }}
:root:has(> .dark) {{ color-scheme: dark; }}
.dark, :root[data-theme="dark"] {{ {variables(is_dark=True)} }}
"""

CSS = (
    _COLORS
    + PANELS
    + """
#top { align-items: center; } #top > :first-child { flex: 0 0 auto; width: auto; min-width: 0 !important; }
#top h1 { font-size: 1.25rem; margin: 0; }
#top button { white-space: nowrap; }
h2 { font-size: 1rem; }
.block:has(> .html-container > .prose:empty) { display: none; }
.cut { font-size: .85rem; margin: 0; max-height: 9rem; overflow-y: auto; overflow-wrap: anywhere; }
.cut del { color: var(--bad); }
.card img { height: 9rem; margin: auto; object-fit: contain; }
.matrix td, .matrix th { border: 0; padding: .25rem; } .matrix img { width: 128px; display: block; }
#viewer { max-width: 95vw; border: 0; background: var(--background-fill-primary); color: inherit; }
#viewer img { max-width: 90vw; max-height: 80vh; margin: auto; }
.wide { overflow-x: auto; } .wide table { border-collapse: collapse; font-size: .85rem; }
.wide table, .wide tbody, .wide tr { border: 0 !important; }
.wide th, .wide td { border: 0; border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent);
  padding: .3rem .75rem .3rem 0; text-align: left; }
.buckets { list-style: none; margin: 0; padding: 0; font-size: .85rem; }
.buckets li { display: flex; gap: .5rem; align-items: center; } .buckets i { height: .7rem; background: var(--fill); }
.histogram { display: inline-flex; align-items: flex-end; gap: 1px; height: 2rem; width: 12rem; }
.histogram i { flex: 1; background: var(--fill); }
.wrong { outline: 2px solid var(--bad); }
.wrong .info, .wrong [class*=info] { color: var(--bad); }
.events { font-size: .85rem; max-height: 12rem; overflow-y: auto; }
#log pre { font-size: .8rem; white-space: pre-wrap; }
#review table { font-size: .85rem; } #review td { overflow-wrap: anywhere; }
#review pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; }
@media (prefers-reduced-motion: reduce) { * { transition: none !important; animation: none !important; } }
"""
)
