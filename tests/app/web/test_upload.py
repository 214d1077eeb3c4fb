"""Uploads by the page: photos chosen and dropped in Chromium, interrupted, deleted, and what strangers might send."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from playwright.sync_api import APIResponse, Browser, Page, Route, expect

from app.data.thumbnails import stamp
from app.data.upload.uploads import MOST_CHUNK
from app.web.security import UPLOADS_CLOSED
from tests.app.browser import HANDLERS, Server, data_screen, opened, serving, show, until_so, visit
from tests.app.web.screens import violations
from tests.app.web.test_mask import brush, open_mask, save, stroke
from tests.app.web.test_probes import ask
from tests.runs import make_pictures

CHUNKS = "**/uploads/*"
MOVIE = b"\0\0\0\x14ftypqt  " + bytes(100)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Fourteen photos with captions, of other colours than those of the page; one is larger than a chunk."""
    folder = make_pictures(tmp_path / "photos", 22)
    for number in range(8):
        (folder / f"{number:02d}.png").unlink()
        (folder / f"{number:02d}.txt").unlink()
    Image.frombytes("RGB", (1200, 900), os.urandom(1200 * 900 * 3)).save(folder / "08.png")
    return folder


@pytest.fixture
def data(own_data: Path, page: Page) -> Iterator[Page]:
    """The screen with eight images in the form."""
    page.on("dialog", lambda dialog: dialog.accept())
    with data_screen(page) as page:
        expect(page.locator("#upload-to option").first).to_have_text(str(own_data))
        yield page


def choose(page: Page, *files: Path) -> None:
    page.locator("#upload-input").set_input_files(files)


def drop(page: Page, *files: Path) -> None:
    """Drop files onto the screen, as a file manager does."""
    content = [[file.name, base64.b64encode(file.read_bytes()).decode()] for file in files]
    page.evaluate(
        """files => {
          const transfer = new DataTransfer();
          for (const [name, text] of files)
            transfer.items.add(new File([Uint8Array.from(atob(text), c => c.charCodeAt(0))], name));
          const send = kind => document.querySelector('#page-data h1').dispatchEvent(
            new DragEvent(kind, { bubbles: true, cancelable: true, dataTransfer: transfer }));
          send('dragover');
          if (!document.querySelector('.drop.over')) throw new Error('the place to drop files is not marked');
          send('drop');
        }""",
        content,
    )


def done(page: Page, sentence: str) -> None:
    page.locator("#upload-done").get_by_text(sentence, exact=True).wait_for()


def tree(folder: Path) -> dict[str, bytes]:
    """{path: content} of all files below a folder, but for what the page itself writes down."""
    own = folder / "runs"
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_relative_to(own))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.suffix != ".log"}


@pytest.mark.slow
def test_photos_that_are_chosen_enter_the_folder_with_their_captions(own_data: Path, data: Page, photos: Path):
    (photos / "clip.mov").write_bytes(MOVIE)
    (photos / "00.png").write_bytes((photos / "09.png").read_bytes())
    (photos / "00.txt").write_text("another of this name")
    choose(data, *photos.iterdir())
    done(data, "30 files added, 1 not taken.")
    for file in photos.glob("[01]?.*"):
        name = f"00 (2){file.suffix}" if file.stem == "00" else file.name
        assert (own_data / name).read_bytes() == file.read_bytes()
    assert (own_data / "00.txt").read_text() == "picture number 0"
    expect(data.locator("#counted")).to_contain_text("23 images, 23 captions")
    results = data.locator("#upload-results")
    expect(results).to_contain_text("clip.mov: a movie; save one image of it as PNG or JPEG")
    expect(results).to_contain_text("00.png is called 00 (2).png here")
    choose(data, *photos.glob("1*"))
    done(data, "0 files added, 20 there already.")
    expect(results).to_contain_text("clip.mov")
    results.get_by_role("button", name="Dismiss").click()
    expect(results).to_be_empty()
    expect(data.locator("#upload-files")).to_be_focused()


