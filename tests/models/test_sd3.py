import shutil
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from tests.models.common import SAME, edit_json, load, make, refusal, without_bar
from trainer.models.families.sd3 import Sd3


@pytest.fixture(scope="module")
def family(cache) -> Sd3:
    return make("sd3", cache)


def pipeline_of(family: Sd3, **changes) -> StableDiffusion3Pipeline:
    return without_bar(StableDiffusion3Pipeline.from_pretrained(family.folder, local_files_only=True, **changes))


@pytest.fixture
def copied(family, tmp_path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(family.folder, tmp_path / "model"))


# Recipe: equal to diffusers' own pipeline


def test_without_the_third_text_encoder_its_embeddings_are_zeros_as_in_the_pipeline(cache, family):
    pipeline = pipeline_of(family, text_encoder_3=None, tokenizer_3=None)
    assert_embeddings_equal(make("sd3", cache, without=("text_encoder_3",)), pipeline, "a red fox", 32)


def test_a_folder_without_third_text_encoder_is_read_as_one_that_leaves_it_out(cache, family, copied):
    shutil.rmtree(copied / "text_encoder_3")
    shutil.rmtree(copied / "tokenizer_3")
    pipeline = pipeline_of(family, text_encoder_3=None, tokenizer_3=None)
    assert_embeddings_equal(make("sd3", cache, str(copied)), pipeline, "a red fox", 256)


def assert_embeddings_equal(family: Sd3, pipeline: StableDiffusion3Pipeline, caption: str, tokens: int) -> None:
    ours = family.encode_text(family.text_encoder(load), caption)
    with torch.no_grad():
        states, _, pooled, _ = pipeline.encode_prompt(
            caption, None, None, max_sequence_length=tokens, do_classifier_free_guidance=False
        )
    torch.testing.assert_close(ours["prompt_embeds"], states[0], **SAME)
    torch.testing.assert_close(ours["pooled_embeds"], pooled[0], **SAME)


# Model


def test_a_folder_is_known_by_its_architecture_and_named_by_it_in_exported_files(cache, copied):
    blocks = {"num_layers": 24, "dual_attention_layers": list(range(13))}
    edit_json(copied / "transformer" / "config.json", **blocks)
    family = make("sd3", cache, str(copied), architecture="sd35-medium")
    assert family.model_spec == "stable-diffusion-3-5-medium"


# Errors


def test_only_the_third_text_encoder_can_be_left_out(cache):
    assert refusal("sd3", cache, without=("text_encoder",)) == (
        "model.options.without: 'text_encoder' is not one of text_encoder_3; did you mean 'text_encoder_3'?"
    )
