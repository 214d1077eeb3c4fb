"""FLUX.2: dev (Mistral text encoder, guidance embedding) and klein (Qwen3), trained by flow matching.

Example and Batch keys: "latents" (C, H/16, W/16) fp32, patchified and normalised, C = 128 for the published models;
"prompt_embeds" (L, D), stacked hidden states in the text encoder's type, L = 512 with padding, which the model
attends to. Both with a batch dim in front in a Batch.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config import InputError, ModelConfig, ObjectiveConfig, SampleConfig
from trainer.families._folder import digest, fill_random, read_json, write_once
from trainer.families.base import LoadModule, ModelFamily
from trainer.objectives import Batch, Example, Loss, add_noise, draw_sigma, empirical_mu, squared_error, velocity
from trainer.rng import SampleRng, generator
from trainer.weights import WeightFiles, find_folder, safetensors_in


@dataclass(frozen=True)
class Architecture:
    """What tells the published transformers apart. encoder: type of the language model that goes with it."""

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


@dataclass(frozen=True)
class TextRecipe:
    """How captions become embeddings. layers: hidden states that are stacked.  max_tokens: padded length."""

    layers: tuple[int, ...]
    max_tokens: int
    tokenize: Callable[[Any, str, int], Mapping[str, Tensor]]


def _tokenize_dev(tokenizer: Any, caption: str, max_tokens: int) -> Mapping[str, Tensor]:
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    # [IMG] would announce an image to the tokenizer's template.
    texts = (("system", SYSTEM_MESSAGE), ("user", caption.replace("[IMG]", "")))
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]
    tokens: Mapping[str, Tensor] = tokenizer.apply_chat_template(
        [messages],
        return_dict=True,
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=max_tokens,
    )
    return tokens


def _tokenize_klein(tokenizer: Any, caption: str, max_tokens: int) -> Mapping[str, Tensor]:
    messages = [{"role": "user", "content": caption}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    tokens: Mapping[str, Tensor] = tokenizer(
        text, return_tensors="pt", padding="max_length", truncation=True, max_length=max_tokens
    )
    return tokens


RECIPES = {
    "mistral": TextRecipe((10, 20, 30), 512, _tokenize_dev),
    "qwen3": TextRecipe((9, 18, 27), 512, _tokenize_klein),
}


@dataclass(frozen=True)
class TextEncoder:
    """model: the language model without head, truncated after the last hidden state that is stacked."""

    model: nn.Module
    tokenizer: Any


class Flux2(ModelFamily):
    components = ("transformer",)
    shard_blocks = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    # `to_out` is a ModuleList in double blocks and a Linear in single ones: full names, never suffixes.
    adapter_targets = (
        r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
        r"transformer_blocks\.\d+\.(ff|ff_context)\.(linear_in|linear_out)",
        r"single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)",
    )
    size_multiple = 16
    export_prefix = "transformer."
    model_spec = "Flux.2"

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        _check_paths(model)
        self._field = "model.base" if model.base else "model.path"
        self._transformer = self._read("transformer/config.json")
        self._vae = self._read("vae/config.json")
        self._scheduler = self._read("scheduler/scheduler_config.json")
        self._language_model = _language_model(self._read("text_encoder/config.json"))
        self._read("tokenizer/tokenizer_config.json")
        self._check_transformer()
        self._check_text_encoder()
        # The model's own view of its config: what the file leaves out has its default.
        self._architecture: Any = self.build().config
        self._check_architecture()
        self._text = self._text_recipe()

    @cached_property
    def folder(self) -> Path:
        if self.config.path == "tiny":
            return write_tiny(self.cache, self.config.options.architecture)
        return find_folder(self._field, self.config.base or self.config.path)

    def build(self) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = Flux2Transformer2DModel.from_config(self._transformer)
        return model

    def weights(self) -> WeightFiles:
        files = [Path(self.config.path)] if self.config.base else self._files("transformer", "diffusion_pytorch_model")
        weights = WeightFiles.read(files)
        _check_layout(files[0], weights, self.build())
        return weights

    def fingerprint(self) -> str:
        files = digest(self.folder / name for name in ("text_encoder", "tokenizer", "vae"))
        return hashlib.sha256(f"{self._text.layers} {self._text.max_tokens} {files}".encode()).hexdigest()

    def text_encoder(self, load: LoadModule) -> TextEncoder:
        from transformers import AutoTokenizer

        empty = _build_language_model(self._language_model, self._text.layers)
        blocks = sorted({type(layer).__name__ for layer in empty.layers})
        files = WeightFiles.read(self._files("text_encoder", "model"), rename=_language_model_name)
        model: Any = load(empty, files, blocks)
        # The rotary frequencies are in no file: what the meta device lost is computed again.
        model.rotary_emb = type(model.rotary_emb)(model.config).to(_device(model))
        return TextEncoder(model, AutoTokenizer.from_pretrained(self.folder / "tokenizer", local_files_only=True))

    def image_encoder(self, load: LoadModule) -> nn.Module:
        from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2

        with torch.device("meta"):
            vae = AutoencoderKLFlux2.from_config(self._vae)
        return load(vae, WeightFiles.read(self._files("vae", "diffusion_pytorch_model")), ())

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoder, caption: str) -> Example:
        tokens = self._text.tokenize(encoder.tokenizer, caption, self._text.max_tokens)
        states = _hidden_states(encoder.model, tokens, self._text.layers)
        stacked = torch.cat(states, dim=-1)
        return {"prompt_embeds": stacked[0].cpu()}

    @torch.no_grad()
    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        pixels = torch.from_numpy(np.array(image, dtype=np.float32)[None]).permute(0, 3, 1, 2) / 255 * 2 - 1
        latents = patchify(encoder.encode(pixels.to(_device(encoder))).latent_dist.mode())
        mean, std = latent_statistics(encoder)
        return {"latents": ((latents - mean) / std)[0].cpu()}

    def batch_key(self, example: Example) -> Hashable:
        return (*example["latents"].shape[-2:], example["prompt_embeds"].shape[0])

    def collate(self, examples: Sequence[Example]) -> Batch:
        return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}

    def loss(self, model: nn.Module, batch: Batch, rng: SampleRng) -> Loss:
        latents = batch["latents"]
        sigma = draw_sigma(self.objective, latents.shape[-2] * latents.shape[-1], rng)
        noise = rng.normal("noise", latents.shape[1:])
        noisy = add_noise(latents, noise, sigma)
        prediction = self._predict(model, noisy, sigma, batch["prompt_embeds"], self.objective.guidance)
        return squared_error(prediction, velocity(latents, noise), batch["weight"])

    @torch.no_grad()
    def sample(
        self, model: nn.Module, encoder: Any, text: Example, negative: Example | None, cfg: SampleConfig, rng: SampleRng
    ) -> Image.Image:
        device = _device(encoder)
        width, height = (side // self.size_multiple for side in cfg.size)
        latents = rng.normal("sample", (self._architecture.in_channels, height, width)).to(device)
        prompts = [example["prompt_embeds"].to(device).unsqueeze(0) for example in self._prompts(text, negative, cfg)]
        scheduler = self._sampler(height * width, cfg.steps, device)
        for timestep in scheduler.timesteps:
            predictions = [self._predict(model, latents, timestep.expand(1) / 1000, p, cfg.guidance) for p in prompts]
            latents = scheduler.step(_guided(predictions, cfg.guidance), timestep, latents, return_dict=False)[0]
        return _decode(encoder, latents)

    def load_adapter_file(self, model: nn.Module, file: Path) -> None:
        from diffusers.loaders.lora_pipeline import Flux2LoraLoaderMixin

        state = Flux2LoraLoaderMixin.lora_state_dict(str(file.parent), weight_name=file.name, local_files_only=True)
        Flux2LoraLoaderMixin.load_lora_into_transformer(state, transformer=model, low_cpu_mem_usage=True)

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        published = ARCHITECTURES[architecture or DEFAULT_ARCHITECTURE]
        width = 32
        return {
            "transformer": _tiny_transformer(published.guidance_embeds, text_width=width * len(TINY_LAYERS)),
            "vae": _tiny_vae(),
            "text_encoder": _tiny_text_encoder(published.encoder, width),
            "scheduler": _tiny_scheduler(),
        }

    def _read(self, name: str) -> dict[str, Any]:
        return read_json(self._field, self.folder, name)

    def _files(self, component: str, stem: str) -> list[Path]:
        return safetensors_in(self.folder / component, stem)

    def _check_transformer(self) -> None:
        kind = self._transformer.get("_class_name")
        if kind != Flux2Transformer2DModel.__name__:
            raise InputError(
                f"{self._field} {self.folder}: transformer/config.json describes a {kind}, "
                f"not a {Flux2Transformer2DModel.__name__}; set model.family to the family of that model"
            )

    def _check_text_encoder(self) -> None:
        kind = self._language_model.get("model_type")
        if kind not in RECIPES:
            raise InputError(
                f"{self._field} {self.folder}: text_encoder/config.json describes a {kind} language model, "
                f"expected {' or '.join(RECIPES)}; download the folder again"
            )
        missing = sorted({"num_hidden_layers", "hidden_size"} - self._language_model.keys())
        if missing:
            raise InputError(
                f"{self._field} {self.folder}: text_encoder/config.json has no {missing[0]}; download the folder again"
            )

    def _check_architecture(self) -> None:
        """`tiny` imitates the named architecture; anything else must be it."""
        name = self.config.options.architecture
        if name is None or self.config.path == "tiny":
            return
        config = self._architecture
        found = Architecture(
            config.num_layers, config.num_single_layers, config.guidance_embeds, self._language_model["model_type"]
        )
        if found != ARCHITECTURES[name]:
            raise InputError(
                f"model.options.architecture: {name} has {ARCHITECTURES[name]}, "
                f"but {self.folder} has {found}; leave it empty or set {self._field} to {name}"
            )

    def _text_recipe(self) -> TextRecipe:
        """The published recipe of the folder's text encoder, with the config's own layers if it names any."""
        kind = self._language_model["model_type"]
        recipe = RECIPES[kind]
        if self.config.path == "tiny":
            recipe = replace(recipe, layers=TINY_LAYERS, max_tokens=TINY_TOKENS[kind])
        if self.config.options.text_layers:
            recipe = replace(recipe, layers=self.config.options.text_layers)
        self._check_text_layers(recipe.layers)
        return recipe

    def _check_text_layers(self, layers: tuple[int, ...]) -> None:
        depth, width = self._language_model["num_hidden_layers"], self._language_model["hidden_size"]
        if not all(0 <= layer <= depth for layer in layers):
            raise InputError(
                f"model.options.text_layers: {list(layers)} is not within 0 to {depth}, "
                f"the hidden states of {self.folder / 'text_encoder'}"
            )
        needed = self._architecture.joint_attention_dim
        if len(layers) * width != needed:
            raise InputError(
                f"model.options.text_layers: {list(layers)} gives {len(layers)} x {width} = {len(layers) * width} "
                f"features per token, but the transformer reads {needed}; name {needed / width:g} hidden states"
            )

    def _predict(
        self, model: nn.Module, latents: Tensor, sigma: Tensor, prompt_embeds: Tensor, guidance: float
    ) -> Tensor:
        """The model's velocity, fp32. latents: (B, C, h, w).  sigma: (B,).  prompt_embeds: (B, L, D)."""
        height, width = latents.shape[-2:]
        packed = model(
            hidden_states=pack(latents),
            encoder_hidden_states=prompt_embeds.to(latents.dtype),
            timestep=sigma,
            guidance=torch.full_like(sigma, guidance) if self._architecture.guidance_embeds else None,
            img_ids=image_ids(height, width).to(latents.device, non_blocking=True),
            txt_ids=text_ids(prompt_embeds.shape[1]).to(latents.device, non_blocking=True),
            return_dict=False,
        )[0]
        return unpack(packed.float(), height, width)

    def _prompts(self, text: Example, negative: Example | None, cfg: SampleConfig) -> list[Example]:
        """What the model is asked for in each step: also the negative prompt where guidance needs its answer."""
        if negative is None or self._architecture.guidance_embeds or cfg.guidance <= 1:
            return [text]
        return [text, negative]

    def _sampler(self, num_tokens: int, num_steps: int, device: torch.device) -> Any:
        from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._scheduler)
        sigmas = np.linspace(1.0, 1 / num_steps, num_steps)
        scheduler.set_timesteps(sigmas=sigmas, mu=empirical_mu(num_tokens, num_steps), device=device)
        scheduler.set_begin_index(0)
        return scheduler


