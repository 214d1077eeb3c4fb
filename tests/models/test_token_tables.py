"""Tokenizers with more tokens than the model has rows for, as where a token was added and the model was not resized."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models import families, recognition
from trainer.models.parts.image.text_encoder import load_tokenizer
from trainer.models.state_dict import BaseWeights
from trainer.system.errors import InputError

BYTES = 257
"""Tokens of the tiny language model: bytes, and the end of a text."""
ADDED = "<added>"


def tiny_folder(family: str, root: Path) -> Path:
    kind = families.get(family)
    folder = kind(ModelConfig(family=family, path="tiny"), ObjectiveConfig(), root / "cache").folder
    return Path(shutil.copytree(folder, root / "model"))


def add_token(folder: Path, token: str = ADDED, **settings: Any) -> None:
    """Add a token to a tokenizer on disk. settings: changes of tokenizer_config.json."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([token], special_tokens=True)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def opened(folder: Path, **options: Any) -> Any:
    model = ModelConfig(family="causal_lm", path=str(folder), options=options)
    return families.get("causal_lm")(model, ObjectiveConfig(), folder.parent / "cache")


def sentence(folder: Path) -> str:
    return (
        f"model.path {folder}: '{ADDED}' is token {BYTES} of the tokenizer, but the model knows 0 to {BYTES - 1}: the "
        f"tokenizer was extended and the model was not. Set model.options.new_tokens to ['{ADDED}'], which adds the "
        "rows, or remove the token from texts and tokenizer"
    )


READERS: list[Callable[[Any, str], Any]] = [
    lambda family, text: family.tokenize(text),
    lambda family, text: family.encode_pair("a", text),
    lambda family, text: family.encode_chat([{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]),
]


@pytest.mark.parametrize("read", READERS, ids=["text", "pair", "chat"])
def test_a_text_with_a_token_that_has_no_row_is_refused_and_others_are_read(
    tmp_path: Path, read: Callable[[Any, str], Any]
) -> None:
    folder = tiny_folder("causal_lm", tmp_path)
    add_token(folder)
    family = opened(folder)
    assert read(family, "b")
    with pytest.raises(InputError) as caught:
        read(family, f"b{ADDED}")
    assert str(caught.value) == sentence(folder)


def test_an_end_of_text_without_a_row_is_refused_before_a_rank_is_started_and_by_the_rank(tmp_path: Path) -> None:
    folder = tiny_folder("causal_lm", tmp_path)
    assert not list(recognition.without_row(ModelConfig(family="causal_lm", path=str(folder))))
    add_token(folder, eos_token=ADDED)
    (problem,) = recognition.without_row(ModelConfig(family="causal_lm", path=str(folder)))
    assert f"{problem.field} {problem.message}" == sentence(folder)
    with pytest.raises(InputError) as caught:
        _ = opened(folder).end_of_text
    assert str(caught.value) == sentence(folder)
    assert opened(folder, new_tokens=[ADDED]).end_of_text == BYTES


def test_naming_the_token_gives_it_a_row(tmp_path: Path) -> None:
    folder = tiny_folder("causal_lm", tmp_path)
    name = "model.embed_tokens.weight"
    stored = load_file(folder / "model.safetensors")[name]
    add_token(folder, "<unused>")
    add_token(folder)
    for new, count in (([ADDED], 2), ([ADDED, "<tool>"], 3)):
        family = opened(folder, new_tokens=new)
        assert family.tokenize(f"{ADDED}")[0] == BYTES + 1
        rows = BaseWeights(family).tensor("language_model", name)
        assert torch.equal(rows[:BYTES], stored)
        torch.testing.assert_close(rows[BYTES:], stored.double().mean(dim=0).float().expand(count, -1))
        assert family.must_train


@pytest.mark.parametrize(
    ("family", "tokenizer"),
    [
        ("sd3", "tokenizer_3"),
        ("bagel", ""),
        pytest.param("sd3", "tokenizer", marks=pytest.mark.slow),
        pytest.param("flux2", "tokenizer", marks=pytest.mark.slow),
        pytest.param("sdxl", "tokenizer_2", marks=pytest.mark.slow),
    ],
)
def test_a_text_encoder_with_fewer_rows_than_its_tokenizer_has_tokens_is_refused(
    tmp_path: Path, family: str, tokenizer: str
) -> None:
    folder = tiny_folder(family, tmp_path)
    made: Any = families.get(family)(ModelConfig(family=family, path=str(folder)), ObjectiveConfig(), tmp_path)
    load = {"sdxl": lambda: made._tokenizers(), "bagel": lambda: made.tokenizer}.get(
        family, lambda: load_tokenizer(made._folder, tokenizer)
    )
    load()
    add_token(folder / tokenizer)
    made = families.get(family)(ModelConfig(family=family, path=str(folder)), ObjectiveConfig(), tmp_path)
    with pytest.raises(InputError) as caught:
        load()
    assert str(caught.value).startswith(f"model.path {folder}: '{ADDED}' is token ")
    assert f" of {tokenizer or 'the tokenizer'}, but its model knows 0 to " in str(caught.value)
