"""Every adapter on every family, exported in the formats that carry it, read back and continued from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTextModel

from tests.distributed.matrix import FAMILIES
from tests.exports import ADAPTERS, Finished, Runs, table
from tests.models.common import IMAGES
from tests.readme import section
from tests.runs import alone, difference, make_run
from trainer.adapters import adapted_layers
from trainer.config.schema import RunConfig
from trainer.export.adapter import verify_adapter
from trainer.models import families
from trainer.models.state_dict import BaseWeights, TrainedModel
from trainer.run.events import StatusEvent, WarningEvent
from trainer.system.errors import InputError, RuleError
from trainer.train.early_checks import check_model
from trainer.train.loop import Trainer

SLOW = pytest.mark.slow
CONVOLUTIONS = (("sdxl", "locon"),)
"""What changes convolutions, of the other families' files."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("formats"))


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        pytest.param(family, adapter, marks=() if family == "flux2" or (family, adapter) in CONVOLUTIONS else SLOW)
        for family in FAMILIES
        for adapter in ADAPTERS
    ],
)
def test_the_default_files_give_the_merged_weights_of_the_live_model(runs: Runs, family: str, adapter: str) -> None:
    finished = runs.of(adapter, family)
    for dtype in ("fp32", "bf16"):
        paths = finished.export("adapter", "auto", dtype)  # raises where a layer differs by more than 1e-5, 4e-3
        assert paths[0] == finished.run.export / f"{adapter}.safetensors"
        assert all(path.is_file() for path in paths)


@pytest.mark.slow
def test_the_table_of_the_readme_is_what_the_exporter_does() -> None:
    assert section("trainer/adapters", "formats") == table(IMAGES), "run python -m tests.exports"


Change = Callable[[dict[str, Tensor]], object]


def double_alpha(tensors: dict[str, Tensor]) -> None:
    key = next(key for key in tensors if key.endswith(".alpha"))
    tensors[key] = tensors[key] * 2


def drop(ending: str) -> Change:
    """Without the first tensor of that name."""
    return lambda tensors: tensors.pop(next(key for key in tensors if key.endswith(ending)))


def drop_layer(tensors: dict[str, Tensor]) -> None:
    layer = next(iter(tensors)).partition(".")[0]
    for key in [key for key in tensors if key.startswith(f"{layer}.")]:
        del tensors[key]


@pytest.mark.parametrize(
    ("adapter", "change", "message"),
    [
        ("loha", double_alpha, "the reloaded .* differs from the trained one"),
        ("loha", drop("hada_w1_b"), "hada_w1_b"),
        ("loha", drop_layer, "layers when reloaded"),
        ("boft", drop_layer, "layers when reloaded"),
        ("diag-oft", drop("oft_blocks"), "has an alpha and nothing else"),
    ],
)
def test_a_damaged_file_is_found_out(runs: Runs, adapter: str, change: Change, message: str, tmp_path: Path) -> None:
    finished = runs.of(adapter, "flux2")
    (file, *_) = finished.export("adapter", "lycoris")
    tensors = load_file(file)
    change(tensors)
    damaged = tmp_path / "damaged.safetensors"
    save_file(tensors, damaged)
    family = families.make(finished.cfg, finished.cache)
    trained = TrainedModel(finished.cfg, BaseWeights(family), finished.weights).layers
    with pytest.raises((RuntimeError, InputError), match=message):
        verify_adapter(damaged, ("lycoris",), family, trained, "fp32")


TEXT_ENCODERS = {"unet": "adapter", "text_encoder": "adapter", "text_encoder_2": "full"}


def text_encoders(runs: Runs) -> Finished:
    """A U-Net and a text encoder with an adapter each, and another text encoder trained fully."""
    model = {"family": "sdxl", "train": TEXT_ENCODERS}
    return runs.of("lora", "sdxl", model=model)


def test_components_that_are_trained_in_different_ways_are_exported_as_folders(runs: Runs) -> None:
    finished = text_encoders(runs)
    (folder,) = finished.export("merged", "auto")
    assert sorted(path.name for path in folder.iterdir()) == sorted(TEXT_ENCODERS)
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    encoder = CLIPTextModel.from_pretrained(folder / "text_encoder")
    assert_changed(unet, finished, "unet")
    assert_changed(encoder, finished, "text_encoder")