def test_photos_are_dropped_and_wrong_names_become_right(own_data: Path, data: Page, tmp_path: Path):
    image = Image.new("RGB", (40, 40), "teal")
    image.save(tmp_path / "photo.png")
    (tmp_path / "photo.png").rename(tmp_path / "photo.jpg")
    (tmp_path / "photo.txt").write_text("a photo")
    (tmp_path / "notes.txt").write_text("not a caption")
    drop(data, tmp_path / "photo.txt", tmp_path / "photo.jpg", tmp_path / "notes.txt")
    done(data, "3 files added.")
    results = data.locator("#upload-results")
    expect(results).to_contain_text("1 text has no image of its name and is no caption yet")
    expect(results.locator("li").last).to_have_text("notes.txt")
    assert sorted(file.name for file in own_data.glob("photo*")) == ["photo.png", "photo.txt"]
    expect(data.locator(".pc[data-name='photo.png'] textarea")).to_have_value("a photo")


def test_files_of_one_name_size_and_time_are_not_taken_for_each_other(own_data: Path, data: Page, tmp_path: Path):
    """As an archive gives them when it is unpacked; images without compression all have one size."""
    for folder, colour in (("cats", "teal"), ("dogs", "plum")):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (40, 40), colour).save(tmp_path / folder / "0001.bmp")
        os.utime(tmp_path / folder / "0001.bmp", (1e9, 1e9))
        choose(data, tmp_path / folder / "0001.bmp")
        done(data, "1 file added.")
    expect(data.locator("#upload-results")).to_contain_text("0001.bmp is called 0001 (2).bmp here")
    assert {(own_data / name).read_bytes() for name in ("0001.bmp", "0001 (2).bmp")} == {
        (tmp_path / folder / "0001.bmp").read_bytes() for folder in ("cats", "dogs")
    }


@pytest.mark.slow
def test_a_dropped_file_that_cannot_be_read_is_named_and_the_others_are_sent(own_data: Path, data: Page):
    data.evaluate(
        """() => {
          const gone = (good, bad) => bad(new DOMException('gone'));
          const lost = { isFile: true, name: 'lost.png', fullPath: '/lost.png', file: gone };
          const canvas = document.createElement('canvas');
          const url = canvas.toDataURL('image/png').split(',')[1];
          const image = new File([Uint8Array.from(atob(url), c => c.charCodeAt(0))], 'kept.png');
          const kept = { isFile: true, name: 'kept.png', fullPath: '/kept.png', file: good => good(image) };
          const items = [lost, kept].map(entry => ({ kind: 'file', webkitGetAsEntry: () => entry }));
          const event = new Event('drop', { bubbles: true, cancelable: true });
          event.dataTransfer = { types: ['Files'], items };
          document.querySelector('#page-data h1').dispatchEvent(event);
        }"""
    )
    done(data, "1 file added.")
    expect(data.locator("#upload-message")).to_contain_text("lost.png cannot be read; choose it again")
    assert (own_data / "kept.png").exists()


@pytest.mark.slow
def test_a_selection_that_is_made_during_an_upload_follows_it(own_data: Path, data: Page, photos: Path):
    with only_first(data, 0) as held:
        choose(data, *photos.glob("1*.png"))
        until_so(data, lambda: len(held) == 3)
        choose(data, *photos.glob("2*.png"))
        choose(data, photos / "09.png")
        expect(data.locator("#upload-size")).to_contain_text(", 2 selections after it")
        while len(list(own_data.glob("1*.png"))) < 10:
            for route in held:
                route.continue_()
            held.clear()
            data.wait_for_timeout(50)
    done(data, "1 file added.")
    expect(data.locator("#upload-going")).to_be_hidden()
    assert len(list(own_data.glob("*.png"))) == 8 + 13


@contextmanager
def only_first(page: Page, number: int) -> Iterator[list[Route]]:
    """Let the first chunks through; the others wait meanwhile, as in a slow network."""
    held: list[Route] = []
    sent: list[Route] = []

    def hold(route: Route) -> None:
        if len(sent) < number:
            sent.append(route)
            route.continue_()
        else:
            held.append(route)

    page.route(CHUNKS, hold)
    yield held
    page.unroute(CHUNKS)


