"""What decides whether a cached encoding is used again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import ExifTags, Image

from tests.distributed.pool import run_ranks
from tests.runs import alone, make_pictures, run_config
from trainer.config.schema import RunConfig
from trainer.data import encode, prompts
from trainer.data.encode import encode_data
from trainer.data.images.image_files import scan
from trainer.data.images.image_io import load_mask, load_rgb, read_header
from trainer.data.images.image_source import EncodedData
from trainer.data.loader import ImageItem
from trainer.data.open import open_data
from trainer.distributed.context import RankContext
from trainer.distributed.world import World
from trainer.models import families
from trainer.models.base import ModelFamily
from trainer.models.build import encoder_loader
from trainer.run.events import AnyEvent, StatusEvent, WarningEvent
from trainer.system.errors import InputError


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("encode") / "pictures", 3)


def encoded(cfg: RunConfig) -> tuple[EncodedData, list[AnyEvent]]:
    """The data of a run, and what was said while it was encoded."""
    cache = Path(cfg.data.path or "").parent / "cache"
    said: list[AnyEvent] = []
    world = alone()
    data = encode_data(
        families.make(cfg, cache), encoder_loader(cfg, world), RankContext(cfg, world, cache, said.append)
    )
    return data, said


def test_captions_are_encoded_anew_in_another_precision_and_photos_are_not(pictures: Path) -> None:
    single, _ = encoded(run_config(pictures))
    half, _ = encoded(run_config(pictures, train__precision="bf16"))
    assert single.cache.read(single.empty)["prompt_embeds"].dtype == torch.float32
    assert half.cache.read(half.empty)["prompt_embeds"].dtype == torch.bfloat16
    assert [photo.pixels.latents for photo in half.train] == [photo.pixels.latents for photo in single.train]


def test_a_second_run_loads_no_encoder(pictures: Path) -> None:
    encoded(run_config(pictures))
    _, said = encoded(run_config(pictures))
    assert [event for event in said if isinstance(event, StatusEvent)] == []


def test_another_way_of_encoding_uses_nothing_of_the_old(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = encoded(run_config(pictures))
    monkeypatch.setattr(prompts, "CACHE_VERSION", prompts.CACHE_VERSION + 1)
    after, _ = encoded(run_config(pictures))
    assert {photo.pixels.latents for photo in after.train}.isdisjoint(photo.pixels.latents for photo in before.train)
    assert after.empty != before.empty


def test_the_encoders_are_fingerprinted_once_however_many_photos_there_are(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = families.get(run_config(pictures).model.family)
    asked: list[ModelFamily] = []
    fingerprint = family.fingerprint

    def counted(self: ModelFamily) -> str:
        asked.append(self)
        return fingerprint(self)

    monkeypatch.setattr(family, "fingerprint", counted)
    encoded(run_config(pictures))
    assert len(asked) == 1


def test_a_stop_request_while_encoding_keeps_what_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PROGRESS_S", 0)
    cfg = run_config(make_pictures(tmp_path / "pictures", 3))
    world, cache, said = alone(), tmp_path / "cache", []
    family, load = families.make(cfg, cache), encoder_loader(cfg, world)
    with pytest.raises(encode.StopRequested):
        encode_data(family, load, RankContext(cfg, world, cache, said.append, lambda: len(said) == 3))
    assert len(list((cache / "examples").rglob("*.safetensors"))) == 2
    assert len(encode_data(family, load, RankContext(cfg, world, cache, said.append)).train) == 3


def test_an_orientation_that_swaps_the_sides_is_known_after_a_scan(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    for name, exif in {"a.png": turned, "b.tiff": Image.Exif(), "c.tiff": turned}.items():
        Image.effect_mandelbrot((64, 64), (-2, -1.5, 1, 1.5), 20).convert("RGB").save(tmp_path / name, exif=exif)
    photos = scan(run_config(tmp_path, data__missing_caption="empty").data).train
    assert [photo.is_turned for photo in photos] == [True, False, True]


def test_images_without_a_visible_pixel_are_one_warning_where_they_are_decoded(pictures: Path, tmp_path: Path) -> None:
    for number, size in enumerate([(64, 64), (64, 80), (80, 64)]):
        Image.new("RGBA", size, (255, 0, 0, 0)).save(tmp_path / f"{number}.png")
    Image.new("RGB", (64, 64), "white").save(tmp_path / "white.png")
    for image in tmp_path.glob("*.png"):
        image.with_suffix(".txt").write_text("a cat")
    _, said = encoded(run_config(tmp_path))
    assert [event.message for event in said if isinstance(event, WarningEvent)] == [
        f"3 images are fully transparent and trained as white: first {tmp_path}/0.png; remove it"
    ]


def test_images_that_their_buckets_do_not_suit_are_named_before_any_is_encoded(tmp_path: Path) -> None:
    cfg = run_config(make_pictures(tmp_path / "pictures", 1), data__resolution=128)
    _, said = encoded(cfg)
    assert said[0].message == (  # type: ignore[union-attr]
        "1 image is enlarged more than 1.5 times to fill a bucket, and trained blurred: "
        f"first {tmp_path}/pictures/00.png 2.0 times; use larger files, or lower data.resolution"
    )


@pytest.fixture
def beside(pictures: Path, tmp_path: Path) -> Path:
    """A folder with an image named as each photo, left half black and right half white."""
    for photo in pictures.glob("*.png"):
        with Image.open(photo) as image:
            width, height = image.size
        half = Image.new("RGB", (width, height), "white")
        half.paste("black", (0, 0, width // 2, height))
        half.save(tmp_path / photo.name)
    return tmp_path


def cut_off(file: Path) -> str:
    """Leave half of an image file. Returns what is said of it."""
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(InputError) as caught:
        load_rgb(read_header(file), (16, 16))
    return str(caught.value)


def test_another_mask_background_makes_new_masks_and_encodes_no_photo(pictures: Path, beside: Path) -> None:
    encoded(run_config(pictures))
    dark, said = encoded(run_config(pictures, data__masks=str(beside)))
    grey, _ = encoded(run_config(pictures, data__masks=str(beside), data__mask_background=0.2))
    assert {event.message for event in said if isinstance(event, StatusEvent)} == {"masks"}
    assert [photo.pixels.latents for photo in grey.train] == [photo.pixels.latents for photo in dark.train]
    assert {photo.pixels.mask for photo in grey.train}.isdisjoint(photo.pixels.mask for photo in dark.train)
    assert [data.example(ImageItem(0, False))["mask"].tolist() for data in (dark, grey)] == [
        [[0, 0, 1, 1]] * 4,
        [[pytest.approx(0.2), pytest.approx(0.2), 1, 1]] * 4,
    ]


def test_masks_and_references_are_found_again_by_content(pictures: Path, beside: Path) -> None:
    cfg = run_config(pictures, data__masks=str(beside), data__references=str(beside))
    first, _ = encoded(cfg)
    again, said = encoded(cfg)
    assert [event for event in said if isinstance(event, StatusEvent)] == []
    (beside / "00.png").write_bytes((beside / "00.png").read_bytes() + b"more")
    changed, _ = encoded(cfg)
    assert again.train == first.train
    pairs = [(a.pixels, b.pixels) for a, b in zip(first.train, changed.train, strict=True)]
    assert [a.mask == b.mask for a, b in pairs] == [False, True, True]
    assert [a.references == b.references for a, b in pairs] == [False, True, True]


@pytest.mark.parametrize("field", ["data__masks", "data__references"])
def test_a_photo_goes_with_what_belongs_to_it_when_that_cannot_be_decoded(
    pictures: Path, beside: Path, field: str
) -> None:
    fact = cut_off(beside / "01.png")
    with pytest.raises(InputError) as caught:
        encoded(run_config(pictures, **{field: str(beside)}))
    assert str(caught.value) == f"{fact}, or set data.bad_image: warn"
    left, said = encoded(run_config(pictures, **{field: str(beside)}, data__bad_image="warn"))
    assert [photo.image.path.name for photo in left.train] == ["00.png", "02.png"]
    assert [event.message for event in said if isinstance(event, WarningEvent)] == [f"left out: {fact}"]


def test_a_sample_is_never_drawn_without_its_reference(pictures: Path, beside: Path) -> None:
    file = beside / "01.png"
    cut_off(file)
    with pytest.raises(InputError) as caught:
        encoded(run_config(pictures, data__bad_image="warn", sample__prompts=("one",), sample__references=(str(file),)))
    assert str(caught.value) == f"sample.references: {file} cannot be read; replace it"


def found_by_rank(world: World, folders: list[Path]) -> str:
    """What a rank says whose data are in the folder of its number, as on machines that each have a copy."""
    cfg = run_config(folders[world.rank])
    cache = folders[0].parent / "cache"
    context = RankContext(cfg, world, cache, lambda event: None)
    try:
        open_data(families.make(cfg, cache), encoder_loader(cfg, world), context)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_that_find_other_data_say_so_before_they_train_or_wait_in_vain(tmp_path: Path) -> None:
    whole = make_pictures(tmp_path / "whole", 3)
    fewer, other = (shutil.copytree(whole, tmp_path / name) for name in ("fewer", "other"))
    (fewer / "02.png").unlink()
    (other / "01.txt").write_text("another caption", encoding="utf-8")
    for folder in (fewer, other):
        for said in run_ranks(2, found_by_rank, [whole, folder]):
            assert said == (
                "data: rank 1 has found other images or captions than rank 0; copy the dataset to all machines again, "
                "or start again when its files no longer change"
            )
    assert run_ranks(2, found_by_rank, [whole, whole]) == ["", ""]


@pytest.mark.parametrize("what", ["image", pytest.param("mask", marks=pytest.mark.slow)])
def test_a_file_that_is_replaced_between_its_key_and_its_pixels_leaves_no_wrong_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    pictures, masks = make_pictures(tmp_path / "pictures", 2), tmp_path / "masks"
    masks.mkdir()
    Image.new("L", (64, 64), 90).save(masks / "00.png")
    cfg, clean = (
        run_config(folder, data__masks=str(masks))
        for folder in (pictures, shutil.copytree(pictures, tmp_path / "clean" / "pictures"))
    )
    expected, _ = encoded(clean)
    file, name, load = {"image": (pictures, "load_rgb", load_rgb), "mask": (masks, "load_mask", load_mask)}[what]
    file /= "00.png"
    original = file.read_bytes()

    def replaced(*arguments: Any) -> Image.Image:
        Image.new("RGB", (64, 64), "red").save(file)
        return load(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(encode, name, replaced)
        with pytest.raises(InputError, match=f"{file}: has changed while images were encoded"):
            encoded(cfg)
    file.write_bytes(original)
    found, _ = encoded(cfg)
    for one, other in zip(found.train, expected.train, strict=True):
        assert one.pixels == other.pixels and one.pixels.mask is not None
        for key in (one.pixels.latents, one.pixels.mask):
            ours, theirs = found.cache.read(key), expected.cache.read(key)
            assert all(torch.equal(ours[part], theirs[part]) for part in theirs)


def test_progress_is_written_at_a_rhythm_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PROGRESS_S", 1e9)
    _, said = encoded(run_config(make_pictures(tmp_path / "pictures", 5)))
    shown = [event for event in said if isinstance(event, StatusEvent) and event.message == "images"]
    assert [(event.done, event.total) for event in shown] == [(1, 5), (5, 5)]


def black() -> Image.Image:
    return Image.new("L", (64, 64), 0)


def dotted() -> Image.Image:
    image = black()
    image.putpixel((30, 30), 255)
    return image


def save_masks(folder: Path, pictures: Path, masks: Sequence[Image.Image]) -> None:
    """Write the masks of the first pictures, in the sizes of these."""
    folder.mkdir()
    for number, mask in enumerate(masks):
        with Image.open(pictures / f"{number:02}.png") as image:
            mask.resize(image.size, Image.Resampling.NEAREST).save(folder / f"{number:02}.png")


@pytest.mark.parametrize(("fit", "outside"), [("crop", 0), pytest.param("pad", 0.25, marks=pytest.mark.slow)])
def test_masks_that_leave_almost_nothing_to_learn_are_counted_also_by_a_start_that_encodes_nothing(
    tmp_path: Path, fit: str, outside: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", -(10**18))
    pictures, masks = make_pictures(tmp_path / "pictures", 6), tmp_path / "masks"
    subject = black()
    subject.paste(255, (0, 0, 8, 8))
    empty = (black(), Image.new("L", (64, 64), 1), Image.new("RGBA", (64, 64), (255, 255, 255, 0)), dotted())
    save_masks(masks, pictures, [subject, *empty])
    cfg = run_config(pictures, data__masks=str(masks), data__mask_background=outside, data__fit=fit)
    expected = (
        f"4 of 5 masks are white in less than 1% of the image, whose other parts have weight {outside:g}: first "
        f"{masks}/01.png; paint the part in the loss white, which is 255 and not 1, or opaque"
    )
    for _ in range(2):
        _, said = encoded(cfg)
        warnings = [event.message for event in said if isinstance(event, WarningEvent)]
        assert [warning for warning in warnings if "white" in warning] == [expected]
    assert not any(isinstance(event, StatusEvent) for event in said)


def striped(*levels: int) -> Image.Image:
    """A mask whose columns have these levels in turn."""
    image = black()
    for x in range(64):
        image.paste(levels[x % len(levels)], (x, 0, x + 1, 64))
    return image


@pytest.mark.parametrize(("fit", "outside"), [("crop", 0), pytest.param("pad", 0.25, marks=pytest.mark.slow)])
def test_masks_of_class_numbers_are_counted_also_by_a_start_that_encodes_nothing(
    tmp_path: Path, fit: str, outside: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", -(10**18))
    pictures, masks = make_pictures(tmp_path / "pictures", 7), tmp_path / "masks"
    faint = Image.merge("RGBA", (*[Image.new("L", (64, 64), 255)] * 3, striped(0, 100)))
    lines = striped(255, 0, 0, 0)  # white, but the mean of every area is far below half
    numbers = (striped(1, 5, 20), Image.new("L", (64, 64), 127), faint)
    save_masks(masks, pictures, [lines, *numbers, striped(0, 255), striped(10, 128), black()])
    cfg = run_config(pictures, data__masks=str(masks), data__mask_background=outside, data__fit=fit)
    for _ in range(2):
        _, said = encoded(cfg)
        warnings = [event.message for event in said if isinstance(event, WarningEvent)]
        assert [warning for warning in warnings if "white" in warning] == [
            f"1 of 7 masks is white in less than 1% of the image, whose other parts have weight {outside:g}: first "
            f"{masks}/06.png; paint the part in the loss white, which is 255 and not 1, or opaque",
            f"3 of 7 masks have no level above 127, as those of class numbers, and white is 255: first {masks}/01.png, "
            "with levels up to 20; multiply them, or paint the part in the loss white or opaque",
        ]
    assert not any(isinstance(event, StatusEvent) for event in said)


@pytest.mark.slow
def test_a_fully_transparent_image_is_named_also_by_a_start_that_encodes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", -(10**18))
    pictures = make_pictures(tmp_path / "pictures", 2)
    Image.new("RGBA", (64, 64), (255, 0, 0, 0)).save(pictures / "00.png")
    for _ in range(2):
        _, said = encoded(run_config(pictures))
        [warning] = [event.message for event in said if isinstance(event, WarningEvent)]
        assert warning == f"1 image is fully transparent and trained as white: first {pictures}/00.png; remove it"
