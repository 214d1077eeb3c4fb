"""Model folders of strangers: code that they bring is never run, and nobody is asked whether it may be."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.config.errors import InputError
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models import families
from trainer.models.parts.folder import read_json
from trainer.models.parts.text_encoder import load_tokenizer

CODE = """\
from pathlib import Path
Path({marker!r}).touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Config(PretrainedConfig):
    model_type = "stranger"
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the code of a model folder makes. Whoever asks on the terminal is answered with yes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "executed"


def with_code(family: str, tmp_path: Path, marker: Path, place: str, file: str, changes: dict[str, Any]) -> Any:
    """A family whose tiny model has code in a part of its folder."""
    kind = families.get(family)
    tiny = kind(ModelConfig(family=family, path="tiny"), ObjectiveConfig(), tmp_path / "cache").folder
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    (folder / place / "stranger.py").write_text(CODE.format(marker=str(marker)))
    config = folder / place / file
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return kind(ModelConfig(family=family, path=str(folder)), ObjectiveConfig(), tmp_path / "cache")


TOKENIZER = {"auto_map": {"AutoTokenizer": [None, "stranger.Tokenizer"]}, "tokenizer_class": "StrangerTokenizer"}
CONFIG = {"auto_map": {"AutoConfig": "stranger.Config"}, "model_type": "stranger"}
NEVER = "brings code of its own (auto_map), which is never run; name a model that transformers knows"


def refused_or_read(act: Callable[[], object], place: Path) -> None:
    """Either the class that transformers has is taken, or the folder is refused in one sentence."""
    try:
        act()
    except InputError as error:
        assert str(error).endswith(f"{place}: {NEVER}")


@pytest.mark.parametrize("place", ["tokenizer", "tokenizer_2"])
def test_the_tokenizer_code_of_a_pipeline_is_not_run(tmp_path: Path, marker: Path, place: str) -> None:
    family = with_code("flux1", tmp_path, marker, place, "tokenizer_config.json", TOKENIZER)
    refused_or_read(lambda: load_tokenizer(family._folder, place), family.folder / place)
    assert not marker.exists()


def test_the_tokenizer_code_of_a_language_model_is_not_run(tmp_path: Path, marker: Path) -> None:
    family = with_code("causal_lm", tmp_path, marker, "", "tokenizer_config.json", TOKENIZER)
    refused_or_read(lambda: family.tokenizer, family.folder)
    assert not marker.exists()


def test_the_config_code_of_a_language_model_is_not_run(tmp_path: Path, marker: Path) -> None:
    with pytest.raises(InputError) as error:
        family = with_code("causal_lm", tmp_path, marker, "", "config.json", CONFIG)
        family.build(family.components[0])
    assert str(error.value) == f"{tmp_path / 'model' / 'config.json'}: {NEVER}"
    assert not marker.exists()


def test_a_config_that_never_ends_or_is_too_deep_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name in ("pipe.json", "deep.json", "zero.json"):
        with pytest.raises(InputError) as error:
            read_json("model.path", tmp_path, name)
        assert str(error.value).startswith(f"{tmp_path / name}: not ")
