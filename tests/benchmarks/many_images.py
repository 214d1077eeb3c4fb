"""What 100,000 images cost: the scan, caching each of them, a second start, and the memory of a rank.

python -m tests.benchmarks.many_images [--images N]      20 minutes for 100,000; exit code 1 beyond a limit
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from PIL import Image

from tests.benchmarks.startup import wait_for_run
from tests.commands import PRESET
from tests.runs import alone, make_run
from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.data.encoded_memory import KIND
from trainer.data.images.known_files import KnownFiles
from trainer.data.images.scan_memory import ScanMemory, checked
from trainer.system.files import COARSEST_NS
from trainer.system.index import Index
from trainer.train.loop import Trainer

IMAGES = 100_000
SIDE = 32
CAPTIONS = 50
FIRST_S = 3600.0
"""Longest first start."""
SCAN_LIMIT_S, START_LIMIT_S, MEMORY_LIMIT_MB = 60.0, 10.0, 300


def make_preset(folder: Path, images: int) -> Path:
    """A run of one step on one rank, on so many images of noise with captions."""
    (folder / "many").mkdir()
    numbers = torch.Generator().manual_seed(0)
    for number in range(images):
        pixels = (torch.rand(SIDE, SIDE, 3, generator=numbers) * 255).byte()
        Image.fromarray(pixels.numpy()).save(folder / "many" / f"{number:06d}.png", compress_level=0)
        (folder / "many" / f"{number:06d}.txt").write_text(f"image {number % CAPTIONS}", encoding="utf-8")
    settings = {"steps: 2": "steps: 1", "path: pictures": "path: many", "resolution: 64": f"resolution: {SIDE}"}
    settings |= {"devices: 2": "devices: 1", "strategy: full": "strategy: none"}
    text = PRESET
    for old, new in settings.items():
        text = text.replace(old, new)
    preset = folder / "many.yaml"
    preset.write_text(text, encoding="utf-8")
    time.sleep(COARSEST_NS / 1e9)  # files that were read sooner after their last change are not trusted
    return preset


def scan(preset: Path) -> float:
    """Seconds of a scan that knows nothing."""
    data = load_config(preset).config.data
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        ScanMemory(data, Path(cache)).scan(KnownFiles)
        return time.perf_counter() - began


def memory(preset: Path, is_small: bool) -> int:
    """MB of a process that trains a step on all of the images, or on one, as a rank that this process launches."""
    if is_small:
        small = preset.parent / "small"
        small.mkdir()
        for file in ("000000.png", "000000.txt"):
            (small / file).write_bytes((preset.parent / "many" / file).read_bytes())
        time.sleep(COARSEST_NS / 1e9)
    checked(_config(preset, is_small).data, preset.parent / "cache")()
    argv = [sys.executable, "-m", "tests.benchmarks.many_images", "--rank", str(preset), *(["--small"] * is_small)]
    return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def rank(preset: Path, is_small: bool) -> None:
    """Print the MB of this process after a step."""
    runs, config = preset.parent, _config(preset, is_small)
    trainer = Trainer(
        config, make_run(runs, config, f"rank-{time.time_ns()}"), alone(), runs / "cache", lambda event: None
    )
    trainer.train_step()
    print(psutil.Process().memory_info().rss // 10**6)
    trainer.close()


def _config(preset: Path, is_small: bool) -> RunConfig:
    overrides = [f"data.path={preset.parent / 'small'}"] if is_small else []
    return load_config(preset, overrides).config.model_copy(update={"name": "rank"})


def main() -> int:
    """Print the figures. Returns 1 when one is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.small)
        return 0
    with tempfile.TemporaryDirectory() as name:
        preset = make_preset(Path(name), options.images)
        scanned = scan(preset)
        first = wait_for_run(preset, "first", FIRST_S).first_step
        second = min(wait_for_run(preset, f"again-{number}").first_step for number in range(2))
        one = memory(preset, is_small=True)
        used = memory(preset, is_small=False) - one
        Index(Path(name) / "cache").put(KIND, {"": b""}, most=1)
        listing = memory(preset, is_small=False) - one
    print(f"scan                 {scanned:.1f} s (limit {SCAN_LIMIT_S:g} s for {IMAGES:,})")
    print(f"first start          {first:.1f} s, {1e3 * (first - second) / options.images:.1f} ms an image")
    print(f"second start         {second:.1f} s (limit {START_LIMIT_S:g} s)")
    print(f"memory of the data   {used} MB; {listing} MB where examples are looked for (limit {MEMORY_LIMIT_MB} MB)")
    return int(scanned > SCAN_LIMIT_S or second > START_LIMIT_S or max(used, listing) > MEMORY_LIMIT_MB)


if __name__ == "__main__":
    sys.exit(main())
