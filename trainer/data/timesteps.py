"""Computes the noise levels at which the images of a config are trained.

`python -m trainer.data.timesteps CONFIG` prints them as JSON: a command of its own, since the densities are tensors and
the page, which shows them, does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.data.images.buckets import Buckets, images_per_bucket
from trainer.data.images.image_files import scan
from trainer.models import families
from trainer.models.base import FLOW_FIELDS, ImageFamily
from trainer.models.objectives.flow_matching import shift_factor, shift_sigma, sigma_at
from trainer.system.errors import InputError
from trainer.system.terminal import complain

NUM_BINS = 20
NUM_QUANTILES = 10_000


@dataclass(frozen=True)
class BucketTimesteps:
    """Timesteps of the images of one size.

    Attributes:
        width: Pixels.
        height: Pixels.
        images: Number of images.
        shift: Effective shift, 1 for none.
        timesteps: Share of timesteps in each of NUM_BINS, from data to noise.
    """

    width: int
    height: int
    images: int
    shift: float
    timesteps: tuple[float, ...]


def bucket_timesteps(cfg: RunConfig) -> list[BucketTimesteps]:
    """Return a row per bucket that has images; none for families that train on text.

    Discrete diffusion samples its timesteps evenly.

    Raises:
        InputError: The images or the family are wrong.
    """
    family = families.get(cfg.model.family)
    if not issubclass(family, ImageFamily):
        return []
    buckets = Buckets.of(cfg.data, family.size_multiple, family.longest_side)
    chosen = (size for image in scan(cfg.data).train for _, size in buckets.of_image(image, image.sides))
    counts = images_per_bucket(chosen, buckets.sizes)
    is_flow = family.objective_fields >= FLOW_FIELDS
    even = (torch.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    rows = []
    for size, num_images in counts.items():
        num_tokens = family.tokens_of(size)
        shift = shift_factor(cfg.objective, family.shift, num_tokens) if is_flow else 1.0
        sigma = shift_sigma(sigma_at(cfg.objective, even), shift) if is_flow else even
        shares = torch.histc(sigma, NUM_BINS, 0, 1) / NUM_QUANTILES
        rows.append(BucketTimesteps(*size.frame, num_images, shift, tuple(shares.tolist())))
    return rows


def main() -> int:
    """Print the rows of the config named on the command line. Exit code 2 with an error on stderr if it is wrong."""
    try:
        rows = bucket_timesteps(load_config(Path(sys.argv[1])).config)
    except InputError as error:
        complain(error)
        return 2
    json.dump([dataclasses.asdict(row) for row in rows], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
