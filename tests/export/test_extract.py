"""A lora from the difference of two checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import launch
from tests.adapters.examples import Example, cached_example
from trainer.config.sections import family_names
from trainer.export.extract import main, nearest

WEIGHTS = "diffusion_pytorch_model.safetensors"
TO_K = "transformer_blocks.0.attn.to_k.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return cached_example("flux1", tmp_path_factory.mktemp("models"))


@pytest.fixture
def base(model: Example) -> Path:
    return model.family.folder


@pytest.fixture
def learned(model: Example, base: Path) -> dict[str, Tensor]:
    """The base's denoiser with an update of rank 3 in every layer that adapters change."""
    tensors = load_file(base / "transformer" / WEIGHTS)
    numbers = torch.Generator().manual_seed(0)
    for layer in model.targets(convs=False):
        weight = tensors[f"{layer.removeprefix('transformer.')}.weight"]
        up, down = (torch.randn(size, 3, generator=numbers) for size in weight.shape)
        weight += 0.01 * up @ down.T
    return tensors


@pytest.fixture
def tuned(base: Path, learned: dict[str, Tensor], tmp_path: Path) -> Path:
    """A pipeline's folder with it."""
    shutil.copytree(base, tmp_path / "tuned")
    save_file(learned, tmp_path / "tuned" / "transformer" / WEIGHTS)
    return tmp_path / "tuned"


def run(tuned: Path, base: Path, to: Path, rank: int = 3, *options: str, family: str = "flux1") -> int:
    argv = ["--extract", tuned, "--base", base, "--family", family, "--rank", rank, "--to", to, *options]
    return main([str(word) for word in argv])


def merged_error(model: Example, file: Path, base: Path, learned: dict[str, Tensor]) -> float:
    """Worst ||base + lora - tuned|| / ||tuned - base|| of the layers."""
    before = load_file(base / "transformer" / WEIGHTS)
    errors = []
    for layer, adapter in model.read(file).items():
        name = f"{layer.removeprefix('transformer.')}.weight"
        update = learned[name] - before[name]
        errors.append(float((adapter.merged(before[name]) - learned[name]).norm() / update.norm()))
    assert len(errors) == len(model.targets(convs=False))
    return max(errors)


