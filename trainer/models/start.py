"""The file `adapter.start`, from which the adapter of a new run continues."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.adapters.formats.reader import encoder_layers, read_adapter, read_modules
from trainer.adapters.state import BaseWeight, parameters_of
from trainer.adapters.targets import counted
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.models.base import ModelFamily
from trainer.models.build import BuiltModel, LoadedModel
from trainer.models.pissa import starts_from_singular_values, trained_factors
from trainer.models.saved_modules import saved_modules
from trainer.models.state_dict import BaseWeights, naming
from trainer.parallel.load import fill_rows
from trainer.system.errors import InputError


def check_start(built: BuiltModel, cfg: RunConfig, family: ModelFamily) -> None:
    """Raise InputError if the file `adapter.start` is not an adapter of this model and this run.

    The base's weights are not read: where a value in the file depends on them, they count as ones.
    """
    if (file := _file_of(cfg)) is None:
        return
    shapes = _layer_shapes(family, BaseWeights(family))
    try:
        for _ in _read(file, built, cfg, family, shapes, lambda layer: torch.ones(()).expand(shapes[layer]))[0]:
            pass
    except InputError as error:
        message = str(error)
        raise InputError(message if message.startswith("adapter.") else f"adapter.start: {message}") from error


def continue_adapter(
    loaded: LoadedModel, cfg: RunConfig, family: ModelFamily, warn: Callable[[str], None] = lambda sentence: None
) -> tuple[str, ...]:
    """Give the adapter the values of the file `adapter.start`, if there is one. Returns sentences for the user.

    Every rank reads the whole file, and for dora the weights of its layers, and keeps its own rows. warn: takes a
    sentence about what is left out.

    Raises:
        InputError: The file is not an adapter of this model and this run.
    """
    if (file := _file_of(cfg)) is None:
        return ()
    base = BaseWeights(family)
    shapes = _layer_shapes(family, base)
    if encoders := encoder_layers(file, shapes):
        warn(
            f"adapter.start {file}: {counted(encoders)} of text encoders left out, as '{encoders[0]}': this kind of "
            "model is not trained with them, and the exported file will not hold them"
        )
    values, notes = _read(file, loaded, cfg, family, shapes, base.layer)
    with torch.no_grad():
        for name, value in values:
            fill_rows(loaded.trainables[name], value)
    return notes


def _file_of(cfg: RunConfig) -> Path | None:
    start = None if isinstance(cfg.adapter, NoAdapter) else cfg.adapter.start
    return None if start is None else Path(start)


def _layer_shapes(family: ModelFamily, base: BaseWeights) -> dict[str, tuple[int, ...]]:
    # Live components come first: files of peft do not name the text encoder they belong to.
    return base.layer_shapes(dict.fromkeys((*family.live, *family.components)))


def _read(
    file: Path,
    model: BuiltModel | LoadedModel,
    cfg: RunConfig,
    family: ModelFamily,
    layer_shapes: Mapping[str, tuple[int, ...]],
    base: BaseWeight,
) -> tuple[Iterator[tuple[str, Tensor]], tuple[str, ...]]:
    """Return (parameter, value) for all that the file holds, converted one by one, and sentences for the user.

    Raises InputError for layers and modules that the run does not train, and while it converts for adapters of another
    kind or size.
    """
    section = cfg.adapter
    assert not isinstance(section, NoAdapter)
    layers = read_adapter(file, layer_shapes, naming(family), base)
    idle = [name for name in layers if _is_idle(name, model.module, family)]
    used = {name: layer for name, layer in layers.items() if name not in idle}
    injected = model.adapter
    if unchanged := sorted(used.keys() - set(injected.layers)):
        raise InputError(
            f"adapter.start: {file} changes {counted(unchanged)} that this run leaves alone, first '{unchanged[0]}'; "
            "add them to adapter.targets, or to model.train"
        )
    modules = _whole_modules(file, cfg, family)
    new = len(injected.layers) - len(used)
    rest = f"; the other {new} start unchanged" if new else ""
    notes = [f"{counted(used)} of the adapter continue from {file}{rest}"]
    if idle:
        notes.append(f"{counted(idle)} of {file} left out, as '{idle[0]}': nothing in this kind of training reads it")

    def values() -> Iterator[tuple[str, Tensor]]:
        yield from modules.items()
        for name, layer in used.items():
            trained = trained_factors(layer) if starts_from_singular_values(cfg) else layer
            yield from parameters_of(name, trained, section, injected.parameters, base).items()

    return values(), tuple(notes)


def _whole_modules(file: Path, cfg: RunConfig, family: ModelFamily) -> dict[str, Tensor]:
    """Return {parameter: value} of the modules that the file `adapter.start` holds whole."""
    components = tuple(dict.fromkeys((*family.live, *family.components)))
    found = read_modules(file, naming(family), components)
    trained = saved_modules(cfg, family)
    owners = {f"{name}.{inside}": owner for name, module in trained.items() for inside, owner in module.tensors.items()}
    unknown = sorted(found.keys() - owners.keys())
    if unknown:
        raise InputError(
            f"adapter.start: {file} holds '{unknown[0]}', which this run does not train; name its module in "
            "adapter.modules_to_save"
        )
    shapes = BaseWeights(family)
    for name, tensor in found.items():
        component, _, inside = owners[name].partition(".")
        wanted = shapes.shapes(component).get(inside, tuple(tensor.shape))
        if tuple(tensor.shape) != wanted:
            raise InputError(
                f"adapter.start: '{name}' has shape {list(tensor.shape)} in {file}, the model needs {list(wanted)}; "
                "the file was made for another model"
            )
    return {owners[name]: tensor for name, tensor in found.items()}


def _is_idle(layer: str, model: nn.ModuleDict, family: ModelFamily) -> bool:
    """Whether nothing reads the layer's output: the family builds a live component without it, or never trains it."""
    component, _, inside = layer.partition(".")
    if component not in model:
        return False
    exists = any(name == inside for name, _ in model[component].named_modules())
    return not exists or any(re.fullmatch(pattern, f"{inside}.weight") for pattern in family.never_trained)
