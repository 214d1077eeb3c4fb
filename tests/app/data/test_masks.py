"""Masks as the page writes them, on real files, and as a run reads them."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from app.data.masks import MOST_FORMER, ChangedElsewhere, Masks, Place, canvas_size, place_of, shown, stamp, waiting
from app.data.scans import Named, ScanResult, Scans
from tests.data.images.test_image_tables import encoded as encoded_image
from tests.data.images.test_image_tables import write_tar
from tests.runs import make_pictures, run_config
from trainer.config.schema import RunConfig
from trainer.data.images.image_files import scan
from trainer.data.images.image_io import ImageFile, load_mask, read_header
from trainer.system.errors import InputError

SCANNED_WITHIN_S = 30


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def painted(size: tuple[int, int] = (64, 64)) -> Image.Image:
    image = Image.new("L", size)
    ImageDraw.Draw(image).ellipse((8, 8, 40, 30), 255)
    return image


def place(config: RunConfig, image: Path) -> Place:
    scans, deadline = Scans(), time.monotonic() + SCANNED_WITHIN_S
    while not (found := scans.of(config)).is_complete:
        assert time.monotonic() < deadline
    return place_of(config.data, found, image)


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        action()
    return str(caught.value)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return make_pictures(tmp_path / "images", 3)


@pytest.fixture
def masks(tmp_path: Path) -> Masks:
    return Masks(tmp_path / "kept")


@pytest.fixture
def first(images: Path) -> Place:
    """Where the mask of the first image, 64 x 64, goes: no folder of masks is named yet."""
    return place(run_config(images), images / "00.png")


def test_a_mask_is_written_next_to_the_folder_of_data_and_read_by_a_run(images: Path, masks: Masks, first: Place):
    assert (first.folder, first.field, first.is_set) == (images.with_name("images-masks"), "data.masks", False)
    assert (masks.mask_of(first), stamp(first)) == (None, "")
    digest = masks.save(first, png(painted()), "")
    file = images.with_name("images-masks") / "00.png"
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    with Image.open(file) as written:
        assert (written.format, written.mode, written.tobytes()) == ("PNG", "L", painted().tobytes())
    (image, *_) = scan(run_config(images, data__masks=str(first.folder)).data).train
    assert image.mask is not None
    assert image.mask.path == file
    assert load_mask(image.mask, (64, 64)).convert("L").tobytes() == painted().tobytes()
    loaded = masks.mask_of(first)
    assert loaded is not None
    assert (loaded.digest, loaded.levels.tobytes()) == (digest, painted().tobytes())


def test_a_mask_lies_where_its_image_lies_below_the_folder(images: Path, masks: Masks):
    (images / "some" / "deep.er").mkdir(parents=True)
    (images / "00.png").rename(images / "some" / "deep.er" / "a.b.png")
    (images / "00.txt").rename(images / "some" / "deep.er" / "a.b.txt")
    given = run_config(images, data__masks=str(images / "masks"))
    (images / "masks").mkdir()
    Image.new("L", (96, 48)).save(images / "masks" / "01.png")
    deep = place(given, images / "some" / "deep.er" / "a.b.png")
    masks.save(deep, png(painted()), "")
    assert (images / "masks" / "some" / "deep.er" / "a.b.png").is_file()
    assert {one.mask.path.name for one in scan(given.data).train if one.mask} == {"01.png", "a.b.png"}


def test_a_mask_stays_in_its_folder_however_the_accents_of_that_are_written(images: Path, masks: Masks):
    apart = unicodedata.normalize("NFD", "été")
    for folder in (images / apart, images / "masks" / apart):
        folder.mkdir(parents=True)
    (images / "00.png").rename(images / apart / "00.png")
    (images / "00.txt").rename(images / apart / "00.txt")
    Image.new("L", (64, 64)).save(images / "masks" / apart / "00.png")
    given = run_config(images, data__masks=str(images / "masks"))
    deep = place(given, images / apart / "00.png")
    loaded = masks.mask_of(deep)
    assert loaded is not None and stamp(deep)
    masks.save(deep, png(painted()), loaded.digest)
    assert os.listdir(images / "masks") == [apart]
    assert [one.mask is not None for one in scan(given.data).train] == [False, False, True]


def test_each_folder_has_its_own_masks_and_held_out_images_those_of_data_masks(images: Path, tmp_path: Path):
    for name in ("own", "held"):
        make_pictures(tmp_path / name, 1).joinpath("00.png").rename(tmp_path / name / f"{name}.png")
        (tmp_path / name / "00.txt").rename(tmp_path / name / f"{name}.txt")
    given = run_config(images, data__folders=[{"path": str(tmp_path / "own")}], data__validation=str(tmp_path / "held"))
    own = place(given, tmp_path / "own" / "own.png")
    assert (own.field, own.folder) == ("data.folders.0.masks", tmp_path / "own-masks")
    held = place(given, tmp_path / "held" / "held.png")
    assert (held.field, held.folder) == ("data.masks", tmp_path / "held-masks")
    (tmp_path / "m").mkdir()
    Image.new("L", (64, 64)).save(tmp_path / "m" / "00.png")
    named = run_config(images, data__masks=str(tmp_path / "m"), data__folders=[{"path": str(tmp_path / "own")}])
    assert (place(named, tmp_path / "own" / "own.png").folder) == tmp_path / "m"


def test_a_new_image_that_has_a_mask_already_is_known(images: Path, tmp_path: Path):
    for folder, name in (("m", "00.png"), ("m", "a.b.JPG"), ("m", "c.Png"), ("m", ".d.png"), ("own-m", "02.png")):
        (tmp_path / folder).mkdir(exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / folder / name)
    (tmp_path / "own").mkdir()
    (tmp_path / "m" / "folder.png").mkdir()
    own = [{"path": str(folder), "masks": str(tmp_path / "own-m")} for folder in (tmp_path / "own", images)]
    data = run_config(images, data__masks=str(tmp_path / "m"), data__folders=own[:1]).data
    names = ["00.jpg", "01.png", "02.png", "a.b.png", "c.jpg", ".d.png", "folder.png", "a\0.png", "", "../m/00/.."]
    found = {"00.jpg": tmp_path / "m/00.png", "a.b.png": tmp_path / "m/a.b.JPG", "c.jpg": tmp_path / "m/c.Png"}
    assert waiting(data, images, names) == found
    twice = run_config(images, data__masks=str(tmp_path / "m"), data__folders=own).data
    assert waiting(twice, images, names) == found | {"02.png": tmp_path / "own-m/02.png"}
    assert waiting(data, tmp_path / "own", names) == {"02.png": tmp_path / "own-m/02.png"}
    assert waiting(data, tmp_path, names) == {}
    (tmp_path / "images-masks").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "images-masks/01.png")
    assert waiting(run_config(images).data, images, names) == {}, "no folder of masks is set, so a run reads none"


def test_an_image_of_a_table_has_its_mask_by_the_name_that_the_table_gives(tmp_path: Path, masks: Masks):
    tar = write_tar(tmp_path / "a.tar", {"some/photo.png": encoded_image((9, 9, 9)), "some/photo.txt": b"a"})
    (member,) = scan(run_config(tar).data).train
    one = place(run_config(tar), member.path)
    assert one.folder == tmp_path / "a-masks"
    masks.save(one, png(painted((member.width, member.height))), "")
    (again,) = scan(run_config(tar, data__masks=str(one.folder)).data).train
    assert again.mask is not None
    assert again.mask.path == one.file


def test_an_image_on_its_side_has_an_upright_mask(images: Path, masks: Masks):
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(images / "01.png") as image:
        image.convert("RGB").save(images / "01.png", exif=exif)
    on_side = place(run_config(images), images / "01.png")
    assert "painted at 48 x 96" in refused(lambda: masks.save(on_side, png(painted((96, 48))), ""))
    masks.save(on_side, png(painted((48, 96))), "")
    with Image.open(on_side.file) as written:
        assert written.size == (48, 96)


def test_the_mask_of_a_large_image_is_painted_small_and_written_large(images: Path, masks: Masks):
    Image.new("RGB", (4100, 30)).save(images / "00.png")
    assert canvas_size(read_header(images / "00.png")) == (2048, 15)
    large = place(run_config(images), images / "00.png")
    half = Image.new("L", (2048, 15))
    half.paste(255, (0, 0, 1024, 15))
    masks.save(large, png(half), "")
    with Image.open(large.file) as written:
        assert (written.size, written.getpixel((2040, 9)), written.getpixel((2060, 9))) == ((4100, 30), 255, 0)
    loaded = masks.mask_of(large)
    assert loaded is not None
    assert loaded.levels.size == (2048, 15)


def with_depth(content: bytes, depth: int, colour: int) -> bytes:
    return content[:24] + struct.pack(">BB", depth, colour) + content[26:]


@pytest.mark.parametrize(
    ("sent", "wrong"),
    [
        (png(painted((64, 63))), "the mask is 64 x 63, but "),
        (png(painted().convert("RGB")), "the mask has 8 bits and colour type 2; it must be 8-bit grayscale"),
        (png(painted().convert("LA")), "the mask has 8 bits and colour type 4; it must be 8-bit grayscale"),
        (png(painted().convert("P")), "the mask has 8 bits and colour type 3; it must be 8-bit grayscale"),
        (png(Image.new("I;16", (64, 64))), "the mask has 16 bits and colour type 0; it must be 8-bit grayscale"),
        (png(painted().convert("1")), "the mask has 1 bits and colour type 0; it must be 8-bit grayscale"),
        (with_depth(png(Image.new("I;16", (64, 64))), 8, 0), "the mask cannot be read ("),
        (png(painted())[:60], "the mask cannot be read ("),
        (b"", "the mask is not a PNG file; reload the page"),
        (b"GIF89a" + bytes(60), "the mask is not a PNG file; reload the page"),
        (bytes(2**22), "a mask of 4194304 bytes is larger than 3145728; paint it with fewer details"),
    ],
    ids=["size", "rgb", "alpha", "palette", "16", "1", "lie", "cut", "empty", "gif", "large"],
)
def test_other_content_is_refused_and_nothing_is_written(masks: Masks, first: Place, sent: bytes, wrong: str):
    assert refused(lambda: masks.save(first, sent, "")).startswith(wrong)
    assert not first.folder.exists()


def test_a_mask_that_was_changed_meanwhile_is_left_as_it_is(masks: Masks, first: Place):
    digest = masks.save(first, png(painted()), "")
    other = png(Image.new("L", (64, 64), 7))
    first.file.write_bytes(other)
    for sent, before in ((png(painted()), digest), (None, digest), (png(painted()), "")):
        with pytest.raises(ChangedElsewhere):
            masks.save(first, sent, before)
    assert first.file.read_bytes() == other


def test_former_masks_are_kept_and_brought_back(masks: Masks, first: Place):
    greys = [Image.new("L", (64, 64), level) for level in (10, 20, 30)]
    digest = ""
    for grey in greys:
        digest = masks.save(first, png(grey), digest)
    assert masks.save(first, None, digest) == ""
    assert not first.file.exists()
    assert [masks.former(first, number).getpixel((0, 0)) for number in range(masks.num_former(first))] == [30, 20, 10]
    assert "3 former masks are kept" in refused(lambda: masks.former(first, 3))


def test_of_many_former_masks_the_newest_and_the_first_are_kept(masks: Masks, first: Place):
    digest = ""
    for level in range(MOST_FORMER + 5):
        digest = masks.save(first, png(Image.new("L", (64, 64), level)), digest)
    kept = [masks.former(first, number).getpixel((0, 0)) for number in range(masks.num_former(first))]
    assert kept == [*range(MOST_FORMER + 3, 3, -1), 0]


def test_a_mask_of_another_kind_of_file_is_read_as_a_run_reads_it_and_replaced(masks: Masks, images: Path):
    folder = images.with_name("own")
    folder.mkdir()
    see_through = Image.new("RGBA", (32, 32), (255, 255, 255, 64))
    see_through.putpixel((0, 0), (0, 0, 0, 255))
    see_through.save(folder / "00.WEBP", lossless=True)
    given = place(run_config(images, data__masks=str(folder)), images / "00.png")
    loaded = masks.mask_of(given)
    assert loaded is not None
    as_read = load_mask(read_header(folder / "00.WEBP"), (64, 64)).convert("L")
    assert (loaded.levels.size, loaded.levels.getpixel((40, 40))) == ((64, 64), 64)
    assert loaded.levels.tobytes() == as_read.tobytes()
    former = (folder / "00.WEBP").read_bytes()
    masks.save(given, png(painted()), loaded.digest)
    assert [file.name for file in folder.iterdir()] == ["00.png"]
    assert masks.former(given, 0).tobytes() == loaded.levels.tobytes()
    (kept,) = (file for file in (images.with_name("kept")).rglob("*.webp"))
    assert kept.read_bytes() == former


@pytest.mark.parametrize(
    ("image", "mask"),
    [("00", "00.Png"), ("00", "00.jfif"), ("caf\u00e9", "cafe\u0301.png"), ("cafe\u0301", "caf\u00e9.Webp")],
)
def test_a_mask_is_found_as_a_run_finds_it_however_its_name_is_written(
    masks: Masks, images: Path, image: str, mask: str
):
    if image != "00":
        for suffix in (".png", ".txt"):
            (images / f"00{suffix}").rename(images / f"{image}{suffix}")
    folder = images.with_name("own")
    folder.mkdir()
    Image.new("L", (64, 64), 90).save(folder / mask, "PNG")
    config = run_config(images, data__masks=str(folder))
    (read,) = (one.mask for one in scan(config.data).train if one.mask)
    assert read.path == folder / mask
    given = place(config, images / f"{image}.png")
    loaded = masks.mask_of(given)
    assert loaded is not None and stamp(given)
    masks.save(given, png(painted()), loaded.digest)
    assert [file.name for file in folder.iterdir()] == [given.file.name]
    assert waiting(config.data, images, [f"{image}.png"]) == {f"{image}.png": given.file}


@pytest.mark.parametrize("kind", ["mask", "folder", "default"])
def test_no_link_is_followed_out_of_the_folder_of_masks(masks: Masks, images: Path, tmp_path: Path, kind: str):
    away = tmp_path / "away"
    away.mkdir()
    Image.new("L", (64, 64), 9).save(away / "00.png")
    content = (away / "00.png").read_bytes()
    (images / "sub").mkdir()
    (images / "00.png").rename(images / "sub" / "00.png")
    (images / "00.txt").rename(images / "sub" / "00.txt")
    folder = tmp_path / "images-masks"
    if kind == "default":
        folder.symlink_to(away)
    else:
        (folder / "sub").mkdir(parents=True)
        Image.new("L", (96, 48)).save(folder / "01.png")
    if kind == "folder":
        (folder / "sub").rmdir()
        (folder / "sub").symlink_to(away)
    if kind == "mask":
        (folder / "sub" / "00.png").symlink_to(away / "00.png")
    given = run_config(images) if kind == "default" else run_config(images, data__masks=str(folder))
    one = place(given, images / "sub" / "00.png")
    for action in (lambda: masks.mask_of(one), lambda: masks.save(one, png(painted()), "")):
        assert "a link" in refused(action)
    assert (away / "00.png").read_bytes() == content
    assert os.listdir(away) == ["00.png"]


def test_only_images_of_the_config_have_masks_and_two_never_share_one(images: Path, tmp_path: Path):
    others = make_pictures(tmp_path / "others", 2)
    given = run_config(images, data__regularization=str(others))
    for image in (others / "00.png", tmp_path / "x.png", Path("/etc/hostname")):
        assert "not an image that is trained with a mask" in refused(lambda image=image: place(given, image))
    with Image.open(images / "00.png") as image:
        image.save(images / "00.bmp")
    assert "give the images different names" in refused(lambda: place(run_config(images), images / "00.png"))


@pytest.mark.parametrize("of", ["data.path", "data.references"])
def test_a_folder_of_masks_that_is_a_folder_of_images_by_another_path_is_refused(images: Path, tmp_path: Path, of: str):
    (tmp_path / "link").symlink_to(images)
    given = run_config(images, data__masks=str(tmp_path / "link"))
    if of == "data.references":
        (images / "00.txt").unlink()
        given = run_config(
            make_pictures(tmp_path / "edited", 3), data__masks=str(tmp_path / "link"), data__references=str(images)
        )
    wrong = refused(lambda: place(given, (images if of == "data.path" else tmp_path / "edited") / "00.png"))
    assert wrong == (
        f"data.masks: {tmp_path}/link is a folder of images, which masks would replace; name another in New run"
    )


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", ".hidden/a", "a//b", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(images: Path, name: str):
    found = ScanResult(1, named={images / "00.png": Named("data.path", name)})
    wrong = refused(lambda: place_of(run_config(images).data, found, images / "00.png"))
    assert wrong.endswith("a mask of this name is not possible; rename the image in its table")
    assert shown(run_config(images).data, found, images / "00.png") is None


def test_the_size_of_a_canvas_is_that_of_the_image_up_to_2048_pixels():
    sizes = [(1, 1), (2048, 2048), (2049, 100), (6000, 4000), (9000, 2)]
    found = [canvas_size(ImageFile("a", *size)) for size in sizes]
    assert found == [(1, 1), (2048, 2048), (2048, 100), (2048, 1365), (2048, 1)]
