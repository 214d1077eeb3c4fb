import shutil
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from tests.models.common import batch_of, edit_json, examples, load, make, model_of, picture, without_bar
from tests.models.test_dropout import Dropping
from tests.runs import run_config
from trainer.config.size import Size
from trainer.models import families
from trainer.models.families.qwen_image import EDIT_TEMPLATE, QwenImage
from trainer.models.parts.image.seeing import IMAGE
from trainer.system.errors import InputError


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


@pytest.mark.parametrize("architecture", ["qwen-image", "qwen-image-edit-2509"])
def test_the_language_model_is_found_in_files_and_configs_of_both_ages(cache, tmp_path, architecture):
    """Those of the published folder name the tower `visual`, and its config is flat."""
    family = make("qwen_image", cache, architecture=architecture)
    copied = Path(shutil.copytree(family.folder, tmp_path / "model"))
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


# Edit


@pytest.fixture(scope="module")
def edit(cache) -> QwenImage:
    return make("qwen_image", cache, architecture="qwen-image-edit-2509")


def test_tokens_of_images_have_the_positions_of_their_rows_and_columns(edit):
    """diffusers' pipeline does not tell the encoder which tokens are images, and transformers 5 then counts them as
    words: its issue 14194. The state of the last token depends on all before it."""
    encoder, image = edit.text_encoder(load), picture(140, 56, seed=3)
    ours = edit.encode_edit(encoder, "a fox", [image])["prompt_embeds"]
    seen = encoder.processor(images=[image], return_tensors="pt")
    text = EDIT_TEMPLATE.format(f"Picture 1: <|vision_start|>{IMAGE * 10}<|vision_end|>a fox")
    tokens = encoder.tokenizer(text, return_tensors="pt")
    start = int((tokens["input_ids"][0] == encoder.model.config.image_token_id).nonzero()[0])
    rows, columns = torch.arange(2).repeat_interleave(5), torch.arange(5).repeat(2)
    after = torch.arange(tokens["input_ids"].shape[1] - start - 10) + 5
    places = [
        torch.cat([torch.arange(start), start + inside, start + after])
        for inside in (torch.zeros(10, dtype=torch.int64), rows, columns)
    ]
    with torch.no_grad():
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(edit.folder / "text_encoder").model
        given = model(**tokens, **seen, position_ids=torch.stack(places)[:, None]).last_hidden_state[0, 64:]
        counted = model(**tokens, **seen).last_hidden_state[0, 64:]
    torch.testing.assert_close(ours, given, atol=1e-5, rtol=0)
    assert (ours[-1] - counted[-1]).abs().max() > 1e-3


def test_the_fingerprint_follows_the_kind_of_model_and_the_processor(edit, cache, tmp_path):
    """Models that edit have the encoders of the one that does not, and read the same captions otherwise."""
    folder = Path(shutil.copytree(edit.folder, tmp_path / "model"))
    found = [edit.fingerprint()]
    edit_json(folder / "processor" / "preprocessor_config.json", image_mean=[0.5, 0.5, 0.5])
    found.append(make("qwen_image", cache, str(folder)).fingerprint())
    edit_json(folder / "model_index.json", _class_name="QwenImagePipeline")
    found.append(make("qwen_image", cache, str(folder)).fingerprint())
    found.append(make("qwen_image", cache, str(folder), max_tokens=40).fingerprint())
    edit_json(folder / "model_index.json", _class_name="QwenImageEditPlusPipeline")
    found.append(make("qwen_image", cache, str(folder), max_tokens=40).fingerprint())
    assert len({*found}) == 5


def test_a_caption_announces_no_image_that_there_is_not(edit):
    encoder = edit.text_encoder(load)
    nested = f"a {IMAGE[:5]}{IMAGE}{IMAGE[5:]}fox"  # without the inner one it would be another
    texts = ("a fox", f"a {IMAGE}fox", nested)
    for images in ((), (picture(64, 64, seed=3),)):
        plain, *announced = (edit.encode_edit(encoder, text, images)["prompt_embeds"] for text in texts)
        assert all(one.equal(plain) for one in announced)


