"""Every preset loads, says what it is for, and trains a tiny model of its architecture with its own settings."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open

from tests.plan.needs import LINE, rows, said_by_preset, said_by_table
from tests.runs import alone, make_run, make_text, steps_of, train
from trainer.config.load import ConfigError, load_config, stage_config
from trainer.config.schema import RunConfig
from trainer.config.sections import family_names
from trainer.launcher import preflight
from trainer.models import families
from trainer.models.build import build_model
from trainer.models.parts.published import published_folder
from trainer.run.events import EventReader, LengthEvent, WarningEvent, latest_steps
from trainer.run.folder import RunDir

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "presets"
QUICKSTART = PRESETS / "quickstart.yaml"
ALL = sorted(preset.stem for preset in PRESETS.glob("*.yaml"))
STAGED = ("large_scale_8x8", "multi_node_4x8", "single_node_8gpu")
"""Language models, in stages."""
TO_CHAT = "qwen3-1.7b-base-to-chat-2x24gb"
"""A language model, in stages on text, conversations and pairs of answers."""
TEXT = (*STAGED, TO_CHAT, "qwen3-8b-qlora-1x24gb")
"""Language models."""
NAMES = [name for name in ALL if name not in TEXT]
QUICK = ("flux2-dev-lora-nf4-2x24gb", "bagel-7b-mot-full-8x80gb")
"""With a quantized base, and with questions: trained in every run of the tests."""
GPUS = re.compile(r"-(?:(\d+)x)?(\d+)gpu$")
CARDS = re.compile(r"-(\d+)x\d+gb$")
FOR_GPUS = [name for name in NAMES if GPUS.search(name) or CARDS.search(name)]
SMALL = (
    *("model.path=tiny", "parallel.device=cpu", "data.resolution=32"),
    *("train.steps=1", "optim.warmup=0", "sample.size=[32,32]", "sample.steps=1"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of runs that share a cache, with eight of the quickstart's pictures in `pictures`, and in `before` as they
    were before an edit."""
    root = tmp_path_factory.mktemp("presets")
    (root / "pictures").mkdir()
    (root / "before").mkdir()
    for picture in sorted((PRESETS / "quickstart").glob("*.png"))[:8]:
        shutil.copy(picture, root / "pictures")
        with Image.open(picture) as image:
            image.convert("L").convert("RGB").save(root / "before" / picture.name)
        caption = Path(shutil.copy(picture.with_suffix(".txt"), root / "pictures")).read_text(encoding="utf-8")
        asked = {"image": f"pictures/{picture.name}", "question": "What is it?", "answer": caption}
        with (root / "questions.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(asked)}\n")
    return root


def load(name: str, *overrides: str) -> RunConfig:
    return load_config(PRESETS / f"{name}.yaml", overrides).config


def small(name: str, root: Path, *overrides: str) -> tuple[str, ...]:
    asks = bool(load(name).data.questions)  # and a picture in addition, so that all that is trained is used
    questions = (f"data.questions={root / 'questions.jsonl'}", "train.batch_size=2") if asks else ()
    packs = ("data.pack_tokens=64",) if load(name).data.pack_tokens else ()
    before = (f"data.references={root / 'before'}",) if load(name).data.references else ()
    return (*SMALL, f"data.path={root / 'pictures'}", *questions, *packs, *before, *overrides)


def command(name: str, root: Path, *overrides: str) -> list[str]:
    argv = [sys.executable, "launch.py", "--headless", f"presets/{name}.yaml", "--runs", str(root)]
    return [*argv, *small(name, root, *overrides)]


def assert_exported(output: str) -> None:
    """The last line names an adapter file, or the folder of a model."""
    path = Path(output.splitlines()[-1])
    files = [path] if path.is_file() else list(path.rglob("*.safetensors"))
    assert files
    for name in files:
        with safe_open(name, "pt") as file:
            assert len(list(file.keys())) > 10


