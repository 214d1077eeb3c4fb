"""The end of a run as files that other programs load: an adapter, or a whole model.

The worker's last act and `launch.py --export` call the same function. It reads the newest checkpoint and the base's
files on one process without any rank, writes beside the final name, reads the result back with diffusers' own loader,
and only then gives it its name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer import checkpoint, families
from trainer.adapters import adapted_layers
from trainer.adapters.formats import diffusers_adapter, layer_update
from trainer.config import InputError, NoAdapter, RunConfig
from trainer.families.base import ModelFamily
from trainer.rng import generator
from trainer.rundir import RunDir
from trainer.weights import TensorEntry, WeightFiles

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Rounding of two factors to the file's type; diffusers keeps what it reads.
TOLERANCE = {"bf16": 1e-2, "fp32": 1e-5}
MAX_SHARD_BYTES = 5 * 10**9
WEIGHTS_STEM = "diffusion_pytorch_model"


def export(cfg: RunConfig, run: RunDir, what: str, cache: Path, reference: Mapping[str, Tensor] | None = None) -> Path:
    """Write and verify the trained weights of the newest checkpoint. Returns the file or folder.

    what: adapter (one file), merged (base + adapter) or full (all weights), the last two as a diffusers folder.
    reference: the live model's trained weights, where there is one; else those of the checkpoint.
    Raises InputError when there is no checkpoint or `what` does not fit the run; RuntimeError, and leaves no file,
    when what diffusers reads back differs from the trained weights.
    """
    saved = checkpoint.complete(run.checkpoints)
    if not saved:
        raise InputError(f"{run.path}: has no complete checkpoint to export; resume the run first")
    if (what == "full") != isinstance(cfg.adapter, NoAdapter):
        needed = "adapter.type none; use merged" if what == "full" else "an adapter; use full"
        raise InputError(f"export.what: {what} needs {needed}")
    family = families.make(cfg, cache)
    weights = checkpoint.StoredWeights(saved[-1])
    if what == "adapter":
        return _export_adapter(cfg, run, family, weights, reference or weights)
    return _export_model(cfg, run, family, weights, what, reference or weights)


def _export_adapter(
    cfg: RunConfig, run: RunDir, family: ModelFamily, weights: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> Path:
    assert not isinstance(cfg.adapter, NoAdapter)
    final = run.export / f"{cfg.name}.safetensors"
    draft = run.export / f"{cfg.name}.draft.safetensors"
    tensors = diffusers_adapter(weights, cfg.adapter, family.export_prefix, DTYPES[cfg.export.dtype])
    with _removed_on_failure(draft):
        save_file(tensors, draft, _metadata(cfg, family))
        verify_adapter(draft, cfg, family, reference)
        return draft.replace(final)


def verify_adapter(file: Path, cfg: RunConfig, family: ModelFamily, reference: Mapping[str, Tensor]) -> None:
    """Load the file as a diffusers user does, and compare what it adds to each layer with the trained adapter.

    The base takes no memory: only the adapter's tensors are real. Each update is compared by what it makes of random
    inputs. Raises RuntimeError naming the layer.
    """
    assert not isinstance(cfg.adapter, NoAdapter)
    model = _without_weights(family.build())
    family.load_adapter_file(model, file)
    trained = layer_update(reference, cfg.adapter)
    loaded = adapted_layers(model)
    if loaded.keys() != trained.keys():
        differing = sorted(loaded.keys() ^ trained.keys())
        raise RuntimeError(
            f"{file}: diffusers loads {len(loaded)} layers, {len(trained)} were trained; "
            f"first difference {differing[0]}"
        )
    for name, (up, down) in trained.items():
        layer = loaded[name]
        (key,) = layer.lora_A.keys()
        probe = torch.randn(down.shape[1], 4, generator=generator("probe", name))
        read_up, read_down = layer.lora_B[key].weight, layer.lora_A[key].weight
        found = layer.scaling[key] * (read_up.float() @ (read_down.float() @ probe))
        _compare(file, name, found, up.float() @ (down.float() @ probe), TOLERANCE[cfg.export.dtype])


def _without_weights(model: nn.Module) -> nn.Module:
    """The meta model with parameters that lie on the CPU but share one zero: peft moves adapters to their layer's
    device, where a meta tensor would swallow them."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            nothing = torch.zeros(()).expand(parameter.shape)
            setattr(module, name, nn.Parameter(nothing, requires_grad=False))
    return model


def _export_model(
    cfg: RunConfig,
    run: RunDir,
    family: ModelFamily,
    weights: Mapping[str, Tensor],
    what: str,
    reference: Mapping[str, Tensor],
) -> Path:
    final = run.export / f"{cfg.name}-{what}"
    draft = run.export / f"{cfg.name}-{what}.draft"
    component = family.components[0]
    with _removed_on_failure(draft):
        draft.mkdir()
        shutil.copyfile(family.folder / component / "config.json", draft / "config.json")
        _write_shards(draft, _model_tensors(cfg, family, weights), DTYPES[cfg.export.dtype])
        _verify_model(draft, cfg, family, reference)
        return _replace_folder(draft, final)


