"""BAGEL's latents and losses, against its network written from the publication, one sequence at a time.

Source: arXiv 2505.14683 and the tensors that the published files name. diffusers has no pipeline of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from diffusers.models.embeddings import get_2d_sincos_pos_embed, get_timestep_embedding
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2TokenizerFast
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from tests.audit.check import Check
from tests.audit.reference import Draws, largest_difference, scaled_latents, seed_of
from tests.audit.run import TALL, WIDE, Model, Once, picture_data, started, write_picture
from tests.runs import step_numbers

MODEL = Model("bagel", "bagel")
CAPTIONS = ("a red fox", "")
QUESTIONS = (("How many dogs?", "two"), ("What colour is the fox's tail?", "red, with a white end"))
LATENT_SIDE = 64
"""Patches of the largest picture that is drawn, per side."""
Apply = Callable[[Tensor, str], Tensor]


@dataclass(frozen=True)
class Piece:
    """tokens: (n, D), with marks.  latents: (n,) which of them are of latents.  is_picture: all see all.  is_noisy: no
    other piece sees it, and the next has its position. A picture that was left out has no tokens."""

    tokens: Tensor
    latents: Tensor
    is_picture: bool
    is_noisy: bool = False


@dataclass(frozen=True)
class Noisy:
    """A picture to draw: latents and noise (C, h, w), and the share of noise."""

    latents: Tensor
    noise: Tensor
    sigma: Tensor


Part = tuple[str, Any]
"""(text, target, conditioning, clean, drawn or gap; the text, the picture, its latents, a `Noisy`, or nothing)."""


@dataclass(frozen=True)
class Losses:
    """images: (latent tokens,) squared errors.  texts: (labels,) cross-entropies, of each target text."""

    images: Tensor
    texts: tuple[Tensor, ...]


class Bagel:
    """The published files, read by their own names."""

    def __init__(self, folder: Path) -> None:
        config, self.llm, self.vit = (
            json.loads((folder / f"{name}.json").read_text()) for name in ("config", "llm_config", "vit_config")
        )
        self.weights = load_file(folder / "ema.safetensors")
        self.tokenizer = Qwen2TokenizerFast.from_pretrained(folder)
        self.vae = autoencoder(config["vae_config"], folder / "ae.safetensors")
        self.seen_side: int = config["vit_max_num_patch_per_side"]

    def latents(self, image: Image.Image) -> Tensor:
        return scaled_latents(self.vae, image)

    @torch.no_grad()
    def losses(self, parts: Sequence[Part]) -> Losses:
        """The losses of a sequence of text and pictures in any order."""
        pieces = [self.piece(*part) for part in parts]
        states = self.run(pieces).split([len(piece.tokens) for piece in pieces])
        images, texts = [torch.zeros(0)], []
        for (kind, content), state in zip(parts, states, strict=True):
            if kind == "drawn":
                target = patched(content.noise - content.latents, 2)
                images.append((self.velocity(state) - target).square().mean(1))
            if kind == "target":
                labels = torch.tensor([*self.ids(content), self.mark("<|im_end|>")])
                logits = self.linear(self.rms(state[:-1], "language_model.model.norm"), "language_model.lm_head")
                texts.append(F.cross_entropy(logits, labels, reduction="none"))
        return Losses(torch.cat(images), tuple(texts))

    def velocity(self, states: Tensor) -> Tensor:
        """(patches, values of a patch). states: of a drawn picture with its marks."""
        return self.linear(self.rms(states[1:-1], "language_model.model.norm_moe_gen"), "llm2vae")

    def piece(self, kind: str, content: Any) -> Piece:
        if kind in ("text", "target"):
            return self.text(self.ids(content))
        if kind == "conditioning":
            return self.picture(self.looked_at(content))
        if kind == "clean":
            return self.picture(self.latent_tokens(content, torch.zeros(1)), of_latents=True)
        if kind == "drawn":
            noisy = (1 - content.sigma) * content.latents + content.sigma * content.noise
            return self.picture(self.latent_tokens(noisy, content.sigma), of_latents=True, is_noisy=True)
        return Piece(self.embedded([]), torch.zeros(0, dtype=torch.bool), is_picture=True)

    def latent_tokens(self, latents: Tensor, sigma: Tensor) -> Tensor:
        """(patches, D). latents: (C, h, w).  sigma: (1,)."""
        waves = get_timestep_embedding(sigma, 256, flip_sin_to_cos=True, downscale_freq_shift=0)
        time = self.linear(F.silu(self.linear(waves, "time_embedder.mlp.0")), "time_embedder.mlp.2")
        rows, columns = (side // 2 for side in latents.shape[1:])
        return self.linear(patched(latents, 2), "vae2llm") + time + self.places(rows, columns, LATENT_SIDE)

    def noisy(self, latents: Tensor, draws: Draws) -> Noisy:
        """The timestep is the sigmoid of a standard normal number, without shift."""
        sigma = torch.sigmoid(torch.special.ndtri(torch.tensor([draws.quantile])))
        return Noisy(latents, draws.normal("noise", tuple(latents.shape)), sigma)

    def looked_at(self, image: Image.Image) -> Tensor:
        """The tokens of a picture after SigLIP, whose last layer is left out, and the connector."""
        size: int = self.vit["patch_size"]
        pixels = VaeImageProcessor(vae_scale_factor=size).preprocess(image)[0]
        rows, columns = (side // size for side in pixels.shape[1:])
        numbers = [row * self.seen_side + column for row in range(rows) for column in range(columns)]
        name, heads = "vit_model.vision_model", self.vit["num_attention_heads"]
        x = self.linear(patched(pixels, size), f"{name}.embeddings.patch_embedding")
        x = x + self.weights[f"{name}.embeddings.position_embedding.weight"][numbers]
        for number in range(self.vit["num_hidden_layers"] - 1):
            layer = f"{name}.encoder.layers.{number}"
            y = self.norm(x, f"{layer}.layer_norm1")
            parts = (self.linear(y, f"{layer}.self_attn.{part}_proj").unflatten(1, (heads, -1)) for part in "qkv")
            x = x + self.linear(attention(*parts), f"{layer}.self_attn.out_proj")
            y = self.linear(self.norm(x, f"{layer}.layer_norm2"), f"{layer}.mlp.fc1")
            x = x + self.linear(F.gelu(y, approximate="tanh"), f"{layer}.mlp.fc2")
        x = self.linear(self.norm(x, f"{name}.post_layernorm"), "connector.fc1")
        x = self.linear(F.gelu(x, approximate="tanh"), "connector.fc2")
        return x + self.places(rows, columns, self.seen_side)

    def run(self, pieces: Sequence[Piece]) -> Tensor:
        """The states after the last layer, (tokens, D). Text moves on one position per token, a picture one in all."""
        x = torch.cat([piece.tokens for piece in pieces])
        generated = torch.cat([piece.latents for piece in pieces])
        owner = torch.tensor([n for n, piece in enumerate(pieces) for _ in piece.tokens])
        whole = torch.tensor([piece.is_picture for piece in pieces])[owner]
        same, hidden = owner[:, None] == owner, torch.tensor([piece.is_noisy for piece in pieces])[owner]
        seen = (torch.ones(len(x), len(x)).tril().bool() | (same & whole[:, None])) & (same | ~hidden)
        rotation = self.rotation(positions_of(pieces))

        def expert(apply: Apply, x: Tensor, name: str) -> Tensor:
            """Text and pictures that are looked at have one expert, latents the other."""
            of_latents, other = (apply(x, name.format(suffix)) for suffix in ("_moe_gen", ""))
            return torch.where(generated.view(-1, *[1] * (other.dim() - 1)), of_latents, other)

        for number in range(self.llm["num_hidden_layers"]):
            layer = f"language_model.model.layers.{number}"
            y = expert(self.rms, x, f"{layer}.input_layernorm{{}}")
            query, key, value = (
                expert(self.linear, y, f"{layer}.self_attn.{part}_proj{{}}").unflatten(1, (count, -1))
                for part, count in zip("qkv", self.heads, strict=True)
            )
            query, key = (expert(self.rms, h, f"{layer}.self_attn.{p}_norm{{}}") for h, p in ((query, "q"), (key, "k")))
            query, key = apply_rotary_pos_emb(query, key, *rotation)
            x = x + expert(self.linear, attention(query, key, value, seen), f"{layer}.self_attn.o_proj{{}}")
            y = expert(self.rms, x, f"{layer}.post_attention_layernorm{{}}")
            gate, up = (expert(self.linear, y, f"{layer}.mlp{{}}.{part}_proj") for part in ("gate", "up"))
            x = x + expert(self.linear, F.silu(gate) * up, f"{layer}.mlp{{}}.down_proj")
        return x

    @property
    def heads(self) -> tuple[int, int, int]:
        """Of queries, keys and values."""
        few: int = self.llm["num_key_value_heads"]
        return self.llm["num_attention_heads"], few, few

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        width = self.llm["hidden_size"] // self.llm["num_attention_heads"]
        angles = positions[:, None] * self.llm["rope_theta"] ** -(torch.arange(0, width, 2) / width)
        angles = torch.cat([angles, angles], dim=1)
        return angles.cos(), angles.sin()

    def text(self, ids: Sequence[int]) -> Piece:
        tokens = self.embedded([self.mark("<|im_start|>"), *ids, self.mark("<|im_end|>")])
        return Piece(tokens, torch.zeros(len(tokens), dtype=torch.bool), is_picture=False)

    def picture(self, tokens: Tensor, of_latents: bool = False, is_noisy: bool = False) -> Piece:
        """Its marks are read by the expert of text."""
        first, last = (self.embedded([self.mark(f"<|vision_{end}|>")]) for end in ("start", "end"))
        latents = torch.tensor([False, *[of_latents] * len(tokens), False])
        return Piece(torch.cat([first, tokens, last]), latents, is_picture=True, is_noisy=is_noisy)

    def places(self, rows: int, columns: int, side: int) -> Tensor:
        """Sines and cosines of the rows and columns of a picture's patches."""
        table = get_2d_sincos_pos_embed(self.llm["hidden_size"], side, base_size=side, output_type="pt")
        return table.view(side, side, -1)[:rows, :columns].flatten(0, 1).float()

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def mark(self, name: str) -> int:
        number: int = self.tokenizer.get_vocab()[name]
        return number

    def embedded(self, ids: Sequence[int]) -> Tensor:
        return self.weights["language_model.model.embed_tokens.weight"][list(ids)]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def rms(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.llm["rms_norm_eps"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self.weights[f"{name}.{kind}"] for kind in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.vit["layer_norm_eps"])


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
    """query, key, value: (tokens, heads, width), of keys and values perhaps fewer heads. (tokens, heads x width)."""
    times = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(times, dim=1) for heads in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value).flatten(1)


