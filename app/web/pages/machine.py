"""The page Doctor: checks of this machine."""

from __future__ import annotations

import gradio as gr
from markupsafe import Markup

from app.studio import Studio
from app.web.pages.parts import QUIET, table
from trainer.launcher import doctor


def build(studio: Studio) -> gr.HTML:
    """Lay out the page, inside a `gr.Blocks`. Returns the component that shows the checks."""
    again = gr.Button("Check again", elem_id="check-again")
    shown = gr.HTML(elem_id="checks")
    again.click(lambda: checks(studio), None, shown, **QUIET)
    return shown


def checks(studio: Studio) -> Markup:
    """Run the checks and return a table with a row for each."""
    words = {"ok": "ok", "warn": "warning", "fail": "error"}
    rows = [(check.what, words[check.verdict], check.fact, check.remedy) for check in doctor.checks(studio.runs)]
    return table(("Check", "Result", "Found", "Remedy"), rows)