@pytest.mark.slow  # test_uploads.py goes on without a browser
def test_an_upload_that_a_reload_interrupts_goes_on(own_data: Path, data: Page, photos: Path):
    files = sorted(photos.glob("*.png"))
    with only_first(data, 6) as held:
        choose(data, *files)
        until_so(data, lambda: len(held) == 3 and len(list(own_data.glob("*.png"))) == 13)
        expect(data.locator("#upload-count")).to_have_text("5 of 14 files")  # 08.png has two chunks
        data.set_viewport_size({"width": 390, "height": 844})
        assert data.evaluate("document.documentElement.scrollWidth") == 390
        for scheme in ("light", "dark"):
            data.emulate_media(color_scheme=scheme)
            assert violations(data, {}) == []
        data.reload()
    show(data, "Data")
    left = data.locator("#upload-left")
    expect(left).to_contain_text("5 of 14 files are there, in ")
    expect(left).to_contain_text("Choose the same files again to go on")
    asked: list[str] = []
    data.on("request", lambda request: asked.append(request.url) if request.method == "PUT" else None)
    choose(data, *files)
    done(data, "9 files added, 5 there already.")
    assert len(asked) == 9
    expect(left).to_be_empty()
    assert all((own_data / file.name).read_bytes() == file.read_bytes() for file in files)


@pytest.mark.slow  # waits for what is not sent
def test_without_a_connection_it_waits_and_a_pause_and_an_end_are_obeyed(own_data: Path, data: Page, photos: Path):
    data.route(CHUNKS, lambda route: route.abort())
    choose(data, *photos.glob("08.*"))
    expect(data.locator("#upload-current")).to_have_text("The server does not answer. Trying again …")
    data.unroute(CHUNKS)
    done(data, "2 files added.")
    state = own_data.parent / "runs" / "drafts" / "uploads"
    before = set(state.iterdir())
    with only_first(data, 0) as held:
        choose(data, *photos.glob("1*.png"))
        until_so(data, lambda: len(held) == 3)
        data.get_by_role("button", name="Pause").click()
        for route in held:
            route.continue_()
        expect(data.locator("#upload-current")).to_have_text("Paused.")
        data.wait_for_timeout(400)
        expect(data.locator("#upload-count")).to_have_text("3 of 10 files")
        data.get_by_role("button", name="Resume").click()
        until_so(data, lambda: len(held) == 6)
        data.locator("#upload-cancel").click()
        done(data, "3 files added, 7 not sent.")
    until_so(data, lambda: set(state.iterdir()) == before)
    assert len(list(own_data.glob("1*.png"))) == 3


def drop_from_disk(page: Page, *paths: Path) -> None:
    """Drop files and folders of the disk, as the browser itself does when a hand lets them go."""
    box = page.locator("#upload-drop").bounding_box()
    assert box is not None
    devtools = page.context.new_cdp_session(page)
    content = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        event = {"type": kind, "x": box["x"] + 20, "y": box["y"] + 20, "data": content}
        devtools.send("Input.dispatchDragEvent", event)
    devtools.detach()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["drop", "choose"])
def test_of_a_folder_everything_in_it_enters_the_folder(own_data: Path, data: Page, tmp_path: Path, way: str):
    """More files than a browser lists at once, one in a folder below, and what systems leave in folders."""
    trip = tmp_path / "trip"
    (trip / "day 2").mkdir(parents=True)
    for number in range(110):
        Image.new("RGB", (32, 32), (number, 2, 3)).save(trip / f"t{number}.png")
    Image.new("RGB", (32, 32), "gold").save(trip / "day 2" / "t0.png")
    for name, text in {"t0.txt": "the first", "day 2/t0.txt": "the second", ".DS_Store": "", "Thumbs.db": ""}.items():
        (trip / name).write_text(text)
    if way == "drop":
        drop_from_disk(data, trip)
    else:
        data.locator("#upload-input-folder").set_input_files(trip)
    done(data, "113 files added.")
    expect(data.locator("#upload-message")).to_contain_text("The files of 2 folders are in one folder now.")
    expect(data.locator("#upload-results")).to_contain_text("trip/day 2/t0.png is called t0 (2).png here")
    found = {image.stem: image.with_suffix(".txt") for image in own_data.glob("t*.png")}
    assert len(found) == 111 and sorted(file.name for file in own_data.glob("t*.txt")) == ["t0 (2).txt", "t0.txt"]
    for stem in ("t0", "t0 (2)"):
        with Image.open(own_data / f"{stem}.png", formats=("PNG",)) as image:
            said = found[stem].read_text()
            assert said == ("the first" if image.getpixel((0, 0)) == (0, 2, 3) else "the second")


