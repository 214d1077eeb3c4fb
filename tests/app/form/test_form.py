"""The form: rows from the schema, what is typed to a config, problems to their rows."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from app.form import draft as form
from app.form import form_answers
from app.form.draft import Draft, Row
from trainer.config.fields import all_names, label_with_unit, slot, unit
from trainer.config.load import ConfigError, dump_config, load_config

PRESETS = Path(__file__).parents[3] / "presets"
QUICKSTART = PRESETS / "quickstart.yaml"


def rows_of(draft: Draft) -> dict[str, Row]:
    return {row.field: row for row in form.rows(form.check(draft))}


def typed(*changes: tuple[str, str | bool], preset: Path = QUICKSTART) -> Draft:
    draft = Draft(preset)
    for name, text in changes:
        draft = draft.typed(name, text)
    return draft


def test_every_field_of_the_schema_has_a_row_with_its_help_a_group_and_a_name_in_words():
    rows = rows_of(Draft(QUICKSTART))
    assert list(rows) == [name for name in all_names() if name != "stages"]
    for name, row in rows.items():
        assert row.help == slot(tuple(name.split("."))).help
        assert "\n" not in row.help
        assert form_answers.FIELDS[name]["help"] == row.help.replace("`", "")  # the page shows it as plain text
        assert form.group_of(name) in form.GROUPS
        assert row.label and "_" not in row.label
        assert row.label[0] == row.label[0].upper() or row.label == "torch.compile"


def test_a_unit_is_named_once():
    named = {"train.steps": "Steps", "sample.every": "Samples every (steps)", "data.resolution": "Resolution (pixels)"}
    assert {name: label_with_unit(name) for name in named} == named
    assert [unit(name) for name in (*named, "optim.lr")] == ["", "steps", "pixels", ""]


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_preset_that_is_not_touched_gives_its_own_config(preset: Path):
    checked = form.check(Draft(preset))
    assert (checked.errors, checked.changes) == ({}, {})
    assert checked.config == load_config(preset).config


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.yaml")), ids=lambda file: file.stem)
def test_what_a_row_shows_typed_again_changes_nothing(preset: Path):
    """Every kind of value survives the way into an input and back."""
    draft = Draft(preset)
    for row in rows_of(draft).values():
        if row.is_visible:
            draft = draft.typed(row.field, row.value)
    checked = form.check(draft)
    assert (checked.errors, checked.changes) == ({}, {})


@pytest.mark.parametrize(
    ("preset", "own", "warnings"),
    [
        ("sdxl-lora-1gpu", {"sample.steps": "28", "sample.guidance": "4"}, 0),
        ("flux1-schnell-lora-1gpu", {"sample.steps": "4", "sample.guidance": "1"}, 1),
    ],
)
def test_an_empty_row_shows_the_models_own_value_and_a_distilled_model_is_warned_of(preset, own, warnings):
    draft = typed(("sample.steps", ""), ("sample.guidance", ""), preset=PRESETS / f"{preset}.yaml")
    assert {name: row.placeholder for name, row in rows_of(draft).items() if row.placeholder} == own
    assert all(rows_of(draft)[name].value == "" for name in own)
    assert len(form.check(draft).warnings) == warnings


def test_folders_with_settings_of_their_own_have_a_row_that_can_be_typed_again():
    folder = "- path: more\n  masks: masks\n  resolutions:\n  - 32\n  - 64"
    draft = typed(("data.folders", folder), ("data.resolutions", "[48, 64]"), ("data.fit", "pad"))
    rows, config = rows_of(draft), form.check(draft).config
    assert config.data.folders[0].resolutions == (32, 64) and config.data.resolutions == (48, 64)
    shown = {name: rows[name].is_visible for name in ("data.folders", "data.at_resolutions", "data.mask_background")}
    assert shown == dict.fromkeys(shown, True)
    again = typed(*((name, rows[name].value) for name in ("data.folders", "data.resolutions", "data.fit")))
    assert form.check(again).config == config
    plain = rows_of(typed())
    assert not plain["data.at_resolutions"].is_visible and not plain["data.most_cropped"].is_visible


def test_the_rows_a_preset_gives_stand_in_front():
    rows = rows_of(Draft(QUICKSTART))
    assert rows["train.steps"].in_front
    assert not rows["train.seed"].in_front
    assert rows_of(typed(("train.seed", "7")))["train.seed"].in_front


@pytest.mark.parametrize(
    ("changes", "shown", "hidden"),
    [
        ([], ["adapter.rank"], ["adapter.block_size", "adapter.factor"]),
        ([("adapter.type", "boft")], ["adapter.block_size", "adapter.num_stages"], ["adapter.rank", "adapter.alpha"]),
        ([("adapter.type", "none")], [], ["adapter.rank", "adapter.targets"]),
        ([], ["objective.shift"], ["objective.prediction", "objective.min_snr_gamma"]),
        ([], ["parallel.cpu_offload"], ["parallel.shard_size"]),
        ([("parallel.strategy", "hybrid")], ["parallel.shard_size", "parallel.cpu_offload"], []),
        ([("parallel.strategy", "ddp")], [], ["parallel.cpu_offload", "parallel.reshard_after_forward"]),
        ([], ["quantize.format"], ["data.mask_background", "quantize.keep", "model.options.without"]),
        ([("quantize.format", "nf4")], ["quantize.keep", "quantize.encoders", "quantize.cache"], []),
        ([("data.masks", "masks")], ["data.mask_background"], []),
    ],
)
def test_only_what_means_something_beside_the_other_values_is_shown(
    changes: list[tuple[str, str]], shown: list[str], hidden: list[str]
):
    rows = rows_of(typed(*changes))
    assert [name for name in shown if not rows[name].is_visible] == []
    assert [name for name in hidden if rows[name].is_visible] == []


def test_the_family_decides_which_rows_of_the_objective_there_are():
    rows = rows_of(Draft(PRESETS / "sdxl-lora-1gpu.yaml"))
    assert rows["objective.prediction"].is_visible
    assert rows["objective.zero_terminal_snr"].choices == ("auto", "on", "off")
    assert not rows["objective.shift"].is_visible
    sampler = (rows["sample.scheduler"].is_visible, rows_of(Draft(QUICKSTART))["sample.scheduler"].is_visible)
    assert sampler == (True, False)


def test_only_words_that_go_together_can_be_chosen():
    assert rows_of(Draft(QUICKSTART))["export.what"].choices == ("auto", "none", "adapter", "merged")
    full = rows_of(typed(("adapter.type", "none")))
    assert full["export.what"].choices == ("auto", "none", "full")
    assert rows_of(typed(("adapter.type", "boft")))["export.format"].choices == ("auto", "comfyui", "lycoris")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.steps", "many", "needs a whole number, not 'many'"),
        ("train.steps", "0", "is 0, must be >= 1 and <= 10000000 steps"),
        ("optim.lr", "", "is empty; give it a number, or remove it"),
        ("name", "🦊", "'🦊' is not 1 to 64 letters, digits, '_', '.' or '-', not beginning with '.' or '-'"),
        ("sample.size", "[64", None),
        ("train.steps", "[5", "needs a whole number, not '[5'"),
        ("optim.warmup", "400", "must be less than train.steps 100, not 400; lower it"),
    ],
)
def test_a_wrong_value_stands_in_its_row_with_the_reason(name: str, text: str, message: str | None):
    rows = rows_of(typed((name, text), ("train.seed", "5")))
    assert rows[name].value == text
    assert rows[name].error and message in (None, rows[name].error)
    assert [row.field for row in rows.values() if row.error] == [name]


def test_one_wrong_value_keeps_the_others():
    checked = form.check(typed(("train.steps", "x"), ("train.seed", "5"), ("optim.lr", "y")))
    assert set(checked.errors) == {"train.steps", "optim.lr"}
    assert checked.config.train.seed == 5
    assert checked.config.train.steps == 100


def test_a_folder_that_does_not_exist_is_told_in_its_row(tmp_path: Path):
    checked = form.check_with_files(form.check(typed(("data.path", str(tmp_path / "none")))))
    assert checked.errors == {"data.path": f"no folder '{tmp_path}/none'; name the folder with the images"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("sample.prompts", "a fox\n\n it's: a {bear} \n", ("a fox", "it's: a {bear}")),
        ("data.trigger", "2024", "2024"),
        ("sample.negative", "", ""),
        ("optim.lr", "1e-4", 1e-4),
        ("train.checkpointing", "full", "full"),
        ("train.checkpointing", "2", 2),
        ("adapter.alpha", "", None),
        ("optim.clip_norm", "", None),
        ("trackers.tensorboard", True, True),
        ("model.train", "transformer: adapter", {"transformer": "adapter"}),
        ("sample.size", "[128, 64]", (128, 64)),
        ("parallel.reshard_after_forward", "true", True),
    ],
)
def test_what_is_typed_becomes_the_value(name: str, text: str | bool, value: Any):
    checked = form.check(typed((name, text)))
    assert checked.errors == {}
    here: Any = checked.config
    for key in name.split("."):
        here = getattr(here, key)
    assert here == value


def test_the_command_to_copy_gives_the_same_config():
    draft = typed(
        ("sample.prompts", "it's a fox\nb"), ("data.trigger", "a word"), ("adapter.alpha", "8"), ("name", "x")
    )
    *start, preset = shlex.split(form.headless_command(draft))[:4]
    assert start == ["python", "launch.py", "--headless"]
    overrides = shlex.split(form.headless_command(draft))[4:]
    assert load_config(Path(preset), overrides).config == form.check(draft).config


def test_the_review_tells_what_differs_from_the_preset():
    changes = form.check(typed(("train.steps", "7"), ("optim.warmup", "1"), ("adapter.type", "lokr"))).changes
    assert changes == {"adapter.type": ("lora", "lokr"), "train.steps": (100, 7), "optim.warmup": (10, 1)}


def test_another_adapter_leaves_out_what_was_typed_for_the_one_before():
    draft = typed(("adapter.rank", "8"), ("adapter.targets", "attn.to_q"), ("adapter.type", "boft"))
    assert draft.overrides == ['adapter.targets=["attn.to_q"]', "adapter.type=boft"]
    assert form.check(draft).errors == {}
    assert form.check(draft.typed("adapter.type", "many")).draft.values["adapter.targets"] == ["attn.to_q"]


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        ([], {}),
        (["train.steps=70", "name=2024"], {"train.steps": 70, "name": "2024"}),
        (["model.train.transformer=adapter"], {"model.train": {"transformer": "adapter"}}),
        (["adapter.rank_pattern.attn.to_q=8"], {"adapter.rank_pattern": {"attn.to_q": 8}}),
        (["adapter={type: lokr, rank: 4}"], {"adapter.type": "lokr", "adapter.rank": 4}),
        (["optim.clip_norm="], {"optim.clip_norm": None}),
        (["learning_rate=1e-5"], {"optim.lr": 1e-5}),
    ],
)
def test_overrides_of_the_command_line_become_a_draft(overrides: list[str], values: dict[str, Any]):
    draft = form.from_overrides(QUICKSTART, overrides)
    assert draft.values == values
    assert load_config(QUICKSTART, draft.overrides).config == load_config(QUICKSTART, overrides).config


def test_a_wrong_override_is_refused():
    with pytest.raises(ConfigError, match=r"command line: train\.steps: needs a whole number"):
        form.from_overrides(QUICKSTART, ["train.steps=many"])


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("name", "Saving"),
        ("train.steps", "Training"),
        ("train.precision", "Hardware"),
        ("parallel.devices", "Hardware"),
        ("parallel.nodes", "Cluster"),
        ("quantize.format", "Model"),
        ("export.what", "Saving"),
    ],
)
def test_a_field_is_in_the_group_of_the_longest_name_it_starts_with(name: str, group: str):
    assert form.group_of(name) == group


OTHER = PRESETS / "sdxl-lora-1gpu.yaml"
TEXT = PRESETS / "qwen3-8b-qlora-1x24gb.yaml"


def test_another_preset_takes_edits_of_data_name_and_prompts_along_and_leaves_others_behind():
    mine = {"data.path": "/pics", "data.trigger": "sks", "name": "fox", "sample.prompts": ["a fox"]}
    found = form.switched(Draft(QUICKSTART, {"optim.lr": 1.0, **mine, "sample.every": 5, "adapter.rank": 3}), OTHER)
    assert found == form.Switch(Draft(OTHER, mine), ("optim.lr", "sample.every", "adapter.rank"), {})


def test_edits_that_belong_to_the_model_are_left_behind_with_it():
    of_the_model = {"data.resolution": 48, "data.max_aspect": 1.5}
    found = form.switched(Draft(QUICKSTART, {**of_the_model, "data.trigger": "sks"}), OTHER)
    assert found == form.Switch(Draft(OTHER, {"data.trigger": "sks"}), tuple(of_the_model), {})
    text = form.switched(Draft(TEXT, {"data.length": 64, "data.chat_template": "chatml", "name": "fox"}), TEXT)
    assert text == form.Switch(Draft(TEXT, {"name": "fox"}), ("data.length", "data.chat_template"), {})


def test_a_value_typed_back_to_the_presets_own_is_not_an_edit():
    draft = form.edited(Draft(QUICKSTART), {"data.resolution": "100", "data.trigger": "sks"})
    assert draft.values == {"data.resolution": 100, "data.trigger": "sks"}
    assert form.edited(draft, {"data.resolution": "64"}).values == {"data.trigger": "sks"}
    assert form.edited(Draft(QUICKSTART), {"adapter.type": "lora"}) == Draft(QUICKSTART)
    assert form.edited(Draft(QUICKSTART), {"data.resolution": "large"}).values == {"data.resolution": "large"}
    # The preset's rank is one of its own type: for another type, the same number is an edit.
    boft = form.edited(Draft(QUICKSTART), {"adapter.type": "boft"})
    assert boft.values == {"adapter.type": "boft"}


def test_companions_of_former_images_go_with_them():
    companions = {"data.masks": "/a-masks", "data.references": "/before"}
    a, b = Draft(QUICKSTART, {"data.path": "/a", **companions}), Draft(QUICKSTART, {**companions, "data.path": "/b"})
    assert form.without_companions(b, a) == (Draft(QUICKSTART, {"data.path": "/b"}), companions)
    assert form.without_companions(a, a) == (a, {})
    chosen_with_it = Draft(QUICKSTART, {"data.path": "/b", "data.masks": "/b-masks"})
    assert form.without_companions(chosen_with_it, a) == (chosen_with_it, {})
    # The first folder of one's own follows masks that were chosen for it, but not those that lie next to the preset's.
    theirs = str(QUICKSTART.parent / "quickstart-masks")
    masked = Draft(QUICKSTART, {"data.masks": theirs, "data.references": "/before"})
    own = Draft(QUICKSTART, {**masked.values, "data.path": "/b"})
    kept, gone = form.without_companions(own, masked)
    assert (kept.values, gone) == ({"data.references": "/before", "data.path": "/b"}, {"data.masks": theirs})


def test_masks_of_a_preset_or_a_copied_run_do_not_follow_to_other_images(tmp_path):
    preset = tmp_path / "mine.yaml"
    preset.write_text(dump_config(load_config(QUICKSTART, ["data.path=/a", "data.masks=/of-a"]).config))
    draft, gone = form.without_companions(Draft(preset, {"data.path": "/b"}), Draft(preset))
    assert (draft.values, gone) == ({"data.path": "/b", "data.masks": None}, {"data.masks": "/of-a"})
    assert form.edited(draft, gone).values == {"data.path": "/b"}
    assert form.check(form.edited(draft, gone)).config.data.masks == "/of-a"
    own = form.switched(Draft(QUICKSTART, {"data.path": "/b", "data.masks": "/of-b"}), preset).draft
    assert own.values == {"data.path": "/b", "data.masks": "/of-b"}
    assert form.switched(Draft(QUICKSTART, {"data.path": "/b"}), preset).draft == draft
    assert form.switched(Draft(QUICKSTART, {"name": "fox"}), preset).draft.values == {"name": "fox"}


def test_held_out_images_and_input_images_of_samples_go_with_the_former_images():
    mine = {"data.path": "/a", "data.validation": "/a-held", "sample.references": ["/a/1.png", "/a/2.png"]}
    a, b = Draft(QUICKSTART, mine), Draft(QUICKSTART, mine | {"data.path": "/b"})
    kept, gone = form.without_companions(b, a)
    assert kept.values == {"data.path": "/b"}
    assert gone == {"data.validation": "/a-held", "sample.references": "/a/1.png\n/a/2.png"}
    assert form.edited(kept, gone).values == b.values
    # A number of images holds for any folder; so do what was typed for the new one, and images of the class.
    number = {"data.validation": 2, "data.regularization": "/dogs"}
    numbers = Draft(QUICKSTART, number | {"data.path": "/b"})
    assert form.without_companions(numbers, Draft(QUICKSTART, number | {"data.path": "/a"})) == (numbers, {})
    new = mine | {"data.path": "/b", "data.validation": "/b-held", "sample.references": ["/b/1.png"]}
    assert form.without_companions(Draft(QUICKSTART, new), a) == (Draft(QUICKSTART, new), {})
    # The first folder of one's own follows what was chosen for it, but not what lies next to the preset's.
    theirs = [str(QUICKSTART.parent / "quickstart" / "1.png")]
    first = Draft(QUICKSTART, {"data.validation": "/held", "sample.references": theirs})
    own = Draft(QUICKSTART, first.values | {"data.path": "/b"})
    kept, gone = form.without_companions(own, first)
    assert (kept.values, gone) == (
        {"data.validation": "/held", "data.path": "/b"},
        {"sample.references": theirs[0]},
    )


def test_held_out_images_and_input_images_of_a_preset_do_not_follow_to_other_images(tmp_path: Path):
    preset = tmp_path / "mine.yaml"
    changes = ["data.path=/a", "data.validation=/a-held", "sample.references=[/a/1.png]", "sample.prompts=[a fox]"]
    preset.write_text(dump_config(load_config(PRESETS / "flux2-klein-4b-lora-1gpu.yaml", changes).config))
    draft, gone = form.without_companions(Draft(preset, {"data.path": "/b"}), Draft(preset))
    assert draft.values == {"data.path": "/b", "data.validation": 0, "sample.references": []}
    assert gone == {"data.validation": "/a-held", "sample.references": "/a/1.png"}
    assert (form.check(draft).config.data.validation, form.check(draft).config.sample.references) == (0, ())
    assert form.edited(draft, gone).values == {"data.path": "/b"}


def test_a_held_out_text_stays_for_other_texts():
    mine = {"data.path": "/a", "data.validation": "/held.jsonl"}
    b = Draft(TEXT, mine | {"data.path": "/b"})
    assert form.without_companions(b, Draft(TEXT, mine)) == (b, {})


def test_edits_that_the_other_preset_does_not_take_are_named_with_the_reason():
    found = form.switched(Draft(QUICKSTART, {"data.flip": True, "data.masks": "/m", "name": "fox"}), TEXT)
    unread = "this model does not read it"
    assert (found.draft, found.left) == (Draft(TEXT, {"name": "fox"}), ())
    assert found.refused == {"data.flip": unread, "data.masks": unread}
    wrong = form.switched(Draft(QUICKSTART, {"name": "🦊", "data.repeats": "many"}), OTHER)
    assert wrong.draft == Draft(OTHER)
    assert wrong.refused["data.repeats"] == "needs a whole number, not 'many'"
    assert wrong.refused["name"].startswith("'🦊' is not 1 to 64 letters")


def test_a_preset_that_is_wrong_itself_is_refused(tmp_path: Path):
    file = tmp_path / "wrong.yaml"
    file.write_text("train: 5")
    with pytest.raises(ConfigError, match="train: needs a section"):
        form.switched(Draft(QUICKSTART), file)


def test_a_preset_that_becomes_wrong_while_it_is_checked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "own.yaml"
    file.write_text(QUICKSTART.read_text())

    def loaded_before_the_change(preset: Path, *overrides: Any) -> Any:
        found = load_config(preset, *overrides)
        file.write_text("train: 5")
        return found

    monkeypatch.setattr(form, "load_config", loaded_before_the_change)
    with pytest.raises(ConfigError, match="train: needs a section"):
        form.check(Draft(file))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        ("", "–"),
        ([], "–"),
        ({}, "–"),
        (True, "yes"),
        (False, "no"),
        (0, "0"),
        (0.0, "0"),
        (1e-4, "0.0001"),
        ([64, 128], "64, 128"),
        (["a", "b"], "a, b"),
        ({"transformer": "adapter", "vae": False}, "transformer: adapter, vae: no"),
        ([{"path": "a", "repeats": 2}], "path: a, repeats: 2"),
        ("<b>", "<b>"),
    ],
)
def test_a_value_is_written_in_words(value: Any, words: str):
    assert form_answers.in_words(value) == words


def test_a_wrong_value_is_a_difference_too():
    changes = form_answers.changes(form.check(typed(("train.steps", "many"), ("optim.lr", "0.001"))))
    assert changes == [
        {"field": "optim.lr", "label": "Learning rate", "old": "0.004", "new": "0.001"},
        {"field": "train.steps", "label": "Steps", "old": "100", "new": "many"},
    ]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("parallel.offload_blocks", 1.0, "1.0"),
        ("parallel.offload_blocks", 1, "1"),
        ("parallel.shard_size", None, ""),
        ("parallel.cpu_offload", True, True),
        ("sample.size", (512, 512), "[512, 512]"),
        ("quantize.keep", ("a.*", "b.*"), "a.*\nb.*"),
        ("quantize.formats", {"a.*": "int8"}, "a.*: int8"),
        ("quantize.formats", {}, ""),
        ("train.checkpointing", "full 12, selective 20", "full 12, selective 20"),
        ("train.checkpointing", 3, "3"),
    ],
)
def test_a_value_is_typed_as_its_row_takes_it(field: str, value: Any, text: str | bool):
    assert form.as_typed(field, value) == text
    kept = Draft(QUICKSTART).typed(field, text).values[field]
    assert repr(kept) == repr(list(value) if isinstance(value, tuple) else value)


def test_a_share_of_one_is_not_shown_as_one_block():
    assert form_answers.field_in_words("parallel.offload_blocks", 1.0) == "1.0"
    assert form_answers.field_in_words("parallel.offload_blocks", 1) == "1"
    assert form_answers.field_in_words("sample.guidance", 4.0) == "4"
