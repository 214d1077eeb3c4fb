"""SDXL: a U-Net with two CLIP text encoders, trained by discrete diffusion, each of the three frozen or not.

Example and Batch keys: "latents" (4, H/8, W/8) fp32, scaled; for each frozen text encoder `<component>.states` (L, D),
its second-to-last hidden states, L = 77 with padding for each window of text, and for the second one also
`text_encoder_2.pooled` (P,) of the first window; for each text encoder in training `<component>.ids` (L,) int64
instead; in training "original_size" (2,) int64, height and width of the image's file. A Batch adds a batch dim in
front. See DECISIONS 39, 40, 41, 42.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from PIL import Image
from torch import Tensor, nn

from trainer.config.families import Distilled
from trainer.config.schema import RunConfig
from trainer.config.sections import MOST_TEXT_WINDOWS, CompleteSample, ModelConfig, ObjectiveConfig, SampleConfig
from trainer.config.size import Size
from trainer.models.base import (
    DIFFUSION_FIELDS,
    DIFFUSION_SAMPLE,
    ImageFamily,
    LoadModule,
    TextLength,
)
from trainer.models.objectives.base import Batch, Example, Loss, squared_error, total_loss
from trainer.models.objectives.diffusion import diffuse, diffusion_target, draw_timestep, min_snr_weight
from trainer.models.parts.folder import (
    TRANSFORMERS_STEM,
    check_architecture,
    open_folder,
    write_model_index,
    write_random,
    write_tiny,
)
from trainer.models.parts.image.clip import (
    CLIP_G,
    CLIP_L,
    CLIP_TOKENS,
    build_clip,
    clip_states,
    clip_windows,
    tiny_clip,
    write_tiny_clip_tokenizer,
)
from trainer.models.parts.image.diffusion import (
    CONFIG,
    EULER,
    MARKERS,
    choose_sampler,
    make_sampler,
    read_schedule,
    sampler_name,
)
from trainer.models.parts.image.euler import guidance_inputs, guided
from trainer.models.parts.image.images import device_of
from trainer.models.parts.image.ldm_names import clip_layout, open_clip_layout, unet_layout, vae_key, vae_layout
from trainer.models.parts.image.text_encoder import load_tokenizer, text_lengths
from trainer.models.parts.image.vae import build_vae, decode_latents, encode_latents, published_vae, tiny_vae
from trainer.models.parts.progress import counted
from trainer.parallel.parallelize import ShardSpec
from trainer.rng import SampleRng
from trainer.system.errors import InputError
from trainer.system.pinned import send
from trainer.weights.files import Fused, WeightFiles
from trainer.weights.identity import digest

ENCODERS = ("text_encoder", "text_encoder_2")
TOKENIZERS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
CLIP_LINEAR = r"(text_model\.)?encoder\.layers\.\d+\.(self_attn\.(q_proj|k_proj|v_proj|out_proj)|mlp\.(fc1|fc2))"


@dataclass(frozen=True)
class Architecture:
    """The sizes of a U-Net. widths, depths: channels and transformer layers of each level."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]

    def __str__(self) -> str:
        return f"levels of {list(self.widths)} channels with {list(self.depths)} transformer layers"


ARCHITECTURES = {"base": Architecture((320, 640, 1280), (1, 2, 10))}


@dataclass(frozen=True)
class TextEncoders:
    """Both tokenizers, and the frozen encoders, by component."""

    tokenizers: Mapping[str, Any]
    frozen: Mapping[str, nn.Module]


