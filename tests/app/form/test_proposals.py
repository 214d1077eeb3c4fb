"""What is proposed for a user's own images: names of a word, the preset that fits, who writes captions."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.form import proposals
from app.form.draft import Draft, check
from app.form.proposals import Writer
from app.studio import Studio
from tests.app.form.test_model_choices import gpus
from tests.runs import make_pictures
from trainer.config.models import captioners
from trainer.run.captioning import Asked, CaptionJob, CaptionRequest, Written
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu

MILO = "write a word, such as milo or inkstyle"


@pytest.mark.parametrize(
    ("word", "name", "trigger"),
    [
        ("Milo", "Milo", "milo"),
        ("  my old\ncat ", "my-old-cat", "my-old-cat"),
        ("cats/dogs", "cats-dogs", "cats-dogs"),
        ("../../etc", "etc", "etc"),
        ("🦊 fox", "fox", "fox"),
        ("Café", "Cafe", "cafe"),
        ("кот", "my-pictures", "кот"),
        ("кот 2", "2", "кот 2"),
        ("m" * 64, "m" * 64, "m" * 64),
    ],
)
def test_a_word_becomes_the_name_and_the_trigger_word(word: str, name: str, trigger: str):
    assert proposals.named(word) == {"name": name, "data.trigger": trigger}


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("", "One word for what the pictures show is missing"),
        (" \n\u200b", "One word for what the pictures show is missing"),
        ("m" * 200, "The word has 200 letters, the limit is 64: write one such as milo"),
        ("🦊", f"'🦊' has neither a letter nor a digit: {MILO}"),
        ("/", f"'/' has neither a letter nor a digit: {MILO}"),
    ],
)
def test_a_word_that_names_nothing_is_refused_with_what_to_write(word: str, sentence: str):
    with pytest.raises(InputError, match="^" + sentence.replace("?", r"\?")):
        proposals.named(word)


@pytest.mark.slow  # every preset is planned
@pytest.mark.parametrize(("here", "wanted"), [([], "quickstart"), (gpus(1, 24), "flux2-klein-4b-lora-1gpu")])
def test_the_preset_that_fits_is_one_without_a_login_and_the_demo_only_where_no_other_does(
    tmp_path: Path, here: list[Gpu], wanted: str
):
    studio = Studio(tmp_path / "runs")
    found = proposals.fitting(studio.models.all(studio.presets(), studio.own_presets, here))
    assert found is not None and (found.name, found.verdict) == (wanted, "fits")
    assert proposals.fitting([]) is None


def test_of_a_few_images_fewer_are_held_out_unless_somebody_says_how_many(tmp_path: Path):
    studio = Studio(tmp_path / "runs")
    for count, wanted in ((30, None), (12, None), (11, "2"), (3, "0")):
        images = make_pictures(tmp_path / f"{count}", count)
        draft = Draft(studio.preset("quickstart"), {"data.path": str(images)})
        checked = check(draft)
        offered = proposals.completed(checked, studio.scans.of(checked.config))
        assert offered.get("data.validation") == wanted, count
        assert proposals.with_proposals(checked, studio.scans.of(checked.config)).values["name"] == f"{count}"
        typed = check(Draft(draft.preset, {**draft.values, "data.validation": 2}))
        assert "data.validation" not in proposals.completed(typed, studio.scans.of(typed.config))


@pytest.mark.parametrize(
    ("caption", "prompt"),
    [
        ("word " * 80, " ".join(["word"] * 60)),
        ("一只白色的猫坐在窗边。" * 40, ("一只白色的猫坐在窗边。" * 40)[:300]),
        ("[trigger], " + "猫" * 400, ("[trigger], " + "猫" * 400)[:300]),
    ],
)
def test_a_long_caption_is_a_prompt_of_its_first_letters_also_without_spaces(tmp_path: Path, caption: str, prompt: str):
    images = make_pictures(tmp_path / "milo", 1)
    (images / "00.txt").write_text(caption)
    studio = Studio(tmp_path / "runs")
    checked = check(Draft(studio.preset("quickstart"), {"data.path": str(images)}))
    offered = proposals.proposed(checked, studio.scans.of(checked.config))["sample.prompts"]
    assert offered == (prompt if "[trigger]" in prompt else f"[trigger], {prompt}")


def test_captions_are_offered_by_models_that_are_here_with_their_time_then_by_those_to_download(tmp_path: Path):
    offered = [Writer(model.id, 0.0, model.num_bytes, model.licence_note) for model in captioners().values()]
    assert len(offered) == 4 and all(writer.num_bytes and writer.licence for writer in offered)
    assert proposals.writers(tmp_path) == [*offered, Writer("demo", 0.0)]
    model = tmp_path / "vl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    images = make_pictures(tmp_path / "images", 2)
    for written_by, seconds in ((str(model), 3.0), ("demo", 0.5), (str(tmp_path / "gone"), 1.0)):
        job = CaptionJob.create(tmp_path, CaptionRequest(str(images), written_by, ranks=2), [Asked("00.png")])
        job.add(Written("00.png", "a cat", seconds=seconds))
        job.add(Written("01.png", "", problem="too dark", seconds=100.0))
    assert proposals.writers(tmp_path) == [Writer(str(model), 1.5), *offered, Writer("demo", 0.25)]
