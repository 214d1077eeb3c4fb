"""Adapter files of other programs, and files that are damaged or belong elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import Flux2Pipeline
from lycoris import create_lycoris
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.adapters import consumers
from tests.adapters.examples import Example, cached_example, saved
from trainer.adapters.formats.reader import encoder_layers
from trainer.adapters.formats.writer import adapter_files
from trainer.system.errors import InputError

FP32 = 5e-6
TO_K = "transformer.transformer_blocks.0.attn.to_k"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def flux2(cache: Path) -> Example:
    return cached_example("flux2", cache)


@pytest.fixture
def sdxl(cache: Path) -> Example:
    return cached_example("sdxl", cache)


def randomize(module: nn.Module, size: float = 0.3) -> nn.Module:
    """Random values for everything that is trained."""
    numbers = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = size * torch.randn(parameter.shape, generator=numbers)
    return module


PATTERN = r".*transformer_blocks\.0\.attn\.to_[qkv]"


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, lora_alpha=8, target_modules=PATTERN, rank_pattern={"to_q": 6}, alpha_pattern={"to_k": 3}),
        LoraConfig(r=4, lora_alpha=8, target_modules=PATTERN, use_rslora=True),
        LoraConfig(r=4, lora_alpha=8, target_modules=PATTERN, use_dora=True),
        LoHaConfig(r=4, alpha=8, target_modules=PATTERN, rank_pattern={"to_q": 6}),
        LoKrConfig(r=4, alpha=8, target_modules=PATTERN, decompose_factor=4),
        LoKrConfig(r=64, alpha=8, target_modules=PATTERN),
    ],
    ids=["lora", "rslora", "dora", "loha", "lokr", "lokr whole"],
)
def test_a_folder_that_peft_saved_is_read_with_its_alpha(flux2: Example, config: PeftConfig, tmp_path: Path) -> None:
    model = randomize(get_peft_model(flux2.model()["transformer"], config))
    model.save_pretrained(tmp_path)
    layers = flux2.read(tmp_path)
    live = consumers.merged_by_peft(nn.ModuleDict({"transformer": model.get_base_model()}))
    assert flux2.error(live, layers) <= FP32
    assert len(layers) == 3


def test_a_peft_file_without_its_config_is_refused(flux2: Example, tmp_path: Path) -> None:
    (folder,) = saved(flux2.files(flux2.adapter("lora"), "peft"), tmp_path / "run")
    file = folder / "adapter_model.safetensors"
    (folder / "adapter_config.json").unlink()
    assert refusal(flux2, file) == (
        f"{file}: was saved by peft, but adapter_config.json, which holds its alpha, is missing next to it"
    )


def test_the_alpha_in_diffusers_metadata_counts(flux2: Example, tmp_path: Path) -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=PATTERN, rank_pattern={"to_q": 6})
    model = randomize(get_peft_model(flux2.model()["transformer"], config))
    state = {k.replace("base_model.model.", "").replace(".default", ""): v for k, v in model.state_dict().items()}
    Flux2Pipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers={key: tensor for key, tensor in state.items() if "lora_" in key},
        transformer_lora_adapter_metadata=config.to_dict(),
    )
    file = tmp_path / "pytorch_lora_weights.safetensors"
    layers = flux2.read(file)
    assert {layer.scale for layer in layers.values()} == {2.0, 8 / 6}
    assert flux2.error(consumers.merged_by_peft(nn.ModuleDict({"transformer": model.get_base_model()})), layers) <= FP32


@pytest.mark.parametrize(
    "options",
    [
        {"algo": "lora"},
        {"algo": "lora", "dora_wd": True},
        {"algo": "loha"},
        {"algo": "lokr", "factor": 4},
        {"algo": "lokr", "factor": 4, "full_matrix": True},
        {"algo": "lokr", "factor": 4, "decompose_both": True, "linear_dim": 1},
        {"algo": "diag-oft"},
        {"algo": "diag-oft", "constraint": 0.01},
        {"algo": "boft"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_file_that_lycoris_saved_is_what_its_live_model_computes(
    flux2: Example, options: dict[str, object], tmp_path: Path
) -> None:
    model = flux2.model()["transformer"]
    block = model.transformer_blocks[0].attn
    network = create_lycoris(block, 1.0, **({"linear_dim": 4, "linear_alpha": 8} | options))
    network.apply_to()
    randomize(network)
    file = tmp_path / "adapter.safetensors"
    names = {key: key.replace("lycoris_", "lycoris_transformer_blocks_0_attn_") for key in network.state_dict()}
    save_file({names[key]: tensor.contiguous() for key, tensor in network.state_dict().items()}, file)
    layers = flux2.read(file)
    assert len(layers) == 8
    assert consumers.lycoris(flux2, file, layers) <= FP32


def shared_down(tensors: Tensors) -> None:
    """As other trainers write the fused layers of the original model: one down for q, k and v."""
    generator = torch.Generator().manual_seed(0)
    tensors["diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight"] = torch.randn(4, 64, generator=generator)
    tensors["diffusion_model.double_blocks.0.img_attn.qkv.lora_B.weight"] = torch.randn(192, 4, generator=generator)
    tensors["diffusion_model.single_blocks.1.linear2.lora_A.weight"] = torch.randn(4, 256, generator=generator)
    tensors["diffusion_model.single_blocks.1.linear2.lora_B.weight"] = torch.randn(64, 4, generator=generator)


def kohya(tensors: Tensors) -> None:
    """The same with kohya's names and an alpha that is not the rank."""
    original: Tensors = {}
    shared_down(original)
    for key, tensor in original.items():
        name = key.removeprefix("diffusion_model.").replace(".lora_A.", ".lora_down.").replace(".lora_B.", ".lora_up.")
        layer, _, end = name.partition(".lora_")
        tensors[f"lora_unet_{layer.replace('.', '_')}.lora_{end}"] = tensor
        tensors[f"lora_unet_{layer.replace('.', '_')}.alpha"] = torch.tensor(1.0)


