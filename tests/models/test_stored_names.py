"""Folders of language models as transformers and the hub hold them: read by today's names, written under their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForConditionalGeneration

from trainer.models.parts.language.language_configs import build_whole, text_config
from trainer.models.parts.language.next_token import build_language_model
from trainer.models.parts.language.stored_names import StoredNames, read_names
from trainer.models.parts.language.tiny_configs import tiny_config
from trainer.system.errors import InputError
from trainer.weights.composed import value_of
from trainer.weights.files import read_tensor, stored_tensors

KINDS = ["llama", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_neox", "gpt2", "gemma2", "phi3", "granitemoe"]


def small(kind: str, **changes: Any) -> Any:
    return tiny_config(AutoConfig.for_model(kind), **changes)


def saved(folder: Path, kind: str, **changes: Any) -> dict[str, Tensor]:
    """Save a model with transformers. Returns its tensors by the names of its class."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small(kind, **changes))
    model.save_pretrained(folder)
    state: dict[str, Tensor] = model.state_dict()
    return state


def read(folder: Path, kind: str, **changes: Any) -> StoredNames:
    return read_names(build_language_model(small(kind, **changes)), [folder / "model.safetensors"])


def assert_same(found: StoredNames, expected: Mapping[str, Tensor], names: Any) -> None:
    assert found.entries.keys() == set(names)
    assert [name for name, entry in found.entries.items() if not torch.equal(read_tensor(entry), expected[name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_read_by_todays_names_and_written_under_its_own(kind: str, tmp_path: Path) -> None:
    state = saved(tmp_path, kind)
    found, stored = read(tmp_path, kind), load_file(tmp_path / "model.safetensors")
    assert_same(found, state, stored_tensors(build_language_model(small(kind))))
    assert found.written.keys() == stored.keys()
    written = {key: value_of(made, lambda name: state[name]) for key, made in found.written.items()}
    assert [key for key, tensor in written.items() if not torch.equal(tensor, stored[key])] == []


def test_names_without_the_prefix_of_the_base_model_are_read_and_kept(tmp_path: Path) -> None:
    state = saved(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    plain = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(plain | masks, file)
    found = read(tmp_path, "gpt2")
    assert_same(found, state, stored_tensors(build_language_model(small("gpt2"))))
    assert found.written.keys() == plain.keys()


def test_a_tied_head_that_is_stored_alone_is_the_embedding(tmp_path: Path) -> None:
    state = saved(tmp_path, "gemma2")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, file)
    assert torch.equal(
        read_tensor(read(tmp_path, "gemma2").entries["model.embed_tokens.weight"]), state["lm_head.weight"]
    )


def change_a_number(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[-1, -1] += 1
    return changed


def test_a_head_with_numbers_of_its_own_in_a_model_that_ties_it_is_refused(tmp_path: Path) -> None:
    """transformers 5 does not tie it then, so the base that is trained would not be the one that users load."""
    saved(tmp_path, "gemma2")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, file)
    assert "lm_head.weight" not in read(tmp_path, "gemma2").entries
    save_file({**stored, "lm_head.weight": change_a_number(stored["model.embed_tokens.weight"])}, file)
    with pytest.raises(InputError) as caught:
        read(tmp_path, "gemma2")
    assert str(caught.value) == (
        f"{file}: 'model.embed_tokens.weight' and 'lm_head.weight' hold other numbers, but by config.json they are one "
        "tensor (tie_word_embeddings). transformers loads both, other programs drop one: set tie_word_embeddings to "
        f"false in {tmp_path / 'config.json'}, or remove the one that is not meant from the file"
    )


def test_a_tied_head_with_more_rows_than_the_embedding_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    table = stored["transformer.wte.weight"]
    save_file({**stored, "lm_head.weight": torch.cat([table, table[:1]])}, file)
    with pytest.raises(InputError, match="hold other numbers, but by"):
        read(tmp_path, "gpt2")


def test_a_head_of_its_own_in_the_text_part_of_a_model_that_sees_is_refused(tmp_path: Path) -> None:
    model = Gemma3ForConditionalGeneration(small("gemma3"))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    head = change_a_number(stored["language_model.model.embed_tokens.weight"])
    save_file({**stored, "language_model.lm_head.weight": head}, file)
    text = build_language_model(text_config(model.config))
    with pytest.raises(InputError, match="hold other numbers, but by"):
        read_names(text, [file], build_whole(model.config))


@pytest.mark.parametrize("old", [False, True])
def test_the_text_part_of_a_model_that_sees_is_read_and_written_as_a_model_of_its_own(
    tmp_path: Path, old: bool
) -> None:
    torch.manual_seed(0)
    config = small("gemma3")
    model = Gemma3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if not old:  # the names of the module, as some publishers write them
        save_file({name: tensor.clone() for name, tensor in model.state_dict().items() if "lm_head" not in name}, file)
    text = build_language_model(text_config(config))
    found = read_names(text, [file], build_whole(model.config))
    state = {name.replace("language_model.", "", 1): tensor for name, tensor in model.state_dict().items()}
    assert type(text).__name__ == "Gemma3ForCausalLM"
    assert_same(found, state, stored_tensors(text))
    assert found.written.keys() == stored_tensors(text).keys()


def test_only_a_class_of_models_of_the_configs_own_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(transformers, "pipeline", called.append)
    config = small("gemma3")
    config.architectures = ["pipeline", "LlamaForCausalLM", "Gemma3ForConditionalGeneration"]
    assert type(build_whole(config)) is Gemma3ForConditionalGeneration
    assert not called


def test_weights_of_another_model_are_refused_and_named(tmp_path: Path) -> None:
    saved(tmp_path, "mixtral")
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.extra.weight": torch.ones(1)}, file)
    with pytest.raises(InputError) as caught:
        read(tmp_path, "mixtral")
    assert str(caught.value) == (
        f"{file}: 1 tensors that the model does not have, first 'model.layers.0.extra.weight'; "
        "the weights and config.json belong to different models"
    )


def test_a_layer_that_lacks_an_expert_has_the_shape_of_fewer(tmp_path: Path) -> None:
    saved(tmp_path, "mixtral")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in [name for name in stored if "layers.0" in name and "experts.3." in name]:
        del stored[name]
    save_file(stored, file)
    assert read(tmp_path, "mixtral").entries["model.layers.0.mlp.experts.down_proj"].shape == (3, 64, 64)
