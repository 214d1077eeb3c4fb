"""Writes the adapter as files, and reads each back before it gets its final name."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from trainer.adapters import ADAPTER, adapted_layers
from trainer.adapters.formats.reader import read_adapter
from trainer.adapters.formats.writer import DTYPES, SavedModule, adapter_files
from trainer.adapters.kinds import KINDS
from trainer.adapters.layer import LayerAdapter
from trainer.adapters.state import Factors
from trainer.config.schema import RunConfig
from trainer.export.drafts import Exported, draft
from trainer.export.metadata import adapter_metadata
from trainer.export.model import compare
from trainer.models.base import ImageFamily, ModelFamily
from trainer.models.saved_modules import saved_modules, saved_tensors
from trainer.models.state_dict import BaseWeights, TrainedModel, component_of, naming
from trainer.run.manifest import Progress
from trainer.system.imports import light_imports

# Rounding of up to four factors to the file's type, relative to the norm of the update. One small layer may differ by
# twice as much as the whole adapter.
TOLERANCE = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-5}
# Merging adds the update to a weight that may be 10^4 times as large: fp32 keeps that much of the weight's own size.
ROUNDING = 2.0**-22


def export_adapter(
    cfg: RunConfig,
    folder: Path,
    family: ModelFamily,
    weights: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    progress: Progress,
    initial: Factors | None = None,
) -> list[Exported]:
    """Write the adapter in `export.format`, one file or several, and read each back with another program's code.

    Args:
        cfg: The run's config.
        folder: Folder to write to.
        family: The run's family.
        weights: {parameter: trained value} to write.
        reference: {parameter: trained value} to compare with.
        progress: The training progress at which the weights were saved.
        initial: As for `TrainedAdapter`.

    Returns:
        The files, the main one first.
    """
    base = BaseWeights(family)
    # Whole in memory: an adapter is small, and the writer reads a layer more than once.
    trained, expected = (dict(TrainedModel(cfg, base, of, initial).layers) for of in (weights, reference))
    whole = saved_modules(cfg, family)
    saved, wanted = (saved_tensors(whole, of, base) for of in (weights, reference))
    dtype = cfg.export.dtype
    files = adapter_files(trained, cfg.export.format, naming(family), base.layer, DTYPES[dtype], saved)
    stem = cfg.name if cfg.export.format == "auto" else f"{cfg.name}-{cfg.export.format}"
    paths = [file.path(folder, stem) for file in files]
    differences = []
    for component in {file.component for file in files if file.peft_config}:
        verify_base(family, component, base)
    with ExitStack() as drafts:
        for file, path in zip(files, paths, strict=True):
            written = drafts.enter_context(draft(path))
            file.write(written, adapter_metadata(cfg, family, progress.step))
            if file.peft_config:
                family.write_tokenizer(written)
                _write_readme(written, Path(cfg.model.path), folder.parent, family.stops_of_its_own)
            held = {n: layer for n, layer in expected.items() if file.component in ("", component_of(n))}
            difference = verify_adapter(written, file.readers, family, held, dtype)
            inside = {n: module for n, module in wanted.items() if file.component == component_of(n)}
            differences.append(max(difference, verify_modules(written, family, inside, dtype)))
    return [Exported(path, difference) for path, difference in zip(paths, differences, strict=True)]


def _write_readme(written: Path, base: Path, home: Path, stops: tuple[str, ...]) -> None:
    """Write a README about what the adapter's files cannot tell programs, if there is any of it.

    How to load it after its run folder was moved, where its base is a stage's result in that: peft resolves no path
    relative to the adapter, and `base_model_name_or_path` is the base's path now. And where its answers end, if the
    base does not stop there.
    """
    parts = []
    if base.is_absolute() and base.is_relative_to(home):
        parts.append(MOVED.format(relative=os.path.relpath(base, written)))
    if stops:
        parts.append(STOPS.format(stops=" or ".join(f"`{stop}`" for stop in stops)))
    if parts:
        (written / "README.md").write_text("\n".join(parts), encoding="utf-8")


MOVED = """\
# Where the base model is

