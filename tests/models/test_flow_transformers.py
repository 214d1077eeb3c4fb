"""The contract of the flow transformers: each family computes what diffusers' own pipeline computes for its model.

The pipelines are driven by the references of the audit, which import nothing of `trainer`. A row of MODELS is a tiny
model with its facts. What only one family does is tested in its own file.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ErnieImageTransformer2DModel,
    Flux2Transformer2DModel,
    Flux3Transformer2DModel,
    Krea2Transformer2DModel,
    QwenImage21Transformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    ZImageTransformer2DModel,
)
from PIL import Image
from torch import nn

from tests.audit.families import REFERENCES
from tests.audit.reference import Draws, FlowReference
from tests.models.common import (
    assert_captions_of_any_length_share_a_batch,
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
    sampled_times,
)
from tests.runs import run_config
from trainer.config.sections import ObjectiveConfig, SampleConfig
from trainer.config.size import Size
from trainer.models import families
from trainer.models.flow_transformer import FlowTransformer
from trainer.models.objectives.flow_matching import shift_factor
from trainer.rng import SampleRng

Json = Mapping[str, Any]
# Smaller ones are refused by FLUX.2's pipelines, and these are left at their size.
GIVEN = (picture(64, 96, seed=7), picture(96, 64, seed=8))
"""Reference images."""
LONG = "a long caption of many words " * 10
CAPTIONS = ("a red fox", "", LONG, "twenty [IMG] words")


@dataclass(frozen=True)
class Model:
    """A tiny model.

    Attributes:
        name: Family and architecture.
        latents: Channels, and pixels along a side.
        silent: Number of parameters that get no gradient in training, without reference images.
        unadapted: Linear layers of the blocks that adapters leave alone: a regular expression, and their number.
        call: Guidance -> arguments of the pipeline's call.
        decoded: Largest difference of the latents that are decoded, absolute and relative.
        encoded: Largest difference of embeddings.
        references: Whether its pipeline draws nothing without reference images.
    """

    name: str
    latents: tuple[int, int]
    silent: int
    unadapted: tuple[str, int]
    call: Callable[[float], Json] = lambda guidance: {"guidance_scale": guidance, "negative_prompt": "grey"}
    decoded: tuple[float, float] = (1e-5, 1e-5)
    encoded: float = 1e-6
    references: bool = False

    def make(self, cache: Path, **options: Any) -> Any:
        family, architecture = self.name.split()
        return make(family, cache, **{"architecture": architecture} | options)


def embedded(guidance: float) -> Json:
    return {"guidance_scale": guidance}


MODULATION = r".+\.norm1?(_context)?\.linear"
MODELS = {
    model.name: model
    for model in (
        Model("chroma chroma1", (4, 8), 0, ("", 0)),
        Model("ernie_image ernie-image", (16, 16), 0, ("", 0)),
        Model("flux1 dev", (4, 8), 0, (MODULATION, 4), embedded, (1e-6, 1e-6)),
        Model("flux1 kontext", (4, 8), 0, (MODULATION, 4), embedded, (1e-6, 1e-6)),
        Model("flux1 schnell", (4, 8), 0, (MODULATION, 4), embedded, (1e-6, 1e-6)),
        Model("flux2 dev", (16, 16), 0, ("", 0), embedded, (1e-6, 1e-6)),
        Model("flux2 klein-4b", (16, 16), 0, ("", 0), decoded=(1e-6, 1e-6)),
        Model("flux3 flux3", (16, 16), 11, (r".*image_cond.*", 6)),
        Model("ideogram4 ideogram-4", (16, 16), 0, (r".+\.adaln_modulation", 2), embedded),
        # Its pipeline counts guidance from 0.
        Model(
            "krea2 raw",
            (4, 8),
            0,
            (r"text_fusion\..+", 16),
            lambda guidance: {"guidance_scale": guidance - 1, "negative_prompt": "grey"},
            encoded=5e-6,
        ),
        Model(
            "qwen_image qwen-image",
            (4, 8),
            9,
            (r".+\.(img_mod|txt_mod)\.1", 4),
            lambda guidance: {"true_cfg_scale": guidance, "negative_prompt": "grey"},
            encoded=5e-6,
        ),
        *(
            Model(
                f"qwen_image qwen-image-edit-{version}",
                (4, 8),
                9,
                (r".+\.(img_mod|txt_mod)\.1", 4),
                lambda guidance: {"true_cfg_scale": guidance, "negative_prompt": "grey"},
                encoded=5e-6,
                references=True,
            )
            for version in ("2509", "2511")
        ),
        Model(
            "qwen_image_21 qwen-image-2.1",
            (8, 16),
            0,
            ("", 0),
            lambda guidance: {"true_cfg_scale": guidance, "negative_prompt": "grey"},
            encoded=5e-6,
        ),
        Model("sd3 sd3-medium", (4, 8), 2, (MODULATION, 4)),
        Model("sd3 sd35-medium", (4, 8), 3, (MODULATION, 4)),
        Model("sd3 sd35-large", (4, 8), 3, (MODULATION, 4)),
        # Its pipeline counts guidance from 0. The model's time is of order 1 and enters its sinusoids 1000-fold: the
        # last bit of 1 - sigma is seen. Turbo is distilled: it is drawn without guidance, whatever the config says.
        *(
            Model(f"z_image {name}", (4, 8), 0, (r".+\.adaLN_modulation\.0", 3), call, (5e-4, 0.0), 5e-6)
            for name, call in (
                ("z-image", lambda guidance: {"guidance_scale": guidance - 1, "negative_prompt": "grey"}),
                ("z-image-turbo", lambda guidance: {"guidance_scale": 0.0}),
            )
        ),
    )
}
ONE_EACH = tuple({name.split()[0]: name for name in sorted(MODELS, reverse=True)}.values())
"""The first of each family."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(params=ONE_EACH)
def one(request: pytest.FixtureRequest) -> Model:
    """One model of each family."""
    return MODELS[request.param]


