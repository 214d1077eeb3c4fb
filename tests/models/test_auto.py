"""Families that are concluded of a folder do what diffusers' pipeline of it does, or refuse it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import auto_folders
from tests.models.common import (
    batch_of,
    edit_json,
    examples,
    load,
    make,
    model_of,
    picture,
    recorded_decodes,
    refusal,
)
from tests.runs import alone, make_pictures, make_run, run_config, train
from trainer.config.schema import RunConfig
from trainer.config.sections import ModelConfig, ObjectiveConfig, SampleConfig
from trainer.models import families
from trainer.models.observed_transformer import ObservedTransformer
from trainer.models.parts.image import family_file
from trainer.rng import SampleRng
from trainer.system.errors import InputError

GUIDED = {"AuraFlowPipeline", "BriaPipeline", "OvisImagePipeline"}
"""Those whose guided samples are of both predictions alone."""
KNOWN = GUIDED | {
    *("BriaFiboPipeline", "HunyuanImagePipeline", "LongCatImagePipeline", "Lumina2Pipeline"),
    *("LuminaPipeline", "NucleusMoEImagePipeline"),
}
REFUSED = {
    "CogView4Pipeline": "CogView4Pipeline gives a timestep that is not linear in the noise level",
    "CogView3PlusPipeline": "its scheduler is CogVideoXDDIMScheduler, not FlowMatchEulerDiscreteScheduler",
    # Its transformer reads tokens that a language model samples for each image.
    "GlmImagePipeline": "GlmImagePipeline cannot be run without weights: AttributeError: 'NoneType' object has no "
    "attribute 'shape'",
    "HiDreamImagePipeline": "HiDreamImagePipeline has latents of (4, 90, 180) for 256 x 128",
    "Kandinsky5T2IPipeline": "Kandinsky5T2IPipeline has latents of (4, 80, 176) for 256 x 128",
    "HunyuanDiTPipeline": "its scheduler is DDPMScheduler, not FlowMatchEulerDiscreteScheduler",
    "PRXPipeline": "PRXPipeline needs ftfy, which is not installed",
    "PixArtSigmaPipeline": "its scheduler is DPMSolverMultistepScheduler, not FlowMatchEulerDiscreteScheduler",
    "SanaPipeline": "its scheduler is DPMSolverMultistepScheduler, not FlowMatchEulerDiscreteScheduler",
}
PROMPT, NEGATIVE = "a red fox in the snow", "grey and blurred"
STEPS = 3


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny folder of a pipeline, written once."""

    return once(lambda name: auto_folders.write(name, tmp_path_factory.mktemp("auto") / name))


def pipeline_of(folder: Path) -> Any:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    for guider in ("guider", "ocr_guider"):  # which guides whatever it is asked
        if guider in pipeline.components:
            pipeline.register_modules(**{guider: None})
    return pipeline


class Given:
    """Random numbers of a sample that are given."""

    def __init__(self, noise: Tensor) -> None:
        self.noise = noise

    def normal(self, name: str, shape: torch.Size) -> Tensor:
        assert tuple(shape) == tuple(self.noise.shape)
        return self.noise[None]


def drawn(pipeline: Any, size: tuple[int, int], guidance: float) -> tuple[Tensor, Tensor]:
    """What diffusers' pipeline first gives its transformer, and what it decodes."""
    given: list[Tensor] = []
    forward = pipeline.transformer.forward

    def note(*args: Any, **kwargs: Any) -> Any:
        given.append(args[0] if args else kwargs["hidden_states"])
        return forward(*args, **kwargs)

    pipeline.transformer.forward = note
    decoded = recorded_decodes(pipeline.vae)
    arguments = {
        "width": size[0],
        "height": size[1],
        "num_inference_steps": STEPS,
        "generator": torch.Generator().manual_seed(3),
        "guidance_scale": guidance,
        "negative_prompt": NEGATIVE,
        "enable_prompt_rewrite": False,
    }
    accepted = inspect.signature(type(pipeline).__call__).parameters
    pipeline(PROMPT, **{key: value for key, value in arguments.items() if key in accepted})
    return given[0], decoded[0]


