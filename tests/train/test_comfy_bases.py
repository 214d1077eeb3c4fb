"""Runs on single files as ComfyUI stores them in 8 bits: the same as on a file with the numbers that they stand for."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.distributed import run_ranks
from tests.runs import Outcome, alone, difference, make_pictures, make_run, run_config, train
from tests.weights.comfy import FORMS, described, stored
from trainer.config.schema import RunConfig
from trainer.export.export import export
from trainer.models import families
from trainer.models.state_dict import BaseWeights
from trainer.weights.files import WeightFiles, read_tensor

SLOW = pytest.mark.slow
KINDS = (*FORMS, "bf16")
"""How the layers of a file are stored, in turn."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("comfy")
    make_pictures(root / "pictures", 2)
    return root


def config(root: Path, family: str, path: Path, base: Path, **changes: Any) -> RunConfig:
    given = {"export__what": "none", "parallel__strategy": "none", "train__steps": 2, "train__batch_size": 2}
    return run_config(
        root / "pictures", model__family=family, model__path=str(path), model__base=str(base), **given | changes
    )


def files_of(root: Path, family: str, prefix: str) -> tuple[Path, Path, Path]:
    """The tiny denoiser as two single files, in 8 bits and as the numbers they stand for; and its folder."""
    made = families.make(run_config(root / "pictures", model__family=family), root / "cache")
    (component,) = made.components[:1]
    weights = {
        name: tensor
        for file in (made.folder / component).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    coded: dict[str, Tensor] = {"model.diffusion_model.scaled_fp8": torch.zeros(2)}
    plain: dict[str, Tensor] = {}
    kinds = cycle(KINDS)
    for fused in made.layout(component):
        tensor = fused.join([weights[part] for part in fused.parts]).contiguous()
        name = f"{prefix}{fused.name.removeprefix('model.diffusion_model.')}"
        if tensor.dim() != 2 or not name.endswith(".weight") or (kind := next(kinds)) == "bf16":
            coded[name] = plain[name] = tensor.bfloat16()
            continue
        layer, group = name.removesuffix(".weight"), 4 if tensor.shape[1] % 16 else 16
        tensors, plain[name] = stored(layer, tensor, kind, group)
        coded |= tensors | described(layer, kind, group)
    files = (root / f"{family}-coded.safetensors", root / f"{family}-plain.safetensors")
    save_file(coded, files[0])
    save_file(plain, files[1])
    return *files, made.folder


def once(root: Path, name: str, cfg: RunConfig) -> Outcome:
    return train(alone(), cfg, make_run(root, cfg, name))


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        ("flux1", "model.diffusion_model."),
        ("qwen_image", "diffusion_model."),
        pytest.param("z_image", "", marks=SLOW),
        pytest.param("krea2", "model.diffusion_model.", marks=SLOW),
        pytest.param("flux2", "", marks=SLOW),
        pytest.param("chroma", "", marks=SLOW),
        pytest.param("sd3", "model.diffusion_model.", marks=SLOW),
    ],
)
def test_a_run_on_a_file_in_8_bits_is_the_run_on_the_numbers_it_stands_for(
    root: Path, family: str, prefix: str
) -> None:
    coded, plain, folder = files_of(root, family, prefix)
    cfgs = [config(root, family, file, folder) for file in (coded, plain)]
    (found, expected) = (once(root, file.stem, cfg) for file, cfg in zip((coded, plain), cfgs, strict=True))
    assert found.losses == expected.losses
    assert difference(found.weights, expected.weights) == 0


@SLOW
def test_two_ranks_read_their_rows_of_it_and_train_as_one(root: Path) -> None:
    coded, plain, folder = files_of(root, "flux1", "model.diffusion_model.")
    outcomes = []
    for file in (coded, plain):
        cfg = config(root, "flux1", file, folder, parallel__strategy="full", parallel__devices=2)
        outcomes.append(run_ranks(2, train, cfg, make_run(root, cfg, f"two-{file.stem}"))[0])
    assert outcomes[0].losses == outcomes[1].losses


@SLOW
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_it_becomes_the_format_of_the_run(root: Path, format: str) -> None:
    coded, plain, folder = files_of(root, "flux1", "")
    cfgs = [config(root, "flux1", file, folder, quantize__format=format) for file in (coded, plain)]
    found, expected = (once(root, f"{format}-{file.stem}", cfg) for file, cfg in zip((coded, plain), cfgs, strict=True))
    assert found.losses == expected.losses


def test_an_adapter_is_merged_into_the_numbers_that_it_stands_for(root: Path) -> None:
    coded, _, folder = files_of(root, "flux1", "model.diffusion_model.")
    merge = {"export__what": "merged", "export__format": "single_file", "export__dtype": "fp32", "optim__lr": 1e-9}
    cfg = config(root, "flux1", coded, folder, train__steps=1, **merge)
    run = make_run(root, cfg, "merged")
    trained = train(alone(), cfg, run)
    [made] = export(cfg, run, root / "cache", trained.weights)
    family = families.make(cfg, root / "cache")
    written = WeightFiles.read([made.path]).by_our_names(
        family.layout("transformer"), BaseWeights(family).shapes("transformer")
    )
    base = family.weights("transformer").entries
    assert written.entries.keys() == base.keys()
    for name, entry in base.items():
        assert torch.allclose(read_tensor(written.entries[name]), read_tensor(entry).float(), atol=1e-6)
