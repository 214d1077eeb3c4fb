"""Text encoders of the kinds of Qwen2.5-VL and Qwen3-VL, which see reference images with the caption."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from trainer.config.size import Size
from trainer.models.base import LoadModule
from trainer.models.parts.folder import TRANSFORMERS_STEM, ModelFolder
from trainer.models.parts.image.images import device_of
from trainer.models.parts.image.text_encoder import (
    TINY_SPECIAL,
    TextEncoder,
    from_folder,
    language_model_key,
    load_tokenizer,
)
from trainer.system.errors import InputError

IMAGE = "<|image_pad|>"
"""The token that stands for a part of an image, as often as the vision tower gives states."""
VISION = "<|vision_start|>{}<|vision_end|>"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""The file with the settings of the processor of images, of transformers 4 and 5."""
MAX_ASPECT = 200
"""Aspect ratio above which Qwen's processors refuse an image."""
TINY_SEEING = (*TINY_SPECIAL, "<|vision_start|>", "<|vision_end|>", IMAGE)
"""The special tokens of a tiny tokenizer, numbered from 0."""
TINY_SEEING_IDS = {
    name: TINY_SEEING.index(token)
    for name, token in (
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
        ("image_token_id", IMAGE),
    )
}
"""Their numbers in the config of a tiny encoder."""


@dataclass(frozen=True)
class SeeingEncoder(TextEncoder):
    """A frozen text model with its vision tower, its tokenizer, and the processor of images."""

    processor: Any


class PilImageProcessor:
    """`AutoImageProcessor` that takes the class which computes with Pillow and numpy: torchvision is not installed."""

    def __init__(self, automatic: Any) -> None:
        self._automatic = automatic

    def from_pretrained(self, folder: Any, **options: Any) -> Any:
        return self._automatic.from_pretrained(folder, backend="pil", **options)


def check_processor(folder: ModelFolder, model: str) -> None:
    """Raise InputError if the folder has no processor of images. model: the published model, for the message."""
    if not any((folder.path / "processor" / name).is_file() for name in PROCESSORS):
        raise InputError(
            f"{folder.field} {folder.path}: no processor/{PROCESSORS[0]}; the text encoder of {model} sees images that "
            "it prepares; download the folder again"
        )


def load_seeing_encoder(
    load: LoadModule,
    folder: ModelFolder,
    classes: tuple[Any, Any],
    config: Mapping[str, Any],
    tokenizer_folder: str = "tokenizer",
) -> SeeingEncoder:
    """Load `text_encoder` with its vision tower, frozen and sharded layer by layer.

    Args:
        load: Loads and shards the module.
        folder: The model's folder, whose `processor` prepares the images.
        classes: Classes of config and model, as (Qwen2_5_VLConfig, Qwen2_5_VLModel).
        config: text_encoder/config.json.
        tokenizer_folder: The subfolder with the tokenizer.

    Raises:
        InputError: The tokenizer's token of images is another than the model's.
    """
    from transformers import AutoImageProcessor

    config_class, model_class = classes
    with torch.device("meta"):
        empty = model_class(config_class.from_dict(dict(config))).float()
    blocks = sorted({type(layer).__name__ for layer in (*empty.language_model.layers, *empty.visual.blocks)})
    model: Any = load(empty, folder.weights("text_encoder", TRANSFORMERS_STEM, _seeing_key), blocks)
    # No file holds the rotary frequencies, and the meta device lost them: they are computed again.
    text, visual, device = model.language_model, model.visual, device_of(model)
    text.rotary_emb = type(text.rotary_emb)(text.config).to(device)
    visual.rotary_pos_emb = type(visual.rotary_pos_emb)(visual.config).to(device)
    tokenizer = load_tokenizer(folder, tokenizer_folder)
    token = tokenizer.convert_tokens_to_ids(IMAGE)
    if token != model.config.image_token_id:
        raise InputError(
            f"{folder.field} {folder.path}: {IMAGE} is token {token} of {tokenizer_folder}, but "
            f"{model.config.image_token_id} of text_encoder; download the folder again"
        )
    return SeeingEncoder(
        model, tokenizer, from_folder(PilImageProcessor(AutoImageProcessor), folder.path / "processor")
    )


def seen_tokens(
    encoder: SeeingEncoder,
    template: str,
    caption: str,
    images: Sequence[Image.Image],
    picture: str,
    max_length: int,
    *,
    between: str = "",
    is_scaled: bool = True,
) -> Mapping[str, Tensor]:
    """The inputs of an encoder for a caption with images, on the CPU.

    The positions of an image's tokens are its rows and columns. transformers 5 computes them only from the types of the
    tokens, which diffusers' pipelines of Qwen-Image-Edit leave out (its issue 14194, still so in 0.42.1).

    Args:
        encoder: The encoder.
        template: The text around images and caption, with a place {} for them.
        caption: The caption.
        images: RGB, in the size that is seen.
        picture: The text of an image, with places for its number from 1 and its tokens.
        max_length: Most tokens of template and caption. Those of images do not count.
        between: The text between images.
        is_scaled: Whether the processor scales images to its own limits; else sides are multiples of its tokens'.
    """
    seen: Mapping[str, Tensor] = {}
    counts: list[int] = []
    if images:
        seen = dict(encoder.processor(images=list(images), do_resize=is_scaled, return_tensors="pt"))
        merged = encoder.processor.merge_size**2
        counts = [int(grid.prod()) // merged for grid in seen["image_grid_thw"]]
    pictures = between.join(picture.format(number, IMAGE * count) for number, count in enumerate(counts, 1))
    # A caption's own token of images would announce one that there is not. Removing one may join the halves of another.
    while IMAGE in caption:
        caption = caption.replace(IMAGE, "")
    shown = encoder.tokenizer(pictures, add_special_tokens=False).input_ids
    tokens = encoder.tokenizer(
        template.format(pictures + caption),
        return_tensors="pt",
        truncation=True,
        max_length=max_length + len(shown),
    )
    ids = tokens["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": tokens["attention_mask"], **seen}
    if images:
        inputs["mm_token_type_ids"] = (ids == encoder.model.config.image_token_id).int()
    return inputs


def seen_states(encoder: SeeingEncoder, inputs: Mapping[str, Tensor], is_normalised: bool = True) -> Tensor:
    """The last hidden states, (1, L, D), of the result of `seen_tokens`, before or after the model's last norm."""
    before: list[Tensor] = []
    hook = encoder.model.language_model.norm.register_forward_pre_hook(lambda _, given: before.append(given[0]))
    try:
        device = device_of(encoder.model)
        outputs = encoder.model(**{name: tensor.to(device) for name, tensor in inputs.items()}, use_cache=False)
    finally:
        hook.remove()
    states: Tensor = outputs.last_hidden_state if is_normalised else before[0]
    return states


def size_of_area(size: Size, pixels: int, multiple: int = 32) -> Size:
    """The size of about `pixels` pixels in the aspect ratio of `size`, up to MAX_ASPECT, its sides multiples of
    `multiple`."""
    aspect = min(max(size.width / size.height, 1 / MAX_ASPECT), MAX_ASPECT)
    width = math.sqrt(pixels * aspect)
    height = width / aspect
    return Size(*(round(side / multiple) * multiple for side in (width, height)))


def _seeing_key(key: str) -> str | None:
    """The name of a tensor without the prefixes of transformers' versions; None for the head."""
    visual = re.fullmatch(r"(?:model\.)?(visual\..+)", key)
    text = language_model_key(key)
    return visual[1] if visual else text and f"language_model.{text}"
