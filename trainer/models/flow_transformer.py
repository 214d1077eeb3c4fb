"""The base of the families whose denoiser is one transformer of diffusers that is trained by flow matching.

They share how transformer, autoencoder and scheduler of a folder are read, the loss, Euler's method for samples with
guidance, and how the tiny model is written. A family's file has the rest: its class and sizes, how captions are read,
what its transformer is called with, and its original names.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trainer.config.sections import CompleteSample, ModelConfig, ObjectiveConfig
from trainer.config.size import Size
from trainer.models.base import ImageFamily, LoadModule, references_of
from trainer.models.objectives.base import Batch, Example, Loss
from trainer.models.objectives.flow_matching import flow_loss
from trainer.models.parts.folder import open_folder, write_model_index, write_random, write_tiny
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
from trainer.models.parts.image.vae import AUTOENCODER_KL, Autoencoder
from trainer.rng import SampleRng

Index = tuple[str, Mapping[str, tuple[str, str]]]
"""diffusers' pipeline of a folder, "" for a modular one, and {text encoder or tokenizer: (library, class)}."""


class FlowTransformer(ImageFamily):
    """A transformer that predicts the velocity from data to noise.

    Raises:
        InputError: `model.path` has no such transformer, or lacks the config of autoencoder or scheduler.
    """

    network: Any
    """diffusers' class of the transformer."""
    autoencoder: Autoencoder = AUTOENCODER_KL
    encoder_folders: tuple[str, ...] = ("text_encoder", "tokenizer", "vae")
    """Folders with the files that latents and embeddings are computed with."""
    lora_loader: str
    """diffusers' class that loads an adapter file into the transformer."""
    has_separate_alphas: ClassVar[bool] = False
    """Whether that class returns the alphas of a file separately from its tensors."""
    fixed_scheduler: ClassVar[Mapping[str, Any]] = {}
    """The scheduler's config, where the folder has none."""
    components = ("transformer",)
    size_multiple = 16
    tiny_version: ClassVar[int] = 1
    """Part of the tiny folder's name: raise it when equal configs give other files than before."""
    _max_tokens: int
    """Length that captions are padded or cut to; the family's constructor sets it."""

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._folder = open_folder(model, self.architectures, self._write_tiny)
        self.look()
        self._transformer = self._folder.config("transformer", self.network.__name__)
        self._vae = self._folder.read("vae/config.json")
        self._scheduler = self.fixed_scheduler or self._folder.read("scheduler/scheduler_config.json")
        # The config as the model reads it: fields that the file leaves out have their defaults.
        self._architecture: Any = self.build("transformer").config

    def look(self) -> None:
        """Take from the opened folder what the class leaves open; nothing by default."""
        return

    @abstractmethod
    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        """Predict the velocity, in fp32 and the shape of the latents.

        Args:
            model: The live components by name.
            latents: (B, C, h, w), noisy.
            sigma: (B,) in [0, 1], the share of noise.
            batch: (B, ...) of `collate`; only what was made of captions and references is read.
            guidance: For transformers that embed it.
        """

    def predict_away(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor) -> list[Tensor]:
        """The prediction that guidance pushes samples away from, of a component of `guides`; none for other models."""
        return []

    @abstractmethod
    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        """Zeros in the shapes and types of the result of `encode_text`. Arguments as for `blank_example`."""

    @abstractmethod
    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        """Write text encoders and tokenizers of a tiny model. configs: the result of `tiny`."""

    @property
    def reads_negative(self) -> bool:
        """Whether samples are guided by a negative prompt; else the transformer embeds the guidance, or has none."""
        return True

    @property
    def latent_channels(self) -> int:
        return int(self._architecture.in_channels)

    @property
    def text_recipe(self) -> str:
        """How captions become embeddings, as part of `fingerprint`."""
        return str(self._max_tokens)

    def build(self, component: str) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = self.network.from_config(self._transformer)
        return model

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.text_recipe} {self._folder.digest(*self.encoder_folders)}".encode()).hexdigest()

    def image_encoder(self, load: LoadModule) -> nn.Module:
        return load(self.autoencoder.build(self._vae), self._folder.weights("vae"), ())

    @torch.no_grad()
    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        return {"latents": self.autoencoder.encode(encoder, image)[0].cpu()}

    def batch_key(self, example: Example) -> Hashable:
        return (*example["latents"].shape[-2:], example["prompt_embeds"].shape[0], *reference_shapes(example))

    def loss(self, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        def predict(noisy: Tensor, sigma: Tensor) -> Tensor:
            return self.predict(model, noisy, sigma, batch, self.objective.guidance)

        return flow_loss(self.objective, self.shift, batch, self.num_tokens(batch["latents"]), rng, predict)

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
        examples = guidance_inputs(text, negative, cfg.guidance) if self.reads_negative else [text]
        # The negative prompt is combined with the same reference images.
        batches = [{key: t.to(device) for key, t in self.collate([text | e]).items()} for e in examples]

        def predict(latents: Tensor, sigma: Tensor) -> Tensor:
            predictions = [self.predict(model, latents, sigma, batch, cfg.guidance) for batch in batches]
            if cfg.guidance > 1:
                predictions += self.predict_away(model, latents, sigma)
            return self.guided(predictions, cfg.guidance)

        # Whole tokens, however many latents are in one.
        whole = self.size_multiple // self.autoencoder.pixels
        width, height = (side // self.size_multiple * whole for side in cfg.size)
        noise = rng.normal("sample", (self.latent_channels, height, width)).to(device)
        scheduler = self.sampler(noise, cfg.steps)
        return self.autoencoder.decode(encoder, denoise(scheduler, noise, predict))

    def guided(self, predictions: Sequence[Tensor], guidance: float) -> Tensor:
        """Combine the predictions for prompt and negative prompt; one alone stays as it is."""
        return guided(predictions, guidance)

    def sampler(self, noise: Tensor, num_steps: int) -> Any:
        """diffusers' scheduler for an image of the size of `noise`, (C, h, w), as the model's pipeline sets it."""
        mu = linear_mu_of(self._scheduler, self.num_tokens(noise))
        return euler_scheduler(self._scheduler, num_steps, noise.device, mu, sigmas=spaced_sigmas(num_steps))

    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        from diffusers.loaders import lora_pipeline

        loader = getattr(lora_pipeline, self.lora_loader)
        named: dict[str, Any] = {"weight_name": file.name, "local_files_only": True}
        alphas: dict[str, Any] = {}
        if self.has_separate_alphas:
            state, alphas["network_alphas"] = loader.lora_state_dict(str(file.parent), **named, return_alphas=True)
        else:
            state = loader.lora_state_dict(str(file.parent), **named)
        loader.load_lora_into_transformer(state, transformer=model["transformer"], low_cpu_mem_usage=True, **alphas)

    def blank_example(self, size: Size, text_tokens: int, dtype: torch.dtype) -> Example:
        height, width = (side // self.autoencoder.pixels for side in (size.height, size.width))
        return {"latents": torch.zeros(self.latent_channels, height, width), **self.blank_text(text_tokens, dtype)}

    def num_tokens(self, latents: Tensor) -> int:
        """Tokens per image. latents: (..., h, w)."""
        side = (self.token_side or self.size_multiple) // self.autoencoder.pixels
        return latents.shape[-2] * latents.shape[-1] // side**2

    def _write_tiny(self) -> Path:
        architecture = self.config.options.architecture or self.default_architecture
        configs = self.tiny(architecture)

        def write(folder: Path) -> None:
            write_random(folder / "transformer", lambda: self.network(**configs["transformer"]))
            self.autoencoder.write_tiny(folder / "vae", configs["vae"])
            pipeline, encoders = self.write_tiny_encoders(folder, configs)
            if not pipeline:
                return  # diffusers' modular pipelines take their parts one by one: no index, no scheduler
            write_euler_scheduler(folder / "scheduler", configs["scheduler"])
            parts = {
                "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
                "transformer": ("diffusers", self.network.__name__),
                "vae": ("diffusers", self.autoencoder.name),
            }
            write_model_index(folder, pipeline, configs.get("model_index.json"), **parts, **encoders)

        return write_tiny(self.cache, f"{self.config.family}-{architecture}", self.tiny_version, configs, write)


def reference_shapes(example: Example) -> tuple[tuple[int, ...], ...]:
    """Rows and columns of the latents of each reference image."""
    return tuple(tuple(reference.shape[-2:]) for reference in references_of(example))


def masked_captions(examples: Sequence[Example], own: bool | float = True, other: bool | float = False) -> Batch:
    """Stack examples, their captions padded to the longest. If their lengths differ, "prompt_mask" (B, L) is `own` for
    a caption's own tokens and `other` for the rest."""
    batch, lengths = pad_captions(examples)
    if len(set(lengths)) > 1:
        masks = [torch.full((length,), own) for length in lengths]
        batch["prompt_mask"] = pad_sequence(masks, batch_first=True, padding_value=other)
    return batch


def pad_captions(examples: Sequence[Example]) -> tuple[Batch, list[int]]:
    """Stack examples, their captions padded to the longest. Returns the batch, and the length of each caption."""
    texts = [example["prompt_embeds"] for example in examples]
    batch = {key: torch.stack([e[key] for e in examples]) for key in examples[0] if key != "prompt_embeds"}
    return batch | {"prompt_embeds": pad_sequence(texts, batch_first=True)}, [len(text) for text in texts]
