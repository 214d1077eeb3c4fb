"""A notebook as its reader meets it: JupyterLab in Chromium, a run of two ranks, a kernel that is restarted."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import nbformat
import pytest
from nbformat.reader import NotJSONError
from PIL import Image
from playwright.sync_api import Browser, Page

from tests.app.browser import BEYOND, TRAINED_WITHIN_S, faultless, until, until_so
from tests.app.notebook.lab import Lab, choose, code_cells, position_of, serving_lab
from tests.notebooks.pairs import METADATA, NOTEBOOKS
from tests.runs import make_pictures
from trainer.run import process
from trainer.run.folder import RunDir

pytestmark = pytest.mark.slow
STOP_S = 1.0
SETTLED_MS = 4000
"""After this time JupyterLab has written into the notebook what it knows of the kernel."""
NOTEBOOK_BYTES = 500_000
NOTEBOOK = "01_quickstart"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with serving_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def page(browser: Browser, lab: Lab) -> Iterator[Page]:
    with closing(browser.new_context(viewport={"width": 1280, "height": 1000})) as context:
        page = context.new_page()
        with faultless(page, lab.url):
            yield page


def test_each_lesson_is_listed_once_and_opens_without_a_question_or_a_change(lab: Lab, page: Page):
    for file in (*NOTEBOOKS.glob("01*"), *NOTEBOOKS.glob("*.toml"), NOTEBOOKS / "README.md"):
        shutil.copy(file, lab.notebooks)
    before = {file.name: file.read_bytes() for file in lab.notebooks.iterdir() if file.is_file()}
    assert sorted(entry["name"] for entry in lab.answer("contents/")["content"]) == ["01_quickstart.ipynb", "README.md"]
    lab.open(page, f"{NOTEBOOK}.ipynb")
    page.wait_for_timeout(SETTLED_MS)
    assert page.locator(".jp-Dialog, .Toastify__toast").count() == 0
    assert page.locator(".jp-NotebookPanel").count() == 1
    assert page.locator(".jp-mod-dirty").count() == 0, "it would be saved, and ask when it is closed"
    assert {name: (lab.notebooks / name).read_bytes() for name in before} == before


def show_form(lab: Lab, page: Page, runs: Path, overrides: tuple[str, ...]) -> None:
    call = f"notebook.form('quickstart', *{overrides!r}, runs=Path({str(runs)!r}))"
    code = f"from pathlib import Path\nfrom app import notebook\n{call}"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)], metadata=METADATA)
    nbformat.write(notebook, lab.notebooks / f"{NOTEBOOK}.ipynb")  # with the kernel of the other tests
    lab.open(page, f"{NOTEBOOK}.ipynb")
    choose(page, "Run", "Run All Cells")


def test_the_cards_are_clicked_through_to_a_finished_run(lab: Lab, page: Page, runs: Path):
    fields = ("train.steps=20", "optim.warmup=2", "sample.every=6", "sample.steps=4")
    show_form(lab, page, runs, fields)
    form, why = page.locator(".shardstudio-form"), page.locator(".shardstudio-form .shardstudio-notice")

    def press(name: str) -> None:
        form.get_by_role("button", name=name, exact=True).click()

    def says(text: str) -> None:
        why.filter(has_text=text).first.wait_for()

    def type_steps(text: str) -> None:
        form.get_by_role("textbox", name="Steps train.steps").fill(text)
        page.keyboard.press("Tab")

    press("FLUX.2 dev")
    says("FLUX.2 dev is not on this machine yet; download it on the first card, 113 GB.")
    form.get_by_role("button", name="Start", exact=True).and_(page.locator(":disabled")).wait_for()
    says("Left behind, as they belong to the former preset: Steps, Warm-up, Samples every, Denoising steps.")
    press("Undo")
    press("LoKr")
    form.get_by_role("button", name="LoKr, chosen").wait_for()
    type_steps("many")
    says("Start waits for one thing")
    type_steps("6")
    says("Ready.")
    press("Start")
    until(page, "document.querySelector('.shardstudio-form .run')?.dataset.state === 'finished'", TRAINED_WITHIN_S)
    [run] = (RunDir.open(config.parent) for config in runs.glob("*/config.yaml"))
    assert (run.config().adapter.type, run.config().train.steps) == ("lokr", 6)
    until(page, "document.querySelectorAll('.shardstudio-form .newest').length === 2")  # a row for each step
    assert form.locator("[data-rank]").count() == 2


def test_pictures_and_a_word_are_dropped_rehearsed_and_queued_up_to_a_finished_run(
    lab: Lab, page: Page, runs: Path, tmp_path: Path
):
    pictures = make_pictures(tmp_path / "own", count=6)
    Image.effect_noise((3600, 3600), 90).save(pictures / "00.png")  # more than a websocket takes unless told to
    assert (pictures / "00.png").stat().st_size > 10 * 2**20
    show_form(lab, page, runs, ())
    form, said = page.locator(".shardstudio-form"), page.locator(".shardstudio-form .shardstudio-notice")
    form.get_by_text("Drop and name: your pictures and a word").click()
    with page.expect_file_chooser() as chooser:
        form.get_by_role("button", name="Choose files").click()
    chooser.value.set_files(sorted(pictures.iterdir()))
    form.get_by_role("textbox", name="One word for what they are").fill("milo")
    form.get_by_role("button", name="Go on", exact=True).click()
    said.filter(has_text="12 added").wait_for()
    form.get_by_role("textbox", name="Steps train.steps").fill("20")
    page.keyboard.press("Tab")
    said.filter(has_text="Ready.").wait_for()
    form.get_by_role("button", name="Rehearse", exact=True).click()
    until(page, "document.querySelector('.shardstudio-form .run')?.dataset.state === 'training'", TRAINED_WITHIN_S)
    assert form.get_by_text("Likeness and detail: its pictures have 64 × 64 pixels.").is_visible()
    form.get_by_role("img", name="03.png as the real run trains it").wait_for()
    form.get_by_role("button", name="Add to queue", exact=True).click()
    said.filter(has_text="milo waits in the queue as number 1.").wait_for()
    until_so(page, lambda: len(run_folders(runs, "milo-2*")) == 1)
    [run] = run_folders(runs, "milo-2*")
    until_so(page, lambda: process.status(run) == "finished", TRAINED_WITHIN_S)
    assert (run.config().data.path, run.config().train.steps) == (str(tmp_path / "pictures" / "milo"), 20)


def run_folders(runs: Path, names: str) -> list[RunDir]:
    return [RunDir.open(config.parent) for config in runs.glob(f"{names}/config.yaml")]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """Where the notebook's runs lie; none of them goes on after the test."""
    yield tmp_path / "runs"
    for file in (tmp_path / "runs").glob("*/config.yaml"):
        process.terminate(RunDir.open(file.parent))


