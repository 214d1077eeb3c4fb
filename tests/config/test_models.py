"""The facts about the models that the presets train."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from trainer.config.families import FACTS
from trainer.config.load import load_config
from trainer.config.models import captioners, downloadable, published_models
from trainer.config.sections import HUB_ID, MODEL_WORDS
from trainer.system.installation import PRESETS

FILES = sorted(PRESETS.glob("*.yaml"))
MODELS = list(downloadable().values())


@pytest.mark.parametrize("preset", FILES, ids=lambda file: file.stem)
def test_every_hub_id_that_a_preset_trains_is_known(preset):
    model = load_config(preset).config.model
    trained = {path for path in (model.path, model.base) if path and (HUB_ID.fullmatch(path) or path == "demo")}
    assert trained <= set(published_models())


def test_every_known_model_is_trained_by_a_preset():
    trained = {load_config(preset).config.model.path for preset in FILES}
    assert set(published_models()) <= trained


def test_every_family_has_a_preset():
    """Notebook 7 lists the families of images by their presets."""
    assert {load_config(preset).config.model.family for preset in FILES} == set(json.loads(FACTS.read_text()))


@pytest.mark.parametrize("preset", FILES, ids=lambda file: file.stem)
def test_the_size_is_the_one_that_the_head_of_the_preset_says(preset):
    model = published_models().get(load_config(preset).config.model.path)
    said = re.search(
        r"^# to download +(?:.*[^\d.])?([\d.]+) GB(?: in fp32)?(?::.*)?$", preset.read_text(), re.MULTILINE
    )
    assert (said is None) == (model is None or model.is_built_in)
    if said and model:
        assert model.num_bytes == round(float(said[1]) * 10**9)


def test_the_built_in_model_is_a_word_of_the_config_and_nothing_is_downloaded():
    built_in = [model for model in published_models().values() if model.is_built_in]
    assert [model.id for model in built_in] == ["demo"] and set(MODEL_WORDS) >= {"demo"}
    assert (built_in[0].num_bytes, built_in[0].download_command, built_in[0].page) == (0, "", "")


def test_captioners_are_downloads_that_no_preset_trains_the_smallest_first():
    offered = captioners()
    assert not set(offered) & set(published_models()) and set(offered) <= set(downloadable())
    assert [model.num_bytes for model in offered.values()] == sorted(model.num_bytes for model in offered.values())
    for model in offered.values():
        assert model.num_bytes and model.licence_note and model.page
        assert model.needs("config.json") and model.needs("model-00001-of-00002.safetensors")
        assert not model.needs("pytorch_model.bin") and not model.needs("modeling.py")


def test_the_command_is_the_one_of_the_readme():
    readme = (PRESETS.parent / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    command = re.search(r"^\.venv/bin/(hf download black-forest-labs/FLUX.2-dev .*)$", readme, re.MULTILINE)
    model = published_models()["black-forest-labs/FLUX.2-dev"]
    assert command and " ".join(command[1].split()) == model.download_command
    assert model.login_advice == (
        "It is gated: accept its licence on https://huggingface.co/black-forest-labs/FLUX.2-dev, "
        "and log in with `hf auth login`."
    )
    assert model.licence_note == "FLUX Non-Commercial License: non-commercial"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.id)
def test_a_shell_reads_the_patterns_from_the_command_as_they_are(model):
    words = shlex.split(model.download_command)
    assert words[:3] == ["hf", "download", model.id]
    assert tuple(words[4::2]) == model.include and set(words[3::2]) == {"--include"}


@pytest.mark.parametrize(
    ("model_id", "needed", "not_needed"),
    [
        (
            "black-forest-labs/FLUX.2-dev",
            ["transformer/diffusion_pytorch_model-00001-of-00007.safetensors", "model_index.json"],
            ["flux2-dev.safetensors", "README.md"],
        ),
        (
            "stabilityai/stable-diffusion-xl-base-1.0",
            ["unet/diffusion_pytorch_model.safetensors", "tokenizer_2/vocab.json"],
            ["unet/diffusion_pytorch_model.fp16.safetensors", "sd_xl_base_1.0.safetensors", "unet/model.onnx"],
        ),
        (
            "stabilityai/stable-diffusion-3.5-large",
            ["text_encoder_3/model-00001-of-00002.safetensors"],
            ["text_encoder_3/model.fp16-00001-of-00002.safetensors", "text_encoder/model.fp16.safetensors"],
        ),
    ],
)
def test_a_second_copy_of_the_weights_is_not_needed(model_id, needed, not_needed):
    model = published_models()[model_id]
    assert all(map(model.needs, needed)) and not any(map(model.needs, not_needed))
