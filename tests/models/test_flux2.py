import json
import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2 import pipeline_flux2
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, Mistral3ForConditionalGeneration

from tests.models.common import (
    SAME,
    assert_diffusers_reads_the_layout,
    assert_original_file_is_read,
    assert_same_picture,
    batch_of,
    edit_json,
    examples,
    load,
    make,
    model_of,
    picture,
    recorded_decodes,
    refusal,
    without_bar,
)
from trainer.config.models import published_models
from trainer.config.sections import ModelConfig, ObjectiveConfig, SampleConfig
from trainer.models.families.flux2 import ARCHITECTURES, Flux2, image_ids, text_ids
from trainer.models.objectives.flow_matching import add_noise, draw_sigma, empirical_mu
from trainer.models.parts.folder import ModelFolder, write_once
from trainer.models.parts.image.images import pack, patchify, unpack, unpatchify
from trainer.models.parts.image.text_encoder import stacked_layers
from trainer.rng import SampleRng
from trainer.system.errors import InputError
from trainer.weights.files import WeightFiles

CAPTIONS = ["a red fox", "", "a long caption " * 40, "twenty [IMG] words"]


@pytest.fixture(scope="module")
def klein(cache) -> Flux2:
    return family(cache)


@pytest.fixture(scope="module")
def dev(cache) -> Flux2:
    return family(cache, architecture="dev")


@pytest.fixture(scope="module")
def klein_pipeline(klein) -> Flux2KleinPipeline:
    return without_bar(Flux2KleinPipeline.from_pretrained(klein.folder, local_files_only=True))


@pytest.fixture(scope="module")
def dev_pipeline(dev) -> Flux2Pipeline:
    pipeline = Flux2Pipeline(
        scheduler=pipeline_flux2.FlowMatchEulerDiscreteScheduler.from_pretrained(dev.folder, subfolder="scheduler"),
        vae=AutoencoderKLFlux2.from_pretrained(dev.folder, subfolder="vae"),
        text_encoder=Mistral3ForConditionalGeneration.from_pretrained(dev.folder / "text_encoder"),
        tokenizer=AutoTokenizer.from_pretrained(dev.folder / "tokenizer"),
        transformer=Flux2Transformer2DModel.from_pretrained(dev.folder, subfolder="transformer"),
    )
    return without_bar(pipeline)


@pytest.fixture
def copied(klein, tmp_path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(klein.folder, tmp_path / "model"))


def family(cache: Path, *args, **options) -> Flux2:
    return make("flux2", cache, *args, **options)


def error_of(cache: Path, *args, **options) -> str:
    return refusal("flux2", cache, *args, **options)


# Recipe: equal to diffusers' own pipelines


