import shutil
from pathlib import Path

import pytest
from diffusers import QwenImagePipeline
from safetensors.torch import load_file, save_file

from tests.models.common import edit_json, load, make, without_bar
from trainer.models.families.qwen_image import QwenImage


@pytest.fixture(scope="module")
def family(cache) -> QwenImage:
    return make("qwen_image", cache)


@pytest.fixture(scope="module")
def pipeline(family) -> QwenImagePipeline:
    return without_bar(QwenImagePipeline.from_pretrained(family.folder, local_files_only=True))


@pytest.fixture
def copied(family, tmp_path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(family.folder, tmp_path / "model"))


# Recipe: equal to diffusers' own pipeline


def test_the_language_model_is_found_in_files_and_configs_of_both_ages(cache, family, copied):
    """Those of the published folder name the tower `visual`, and its config is flat."""
    before = family.encode_text(family.text_encoder(load), "a fox")["prompt_embeds"]
    file = copied / "text_encoder" / "model.safetensors"
    state = {name.replace("model.visual.", "visual."): tensor for name, tensor in load_file(file).items()}
    save_file({name.replace("model.language_model.", "model."): tensor for name, tensor in state.items()}, file)
    config = family.tiny()["text_encoder"]["text_config"]
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    flat = {name: value for name, value in config.items() if name != "rope_parameters"} | rope
    edit_json(copied / "text_encoder" / "config.json", **flat)
    (copied / "text_encoder" / "config.json").write_text(
        (copied / "text_encoder" / "config.json").read_text().replace('"text_config"', '"unread"')
    )
    old = make("qwen_image", cache, str(copied))
    assert old.encode_text(old.text_encoder(load), "a fox")["prompt_embeds"].equal(before)