def test_an_image_is_deleted_by_the_keyboard_undone_restored_and_removed_for_good(own_data: Path, data: Page):
    before = {file.name: file.read_bytes() for file in own_data.iterdir()}
    data.get_by_role("button", name="Delete 01.png").focus()
    data.keyboard.press("Enter")
    expect(data.locator(".pc[data-name='01.png']")).to_have_count(0)
    expect(data.get_by_role("button", name="Delete 02.png")).to_be_focused()
    assert not (own_data / "01.png").exists() and not (own_data / "01.txt").exists()
    data.locator(".toast").get_by_role("button", name="Undo").click()
    data.locator(".pc[data-name='01.png']").wait_for()
    for name in ("03.png", "04.png"):
        data.get_by_role("button", name=f"Delete {name}").click()
        expect(data.locator(f".pc[data-name='{name}']")).to_have_count(0)
    data.get_by_text("Deleted images (2)").click()
    data.get_by_role("button", name="Restore 03.png").click()
    data.locator(".pc[data-name='03.png']").wait_for()
    assert {file.name: file.read_bytes() for file in own_data.glob("*.*g")} | {"04.png": before["04.png"]} == {
        name: content for name, content in before.items() if name.endswith("g")
    }
    for answer, left in (("Keep them", 1), ("Remove for good", 0)):
        data.get_by_role("button", name="Empty the trash").click()
        data.get_by_role("dialog").get_by_role("button", name=answer).click()
        until_so(data, lambda left=left: len(list((own_data / ".trash-shardstudio").iterdir())) == left)
    expect(data.locator("#trash")).to_be_hidden()


@pytest.mark.slow  # the masks that are named are tested in test_masks.py
def test_an_image_with_the_name_of_a_deleted_one_is_shown_and_said_to_have_its_mask(
    own_data: Path, data: Page, tmp_path: Path
):
    dialog = open_mask(data, "00.png")
    brush(data, 40)
    stroke(data, dialog, (0.2, 0.2), (0.8, 0.8))
    save(data)
    picture = data.locator(".pc[data-name='00.png'] .fr img")
    shown = picture.get_attribute("src") or ""
    lost: list[str] = []

    def lose(route: Route) -> None:
        found = next((name for name in ("upload_finish", "upload_masked") if route.request.url.endswith(name)), "")
        if not found or found in lost:
            route.continue_()
            return
        lost.append(found)
        route.fetch()
        route.abort()

    data.get_by_role("button", name="Delete 00.png").click()
    expect(data.locator(".pc[data-name='00.png']")).to_have_count(0)
    for name in ("00", "99"):
        Image.new("RGB", (40, 40), "plum").save(tmp_path / f"{name}.png")
    data.route(HANDLERS, lose)  # the first answer of each is lost on its way
    choose(data, tmp_path / "00.png", tmp_path / "99.png")
    done(data, "2 files added.")
    data.unroute(HANDLERS)
    assert sorted(lost) == ["upload_finish", "upload_masked"]
    results = data.locator("#upload-results")
    expect(results).to_contain_text("1 image has a mask already, perhaps that of an earlier image")
    expect(results.locator("li")).to_have_text([f"00.png: {own_data.with_name('own-masks') / '00.png'}"])
    expect(picture).to_have_attribute("src", re.compile(f"^(?!{re.escape(shown)}$)."))
    shown = picture.get_attribute("src") or ""
    Image.new("RGB", (40, 40), "teal").save(own_data / "00.png")
    data.locator("#data-again").click()
    expect(picture).to_have_attribute("src", re.compile(f"^(?!{re.escape(shown)}$)."))
    shutil.rmtree(own_data.with_name("own-masks"))


