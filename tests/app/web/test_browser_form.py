"""The screen New run in Chromium: what is typed is kept, what is wrong is said where it is, and Start says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.app.browser import (
    ROOT,
    Server,
    ask_again,
    held_back,
    opened,
    reload,
    settled,
    until,
    until_so,
    visited,
    write_over,
)
from tests.runs import make_pictures, write_preset

SDXL = "sdxl-lora-1gpu"


def value(page: Page, field: str) -> str:
    return page.locator(f"#field-{field}").input_value()


def reads(page: Page, field: str, text: str) -> None:
    """Wait until an input shows a text."""
    until(page, f"document.querySelector('#field-{field}').value === {json.dumps(text)}")


def values(draft: Path) -> dict[str, Any]:
    """The edits that the server keeps."""
    return json.loads(draft.read_text())["values"]


def choose_sdxl(page: Page) -> None:
    """Choose the model by its tile, and then its LoRA."""
    page.locator("#model-filter button", has_text="All").click()
    page.locator("#tiles [data-model*='stable-diffusion-xl']").first.click()
    page.locator(f"#presets [data-preset='{SDXL}']").click()
    until(page, f"document.querySelector('#page-new').dataset.preset === {json.dumps(SDXL)}")


def test_the_form_shows_what_the_method_has_and_a_wrong_value_at_its_row(page: Page):
    page.locator("#field-adapter-rank").wait_for()
    page.locator("#methods").get_by_text("BOFT", exact=True).click()
    page.locator("#field-adapter-rank").wait_for(state="hidden")
    page.locator("#field-adapter-block_size").wait_for()
    write_over(page, "field-train-steps", "many")
    page.locator("#row-field-train-steps.wrong .help", has_text="needs a whole number, not 'many'").wait_for()
    settled(page)
    assert page.locator("#field-train-steps").get_attribute("aria-invalid") == "true"
    assert page.locator("#start").is_disabled()
    page.locator("#why a", has_text="Steps").click()
    assert page.evaluate("document.activeElement.id") == "field-train-steps"


def test_settings_are_found_by_words_and_a_changed_one_is_counted(page: Page):
    page.locator("#search").fill("restarts")
    restarts = page.locator("#field-parallel-max_restarts")
    restarts.wait_for()
    assert page.locator("#group-sampling").is_hidden()
    write_over(page, "field-parallel-max_restarts", "2")
    page.locator("#changes a", has_text="Restarts").wait_for()
    page.locator("#search").fill("")
    restarts.wait_for(state="hidden")
    assert page.locator("#group-cluster .num-changed").inner_text() == "1 changed"
    page.locator("#search").fill("zzz")
    page.locator("#no-match").wait_for()


def test_what_keeps_start_from_starting_is_said_below_it_and_leads_to_its_field(page: Page):
    choose_sdxl(page)
    why = page.locator("#why[data-state=refused]")
    why.wait_for()
    assert page.locator("#start").is_disabled() and page.locator("#enqueue").is_disabled()
    assert "Stable Diffusion XL" in why.inner_text() or "model" in why.inner_text().lower()
    start, reasons = page.locator("#start").bounding_box(), why.bounding_box()
    assert 0 <= reasons["y"] - start["y"] - start["height"] < 40
    page.keyboard.press("Control+Enter")  # refused, and shown
    until(page, "(b => b.top >= 0 && b.top < innerHeight)(document.querySelector('#why').getBoundingClientRect())")
    assert "#/runs" not in page.url


@pytest.mark.slow
def test_another_preset_keeps_the_data_and_says_what_it_leaves_behind(page: Page, runs: Path, draft: Path):
    folder = make_pictures(runs.parent / "carried", count=2)
    write_over(page, "field-data-path", str(folder))
    page.keyboard.press("Enter")
    write_over(page, "field-data-trigger", "sks")
    write_over(page, "field-optim-lr", "0.002")
    write_over(page, "field-data-resolution", "96")
    settled(page)
    choose_sdxl(page)
    page.locator(
        "#left", has_text="Left behind, as they belong to the former preset: Learning rate, Resolution"
    ).wait_for()
    assert value(page, "data-resolution") == "1024"
    assert (value(page, "data-path"), value(page, "data-trigger")) == (str(folder), "sks")
    assert values(draft) == {"data.path": str(folder), "data.trigger": "sks"}
    page.locator("#left").get_by_text("Undo").click()
    reads(page, "optim-lr", "0.002")
    assert page.locator("#page-new").get_attribute("data-preset") == "quickstart"


@pytest.mark.slow
def test_held_out_images_go_with_their_folder_and_come_back_below_the_new_one(page: Page, runs: Path, draft: Path):
    folders = [make_pictures(runs.parent / f"of-{name}", count=2) for name in ("first", "held", "second")]
    first, held, second = map(str, folders)
    for field, typed in (("data-path", first), ("data-validation", held), ("data-path", second)):
        write_over(page, f"field-{field}", typed)
        page.keyboard.press("Enter")
        settled(page)
    assert "data.validation" not in values(draft)
    left = page.locator("#left-images")
    left.get_by_text("Left behind, as it belongs to the former images: Held out.").wait_for()
    left.get_by_role("button", name="Undo").click()
    reads(page, "data-validation", held)
    left.get_by_role("button").wait_for(state="detached")
    assert values(draft) == {"data.path": second, "data.validation": held}


@pytest.mark.slow
def test_a_path_is_glanced_at_while_it_is_typed_and_read_when_the_field_is_left(page: Page, runs: Path):
    folder = make_pictures(runs.parent / "typed", count=3)
    (folder / "broken.png").write_bytes(b"no image")
    write_over(page, "field-data-path", str(folder))
    page.locator("#row-field-data-path .help", has_text="4 images, 3 with a caption").wait_for()
    page.locator("#why", has_text="The folder is read when you leave its field.").wait_for()
    page.keyboard.press("Tab")
    page.locator("#why", has_text="broken.png").wait_for()
    (folder / "broken.png").unlink()
    page.locator("#field-data-path").click()
    page.keyboard.type("x")
    page.keyboard.press("Backspace")  # as it was: the browser knows of no change
    page.locator("#field-name").click()
    settled(page)
    until(page, "!document.querySelector('#why').textContent.includes('when you leave')")


@pytest.mark.slow
def test_a_folder_is_chosen_from_a_list(page: Page, runs: Path):
    folder = make_pictures(runs.parent / "listed", count=2)
    write_over(page, "field-data-path", str(runs.parent))
    page.locator("#browse").click()
    page.locator("#picker").get_by_role("button", name="listed", exact=True).click()
    page.locator("#picker", has_text="2 images, 2 with a caption").wait_for()
    page.locator("#picker").get_by_text("Take this folder").click()
    page.locator("#data-tag", has_text="2 pictures").wait_for()
    assert value(page, "data-path") == str(folder)


def test_a_reload_keeps_the_place_and_the_draft_which_every_window_shows(page: Page, browser: Browser, server: Server):
    write_over(page, "field-train-steps", "123")
    page.locator("#changes", has_text="123").wait_for()
    page.evaluate("location.hash = '#/new'")
    reload(page)
    assert page.url.endswith("#/new")
    page.locator("#changes", has_text="123").wait_for()
    with opened(browser, server.url) as other:
        other.locator("#changes", has_text="123").wait_for()
        assert "train.steps=123" in (other.locator("#commands").text_content() or "")
        write_over(page, "field-name", "mine")
        write_over(other, "field-train-steps", "66")
        reads(page, "train-steps", "66")
        reads(other, "name", "mine")


@pytest.mark.slow
def test_wrong_yaml_is_marked_at_its_line_and_stays_and_right_yaml_becomes_the_form(page: Page):
    page.locator("#yaml-drawer summary").click()
    wrong = "model: {family: flux2, path: demo}\ndata: {path: quickstart}\ntrain:\n  stepz: 77\n"
    page.locator("#yaml").fill(wrong)
    page.locator("#apply-yaml").click()
    page.locator(
        "#yaml-wrong li", has_text="Line 4: train.stepz: unknown field; did you mean 'train.steps'?"
    ).wait_for()
    assert page.locator("#yaml-lines .wrong").all_inner_texts() == ["4"]
    write_over(page, "field-name", "other")  # another answer takes neither the text nor its marks away
    page.locator("#changes", has_text="other").wait_for()
    assert page.locator("#yaml").input_value() == wrong
    assert page.locator("#yaml-lines .wrong").all_inner_texts() == ["4"]
    page.locator("#yaml").fill(wrong.replace("stepz", "steps"))
    page.locator("#apply-yaml").click()
    page.locator("#yaml-wrong", has_text="The form was changed after this text was begun").wait_for()
    page.locator("#apply-yaml").click()
    reads(page, "train-steps", "77")
    assert page.locator("#yaml-wrong li").count() == 0
    assert "steps: 77" in page.locator("#yaml").input_value()
    page.locator("#yaml").fill("a: b")
    page.locator("#discard-yaml").click()
    assert "steps: 77" in page.locator("#yaml").input_value()


def test_a_preset_can_be_saved_and_unfolds_nothing(page: Page, runs: Path):
    write_over(page, "field-train-steps", "55")
    page.locator("#changes", has_text="55").wait_for()
    shown = page.locator(".field:visible").count()
    page.locator("#save-preset").click()
    page.locator("#preset-name").fill("mine")
    page.keyboard.press("Enter")
    page.locator("#toasts", has_text="Saved as").wait_for()
    assert "steps: 55" in (runs / "presets" / "mine.yaml").read_text()
    assert page.locator(".field:visible").count() == shown
    (runs / "presets" / "mine.yaml").unlink()


@pytest.mark.slow
def test_what_is_typed_while_a_preset_is_under_way_is_an_edit_of_the_new_one(page: Page, draft: Path):
    with held_back(page, "new_preset") as held:
        page.locator("#model-filter button", has_text="All").click()
        page.locator("#tiles [data-model*='stable-diffusion-xl']").first.click()
        until_so(page, lambda: bool(held))
        write_over(page, "field-train-steps", "57")
        page.wait_for_timeout(400)
        assert value(page, "train-steps") == "57"
    settled(page)
    until_so(page, lambda: values(draft) == {"train.steps": 57})
    assert value(page, "train-steps") == "57"
    assert page.locator("#page-new").get_attribute("data-preset") != "quickstart"


@pytest.mark.slow
def test_an_old_answer_that_arrives_late_does_not_undo_what_was_typed(page: Page, draft: Path):
    with held_back(page, "new_state") as held:
        ask_again(page)
        until_so(page, lambda: bool(held))
        old = held.pop(0)
        answer = old.fetch()
        write_over(page, "field-train-steps", "58")
        settled(page)
        old.fulfill(response=answer)
        page.wait_for_timeout(300)
        assert (value(page, "train-steps"), values(draft)) == ("58", {"train.steps": 58})


def test_on_a_phone_start_says_why_it_waits_and_nothing_is_wider_than_the_window(
    tab: Page, server: Server, draft: Path
):
    with visited(tab, server.url, width=390, height=844) as page:
        write_over(page, "field-train-steps", "many")
        page.locator("#phone-note", has_text="waits for 1").wait_for()
        page.evaluate("scrollTo(0, 0)")
        page.locator(".phone button").click()
        until(page, "(b => b.top >= 0 && b.top < innerHeight)(document.querySelector('#why').getBoundingClientRect())")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.set_viewport_size({"width": 640, "height": 450})  # 1280 x 900 at 200 %
        assert page.evaluate("document.documentElement.scrollWidth") <= 640


def test_with_the_keyboard_alone_a_field_is_changed_and_start_is_reached(page: Page):
    page.evaluate("document.querySelector('#field-optim-lr').focus()")
    page.keyboard.press("Control+a")
    page.keyboard.type("0.002")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "start":
            break
    assert page.evaluate("document.activeElement.id") == "start"
    settled(page)
    assert value(page, "optim-lr") == "0.002"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"


def test_a_port_that_is_taken_is_named(server: Server, tmp_path: Path):
    argv = [sys.executable, "launch.py", "--runs", str(tmp_path), "--port", str(server.port)]
    answer = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 2
    said = f"--port {server.port}: cannot be used on 127.0.0.1 (Address already in use); name another\n"
    assert answer.stderr == said


@pytest.mark.slow
def test_an_error_leads_to_its_row_also_when_the_search_hides_it(page: Page):
    page.locator("#search").fill("warm-up")
    page.locator("#field-optim-warmup").wait_for()
    write_over(page, "field-optim-warmup", "many")
    page.locator("#search").fill("restarts")
    page.locator("#why a", has_text="Warm-up").click()
    assert page.evaluate("document.activeElement.id") == "field-optim-warmup"
    assert page.locator("#field-optim-warmup").is_visible()
    page.locator("#group-training summary").click()
    page.locator("#field-optim-warmup").wait_for(state="hidden")
    page.locator("#why a", has_text="Warm-up").click()
    assert page.evaluate("document.activeElement.id") == "field-optim-warmup"
    write_over(page, "field-optim-warmup", "10")


@pytest.mark.slow
def test_a_setting_is_found_by_the_words_of_newcomers_and_of_other_programs(page: Page):
    for words, field in {
        "VRAM": "train-checkpointing",
        "gradient accumulation": "train-micro_batch",
        "multi-gpu": "parallel-strategy",
        "4-bit": "quantize-format",
        "cfg": "sample-guidance",
        "target modules": "adapter-targets",
        "fp16": "train-precision",
        "buckets": "data-max_aspect",
    }.items():
        page.locator("#search").fill(words)
        page.locator(f"#field-{field}").wait_for()
    page.locator("#search").fill("epochs")
    page.locator("#found-above a", has_text="Steps").click()
    assert page.evaluate("document.activeElement.id") == "field-train-steps"
    page.locator("#search").fill("")
    page.locator("#found-above a").wait_for(state="hidden")


@pytest.mark.slow
def test_a_language_model_trains_texts_also_before_its_folder_is_there(page: Page):
    page.locator("#model-filter button", has_text="All").click()
    page.locator("#tiles [data-model='Qwen/Qwen3-8B']").click()
    page.locator("#data-title", has_text="Texts").wait_for()
    settled(page)
    write_over(page, "field-data-path", "")
    page.locator("#row-field-data-path .help", has_text="image").wait_for(state="hidden")


def test_the_panel_with_start_stays_in_sight(page: Page):
    page.mouse.move(500, 500)
    page.mouse.wheel(0, 900)
    until(
        page,
        "scrollY > 500 && Math.abs(document.querySelector('#page-new .side').getBoundingClientRect().top - 16) < 2",
    )


@pytest.mark.slow
def test_a_wrong_line_of_the_yaml_is_brought_into_sight_and_each_is_a_link(page: Page):
    page.locator("#yaml-drawer summary").click()
    text = page.locator("#yaml").input_value().replace("  steps: 100", "  steps: many").replace("  keep: 3", "  kep: 3")
    page.locator("#yaml").fill(text)
    page.locator("#apply-yaml").click()
    page.locator("#yaml-wrong li").first.wait_for()
    lines = [number for number, line in enumerate(text.splitlines(), 1) if "many" in line or "kep" in line]
    assert page.locator("#yaml-wrong a").all_inner_texts() == [f"Line {number}" for number in lines]
    seen = """() => { const frame = document.querySelector('#yaml-lines').getBoundingClientRect();
        return [...document.querySelectorAll('#yaml-lines .wrong')].map(line => {
          const at = line.getBoundingClientRect(); return at.top >= frame.top && at.bottom <= frame.bottom; }); }"""
    assert page.evaluate(seen)[0]
    page.locator("#yaml-wrong a").last.click()
    assert page.evaluate(seen)[-1]
    caret = page.evaluate("document.querySelector('#yaml').selectionStart")
    assert text[:caret].count("\n") + 1 == lines[-1]
    page.locator("#discard-yaml").click()


@pytest.mark.slow
def test_the_keyboard_keeps_its_place_when_a_model_a_preset_or_a_method_is_chosen(page: Page):
    page.locator("#tiles .tile").nth(1).wait_for()
    focused = "JSON.stringify({ ...document.activeElement.dataset, value: document.activeElement.value || '' })"
    for place in ("#tiles [data-model*='FLUX.2-dev']", "#presets [data-preset='flux2-dev-lora-4gpu']"):
        page.locator(place).focus()
        page.keyboard.press("Enter")
        page.locator(f"{place}.on").wait_for()
        settled(page)
        assert page.locator(f"{place}:focus").count() == 1, page.evaluate(focused)
    page.locator("#methods input:checked").focus()
    for method in ("locon", "dora"):
        page.keyboard.press("ArrowDown")
        page.locator(f"#methods .on input[value='{method}']").wait_for()
        settled(page)
        assert page.locator(f"#methods input[value='{method}']:focus").count() == 1, page.evaluate(focused)
    page.locator("#model-filter button", has_text="All").focus()
    page.keyboard.press("Enter")
    assert page.locator("#model-filter button:focus").inner_text().startswith("All")
    page.locator("#tiles [data-model='demo']").first.click()
    until(page, "document.querySelector('#page-new').dataset.preset === 'quickstart'")


class Counted:
    """A person at the page whose clicks and texts are counted."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.num_clicks = 0
        self.num_texts = 0

    def click(self, selector: str) -> None:
        self.num_clicks += 1
        self.page.locator(selector).click()

    def write(self, selector: str, text: str) -> None:
        self.num_clicks += 1
        self.num_texts += 1
        self.page.locator(selector).click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.type(text)


