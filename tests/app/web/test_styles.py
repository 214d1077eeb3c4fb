"""What gradio leaves of our styles: it writes each rule anew as the browser parsed it. See DECISIONS 155."""

from __future__ import annotations

import re

import pytest

from tests.app.browser import ROOT

STYLES = sorted((ROOT / "app" / "web" / "assets").glob("*.css"))
RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_a_border_of_a_variable_colour_is_not_changed_in_part(style):
    """`border: solid var(--x)` with a `border-width` after it is written anew without its colour: it becomes black."""
    text = re.sub(r"/\*.*?\*/", "", style.read_text(encoding="utf-8"), flags=re.DOTALL)
    for selector, body in RULE.findall(text):
        names = re.findall(r"(?:^|;)\s*(border(?:-width|-style|-color|-top|-right|-bottom|-left)?)\s*:", body)
        is_variable = re.search(r"(?:^|;)\s*border\s*:[^;]*var\(", body)
        assert not (is_variable and len(names) > 1), selector.strip()