def test_there_is_a_preset_for_each_kind_of_hardware() -> None:
    assert [name for name in NAMES if name.startswith("flux2")] == [
        "flux2-dev-lora-2x8gpu",
        "flux2-dev-lora-4gpu",
        "flux2-dev-lora-8gpu",
        "flux2-dev-lora-int8-4gpu",
        "flux2-dev-lora-nf4-1x24gb",
        "flux2-dev-lora-nf4-2x24gb",
        "flux2-klein-4b-lora-1gpu",
        "flux2-klein-9b-lora-2gpu",
        "flux2-klein-9b-lora-nf4-1x12gb",
    ]


def test_there_is_a_preset_for_each_family() -> None:
    assert {load(name).model.family for name in ALL} == set(family_names())


@pytest.mark.parametrize("name", ALL)
def test_a_preset_starts_with_the_line_by_which_editors_find_the_schema(name: str) -> None:
    lines = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# yaml-language-server: $schema=schema.json"
    method = {"none": "full fine-tune", "lora": "LoRA", "locon": "LoCon", "loha": "LoHa"}[load(name).adapter.type]
    assert lines[1].startswith("# A language model of " if name in STAGED else f"# A {method} of ")


def test_the_quickstart_is_ready_to_run() -> None:
    preflight.check_named(load_config(QUICKSTART))


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_preset_for_gpus_asks_for_the_user_s_pictures(name: str, tmp_path: Path) -> None:
    (tmp_path / "presets").mkdir()
    loaded = load_config(Path(shutil.copy(PRESETS / f"{name}.yaml", tmp_path / "presets")))
    with pytest.raises(ConfigError) as refused:
        preflight.check_named(loaded)
    missing = {"data.path": f"no folder '{tmp_path / 'my-images'}'; name the folder with the images"}
    if loaded.config.data.questions:
        missing["data.questions"] = f"no file '{tmp_path / 'my-questions.jsonl'}'; name a .jsonl file"
    if loaded.config.data.references:
        missing["data.references"] = f"no folder '{tmp_path / 'my-images-before'}'; name the folder with the images"
    assert str(refused.value) == "\n".join(f"{loaded.where(field)}: {field}: {why}" for field, why in missing.items())


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_preset_for_gpus_uses_those_of_its_name_with_one_image_each(name: str) -> None:
    cfg, nodes, cards = load(name), GPUS.search(name), CARDS.search(name)
    named = (1, int(cards[1])) if cards else (int(nodes[1] or 1), int(nodes[2])) if nodes else None
    assert (cfg.parallel.nodes, cfg.parallel.devices) == named
    assert cfg.train.batch_size == cfg.parallel.world_size
    assert cfg.train.micro_batch == 1
    assert cfg.parallel.device == "cuda"
    architecture = cfg.model.options.architecture
    assert architecture == "base" or architecture in name


