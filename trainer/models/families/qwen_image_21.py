"""Qwen-Image-2.1, one model for images from captions and for edits, trained by flow matching.

Example keys: "latents" (64, H/16, W/16) fp32, normalised; "prompt_embeds" (L, D), the text encoder's last hidden states
before its norm of all tokens but those of the system's message and of reference images, in the encoder's type;
"reference_0", "reference_1" and so on, the latents of reference images, which the encoder sees too; with them
"prompt_images" (n,), the text tokens before each. A Batch adds a batch dim in front and pads captions to the longest;
if their lengths differ, "prompt_mask" (B, L) is true for a caption's own tokens.

The transformer reads one sequence: the text with each reference in its place, then the noisy image. A token sees those
before it, and those of an image all of it. Only the noisy image has the time of its noise; all before it has time 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21TemporalTimesteps,
    QwenImage21Transformer2DModel,
)
from PIL import Image
from torch import Tensor, nn

from trainer.config.families import Distilled, Edits
from trainer.config.schema import RunConfig
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.config.size import Size
from trainer.models.base import LoadModule, TextLength, references_of
from trainer.models.flow_transformer import FlowTransformer, Index, masked_captions, reference_shapes
from trainer.models.objectives.base import Batch, Example
from trainer.models.objectives.flow_matching import Shift, ShiftLine
from trainer.models.parts.folder import check_architecture, check_inputs, write_random
from trainer.models.parts.image.euler import euler_scheduler, linear_mu_of, spaced_sigmas
from trainer.models.parts.image.images import pack, unpack
from trainer.models.parts.image.qwen import (
    AFTER_CAPTION,
    QWEN_RGBA_AUTOENCODER,
    TINY_RGBA_VAE,
    published_rgba_vae,
)
from trainer.models.parts.image.seeing import (
    TINY_SEEING,
    TINY_SEEING_IDS,
    VISION,
    SeeingEncoder,
    check_processor,
    load_seeing_encoder,
    seen_states,
    seen_tokens,
    size_of_area,
)
from trainer.models.parts.image.text_encoder import (
    QWEN3_VL_8B,
    load_tokenizer,
    max_tokens,
    text_lengths,
    tiny_qwen3_vl,
    write_tiny_tokenizer,
)
from trainer.models.recognition import json_of
from trainer.parallel.parallelize import ShardSpec
from trainer.system.errors import InputError
from trainer.system.pinned import send
from trainer.weights.files import Fused


@dataclass(frozen=True)
class Architecture:
    """The sizes of a transformer."""

    num_layers: int
    num_heads: int

    def __str__(self) -> str:
        return f"{self.num_layers} blocks of {self.num_heads} heads"


DEFAULT_ARCHITECTURE = "qwen-image-2.1"
ARCHITECTURES = {DEFAULT_ARCHITECTURE: Architecture(32, 32)}
SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
TEMPLATE = f"{SYSTEM}<|im_start|>user\n{{}}{AFTER_CAPTION}"
PICTURE = f"<image{{}}>{VISION}"
"""The texts that the model was trained to see around a caption and an image, copied from diffusers' pipeline."""
EMPTY = " "
"""The caption in place of an empty one."""
MAX_TOKENS = 1024
"""After the system's message."""
GATE, UP = "img_mlp.gate_layer.weight", "img_mlp.proj.weight"
INDEX = "model_index.json"
QWEN3_VL_8B_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": QWEN3_VL_8B["hidden_size"],
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}


