"""Recipe "Add a panel": a toy made of the files that it names is in the rail, is shown and answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.app.browser import opened, serving, show
from tests.recipes.copies import TOYS, Copy, listed

ASKED = """
from pathlib import Path
from app.studio import Studio
from app.web import scripts
from app.web.panels import PANELS

answers = {name: call for module in PANELS for name, call in module.calls(Studio(Path("runs"))).items()}
print(answers["toy_greeting"](name="A"), "/toy.js" in scripts.page_end({}))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """The code with the toy, added as the recipe says."""
    copy = Copy(tmp_path)
    copy.add("app/web/pages/toy.py", (TOYS / "panel.py").read_text(encoding="utf-8"))
    copy.add("app/web/assets/toy.js", (TOYS / "panel.js").read_text(encoding="utf-8"))
    copy.edit("app/web/panels.py", "    samples,\n    upload,\n", "    samples,\n    toy,\n    upload,\n")
    copy.edit("app/web/panels.py", '    machine: ("machine",),\n', '    toy: ("toy",),\n    machine: ("machine",),\n')
    return copy


def test_a_new_panel_changes_the_files_of_its_recipe_and_no_others_and_the_page_has_its_script(copy: Copy) -> None:
    assert copy.changed() == listed("Add a panel", name="toy")
    assert copy.python("-c", ASKED) == "Hello A, your runs are in runs. True\n"


@pytest.mark.slow
def test_a_new_panel_is_in_the_rail_before_the_one_listed_after_it_and_answers(copy: Copy, browser: Browser) -> None:
    program, environment = copy.path / "launch.py", {"PYTHONPATH": str(copy.path)}
    with (
        serving(copy.path / "runs", program=program, environment=environment) as server,
        opened(browser, server.url) as page,
    ):
        assert page.locator("#rail a.nav span").all_inner_texts()[-2:] == ["Toy", "Machine"]
        show(page, "Toy")
        expect(page.get_by_label("Whom to greet")).to_be_focused()
        page.get_by_label("Whom to greet").fill("<b>B</b>")
        page.get_by_role("button", name="Greet").click()
        expect(page.locator("#toy-greeting")).to_have_text("Hello <b>B</b>, your runs are in runs.")
