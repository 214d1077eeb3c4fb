import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers.pipelines.flux2 import pipeline_flux2
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.common import SAME, edit_json, load, make, model_of, refusal, without_bar
from trainer.config.models import published_models
from trainer.models.families.flux2 import ARCHITECTURES, Flux2
from trainer.models.objectives.flow_matching import empirical_mu
from trainer.models.parts.folder import write_once
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


@pytest.fixture
def copied(klein, tmp_path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(klein.folder, tmp_path / "model"))


def family(cache: Path, *args, **options) -> Flux2:
    return make("flux2", cache, *args, **options)


def error_of(cache: Path, *args, **options) -> str:
    return refusal("flux2", cache, *args, **options)


# Recipe: equal to diffusers' own pipelines


@pytest.mark.parametrize("layers", [(1, 2, 3), (0, 2, 4)], ids=["tiny's layers", "embeddings and normed last"])
@pytest.mark.parametrize("caption", CAPTIONS)
def test_klein_prompt_embeds_equal_those_of_the_whole_encoder_in_the_pipeline(klein_pipeline, cache, layers, caption):
    ours = family(cache, text_layers=layers)
    embeds = ours.encode_text(ours.text_encoder(load), caption)["prompt_embeds"]
    with torch.no_grad():
        theirs, _ = klein_pipeline.encode_prompt(caption, max_sequence_length=48, text_encoder_out_layers=layers)
    torch.testing.assert_close(embeds, theirs[0], **SAME)
    assert embeds.shape == (48, 96)


@pytest.mark.parametrize("tokens", [16, 1024, 4096, 4300, 4301, 9216])
@pytest.mark.parametrize("steps", [4, 10, 28, 50, 200])
def test_empirical_mu_equals_the_pipelines(tokens, steps):
    assert empirical_mu(tokens, steps) == pytest.approx(pipeline_flux2.compute_empirical_mu(tokens, steps), abs=1e-9)


# Model


def test_the_transformer_has_no_buffers_that_the_meta_device_would_lose(klein):
    assert list(klein.build("transformer").named_buffers()) == []


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


# Errors


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


def test_a_text_encoder_config_without_its_size_is_refused(cache, copied):
    file = copied / "text_encoder" / "config.json"
    file.write_text('{"model_type": "qwen3", "hidden_size": 32}')
    assert error_of(cache, str(copied)) == (
        f"model.path {copied}: text_encoder/config.json has no num_hidden_layers; download the folder again"
    )
