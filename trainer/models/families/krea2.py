"""Krea 2 Raw and its distilled Turbo, trained by flow matching.

Example keys: "latents" (16, H/8, W/8) fp32, normalised; "prompt_embeds" (L, N, D), N hidden states of each of the
caption's own tokens and of the template's end, in the text encoder's type. A Batch adds a batch dim in front and pads
captions to the longest; if their lengths differ, "prompt_mask" (B, L) is true for a caption's own tokens.

diffusers' pipeline pads captions before the template's end, and masks the padding and gives it no position: the states
without padding are the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm, Krea2Transformer2DModel
from torch import Tensor, nn

from trainer.config.families import Distilled
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models.base import LoadModule, TextLength
from trainer.models.flow_transformer import FlowTransformer, Index, masked_captions
from trainer.models.objectives.base import Batch, Example
from trainer.models.objectives.flow_matching import Shift, ShiftLine
from trainer.models.parts.folder import check_architecture, check_inputs, write_random
from trainer.models.parts.image import flux_blocks
from trainer.models.parts.image.euler import euler_scheduler, linear_mu_of, spaced_sigmas
from trainer.models.parts.image.images import pack, patchify, unpack, unpatchify
from trainer.models.parts.image.qwen import (
    AFTER_CAPTION,
    BEFORE_CAPTION,
    QWEN_AUTOENCODER,
    TINY_QWEN_VAE,
    TOKENS_AFTER,
    TOKENS_BEFORE,
    published_qwen_vae,
)
from trainer.models.parts.image.text_encoder import (
    QWEN3_VL_4B,
    TextEncoder,
    hidden_states,
    language_model_config,
    load_language_model,
    load_tokenizer,
    max_tokens,
    text_lengths,
    tiny_qwen3_vl,
    write_tiny_tokenizer,
)
from trainer.models.parts.layout import numbered, tensors_of
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


ARCHITECTURES = {"raw": Architecture(28, 48)}
"""Turbo has the same transformer."""
DEFAULT_ARCHITECTURE = "raw"
SELECTED = "text_encoder_select_layers"
"""The argument of diffusers' pipeline with the hidden states that the transformer reads."""
TEXT_LAYERS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
"""Its default."""
MAX_TOKENS = 512
"""With the end of the template, without its beginning."""
DISTILLED_MU = 1.15
"""Logarithm of the shift in Turbo's sampler, for images of any size."""