def assert_changed(module: nn.Module, finished: Finished, component: str) -> None:
    """Its adapted layers are those of the trained model, and no longer the base's."""
    family = families.make(finished.cfg, finished.cache)
    base = BaseWeights(family)
    layers = TrainedModel(finished.cfg, base, finished.weights).layers
    modules = {name.replace("text_model.", ""): part for name, part in module.named_modules()}
    mine = [name for name in layers if name.startswith(f"{component}.")]
    assert mine
    for name in mine:
        weight = modules[name.partition(".")[2].replace("text_model.", "")].weight
        torch.testing.assert_close(weight, layers[name].merged(base.layer(name)), atol=1e-6, rtol=0)
        assert not torch.allclose(weight, base.layer(name), atol=1e-3)


def test_an_adapter_file_cannot_leave_out_what_was_trained_fully(runs: Runs) -> None:
    finished = text_encoders(runs)
    with pytest.raises(ValueError, match="adapter leaves out text_encoder_2, which is trained fully; use merged"):
        finished.export("adapter", "auto")


def test_the_single_file_of_a_whole_pipeline_is_read_by_diffusers(runs: Runs) -> None:
    finished = runs.of("lora", "sdxl", model={"family": "sdxl", "train": dict.fromkeys(TEXT_ENCODERS, "adapter")})
    (file,) = finished.export("merged", "single_file")
    (folder,) = finished.export("merged", "diffusers")
    family = families.make(finished.cfg, finished.cache)
    pipeline = StableDiffusionXLPipeline.from_single_file(str(file), config=str(family.folder), local_files_only=True)
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    for name, tensor in unet.state_dict().items():
        assert torch.equal(pipeline.unet.state_dict()[name], tensor), name
    assert_changed(pipeline.text_encoder, finished, "text_encoder")


