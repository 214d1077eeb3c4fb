"""Latents, text embeddings and the training loss of each family, against diffusers' pipelines and the publications."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLFlux2,
    ChromaPipeline,
    ClassifierFreeGuidance,
    DDPMScheduler,
    ErnieImagePipeline,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    Flux3Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    Ideogram4Pipeline,
    Krea2Pipeline,
    QwenImage21Pipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    ZImagePipeline,
)
from diffusers.modular_pipelines.flux3.before_denoise import Flux3TextRoPEInputsStep, _prepare_image_ids
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep, Flux3VaeEncoderStep
from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3AutoBlocks
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.ideogram4 import pipeline_ideogram4
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor
from transformers import (
    AutoTokenizer,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.audit.check import Check
from tests.audit.reference import (
    Draws,
    FlowReference,
    Reference,
    Text,
    largest_difference,
    mean_square,
    posterior_mean,
    references_in,
    scaled_latents,
    seed_of,
)
from tests.audit.run import TALL, WIDE, Model, Once, picture_data, started, write_picture
from tests.runs import step_numbers

CAPTIONS = ("a red fox", "", "two dogs & a cat, in (deep) snow")
LONG = "a long caption of many words " * 10
"""Longer than what a tiny model reads, but for FLUX.3, where it takes the second window of 80 tokens."""


class Flux1(FlowReference):
    def read(self, folder: Path) -> Any:
        is_kontext = FluxKontextPipeline.__name__ in (folder / "model_index.json").read_text()
        kind = FluxKontextPipeline if is_kontext else FluxPipeline
        return kind.from_pretrained(folder, local_files_only=True)

    def find_settings(self) -> dict[str, Any]:
        return {"max_sequence_length": self.pipeline.tokenizer_2.model_max_length}

    def latents(self, image: Image.Image) -> Tensor:
        return scaled_latents(self.pipeline.vae, image)

    @torch.no_grad()
    def text(self, caption: str) -> Text:
        words, pooled, _ = self.pipeline.encode_prompt(caption, None, **self.settings)
        return {"prompt_embeds": words[0], "pooled_embeds": pooled[0]}

    def shift(self, num_tokens: int) -> float:
        return math.exp(calculate_shift(num_tokens))

    def pack(self, latents: Tensor) -> Tensor:
        packed: Tensor = FluxPipeline._pack_latents(latents, *latents.shape)
        return packed

    def velocity(self, noisy: Tensor, sigma: Tensor, text: Text) -> Tensor:
        images = [noisy, *references_in(text)]
        ids = []
        for number, image in enumerate(images):
            rows, columns = (side // 2 for side in image.shape[-2:])
            ids.append(FluxPipeline._prepare_latent_image_ids(1, rows, columns, "cpu", torch.float32))
            ids[-1][:, 0] = number
        predicted: Tensor = self.pipeline.transformer(
            hidden_states=torch.cat([self.pack(image) for image in images], dim=1),
            encoder_hidden_states=text["prompt_embeds"][None],
            pooled_projections=text["pooled_embeds"][None],
            timestep=sigma,
            guidance=guidance_of(self),
            img_ids=torch.cat(ids),
            txt_ids=torch.zeros(len(text["prompt_embeds"]), 3),
        ).sample
        return predicted[:, : self.pack(noisy).shape[1]]

    def picture(self, noise: Tensor, width: int, height: int, call: Mapping[str, Any]) -> Image.Image:
        given = dict(call)
        if isinstance(self.pipeline, FluxKontextPipeline):  # else it draws and reads a million pixels
            given |= {"max_area": width * height, "_auto_resize": False}
        return super().picture(self.pack(noise[None])[0], width, height, given)


class Chroma(Flux1):
    """FLUX.1's latents, packing and shift. Its pipeline gets a mask of truth values: attention adds numbers."""

    def read(self, folder: Path) -> Any:
        return ChromaPipeline.from_pretrained(folder, local_files_only=True)

    def find_settings(self) -> dict[str, Any]:
        return {"max_sequence_length": self.pipeline.tokenizer.model_max_length}

    @torch.no_grad()
    def text(self, caption: str) -> Text:
        words, mask = self.pipeline._get_t5_prompt_embeds(caption, **self.settings)
        return {"prompt_embeds": words[0, mask[0].bool()]}

    def velocity(self, noisy: Tensor, sigma: Tensor, text: Text) -> Tensor:
        rows, columns = (side // 2 for side in noisy.shape[-2:])
        predicted: Tensor = self.pipeline.transformer(
            hidden_states=self.pack(noisy),
            encoder_hidden_states=text["prompt_embeds"][None],
            timestep=sigma,
            img_ids=FluxPipeline._prepare_latent_image_ids(1, rows, columns, "cpu", torch.float32),
            txt_ids=torch.zeros(len(text["prompt_embeds"]), 3),
        ).sample
        return predicted

    def picture(self, noise: Tensor, width: int, height: int, call: Mapping[str, Any]) -> Image.Image:
        texts: dict[str, Tensor] = {}
        for prefix, caption in (("", call["prompt"]), ("negative_", call.get("negative_prompt", ""))):
            words = self.text(caption)["prompt_embeds"][None]
            texts |= {f"{prefix}prompt_embeds": words}
            texts |= {f"{prefix}prompt_attention_mask": torch.ones(words.shape[:2], dtype=torch.bool)}
        rest = {name: value for name, value in call.items() if "prompt" not in name}
        return super().picture(noise, width, height, rest | texts)


class ErnieImage(FlowReference):
    def read(self, folder: Path) -> Any:
        return ErnieImagePipeline.from_pretrained(folder, local_files_only=True)

    def latents(self, image: Image.Image) -> Tensor:
        """As its pipeline decodes them: with an epsilon that is not the one in the autoencoder's config."""
        vae = self.pipeline.vae
        patches = ErnieImagePipeline._patchify_latents(posterior_mean(vae, image))
        mean, variance = (value.view(1, -1, 1, 1) for value in (vae.bn.running_mean, vae.bn.running_var))
        latents: Tensor = (patches - mean) / torch.sqrt(variance + 1e-5)
        return latents[0]

    @torch.no_grad()
    def text(self, caption: str) -> Text:
        """The pipeline reads as many tokens as the tokenizer allows."""
        tokenizer = self.pipeline.tokenizer
        with pytest.MonkeyPatch.context() as patched:
            length = self.settings.get("max_sequence_length", tokenizer.model_max_length)
            patched.setattr(tokenizer, "model_max_length", length)
            return {"prompt_embeds": self.pipeline.encode_prompt(caption, "cpu")[0]}

    def shift(self, num_tokens: int) -> float:
        shift: float = self.pipeline.scheduler.config.shift
        return shift

    def num_tokens(self, latents: Tensor) -> int:
        return latents.shape[-2] * latents.shape[-1]

    def velocity(self, noisy: Tensor, sigma: Tensor, text: Text) -> Tensor:
        predicted: Tensor = self.pipeline.transformer(
            hidden_states=noisy,
            timestep=sigma * 1000,
            text_bth=text["prompt_embeds"][None],
            text_lens=torch.tensor([len(text["prompt_embeds"])]),
        ).sample
        return predicted

    def picture(self, noise: Tensor, width: int, height: int, call: Mapping[str, Any]) -> Image.Image:
        with warnings.catch_warnings():  # its noise levels are a tensor, which numpy takes with a warning
            warnings.simplefilter("ignore", DeprecationWarning)
            return super().picture(noise, width, height, call)


class Flux2(FlowReference):
    """dev's pipeline is put together from its parts: that of the published folder names a processor of pictures."""

    def read(self, folder: Path) -> Any:
        if "Klein" in (folder / "model_index.json").read_text():
            return Flux2KleinPipeline.from_pretrained(folder, local_files_only=True)
        return Flux2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler"),
            vae=AutoencoderKLFlux2.from_pretrained(folder, subfolder="vae"),
            text_encoder=Mistral3ForConditionalGeneration.from_pretrained(folder / "text_encoder"),
            tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
            transformer=Flux2Transformer2DModel.from_pretrained(folder, subfolder="transformer"),
        )

    def find_settings(self) -> dict[str, Any]:
        # A quarter, a half and three quarters of the tiny encoder's 4 layers, as 9, 18, 27 are of 36.
        length = self.pipeline.tokenizer.model_max_length
        return {"max_sequence_length": length, "text_encoder_out_layers": (1, 2, 3)}

    @torch.no_grad()
    def latents(self, image: Image.Image) -> Tensor:
        pixels = self.pipeline.image_processor.preprocess(image)
        latents: Tensor = self.pipeline._encode_vae_image(pixels, generator=None)[0]
        return latents

    @torch.no_grad()
    def text(self, caption: str) -> Text:
        return {"prompt_embeds": self.pipeline.encode_prompt(caption, **self.settings)[0][0]}

    def shift(self, num_tokens: int) -> float:
        return math.exp(calculate_shift(num_tokens))

    def num_tokens(self, latents: Tensor) -> int:
        return latents.shape[-2] * latents.shape[-1]

    def pack(self, latents: Tensor) -> Tensor:
        packed: Tensor = Flux2Pipeline._pack_latents(latents)
        return packed

    def velocity(self, noisy: Tensor, sigma: Tensor, text: Text) -> Tensor:
        given = references_in(text)
        ids = [Flux2Pipeline._prepare_latent_ids(noisy)]
        if given:
            ids.append(Flux2Pipeline._prepare_image_ids(given))
        predicted: Tensor = self.pipeline.transformer(
            hidden_states=torch.cat([self.pack(image) for image in (noisy, *given)], dim=1),
            encoder_hidden_states=text["prompt_embeds"][None],
            timestep=sigma,
            guidance=guidance_of(self),
            img_ids=torch.cat(ids, dim=1),
            txt_ids=Flux2Pipeline._prepare_text_ids(text["prompt_embeds"][None]),
        ).sample
        return predicted[:, : self.num_tokens(noisy)]

    def picture(self, noise: Tensor, width: int, height: int, call: Mapping[str, Any]) -> Image.Image:
        """klein's pipeline takes no negative prompt, only its embeddings."""
        given = dict(call)
        if "negative_prompt" in given:
            given["negative_prompt_embeds"] = self.text(given.pop("negative_prompt"))["prompt_embeds"][None]
        return super().picture(noise, width, height, given)


