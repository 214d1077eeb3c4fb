"""FLUX.2: dev (Mistral text encoder, guidance embedding) and klein (Qwen3), trained by flow matching.

Example and Batch keys: "latents" (C, H/16, W/16) fp32, patchified and normalised, C = 128 for the published models;
"prompt_embeds" (L, D), stacked hidden states in the text encoder's type, L = 512 with padding, which the model
attends to; "reference_0", "reference_1" and so on, the latents of reference images. A Batch adds a batch dim in front.

See DECISIONS 32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from PIL import Image
from torch import Tensor, nn

from trainer.config.families import Distilled
from trainer.config.sections import CompleteSample, ModelConfig, ObjectiveConfig
from trainer.config.size import Size
from trainer.models.base import (
    FLOW_FIELDS,
    ImageFamily,
    LoadModule,
    TextLength,
    references_of,
)
from trainer.models.objectives.base import Batch, Example, Loss
from trainer.models.objectives.flow_matching import empirical_mu, flow_loss
from trainer.models.parts.chat.chat_template import rendered
from trainer.models.parts.folder import check_architecture, open_folder, write_model_index, write_random, write_tiny
from trainer.models.parts.image.euler import (
    denoise,
    euler_scheduler,
    guidance_inputs,
    guided,
    spaced_sigmas,
    write_euler_scheduler,
)
from trainer.models.parts.image.images import device_of, pack, unpack
from trainer.models.parts.image.packed_vae import (
    PACKED_VAE,
    build_packed_vae,
    decode_packed,
    encode_packed,
    tiny_packed_vae,
    write_tiny_packed_vae,
)
from trainer.models.parts.image.text_encoder import (
    NO_LAYER_TYPES,
    QWEN3_4B,
    QWEN3_8B,
    TINY_SPECIAL,
    TextEncoder,
    hidden_states,
    language_model_config,
    load_language_model,
    load_tokenizer,
    max_tokens,
    stacked_layers,
    text_lengths,
    tiny_language_model,
    write_tiny_tokenizer,
)
from trainer.models.parts.layout import numbered, tensors_of
from trainer.parallel.parallelize import ShardSpec
from trainer.rng import SampleRng
from trainer.system.pinned import send
from trainer.weights.files import Fused


@dataclass(frozen=True)
class Architecture:
    """The sizes in which the published transformers differ. encoder: type of the language model of its text encoder."""

    num_layers: int
    num_single_layers: int
    guidance_embeds: bool
    encoder: str

    def __str__(self) -> str:
        guidance = "with" if self.guidance_embeds else "without"
        return f"{self.num_layers} + {self.num_single_layers} blocks {guidance} guidance embedding"


ARCHITECTURES = {
    "dev": Architecture(8, 48, guidance_embeds=True, encoder="mistral"),
    "klein-4b": Architecture(5, 20, guidance_embeds=False, encoder="qwen3"),
    "klein-9b": Architecture(8, 24, guidance_embeds=False, encoder="qwen3"),
}
DEFAULT_ARCHITECTURE = "klein-4b"
MISTRAL_SMALL = {
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LANGUAGE_MODELS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "dev": (MISTRAL_SMALL, 48),
    "klein-4b": (QWEN3_4B | NO_LAYER_TYPES, 24),
    "klein-9b": (QWEN3_8B | NO_LAYER_TYPES, 32),
}
"""{architecture: (sizes of its language model, attention heads of the transformer)}."""
MAX_TOKENS = 512
REFERENCE_TIME = 10
"""Distance in time between consecutive images, the noisy image first, as in diffusers' pipelines."""


@dataclass(frozen=True)
class TextRecipe:
    """How captions become embeddings.

    Attributes:
        layers: Numbers of the hidden states that are stacked.
        max_tokens: Length that captions are padded or cut to.
        tokenize: (tokenizer, caption, max_tokens) -> tokens.
        template: (tokenizer, caption) -> the caption in the chat template.
    """

    layers: tuple[int, ...]
    max_tokens: int
    tokenize: Callable[[Any, str, int], Mapping[str, Tensor]]
    template: Callable[[Any, str], str]