@pytest.mark.slow
def test_a_thumbnail_that_comes_after_its_image_was_replaced_is_not_kept(own_data: Path, data: Page):
    for name in ("00", "01", "02"):
        Image.new("RGB", (40, 40), "teal").save(own_data / f"{name}.png")
    held: list[tuple[Route, APIResponse]] = []

    def hold(route: Route) -> None:
        if route.request.url.endswith("data_thumbnail") and len(held) < 3:
            held.append((route, route.fetch()))
        else:
            route.continue_()

    data.route(HANDLERS, hold)
    data.locator("#data-again").click()
    until_so(data, lambda: len(held) == 3)
    Image.new("RGB", (44, 44), "red").save(own_data / "00.png")
    with data.expect_response(lambda answer: stamp(own_data / "00.png") in answer.text(), timeout=30_000):
        data.locator("#data-again").click()
    for route, answer in sorted(held, key=lambda late: "00.png" not in (late[0].request.post_data or "")):
        with data.expect_event("requestfinished"):  # the replaced image first, before another card has asked anew
            route.fulfill(response=answer)
    new = data.evaluate("image => studio.call('data_thumbnail', { image })", str(own_data / "00.png"))
    expect(data.locator(".pc[data-name='00.png'] .fr img")).to_have_attribute("src", new)
    data.unroute(HANDLERS)


@pytest.mark.slow  # the store's refusals are tested in test_uploads.py
def test_the_quickstarts_images_stay_and_a_new_folder_becomes_the_forms(page: Page, runs: Path, photos: Path):
    made = runs.parent / "my photos"
    shutil.rmtree(made, ignore_errors=True)
    show(page, "Data")
    page.locator("#upload-why", has_text="images of the program itself, which stay as they are").wait_for()
    page.get_by_role("button", name="Delete 0000-").click()
    page.locator(".toast.bad", has_text="images of the program itself").wait_for()
    page.locator("#upload-to").select_option(f"new:{runs.parent}")
    page.get_by_label("called").fill("../x")
    choose(page, photos / "09.png")
    page.locator("#upload-message", has_text="not a name for a folder of images").wait_for()
    choose(page, *photos.glob("*.png"), *photos.glob("*.txt"))
    page.get_by_label("called").fill("my photos")
    page.locator("#upload-again", has_text="Add the 28 files").click()
    done(page, "28 files added.")
    expect(page.locator("#folder")).to_have_text(str(made))
    expect(page.locator("#counted")).to_contain_text("14 images, 14 captions")
    shutil.rmtree(made)


@pytest.mark.slow
def test_the_name_of_a_new_folder_is_free_and_its_report_its_own(own_data: Path, data: Page, photos: Path):
    above = own_data.parent
    for name in ("images", "images-2"):
        (above / name).mkdir()
    data.reload()
    show(data, "Data")
    data.locator("#upload-to").select_option(f"new:{above}")
    expect(data.get_by_label("called")).to_have_value("images-3")
    (above / "broken.png").write_bytes(b"no image")
    data.locator("#upload-to").select_option("")
    choose(data, above / "broken.png")
    expect(data.locator("#upload-results")).to_contain_text("1 file was not taken")
    data.locator("#upload-to").select_option(f"new:{above}")
    choose(data, photos / "09.png")
    done(data, "1 file added.")
    expect(data.locator("#upload-results")).to_be_empty()
    for name in ("images", "images-2", "images-3"):
        shutil.rmtree(above / name)


@pytest.mark.slow
def test_masks_of_the_former_images_stay_with_them_and_come_back_on_request(
    own_data: Path, data: Page, draft: Path, photos: Path
):
    """Cameras repeat names: such a mask would be laid over another picture."""
    other, masks = own_data.with_name("other"), own_data.with_name("own-masks")
    masks.mkdir()
    Image.new("L", (40, 40), 255).save(masks / "09.png")
    data.evaluate("edits => studio.call('new_edit', { edits })", {"data.masks": str(masks)})
    data.locator("#upload-to").select_option(f"new:{own_data.parent}")
    data.get_by_label("called").fill(other.name)
    choose(data, photos / "09.png", photos / "09.txt")
    done(data, "2 files added.")
    expect(data.locator("#upload-behind")).to_contain_text(
        "it belongs to the images of the former folder: Mask folder."
    )
    assert json.loads(draft.read_text())["values"] == {"data.path": str(other)}
    expect(data.locator("#upload-results")).not_to_contain_text(str(masks))
    data.locator("#upload-behind").get_by_role("button", name="Undo").click()
    expect(data.locator("#upload-behind")).to_contain_text("It is in the form again.")
    assert json.loads(draft.read_text())["values"] == {"data.path": str(other), "data.masks": str(masks)}
    shutil.rmtree(other)
    shutil.rmtree(masks)


# --- what strangers might send ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """One that has opened the page, as a browser has."""
    with httpx.Client(base_url=server.origin) as client:
        assert client.get(server.url, follow_redirects=True).status_code == 200
        yield client


