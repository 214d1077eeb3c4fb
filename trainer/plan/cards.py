"""Speeds of GPUs by the names that their driver gives them.

Dense bf16 products with fp32 sums and memory bandwidths are those of the makers' data sheets; for GeForce, whose sheets
give fp16 sums, half of that rate. Cards before Ampere have no bf16 products: theirs are those of fp32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.system.gpus import MIG_NAME


@dataclass(frozen=True)
class Speed:
    """The throughput of a card per second.

    Attributes:
        words: Words that its name has, in any order.
        tflops: bf16 matrix products, 10^12 operations.
        bandwidth: GB of its own memory.
        link: GB that a rank receives from other ranks of its machine.
        host_link: GB to and from host memory.
        share: Share of `tflops` that training reaches; an assumption.
    """

    words: str
    tflops: float
    bandwidth: float
    link: float = 11
    host_link: float = 20
    share: float = 0.43


def _pcie3(words: str, tflops: float, bandwidth: float) -> Speed:
    return Speed(words, tflops, bandwidth, 6, 11, 0.6)  # the share is of fp32's rate, which is easier to reach


def _pcie4(words: str, tflops: float, bandwidth: float, share: float = 0.43) -> Speed:
    return Speed(words, tflops, bandwidth, 11, 20, share)


def _pcie5(words: str, tflops: float, bandwidth: float, share: float = 0.43) -> Speed:
    return Speed(words, tflops, bandwidth, 22, 40, share)


SPEEDS = (
    Speed("B300", 2250, 8000, 720, 40, 0.40),
    Speed("GB300", 2500, 8000, 720, 200, 0.40),
    Speed("B200", 2250, 8000, 720, 40, 0.40),
    Speed("GB200", 2500, 8000, 720, 200, 0.40),
    Speed("H200", 989, 4800, 360, 55, 0.40),
    _pcie5("H200 NVL", 835, 4800, 0.40),
    Speed("GH200", 989, 4000, 360, 200, 0.40),
    Speed("H100", 989, 3350, 360, 55, 0.40),
    _pcie5("H100 PCIe", 756, 2000, 0.40),
    _pcie5("H100 NVL", 835, 3900, 0.40),
    Speed("H800", 989, 3350, 160, 40, 0.40),
    Speed("H20", 148, 4000, 360, 40, 0.40),
    Speed("A100 SXM4 40GB", 312, 1555, 240, 20),
    Speed("A100 SXM4 80GB", 312, 2039, 240, 20),
    Speed("A800 SXM4 80GB", 312, 2039, 160, 20),
    _pcie4("A100 PCIe 40GB", 312, 1555),
    _pcie4("A100 PCIe 80GB", 312, 1935),
    _pcie4("A800 PCIe 80GB", 312, 1935),
    _pcie4("A30", 165, 933),
    _pcie4("A40", 150, 696),
    _pcie4("A16", 18, 200),
    _pcie4("A10", 125, 600, 0.35),
    _pcie4("A10G", 70, 600),
    _pcie4("A2", 18, 200),
    _pcie4("L40S", 362, 864, 0.35),
    _pcie4("L40", 181, 864),
    _pcie4("L4", 121, 300, 0.35),
    _pcie4("RTX A6000", 155, 768),
    _pcie4("RTX A5500", 136, 768),
    _pcie4("RTX A5000", 111, 768),
    _pcie4("RTX A4500", 95, 640),
    _pcie4("RTX A4000", 77, 448),
    _pcie4("RTX A2000", 32, 288),
    _pcie4("RTX 6000 Ada", 364, 960, 0.35),
    _pcie4("RTX 5000 Ada", 261, 576, 0.35),
    _pcie4("RTX 4500 Ada", 158, 432, 0.35),
    _pcie4("RTX 4000 Ada", 107, 360, 0.35),
    _pcie4("RTX 4000 SFF Ada", 77, 280, 0.35),
    _pcie4("RTX 2000 Ada", 48, 224, 0.35),
    _pcie5("RTX PRO 6000 Blackwell", 503, 1792, 0.35),
    _pcie5("RTX PRO 6000 Blackwell Max-Q", 439, 1792, 0.35),
    _pcie5("RTX PRO 5000 Blackwell", 268, 1344, 0.35),
    _pcie5("RTX PRO 4500 Blackwell", 211, 896, 0.35),
    _pcie5("RTX PRO 4000 Blackwell", 147, 672, 0.35),
    _pcie5("RTX 5090", 209, 1792),
    _pcie5("RTX 5090 D", 209, 1792),
    _pcie5("RTX 5080", 112, 960),
    _pcie5("RTX 5070 Ti", 88, 896),
    _pcie5("RTX 5070", 62, 672),
    _pcie5("RTX 5060 Ti", 47, 448),
    _pcie5("RTX 5060", 38, 448),
    _pcie4("RTX 4090", 165, 1008),
    _pcie4("RTX 4090 D", 147, 1008),
    _pcie4("RTX 4080 SUPER", 104, 736),
    _pcie4("RTX 4080", 97, 717),
    _pcie4("RTX 4070 Ti SUPER", 88, 672),
    _pcie4("RTX 4070 Ti", 80, 504),
    _pcie4("RTX 4070 SUPER", 71, 504),
    _pcie4("RTX 4070", 58, 504),
    _pcie4("RTX 4060 Ti", 44, 288),
    _pcie4("RTX 4060", 30, 272),
    _pcie4("RTX 3090 Ti", 80, 1008),
    _pcie4("RTX 3090", 71, 936),
    _pcie4("RTX 3080 Ti", 68, 912),
    _pcie4("RTX 3080", 60, 760),
    _pcie4("RTX 3070 Ti", 43, 608),
    _pcie4("RTX 3070", 41, 448),
    _pcie4("RTX 3060 Ti", 32, 448),
    _pcie4("RTX 3060", 25, 360),
    _pcie4("RTX 3050", 18, 224),
    _pcie4("RTX 5090 Laptop GPU", 64, 896),
    _pcie4("RTX 5080 Laptop GPU", 46, 896),
    _pcie4("RTX 5070 Ti Laptop GPU", 35, 672),
    _pcie4("RTX 5070 Laptop GPU", 28, 384),
    _pcie4("RTX 4090 Laptop GPU", 66, 576),
    _pcie4("RTX 4080 Laptop GPU", 49, 432),
    _pcie4("RTX 4070 Laptop GPU", 31, 256),
    _pcie4("RTX 4060 Laptop GPU", 23, 256),
    _pcie4("RTX 3080 Laptop GPU", 38, 448),
    _pcie4("RTX 3070 Laptop GPU", 32, 448),
    _pcie4("RTX 3060 Laptop GPU", 22, 336),
    Speed("V100 SXM2", 15.7, 900, 120, 11, 0.6),
    Speed("V100 SXM3", 15.7, 900, 120, 11, 0.6),
    _pcie3("V100 PCIe", 14, 900),
    _pcie3("T4", 8.1, 320),
    _pcie3("TITAN RTX", 16.3, 672),
    _pcie3("Quadro RTX 8000", 16.3, 672),
    _pcie3("Quadro RTX 6000", 16.3, 672),
    _pcie3("Quadro RTX 5000", 11.2, 448),
    _pcie3("Quadro RTX 4000", 7.1, 416),
    _pcie3("RTX 2080 Ti", 13.4, 616),
    _pcie3("RTX 2080 SUPER", 11.2, 496),
    _pcie3("RTX 2080", 10.1, 448),
    _pcie3("RTX 2070", 7.5, 448),
    _pcie3("RTX 2060", 6.5, 336),
)
PARTS, PARTS_OF = 7, {"a30": 4, "pro": 4}
"""Compute parts of a card in MIG mode: of most cards, and of those with a word in their names."""
MEMORY_PARTS, MOST_MEMORY_PARTS = {3: 4, 7: 8}, 8
"""{compute parts: parts of the memory, and of its bandwidth}, where they differ."""


def speed_of(name: str) -> Speed | None:
    """Return the speed of a card by its name, as nvidia-smi and CUDA give it; None for an unknown one.

    Of the rows whose words are all in the name, the one with the most counts. The row of a desktop's card does not
    hold for the laptop's of the same number.
    """
    words = _words(MIG_NAME.sub("", name))  # a slice's size is not the card's
    found = [speed for speed in SPEEDS if _words(speed.words) <= words and is_laptop(name) == is_laptop(speed.words)]
    return max(found, key=lambda speed: len(_words(speed.words)), default=None)


def namesake_of(name: str) -> Speed | None:
    """Return the speed of the desktop's card of the same number as a laptop's; None if it is unknown or no laptop's."""
    desktop = re.sub(r"(?i)laptop|mobile|max-q", "", name)
    return speed_of(desktop) if is_laptop(name) else None


def is_laptop(name: str) -> bool:
    """Whether the name is that of a laptop's GPU, which draws less power and has fewer units than its namesake."""
    words = _words(name)
    return bool({"laptop", "mobile"} & words) or ("max" in words and "pro" not in words)  # Max-Q is also a desktop's


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


def shares(name: str) -> tuple[float, float]:
    """Return the shares of a card's compute and bandwidth that a MIG slice in its name has; 1 and 1 for a whole card.

    A card of seven compute parts has eight of memory.
    """
    part = MIG_NAME.search(name)
    if not part:
        return 1.0, 1.0
    parts, computing = int(part["parts"]), int(part["compute"] or part["parts"])
    if PARTS_OF.keys() & _words(name):
        whole = next(count for word, count in PARTS_OF.items() if word in _words(name))
        return computing / whole, parts / whole
    return computing / PARTS, MEMORY_PARTS.get(parts, parts) / MOST_MEMORY_PARTS
