"""The charts of the page, drawn in Chromium without a server: smoothing, crosshair, zoom, tools, downloads, cost."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Download, Locator, Page

from app.web import bundle
from tests.app.browser import BEYOND
from trainer.view.chart import MOST_SENT, Chart, Line
from trainer.view.colors import variables
from trainer.view.numbers import default_decay, smoothed

SITE = "http://charts.test"
REFRESH_MS = 100.0
"""Main thread of the browser, for five charts of 10,000 steps."""
ASSETS = {file.name: file.read_text() for file in bundle.FOLDER.iterdir()}
PAGE = f"""<!doctype html><style>:root {{ {variables(is_dark=False)} }} .dark {{ {variables(is_dark=True)} }}
{ASSETS["page.css"]} {ASSETS["charts.css"]}</style><body><div id=studio></div>
<script>{ASSETS["core.js"]} {ASSETS["charts.js"]}</script>"""
MOUNT = """charts => {
  const root = document.querySelector('#studio');
  root.replaceChildren(studio.h('section.page'));
  window.mounted = charts.map(([options, value]) => {
    const chart = studio.chart(root.firstElementChild, options);
    if (value) chart.set(value);
    return chart;
  });
}"""
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture
def sheet(tab: Page) -> Iterator[Page]:
    """An empty page of its own origin, which keeps nothing of the test before."""
    tab.route(f"{SITE}/**", lambda route: route.fulfill(body=PAGE, content_type="text/html"))
    tab.set_viewport_size({"width": 800, "height": 900})
    tab.goto(f"{SITE}/")
    tab.evaluate("() => localStorage.clear()")
    yield tab
    tab.goto("about:blank")
    tab.unroute(f"{SITE}/**")


def mount(page: Page, *values: str, **options: object) -> list[Locator]:
    """Draw charts, the first of the loss and the second of the gradient norm. options: of all of them."""
    titles = ("Loss", "Gradient norm", "Learning rate", "Speed", "Seconds per step")
    page.evaluate(MOUNT, [[{"title": title, **options}, value] for title, value in zip(titles, values, strict=False)])
    page.evaluate(DRAWN)
    return [page.locator(".chart").nth(at) for at in range(len(values))]


def noise(count: int, seed: int = 3) -> list[float]:
    """A loss as of a training run: it falls, and its noise is skewed."""
    draw = random.Random(seed)
    return [0.4 + 0.4 * math.exp(-10 * at / count) + abs(draw.gauss(0, 0.1)) for at in range(count)]


def noisy(values: Sequence[float], label: str = "each step") -> Line:
    points = list(enumerate(values, 1))
    minutes = [step / 30 for step, _ in points]
    return Line(label, points, "noisy", default_decay(len(values)), minutes)


def chart_json(title: str, lines: Sequence[Line], source: str = "") -> str:
    return Chart(title, lines, source=source).json()


def readout(chart: Locator) -> list[str]:
    return chart.locator(".readout li").all_text_contents()


def point_at(page: Page, chart: Locator, share: float) -> None:
    """Move the mouse over the canvas, to a share of its width."""
    box = chart.locator("canvas").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)


def drag(page: Page, chart: Locator, start: float, end: float) -> None:
    point_at(page, chart, start)
    page.mouse.down()
    point_at(page, chart, end)
    page.mouse.up()
    page.evaluate(DRAWN)


def in_browser(page: Page, *arguments: object) -> list[float | None]:
    source = ASSETS["charts.js"].partition("function smoothed")[2].partition("function number")[0]
    found: list[float | None] = page.evaluate(
        f"([values, decay, counts]) => {{ function smoothed{source}; return smoothed(values, decay, counts); }}",
        list(arguments),
    )
    return found


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.99])
def test_the_browser_smooths_as_python_does(sheet: Page, decay: float):
    values = noise(300)
    values[7] = values[200] = math.nan
    sent = [None if math.isnan(value) else value for value in values]
    assert in_browser(sheet, sent, decay, None) == pytest.approx(smoothed(values, decay), abs=1e-12)
    counts = [1 + at % 7 for at in range(300)]
    assert in_browser(sheet, sent, decay, counts) == pytest.approx(smoothed(values, decay, counts), abs=1e-12)


@pytest.mark.parametrize(("decay", "tolerance"), [(0.9, 0.15), (0.95, 0.05), (default_decay(10_000), 0.005)])
def test_a_line_sent_as_means_of_steps_is_smoothed_as_its_steps_are(decay: float, tolerance: float):
    """Tolerance: of the noise's standard deviation. Below 0.9, the mean of five steps is smoother than the steps."""
    values = noise(10_000)
    sent = json.loads(chart_json("Loss", [noisy(values)]))
    [line], [grid] = sent["lines"], sent["grids"]
    exact = smoothed(values, decay)
    means = smoothed(line["values"], decay, line["counts"])
    spread = statistics.pstdev(values[-1000:])
    for step, mean in zip(grid["step"], means, strict=True):
        assert abs(exact[int(step) - 1] - mean) < tolerance * spread