class Sdxl(ImageFamily):
    components = ("unet", *ENCODERS)
    shard = ShardSpec(
        blocks=("BasicTransformerBlock", "ResnetBlock2D", "CLIPEncoderLayer"), fp32_inputs=frozenset({"timestep"})
    )
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "unet": (
            r".+\.transformer_blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)",
            r".+\.transformer_blocks\.\d+\.ff\.net\.(0\.proj|2)",
            r".+\.attentions\.\d+\.(proj_in|proj_out)",
        ),
        "text_encoder": (CLIP_LINEAR,),
        "text_encoder_2": (CLIP_LINEAR,),
    }
    conv_targets: ClassVar = {
        "unet": (
            r".+\.resnets\.\d+\.(conv1|conv2|conv_shortcut)",
            r".+\.(downsamplers|upsamplers)\.0\.conv",
        )
    }
    # The last norm of the first text encoder is not used; the second encoder's begins with text_model. A bias added to
    # all keys of an attention changes nothing: its gradient is rounding, which Adam would scale up like any other.
    never_trained = (r"final_layer_norm\..+", r".+\.self_attn\.k_proj\.bias")
    architectures = tuple(ARCHITECTURES)
    default_architecture = "base"
    model_files: ClassVar = {"unet/config.json": ("_class_name", UNet2DConditionModel.__name__)}
    distilled = (
        Distilled(
            ("sdxl-turbo", "sd_xl_turbo_1.0", "sd_xl_turbo_1.0_fp16", "sdxl_lightning_4step_unet"),
            base="stabilityai/stable-diffusion-xl-base-1.0",
            steps=4,
            # It draws at 512 pixels, the base model at 1024.
            marks={
                "unet/config.json": {"sample_size": 64},
                "scheduler/scheduler_config.json": {"timestep_spacing": "trailing"},
            },
        ),
    )
    size_multiple = 32  # 8 pixels per latent pixel, and the U-Net halves these twice
    options_read = frozenset({"architecture", "distilled", "text_windows"})
    objective_fields = DIFFUSION_FIELDS
    sample_fields = ImageFamily.sample_fields | DIFFUSION_SAMPLE
    reads_original_size = True
    single_file = (*components, "vae")
    # transformers dropped the first encoder's `text_model`; files of other programs have it.
    kohya_prefixes: ClassVar = {
        "unet": "lora_unet",
        "text_encoder": "lora_te1_text_model",
        "text_encoder_2": "lora_te2",
    }
    kohya_by_path = True

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._folder = open_folder(model, ARCHITECTURES, self._write_tiny)
        self._unet = self._folder.config("unet", UNet2DConditionModel.__name__)
        self._vae = self._folder.read("vae/config.json")
        # The configs as the models read them: fields that the files leave out have their defaults.
        self._clip: dict[str, Any] = {name: self._whole(name).config for name in ENCODERS}
        for tokenizer in TOKENIZERS.values():
            self._folder.read(f"{tokenizer}/tokenizer_config.json")
        self._zero_negative = self._folder.read("model_index.json").get("force_zeros_for_empty_prompt", True)
        self._architecture: Any = self.build("unet").config
        self._check_unet()
        check_architecture(model, self._folder, ARCHITECTURES, self._own_architecture())
        self._schedule = read_schedule(self._folder, objective)
        if self.is_distilled:
            # It was distilled from pure noise, the last timestep, which the spacing `leading` never reaches.
            self._schedule = replace(self._schedule, config={**self._schedule.config, "timestep_spacing": "trailing"})
        self._alpha_bar = self._schedule.alpha_bar()

    @property
    def model_spec(self) -> str:
        return "stable-diffusion-xl-v1-base"

    @property
    def file_markers(self) -> tuple[str, ...]:
        return self._schedule.markers

    @property
    def file_metadata(self) -> Mapping[str, str]:
        """The prediction type. Source of name and values: the modelspec standard, version 1.0.1."""
        return {"modelspec.prediction_type": "v" if self._schedule.prediction == "v_prediction" else "epsilon"}

    @property
    def changed_configs(self) -> Mapping[str, Mapping[str, Any]]:
        """The noise schedule with the sampler's class: one without zero-terminal SNR would silently ignore it."""
        name, _ = self._sampler_class(self.complete_sample(SampleConfig()))
        return {CONFIG: {**self._schedule.config, "_class_name": name}} if self._schedule.is_changed else {}

    def warnings(self, cfg: RunConfig) -> tuple[str, ...]:
        sentences = (*super().warnings(cfg), *self._schedule.sentences)
        _, reason = self._sampler_class(self.complete_sample(cfg.sample))
        if reason is None or not cfg.sample.prompts:
            return sentences
        sentence = (
            f"samples are generated with Euler's method: {reason}; set sample.scheduler: euler, or name another "
            f"sampler in {self.folder / 'model_index.json'}"
        )
        return (*sentences, sentence)

    def build(self, component: str) -> nn.Module:
        """Build a component, also "vae". The first text encoder has no last layer, since nothing reads its output."""
        if component == "unet":
            with torch.device("meta"):
                unet: nn.Module = UNet2DConditionModel.from_config(self._unet)
            return unet
        model = self._whole(component)
        if component == "text_encoder":
            del model.encoder.layers[-1]
        assert isinstance(model, nn.Module)
        return model

    def weights(self, component: str) -> WeightFiles:
        """The weights of a component, also of "vae".

        The encoders of a single file replace the folder's: models made from SDXL often train all components.
        """
        if component == "unet":
            return self._folder.denoiser_weights(
                component, self.build(component), self.layout(component), markers=MARKERS
            )
        return self._original(component) or self._from_folder(component)

    def layout(self, component: str) -> tuple[Fused, ...]:
        """The names of a component in the original file, which also holds "vae"."""
        makers: Mapping[str, Callable[[], Iterator[Fused]]] = {
            "unet": lambda: unet_layout(self.build("unet")),
            "text_encoder": lambda: clip_layout(self._whole("text_encoder").state_dict()),
            "text_encoder_2": lambda: open_clip_layout(self._clip["text_encoder_2"].num_hidden_layers),
            "vae": lambda: vae_layout(self._whole("vae")),
        }
        return tuple(makers[component]())

    def fingerprint(self) -> str:
        files = self._folder.digest(*ENCODERS, *TOKENIZERS.values(), "vae")
        if self._folder.single and any(map(self._original, (*ENCODERS, "vae"))):
            files += digest([self._folder.single])
        return hashlib.sha256(f"{self.live} {files} {self._windows} windows".encode()).hexdigest()

    @property
    def adapter_metadata(self) -> Mapping[str, str]:
        """The tokens of long captions under kohya's name, which kohya leaves out for one window."""
        tokens = self._windows * (CLIP_TOKENS - 2)
        return {"ss_max_token_length": str(tokens)} if self._windows > 1 else {}

    def text_encoder(self, load: LoadModule) -> TextEncoders:
        """Load the frozen encoders, whole on every rank: they are small (3.3 GB in fp32)."""
        tokenizers = self._tokenizers()
        frozen = [name for name in ENCODERS if name not in self.live]
        return TextEncoders(tokenizers, {name: load(self.build(name), self.weights(name), ()) for name in frozen})

    def image_encoder(self, load: LoadModule) -> nn.Module:
        return load(self.build("vae"), self.weights("vae"), ())

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoders, caption: str) -> Example:
        example: Example = {}
        for name, tokenizer in encoder.tokenizers.items():
            ids = clip_windows(tokenizer, caption, self._windows)
            encoded = {f"{name}.ids": ids}
            if name in encoder.frozen:
                model = encoder.frozen[name]
                encoded = _encoded(name, model, ids.to(device_of(model)), self._windows)
            example |= {key: tensor[0].cpu() for key, tensor in encoded.items()}
        return example

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        """Measure with one beginning and one end, however many windows there are."""
        lengths = (
            text_lengths(name, tokenizer, captions, self._windows * (tokenizer.model_max_length - 2) + 2)
            for name, tokenizer in self._tokenizers().items()
        )
        return list(zip(*lengths, strict=True))

    def longer_text(self, length: TextLength) -> str | None:
        in_a_window = (length.read - 2) // self._windows
        windows = min(math.ceil((length.needed - 2) / in_a_window), MOST_TEXT_WINDOWS)
        return f"model.options.text_windows: {windows}" if windows > self._windows else None

    @torch.no_grad()
    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        return {"latents": encode_latents(encoder, image)[0].cpu()}

    def batch_key(self, example: Example) -> Hashable:
        return tuple(example["latents"].shape[-2:])

    def loss(self, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        latents = batch["latents"]
        timestep = draw_timestep(len(self._alpha_bar), rng)
        alpha_bar = send(self._alpha_bar, latents.device)[timestep]
        noise = rng.normal("noise", latents.shape[1:])
        states, pooled = self._conditions(model, batch)
        sizes = batch.get("original_size")
        prediction = self._predict(model, diffuse(latents, noise, alpha_bar), timestep, states, pooled, sizes)
        target = diffusion_target(self._schedule.prediction, latents, noise, alpha_bar)
        errors = squared_error(prediction, target, batch.get("mask"))
        if self.objective.min_snr_gamma is not None:
            errors = errors * min_snr_weight(self._schedule.prediction, alpha_bar, self.objective.min_snr_gamma)
        return total_loss(errors, batch["weight"])

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
        states, pooled = self._guidance_conditions(model, text, negative, cfg, device)
        (generator,) = rng.generators("sampler")
        sampler = make_sampler(self._sampler_class(cfg)[0], self._schedule, cfg.steps, generator, device)
        scheduler = sampler.scheduler
        width, height = (side // self._pixels_per_latent for side in cfg.size)
        latents = rng.normal("sample", (self._architecture.in_channels, height, width)).to(device)
        latents = latents * scheduler.init_noise_sigma
        for timestep in counted(scheduler.timesteps):
            scaled = scheduler.scale_model_input(latents, timestep).expand(len(states), -1, -1, -1)
            predictions = self._predict(model, scaled, timestep.expand(len(states)), states, pooled)
            prediction = guided(list(predictions.chunk(len(states))), cfg.guidance)
            latents = sampler.step(prediction, timestep, latents)
        return decode_latents(encoder, latents)

    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        from diffusers.loaders.lora_pipeline import StableDiffusionXLLoraLoaderMixin as Loader

        config = self._architecture
        state, alphas = Loader.lora_state_dict(
            str(file.parent), weight_name=file.name, local_files_only=True, unet_config=config
        )
        for name, module in model.items():
            if not any(key.startswith(f"{name}.") for key in state):
                continue
            if name == "unet":
                Loader.load_lora_into_unet(state, alphas, module, low_cpu_mem_usage=True)
            else:
                Loader.load_lora_into_text_encoder(state, alphas, module, prefix=name, low_cpu_mem_usage=True)

    def blank_example(self, size: Size, text_tokens: int, dtype: torch.dtype) -> Example:
        """`dtype` is not used: the text encoders are whole and in their own type."""
        example = {"latents": torch.zeros(self._architecture.in_channels, size.height // 8, size.width // 8)}
        for name, config in self._clip.items():
            tokens = self._windows * config.max_position_embeddings
            if name in self.live:
                example[f"{name}.ids"] = torch.zeros(tokens, dtype=torch.int64)
                continue
            example[f"{name}.states"] = torch.zeros(tokens, config.hidden_size)
            if name == ENCODERS[-1]:
                example[f"{name}.pooled"] = torch.zeros(config.projection_dim)
        return example

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        return {
            "unet": {
                "block_out_channels": list(sizes.widths),
                "transformer_layers_per_block": list(sizes.depths),
                "attention_head_dim": [width // 64 for width in sizes.widths],
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
                "layers_per_block": 2,
                "cross_attention_dim": CLIP_L["hidden_size"] + CLIP_G["hidden_size"],
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": CLIP_G["projection_dim"] + 6 * 256,
                "norm_num_groups": 32,
                "sample_size": 128,
            },
            "vae": published_vae(latent_channels=4, has_quant_conv=True) | {"scaling_factor": 0.13025},
            "text_encoder": CLIP_L,
            "text_encoder_2": CLIP_G,
            "tokenizer": {"model_max_length": CLIP_TOKENS},
            "tokenizer_2": {"model_max_length": CLIP_TOKENS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        return {
            "unet": _tiny_unet(),
            # Its random weights give latents of variance 1 at this scale.
            "vae": tiny_vae(latent_channels=4, scaling_factor=2.0),
            # The widths differ: diffusers' reader of single files distinguishes the encoders by them.
            "text_encoder": tiny_clip(16, TINY_TOKENS),
            "text_encoder_2": tiny_clip(24, TINY_TOKENS, projection_dim=32, hidden_act="gelu"),
            "scheduler": _tiny_scheduler(),
        }

    def _write_tiny(self) -> Path:
        configs = self.tiny()
        return write_tiny(self.cache, "sdxl", TINY_VERSION, configs, lambda to: _write_tiny(to, configs))

    @property
    def _windows(self) -> int:
        """Windows of text in an example."""
        return self.config.options.text_windows

    def _tokenizers(self) -> dict[str, Any]:
        """{component: its tokenizer}."""
        from transformers import CLIPTokenizer

        return {name: load_tokenizer(self._folder, folder, CLIPTokenizer) for name, folder in TOKENIZERS.items()}

    @property
    def _pixels_per_latent(self) -> int:
        return int(2 ** (len(self._vae["block_out_channels"]) - 1))

    def _original(self, component: str) -> WeightFiles | None:
        """The tensors of an encoder or the VAE from the single file, if that holds them."""
        return self._folder.original_weights(self._whole(component), self.layout(component))

    def _from_folder(self, component: str) -> WeightFiles:
        if component == "vae":
            return self._folder.weights(component, rename=vae_key)

        def rename(key: str) -> str | None:
            # A model without projection is stored as the `text_model` it once was part of.
            name = key.removeprefix("text_model.") if component == "text_encoder" else key
            return None if name.endswith("position_ids") else name

        return self._folder.weights(component, TRANSFORMERS_STEM, rename)

    def _whole(self, component: str) -> Any:
        """An encoder with all its layers, or the VAE, on the meta device."""
        from transformers import CLIPTextModel, CLIPTextModelWithProjection

        if component == "vae":
            return build_vae(self._vae)
        kind: Any = CLIPTextModel if component == "text_encoder" else CLIPTextModelWithProjection
        return build_clip(self._folder, component, kind)

    def _own_architecture(self) -> Architecture:
        widths, depths = self._architecture.block_out_channels, self._architecture.transformer_layers_per_block
        return Architecture(tuple(widths), (depths,) * len(widths) if isinstance(depths, int) else tuple(depths))

    def _check_unet(self) -> None:
        """Refuse other models of the same class: SDXL also reads sizes and pooled text; its refiner has one encoder."""
        config = self._architecture
        width = sum(self._clip[name].hidden_size for name in ENCODERS)
        if config.addition_embed_type != "text_time" or config.in_channels != self._vae.get("latent_channels", 4):
            raise InputError(
                f"{self._folder.field} {self.folder}: unet/config.json has {config.in_channels} input channels and "
                f"addition_embed_type {config.addition_embed_type}, SDXL's has 4 and text_time; "
                "set model.path to SDXL base or a model made from it"
            )
        if config.cross_attention_dim != width:
            raise InputError(
                f"{self._folder.field} {self.folder}: unet/config.json reads text of {config.cross_attention_dim} "
                f"features, the text encoders give {width}; download the folder again"
            )

    def _conditions(self, model: nn.ModuleDict, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hidden states of both encoders (B, L, D1 + D2) and the pooled text (B, P), fp32."""
        encoded = dict(batch)
        for name in ENCODERS:
            if name in self.live:
                encoded |= _encoded(name, model[name], batch[f"{name}.ids"], self._windows)
        states = torch.cat([encoded[f"{name}.states"].float() for name in ENCODERS], dim=-1)
        return states, encoded["text_encoder_2.pooled"].float()

    def _guidance_conditions(
        self,
        model: nn.ModuleDict,
        text: Example,
        negative: Example | None,
        cfg: CompleteSample,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """`_conditions` of the prompt, and of the negative prompt where guidance needs it."""
        examples = guidance_inputs(text, negative, cfg.guidance)
        texts = [{key: tensor for key, tensor in e.items() if key.startswith(ENCODERS)} for e in examples]
        batch = {key: tensor.to(device) for key, tensor in self.collate(texts).items()}
        states, pooled = self._conditions(model, batch)
        if self._zero_negative and not cfg.negative:
            states[1:], pooled[1:] = 0, 0
        return states, pooled

    def _predict(
        self,
        model: nn.ModuleDict,
        latents: Tensor,
        timestep: Tensor,
        states: Tensor,
        pooled: Tensor,
        original_size: Tensor | None = None,
    ) -> Tensor:
        """Run the U-Net; returns its prediction in fp32.

        latents: (B, 4, h, w).  timestep: (B,).  states, pooled: `_conditions`.  original_size: as for `_time_ids`.
        """
        prediction: Tensor = model["unet"](
            latents,
            timestep=timestep,
            encoder_hidden_states=states,
            added_cond_kwargs={"text_embeds": pooled, "time_ids": self._time_ids(latents, original_size)},
            return_dict=False,
        )[0]
        return prediction.float()

    def _time_ids(self, latents: Tensor, original_size: Tensor | None) -> Tensor:
        """(B, 6) int64: height and width of the original image, top and left of the crop, height and width.

        The data are already resized and cropped: each image counts as an original of that size, as in sampling. An
        enlarged image has the size of its file, so that its blur is learned as that of small originals (SDXL, arXiv
        2307.01952, sec. 2.2). Integers: bf16 would round many above 256.

        original_size: (B, 2) int64, height and width of the images' files.
        """
        height, width = (side * self._pixels_per_latent for side in latents.shape[-2:])
        ids = send(torch.tensor([height, width, 0, 0, height, width]), latents.device).expand(latents.shape[0], 6)
        if original_size is None:
            return ids
        # Images are scaled to cover their size, so an image is enlarged if either side was shorter.
        is_enlarged = (original_size < ids[:, 4:]).any(dim=1, keepdim=True)
        return torch.cat([torch.where(is_enlarged, original_size, ids[:, :2]), ids[:, 2:]], dim=1)

    def _sampler_class(self, cfg: CompleteSample) -> tuple[str, str | None]:
        """The sampler's class in diffusers, and the reason if the folder's own class cannot be used, else None."""
        wanted = EULER if cfg.scheduler == "euler" else sampler_name(self._folder)
        return choose_sampler(wanted, self._schedule, cfg.steps)


FAMILY = Sdxl


def _encoded(name: str, encoder: nn.Module, ids: Tensor, windows: int) -> Batch:
    """Encode ids (B, L) of `windows` windows to "states" (B, L, D) and, for the second encoder, "pooled" (B, P).

    The states are those of the second-to-last layer; the keys are those of a Batch. All windows are encoded in one
    call, independently. Their states are concatenated, and the first window is pooled, as ComfyUI and A1111 do.
    (kohya's trainer joins the states without the inner ends and beginnings.)
    """
    rows = ids.reshape(len(ids) * windows, -1)
    # The last layer of the first encoder, as `build` makes it, is the second-to-last of the file.
    states, output = clip_states(encoder, rows, layer=-1 if name == "text_encoder" else -2)
    encoded = {f"{name}.states": states.reshape(*ids.shape, -1)}
    return encoded if name == "text_encoder" else encoded | {f"{name}.pooled": output.text_embeds[::windows]}


# The model of `model.path: tiny`.

TINY_VERSION = 1
"""Part of the folder's name: raise it when equal configs give other files than before."""
TINY_TOKENS = 32


def _tiny_unet() -> dict[str, Any]:
    return {
        "sample_size": 8,
        "block_out_channels": [16, 24],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "layers_per_block": 1,
        "transformer_layers_per_block": [1, 1],
        "attention_head_dim": [2, 3],
        "norm_num_groups": 8,
        "cross_attention_dim": 16 + 24,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
    }


def _tiny_scheduler() -> dict[str, Any]:
    """The config of the published scheduler."""
    return {
        "num_train_timesteps": 1000,
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "prediction_type": "epsilon",
        "timestep_spacing": "leading",
        "steps_offset": 1,
    }


def _write_tiny(folder: Path, configs: Mapping[str, Any]) -> None:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    first, second = (CLIPTextConfig.from_dict(configs[name]) for name in ENCODERS)
    write_random(folder / "unet", lambda: UNet2DConditionModel(**configs["unet"]))
    write_random(folder / "vae", lambda: AutoencoderKL(**configs["vae"]))
    write_random(folder / "text_encoder", lambda: CLIPTextModel(first))
    write_random(folder / "text_encoder_2", lambda: CLIPTextModelWithProjection(second))
    write_tiny_clip_tokenizer(folder / "tokenizer", TINY_TOKENS)
    write_tiny_clip_tokenizer(folder / "tokenizer_2", TINY_TOKENS, pad_token="!")
    EulerDiscreteScheduler(**configs["scheduler"]).save_pretrained(folder / "scheduler")
    write_model_index(
        folder,
        "StableDiffusionXLPipeline",
        scheduler=("diffusers", "EulerDiscreteScheduler"),
        text_encoder=("transformers", "CLIPTextModel"),
        text_encoder_2=("transformers", "CLIPTextModelWithProjection"),
        tokenizer=("transformers", "CLIPTokenizer"),
        tokenizer_2=("transformers", "CLIPTokenizer"),
        unet=("diffusers", "UNet2DConditionModel"),
        vae=("diffusers", "AutoencoderKL"),
    )
