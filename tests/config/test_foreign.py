"""Configs of other trainers become ours, with a line on every key: `trainer.config.foreign`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from trainer.config import families
from trainer.config.fields import slot
from trainer.config.foreign.conversion import OF_ALL, is_secret
from trainer.config.foreign.imported import (
    TOOLS,
    Imported,
    UnknownModel,
    further_files,
    imported,
    missing_words,
    words_of,
)
from trainer.config.foreign.reading import MAX_LENGTH
from trainer.config.load import load_config
from trainer.launcher import preflight
from trainer.system.errors import InputError

ROOT = Path(__file__).parents[2]
FOREIGN = Path(__file__).parent / "foreign"
EXAMPLES = ("kohya.toml", "ai-toolkit.yaml", "onetrainer.json", "simpletuner.json", "diffusion-pipe.toml")
FOLDER = Path("/home/me")
FLUX = 'pretrained_model_name_or_path = "black-forest-labs/FLUX.1-dev"\nnetwork_module = "networks.lora"\n'


def example(name: str) -> Imported:
    """An example with the files that it names."""
    texts = {name: (FOREIGN / name).read_text()}
    texts |= {other: (FOREIGN / other).read_text() for other in further_files(name, texts[name])}
    return imported(texts, FOLDER)


def kohya(lines: str, *overrides: str) -> Imported:
    return imported({"x.toml": FLUX + lines}, FOLDER, overrides)


def lines(found: Imported) -> list[str]:
    return [f"{name}: {line}" for name, several in found.lists().items() for line in several]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_each_trainer_becomes_this_config_with_this_list(name: str) -> None:
    found = example(name)
    assert "\n".join([*lines(found), "", found.text]) == (FOREIGN / name).with_suffix(".expected").read_text()


@pytest.mark.parametrize(
    ("samples", "prompts", "references", "whys"),
    [
        (
            ["a hat --ctrl_img in/a.png --w 512 --seed 3", {"prompt": "a cat -- sits", "ctrl_img_1": "/in/b.png"}],
            ["a hat", "a cat -- sits"],
            ["/home/me/in/a.png", "/in/b.png"],
            ["settings of single prompts are left out, since samples share theirs"],
        ),
        (
            [{"prompt": "a hat", "ctrl_img_1": "1.png", "ctrl_img_2": "2.png"}, {"prompt": ""}],
            ["a hat"],
            ["/home/me/1.png"],
            ["the first image of each prompt"],
        ),
        (
            ["a hat", "a cat --ctrl_img b.png"],
            ["a hat", "a cat"],
            None,
            ["no image to change is taken, since some prompts have none"],
        ),
        (["a hat", "a cat"], ["a hat", "a cat"], None, []),
    ],
)
def test_images_behind_prompts_of_ai_toolkit_are_the_references_of_samples(
    samples: list[object], prompts: list[str], references: list[str] | None, whys: list[str]
) -> None:
    model = {"name_or_path": "black-forest-labs/FLUX.1-Kontext-dev", "arch": "flux_kontext"}
    process = {"network": {"type": "lora"}, "model": model, "sample": {"samples": samples}}
    job = {"job": "extension", "config": {"name": "edits", "process": [process]}}
    found = imported({"x.yaml": yaml.safe_dump(job)}, FOLDER)
    sample = yaml.safe_load(found.text)["sample"]
    assert (sample["prompts"], sample.get("references")) == (prompts, references)
    said = [line.partition("; ")[2] for line in lines(found) if "sample.samples -> " in line]
    assert list(filter(None, said)) == whys


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_was_imported_loads_and_passes_every_check_that_needs_no_files(name: str, tmp_path: Path) -> None:
    found = example(name)
    file = tmp_path / "imported.yaml"
    file.write_text(found.file())
    loaded = load_config(file)
    assert loaded.config == found.loaded.config
    assert [*families.refused(loaded.config)] == []
    assert preflight.advice(loaded.config) == preflight.advice(found.loaded.config)


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_secret_of_a_config_is_written_or_shown(name: str) -> None:
    found = example(name)
    for secret in ("aSecret", "a secret'", "another secret", "0123456789"):
        assert secret not in found.file() + "".join(lines(found))
    if name != "ai-toolkit.yaml":
        assert any(line.endswith(": a secret") for line in lines(found))


@pytest.mark.parametrize(
    ("key", "value", "secret"),
    [
        ("huggingface_token", "x", True),
        ("wandb_api_key", "x", True),
        ("secrets.cloud.host", "x", True),
        ("webhook_config", "x", True),
        ("aws_secret_access_key", "x", True),
        ("output_name", "hf_0123456789abcdefgh", True),
        ("log_prefix", "https://me:secret@host/x", True),
        ("output_name", "ghp_0123456789abcdefghij", True),
        ("network_weights", "https://host/x.safetensors?token=abc", True),
        ("log_prefix", "https://me:my:secret@host/x", True),
        ("prompt", "as at http://a.b https://hooks.slack.com/services/x", True),
        ("prompt", "http://a.b:80/c and me@host", False),
        ("hf_0123456789abcdefgh", "1", True),
        ("max_token_length", 225, False),
        ("keep_tokens", 1, False),
        ("class_tokens", "sks dog", False),
        ("tokenizer_max_length", 77, False),
        ("huggingface_token", "", False),
    ],
)
def test_a_secret_is_known_by_its_key_or_its_looks(key: str, value: object, secret: bool) -> None:
    assert is_secret(key, value) is secret


def test_a_secret_beside_the_name_of_the_model_or_in_place_of_a_key_is_not_shown() -> None:
    token = "hf_0123456789abcdefgh"
    model = f"{{name_or_path: x.safetensors, arch: sdxl, extras_name_or_path: 'https://u:{token}@h/x'}}"
    text = f"job: extension\nconfig: {{process: [{{type: sd_trainer, model: {model}, {token}: 1}}]}}\n"
    with pytest.raises(UnknownModel) as refused:
        imported({"a.yaml": text}, Path("/data"))
    assert token not in str(refused.value)
    found = imported({"a.yaml": text}, Path("/data"), ["model.family=sdxl", "model.path=base"])
    assert token not in found.file() + "".join(lines(found))
    assert any("a key" in line and line.endswith(": a secret") for line in lines(found))


def test_thousands_of_unknown_keys_take_no_time() -> None:
    text = 'pretrained_model_name_or_path = "stabilityai/stable-diffusion-xl-base-1.0"\nmax_train_steps = 5\n'
    text += "".join(f"unknown_{number} = 1\n" for number in range(10_000))
    began = time.process_time()
    assert len(imported({"a.toml": text}, Path("/data")).left_out) >= 10_000
    assert time.process_time() - began < 4  # 5.7 s where each was compared with all


def test_a_value_of_thousands_of_addresses_takes_no_time() -> None:
    began = time.process_time()
    assert not is_secret("log_prefix", "http://" * 8000)
    assert time.process_time() - began < 1  # 5 s where the rest was searched from each; 27 minutes for a file of 1 MB


def test_a_folder_of_a_user_that_is_not_here_is_taken_as_it_stands() -> None:
    found = kohya('train_data_dir = "~nosuchuser/x"')
    assert "~nosuchuser/x" in found.file()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("network_dim = 4000", "left out: network_dim: adapter.rank: is 4000, must be >= 1 and <= 1024"),
        ('network_dim = "many"', "left out: network_dim: adapter.rank: needs a whole number, not 'many'"),
        ("optimizer_args = 7", "left out: optimizer_args: it is no list of key=value"),
        ("learning_rate = [1]", "left out: learning_rate: its value is not a number"),
        ("learning_rate = nan", "left out: learning_rate: its value is not a number"),
        ("network_dim = 8", "taken: network_dim -> adapter.rank: 8"),
        ("max_grad_norm = 0", "taken: max_grad_norm -> optim.clip_norm: 0 -> none"),
        ('resolution = "1024,768"', "changed: resolution -> data.resolution: 1024,768 -> 887; images keep their aspect "
         "ratio, at about this value squared in pixels"),
        ('optimizer_type = "Prodigy"', "changed: optimizer_type -> optim.type: Prodigy -> adamw; Prodigy is not built "
         "in; adamw takes its place"),
        ('optimizer_type = "Prodigy"\nlearning_rate = 1.0', "left out: learning_rate: 1 is a factor for prodigy, which "
         "finds the rate itself; adamw needs a rate such as 1e-4"),
        ('mixed_precision = "fp16"', "changed: mixed_precision -> train.precision: fp16 -> bf16; fp16 overflows above "
         "65504 and needs loss scaling"),
        ('dataset_config = "gone.toml"', "left out: dataset_config: the file that it names was not given; import both "
         "together"),
        ("train_data_dir = 5", "changed: folders of images -> data.path: none -> my-images; the config names none; "
         "put yours in its place"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_or_beyond_our_limits_is_said_in_the_list(given: str, line: str) -> None:
    assert line in lines(kohya(given))


def test_the_folders_of_kohyas_layout_have_the_repeats_of_their_names(tmp_path: Path) -> None:
    for name in ("10_sks dog", "2_sks dog at night", "notes"):
        (tmp_path / "train" / name).mkdir(parents=True)
    config = kohya(f'train_data_dir = "{tmp_path}/train"\nreg_data_dir = "{tmp_path}/reg"').loaded.config
    assert {Path(folder.path).name: folder.weight for folder in config.data.folders} == {
        "10_sks dog": 10.0,
        "2_sks dog at night": 2.0,
    }
    assert config.data.regularization == f"{tmp_path}/reg"


@pytest.mark.parametrize(
    ("path", "family", "base"),
    [
        ("stabilityai/stable-diffusion-xl-base-1.0", "sdxl", None),
        ("/m/sd_xl_base_1.0.safetensors", "sdxl", "stabilityai/stable-diffusion-xl-base-1.0"),
        ("C:\\\\m\\\\ponyDiffusionV6XL.safetensors", "sdxl", "stabilityai/stable-diffusion-xl-base-1.0"),
        ("/m/flux1-schnell.safetensors", "flux1", "black-forest-labs/FLUX.1-schnell"),
        ("/m/flux1-kontext.sft", "flux1", "black-forest-labs/FLUX.1-Kontext-dev"),
        ("/m/qwen_image_edit_2511_bf16.safetensors", "qwen_image", "Qwen/Qwen-Image-Edit-2511"),
        ("/m/flux2-dev.safetensors", "flux2", "black-forest-labs/FLUX.2-dev"),
        ("/m/sd3.5_large.safetensors", "sd3", "stabilityai/stable-diffusion-3.5-large"),
        ("Qwen/Qwen-Image", "qwen_image", None),
        ("Qwen/Qwen-Image-Edit-2509", "qwen_image", None),
        ("baidu/ERNIE-Image", "ernie_image", None),
        ("/m/ernie-image.safetensors", "ernie_image", "baidu/ERNIE-Image"),
        ("ideogram-ai/ideogram-4-fp8", "ideogram4", None),
        ("/m/ideogram4_fp8_scaled.safetensors", "ideogram4", "ideogram-ai/ideogram-4-fp8"),
        ("Qwen/Qwen-Image-2.1", "qwen_image_21", None),
        ("/m/qwen_image_2.1_bf16.safetensors", "qwen_image_21", "Qwen/Qwen-Image-2.1"),
        ("krea/Krea-2-Raw", "krea2", None),
        ("/m/krea2_raw_bf16.safetensors", "krea2", "krea/Krea-2-Raw"),
    ],
)
def test_the_family_follows_from_the_name_of_the_model(path: str, family: str, base: str | None) -> None:
    text = f'pretrained_model_name_or_path = "{path}"\nnetwork_module = "networks.lora"\n'
    model = imported({"x.toml": text}, FOLDER).loaded.config.model
    assert (model.family, model.base) == (family, base)


@pytest.mark.parametrize(
    "path",
    [
        "runwayml/stable-diffusion-v1-5",
        "/m/qwen_image_edit.safetensors",
        "/m/qwen_image_edit_2509.safetensors",
        "/m/flux1-fill.sft",
        "/m/flux1-kontext-inpaint.sft",
    ],
)
def test_another_model_is_asked_for_and_taken_from_the_command(path: str) -> None:
    text = f'pretrained_model_name_or_path = "{path}"\nnetwork_module = "networks.lora"\nnetwork_dim = 8\n'
    with pytest.raises(InputError, match="its base model is none that ShardStudio knows"):
        imported({"x.toml": text}, FOLDER)
    found = imported({"x.toml": text}, FOLDER, ["model.family=sdxl", "model.path=/m/other"])
    assert yaml.safe_load(found.text)["model"] == {"family": "sdxl", "path": "/m/other"}
    assert found.loaded.config.adapter.rank == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x: is empty"),
        ("# nothing\n", "x: is empty"),
        ("a: 1\n", "x: is not a config of ai-toolkit, OneTrainer, SimpleTuner, diffusion-pipe, sd-scripts (kohya)"),
        ("model:\n  family: sdxl\n", "x: is a config of ShardStudio already; use it as it is"),
        ('{"a": 1', "x:1: not JSON: Expecting ',' delimiter"),
        ("[a]\nb = \n", "x: not TOML: Invalid value (at line 2, column 5)"),
        ("a: [1\n", "x:2: not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'"),
        ("a: &x [1]\nb: [*x, *x]\n", "x:2: aliases (*name) are not supported; write the value again"),
        ('{"a": ' * 5000, "x: nested deeper than 20 levels; a config is flatter than that"),
        ('{"a": ' * 30 + "1" + "}" * 30, "x: nested deeper than 20 levels; a config is flatter than that"),
        (f"a = {'1' * 5000}\n", "x: holds a value that is no number of a config"),
        ("# " * MAX_LENGTH, f"x: longer than {MAX_LENGTH:,} characters, which no trainer's config is"),
        ("'just text'\n", "x: is not a config; it holds one value of YAML"),
        ('[{"id": "a", "type": "local", "instance_data_dir": "/x"}]', "x: no config of a run; a file of folders, "
         "prompts or an adapter's settings is imported together with the config that names it"),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_file_that_is_no_config_of_another_trainer_is_refused_in_a_sentence(text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        imported({"x": text}, FOLDER)
    assert str(refused.value) == message


def test_a_line_break_in_a_config_does_not_leave_the_comment_that_names_it() -> None:
    found = kohya('optimizer_type = "x\\ntrain:\\n  steps: 9"\n"a\\nb: 1\\u2028c\\u0085d" = 7\n')
    assert all(line.startswith("#") for line in found.file().partition("model:")[0].splitlines())
    assert "left out: a b: 1 c d: not a key that ShardStudio knows: of another version, or misspelt" in lines(found)


def test_two_configs_are_not_imported_at_once() -> None:
    with pytest.raises(InputError, match=r"^a and b: are two configs; import one at a time$"):
        imported({"a": FLUX, "b": FLUX}, FOLDER)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_table_leads_to_fields_that_exist_and_says_why_others_do_not(tool) -> None:
    known = {"text_encoders", "role", "off", "regularization"}
    rows = {
        to.field if "." in to.field else OF_ALL.get(to.field, f"data.{to.field}") for to in tool.row_fields.values()
    }
    names = {to.field for to in tool.fields.values()} | {row for row in rows if row.partition(".")[2] not in known}
    missing = [name for name in names if name.partition(".")[0] not in known and slot(tuple(name.split("."))) is None]
    assert [name for name in missing if name not in ("data.caption_prefix", "data.weight")] == []
    assert tool.fields.keys() & tool.left_out.keys() == set()
    assert tool.defaults.keys() <= tool.fields.keys()


def test_a_value_of_any_type_is_taken_or_said() -> None:
    """One of a section may be refused with its file."""
    odd = [None, True, -1, 1e400, "", "x" * 500, [], [[]], [{}], {"a": {}}, 10**40]
    for name in ("onetrainer.json", "simpletuner.json"):
        config = json.loads((FOREIGN / name).read_text())
        for at, key in enumerate(config):
            if not key.endswith(("model_type", "base_model_name", "model_family", "model_name_or_path")):
                for value in (odd[at % len(odd)], odd[(at + 3) % len(odd)]):
                    try:
                        imported({"x.json": json.dumps(config | {key: value})}, FOLDER)
                    except InputError as refused:
                        assert str(refused).startswith("x.json: a section of it")


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("adapter.rank", ("network_dim", "lora_rank", "network.linear")),
        ("train.steps", ("max_train_steps", "max_steps")),
        ("parallel.offload_blocks", ("blocks_to_swap",)),
        ("data.path", ("image_dir", "folder_path", "instance_data_dir")),
    ],
)
def test_a_field_is_found_by_the_words_of_other_trainers(field: str, words: tuple[str, ...]) -> None:
    assert set(words) <= set(words_of(field).split())
    assert any("noise_offset" in keys.split() for keys in missing_words().values())


def command(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "launch.py", "--import", *argv], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_the_command_writes_a_preset_beside_what_is_there_and_replaces_nothing(tmp_path: Path) -> None:
    source = FOREIGN / "kohya.toml"
    for name in ("kohya-imported.yaml", "kohya-imported-2.yaml"):
        done = command(str(source), "train.seed=7", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"written: {name}, from a config of sd-scripts (kohya); train it with" in done.stdout
        assert "  wandb_api_key, huggingface_token: a secret\n" in done.stdout
        config = load_config(tmp_path / name).config
        assert (config.train.seed, config.data.folders[0].path) == (7, str(FOREIGN / "pictures" / "dog"))
    refused = command(str(source), "--write", "kohya-imported.yaml", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (2, "--write: kohya-imported.yaml exists; name another file\n")
    nowhere = command(str(source), "--write", "nowhere/own.yaml", cwd=tmp_path)
    said = "--write: nowhere is not a folder; make it, or name another file\n"
    assert (nowhere.returncode, nowhere.stderr) == (2, said)
    gone = command("gone.toml", cwd=tmp_path)
    assert (gone.returncode, gone.stderr) == (2, "gone.toml: no such file\n")
