"""BAGEL's network: a decoder that reads text and images and draws latents, in one sequence (arXiv 2505.14683).

Each token is text, a patch of a conditioning image, or a patch of latents, noisy or clean. All tokens attend to each
other as the mask allows; every other weight belongs to one of two experts: `understanding` for text and conditioning
images, `generation` for latents. Tokens are kept in that order, so that no layer scatters or gathers; the mask and
`positions` hold where a token is in its sequence.

Shapes: T text tokens, P patches of conditioning images, N patches of latents, S = T + P + N, D the width.

See DECISIONS 47.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.weights.files import Fused

BLOCKS = ("BagelLayer", "BagelVisionLayer")
"""Classes of the modules that are sharded one by one."""
TIMESTEP_FREQUENCIES = 128
"""Frequencies of the timestep's sines and cosines."""
Rows = tuple[Tensor, Tensor, Tensor]
"""(rows, back, mask) of `Bagel.forward`, or (patch_rows, patch_back, patch_mask)."""


@dataclass(frozen=True)
class VisionSizes:
    """Sizes of the encoder of conditioning images, a SigLIP.

    Attributes:
        max_side: Patches per side of the largest image.
    """

    width: int
    num_layers: int
    num_heads: int
    hidden_width: int
    patch_size: int
    max_side: int
    eps: float = 1e-6

    @property
    def patch_numbers(self) -> int:
        """Number of values in one RGB patch."""
        return 3 * self.patch_size**2


@dataclass(frozen=True)
class BagelSizes:
    """Sizes of the whole network.

    Attributes:
        num_kv_heads: Heads of keys and values.
        latent_side: Patches per side of the largest drawn image.
        latent_numbers: Number of values in one patch of latents.
    """

    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_width: int
    vocabulary: int
    vision: VisionSizes
    latent_side: int
    latent_numbers: int = 64
    rope_theta: float = 1e6
    eps: float = 1e-6

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.width // self.num_heads


BAGEL_7B_MOT = BagelSizes(
    width=3584,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    hidden_width=18944,
    vocabulary=152064,
    vision=VisionSizes(width=1152, num_layers=26, num_heads=16, hidden_width=4304, patch_size=14, max_side=70),
    latent_side=64,
)
"""BAGEL-7B-MoT uses 7 of its 14 billion parameters per token. The last of the encoder's 27 layers is left out."""


