"""What a rank would refuse is refused before one starts: random configs, and each way in which a run is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from app.form import draft as form
from app.form.draft import Draft
from tests.launcher.random_configs import load, valid
from tests.runs import alone, make_pictures, make_run, make_text, run_config, text_config, train
from trainer.config.load import ConfigError, ConfigFile, dump_config, load_config
from trainer.export.export import export
from trainer.launcher import commands, preflight
from trainer.launcher.queue import Queue
from trainer.models import families
from trainer.system import installation
from trainer.system.errors import InputError
from trainer.system.installation import PRESETS
from trainer.train.early_checks import check_fitting, check_model

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = "import sys, launch; code = launch.main(sys.argv[1:]); assert 'torch' not in sys.modules; exit(code)"
READS = (
    "objective.density, objective.dpo_beta, objective.logit_mean, objective.logit_std, objective.mode_scale, "
    "objective.shift, objective.shift_factor"
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures", 4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def refusal(loaded: ConfigFile, cache: Path) -> str:
    """Why a rank would not train it; "" if it would."""
    try:
        check_model(loaded.config, cache)
    except InputError as error:
        return str(error)
    return installation.missing_package(loaded.config.optim.type)


def is_refused_early(loaded: ConfigFile) -> bool:
    """Whether it is refused without torch, or passed on to the process that builds the model."""
    try:
        preflight.check_named(loaded)
        preflight.check_machine(loaded)
    except InputError:
        return True
    return preflight.needs_model(loaded.config)


# Random configs


def test_what_a_rank_would_refuse_of_random_configs_is_known_before(pictures: Path, cache: Path) -> None:
    refused = [
        (family, fields, why) for family, fields, loaded in valid(5, pictures) if (why := refusal(loaded, cache))
    ]
    assert len(refused) >= 20
    assert [one for one in refused if not is_refused_early(load(one[0], one[1], pictures))] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning")  # of torch's compiler
def test_random_configs_train_and_export_or_are_refused_before_a_rank_starts(pictures: Path, tmp_path: Path) -> None:
    ended = {"refused": 0, "trained": 0}
    for number, (family, fields, loaded) in enumerate(valid(20, pictures)):
        try:
            preflight.check(loaded, cache=tmp_path / "cache")
        except InputError:
            ended["refused"] += 1
            continue
        run = make_run(tmp_path, loaded.config, f"{number}-{family}")
        try:
            train(alone(), loaded.config, run)
            if loaded.config.export_what != "none":
                export(loaded.config, run, tmp_path / "cache")
        except InputError as error:
            pytest.fail(f"{family} {fields}: {error}")
        ended["trained"] += 1
    assert sum(ended.values()) == 140 and min(ended.values()) >= 30, ended


# Every door


USED = "is not used by this kind of model; leave it out. It reads"
PRESET = """\
adapter: {type: dora}
data: {path: PICTURES, resolution: 64}
model:
  family: flux2
  train: {vae: adapter}
  options:
    text_windows: 2
objective:
  mse_weight: 2
  guidance: 3.5
sample:
  size: [100, 70]
export:
  format: kohya
