"""A distilled model is known by its folder or the config, and a user is warned before it is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import alone, make_pictures, make_run, run_config, train
from trainer.config.load import load_config
from trainer.config.sections import ModelConfig, SampleConfig
from trainer.launcher import preflight
from trainer.models import distilled, families
from trainer.run.events import StepEvent, WarningEvent
from trainer.system.errors import InputError

KLEIN = {
    "model_index.json": {"_class_name": "Flux2KleinPipeline"},
    "transformer/config.json": {"_class_name": "Flux2Transformer2DModel", "guidance_embeds": False},
}
DISTILLED = KLEIN | {"model_index.json": {"_class_name": "Flux2KleinPipeline", "is_distilled": True}}
BASE = KLEIN | {"model_index.json": {"_class_name": "Flux2KleinPipeline", "is_distilled": False}}
Z_IMAGE = "scheduler/scheduler_config.json"
SDXL = {"unet/config.json": {"sample_size": 128}, "scheduler/scheduler_config.json": {"timestep_spacing": "leading"}}
TURBO = {"unet/config.json": {"sample_size": 64}, "scheduler/scheduler_config.json": {"timestep_spacing": "trailing"}}
HUB = "models--stabilityai--stable-diffusion-3.5-large-turbo/snapshots/0123"


def folder_of(path: Path, files: dict[str, dict[str, Any]]) -> Path:
    """A folder with these JSON files."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("family", "name", "files", "base"),
    [
        ("flux2", "any", DISTILLED, "black-forest-labs/FLUX.2-klein-base-4B"),
        ("flux2", "any", KLEIN, None),
        ("flux2", "FLUX.2-klein-4B", BASE, None),
        ("flux2", "FLUX.2-klein-4B", {}, "black-forest-labs/FLUX.2-klein-base-4B"),
        ("flux1", "any", {"transformer/config.json": {"guidance_embeds": False}}, "black-forest-labs/FLUX.1-dev"),
        ("flux1", "any", {"transformer/config.json": {"guidance_embeds": True}}, None),
        ("flux1", "any", {}, None),
        ("z_image", "any", {Z_IMAGE: {"shift": 3.0}}, "Tongyi-MAI/Z-Image"),
        ("z_image", "any", {Z_IMAGE: {"shift": 6.0}}, None),
        ("z_image", "Z-Image-Turbo", {Z_IMAGE: {"shift": 6.0}}, "Tongyi-MAI/Z-Image"),
        ("z_image", "any", {"model_index.json": {"_name_or_path": "Tongyi-MAI/Z-Image-Turbo"}}, "Tongyi-MAI/Z-Image"),
        ("sd3", HUB, {"model_index.json": {}}, "stabilityai/stable-diffusion-3.5-large"),
        ("sd3", "stable-diffusion-3.5-large", {"model_index.json": {}}, None),
        ("sdxl", "any", TURBO, "stabilityai/stable-diffusion-xl-base-1.0"),
        ("sdxl", "any", SDXL, None),
        ("sdxl", "any", TURBO | {"unet/config.json": {"sample_size": 128}}, None),
        ("krea2", "any", {"model_index.json": {"is_distilled": True}}, "krea/Krea-2-Raw"),
        ("krea2", "any", {"model_index.json": {"is_distilled": False}}, None),
        ("krea2", "Krea-2-Raw", {}, None),
        ("flux3", "any", DISTILLED, None),
        ("causal_lm", "any", DISTILLED, None),
    ],
)
def test_the_folder_says_whether_a_model_is_distilled(
    family: str, name: str, files: dict[str, Any], base: str | None, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / name, files)
    found = distilled.matches(ModelConfig(family=family, path=str(folder)))
    assert (found[0].base if found else None) == base