class QwenImage21(FlowTransformer):
    network = QwenImage21Transformer2DModel
    autoencoder = QWEN_RGBA_AUTOENCODER
    encoder_folders = ("text_encoder", "processor", "vae")
    lora_loader = "QwenImageLoraLoaderMixin"
    shard = ShardSpec(blocks=("QwenImage21TransformerBlock",), fp32_inputs=frozenset({"timestep"}))
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0)",
            r"transformer_blocks\.\d+\.img_mlp\.(proj|gate_layer|out)",
        )
    }
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", QwenImage21Transformer2DModel.__name__)}
    distilled = (Distilled(("Qwen-Image-2.1-Turbo",), base="Qwen/Qwen-Image-2.1", steps=8, marks={}),)
    options_read = frozenset({"architecture", "distilled", "max_tokens"})
    longest_text = 4096  # the option's own limit
    sample_guidance = 1.0
    shift = Shift(ShiftLine(many=8192, high=0.9))
    # The text encoder has one token for 32 x 32 pixels of a reference, in whose place there are four of latents.
    size_multiple = 32
    token_side = 16
    reads_references = True
    edits = (
        Edits(
            "Qwen/Qwen-Image-2.1",
            architecture=DEFAULT_ARCHITECTURE,
            references=10,
            sees=True,
            marks={"transformer/config.json": {"_class_name": QwenImage21Transformer2DModel.__name__}},
            draws=True,
        ),
    )

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._vae = self._folder.config("vae", self.autoencoder.name)
        self._encoder = self._folder.encoder_config("text_encoder", "qwen3_vl")
        self._max_tokens = max_tokens(model, self._folder, "processor", MAX_TOKENS)
        check_processor(self._folder, self.edits[0].model)
        config = self._architecture
        own = Architecture(config.num_layers, config.num_attention_heads)
        check_architecture(model, self._folder, ARCHITECTURES, own)
        if not config.causal_condition or config.patch_size != 1:
            raise InputError(
                f"{self._folder.field} {self.folder}: the transformer gives text the time of the noisy image, or joins "
                f"latents to patches; only {self.edits[0].model} is trained"
            )
        given = (self._vae["z_dim"], self._encoder["text_config"]["hidden_size"])
        check_inputs(self._folder, (config.in_channels, config.context_in_dim), given)
        self._seen_pixels = 1024 * 1024

    def follow(self, cfg: RunConfig) -> None:
        """The text encoder sees references in the size of their latents at the largest resolution."""
        self._seen_pixels = cfg.data.all_sides[-1] ** 2

    @property
    def model_spec(self) -> str:
        return DEFAULT_ARCHITECTURE

    @property
    def sees_references(self) -> bool:
        return True

    def build(self, component: str) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = _Transformer.from_config(self._transformer)
        return model

    def computed_buffers(self, component: str) -> Mapping[str, Tensor]:
        times: Any = QwenImage21TemporalTimesteps(timestep_dim=256)
        return {"time_text_embed.time_proj.freqs": times.freqs}

    def layout(self, component: str) -> tuple[Fused, ...]:
        """The original file has diffusers' names, but gate and input of the blocks' SwiGLU in one tensor."""
        names = self.build(component).state_dict()
        others = tuple(Fused(name, (name,)) for name in names if not name.endswith((GATE, UP)))
        blocks = [f"transformer_blocks.{number}" for number in range(self._architecture.num_layers)]
        fused = (Fused(f"{block}.img_mlp.gate_up.weight", (f"{block}.{GATE}", f"{block}.{UP}")) for block in blocks)
        return (*others, *fused)

    def text_encoder(self, load: LoadModule) -> SeeingEncoder:
        from transformers import Qwen3VLConfig, Qwen3VLModel

        return load_seeing_encoder(load, self._folder, (Qwen3VLConfig, Qwen3VLModel), self._encoder, "processor")

    def encode_text(self, encoder: SeeingEncoder, caption: str) -> Example:
        return self.encode_edit(encoder, caption, ())

    @torch.no_grad()
    def encode_edit(self, encoder: SeeingEncoder, caption: str, images: Sequence[Image.Image]) -> Example:
        system = _system_tokens(encoder.tokenizer)
        length = system + self._max_tokens
        inputs = seen_tokens(encoder, TEMPLATE, caption or EMPTY, images, PICTURE, length, between=" ", is_scaled=False)
        states = seen_states(encoder, inputs, is_normalised=False)[0, system:].cpu()
        if not images:
            return {"prompt_embeds": states}
        is_text = inputs["input_ids"][0, system:] != encoder.model.config.image_token_id
        # The first token of an image follows one of text.
        begins = ~is_text & is_text.roll(1)
        return {"prompt_embeds": states[is_text], "prompt_images": is_text.cumsum(0)[begins]}

    def seen_size(self, size: Size) -> Size:
        return size_of_area(size, self._seen_pixels)

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        tokenizer = load_tokenizer(self._folder, "processor")
        system = _system_tokens(tokenizer)
        lengths = text_lengths("text_encoder", tokenizer, captions, system + self._max_tokens, TEMPLATE.format)
        return [(replace(one, needed=one.needed - system, read=one.read - system),) for one in lengths]

    def batch_key(self, example: Example) -> Hashable:
        # The model gets a mask of the padding: captions of any length share a batch.
        return (*example["latents"].shape[-2:], *reference_shapes(example))

    def collate(self, examples: Sequence[Example]) -> Batch:
        return masked_captions(examples)

    def sample_rows(self, batch: Batch) -> Mapping[str, Tensor]:
        # The times of all noisy images, then the 0 of what is before them, which no item has for itself.
        rows = torch.cat([torch.arange(len(batch["latents"])), torch.zeros(1, dtype=torch.int64)])
        return {r"time_text_embed\..+|modulation\.1": rows}

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        tokens = min(num_tokens, self._max_tokens)
        return {"prompt_embeds": torch.zeros(tokens, self._architecture.context_in_dim, dtype=dtype)}

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        return {
            "transformer": {
                "in_channels": 64,
                "out_channels": 64,
                "num_layers": sizes.num_layers,
                "attention_head_dim": 128,
                "num_attention_heads": sizes.num_heads,
                "context_in_dim": QWEN3_VL_8B["hidden_size"],
                "axes_dims_rope": [16, 56, 56],
            },
            "vae": published_rgba_vae(),
            "text_encoder": QWEN3_VL_8B | {"vision_config": QWEN3_VL_8B_VISION},
            "processor/tokenizer_config.json": {"model_max_length": 262144},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        return {
            "transformer": TINY_TRANSFORMER,
            "vae": TINY_RGBA_VAE,
            "text_encoder": tiny_qwen3_vl(TINY_WIDTH, TINY_VOCABULARY, num_layers=3) | TINY_SEEING_IDS,
            "scheduler": {
                "use_dynamic_shifting": True,
                "max_shift": 0.9,
                "max_image_seq_len": 8192,
                "shift_terminal": 0.02,
            },
        }

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        references = references_of(batch)
        images = [*references, latents]
        # Equal in a batch: the template has the same text before each image.
        places = batch["prompt_images"][0].tolist() if references else ()
        packed = model["transformer"](
            images=[pack(image) for image in images],
            text=batch["prompt_embeds"].to(latents.dtype),
            timestep=sigma,
            layout=Layout(tuple(places), tuple(tuple(image.shape[-2:]) for image in images)),
            mask=batch.get("prompt_mask"),
        )
        return unpack(packed.float(), *latents.shape[-2:])

    def sampler(self, noise: Tensor, num_steps: int) -> Any:
        """diffusers' scheduler, with the folder's own noise levels if it has as many as there are steps."""
        own = json_of(self.folder, INDEX).get("sample_sigmas") or []
        sigmas = own if len(own) == num_steps else spaced_sigmas(num_steps)
        mu = linear_mu_of(self._scheduler, self.num_tokens(noise))
        return euler_scheduler(self._scheduler, num_steps, noise.device, mu, sigmas=sigmas)

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        def text_encoder() -> Any:
            return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**configs["text_encoder"]))

        write_random(folder / "text_encoder", text_encoder)
        corpus = [TEMPLATE.format(PICTURE.format(1, ""))] * 16
        write_tiny_tokenizer(folder / "processor", TINY_VOCABULARY, TINY_TOKENS, TINY_SEEING, corpus)
        half = [0.5, 0.5, 0.5]
        size = {"shortest_edge": 32 * 32, "longest_edge": 4096 * 4096}
        processor = Qwen2VLImageProcessorPil(patch_size=16, image_mean=half, image_std=half, size=size)
        processor.save_pretrained(folder / "processor")
        return "QwenImage21Pipeline", {
            "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
            "processor": ("transformers", "Qwen3VLProcessor"),
        }


