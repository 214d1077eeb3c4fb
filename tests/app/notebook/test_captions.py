"""Captions by a model from a notebook."""

from __future__ import annotations

from pathlib import Path

import pytest

from app import notebook
from tests.captioning.models import write_qwen2_5_vl
from tests.runs import awaited, make_pictures
from trainer.system.errors import InputError


@pytest.mark.slow
def test_a_cell_captions_a_folder_and_takes_all_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_qwen2_5_vl(tmp_path / "model")
    folder = make_pictures(tmp_path / "images", 3)
    for name in ("00.txt", "02.txt"):
        (folder / name).unlink()

    def captioned() -> str:
        done = notebook.caption(folder, model, tmp_path / "runs", device="cpu", trigger=True, precision="fp32")
        return repr(awaited(done))

    table = captioned()
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["00.png", "02.png"]
    assert (folder / "00.txt").read_text(encoding="utf-8").startswith("[trigger], ")
    assert (folder / "01.txt").read_text(encoding="utf-8") == "picture number 1"
    assert "1/2  00.png" in capsys.readouterr().out
    assert captioned().splitlines()[2:] == []
    assert notebook.undo_captions(folder, tmp_path / "runs") == 2
    assert sorted(file.name for file in folder.glob("*.txt")) == ["01.txt"]


def test_what_cannot_be_asked_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path / "images", 1)
    with pytest.raises(InputError, match="style"):
        awaited(notebook.caption(folder, tmp_path, tmp_path / "runs", style="poem"))
    with pytest.raises(InputError, match=r"no config\.json"):
        awaited(notebook.caption(folder, tmp_path, tmp_path / "runs"))
    with pytest.raises(InputError, match="no captioning job of this folder"):
        notebook.undo_captions(folder, tmp_path / "runs")