FAMILY = Flux2


def patchify(latents: Tensor) -> Tensor:
    """2 x 2 latent pixels become channels: (B, C, H, W) -> (B, 4C, H/2, W/2)."""
    return nn.functional.pixel_unshuffle(latents, 2)


def unpatchify(latents: Tensor) -> Tensor:
    """(B, 4C, H, W) -> (B, C, 2H, 2W)."""
    return nn.functional.pixel_shuffle(latents, 2)


def pack(latents: Tensor) -> Tensor:
    """Rows of pixels become tokens: (B, C, h, w) -> (B, h * w, C)."""
    return latents.flatten(2).transpose(1, 2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """(B, h * w, C) -> (B, C, h, w)."""
    return tokens.transpose(1, 2).reshape(tokens.shape[0], -1, height, width)


def image_ids(height: int, width: int) -> Tensor:
    """Positions (time, row, column, text) of the image tokens: (h * w, 4), only row and column differ."""
    zero = torch.zeros(1, dtype=torch.int64)
    return torch.cartesian_prod(zero, torch.arange(height), torch.arange(width), zero)


def text_ids(num_tokens: int) -> Tensor:
    """Positions of the text tokens: (L, 4), only the last column differs."""
    zero = torch.zeros(1, dtype=torch.int64)
    return torch.cartesian_prod(zero, zero, zero, torch.arange(num_tokens))


def latent_statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the patchified latents, each (1, 4C, 1, 1): the VAE's batch-norm statistics."""
    mean, variance = (value.view(1, -1, 1, 1) for value in (vae.bn.running_mean, vae.bn.running_var))
    return mean, torch.sqrt(variance + vae.config.batch_norm_eps)


def _hidden_states(model: Any, tokens: Mapping[str, Tensor], layers: Sequence[int]) -> list[Tensor]:
    """Hidden states of a language model, each (1, L, D): 0 is the embeddings, the last one is normalised.

    Taken by hooks on the layers: transformers finds its own by the model's class, which sharding replaces.
    """
    outputs: dict[int, Tensor] = {}

    def keep(number: int) -> Callable[..., None]:
        return lambda module, arguments, output: outputs.update({number: output})

    hooks = [model.embed_tokens.register_forward_hook(keep(0))]
    hooks += [layer.register_forward_hook(keep(number)) for number, layer in enumerate(model.layers, 1)]
    try:
        device = _device(model)
        last = model(
            input_ids=tokens["input_ids"].to(device),
            attention_mask=tokens["attention_mask"].to(device),
            use_cache=False,
        ).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    outputs[len(model.layers)] = last
    return [outputs[layer] for layer in layers]


def _guided(predictions: Sequence[Tensor], guidance: float) -> Tensor:
    """Classifier-free guidance (arXiv 2207.12598), where the negative prompt was asked too."""
    if len(predictions) == 1:
        return predictions[0]
    positive, negative = predictions
    return negative + guidance * (positive - negative)


def _decode(vae: Any, latents: Tensor) -> Image.Image:
    mean, std = latent_statistics(vae)
    pixels = vae.decode(unpatchify(latents * std + mean), return_dict=False)[0][0]
    levels = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).cpu().numpy())


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _check_paths(model: ModelConfig) -> None:
    architecture = model.options.architecture
    if architecture is not None and architecture not in ARCHITECTURES:
        raise InputError(f"model.options.architecture: '{architecture}' is not one of {', '.join(ARCHITECTURES)}")
    if model.path == "demo":
        raise InputError("model.path demo: not in this version; name a diffusers folder or set model.path: tiny")
    is_file = model.path.endswith(".safetensors")
    if is_file and not Path(model.path).is_file():
        raise InputError(f"model.path {model.path}: no such file; name a transformer file or a diffusers folder")
    if is_file and model.base is None:
        raise InputError(
            f"model.path {model.path}: holds the transformer only; "
            "set model.base to a diffusers folder with text_encoder, tokenizer, vae and scheduler"
        )
    if model.base is not None and not is_file:
        raise InputError(
            f"model.base {model.base}: is only used with a single transformer file, "
            f"but model.path is {model.path}; leave it empty"
        )


