"""Reader of adapter files of this and other programs, by the names of their tensors.

It shares no code and no table of names with the writer, because it also verifies what the writer wrote: of each kind it
asks the `Reader`, never the `Kind`. See DECISIONS 212.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import safe_open
from torch import Tensor

from trainer.adapters.base import Reader
from trainer.adapters.formats.patterns import find_pattern
from trainer.adapters.formats.writer import DORA_CONVENTION, Naming
from trainer.adapters.kinds import READERS
from trainer.adapters.layer import LayerAdapter
from trainer.config.sections import ADAPTERS, AdapterSection
from trainer.system.errors import InputError
from trainer.system.files import first_problem, read_json
from trainer.weights.files import ORIGINAL_PREFIX, WeightFiles
from trainer.weights.headers import PEFT_FILE

PEFT_PREFIX = "base_model.model."
PEFT_CONFIG = "adapter_config.json"
DIFFUSERS_METADATA = "lora_adapter_metadata"
SETTINGS = TypeAdapter(dict[str, Any])
LONGEST_NAME = 512
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

ENCODER_PREFIXES = ("lora_te", "text_encoder")

SUPPORTED = tuple(name for name, method in ADAPTERS.items() if issubclass(method, AdapterSection))
ENDS = tuple(dict.fromkeys(end for reader in READERS for end in reader.ends))
KEY = re.compile(rf"(?P<layer>.+)\.(?P<end>alpha|{'|'.join(map(re.escape, ENDS))})")
LIVE_KEY = re.compile(
    rf"(?P<tensor>.+\.(?:{'|'.join(re.escape(end.removesuffix('.weight')) for end in ENDS)}))"
    r"\.(?P<adapter>\w+)(?P<end>\.weight)?"
)
"""A key as peft's modules have it, with the name of the adapter, which peft leaves out of its files."""


def read_adapter(
    file: Path, shapes: Mapping[str, tuple[int, ...]], naming: Naming, base: Callable[[str], Tensor]
) -> dict[str, LayerAdapter]:
    """Read an adapter file of this program, diffusers, peft, ComfyUI, kohya or LyCORIS.

    Args:
        file: The file, or a folder of peft.
        shapes: {layer, component first: shape of its weight} of all linear layers and convolutions of the model.
        naming: The family's names in files.
        base: Returns the weight of a layer; called only where what is stored depends on the weight.

    Returns:
        {layer: its adapter}.

    Raises:
        InputError: The file is incomplete, holds tensors that are not understood, or belongs to another model.
    """
    stored = _Stored.open(file / PEFT_FILE if file.is_dir() else file)
    known = _model_layers(shapes, naming)
    groups = {name: tensors for name, tensors in stored.groups().items() if not _is_left_out(name, shapes)}
    if not groups and not stored.whole:
        raise InputError(
            f"{stored.file}: holds layers of text encoders only, which this kind of model is not trained with; name a "
            "file with layers of the model"
        )
    # Programs put a name of their own before all layers, as `diffusion_model.` or `lora_transformer_`.
    prefix = _common_prefix(groups, known)
    layers: dict[str, LayerAdapter] = {}
    for name, tensors in groups.items():
        group = _Group(stored, name, tensors)
        whole = group.adapter()
        target = known.get(name) or (known.get(name.removeprefix(prefix)) if prefix else None)
        if target is None:
            raise InputError(_unknown_layer(group, whole, known, shapes))
        for layer, part in _parts(group, whole, target, shapes):
            fitted = _fitted(group, layer, part, shapes[layer])
            if layer in layers:
                raise group.error(f"'{name}' is '{layer}', which the file changes under another name too; keep one")
            layers[layer] = _uncorrected(group, fitted, base(layer)) if group.is_corrected else fitted
    examples = {adapter.kind: layer for layer, adapter in layers.items()}
    if len(examples) > 1:
        found = ", ".join(f"{kind} of '{layer}'" for kind, layer in examples.items())
        raise InputError(f"{stored.file}: mixes kinds of adapters ({found}); only one kind can be continued")
    return layers