def test_until_the_models_are_known_their_card_has_empty_tiles(page: Page):
    with held_back(page, "new_models"):
        page.reload()
        page.locator("#tiles .skeleton").first.wait_for()
        assert page.locator("#tiles .tile").count() == 0
    page.locator("#tiles .tile").first.wait_for()
    assert page.locator("#tiles .skeleton").count() == 0


def test_images_without_captions_are_written_captioned_or_trained_without_by_one_click(page: Page, runs: Path):
    images = make_pictures(runs.parent / "bare", count=5)
    for file in images.glob("*.txt"):
        file.unlink()
    write_over(page, "field-data-path", str(images))
    page.keyboard.press("Tab")
    why = page.locator("#why")
    why.locator("li", has_text="5 of 5 images have no caption").wait_for()
    assert why.locator("li").count() == 1 and page.locator("#data-facts .notice.bad").count() == 0
    why.get_by_role("link", name="Write them").click()
    page.locator("#grid textarea").first.wait_for()
    until(page, "document.activeElement === document.querySelector('#grid textarea')")
    assert page.locator("#shows [data-show=uncaptioned]").get_attribute("aria-pressed") == "true"
    page.go_back()
    why.get_by_role("link", name="Caption with a model").click()
    until(page, "document.activeElement.id === 'caption-model'")
    page.go_back()
    why.get_by_role("button", name="Train without").click()
    until(page, "document.querySelector('#why').dataset.state === 'ready'")
    assert page.locator("#proposals li").count() == 3
    kept = page.locator(
        "#warnings p", has_text="the preset's words: name quickstart, trigger word risograph, sample prompts."
    )
    kept.get_by_role("button", name="Take those that fit them").click()
    page.locator("#proposals").wait_for(state="hidden")
    assert (value(page, "name"), value(page, "data-trigger")) == ("bare", "bare")
    assert value(page, "sample-prompts") == "[trigger]"
    kept.wait_for(state="detached")


