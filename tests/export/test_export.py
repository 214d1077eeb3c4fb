"""What a run leaves behind, read by diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.runs import alone, make_pictures, make_run, run_config, train
from trainer.adapters.layer import LayerAdapter
from trainer.checkpoint.restore import StoredWeights
from trainer.config.schema import RunConfig
from trainer.export.adapter import verify_adapter
from trainer.export.check import check_export
from trainer.export.export import export
from trainer.launcher import commands
from trainer.models import families
from trainer.models.base import ModelFamily
from trainer.models.build import build_model
from trainer.models.state_dict import BaseWeights, TrainedModel
from trainer.run.folder import RunDir
from trainer.run.manifest import Wanted, progress_of, to_export
from trainer.system.errors import InputError


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    cfg: RunConfig
    run: RunDir
    cache: Path
    family: ModelFamily
    weights: dict[str, Tensor]

    def config(self, what: str, **changes: Any) -> RunConfig:
        """The run's config with another section `export`."""
        return RunConfig.model_validate(self.cfg.model_dump() | {"export": {"what": what, **changes}})

    @property
    def layers(self) -> Mapping[str, LayerAdapter]:
        """The trained adapter of each layer."""
        return TrainedModel(self.cfg, BaseWeights(self.family), self.weights).layers

    def export(self, what: str, **changes: Any) -> Path:
        """The main path of an export."""
        return export(self.config(what, **changes), self.run, self.cache, self.weights)[0].path


@pytest.fixture(scope="module")
def train_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    root = tmp_path_factory.mktemp("export")
    pictures = make_pictures(root / "pictures", 3)
    done: dict[str, Trained] = {}

    def run_once(name: str, **changes: Any) -> Trained:
        if name not in done:
            cfg = run_config(pictures, name=name, optim__lr=1e-2, optim__clip_norm=None, **changes)
            weights = train(alone(), cfg, run := make_run(root, cfg, name)).weights
            done[name] = Trained(cfg, run, root / "cache", families.make(cfg, root / "cache"), weights)
        return done[name]

    return run_once


LORA = {"adapter__alpha": 2.0, "adapter__rank_pattern": {"attn.to_q": 8}}


def test_the_lora_file_has_diffusers_names_no_alpha_and_metadata(train_run: Callable[..., Trained]) -> None:
    trained = train_run("lora", **LORA)
    with safe_open(trained.export("adapter"), "pt") as stored:
        keys, metadata = set(stored.keys()), stored.metadata()
        types = {stored.get_tensor(key).dtype for key in keys}
    assert len(keys) == len(trained.weights)
    assert {key.rpartition(".lora_")[2] for key in keys} == {"A.weight", "B.weight"}
    assert all(
        key.startswith(("transformer.transformer_blocks.", "transformer.single_transformer_blocks.")) for key in keys
    )
    assert types == {torch.bfloat16}
    assert metadata["modelspec.architecture"] == "Flux.2-tiny/lora"
    assert metadata["ss_network_alpha"] == metadata["ss_network_dim"] == "4"
    assert metadata["ss_network_module"] == "networks.lora"


@pytest.mark.parametrize("adapter", ["lora", "dora", "boft"])
def test_what_was_trained_also_on_fewer_bits_is_merged_into_the_original_weights(
    train_run: Callable[..., Trained], adapter: str
) -> None:
    trained = train_run(f"{adapter}-nf4", adapter={"type": adapter}, quantize__format="nf4")
    plain = RunConfig.model_validate(trained.cfg.model_dump() | {"quantize": {}})
    merged, expected = (
        load_file(next(each.export("merged", dtype="fp32").glob("*.safetensors")))
        for each in (trained, replace(trained, cfg=plain))
    )
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert merged.keys() == expected.keys()
    original = load_file(next((trained.family.folder / "transformer").glob("*.safetensors")))
    changed = {f"{layer.removeprefix('transformer.')}.weight" for layer in trained.layers}
    assert {name for name in merged if not torch.equal(merged[name], original[name])} == changed
    base = BaseWeights(trained.family)
    for layer, update in trained.layers.items():
        found = merged[f"{layer.removeprefix('transformer.')}.weight"]
        torch.testing.assert_close(found, update.merged(base.layer(layer)), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("what", "how"), [("adapter", "for"), ("merged", "merged with")])
def test_a_run_on_a_base_in_fewer_bits_says_which_base_its_export_is_for(tmp_path: Path, what: str, how: str) -> None:
    for format, notes in (("none", []), ("nf4", ["nf4"])):
        cfg = run_config(tmp_path, quantize__format=format, export__what=what)
        family = families.make(cfg, tmp_path / "cache")
        assert list(check_export(cfg, family, build_model(cfg, family).trainables)) == [
            f"the adapter is trained on a base in {note}; the export is {how} the base as its files store it, so that "
            "its loss differs a little from that of the run"
            for note in notes
        ]


def test_a_full_fine_tune_is_exported_whole(train_run: Callable[..., Trained]) -> None:
    trained = train_run("full", adapter__type="none")
    folder = trained.export("full", dtype="fp32")
    assert folder == trained.run.export / "full-full"
    assert_equal_weights(Flux2Transformer2DModel.from_pretrained(folder), trained.weights)