def positions_of(pieces: Sequence[Piece]) -> Tensor:
    positions: list[int] = []
    begin = 0
    for piece in pieces:
        count = len(piece.tokens)
        positions += [begin] * count if piece.is_picture else range(begin, begin + count)
        begin += (not piece.is_noisy) if piece.is_picture else count
    return torch.tensor(positions)


def patched(image: Tensor, size: int) -> Tensor:
    """(C, H, W) as patches, row by row, each by row, column and channel."""
    columns = F.unfold(image[None], size, stride=size)[0].T
    return columns.unflatten(1, (image.shape[0], -1)).transpose(1, 2).flatten(1)


def autoencoder(sizes: dict[str, Any], file: Path) -> AutoencoderKL:
    """FLUX.1's, from its original file."""
    vae = AutoencoderKL(
        block_out_channels=[sizes["ch"] * times for times in sizes["ch_mult"]],
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        layers_per_block=sizes["num_res_blocks"],
        latent_channels=sizes["z_channels"],
        norm_num_groups=sizes["num_groups"],
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    vae.load_state_dict(convert_ldm_vae_checkpoint(load_file(file), vae.config))
    return vae


@dataclass(frozen=True)
class Figures:
    """Largest absolute difference of the latents; relative ones of the losses of one picture and of a batch."""

    latents: float
    one: float
    batch: float


def compare(folder: Path) -> Figures:
    """A validation loss of one picture, then a step on two pictures and two questions."""
    images = [write_picture(folder / "data" / f"{i}.png", WIDE, text, i) for i, text in enumerate(CAPTIONS)]
    unseen = write_picture(folder / "unseen" / "0.png", TALL, "a blue house by the sea", seed=9)
    lines = [
        {"image": f"data/{i}.png", "question": question, "answer": answer}
        for i, (question, answer) in enumerate(QUESTIONS)
    ]
    asked = folder / "questions.jsonl"
    asked.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    path = MODEL.write(folder / "cache")
    # Sizes at which no picture is scaled.
    data = {**picture_data(folder), "questions": str(asked), "resolution": 96, "seen_resolution": 96}
    with started(
        MODEL, path, folder, {"data": data, "train": {"batch_size": 4, "micro_batch": 4, "steps": 1}}
    ) as trainer:
        (step,) = trainer.loader.micro_batches(0)
        one, batch = trainer.validate(), step_numbers(trainer).loss
        seed = trainer.cfg.train.seed
    reference = Bagel(path)
    latents = [reference.latents(image) for image in images]
    apart, losses = 0.0, []
    for index, example in zip(step.indices, step.examples, strict=True):
        if "latents" not in example:
            asked_ids = example["1.text"].tolist()
            number = [reference.ids(question) for question, _ in QUESTIONS].index(asked_ids)
            question, answer = QUESTIONS[number]
            losses.append(reference.losses([("conditioning", images[number]), ("text", question), ("target", answer)]))
            continue
        number = [reference.ids(caption) for caption in CAPTIONS].index(example["caption"].tolist())
        apart = max(apart, largest_difference({"": example["latents"]}, {"": latents[number]}))
        drawn = reference.noisy(latents[number], Draws(seed, index))
        losses.append(reference.losses(drawing(CAPTIONS[number], drawn)))
    caption = (folder / "unseen" / "0.txt").read_text()
    drawn = reference.noisy(reference.latents(unseen), Draws(seed_of(seed, "validation"), 0))
    alone = step_loss([reference.losses(drawing(caption, drawn))])
    return Figures(apart, abs(one / alone - 1), abs(batch / step_loss(losses) - 1))


def drawing(caption: str, drawn: Noisy) -> list[Part]:
    """An empty caption leaves no text at all."""
    return [*([("text", caption)] if caption else []), ("drawn", drawn)]


def step_loss(losses: Sequence[Losses], mse_weight: float = 1.0, ce_weight: float = 1.0) -> float:
    """As published: the mean of all latent tokens of the step and the mean of all its labels, each with its weight."""
    images = torch.cat([one.images for one in losses])
    texts = torch.cat([torch.zeros(0), *(text for one in losses for text in one.texts)])
    both = ((mse_weight, images), (ce_weight, texts))
    return sum(weight * float(found.mean()) for weight, found in both if len(found))


COMPARED = Once(compare)
CHECKS = (
    Check(MODEL.name, "latents", 2e-6, COMPARED.figure("latents"), is_quick=True),
    Check(MODEL.name, "loss of one", 1e-6, COMPARED.figure("one"), is_quick=True),
    Check(MODEL.name, "loss of two images and two answers", 1e-6, COMPARED.figure("batch"), is_quick=True),
)