class Bagel(nn.Module):
    """Predicts logits of next tokens and velocities of latents for packed sequences."""

    def __init__(self, sizes: BagelSizes) -> None:
        super().__init__()
        width = sizes.width
        self.sizes = sizes
        self.text_embedding = nn.Embedding(sizes.vocabulary, width)
        self.vision = BagelVision(sizes.vision)
        self.vision_connector = _two_layers(sizes.vision.width, width, nn.GELU("tanh"))
        self.vision_positions = GridPositions(sizes.vision.max_side, width)
        self.latent_in = nn.Linear(sizes.latent_numbers, width)
        self.latent_positions = GridPositions(sizes.latent_side, width)
        self.timestep = _two_layers(2 * TIMESTEP_FREQUENCIES, width, nn.SiLU())
        self.layers = nn.ModuleList(BagelLayer(sizes) for _ in range(sizes.num_layers))
        self.understanding_norm = nn.RMSNorm(width, sizes.eps)
        self.generation_norm = nn.RMSNorm(width, sizes.eps)
        self.text_out = nn.Linear(width, sizes.vocabulary, bias=False)
        self.latent_out = nn.Linear(width, sizes.latent_numbers)

    def forward(
        self,
        *,
        text: Tensor,
        predicted: Tensor,
        patches: Tensor,
        patch_cells: Tensor,
        patch_rows: Tensor,
        patch_back: Tensor,
        patch_mask: Tensor,
        latents: Tensor,
        latent_cells: Tensor,
        sigma: Tensor,
        positions: Tensor,
        rows: Tensor,
        back: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the network.

        Args:
            text: (T,) token ids.
            predicted: (K,) indices of the text tokens after which the next token is predicted.
            patches: (P, values of a patch), pixels by row, column and channel, in [-1, 1].
            patch_cells: (P,) cell in the image's grid, row x `max_side` + column.
            patch_rows: `rows` for the patches of each conditioning image.
            patch_back: `back` for these patches.
            patch_mask: (images, 1, L) whether an entry of `patch_rows` is a patch, not padding.
            latents: (N, latent numbers), noisy or clean, by row, column and channel.
            latent_cells: (N,) cell in the image's grid, row x `latent_side` + column.
            sigma: (N,) share of noise, 0 = data, 1 = noise.
            positions: (S,) positions for rotary embeddings.
            rows: (B, L) indices of the tokens of each packed sequence; padding may be any index.
            back: (S,) index of each token in the flattened rows.
            mask: (B, L, L) whether a token of a row attends to another, see `attention_mask`.

        Returns:
            Logits (K, vocabulary) and velocities (N, latent numbers).
        """
        conditioning = self._encode_conditioning(patches, patch_cells, (patch_rows, patch_back, patch_mask))
        # Each layer has two sets of weights: texts and conditioning images go through one, latents through the other,
        # and attention joins them.
        understanding = torch.cat([self.text_embedding(text), conditioning])
        timestep = self.timestep(timestep_waves(sigma).to(latents.dtype))
        generation = self.latent_in(latents) + timestep + self.latent_positions(latent_cells).to(latents.dtype)
        rotation = rotary_waves(positions, self.sizes)
        for layer in self.layers:
            understanding, generation = layer(understanding, generation, rotation, (rows, back, mask))
        texts = self.understanding_norm(understanding[: len(text)][predicted])
        return self.text_out(texts), self.latent_out(self.generation_norm(generation))

    def _encode_conditioning(self, patches: Tensor, cells: Tensor, rows: Rows) -> Tensor:
        """Encode the conditioning images, (P, D). A rank without one runs the encoder too: other ranks wait for it."""
        is_empty = len(patches) == 0
        if is_empty:
            patches, cells = patches.new_zeros(1, patches.shape[1]), cells.new_zeros(1)
            rows = cells.new_zeros(1, 1), cells, torch.ones(1, 1, 1, dtype=torch.bool, device=cells.device)
        features = self.vision_connector(self.vision(patches, cells, rows))
        features = features + self.vision_positions(cells).to(features.dtype)
        output: Tensor = features[:0] if is_empty else features
        return output


class BagelLayer(nn.Module):
    """One layer of the decoder, once for each expert."""

    def __init__(self, sizes: BagelSizes) -> None:
        super().__init__()
        self.understanding = Expert(sizes)
        self.generation = Expert(sizes)

    def forward(
        self, understanding: Tensor, generation: Tensor, rotation: tuple[Tensor, Tensor], rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            understanding: (T + P, D).
            generation: (N, D).
            rotation: `rotary_waves` of all S tokens.
            rows: (rows, back, mask) of `Bagel.forward`.

        Returns:
            The new states, in the same shapes.
        """
        parts = [self.understanding.heads(understanding), self.generation.heads(generation)]
        query, key, value = (torch.cat(pair, dim=1) for pair in zip(*parts, strict=True))
        groups = query.shape[0] // key.shape[0]
        key, value = (heads.repeat_interleave(groups, dim=0) for heads in (_rotated(key, rotation), value))
        together = _attend(_rotated(query, rotation), key, value, rows)
        count = len(understanding)
        return (
            self.understanding.finish(understanding, together[:count]),
            self.generation.finish(generation, together[count:]),
        )


class Expert(nn.Module):
    """The weights of one layer for one kind of tokens; the layer uses them before and after attention."""

    def __init__(self, sizes: BagelSizes) -> None:
        super().__init__()
        width, keys = sizes.width, sizes.num_kv_heads * sizes.head_width
        self.attention_norm = nn.RMSNorm(width, sizes.eps)
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, keys)
        self.to_v = nn.Linear(width, keys)
        self.norm_q = nn.RMSNorm(sizes.head_width, sizes.eps)
        self.norm_k = nn.RMSNorm(sizes.head_width, sizes.eps)
        self.to_out = nn.Linear(width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, sizes.eps)
        self.gate = nn.Linear(width, sizes.hidden_width, bias=False)
        self.up = nn.Linear(width, sizes.hidden_width, bias=False)
        self.down = nn.Linear(sizes.hidden_width, width, bias=False)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (heads, tokens, head width). x: (tokens, D)."""
        x = self.attention_norm(x)
        width = self.norm_q.weight.shape[0]
        query, key, value = (
            to(x).unflatten(1, (-1, width)).transpose(0, 1) for to in (self.to_q, self.to_k, self.to_v)
        )
        return self.norm_q(query), self.norm_k(key), value

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, (tokens, D).

        Args:
            x: The layer's input, (tokens, D).
            attended: The output of attention, (tokens, D).
        """
        x = x + self.to_out(attended)
        hidden = self.hidden_norm(x)
        output: Tensor = x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return output