def encoder_layers(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the text encoders' layers in a file that `read_adapter` leaves out, as the model's are not trained."""
    stored = WeightFiles.read([file / PEFT_FILE if file.is_dir() else file]).entries
    names = dict.fromkeys(found[0] for key in stored if (found := _layer_and_end(key)))
    return tuple(name for name in names if _is_left_out(name, shapes))


def _is_left_out(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return name.startswith(ENCODER_PREFIXES) and not any(layer.startswith("text_encoder") for layer in shapes)


def read_modules(file: Path, naming: Naming, components: Sequence[str]) -> dict[str, Tensor]:
    """Read the modules that a folder of peft holds whole, in addition to its adapter.

    Args:
        file: The folder, or another adapter file, which has none.
        naming: The family's names in files.
        components: Components of the model, likelier ones first: the folder does not name them.

    Returns:
        {name of the tensor in the model, component first: tensor}.
    """
    stored = _Stored.open(file / PEFT_FILE if file.is_dir() else file)
    published = {
        fused.name.removeprefix(ORIGINAL_PREFIX): f"{component}.{fused.parts[0]}"
        for component, layout in naming.layouts.items()
        for fused in layout
        if len(fused.parts) == 1
    }
    found: dict[str, Tensor] = {}
    for key in stored.whole:
        path = key.removeprefix(PEFT_PREFIX)
        owners = (component for component in components if path.rpartition(".")[0] in naming.modules(component))
        found[published.get(path) or f"{next(owners, components[0])}.{path}"] = stored.tensors[key]
    return found


@dataclass(frozen=True)
class _Stored:
    """The content of a file. settings: {prefix of layers' names: peft's config for these layers}."""

    file: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    settings: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, file: Path) -> _Stored:
        WeightFiles.read([file])  # refuses a file that is missing, truncated or not safetensors
        with safe_open(file, "pt") as stream:
            tensors = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118  it is not a mapping
            metadata = stream.metadata() or {}
        if not tensors:
            raise InputError(f"{file}: holds no tensors; name an adapter file")
        return cls(file, tensors, metadata, _settings(file, metadata))

    @cached_property
    def whole(self) -> frozenset[str]:
        """Keys of modules that peft's `modules_to_save` names, which are no part of an adapter."""
        named = self.settings.get(PEFT_PREFIX, {}).get("modules_to_save")
        keys = (key for key in self.tensors if key.startswith(PEFT_PREFIX) and not KEY.fullmatch(key)) if named else ()
        return frozenset(key for key in keys if key.isprintable() and len(key) <= LONGEST_NAME)

    def groups(self) -> dict[str, dict[str, Tensor]]:
        """Return {layer's name in the file: {end of a key: tensor}}."""
        groups: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self.tensors.items():
            if key in self.whole:
                continue
            found = _layer_and_end(key)
            if found is None:
                raise InputError(
                    f"{self.file}: {key!r:.80} is not understood; supported are {', '.join(SUPPORTED)}, without tucker "
                    "factors or rescaling"
                )
            layer, end = found
            if end in groups.setdefault(layer, {}):
                raise InputError(f"{self.file}: has '{layer}.{end}' for several adapters; save one of them")
            groups[layer][end] = tensor
        return groups


def _layer_and_end(key: str) -> tuple[str, str] | None:
    """Split a key into the layer's name and the end that names the tensor; None for one that is not understood."""
    if not key.isprintable() or len(key) > LONGEST_NAME:
        return None
    live = LIVE_KEY.fullmatch(key)
    found = KEY.fullmatch(key) or (KEY.fullmatch(f"{live['tensor']}{live['end'] or ''}") if live else None)
    return (found["layer"], found["end"]) if found else None


def _settings(file: Path, metadata: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """Read peft's configs from the file next to peft's weights, or from the metadata that diffusers writes."""
    config = file.with_name(PEFT_CONFIG)
    settings: dict[str, Mapping[str, Any]] = {}
    if file.name == PEFT_FILE and config.exists():
        own: dict[str, Any] = read_json(config, SETTINGS, "save the adapter again")
        settings[PEFT_PREFIX] = own
    try:
        pairs = SETTINGS.validate_json(metadata.get(DIFFUSERS_METADATA, "{}"))
    except ValidationError as error:
        raise InputError(
            f"{file}: its rank and alpha cannot be read ({first_problem(error)}); save it again"
        ) from error
    for name, value in pairs.items():
        component, _, field = name.partition(".")
        prefix = f"{component}."
        settings[prefix] = {**settings.get(prefix, {}), field: value}
    return settings


@dataclass(frozen=True)
class _Group:
    """The tensors of one layer in a file, by the ends of their keys. name: the layer's name in the file."""

    stored: _Stored
    name: str
    tensors: Mapping[str, Tensor]

    @property
    def is_corrected(self) -> bool:
        """Whether tensors are stored in ComfyUI's convention (`writer.DORA_CONVENTION`)."""
        follows = self.stored.metadata.get(DORA_CONVENTION) == "comfyui"
        return follows and self.reader.may_be_corrected(self.tensors)

    @cached_property
    def reader(self) -> Reader:
        ends = {end for end in self.tensors if end != "alpha"}
        for reader in READERS:
            if ends and ends <= reader.ends.keys() and reader.is_of(self._of(reader)):
                return reader
        kinds = {next(reader.kind for reader in READERS if end in reader.ends) for end in ends}
        found = f"tensors of {' and '.join(sorted(kinds))}" if kinds else "an alpha and nothing else"
        raise self.error(f"'{self.name}' has {found}; a layer takes one adapter")

    def adapter(self) -> LayerAdapter:
        """Return the adapter of the file's layer, which may stand for several layers of the model."""
        reader = self.reader
        try:
            tensors = reader.named(self.name, self._of(reader))
        except InputError as error:
            raise self.error(str(error)) from None
        self._check_complete(tensors)
        self._check_dimensions(tensors)
        if reader.is_scaled:
            return LayerAdapter(reader.kind, tensors, self._scale(reader.rank(tensors)))
        return LayerAdapter(reader.kind, reader.bounded(tensors, self._alpha()))

    def _of(self, reader: Reader) -> dict[str, Tensor]:
        return {reader.ends[end]: tensor for end, tensor in self.tensors.items() if end != "alpha"}

    def error(self, what: str) -> InputError:
        return InputError(f"{self.stored.file}: {what}")

    def _check_complete(self, tensors: Mapping[str, Tensor]) -> None:
        missing = set(min(self.reader.complete, key=lambda names: len(set(names) ^ tensors.keys()))) - tensors.keys()
        if missing:
            first = next(end for end in self.tensors if end != "alpha")
            styles = sorted(self.reader.styles, key=lambda style: first not in style)
            wanted = next(end for style in styles for end, name in style.items() if name in missing)
            raise self.error(f"'{self.name}' has {first} but no {wanted}; the file is incomplete")

    def _check_dimensions(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype not in FLOATS or not tensor.numel():
                what = f"{str(tensor.dtype).removeprefix('torch.')} ({_sizes(tensor)})"
                remedy = "save it in bf16" if tensor.numel() else "the file is damaged"
                raise self.error(f"'{self.name}': {name} is {what}, not floats of 16 to 64 bits; {remedy}")
            if not tensor.isfinite().all():
                raise self.error(f"'{self.name}': {name} holds numbers that are not finite; the file is damaged")
            if not self.reader.has_form(name, tensor.shape):
                raise self.error(f"'{self.name}': {name} ({_sizes(tensor)}) has another form; the file is damaged")

    def _scale(self, rank: int | None) -> float:
        """Return alpha / rank, from where this file stores it."""
        if "alpha" in self.tensors:
            return 1.0 if rank is None else self._alpha() / rank
        for prefix, settings in self.stored.settings.items():
            before, found, path = self.name.partition(prefix)
            if found and (not before or before.endswith(".")):
                return self._scale_in(settings, path)
        if self.name.startswith(PEFT_PREFIX):
            raise self.error(f"was saved by peft, but {PEFT_CONFIG}, which holds its alpha, is missing next to it")
        return 1.0

    def _alpha(self) -> float:
        alpha = self.tensors.get("alpha", torch.zeros(()))
        if alpha.numel() != 1 or alpha.is_complex() or not math.isfinite(float(alpha)):
            raise self.error(f"'{self.name}': alpha ({_sizes(alpha) or 'one'}) is not one finite number; save it again")
        return float(alpha)

    def _scale_in(self, settings: Mapping[str, Any], path: str) -> float:
        """Return a layer's scale from peft's config."""
        ranks, alphas = (settings.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
        try:
            rank = ranks.get(find_pattern(ranks, path), settings["r"])
            alpha = alphas.get(find_pattern(alphas, path), settings.get("lora_alpha", settings.get("alpha", rank)))
            scale = float(alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))
            if not math.isfinite(scale):
                raise ValueError(f"alpha {alpha!r:.20}, rank {rank!r:.20}")
        except (KeyError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
            raise self.error(
                f"'{self.name}': its rank and alpha cannot be read from peft's config ({error}); save it again"
            ) from error
        return scale


@dataclass(frozen=True)
class _ModelLayers:
    """The layers of the model that one layer of a file stands for: one layer, or several whose rows are stacked."""

    layers: tuple[str, ...]
    halves_swapped: bool = False


def _model_layers(shapes: Mapping[str, tuple[int, ...]], naming: Naming) -> dict[str, _ModelLayers]:
    """Return {name in a file: target} for all names that any program gives a layer of the model."""
    known: dict[str, _ModelLayers] = {}
    # A text encoder's own paths before the older ones, which may be another encoder's own.
    for names_of in (_names, _older_names):
        for layer in shapes:
            for name in names_of(layer, naming):
                known.setdefault(name, _ModelLayers((layer,)))
    for component, layout in naming.layouts.items():
        for fused in layout:
            layers = tuple(f"{component}.{part.removesuffix('.weight')}" for part in fused.parts)
            if shapes.keys() >= set(layers) and not fused.transposed:
                original = fused.name.removesuffix(".weight").removeprefix(ORIGINAL_PREFIX)
                for name in (
                    f"{PEFT_PREFIX}{original}",
                    f"diffusion_model.{original}",
                    *_kohya_names(component, original, naming),
                ):
                    known.setdefault(name, _ModelLayers(layers, fused.halves_swapped))
    return known


def _common_prefix(names: Iterable[str], known: Mapping[str, _ModelLayers]) -> str:
    """Return what stands before the names of layers that are not known, where it is the same for all of them.

    Programs put the names of what they wrap a model in before its layers' names: `diffusion_model.`, `module.`,
    `lora_transformer_`. A number in it would be that of another model's block. Empty where there is none.
    """
    found: set[str] = set()
    for name in names:
        if name not in known:
            separator = "." if "." in name else "_"
            ends = (at for at, letter in enumerate(name, 1) if letter == separator and name[at:] in known)
            found.add(name[: next(ends, 0)])
    prefix = found.pop() if len(found) == 1 else ""
    return "" if any(character.isdigit() for character in prefix) else prefix


def _names(layer: str, naming: Naming) -> Iterator[str]:
    """Yield the names that programs give a layer which they do not join with others."""
    component, _, path = layer.partition(".")
    yield from (layer, f"{PEFT_PREFIX}{path}", path, *_kohya_names(component, path, naming))
    if not component.startswith("text_encoder"):
        yield from (f"lycoris_{path}".replace(".", "_"), path.replace(".", "_"))


def _older_names(layer: str, naming: Naming) -> Iterator[str]:
    """Yield a text encoder layer's names from before transformers 5 removed `text_model` from its path."""
    component, _, path = layer.partition(".")
    if component.startswith("text_encoder"):
        yield from (f"{prefix}text_model.{path}" for prefix in (f"{component}.", PEFT_PREFIX, ""))


def _kohya_names(component: str, path: str, naming: Naming) -> Iterator[str]:
    if component in naming.kohya_prefixes:
        yield f"{naming.kohya_prefixes[component]}_{path}".replace(".", "_")


def _parts(
    group: _Group, whole: LayerAdapter, ours: _ModelLayers, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, LayerAdapter]]:
    """Yield the model's layers of a file's layer, each with its part of the adapter, unless that does nothing."""
    layers, reader = ours.layers, group.reader
    if len(layers) == 1 and not ours.halves_swapped:
        yield layers[0], whole
        return
    if not reader.by_rows:
        raise group.error(f"'{group.name}' is {' and '.join(layers)} of this model, and a {whole.kind} cannot be split")
    rows, shape = [shapes[layer][0] for layer in layers], shapes[layers[0]]
    expected, found = (sum(rows), math.prod(shape[1:])), reader.size(whole.tensors)
    if found != expected:
        raise group.error(_mismatch(group.name, found, expected))
    stacked = {name: whole.tensors[name] for name in reader.by_rows}
    if ours.halves_swapped:
        stacked = {name: torch.cat(tensor.chunk(2)[::-1]) for name, tensor in stacked.items()}
    by_rows = {name: torch.split(tensor, rows) for name, tensor in stacked.items()}
    for number, layer in enumerate(layers):
        part = {**whole.tensors, **{name: split[number] for name, split in by_rows.items()}}
        kept = part if len(rows) == 1 else reader.part(part)
        if kept is not None:
            yield layer, replace(whole, tensors=kept)


def _fitted(group: _Group, layer: str, adapter: LayerAdapter, shape: tuple[int, ...]) -> LayerAdapter:
    """Give the adapter as many dimensions as the layer's weight."""
    tensors, reader = adapter.tensors, group.reader
    for left, right in reader.products:
        if left in tensors and tensors[left][0].numel() != tensors[right].shape[0]:
            raise group.error(f"{_two(group, left, right, tensors)} cannot be multiplied; the file is damaged")
    for first, second, dim in reader.equal:
        if tensors[first].shape[dim] != tensors[second].shape[dim]:
            raise group.error(f"{_two(group, first, second, tensors)} are of different layers; the file is damaged")
    expected, found = (shape[0], math.prod(shape[1:])), reader.size(tensors)
    for name in reader.vectors:
        if len(tensors[name]) != shape[0]:
            raise group.error(f"'{group.name}': {len(tensors[name])} {name}s for {shape[0]} outputs")
    if found not in (expected, (shape[0], None)):
        raise group.error(_mismatch(layer, found, expected))
    return replace(adapter, tensors=reader.fitted(tensors, shape))


def _two(group: _Group, first: str, second: str, tensors: Mapping[str, Tensor]) -> str:
    return f"'{group.name}': {first} ({_sizes(tensors[first])}) and {second} ({_sizes(tensors[second])})"


def _uncorrected(group: _Group, adapter: LayerAdapter, weight: Tensor) -> LayerAdapter:
    rows = weight.float().flatten(1)
    turned = rows + adapter.update().flatten(1)
    return replace(adapter, tensors=group.reader.uncorrected(adapter.tensors, rows, turned))


def _unknown_layer(
    group: _Group, adapter: LayerAdapter, known: Mapping[str, _ModelLayers], shapes: Mapping[str, tuple[int, ...]]
) -> str:
    (near,) = difflib.get_close_matches(group.name, known, 1, cutoff=0.0)
    layer = known[near].layers[0]
    theirs, ours = _text(group.reader.size(adapter.tensors)), _text((shapes[layer][0], math.prod(shapes[layer][1:])))
    path = layer.partition(".")[2]
    if theirs == ours and group.name.replace(".", "_").endswith(f"_{path}".replace(".", "_")):
        return (
            f"{group.stored.file}: '{group.name}' ({theirs}) ends as the model's '{layer}' and has its size, but how "
            "it begins is not known, or not the same in the whole file; rename the tensors to begin with "
            f"'{layer.removesuffix(path)}'"
        )
    return (
        f"{group.stored.file}: '{group.name}' ({theirs}) is not a layer of this model, nearest: '{layer}' ({ours}); "
        "the file was made for another model"
    )


def _mismatch(layer: str, theirs: tuple[int, int | None], ours: tuple[int, int]) -> str:
    return f"the adapter of '{layer}' is for {_text(theirs)}, but its weight is {_text(ours)}; use the file's own model"


def _text(size: tuple[int, int | None]) -> str:
    return f"{size[0]} outputs" if size[1] is None else f"{size[0]} x {size[1]}"


def _sizes(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))
