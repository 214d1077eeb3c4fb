"""The dialogs about a run's result in Chromium: a drawing and a film by real processes, an upload to a local hub."""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat
from playwright.sync_api import Browser, Locator, Page

from app.data.upload.given_references import MOST_SENT
from tests.app.browser import (
    TRAINED_WITHIN_S,
    Server,
    opened,
    recorded,
    serving,
    state_is,
    until,
    until_so,
    visit,
    watch,
)
from tests.launcher.hub import TOKEN, Hub, Repository
from tests.launcher.hub import serving as serving_hub
from tests.runs import make_pictures, run_config
from trainer.launcher import torchrun
from trainer.run.drawings import drawings
from trainer.run.folder import RunDir

pytestmark = pytest.mark.slow
DRAWN_WITHIN_MS = TRAINED_WITHIN_S * 1e3


@dataclass
class Site:
    """A page with a run of the demo model that has ended, the hub it uploads to, and where its login is."""

    server: Server
    hub: Hub
    run: RunDir
    home: Path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("results")
    runs, home = folder / "runs", folder / "home"
    home.mkdir()
    config = run_config(
        make_pictures(folder / "pictures", count=4),
        name="fox",
        model={"family": "flux2", "path": "demo"},
        train__steps=2,
        checkpoint__every=1,
        sample={"prompts": ["fox face", "bicycle"], "size": [64, 64], "steps": 2, "every": 2},
    )
    handle = torchrun.start(config, RunDir.create(runs, config, at=runs / "fox"))
    assert handle.process.wait(TRAINED_WITHIN_S) == 0
    with serving_hub() as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_HOME": str(home), "HF_TOKEN": ""}
        with serving(runs, environment=environment) as server:
            yield Site(server, hub, handle.run, home)


@pytest.fixture
def site(shared: Site) -> Site:
    """Ada is logged in, the hub has nothing, and the run has no film."""
    shutil.rmtree(shared.run.film, ignore_errors=True)
    (shared.home / "token").write_text(TOKEN)
    shared.hub.repositories.clear()
    shared.hub.held, shared.hub.refuses_commits = None, False
    return shared


@pytest.fixture
def page(browser: Browser, site: Site) -> Iterator[Page]:
    with opened(browser, site.server.url) as page:
        watch(page, site.run.path.name)
        state_is(page, "finished")
        yield page


def open_dialog(page: Page, kind: str) -> Locator:
    page.locator(f"#{kind}").click()
    return page.locator(f"#{kind}-dialog")


# "Draw with it"


