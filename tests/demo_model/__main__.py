"""Make the demo model again from nothing: `python -m tests.demo_model FOLDER`, or `make demo-base`.

Pictures from the font, an autoencoder, a text encoder, and the transformer, which this program's own trainer trains by
presets/demo-base-cpu.yaml. Each part that is in FOLDER already is kept, so that a stopped run goes on.

`demo` in it is the model (trainer/assets/demo/<family>), `quickstart` the pictures of the quickstart
(presets/quickstart) and `held_out` the subjects it is measured on (tests/benchmarks/held_out).
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.demo_model.autoencoder import train_autoencoder
from tests.demo_model.pictures import FONT, Picture, glyphs, numbers_and_colours, write_folder
from tests.demo_model.style import LOOKS, in_looks, write_held_out, write_quickstart
from tests.demo_model.text import random_text_encoder, tokenizer_of
from trainer.config.load import load_config
from trainer.run.process import worker_environment
from trainer.system.errors import InputError
from trainer.system.terminal import complain, say

ROOT = Path(__file__).parents[2]
PRESET = ROOT / "presets" / "demo-base-cpu.yaml"
ON_A_GPU = "parallel.device=cuda"
SEED = 0
AUTOENCODER_STEPS = 12_000
THREADS = 2
"""Of the training on a CPU."""


def main() -> int:
    """Draw the pictures and make what is missing in the folder."""
    arguments = _arguments()
    folder: Path = arguments.folder.resolve()
    torch.set_num_threads(THREADS)
    try:
        drawn = glyphs(arguments.font)
    except InputError as error:
        complain(error)
        return 2
    drawn += numbers_and_colours(drawn)
    taught = [picture for picture in drawn if not picture.held_out]
    say(f"{len(taught)} pictures, {len(drawn) - len(taught)} held out")
    if not (folder / "held_out").exists():
        write_quickstart(folder / "quickstart", taught)
        write_held_out(folder / "held_out", taught)
    try:
        make_model(folder, taught)
    except subprocess.CalledProcessError as stopped:
        if (folder / "run").exists():
            say("The transformer is not trained to its end. The same command goes on from the newest checkpoint.")
        return stopped.returncode
    size = sum(file.stat().st_size for file in (folder / "demo").rglob("*") if file.is_file())
    say(f"{folder / 'demo'}: {size / 1e6:.1f} MB")
    return 0


def make_model(
    folder: Path, taught: list[Picture], autoencoder_steps: int = AUTOENCODER_STEPS, changes: Sequence[str] = ()
) -> None:
    """What is missing in the folder of the model's parts; `demo` is the model. changes: of the preset's fields.

    Raises:
        CalledProcessError: the training of the transformer was stopped or failed.
    """
    if not (folder / "pictures").exists():
        write_folder(folder / "pictures", in_looks(taught, SEED))
    if not (folder / "vae").exists():
        vae = train_autoencoder(_pixels(taught), autoencoder_steps, SEED, say)
        vae.save_pretrained(folder / "vae")
    family = importlib.import_module(f"tests.demo_model.{load_config(PRESET, ()).config.model.family}")
    if not (folder / "base").exists():
        tokenizer = tokenizer_of([*(picture.caption for picture in taught), *LOOKS])
        encoder = random_text_encoder(tokenizer, SEED)
        family.write_base(folder / "base", folder / "vae", tokenizer, encoder, SEED)
    if not _exports(folder):
        _train(folder, changes)
    [export] = _exports(folder)
    family.write_demo(folder / "demo", folder / "base", export)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.demo_model", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the parts are kept; `demo` in it is the model")
    parser.add_argument("--font", type=Path, default=FONT)
    return parser.parse_args()


def _pixels(pictures: list[Picture]) -> Tensor:
    """(N, 4, H, W) RGBA, 0 to 1."""
    return torch.stack([torch.from_numpy(np.array(p.pixels)).permute(2, 0, 1).float() / 255 for p in pictures])


def _train(folder: Path, changes: Sequence[str]) -> None:
    run = folder / "run"
    if run.exists():
        arguments = ["--resume", str(run)]
    else:
        paths = (f"model.path={folder / 'base'}", f"data.path={folder / 'pictures'}")
        device = (ON_A_GPU,) if torch.cuda.is_available() else ()
        arguments = ["--headless", str(PRESET), *paths, *device, *changes, "--run-dir", str(run)]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, str(ROOT / "launch.py"), *arguments]
    subprocess.run(command, check=True, env=worker_environment() | threads)


def _exports(folder: Path) -> list[Path]:
    return list((folder / "run" / "export").glob("*-full"))


if __name__ == "__main__":
    sys.exit(main())
