"""What is written of an adapter, for every kind, family and format, and what its readers make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.adapters.consumers import CONSUMERS, diffusers, ourselves
from tests.adapters.examples import KINDS, Example, cached_example, layer_adapter, saved
from tests.models.common import IMAGES
from trainer.adapters import kinds
from trainer.adapters.formats.reader import read_adapter
from trainer.adapters.formats.writer import AdapterFile, adapter_files, suffixes
from trainer.adapters.layer import LayerAdapter
from trainer.models import families
from trainer.system.errors import InputError

FORMATS = ("auto", "diffusers", "comfyui", "kohya", "lycoris", "peft")
FP32 = 2e-6
BF16 = 4e-3
# peft asks transformers' models for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def flux2(cache: Path) -> Example:
    return cached_example("flux2", cache)


@pytest.fixture
def sdxl(cache: Path) -> Example:
    return cached_example("sdxl", cache)


QUICK = ("flux2", "sdxl", "bagel", "causal_lm")
"""Families whose files `make test` reads for every adapter; those of the others are named alike."""


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        pytest.param(name, a, marks=() if name in QUICK or a in ("lora", "dora") else pytest.mark.slow)
        for name in families.names()
        for a in KINDS
        if a != "locon" or families.get(name).conv_targets
        if name in IMAGES or kinds.KINDS[KINDS[a]].peft
    ],
)
def test_each_reader_of_each_format_gets_the_trained_weights(
    family: str, adapter: str, cache: Path, tmp_path: Path
) -> None:
    model = cached_example(family, cache)
    layers = model.adapter(adapter)
    read: list[tuple[set[str], Mapping[str, str]]] = []
    for format in FORMATS:
        for file, path in written(model, layers, format, tmp_path / format):
            if (contents := (set(file.tensors), file.metadata)) in read:
                continue  # another format wrote the same
            read.append(contents)
            for reader in {ourselves, *(CONSUMERS[name] for name in file.readers if name in CONSUMERS)}:
                assert reader(model, path, layers) <= FP32, (format, file.suffix, reader)
    assert read


def written(
    model: Example, layers: dict[str, LayerAdapter], format: str, folder: Path
) -> list[tuple[AdapterFile, Path]]:
    """The files of a format, none where it cannot carry the adapter."""
    try:
        files = model.files(layers, format)
    except InputError:
        return []
    return list(zip(files, saved(files, folder), strict=True))


@pytest.mark.parametrize("adapter", ["lora", "dora", pytest.param("loha", marks=pytest.mark.slow)])
def test_text_encoders_are_written_beside_the_denoiser(sdxl: Example, adapter: str, tmp_path: Path) -> None:
    layers = sdxl.adapter(adapter, sdxl.family.components)
    for format in FORMATS:
        for file, path in written(sdxl, layers, format, tmp_path / format):
            for reader in {CONSUMERS[name] for name in file.readers if name in CONSUMERS}:
                assert reader(sdxl, path, layers) <= FP32, (format, file.suffix, reader)
            component = (file.suffix.removeprefix("-") or "unet") if file.peft_config else ""
            held = {name: layer for name, layer in layers.items() if name.startswith(f"{component}.") or not component}
            assert ourselves(sdxl, path, held) <= FP32, (format, file.suffix)


@pytest.mark.parametrize("adapter", KINDS)
def test_bf16_files_are_within_4e_3_of_the_update(sdxl: Example, adapter: str, tmp_path: Path) -> None:
    layers = sdxl.adapter(adapter)
    for path in saved(sdxl.files(layers, "auto", torch.bfloat16), tmp_path / "bf16"):
        found = sdxl.read(path)
        error = update = 0.0
        for name, layer in layers.items():
            weight = sdxl.weight(name)
            trained = layer.merged(weight)
            error += float((found[name].merged(weight) - trained).square().sum())
            update += float((trained - weight).square().sum())
        assert 1e-4 < (error / update) ** 0.5 <= BF16


FLUX = ("transformer.transformer_blocks.0.attn.to_k", "lycoris_transformer_blocks_0_attn_to_k")
UNET = tuple(
    prefix + separator.join(("mid_block", "resnets", "0", "conv1"))
    for prefix, separator in (("unet.", "."), ("lycoris_", "_"), ("lora_unet_", "_"))
)
LORA = {"lora_A.weight": (4, 64), "lora_B.weight": (64, 4)}
CONV = (3, 3)


@pytest.mark.parametrize(
    ("adapter", "files"),
    [
        ("lora", {"": LORA}),
        ("dora", {"": LORA | {"lora_magnitude_vector.weight": (64,), "dora_scale": (64, 1)}}),
        (
            "loha",
            {
                "": {
                    "hada_w1_a": (64, 4),
                    "hada_w1_b": (4, 64),
                    "hada_w2_a": (64, 4),
                    "hada_w2_b": (4, 64),
                    "alpha": (),
                },
                "-diffusers": {"lora_A.weight": (16, 64), "lora_B.weight": (64, 16)},
            },
        ),
        ("lokr", {"": {"lokr_w1": (4, 4), "lokr_w2_a": (16, 2), "lokr_w2_b": (2, 16)}}),
        ("diag-oft", {"": {"oft_blocks": (16, 4, 4), "alpha": ()}}),
        ("boft in 2 stages", {"": {"oft_blocks": (5, 16, 4, 4), "alpha": ()}}),
    ],
)
def test_the_default_files_of_a_transformer_hold_these_tensors_of_a_layer(
    flux2: Example, adapter: str, files: dict[str, dict[str, tuple[int, ...]]]
) -> None:
    assert {f.suffix: tensors_of(f, FLUX) for f in flux2.files(flux2.adapter(adapter), "auto")} == files


@pytest.mark.parametrize(
    ("adapter", "files"),
    [
        ("locon", {"": {"lora_down.weight": (4, 24, *CONV), "lora_up.weight": (24, 4, 1, 1), "alpha": ()}}),
        (
            "lokr",
            {
                "": {"lokr_w1": (4, 4), "lokr_w2_a": (6, 2), "lokr_w2_b": (2, 6 * 9), "alpha": ()},
                "-diffusers": {"lora_A.weight": (8, 24, *CONV), "lora_B.weight": (24, 8, 1, 1)},
            },
        ),
        ("lokr whole", {"": {"lokr_w1": (4, 4), "lokr_w2": (6, 6, *CONV), "alpha": ()}}),
    ],
)
def test_the_default_files_of_a_unet_hold_these_tensors_of_a_convolution(
    sdxl: Example, adapter: str, files: dict[str, dict[str, tuple[int, ...]]]
) -> None:
    assert {f.suffix: tensors_of(f, UNET) for f in sdxl.files(sdxl.adapter(adapter), "auto")} == files


def tensors_of(file: AdapterFile, names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """{end of a key: shape} of the layer that has one of the names."""
    return {
        key.removeprefix(f"{name}."): tuple(tensor.shape)
        for name in names
        for key, tensor in file.tensors.items()
        if key.startswith(f"{name}.")
    }


def test_what_loses_too_much_in_bf16_is_written_in_fp32(flux2: Example) -> None:
    kept = {
        key.removeprefix(f"{name}.")
        for adapter in KINDS
        for file in flux2.files(flux2.adapter(adapter), "auto", torch.bfloat16)
        for name in FLUX
        for key, tensor in file.tensors.items()
        if key.startswith(name) and tensor.dtype == torch.float32
    }
    assert kept == {"alpha", "dora_scale", "lora_magnitude_vector.weight", "lokr_w1"}


def test_a_rotation_has_an_alpha_of_0_and_stages_without_training_are_zeros(flux2: Example) -> None:
    (file,) = flux2.files(flux2.adapter("boft in 2 stages"), "auto")
    assert file.tensors[f"{FLUX[1]}.alpha"] == 0
    blocks = file.tensors[f"{FLUX[1]}.oft_blocks"]
    assert [bool(stage.any()) for stage in blocks] == [True, True, False, False, False]


def test_comfyui_gets_a_dora_scale_that_makes_up_for_its_division_and_says_so(flux2: Example) -> None:
    layers = flux2.adapter("dora")
    (both,), (comfyui,), (lycoris,) = (flux2.files(layers, format) for format in ("auto", "comfyui", "lycoris"))
    layer, weight = layers[FLUX[0]], flux2.weight(FLUX[0])
    for file, name in ((both, FLUX[0]), (comfyui, FLUX[1])):
        assert file.metadata == {"dora_scale_convention": "comfyui"}
        turned = weight + layer.update()
        theirs = file.tensors[f"{name}.dora_scale"] * turned / weight.norm(dim=1, keepdim=True)
        torch.testing.assert_close(theirs, layer.merged(weight))
    assert lycoris.metadata == {}
    assert torch.equal(lycoris.tensors[f"{FLUX[1]}.dora_scale"], layer.tensors["magnitude"].unsqueeze(1))


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_dora_of_a_layer_with_rows_of_zeros_is_finite_in_every_format_and_comes_back(
    flux2: Example, is_trained: bool, tmp_path: Path
) -> None:
    name, number = FLUX[0], float(is_trained)
    weight, plain = flux2.weight(name).clone(), flux2.adapter("dora")[name]
    weight[::3] = 0
    tensors = {key: tensor.clone() for key, tensor in plain.tensors.items()}
    tensors["up"][::3] *= number
    tensors["magnitude"][::3] *= number
    layer = replace(plain, tensors=tensors)
    for format in ("auto", "comfyui", "lycoris", "peft"):
        (file,) = adapter_files({name: layer}, format, flux2.naming, lambda name: weight, torch.float32)
        assert all(tensor.isfinite().all() for tensor in file.tensors.values())
        (path,) = saved([file], tmp_path / format)
        found = read_adapter(path, flux2.shapes, flux2.naming, lambda name: weight)[name]
        torch.testing.assert_close(found.merged(weight), layer.merged(weight))
        if "comfyui" in file.readers:
            (scale,) = (tensor for key, tensor in file.tensors.items() if key.endswith("dora_scale"))
            length = weight.norm(dim=1, keepdim=True) + torch.finfo(torch.float32).eps
            torch.testing.assert_close(scale / length * (weight + layer.update()), layer.merged(weight))


def test_kohya_names_join_layers_of_different_ranks_and_without_an_adapter(flux2: Example) -> None:
    layers = {name: layer for name, layer in flux2.adapter("lora").items() if name.endswith((".to_q", ".to_v"))}
    (file,) = flux2.files(layers, "kohya")
    joined = "lora_unet_double_blocks_0_img_attn_qkv"
    up, down, alpha = (file.tensors[f"{joined}.{end}"] for end in ("lora_up.weight", "lora_down.weight", "alpha"))
    assert (up.shape, down.shape, alpha) == ((192, 10), (10, 64), 10)
    assert not up[64:128].any()
    q, _, v = (up @ down).chunk(3)
    torch.testing.assert_close(q, layers[FLUX[0].replace("to_k", "to_q")].update())
    torch.testing.assert_close(v, layers[FLUX[0].replace("to_k", "to_v")].update())


def test_kohya_names_swap_the_halves_of_the_last_norm(flux2: Example) -> None:
    name = "transformer.norm_out.linear"
    layer = layer_adapter("lora", name, flux2.weight(name))
    (file,) = flux2.files({name: layer}, "kohya")
    joined = "lora_unet_final_layer_adaLN_modulation_1"
    update = file.tensors[f"{joined}.lora_up.weight"] @ file.tensors[f"{joined}.lora_down.weight"]
    scale, shift = layer.update().chunk(2)
    torch.testing.assert_close(update, torch.cat([shift, scale]))


def test_ranks_that_differ_share_one_alpha_under_kohya_names_of_paths(sdxl: Example) -> None:
    layers = sdxl.adapter("lora")
    assert {layer.tensors["down"].shape[0] for layer in layers.values()} == {4, 6}
    (file,) = sdxl.files(layers, "auto")
    assert {float(tensor) for key, tensor in file.tensors.items() if key.endswith(".alpha")} == {4.0}


def test_a_folder_of_peft_is_written_with_its_config_and_each_file_with_its_metadata(
    flux2: Example, tmp_path: Path
) -> None:
    (folder,) = flux2.files(flux2.adapter("dora"), "peft")
    folder.write(folder.path(tmp_path, "run"), {"title": "x"})
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    (file,) = flux2.files(flux2.adapter("dora"), "auto")
    file.write(file.path(tmp_path, "run"), {"title": "x"})
    with safe_open(tmp_path / "run.safetensors", "pt") as stored:
        assert stored.metadata() == {"format": "pt", "title": "x", "dora_scale_convention": "comfyui"}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a.q", "b.q"], ["q"]),
        (["a.q"], ["a.q"]),
        (["x.0.q", "x.1.q", "y.0.k"], ["0.q", "1.q", "k"]),
        (["q"], None),
        (["missing"], None),
    ],
)
def test_layers_are_named_by_their_shortest_ends_unless_these_select_others(
    names: list[str], found: list[str] | None
) -> None:
    modules = {"", "q", "a", "a.q", "b", "b.q"} if "x.0.q" not in names else {"x.0.q", "x.1.q", "x.2.q", "y.0.k"}
    modules -= {"q"} if names != ["q"] else set()
    assert suffixes(names, modules) == found


LORA_ONLY = "of this kind of model, only lora and locon; use auto, comfyui, lycoris"


@pytest.mark.parametrize(
    ("adapter", "format", "message"),
    [
        (
            "boft",
            "diffusers",
            "diffusers cannot carry a boft adapter; use auto, comfyui, lycoris, or export.what: merged",
        ),
        ("diag-oft", "peft", "peft cannot carry a diag-oft adapter; use auto, comfyui, lycoris"),
        ("diag-oft", "kohya", f"kohya cannot carry a diag-oft adapter {LORA_ONLY}"),
        ("lokr", "kohya", f"kohya cannot carry a lokr adapter {LORA_ONLY}, peft"),
        ("dora", "kohya", f"kohya cannot carry a dora adapter {LORA_ONLY}, peft"),
    ],
)
def test_a_format_that_cannot_carry_an_adapter_says_what_can(
    flux2: Example, adapter: str, format: str, message: str
) -> None:
    assert refusal(flux2, flux2.adapter(adapter), format) == f"export.format: {message}"


def refusal(model: Example, layers: dict[str, LayerAdapter], format: str) -> str:
    with pytest.raises(InputError) as error:
        model.files(layers, format)
    return str(error.value)


def test_a_lokr_whose_lora_would_be_larger_than_its_layers_is_not_given_to_diffusers(sdxl: Example) -> None:
    assert refusal(sdxl, sdxl.adapter("lokr whole"), "diffusers") == (
        "export.format: diffusers cannot carry a lokr adapter but as a lora, which here has rank 24 and 1.26 times the "
        "numbers of the layers; use auto, comfyui, lycoris, peft, or export.what: merged"
    )


def test_a_loha_whose_lora_would_have_a_rank_above_256_is_not_given_to_diffusers(flux2: Example) -> None:
    with torch.device("meta"):
        sizes = {"w1_a": (4096, 17), "w1_b": (17, 4096), "w2_a": (4096, 17), "w2_b": (17, 4096)}
        layers = {FLUX[0]: LayerAdapter("loha", {name: torch.empty(size) for name, size in sizes.items()})}
        assert [file.readers for file in flux2.files(layers, "auto")] == [("comfyui", "lycoris")]
        assert refusal(flux2, layers, "diffusers") == (
            "export.format: diffusers cannot carry a loha adapter but as a lora, which here has rank 289 and 0.14 "
            "times the numbers of the layers; use auto, comfyui, lycoris, peft, or export.what: merged"
        )


OUTSIDE = {
    "transformer.time_guidance_embed.timestep_embedder.linear_1": "diffusion_model.time_in.in_layer",
    "transformer.double_stream_modulation_img.linear": "diffusion_model.double_stream_modulation_img.lin",
    "transformer.norm_out.linear": None,
}
"""{layer outside of the blocks: its name for ComfyUI, where that is the original one}"""


@pytest.mark.parametrize("adapter", ["lora", "dora", "lokr", "boft"])
def test_comfyui_gets_layers_outside_of_the_blocks_by_their_original_names(
    flux2: Example, adapter: str, tmp_path: Path
) -> None:
    outside = [name for name, original in OUTSIDE.items() if original or adapter in ("lora", "lokr")]
    layers = {name: layer_adapter(adapter, name, flux2.weight(name)) for name in (*outside, FLUX[0])}
    files = flux2.files(layers, "auto")
    assert [file.readers for file in files] == [("comfyui",), ("diffusers",)][: 1 if adapter == "boft" else 2]
    names = {name.rpartition(".lora_" if adapter in ("lora", "dora") else ".")[0] for name in files[0].tensors}
    assert {original for original in OUTSIDE.values() if original} <= names
    readers = (ourselves, diffusers)
    for read, path in zip(readers, saved(files, tmp_path / "files"), strict=False):
        assert read(flux2, path, layers) <= 1e-5


def test_blocks_larger_than_their_number_are_not_given_to_lycoris(flux2: Example) -> None:
    layers = {FLUX[0]: LayerAdapter("diag-oft", {"blocks": 0.1 * torch.randn(4, 16, 16)})}
    assert flux2.files(layers, "auto")[0].readers == ("comfyui",)
    assert refusal(flux2, layers, "lycoris") == (
        "export.format: lycoris cannot carry a diag-oft adapter with larger blocks than it has blocks: LyCORIS takes "
        "the smaller of the two for the block size; use auto, comfyui, or a smaller adapter.block_size"
    )


def test_layers_split_by_different_factors_are_not_given_to_peft(flux2: Example) -> None:
    layers = {
        FLUX[0].replace("to_k", end): LayerAdapter(
            "lokr", {"w1": torch.randn(a, a), "w2": torch.randn(64 // a, 64 // a)}
        )
        for end, a in (("to_k", 4), ("to_q", 2))
    }
    assert refusal(flux2, layers, "peft") == (
        "export.format: peft cannot carry a lokr adapter whose layers are split by different factors; "
        "use auto, comfyui, lycoris"
    )


def test_kohya_names_need_a_layer_of_the_original_file(flux2: Example) -> None:
    layers = {"transformer.else": layer_adapter("lora", "else", torch.randn(8, 8))}
    assert refusal(flux2, layers, "kohya") == (
        "export.format: kohya has no name for 'transformer.else', which the model's original single file does not "
        "have; use auto, comfyui, lycoris, peft, or leave it out of adapter.targets"
    )


def test_a_text_encoder_that_no_other_program_names_is_left_to_diffusers_and_peft(sdxl: Example) -> None:
    unnamed = replace(sdxl.naming, kohya_prefixes={"unet": "lora_unet"})
    layers = sdxl.adapter("lora", ("text_encoder",))
    with pytest.raises(InputError) as error:
        adapter_files(layers, "auto", unnamed, sdxl.weight, torch.float32)
    assert str(error.value) == (
        "export.format: other programs have no names for text_encoder of this kind of model; use diffusers or peft, "
        "or leave it out of model.train"
    )