def test_a_run_is_watched_and_stopped_from_the_quickstart_whose_kernel_was_restarted(lab: Lab, page: Page, runs: Path):
    file = lab.copy(NOTEBOOK, {"RUNS": runs, "STEPS": 2000})
    parameters, dashboard, dashboard_again = (
        position_of(file, text) for text in ("STEPS = 2000", "notebook.dashboard(run)", "notebook.attach(")
    )
    lab.open(page, file.name)
    choose(page, "Run", "Run All Cells")
    _grows(page, dashboard)
    [run] = (RunDir.open(config.parent) for config in runs.glob("*/config.yaml"))

    choose(page, "Kernel", "Restart Kernel…")
    page.locator(".jp-Dialog button.jp-mod-accept").click()
    lab.await_kernel(page)
    for position in (parameters, dashboard_again):
        page.locator(".jp-CodeCell").nth(position).locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
    _grows(page, dashboard_again)
    assert process.alive(run)

    stop_s = _stopped_after_s(page, dashboard_again)
    assert stop_s <= BEYOND * STOP_S
    until(page, f"{_cell(dashboard_again)}.querySelector('.run').dataset.state === 'stopped'", TRAINED_WITHIN_S)
    until(page, f"!{_cell(dashboard_again)}.querySelector('button.jupyter-button')")
    page.keyboard.press("Control+s")
    until_so(page, lambda: "Stopped at step" in _html_of(file, dashboard_again))
    assert "<svg" in _html_of(file, dashboard_again)
    assert file.stat().st_size <= NOTEBOOK_BYTES
    print(f"Stop was answered after {stop_s:.2f} s; the notebook has {file.stat().st_size} bytes")


def test_a_cell_that_waits_for_the_end_goes_on_when_the_run_is_stopped(lab: Lab, page: Page, runs: Path):
    file = lab.copy(NOTEBOOK, {"RUNS": runs, "STEPS": 2000})
    dashboard, waiting = (position_of(file, text) for text in ("notebook.dashboard(run)", "await notebook.ended(run)"))
    lab.open(page, file.name)
    choose(page, "Run", "Run All Cells")
    _grows(page, dashboard)
    assert _stopped_after_s(page, dashboard) <= BEYOND * STOP_S
    until(page, f"{_cell(waiting)}.innerText.includes('The run has stopped')", TRAINED_WITHIN_S)


def _cell(position: int) -> str:
    return f"document.querySelectorAll('.jp-CodeCell')[{position}]"


def _grows(page: Page, position: int) -> None:
    """Wait until the loss chart below a cell has more points than it had."""
    points = f"{_cell(position)}.querySelector('.chart path.c0').getAttribute('d').split('L').length"
    until(page, f"{points} > 1", TRAINED_WITHIN_S)
    before = page.evaluate(points)
    until(page, f"{points} > {before}")


def _stopped_after_s(page: Page, position: int) -> float:
    """Press Stop while the run trains. Returns the seconds until it was answered."""
    button = page.locator(".jp-CodeCell").nth(position).locator("button.jupyter-button", has_text="Stop")
    until(page, f"{_cell(position)}.querySelector('.run').dataset.state === 'training'")
    clicked = time.monotonic()
    button.click()
    until(page, f"{_cell(position)}.innerText.includes('Stopping after this step')")
    return time.monotonic() - clicked


def _html_of(notebook: Path, position: int) -> str:
    """What the saved notebook shows below a cell."""
    try:
        outputs = code_cells(notebook)[position].outputs
    except NotJSONError:  # JupyterLab is writing it
        return ""
    return "".join(output.data["text/html"] for output in outputs if "text/html" in output.get("data", {}))