@pytest.mark.parametrize("size", [(1, 1), (1, 600), (3000, 1), (1, 9999)])
def test_an_image_of_any_shape_is_seen(edit, size):
    """The processor refuses sides of more than 200 to 1."""
    seen = edit.seen_size(Size(*size))
    assert edit.encode_edit(edit.text_encoder(load), "a fox", [picture(*seen.frame, seed=3)])


def test_a_folder_without_the_processor_of_images_is_refused(edit, cache, tmp_path):
    folder = Path(shutil.copytree(edit.folder, tmp_path / "model"))
    shutil.rmtree(folder / "processor")
    with pytest.raises(InputError) as caught:
        make("qwen_image", cache, str(folder))
    assert str(caught.value) == (
        f"model.path {folder}: no processor/preprocessor_config.json; the text encoder of Qwen/Qwen-Image-Edit-2509 "
        "sees images that it prepares; download the folder again"
    )


def test_a_tokenizer_whose_token_of_images_is_another_is_refused(edit, cache, tmp_path):
    folder = Path(shutil.copytree(edit.folder, tmp_path / "model"))
    edit_json(folder / "text_encoder" / "config.json", image_token_id=7)
    with pytest.raises(InputError) as caught:
        make("qwen_image", cache, str(folder)).text_encoder(load)
    assert str(caught.value) == (
        f"model.path {folder}: {IMAGE} is token 5 of tokenizer, but 7 of text_encoder; download the folder again"
    )


@pytest.mark.parametrize(
    ("size", "seen"), [((384, 384), (384, 384)), ((1600, 900), (512, 288)), ((300, 900), (224, 672))]
)
def test_an_image_is_seen_in_the_pipelines_size(edit, size, seen):
    assert edit.seen_size(Size(*size)).frame == seen == calculate_dimensions(384 * 384, size[0] / size[1])


def test_the_time_of_references_is_zero_in_2511_alone(cache):
    """The share of noise does not reach what the transformer makes of references before they meet the noisy image."""
    changes = {}
    for version in ("2509", "2511"):
        family = make("qwen_image", cache, architecture=f"qwen-image-edit-{version}")
        model, (item,) = model_of(family), examples(family, 1)
        batch = batch_of(family, [item | {"reference_0": item["latents"] + 1}])
        seen = []
        model["transformer"].transformer_blocks[0].attn.register_forward_pre_hook(
            lambda module, args, given, seen=seen: seen.append(given["hidden_states"]), with_kwargs=True
        )
        for sigma in (0.2, 0.9):
            family.predict(model, batch["latents"], torch.tensor([sigma]), batch, 1.0)
        count = seen[0].shape[1] // 2
        changes[version] = [
            float((seen[0] - seen[1])[:, part].abs().max()) for part in (slice(count), slice(count, None))
        ]
    assert changes["2511"][1] == 0
    assert min(changes["2511"][0], *changes["2509"]) > 1e-3


@pytest.mark.parametrize("version", ["2509", "2511"])
def test_an_adapter_of_the_modulation_drops_of_an_item_what_it_drops_in_any_batch(cache, tmp_path, version):
    """The transformer of 2511 has two times for each image: all of the noisy ones, then all that are 0."""
    options = {"architecture": f"qwen-image-edit-{version}"}

    def dropping(checkpointing):
        cfg = run_config(
            tmp_path,
            model={"family": "qwen_image", "options": options},
            adapter__targets=(r"transformer\..+\.img_mod\.1",),
            adapter__dropout=0.2,
            train__checkpointing=checkpointing,
            parallel__strategy="none",
        )
        family = families.make(cfg, cache)
        items = [item | {"reference_0": item["latents"] + 1} for item in examples(family, 3)]
        return Dropping(cfg, family, items)

    dropping("none").check(dropping("full"))