@pytest.mark.parametrize("write", [shared_down, kohya])
def test_layers_that_a_file_joins_are_what_diffusers_takes_them_for(
    flux2: Example, write: Callable[[Tensors], None], tmp_path: Path
) -> None:
    tensors: Tensors = {}
    write(tensors)
    file = tmp_path / "adapter.safetensors"
    save_file(tensors, file)
    layers = flux2.read(file)
    assert sorted(layers) == [
        "transformer.single_transformer_blocks.1.attn.to_out",
        *(TO_K.replace("to_k", name) for name in ("to_k", "to_q", "to_v")),
    ]
    assert consumers.diffusers(flux2, file, layers) <= FP32


def test_layers_that_we_joined_come_back_with_their_own_ranks(flux2: Example, tmp_path: Path) -> None:
    layers = {name: layer for name, layer in flux2.adapter("lora").items() if name.endswith((".to_q", ".to_v"))}
    (file,) = saved(flux2.files(layers, "kohya"), tmp_path / "kohya")
    read = flux2.read(file)
    assert {name: layer.tensors["down"].shape for name, layer in read.items()} == {
        name: layer.tensors["down"].shape for name, layer in layers.items()
    }


def test_the_swapped_halves_of_the_last_norm_come_back(flux2: Example, tmp_path: Path) -> None:
    name = "transformer.norm_out.linear"
    layers = {name: flux2.layer("lora", name)}
    (file,) = saved(flux2.files(layers, "kohya"), tmp_path / "kohya")
    assert consumers.ourselves(flux2, file, layers) <= FP32


