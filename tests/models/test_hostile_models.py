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

from tests.runs import make_text, text_config
from trainer.config.load import dump_config, load_config_text
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.launcher import preflight
from trainer.models import families
from trainer.models.families.causal_lm import TOKENIZER_FILES
from trainer.models.parts.folder import copy_files, read_json
from trainer.models.parts.image.text_encoder import load_tokenizer
from trainer.system.errors import InputError

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


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("family", "architecture"), [("flux2", "dev"), ("flux2", "klein-4b"), ("flux3", ""), ("z_image", "")]
)
def test_a_chat_template_of_a_text_encoder_that_never_ends_is_refused(tmp_path, family, architecture):
    kind, options = families.get(family), {"architecture": architecture} if architecture else {}
    tiny = kind(ModelConfig(family=family, path="tiny", options=options), ObjectiveConfig(), tmp_path / "cache").folder
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    (folder / "tokenizer" / "chat_template.jinja").write_text(ENDLESS)
    model = kind(ModelConfig(family=family, path=str(folder)), ObjectiveConfig(), tmp_path / "cache")
    with pytest.raises(InputError) as error:
        model.text_lengths(["a red fox"])
    assert str(error.value) == (
        f"{folder / 'tokenizer'}: its chat template cannot be used (it takes more than 200,000 steps); download the "
        "model again"
    )


def test_a_config_that_never_ends_or_is_too_deep_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name in ("pipe.json", "deep.json", "zero.json"):
        with pytest.raises(InputError) as error:
            read_json("model.path", tmp_path, name)
        assert str(error.value).startswith(f"{tmp_path / name}: not ")


def test_a_file_that_an_export_copies_is_no_link_to_a_file_of_the_user(tmp_path: Path) -> None:
    """A private key in the place of a tokenizer would be published with the model."""
    model, key = tmp_path / "model", tmp_path / "home" / ".ssh" / "id_ed25519"
    for folder in (model, key.parent, tmp_path / "export"):
        folder.mkdir(parents=True)
    key.write_text("private")
    (model / "merges.txt").symlink_to(key)
    with pytest.raises(InputError) as error:
        copy_files(model, TOKENIZER_FILES, tmp_path / "export")
    assert str(error.value) == (
        f"{model}/merges.txt: a link out of the model's folder, which would be copied into what is exported; put the "
        "file in its place, or copy the folder with cp -rL and name the copy"
    )
    assert list((tmp_path / "export").iterdir()) == []
    cfg = text_config(make_text(tmp_path / "text"), model__path=str(model), model__base=None)
    loaded = load_config_text(dump_config(cfg), (), tmp_path / "preset.yaml")
    with pytest.raises(InputError, match=r"merges.txt: a link out of the model's folder"):  # before a rank starts
        preflight.check_machine(loaded)


def test_links_of_the_hugging_face_cache_and_links_within_a_model_are_copied(tmp_path: Path) -> None:
    repository = tmp_path / "models--me--fox"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot / "tokenizer", repository / "blobs", tmp_path / "export"):
        folder.mkdir(parents=True)
    (repository / "blobs" / "aa").write_text("merges")
    (snapshot / "tokenizer" / "merges.txt").symlink_to("../../../blobs/aa")
    (snapshot / "tokenizer" / "vocab.json").symlink_to("merges.txt")
    (tmp_path / "linked").symlink_to(snapshot)
    copy_files(tmp_path / "linked" / "tokenizer", TOKENIZER_FILES, tmp_path / "export")
    assert {file.name: file.read_text() for file in (tmp_path / "export").iterdir()} == {
        "merges.txt": "merges",
        "vocab.json": "merges",
    }


@pytest.mark.parametrize(("name", "is_cached"), [("ab" * 20, True), ("ab" * 32, True), ("id_rsa", False)])
def test_a_model_downloaded_into_a_folder_may_link_to_files_of_the_hugging_face_cache(
    tmp_path: Path, name: str, is_cached: bool
) -> None:
    """As older versions of its command made it. Names of files there tell their content."""
    blobs = tmp_path / "hub" / "models--me--fox" / "blobs"
    for folder in (blobs, tmp_path / "model", tmp_path / "export"):
        folder.mkdir(parents=True)
    (blobs / name).write_text("{}")
    (tmp_path / "model" / "tokenizer.json").symlink_to(blobs / name)
    if is_cached:
        copy_files(tmp_path / "model", TOKENIZER_FILES, tmp_path / "export")
        assert (tmp_path / "export" / "tokenizer.json").read_text() == "{}"
    else:
        with pytest.raises(InputError, match=r"tokenizer\.json: a link out of the model's folder"):
            copy_files(tmp_path / "model", TOKENIZER_FILES, tmp_path / "export")
