"""BAGEL's examples: what they hold, the sequences they stand for, and the sums of their losses.

Keys of an example: "latents" (C, h, w) with "caption" (t,) for an image that is drawn; "0.text", "1.conditioning" and
so on for a sequence, numbered in order, by the kinds of `PartKind`; for both perhaps "mask" (h, w). A pack has these
keys after the global sample index and a slash, "17/latents". A Batch holds the examples one by one: "0.latents",
"1.0.text" and so on. See DECISIONS 163.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.config.sections import ObjectiveConfig
from trainer.config.size import Size
from trainer.models.objectives.base import Batch, Example, squared_error
from trainer.models.objectives.flow_matching import Shift, add_noise, draw_sigma, velocity
from trainer.models.parts.bagel.bagel_packing import (
    PATCH,
    ConditioningPiece,
    DrawnPiece,
    GapPiece,
    Packed,
    Piece,
    TextPiece,
    unpatched,
)
from trainer.rng import SampleRng, derived_seed
from trainer.system.pinned import send


@dataclass(frozen=True)
class PackedSequence:
    """One sequence of an example.

    Attributes:
        item: Index of the example in the batch.
        index: Global sample index of its random numbers; None where it is that of the example.
        parts: (kind, content) in order.
        mask: (h, w) weights of the loss of the drawn image.
    """

    item: int
    index: int | None
    parts: tuple[tuple[str, Tensor], ...]
    mask: Tensor | None = None


@dataclass(frozen=True)
class Noisy:
    """A noisy image to train on.

    Attributes:
        target: Its velocity, (C, h, w).
        mask: (h, w) weights of its loss.
    """

    piece: DrawnPiece
    target: Tensor
    mask: Tensor | None

    @property
    def num_patches(self) -> int:
        """Latent tokens of the image."""
        return patches_of(self.target)

    def error(self, velocities: Tensor) -> Tensor:
        """The image's mean error, (1,). velocities: (patches, values of a patch)."""
        prediction = unpatched(velocities.float(), *self.target.shape[1:])
        return squared_error(prediction[None], self.target[None], None if self.mask is None else self.mask[None])


@dataclass
class NoisySequences:
    """The sequences of a batch with noise on the images that are drawn.

    Attributes:
        pieces: The pieces of each sequence.
        items: Index of the item of each sequence.
        latents: All pieces with latents, in the order of the network's output: the noisy image, or the number of tokens
            of a clean one.
        owners: Index of the item of each of `latents`.
    """

    pieces: list[list[Piece]] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    latents: list[Noisy | int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)


def patches_of(latents: Tensor) -> int:
    """Latent tokens of an image. latents: (C, h, w)."""
    return latents.shape[1] * latents.shape[2] // PATCH**2


def sequences_in(batch: Batch) -> list[PackedSequence]:
    """The sequences of a batch with "weight"."""
    items: list[Example] = [{} for _ in batch["weight"]]
    for key, tensor in batch.items():
        number, dot, name = key.partition(".")
        if dot:
            items[int(number)][name] = tensor
    return [sequence for n, item in enumerate(items) for sequence in sequences_of_example(item, n)]


def sequences_of_example(example: Example, item: int = 0) -> Iterator[PackedSequence]:
    """The sequences of an example. item: its index in the batch."""
    packs: dict[int | None, Example] = {}
    for key, tensor in example.items():
        index, slash, name = key.partition("/")
        packs.setdefault(int(index) if slash else None, {})[name if slash else key] = tensor
    for number, one in packs.items():
        parts = tuple(_image_parts(one) if "latents" in one else _sequence_parts(one))
        yield PackedSequence(item, number, parts, one.get("mask"))


def _image_parts(example: Example) -> Iterator[tuple[str, Tensor]]:
    if len(example["caption"]):
        yield "text", example["caption"]
    yield "drawn", example["latents"]


def _sequence_parts(example: Example) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in example.items():
        if key != "mask":
            yield key.partition(".")[2], tensor


def clean_pieces(sequence: PackedSequence) -> list[Piece]:
    """The pieces of a sequence before noise is added."""
    zero = torch.zeros(())
    return [_piece(kind, content, DrawnPiece(content, zero)) for kind, content in sequence.parts]


def add_noise_to(
    sequences: Sequence[PackedSequence], objective: ObjectiveConfig, shift: Shift, rng: SampleRng
) -> NoisySequences:
    """Draw timestep and noise of every image that is drawn. rng: the random numbers of the items."""
    found = NoisySequences()
    for sequence in sequences:
        index = rng.indices[sequence.item] if sequence.index is None else sequence.index
        pieces: list[Piece] = []
        num_drawn = 0
        for kind, content in sequence.parts:
            piece: Piece
            if kind == "drawn":
                # The first image of a sequence has the numbers of a sample with a single image.
                seed = rng.seed if not num_drawn else derived_seed(rng.seed, "image", num_drawn)
                noisy = _noisy(content, sequence.mask, objective, shift, SampleRng(seed, (index,), rng.device))
                found.latents.append(noisy)
                piece, num_drawn = noisy.piece, num_drawn + 1
            else:
                piece = _piece(kind, content, None)
                if kind == "clean":
                    found.latents.append(patches_of(content))
            if kind in ("drawn", "clean"):
                found.owners.append(sequence.item)
            pieces.append(piece)
        found.pieces.append(pieces)
        found.items.append(sequence.item)
    return found