@pytest.fixture(scope="module")
def edit(shared: Site, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run whose prompts change an image: a red one and a green one."""
    folder = tmp_path_factory.mktemp("edit")
    pictures = make_pictures(folder / "pictures", count=2)
    for number, file in enumerate(sorted(pictures.glob("*.png"))):
        (folder / "before").mkdir(exist_ok=True)
        Image.new("RGB", (96, 64), ("red", "green")[number]).save(folder / "before" / file.name)
    config = run_config(
        pictures,
        name="edit",
        model={"family": "flux2", "path": "demo"},
        data__references=str(folder / "before"),
        train__steps=1,
        sample={
            "prompts": ["as a fox", "as a cat"],
            "references": [str(file) for file in sorted((folder / "before").glob("*.png"))],
            **{"size": [64, 64], "steps": 2, "every": 1},
        },
    )
    handle = torchrun.start(config, RunDir.create(shared.server.runs, config, at=shared.server.runs / "edit"))
    assert handle.process.wait(TRAINED_WITHIN_S) == 0
    shutil.rmtree(folder / "before")  # what is shown is the run's own
    return handle.run


def test_a_drawing_is_given_the_references_of_the_samples_or_a_file(
    page: Page, site: Site, edit: RunDir, tmp_path: Path
):
    watch(page, edit.path.name)
    state_is(page, "finished")
    dialog = open_dialog(page, "draw")
    dialog.locator("#draw:enabled").wait_for()
    boxes = dialog.locator("#draw-references input[type=checkbox]")
    assert boxes.evaluate_all("all => all.map(one => one.checked)") == [True, False]
    text = tmp_path / "notes.png"
    text.write_text("no image")
    dialog.locator("#draw-reference").set_input_files(text)
    dialog.get_by_role("alert").filter(has_text="reference: cannot be read (not an image of a known format)").wait_for()
    large = tmp_path / "blue.png"  # more bytes than are sent: it is scaled down by the browser
    Image.frombytes("RGB", (1200, 1200), random.Random(0).randbytes(1200 * 1200 * 3)).save(large)
    assert large.stat().st_size > MOST_SENT
    dialog.locator("#draw-reference").set_input_files(large)
    until_so(page, lambda: boxes.count() == 3)
    assert dialog.get_by_role("alert").count() == 0
    boxes.nth(0).uncheck()
    boxes.nth(1).check()
    dialog.locator("#draw-prompt").fill("as a dog")
    dialog.locator("#draw").click()
    first = dialog.locator("#drawings li", has_text="as a dog").first
    first.get_by_alt_text("with, step 1: as a dog", exact=True).wait_for(timeout=DRAWN_WITHIN_MS)
    shown = first.get_by_alt_text("reference", exact=True)
    until_so(page, lambda: shown.evaluate_all("all => all.map(one => one.naturalWidth)") == [96, 256])
    dialog.locator("#draw:enabled").wait_for(timeout=DRAWN_WITHIN_MS)
    made = next(drawings(edit))
    with Image.open(edit.path / made.references[0]) as image:
        assert image.convert("RGB").getpixel((5, 5)) == (0, 128, 0)
    for box in (1, 2):
        boxes.nth(box).uncheck()
    dialog.locator("#draw").click()
    until_so(page, lambda: len(list(drawings(edit))) == 2)
    assert next(drawings(edit)).references == ()
    dialog.locator("#draw:enabled").wait_for(timeout=DRAWN_WITHIN_MS)


def test_a_drawing_is_given_a_pair_that_is_held_out(page: Page, site: Site, tmp_path: Path):
    for name, colour in (("target", "gray"), ("before", "purple")):
        make_pictures(tmp_path / name, count=3)
        Image.new("RGB", (96, 64), colour).save(tmp_path / name / "02.png")
    fields = {"validation": 1, "references": str(tmp_path / "before"), "path": str(tmp_path / "target")}
    run = recorded(site.server.runs, "pairs", **{f"data__{field}": value for field, value in fields.items()})
    page.evaluate(f"location.hash = '#/runs/{run.path.name}'")
    state_is(page, "finished")
    dialog = open_dialog(page, "draw")
    dialog.locator("#draw:enabled").wait_for()
    dialog.locator("#draw-held-out summary").click()
    pair = dialog.locator("#draw-held-out button")
    pair.click()
    until_so(page, lambda: dialog.locator("#draw-prompt").input_value() == pair.get_attribute("title"))
    chosen = dialog.locator("#draw-references input:checked")
    assert chosen.count() == 1 and Path(chosen.input_value()).parent == tmp_path / "before"
    pair.click()
    assert chosen.count() == 1, "it is not given twice"


def test_samples_are_shown_with_what_went_in(page: Page, edit: RunDir):
    page.evaluate(f"location.hash = '#/runs/{edit.path.name}/samples'")
    shown = page.locator("#samples-rows .sample-row .references img")
    until_so(page, lambda: shown.evaluate_all("all => all.map(one => one.naturalWidth)") == [96, 96])
    captions = page.locator("#samples-rows .references figcaption").all_inner_texts()
    assert captions == ["reference", "reference"]
    page.locator("#samples-view button[data-view=pair]").click()
    pair = page.locator("#samples-pair .references img")
    until_so(page, lambda: pair.evaluate_all("all => all.map(one => one.naturalWidth)") == [96])
    first = pair.get_attribute("src")
    page.locator("#samples-pair .prompts button").nth(1).click()
    until_so(page, lambda: pair.get_attribute("src") != first)


def start_drawing(page: Page, prompt: str, **fields: str) -> Locator:
    dialog = open_dialog(page, "draw")
    prompts = dialog.locator("#draw-prompt")
    until_so(page, lambda: dialog.locator("#draw").is_enabled())
    prompts.fill(prompt)
    for name, text in fields.items():
        dialog.locator(f"#draw-{name}").fill(text)
    dialog.locator("#draw").click()
    return dialog


def test_a_prompt_is_drawn_with_and_without_what_was_trained(page: Page, site: Site):
    dialog = open_dialog(page, "draw")
    until_so(page, lambda: dialog.locator("#draw-prompt").input_value() == "fox face")
    assert dialog.locator("#draw-seed").get_attribute("placeholder") == "0"
    assert dialog.locator("#draw-size").get_attribute("placeholder") == "64 x 64"
    before = len(list(drawings(site.run)))
    dialog.locator("#draw-prompt").fill("a red house")
    dialog.locator("#draw-seed").fill("7")
    dialog.locator("#draw-size").fill("96 x 64")
    dialog.locator("#draw").dblclick()  # two clicks draw once
    dialog.locator("#draw-state", has_text="Drawing:").wait_for()
    first = dialog.locator("#drawings li").first
    first.get_by_text("seed 7").wait_for(timeout=DRAWN_WITHIN_MS)
    assert "a red house" in first.inner_text()
    for side in ("without", "with, step 2"):
        image = first.get_by_alt_text(f"{side}: a red house", exact=True)
        until_so(page, lambda image=image: image.evaluate("image => image.naturalWidth") == 96)
    assert dialog.get_by_role("alert").count() == 0
    until_so(page, lambda: dialog.locator("#draw-state").inner_text() == "")
    made = list(drawings(site.run))
    assert len(made) == before + 1
    assert (made[0].seed, made[0].size) == (7, (96, 64))


def open_checkpoint(page: Page, site: Site, step: int, use: str) -> None:
    """Press one of the buttons of a checkpoint's row."""
    visit(page, "runs", site.run.path.name, "files")
    page.locator(f"#files-checkpoints tr[data-checkpoint$='{step:06}'] .use-{use}").click()


def test_prompts_are_drawn_with_two_checkpoints_at_two_strengths(page: Page, site: Site):
    open_checkpoint(page, site, 1, "compare")
    dialog = page.locator("#draw-dialog")
    dialog.locator("#draw:enabled").wait_for()
    boxes = dialog.locator("#draw-checkpoints label")
    assert boxes.all_inner_texts() == ["step 2, newest", "step 1"]
    assert dialog.locator("#draw-checkpoints input:checked").count() == 2
    dialog.locator("#draw-prompt").fill("a green house\n\na blue house")
    dialog.locator("#draw-strength").fill("half")
    dialog.locator("#draw").click()
    dialog.get_by_role("alert").filter(has_text="Strength: write whole per cents").wait_for()
    dialog.locator("#draw-strength").fill("150 %, 50")
    dialog.locator("#draw").click()
    dialog.locator("#draw-state", has_text=re.compile(r"Drawing: \d+ % done")).wait_for(timeout=DRAWN_WITHIN_MS)
    dialog.locator("#draw:enabled").wait_for(timeout=DRAWN_WITHIN_MS)
    first = dialog.locator("#drawings li", has_text="a blue house").first
    captions = first.locator("figcaption")
    assert captions.all_inner_texts() == [
        *("without", "step 1, 50 %", "step 1, 150 %"),
        *("without", "step 2, 50 %", "step 2, 150 %"),
    ]
    until_so(page, lambda: first.locator("img").evaluate_all("all => all.every(image => image.naturalWidth === 64)"))
    assert dialog.locator("#drawings li", has_text="a green house").count() == 1


def test_an_older_checkpoint_is_exported_beside_the_run_own_export(page: Page, site: Site):
    open_checkpoint(page, site, 1, "export")
    page.locator("#files-state", has_text="Exported step 1, and verified.").wait_for(timeout=DRAWN_WITHIN_MS)
    row = page.locator("#files-exported tr", has_text="fox-step1.safetensors")
    row.get_by_text("step 1", exact=False).first.wait_for()
    assert page.locator("#files-exported tr", has_text="fox.safetensors").count() == 1
    watch(page, site.run.path.name)
    page.locator("#other-exports", has_text="fox-step1.safetensors").wait_for()
    assert "fox.safetensors" in page.locator("#run-done b").first.inner_text()
    (site.run.export / "fox-step1.safetensors").unlink()


def test_another_run_goes_on_from_an_older_checkpoint(page: Page, site: Site):
    open_checkpoint(page, site, 1, "continue")
    dialog = page.locator("#branch-dialog")
    assert dialog.locator("#branch-steps").input_value() == "2"
    dialog.locator("#branch-lr").fill("fast")
    dialog.locator("#branch").click()
    dialog.get_by_role("alert").filter(has_text="optim.lr").wait_for()
    dialog.locator("#branch-lr").fill("5e-5")
    dialog.locator("#branch-steps").fill("3")
    dialog.locator("#branch").click()
    until(page, "location.hash.split('/')[2] !== 'fox'")
    new = RunDir.open(site.server.runs / page.evaluate("location.hash.split('/')[2]"))
    until(page, f"document.querySelector('#run').dataset.run === '{new.path.name}'")
    state_is(page, "finished", timeout_s=TRAINED_WITHIN_S)
    config = new.config()
    assert (config.optim.lr, config.train.steps, config.name) == (5e-5, 3, "fox")
    assert page.locator("#run").get_attribute("data-step") == "3"


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"prompt": "  "}, "prompt: empty"),
        ({"prompt": "a cat", "seed": "-1"}, "Seed: write a whole number"),
        ({"prompt": "a cat", "seed": "99999999999"}, "less than or equal to 2147483647"),
        ({"prompt": "a cat", "size": "wide"}, "Size: write width x height in pixels"),
        ({"prompt": "a cat", "size": "65 x 64"}, "is not in multiples of"),
        ({"prompt": "a cat", "size": "0 x 64"}, "size"),
        ({"prompt": "a [trigger] cat"}, "[trigger] stands for data.trigger, which is empty in this run"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_the_dialog_and_can_be_mended(page: Page, fields, refusal):
    dialog = start_drawing(page, **fields)
    dialog.get_by_role("alert").filter(has_text=refusal).wait_for()
    dialog.locator("#draw:enabled").wait_for()
    assert dialog.locator("#draw-prompt").input_value() == fields["prompt"]


def test_a_drawing_is_stopped(page: Page, site: Site):
    before = len(list(drawings(site.run)))
    dialog = start_drawing(page, "a slow house")
    page.locator("#job", has_text="drawing").wait_for()
    dialog.locator("#stop-drawing").click()
    dialog.locator("#draw-state", has_text="The drawing was stopped.").wait_for()
    assert dialog.get_by_role("alert").count() == 0
    until_so(page, lambda: dialog.locator("#draw").is_enabled())
    assert len(list(drawings(site.run))) == before


def test_one_drawing_at_a_time_is_seen_by_every_window_and_goes_on_without_the_dialog(
    browser: Browser, page: Page, site: Site
):
    dialog = start_drawing(page, "one house")
    dialog.locator("#draw-state", has_text="Drawing:").wait_for()
    with opened(browser, site.server.url) as other:
        watch(other, site.run.path.name)
        second = open_dialog(other, "draw")
        second.locator("#draw-state", has_text="Drawing:").wait_for()
        assert second.locator("#draw").is_disabled()
        dialog.get_by_role("button", name="Close").click()
        page.reload()
        state_is(page, "finished")
        again = open_dialog(page, "draw")
        for place in (second, again):
            place.locator("#drawings li", has_text="one house").first.wait_for(timeout=DRAWN_WITHIN_MS)
            place.locator("#draw:enabled").wait_for()


def test_two_windows_that_draw_at_once_say_why_only_one_does(browser: Browser, page: Page, site: Site):
    with opened(browser, site.server.url) as other:
        watch(other, site.run.path.name)
        dialogs = [open_dialog(window, "draw") for window in (page, other)]
        for dialog in dialogs:
            dialog.locator("#draw:enabled").wait_for()
            dialog.locator("#draw-prompt").fill("two houses")
        for window in (page, other):
            window.evaluate("document.querySelector('#draw-dialog #draw').click()")
        until_so(page, lambda: sum(dialog.get_by_role("alert").count() for dialog in dialogs) == 1)
        [refused] = [dialog for dialog in dialogs if dialog.get_by_role("alert").count()]
        assert "another drawing is running; wait until it is done" in refused.inner_text()
        refused.locator("#draw-state", has_text="Drawing:").wait_for()
        refused.locator("#stop-drawing").click()
        for dialog in dialogs:
            dialog.locator("#draw-state", has_text="The drawing was stopped.").wait_for()


def test_the_dialogs_lie_within_a_phones_screen(page: Page):
    page.set_viewport_size({"width": 390, "height": 844})
    for kind in ("draw", "upload"):
        dialog = open_dialog(page, kind)
        box = dialog.bounding_box()
        assert box is not None
        assert box["x"] > 0
        assert box["x"] + box["width"] < 390
        assert dialog.evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth")
        dialog.get_by_role("button", name="Close").click()


def test_weights_that_were_deleted_meanwhile_are_missed_in_words(page: Page, site: Site, tmp_path: Path):
    kept = tmp_path / "kept"
    kept.mkdir()
    try:
        shutil.move(site.run.checkpoints, kept / "checkpoints")
        shutil.move(site.run.export, kept / "export")
        site.run.checkpoints.mkdir()
        site.run.export.mkdir()
        dialog = start_drawing(page, "a house")
        dialog.get_by_role("alert").filter(has_text="and its exported adapter is gone").wait_for()
    finally:
        for name in ("checkpoints", "export"):
            shutil.rmtree(site.run.path / name)
            shutil.move(kept / name, site.run.path / name)


def test_an_exported_file_that_is_damaged_is_named(page: Page, site: Site, tmp_path: Path):
    [file] = site.run.export.glob("*.safetensors")
    content = file.read_bytes()
    shutil.move(site.run.checkpoints, tmp_path / "checkpoints")
    site.run.checkpoints.mkdir()
    try:
        file.write_bytes(content[:100])
        dialog = start_drawing(page, "a house")
        dialog.get_by_role("alert").filter(has_text=file.name).wait_for(timeout=DRAWN_WITHIN_MS)
        assert "Traceback" not in dialog.inner_text()
        file.write_bytes(content)
        dialog.locator("#draw-prompt").fill("a house from the export")
        dialog.locator("#draw").click()
        dialog.locator("#drawings li", has_text="a house from the export").wait_for(timeout=DRAWN_WITHIN_MS)
        assert dialog.get_by_role("alert").count() == 0
    finally:
        file.write_bytes(content)
        site.run.checkpoints.rmdir()
        shutil.move(tmp_path / "checkpoints", site.run.checkpoints)


# "Publish"


def ask(page: Page, repo: str, *, private: bool = True, overwrite: bool = False) -> Locator:
    dialog = open_dialog(page, "upload")
    dialog.locator("#upload-look:enabled").wait_for()
    dialog.locator("#upload-repo").fill(repo)
    dialog.locator("#upload-private").set_checked(private)
    dialog.locator("#upload-overwrites").set_checked(overwrite)
    dialog.locator("#upload-look").click()
    return dialog


def agree(dialog: Locator) -> None:
    dialog.locator("#upload-agree").click()


def fails(dialog: Locator, text: str) -> None:
    dialog.locator("#upload-state [role=alert]", has_text=text).wait_for()
    dialog.locator("#upload-look:enabled").wait_for()


def checksums(contents: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def test_an_upload_is_asked_first_with_its_files_and_its_card_and_what_comes_is_equal(page: Page, site: Site):
    page.locator("#upload").click()
    dialog = page.locator("#upload-dialog")
    assert dialog.locator("#upload-private").is_checked()
    dialog.locator("#upload-repo").fill("ada/fox")
    page.keyboard.press("Enter")
    question = dialog.locator("#upload-question")
    question.get_by_text("to ada/fox, which only you can see:").wait_for()
    card_shown = question.locator("details pre")
    question.locator("summary").click()
    assert "# fox" in card_shown.inner_text()
    assert site.hub.repositories == {}
    card = card_shown.text_content()
    agree(dialog)
    link = dialog.locator("#upload-state").get_by_role("link", name=f"{site.hub.url}/ada/fox")
    link.wait_for()
    assert link.get_attribute("href") == f"{site.hub.url}/ada/fox"
    assert link.get_attribute("target") == "_blank"
    [export] = site.run.export.glob("*.safetensors")
    samples = {f"samples/{file.name}": file.read_bytes() for file in site.run.samples.glob("step-000002-*.png")}
    assert len(samples) == 2
    repository = site.hub.repositories["ada/fox"]
    assert repository.private
    expected = {export.name: export.read_bytes(), "README.md": (card or "").encode(), **samples}
    assert checksums(repository.files) == checksums(expected)
    dialog.get_by_role("button", name="Close").click()
    again = open_dialog(page, "upload")
    again.get_by_role("link", name=f"{site.hub.url}/ada/fox").wait_for()


def test_a_public_upload_says_who_sees_it_and_a_change_takes_the_question_back(page: Page, site: Site):
    dialog = ask(page, "ada/public", private=False)
    dialog.get_by_text("which everyone can see:").wait_for()
    dialog.locator("#upload-private").check()
    dialog.locator("#upload-agree").wait_for(state="hidden")
    assert dialog.locator("#upload-question").inner_text() == ""
    dialog.locator("#upload-private").uncheck()
    dialog.locator("#upload-look").click()
    agree(dialog)
    dialog.get_by_role("link", name="/ada/public").wait_for()
    assert not site.hub.repositories["ada/public"].private


def test_an_answer_about_what_was_typed_before_is_not_agreed_to(page: Page, site: Site):
    dialog = open_dialog(page, "upload")
    dialog.locator("#upload-look:enabled").wait_for()
    dialog.locator("#upload-repo").fill("ada/first")
    page.evaluate(
        "() => { document.querySelector('#upload-look').click(); const repo = document.querySelector('#upload-repo');"
        " repo.value = 'ada/second'; repo.dispatchEvent(new Event('input')); }"
    )
    dialog.locator("#upload-look:enabled").wait_for()
    page.wait_for_timeout(500)
    assert dialog.locator("#upload-agree").is_hidden()
    assert dialog.locator("#upload-question").inner_text() == ""


def test_what_the_hub_refuses_is_said(page: Page, site: Site):
    dialog = ask(page, "bob/fox")
    agree(dialog)
    fails(dialog, "bob/fox: you may not write there (You don't have the rights to create a model under this namespace)")
    site.hub.repositories["ada/held"] = Repository(files={"README.md": b"precious"})
    dialog.locator("#upload-repo").fill("ada/held")
    dialog.locator("#upload-private").uncheck()
    dialog.locator("#upload-look").click()
    agree(dialog)
    fails(dialog, "ada/held: exists and has 1 files, first README.md; choose another name, or")
    dialog.locator("#upload-overwrites").check()
    dialog.locator("#upload-look").click()
    site.hub.refuses_commits = True
    agree(dialog)
    fails(dialog, "Private repository storage limit reached")
    assert site.hub.repositories["ada/held"].files == {"README.md": b"precious"}
    site.hub.refuses_commits = False
    dialog.locator("#upload-look").click()
    agree(dialog)
    dialog.get_by_role("link", name="/ada/held").wait_for()
    assert site.hub.repositories["ada/held"].files["README.md"] != b"precious"


def test_an_upload_is_stopped_and_others_wait_for_it(browser: Browser, page: Page, site: Site):
    site.hub.held = threading.Event()
    dialog = ask(page, "ada/slow")
    agree(dialog)
    dialog.locator("#upload-state", has_text="Publishing").wait_for()
    with opened(browser, site.server.url) as other:
        watch(other, site.run.path.name)
        second = open_dialog(other, "upload")
        second.locator("#upload-state", has_text="Publishing").wait_for()
        assert second.locator("#upload-look").is_disabled()
        dialog.locator("#stop-upload").click()
        for place in (dialog, second):
            place.locator("#upload-state", has_text="The upload was stopped.").wait_for()
            place.locator("#upload-look:enabled").wait_for()
    site.hub.held.set()
    assert all(not repository.files for repository in site.hub.repositories.values())


# "Film"


def film_dialog(page: Page, site: Site, tab: str) -> Locator:
    """Press the button of a tab, and wait until all pictures of the film are there."""
    visit(page, "runs", site.run.path.name, tab)
    page.locator(f"#{tab}-film").click()
    dialog = page.locator("#film-dialog")
    dialog.locator("img.loop").nth(1).wait_for(timeout=DRAWN_WITHIN_MS)
    loaded = "all => all.length === 4 && all.every(image => image.naturalWidth > 400)"
    until_so(page, lambda: dialog.locator("#films img").evaluate_all(loaded))
    return dialog


def test_one_press_makes_the_film_which_plays_and_is_downloaded(page: Page, site: Site):
    dialog = film_dialog(page, site, "samples")
    loop = dialog.locator("img.loop").first
    first = loop.screenshot()
    until_so(page, lambda: loop.screenshot() != first)
    with page.expect_download() as waiting:
        dialog.get_by_role("link", name="Loop, WebP").first.click()
    assert waiting.value.suggested_filename == "fox-prompt-1.webp"
    with Image.open(waiting.value.path()) as film:
        assert film.n_frames == 2
        for at, step in enumerate((0, 2)):
            film.seek(at)
            shown = film.convert("RGB").crop((13, 13, 13 + 512, 13 + 512)).resize((64, 64), Image.Resampling.BOX)
            with Image.open(site.run.samples / f"step-{step:06d}-0.png") as sample:
                difference = ImageStat.Stat(ImageChops.difference(shown, sample.convert("RGB"))).mean
            assert max(difference) < 8, difference
    dialog.get_by_role("button", name="Close").click()
    made = (site.run.film / "film.json").stat().st_mtime_ns
    page.set_viewport_size({"width": 390, "height": 844})
    again = film_dialog(page, site, "files")  # shown, not made again
    assert again.evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth")
    assert again.get_by_role("link", name="Sheet, JPEG").count() == 2
    assert (site.run.film / "film.json").stat().st_mtime_ns == made
    again.locator("#film-make").click()
    until_so(page, lambda: (site.run.film / "film.json").stat().st_mtime_ns > made)
    dialog.locator("#film-make:enabled").wait_for(timeout=DRAWN_WITHIN_MS)
    assert 'class="sheet"' in site.run.report.read_text()


def test_adapter_card_and_film_are_published_as_the_question_says(page: Page, site: Site):
    dialog = open_dialog(page, "upload")
    dialog.get_by_text("There is no film yet.").wait_for()
    dialog.locator("#upload-film").click()
    film = page.locator("#film-dialog")
    film.locator("img.loop").nth(1).wait_for(timeout=DRAWN_WITHIN_MS)
    film.get_by_role("button", name="Close").click()
    dialog.locator("#upload-repo").fill("ada/fox-film")
    dialog.locator("#upload-look").click()
    asked = dialog.locator("#upload-question pre").first
    asked.wait_for()
    said = asked.inner_text().splitlines()
    agree(dialog)
    dialog.get_by_role("link", name="/ada/fox-film").wait_for()
    repository = site.hub.repositories["ada/fox-film"]
    films = [*site.run.film.glob("prompt-*")]
    assert len(films) >= 4
    samples = site.run.samples.glob("step-000002-*.png")
    expected = {f"{file.parent.name}/{file.name}": file.read_bytes() for file in (*films, *samples)}
    expected |= {file.name: file.read_bytes() for file in site.run.export.glob("*.safetensors")}
    card = repository.files["README.md"]
    assert checksums(repository.files) == checksums(expected | {"README.md": card})
    assert {line.split()[0] for line in said[1:]} == set(repository.files)
    assert b"![fox face](film/prompt-1.webp)" in card and b"film/prompt-2.jpg" in card
    assert said[0].endswith("to ada/fox-film, which only you can see:") and repository.private