@contextmanager
def _removed_on_failure(draft: Path) -> Iterator[None]:
    """A draft that an earlier process left is gone before, and this one's own if anything goes wrong inside."""
    _remove(draft)
    try:
        yield
    except BaseException:
        _remove(draft)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _replace_folder(draft: Path, final: Path) -> Path:
    """Rename `draft` to `final`; an export of that name is removed only when the new one is in its place."""
    former = final.with_name(f"{final.name}.former")
    _remove(former)
    if final.exists():
        final.rename(former)
    draft.rename(final)
    _remove(former)
    return final


def _model_tensors(cfg: RunConfig, family: ModelFamily, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model, one at a time: as trained, or the base's with the adapter's update added in fp32."""
    updates = {} if isinstance(cfg.adapter, NoAdapter) else layer_update(weights, cfg.adapter)
    for name, entry in family.weights().entries.items():
        if name in weights:
            yield name, weights[name]
            continue
        tensor = _read(entry)
        layer = name.removesuffix(".weight")
        if layer in updates:
            up, down = updates[layer]
            tensor = tensor.float() + up @ down
        yield name, tensor


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """Shards of at most MAX_SHARD_BYTES with an index; one tensor more than a shard is held at a time."""
    shards: list[dict[str, Tensor]] = [{}]
    files: list[tuple[Path, list[str]]] = []
    size = total = 0
    for name, tensor in tensors:
        tensor = tensor.to(dtype).contiguous()
        if size + tensor.nbytes > MAX_SHARD_BYTES and shards[-1]:
            files.append(_write_shard(folder, len(files), shards.pop()))
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    files.append(_write_shard(folder, len(files), shards.pop()))
    _name_shards(folder, files, total)


def _write_shard(folder: Path, number: int, tensors: dict[str, Tensor]) -> tuple[Path, list[str]]:
    path = folder / f"part-{number}.safetensors"
    save_file(tensors, path, {"format": "pt"})
    return path, list(tensors)


def _name_shards(folder: Path, files: list[tuple[Path, list[str]]], total: int) -> None:
    """diffusers' names, which hold the number of shards."""
    if len(files) == 1:
        files[0][0].rename(folder / f"{WEIGHTS_STEM}.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(files, 1):
        name = f"{WEIGHTS_STEM}-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{WEIGHTS_STEM}.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _verify_model(folder: Path, cfg: RunConfig, family: ModelFamily, reference: Mapping[str, Tensor]) -> None:
    """Compare the folder with the model diffusers builds from its config.json, and each tensor with the trained one.

    Tensor by tensor: a model that fills several GPUs need not fit into this host's memory.
    """
    architecture: Any = type(family.build())
    with torch.device("meta"):
        wanted = architecture.from_config(architecture.load_config(folder)).state_dict()
    written = WeightFiles.read(sorted(folder.glob("*.safetensors"))).entries
    if {name: tuple(t.shape) for name, t in wanted.items()} != {name: entry.shape for name, entry in written.items()}:
        raise RuntimeError(f"{folder}: its tensors are not those of diffusers' {architecture.__name__}")
    for name, tensor in _model_tensors(cfg, family, reference):
        _compare(folder, name, _read(written[name]).float(), tensor.float(), TOLERANCE[cfg.export.dtype])


def _compare(file: Path, name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((found.detach() - expected).norm())
    if not error <= tolerance * float(expected.norm()) + 1e-12:
        raise RuntimeError(
            f"{file}: '{name}' as diffusers reads it differs from the trained one by {error:.3g}, "
            f"whose norm is {float(expected.norm()):.3g}"
        )


def _read(entry: TensorEntry) -> Tensor:
    with safe_open(entry.file, "pt") as stream:
        tensor: Tensor = stream.get_tensor(entry.key)
        return tensor


def _metadata(cfg: RunConfig, family: ModelFamily) -> dict[str, str]:
    """String pairs in the file's header. Nothing a loader needs: the file is at scale 1 without it."""
    assert not isinstance(cfg.adapter, NoAdapter)
    return {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{family.model_spec}/{cfg.adapter.type}",
        "modelspec.title": cfg.name,
        "modelspec.implementation": "diffusers",
        "modelspec.resolution": f"{cfg.data.resolution}x{cfg.data.resolution}",
        "modelspec.trigger_phrase": cfg.data.trigger,
        "ss_network_dim": str(cfg.adapter.rank),
        "ss_network_alpha": str(cfg.adapter.rank),
        "ss_output_name": cfg.name,
        "ss_steps": str(cfg.train.steps),
        "ss_learning_rate": str(cfg.optim.lr),
    }