@pytest.mark.parametrize(("height", "width"), [(2, 2), (4, 6), (10, 2)])
def test_patchified_and_packed_latents_equal_the_pipelines_and_come_back(height, width):
    latents = torch.randn(2, 4, height, width, generator=torch.Generator().manual_seed(0))
    patches = Flux2Pipeline._patchify_latents(latents)
    assert patchify(latents).equal(patches)
    assert pack(patches).equal(Flux2Pipeline._pack_latents(patches))
    assert unpack(pack(patches), height // 2, width // 2).equal(patches)
    assert unpatchify(patches).equal(latents)


def test_unpacked_tokens_equal_the_pipelines_scatter_by_ids():
    tokens = torch.randn(1, 15, 16, generator=torch.Generator().manual_seed(0))
    scattered = Flux2Pipeline._unpack_latents_with_ids(tokens, image_ids(3, 5).unsqueeze(0))
    assert unpack(tokens, 3, 5).equal(scattered)


def test_image_and_text_ids_equal_the_pipelines():
    assert image_ids(3, 5).equal(Flux2Pipeline._prepare_latent_ids(torch.zeros(1, 16, 3, 5))[0])
    assert text_ids(7).equal(Flux2Pipeline._prepare_text_ids(torch.zeros(1, 7, 8))[0])


@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_encoded_image_equals_the_pipelines_normalised_latents(klein, klein_pipeline, size):
    image = picture(*size)
    ours = klein.encode_image(klein.image_encoder(load), image)["latents"]
    pixels = klein_pipeline.image_processor.preprocess(image)
    with torch.no_grad():
        theirs = klein_pipeline._encode_vae_image(pixels, generator=None)
    torch.testing.assert_close(ours, theirs[0], **SAME)
    assert ours.shape == (16, size[1] // 16, size[0] // 16)


@pytest.mark.parametrize("layers", [(1, 2, 3), (0, 2, 4)], ids=["tiny's layers", "embeddings and normed last"])
@pytest.mark.parametrize("caption", CAPTIONS)
def test_klein_prompt_embeds_equal_those_of_the_whole_encoder_in_the_pipeline(klein_pipeline, cache, layers, caption):
    ours = family(cache, text_layers=layers)
    embeds = ours.encode_text(ours.text_encoder(load), caption)["prompt_embeds"]
    with torch.no_grad():
        theirs, _ = klein_pipeline.encode_prompt(caption, max_sequence_length=48, text_encoder_out_layers=layers)
    torch.testing.assert_close(embeds, theirs[0], **SAME)
    assert embeds.shape == (48, 96)


@pytest.mark.parametrize("caption", CAPTIONS)
def test_dev_prompt_embeds_with_system_message_equal_the_pipelines(dev, dev_pipeline, caption):
    embeds = dev.encode_text(dev.text_encoder(load), caption)["prompt_embeds"]
    with torch.no_grad():
        theirs, _ = dev_pipeline.encode_prompt(caption, max_sequence_length=64, text_encoder_out_layers=(1, 2, 3))
    torch.testing.assert_close(embeds, theirs[0], **SAME)
    assert embeds.shape == (64, 96)


@pytest.mark.parametrize("tokens", [16, 1024, 4096, 4300, 4301, 9216])
@pytest.mark.parametrize("steps", [4, 10, 28, 50, 200])
def test_empirical_mu_equals_the_pipelines(tokens, steps):
    assert empirical_mu(tokens, steps) == pytest.approx(pipeline_flux2.compute_empirical_mu(tokens, steps), abs=1e-9)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_klein_sample_equals_the_pipelines_for_the_same_noise(klein, klein_pipeline, guidance):
    vae, encoder = klein.image_encoder(load), klein.text_encoder(load)
    text, negative = klein.encode_text(encoder, "a fox"), klein.encode_text(encoder, "")
    cfg, rng = SampleConfig(size=(64, 48), steps=5, guidance=guidance), SampleRng(3, [0])
    decoded = recorded_decodes(vae), recorded_decodes(klein_pipeline.vae)
    image = klein.sample(model_of(klein), vae, text, negative, cfg, rng)
    expected = klein_pipeline(
        prompt_embeds=text["prompt_embeds"].unsqueeze(0),
        negative_prompt_embeds=negative["prompt_embeds"].unsqueeze(0),
        latents=rng.normal("sample", (16, 3, 4)),
        width=64,
        height=48,
        num_inference_steps=5,
        guidance_scale=guidance,
    ).images[0]
    torch.testing.assert_close(decoded[0][-1], decoded[1][-1], atol=1e-6, rtol=1e-6)
    assert_same_picture(image, expected)


def test_dev_sample_with_guidance_embedding_equals_the_pipelines_for_the_same_noise(dev, dev_pipeline):
    vae, encoder = dev.image_encoder(load), dev.text_encoder(load)
    text, negative = dev.encode_text(encoder, "a fox"), dev.encode_text(encoder, "")
    cfg, rng = SampleConfig(size=(32, 64), steps=4, guidance=2.5), SampleRng(3, [0])
    decoded = recorded_decodes(vae), recorded_decodes(dev_pipeline.vae)
    image = dev.sample(model_of(dev), vae, text, negative, cfg, rng)
    expected = dev_pipeline(
        prompt_embeds=text["prompt_embeds"].unsqueeze(0),
        latents=rng.normal("sample", (16, 4, 2)),
        width=32,
        height=64,
        num_inference_steps=4,
        guidance_scale=2.5,
    ).images[0]
    torch.testing.assert_close(decoded[0][-1], decoded[1][-1], atol=1e-6, rtol=1e-6)
    assert_same_picture(image, expected)


def test_a_prompt_runs_through_the_tiny_klein_folder_in_diffusers(klein_pipeline):
    arguments = {"width": 32, "height": 32, "num_inference_steps": 1, "text_encoder_out_layers": (1, 2, 3)}
    image = klein_pipeline(prompt="a fox", **arguments)
    assert image.images[0].size == (32, 32)


def test_sample_size_is_rounded_down_to_16_pixels(klein):
    text = klein.encode_text(klein.text_encoder(load), "a fox")
    cfg = SampleConfig(size=(47, 33), steps=1)
    image = klein.sample(model_of(klein), klein.image_encoder(load), text, None, cfg, SampleRng(0, [0]))
    assert image.size == (32, 32)


# Loss


def test_loss_is_the_error_of_the_transformers_velocity_at_the_drawn_timestep(klein):
    items = examples(klein, 2)
    model, rng = model_of(klein), SampleRng(5, [8, 9])
    loss = klein.loss(model, batch_of(klein, items), rng)
    latents = torch.stack([item["latents"] for item in items])
    noise, sigma = rng.normal("noise", (16, 2, 4)), draw_sigma(klein.objective, klein.shift, 8, rng)
    predicted = model["transformer"](
        hidden_states=Flux2Pipeline._pack_latents(add_noise(latents, noise, sigma)),
        encoder_hidden_states=torch.stack([item["prompt_embeds"] for item in items]),
        timestep=sigma,
        img_ids=Flux2Pipeline._prepare_latent_ids(latents),
        txt_ids=Flux2Pipeline._prepare_text_ids(torch.zeros(2, 48, 96)),
    ).sample
    errors = (predicted - Flux2Pipeline._pack_latents(noise - latents)).square().mean(dim=(1, 2))
    torch.testing.assert_close(loss.total, errors.sum(), atol=1e-5, rtol=0)
    assert loss.weight.item() == 2


def test_objective_guidance_reaches_dev_and_is_refused_for_klein_which_is_never_told(cache):
    losses = []
    for guidance in (1.0, 3.5):
        made = family(cache, objective=ObjectiveConfig(guidance=guidance), architecture="dev")
        losses.append(made.loss(model_of(made), batch_of(made, examples(made, 1)), SampleRng(0, [0])).total.item())
    assert abs(losses[0] - losses[1]) > 1e-3
    assert error_of(cache, objective=ObjectiveConfig(guidance=3.5)).startswith(
        "objective.guidance: is not used by this kind of model; leave it out. It reads objective.density, "
    )


def test_every_weight_of_the_tiny_transformer_gets_a_gradient(dev):
    model = model_of(dev).requires_grad_(True)
    dev.loss(model, batch_of(dev, examples(dev, 1)), SampleRng(0, [0])).total.backward()
    assert [name for name, weight in model.named_parameters() if not weight.grad.abs().sum() > 0] == []


def test_examples_of_equal_image_size_and_text_length_share_a_batch(klein):
    vae = klein.image_encoder(load)
    text = klein.encode_text(klein.text_encoder(load), "a fox")
    keys = [klein.batch_key({**klein.encode_image(vae, picture(*size)), **text}) for size in [(64, 32), (32, 64)]]
    assert keys == [(2, 4, 48), (4, 2, 48)]


# Model


def test_the_transformer_has_no_buffers_that_the_meta_device_would_lose(klein):
    assert list(klein.build("transformer").named_buffers()) == []


def test_adapter_targets_are_all_linear_layers_of_the_blocks_and_no_other(dev):
    modules = dict(dev.build("transformer").named_modules())
    matched = {
        name for name in modules if any(re.fullmatch(pattern, name) for pattern in Flux2.adapter_targets["transformer"])
    }
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    assert matched == {name for name in linear if "transformer_blocks." in name}
    assert len(matched) == 1 * 12 + 2 * 2


def test_text_encoder_is_the_language_model_up_to_the_last_needed_layer(dev, klein):
    given: list[Sequence[str]] = []

    def recording(module: nn.Module, files: WeightFiles, blocks: Sequence[str]) -> nn.Module:
        given.append(list(blocks))
        return load(module, files, blocks)

    made = [family(dev.cache, architecture=name, text_layers=(0, 1, 2)) for name in ("dev", "klein-4b")]
    encoders = [one.text_encoder(recording).model for one in made]
    assert given == [["MistralDecoderLayer"], ["Qwen3DecoderLayer"]]
    for encoder in encoders:
        assert len(encoder.layers) == 3
        assert {name.split(".")[0] for name in encoder.state_dict()} == {"embed_tokens", "layers", "norm"}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.", ""])
def test_text_encoder_weights_are_found_under_each_known_prefix(cache, copied, klein, prefix):
    file = copied / "text_encoder" / "model.safetensors"
    weights = {key.replace("model.", prefix, 1): tensor for key, tensor in load_file(file).items()}
    save_file({**weights, "vision_tower.layers.0.weight": torch.zeros(1)}, file)
    made = family(cache, str(copied))
    expected = klein.text_encoder(load).model.state_dict()
    found = made.text_encoder(load).model.state_dict()
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }


def test_captions_are_padded_to_the_length_that_the_config_names(cache):
    made = family(cache, max_tokens=20)
    assert made.encode_text(made.text_encoder(load), "a fox")["prompt_embeds"].shape == (20, 96)


def test_a_tokenizer_folder_that_holds_a_processor_gives_its_tokenizer(cache, copied, klein):
    processor = {"processor_class": "PixtralProcessor"}
    (copied / "tokenizer" / "processor_config.json").write_text(json.dumps(processor))
    edit_json(copied / "tokenizer" / "tokenizer_config.json", **processor)
    tokenizer = family(cache, str(copied)).text_encoder(load).tokenizer
    assert tokenizer("a fox")["input_ids"] == klein.text_encoder(load).tokenizer("a fox")["input_ids"]


@pytest.mark.parametrize("name", ["mine.safetensors", "flux.sft"])
def test_a_single_transformer_file_beside_a_base_folder_is_the_same_model(cache, copied, klein, tmp_path, name):
    file = shutil.move(copied / "transformer" / "diffusion_pytorch_model.safetensors", tmp_path / name)
    made = family(cache, str(file), base=str(copied))
    ours, expected = model_of(made).state_dict(), model_of(klein).state_dict()
    assert made.folder == copied
    assert all(tensor.equal(ours[name]) for name, tensor in expected.items())


def test_a_single_file_in_the_original_layout_is_the_same_model(dev, tmp_path):
    assert_original_file_is_read(dev, tmp_path)


@pytest.mark.parametrize("name", ["dev", "klein-4b"])
def test_a_single_file_by_the_layout_is_read_by_diffusers_as_the_same_weights(cache, tmp_path, name):
    made = family(cache, architecture=name)
    assert_diffusers_reads_the_layout(made, Flux2Transformer2DModel, tmp_path)


def test_a_hub_id_in_the_local_cache_is_read_from_there(cache, klein, tmp_path, monkeypatch):
    repository = tmp_path / "models--someone--flux2"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = shutil.copytree(klein.folder, repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert family(cache, "someone/flux2").folder == snapshot


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_of_a_folder_is_accepted_when_its_config_is_that_of_the_name(cache, dev, copied, name):
    folder = Path(shutil.copytree(dev.folder, copied, dirs_exist_ok=True)) if name == "dev" else copied
    wanted = ARCHITECTURES[name]
    blocks = {"num_layers": wanted.num_layers, "num_single_layers": wanted.num_single_layers}
    edit_json(folder / "transformer" / "config.json", **blocks)
    made = family(cache, str(folder), architecture=name)
    assert len(made.build("transformer").single_transformer_blocks) == wanted.num_single_layers


# Tiny


def test_tiny_transformer_has_less_than_half_a_million_parameters(dev, klein):
    sizes = [sum(weight.numel() for weight in one.build("transformer").parameters()) for one in (dev, klein)]
    assert sizes == [303_232, 297_088]


def test_of_processes_that_write_a_folder_at_once_the_first_wins_and_nothing_else_stays(tmp_path):
    barrier = threading.Barrier(2)

    def write(folder: Path) -> None:
        (folder / "whole").touch()
        barrier.wait(timeout=10)

    threads = [threading.Thread(target=write_once, args=(tmp_path / "model", write)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["model", "model/whole"]


def test_fingerprint_follows_the_encoders_and_their_use_but_not_the_transformer_or_the_place(cache, copied):
    def fingerprint(layers: tuple[int, ...] = (1, 2, 3)) -> str:
        return family(cache, str(copied), text_layers=layers).fingerprint()

    first = fingerprint()
    (copied / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"other")
    moved = copied.rename(copied.with_name("moved"))
    copied.symlink_to(moved)
    assert fingerprint() == first
    assert fingerprint((1, 2, 4)) != first
    file = copied / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    assert fingerprint() != first


# Errors


def test_a_folder_without_model_is_refused_with_what_was_expected(cache):
    assert error_of(cache, "/models/flux2") == (
        "model.path /models/flux2: no transformer/config.json; expected a diffusers folder. "
        "Download it or set model.path: tiny"
    )


@pytest.mark.parametrize(
    "name",
    [
        "vae/config.json",
        "text_encoder/config.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer_config.json",
    ],
)
def test_a_folder_that_lacks_a_component_is_refused_before_anything_is_loaded(cache, copied, name):
    (copied / name).unlink()
    assert error_of(cache, str(copied)) == (
        f"model.path {copied}: no {name}; expected a diffusers folder. Download it or set model.path: tiny"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ("[]", "not a JSON object"),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(cache, copied, text, reason):
    file = copied / "vae" / "config.json"
    file.write_text(text)
    assert error_of(cache, str(copied)) == f"{file}: {reason}; download it again"


def test_a_hub_id_that_is_not_cached_is_refused_with_the_download_command(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert error_of(cache, "black-forest-labs/FLUX.2-klein-base-4B") == (
        "model.path black-forest-labs/FLUX.2-klein-base-4B: neither a folder nor in the local Hugging Face cache. "
        "FLUX.2 klein 4B is a download of 16 GB. Its licence is Apache 2.0: free to use, commercially too. "
        f"Download it with `{published_models()['black-forest-labs/FLUX.2-klein-base-4B'].download_command}`, "
        "or name a diffusers folder, or set model.path: tiny"
    )


def test_a_single_file_that_does_not_exist_is_refused(cache):
    assert error_of(cache, "/none.safetensors", base="/models") == (
        "model.path /none.safetensors: no such file; name a safetensors file or a diffusers folder"
    )


def test_a_single_file_without_base_is_refused(cache, tmp_path):
    file = tmp_path / "mine.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    assert error_of(cache, str(file)) == (
        f"model.path {file}: a single .safetensors or .sft file holds neither configs nor tokenizers; "
        "set model.base to the diffusers folder of the model it was made from"
    )


def test_a_base_without_single_file_is_refused(cache):
    assert error_of(cache, "tiny", base="/models") == (
        "model.base /models: is only used with a single file, but model.path is tiny; leave it empty"
    )


def test_a_base_that_is_no_folder_is_named_by_its_own_field(cache, tmp_path):
    file = tmp_path / "mine.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    assert error_of(cache, str(file), base="/models") == (
        "model.base /models: no transformer/config.json; expected a diffusers folder. "
        "Download it or set model.path: tiny"
    )


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (
            "double_blocks.0.img_attn.qkv.weight",
            "'double_blocks.0.img_attn.qkv.weight' has shape [1], the model needs [192, 64]; "
            "the file and the folder's config.json belong to different models",
        ),
        (
            "x_embedder.scale",
            "1 tensors that the model does not have, first 'x_embedder.scale'; "
            "the weights and transformer/config.json belong to different models",
        ),
    ],
)
def test_a_transformer_file_of_another_model_is_refused(cache, copied, tmp_path, key, reason):
    file = tmp_path / "mine.safetensors"
    save_file({key: torch.zeros(1)}, file)
    with pytest.raises(InputError) as caught:
        family(cache, str(file), base=str(copied)).weights("transformer")
    assert str(caught.value) == f"{file}: {reason}"


def test_a_model_of_another_family_is_refused(cache, copied):
    edit_json(copied / "transformer" / "config.json", _class_name="FluxTransformer2DModel")
    assert error_of(cache, str(copied)) == (
        f"model.path {copied}: transformer/config.json describes a FluxTransformer2DModel, "
        "not a Flux2Transformer2DModel; set model.family to the family of that model"
    )


def test_a_text_encoder_of_another_kind_is_refused(cache, copied):
    edit_json(copied / "text_encoder" / "config.json", model_type="t5")
    assert error_of(cache, str(copied)) == (
        f"model.path {copied}: text_encoder/config.json describes a t5 text encoder, expected mistral or qwen3; "
        "download the folder again"
    )


def test_a_text_encoder_config_without_its_size_is_refused(cache, copied):
    file = copied / "text_encoder" / "config.json"
    file.write_text('{"model_type": "qwen3", "hidden_size": 32}')
    assert error_of(cache, str(copied)) == (
        f"model.path {copied}: text_encoder/config.json has no num_hidden_layers; download the folder again"
    )


def test_an_architecture_that_the_folder_does_not_hold_is_refused(cache, copied):
    assert error_of(cache, str(copied), architecture="dev") == (
        "model.options.architecture: dev has 8 + 48 blocks with guidance embedding, "
        f"but {copied} has 1 + 2 blocks without guidance embedding; leave it empty or set model.path to dev"
    )


@pytest.mark.parametrize(
    ("depth", "width", "needed", "published"),
    [
        (40, 5120, 15360, (10, 20, 30)),  # FLUX.2-dev
        (36, 2560, 7680, (9, 18, 27)),  # klein 4B
        (36, 4096, 12288, (9, 18, 27)),  # klein 9B
        (36, 4096, 32768, (4, 8, 12, 16, 20, 24, 28, 32)),  # FLUX.3
    ],
)
def test_text_layers_of_published_models(copied, depth, width, needed, published):
    config = {"num_hidden_layers": depth, "hidden_size": width}
    assert stacked_layers(ModelConfig(), config, needed, ModelFolder("model.path", copied)) == published


def test_text_layers_beyond_the_encoder_are_refused(cache, copied):
    assert error_of(cache, str(copied), text_layers=(9, 18, 27)) == (
        f"model.options.text_layers: [9, 18, 27] is not within 0 to 4, the hidden states of {copied}/text_encoder"
    )


def test_text_layers_that_do_not_fill_the_transformers_input_are_refused(cache):
    assert error_of(cache, text_layers=(1, 2)) == (
        "model.options.text_layers: [1, 2] gives 2 x 32 = 64 features per token, but the transformer reads 96; "
        "name 3 hidden states"
    )
