"""Qwen-Image and Qwen-Image-Edit (2509, 2511), trained by flow matching.

Example keys: "latents" (16, H/8, W/8) fp32, normalised; "prompt_embeds" (L, D), the last hidden states of the
caption's own tokens in the text encoder's type, for Edit also of the reference images, which that encoder sees;
"reference_0", "reference_1" and so on, the latents of those. A Batch adds a batch dim in front and pads captions to
the longest; if their lengths differ, "prompt_mask" (B, L) is true for a caption's own tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from PIL import Image
from torch import Tensor, nn

from trainer.config.families import Distilled, Edits
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.config.size import Size
from trainer.models.base import LoadModule, TextLength, references_of
from trainer.models.editing import kind_of
from trainer.models.flow_transformer import FlowTransformer, Index, masked_captions, reference_shapes
from trainer.models.objectives.base import Batch, Example
from trainer.models.objectives.flow_matching import Shift, ShiftLine
from trainer.models.parts.folder import check_architecture, check_inputs, write_random
from trainer.models.parts.image.euler import guided
from trainer.models.parts.image.images import pack, patchify, unpack, unpatchify
from trainer.models.parts.image.qwen import (
    AFTER_CAPTION,
    BEFORE_CAPTION,
    QWEN_AUTOENCODER,
    TINY_QWEN_VAE,
    TOKENS_BEFORE,
    published_qwen_vae,
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
    TINY_SPECIAL,
    TextEncoder,
    hidden_states,
    language_model_config,
    load_language_model,
    load_tokenizer,
    max_tokens,
    text_lengths,
    tiny_language_model,
    write_tiny_tokenizer,
)
from trainer.models.recognition import json_of
from trainer.parallel.parallelize import ShardSpec
from trainer.system.errors import InputError
from trainer.weights.files import Fused, WeightFiles


@dataclass(frozen=True)
class Architecture:
    """The sizes of a transformer."""

    num_layers: int
    num_heads: int
    edits: bool = False
    zero_cond_t: bool = False

    def __str__(self) -> str:
        reads = ", and edits images" if self.edits else ""
        times = ", whose time is 0" if self.zero_cond_t else ""
        return f"{self.num_layers} blocks of {self.num_heads} heads{reads}{times}"


EDIT_2509, EDIT_2511 = "qwen-image-edit-2509", "qwen-image-edit-2511"
ARCHITECTURES = {
    "qwen-image": Architecture(60, 24),
    EDIT_2509: Architecture(60, 24, edits=True),
    EDIT_2511: Architecture(60, 24, edits=True, zero_cond_t=True),
}
DEFAULT_ARCHITECTURE = "qwen-image"
TEXT_PIPELINE, EDIT_PIPELINE = "QwenImagePipeline", "QwenImageEditPlusPipeline"
"""diffusers' pipelines of the models that are trained."""
MAX_TOKENS = {False: 512, True: 1024}
"""{whether the model edits: most tokens of a caption}."""
QWEN2_5_VL_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "layer_types": None,
    "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 1000000.0, "rope_type": "default"},
}
EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATES = {False: (f"{BEFORE_CAPTION}{{}}{AFTER_CAPTION}", TOKENS_BEFORE), True: (EDIT_TEMPLATE, 64)}
"""{whether the model edits: (its template, the tokens before the caption, whose states are left out)}."""
PICTURE = f"Picture {{}}: {VISION}"
SEEN_PIXELS = 384 * 384
QWEN2_5_VL_7B_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