@pytest.mark.parametrize("family", ["flux2", "sd3"])
@pytest.mark.parametrize(("method", "what"), [("dora", "merged"), ("full", "full")])
def test_the_folder_and_the_single_file_of_a_model_are_the_same_to_diffusers(
    runs: Runs, family: str, method: str, what: str
) -> None:
    finished = runs.of(method, family)
    (file,), (folder,) = (finished.export(what, format, "bf16") for format in ("single_file", "diffusers"))
    made = families.make(finished.cfg, finished.cache)
    kind: Any = type(made.build("transformer"))
    source = {"config": str(made.folder), "subfolder": "transformer", "local_files_only": True}
    single = kind.from_single_file(str(file), torch_dtype=torch.bfloat16, **source).state_dict()
    whole = kind.from_pretrained(folder, torch_dtype=torch.bfloat16).state_dict()
    assert single.keys() == whole.keys()
    assert [name for name, tensor in whole.items() if not torch.equal(tensor, single[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_an_fp8_file_holds_layers_weights_of_8_bits_and_the_rest_of_16(runs: Runs, family: str) -> None:
    (file,) = runs.of("full", family).export("full", "single_file", "fp8")
    assert file.name == "full-full-fp8.safetensors"
    types = {(tensor.dim() in (2, 4), tensor.dtype) for tensor in load_file(file).values()}
    assert types == {(True, torch.float8_e4m3fn), (False, torch.bfloat16)}


def test_an_fp8_file_holds_tables_of_modulation_in_16_bits_though_they_are_matrices(runs: Runs) -> None:
    (file,) = runs.of("full", "krea2").export("full", "single_file", "fp8")
    tensors = load_file(file)
    assert tensors["last.modulation.lin"].dim() == 2
    assert {name: tensors[name].dtype for name in ("last.modulation.lin", "blocks.0.mod.lin", "first.weight")} == {
        "last.modulation.lin": torch.bfloat16,
        "blocks.0.mod.lin": torch.bfloat16,
        "first.weight": torch.float8_e4m3fn,
    }


CONTINUED = [
    ("lora", "flux2", "auto"),
    ("lora", "flux1", "kohya"),
    ("lora", "sdxl", "peft"),
    ("locon", "sdxl", "kohya"),
    ("dora", "flux2", "auto"),
    ("dora", "sd3", "lycoris"),
    ("loha", "flux1", "lycoris"),
    ("lokr", "sd3", "auto"),
    ("diag-oft", "flux2", "auto"),
    ("boft", "sdxl", "comfyui"),
]


@pytest.mark.parametrize(
    ("adapter", "family", "format"), [*CONTINUED[::2], *(pytest.param(*case, marks=SLOW) for case in CONTINUED[1::2])]
)
def test_a_run_continues_from_an_adapter_file(
    runs: Runs, adapter: str, family: str, format: str, tmp_path: Path
) -> None:
    finished = runs.of(adapter, family)
    (file, *_) = finished.export("adapter", format)
    trainer, notes = started(finished, file, tmp_path)
    effect, wanted = (updates(finished, weights) for weights in (trainer.trained_weights(), finished.weights))
    assert effect.keys() == wanted.keys()
    assert difference(effect, wanted) <= 1e-5
    assert notes == [f"{len(adapted_layers(trainer.model))} layers of the adapter continue from {file}"]


def started(finished: Finished, file: Path, folder: Path, **adapter: Any) -> tuple[Trainer, list[str]]:
    """A new run that starts from the file, before its first step, and what it said about it."""
    cfg = starting(finished, file, **adapter)
    said: list[Any] = []
    trainer = Trainer(cfg, make_run(folder, cfg, "next"), alone(), finished.cache, said.append)
    trainer.close()
    return trainer, [event.message for event in said if isinstance(event, StatusEvent) and str(file) in event.message]


def starting(finished: Finished, file: Path, **adapter: Any) -> RunConfig:
    section = finished.cfg.adapter.model_dump() | {"start": str(file), **adapter}
    return RunConfig.model_validate(finished.cfg.model_dump() | {"adapter": section})


def updates(finished: Finished, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What becomes of each layer's weight: the tensors of a file may be others that do the same."""
    family = families.make(finished.cfg, finished.cache)
    base = BaseWeights(family)
    layers = TrainedModel(finished.cfg, base, weights).layers
    return {name: layer.merged(base.layer(name)) for name, layer in layers.items()}


def test_a_file_of_another_rank_is_refused_with_the_rank_that_fits(runs: Runs) -> None:
    finished = runs.of("lora", "flux2")
    (file, *_) = finished.export("adapter", "auto")
    with pytest.raises(InputError) as refused:
        check_model(starting(finished, file, rank=8), finished.cache)
    assert str(refused.value) == (
        "adapter.start: 'transformer.single_transformer_blocks.0.attn.to_out' has down 4 x 256, up 64 x 4 in the "
        "file, but down 8 x 256, up 64 x 8 in this run; set adapter.rank: 4, or adapter.rank_pattern for this layer"
    )


def test_a_file_with_layers_that_the_run_leaves_alone_is_refused(runs: Runs) -> None:
    finished = runs.of("lora", "flux2")
    (file, *_) = finished.export("adapter", "auto")
    with pytest.raises(InputError) as refused:
        check_model(starting(finished, file, targets=["attn.to_q"]), finished.cache)
    assert str(refused.value) == (
        f"adapter.start: {file} changes 15 layers that this run leaves alone, first "
        "'transformer.single_transformer_blocks.0.attn.to_out'; add them to adapter.targets, or to model.train"
    )


def test_a_file_with_text_encoders_is_for_a_run_that_trains_them(runs: Runs) -> None:
    everything = runs.of("lora", "sdxl", model={"family": "sdxl", "train": dict.fromkeys(TEXT_ENCODERS, "adapter")})
    (file, *_) = everything.export("adapter", "auto")
    other = runs.of("lora", "sdxl")
    with pytest.raises(InputError) as refused:
        check_model(starting(other, file), other.cache)
    assert str(refused.value) == (
        f"adapter.start: {file} changes 18 layers that this run leaves alone, first "
        "'text_encoder.encoder.layers.0.mlp.fc1'; add them to adapter.targets, or to model.train"
    )


def test_text_encoders_in_a_file_for_a_model_without_are_left_out_with_a_warning(runs: Runs, tmp_path: Path) -> None:
    finished = runs.of("lora", "flux2")
    (file, *_) = finished.export("adapter", "auto", "fp32")
    name = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    encoder = {f"{name}.lora_down.weight": torch.ones(4, 8), f"{name}.lora_up.weight": torch.ones(8, 4)}
    more = tmp_path / "more.safetensors"
    save_file({**load_file(file), **encoder}, more)
    cfg, said = starting(finished, more), []
    trainer = Trainer(cfg, make_run(tmp_path, cfg, "next"), alone(), finished.cache, said.append)
    trainer.close()
    assert difference(updates(finished, trainer.trained_weights()), updates(finished, finished.weights)) <= 1e-5
    assert [event.message for event in said if isinstance(event, WarningEvent)] == [
        f"adapter.start {more}: 1 layer of text encoders left out, as '{name}': this kind of model is not trained with "
        "them, and the exported file will not hold them"
    ]


def test_what_a_file_has_for_a_text_encoders_last_layer_is_left_out_and_told(runs: Runs, tmp_path: Path) -> None:
    everything = runs.of("lora", "sdxl", model={"family": "sdxl", "train": dict.fromkeys(TEXT_ENCODERS, "adapter")})
    (file, *_) = everything.export("adapter", "kohya", "fp32")
    tensors = load_file(file)
    for key in [key for key in tensors if key.startswith("lora_te1_text_model_encoder_layers_0_mlp_fc1.")]:
        tensors[key.replace("layers_0", "layers_1")] = tensors[key].clone()
    other = tmp_path / "other.safetensors"
    save_file(tensors, other)
    trainer, notes = started(everything, other, tmp_path)
    assert difference(updates(everything, trainer.trained_weights()), updates(everything, everything.weights)) <= 1e-5
    assert notes == [
        f"{len(adapted_layers(trainer.model))} layers of the adapter continue from {other}",
        f"1 layer of {other} left out, as 'text_encoder.encoder.layers.1.mlp.fc1': "
        "nothing in this kind of training reads it",
    ]


def test_a_run_that_is_resumed_goes_on_from_its_checkpoint_and_not_from_the_file(runs: Runs, tmp_path: Path) -> None:
    finished = runs.of("dora", "flux2")
    (file, *_) = finished.export("adapter", "auto")
    cfg = starting(finished, file)
    first = Trainer(cfg, make_run(tmp_path, cfg, "next"), alone(), finished.cache, lambda event: None)
    first.train_step()
    first.save()
    first.checkpointer.wait()
    first.close()
    file.rename(tmp_path / "elsewhere.safetensors")
    said: list[Any] = []
    again = Trainer(cfg, first.run, alone(), finished.cache, said.append)
    again.close()
    assert difference(again.trained_weights(), first.trained_weights()) == 0
    assert not any("continue from" in event.message for event in said if isinstance(event, StatusEvent))


def test_a_run_whose_adapter_diffusers_cannot_load_says_so_before_its_first_step(runs: Runs, tmp_path: Path) -> None:
    finished = runs.of("boft", "flux2")
    said: list[Any] = []
    Trainer(finished.cfg, make_run(tmp_path, finished.cfg, "next"), alone(), finished.cache, said.append).close()
    messages = [event.message for event in said if isinstance(event, StatusEvent)]
    assert "export.format: auto writes no file of this boft for diffusers; export.what: merged does" in messages


def test_a_format_that_the_family_has_no_names_for_is_refused_before_the_first_step(runs: Runs, tmp_path: Path) -> None:
    finished = runs.of("dora", "flux1")
    cfg = RunConfig.model_validate(finished.cfg.model_dump() | {"export": {"format": "kohya"}})
    with pytest.raises(InputError) as refused:
        Trainer(cfg, make_run(tmp_path, cfg, "refused"), alone(), finished.cache, lambda event: None)
    assert str(refused.value) == (
        "export.format: kohya cannot carry a dora adapter of this kind of model, only lora and locon; "
        "use auto, comfyui, lycoris, peft"
    )


@pytest.mark.parametrize(
    ("adapter", "what", "format", "dtype", "message"),
    [
        ("boft", "auto", "peft", "bf16", "export.format: peft cannot carry a boft adapter; use auto, comfyui, lycoris"),
        ("lora", "merged", "kohya", "bf16", "export.format: kohya cannot carry a whole model; use auto, diffusers, "
         "comfyui, single_file"),
        ("lora", "auto", "auto", "fp8", "export.dtype: fp8 is for the single file of a whole model; set export.what: "
         "merged or full and export.format: single_file, or use bf16"),
    ],
)  # fmt: skip
def test_what_a_format_cannot_carry_is_refused_by_the_config(
    runs: Runs, adapter: str, what: str, format: str, dtype: str, message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        runs.of(adapter, "flux2").export(what, format, dtype)
    rule = refused.value.errors()[0]["ctx"]["error"]  # type: ignore[attr-defined]
    assert isinstance(rule, RuleError)
    assert str(rule) == message