FAMILY = QwenImage21


@dataclass(frozen=True)
class Layout:
    """Where images are in a sequence.

    Attributes:
        places: For each reference, the text tokens before it.
        sizes: Rows and columns of latents of each reference, then of the noisy image, which is at the end.
    """

    places: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]


class _Transformer(QwenImage21Transformer2DModel):  # type: ignore[misc]
    """diffusers' transformer, whose `forward` is given the layout of the sequence.

    diffusers' own reads it from a mask on the device, for which the host waits, and gives the noisy images of a batch
    one position, behind the longest caption. Here each is behind its own caption, as in a batch of one.
    """

    # diffusers reads from the signature what a config may have.
    @wraps(QwenImage21Transformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        for block in self.transformer_blocks:
            block.attn.set_processor(_Attention())

    def forward(
        self, images: Sequence[Tensor], text: Tensor, timestep: Tensor, layout: Layout, mask: Tensor | None
    ) -> Tensor:
        """Predict the velocity of the noisy image, (B, N, C).

        Args:
            images: Latents of the references, then of the noisy image, each (B, tokens, C).
            text: (B, L, D).
            timestep: (B,) in [0, 1].
            layout: Of all items.
            mask: (B, L), true for tokens that are not padding; None if none is.
        """
        parts = [self.img_in(image) for image in images]
        parts, segments = _interleaved(self.txt_in(text), parts, layout)
        length, noisy = segments[-1][1], images[-1].shape[1]
        valid = None
        if mask is not None:
            shown = [mask.new_ones(image.shape[:2]) for image in images]
            valid = torch.cat(_interleaved(mask, shown, layout)[0], dim=1)
        # The time of the noisy image, and that of all before it.
        times = self.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]), text)
        is_noisy = torch.arange(length, device=text.device) >= length - noisy
        modulation, rotary = self.modulation(times), self._rotary(layout, text.shape[1], mask, text.device)
        states = torch.cat(parts, dim=1)
        for block in self.transformer_blocks:
            states = block(states, modulation, rotary, target_token_mask=is_noisy, segments=segments, key_valid=valid)
        predicted: Tensor = self.proj_out(self.norm_out(states[:, -noisy:], times[:-1]))
        return predicted

    def _rotary(self, layout: Layout, num_text: int, mask: Tensor | None, device: torch.device) -> Tensor:
        """The rotation of each token, complex, (1 or B, S, 1, channels / 2).

        Text counts on along all three axes. An image has one position along the first, behind which text goes on as if
        it had as many tokens as its longer side, and rows and columns around 0 along the others; both are even.
        """
        parts, start, position = [], 0, 0
        for place, (height, width) in zip((*layout.places, num_text), layout.sizes, strict=True):
            words = torch.arange(place - start) + position
            position += place - start
            rows, columns = (torch.arange(side) - side // 2 for side in (height, width))
            grid = torch.cartesian_prod(torch.tensor([position]), rows, columns)
            parts += [words[:, None].expand(-1, 3), grid]
            start, position = place, position + max(height, width)
        ids = send(torch.cat(parts), device)[None]
        if mask is not None:
            # Padding is between a caption and its noisy image, which has no more positions for it.
            ids = ids.repeat(len(mask), 1, 1)
            ids[:, -len(grid) :, 0] -= (~mask).sum(dim=1, keepdim=True)
        angles = []
        for axis_ids, channels in zip(ids.unbind(-1), self.pos_embed.axes_dim, strict=True):
            exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
            angles.append(axis_ids[..., None] * (1.0 / self.pos_embed.theta**exponents))
        angle = torch.cat(angles, dim=-1)[:, :, None]
        return torch.polar(torch.ones_like(angle), angle)


def _interleaved(
    text: Tensor, images: Sequence[Tensor], layout: Layout
) -> tuple[list[Tensor], list[tuple[int, int, bool]]]:
    """Put images, (B, tokens, ...) each, into their places in the text, (B, L, ...).

    Returns:
        The parts in order; and for each its begin and end in the sequence, and whether it is text.
    """
    parts, segments, start, length = [], [], 0, 0
    for place, image in zip((*layout.places, text.shape[1]), images, strict=True):
        for part, is_text in ((text[:, start:place], True), (image, False)):
            parts.append(part)
            segments.append((length, length + part.shape[1], is_text))
            length += part.shape[1]
        start = place
    return parts, segments


class _Attention:
    """Attention of each part of a sequence to itself and those before it, in which each item has its own rotation."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: Tensor,
        segments: Sequence[tuple[int, int, bool]],
        key_valid: Tensor | None,
        **unused: Any,
    ) -> Tensor:
        width = attn.inner_dim // attn.heads
        query, key, value = (
            layer(hidden_states).unflatten(-1, (-1, width)) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = (_rotated(norm(x), rotary_emb) for norm, x in ((attn.norm_q, query), (attn.norm_k, key)))
        outputs = []
        for begin, end, is_text in segments:
            mask = None if key_valid is None else key_valid[:, None, None, :end]
            if is_text:
                seen = torch.ones(end - begin, end, dtype=torch.bool, device=query.device).tril(begin)
                mask = seen[None, None] if mask is None else mask & seen
            outputs.append(dispatch_attention_fn(query[:, begin:end], key[:, :end], value[:, :end], attn_mask=mask))
        out = torch.cat(outputs, dim=1).flatten(2)
        for layer in attn.to_out:
            out = layer(out)
        return out


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs of channels in fp32. x: (B, S, heads, channels)."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def _system_tokens(tokenizer: Any) -> int:
    """Tokens of the system's message, whose states are left out."""
    return len(tokenizer(SYSTEM).input_ids)


# The model of `model.path: tiny`.

TINY_TOKENS = 64
TINY_WIDTH = 32
TINY_VOCABULARY = 512
TINY_TRANSFORMER = {
    "in_channels": 8,
    "out_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "context_in_dim": TINY_WIDTH,
    "axes_dims_rope": [4, 6, 6],
}