def _check_layout(file: Path, weights: WeightFiles, model: nn.Module) -> None:
    """Tensors the model does not have are other names for those it has, or belong to another model."""
    unknown = sorted(weights.entries.keys() - model.state_dict().keys())
    if any("double_blocks." in name for name in unknown):
        raise InputError(
            f"{file}: has the original layout, fused q, k and v under double_blocks; diffusers' layout is needed. "
            "Convert it once with Flux2Transformer2DModel.from_single_file(...).save_pretrained(...)"
        )
    if unknown:
        raise InputError(
            f"{file}: {len(unknown)} tensors that the model does not have, first '{unknown[0]}'; "
            "the weights and transformer/config.json belong to different models"
        )


def _language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The part of text_encoder/config.json that concerns text, with the type its weights are computed in."""
    text: dict[str, Any] = config.get("text_config", config)
    return text | {"dtype": config.get("dtype") or config.get("torch_dtype") or "float32"}


def _language_model_name(key: str) -> str | None:
    """Name without head, vision tower and the prefixes that transformers' versions put before it."""
    found = re.fullmatch(
        r"(?:model\.language_model\.|language_model\.model\.|model\.)?((?:embed_tokens|layers|norm)\..+)", key
    )
    return found[1] if found else None


def _build_language_model(config: dict[str, Any], layers: tuple[int, ...]) -> Any:
    """The language model on the meta device, no deeper than the hidden states of `layers` need.

    One layer more than the last of them: the deepest layer's output passes the norm, which is not part of them.
    """
    from transformers import MistralConfig, MistralModel, Qwen3Config, Qwen3Model

    classes = {"mistral": (MistralConfig, MistralModel), "qwen3": (Qwen3Config, Qwen3Model)}
    config_class, model_class = classes[config["model_type"]]
    depth = min(max(layers) + 1, config["num_hidden_layers"])
    truncated = config | {"num_hidden_layers": depth}
    if config.get("layer_types"):
        truncated["layer_types"] = config["layer_types"][:depth]
    settings = config_class.from_dict(truncated)
    with torch.device("meta"):
        return model_class(settings).to(settings.dtype)