def test_own_images_on_another_model_take_four_clicks_and_two_texts(page: Page, runs: Path):
    images = make_pictures(runs.parent / "mine")
    preset = write_preset(runs / "presets" / "other.yaml", runs.parent / "none", steps=2)
    text = preset.read_text().replace("family: flux2", "family: flux2, path: tiny")
    text = text.replace("resolution: 64", "resolution: 64, trigger: TOK")
    preset.write_text(f"{text}sample: {{prompts: ['[trigger]'], every: 0}}\n")
    page.reload()
    settled(page)
    person = Counted(page)
    page.locator("#model-filter button").last.click()  # to see it: the list of a person with a real model has it
    person.click("[data-model=tiny]")
    until(page, "document.querySelector('#page-new').dataset.preset === 'other'")
    settled(page)
    person.write("#field-data-path", str(images))
    person.write("#field-data-trigger", "fox")
    page.keyboard.press("Tab")
    until(page, "document.querySelector('#why').dataset.state === 'ready'")
    name, start = (page.locator(f"#card-start {part}").bounding_box() for part in ("#field-name", "#start"))
    assert name and start and name["y"] < start["y"] and name["width"] >= 200
    assert not page.locator("#start").is_disabled()
    person.num_clicks += 1  # Start itself, which test_browser_all_the_way presses
    assert (person.num_clicks, person.num_texts) == (4, 2)
    preset.unlink()