def test_names_of_the_original_unet_are_read(sdxl: Example, tmp_path: Path) -> None:
    layers = sdxl.adapter("locon")
    by_original = replace(sdxl.naming, kohya_by_path=False)
    (file,) = saved(adapter_files(layers, "kohya", by_original, sdxl.weight, torch.float32), tmp_path / "kohya")
    assert any(key.startswith("lora_unet_middle_block_1_transformer_blocks_0_") for key in load_file(file))
    assert consumers.ourselves(sdxl, file, layers) <= FP32


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2"])
def test_text_encoders_are_read_by_the_paths_of_old_and_new_transformers(
    sdxl: Example, component: str, tmp_path: Path
) -> None:
    layers = sdxl.adapter("lora", (component,))
    (file,) = saved(sdxl.files(layers, "diffusers"), tmp_path / "diffusers")
    old = load_file(file)
    assert all(key.startswith(f"{component}.text_model.encoder.layers.") for key in old)
    new = tmp_path / "new.safetensors"
    save_file({key.replace("text_model.", ""): tensor for key, tensor in old.items()}, new)
    if component == "text_encoder":
        assert consumers.ourselves(sdxl, new, layers) <= FP32
    assert consumers.ourselves(sdxl, file, layers) <= FP32


# What is wrong with a file.


def edited(
    flux2: Example, adapter: str, folder: Path, edit: Callable[[Tensors], object], format: str = "lycoris"
) -> Path:
    """A file of ours with a change to its tensors."""
    (file,) = saved(flux2.files(flux2.adapter(adapter), format), folder / "ours")
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})
    return file


def refusal(model: Example, file: Path) -> str:
    with pytest.raises(InputError) as error:
        model.read(file)
    return str(error.value)


LYCORIS = "lycoris_transformer_blocks_0_attn_to_k"


def test_a_wrong_alpha_a_dropped_layer_and_a_changed_tensor_are_seen(flux2: Example, tmp_path: Path) -> None:
    layers = flux2.adapter("lora")
    for number, (edit, error) in enumerate(
        [
            (lambda tensors: tensors[f"{LYCORIS}.alpha"].mul_(0.5), 0.5),
            (lambda tensors: tensors[f"{LYCORIS}.lora_up.weight"].mul_(-1), 2.0),
        ]
    ):
        file = edited(flux2, "lora", tmp_path / str(number), edit)
        assert consumers.ourselves(flux2, file, layers) == pytest.approx(error, abs=1e-5)
    file = edited(flux2, "lora", tmp_path / "dropped", lambda tensors: drop(tensors, f"{LYCORIS}."))
    assert layers.keys() - flux2.read(file).keys() == {TO_K}


def drop(tensors: Tensors, prefix: str) -> None:
    for key in [key for key in tensors if key.startswith(prefix)]:
        del tensors[key]


@pytest.mark.parametrize(
    ("adapter", "format", "dropped", "message"),
    [
        ("lora", "lycoris", f"{LYCORIS}.lora_up.weight", f"'{LYCORIS}' has lora_down.weight but no lora_up.weight"),
        ("lora", "diffusers", f"{TO_K}.lora_A.weight", f"'{TO_K}' has lora_B.weight but no lora_A.weight"),
        ("loha", "lycoris", f"{LYCORIS}.hada_w2_a", f"'{LYCORIS}' has hada_w1_a but no hada_w2_a"),
        ("lokr", "lycoris", f"{LYCORIS}.lokr_w2_b", f"'{LYCORIS}' has lokr_w1 but no lokr_w2_b"),
    ],
)
def test_a_tensor_without_its_partner_is_named(
    flux2: Example, adapter: str, format: str, dropped: str, message: str, tmp_path: Path
) -> None:
    file = edited(flux2, adapter, tmp_path, lambda tensors: tensors.pop(dropped), format)
    assert refusal(flux2, file) == f"{file}: {message}; the file is incomplete"