# What follows writes the model of `model.path: tiny`.

TINY_VERSION = 1
"""Part of the folder's name: raise it when equal configs are to give other files."""
TINY_LAYERS = (1, 2, 3)
TINY_TOKENS = {"mistral": 64, "qwen3": 48}  # dev's system message alone takes about 40
TINY_VOCABULARY = 1024
TINY_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[IMG]")
TINY_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{{ message.content[0].text }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def write_tiny(cache: Path, architecture: str | None) -> Path:
    """A diffusers folder with random weights under `cache`, written on first use. Returns the folder."""
    name = architecture or DEFAULT_ARCHITECTURE
    configs = Flux2.tiny(name)
    version = hashlib.sha256(json.dumps([TINY_VERSION, configs], sort_keys=True).encode()).hexdigest()[:12]
    return write_once(cache / f"tiny-flux2-{name}-{version}", lambda folder: _write_tiny(folder, configs))


def _write_tiny(folder: Path, configs: dict[str, Any]) -> None:
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    _write_tiny_transformer(folder / "transformer", configs["transformer"])
    _write_tiny_vae(folder / "vae", configs["vae"])
    _write_tiny_text_encoder(folder / "text_encoder", configs["text_encoder"])
    _write_tiny_tokenizer(folder / "tokenizer")
    FlowMatchEulerDiscreteScheduler(**configs["scheduler"]).save_pretrained(folder / "scheduler")
    _write_model_index(folder, configs["text_encoder"]["architectures"][0])


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


def _tiny_vae() -> dict[str, Any]:
    return {"block_out_channels": [8, 8, 16, 16], "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4}


def _tiny_text_encoder(encoder: str, width: int) -> dict[str, Any]:
    text = {
        "model_type": encoder,
        "vocab_size": TINY_VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": TINY_LAYERS[-1] + 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
    }
    if encoder == "qwen3":
        return text | {"architectures": ["Qwen3ForCausalLM"]}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision | {"num_attention_heads": 2, "head_dim": 8, "image_size": 32, "patch_size": 16},
        "image_token_index": TINY_SPECIAL.index("[IMG]"),
        "tie_word_embeddings": False,
    }


def _tiny_scheduler() -> dict[str, Any]:
    return {"shift": 3.0, "use_dynamic_shifting": True, "time_shift_type": "exponential"}


def _write_tiny_transformer(folder: Path, config: dict[str, Any]) -> None:
    with torch.device("meta"):
        transformer = Flux2Transformer2DModel(**config)
    fill_random(transformer, "transformer")
    transformer.save_pretrained(folder)


def _write_tiny_vae(folder: Path, config: dict[str, Any]) -> None:
    """The batch-norm statistics are those of coloured squares, so that normalised latents have about unit variance."""
    from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2

    with torch.device("meta"):
        vae = AutoencoderKLFlux2(**config)
    fill_random(vae, "vae")
    vae.bn.momentum = 1.0
    squares = torch.rand(16, 3, 8, 8, generator=generator("vae", "squares")) * 2 - 1
    with torch.no_grad():
        vae.bn(patchify(vae.encode(nn.functional.interpolate(squares, scale_factor=8)).latent_dist.mode()))
    vae.save_pretrained(folder)


def _write_tiny_text_encoder(folder: Path, config: dict[str, Any]) -> None:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM

    classes = {"mistral3": (Mistral3Config, Mistral3ForConditionalGeneration), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = classes[config["model_type"]]
    with torch.device("meta"):
        encoder = model_class(config_class.from_dict(config))
    fill_random(encoder, "text_encoder")
    encoder.config.save_pretrained(folder)
    # save_pretrained of the model itself would draw a progress bar.
    save_file(encoder.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def _write_tiny_tokenizer(folder: Path) -> None:
    """Byte-level BPE trained on dev's system message and 256 Unicode names of animals and things."""
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2TokenizerFast

    names = [unicodedata.name(chr(point)).lower() for point in range(0x1F400, 0x1F500)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY,
        special_tokens=list(TINY_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([SYSTEM_MESSAGE] * 16 + names, trainer)
    model = json.loads(trained.to_str())["model"]
    tokenizer = Qwen2TokenizerFast(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        extra_special_tokens=list(TINY_SPECIAL[1:]),
        chat_template=TINY_CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)


def _write_model_index(folder: Path, encoder_class: str) -> None:
    """What diffusers needs to read the folder as a pipeline."""
    klein = encoder_class == "Qwen3ForCausalLM"
    index = {
        "_class_name": "Flux2KleinPipeline" if klein else "Flux2Pipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", encoder_class],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