def png(colour: str = "plum") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(buffer, "PNG")
    return buffer.getvalue()


def call(client: httpx.Client, name: str, /, **values: Any) -> dict[str, Any]:
    answer = ask(client, name=f"upload_{name}", data=values)
    assert answer.status_code == 200, answer.text
    return answer.json()


def begun(client: httpx.Client, folder: Path, size: int, name: str = "probe.png") -> str:
    return call(client, "begin", file={"folder": str(folder), "name": name, "size": size})["value"]["id"]


def test_a_chunk_is_taken_from_the_page_alone(client: httpx.Client, server: Server, own_data: Path):
    image, before = png(), tree(own_data.parent)
    id = begun(client, own_data, len(image))
    address = f"/uploads/{id}?offset=0"
    with httpx.Client(base_url=server.origin) as stranger:
        assert stranger.put(address, content=image).status_code == 401
    for origin in ("https://evil.example", f"http://127.0.0.1:{server.port + 1}"):
        assert client.put(address, content=image, headers={"origin": origin}).status_code == 403
    assert client.put(address, content=image, headers={"host": "evil.example"}).status_code == 400
    assert client.put(address, content=iter([image])).status_code == 411
    assert client.put(address, content=bytes(MOST_CHUNK + 1)).status_code == 413
    assert client.put(address, content=bytes(len(image) + 1)).status_code == 400
    for offset in ("", "-1", "x", "1e3", "9" * 13, "\u0663"):
        assert client.put(f"/uploads/{id}", params={"offset": offset}, content=image).status_code == 400
    assert client.put(f"/uploads/{id}?offset=7", content=image).json() == {"received": 0}
    for other in (f"{'0' * 32}-{len(image)}", "0" * 32, "..", "%2e%2e%2fx", id[:-1], f"{id}/..", id.upper()):
        assert client.put(f"/uploads/{other}?offset=0", content=image).status_code in (404, 405)
    assert client.post(address, content=image).status_code in (404, 405)
    assert client.post("/gradio_api/upload", files={"files": image}).status_code == 403
    assert client.put("/gradio_api/upload", content=image).status_code == 403
    assert tree(own_data.parent) == before
    assert client.put(address, content=image).json() == {"received": len(image)}
    probe = {"folder": str(own_data), "name": "probe.png", "size": len(image)}
    assert "Unexpected keyword argument" in call(client, "finish", file=probe, studio=1)["error"]
    placed = {"name": "probe.png", "is_new": True, "is_alone": False}
    assert call(client, "finish", file=probe) == {"value": placed}
    assert tree(own_data.parent) == before | {"own/probe.png": image}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"folder": "/proc/self/root/etc"}, "outside "),
        ({"name": "../probe.png"}, "not the name of a file"),
        ({"name": "x" * 5000}, "is longer than 4096 characters"),
        ({"size": 0}, "probe.png: empty"),
        ({"size": -5}, "probe.png: empty"),
        ({"size": 2**40}, "bytes are more than the limit"),
        ({"size": 1e300}, "upload_begin: file.size: "),
        ({"head": "zz"}, "its first bytes are not hexadecimal"),
        ({"head": b"<svg onload=x()>".hex()}, "HTML, SVG or other markup"),
        ({"folder": ["/etc"]}, "Input should be a valid string"),
        ({"modified_ms": "x"}, "upload_begin: file.modified_ms: "),
    ],
)
def test_a_hostile_beginning_is_refused_with_a_sentence(
    client: httpx.Client, own_data: Path, values: dict[str, Any], said: str
):
    before = tree(own_data.parent)
    given = {"folder": str(own_data), "name": "probe.png", "size": 100} | values
    assert said in call(client, "begin", file=given)["error"]
    assert tree(own_data.parent) == before


