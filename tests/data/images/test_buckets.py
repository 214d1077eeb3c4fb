"""The sizes a run trains at."""

from __future__ import annotations

import pytest

from trainer.config.size import Size
from trainer.data.images.buckets import bucket_sizes, choose_bucket, kept_part
from trainer.system.errors import InputError


def test_the_buckets_of_1024_pixels_are_these() -> None:
    wide = [(1024, 1024), (1088, 960), (1152, 896), (1216, 848), (1280, 816), (1344, 768), (1408, 736)]
    tall = [(height, width) for width, height in wide[:0:-1]]
    assert [size.frame for size in bucket_sizes(1024, 16, 2.0)] == [*tall, *wide]


@pytest.mark.parametrize("resolution", [64, 100, 128, 512, 768, 1000, 1024])
@pytest.mark.parametrize("multiple", [8, 16, 32])
@pytest.mark.parametrize("max_aspect", [1.0, 1.5, 2.0, 4.0])
def test_buckets_keep_to_the_grid_the_area_and_the_aspect(resolution: int, multiple: int, max_aspect: float) -> None:
    sizes = bucket_sizes(resolution, multiple, max_aspect)
    assert len(set(sizes)) == len(sizes)
    assert {Size(size.height, size.width) for size in sizes} == set(sizes)
    for width, height in (size.frame for size in sizes):
        assert width % multiple == height % multiple == 0
        assert width * height <= resolution**2
        assert max(width, height) <= max_aspect * min(width, height)


def test_an_aspect_of_one_leaves_the_square_only() -> None:
    assert bucket_sizes(1000, 16, 1.0) == (Size(992, 992),)


def test_a_resolution_below_the_grid_of_the_model_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        bucket_sizes(16, 32, 2.0)
    assert str(caught.value) == "data.resolution: 16 is below the 32 pixels this model works in; raise it"


@pytest.mark.parametrize(
    ("photo", "bucket"),
    [
        ((4000, 4000), (1024, 1024)),
        ((4032, 3024), (1152, 896)),
        ((3024, 4032), (896, 1152)),
        ((6000, 4000), (1280, 816)),
        ((1920, 1080), (1344, 768)),
        ((5000, 1000), (1408, 736)),
        ((10, 1000), (736, 1408)),
    ],
)
def test_a_photo_goes_to_the_bucket_of_the_nearest_aspect(photo: tuple[int, int], bucket: tuple[int, int]) -> None:
    assert choose_bucket(Size(*photo), bucket_sizes(1024, 16, 2.0)) == Size(*bucket)


def test_a_bucket_with_a_side_that_is_too_long_is_smaller_in_its_own_shape() -> None:
    free, bound = bucket_sizes(1024, 16, 2.0), bucket_sizes(1024, 16, 2.0, longest=1024)
    assert max(max(size.frame) for size in free) > 1024
    assert max(max(size.frame) for size in bound) == 1024
    for size in free:
        nearest = choose_bucket(size, bound)
        assert nearest.width / nearest.height == pytest.approx(size.width / size.height, rel=0.02)
    assert bucket_sizes(512, 16, 1.2, longest=1024) == bucket_sizes(512, 16, 1.2)


@pytest.mark.parametrize(
    ("image", "kept"),
    [((1000, 500), (0.5, 1.0)), ((500, 1000), (1.0, 0.5)), ((64, 64), (1.0, 1.0)), ((10, 10), (1.0, 1.0))],
    ids=["wide", "tall", "equal", "small"],
)
def test_a_square_bucket_keeps_the_middle_of_an_image(image: tuple[int, int], kept: tuple[float, float]) -> None:
    assert kept_part(Size(*image), Size(64, 64)) == kept
