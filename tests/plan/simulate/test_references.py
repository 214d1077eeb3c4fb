"""How many reference images a plan counts for each training image."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.plan.common import run
from trainer.config.schema import RunConfig
from trainer.data.images.image_files import scan
from trainer.plan.memory import describe
from trainer.plan.simulate.references import references_of
from trainer.plan.simulate.sizes import input_of

SETS = {
    "one by the same name": (("a", "b"), ("a", "b"), 1),
    "counted from 0 behind the name": (("a", "b"), ("a_0", "b_0", "b_1"), 2),
    "images whose own names end in numbers": (("a_0", "a_1"), ("a_0", "a_1"), 1),
    "numbered folders": (("a", "b"), ("control_1/a", "control_1/b", "control_2/a", "control_2/b"), 2),
    "folders of the images that end in numbers": (("set1/a", "set2/a"), ("set1/a", "set2/a"), 1),
    "a numbered folder that is not read": (("a", "b"), ("a", "b", "old2/a", "old3/a"), 1),
    "more than the model reads": (("a",), ("a_0", "a_1", "a_2", "a_3"), 3),
}
"""{layout: (images, references, how many are counted)}"""


def edit(folder: Path, *fields: str) -> RunConfig:
    data = f"data={{path: '{folder / 'after'}', references: '{folder / 'before'}', missing_caption: empty}}"
    return run("qwen_image qwen-image-edit-2511", data, "parallel.devices=1", *fields)


def draw(folder: Path, names: tuple[str, ...]) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (number, 20, len(folder.name))).save(folder / f"{name}.png")


@pytest.mark.parametrize("layout", SETS)
def test_as_many_references_are_planned_as_the_data_have(tmp_path: Path, layout: str) -> None:
    images, references, counted = SETS[layout]
    draw(tmp_path / "after", images)
    draw(tmp_path / "before", references)
    cfg = edit(tmp_path, "data.resolution=64")
    found = max(len(image.references) for image in scan(cfg.data).train)
    assert references_of(cfg) == counted == min(found, 3)
    assert input_of(cfg).pixels == (1 + counted) * 64 * 64


def test_an_image_has_one_reference_until_there_are_more_and_the_plan_says_how_many(tmp_path: Path) -> None:
    assert "1 per rank and pass, 1 reference of each, 1 rank" in describe(edit(tmp_path))
    draw(tmp_path / "after", ("a",))
    draw(tmp_path / "before", ("1/a", "2/a"))
    assert "1 per rank and pass, 2 references of each, 1 rank" in describe(edit(tmp_path))
    draw(tmp_path / "before", ("3/a",))
    assert references_of(edit(tmp_path)) == 3


def test_columns_of_references_are_counted_and_a_run_without_references_has_none() -> None:
    assert references_of(run("qwen_image qwen-image-edit-2511", "data.reference_columns=[before, style]")) == 2
    assert references_of(run("qwen_image qwen-image-edit-2511")) == 0
    assert "reference" not in describe(run("qwen_image qwen-image-edit-2511"))