def test_a_config_of_another_trainer_is_dropped_onto_the_form_and_taken_back(page: Page, draft: Path):
    foreign = ROOT / "tests" / "config" / "foreign"
    names = ("onetrainer.json", "onetrainer-concepts.json")
    files = {name: (foreign / name).read_text() for name in names}
    write_over(page, "field-name", "former")
    settled(page)
    page.evaluate(
        """files => {
          const transfer = new DataTransfer();
          for (const [name, text] of Object.entries(files)) transfer.items.add(new File([text], name));
          document.querySelector('#page-new').dispatchEvent(
            new DragEvent('drop', { dataTransfer: transfer, bubbles: true, cancelable: true }));
        }""",
        files,
    )
    shown = page.locator("#imported")
    shown.get_by_text("From a config of OneTrainer.").wait_for()
    left = shown.locator("[data-list='left out']")
    left.get_by_text("secrets.huggingface_token, secrets.cloud.api_key: a secret").wait_for()
    reads(page, "model-path", "someone/a-photo-model-xl")
    reads(page, "data-path", "/data/harbour")
    assert (value(page, "adapter-rank"), value(page, "optim-lr")) == ("8", "0.0003")
    assert "aSecret" not in page.content() + draft.read_text()

    shown.get_by_role("button", name="Undo").click()
    reads(page, "name", "former")
    until_so(page, lambda: values(draft) == {"name": "former"})

    page.locator("#import-input").set_input_files([foreign / "kohya-dataset.toml"])
    page.locator("#outcome", has_text="is imported together with the config that names it").wait_for()
    page.locator("#search").fill("network_dim")
    page.locator("#found-above", has_text="Rank").wait_for()
    page.locator("#search").fill("noise_offset")
    page.locator("#no-match", has_text="noise_offset: noise is drawn as the model was trained").wait_for()


