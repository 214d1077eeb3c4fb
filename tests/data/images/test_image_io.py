"""Image files as they are decoded: orientation, colours, sizes."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from tests.data.images import profiles
from tests.data.images.profiles import (
    ADOBE_RGB,
    DISPLAY_P3,
    SRGB,
    cmyk_profile,
    gamma_curve,
    grey_profile,
    rgb_profile,
    srgb_curve,
)
from trainer.data.images import png_chunks
from trainer.data.images.image_io import ImageFile, load_mask, load_rgb, read_header
from trainer.system.errors import InputError

ORIENTATION = 0x0112
XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="{}"/></rdf:RDF></x:xmpmeta>'
)
QUARTERS = ("red", "lime", "blue", "yellow")
"""Colours of the four quarters of a picture that stands upright: upper left, upper right, lower left, lower right."""
SHOWN = {1: "0123", 2: "1032", 3: "3210", 4: "2301", 5: "0213", 6: "2031", 7: "3120", 8: "1302"}
"""Quarters of the stored picture in the order that they are shown in, by orientation (EXIF 2.32, section 4.6.4)."""


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def put_behind_pixels(png: bytes, chunks: bytes) -> bytes:
    end = png.rindex(b"IEND") - 4
    return png[:end] + chunks + png[end:]


def exif_of(orientation: int) -> bytes:
    """An EXIF block with an orientation, without the six letters that JPEG puts before it."""
    return b"MM\0\x2a" + struct.pack(">IHHHIHHI", 8, 1, ORIENTATION, 3, 1, orientation, 0, 0)


def quarters() -> Image.Image:
    """96 x 48: the quarters in QUARTERS' colours."""
    image = Image.new("RGB", (96, 48))
    for number, colour in enumerate(QUARTERS):
        left, upper = 48 * (number % 2), 24 * (number // 2)
        image.paste(colour, (left, upper, left + 48, upper + 24))
    return image


def encoded(format: str, mode: str = "RGB", **save: Any) -> bytes:
    buffer = io.BytesIO()
    quarters().convert(mode).save(buffer, format, **save)
    return buffer.getvalue()


def late_png(make: Callable[[int], bytes], **save: Any) -> Callable[[int], bytes]:
    return lambda orientation: put_behind_pixels(encoded("PNG", **save), make(orientation))


def jpeg_exif(orientation: int) -> bytes:
    return b"Exif\0\0" + exif_of(orientation)


def raw_profile(orientation: int) -> bytes:
    """EXIF as ImageMagick writes it, hexadecimal in a text."""
    text = f"\nexif\n{len(jpeg_exif(orientation)):8d}\n{jpeg_exif(orientation).hex()}\n"
    return chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text.encode()))


def with_frames(format: str, **save: Any) -> bytes:
    """With a second picture behind the first."""
    return encoded(format, save_all=True, append_images=[Image.new("RGB", (96, 48), "gray")], **save)


ORIENTED: dict[str, Callable[[int], bytes]] = {
    "a.png": lambda n: encoded("PNG", exif=jpeg_exif(n)),
    "late.png": late_png(lambda n: chunk(b"eXIf", exif_of(n))),
    "late_xmp.png": late_png(lambda n: chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.format(n).encode())),
    "late_text.png": late_png(raw_profile),
    "later.png": late_png(lambda n: chunk(b"tIME", bytes(7)) + chunk(b"eXIf", exif_of(n)), exif=jpeg_exif(1)),
    "animated.png": lambda n: with_frames("PNG", exif=jpeg_exif(n)),
    "a.jpg": lambda n: encoded("JPEG", exif=jpeg_exif(n), quality=95),
    "xmp.jpg": lambda n: encoded("JPEG", xmp=XMP.format(n).encode(), quality=95),
    "camera.jpg": lambda n: with_frames("MPO", exif=jpeg_exif(n), quality=95),
    "a.webp": lambda n: encoded("WEBP", exif=exif_of(n), lossless=True),
    "xmp.webp": lambda n: encoded("WEBP", xmp=XMP.format(n).encode(), lossless=True),
    "animated.webp": lambda n: with_frames("WEBP", exif=exif_of(n), lossless=True),
    "a.tiff": lambda n: encoded("TIFF", tiffinfo={ORIENTATION: n}),
    "alpha.tif": lambda n: encoded("TIFF", "RGBA", tiffinfo={ORIENTATION: n}),
    "packed.tif": lambda n: encoded("TIFF", tiffinfo={ORIENTATION: n}, compression="tiff_lzw"),
    "pages.tif": lambda n: with_frames("TIFF", tiffinfo={ORIENTATION: n}),
    "xmp.tif": lambda n: encoded("TIFF", tiffinfo={700: XMP.format(n).encode()}),
}


