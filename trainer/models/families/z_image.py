"""Z-Image and its distilled Turbo, trained by flow matching.

Example keys: "latents" (16, H/8, W/8) fp32, normalised; "prompt_embeds" (L, D), one hidden state of the caption's
own tokens in the text encoder's type. A Batch adds a batch dim in front and pads captions to the longest; if their
lengths differ, "prompt_tokens" (B,) holds them. See DECISIONS 43.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trainer.config.families import Distilled
from trainer.config.sections import CompleteSample, ModelConfig, ObjectiveConfig
from trainer.config.size import Size
from trainer.models.base import ImageFamily, LoadModule, TextLength
from trainer.models.objectives.base import Batch, Example, Loss
from trainer.models.objectives.flow_matching import Shift, flow_loss
from trainer.models.parts.chat.chat_template import rendered
from trainer.models.parts.folder import (
    check_architecture,
    check_inputs,
    open_folder,
    write_model_index,
    write_random,
    write_tiny,
)
from trainer.models.parts.image.euler import (
    denoise,
    euler_scheduler,
    guidance_inputs,
    guided,
    linear_mu_of,
    spaced_sigmas,
    write_euler_scheduler,
)
from trainer.models.parts.image.images import device_of
from trainer.models.parts.image.text_encoder import (
    NO_LAYER_TYPES,
    QWEN3_4B,
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
from trainer.models.parts.image.vae import build_vae, decode_latents, encode_latents, published_vae, tiny_vae
from trainer.parallel.parallelize import ShardSpec
from trainer.rng import SampleRng
from trainer.system.errors import InputError
from trainer.weights.files import Fused


@dataclass(frozen=True)
class Architecture:
    """The sizes of a transformer."""

    num_layers: int
    num_refiners: int
    width: int

    def __str__(self) -> str:
        return f"{self.num_layers} + 2 x {self.num_refiners} blocks of width {self.width}"


ARCHITECTURES = {"z-image": Architecture(30, 2, 3840), "z-image-turbo": Architecture(30, 2, 3840)}
"""The two cannot be distinguished by their weights."""
DEFAULT_ARCHITECTURE = "z-image"
SHIFTS = {"z-image": 6.0, "z-image-turbo": 3.0}
"""Shifts of the samplers, the only difference between the published folders."""
MAX_TOKENS = 512


class ZImage(ImageFamily):
    components = ("transformer",)
    shard = ShardSpec(blocks=("ZImageTransformerBlock",), fp32_inputs=frozenset({"t"}))
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"(layers|noise_refiner|context_refiner)\.\d+\.attention\.(to_q|to_k|to_v|to_out\.0)",
            r"(layers|noise_refiner|context_refiner)\.\d+\.feed_forward\.(w1|w2|w3)",
        )
    }
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", ZImageTransformer2DModel.__name__)}
    distilled = (
        Distilled(
            ("Z-Image-Turbo", "z_image_turbo", "z_image_turbo_bf16"),
            base="Tongyi-MAI/Z-Image",
            steps=8,
            marks={"scheduler/scheduler_config.json": {"shift": SHIFTS["z-image-turbo"]}},
            architecture="z-image-turbo",
        ),
    )
    size_multiple = 16
    options_read = frozenset({"architecture", "distilled", "max_tokens"})
    longest_text = MAX_TOKENS
    shift = Shift(constant=3.0)
    diffusers_adapters = ImageFamily.diffusers_adapters | {"lokr"}

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._folder = open_folder(model, ARCHITECTURES, self._write_tiny)
        self._transformer = self._folder.config("transformer", ZImageTransformer2DModel.__name__)
        self._vae = self._folder.read("vae/config.json")
        self._scheduler = self._folder.read("scheduler/scheduler_config.json")
        self._language_model = language_model_config(self._folder, "qwen3")
        self._max_tokens = max_tokens(model, self._folder, "tokenizer", MAX_TOKENS)
        # The config as the model reads it: fields that the file leaves out have their defaults.
        self._architecture: Any = self.build("transformer").config
        check_architecture(model, self._folder, ARCHITECTURES, self._own_architecture())
        self._check_inputs()

    @property
    def model_spec(self) -> str:
        return "z-image"

    def build(self, component: str) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = ZImageTransformer2DModel.from_config(self._transformer)
        return model

    def layout(self, component: str) -> tuple[Fused, ...]:
        names = self.build(component).state_dict()
        return tuple(_original(name) for name in names if not name.endswith((".to_k.weight", ".to_v.weight")))

    def fingerprint(self) -> str:
        files = self._folder.digest("text_encoder", "tokenizer", "vae")
        return hashlib.sha256(f"{self._max_tokens} {files}".encode()).hexdigest()

    def text_encoder(self, load: LoadModule) -> TextEncoder:
        from transformers import Qwen3Config, Qwen3Model

        classes = (Qwen3Config, Qwen3Model)
        return load_language_model(load, self._folder, classes, self._language_model, self._text_layers)

    def image_encoder(self, load: LoadModule) -> nn.Module:
        return load(build_vae(self._vae), self._folder.weights("vae"), ())

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoder, caption: str) -> Example:
        """Encode to the second-to-last hidden state, without padding: the pipeline cuts its padding off again."""
        text = _templated(encoder.tokenizer, caption)
        tokens = encoder.tokenizer(text, return_tensors="pt", truncation=True, max_length=self._max_tokens)
        (states,) = hidden_states(encoder.model, tokens, self._text_layers)
        return {"prompt_embeds": states[0].cpu()}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        tokenizer = load_tokenizer(self._folder, "tokenizer")
        template = partial(_templated, tokenizer)
        return [(length,) for length in text_lengths("text_encoder", tokenizer, captions, self._max_tokens, template)]

    @torch.no_grad()
    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        return {"latents": encode_latents(encoder, image)[0].cpu()}

    def batch_key(self, example: Example) -> Hashable:
        # The model masks its own padding: captions of any length share a batch.
        return tuple(example["latents"].shape[-2:])

    def collate(self, examples: Sequence[Example]) -> Batch:
        texts = [example["prompt_embeds"] for example in examples]
        batch = {key: torch.stack([e[key] for e in examples]) for key in examples[0] if key != "prompt_embeds"}
        batch["prompt_embeds"] = pad_sequence(texts, batch_first=True)
        lengths = [len(text) for text in texts]
        # If all are equal, no lengths have to be fetched from the device to cut the captions again.
        return batch if len(set(lengths)) == 1 else batch | {"prompt_tokens": torch.tensor(lengths)}

    def loss(self, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        def predict(noisy: Tensor, sigma: Tensor) -> Tensor:
            return _predict(model, noisy, sigma, batch)

        height, width = batch["latents"].shape[-2:]
        return flow_loss(self.objective, self.shift, batch, height * width // 4, rng, predict)

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
        """Generate an image. `cfg.guidance` is the pipeline's `guidance_scale` plus 1, whose 0 means no guidance."""
        device = device_of(encoder)
        width, height = (2 * (side // self.size_multiple) for side in cfg.size)
        prompts = [
            {"prompt_embeds": e["prompt_embeds"].to(device)[None]}
            for e in guidance_inputs(text, negative, cfg.guidance)
        ]

        def predict(latents: Tensor, sigma: Tensor) -> Tensor:
            return guided([_predict(model, latents, sigma, prompt) for prompt in prompts], cfg.guidance)

        noise = rng.normal("sample", (self._architecture.in_channels, height, width)).to(device)
        mu = linear_mu_of(self._scheduler, height * width // 4)
        scheduler = euler_scheduler(self._scheduler, cfg.steps, device, mu, sigmas=spaced_sigmas(cfg.steps))
        return decode_latents(encoder, denoise(scheduler, noise, predict))

    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        from diffusers.loaders.lora_pipeline import ZImageLoraLoaderMixin as Loader

        state = Loader.lora_state_dict(str(file.parent), weight_name=file.name, local_files_only=True)
        Loader.load_lora_into_transformer(state, transformer=model["transformer"], low_cpu_mem_usage=True)

    def blank_example(self, size: Size, text_tokens: int, dtype: torch.dtype) -> Example:
        config = self._architecture
        return {
            "latents": torch.zeros(config.in_channels, size.height // 8, size.width // 8),
            "prompt_embeds": torch.zeros(min(text_tokens, self._max_tokens), config.cap_feat_dim, dtype=dtype),
        }

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        heads = sizes.width // 128
        return {
            "transformer": {
                "in_channels": 16,
                "dim": sizes.width,
                "n_layers": sizes.num_layers,
                "n_refiner_layers": sizes.num_refiners,
                "n_heads": heads,
                "n_kv_heads": heads,
                "cap_feat_dim": QWEN3_4B["hidden_size"],
                "axes_dims": [32, 48, 48],
                "axes_lens": [1536, 512, 512],
            },
            "vae": published_vae(latent_channels=16),
            "text_encoder": QWEN3_4B | NO_LAYER_TYPES,
            "tokenizer": {"model_max_length": MAX_TOKENS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        return {
            "transformer": _tiny_transformer(),
            "vae": tiny_vae(latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159),
            "text_encoder": _tiny_text_encoder(),
            "scheduler": {"shift": SHIFTS[architecture or DEFAULT_ARCHITECTURE]},
        }

    @property
    def _text_layers(self) -> tuple[int]:
        return (self._language_model["num_hidden_layers"] - 1,)

    def _own_architecture(self) -> Architecture:
        config = self._architecture
        return Architecture(config.n_layers, config.n_refiner_layers, config.dim)

    def _check_inputs(self) -> None:
        """Refuse parts that do not fit together, and Omni, which also reads images."""
        config = self._architecture
        if config.siglip_feat_dim is not None:
            raise InputError(
                f"{self._folder.field} {self.folder}: the transformer reads SigLIP features of other images; "
                "only text-to-image models are trained, use Z-Image or Z-Image-Turbo"
            )
        given = (self._vae["latent_channels"], self._language_model["hidden_size"])
        check_inputs(self._folder, (config.in_channels, config.cap_feat_dim), given)

    def _write_tiny(self) -> Path:
        name = self.config.options.architecture or DEFAULT_ARCHITECTURE
        configs = self.tiny(name)
        return write_tiny(self.cache, name, TINY_VERSION, configs, lambda to: _write_tiny(to, configs))


FAMILY = ZImage


def _templated(tokenizer: Any, caption: str) -> str:
    """Put the caption into the chat template."""
    messages = [{"role": "user", "content": caption}]
    return rendered(tokenizer, messages, add_generation_prompt=True, enable_thinking=True)


def _predict(model: nn.ModuleDict, latents: Tensor, sigma: Tensor, prompt: Batch) -> Tensor:
    """Predict the velocity, fp32. latents: (B, C, h, w).  sigma: (B,).  prompt: a Batch.

    The model's time runs from noise to data, and its prediction has that direction too.
    """
    text = prompt["prompt_embeds"].to(latents.dtype)
    lengths = prompt["prompt_tokens"].tolist() if "prompt_tokens" in prompt else [text.shape[1]] * len(text)
    predicted = model["transformer"](
        x=list(latents.unsqueeze(2)),
        t=1 - sigma,
        cap_feats=[caption[:length] for caption, length in zip(text, lengths, strict=True)],
        return_dict=False,
    )[0]
    return -torch.stack(predicted).squeeze(2).float()


def _original(name: str) -> Fused:
    """The tensor of the original file whose first part is diffusers' `name`."""
    block, is_query, _ = name.rpartition(".attention.to_q.")
    if is_query:
        return Fused(f"{block}.attention.qkv.weight", tuple(f"{block}.attention.to_{part}.weight" for part in "qkv"))
    original = name.replace("all_x_embedder.2-1.", "x_embedder.").replace("all_final_layer.2-1.", "final_layer.")
    for ours, theirs in (("to_out.0", "out"), ("norm_q", "q_norm"), ("norm_k", "k_norm")):
        original = original.replace(f".attention.{ours}.", f".attention.{theirs}.")
    return Fused(original, (name,))


# The model of `model.path: tiny`.

TINY_VERSION = 1
"""Part of the folder's name: raise it when equal configs give other files than before."""
TINY_TOKENS = 48
TINY_WIDTH = 32
TINY_VOCABULARY = 512


def _write_tiny(folder: Path, configs: dict[str, Any]) -> None:
    from transformers import Qwen3Config, Qwen3Model

    write_random(folder / "transformer", lambda: ZImageTransformer2DModel(**configs["transformer"]))
    write_random(folder / "vae", lambda: AutoencoderKL(**configs["vae"]))
    write_random(folder / "text_encoder", lambda: Qwen3Model(Qwen3Config(**configs["text_encoder"])))
    write_tiny_tokenizer(folder / "tokenizer", TINY_VOCABULARY, TINY_TOKENS)
    write_euler_scheduler(folder / "scheduler", configs["scheduler"])
    write_model_index(
        folder,
        "ZImagePipeline",
        scheduler=("diffusers", "FlowMatchEulerDiscreteScheduler"),
        text_encoder=("transformers", "Qwen3Model"),
        tokenizer=("transformers", "Qwen2TokenizerFast"),
        transformer=("diffusers", "ZImageTransformer2DModel"),
        vae=("diffusers", "AutoencoderKL"),
    )


def _tiny_transformer() -> dict[str, Any]:
    # Most of its parameters belong to the timestep embedding, whose 1024 hidden units no config changes.
    return {
        "in_channels": 4,
        "dim": 24,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": TINY_WIDTH,
        "axes_dims": [4, 4, 4],
        "axes_lens": [256, 64, 64],
    }


def _tiny_text_encoder() -> dict[str, Any]:
    text = tiny_language_model(TINY_WIDTH, TINY_VOCABULARY, num_layers=3)
    return text | {"model_type": "qwen3", "head_dim": TINY_WIDTH // 4}
