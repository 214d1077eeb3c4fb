"""Bad input through the real command: one message that names file or field and the remedy, and exit code 2."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.commands import PRESET, launch_py
from tests.runs import alone, make_pictures, make_run, run_config, train
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models.families import get
from trainer.system.errors import InputError


def preset_with(old: str, new: str) -> Callable[[Path], None]:
    assert old in PRESET
    return lambda folder: (folder / "preset.yaml").write_text(PRESET.replace(old, new))


def picture(name: str, content: bytes | None) -> Callable[[Path], None]:
    """Damage a file of the dataset; None removes it."""

    def damage(folder: Path) -> None:
        file = folder / "pictures" / name
        file.unlink() if content is None else file.write_bytes(content)

    return damage


def empty(folder: Path) -> None:
    for file in (folder / "pictures").iterdir():
        file.unlink()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("bad_input") / "pictures", count=4)


@pytest.fixture
def folder(tmp_path: Path, pictures: Path) -> Path:
    """A folder with a preset and its dataset, both sound."""
    shutil.copytree(pictures, tmp_path / "pictures")
    (tmp_path / "preset.yaml").write_text(PRESET)
    return tmp_path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (preset_with("rank: 4", "rnk: 4"), "preset.yaml:6: adapter.rnk: unknown field; did you mean 'adapter.rank'?"),
        (
            preset_with("strategy: full", "strategy: ddp\n  cpu_offload: true"),
            "preset.yaml:18: parallel.cpu_offload: true needs parallel.strategy full, grad_op or hybrid, not ddp",
        ),
        (
            lambda folder: (folder / "preset.yaml").rename(folder / "presets.yaml"),
            "preset.yaml: no such file; did you mean 'presets.yaml'?",
        ),
        (
            preset_with("path: pictures", "path: picture"),
            "preset.yaml:8: data.path: no folder '{folder}/picture'; did you mean '{folder}/pictures'?",
        ),
        (empty, "data.path: {folder}/pictures: the folder is empty; put images with captions into it"),
        (
            picture("01.txt", None),
            "{folder}/pictures/01.png: no caption; write it into 01.txt, or set data.missing_caption: empty",
        ),
        (
            picture("01.txt", "ein Gemälde".encode("latin-1")),
            "{folder}/pictures/01.txt: byte 7 (0xe4) is not UTF-8; save the file as UTF-8",
        ),
        (
            picture("01.txt", b"word " * 200_000),
            "{folder}/pictures/01.txt: 1000000 bytes are too many for a caption, the limit is 65536; "
            "shorten or remove it",
        ),
        (
            picture("01.png", b"no picture"),
            "{folder}/pictures/01.png: cannot be read (not an image of a known format); replace or remove it, "
            "or set data.bad_image: warn",
        ),
    ],
    ids=["key", "rule", "preset", "dataset", "empty", "caption", "utf8", "megabyte", "header"],
)
def test_what_is_found_before_a_rank_is_started_leaves_nothing_behind(folder, damage, message):
    damage(folder)
    before = sorted(folder.rglob("*"))
    done = launch_py(folder, "--headless", "preset.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == message.format(folder=folder) + "\n"
    assert sorted(folder.rglob("*")) == before


def test_a_rendezvous_port_that_another_program_holds_is_told_before_anybody_waits_for_it(folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        done = launch_py(folder, "--headless", "preset.yaml", "parallel.nodes=2", f"parallel.rendezvous={place}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"parallel.rendezvous: another program uses {place}; end it or choose another port\n"
    assert not (folder / "runs").exists()


@pytest.fixture
def truncated(folder) -> Path:
    """A picture of the dataset with a whole header and half of its pixels."""
    file = folder / "pictures" / "01.png"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 2 // 3])
    return file


UNREADABLE = "{file}: cannot be read (image file is truncated); replace or remove it"


@pytest.mark.slow
def test_a_truncated_image_is_told_once_for_two_ranks_and_left_out_where_that_is_asked_for(folder, truncated):
    stopped = launch_py(folder, "--headless", "preset.yaml", "--run-dir", "runs/fox")
    assert stopped.returncode == 2
    assert stopped.stderr == f"error: {UNREADABLE.format(file=truncated)}, or set data.bad_image: warn\n"
    warned = launch_py(folder, "--resume", "runs/fox", "data.bad_image=warn")
    assert (warned.returncode, warned.stderr) == (0, "")
    told = warned.stdout.splitlines()
    assert told.count(f"warning: left out: {UNREADABLE.format(file=truncated)}") == 1
    assert told[-1] == f"{folder}/runs/fox/export/fox.safetensors"


def missing(tensors: dict) -> None:
    del tensors["x_embedder.weight"]


def of_another_shape(tensors: dict) -> None:
    tensors["x_embedder.weight"] = tensors["x_embedder.weight"][:-1].contiguous()


@pytest.fixture
def model(folder) -> Path:
    """A sound diffusers folder."""
    return get("flux2")(ModelConfig(family="flux2", path="tiny"), ObjectiveConfig(), folder).folder.rename(
        folder / "model"
    )


def damage_weights(model: Path, damage: Callable[[dict], None]) -> None:
    file = model / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)


OTHER_WEIGHTS = pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            missing,
            "{model}/transformer: 1 of 33 tensors are missing, first 'x_embedder.weight'; "
            "the weights belong to another model, or the download is incomplete: download the folder again",
        ),
        (
            of_another_shape,
            "{model}/transformer/diffusion_pytorch_model.safetensors: 'x_embedder.weight' has shape [63, 16], "
            "the model needs [64, 16]; the weights and the config.json next to them belong to different models: "
            "download the folder again",
        ),
    ],
    ids=["missing", "shape"],
)


@OTHER_WEIGHTS
def test_weights_that_are_not_those_of_the_model_are_refused(folder, model, damage, message):
    damage_weights(model, damage)
    cfg = run_config(folder / "pictures", model__path=str(model))
    with pytest.raises(InputError) as error:
        train(alone(), cfg, make_run(folder, cfg, "fox"))
    assert str(error.value) == message.format(model=model)