class BagelVision(nn.Module):
    """The encoder of conditioning images: any number of them, of any shape, in one sequence of patches."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.patch_in = nn.Linear(sizes.patch_numbers, sizes.width)
        self.positions = nn.Embedding(sizes.max_side**2, sizes.width)
        self.layers = nn.ModuleList(BagelVisionLayer(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.LayerNorm(sizes.width, sizes.eps)

    def forward(self, patches: Tensor, cells: Tensor, rows: Rows) -> Tensor:
        """Encode patches, (P, width). Arguments as in `Bagel.forward`."""
        x = self.patch_in(patches) + self.positions(cells)
        for layer in self.layers:
            x = layer(x, rows)
        output: Tensor = self.norm(x)
        return output


class BagelVisionLayer(nn.Module):
    """One layer of `BagelVision`."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.attention_norm = nn.LayerNorm(sizes.width, sizes.eps)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(sizes.width, sizes.width) for _ in range(4))
        self.hidden_norm = nn.LayerNorm(sizes.width, sizes.eps)
        self.up = nn.Linear(sizes.width, sizes.hidden_width)
        self.down = nn.Linear(sizes.hidden_width, sizes.width)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Run the layer. x: (P, width)."""
        y = self.attention_norm(x)
        query, key, value = (
            to(y).unflatten(1, (self.num_heads, -1)).transpose(0, 1) for to in (self.to_q, self.to_k, self.to_v)
        )
        x = x + self.to_out(_attend(query, key, value, rows))
        output: Tensor = x + self.down(F.gelu(self.up(self.hidden_norm(x)), approximate="tanh"))
        return output


class GridPositions(nn.Module):
    """Sines and cosines of a cell in a square grid; not trained, but part of the published file."""

    grid: Tensor

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.register_buffer("grid", torch.empty(side**2, width))

    def forward(self, cells: Tensor) -> Tensor:
        """Look up the cells, (number of cells, D)."""
        return self.grid[cells]


def grid_waves(side: int, width: int) -> Tensor:
    """The table of `GridPositions`, (side x side, width): half of the values for the column, half for the row.

    Source: the sine and cosine table of masked autoencoders (arXiv 2111.06377), which counts columns first.
    """
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    frequencies = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = [axis.flatten()[:, None] * frequencies for axis in (column, row)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1).float()


def timestep_waves(sigma: Tensor) -> Tensor:
    """Cosines and sines of the share of noise, (N, 256), fp32. sigma: (N,).

    Source: DiT's timestep embedding (arXiv 2212.09748), here of sigma itself, not of 1000 sigma.
    """
    exponents = torch.arange(TIMESTEP_FREQUENCIES, device=sigma.device, dtype=torch.float32) / TIMESTEP_FREQUENCIES
    angles = sigma.float()[:, None] * torch.exp(-math.log(10000) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def rotary_waves(positions: Tensor, sizes: BagelSizes) -> tuple[Tensor, Tensor]:
    """(cosines, sines) of rotary embeddings, each (S, head width), fp32 (arXiv 2104.09864)."""
    steps = torch.arange(0, sizes.head_width, 2, device=positions.device, dtype=torch.float32) / sizes.head_width
    angles = positions.float()[:, None] * sizes.rope_theta**-steps
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos(), angles.sin()


def attention_mask(index: Tensor, piece: Tensor, whole: Tensor, noisy: Tensor, is_token: Tensor) -> Tensor:
    """Build (B, L, L) bool: whether a token (row) attends to another (column) of its sequence.

    Padding is seen only by itself: a softmax over nothing is not a number.

    Args:
        index: (B, L) index of the token in its sequence.
        piece: (B, L) index of its piece: a text, or an image with its marks.
        whole: (B, L) whether it sees all of its own piece, as patches do; text sees the tokens before it.
        noisy: (B, L) whether it belongs to latents that are being drawn, which only their own piece sees.
        is_token: (B, L) whether it is a token, not padding.
    """
    same_piece = piece[:, :, None] == piece[:, None]
    before = index[:, None] <= index[:, :, None]
    seen = (before | (same_piece & whole[:, :, None])) & (same_piece | ~noisy[:, None]) & is_token[:, None]
    return seen | torch.eye(index.shape[1], dtype=torch.bool, device=index.device)


def _attend(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
    """Attention within each row, (tokens, heads x head width). query, key, value: (heads, tokens, head width).

    Attention of all tokens to all others would cost as many times more as there are rows.
    """
    numbers, back, mask = rows
    query, key, value = (
        heads.index_select(1, numbers.flatten()).view(-1, *numbers.shape, heads.shape[2]).transpose(0, 1)
        for heads in (query, key, value)
    )
    seen = F.scaled_dot_product_attention(query, key, value, mask[:, None])
    return seen.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, back)


def _rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embeddings. heads: (heads, S, head width)."""
    cosines, sines = rotation
    first, second = heads.chunk(2, dim=-1)
    return (heads * cosines + torch.cat([-second, first], dim=-1) * sines).to(heads.dtype)