@dataclass
class TextProcessor:
    """What FLUX.3's pipeline asks of a processor that reads pictures as well, which would need torchvision."""

    tokenizer: Any

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer.apply_chat_template(*args, **kwargs)


class Flux3(FlowReference):
    def read(self, folder: Path) -> Any:
        blocks = Flux3AutoBlocks()
        blocks.sub_blocks.pop("prompt_upsampler")
        pipeline = blocks.init_pipeline()
        pipeline.update_components(
            transformer=Flux3Transformer2DModel.from_pretrained(folder, subfolder="transformer"),
            vae=AutoencoderKLFlux2.from_pretrained(folder, subfolder="vae"),
            text_encoder=Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder"),
            tokenizer=TextProcessor(AutoTokenizer.from_pretrained(folder / "tokenizer")),
        )
        return pipeline

    def find_settings(self) -> dict[str, Any]:
        # Two states of the tiny encoder's 3 layers, evenly spaced, as 4, 8, ... 32 are of 36.
        length = self.pipeline.tokenizer.tokenizer.model_max_length
        return {"max_sequence_length": length, "text_encoder_out_layers": (1, 2)}

    def latents(self, image: Image.Image) -> Tensor:
        vae = self.pipeline.vae
        patches = Flux3VaeEncoderStep._patchify_latents(posterior_mean(vae, image))
        mean, variance = (value.view(1, -1, 1, 1) for value in (vae.bn.running_mean, vae.bn.running_var))
        latents: Tensor = (patches - mean) / torch.sqrt(variance + vae.config.batch_norm_eps)
        return latents[0]

    @torch.no_grad()
    def text(self, caption: str) -> Text:
        embeds = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
            self.pipeline.text_encoder,
            self.pipeline.tokenizer,
            caption,
            max_sequence_length=self.settings["max_sequence_length"],
            hidden_states_layers=self.settings["text_encoder_out_layers"],
        )
        return {"prompt_embeds": embeds[0]}

    def shift(self, num_tokens: int) -> float:
        shift: float = self.pipeline.scheduler.config.shift
        return shift

    def pack(self, latents: Tensor) -> Tensor:
        return latents.flatten(2).transpose(1, 2)

    def velocity(self, noisy: Tensor, sigma: Tensor, text: Text) -> Tensor:
        predicted: Tensor = self.pipeline.transformer(
            hidden_states=self.pack(noisy),
            encoder_hidden_states=text["prompt_embeds"][None],
            timestep=sigma,
            img_ids=_prepare_image_ids(*noisy.shape[-2:], 0.5),
            txt_ids=Flux3TextRoPEInputsStep._prepare_text_ids(text["prompt_embeds"][None]),
        ).sample
        return predicted

    def picture(self, noise: Tensor, width: int, height: int, call: Mapping[str, Any]) -> Image.Image:
        given = dict(call)
        self.pipeline.update_components(guider=ClassifierFreeGuidance(guidance_scale=given.pop("guidance_scale")))
        found = self.pipeline(latents=noise[None], width=width, height=height, **self.settings, **given)
        image: Image.Image = found.get("images")[0]
        return image