class QwenImage(FlowTransformer):
    network = QwenImageTransformer2DModel
    autoencoder = QWEN_AUTOENCODER
    lora_loader = "QwenImageLoraLoaderMixin"
    shard = ShardSpec(blocks=("QwenImageTransformerBlock",), returns_views=("QwenImageTransformer2DModel",))
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
            r"transformer_blocks\.\d+\.(img_mlp|txt_mlp)\.net\.(0\.proj|2)",
        )
    }
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", QwenImageTransformer2DModel.__name__)}
    distilled = (Distilled(("Qwen-Image-Lightning",), base="Qwen/Qwen-Image", steps=8, marks={}),)
    options_read = frozenset({"architecture", "distilled", "max_tokens"})
    longest_text = 1024
    shift = Shift(ShiftLine(many=8192, high=0.9))
    reads_references = True
    edits = tuple(
        Edits(
            f"Qwen/Qwen-Image-Edit-{name[-4:]}",
            architecture=name,
            references=3,
            sees=True,
            marks={
                "model_index.json": {"_class_name": EDIT_PIPELINE},
                "transformer/config.json": {"zero_cond_t": ARCHITECTURES[name].zero_cond_t},
            },
        )
        for name in (EDIT_2509, EDIT_2511)
    )

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._vae = self._folder.config("vae", self.autoencoder.name)
        self._language_model = language_model_config(self._folder, "qwen2_5_vl")
        edits = kind_of(model, self._folder.path)
        self._edits = edits is not None
        self._template, self._template_tokens = TEMPLATES[self._edits]
        self._max_tokens = max_tokens(model, self._folder, "tokenizer", MAX_TOKENS[self._edits])
        if edits:
            self.encoder_folders = (*self.encoder_folders, "processor")
            check_processor(self._folder, edits.model)
        config = self._architecture
        own = Architecture(config.num_layers, config.num_attention_heads, self._edits, config.zero_cond_t)
        check_architecture(model, self._folder, ARCHITECTURES, own)
        self._check_inputs()

    @property
    def never_trained(self) -> tuple[str, ...]:
        last = self._architecture.num_layers - 1
        # Of the text in the last block, only keys and values are read.
        return (
            rf"transformer_blocks\.{last}\.(attn\.(add_q_proj|norm_added_q|to_add_out)|txt_mlp\.net\.(0\.proj|2))\..+",
        )

    @property
    def model_spec(self) -> str:
        return "qwen-image-edit" if self._edits else "qwen-image"

    @property
    def text_recipe(self) -> str:
        return f"edit {super().text_recipe}" if self._edits else super().text_recipe

    @property
    def sees_references(self) -> bool:
        return self._edits

    @property
    def latent_channels(self) -> int:
        return int(self._vae["z_dim"])

    def build(self, component: str) -> nn.Module:
        model: Any = super().build(component)
        rope = model.pos_embed
        # Its frequencies are not buffers: nothing would restore what the meta device lost.
        model.pos_embed = type(rope)(theta=rope.theta, axes_dim=rope.axes_dim, scale_rope=rope.scale_rope)
        built: nn.Module = model
        return built

    def weights(self, component: str) -> WeightFiles:
        return self._folder.denoiser_weights(component, self.build(component))

    def layout(self, component: str) -> tuple[Fused, ...]:
        """The original file has diffusers' names."""
        return tuple(Fused(name, (name,)) for name in self.build(component).state_dict())

    def text_encoder(self, load: LoadModule) -> TextEncoder:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VLConfig,
            Qwen2_5_VLModel,
            Qwen2_5_VLTextConfig,
            Qwen2_5_VLTextModel,
        )

        if self._edits:
            config = self._folder.encoder_config("text_encoder", "qwen2_5_vl")
            return load_seeing_encoder(load, self._folder, (Qwen2_5_VLConfig, Qwen2_5_VLModel), config)
        classes = (Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel)
        return load_language_model(load, self._folder, classes, self._language_model, self._text_layers)

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoder, caption: str) -> Example:
        if isinstance(encoder, SeeingEncoder):
            return self.encode_edit(encoder, caption, ())
        tokens: Mapping[str, Tensor] = encoder.tokenizer(
            self._template.format(caption), return_tensors="pt", truncation=True, max_length=self._max_length
        )
        (states,) = hidden_states(encoder.model, tokens, self._text_layers)
        return {"prompt_embeds": states[0, self._template_tokens :].cpu()}

    @torch.no_grad()
    def encode_edit(self, encoder: SeeingEncoder, caption: str, images: Sequence[Image.Image]) -> Example:
        inputs = seen_tokens(encoder, self._template, caption, images, PICTURE, self._max_length)
        return {"prompt_embeds": seen_states(encoder, inputs)[0, self._template_tokens :].cpu()}

    def seen_size(self, size: Size) -> Size:
        return size_of_area(size, SEEN_PIXELS)

    @property
    def _max_length(self) -> int:
        """Most tokens of template and caption."""
        return self._template_tokens + self._max_tokens

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        tokenizer, read, template = load_tokenizer(self._folder, "tokenizer"), self._max_length, self._template.format
        return [(length,) for length in text_lengths("text_encoder", tokenizer, captions, read, template)]

    def longer_text(self, length: TextLength) -> str | None:
        """`model.options.max_tokens` does not count the template before the caption."""
        needed, read = length.needed - self._template_tokens, length.read - self._template_tokens
        return super().longer_text(replace(length, needed=needed, read=read))

    def batch_key(self, example: Example) -> Hashable:
        # The model gets a mask of the padding: captions of any length share a batch.
        return (*example["latents"].shape[-2:], *reference_shapes(example))

    def collate(self, examples: Sequence[Example]) -> Batch:
        return masked_captions(examples)

    def sample_rows(self, batch: Batch) -> Mapping[str, Tensor]:
        if not self._architecture.zero_cond_t:
            return {}
        # The times of all noisy images, then those of their references.
        return {r"time_text_embed\..+|.+\.img_mod\.1": torch.arange(len(batch["latents"])).repeat(2)}

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        tokens = min(num_tokens, self._max_tokens)
        return {"prompt_embeds": torch.zeros(tokens, self._architecture.joint_attention_dim, dtype=dtype)}

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        _, template_tokens = TEMPLATES[sizes.edits]
        return {
            "transformer": {
                "in_channels": 64,
                "out_channels": 16,
                "num_layers": sizes.num_layers,
                "attention_head_dim": 128,
                "num_attention_heads": sizes.num_heads,
                "joint_attention_dim": QWEN2_5_VL_7B["hidden_size"],
                "axes_dims_rope": [16, 56, 56],
                "zero_cond_t": sizes.zero_cond_t,
            },
            "vae": published_qwen_vae(),
            "text_encoder": QWEN2_5_VL_7B | ({"vision_config": QWEN2_5_VL_7B_VISION} if sizes.edits else {}),
            "tokenizer": {"model_max_length": template_tokens + MAX_TOKENS[sizes.edits]},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        published = ARCHITECTURES[architecture or DEFAULT_ARCHITECTURE]
        return {
            "transformer": _tiny_transformer() | ({"zero_cond_t": True} if published.zero_cond_t else {}),
            "vae": TINY_QWEN_VAE,
            "text_encoder": _tiny_text_encoder() | (TINY_SEEING_IDS if published.edits else {}),
            "scheduler": _tiny_scheduler(),
        }

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        # The tokens of reference images follow those of the noisy image; the predictions for them are not used.
        images = [patchify(image) for image in (latents, *references_of(batch))]
        height, width = images[0].shape[-2:]
        packed = model["transformer"](
            hidden_states=torch.cat([pack(image) for image in images], dim=1),
            encoder_hidden_states=batch["prompt_embeds"].to(latents.dtype),
            encoder_hidden_states_mask=batch.get("prompt_mask"),
            timestep=sigma,
            img_shapes=[[(1, *image.shape[-2:]) for image in images]] * len(latents),
            return_dict=False,
        )[0]
        return unpatchify(unpack(packed[:, : height * width].float(), height, width))

    def guided(self, predictions: Sequence[Tensor], guidance: float) -> Tensor:
        """Classifier-free guidance that keeps each token's length from the prediction for the prompt."""
        if len(predictions) == 1:
            return predictions[0]
        height, width = (side // 2 for side in predictions[0].shape[-2:])
        before, after = (pack(patchify(v)).contiguous() for v in (predictions[0], guided(predictions, guidance)))
        lengths = [torch.linalg.vector_norm(tokens, dim=-1, keepdim=True) for tokens in (before, after)]
        return unpatchify(unpack(after * (lengths[0] / lengths[1]), height, width))

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

        def text_encoder() -> Any:
            return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**configs["text_encoder"]))

        write_random(folder / "text_encoder", text_encoder)
        # The tokenizer is trained on the template, so that it has its tokens before the caption.
        own = ARCHITECTURES[self.config.options.architecture or DEFAULT_ARCHITECTURE]
        template, _ = TEMPLATES[own.edits]
        special = TINY_SEEING if own.edits else TINY_SPECIAL
        write_tiny_tokenizer(folder / "tokenizer", TINY_VOCABULARY, TINY_TOKENS, special, [template.format("")] * 16)
        encoders = {
            "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
            "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        }
        if not own.edits:
            return TEXT_PIPELINE, encoders
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        Qwen2VLImageProcessorPil().save_pretrained(folder / "processor")
        return EDIT_PIPELINE, encoders | {"processor": ("transformers", "Qwen2VLProcessor")}

    @property
    def _text_layers(self) -> tuple[int]:
        return (self._language_model["num_hidden_layers"],)

    def _check_inputs(self) -> None:
        """Refuse parts that do not fit together, Layered, which reads layers, and the first Edit, whose text encoder
        sees one image in another way."""
        config, pipeline = (
            self._architecture,
            json_of(self.folder, "model_index.json").get("_class_name", TEXT_PIPELINE),
        )
        is_other = pipeline not in (TEXT_PIPELINE, EDIT_PIPELINE) or (config.zero_cond_t and not self._edits)
        if config.use_additional_t_cond or config.use_layer3d_rope or is_other:
            names = " or ".join(kind.model for kind in self.edits)
            raise InputError(
                f"{self._folder.field} {self.folder}: a {pipeline} whose transformer also reads other images or layers "
                f"is not trained; use Qwen/Qwen-Image, or to edit images {names}"
            )
        given = (4 * self._vae["z_dim"], self._language_model["hidden_size"])
        check_inputs(self._folder, (config.in_channels, config.joint_attention_dim), given)


FAMILY = QwenImage


# The model of `model.path: tiny`.

TINY_TOKENS = 48
TINY_WIDTH = 32
TINY_VOCABULARY = 512


def _tiny_transformer() -> dict[str, Any]:
    return {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TINY_WIDTH,
        "axes_dims_rope": [4, 6, 6],
    }


def _tiny_text_encoder() -> dict[str, Any]:
    text = tiny_language_model(TINY_WIDTH, TINY_VOCABULARY, num_layers=2) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TINY_WIDTH}
    return {
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": vision | {"fullatt_block_indexes": [0]},
    }


def _tiny_scheduler() -> dict[str, Any]:
    return {
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "max_image_seq_len": 8192,
        "shift_terminal": 0.02,
    }
