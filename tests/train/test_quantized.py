"""Runs on a base in fewer bits: which layers, from which files, with what memory, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.distributed import run_ranks
from tests.models.common import IMAGES
from tests.readme import readme
from tests.runs import Outcome, alone, difference, make_pictures, make_run, run_config, train
from tests.weights.recorded import four_bits
from trainer.config.schema import RunConfig
from trainer.data.encode import encode_data
from trainer.distributed.context import RankContext
from trainer.distributed.world import World
from trainer.export.export import export
from trainer.models import families
from trainer.models.build import _coded, build_model, encoder_loader, load_model
from trainer.parallel.quantized_cache import QuantizedCache
from trainer.run.events import StatusEvent, WarningEvent
from trainer.system.errors import InputError
from trainer.weights.files import WeightFiles
from trainer.weights.quantization import FORMATS, quantized_layers


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quantized")
    make_pictures(root / "pictures", 4)
    return root


def config(root: Path, **changes: Any) -> RunConfig:
    base = {"quantize__format": "nf4", "train__steps": 3, "export__what": "none", "parallel__strategy": "none"}
    return run_config(root / "pictures", **base | changes)


def stored(root: Path, **changes: Any) -> dict[str, str]:
    """{layer: its format} of the layers that are stored as bytes."""
    cfg = config(root, **changes)
    model = build_model(cfg, families.make(cfg, root / "cache")).module
    layers = quantized_layers(model).items()
    return {name.removesuffix(".base_layer"): layer.format.name for name, layer in layers}


@pytest.mark.parametrize("family", IMAGES)
def test_the_linear_layers_of_the_blocks_are_stored_in_fewer_bits_and_nothing_else(root: Path, family: str) -> None:
    cfg = config(root, model__family=family)
    model = build_model(cfg, families.make(cfg, root / "cache")).module
    blocks = families.make(cfg, root / "cache").shard.blocks
    inside = {
        f"{outer}.{name}"
        for outer, block in model.named_modules()
        if type(block).__name__ in blocks
        for name, _ in block.named_modules()
    }
    layers = set(quantized_layers(model))
    assert layers
    assert layers <= inside
    modulation = re.compile(r".*\.(norm\w*\.linear|\w+_mod\.1|adaLN_modulation\.0|time_emb_proj)")
    assert not list(filter(modulation.fullmatch, layers))


def test_layers_are_kept_or_stored_otherwise_by_pattern(root: Path) -> None:
    everything = stored(root, model__family="flux1")
    assert set(everything.values()) == {"nf4"}
    found = stored(
        root,
        model__family="flux1",
        quantize__keep=["proj_out"],
        quantize__formats={"norm.linear": "int8", "to_q": "none"},
    )
    assert {name for name in everything if name not in found} == {
        name for name in everything if name.endswith(("proj_out", "to_q"))
    }
    modulation = {name: format for name, format in found.items() if name.endswith("norm.linear")}
    assert modulation == {f"transformer.single_transformer_blocks.{i}.norm.linear": "int8" for i in range(2)}


@pytest.mark.parametrize("field", ["keep", "formats"])
def test_a_pattern_that_matches_no_layer_of_the_blocks_is_refused(root: Path, field: str) -> None:
    value: Any = ["attn.to_qq"] if field == "keep" else {"attn.to_qq": "int8"}
    with pytest.raises(InputError, match=rf"quantize\.{field}: 'attn.to_qq' matches no layer of flux2; nearest: "):
        stored(root, **{f"quantize__{field}": value})


def test_a_format_without_a_layer_to_store_is_refused(root: Path) -> None:
    with pytest.raises(InputError, match=r"quantize\.format: nf4 is for frozen layers, but none is left to store"):
        stored(root, quantize__keep=[".*"])


def once(root: Path, name: str, **changes: Any) -> Outcome:
    cfg = config(root, **changes)
    return train(alone(), cfg, make_run(root, cfg, name))


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_on_bytes_is_the_run_on_a_base_that_holds_the_decoded_weights(root: Path, format: str) -> None:
    cfg = config(root, quantize__format=format)
    folder = families.make(cfg, root / "cache").folder
    copy = shutil.copytree(folder, root / f"decoded-{format}")
    file = next((copy / "transformer").glob("*.safetensors"))
    weights = load_file(file)
    for name in stored(root, quantize__format=format):
        key = f"{name.removeprefix('transformer.')}.weight"
        inputs = weights[key].shape[1]
        records = FORMATS[format].encode(weights[key])
        weights[key] = FORMATS[format].decode(records, inputs, torch.float32, FORMATS[format].table())
    save_file(weights, file, metadata={"format": "pt"})
    found = once(root, f"bytes-{format}", quantize__format=format)
    expected = once(root, f"plain-{format}", quantize__format="none", model__path=str(copy))
    assert found.losses == expected.losses
    assert difference(found.weights, expected.weights) == 0


def test_bytes_are_gathered_as_bytes_where_the_rest_is_gathered_in_bf16(root: Path) -> None:
    changes = {"quantize__format": "nf4", "train__precision": "bf16", "train__steps": 2}
    alone_on_all = once(root, "bytes-on-one", **changes)
    cfg = config(root, **changes, parallel__strategy="full", parallel__devices=2)
    found = run_ranks(2, train, cfg, make_run(root, cfg, "bytes-on-two"))[0]
    assert found.losses == pytest.approx(alone_on_all.losses, rel=1e-3)


@pytest.mark.slow
def test_a_folder_in_four_bits_of_bitsandbytes_trains_as_the_codes_in_it(root: Path) -> None:
    cfg = config(root)
    copy = shutil.copytree(families.make(cfg, root / "cache").folder, root / "bitsandbytes")
    file = next((copy / "transformer").glob("*.safetensors"))
    weights = load_file(file)
    for name in stored(root):
        key = f"{name.removeprefix('transformer.')}.weight"
        weights |= four_bits(key.removesuffix(".weight"), weights.pop(key))
    save_file(weights, file, metadata={"format": "pt"})
    described = json.loads((copy / "transformer" / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (copy / "transformer" / "config.json").write_text(json.dumps(described))
    found = once(root, "from-four-bits", model__path=str(copy))
    expected = once(root, "from-numbers")
    assert found.losses == expected.losses
    assert difference(found.weights, expected.weights) == 0


@pytest.mark.slow
def test_the_cache_of_the_base_is_written_once_and_read_by_any_number_of_ranks(root: Path) -> None:
    first = once(root, "cache-1", quantize__cache=True)
    files = list((root / "cache" / "base").iterdir())
    assert [file.suffix for file in files] == [".safetensors"]
    written = files[0].stat().st_mtime_ns
    cfg = config(root, quantize__cache=True, parallel__strategy="full", parallel__devices=2)
    second = run_ranks(2, train, cfg, make_run(root, cfg, "cache-2"))[0]
    assert [file.stat().st_mtime_ns for file in (root / "cache" / "base").iterdir()] == [written]
    plain = once(root, "no-cache")
    assert first.losses == plain.losses
    assert second.losses == pytest.approx(plain.losses, abs=1e-6)
    copies = config(root, quantize__cache=True, parallel__strategy="ddp", parallel__devices=2)
    run_ranks(2, train, copies, make_run(root / "copies", copies, "cache-4"))
    (by_turns,) = (root / "copies" / "cache" / "base").iterdir()
    assert by_turns.read_bytes() == files[0].read_bytes()
    other = config(root, quantize__format="int8", quantize__cache=True)
    train(alone(), other, make_run(root, other, "cache-3"))
    assert len(list((root / "cache" / "base").iterdir())) == 2


def test_a_cached_base_is_read_instead_of_the_original_and_another_reading_of_it_is_not_taken(root: Path) -> None:
    cfg = config(root, quantize__cache=True)
    cache = root / "read"
    family = families.make(cfg, cache)
    loads = [load_model(build_model(cfg, family), cfg, family, alone(), cache) for _ in range(2)]
    assert loads[1].bytes_read < 0.6 * loads[0].bytes_read
    first, second = (loaded.module.state_dict() for loaded in loads)
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    files, coded = family.weights("transformer"), _coded(loads[0].module["transformer"])
    name = next(iter(coded))
    entry = files.entries[coded[name].stored]
    other = WeightFiles({**files.entries, coded[name].stored: replace(entry, start=16)})
    kept = QuantizedCache(cache / "base", alone())
    assert kept.find(files, coded)
    assert kept.find(other, coded) is None


@pytest.mark.slow
def test_text_encoders_that_are_trained_along_are_stored_in_fewer_bits(root: Path) -> None:
    trained = {"unet": "adapter", "text_encoder": "adapter", "text_encoder_2": "frozen"}
    changes: dict[str, Any] = {"model__family": "sdxl", "model__train": trained, "train__steps": 2}
    names = stored(root, **changes)
    assert {name.partition(".")[0] for name in names} == {"unet", "text_encoder"}
    found = once(root, "live-encoders", **changes)
    assert any(".q_proj." in name for name in found.weights)


def test_dora_goes_on_from_a_file_on_a_base_in_fewer_bits(root: Path) -> None:
    dora = {"type": "dora", "rank": 2}
    cfg = config(root, adapter=dora, export__what="adapter", export__dtype="fp32", optim__lr=1e-2)
    run = make_run(root, cfg, "dora")
    before = train(alone(), cfg, run)
    file = export(cfg, run, root / "cache", before.weights)[0].path
    cfg = config(root, adapter=dora | {"start": str(file)}, train__steps=1, optim__lr=1e-9)
    after = train(alone(), cfg, make_run(root, cfg, "dora-goes-on"))
    assert difference(before.weights, after.weights) < 1e-5


def test_the_config_in_the_readme_is_one_of_flux1(root: Path) -> None:
    shown = readme("trainer/weights").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(quantize:\n.*?)```", shown, re.DOTALL)
    section = yaml.safe_load(text)["quantize"]
    assert set(stored(root, model__family="flux1", quantize=section).values()) == {"nf4", "int8"}


def test_a_cache_that_was_cut_short_is_written_again_and_one_without_a_place_is_told(
    root: Path, tmp_path: Path
) -> None:
    cfg = config(root, quantize__cache=True, train__steps=1)
    plain = once(root, "whole", train__steps=1)
    run = make_run(tmp_path, cfg, "first")
    train(alone(), cfg, run)
    (file,) = (tmp_path / "cache" / "base").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    again = train(alone(), cfg, make_run(tmp_path, cfg, "again"))
    assert file.read_bytes() == whole
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("in the way")
    nowhere = train(alone(), cfg, make_run(tmp_path, cfg, "nowhere"))
    assert again.losses == nowhere.losses == plain.losses
    (warning,) = [event.message for event in nowhere.events if isinstance(event, WarningEvent)]
    assert warning.startswith("quantize.cache: the base could not be kept (")
    assert warning.endswith("; the next run converts it again")


def embeddings(world: World, cfg: RunConfig, cache: Path) -> Tensor:
    """The embeddings of the empty caption, (tokens, channels). cache: a folder of its own."""
    context = RankContext(cfg, world, cache, lambda event: None)
    data = encode_data(families.make(cfg, cache), encoder_loader(cfg, world, cache), context)
    found: Tensor = data.cache.read(data.empty)["prompt_embeds"]
    return found


@pytest.mark.slow
def test_captions_are_encoded_by_an_encoder_in_fewer_bits(root: Path, tmp_path: Path) -> None:
    cfg = config(root, quantize__encoders=True, quantize__cache=True)
    in_bytes = embeddings(alone(), cfg, tmp_path)
    assert len(list((tmp_path / "base").iterdir())) == 1
    exact = embeddings(alone(), config(root), tmp_path)  # in the same folder of examples
    assert 1e-3 < (in_bytes - exact).norm() / exact.norm() < 0.3
    sharded = config(root, quantize__encoders=True, parallel__strategy="full", parallel__devices=2)
    for other in run_ranks(2, embeddings, sharded, tmp_path / "sharded"):
        assert torch.allclose(other, in_bytes, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_reading_of_a_large_model_is_told(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trainer.train.log.SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr("trainer.train.log.HEARTBEAT_SECONDS", 0.0)
    cfg = config(root, train__steps=1)
    events = train(alone(), cfg, make_run(tmp_path, cfg, "logged")).events
    progress = [event for event in events if isinstance(event, StatusEvent) and event.message == "MiB of weights"]
    assert {event.state for event in progress} == {"encoding", "loading"}
    assert all(event.done <= event.total for event in progress)