def test_a_short_line_is_sent_whole_and_a_long_one_keeps_its_spike():
    short = json.loads(chart_json("Loss", [noisy(noise(MOST_SENT))]))
    assert len(short["lines"][0]["values"]) == MOST_SENT
    assert "counts" not in short["lines"][0]
    values = noise(10_000)
    values[7_777] = 9.0
    values[3] = math.nan
    long = json.loads(chart_json("Loss", [noisy(values), noisy(values, "again")]))
    assert len(long["grids"]) == 1, "lines of the same steps share them"
    line = long["lines"][0]
    assert max(line["high"]) == 9.0
    assert (len(line["values"]), sum(line["counts"]), line["counts"][0]) == (2000, 9999, 4)


def test_all_charts_of_a_page_show_the_same_step(sheet: Page):
    validation = Line("validation", [(20, 0.5), (40, 0.25)], "dots", minutes=[20 / 30, 40 / 30])
    loss, norm = mount(sheet, chart_json("Loss", [noisy([1 / step for step in range(1, 51)]), validation]),
                       chart_json("Gradient norm", [noisy([2.0] * 50)]))  # fmt: skip
    assert readout(loss)[::3] == ["step 50", "validation 0.25 of 40"]
    point_at(sheet, norm, 0.6)
    assert readout(loss)[0] == readout(norm)[0] != "step 50"
    assert readout(loss)[3].startswith("validation 0.5 of 20")
    for chart in (loss, norm):
        assert chart.locator(".cross").evaluate("cross => getComputedStyle(cross).visibility") == "visible"
    sheet.mouse.move(0, 0)
    assert readout(norm)[0] == "step 50"


def test_the_keyboard_moves_the_crosshair_and_zooms(sheet: Page):
    [loss] = mount(sheet, chart_json("Loss", [noisy(noise(100))]))
    loss.locator("canvas").focus()
    for key, step in (
        ("Home", "1"),
        ("ArrowRight", "2"),
        ("Shift+ArrowRight", "12"),
        ("End", "100"),
        ("ArrowLeft", "99"),
    ):
        sheet.keyboard.press(key)
        assert readout(loss)[0] == f"step {step}"
    assert "step 99" in loss.locator("[role=status]").text_content()
    assert loss.locator(".reset").is_disabled()
    sheet.keyboard.press("+")
    sheet.evaluate(DRAWN)
    assert loss.locator(".reset").is_enabled()
    sheet.keyboard.press("Escape")
    sheet.evaluate(DRAWN)
    assert loss.locator(".reset").is_disabled()