def _noisy(latents: Tensor, mask: Tensor | None, objective: ObjectiveConfig, shift: Shift, rng: SampleRng) -> Noisy:
    """Add noise to an image. latents: (C, h, w).  rng: the image's random numbers."""
    sigma = draw_sigma(objective, shift, patches_of(latents), rng)
    noise = rng.normal("noise", latents.shape)
    return Noisy(DrawnPiece(add_noise(latents[None], noise, sigma)[0], sigma[0]), velocity(latents, noise[0]), mask)


def _piece(kind: str, content: Tensor, drawn: DrawnPiece | None) -> Piece:
    """drawn: what stands for latents that are drawn."""
    match kind:
        case "text" | "target":
            return TextPiece(content, in_loss=kind == "target")
        case "conditioning":
            return ConditioningPiece(content)
        case "clean":
            return DrawnPiece(content, content.new_zeros(()), clean=True)
        case "gap":
            return GapPiece()
    assert drawn is not None
    return drawn


def loss_parts(
    noisy: NoisySequences, packed: Packed, outputs: tuple[Tensor, Tensor], weight: Tensor, token_weight: str
) -> Tensor:
    """`Loss.parts` for images and text, (2, 2).

    Args:
        outputs: Logits and velocities of the network.
        weight: (B,) weight of each item, 0 for padding.
        token_weight: `objective.token_weight`.
    """
    logits, velocities = outputs
    present = (weight > 0).to(torch.float32)
    begin, errors, shares, owners = 0, [], [], []
    for image, owner in zip(noisy.latents, noisy.owners, strict=True):
        count = image if isinstance(image, int) else image.num_patches
        if not isinstance(image, int):
            errors.append(image.error(velocities[begin : begin + count]))
            shares.append(image_share(count, token_weight))
            owners.append(owner)
        begin += count
    share, item = weight.new_tensor(shares), _index(weight, owners)
    # A pass may hold no image to draw and no text to learn, but ranks wait for each other in all parts of the network.
    error = torch.cat([velocities[:0].float().flatten(), *errors])
    images = torch.stack([(error * share * weight[item]).sum(), (share * present[item]).sum()])
    losses = F.cross_entropy(logits.float(), packed.labels, reduction="none")
    shares = [text_share(length, token_weight) for length in packed.lengths for _ in range(length)]
    share, item = weight.new_tensor(shares), _index(weight, noisy.items)[packed.label_sequences]
    texts = torch.stack([(losses * share * weight[item]).sum(), (share * present[item]).sum()])
    return torch.stack([images, texts])


def _index(like: Tensor, numbers: Sequence[int]) -> Tensor:
    return send(torch.tensor(numbers, dtype=torch.int64), like.device)


def loss_counts(example: Example, token_weight: str) -> tuple[float, float]:
    """Return the share of an example in the second column of `loss_parts`."""
    images = texts = 0.0
    for sequence in sequences_of_example(example):
        for kind, content in sequence.parts:
            if kind == "drawn":
                images += image_share(patches_of(content), token_weight)
            elif kind == "target":
                length = len(content) + 1
                texts += length * text_share(length, token_weight)
    return images, texts


def image_share(num_patches: int, token_weight: str) -> float:
    """Weight of the mean error of an image in the mean of a step."""
    return 1.0 if token_weight == "item" else float(num_patches)


def text_share(length: int, token_weight: str) -> float:
    """Weight of each label of a text with `length` labels in the mean of a step. sqrt: published as a switch, for text
    only."""
    return {"token": 1.0, "item": 1 / length, "sqrt": 1 / math.sqrt(length)}[token_weight]


def joined(examples: Mapping[int, Example]) -> Example:
    """Pack examples. examples: {global sample index: example}."""
    return {f"{index}/{key}": tensor for index, example in examples.items() for key, tensor in example.items()}


def size_within(size: Size, longest: int, shortest: int, stride: int, most: float) -> Size:
    """The size to which the published transform scales an image.

    Args:
        size: Size of the image.
        longest: Most pixels of the longest side. Larger images shrink.
        shortest: Fewest pixels of the shortest side. Smaller images grow, unless `longest` forbids it.
        stride: Both sides are multiples of this.
        most: Most pixels of the whole image.
    """

    def scaled(size: Size, scale: float) -> Size:
        return Size(*(max(stride, round(round(side * scale) / stride) * stride) for side in size.frame))

    found = scaled(size, max(min(longest / max(size.frame), 1.0), shortest / min(size.frame)))
    if found.pixels > most:
        found = scaled(found, most / found.pixels)
    return scaled(found, longest / max(found.frame)) if max(found.frame) > longest else found
