"""Whether this machine is fit to train."""

from __future__ import annotations

import gradio as gr
from markupsafe import Markup

from app.studio import Studio
from app.web.pages.parts import QUIET, table
from trainer.launcher import doctor


def build(studio: Studio) -> gr.HTML:
    """Lay out the page, inside a `gr.Blocks`. Returns what shows the checks."""
    look = gr.Button("Look again", elem_id="look")
    found = gr.HTML(elem_id="checks")
    look.click(lambda: checks(studio), None, found, **QUIET)
    return found


def checks(studio: Studio) -> Markup:
    """A row per check."""
    words = {"ok": "fine", "warn": "look", "fail": "wrong"}
    rows = [(check.what, words[check.verdict], check.fact, check.remedy) for check in doctor.checks(studio.runs)]
    return table(("What", "Verdict", "Found", "What to do"), rows)