def test_the_folder_counts_more_than_the_architecture_of_the_base_that_a_preset_names(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "any", {Z_IMAGE: {"shift": 3.0}})
    model = {"family": "z_image", "path": str(folder), "options": {"architecture": "z-image"}}
    assert len(distilled.matches(ModelConfig.model_validate(model))) == 1


@pytest.mark.parametrize(
    ("model", "steps", "guidance"),
    [
        ({"family": "flux2"}, 28, 4.0),
        ({"family": "flux2", "options": {"distilled": True}}, 4, 1.0),
        ({"family": "flux1", "options": {"architecture": "schnell"}}, 4, 1.0),
        ({"family": "flux1", "options": {"architecture": "schnell", "distilled": False}}, 28, 4.0),
        ({"family": "z_image", "options": {"architecture": "z-image-turbo"}}, 8, 1.0),
        ({"family": "z_image", "options": {"architecture": "z-image"}}, 28, 4.0),
        ({"family": "z_image", "path": "Tongyi-MAI/Z-Image-Turbo"}, 8, 1.0),
        ({"family": "sdxl", "path": "sdxl_lightning_4step_unet.safetensors", "base": "some/base"}, 4, 1.0),
        ({"family": "sdxl", "path": "other.safetensors", "base": "some/base"}, 28, 4.0),
        ({"family": "qwen_image", "options": {"distilled": True}}, 8, 1.0),
        ({"family": "ernie_image", "path": "baidu/ERNIE-Image-Turbo"}, 8, 1.0),
        ({"family": "ernie_image", "path": "ernie-image-turbo.safetensors", "base": "baidu/ERNIE-Image"}, 8, 1.0),
        ({"family": "ernie_image", "path": "baidu/ERNIE-Image"}, 28, 4.0),
        ({"family": "krea2", "path": "krea/Krea-2-Turbo"}, 8, 1.0),
        ({"family": "krea2", "path": "krea2_turbo_bf16.safetensors", "base": "krea/Krea-2-Raw"}, 8, 1.0),
        ({"family": "krea2", "path": "krea/Krea-2-Raw"}, 28, 4.0),
        ({"family": "bagel"}, 28, 4.0),
    ],
)
def test_empty_steps_and_guidance_are_the_models_own(model: dict[str, Any], steps: int, guidance: float) -> None:
    drawn = distilled.complete_sample(ModelConfig.model_validate(model), SampleConfig())
    assert (drawn.steps, drawn.guidance) == (steps, guidance)


def test_a_distilled_model_takes_given_steps_but_no_guidance() -> None:
    model = ModelConfig.model_validate({"family": "flux2", "options": {"distilled": True}})
    drawn = distilled.complete_sample(model, SampleConfig(steps=28, guidance=4.0, seed=7))
    assert (drawn.steps, drawn.guidance, drawn.seed) == (28, 1.0, 7)


@pytest.mark.parametrize(
    ("files", "model", "message"),
    [
        (
            BASE,
            {"distilled": True},
            "true, but {folder}/model_index.json says the opposite; leave it empty, or correct that file",
        ),
        (
            DISTILLED,
            {"distilled": False},
            "false, but {folder}/model_index.json says the opposite; leave it empty, or correct that file",
        ),
        (
            {"model_index.json": {}, "transformer/config.json": {"guidance_embeds": True}},
            {"distilled": True},
            "true, but this model has a guidance embedding: it is sampled with one call per step at sample.guidance; "
            "leave it empty, and set sample.steps",
        ),
        (KLEIN, {"distilled": True}, None),
        (DISTILLED, {"distilled": True}, None),
        (BASE, {"distilled": False}, None),
    ],
)
def test_a_contradiction_of_config_and_folder_is_refused_before_anything_starts(
    files: dict[str, Any], model: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "model", files)
    problems = list(
        distilled.refused(ModelConfig.model_validate({"family": "flux2", "path": str(folder), "options": model}))
    )
    assert [str(p) for p in problems] == (
        [f"model.options.distilled: {message.format(folder=folder)}"] if message else []
    )


