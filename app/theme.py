"""How the page looks, by day and by night."""

from __future__ import annotations

import gradio as gr
from gradio.themes.utils import colors

FONTS = ("system-ui", "sans-serif")
MONO = ("ui-monospace", "monospace")


def theme() -> gr.Theme:
    """Calm greys and one blue that is readable with white on it."""
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


CSS = """
:root { --line-0: #1d4ed8; --line-1: #c2410c; --line-2: #15803d; --line-3: #7e22ce; --line-4: #be123c;
  --line-5: #0e7490; --bad: #b91c1c; --slow: #92400e; }
.dark { --line-0: #93c5fd; --line-1: #fdba74; --line-2: #86efac; --line-3: #d8b4fe; --line-4: #fda4af;
  --line-5: #67e8f9; --bad: #fca5a5; --slow: #fcd34d; }
#top { align-items: center; } #top > :first-child { flex: 0 0 auto; width: auto; min-width: 0 !important; }
#top h1 { font-size: 1.25rem; margin: 0; }
#top button { white-space: nowrap; }
h2 { font-size: 1rem; }
.block:has(> .html-container > .prose:empty) { display: none; }
.card img { height: 9rem; margin: auto; object-fit: contain; }
.matrix td, .matrix th { border: 0; padding: .25rem; } .matrix img { width: 128px; display: block; }
#viewer { max-width: 95vw; border: 0; background: var(--background-fill-primary); color: inherit; }
#viewer img { max-width: 90vw; max-height: 80vh; margin: auto; }
.newest { display: grid; grid-template-columns: repeat(auto-fill, minmax(112px, 1fr)); gap: .5rem; }
.newest figure { margin: 0; } .newest img { width: 100%; } .newest figcaption { font-size: .8rem; }
.wide { overflow-x: auto; } .wide table { border-collapse: collapse; font-size: .85rem; }
.wide table, .wide tbody, .wide tr { border: 0 !important; }
.wide th, .wide td { border: 0; border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent);
  padding: .3rem .75rem .3rem 0; text-align: left; }
.buckets { list-style: none; margin: 0; padding: 0; font-size: .85rem; }
.buckets li { display: flex; gap: .5rem; align-items: center; } .buckets i { height: .7rem; background: var(--line-0); }
.histogram { display: inline-flex; align-items: flex-end; gap: 1px; height: 2rem; width: 12rem; }
.histogram i { flex: 1; background: var(--line-0); }
.alert { border-left: 4px solid var(--bad); padding: .25rem .75rem; }
.alert pre { white-space: pre-wrap; }
.wrong { outline: 2px solid var(--bad); }
.wrong .info, .wrong [class*=info] { color: var(--bad); }
.sentence { font-size: 1.1rem; margin: 0 0 .5rem; }
.bad .sentence { color: var(--bad); } .slow .sentence { color: var(--slow); }
.progress { height: .6rem; background: color-mix(in srgb, currentColor 15%, transparent); border-radius: .3rem; }
.progress i { display: block; height: 100%; background: var(--line-0); border-radius: .3rem; }
#run dl { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: .5rem 0 0; }
#run dt { font-size: .8rem; opacity: .75; } #run dd { margin: 0; font-variant-numeric: tabular-nums; }
.ranks { list-style: none; margin: 0; padding: 0; font-size: .85rem; }
.rank { display: grid; grid-template-columns: 4rem 1fr; gap: 0 .5rem; margin-bottom: .5rem; align-items: center; }
.rank span:nth-of-type(n+2) { grid-column: 2; } .rank.late { color: var(--slow); }
.bar { position: relative; height: .8rem; background: color-mix(in srgb, currentColor 15%, transparent); }
.bar i { position: absolute; inset: 0 auto 0 0; }
.bar .peak { border-right: 2px solid currentColor; }
.bar .reserved { background: color-mix(in srgb, var(--line-0) 45%, transparent); }
.bar .allocated { background: var(--line-0); }
.events { font-size: .85rem; max-height: 12rem; overflow-y: auto; }
#log pre { font-size: .8rem; white-space: pre-wrap; }
#review table { font-size: .85rem; } #review pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; }
@media (prefers-reduced-motion: reduce) { * { transition: none !important; animation: none !important; } }
"""