def _messages_dev(caption: str) -> list[dict[str, Any]]:
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    # [IMG] would announce an image to the tokenizer's template.
    texts = (("system", SYSTEM_MESSAGE), ("user", caption.replace("[IMG]", "")))
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]


def _template_dev(tokenizer: Any, caption: str) -> str:
    return rendered(tokenizer, _messages_dev(caption))


def _tokenize_dev(tokenizer: Any, caption: str, max_tokens: int) -> Mapping[str, Tensor]:
    tokens: Mapping[str, Tensor] = tokenizer(
        _template_dev(tokenizer, caption),
        add_special_tokens=False,
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=max_tokens,
    )
    return tokens


def _template_klein(tokenizer: Any, caption: str) -> str:
    messages = [{"role": "user", "content": caption}]
    return rendered(tokenizer, messages, add_generation_prompt=True, enable_thinking=False)


def _tokenize_klein(tokenizer: Any, caption: str, max_tokens: int) -> Mapping[str, Tensor]:
    tokens: Mapping[str, Tensor] = tokenizer(
        _template_klein(tokenizer, caption),
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=max_tokens,
    )
    return tokens


TOKENIZE = {"mistral": (_tokenize_dev, _template_dev), "qwen3": (_tokenize_klein, _template_klein)}


class Flux2(ImageFamily):
    components = ("transformer",)
    shard = ShardSpec(blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"))
    # `to_out` is a ModuleList in double blocks and a Linear in single ones: full names, never suffixes.
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
            r"transformer_blocks\.\d+\.(ff|ff_context)\.(linear_in|linear_out)",
            r"single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)",
        )
    }
    halves_swapped = (r"norm_out\.linear",)
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", Flux2Transformer2DModel.__name__)}
    distilled = tuple(
        Distilled(
            (f"FLUX.2-klein-{size}", f"flux-2-klein-{size}"),
            base=f"black-forest-labs/FLUX.2-klein-base-{size}",
            steps=4,
            marks={"model_index.json": {"is_distilled": True}},
        )
        for size in ("4B", "9B")
    )
    size_multiple = 16
    objective_fields = FLOW_FIELDS | {"guidance"}
    conditional_fields: ClassVar = {"objective.guidance": ("transformer/config.json", "guidance_embeds", True)}
    options_read = frozenset({"architecture", "distilled", "text_layers", "max_tokens"})
    longest_text = MAX_TOKENS
    reads_references = True
    diffusers_adapters = ImageFamily.diffusers_adapters | {"lokr"}

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._folder = open_folder(model, ARCHITECTURES, self._write_tiny)
        self._transformer = self._folder.config("transformer", Flux2Transformer2DModel.__name__)
        self._vae = self._folder.read("vae/config.json")
        self._scheduler = self._folder.read("scheduler/scheduler_config.json")
        self._language_model = language_model_config(self._folder, *TOKENIZE)
        # The config as the model reads it: fields that the file leaves out have their defaults.
        self._architecture: Any = self.build("transformer").config
        check_architecture(model, self._folder, ARCHITECTURES, self._own_architecture())
        self._text = self._text_recipe()

    @property
    def model_spec(self) -> str:
        config = self._architecture
        names = {(a.num_layers, a.num_single_layers): name for name, a in ARCHITECTURES.items()}
        return f"Flux.2-{names.get((config.num_layers, config.num_single_layers), 'tiny')}"

    def build(self, component: str) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = Flux2Transformer2DModel.from_config(self._transformer)
        return model

    def layout(self, component: str) -> tuple[Fused, ...]:
        model = self.build(component)
        double = numbered("double_blocks", "transformer_blocks", model, DOUBLE_BLOCK)
        single = numbered("single_blocks", "single_transformer_blocks", model, SINGLE_BLOCK)
        return tensors_of(model, (*MODULES, *double, *single))

    def fingerprint(self) -> str:
        files = self._folder.digest("text_encoder", "tokenizer", "vae")
        return hashlib.sha256(f"{self._text.layers} {self._text.max_tokens} {files}".encode()).hexdigest()

    def text_encoder(self, load: LoadModule) -> TextEncoder:
        classes = _language_model_classes(self._language_model["model_type"])
        return load_language_model(load, self._folder, classes, self._language_model, self._text.layers)

    def image_encoder(self, load: LoadModule) -> nn.Module:
        return load(build_packed_vae(self._vae), self._folder.weights("vae"), ())

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoder, caption: str) -> Example:
        tokens = self._text.tokenize(encoder.tokenizer, caption, self._text.max_tokens)
        states = hidden_states(encoder.model, tokens, self._text.layers)
        return {"prompt_embeds": torch.cat(states, dim=-1)[0].cpu()}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        tokenizer, read = load_tokenizer(self._folder, "tokenizer"), self._text.max_tokens
        template = partial(self._text.template, tokenizer)
        # Both templates include the tokens around a caption.
        lengths = text_lengths("text_encoder", tokenizer, captions, read, template, special=False)
        return [(length,) for length in lengths]

    @torch.no_grad()
    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        return {"latents": encode_packed(encoder, image)[0].cpu()}

    def batch_key(self, example: Example) -> Hashable:
        references = (tuple(reference.shape[-2:]) for reference in references_of(example))
        return (*example["latents"].shape[-2:], example["prompt_embeds"].shape[0], *references)

    def loss(self, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        def predict(noisy: Tensor, sigma: Tensor) -> Tensor:
            return self._predict(model, noisy, sigma, batch, self.objective.guidance)

        height, width = batch["latents"].shape[-2:]
        return flow_loss(self.objective, self.shift, batch, height * width, rng, predict)

    @torch.no_grad()
    def draw(
        self,
        model: nn.ModuleDict,
        encoder: Any,
        text: Example,
        negative: Example | None,
        cfg: CompleteSample,
        rng: SampleRng,
    ) -> Image.Image:
        device = device_of(encoder)
        width, height = (side // self.size_multiple for side in cfg.size)
        examples = [text] if self._architecture.guidance_embeds else guidance_inputs(text, negative, cfg.guidance)
        # The negative prompt is combined with the same reference images.
        batches = [{key: t.to(device) for key, t in self.collate([text | e]).items()} for e in examples]

        def predict(latents: Tensor, sigma: Tensor) -> Tensor:
            return guided([self._predict(model, latents, sigma, b, cfg.guidance) for b in batches], cfg.guidance)

        noise = rng.normal("sample", (self._architecture.in_channels, height, width)).to(device)
        return decode_packed(encoder, denoise(self._sampler(height * width, cfg.steps, device), noise, predict))

    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        from diffusers.loaders.lora_pipeline import Flux2LoraLoaderMixin

        state = Flux2LoraLoaderMixin.lora_state_dict(str(file.parent), weight_name=file.name, local_files_only=True)
        Flux2LoraLoaderMixin.load_lora_into_transformer(state, transformer=model["transformer"], low_cpu_mem_usage=True)

    def blank_example(self, size: Size, text_tokens: int, dtype: torch.dtype) -> Example:
        side = self.size_multiple
        return {
            "latents": torch.zeros(self._architecture.in_channels, size.height // side, size.width // side),
            "prompt_embeds": torch.zeros(self._text.max_tokens, self._architecture.joint_attention_dim, dtype=dtype),
        }

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        language_model, heads = LANGUAGE_MODELS[architecture]
        return {
            "transformer": {
                "in_channels": 128,
                "num_layers": sizes.num_layers,
                "num_single_layers": sizes.num_single_layers,
                "attention_head_dim": 128,
                "num_attention_heads": heads,
                "joint_attention_dim": 3 * language_model["hidden_size"],
                "timestep_guidance_channels": 256,
                "axes_dims_rope": [32, 32, 32, 32],
                "guidance_embeds": sizes.guidance_embeds,
            },
            "vae": PACKED_VAE,
            "text_encoder": language_model,
            "tokenizer": {"model_max_length": MAX_TOKENS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        published = ARCHITECTURES[architecture or DEFAULT_ARCHITECTURE]
        width = 32
        return {
            "transformer": _tiny_transformer(published.guidance_embeds, text_width=width * len(TINY_LAYERS)),
            "vae": tiny_packed_vae(),
            "text_encoder": _tiny_text_encoder(published.encoder, width),
            "scheduler": {"shift": 3.0, "use_dynamic_shifting": True, "time_shift_type": "exponential"},
        }

    def _write_tiny(self) -> Path:
        name = self.config.options.architecture or DEFAULT_ARCHITECTURE
        configs = self.tiny(name)
        return write_tiny(self.cache, f"flux2-{name}", TINY_VERSION, configs, lambda to: _write_tiny(to, configs))

    def _own_architecture(self) -> Architecture:
        config = self._architecture
        return Architecture(
            config.num_layers, config.num_single_layers, config.guidance_embeds, self._language_model["model_type"]
        )

    def _text_recipe(self) -> TextRecipe:
        """The published recipe of the folder's text encoder; values of the config or the folder replace its own."""
        tokenize, template = TOKENIZE[self._language_model["model_type"]]
        needed = self._architecture.joint_attention_dim
        layers = stacked_layers(self.config, self._language_model, needed, self._folder)
        return TextRecipe(layers, max_tokens(self.config, self._folder, "tokenizer", MAX_TOKENS), tokenize, template)

    def _predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        """Predict the velocity, fp32. latents: (B, C, h, w).  sigma: (B,).  batch: prompt_embeds and references.

        The tokens of reference images follow those of the noisy image; the predictions for them are not used.
        """
        height, width = latents.shape[-2:]
        images, text = [latents, *references_of(batch)], batch["prompt_embeds"]
        ids = torch.cat([image_ids(x.shape[-2], x.shape[-1], i * REFERENCE_TIME) for i, x in enumerate(images)])
        packed = model["transformer"](
            hidden_states=torch.cat([pack(image) for image in images], dim=1),
            encoder_hidden_states=text.to(latents.dtype),
            timestep=sigma,
            guidance=torch.full_like(sigma, guidance) if self._architecture.guidance_embeds else None,
            img_ids=send(ids, latents.device),
            txt_ids=send(text_ids(text.shape[1]), latents.device),
            return_dict=False,
        )[0]
        return unpack(packed[:, : height * width].float(), height, width)

    def _sampler(self, num_tokens: int, num_steps: int, device: torch.device) -> Any:
        mu = empirical_mu(num_tokens, num_steps)
        return euler_scheduler(self._scheduler, num_steps, device, mu, sigmas=spaced_sigmas(num_steps))


FAMILY = Flux2


def image_ids(height: int, width: int, time: int = 0) -> Tensor:
    """Positions (time, row, column, text) of an image's tokens, (h * w, 4); only row and column differ."""
    zero = torch.zeros(1, dtype=torch.int64)
    return torch.cartesian_prod(zero + time, torch.arange(height), torch.arange(width), zero)


def text_ids(num_tokens: int) -> Tensor:
    """Positions of the text tokens, (L, 4); only the last column differs."""
    zero = torch.zeros(1, dtype=torch.int64)
    return torch.cartesian_prod(zero, zero, zero, torch.arange(num_tokens))


def _language_model_classes(model_type: str) -> tuple[Any, Any]:
    from transformers import MistralConfig, MistralModel, Qwen3Config, Qwen3Model

    return {"mistral": (MistralConfig, MistralModel), "qwen3": (Qwen3Config, Qwen3Model)}[model_type]


MODULES = (
    Fused("img_in", ("x_embedder",)),
    Fused("txt_in", ("context_embedder",)),
    Fused("time_in.in_layer", ("time_guidance_embed.timestep_embedder.linear_1",)),
    Fused("time_in.out_layer", ("time_guidance_embed.timestep_embedder.linear_2",)),
    Fused("guidance_in.in_layer", ("time_guidance_embed.guidance_embedder.linear_1",)),
    Fused("guidance_in.out_layer", ("time_guidance_embed.guidance_embedder.linear_2",)),
    Fused("double_stream_modulation_img.lin", ("double_stream_modulation_img.linear",)),
    Fused("double_stream_modulation_txt.lin", ("double_stream_modulation_txt.linear",)),
    Fused("single_stream_modulation.lin", ("single_stream_modulation.linear",)),
    Fused("final_layer.linear", ("proj_out",)),
    Fused("final_layer.adaLN_modulation.1", ("norm_out.linear",), halves_swapped=True),
)
"""The modules under their names in BFL's file; the tables below hold the modules of the blocks."""
DOUBLE_BLOCK = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.norm.query_norm": ("attn.norm_q",),
    "img_attn.norm.key_norm": ("attn.norm_k",),
    "txt_attn.norm.query_norm": ("attn.norm_added_q",),
    "txt_attn.norm.key_norm": ("attn.norm_added_k",),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.linear_in",),
    "img_mlp.2": ("ff.linear_out",),
    "txt_mlp.0": ("ff_context.linear_in",),
    "txt_mlp.2": ("ff_context.linear_out",),
}
SINGLE_BLOCK = {
    "linear1": ("attn.to_qkv_mlp_proj",),
    "linear2": ("attn.to_out",),
    "norm.query_norm": ("attn.norm_q",),
    "norm.key_norm": ("attn.norm_k",),
}


# The model of `model.path: tiny`.

TINY_VERSION = 1
"""Part of the folder's name: raise it when equal configs give other files than before."""
TINY_LAYERS = (1, 2, 3)
TINY_TOKENS = {"mistral3": 64, "qwen3": 48}  # dev's system message alone takes about 40
TINY_VOCABULARY = 1024
TINY_TOKENS_KEPT = (*TINY_SPECIAL, "[IMG]")


def _write_tiny(folder: Path, configs: dict[str, Any]) -> None:
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    write_random(folder / "transformer", lambda: Flux2Transformer2DModel(**configs["transformer"]))
    write_tiny_packed_vae(folder / "vae", configs["vae"])
    write_random(folder / "text_encoder", lambda: _tiny_language_model(configs["text_encoder"]))
    tokens = TINY_TOKENS[configs["text_encoder"]["model_type"]]
    write_tiny_tokenizer(folder / "tokenizer", TINY_VOCABULARY, tokens, TINY_TOKENS_KEPT, [SYSTEM_MESSAGE] * 16)
    write_euler_scheduler(folder / "scheduler", configs["scheduler"])
    _write_tiny_index(folder, configs["text_encoder"]["architectures"][0])


def _tiny_transformer(guidance_embeds: bool, text_width: int) -> dict[str, Any]:
    return {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": text_width,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": [4, 4, 4, 4],
        "guidance_embeds": guidance_embeds,
    }


def _tiny_text_encoder(encoder: str, width: int) -> dict[str, Any]:
    text = tiny_language_model(width, TINY_VOCABULARY, TINY_LAYERS[-1] + 1)
    text |= {"model_type": encoder, "head_dim": width // 4}
    if encoder == "qwen3":
        return text | {"architectures": ["Qwen3ForCausalLM"]}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision | {"num_attention_heads": 2, "head_dim": 8, "image_size": 32, "patch_size": 16},
        "image_token_index": TINY_TOKENS_KEPT.index("[IMG]"),
        "tie_word_embeddings": False,
    }


def _tiny_language_model(config: dict[str, Any]) -> nn.Module:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM

    classes: Any = {
        "mistral3": (Mistral3Config, Mistral3ForConditionalGeneration),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = classes[config["model_type"]]
    model: nn.Module = model_class(config_class.from_dict(config))
    return model


def _write_tiny_index(folder: Path, encoder_class: str) -> None:
    write_model_index(
        folder,
        "Flux2KleinPipeline" if encoder_class == "Qwen3ForCausalLM" else "Flux2Pipeline",
        scheduler=("diffusers", "FlowMatchEulerDiscreteScheduler"),
        text_encoder=("transformers", encoder_class),
        tokenizer=("transformers", "Qwen2TokenizerFast"),
        transformer=("diffusers", "Flux2Transformer2DModel"),
        vae=("diffusers", "AutoencoderKLFlux2"),
    )
