"""The functions of a rehearsal that the page's script calls: what it shows, and what comes next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.form.draft import Draft
from app.runs import run_screen
from app.studio import Studio
from app.web.answers import answering
from app.web.pages import new_run, rehearsal
from tests.app.browser import recorded
from tests.runs import make_pictures, run_config, write_preset
from trainer.config.load import dump_config, load_config
from trainer.launcher.rehearsal import config_of
from trainer.run.folder import RunDir

FLUX = {"model__family": "flux1", "model__path": "black-forest-labs/FLUX.1-dev", "quantize__format": "nf4"}


@pytest.fixture
def run(tmp_path: Path, studio: Studio) -> RunDir:
    """A rehearsal that has ended, of a run whose model is not here."""
    folder = make_pictures(tmp_path / "own", count=14)
    real = run_config(folder, **FLUX, name="ours", data__trigger="ohwx", data__validation=1, data__caption_dropout=0.1)
    run = recorded(studio.runs, "ours-rehearsal-20261130-101112-abcdef")
    run.config_file.write_text(dump_config(config_of(real)))
    run.rehearsed_file.write_text(dump_config(real))
    return run


def ask(studio: Studio, name: str, **values: Any) -> dict[str, Any]:
    return answering([rehearsal.calls(studio), new_run.calls(studio)])[name](values)


def test_it_shows_pictures_with_their_captions_and_says_what_it_cannot_show(studio: Studio, run: RunDir) -> None:
    found = ask(studio, "rehearsal_show", run=run.path.name)["value"]
    assert (found["name"], found["model"], found["num_pictures"], found["problem"]) == ("ours", "FLUX.1 dev", 14, "")
    assert (len(found["pictures"]), found["most"]) == (rehearsal.MOST_PICTURES, None)
    assert found["pictures"][1] == {
        "name": "01.png",
        "captions": ["ohwx, picture number 1", "without a caption 10% of the time"],
        "size": [80, 48],
        "own_size": [80, 48],
        "share": pytest.approx(5 / 6),
        "is_masked": False,
        "is_held_out": False,
    }
    assert found["cannot_show"][0].startswith("Likeness and detail: its pictures have 64 × 64 pixels.")
    assert any("FLUX.1 dev" in sentence for sentence in found["cannot_show"])
    drawn = ask(studio, "rehearsal_pictures", run=run.path.name)["value"]
    assert len(drawn) == rehearsal.MOST_PICTURES
    assert all(Path(one[kind].partition("=")[2]).is_file() for one in drawn for kind in ("real", "own"))


def test_pictures_that_were_deleted_since_are_said_and_all_else_is_there(studio: Studio, run: RunDir) -> None:
    folder = Path(str(run.config().data.path))
    (folder / "03.png").unlink()
    found = ask(studio, "rehearsal_show", run=run.path.name)["value"]
    assert (found["num_pictures"], found["problem"]) == (13, "")
    for file in folder.iterdir():
        file.unlink()
    found = ask(studio, "rehearsal_show", run=run.path.name)["value"]
    assert found["problem"].startswith("The pictures cannot be read any more: data.path")
    assert (found["pictures"], found["num_pictures"], len(found["cannot_show"])) == ([], 0, 5)


def test_of_many_pictures_it_says_how_many_are_taken(studio: Studio, run: RunDir) -> None:
    few = run.config().model_copy(update={"data": run.config().data.model_copy(update={"max_images": 5})})
    run.config_file.write_text(dump_config(few))
    found = ask(studio, "rehearsal_show", run=run.path.name)["value"]
    assert (found["num_pictures"], found["most"]) == (6, 5)  # one is held out
    assert [one["name"] for one in found["pictures"]] == ["00.png", "02.png", "05.png", "07.png", "10.png", "13.png"]


def test_another_run_is_no_rehearsal_and_a_damaged_one_is_named(studio: Studio, run: RunDir) -> None:
    other = recorded(studio.runs, "other")
    assert ask(studio, "rehearsal_show", run="other")["error"] == "other: not a rehearsal"
    assert not other.is_rehearsal and other.settings_file == other.config_file
    run.rehearsed_file.write_text("name: [")
    assert "rehearsed.yaml" in ask(studio, "rehearsal_show", run=run.path.name)["error"]


def test_the_real_run_is_started_as_it_was_rehearsed_whatever_the_form_has(studio: Studio, run: RunDir) -> None:
    refused = ask(studio, "rehearsal_start", run=run.path.name)["error"]
    assert "black-forest-labs/FLUX.1-dev" in refused
    assert "not a rehearsal" in ask(studio, "rehearsal_start", run=recorded(studio.runs, "other").path.name)["error"]


def test_its_settings_go_back_into_a_form_that_has_others_now(studio: Studio, run: RunDir) -> None:
    assert not ask(studio, "rehearsal_is_in_form", run=run.path.name)["value"]
    ask(studio, "new_copy", run=run.path.name)
    draft = studio.draft()
    assert draft == Draft(run.rehearsed_file) and studio.name_of(draft.preset) == run.path.name
    assert load_config(draft.preset).config.model.path == FLUX["model__path"]
    assert Studio(studio.runs).draft() == draft
    assert ask(studio, "rehearsal_is_in_form", run=run.path.name)["value"]


def test_its_screen_offers_neither_more_steps_nor_another_way_to_train_it(studio: Studio, run: RunDir) -> None:
    follower = studio.follower(run)
    head = run_screen.head(follower, follower.view()).make()
    assert (head["is_rehearsal"], head["more"]["kind"]) == (True, "")


def test_wrong_pictures_are_refused_without_a_file_and_a_line_and_the_form_stays(
    tmp_path: Path, studio: Studio
) -> None:
    preset = write_preset(studio.own_presets / "own.yaml", make_pictures(tmp_path / "own", count=2))
    studio.save_draft(Draft(preset, {"data.masks": str(tmp_path / "gone")}))
    refused = ask(studio, "rehearsal_begin")["error"]
    assert refused.startswith(f"data.masks: {tmp_path / 'gone'}: no such folder") and "own.yaml" not in refused
    studio.save_draft(Draft(preset, {"data.resolution": "many", "train.steps": "few"}))
    assert ask(studio, "rehearsal_begin")["error"] == "Resolution: needs a whole number, not 'many'"
    assert studio.draft().values == {"data.resolution": "many", "train.steps": "few"}
    assert not list(studio.runs.glob("*-rehearsal-*"))