def test_a_distilled_option_for_an_architecture_that_is_not_is_refused(tmp_path: Path) -> None:
    options = {"architecture": "z-image", "distilled": True}
    with pytest.raises(InputError) as error:
        families.make(run_config(tmp_path, model__family="z_image", model__options=options), tmp_path)
    assert str(error.value) == (
        "model.options.distilled: true, but z-image is not distilled; leave it empty, or name z-image-turbo"
    )


def test_a_single_file_may_be_another_model_than_its_base_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "base", BASE)
    model = {"family": "flux2", "path": "a.safetensors", "base": str(folder), "options": {"distilled": True}}
    config = ModelConfig.model_validate(model)
    assert list(distilled.refused(config)) == []
    assert len(distilled.matches(config)) == 2


def test_a_wrong_option_is_named_with_its_line_by_what_checks_a_run(tmp_path: Path) -> None:
    folder, pictures = folder_of(tmp_path / "model", BASE), make_pictures(tmp_path / "data", 2)
    preset = tmp_path / "run.yaml"
    preset.write_text(
        f"model:\n  family: flux2\n  path: {folder}\n  options:\n    distilled: true\ndata: {{path: {pictures}}}\n"
    )
    with pytest.raises(InputError) as error:
        preflight.check(load_config(preset))
    assert str(error.value) == (
        f"{preset}:5: model.options.distilled: true, but {folder}/model_index.json says the opposite; "
        "leave it empty, or correct that file"
    )


SENTENCE = (
    "model.path {path}: the model was distilled to generate in 4 steps without guidance, and training undoes that: "
    "images in few steps become blurred. Train black-forest-labs/FLUX.2-klein-base-4B or "
    "black-forest-labs/FLUX.2-klein-base-9B instead, and use the adapter with this model"
)
OTHERWISE = "; if it is not distilled, set model.options.distilled: false"
UNUSED = "sample.guidance: 4.0 is not used: a distilled model is sampled without guidance"


def test_a_run_of_a_distilled_model_warns_once_before_training(tmp_path: Path) -> None:
    sample = {"every": 100, "prompts": ["a fox"], "size": (32, 32), "guidance": 4.0}
    options = {"distilled": True}
    pictures = make_pictures(tmp_path / "pictures", 2)
    cfg = run_config(pictures, model__options=options, sample=sample, train__steps=1)
    events = train(alone(), cfg, make_run(tmp_path, cfg, "run")).events
    warnings = [event for event in events if isinstance(event, WarningEvent)]
    assert [warning.message for warning in warnings] == [SENTENCE.format(path="tiny"), UNUSED]
    first_step = next(event for event in events if isinstance(event, StepEvent))
    assert events.index(warnings[-1]) < events.index(first_step)


@pytest.mark.parametrize(
    ("files", "changes", "sentences"),
    [
        (DISTILLED, {}, [SENTENCE + OTHERWISE]),
        (DISTILLED, {"sample__prompts": ["a fox"], "sample__guidance": 1.0}, [SENTENCE + OTHERWISE]),
        (DISTILLED, {"sample__prompts": ["a fox"], "sample__guidance": 4.0}, [SENTENCE + OTHERWISE, UNUSED]),
        (
            DISTILLED,
            {"sample__prompts": ["a fox"], "sample__negative": "grey"},
            [SENTENCE + OTHERWISE, "sample.negative is not used: a distilled model is sampled without guidance"],
        ),
        (BASE, {"sample__prompts": ["a fox"], "sample__guidance": 4.0}, []),
    ],
)
def test_warnings_name_the_model_to_train_instead_and_what_is_not_used(
    files: dict[str, Any], changes: dict[str, Any], sentences: list[str], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "model", files)
    found = distilled.warnings(run_config(tmp_path, model__path=str(folder), **changes))
    assert list(found) == [sentence.format(path=folder) for sentence in sentences]
