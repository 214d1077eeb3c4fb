"""ICC profiles written byte by byte, and the colours they stand for by the published definitions."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Colorants as they stand in the published profiles: relative to D50, Bradford-adapted.
DISPLAY_P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
ADOBE_RGB = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
SRGB = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))

# CSS Color Module Level 4, section 18, "Sample code for Color Conversions".
P3_TO_XYZ = np.array(
    [
        [608311 / 1250200, 189793 / 714400, 198249 / 1000160],
        [35783 / 156275, 247089 / 357200, 198249 / 2500400],
        [0, 32229 / 714400, 5220557 / 5000800],
    ]
)
ADOBE_TO_XYZ = np.array(
    [
        [573536 / 994567, 263643 / 1420810, 187206 / 994567],
        [591459 / 1989134, 6239551 / 9945670, 374412 / 4972835],
        [53769 / 1989134, 351524 / 4972835, 4929758 / 4972835],
    ]
)
XYZ_TO_SRGB = np.array(
    [
        [12831 / 3959, -329 / 214, -1974 / 3959],
        [-851781 / 878810, 1648619 / 878810, 36519 / 878810],
        [705 / 12673, -2585 / 12673, 705 / 667],
    ]
)
D50_TO_D65 = np.array(
    [
        [0.955473421488075, -0.02309845494876471, 0.06325924320057072],
        [-0.0283697093338637, 1.0099953980813041, 0.021041441191917323],
        [0.012314014864481998, -0.020507649298898964, 1.330365926242124],
    ]
)
D50 = np.array([0.3457 / 0.3585, 1.0, (1 - 0.3457 - 0.3585) / 0.3585])


def srgb_of_p3(levels: Floats) -> Floats:
    """levels: (N, 3) of 0 to 255. Returns the same colours in sRGB, those outside of it clipped per channel."""
    return _encoded(_linear(levels / 255) @ P3_TO_XYZ.T @ XYZ_TO_SRGB.T)


def srgb_of_adobe(levels: Floats) -> Floats:
    """As `srgb_of_p3`."""
    return _encoded((levels / 255) ** (563 / 256) @ ADOBE_TO_XYZ.T @ XYZ_TO_SRGB.T)


def srgb_of_lab(lab: Floats) -> Floats:
    """lab: (N, 3), CIE Lab of D50. Returns as `srgb_of_p3`."""
    f1 = (lab[:, 0] + 16) / 116
    f = np.stack([lab[:, 1] / 500 + f1, f1, f1 - lab[:, 2] / 200], axis=1)
    xyz = np.where(f**3 > 216 / 24389, f**3, (116 * f - 16) / (24389 / 27)) * D50
    return _encoded(xyz @ D50_TO_D65.T @ XYZ_TO_SRGB.T)


def srgb_of_squared_grey(levels: Floats) -> Floats:
    """levels: (N,) of 0 to 255, of luminance levels^2. Returns (N,)."""
    return _encoded((levels / 255) ** 2)


def _linear(values: Floats) -> Floats:
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _encoded(linear: Floats) -> Floats:
    linear = linear.clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)


# Profiles by ICC.1:2010. Numbers are s15Fixed16.


def rgb_profile(colorants: Sequence[Sequence[float]], curve: bytes) -> bytes:
    """A display's profile: three colorants, one curve of all channels."""
    tags = {f"{name}XYZ": _xyz(*colorant) for name, colorant in zip("rgb", colorants, strict=True)}
    return _profile("RGB ", "XYZ ", tags | {f"{name}TRC": curve for name in "rgb"})


def grey_profile(gamma: float) -> bytes:
    return _profile("GRAY", "XYZ ", {"kTRC": gamma_curve(gamma)})


def cmyk_profile(lab_of: Callable[[tuple[int, ...]], Sequence[float]]) -> bytes:
    """A printer's profile with a table of two levels per ink. lab_of: (c, m, y, k), each 0 or 1, to CIE Lab."""
    identity = bytes(range(256))
    corners = [(c, m, y, k) for c in (0, 1) for m in (0, 1) for y in (0, 1) for k in (0, 1)]
    table = b"".join(bytes((round(L * 2.55), round(a) + 128, round(b) + 128)) for L, a, b in map(lab_of, corners))
    matrix = b"".join(_fixed(float(row == column)) for row in range(3) for column in range(3))
    lut = b"mft1" + bytes(4) + bytes((4, 3, 2, 0)) + matrix + identity * 4 + table + identity * 3
    return _profile("CMYK", "Lab ", {"A2B0": lut}, kind=b"prtr", version=2)


def srgb_curve() -> bytes:
    """Type 3 of the parametric curves: (a x + b)^g above d, c x below."""
    values = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
    return b"para" + bytes(4) + struct.pack(">HH", 3, 0) + b"".join(map(_fixed, values))


def gamma_curve(gamma: float) -> bytes:
    """gamma: a multiple of 1/256."""
    return b"curv" + bytes(4) + struct.pack(">IHH", 1, round(gamma * 256), 0)


def _profile(space: str, connection: str, tags: dict[str, bytes], kind: bytes = b"mntr", version: int = 4) -> bytes:
    tags = {"wtpt": _xyz(0.9642, 1.0, 0.8249)} | tags
    place, table, body = 128 + 4 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, data in tags.items():
        table += name.encode() + struct.pack(">II", place + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    header = struct.pack(">I4xI", place + len(body), version << 24) + kind + f"{space}{connection}".encode()
    header += bytes(12) + b"acsp" + bytes(28) + _fixed(0.9642) + _fixed(1.0) + _fixed(0.8249)
    return header.ljust(128, b"\0") + table + body


def _xyz(*values: float) -> bytes:
    return b"XYZ " + bytes(4) + b"".join(map(_fixed, values))


def _fixed(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))