@pytest.mark.parametrize("name", ORIENTED)
def test_all_eight_orientations_are_known_from_the_header_and_shown_upright(tmp_path: Path, name: str) -> None:
    for orientation, order in SHOWN.items():
        file = tmp_path / name
        file.write_bytes(ORIENTED[name](orientation))
        picture = read_header(file)
        size = (96, 48) if orientation < 5 else (48, 96)
        assert (orientation, picture.width, picture.height) == (orientation, *size)
        shown = np.array(load_rgb(picture, size), dtype=int)
        expected = Image.new("RGB", (2, 2))
        for place, quarter in enumerate(order):
            expected.putpixel(
                (place % 2, place // 2), Image.new("RGB", (1, 1), QUARTERS[int(quarter)]).getpixel((0, 0))
            )
        middles = shown[size[1] // 4 :: size[1] // 2, size[0] // 4 :: size[0] // 2]
        assert np.abs(middles - np.array(expected, dtype=int)).max() <= 2


@pytest.mark.parametrize("name", ["late.png", "pages.tif"])
def test_a_mask_is_placed_as_its_photo_wherever_its_orientation_stands(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(ORIENTED[name](6))
    mask = read_header(tmp_path / name)
    levels = np.array(load_mask(mask, (2, 4)))
    assert (mask.width, mask.height, levels.shape) == (48, 96, (4, 2))
    assert [round(float(level)) for level in levels[::2].ravel()] == [29, 76, 226, 150]  # blue red, yellow green


class Counted(io.FileIO):
    """A file that counts how often it is read."""

    num_reads = 0

    def read(self, size: int | None = -1) -> bytes:  # type: ignore[override]
        self.num_reads += 1
        return super().read(size)


def test_an_orientation_behind_the_pixels_is_found_without_a_look_at_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    head, data = encoded("PNG").split(chunk(b"IEND"))[0].split(b"IDAT")[0][:-4], bytes(8192)
    pixels = chunk(b"IDAT", data) * 1000 + chunk(b"IDAT", data[:100])
    file.write_bytes(head + pixels + chunk(b"eXIf", exif_of(6)) + chunk(b"IEND"))
    with Counted(file) as stream:
        assert png_chunks.with_late_metadata(stream) == head + chunk(b"eXIf", exif_of(6)) + chunk(b"IDAT")
        assert stream.num_reads < 25


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        (b"\0\0", None),
        (bytes(40), None),
        (b"\xff\xff\xff\xffIDAT", None),
        (b"\0\0\0\0IDAT" * 9, None),
        (b"\xff\xff\xff\xffeXIf", "its eXIf chunk is cut off"),
        (chunk(b"eXIf", exif_of(6))[:20], "its eXIf chunk is cut off"),
        (chunk(b"eXIf", b"no EXIF"), "not a TIFF file (header b'no EXIF' not valid)"),
    ],
)
def test_damage_behind_the_pixels_is_passed_over_or_named(tmp_path: Path, behind: bytes, said: str | None) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(encoded("PNG")[:-12] + behind)
    if said is None:
        assert read_header(file) == ImageFile(str(file), 96, 48)
        return
    with pytest.raises(InputError) as caught:
        read_header(file)
    assert str(caught.value) == f"{file}: cannot be read ({said}); replace or remove it"


@pytest.mark.filterwarnings("ignore:.*(EXIF|Truncated)")
def test_a_png_damaged_anywhere_is_read_or_named(tmp_path: Path) -> None:
    file, numbers = tmp_path / "a.png", random.Random(0)
    sound = ORIENTED["late.png"](6)
    outcomes = []
    for _ in range(300):
        damaged = bytearray(sound)
        for _ in range(numbers.choice((1, 3))):
            damaged[numbers.randrange(len(damaged))] = numbers.choice((0, 255, numbers.randrange(256)))
        file.write_bytes(damaged[: numbers.choice((len(damaged), numbers.randrange(len(damaged))))])
        try:
            picture = read_header(file)
            load_rgb(picture, (8, 8))
        except InputError as error:
            assert "\n" not in str(error) and str(file) in str(error)
            outcomes.append("named")
        else:
            outcomes.append("read")
    assert min(outcomes.count("named"), outcomes.count("read")) > 20


@pytest.mark.parametrize("load", [load_rgb, load_mask])
def test_a_file_that_was_replaced_by_one_of_another_size_is_not_cropped_silently(
    tmp_path: Path, load: Callable[..., Image.Image]
) -> None:
    file = tmp_path / "a.png"
    quarters().save(file)
    picture = read_header(file)
    quarters().rotate(90, expand=True).save(file)
    with pytest.raises(InputError) as caught:
        load(picture, (96, 48))
    assert str(caught.value) == (
        f"{file}: has 48 x 96 pixels, and had 96 x 48 when it was found; if it was replaced, start again, "
        "else save it again"
    )


# Colours


def colours(mode: str, channels: int) -> Image.Image:
    """4,096 random colours, 64 x 64."""
    return Image.frombytes(mode, (64, 64), random.Random(0).randbytes(4096 * channels))


def saved(folder: Path, image: Image.Image, profile: bytes | None, name: str = "a.png") -> ImageFile:
    image.save(folder / name, icc_profile=profile)
    return read_header(folder / name)


def as_loaded(picture: ImageFile) -> np.ndarray[Any, Any]:
    """(4096, 3), 0 to 255."""
    return np.array(load_rgb(picture, (64, 64)), dtype=float).reshape(-1, 3)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.webp"])
@pytest.mark.parametrize(
    ("profile", "reference"),
    [
        (rgb_profile(DISPLAY_P3, srgb_curve()), profiles.srgb_of_p3),
        (rgb_profile(ADOBE_RGB, gamma_curve(563 / 256)), profiles.srgb_of_adobe),
    ],
    ids=["Display P3", "Adobe RGB"],
)
def test_wide_colours_become_the_srgb_of_the_published_formulas(
    tmp_path: Path, name: str, profile: bytes, reference: Callable[[Any], Any]
) -> None:
    image = colours("RGB", 3)
    given = np.array(image, dtype=float).reshape(-1, 3)
    image.save(tmp_path / name, icc_profile=profile, lossless=True)
    picture = read_header(tmp_path / name)
    difference = np.abs(as_loaded(picture) - reference(given))
    assert picture.profile == "used"
    assert difference.max() < 2 and difference.mean() < 0.4
    assert np.abs(given - reference(given)).mean() > 5


def test_transparent_parts_are_white_in_any_profile(tmp_path: Path) -> None:
    image = colours("RGB", 3)
    image.putalpha(0)
    assert as_loaded(saved(tmp_path, image, rgb_profile(DISPLAY_P3, srgb_curve()))).min() == 255


@pytest.mark.parametrize("mode", ["L", "LA", "I;16"])
def test_greys_of_a_profile_become_those_of_srgb(tmp_path: Path, mode: str) -> None:
    levels = np.arange(4096).reshape(64, 64) % 256
    image = Image.fromarray(levels.astype(np.uint8)).convert("LA" if mode == "LA" else "L")
    if mode == "I;16":
        image = Image.fromarray((levels * 257).astype(np.uint16))
    found = as_loaded(saved(tmp_path, image, grey_profile(2.0)))
    assert np.abs(found - profiles.srgb_of_squared_grey(levels.reshape(-1, 1).astype(float))).max() < 1.5


def test_greys_with_a_profile_of_colours_are_grey(tmp_path: Path) -> None:
    levels = np.arange(4096).reshape(64, 64) % 256
    found = as_loaded(saved(tmp_path, Image.fromarray(levels.astype(np.uint8)), rgb_profile(DISPLAY_P3, srgb_curve())))
    assert np.abs(found - levels.reshape(-1, 1)).max() <= 1


def lab_of(inks: tuple[int, ...]) -> tuple[float, float, float]:
    cyan, magenta, yellow, black = inks
    light = 0 if black else 100 - 20 * (cyan + magenta + yellow)
    return light, *((0, 0) if black else (10 * magenta - 15 * cyan, 20 * yellow - 10 * cyan))


@pytest.mark.parametrize("name", ["a.tif", "a.jpg"])
def test_printing_inks_become_the_colours_of_their_profile(tmp_path: Path, name: str) -> None:
    corners = [(c, m, y, k) for c in (0, 1) for m in (0, 1) for y in (0, 1) for k in (0, 1)]
    fields = np.repeat(np.repeat(np.array([corners], dtype=np.uint8) * 255, 16, axis=1), 16, axis=0)
    picture = saved(tmp_path, Image.fromarray(fields, "CMYK"), cmyk_profile(lab_of), name)
    middles = np.array(load_rgb(picture, (256, 16)), dtype=float)[8, 8::16]
    expected = profiles.srgb_of_lab(np.array([lab_of(corner) for corner in corners], dtype=float))
    assert picture.profile == "used"
    assert np.abs(middles - expected).max() < 3


@pytest.mark.parametrize(
    "profile",
    [None, ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(), rgb_profile(SRGB, srgb_curve())],
    ids=["none", "littlecms", "published"],
)
def test_colours_of_srgb_are_left_as_they_are_bit_for_bit(tmp_path: Path, profile: bytes | None) -> None:
    image = colours("RGB", 3)
    picture = saved(tmp_path, image, profile)
    assert picture.profile == "none"
    assert load_rgb(picture, (64, 64)).tobytes() == image.tobytes()


@pytest.mark.parametrize(
    "profile",
    [b"not a profile", rgb_profile(DISPLAY_P3, srgb_curve())[:200], grey_profile(2.0), cmyk_profile(lab_of)],
    ids=["bytes", "cut off", "grey", "CMYK"],
)
def test_a_profile_that_cannot_be_used_leaves_the_colours_as_they_are(tmp_path: Path, profile: bytes) -> None:
    image = colours("RGB", 3)
    picture = saved(tmp_path, image, profile)
    assert picture.profile == "broken"
    assert load_rgb(picture, (64, 64)).tobytes() == image.tobytes()


def test_a_mask_means_the_same_with_and_without_a_profile(tmp_path: Path) -> None:
    image = colours("RGB", 3)
    plain = saved(tmp_path, image, None, "plain.png")
    wide = saved(tmp_path, image, rgb_profile(ADOBE_RGB, gamma_curve(563 / 256)), "wide.png")
    assert load_mask(wide, (32, 32)).tobytes() == load_mask(plain, (32, 32)).tobytes()


# Sizes


def header(file: Path, width: int, height: int) -> Path:
    """A PNG of this size with a header only."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT"))
    return file


def test_a_telephone_s_200_megapixels_are_read_without_a_warning(tmp_path: Path) -> None:
    file = header(tmp_path / "a.png", 16320, 12240)
    assert read_header(file) == ImageFile(str(file), 16320, 12240)


def test_a_picture_above_the_limit_is_refused_with_its_size_the_limit_and_the_remedy(tmp_path: Path) -> None:
    file = header(tmp_path / "a.png", 20000, 14000)
    with pytest.raises(InputError) as caught:
        read_header(file)
    assert str(caught.value) == (
        f"{file}: cannot be read (280.0 megapixels are more than 268.4; scale it down); replace or remove it"
    )


def test_a_webp_that_would_take_gigabytes_to_decode_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.webp"
    Image.new("RGB", (32, 32)).save(file)
    content = file.read_bytes()
    assert content[23:30] == struct.pack("<3sHH", b"\x9d\x01\x2a", 32, 32)
    file.write_bytes(content[:26] + struct.pack("<HH", 8192, 8192) + content[30:])
    assert (read_header(file).width, read_header(file).height) == (8192, 8192)
    file.write_bytes(content[:26] + struct.pack("<HH", 8200, 8200) + content[30:])
    with pytest.raises(InputError) as caught:
        read_header(file)
    assert str(caught.value) == (
        f"{file}: cannot be read (67.2 megapixels are more than 67.1, the limit of WEBP; save it as PNG, or "
        "scale it down); replace or remove it"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "save"), [("a.png", {}), ("a.tif", {}), ("packed.tif", {"compression": "group4"})])
@pytest.mark.parametrize("side", [9500, 14000])
def test_pictures_of_90_and_196_megapixels_are_decoded(
    tmp_path: Path, name: str, save: dict[str, Any], side: int
) -> None:
    Image.new("1", (side, side), 1).save(tmp_path / name, **save)
    loaded = load_rgb(read_header(tmp_path / name), (64, 64))
    assert loaded.getextrema() == ((255, 255),) * 3