def test_a_lora_of_the_rank_of_the_difference_is_the_difference(
    model: Example,
    base: Path,
    tuned: Path,
    learned: dict[str, Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "lora.safetensors"
    assert run(tuned, base, file, 3, "--dtype", "fp32") == 0
    assert merged_error(model, file, base, learned) <= 1e-5
    *layers, overall, path = capsys.readouterr().out.splitlines()
    assert layers[0] == "transformer.transformer_blocks.0.attn.to_q: 100.0% of the difference kept"
    assert len(layers) == 22
    assert overall == "100.0% of the difference of 22 layers kept"
    assert path == str(file)
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    assert metadata["modelspec.architecture"] == f"{model.family.model_spec}/lora"
    assert metadata["ss_network_dim"] == metadata["ss_network_alpha"] == "3"


def test_a_bf16_file_is_within_its_rounding(
    model: Example, base: Path, tuned: Path, learned: dict[str, Tensor], tmp_path: Path
) -> None:
    file = tmp_path / "lora.safetensors"
    assert run(tuned, base, file) == 0
    assert 1e-4 <= merged_error(model, file, base, learned) <= 4e-3


def test_a_smaller_rank_keeps_what_the_largest_singular_values_hold(
    base: Path, tuned: Path, learned: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tuned, base, tmp_path / "lora.safetensors", 1)
    values = torch.linalg.svdvals(learned[TO_K] - load_file(base / "transformer" / WEIGHTS)[TO_K])
    kept = float(values[0] / values.norm())
    assert f"attn.to_k: {kept:.1%} of the difference kept" in capsys.readouterr().out


@pytest.mark.parametrize("rank", [1, 4, 16, 60])
def test_the_nearest_matrix_of_a_rank_loses_no_more_than_the_best_does(rank: int) -> None:
    matrix = torch.randn(200, 60, generator=torch.Generator().manual_seed(rank))
    down, up = nearest(matrix, rank, "seed")
    assert (down.shape, up.shape) == ((rank, 60), (200, rank))
    best = float(torch.linalg.svdvals(matrix)[rank:].norm())
    assert float((matrix - up @ down).norm()) <= best + 1e-3 * float(matrix.norm())


def test_what_a_lora_cannot_hold_is_told(
    base: Path, tuned: Path, learned: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learned["proj_out.weight"] += 1
    save_file(learned, tuned / "transformer" / WEIGHTS)
    assert run(tuned, base, tmp_path / "lora.safetensors") == 0
    told = capsys.readouterr().out.splitlines()[-2]
    assert told.startswith("left out: norms, biases and layers that adapters do not change, ")
    assert told.endswith("% of the whole difference")


def as_denoiser_folder(model: Example, tensors: dict[str, Tensor], base: Path, folder: Path) -> Path:
    """As a merged or full export of this program."""
    folder.mkdir()
    shutil.copyfile(base / "transformer" / "config.json", folder / "config.json")
    save_file(tensors, folder / WEIGHTS)
    return folder


def as_diffusers_file(model: Example, tensors: dict[str, Tensor], base: Path, folder: Path) -> Path:
    file = folder.with_suffix(".safetensors")
    save_file(tensors, file)
    return file


def as_original_file(model: Example, tensors: dict[str, Tensor], base: Path, folder: Path) -> Path:
    file = folder.with_suffix(".safetensors")
    layout = model.family.layout("transformer")
    joined = {fused.name: fused.join([tensors[part] for part in fused.parts]) for fused in layout}
    save_file({name: tensor.contiguous() for name, tensor in joined.items()}, file)
    return file


@pytest.mark.parametrize("write", [as_denoiser_folder, as_diffusers_file, as_original_file])
def test_a_checkpoint_may_be_a_denoiser_alone_in_any_layout(
    model: Example,
    base: Path,
    learned: dict[str, Tensor],
    write: Callable[[Example, dict[str, Tensor], Path, Path], Path],
    tmp_path: Path,
) -> None:
    file = tmp_path / "lora.safetensors"
    assert run(write(model, learned, base, tmp_path / "tuned"), base, file, 3, "--dtype", "fp32") == 0
    assert merged_error(model, file, base, learned) <= 1e-5


def test_text_encoders_are_extracted_where_both_folders_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sdxl = cached_example("sdxl", tmp_path / "models")
    tuned = tmp_path / "tuned"
    shutil.copytree(sdxl.family.folder, tuned)
    for file in (tuned / "unet" / WEIGHTS, tuned / "text_encoder" / "model.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("to_q.weight", "q_proj.weight", "resnets.0.conv1.weight")):
                tensor += torch.ones_like(tensor)
        save_file(tensors, file, {"format": "pt"})
    to = tmp_path / "lora.safetensors"
    argv = ["--extract", str(tuned), "--base", str(sdxl.family.folder), "--family", "sdxl", "--rank", "1"]
    assert main([*argv, "--to", str(to)]) == 0
    layers = sdxl.read(to)
    assert {name.partition(".")[0] for name in layers} == {"unet", "text_encoder"}
    for name, layer in layers.items():
        torch.testing.assert_close(
            layer.update().flatten(1), torch.ones(sdxl.shapes[name]).flatten(1), rtol=1e-2, atol=0
        )


def failure(capsys: pytest.CaptureFixture[str], *arguments: object, **family: str) -> str:
    assert run(*arguments, **family) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_bad_input_is_told_before_anything_is_written(
    base: Path, tuned: Path, learned: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "lora.safetensors"
    there = tmp_path / "there.safetensors"
    there.touch()
    single = tmp_path / "single.safetensors"
    save_file(learned, single)
    assert failure(capsys, tuned, base, there) == f"--to {there}: exists; remove it or name another file"
    assert (
        failure(capsys, tuned, base, tmp_path / "x.pt")
        == f"--to {tmp_path / 'x.pt'}: expected a name that ends in .safetensors"
    )
    nowhere = tmp_path / "no" / "x.safetensors"
    assert (
        failure(capsys, tuned, base, nowhere)
        == f"--to {nowhere}: the folder {tmp_path / 'no'} does not exist; create it"
    )
    assert failure(capsys, tuned, base, to, family="flux_1") == (
        f"--family: 'flux_1' is not one of {', '.join(family_names())}; did you mean 'flux1'?"
    )
    assert failure(capsys, tuned, base, to, 0) == "--rank 0: is not a rank; expected a number from 1"
    assert failure(capsys, base, base, to) == (
        f"--extract {base}: no layer differs from --base {base}; name a tuned model"
    )
    assert failure(capsys, single, single, to) == (
        f"--base {single}: no transformer/config.json, nor has {single}; "
        "one of the two must be a diffusers folder, whose configs define the layers"
    )
    learned[TO_K] = torch.zeros(64, 32)
    save_file(learned, tuned / "transformer" / WEIGHTS)
    assert failure(capsys, tuned, base, to) == (
        f"--extract {tuned}: 'transformer.{TO_K}' is 64 x 32, in {base} it is 32 x 32; "
        "both must be checkpoints of the same model"
    )
    assert not to.exists()


def test_the_launcher_asks_for_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        launch.main(["--extract", "tuned", "--family", "flux1"])
    assert exit.value.code == 2
    assert capsys.readouterr().err == "--extract needs --base, --rank, --to; --help lists the options\n"
