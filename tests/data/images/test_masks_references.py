"""What goes with the images of the data: masks, reference images, and regularization images beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.data.images.test_image_files import add_image, data, problems_of
from trainer.data.images.image_files import CaptionedImage, scan
from trainer.data.images.image_io import ImageFile, load_mask, read_header


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two images, one of them in a folder below."""
    add_image(tmp_path / "photos" / "a.png")
    add_image(tmp_path / "photos" / "sub" / "b.jpg")
    return tmp_path / "photos"


def add_picture(path: Path, size: tuple[int, int] = (40, 20)) -> Path:
    return add_image(path, caption=None, size=size)


def names(pictures: tuple[ImageFile, ...]) -> list[str]:
    return [picture.path.name for picture in pictures]


def by_name(photos: tuple[CaptionedImage, ...]) -> dict[str, CaptionedImage]:
    return {photo.path.stem: photo for photo in photos}


# Masks


def test_a_mask_lies_where_its_photo_lies_whatever_its_kind_of_file(photos: Path, tmp_path: Path) -> None:
    mask = add_picture(tmp_path / "masks" / "sub" / "b.webp", size=(20, 10))
    add_picture(tmp_path / "masks" / "a.PNG")
    found = scan(data(photos, masks=str(tmp_path / "masks")))
    assert by_name(found.train)["b"].mask == ImageFile(str(mask), 20, 10)
    assert (len(found.train), found.warnings) == (2, ())


def test_masks_below_the_folder_of_the_data_are_no_photos(photos: Path) -> None:
    add_picture(photos / "masks" / "a.png")
    found = scan(data(photos, masks=str(photos / "masks")))
    assert sorted(by_name(found.train)) == ["a", "b"]