def _two_layers(width_in: int, width: int, between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width_in, width), between, nn.Linear(width, width))


# Names of the tensors in the published file.

_EXPERTS = {"understanding": "", "generation": "_moe_gen"}
_LAYER = {
    "attention_norm": "input_layernorm{}",
    "to_q": "self_attn.q_proj{}",
    "to_k": "self_attn.k_proj{}",
    "to_v": "self_attn.v_proj{}",
    "norm_q": "self_attn.q_norm{}",
    "norm_k": "self_attn.k_norm{}",
    "to_out": "self_attn.o_proj{}",
    "hidden_norm": "post_attention_layernorm{}",
    "gate": "mlp{}.gate_proj",
    "up": "mlp{}.up_proj",
    "down": "mlp{}.down_proj",
}
_VISION_LAYER = {
    "attention_norm": "layer_norm1",
    "to_q": "self_attn.q_proj",
    "to_k": "self_attn.k_proj",
    "to_v": "self_attn.v_proj",
    "to_out": "self_attn.out_proj",
    "hidden_norm": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
_REST = {
    "text_embedding": "language_model.model.embed_tokens",
    "text_out": "language_model.lm_head",
    "understanding_norm": "language_model.model.norm",
    "generation_norm": "language_model.model.norm_moe_gen",
    "vision.patch_in": "vit_model.vision_model.embeddings.patch_embedding",
    "vision.positions": "vit_model.vision_model.embeddings.position_embedding",
    "vision.norm": "vit_model.vision_model.post_layernorm",
    "vision_connector.0": "connector.fc1",
    "vision_connector.2": "connector.fc2",
    "vision_positions.grid": "vit_pos_embed.pos_embed",
    "latent_in": "vae2llm",
    "latent_out": "llm2vae",
    "latent_positions.grid": "latent_pos_embed.pos_embed",
    "timestep.0": "time_embedder.mlp.0",
    "timestep.2": "time_embedder.mlp.2",
}


def published_layout(model: Bagel) -> tuple[Fused, ...]:
    """The tensors of the model as the file `ema.safetensors` of BAGEL-7B-MoT names them, one by one."""
    theirs = dict(_module_names(model.sizes))
    return tuple(Fused(_published_name(name, theirs), (name,)) for name in model.state_dict())


def _published_name(name: str, theirs: dict[str, str]) -> str:
    if name in theirs:
        return theirs[name]
    module, _, kind = name.rpartition(".")
    return f"{theirs[module]}.{kind}"


def _module_names(sizes: BagelSizes) -> Iterator[tuple[str, str]]:
    """(our name, theirs) of every module with tensors of its own."""
    yield from _REST.items()
    for number in range(sizes.num_layers):
        for expert, suffix in _EXPERTS.items():
            for ours, theirs in _LAYER.items():
                name = f"language_model.model.layers.{number}.{theirs.format(suffix)}"
                yield f"layers.{number}.{expert}.{ours}", name
    for number in range(sizes.vision.num_layers):
        for ours, theirs in _VISION_LAYER.items():
            yield f"vision.layers.{number}.{ours}", f"vit_model.vision_model.encoder.layers.{number}.{theirs}"
