"""Packs sequences of text and images for BAGEL's network: tokens grouped by kind, marks around pieces, a mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.models.parts.bagel.bagel_network import BagelSizes, attention_mask

PATCH = 2
"""Latent pixels per side of a patch of latents."""


@dataclass(frozen=True)
class Marks:
    """Token ids that begin and end a text and an image."""

    text_begin: int
    text_end: int
    image_begin: int
    image_end: int


@dataclass(frozen=True)
class TextPiece:
    """A text.

    Attributes:
        ids: (t,) without marks.
        in_loss: Whether its tokens and its end are predicted.
    """

    ids: Tensor
    in_loss: bool = False


@dataclass(frozen=True)
class ConditioningPiece:
    """A conditioning image: the model reads it and does not draw it.

    Attributes:
        pixels: (3, H, W) in [-1, 1], sides in multiples of the encoder's patch.
    """

    pixels: Tensor


@dataclass(frozen=True)
class DrawnPiece:
    """Latents of an image: one that is drawn, or a clean one that later pieces see.

    Attributes:
        latents: (C, H, W), sides in multiples of 2; noisy if it is drawn.
        sigma: () share of noise; 0 for a clean image.
        clean: Whether later pieces see it. An image that is drawn is seen only by itself, and takes no position: the
            next piece has its position again.
    """

    latents: Tensor
    sigma: Tensor
    clean: bool = False


@dataclass(frozen=True)
class GapPiece:
    """The position of an image that was left out of a condition. It has no tokens."""


Piece = TextPiece | ConditioningPiece | DrawnPiece | GapPiece


@dataclass(frozen=True)
class Packed:
    """Packed sequences.

    Attributes:
        arguments: Arguments of the network's `forward`.
        labels: (K,) the token that each of its logits must predict.
        label_sequences: (K,) index of the sequence of each label.
        lengths: Number of labels of each target text, in order: its tokens and its end.
    """

    arguments: dict[str, Tensor]
    labels: Tensor
    label_sequences: Tensor
    lengths: tuple[int, ...]


def pack(sequences: Sequence[Sequence[Piece]], marks: Marks, sizes: BagelSizes) -> Packed:
    """Pack sequences that do not see each other. All tensors of the pieces must be on one device.

    The tokens of a text have one position each; all of an image is at one position. As in the model's training, an
    image that is being drawn is seen only by its own piece, and what follows has its position.

    Raises:
        ValueError: An image is larger than the model's grid.
    """
    texts, conditioning, drawn = _collected(sequences, marks, sizes)
    one = texts[0].content  # for the type and device of ids
    begins = [0, *accumulate(len(part) for part in texts)]
    targets = [(begin, part) for begin, part in zip(begins, texts, strict=False) if part.in_loss]
    # Computed from known lengths, not found on the device: nothing has to wait for the device.
    predicted = [begin + part.indices[:-1] - part.at.index for begin, part in targets]
    arguments = {
        "text": torch.cat([part.content for part in texts]),
        "predicted": torch.cat([one[:0], *predicted]),
        "patches": _joined(conditioning, sizes.vision.patch_numbers, one),
        "patch_cells": torch.cat([one[:0], *(part.grid for part in conditioning)]),
        "latents": _joined(drawn, sizes.latent_numbers, one),
        "latent_cells": torch.cat([one[:0], *(part.grid for part in drawn)]),
        "sigma": torch.cat([one[:0].float(), *(part.sigma.expand(len(part)) for part in drawn)]),
        "positions": torch.cat([part.positions for part in (*texts, *conditioning, *drawn)]),
    }
    order = [*texts, *conditioning, *drawn]
    arguments |= dict(zip(("rows", "back"), _rows([part.at.sequence for part in order], order), strict=True))
    arguments["mask"] = _mask(order, arguments["rows"], arguments["back"])
    arguments |= dict(zip(("patch_rows", "patch_back"), _rows(range(len(conditioning)), conditioning), strict=True))
    arguments["patch_mask"] = _is_token(arguments["patch_rows"], arguments["patch_back"])[:, None]
    labels = torch.cat([one[:0], *(part.content[1:] for _, part in targets)])
    lengths = tuple(len(part) - 1 for _, part in targets)
    return Packed(arguments, labels, _owners(one, (part for _, part in targets), skipped=1), lengths)


@dataclass(frozen=True)
class Owners:
    """The index of the sequence that each token belongs to, in the order of `pack`.

    Attributes:
        text: (text tokens,).
        conditioning: (patches of conditioning images,).
        drawn: (patches of latents,).
        predicted: (K,).
    """

    text: Tensor
    conditioning: Tensor
    drawn: Tensor
    predicted: Tensor


def sequences_of(sequences: Sequence[Sequence[Piece]], marks: Marks, sizes: BagelSizes) -> Owners:
    """The sequence that each token belongs to when `pack` packs these sequences."""
    texts, conditioning, drawn = _collected(sequences, marks, sizes)
    one, targets = texts[0].content, (part for part in texts if part.in_loss)
    return Owners(
        _owners(one, texts), _owners(one, conditioning), _owners(one, drawn), _owners(one, targets, skipped=1)
    )


def patched(image: Tensor, size: int = PATCH) -> Tensor:
    """Cut (C, size h, size w) into patches, (h x w, size x size x C), row by row; each by row, column, channel."""
    channels, height, width = image.shape
    parts = image.reshape(channels, height // size, size, width // size, size)
    return parts.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)


def unpatched(patches: Tensor, height: int, width: int) -> Tensor:
    """Undo `patched`: (C, height, width)."""
    parts = patches.reshape(height // PATCH, width // PATCH, PATCH, PATCH, -1)
    return parts.permute(4, 0, 2, 1, 3).reshape(-1, height, width)


@dataclass(frozen=True)
class _At:
    """Where a piece begins.

    Attributes:
        index: Index of its first token in the sequence.
        position: Its first position for rotary embeddings.
    """

    sequence: int
    piece: int
    index: int
    position: int


@dataclass(frozen=True)
class _Part:
    """Tokens of one kind.

    Attributes:
        content: Ids or patches.
        indices: Indices in the sequence.
        grid: Cells in the image's grid.
        in_loss: Whether every token except the first is predicted.
    """

    at: _At
    content: Tensor
    indices: Tensor
    positions: Tensor
    grid: Tensor
    sigma: Tensor
    in_image: bool = False
    is_noisy: bool = False
    in_loss: bool = False

    def __len__(self) -> int:
        return len(self.content)

    def column(self, value: int) -> Tensor:
        """The value, repeated for each of the tokens."""
        return self.indices.new_full((len(self),), value)


def _collected(
    sequences: Sequence[Sequence[Piece]], marks: Marks, sizes: BagelSizes
) -> tuple[list[_Part], list[_Part], list[_Part]]:
    """The parts of texts, of conditioning images and of latents."""
    texts: list[_Part] = []
    conditioning: list[_Part] = []
    drawn: list[_Part] = []
    for sequence, pieces in enumerate(sequences):
        index = position = 0
        for number, piece in enumerate(pieces):
            at = _At(sequence, number, index, position)
            if isinstance(piece, GapPiece):
                position += 1
                continue
            if isinstance(piece, TextPiece):
                texts.append(_text(piece, at, marks))
                index, position = index + len(texts[-1]), position + len(texts[-1])
                continue
            images = conditioning if isinstance(piece, ConditioningPiece) else drawn
            images.append(
                _conditioning(piece, at, sizes) if isinstance(piece, ConditioningPiece) else _drawn(piece, at, sizes)
            )
            texts += _marked(images[-1], at, marks)
            # Two marks enclose an image, which has one position; what is drawn is not seen by what follows, and takes
            # none.
            index, position = index + len(images[-1]) + 2, position + (0 if images[-1].is_noisy else 1)
    return texts, conditioning, drawn


def _owners(one: Tensor, parts: Iterable[_Part], skipped: int = 0) -> Tensor:
    """(tokens,) the sequence of each token, without the first `skipped` of each part. one: any tensor of ids."""
    return torch.cat([one[:0], *(part.column(part.at.sequence)[skipped:] for part in parts)])


def _rows(owners: Sequence[int], parts: Sequence[_Part]) -> tuple[Tensor, Tensor]:
    """`rows` and `back` of `Bagel.forward`. owners: the row of each part.  parts: all parts, in the order of tokens."""
    if not parts:
        nothing = torch.zeros(0, dtype=torch.int64)
        return nothing[None], nothing
    like = parts[0].indices
    rows: list[list[Tensor]] = [[] for _ in range(max(owners) + 1)]
    lengths, starts, begin = [0] * len(rows), [], 0
    for owner, part in zip(owners, parts, strict=True):
        rows[owner].append(torch.arange(begin, begin + len(part), device=like.device))
        starts.append(lengths[owner])
        lengths[owner] += len(part)
        begin += len(part)
    longest = max(lengths)
    back = [
        owner * longest + start + torch.arange(len(part), device=like.device)
        for owner, start, part in zip(owners, starts, parts, strict=True)
    ]
    filled = [F.pad(torch.cat(row), (0, longest - length)) for row, length in zip(rows, lengths, strict=True)]
    return torch.stack(filled), torch.cat(back)


def _is_token(rows: Tensor, back: Tensor) -> Tensor:
    """(B, L): whether an entry of a row is a token, not padding."""
    is_token = torch.zeros(rows.numel(), dtype=torch.bool, device=rows.device)
    return is_token.index_fill(0, back, True).view(rows.shape)


def _mask(order: Sequence[_Part], rows: Tensor, back: Tensor) -> Tensor:
    return attention_mask(
        torch.cat([part.indices for part in order])[rows],
        torch.cat([part.column(part.at.piece) for part in order])[rows],
        torch.cat([part.column(int(part.in_image)) for part in order]).bool()[rows],
        torch.cat([part.column(int(part.is_noisy)) for part in order]).bool()[rows],
        _is_token(rows, back),
    )


def _text(piece: TextPiece, at: _At, marks: Marks) -> _Part:
    ids = piece.ids
    content = torch.cat([ids.new_tensor([marks.text_begin]), ids, ids.new_tensor([marks.text_end])])
    steps = torch.arange(len(content), device=ids.device)
    in_loss = piece.in_loss
    return _Part(at, content, at.index + steps, at.position + steps, steps, steps[:0], in_loss=in_loss)


def _conditioning(piece: ConditioningPiece, at: _At, sizes: BagelSizes) -> _Part:
    size = sizes.vision.patch_size
    rows, columns = (side // size for side in piece.pixels.shape[1:])
    return _image(patched(piece.pixels, size), at, rows, columns, sizes.vision.max_side)


def _drawn(piece: DrawnPiece, at: _At, sizes: BagelSizes) -> _Part:
    rows, columns = (side // PATCH for side in piece.latents.shape[1:])
    part = _image(patched(piece.latents), at, rows, columns, sizes.latent_side)
    return replace(part, sigma=piece.sigma, is_noisy=not piece.clean)


def _image(patches: Tensor, at: _At, rows: int, columns: int, side: int) -> _Part:
    """The part of an image without noise. side: cells per side of the largest grid."""
    if max(rows, columns) > side:
        raise ValueError(f"an image of {rows} x {columns} patches is larger than the model's {side} x {side}")
    steps = torch.arange(len(patches), device=patches.device)
    grid = steps // columns * side + steps % columns
    positions = torch.full_like(steps, at.position)
    return _Part(at, patches, at.index + 1 + steps, positions, grid, patches.new_zeros(()), in_image=True)


def _marked(image: _Part, at: _At, marks: Marks) -> list[_Part]:
    """The two tokens around an image, which see the same tokens and are seen by the same tokens as the image."""
    ends = [(marks.image_begin, at.index), (marks.image_end, at.index + len(image) + 1)]
    one = image.indices.new_tensor
    return [
        _Part(
            at,
            one([mark]),
            one([index]),
            one([at.position]),
            one([0]),
            image.sigma,
            True,
            image.is_noisy,
        )
        for mark, index in ends
    ]


def _joined(parts: Sequence[_Part], width: int, like: Tensor) -> Tensor:
    return torch.cat([part.content for part in parts]) if parts else torch.zeros(0, width, device=like.device)