@pytest.mark.slow
def test_more_folders_and_prior_images_are_rows_with_settings_and_each_says_what_is_wrong(
    page: Page, browser: Browser, server: Server, runs: Path, draft: Path
):
    more, prior = (make_pictures(runs.parent / name, count=2) for name in ("more", "prior"))
    summary = page.locator("#more-folders > summary")
    summary.click()
    page.locator("#add-folder").click()
    first = page.locator("#folders .entry").first
    first.locator("[data-key=path]").fill(str(more))
    first.locator("[data-key=weight]").fill("0")
    page.locator("#folders-error", has_text="1, weight: is 0, must be > 0 and <= 1000").wait_for()
    page.locator("#why").get_by_role("link", name="More folders").click()
    first.locator("[data-key=weight]").fill("2.5")
    first.locator("summary").click()
    first.locator("[data-key=resolutions]").fill("32, 48")
    first.locator("[data-key=flip]").select_option("yes")
    write_over(page, "field-data-regularization", str(prior))
    page.locator("#field-name").click()
    settled(page)
    expected = {"path": str(more), "weight": 2.5, "resolutions": [32, 48], "flip": True}
    assert values(draft) == {"data.folders": [expected], "data.regularization": str(prior)}
    page.locator("#num-folders", has_text="1 more folder, prior images").wait_for()
    with opened(browser, server.url) as other:  # its details are open, as they hold something
        other.locator("#folders [data-key=resolutions]").wait_for()
        assert other.locator("#folders [data-key=weight]").input_value() == "2.5"
        other.locator("#folders [data-remove]").click()
        settled(other)
    until(page, "!document.querySelector('#folders .entry')")
    assert "data.folders" not in values(draft)


def test_pictures_that_are_dropped_on_new_run_ask_for_their_word(page: Page):
    page.evaluate(
        """() => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([new Uint8Array(9)], 'a.png'));
          document.querySelector('#page-new h1').dispatchEvent(
            new DragEvent('drop', { bubbles: true, cancelable: true, dataTransfer: transfer }));
        }"""
    )
    page.locator("#drop-first-note", has_text="1 file chosen").wait_for()
    page.locator("#drop-demo a").click()
    page.locator("#page-new h1").wait_for()