The base of this adapter is the result of an earlier stage of the same run, in `{relative}` relative to this folder.
`base_model_name_or_path` in adapter_config.json is its path at the time of the export. Once the run folder has been
moved or copied, export the run again, or load both:

```python
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM

adapter = Path(".")  # this folder
model = AutoModelForCausalLM.from_pretrained((adapter / "{relative}").resolve())
model = PeftModel.from_pretrained(model, adapter)
```
"""
STOPS = """\
# Where answers end

In conversations answers end with {stops}, at which the base does not stop. A program that loads the adapter takes the
stop tokens of the base; give it those of this folder:

```python
from transformers import GenerationConfig

model.generation_config = GenerationConfig.from_pretrained(".")  # this folder
```

vLLM takes the path of this folder as `--generation-config`. Merged weights (`export.what: merged`) need neither.
"""


def verify_adapter(
    file: Path, readers: tuple[str, ...], family: ModelFamily, expected: Mapping[str, LayerAdapter], dtype: str
) -> float:
    """Load the file as its users do and compare each layer's merged weight with that of the trained adapter.

    diffusers or peft load the file where they can; otherwise our own reader of other programs' names does. One layer at
    a time.

    Args:
        file: The file, or a folder of peft.
        readers: Programs that load the file.
        family: The run's family.
        expected: {layer: the trained adapter}.
        dtype: A value of `export.dtype`.

    Returns:
        The distance relative to the norm of the update.

    Raises:
        RuntimeError: The file differs from the trained adapter; the message names the layer.
    """
    base = BaseWeights(family)
    found = _read(file, readers, family, base, {component_of(name) for name in expected})
    if found.keys() != expected.keys():
        differing = sorted(found.keys() ^ expected.keys())
        raise RuntimeError(
            f"{file}: has {len(found)} layers when reloaded, {len(expected)} were trained; first difference: "
            f"{differing[0]}"
        )
    errors = [_error(file, name, found[name], layer, base, 2 * TOLERANCE[dtype]) for name, layer in expected.items()]
    # Over all layers: the update of a single one may be so small that rounding is most of it.
    error, size = (math.hypot(*parts) for parts in zip(*errors, strict=True))
    if not error <= TOLERANCE[dtype] * size + 1e-12:
        raise RuntimeError(
            f"{file}: the reloaded adapter differs from the trained one by {error:.3g}; the norm of its update is "
            f"{size:.3g}"
        )
    return error / size if size else error


def verify_base(family: ModelFamily, component: str, base: BaseWeights) -> None:
    """Compare the base that users load for an adapter with the one that it was trained on.

    Raises:
        RuntimeError: They differ by more than the rounding of the type in which users load it.
    """
    folder = family.component_folder(component)
    for name, tensor in family.loaded_by_users(component, folder).items():
        compare(folder, name, tensor, base.tensor(component, name), "bf16")


def verify_modules(folder: Path, family: ModelFamily, expected: Mapping[str, SavedModule], dtype: str) -> float:
    """Compare the modules that a folder of peft holds whole with the trained ones, as peft finds them.

    Returns:
        The largest distance of a tensor relative to its norm.

    Raises:
        RuntimeError: A module is missing or differs.
    """
    if not expected:
        return 0.0
    (component,) = {component_of(name) for name in expected}
    model, ours = _loaded_by_peft(folder, family, component)
    found = {
        f"{component}.{ours.get(name, name)}": module.modules_to_save[ADAPTER]
        for name, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
    }
    if found.keys() != expected.keys():
        raise RuntimeError(f"{folder}: holds the whole modules {sorted(found)}, {sorted(expected)} were trained")
    largest = 0.0
    for name, module in expected.items():
        written = found[name].state_dict()
        for inside, tensor in module.tensors.items():
            size, error = (float(of.norm()) for of in (tensor.float(), written[inside].float() - tensor.float()))
            if not error <= TOLERANCE[dtype] * size + 1e-12:
                raise RuntimeError(
                    f"{folder}: the reloaded '{name}.{inside}' differs from the trained one by {error:.3g}, whose norm "
                    f"is {size:.3g}"
                )
            largest = max(largest, error / size if size else error)
    return largest


Merge = Callable[[Tensor], Tensor]
"""A layer's weight -> the weight merged with a file's adapter."""


def _read(
    file: Path, readers: tuple[str, ...], family: ModelFamily, base: BaseWeights, components: Set[str]
) -> dict[str, Merge]:
    with light_imports():
        if "diffusers" in readers:
            # The base takes no memory: only the adapter's tensors are real.
            assert isinstance(family, ImageFamily), "diffusers reads adapters of image models only"
            model = nn.ModuleDict({name: _without_weights(family.build(name)) for name in family.live})
            family.load_adapter_file(model, file)
            return {name: _merge_of(layer) for name, layer in adapted_layers(model).items()}
        if "peft" in readers:
            (component,) = components
            loaded, ours = _loaded_by_peft(file, family, component)
            layers = adapted_layers(loaded).items()
            return {f"{component}.{ours.get(name, name)}": _merge_of(layer) for name, layer in layers}
    shapes = base.layer_shapes(components)
    return {name: layer.merged for name, layer in read_adapter(file, shapes, naming(family), base.layer).items()}


def _merge_of(layer: Any) -> Merge:
    def merge(weight: Tensor) -> Tensor:
        nothing = layer.base_layer.weight
        layer.base_layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
        layer.float().merge()
        merged: Tensor = layer.base_layer.weight.detach()
        # One layer's weight at a time: together they are the model.
        layer.base_layer.weight = nothing
        return merged

    return merge


def _loaded_by_peft(folder: Path, family: ModelFamily, component: str) -> tuple[nn.Module, dict[str, str]]:
    """Return a base without weights with the folder's adapter in it, and `published_paths`."""
    model = _without_weights(family.build(component))
    ours = published_paths(family, component)
    model = under_paths(model, ours) if ours else model
    config = PeftConfig.from_pretrained(str(folder))
    config.task_type = None  # these are only the layers, not a model that generates
    if isinstance(config, LoraConfig):
        config.fan_in_fan_out = False  # the module's layers are linear, also where the published ones are not
    # Assigned, not copied: a module that is saved whole has copies of weights that take no memory.
    PeftModel.from_pretrained(model, folder, config=config, low_cpu_mem_usage=True)
    return model, ours