@dataclass
class CutTokenizer:
    """A tokenizer that cuts what its pipeline refuses as too long."""

    tokenizer: Any
    length: int

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer.apply_chat_template(*args, **kwargs)

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return self.tokenizer(text, truncation=True, max_length=self.length, **kwargs)


class Ideogram4(FlowReference):
    def read(self, folder: Path) -> Any:
        return Ideogram4Pipeline.from_pretrained(folder, local_files_only=True)

    def find_settings(self) -> dict[str, Any]:
        return {"max_sequence_length": self.pipeline.tokenizer.model_max_length}

    def latents(self, image: Image.Image) -> Tensor:
        """The inverse of how its pipeline decodes: a token's numbers are those of its first latent pixel, then those of
        the second."""
        vae = self.pipeline.vae
        mean = posterior_mean(vae, image)
        _, channels, height, width = mean.shape
        tokens = mean.view(channels, height // 2, 2, width // 2, 2).permute(1, 3, 2, 4, 0)
        tokens = tokens.reshape(height // 2, width // 2, 4 * channels)
        normalised = (tokens - vae.bn.running_mean) / torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
        return normalised.permute(2, 0, 1)

    @torch.no_grad()
    def text(self, caption: str) -> Text:
        """Without padding, which moves last bits."""
        cut = CutTokenizer(self.pipeline.tokenizer, self.settings["max_sequence_length"])
        messages = [{"role": "user", "content": [{"type": "text", "text": caption}]}]
        length = len(cut(cut.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)).input_ids)
        with self._patched() as patched:
            patched.setattr(self.pipeline, "tokenizer", cut)
            return {"prompt_embeds": self.pipeline.encode_prompt(caption, 1, 1, length, "cpu")[0][0, :length]}

    def shift(self, num_tokens: int) -> float:
        """The mean of the sampler's logits moves by the logarithm of this factor."""
        return math.exp(pipeline_ideogram4._resolution_aware_mu(16, 16 * num_tokens, 0.0))

    def num_tokens(self, latents: Tensor) -> int:
        return latents.shape[-2] * latents.shape[-1]

    def pack(self, latents: Tensor) -> Tensor:
        return latents.flatten(2).transpose(1, 2)

    def velocity(self, noisy: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Padded as the pipeline pads; the model's time runs from noise to data, and so does what it predicts."""
        words, image = text["prompt_embeds"], self.pack(noisy)
        longest = self.settings["max_sequence_length"]
        positions, segments, roles = self.pipeline._prepare_ids([len(words)], *noisy.shape[-2:], longest, "cpu")
        predicted: Tensor = self.pipeline.transformer(
            hidden_states=torch.nn.functional.pad(image, (0, 0, longest, 0)),
            timestep=1 - sigma,
            encoder_hidden_states=torch.nn.functional.pad(words, (0, 0, longest - len(words), image.shape[1]))[None],
            position_ids=positions,
            segment_ids=segments,
            indicator=roles,
        ).sample
        return -predicted[:, longest:]

    def picture(self, noise: Tensor, width: int, height: int, call: Mapping[str, Any]) -> Image.Image:
        """At one guidance in all steps."""
        with self._patched():
            return super().picture(self.pack(noise[None])[0], width, height, {"guidance_schedule": None, **call})

    @contextmanager
    def _patched(self) -> Iterator[pytest.MonkeyPatch]:
        """Inside, the layers 0, 2 and 3 of the tiny encoder's 4 are read, as 0, 3, ... 33 and 35 are of 36."""
        with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
            # It names an argument of transformers as before.
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
            patched.setattr(pipeline_ideogram4, "QWEN3_VL_ACTIVATION_LAYERS", (0, 2, 3))
            yield patched


class Sd3(FlowReference):
    def read(self, folder: Path) -> Any:
        return StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True)

    def find_settings(self) -> dict[str, Any]:
        return {"max_sequence_length": self.pipeline.tokenizer_3.model_max_length}

    def latents(self, image: Image.Image) -> Tensor:
        return scaled_latents(self.pipeline.vae, image)

    @torch.no_grad()
    def text(self, caption: str) -> Text:
        states, _, pooled, _ = self.pipeline.encode_prompt(
            caption, None, None, do_classifier_free_guidance=False, **self.settings
        )
        return {"prompt_embeds": states[0], "pooled_embeds": pooled[0]}

    def shift(self, num_tokens: int) -> float:
        shift: float = self.pipeline.scheduler.config.shift
        return shift

    def velocity(self, noisy: Tensor, sigma: Tensor, text: Text) -> Tensor:
        predicted: Tensor = self.pipeline.transformer(
            hidden_states=noisy,
            encoder_hidden_states=text["prompt_embeds"][None],
            pooled_projections=text["pooled_embeds"][None],
            timestep=sigma * 1000,
        ).sample
        return predicted


class ImagesAlone(Qwen2_5_VLProcessor):
    """A processor without that of films, which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return argument and super().check_argument_for_proper_class(argument_name, argument)


class ImagesAlone3(Qwen3VLProcessor):
    """The same for Qwen3-VL."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return argument and super().check_argument_for_proper_class(argument_name, argument)


class QwenImage(FlowReference):
    """The text encoder of Edit gets the types of the tokens, as in training: its pipeline leaves them out."""

    def read(self, folder: Path) -> Any:
        if QwenImageEditPlusPipeline.__name__ not in (folder / "model_index.json").read_text():
            return QwenImagePipeline.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        processor = ImagesAlone(Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"), tokenizer, None)
        pipeline = QwenImageEditPlusPipeline.from_pretrained(folder, processor=processor, local_files_only=True)

        def tell(module: Any, args: Any, given: dict[str, Any]) -> Any:
            if given.get("pixel_values") is not None:
                given["mm_token_type_ids"] = (given["input_ids"] == module.config.image_token_id).int()
            return args, given

        pipeline.text_encoder.register_forward_pre_hook(tell, with_kwargs=True)
        return pipeline

    def find_settings(self) -> dict[str, Any]:
        return {"max_sequence_length": self.pipeline.tokenizer.model_max_length}

    def latents(self, image: Image.Image) -> Tensor:
        vae = self.pipeline.vae
        mean, std = (
            torch.tensor(values).view(-1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return (posterior_mean(vae, image)[0, :, 0] - mean) / std

    @torch.no_grad()
    def text(self, caption: str) -> Text:
        # The pipeline of Edit reads all of a caption; the states of a caption's beginning are the same.
        states = self.pipeline.encode_prompt(caption, **self.settings)[0][0]
        return {"prompt_embeds": states[: self.settings["max_sequence_length"]]}

    def shift(self, num_tokens: int) -> float:
        config = self.pipeline.scheduler.config
        few, many = config.base_image_seq_len, config.max_image_seq_len
        return math.exp(calculate_shift(num_tokens, few, many, config.base_shift, config.max_shift))

    def pack(self, latents: Tensor) -> Tensor:
        packed: Tensor = QwenImagePipeline._pack_latents(latents, *latents.shape)
        return packed

    def velocity(self, noisy: Tensor, sigma: Tensor, text: Text) -> Tensor:
        images = [noisy, *references_in(text)]
        predicted: Tensor = self.pipeline.transformer(
            hidden_states=torch.cat([self.pack(image) for image in images], dim=1),
            encoder_hidden_states=text["prompt_embeds"][None],
            timestep=sigma,
            img_shapes=[[(1, image.shape[-2] // 2, image.shape[-1] // 2) for image in images]],
        ).sample
        return predicted[:, : self.num_tokens(noisy)]

    def picture(self, noise: Tensor, width: int, height: int, call: Mapping[str, Any]) -> Image.Image:
        with pytest.MonkeyPatch.context() as patched:
            if images := call.get("image"):  # else it reads a million pixels of each
                patched.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", images[0].width * images[0].height)
            return super().picture(self.pack(noise[None])[0], width, height, call)


class QwenImage21(QwenImage):
    """Its pipeline reads captions of any length, and gives pictures with an alpha channel."""

    def read(self, folder: Path) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(folder / "processor")
        images = Qwen2VLImageProcessorPil.from_pretrained(folder / "processor")
        processor = ImagesAlone3(images, tokenizer, None, chat_template=tokenizer.chat_template)
        return QwenImage21Pipeline.from_pretrained(folder, processor=processor, local_files_only=True)

    def find_settings(self) -> dict[str, Any]:
        return {"max_sequence_length": self.pipeline.processor.tokenizer.model_max_length}

    def latents(self, image: Image.Image) -> Tensor:
        pixels = self.pipeline.image_processor.preprocess(image.convert("RGBA")).unsqueeze(2)
        latents: Tensor = self.pipeline._encode_vae_image(pixels, generator=None)[0, :, 0]
        return latents.detach()

    @torch.no_grad()
    def text(self, caption: str, images: Sequence[Image.Image] = ()) -> Text:
        """The states of what is not an image, and with images the number of them before each."""
        states, _, is_image = self.pipeline.encode_prompt(caption, [*images] or None)
        kept = states[0, ~is_image[0]]
        if not images:
            return {"prompt_embeds": kept[: self.settings["max_sequence_length"]]}
        ids = is_image[0].tolist()
        begins = [place for place in range(1, len(ids)) if ids[place] and not ids[place - 1]]
        places = [begin - sum(ids[:begin]) for begin in begins]
        return {"prompt_embeds": kept, "prompt_images": torch.tensor(places)}

    def num_tokens(self, latents: Tensor) -> int:
        return latents.shape[-2] * latents.shape[-1]

    def pack(self, latents: Tensor) -> Tensor:
        packed: Tensor = QwenImage21Pipeline._pack_latents(latents, *latents.shape)
        return packed

    def velocity(self, noisy: Tensor, sigma: Tensor, text: Text) -> Tensor:
        given = references_in(text)
        states, places = text["prompt_embeds"], text.get("prompt_images", torch.tensor([])).tolist()
        # The pipeline has a slot for each four tokens of an image, in the sequence of the text encoder.
        is_image: list[bool] = []
        for place, image in zip(places, given, strict=True):
            is_image += [False] * (place - is_image.count(False)) + [True] * (self.num_tokens(image) // 4)
        is_image += [False] * (len(states) - is_image.count(False))
        slots = torch.zeros(len(is_image), states.shape[1])
        slots[~torch.tensor(is_image)] = states
        predicted: Tensor = self.pipeline.transformer(
            hidden_states=torch.cat([self.pack(image) for image in (*given, noisy)], dim=1),
            encoder_hidden_states=slots[None],
            timestep=sigma,
            img_shapes=[[(1, *image.shape[-2:]) for image in (*given, noisy)]],
            img_mask=torch.tensor([is_image + [True] * (self.num_tokens(noisy) // 4)]),
        ).sample
        return predicted[:, -self.num_tokens(noisy) :]

    def picture(self, noise: Tensor, width: int, height: int, call: Mapping[str, Any]) -> Image.Image:
        given = dict(call)
        if images := given.get("image"):  # else it reads a million pixels of each
            first = images[0] if isinstance(images, list) else images
            given["output_resolution"] = math.sqrt(first.width * first.height)
        noise = self.pack(noise[None])
        drawn = self.pipeline(latents=noise, width=width, height=height, output_type="pt", **given).images[0]
        colours, alpha = drawn[:3], drawn[3:]
        on_white = colours * alpha + (1 - alpha)
        levels = (on_white * 255).round().to(torch.uint8)
        return Image.fromarray(levels.permute(1, 2, 0).numpy())


class Krea2(QwenImage):
    """Its autoencoder, packing and shift are those of Qwen-Image."""

    def read(self, folder: Path) -> Any:
        return Krea2Pipeline.from_pretrained(folder, local_files_only=True)

    @torch.no_grad()
    def text(self, caption: str) -> Text:
        """Without the padding, which the pipeline masks everywhere."""
        states, mask = self.pipeline.encode_prompt(caption, **self.settings)
        return {"prompt_embeds": states[0, mask[0]]}

    def velocity(self, noisy: Tensor, sigma: Tensor, text: Text) -> Tensor:
        rows, columns = (side // 2 for side in noisy.shape[-2:])
        predicted: Tensor = self.pipeline.transformer(
            hidden_states=self.pack(noisy),
            encoder_hidden_states=text["prompt_embeds"][None],
            timestep=sigma,
            position_ids=Krea2Pipeline.prepare_position_ids(len(text["prompt_embeds"]), rows, columns, "cpu"),
        ).sample
        return predicted


class ZImage(FlowReference):
    def read(self, folder: Path) -> Any:
        return ZImagePipeline.from_pretrained(folder, local_files_only=True)

    def find_settings(self) -> dict[str, Any]:
        return {"max_sequence_length": self.pipeline.tokenizer.model_max_length}

    def latents(self, image: Image.Image) -> Tensor:
        return scaled_latents(self.pipeline.vae, image)

    @torch.no_grad()
    def text(self, caption: str) -> Text:
        found, _ = self.pipeline.encode_prompt(caption, do_classifier_free_guidance=False, **self.settings)
        return {"prompt_embeds": found[0]}

    def shift(self, num_tokens: int) -> float:
        """Constant, whatever the sampler's is (6 for Z-Image, 3 for Turbo)."""
        return 3.0

    def velocity(self, noisy: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """The model's time runs from noise to data, and so does what it predicts."""
        (predicted,) = self.pipeline.transformer([noisy[0].unsqueeze(1)], 1 - sigma, [text["prompt_embeds"]]).sample
        return -predicted.transpose(0, 1)


class Sdxl(Reference):
    """Discrete diffusion (arXiv 2006.11239); velocity (arXiv 2202.00512) and min-SNR weight (arXiv 2303.09556)."""

    def read(self, folder: Path) -> Any:
        return StableDiffusionXLPipeline.from_pretrained(folder, local_files_only=True)

    def latents(self, image: Image.Image) -> Tensor:
        return scaled_latents(self.pipeline.vae, image)

    @torch.no_grad()
    def text(self, caption: str) -> Text:
        states, _, pooled, _ = self.pipeline.encode_prompt(caption, do_classifier_free_guidance=False)
        width = self.pipeline.text_encoder.config.hidden_size
        first, second = states[0, :, :width], states[0, :, width:]
        return {"text_encoder.states": first, "text_encoder_2.states": second, "text_encoder_2.pooled": pooled[0]}

    @torch.no_grad()
    def loss(self, latents: Tensor, text: Text, draws: Draws) -> float:
        config = dict(self.pipeline.scheduler.config)
        kind = config["prediction_type"] = self.objective.get("prediction", config["prediction_type"])
        scheduler = DDPMScheduler.from_config(config)
        timestep = torch.tensor([int(draws.quantile * scheduler.config.num_train_timesteps)])
        noise = draws.normal("noise", tuple(latents.shape))
        height, width = (8 * side for side in latents.shape[-2:])
        states = torch.cat([text["text_encoder.states"], text["text_encoder_2.states"]], dim=-1)[None]
        pooled = text["text_encoder_2.pooled"][None]
        ids = self.pipeline._get_add_time_ids(
            (height, width), (0, 0), (height, width), torch.float32, text_encoder_projection_dim=pooled.shape[-1]
        )
        noisy = scheduler.add_noise(latents[None], noise[None], timestep)
        predicted = self.pipeline.unet(
            noisy, timestep, states, added_cond_kwargs={"text_embeds": pooled, "time_ids": ids}
        ).sample
        velocity = scheduler.get_velocity(latents[None], noise[None], timestep)
        error = mean_square(predicted, noise[None] if kind == "epsilon" else velocity)
        return error * self._weight(kind, float(scheduler.alphas_cumprod[timestep]))

    def _weight(self, kind: str, alpha_bar: float) -> float:
        limit = self.objective.get("min_snr_gamma")
        if limit is None:
            return 1.0
        snr = alpha_bar / (1 - alpha_bar)
        return min(snr, limit) / (snr if kind == "epsilon" else snr + 1)


def guidance_of(reference: Reference) -> Tensor | None:
    """What a model with guidance embedding is given in training."""
    if not reference.pipeline.transformer.config.guidance_embeds:
        return None
    return torch.tensor([float(reference.objective.get("guidance", 1.0))])


REFERENCES: Mapping[str, type[Reference]] = {
    "chroma": Chroma,
    "ernie_image": ErnieImage,
    "flux1": Flux1,
    "flux2": Flux2,
    "flux3": Flux3,
    "ideogram4": Ideogram4,
    "krea2": Krea2,
    "sd3": Sd3,
    "sdxl": Sdxl,
    "qwen_image": QwenImage,
    "qwen_image_21": QwenImage21,
    "z_image": ZImage,
}
VELOCITY = {"prediction_type": "v_prediction"}
ZERO_TERMINAL = VELOCITY | {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
SCHEDULER = "scheduler/scheduler_config.json"
MODELS = (
    Model("chroma", "chroma"),
    Model("ernie_image", "ernie_image"),
    Model("flux1 dev", "flux1", "dev"),
    Model("flux1 dev, guidance 3.5", "flux1", "dev", {"guidance": 3.5}),
    Model("flux1 schnell", "flux1", "schnell"),
    Model("flux2 dev", "flux2", "dev"),
    Model("flux2 klein", "flux2", "klein-4b"),
    Model("flux3", "flux3"),
    Model("ideogram4", "ideogram4"),
    Model("krea2", "krea2"),
    Model("sd3 medium", "sd3", "sd3-medium"),
    Model("sd3.5 medium", "sd3", "sd35-medium"),
    Model("sd3.5 large", "sd3", "sd35-large"),
    Model("sdxl epsilon", "sdxl"),
    Model("sdxl epsilon, min-SNR 5", "sdxl", objective={"min_snr_gamma": 5.0}),
    Model("sdxl velocity", "sdxl", objective={"prediction": "v_prediction"}),
    Model("sdxl velocity, min-SNR 5", "sdxl", objective={"prediction": "v_prediction", "min_snr_gamma": 5.0}),
    Model("sdxl velocity, zero-terminal", "sdxl", edits={SCHEDULER: ZERO_TERMINAL}),
    Model("qwen_image", "qwen_image"),
    Model("qwen_image_21", "qwen_image_21"),
    Model("z_image", "z_image"),
)
QUICK = (
    "chroma",
    "ernie_image",
    "flux1 dev, guidance 3.5",
    "flux2 dev",
    "flux2 klein",
    "flux3",
    "ideogram4",
    "krea2",
    "sd3.5 medium",
    "sdxl epsilon",
    "sdxl velocity, min-SNR 5",
    "qwen_image",
    "qwen_image_21",
    "z_image",
)
LOSS_LIMIT, ENCODED_LIMIT = 1e-6, 2e-6


@dataclass(frozen=True)
class Figures:
    """Largest absolute differences of what is encoded; relative ones of the loss of one picture and of a batch."""

    latents: float
    text: float
    one: float
    batch: float


def compare(model: Model, folder: Path) -> Figures:
    """A validation loss of one picture, then a training step on three with captions of different lengths."""
    images = [write_picture(folder / "data" / f"{i}.png", WIDE, text, i) for i, text in enumerate(CAPTIONS)]
    unseen = write_picture(folder / "unseen" / "0.png", TALL, LONG, seed=9)
    path = model.write(folder / "cache")
    reference = REFERENCES[model.family](path, model.objective)
    theirs = [(reference.latents(image), reference.text(text)) for image, text in zip(images, CAPTIONS, strict=True)]
    last = reference.latents(unseen), reference.text(LONG)
    sections = {"data": picture_data(folder), "train": {"batch_size": 3, "micro_batch": 3, "steps": 1}}
    with started(model, path, folder, sections) as trainer:
        (step,) = trainer.loader.micro_batches(0)
        examples = [*step.examples, trainer.data.held_out(0)]
        one, batch = trainer.validate(), step_numbers(trainer).loss
        seed = trainer.cfg.train.seed
    # The order of an epoch is the trainer's own: its pictures are known by their latents.
    numbers = [nearest(example["latents"], [latents for latents, _ in theirs]) for example in step.examples]
    assert sorted(numbers) == [0, 1, 2], "an epoch has every picture once"
    expected = [*(theirs[number] for number in numbers), last]
    losses = [reference.loss(*theirs[number], Draws(seed, index)) for index, number in enumerate(numbers)]
    alone = reference.loss(*last, Draws(seed_of(seed, "validation"), 0))
    pairs = list(zip(examples, expected, strict=True))
    return Figures(
        max(largest_difference({"latents": ours["latents"]}, {"latents": latents}) for ours, (latents, _) in pairs),
        max(largest_difference(without_latents(ours), text) for ours, (_, text) in pairs),
        abs(one / alone - 1),
        abs(batch / (sum(losses) / len(losses)) - 1),
    )


def nearest(latents: Tensor, those: list[Tensor]) -> int:
    return min(range(len(those)), key=lambda number: float((latents - those[number]).abs().max()))


def without_latents(example: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in example.items() if name not in ("latents", "original_size")}


def checks_of(model: Model) -> tuple[Check, ...]:
    compared, is_quick = Once(partial(compare, model)), model.name in QUICK
    columns = (
        ("latents", "latents", ENCODED_LIMIT),
        ("text embeddings", "text", ENCODED_LIMIT),
        ("loss of one", "one", LOSS_LIMIT),
        ("loss of a batch", "batch", LOSS_LIMIT),
    )
    return tuple(Check(model.name, title, limit, compared.figure(figure), is_quick) for title, figure, limit in columns)


CHECKS = tuple(check for model in MODELS for check in checks_of(model))