def test_a_drag_zooms_all_charts_and_a_double_click_or_the_button_resets_them(sheet: Page):
    loss, norm = mount(sheet, chart_json("Loss", [noisy(noise(1000))], source="a"),
                       chart_json("Gradient norm", [noisy(noise(1000))], source="a"))  # fmt: skip
    drag(sheet, loss, 0.5, 0.6)
    point_at(sheet, norm, 0.999)
    assert 550 < float(readout(norm)[0].removeprefix("step ")) < 650
    norm.locator("canvas").dblclick()
    sheet.evaluate(DRAWN)
    point_at(sheet, loss, 0.999)
    assert readout(loss)[0] == "step 1,000"
    drag(sheet, norm, 0.5, 0.6)
    loss.locator(".reset").click()
    sheet.evaluate(DRAWN)
    point_at(sheet, norm, 0.999)
    assert readout(norm)[0] == "step 1,000"
    drag(sheet, norm, 0.5, 0.6)
    sheet.evaluate("value => mounted[0].set(value)", chart_json("Loss", [noisy(noise(1000))], source="another run"))
    sheet.evaluate(DRAWN)
    assert loss.locator(".reset").is_disabled()


def test_smoothing_and_axis_are_chosen_once_for_all_charts_and_remembered(sheet: Page):
    values = [chart_json("Loss", [noisy([3.0, 1.0])]), chart_json("Gradient norm", [noisy([3.0, 1.0])])]
    loss, norm = mount(sheet, *values)
    loss.locator(".smoothing input").fill("0.9")
    expected = f"smoothed {smoothed([3.0, 1.0], 0.9)[-1]:.4g}"
    sheet.evaluate(DRAWN)
    assert readout(loss)[2] == readout(norm)[2] == expected
    norm.get_by_role("button", name="time").click()
    sheet.evaluate(DRAWN)
    assert readout(loss)[0] == "minute 0.07 (step 2)"
    sheet.reload()
    loss, _ = mount(sheet, *values)
    assert (readout(loss)[0], readout(loss)[2]) == ("minute 0.07 (step 2)", expected)


def test_runs_that_are_compared_have_the_smoothing_of_their_length_until_one_is_chosen(sheet: Page):
    sheet.evaluate("localStorage.clear()")
    sheet.reload()
    lines = [Line("short", [(1, 3.0), (2, 1.0)], "smoothed", 0.5), Line("long", [(1, 3.0), (2, 1.0)], "smoothed", 0.99)]
    [compared] = mount(sheet, chart_json("Loss, smoothed", lines))
    assert compared.locator(".smoothing b").text_content() == "by run"
    assert readout(compared)[1:] == [f"short {smoothed([3, 1], 0.5)[1]:.4g}", f"long {smoothed([3, 1], 0.99)[1]:.4g}"]
    compared.locator(".smoothing input").fill("0")
    sheet.evaluate(DRAWN)
    assert readout(compared)[1:] == ["short 1", "long 1"]


def test_the_last_label_is_whole_and_a_logarithmic_axis_has_marks_within_a_decade(sheet: Page):
    texts = """value => { const found = [], own = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        const wide = this.measureText(text).width;
        const left = { center: x - wide / 2, right: x - wide }[this.textAlign] ?? x;
        found.push([text, left, left + wide]); own.call(this, text, x, y); };
      mounted[0].set(value);
      return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => {
        CanvasRenderingContext2D.prototype.fillText = own; done(found); }))); }"""
    long = Line("each step", [(step, 0.2 + 0.6 * (step % 2)) for step in range(1, 10_001)], "noisy")
    [loss] = mount(sheet, chart_json("Loss", [long]))
    loss.locator(".log input").check()
    found = sheet.evaluate(texts, chart_json("Loss", [long]))
    width = loss.locator("canvas").evaluate("canvas => canvas.clientWidth")
    labels = {text: (left, right) for text, left, right in found}
    assert {"10,000", "8,000", "0.2", "0.5", "step", "loss"} <= set(labels)
    assert all(left >= 0 and right <= width for text, (left, right) in labels.items() if text != "loss")