WRONG: dict[str, tuple[str, Tensors, str]] = {
    "not understood": (
        "boft",
        {"rescale": torch.ones(64, 1)},
        f"'{LYCORIS}.rescale' is not understood; supported are lora, locon, dora, loha, lokr, diag-oft, boft, without "
        "tucker factors or rescaling",
    ),
    "a wider model": (
        "lora",
        {"lora_down.weight": torch.ones(4, 128), "lora_up.weight": torch.ones(128, 4)},
        f"the adapter of '{TO_K}' is for 128 x 128, but its weight is 64 x 64; use the file's own model",
    ),
    "a rotation of another width": (
        "diag-oft",
        {"oft_blocks": torch.ones(8, 4, 4)},
        f"the adapter of '{TO_K}' is for 32 outputs, but its weight is 64 x 64; use the file's own model",
    ),
    "factors that cannot be multiplied": (
        "lora",
        {"lora_up.weight": torch.ones(64, 5)},
        f"'{LYCORIS}': up (64 x 5) and down (4 x 64) cannot be multiplied; the file is damaged",
    ),
    "a magnitude of another form": (
        "dora", {"dora_scale": torch.ones(32, 1)}, f"'{LYCORIS}': 32 magnitudes for 64 outputs"
    ),
    "a factor of another form": (
        "loha", {"hada_w1_a": torch.ones(64)}, f"'{LYCORIS}': w1_a (64) has another form; the file is damaged"
    ),
    "a dora over the inputs": (
        "dora",
        {"dora_scale": torch.ones(1, 64)},
        f"'{LYCORIS}.dora_scale' (1 x 64) scales the inputs of its layer; only a dora that scales the outputs can be "
        "read",
    ),
    "not finite": (
        "lora",
        {"lora_up.weight": torch.full((64, 4), torch.nan)},
        f"'{LYCORIS}': up holds numbers that are not finite; the file is damaged",
    ),
    "two kinds in a layer": (
        "lora",
        {"oft_blocks": torch.zeros(16, 4, 4)},
        f"'{LYCORIS}' has tensors of diag-oft and lora; a layer takes one adapter",
    ),
}  # fmt: skip
"""{case: (adapter of a sound file, tensors of one of its layers in their place, what is said of the file)}"""


@pytest.mark.parametrize(("adapter", "tensors", "message"), WRONG.values(), ids=WRONG)
def test_a_layer_with_wrong_tensors_is_named(
    flux2: Example, adapter: str, tensors: Tensors, message: str, tmp_path: Path
) -> None:
    wrong = {f"{LYCORIS}.{end}": tensor for end, tensor in tensors.items()}
    file = edited(flux2, adapter, tmp_path, lambda tensors: tensors.update(wrong))
    assert refusal(flux2, file) == f"{file}: {message}"


def test_a_file_for_another_model_is_told_by_the_nearest_layer_and_both_shapes(flux2: Example, tmp_path: Path) -> None:
    foreign = LYCORIS.replace("to_k", "to_kk")

    def rename(tensors: Tensors) -> None:
        for end in ("lora_down.weight", "lora_up.weight", "alpha"):
            tensors[f"{foreign}.{end}"] = tensors.pop(f"{LYCORIS}.{end}")

    file = edited(flux2, "lora", tmp_path, rename)
    assert refusal(flux2, file) == (
        f"{file}: '{foreign}' (64 x 64) is not a layer of this model, nearest: '{TO_K}' (64 x 64); "
        "the file was made for another model"
    )


ENCODER = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
OF_ENCODER = {f"{ENCODER}.lora_down.weight": torch.ones(4, 768), f"{ENCODER}.lora_up.weight": torch.ones(3072, 4)}


def test_text_encoders_in_a_file_for_a_model_without_are_left_out_and_named(flux2: Example, tmp_path: Path) -> None:
    """As kohya and fluxgym write them for FLUX, whose own text encoders are not trained here."""
    plain = flux2.read(edited(flux2, "lora", tmp_path, lambda tensors: None))
    (tmp_path / "more").mkdir()
    file = edited(flux2, "lora", tmp_path / "more", lambda tensors: tensors.update(OF_ENCODER))
    assert flux2.read(file).keys() == plain.keys()
    assert encoder_layers(file, flux2.shapes) == (ENCODER,)
    alone = tmp_path / "alone.safetensors"
    save_file(OF_ENCODER, alone)
    assert refusal(flux2, alone) == (
        f"{alone}: holds layers of text encoders only, which this kind of model is not trained with; name a file with "
        "layers of the model"
    )