@pytest.mark.parametrize(
    ("name", "guidance", "size"),
    [*((name, 1.0, (128, 64)) for name in sorted(KNOWN)), *((name, 4.0, (64, 96)) for name in sorted(GUIDED))],
)
def test_a_sample_is_that_of_the_pipeline(
    name: str, guidance: float, size: tuple[int, int], folder_of: Callable[[str], Path], cache: Path
) -> None:
    family = make("auto", cache, str(folder_of(name)))
    vae, texts = family.image_encoder(load), family.text_encoder(load)
    pipeline = pipeline_of(folder_of(name))
    first, expected = drawn(pipeline, size, guidance)
    # The pipeline's noise where this family has it: whatever is in a wrong place shows in what is decoded.
    width, height = (side // family.autoencoder.pixels for side in size)
    noise = torch.empty(family.latent_channels, height, width)
    layout = family._observed.layout(family._size(noise))
    noise.view(-1)[layout.into] = first[:1].flatten()
    decoded = recorded_decodes(vae)
    negative = family.encode_text(texts, NEGATIVE) if guidance > 1 else None
    cfg = SampleConfig(size=size, steps=STEPS, guidance=guidance)
    family.sample(model_of(family), vae, family.encode_text(texts, PROMPT), negative, cfg, Given(noise))
    # Guidance multiplies the last bits of a time of 1000 sigma, which sinusoids see.
    torch.testing.assert_close(decoded[0], expected, atol=1e-5 if guidance == 1 else 5e-5, rtol=1e-5)
    assert (name in GUIDED) == family.conclusions.guides_plainly


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_an_image_is_encoded_to_what_the_pipeline_decodes_to_it(
    name: str, folder_of: Callable[[str], Path], cache: Path
) -> None:
    family = make("auto", cache, str(folder_of(name)))
    vae, image = family.image_encoder(load), picture(64, 96)
    latents = family.encode_image(vae, image)["latents"]
    decoded = recorded_decodes(vae)
    family.autoencoder.decode(vae, latents[None])
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 127.5 - 1
    frames = decoded[0].ndim == 5
    expected = vae.encode(pixels[:, :, None] if frames else pixels).latent_dist.mode()
    torch.testing.assert_close(decoded[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "sentence"), REFUSED.items())
def test_what_is_not_known_is_named(name: str, sentence: str, folder_of: Callable[[str], Path], cache: Path) -> None:
    folder = folder_of(name)
    assert refusal("auto", cache, str(folder)) == (
        f"model.family: auto cannot take {folder}: {sentence}. Such a model needs a family of its own, see "
        "trainer/RECIPES.md"
    )


def test_every_folder_is_taken_or_refused() -> None:
    assert KNOWN | REFUSED.keys() == auto_folders.FOLDERS.keys() and len(auto_folders.FOLDERS) >= 12


@pytest.mark.parametrize(("name", "options"), [("sd3 sd3-medium", {"max_tokens": 256}), ("qwen_image qwen-image", {})])
def test_the_loss_of_a_known_model_is_that_of_its_own_family(name: str, options: Any, cache: Path) -> None:
    class Concluded(ObservedTransformer):
        def refuse_known(self) -> None:
            return

    family, architecture = name.split()
    own = make(family, cache, architecture=architecture, **options)
    concluded = Concluded(ModelConfig(family="auto", path=str(own.folder)), ObjectiveConfig(), cache)
    losses = []
    for one in (own, concluded):
        loss = one.loss(model_of(one), batch_of(one, examples(one, 1)), SampleRng(5, [8]))
        losses.append(float(loss.total))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_model_that_a_family_knows_is_refused_by_the_familys_name(cache: Path) -> None:
    folder = make("chroma", cache).folder
    assert refusal("auto", cache, str(folder)) == (
        f"model.family: auto, but {folder} holds a ChromaTransformer2DModel, which chroma knows; "
        "set model.family: chroma"
    )


@pytest.mark.parametrize(
    ("part", "change", "sentence"),
    [
        ("model_index.json", {"_class_name": "FarPipeline"}, "the pipeline is FarPipeline, which this version of"),
        ("model_index.json", {"_class_name": "AutoencoderKL"}, "the pipeline is AutoencoderKL, which"),
        ("model_index.json", {"vae": ["my_code", "Vae"]}, "vae is my_code.Vae, code that the folder brings"),
        ("scheduler/scheduler_config.json", {"invert_sigmas": True}, "its scheduler counts noise levels upward"),
        ("scheduler/scheduler_config.json", {"shift": -1.0}, "its scheduler has a shift of -1.0"),
        ("text_encoder/config.json", {"d_model": "big"}, "AuraFlowPipeline cannot be made without weights"),
        ("transformer/config.json", {"attention_head_dim": "x"}, "AuraFlowPipeline cannot be made without weights"),
        ("model_index.json", {"vae": [None, None]}, "AuraFlowPipeline has no vae"),
        ("model_index.json", {"refiner": ["diffusers", "AutoencoderKL"]}, "AuraFlowPipeline also has refiner, a Auto"),
        ("vae/config.json", {"latent_channels": 8}, "AutoencoderKL encodes to (8, 16, 32), and decodes (4, 16, 32)"),
    ],
)
def test_a_folder_with_other_parts_is_refused(
    part: str, change: dict[str, Any], sentence: str, tmp_path: Path, cache: Path
) -> None:
    folder = auto_folders.write("AuraFlowPipeline", tmp_path / "model")
    edit_json(folder / part, **change)
    assert refusal("auto", cache, str(folder)).startswith(f"model.family: auto cannot take {folder}: {sentence}")


def test_dropped_captions_of_other_lengths_need_batches_of_one(folder_of: Callable[[str], Path], cache: Path) -> None:
    def sections(name: str, micro_batch: int) -> RunConfig:
        return RunConfig.model_validate(
            {
                "model": {"family": "auto", "path": str(folder_of(name))},
                "data": {"path": ".", "caption_dropout": 0.1},
                "train": {"micro_batch": micro_batch},
            }
        )

    families.make(sections("LongCatImagePipeline", 2), cache)  # which pads them
    families.make(sections("BriaFiboPipeline", 1), cache)
    with pytest.raises(InputError, match=r"data\.caption_dropout: 0\.1 needs train\.micro_batch: 1 here"):
        families.make(sections("BriaFiboPipeline", 2), cache)


def test_a_caption_without_a_mask_is_not_given_that_of_another(folder_of: Callable[[str], Path], cache: Path) -> None:
    """The pipeline leaves the mask out where a caption fills its length."""
    family = make("auto", cache, str(folder_of("NucleusMoEImagePipeline")))
    texts, model = family.text_encoder(load), model_of(family)
    masked = family.encode_text(texts, "a fox")
    given: list[Any] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        given.append(kwargs["encoder_hidden_states_mask"])

    model["transformer"].register_forward_pre_hook(note, with_kwargs=True)
    for text in (masked, {key: value for key, value in masked.items() if key != "text_1"}):
        item = {"latents": torch.zeros(4, 16, 16), **text}
        family.loss(model, batch_of(family, [item]), SampleRng(0, [0]))
    assert given[0] is not None and given[-1] is None
    assert family.batch_key({"latents": torch.zeros(4, 16, 16), **masked}) != family.batch_key(
        {"latents": torch.zeros(4, 16, 16), "text_0": masked["text_0"]}
    )


@pytest.mark.parametrize(("name", "origin"), [("none", "model"), ("mine", 'a"""\nimport os\n"""'), ("two", "a\\Nb")])
def test_a_written_family_is_a_module_whatever_the_folders_name(
    name: str, origin: str, folder_of: Callable[[str], Path], cache: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(family_file, "FOLDER", tmp_path)
    family = make("auto", cache, str(folder_of("AuraFlowPipeline")))
    code = compile(family_file.write_family(name, family.conclusions, origin).read_text(), "family", "exec")
    assert "os" not in code.co_names


def test_a_concluded_model_that_fails_its_certificate_is_not_trained(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    pictures = make_pictures(tmp_path / "pictures", 2)
    sample = {"every": 2, "prompts": ("a fox",), "size": (64, 64), "steps": 2}
    model = {"family": "auto", "path": str(folder_of("AuraFlowPipeline"))}
    cfg = run_config(pictures, model=model, sample=sample, train__steps=2)
    with pytest.raises(InputError, match=r"its certificate has a fault \(drawn, above\)"):
        train(alone(), cfg, make_run(tmp_path, cfg, "stopped"))
    cfg = run_config(pictures, model=model, train__steps=2)
    assert len(train(alone(), cfg, make_run(tmp_path, cfg, "blind")).losses) == 2
