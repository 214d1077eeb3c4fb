"""What is refused and said of reference images, by the folder of a model that edits and of one that does not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.models.common import make
from tests.runs import run_config
from trainer.config.schema import RunConfig
from trainer.data.images.scan_memory import checked
from trainer.models import editing, families
from trainer.system.errors import InputError

KONTEXT = "black-forest-labs/FLUX.1-Kontext-dev"


@pytest.fixture
def folders(cache: Path, tmp_path: Path) -> dict[str, str]:
    """{architecture: a diffusers folder of it, under a name that does not tell}."""
    names = ("dev", "kontext")
    return {
        name: str(shutil.copytree(make("flux1", cache, architecture=name).folder, tmp_path / f"model-{number}"))
        for number, name in enumerate(names)
    }


def config(**changes: Any) -> RunConfig:
    return run_config(Path("images"), model__family="flux1", **changes)


def refused(cfg: RunConfig, cache: Path) -> list[str]:
    """What is refused before a rank is started, which is what a rank refuses."""
    early = [f"{problem.field}: {problem.message}" for problem in editing.refused(cfg)]
    try:
        families.make(cfg, cache)
    except InputError as error:
        assert str(error).splitlines() == early
    else:
        assert not early
    return early


GIVEN = {
    "data.references": {"data__references": "before"},
    "data.reference_columns": {"data__reference_columns": ("before",)},
    "sample.references": {"sample__prompts": ("a fox",), "sample__references": ("a.png",)},
}


@pytest.mark.parametrize("field", GIVEN)
def test_references_are_refused_for_a_model_that_only_reads_text_and_taken_by_one_that_edits(
    folders: dict[str, str], cache: Path, field: str
) -> None:
    path = folders["dev"]
    message = f"{field}: {path} reads no reference images; set model.path to {KONTEXT}, or remove the field"
    assert refused(config(model__path=path, **GIVEN[field]), cache) == [message]
    assert refused(config(model__path="tiny", **GIVEN[field]), cache) == [message.replace(path, "tiny")]
    assert refused(config(model__path=folders["kontext"], **GIVEN[field]), cache) == []
    options = {"model__path": "tiny", "model__options__architecture": "kontext"}
    assert refused(config(**options, **GIVEN[field]), cache) == []


def test_more_references_than_the_model_reads_are_refused(folders: dict[str, str], cache: Path, tmp_path: Path) -> None:
    cfg = config(model__path=folders["kontext"], data__reference_columns=("first", "second"))
    assert refused(cfg, cache) == [
        f"data.reference_columns: 2 columns, but {KONTEXT} reads 1 reference image; name fewer"
    ]
    images, before = tmp_path / "images", tmp_path / "before"
    for name in ("images/a", "images/b", "before/a", "before/b_0", "before/b_1"):
        file = tmp_path / f"{name}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", (32, 32), "red").save(file)
    for name in "ab":
        (images / f"{name}.txt").write_text("a red square")
    data = run_config(images, data__references=str(before)).data
    checked(data, tmp_path / "cache", 2)()
    for _ in range(2):  # found by a scan, and by one that is remembered
        with pytest.raises(InputError) as caught:
            checked(data, tmp_path / "cache", 1)
        assert str(caught.value) == (
            "data.references: 1 of 2 images have more reference images than the 1 that this model reads, first "
            f"{images}/b.png with 2: {before}/b_1.png; keep 1 of each"
        )


def test_a_model_that_edits_says_that_it_is_trained_from_captions_alone(folders: dict[str, str]) -> None:
    path = folders["kontext"]
    (said,) = editing.warnings(config(model__path=path))
    assert said.startswith(f"model.path {path}: the model edits images, and data.references is empty: ")
    assert editing.warnings(config(model__path=path, data__references="before")) == ()
    assert editing.warnings(config(model__path=folders["dev"])) == ()


@pytest.mark.parametrize(
    ("named", "held", "wanted", "found"),
    [("dev", "kontext", "", ", and edits images"), ("kontext", "dev", ", and edits images", "")],
)
def test_a_sister_model_is_named_as_such(
    folders: dict[str, str], cache: Path, named: str, held: str, wanted: str, found: str
) -> None:
    with pytest.raises(InputError) as caught:
        make("flux1", cache, folders[held], architecture=named)
    assert str(caught.value) == (
        f"model.options.architecture: {named} has 19 + 38 blocks with guidance embedding{wanted}, but {folders[held]} "
        f"has 1 + 2 blocks with guidance embedding{found}; leave it empty or set model.path to {named}"
    )