def test_text_encoders_that_a_model_has_are_read(sdxl: Example, tmp_path: Path) -> None:
    save_file(OF_ENCODER, tmp_path / "a.safetensors")
    assert encoder_layers(tmp_path / "a.safetensors", sdxl.shapes) == ()


# Names that begin with what a program wraps the model in


def renamed(example: Example, folder: Path, prefix: str, separator: str = ".", end: str = "{}") -> Path:
    """The example's lora with other names."""
    (path,) = saved(example.files(example.adapter("lora"), "diffusers"), folder / "saved")
    tensors = {}
    for key, tensor in load_file(path).items():
        name, _, tensor_name = key.partition(".")[2].rpartition(".lora_")
        tensors[f"{prefix}{name.replace('.', separator)}.{end.format(f'lora_{tensor_name}')}"] = tensor
    save_file(tensors, folder / "renamed.safetensors")
    return folder / "renamed.safetensors"


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        ("z_image", "diffusion_model."),  # ai-toolkit
        ("flux2", "transformer.base_model.model."),  # SimpleTuner
        pytest.param("flux1", "diffusion_model.", marks=pytest.mark.slow),
        pytest.param("sd3", "diffusion_model.", marks=pytest.mark.slow),
        pytest.param("z_image", "transformer.base_model.model.", marks=pytest.mark.slow),
        pytest.param("flux2", "module.", marks=pytest.mark.slow),
        pytest.param("qwen_image", "model.diffusion_model.", marks=pytest.mark.slow),
    ],
)
def test_layers_are_known_by_the_ends_of_their_names(cache: Path, tmp_path: Path, family: str, prefix: str) -> None:
    example = cached_example(family, cache)
    layers = example.adapter("lora")
    found = example.read(renamed(example, tmp_path, prefix))
    assert example.error({name: layer.merged(example.weight(name)) for name, layer in found.items()}, layers) < FP32


def test_names_without_dots_are_known_by_their_ends_too(flux2: Example, tmp_path: Path) -> None:
    """As OneTrainer writes them."""
    found = flux2.read(renamed(flux2, tmp_path, "lora_transformer_", "_"))
    merged = {name: layer.merged(flux2.weight(name)) for name, layer in found.items()}
    assert flux2.error(merged, flux2.adapter("lora")) < FP32


def test_keys_of_a_live_peft_model_are_read(flux2: Example, tmp_path: Path) -> None:
    for adapter, config in (("lora", LoraConfig), ("dora", LoraConfig), ("loha", LoHaConfig), ("lokr", LoKrConfig)):
        model = nn.ModuleDict({"transformer": flux2.model()["transformer"]})
        settings = {"r": 4, "target_modules": PATTERN, ("lora_alpha" if config is LoraConfig else "alpha"): 4}
        model = get_peft_model(model, config(**settings, **({"use_dora": True} if adapter == "dora" else {})))
        randomize(model)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        file = tmp_path / f"{adapter}.safetensors"
        save_file({name.removeprefix("base_model.model."): p.detach().clone() for name, p in named.items()}, file)
        assert all("default" in name for name in named)
        found = flux2.read(file)
        model.merge_adapter()
        assert {layer.kind for layer in found.values()} == {adapter}
        for name, layer in found.items():
            wanted = model.get_submodule(f"base_model.model.{name}").base_layer.weight
            torch.testing.assert_close(layer.merged(flux2.weight(name)), wanted.detach(), atol=1e-5, rtol=0)


def test_a_file_with_two_adapters_is_refused(flux2: Example, tmp_path: Path) -> None:
    file = renamed(flux2, tmp_path, "transformer.")
    tensors = load_file(file)
    save_file({**tensors, f"{TO_K}.lora_A.second.weight": tensors[f"{TO_K}.lora_A.weight"].clone()}, file)
    assert refusal(flux2, file) == f"{file}: has '{TO_K}.lora_A.weight' for several adapters; save one of them"
    others = {f"diffusion_model.{key.partition('.')[2]}": tensor.clone() for key, tensor in tensors.items()}
    save_file({**tensors, **others}, file)
    assert "which the file changes under another name too; keep one" in refusal(flux2, file)


