"""Folders of language models as transformers loads them: exports and bases of adapters are compared with that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3ForConditionalGeneration

from tests.models.test_stored_names import small
from tests.runs import text_config
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.export.adapter import verify_base
from trainer.export.check import check_export
from trainer.models import families
from trainer.models.build import build_model
from trainer.models.parts.language import loaded
from trainer.models.state_dict import BaseWeights
from trainer.system.errors import InputError

KINDS = ["gemma2", "mixtral", "gpt2", pytest.param("gemma3", marks=pytest.mark.slow)]
COMPONENT = "language_model"


def saved(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    config = small(kind)
    model = Gemma3ForConditionalGeneration(config) if kind == "gemma3" else AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


def opened(folder: Path) -> Any:
    model = ModelConfig(family="causal_lm", path=str(folder))
    return families.get("causal_lm")(model, ObjectiveConfig(), folder.parent / "cache")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_for_attention_that_config_json_names_need_not_be_installed(tmp_path: Path, key: str) -> None:
    family = opened(saved(tmp_path / "model", "gpt2"))
    change(family.folder, **{key: "flash_attention_2"})
    family = opened(family.folder)
    verify_base(family, COMPONENT, BaseWeights(family))


def change(folder: Path, **values: Any) -> None:
    """Change config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_rows_are_no_longer_than_the_positions_whatever_the_config_calls_them(tmp_path: Path) -> None:
    assert opened(saved(tmp_path / "model", "gpt2")).longest == small("gpt2").n_positions


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_loads_is_what_is_trained(tmp_path: Path, kind: str) -> None:
    family = opened(saved(tmp_path / "model", kind))
    base, found = BaseWeights(family), family.loaded_by_users(COMPONENT, family.folder)
    assert found.keys() == base.shapes(COMPONENT).keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, base.tensor(COMPONENT, name))] == []
    verify_base(family, COMPONENT, base)


def test_a_base_with_other_numbers_is_found_out(tmp_path: Path) -> None:
    family = opened(saved(tmp_path / "model", "gemma2"))
    other = opened(saved(tmp_path / "other", "gemma2"))
    file = other.folder / "model.safetensors"
    stored = load_file(file)
    save_file({**stored, "model.norm.weight": stored["model.norm.weight"] + 1}, file)
    found = other.loaded_by_users(COMPONENT, other.folder)
    family.loaded_by_users = lambda component, folder: found
    with pytest.raises(RuntimeError, match=r"'model\.norm\.weight' differs from the trained tensor by"):
        verify_base(family, COMPONENT, BaseWeights(family))


def test_a_run_whose_adapter_would_be_for_another_base_is_refused_before_it_loads_a_weight(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "gemma2")
    cfg = text_config(tmp_path, model__path=str(folder), adapter={"type": "lora", "rank": 4})
    family = opened(folder)
    built = build_model(cfg, family)
    assert check_export(cfg, family, built.trainables) == ()
    change(folder, tie_word_embeddings=False)
    with pytest.raises(InputError) as caught:
        check_export(cfg, family, built.trainables)
    assert str(caught.value) == f"{folder}: transformers finds no 'lm_head.weight' in it and draws it anew"


@pytest.mark.parametrize("most_bytes", [loaded.MOST_BYTES, 0])
def test_what_transformers_draws_anew_or_does_not_tie_is_found_out_in_a_folder_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """Above the limit names, shapes and ties are looked at, and no number is loaded."""
    monkeypatch.setattr(loaded, "MOST_BYTES", most_bytes)
    family = opened(saved(tmp_path / "model", "gemma2"))
    assert bool(family.loaded_by_users(COMPONENT, family.folder)) == bool(most_bytes)
    folder = saved(tmp_path / "exported", "gemma2")
    change(folder, tie_word_embeddings=False)
    with pytest.raises(RuntimeError) as caught:
        family.loaded_by_users(COMPONENT, folder)
    assert str(caught.value) == f"{folder}: transformers finds no 'lm_head.weight' in it and draws it anew"
    change(folder, tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    head = stored["model.embed_tokens.weight"] + 1
    save_file({**stored, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError) as caught:
        family.loaded_by_users(COMPONENT, folder)
    assert str(caught.value).startswith(
        f"{folder}/model.safetensors: 'model.embed_tokens.weight' and 'lm_head.weight' hold other numbers, but by "
        "config.json they are one tensor (tie_word_embeddings)."
    )
    save_file(
        {**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    family.loaded_by_users(COMPONENT, folder)  # the head is stored besides


def test_a_base_that_transformers_cannot_load_is_refused_in_a_sentence(tmp_path: Path) -> None:
    family = opened(saved(tmp_path / "model", "gemma2"))
    file = family.folder / "model.safetensors"
    file.rename(family.folder / "model-00001-of-00001.safetensors")
    with pytest.raises(RuntimeError) as caught:
        family.loaded_by_users(COMPONENT, family.folder, numbers=False)
    assert str(caught.value).startswith(f"{family.folder}: transformers cannot load it (Error no file named model.")


def test_a_base_that_only_a_package_for_its_codes_loads_is_left_out(tmp_path: Path) -> None:
    family = opened(saved(tmp_path / "model", "gemma2"))
    change(family.folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert family.loaded_by_users(COMPONENT, family.folder) == {}
