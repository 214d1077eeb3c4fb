"""Published models on the meta device, and examples without pictures or captions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.models.common import IMAGES, load, make
from trainer.config.sections import ModelConfig, ModelOptions
from trainer.config.size import Size
from trainer.models import families
from trainer.models.base import ImageFamily
from trainer.models.flow_transformer import FlowTransformer
from trainer.models.parts.folder import ModelFolder
from trainer.models.parts.image.text_encoder import stacked_layers
from trainer.models.parts.published import published_folder
from trainer.system.errors import InputError
from trainer.weights.files import WeightFiles

T5, CLIP_L, CLIP_L_PROJECTED, CLIP_G, VAE = 4.762, 0.1231, 0.1237, 0.695, 0.084
LANGUAGE_MODELS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
}
"""Parameters as published; of tied models the head counts once."""
COUNTS = {
    "bagel 7b-mot": [14.607, VAE],
    **{f"causal_lm {name}": [count / 1e9] for name, count in LANGUAGE_MODELS.items()},
    "auto ovis-image-7b": [7.370, 1.721, VAE],
    "chroma chroma1": [8.9, T5, VAE],
    "ernie_image ernie-image": [8.033, 3.429, VAE],
    "flux1 dev": [11.901, CLIP_L, T5, VAE],
    "flux1 kontext": [11.901, CLIP_L, T5, VAE],
    "flux1 schnell": [11.891, CLIP_L, T5, VAE],
    "flux2 dev": [32.223, 17.90, VAE],
    "flux2 klein-4b": [3.876, 3.215, VAE],
    "flux2 klein-9b": [9.079, 6.025, VAE],
    "flux3 flux3": [5.538, 3.720, VAE],
    "ideogram4 ideogram-4": [9.279, 7.57, VAE],
    "krea2 raw": [12.82, 4.022, 0.127],
    "qwen_image qwen-image": [20.43, 7.071, 0.127],
    "qwen_image qwen-image-edit-2509": [20.43, 7.747, 0.127],
    "qwen_image qwen-image-edit-2511": [20.43, 7.747, 0.127],
    "qwen_image_21 qwen-image-2.1": [7.115, 8.145, 0.338],
    "sd3 sd3-medium": [2.028, CLIP_L_PROJECTED, CLIP_G, T5, VAE],
    "sd3 sd35-medium": [2.243, CLIP_L_PROJECTED, CLIP_G, T5, VAE],
    "sd3 sd35-large": [8.057, CLIP_L_PROJECTED, CLIP_G, T5, VAE],
    "sdxl base": [2.567, 0.116, CLIP_G, VAE],
    "z_image z-image": [6.155, 4.022, VAE],
    "z_image z-image-turbo": [6.155, 4.022, VAE],
}
"""10^9 parameters: the denoiser, the text encoders as they are built (language models without the layers after the last
state that is read), the autoencoder."""
ONE_EACH = {name.split()[0]: name for name in COUNTS}.values()
"""The last one of each family."""


def of(family: str, architecture: str | None) -> ModelConfig:
    return ModelConfig(family=family, path="a/b", options=ModelOptions(architecture=architecture))


def published(name: str, cache: Path) -> Any:
    family, architecture = name.split()
    folder = published_folder(of(family, architecture), cache)
    return make(family, cache, path=str(folder), architecture=architecture)


def test_every_published_architecture_is_counted() -> None:
    assert [f"{name} {a}" for name in families.names() for a in sorted(families.get(name).architectures)] == sorted(
        COUNTS
    )


@pytest.mark.parametrize(
    "name", [name if name in ONE_EACH else pytest.param(name, marks=pytest.mark.slow) for name in COUNTS]
)
def test_a_published_model_has_its_number_of_parameters(name: str, tmp_path: Path) -> None:
    family = published(name, tmp_path)
    counts = [_billions(family.build(family.components[0]))]

    def count(module: nn.Module, files: WeightFiles, blocks: Sequence[str]) -> nn.Module:
        counts.append(_billions(module))
        return module

    if isinstance(family, ImageFamily):
        family.text_encoder(count)
        family.image_encoder(count)
    assert counts == pytest.approx(COUNTS[name], rel=5e-3)
    if isinstance(family, FlowTransformer):
        assert counts[0] == pytest.approx(COUNTS[name][0], abs=6e-4)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_language_model_has_exactly_the_published_parameters(name: str, tmp_path: Path) -> None:
    family = published(f"causal_lm {name}", tmp_path)
    assert sum(p.numel() for p in family.build("language_model").parameters()) == LANGUAGE_MODELS[name]


def test_every_component_of_a_published_model_can_be_built(tmp_path: Path) -> None:
    family = published("sdxl base", tmp_path)
    counts = [_billions(family.build(component)) for component in family.components]
    assert counts == pytest.approx(COUNTS["sdxl base"][:-1], rel=5e-3)


def test_a_published_language_model_gives_the_states_its_pipeline_stacks(tmp_path: Path) -> None:
    read = {}
    for name in ("flux2 dev", "flux2 klein-4b", "flux2 klein-9b", "flux3 flux3"):
        family = published(name, tmp_path)
        config = json.loads((family.folder / "text_encoder" / "config.json").read_text(encoding="utf-8"))
        needed = family.build("transformer").config.joint_attention_dim
        read[name] = stacked_layers(family.config, config.get("text_config", config), needed, ModelFolder("", Path()))
    assert read == {
        "flux2 dev": (10, 20, 30),
        "flux2 klein-4b": (9, 18, 27),
        "flux2 klein-9b": (9, 18, 27),
        "flux3 flux3": (4, 8, 12, 16, 20, 24, 28, 32),
    }


def test_the_folder_of_a_published_model_is_written_once_and_holds_no_tensors(tmp_path: Path) -> None:
    model = of("sdxl", "base")
    folder = published_folder(model, tmp_path)
    (folder / "mark").touch()
    assert (published_folder(model, tmp_path) / "mark").exists()
    assert {file.parent.name: load_file(file) for file in folder.rglob("*.safetensors")} == {
        "unet": {},
        "vae": {},
        "text_encoder": {},
        "text_encoder_2": {},
    }


@pytest.mark.parametrize("name", families.names())
def test_without_a_name_the_folder_is_that_of_the_family_s_default(name: str, tmp_path: Path) -> None:
    default = families.get(name).default_architecture
    assert published_folder(of(name, None), tmp_path) == published_folder(of(name, default), tmp_path)


def test_the_folder_of_a_model_nobody_published_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        published_folder(of("sdxl", "bass"), tmp_path)
    assert str(refused.value) == "model.options.architecture: 'bass' is not one of base; did you mean 'base'?"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IMAGES)
def test_a_blank_example_is_shaped_like_what_the_encoders_make(name: str, dtype: torch.dtype, cache: Path) -> None:
    family = make(name, cache)

    def loaded(module: nn.Module, files: WeightFiles, blocks: Sequence[str]) -> nn.Module:
        module = load(module, files, blocks)
        return module.to(dtype) if blocks else module

    texts, images = family.text_encoder(loaded), family.image_encoder(loaded)
    for width, height, caption in ((64, 64, "a red apple on a table"), (96, 64, "a cat")):
        example = family.encode_text(texts, caption) | family.encode_image(images, Image.new("RGB", (width, height)))
        tokens = len(example.get("prompt_embeds", ()))
        assert _shapes(family.blank_example(Size(width, height), tokens, dtype)) == _shapes(example)


@pytest.mark.parametrize("windows", [1, 3])
def test_a_blank_example_for_live_text_encoders_holds_token_ids(cache: Path, windows: int) -> None:
    model = ModelConfig(
        family="sdxl",
        path="tiny",
        train={"unet": "adapter", "text_encoder": "adapter"},
        options=ModelOptions(text_windows=windows),
    )
    family = families.get("sdxl")(model, make("sdxl", cache).objective, cache)
    example = family.encode_text(family.text_encoder(load), "a cat")
    example |= family.encode_image(family.image_encoder(load), Image.new("RGB", (64, 64)))
    assert _shapes(family.blank_example(Size(64, 64), 0, torch.float32)) == _shapes(example)


@pytest.mark.parametrize("name", IMAGES)
def test_a_blank_example_takes_no_memory_under_fake_tensors(name: str, cache: Path) -> None:
    family = make(name, cache)
    with FakeTensorMode():
        example = family.blank_example(Size(64, 64), 5, torch.bfloat16)
    assert all(isinstance(tensor, FakeTensor) for tensor in example.values())


def _billions(module: nn.Module) -> float:
    return sum(p.numel() for p in module.parameters()) / 1e9


def _shapes(example: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in example.items()}