class Krea2(FlowTransformer):
    """In samples, guidance is the `guidance_scale` of diffusers' pipeline plus 1, whose 0 means no guidance."""

    network = Krea2Transformer2DModel
    autoencoder = QWEN_AUTOENCODER
    lora_loader = "Krea2LoraLoaderMixin"
    shard = ShardSpec(
        blocks=("Krea2TransformerBlock", "Krea2TextFusionBlock"),
        fp32_inputs=frozenset({"timestep"}),
        returns_views=("Krea2Transformer2DModel",),
    )
    # Adapters leave the blocks alone that only the caption passes through, so that nothing is differentiated there.
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_gate|to_out\.0)",
            r"transformer_blocks\.\d+\.ff\.(gate|up|down)",
        )
    }
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", Krea2Transformer2DModel.__name__)}
    distilled = (
        Distilled(
            ("Krea-2-Turbo", "krea2_turbo_bf16", "turbo"),
            base="krea/Krea-2-Raw",
            steps=8,
            marks={"model_index.json": {"is_distilled": True}},
        ),
    )
    options_read = frozenset({"architecture", "distilled", "max_tokens"})
    longest_text = 4096  # the option's own limit
    shift = Shift(ShiftLine(many=6400))

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._vae = self._folder.config("vae", self.autoencoder.name)
        self._language_model = language_model_config(self._folder, "qwen3_vl")
        self._max_tokens = max_tokens(model, self._folder, "tokenizer", MAX_TOKENS)
        config = self._architecture
        own = Architecture(config.num_layers, config.num_attention_heads)
        check_architecture(model, self._folder, ARCHITECTURES, own)
        given = (4 * self._vae["z_dim"], self._language_model["hidden_size"])
        check_inputs(self._folder, (config.in_channels, config.text_hidden_dim), given)
        self._text_layers = self._read_text_layers()

    @property
    def model_spec(self) -> str:
        return "krea-2"

    @property
    def latent_channels(self) -> int:
        return int(self._vae["z_dim"])

    @property
    def text_recipe(self) -> str:
        return f"{self._text_layers} {self._max_tokens}"

    def build(self, component: str) -> nn.Module:
        model = super().build(component)
        norms = [(name, module) for name, module in model.named_modules() if isinstance(module, Krea2RMSNorm)]
        with torch.device("meta"):
            for name, norm in norms:
                model.set_submodule(name, _WideNorm(norm.dim, norm.eps))
        return model

    def layout(self, component: str) -> tuple[Fused, ...]:
        model, blocks = self.build(component), range(self._architecture.num_layers)
        fusion = (
            block
            for kind in ("layerwise_blocks", "refiner_blocks")
            for block in numbered(f"txtfusion.{kind}", f"text_fusion.{kind}", model, BLOCK)
        )
        modules = tensors_of(model, (*MODULES, *fusion, *numbered("blocks", "transformer_blocks", model, BLOCK)))
        table = "transformer_blocks.{}.scale_shift_table".format
        return (*modules, *(Fused(f"blocks.{n}.mod.lin", (table(n),), flattened=True) for n in blocks))

    def text_encoder(self, load: LoadModule) -> TextEncoder:
        from transformers import Qwen3VLTextConfig, Qwen3VLTextModel

        classes = (Qwen3VLTextConfig, Qwen3VLTextModel)
        return load_language_model(load, self._folder, classes, self._language_model, self._text_layers)

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoder, caption: str) -> Example:
        """Encode to several hidden states per token, with the template's end after a caption of any length."""
        text = encoder.tokenizer(BEFORE_CAPTION + caption, truncation=True, max_length=self._num_read)
        ids = torch.tensor([text.input_ids + encoder.tokenizer(AFTER_CAPTION).input_ids])
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        states = hidden_states(encoder.model, tokens, self._text_layers)
        return {"prompt_embeds": torch.stack(states, dim=2)[0, TOKENS_BEFORE:].cpu()}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        tokenizer = load_tokenizer(self._folder, "tokenizer")
        lengths = text_lengths("text_encoder", tokenizer, captions, self._num_read, BEFORE_CAPTION.__add__)
        return [(length,) for length in lengths]

    def longer_text(self, length: TextLength) -> str | None:
        """`model.options.max_tokens` counts the template's end, but not its beginning."""
        uncounted = TOKENS_BEFORE - TOKENS_AFTER
        return super().longer_text(replace(length, needed=length.needed - uncounted, read=length.read - uncounted))

    def batch_key(self, example: Example) -> Hashable:
        # The model gets a mask of the padding: captions of any length share a batch.
        return tuple(example["latents"].shape[-2:])

    def collate(self, examples: Sequence[Example]) -> Batch:
        return masked_captions(examples)

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        config = self._architecture
        tokens = min(num_tokens, self._max_tokens)
        return {"prompt_embeds": torch.zeros(tokens, config.num_text_layers, config.text_hidden_dim, dtype=dtype)}

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        return {
            "transformer": {
                "in_channels": 64,
                "num_layers": sizes.num_layers,
                "attention_head_dim": 128,
                "num_attention_heads": sizes.num_heads,
                "num_key_value_heads": 12,
                "intermediate_size": 16384,
                "timestep_embed_dim": 256,
                "text_hidden_dim": QWEN3_VL_4B["hidden_size"],
                "num_text_layers": len(TEXT_LAYERS),
                "text_num_attention_heads": 20,
                "text_num_key_value_heads": 20,
                "text_intermediate_size": 6912,
                "num_layerwise_text_blocks": 2,
                "num_refiner_text_blocks": 2,
                "axes_dims_rope": [32, 48, 48],
            },
            "vae": published_qwen_vae(),
            "text_encoder": QWEN3_VL_4B,
            "tokenizer": {"model_max_length": MAX_TOKENS},
            "model_index.json": {SELECTED: TEXT_LAYERS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        return {
            "transformer": TINY_TRANSFORMER,
            "vae": TINY_QWEN_VAE,
            "text_encoder": tiny_qwen3_vl(TINY_WIDTH, TINY_VOCABULARY, num_layers=3),
            "scheduler": {"use_dynamic_shifting": True, "max_image_seq_len": 6400},
            "model_index.json": {SELECTED: TINY_LAYERS},
        }

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        patches, text = patchify(latents), batch["prompt_embeds"]
        height, width = patches.shape[-2:]
        # All tokens of the caption have position 0. Integers: bf16 is exact only up to 256.
        text_ids = torch.zeros(text.shape[1], 3, dtype=torch.int64)
        packed = model["transformer"](
            hidden_states=pack(patches),
            encoder_hidden_states=text.to(latents.dtype),
            timestep=sigma,
            position_ids=send(torch.cat([text_ids, flux_blocks.image_ids(height, width)]), latents.device),
            encoder_attention_mask=batch.get("prompt_mask"),
            return_dict=False,
        )[0]
        return unpatchify(unpack(packed.float(), height, width))

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from transformers import Qwen3VLConfig, Qwen3VLModel

        write_random(folder / "text_encoder", lambda: Qwen3VLModel(Qwen3VLConfig(**configs["text_encoder"])))
        # The tokenizer is trained on the template, so that it has its 34 tokens before the caption.
        corpus = [BEFORE_CAPTION + AFTER_CAPTION] * 16
        write_tiny_tokenizer(folder / "tokenizer", TINY_VOCABULARY, TINY_TOKENS, corpus=corpus)
        return "Krea2Pipeline", {
            "text_encoder": ("transformers", "Qwen3VLModel"),
            "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        }

    def sampler(self, noise: Tensor, num_steps: int) -> Any:
        mu = DISTILLED_MU if self.is_distilled else linear_mu_of(self._scheduler, self.num_tokens(noise))
        return euler_scheduler(self._scheduler, num_steps, noise.device, mu, sigmas=spaced_sigmas(num_steps))

    @property
    def _num_read(self) -> int:
        """Most tokens of the template's beginning and the caption."""
        return TOKENS_BEFORE + self._max_tokens - TOKENS_AFTER

    def _read_text_layers(self) -> tuple[int, ...]:
        """The hidden states that are stacked, which the pipeline's index names.

        Raises:
            InputError: The encoder does not have them, or the transformer reads another number.
        """
        layers = self._folder.read("model_index.json").get(SELECTED) or list(TEXT_LAYERS)
        depth, needed = self._language_model["num_hidden_layers"], self._architecture.num_text_layers
        numbers = [layer for layer in layers if layer in range(depth + 1)] if isinstance(layers, list) else []
        if numbers != layers or len(layers) != needed:
            raise InputError(
                f"{self._folder.field} {self.folder}: model_index.json has {SELECTED} {layers}, but the transformer "
                f"reads {needed} hidden states, and the text encoder has 0 to {depth}; download the folder again"
            )
        return tuple(layers)


FAMILY = Krea2


class _WideNorm(nn.Module):
    """diffusers' norm, with 1 + weight in fp32 for weights of any type, as in the model's own code.

    In bf16, the sum has 8 bits, of which a small weight keeps few; and torch has no fused norm of fp32 activations with
    bf16 weights.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.float() + 1
        return nn.functional.rms_norm(x.float(), scale.shape, scale, self.eps).to(x.dtype)


MODULES = (
    Fused("first", ("img_in",)),
    Fused("tmlp.0", ("time_embed.linear_1",)),
    Fused("tmlp.2", ("time_embed.linear_2",)),
    Fused("tproj.1", ("time_mod_proj",)),
    Fused("txtfusion.projector", ("text_fusion.projector",)),
    Fused("txtmlp.0.scale", ("txt_in.norm.weight",)),
    Fused("txtmlp.1", ("txt_in.linear_1",)),
    Fused("txtmlp.3", ("txt_in.linear_2",)),
    Fused("last.modulation.lin", ("final_layer.scale_shift_table",)),
    Fused("last.norm.scale", ("final_layer.norm.weight",)),
    Fused("last.linear", ("final_layer.linear",)),
)
"""The modules and tensors outside of blocks under their names in the original file."""
BLOCK = {
    "prenorm.scale": ("norm1.weight",),
    "postnorm.scale": ("norm2.weight",),
    "attn.wq": ("attn.to_q",),
    "attn.wk": ("attn.to_k",),
    "attn.wv": ("attn.to_v",),
    "attn.gate": ("attn.to_gate",),
    "attn.qknorm.qnorm.scale": ("attn.norm_q.weight",),
    "attn.qknorm.knorm.scale": ("attn.norm_k.weight",),
    "attn.wo": ("attn.to_out.0",),
    "mlp.gate": ("ff.gate",),
    "mlp.up": ("ff.up",),
    "mlp.down": ("ff.down",),
}
"""Those of a block of either kind, but for its modulation."""


# The model of `model.path: tiny`.

TINY_LAYERS = (1, 2)
TINY_TOKENS = 48
TINY_WIDTH = 32
TINY_VOCABULARY = 512
TINY_TRANSFORMER = {
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "timestep_embed_dim": 32,
    "text_hidden_dim": TINY_WIDTH,
    "num_text_layers": len(TINY_LAYERS),
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 48,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1,
    "axes_dims_rope": [4, 6, 6],
}