def test_photos_without_a_mask_and_masks_without_a_photo_are_counted(photos: Path, tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    for name in ("a.png", "b.png", "c.png"):
        add_picture(masks / name)
    found = scan(data(photos, masks=str(masks)))
    assert by_name(found.train)["b"].mask is None
    assert found.warnings == (
        f"data.masks: 2 of 3 images belong to no image of the data, first {masks}/b.png",
        f"data.masks: 1 of 2 images have no mask and are in the loss as a whole, first {photos}/sub/b.jpg",
    )


def test_validation_images_have_masks_too(photos: Path, tmp_path: Path) -> None:
    add_image(tmp_path / "held" / "c.png")
    for name in ("a.png", "c.png", "sub/b.png"):
        add_picture(tmp_path / "masks" / name)
    (held,) = scan(data(photos, masks=str(tmp_path / "masks"), validation=str(tmp_path / "held"))).validation
    assert held.mask is not None
    (held,) = scan(data(photos, masks=str(tmp_path / "masks"), validation=1)).validation
    assert held.mask is not None


def test_a_mask_of_another_shape_than_its_photo_is_refused_with_both_sizes(photos: Path, tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    add_picture(masks / "a.png", size=(20, 40))
    add_picture(masks / "sub" / "b.png", size=(21, 10))
    assert problems_of(data(photos, masks=str(masks))) == [
        f"data.masks: {masks}/a.png is 20 x 40, but {photos}/a.png is 40 x 20; "
        "give the mask its image's size or aspect ratio"
    ]


def test_a_mask_that_belongs_to_two_photos_is_refused(photos: Path, tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    other = add_image(tmp_path / "held" / "a.png")
    add_picture(masks / "a.png")
    assert problems_of(data(photos, masks=str(masks), validation=str(tmp_path / "held"))) == [
        f"data.masks: {masks}/a.png belongs to both {photos}/a.png and {other}; give the images different names"
    ]


def test_two_masks_of_one_name_are_refused(photos: Path, tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    add_picture(masks / "a.jpg")
    add_picture(masks / "a.png")
    assert problems_of(data(photos, masks=str(masks))) == [
        f"data.masks: {masks}/a.jpg and {masks}/a.png have the same name; remove one of them"
    ]


def test_masks_of_which_none_is_named_as_a_photo_are_refused(photos: Path, tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    add_picture(masks / "a_mask.png")
    assert problems_of(data(photos, masks=str(masks))) == [
        f"data.masks: {masks}: none of its images has the name of an image of the data; "
        f"name the mask of {photos}/a.png a.png"
    ]


def test_folders_that_hold_no_masks_and_masks_that_are_no_images_are_named(photos: Path, tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    assert problems_of(data(photos, masks=str(masks))) == [
        f"data.masks: {masks}: no such folder; give a folder of images named as those of the data"
    ]
    masks.mkdir()
    assert problems_of(data(photos, masks=str(masks))) == [
        f"data.masks: {masks}: the folder is empty; put images named as those of the data into it"
    ]
    (masks / "a.png").write_text("no image")
    unreadable = f"{masks}/a.png: cannot be read (not an image of a known format); replace or remove it"
    assert problems_of(data(photos, masks=str(masks))) == [f"{unreadable}, or set data.bad_image: warn"]
    found = scan(data(photos, masks=str(masks), bad_image="warn"))
    assert list(by_name(found.train)) == ["b"]
    assert f"left out: {unreadable}" in found.warnings


def mask_levels(path: Path, size: tuple[int, int]) -> list[list[float]]:
    mask = load_mask(read_header(path), size)
    return [[float(mask.getpixel((x, y))) for x in range(mask.width)] for y in range(mask.height)]  # type: ignore[arg-type]


def test_a_mask_is_averaged_over_each_area_of_what_is_not_cropped(tmp_path: Path) -> None:
    mask = Image.new("L", (96, 32))
    mask.paste(255, (16, 0, 40, 32))
    mask.paste(100, (64, 0, 80, 32))
    mask.save(tmp_path / "a.png")
    assert mask_levels(tmp_path / "a.png", (4, 2)) == [[255.0, 127.5, 0.0, 100.0]] * 2


@pytest.mark.parametrize(
    ("mode", "colour", "level"),
    [
        ("RGB", (255, 255, 255), 255.0),
        ("L", 51, 51.0),
        ("1", 1, 255.0),
        ("I;16", 51 * 256, 51.0),
        ("RGBA", (255, 255, 255, 51), 51.0),
        ("RGBA", (51, 51, 51, 255), 51.0),
        ("LA", (255, 0), 0.0),
    ],
)
def test_a_mask_is_its_opacity_or_where_nothing_is_transparent_its_brightness(
    tmp_path: Path, mode: str, colour: Any, level: float
) -> None:
    Image.new(mode, (32, 32), colour).save(tmp_path / "a.png")
    assert mask_levels(tmp_path / "a.png", (1, 1)) == [[level]]


# References


def test_references_are_the_image_of_the_photos_name_or_the_numbered_ones(photos: Path, tmp_path: Path) -> None:
    for name in ("a.jpg", "sub/b_0.png", "sub/b_1.webp", "sub/b_2.png"):
        add_picture(tmp_path / "before" / name, size=(30, 50))
    found = by_name(scan(data(photos, references=str(tmp_path / "before"))).train)
    assert names(found["a"].references) == ["a.jpg"]
    assert names(found["b"].references) == ["b_0.png", "b_1.webp", "b_2.png"]
    assert (found["a"].references[0].width, found["a"].references[0].height) == (30, 50)


def test_references_behind_a_gap_or_beside_the_photos_name_are_unused_with_a_warning(
    photos: Path, tmp_path: Path
) -> None:
    before = tmp_path / "before"
    for name in ("a.jpg", "a_0.jpg", "sub/b_0.png", "sub/b_2.png"):
        add_picture(before / name)
    found = scan(data(photos, references=str(before)))
    assert [names(photo.references) for photo in found.train] == [["a.jpg"], ["b_0.png"]]
    assert found.warnings == (f"data.references: 2 of 4 images belong to no image of the data, first {before}/a_0.jpg",)


def test_references_of_a_set_lie_in_numbered_folders(photos: Path, tmp_path: Path) -> None:
    """In the order of their numbers; the folders of the data are none of them."""
    for name in ("control_2/a.png", "control_10/a.webp", "control_1/a.jpg", "control_2/sub/b.png", "sub/b_0.png"):
        add_picture(tmp_path / "before" / name)
    found = by_name(scan(data(photos, references=str(tmp_path / "before"))).train)
    places = [one.path.relative_to(tmp_path / "before").as_posix() for one in found["a"].references]
    assert places == ["control_1/a.jpg", "control_2/a.png", "control_10/a.webp"]
    assert names(found["b"].references) == ["b_0.png"]


def test_a_gap_in_numbered_folders_is_named(photos: Path, tmp_path: Path) -> None:
    """The reference behind it becomes the first picture that the model reads, in place of the second."""
    before = tmp_path / "before"
    for name in ("1/a.png", "2/a.png", "2/sub/b.png"):
        add_picture(before / name, size=(20, 10))
    found = scan(data(photos, references=str(before)))
    assert found.warnings == (
        "data.references: 1 of 2 images are in a numbered folder but not in all before it, and those behind the gap "
        f"move up: first {photos}/sub/b.jpg, without {before}/1/sub/b.png",
    )


def test_both_images_of_a_pair_may_lie_in_the_folder_of_the_data(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    for name in ("a_A.png", "a_B.jpg", "sub/b_A.webp", "sub/b_B.png"):
        add_picture(photos / name)
    (photos / "a.txt").write_text("make it red")
    (photos / "sub" / "b_B.txt").write_text("remove it")
    found = scan(data(photos, pair_suffixes=["_A", "_B"]))
    assert [(photo.path.name, photo.caption, names(photo.references)) for photo in found.train] == [
        ("a_B.jpg", "make it red", ["a_A.png"]),
        ("b_B.png", "remove it", ["b_A.webp"]),
    ]
    assert found.warnings == ()
    add_picture(photos / "c_B.png")
    (photos / "c_B.txt").write_text("alone")
    assert problems_of(data(photos, pair_suffixes=["_A", "_B"])) == [
        f"data.path: 1 of 5 images are in no pair of names that end with _A and _B: first {photos}/c_B.png; add the "
        "other one, or remove it"
    ]


def test_wrong_endings_of_pairs_are_named_alone(photos: Path) -> None:
    """Not with captions, which belong to the pairs."""
    (photos / "a.txt").unlink()
    assert problems_of(data(photos, pair_suffixes=["_A", "_B"])) == [
        f"data.path: 2 of 2 images are in no pair of names that end with _A and _B: first {photos}/a.png; add the "
        "other one, or remove it"
    ]


def test_images_of_rows_are_in_no_pairs(photos: Path, tmp_path: Path) -> None:
    """Else all of them, those before the edit too, would be trained without references."""
    table = tmp_path / "rows.csv"
    table.write_text("image,text\nphotos/a.png,make it red\n", encoding="utf-8")
    assert problems_of(data(table, pair_suffixes=["_A", "_B"])) == [
        f"data.path: {table}: data.pair_suffixes pairs the image files of a folder, not those of rows; name the column "
        "of the image before the edit in data.reference_columns, or unpack the file"
    ]


def test_a_photo_without_reference_is_refused_with_its_name(photos: Path, tmp_path: Path) -> None:
    before = tmp_path / "before"
    add_picture(before / "a.png")
    assert problems_of(data(photos, references=str(before))) == [
        f"data.references: 1 of 2 images have no reference, first {photos}/sub/b.jpg; "
        f"add {before}/sub/b.png, or sub/b_0.png, sub/b_1.png and so on"
    ]


# Regularization


@pytest.mark.parametrize(("count", "weight"), [(1, 7.0), (2, 3.5), (14, 0.5)])
def test_regularization_images_occur_as_often_as_the_data_together(tmp_path: Path, count: int, weight: float) -> None:
    add_image(tmp_path / "photos" / "a.png")
    add_image(tmp_path / "more" / "b.png")
    for number in range(count):
        add_image(tmp_path / "others" / f"{number:02}.png")
    cfg = data(
        tmp_path / "photos",
        repeats=2,
        folders=[{"path": str(tmp_path / "more"), "weight": 2.5}],
        regularization=str(tmp_path / "others"),
        regularization_weight=0.3,
    )
    found = scan(cfg).train
    assert [(photo.weight, photo.loss_weight) for photo in found] == [(2.0, 1.0), (5.0, 1.0)] + [(weight, 0.3)] * count


def test_regularization_images_have_no_trigger_and_nothing_goes_with_them(photos: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"
    add_image(others / "a.png", caption="a dog", size=(80, 40))
    add_image(others / "b.png", caption="a [trigger] dog", size=(40, 80))
    for name in ("a.png", "sub/b.png"):
        add_picture(tmp_path / "beside" / name, size=(20, 10))
    beside = str(tmp_path / "beside")
    found = scan(data(photos, trigger="ohwx", regularization=str(others), masks=beside, references=beside))
    assert [photo.caption for photo in found.train] == ["ohwx, a cat", "ohwx, a cat", "a dog", "a [trigger] dog"]
    assert [(photo.mask is None, photo.references == ()) for photo in found.train[2:]] == [(True, True)] * 2
    assert found.warnings == (
        f"data.regularization: 1 captions of {others} hold an unfilled [trigger]; "
        "remove it: the trigger is not for these images",
    )


def test_regularization_images_are_never_set_aside_for_validation(photos: Path, tmp_path: Path) -> None:
    others = add_image(tmp_path / "others" / "z.png")
    found = scan(data(photos, regularization=str(others.parent), validation=1))
    assert [photo.path.name for photo in found.train] == ["a.png", "z.png"]
    assert [photo.path.name for photo in found.validation] == ["b.jpg"]


def test_regularization_images_need_captions_as_the_data_do(photos: Path, tmp_path: Path) -> None:
    others = add_picture(tmp_path / "others" / "z.png").parent
    assert problems_of(data(photos, regularization=str(others))) == [
        f"{others}/z.png: no caption; write it into z.txt, or set data.missing_caption: empty"
    ]
    assert problems_of(data(photos, regularization=str(tmp_path / "none"))) == [
        f"data.regularization: {tmp_path}/none: no such folder; give a folder of images with captions"
    ]