@once
def reference_of(name: str, folder: Path) -> Any:
    return REFERENCES[name.split()[0]](folder, {})


def reference(family: Any, model: Model, **objective: Any) -> Any:
    """The model in diffusers' pipeline, which is made once."""
    made = reference_of(model.name, family.folder)
    made.objective = objective
    return made


@pytest.fixture
def copied(one: Model, cache: Path, tmp_path: Path) -> Path:
    """The diffusers folder of `one`, which a test may change."""
    return Path(shutil.copytree(one.make(cache).folder, tmp_path / "model"))


def test_the_contract_has_every_family_of_flow_transformers_and_every_kind_of_each() -> None:
    kinds = [name for name in families.names() if issubclass(families.get(name), FlowTransformer)]
    kinds.remove("auto")  # test_auto.py
    known = {f"{name} {architecture}" for name in kinds for architecture in families.get(name).architectures}
    assert known - MODELS.keys() == {"flux2 klein-9b"}, "its tiny model is that of klein-4b"
    assert MODELS.keys() <= known


# Equal to diffusers' own pipeline


@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_an_encoded_image_is_the_pipelines_mean_of_the_posterior(one: Model, cache: Path, size: Any) -> None:
    family, image = one.make(cache), picture(*size)
    ours = family.encode_image(family.image_encoder(load), image)["latents"]
    limit = 1e-5 if one.name.startswith(("krea2", "qwen_image")) else 1e-6
    torch.testing.assert_close(ours, reference(family, one).latents(image), atol=limit, rtol=0)
    channels, side = one.latents
    assert ours.shape == (channels, size[1] // side, size[0] // side)


@pytest.mark.parametrize("caption", CAPTIONS)
@pytest.mark.parametrize("short", [False, True])
def test_embeddings_of_a_caption_equal_the_pipelines(model: Model, cache: Path, caption: str, short: bool) -> None:
    """At the length of the tiny tokenizer, and at a shorter one of the config."""
    family = model.make(cache)
    theirs = reference(family, model)
    settings = dict(theirs.settings)
    if short:
        length = 80 if model.name.startswith("flux3") else 16
        family, theirs.settings = model.make(cache, max_tokens=length), settings | {"max_sequence_length": length}
    try:
        expected = theirs.text(caption)
    finally:
        theirs.settings = settings
    ours = family.encode_text(family.text_encoder(load), caption)
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(ours[key], tensor, atol=model.encoded, rtol=0)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("name", [name for name in MODELS if not MODELS[name].references])
def test_a_sample_equals_the_pipelines_for_the_same_noise(name: str, cache: Path, guidance: float) -> None:
    model = MODELS[name]
    family = model.make(cache)
    theirs, vae, encoder = reference(family, model), family.image_encoder(load), family.text_encoder(load)
    text, negative = family.encode_text(encoder, "a fox in the snow"), family.encode_text(encoder, "grey")
    cfg, rng = SampleConfig(size=(96, 64), steps=4, guidance=guidance), SampleRng(3, [0])
    decoded, expected = recorded_decodes(vae), recorded_decodes(theirs.pipeline.vae)
    image = family.sample(model_of(family), vae, text, negative, cfg, rng)
    channels, side = model.latents
    call = {"prompt": "a fox in the snow", "num_inference_steps": 4, **model.call(guidance)}
    drawn = theirs.picture(rng.normal("sample", (channels, 64 // side, 96 // side))[0], 96, 64, call)
    torch.testing.assert_close(decoded[-1], expected[-1], atol=model.decoded[0], rtol=model.decoded[1])
    assert_same_picture(image, drawn)


def test_a_sample_is_rounded_down_to_whole_tokens(one: Model, cache: Path) -> None:
    family = one.make(cache)
    text, cfg = family.encode_text(family.text_encoder(load), "a fox"), SampleConfig(size=(47, 33), steps=1)
    image = family.sample(model_of(family), family.image_encoder(load), text, None, cfg, SampleRng(0, [0]))
    assert image.size == (32, 32)


def with_references(family: Any, text: Mapping[str, Any], *images: Image.Image) -> dict[str, Any]:
    vae = family.image_encoder(load)
    latents = {f"reference_{i}": family.encode_image(vae, image)["latents"] for i, image in enumerate(images)}
    return {**text, **latents}


def prompt_of(family: Any, caption: str, *images: Image.Image) -> dict[str, Any]:
    """What the text encoder makes of a caption, with the images where it sees them."""
    encoder = family.text_encoder(load)
    if not family.sees_references:
        return dict(family.encode_text(encoder, caption))
    shown = [image.resize(family.seen_size(Size(*image.size)).frame, Image.Resampling.LANCZOS) for image in images]
    return dict(family.encode_edit(encoder, caption, shown))


def made_for_references(model: Model, cache: Path) -> Any:
    """A family whose text encoder sees references in the size of GIVEN, where that follows the resolution."""
    family = model.make(cache)
    family.follow(run_config(Path(), data__resolution=round(math.sqrt(64 * 96))))
    return family


@pytest.mark.parametrize(
    ("name", "count", "guidance"),
    [
        ("flux1 kontext", 1, 4.0),
        ("flux2 klein-4b", 1, 1.0),
        ("flux2 klein-4b", 1, 4.0),
        ("flux2 dev", 2, 4.0),
        ("qwen_image qwen-image-edit-2509", 1, 1.0),
        ("qwen_image qwen-image-edit-2509", 2, 4.0),
        ("qwen_image qwen-image-edit-2511", 2, 4.0),
        ("qwen_image_21 qwen-image-2.1", 1, 1.0),
        ("qwen_image_21 qwen-image-2.1", 2, 4.0),
    ],
)
def test_a_sample_from_references_equals_the_pipelines(name: str, count: int, guidance: float, cache: Path) -> None:
    """And without them it is another."""
    model = MODELS[name]
    family, given = made_for_references(model, cache), GIVEN[:count]
    theirs, vae = reference(family, model), family.image_encoder(load)
    text, negative = (prompt_of(family, caption, *given) for caption in ("a fox", "grey"))
    cfg, rng = SampleConfig(size=(96, 64), steps=4, guidance=guidance), SampleRng(3, [0])
    decoded, expected = recorded_decodes(vae), recorded_decodes(theirs.pipeline.vae)
    image = family.sample(model_of(family), vae, with_references(family, text, *given), negative, cfg, rng)
    channels, side = model.latents
    images = given[0] if name.startswith("flux1") else [*given]
    call = {"prompt": "a fox", "num_inference_steps": 4, "image": images, **model.call(guidance)}
    drawn = theirs.picture(rng.normal("sample", (channels, 64 // side, 96 // side))[0], 96, 64, call)
    torch.testing.assert_close(decoded[-1], expected[-1], atol=model.decoded[0], rtol=model.decoded[1])
    assert_same_picture(image, drawn)
    family.sample(model_of(family), vae, text, negative, cfg, rng)
    assert (decoded[-1] - decoded[-2]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("flux1 kontext", 1),
        ("flux2 klein-4b", 1),
        ("flux2 dev", 2),
        ("qwen_image qwen-image-edit-2511", 2),
        ("qwen_image_21 qwen-image-2.1", 2),
    ],
)
def test_loss_with_references_is_the_error_of_the_velocity_of_the_noisy_tokens_alone(
    name: str, count: int, cache: Path
) -> None:
    model = MODELS[name]
    family = made_for_references(model, cache)
    (item,) = examples(family, 1)
    item = with_references(family, item | prompt_of(family, "a fox", *GIVEN[:count]), *GIVEN[:count])
    loss = family.loss(model_of(family), batch_of(family, [item]), SampleRng(5, [8]))
    text = {key: tensor for key, tensor in item.items() if key != "latents"}
    expected = reference(family, model).loss(item["latents"], text, Draws(5, 8))
    assert loss.total.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "argument", "size", "levels"),
    [
        # Shifted by e^0.5 at 256 tokens.
        # Shifted by 4.
        ("ernie_image ernie-image", "timestep", 32, [1000.0, 923.0769, 800.0, 571.42859]),
        ("flux1 dev", "timestep", 256, [1.0, 0.83182, 0.62246, 0.35466]),
        ("flux1 schnell", "timestep", 256, [1.0, 0.75, 0.5, 0.25]),
        ("flux3 flux3", "timestep", 32, [1.0, 0.95411, 0.87390, 0.69789]),
        # The time runs from noise to data: 1 - sigmoid of 9, at which logits end, then of 1.5 times 0.6745, 0 and
        # -0.6745 above ln(32 / 512).
        ("ideogram4 ideogram-4", "timestep", 32, [0.00012, 0.85332, 0.94118, 0.97778]),
        # Of an image of 256 tokens, as for FLUX.1; the line ends at 6400 tokens.
        ("krea2 raw", "timestep", 256, [1.0, 0.83182, 0.62246, 0.35466]),
        # 0.35466 at the end of four steps is stretched to the terminal level, 0.02; a single step has none.
        ("qwen_image qwen-image", "timestep", 256, [1.0, 0.74461, 0.42667, 0.02]),
        ("qwen_image qwen-image", "timestep", 256, [1.0]),
        # 256 tokens of 16 pixels a side: the line 0.5 to 0.9 of the published scheduler/scheduler_config.json, which
        # ends at 8192 tokens, and its terminal level.
        ("qwen_image_21 qwen-image-2.1", "timestep", 256, [1.0, 0.74461, 0.42667, 0.02]),
        # The time runs from noise to data, shifted by 6, and of Turbo by 3.
        ("z_image z-image", "t", 32, [0.0, 0.05263, 0.14286, 0.33333]),
        ("z_image z-image-turbo", "t", 32, [0.0, 0.1, 0.25, 0.5]),
    ],
)
def test_samples_are_drawn_at_the_published_noise_levels(
    name: str, argument: str, size: int, levels: list[float], cache: Path
) -> None:
    found = sampled_times(MODELS[name].make(cache), argument, size, len(levels))
    assert found == pytest.approx(levels, abs=1e-5)


# Loss


@pytest.mark.parametrize(
    ("name", "objective"),
    [*((name, {}) for name in MODELS), *((name, {"guidance": 3.5}) for name in ("flux1 dev", "flux2 dev"))],
)
def test_loss_is_the_error_of_the_transformers_velocity_at_the_drawn_timestep(
    name: str, objective: Any, cache: Path
) -> None:
    model = MODELS[name]
    family = model.make(cache, objective=ObjectiveConfig(**objective))
    theirs, items = reference(family, model, **objective), examples(family, 2)
    loss = family.loss(model_of(family), batch_of(family, items), SampleRng(5, [8, 9]))
    texts = [{key: tensor for key, tensor in item.items() if key != "latents"} for item in items]
    expected = [theirs.loss(items[i]["latents"], texts[i], Draws(5, index)) for i, index in enumerate((8, 9))]
    assert loss.total.item() == pytest.approx(sum(expected), abs=1e-5)
    assert loss.weight.item() == 2


def test_timesteps_are_shifted_by_the_published_factor_or_by_that_of_the_config(one: Model, cache: Path) -> None:
    family = one.make(cache)
    theirs: FlowReference = reference(family, one)
    for num_tokens in (8, 64 * 64):
        assert shift_factor(family.objective, family.shift, num_tokens) == pytest.approx(theirs.shift(num_tokens))
    batch = batch_of(family, examples(family, 1))

    def loss(**objective: Any) -> float:
        made = one.make(cache, objective=ObjectiveConfig(**objective))
        return float(made.loss(model_of(made), batch, SampleRng(0, [0])).total)

    assert loss(shift="constant", shift_factor=theirs.shift(8)) == pytest.approx(loss(), rel=1e-6)
    assert abs(loss(shift="constant", shift_factor=theirs.shift(8) + 1) - loss()) > 1e-4


def test_every_weight_gets_a_gradient_but_those_that_are_never_trained(model: Model, cache: Path) -> None:
    family = model.make(cache)
    module = model_of(family).requires_grad_(True)
    family.loss(module, batch_of(family, examples(family, 1)), SampleRng(0, [0])).total.backward()
    weights = dict(module["transformer"].named_parameters())
    silent = [name for name, weight in weights.items() if weight.grad is None or not weight.grad.abs().sum() > 0]
    assert silent == [name for name in weights if any(re.fullmatch(p, name) for p in family.never_trained)]
    assert len(silent) == model.silent


@pytest.mark.parametrize(
    "name",
    [
        "chroma chroma1",
        "ernie_image ernie-image",
        "ideogram4 ideogram-4",
        "krea2 raw",
        "qwen_image qwen-image",
        "qwen_image_21 qwen-image-2.1",
        "z_image z-image",
    ],
)
def test_captions_of_any_length_share_a_batch_and_cost_what_they_cost_alone(name: str, cache: Path) -> None:
    assert_captions_of_any_length_share_a_batch(MODELS[name].make(cache))


def test_examples_share_a_batch_where_their_references_are_of_equal_sizes_in_equal_order(cache: Path) -> None:
    family = MODELS["flux2 klein-4b"].make(cache)
    (item,) = examples(family, 1)
    given = [(), GIVEN[:1], GIVEN, GIVEN[::-1]]
    assert [family.batch_key(with_references(family, item, *images)) for images in given] == [
        (2, 4, 48),
        (2, 4, 48, (6, 4)),
        (2, 4, 48, (6, 4), (4, 6)),
        (2, 4, 48, (4, 6), (6, 4)),
    ]


# Model


def test_adapters_change_all_linear_layers_of_the_blocks_but_their_modulation(model: Model, cache: Path) -> None:
    family = model.make(cache)
    modules = dict(family.build("transformer").named_modules())
    blocks = tuple(f"{name}." for name, module in modules.items() if type(module).__name__ in family.shard.blocks)
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    adapted = {name for name in linear if family.is_target(f"transformer.{name}")}
    assert all(name.startswith(blocks) for name in adapted)
    left = [name for name in linear if name.startswith(blocks) and name not in adapted]
    pattern, count = model.unadapted
    assert left == [name for name in linear if name.startswith(blocks) and re.fullmatch(pattern, name)]
    assert len(left) == count


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("ernie_image ernie-image", ErnieImageTransformer2DModel),
        ("flux2 dev", Flux2Transformer2DModel),
        ("flux2 klein-4b", Flux2Transformer2DModel),
        ("flux3 flux3", Flux3Transformer2DModel),
        ("krea2 raw", Krea2Transformer2DModel),
        ("qwen_image qwen-image", QwenImageTransformer2DModel),
        ("qwen_image_21 qwen-image-2.1", QwenImage21Transformer2DModel),
        ("sd3 sd3-medium", SD3Transformer2DModel),
        ("sd3 sd35-medium", SD3Transformer2DModel),
        ("z_image z-image", ZImageTransformer2DModel),
    ],
)
def test_a_single_file_by_the_layout_is_read_by_diffusers_as_the_same_weights(
    name: str, network: Any, cache: Path, tmp_path: Path
) -> None:
    """FLUX.1's converter takes only its published width (test_flux1.py)."""
    assert_diffusers_reads_the_layout(MODELS[name].make(cache), network, tmp_path)


def test_a_single_file_in_the_original_layout_is_the_same_model(one: Model, cache: Path, tmp_path: Path) -> None:
    assert_original_file_is_read(one.make(cache), tmp_path)


def test_the_fingerprint_follows_the_encoders_and_their_use_but_not_the_transformer_or_the_place(
    one: Model, cache: Path, copied: Path
) -> None:
    name = one.name.split()[0]

    def fingerprint(**options: Any) -> str:
        return str(make(name, cache, str(copied), **options).fingerprint())

    first = fingerprint()
    (copied / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"other")
    copied.symlink_to(copied.rename(copied.with_name("moved")))
    assert fingerprint() == first
    uses: dict[str, Json] = {"flux2": {"text_layers": (1, 2, 4)}, "flux3": {"text_layers": (2, 1)}}
    uses["sd3"] = {"without": ("text_encoder_3",)}
    found = [first, fingerprint(max_tokens=72), *([fingerprint(**uses[name])] if name in uses else ())]
    unread = ("transformer", "unconditional_transformer", "scheduler")
    folders = [path for path in sorted(copied.iterdir()) if path.is_dir() and path.name not in unread]
    assert len(folders) >= 3
    for folder in folders:
        config = next(folder.glob("*config.json"))
        config.write_text(config.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        found.append(fingerprint())
    assert len({*found}) == len(found)


# Errors


def test_a_model_of_another_family_is_refused(one: Model, cache: Path, copied: Path) -> None:
    edit_json(copied / "transformer" / "config.json", _class_name="OtherTransformer2DModel")
    family = one.name.split()[0]
    assert refusal(family, cache, str(copied)) == (
        f"model.path {copied}: transformer/config.json describes a OtherTransformer2DModel, "
        f"not a {families.get(family).model_files['transformer/config.json'][1]}; "
        "set model.family to the family of that model"
    )


HAS = {
    "chroma chroma1": ("chroma1", "19 + 38 blocks", "1 + 2 blocks"),
    "ernie_image ernie-image": ("ernie-image", "36 blocks of width 4096", "2 blocks of width 64"),
    "flux1 dev": ("schnell", "19 + 38 blocks without guidance embedding", "1 + 2 blocks with guidance embedding"),
    "flux2 dev": ("klein-4b", "5 + 20 blocks without guidance embedding", "1 + 2 blocks with guidance embedding"),
    "flux3 flux3": ("flux3", "5 + 28 blocks of 24 heads", "1 + 2 blocks of 2 heads"),
    "ideogram4 ideogram-4": ("ideogram-4", "34 blocks of 18 heads", "2 blocks of 4 heads"),
    "krea2 raw": ("raw", "28 blocks of 48 heads", "2 blocks of 4 heads"),
    "qwen_image qwen-image": ("qwen-image", "60 blocks of 24 heads", "2 blocks of 2 heads"),
    "qwen_image_21 qwen-image-2.1": ("qwen-image-2.1", "32 blocks of 32 heads", "2 blocks of 2 heads"),
    "sd3 sd3-medium": (
        "sd35-large",
        "38 blocks, 0 of them with two attentions, with query-key norm",
        "2 blocks, 0 of them with two attentions, without query-key norm",
    ),
    "z_image z-image": ("z-image-turbo", "30 + 2 x 2 blocks of width 3840", "2 + 2 x 1 blocks of width 24"),
}
"""{model: (another architecture, its sizes, the model's own)}."""


def test_an_architecture_that_the_folder_does_not_hold_is_refused(one: Model, cache: Path, copied: Path) -> None:
    other, wanted, found = HAS[one.name]
    assert refusal(one.name.split()[0], cache, str(copied), architecture=other) == (
        f"model.options.architecture: {other} has {wanted}, but {copied} has {found}; "
        f"leave it empty or set model.path to {other}"
    )


FILES = ("vae/config.json", "text_encoder/config.json", "tokenizer/tokenizer_config.json")
TWO = (*FILES, "text_encoder_2/config.json", "tokenizer_2/tokenizer_config.json")
SCHEDULER = "scheduler/scheduler_config.json"
READ = {
    "chroma chroma1": (*FILES, SCHEDULER),
    "ernie_image ernie-image": (*FILES, SCHEDULER),
    "flux1 dev": (*TWO, SCHEDULER),
    "flux2 dev": (*FILES, SCHEDULER),
    "flux3 flux3": FILES,
    "ideogram4 ideogram-4": (*FILES, SCHEDULER, "unconditional_transformer/config.json"),
    "krea2 raw": (*FILES, SCHEDULER, "model_index.json"),
    "qwen_image qwen-image": (*FILES, SCHEDULER),
    "qwen_image_21 qwen-image-2.1": (*FILES[:2], "processor/tokenizer_config.json", SCHEDULER),
    "sd3 sd3-medium": (*TWO, "text_encoder_3/config.json", "tokenizer_3/tokenizer_config.json", SCHEDULER),
    "z_image z-image": (*FILES, SCHEDULER),
}
"""The files that are read at the start of a run, in addition to the transformer's config."""


def test_a_folder_that_lacks_a_file_is_refused_before_anything_is_loaded(one: Model, cache: Path, copied: Path) -> None:
    for name in READ[one.name]:
        content = (copied / name).read_bytes()
        (copied / name).unlink()
        assert refusal(one.name.split()[0], cache, str(copied)) == (
            f"model.path {copied}: no {name}; expected a diffusers folder. Download it or set model.path: tiny"
        )
        (copied / name).write_bytes(content)
    make(one.name.split()[0], cache, str(copied))


KINDS = {
    "chroma chroma1": {"text_encoder": "t5"},
    "ernie_image ernie-image": {"text_encoder": "mistral"},
    "flux1 dev": {"text_encoder": "clip_text_model", "text_encoder_2": "t5"},
    "flux2 dev": {"text_encoder": "mistral or qwen3"},
    "flux3 flux3": {"text_encoder": "qwen3_vl"},
    "ideogram4 ideogram-4": {"text_encoder": "qwen3_vl"},
    "krea2 raw": {"text_encoder": "qwen3_vl"},
    "qwen_image qwen-image": {"text_encoder": "qwen2_5_vl"},
    "qwen_image_21 qwen-image-2.1": {"text_encoder": "qwen3_vl"},
    "sd3 sd3-medium": {"text_encoder": "clip_text_model", "text_encoder_2": "clip_text_model", "text_encoder_3": "t5"},
    "z_image z-image": {"text_encoder": "qwen3"},
}


def test_a_text_encoder_of_another_kind_is_refused(one: Model, cache: Path, copied: Path) -> None:
    for component, expected in KINDS[one.name].items():
        file = copied / component / "config.json"
        content = file.read_bytes()
        file.write_text('{"model_type": "other"}', encoding="utf-8")
        assert refusal(one.name.split()[0], cache, str(copied)) == (
            f"model.path {copied}: {component}/config.json describes a other text encoder, expected {expected}; "
            "download the folder again"
        )
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("one", "file", "changes", "message"),
    [
        (
            "ernie_image ernie-image",
            "vae/config.json",
            {"latent_channels": 8},
            "the transformer reads 16 latent channels and 32 text features, but vae and text_encoder give 32 and 32; "
            "download the folder again",
        ),
        (
            "flux1 dev",
            "transformer/config.json",
            {"in_channels": 96},
            "the transformer reads 96 channels, the autoencoder gives 16; only dev, Kontext and schnell are trained",
        ),
        (
            "qwen_image qwen-image",
            "transformer/config.json",
            {"use_additional_t_cond": True},
            "a QwenImagePipeline whose transformer also reads other images or layers is not trained; use "
            "Qwen/Qwen-Image, or to edit images Qwen/Qwen-Image-Edit-2509 or Qwen/Qwen-Image-Edit-2511",
        ),
        (
            "qwen_image qwen-image",
            "model_index.json",
            {"_class_name": "QwenImageEditPipeline"},
            "a QwenImageEditPipeline whose transformer also reads other images or layers is not trained; use "
            "Qwen/Qwen-Image, or to edit images Qwen/Qwen-Image-Edit-2509 or Qwen/Qwen-Image-Edit-2511",
        ),
        (
            "qwen_image qwen-image",
            "vae/config.json",
            {"z_dim": 8},
            "the transformer reads 16 latent channels and 32 text features, but vae and text_encoder give 32 and 32; "
            "download the folder again",
        ),
        (
            "ideogram4 ideogram-4",
            "text_encoder/config.json",
            {"text_config": {"model_type": "qwen3_vl_text", "hidden_size": 64, "num_hidden_layers": 4}},
            "the transformer reads 16 latent channels and 96 text features, but vae and text_encoder give 16 and 64; "
            "download the folder again",
        ),
        (
            "qwen_image_21 qwen-image-2.1",
            "transformer/config.json",
            {"causal_condition": False},
            "the transformer gives text the time of the noisy image, or joins latents to patches; only "
            "Qwen/Qwen-Image-2.1 is trained",
        ),
        (
            "qwen_image_21 qwen-image-2.1",
            "vae/config.json",
            {"z_dim": 16},
            "the transformer reads 8 latent channels and 32 text features, but vae and text_encoder give 16 and 32; "
            "download the folder again",
        ),
        (
            "krea2 raw",
            "model_index.json",
            {"text_encoder_select_layers": [1, 4]},
            "model_index.json has text_encoder_select_layers [1, 4], but the transformer reads 2 hidden states, and "
            "the text encoder has 0 to 3; download the folder again",
        ),
        (
            "krea2 raw",
            "model_index.json",
            {"text_encoder_select_layers": "1, 2"},
            "model_index.json has text_encoder_select_layers 1, 2, but the transformer reads 2 hidden states, and "
            "the text encoder has 0 to 3; download the folder again",
        ),
        (
            "krea2 raw",
            "text_encoder/config.json",
            {"text_config": {"model_type": "qwen3_vl_text", "hidden_size": 64, "num_hidden_layers": 3}},
            "the transformer reads 16 latent channels and 32 text features, but vae and text_encoder give 16 and 64; "
            "download the folder again",
        ),
        (
            "z_image z-image",
            "transformer/config.json",
            {"siglip_feat_dim": 32},
            "the transformer reads SigLIP features of other images; "
            "only text-to-image models are trained, use Z-Image or Z-Image-Turbo",
        ),
        (
            "z_image z-image",
            "text_encoder/config.json",
            {"hidden_size": 64},
            "the transformer reads 4 latent channels and 32 text features, but vae and text_encoder give 4 and 64; "
            "download the folder again",
        ),
        (
            "flux3 flux3",
            "transformer/config.json",
            {"flow_map": True},
            "the transformer is step-distilled (flow_map); train the model it was made from, "
            "black-forest-labs/flux-3-image-klein-base",
        ),
    ],
    indirect=["one"],
)
def test_a_model_that_reads_more_than_text_or_whose_parts_do_not_fit_is_refused(
    one: Model, cache: Path, copied: Path, file: str, changes: Json, message: str
) -> None:
    edit_json(copied / file, **changes)
    assert refusal(one.name.split()[0], cache, str(copied)) == f"model.path {copied}: {message}"


@pytest.mark.parametrize(
    ("one", "layers", "depth"),
    [("flux2 dev", (9, 18, 27), 4), ("flux3 flux3", (4, 8), 3)],
    indirect=["one"],
)
def test_text_layers_beyond_the_encoder_are_refused(
    one: Model, layers: tuple[int, ...], depth: int, cache: Path, copied: Path
) -> None:
    assert refusal(one.name.split()[0], cache, str(copied), text_layers=layers) == (
        f"model.options.text_layers: {[*layers]} is not within 0 to {depth}, the hidden states of {copied}/text_encoder"
    )


@pytest.mark.parametrize(
    ("family", "layers", "message"),
    [
        ("flux2", (1, 2), "[1, 2] gives 2 x 32 = 64 features per token, but the transformer reads 96; name 3"),
        ("flux3", (1,), "[1] gives 1 x 32 = 32 features per token, but the transformer reads 64; name 2"),
    ],
)
def test_text_layers_that_do_not_fill_the_transformers_input_are_refused(
    family: str, layers: tuple[int, ...], message: str, cache: Path
) -> None:
    assert refusal(family, cache, text_layers=layers) == f"model.options.text_layers: {message} hidden states"


@pytest.mark.parametrize(("family", "architecture"), [("flux1", "schnell"), ("flux2", "klein-4b")])
def test_guidance_in_training_is_refused_for_a_model_that_does_not_embed_it(
    family: str, architecture: str, cache: Path
) -> None:
    message = refusal(family, cache, architecture=architecture, objective=ObjectiveConfig(guidance=3.5))
    assert message.startswith(
        "objective.guidance: is not used by this kind of model; leave it out. It reads objective.density, "
    )