def published_paths(family: ModelFamily, component: str) -> dict[str, str]:
    """Return {path of a layer in the published model: path in ours}, where only peft reads adapters of the family."""
    layout = family.layout(component) if family.peft_fields is not None else ()
    weights = [tensor for tensor in layout if tensor.name.endswith(".weight")]
    return {tensor.name.removesuffix(".weight"): tensor.parts[0].removesuffix(".weight") for tensor in weights}


def under_paths(model: nn.Module, paths: Mapping[str, str]) -> nn.Module:
    """Return a module with modules of the model under other paths. paths: {new path: path in the model}."""
    root = nn.Module()
    for path, own in paths.items():
        *parents, last = path.split(".")
        module = root
        for parent in parents:
            if parent not in dict(module.named_children()):
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        module.add_module(last, model.get_submodule(own))
    return root


def _without_weights(model: nn.Module) -> nn.Module:
    """Give a meta model parameters on the CPU that share one zero: peft moves adapters to their layer's device, and on
    the meta device they would lose their values."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            nothing = torch.zeros(()).expand(parameter.shape)
            setattr(module, name, nn.Parameter(nothing, requires_grad=False))
    return model


def _error(
    file: Path, name: str, merge: Merge, layer: LayerAdapter, base: BaseWeights, tolerance: float
) -> tuple[float, float]:
    """Compare a layer's weight merged with the file's adapter and with the trained one.

    Returns:
        (distance of the two beyond the rounding of merging, norm of the trained update).
    """
    start = torch.zeros(base.layer_shape(name)) if KINDS[layer.kind].adds else base.layer(name).float()
    trained = layer.merged(start)
    update = float((trained - start).norm())
    error = max(0.0, float((merge(start).float() - trained).norm()) - ROUNDING * float(start.norm()))
    if not error <= tolerance * update + 1e-12:
        raise RuntimeError(
            f"{file}: the reloaded update of '{name}' differs from the trained one by {error:.3g}, whose norm is "
            f"{update:.3g}"
        )
    return error, update