UNKNOWN_BEGINNING = (
    "{file}: '{name}' ({size}) ends as the model's '{layer}' and has its size, but how it begins is not known, or not "
    "the same in the whole file; rename the tensors to begin with 'transformer.'"
)


def test_a_beginning_with_a_number_is_not_read_and_not_called_another_model(flux2: Example, tmp_path: Path) -> None:
    """It may be the number of another model's block, whose layer ends in the same way."""
    file = renamed(flux2, tmp_path, "blocks.7.")
    name = f"blocks.7.{TO_K.partition('.')[2]}"
    save_file({key: tensor for key, tensor in load_file(file).items() if key.startswith(f"{name}.")}, file)
    assert refusal(flux2, file) == UNKNOWN_BEGINNING.format(file=file, name=name, size="64 x 64", layer=TO_K)


def test_beginnings_that_differ_are_not_read_and_not_called_another_model(flux2: Example, tmp_path: Path) -> None:
    path = TO_K.partition(".")[2]
    tensors = load_file(renamed(flux2, tmp_path, "module."))
    kept = {key: tensor for key, tensor in tensors.items() if key.startswith("module.transformer_blocks.0.attn.to_")}
    file = tmp_path / "mixed.safetensors"
    save_file({key.replace("module", "one") if path in key else key: tensor for key, tensor in kept.items()}, file)
    name = next(iter(load_file(file))).partition(".lora_")[0]
    layer = f"transformer.{name.partition('.')[2]}"
    assert refusal(flux2, file) == UNKNOWN_BEGINNING.format(file=file, name=name, size="64 x 64", layer=layer)


def test_a_layer_of_another_size_is_not_read_by_its_end(flux2: Example, tmp_path: Path) -> None:
    file = renamed(flux2, tmp_path, "module.")
    name = f"module.{TO_K.partition('.')[2]}"
    save_file({**load_file(file), f"{name}.lora_A.weight": torch.ones(4, 32)}, file)
    assert refusal(flux2, file) == (
        f"{file}: the adapter of '{TO_K}' is for 64 x 32, but its weight is 64 x 64; use the file's own model"
    )


def test_a_half_written_file_is_told_by_its_bytes(flux2: Example, tmp_path: Path) -> None:
    file = edited(flux2, "lora", tmp_path, lambda tensors: None)
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert refusal(flux2, file) == (f"{file}: truncated, {len(whole) - 100} of {len(whole)} bytes; download it again")


def test_a_file_without_tensors_is_no_adapter(flux2: Example, tmp_path: Path) -> None:
    file = tmp_path / "empty.safetensors"
    save_file({}, file)
    assert refusal(flux2, file) == f"{file}: holds no tensors; name an adapter file"


def test_two_kinds_in_a_file_are_named_with_a_layer_of_each(flux2: Example, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        drop(tensors, f"{LYCORIS}.")
        tensors[f"{LYCORIS}.oft_blocks"] = torch.zeros(16, 4, 4)

    file = edited(flux2, "lora", tmp_path, add)
    assert refusal(flux2, file) == (
        f"{file}: mixes kinds of adapters (lora of 'transformer.transformer_blocks.0.ff.linear_out', "
        f"diag-oft of '{TO_K}'); only one kind can be continued"
    )


def test_a_kind_that_cannot_be_taken_apart_is_named_with_the_layers(flux2: Example, tmp_path: Path) -> None:
    file = tmp_path / "adapter.safetensors"
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    save_file({f"{name}.lokr_w1": torch.ones(4, 4), f"{name}.lokr_w2": torch.ones(48, 16)}, file)
    layers = " and ".join(TO_K.replace("to_k", end) for end in ("to_q", "to_k", "to_v"))
    assert refusal(flux2, file) == f"{file}: '{name}' is {layers} of this model, and a lokr cannot be split"
