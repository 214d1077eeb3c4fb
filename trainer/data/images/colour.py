"""ICC profiles: whether a profile changes colours, and the conversion to sRGB. Imports neither torch nor numpy.

See DECISIONS 80.
"""

from __future__ import annotations

import functools
import io
import itertools
from typing import Literal

from PIL import Image, ImageChops, ImageCms

Profile = Literal["none", "used", "broken"]
"""none: no profile, or one whose colours equal sRGB; used: pixels are converted; broken: the profile is unusable."""

SRGB_WITHIN = 2
"""Tolerance in levels of 255: the published sRGB profiles differ by the rounding of their tables."""


@functools.lru_cache(maxsize=32)
def effect(profile: bytes | None, mode: str) -> Profile:
    """Classify an ICC profile by its effect on an image of this mode.

    The name does not decide, since sRGB profiles have many: the colours of a grid are converted instead.
    """
    if profile is None:
        return "none"
    try:
        grid = _grid(_space(profile, mode))
        changed = ImageChops.difference(to_srgb(grid, profile), grid.convert("RGB"))
    except (ImageCms.PyCMSError, OSError, ValueError):
        return "broken"
    is_changed = changed.point(lambda levels: 255 if levels > SRGB_WITHIN else 0).getbbox() is not None
    return "used" if is_changed else "none"


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert an RGB or CMYK image with this profile to sRGB. Colours outside of sRGB are clipped per channel.

    An RGB image with equal channels may have a grey profile.
    """
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if source.profile.xcolor_space == "GRAY":
        image = image.convert("L")
    transform = ImageCms.buildTransform(
        source,
        ImageCms.createProfile("sRGB"),
        image.mode,
        "RGB",
        ImageCms.Intent.RELATIVE_COLORIMETRIC,
        ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None
    return converted


def _space(profile: bytes, mode: str) -> str:
    """The mode of a profile's colours. Raises ValueError when it does not fit the image's mode."""
    space = ImageCms.ImageCmsProfile(io.BytesIO(profile)).profile.xcolor_space.strip()
    is_grey = mode in ("1", "L", "LA", "La") or mode.startswith("I")
    if space == "CMYK" and mode == "CMYK":
        return "CMYK"
    if space == "GRAY" and is_grey:
        return "L"
    if space == "RGB" and mode not in ("CMYK", "LAB"):
        return "RGB"
    raise ValueError(f"a profile of {space} colours in an image of mode {mode}")


def _grid(mode: str) -> Image.Image:
    """A row of evenly spaced colours: all 256 greys, 17^3 of RGB, 5^4 of CMYK."""
    steps, channels = {"L": (256, 1), "RGB": (17, 3), "CMYK": (5, 4)}[mode]
    levels = [round(step * 255 / (steps - 1)) for step in range(steps)]
    colours = b"".join(bytes(colour) for colour in itertools.product(levels, repeat=channels))
    return Image.frombytes(mode, (steps**channels, 1), colours)
