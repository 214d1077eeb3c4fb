"""NEFTune: uniform noise on the embeddings of a language model in training (arXiv 2310.05914)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.rng import derived_seed
from trainer.system.pinned import send


class EmbeddingNoise(nn.Module):
    """Noise that comes from (seed, global sample index), so that it is the same on any number of ranks.

    Each number is uniform within +-alpha / sqrt(L * D): L tokens of the document, D numbers per embedding (sec. 2.1).
    It adds nothing in eval mode, and before samples are set.
    """

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self._seeds: tuple[int, ...] = ()
        self._lengths = torch.empty(0, 0)

    def set_samples(self, seed: int, indices: Sequence[int], documents: Tensor, device: torch.device | str) -> None:
        """Set the samples of the next forward.

        Args:
            seed: The run's seed.
            indices: Global index of each sample.
            documents: (B, L) index of the document of each token, on the CPU.
            device: The model's device.
        """
        self._seeds = tuple(derived_seed(seed, index, "embedding noise") for index in indices)
        self._lengths = send(torch.stack([_lengths(row) for row in documents]), device)

    def forward(self, embedded: Tensor) -> Tensor:
        """Add noise to embeddings, (B, L, D)."""
        if not self.training or not self._seeds:
            return embedded
        width = embedded.shape[-1]
        noise = torch.stack([_uniform(seed, embedded) for seed in self._seeds])
        limit = self.alpha / (self._lengths * width).sqrt()
        return embedded + (noise * limit[:, :, None]).to(embedded.dtype)


def add_noise(embedding: nn.Module, alpha: float) -> None:
    """Let a module of embeddings add noise to what it returns."""
    noise = EmbeddingNoise(alpha)
    embedding.add_module("noise", noise)
    embedding.register_forward_hook(lambda module, inputs, embedded: noise(embedded))


def noises(model: nn.Module) -> list[EmbeddingNoise]:
    """Return the noise modules of a model; each forward in training needs `set_samples` before it."""
    return [module for module in model.modules() if isinstance(module, EmbeddingNoise)]


def _lengths(documents: Tensor) -> Tensor:
    """Return the number of tokens in each token's document, (L,), fp32."""
    _, inverse, counts = torch.unique(documents, return_inverse=True, return_counts=True)
    lengths: Tensor = counts[inverse].float()
    return lengths


def _uniform(seed: int, embedded: Tensor) -> Tensor:
    source = torch.Generator(embedded.device).manual_seed(seed)
    return 2 * torch.rand(*embedded.shape[1:], generator=source, device=embedded.device) - 1