@pytest.mark.parametrize("name", [name for name in ALL if load(name).quantize.format != "none"])
def test_what_a_preset_says_of_its_base_is_what_the_published_model_takes(name: str, tmp_path: Path) -> None:
    cfg = load(name, f"model.path={published_folder(load(name).model, tmp_path)}")
    built = build_model(cfg, families.make(cfg, tmp_path))
    held = sum(p.numel() * p.element_size() for p in built.module.parameters() if not p.requires_grad)
    said = re.search(r"([\d.]+) GiB of the base", (PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert said is not None
    assert float(said[1]) == pytest.approx(held / cfg.parallel.devices / 2**30, abs=0.006)


@pytest.mark.parametrize("name", FOR_GPUS)
def test_what_a_preset_and_the_tables_say_of_its_needs_is_what_the_plan_says(name: str) -> None:
    again = "write it again: python -m tests.plan.needs"
    said = LINE.search((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert said is not None
    assert said[0] == said_by_preset(name, said["where"]), again
    own = [row for row in rows() if row.startswith(f"| [{name}]")]
    assert own
    assert all(row == said_by_table(row) for row in own), again


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_a_preset_trains_a_tiny_model_with_its_own_settings(name: str, root: Path) -> None:
    cfg = load(name, *small(name, root, "parallel.devices=1", "parallel.nodes=1"))
    outcome = train(alone(), cfg, make_run(root, cfg, name))
    assert len(steps_of(outcome.events)) == 1
    # One factor of an adapter starts at zero: what is not has been trained.
    starts_at_zero = [weight for key, weight in outcome.weights.items() if ".lora_B." in key or ".hada_w2_b." in key]
    assert bool(starts_at_zero) == (cfg.adapter.type != "none")
    assert sum(not weight.any() for weight in starts_at_zero) <= len(starts_at_zero) / 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in NAMES if load(name).parallel.nodes == 1 < load(name).parallel.devices]
)
def test_a_preset_for_several_gpus_trains_and_exports_on_two_ranks(name: str, root: Path) -> None:
    argv = command(name, root, "parallel.devices=2")
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert_exported(done.stdout)


@pytest.mark.slow
def test_the_preset_for_two_machines_trains_with_the_command_it_prints_for_the_other_one(root: Path) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    argv = command("flux2-dev-lora-2x8gpu", root, "parallel.devices=1", f"parallel.rendezvous=localhost:{port}")
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        label, _, printed = first.stdout.readline().partition(": ")
        assert label == "on each other node"
        second = subprocess.run(shlex.split(printed), cwd=ROOT, capture_output=True, check=False, timeout=240)
        output = first.stdout.read()
    assert (first.returncode, second.returncode) == (0, 0)
    assert_exported(output)


# Language models


@pytest.fixture
def text_root(tmp_path: Path) -> Path:
    """The folders that the presets of language models name, next to that of the presets."""
    (tmp_path / "presets").mkdir()
    for folder in ("my-text", "my-held-out-text", "my-instructions"):
        make_text(tmp_path / folder, count=6)
    return tmp_path


def small_stages(name: str, root: Path) -> Path:
    """The preset with stages of one step."""
    text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
    for field, value in {"train.steps": 1, "train.batch_size": 2}.items():
        text, count = re.subn(rf"{field}: \d+", f"{field}: {value}", text)
        assert count == (name in STAGED)
    file = root / "presets" / f"{name}.yaml"
    file.write_text(text, encoding="utf-8")
    return file


SMALL_TEXT = (
    *("model.path=tiny", "parallel.device=cpu", "data.length=32", "sample.prompts=[The]", "sample.tokens=2"),
    *("train.steps=1", "train.batch_size=2", "optim.warmup=0", "parallel.nodes=1", "parallel.devices=2"),
)


@pytest.mark.parametrize("name", STAGED)
def test_a_preset_in_stages_uses_the_machines_and_gpus_of_its_name(name: str) -> None:
    cfg = load(name)
    found = re.search(r"_(?:(\d+)x)?(\d+)(?:gpu)?$", name)
    assert found is not None
    assert (cfg.parallel.nodes, cfg.parallel.devices) == (int(found[1] or 1), int(found[2]))
    assert cfg.train.checkpointing == "auto"
    assert cfg.parallel.prefetch_forward > 0 < cfg.parallel.prefetch_backward
    assert cfg.parallel.cpu_offload == (name == "large_scale_8x8")


@pytest.mark.parametrize("name", TEXT)
def test_what_a_preset_for_text_says_of_its_needs_is_what_the_plan_says(name: str) -> None:
    said = LINE.search((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert said is not None
    assert said[0] == said_by_preset(name, said["where"]), "write it again: python -m tests.plan.needs"


@pytest.mark.parametrize("name", [name for name in TEXT if name != TO_CHAT])
def test_a_preset_for_text_trains_a_tiny_model(name: str, text_root: Path) -> None:
    cfg = load_config(small_stages(name, text_root), [*SMALL_TEXT, "parallel.devices=1"]).config
    for number, part in enumerate([stage_config(cfg, index) for index in range(len(cfg.stages))] or [cfg]):
        outcome = train(alone(), part, make_run(text_root, part, f"{name}-{number}"))
        assert len(steps_of(outcome.events)) == 1


@pytest.mark.slow
def test_a_preset_in_stages_trains_and_exports_on_two_ranks(text_root: Path) -> None:
    preset = small_stages("single_node_8gpu", text_root)
    argv = [sys.executable, "launch.py", "--headless", str(preset), "--runs", str(text_root / "runs"), *SMALL_TEXT]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert_exported(done.stdout)


SMALL_CHAT = (
    *("model.path=tiny", "parallel.device=cpu", "data.length=256", "data.chat_template=mistral"),
    *("train.batch_size=4", "train.precision=fp32", "optim.warmup=0", "sample.prompts=[The]", "sample.tokens=2"),
    *("sample.every=1000", "export.dtype=fp32"),
)


@pytest.fixture(scope="module")
def chat_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preset in `presets`, and next to it a folder for each of its stages: .txt, messages and pairs."""
    root = tmp_path_factory.mktemp("chat")
    for folder in ("presets", "my-text", "my-conversations", "my-preferences"):
        (root / folder).mkdir()
    shutil.copy(PRESETS / f"{TO_CHAT}.yaml", root / "presets")
    for number in range(3):
        (root / "my-text" / f"{number}.txt").write_text(f"Page {number} of a book. " * 20, encoding="utf-8")
    talks = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} it is."}]}
        for n in range(20)
    ]
    pairs = [{"prompt": f"{n}? ", "chosen": f"{n}, gladly.", "rejected": "No."} for n in range(12)]
    for name, rows_of_json in (("conversations", talks), ("preferences", pairs)):
        lines = "".join(f"{json.dumps(row)}\n" for row in rows_of_json)
        (root / f"my-{name}" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return root


def test_the_preset_from_text_to_chat_names_data_for_each_stage_and_compares_with_the_model_of_the_second(
    chat_root: Path,
) -> None:
    cfg = load_config(chat_root / "presets" / f"{TO_CHAT}.yaml").config
    parts = [stage_config(cfg, index) for index in range(3)]
    folders = ["my-text", "my-conversations", "my-preferences"]
    assert [part.data.path for part in parts] == [str(chat_root / folder) for folder in folders]
    assert [part.adapter.type for part in parts] == ["none", "none", "lora"]
    assert [part.objective.dpo_beta for part in parts] == [None, None, 0.1]
    assert cfg.stage_epochs == (1, 2, 1)
    assert (parts[0].export_what, parts[2].export_what) == ("full", "merged")
    assert (cfg.parallel.nodes, cfg.parallel.devices) == (1, 2)


@pytest.mark.slow
def test_the_preset_from_text_to_chat_trains_its_three_stages_on_two_ranks(chat_root: Path) -> None:
    argv = [sys.executable, ROOT / "launch.py", "--headless", f"presets/{TO_CHAT}.yaml", *SMALL_CHAT]
    done = subprocess.run(
        [*argv, "--run-dir", "run"], cwd=chat_root, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stderr
    run = RunDir.open(chat_root / "run")
    events = EventReader(run.events_file).read()
    lengths = [event for event in events if isinstance(event, LengthEvent)]
    passes = [math.ceil(epochs * event.epoch_steps) for epochs, event in zip((1, 2, 1), lengths, strict=True)]
    assert [event.steps for event in lengths] == passes
    steps = latest_steps(events)
    assert [event.step for event in steps] == list(range(1, sum(event.steps for event in lengths) + 1))
    ends = [event for event in steps if event.metrics]
    assert len(ends) == lengths[2].steps
    # The adapter begins at zero, so that the model begins as its own reference: the margin of every pair is 0.
    assert ends[0].loss == pytest.approx(math.log(2), abs=1e-6)
    assert ends[0].metrics["margins"] == pytest.approx(0, abs=1e-6)
    assert not [event.message for event in events if isinstance(event, WarningEvent)]
    assert_exported(done.stdout)
    assert sorted(path.name for path in run.export.iterdir()) == ["my-chat-merged"]
