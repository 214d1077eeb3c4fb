"""What the references of all families share: the numbers a sample is drawn from, flow matching, latents of a picture.

Written from the publications and from diffusers; nothing here imports `trainer`.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

Text = dict[str, Tensor]
"""What a model reads in addition to the noisy latents, without batch dim, by the keys that the family documents: of a
caption, and the latents of reference images."""


@dataclass(frozen=True)
class Draws:
    """The random numbers of one sample, which depend on the run's seed and the sample's global index alone.

    A generator is seeded with the first 63 bits of SHA-256 over seed, index and purpose, separated by 0x1F.
    """

    seed: int
    index: int

    @property
    def quantile(self) -> float:
        """A uniform number in [0, 1), from which the timestep follows."""
        return torch.rand((), generator=self._generator("timestep")).item()

    def normal(self, purpose: str, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(*shape, generator=self._generator(purpose))

    def _generator(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(seed_of(self.seed, self.index, purpose))


def seed_of(*parts: int | str) -> int:
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest, "big") >> (256 - 63)


class Reference(ABC):
    """A model in diffusers' own pipeline. All tensors but those of the pipeline's call are without batch dim.

    pipeline: diffusers' pipeline of the folder.  objective: what the run's section `objective` sets.
    settings: arguments that the pipeline's text encoding and its call need for a tiny model.
    """

    pipeline: Any
    settings: Mapping[str, Any]

    def __init__(self, folder: Path, objective: Mapping[str, Any]) -> None:
        self.objective = objective
        self.pipeline = self.read(folder)
        self.pipeline.set_progress_bar_config(disable=True)
        self.settings = self.find_settings()

    @abstractmethod
    def read(self, folder: Path) -> Any:
        """The pipeline."""

    def find_settings(self) -> dict[str, Any]:
        return {}

    @abstractmethod
    def latents(self, image: Image.Image) -> Tensor:
        """(C, h, w), normalised."""

    @abstractmethod
    def text(self, caption: str) -> Text:
        """The caption's embeddings."""

    @abstractmethod
    def loss(self, latents: Tensor, text: Text, draws: Draws) -> float:
        """The training loss of one picture."""

    def picture(self, noise: Tensor, width: int, height: int, call: Mapping[str, Any]) -> Image.Image:
        """What the pipeline draws from noise (C, h, w)."""
        size = {"width": width, "height": height}
        image: Image.Image = self.pipeline(latents=noise[None], **size, **self.settings, **call).images[0]
        return image


class FlowReference(Reference):
    """Flow matching (arXiv 2210.02747) along straight lines, sigma 0 = data and 1 = noise.

    sigma follows a logit-normal density and is shifted (arXiv 2403.03206, sec. 3.1 and 5.3.2); the model predicts the
    velocity, noise - data.
    """

    @abstractmethod
    def shift(self, num_tokens: int) -> float:
        """The factor by which timesteps are moved toward noise."""

    @abstractmethod
    def velocity(self, noisy: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """The model's prediction, as `pack` shapes it. noisy: (1, C, h, w).  sigma: (1,)."""

    def pack(self, latents: Tensor) -> Tensor:
        """Latents (1, C, h, w) as the model predicts them."""
        return latents

    def num_tokens(self, latents: Tensor) -> int:
        return latents.shape[-2] * latents.shape[-1] // 4

    @torch.no_grad()
    def loss(self, latents: Tensor, text: Text, draws: Draws) -> float:
        noise = draws.normal("noise", tuple(latents.shape))
        # In fp32: models take sines of 1000 sigma, which see its last bit.
        level = torch.sigmoid(torch.special.ndtri(torch.tensor([draws.quantile])))
        factor = self.shift(self.num_tokens(latents))
        sigma = factor * level / (1 + (factor - 1) * level)
        noisy = (1 - sigma) * latents + sigma * noise
        predicted = self.velocity(noisy[None], sigma, text)
        return mean_square(predicted, self.pack((noise - latents)[None]))


def references_in(text: Text) -> list[Tensor]:
    """Latents (1, C, h, w) of the reference images, in order."""
    names = sorted(name for name in text if name.startswith("reference_"))
    return [text[name][None] for name in names]


def mean_square(prediction: Tensor, target: Tensor) -> float:
    assert prediction.shape == target.shape
    return float((prediction.double() - target.double()).square().mean())


@torch.no_grad()
def posterior_mean(vae: Any, image: Image.Image) -> Tensor:
    """(1, C, h, w), or (1, C, 1, h, w) of an autoencoder of films, before any normalisation."""
    pixels = VaeImageProcessor(vae_scale_factor=8).preprocess(image)
    is_film = hasattr(vae.config, "temperal_downsample")
    mean: Tensor = vae.encode(pixels.unsqueeze(2) if is_film else pixels).latent_dist.mean
    return mean


def scaled_latents(vae: Any, image: Image.Image) -> Tensor:
    """As pipelines decode them: by the autoencoder's own shift and scale."""
    shift: float = vae.config.shift_factor or 0.0
    scaled: Tensor = (posterior_mean(vae, image)[0] - shift) * vae.config.scaling_factor
    return scaled


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Of any number; infinite where names or shapes differ."""
    if {k: t.shape for k, t in ours.items()} != {k: t.shape for k, t in theirs.items()}:
        return math.inf
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def levels_apart(ours: Image.Image, theirs: Image.Image) -> float:
    """Largest difference of two pictures, in levels of 255."""
    if ours.size != theirs.size:
        return math.inf
    a, b = (np.asarray(image.convert("RGB"), dtype=int) for image in (ours, theirs))
    return float(np.abs(a - b).max())
