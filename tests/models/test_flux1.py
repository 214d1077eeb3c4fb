import shutil
from pathlib import Path

import pytest
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file
from transformers import CLIPTextModel

from tests.models.common import assert_diffusers_reads_the_layout, edit_json, load, make
from trainer.models.families.flux1 import Flux1


@pytest.fixture(scope="module")
def dev(cache) -> Flux1:
    return make("flux1", cache)


@pytest.fixture
def copied(dev, tmp_path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(dev.folder, tmp_path / "model"))


# Recipe: equal to diffusers' own pipeline


# Model


@pytest.mark.parametrize(("name", "tokens"), [("dev", 512), ("schnell", 256)])
def test_a_model_on_disk_reads_captions_of_its_published_length_or_its_tokenizers(cache, copied, name, tokens):
    tiny = make("flux1", cache, architecture=name)
    family = make("flux1", cache, str(shutil.copytree(tiny.folder, copied, dirs_exist_ok=True)))
    tokenizer = copied / "tokenizer_2" / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text().replace('"model_max_length": 32', '"model_max_length": 512'))
    longer = make("flux1", cache, str(copied))
    for made, length in ((family, 32), (longer, tokens)):
        assert made.encode_text(made.text_encoder(load), "a fox")["prompt_embeds"].shape == (length, 32)
    assert family.model_spec == f"flux-1-{name}"


def test_clip_weights_are_found_with_and_without_the_prefix_of_published_files(dev, copied, cache):
    file = copied / "text_encoder" / "model.safetensors"
    model = CLIPTextModel.from_pretrained(dev.folder / "text_encoder")
    save_file({f"text_model.{name}": tensor for name, tensor in model.state_dict().items()}, file)
    found = make("flux1", cache, str(copied)).text_encoder(load).clip.model
    assert all(tensor.equal(found.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_a_single_file_by_the_layout_is_read_by_diffusers_as_the_same_weights(cache, copied, tmp_path):
    """At the width that diffusers' converter is written for."""
    edit_json(
        copied / "transformer" / "config.json",
        **{"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 24, "attention_head_dim": 128},
        **{"axes_dims_rope": [16, 56, 56]},
    )
    assert_diffusers_reads_the_layout(make("flux1", cache, str(copied)), FluxTransformer2DModel, tmp_path)
