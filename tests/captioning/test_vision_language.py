"""Tiny models of transformers' own classes, read by our readers and by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.captioning.models import write_florence2, write_qwen2_5_vl, write_qwen3_vl
from tests.distributed import run_ranks
from tests.runs import alone
from trainer.distributed.world import World
from trainer.metrics.memory import local_bytes
from trainer.models.vision_language import Decoding, VisionLanguage, VisionLanguageFolder, decoded
from trainer.run.captioning import CaptionRequest
from trainer.system.errors import InputError
from trainer.weights.quantization import QuantLinear, quantized_layers

WRITE: dict[str, Callable[[Path], Path]] = {
    "qwen2_5_vl": write_qwen2_5_vl,
    "qwen3_vl": write_qwen3_vl,
    "florence2": write_florence2,
}
DECODING = Decoding(12)
MOST_DIFFERENCE = 1e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write(root / name) for name, write in WRITE.items()}


def images() -> list[Image.Image]:
    numbers = torch.Generator().manual_seed(1)
    blocks = [(torch.rand(h, w, 3, generator=numbers) * 255).byte().numpy() for h, w in ((3, 5), (4, 4), (6, 3))]
    return [Image.fromarray(block).resize((90, 60)) for block in blocks]


def load(folder: Path, world: World, **changes: Any) -> VisionLanguage:
    values = {"folder": "/", "model": str(folder), "precision": "fp32", "device": "cpu", **changes}
    request = CaptionRequest.checked(values)
    return VisionLanguage.load(VisionLanguageFolder(str(folder)), request.config(), world, is_sharded=request.shard)


def by_transformers(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def inputs_of(model: VisionLanguage, image: Image.Image) -> dict[str, Any]:
    return model.source.inputs(image, model.source.prompt("sentence", "Describe it."))


def logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        start = {"decoder_input_ids": torch.tensor([[2, 0]])} if model.config.is_encoder_decoder else {}
        found: Tensor = model(**inputs, **start).logits
    return found


@pytest.mark.parametrize("name", WRITE)
def test_logits_and_answers_are_those_of_plain_transformers(name, folders):
    ours, theirs = load(folders[name], alone()), by_transformers(folders[name])
    answers = set()
    for image in images():
        inputs = inputs_of(ours, image)
        assert (logits(ours.model, inputs) - logits(theirs, inputs)).abs().max() <= MOST_DIFFERENCE
        ids = theirs.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
        ids = ids if ours.source.config.is_encoder_decoder else ids[inputs["input_ids"].shape[1] :]
        text = ours.source.processor.tokenizer.decode(ids, skip_special_tokens=True)
        assert ours.answer(inputs, DECODING, "a").text == text
        answers.add(text)
    assert len(answers) > 1, "the answers do not depend on the image"


def test_an_image_becomes_the_patches_of_a_formula_without_torchvision(folders):
    """The formula: subtract CLIP's mean, divide by its deviation, cut squares of 14 in groups of 2 x 2."""
    image = Image.effect_noise((56, 28), 90).convert("RGB")
    found = load(folders["qwen2_5_vl"], alone()).source.inputs(image, "x")
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).double().view(28, 56, 3) / 255
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073], dtype=torch.float64)
    deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711], dtype=torch.float64)
    squares = ((pixels - mean) / deviation).permute(2, 0, 1).view(3, 1, 2, 14, 2, 2, 14)  # C, h, 2, 14, w, 2, 14
    wanted = squares.permute(1, 4, 2, 5, 0, 3, 6).reshape(8, 3, 1, 14, 14).expand(-1, -1, 2, -1, -1).reshape(8, -1)
    assert found["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert (found["pixel_values"] - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("format", ["nf4", "int8", "fp8"])
def test_a_quantized_model_computes_with_the_decoded_weights_of_its_language_model(format, folders):
    folder = folders["qwen3_vl"]
    ours, theirs = load(folder, alone(), quantize=format), by_transformers(folder)
    layers = quantized_layers(ours.model)
    assert len(layers) == 2 * 7 and all("language_model" in name for name in layers)
    with torch.no_grad():
        for name, layer in layers.items():
            assert isinstance(layer, QuantLinear)
            weight = theirs.get_parameter(f"{name}.weight")
            decoded = layer.weight.float()
            assert 0 < (decoded - weight).abs().max() < 0.3 * weight.abs().max()
            weight.copy_(decoded)
    inputs = inputs_of(ours, images()[0])
    assert (logits(ours.model, inputs) - logits(theirs, inputs)).abs().max() <= MOST_DIFFERENCE


def test_a_model_that_can_think_aloud_is_asked_not_to(folders, tmp_path, caplog):
    folder = change(folders["qwen3_vl"], tmp_path / "thinking")
    file = folder / "chat_template.jinja"
    thinks = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    file.write_text(file.read_text(encoding="utf-8").removesuffix("{% endif %}") + thinks + "{% endif %}", "utf-8")
    plain = VisionLanguageFolder(str(folders["qwen3_vl"])).inputs(images()[0], "Describe it.")
    quiet = VisionLanguageFolder(str(folder)).inputs(images()[0], "Describe it.")
    assert torch.equal(quiet["input_ids"], plain["input_ids"])
    assert "not a valid argument" not in caplog.text


def test_a_chat_template_that_never_ends_is_refused(folders, tmp_path):
    folder = change(folders["qwen3_vl"], tmp_path / "endless")
    (folder / "chat_template.jinja").write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(InputError, match=r"its chat template cannot be used \(it takes more than 200,000 steps\)"):
        VisionLanguageFolder(str(folder)).inputs(images()[0], "Describe it.")


def test_florence2_is_asked_a_fixed_prompt_or_the_users_and_the_things_it_lists_are_tags(folders):
    model = load(folders["florence2"], alone())
    source = model.source
    assert [source.prompt(style, "Describe it.") for style in ("sentence", "tags")] == ["<CAPTION>", "<OD>"]
    assert source.prompt("tags", "Describe it.", " <OCR> ") == "<OCR>"
    assert not source.is_instructed and VisionLanguageFolder(str(folders["qwen3_vl"])).is_instructed
    places = "<loc_1><loc_2><loc_3><loc_4>"
    tokenizer = source.processor.tokenizer
    ids = tokenizer(f"</s><s>red dog{places}tree{places}{places}dog</s>", add_special_tokens=False).input_ids
    assert decoded(tokenizer, ids) == "red dog, tree, dog"
    ids = tokenizer("</s><s> a dog, here</s>", add_special_tokens=False).input_ids
    assert decoded(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_words_drawn_at_a_temperature_depend_on_seed_and_name_alone(folders):
    model = load(folders["qwen2_5_vl"], alone())
    inputs, warm = inputs_of(model, images()[0]), replace(DECODING, temperature=1.0)
    first = model.answer(inputs, warm, "a").text
    torch.rand(7)
    others = {model.answer(inputs, warm, "b").text, model.answer(inputs, replace(warm, seed=1), "a").text}
    assert model.answer(inputs, warm, "a").text == first and first not in others


def answers_of(world: World, folder: Path, format: str) -> tuple[list[str], Tensor, int]:
    """Answers and first logits of a sharded model, each rank about images of its own; and its bytes on this rank."""
    model = load(folder, world, ranks=world.size, shard=True, quantize=format)
    held = local_bytes(model.model.parameters())
    shown = images()[world.rank :] + images()[: world.rank]
    texts = [
        model.answer(inputs_of(model, image), replace(DECODING, tokens=6 + 5 * world.rank), "a").text for image in shown
    ]
    return texts, logits(model.model, inputs_of(model, images()[0])), held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format"),
    [("qwen2_5_vl", "none"), ("qwen3_vl", "nf4")],
)
def test_a_model_that_two_ranks_share_answers_as_the_whole_one(name, format, folders):
    whole = load(folders[name], alone(), quantize=format)
    num_bytes = local_bytes(whole.model.parameters())
    for rank, (texts, found, held) in enumerate(run_ranks(2, answers_of, folders[name], format)):
        shown, decoding = images()[rank:] + images()[:rank], replace(DECODING, tokens=6 + 5 * rank)
        assert texts == [whole.answer(inputs_of(whole, image), decoding, "a").text for image in shown]
        assert (found - logits(whole.model, inputs_of(whole, images()[0]))).abs().max() <= MOST_DIFFERENCE
        assert held < 0.55 * num_bytes


def change(folder: Path, to: Path, **fields: Any) -> Path:
    """A copy whose config.json has other fields."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **fields}))
    return to


def test_models_that_cannot_describe_images_are_refused_with_the_reason_and_a_remedy(folders, tmp_path):
    folder = folders["qwen2_5_vl"]
    with pytest.raises(InputError, match=r"brings code of its own \(auto_map\), which is never run; name a copy"):
        VisionLanguageFolder(str(change(folder, tmp_path / "code", auto_map={"AutoModel": "evil.Model"})))
    with pytest.raises(InputError, match="describes a qwen3, which does not describe images; name a vision-language"):
        VisionLanguageFolder(str(change(folder, tmp_path / "text", model_type="qwen3")))
    with pytest.raises(InputError, match="not a model that transformers knows"):
        VisionLanguageFolder(str(change(folder, tmp_path / "unknown", model_type="nothing")))
    without = change(folder, tmp_path / "without")
    (without / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="has no chat template, so it cannot be asked for a caption; name a model"):
        VisionLanguageFolder(str(without)).prompt("sentence", "Describe it.")
    (without / "model.safetensors").rename(without / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(without, alone())