"""
WHOLE = {"adapter.type": "none", "model.train": {"transformer": "full"}}
NOTHING_TO_STORE = (
    "quantize.format: nf4 is for frozen layers, but the whole model is trained; train an adapter (adapter.type), or "
    "set none"
)
MISTAKES = {
    5: "model.train: 'vae' is not one of transformer",
    7: f"model.options.text_windows: {USED} model.options.architecture, model.options.distilled, "
    "model.options.max_tokens, model.options.text_layers",
    9: f"objective.mse_weight: {USED} {READS}",
    10: f"objective.guidance: {USED} {READS}",
    12: "sample.size: 100 x 70 is not in multiples of 16 pixels; use 96 x 64",
    14: "export.format: kohya cannot carry a dora adapter of this kind of model, only lora and locon; use auto, "
    "comfyui, lycoris, peft",
}
"""{line of PRESET: what is wrong with it}"""


@pytest.fixture
def preset(tmp_path: Path, pictures: Path) -> Path:
    file = tmp_path / "wrong.yaml"
    file.write_text(PRESET.replace("PICTURES", str(pictures)), encoding="utf-8")
    return file


def test_the_command_line_names_all_that_the_family_does_not_read_with_its_line(preset: Path) -> None:
    run = preset.with_name("run")
    argv = [sys.executable, "-c", WITHOUT_TORCH, "--headless", str(preset), "--run-dir", str(run)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not run.exists()
    assert sorted(done.stderr.splitlines()) == sorted(f"{preset}:{line}: {why}" for line, why in MISTAKES.items())


def test_the_form_shows_them_at_their_fields(preset: Path) -> None:
    errors = form.check_with_files(form.check(Draft(preset))).errors
    assert {field: errors[field] for field in ("objective.mse_weight", "sample.size")} == {
        "objective.mse_weight": f"{USED} {READS}",
        "sample.size": "100 x 70 is not in multiples of 16 pixels; use 96 x 64",
    }


def test_the_queue_does_not_start_such_a_run(preset: Path) -> None:
    queue = Queue(preset.with_name("runs"))
    queue.add(load_config(preset).config)
    with queue.starting() as may_start:
        assert may_start
        (entry,) = queue.start_next()
    assert not entry.run and f"objective.mse_weight: {USED} {READS}" in entry.error


def test_a_model_of_the_family_that_does_not_read_a_field_refuses_it_by_its_own_config(pictures: Path) -> None:
    fields = {"model.path": "demo", "objective.guidance": 3.5}
    with pytest.raises(ConfigError, match=rf"^command line: objective\.guidance: {USED}"):
        preflight.check(load("flux2", fields, pictures))


def test_an_export_that_the_family_has_no_file_for_starts_no_process(tmp_path: Path) -> None:
    cfg = text_config(make_text(tmp_path / "text"), export={"what": "adapter", "format": "comfyui"})
    with pytest.raises(InputError, match=r"^export\.format: comfyui is for programs that do not support this model"):
        commands.begin_export(make_run(tmp_path, cfg, "run"), cfg)


@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("sdxl", {"data.resolution": 24}, "data.resolution: 24 is below the 32 pixels this model works in; raise it"),
        (
            "sd3",
            {"data.resolution": 4000},
            "data.resolution: 4000 is more than the 3072 pixels that sd3 supports; lower it",
        ),
        (
            "sd3",
            {"sample.references": ["PICTURE"]},
            "sample.references: models of family sd3 read no reference images; remove the field",
        ),
        (
            "flux1",
            {"model.options.distilled": True},
            "model.options.distilled: true, but this model has a guidance embedding: it is sampled with one call per "
            "step at sample.guidance; leave it empty, and set sample.steps",
        ),
        ("flux2", {**WHOLE, "quantize.format": "nf4"}, NOTHING_TO_STORE),
        ("z_image", {**WHOLE, "quantize.format": "int8"}, NOTHING_TO_STORE.replace("nf4", "int8")),
        (
            "sdxl",
            WHOLE
            | {"model.train": dict.fromkeys(("unet", "text_encoder", "text_encoder_2"), "full")}
            | {"parallel.offload_blocks": 2},
            "parallel.offload_blocks: 2 is for frozen weights, but the whole model is trained; train an adapter "
            "(adapter.type), or set 0 and parallel.cpu_offload: true",
        ),
    ],
)
def test_what_one_family_or_model_cannot_do_is_refused_without_it(
    pictures: Path, family: str, fields: dict[str, Any], why: str
) -> None:
    given = json.loads(json.dumps(fields).replace("PICTURE", str(pictures / "00.png")))
    with pytest.raises(ConfigError) as caught:
        preflight.check(load(family, given, pictures))
    assert str(caught.value) == f"command line: {why}"


def test_a_small_model_shrinks_its_buckets_to_the_positions_that_it_has(tmp_path: Path, pictures: Path) -> None:
    cfg = load("sd3", {"data.resolution": 2048, "train.steps": 1}, pictures).config
    train(alone(), cfg, make_run(tmp_path, cfg, "run"))


# This machine


def test_a_missing_package_of_the_optimizer_is_named_with_its_line(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(installation.EXTRAS, "adamw8bit", ("no_such_package", "eightbit"))
    with pytest.raises(ConfigError) as caught:
        preflight.check(load("flux2", {"optim.type": "adamw8bit"}, pictures))
    assert str(caught.value) == (
        "command line: optim.type: adamw8bit needs the package no_such_package; pip install 'shardstudio[eightbit]', "
        "or use adamw"
    )


@pytest.mark.parametrize("is_folder", [False, True], ids=["a file", "a folder of peft"])
def test_an_adapter_to_start_from_that_is_not_a_safetensors_file_is_refused(
    pictures: Path, tmp_path: Path, is_folder: bool
) -> None:
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"PK\x03\x04 a zip of torch")
    start = tmp_path if is_folder else file
    with pytest.raises(ConfigError) as caught:
        preflight.check(load("flux2", {"adapter.start": str(start)}, pictures))
    assert str(caught.value) == (
        f"command line: adapter.start: {file}: not a safetensors file; convert it to .safetensors, or download it again"
    )
    preflight.check_machine(load("flux2", {"adapter.start": str(start)}, pictures), is_new=False)


def test_a_reference_of_a_sample_that_is_not_an_image_is_refused(pictures: Path, tmp_path: Path) -> None:
    file = tmp_path / "reference.png"
    file.write_text("not an image", encoding="utf-8")
    references = {"sample.prompts": ["a fox"], "sample.references": [str(file)]}
    with pytest.raises(InputError) as caught:
        preflight.check(load("flux2", references, pictures))
    assert str(caught.value) == (
        f"sample.references[0]: {file}: cannot be read (not an image of a known format); replace or remove it"
    )


# The model, built without weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("bagel", {"model.train": {"connectors": "adapter"}}, r"adapter\.targets: bagel recommends no layers of "),
        (
            "bagel",
            {"adapter.type": "none", "quantize.format": "fp8"}
            | {"model.train": dict.fromkeys(("understanding", "generation", "vision"), "full")},
            r"quantize\.format: fp8 is for frozen layers, but none is left to store; train less",
        ),
        (
            "sdxl",
            {"adapter.type": "none", "model.train": {"unet": "full"}, "quantize.format": "nf4"},
            r"quantize\.format: nf4 is for frozen layers, but none is left to store; train less",
        ),
        (
            "sdxl",
            {"adapter.type": "none", "model.train": {"unet": "full"}, "parallel.offload_blocks": 2},
            r"parallel\.offload_blocks: 2 is for blocks with frozen weights, but none has any; train less",
        ),
        ("flux2", {"adapter.targets": ["to_qq"]}, r"adapter\.targets: 'to_qq' matches no layer of flux2; nearest: "),
    ],
)
def test_what_one_model_cannot_do_is_refused_before_a_run_folder_is_made(
    pictures: Path, tmp_path: Path, family: str, fields: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"^(command line|preset.yaml): {why}"):
        preflight.new_run(load(family, fields, pictures), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_an_adapter_of_another_model_to_start_from_is_refused_before_a_run_folder_is_made(
    pictures: Path, tmp_path: Path
) -> None:
    file, layer = tmp_path / "other.safetensors", "transformer.blocks.0.attn.to_q"
    save_file({f"{layer}.lora_A.weight": torch.ones(4, 48), f"{layer}.lora_B.weight": torch.ones(48, 4)}, file)
    with pytest.raises(ConfigError) as caught:
        preflight.new_run(load("flux2", {"adapter.start": str(file)}, pictures), tmp_path / "runs")
    message = str(caught.value)
    assert message.startswith(f"command line: adapter.start: {file}: '{layer}' (48 x 48) is not a layer of this model")
    assert message.endswith("; the file was made for another model")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("field", ["data__path", pytest.param("data__validation", marks=pytest.mark.slow)])
def test_text_of_which_every_document_is_too_long_is_refused_before_a_run_folder_is_made(
    tmp_path: Path, field: str
) -> None:
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"prompt": "a" * 300, "completion": "b"}), encoding="utf-8")
    cfg = text_config(make_text(tmp_path / "text"), data__length=128, **{field: str(talk)})
    assert preflight.needs_model(cfg)
    file = tmp_path / "long.yaml"
    file.write_text(dump_config(cfg), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        preflight.new_run(load_config(file), tmp_path / "runs")
    assert str(caught.value) == (
        f"{talk}: every document is left out (1 longer than data.length 128, the first {talk}:1); raise data.length, "
        "or correct the files"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("format", ["comfyui", "single_file"])
def test_a_format_that_the_family_does_not_have_is_no_mistake_of_a_run_that_exports_nothing(
    tmp_path: Path, cache: Path, format: str
) -> None:
    cfg = text_config(make_text(tmp_path / "text"), export={"what": "none", "format": format})
    check_model(cfg, cache)
    with pytest.raises(InputError, match=rf"^export\.format: models of causal_lm have no {format}; use auto$"):
        check_model(text_config(tmp_path / "text", export={"what": "merged", "format": format}), cache)


def test_a_plain_config_starts_no_process_that_imports_torch(pictures: Path, tmp_path: Path) -> None:
    assert not preflight.needs_model(run_config(pictures))
    assert not preflight.needs_model(load_config(PRESETS / "quickstart.yaml").config)
    short, long = {"prompt": "\u0436" * 200, "completion": "b"}, {"prompt": "a" * 3000, "completion": "b"}
    for rows in ([short], [long, short], [{"text": "a" * 9000}], [{**short, "notes": "a" * 3000}]):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        assert not preflight.needs_model(text_config(file, data__length=512))
    for row in (long, {**long, "prompt": f"\ud83d{long['prompt']}"}):
        file.write_text(json.dumps(row), encoding="utf-8")
        assert preflight.needs_model(text_config(file, data__length=512))


def test_plain_text_is_not_tokenized_before_a_run_starts(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut and never left out, and a file may have gigabytes."""
    cfg = text_config(make_text(tmp_path / "text"))
    family = families.make(cfg, cache)

    def fail(self: Any, text: str) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(type(family), "tokenize", fail)
    check_fitting(cfg, family)
