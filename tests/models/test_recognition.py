"""A folder counts as a model of a family only when its configs are those that the family's loader wants."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.config import families
from trainer.config.load import load_config_text
from trainer.config.sections import DEMO, ModelConfig, ObjectiveConfig, demo_families
from trainer.launcher import preflight
from trainer.models import families as kinds
from trainer.models.recognition import refused
from trainer.system.errors import InputError
from trainer.weights.forms import READ

IMAGES = [name for name in kinds.names() if kinds.get(name).trains_on == "images"]


def reasons(**model: str | None) -> list[str]:
    return [f"{problem.field}: {problem.message}" for problem in refused(ModelConfig(**model))]


@pytest.mark.parametrize("family", kinds.names())
def test_a_folder_with_some_config_is_no_model_of_the_family_for_the_same_reason_as_when_it_is_loaded(
    family: str, tmp_path: Path
):
    (tmp_path / "model.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    [reason] = reasons(family=family, path=str(tmp_path))
    assert " no " in reason and "; expected " in reason
    with pytest.raises(InputError) as loading:
        kinds.get(family)(ModelConfig(family=family, path=str(tmp_path)), ObjectiveConfig(), tmp_path / "cache")
    assert reason.split(": no ")[-1].partition(";")[0] in str(loading.value) or "config.json" in str(loading.value)


@pytest.mark.parametrize("family", kinds.names())
def test_the_familys_own_folder_is_recognized_in_a_millisecond(family: str, tmp_path: Path):
    made = kinds.get(family)(ModelConfig(family=family, path="tiny"), ObjectiveConfig(), tmp_path)
    model = ModelConfig(family=family, path=str(made.folder))
    began = time.perf_counter()
    for _ in range(20):
        assert not list(refused(model))
    assert (time.perf_counter() - began) / 20 < 0.005
    assert preflight.has_model(model)
    other = next(name for name in IMAGES if name != family)
    assert not preflight.has_model(ModelConfig(family=other, path=str(made.folder)))


@pytest.mark.parametrize("family", demo_families())
def test_the_demo_models_are_recognized(family: str):
    assert not reasons(family=family, path=str(DEMO / family))


def test_a_folder_of_another_family_is_refused_by_the_preflight_with_the_class_that_it_has(tmp_path: Path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"_class_name": "PixArtTransformer2DModel"}))
    family = next(name for name in IMAGES if families.of(name).model_files.get("transformer/config.json", ("", ""))[1])
    text = f"model: {{family: {family}, path: {tmp_path}}}\ndata: {{path: {tmp_path}}}\n"
    with pytest.raises(InputError, match=r"transformer/config\.json describes a PixArtTransformer2DModel, not a "):
        preflight.check_machine(load_config_text(text, (), tmp_path / "run.yaml"))


def test_weights_in_a_form_that_is_not_read_are_refused_by_the_preflight(tmp_path: Path):
    family = IMAGES[-1]
    base = kinds.get(family)(ModelConfig(family=family, path="tiny"), ObjectiveConfig(), tmp_path / "cache").folder
    file = tmp_path / "single.safetensors"
    save_file({"a.weight": torch.zeros(2, 2).byte(), "a.weight_scale_2": torch.ones(1)}, file)
    text = f"model: {{family: {family}, path: {file}, base: {base}}}\ndata: {{path: {tmp_path}}}\n"
    with pytest.raises(InputError) as caught:
        preflight.check_machine(load_config_text(text, (), tmp_path / "run.yaml"))
    assert f"model.path: {file}: 'a.weight_scale_2' is stored as nvfp4, which is not read; {READ}" in str(caught.value)


@pytest.mark.parametrize("damage", ["", "[", "[]", '{"_class_name": 5}', "[" * 100_000, "\udc80"])
def test_a_damaged_config_is_refused_or_left_to_the_loader_which_names_it(damage: str, tmp_path: Path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_bytes(damage.encode(errors="surrogateescape"))
    family = next(name for name in IMAGES if families.of(name).model_files.get("transformer/config.json", ("", ""))[1])
    assert all("transformer/config.json" in reason for reason in reasons(family=family, path=str(tmp_path)))


def test_a_single_file_needs_a_folder_and_that_one_is_looked_at(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    [reason] = reasons(family=IMAGES[-1], path=str(file))
    assert reason.startswith(
        f"model.path: {file}: a single .safetensors or .sft file holds neither configs nor tokenizers; set model.base"
    )
    [reason] = reasons(family=IMAGES[-1], path=str(file), base=str(tmp_path))
    assert reason.startswith(f"model.base: {tmp_path}: no ")


@pytest.mark.parametrize("family", [IMAGES[-1], "causal_lm"])
@pytest.mark.parametrize("suffix", [".gguf", ".ckpt", ".pt", ".bin"])
def test_a_single_file_of_another_format_is_refused_with_those_that_are_read(suffix: str, family: str, tmp_path: Path):
    file = tmp_path / f"model{suffix}"
    file.write_bytes(b"")
    for base in (None, str(tmp_path)):
        reason = "only .safetensors and .sft are read as single files; convert it, or name a folder"
        expected = f"GGUF is not read; {READ}" if suffix == ".gguf" else reason
        assert reasons(family=family, path=str(file), base=base) == [f"model.path: {file}: {expected}"]


def test_a_file_in_place_of_the_base_folder_is_refused(tmp_path: Path):
    for name in ("model.sft", "other.sft"):
        (tmp_path / name).write_bytes(b"")
    file, base = (str(tmp_path / name) for name in ("model.sft", "other.sft"))
    assert reasons(family=IMAGES[-1], path=file, base=base) == [
        f"model.base: {base}: a file; name the diffusers folder that model.path was made from"
    ]
    [reason] = reasons(family=IMAGES[-1], path=file)
    assert reason.startswith(f"model.path: {file}: a single .safetensors or .sft file holds neither configs nor ")
