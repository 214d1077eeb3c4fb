"""Finding images with captions, and decoding them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from trainer.config.sections import DataConfig
from trainer.data.images import image_warnings
from trainer.data.images.image_files import scan
from trainer.data.images.image_io import load_rgb, read_header
from trainer.system.errors import InputError

QUICKSTART = Path(__file__).parents[3] / "presets" / "quickstart"


def add_image(path: Path, caption: str | None = "a cat", size: tuple[int, int] = (40, 20), **save: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "red").save(path, **save)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def data(path: Path, **fields: Any) -> DataConfig:
    return DataConfig(path=str(path), **fields)


def problems_of(cfg: DataConfig) -> list[str]:
    with pytest.raises(InputError) as caught:
        scan(cfg)
    return str(caught.value).split("\n")


def captions_of(cfg: DataConfig) -> list[str]:
    return [photo.caption for photo in scan(cfg).train]


def test_photos_are_found_recursively_in_order_of_their_relative_path(tmp_path: Path) -> None:
    for name in ("b.png", "a/z.JPEG", "a.webp", "c/d/e.tiff", "b.bmp"):
        add_image(tmp_path / name, caption=name)
    assert [photo.path.relative_to(tmp_path).as_posix() for photo in scan(data(tmp_path)).train] == [
        "a.webp",
        "a/z.JPEG",
        "b.bmp",
        "b.png",
        "c/d/e.tiff",
    ]


def test_hidden_cache_and_separately_listed_folders_are_not_part_of_the_folder_around_them(tmp_path: Path) -> None:
    for name in ("a.png", ".hidden/b.png", "cache/c.png", "_latent_cache/d.png", "mine/e.png", "f/g.png", "held/h.png"):
        add_image(tmp_path / name)
    cfg = data(
        tmp_path,
        folders=[{"path": str(tmp_path / "f"), "weight": 2.5}],
        repeats=2,
        cache=str(tmp_path / "mine"),
        validation=str(tmp_path / "held"),
    )
    dataset = scan(cfg)
    assert [(photo.path.name, photo.weight) for photo in dataset.train] == [("a.png", 2.0), ("g.png", 5.0)]
    assert [(photo.path.name, photo.weight) for photo in dataset.validation] == [("h.png", 1.0)]


def test_a_linked_folder_is_followed_once(tmp_path: Path) -> None:
    add_image(tmp_path / "elsewhere" / "a.png")
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "link").symlink_to(tmp_path / "elsewhere")
    (photos / "again").symlink_to(tmp_path / "elsewhere")
    (photos / "loop").symlink_to(photos)
    assert [photo.path for photo in scan(data(photos)).train] == [photos / "again" / "a.png"]


def test_two_images_of_one_name_share_a_caption(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png", caption="shared")
    add_image(tmp_path / "a.jpg", caption=None)
    assert captions_of(data(tmp_path)) == ["shared", "shared"]


def test_captions_come_from_the_text_file_beside_the_image_then_from_metadata(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png", caption="\ufeff from the file \n")
    for name in ("b.png", "sub/c.png", "sub/d.png"):
        add_image(tmp_path / name, caption=None)
    rows = [
        {"file_name": "a.png", "text": "unused"},
        {"file_name": "b.png", "text": "b\u2028text"},
        {"file_name": "sub/c.png", "caption": "c caption"},
    ]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "metadata.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "sub" / "metadata.jsonl").write_text('{"file_name": "d.png", "text": "d"}\n', encoding="utf-8")
    assert captions_of(data(tmp_path)) == ["from the file", "b\u2028text", "c caption", "d"]


def test_the_trigger_replaces_its_place_or_is_put_before_the_caption(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png", caption="a [trigger] cat, [trigger] style")
    add_image(tmp_path / "b.png", caption="a dog")
    add_image(tmp_path / "c.png", caption=None)
    cfg = data(tmp_path, trigger="ohwx", missing_caption="empty")
    assert captions_of(cfg) == ["a ohwx cat, ohwx style", "ohwx, a dog", "ohwx"]


def test_a_caption_that_cannot_be_read_is_a_problem_of_its_own(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png", caption=None)
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")
    assert problems_of(data(tmp_path)) == [
        f"{tmp_path}/a.txt: cannot be read (Input/output error); change its permissions"
    ]


def test_a_folder_the_user_may_not_enter_is_named(tmp_path: Path) -> None:
    add_image(tmp_path / "closed" / "a.png")
    tmp_path.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        [problem] = problems_of(data(tmp_path / "closed"))
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)
    assert problem == (
        f"data.path: {tmp_path}/closed: cannot be read (Permission denied); change its permissions, or name a folder "
        "without it"
    )


def test_a_place_for_a_trigger_that_is_not_set_is_a_warning(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png", caption="a [trigger] cat")
    assert scan(data(tmp_path)).warnings == (
        f"data.path: 1 captions of {tmp_path} hold an unfilled [trigger]; set data.trigger",
    )


def test_validation_images_are_the_last_of_the_order(tmp_path: Path) -> None:
    for name in "abcde":
        add_image(tmp_path / f"{name}.png")
    dataset = scan(data(tmp_path, validation=2))
    assert [photo.path.stem for photo in dataset.train] == ["a", "b", "c"]
    assert [photo.path.stem for photo in dataset.validation] == ["d", "e"]


def test_of_many_images_some_are_taken_evenly_of_each_kind(tmp_path: Path) -> None:
    for name in "abcdefghij":
        add_image(tmp_path / "own" / f"{name}.png")
    for name in "vwxyz":
        add_image(tmp_path / "class" / f"{name}.png")
    dataset = scan(data(tmp_path / "own", validation=4, max_images=3, regularization=str(tmp_path / "class")))
    assert [photo.path.stem for photo in dataset.train] == ["a", "c", "e", "v", "w", "y"]
    assert [photo.path.stem for photo in dataset.validation] == ["g", "h", "i"]
    assert sum(photo.weight for photo in dataset.train if photo.is_own) == 3
    assert sum(photo.weight for photo in dataset.train if not photo.is_own) == 3
    assert len(scan(data(tmp_path / "class", max_images=9)).train) == 5


def test_setting_all_images_aside_is_refused(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png")
    add_image(tmp_path / "b.png")
    assert problems_of(data(tmp_path, validation=2)) == [
        "data.validation: 2 of 2 images leaves none to train on; use at most 1"
    ]


def test_folders_without_images_are_named_with_their_field(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "notes.txt").write_text("no image")
    cfg = data(
        tmp_path / "nowhere",
        folders=[{"path": str(tmp_path / "empty")}, {"path": str(tmp_path / "words")}],
        validation=str(tmp_path / "words" / "notes.txt"),
    )
    assert problems_of(cfg) == [
        f"data.path: {tmp_path}/nowhere: no such folder; give a folder of images with captions",
        f"data.folders.0.path: {tmp_path}/empty: the folder is empty; put images with captions into it",
        f"data.folders.1.path: {tmp_path}/words: no images in this folder; expected bmp jfif jpe jpeg jpg pjp pjpeg "
        "png tif tiff webp",
        f"data.validation: {tmp_path}/words/notes.txt: not a folder; give a folder of images with captions",
    ]


def test_captions_that_are_missing_empty_or_not_utf8_are_all_named(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png", caption=None)
    add_image(tmp_path / "b.png", caption=" \n")
    add_image(tmp_path / "c.png", caption=None)
    (tmp_path / "c.txt").write_bytes("café".encode("latin-1"))
    assert problems_of(data(tmp_path)) == [
        f"{tmp_path}/c.txt: byte 3 (0xe9) is not UTF-8; save the file as UTF-8",
        f"data.path: 2 of 3 images have no caption: first {tmp_path}/a.png; write it into a.txt, let a model "
        f"write them with --caption {tmp_path}, or set data.missing_caption: empty",
    ]


def test_bad_rows_of_metadata_are_named_with_their_line(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png")
    rows = ['{"file_name": "a.png"', '{"text": "x"}', '{"file_name": "a.png"}', '{"file_name": "z.png", "text": "x"}']
    rows += [json.dumps({"file_name": "a.png", "text": "é" * count}) for count in (2**15, 2**15 + 1)]
    rows += ["[" * 100_000, '{"file_name": "a.png", "text": "fox \\ud83d"}']
    (tmp_path / "metadata.jsonl").write_text("\n".join(rows))
    file = f"{tmp_path}/metadata.jsonl"
    assert problems_of(data(tmp_path)) == [
        f"{file}:1: not a JSON object (Expecting ',' delimiter: line 1 column 22 (char 21)); "
        "each line is one, with file_name and text",
        f'{file}:2: no "file_name"; each line is a JSON object with file_name and text',
        f'{file}:3: no "text" or "caption" for a.png; add the caption as a string, or several as a list',
        f"{file}:4: no such image: z.png; correct file_name or remove the line",
        f"{file}:6: a.png: 65538 bytes are too many for a caption, the limit is 65536; shorten or remove it",
        f"{file}:7: not a JSON object (maximum recursion depth exceeded while decoding a JSON array from a unicode "
        "string); each line is one, with file_name and text",
        f"{file}:8: a text holds \\ud83d, which is half a character; remove it",
    ]


def add_unreadable_images(folder: Path) -> tuple[str, ...]:
    """Three files that are no usable images; what is said of them."""
    header_only = add_image(folder / "a.png").read_bytes()[:20]
    (folder / "a.png").write_bytes(header_only)
    (folder / "b.jpg").write_text("no image at all")
    (folder / "c.heic").write_bytes(b"something")
    return (
        f"{folder}/c.heic: .heic images are not read; convert it to png or jpg, or remove it",
        f"{folder}/a.png: cannot be read (Truncated File Read); replace or remove it",
        f"{folder}/b.jpg: cannot be read (not an image of a known format); replace or remove it",
    )


def test_unreadable_images_stop_the_scan_by_default(tmp_path: Path) -> None:
    facts = add_unreadable_images(tmp_path)
    (tmp_path / "b.txt").write_text("a caption")
    assert problems_of(data(tmp_path)) == [f"{fact}, or set data.bad_image: warn" for fact in facts]


def test_unreadable_images_are_left_out_with_a_warning_on_request(tmp_path: Path) -> None:
    facts = add_unreadable_images(tmp_path)
    (tmp_path / "b.txt").write_text("a caption")
    add_image(tmp_path / "good.png")
    dataset = scan(data(tmp_path, bad_image="warn"))
    assert [photo.path.name for photo in dataset.train] == ["good.png"]
    assert dataset.warnings == tuple(f"left out: {fact}" for fact in facts)


def test_leaving_out_every_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"nothing")
    (tmp_path / "a.txt").write_text("a caption")
    assert problems_of(data(tmp_path, bad_image="warn")) == [f"data.path: {tmp_path}: none of its 1 images can be read"]


@pytest.mark.parametrize("bad_image", ["stop", "warn"])
def test_of_problems_with_one_remedy_three_are_shown_and_the_others_counted(tmp_path: Path, bad_image: str) -> None:
    for number in range(23):
        (tmp_path / f"{number:02}.heic").write_bytes(b"")
    add_image(tmp_path / "a.png")
    cfg = data(tmp_path, bad_image=bad_image)
    shown = scan(cfg).warnings if bad_image == "warn" else problems_of(cfg)
    assert len(shown) == 4 and f"{tmp_path}/02.heic: .heic images are not read; convert it to" in shown[2]
    assert shown[3] == f"and 20 more like these: {tmp_path}/03.heic to {tmp_path}/22.heic"


def test_problems_of_many_kinds_are_counted_after_the_twentieth() -> None:
    problems = [f"{number}.png: is wrong; do {number}" for number in range(23)]
    assert image_warnings.listing(problems).split("\n") == [*problems[:20], "and 3 more"]


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("RGBA", (255, 0, 0, 0), (255, 255, 255)),
        ("LA", (0, 128), (127, 127, 127)),
        ("L", 70, (70, 70, 70)),
        ("I;16", 128 * 256, (128, 128, 128)),
        ("1", 1, (255, 255, 255)),
    ],
)
def test_every_kind_of_pixel_becomes_rgb_on_white(
    tmp_path: Path, mode: str, colour: Any, expected: tuple[int, int, int]
) -> None:
    Image.new(mode, (8, 8), colour).save(tmp_path / "a.png")
    loaded = load_rgb(read_header(tmp_path / "a.png"), (8, 8))
    assert (loaded.mode, loaded.getpixel((4, 4))) == ("RGB", expected)


def test_a_palette_with_a_transparent_colour_is_put_on_white(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([255, 0, 0])
    image.save(tmp_path / "a.png", transparency=0)
    assert load_rgb(read_header(tmp_path / "a.png"), (8, 8)).getpixel((4, 4)) == (255, 255, 255)


def test_pixels_without_a_fixed_white_are_refused(tmp_path: Path) -> None:
    Image.new("F", (8, 8), 0.5).save(tmp_path / "a.tiff")
    (tmp_path / "a.txt").write_text("a caption")
    assert problems_of(data(tmp_path)) == [
        f"{tmp_path}/a.tiff: cannot be read (its pixels have 32 bits and no fixed white; save it with 8 or 16 bits); "
        "replace or remove it, or set data.bad_image: warn"
    ]


def test_an_image_cut_off_behind_its_header_is_named_when_it_is_decoded(tmp_path: Path) -> None:
    path = add_image(tmp_path / "a.bmp")
    path.write_bytes(path.read_bytes()[:-100])
    (photo,) = scan(data(tmp_path)).train
    with pytest.raises(InputError) as caught:
        load_rgb(photo, (64, 64))
    assert str(caught.value) == (
        f"{path}: cannot be read (image file is truncated (20 bytes not processed)); replace or remove it"
    )


def test_the_quickstart_holds_32_small_pictures_with_captions() -> None:
    dataset = scan(data(QUICKSTART, trigger="risograph"))
    assert (len(dataset.train), len(dataset.validation), dataset.warnings) == (32, 0, ())
    assert dataset.train[4].caption == "crocodile risograph"
    assert all(photo.caption.endswith(" risograph") for photo in dataset.train)
    assert {(photo.width, photo.height) for photo in dataset.train} == {(64, 64)}
    assert max(photo.path.stat().st_size for photo in dataset.train) < 12_000


def test_a_dataset_is_scanned_without_torch_and_numpy() -> None:
    code = (
        "import sys; from trainer.config.sections import DataConfig\n"
        "from trainer.data.images import buckets, image_files\n"
        f"image_files.scan(DataConfig(path={str(QUICKSTART)!r})); print({{'torch', 'numpy'}} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