def test_deleting_and_restoring_reach_only_what_the_page_shows(client: httpx.Client, own_data: Path, runs: Path):
    other = make_pictures(runs.parent / "others", 2)
    key = call(client, "state")["value"]["key"]
    until_scanned(client)
    before = tree(own_data.parent)
    probes: list[tuple[str, dict[str, Any], str]] = [
        ("delete", {"key": key, "images": [str(other / "00.png")]}, "not one of the images that are shown"),
        ("delete", {"key": key, "images": [str(own_data / ".." / "others" / "00.png")]}, "not one of the images"),
        ("delete", {"key": key, "images": [str(own_data / "00.txt")]}, "no such image"),
        ("delete", {"key": key, "images": []}, "images of one folder"),
        ("delete", {"key": "x", "images": [str(own_data / "00.png")]}, "New run has another folder meanwhile"),
        ("restore", {"key": key, "folder": str(other), "name": "x"}, "not a folder of the images that are shown"),
        ("restore", {"key": key, "folder": str(own_data), "name": "../x"}, "not a deletion"),
        ("empty", {"key": "x", "deletions": []}, "New run has another folder meanwhile"),
        ("make", {"above": "/etc", "name": "x"}, "outside "),
        ("make", {"above": str(own_data), "name": "../x"}, "not a name for a folder"),
        ("finish", {"file": {"folder": str(own_data), "name": "unsent.png", "size": 9}}, "choose the file again"),
    ]
    assert call(client, "cancel", id="../../secret") == {"value": None}  # as of any upload that is gone
    for name, values, said in probes:
        assert said in call(client, name, **values)["error"], name
    assert tree(own_data.parent) == before
    shutil.rmtree(other)


def until_scanned(client: httpx.Client) -> None:
    while not ask(client, name="data_view").json()["value"]["is_complete"]:
        pass


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("metadata.jsonl", '{"file_name": "00.png", "text": "a fox"}\n'),
        ("metadata.jsonl", '{"file_name": "./00.png", "focus": [0.5, 0.5]}\n'),
        ("metadata.csv", "file_name,text\n00.png,a fox\n"),
    ],
)
def test_an_image_that_metadata_names_is_not_deleted(client: httpx.Client, own_data: Path, name: str, rows: str):
    (own_data / name).write_text(rows)
    ask(client, name="data_view", data={"is_fresh": True})
    until_scanned(client)
    key = call(client, "state")["value"]["key"]
    refusal = call(client, "delete", key=key, images=[str(own_data / "00.png")])["error"]
    assert f"a row of {own_data / name} leads to it" in refusal and (own_data / "00.png").exists()
    assert "value" in call(client, "delete", key=key, images=[str(own_data / "01.png")])


def test_images_of_a_table_are_neither_deleted_nor_pushed_aside_by_new_ones(client: httpx.Client, own_data: Path):
    files = sorted(own_data.iterdir())
    with tarfile.open(own_data / "all.tar", "w") as table:
        for file in files:
            table.add(file, file.name)
            file.unlink()
    ask(client, name="data_view", data={"is_fresh": True})
    until_scanned(client)
    shown = ask(client, name="data_view").json()["value"]["cards"]
    found = call(client, "state")["value"]
    assert (len(shown), "its images are in all.tar" in found["problem"]) == (8, True)
    refusal = call(client, "delete", key=found["key"], images=[shown[0]["image"]])["error"]
    assert refusal.endswith(": stands in a table; remove it there")
    refusal = call(client, "begin", file={"folder": str(own_data), "name": "a.png", "size": 100})["error"]
    assert "its images are in all.tar, which is not read once the folder has images of its own" in refusal


@pytest.mark.slow  # a server of its own; test_security.py asks the guard
def test_behind_a_proxy_without_a_password_nothing_is_taken(tmp_path: Path, browser: Browser):
    with serving(tmp_path / "runs", "--name", "studio.example") as server, httpx.Client() as client:
        client.base_url = server.origin
        assert client.get(server.url.replace("https", "http"), follow_redirects=True).status_code == 200
        folder = make_pictures(tmp_path / "data", 1)
        before = tree(tmp_path)
        refused = call(client, "begin", file={"folder": str(folder), "name": "a.png", "size": 100})
        assert refused == {"error": UPLOADS_CLOSED}
        assert call(client, "make", above=str(tmp_path), name="new") == {"error": UPLOADS_CLOSED}
        answer = client.put(f"/uploads/{'0' * 32}-100?offset=0", content=b"x")
        assert (answer.status_code, answer.text) == (403, UPLOADS_CLOSED)
        assert tree(tmp_path) == before
        with opened(browser, server.url) as page:
            visit(page, "data")
            page.locator("#upload-why", has_text="Uploads are off").wait_for()
            expect(page.locator("#upload-open")).to_be_hidden()