def test_what_is_drawn_can_be_saved_as_numbers_and_as_an_image(sheet: Page, tmp_path: Path):
    lines = [noisy([0.123456789, 2.0, math.nan]), Line("=1+1", [(2, 5.0)], "dots", minutes=[0.0])]
    [loss] = mount(sheet, chart_json("Loss", lines, source="my run"))
    with sheet.expect_download() as numbers:
        loss.get_by_role("button", name="CSV").click()
    assert numbers.value.suggested_filename == "my-run-loss.csv"
    assert list(csv.reader(io.StringIO(text_of(numbers.value, tmp_path)))) == [
        ["step", "minutes", "each step", "'=1+1"],
        ["1", "0.0333", "0.1234568", ""],
        ["2", "0.0667", "2", "5"],
        ["3", "0.1", "", ""],
    ]
    with sheet.expect_download() as image:
        loss.get_by_role("button", name="PNG").click()
    image.value.save_as(tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.size[1] == 320 + 44
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 10


def text_of(download: Download, folder: Path) -> str:
    download.save_as(folder / "file")
    return (folder / "file").read_text()


def test_a_chart_is_drawn_anew_in_the_colours_of_the_other_theme(sheet: Page):
    [loss] = mount(sheet, chart_json("Loss", [noisy(noise(50))]))
    image = "canvas => canvas.toDataURL()"
    before = loss.locator("canvas").evaluate(image)
    sheet.evaluate("() => studio.setTheme('dark')")
    sheet.evaluate(DRAWN)
    assert loss.locator("canvas").evaluate(image) != before


def test_a_small_chart_is_124_pixels_high_and_shows_its_last_value(sheet: Page):
    [norm] = mount(sheet, chart_json("Gradient norm", [noisy([0.25] * 9)]), small=True)
    assert norm.locator("canvas").evaluate("canvas => canvas.clientHeight") == 124
    assert norm.locator(".now").text_content() == "0.25"
    assert norm.get_by_role("button").all_text_contents() == [""], "only full screen"


def test_charts_without_data_and_of_one_point_are_drawn_without_an_error(sheet: Page):
    found: list[str] = []
    sheet.on("pageerror", lambda error: found.append(str(error)))
    empty, one, none = mount(sheet, chart_json("Loss", []), chart_json("Loss", [noisy([0.5])]),
                             chart_json("Loss", [noisy([math.nan, math.nan])]))  # fmt: skip
    none.locator(".log input").check()
    for chart in (empty, one, none):
        point_at(sheet, chart, 0.5)
        drag(sheet, chart, 0.3, 0.6)
    assert (empty.locator("canvas").get_attribute("aria-label"), found) == ("Loss: no data yet.", [])
    assert none.locator("canvas").get_attribute("data-n") == "0"


@pytest.mark.slow
def test_ten_thousand_steps_are_drawn_within_a_tenth_of_a_second(sheet: Page):
    def values(count: int) -> list[str]:
        parts = [Line(f"part {at}", list(enumerate(noise(count, at), 1)), "smoothed", 0.99) for at in range(6)]
        single = [chart_json(title, [noisy(noise(count))]) for title in ("Loss", "Norm", "Rate", "Speed")]
        return [*single, chart_json("Seconds per step", [noisy(noise(count)), *parts])]

    mount(sheet, *values(10_000))
    session = sheet.context.new_cdp_session(sheet)
    session.send("Performance.enable")

    def busy_ms() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return 1e3 * next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    spent = []
    for count in (10_001, 10_006, 10_011):
        sheet.evaluate("values => { window.next = values; }", values(count))
        before = busy_ms()
        sheet.evaluate("() => next.forEach((value, at) => mounted[at].set(value))")
        sheet.evaluate(DRAWN)
        spent.append(busy_ms() - before)
    assert statistics.median(spent) <= BEYOND * REFRESH_MS, spent
