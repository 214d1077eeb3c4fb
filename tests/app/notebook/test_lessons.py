"""What the notebooks teach with: tables, pictures and exercises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from app.notebook.lessons import Table, exercise, gallery
from tests.runs import make_pictures
from trainer.system.errors import InputError

HINT = "Count the ranks."


def test_a_table_as_text_aligns_names_left_and_numbers_right():
    table = Table(
        ["strategy", "GiB per rank", "saving", "remark"], [["ddp", 12.5, "-", "copies"], ["full", 3, "75 %", ""]]
    )
    assert repr(table).splitlines() == [
        "strategy  GiB per rank  saving  remark",
        "--------  ------------  ------  ------",
        "ddp               12.5       -  copies",
        "full                 3    75 %",
    ]


def test_a_table_as_html_aligns_the_same_and_escapes_every_cell():
    page = Table(["<i>", "loss"], [["<b>", "0.5"]])._repr_html_()
    assert '<th scope="col" style="text-align: left">&lt;i&gt;</th>' in page
    assert '<td style="text-align: left">&lt;b&gt;</td><td style="text-align: right">0.5</td>' in page
    assert 'class="shardstudio"' in page


@pytest.mark.parametrize(
    ("cells", "is_number"),
    [
        (["1", "2.5 GiB", "1e-4"], True),
        (["-0.3", "+5 %", "\u22121", "~ 4", ".5"], True),
        (["1", "-", "", "—"], True),
        (["1", "none"], False),
        (["-", ""], False),
    ],
)
def test_a_column_of_numbers_is_one_whose_cells_all_begin_with_a_digit(cells: list[str], is_number: bool):
    page = Table(["name", "value"], [["x", cell] for cell in cells])._repr_html_()
    assert ("text-align: right" in page) == is_number


def test_a_table_without_rows_is_its_head():
    assert repr(Table(["a", "b"], [])).splitlines() == ["a  b", "-  -"]


def test_a_row_that_does_not_fit_the_head_is_refused():
    with pytest.raises(ValueError, match="zip"):
        Table(["a", "b"], [["1"]])


def test_pictures_in_rows_are_a_table_with_a_column_per_caption(tmp_path: Path):
    fox, owl = sorted(make_pictures(tmp_path / "pictures", count=2).glob("*.png"))[:2]
    pictures = gallery({"<before>": {"step 1": fox}, "after": {"step 1": owl, "step 2": fox}})
    page = pictures._repr_html_()
    assert page.count("<img ") == 3
    assert page.count("data:image/webp;base64,") == 3
    assert page.count('scope="col"') == page.count('scope="row"') == 2
    assert 'alt="&lt;before&gt;, step 1"' in page
    assert str(tmp_path) not in page
    assert repr(pictures).splitlines() == [
        f"<before>, step 1: {fox}",
        f"after, step 1: {owl}",
        f"after, step 2: {fox}",
    ]


def test_pictures_in_one_row_are_wrapped(tmp_path: Path):
    [fox] = sorted(make_pictures(tmp_path / "pictures", count=1).glob("*.png"))
    page = gallery({"": {"a fox": fox, "again": fox}}, size=64)._repr_html_()
    assert page.count("<figcaption") == 2
    assert "flex-wrap: wrap" in page
    assert 'alt="a fox"' in page


def test_forty_pictures_are_a_quarter_of_a_megabyte_at_most(tmp_path: Path):
    """Of noise: no photo has more detail."""
    noise = np.random.default_rng(0).integers(0, 255, (40, 192, 192, 3), dtype=np.uint8)
    row = {str(number): tmp_path / f"{number}.bmp" for number in range(40)}
    for pixels, file in zip(noise, row.values(), strict=True):
        Image.fromarray(pixels).save(file)
    assert len(gallery({"": row})._repr_html_()) < 250_000


def test_what_is_no_picture_is_refused(tmp_path: Path):
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(InputError, match=r"a\.png: cannot be read"):
        gallery({"": {"a": tmp_path / "a.png"}})
    with pytest.raises(InputError, match=r"b\.png: cannot be read"):
        gallery({"": {"b": tmp_path / "b.png"}})


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (4, 4),
        (0.981, 1.0),
        (1.02, 1.0),
        (" 4.0 ", 4),
        ("4e9", 4e9),
        (torch.tensor(2.0), 2),
        (np.float32(0.5), 0.5),
        (" Full ", "full"),
        (True, True),
    ],
)
def test_a_right_answer(answer: object, right: float | str, capsys: pytest.CaptureFixture[str]):
    exercise(answer, right, HINT)
    assert capsys.readouterr().out == "Right.\n"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (5, 4),
        (1.03, 1.0),
        (float("nan"), 1.0),
        (0.1, 0),
        ("four", 4),
        ("", 4),
        ([4], 4),
        (4j, 4),
        (10**400, 4),
        (torch.tensor([4.0, 4.0]), 4),
        (np.array([4.0, 4.0]), 4),
        ("grad_op", "full"),
        (4, "full"),
    ],
)
def test_a_wrong_answer_gets_the_hint(answer: object, right: float | str, capsys: pytest.CaptureFixture[str]):
    exercise(answer, right, HINT)
    assert capsys.readouterr().out == f"Not yet: {HINT}\n"


@pytest.mark.parametrize("answer", [None, ...])
def test_no_answer_yet_gets_the_hint_too(answer: object, capsys: pytest.CaptureFixture[str]):
    exercise(answer, 4, HINT)
    assert capsys.readouterr().out == f"Not answered yet. {HINT}\n"


def test_the_tolerance_of_an_exercise_can_be_chosen(capsys: pytest.CaptureFixture[str]):
    exercise(110, 100, HINT, tolerance=0.1)
    exercise(101, 100, HINT, tolerance=0)
    assert capsys.readouterr().out == f"Right.\nNot yet: {HINT}\n"