def assert_equal_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert {f"transformer.{name}" for name in state} == weights.keys()
    assert all(torch.equal(tensor, weights[f"transformer.{name}"]) for name, tensor in state.items())


def test_a_large_model_is_written_in_shards_with_an_index_that_diffusers_reads(
    train_run: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.export.model.MAX_SHARD_BYTES", 300_000)
    trained = train_run("full", adapter__type="none")
    folder = trained.export("full", dtype="fp32")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) >= 3
    assert shards[0] == f"diffusion_pytorch_model-00001-of-{len(shards):05d}.safetensors"
    assert all((folder / name).stat().st_size <= 400_000 for name in shards)
    assert_equal_weights(Flux2Transformer2DModel.from_pretrained(folder), trained.weights)


def damaged(file: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(file)
    change(tensors)
    copy = file.with_name("damaged.safetensors")
    save_file(tensors, copy)
    return copy


def halve(tensors: dict[str, Tensor]) -> None:
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key] /= 2


def drop_a_layer(tensors: dict[str, Tensor]) -> None:
    layer = next(key for key in tensors if "lora_B" in key).removesuffix("lora_B.weight")
    del tensors[f"{layer}lora_A.weight"], tensors[f"{layer}lora_B.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [(halve, "differs from the trained one by"), (drop_a_layer, "has 15 layers when reloaded, 16 were trained")],
)
def test_a_file_that_diffusers_reads_differently_is_found_out(
    train_run: Callable[..., Trained], change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    trained = train_run("lora", **LORA)
    file = damaged(trained.export("adapter", dtype="fp32"), change)
    with pytest.raises(RuntimeError, match=message):
        verify_adapter(file, ("diffusers",), trained.family, trained.layers, "fp32")


def test_an_export_that_differs_from_the_live_model_leaves_no_file(train_run: Callable[..., Trained]) -> None:
    trained = train_run("lora", **LORA)
    other = {name: tensor + 1 for name, tensor in trained.weights.items()}
    before = sorted(trained.run.export.iterdir())
    cfg = trained.cfg.model_copy(update={"name": "other"})
    with pytest.raises(RuntimeError, match=r"the reloaded .* differs from the trained one"):
        export(cfg, trained.run, trained.cache, other)
    assert sorted(trained.run.export.iterdir()) == before


def test_any_checkpoint_is_exported_under_a_name_with_its_step(tmp_path: Path) -> None:
    pictures = make_pictures(tmp_path / "pictures", 4)
    saves = {"train__steps": 3, "checkpoint__every": 1, "data__validation": 1, "export__dtype": "fp32"}
    cfg = run_config(pictures, name="fox", optim__lr=1e-2, **saves)
    run = make_run(tmp_path, cfg, "run")
    weights = train(alone(), cfg, run).weights
    (newest,) = export(cfg, run, tmp_path / "cache")
    saved = {step: to_export(run, step) for step in (1, 2, 3)}
    (older,) = export(cfg, run, tmp_path / "cache", checkpoint=saved[1])
    assert (newest.path.name, older.path.name) == ("fox.safetensors", "fox-step1.safetensors")
    with safe_open(older.path, "pt") as stored:
        assert stored.metadata()["ss_steps"] == "1"
    first, last = (dict(StoredWeights(saved[step])) for step in (1, 3))
    assert all(torch.equal(last[name], weights[name]) for name in weights)
    assert any(not torch.equal(first[name], last[name]) for name in weights)
    family = families.make(cfg, tmp_path / "cache")
    layers = TrainedModel(cfg, BaseWeights(family), StoredWeights(saved[1])).layers
    assert verify_adapter(older.path, ("diffusers",), family, layers, "fp32") <= 1e-6
    losses = {step: progress_of(path).validation_loss for step, path in saved.items()}
    assert to_export(run, "best") == saved[min(losses, key=losses.__getitem__)]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (7, "{run}: has no checkpoint of step 7; name one of the steps 1, 2 and 3"),
        (
            "best",
            "{run}: no checkpoint has a validation loss, which takes held-out data (data.validation_split); name one "
            "of the steps 1, 2 and 3",
        ),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused_before_a_process_is_started(
    train_run: Callable[..., Trained], wanted: Wanted, message: str
) -> None:
    run = train_run("often", checkpoint__every=1, train__steps=3).run
    with pytest.raises(InputError) as error:
        commands.begin_export(run, run.config().exporting("adapter", None, None), wanted)
    assert str(error.value) == message.format(run=run.path)
    assert not (run.logs / "export.log").exists()


def test_a_run_without_a_checkpoint_cannot_be_exported(tmp_path: Path) -> None:
    cfg = run_config(make_pictures(tmp_path / "pictures", 1))
    run = make_run(tmp_path, cfg, "empty")
    for begin in (lambda: export(cfg, run, tmp_path / "cache"), lambda: commands.begin_export(run, cfg)):
        with pytest.raises(InputError) as error:
            begin()
        assert str(error.value) == f"{run.path}: has no complete checkpoint to export; resume the run first"
