"""What is said of images that can be trained on, but not as a user expects."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.data.images.profiles import DISPLAY_P3, rgb_profile, srgb_curve
from tests.data.images.test_image_files import add_image, data
from trainer.data.images import image_warnings
from trainer.data.images.buckets import bucket_sizes, choose_bucket
from trainer.data.images.image_files import scan
from trainer.data.images.image_io import ImageFile

SIZES = bucket_sizes(1024, 16, 2.0)


def sizes_said(*sizes: tuple[int, int]) -> list[str]:
    """What is said of images of these sizes at 1024 pixels, named by their place."""
    pictures = [ImageFile(f"{number}.png", *size) for number, size in enumerate(sizes)]
    sized = [(picture, choose_bucket(picture.size, SIZES)) for picture in pictures]
    return list(image_warnings.of_buckets(sized))


def test_images_enlarged_more_than_one_and_a_half_times_are_counted_with_the_first_and_its_factor() -> None:
    assert sizes_said((1024, 1024), (700, 700), (683, 683)) == []
    assert sizes_said((700, 700), (600, 680), (64, 64)) == [
        "2 images are enlarged more than 1.5 times to fill a bucket, and trained blurred: first 1.png 1.6 times; "
        "use larger files, or lower data.resolution"
    ]


def test_images_cropped_by_more_than_a_third_are_counted_with_the_first_and_the_share_kept() -> None:
    assert sizes_said((2800, 1000), (1000, 2800)) == []
    assert sizes_said((4000, 2000), (10000, 2000), (1000, 20000)) == [
        "2 images lose more than a third to the crop to a bucket: first 1.png of which 38% is kept; "
        "crop by hand, raise data.max_aspect, or set data.fit: pad"
    ]


def test_a_strip_of_pixels_is_named_for_both() -> None:
    assert sizes_said((4000, 40)) == [
        "1 image is enlarged more than 1.5 times to fill a bucket, and trained blurred: first 0.png 18.4 times; "
        "use larger files, or lower data.resolution",
        "1 image loses more than a third to the crop to a bucket: first 0.png of which 2% is kept; "
        "crop by hand, raise data.max_aspect, or set data.fit: pad",
    ]


@pytest.mark.parametrize("suffix", ["png", "webp", "tiff"])
def test_a_file_of_several_frames_is_named_once_and_its_first_frame_is_used(tmp_path: Path, suffix: str) -> None:
    add_image(tmp_path / "a.png")
    for name, colours in (("b", ("lime",)), ("c", ("lime", "blue"))):
        frames = [Image.new("RGB", (40, 20), colour) for colour in colours]
        add_image(tmp_path / f"{name}.{suffix}", save_all=True, append_images=frames)
    assert scan(data(tmp_path)).warnings == (
        f"2 images have several frames or pages, of which only the first one is used: first {tmp_path}/b.{suffix}",
    )


def test_the_previews_in_a_camera_s_file_are_not_named(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20)).save(
        tmp_path / "a.jpg", "MPO", save_all=True, append_images=[Image.new("RGB", (40, 20), "blue")]
    )
    (tmp_path / "a.txt").write_text("a cat")
    assert scan(data(tmp_path)).warnings == ()


def test_profiles_that_cannot_be_used_are_one_sentence_and_others_none(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png", icc_profile=rgb_profile(DISPLAY_P3, srgb_curve()))
    for number in range(2):
        add_image(tmp_path / f"b{number}.png", size=(40 + number, 20), icc_profile=b"not a profile")
    assert scan(data(tmp_path)).warnings == (
        f"2 images have a colour profile that cannot be used and is ignored: first {tmp_path}/b0.png; "
        "save it again as sRGB",
    )


def test_copies_are_found_across_all_folders_whatever_their_names(tmp_path: Path) -> None:
    first = add_image(tmp_path / "photos" / "a.png")
    add_image(tmp_path / "photos" / "b.png", size=(20, 40))
    for name in ("more/x.png", "others/y.png", "held/z.png"):
        add_image(tmp_path / name).write_bytes(first.read_bytes())
    cfg = data(
        tmp_path / "photos",
        folders=[{"path": str(tmp_path / "more")}],
        regularization=str(tmp_path / "others"),
        validation=str(tmp_path / "held"),
    )
    assert scan(cfg).warnings == (
        f"3 images have the same bytes as another one: first {tmp_path}/more/x.png as {first}; remove copies, "
        "or give their folder a weight in data.folders",
    )


def test_files_that_differ_in_the_middle_only_are_no_copies(tmp_path: Path) -> None:
    middle, end = 5000 * b"a", 5000 * b"z"
    files = [tmp_path / name for name in "abc"]
    for file, content in zip(files, (middle + end, b"b" + middle[1:] + end, middle + end), strict=True):
        file.write_bytes(content)
    assert list(image_warnings.of_copies(files[:2])) == []
    assert list(image_warnings.of_copies(files)) == [
        f"1 image has the same bytes as another one: first {files[2]} as {files[0]}; remove copies, "
        "or give their folder a weight in data.folders"
    ]


def test_masks_may_be_copies_of_their_photos(tmp_path: Path) -> None:
    for folder in ("photos", "masks"):
        add_image(tmp_path / folder / "a.png")
    assert scan(data(tmp_path / "photos", masks=str(tmp_path / "masks"))).warnings == ()


def test_references_that_are_their_images_are_named(tmp_path: Path) -> None:
    photos, before = tmp_path / "photos", tmp_path / "before"
    for folder in (photos, before):
        add_image(folder / "a.png")
    ending = (
        f"the same file as a reference, which teaches to change nothing: first {photos}/a.png and {before}/a.png; "
        "name the folder of the images before the edit, or replace those"
    )
    cfg = data(photos, references=str(before))
    assert scan(cfg).warnings == (f"data.references: every image is {ending}",)
    add_image(photos / "b.png", size=(60, 20))
    add_image(before / "b.png", size=(20, 40))
    assert scan(cfg).warnings == (f"data.references: 1 image is {ending}",)


def test_a_caption_of_two_images_is_named_with_both(tmp_path: Path) -> None:
    for name in ("a.png", "b.jpg", "b.png", "b.webp", "c.jpg", "c.png"):
        add_image(tmp_path / name)
    shared, copies = scan(data(tmp_path)).warnings
    assert shared == (
        f"2 captions are shared by images of one name: first {tmp_path}/b.txt by b.jpg and b.png and b.webp; "
        "rename those that need their own"
    )
    assert copies.startswith("3 images have the same bytes")
